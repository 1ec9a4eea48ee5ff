"""Buffers of a device: reused ones for activations and results, and those that hold packed weights."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tilefuse.layout import NT, Layout
from tilefuse.packed import PackedLinear
from tilefuse.runtime.xrt import BANK, Buffer, Xrt

IDLE_BYTES = 256 << 20
"""Bytes of unused buffers that are kept for later calls."""

SMALLEST = 4096
"""Bytes of the smallest buffer: a page, which is what the driver gives at least."""


def size_class(nbytes: int) -> int:
    """Bytes of the buffers that serve ``nbytes``: four sizes to each power of two, an eighth unused on average."""
    if nbytes <= SMALLEST:
        return SMALLEST
    step = 1 << max((nbytes - 1).bit_length() - 3, 10)
    return -(-nbytes // step) * step


class Pool:
    """Buffers for activations and results. Threads may share it.

    Args:
        xrt: The device.
        dropped: Takes the buffers that are given up: runs that they are bound to must go.
        idle_bytes: Bytes kept unused.
    """

    def __init__(self, xrt: Xrt, dropped: Callable[[Buffer], None], idle_bytes: int = IDLE_BYTES) -> None:
        self._xrt, self._dropped, self._limit = xrt, dropped, idle_bytes
        self._lock = threading.Lock()
        self._free: dict[tuple[int, int], list[Buffer]] = {}
        self._order: OrderedDict[Buffer, None] = OrderedDict()  # longest unused first
        self.idle_bytes = 0

    def take(self, size: int, group: int, what: str) -> Buffer:
        """A buffer of ``size`` bytes, one of `size_class`, contents undefined.

        Raises:
            NpuMemoryError: There is no memory for it, not even with all unused ones given back.
        """
        with self._lock:
            free = self._free.get((size, group & BANK))
            if free:
                buffer = free.pop()
                del self._order[buffer]
                self.idle_bytes -= size
                return buffer
        return self.allocate(size, group, what)

    def allocate(self, nbytes: int, group: int, what: str) -> Buffer:
        """A new buffer of exactly ``nbytes``, for which unused ones are given up if they must."""
        try:
            return self._new(nbytes, group, what)
        except MemoryError:
            if not self.trim(0):
                raise
        return self._new(nbytes, group, what)

    def _new(self, nbytes: int, group: int, what: str) -> Buffer:
        buffer = self._xrt.buffer(nbytes, group, what)
        # What the host's caches hold of fresh memory must not be written back over results later.
        buffer.to_device(nbytes)
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back that nothing uses any more."""
        with self._lock:
            self._free.setdefault((buffer.nbytes, buffer.bank), []).append(buffer)
            self._order[buffer] = None
            self.idle_bytes += buffer.nbytes
        if self.idle_bytes > self._limit:
            self.trim(self._limit)

    def trim(self, limit: int) -> bool:
        """Gives up the longest unused buffers until ``limit`` bytes are left; returns whether there were any."""
        dropped = []
        with self._lock:
            while self.idle_bytes > limit:
                buffer, _ = self._order.popitem(last=False)
                self._free[buffer.nbytes, buffer.bank].remove(buffer)
                self.idle_bytes -= buffer.nbytes
                dropped.append(buffer)
        for buffer in dropped:
            self._dropped(buffer)
        return bool(dropped)


@dataclass(frozen=True)
class Piece:
    """A run of a layer's outputs whose weights are in a buffer of their own.

    Attributes:
        layout: Of the piece alone.
        slot: First output tile of each column.
        first: First output channel.
    """

    layout: Layout
    slot: int
    first: int


def pieces_of(layout: Layout, most_bytes: int) -> tuple[Piece, ...]:
    """The layer in pieces of at most ``most_bytes`` of weights, or of one output tile a column if that is more."""
    slot_bytes = layout.columns * layout.k_tiles * layout.tile_bytes
    slots = max(1, most_bytes // slot_bytes)
    if layout.tiles_per_column <= slots:
        return (Piece(layout, 0, 0),)
    width = NT * layout.columns
    found = []
    for slot in range(0, layout.tiles_per_column, slots):
        n = min(layout.n - slot * width, slots * width)
        own = Layout(layout.k, n, layout.bits, layout.group, layout.zero, layout.columns)
        found.append(Piece(own, slot, slot * width))
    return tuple(found)


@dataclass
class Weights:
    """The buffers of a layer's weights, by piece and bank."""

    buffers: dict[tuple[int, int], Buffer] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.nbytes for buffer in self.buffers.values())


class WeightStore:
    """Packed weights on the device, each layer's once, as long as the layer lives.

    Args:
        pool: Where buffers come from.
        dropped: Takes the buffers of layers that are gone: runs that they are bound to must go. May be called by the
            garbage collector, from any thread and while any lock is held.
    """

    def __init__(self, pool: Pool, dropped: Callable[[Buffer], None]) -> None:
        self._pool, self._dropped = pool, dropped
        self._lock = threading.Lock()
        self._by_id: dict[int, tuple[weakref.ref[PackedLinear], Weights]] = {}
        self.uploads = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(weights.nbytes for _, weights in list(self._by_id.values()))

    def clear(self) -> None:
        """Gives all buffers back. Nothing may be bound to them."""
        with self._lock:
            self._by_id.clear()

    def get(self, layer: PackedLinear, index: int, piece: Piece, group: int) -> Buffer:
        """The buffer of a piece of a layer, uploaded if it isn't there.

        Raises:
            NpuMemoryError: There is no memory for it.
        """
        entry = self._by_id.get(id(layer))
        if entry is not None and entry[0]() is layer:
            buffer = entry[1].buffers.get((index, group & BANK))
            if buffer is not None:
                return buffer
        with self._lock:
            return self._upload(layer, index, piece, group)

    def _upload(self, layer: PackedLinear, index: int, piece: Piece, group: int) -> Buffer:
        entry = self._by_id.get(id(layer))
        if entry is None or entry[0]() is not layer:
            entry = self._register(layer)
        weights = entry[1]
        buffer = weights.buffers.get((index, group & BANK))
        if buffer is None:
            own = piece.layout
            buffer = self._pool.allocate(own.nbytes, group, f"the weights of layer {layer.name!r}")
            column_bytes = layer.layout.column_bytes
            start = piece.slot * own.k_tiles * own.tile_bytes
            for column in range(own.columns):
                source = column * column_bytes + start
                target = column * own.column_bytes
                buffer.array[target : target + own.column_bytes] = layer.data[source : source + own.column_bytes]
            buffer.to_device(own.nbytes)
            weights.buffers[index, group & BANK] = buffer
            self.uploads += 1
        return buffer

    def _register(self, layer: PackedLinear) -> tuple[weakref.ref[PackedLinear], Weights]:
        key, store = id(layer), weakref.ref(self)

        def gone(reference: weakref.ref[PackedLinear]) -> None:
            # Nothing here takes a lock: the collector may run this wherever it likes.
            found = store()
            if found is not None:
                found._forget(key, reference)

        old = self._by_id.get(key)
        if old is not None:  # a layer that was here before, and whose end has yet to be told
            self._forget(key, old[0])
        entry = (weakref.ref(layer, gone), Weights())
        self._by_id[key] = entry
        return entry

    def _forget(self, key: int, reference: weakref.ref[PackedLinear]) -> None:
        entry = self._by_id.get(key)
        if entry is not None and entry[0] is reference:
            self._by_id.pop(key, None)
            for buffer in entry[1].buffers.values():
                self._dropped(buffer)


class Dropped:
    """Buffers that runs may still be bound to, until those runs are gone. Adding takes no lock."""

    def __init__(self) -> None:
        self._waiting: deque[Buffer] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, buffer: Buffer) -> None:
        """Adds one."""
        self._waiting.append(buffer)

    def take(self) -> list[Buffer]:
        """All of them."""
        found = []
        while self._waiting:
            try:
                found.append(self._waiting.popleft())
            except IndexError:
                break
        return found
