"""`tilefuse.attention`: arrays of every kind, shapes, masks, options; and what it refuses."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilefuse as tf
from tilefuse import errors, routing
from tilefuse.tilemix.reference import attention_exact, attention_tiles

BF16, F16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32)

ROUNDED = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}
"""Half a unit in the last place of results, relative."""


def arrays(
    rng: np.random.Generator, shape: tuple[int, int, int, int, int, int], dtype: Any = F32, dv: int | None = None
) -> list[Any]:
    """q, k, v of B, Hq, Hk, Lq, Lk, d."""
    b, hq, hk, lq, lk, d = shape
    shapes = (b, hq, lq, d), (b, hk, lk, d), (b, hk, lk, dv or d)
    return [rng.standard_normal(s).astype(np.float32).astype(dtype) for s in shapes]


def assert_close(found: Any, reference: Any, dtype: Any = F32) -> None:
    """Beside the tile loop with the same map: probabilities differ by a unit of bfloat16 where their exponential is on
    the other side of a tie, the rest by float32's rounding; results are rounded once more."""
    found, reference = np.asarray(found).astype(np.float64), np.asarray(reference).astype(np.float64)
    assert found.shape == reference.shape
    norm = np.linalg.norm(reference)
    assert np.linalg.norm(found - reference) <= (2e-3 + ROUNDED[dtype]) * norm
    assert np.abs(found - reference).max(initial=0) <= 4 * 2.0**-8 * np.abs(reference).max(initial=0) + 1e-6


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 8), (2, 4, 2, 70, 130, 64), (1, 3, 3, 129, 129, 80)], ids=str)
def test_arrays(rng: np.random.Generator, shape: Any, dtype: Any) -> None:
    q, k, v = arrays(rng, shape, dtype)
    for name in (None, "one"):
        out, lse = tf.attention(q, k, v, routing=name, return_lse=True)
        assert out.dtype == dtype
        assert lse.dtype == np.float32
        made = routing.one(seq_len=shape[4], query_len=shape[3]) if name else None
        reference = attention_tiles(q, k, v, made)
        assert_close(out, reference.out, dtype)
        np.testing.assert_allclose(lse, reference.lse, atol=1e-5, rtol=1e-5)
        again = tf.attention(q, k, v, routing=name, backend="reference")
        assert again.dtype == dtype
        assert_close(again, reference.out, dtype)


@pytest.mark.parametrize("d", [1, 8, 20, 96, 128, 256])
def test_channels(rng: np.random.Generator, d: int) -> None:
    q, k, v = arrays(rng, (1, 2, 1, 40, 90, d), BF16, dv=d + 3)
    out = tf.attention(q, k, v, routing="one")
    assert out.shape == (1, 2, 40, d + 3)
    assert_close(out, attention_tiles(q, k, v, routing.one(seq_len=90, query_len=40)).out, BF16)
    exact = attention_exact(q, k, v).out
    assert np.linalg.norm(tf.attention(q, k, v) - exact) <= 8e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("lengths", [(5, 200), (200, 200), (200, 130)], ids=str)
def test_masks(rng: np.random.Generator, lengths: tuple[int, int], window: int | None, causal: bool) -> None:
    q, k, v = arrays(rng, (1, 2, 1, *lengths, 32))
    out, lse = tf.attention(q, k, v, causal=causal, window=window, return_lse=True)
    exact = attention_exact(q, k, v, causal=causal, window=window)
    # bfloat16 operands: some 2^-9 of each factor, and of each probability.
    assert np.linalg.norm(out - exact.out) <= 6e-3 * np.linalg.norm(exact.out)
    np.testing.assert_allclose(lse, exact.lse, atol=3e-2)
    hidden = np.isneginf(exact.lse)
    assert not out[hidden].any()
    assert np.isneginf(lse[hidden]).all()


def test_a_scale(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, (1, 1, 1, 30, 30, 16))
    np.testing.assert_array_equal(tf.attention(q, k, v), tf.attention(q, k, v, scale=0.25))
    assert_close(tf.attention(q, k, v, scale=2), attention_tiles(q, k, v, scale=2).out)


def test_packed_sequences_are_calls_of_their_own(rng: np.random.Generator) -> None:
    q_lens, k_lens = [0, 3, 200, 1, 64], [5, 3, 260, 0, 64]
    starts_q, starts_k = np.cumsum([0, *q_lens]), np.cumsum([0, *k_lens])
    q = rng.standard_normal((starts_q[-1], 4, 64)).astype(BF16)
    k, v = (rng.standard_normal((starts_k[-1], 2, 64)).astype(BF16) for _ in range(2))
    for name in (None, "local_sink", "one"):
        out, lse = tf.attention(
            q, k, v, cu_seqlens=(starts_q, starts_k.tolist()), routing=name, return_lse=True, window=100
        )
        assert lse.shape == q.shape[:2]
        for b in range(len(q_lens)):
            rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
            one, one_lse = tf.attention(
                *(x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])),
                routing=name,
                window=100,
                return_lse=True,
            )
            np.testing.assert_array_equal(out[rows].swapaxes(0, 1), one[0])
            np.testing.assert_array_equal(lse[rows].T, one_lse[0])
    # Maps of sequences, one by one.
    maps = [None, "one", routing.band(0.25, seq_len=260, query_len=200, window=100), "zero", None]
    out = tf.attention(q, k, v, cu_seqlens=(starts_q, starts_k), routing=maps, window=100)
    rows, keys = slice(3, 203), slice(8, 268)
    one = tf.attention(*(x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])), routing=maps[2], window=100)
    np.testing.assert_array_equal(out[rows].swapaxes(0, 1), one[0])


def test_one_offsets_serve_queries_and_keys(rng: np.random.Generator) -> None:
    q, k, v = (rng.standard_normal((10, 1, 16)).astype(F32) for _ in range(3))
    out = tf.attention(q, k, v, cu_seqlens=[0, 10])
    np.testing.assert_array_equal(out, tf.attention(q, k, v, cu_seqlens=(np.int32([0, 10]), np.uint64([0, 10]))))
    np.testing.assert_array_equal(out[:, 0], tf.attention(*(x.swapaxes(0, 1)[None] for x in (q, k, v)))[0, 0])


def test_heads_that_share_keys_are_repeated_keys(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, (1, 6, 2, 140, 140, 64))
    for name in (None, "bigbird"):
        shared = tf.attention(q, k, v, routing=name)
        repeated = tf.attention(q, k.repeat(3, axis=1), v.repeat(3, axis=1), routing=name)
        np.testing.assert_array_equal(shared, repeated)


def test_maps_of_heads(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, (2, 4, 2, 256, 256, 32))
    grid = routing.Grid(256, 256)
    bits = np.zeros((2, grid.row_tiles, grid.groups), bool)
    bits[1] = True
    out = tf.attention(q, k, v, routing=routing.Routing.from_bits(bits, grid))
    np.testing.assert_array_equal(out[:, :2], tf.attention(q, k, v)[:, :2])
    np.testing.assert_array_equal(out[:, 2:], tf.attention(q, k, v, routing="one")[:, 2:])


def test_empty(rng: np.random.Generator) -> None:
    for b, lq, lk in ((0, 3, 3), (1, 0, 3), (2, 3, 0)):
        out, lse = tf.attention(*arrays(rng, (b, 2, 1, lq, lk, 8)), routing="one", return_lse=True)
        assert out.shape == (b, 2, lq, 8)
        assert not out.any()
        assert np.isneginf(lse).all()


def test_strides_need_no_copy(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, (2, 4, 2, 60, 60, 32), BF16)
    expected = tf.attention(q, k, v)

    def moved(x: Any) -> Any:
        """[B, H, L, d] as a view of [B, L, 3, H, d] of which it is the second."""
        room = np.full((x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3]), np.nan, x.dtype)
        room[:, :, 1] = x.swapaxes(1, 2)
        return room[:, :, 1].swapaxes(1, 2)

    np.testing.assert_array_equal(tf.attention(moved(q), moved(k), moved(v)), expected)
    backwards = [x[:, :, ::-1].copy()[:, :, ::-1] for x in (q, k, v)]
    np.testing.assert_array_equal(tf.attention(*backwards), expected)
    columns = [np.asfortranarray(x) for x in (q, k, v)]
    np.testing.assert_array_equal(tf.attention(*columns), expected)
    same = np.broadcast_to(q[:1], (3, *q.shape[1:]))
    np.testing.assert_array_equal(
        tf.attention(same, *(np.broadcast_to(x[:1], (3, *x.shape[1:])) for x in (k, v)))[2], expected[0]
    )


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_out(rng: np.random.Generator, dtype: Any) -> None:
    q, k, v = arrays(rng, (1, 2, 2, 50, 50, 24), F32)
    expected = tf.attention(q, k, v).astype(dtype)
    room = np.zeros((1, 50, 2, 30), dtype)
    out = room[..., 2:26].swapaxes(1, 2)
    assert tf.attention(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert not room[..., :2].any()
    assert not room[..., 26:].any()
    scattered = np.zeros((1, 2, 50, 48), dtype)[..., ::2]
    tf.attention(q, k, v, out=scattered)
    np.testing.assert_array_equal(scattered, expected)
    if dtype == F32:
        tf.attention(q, k, v, out=k)
        np.testing.assert_array_equal(k, expected)


def test_torch(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = arrays(rng, (2, 4, 2, 60, 70, 32))
    expected, lse = tf.attention(q, k, v, return_lse=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensors = [torch.from_numpy(x).to(dtype) for x in (q, k, v)]
        out, out_lse = tf.attention(*tensors, return_lse=True)
        assert isinstance(out, torch.Tensor)
        assert isinstance(out_lse, torch.Tensor)
        assert out.dtype == dtype
        if dtype != torch.float16:  # whose values are other ones
            torch.testing.assert_close(out, torch.from_numpy(expected).to(dtype), rtol=0, atol=0)
            np.testing.assert_array_equal(out_lse.numpy(), lse)
        # [B, L, H, d] seen as [B, H, L, d], as models have it.
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        assert torch.equal(tf.attention(*views), out)
        into = torch.empty(2, 60, 4, 32, dtype=dtype).transpose(1, 2)
        assert tf.attention(*views, out=into) is into
        assert torch.equal(into, out)
    starts = torch.tensor([0, 20, 60], dtype=torch.int32)
    packed = [torch.from_numpy(x[0].swapaxes(0, 1)[:60].copy()) for x in (q, k, v)]
    out = tf.attention(*packed, cu_seqlens=starts, routing="one")
    again = tf.attention(*(x.numpy() for x in packed), cu_seqlens=[0, 20, 60], routing="one")
    np.testing.assert_array_equal(out.numpy(), again)
    with pytest.raises(errors.DtypeError, match=r"q requires a gradient.*no_grad"):
        tf.attention(packed[0].clone().requires_grad_(), *packed[1:], cu_seqlens=starts)
    with torch.no_grad():
        tf.attention(packed[0].clone().requires_grad_(), *packed[1:], cu_seqlens=starts)
    with pytest.raises(errors.DtypeError, match="k is on meta"):
        tf.attention(packed[0], packed[1].to("meta"), packed[2], cu_seqlens=starts, backend="cpu")


@pytest.mark.parametrize("name", [None, "one"])
def test_not_finite(cpu_level: str, name: str | None) -> None:
    """NaN wherever the operand is seen; row tiles that see nothing of it have the bits that they have without it."""
    shape = (1, 1, 1, 300, 300, 32)
    clean = tf.attention(*arrays(np.random.default_rng(5), shape), routing=name)
    for bad in (np.nan, np.inf, -np.inf):
        q, k, v = arrays(np.random.default_rng(5), shape)
        q[0, 0, 100, 3] = bad
        out = tf.attention(q, k, v, routing=name)
        assert np.isnan(out[0, 0, 100]).all()
        np.testing.assert_array_equal(np.delete(out, 100, 2), np.delete(clean, 100, 2))
        q, k, v = arrays(np.random.default_rng(5), shape)
        k[0, 0, 150, 3] = bad
        out = tf.attention(q, k, v, routing=name)
        # An Inf alone may also be a weight of 0 in 16 bits.
        if np.isnan(bad) or name:
            assert np.isnan(out[0, 0, 150:]).all()
        np.testing.assert_array_equal(out[0, 0, :128], clean[0, 0, :128])
        q, k, v = arrays(np.random.default_rng(5), shape)
        v[0, 0, 150, 3] = bad
        out = tf.attention(q, k, v, routing=name)
        assert not np.isfinite(out[0, 0, 150:, 3]).any()
        np.testing.assert_array_equal(np.delete(out, 3, 3), np.delete(clean, 3, 3))
        np.testing.assert_array_equal(out[0, 0, :128], clean[0, 0, :128])


def test_beyond_bfloat16(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, (1, 1, 1, 4, 4, 8))
    v[...] = 3.4e38
    assert not np.isfinite(tf.attention(q, k, v)).any()


BAD: list[tuple[str, type[Exception], str]] = [
    ("q=None", errors.DtypeError, "q is a NoneType: pass a NumPy array or a torch tensor"),
    ("q=q.tolist()", errors.DtypeError, "q is a list"),
    ("q=q[0]", errors.ShapeError, r"q has shape \[2, 5, 8\]: expected \[B, H, L, d\], or"),
    ("q=q.astype(float)", errors.DtypeError, "q is float64: pass float32, bfloat16"),
    ("q=q.astype('>f4')", errors.DtypeError, "q is >f4"),
    ("k=k.astype(np.int8)", errors.DtypeError, "k is int8"),
    ("v=np.ma.masked_array(v)", errors.DtypeError, "v is a masked array"),
    ("k=None", errors.DtypeError, "k is None: pass an array, or a kv_cache"),
    ("q=np.zeros((1, 2, 5, 513), np.float32), k=np.zeros((1, 1, 5, 513), np.float32)", errors.ShapeError, "513"),
    ("v=np.zeros((1, 1, 5, 513), np.float32)", errors.ShapeError, "v has 513 channels"),
    ("v=np.zeros((1, 1, 5, 0), np.float32)", errors.ShapeError, "v has 0 channels"),
    ("q=np.zeros((1, 3, 5, 8), np.float32), k=k.repeat(2, 1), v=v.repeat(2, 1)", errors.ShapeError, "3 heads and k 2"),
    ("k=k[:, :0], v=v[:, :0]", errors.ShapeError, "q has 2 heads and k 0"),
    ("k=k[..., :4]", errors.ShapeError, "k has d = 4 and q 8"),
    ("v=v[:, :, :3]", errors.ShapeError, r"v has shape \[1, 1, 3, 8\] and k \[1, 1, 5, 8\]"),
    ("k=k.repeat(2, 0), v=v.repeat(2, 0)", errors.ShapeError, "k has 2 sequences and q 1"),
    ("causal=1", errors.DtypeError, "causal is 1: pass True or False"),
    ("return_lse='yes'", errors.DtypeError, "return_lse is 'yes'"),
    ("window=0", errors.OptionError, "window is 0: pass an integer from 1"),
    ("window=2.0", errors.DtypeError, "window is a float"),
    ("window=True", errors.DtypeError, "window is a bool"),
    ("scale=0", errors.OptionError, "scale is 0.0: pass a number from"),
    ("scale=-1.0", errors.OptionError, "scale is -1.0"),
    ("scale=np.nan", errors.OptionError, "scale is nan"),
    ("scale=np.inf", errors.OptionError, "scale is inf"),
    ("scale='big'", errors.DtypeError, "scale is a str"),
    ("quant='row'", errors.DtypeError, "quant is a str: pass a tilefuse.QuantSpec"),
    ("backend='gpu'", errors.OptionError, "backend is 'gpu': pass one of 'cpu', 'triton', 'emulator', 'reference'"),
    ("backend=3", errors.OptionError, "backend is 3"),
    ("kv_cache={}", errors.DtypeError, "kv_cache is a dict: pass a KVCache"),
    ("routing='zigzag'", errors.RoutingError, "routing is 'zigzag'"),
    ("routing=0.5", errors.DtypeError, "routing is a float: pass a name"),
    ("routing=['one', 'one']", errors.RoutingError, "routing lists 2 maps: pass one for each of the 1 sequences"),
    ("routing=routing.one(seq_len=6)", errors.RoutingError, "for 6 queries and 6 keys.*the call has 5 and 5"),
    ("routing=routing.one(seq_len=5, causal=False)", errors.RoutingError, "causal=False"),
    ("routing=routing.one(seq_len=5), window=3", errors.RoutingError, "window=None; the call"),
    ("out=np.zeros((1, 2, 5, 9), np.float32)", errors.ShapeError, r"\[1, 2, 5, 9\]: expected \[1, 2, 5, 8\]"),
    ("out=np.zeros((2, 5, 8), np.float32)", errors.ShapeError, r"out has shape \[2, 5, 8\]"),
    ("out=np.zeros((1, 2, 5, 8), int)", errors.DtypeError, "out is int64"),
    ("out=[]", errors.DtypeError, "out is a list"),
    ("out=np.broadcast_to(np.zeros(8, np.float32), (1, 2, 5, 8))", errors.DtypeError, "out is read-only"),
    ("out=overlapping()", errors.ShapeError, "its elements overlap"),
    ("cu_seqlens=[0, 5]", errors.ShapeError, r"q has shape \[1, 2, 5, 8\]: expected \[sum L, H, d\], with cu_seqlens"),
]  # fmt: skip


def overlapping() -> Any:
    return np.lib.stride_tricks.as_strided(np.zeros(100, np.float32), (1, 2, 5, 8), (0, 4, 32, 4))


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[bad[0][:40] for bad in BAD])
def test_hostile_arguments(rng: np.random.Generator, change: str, error: type[Exception], message: str) -> None:
    q, k, v = arrays(rng, (1, 2, 1, 5, 5, 8))
    names = {"np": np, "q": q, "k": k, "v": v, "routing": routing, "overlapping": overlapping}
    arguments = {"q": q, "k": k, "v": v} | eval(f"dict({change})", names)
    with pytest.raises(error, match=message):
        tf.attention(**arguments)


OFFSETS: list[tuple[Any, type[Exception], str]] = [
    ([], errors.ShapeError, "cu_seqlens has shape"),
    ([[0, 9], [0, 9, 9]], errors.ShapeError, r"cu_seqlens\[1\] has 3 offsets and cu_seqlens\[0\] 2"),
    ([0.0, 9.0], errors.DtypeError, "cu_seqlens is float64: pass integers"),
    ([1, 9], errors.ShapeError, "cu_seqlens starts at 1"),
    ([0, 8], errors.ShapeError, "cu_seqlens ends at 8: must end at 9"),
    ([0, 10], errors.ShapeError, "cu_seqlens ends at 10"),
    ([0, 6, 4, 9], errors.ShapeError, "cu_seqlens falls from 6 to 4 at 2"),
    (np.array([0, 2**64 - 1], np.uint64), errors.ShapeError, "cu_seqlens ends at 18446744073709551615"),
    (7, errors.ShapeError, r"cu_seqlens has shape \[\]"),
    ("ab", errors.ShapeError, r"cu_seqlens has shape \[\]"),
    ([[0, 5], [0, 4, 9], 3], errors.ShapeError, "cu_seqlens is ragged"),
    (([0, 9], [0, 5]), errors.ShapeError, r"cu_seqlens\[1\] ends at 5: must end at 9"),
]


@pytest.mark.parametrize(("offsets", "error", "message"), OFFSETS, ids=[str(bad[0])[:40] for bad in OFFSETS])
def test_hostile_offsets(rng: np.random.Generator, offsets: Any, error: type[Exception], message: str) -> None:
    q, k, v = (rng.standard_normal((9, 1, 8)).astype(F32) for _ in range(3))
    with pytest.raises(error, match=message):
        tf.attention(q, k, v, cu_seqlens=offsets)


def test_quant_spec() -> None:
    assert tf.QuantSpec() == tf.QuantSpec(q="row", smooth="block")
    for bad in ({"q": "tensor"}, {"smooth": None}, {"q": []}):
        with pytest.raises(errors.OptionError, match=r"quant\.(q|smooth) is .*: pass one of"):
            tf.QuantSpec(**bad)


def test_calls_at_once(rng: np.random.Generator, cpu_level: str) -> None:
    """Calls of several threads, of different shapes and maps, give what they give alone."""
    cases = [
        (arrays(rng, (1, 4, 2, 200 + 30 * i, 200 + 30 * i, 64 if i % 2 else 80), BF16), name)
        for i, name in enumerate([None, "one", "local_sink", "bigbird"])
    ]
    alone = [tf.attention(*x, routing=name) for x, name in cases]
    wrong: list[int] = []

    def call(i: int) -> None:
        x, name = cases[i]
        for _ in range(5):
            if not np.array_equal(tf.attention(*x, routing=name), alone[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_change_nothing(rng: np.random.Generator) -> None:
    before = tf.get_num_threads()
    x = arrays(rng, (2, 4, 2, 300, 300, 64), BF16)
    try:
        found = []
        for threads in (1, 2, 3):
            tf.set_num_threads(threads)
            found.append(tf.attention(*x, routing="local_sink"))
    finally:
        tf.set_num_threads(before)
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
