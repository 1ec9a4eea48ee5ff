"""One row of x through weights that were loaded from a packed file: mapped or copied, in huge pages or not.

    python benchmarks/loading.py            # some 40 s; writes docs/benchmarks/loading.md
    python benchmarks/loading.py --print    # prints only

Method. A packed file of four layers, 123 MB, larger than most last-level caches; every state has files of its own,
because their places in memory count. `tf.gemv` goes through all layers, bfloat16, all threads; states and a probe that
reads huge pages of this process take turns, every round starting with another state; medians over rounds and files. The
share in huge pages is what the kernel says of the mapping (/proc/self/smaps). The first pass is that of a new
`tilefuse.load`, which reads from the disk where the file is not in the page cache. Needs Linux, and a file system on a
disk with 4 GB where temporary files go (TMPDIR).
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
from made_checkpoints import GPTQ, write_checkpoint
from measure import PROBE_BYTES, cpu_model, default_threads, last_level_cache_bytes
from page import FOLDER, bullets, command, paragraph, table

import tilefuse as tf
from tilefuse import _core
from tilefuse._buffers import address
from tilefuse.convert import pack_checkpoint
from tilefuse.formats.safetensors_map import MappedFile
from tilefuse.packed import PackedLinear
from tilefuse.storage import PackedFile

SHAPES = [(4096, 14336), (14336, 4096)] * 2
FILES = 6
ROUNDS = 40

_PIECE = 128 << 10  # what cp and most downloads write at once

Layers = list[PackedLinear]


@dataclass
class State:
    """How a file came to be mapped, and what was measured of its mappings."""

    title: str
    prepare: Callable[[Path, Path], object]
    load: Callable[[Path], Layers]
    layers: list[Layers] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    huge: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)


def copy_in_pieces(source: Path, path: Path) -> None:
    """Copies a file as `cp` does."""
    with source.open("rb") as reader, path.open("wb") as writer:
        shutil.copyfileobj(reader, writer, _PIECE)


def forget(source: Path, path: Path) -> None:
    """Copies a file and has the system drop its pages."""
    copy_in_pieces(source, path)
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def mapped(path: Path) -> Layers:
    """As `tilefuse.load` gives them."""
    return list(tf.load(path).values())


def copied(path: Path) -> Layers:
    """As `tilefuse.load` gives them with ``copy=True``."""
    return list(tf.load(path, copy=True).values())


def mapped_plainly(path: Path) -> Layers:
    """Views of a mapping for which no huge pages were asked."""
    file = MappedFile(path)
    return [PackedLinear(name, spec.layout, file.tensor(name)) for name, spec in PackedFile(path).specs.items()]


def states(checkpoint: Path) -> list[State]:
    """The states; the last is what the others are compared with."""

    def pack(_: Path, path: Path) -> None:
        pack_checkpoint(checkpoint, path)

    return [
        State("written by `tilefuse pack` just now, `tf.load`", pack, mapped),
        State("copied by a program that writes 128 KiB at once, `tf.load`", copy_in_pieces, mapped),
        State("read from the disk by the first pass, `tf.load`", forget, mapped),
        State("the same, without asking for huge pages", forget, mapped_plainly),
        State("`tf.load(copy=True)`, from the page cache", copy_in_pieces, copied),
    ]


def in_huge_pages(layers: Layers) -> float:
    """Share of the mapped memory around ``layers`` that is in huge pages, as far as it is present."""
    places = [address(layer.data) for layer in layers]
    inside, present, huge = False, 0, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = int(found[1], 16), int(found[2], 16)
            inside = any(begin <= place < end for place in places)
        elif inside and (found := re.match(r"(Rss|AnonHugePages|ShmemPmdMapped|FilePmdMapped): +(\d+) kB", line)):
            if found[1] == "Rss":
                present += int(found[2])
            else:
                huge += int(found[2])
    return huge / present if present else 0.0


def one_pass(layers: Layers, rows: dict[int, np.ndarray]) -> float:
    """Seconds of one product a layer."""
    start = time.perf_counter()
    for layer in layers:
        tf.gemv(rows[layer.k], layer)
    return time.perf_counter() - start


def measure(
    folder: Path, shapes: Sequence[tuple[int, int]] = SHAPES, files: int = FILES, rounds: int = ROUNDS
) -> tuple[list[State], list[float], int]:
    """The states measured, what the probe read a second, and the packed bytes of a file."""
    checkpoint = write_checkpoint(folder / "model", GPTQ, list(shapes)).parent
    source = folder / "source"
    pack_checkpoint(checkpoint, source)
    rng = np.random.default_rng(0)
    rows = {k: rng.standard_normal(k).astype(ml_dtypes.bfloat16) for k, _ in shapes}
    found = states(checkpoint)
    for index in range(files):
        for place, state in enumerate(found):
            path = folder / f"{place}-{index}"
            state.prepare(source, path)
            start = time.perf_counter()
            layers = state.load(path)
            one_pass(layers, rows)
            state.first.append(time.perf_counter() - start)
            state.layers.append(layers)
            state.huge.append(in_huge_pages(layers))
    probe = _core.ReadProbe(PROBE_BYTES // 4)
    reads: list[float] = []
    nbytes = sum(layer.nbytes for layer in found[0].layers[0])
    for turn in range(rounds + 1):
        reads.append(probe.run())
        for place in range(len(found)):
            state = found[(place + turn) % len(found)]
            state.rates.append([nbytes / one_pass(layers, rows) for layers in state.layers])
    for state in found:
        del state.rates[0]  # warmed up
    return found, reads[1:], nbytes


def document() -> str:
    """The page, in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        return page(*measure(Path(folder)))


def page(found: Sequence[State], reads: Sequence[float], nbytes: int) -> str:
    """The page of what was measured."""
    best = found[-1]
    rows = []
    for state in found:
        flat = [rate for turn in state.rates for rate in turn]
        files = [statistics.median(each) for each in zip(*state.rates, strict=True)]
        ratio = statistics.median(
            statistics.mean(turn) / statistics.mean(other) for turn, other in zip(state.rates, best.rates, strict=True)
        )
        rows.append(
            (
                state.title,
                _spread([f"{share:.0%}" for share in sorted(state.huge)]),
                f"{statistics.median(flat) / 1e9:.1f}",
                _spread([f"{rate / 1e9:.1f}" for rate in sorted(files)]),
                f"{ratio:.2f}",
                f"{statistics.median(state.first):.2f}",
            )
        )
    probe = statistics.median(reads) / 1e9
    parts = [
        "# Weights from a packed file",
        paragraph(f"""Written by `python benchmarks/loading.py`; its head states the method. Measured, M = 1,
        {nbytes / 1e6:.0f} MB of packed weights in {len(found[0].layers[0])} layers. *Of a copy*: over the last line,
        median of the ratios within a round."""),
        bullets(
            [
                f"- {datetime.datetime.now(datetime.UTC).date().isoformat()}; {cpu_model()}, "
                f"{default_threads()} threads, last-level cache {last_level_cache_bytes() >> 20} MiB; "
                f"{platform.system()} {platform.release()}, temporary files on {_file_system(tempfile.gettempdir())}; "
                f"Python {platform.python_version()}, NumPy {np.__version__}.",
                f"- Huge pages here: `{_setting('enabled')}`. Reading them, in the same rounds: {probe:.1f} GB/s.",
            ]
        ),
        table(
            ("", "in huge pages", "GB/s", f"each of {FILES} files", "of a copy", "first pass, s"),
            rows,
        ),
        EXPLANATION,
    ]
    return "\n\n".join(parts) + "\n"


EXPLANATION = "\n\n".join(
    map(
        paragraph,
        (
            """What `tf.load` does. By default it maps the file and asks for huge pages (`MADV_HUGEPAGE`), which costs
            nothing. Where the file system keeps large pieces in the page cache (ext4 from Linux 6.16, XFS, Btrfs), the
            kernel then reads what it does not have yet in pieces of 2 MiB, as far as it finds that much free in one
            place, and maps each by one entry. What is in the page cache already stays as it came there.
            `MADV_COLLAPSE`, which would move it, is refused on files by kernels built without
            `CONFIG_READ_ONLY_THP_FOR_FS`, as the one here is.""",
            """`tf.load(path, copy=True)` reads everything at once to anonymous memory in huge pages, one piece for all
            layers. For these the kernel makes room where it must, whatever the file system; so its speed is the most
            dependable. It takes that memory beside the page cache's, shares it with no other process, and may be
            overwritten. Take it where weights are loaded once and decode for long; the mapping, which is the default,
            where several processes share a model, or memory is short. `tf.pack` without `out` allocates such memory,
            too.""",
        ),
    )
)


def _spread(values: Sequence[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _setting(name: str) -> str:
    try:
        return Path(f"/sys/kernel/mm/transparent_hugepage/{name}").read_text().strip()
    except OSError:
        return "unknown"


def _file_system(folder: str) -> str:
    """Type of the file system that holds ``folder``."""
    best, kind = "", "an unknown file system"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, name, *_ = line.split()
        if len(place) >= len(best) and (os.path.realpath(folder) + "/").startswith(place.rstrip("/") + "/"):
            best, kind = place, name
    return kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the page; returns the exit code."""
    return command("Measure products from loaded weights.", document, FOLDER / "loading.md", arguments)


if __name__ == "__main__":
    sys.exit(main())
