"""Types and values as designs write them: array types, integers read at run time, `range_`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, get_args, get_origin

import numpy as np

from tilefuse.errors import DataflowError, DtypeError


@dataclass(frozen=True)
class ArrayType:
    """What ``np.ndarray[(shape,), np.dtype[T]]`` says."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def fits(self, argument: ArrayType) -> bool:
        """Whether a kernel's ``argument`` takes an array of this type: the same, or the same elements in one axis."""
        if self.dtype != argument.dtype:
            return False
        return self.shape == argument.shape or (len(argument.shape) == 1 and self.size == argument.size)


def array_type(spelled: Any, what: str) -> ArrayType:
    """The type that a design spells as ``np.ndarray[(shape,), np.dtype[T]]``.

    Raises:
        DtypeError: ``spelled`` is something else.
    """
    arguments = get_args(spelled)
    if get_origin(spelled) is not np.ndarray or len(arguments) != 2 or not isinstance(arguments[0], tuple):
        raise DtypeError(f"{what} is {spelled!r}; spell an array's type np.ndarray[(n,), np.dtype[np.int32]]")
    shape, dtype = arguments
    scalar = get_args(dtype)[0] if get_args(dtype) else dtype
    if not all(isinstance(n, int | np.integer) and n > 0 for n in shape):
        raise DtypeError(f"{what} has shape {shape}; extents are integers above 0")
    return _interned(tuple(int(n) for n in shape), np.dtype(scalar))


@cache
def _interned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayType:
    """One object for each type: a call's arguments are compared with its declaration by identity first."""
    return ArrayType(shape, dtype)


def is_array_type(spelled: Any) -> bool:
    """Whether ``spelled`` is an array's type."""
    return get_origin(spelled) is np.ndarray


class RuntimeInt(int):
    """An integer that a core read from memory: known when it runs, not when its program is compiled.

    Arithmetic on it gives another. Python's own ``if`` and ``while`` cannot follow it, since the compiler would have to
    decide them; neither can comparisons.
    """

    def __bool__(self) -> bool:
        raise DataflowError(_CONDITION)

    def _compare(self, other: object) -> bool:
        raise DataflowError(_CONDITION)

    __lt__ = __le__ = __gt__ = __ge__ = _compare
    __eq__ = __ne__ = _compare
    __hash__ = int.__hash__


_CONDITION = (
    "a Python condition on a value that the core reads at run time: the compiler would fix it once for all runs; "
    "use range_, or a mask computed from the value"
)


def _operator(function: Callable[[int, int], int], reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: RuntimeInt, other: Any) -> Any:
        if not isinstance(other, int | np.integer):
            return NotImplemented
        a, b = (int(other), int(self)) if reflected else (int(self), int(other))
        return RuntimeInt(function(a, b))

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    _function = getattr(operator, f"__{_name}__")
    setattr(RuntimeInt, f"__{_name}__", _operator(_function, False))
    setattr(RuntimeInt, f"__r{_name}__", _operator(_function, True))


def trips(start: int, stop: int | None, step: int | None) -> Iterator[int]:
    """What `range_` counts, checked."""
    low, high = (0, start) if stop is None else (start, stop)
    by = 1 if step is None else int(step)
    for value in (low, high):
        if not isinstance(value, int | np.integer):
            raise DtypeError(f"range_ counts integers, not {type(value).__name__}")
    if by < 1:
        raise DataflowError(f"range_ with a step of {by}; loops count upwards, by 1 or more")
    if int(high) < int(low):
        origin = " (read from memory: was it written?)" if isinstance(high, RuntimeInt) else ""
        raise DataflowError(f"range_({int(low)}, {int(high)}): the end lies below the start{origin}")
    return iter(range(int(low), int(high), by))
