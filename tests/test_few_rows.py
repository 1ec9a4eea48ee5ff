"""Products of few rows on the CPU, where kernels split activations into integer digits: at the digits' bounds.

Scales are powers of two and code differences have at most 8 bits, so weights are bfloat16 values and the float64
product is exact but for 2^-53: what is left is the kernels' own summing, K products in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from layers import BF16, F32, Scheme, make_layer

import tilefuse as tf

SCHEMES = [Scheme(bits, group) for bits in (4, 8) for group in (32, 64, 128)]


def assert_summed_in_float(x: npt.NDArray[Any], layer: tf.PackedLinear, weights: npt.NDArray[np.float64]) -> None:
    """Every result within (K + 1) 2^-24 of |x| |W|."""
    y = tf.gemm(x, layer).astype(np.float64)
    x64 = x.astype(np.float64)
    bound = (x.shape[1] + 1) * 2.0**-24 * (np.abs(x64) @ np.abs(weights))
    assert (np.abs(y - x64 @ weights) <= bound).all()


def binary_layer(rng: np.random.Generator, k: int, n: int, scheme: Scheme, **parts: Any) -> Any:
    """Random scales among 2^-3, 2^-4 and 2^-5."""
    groups = -(-k // scheme.group)
    return make_layer(rng, k, n, scheme, scales=2.0 ** rng.integers(-5, -2, (groups, n)), **parts)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_one_to_eight_rows(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    for k, n in ((384, 64), (517, 70), (129, 1)):
        known = binary_layer(rng, k, n, scheme)
        x = rng.normal(0, 1, (8, k)).astype(BF16).astype(F32)
        for m in range(1, 9):
            assert_summed_in_float(x[:m], known.layer, known.weights)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_digits_at_their_bounds(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    """127 2^i next to a power of two: its bytes, as signed digits, are -128 and 1, or -128 across two of them.

    With the largest codes these are the largest sums that a kernel can meet; and the largest bfloat16 significands, 255
    and 254, are where the top digit nearly overflows.
    """
    k, n = 256, 64
    top = (1 << scheme.bits) - 1
    for zero in (0, 1, top):
        zeros = np.full((k // scheme.group, n), zero, np.uint8)
        codes = np.full((k, n), top if zero < top else 0, np.uint8)
        codes[:, 1::2] = rng.integers(0, top + 1, (k, n // 2))
        known = binary_layer(rng, k, n, scheme, codes=codes, zeros=zeros)
        for largest in (128, 254, 255):
            rows = []
            for shift in range(24):
                row = np.full(k, 127 * 2.0**-shift)
                row[:: scheme.group] = largest
                rows += [row, -row, row * rng.choice([-1.0, 1.0], k)]
            x = np.stack(rows).astype(F32)
            for first in range(0, len(x), 3):
                assert_summed_in_float(x[first : first + 1], known.layer, known.weights)
                assert_summed_in_float(x[first : first + 3], known.layer, known.weights)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_element_far_below_its_group(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    """Magnitudes spread evenly over many powers of two: low digits in every block, and remainders beyond them."""
    known = binary_layer(rng, 512, 70, scheme)
    for spread in (8, 12, 16, 24, 40):
        x = np.ldexp(rng.uniform(0.5, 1, (4, 512)), -rng.integers(0, spread, (4, 512))).astype(BF16).astype(F32)
        x *= rng.choice(np.array([-1, 1], F32), x.shape)
        for m in (1, 2, 4):
            assert_summed_in_float(x[:m], known.layer, known.weights)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_8_bit_zero_points_beyond_the_codes(rng: np.random.Generator, cpu_level: str, group: int, m: int) -> None:
    """Zero points of 255 with codes of 0, and the reverse: the largest differences."""
    k, n = 384, 64
    zeros = np.where(np.arange(n) % 2, 255, 0).astype(np.uint8) * np.ones((k // group, 1), np.uint8)
    codes = np.repeat(255 - zeros, group, 0)
    known = binary_layer(rng, k, n, Scheme(8, group), codes=codes, zeros=zeros)
    for x in (np.full((m, k), 255.0, F32), rng.normal(0, 1, (m, k)).astype(BF16).astype(F32)):
        assert_summed_in_float(x, known.layer, known.weights)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_minima(rng: np.random.Generator, cpu_level: str, group: int, bits: int) -> None:
    """q s + m with m = -z s for zero points far inside and outside the codes' range: exact in bfloat16 all the same."""
    k, n = 384, 64
    codes = rng.integers(0, 1 << min(bits, 6), (k, n), dtype=np.uint8)
    zeros = rng.choice([-1024, -512, -256, -64, 0, 3, 8, 64, 256, 510, 512, 1024], (k // group, n))
    scales = np.full(zeros.shape, 2.0**-4).astype(BF16)
    mins = (-zeros * 2.0**-4).astype(BF16)
    source = tf.QuantizedLinear("layer", "test", k, n, bits, group, codes, tf.CodeOrder.KN, scales, None, mins)
    weights = codes * 2.0**-4 + np.repeat(mins.astype(np.float64), group, 0)
    x = rng.normal(0, 1, (4, k)).astype(BF16).astype(F32)
    layer = tf.pack(source)
    for m in (1, 2, 4):
        y = tf.gemm(x[:m], layer).astype(np.float64)
        x64 = x[:m].astype(np.float64)
        # The parts are summed apart where they don't cancel; bf16 weights, at most 2^-8, in the kernels of more rows.
        parts = np.abs(x64) @ np.abs(weights)
        assert (np.abs(y - x64 @ weights) <= (2.0**-8 + k * 2.0**-24) * parts).all()
