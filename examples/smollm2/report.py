"""The tables that `check_smollm2.py` prints."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

import tilefuse as tf
from smollm2.convert import Build, Variant
from smollm2.evaluate import Quality, Reply
from smollm2.llama import KINDS
from smollm2.measure import Calls, Errors, bytes_read, kind_of, total
from tilefuse import runtime


@dataclass(frozen=True)
class Shape:
    """The layers of one kind."""

    count: int
    k: int
    n: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of a packed model: what remains of a `Build` when its files are no longer mapped.

    Attributes:
        shapes: By kind of layer.
        checkpoint: Bytes of the AutoAWQ checkpoint, or None.
        packed: Bytes of the packed layers.
        read: Bytes of them that the CPU reads for one token; the rest is padding.
    """

    shapes: dict[str, Shape]
    checkpoint: int | None
    packed: int
    read: int

    @staticmethod
    def of(built: Build) -> Sizes:
        shapes = {}
        for kind in [*KINDS, "lm_head"]:
            alike = [layer for name, layer in built.layers.items() if kind_of(name) == kind]
            shapes[kind] = Shape(len(alike), alike[0].k, alike[0].n)
        files = built.checkpoint.iterdir() if built.checkpoint else None
        return Sizes(
            shapes,
            sum(file.stat().st_size for file in files) if files else None,
            sum(layer.nbytes for layer in built.layers.values()),
            sum(bytes_read(layer) for layer in built.layers.values()),
        )


@dataclass(frozen=True)
class Result:
    """All that was measured of one variant.

    Attributes:
        variant: What it is.
        sizes: Its sizes.
        gemm: Errors of `tilefuse.gemm` by kind of layer, on the passage.
        gemv: Errors of `tilefuse.gemv`, on its last token.
        prefill: Time in `tilefuse.gemm` for the passage.
        decode: Time in `tilefuse.gemv` for the answer.
        quality: How it predicts the passage.
        prefill_rate: Tokens a second through all blocks, in one call of the whole passage.
        reply: Its answer.
        resident: Bytes of the process in memory when it had answered, mapped files included.
    """

    variant: Variant
    sizes: Sizes
    gemm: dict[str, Errors]
    gemv: dict[str, Errors]
    prefill: dict[str, Calls]
    decode: dict[str, Calls]
    quality: Quality
    prefill_rate: float
    reply: Reply
    resident: int


def resident() -> int:
    """Bytes of this process that are in memory, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def where() -> str:
    """What the products run on."""
    cpus = [s.split(":", 1)[1].strip() for s in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in s]
    device = tf.default_device()
    if device != "cpu":
        return f"device {device}"
    kernels = f"{runtime.cpu_level()} kernels, {tf.get_num_threads()} threads"
    return f"device cpu: {cpus[0] if cpus else 'unnamed'}, {kernels}"


def layer_table(result: Result) -> Table:
    """One row a kind of layer: shape, error against the reference, speed."""
    table = Table(title=f"{result.variant.name}: {result.variant.about}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("layer")
    headings = ("count", "K", "N", "gemm max", "mean", "gemv max", "mean", "bound", "gemm GFLOP/s", "gemv GB/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for kind, shape in result.sizes.shapes.items():
        gemm, gemv = result.gemm[kind], result.gemv[kind]
        table.add_row(
            kind,
            *(str(value) for value in (shape.count, shape.k, shape.n)),
            *(f"{value:.1e}" for value in (gemm.max, gemm.mean, gemv.max, gemv.mean, gemm.bound)),
            f"{result.prefill[kind].gflops:.0f}",
            f"{result.decode[kind].gbytes:.1f}",
        )
    return table


def summary_table(results: list[Result], original: Quality) -> Table:
    """One row a variant: size, quality, speed."""
    table = Table(title="The whole model", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("weights")
    sizes, predictions = ("checkpoint", "packed", "read"), ("KL", "same top", "perplexity")
    for heading in (*sizes, *predictions, "prefill tok/s", "decode tok/s", "in gemv", "resident"):
        table.add_column(heading, justify="right")
    table.add_row("fp32", "", "", "", "0", "100.0%", f"{original.perplexity:.2f}", "", "", "", "")
    for result in results:
        sizes_of, reply = result.sizes, result.reply
        table.add_row(
            result.variant.name,
            megabytes(sizes_of.checkpoint) if sizes_of.checkpoint else "",
            megabytes(sizes_of.packed),
            megabytes(sizes_of.read),
            f"{result.quality.kl:.4f}",
            f"{result.quality.agreement:.1%}",
            f"{result.quality.perplexity:.2f}",
            f"{result.prefill_rate:.0f}",
            f"{reply.rate:.0f}",
            f"{total(result.decode.values()).seconds / reply.decode_seconds:.0%}" if reply.decode_seconds else "",
            megabytes(result.resident),
        )
    return table


def megabytes(count: int) -> str:
    """Bytes as MB of 10^6."""
    return f"{count / 1e6:.0f} MB"
