"""The AIE2P microkernels, compiled for this machine from the very sources that the device compiler takes.

>>> from tilefuse.emulator import kernels
>>> kernel = kernels.get("gemv_bf16_w4g128_mantissa_128x64")
>>> acc = kernel.entry_points["zero"].arguments[0].empty()
>>> kernel.entry_points["zero"](acc)

A kernel has a main entry point, called as ``kernel(...)``, and others by their stem (``zero``, ``prepare``, ...).
Arrays are written in place, as the core writes its local memory. `count` says how many instructions of each issue slot
a call takes, and `Slots.cycles` what that comes to: *modelled* figures, no measurement.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

try:
    from tilefuse import _emu

    # An editable install sees the folder of the module's sources as a package of that name.
    if not hasattr(_emu, "kernels"):
        raise ImportError("not built")
except ImportError as error:
    raise ImportError(
        "this build has no emulator: install with `pip install . -C cmake.define.TILEFUSE_EMULATOR=ON`"
    ) from error
from tilefuse._buffers import address, aligned_empty
from tilefuse.errors import DeviceError, DtypeError, LayoutError, ShapeError
from tilefuse.layout import ALIGNMENT

PIPELINE_FILL = 10
"""Cycles, modelled: what a region costs beside its slots each time it is entered. A load returns after 7 cycles and a
multiplication after 3 more, so that is the distance between a loop's first load and its first result."""

_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "uint8": np.dtype(np.uint8),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float32": np.dtype(np.float32),
        "int32": np.dtype(np.int32),
    }
)


class RoundingMode(enum.IntEnum):
    """Modes of a core, by the hardware's numbers. The nearest ones differ only half-way between two results."""

    FLOOR = 0
    """To negative infinity; what a core powers up with."""
    CEIL = 1
    SYMMETRIC_FLOOR = 2
    """To zero."""
    SYMMETRIC_CEIL = 3
    """Away from zero."""
    NEGATIVE_INF = 8
    POSITIVE_INF = 9
    SYMMETRIC_ZERO = 10
    SYMMETRIC_INF = 11
    CONV_EVEN = 12
    """Nearest, half-way to even: what every kernel sets."""
    CONV_ODD = 13


@dataclass(frozen=True)
class Argument:
    """An array that an entry point takes: C-contiguous and aligned to 64 bytes, like a buffer in a core's memory. Or an
    int32 by value (`by_value`), which chooses an item of one of the arrays."""

    name: str
    shape: tuple[int, ...]
    """``()`` for a value. The first extent is -1 where the array may have any number of items, 1 or more."""
    dtype: np.dtype[Any]
    written: bool
    """Whether the entry point writes it (it may read it first)."""
    item_nbytes: int
    """Bytes of an item of the array, along its first axis. Of a value: from one item that it chooses to the next."""
    indexes: str = ""
    """Of a value: the name of the array that it is an index of."""
    extent: int = 0
    """Of a value: how many values it may have, from 0 on; 0 where that depends on the size of the array."""

    @property
    def by_value(self) -> bool:
        """Whether a call passes an integer and no array."""
        return bool(self.indexes)

    @property
    def is_open(self) -> bool:
        """Whether the array may have any number of items."""
        return self.shape[:1] == (-1,)

    @property
    def nbytes(self) -> int:
        """Bytes of the array, of the smallest one where its first extent is open; 4 for a value."""
        return self.item_nbytes if self.is_open else prod(self.shape) * self.dtype.itemsize

    def extent_in(self, nbytes: int) -> int:
        """How many values this index may have, from 0 on, if the array that it is an index of has ``nbytes`` bytes."""
        return self.extent or nbytes // self.item_nbytes

    def empty(self, leading: int | None = None) -> npt.NDArray[Any]:
        """An array of this kind; contents undefined.

        Args:
            leading: The first extent, where it is open (`shape`).

        Raises:
            ShapeError: ``leading`` is missing though the first extent is open, given though it is not, or below 1.
            DtypeError: This is no array but a value.
        """
        if self.by_value:
            raise DtypeError(f"{self.name} is an int32 by value, an index of {self.indexes}; pass an integer")
        if (leading is not None) != self.is_open:
            given = f"empty({leading!r})" if leading is not None else "empty()"
            remedy = f"empty(n) with the number of items of {list(self.shape)[1:]}" if self.is_open else "empty()"
            raise ShapeError(f"{self.name}: {given} of an array of shape {list(self.shape)}; call {remedy}")
        shape = self.shape
        if leading is not None:
            if not _is_integer(leading) or leading < 1:
                raise ShapeError(f"{self.name}: {leading!r} items; an array has 1 or more")
            shape = (int(leading), *shape[1:])
        return aligned_empty(prod(shape) * self.dtype.itemsize).view(self.dtype).reshape(shape)

    def copy_of(self, values: npt.ArrayLike) -> npt.NDArray[Any]:
        """An array of this kind that holds ``values``: any array of as many real numbers, rounded to the dtype.

        Where the first extent is open, ``values`` says it: they are a whole number of items.

        Raises:
            ShapeError: ``values`` has another number of elements.
            DtypeError: It does not hold real numbers, or some that the dtype does not reach: for uint8 all that are not
                integers from 0 to 255, for the others finite numbers that would become infinite. Or this is no array
                but a value.
        """
        try:
            given = np.asarray(values)
        except ValueError as error:
            raise DtypeError(f"{self.name}: not an array: {error}") from None
        if not np.can_cast(given.dtype, np.longdouble, "same_kind"):
            raise DtypeError(f"{self.name}: values of dtype {given.dtype}; the kernel takes {self.dtype}")
        items, odd = divmod(given.size * self.dtype.itemsize, self.item_nbytes)
        if (odd or not items) if self.is_open else given.size != prod(self.shape):
            raise ShapeError(f"{self.name}: values of shape {list(given.shape)}; the kernel takes {list(self.shape)}")
        array = self.empty(items if self.is_open else None)
        given = given.reshape(array.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            array[...] = given.astype(self.dtype)
        lost = array != given if self.dtype == np.uint8 else np.isfinite(given) & ~np.isfinite(array)
        if lost.any():
            raise DtypeError(f"{self.name}: {given[lost][0]} is among the values, and {self.dtype} does not reach it")
        return array

    def check(self, entry: str, array: npt.NDArray[Any] | int) -> None:
        """Raises what `EntryPoint.__call__` documents unless ``array`` is of this kind."""
        what = f"{entry}: {self.name}"
        if self.by_value:
            self._check_value(what, array)
            return
        if not isinstance(array, np.ndarray):
            raise DtypeError(f"{what} is a {type(array).__name__}; pass a NumPy array of {self.dtype}")
        if array.dtype != self.dtype:
            raise DtypeError(f"{what} has dtype {array.dtype}; the kernel takes {self.dtype}")
        if array.shape != self.shape and not (
            self.is_open and array.ndim == len(self.shape) and array.shape[1:] == self.shape[1:] and len(array)
        ):
            raise ShapeError(f"{what} has shape {list(array.shape)}; the kernel takes {list(self.shape)}")
        if not array.flags.c_contiguous:
            raise LayoutError(f"{what} is not C-contiguous; pass np.ascontiguousarray of it")
        if address(array) % ALIGNMENT != 0:
            raise LayoutError(
                f"{what} starts {address(array) % ALIGNMENT} bytes past a multiple of {ALIGNMENT}, and a core's vector "
                "accesses would ignore that; allocate it with Argument.empty()"
            )
        if self.written and not array.flags.writeable:
            raise LayoutError(f"{what} is read-only, and the kernel writes it; pass a copy")

    def _check_value(self, what: str, value: Any) -> None:
        """Raises unless ``value`` is an int32 and, where their number is fixed, one of those that choose an item."""
        if not _is_integer(value) or not _INT32.min <= value <= _INT32.max:
            raise DtypeError(f"{what} is {value!r}; pass an integer that int32 holds")
        if self.extent:
            self._check_index(what, value, self.extent)

    def _check_index(self, what: str, value: int, extent: int) -> None:
        """Raises unless ``value`` is below ``extent``."""
        if not 0 <= value < extent:
            raise ShapeError(f"{what} is {value}; it is an index of {self.indexes}: pass 0 to {extent - 1}")


_INT32 = np.iinfo(np.int32)


def _is_integer(value: object) -> bool:
    """Whether ``value`` is an integer, of Python or NumPy; bools are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


@dataclass(frozen=True)
class Slots:
    """Instructions by issue slot. The core issues one of each a cycle, and two loads."""

    load: int = 0
    """On either load unit."""
    ldb: int = 0
    """On the second load unit only: unpacks."""
    st: int = 0
    """On the store unit: stores, and conversions to bfloat16 and bfp16."""
    mv: int = 0
    """Shuffles, broadcasts, integer vector arithmetic, conversions to accumulators."""
    vec: int = 0
    """Multiplications, and arithmetic on accumulators."""
    entries: int = 0
    """Times that the region was entered."""

    @property
    def bound(self) -> int:
        """Cycles, modelled, that the busiest slot needs: what a perfect schedule takes."""
        return max(self.vec, self.mv, self.st, self.ldb, -(-(self.load + self.ldb) // 2))

    @property
    def cycles(self) -> int:
        """Cycles, modelled: `bound`, and `PIPELINE_FILL` for each entry."""
        return self.bound + PIPELINE_FILL * self.entries


@dataclass(frozen=True)
class EntryPoint:
    """One function of a kernel."""

    kernel: str
    stem: str
    """``""`` for the main one."""
    arguments: tuple[Argument, ...]
    _native: _emu.EntryPoint = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The symbol of the kernel object."""
        return f"{self.kernel}_{self.stem}" if self.stem else self.kernel

    def __call__(self, *arrays: npt.NDArray[Any] | int) -> None:
        """Runs it on ``arrays``, in the order of `arguments`; the written ones change in place. An integer stands
        where an argument is taken by value.

        Raises:
            DtypeError, ShapeError: An array or integer is not what its `Argument` says; an index is not below the
                extent of its array.
            LayoutError: An array is not contiguous, not aligned to 64 bytes, read-only though written, or shares memory
                with one that is written.
            DeviceError: The kernel did what the hardware would do silently wrong, a misaligned vector access, say.
        """
        self._check(arrays)
        self.call_addresses(*(address(array) if isinstance(array, np.ndarray) else array for array in arrays))

    def call_addresses(self, *addresses: int) -> None:
        """Runs it on memory that the caller vouches for: `Argument.nbytes` bytes at each address, or, of an array whose
        first extent is open, all items that an index chooses. Where an argument is taken by value, it stands itself.

        Raises:
            ShapeError: There are more or fewer addresses than `arguments`, or a value is not below its
                `Argument.extent`.
            DtypeError: One is not an integer above 0 that fits a pointer, or a value not one that fits int32.
            DeviceError: See `__call__`.
        """
        self._check_number(addresses, "addresses")
        for argument, where in zip(self.arguments, addresses, strict=True):
            if argument.by_value:
                argument.check(self.name, where)
            elif not _is_integer(where) or not 0 < where <= np.iinfo(np.uintp).max:
                raise DtypeError(f"{self.name}: {argument.name}: {where!r} is not an address")
        fault = self._native.call(*addresses)
        if fault:
            raise DeviceError(f"{self.name}: {fault}")

    def count(self, *arrays: npt.NDArray[Any] | int) -> dict[str, Slots]:
        """Runs it on ``arrays`` as `__call__` does, and returns what it issued: `Slots` by region.

        Regions are what the sources name with ``TF_REGION``; ``""`` is all that is in none of them.
        """
        self(*arrays)
        return {name: Slots(*slots, entries=entries) for name, entries, slots in _emu.counts()}

    def __reduce__(self) -> tuple[Any, ...]:
        return _entry_point, (self.kernel, self.stem)

    def _check_number(self, given: tuple[Any, ...], what: str) -> None:
        if len(given) != len(self.arguments):
            names = ", ".join(argument.name for argument in self.arguments)
            raise ShapeError(f"{self.name}: {len(given)} {what}; the kernel takes {len(self.arguments)}: {names}")

    def _check(self, given: tuple[npt.NDArray[Any] | int, ...]) -> None:
        self._check_number(given, "arrays")
        for argument, value in zip(self.arguments, given, strict=True):
            argument.check(self.name, value)
        arrays = {a.name: v for a, v in zip(self.arguments, given, strict=True) if isinstance(v, np.ndarray)}
        for argument, value in zip(self.arguments, given, strict=True):
            if argument.by_value and not isinstance(value, np.ndarray):
                extent = argument.extent_in(arrays[argument.indexes].nbytes)
                argument._check_index(f"{self.name}: {argument.name}", value, extent)
            for other, array in arrays.items():
                if argument.written and other != argument.name and np.may_share_memory(arrays[argument.name], array):
                    raise LayoutError(
                        f"{self.name}: {argument.name}, which the kernel writes, shares memory with {other}; "
                        "pass a copy"
                    )


def _arguments(native: list[tuple[str, list[int], str, bool, tuple[str, int, int]]]) -> tuple[Argument, ...]:
    """The arguments of an entry point as the compiled module states them."""
    itemsizes = {name: _DTYPES[dtype].itemsize for name, _, dtype, _, _ in native}
    made = []
    for name, shape, dtype, written, (indexes, step, extent) in native:
        item = step * itemsizes[indexes] if indexes else prod(shape[1:]) * itemsizes[name]
        made.append(Argument(name, tuple(shape), _DTYPES[dtype], written, item, indexes, extent))
    return tuple(made)


@dataclass(frozen=True)
class HostKernel:
    """A kernel object in one configuration (kernels/aie/config.h)."""

    name: str
    op: str
    """``gemm``, ``gemv`` or ``attention``."""
    activation: str
    """What activations arrive as: ``bf16``, or ``bfp16`` in bands of 2304 bytes."""
    bits: int
    """Bits of a weight, 16 for unquantised ones."""
    group: int
    """Input channels that share a scale, 0 for unquantised weights."""
    minima: bool
    """Whether the tile has bfloat16 minima in place of zero points."""
    path: str
    """How weights reach the multiplier: ``emulated``, ``bfp16``, ``mantissa`` or ``elementwise``; empty for attention,
    which has no weights."""
    m: int
    """Rows of activations a call."""
    tiles: int
    """Packed tiles of weights that lie side by side: a call has 64 times as many output channels."""
    d: int
    """Channels of a head, attention only: 0 for the others."""
    scratch_bytes: int
    """What ``prepare`` fills and the main entry point reads; the caller owns it. 0 for attention."""
    _native: _emu.Kernel = field(repr=False, compare=False)

    @cached_property
    def entry_points(self) -> Mapping[str, EntryPoint]:
        """Its functions by stem."""
        return MappingProxyType(
            {
                native.stem: EntryPoint(
                    self.name,
                    native.stem,
                    _arguments(arguments),
                    native,
                )
                for native, arguments in self._native.entry_points
            }
        )

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Of the main entry point; attention has none."""
        return self.entry_points[""].arguments

    def __call__(self, *arrays: npt.NDArray[Any] | int) -> None:
        """Runs the main entry point (see `EntryPoint.__call__`)."""
        self.entry_points[""](*arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        return get, (self.name,)


@cache
def _kernels() -> Mapping[str, HostKernel]:
    kernels = (
        HostKernel(
            k.name, k.op, k.activation, k.bits, k.group, bool(k.minima), k.path, k.m, k.tiles, k.d, k.scratch_bytes, k
        )
        for k in _emu.kernels()
    )
    return MappingProxyType({kernel.name: kernel for kernel in kernels})


def names() -> list[str]:
    """Names of all kernels, ``<op>_<activation>_<weights>_<path>_<tile>``, sorted."""
    return sorted(_kernels())


def get(name: str) -> HostKernel:
    """The kernel of that name.

    Raises:
        DeviceError: There is none.
        DtypeError: ``name`` is not text.
    """
    if not isinstance(name, str):
        raise DtypeError(f"the name of a kernel is text, not a {type(name).__name__} (see kernels.names())")
    try:
        return _kernels()[name]
    except KeyError:
        known = _kernels().values()
        alike = sorted(k.name for k in known if name.split("_")[0] == k.op) or names()
        raise DeviceError(f"no kernel '{name}'; there are {len(alike)} like {alike[0]} (see kernels.names())") from None


def count(name: str, entry: str, *arrays: npt.NDArray[Any] | int) -> dict[str, Slots]:
    """Runs entry point ``entry`` (``""``: the main one) of kernel ``name``; see `EntryPoint.count`."""
    return _entry_point(name, entry).count(*arrays)


def _entry_point(name: str, entry: str) -> EntryPoint:
    entry_points = get(name).entry_points
    if not isinstance(entry, str) or entry not in entry_points:
        raise DeviceError(f"{name} has no entry point {entry!r}; it has {', '.join(map(repr, entry_points))}")
    return entry_points[entry]


def current_rounding_mode() -> RoundingMode:
    """The mode that this thread's emulated core is in."""
    return RoundingMode(_emu.get_rounding())


@contextmanager
def rounding_mode(mode: RoundingMode, *, held: bool = False) -> Iterator[None]:
    """The mode that this thread's emulated core is in when a kernel is called; a kernel may leave another behind.

    ``held``: it can't change the mode either, which shows what would become of a kernel that sets none.

    Raises:
        DeviceError: A core has no such mode.
    """
    try:
        wanted = RoundingMode(mode)
    except ValueError:
        modes = ", ".join(f"{known.name} {known.value}" for known in RoundingMode)
        raise DeviceError(f"a core has no rounding mode {mode!r}; it has {modes}") from None
    held_before = _emu.hold_rounding(False)
    before = _emu.get_rounding()
    _emu.set_rounding(wanted)
    _emu.hold_rounding(held)
    try:
        yield
    finally:
        _emu.hold_rounding(False)
        _emu.set_rounding(before)
        _emu.hold_rounding(held_before)
