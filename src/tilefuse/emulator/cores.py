"""A core that runs a worker: a coroutine with a clock of its own.

A worker runs ahead of the other events as long as what it acquires is there already: the other end of a ring can only
add to that. What it releases takes effect at the worker's own time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from greenlet import error as GreenletError
from greenlet import getcurrent, greenlet

from tilefuse import arch
from tilefuse._buffers import address
from tilefuse.emulator.engine import Bytes, Clock, Flow, Ring, RingSink
from tilefuse.emulator.values import ArrayType, RuntimeInt, known
from tilefuse.errors import ArrayLimitError, DataflowError, DeviceError, TileFuseError

if TYPE_CHECKING:
    from tilefuse.emulator.binding import BoundKernel
    from tilefuse.emulator.fifo import ObjectFifoHandle
    from tilefuse.emulator.program import Buffer, Kernel, Worker, WorkerRuntimeBarrier


def coroutine(function: Callable[[], None], *, core: Core | None = None, sequence: Any = None) -> Any:
    """A greenlet that knows whose code it runs."""
    made = greenlet(function)
    made.core = core
    made.sequence = sequence
    return made


def executing_core(what: str) -> Core:
    """The core whose worker calls ``what``.

    Raises:
        DeviceError: No worker does.
    """
    core = getattr(getcurrent(), "core", None)
    if core is None:
        raise DeviceError(f"{what}: only a worker's function can do this, while the program runs")
    return core  # type: ignore[no-any-return]


def let_go(suspended: Any) -> None:
    """Lets a greenlet that will not be resumed go, with all that its frames refer to."""
    if suspended is not None and suspended:
        # Another thread's can't be ended from here, and none while the interpreter goes down.
        with suppress(GreenletError, ValueError, RuntimeError):
            # This may be the garbage collector in the middle of another greenlet, where it must go on.
            suspended.parent = getcurrent()
            suspended.throw()


class Memory:
    """Bytes of a core as a worker sees them: typed, indexable."""

    __slots__ = ("address", "array", "label", "type", "written")

    def __init__(self, label: str, type: ArrayType, memory: Bytes) -> None:
        self.label = label
        self.type = type
        self.written = False
        """Whether it holds anything that somebody wrote."""
        self.array: npt.NDArray[Any] = memory.view(type.dtype).reshape(type.shape)
        self.address = address(memory)

    def load(self, index: Any) -> Any:
        """A scalar of it, as what the core reads: see `RuntimeInt`."""
        if not self.written:
            raise DataflowError(f"reading {self.label} before anything wrote it")
        value = self.array[self._at(index)]
        return RuntimeInt(int(value)) if isinstance(value, np.integer) else value

    def store(self, index: Any, value: Any) -> None:
        """Writes a scalar."""
        at = self._at(index)
        if self.array.dtype.kind in "iu":
            value = known(value, f"what is written to {self.label}, of {self.type.dtype},")
            limits = np.iinfo(self.array.dtype)
            if not limits.min <= value <= limits.max:
                raise DataflowError(f"writing {value} to {self.label}: {self.type.dtype} does not hold it")
        self.array[at] = value.value if isinstance(value, RuntimeInt) else value
        self.written = True

    def _at(self, index: Any) -> tuple[int, ...]:
        """An index, or several, as NumPy takes them."""
        given = index if isinstance(index, tuple) else (index,)
        shape = self.type.shape
        if len(given) != len(shape) or any(i is None or i is ... or isinstance(i, slice) for i in given):
            raise DeviceError(f"{self.label}[{index}]: a core reads and writes scalars; give {len(shape)} indices")
        at = tuple(known(i, f"an index of {self.label}") for i in given)
        if not all(0 <= i < extent for i, extent in zip(at, shape, strict=True)):
            # A core would read or write what lies beside the array.
            raise DataflowError(f"{self.label}[{', '.join(map(str, at))}]: it is {self.type}")
        return at

    def __repr__(self) -> str:
        return self.label


class Element(Memory):
    """An object that a worker has acquired."""

    __slots__ = ("held", "ring", "slot")

    def __init__(self, label: str, type: ArrayType, ring: Ring, slot: int) -> None:
        super().__init__(f"an object of {label}", type, ring.slots[slot])
        self.ring = ring
        self.slot = slot
        self.held = False

    def _check(self, what: str) -> None:
        if not self.held:
            raise DataflowError(f"{what} {self.label} that the worker has released already")

    def __getitem__(self, index: Any) -> Any:
        self._check("reading")
        if not self.ring.live[self.slot] and not self.ring.poisons:
            raise DataflowError(
                f"reading {self.label}: in a run for timing only it holds data only where the host's "
                "buffer was given, or its head"
            )
        return self.load(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._check("writing")
        self.store(index, value)


class CorePort:
    """A worker's end of a fifo."""

    __slots__ = ("elements", "held", "is_prod", "label", "most", "position", "ring")

    def __init__(self, label: str, is_prod: bool, ring: Ring, type: ArrayType, most: int) -> None:
        self.label = label
        self.most = most
        """Objects that may be acquired at a time, other than one."""
        self.is_prod = is_prod
        self.ring = ring
        self.elements = [Element(f"fifo '{ring.fifo}'", type, ring, slot) for slot in range(ring.depth)]
        self.held: deque[Element] = deque()
        self.position = 0

    @property
    def available(self) -> int:
        """Objects that the worker could acquire now."""
        return self.ring.free if self.is_prod else self.ring.filled

    def holds(self) -> str:
        """What the worker holds of it, in words; empty if nothing."""
        return f"{len(self.held)} of '{self.ring.fifo}'" if self.held else ""

    def take(self) -> None:
        """Acquires one more object, which is there."""
        ring = self.ring
        if self.is_prod:
            ring.free -= 1
            ring.writing += 1
        else:
            ring.filled -= 1
            ring.reading += 1
        element = self.elements[self.position]
        element.held = True
        element.written = not self.is_prod and (ring.live[element.slot] or not ring.poisons)
        self.held.append(element)
        self.position = (self.position + 1) % ring.depth


class Core:
    """A compute tile and the worker on it."""

    def __init__(self, clock: Clock, worker: Worker, column: int, row: int) -> None:
        self.clock = clock
        self.worker = worker
        self.column = column
        self.row = row
        self.name = f"core ({column}, {row})"
        self.ports: dict[ObjectFifoHandle, CorePort] = {}
        self.buffers: dict[Buffer, Memory] = {}
        self.kernels: dict[Kernel, BoundKernel] = {}
        self.barriers: dict[WorkerRuntimeBarrier, int] = {}
        self.computes = True
        """Whether kernels are called, beside being charged."""
        self.time = 0.0
        self.hub: Any = None
        self.finished = False
        self._began = False
        """Whether the worker has got past its first wait since its function started."""
        self._runs = False
        """Whether it has got past its first wait in this run: what it waits before that is no stall."""
        self._wanted: tuple[CorePort, int] | tuple[WorkerRuntimeBarrier, int] | None = None
        self._waking = False
        """Whether the worker goes on as soon as the clock has caught up with it."""
        self.kernel_cycles = 0.0
        self.overhead_cycles = 0.0
        self.calls: Counter[str] = Counter()
        self.stalls: Counter[str] = Counter()
        self.spans: list[tuple[float, float, str]] | None = None
        self.coroutine = coroutine(self._main, core=self)

    def __str__(self) -> str:
        name = getattr(self.worker.core_fn, "__name__", "worker")
        return f"worker '{name}' on {self.name}"

    # --- the worker's life ---

    def begin_run(self, now: float, *, computes: bool, traced: bool) -> None:
        """Sets the counters of a run to nothing."""
        self.time = now
        self._runs = False
        self.computes = computes
        self.kernel_cycles = self.overhead_cycles = 0.0
        self.calls = Counter()
        self.stalls = Counter()
        self.spans = [] if traced else None

    def resume(self, _: Any = None) -> None:
        """Runs the worker until it waits."""
        self.hub = self.coroutine.parent = getcurrent()
        try:
            self.coroutine.switch()
        except TileFuseError as error:
            error.add_note(f"in {self}")
            raise

    def _main(self) -> None:
        worker = self.worker
        arguments = worker.fn_args
        while True:
            self._began = False
            worker.core_fn(*arguments)
            if not worker.while_true:
                self.finished = True
                return
            if not self._began:
                raise DataflowError(
                    f"{self} returned without having acquired anything, and would be called again for ever"
                )

    @property
    def is_idle(self) -> bool:
        """Whether the worker is where a run leaves it: at its first wait, or returned for good."""
        return self.finished or (self._wanted is not None and not self._began)

    def _wait(self) -> None:
        assert self.hub is not None
        self.hub.switch()
        self._waking = False
        before, now = self.time, self.clock.now  # another run may have begun meanwhile
        if now > before:
            wanted = self._wanted
            if self._runs and wanted is not None:
                cause = wanted[0].ring.fifo if isinstance(wanted[0], CorePort) else "barrier"
                self.stalls[cause] += now - before  # type: ignore[assignment]
            self.time = now
        self._wanted = None

    def waits_for(self) -> str | None:
        """What the worker waits for, in words, with who has it."""
        if self._wanted is None:
            return None
        port, count = self._wanted
        if not isinstance(port, CorePort):
            return f"{self} waits for a barrier to become {count}"
        objects = "object" if count == 1 else "objects"
        kind = f"room for {count} {objects}" if port.is_prod else f"{count} {objects}"
        ring = port.ring
        held = f", holding {len(port.held)}" if port.held else ""
        others = [text for other in self.ports.values() if other is not port and (text := other.holds())]
        also = f"; it holds {' and '.join(others)}" if others else ""
        return f"{self} waits for {kind} of fifo '{ring.fifo}'{held}: {ring.state()} in {ring.place}{also}"

    # --- what the worker's function does ---

    def _port(self, handle: ObjectFifoHandle) -> CorePort:
        try:
            return self.ports[handle]
        except KeyError:
            raise DeviceError(
                f"{self} uses {handle}, which is not among its arguments; pass it in the Worker's fn_args"
            ) from None

    def acquire(self, handle: ObjectFifoHandle, count: int) -> Element | Sequence[Element]:
        """See `ObjectFifoHandle.acquire`."""
        port = self._port(handle)
        if count > max(port.most, 1):
            raise ArrayLimitError(
                f"{self} acquires {count} objects of fifo '{port.ring.fifo}', which has {port.ring.depth}. Where all "
                "ends of a stream have one depth, the compiler gives a core one object more than it acquires at a "
                f"time: {count + 1}. Make this depth {count + 1}, or the depth of another end a different one"
            )
        held = port.held
        missing = count - len(held)
        if missing > 0:
            while port.available < missing:
                self._wanted = (port, missing)
                self._wait()
            for _ in range(missing):
                port.take()
        self._began = self._runs = True
        self.time += arch.LOCK_CYCLES
        self.overhead_cycles += arch.LOCK_CYCLES
        return held[0] if count == 1 else [held[i] for i in range(count)]

    def release(self, handle: ObjectFifoHandle, count: int) -> None:
        """See `ObjectFifoHandle.release`."""
        port = self._port(handle)
        held = port.held
        if len(held) < count:
            raise DataflowError(f"{self} releases {count} objects of fifo '{port.ring.fifo}' and holds {len(held)}")
        self.time += arch.LOCK_CYCLES
        self.overhead_cycles += arch.LOCK_CYCLES
        ring = port.ring
        slots = []
        for _ in range(count):
            element = held.popleft()
            element.held = False
            slots.append(element.slot)
            if port.is_prod:
                ring.live[element.slot] = self.computes and element.written
        if port.is_prod:
            self.clock.at(self.time, ring.publish, count)
        else:
            self.clock.at(self.time, ring.give_back, slots)

    def ring_changed(self, ring: Ring) -> None:
        """See `engine.Waiter`: a wait may be over."""
        wanted = self._wanted
        if wanted is None or not isinstance(wanted[0], CorePort) or wanted[0].ring is not ring:
            return
        if wanted[0].available >= wanted[1]:
            self._wake()

    def wait_barrier(self, barrier: WorkerRuntimeBarrier, value: int) -> None:
        """Waits until the lock of ``barrier`` has ``value``, and leaves it so."""
        while self.barriers[barrier] != value:
            self._wanted = (barrier, value)
            self._wait()
        self._began = self._runs = True

    def set_barrier(self, barrier: WorkerRuntimeBarrier, value: int) -> None:
        """The host sets the lock."""
        self.barriers[barrier] = value
        if self._wanted == (barrier, value):
            self._wake()

    def _wake(self) -> None:
        """Ends the wait. Once only: the worker may be ahead of the clock, and more may change before it goes on."""
        if not self._waking:
            self._waking = True
            self.clock.at(self.time, self.resume)

    def call(self, kernel: Kernel, arguments: Sequence[Any]) -> None:
        """Calls a kernel: charges it, and runs it unless only the timing counts."""
        try:
            bound = self.kernels[kernel]
        except KeyError:
            raise DeviceError(
                f"{self} calls {kernel.name}, which is not among its arguments; pass it in the Worker's fn_args"
            ) from None
        bound.run(self, arguments)
        start = self.time
        self.time = start + bound.cycles + arch.CALL_CYCLES
        self.kernel_cycles += bound.cycles
        self.overhead_cycles += arch.CALL_CYCLES
        self.calls[bound.name] += 1
        if self.spans is not None:
            self.spans.append((start, self.time, bound.name))


def holders(flow: Flow | None) -> list[str]:
    """The cores that hold objects of what ``flow`` brings, or of what that is forwarded to, in words."""
    reached, found = [flow] if flow is not None else [], []
    for each in reached:
        for ring in (ring for sink in each.sinks if isinstance(sink, RingSink) for ring in sink.rings):
            reader = ring.reader
            if isinstance(reader, Flow) and reader not in reached:
                reached.append(reader)
            elif isinstance(reader, Core):
                for port in reader.ports.values():
                    if port.ring is ring and port.held:
                        found.append(f"{reader.name} holds {port.holds()} and has not released it")
    return found
