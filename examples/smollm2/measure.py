"""Calling tilefuse for every linear layer of a model, timing the calls, checking them against the reference."""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ml_dtypes import bfloat16

import tilefuse as tf
from smollm2.llama import Floats
from tilefuse.testing import GemmError, gemm_error

REFERENCE_COLUMNS = 4096
"""Output channels that the reference takes at a time, which bounds its memory for the 49152 of the vocabulary."""

CHECK_EVERY = 8
"""Of the rows of a `gemm` one in so many is compared, the last one among them: products in float64 are slow."""


def kind_of(name: str) -> str:
    """``"q"`` for ``model.layers.0.self_attn.q_proj``, and so on; ``"lm_head"`` stays itself."""
    return name.rsplit(".", 1)[-1].removesuffix("_proj")


def bytes_read(layer: tf.PackedLinear) -> int:
    """Packed bytes that one pass over the layer has to read: those of the tiles that hold real weights."""
    layout = layer.layout
    return layout.k_tiles_used * layout.n_tiles_used * layout.tile_bytes


@dataclass
class Calls:
    """Calls of one kind of layer."""

    seconds: float = 0.0
    flops: int = 0
    nbytes: int = 0

    @property
    def gflops(self) -> float:
        """GFLOP/s, a multiplication and an addition counted as two."""
        return self.flops / self.seconds / 1e9

    @property
    def gbytes(self) -> float:
        """GB/s of packed weights."""
        return self.nbytes / self.seconds / 1e9

    def __add__(self, other: Calls) -> Calls:
        return Calls(self.seconds + other.seconds, self.flops + other.flops, self.nbytes + other.nbytes)


def total(calls: Iterable[Calls]) -> Calls:
    """All of them as one."""
    return sum(calls, Calls())


@dataclass
class Packed:
    """The linear layers of a model as tilefuse runs them; an instance is the ``linear`` of a `llama.Llama`.

    A single row goes to `tilefuse.gemv` (decode), several go to `tilefuse.gemm` (prefill).
    """

    layers: dict[str, tf.PackedLinear]
    prefill: dict[str, Calls] = field(default_factory=lambda: defaultdict(Calls))
    decode: dict[str, Calls] = field(default_factory=lambda: defaultdict(Calls))

    def __call__(self, name: str, x: Floats) -> Floats:
        layer = self.layers[name]
        start = time.perf_counter()
        y: Floats = tf.gemv(x[0], layer)[None] if len(x) == 1 else tf.gemm(x, layer)
        seconds = time.perf_counter() - start
        calls = self.decode if len(x) == 1 else self.prefill
        calls[kind_of(name)] += Calls(seconds, 2 * len(x) * layer.k * layer.n, bytes_read(layer))
        return y


@dataclass
class Errors:
    """Errors of one kind of layer, ``|y - ref| / (|x| @ |W|)``: a measure that cancelling sums don't inflate."""

    max: float = 0.0
    bound: float = 0.0
    _sum: float = 0.0
    _count: int = 0

    @property
    def mean(self) -> float:
        return self._sum / self._count

    def add(self, error: GemmError, count: int) -> None:
        self.max, self.bound = max(self.max, error.max), max(self.bound, error.bound)
        self._sum += error.mean * count
        self._count += count


class GateFailure(AssertionError):
    """A result is further from the reference than the numerics contract allows."""


def reference_weight(q: tf.QuantizedLinear) -> Floats:
    """W [K, N] by the numerics contract, from the checkpoint's own layer rather than from the packed one.

    Scales and minima are rounded to bfloat16, as packing does once; the weights are rounded by `gemm_error`.
    """
    narrow = dataclasses.replace(
        q,
        scales=q.scales.astype(bfloat16),
        mins=None if q.mins is None else q.mins.astype(bfloat16),
    )
    return narrow.dequantize()


@dataclass
class Checked:
    """Runs a `Packed` and compares the results with the reference: rows of `gemm`, and of the last one also `gemv`.

    Raises:
        GateFailure: From a call; names the layer, the error and the bound.
    """

    packed: Packed
    source: Callable[[str], tf.QuantizedLinear]
    gemm: dict[str, Errors] = field(default_factory=lambda: defaultdict(Errors))
    gemv: dict[str, Errors] = field(default_factory=lambda: defaultdict(Errors))

    def __call__(self, name: str, x: Floats) -> Floats:
        y, last = self.packed(name, x), self.packed(name, x[-1:])
        weight = reference_weight(self.source(name))
        rows = slice((len(x) - 1) % CHECK_EVERY, None, CHECK_EVERY)
        for start in range(0, weight.shape[1], REFERENCE_COLUMNS):
            part = slice(start, start + REFERENCE_COLUMNS)
            self._compare(self.gemm, name, y[rows, part], x[rows], weight[:, part])
            self._compare(self.gemv, name, last[:, part], x[-1:], weight[:, part])
        return y

    def _compare(self, errors: dict[str, Errors], name: str, y: Floats, x: Floats, weight: Floats) -> None:
        error = gemm_error(y, x, weight)
        if not error.ok:
            raise GateFailure(f"{name}, {len(x)} rows compared: {error}")
        errors[kind_of(name)].add(error, y.size)
