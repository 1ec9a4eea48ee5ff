"""The classes of pyxrt but those of runs: methods, arguments and errors as in XRT's src/python/pybind11.

What is known of the real ones' sharp edges is in the methods' docstrings. Where the real one crashes, hangs or corrupts
memory, these raise a RuntimeError that says so.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilefuse.emulator import xclbin_file
from tilefuse.emulator.instructions import InstructionError
from tilefuse.emulator.npu.binding import (
    CODE_BANK,
    HOST_BANK,
    NO_BANK,
    Bound,
    as_int,
    as_size,
    as_unsigned,
    mismatch,
)
from tilefuse.emulator.npu.enums import INFO_KEYS, bo_flags, xclBOSyncDirection, xrt_info_device
from tilefuse.emulator.npu.errors import shim_error, system_error
from tilefuse.emulator.npu.loaded import FIRST_BUFFER
from tilefuse.emulator.npu.system import Context
from tilefuse.emulator.xclbin_file import Image

if TYPE_CHECKING:
    from tilefuse.emulator.npu.runs import Run

_INFO_NAMES = {value: name for name, value in INFO_KEYS.items()}


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
            raise mismatch("xclbin", filename)
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
        self._system.open_device(as_unsigned(index, "device"))
        self._registered: dict[str, Image] = {}

    def register_xclbin(self, xclbin: Xclbin) -> Uuid:
        """Makes an xclbin known, so that contexts can be made of it."""
        if not isinstance(xclbin, self._xclbin):
            raise mismatch("register_xclbin", xclbin)
        self._registered[xclbin._image.uuid] = xclbin._image
        return self._uuid(xclbin._image.uuid)

    def get_info(self, key: Any, /) -> str:
        """A property, as text.

        Raises:
            RuntimeError: The driver doesn't tell it.
        """
        if not isinstance(key, xrt_info_device):
            raise mismatch("get_info", key)
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
            raise mismatch("hw_context", device, uuid)
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
            raise mismatch("kernel", hw_context, name)
        self._context: Context = hw_context._context
        if name.split(":", 1)[0] != self._context.image.kernel:
            raise system_error(22, f"No such kernel '{name}'")

    def group_id(self, argument: int, /) -> int:
        """What `bo` takes for an argument: a memory bank and the context's slot; bank 65535 if it is no buffer."""
        index = as_int(argument, "group_id")
        bank = CODE_BANK if index == 1 else HOST_BANK
        if index in (0, 2) or not 0 <= index < self._arguments:
            bank = NO_BANK
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
                    argument = as_int(argument, "set_arg")
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
            raise mismatch("bo", device, size, flags, group)
        context = device._context if isinstance(device, HwContext) else None
        nbytes, bank = as_size(size, "bo"), as_unsigned(group, "bo")
        self._memory = self._system.allocate(nbytes, flags, bank, context)

    def write(self, data: Any, seek: int, /) -> None:
        """Copies ``data`` to the host's side, from byte ``seek`` on."""
        start = as_size(seek, "write")
        try:
            view = memoryview(data)
        except TypeError:
            raise mismatch("write", data, seek) from None
        if view.nbytes and not view.c_contiguous:
            raise RuntimeError("pyxrt ignores strides: it would copy other bytes than the array's; make it contiguous")
        if start > self._memory.size or view.nbytes > self._memory.size - start:
            raise system_error(22, "attempting to write past buffer size")
        if view.nbytes:
            self._memory.host[start : start + view.nbytes] = np.frombuffer(view.cast("B"), np.uint8)

    def read(self, size: int, skip: int, /) -> npt.NDArray[np.int8]:
        """A copy of the host's side: int8 [size], from byte ``skip`` on."""
        nbytes, start = as_size(size, "read"), as_size(skip, "read")
        if start > self._memory.size or nbytes > self._memory.size - start:
            raise system_error(22, "attempting to read past buffer size")
        return self._memory.host[start : start + nbytes].view(np.int8).copy()

    def sync(self, direction: xclBOSyncDirection, *part: int) -> None:
        """Makes the sides equal: all of it, or with ``size, offset`` that part."""
        if not isinstance(direction, xclBOSyncDirection) or len(part) not in (0, 2):
            raise mismatch("sync", direction, *part)
        size, start = (as_size(value, "sync") for value in part) if part else (self._memory.size, 0)
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
