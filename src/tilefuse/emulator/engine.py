"""The event loop, rings of objects, and flows that move bytes between them.

Time is in core cycles. A *ring* is a fifo's objects in one memory, with one writer and one reader: counting locks say
how many are free and how many are filled. A *flow* is what one stream carries: from a source (a ring, or a shim's
tasks) to one or several sinks. It moves a chunk whenever the source has one and every sink has room: the chunk ends
where the first of their objects ends, so that objects may have another size on each side.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilefuse import arch
from tilefuse._buffers import aligned_empty
from tilefuse.layout import ALIGNMENT

Bytes = npt.NDArray[np.uint8]

POISON = 0xFF
"""What memory holds before it is written and after it is given back: NaN in every float format, -1 in integers."""


class Clock:
    """Events by time, then by order of arrival."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def at(self, time: float, do: Callable[[Any], None], argument: Any = None) -> None:
        """Calls ``do(argument)`` at ``time``, now at the earliest."""
        self._count += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._count, do, argument))

    def run(self) -> None:
        """Runs until nothing is scheduled."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, do, argument = pop(heap)
            do(argument)

    def clear(self) -> None:
        """Forgets what is scheduled."""
        self._heap.clear()

    def reset(self) -> None:
        """Begins another run at 0, so that its sums round as those of any other; nothing is scheduled."""
        assert not self._heap
        self.now = 0.0


class Waiter(Protocol):
    """Who is told when a ring has another object or more room."""

    def ring_changed(self, ring: Ring) -> None: ...


class Ring:
    """Objects of a fifo in one memory, or the part of a joined object that one fifo fills."""

    __slots__ = (
        "depth", "fifo", "filled", "free", "live", "nbytes", "place", "poisons", "reader", "reading", "slots", "writer",
        "writing",
    )  # fmt: skip

    def __init__(self, fifo: str, place: str, slots: Sequence[Bytes]) -> None:
        self.fifo = fifo
        """Name of the fifo, for messages."""
        self.place = place
        """The tile that it lies in, for messages."""
        self.slots = slots
        self.depth = len(slots)
        self.nbytes = slots[0].nbytes
        self.live = [False] * self.depth
        """Which objects hold bytes: those that somebody wrote, and in a run for timing only those from the host."""
        self.free = self.depth
        self.filled = 0
        self.writing = 0
        """Objects that the writer holds."""
        self.reading = 0
        """Objects that the reader holds."""
        self.poisons = True
        self.writer: Waiter | None = None
        self.reader: Waiter | None = None

    def publish(self, count: int) -> None:
        """The writer has filled ``count`` of the objects that it holds."""
        self.writing -= count
        self.filled += count
        if self.reader is not None:
            self.reader.ring_changed(self)

    def give_back(self, slots: Sequence[int]) -> None:
        """The reader needs these objects no more."""
        self.reading -= len(slots)
        self.free += len(slots)
        if self.poisons:
            for slot in slots:
                self.slots[slot].fill(POISON)
        if self.writer is not None:
            self.writer.ring_changed(self)

    def state(self) -> str:
        """How many objects are free, filled and held, in words."""
        parts = [f"{self.filled} of {self.depth} filled", f"{self.free} free"]
        if self.writing:
            parts.append(f"{self.writing} being written")
        if self.reading:
            parts.append(f"{self.reading} being read")
        return ", ".join(parts)


def allocate(depth: int, nbytes: int) -> list[Bytes]:
    """``depth`` objects, each aligned for the kernels, poisoned."""
    pitch = -(-nbytes // ALIGNMENT) * ALIGNMENT
    memory = aligned_empty(depth * pitch)
    memory.fill(POISON)
    return [memory[i * pitch : i * pitch + nbytes] for i in range(depth)]


class Pattern:
    """A static address pattern of an object, for each of its slots."""

    __slots__ = ("_views",)

    def __init__(self, slots: Sequence[Bytes], sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> None:
        dtype = np.dtype(f"V{itemsize}") if itemsize not in (1, 2, 4, 8) else np.dtype(f"u{itemsize}")
        self._views = [
            np.lib.stride_tricks.as_strided(
                slot.view(dtype), tuple(sizes), tuple(stride * itemsize for stride in strides)
            )
            for slot in slots
        ]

    def gather(self, slot: int) -> Bytes:
        """The bytes in the order of the pattern."""
        return np.ascontiguousarray(self._views[slot]).reshape(-1).view(np.uint8)

    def scatter(self, slot: int, stream: Bytes) -> None:
        """Puts ``stream`` where the pattern says."""
        view = self._views[slot]
        view[...] = stream.view(view.dtype).reshape(view.shape)


class Port(Protocol):
    """One end of a flow."""

    label: str
    remaining: int
    """Bytes until its current object or transfer ends; 0 where it has none yet."""

    def ready(self) -> bool:
        """Whether it has an object or a transfer, or could take one."""

    def begin(self) -> None:
        """Takes the next object, which is there; called where `remaining` is 0."""

    def waits_for(self) -> str:
        """What it lacks, in words."""

    def advance(self, nbytes: int) -> None:
        """``nbytes`` of its current object have been moved."""


class Source(Port, Protocol):
    """Where a flow's bytes come from."""

    def read(self, nbytes: int) -> Bytes | None:
        """The next bytes, None where there are none but only their number counts."""


class Sink(Port, Protocol):
    """Where a flow's bytes go."""

    def write(self, data: Bytes | None, nbytes: int) -> None:
        """Takes the next bytes."""


class RingEnd:
    """A DMA channel's end at one ring, or at several in turn (a join's or a split's)."""

    __slots__ = ("_at", "_positions", "data", "label", "nbytes", "patterns", "remaining", "rings", "slot", "stage")

    def __init__(self, label: str, rings: Sequence[Ring], patterns: Sequence[Pattern | None]) -> None:
        self.label = label
        self.rings = rings
        self.patterns = patterns
        self._at = 0
        self._positions = [0] * len(rings)
        self.remaining = 0
        self.nbytes = 0
        self.slot = 0
        self.stage: Bytes | None = None
        self.data = True
        """Whether all bytes of the current object are there."""

    @property
    def ring(self) -> Ring:
        """The ring whose turn it is."""
        return self.rings[self._at]

    def _begin(self, ring: Ring) -> None:
        at = self._at
        self.slot = self._positions[at]
        self._positions[at] = (self.slot + 1) % ring.depth
        self.remaining = self.nbytes = ring.nbytes

    def _end(self) -> None:
        self.stage = None
        self._at = (self._at + 1) % len(self.rings)


class RingSource(RingEnd):
    """A channel that sends a ring's objects (MM2S)."""

    def ready(self) -> bool:
        return self.remaining > 0 or self.rings[self._at].filled > 0

    def begin(self) -> None:
        ring = self.ring
        ring.filled -= 1
        ring.reading += 1
        self._begin(ring)
        pattern = self.patterns[self._at]
        if ring.live[self.slot]:
            self.stage = pattern.gather(self.slot) if pattern is not None else ring.slots[self.slot]

    def waits_for(self) -> str:
        return f"an object of fifo '{self.ring.fifo}' in {self.ring.place} ({self.ring.state()})"

    def read(self, nbytes: int) -> Bytes | None:
        if self.stage is None:
            return None
        start = self.nbytes - self.remaining
        return self.stage[start : start + nbytes]

    def advance(self, nbytes: int) -> None:
        self.remaining -= nbytes
        if not self.remaining:
            ring, slot = self.ring, self.slot
            self._end()
            ring.give_back((slot,))


class RingSink(RingEnd):
    """A channel that fills a ring's objects (S2MM)."""

    def ready(self) -> bool:
        return self.remaining > 0 or self.rings[self._at].free > 0

    def begin(self) -> None:
        ring = self.ring
        ring.free -= 1
        ring.writing += 1
        self._begin(ring)
        self.data = True
        self.stage = ring.slots[self.slot] if self.patterns[self._at] is None else None

    def waits_for(self) -> str:
        return f"room in fifo '{self.ring.fifo}' in {self.ring.place} ({self.ring.state()})"

    def write(self, data: Bytes | None, nbytes: int) -> None:
        if data is None:
            self.data = False
            return
        if self.stage is None:
            self.stage = np.empty(self.nbytes, np.uint8)
        start = self.nbytes - self.remaining
        self.stage[start : start + nbytes] = data

    def advance(self, nbytes: int) -> None:
        self.remaining -= nbytes
        if not self.remaining:
            ring, slot, pattern = self.ring, self.slot, self.patterns[self._at]
            if pattern is not None and self.data and self.stage is not None:
                pattern.scatter(slot, self.stage)
            ring.live[slot] = self.data
            self._end()
            ring.publish(1)

    @property
    def partial(self) -> int:
        """Bytes of an object that has not come in whole."""
        return self.nbytes - self.remaining if self.remaining else 0


class _Lane:
    """Transfers of one direction; all go at the same rate, so each is done once ``passed`` has grown by its bytes."""

    __slots__ = ("active", "moved", "passed", "rate")

    def __init__(self) -> None:
        self.active: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self.passed = self.rate = 0.0
        self.moved = 0


class Dram:
    """The host's memory, which all shims share burst by burst: all reads go at one rate, and all writes.

    Reads have `arch.DRAM_READ` at most and go first; writes have what they leave of `arch.DRAM_TOTAL`. No transfer is
    faster than its stream.
    """

    __slots__ = ("_clock", "_count", "_lanes", "_read", "_since", "_total", "_turn")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read = arch.DRAM_READ / arch.CLOCK_HZ
        self._total = arch.DRAM_TOTAL / arch.CLOCK_HZ
        self._lanes = (_Lane(), _Lane())
        self._since = 0.0
        self._count = self._turn = 0

    @property
    def bytes_read(self) -> int:
        """Since `reset`."""
        return self._lanes[0].moved

    @property
    def bytes_written(self) -> int:
        """Since `reset`."""
        return self._lanes[1].moved

    def reset(self) -> None:
        """Begins another run: nothing moved, nothing under way."""
        self._since = self._clock.now
        for lane in self._lanes:
            lane.moved = 0
            lane.passed = lane.rate = 0.0
            lane.active.clear()

    def transfer(self, nbytes: int, read: bool, done: Callable[[Any], None], argument: Any) -> None:
        """Calls ``done(argument)`` when ``nbytes`` have moved."""
        self._advance()
        lane = self._lanes[0 if read else 1]
        lane.moved += nbytes
        self._count += 1
        heapq.heappush(lane.active, (lane.passed + nbytes, self._count, done, argument))
        self._share()

    def _advance(self) -> None:
        elapsed = self._clock.now - self._since
        self._since = self._clock.now
        for lane in self._lanes:
            if lane.active:
                lane.passed += elapsed * lane.rate

    def _share(self) -> None:
        """Sets the rates for the transfers under way, and when the first of them is done."""
        reads, writes = self._lanes
        readers, writers = len(reads.active), len(writes.active)
        read = min(arch.STREAM_BYTES, self._read / readers) if readers else 0.0
        left = self._total - readers * read
        reads.rate, writes.rate = read, min(arch.STREAM_BYTES, left / writers) if writers else 0.0
        if readers or writers:
            wait = min((lane.active[0][0] - lane.passed) / lane.rate for lane in self._lanes if lane.active)
            self._turn += 1
            self._clock.at(self._clock.now + wait, self._finish, self._turn)

    def _finish(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._advance()
        finished = []
        for lane in self._lanes:
            # Rounding of the waits: what is left is below a thousandth of a byte.
            while lane.active and lane.active[0][0] <= lane.passed + 1e-3:
                finished.append(heapq.heappop(lane.active))
        self._share()
        for _, _, done, argument in finished:
            done(argument)


class Flow:
    """What one stream carries."""

    __slots__ = (
        "began", "busy", "bytes_moved", "clock", "dram", "fifo", "not_before", "reads_dram", "sinks", "source", "spans",
    )  # fmt: skip

    def __init__(self, clock: Clock, fifo: str, source: Source, sinks: Sequence[Sink]) -> None:
        self.clock = clock
        self.fifo = fifo
        self.source = source
        self.sinks = sinks
        self.busy = False
        self.bytes_moved = 0
        self.dram: Dram | None = None
        """The host's memory, where an end is a shim's."""
        self.reads_dram = False
        self.began = 0.0
        """When the chunk under way began."""
        self.not_before = 0.0
        """When the source's or the sink's transfer can move its first byte."""
        self.spans: list[tuple[float, float]] | None = None
        """Beginning and end of each chunk, where a trace is kept."""

    def ring_changed(self, ring: Ring) -> None:
        """See `Waiter`."""
        if not self.busy:
            self.start()

    def start(self, _: Any = None) -> None:
        """Begins a chunk if the source has bytes and every sink has room."""
        if self.busy:
            return
        source = self.source
        ready = source.ready()
        for sink in self.sinks:
            ready = sink.ready() and ready  # all are asked: a shim begins its task meanwhile
        if not ready:
            return
        now = self.clock.now
        if now < self.not_before:
            self.clock.at(self.not_before, self.start)
            return
        if not source.remaining:
            source.begin()
        nbytes = source.remaining
        for sink in self.sinks:
            if not sink.remaining:
                sink.begin()
            if sink.remaining < nbytes:
                nbytes = sink.remaining
        self.busy = True
        self.began = now
        if self.dram is not None:
            self.dram.transfer(nbytes, self.reads_dram, self._finish, nbytes)
        else:
            self.clock.at(now + nbytes / arch.STREAM_BYTES, self._finish, nbytes)

    def _finish(self, nbytes: int) -> None:
        if self.spans is not None:
            self.spans.append((self.began, self.clock.now))
        data = self.source.read(nbytes)
        for sink in self.sinks:
            sink.write(data, nbytes)
        self.bytes_moved += nbytes
        # Still busy: what the ends publish may call `start`, and each end must have moved on before that.
        for sink in self.sinks:
            sink.advance(nbytes)
        self.source.advance(nbytes)
        self.busy = False
        self.start()

    def blocked(self) -> str | None:
        """What the flow waits for, None where it has nothing to move."""
        lacking = [end.waits_for() for end in (self.source, *self.sinks) if not end.ready()]
        if not lacking or not (self.source.ready() or self.partial):
            return None
        return f"the stream of fifo '{self.fifo}' waits for " + " and ".join(lacking)

    @property
    def partial(self) -> int:
        """Bytes of objects that have not come in whole at some sink."""
        return max(getattr(sink, "partial", 0) for sink in self.sinks)
