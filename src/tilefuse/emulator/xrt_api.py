"""The classes of pyxrt, on the emulated hardware: methods, arguments and errors as in XRT's src/python/pybind11.

What is known of the real ones' sharp edges is in the methods' docstrings. Where the real one crashes, hangs or corrupts
memory, these raise a RuntimeError that begins with `CRASH`.
"""

from __future__ import annotations

import logging
import operator
import time
import weakref
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilefuse.emulator import xclbin_file
from tilefuse.emulator.instructions import InstructionError
from tilefuse.emulator.xclbin_file import Image
from tilefuse.emulator.xrt_enums import INFO_KEYS, bo_flags, ert_cmd_state, xclBOSyncDirection, xrt_info_device
from tilefuse.emulator.xrt_hardware import (
    FIRST_BUFFER,
    Arguments,
    Context,
    Memory,
    Pending,
    System,
    shim_error,
    system_error,
)

_LOG = logging.getLogger(__name__)

CRASH = "the real XRT crashes here"

HANG = "the real XRT waits for ever here"


_NO_BANK = 0xFFFF
_HOST_BANK, _CODE_BANK = 0, 1

_INFO_NAMES = {value: name for name, value in INFO_KEYS.items()}

_NEW = ert_cmd_state.ERT_CMD_STATE_NEW
_COMPLETED = ert_cmd_state.ERT_CMD_STATE_COMPLETED


def _mismatch(what: str, *given: Any) -> TypeError:
    """What pybind11 raises when no overload takes the arguments."""
    kinds = ", ".join(type(value).__name__ for value in given)
    return TypeError(f"{what}: incompatible function arguments; invoked with: {kinds}")


def _integer(value: Any, low: int, high: int, what: str) -> int:
    """An integer as pybind11 takes it: of any integral type, never a float, within the C type's range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise _mismatch(what, value) from None
    if not low <= number <= high:
        raise _mismatch(what, value)
    return number


def _int(value: Any, what: str) -> int:
    return _integer(value, -(1 << 31), (1 << 31) - 1, what)


def _unsigned(value: Any, what: str) -> int:
    return _integer(value, 0, (1 << 32) - 1, what)


def _size(value: Any, what: str) -> int:
    return _integer(value, 0, (1 << 64) - 1, what)


class Bound:
    """A class of the module; `EmulatedXrt` binds it to its machine."""

    __slots__ = ()
    _system: ClassVar[System]


class Uuid(Bound):
    """``uuid``: names an xclbin."""

    __slots__ = ("_text",)

    def __init__(self, text: str, /) -> None:
        self._text = text

    def to_string(self) -> str:
        """As text, 36 characters."""
        return self._text


class XclbinKernel(Bound):
    """``xclbin.xclbinkernel``: what an xclbin tells of a kernel."""

    __slots__ = ("_image",)

    def __init__(self, image: Image, /) -> None:
        self._image = image

    def get_name(self) -> str:
        """Its name."""
        return self._image.kernel

    def get_num_args(self) -> int:
        """Arguments that it declares: opcode, instr, ninstr, bo0, ..."""
        return FIRST_BUFFER + self._image.host_buffers


class Xclbin(Bound):
    """``xclbin``: a file, read but not loaded.

    Raises:
        RuntimeError: It can't be opened, or is no xclbin (xrt_xclbin.cpp: read_file, init_axlf).
        TypeError: Its name is no string; a Path is not taken.
    """

    __slots__ = ("_image",)
    _uuid: ClassVar[type[Uuid]]
    xclbinkernel: ClassVar[type[XclbinKernel]]

    def __init__(self, filename: str, /) -> None:
        if not isinstance(filename, str | bytes):
            raise _mismatch("xclbin", filename)
        name = filename.decode() if isinstance(filename, bytes) else filename
        if not name:
            raise RuntimeError("No xclbin specified")
        try:
            with open(name, "rb") as file:
                data = file.read()
        except OSError:
            raise RuntimeError(f"Failed to open file '{name}' for reading") from None
        try:
            self._image = xclbin_file.load(data)
        except InstructionError as error:
            raise RuntimeError(f"Invalid xclbin: {name} is {error}") from None

    def get_uuid(self) -> Uuid:
        """Names it for `hw_context`."""
        return self._uuid(self._image.uuid)

    def get_kernels(self) -> list[XclbinKernel]:
        """Its kernels."""
        return [self.xclbinkernel(self._image)]

    def get_xsa_name(self) -> str:
        """Empty for what aiecc makes."""
        return ""


class Device(Bound):
    """``device``: by index.

    Raises:
        RuntimeError: There is none of that index, or its file can't be opened.
    """

    __slots__ = ("_registered",)
    _uuid: ClassVar[type[Uuid]]
    _xclbin: ClassVar[type[Xclbin]]

    def __init__(self, index: int) -> None:
        if isinstance(index, str):
            if index != self._system.info.get("bdf"):
                raise system_error(22, f"No such device '{index}'")
            index = 0
        self._system.open_device(_unsigned(index, "device"))
        self._registered: dict[str, Image] = {}

    def register_xclbin(self, xclbin: Xclbin) -> Uuid:
        """Makes an xclbin known, so that contexts can be made of it."""
        if not isinstance(xclbin, self._xclbin):
            raise _mismatch("register_xclbin", xclbin)
        self._registered[xclbin._image.uuid] = xclbin._image
        return self._uuid(xclbin._image.uuid)

    def get_info(self, key: Any, /) -> str:
        """A property, as text.

        Raises:
            RuntimeError: The driver doesn't tell it.
        """
        if not isinstance(key, xrt_info_device):
            raise _mismatch("get_info", key)
        name = _INFO_NAMES[key.value]
        if name not in self._system.info:
            raise RuntimeError(f"No such query request ({name})")
        return self._system.info[name]


class HwContext(Bound):
    """``hw_context``: an xclbin with a place on the array, until neither this nor a kernel or run of it is left.

    Raises:
        RuntimeError: The xclbin was not registered with this device, or there are too many contexts.
    """

    __slots__ = ("_context",)
    _device: ClassVar[type[Device]]
    _uuid: ClassVar[type[Uuid]]
    _xclbin: ClassVar[type[Xclbin]]

    def __init__(self, device: Device, uuid: Uuid | Xclbin) -> None:
        if isinstance(uuid, self._xclbin) and isinstance(device, self._device):
            uuid = device.register_xclbin(uuid)
        if not isinstance(device, self._device) or not isinstance(uuid, self._uuid):
            raise _mismatch("hw_context", device, uuid)
        image = device._registered.get(uuid.to_string())
        if image is None:
            raise system_error(22, f"No xclbin with uuid '{uuid.to_string()}'")
        self._context = self._system.open_context(image)


class Kernel(Bound):
    """``kernel``: of a context, by name.

    Raises:
        RuntimeError: The xclbin has none of that name.
    """

    __slots__ = ("_context",)
    _hw_context: ClassVar[type[HwContext]]
    _run: ClassVar[type[Run]]

    def __init__(self, hw_context: HwContext, name: str) -> None:
        if not isinstance(hw_context, self._hw_context) or not isinstance(name, str):
            raise _mismatch("kernel", hw_context, name)
        self._context: Context = hw_context._context
        if name.split(":", 1)[0] != self._context.image.kernel:
            raise system_error(22, f"No such kernel '{name}'")

    def group_id(self, argument: int, /) -> int:
        """What `bo` takes for an argument: a memory bank and the context's slot; bank 65535 if it is no buffer."""
        index = _int(argument, "group_id")
        bank = _CODE_BANK if index == 1 else _HOST_BANK
        if index in (0, 2) or not 0 <= index < self._arguments:
            bank = _NO_BANK
        return bank | (self._context.slot & 0xFF) << 16

    @property
    def _arguments(self) -> int:
        return FIRST_BUFFER + self._context.image.host_buffers

    def __call__(self, *arguments: Any) -> Run:
        """A started run. What is neither a buffer nor an integer is skipped without a word, as is a wrong index."""
        run = self._run(self)
        for index, argument in enumerate(arguments):
            if not isinstance(argument, Bo):
                try:
                    argument = _int(argument, "set_arg")
                except TypeError:
                    continue
            with suppress(IndexError, TypeError):
                run.set_arg(index, argument)
        run.start()
        return run


class Bo(Bound):
    """``bo``: a buffer.

    Args:
        device: The device, or a context, which then lives as long as the buffer.
        size: Bytes, at most 4 GiB.
        flags: `bo.host_only`, or `bo.cacheable` for instructions: the driver takes no others.
        group: From `kernel.group_id`.

    Raises:
        RuntimeError: It can't be had.
    """

    __slots__ = ("_memory",)
    _device: ClassVar[type[Device]]
    _hw_context: ClassVar[type[HwContext]]
    flags = bo_flags
    normal = bo_flags.normal
    cacheable = bo_flags.cacheable
    device_only = bo_flags.device_only
    host_only = bo_flags.host_only
    p2p = bo_flags.p2p
    svm = bo_flags.svm

    def __init__(self, device: Device | HwContext, size: int, flags: bo_flags, group: int) -> None:
        if not isinstance(device, self._device | self._hw_context) or not isinstance(flags, bo_flags):
            raise _mismatch("bo", device, size, flags, group)
        context = device._context if isinstance(device, HwContext) else None
        nbytes, bank = _size(size, "bo"), _unsigned(group, "bo")
        self._memory = self._system.allocate(nbytes, flags, bank, context)

    def write(self, data: Any, seek: int, /) -> None:
        """Copies ``data`` to the host's side, from byte ``seek`` on."""
        start = _size(seek, "write")
        try:
            view = memoryview(data)
        except TypeError:
            raise _mismatch("write", data, seek) from None
        if view.nbytes and not view.c_contiguous:
            raise RuntimeError("pyxrt ignores strides: it would copy other bytes than the array's; make it contiguous")
        if start > self._memory.size or view.nbytes > self._memory.size - start:
            raise system_error(22, "attempting to write past buffer size")
        if view.nbytes:
            self._memory.host[start : start + view.nbytes] = np.frombuffer(view.cast("B"), np.uint8)

    def read(self, size: int, skip: int, /) -> npt.NDArray[np.int8]:
        """A copy of the host's side: int8 [size], from byte ``skip`` on."""
        nbytes, start = _size(size, "read"), _size(skip, "read")
        if start > self._memory.size or nbytes > self._memory.size - start:
            raise system_error(22, "attempting to read past buffer size")
        return self._memory.host[start : start + nbytes].view(np.int8).copy()

    def sync(self, direction: xclBOSyncDirection, *part: int) -> None:
        """Makes the sides equal: all of it, or with ``size, offset`` that part."""
        if not isinstance(direction, xclBOSyncDirection) or len(part) not in (0, 2):
            raise _mismatch("sync", direction, *part)
        size, start = (_size(value, "sync") for value in part) if part else (self._memory.size, 0)
        if start > self._memory.size or size > self._memory.size - start:
            raise shim_error(22, f"Invalid BO offset and size for sync'ing: {start}, {size}")
        if direction is xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE:
            self._memory.to_device(start, start + size)
        elif direction is xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE:
            self._memory.from_device(start, start + size)
        else:
            raise shim_error(95, "a buffer of an NPU has no GMIO")

    def map(self) -> memoryview:
        """The host's side, writable bytes. It does not keep the buffer: once that is gone, it shows garbage."""
        return memoryview(self._memory.host)  # type: ignore[arg-type]

    def size(self) -> int:
        """Bytes."""
        return self._memory.size

    def address(self) -> int:
        """Where the device sees it."""
        return self._memory.address


class Run(Bound):
    """``run``: one execution of a kernel at a time. It does not keep the buffers that are its arguments."""

    __slots__ = ("__weakref__", "_arguments", "_command", "_context", "_declared", "_done", "_lists", "_started")
    _kernel: ClassVar[type[Kernel]]
    _bo: ClassVar[type[Bo]]

    def __init__(self, kernel: Kernel, /) -> None:
        if not isinstance(kernel, self._kernel):
            raise _mismatch("run", kernel)
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
        i = _int(index, "set_arg")
        if not isinstance(item, self._bo):
            value = _int(item, "set_arg")
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
        bank = _NO_BANK if i in (0, 2) else _CODE_BANK if i == 1 else _HOST_BANK
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
        milliseconds = _unsigned(timeout_ms, "wait")
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
            raise _mismatch("runlist", hwctx)
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
            raise _mismatch("add", run)
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
            raise _mismatch("wait", *timeout)
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
