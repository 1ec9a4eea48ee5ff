"""What the AIE2P GEMM kernels should compute, in NumPy, written from the formats' definitions.

`operands` is the bfp16 conversion, integer by integer; the `*_scratch` functions are what ``prepare`` leaves in each
path; `error_bound` is how far a kernel may be from the float64 product, element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import tilefuse as tf
from tilefuse.layout import KT, NT

F64 = npt.NDArray[np.float64]

BF16_ROUNDOFF = 2.0**-8
FP32_ROUNDOFF = 2.0**-24
SPLIT = 127.0**-2
"""What two operands leave of a value, as a fraction of the largest of the 8 that share its exponent: each rounds to
half a unit, and the largest is at least 63.5 units (64 and, if rounding to 128 moved the exponent, 127.5 / 2)."""
SMALLEST_NORMAL = 2.0**-126
LEAST_EXACT_SCALE = 2.0**-119
"""Smaller scales lose their last bit, and denormal ones all bits, in the scales' matrix."""


def operands(values: F64) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """[..., 8] -> mantissas [..., 8] and biased exponents [...]; nearest, ties to even."""
    magnitude = np.where(np.abs(values) < SMALLEST_NORMAL, 0.0, np.abs(values))
    largest = magnitude.max(axis=-1)
    _, e = np.frexp(largest)  # largest = f 2^e, f in [1/2, 1)
    exponent = np.where(largest == 0, 0, e + 126)
    flushed = np.where(magnitude == 0, 0.0, values)

    def rounded(exponent: npt.NDArray[np.int64]) -> F64:
        return np.rint(np.ldexp(flushed, (133 - exponent)[..., None]))

    mantissas = rounded(exponent)
    outside = ((mantissas > 127) | (mantissas < -128)).any(axis=-1)
    exponent = exponent + outside
    mantissas = np.where(outside[..., None], rounded(exponent), mantissas)
    return mantissas.astype(np.int64), exponent


def operand_bytes(values: F64) -> npt.NDArray[np.uint8]:
    """[..., 8, 8] -> [..., 72]: eight times an exponent and its 8 mantissas."""
    mantissas, exponents = operands(values)
    both = np.concatenate([exponents[..., None], mantissas], axis=-1)
    return (both & 0xFF).astype(np.uint8).reshape(*values.shape[:-2], 72)


def operand_errors(values: F64) -> F64:
    """Largest error of each of [..., 8] values as an operand: half a unit, or a denormal dropped."""
    _, exponents = operands(values)
    half_unit = np.where(exponents == 0, 0.0, np.ldexp(0.5, exponents - 133))
    return np.broadcast_to(np.maximum(half_unit, SMALLEST_NORMAL)[..., None], values.shape)


@dataclass(frozen=True)
class Weights:
    """The parts of one layer, each [K, N] in float64: codes, scales, and zero points or minima."""

    bits: int
    group: int
    q: F64
    s: F64
    z: F64 | None
    m: F64 | None

    @classmethod
    def of(cls, layer: tf.PackedLinear) -> Weights:
        """The parts of a packed layer."""
        parts = tf.unpack(layer)
        group = np.arange(layer.k) // parts.group

        def wide(grid: npt.NDArray[Any] | None) -> F64 | None:
            return None if grid is None else grid.astype(np.float64)[group]

        scales = wide(parts.scales)
        assert scales is not None
        tile_group = layer.layout.tile_group
        q = parts.codes_kn().astype(np.float64)
        return cls(layer.layout.bits, tile_group, q, scales, wide(parts.zeros), wide(parts.mins))

    def exact(self) -> F64:
        """(q - z) s, or q s + m rounded to fp32, as the kernels' accumulators hold it."""
        if self.m is not None:
            return (self.q * self.s + self.m).astype(np.float32).astype(np.float64)
        assert self.z is not None
        return (self.q - self.z) * self.s

    def code_mass(self) -> F64:
        """|codes| as multiplied in the mantissa path, times scales, zero points folded in beside."""
        assert self.z is not None
        if self.bits == 4:
            return np.abs(self.q - self.z) * self.s_magnitude
        return (np.abs(self.q - 128) + np.abs(self.z - 128)) * self.s_magnitude

    @property
    def s_magnitude(self) -> F64:
        """|scales|."""
        return np.abs(self.s)


def blocks(w: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """One tile [128 input, 64 output] -> [n/16][k/8][2] blocks of [8 output][8 input]."""
    return w.reshape(16, 8, 4, 2, 8).transpose(2, 0, 3, 4, 1)


def bfp16_scratch(w: F64) -> npt.NDArray[np.uint8]:
    """Path (b): one tile's weights as operands."""
    return operand_bytes(blocks(w)).reshape(-1)


def emulated_scratch(w: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Path (a): one tile's bfloat16 weights, blocks turned to [8 input][8 output]."""
    return blocks(w).swapaxes(-1, -2).reshape(-1)


def held_weights(weights: Weights, path: str) -> F64:
    """What the path multiplies with, [K, N] for whole tiles: the weights rounded as they become operands."""
    w = weights.exact()
    if path == "mantissa":
        return w
    if path == "emulated":
        w = w.astype(ml_dtypes.bfloat16).astype(np.float64)
    mantissas, exponents = operands(w.T.reshape(w.shape[1], -1, 8))
    return (mantissas * np.ldexp(1.0, exponents - 133)[..., None]).reshape(w.shape[1], -1).T


def addition_bound(x: F64, weights: Weights, path: str) -> F64:
    """How far a kernel may be from ``x @ held_weights`` where every activation is exact as an operand: what is left of
    `error_bound` is the additions and, in the mantissa path, the fold."""
    tiles = x.shape[1] // KT
    mass = weights.code_mass() if path == "mantissa" else np.abs(held_weights(weights, path))
    bound = 24 * tiles * FP32_ROUNDOFF * (np.abs(x) @ mass)
    return bound + _fold_bound(x, np.zeros_like(x), weights) if path == "mantissa" else bound


def error_bound(x: F64, weights: F64 | Weights, path: str) -> F64:
    """How far a kernel's fp32 result may be from ``x @ exact``, [M, N].

    With dA and dW the errors of the operands, |y - x W| <= dA |W| + |A| dW + dA dW, and each of the additions rounds:
    16 a tile, and a few to fold, of terms whose magnitudes add up to (|A| + dA) (|W| + dW).
    """
    w = weights.exact() if isinstance(weights, Weights) else weights
    k = x.shape[1]
    tiles = -(-k // KT)
    pad = ((0, 0), (0, tiles * KT - k))
    d_a = operand_errors(np.pad(x, pad).reshape(len(x), -1, 8)).reshape(len(x), -1)[:, :k]
    a = np.abs(x)
    lost = 0.0 * a.sum(axis=1, keepdims=True)
    d_w = np.zeros_like(w)
    if isinstance(weights, Weights):
        small = np.where(weights.s_magnitude < LEAST_EXACT_SCALE, 1.0, 0.0)
        top = 2.0**weights.bits
        d_w += small * top * np.minimum(weights.s_magnitude, LEAST_EXACT_SCALE * 2.0**-7)
        lost = a.sum(axis=1, keepdims=True) * SMALLEST_NORMAL * top * 4
    if path != "mantissa":
        held = w
        if path == "emulated":
            d_w += BF16_ROUNDOFF * np.abs(w) + SMALLEST_NORMAL
            held = w.astype(ml_dtypes.bfloat16).astype(np.float64)
        n = w.shape[1]
        padded = np.pad(held, ((0, tiles * KT - k), (0, 0))).T.reshape(n, -1, 8)
        d_w += operand_errors(padded).reshape(n, -1).T[:k]
    bound = d_a @ np.abs(w) + (a + d_a) @ d_w + lost
    mass = (a + d_a) @ (np.abs(w) + d_w)
    if path == "mantissa":
        assert isinstance(weights, Weights)
        mass = (a + d_a) @ (weights.code_mass() + d_w)
        bound += _fold_bound(x, d_a, weights)
    return bound + (24 * tiles) * (FP32_ROUNDOFF * mass + 2.0**-149)


def _fold_bound(x: F64, d_a: F64, weights: Weights) -> F64:
    """What the mantissa path loses when a group's sums become operands: the two operands' remainder and, as large, the
    product that is left out (low by low), both fractions of the largest sum in a row of 8; and denormals."""
    assert weights.z is not None
    m, n = len(x), weights.q.shape[1]
    codes = weights.q - weights.z
    bound = np.zeros((m, n))
    for first in range(0, x.shape[1], weights.group):
        rows = slice(first, first + weights.group)
        scale = np.abs(weights.s[first])
        sums = np.abs(x[:, rows] @ codes[rows]) + d_a[:, rows] @ np.abs(codes[rows])
        largest = np.pad(sums, ((0, 0), (0, -n % 8))).reshape(m, -1, 8).max(axis=-1)
        bound += (2.01 * SPLIT * np.repeat(largest, 8, axis=1)[:, :n] + 2 * SMALLEST_NORMAL) * scale
        if weights.bits == 8:
            row_sums = np.abs(x[:, rows].sum(axis=1, keepdims=True)) + d_a[:, rows].sum(axis=1, keepdims=True)
            bound += (SPLIT * row_sums + 2 * SMALLEST_NORMAL) * np.abs(weights.z[first] - 128) * scale
    return bound


def to_blocks(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[M, 128 or 64] -> [M/8][.../8] blocks of [8][8]."""
    return x.reshape(len(x) // 8, 8, -1, 8).swapaxes(1, 2)


def from_blocks(c: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[M/8][8][8][8] -> [M, 64]."""
    return c.swapaxes(1, 2).reshape(-1, NT)
