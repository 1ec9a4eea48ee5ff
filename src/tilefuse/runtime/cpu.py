"""The CPU device: the C++ kernels, straight from the packed tiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from numbers import Integral
from typing import Any

from tilefuse import _core
from tilefuse.arrays import FloatArray
from tilefuse.errors import DeviceError
from tilefuse.packed import PackedLinear, native_layout

MAX_THREADS = 256
"""Threads at most, as in thread_pool.h."""

changes = 0
"""Other than before once the level or the number of threads was changed: what depends on them must be worked out anew.
Cheaper to look at than both."""


def _changed() -> None:
    global changes
    changes += 1


@cache
def _check_environment() -> None:
    """Raises for settings that the C++ side, which can't report them, would pass over."""
    level, levels = os.environ.get("TILEFUSE_CPU_LEVEL"), _core.cpu_levels()
    if level and level not in levels:
        raise DeviceError(
            f"TILEFUSE_CPU_LEVEL is {level!r}: this CPU has {', '.join(levels)}; set one of these or none"
        )
    threads = os.environ.get("TILEFUSE_NUM_THREADS")
    if threads and not (threads.isdecimal() and 1 <= int(threads) <= MAX_THREADS):
        raise DeviceError(f"TILEFUSE_NUM_THREADS is {threads!r}: set 1 to {MAX_THREADS}, or nothing")


def _native_of(layer: PackedLinear) -> tuple[Any, int, int, int]:
    """(layout, data, perm, bias) for C++; made once a layer, kept in its __dict__."""
    state = layer.__dict__.get("_cpu_native")
    if state is None:
        _check_environment()
        state = (
            native_layout(layer.layout),
            layer.data.ctypes.data,
            0 if layer.perm is None else layer.perm.ctypes.data,
            0 if layer.bias is None else layer.bias.ctypes.data,
        )
        layer.__dict__["_cpu_native"] = state
        layer.__dict__["_cpu_direct"] = _core.CpuLayer(state[0], state[1], state[2], state[3])
    return state


def native_call(layer: PackedLinear) -> Any:
    """The layer as C++ holds it, `_core.CpuLayer`; it must not outlive the layer."""
    _native_of(layer)
    return layer.__dict__["_cpu_direct"]


class CpuDevice:
    """Multiplies on the CPU at the best instruction set it has; multi-threaded, without the GIL.

    Attributes:
        direct: Whether every call would come here with no decision left, so that the caller may take the short way by
            the layer's `_core.CpuLayer`, kept in its __dict__ from the first call on.
    """

    name = "cpu"
    direct = True

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        layout, data, perm, bias = _native_of(layer)
        rows = x.shape[0] if len(x.shape) == 2 else 1
        _core.matmul(
            layout, data, x.address, int(x.kind), x.row_stride, rows, perm, bias, y.address, int(y.kind), y.row_stride
        )

    def matmul_int8(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        """As `matmul`, with activations quantised to 8 bits (docs/numerics.md)."""
        layout, data, perm, bias = _native_of(layer)
        rows = x.shape[0] if len(x.shape) == 2 else 1
        _core.matmul_int8(
            layout, data, x.address, int(x.kind), x.row_stride, rows, perm, bias, y.address, int(y.kind), y.row_stride
        )


def cpu_levels() -> list[str]:
    """Instruction-set levels that this CPU can run, best last.

    "avx512_bf16_model", where present, is first: it runs the AVX512_BF16 kernels with that extension's instructions
    modelled, for tests on CPUs that lack it, and is never chosen unless named.
    """
    return list(_core.cpu_levels())


def cpu_level() -> str:
    """The level in force: TILEFUSE_CPU_LEVEL, else the best.

    Raises:
        DeviceError: TILEFUSE_CPU_LEVEL or TILEFUSE_NUM_THREADS has no value that can be taken.
    """
    _check_environment()
    return str(_core.cpu_level())


@contextmanager
def force_cpu_level(name: str) -> Iterator[None]:
    """Runs the CPU kernels at another level within the block; for the whole process.

    Raises:
        DeviceError: This CPU can't run that level.
    """
    if name not in _core.cpu_levels():
        raise DeviceError(f"CPU level {name!r}: this CPU has {', '.join(_core.cpu_levels())}")
    before = _core.cpu_level()
    _core.set_cpu_level(name)
    _changed()
    try:
        yield
    finally:
        _core.set_cpu_level(before)
        _changed()


def get_num_threads() -> int:
    """Threads that a call may use: TILEFUSE_NUM_THREADS, else OMP_NUM_THREADS, else the CPUs of this process."""
    return int(_core.num_threads())


def set_num_threads(n: int) -> None:
    """Sets the number of threads, 1 to 256, from the next call on.

    Raises:
        DeviceError: ``n`` is outside that range.
    """
    if not isinstance(n, Integral) or not 1 <= n <= MAX_THREADS:
        raise DeviceError(f"num_threads = {n!r}: pass 1 to {MAX_THREADS}")
    _core.set_num_threads(n)
    _changed()
