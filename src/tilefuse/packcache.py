"""A model's packed layers, kept on disk: packed at the first start, mapped at the next.

A file of the cache is named by the contents of the checkpoint (SHA-256 of its tensor files and settings) and by how it
is packed, so it can't be taken for another's. Hashing gigabytes takes seconds, so the hashes are kept beside it, under
what the file system says of the files: device, inode, size, time of modification and of change. Any write moves the
time of change, which no program can set. A file that changed just before it was hashed may change again within a tick
of the clock; then its hash is not kept.

A packed file's own hash stands beside it with the same signature: as long as the file system vouches that nothing was
written since, it is mapped unread; otherwise it is hashed, and packed again if it differs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tilefuse import fusion
from tilefuse._buffers import aligned_empty
from tilefuse.errors import TileFuseError
from tilefuse.files import sha256, sha256_of, write_atomically
from tilefuse.formats import Checkpoint
from tilefuse.formats.safetensors_map import INDEX
from tilefuse.fusion import Product
from tilefuse.layout import DEFAULT_COLUMNS, FORMAT_VERSION
from tilefuse.packed import PackedLinear, pack
from tilefuse.storage import LayerSpec, PackedFile, PackedWriter

_log = logging.getLogger("tilefuse")

VERSION = 1
"""Bumped when the same checkpoint is packed otherwise."""

SETTLED = 2.0
"""Seconds since a file's last change after which another one can't have the same time: clocks tick in milliseconds, and
some file systems in whole seconds."""

Progress = Callable[[str, int, int], None]
"""Called as (what is being done, bytes done, bytes in all)."""


def default_folder() -> Path:
    """``$TILEFUSE_CACHE/packed``, else a folder of the user's cache."""
    given = os.environ.get("TILEFUSE_CACHE")
    if given:
        return Path(given) / "packed"
    from platformdirs import user_cache_path

    return Path(user_cache_path("tilefuse")) / "packed"


def packed_layers(
    checkpoint: Checkpoint,
    products: Sequence[Product],
    folder: Path | None,
    *,
    columns: int = DEFAULT_COLUMNS,
    progress: Progress | None = None,
) -> dict[str, PackedLinear]:
    """The packed layers of ``products``, by name: mapped from ``folder``, or packed, and kept there.

    A folder that can't be written, or a damaged file in it, is logged and done without.

    Args:
        checkpoint: Where they come from.
        products: See `tilefuse.fusion.products`.
        folder: The cache; None to pack into memory.
        columns: See `tilefuse.pack`.
        progress: See `Progress`.

    Raises:
        TileFuseError: What `Checkpoint.linear` and `tilefuse.pack` raise.
    """
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return _cached(checkpoint, products, folder, columns, progress)
        except OSError as error:
            _log.warning("packed weights are not kept: %s", error)
    specs = _specs(checkpoint, products, columns, progress)
    total, done, layers = sum(spec.layout.nbytes for spec in specs), 0, {}
    for product, spec in zip(products, specs, strict=True):
        _report(progress, "packing", done, total)
        layers[product.name] = pack(fusion.read(checkpoint, product), columns)
        done += spec.layout.nbytes
    _report(progress, "packing", done, total)
    return layers


def _cached(
    checkpoint: Checkpoint, products: Sequence[Product], folder: Path, columns: int, progress: Progress | None
) -> dict[str, PackedLinear]:
    contents = contents_hash(checkpoint, folder, progress)
    how = [VERSION, FORMAT_VERSION, columns, [[product.name, *product.parts, product.bits] for product in products]]
    key = sha256(json.dumps([contents, how]).encode())
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", checkpoint.path.name or "model")[:40]
    path = folder / f"{label}-{key[:32]}.tilefuse"
    found = _open(path, key, products, progress)
    if found is None:
        specs = _specs(checkpoint, products, columns, progress)
        total, done = sum(spec.layout.nbytes for spec in specs), 0
        buffer = aligned_empty(max((spec.layout.nbytes for spec in specs), default=0))
        with PackedWriter(path, specs, {"key": key, "checkpoint": checkpoint.path.name}) as writer:
            for product, spec in zip(products, specs, strict=True):
                _report(progress, "packing", done, total)
                writer.write(pack(fusion.read(checkpoint, product), columns, out=buffer[: spec.layout.nbytes]))
                done += spec.layout.nbytes
            _report(progress, "packing", done, total)
        _vouch(path, sha256_of(path))
        _log.info("packed weights are kept in %s", path)
        found = dict(PackedFile(path))
    return found


def _open(
    path: Path, key: str, products: Sequence[Product], progress: Progress | None
) -> dict[str, PackedLinear] | None:
    try:
        found = PackedFile(path)
        layers = dict(found)
    except FileNotFoundError:
        return None
    except TileFuseError as error:
        _log.warning("packed again, since what was kept can't be read: %s", error)
        return None
    if found.metadata.get("key") != key or list(found) != [product.name for product in products]:
        _log.warning("packed again, since %s is another checkpoint's", path)
        return None
    if not _is_intact(path, progress):
        _log.warning("packed again, since %s was written by something else", path)
        return None
    return layers


def _voucher(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _vouch(path: Path, digest: str) -> None:
    write_atomically(_voucher(path), json.dumps([digest, _signature(path)]).encode())


def _is_intact(path: Path, progress: Progress | None) -> bool:
    """Whether a packed file still holds what was written to it."""
    try:
        digest, signature = json.loads(_voucher(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, TypeError):
        return False
    if signature == _signature(path):
        return True
    total = path.stat().st_size
    _report(progress, "reading", 0, total)
    same = bool(sha256_of(path) == digest)
    _report(progress, "reading", total, total)
    if same:  # copied or moved here
        with contextlib.suppress(OSError):
            _vouch(path, digest)
    return same


def _specs(
    checkpoint: Checkpoint, products: Sequence[Product], columns: int, progress: Progress | None
) -> list[LayerSpec]:
    """All layers are validated before the first is packed."""
    specs = []
    for index, product in enumerate(products):
        _report(progress, "validating", index, len(products))
        specs.append(fusion.spec(checkpoint, product, columns))
    return specs


def _report(progress: Progress | None, what: str, done: int, total: int) -> None:
    if progress is not None:
        progress(what, done, total)


# --- contents ---------------------------------------------------------------------------------------------------------


def contents_hash(checkpoint: Checkpoint, folder: Path, progress: Progress | None = None) -> str:
    """SHA-256 over the tensor files, their index and the quantisation settings of a checkpoint.

    Args:
        checkpoint: Its files must not be written while this runs; where one was, its hash is not kept.
        folder: Where hashes are kept.
        progress: See `Progress`.

    Raises:
        OSError: A file can't be read.
    """
    files = sorted(checkpoint.files())
    index = files[0].parent / INDEX if files else None
    if index is not None and index.is_file():
        files.append(index)
    settings = json.dumps(checkpoint.quantization, sort_keys=True, default=str)
    before = [_signature(file) for file in files]
    kept = folder / f"{sha256(json.dumps([VERSION, before]).encode())[:32]}.contents"
    hashes = _kept_hashes(kept, len(files))
    if hashes is None:
        total = sum(file.stat().st_size for file in files)
        _report(progress, "reading", 0, total)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            hashes = list(pool.map(sha256_of, files))
        _report(progress, "reading", total, total)
        settled = all(time.time() - file.stat().st_ctime > SETTLED for file in files)
        if settled and [_signature(file) for file in files] == before:
            write_atomically(kept, json.dumps(hashes).encode())
    names = [file.name for file in files]
    return sha256(json.dumps([list(zip(names, hashes, strict=True)), settings]).encode())


def _signature(file: Path) -> list[str | int]:
    status = file.stat()
    place = str(file.resolve())
    return [place, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _kept_hashes(path: Path, count: int) -> list[str] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, list) or len(found) != count:
        return None
    good = [item for item in found if isinstance(item, str) and re.fullmatch("[0-9a-f]{64}", item)]
    return good if len(good) == count else None
