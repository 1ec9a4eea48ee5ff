"""The command processor: it runs the sequence of a `Runtime`, issuing transfers to the shims and waiting for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent

from tilefuse import arch
from tilefuse.emulator.cores import coroutine, holders
from tilefuse.emulator.engine import Bytes, Clock, Flow
from tilefuse.emulator.taps import TensorAccessPattern, Walker, shim_descriptor
from tilefuse.emulator.values import ArrayType
from tilefuse.errors import ArrayLimitError, DataflowError, DeviceError, DtypeError

if TYPE_CHECKING:
    from tilefuse.emulator.fifo import ObjectFifoHandle
    from tilefuse.emulator.program import Buffer, WorkerRuntimeBarrier


def running_sequence() -> Sequence | None:
    """The sequence whose function runs now, if one does."""
    return getattr(getcurrent(), "sequence", None)


def active_sequence(what: str) -> Sequence:
    """The sequence whose function calls ``what``.

    Raises:
        DeviceError: None does.
    """
    sequence = running_sequence()
    if sequence is None:
        raise DeviceError(f"{what}: only the function given to Runtime can do this, while the program runs")
    return sequence


class RuntimeData:
    """A buffer of the host in a run-time sequence."""

    def __init__(self, type: ArrayType, index: int) -> None:
        self.type = type
        self.index = index

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return self.type.shape

    @property
    def dtype(self) -> Any:
        """Scalar type."""
        return self.type.dtype.type

    def __str__(self) -> str:
        return f"host buffer {self.index}"


class TaskGroup:
    """Transfers that are awaited and freed together."""

    def __init__(self, id: int | None = None) -> None:
        sequence = running_sequence()
        if sequence is None:
            raise RuntimeError("TaskGroup() must be constructed in the function given to Runtime")
        self.group_id = sequence.open_group(self) if id is None else id
        self.tasks: list[Task] = []

    def finish(self) -> None:
        """Waits for the group's transfers that were issued with ``wait=True``, then frees all of them."""
        active_sequence("TaskGroup.finish").finish_group(self)

    def __str__(self) -> str:
        return f"TaskGroup({self.group_id})"


class Task:
    """A transfer between a buffer of the host and a fifo."""

    __slots__ = ("channel", "done", "freed", "issued", "label", "nbytes", "number", "remaining", "waits", "walker")

    def __init__(self, label: str, nbytes: int, wait: bool, walker: Walker) -> None:
        self.label = label
        self.nbytes = self.remaining = nbytes
        self.waits = wait
        self.walker = walker
        self.done: float | None = None
        self.freed = False
        self.issued = 0.0
        self.number = 0
        self.channel: ShimChannel | None = None

    def free(self) -> None:
        """Gives the descriptor back."""
        active_sequence(f"{self.label}: free").free(self)

    def await_(self) -> None:
        """Waits until the transfer is done."""
        active_sequence(f"{self.label}: await_").wait_for(self)

    def progress(self) -> str:
        """How far it has come."""
        return f"{self.nbytes - self.remaining} of {self.nbytes} bytes"


@dataclass
class Shim:
    """The descriptors of a shim tile."""

    column: int
    in_use: int = 0


class ShimChannel:
    """A DMA channel of a shim: one end of a flow, fed with tasks by the sequence."""

    def __init__(self, clock: Clock, label: str, fifo: str, sends: bool, shim: Shim) -> None:
        self.clock = clock
        self.label = label
        self.fifo = fifo
        self.sends = sends
        """Whether it reads the host's memory."""
        self.shim = shim
        self.flow: Flow | None = None
        self.queue: deque[Task] = deque()
        """Tasks issued and not begun."""
        self.task: Task | None = None
        self.tokens = 0
        """Transfers done that were issued with ``wait=True`` and not yet awaited."""
        self.waiter: Sequence | None = None
        self.issued = 0
        self.computes = True
        """Whether the run moves data."""
        self.depths: list[tuple[float, int]] = []
        """(time, tasks in flight) whenever their number changes."""

    @property
    def in_flight(self) -> int:
        """Tasks issued and not done."""
        return len(self.queue) + (self.task is not None)

    @property
    def remaining(self) -> int:
        """Bytes left of the task that runs."""
        return self.task.remaining if self.task is not None else 0

    def push(self, task: Task) -> None:
        """The command processor writes the channel's queue."""
        if self.in_flight >= arch.MAX_IN_FLIGHT:
            raise ArrayLimitError(
                f"{task.label}: {self.label} has {self.in_flight} tasks in flight already; the hardware drops one more "
                f"and the run hangs: keep to {arch.QUEUE_DEPTH}, finish an older TaskGroup first"
            )
        self.queue.append(task)
        self.depths.append((self.clock.now, self.in_flight))
        if self.flow is not None:
            self.flow.start()

    def ready(self) -> bool:
        """See `engine.Port`."""
        if self.task is not None:
            return True
        if not self.queue:
            return False
        self.task = self.queue.popleft()
        assert self.flow is not None
        self.flow.not_before = max(self.flow.not_before, self.clock.now + arch.DRAM_LATENCY * arch.CLOCK_HZ)
        return True

    def begin(self) -> None:
        """See `engine.Port`; `ready` begins tasks."""

    def waits_for(self) -> str:
        """See `engine.Port`."""
        return f"a {'fill' if self.sends else 'drain'} of fifo '{self.fifo}' by the run-time sequence"

    def read(self, nbytes: int) -> Bytes | None:
        """See `engine.Source`."""
        assert self.task is not None
        return self.task.walker.read(nbytes)

    def write(self, data: Bytes | None, nbytes: int) -> None:
        """See `engine.Sink`."""
        assert self.task is not None
        if data is None and self.computes:
            raise DataflowError(
                f"{self.task.label} takes bytes that nothing wrote: a worker released an object that it had not filled"
            )
        self.task.walker.write(data, nbytes)

    def advance(self, nbytes: int) -> None:
        """See `engine.Port`."""
        task = self.task
        assert task is not None
        task.remaining -= nbytes
        if task.remaining:
            return
        task.done = self.clock.now
        self.task = None
        self.depths.append((self.clock.now, self.in_flight))
        if task.waits:
            self.tokens += 1
            if self.waiter is not None:
                waiter, self.waiter = self.waiter, None
                waiter.wake()


@dataclass
class SequenceStatistics:
    """What the command processor did."""

    tasks: int = 0
    waits: int = 0
    busy: float = 0.0
    """Cycles, waiting not included."""
    last_done: float = 0.0
    spans: list[tuple[float, float, str]] = field(default_factory=list)


class Sequence:
    """A run of a sequence's function."""

    def __init__(
        self,
        clock: Clock,
        channels: dict[tuple[str, bool], ShimChannel],
        names: dict[ObjectFifoHandle, tuple[str, bool]],
        arrays: list[Bytes | None],
        strict_task_groups: bool,
    ) -> None:
        self.clock = clock
        self.time = clock.now
        self.statistics = SequenceStatistics()
        self._channels = channels
        self._names = names
        self._arrays = arrays
        self._strict = strict_task_groups
        self._groups: list[TaskGroup] = []
        self._default: list[Task] = []
        self._uses_default = self._uses_groups = False
        self._count = 0
        self._hub: Any = None
        self._waiting: str | None = None
        self.done = False
        self.coroutine: Any = None
        self.write_core_buffer: Any = None
        self.set_core_barrier: Any = None

    def start(self, function: Any, arguments: Iterable[Any]) -> None:
        """Runs ``function`` until it waits; it goes on by itself."""

        def body() -> None:
            function(*arguments)
            self._finalize()
            self.done = True

        self.coroutine = coroutine(body, sequence=self)
        self._resume()

    def _resume(self, _: Any = None) -> None:
        self._hub = self.coroutine.parent = getcurrent()
        self.coroutine.switch()

    def wake(self) -> None:
        """What it waited for has come."""
        self.clock.at(max(self.time, self.clock.now), self._resume)

    def _spend(self, seconds: float, what: str) -> None:
        """The command processor works; other events up to then happen meanwhile."""
        cycles = seconds * arch.CLOCK_HZ
        self.statistics.busy += cycles
        self.statistics.spans.append((self.time, self.time + cycles, what))
        self.time += cycles
        self.clock.at(self.time, self._resume)
        self._switch()

    def _switch(self) -> None:
        self._hub.switch()
        self.time = max(self.time, self.clock.now)

    def waits_for(self) -> str | None:
        """What the sequence waits for, in words."""
        return self._waiting

    # --- transfers ---

    def transfer(
        self,
        handle: ObjectFifoHandle,
        data: Any,
        tap: TensorAccessPattern | None,
        wait: bool,
        group: TaskGroup | None,
        sizes: Any,
        strides: Any,
        offset: int | None,
    ) -> Task:
        """Issues a fill or a drain; see `ObjectFifoHandle.fill`."""
        channel = self._channel(handle)
        verb = "fill" if handle.is_prod else "drain"
        label = f"{verb} {channel.issued} of fifo '{handle.name}'"
        if not isinstance(data, RuntimeData):
            raise ValueError(f"{label}: {data!r} is no buffer of the sequence; those are its arguments given as types")
        if tap is not None and any(given is not None for given in (sizes, strides, offset)):
            raise ValueError(f"{label}: pass tap, or sizes, strides and offset, not both")
        if (sizes is None) != (strides is None):
            raise ValueError(f"{label}: pass sizes and strides together")
        if tap is not None:
            if not isinstance(tap, TensorAccessPattern):
                raise DtypeError(f"{label}: tap is a {type(tap).__name__}; pass a TensorAccessPattern")
            if prod(tap.tensor_dims) != data.type.size:
                raise DataflowError(f"{label}: the pattern is one of a tensor {tap.tensor_dims}; {data} is {data.type}")
            sizes, strides, offset = tap.sizes, tap.strides, tap.offset
        elif sizes is None:
            sizes, strides = [1, 1, 1, data.type.size], [0, 0, 0, 1]
        descriptor = shim_descriptor(label, data.type, offset or 0, sizes, strides)
        memory = self._arrays[data.index]
        if memory is not None and not handle.is_prod and not memory.flags.writeable:
            raise DataflowError(f"{label}: {data} is read-only; pass an array that can be written")
        task = Task(label, descriptor.nbytes, wait, Walker(descriptor, memory))
        task.channel = channel
        channel.issued += 1
        shim = channel.shim
        if shim.in_use >= arch.SHIM.descriptors:
            raise ArrayLimitError(
                f"{label}: shim {shim.column} has {shim.in_use} descriptors in use, all there are; finish a TaskGroup "
                "before issuing more"
            )
        shim.in_use += 1
        self._enrol(task, group)
        self.statistics.tasks += 1
        self._spend(arch.TASK_ISSUE, label)
        task.issued = self.time
        channel.push(task)
        return task

    def _channel(self, handle: ObjectFifoHandle) -> ShimChannel:
        name = self._names.get(handle)
        if name is None or name not in self._channels:
            raise DeviceError(
                f"{handle} has no shim: pass it among the Runtime's fn_args, from prod(tile=...) or cons(tile=...)"
            )
        return self._channels[name]

    def _enrol(self, task: Task, group: TaskGroup | None) -> None:
        if group is None:
            self._uses_default = True
            self._default.append(task)
            return
        self._uses_groups = True
        if group not in self._groups:
            raise DataflowError(f"{task.label}: {group} has been finished already")
        group.tasks.append(task)

    def wait_for(self, task: Task) -> None:
        """Waits for a task's channel to say that a transfer is done: the hardware does not say which."""
        if not task.waits:
            raise DataflowError(f"{task.label} was issued without wait=True: the channel gives no token to wait for")
        channel = task.channel
        assert channel is not None
        self.statistics.waits += 1
        self._spend(arch.SYNC_ISSUE, f"wait for {task.label}")
        while not channel.tokens:
            self._waiting = f"the run-time sequence waits for {task.label} ({task.progress()}) on {channel.label}"
            channel.waiter = self
            self._switch()
        self._waiting = None
        channel.tokens -= 1

    def free(self, task: Task) -> None:
        """Gives a task's descriptor back; the task must be done."""
        if task.freed:
            raise DataflowError(f"{task.label} is freed twice")
        if task.done is None:
            assert task.channel is not None
            holding = holders(task.channel.flow)
            held = f". If it can't end: {'; '.join(holding)}" if holding else ""
            raise DataflowError(
                f"{task.label} is freed too early: {task.progress()} have been moved, and its descriptor may be "
                f"overwritten; wait for it (wait=True), or for a drain that can only end after it{held}"
            )
        task.freed = True
        assert task.channel is not None
        task.channel.shim.in_use -= 1
        self.statistics.last_done = max(self.statistics.last_done, task.done)

    def open_group(self, group: TaskGroup) -> int:
        """Takes up a new group."""
        self._groups.append(group)
        self._count += 1
        return self._count

    def finish_group(self, group: TaskGroup) -> None:
        """See `TaskGroup.finish`."""
        if group in self._groups:
            self._groups.remove(group)
        tasks, group.tasks = group.tasks, []
        self._finish(tasks)

    def _finish(self, tasks: list[Task]) -> None:
        for task in tasks:
            if task.waits:
                self.wait_for(task)
        for task in tasks:
            self.free(task)

    def _finalize(self) -> None:
        if self._groups:
            raise DataflowError(
                f"the sequence ends with groups open: {', '.join(map(str, self._groups))}; call finish() on each"
            )
        if self._strict and self._uses_default and self._uses_groups:
            raise DataflowError("the sequence has transfers with and without a group; give all of them a group")
        tasks, self._default = self._default, []
        self._finish(tasks)

    # --- words written to cores ---

    def write_buffer(self, buffer: Buffer, index: Any, value: Any) -> None:
        """Writes a word of a core's buffer."""
        self._spend(arch.REGISTER_WRITE, f"write of buffer '{buffer.name}'")
        self.write_core_buffer(buffer, index, value)

    def set_barrier(self, barrier: WorkerRuntimeBarrier, value: int) -> None:
        """Sets the locks of a barrier."""
        for core_set in self.set_core_barrier(barrier):
            self._spend(arch.REGISTER_WRITE, "barrier")
            core_set(value)
