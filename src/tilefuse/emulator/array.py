"""A program laid out on the array: pools, locks, channels and descriptors, as the compiler's lowering makes them.

Rules of the lowering (mlir-aie's stateful transform of object fifos):

- An end of a fifo that goes through a DMA: ``depth`` objects, 2 locks, a channel, ``depth`` descriptors. Where all ends
  have one depth, the compiler takes it for a wish: a core that acquires n objects at a time has n + 1 (or 1 of a depth
  of 1). A worker that would get more than ``depth`` is refused; one that would get fewer is not found.
- A link has one pool in its memory tile: the objects of the fifo whose objects are bigger, in that fifo's depth. A
  split or join has 2 locks for each branch, and its joined side a descriptor for each branch of each object.
- Between neighbours with one consumer and no stream dimensions, the objects lie in a memory that both cores see: 2
  locks and no DMA.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tilefuse import arch
from tilefuse.arch import TileKind
from tilefuse.emulator.fifo import ObjectFifo, ObjectFifoHandle, ObjectFifoLink, RuntimeEndpoint
from tilefuse.emulator.limits import Channel, Place, TileUse, check_length, check_static_pattern
from tilefuse.emulator.program import Program, Worker
from tilefuse.errors import ArrayLimitError, DeviceError


@dataclass(eq=False)
class Pool:
    """Objects in a tile's memory."""

    place: Place
    depth: int
    nbytes: int


@dataclass(eq=False)
class RingPlan:
    """What one writer and one reader share of a pool: all of each object, or a branch's part."""

    fifo: str
    pool: Pool
    offset: int
    nbytes: int

    @property
    def where(self) -> str:
        """The tile, in words."""
        return f"{arch.kind_of(self.pool.place[1])} {self.pool.place}"


Pattern = tuple[list[int], list[int], int]
"""Sizes, strides, bytes of an element."""


@dataclass(eq=False)
class EndPlan:
    """One end of a stream: a channel and what it moves to or from, nothing for a shim's."""

    place: Place
    channel: Channel
    sends: bool
    rings: list[RingPlan] = field(default_factory=list)
    patterns: list[Pattern | None] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The channel, in words."""
        return f"{'MM2S' if self.sends else 'S2MM'} {self.channel.number} of {arch.kind_of(self.place[1])} {self.place}"


@dataclass(eq=False)
class FlowPlan:
    """A stream: one sender, one or several receivers."""

    fifo: str
    source: EndPlan
    sinks: list[EndPlan]


class Design:
    """The static part of a program on the array; printing it shows what each tile holds.

    Raises:
        ArrayLimitError: A tile has not what it needs.
        ValueError: A fifo lacks an end.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.device = program.device
        self.tiles: dict[Place, TileUse] = {}
        self.flows: list[FlowPlan] = []
        self.ports: dict[ObjectFifoHandle, RingPlan] = {}
        self.cores: dict[Place, Worker] = {}
        self.fifos: dict[str, ObjectFifo] = {}
        self._links: dict[ObjectFifoLink, list[RingPlan]] = {}
        if len(program.runtime.data) > arch.HOST_BUFFERS:
            raise ArrayLimitError(
                f"the sequence takes {len(program.runtime.data)} buffers of the host; there can be {arch.HOST_BUFFERS}"
            )
        for worker in program.workers:
            self._place_worker(worker)
        for fifo in _all_fifos(program):
            if fifo.name in self.fifos:
                raise ValueError(f"two fifos are named '{fifo.name}'")
            self.fifos[fifo.name] = fifo
        for fifo in self.fifos.values():
            self._lay_fifo(fifo)
        for tile in self.tiles.values():
            tile.check()

    def use(self, place: Place) -> TileUse:
        """What is used of a tile."""
        return self.tiles.setdefault(place, TileUse(place))

    # --- workers ---

    def _place_worker(self, worker: Worker) -> None:
        name = getattr(worker.core_fn, "__name__", "worker")
        place = self.device.place(worker.tile, TileKind.CORE, f"worker '{name}'")
        if place in self.cores:
            raise ArrayLimitError(f"two workers are pinned to core {place}; a core runs one")
        self.cores[place] = worker
        use = self.use(place)
        stack = worker.stack_size or arch.DEFAULT_STACK
        use.memory.append(("stack", stack))
        for buffer in worker.buffers:
            use.memory.append((f"buffer '{buffer.name}'", buffer.array_type.nbytes))
        if worker.barriers:
            use.locks.append(("barriers", len(worker.barriers)))

    # --- fifos ---

    def _lay_fifo(self, fifo: ObjectFifo) -> None:
        producer = fifo.producer
        if producer is None or producer.endpoint is None:
            raise ValueError(f"nothing produces fifo '{fifo.name}': give its prod() to a worker, a link or the Runtime")
        consumers = _consumers(fifo)
        if self._lay_shared(fifo, producer, consumers):
            return
        source = self._lay_end(producer)
        sinks = [self._lay_end(consumer) for consumer in consumers]
        if source.rings == [] and all(sink.rings == [] for sink in sinks):
            raise DeviceError(f"fifo '{fifo.name}' goes from the host to the host")
        self.flows.append(FlowPlan(fifo.name, source, sinks))

    def _lay_shared(self, fifo: ObjectFifo, producer: ObjectFifoHandle, consumers: list[ObjectFifoHandle]) -> bool:
        """Puts the fifo into a memory that both of its cores see, if there is one and nothing needs a DMA."""
        consumer = consumers[0]
        if (
            len(consumers) > 1
            or fifo.via_dma
            or fifo.dims_to_stream
            or consumer.dims_from_stream
            or not isinstance(producer.endpoint, Worker)
            or not isinstance(consumer.endpoint, Worker)
        ):
            return False
        place = _shared_memory(_worker_place(producer.endpoint), _worker_place(consumer.endpoint))
        if place is None:
            return False
        ring = self._pool_ring(fifo, place, producer.depth)
        self.ports[producer] = self.ports[consumer] = ring
        return True

    def _pool_ring(self, fifo: ObjectFifo, place: Place, depth: int) -> RingPlan:
        pool = self._pool(f"fifo '{fifo.name}'", place, depth, fifo.array_type.nbytes, branches=1)
        return RingPlan(fifo.name, pool, 0, pool.nbytes)

    def _pool(self, what: str, place: Place, depth: int, nbytes: int, branches: int) -> Pool:
        use = self.use(place)
        if depth > use.limits.lock_value:
            raise ArrayLimitError(f"{what}: {depth} objects; a lock counts up to {use.limits.lock_value}")
        use.memory.append((f"{what}, {depth} x {nbytes}", depth * nbytes))
        use.locks.append((what, 2 * branches))
        return Pool(place, depth, nbytes)

    def _lay_end(self, handle: ObjectFifoHandle) -> EndPlan:
        """The channel of one end of a stream, with its objects."""
        fifo, endpoint = handle.fifo, handle.endpoint
        what = f"fifo '{fifo.name}'"
        if isinstance(endpoint, Worker):
            place = _worker_place(endpoint)
            rings = [self._pool_ring(fifo, place, handle.depth)]
            self.ports[handle] = rings[0]
        elif isinstance(endpoint, ObjectFifoLink):
            place = self.device.place(endpoint.tile, TileKind.MEM, f"the link of {what}")
            rings = self._link_rings(endpoint, handle)
        else:
            assert isinstance(endpoint, RuntimeEndpoint)
            place = self.device.place(endpoint.tile, TileKind.SHIM, f"the host's end of {what}")
            rings = []
        kind = arch.kind_of(place[1])
        dims = fifo.dims_to_stream if handle.is_prod else handle.dims_from_stream
        itemsize = fifo.array_type.dtype.itemsize
        patterns: list[Pattern | None] = []
        for ring in rings:
            check_length(what, kind, ring.nbytes)
            patterns.append(
                (*check_static_pattern(what, kind, dims, itemsize, ring.nbytes), itemsize) if dims else None
            )
        if dims and not rings:
            check_static_pattern(what, kind, dims, itemsize, fifo.array_type.nbytes)
        descriptors = sum(ring.pool.depth for ring in rings)
        channel = self.use(place).add_channel(handle.is_prod, what, descriptors, handle.channel)
        return EndPlan(place, channel, handle.is_prod, rings, patterns)

    def _link_rings(self, link: ObjectFifoLink, handle: ObjectFifoHandle) -> list[RingPlan]:
        """What a link's pool means to one of its fifos: its branch, or all of them."""
        if link not in self._links:
            self._links[link] = self._lay_link(link)
        rings = self._links[link]
        many = link.sources if link.is_join else link.destinations if link.is_split else []
        return [rings[many.index(handle)]] if handle in many else rings

    def _lay_link(self, link: ObjectFifoLink) -> list[RingPlan]:
        place = self.device.place(link.tile, TileKind.MEM, f"the link of fifo '{link.sources[0].name}'")
        if not link.is_join and not link.is_split:
            into, out = link.sources[0], link.destinations[0]
            whole = into if into.fifo.array_type.nbytes >= out.fifo.array_type.nbytes else out
            names = f"{into.name} -> {out.name}"
        else:
            whole = link.destinations[0] if link.is_join else link.sources[0]
            names = whole.name
        nbytes = whole.fifo.array_type.nbytes
        branches = link.sources if link.is_join else link.destinations if link.is_split else [whole]
        pool = self._pool(f"fifo '{names}'", place, whole.depth, nbytes, len(branches))
        itemsize = whole.fifo.array_type.dtype.itemsize
        rings = []
        # As in the compiler, a branch has the bytes up to the next one's offset; its own objects may be parts of that.
        offsets = [offset * itemsize for offset in link.offsets]
        for branch, start, end in zip(branches, offsets, [*offsets[1:], nbytes], strict=True):
            length, part = end - start, branch.fifo.array_type.nbytes
            if start < 0 or length <= 0:
                raise ArrayLimitError(
                    f"fifo '{branch.name}' has bytes {start} to {end} of an object of '{whole.name}', which has "
                    f"{nbytes}; offsets must ascend within it"
                )
            if start % arch.WORD:
                raise ArrayLimitError(f"fifo '{branch.name}' begins at byte {start}, no multiple of {arch.WORD}")
            if length % part:
                raise ArrayLimitError(
                    f"fifo '{branch.name}' has {length} bytes of an object of '{whole.name}' and objects of {part}: "
                    "these must fill it"
                )
            rings.append(RingPlan(names if branch is whole else branch.name, pool, start, length))
        if offsets[0] != 0:
            raise ArrayLimitError(
                f"the {len(rings)} fifos linked with '{whole.name}' leave out the first {offsets[0]} bytes of its "
                "objects"
            )
        return rings

    # --- as text ---

    def __str__(self) -> str:
        lines = [f"{self.device}: {len(self.cores)} cores, {len(self.fifos)} fifos"]
        alike: dict[str, list[TileUse]] = {}
        for place in sorted(self.tiles, key=lambda place: (place[1], place[0])):
            tile = self.tiles[place]
            parts = []
            if tile.limits.memory:
                parts.append(f"{tile.bytes_used} of {tile.limits.memory} bytes,")
                parts.append(f"{tile.locks_used} of {tile.limits.locks} locks,")
                parts.append(f"{tile.descriptors_used} of {tile.limits.descriptors} descriptors,")
            parts.append(f"{len(tile.inputs)} of {tile.limits.channels_in} channels in,")
            parts.append(f"{len(tile.outputs)} of {tile.limits.channels_out} out")
            alike.setdefault(f"{tile.kind} {{}}: {' '.join(parts)}", []).append(tile)
        for text, tiles in alike.items():
            places = [str(tile.place) for tile in tiles]
            lines.append(
                text.format(", ".join(places) if len(places) <= 8 else f"{places[0]} and {len(places) - 1} more")
            )
        return "\n".join(lines)


def _worker_place(worker: Worker) -> Place:
    assert worker.tile.col is not None
    assert worker.tile.row is not None
    return worker.tile.col, worker.tile.row


def _shared_memory(producer: Place, consumer: Place) -> Place | None:
    """The tile whose memory both cores see: a core sees its own, the ones above and below, and the one to the west."""
    (pc, pr), (cc, cr) = producer, consumer
    if pc == cc and abs(pr - cr) <= 1:
        return producer
    if pr == cr and cc == pc + 1:
        return producer
    if pr == cr and cc == pc - 1:
        return consumer
    return None


def _consumers(fifo: ObjectFifo) -> list[ObjectFifoHandle]:
    """A fifo's consumers, the host counted once."""
    if not fifo.consumers:
        raise ValueError(f"nothing consumes fifo '{fifo.name}': give a cons() of it to a worker, a link or the Runtime")
    consumers: list[ObjectFifoHandle] = []
    host: ObjectFifoHandle | None = None
    for consumer in fifo.consumers:
        if consumer.endpoint is None:
            raise ValueError(f"a cons() of fifo '{fifo.name}' belongs to nothing: give it to a worker or the Runtime")
        if isinstance(consumer.endpoint, RuntimeEndpoint):
            if host is not None:
                if not consumer.endpoint.tile.is_at(host.shim_tile or consumer.endpoint.tile):
                    raise ValueError(f"fifo '{fifo.name}' has two different ends at the host")
                continue
            host = consumer
        consumers.append(consumer)
    return consumers


def _all_fifos(program: Program) -> list[ObjectFifo]:
    """The fifos in the order in which the compiler meets them, and gives channels to them."""
    handles = [*program.runtime.fifos, *(handle for worker in program.workers for handle in worker.fifos)]
    found: dict[ObjectFifo, None] = {}

    def visit(fifo: ObjectFifo) -> None:
        if fifo in found:
            return
        found[fifo] = None
        for handle in _ends(fifo):
            link = handle.endpoint
            if isinstance(link, ObjectFifoLink):
                for linked in [*link.sources, *link.destinations]:
                    visit(linked.fifo)

    for handle in sorted(handles, key=lambda handle: handle.name):
        visit(handle.fifo)
    return list(found)


def _ends(fifo: ObjectFifo) -> Iterable[ObjectFifoHandle]:
    return [*([fifo.producer] if fifo.producer else []), *fifo.consumers]
