"""From a problem (M, K, N, how the weights are stored) to a plan: tiles, passes, descriptors, budgets.

>>> from tilefuse import plan
>>> from tilefuse.layout import Layout
>>> print(plan.gemm(Layout(k=4096, n=4096, bits=4, group=128), m=2048))  # doctest: +SKIP

A plan is a value that prints. Making one checks every limit of the array that the problem meets, so what the compiler
or the hardware would refuse is refused here, in the problem's terms. Which tiles to take is decided by a model of what
each part of the array would need alone (`Plan.costs`): *modelled*, like everything that the emulator says of time.

Host buffers are words of 32 bits: ``x`` activations behind a head with the parameters, ``w`` the packed weights, ``y``
results, bfloat16 [rows][padded N].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Protocol

from tilefuse import arch
from tilefuse.configurations import (
    BAND,
    BAND_BYTES,
    BF16,
    BF16_TILE_BYTES,
    GROUP,
    X_PART,
    Budget,
    Configuration,
    Op,
    Weights,
    most_bands,
)
from tilefuse.descriptors import Segment, Tap, Transfer, queue_depths
from tilefuse.errors import PlanError
from tilefuse.kernel_cycles import KernelCycles, cycles_of
from tilefuse.layout import KT, MAX_K, MAX_N, NT, ROWS, Layout

WINDOW = 2
"""Segments open at a time: while one moves, the next one's tasks wait in the queues."""

MAX_BUFFER_BYTES = (1 << 32) - 1
"""Bytes of a host buffer at most: what a descriptor's length and the driver's buffers reach."""


class Stored(Protocol):
    """What a plan asks of a layout of weights: `tilefuse.layout.Layout`, or `PlainLayout` for the baselines."""

    @property
    def k(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def k_tiles(self) -> int: ...
    @property
    def n_padded(self) -> int: ...
    @property
    def tiles_per_column(self) -> int: ...
    @property
    def tile_bytes(self) -> int: ...


@dataclass(frozen=True)
class PlainLayout:
    """Unquantised bfloat16 weights in tiles of 128 x 64, in the order of the packed format; for the baselines."""

    k: int
    n: int
    columns: int = arch.COLUMNS

    def __post_init__(self) -> None:
        if not (1 <= self.k <= MAX_K and 1 <= self.n <= MAX_N):
            raise PlanError(f"K = {self.k}, N = {self.n}: K is 1 to {MAX_K}, N is 1 to {MAX_N}")

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return BF16_TILE_BYTES

    @property
    def k_tiles(self) -> int:
        """K tiles, padding included."""
        return -(-self.k // KT)

    @property
    def tiles_per_column(self) -> int:
        """Output tiles of a column, padding included."""
        return -(-self.n // (NT * self.columns))

    @property
    def n_padded(self) -> int:
        """N rounded up to whole tiles for each column."""
        return self.tiles_per_column * NT * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return self.columns * self.tiles_per_column * self.k_tiles * self.tile_bytes


@dataclass(frozen=True)
class Costs:
    """Seconds, modelled, that each part would need if the others took no time."""

    compute: float
    """The fullest core."""
    x_stream: float
    """The channel that brings a core its activations."""
    w_stream: float
    """The channel that brings a column its weights."""
    y_stream: float
    """The channel that takes a column's results away; a core waits for most of it."""
    dram: float
    control: float
    """The command processor, issuing tasks."""

    @property
    def total(self) -> float:
        """The slowest part, and what doesn't overlap."""
        return max(self.compute + self.y_stream, self.x_stream, self.w_stream, self.dram, self.control)

    @property
    def bound(self) -> str:
        """Which part is the slowest."""
        parts = {
            "compute": self.compute + self.y_stream,
            "activation stream": self.x_stream,
            "weight stream": self.w_stream,
            "DRAM": self.dram,
            "command processor": self.control,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Plan:
    """How one problem runs on one configuration."""

    configuration: Configuration
    layout: Stored
    m: int
    """Rows of activations."""
    bands: int
    """Bands of 16 rows a core computes at a time (1 for a GEMV)."""
    parameters: tuple[int, ...]
    """Words that the cores read at the head of the activations: outputs to make, K steps of each, ..."""
    segments: tuple[Segment, ...] = field(repr=False)
    x_words: int
    """Words of the activations' host buffer, head included."""
    x_offset: int
    """Words of the head."""
    y_rows: int
    """Rows of the results' buffer, padding included."""

    def __post_init__(self) -> None:
        words = {"x": self.x_words, "w": self.w_words, "y": self.y_words}
        for name, count in words.items():
            if 4 * count > MAX_BUFFER_BYTES:
                raise PlanError(
                    f"M = {self.m}, K = {self.k}, N = {self.n}: the {_BUFFERS[name]} take {4 * count} bytes, and a "
                    f"buffer holds {MAX_BUFFER_BYTES}; split the problem along M or N"
                )
        seen: set[tuple[str, int, tuple[int, ...], tuple[int, ...]]] = set()
        for transfer in self.transfers():
            tap = transfer.tap
            # Offsets aside, most transfers are alike; the buffer's end is checked for each.
            key = (transfer.stream, 0, tap.sizes, tap.strides)
            if key not in seen:
                seen.add(key)
                tap.check(self._title(transfer), words[transfer.stream], self._causes(transfer))
            elif tap.offset < 0 or tap.end > words[transfer.stream]:
                tap.check(self._title(transfer), words[transfer.stream])
        for (stream, index), depth in self.queue_depths.items():
            if depth > arch.QUEUE_DEPTH:
                raise PlanError(f"{stream}{index}: {depth} tasks at a time; a channel queues {arch.QUEUE_DEPTH}")

    @property
    def k(self) -> int:
        """Input channels."""
        return self.layout.k

    @property
    def n(self) -> int:
        """Output channels."""
        return self.layout.n

    @property
    def w_words(self) -> int:
        """Words of the packed weights."""
        return self.layout.columns * self.layout.tiles_per_column * self.layout.k_tiles * self.layout.tile_bytes // 4

    @property
    def y_words(self) -> int:
        """Words of the results' buffer."""
        return self.y_rows * self.layout.n_padded // 2

    @property
    def row_blocks(self) -> int:
        """Blocks of rows that the array computes one after another."""
        return self.y_rows // (self.bands * self.block_rows)

    @property
    def block_rows(self) -> int:
        """Rows of a band of all four array rows (1 for a GEMV)."""
        op = self.configuration.op
        return {Op.GEMM: ROWS * BAND, Op.GEMM_BASELINE: 2 * ROWS * BAND}.get(op, 1)

    @property
    def passes(self) -> int:
        """Times that the activations of a row block are sent: output tiles of a column, or pairs of them."""
        return -(-self.layout.tiles_per_column // self.configuration.tiles)

    def transfers(self) -> Iterator[Transfer]:
        """All tasks, in the order of their issue."""
        for segment in self.segments:
            yield from segment.transfers

    @cached_property
    def queue_depths(self) -> dict[tuple[str, int], int]:
        """Most tasks outstanding on the channel of each (stream, index)."""
        return queue_depths(self.segments, WINDOW)

    @cached_property
    def dram_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to the host's memory. What several columns read alike counts for each."""
        read = sum(4 * t.tap.words for t in self.transfers() if t.stream != "y")
        return read, sum(4 * t.tap.words for t in self.transfers() if t.stream == "y")

    @property
    def macs(self) -> int:
        """Products of the problem, padding not counted."""
        return self.m * self.k * self.n

    @cached_property
    def costs(self) -> Costs:
        """What each part of the array would need, modelled."""
        config, cycles = self.configuration, cycles_of(self.configuration)
        steps = self.row_blocks * self.passes * self.layout.k_tiles
        gemv = config.op in (Op.GEMV, Op.GEMV_BASELINE)
        rows = ROWS if config.op is Op.GEMV else 1
        compute = steps / rows * cycles.step(self.bands) + self.row_blocks * self.passes * cycles.output(self.bands)
        if gemv:
            x_bytes = 4 * sum(t.tap.words for t in self.transfers() if (t.stream, t.index) == ("x", 0))
        else:
            x_bytes = steps * self.bands * config.x_object
        y_bytes = 0 if gemv else self.row_blocks * self.passes * self.bands * config.tiles * config.y_object
        read, written = self.dram_bytes
        per_column = read_of(self.transfers(), "w") / config.columns / config.streams
        second = arch.CLOCK_HZ * arch.STREAM_BYTES
        return Costs(
            compute=compute / arch.CLOCK_HZ,
            x_stream=x_bytes / second,
            w_stream=per_column / second,
            y_stream=y_bytes / second,
            dram=max(read / arch.DRAM_READ, (read + written) / arch.DRAM_TOTAL),
            control=sum(segment.tasks for segment in self.segments) * arch.TASK_ISSUE,
        )

    def _title(self, transfer: Transfer) -> str:
        return f"M = {self.m}, K = {self.k}, N = {self.n}: {_BUFFERS[transfer.stream]} of stream {transfer.index}"

    def _causes(self, transfer: Transfer) -> tuple[str, str, str, str]:
        if transfer.stream == "y":
            return "", "", f"N = {self.n}", ""
        return "", "", "", ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        config, layout = self.configuration, self.layout
        problem = f"{self.m} x {self.k} by {self.k} x {self.n}"
        yield f"{config.op} of {problem}, weights {config.weights.tag}, on {config.name}"
        yield f"  kernel      {config.kernel}"
        yield (
            f"  tiles       K {layout.k_tiles} of {KT} (padded to {layout.k_tiles * KT}), "
            f"N {layout.tiles_per_column} of {NT} in each of {layout.columns} columns (padded to {layout.n_padded})"
        )
        if self.block_rows > 1:
            yield f"  rows        {self.row_blocks} blocks of {self.bands * self.block_rows} (padded to {self.y_rows})"
        yield f"  passes      {self.passes} a block; parameters {list(self.parameters)}"
        for budget in config.budgets():
            yield f"  {budget}"
        deepest = max(self.queue_depths.values())
        tasks = sum(segment.tasks for segment in self.segments)
        yield (
            f"  segments    {len(self.segments)}, {tasks} tasks, at most {deepest} on a channel "
            f"(of {arch.QUEUE_DEPTH}), {WINDOW} segments open"
        )
        for transfer in self.segments[0].transfers:
            if transfer.index == 0:
                yield f"    {transfer.stream}{transfer.index}  {transfer.tap}"
        read, written = self.dram_bytes
        yield f"  DRAM        {read} bytes read, {written} written"
        costs = self.costs
        yield (
            f"  modelled    {costs.total * 1e6:.1f} us, bound by {costs.bound}: compute {costs.compute * 1e6:.1f}, "
            f"x {costs.x_stream * 1e6:.1f}, w {costs.w_stream * 1e6:.1f}, y {costs.y_stream * 1e6:.1f}, "
            f"DRAM {costs.dram * 1e6:.1f}, commands {costs.control * 1e6:.1f}"
        )


_BUFFERS = {"x": "activations", "w": "weights", "y": "results"}


def read_of(transfers: Iterable[Transfer], stream: str) -> int:
    """Bytes of one kind of stream."""
    return sum(4 * transfer.tap.words for transfer in transfers if transfer.stream == stream)


def gemm(layout: Layout, m: int, *, tiles: int | None = None, bands: int | None = None) -> Plan:
    """The plan of y = x W for ``m`` rows of activations.

    Args:
        layout: The packed layer.
        m: Rows of x, at least 1.
        tiles: Packed tiles side by side in a core, 1 or 2; chosen by the model when None.
        bands: Bands of 16 rows that a core computes at a time; chosen when None.

    Raises:
        PlanError: The array can't run it, or not with these tiles; the message says which limit.
    """
    _check_rows(m)
    weights = Weights.of(layout)
    if bands is not None and (not isinstance(bands, Integral) or bands < 1):
        raise PlanError(f"bands = {bands!r}: a core computes at least one band of {BAND} rows")
    candidates: list[Plan] = []
    for count in (1, 2) if tiles is None else (tiles,):
        if tiles is None and count == 2 and (weights.bits != 4 or weights.minima or layout.tiles_per_column < 2):
            continue
        most = most_bands(weights, layout.columns, count)
        config = Configuration(Op.GEMM, weights, layout.columns, count, most if bands is None else max(most, bands, 1))
        if count == 2 and layout.tiles_per_column < 2:
            raise PlanError(
                f"tiles = 2 with N = {layout.n}: a column has {layout.tiles_per_column} tile of outputs; take tiles = 1"
            )
        needed = -(-m // (BAND * ROWS))
        choices = range(1, min(most, needed) + 1) if bands is None else (bands,)
        candidates += [_gemm(config, layout, m, choice) for choice in choices]
    return min(candidates, key=lambda plan: plan.costs.total)


def _gemm(config: Configuration, layout: Layout, m: int, bands: int) -> Plan:
    columns, k_tiles, slots = config.columns, layout.k_tiles, layout.tiles_per_column
    tile, half_n = layout.tile_bytes // 4, layout.n_padded // 2
    block = BAND * ROWS * bands
    row_blocks = -(-m // block)
    run = k_tiles * bands * BAND_BYTES // 4
    head = config.x_l2_object // 4
    column_words = slots * k_tiles * tile

    def segment(row_block: int, first: int, count: int) -> Segment:
        # Weights first: they are what DRAM is busiest with, and each task takes the command processor a while to issue.
        transfers: list[Transfer] = []
        for column in range(columns):
            start = column * column_words + first * k_tiles * tile
            if config.tiles == 1:
                tap = Tap.run(start, count * k_tiles * tile)
            else:
                # Two output tiles, k tiles in groups of four: [group][output tile][4 k tiles], each in two halves.
                sizes = (k_tiles // GROUP, 2, 2 * GROUP, tile // 2)
                tap = Tap(start, sizes, (GROUP * tile, k_tiles * tile, tile // 2, 1))
            transfers.append(Transfer("w", column, tap))
        if row_block == 0 and first == 0:
            transfers += [Transfer("x", row, Tap.run(0, head)) for row in range(ROWS)]
        for row in range(ROWS):
            start = head + (row_block * ROWS + row) * run
            transfers.append(Transfer("x", row, Tap.run(start, run, count // config.tiles)))
        for column in range(columns):
            start = row_block * block * half_n + (first * columns + column) * NT // 2
            tap = Tap(start, (1, count, block, NT // 2), (0, columns * NT // 2, half_n, 1))
            transfers.append(Transfer("y", column, tap))
        return Segment(tuple(transfers))

    step = arch.SHIM.repeat if config.tiles == 1 else 2
    segments: list[Segment] = []
    for row_block in range(row_blocks):
        for first in range(0, slots, step):
            count = min(step, slots - first)
            if config.tiles == 2 and count == 1:
                # An odd tile is computed beside its neighbour once more: the same bytes are written twice.
                first, count = first - 1, 2
            segments.append(segment(row_block, first, count))
    passes = row_blocks * -(-slots // config.tiles)
    return Plan(
        config,
        layout,
        m,
        bands,
        (passes, k_tiles, bands),
        tuple(segments),
        x_words=head + row_blocks * ROWS * run,
        x_offset=head,
        y_rows=row_blocks * block,
    )


def gemm_baseline(layout: PlainLayout, m: int) -> Plan:
    """The plan of the bfloat16 GEMM: 32 rows a core, activations bfloat16 [M][K] as they are, weights in plain tiles.

    Raises:
        PlanError: See `gemm`.
    """
    _check_rows(m)
    config = Configuration(Op.GEMM_BASELINE, BF16, layout.columns)
    columns, k_tiles, slots = config.columns, layout.k_tiles, layout.tiles_per_column
    tile, half_n, half_k = layout.tile_bytes // 4, layout.n_padded // 2, k_tiles * KT // 2
    rows = 2 * BAND
    row_blocks = -(-m // (rows * ROWS))
    head = config.x_object // 4
    segments: list[Segment] = []
    for row_block in range(row_blocks):
        for first in range(0, slots, arch.SHIM.repeat):
            count = min(arch.SHIM.repeat, slots - first)
            transfers = []
            for column in range(columns):
                start = (column * slots + first) * k_tiles * tile
                transfers.append(Transfer("w", column, Tap.run(start, count * k_tiles * tile)))
            transfers += [Transfer("x", row, Tap.run(0, head)) for row in range(ROWS) if not segments]
            for row in range(ROWS):
                start = head + (row_block * ROWS + row) * rows * half_k
                transfers.append(
                    Transfer("x", row, Tap(start, (count, k_tiles, rows, KT // 2), (0, KT // 2, half_k, 1)))
                )
            for column in range(columns):
                start = row_block * rows * ROWS * half_n + (first * columns + column) * NT // 2
                sizes = (1, count, rows * ROWS, NT // 2)
                transfers.append(Transfer("y", column, Tap(start, sizes, (0, columns * NT // 2, half_n, 1))))
            segments.append(Segment(tuple(transfers)))
    return Plan(
        config,
        layout,
        m,
        1,
        (row_blocks * slots, k_tiles),
        tuple(segments),
        x_words=head + row_blocks * ROWS * rows * half_k,
        x_offset=head,
        y_rows=row_blocks * rows * ROWS,
    )


def gemv(layout: Layout, *, streams: int = 1) -> Plan:
    """The plan of y = x W for one row of activations.

    Args:
        layout: The packed layer.
        streams: Weight streams of a column: 1, or 2 for twice the width where DRAM is faster than eight streams.

    Raises:
        PlanError: See `gemm`.
    """
    config = Configuration(Op.GEMV, Weights.of(layout), layout.columns, streams=streams)
    if streams == 1:
        return _gemv(config, layout)
    columns, slots, groups = config.columns, layout.tiles_per_column, layout.k_tiles // ROWS
    tile = layout.tile_bytes // 4
    objects = -(-groups // X_PART)
    x_run = objects * 2 * tile  # of a stream: an object for each of its two rows, then the next two
    segments: list[Segment] = []
    for first in range(0, slots, arch.SHIM.repeat):
        count = min(arch.SHIM.repeat, slots - first)
        transfers: list[Transfer] = []
        for column in range(columns):
            for stream in range(2):
                index = 2 * column + stream
                if not segments:
                    transfers.append(Transfer("x", index, Tap.run(stream * x_run, x_run)))
                start = ((column * slots + first) * layout.k_tiles + 2 * stream) * tile
                sizes = (1, count * groups, 8, tile // 4)
                transfers.append(Transfer("w", index, Tap(start, sizes, (0, ROWS * tile, tile // 4, 1))))
        segments.append(Segment((*transfers, *_gemv_results(columns, first, count))))
    return Plan(
        config, layout, 1, 1, (slots, groups, objects), tuple(segments), x_words=2 * x_run, x_offset=0, y_rows=1
    )


def _gemv(config: Configuration, layout: Stored) -> Plan:
    columns, k_tiles, slots = config.columns, layout.k_tiles, layout.tiles_per_column
    tile, head = layout.tile_bytes // 4, config.x_object // 4
    x_words = k_tiles * KT // 2
    segments: list[Segment] = []
    for first in range(0, slots, arch.SHIM.repeat):
        count = min(arch.SHIM.repeat, slots - first)
        transfers = []
        for column in range(columns):
            start = (column * slots + first) * k_tiles * tile
            transfers.append(Transfer("w", column, Tap.run(start, count * k_tiles * tile)))
        if not segments:
            transfers.append(Transfer("x", 0, Tap.run(0, head)))
        if config.op is Op.GEMV_BASELINE:
            transfers.append(Transfer("x", 0, Tap.run(head, x_words, count)))
        elif not segments:
            transfers.append(Transfer("x", 0, Tap.run(head, x_words)))
        segments.append(Segment((*transfers, *_gemv_results(columns, first, count))))
    rows = ROWS if config.op is Op.GEMV else 1
    return Plan(
        config,
        layout,
        1,
        1,
        (slots, k_tiles // rows),
        tuple(segments),
        x_words=head + x_words,
        x_offset=head,
        y_rows=1,
    )


def _gemv_results(columns: int, first: int, count: int) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(
            "y",
            column,
            Tap((first * columns + column) * NT // 2, (1, 1, count, NT // 2), (0, 0, columns * NT // 2, 1)),
        )
        for column in range(columns)
    )


def gemv_baseline(layout: PlainLayout | Layout) -> Plan:
    """The plan of the GEMV on one row of cores, for bfloat16 weights or packed ones.

    Raises:
        PlanError: See `gemm`.
    """
    weights = Weights.of(layout) if isinstance(layout, Layout) else BF16
    return _gemv(Configuration(Op.GEMV_BASELINE, weights, layout.columns), layout)


def _check_rows(m: int) -> None:
    if not isinstance(m, Integral) or m < 1:
        raise PlanError(f"M = {m!r}: pass the number of rows, at least 1")


__all__ = [
    "Budget",
    "Costs",
    "KernelCycles",
    "PlainLayout",
    "Plan",
    "gemm",
    "gemm_baseline",
    "gemv",
    "gemv_baseline",
]
