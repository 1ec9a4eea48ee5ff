"""What a design is made of beside its fifos: workers, buffers, kernels, the run-time sequence, the program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent

from tilefuse.arch import TileKind
from tilefuse.emulator.cores import executing_core
from tilefuse.emulator.fifo import ObjectFifo, ObjectFifoHandle, RuntimeEndpoint, refuse_unless_default
from tilefuse.emulator.sequence import RuntimeData, running_sequence
from tilefuse.emulator.tile import AnyComputeTile, Device, Tile
from tilefuse.emulator.values import ArrayType, RuntimeInt, array_type, is_array_type, known, trips
from tilefuse.errors import ArrayLimitError, DataflowError, DeviceError, DtypeError

if TYPE_CHECKING:
    from tilefuse.emulator.array import Design


def flatten(arguments: Any) -> Iterator[Any]:
    """The leaves of nested lists and tuples."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from flatten(argument)
        else:
            yield argument


def range_(start: Any, stop: Any = None, step: Any = None) -> Iterator[Any]:
    """A loop of the core's program, whose counter is a `RuntimeInt`, or of the run-time sequence.

    Raises:
        DataflowError: A bound is known at run time only and the worker has the static lowering of its fifos, or the
            end lies below the start.
    """
    core = getattr(getcurrent(), "core", None)
    counted = trips(start, stop, step)
    if core is None:
        yield from counted
        return
    read = any(isinstance(bound, RuntimeInt) for bound in (start, stop, step))
    if read and core.worker.dynamic_objfifo_lowering is not True:
        raise DataflowError(
            f"{core}: range_ over a value known at run time only: the static lowering of fifos unrolls loops by "
            "their trip counts and cannot; pass dynamic_objfifo_lowering=True to the Worker"
        )
    for i in counted:
        yield RuntimeInt(i)


class Buffer:
    """Memory of a core that is no fifo's."""

    _index = itertools.count()

    def __init__(
        self,
        type: Any = None,
        initial_value: np.ndarray[Any, Any] | None = None,
        name: str | None = None,
        tile: Tile | None = None,
        use_write_rtp: bool = False,
        address: int | None = None,
    ) -> None:
        if type is None and initial_value is None:
            raise ValueError("a Buffer needs a type, an initial value, or both")
        self.is_named = name is not None
        self.name = name or f"buf_{next(Buffer._index)}"
        refuse_unless_default(f"buffer '{self.name}'", address=(address, None))
        if type is None and initial_value is not None:
            self.array_type = ArrayType(tuple(initial_value.shape), initial_value.dtype)
        else:
            self.array_type = array_type(type, f"the type of buffer '{self.name}'")
        if initial_value is not None and (
            initial_value.shape != self.array_type.shape or initial_value.dtype != self.array_type.dtype
        ):
            raise ValueError(
                f"buffer '{self.name}' is {self.array_type}; its initial value is "
                f"{initial_value.dtype}{list(initial_value.shape)}"
            )
        self.initial_value = initial_value
        self.tile = tile
        self.owner: Worker | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self.array_type.shape

    @property
    def dtype(self) -> Any:
        """Scalar type."""
        return self.array_type.dtype.type

    def __getitem__(self, index: Any) -> Any:
        return self._in(executing_core(f"reading buffer '{self.name}'")).load(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        sequence = running_sequence()
        if sequence is not None:
            sequence.write_buffer(self, index, value)
            return
        self._in(executing_core(f"writing buffer '{self.name}'")).store(index, value)

    def _in(self, core: Any) -> Any:
        try:
            return core.buffers[self]
        except KeyError:
            raise DeviceError(f"{core} has no buffer '{self.name}'; pass it in the Worker's fn_args") from None


class Kernel:
    """A function of a kernel object."""

    def __init__(
        self,
        name: str,
        object_file_name: str,
        arg_types: list[Any] | None = None,
        *,
        link_with_mode: str | None = None,
    ) -> None:
        if not name:
            raise ValueError("a Kernel's name is the symbol of its function; it is empty")
        self.name = name
        self.object_file_name = object_file_name
        self.arg_types = list(arg_types or [])
        self.link_with_mode = link_with_mode
        self.types: list[ArrayType | None] = [
            _argument_type(t, f"argument {i} of {name}") for i, t in enumerate(self.arg_types)
        ]
        """Of each argument, None for a scalar."""

    def __call__(self, *args: Any) -> None:
        executing_core(f"calling {self.name}").call(self, args)


def _argument_type(spelled: Any, what: str) -> ArrayType | None:
    """The type of an array, None for a scalar."""
    if is_array_type(spelled):
        return array_type(spelled, what)
    if spelled is not np.int32:
        raise DtypeError(f"{what} is {spelled!r}; the emulator takes arrays, and np.int32 by value")
    return None


class Worker:
    """A function that a core runs, for ever unless ``while_true`` is False."""

    def __init__(
        self,
        core_fn: Callable[..., None] | None,
        fn_args: list[Any] | None = None,
        tile: Tile | None = AnyComputeTile,
        while_true: bool = True,
        stack_size: int | None = None,
        allocation_scheme: str | None = None,
        trace: int | None = None,
        trace_events: list[Any] | None = None,
        dynamic_objfifo_lowering: bool | None = None,
    ) -> None:
        if core_fn is None:
            raise DeviceError("Worker(None): the emulator has no idle cores to run; leave the worker out")
        tile = tile or AnyComputeTile
        if tile.tile_type not in (None, TileKind.CORE):
            raise ValueError(f"a Worker needs a compute tile, not {tile} of type {tile.tile_type}")
        if stack_size is not None and (not isinstance(stack_size, int) or stack_size < 1):
            raise ArrayLimitError(f"stack_size = {stack_size!r}: bytes of stack, 1 or more")
        refuse_unless_default("Worker", trace=(trace, None), trace_events=(trace_events, None))
        self.core_fn = core_fn
        self.fn_args = list(fn_args or [])
        self.tile = tile
        self.while_true = while_true
        self.stack_size = stack_size
        self.allocation_scheme = allocation_scheme
        self.dynamic_objfifo_lowering = dynamic_objfifo_lowering
        self.fifos: list[ObjectFifoHandle] = []
        self.buffers: list[Buffer] = []
        self.kernels: list[Kernel] = []
        self.barriers: list[WorkerRuntimeBarrier] = []
        for argument in flatten(self.fn_args):
            if isinstance(argument, ObjectFifoHandle):
                argument.endpoint = self
                self.fifos.append(argument)
            elif isinstance(argument, ObjectFifo):
                raise ValueError(f"a Worker gets an end of '{argument.name}', not the fifo: its prod() or cons()")
            elif isinstance(argument, Buffer):
                self._own(argument)
            elif isinstance(argument, Kernel):
                self.kernels.append(argument)
            elif isinstance(argument, WorkerRuntimeBarrier):
                self.barriers.append(argument)

    def _own(self, buffer: Buffer) -> None:
        if buffer.owner not in (None, self):
            if buffer.tile is None:
                raise ValueError(f"buffer '{buffer.name}' is shared by workers; pin it with Buffer(tile=...)")
            raise DeviceError(f"buffer '{buffer.name}' is shared by workers, which the emulator does not model")
        if buffer.tile is not None and not buffer.tile.is_at(self.tile):
            raise DeviceError(
                f"buffer '{buffer.name}' is pinned to {buffer.tile} and used on {self.tile}: the emulator keeps a "
                "worker's buffers in its own tile"
            )
        buffer.owner = self
        self.buffers.append(buffer)


class WorkerRuntimeBarrier:
    """A lock of each of its workers that the host sets and they wait for."""

    def __init__(self, initial_value: int = 0) -> None:
        self.initial_value = initial_value

    def wait_for_value(self, value: int) -> None:
        """Waits, in a worker, until the host has set ``value``; the lock keeps it."""
        core = executing_core("WorkerRuntimeBarrier.wait_for_value")
        self._check(core)
        core.wait_barrier(self, known(value, "the value of a barrier"))

    def release_with_value(self, value: int) -> None:
        """Takes ``value`` off the lock, in a worker: so the next wait is for the next run."""
        core = executing_core("WorkerRuntimeBarrier.release_with_value")
        self._check(core)
        core.barriers[self] -= known(value, "the value of a barrier")

    def set(self, value: int) -> None:
        """Sets the lock of all its workers, in the run-time sequence."""
        sequence = running_sequence()
        if sequence is None:
            raise DeviceError("WorkerRuntimeBarrier.set is for the function of a Runtime")
        sequence.set_barrier(self, known(value, "the value of a barrier"))

    def _check(self, core: Any) -> None:
        if self not in core.barriers:
            raise ValueError(f"{core} uses a barrier that is not among its arguments; pass it in fn_args")


class Runtime:
    """The run-time sequence: ``seq_fn(*fn_args)``, where types stand for the host's buffers."""

    def __init__(
        self,
        seq_fn: Callable[..., None] | None = None,
        fn_args: Sequence[Any] | None = None,
        *,
        strict_task_groups: bool = True,
    ) -> None:
        if not callable(seq_fn):
            given = "Runtime()" if seq_fn is None else f"Runtime({seq_fn!r})"
            raise DtypeError(f"{given}: IRON 1.4 takes the sequence as a function: Runtime(function, arguments)")
        self.seq_fn: Callable[..., None] = seq_fn
        self.strict_task_groups = strict_task_groups
        self.data: list[RuntimeData] = []
        self.fifos: list[ObjectFifoHandle] = []
        self.arguments: list[Any] = []
        for i, argument in enumerate(fn_args or []):
            if is_array_type(argument):
                data = RuntimeData(array_type(argument, f"argument {i} of the sequence"), len(self.data))
                self.data.append(data)
                self.arguments.append(data)
            elif isinstance(argument, type):
                raise DeviceError(
                    f"argument {i} of the sequence is a scalar of type {argument.__name__}, which the emulator does "
                    "not model; pass its value"
                )
            else:
                self.arguments.append(argument)
        for argument in flatten(self.arguments):
            if isinstance(argument, ObjectFifoHandle):
                if argument.endpoint is None:
                    argument.endpoint = RuntimeEndpoint(argument.shim_tile)
                self.fifos.append(argument)


class Program:
    """A whole design."""

    def __init__(self, device: Device | None, rt: Runtime, workers: list[Worker] | None = None) -> None:
        if device is None:
            raise ValueError("a Program needs a device; pass iron.device(columns)")
        self.device = device
        self.runtime = rt
        self.workers = list(workers or [])

    def resolve_program(self, device_name: str = "main") -> Design:
        """Lays the design out on the array, checking every limit: what `load` takes."""
        from tilefuse.emulator.array import Design

        return Design(self)
