"""`tf.quantize_linear`: bounds on its error, and the inputs that quantisers trip over."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

import tilefuse as tf
from tilefuse.errors import DtypeError, QuantizationError, ShapeError

BF16 = np.dtype(ml_dtypes.bfloat16)


def by_group(scales: np.ndarray, k: int, group: int) -> np.ndarray:
    """Rows of [G, N] repeated to [K, N]."""
    return scales.astype(np.float64)[np.arange(k) // group]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 96, -1, None])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
def test_error_of_rounding_to_nearest(
    bits: int, group: int | None, symmetric: bool, dtype: type, rng: np.random.Generator
) -> None:
    """Every weight is within half a stored scale, and 2^-9 of the group's range where that scale was rounded down.

    K = 200 leaves a short last group for every group size.
    """
    k, n = 200, 17
    w = rng.normal(size=(k, n)).astype(dtype)
    layer = tf.quantize_linear(w, bits=bits, group=group, symmetric=symmetric)
    layer.validate()
    assert layer.order is tf.CodeOrder.KN
    size = k if group in (-1, None) else group
    assert layer.group == size
    assert layer.scales.dtype == BF16
    scales = by_group(layer.scales, k, size)
    # The scale is within 2^-8 (half a bfloat16 step, relative) of range / (2^b - 1), so 2^b - 1 of them can fall short
    # of the range by that much of it. A zero point that rounds moves the window by half a step: counted in s / 2.
    bound = scales / 2 + scales * (2**bits - 1) * 2**-8 + 1e-6
    assert (np.abs(layer.dequantize() - w.astype(np.float64)) <= bound).all()
    if symmetric:
        assert layer.symmetric
        assert (layer.zeros == 2 ** (bits - 1)).all()


def test_stored_scales_are_the_ones_used(rng: np.random.Generator) -> None:
    """Against a loop over weights with the stored scales and zero points: the nearest code, ties aside."""
    w = rng.normal(size=(64, 5)).astype(np.float32)
    layer = tf.quantize_linear(w, group=32)
    for k, n in itertools.product(range(64), range(5)):
        scale, zero = float(layer.scales[k // 32, n]), int(layer.zeros[k // 32, n])
        errors = [abs((code - zero) * scale - float(w[k, n])) for code in range(16)]
        assert errors[layer.codes[k, n]] <= min(errors) + 1e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_half_scales_are_exact_in_both_dtypes(bits: int, symmetric: bool, rng: np.random.Generator) -> None:
    w = rng.normal(size=(128, 64)) * np.logspace(-9, 4, 64)
    layer = tf.quantize_linear(w, bits=bits, group=32, symmetric=symmetric, scale_dtype="float16")
    assert layer.scales.dtype == np.float16
    assert (layer.scales > 0).all()
    np.testing.assert_array_equal(layer.scales.astype(np.float32).astype(BF16), layer.scales.astype(np.float32))
    large = np.abs(w).reshape(4, 32, 64).max(axis=1) > 0.01  # above float16's subnormal scales
    error = np.abs(layer.dequantize() - w).reshape(4, 32, 64).max(axis=1)
    scales = layer.scales.astype(np.float64)
    assert (error <= scales / 2 + scales * (2**bits - 1) * 2**-8)[large].all()
    assert (error <= np.maximum(scales, 2.0**-24) * 2**bits)[~large].all()


def weighted_error(layer: tf.QuantizedLinear, w: np.ndarray, importance: np.ndarray) -> np.ndarray:
    """Squared error of each output channel, float64 [N]."""
    return (importance[:, None] * (layer.dequantize() - w) ** 2).sum(axis=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_search_is_never_worse_and_mostly_better(bits: int, symmetric: bool, rng: np.random.Generator) -> None:
    w = rng.standard_t(3, size=(256, 48)).astype(np.float32)  # heavy tails, as weights have
    importance = rng.exponential(size=256) ** 2
    options = {"bits": bits, "group": 64, "symmetric": symmetric}
    nearest = tf.quantize_linear(w, **options)
    found = tf.quantize_linear(w, method="search", importance=importance, **options)
    before, after = weighted_error(nearest, w, importance), weighted_error(found, w, importance)
    assert (after <= before * (1 + 1e-5)).all()  # float32 sums
    assert after.sum() < (0.9 if bits == 4 else 0.999) * before.sum()


def test_importance_steers_the_search() -> None:
    """One large weight that no input reaches: the search gives its range to the others."""
    w = np.linspace(-1, 1, 64, dtype=np.float32)[:, None]
    w[10] = 1.9
    importance = np.ones(64)
    importance[10] = 0
    plain = tf.quantize_linear(w, group=64, symmetric=True, method="search")
    steered = tf.quantize_linear(w, group=64, symmetric=True, method="search", importance=importance)
    assert weighted_error(steered, w, importance)[0] < 0.8 * weighted_error(plain, w, importance)[0]
    assert np.abs(steered.dequantize() - w)[10] > 0.2


@pytest.mark.parametrize("method", ["rtn", "search"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
def test_degenerate_groups(method: str, symmetric: bool, scale_dtype: str) -> None:
    """All zero, tiny, constant and one-signed groups beside ordinary ones, one group a column."""
    k = 32
    ramp = np.linspace(0, 1, k)
    columns = {
        "zero": np.zeros(k),
        "tiny": np.full(k, 1e-8),
        "constant": np.full(k, 3.0),
        "negative": np.full(k, -0.37),
        "positive ramp": ramp + 5,
        "negative ramp": -ramp - 5,
        "one": np.eye(k)[3],
        "negative zero": np.full(k, -0.0),
    }
    w = np.stack(list(columns.values()), axis=1)
    layer = tf.quantize_linear(w, group=k, symmetric=symmetric, method=method, scale_dtype=scale_dtype)
    out = dict(zip(columns, layer.dequantize().T, strict=True))
    assert not out["zero"].any()
    assert not out["negative zero"].any()
    step = 2 if symmetric else 1  # symmetric codes spend half their range on the other sign
    for name, values in columns.items():
        # Half a step of range / 15, plus the rounding of the scale, 2^-8 of the range at most; float16 bottoms out at
        # 2^-24, where half a step is all there is.
        largest = np.abs(values).max()
        assert np.abs(out[name] - values).max() <= largest * (step / 30 + 2**-7) + 2.0**-25, name


def test_code_saturates() -> None:
    """The largest weight rounds to code 16 where the scale was rounded down; it must stay 15 and not spill."""
    rng = np.random.default_rng(0)
    w = rng.uniform(0, 1, (32, 2000)).astype(np.float32)
    layer = tf.quantize_linear(w, group=32)
    scales = layer.scales.astype(np.float64)[0]
    top = w.max(axis=0) / scales
    assert (top > 15).any()
    assert layer.codes.max() == 15
    searched = tf.quantize_linear(w, group=32, method="search")
    assert ((w.max(axis=0) / searched.scales.astype(np.float64)[0]) > 15.5).any()
    assert searched.codes.max() == 15


def test_extreme_magnitudes() -> None:
    """The ends of float32: differences that overflow it, and subnormals."""
    w = np.stack([np.linspace(-3e38, 3e38, 32), np.linspace(-1e-40, 1e-40, 32)], axis=1)
    nearest, found = tf.quantize_linear(w, group=32), tf.quantize_linear(w, group=32, method="search")
    error = [np.abs(layer.dequantize().astype(np.float64) - w) / np.abs(w).max(axis=0) for layer in (nearest, found)]
    assert error[0].max(axis=0)[0] <= 2 / 15 * 0.6
    # A scale of 2e-40 / 15 is 1.2 of the steps, 2^-133, that bfloat16 has left there.
    assert error[0].max(axis=0)[1] <= 1
    assert ((error[1] ** 2).sum(axis=0) <= (error[0] ** 2).sum(axis=0) * (1 + 1e-5)).all()


@pytest.mark.parametrize("method", ["rtn", "search"])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_tiny_magnitude(bits: int, symmetric: bool, scale_dtype: str, method: str) -> None:
    """Down to float32's smallest number, far below any scale: rounding is never worse than dropping the weight."""
    top = 2.0 ** np.arange(-149, -20)
    w = (np.linspace(-1, 1, 33)[:, None] * top).astype(np.float32)
    layer = tf.quantize_linear(w, bits=bits, group=-1, symmetric=symmetric, scale_dtype=scale_dtype, method=method)  # type: ignore[arg-type]
    error = np.abs(layer.dequantize().astype(np.float64) - w)
    assert (error <= top).all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"w": np.zeros(3)}, ShapeError, r"w has shape \[3\]"),
        ({"w": np.zeros((0, 4))}, ShapeError, r"w has shape \[0, 4\]"),
        ({"w": [[1.0, 2.0], [3.0]]}, ShapeError, "w is no array"),
        ({"w": np.zeros((4, 4), np.int32)}, DtypeError, "w has dtype int32"),
        ({"w": np.zeros((4, 4), np.complex64)}, DtypeError, "w has dtype complex64"),
        ({"w": np.diag([1, np.nan])}, QuantizationError, r"w: nan at \[1, 1\]"),
        ({"w": np.diag([np.inf, 1])}, QuantizationError, r"w: inf at \[0, 0\]"),
        ({"w": np.diag([1e300, 1])}, QuantizationError, r"w: 1e\+300 at \[0, 0\] is not finite in float32"),
        ({"bits": 3}, QuantizationError, "bits = 3"),
        ({"bits": 4.0}, QuantizationError, "bits = 4.0"),
        ({"group": 2.0}, QuantizationError, "group = 2.0"),
        ({"group": "4"}, QuantizationError, "group = '4'"),
        ({"group": 0}, QuantizationError, "group = 0"),
        ({"group": -2}, QuantizationError, "group = -2"),
        ({"method": "best"}, QuantizationError, "method = 'best'"),
        ({"scale_dtype": "float32"}, QuantizationError, "scale_dtype = 'float32'"),
        ({"w": np.full((4, 4), 1e6), "scale_dtype": "float16"}, QuantizationError, "beyond float16"),
        ({"importance": np.ones(3)}, ShapeError, "importance"),
        ({"importance": -np.ones(4)}, QuantizationError, "importance -1.0 is negative"),
        ({"importance": np.full(4, np.nan)}, QuantizationError, "importance: nan"),
        ({"bias": np.zeros(3)}, ShapeError, "bias"),
        ({"bias": np.full(4, np.inf)}, QuantizationError, "bias: inf"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tf.quantize_linear(**{"w": np.zeros((4, 4)), "bits": 4, **arguments})  # type: ignore[arg-type]


def test_bias_is_added_once() -> None:
    layer = tf.quantize_linear(np.zeros((32, 4)), bias=np.full(4, 100.0), name="b")
    assert layer.name == "b"
    x = np.ones((1, 32), np.float32)
    assert (x @ layer.dequantize() + layer.bias).tolist() == [[100.0] * 4]
