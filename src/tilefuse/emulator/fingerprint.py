"""What two programs must share so that one configuration of the array runs both: all but the run-time sequence."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilefuse.emulator.array import Design
from tilefuse.emulator.fifo import ObjectFifo, ObjectFifoHandle, ObjectFifoLink, RuntimeEndpoint
from tilefuse.emulator.program import Buffer, Kernel, Worker, WorkerRuntimeBarrier


class Fingerprint:
    """A design's static part as flat (path, value) pairs. Names that nobody gave are replaced by numbers."""

    def __init__(self, design: Design) -> None:
        self._names: dict[int, str] = {}
        self._inside: list[types.FunctionType] = []
        """Functions that are being looked at: one may refer to another that refers to it."""
        self.values: dict[str, Any] = {"device": str(design.device)}
        unnamed = (fifo for fifo in design.fifos.values() if not fifo.is_named)
        for i, fifo in enumerate(unnamed):
            self._names[id(fifo)] = f"fifo #{i}"
        for fifo in design.fifos.values():
            self._add_fifo(fifo)
        for place, worker in sorted(design.cores.items()):
            self._add_worker(f"worker on core {place}", worker)

    def fifo_name(self, fifo: ObjectFifo) -> str:
        """The name that counts."""
        return self._names.get(id(fifo), fifo.name)

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs, in words."""
        missing = object()
        found = []
        for path in sorted(self.values.keys() | other.values.keys()):
            mine, theirs = self.values.get(path, missing), other.values.get(path, missing)
            if mine is missing or theirs is missing:
                found.append(f"{path}: only in the {'new' if mine is missing else 'loaded'} one")
            elif mine != theirs:
                found.append(f"{path}: {_short(mine)} loaded, {_short(theirs)} new")
        return found

    def _add_fifo(self, fifo: ObjectFifo) -> None:
        name = f"fifo '{self.fifo_name(fifo)}'"
        producer = fifo.producer
        assert producer is not None
        self.values[f"{name} objects"] = str(fifo.array_type)
        self.values[f"{name} dims_to_stream"] = _plain(fifo.dims_to_stream)
        self.values[f"{name} via_DMA"] = fifo.via_dma
        self._add_end(f"{name} producer", producer)
        for i, consumer in enumerate(fifo.consumers):
            self._add_end(f"{name} consumer {i}", consumer)
            self.values[f"{name} consumer {i} dims_from_stream"] = _plain(consumer.dims_from_stream)

    def _add_end(self, path: str, handle: ObjectFifoHandle) -> None:
        endpoint = handle.endpoint
        self.values[f"{path} depth"] = handle.depth
        self.values[f"{path} channel"] = handle.channel
        assert endpoint is not None
        kind = "host" if isinstance(endpoint, RuntimeEndpoint) else type(endpoint).__name__
        self.values[f"{path} at"] = (kind, endpoint.tile.col, endpoint.tile.row)
        if isinstance(endpoint, ObjectFifoLink):
            linked = [*endpoint.sources, *endpoint.destinations]
            self.values[f"{path} link"] = ([self.fifo_name(h.fifo) for h in linked], endpoint.offsets)

    def _add_worker(self, path: str, worker: Worker) -> None:
        self.values[f"{path} while_true"] = worker.while_true
        self.values[f"{path} stack_size"] = worker.stack_size
        self.values[f"{path} dynamic_objfifo_lowering"] = worker.dynamic_objfifo_lowering
        for i, argument in enumerate(worker.fn_args):
            self._add_value(f"{path} argument {i}", argument)
        self._add_code(f"{path} function", worker.core_fn)

    def _add_code(self, path: str, function: Any) -> None:
        if not isinstance(function, types.FunctionType):
            self.values[path] = function
            return
        if function in self._inside:
            return
        self._inside.append(function)
        self.values[f"{path} code"] = _code(function.__code__)
        for i, default in enumerate(function.__defaults__ or ()):
            self._add_value(f"{path} default {i}", default)
        for name, default in (function.__kwdefaults__ or {}).items():
            self._add_value(f"{path} default of {name}", default)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # A function that refers to itself before it is bound.
                continue
            self._add_value(f"{path} captured '{name}'", value)
        self._inside.pop()

    def _add_value(self, path: str, value: Any) -> None:
        """What an argument or a captured variable means to a core's program."""
        if isinstance(value, list | tuple):
            self.values[f"{path} length"] = len(value)
            for i, item in enumerate(value):
                self._add_value(f"{path}[{i}]", item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._add_value(f"{path}[{key!r}]", item)
        elif isinstance(value, ObjectFifoHandle):
            self.values[path] = (self.fifo_name(value.fifo), value.handle_type)
        elif isinstance(value, ObjectFifo):
            self.values[path] = self.fifo_name(value)
        elif isinstance(value, Buffer):
            initial = None if value.initial_value is None else value.initial_value.tobytes()
            self.values[path] = ("buffer", value.name if value.is_named else None, str(value.array_type), initial)
        elif isinstance(value, Kernel):
            self.values[path] = ("kernel", value.name, value.object_file_name, [str(t) for t in value.types])
        elif isinstance(value, WorkerRuntimeBarrier):
            self.values[path] = ("barrier", value.initial_value)
        elif isinstance(value, np.ndarray):
            self.values[path] = (str(value.dtype), value.shape, value.tobytes())
        elif isinstance(value, types.FunctionType):
            self._add_code(path, value)
        else:
            self.values[path] = value


def _plain(dims: Any) -> Any:
    return [tuple(dim) for dim in dims] if dims else None


def _code(code: types.CodeType) -> Any:
    """What a function does, without where it stands."""
    constants = [_code(c) if isinstance(c, types.CodeType) else (type(c).__name__, c) for c in code.co_consts]
    return (code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
