"""What is behind the emulated XRT: memory, contexts, and a thread in the place of the NPU that runs what is submitted.

The states of commands follow the driver (amdxdna, aie2_ctx.c): a command stays NEW until it ends. The array's workers
are greenlets, which belong to a thread: hence one thread for all contexts, which runs commands in the order of their
submission.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import cast

import numpy as np
import numpy.typing as npt

from tilefuse import arch
from tilefuse._buffers import HUGE_PAGE, aligned_empty
from tilefuse.emulator import instructions, iron
from tilefuse.emulator.instructions import InstructionError, Instructions
from tilefuse.emulator.session import program
from tilefuse.emulator.timing import Report
from tilefuse.emulator.xclbin_file import Image
from tilefuse.emulator.xrt_enums import bo_flags, ert_cmd_state
from tilefuse.emulator.xrt_faults import Fault, Faults, Injection
from tilefuse.errors import DataflowError, TileFuseError
from tilefuse.plan import Plan

_LOG = logging.getLogger(__name__)

OPCODE = 3
"""What argument 0 must be: run the instructions (mlir-aie's hosts)."""

FIRST_BUFFER = 3
"""Index of the first host buffer among a kernel's arguments."""

MAX_BUFFER_BYTES = 1 << 32
"""Bytes of a buffer at most."""

_FREED = 0xDD
"""What a mapping that outlives its buffer shows."""

_KEPT = 64
"""Decoded streams that a context keeps."""

_BASE_ADDRESS = 0x7F00_0000_0000

_PAGE = 4096

_STATES = {
    Fault.TIMEOUT: ert_cmd_state.ERT_CMD_STATE_TIMEOUT,
    Fault.ABORT: ert_cmd_state.ERT_CMD_STATE_ABORT,
    Fault.ERROR: ert_cmd_state.ERT_CMD_STATE_ERROR,
    Fault.NO_RESPONSE: ert_cmd_state.ERT_CMD_STATE_NORESPONSE,
    Fault.STALE: ert_cmd_state.ERT_CMD_STATE_COMPLETED,
}

Bytes = npt.NDArray[np.uint8]


def system_error(code: int, text: str) -> RuntimeError:
    """What pyxrt raises for an error of XRT's core."""
    return RuntimeError(f"{text}: {os.strerror(code)}")


def shim_error(code: int, text: str) -> RuntimeError:
    """What pyxrt raises for an error of the driver's library."""
    return RuntimeError(f"{text} (err={code}): {os.strerror(abs(code))}")


@dataclass(frozen=True)
class Live:
    """What has not been given back."""

    buffers: int
    buffer_bytes: int
    contexts: int
    runs: int

    def __bool__(self) -> bool:
        return bool(self.buffers or self.contexts or self.runs)


@dataclass(frozen=True)
class FaultReport:
    """Why a run didn't end as COMPLETED: what the hardware does not tell."""

    state: ert_cmd_state
    configuration: str
    error: str
    """Name of the emulator's error, or of the injected fault."""
    message: str


class Misuse(DataflowError):
    """A run that hangs the array: a missing or too small buffer, or another configuration's instructions."""


class Memory:
    """A buffer: the host's side and the device's, equal when it is made and after a `sync` only."""

    def __init__(self, system: System, size: int, flags: bo_flags, group: int, context: Context | None = None) -> None:
        self.size = size
        self.flags = flags
        self.group = group
        self.context = context
        self.clones: list[Memory] = []
        self.host = _zeros(size)
        self.device = _zeros(size)
        self.address = system.addresses(size)
        self.version = 0
        """Changes with the device's side."""
        self._system = system
        system.buffers[id(self)] = (size, flags)

    @property
    def bank(self) -> int:
        """Memory bank that it was asked of."""
        return self.group & 0xFFFF

    def to_device(self, start: int, end: int) -> None:
        """Copies from the host's side."""
        self.device[start:end] = self.host[start:end]
        self.version += 1

    def from_device(self, start: int, end: int) -> None:
        """Copies from the device's side."""
        self.host[start:end] = self.device[start:end]

    def clone(self, group: int) -> Memory:
        """A copy that lives as long as this."""
        copy = Memory(self._system, self.size, self.flags, group, self.context)
        copy.host[:], copy.device[:] = self.host, self.device
        self.clones.append(copy)
        return copy

    def __del__(self) -> None:
        system = getattr(self, "_system", None)
        if system is None:
            return
        system.buffers.pop(id(self), None)
        # Somebody's mapping has outlived the buffer: the hardware's would fault.
        if sys.getrefcount(self.host) > 2:
            self.host.fill(_FREED)


def _zeros(size: int) -> Bytes:
    memory = aligned_empty(size)
    if size < HUGE_PAGE:
        memory.fill(0)
    return memory


Arguments = Mapping[int, "Memory | int"]


class _Loaded:
    """A context's configuration on the array. All but the constructor runs on the device's thread."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self._array: iron.Configuration | None = None
        self._programs: OrderedDict[bytes, tuple[Instructions, iron.Design]] = OrderedDict()
        self._latest: tuple[weakref.ref[Memory], int, bytes] | None = None

    def unload(self) -> None:
        """Takes it off the array."""
        self._array = None
        self._programs.clear()
        self._latest = None

    def run(self, arguments: Arguments) -> Report:
        """Runs what the arguments say.

        Raises:
            InstructionError: They don't point at instructions that can be read.
            TileFuseError: The array hangs.
        """
        stream, design = self._program(self._code(arguments))
        if stream.configuration != self.image.configuration:
            raise Misuse(
                f"the instructions are for {stream.configuration.name}, and the context has "
                f"{self.image.configuration.name}"
            )
        hosts = [
            self._host(arguments, FIRST_BUFFER + number, name, words)
            for number, (name, words) in enumerate(stream.sizes.items())
        ]
        if self._array is None:
            self._array = iron.load(design)
        try:
            return self._array.run(design, *(memory.device[: arch.WORD * words] for memory, words in hosts))
        finally:
            for memory, _ in hosts:
                memory.version += 1

    def _code(self, arguments: Arguments) -> bytes:
        """The instructions on the device's side of argument 1."""
        if arguments.get(0) != OPCODE:
            raise InstructionError(f"argument 0, the opcode, is {_said(arguments, 0)}; the firmware knows {OPCODE}")
        code, count = arguments.get(1), arguments.get(2)
        if not isinstance(code, Memory):
            raise InstructionError(f"argument 1, the instructions, is {_said(arguments, 1)}; a buffer is needed")
        if self._latest is not None and self._latest[0]() is code and self._latest[1] == code.version:
            found = self._latest[2]
        else:
            words = code.device[: code.size - code.size % arch.WORD].view(np.uint32)
            total = instructions.words_of(words[:16])
            if total > words.size:
                raise InstructionError(f"{total} words of instructions in a buffer of {words.size}")
            found = words[:total].tobytes()
            self._latest = (weakref.ref(code), code.version, found)
        if count not in (len(found), len(found) // arch.WORD):
            raise InstructionError(
                f"argument 2 is {_said(arguments, 2)}; the instructions have {len(found)} bytes, "
                f"{len(found) // arch.WORD} words"
            )
        return found

    def _program(self, code: bytes) -> tuple[Instructions, iron.Design]:
        known = self._programs.get(code)
        if known is not None:
            self._programs.move_to_end(code)
            return known
        stream = instructions.decode(np.frombuffer(code, np.uint32))
        # A design asks no more of a plan than a stream has.
        made = self._programs[code] = stream, program(cast(Plan, stream))
        if len(self._programs) > _KEPT:
            self._programs.popitem(last=False)
        return made

    def _host(self, arguments: Arguments, index: int, name: str, words: int) -> tuple[Memory, int]:
        memory = arguments.get(index)
        if not isinstance(memory, Memory):
            raise Misuse(f"argument {index}, the buffer of {name}, is {_said(arguments, index)}: no buffer lies there")
        if memory.size < arch.WORD * words:
            raise Misuse(
                f"argument {index}, the buffer of {name}, has {memory.size} bytes; the instructions move "
                f"{arch.WORD * words}"
            )
        return memory, words


def _said(arguments: Arguments, index: int) -> str:
    value = arguments.get(index)
    return "not set" if value is None else "a buffer" if isinstance(value, Memory) else str(value)


class Context:
    """A hardware context: an xclbin with a place on the array."""

    def __init__(self, system: System, image: Image, slot: int) -> None:
        self.image = image
        self.slot = slot
        self.wedged = False
        self.loaded = _Loaded(image)
        self._system = system
        system.contexts.add(self)

    def __del__(self) -> None:
        system = getattr(self, "_system", None)
        if system is not None:
            # Its workers are the device thread's.
            system.processor.post(self.loaded.unload)


class Pending:
    """A command on its way: NEW until it ends, as with this driver."""

    __slots__ = ("_ended", "state")

    def __init__(self) -> None:
        self.state = ert_cmd_state.ERT_CMD_STATE_NEW
        self._ended = threading.Event()

    def end(self, state: ert_cmd_state) -> None:
        """Tells that it has ended."""
        self.state = state
        self._ended.set()

    def wait(self, seconds: float | None) -> bool:
        """Waits until it has ended; False if that takes longer."""
        return self._ended.wait(seconds)


class _Processor:
    """A thread that runs what it is given, one after another, from the first call on."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.gate = threading.Event()
        """What a stalled run waits for."""
        _processors.add(self)
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], None]) -> None:
        """Runs ``job`` on the thread, later."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=_work, args=(self._jobs,), name="tilefuse-emulated-npu", daemon=True
                    )
                    self._thread.start()
        self._jobs.put(job)

    def post(self, job: Callable[[], None]) -> None:
        """As `submit`, where there is a thread; may be called by the garbage collector."""
        if self._thread is not None:
            self._jobs.put(job)

    def drain(self) -> None:
        """Waits until all that was submitted has run."""
        if self._thread is not None and self._thread is not threading.current_thread():
            done = threading.Event()
            self._jobs.put(done.set)
            done.wait()

    def stop(self) -> None:
        """Ends the thread."""
        self.gate.set()
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10)


_processors: weakref.WeakSet[_Processor] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for processor in list(_processors):
        processor.stop()


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            # Whoever waits for a command is told by the command; the thread must not end.
            _LOG.exception("the emulated device failed")
        # Or what it refers to would live until the next one comes.
        del job


class System:
    """The emulated machine that all objects of one `EmulatedXrt` share."""

    def __init__(
        self,
        injections: Iterable[Injection],
        *,
        devices: int,
        contexts: int,
        heap: int,
        memlock: int | None,
        executes: bool,
        info: Mapping[str, str],
    ) -> None:
        self.devices = devices
        self.most_contexts = contexts
        self.heap = heap
        self.memlock = memlock
        self.executes = executes
        self.info = dict(info)
        self.faults = Faults(injections)
        self.processor = _Processor()
        self.buffers: dict[int, tuple[int, bo_flags]] = {}
        self.contexts: weakref.WeakSet[Context] = weakref.WeakSet()
        self.runs: dict[int, None] = {}
        self.wedged = False
        self.last_report: Report | None = None
        self.last_fault: FaultReport | None = None
        self.device_seconds = 0.0
        self.lock = threading.Lock()
        self._next_address = _BASE_ADDRESS
        self._slots = itertools.count(1)

    def addresses(self, size: int) -> int:
        """An address for ``size`` bytes, on a page of its own."""
        with self.lock:
            address = self._next_address
            self._next_address += -(-size // _PAGE) * _PAGE + _PAGE
        return address

    def live(self) -> Live:
        """What has not been given back."""
        sizes = [size for size, _ in list(self.buffers.values())]
        return Live(len(sizes), sum(sizes), len(self.contexts), len(self.runs))

    # --- opening ---

    def open_device(self, index: int) -> None:
        """Raises RuntimeError if there is no such device, or it can't be opened."""
        fault = self.faults.strike("device")
        if index >= self.devices or fault is Fault.NO_DRIVER:
            raise RuntimeError(f" No such device with index '{index}'")
        if fault is Fault.NO_PERMISSION:
            raise shim_error(-13, f"Open /dev/accel/accel{index} failed")

    def open_context(self, image: Image) -> Context:
        """A context, where there is one left."""
        fault = self.faults.strike("hw_context", configuration=image.configuration.name)
        if fault is Fault.BUSY:
            raise shim_error(-16, "DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed")
        with self.lock:
            if len(self.contexts) >= self.most_contexts:
                raise shim_error(-2, "DRM_IOCTL_AMDXDNA_CREATE_HWCTX IOCTL failed")
            return Context(self, image, next(self._slots))

    def allocate(self, size: int, flags: bo_flags, group: int, context: Context | None) -> Memory:
        """A buffer, where there is memory for it; the driver's errors otherwise."""
        fault = self.faults.strike("bo", size=size)
        if flags is bo_flags.normal:
            raise shim_error(95, "unsupported buffer type: none flag")
        if flags not in (bo_flags.host_only, bo_flags.cacheable):
            raise shim_error(22, "Bad BO type.")
        if size == 0:
            raise shim_error(-22, "mmap_range(len=0) failed")
        if fault is Fault.NO_MEMORY:
            raise shim_error(-12, "DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed")
        if size > MAX_BUFFER_BYTES:
            raise shim_error(-22, "DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed")
        taken = list(self.buffers.values())
        if flags is bo_flags.cacheable and size + sum(s for s, f in taken if f is flags) > self.heap:
            raise shim_error(28, f"Heap at max size {self.heap}, can't expand further")
        if fault is Fault.LOCKED_MEMORY or (
            self.memlock is not None and size + sum(s for s, _ in taken) > self.memlock
        ):
            raise shim_error(-11, f"mmap(addr=(nil), len={size}, prot=3, flags=8193, offset=4096) failed")
        return Memory(self, size, flags, group, context)

    # --- running ---

    def refuse(self, context: Context) -> Fault | None:
        """Counts a run; raises what EXEC_CMD does when the driver takes no commands."""
        fault = self.faults.strike("run", configuration=context.image.configuration.name)
        if fault is Fault.WEDGED:
            self.wedged = True
        if self.wedged or context.wedged or fault is Fault.REFUSED:
            raise shim_error(-5, "DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed")
        return fault

    def submit(
        self,
        context: Context,
        arguments: Arguments,
        fault: Fault | None,
        pending: Pending,
        after: Pending | None = None,
    ) -> None:
        """Runs a command; ``pending`` tells when it has ended, and how.

        Args:
            after: The one before it in a chain, which ends with the first that fails.
        """
        if fault is Fault.STALL:
            self.processor.gate.clear()
        elif not self.executes:
            pending.end(self._end(context, arguments, fault, after))
            return
        # In a list, which is emptied before the host goes on: what it counts as live must be gone by then.
        command = [(context, arguments)]
        del context, arguments
        self.processor.submit(partial(self._process, command, fault, pending, after))

    def _process(
        self,
        command: list[tuple[Context, Arguments]],
        fault: Fault | None,
        pending: Pending,
        after: Pending | None,
    ) -> None:
        if fault is Fault.STALL:
            self.processor.gate.wait()
        pending.end(self._end(*command.pop(), fault, after))

    def _end(self, context: Context, arguments: Arguments, fault: Fault | None, after: Pending | None) -> ert_cmd_state:
        if after is not None and after.state is not ert_cmd_state.ERT_CMD_STATE_COMPLETED:
            return ert_cmd_state.ERT_CMD_STATE_ABORT
        if context.wedged or self.wedged:
            return self._failed(ert_cmd_state.ERT_CMD_STATE_ABORT, context, "Wedged", "a run before this one hangs")
        if fault in _STATES:
            state = _STATES[fault]
            context.wedged = fault is Fault.TIMEOUT
            if fault is Fault.STALE:
                return state
            return self._failed(state, context, fault.name, f"injected: {fault}")
        if not self.executes:
            return ert_cmd_state.ERT_CMD_STATE_COMPLETED
        try:
            self.last_report = context.loaded.run(arguments)
        except InstructionError as error:
            return self._failed(ert_cmd_state.ERT_CMD_STATE_ERROR, context, type(error).__name__, str(error))
        except TileFuseError as error:
            context.wedged = True
            return self._failed(ert_cmd_state.ERT_CMD_STATE_TIMEOUT, context, type(error).__name__, str(error))
        except Exception as error:
            # A bug of the emulator or of a design: nobody must wait for it for ever.
            context.wedged = True
            return self._failed(ert_cmd_state.ERT_CMD_STATE_ERROR, context, type(error).__name__, repr(error))
        return ert_cmd_state.ERT_CMD_STATE_COMPLETED

    def _failed(self, state: ert_cmd_state, context: Context, error: str, message: str) -> ert_cmd_state:
        self.last_fault = FaultReport(state, context.image.configuration.name, error, message)
        return state

    def reset(self) -> None:
        """Loads all contexts anew, and takes commands again."""
        self.processor.gate.set()
        self.processor.drain()
        for context in list(self.contexts):
            self.processor.post(context.loaded.unload)
            context.wedged = False
        self.wedged = False
