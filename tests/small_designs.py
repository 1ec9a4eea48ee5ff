"""Small designs for the tests of the array emulator, and Python functions in the place of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.emulator import iron
from tilefuse.emulator.iron import Buffer, Kernel, ObjectFifo, Program, PythonKernel, Runtime, TaskGroup, Tile, Worker

Array = npt.NDArray[Any]
SHIM, MEM, CORE = 0, 1, 2
"""Rows; `CORE` is the lowest row of cores."""


def words(n: int) -> Any:
    """The type of ``n`` 32-bit integers."""
    return np.ndarray[(n,), np.dtype[np.int32]]


def typed(dtype: Any, *shape: int) -> Any:
    """The type of an array."""
    return np.ndarray[shape, np.dtype[dtype]]


def count(n: int) -> Array:
    """0, 1, ... as int32."""
    return np.arange(n, dtype=np.int32)


def copy_kernel(n: int, name: str = "copy") -> Kernel:
    """(source, destination), ``n`` words each."""
    return Kernel(name, f"{name}.o", [words(n), words(n)])


def _copy(source: Array, destination: Array) -> None:
    destination[...] = source


def _add(a: Array, b: Array, out: Array) -> None:
    out[...] = a + b


KERNELS = {
    "copy": PythonKernel(_copy, 100, writes=(1,)),
    "add": PythonKernel(_add, 50, writes=(2,)),
}


def copy_core(x: Any, y: Any, kernel: Any) -> None:
    """Copies an object."""
    source, target = x.acquire(1), y.acquire(1)
    kernel(source, target)
    x.release(1)
    y.release(1)


def linear_sequence(a: Any, b: Any, source: Any, drain: Any) -> None:
    """Fills with all of ``a`` and drains all of ``b``."""
    group = TaskGroup()
    source.fill(a, group=group)
    drain.drain(b, wait=True, group=group)
    group.finish()


def copy_design(
    total: int = 1024,
    *,
    object_words: int = 64,
    l2_words: int = 256,
    depth: int = 2,
    l2_depth: int = 2,
    core: Callable[..., None] = copy_core,
    sequence: Callable[..., None] = linear_sequence,
    send: Any = None,
    receive: Any = None,
    l1_receive: Any = None,
    l1_send: Any = None,
    extra: tuple[Any, ...] = (),
    **worker: Any,
) -> Program:
    """shim -> memory tile -> core -> shim, ``total`` words, copied by the core object by object.

    ``send`` and ``receive`` are the stream dimensions of the memory tile, ``l1_receive`` and ``l1_send`` the core's.
    """
    a = ObjectFifo(words(l2_words), depth=l2_depth, name="a")
    a_core = a.cons(dims_from_stream=receive).forward(
        tile=Tile(0, MEM), obj_type=words(object_words), depth=depth, name="a_core", dims_to_stream=send
    )
    c = ObjectFifo(words(object_words), depth=depth, name="c", dims_to_stream=l1_send)
    ends = [a_core.cons(dims_from_stream=l1_receive), c.prod(), copy_kernel(object_words), *extra]
    workers = [Worker(core, ends, tile=Tile(0, CORE), **worker)]
    shim = Tile(0, SHIM)
    runtime = Runtime(sequence, [words(total), words(total), a.prod(tile=shim), c.cons(tile=shim)])
    return Program(iron.device(1), runtime, workers)


def run(program: Program, *arrays: Array | None, **options: Any) -> iron.Report:
    """Loads and runs a program once."""
    return iron.load(program, KERNELS).run(program, *arrays, **options)


def buffer(n: int, name: str | None = None) -> Buffer:
    """``n`` words of a core's memory."""
    return Buffer(words(n), name=name)
