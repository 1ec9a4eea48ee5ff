"""Kernels as workers call them: symbols found among the host-built kernels, arguments checked, cycles charged."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tilefuse.emulator import kernels
from tilefuse.emulator.cores import Core, Element, Memory
from tilefuse.emulator.kernels import EntryPoint
from tilefuse.emulator.program import Buffer, Kernel
from tilefuse.emulator.values import ArrayType, known
from tilefuse.errors import DataflowError, DeviceError

if TYPE_CHECKING:
    from tilefuse.emulator.kernels import Argument


@dataclass(frozen=True)
class PythonKernel:
    """A Python function in the place of a kernel.

    It is called with an array of the declared type for each array argument, and an int for each scalar.
    """

    function: Callable[..., None]
    cycles: float
    """What a call is charged."""
    writes: tuple[int, ...] = ()
    """Positions of the arguments that it writes."""


class BoundKernel:
    """A kernel of a design, ready to be called."""

    __slots__ = ("_entry", "_function", "_limits", "_types", "_writes", "cycles", "name")

    def __init__(self, kernel: Kernel, registered: Mapping[str, PythonKernel]) -> None:
        self.name = kernel.name
        self._types: list[ArrayType | None] = kernel.types
        self._entry: EntryPoint | None = None
        self._function: Callable[..., None] | None = None
        self._limits: list[tuple[int, int]] = []
        """(position of an index, number of values that it may have)."""
        if kernel.name in registered:
            python = registered[kernel.name]
            if not isinstance(python, PythonKernel):
                raise DeviceError(
                    f"kernels['{kernel.name}'] is a {type(python).__name__}: wrap it, "
                    "PythonKernel(f, cycles, writes=(2,)) with the positions of the arguments that it writes"
                )
            self._function = python.function
            self.cycles = float(python.cycles)
            self._writes = [i in python.writes for i in range(len(self._types))]
            return
        entry = self._entry = find_entry_point(kernel.name)
        self._writes = [argument.written for argument in entry.arguments]
        self._check_types(entry)
        self.cycles = float(entry_cycles(entry.kernel, entry.stem))

    def _check_types(self, entry: EntryPoint) -> None:
        """Raises unless the declared types agree with the entry point's, in bytes."""
        if len(self._types) != len(entry.arguments):
            names = ", ".join(argument.name for argument in entry.arguments)
            raise DeviceError(
                f"{self.name} is declared with {len(self._types)} arguments; it takes {len(entry.arguments)}: {names}"
            )
        sizes = {}
        for i, (declared, argument) in enumerate(zip(self._types, entry.arguments, strict=True)):
            what = f"{self.name}: argument {i}, {argument.name},"
            if argument.by_value:
                if declared is not None:
                    raise DeviceError(f"{what} is an int32 by value; it is declared as {declared}")
                continue
            if declared is None:
                raise DeviceError(f"{what} is an array of {argument.nbytes} bytes; it is declared as a scalar")
            whole = declared.nbytes % argument.nbytes == 0 if argument.is_open else declared.nbytes == argument.nbytes
            if not whole:
                many = "a multiple of " if argument.is_open else ""
                raise DeviceError(
                    f"{what} takes {many}{argument.nbytes} bytes; it is declared as {declared}, {declared.nbytes} bytes"
                )
            sizes[argument.name] = declared.nbytes
        for i, argument in enumerate(entry.arguments):
            if argument.by_value:
                self._limits.append((i, argument.extent_in(sizes[argument.indexes])))

    def run(self, core: Core, arguments: Sequence[Any]) -> None:
        """Checks a call's arguments, and runs the kernel if the core computes.

        Raises:
            DeviceError: They are not what the kernel is declared with.
            DataflowError: An object was released already, or nothing wrote a buffer that the kernel reads.
        """
        if len(arguments) != len(self._types):
            raise DeviceError(f"{self.name} is declared with {len(self._types)} arguments; {len(arguments)} are given")
        memories: list[Any] = []
        for i, (given, declared) in enumerate(zip(arguments, self._types, strict=True)):
            if declared is None:
                memories.append(known(given, f"{self.name}: argument {i}, by value,"))
                continue
            memory: Memory
            if type(given) is Element:
                memory = given
                if not memory.held:
                    raise DataflowError(
                        f"{self.name}: argument {i} is {memory.label} that the worker has released already"
                    )
            elif isinstance(given, Buffer):
                memory = self._buffer(core, given, i)
            else:
                raise DeviceError(f"{self.name}: argument {i} is {given!r}; pass an acquired object or a Buffer")
            if memory.type is not declared and not memory.type.fits(declared):
                raise DeviceError(
                    f"{self.name}: argument {i} is declared as {declared}; {memory.label} holds {memory.type}"
                )
            if self._writes[i]:
                memory.written = True
            elif not memory.written:
                remedy = (
                    "" if self._function is None else f"; if it writes it, name it: PythonKernel(..., writes=({i},))"
                )
                raise DataflowError(f"{self.name} reads {memory.label} (argument {i}) before anything wrote it{remedy}")
            memories.append(memory)
        for i, extent in self._limits:
            if not 0 <= memories[i] < extent:
                raise DataflowError(f"{self.name}: argument {i} is {memories[i]}; it may be 0 to {extent - 1}")
        if not core.computes:
            return
        if self._entry is not None:
            self._entry.call_addresses(*[m if type(m) is int else m.address for m in memories])
        elif self._function is not None:
            self._function(
                *[m if d is None else m.array.reshape(d.shape) for m, d in zip(memories, self._types, strict=True)]
            )

    def _buffer(self, core: Core, buffer: Buffer, i: int) -> Memory:
        try:
            return core.buffers[buffer]
        except KeyError:
            raise DeviceError(
                f"{self.name}: argument {i} is buffer '{buffer.name}', which {core} does not have; pass it in fn_args"
            ) from None


def find_entry_point(symbol: str) -> EntryPoint:
    """The host-built function of that name.

    Raises:
        DeviceError: There is none; the message names alike ones.
    """
    symbols = _symbols()
    if symbol not in symbols:
        alike = difflib.get_close_matches(symbol, symbols, 3, 0.5)
        raise DeviceError(
            f"no kernel has a function '{symbol}' in this build"
            + (f"; alike: {', '.join(alike)}" if alike else "; see tilefuse.emulator.kernels.names()")
            + f"; or pass load(program, kernels={{'{symbol}': PythonKernel(...)}})"
        )
    return symbols[symbol]


@cache
def _symbols() -> dict[str, EntryPoint]:
    return {entry.name: entry for name in kernels.names() for entry in kernels.get(name).entry_points.values()}


@cache
def entry_cycles(kernel: str, stem: str) -> int:
    """Cycles of a call, *modelled*, from what it issues on random data.

    Where a kernel folds zero points that are all the same, random ones take the longer way.
    """
    entry = kernels.get(kernel).entry_points[stem]
    rng = np.random.default_rng(0)
    regions = entry.count(*[_sample(argument, rng) for argument in entry.arguments])
    return sum(slots.cycles for slots in regions.values())


def _sample(argument: Argument, rng: np.random.Generator) -> Any:
    """Something valid to count with: small integers, and finite numbers."""
    if argument.by_value:
        return 0
    array = argument.empty(1) if argument.is_open else argument.empty()
    is_integer = array.dtype.kind in "iu"
    array[...] = (rng.integers(0, 16, array.shape) if is_integer else rng.normal(size=array.shape)).astype(array.dtype)
    return array
