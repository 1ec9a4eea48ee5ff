"""Plans of GEMVs: one row of activations by all tiles of outputs."""

from __future__ import annotations

from tilefuse import arch
from tilefuse.configurations import BF16, X_PART, Configuration, Op, Weights
from tilefuse.descriptors import Segment, Tap, Transfer
from tilefuse.layout import KT, NT, ROWS, Layout
from tilefuse.plan.stored import PlainLayout, Stored
from tilefuse.plan.value import Plan


def gemv(layout: Layout, *, streams: int = 1) -> Plan:
    """The plan of y = x W for one row of activations.

    Args:
        layout: The packed layer.
        streams: Weight streams of a column: 1, or 2 for twice the width where DRAM is faster than eight streams.

    Raises:
        PlanError: The array can't run it; the message says which limit.
    """
    config = Configuration(Op.GEMV, Weights.of(layout), layout.columns, streams=streams)
    return _one_stream(config, layout) if config.streams == 1 else _two_streams(config, layout)


def gemv_baseline(layout: PlainLayout | Layout) -> Plan:
    """The plan of the GEMV on one row of cores, for bfloat16 weights or packed ones.

    Raises:
        PlanError: See `gemv`.
    """
    weights = BF16 if isinstance(layout, PlainLayout) else Weights.of(layout)
    return _one_stream(Configuration(Op.GEMV_BASELINE, weights, layout.columns), layout)


def _one_stream(config: Configuration, layout: Stored) -> Plan:
    columns, k_tiles, slots = config.columns, layout.k_tiles, layout.tiles_per_column
    tile, head = layout.tile_bytes // arch.WORD, config.x_object // arch.WORD
    x_words = k_tiles * KT // 2
    # The cores of a GEMV keep x, so it is sent once; those of the baseline take it anew for each output tile.
    again = config.op is Op.GEMV_BASELINE
    segments: list[Segment] = []
    for first, count in _slices(slots, arch.SHIM.repeat if again else arch.SHIM.size):
        transfers: list[Transfer] = []
        for column in range(columns):
            start = (column * slots + first) * k_tiles * tile
            transfers.append(Transfer("w", column, Tap.run(start, count * k_tiles * tile)))
        if not segments:
            transfers.append(Transfer("x", 0, Tap.run(0, head)))
        if again or not segments:
            transfers.append(Transfer("x", 0, Tap.run(head, x_words, count if again else 1)))
        segments.append(Segment((*transfers, *_results(columns, first, count))))
    return Plan(
        config,
        layout,
        m=1,
        bands=1,
        parameters=(slots, k_tiles // (ROWS if config.op is Op.GEMV else 1)),
        segments=tuple(segments),
        x_words=head + x_words,
        x_offset=head,
        y_rows=1,
    )


def _two_streams(config: Configuration, layout: Layout) -> Plan:
    columns, slots, steps = config.columns, layout.tiles_per_column, layout.k_tiles // ROWS
    tile = layout.tile_bytes // arch.WORD
    objects = -(-steps // X_PART)
    x_run = objects * 2 * tile  # of a stream: an object for each of its two rows, then the next two
    segments: list[Segment] = []
    for first, count in _slices(slots, arch.SHIM.size):
        transfers: list[Transfer] = []
        for column in range(columns):
            for stream in range(2):
                index = 2 * column + stream
                if not segments:
                    transfers.append(Transfer("x", index, Tap.run(stream * x_run, x_run)))
                # Two of every four tiles, in eight quarters of a tile: a whole one is more than a loop's size holds.
                start = ((column * slots + first) * layout.k_tiles + 2 * stream) * tile
                sizes = (1, count * steps, 8, tile // 4)
                transfers.append(Transfer("w", index, Tap(start, sizes, (0, ROWS * tile, tile // 4, 1))))
        segments.append(Segment((*transfers, *_results(columns, first, count))))
    return Plan(
        config,
        layout,
        m=1,
        bands=1,
        parameters=(slots, steps, objects),
        segments=tuple(segments),
        x_words=2 * x_run,
        x_offset=0,
        y_rows=1,
    )


def _slices(slots: int, most: int) -> list[tuple[int, int]]:
    """(first, count) of a column's output tiles, ``most`` at a time."""
    return [(first, min(most, slots - first)) for first in range(0, slots, most)]


def _results(columns: int, first: int, count: int) -> list[Transfer]:
    step = columns * NT // 2
    return [
        Transfer("y", column, Tap(first * step + column * NT // 2, (1, 1, count, NT // 2), (0, 0, step, 1)))
        for column in range(columns)
    ]
