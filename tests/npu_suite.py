"""What a device on the array has to compute right: run on the emulated one and on hardware alike.

Modules that import these tests have a fixture ``device`` with the name of the device.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from layers import BF16, F16, F32, SCHEMES, Known, Scheme, make_layer
from test_designs_emulated import check_gemm

import tilefuse as tf
from tilefuse.arrays import view_rows
from tilefuse.errors import QuantizationError
from tilefuse.runtime import resolve_device
from tilefuse.runtime.npu import NpuDevice
from tilefuse.testing import gemm_error

Rng = np.random.Generator


def activations(rng: Rng, m: int, k: int) -> Any:
    return rng.normal(0, 1, (m, k)).astype(F32)


def gemm(device: str, rng: Rng, known: Known, m: int) -> None:
    x = activations(rng, m, known.layer.k)
    y = tf.gemm(x, known.layer, device=device)
    assert y.shape == (m, known.layer.n)
    assert y.dtype == F32
    check_gemm(y, x, known.layer)


def gemv(device: str, rng: Rng, known: Known) -> None:
    x = activations(rng, 1, known.layer.k)[0]
    y = tf.gemv(x, known.layer, device=device)
    assert y.shape == (known.layer.n,)
    assert gemm_error(y.astype(BF16) if known.bias is None else y, x, known.layer).ok


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gemm_of_every_scheme(device: str, rng: Rng, scheme: Scheme) -> None:
    """Odd M, K no multiple of a tile, N no multiple of 64, several passes; bias and permuted channels."""
    known = make_layer(rng, 576 if scheme.group == 192 else 640, 1100, scheme, bias=True, perm=not scheme.mins)
    gemm(device, rng, known, 77)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gemv_of_every_scheme(device: str, rng: Rng, scheme: Scheme) -> None:
    gemv(
        device, rng, make_layer(rng, 576 if scheme.group == 192 else 1184, 700, scheme, bias=True, perm=not scheme.mins)
    )


@pytest.mark.parametrize("scheme", [Scheme(4, 128), Scheme(8, 32), Scheme(4, 32, True)], ids=str)
def test_an_outlier_channel(device: str, rng: Rng, scheme: Scheme) -> None:
    """A channel 100 times the others: within the derived bound and the array's gate (docs/numerics.md), and not within
    the one of the other devices. One row keeps more bits, and is."""
    known = make_layer(rng, 512, 512, scheme, bias=True)
    x = activations(rng, 64, 512)
    x[:, 5] *= 100
    y = tf.gemm(x, known.layer, device=device)
    check_gemm(y, x, known.layer)
    assert gemm_error(y, x, known.layer, array=True).ok
    assert not gemm_error(y, x, known.layer).ok
    rounded = tf.gemm(x, known.layer, device=device, out_dtype=BF16)  # twice: before and after the bias
    check_gemm(rounded, x, known.layer)
    assert gemm_error(rounded, x, known.layer, array=True).ok
    assert gemm_error(tf.gemv(x[0], known.layer, device=device).astype(BF16), x[0], known.layer).ok


@pytest.mark.parametrize("columns", [8, 7, 5, 4])
def test_columns(device: str, rng: Rng, columns: int) -> None:
    known = make_layer(rng, 300, 64 * columns + 10, Scheme(4, 64), columns=columns)
    gemm(device, rng, known, 33)
    gemv(device, rng, known)


@pytest.mark.parametrize("columns", [1, 3])
def test_a_gemv_on_few_columns(device: str, rng: Rng, columns: int) -> None:
    gemv(device, rng, make_layer(rng, 200, 100, Scheme(8, 128), columns=columns))


@pytest.mark.parametrize("m", [2, 64, 65])
def test_the_smallest_gemm(device: str, rng: Rng, m: int) -> None:
    gemm(device, rng, make_layer(rng, 32, 1, Scheme(4, 32)), m)


def test_the_smallest_gemv(device: str, rng: Rng) -> None:
    gemv(device, rng, make_layer(rng, 32, 1, Scheme(4, 32)))


@pytest.mark.parametrize("scheme", [Scheme(4, 128), Scheme(8, 128)], ids=str)
@pytest.mark.parametrize(("k", "n"), [(32768, 64), (128, 32768)], ids=["K", "N"])
def test_the_largest_k_and_n(device: str, rng: Rng, scheme: Scheme, k: int, n: int) -> None:
    known = make_layer(rng, k, n, scheme)
    gemm(device, rng, known, 5)
    gemv(device, rng, known)


def test_several_row_blocks(device: str, rng: Rng) -> None:
    gemm(device, rng, make_layer(rng, 256, 512, Scheme(4, 128)), 1100)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_types(device: str, rng: Rng, dtype: Any, bias: bool) -> None:
    """x of any type is rounded to bfloat16; y of any type has the array's bfloat16, and a bias in float32."""
    known = make_layer(rng, 256, 130, Scheme(4, 128), bias=bias)
    x = activations(rng, 3, 256).astype(dtype)
    y = tf.gemm(x, known.layer, device=device)
    assert y.dtype == dtype
    wide = tf.gemm(x, known.layer, device=device, out_dtype=F32)
    check_gemm(wide, x.astype(ml_dtypes.bfloat16).astype(F32), known.layer)
    np.testing.assert_array_equal(y, wide.astype(dtype))


def test_strides(device: str, rng: Rng) -> None:
    """Rows apart, backwards and repeated in x, and apart in y, all without copies of the caller's."""
    known = make_layer(rng, 128, 96, Scheme(4, 64), bias=True)
    x = activations(rng, 12, 256)
    for view in (x[::2, 100:228], x[::-1, :128], np.broadcast_to(x[0, :128], (6, 128))):
        want = tf.gemm(np.ascontiguousarray(view), known.layer, device=device)
        out = np.full((2 * len(view), 200), np.nan, F32)
        tf.gemm(view, known.layer, device=device, out=out[::2, 50:146])
        np.testing.assert_array_equal(out[::2, 50:146], want)
        assert np.isnan(out[1::2]).all()
        assert np.isnan(out[:, :50]).all()
        assert np.isnan(out[:, 146:]).all()


def test_no_rows(device: str, rng: Rng) -> None:
    known = make_layer(rng, 128, 64, Scheme(4, 128))
    assert tf.gemm(np.empty((0, 128), F32), known.layer, device=device).shape == (0, 64)


def test_more_axes(device: str, rng: Rng) -> None:
    known = make_layer(rng, 128, 64, Scheme(4, 128))
    x = activations(rng, 6, 128)
    y = tf.linear(x.reshape(2, 3, 128), known.layer, device=device)
    np.testing.assert_array_equal(y.reshape(6, 64), tf.gemm(x, known.layer, device=device))


def test_linear_many(device: str, rng: Rng) -> None:
    layers = [make_layer(rng, 256, n, Scheme(4, 128), bias=n == 64).layer for n in (64, 512, 512)]
    calls = [(activations(rng, 6, 256).reshape(2, 3, 256), layer) for layer in layers] + [
        (np.ones(256, F32), layers[0])
    ]
    results = tf.linear_many(calls, device=device, out_dtype=F16)
    for (x, layer), y in zip(calls, results, strict=True):
        np.testing.assert_array_equal(y, tf.linear(x, layer, device=device, out_dtype=F16))


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3.4e38], ids=["nan", "inf", "inf once it is bfloat16"])
@pytest.mark.parametrize("m", [1, 5])
def test_activations_that_are_not_finite(device: str, rng: Rng, m: int, bad: float) -> None:
    known = make_layer(rng, 128, 64, Scheme(4, 128))
    x = activations(rng, m, 128)
    x[m - 1, 77] = bad
    with pytest.raises(QuantizationError, match=rf"x\[{m - 1}, 77\] is not finite in bfloat16"):
        tf.gemm(x, known.layer, device=device)
    x[m - 1, 77] = 0
    check = tf.gemm(x, known.layer, device=device)
    assert np.isfinite(check).all()


def test_the_same_call_gives_the_same_bits(device: str, rng: Rng) -> None:
    known = make_layer(rng, 640, 700, Scheme(4, 128))
    x = activations(rng, 70, 640)
    first = tf.gemm(x, known.layer, device=device)
    for _ in range(3):
        np.testing.assert_array_equal(tf.gemm(x, known.layer, device=device), first)


def test_many(device: str, rng: Rng) -> None:
    """Layers of two configurations, several rows and one, in one call."""
    found = resolve_device(device)
    assert isinstance(found, NpuDevice)
    layers = [make_layer(rng, 256, n, Scheme(4, 128), bias=n == 64).layer for n in (64, 512, 512, 200)]
    calls, wanted = [], []
    for m in (1, 9):
        for layer in layers:
            x, y = activations(rng, m, 256), np.empty((m, layer.n), F32)
            wanted.append((y, tf.gemm(x, layer, device=device)))
            views = view_rows(x, "x"), view_rows(y, "y")
            assert views[0] is not None
            assert views[1] is not None
            calls.append((views[0], layer, views[1]))
    found.matmul_many(calls)
    for y, want in wanted:
        np.testing.assert_array_equal(y, want)
