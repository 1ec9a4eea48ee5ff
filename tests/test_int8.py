"""``compute="int8"``: at every instruction-set level, to the bit where the arithmetic is exact, else within a derived
bound of the float64 product of the quantised activations."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import BF16, F16, F32, SCHEMES, Scheme, make_layer

import tilefuse as tf
from tilefuse import _core, runtime
from tilefuse.runtime.reference import quantize_activations

W4 = Scheme(4, 128)
W8 = Scheme(8, 128)
EDGE_SCHEMES = [Scheme(bits, group) for bits in (4, 8) for group in (32, 64, 128)] + [Scheme(4, 32, True)]

U = 2.0**-24


def int8(x: Any, layer: tf.PackedLinear, **options: Any) -> Any:
    return tf.gemm(x, layer, compute="int8", device="cpu", **options)


def parts_of(layer: tf.PackedLinear) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Exact weights [K, N] in the order of the permuted inputs, and |W| as the kernels' two terms bound it."""
    parts = tf.unpack(layer)
    group = np.arange(layer.k) // parts.group
    w = parts.codes_kn() * parts.scales.astype(np.float64)[group]
    if parts.mins is not None:
        return (w := w + parts.mins.astype(np.float64)[group]), 3 * np.abs(w)
    assert parts.zeros is not None
    w -= (parts.zeros * parts.scales.astype(np.float64))[group]
    return w, np.abs(w)


def assert_close(y: Any, x: Any, layer: tf.PackedLinear) -> None:
    """A group's integer sum is exact. Its scale rounds once, the product of the two once more where there is no fused
    multiply-add, and the sum once a group; minima are a second term a group, itself the sum of two roundings. A bias
    rounds once, and the result does."""
    w, magnitude = parts_of(layer)
    x = np.asarray(x)
    quantised = quantize_activations(x if layer.perm is None else x[:, layer.perm], layer.layout.tile_group)
    want = quantised @ w
    scale = np.abs(quantised) @ magnitude
    if layer.bias is not None:
        want += layer.bias
        scale += np.abs(layer.bias)
    groups = -(-layer.k // layer.layout.tile_group)
    steps = 2 * groups + 4 if layer.layout.zero is tf.ZeroKind.M16 else groups + 3
    half_ulp = {np.dtype(F32): U, np.dtype(F16): 2.0**-11, np.dtype(BF16): 2.0**-8}[np.dtype(y.dtype)]
    error = np.abs(y.astype(np.float64) - want)
    assert (error <= steps * U * scale * (1 + half_ulp) + half_ulp * np.abs(want)).all(), error.max()


def takes(scheme: Scheme, k: int) -> bool:
    """A minimum can't be cancelled in rows that pad a group; a group of all K is the per-channel case."""
    return not (scheme.mins and k % 32) and not (scheme.group == 192 and k < 192)


def integer_layer(
    rng: np.random.Generator, k: int, n: int, scheme: Scheme, **parts: Any
) -> tuple[tf.PackedLinear, npt.NDArray[np.int64]]:
    """Scales of one, and W as integers."""
    group = min(scheme.group, k)
    groups = -(-k // group)
    top = 1 << scheme.bits
    codes = parts.get("codes", rng.integers(0, top, (k, n), dtype=np.uint8))
    zeros = parts.get("zeros", rng.integers(0, top, (groups, n), dtype=np.uint8))
    known = make_layer(rng, k, n, scheme, codes=codes, zeros=zeros, scales=np.ones((groups, n)))
    return known.layer, codes.astype(np.int64) - zeros.astype(np.int64)[np.arange(k) // group]


def integers(rng: np.random.Generator, m: int, k: int, group: int) -> npt.NDArray[np.float32]:
    """Activations that quantise to themselves: integers up to 127, which each group has."""
    x = rng.integers(-127, 128, (m, k)).astype(F32)
    x[:, ::group] = 127
    return x


@pytest.mark.parametrize("scheme", [s for s in EDGE_SCHEMES if not s.mins], ids=str)
def test_integers_come_out_exactly(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    """Sums below 2^24: no step rounds, so every level must give the very integers, at every M around the blocking."""
    k, n = 352, 100  # both padded
    layer, w = integer_layer(rng, k, n, scheme)
    x = integers(rng, 300, k, 32)
    want = x.astype(np.int64) @ w
    assert np.abs(want).max() < 1 << 24
    for m in (*range(1, 71), 255, 256, 257, 300):
        np.testing.assert_array_equal(int8(x[:m], layer), want[:m])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("bits", [4, 8])
def test_largest_sums(rng: np.random.Generator, cpu_level: str, bits: int, zero: int) -> None:
    """All codes at one end, all zero points at the other, all activations at +-127: nothing saturates."""
    top = (1 << bits) - 1
    codes = np.full((256, 64), top * (1 - zero), np.uint8)
    layer, w = integer_layer(rng, 256, 64, Scheme(bits, 128), codes=codes, zeros=np.full((2, 64), top * zero, np.uint8))
    x = np.full((300, 256), 127, F32)
    x[1::2] = -127
    x[2::3, ::2] *= -1
    for m in (1, 4, 40, 60, 300):
        np.testing.assert_array_equal(int8(x[:m], layer), x[:m].astype(np.int64) @ w)


def quantised_by_hand(x: npt.NDArray[np.float32], group: int) -> npt.NDArray[np.float32]:
    """One activation after the other, float32 step by float32 step."""
    out = np.zeros_like(x)
    for r in range(x.shape[0]):
        for k0 in range(0, x.shape[1], group):
            part = x[r, k0 : k0 + group]
            largest = max(abs(F32(v)) for v in part)
            if largest == 0:
                continue
            up = F32(2.0**64) if largest < 2.0**-60 else F32(1)
            inverse = F32(127) / F32(largest * up)
            scale = F32(largest / F32(127))
            for i, v in enumerate(part):
                out[r, k0 + i] = F32(round(float(F32(F32(v * up) * inverse)))) * scale
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_activations_quantise_by_the_rule(rng: np.random.Generator, cpu_level: str, group: int, bits: int) -> None:
    """A unit matrix of weights gives the quantised activations themselves, to the bit: ties, denormals, every size."""
    k = 128
    layer, _ = integer_layer(
        rng, k, k, Scheme(bits, group), codes=np.eye(k, dtype=np.uint8), zeros=np.zeros((k // group, k), np.uint8)
    )
    x = rng.normal(0, 1, (40, k)).astype(F32) * 2.0 ** rng.integers(-150, 120, (40, 1))
    x = x.astype(F32)
    x[3] = np.arange(k) - 63.5  # ties, once the largest is 127
    x[3, ::32] = 127
    x[4] = 0
    x[5, ::3] = 0
    x[6] = np.ldexp(1.0, -149)  # the smallest denormal
    x[7] = np.finfo(F32).max / 2
    x[8] *= F32(1) + np.arange(k, dtype=F32)
    want = quantised_by_hand(x, group)
    np.testing.assert_array_equal(quantize_activations(x, group).astype(F32), want)
    for m in (10, 40):
        np.testing.assert_array_equal(int8(x[:m], layer), want[:m])


SHAPES = [(576, 192), (200, 70), (1, 1)]


@pytest.mark.parametrize(("k", "n", "scheme"), [(k, n, s) for k, n in SHAPES for s in SCHEMES if takes(s, k)])
def test_bound_over_schemes_and_shapes(
    rng: np.random.Generator, cpu_level: str, scheme: Scheme, k: int, n: int
) -> None:
    layer = make_layer(rng, k, n, scheme, bias=True, perm=k > 200).layer
    x = rng.normal(0, 1, (45, k)).astype(F32)
    for m in (1, 5, 45):
        assert_close(int8(x[:m], layer), x[:m], layer)


@settings(max_examples=25)
@given(
    k=st.integers(1, 700),
    n=st.integers(1, 200),
    m=st.integers(1, 80),
    scheme=st.sampled_from(SCHEMES),
    seed=st.integers(0, 9),
)
def test_bound_over_random_shapes(k: int, n: int, m: int, scheme: Scheme, seed: int) -> None:
    if not takes(scheme, k):
        return
    rng = np.random.default_rng(seed)
    layer = make_layer(rng, k, n, scheme, perm=seed % 2 == 0).layer
    x = rng.normal(0, 1, (m, k)).astype(F32)
    for level in runtime.cpu_levels():
        with runtime.force_cpu_level(level):
            assert_close(int8(x, layer), x, layer)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("out_dtype", [None, F32, F16, BF16])
def test_dtypes(rng: np.random.Generator, cpu_level: str, dtype: Any, out_dtype: Any) -> None:
    layer = make_layer(rng, 320, 96, W4).layer
    for m in (1, 5):
        x = rng.normal(0, 1, (m, 320)).astype(dtype)
        y = int8(x, layer, out_dtype=out_dtype)
        assert y.dtype == np.dtype(out_dtype or dtype)
        assert_close(y, x, layer)


@pytest.mark.parametrize("scheme", EDGE_SCHEMES, ids=str)
def test_a_row_does_not_depend_on_the_others(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    """Whatever the number of rows, and so the kernel: the same integers and the same float steps, to the bit."""
    layer = make_layer(rng, 352, 100, scheme, bias=True).layer
    x = rng.normal(0, 1, (900, 352)).astype(F32)
    want = int8(x, layer)
    for m in (1, 3, 12, 13, 31, 32, 33, 200, 385):
        np.testing.assert_array_equal(int8(x[-m:], layer), want[-m:])


def test_levels_with_fused_multiply_add_agree(rng: np.random.Generator) -> None:
    layers = [make_layer(rng, 352, 100, scheme).layer for scheme in EDGE_SCHEMES]
    x = rng.normal(0, 1, (40, 352)).astype(F32)
    results = []
    for level in runtime.cpu_levels():
        if level != "portable":
            with runtime.force_cpu_level(level):
                results.append([int8(x, layer) for layer in layers])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("scheme", [W4, W8, Scheme(4, 32, True)], ids=str)
def test_non_finite_activations_make_their_row_nan(
    rng: np.random.Generator, cpu_level: str, scheme: Scheme, m: int
) -> None:
    layer = make_layer(rng, 256, 64, scheme).layer
    x = rng.normal(0, 1, (m, 256)).astype(F32)
    clean = int8(x, layer)
    others = np.arange(m) != m // 2
    for value in (np.inf, -np.inf, np.nan):
        x[m // 2, 17] = value
        for device in ("cpu", "reference"):
            assert np.isnan(tf.gemm(x, layer, compute="int8", device=device)[m // 2]).all()
        np.testing.assert_array_equal(int8(x, layer)[others], clean[others])


@pytest.mark.parametrize("scheme", [s for s in EDGE_SCHEMES if not s.mins], ids=str)
def test_zero_columns_and_zero_rows_give_exact_zeros(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    k, n = 384, 70
    zeros = rng.integers(0, 1 << scheme.bits, (k // scheme.group, n), dtype=np.uint8)
    layer = make_layer(rng, k, n, scheme, codes=np.repeat(zeros, scheme.group, 0), zeros=zeros).layer
    other = make_layer(rng, k, n, scheme, bias=True)
    x = rng.normal(0, 1, (40, k)).astype(F32)
    x[:, 7] = 1e6
    for m in (1, 4, 40):
        assert not int8(x[:m], layer).any()
        np.testing.assert_array_equal(int8(0 * x[:m], other.layer), np.broadcast_to(other.bias, (m, n)))


@pytest.mark.parametrize("outlier", [1e3, 1e9, 1e30])
@pytest.mark.parametrize("scheme", [W4, W8, Scheme(4, 32, True)], ids=str)
def test_outliers(rng: np.random.Generator, cpu_level: str, scheme: Scheme, outlier: float) -> None:
    """The group of an outlier keeps only that, and the bound holds; other groups are as exact as without it."""
    layer = make_layer(rng, 640, 64, scheme).layer
    x = rng.normal(0, 1, (3, 640)).astype(F32)
    x[:, 405] = outlier
    for rows in (x[:1], x):
        assert_close(int8(rows, layer), rows, layer)


@pytest.mark.parametrize("exponent", [-100, -70, -3, 60, 110])
def test_powers_of_two_scale_the_result(rng: np.random.Generator, cpu_level: str, exponent: int) -> None:
    layer = make_layer(rng, 256, 64, W4).layer
    x = rng.normal(0, 1, (3, 256)).astype(F32)
    factor = F32(2.0**exponent)
    np.testing.assert_array_equal(int8(x * factor, layer), int8(x, layer) * factor)


def test_strides_and_out(rng: np.random.Generator, cpu_level: str) -> None:
    layer = make_layer(rng, 96, 40, Scheme(4, 32)).layer
    base = rng.normal(0, 1, (12, 192)).astype(F32)
    for x in (base[:, ::2], base[::-1, :96], base[::3, 50:146], np.asfortranarray(base[:, :96]), base.T[:96].T):
        np.testing.assert_array_equal(int8(x, layer), int8(np.array(x), layer))
    wide = np.full((12, 100), 7.0, F32)
    int8(base[:, :96], layer, out=wide[:, 13:53])
    np.testing.assert_array_equal(wide[:, 13:53], int8(base[:, :96], layer))
    assert (wide[:, :13] == 7).all()
    assert (wide[:, 53:] == 7).all()


def test_threads_don_t_change_a_bit(rng: np.random.Generator, cpu_level: str) -> None:
    layers = [make_layer(rng, 500, n, W4).layer for n in (700, 64)]
    before = tf.get_num_threads()
    try:
        for m in (1, 3, 200):
            x = rng.normal(0, 1, (m, 500)).astype(F32)
            results = []
            for threads in (1, 2, 3, 5):
                tf.set_num_threads(threads)
                results.append([int8(x, layer) for layer in layers])
            for ys in results[1:]:
                for y, want in zip(ys, results[0], strict=True):
                    np.testing.assert_array_equal(y, want)
    finally:
        tf.set_num_threads(before)


def test_error_on_normal_activations(rng: np.random.Generator) -> None:
    """The largest of 128 normal values is 2.854 standard deviations (root mean square): rounding to multiples of a
    127th of it leaves a relative error of 2.854 / 127 / sqrt(12) = 0.0065."""
    layer = make_layer(rng, 4096, 256, W4, zeros=rng.integers(6, 11, (32, 256), dtype=np.uint8)).layer
    w, _ = parts_of(layer)
    x = rng.normal(0, 1, (64, 4096)).astype(BF16)
    want = x.astype(np.float64) @ w
    for device in ("cpu", "reference"):
        y = tf.gemm(x, layer, compute="int8", device=device, out_dtype=F32)
        assert 0.0063 < np.linalg.norm(y - want) / np.linalg.norm(want) < 0.0067


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_reference(rng: np.random.Generator, scheme: Scheme) -> None:
    """The reference device is the float64 product of the same activations, rounded once."""
    layer = make_layer(rng, 384, 40, scheme, bias=True, perm=True).layer
    x = rng.normal(0, 1, (3, 384)).astype(F32)
    w, _ = parts_of(layer)
    assert layer.perm is not None
    want = quantize_activations(x[:, layer.perm], layer.layout.tile_group) @ w + layer.bias
    np.testing.assert_allclose(tf.gemm(x, layer, compute="int8", device="reference"), want, rtol=2 * U)
    np.testing.assert_allclose(tf.gemv(x[0], layer, compute="int8", device="reference"), want[0], rtol=2 * U)


def test_every_entry_takes_it(rng: np.random.Generator) -> None:
    layer = make_layer(rng, 64, 32, Scheme(4, 32), bias=True).layer
    x = rng.normal(0, 1, (24, 64)).astype(F32)
    want = int8(x, layer)
    assert not np.array_equal(want, tf.gemm(x, layer))
    np.testing.assert_array_equal(tf.gemm(x, layer, compute="bf16"), tf.gemm(x, layer))
    np.testing.assert_array_equal(tf.gemm(x, layer, compute="int8", device="auto"), want)
    np.testing.assert_array_equal(tf.gemv(x[3], layer, compute="int8"), want[3])
    np.testing.assert_array_equal(tf.linear(x.reshape(2, 12, 64), layer, compute="int8"), want.reshape(2, 12, 32))
    many = tf.linear_many([(x[0], layer), (x.reshape(4, 6, 64), layer)], compute="int8")
    np.testing.assert_array_equal(many[0], want[0])
    np.testing.assert_array_equal(many[1], want.reshape(4, 6, 32))
    out = np.empty((2, 12, 32), F32)
    assert tf.linear(x.reshape(2, 12, 64), layer, out=out, compute="int8") is out
    np.testing.assert_array_equal(out.reshape(24, 32), want)
    assert int8(x[:0], layer).shape == (0, 32)


def test_refusals(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    class Array:
        name = "npu"

        def matmul(self, x: object, layer: object, y: object) -> None:
            raise AssertionError("not to be called")

    layer = make_layer(rng, 64, 32, Scheme(4, 32)).layer
    x = np.ones((2, 64), F32)
    monkeypatch.setitem(runtime._DEVICES, "npu", Array())
    with pytest.raises(tf.errors.DeviceError, match=r"'npu' does not have: pass device=\"cpu\""):
        tf.gemm(x, layer, device="npu", compute="int8")
    with pytest.raises(tf.errors.DeviceError, match=r"'npu' does not have"):
        tf.linear_many([(x, layer)], device="npu", compute="int8")
    with pytest.raises(tf.errors.DtypeError, match=r"compute is 'int4': pass None or \"bf16\""):
        tf.gemm(x, layer, compute="int4")


def test_probe() -> None:
    assert _core.integer_probes() == (["int8-dot"] if "avx512_vnni" in runtime.cpu_levels() else [])
    for kind in _core.integer_probes():
        assert _core.run_arithmetic_probe(kind, 1e-4) > 0
