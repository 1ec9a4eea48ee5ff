"""Attention on the emulated array, by the microkernels, against the executable specification with the same routing."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import tilefuse as tf
from tilefuse._buffers import address
from tilefuse.designs.attention import attention as design
from tilefuse.emulator import iron, kernels
from tilefuse.errors import PlanError, QuantizationError
from tilefuse.plan import AttentionPlan
from tilefuse.tilemix import emulated, npu_streams
from tilefuse.tilemix.grid import Grid
from tilefuse.tilemix.npu_streams import Operands, Quantising
from tilefuse.tilemix.reference import (
    attention_exact,
    attention_tiles,
    int8_scores,
    quantise_keys,
    quantise_rows,
    to_bf16,
)
from tilefuse.tilemix.routing_map import Routing

Array = npt.NDArray[Any]

RELATIVE = 3.5e-3
"""Of the outputs' 2-norm. Rounding to bfloat16 costs at most 2^-8 of a number, and 1.6e-3 in the mean of squares; three
roundings have nothing to do with each other: the specification's of weights, the array's, and that of results."""

INTEGER = 1.5 * 2.0**23
"""What the kernels add to INT8 scores: integers below 2^22 beside it are exact in fp32."""


def operands(seed: int, heads: int, kv_heads: int, query_len: int, key_len: int, d: int, dv: int | None = None) -> Any:
    """q, k, v [1, H, L, d]; keys with a mean, so that smoothing matters."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(1, heads, query_len, d))
    k = rng.normal(size=(1, kv_heads, key_len, d)) + rng.normal(size=d)
    v = rng.normal(size=(1, kv_heads, key_len, dv or d))
    return [x.astype(np.float32) for x in (q, k, v)]


def routing_of(seed: int, grid: Grid, coverage: float, kv_heads: int | None = None) -> Routing:
    """Random bits, of all heads or of each head of keys."""
    shape = (grid.row_tiles, grid.groups) if kv_heads is None else (kv_heads, grid.row_tiles, grid.groups)
    return Routing.from_bits(np.random.default_rng(seed).random(shape) < coverage, grid)


def check(out: Array, lse: Array, q: Array, k: Array, v: Array, routing: Routing, **options: Any) -> None:
    """Against the specification: outputs, log-sum-exps, and zeros where a query sees no key."""
    grid = routing.grid
    wanted = attention_tiles(q, k, v, routing, causal=grid.causal, window=grid.window, **options)
    some = np.isfinite(wanted.lse[0])
    assert (np.isneginf(lse) == ~some).all()
    assert (out[~some] == 0).all()
    # A raw score is within 2^-13 of the sum of its products' sizes; the log-sum-exp is a mean of such errors.
    np.testing.assert_allclose(lse[some], wanted.lse[0][some], atol=4e-3, rtol=0)
    assert np.linalg.norm(out - wanted.out[0]) <= RELATIVE * np.linalg.norm(wanted.out)
    assert np.abs(out - wanted.out[0]).max() <= 4 * 2.0**-8 * np.abs(v).max()


def attend(q: Array, k: Array, v: Array, routing: Routing, columns: int, **options: Any) -> Any:
    """One sequence on the array; options as for the planner."""
    sequence = Operands(q[0], k[0], v[0], routing.grid)
    chosen = emulated.plan_of([sequence], [routing], columns=columns, **options)
    return emulated.run(chosen, [sequence], q.shape[-1] ** -0.5), chosen


@pytest.mark.parametrize("coverage", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("d", "causal"), [(64, True), (64, False), (128, True)])
def test_one_head(coverage: float, d: int, causal: bool) -> None:
    q, k, v = operands(1, 1, 1, 130, 200, d)
    routing = routing_of(2, Grid(130, 200, causal=causal), coverage)
    found, _ = attend(q, k, v, routing, columns=1)
    check(found.out[0], found.lse[0], q, k, v, routing)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "columns", "blocks", "share"),
    [
        (4, 2, 64, 2, 2, 1),
        (4, 1, 64, 2, 2, 2),
        (3, 1, 128, 2, 1, 2),  # a head of padding
        (4, 1, 128, 4, 1, 4),
        (2, 2, 64, 2, 1, 1),
    ],
)
def test_heads_that_share_keys(heads: int, kv_heads: int, d: int, columns: int, blocks: int, share: int) -> None:
    """A map for each head of keys; two heads a core, or columns that share a stream."""
    q, k, v = operands(3, heads, kv_heads, 128, 192, d)
    routing = routing_of(4, Grid(128, 192), 0.5, kv_heads)
    found, chosen = attend(q, k, v, routing, columns, blocks=blocks, share=share)
    assert (chosen.configuration.blocks, chosen.configuration.share) == (blocks, share)
    check(found.out[0], found.lse[0], q, k, v, routing)


@pytest.mark.parametrize(
    ("query_len", "key_len", "causal", "window"),
    [(1, 1, True, None), (65, 64, True, None), (200, 70, True, None), (129, 193, True, 50), (40, 130, False, 30)],
)
def test_ragged_lengths_and_windows(query_len: int, key_len: int, causal: bool, window: int | None) -> None:
    """Rows of no key among them, tiles of one key, windows that cross tiles; heads of 40 and values of 24, padded."""
    q, k, v = operands(5, 2, 1, query_len, key_len, 40, 24)
    routing = routing_of(6, Grid(query_len, key_len, causal=causal, window=window), 0.6)
    found, _ = attend(q, k, v, routing, columns=1)
    assert found.out[0].shape == (2, query_len, 24)
    check(found.out[0], found.lse[0], q, k, v, routing)


def test_sequences_of_several_lengths_in_one_run() -> None:
    """Each as alone, bit for bit: what a stream brings before and after changes nothing."""
    grids = [Grid(70, 140), Grid(128, 128), Grid(3, 65)]
    sequences, routings, alone = [], [], []
    for seed, grid in enumerate(grids):
        q, k, v = operands(seed, 2, 1, grid.query_len, grid.key_len, 64)
        sequences.append(Operands(q[0], k[0], v[0], grid))
        routings.append(routing_of(seed, grid, 0.5))
        alone.append(emulated.attend(sequences[-1:], routings[-1:], 0.125, columns=1))
    together = emulated.attend(sequences, routings, 0.125, columns=1)
    for number, each in enumerate(alone):
        np.testing.assert_array_equal(together.out[number], each.out[0])
        np.testing.assert_array_equal(together.lse[number], each.lse[0])


@pytest.mark.parametrize("smooth", ["none", "block", "global"])
def test_how_int8_operands_are_made(smooth: Any) -> None:
    """Scales by tile of queries, and means of keys; an incomplete last block stays in 16 bits on demand."""
    q, k, v = operands(7, 1, 1, 100, 150, 64)
    routing = routing_of(8, Grid(100, 150), 1.0)
    sequence = Operands(q[0], k[0], v[0], routing.grid)
    quantising = Quantising("block", smooth)
    found = emulated.attend([sequence], [routing], 0.125, quantising, open_block_16bit=True, columns=1)
    options = {"granularity": "block", "smooth": smooth, "open_block_16bit": True}
    check(found.out[0], found.lse[0], q, k, v, routing, **options)


def test_16_bit_tiles_are_near_the_exact_softmax() -> None:
    q, k, v = (to_bf16(x) for x in operands(9, 2, 1, 128, 256, 64))
    found, _ = attend(q, k, v, routing_of(9, Grid(128, 256), 0.0), columns=1)
    exact = attention_exact(q, k, v)
    assert np.linalg.norm(found.out[0] - exact.out[0]) <= RELATIVE * np.linalg.norm(exact.out)


def run_and_record(chosen: AttentionPlan, sequences: list[Operands]) -> list[tuple[Array, Array, Array]]:
    """(queries, keys, scores) of each call of ``scores_int8``, by way of a kernel that calls the real one."""
    entry = kernels.get(chosen.configuration.kernel).entry_points["scores_int8"]
    seen = []

    def record(q: Array, kv: Array, scores: Array) -> None:
        entry.call_addresses(address(q), address(kv), address(scores))
        seen.append((q.copy(), kv.copy(), scores.copy()))

    q, kv = npu_streams.pack(chosen, sequences, 0.125)
    y = np.zeros(chosen.y_words, np.int32)
    program = design(iron, chosen)
    iron.load(program, {entry.name: iron.PythonKernel(record, 1, (2,))}).run(program, q, kv, y)
    return seen


@pytest.mark.parametrize("d", [64, 128])
def test_int8_scores_are_bit_identical(d: int) -> None:
    """In the cores' memory: the int32 products of the specification's codes, exact in fp32, of every INT8 tile."""
    q, k, v = operands(10, 1, 1, 128, 192, d)
    q[0, 0, 5] *= 100
    routing = routing_of(11, Grid(128, 192, causal=False), 0.7)
    sequence = Operands(q[0], k[0], v[0], routing.grid)
    chosen = emulated.plan_of([sequence], [routing], columns=1)
    wanted = int8_scores(quantise_rows(q[0, 0]).codes, quantise_keys(k[0, 0]).codes)
    seen = run_and_record(chosen, [sequence])
    assert len(seen) == 4 * chosen.counts[0] > 0
    for queries, keys, scores in seen:
        row, key = queries[2] - 64, keys[-16]  # positions: query 0 stands at key 64
        blocks = scores[:2048].view(np.float32).reshape(4, 8, 8, 8)
        found = np.swapaxes(blocks, 1, 2).reshape(32, 64) - INTEGER
        np.testing.assert_array_equal(found, wanted[row : row + 32, key : key + 64])


def test_heads_that_are_too_large_are_refused() -> None:
    q, k, v = operands(12, 1, 1, 8, 8, 160)
    with pytest.raises(PlanError, match="heads of 160: the array's kernels take up to 128"):
        attend(q, k, v, routing_of(12, Grid(8, 8), 0.5), columns=1)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 2, 64), (4, 1, 128)])
def test_the_whole_array(heads: int, kv_heads: int, d: int) -> None:
    """All eight columns, as the planner has it."""
    q, k, v = operands(13, heads, kv_heads, 700, 700, d)
    routing = routing_of(14, Grid(700, 700), 0.75)
    found, chosen = attend(q, k, v, routing, columns=8)
    check(found.out[0], found.lse[0], q, k, v, routing)
    # The planner's estimate, without latencies, is a bound that the array comes near.
    assert chosen.costs.total < found.report.array_seconds * 1.05


# --- tilefuse.attention -----------------------------------------------------------------------------------------------


def test_the_public_function() -> None:
    """A batch, two heads of keys, a layout by its name."""
    q, k, v = (
        np.concatenate(pair)
        for pair in zip(operands(15, 2, 2, 150, 150, 64), operands(16, 2, 2, 150, 150, 64), strict=True)
    )
    out, lse = tf.attention(q, k, v, routing="local_sink50", return_lse=True, backend="emulator")
    assert (out.dtype, out.shape, lse.shape) == (np.float32, q.shape, q.shape[:3])
    routing = tf.routing.local_sink(0.5, seq_len=150)
    assert 0 < routing.coverage() < 1
    for b in range(2):
        check(out[b], lse[b], q[b : b + 1], k[b : b + 1], v[b : b + 1], routing)


def test_packed_sequences_and_bfloat16() -> None:
    """One of them empty, one with more queries than keys; written where the caller wants it."""
    offsets_q, offsets_k = [0, 5, 5, 75], [0, 3, 3, 103]
    q, k, v = (x[0].swapaxes(0, 1).astype(ml_dtypes.bfloat16) for x in operands(17, 2, 1, 75, 103, 64))
    out = np.empty((75, 2, 64), ml_dtypes.bfloat16)
    given = {"routing": "one", "cu_seqlens": (offsets_q, offsets_k), "return_lse": True, "causal": True}
    found, lse = tf.attention(q, k, v, **given, out=out, backend="emulator")
    assert found is out
    wanted, wanted_lse = tf.attention(q, k, v, **given, backend="reference")
    difference = out.astype(np.float32) - wanted.astype(np.float32)
    assert np.linalg.norm(difference) <= 2 * RELATIVE * np.linalg.norm(wanted.astype(np.float32))
    assert np.isneginf(wanted_lse[:2]).all()
    np.testing.assert_allclose(lse, wanted_lse, atol=4e-3)
    assert (out[:2] == 0).all()


def test_queries_without_keys() -> None:
    q, k = np.ones((1, 1, 3, 64), np.float32), np.ones((1, 1, 0, 64), np.float32)
    assert (tf.attention(q, k, k, backend="emulator") == 0).all()
    assert tf.attention(q[:, :, :0], q, q, backend="emulator").shape == (1, 1, 0, 64)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3.4e38])
def test_values_without_bfp16_are_refused(value: float) -> None:
    q = np.ones((1, 1, 3, 64), np.float32)
    k = q.copy()
    k[0, 0, 2, 5] = value
    with pytest.raises(QuantizationError, match=r"k\[0, 2, 5\] is (nan|inf|3.*e\+38): .* use backend=\"cpu\""):
        tf.attention(q, k, q, backend="emulator")
