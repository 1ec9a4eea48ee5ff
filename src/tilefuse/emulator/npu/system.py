"""The machine behind the emulated XRT: what there is of it, what is taken, and how runs end.

The states of commands follow the driver (amdxdna, aie2_ctx.c): a command stays NEW until it ends.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from tilefuse.emulator.instructions import InstructionError
from tilefuse.emulator.npu.enums import bo_flags, ert_cmd_state
from tilefuse.emulator.npu.errors import shim_error
from tilefuse.emulator.npu.faults import Fault, Faults, Injection
from tilefuse.emulator.npu.loaded import Arguments, Loaded
from tilefuse.emulator.npu.memory import Memory
from tilefuse.emulator.npu.processor import Pending, Processor
from tilefuse.emulator.timing import Report
from tilefuse.emulator.xclbin_file import Image
from tilefuse.errors import TileFuseError

MAX_BUFFER_BYTES = 1 << 32
"""Bytes of a buffer at most."""

_BASE_ADDRESS = 0x7F00_0000_0000

_PAGE = 4096

_STATES = {
    Fault.TIMEOUT: ert_cmd_state.ERT_CMD_STATE_TIMEOUT,
    Fault.ABORT: ert_cmd_state.ERT_CMD_STATE_ABORT,
    Fault.ERROR: ert_cmd_state.ERT_CMD_STATE_ERROR,
    Fault.NO_RESPONSE: ert_cmd_state.ERT_CMD_STATE_NORESPONSE,
    Fault.STALE: ert_cmd_state.ERT_CMD_STATE_COMPLETED,
}


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


class Context:
    """A hardware context: an xclbin with a place on the array."""

    def __init__(self, system: System, image: Image, slot: int) -> None:
        self.image = image
        self.slot = slot
        self.wedged = False
        self.loaded = Loaded(image)
        self._system = system
        system.contexts.add(self)

    def __del__(self) -> None:
        system = getattr(self, "_system", None)
        if system is not None:
            # Its workers are the device thread's.
            system.processor.post(self.loaded.unload)


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
        self.processor = Processor()
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
        if not self.processor.submit(partial(self._process, command, fault, pending, after)):
            pending.end(self._failed(ert_cmd_state.ERT_CMD_STATE_ABORT, command[0][0], "Stopped", "the process ends"))

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
