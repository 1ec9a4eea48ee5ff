"""`gemm`, `gemv` and `linear` on the CPU device, at every instruction-set level, against float64."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layers import BF16, F16, F32, SCHEMES, Scheme, make_layer

import tilefuse as tf
from tilefuse import runtime
from tilefuse.testing import assert_gemm_close, gemm_bound, gemm_error

W4 = Scheme(4, 128)
W8 = Scheme(8, 128)
EDGE_SCHEMES = [Scheme(bits, group) for bits in (4, 8) for group in (32, 64, 128)] + [Scheme(4, 32, True)]


def activations(rng: np.random.Generator, m: int, k: int, dtype: Any = F32) -> Any:
    return rng.normal(0, 1, (m, k)).astype(dtype)


def takes(scheme: Scheme, k: int) -> bool:
    """A minimum can't be cancelled in rows that pad a group; a group of all K is the per-channel case."""
    return not (scheme.mins and k % 32) and not (scheme.group == 192 and k < 192)


SHAPES = [(576, 192), (200, 70), (1, 1), (1000, 130)]


@pytest.mark.parametrize(("k", "n", "scheme"), [(k, n, s) for k, n in SHAPES for s in SCHEMES if takes(s, k)])
def test_gate_over_schemes_and_shapes(rng: np.random.Generator, cpu_level: str, scheme: Scheme, k: int, n: int) -> None:
    known = make_layer(rng, k, n, scheme, bias=True)
    for m in (1, 2, 3, 7, 32):
        x = activations(rng, m, k)
        assert_gemm_close(tf.gemm(x, known.layer), x, known.weights, known.bias)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("out_dtype", [None, F32, F16, BF16])
def test_gate_over_dtypes(rng: np.random.Generator, cpu_level: str, dtype: Any, out_dtype: Any) -> None:
    known = make_layer(rng, 320, 96, W4)
    for m in (1, 5):
        x = activations(rng, m, 320, dtype)
        y = tf.gemm(x, known.layer, out_dtype=out_dtype)
        assert y.dtype == np.dtype(out_dtype or dtype)
        assert_gemm_close(y, x, known.weights)


@pytest.mark.parametrize("scheme", EDGE_SCHEMES, ids=str)
def test_every_m_around_the_blocking_edges(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    """Rows are computed alike whatever comes with them: bit for bit among the rows of one kernel family."""
    known = make_layer(rng, 352, 100, scheme)  # both padded
    x = activations(rng, 70, 352)
    for m in range(1, 71):
        assert_gemm_close(tf.gemm(x[:m], known.layer), x[:m], known.weights)
    x = activations(rng, 200, 352)
    for fewer, more in ((5, 8), (9, 12), (17, 24), (150, 200)):
        np.testing.assert_array_equal(tf.gemm(x[:fewer], known.layer), tf.gemm(x[:more], known.layer)[:fewer])


@pytest.mark.parametrize("scheme", EDGE_SCHEMES, ids=str)
def test_around_the_crossovers(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    known = make_layer(rng, 160, 70, scheme)
    x = activations(rng, 400, 160)
    edges = (24, 32, 40, 48, 64, 95, 96, 112, 127, 128, 191, 192, 255, 256, 383, 384, 399)
    for m in sorted({m for edge in edges for m in (edge, edge + 1)}):
        assert_gemm_close(tf.gemm(x[:m], known.layer), x[:m], known.weights)


@pytest.mark.parametrize("scheme", [s for s in EDGE_SCHEMES if not s.mins], ids=str)
def test_zero_columns_give_exact_zeros(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    """Codes equal to their zero points: no sum of codes and its correction may differ by a rounding."""
    k, n = 384, 70
    zeros = rng.integers(0, 1 << scheme.bits, (k // scheme.group, n), dtype=np.uint8)
    known = make_layer(rng, k, n, scheme, codes=np.repeat(zeros, scheme.group, 0), zeros=zeros)
    x = activations(rng, 200, k)
    x[:, 7] = 1e6
    for m in (1, 2, 3, 4, 5, 8, 12, 16, 17, 40, 64, 200):
        assert not tf.gemm(x[:m], known.layer).any()


@pytest.mark.parametrize("scheme", EDGE_SCHEMES, ids=str)
@pytest.mark.parametrize("m", [2, 5, 20])
def test_rows_near_overflow(rng: np.random.Generator, cpu_level: str, m: int, scheme: Scheme) -> None:
    """Codes times activations of 2^112 and more overflow float32; each weight times them doesn't."""
    if scheme.bits == 4 and m == 2 and cpu_level in ("portable", "avx512"):
        pytest.skip("the fused float kernel of 4 bits scales a group's sum at its end")
    known = make_layer(rng, 384, 70, scheme, scales=np.full((384 // scheme.group, 70), 2.0**-100))
    for exponent in (110, 111, 112, 120, 126):
        x = (np.abs(activations(rng, m, 384)) + 0.5).clip(0.5, 1.9).astype(F32) * F32(2.0**exponent)
        if scheme.mins:
            x *= F32(2.0**-100)
        assert_gemm_close(tf.gemm(x, known.layer, out_dtype=F32), x, known.weights)


def test_more_rows_than_a_chunk(rng: np.random.Generator, cpu_level: str) -> None:
    known = make_layer(rng, 160, 72, W4)
    x = activations(rng, 1000, 160)
    assert_gemm_close(tf.gemm(x, known.layer), x, known.weights)


@pytest.mark.parametrize("scheme", [W4, W8], ids=str)
def test_long_reductions(rng: np.random.Generator, cpu_level: str, scheme: Scheme) -> None:
    known = make_layer(rng, 32768, 8, scheme)
    for m in (1, 9):
        x = activations(rng, m, 32768)
        assert_gemm_close(tf.gemm(x, known.layer), x, known.weights)


def test_wide_layers(rng: np.random.Generator) -> None:
    known = make_layer(rng, 128, 151936, Scheme(4, 128), columns=8)
    x = activations(rng, 1, 128)
    assert_gemm_close(tf.gemm(x, known.layer), x, known.weights)


@pytest.mark.parametrize("columns", [1, 3, 4, 8])
def test_columns_don_t_change_the_result(rng: np.random.Generator, columns: int) -> None:
    state = rng.bit_generator.state
    eight = make_layer(rng, 300, 200, W4)
    rng.bit_generator.state = state
    other = make_layer(rng, 300, 200, W4, columns=columns)
    x = activations(rng, 3, 300)
    np.testing.assert_array_equal(tf.gemm(x, eight.layer), tf.gemm(x, other.layer))


@pytest.mark.parametrize("m", [1, 40])
def test_activation_order(rng: np.random.Generator, cpu_level: str, m: int) -> None:
    known = make_layer(rng, 384, 80, Scheme(4, 128), perm=True, bias=True)
    x = activations(rng, m, 384)
    assert_gemm_close(tf.gemm(x, known.layer), x, known.weights, known.bias)


def test_one_hot_rows_give_the_weights_exactly(rng: np.random.Generator, cpu_level: str) -> None:
    """One product, no sum to round: each weight must come out as (q - z) s, to the bit in bfloat16."""
    for scheme in (W4, W8, Scheme(4, 32, True)):
        known = make_layer(rng, 256, 64, scheme)
        eye = np.eye(256, dtype=F32)
        few = np.concatenate([tf.gemm(eye[i : i + 1], known.layer, out_dtype=BF16) for i in range(0, 256, 17)])
        np.testing.assert_array_equal(few.astype(np.float64), known.weights[::17])
        np.testing.assert_array_equal(tf.gemm(eye, known.layer, out_dtype=BF16).astype(np.float64), known.weights)


def test_bias_is_added_once(rng: np.random.Generator, cpu_level: str) -> None:
    k, n = 128, 64
    known = make_layer(rng, k, n, W4, bias=True, codes=np.full((k, n), 7, np.uint8), zeros=np.full((1, n), 7, np.uint8))
    assert known.bias is not None
    for m in (1, 20):
        np.testing.assert_array_equal(tf.gemm(activations(rng, m, k), known.layer), np.broadcast_to(known.bias, (m, n)))


@pytest.mark.parametrize("value", [2.0**-120, 2.0**-60, 1.0, 2.0**60, 2.0**100])
def test_scales_at_the_extremes(rng: np.random.Generator, cpu_level: str, value: float) -> None:
    known = make_layer(rng, 256, 64, W4, scales=np.full((2, 64), value))
    for m in (1, 9):
        x = activations(rng, m, 256)
        assert_gemm_close(tf.gemm(x, known.layer), x, known.weights)


@pytest.mark.parametrize("factor", [2.0**-130, 2.0**-104, 2.0**-70, 2.0**70, 2.0**110])
def test_activations_at_the_extremes(rng: np.random.Generator, cpu_level: str, factor: float) -> None:
    """Scales bring the products back into range, so that only the handling of the activations is tested."""
    # bfloat16's own denormals have fewer bits: keep what is representable.
    x = (activations(rng, 3, 256) * factor).astype(BF16)
    known = make_layer(rng, 256, 64, W4, scales=np.full((2, 64), 2.0**-10 if factor > 1 else 2.0**20))
    if cpu_level.startswith("avx512_bf16") and factor < 2.0**-126:
        pytest.skip("VDPBF16PS takes denormals as zero")
    for rows in (x[:1], x):
        assert_gemm_close(tf.gemm(rows, known.layer, out_dtype=F32), rows, known.weights)


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_that_bring_sums_back_into_range(rng: np.random.Generator, cpu_level: str, bits: int) -> None:
    """Codes times activations overflow float32; times the scale as well, they don't."""
    if bits == 4 and cpu_level in ("portable", "avx512"):
        pytest.skip("the fused float kernel of 4 bits scales a group's sum at its end")
    known = make_layer(rng, 256, 64, Scheme(bits, 128), scales=np.full((2, 64), 2.0**-100))
    for exponent in (100, 110, 111, 112, 120, 126):
        x = (np.abs(activations(rng, 1, 256)) + 0.5).clip(0.5, 1.9).astype(F32) * F32(2.0**exponent)
        assert_gemm_close(tf.gemm(x, known.layer, out_dtype=F32), x, known.weights)


@pytest.mark.parametrize("outlier", [1e4, 1e6, 1e9, 1e30])
@pytest.mark.parametrize("small", [7, 300], ids=["few", "many"])
@pytest.mark.parametrize("scheme", [W4, W8, Scheme(4, 32)], ids=str)
def test_outliers_among_small_activations(
    rng: np.random.Generator, cpu_level: str, scheme: Scheme, small: int, outlier: float
) -> None:
    """One activation far above the others, on weights that are zero there: the small ones must still be right.

    `small`: how many others there are; a group keeps 22 bits as digits, and apart from them what is lower and little.
    """
    k, n = 640, 64
    middle = 1 << (scheme.bits - 1)
    codes = rng.integers(0, 2 * middle, (k, n), dtype=np.uint8)
    codes[405] = middle
    zeros = np.full((k // scheme.group, n), middle, np.uint8)
    known = make_layer(rng, k, n, scheme, codes=codes, zeros=zeros)
    x = np.zeros((3, k), F32)
    others = 2 * rng.permutation(k // 2)[:small]  # 405 is odd
    x[:, others] = activations(rng, 3, small)
    x[:, 405] = outlier
    for rows in (x[:1], x):
        assert_gemm_close(tf.gemm(rows, known.layer), rows, known.weights)


@pytest.mark.parametrize("scale", [1.0, 0.0, 2.0**-20, -1.0])
@pytest.mark.parametrize("outlier", [1.0, 1e6, 1e12])
@pytest.mark.parametrize("bits", [4, 8])
def test_minima_that_cancel(rng: np.random.Generator, cpu_level: str, bits: int, outlier: float, scale: float) -> None:
    """q s + m is zero, or less than s, for the code 8: large products there must cancel weight by weight."""
    k, n = 256, 64
    codes = rng.integers(0, 1 << bits, (k, n), dtype=np.uint8)
    codes[5] = 8
    scales = np.full((8, n), scale, BF16)
    mins = (-8 * np.full((8, n), scale)).astype(BF16)
    mins[:, ::2] *= BF16(1.03125)
    mins[:, ::5] = 3.0
    source = tf.QuantizedLinear("layer", "test", k, n, bits, 32, codes, tf.CodeOrder.KN, scales, None, mins)
    weights = codes * np.repeat(scales, 32, 0).astype(F32) + np.repeat(mins, 32, 0).astype(F32)
    x = np.zeros((2, k), F32)
    x[:, :8] = rng.normal(size=(2, 8))
    x[:, 5] = outlier
    for rows in (x[:1], x):
        assert_gemm_close(tf.gemm(rows, tf.pack(source)), rows, weights)


@pytest.mark.parametrize("m", [1, 3, 30])
def test_non_finite_activations_spoil_only_their_row(rng: np.random.Generator, cpu_level: str, m: int) -> None:
    known = make_layer(rng, 256, 64, W4)
    x = activations(rng, m, 256)
    clean = tf.gemm(x, known.layer)
    x[m // 2, 17] = np.inf
    y = tf.gemm(x, known.layer)
    assert not np.isfinite(y[m // 2]).any()
    x[m // 2, 17] = np.nan
    assert np.isnan(tf.gemm(x, known.layer)[m // 2]).all()
    others = np.arange(m) != m // 2
    bound = 2 * gemm_bound(256, 0) * (np.abs(x[others]) @ np.abs(known.weights))  # either side may be off by one bound
    assert (np.abs(y[others] - clean[others]) <= bound).all()


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_results_round_to_nearest_even(rng: np.random.Generator, cpu_level: str, dtype: Any) -> None:
    """K = 1, q - z = 1: y = bf16(x) s + bias in float32, narrowed once; NumPy narrows the same sums."""
    n = 4096
    known = make_layer(
        rng,
        1,
        n,
        Scheme(8, 0),
        bias=True,
        codes=np.ones((1, n), np.uint8),
        zeros=np.zeros((1, n), np.uint8),
        scales=np.ones((1, n)),
    )
    bias = known.bias
    assert bias is not None
    exponents = rng.integers(-30, 20, n)
    bias[:] = np.ldexp(rng.uniform(-1, 1, n), exponents)  # float16's denormals and overflow included
    y = tf.gemm(np.zeros((1, 1), F32), known.layer, out_dtype=dtype)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y[0], bias.astype(dtype))


def test_strides_and_out(rng: np.random.Generator, cpu_level: str) -> None:
    known = make_layer(rng, 96, 40, Scheme(4, 32))
    base = activations(rng, 12, 192)
    for x in (base[:, ::2], base[::-1, :96], base[::3, 50:146], np.asfortranarray(base[:, :96]), base.T[:96].T):
        assert_gemm_close(tf.gemm(x, known.layer), x, known.weights)
    x = np.ascontiguousarray(base[:5, :96])
    want = tf.gemm(x, known.layer)
    wide = np.full((5, 100), 7.0, F32)
    for out in (np.empty((5, 40), F32), np.empty((40, 5), F32).T, wide[:, 13:53], np.empty((9, 40), F32)[8:3:-1]):
        assert tf.gemm(x, known.layer, out=out) is out
        np.testing.assert_array_equal(out, want)
    assert (wide[:, :13] == 7).all()
    assert (wide[:, 53:] == 7).all()
    half = np.empty((5, 40), F16)
    tf.gemm(x, known.layer, out=half)
    np.testing.assert_array_equal(half, want.astype(F16))


def test_out_over_the_input(rng: np.random.Generator, cpu_level: str) -> None:
    known = make_layer(rng, 64, 64, Scheme(4, 32))
    for m in (1, 500):
        buffer = activations(rng, m + 1, 64)
        want = tf.gemm(buffer[:m].copy(), known.layer)
        tf.gemm(buffer[:m], known.layer, out=buffer[1:])
        np.testing.assert_array_equal(buffer[1:], want)


def test_unaligned_memory(rng: np.random.Generator) -> None:
    known = make_layer(rng, 64, 32, Scheme(4, 32))
    raw = np.zeros(3 * 64 * 4 + 1, np.uint8)
    x = raw[1:].view(F32).reshape(3, 64)
    x[...] = activations(rng, 3, 64)
    assert_gemm_close(tf.gemm(x, known.layer), np.array(x), known.weights)


def test_no_rows(rng: np.random.Generator) -> None:
    layer = make_layer(rng, 64, 32, Scheme(4, 32)).layer
    assert tf.gemm(np.empty((0, 64), BF16), layer).shape == (0, 32)
    assert tf.linear(np.empty((2, 0, 64), F32), layer).shape == (2, 0, 32)


def test_gemv_and_linear(rng: np.random.Generator) -> None:
    known = make_layer(rng, 64, 32, Scheme(4, 32), bias=True)
    x = activations(rng, 24, 64)
    want = tf.gemm(x, known.layer)
    np.testing.assert_array_equal(tf.gemv(x[3], known.layer), tf.gemm(x[3:4], known.layer)[0])
    np.testing.assert_array_equal(tf.linear(x.reshape(2, 3, 4, 64), known.layer), want.reshape(2, 3, 4, 32))
    np.testing.assert_array_equal(tf.linear(x[3], known.layer), tf.gemv(x[3], known.layer))
    for out in (np.empty((2, 12, 32), F32), np.empty((12, 2, 32), F32).transpose(1, 0, 2)):
        assert tf.linear(x.reshape(2, 12, 64), known.layer, out=out) is out
        np.testing.assert_array_equal(out, want.reshape(2, 12, 32))
    for shape in ((24, 32), (2, 12, 31)):
        with pytest.raises(tf.errors.ShapeError, match="out has shape"):
            tf.linear(x.reshape(2, 12, 64), known.layer, out=np.empty(shape, F32))
    with pytest.raises(tf.errors.DtypeError, match="x is a list"):
        tf.linear([1.0], known.layer)
    with pytest.raises(tf.errors.ShapeError, match=r"\[2, 3\]"):
        tf.linear(x[:2, :3], known.layer)


def test_threads_don_t_change_a_bit(rng: np.random.Generator, cpu_level: str) -> None:
    known = make_layer(rng, 500, 700, W4)
    before = tf.get_num_threads()
    try:
        for m in (1, 3, 50):
            x = activations(rng, m, 500)
            results = []
            for threads in (1, 2, 3, 5):
                tf.set_num_threads(threads)
                assert tf.get_num_threads() == threads
                results.append(tf.gemm(x, known.layer))
            for y in results[1:]:
                np.testing.assert_array_equal(y, results[0])
    finally:
        tf.set_num_threads(before)


def test_python_threads_share_the_pool(rng: np.random.Generator) -> None:
    layers = [make_layer(rng, 300, 256, scheme) for scheme in (W4, W8)]
    xs = [activations(rng, m, 300) for m in (1, 33)]
    want = [[tf.gemm(x, known.layer) for x in xs] for known in layers]
    failures: list[str] = []

    def work(seed: int) -> None:
        for i in range(100):
            a, b = (i + seed) % 2, (i // 2 + seed) % 2
            if not np.array_equal(tf.gemm(xs[b], layers[a].layer), want[a][b]):
                failures.append(f"{seed} {i}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_copies_of_a_layer(rng: np.random.Generator, used: bool) -> None:
    """A copy has its own, aligned memory: NumPy's own copies of an array start at any multiple of 16 bytes."""
    known = make_layer(rng, 300, 200, W4, bias=True, perm=True)
    x = activations(rng, 2, 300)
    want = tf.gemm(x, known.layer, device=None if used else "reference")
    pickled = pickle.dumps(known.layer)
    copies = [copy.copy(known.layer), *(copy.deepcopy(known.layer) for _ in range(4))]
    copies += [pickle.loads(pickled) for _ in range(4)]
    for layer in copies:
        assert layer.data.ctypes.data % tf.layout.ALIGNMENT == 0
        assert layer.layout == known.layer.layout
        np.testing.assert_array_equal(tf.gemm(x, layer, device=None if used else "reference"), want)
    assert not any(np.shares_memory(layer.data, known.layer.data) for layer in copies[1:])


def in_child(program: str, **environment: str) -> str:
    """What a Python program prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_has_its_own_threads() -> None:
    """Without a pool of its own it would wait for ever for threads that fork() did not copy."""
    program = """
import os, warnings
import numpy as np
import tilefuse as tf
warnings.simplefilter("ignore")  # Python warns of fork() in a process with threads
layer = tf.pack(tf.quantize_linear(np.random.default_rng(0).normal(size=(256, 1024))))
x = np.ones((40, 256), np.float32)
tf.set_num_threads(3)
want = tf.gemm(x, layer)
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(tf.gemm(x, layer), want) and tf.get_num_threads() == 3 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert in_child(program).strip() == "0"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TILEFUSE_CPU_LEVEL", "avx1024"),
        ("TILEFUSE_NUM_THREADS", "many"),
        ("TILEFUSE_DEVICE", "gpu"),
        ("TILEFUSE_DEVICE", "\udcff"),  # a byte that is no UTF-8
    ],
)
def test_misspelt_environment(variable: str, value: str) -> None:
    """A setting that can't be followed is an error at the first product, and where devices are compared."""
    program = """
import numpy as np
import tilefuse as tf
layer = tf.pack(tf.quantize_linear(np.ones((32, 8)), group=32))
try:
    tf.gemm(np.ones((2, 32), np.float32), layer)
except tf.errors.DeviceError as error:
    print(error)
"""
    printed = in_child(program, **{variable: value})
    assert variable in printed
    assert repr(value) in printed
    if variable != "TILEFUSE_DEVICE":
        assert in_child(
            "from tilefuse import commands; print(commands.run(['route', '8', '32', '8']))", **{variable: value}
        ).endswith("1\n")


@given(
    k=st.integers(1, 700),
    n=st.integers(1, 300),
    m=st.integers(1, 30),
    scheme=st.sampled_from([s for s in SCHEMES if not s.mins and s.group != 192]),
    bias=st.booleans(),
    perm=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_problems(k: int, n: int, m: int, scheme: Scheme, bias: bool, perm: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    known = make_layer(rng, k, n, scheme, bias=bias, perm=perm)
    x = activations(rng, m, k)
    for level in runtime.cpu_levels():
        with runtime.force_cpu_level(level):
            assert_gemm_close(tf.gemm(x, known.layer), x, known.weights, known.bias)


def test_reference_device(rng: np.random.Generator) -> None:
    known = make_layer(rng, 200, 70, W4, bias=True)
    x = activations(rng, 5, 200)
    want = x.astype(BF16).astype(np.float64) @ known.weights + known.bias
    np.testing.assert_array_equal(tf.gemm(x, known.layer, device="reference"), want.astype(F32))


def test_the_gate_sees_truncation(rng: np.random.Generator) -> None:
    """Weights truncated to bfloat16 instead of rounded pass every bound on the maximum; the mean gives them away."""
    weights = rng.uniform(1, 2, (64, 4096)).astype(F32)
    truncated = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(F32)
    x = np.ones((1, 64), F32)
    error = gemm_error((x.astype(np.float64) @ truncated).astype(F32), x, weights)
    assert error.max <= error.bound
    assert not error.ok
    assert_gemm_close((x.astype(np.float64) @ weights).astype(F32), x, weights)


BAD_CALLS: list[tuple[str, Any, type[Exception], str]] = [
    ("float64", lambda f, x, w: f(x.astype(np.float64), w), tf.errors.DtypeError, "x is float64"),
    ("int", lambda f, x, w: f(x.astype(np.int32), w), tf.errors.DtypeError, "x is int32"),
    ("list", lambda f, x, w: f([[1.0]], w), tf.errors.DtypeError, "x is a list"),
    ("masked", lambda f, x, w: f(np.ma.masked_less(x, 0), w), tf.errors.DtypeError, "masked array"),
    ("big-endian", lambda f, x, w: f(x.astype(">f4"), w), tf.errors.DtypeError, "x is >f4"),
    ("layer", lambda f, x, w: f(x, x), tf.errors.DtypeError, "layer is a ndarray"),
    ("K", lambda f, x, w: f(x[:, :-1], w), tf.errors.ShapeError, "K = 64"),
    ("axes", lambda f, x, w: f(x[None], w), tf.errors.ShapeError, r"\[1, 3, 64\]"),
    ("scalar", lambda f, x, w: f(np.float32(1) * np.ones(()), w), tf.errors.DtypeError, "x is"),
    ("vector", lambda f, x, w: f(x[0], w), tf.errors.ShapeError, "takes"),
    ("compute", lambda f, x, w: f(x, w, compute="int4"), tf.errors.DtypeError, "compute is 'int4'"),
    ("compute array", lambda f, x, w: f(x, w, compute=np.array(["int8", "x"])), tf.errors.DtypeError, "compute is"),
    ("device", lambda f, x, w: f(x, w, device="gpu"), tf.errors.DeviceError, "'gpu'"),
    ("out shape", lambda f, x, w: f(x, w, out=np.empty((3, 33), F32)), tf.errors.ShapeError, r"\[3, 33\]"),
    ("out axes", lambda f, x, w: f(x, w, out=np.empty(32, F32)), tf.errors.ShapeError, "out has shape"),
    (
        "out overlapping itself",
        lambda f, x, w: f(x, w, out=np.lib.stride_tricks.as_strided(np.empty((3, 32), F32), (3, 32), (4, 4))),
        tf.errors.ShapeError,
        "overlap",
    ),
    ("out dtype", lambda f, x, w: f(x, w, out=np.empty((3, 32))), tf.errors.DtypeError, "out is float64"),
    ("out list", lambda f, x, w: f(x, w, out=[0.0]), tf.errors.DtypeError, "out is a list"),
    ("out_dtype", lambda f, x, w: f(x, w, out_dtype="int8"), tf.errors.DtypeError, "out_dtype is int8"),
    ("out_dtype list", lambda f, x, w: f(x, w, out_dtype="f4,,"), tf.errors.DtypeError, "out_dtype is f4,,"),
    ("device list", lambda f, x, w: f(x, w, device=["cpu"]), tf.errors.DeviceError, "cpu"),
    ("out_dtype word", lambda f, x, w: f(x, w, out_dtype="what"), tf.errors.DtypeError, "out_dtype is what"),
    (
        "out and out_dtype",
        lambda f, x, w: f(x, w, out=np.empty((3, 32), F32), out_dtype=F16),
        tf.errors.DtypeError,
        "agree",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), [c[1:] for c in BAD_CALLS], ids=[c[0] for c in BAD_CALLS])
def test_bad_calls(rng: np.random.Generator, call: Any, error: type[Exception], message: str) -> None:
    layer = make_layer(rng, 64, 32, Scheme(4, 32)).layer
    x = activations(rng, 3, 64)
    for _ in range(2):  # a layer that was used takes a shorter way
        with pytest.raises(error, match=message):
            call(tf.gemm, x, layer)
        tf.gemm(x, layer)


def test_linear_many(rng: np.random.Generator) -> None:
    """Any axes, types and layers; what doesn't fit is refused before anything is computed."""
    layers = [make_layer(rng, 64, n, Scheme(4, 32), bias=n == 32).layer for n in (32, 48)]
    calls = [
        (activations(rng, 6, 64).reshape(2, 3, 64), layers[0]),
        (activations(rng, 1, 64)[0].astype(BF16), layers[1]),
    ]
    calls.append((np.empty((0, 64), F32), layers[1]))
    for (x, layer), y in zip(calls, tf.linear_many(calls), strict=True):
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, tf.linear(x, layer))
    assert [y.dtype for y in tf.linear_many(calls, out_dtype=F16)] == [F16] * 3
    assert tf.linear_many([]) == []
    with pytest.raises(tf.errors.ShapeError, match="the last axis must be K = 64"):
        tf.linear_many([*calls, (np.ones((2, 63), F32), layers[0])])
    x, layer = calls[0]
    for bad in (x, (x,), (x, layer, x), layer, None):
        with pytest.raises(tf.errors.DtypeError, match=r"calls\[1\] is a \w+ and no pair"):
            tf.linear_many([calls[0], bad])  # type: ignore[list-item]
    for none in (None, layer, 3):
        with pytest.raises(tf.errors.DtypeError, match=r"calls is a \w+: pass a list"):
            tf.linear_many(none)  # type: ignore[arg-type]
    with pytest.raises(tf.errors.DtypeError, match="layer is a int"):
        tf.linear_many([(np.ones(64, F32), 3)])  # type: ignore[list-item]


def test_read_only_out(rng: np.random.Generator) -> None:
    layer = make_layer(rng, 64, 32, Scheme(4, 32)).layer
    out = np.zeros((3, 32), F32)
    out.flags.writeable = False
    for _ in range(2):
        with pytest.raises(tf.errors.DtypeError, match="read-only"):
            tf.gemm(activations(rng, 3, 64), layer, out=out)
        tf.gemm(activations(rng, 3, 64), layer)
    assert not out.any()


def test_device_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tf.default_device() == "cpu"
    monkeypatch.setenv("TILEFUSE_DEVICE", "reference")
    assert tf.default_device() == "reference"
    tf.set_default_device("cpu")
    assert tf.default_device() == "cpu"
    tf.set_default_device(None)
    with pytest.raises(tf.errors.DeviceError, match="'nope'"):
        tf.set_default_device("nope")
    with pytest.raises(tf.errors.DeviceError, match="num_threads"):
        tf.set_num_threads(0)
    with pytest.raises(tf.errors.DeviceError, match="level"), runtime.force_cpu_level("avx1024"):
        pass


@pytest.mark.peers
def test_torch_tensors(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    known = make_layer(rng, 96, 40, Scheme(4, 32), bias=True)
    base = torch.from_numpy(activations(rng, 6, 96))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = base.to(dtype)
        y = tf.gemm(x, known.layer)
        assert isinstance(y, torch.Tensor)
        assert y.dtype == dtype
        assert_gemm_close(y, x, known.weights, known.bias)
        assert tf.gemm(x, known.layer, out_dtype=torch.float32).dtype == torch.float32
    y32 = tf.gemm(base, known.layer)
    assert torch.equal(tf.gemm(base.T.contiguous().T, known.layer), y32)
    assert torch.equal(tf.linear(base.reshape(2, 3, 96), known.layer), y32.reshape(2, 3, 40))
    out = torch.empty(40, 6).T
    assert tf.gemm(base, known.layer, out=out) is out
    assert torch.equal(out, y32)
    assert torch.equal(tf.gemm(base.clone().requires_grad_(), known.layer), y32)
    assert torch.equal(tf.gemm(torch.nn.Parameter(base), known.layer), y32)
    negated = torch.complex(base, -base).conj().imag  # a view that torch negates when it reads it
    assert negated.is_neg()
    assert torch.equal(tf.gemm(negated, known.layer), y32)
    with pytest.raises(tf.errors.DtypeError, match="sparse"):
        tf.gemm(base.to_sparse(), known.layer)
    with pytest.raises(tf.errors.DtypeError, match="int64"):
        tf.gemm(base.long(), known.layer)
    with pytest.raises(tf.errors.DtypeError, match="meta"):
        tf.gemm(base.to("meta"), known.layer)
