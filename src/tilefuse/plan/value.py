"""The plan itself: a value that checks itself against the array, prints, and says what it would cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from tilefuse import arch
from tilefuse.configurations import Configuration, Op
from tilefuse.descriptors import Segment, Tap, Transfer, outstanding
from tilefuse.errors import PlanError
from tilefuse.layout import KT, NT, ROWS
from tilefuse.plan.costs import Costs, Traffic, modelled, passes
from tilefuse.plan.stored import Stored

WINDOW = 2
"""Segments open at a time: while one moves, the next one's tasks wait in the queues."""

MAX_BUFFER_BYTES = (1 << 31) - 1
"""Bytes of a host buffer at most: sequences address it by offsets that the compiler holds in signed 32-bit numbers."""

_BUFFERS = {"x": "activations", "w": "weights", "y": "results"}


def check_buffers(layout: Stored, m: int, x_words: int, y_rows: int) -> None:
    """Raises PlanError if a host buffer of the problem has more than `MAX_BUFFER_BYTES`."""
    sizes = {"activations": arch.WORD * x_words, "weights": layout.nbytes, "results": y_rows * layout.n_padded * 2}
    for name, nbytes in sizes.items():
        if nbytes > MAX_BUFFER_BYTES:
            raise PlanError(
                f"M = {m}, K = {layout.k}, N = {layout.n}: the {name} take {nbytes} bytes, and a buffer holds "
                f"{MAX_BUFFER_BYTES}; split the problem along {'N' if name == 'weights' else 'M'}"
            )


@dataclass(frozen=True)
class Plan:
    """How one problem runs on one configuration.

    Raises:
        PlanError: A buffer, a descriptor or a queue is past what the array takes; the message says which.
    """

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
    """Words of the head (0 where the objects of activations have it inside)."""
    y_rows: int
    """Rows of the results' buffer, padding included."""

    def __post_init__(self) -> None:
        check_buffers(self.layout, self.m, self.x_words, self.y_rows)
        words = {"x": self.x_words, "w": self.w_words, "y": self.y_words}
        seen: set[Tap] = set()
        for transfer in self.transfers():
            tap = transfer.tap
            # Most transfers differ in their offsets only: the loops are checked once, the buffer's end each time.
            loops = Tap(0, tap.sizes, tap.strides)
            if loops not in seen or tap.offset < 0 or tap.end > words[transfer.stream]:
                seen.add(loops)
                causes = ("", "", f"N = {self.n}" if transfer.stream == "y" else "", "")
                tap.check(self._title(transfer), words[transfer.stream], causes)
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
        return self.layout.nbytes // arch.WORD

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
        """Rows of a band of all four array rows (1 for a GEMV, whose array rows share one)."""
        gemm = self.configuration.op in (Op.GEMM, Op.GEMM_BASELINE)
        return self.configuration.rows * (ROWS if gemm else 1)

    @property
    def joined(self) -> int:
        """Bands of a core whose rows follow each other in a row block."""
        return min(self.bands, self.configuration.join)

    @property
    def passes(self) -> int:
        """Times that the activations of a row block are used: output tiles of a column, or pairs of them."""
        return passes(self.configuration, self.layout)

    @property
    def tasks(self) -> int:
        """Tasks to issue."""
        return sum(segment.tasks for segment in self.segments)

    def transfers(self) -> Iterator[Transfer]:
        """All tasks, in the order of their issue."""
        for segment in self.segments:
            yield from segment.transfers

    def channel(self, transfer: Transfer) -> tuple[str, int]:
        """The stream and index whose channel takes ``transfer``: with two weight streams, x goes the way of w."""
        if transfer.stream == "x" and self.configuration.streams == 2:
            return "w", transfer.index
        return transfer.stream, transfer.index

    @cached_property
    def outstanding(self) -> tuple[Counter[tuple[str, int]], ...]:
        """Tasks of each channel that may be outstanding once a segment is issued, for each segment."""
        return tuple(outstanding(self.segments, WINDOW, self.channel))

    @cached_property
    def queue_depths(self) -> dict[tuple[str, int], int]:
        """Most tasks outstanding on each channel."""
        deepest: Counter[tuple[str, int]] = Counter()
        for counts in self.outstanding:
            deepest |= counts
        return dict(deepest)

    def bytes_of(self, *streams: str) -> int:
        """Bytes that the shims move for ``streams``. What several of them read alike counts for each."""
        return sum(arch.WORD * t.tap.words for t in self.transfers() if t.stream in streams)

    @property
    def dram_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to the host's memory."""
        return self.traffic.x + self.traffic.w, self.traffic.y

    @property
    def macs(self) -> int:
        """Products of the problem, padding not counted."""
        return self.m * self.k * self.n

    @cached_property
    def traffic(self) -> Traffic:
        """What the shims move, and in how many tasks."""
        return Traffic(self.bytes_of("x"), self.bytes_of("w"), self.bytes_of("y"), self.tasks, len(self.segments))

    @cached_property
    def costs(self) -> Costs:
        """What each part of the array would need, modelled."""
        return modelled(self.configuration, self.layout, self.bands, self.row_blocks, self.traffic)

    def _title(self, transfer: Transfer) -> str:
        return f"M = {self.m}, K = {self.k}, N = {self.n}: {_BUFFERS[transfer.stream]} of stream {transfer.index}"

    def __str__(self) -> str:
        return "\n".join(self._summary())

    def details(self) -> str:
        """All descriptors, a line each: segment, stream, tasks that its channel may then have, loops (size@stride)."""
        lines = ["segment  stream  queued  words"]
        for number, (segment, counts) in enumerate(zip(self.segments, self.outstanding, strict=True)):
            for transfer in segment.transfers:
                name, queued = f"{transfer.stream}{transfer.index}", counts[self.channel(transfer)]
                lines.append(f"{number:7}  {name:6}  {queued:6}  {transfer.tap}")
        return "\n".join(lines)

    def _summary(self) -> Iterator[str]:
        config, layout = self.configuration, self.layout
        problem = f"{self.m} x {self.k} by {self.k} x {self.n}"
        yield f"{config.op} of {problem}, weights {config.weights.tag}, on {config.name}"
        yield f"  kernel      {config.kernel}"
        yield (
            f"  tiles       K {layout.k_tiles} of {KT} (padded to {layout.k_tiles * KT}), "
            f"N {layout.tiles_per_column} of {NT} in each of {layout.columns} columns (padded to {layout.n_padded})"
        )
        if self.block_rows > 1:
            blocks = f"{self.row_blocks} block{'s' if self.row_blocks > 1 else ''} of {self.bands * self.block_rows}"
            yield f"  rows        {blocks} (padded to {self.y_rows})"
        yield f"  passes      {self.passes} a block; parameters {list(self.parameters)}"
        for budget in config.budgets():
            yield f"  {budget}"
        yield (
            f"  segments    {len(self.segments)}, {self.tasks} tasks, at most {max(self.queue_depths.values())} on a "
            f"channel (of {arch.QUEUE_DEPTH}), {WINDOW} segments open"
        )
        for transfer in self.segments[0].transfers:
            if transfer.index == 0:
                yield f"    {transfer.stream}{transfer.index}  {transfer.tap}"
        read, written = self.dram_bytes
        yield f"  DRAM        {read} bytes read, {written} written"
        costs = self.costs
        yield (
            f"  modelled    {costs.total * 1e6:.1f} us, bound by {costs.bound}: compute {costs.compute * 1e6:.1f} "
            f"and {costs.y_wait * 1e6:.1f} until results have left, "
            f"x {costs.x_stream * 1e6:.1f}, w {costs.w_stream * 1e6:.1f}, y {costs.y_stream * 1e6:.1f}, "
            f"DRAM {costs.dram * 1e6:.1f}, commands {costs.control * 1e6:.1f}"
        )
