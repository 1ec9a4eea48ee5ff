"""Operands of attention on the array, byte for byte as kernels/aie/attention_layout.h says.

Products of bfloat16 run on the array's bfp16 multiplier, as high and low parts: `split_bfp16`. An operand is 72 bytes,
8 rows of an exponent and 8 mantissas.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

ROWS = 32
"""Query rows of a core."""

KEYS = 64
"""Keys of a tile."""

OPERAND = 72
"""Bytes of 64 values in bfp16."""


def to_bfp16(x: Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
    """``x`` [..., 8 n], finite, as bfp16: mantissas [..., 8 n] and exponents [..., n], a value being
    ``mantissa * 2**(exponent - 127) / 64``.

    The exponent is that of the largest of 8, one more where that would round up to 128; rounded to nearest, ties to
    even, as a core's conversion does. fp32 denormals count as zero.
    """
    blocks = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 8)
    fields = (blocks.view(np.uint32) >> 23 & 0xFF).astype(np.int32)
    exponents = fields.max(axis=-1)
    exact = np.where(fields == 0, 0.0, blocks.astype(np.float64))
    mantissas = np.rint(np.ldexp(exact, (133 - exponents)[..., None]))
    exponents = exponents + ((mantissas > 127) | (mantissas < -128)).any(axis=-1)
    mantissas = np.rint(np.ldexp(exact, (133 - exponents)[..., None]))
    return mantissas.astype(np.int8).reshape(x.shape), exponents.astype(np.uint8)


def from_bfp16(mantissas: npt.NDArray[np.int8], exponents: npt.NDArray[np.uint8]) -> Float32:
    """The values of `to_bfp16`'s result."""
    blocks = mantissas.reshape(*exponents.shape, 8).astype(np.float32)
    return np.ldexp(blocks, exponents.astype(np.int32)[..., None] - 133).reshape(mantissas.shape)


Parts = tuple[npt.NDArray[np.int8], npt.NDArray[np.uint8]]


def split_bfp16(x: Array) -> tuple[Parts, Parts]:
    """``x`` [..., 8 n] as the sum of two bfp16 arrays, high and low, each mantissas and exponents."""
    x = np.asarray(x, np.float32)
    high = to_bfp16(x)
    return high, to_bfp16(x - from_bfp16(*high))


def operands(parts: Parts) -> Bytes:
    """bfp16 [..., 8 m, 8 k] as operands, uint8 [..., m, k, 72]."""
    mantissas, exponents = parts
    *batch, rows, columns = mantissas.shape
    out = np.empty((*batch, rows // 8, columns // 8, 8, 9), np.uint8)
    tiled = mantissas.view(np.uint8).reshape(*batch, rows // 8, 8, columns // 8, 8)
    out[..., 1:] = np.swapaxes(tiled, -3, -2)
    out[..., 0] = np.swapaxes(exponents.reshape(*batch, rows // 8, 8, columns // 8), -2, -1)
    return out.reshape(*batch, rows // 8, columns // 8, OPERAND)


def _flat(x: Array, axes: int) -> Bytes:
    return np.ascontiguousarray(x).reshape(*x.shape[: x.ndim - axes], -1)


def query_codes(codes: npt.NDArray[np.int8]) -> Bytes:
    """int8 [..., 32, d] -> uint8 [..., 32 d]."""
    *batch, rows, d = codes.shape
    blocks = codes.view(np.uint8).reshape(*batch, rows // 8, 8, d // 8, 8)
    return _flat(np.moveaxis(blocks, -2, -4), 4)


def query_rest(q: Array, codes: npt.NDArray[np.int8], scales: Float32) -> Bytes:
    """What INT8 leaves of the queries: bfloat16-rounded q [..., 32, d], its codes and scales [..., 32] -> uint8
    [..., 36 d]."""
    rest = q.astype(np.float64) / scales[..., None].astype(np.float64) - codes
    return _flat(np.swapaxes(operands(to_bfp16(rest.astype(np.float32))), -3, -2), 3)


def int8_keys(codes: npt.NDArray[np.int8], means: Array) -> Bytes:
    """int8 [..., 64, d] and bfloat16 means [..., d] -> uint8 [..., 72 d]."""
    *batch, keys, d = codes.shape
    out = np.zeros((*batch, 72 * d), np.uint8)
    blocks = codes.view(np.uint8).reshape(*batch, keys // 8, 8, d // 8, 8)
    out[..., : keys * d] = _flat(np.moveaxis(blocks, -3, -1), 4)
    parts = np.zeros((*batch, d // 64, 4, 8, 8), np.uint8)
    diagonal = np.arange(8)
    for i, (mantissas, exponents) in enumerate(split_bfp16(means.astype(np.float32))):
        parts[..., i, :, :] = mantissas.view(np.uint8).reshape(*batch, d // 64, 8, 8)
        parts[..., 2 + i, diagonal, diagonal] = exponents.reshape(*batch, d // 64, 8)
    out[..., keys * d : keys * d + 4 * d] = parts.reshape(*batch, 4 * d)
    return out


def wide_keys(k: Array) -> Bytes:
    """bfloat16-rounded keys [..., 64, d] -> their two objects, uint8 [..., 2, 72 d]."""
    high, low = (operands(part) for part in split_bfp16(k))
    *batch, blocks, channels, _ = high.shape
    both = np.stack([high, low], axis=-2)
    return _flat(both.reshape(*batch, 2, blocks // 2, channels, 2, OPERAND), 4)


def values(v: Array) -> Bytes:
    """bfloat16-rounded values [..., 64, d] -> their two objects, uint8 [..., 2, 72 d]."""
    high, low = (operands(part) for part in split_bfp16(np.swapaxes(v, -1, -2)))
    *batch, channels, keys, _ = high.shape
    both = np.stack([high, low], axis=-2).reshape(*batch, 2, channels // 8, 4, keys, 2, OPERAND)
    return _flat(np.swapaxes(both, -4, -3), 5)


def results(y: Bytes, d: int) -> tuple[Array, Float32, Float32]:
    """A core's results, uint8 [..., 16 d + 64]: bfloat16 outputs [..., 8, d], maxima (base 2) and sums [..., 8]."""
    *batch, _ = y.shape
    blocks = np.ascontiguousarray(y[..., : 16 * d]).view(ml_dtypes.bfloat16).reshape(*batch, d // 8, 8, 8)
    state = np.ascontiguousarray(y[..., 16 * d : 16 * d + 64]).view(np.float32).reshape(*batch, 2, 8)
    return np.swapaxes(blocks, -3, -2).reshape(*batch, 8, d), state[..., 0, :], state[..., 1, :]


def lse(maxima: Float32, sums: Float32) -> Float32:
    """Natural log-sum-exp of rows from `results`; -inf for a row without keys."""
    with np.errstate(divide="ignore"):
        found = (maxima + np.log2(sums)) / np.float32(np.log2(np.e))
    return np.where(sums > 0, found, np.float32(-np.inf)).astype(np.float32)
