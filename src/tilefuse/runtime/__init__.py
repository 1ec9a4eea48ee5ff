"""The devices, and the choice among them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from tilefuse import _core
from tilefuse.arrays import FloatArray
from tilefuse.errors import DeviceError
from tilefuse.packed import PackedLinear
from tilefuse.runtime.cpu import (
    CpuDevice,
    cpu_level,
    cpu_levels,
    force_cpu_level,
    get_num_threads,
    set_num_threads,
)
from tilefuse.runtime.reference import ReferenceDevice
from tilefuse.runtime.route import AutoDevice

__all__ = [
    "Device",
    "auto_device",
    "cpu_level",
    "cpu_levels",
    "default_device",
    "device_names",
    "force_cpu_level",
    "get_num_threads",
    "is_direct_cpu",
    "resolve_device",
    "set_default_device",
    "set_num_threads",
]


class Device(Protocol):
    """What can multiply."""

    name: str

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        """Writes ``x W + bias`` to ``y``. Shapes and dtypes have been checked; x and y don't overlap."""


def _npu() -> Device:
    from tilefuse.runtime.npu import open_npu

    return open_npu()


def _emulator() -> Device:
    from tilefuse.runtime.npu import open_emulator

    return open_emulator()


_AUTO = AutoDevice(CpuDevice(), lambda: resolve_device("npu"))
_MAKERS: dict[str, Callable[[], Device]] = {
    "cpu": CpuDevice,
    "reference": ReferenceDevice,
    "npu": _npu,
    "emulator": _emulator,
    "auto": lambda: _AUTO,
}
_DEVICES: dict[str, Device] = {}
_MAKING = threading.RLock()
_default: str | None = None


def auto_device() -> AutoDevice:
    """The device "auto"."""
    return _AUTO


def device_names() -> list[str]:
    """Names that ``device=`` takes."""
    return list(_MAKERS)


def default_device() -> str:
    """The device used when a call names none: set by `set_default_device`, else TILEFUSE_DEVICE, else "cpu"."""
    # Not by os.environ, which takes 0.9 us: this is asked at every call.
    return _default or _core.environment("TILEFUSE_DEVICE") or "cpu"


def set_default_device(name: str | None) -> None:
    """Sets the device used when a call names none; None goes back to the environment's.

    Raises:
        DeviceError: There is no such device.
    """
    global _default
    if name is not None:
        resolve_device(name)
    _default = name


def resolve_device(name: str | None) -> Device:
    """The device of that name, or the default. Devices are made when they are first asked for.

    Raises:
        DeviceError: There is no such device, or this machine or installation has none; the message says what is
            missing.
    """
    wanted = name if name is not None else default_device()
    device = _DEVICES.get(wanted) if isinstance(wanted, str) else None
    return device if device is not None else _make_device(wanted, "device" if name is not None else "TILEFUSE_DEVICE")


def is_direct_cpu(name: str | None) -> bool:
    """Whether calls with ``device=name`` go to the CPU's kernels whatever their arguments. Makes no device."""
    wanted = name if name is not None else default_device()
    return isinstance(wanted, str) and getattr(_DEVICES.get(wanted), "direct", False)


def _make_device(wanted: object, source: str) -> Device:
    maker = _MAKERS.get(wanted) if isinstance(wanted, str) else None
    if maker is None or not isinstance(wanted, str):
        raise DeviceError(f"{source} is {wanted!r}: there are {', '.join(_MAKERS)}")
    with _MAKING:
        if wanted not in _DEVICES:
            _DEVICES[wanted] = maker()
        return _DEVICES[wanted]
