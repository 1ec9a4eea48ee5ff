"""Buffers of the emulated NPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tilefuse._buffers import HUGE_PAGE, aligned_empty
from tilefuse.emulator.npu.enums import bo_flags

if TYPE_CHECKING:
    from tilefuse.emulator.npu.system import Context, System

Bytes = npt.NDArray[np.uint8]

_FREED = 0xDD
"""What a mapping that outlives its buffer shows."""


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
