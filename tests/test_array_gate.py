"""The gate for the array's GEMM: bfp16 by hand and by the oracle, and what it lets pass and what it does not."""

from __future__ import annotations

import numpy as np
import pytest
from layers import BF16, F32, SCHEMES, Scheme, make_layer
from oracle_gemm import operands

from tilefuse.errors import DtypeError
from tilefuse.testing import assert_gemm_close, gemm_error, round_to_bfp16

Rng = np.random.Generator


def test_bfp16_by_hand() -> None:
    """The largest of 8 is 1.0 = 64 units of 2^-6: the others are whole units, halves to the even one."""
    unit = 2.0**-6
    row = np.array([1, unit, 0.5 * unit, 1.5 * unit, -0.49 * unit, -0.51 * unit, 0.0077, 0])
    np.testing.assert_array_equal(round_to_bfp16(row), [1, unit, 0, 2 * unit, 0, -unit, 0, 0])
    # 127.5 units would be 128: all 8 are rounded to units twice as large. -128 is a mantissa, and they are not.
    np.testing.assert_array_equal(round_to_bfp16(np.array([127.5, 3.0])), [128, 4])
    np.testing.assert_array_equal(round_to_bfp16(np.array([-127.5, 3.0])), [-128, 3])
    # The ninth value has an exponent of its own, and zeros none.
    np.testing.assert_array_equal(round_to_bfp16(np.array([0.0] * 7 + [1000, 2.0**-20])), [0] * 7 + [1000, 2.0**-20])


def test_bfp16_by_the_oracle(rng: Rng) -> None:
    x = (rng.standard_normal((200, 64)) * 2.0 ** rng.integers(-20, 20, (200, 64))).astype(BF16).astype(np.float64)
    mantissas, exponents = operands(x.reshape(200, 8, 8))
    np.testing.assert_array_equal(
        round_to_bfp16(x), (mantissas * np.ldexp(1.0, exponents - 133)[..., None]).reshape(x.shape)
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_array_gate(rng: Rng, scheme: Scheme) -> None:
    """A product of activations as bfp16 passes beside outliers, and fails with a tile left out or truncated."""
    known = make_layer(rng, 576 if scheme.group == 192 else 640, 130, scheme, bias=True, perm=not scheme.mins)
    x = rng.standard_normal((16, known.layer.k)).astype(F32)
    x[:, 5] *= 100
    order = slice(None) if known.layer.perm is None else known.layer.perm
    held = round_to_bfp16(x.astype(BF16).astype(np.float64)[:, order])
    w = known.weights[order]
    assert known.bias is not None
    y = held @ w + known.bias
    # With minima the weights are rounded to bfp16, too: what is not is 2^-7 of the largest of 8 off.
    if not scheme.mins:
        assert assert_gemm_close(y.astype(F32), x, known.layer, array=True).max < 2.0**-20
    assert not gemm_error(y.astype(F32), x, known.layer).ok
    rows = np.ones(known.layer.k)
    rows[128:256] = 0
    assert not gemm_error(((held * rows) @ w + known.bias).astype(F32), x, known.layer, array=True).ok


def test_it_takes_packed_layers() -> None:
    with pytest.raises(DtypeError, match="array=True with a layer that is a ndarray: pass a PackedLinear"):
        gemm_error(np.zeros((1, 8), F32), np.zeros((1, 8), F32), np.zeros((8, 8)), array=True)
