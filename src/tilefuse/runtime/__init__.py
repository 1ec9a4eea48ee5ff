"""The devices, and the choice among them."""

from __future__ import annotations

import os
from typing import Protocol

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
    "resolve_device",
    "set_default_device",
    "set_num_threads",
]


class Device(Protocol):
    """What can multiply."""

    name: str

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        """Writes ``x W + bias`` to ``y``. Shapes and dtypes have been checked; x and y don't overlap."""


_AUTO = AutoDevice(CpuDevice(), lambda: resolve_device("npu"))
_DEVICES: dict[str, Device] = {device.name: device for device in (CpuDevice(), ReferenceDevice(), _AUTO)}
_default: str | None = None


def auto_device() -> AutoDevice:
    """The device "auto"."""
    return _AUTO


def device_names() -> list[str]:
    """Names that ``device=`` takes."""
    return list(_DEVICES)


def default_device() -> str:
    """The device used when a call names none: set by `set_default_device`, else TILEFUSE_DEVICE, else "cpu"."""
    return _default or os.environ.get("TILEFUSE_DEVICE") or "cpu"


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
    """The device of that name, or the default.

    Raises:
        DeviceError: There is no such device.
    """
    wanted = name if name is not None else default_device()
    device = _DEVICES.get(wanted) if isinstance(wanted, str) else None
    if device is None:
        source = "device" if name is not None else "TILEFUSE_DEVICE"
        raise DeviceError(f"{source} is {wanted!r}: there are {', '.join(_DEVICES)}")
    return device
