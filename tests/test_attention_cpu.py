"""Attention's CPU kernels, at every level of instructions that this machine has."""

from __future__ import annotations

import functools
import itertools
import zlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import tilefuse
from tilefuse import _core, routing
from tilefuse.tilemix.grid import Grid
from tilefuse.tilemix.reference import attention_exact, attention_tiles, int8_scores, quantise_keys, quantise_rows
from tilefuse.tilemix.routing_map import Routing

pytestmark = pytest.mark.usefixtures("cpu_level")

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 300)
KEY_LENGTHS = (1, 63, 64, 65, 129, 300)
SMOOTHINGS = ("none", "block", "global")

# Against the tile loop of the reference: probabilities round to bfloat16 from exponents that differ in their last
# digits, so that single ones fall to the other side (2^-9 of them); sums of them in different orders.
RELATIVE = 2e-3
WORST = 4 * 2.0**-8


class Operands(NamedTuple):
    q: Array
    k: Array
    v: Array


def operands(
    rng: np.random.Generator,
    q_len: int,
    k_len: int,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 64,
    dim_v: int | None = None,
    dtype: Any = BF16,
) -> Operands:
    """Normal ones; keys share a mean, which smoothing takes out."""
    shapes = [(1, heads, q_len, dim), (1, kv_heads, k_len, dim), (1, kv_heads, k_len, dim if dim_v is None else dim_v)]
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in shapes)
    return Operands(q.astype(dtype), (k + rng.standard_normal(dim, dtype=np.float32)).astype(dtype), v.astype(dtype))


@functools.cache
def case(*key: Any, **sizes: Any) -> Operands:
    """The same operands at every level, so that these share the reference's results."""
    x = operands(np.random.default_rng(zlib.crc32(repr((key, sizes)).encode())), *key, **sizes)
    for each in x:
        each.flags.writeable = False
    return x


_REFERENCES: dict[Any, Any] = {}


def reference(x: Operands, maps: Routing | None, **options: Any) -> Any:
    words = None if maps is None else maps.words.tobytes()
    key = (id(x), words, *sorted(options.items()))
    if key not in _REFERENCES:
        # With the operands, so that their address stays theirs.
        _REFERENCES[key] = x, attention_tiles(*x, maps, **options)
    return _REFERENCES[key][1]


def mixed(x: Operands, *, causal: bool = True, window: int | None = None) -> Routing:
    """A random map in which both paths meet in most rows."""
    grid = Grid(x.q.shape[2], x.k.shape[2], causal=causal, window=window)
    bits = np.random.default_rng(7).random((grid.row_tiles, grid.groups)) < 0.5
    return Routing.from_bits(bits & grid.legal(), grid)


def assert_close(got: Array, expected: Array, v: Array) -> None:
    got = got.astype(np.float64)
    assert np.isfinite(got).all()
    error = np.abs(got - expected)
    assert error.max(initial=0) <= WORST * np.abs(v.astype(np.float64)).max(initial=0)
    norm = np.linalg.norm(expected)
    assert np.linalg.norm(got - expected) <= RELATIVE * norm + 1e-6


def float_out(x: Operands) -> Array:
    """float32, so that the result's own rounding doesn't count."""
    return np.full((*x.q.shape[:-1], x.v.shape[-1]), np.nan, np.float32)


def run(x: Operands, **options: Any) -> Array:
    out: Array = tilefuse.attention(*x, backend="cpu", out=float_out(x), **options)
    return out


# --- what is exact ---


class Probe(NamedTuple):
    q_codes: Array
    q_scales: Array
    k_codes: Array
    k_scales: Array
    means: Array
    scores: Array
    bias: Array


def probe(q: Array, k: Array, smooth: str, granularity: str) -> Probe:
    """The INT8 path's own numbers, of q [L, d] and k [L, d]."""
    (q_len, dim), k_len = q.shape, len(k)
    blocks = -(-k_len // 64)
    found = Probe(
        np.zeros((q_len, dim), np.int8),
        np.zeros(q_len, np.float32),
        np.zeros((k_len, dim), np.int8),
        np.zeros(blocks, np.float32),
        np.zeros((blocks, dim), np.float32),
        np.zeros((q_len, k_len), np.int32),
        np.zeros((q_len, blocks), np.float32),
    )
    code = {np.dtype(np.float32): 0, BF16: 1, np.dtype(np.float16): 2}
    _core.attention_probe(
        q=(q.ctypes.data, code[q.dtype], dim, dim),
        k=(k.ctypes.data, code[k.dtype], dim, dim),
        query_len=q_len,
        key_len=k_len,
        head=0,
        heads=1,
        kv_heads=1,
        d=dim,
        scale_per_row=granularity == "row",
        smoothing=SMOOTHINGS.index(smooth),
        to=tuple(a.ctypes.data for a in found),
    )
    return found


def assert_probe(q: Array, k: Array, smooth: Any, granularity: Any) -> None:
    found = probe(q, k, smooth, granularity)
    rows, keys = quantise_rows(q, granularity), quantise_keys(k, smooth)
    np.testing.assert_array_equal(found.q_codes, rows.codes)
    np.testing.assert_array_equal(found.q_scales, rows.scales)
    np.testing.assert_array_equal(found.k_codes, keys.codes)
    np.testing.assert_array_equal(found.k_scales, keys.scales)
    np.testing.assert_array_equal(found.scores, int8_scores(rows.codes, keys.codes))
    if smooth != "none":
        means = keys.means.astype(np.float32)
        np.testing.assert_array_equal(found.means, means)
        exact = q.astype(BF16).astype(np.float64) @ means.T.astype(np.float64)
        bound = np.abs(q.astype(np.float64)) @ np.abs(means.T.astype(np.float64))
        # fp32 sums of exact products: at most d roundings of 2^-24 each; VDPBF16PS takes denormals for 0.
        assert (np.abs(found.bias - exact) <= (q.shape[1] + 1) * 2.0**-24 * bound * 1.01 + 2.0**-100).all()


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [*((dim, BF16) for dim in (8, 40, 80, 96, 128, 256, 512)), (80, np.float16), (80, np.float32)],
    ids=str,
)
def test_int8_scores_bit_identical(rng: np.random.Generator, dim: int, dtype: Any) -> None:
    for (q_len, k_len), smooth, granularity in zip(
        [(1, 1), (13, 64), (130, 129), (12, 200), (200, 63), (25, 65)],
        itertools.cycle(SMOOTHINGS),
        itertools.cycle(("row", "block")),
        strict=False,
    ):
        x = operands(rng, q_len, k_len, 1, 1, dim, dtype=dtype)
        assert_probe(x.q[0, 0], x.k[0, 0], smooth, granularity)


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("signs", ["+", "-", "+-"])
def test_int8_scores_saturated(dim: int, signs: str) -> None:
    """All codes +-127: what overflows sums of pairs in 16 bits."""
    pattern = np.array([{"+": 1.0, "-": -1.0}[signs[i % len(signs)]] for i in range(dim)], np.float32)
    q = np.tile(pattern, (30, 1)).astype(BF16)
    q[1::2] *= -1
    k = np.ones((130, dim), BF16)
    k[::3] *= -1
    k *= np.where(pattern > 0, 1, -1).astype(BF16)
    assert_probe(q, k, "none", "row")
    assert np.abs(probe(q, k, "none", "row").scores).max() == 127 * 127 * dim


@pytest.mark.parametrize("smooth", SMOOTHINGS)
def test_int8_scores_of_extremes(rng: np.random.Generator, smooth: str) -> None:
    """Zeros, denormals, one outlier a block, and ties of rounding."""
    q = rng.standard_normal((40, 64), dtype=np.float32)
    k = rng.standard_normal((200, 64), dtype=np.float32)
    q[3] = 0
    q[4] *= 1e-39
    q[5, 7] = 3e4
    q[6] = np.arange(64) - 31.5
    q[6, 0] = 127
    k[64:128] = 0
    k[130, 5] = -1e6
    assert_probe(q, k, smooth, "row")


# --- results ---


@pytest.mark.parametrize("q_len", LENGTHS)
def test_lengths(q_len: int) -> None:
    for k_len in KEY_LENGTHS:
        x = case(q_len, k_len, 4, 2, 16)
        for causal in (True, False):
            for maps in (None, mixed(x, causal=causal)):
                expected = reference(x, maps, causal=causal)
                out, lse = tilefuse.attention(
                    *x, routing=maps, causal=causal, return_lse=True, backend="cpu", out=float_out(x)
                )
                assert_close(out, expected.out, x.v)
                seen = np.isfinite(expected.lse)
                assert (np.isneginf(lse) == ~seen).all()
                # Of a sum of up to 300 terms, and of the scores in its exponent.
                assert (np.abs(lse[seen] - expected.lse[seen]) <= 3e-6 * (1 + np.abs(expected.lse[seen]))).all()


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [*((dim, BF16) for dim in (8, 32, 64, 80, 96, 128, 256, 512)), (80, np.float16), (80, np.float32)],
    ids=str,
)
def test_dims(dim: int, dtype: Any) -> None:
    for dim_v in (dim, 24):
        x = case(15, 140, 3, 1, dim, dim_v, dtype)
        for maps, smooth, granularity in (
            (None, "block", "row"),
            (mixed(x), "block", "row"),
            (mixed(x), "global", "block"),
            (routing.one(), "none", "row"),
        ):
            quant = tilefuse.QuantSpec(q=granularity, smooth=smooth)
            built = maps.build(15, 140, causal=True) if isinstance(maps, routing.Template) else maps
            expected = reference(x, built, granularity=granularity, smooth=smooth)
            assert_close(run(x, routing=built, quant=quant), expected.out, x.v)
            own = tilefuse.attention(*x, routing=built, quant=quant, backend="cpu")
            assert own.dtype == dtype
            rounding = {BF16: 2.0**-8, np.dtype(np.float16): 2.0**-10, np.dtype(np.float32): 0}[np.dtype(dtype)]
            np.testing.assert_allclose(
                own.astype(np.float32), run(x, routing=built, quant=quant), rtol=rounding, atol=2.0**-24
            )


@pytest.mark.parametrize("window", [1, 2, 50, 64, 65, 200, 5000])
def test_windows(window: int) -> None:
    for q_len, k_len in ((200, 200), (5, 300), (140, 90)):
        for causal in (True, False):
            x = case(q_len, k_len, 2, 1, 16)
            maps = mixed(x, causal=causal, window=window)
            for each in (None, maps):
                expected = reference(x, each, causal=causal, window=window)
                assert_close(run(x, routing=each, causal=causal, window=window), expected.out, x.v)


@functools.cache
def thousand_exact() -> Array:
    return attention_exact(*case(1000, 1000, 1, 1, 64)).out


def test_a_thousand_tokens() -> None:
    x = case(1000, 1000, 1, 1, 64)
    for maps in (None, routing.local_sink(0.75), routing.one()):
        built = None if maps is None else maps.build(1000, 1000, causal=True)
        assert_close(run(x, routing=maps), reference(x, built).out, x.v)
    exact = thousand_exact()
    assert np.linalg.norm(run(x) - exact) <= 2.5e-3 * np.linalg.norm(exact)
    assert np.linalg.norm(run(x, routing=routing.one()) - exact) <= 2e-2 * np.linalg.norm(exact)


def test_no_key(rng: np.random.Generator) -> None:
    """Queries before the first key, and no keys at all: zeros, and a log of zero."""
    for q_len, k_len in ((200, 70), (3, 0), (130, 1)):
        x = operands(rng, q_len, k_len, 2, 2, 40)
        out, lse = tilefuse.attention(*x, return_lse=True, backend="cpu", out=float_out(x))
        blind = q_len - k_len
        assert (out[:, :, :blind] == 0).all()
        assert np.isneginf(lse[:, :, :blind]).all()
        assert np.isfinite(lse[:, :, blind:]).all()
        assert_close(out, attention_tiles(*x).out, x.v)


def test_one_key_that_dominates(rng: np.random.Generator) -> None:
    x = operands(rng, 140, 300, 1, 1, 64)
    x.k[0, 0, 100] = x.q[0, 0].astype(np.float32).mean(0).astype(BF16) * BF16.type(300)
    for maps in (None, mixed(x), routing.one().build(140, 300, causal=True)):
        assert_close(run(x, routing=maps), attention_tiles(*x, maps).out, x.v)


def test_small_scores(rng: np.random.Generator) -> None:
    x = operands(rng, 130, 190, 1, 1, 64)
    for maps in (None, mixed(x)):
        assert_close(run(x, routing=maps, scale=1e-4), attention_tiles(*x, maps, scale=1e-4).out, x.v)


def test_large_scores(rng: np.random.Generator) -> None:
    """Scores of +-1e5: one key takes all; which of two near ones does is a matter of rounding."""
    x = operands(rng, 130, 190, 1, 1, 64)
    for maps in (None, mixed(x), routing.one().build(130, 190, causal=True)):
        out = run(x, routing=maps, scale=1e4)
        assert np.abs(out).max() <= np.abs(x.v.astype(np.float32)).max() * (1 + 2.0**-8)
        if maps is None:
            scores = x.q[0, 0].astype(np.float64) @ x.k[0, 0].T.astype(np.float64)
            scores[np.arange(190) > np.arange(130)[:, None] + 60] = -np.inf
            best = np.sort(scores, axis=1)
            clear = best[:, -1] - best[:, -2] > 0.5
            assert clear.sum() > 30
            # The weight of the best, rounded to bfloat16, is divided by itself; others have exp(-5000) at most.
            chosen = x.v[0, 0, scores.argmax(axis=1)].astype(np.float32)
            np.testing.assert_allclose(out[0, 0, clear], chosen[clear], rtol=2.0**-8)


# --- properties ---


def test_groups_equal_repeated_keys(rng: np.random.Generator) -> None:
    for q_len, k_len in ((1, 300), (150, 300)):
        for heads in (1, 3, 8, 16):
            x = operands(rng, q_len, k_len, 2 * heads, 2, 32)
            repeated = Operands(x.q, np.repeat(x.k, heads, axis=1), np.repeat(x.v, heads, axis=1))
            for maps in (None, mixed(x)):
                np.testing.assert_array_equal(run(x, routing=maps), run(repeated, routing=maps))


def test_packed_sequences_equal_calls(rng: np.random.Generator) -> None:
    lengths = [(5, 5), (0, 7), (130, 200), (1, 64), (300, 300), (64, 65)]
    x = [operands(rng, a, b, 4, 2, 64) for a, b in lengths]
    packed = [np.concatenate([np.moveaxis(y[i][0], 1, 0) for y in x]) for i in range(3)]
    starts = tuple(np.cumsum([0, *(n[i] for n in lengths)]) for i in range(2))
    for template in (None, routing.band(0.5), routing.one()):
        out = tilefuse.attention(*packed, cu_seqlens=starts, routing=template, backend="cpu")
        for i, y in enumerate(x):
            alone = tilefuse.attention(*y, routing=template, backend="cpu")
            np.testing.assert_array_equal(out[starts[0][i] : starts[0][i + 1]], np.moveaxis(alone[0], 1, 0))


def test_threads_do_not_matter(rng: np.random.Generator) -> None:
    x = operands(rng, 400, 400, 4, 2, 32)
    before = _core.num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 7):
            _core.set_num_threads(threads)
            found.append([run(x), run(x, routing=routing.one()), run(x, routing=mixed(x))])
    finally:
        _core.set_num_threads(before)
    for each in found[1:]:
        for a, b in zip(found[0], each, strict=True):
            np.testing.assert_array_equal(a, b)


def test_prefix_invariance(rng: np.random.Generator) -> None:
    """With a scale a row and the diagonal in 16 bits, later tokens change no bit of a result."""
    length = 400
    x = operands(rng, length, length, 4, 1, 64)
    grid = Grid(length, length, causal=True)
    bits = np.zeros((grid.row_tiles, grid.groups), bool)
    for m in range(grid.row_tiles):
        bits[m, : 2 * m] = np.arange(2 * m) % 3 > 0
    whole = run(x, routing=Routing.from_bits(bits, grid))
    for n in (1, 3, 64, 100, 128, 129, 257, 399):
        part = Operands(*(y[:, :, :n] for y in x))
        small = Grid(n, n, causal=True)
        maps = Routing.from_bits(bits[: small.row_tiles, : small.groups], small)
        np.testing.assert_array_equal(run(part, routing=maps), whole[:, :, :n])


def test_strides(rng: np.random.Generator) -> None:
    """[B, L, H, d] in memory, and a slice of channels of wider rows."""
    x = operands(rng, 100, 130, 4, 2, 64)
    expected = run(x, routing=mixed(x))
    turned = Operands(*(np.ascontiguousarray(y.swapaxes(1, 2)).swapaxes(1, 2) for y in x))
    np.testing.assert_array_equal(run(turned, routing=mixed(x)), expected)
    sliced = Operands(*(np.concatenate([y, y], axis=-1)[..., 64:] for y in x))
    np.testing.assert_array_equal(run(sliced, routing=mixed(x)), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(rng: np.random.Generator, bad: float) -> None:
    """What isn't finite reaches those that see it, and nobody else."""
    at = 150
    for maps in (None, "mixed"):
        clean = operands(rng, 300, 300, 2, 1, 64)
        route = None if maps is None else mixed(clean)
        expected = run(clean, routing=route)
        for which in range(3):
            x = Operands(*(y.copy() for y in clean))
            x[which][0, 0, at, 3] = bad
            out = run(x, routing=route)
            touched = np.zeros((2, 300), bool)
            if which == 0:
                touched[0, at] = True
            else:
                # A block of INT8 keys shares its scale: those that see any key of it.
                touched[:, at if which == 2 or route is None else at // 64 * 64 :] = True
            np.testing.assert_array_equal(out[0][~touched], expected[0][~touched])
            if which == 0:
                assert np.isnan(out[0, 0, at]).all()
            if which == 2:
                assert not np.isfinite(out[0, :, at:, 3]).any()
