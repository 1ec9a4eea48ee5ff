"""tilefuse.attention under hostile input: what isn't finite, ends of pages, caches that grow while they are read."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tilefuse as tf
from tilefuse import errors, routing
from tilefuse.tilemix.operands import operand

F32 = np.float32
NOT_FINITE = [np.nan, np.inf, -np.inf]


def arrays(rng: np.random.Generator, lq: int, lk: int, d: int = 16) -> list[np.ndarray]:
    return [rng.standard_normal((1, heads, n, d)).astype(F32) for heads, n in ((2, lq), (1, lk), (1, lk))]


def seen(lq: int, lk: int, window: int | None) -> np.ndarray:
    """[lq, lk]: query i stands at i + lk - lq, and sees keys up to there."""
    behind = np.arange(lq)[:, None] + lk - lq - np.arange(lk)
    return (behind >= 0) & (behind < (window or lk + lq))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("name", [None, "one"])
@pytest.mark.parametrize("spec", [tf.QuantSpec("block", "none"), tf.QuantSpec()], ids=["block-none", "row-block"])
def test_queries_and_keys_not_finite(
    rng: np.random.Generator, cpu_level: str, backend: str, bad: float, name: str | None, spec: tf.QuantSpec
) -> None:
    """NaN in every query that isn't finite or sees such a key, also where all of its scores would be -inf."""
    lq, lk = 140, 150
    for which, at, window in ((0, 3, None), (0, 3, 1), (1, 10, None), (1, 10, 1), (1, 70, 20)):
        x = arrays(rng, lq, lk)
        x[which][0, 0, at, 5] = bad
        out, lse = tf.attention(*x, routing=name, window=window, quant=spec, return_lse=True, backend=backend)
        head = slice(0, 1) if which == 0 else slice(0, 2)
        must = np.arange(lq) == at if which == 0 else seen(lq, lk, window)[:, at]
        assert must.any()
        assert np.isnan(out[0, head][:, must]).all()
        assert np.isnan(lse[0, head][:, must]).all()
        # The other row tile, or what lies apart in it: nothing.
        if which == 0:
            assert np.isfinite(out[0, 1]).all()
            assert np.isfinite(out[0, :, 128:]).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", [None, "one"])
def test_scores_beyond_float(cpu_level: str, backend: str, name: str | None) -> None:
    """A query whose only score overflows to -inf is no query without keys: it doesn't get zeros."""
    q, k = np.full((1, 1, 1, 8), 3e38, F32), np.full((1, 1, 1, 8), -3e38, F32)
    out, lse = tf.attention(
        q, k, np.ones_like(q), routing=name, quant=tf.QuantSpec(smooth="none"), return_lse=True, backend=backend
    )
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("bad", NOT_FINITE)
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_cached_not_finite(rng: np.random.Generator, cpu_level: str, kind: str, bad: float) -> None:
    """The same of keys and values in a cache's blocks, sealed or open; nothing of it is left after a crop."""
    for at in (20, 68):
        for which in (1, 2):
            q, k, v = arrays(rng, 70, 70)
            x = [q, k.copy(), v.copy()]
            x[which][0, 0, at, 5] = bad
            cache = tf.KVCache(1, 16, capacity=128, kind=kind)
            out = tf.attention(*x, kv_cache=cache)
            found = out[0, :, at:] if which == 1 else out[0, :, at:, 5]
            assert not np.isfinite(found).any()
            if at == 68:
                cache.crop(64)
                again = tf.attention(q[:, :, 64:], k[:, :, 64:], v[:, :, 64:], kv_cache=cache)
                assert np.isfinite(again).all()


def at_the_end(x: np.ndarray) -> np.ndarray:
    """A copy of ``x`` whose last byte is the last before a page that can't be read."""
    page = mmap.PAGESIZE
    size = -(-x.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    raw = np.frombuffer(memory, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert libc.mprotect(raw.ctypes.data + size, page, 0) == 0
    made = raw[size - x.nbytes : size].view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
@pytest.mark.parametrize("d", [1, 7, 8, 24, 64, 80, 100, 512])
def test_ends_of_memory(rng: np.random.Generator, cpu_level: str, d: int) -> None:
    """Nothing is read or written past the ends of the operands: the page after each can't be."""
    for dtype in (np.float16, F32):
        for lq, lk, name in ((1, 1, None), (13, 65, "one"), (130, 17, "local_sink")):
            x = [a.astype(dtype) for a in arrays(rng, lq, lk, d)]
            expected = tf.attention(*x, routing=name)
            ends = [at_the_end(a) for a in x]
            out = at_the_end(np.zeros_like(expected))
            assert tf.attention(*ends, routing=name, out=out) is out
            np.testing.assert_array_equal(out, expected)
            cache = tf.KVCache(1, d, capacity=256)
            cache.append(*ends[1:])


def test_reading_while_growing(rng: np.random.Generator) -> None:
    """A cache that is read by one thread may grow in another: blocks that a call reads stay where it found them."""
    q, k, v = arrays(rng, 64, 2048, 64)
    cache = tf.KVCache(1, 64, capacity=1 << 15)
    view = cache.view()
    view.append(k, v)
    expected = tf.attention(q, kv_cache=view)
    stop = threading.Event()
    failed: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                tf.attention(q[:, :, :1], kv_cache=view)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(10):
        view.append(k, v)
    stop.set()
    thread.join()
    assert not failed
    cache.crop(2048)
    np.testing.assert_array_equal(tf.attention(q, kv_cache=view), expected)


def test_forked(rng: np.random.Generator) -> None:
    """After a fork the child has its own threads."""
    code = (
        "import os, numpy as np, tilefuse as tf\n"
        "x = np.ones((1, 4, 300, 64), np.float32)\n"
        "a = tf.attention(x, x, x, routing='one')\n"
        "child = os.fork()\n"
        "b = tf.attention(x, x, x, routing='one')\n"
        "if not child: os._exit(0 if np.array_equal(a, b) else 3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_windows_beyond_all_keys(rng: np.random.Generator, cpu_level: str) -> None:
    """Any window that hides nothing is that of no window, with a map or without."""
    x = arrays(rng, 70, 70)
    for name in (None, "one"):
        whole = tf.attention(*x, routing=name)
        np.testing.assert_array_equal(tf.attention(*x, routing=name, window=1 << 30), whole)
    assert routing.band(seq_len=70, window=1 << 30).grid.window == 1 << 30
    with pytest.raises(errors.RoutingError, match="window is 1073741825: pass 1 to 1073741824"):
        routing.band(seq_len=70, window=(1 << 30) + 1)


MAPS: list[tuple[str, str]] = [
    ("routing.band(0.5, protect=5)", "protect is 5: pass any of"),
    ("routing.band(0.5, protect=None)", "protect is None"),
    ("routing.band(0.5, protect=[['diag']])", "protect is"),
    ("routing.from_scores([[1], [2, 3]], 0.5, seq_len=300)", "scores are ragged"),
    ("routing.Routing.from_bits([[True], [True, False]], routing.Grid(300, 300))", "bits are ragged"),
    ("routing.Routing.from_bits([[True]], None)", "grid is a NoneType: pass a tilefuse.routing.Grid"),
    ("routing.Routing.from_bits(np.zeros((0, 3, 5), bool), routing.Grid(300, 300))", "at least one KV head"),
]


@pytest.mark.parametrize(("call", "message"), MAPS)
def test_hostile_maps(call: str, message: str) -> None:
    with pytest.raises(errors.RoutingError, match=message):
        eval(call, {"routing": routing, "np": np})


def test_hostile_numbers(rng: np.random.Generator) -> None:
    x = arrays(rng, 1, 1)
    with pytest.raises(errors.OptionError, match="scale is inf"):
        tf.attention(*x, scale=10**400)
    endless = [np.broadcast_to(a, (1, a.shape[1], 1 << 40, 16)) for a in x[1:]]
    with pytest.raises(errors.ShapeError, match="k has a sequence of 1099511627776 tokens: up to 67108864"):
        tf.attention(x[0], *endless)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, F32])
def test_odd_addresses(rng: np.random.Generator, dtype: Any) -> None:
    x = [a.astype(dtype) for a in arrays(rng, 20, 20)]
    odd = []
    for a in x:
        raw = np.zeros(a.nbytes + 1, np.uint8)
        odd.append(raw[1:].view(dtype).reshape(a.shape))
        odd[-1][...] = a
        assert operand(odd[-1], "x").address % a.itemsize == 0
    np.testing.assert_array_equal(tf.attention(*odd), tf.attention(*x))


def test_out_of_nothing(rng: np.random.Generator) -> None:
    q, k, v = arrays(rng, 0, 3)
    out = np.lib.stride_tricks.as_strided(np.empty(0, F32), (1, 2, 0, 16), (0, 0, 0, 4))
    assert tf.attention(q, k, v, out=out) is out


def test_caches_beyond_memory() -> None:
    with pytest.raises(MemoryError, match="bytes are not to be had"):
        tf.KVCache(1 << 16, 512, capacity=64, batch=1 << 16)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dv", [8, 9])
def test_beyond_float16(rng: np.random.Generator, backend: str, dv: int) -> None:
    """Results beyond float16 are Inf, and no warning, whatever the number of channels."""
    q, k, _ = arrays(rng, 5, 5)
    out = np.empty((1, 2, 5, dv), np.float16)
    tf.attention(q, k, np.full((1, 1, 5, dv), 1e6, F32), out=out, backend=backend)
    assert np.isposinf(out).all()


@pytest.mark.peers
def test_negated_views_as_out(rng: np.random.Generator) -> None:
    """torch's lazily negated tensors: a result arrives in them, too."""
    torch = pytest.importorskip("torch")
    x = [torch.from_numpy(a) for a in arrays(rng, 9, 9)]
    out: Any = torch.zeros(1, 2, 9, 16, dtype=torch.complex64).conj().imag
    assert out.is_neg()
    tf.attention(*x, out=out)
    torch.testing.assert_close(out.resolve_neg().contiguous(), tf.attention(*x), rtol=0, atol=0)
