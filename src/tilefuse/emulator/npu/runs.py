"""pyxrt's runs and lists of runs, as XRT's core/common/api/xrt_kernel.cpp and the driver have them."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any, ClassVar

from tilefuse.emulator.npu.binding import (
    CODE_BANK,
    CRASH,
    HANG,
    HOST_BANK,
    NO_BANK,
    Bound,
    as_int,
    as_unsigned,
    mismatch,
)
from tilefuse.emulator.npu.enums import ert_cmd_state
from tilefuse.emulator.npu.errors import shim_error, system_error
from tilefuse.emulator.npu.loaded import FIRST_BUFFER, Arguments
from tilefuse.emulator.npu.memory import Memory
from tilefuse.emulator.npu.objects import Bo, HwContext, Kernel
from tilefuse.emulator.npu.processor import Pending
from tilefuse.emulator.npu.system import Context

_LOG = logging.getLogger(__name__)

_NEW = ert_cmd_state.ERT_CMD_STATE_NEW
_COMPLETED = ert_cmd_state.ERT_CMD_STATE_COMPLETED


class Run(Bound):
    """``run``: one execution of a kernel at a time. It does not keep the buffers that are its arguments."""

    __slots__ = ("__weakref__", "_arguments", "_command", "_context", "_declared", "_done", "_lists", "_started")
    _kernel: ClassVar[type[Kernel]]
    _bo: ClassVar[type[Bo]]

    def __init__(self, kernel: Kernel, /) -> None:
        if not isinstance(kernel, self._kernel):
            raise mismatch("run", kernel)
        self._context: Context = kernel._context
        self._declared = kernel._arguments
        self._arguments: dict[int, int | weakref.ref[Memory]] = {}
        self._command: Pending | None = None
        self._done = True
        self._started = 0
        self._lists = 0
        self._system.runs[id(self)] = None

    def __del__(self) -> None:
        self._system.runs.pop(id(self), None)

    def set_arg(self, index: int, item: Any, /) -> None:
        """Sets argument ``index`` to a buffer, or to an integer of 32 bits.

        A buffer of another memory bank than the argument's is replaced by a copy, whose results nobody sees.
        """
        i = as_int(index, "set_arg")
        if not isinstance(item, self._bo):
            value = as_int(item, "set_arg")
            if not 0 <= i < self._declared:
                given = i % (1 << 64)
                raise IndexError(
                    f"vector::_M_range_check: __n (which is {given}) >= this->size() (which is {self._declared})"
                )
            self._arguments[i] = value
            return
        if not 0 <= i < self._declared:
            raise RuntimeError(
                f"{CRASH}: argument {i} of a kernel that declares {self._declared}, "
                f"{self._declared - FIRST_BUFFER} of them host buffers"
            )
        memory = item._memory
        bank = NO_BANK if i in (0, 2) else CODE_BANK if i == 1 else HOST_BANK
        if memory.bank != bank:
            _LOG.warning(
                "kernel %s: argument %d is allocated in bank %d and connected to bank %d: it gets a local copy",
                *(self._context.image.kernel, i, memory.bank, bank),
            )
            memory = memory.clone(bank)
        self._arguments[i] = weakref.ref(memory)

    def start(self) -> None:
        """Submits it.

        Raises:
            RuntimeError: It is in a runlist, or was started and not waited for to its end; or the driver refuses it.
        """
        if self._lists:
            raise system_error(22, "Run object belongs to a runlist and cannot be explicitly started")
        if not self._done:
            raise RuntimeError("bad command state, can't launch")
        arguments = self._resolved()
        fault = self._system.refuse(self._context)
        self._command = command = Pending()
        self._done = False
        self._system.submit(self._context, arguments, fault, command)
        self._started = time.perf_counter_ns()

    def wait(self, timeout_ms: int = 0, /) -> ert_cmd_state:
        """The state it ends with; TIMEOUT also if it hasn't after ``timeout_ms``, 0 for no limit.

        Never raises for how it ends. pyxrt keeps the GIL meanwhile; this doesn't.
        """
        milliseconds = as_unsigned(timeout_ms, "wait")
        command = self._submitted()
        if not command.wait(milliseconds / 1000 if milliseconds else None):
            return ert_cmd_state.ERT_CMD_STATE_TIMEOUT
        self._count()
        self._done = True
        return command.state

    def wait2(self) -> None:
        """As `wait`.

        Raises:
            RuntimeError: It doesn't end as COMPLETED.
        """
        state = self.wait()
        if state is not _COMPLETED:
            raise RuntimeError(f"Command failed to complete successfully ({state.name})")

    def state(self) -> ert_cmd_state:
        """NEW until it has ended: this driver tells nothing of queues."""
        if self._command is None:
            return _NEW
        state = self._command.state
        if state is not _NEW:
            self._done = True
        return state

    def _resolved(self) -> Arguments:
        """The arguments, buffers held."""
        resolved: dict[int, Memory | int] = {}
        for index, argument in self._arguments.items():
            value = argument if isinstance(argument, int) else argument()
            if value is None:
                raise shim_error(
                    -2, f"DRM_IOCTL_AMDXDNA_EXEC_CMD IOCTL failed, as the buffer of argument {index} was freed"
                )
            resolved[index] = value
        return resolved

    def _submitted(self) -> Pending:
        if self._command is None:
            raise RuntimeError(f"{HANG}: the run was never started")
        if self._lists and self._command.state is _NEW:
            raise RuntimeError(f"{HANG}: the run belongs to a runlist, which is what ends")
        return self._command

    def _count(self) -> None:
        if self._started:
            self._system.device_seconds += (time.perf_counter_ns() - self._started) * 1e-9
            self._started = 0


class Runlist(Bound):
    """``runlist``: runs of a context, submitted as chained commands. Runs stay in it as long as it lives."""

    __slots__ = ("_chains", "_context", "_runs", "_state")
    _hw_context: ClassVar[type[HwContext]]
    _run: ClassVar[type[Run]]

    def __init__(self, hwctx: HwContext) -> None:
        if not isinstance(hwctx, self._hw_context):
            raise mismatch("runlist", hwctx)
        self._context: Context = hwctx._context
        self._runs: list[Run] = []
        self._chains: list[Pending] = []
        self._state = "idle"

    def __del__(self) -> None:
        for run in getattr(self, "_runs", ()):
            run._lists -= 1

    def add(self, run: Run) -> None:
        """Adds a run, which can't be started on its own from now on."""
        if not isinstance(run, self._run):
            raise mismatch("add", run)
        self._be_idle("adding run objects")
        if run._context is not self._context:
            raise shim_error(-22, "a run of another context")
        run._lists += 1
        self._runs.append(run)

    def execute(self) -> None:
        """Submits all runs."""
        self._be_idle("submitting for execution")
        if not self._runs:
            return
        # From here on it must be waited for, whatever happens.
        self._chains, self._state = [], "running"
        for run in self._runs:
            run._command = Pending()
        commands = [(run._resolved(), self._system.refuse(self._context)) for run in self._runs]
        for arguments, fault in commands:
            after = self._chains[-1] if self._chains else None
            self._chains.append(Pending())
            self._system.submit(self._context, arguments, fault, self._chains[-1], after)

    def wait(self, *timeout: Any) -> None:
        """Waits until all runs have ended. Those that complete stay NEW: the driver tells of the chain only.

        pyxrt is built without pybind11's chrono.h, so that its form with a timeout takes no timedelta, or anything.

        Raises:
            RuntimeError: A run fails. It has its state; the ones behind it have ABORT.
            TypeError: A timeout is given.
        """
        if timeout:
            raise mismatch("wait", *timeout)
        if self._state != "running":
            return
        for link in self._chains:
            link.wait(None)
        self._state = "idle"
        for number, (run, link) in enumerate(zip(self._runs, self._chains, strict=False)):
            if link.state is not _COMPLETED:
                _end(run, link.state)
                for later in self._runs[number + 1 :]:
                    _end(later, ert_cmd_state.ERT_CMD_STATE_ABORT)
                raise RuntimeError(f"runlist failed execution ({link.state.name})")

    def _be_idle(self, what: str) -> None:
        if self._state != "idle":
            raise system_error(22, f"runlist must be idle before {what}, current state: {self._state}")


def _end(run: Run, state: ert_cmd_state) -> None:
    run._command = command = Pending()
    command.end(state)
