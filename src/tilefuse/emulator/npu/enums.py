"""The enumerations of pyxrt, with XRT's values (xrt/detail/ert.h, xrt_mem.h, xrt_device.h, deprecated/xrt.h)."""

from __future__ import annotations

import enum
from typing import Any


class _Convertible(enum.Enum):
    """An unscoped enumeration of C: pybind11 compares it with integers too."""

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __eq__(self, other: Any) -> bool:
        return bool(self.value == other) if isinstance(other, int) else self is other

    def __hash__(self) -> int:
        return hash(self.value)


class ert_cmd_state(_Convertible):
    """State of a command. pyxrt has no name for 3, which is "running"."""

    ERT_CMD_STATE_NEW = 1
    ERT_CMD_STATE_QUEUED = 2
    ERT_CMD_STATE_COMPLETED = 4
    ERT_CMD_STATE_ERROR = 5
    ERT_CMD_STATE_ABORT = 6
    ERT_CMD_STATE_SUBMITTED = 7
    ERT_CMD_STATE_TIMEOUT = 8
    ERT_CMD_STATE_NORESPONSE = 9
    ERT_CMD_STATE_SKERROR = 10
    ERT_CMD_STATE_SKCRASHED = 11


class xclBOSyncDirection(_Convertible):
    """Where `bo.sync` copies to."""

    XCL_BO_SYNC_BO_TO_DEVICE = 0
    XCL_BO_SYNC_BO_FROM_DEVICE = 1
    XCL_BO_SYNC_BO_GMIO_TO_AIE = 2
    XCL_BO_SYNC_BO_AIE_TO_GMIO = 3


INFO_KEYS = {
    "bdf": 0,
    "interface_uuid": 1,
    "kdma": 2,
    "max_clock_frequency_mhz": 3,
    "m2m": 4,
    "name": 5,
    "nodma": 6,
    "offline": 7,
    "electrical": 8,
    "thermal": 9,
    "mechanical": 10,
    "memory": 11,
    "platform": 12,
    "pcie_info": 13,
    "host": 14,
    "dynamic_regions": 17,
    "vmr": 18,
}

xrt_info_device: Any = enum.Enum("xrt_info_device", list(INFO_KEYS.items()))  # type: ignore[misc]
"""Keys of `device.get_info`. One of them is called "name", so that nobody's ``.name`` can be relied on."""


class bo_flags(enum.Enum):
    """Kinds of buffers: `bo.flags`."""

    normal = 0
    cacheable = 1 << 24
    device_only = 1 << 28
    host_only = 1 << 29
    p2p = 1 << 30
    svm = 1 << 27

    def __int__(self) -> int:
        return self.value


bo_flags.__name__ = bo_flags.__qualname__ = "flags"
