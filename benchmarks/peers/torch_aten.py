"""torch's own: the 4-bit and 8-bit weight-only operators, and dense bfloat16 with weights reordered by oneDNN."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from peers.base import MANY_ROWS, Adapter, Array, Bound, Contender, Product, copies_beyond_cache
from peers.weights import Case, Codes

INT4 = Contender("torch int4pack", "W4 g128, zero points", 4, 16, note="aten._weight_int4pack_mm_for_cpu")
INT8 = Contender("torch int8pack", "W8, symmetric, a scale an output channel", 8, 16, note="aten._weight_int8pack_mm")
DENSE = Contender("torch bf16", "dense bfloat16", 16, 16, note="linear on weights that oneDNN has reordered")


def set_threads() -> None:
    """As many as OMP_NUM_THREADS says."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def bf16(array: Array) -> Any:
    """As a bfloat16 tensor."""
    return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(torch.bfloat16)


def float64(tensor: Any) -> Array:
    """As a float64 array."""
    array: Array = tensor.detach().to(torch.float32).numpy().astype(np.float64)
    return array


class Operator(Product):
    """A torch operator on copies of its weights; each call is one product.

    Args:
        product: From x and a copy's operands to y.
        operands: Makes those of copy i.
        nbytes: Of weights that one product reads.
        cache_bytes: Of the cache that the copies exceed.
        dequantized: See `Product.dequantized`.
    """

    def __init__(
        self,
        product: Callable[..., Any],
        operands: Callable[[int], Sequence[Any]],
        nbytes: int,
        cache_bytes: int,
        dequantized: Callable[[Array], Array],
    ) -> None:
        self.weight_bytes = nbytes
        self._product = product
        self._copies = [operands(copy) for copy in range(copies_beyond_cache(nbytes, cache_bytes))]
        self._dequantized = dequantized

    def inputs(self, x: Array) -> Any:
        """x as the operator takes it."""
        return bf16(x)

    def bind(self, x: Array) -> Bound:
        tensor = self.inputs(x)
        product = self._product

        def call_of(operands: Sequence[Any]) -> Callable[[], object]:
            return lambda: product(tensor, *operands)

        calls = [call_of(copy) for copy in self._copies[: 2 if len(x) >= MANY_ROWS else None]]
        return Bound(calls, lambda: float64(calls[0]()))

    def dequantized(self, channels: Array) -> Array:
        return self._dequantized(channels)


def int4pack(codes: Codes, cache_bytes: int) -> Product:
    """(q - z) s, held as (q - 8) s + b, with b rounded to bfloat16."""

    def shifts(part: Codes) -> Array:
        found: Array = (8.0 - part.zeros.astype(np.float32)) * part.scales
        return found

    def operands(copy: int) -> list[Any]:
        part = codes.rolled(copy)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(part.codes.astype(np.int32)), 1)
        grids = torch.stack([bf16(part.scales.T), bf16(shifts(part).T)], dim=2)
        return [packed, grids]

    def dequantized(channels: Array) -> Array:
        part = Codes(4, codes.group, codes.codes[channels], codes.scales[channels], codes.zeros[channels])
        centred = (part.codes.astype(np.float64) - 8).reshape(len(channels), -1, codes.group)
        found = centred * part.scales[:, :, None] + float64(bf16(shifts(part)))[:, :, None]
        whole: Array = found.reshape(len(channels), -1)
        return whole

    group = codes.group
    return Operator(
        lambda x, packed, grids: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, grids),
        operands,
        codes.n * codes.k // 2 + codes.scales.size * 4,
        cache_bytes,
        dequantized,
    )


def int8pack(codes: Codes, cache_bytes: int) -> Product:
    """One scale an output channel."""

    def operands(copy: int) -> list[Any]:
        part = codes.rolled(copy)
        return [torch.from_numpy((part.codes ^ 0x80).view(np.int8)), bf16(part.scales[:, 0])]

    return Operator(
        torch.ops.aten._weight_int8pack_mm,
        operands,
        codes.n * codes.k + codes.n * 2,
        cache_bytes,
        lambda channels: codes.dequantized(channels).astype(np.float64),
    )


def dense(codes: Codes, cache_bytes: int) -> Product:
    """The weights that the codes stand for, rounded to bfloat16."""

    def operands(copy: int) -> list[Any]:
        weights = bf16(codes.rolled(copy).dequantized())
        return [torch.ops.mkldnn._reorder_linear_weight(weights, None)]

    return Operator(
        lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""),
        operands,
        codes.n * codes.k * 2,
        cache_bytes,
        lambda channels: float64(bf16(codes.dequantized(channels))),
    )


class Torch(Adapter):
    """What torch brings for CPUs."""

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def contenders(self) -> list[Contender]:
        return [INT4, INT8, DENSE]

    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        if contender == INT4:
            return int4pack(case.schemes["w4g128"], cache_bytes)
        if contender == INT8:
            return int8pack(case.schemes["w8"], cache_bytes)
        return dense(case.schemes["w4g128"], cache_bytes)


def adapter() -> Adapter:
    """The adapter of this module."""
    set_threads()
    torch.set_grad_enabled(False)
    return Torch()
