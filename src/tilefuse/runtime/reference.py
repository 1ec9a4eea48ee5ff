"""The reference device: float64 on the dequantised weights. Slow, and right by inspection."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.arrays import BFLOAT16, FloatArray
from tilefuse.packed import PackedLinear, unpack


def quantize_activations(x: npt.NDArray[Any], group: int) -> npt.NDArray[np.float64]:
    """What ``compute="int8"`` makes of x [M, K], already permuted: 8-bit integers times a scale for each row and group.

    In a group, s = max|x| / 127, rounded to float32, and each x becomes the integer next to x times 127 / max|x|, where
    that quotient and product are rounded to float32 (both taken of 2^64 x where max|x| is below 2^-60). A group with a
    NaN or Inf becomes NaN.

    Returns:
        [M, K], exact.
    """
    m, k = x.shape
    groups = np.pad(x.astype(np.float32), ((0, 0), (0, -k % group))).reshape(m, -1, group)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
        largest = np.abs(groups).max(axis=-1, keepdims=True)
        up = np.where(largest < 2.0**-60, 2.0**64, 1.0).astype(np.float32)
        inverse = np.where(largest == 0, np.float32(0), np.float32(127) / (largest * up))
        codes = np.rint(groups * up * inverse).astype(np.float64)
        scales = np.where(np.isfinite(largest), largest / np.float32(127), np.nan)
    quantized: npt.NDArray[np.float64] = (codes * scales).reshape(m, -1)[:, :k]
    return quantized


class ReferenceDevice:
    """``y = bf16(x) @ bf16(W)`` in float64, rounded once: what every other device is measured against."""

    name = "reference"

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = x.numpy().astype(BFLOAT16).astype(np.float64)
            product = rounded @ layer.dequantize().astype(np.float64)
            if layer.bias is not None:
                product = product + layer.bias
            target = y.numpy()
            target[...] = product.astype(target.dtype)

    def matmul_int8(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        """As `matmul`, with activations quantised to 8 bits and weights as they are, not rounded to bfloat16."""
        parts = unpack(layer)
        group = np.arange(layer.k) // parts.group
        weights = parts.codes_kn().astype(np.float64)
        if parts.zeros is not None:
            weights -= parts.zeros[group]
        weights *= parts.scales.astype(np.float64)[group]
        if parts.mins is not None:
            weights += parts.mins.astype(np.float64)[group]
        rows = x.numpy().reshape(-1, layer.k)
        with np.errstate(over="ignore", invalid="ignore"):
            permuted = rows if layer.perm is None else rows[:, layer.perm]
            product = quantize_activations(permuted, layer.layout.tile_group) @ weights
            if layer.bias is not None:
                product = product + layer.bias
            target = y.numpy()
            target[...] = product.reshape(target.shape).astype(target.dtype)
