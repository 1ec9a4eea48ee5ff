"""XRT's Python module as tilefuse uses it: a subset, its failures as tilefuse's errors with their likely causes.

Everything here is written against what pyxrt binds (XRT, src/python/pybind11/src/pyxrt.cpp), and takes any module that
binds the same: the emulated one runs the same code. What has to be known of it:

- ``kernel(...)(...)`` swallows the errors of its arguments, so arguments are set one by one, on a run.
- ``run.wait(ms)`` returns a state and never raises, and 0 waits for ever. ``runlist.wait`` raises, and its form with a
  timeout can't be called: pyxrt does not convert durations.
- The memory that ``bo.map`` gives goes with the bo, whoever still looks at it.
- More buffers than the xclbin declares crash the process.
- Waiting keeps the interpreter's lock: other Python threads stand still until the run ends. tilefuse's own binding of
  the same names (tilefuse._xrt), where it was built, lets them run.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tilefuse.errors import NpuError, NpuMemoryError, NpuTimeout, NpuUnavailable

Words = npt.NDArray[np.uint32]
"""An instruction stream."""

OPCODE = 3
"""First argument of every run: transactions by the device's command processor."""

FIRST_BUFFER = 3
"""Index of the first data buffer among a run's arguments: opcode, instructions and their bytes come before."""

BUFFERS = 3
"""Data buffers of a run: activations, weights, results."""

BANK = 0xFFFF
"""The part of a group id that names memory; above it are a context's slot and flags, which buffers don't go by."""

OPEN_ATTEMPTS = (0.1, 0.4)
"""Seconds before the device is tried again: a process that has just ended may hold it for a moment."""

OLD_DEVICES = ("npu1", "Phoenix", "Hawk")
"""In the names of devices of the first generation, whose array is another."""

DOCTOR = "`tilefuse doctor` says what this machine lacks"


class BufferObject(Protocol):
    """pyxrt.bo"""

    def map(self) -> memoryview: ...
    def sync(self, direction: Any, size: int, offset: int, /) -> None: ...
    def size(self) -> int: ...


class RunObject(Protocol):
    """pyxrt.run"""

    def set_arg(self, index: int, value: Any, /) -> None: ...
    def start(self) -> None: ...
    def wait(self, timeout_ms: int, /) -> Any: ...
    def state(self) -> Any: ...


class RunListObject(Protocol):
    """pyxrt.runlist"""

    def add(self, run: RunObject, /) -> None: ...
    def execute(self) -> None: ...
    def wait(self, timeout: timedelta = ..., /) -> Any: ...


class KernelObject(Protocol):
    """pyxrt.kernel"""

    def group_id(self, argument: int, /) -> int: ...


class XclbinObject(Protocol):
    """pyxrt.xclbin"""

    def get_uuid(self) -> Any: ...
    def get_kernels(self) -> Sequence[Any]: ...


class DeviceObject(Protocol):
    """pyxrt.device"""

    def register_xclbin(self, xclbin: XclbinObject, /) -> Any: ...
    def get_info(self, key: Any, /) -> str: ...


class PyXrt(Protocol):
    """The module: pyxrt, or one that binds the same. ``runlist`` may be missing."""

    xclBOSyncDirection: Any
    ert_cmd_state: Any
    xrt_info_device: Any
    bo: Any

    def device(self, index: int, /) -> DeviceObject: ...
    def xclbin(self, path: str, /) -> XclbinObject: ...
    def hw_context(self, device: DeviceObject, uuid: Any, /) -> Any: ...
    def kernel(self, context: Any, name: str, /) -> KernelObject: ...
    def run(self, kernel: KernelObject, /) -> RunObject: ...


_DEADLOCK = (
    "the design waits for itself, or more tasks were queued than a channel holds: repeat the call with "
    'device="emulator", which says who waits for whom, and report it'
)
_FIRMWARE = (
    "firmware and driver don't match (a stale npu.sbin): install both from one release of the driver, and reboot"
)
_OTHER_DEVICE = "the xclbin was built for another device: run `make xclbins` for npu2 again"
RESET = "`sudo modprobe -r amdxdna && sudo modprobe amdxdna`, or reboot"
"""How to reset the device."""

_WEDGED = f"an earlier run left the array stuck: reset the device ({RESET})"

_CONTEXTS = "other processes have all contexts of the device: end one"
_CLOSED = (
    "the driver amdxdna is not loaded, or there is no NPU",
    "no permission for /dev/accel/accel0: join the group render, and log in again",
    "another process has it for itself: end it",
)
_MEMORY = (
    "the limit of locked memory: raise it (`ulimit -l unlimited`, or memlock in /etc/security/limits.conf)",
    "no memory left: drop layers, or take fewer rows at a time",
)

_CAUSES = {
    "TIMEOUT": (_DEADLOCK, _FIRMWARE, _OTHER_DEVICE, _WEDGED),
    "ABORT": (_FIRMWARE, _OTHER_DEVICE, _DEADLOCK, _WEDGED),
    "ERROR": (_OTHER_DEVICE, _FIRMWARE, _WEDGED, _DEADLOCK),
    "START": (_WEDGED, _FIRMWARE, _OTHER_DEVICE),
    "NOTHING WRITTEN": (_OTHER_DEVICE, _FIRMWARE, _WEDGED),
}


def causes(state: str) -> str:
    """The likely causes of a run that ended in ``state``, most likely first.

    "START" is one that didn't begin, and "NOTHING WRITTEN" one that completed without results.
    """
    return _listed(*_CAUSES.get(state, _CAUSES["ERROR"]))


def _listed(*found: str) -> str:
    return "likely causes, most likely first: " + "; ".join(f"({i}) {text}" for i, text in enumerate(found, 1))


class Buffer:
    """A buffer of the host's memory that the device reads or writes.

    Attributes:
        bo: XRT's.
        array: uint8 [nbytes], the mapped memory.
        bank: The memory that it is in.
    """

    __slots__ = ("__weakref__", "_from", "_sync", "_to", "array", "bank", "bo", "nbytes")

    def __init__(self, module: PyXrt, bo: BufferObject, nbytes: int, bank: int) -> None:
        self.bo = bo
        self.nbytes = nbytes
        self.bank = bank
        self.array: npt.NDArray[np.uint8] = np.frombuffer(bo.map(), np.uint8)[:nbytes]
        self._sync = bo.sync
        self._to = module.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
        self._from = module.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE

    def to_device(self, nbytes: int, offset: int = 0) -> None:
        """Shows the device ``nbytes`` from ``offset`` on as the host wrote them."""
        try:
            self._sync(self._to, nbytes, offset)
        except RuntimeError as error:
            raise NpuError(f"the driver can't hand {nbytes} bytes to the device ({error}): {_WEDGED}") from error

    def from_device(self, nbytes: int) -> None:
        """Shows the host the first ``nbytes`` as the device wrote them."""
        try:
            self._sync(self._from, nbytes, 0)
        except RuntimeError as error:
            raise NpuError(f"the driver can't take {nbytes} bytes from the device ({error}): {_WEDGED}") from error


class Context:
    """An xclbin on the device.

    Attributes:
        groups: Group ids: of the instructions, and of each data buffer.
    """

    def __init__(self, xrt: Xrt, path: Path, kernel: str) -> None:
        module, title = xrt.module, f"{path.name}, kernel {kernel!r}"
        try:
            xclbin = module.xclbin(str(path))
            declared = {found.get_name(): found.get_num_args() for found in xclbin.get_kernels()}
        except RuntimeError as error:
            raise NpuError(f"XRT can't read {path}: {error}; build it anew with `make xclbins`") from error
        if kernel not in declared:
            raise NpuError(
                f"{path} has no kernel {kernel!r}, only {', '.join(sorted(declared)) or 'none'}: it is not what the "
                "manifest lists; run `make xclbins` again"
            )
        if declared[kernel] < FIRST_BUFFER + BUFFERS:
            raise NpuError(
                f"{title} declares {declared[kernel] - FIRST_BUFFER} buffers; activations, weights and results are "
                f"{BUFFERS}: run `make xclbins` again"
            )
        try:
            uuid = xrt.device.register_xclbin(xclbin)
            self._context: Any = module.hw_context(xrt.device, uuid)
            self._kernel: Any = module.kernel(self._context, kernel)
            self.groups = (
                int(self._kernel.group_id(1)),
                *(int(self._kernel.group_id(FIRST_BUFFER + i)) for i in range(BUFFERS)),
            )
        except (RuntimeError, MemoryError) as error:
            raise NpuError(
                f"{title}: the driver gives no context ({error}); {_listed(_CONTEXTS, *_CAUSES['ERROR'][:3])}"
            ) from error
        self._module = module

    def run(self, instructions: Buffer) -> RunObject:
        """A run of these instructions; its buffers are yet to be set."""
        run = self._module.run(self._kernel)
        run.set_arg(0, OPCODE)
        run.set_arg(1, instructions.bo)
        run.set_arg(2, instructions.nbytes)
        return run

    def run_list(self) -> RunListObject:
        """An empty list of runs."""
        found: RunListObject = self._module.runlist(self._context)  # type: ignore[attr-defined]
        return found

    def close(self) -> None:
        """Gives the context back: the kernel first."""
        self._kernel = None
        self._context = None


class Xrt:
    """An open device.

    Args:
        module: pyxrt, or one that binds the same.
        index: Which device.

    Raises:
        NpuUnavailable: It can't be opened, or is no XDNA2 device.
    """

    def __init__(self, module: PyXrt, index: int = 0) -> None:
        self.module = module
        self.device = _open(module, index)
        self.name = self._info("name")
        self.bdf = self._info("bdf")
        if any(old.lower() in self.name.lower() for old in OLD_DEVICES):
            raise NpuUnavailable(
                f"device {index} is {self.name!r}, a first-generation NPU; the designs are for XDNA2 (Strix, Strix "
                "Halo, Krackan)"
            )
        states = module.ert_cmd_state
        self._completed = states.ERT_CMD_STATE_COMPLETED
        self._new = states.ERT_CMD_STATE_NEW

    def _info(self, key: str) -> str:
        try:
            return str(self.device.get_info(getattr(self.module.xrt_info_device, key)))
        except (RuntimeError, AttributeError):
            return ""

    def context(self, path: Path, kernel: str) -> Context:
        """The xclbin at ``path`` on the device.

        Raises:
            NpuError: It is not usable, or the driver has no context left.
        """
        return Context(self, path, kernel)

    def instructions(self, words: Words, group: int) -> Buffer:
        """A buffer with instructions, on the device."""
        buffer = self._buffer(words.nbytes, self.module.bo.cacheable, group, "an instruction stream")
        buffer.array[:] = words.view(np.uint8)
        buffer.to_device(words.nbytes)
        return buffer

    def buffer(self, nbytes: int, group: int, what: str) -> Buffer:
        """A data buffer, contents undefined.

        Raises:
            NpuMemoryError: There is no memory for it.
        """
        return self._buffer(nbytes, self.module.bo.host_only, group, what)

    def _buffer(self, nbytes: int, flags: Any, group: int, what: str) -> Buffer:
        try:
            bo = self.module.bo(self.device, nbytes, flags, group)
            return Buffer(self.module, bo, nbytes, group & BANK)
        except (RuntimeError, MemoryError) as error:
            raise NpuMemoryError(
                f"the driver gives no buffer of {nbytes} bytes for {what} ({error}); {_listed(*_MEMORY)}"
            ) from error

    def start(self, run: RunObject, what: str) -> None:
        """Starts a run.

        Raises:
            NpuError: The driver refuses it.
        """
        try:
            run.start()
        except RuntimeError as error:
            raise NpuError(f"{what}: the run could not be started ({error}); {causes('START')}") from error

    def wait(self, run: RunObject, timeout_ms: int, what: str) -> None:
        """Waits for a run.

        Raises:
            NpuTimeout, NpuError: It did not complete.
        """
        began = time.monotonic()
        state = run.wait(timeout_ms)
        if state != self._completed:
            raise self._failure(state, time.monotonic() - began, what)

    def run_all(self, context: Context, runs: Sequence[RunObject], timeout_ms: int, titles: Sequence[str]) -> None:
        """Runs all, one after another, as one command.

        Raises:
            NpuTimeout, NpuError: One did not complete; those after it did not run.
        """
        batch = context.run_list()
        for run in runs:
            batch.add(run)
        began = time.monotonic()
        try:
            try:
                batch.execute()
            except RuntimeError:
                # What was submitted before has to be waited for all the same.
                with contextlib.suppress(RuntimeError):
                    batch.wait()
                raise
            in_time = _wait_for(batch, timeout_ms)
        except RuntimeError as error:
            seconds, where = time.monotonic() - began, f" in a list of {len(runs)} ({error})"
            # The driver tells of the list alone; XRT marks the run that failed, and those after it as aborted.
            for run, title in zip(runs, titles, strict=True):
                state = run.state()
                if state not in (self._completed, self._new):
                    raise self._failure(state, seconds, title, where) from error
            raise NpuError(f"{titles[0]}: the runs{where} failed; {causes('ERROR')}") from error
        if not in_time:
            where = f" in a list of {len(runs)}"
            raise NpuTimeout(
                f"{titles[0]}: the runs{where} have not ended after {timeout_ms / 1000:g} s; {causes('TIMEOUT')}"
            )

    def _failure(self, state: Any, seconds: float, what: str, where: str = "") -> NpuError:
        name = str(getattr(state, "name", state)).rpartition("ERT_CMD_STATE_")[2]
        kind = NpuTimeout if name == "TIMEOUT" else NpuError
        # The emulated device knows why.
        fault = getattr(self.module, "last_fault", None)
        known = f": {fault.message}" if fault is not None and fault.message else ""
        return kind(f"{what}: the run{where} ended as {name} after {seconds:.1f} s{known}; {causes(name)}")

    def close(self) -> None:
        """Lets the device go."""
        self.device = None  # type: ignore[assignment]


def _wait_for(batch: RunListObject, timeout_ms: int) -> bool:
    """Waits for a list; False if it is not done in time, which only our own module can tell."""
    try:
        return batch.wait(timedelta(milliseconds=timeout_ms)) is not False
    except TypeError:
        # pyxrt knows neither durations nor the type of the answer: it is the driver's watchdog that ends a list.
        batch.wait()
        return True


def _open(module: PyXrt, index: int) -> DeviceObject:
    for pause in (*OPEN_ATTEMPTS, None):
        try:
            return module.device(index)
        except RuntimeError as error:
            if pause is None:
                raise NpuUnavailable(
                    f"XRT can't open device {index} ({error}); {_listed(*_CLOSED)}. {DOCTOR}"
                ) from error
            time.sleep(pause)
    raise AssertionError


def load_module() -> PyXrt:
    """tilefuse's own binding of XRT if it was built, whose waits let other threads run; else XRT's pyxrt.

    Raises:
        NpuUnavailable: pyxrt is not installed for this Python either.
    """
    with contextlib.suppress(ImportError, OSError):
        own: PyXrt = importlib.import_module("tilefuse._xrt")
        if hasattr(own, "device"):  # not the folder of its sources
            return own
    try:
        found: PyXrt = importlib.import_module("pyxrt")
    except (ImportError, OSError) as error:
        raise NpuUnavailable(
            'device="npu" needs pyxrt, the Python module of XRT, built for this Python, and it can\'t be imported '
            f'({error}): {DOCTOR}; device="emulator" runs the same code without it, device="cpu" computes more '
            "precisely"
        ) from error
    return found
