"""tilefuse: `tf.gemv` for one row, `tf.gemm` for more, bfloat16 in and out, each copy packed on its own."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import tilefuse as tf
from peers.base import Adapter, Array, Bound, Contender, Product, copies_beyond_cache
from peers.weights import Case, Codes
from tilefuse.runtime import cpu_level

SCHEMES = {"W4 g128": "w4g128", "W4 g32": "w4g32", "W8 g128": "w8g128"}


def to_layer(codes: Codes) -> tf.PackedLinear:
    """Packs codes as a checkpoint's."""
    return tf.pack(
        tf.QuantizedLinear(
            name=f"{codes.k}x{codes.n}",
            format="benchmark",
            k=codes.k,
            n=codes.n,
            bits=codes.bits,
            group=codes.group,
            codes=np.ascontiguousarray(codes.codes.T),
            order=tf.CodeOrder.KN,
            scales=np.ascontiguousarray(codes.scales.T).astype(ml_dtypes.bfloat16),
            zeros=np.ascontiguousarray(codes.zeros.T),
            symmetric=codes.bits == 8,
        )
    )


class Packed(Product):
    """Packed layers of the same size, and the options that they are called with."""

    def __init__(self, codes: Codes, cache_bytes: int, options: dict[str, Any]) -> None:
        first = to_layer(codes)
        layout = first.layout
        # The CPU reads no padding tiles.
        self.weight_bytes = layout.k_tiles_used * layout.n_tiles_used * layout.tile_bytes
        self._options = options
        self._layers = [first]
        for copy in range(1, copies_beyond_cache(self.weight_bytes, cache_bytes)):
            self._layers.append(to_layer(codes.rolled(copy)))

    def bind(self, x: Array) -> Bound:
        short = x.astype(ml_dtypes.bfloat16)
        one = len(x) == 1
        activations: Any = short[0] if one else short
        product = tf.gemv if one else tf.gemm

        def call_of(layer: tf.PackedLinear) -> Callable[[], object]:
            return lambda: product(activations, layer, **self._options)

        calls = [call_of(layer) for layer in self._layers]
        return Bound(calls, lambda: np.atleast_2d(np.asarray(calls[0]())).astype(np.float64))

    def dequantized(self, channels: Array) -> Array:
        return self._layers[0].dequantize().T[channels].astype(np.float64)


class Tilefuse(Adapter):
    """At the level that TILEFUSE_CPU_LEVEL names, or the best."""

    def versions(self) -> dict[str, str]:
        return {"tilefuse": f"{importlib.metadata.version('tilefuse')} ({cpu_level()})"}

    def contenders(self) -> list[Contender]:
        level = os.environ.get("TILEFUSE_CPU_LEVEL", "")
        if level:
            return [Contender(f"tilefuse W4 g128 {level}", "W4 g128, zero points", 4, 16, level, ours=True)]
        sorts = {"W4": "zero points", "W8": "symmetric"}
        found = [
            Contender(f"tilefuse {name}", f"{name}, {sorts[name[:2]]}", int(name[1]), 16, ours=True) for name in SCHEMES
        ]
        found += [
            Contender(
                f"tilefuse {name} int8", f"{name}, {sorts[name[:2]]}", int(name[1]), 8, ours=True, note='compute="int8"'
            )
            for name in ("W4 g128", "W8 g128")
        ]
        return found

    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        scheme = next(key for name, key in SCHEMES.items() if name in contender.name)
        options = {"compute": "int8"} if contender.activations == 8 else {}
        return Packed(case.schemes[scheme], cache_bytes, options)


def adapter() -> Adapter:
    """The adapter of this module."""
    return Tilefuse()
