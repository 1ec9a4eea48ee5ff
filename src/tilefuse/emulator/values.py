"""Types and values as designs write them: array types, integers read at run time, `range_`."""

from __future__ import annotations

import operator
from collections.abc import Callable
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


class RuntimeInt:
    """An integer that a core knows when it runs and the compiler does not: read from memory, or counted by `range_`.

    Arithmetic gives another; `range_`, kernels and indices take it. Python's own control flow and containers don't: the
    compiler would have to decide them once for all runs.
    """

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = int(value)

    def _refuse(self, *_: object) -> Any:
        raise DataflowError(
            "Python asks for a value that the core only knows at run time (in range(), an index of a list, a "
            "comparison, int()): use range_, or arithmetic on the value"
        )

    __bool__ = __int__ = __index__ = __float__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"RuntimeInt({self.value})"


def _operator(function: Callable[[int, int], int], reflected: bool) -> Callable[[Any, Any], Any]:
    def method(self: RuntimeInt, other: Any) -> Any:
        if isinstance(other, RuntimeInt):
            other = other.value
        elif not isinstance(other, int | np.integer):
            return NotImplemented
        left, right = (int(other), self.value) if reflected else (self.value, int(other))
        try:
            return RuntimeInt(function(left, right))
        except (ZeroDivisionError, ValueError) as error:
            raise DataflowError(f"a core computes with {left} and {right}: {error}") from None

    return method


for _name in ("add", "sub", "mul", "floordiv", "mod", "lshift", "rshift", "and", "or", "xor"):
    _function = getattr(operator, f"__{_name}__")
    setattr(RuntimeInt, f"__{_name}__", _operator(_function, False))
    setattr(RuntimeInt, f"__r{_name}__", _operator(_function, True))


def known(value: Any, what: str) -> int:
    """The integer that ``value`` is when the program runs.

    Raises:
        DtypeError: It is none.
    """
    if isinstance(value, RuntimeInt):
        return value.value
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    raise DtypeError(f"{what} is a {type(value).__name__}, not an integer")


def trips(start: Any, stop: Any, step: Any) -> range:
    """What `range_` counts, checked."""
    low, high = (0, start) if stop is None else (start, stop)
    first, end = known(low, "the start of range_"), known(high, "the end of range_")
    by = 1 if step is None else known(step, "the step of range_")
    if by < 1:
        raise DataflowError(f"range_ with a step of {by}; loops count upwards, by 1 or more")
    if end < first:
        origin = " (known at run time: was it written?)" if isinstance(high, RuntimeInt) else ""
        raise DataflowError(f"range_({first}, {end}): the end lies below the start{origin}")
    return range(first, end, by)
