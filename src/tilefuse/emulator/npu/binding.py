"""How pybind11 binds: classes without a dictionary, integers of C's ranges, a TypeError where no overload fits."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from tilefuse.emulator.npu.system import System

CRASH = "the real XRT crashes here"

HANG = "the real XRT waits for ever here"

NO_BANK = 0xFFFF
"""Memory bank of what is no buffer."""

HOST_BANK, CODE_BANK = 0, 1
"""Memory banks of data and of instructions (mlir-aie, SidecarFiles.h)."""


def mismatch(what: str, *given: Any) -> TypeError:
    """What pybind11 raises when no overload takes the arguments."""
    kinds = ", ".join(type(value).__name__ for value in given)
    return TypeError(f"{what}: incompatible function arguments; invoked with: {kinds}")


def integer(value: Any, low: int, high: int, what: str) -> int:
    """An integer as pybind11 takes it: of any integral type, never a float, within the C type's range."""
    try:
        number = operator.index(value)
    except TypeError:
        raise mismatch(what, value) from None
    if not low <= number <= high:
        raise mismatch(what, value)
    return number


def as_int(value: Any, what: str) -> int:
    return integer(value, -(1 << 31), (1 << 31) - 1, what)


def as_unsigned(value: Any, what: str) -> int:
    return integer(value, 0, (1 << 32) - 1, what)


def as_size(value: Any, what: str) -> int:
    return integer(value, 0, (1 << 64) - 1, what)


class Bound:
    """A class of the module; `EmulatedXrt` binds it to its machine."""

    __slots__ = ()
    _system: ClassVar[System]
