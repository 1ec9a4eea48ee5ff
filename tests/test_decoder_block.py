"""A decoder block of one token in C++, against the definition in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilefuse as tf
from tilefuse import _core
from tilefuse.runtime.cpu import native_call

D, INNER, HEADS, KV_HEADS, HEAD = 96, 160, 6, 2, 32
EPS = 1e-5

DTYPES = {0: np.dtype(np.float32), 1: np.dtype(ml_dtypes.bfloat16), 2: np.dtype(np.float16)}

# Shares of the largest value. Products take bfloat16 inputs whatever the dtype and may round weights, each 2^-9 of
# itself; sums of 96 to 192 of them are off by some 2^-9 of the result. Four follow each other, and values in between
# have the unit of their type, 2^-9 for bfloat16. A wrong operation is off by the whole.
BOUNDS = {0: 2.0**-6, 1: 2.0**-5, 2: 2.0**-6}


def half(x: Any) -> Any:
    return np.asarray(x, np.float64).astype(ml_dtypes.bfloat16).astype(np.float64)


def norm(x: Any, w: Any, plus_one: bool) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * (w + plus_one)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    a, b = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-b, a], axis=-1) * sin


def activation(x: Any, kind: int) -> Any:
    if kind == 0:
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [0, 37, 1200])
def test_block(length: int, dtype: int, kind: int, cpu_level: str, rng: np.random.Generator) -> None:
    """Both activations, norms of heads or none, 1 + w or w, biases, caches short and long enough for threads."""
    plus_one, head_norms = bool(kind), not kind
    numpy_type = DTYPES[dtype]

    def vector(n: int, mean: float = 0.0, size: float = 1.0) -> Any:
        return (mean + size * rng.standard_normal(n)).astype(numpy_type)

    shapes = {
        "qkv": (D, (HEADS + 2 * KV_HEADS) * HEAD),
        "o": (HEADS * HEAD, D),
        "gate_up": (D, 2 * INNER),
        "down": (INNER, D),
    }
    layers, weights, biases = [], [], []
    for k, n in shapes.values():
        bias = rng.standard_normal(n).astype(np.float32) * 0.1
        w = rng.standard_normal((k, n)).astype(np.float32) / np.sqrt(k)
        layers.append(tf.pack(tf.quantize_linear(w, bits=8, group=32, bias=bias)))
        weights.append(layers[-1].dequantize().astype(np.float64))
        biases.append(bias.astype(np.float64))
    qkv, o, gate_up, down = (lambda x, w=w, b=b: half(x) @ w + b for w, b in zip(weights, biases, strict=True))

    x = vector(D)
    norms = [vector(D, 0.0 if plus_one else 1.0, 0.1) for _ in range(2)]
    norms += [vector(HEAD, 1.0, 0.1) if head_norms else None for _ in range(2)]
    angles = rng.uniform(0, 6, HEAD // 2)
    cos, sin = (np.tile(f(angles), 2).astype(numpy_type) for f in (np.cos, np.sin))
    capacity = length + 3
    keys, values = (vector(KV_HEADS * capacity * HEAD).reshape(KV_HEADS, capacity, HEAD) for _ in range(2))
    before = keys.copy(), values.copy()
    y = np.full(D + 16, 7, numpy_type)

    block = _core.DecoderBlock(*map(native_call, layers), HEADS, KV_HEADS, HEAD, HEAD**-0.5, [EPS] * 4, plus_one, kind)
    block.step(
        dtype,
        *[0 if array is None else array.ctypes.data for array in (x, *norms, cos, sin, keys, values)],
        length,
        capacity,
        y.ctypes.data,
    )

    wide = [None if array is None else array.astype(np.float64) for array in (x, *norms, cos, sin)]
    x64, norm_in, norm_post, q_norm, k_norm, cos64, sin64 = wide
    heads = qkv(norm(x64, norm_in, plus_one)).reshape(-1, HEAD)
    q, k, v = np.split(heads, [HEADS, HEADS + KV_HEADS])
    if head_norms:
        q, k = norm(q, q_norm, plus_one), norm(k, k_norm, plus_one)
    q, k = rotate(q, cos64, sin64), rotate(k, cos64, sin64)
    out = []
    for h in range(HEADS):
        kv = h // (HEADS // KV_HEADS)
        all_keys = np.vstack([before[0][kv, :length].astype(np.float64), k[kv]])
        all_values = np.vstack([before[1][kv, :length].astype(np.float64), v[kv]])
        scores = all_keys @ q[h] * HEAD**-0.5
        p = np.exp(scores - scores.max())
        out.append(p / p.sum() @ all_values)
    middle = x64 + o(np.concatenate(out))
    gate, up = np.split(gate_up(norm(middle, norm_post, plus_one)), 2)
    expected = middle + down(activation(gate, kind) * up)

    bound = BOUNDS[dtype]
    for found, wanted in ((y[:D], expected), (keys[:, length], k), (values[:, length], v)):
        assert np.abs(found.astype(np.float64) - wanted).max() <= bound * np.abs(wanted).max()
    # Nothing else is written.
    for now, then in zip((keys, values), before, strict=True):
        np.testing.assert_array_equal(np.delete(now, length, axis=1), np.delete(then, length, axis=1))
    assert (y[D:] == 7).all()


def test_extremes() -> None:
    """Activations far beyond the exponential's range, equal scores: no NaN where the definition has none."""
    layers = [
        tf.pack(tf.quantize_linear(np.zeros(shape, np.float32), bits=8, group=32)) for shape in ((32, 96), (32, 32))
    ]
    bias = np.concatenate([np.full(32, sign * 3e4, np.float32) for sign in (-1, 1)])
    gate_up = tf.pack(tf.quantize_linear(np.zeros((32, 64), np.float32), bits=8, group=32, bias=bias))
    one = tf.pack(tf.quantize_linear(np.eye(32, dtype=np.float32), bits=8, group=32))
    native = [native_call(layer) for layer in (layers[0], layers[1], gate_up, one)]
    block = _core.DecoderBlock(*native, 1, 1, 32, 1.0, [EPS] * 4, False, 0)
    x, ones, zeros = np.ones(32, np.float32), np.ones(32, np.float32), np.zeros(32, np.float32)
    cache = np.zeros((2, 1, 4, 32), np.float32)
    y = np.empty(32, np.float32)
    places = [a.ctypes.data for a in (x, ones, ones)]
    block.step(
        0,
        *places,
        0,
        0,
        ones.ctypes.data,
        zeros.ctypes.data,
        cache[0].ctypes.data,
        cache[1].ctypes.data,
        3,
        4,
        y.ctypes.data,
    )
    np.testing.assert_array_equal(y, 1)  # silu(-30000) is 0, to 1e-33 of it
