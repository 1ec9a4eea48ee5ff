"""What a plan's transfers move, by plain loops over their sizes and strides, and the order that the array needs.

Written from docs/dataflow.md and docs/packed-format.md, not from the planner.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilefuse.descriptors import Tap
from tilefuse.layout import Layout
from tilefuse.plan import PlainLayout, Plan

BAND_WORDS = 16 * 128 * 9 // 8 // 4
"""16 rows x 128 channels, 9 bytes for 8."""


def words_of(tap: Tap) -> Iterator[int]:
    """Every word that a tap touches, in order."""
    a, b, c, d = tap.strides
    for i in range(tap.sizes[0]):
        for j in range(tap.sizes[1]):
            for k in range(tap.sizes[2]):
                for m in range(tap.sizes[3]):
                    yield tap.offset + i * a + j * b + k * c + m * d


def runs_of(tap: Tap) -> Iterator[tuple[int, int]]:
    """(first word, words) of each innermost loop of a tap, which must be a run."""
    assert tap.strides[3] == 1
    a, b, c, _ = tap.strides
    for i in range(tap.sizes[0]):
        for j in range(tap.sizes[1]):
            for k in range(tap.sizes[2]):
                yield tap.offset + i * a + j * b + k * c, tap.sizes[3]


def taps_of(plan: Plan, stream: str, index: int) -> list[Tap]:
    """The taps of one stream, in the order of their issue."""
    return [t.tap for t in plan.transfers() if (t.stream, t.index) == (stream, index)]


def objects_of(taps: list[Tap], words: int) -> Iterator[int]:
    """Where each object of ``words`` words starts that the taps move one after another; each must be one run."""
    start, got = 0, 0
    for tap in taps:
        for first, count in runs_of(tap):
            while count:
                if got == 0:
                    start = first
                assert first == start + got, f"an object starts at {start} and goes on at {first}, not {start + got}"
                take = min(count, words - got)
                first, count, got = first + take, count - take, got + take
                if got == words:
                    yield start
                    got = 0
    assert got == 0, f"{got} words are left over"


def tile_word(layout: Layout | PlainLayout, n_tile: int, k_tile: int) -> int:
    """Where a tile of weights starts in the packed buffer: [column][output tile div columns][k tile]."""
    column, slot = n_tile % layout.columns, n_tile // layout.columns
    tiles = (column * layout.tiles_per_column + slot) * layout.k_tiles + k_tile
    return tiles * layout.tile_bytes // 4


def output_order(plan: Plan, column: int) -> list[int]:
    """Output tiles of a column in the order of a row block: one at a time, or by twos, the last two overlapping."""
    slots = range(plan.layout.tiles_per_column)
    if plan.configuration.tiles == 1:
        order = list(slots)
    else:
        firsts = [slot if slot + 1 < len(slots) else slot - 1 for slot in slots[::2]]
        order = [slot for first in firsts for slot in (first, first + 1)]
    return [slot * plan.layout.columns + column for slot in order]


def gemm_weights(plan: Plan, column: int) -> Iterator[int]:
    """Where the tiles start that the cores of a column take, in order."""
    for _ in range(plan.row_blocks):
        order = output_order(plan, column)
        if plan.configuration.tiles == 1:
            for n_tile in order:
                for k_tile in range(plan.layout.k_tiles):
                    yield tile_word(plan.layout, n_tile, k_tile)
            continue
        for left, right in zip(order[::2], order[1::2], strict=True):
            # The memory tile takes 4 k tiles of one, then of the other, and sends them in turn.
            for first in range(0, plan.layout.k_tiles, 4):
                for n_tile in (left, right):
                    for k_tile in range(first, first + 4):
                        yield tile_word(plan.layout, n_tile, k_tile)


def gemm_bands(plan: Plan, row: int) -> Iterator[int]:
    """Where the bands start that the cores of an array row take, in order: the head's four, then all of each pass."""
    head = 4 * BAND_WORDS
    at = {}
    for row_block in range(plan.row_blocks):
        for r in range(4):
            for k_tile in range(plan.layout.k_tiles):
                for band in range(plan.bands):
                    at[row_block, r, k_tile, band] = head + len(at) * BAND_WORDS
    assert plan.x_words == head + len(at) * BAND_WORDS
    yield from range(0, head, BAND_WORDS)
    for row_block in range(plan.row_blocks):
        for _ in range(-(-plan.layout.tiles_per_column // plan.configuration.tiles)):
            for k_tile in range(plan.layout.k_tiles):
                for band in range(plan.bands):
                    yield at[row_block, row, k_tile, band]


def gemm_results(plan: Plan, column: int) -> Iterator[int]:
    """Where the half rows (32 words) start that the memory tile of a column sends.

    An object joins the four cores' pieces of 16 rows; a core sends a tile's bands, then the next tile's. So each object
    is of one tile and of consecutive rows, unless a core's pieces of one tile are too few to fill its part.
    """
    half_n, block, join = plan.layout.n_padded // 2, plan.bands * 64, plan.configuration.join
    for row_block in range(plan.row_blocks):
        order = output_order(plan, column)
        if plan.bands < join:
            assert join == 2 * plan.bands
            for left, right in zip(order[::2], order[1::2], strict=True):
                for core in range(4):
                    for n_tile in (left, right):
                        for row in range(core * plan.bands * 16, (core + 1) * plan.bands * 16):
                            yield (row_block * block + row) * half_n + n_tile * 32
            continue
        for n_tile in order:
            for row in range(block):
                yield (row_block * block + row) * half_n + n_tile * 32
