"""From a checkpoint to a packed file: what ``tilefuse pack`` does."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tilefuse._buffers import aligned_empty
from tilefuse.errors import FormatError, UnsupportedFormatError
from tilefuse.formats import open_checkpoint
from tilefuse.layout import DEFAULT_COLUMNS
from tilefuse.packed import pack, packed_layout
from tilefuse.storage import LayerSpec, PackedWriter

Progress = Callable[[str, int, int], None]
"""Called as (layer, packed bytes done, packed bytes in all) before each layer, and once more at the end."""


@dataclass(frozen=True)
class Packed:
    """What `pack_checkpoint` did.

    Attributes:
        path: The file written.
        layers: Layers in it.
        resumed: Of those, the ones that an earlier, interrupted run had packed.
        skipped: Unquantised layers that were left out.
        nbytes: Packed bytes.
    """

    path: Path
    layers: int
    resumed: int
    skipped: int
    nbytes: int


def _selected(name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    wanted = not include or any(fnmatchcase(name, pattern) for pattern in include)
    return wanted and not any(fnmatchcase(name, pattern) for pattern in exclude)


def fingerprint(path: Path) -> list[list[str | int]]:
    """Name, size, modification time and header hash of each file of a checkpoint."""
    files = sorted([*path.glob("*.safetensors"), *path.glob("*.json")]) if path.is_dir() else [path]
    prints: list[list[str | int]] = []
    for file in filter(Path.is_file, files):
        status = file.stat()
        with file.open("rb") as stream:
            head = stream.read(8)
            length = min(int.from_bytes(head, "little"), status.st_size) if file.suffix == ".safetensors" else 1 << 20
            digest = hashlib.sha256(head + stream.read(length)).hexdigest()
        prints.append([file.name, status.st_size, status.st_mtime_ns, digest])
    return prints


def pack_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    columns: int = DEFAULT_COLUMNS,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    force: bool = False,
    resume: bool = True,
    progress: Progress | None = None,
) -> Packed:
    """Packs the quantised layers of a checkpoint into one file, one layer at a time.

    All layers are validated before the first is packed. Memory holds one packed layer above the mapped files. The work
    goes to ``<out>.partial``; when it is interrupted, the same call goes on after the last whole layer, provided that
    the checkpoint (names, sizes, times, headers) and the options are the same.

    Args:
        source: A checkpoint, as `open_checkpoint` takes it.
        out: The file to write.
        columns: See `pack`.
        include: Shell patterns of layer names to pack; all when empty.
        exclude: Shell patterns of layer names to leave out.
        force: Replace ``out`` if it exists.
        resume: Whether to go on from an interrupted run; otherwise start anew.
        progress: See `Progress`.

    Raises:
        UnsupportedFormatError: A selected layer is of a format that is not read.
        FormatError: ``out`` exists and ``force`` is not given, is not a regular file or is one of the checkpoint's, or
            no layer is selected.
        TileFuseError: Whatever `open_checkpoint`, `Checkpoint.linear` and `pack` raise.
    """
    source, out = Path(source), Path(out)
    if out.exists() and not force:
        raise FormatError(f"{out} exists; give another name, or --force to replace it")
    if out.exists() and not out.is_file():
        raise FormatError(f"{out} is not a regular file and is never replaced; give the name of a file")
    checkpoint = open_checkpoint(source)
    if out.exists() and any(out.samefile(file) for file in checkpoint.files()):
        raise FormatError(f"{out} is a file of the checkpoint itself and is never replaced; give another name")
    selected = [info for info in checkpoint.linears() if _selected(info.name, include, exclude)]
    for name, reason in checkpoint.refused().items():
        if _selected(name, include, exclude):
            raise UnsupportedFormatError(f"{reason}; or leave it out with --exclude {name!r}")
    names = [info.name for info in selected if info.quantized]
    if not names:
        raise FormatError(
            f"{source}: none of its linear layers is quantised and selected; `tilefuse inspect` lists them"
        )
    specs = []
    for name in names:
        layer = checkpoint.linear(name)
        layout = packed_layout(layer, columns)
        specs.append(LayerSpec(name, layout, layer.bias is not None, layer.perm is not None, layer.format))

    key = json.dumps([fingerprint(source), columns, list(include), list(exclude)])
    total, done = sum(spec.layout.nbytes for spec in specs), 0
    if not resume:
        out.with_name(out.name + ".journal").unlink(missing_ok=True)
    with PackedWriter(out, specs, {"checkpoint": source.name}, resume_key=key) as writer:
        resumed = len(writer.done)
        # One buffer for all: its pages are touched once.
        buffer = aligned_empty(max(spec.layout.nbytes for spec in specs))
        for spec in specs:
            if progress is not None:
                progress(spec.name, done, total)
            if spec.name not in writer.done:
                writer.write(pack(checkpoint.linear(spec.name), columns, out=buffer[: spec.layout.nbytes]))
            done += spec.layout.nbytes
        if progress is not None:
            progress("", done, total)
    return Packed(out, len(specs), resumed, len(selected) - len(names), total)
