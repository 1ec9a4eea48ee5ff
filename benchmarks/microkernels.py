"""What each AIE2P kernel issues and what that comes to in cycles: modelled, from the host build's counts.

    python benchmarks/microkernels.py                      # writes docs/benchmarks/kernels.md
    python benchmarks/microkernels.py --print              # prints it

Method. The kernels run on this machine, from the sources that the device compiler takes (`tilefuse.emulator.kernels`),
and count the instructions of each issue slot. A region of a kernel - a loop, or the straight code after it - takes as
many cycles as its busiest slot has instructions, and a fill of the pipeline each time it is entered; a kernel is the
sum of its regions. That is what a perfect schedule takes: the compiler may spill, stall or fail to overlap. Nothing is
measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import page
from page import paragraph, table

from tilefuse.arch import STREAM_BYTES
from tilefuse.configurations import BAND_BYTES
from tilefuse.emulator import kernels
from tilefuse.emulator.kernels import HostKernel, Slots
from tilefuse.layout import KT, NT, Layout, ZeroKind

OUTPUT = page.FOLDER / "kernels.md"

ROWS = 64
"""Rows of activations that a GEMM multiplies a tile of weights with; smaller bands repeat."""

WEIGHTS = KT * NT
MACS = ROWS * WEIGHTS

BF16_MMUL_MV, BF16_MMUL_MACS = 42, 512
"""Shuffles and broadcasts, and products, of the device library's bfloat16 8x8x8 without bfp16; MV bounds it."""

PUBLISHED_GEMM = 80.0
"""MAC/cycle/core of the published fused bfp16 kernel."""
PUBLISHED_GEMV = 3.7
"""Weights/cycle/core of the published 4-bit projection kernel (512 weights in 140 bundles)."""


@dataclass(frozen=True)
class Cost:
    """A call of an entry point, all regions together."""

    cycles: int
    slots: Slots
    busiest: str
    """The slot that bounds the region that takes longest."""


def add(regions: Iterable[Slots]) -> Slots:
    """Instructions of several regions."""
    total = Slots()
    for r in regions:
        entries = total.entries + r.entries
        total = Slots(
            total.load + r.load, total.ldb + r.ldb, total.st + r.st, total.mv + r.mv, total.vec + r.vec, entries
        )
    return total


def busiest_slot(slots: Slots) -> str:
    """Name of the unit that bounds ``slots``."""
    needs = {
        "VEC": slots.vec,
        "MV": slots.mv,
        "ST": slots.st,
        "LDB": slots.ldb,
        "loads": -(-(slots.load + slots.ldb) // 2),
    }
    return max(needs, key=lambda name: needs[name])


@cache
def cost(name: str, stem: str = "") -> Cost:
    """What a call issues, on random codes, scales and zero points (a kernel may skip what equal zero points allow)."""
    rng = np.random.default_rng(0)
    entry = kernels.get(name).entry_points[stem]
    arrays: list[Any] = []
    for argument in entry.arguments:
        if argument.by_value:
            arrays.append(0)
            continue
        shape = [abs(extent) for extent in argument.shape]  # one item of what may have any number
        values = rng.integers(0, 16, shape) if argument.dtype == np.uint8 else rng.normal(size=shape)
        arrays.append(argument.copy_of(values))
    regions = entry.count(*arrays)
    longest = max(regions.values(), key=lambda slots: slots.cycles)
    return Cost(sum(slots.cycles for slots in regions.values()), add(regions.values()), busiest_slot(longest))


def tile_bytes(kernel: HostKernel) -> int:
    """Bytes of a tile of the kernel's weights."""
    if kernel.bits == 16:
        return 2 * WEIGHTS
    zero = ZeroKind.M16 if kernel.minima else ZeroKind.Z8
    return Layout(k=KT, n=NT, bits=kernel.bits, group=kernel.group, zero=zero).tile_bytes


def l1_bytes(kernel: HostKernel) -> int:
    """Bytes of a core's memory that the kernel's buffers take, those of the streams twice."""
    tile = 2 * tile_bytes(kernel) * kernel.tiles + kernel.scratch_bytes
    if kernel.activation == "bfp16":
        # The sums of 64 rows; results leave in bands of 16 rows by 64 channels.
        return tile + 2 * BAND_BYTES + ROWS * NT * 4 * kernel.tiles + 2 * kernel.m * NT * 2
    if kernel.op == "gemv":
        return tile + 2 * KT * 2 + NT * 4 + 2 * NT * 4 + 2 * NT * 2  # x, acc, the row above's sums, y
    # The accumulator is 64 rows whatever the band; results leave in chunks of 8 rows.
    return tile + 2 * kernel.m * KT * 2 + ROWS * NT * 4 + 2 * 8 * NT * 2


def gemm_cycles(kernel: HostKernel) -> int:
    """Cycles of the weights of a call by `ROWS` rows, preparation included."""
    return cost(kernel.name, "prepare").cycles + ROWS // kernel.m * cost(kernel.name).cycles


def all_kernels(op: str, activation: str = "bf16") -> list[HostKernel]:
    """The kernels of an operation and kind of activation, quantised ones first, by path, bits and group."""
    everything = [kernels.get(name) for name in kernels.names()]
    listed = [kernel for kernel in everything if (kernel.op, kernel.activation) == (op, activation)]
    return sorted(listed, key=lambda k: (k.bits == 16, k.path, k.bits, k.group, k.minima, k.m, k.tiles, k.d))


def slots_text(slots: Slots) -> list[str]:
    """Loads, unpacks, stores, moves, multiplications."""
    return [str(n) for n in (slots.load, slots.ldb, slots.st, slots.mv, slots.vec)]


SLOT_NAMES = ["loads", "LDB", "ST", "MV", "VEC"]

ATTENTION_ROWS, ATTENTION_KEYS = 32, 64
"""Of a call of the attention kernels."""

PEAK = 512
"""Products a cycle of INT8 and of bfp16."""


def attention_tile(d: int, *, int8: bool, masked: bool = False, grown: bool = False) -> dict[str, Cost]:
    """What a tile of keys takes, by call, in their order.

    Args:
        d: Channels of a head.
        int8: Whether its scores are INT8.
        masked: Whether every row misses a key of it.
        grown: Whether the maximum of a row of each block grows.
    """
    kernel = kernels.get(f"attention_bf16_d{d}_{ATTENTION_ROWS}x{ATTENTION_KEYS}")
    entries = kernel.entry_points
    arrays: dict[str, Any] = {}
    for entry in entries.values():
        arrays |= {a.name: a.copy_of(np.zeros(a.shape)) for a in entry.arguments if not a.by_value}
    arrays["q"].view(np.int32)[3:5] = ATTENTION_KEYS - masked, np.iinfo(np.int32).max
    entries["begin"](arrays["state"], arrays["o"])
    if not grown:
        arrays["state"][:ATTENTION_ROWS] = 1
    calls = [("scores_int8", 0)] if int8 else [("scores_bf16", 0), ("scores_bf16", 1)]
    found = {}
    for stem, half in [*calls, ("softmax", 0), ("values", 0), ("values", 1)]:
        given = [half if a.by_value else arrays[a.name] for a in entries[stem].arguments]
        regions = entries[stem].count(*given)
        longest = max(regions.values(), key=lambda slots: slots.cycles)
        total = sum(slots.cycles for slots in regions.values())
        found[f"{stem} {half}"] = Cost(total, add(regions.values()), busiest_slot(longest))
    return found


def attention_calls() -> str:
    """A row for each function of a tile."""
    rows = []
    for k in all_kernels("attention"):
        int8, wide = attention_tile(k.d, int8=True), attention_tile(k.d, int8=False)
        grown = attention_tile(k.d, int8=True, grown=True)
        masked = attention_tile(k.d, int8=True, masked=True)
        listed = {
            "scores_int8": int8["scores_int8 0"],
            "scores_bf16, half 0": wide["scores_bf16 0"],
            "scores_bf16, half 1": wide["scores_bf16 1"],
            "softmax of INT8 scores": int8["softmax 0"],
            "softmax of 16-bit scores": wide["softmax 0"],
            "softmax, masked": masked["softmax 0"],
            "softmax, maxima grow": grown["softmax 0"],
            "values, a half": int8["values 0"],
            "values, a half, maxima grow": grown["values 0"],
        }
        for what, c in listed.items():
            rows.append([f"`{k.name}`", what, *slots_text(c.slots), str(c.cycles), c.busiest])
    return table(["kernel", "call", *SLOT_NAMES, "cycles", "longest loop bound by"], rows)


def attention_table() -> str:
    """A row for each kind of tile."""
    rows = []
    for k in all_kernels("attention"):
        # Keys, and values twice, or keys twice; 72 d bytes and 64 each.
        products = 2 * ATTENTION_ROWS * ATTENTION_KEYS * k.d
        for int8 in (True, False):
            cycles = [
                sum(c.cycles for c in attention_tile(k.d, int8=int8, **how).values())
                for how in ({}, {"grown": True}, {"masked": True, "grown": True})
            ]
            stream = (3 if int8 else 4) * (72 * k.d + 64) // STREAM_BYTES
            share = products / cycles[0] / PEAK
            rows.append(
                [
                    f"{k.d}",
                    "INT8" if int8 else "16-bit",
                    *map(str, cycles),
                    f"{products / cycles[0]:.0f}",
                    f"{share:.0%}",
                    str(stream),
                ]
            )
    header = "d, scores, cycles, maxima grow, and masked, MAC/cycle, of the peak, stream"
    return table(header.split(", "), rows)


def gemv_table() -> str:
    """A row for each GEMV kernel."""
    rows = []
    for k in all_kernels("gemv"):
        multiply, prepare = cost(k.name), cost(k.name, "prepare")
        rows.append(
            [
                f"`{k.name}`",
                *slots_text(multiply.slots),
                str(multiply.cycles),
                multiply.busiest,
                f"{WEIGHTS / multiply.cycles:.1f}",
                str(prepare.cycles),
                f"{WEIGHTS / (multiply.cycles + prepare.cycles):.1f}",
                f"{WEIGHTS / (tile_bytes(k) / STREAM_BYTES):.1f}",
                f"{l1_bytes(k) / 1024:.1f}",
            ]
        )
    header = "cycles, bound by, weights/cycle, prepare, with prepare, stream, L1 KiB"
    return table(["kernel", *SLOT_NAMES, *header.split(", ")], rows)


def gemm_table(activation: str) -> str:
    """A row for each GEMM kernel of that kind of activation."""
    rows = []
    for k in all_kernels("gemm", activation):
        multiply, prepare = cost(k.name), cost(k.name, "prepare")
        rows.append(
            [
                f"`{k.name}`",
                *slots_text(multiply.slots),
                str(multiply.cycles),
                multiply.busiest,
                f"{MACS * k.tiles * k.m / ROWS / multiply.cycles:.0f}",
                str(prepare.cycles),
                prepare.busiest,
                f"{MACS * k.tiles / gemm_cycles(k):.0f}",
                f"{l1_bytes(k) / 1024:.1f}",
            ]
        )
    header = "cycles, bound by, MAC/cycle, prepare, bound by, with prepare, L1 KiB"
    return table(["kernel", *SLOT_NAMES, *header.split(", ")], rows)


def band_table() -> str:
    """A row for each GEMM kernel of bfp16 activations: `gemm_table`, and what the stream of activations allows."""
    lines = gemm_table("bfp16").splitlines()
    channel = [f"{MACS * k.tiles * k.m / ROWS / (BAND_BYTES / STREAM_BYTES):.0f}" for k in all_kernels("gemm", "bfp16")]
    cells = ["channel", "---:", *channel]
    return "\n".join(
        f"{line}{cell}|" if cell.startswith("-") else f"{line} {cell} |"
        for line, cell in zip(lines, cells, strict=True)
    )


def gemv_ladder(bits: int, group: int) -> str:
    """Step by step from one weight at a time to the default path."""
    w = f"w{bits}g{group}"
    dequantise = cost(f"gemm_bf16_{w}_emulated_64x128x64", "prepare").cycles
    dense = cost("gemv_bf16_bf16_elementwise_128x64").cycles
    fused = cost(f"gemv_bf16_{w}_elementwise_128x64").cycles
    mantissa = cost(f"gemv_bf16_{w}_mantissa_128x64").cycles
    scalar = (5 if bits == 4 else 3) * WEIGHTS
    steps = [
        ("scalar", "one weight at a time (counted by hand, a lower bound)", scalar),
        ("vector unpack", "the tile dequantised to bfloat16 in memory, then the bfloat16 GEMV", dequantise + dense),
        ("fused", "unpacked and multiplied in one loop, scale and zero point folded per group", fused),
        ("mantissa", "codes as bfp16 mantissas, x in four rows", mantissa),
    ]
    return ladder(steps, "weights/cycle", WEIGHTS, PUBLISHED_GEMV)


def gemm_ladder(bits: int, group: int) -> str:
    """The same for GEMM, on tiles of 64x128x64."""
    w = f"w{bits}g{group}"
    fused = kernels.get(f"gemm_bf16_{w}_emulated_64x128x64")
    prepare = cost(fused.name, "prepare").cycles
    scalar = 2 * MACS + (5 if bits == 4 else 3) * WEIGHTS
    unpacked = prepare + BF16_MMUL_MV * MACS // BF16_MMUL_MACS
    steps = [
        ("scalar", "one product at a time (counted by hand, a lower bound)", scalar),
        ("vector unpack", "bfloat16 8x8x8 multiplications without bfp16", unpacked),
        ("fused", "both operands converted to bfp16 by every multiplication", gemm_cycles(fused)),
        ("fused-bfp16", "weights dequantised to bfp16 once a tile", gemm_cycles(kernels.get(bfp16_name(w)))),
        ("mantissa", "codes as bfp16 mantissas, scales on the sums", gemm_cycles(kernels.get(mantissa_name(w)))),
        ("bands", "the same, activations converted by the host", gemm_cycles(kernels.get(band_name(w)))),
    ]
    return ladder(steps, "MAC/cycle", MACS, PUBLISHED_GEMM)


def bfp16_name(weights: str) -> str:
    """Of the GEMM kernel of path (b)."""
    return f"gemm_bf16_{weights}_bfp16_64x128x64"


def mantissa_name(weights: str) -> str:
    """Of the GEMM kernel of path (c)."""
    return f"gemm_bf16_{weights}_mantissa_64x128x64"


def band_name(weights: str) -> str:
    """Of the GEMM kernel of path (c) whose activations arrive as bfp16."""
    return f"gemm_bfp16_{weights}_mantissa_16x128x64"


def ladder(steps: Sequence[tuple[str, str, int]], unit: str, work: int, published: float) -> str:
    """A table of steps, each against the one above and the published figure."""
    rows, before = [], 0
    for name, what, cycles in steps:
        gain = f"{before / cycles:.1f}x" if before else ""
        per_cycle = work / cycles
        rows.append([f"{name}: {what}", str(cycles), f"{per_cycle:.3g}", gain, f"{per_cycle / published:.2g}x"])
        before = cycles
    return table(["step", "cycles a tile", unit, "over the step above", f"over the published {published:g}"], rows)


def document() -> str:
    """The page."""
    parts = [
        "# Kernels: instructions and cycles, modelled",
        paragraph("""Written by `python benchmarks/microkernels.py`. **Every figure here is modelled**: counted on the
        host build, none is measured. [kernels.md](../kernels.md) says what the kernels do and how to read the
        figures."""),
        paragraph(f"""A tile of weights is {KT} input by {NT} output channels: {WEIGHTS} weights, {MACS} products with
        {ROWS} rows. A region takes what its busiest slot needs, and {kernels.PIPELINE_FILL} cycles to fill the pipeline
        each time that it is entered. *loads* go to either load unit, two a cycle; *LDB* are unpacks, on one of the two.
        *With prepare*: `prepare` in every call, as when x (GEMV) or the weights (GEMM) come anew for each tile."""),
        "## GEMV: the ladder",
    ]
    for bits in (4, 8):
        parts += [f"{bits}-bit weights, groups of 128, x already prepared:", gemv_ladder(bits, 128)]
    parts += [
        paragraph("""Scalar: with one scalar unit, at least a shift and a mask (4 bits), a conversion, a product and a
        sum a weight. The published figure is 512 4-bit weights in 140 instruction bundles. A stream brings 8 codes of 4
        bits a cycle, so one stream a core, or two, are slower than the mantissa path: what is gained is head-room for
        `prepare`, for small groups and for schedules that are not perfect."""),
        "## GEMV: each kernel",
        "*stream*: weights a cycle that one stream of 4 bytes a cycle brings, scales and zero points included.",
        gemv_table(),
        "## GEMM: the ladder",
    ]
    for bits in (4, 8):
        title = f"{bits}-bit weights, groups of 128, a {ROWS}x{KT}x{NT} tile, preparation included:"
        parts += [title, gemm_ladder(bits, 128)]
    parts += [
        paragraph(f"""Vector unpack: the device library's bfloat16 8x8x8 without bfp16 takes {BF16_MMUL_MV} shuffles and
        broadcasts for {BF16_MMUL_MACS} products (its slot table, no kernel of ours). The published figure is that of
        the fused bfp16 reference kernel."""),
        "## GEMM: each kernel",
        paragraph("""Slots and cycles are those of one band of the kernel's own rows. L1 has two bands of activations; a
        core's 64 KiB also hold its stack, so a band of 64 rows needs activations that are not double-buffered."""),
        gemm_table("bf16"),
        "## GEMM: each kernel of bfp16 activations",
        paragraph(f"""Bands of 16 rows. *With prepare*: four bands, {ROWS} rows, use what `prepare` made; their sums are
        in the L1 bytes. `16x128x128`: two packed tiles side by side. *channel*: products a cycle that one channel of
        {STREAM_BYTES} bytes a cycle lets a core do when each band of activations meets these output channels once."""),
        band_table(),
        "## Attention: a tile of keys",
        paragraph(f"""{ATTENTION_ROWS} query rows of a core by {ATTENTION_KEYS} keys, scores, softmax and values:
        {2 * ATTENTION_ROWS * ATTENTION_KEYS} d products. *Peak*: {PEAK} products a cycle, of INT8 and of bfp16 alike.
        *Maxima grow*: in each block of 8 rows that of some row does, so that its sums and outputs are rescaled: in the
        first tile, and later the less often the more keys have passed. *Stream*: cycles that a channel of
        {STREAM_BYTES} bytes a cycle takes to bring the keys and values, which a core with two heads uses twice."""),
        attention_table(),
        attention_calls(),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    assert __doc__ is not None
    return page.command(__doc__.splitlines()[0], document, OUTPUT, arguments)


if __name__ == "__main__":
    sys.exit(main())
