"""The reference device: float64 on the dequantised weights. Slow, and right by inspection."""

from __future__ import annotations

import numpy as np

from tilefuse.arrays import BFLOAT16, FloatArray
from tilefuse.packed import PackedLinear


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
