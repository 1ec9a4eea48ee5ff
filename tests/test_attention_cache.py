"""`KVCache`: what is appended in any pieces gives what one call gives, and sealed blocks never change."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilefuse as tf
from tilefuse import errors, routing
from tilefuse.tilemix.reference import attention_exact, attention_tiles, quantise_keys, to_bf16

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)

DIAG = routing.band(0.5, protect="diag")
"""A query's own blocks are in 16 bits: results don't depend on where a prompt is cut."""


def tokens(rng: np.random.Generator, batch: int = 2, heads: int = 4, kv: int = 2, n: int = 500, d: int = 64) -> Any:
    """q, k, v [batch, heads, n, d], bfloat16."""
    return [rng.standard_normal((batch, h, n, d)).astype(np.float32).astype(BF16) for h in (heads, kv, kv)]


def in_pieces(cache: Any, q: Any, k: Any, v: Any, ends: list[int], **options: Any) -> Any:
    """Attention of the tokens, cut before each of ``ends``."""
    cut = [[x[:, :, a:b] for x in (q, k, v)] for a, b in pairwise([0, *ends])]
    return np.concatenate([tf.attention(*piece, kv_cache=cache, **options) for piece in cut], axis=2)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("name", [None, "local_sink", "one"])
def test_a_prompt_in_row_tiles_is_the_prompt(rng: np.random.Generator, kind: str, sink: bool, name: str | None) -> None:
    if kind == "int8" and name:
        pytest.skip("an int8 cache takes no routing")
    q, k, v = tokens(rng)
    options = {"capacity": 600, "batch": 2, "kind": kind, "sink": sink}
    whole = tf.attention(q, k, v, kv_cache=tf.KVCache(2, 64, **options), routing=name)
    for ends in ([128, 256, 384, 500], [256, 500], [384, 448, 500]):
        np.testing.assert_array_equal(in_pieces(tf.KVCache(2, 64, **options), q, k, v, ends, routing=name), whole)


@pytest.mark.parametrize("name", [None, DIAG], ids=str)
def test_a_prompt_in_any_pieces_is_the_prompt(rng: np.random.Generator, cpu_level: str, name: Any) -> None:
    """With the row tile's own blocks in 16 bits, also token by token."""
    q, k, v = tokens(rng, n=400)
    whole = tf.attention(q, k, v, kv_cache=tf.KVCache(2, 64, capacity=512, batch=2), routing=name)
    for ends in ([1, 2, 63, 64, 65, 127, 300, 400], [100, 250, 400], [390, *range(391, 401)]):
        cache = tf.KVCache(2, 64, capacity=512, batch=2)
        np.testing.assert_array_equal(in_pieces(cache, q, k, v, ends, routing=name), whole)
    # And does not depend on what comes after.
    cache = tf.KVCache(2, 64, capacity=512, batch=2)
    start = tf.attention(q[:, :, :200], k[:, :, :200], v[:, :, :200], kv_cache=cache, routing=name)
    np.testing.assert_array_equal(start, whole[:, :, :200])


def test_without_routing_it_is_attention(rng: np.random.Generator) -> None:
    q, k, v = tokens(rng, n=300)
    for window in (None, 90):
        cache = tf.KVCache(2, 64, capacity=300, batch=2)
        expected, expected_lse = tf.attention(q, k, v, window=window, return_lse=True)
        out, lse = tf.attention(q, k, v, kv_cache=cache, window=window, return_lse=True)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)
    np.testing.assert_array_equal(
        tf.attention(q[:, :, -7:], kv_cache=cache, causal=False), tf.attention(q[:, :, -7:], k, v, causal=False)
    )


def test_against_the_tile_loop(rng: np.random.Generator) -> None:
    """The whole context's map, the last block in 16 bits until it is full."""
    q, k, v = tokens(rng, batch=1, n=300)
    cache = tf.KVCache(2, 64, capacity=320)
    out = tf.attention(q, k, v, kv_cache=cache, routing="one")
    made = routing.one(seq_len=300)
    reference = attention_tiles(q, k, v, made, open_block_16bit=True).out
    assert np.linalg.norm(out - reference) <= (2e-3 + 2.0**-8) * np.linalg.norm(reference)
    np.testing.assert_array_equal(tf.attention(q, kv_cache=cache, routing=made), out)
    with pytest.raises(errors.RoutingError, match="routing is for 299 queries and 299 keys"):
        tf.attention(q, kv_cache=cache, routing=routing.one(seq_len=299))


def test_a_map_of_the_context_serves_every_call(rng: np.random.Generator) -> None:
    q, k, v = tokens(rng, batch=1, n=300)
    made = routing.band(0.5, seq_len=512, protect="diag")
    whole = tf.attention(q, k, v, kv_cache=tf.KVCache(2, 64, capacity=512), routing=made)
    np.testing.assert_array_equal(
        in_pieces(tf.KVCache(2, 64, capacity=512), q, k, v, [150, 299, 300], routing=made), whole
    )


def int8_values(v: Any) -> Any:
    """v through codes with a scale for each token, which are exact in float32 products with weights."""
    x = to_bf16(v)
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    return np.clip(np.rint(x / scale), -127, 127) * scale


@pytest.mark.parametrize("sink", [False, True])
def test_int8(rng: np.random.Generator, cpu_level: str, sink: bool) -> None:
    """Sealed blocks as codes of keys and values; the open one, and the sink if asked for, in 16 bits."""
    q, k, v = tokens(rng, batch=1, n=300)
    cache = tf.KVCache(2, 64, capacity=320, kind="int8", sink=sink)
    out = tf.attention(q, k, v, kv_cache=cache).astype(np.float64)
    codes, scales, means = quantise_keys(k)
    keys = codes * np.repeat(scales, 64, axis=-1)[..., :300, None] + np.repeat(means, 64, axis=-2)[..., :300, :].astype(
        np.float64
    )
    values = int8_values(v).astype(np.float64)
    for exact in [slice(256, 300), *([slice(0, 64)] if sink else [])]:
        keys[..., exact, :] = k[..., exact, :].astype(np.float64)
        values[..., exact, :] = v[..., exact, :].astype(np.float64)
    expected = attention_exact(q.astype(np.float64), keys, values).out
    # What is left: the queries' codes (a step of 1 / 127 of the largest) and the weights' and results' rounding.
    assert np.linalg.norm(out - expected) <= 1.2e-2 * np.linalg.norm(expected)
    unquantised = attention_exact(q, k, v).out
    assert np.linalg.norm(out - expected) < 0.8 * np.linalg.norm(out - unquantised)
    assert cache.token_nbytes < 0.56 * tf.KVCache(2, 64, capacity=320, kind="bf16").token_nbytes


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_sealed_blocks_never_change(rng: np.random.Generator, kind: str) -> None:
    _, k, v = tokens(rng, n=400)
    cache = tf.KVCache(2, 64, capacity=5000, batch=2, kind=kind, sink=True)
    cache.append(k[:, :, :200], v[:, :, :200])
    sealed = cache.layers[0].sealed[:, :, :3].copy()
    for a in range(200, 400, 37):
        cache.append(k[:, :, a : a + 37], v[:, :, a : a + 37])
    many = rng.standard_normal((2, 2, 3000, 64)).astype(F32)
    cache.append(many, many)  # grows
    np.testing.assert_array_equal(cache.layers[0].sealed[:, :, :3], sealed)
    again = tf.KVCache(2, 64, capacity=400, batch=2, kind=kind)
    again.append(k, v)
    np.testing.assert_array_equal(again.layers[0].sealed[:, :, :6], cache.layers[0].sealed[:, :, :6])


def test_sequences_of_their_own_lengths(rng: np.random.Generator) -> None:
    """Packed, and chosen: each is as if alone."""
    lengths = [5, 0, 130, 64]
    starts = np.cumsum([0, *lengths])
    k, v = (rng.standard_normal((starts[-1], 2, 32)).astype(BF16) for _ in range(2))
    q = rng.standard_normal((starts[-1], 4, 32)).astype(BF16)
    cache = tf.KVCache(2, 32, capacity=256, batch=4)
    out, lse = tf.attention(q, k, v, kv_cache=cache, cu_seqlens=starts, routing=DIAG, return_lse=True)
    np.testing.assert_array_equal(cache.lengths(), lengths)
    more = rng.standard_normal((2, 4, 3, 32)).astype(BF16)
    view = cache.view(sequences=[3, 0])
    second = tf.attention(more, more[:, :2], more[:, 2:], kv_cache=view, routing=DIAG)
    np.testing.assert_array_equal(cache.lengths(), [8, 0, 130, 67])
    for b in range(4):
        alone = tf.KVCache(2, 32, capacity=256)
        one, one_lse = tf.attention(
            *(x[starts[b] : starts[b + 1]].swapaxes(0, 1)[None] for x in (q, k, v)),
            kv_cache=alone,
            routing=DIAG,
            return_lse=True,
        )
        np.testing.assert_array_equal(out[starts[b] : starts[b + 1]].swapaxes(0, 1), one[0])
        np.testing.assert_array_equal(lse[starts[b] : starts[b + 1]].T, one_lse[0])
        if b in (0, 3):
            i = [3, 0].index(b)
            x = more[i : i + 1]
            one = tf.attention(x, x[:, :2], x[:, 2:], kv_cache=alone, routing=DIAG)
            np.testing.assert_array_equal(second[i], one[0])


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_crop(rng: np.random.Generator, kind: str) -> None:
    q, k, v = tokens(rng, n=300)
    for length in (299, 260, 192, 64, 30, 0):
        cache = tf.KVCache(2, 64, capacity=300, batch=2, kind=kind, sink=True)
        cache.append(k, v)
        if kind == "int8" and length % 64 and length < 256 and length != 30:
            continue
        cache.crop(length)
        np.testing.assert_array_equal(cache.lengths(), length)
        rest = [x[:, :, length:] for x in (q, k, v)]
        fresh = tf.KVCache(2, 64, capacity=300, batch=2, kind=kind, sink=True)
        fresh.append(k[:, :, :length], v[:, :, :length])
        np.testing.assert_array_equal(tf.attention(*rest, kv_cache=cache), tf.attention(*rest, kv_cache=fresh))
    cache = tf.KVCache(2, 64, capacity=300, batch=2, kind=kind)
    cache.append(k, v)
    cache.reset(sequences=[1])
    np.testing.assert_array_equal(cache.lengths(), [300, 0])
    cache.crop(300)
    np.testing.assert_array_equal(cache.lengths(), [300, 0])
    if kind == "int8":
        with pytest.raises(errors.OptionError, match="length is 100, within a full block"):
            cache.crop(100)
        np.testing.assert_array_equal(cache.lengths(), [300, 0])


def test_layers(rng: np.random.Generator) -> None:
    q, k, v = tokens(rng, n=70)
    cache = tf.KVCache(2, 64, capacity=100, batch=2, layers=3)
    for layer in range(3):
        out = tf.attention(q, k + layer, v, kv_cache=cache.view(layer))
        np.testing.assert_array_equal(out, tf.attention(q, k + layer, v))
    cache.append(k[:, :, :1], v[:, :, :1], layer=1)
    assert [int(cache.lengths(layer)[0]) for layer in range(3)] == [70, 71, 70]
    with pytest.raises(errors.OptionError, match="kv_cache has 3 layers: pass kv_cache"):
        tf.attention(q, k, v, kv_cache=cache)


def test_odd_channels(rng: np.random.Generator) -> None:
    q, k = (rng.standard_normal((1, h, 100, 20)).astype(F32) for h in (2, 1))
    v = rng.standard_normal((1, 1, 100, 27)).astype(F32)
    cache = tf.KVCache(1, 20, dim_v=27, capacity=128)
    np.testing.assert_array_equal(tf.attention(q, k, v, kv_cache=cache), tf.attention(q, k, v))


def test_not_finite_values_stay_where_they_are(rng: np.random.Generator) -> None:
    """A NaN that was cropped away is gone, also from the padding of the open block."""
    q, k, v = tokens(rng, n=70)
    cache = tf.KVCache(2, 64, capacity=128, batch=2)
    bad = np.full_like(k[:, :, :10], np.nan)
    cache.append(bad, bad)
    cache.reset()
    np.testing.assert_array_equal(tf.attention(q, k, v, kv_cache=cache), tf.attention(q, k, v))


def test_memory_comes_with_tokens(rng: np.random.Generator) -> None:
    cache = tf.KVCache(8, 128, capacity=1 << 20, kind="int8", layers=2)
    assert cache.nbytes < 16 << 20
    # Per token and head: 128 codes each of k and v, and of each block of 64 a mean, a scale, and scales of values.
    assert cache.token_nbytes == pytest.approx(2 * 8 * (256 + (256 + 64 + 256) / 64))
    assert "int8" in repr(cache)


def test_a_failed_call_appends_nothing(rng: np.random.Generator) -> None:
    q, k, v = tokens(rng, n=10)
    cache = tf.KVCache(2, 64, capacity=20, batch=2)
    for change, error, message in (
        ({"k": k[:, :, :9]}, errors.ShapeError, "v has shape"),
        ({"k": k[..., :32]}, errors.ShapeError, r"k has shape \[2, 2, 10, 32\]: kv_cache takes \[2, 2, L, 64\]"),
        ({"k": k[:1], "v": v[:1]}, errors.ShapeError, r"kv_cache takes \[2, 2, L, 64\]"),
        ({"k": None}, errors.DtypeError, "k is None: pass both k and v, or neither"),
        ({"k": None, "v": None}, errors.ShapeError, "q has 10 tokens of sequence 0, and kv_cache holds 0"),
        ({"q": q[..., :32]}, errors.ShapeError, "q has 32 channels.*kv_cache has 64"),
        ({"q": q[:1]}, errors.ShapeError, "q has 1 sequences.*kv_cache has 2"),
        ({"q": q[:, :3]}, errors.ShapeError, "q has 3 heads and k 2"),
        ({"k": k.repeat(3, 2), "v": v.repeat(3, 2)}, errors.ShapeError, "which has 0 of a capacity of 20: make a"),
        ({"out": np.zeros(3, F32)}, errors.ShapeError, "out has shape"),
        ({"routing": "nonsense"}, errors.RoutingError, "nonsense"),
        ({"cu_seqlens": [0, 10]}, errors.ShapeError, r"q has shape .* with cu_seqlens"),
        ({"backend": "reference"}, errors.DeviceError, 'kv_cache is for backend "cpu"'),
    ):
        with pytest.raises(error, match=message):
            tf.attention(**({"q": q, "k": k, "v": v, "kv_cache": cache} | change))
        np.testing.assert_array_equal(cache.lengths(), 0)
    with pytest.raises(errors.OptionError, match='routing is given, and kv_cache is of kind "int8"'):
        tf.attention(q, k, v, kv_cache=tf.KVCache(2, 64, capacity=20, batch=2, kind="int8"), routing="one")
    with pytest.raises(errors.ShapeError, match="one comes twice"):
        cache.view(sequences=[1, 1])
    with pytest.raises(errors.OptionError, match="layer is 1: pass an integer from 0 to 0"):
        cache.view(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 0}, "heads is 0"),
        ({"dim": 513}, "dim is 513: pass an integer from 1 to 512"),
        ({"dim_v": 0}, "dim_v is 0"),
        ({"capacity": -1}, "capacity is -1"),
        ({"batch": 0}, "batch is 0"),
        ({"layers": 1 << 20}, "layers is 1048576"),
        ({"kind": "fp8"}, 'kind is \'fp8\': pass "bf16" or "int8"'),
        ({"smooth": "global"}, "smooth is 'global'"),
    ],
    ids=str,
)
def test_hostile_caches(change: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.OptionError, match=message):
        tf.KVCache(**({"heads": 2, "dim": 64, "capacity": 10} | change))
    with pytest.raises((errors.DtypeError, errors.OptionError)):
        tf.KVCache(**({"heads": 2, "dim": 64, "capacity": 10} | dict.fromkeys(change, 1.5) | {"sink": 3}))


def test_caches_of_several_threads(rng: np.random.Generator) -> None:
    q, k, v = tokens(rng, n=260)
    expected = tf.attention(q, k, v)
    wrong: list[int] = []

    def decode(i: int) -> None:
        cache = tf.KVCache(2, 64, capacity=260, batch=2)
        found = in_pieces(cache, q, k, v, [200 + i, *range(201 + i, 261)])
        if not np.array_equal(found, expected):
            wrong.append(i)

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
