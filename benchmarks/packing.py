"""Packing a checkpoint: bytes of its file a second and core, beside copying the same bytes, and peak memory.

    python benchmarks/packing.py            # some 30 s; writes docs/benchmarks/packing.md
    python benchmarks/packing.py --print    # prints only

Method. A checkpoint of random codes in each format, 4 bits in groups of 128, the layers as large as the MLP's of a
model of 8 billion parameters. A pass opens the checkpoint, reads and validates every layer (`Checkpoint.linear`) and
packs it (`tilefuse.pack`); the file is in the page cache, and its pages are mapped anew in every pass. A copy maps the
file anew, too, and copies every tensor to one buffer, on one thread. Formats, ways and the copy take turns; medians
over rounds. Memory: `tilefuse.convert.pack_checkpoint`, which is what `tilefuse pack` runs, in a process of its own
whose anonymous memory (RssAnon) is read from outside all the time. Needs Linux, and 1 GB where temporary files go
(TMPDIR).
"""

from __future__ import annotations

import datetime
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
from made_checkpoints import AWQ, FORMATS, write_checkpoint
from measure import cpu_model, default_threads
from page import FOLDER, bullets, command, paragraph, table

import tilefuse as tf
from tilefuse._buffers import aligned_empty
from tilefuse.formats.safetensors_map import MappedFile
from tilefuse.packed import packed_nbytes

SHAPES = [(4096, 14336), (14336, 4096)] * 2
ROUNDS = 9

TARGET = 1.0
"""GB of an AutoAWQ checkpoint a second and core."""

MEMORY_TARGET = 2.0
"""Times the largest tensor, above the mapped file."""

# Its line says that all is imported and the threads have run.
PROGRAM = """
import sys
import numpy as np
import tilefuse as tf
from tilefuse.convert import pack_checkpoint
tf.pack(tf.quantize_linear(np.ones((128, 64), np.float32)))
print("ready", flush=True)
input()
pack_checkpoint(sys.argv[1], sys.argv[2])
"""


@dataclass(frozen=True)
class Found:
    """Of one format: bytes a second by way, bytes of the file and of its largest tensor, and peak memory."""

    rates: dict[str, float]
    ratio: float
    file_bytes: int
    tensor_bytes: int
    peak_bytes: int


def pack_all(folder: Path, buffer: npt.NDArray[np.uint8] | None) -> None:
    """One pass over a checkpoint, into ``buffer`` or into new memory."""
    checkpoint = tf.open_checkpoint(folder)
    for info in checkpoint.linears():
        layer = checkpoint.linear(info.name)
        tf.pack(layer, out=None if buffer is None else buffer[: packed_nbytes(layer)])


def copy_all(file: Path, buffer: npt.NDArray[np.uint8]) -> None:
    """Copies every tensor of a file to ``buffer``."""
    mapped = MappedFile(file)
    for name in mapped:
        raw = mapped.tensor(name).reshape(-1).view(np.uint8)
        np.copyto(buffer[: raw.size], raw)


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return 0 if found is None else 1024 * int(found[1])


def peak_memory(folder: Path, out: Path) -> int:
    """Most anonymous bytes that packing ``folder`` takes above what its process had before."""
    command = [sys.executable, "-c", PROGRAM, str(folder), str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise SystemExit("the process that packs did not start")
        before = peak = anonymous_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.0005)
    if process.returncode:
        raise SystemExit("the process that packs failed")
    return peak - before


def measure(folder: Path, rounds: int = ROUNDS, shapes: Sequence[tuple[int, int]] = SHAPES) -> dict[str, Found]:
    """Measures all formats; checkpoints go to ``folder``."""
    files = {form: write_checkpoint(folder / form, form, list(shapes)) for form in FORMATS}
    most = max(packed_nbytes_of(file.parent) for file in files.values())
    buffer = aligned_empty(2 * most)
    buffer[:] = 0
    threads = default_threads()
    ways: dict[str, tuple[int, Callable[[Path], object]]] = {
        "copy": (1, lambda file: copy_all(file, buffer)),
        "one": (1, lambda file: pack_all(file.parent, buffer)),
        "new": (1, lambda file: pack_all(file.parent, None)),
        "all": (threads, lambda file: pack_all(file.parent, buffer)),
    }
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for form, file in files.items():
            for way, (count, run) in ways.items():
                tf.set_num_threads(count)
                start = time.perf_counter()
                run(file)
                if turn:  # the first only warms up
                    times.setdefault((form, way), []).append(time.perf_counter() - start)
    found = {}
    for form, file in files.items():
        size = file.stat().st_size
        ratios = [copy / one for copy, one in zip(times[form, "copy"], times[form, "one"], strict=True)]
        mapped = MappedFile(file)
        found[form] = Found(
            rates={way: size / statistics.median(times[form, way]) for way in ways},
            ratio=statistics.median(ratios),
            file_bytes=size,
            tensor_bytes=max(mapped[name].nbytes for name in mapped),
            peak_bytes=peak_memory(file.parent, folder / "packed"),
        )
        (folder / "packed").unlink()
    return found


def packed_nbytes_of(folder: Path) -> int:
    """Bytes of the largest packed layer of a checkpoint."""
    checkpoint = tf.open_checkpoint(folder)
    return max(packed_nbytes(checkpoint.linear(info.name)) for info in checkpoint.linears())


def document() -> str:
    """The page, in Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        return page(measure(Path(folder)))


def page(found: dict[str, Found]) -> str:
    """The page of what was measured."""
    threads = default_threads()
    awq = found[AWQ]
    rows = []
    for form, each in found.items():
        rates = [f"{each.rates[way] / 1e9:.2f}" for way in ("one", "new", "all", "copy")]
        rows.append((form, *rates, f"{each.ratio:.2f}"))
    memory = [
        (form, _mb(each.file_bytes), _mb(each.tensor_bytes), _mb(each.peak_bytes), f"{_share(each):.2f}")
        for form, each in found.items()
    ]
    shapes = " and ".join(f"{k} x {n}" for k, n in dict.fromkeys(SHAPES))
    worst = max(map(_share, found.values()))
    parts: list[Any] = [
        "# Packing a checkpoint",
        paragraph(f"""Written by `python benchmarks/packing.py`; its head states the method. Measured, on a machine that
        is shared with whatever else runs there. Layers of {shapes}, 4 bits, groups of 128."""),
        paragraph(f"""Targets: {TARGET:g} GB/s a core of an AutoAWQ checkpoint; here it is
        {awq.rates["one"] / 1e9:.2f}. Less than {MEMORY_TARGET:g} times the largest tensor above the mapped file; here
        it is {worst:.2f} at most."""),
        bullets(
            [
                f"- {datetime.datetime.now(datetime.UTC).date().isoformat()}; {cpu_model()}, {threads} cores; "
                f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
                f"NumPy {np.__version__}, safetensors {safetensors.__version__}.",
            ]
        ),
        "## Speed",
        paragraph("""GB of the checkpoint's file a second. Into a buffer that is used again and again, as `tilefuse
        pack` does it, and into new memory, as `tf.pack` does it unless told otherwise, whose pages the system clears
        first. *Of a copy*: packing on one thread into the buffer, over copying all tensors there; median of the ratios
        within a round."""),
        table(
            ("", "1 thread", "1 thread, new memory", f"{threads} threads", "copy, 1 thread", "of a copy"),
            rows,
        ),
        "## Memory",
        paragraph("""The most anonymous memory while `tilefuse pack` runs, above what its process had before. Pages of
        the mapped file come on top where memory is free, and go where it is short."""),
        table(("", "file, MB", "largest tensor, MB", "peak, MB", "peak / largest tensor"), memory),
    ]
    return "\n\n".join(parts) + "\n"


def _share(found: Found) -> float:
    return found.peak_bytes / found.tensor_bytes


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the page; returns the exit code."""
    return command("Measure packing.", document, FOLDER / "packing.md", arguments)


if __name__ == "__main__":
    sys.exit(main())
