"""IRON's names, to run designs on the emulated array: pass this module where a design takes the namespace.

>>> from tilefuse.emulator import iron
>>> program = design(iron, plan)                 # the same function that builds the program for the chip
>>> configuration = iron.load(program)           # lays it out; refuses what the array does not have
>>> report = configuration.run(program, a, b, c) # runs it on real bytes; drains write c

The names and arguments are those of mlir-aie 1.4. An argument whose effect is not modelled is refused unless it has its
default. `load`, `Configuration` and `PythonKernel` are the emulator's own.
"""

from __future__ import annotations

try:
    import greenlet as _greenlet  # noqa: F401
except ImportError as error:
    raise ImportError("the array emulator runs workers as greenlets: `pip install greenlet`") from error
from tilefuse.emulator.array import Design
from tilefuse.emulator.binding import PythonKernel
from tilefuse.emulator.configuration import Configuration, load
from tilefuse.emulator.fifo import ObjectFifo, ObjectFifoHandle, ObjectFifoLink
from tilefuse.emulator.program import Buffer, Kernel, Program, Runtime, Worker, WorkerRuntimeBarrier, range_
from tilefuse.emulator.sequence import RuntimeData, TaskGroup
from tilefuse.emulator.taps import TensorAccessPattern
from tilefuse.emulator.tile import AnyComputeTile, AnyMemTile, AnyShimTile, Device, Tile, device
from tilefuse.emulator.timing import Report

__all__ = [
    "AnyComputeTile",
    "AnyMemTile",
    "AnyShimTile",
    "Buffer",
    "Configuration",
    "Design",
    "Device",
    "Kernel",
    "ObjectFifo",
    "ObjectFifoHandle",
    "ObjectFifoLink",
    "Program",
    "PythonKernel",
    "Report",
    "Runtime",
    "RuntimeData",
    "TaskGroup",
    "TensorAccessPattern",
    "Tile",
    "Worker",
    "WorkerRuntimeBarrier",
    "device",
    "load",
    "range_",
]
