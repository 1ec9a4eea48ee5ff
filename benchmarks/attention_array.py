"""Attention on the emulated array: modelled times by length, heads and routing, and what bounds them.

    python benchmarks/attention_array.py            # writes docs/benchmarks/attention-array.md
    python benchmarks/attention_array.py --print    # prints it

The design runs on the emulated array for timing only (docs/emulated-array.md): kernels take the cycles that their host
build counts, streams carry 4 bytes a cycle, all shims share DRAM. Nothing is measured.
Takes a build with the emulator, and greenlet.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import page
from page import paragraph, table

from tilefuse import arch, shapes
from tilefuse.attention_configurations import KEY_TILE, ROW_TILE
from tilefuse.emulator.timing import Report
from tilefuse.plan import AttentionPlan
from tilefuse.tilemix import emulated

OUTPUT = page.FOLDER / "attention-array.md"

MODELS = {"Llama-3-8B": (32, 8, 128), "Llama-3.2-1B": (32, 8, 64), "SmolLM2-1.7B": (32, 32, 64)}
"""Heads of q, heads of k and v, size of a head."""

LENGTHS = (512, 2048)
"""Tokens; longer ones, which take the emulator minutes, are as the longest of these by `AttentionPlan.costs`."""

ROUTINGS = ("zero", "local_sink50", "local_sink75", "one")

ESTIMATED = (4096, 8192)
"""Tokens of the planner's own estimates."""

HEADER = (
    "model|tokens|routing|INT8 tiles|configuration|modelled|kernels|stream|DRAM|MAC/cycle|TFLOPS|over zero|bound by"
)


@dataclass(frozen=True)
class Timed:
    """A plan and what its run took."""

    plan: AttentionPlan
    report: Report

    @property
    def kernels(self) -> float:
        """Seconds that the busiest core is in kernels."""
        return max(core.kernel for core in self.report.cores) / arch.CLOCK_HZ

    @property
    def macs(self) -> float:
        """Products a cycle and core of the executed tiles, scores and outputs, over all the time."""
        return sum(self.plan.macs) / self.report.cycles / len(self.report.cores)


@cache
def timed(length: int, heads: int, kv_heads: int, d: int, routing: str, share: int | None = None) -> Timed:
    """One sequence of that many queries and keys, causal."""
    plan = shapes.attention_plan(length, length, heads, kv_heads, d, routing, share=share)
    return Timed(plan, emulated.time(plan))


def us(seconds: float) -> str:
    """Microseconds."""
    return f"{seconds * 1e6:.0f}"


def rows() -> Iterable[Sequence[str]]:
    """A row for each model, length and routing."""
    for model, (heads, kv_heads, d) in MODELS.items():
        for length in LENGTHS:
            plain = timed(length, heads, kv_heads, d, ROUTINGS[0])
            for routing in ROUTINGS:
                found = timed(length, heads, kv_heads, d, routing)
                config, costs = found.plan.configuration, found.plan.costs
                int8, wide = found.plan.counts
                yield (
                    model,
                    str(length),
                    routing,
                    f"{100 * int8 / (int8 + wide):.0f} %",
                    f"{config.blocks} head{'s' if config.blocks > 1 else ''}, {config.share} col",
                    us(found.report.array_seconds),
                    us(found.kernels),
                    us(costs.kv_stream),
                    us(costs.dram),
                    f"{found.macs:.0f}",
                    f"{2 * sum(found.plan.macs) / found.report.array_seconds / 1e12:.2f}",
                    f"{plain.report.array_seconds / found.report.array_seconds:.2f}x",
                    costs.bound,
                )


def estimates() -> Iterable[Sequence[str]]:
    """The planner's estimates of longer prompts: no emulation."""
    for model, (heads, kv_heads, d) in MODELS.items():
        for length in ESTIMATED:
            for routing in (ROUTINGS[0], "local_sink75"):
                plan = shapes.attention_plan(length, length, heads, kv_heads, d, routing)
                costs = plan.costs
                rate = 2 * sum(plan.macs) / costs.total / 1e12
                parts = (costs.total, costs.compute, costs.kv_stream, costs.dram)
                yield model, str(length), routing, *map(us, parts), f"{rate:.2f}", costs.bound


def sharing() -> Iterable[Sequence[str]]:
    """What columns that share a stream change, at the longest length."""
    heads, kv_heads, d = MODELS["Llama-3-8B"]
    for share in (1, 2, 4):
        found = timed(LENGTHS[-1], heads, kv_heads, d, "local_sink75", share)
        costs = found.plan.costs
        yield (
            str(share),
            us(found.report.array_seconds),
            us(found.kernels),
            us(costs.kv_stream),
            us(costs.dram),
            f"{found.report.dram_rate / 1e9:.0f}",
        )


def document() -> str:
    """The page."""
    parts = [
        "# The array: attention, modelled",
        paragraph(f"""Written by `python benchmarks/attention_array.py`. **Every figure here is modelled**: the design
        runs on the emulated array ([emulated-array.md](../emulated-array.md)); none is measured. Times are of the
        array, in microseconds, one sequence, causal, from the first command to the last result. A dispatch adds
        {us(arch.DISPATCH)} us, and packing q, k and v on the host is not in it."""),
        paragraph(f"""*configuration*: heads that a core takes past the same keys, and columns that share a stream of
        keys and values; the planner's choice. *kernels*: what the busiest core spends in kernels. *stream*: what the
        fullest stream of keys and values needs at 4 bytes a cycle. *DRAM*: what moving all bytes takes at
        {arch.DRAM_READ / 1e9:g} GB/s. *MAC/cycle*: products a cycle and core, q k' and P V, of the executed tiles of
        {ROW_TILE} x {KEY_TILE}. *over zero*: the same with all tiles in 16 bits."""),
        table(HEADER.split("|"), rows(), left=3),
        "## Longer prompts, by the planner",
        paragraph("""What the planner estimates, without latencies: the slowest part alone."""),
        table(
            ["model", "tokens", "routing", "estimate", "compute", "stream", "DRAM", "TFLOPS", "bound by"],
            estimates(),
            3,
        ),
        "## Columns that share a stream",
        paragraph(f"""Llama-3-8B, {LENGTHS[-1]} tokens, local_sink75. Four heads see the same keys; each column has
        heads of its own."""),
        table(["columns", "modelled", "kernels", "stream", "DRAM", "GB/s read"], sharing()),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    assert __doc__ is not None
    return page.command(__doc__.splitlines()[0], document, OUTPUT, arguments)


if __name__ == "__main__":
    sys.exit(main())
