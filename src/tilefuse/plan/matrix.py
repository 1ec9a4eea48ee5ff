"""Plans of GEMMs: row blocks of activations by passes over a column's tiles of outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

from tilefuse import arch
from tilefuse.configurations import (
    BAND_BYTES,
    BAND_ROWS,
    BF16,
    L2_BATCH,
    Configuration,
    Op,
    Weights,
    checked_int,
    most_bands,
)
from tilefuse.descriptors import Segment, Tap, Transfer
from tilefuse.errors import PlanError
from tilefuse.layout import KT, NT, ROWS, Layout
from tilefuse.plan.costs import Costs, Traffic, modelled, passes
from tilefuse.plan.stored import PlainLayout, Stored
from tilefuse.plan.value import Plan, check_buffers


@dataclass(frozen=True)
class Outline:
    """What a plan would be and cost, without its descriptors: cheap where only the costs are asked for."""

    configuration: Configuration
    bands: int
    row_blocks: int
    costs: Costs
    x_words: int
    y_rows: int


def gemm_outline(layout: Layout, m: int) -> Outline:
    """Of what `gemm` plans for ``m`` rows; says nothing about the limits of its descriptors.

    Raises:
        PlanError: The array can't run it; the message says which limit.
    """
    m = _checked_rows(m)
    config, bands = _choose(layout, m)
    row_blocks = -(-m // (BAND_ROWS * ROWS * bands))
    x_words, y_rows = _buffers(config, layout, bands, row_blocks)
    check_buffers(layout, m, x_words, y_rows)
    costs = modelled(config, layout, bands, row_blocks, _traffic(config, layout, bands, row_blocks))
    return Outline(config, bands, row_blocks, costs, x_words, y_rows)


def _buffers(config: Configuration, layout: Layout, bands: int, row_blocks: int) -> tuple[int, int]:
    """Words of the activations and rows of the results of a plan."""
    run = layout.k_tiles * bands * BAND_BYTES // arch.WORD
    return config.x_l2_object // arch.WORD + row_blocks * ROWS * run, row_blocks * BAND_ROWS * ROWS * bands


def gemm(
    layout: Layout,
    m: int,
    *,
    tiles: int | None = None,
    bands: int | None = None,
    configurations: Collection[Configuration] | None = None,
) -> Plan:
    """The plan of y = x W for ``m`` rows of activations.

    Args:
        layout: The packed layer, for at least 4 columns.
        m: Rows of x, at least 1.
        tiles: Packed tiles side by side in a core, 1 or 2; chosen by the model when None.
        bands: Bands of 16 rows that a core computes at a time; chosen when None.
        configurations: Those to choose among, say because they are on the array already; any when None.

    Raises:
        PlanError: The array can't run it, or not with these tiles; the message says which limit.
    """
    m = _checked_rows(m)
    config, chosen = _choose(layout, m, tiles, bands, configurations)
    return _gemm(config, layout, m, chosen)


def _choose(
    layout: Layout,
    m: int,
    tiles: int | None = None,
    bands: int | None = None,
    configurations: Collection[Configuration] | None = None,
) -> tuple[Configuration, int]:
    """The configuration and the bands that the model finds cheapest."""
    if bands is not None:
        bands = checked_int(bands, "bands")
        if bands < 1:
            raise PlanError(f"bands = {bands}: a core computes at least one band of {BAND_ROWS} rows")
    if tiles is not None:
        tiles = checked_int(tiles, "tiles")
    weights = Weights.of(layout)
    candidates: list[tuple[Configuration, int]] = []
    for count in (1, 2) if tiles is None else (tiles,):
        if tiles is None and count == 2 and not (weights.side_by_side and layout.tiles_per_column > 1):
            continue
        most = most_bands(weights, layout.columns, count)
        if bands is not None and bands > most:
            Configuration(Op.GEMM, weights, layout.columns, count, bands)  # says why not
        if count == 2 and layout.tiles_per_column < 2:
            raise PlanError(
                f"tiles = 2 with N = {layout.n}: a column has {layout.tiles_per_column} tile of outputs; take tiles = 1"
            )
        for config in _configurations(weights, layout.columns, count, most):
            if configurations is not None and config not in configurations:
                continue
            choices = range(config.max_bands, 0, -1) if bands is None else (bands,)
            candidates += [(config, choice) for choice in choices if _takes(config, layout, choice)]
    if not candidates and configurations is not None:
        names = ", ".join(config.name for config in configurations) or "none"
        raise PlanError(f"M = {m}, K = {layout.k}, N = {layout.n} ({weights.tag}): no plan for configurations {names}")
    if not candidates:
        asked = f" with bands = {bands}" if bands is not None else ""
        raise PlanError(
            f"tiles = 2{asked}, N = {layout.n}: the results of two tiles leave from 2 or 4 bands, or from 1 where N is "
            f"at most {2 * arch.SHIM.stride // BAND_ROWS}, and {most} bands of {weights.tag} fit a core; take tiles = 1"
        )
    return min(candidates, key=lambda candidate: _cost(layout, m, *candidate))


def _cost(layout: Layout, m: int, config: Configuration, bands: int) -> tuple[float, float]:
    """Modelled seconds of a plan that is not made yet, and among equal ones those of the cores."""
    row_blocks = -(-m // (BAND_ROWS * ROWS * bands))
    costs = modelled(config, layout, bands, row_blocks, _traffic(config, layout, bands, row_blocks))
    return costs.total, costs.compute + costs.y_wait


def _traffic(config: Configuration, layout: Layout, bands: int, row_blocks: int) -> Traffic:
    """What the transfers of `_gemm` come to."""
    outputs = row_blocks * passes(config, layout)
    tiles = outputs * config.tiles
    segments = row_blocks * -(-layout.tiles_per_column // _tiles_of_a_segment(config))
    return Traffic(
        x=ROWS * (config.x_l2_object + outputs * layout.k_tiles * bands * BAND_BYTES),
        w=config.columns * tiles * layout.k_tiles * layout.tile_bytes,
        y=config.columns * tiles * bands * ROWS * config.y_object,
        tasks=ROWS + segments * (2 * config.columns + ROWS),
        segments=segments,
    )


def _tiles_of_a_segment(config: Configuration) -> int:
    """Output tiles of a column: as often as a descriptor repeats the activations, or what one reads of weights."""
    return arch.SHIM.repeat if config.tiles == 1 else 2


def _configurations(weights: Weights, columns: int, tiles: int, most: int) -> Iterator[Configuration]:
    """Configurations worth an xclbin: results joined by fours where there are many, by fewer where there are few."""
    if tiles == 2:
        for join in (2, 4):
            yield Configuration(Op.GEMM, weights, columns, tiles, most - most % 2, join=join)
        return
    yield Configuration(Op.GEMM, weights, columns, tiles, most)
    if most >= 4:
        yield Configuration(Op.GEMM, weights, columns, tiles, most - most % 4, join=4)


def _takes(config: Configuration, layout: Layout, bands: int) -> bool:
    """Whether the results of so many bands can be joined, and written back core by core if they must be."""
    reach = bands * BAND_ROWS * layout.n_padded // 2
    return config.takes_bands(bands) and (bands >= config.join or reach <= arch.SHIM.stride)


def _results(
    layout: Stored, column: int, first: int, count: int, first_row: int, rows: int, by_core: bool = False
) -> Transfer:
    """Output tiles ``first`` to ``first + count`` of a column, of ``rows`` rows of y, or all tiles core by core."""
    half_n, step = layout.n_padded // 2, layout.columns * NT // 2
    start = first_row * half_n + first * step + column * NT // 2
    if by_core:
        share = rows // ROWS
        return Transfer("y", column, Tap(start, (ROWS, count, share, NT // 2), (share * half_n, step, half_n, 1)))
    return Transfer("y", column, Tap(start, (1, count, rows, NT // 2), (0, step, half_n, 1)))


def _gemm(config: Configuration, layout: Layout, m: int, bands: int) -> Plan:
    columns, k_tiles, slots = config.columns, layout.k_tiles, layout.tiles_per_column
    tile = layout.tile_bytes // arch.WORD
    block = BAND_ROWS * ROWS * bands
    row_blocks = -(-m // block)
    run = k_tiles * bands * BAND_BYTES // arch.WORD  # what an array row takes of a row block in a pass
    head = config.x_l2_object // arch.WORD
    x_words, y_rows = _buffers(config, layout, bands, row_blocks)
    check_buffers(layout, m, x_words, y_rows)  # before there are too many segments to list

    @cache
    def weights(first: int, count: int) -> tuple[Transfer, ...]:
        starts = [(column * slots + first) * k_tiles * tile for column in range(columns)]
        if config.tiles == 1:
            taps = [Tap.run(start, count * k_tiles * tile) for start in starts]
        else:
            # Two output tiles, k tiles in groups of four: [group][output tile][4 k tiles], each in two halves.
            sizes = (k_tiles // L2_BATCH, 2, 2 * L2_BATCH, tile // 2)
            strides = (L2_BATCH * tile, k_tiles * tile, tile // 2, 1)
            taps = [Tap(start, sizes, strides) for start in starts]
        return tuple(Transfer("w", column, tap) for column, tap in enumerate(taps))

    @cache
    def activations(row_block: int, repeat: int) -> tuple[Transfer, ...]:
        starts = [head + (row_block * ROWS + row) * run for row in range(ROWS)]
        return tuple(Transfer("x", row, Tap.run(start, run, repeat)) for row, start in enumerate(starts))

    segments: list[Segment] = []
    step = _tiles_of_a_segment(config)
    for row_block in range(row_blocks):
        for first in range(0, slots, step):
            count = min(step, slots - first)
            if config.tiles == 2 and count == 1:
                # An odd tile is computed beside its neighbour once more: the same bytes are written twice.
                first, count = first - 1, 2
            # Weights first: DRAM is busiest with them, and each task takes the command processor a while to issue.
            transfers = list(weights(first, count))
            if not segments:
                transfers += [Transfer("x", row, Tap.run(0, head)) for row in range(ROWS)]
            transfers += activations(row_block, count // config.tiles)
            # A joined object of two output tiles has all that a core made, before what the next one made.
            by_core = bands < config.join
            row = row_block * block
            transfers += [_results(layout, column, first, count, row, block, by_core) for column in range(columns)]
            segments.append(Segment(tuple(transfers)))
    return Plan(
        config,
        layout,
        m,
        bands,
        parameters=(row_blocks * passes(config, layout), k_tiles, bands),
        segments=tuple(segments),
        x_words=x_words,
        x_offset=head,
        y_rows=y_rows,
    )


def gemm_baseline(layout: PlainLayout, m: int) -> Plan:
    """The plan of the bfloat16 GEMM: 32 rows a core, activations bfloat16 [M][K] as they are, weights in plain tiles.

    Raises:
        PlanError: See `gemm`.
    """
    m = _checked_rows(m)
    if not isinstance(layout, PlainLayout):
        raise PlanError(f"the layout is a {type(layout).__name__}: a baseline GEMM takes bfloat16 weights, PlainLayout")
    config = Configuration(Op.GEMM_BASELINE, BF16, layout.columns)
    columns, k_tiles, slots = config.columns, layout.k_tiles, layout.tiles_per_column
    tile, half_k = layout.tile_bytes // arch.WORD, k_tiles * KT // 2
    rows = config.rows
    block = rows * ROWS
    row_blocks = -(-m // block)
    head = config.x_object // arch.WORD
    x_words = head + row_blocks * block * half_k
    check_buffers(layout, m, x_words, row_blocks * block)
    segments: list[Segment] = []
    for row_block in range(row_blocks):
        for first in range(0, slots, arch.SHIM.repeat):
            count = min(arch.SHIM.repeat, slots - first)
            transfers: list[Transfer] = []
            for column in range(columns):
                start = (column * slots + first) * k_tiles * tile
                transfers.append(Transfer("w", column, Tap.run(start, count * k_tiles * tile)))
            if not segments:
                transfers += [Transfer("x", row, Tap.run(0, head)) for row in range(ROWS)]
            for row in range(ROWS):
                start = head + (row_block * ROWS + row) * rows * half_k
                tap = Tap(start, (count, k_tiles, rows, KT // 2), (0, KT // 2, half_k, 1))
                transfers.append(Transfer("x", row, tap))
            transfers += [_results(layout, column, first, count, row_block * block, block) for column in range(columns)]
            segments.append(Segment(tuple(transfers)))
    return Plan(
        config,
        layout,
        m,
        bands=1,
        parameters=(row_blocks * slots, k_tiles),
        segments=tuple(segments),
        x_words=x_words,
        x_offset=head,
        y_rows=row_blocks * block,
    )


def _checked_rows(m: int) -> int:
    m = checked_int(m, "M")
    if m < 1:
        raise PlanError(f"M = {m}: pass the number of rows, at least 1")
    return m
