"""Random packed layers whose weights are known exactly, for tests of the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import tilefuse as tf

BF16 = ml_dtypes.bfloat16
F16 = np.float16
F32 = np.float32


@dataclass(frozen=True)
class Scheme:
    """A quantisation scheme; group 0 is per channel."""

    bits: int
    group: int
    mins: bool = False

    def __str__(self) -> str:
        return f"w{self.bits}g{self.group or 'K'}{'m' if self.mins else ''}"


SCHEMES = [Scheme(bits, group) for bits in (4, 8) for group in (32, 64, 128, 0)] + [Scheme(4, 32, True), Scheme(4, 192)]


@dataclass(frozen=True)
class Known:
    """A packed layer beside W [K, N] float64, computed here from the parts and rounded to bfloat16."""

    layer: tf.PackedLinear
    weights: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float32] | None


def make_layer(
    rng: np.random.Generator,
    k: int,
    n: int,
    scheme: Scheme,
    *,
    bias: bool = False,
    perm: bool = False,
    columns: int = 8,
    scales: npt.NDArray[Any] | None = None,
    codes: npt.NDArray[np.uint8] | None = None,
    zeros: npt.NDArray[np.uint8] | None = None,
) -> Known:
    """A layer of random codes, scales and zero points, or of those given."""
    group = min(scheme.group or k, k)
    groups = -(-k // group)
    top = 1 << scheme.bits
    q = rng.integers(0, top, (k, n), dtype=np.uint8) if codes is None else codes
    s = (rng.uniform(0.001, 0.03, (groups, n))).astype(BF16) if scales is None else scales.astype(BF16)
    z = None if scheme.mins else rng.integers(0, top, (groups, n), dtype=np.uint8) if zeros is None else zeros
    m = rng.normal(0, 0.1, (groups, n)).astype(BF16) if scheme.mins else None
    order = rng.permutation(k).astype(np.int32) if perm else None
    b = rng.normal(0, 1, n).astype(F32) if bias else None
    source = tf.QuantizedLinear("layer", "test", k, n, scheme.bits, group, q, tf.CodeOrder.KN, s, z, m, b, order)
    # The checkpoint's row perm[i] is row i of the sorted matrix, so the checkpoint's row j has the group of its rank.
    rank = np.arange(k)
    if order is not None:
        rank[order] = np.arange(k)
    row_group = rank // group
    s64 = s.astype(np.float64)[row_group]
    if m is not None:
        w = q * s64 + m.astype(np.float64)[row_group]
        w = w.astype(F32)
    else:
        assert z is not None
        w = (q.astype(np.float64) - z.astype(np.float64)[row_group]) * s64
    return Known(tf.pack(source, columns=columns), w.astype(BF16).astype(np.float64), b)
