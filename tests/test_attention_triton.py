"""Attention's Triton kernels: in Triton's interpreter against the specification in NumPy, and compiled for real GPUs.

Tolerances. Codes, scales, means, integer scores and lists of tiles are equal bit for bit. Outputs differ by the order
of fp32 sums and the last bits of exp2, some 2^-22 of a weight, which flips the rounding to bfloat16 of one weight in
2^13 by 2^-8 of it: relative L2 below 2^-8 / sqrt(2^13) = 4.3e-5, and no element by more than all flipping, 2^-8 max|v|.
Where tiles come in another order, or in halves, weights are relative to another maximum as they are rounded: each twice
by up to 2^-9, uniformly, so relative L2 near 2^-9 sqrt(2 / 3) = 1.6e-3, of which 2e-3 is the bound.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attention_gpu
import ml_dtypes
import numpy as np
import pytest

import tilefuse
from tilefuse.errors import DeviceError, DtypeError, RoutingError, ShapeError
from tilefuse.tilemix import reference
from tilefuse.tilemix.grid import Grid
from tilefuse.tilemix.routing_map import Routing

torch = pytest.importorskip("torch", reason="the [triton] extra is not installed")
pytest.importorskip("triton", reason="the [triton] extra is not installed")

from tilefuse.tilemix import triton_call  # noqa: E402
from tilefuse.tilemix.triton_call import Blocks, triton_attention  # noqa: E402

RELATIVE = 4.3e-5
RELATIVE_REORDERED = 2e-3
BLOCKS = Blocks(128, 64, 4, 1)


DEVICE = "cpu" if triton_call.load()[2] else "cuda"
"""With TRITON_INTERPRET=0 a GPU runs the kernels."""

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="Triton's interpreter is off, and there is no GPU"
)


class Quant:
    def __init__(self, q: str = "row", smooth: str = "block") -> None:
        self.q, self.smooth = q, smooth


class Spans:
    """Sequences one after the other."""

    packed = True

    def __init__(self, q_len: list[int], k_len: list[int]) -> None:
        self.q_len, self.k_len = np.array(q_len), np.array(k_len)
        self.q_first, self.k_first = (np.cumsum(x) - x for x in (self.q_len, self.k_len))


def bf16(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def operands(
    rng: np.random.Generator,
    batch: int,
    heads: int,
    heads_kv: int,
    q_len: int,
    k_len: int,
    d: int,
    dv: int | None = None,
) -> list[np.ndarray[Any, Any]]:
    """Queries, keys whose channels have means of their own, and values: float32 that bfloat16 holds."""
    q = rng.standard_normal((batch, heads, q_len, d), dtype=np.float32)
    k = rng.standard_normal((batch, heads_kv, k_len, d), dtype=np.float32) + rng.standard_normal(d, dtype=np.float32)
    v = rng.standard_normal((batch, heads_kv, k_len, dv or d), dtype=np.float32)
    return [bf16(x) for x in (q, k, v)]


def tensors(*arrays: np.ndarray[Any, Any]) -> list[Any]:
    return [torch.from_numpy(x).to(DEVICE) for x in arrays]


def random_map(rng: np.random.Generator, grid: Grid, heads: int | None = None, share: float = 0.5) -> Routing:
    shape = (grid.row_tiles, grid.groups) if heads is None else (heads, grid.row_tiles, grid.groups)
    return Routing.from_bits(rng.random(shape) < share, grid)


def assert_close(
    found: tuple[Any, Any], expected: reference.Attended, v: np.ndarray[Any, Any], relative: float = RELATIVE
) -> None:
    out, lse = (x.cpu().numpy() for x in found)
    assert np.isfinite(out).all()
    error = np.abs(out - expected.out)
    assert np.linalg.norm(error) <= relative * np.linalg.norm(expected.out)
    assert error.max(initial=0) <= 2.0**-8 * np.abs(v).max(initial=0)
    none = np.isneginf(expected.lse)
    assert (np.isneginf(lse) == none).all()
    assert not out[none].any()
    # A score is an fp32 sum of 64 products or more, whose order is free: 64 * 2^-24 of its size at least.
    np.testing.assert_allclose(lse[~none], expected.lse[~none], rtol=2**-18, atol=2**-20)


def tables_of(q: Any, k: Any, causal: bool = True, window: int | None = None) -> triton_call.Tables:
    lengths = triton_call._lengths(q, k, None)
    triton_call._words(None, lengths, None, 1, False, k.shape[1])
    return triton_call._tables(torch, q.device, lengths, causal, window, 128)


def numpy_of(x: Any) -> np.ndarray[Any, Any]:
    """bfloat16 as float32."""
    return (x.float() if x.dtype == torch.bfloat16 else x).cpu().numpy()


# --- quantisation ---------------------------------------------------------------------------------------------------


def adversaries(rng: np.random.Generator, length: int, d: int) -> dict[str, np.ndarray[Any, Any]]:
    """[1, 1, length, d]"""
    shape = (1, 1, length, d)
    signs = rng.choice(np.array([-1, 1], np.float32), shape)
    ties = rng.integers(-63, 63, shape).astype(np.float32) + np.float32(0.5)
    ties[..., 0] = 127  # so that scales are 1 and codes halves to round
    outlier = rng.standard_normal(shape, dtype=np.float32)
    outlier[:, :, ::7, 3] = 3e4
    zeros = rng.standard_normal(shape, dtype=np.float32)
    zeros[:, :, : min(length, 64)] = 0
    return {
        "gauss": bf16(rng.standard_normal(shape, dtype=np.float32)),
        "all +-127": signs * np.float32(127),
        "all one sign": np.full(shape, 3.5, np.float32),
        "ties": ties,
        "outliers": bf16(outlier),
        "zero block": bf16(zeros),
        "tiny": bf16(rng.standard_normal(shape, dtype=np.float32) * np.float32(1e-30)),
        "huge": bf16(rng.standard_normal(shape, dtype=np.float32) * np.float32(1e30)),
    }


@pytest.mark.parametrize("d", [80, 256])
def test_codes_scales_means_and_integer_scores_are_the_specifications(rng: np.random.Generator, d: int) -> None:
    length = 136  # the last block of keys and the last tile of rows have 8
    cases = adversaries(rng, length, d)
    if d == 256:  # an interpreter is slow: what depends on the number of channels
        cases = {name: cases[name] for name in ("gauss", "all +-127", "outliers")}
    for name, x in cases.items():
        (tensor,) = tensors(x)
        packed = tensor.to(torch.bfloat16)
        tables = tables_of(packed, packed)
        for smooth in ("block", "none", "global"):
            keys = triton_call.quantised_keys(packed, tables, smooth, False)
            expected = reference.quantise_keys(x[0], smooth)
            codes = numpy_of(keys.codes).reshape(1, -1, d)
            assert np.array_equal(codes[:, :length], expected.codes), (name, smooth)
            assert not codes[:, length:].any()
            assert np.array_equal(numpy_of(keys.scales), expected.scales), (name, smooth)
            if smooth != "none":
                assert np.array_equal(numpy_of(keys.means), expected.means.astype(np.float32)), (name, smooth)
        for granularity in ("row", "block"):
            rows = triton_call.quantised_rows(packed, tables, granularity, False)
            wanted = reference.quantise_rows(x[0], granularity)
            found = numpy_of(rows.codes).reshape(1, -1, d)
            assert np.array_equal(found[:, :length], wanted.codes), (name, granularity)
            assert np.array_equal(numpy_of(rows.scales).reshape(1, -1)[:, :length], wanted.scales), (name, granularity)
        scores = numpy_of(triton_call.integer_scores(rows.codes[0].reshape(-1, d), keys.codes[0].reshape(-1, d)))
        exact = found[0].astype(np.int64) @ codes[0].astype(np.int64).T
        assert np.array_equal(scores, exact), name


def test_the_largest_integer_scores(rng: np.random.Generator) -> None:
    """All codes 127 or -127, the sums at their extremes, 127^2 d."""
    for d in (64, 96, 256):
        keys = rng.choice(np.array([-127, 127], np.int8), (64, d))
        keys[0], keys[1] = 127, -127
        scores = numpy_of(triton_call.integer_scores(*tensors(np.full((128, d), 127, np.int8), keys)))
        assert scores[0, 0] == 127 * 127 * d
        assert scores[5, 1] == -127 * 127 * d
        assert np.array_equal(scores[7], 127 * keys.astype(np.int64).sum(axis=1))


# --- lists of tiles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_len", "k_len", "causal", "window", "group", "share"),
    [
        (300, 300, True, None, 1, 0.5),
        (300, 500, True, None, 2, 0.5),
        (500, 300, True, None, 1, 0.5),  # rows without keys
        (129, 1000, False, None, 3, 0.3),
        (700, 700, True, 100, 1, 0.5),
        (700, 700, True, 1, 2, 0.5),
        (256, 900, False, 200, 1, 0.7),
        (130, 4096, True, None, 1, 1.0),  # bit 63
        (130, 8300, True, None, 1, 0.5),  # three words a row
        (130, 8300, True, None, 64, 0.5),
    ],
)
def test_words_become_lists_of_tiles(
    rng: np.random.Generator, q_len: int, k_len: int, causal: bool, window: int | None, group: int, share: float
) -> None:
    grid = Grid(q_len, k_len, causal=causal, window=window, group=group)
    routing = random_map(rng, grid, 2, share)
    if k_len == 4096:
        assert (routing.words >> np.uint64(63)).any()
    q, k = (torch.empty((1, 2, n, 8), device=DEVICE) for n in (q_len, k_len))
    lengths = triton_call._lengths(q, k, None)
    words = triton_call._words(routing.words, lengths, None, group, False, 2)
    tables = triton_call._tables(torch, q.device, lengths, causal, window, 128)
    kernels = triton_call.load()[1]
    tiles, ends = triton_call._expand(torch, kernels, q.device, words, tables, causal, window)
    position = np.arange(q_len)[:, None] + grid.offset
    key = np.arange(k_len)
    seen = np.ones((q_len, k_len), np.bool_)
    if causal:
        seen &= key <= position
    if window is not None:
        seen &= key > position - window
    bits = routing.bits()
    for h in range(2):
        for m in range(grid.row_tiles):
            whole: dict[int, list[int]] = {0: [], 1: [], 2: [], 3: []}
            for n in range(grid.first[m], grid.stop[m]):
                tile = seen[m * 128 : (m + 1) * 128, n * 64 : (n + 1) * 64]
                complete = tile.all() and tile.shape[1] == 64
                whole[(0 if bits[h, m, n // group] else 2) + (not complete)].append(n)
            cuts = np.cumsum([len(whole[kind]) for kind in range(4)])
            assert ends[h, m].tolist() == cuts.tolist()
            assert tiles[h, m, : cuts[-1]].tolist() == [n for kind in range(4) for n in whole[kind]]
    # The longest rows start first.
    executed = [int(grid.stop[start // 128] - grid.first[start // 128]) for start in numpy_of(tables.rows)[1::2]]
    assert executed == sorted(executed, reverse=True)


# --- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "heads_kv", "q_len", "k_len", "d", "dv", "causal", "window", "group", "quant", "blocks"),
    [
        (1, 1, 128, 128, 64, 64, True, None, 1, Quant(), None),
        (2, 1, 100, 300, 64, 64, True, None, 2, Quant(), None),
        (2, 1, 200, 200, 80, 96, True, 70, 1, Quant(), BLOCKS),
        (2, 2, 70, 150, 96, 80, False, None, 1, Quant("block"), Blocks(32, 32, 4, 1)),
        (2, 1, 200, 130, 128, 128, True, None, 1, Quant("block", "global"), None),
        (2, 1, 65, 129, 256, 256, True, None, 1, Quant("row", "none"), Blocks(16, 32, 4, 1)),
        (2, 1, 257, 500, 64, 64, False, 130, 1, Quant("row", "global"), Blocks(64, 64, 4, 1)),
        (2, 1, 1, 65, 64, 64, True, None, 1, Quant(), None),
        (1, 1, 70, 70, 33, 5, True, None, 1, Quant(), None),
        (1, 1, 2, 1, 32, 8, True, None, 1, Quant(), None),
    ],
)
def test_outputs_are_the_specifications(
    rng: np.random.Generator, heads: int, heads_kv: int, q_len: int, k_len: int, d: int, dv: int, causal: bool,
    window: int | None, group: int, quant: Quant, blocks: Blocks | None,
) -> None:  # fmt: skip
    q, k, v = operands(rng, 2, heads, heads_kv, q_len, k_len, d, dv)
    routing = random_map(rng, Grid(q_len, k_len, causal=causal, window=window, group=group), heads_kv)
    found = triton_attention(
        *tensors(q, k, v), quant=quant, causal=causal, window=window, words=routing.words, groups=group,
        return_lse=True, blocks=blocks,
    )  # fmt: skip
    expected = reference.attention_tiles(
        q, k, v, routing, causal=causal, window=window, granularity=quant.q, smooth=quant.smooth
    )
    # With a window, tiles at its start need a mask and so come later than in the specification.
    reordered = window is not None or (blocks is not None and blocks.keys < 64)
    assert_close(found, expected, v, RELATIVE_REORDERED if reordered else RELATIVE)


def test_bit_63_and_several_words(rng: np.random.Generator) -> None:
    """16 queries at the end of more than 64 key tiles, of which a window leaves the last five: an INT8 tile that is bit
    63, and one in the second word."""
    q, k, v = operands(rng, 1, 1, 1, 16, 66 * 64, 32)
    window = 4 * 64
    bits = np.zeros((1, 66), np.bool_)
    bits[0, [62, 63, 64]] = True
    routing = Routing.from_bits(bits, Grid(16, 66 * 64, window=window))
    assert routing.words.tolist() == [[0b11 << 62, 1]]
    found = triton_attention(
        *tensors(q, k, v), quant=Quant("row", "none"), window=window, words=routing.words, return_lse=True
    )
    expected = reference.attention_tiles(q, k, v, routing, window=window, smooth="none")
    assert_close(found, expected, v, RELATIVE_REORDERED)


def test_all_16_bit_and_all_int8(rng: np.random.Generator) -> None:
    q, k, v = operands(rng, 1, 2, 1, 150, 150, 64)
    grid = Grid(150, 150)
    plain = triton_attention(*tensors(q, k, v), quant=Quant(), return_lse=True)
    assert_close(plain, reference.attention_tiles(q, k, v), v)
    zero = triton_attention(*tensors(q, k, v), quant=Quant(), words=np.zeros((2, 1), np.uint64), return_lse=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, zero, strict=True))
    one = Routing.from_bits(np.ones((2, 3), np.bool_), grid)
    found = triton_attention(*tensors(q, k, v), quant=Quant(), words=one.words, return_lse=True)
    assert_close(found, reference.attention_tiles(q, k, v, one), v)


def test_rows_without_keys_and_empty_calls(rng: np.random.Generator) -> None:
    q, k, v = operands(rng, 1, 1, 1, 200, 40, 64)
    out, lse = triton_attention(*tensors(q, k, v), quant=Quant(), return_lse=True)
    assert not out[:, :, :160].any()
    assert torch.isneginf(lse[:, :, :160]).all()
    assert torch.isfinite(lse[:, :, 160:]).all()
    nothing = k[:, :, :0]
    words = np.zeros((2, 1), np.uint64)
    out, lse = triton_attention(*tensors(q, nothing, nothing), quant=Quant(), words=words, return_lse=True)
    assert not out.any()
    assert torch.isneginf(lse).all()
    out = triton_attention(*tensors(q[:, :, :0], k, v), quant=Quant())
    assert out.shape == (1, 1, 0, 64)


def test_packed_sequences_are_calls_of_their_own(rng: np.random.Generator) -> None:
    q_len, k_len, groups = [130, 0, 1, 64], [200, 30, 77, 0], np.array([1, 1, 2, 1])
    heads, heads_kv, d = 4, 2, 64
    q, k, v = (
        tensors(bf16(rng.standard_normal((sum(n), h, d), dtype=np.float32)))[0]
        for n, h in ((q_len, heads), (k_len, heads_kv), (k_len, heads_kv))
    )
    maps = [random_map(rng, Grid(a, b, group=int(g)), heads_kv) for a, b, g in zip(q_len, k_len, groups, strict=True)]
    spans = Spans(q_len, k_len)
    words = np.concatenate([m.words for m in maps], axis=1)
    packed = {"quant": Quant("block"), "words": words, "groups": groups, "return_lse": True, "blocks": BLOCKS}
    out, lse = triton_attention(q, k, v, sequences=spans, **packed)
    for i, routing in enumerate(maps):
        rows = slice(spans.q_first[i], spans.q_first[i] + q_len[i])
        keys = slice(spans.k_first[i], spans.k_first[i] + k_len[i])
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        alone = triton_attention(
            *one, quant=Quant("block"), words=routing.words, groups=int(groups[i]), return_lse=True, blocks=BLOCKS
        )
        assert torch.equal(out[rows].transpose(0, 1)[None], alone[0])
        assert torch.equal(lse[rows].transpose(0, 1)[None], alone[1])
        expected = reference.attention_tiles(*(numpy_of(x) for x in one), routing, granularity="block")
        assert_close(alone, expected, numpy_of(v))


def test_grouped_heads_are_repeated_keys_bit_for_bit(rng: np.random.Generator) -> None:
    q, k, v = operands(rng, 1, 4, 2, 100, 100, 64)
    routing = random_map(rng, Grid(100, 100))
    grouped = triton_attention(*tensors(q, k, v), quant=Quant(), words=routing.words)
    repeated = triton_attention(
        *tensors(q, k.repeat(2, axis=1), v.repeat(2, axis=1)), quant=Quant(), words=routing.words
    )
    assert torch.equal(grouped, repeated)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_inputs_and_outputs(rng: np.random.Generator, dtype: str) -> None:
    """Inputs are rounded to bfloat16, and the result of the same values is rounded once more, to the input's type."""
    kind = getattr(torch, dtype)
    q, k, v = (x.to(kind) for x in tensors(*(rng.standard_normal((1, 2, 90, 64), dtype=np.float32) for _ in range(3))))
    routing = random_map(rng, Grid(90, 90))
    found = triton_attention(q, k, v, quant=Quant(), words=routing.words)
    assert found.dtype == kind
    wide = triton_attention(q.float(), k.float(), v.float(), quant=Quant(), words=routing.words)
    assert torch.equal(found, wide.to(kind))


def test_strides_and_out(rng: np.random.Generator) -> None:
    """[B, L, H, d] seen as [B, H, L, d], a last axis that isn't contiguous, and a result that is written in place."""
    q, k, v = tensors(*operands(rng, 1, 2, 2, 70, 70, 64))
    routing = random_map(rng, Grid(70, 70))
    expected = triton_attention(q, k, v, quant=Quant(), words=routing.words)
    moved = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    turned = v.transpose(2, 3).contiguous().transpose(2, 3)
    rows = torch.empty((1, 70, 2, 64), device=DEVICE).transpose(1, 2)
    columns = torch.empty((1, 2, 64, 70), device=DEVICE).transpose(2, 3)
    for out in (rows, columns):
        found = triton_attention(*moved, turned, quant=Quant(), words=routing.words, out=out)
        assert found is out
        assert torch.equal(found, expected)


def test_extreme_scores_stay_finite(rng: np.random.Generator) -> None:
    """Scores of +-1e4, and queries so small that INT8 multipliers underflow to zero."""
    for factor in (1e3, 1e-36):
        q, k, v = operands(rng, 1, 1, 1, 130, 200, 64)
        q = bf16(q * np.float32(factor))
        k = bf16(k * np.float32(1e-10 if factor < 1 else 1))
        routing = random_map(rng, Grid(130, 200))
        found = triton_attention(*tensors(q, k, v), quant=Quant(), words=routing.words, return_lse=True)
        expected = reference.attention_tiles(q, k, v, routing)
        # A score has 2^-23 of its size in rounding, which is that of a weight's relative error.
        largest = np.abs(expected.lse[np.isfinite(expected.lse)]).max()
        assert_close(found, expected, v, RELATIVE + 2.0**-21 * largest)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_not_finite_makes_nan_and_nothing_else_wrong(rng: np.random.Generator) -> None:
    """In q: its row. In k, 16-bit: the queries that see it; INT8: those that see any key of its block."""
    q, k, v = operands(rng, 1, 1, 1, 200, 200, 64)
    k[..., 0] = -np.abs(k[..., 0])  # q = Inf there would give each key -Inf, as if it were masked
    routing = Routing.from_bits(np.array([[False, True, False, False], [False, True, False, True]]), Grid(200, 200))
    plain = numpy_of(triton_attention(*tensors(q, k, v), quant=Quant(), words=routing.words))
    for bad in (np.inf, -np.inf, np.nan):
        odd = q.copy()
        odd[0, 0, [10, 150], 0] = bad
        out, lse = triton_attention(*tensors(odd, k, v), quant=Quant(), words=routing.words, return_lse=True)
        wrong = np.isin(np.arange(200), [10, 150])
        assert (np.isnan(numpy_of(out)) == wrong[None, None, :, None]).all()
        assert (np.isnan(numpy_of(lse)) == wrong).all()
        assert np.array_equal(numpy_of(out)[0, 0, ~wrong], plain[0, 0, ~wrong])
        for key, first in ((140, 140), (100, 64)):  # 16-bit; INT8 block of keys 64 to 127
            odd = k.copy()
            odd[0, 0, key, 3] = bad
            out = numpy_of(triton_attention(*tensors(q, odd, v), quant=Quant(), words=routing.words))
            assert np.isnan(out[0, 0, first:]).all()
            assert np.array_equal(out[0, 0, :first], plain[0, 0, :first])


def test_calls_that_are_refused(rng: np.random.Generator) -> None:
    q, k, v = tensors(*operands(rng, 1, 2, 1, 70, 70, 64))
    words = np.zeros((1, 1), np.uint64)
    bad: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (DtypeError, "torch tensors", (q.cpu().numpy(), k, v), {}),
        (DtypeError, "float64", (q.double(), k, v), {}),
        (ShapeError, "channels", (q, k[..., :32], v), {}),
        (ShapeError, "1 to 256", tuple(x.repeat(1, 1, 1, 5) for x in (q, k, v)), {}),
        (
            ShapeError,
            "multiple of the KV heads",
            (q[:, :1].repeat(1, 3, 1, 1), k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
            {},
        ),
        (ShapeError, "out has shape", (q, k, v), {"out": torch.empty(3)}),
        (ShapeError, "sequence ends at row 71", (q[0].mT.mT, k[0], v[0]), {"sequences": Spans([71], [1])}),
        (RoutingError, "scale", (q, k, v), {"scale": 0.0}),
        (RoutingError, "window", (q, k, v), {"window": 0}),
        (RoutingError, "uint64", (q, k, v), {"words": words.astype(np.int64)}),
        (RoutingError, "row tiles", (q, k, v), {"words": words[:0]}),
        (RoutingError, "heads", (q, k, v), {"words": np.zeros((3, 1, 1), np.uint64)}),
        (RoutingError, "groups", (q, k, v), {"words": words, "groups": 0}),
        (RoutingError, "a row", (q, k.repeat(1, 1, 64, 1), v.repeat(1, 1, 64, 1)), {"words": words}),
    ]
    for error, text, arrays, options in bad:
        with pytest.raises(error, match=text):
            triton_attention(*arrays, **{"quant": Quant(), **options})


def test_through_the_public_call(rng: np.random.Generator) -> None:
    q, k, v = operands(rng, 2, 4, 2, 130, 200, 64)
    routing = tilefuse.routing.local_sink(0.5)
    expected = tilefuse.attention(q, k, v, routing=routing, backend="reference", return_lse=True)
    found = tilefuse.attention(*tensors(q, k, v), routing=routing, backend="triton", return_lse=True)
    assert_close(found, reference.Attended(*expected), v)
    offsets = (np.array([0, 100, 130]), np.array([0, 120, 200]))
    flat = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v)]
    expected = tilefuse.attention(*flat, routing=routing, cu_seqlens=offsets, backend="reference", return_lse=True)
    found = tilefuse.attention(*tensors(*flat), routing=routing, cu_seqlens=offsets, backend="triton", return_lse=True)
    assert_close(found, reference.Attended(*expected), v)


# --- without a GPU, without the interpreter, without Triton ---------------------------------------------------------


def in_a_process(code: str, **environment: str) -> str:
    root = str(Path(tilefuse.__file__).parent.parent)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip
    return made.stdout.strip()


def test_importing_tilefuse_imports_neither_torch_nor_triton() -> None:
    code = "import sys, tilefuse, tilefuse.tilemix.triton_call; print({'torch', 'triton'} & set(sys.modules))"
    assert in_a_process(code) == "set()"


def test_a_missing_triton_is_named() -> None:
    code = """if True:
        import sys; sys.modules["triton"] = None
        from tilefuse.errors import DeviceError
        from tilefuse.tilemix.triton_call import triton_attention
        try: triton_attention(None, None, None, quant=None)
        except DeviceError as error: print(error)"""
    found = in_a_process(code)
    assert "triton" in found
    assert "tilefuse[triton]" in found


def test_tensors_in_cpu_memory_are_refused_without_the_interpreter() -> None:
    code = """if True:
        import torch
        from tilefuse.errors import DeviceError
        from tilefuse.tilemix.triton_call import triton_attention
        x = torch.zeros((1, 1, 8, 64))
        try: triton_attention(x, x, x, quant=None)
        except DeviceError as error: print(error)"""
    assert "TRITON_INTERPRET=1" in in_a_process(code, TRITON_INTERPRET="0")
    assert issubclass(DeviceError, RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "depth", "int8"),
    [
        ("cuda:90", 128, "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"),
        ("hip:gfx942", 128, "v_mfma_i32_32x32x16_i8"),
        ("hip:gfx1151", 64, "v_wmma_i32_16x16x16_iu8"),
    ],
)
def test_kernels_compile_for_real_gpus(target: str, depth: int, int8: str) -> None:
    """To machine code, with INT8 and bfloat16 matrix instructions, and quantisers that are left as written."""
    found = attention_gpu.in_a_process(target, depth)
    assert found.binary > 0
    assert int8 in found.matrix
    assert any("bf16" in name for name in found.matrix)
    assert found.local <= (64 << 10 if target.startswith("hip") else 99 << 10)
    # Division as IEEE 754 has it, and the addition that rounds to even not folded with the subtraction after it.
    if target.startswith("cuda"):
        assert found.divisions == [["div.rn.f32"], ["div.rn.f32"]]
    assert all(count > 0 for count in found.roundings)
