"""`ObjectFifo` and what hangs on it: handles, links. They describe a design; `array` and `engine` give them meaning."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tilefuse.emulator.cores import Element, executing_core
from tilefuse.emulator.sequence import Task, active_sequence
from tilefuse.emulator.tile import AnyMemTile, AnyShimTile, Tile
from tilefuse.emulator.values import ArrayType, array_type
from tilefuse.errors import DeviceError, DtypeError

if TYPE_CHECKING:
    from tilefuse.emulator.program import Worker

StreamDims: TypeAlias = Sequence[Sequence[int]]
"""(size, stride) pairs from the outermost dimension to the innermost, in elements."""

Endpoint: TypeAlias = "Worker | ObjectFifoLink | RuntimeEndpoint"


def refuse_unless_default(what: str, **given: tuple[Any, Any]) -> None:
    """Raises for the arguments whose value is not the default: they mean something that is not modelled."""
    for name, (value, default) in given.items():
        if value is not default and value != default:
            raise DeviceError(
                f"{what}: the emulator does not model {name}={value!r}; leave {name} out to run the design here"
            )


class RuntimeEndpoint:
    """The host's end of a fifo: a DMA channel of a shim."""

    def __init__(self, tile: Tile | None) -> None:
        self.tile = tile or AnyShimTile


class ObjectFifo:
    """A ring of ``depth`` objects between one producer and one or several consumers, as in IRON."""

    _index = itertools.count()

    def __init__(
        self,
        obj_type: Any,
        *,
        depth: int | None = 2,
        name: str | None = None,
        dims_to_stream: StreamDims | None = None,
        dims_from_stream_per_cons: StreamDims | None = None,
        plio: bool = False,
        pad_dimensions: StreamDims | None = None,
        pad_value: int = 0,
        disable_synchronization: bool = False,
        repeat_count: int | None = None,
        delegate_tile: Tile | None = None,
        via_DMA: bool = False,
        init_values: list[Any] | None = None,
        consumer_obj_type: Any = None,
        aie_stream: tuple[int, int] | None = None,
    ) -> None:
        if depth is not None and not isinstance(depth, int):
            raise DtypeError(f"the depth of a fifo is {depth!r}; pass an integer")
        if depth is not None and depth < 1:
            raise ValueError(f"Default ObjectFifo depth must be above 0, not {depth}")
        self.is_named = name is not None
        self.name = name if name is not None else f"of{next(ObjectFifo._index)}"
        refuse_unless_default(
            f"fifo '{self.name}'",
            plio=(plio, False),
            pad_dimensions=(pad_dimensions, None),
            pad_value=(pad_value, 0),
            disable_synchronization=(disable_synchronization, False),
            repeat_count=(repeat_count, None),
            delegate_tile=(delegate_tile, None),
            init_values=(init_values, None),
            consumer_obj_type=(consumer_obj_type, None),
            aie_stream=(aie_stream, None),
        )
        self.obj_type = obj_type
        self.array_type: ArrayType = array_type(obj_type, f"the object type of fifo '{self.name}'")
        self.depth = depth
        self.dims_to_stream = dims_to_stream
        self.dims_from_stream_per_cons = dims_from_stream_per_cons
        self.via_dma = via_DMA
        self.producer: ObjectFifoHandle | None = None
        self.consumers: list[ObjectFifoHandle] = []

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of an object."""
        return self.array_type.shape

    @property
    def dtype(self) -> Any:
        """Scalar type of an object's elements."""
        return self.array_type.dtype.type

    @property
    def has_one_depth(self) -> bool:
        """Whether all ends have the same depth."""
        return self.producer is None or all(end.depth == self.producer.depth for end in self.consumers)

    def prod(self, depth: int | None = None, channel: int | None = None, tile: Tile | None = None) -> ObjectFifoHandle:
        """The producer's handle; there is one, which later calls return again."""
        if self.producer is None:
            self.producer = ObjectFifoHandle(self, True, depth, channel=channel, tile=tile)
            return self.producer
        if depth is not None and depth < 1:
            raise ValueError(f"fifo '{self.name}': a depth must be above 0, not {depth}")
        if channel is not None and self.producer.channel != channel:
            raise ValueError(f"fifo '{self.name}': its producer has channel {self.producer.channel}, not {channel}")
        if tile is not None and not tile.is_at(self.producer.shim_tile):
            raise ValueError(f"fifo '{self.name}': its producer is pinned to {self.producer.shim_tile}, not to {tile}")
        return self.producer

    def cons(
        self,
        depth: int | None = None,
        dims_from_stream: StreamDims | None = None,
        channel: int | None = None,
        tile: Tile | None = None,
    ) -> ObjectFifoHandle:
        """The handle of a new consumer: with several, each gets every object (broadcast)."""
        if depth is None and self.depth is None:
            raise ValueError(f"fifo '{self.name}' has no default depth: pass one to cons()")
        handle = ObjectFifoHandle(self, False, depth, dims_from_stream, channel, tile)
        self.consumers.append(handle)
        return handle

    def __str__(self) -> str:
        return f"ObjectFifo('{self.name}', {self.array_type}, depth={self.depth})"


class ObjectFifoHandle:
    """An end of a fifo, for a worker (`acquire`, `release`), the host (`fill`, `drain`) or a link."""

    def __init__(
        self,
        of: ObjectFifo,
        is_prod: bool,
        depth: int | None = None,
        dims_from_stream: StreamDims | None = None,
        channel: int | None = None,
        tile: Tile | None = None,
    ) -> None:
        depth = of.depth if depth is None else depth
        if depth is None:
            raise ValueError(f"fifo '{of.name}' has no default depth: pass one to prod() or cons()")
        if not isinstance(depth, int):
            raise DtypeError(f"fifo '{of.name}': a depth is {depth!r}; pass an integer")
        if depth < 1:
            raise ValueError(f"fifo '{of.name}': a depth must be above 0, not {depth}")
        self.fifo = of
        self.is_prod = is_prod
        self.depth: int = depth
        self.channel = channel
        self.shim_tile = tile
        self.dims_from_stream = None if is_prod else dims_from_stream or of.dims_from_stream_per_cons
        self._endpoint: Endpoint | None = None

    @property
    def name(self) -> str:
        """Name of the fifo."""
        return self.fifo.name

    @property
    def obj_type(self) -> Any:
        """Type of an object."""
        return self.fifo.obj_type

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of an object."""
        return self.fifo.shape

    @property
    def dtype(self) -> Any:
        """Scalar type of an object's elements."""
        return self.fifo.dtype

    @property
    def handle_type(self) -> str:
        """``prod`` or ``cons``."""
        return "prod" if self.is_prod else "cons"

    @property
    def endpoint(self) -> Endpoint | None:
        """Who has this end: a worker, a link or the host."""
        return self._endpoint

    @endpoint.setter
    def endpoint(self, endpoint: Endpoint) -> None:
        if self._endpoint is not None and self._endpoint is not endpoint:
            raise ValueError(f"{self}: this end has been given away already; each cons() makes one of its own")
        self._endpoint = endpoint

    def __str__(self) -> str:
        return f"'{self.name}'.{self.handle_type}()"

    # --- in a worker ---

    def acquire(self, num_elem: int) -> Element | Sequence[Element]:
        """Waits until the core holds ``num_elem`` objects of this end: one, or a list, the oldest first."""
        if num_elem < 1:
            raise ValueError(f"{self}: acquire at least one object, not {num_elem}")
        if self.depth < num_elem:
            raise ValueError(f"{self}: {num_elem} objects to acquire are more than the depth {self.depth}")
        return executing_core(f"{self}.acquire").acquire(self, num_elem)

    def release(self, num_elem: int) -> None:
        """Gives the ``num_elem`` oldest objects that the core holds to the other end."""
        if num_elem < 1:
            raise ValueError(f"{self}: release at least one object, not {num_elem}")
        if self.depth < num_elem:
            raise ValueError(f"{self}: {num_elem} objects to release are more than the depth {self.depth}")
        executing_core(f"{self}.release").release(self, num_elem)

    # --- in a run-time sequence ---

    def fill(
        self,
        source: Any,
        tap: Any = None,
        wait: bool = False,
        packet: tuple[int, int] | None = None,
        offset_parameter: Any = None,
        group: Any = None,
        sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        offset: int | None = None,
        transfer_len: int | None = None,
        managed: bool = True,
    ) -> Task:
        """Sends data of the host's buffer ``source`` into the fifo."""
        if not self.is_prod:
            raise ValueError(f"{self}: fill() is for a producer's handle")
        what = f"{self}.fill"
        _refuse_transfer_options(what, packet, offset_parameter, transfer_len, managed)
        return active_sequence(what).transfer(self, source, tap, wait, group, sizes, strides, offset)

    def drain(
        self,
        dest: Any,
        tap: Any = None,
        wait: bool = False,
        packet: tuple[int, int] | None = None,
        offset_parameter: Any = None,
        group: Any = None,
        sizes: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        offset: int | None = None,
        transfer_len: int | None = None,
        managed: bool = True,
    ) -> Task:
        """Brings data of the fifo into the host's buffer ``dest``."""
        if self.is_prod:
            raise ValueError(f"{self}: drain() is for a consumer's handle")
        what = f"{self}.drain"
        _refuse_transfer_options(what, packet, offset_parameter, transfer_len, managed)
        return active_sequence(what).transfer(self, dest, tap, wait, group, sizes, strides, offset)

    # --- links ---

    def join(
        self,
        offsets: list[int],
        tile: Tile | None = AnyMemTile,
        depths: list[int] | None = None,
        obj_types: list[Any] | None = None,
        names: list[str] | None = None,
        dims_to_stream: Sequence[StreamDims | None] | None = None,
        dims_from_stream: Sequence[StreamDims | None] | None = None,
        plio: bool = False,
        repeat_counts: list[int | None] | None = None,
    ) -> list[ObjectFifo]:
        """Fifos whose objects lie at ``offsets`` (elements) of this one's, put together in a memory tile."""
        if not self.is_prod:
            raise ValueError(f"{self}: join() is for a producer's handle")
        what = f"{self}.join"
        refuse_unless_default(what, plio=(plio, False))
        n = len(offsets)
        _each(what, n, "repeat_counts", repeat_counts, None)
        depths = _each(what, n, "depths", depths, self.depth)
        types = _each(what, n, "obj_types", obj_types, self.obj_type)
        labels = _each(what, n, "names", names, None)
        to_stream = _each(what, n, "dims_to_stream", dims_to_stream, None)
        from_stream = _each(what, n, "dims_from_stream", dims_from_stream, None)
        fifos = [_linked(self, labels[i], f"_join{i}", types[i], depths[i], to_stream[i], None) for i in range(n)]
        ends = [fifo.cons(depths[i], from_stream[i]) for i, fifo in enumerate(fifos)]
        ObjectFifoLink(ends, [self], tile, offsets)
        return fifos

    def split(
        self,
        offsets: list[int],
        tile: Tile | None = AnyMemTile,
        depths: list[int] | None = None,
        obj_types: list[Any] | None = None,
        names: list[str] | None = None,
        dims_to_stream: Sequence[StreamDims | None] | None = None,
        dims_from_stream: Sequence[StreamDims | None] | None = None,
        plio: bool = False,
        repeat_counts: list[int | None] | None = None,
        pad_dimensions: Sequence[StreamDims | None] | None = None,
        pad_value: list[int] | None = None,
    ) -> list[ObjectFifo]:
        """Fifos that get what lies at ``offsets`` (elements) of this one's objects, taken apart in a memory tile."""
        if self.is_prod:
            raise ValueError(f"{self}: split() is for a consumer's handle")
        what = f"{self}.split"
        refuse_unless_default(what, plio=(plio, False))
        n = len(offsets)
        _each(what, n, "repeat_counts", repeat_counts, None)
        _each(what, n, "pad_dimensions", pad_dimensions, None)
        _each(what, n, "pad_value", pad_value, 0)
        depths = _each(what, n, "depths", depths, self.depth)
        types = _each(what, n, "obj_types", obj_types, self.obj_type)
        labels = _each(what, n, "names", names, None)
        to_stream = _each(what, n, "dims_to_stream", dims_to_stream, None)
        from_stream = _each(what, n, "dims_from_stream", dims_from_stream, None)
        fifos = [
            _linked(self, labels[i], f"_split{i}", types[i], depths[i], to_stream[i], from_stream[i]) for i in range(n)
        ]
        ObjectFifoLink([self], [fifo.prod() for fifo in fifos], tile, offsets)
        return fifos

    def forward(
        self,
        tile: Tile | None = AnyMemTile,
        obj_type: Any = None,
        depth: int | None = None,
        name: str | None = None,
        dims_to_stream: StreamDims | None = None,
        dims_from_stream: StreamDims | None = None,
        plio: bool = False,
        repeat_count: int | None = None,
        pad_dimensions: StreamDims | None = None,
        pad_value: int = 0,
    ) -> ObjectFifo:
        """A fifo that gets this one's objects, through a memory tile; its objects may be smaller."""
        if self.is_prod:
            raise ValueError(f"{self}: forward() is for a consumer's handle")
        refuse_unless_default(
            f"{self}.forward",
            plio=(plio, False),
            repeat_count=(repeat_count, None),
            pad_dimensions=(pad_dimensions, None),
            pad_value=(pad_value, 0),
        )
        fifo = _linked(
            self, name, "_fwd", obj_type or self.obj_type, depth or self.depth, dims_to_stream, dims_from_stream
        )
        ObjectFifoLink([self], [fifo.prod()], tile, [0])
        return fifo


class ObjectFifoLink:
    """Several fifos into one, one into several, or one into one, in a memory tile."""

    def __init__(
        self,
        srcs: list[ObjectFifoHandle],
        dsts: list[ObjectFifoHandle],
        tile: Tile | None,
        offsets: Sequence[int],
    ) -> None:
        if not offsets:
            raise ValueError(f"{(srcs + dsts)[0]}: a link joins or splits at least one fifo; offsets are empty")
        self.sources = srcs
        self.destinations = dsts
        self.offsets = list(offsets)
        self.tile = tile or AnyMemTile
        for handle in srcs + dsts:
            handle.endpoint = self

    @property
    def is_join(self) -> bool:
        """Whether several fifos come together."""
        return len(self.sources) > 1

    @property
    def is_split(self) -> bool:
        """Whether a fifo is taken apart."""
        return len(self.destinations) > 1


def _each(what: str, n: int, name: str, given: Sequence[Any] | None, default: Any) -> list[Any]:
    """``given``, or ``n`` times ``default``."""
    if given is None:
        return [default] * n
    if len(given) != n:
        raise ValueError(f"{what}: {len(given)} {name} for {n} offsets")
    if name in ("repeat_counts", "pad_dimensions", "pad_value"):
        for value in given:
            refuse_unless_default(what, **{name: (value, default)})
    return list(given)


def _linked(
    parent: ObjectFifoHandle,
    name: str | None,
    suffix: str,
    obj_type: Any,
    depth: int,
    dims_to_stream: StreamDims | None,
    dims_from_stream: StreamDims | None,
) -> ObjectFifo:
    fifo = ObjectFifo(
        obj_type,
        name=name or parent.name + suffix,
        depth=depth,
        dims_to_stream=dims_to_stream,
        dims_from_stream_per_cons=dims_from_stream,
    )
    fifo.is_named = name is not None or parent.fifo.is_named
    return fifo


def _refuse_transfer_options(
    what: str, packet: Any, offset_parameter: Any, transfer_len: int | None, managed: bool
) -> None:
    refuse_unless_default(
        what,
        packet=(packet, None),
        offset_parameter=(offset_parameter, None),
        transfer_len=(transfer_len, None),
        managed=(managed, True),
    )
