"""The table of docs/dataflow.md: what each way of feeding a core would come to."""

from __future__ import annotations

from tilefuse import arch, plan
from tilefuse.configurations import BAND_ROWS, Configuration, Op, Weights, most_bands
from tilefuse.kernel_cycles import cycles_of
from tilefuse.layout import KT, NT, ROWS, Layout

BEGIN, END = "<!-- alternatives: written by docs/draw_dataflow.py -->", "<!-- end -->"

M = 2048
LAYER = Layout(k=4096, n=4096, bits=4, group=128)


def alternatives() -> str:
    """Markdown: activations and outputs a core, ceilings of its channels, DRAM for one GEMM, memory."""
    header = (
        "| activations | outputs | bands | x channel, B/MAC | ceiling | w channel, B/MAC | ceiling | DRAM, MB | "
        "ceiling | kernel | L1, bytes |"
    )
    lines = [header, "|---|" + "---:|" * 10]
    for name, value_bytes in (("bfloat16", 2.0), ("bfp16", 9 / 8)):
        for tiles in (1, 2):
            lines.append(_row(name, value_bytes, tiles))
    return "\n".join(lines)


def _row(name: str, value_bytes: float, tiles: int) -> str:
    weights = Weights.of(LAYER)
    fixed = Configuration(Op.GEMM, weights, tiles=tiles)
    core = next(fixed.budgets())
    band = int(BAND_ROWS * KT * value_bytes)
    # Of the same configuration with two bands of the other format in place of its own.
    sums = fixed.sums_bytes
    beside = core.used - 2 * fixed.x_object + 2 * band - sums
    most = (core.limit - beside) // sums
    if name == "bfp16":
        assert most == most_bands(weights, arch.COLUMNS, tiles)
    needed = -(-M // (BAND_ROWS * ROWS))
    row_blocks = -(-needed // most)
    bands = -(-needed // row_blocks)
    macs = M * LAYER.k * LAYER.n
    passes = LAYER.tiles_per_column // tiles
    read = row_blocks * LAYER.nbytes + row_blocks * bands * BAND_ROWS * ROWS * LAYER.k * value_bytes * passes
    x_per_mac = value_bytes / (NT * tiles)
    w_per_mac = LAYER.tile_bytes / (KT * NT) / (BAND_ROWS * bands)
    cores = arch.COLUMNS * arch.CORE_ROWS
    dram = macs / cores / (read / arch.DRAM_READ * arch.CLOCK_HZ)
    cycles = cycles_of(fixed).step(bands)
    kernel = bands * BAND_ROWS * KT * NT * tiles / cycles
    if name == "bfp16":
        made = plan.gemm(LAYER, M, tiles=tiles, bands=bands)
        head = ROWS * fixed.x_l2_object
        assert made.dram_bytes[0] == read + head
    cells = [
        name,
        f"{NT * tiles}",
        f"{bands}",
        f"1/{1 / x_per_mac:.0f}",
        f"{arch.STREAM_BYTES / x_per_mac:.0f}",
        f"1/{1 / w_per_mac:.0f}",
        f"{arch.STREAM_BYTES / w_per_mac:.0f}",
        f"{read / 1e6:.0f}",
        f"{dram:.0f}",
        f"{kernel:.0f}" if name == "bfp16" else "",
        f"{beside + bands * sums}",
    ]
    return "| " + " | ".join(cells) + " |"


def refresh(text: str) -> str:
    """The document with its table written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{alternatives()}\n\n{END}{after}"
