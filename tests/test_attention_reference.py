"""The reference of routed attention: codes by hand, masks by what they reveal, outputs within a derived distance."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import oracle_attention as oracle
import pytest

from tilefuse import routing
from tilefuse.errors import RoutingError, ShapeError
from tilefuse.routing import Grid, Routing
from tilefuse.tilemix import reference
from tilefuse.tilemix.reference import attention_exact, attention_tiles, int8_scores, quantise_keys, quantise_rows


def operands(
    seed: int, heads: int, kv_heads: int, query_len: int, key_len: int, depth: int, value_depth: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gaussian q, k, v [2, heads, length, depth] on bfloat16's numbers."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((2, heads, query_len, depth))
    k = rng.standard_normal((2, kv_heads, key_len, depth))
    v = rng.standard_normal((2, kv_heads, key_len, value_depth or depth))
    return oracle.bf16(q), oracle.bf16(k), oracle.bf16(v)


# --- codes ---


def test_codes_of_rows_by_hand() -> None:
    rows = np.array(
        [
            [127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 3],  # scale 1: ties to even
            [-254, 1, 0.5, 3, 253, 5, -7, 2],  # scale 2
            [0, 0, -0.0, 0, 0, 0, 0, 0],  # no scale: 1
            [2.0**-133, -(2.0**-133), 0, 0, 0, 0, 0, 0],  # bfloat16's least number
        ]
    )
    found = quantise_rows(rows)
    assert found.codes.dtype == np.int8
    assert found.codes.tolist() == [
        [127, 0, 2, 2, 0, -2, -126, 3],
        [-127, 0, 0, 2, 126, 2, -4, 1],
        [0] * 8,
        [127, -127, 0, 0, 0, 0, 0, 0],
    ]
    # 253 takes eight bits; the last scale is a subnormal number of fp32.
    assert found.scales.tolist() == [1, 2, 1, float(np.float32(2.0**-133) / np.float32(127))]


def test_rows_are_rounded_to_bfloat16_first() -> None:
    # Beside 1: 1 + 2^-8 is halfway to 1 + 2^-7 and goes to even, 1; 1 + 3 2^-8 to 1 + 2^-6. All by 127 / (1 + 2^-6).
    found = quantise_rows(np.array([[1 + 2**-8, 1 + 3 * 2**-8, -1]], np.float32))
    assert found.scales[0] == np.float32(1 + 2**-6) / np.float32(127)
    assert found.codes.tolist() == [[125, 127, -125]]


def test_one_scale_for_128_rows() -> None:
    rows = np.full((2, 130, 4), 1.0)
    rows[0, 5, 0], rows[0, 129, 0], rows[1, 127, 3] = 127, -254, 254
    found = quantise_rows(rows, "block")
    assert found.scales[0].tolist() == [1.0] * 128 + [2.0] * 2
    assert found.scales[1].tolist() == [2.0] * 128 + [float(np.float32(1) / np.float32(127))] * 2
    assert found.codes[0, 129].tolist() == [-127, 0, 0, 0]
    assert found.codes[0, 128].tolist() == [0, 0, 0, 0]  # 1 / 2, to even


def test_codes_of_keys_by_hand() -> None:
    # A whole block whose mean is 2, and one of three keys: mean 3, from 9 times the reciprocal of 3.
    keys = np.concatenate([np.tile([[1.0], [3.0]], (32, 1)), [[1.0], [2.0], [6.0]]])
    found = quantise_keys(keys, "block")
    assert found.means.dtype == ml_dtypes.bfloat16
    assert found.means.astype(float).tolist() == [[2.0], [3.0]]
    assert found.scales.tolist() == [float(np.float32(x) / np.float32(127)) for x in (1, 3)]
    assert found.codes[:64, 0].tolist() == [-127, 127] * 32
    assert found.codes[64:, 0].tolist() == [-85, -42, 127]  # -84.67, -42.33, 127

    plain = quantise_keys(keys, "none")
    assert not plain.means.astype(float).any()
    assert plain.codes[64:, 0].tolist() == [21, 42, 127]  # 21.17, 42.33, 127

    # 137 / 67 = 2.0448: between 2.03125 and 2.046875, bfloat16's neighbours, nearer to the latter.
    everywhere = quantise_keys(keys, "global")
    assert everywhere.means.astype(float).tolist() == [[2.046875], [2.046875]]
    assert everywhere.codes[66, 0] == 127


def test_means_are_summed_in_key_order() -> None:
    """2^24 + 1 is 2^24 in fp32: ones after it are lost, ones before it are not."""
    keys = np.ones((64, 1), np.float32)
    keys[0], keys[63] = 2.0**24, -(2.0**24)
    assert quantise_keys(keys).means.astype(float).tolist() == [[0.0]]
    keys[0], keys[62] = 1, 2.0**24
    assert quantise_keys(keys).means.astype(float).tolist() == [[62 / 64]]


def test_codes_stay_within_127() -> None:
    rng = np.random.default_rng(0)
    for size in (1e-38, 1e-3, 1.0, 1e30):
        x = rng.standard_normal((300, 64)) * size
        x[7] *= 1e4
        for codes in (quantise_rows(x).codes, quantise_rows(x, "block").codes, quantise_keys(x).codes):
            assert codes.min() >= -127
            assert np.abs(codes.astype(int)).max() == 127


@pytest.mark.parametrize("depth", [8, 64, 256, 1040, 1048, 4096])
def test_int8_scores_are_exact(depth: int) -> None:
    rng = np.random.default_rng(depth)
    q = rng.integers(-127, 128, (3, 5, depth)).astype(np.int8)
    k = rng.integers(-127, 128, (3, 70, depth)).astype(np.int8)
    q[0], k[0] = 127, -127
    k[0, ::2] = 127
    k[0, 1, 0] = 126
    found = int8_scores(q, k)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, np.einsum("hid,hjd->hij", q.astype(np.int64), k.astype(np.int64)))


# --- masks: equal scores make every output the mean of the values that are seen, here the rows of a unit matrix ---


@pytest.mark.parametrize("window", [None, 1, 5, 64, 70, 1000])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (1, 200), (130, 130), (200, 70), (70, 200), (5, 0), (0, 5)])
@pytest.mark.parametrize("name", ["zero", "one"])
def test_masks(query_len: int, key_len: int, causal: bool, window: int | None, name: str) -> None:
    q = np.zeros((1, 1, query_len, 16))
    k = np.random.default_rng(1).standard_normal((1, 1, key_len, 16))
    v = np.eye(key_len)[None, None]
    seen = oracle.visible(query_len, key_len, causal, window)
    count = seen.sum(axis=1)
    want = seen / np.maximum(count, 1)[:, None]
    with np.errstate(divide="ignore"):
        want_lse = np.log(count)
    made = routing.named(name).build(query_len, key_len, causal=causal, window=window)
    for found in (
        attention_exact(q, k, v, causal=causal, window=window),
        attention_tiles(q, k, v, made, causal=causal, window=window),
    ):
        np.testing.assert_allclose(found.out[0, 0], want, rtol=1e-6)
        np.testing.assert_allclose(found.lse[0, 0], want_lse, rtol=1e-6)


def test_exact_attention_by_hand() -> None:
    # Scores log 1 and log 3 (d = 1, scale 1): weights 1/4 and 3/4. Two query heads to a KV head.
    q = np.array([1.0, 2.0]).reshape(1, 2, 1, 1)
    k = np.array([0.0, math.log(3)]).reshape(1, 1, 2, 1)
    v = np.array([[8.0, 0.0], [0.0, 4.0]]).reshape(1, 1, 2, 2)
    found = attention_exact(q, k, v, scale=1.0)
    np.testing.assert_allclose(found.out[0, :, 0], [[2, 3], [0.8, 3.6]], rtol=1e-14)
    np.testing.assert_allclose(found.lse[0, :, 0], np.log([4, 10]), rtol=1e-14)
    # The default scale of d = 1 is 1; of d = 4, a half.
    np.testing.assert_array_equal(attention_exact(q, k, v).out, found.out)
    wide = [np.concatenate([x] + [np.zeros_like(x)] * 3, axis=-1) for x in (2 * q, k)]
    np.testing.assert_allclose(attention_exact(*wide, v).out, found.out, rtol=1e-14)


# --- the tile loop, within what an error analysis allows ---

CASES: list[dict[str, Any]] = [
    {"shape": (2, 2, 300, 300, 64)},
    {"shape": (4, 1, 129, 129, 80), "smooth": "global"},
    {"shape": (4, 2, 128, 330, 96), "smooth": "none", "window": 150},
    {"shape": (1, 1, 1, 333, 128)},
    {"shape": (3, 3, 64, 63, 32), "causal": False},
    {"shape": (2, 1, 300, 200, 256), "granularity": "block"},
    {"shape": (2, 1, 65, 260, 64, 40), "scale": 0.3, "granularity": "block", "smooth": "global"},
]


def check(case: dict[str, Any], make: Any, seed: int = 0, shift: float = 0.0) -> float:
    """Asserts the bound on every output and lse; returns the relative L2 error."""
    case = dict(case)
    shape = case.pop("shape")
    q, k, v = operands(seed, *shape)
    k = oracle.bf16(k + shift)
    causal, window = case.get("causal", True), case.get("window")
    scale = case.get("scale", shape[4] ** -0.5)
    made = make.build(shape[2], shape[3], causal=causal, window=window)
    found = attention_tiles(q, k, v, made, **case)
    seen = oracle.visible(shape[2], shape[3], causal, window)
    int8 = oracle.expand(made.bits(), made.grid.group, shape[2], shape[3])
    squares = [0.0, 0.0]
    for b in range(2):
        for h in range(shape[0]):
            at = h // (shape[0] // shape[1])
            out, lse, size = oracle.softmax(q[b, h], k[b, at], v[b, at], seen, scale)
            error = oracle.score_error(
                q[b, h],
                k[b, at],
                seen,
                int8,
                scale,
                smooth=case.get("smooth", "block"),
                block_rows=case.get("granularity") == "block",
            )
            difference = found.out[b, h] - out
            assert (np.abs(difference) <= oracle.output_bound(error, size, shape[3])).all()
            some = seen.any(axis=1)
            assert (found.lse[b, h][~some] == -np.inf).all()
            off = np.abs(found.lse[b, h][some] - lse[some])
            assert (off <= error[some] + (shape[3] + 8) * oracle.UNIT * (1 + np.abs(lse[some]))).all()
            squares[0] += float((difference**2).sum())
            squares[1] += float((out**2).sum())
    return math.sqrt(squares[0] / squares[1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "x".join(map(str, case["shape"])))
def test_tiles_are_within_the_bound_of_exact_attention(case: dict[str, Any]) -> None:
    assert check(case, routing.zero()) <= 2.5e-3
    # What is usual of INT8 is far less than what is possible; it grows with the scores.
    usual = 2e-2 * case.get("scale", case["shape"][4] ** -0.5) * case["shape"][4] ** 0.5
    for make in (routing.one(), routing.bigbird(0.5), routing.local_sink(0.4, group=2), routing.row_random(0.75)):
        assert check(case, make) <= usual


def test_the_bound_is_not_idle() -> None:
    """A score that is wrong by a tenth of a nat breaks it where scores are 16-bit."""
    q, k, v = operands(0, 1, 1, 128, 128, 64)
    found = attention_tiles(q, k, v, scale=0.125 * 1.05).out[0, 0]
    seen = oracle.visible(128, 128, True, None)
    out, _, size = oracle.softmax(q[0, 0], k[0, 0], v[0, 0], seen, 0.125)
    error = oracle.score_error(
        q[0, 0], k[0, 0], seen, np.zeros((128, 128), bool), 0.125, smooth="none", block_rows=False
    )
    assert (np.abs(found - out) > oracle.output_bound(error, size, 128)).any()


def test_smoothing_in_mixed_rows() -> None:
    """Keys with a mean of 40: INT8 scores less q . mean would be of another row than the 16-bit ones beside them.

    Without smoothing they are far off; with it a half-routed map is within twice the error of all INT8.
    """
    shape = (2, 1, 400, 400, 64)
    plain = check({"shape": shape, "smooth": "none"}, routing.row_random(0.5), shift=40)
    for smooth in ("block", "global"):
        uniform = check({"shape": shape, "smooth": smooth}, routing.one(), shift=40)
        mixed = check({"shape": shape, "smooth": smooth}, routing.row_random(0.5), shift=40)
        assert mixed <= 2 * uniform
        assert mixed < plain / 4


def test_deviation_grows_with_coverage() -> None:
    """Of nested maps, on gaussian and on local data; a twentieth is left for chance."""
    q, k, v = (x[:1] for x in operands(3, 1, 1, 384, 384, 64))
    ramp = np.linspace(0, 24, 384)[None, None, :, None] * np.ones(16)
    turn = np.concatenate([np.cos(ramp * 2.0 ** -np.arange(16)), np.sin(ramp * 2.0 ** -np.arange(16))] * 2, axis=-1)
    for keys, queries in ((k, q), (oracle.bf16(k * 0.5 + 2 * turn), oracle.bf16(q * 0.5 + 2 * turn))):
        exact = attention_tiles(queries, keys, v).out
        for layout in (routing.band, routing.local_sink, routing.bigbird, routing.row_random):
            made = [layout(c, seq_len=384) for c in (0.0, 0.25, 0.5, 0.75, 1.0)]
            steps = [float(np.abs(attention_tiles(queries, keys, v, m).out - exact).mean()) for m in made]
            assert steps[0] == 0
            assert all(after >= 0.95 * before for before, after in itertools.pairwise(steps)), steps


def test_a_map_of_zeros_is_no_map() -> None:
    q, k, v = operands(4, 2, 1, 300, 300, 64)
    plain, zero = attention_tiles(q, k, v), attention_tiles(q, k, v, routing.zero(seq_len=300))
    np.testing.assert_array_equal(plain.out, zero.out)
    np.testing.assert_array_equal(plain.lse, zero.lse)


def test_a_map_of_each_head() -> None:
    q, k, v = operands(5, 4, 2, 300, 300, 64)
    rng = np.random.default_rng(5)
    bits = rng.random((2, 3, 5)) < 0.5
    found = attention_tiles(q, k, v, Routing.from_bits(bits, Grid(300, 300)))
    for head in range(2):
        one = Routing.from_bits(bits[head], Grid(300, 300))
        heads = slice(2 * head, 2 * head + 2)
        kv = slice(head, head + 1)
        alone = attention_tiles(q[:, heads], k[:, kv], v[:, kv], one)
        np.testing.assert_array_equal(found.out[:, heads], alone.out)


def test_shared_heads_are_repeated_heads() -> None:
    q, k, v = operands(6, 6, 2, 200, 200, 64)
    made = routing.bigbird(0.5, seq_len=200)
    shared = attention_tiles(q, k, v, made)
    repeated = attention_tiles(q, np.repeat(k, 3, axis=1), np.repeat(v, 3, axis=1), made)
    # The same sums, which a library may add up in another order.
    np.testing.assert_allclose(shared.out, repeated.out, rtol=0, atol=2e-5)


def test_tiles_in_any_order() -> None:
    """Another order moves the running maximum, so weights are rounded to bfloat16 elsewhere: each by 2^-8 at most."""
    q, k, v = operands(7, 2, 2, 500, 500, 64)
    made = routing.row_random(0.5, seq_len=500)
    first = attention_tiles(q, k, v, made)
    ascending = attention_tiles(q, k, v, made, order="ascending")
    size = attention_tiles(q, k, np.abs(v), made).out
    assert (np.abs(first.out - ascending.out) <= 2.1 * oracle.UNIT_BF16 * size).all()
    np.testing.assert_allclose(first.lse, ascending.lse, rtol=0, atol=1e-5)


def test_an_open_block_is_a_block_without_its_bit() -> None:
    q, k, v = operands(8, 2, 1, 300, 300, 64)
    one = routing.one(seq_len=300)
    bits = one.bits()
    bits[:, 4] = False  # keys 256 to 299
    kept = attention_tiles(q, k, v, Routing.from_bits(bits, one.grid))
    np.testing.assert_array_equal(attention_tiles(q, k, v, one, open_block_16bit=True).out, kept.out)
    whole = routing.one(seq_len=256)
    q, k, v = (x[:, :, :256] for x in (q, k, v))
    for open_block in (False, True):
        found = attention_tiles(q, k, v, whole, open_block_16bit=open_block)
        np.testing.assert_array_equal(found.out, attention_tiles(q, k, v, whole).out)


def test_outputs_do_not_depend_on_what_comes_later() -> None:
    """With the diagonal in 16 bits and a scale for each row, and maps of the context's capacity: however it is cut."""
    q, k, v = operands(9, 2, 1, 400, 400, 64)
    make = routing.row_random(0.6, protect="diag")
    whole = attention_tiles(q, k, v, make.build(400, capacity=1024))
    for start, stop in ((0, 128), (128, 200), (200, 256), (256, 400), (384, 399)):
        made = make.build(stop - start, stop, capacity=1024)
        part = attention_tiles(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], made)
        np.testing.assert_allclose(part.out, whole.out[:, :, start:stop], rtol=0, atol=2e-5)


def test_halves_of_the_keys_merge_by_their_lse() -> None:
    q, k, v = operands(10, 2, 1, 100, 256, 64)
    first = attention_tiles(q, k[:, :, :128], v[:, :, :128], causal=False)
    second = attention_tiles(q, k[:, :, 128:], v[:, :, 128:], causal=False)
    lse = np.logaddexp(first.lse, second.lse)
    merged = sum(x.out * np.exp(x.lse - lse)[..., None] for x in (first, second))
    both = attention_tiles(q, k, v, causal=False)
    size = attention_tiles(q, k, np.abs(v), causal=False).out
    assert (np.abs(merged - both.out) <= 2.1 * oracle.UNIT_BF16 * size).all()
    np.testing.assert_allclose(lse, both.lse, rtol=0, atol=1e-5)


def test_equal_values_come_out_as_they_are() -> None:
    """Weights that are rounded to bfloat16 add up to within 2^-8 of the fp32 ones that they are divided by."""
    q, k, _ = operands(11, 2, 1, 300, 300, 64)
    v = np.full((2, 1, 300, 24), 1.375)
    for name in ("zero", "one", "bigbird"):
        found = attention_tiles(q, k, v, routing.named(name).build(300)).out
        np.testing.assert_allclose(found, 1.375, rtol=1.05 * oracle.UNIT_BF16)


def test_one_key_that_dominates() -> None:
    q, k, v = operands(12, 1, 1, 200, 200, 64)
    q[..., 0], k[..., 0] = 100, 0
    k[:, :, 70, 0] = 800  # a score of 1e4 beside ones of some tens
    for name in ("zero", "one", "row_random"):
        found = attention_tiles(q, k, v, routing.named(name).build(200))
        np.testing.assert_allclose(
            found.out[:, 0, 70:], np.broadcast_to(v[:, 0, 70:71], (2, 130, 64)), rtol=1.05 * oracle.UNIT_BF16
        )
        assert np.isfinite(found.out).all()
        np.testing.assert_allclose(found.lse[:, 0, 70:], 1e4, rtol=0.01)


def test_scores_of_any_size() -> None:
    q, k, v = operands(13, 1, 1, 200, 200, 64)
    for scale in (1e-30, 1e3):
        for name in ("zero", "one", "row_random"):
            found = attention_tiles(q, k, v, routing.named(name).build(200), scale=scale)
            assert np.isfinite(found.out).all()
            assert np.isfinite(found.lse).all()
            assert np.abs(found.out).max() <= np.abs(v).max() * (1 + 2 * oracle.UNIT_BF16)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("name", ["zero", "one"])
def test_what_is_not_finite_spreads(value: float, which: int, name: str) -> None:
    """To the query it is of, or to all that see it; never to a row tile that does not, and never to a zero."""
    arrays = list(operands(16, 1, 1, 300, 300, 64))
    made = routing.named(name).build(300)
    clean = attention_tiles(*arrays, made)
    arrays[which][0, 0, 150, 3] = value
    found = attention_tiles(*arrays, made)
    np.testing.assert_array_equal(found.out[1], clean.out[1])
    np.testing.assert_array_equal(found.out[0, 0, :128], clean.out[0, 0, :128])
    seeing = slice(150, 151) if which == 0 else slice(150, 300)
    columns = slice(3, 4) if which == 2 else slice(None)
    # A key whose 16-bit score is -Inf has no weight, and harms nobody.
    if which != 1 or np.isnan(value) or name == "one":
        assert not np.isfinite(found.out[0, 0, seeing, columns]).any()


@pytest.mark.peers
def test_exact_attention_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (x.astype(np.float64) for x in operands(14, 4, 2, 70, 70, 32))
    found = attention_exact(q, k, v)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    np.testing.assert_allclose(found.out, want.numpy(), rtol=1e-12, atol=1e-14)


def test_float16_and_float32_are_rounded_to_bfloat16() -> None:
    q, k, v = operands(15, 1, 1, 100, 100, 64)
    noisy = [x.astype(np.float32) * np.float32(1 + 2.0**-12) for x in (q, k, v)]
    made = routing.bigbird(0.5, seq_len=100)
    want = attention_tiles(q, k, v, made).out
    np.testing.assert_array_equal(attention_tiles(*noisy, made).out, want)
    half = [x.astype(np.float16) for x in (q, k, v)]
    np.testing.assert_array_equal(half[0].astype(np.float32), q)
    np.testing.assert_array_equal(attention_tiles(*half, made).out, want)
    small = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v)]
    np.testing.assert_array_equal(attention_tiles(*small, made).out, want)


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda q, k, v: attention_tiles(q[0], k, v), ShapeError, "3, 4, 4 axes"),
        (lambda q, k, v: attention_tiles(q, k[..., :8], v), ShapeError, "depth"),
        (lambda q, k, v: attention_tiles(q, k, v[:, :, :9]), ShapeError, "keys"),
        (lambda q, k, v: attention_exact(q[:, :3], k, v), ShapeError, "3 heads and k 2"),
        (lambda q, k, v: attention_exact(q, k, v, scale=0), RoutingError, "scale is 0"),
        (lambda q, k, v: attention_tiles(q, k, v, routing.one(seq_len=9)), RoutingError, "routing is of"),
        (
            lambda q, k, v: attention_tiles(q, k, v, routing.one(seq_len=10), causal=False),
            RoutingError,
            "routing is of",
        ),
        (
            lambda q, k, v: attention_tiles(q, k, v, Routing.from_bits(np.ones((3, 1, 1), bool), Grid(10, 10))),
            RoutingError,
            "3 heads",
        ),
        (lambda q, k, v: attention_tiles(q, k, v, smooth="all"), RoutingError, "smooth is 'all'"),
        (lambda q, k, v: attention_tiles(q, k, v, granularity="key"), RoutingError, "granularity is 'key'"),
    ],
)
def test_wrong_calls_are_named(call: Any, error: type[Exception], named: str) -> None:
    q, k, v = operands(0, 4, 2, 10, 10, 16)
    with pytest.raises(error, match=named):
        call(q, k, v)


def test_the_factor_of_scores() -> None:
    # 0.125 log2(e), and one whose fp32 product differs from the rounded real one in the last bit.
    assert reference.score_factor(0.125) == np.float32(0.125) * np.float32(1.44269504)
    assert reference.score_factor(0.1).dtype == np.float32
