"""A design loaded on the emulated array, and runs of it: what an xclbin and its instruction streams are to the chip."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse import arch
from tilefuse._buffers import aligned_empty
from tilefuse.emulator.array import Design, EndPlan, Pool, RingPlan
from tilefuse.emulator.binding import BoundKernel, PythonKernel
from tilefuse.emulator.cores import Core, CorePort, Memory, let_go
from tilefuse.emulator.engine import (
    POISON,
    Bytes,
    Clock,
    Dram,
    Flow,
    Pattern,
    Ring,
    RingSink,
    RingSource,
    allocate,
)
from tilefuse.emulator.fifo import ObjectFifoHandle
from tilefuse.emulator.fingerprint import Fingerprint
from tilefuse.emulator.limits import Place
from tilefuse.emulator.program import Buffer, Program, WorkerRuntimeBarrier
from tilefuse.emulator.sequence import RuntimeData, Sequence, Shim, ShimChannel
from tilefuse.emulator.timing import Report, make_report
from tilefuse.errors import ArrayLimitError, DataflowError, DeadlockError, DeviceError, DtypeError, ShapeError

_SHOWN = 12
"""Lines of a list in a message."""


def load(program: Program | Design, kernels: Mapping[str, PythonKernel] | None = None) -> Configuration:
    """The design of ``program`` on an array of its own.

    Args:
        program: The program, or what its `Program.resolve_program` gave.
        kernels: Python functions in the place of kernels, by symbol.

    Raises:
        ArrayLimitError: The array has not what the design needs.
        DeviceError: A kernel is not there, or its declaration does not agree with it.
    """
    return Configuration(_design(program), kernels or {})


def _design(program: Program | Design) -> Design:
    return program if isinstance(program, Design) else program.resolve_program()


class Configuration:
    """A loaded design. Memory, fifos and workers keep their state from run to run."""

    def __init__(self, design: Design, kernels: Mapping[str, PythonKernel]) -> None:
        self.design = design
        self.clock = Clock()
        self.dram = Dram(self.clock)
        self.rings: list[Ring] = []
        self.flows: list[Flow] = []
        self.cores: dict[Place, Core] = {}
        self.channels: dict[tuple[str, bool], ShimChannel] = {}
        self._fingerprint = Fingerprint(design)
        self._broken: str | None = None
        self._thread = threading.get_ident()
        self._shims: dict[int, Shim] = {}
        self._pools: dict[Pool, list[Bytes]] = {}
        self._rings: dict[RingPlan, Ring] = {}
        self._build_cores(kernels)
        for flow in design.flows:
            self._build_flow(flow.fifo, flow.source, flow.sinks)

    # --- building ---

    def _ring(self, plan: RingPlan) -> Ring:
        if plan not in self._rings:
            if plan.pool not in self._pools:
                self._pools[plan.pool] = allocate(plan.pool.depth, plan.pool.nbytes)
            slots = [slot[plan.offset : plan.offset + plan.nbytes] for slot in self._pools[plan.pool]]
            ring = Ring(plan.fifo, plan.where, slots)
            self._rings[plan] = ring
            self.rings.append(ring)
        return self._rings[plan]

    def _build_cores(self, kernels: Mapping[str, PythonKernel]) -> None:
        bound: dict[tuple[Any, ...], BoundKernel] = {}
        streams = {flow.fifo for flow in self.design.flows}
        for place, worker in self.design.cores.items():
            core = self.cores[place] = Core(self.clock, worker, *place)
            for handle in worker.fifos:
                ring = self._ring(self.design.ports[handle])
                if handle.is_prod:
                    ring.writer = core
                else:
                    ring.reader = core
                most = ring.depth - (handle.fifo.name in streams and handle.fifo.has_one_depth)
                core.ports[handle] = CorePort(str(handle), handle.is_prod, ring, handle.fifo.array_type, most)
            for buffer in worker.buffers:
                core.buffers[buffer] = _local_buffer(buffer)
            for kernel in worker.kernels:
                key = (kernel.name, *map(str, kernel.types))
                if key not in bound:
                    bound[key] = BoundKernel(kernel, kernels)
                core.kernels[kernel] = bound[key]
            for barrier in worker.barriers:
                core.barriers[barrier] = barrier.initial_value

    def _build_flow(self, fifo: str, source: EndPlan, sinks: list[EndPlan]) -> None:
        ends = [self._end(fifo, end) for end in (source, *sinks)]
        flow = Flow(self.clock, fifo, ends[0], ends[1:])
        for end in ends:
            if isinstance(end, ShimChannel):
                end.flow = flow
                flow.dram = self.dram
                flow.reads_dram = end.sends
            else:
                for ring in end.rings:
                    if isinstance(end, RingSource):
                        ring.reader = flow
                    else:
                        ring.writer = flow
        self.flows.append(flow)

    def _end(self, fifo: str, end: EndPlan) -> Any:
        if not end.rings:
            column = end.place[0]
            shim = self._shims.setdefault(column, Shim(column))
            channel = ShimChannel(self.clock, end.label, fifo, end.sends, shim)
            self.channels[fifo, end.sends] = channel
            return channel
        rings = [self._ring(plan) for plan in end.rings]
        patterns = [
            Pattern(ring.slots, *pattern) if pattern is not None else None
            for ring, pattern in zip(rings, end.patterns, strict=True)
        ]
        return (RingSource if end.sends else RingSink)(end.label, rings, patterns)

    # --- running ---

    def run(
        self,
        program: Program | Design,
        *arrays: npt.NDArray[Any] | None,
        timing_only: bool = False,
        trace: bool = False,
    ) -> Report:
        """Runs the sequence of ``program`` on the host's ``arrays``, which drains write in place.

        Args:
            program: The loaded program or another one with the same static design: same fifos, tiles, buffers, kernels
                and worker code.
            arrays: One for each buffer of the sequence, C-contiguous, of its number of bytes.
            timing_only: Moves and computes nothing where it need not. Buffers may then be None, or only the head of
                what the sequence declares: what lies in it is moved, so that parameters reach the cores.
            trace: Keeps what `Report.write_trace` writes.

        Raises:
            DeviceError: The program has another static design, or an earlier run failed; the message says what to do.
            ShapeError, DtypeError: The arrays are not what the sequence declares.
            ArrayLimitError: A transfer is more than a descriptor, a shim or a queue takes.
            DataflowError: Data are used wrongly, or left behind.
            DeadlockError: Nothing can go on.
        """
        design = _design(program)
        if self._broken is not None:
            raise DeviceError(f"this configuration hangs since a run failed ({self._broken}); load the program again")
        if threading.get_ident() != self._thread:
            raise DeviceError("a configuration runs on the thread that loaded it; load the program on this one")
        self._check_same(design)
        memories = _host_memories(design, arrays, timing_only)
        self._begin(timing_only, trace)
        start = self.clock.now
        sequence = self._sequence(design, memories)
        try:
            # Workers first, as on the chip: they have been waiting since the configuration was loaded.
            for core in self.cores.values():
                if not core.coroutine and not core.finished:
                    self.clock.at(start, core.resume)
            self.clock.at(
                start, lambda _: sequence.start(design.program.runtime.seq_fn, design.program.runtime.arguments)
            )
            self.clock.run()
            self._check_end(sequence)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self.clock.clear()
            let_go(sequence.coroutine)
            raise
        return make_report(self, sequence, start)

    def _check_same(self, design: Design) -> None:
        if design is self.design:
            return
        differences = self._fingerprint.differences(Fingerprint(design))
        if differences:
            more = f"\n  and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            raise DeviceError(
                "the program has another static design than the loaded one; load it on its own:\n  "
                + "\n  ".join(differences[:_SHOWN])
                + more
            )

    def _begin(self, timing_only: bool, trace: bool) -> None:
        self.clock.reset()
        now = self.clock.now
        self.dram.reset()
        for ring in self.rings:
            ring.poisons = not timing_only
        for core in self.cores.values():
            core.begin_run(now, computes=not timing_only, traced=trace)
        for flow in self.flows:
            flow.bytes_moved = 0
            flow.not_before = now
            flow.spans = [] if trace else None
        for channel in self.channels.values():
            channel.issued = 0
            channel.computes = not timing_only
            channel.depths = []

    def _sequence(self, design: Design, memories: list[Bytes | None]) -> Sequence:
        mine = list(self.design.fifos.values())
        names: dict[ObjectFifoHandle, tuple[str, bool]] = {}
        for fifo, loaded in zip(design.fifos.values(), mine, strict=True):
            for handle in [fifo.producer, *fifo.consumers]:
                if handle is not None:
                    names[handle] = (loaded.name, handle.is_prod)
        runtime = design.program.runtime
        sequence = Sequence(self.clock, self.channels, names, memories, runtime.strict_task_groups)
        sequence.write_core_buffer = self._buffer_writer(design)
        sequence.set_core_barrier = self._barrier_setters(design)
        return sequence

    def _pairs(self, design: Design, which: Callable[[Any], list[Any]]) -> Iterator[tuple[Core, Any, Any]]:
        """(core, thing of ``design``, thing of the loaded design) for all workers."""
        for place, worker in design.cores.items():
            core = self.cores[place]
            for theirs, mine in zip(which(worker), which(core.worker), strict=True):
                yield core, theirs, mine

    def _buffer_writer(self, design: Design) -> Callable[[Buffer, Any, Any], None]:
        found = {theirs: core.buffers[mine] for core, theirs, mine in self._pairs(design, lambda w: w.buffers)}

        def write(buffer: Buffer, index: Any, value: Any) -> None:
            if buffer not in found:
                raise DeviceError(f"buffer '{buffer.name}' belongs to no worker; pass it in a Worker's fn_args")
            found[buffer].store(index, value)

        return write

    def _barrier_setters(self, design: Design) -> Callable[[WorkerRuntimeBarrier], Iterator[Callable[[int], None]]]:
        found = [(theirs, core, mine) for core, theirs, mine in self._pairs(design, lambda w: w.barriers)]

        def setters(barrier: WorkerRuntimeBarrier) -> Iterator[Callable[[int], None]]:
            for theirs, core, mine in found:
                if theirs is barrier:
                    yield partial(core.set_barrier, mine)

        return setters

    # --- after a run ---

    def _check_end(self, sequence: Sequence) -> None:
        if not sequence.done:
            raise DeadlockError("deadlock: nothing can go on\n  " + "\n  ".join(self._waits(sequence)))
        unfinished = [core for core in self.cores.values() if not core.is_idle]
        if unfinished:
            lines = [core.waits_for() or str(core) for core in unfinished]
            raise DataflowError(
                f"the sequence has ended, and {len(lines)} workers stopped in the middle of their function: the next "
                "run would start there\n  " + "\n  ".join(_some([*lines, *self._leftovers()]))
            )
        leftovers = self._leftovers()
        if leftovers:
            raise DataflowError("the run has left data behind\n  " + "\n  ".join(_some(leftovers)))

    def _waits(self, sequence: Sequence) -> list[str]:
        waits = [sequence.waits_for() or "the run-time sequence has stopped"]
        cores = [text for core in self.cores.values() if (text := core.waits_for()) and not core.is_idle]
        idle = [text for core in self.cores.values() if (text := core.waits_for()) and core.is_idle]
        ended = [f"{core} has returned (while_true=False)" for core in self.cores.values() if core.finished]
        flows = [text for flow in self.flows if (text := flow.blocked())]
        return waits + _some(cores + flows) + _some([f"{text} (at its first wait)" for text in idle]) + _some(ended)

    def _leftovers(self) -> list[str]:
        found = []
        for ring in self.rings:
            if ring.filled:
                objects = "object" if ring.filled == 1 else "objects"
                found.append(f"leftover: {ring.filled} {objects} in fifo '{ring.fifo}' in {ring.place}")
        for flow in self.flows:
            if flow.partial:
                found.append(
                    f"leftover: {flow.partial} bytes of an object that has not come whole, in fifo '{flow.fifo}'"
                )
            source = flow.source
            if isinstance(source, RingSource) and source.remaining:
                found.append(f"leftover: an object of fifo '{source.ring.fifo}' in {source.ring.place}, being sent")
        return found

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        if ends():  # modules are going, and what `let_go` needs with them; so is all that it would free
            return
        # A suspended greenlet keeps alive what its frames refer to, itself included.
        for core in getattr(self, "cores", {}).values():
            let_go(core.coroutine)


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]


def _local_buffer(buffer: Buffer) -> Memory:
    memory = aligned_empty(buffer.array_type.nbytes)
    memory.fill(POISON)
    local = Memory(f"buffer '{buffer.name}'", buffer.array_type, memory)
    if buffer.initial_value is not None:
        local.array[...] = buffer.initial_value
        local.written = True
    return local


def _host_memories(
    design: Design, arrays: tuple[npt.NDArray[Any] | None, ...], timing_only: bool
) -> list[Bytes | None]:
    data: list[RuntimeData] = design.program.runtime.data
    if len(arrays) != len(data):
        raise ShapeError(f"the sequence takes {len(data)} buffers; {len(arrays)} are given")
    memories: list[Bytes | None] = []
    for declared, array in zip(data, arrays, strict=True):
        want = declared.type.nbytes
        if array is None:
            if not timing_only:
                raise ShapeError(f"{declared} is None; only a run with timing_only=True goes without data")
            memories.append(None)
            continue
        if not isinstance(array, np.ndarray):
            raise DtypeError(f"{declared} is a {type(array).__name__}; pass a NumPy array")
        if not array.flags.c_contiguous:
            raise ShapeError(f"{declared} is not C-contiguous; pass np.ascontiguousarray of it")
        if array.nbytes != want and not (timing_only and array.nbytes < want):
            raise ShapeError(
                f"{declared} has {array.nbytes} bytes; the sequence declares {declared.type}, {want} bytes"
            )
        if array.nbytes % arch.WORD:
            raise ArrayLimitError(f"{declared} has {array.nbytes} bytes; the host's buffers are whole words")
        memories.append(array.reshape(-1).view(np.uint8))
    return memories
