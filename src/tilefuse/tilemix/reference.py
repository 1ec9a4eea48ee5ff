"""Routed attention in NumPy: the executable specification that every back end is tested against. Slow.

`attention_tiles` goes through the tiles as the kernels do: operands in bfloat16 or INT8, scores and the state of the
online softmax in fp32. Bit-identical everywhere are the codes, the scales, the INT8 scores and their multipliers; sums
of 16-bit products and exponentials are not. `attention_exact` is the softmax in float64, without tiles or rounding.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse.errors import RoutingError, ShapeError
from tilefuse.tilemix.grid import BLOCK_M, BLOCK_N, Grid
from tilefuse.tilemix.routing_map import Routing

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]
Smoothing = Literal["none", "block", "global"]

LOG2E = math.log2(math.e)
_MAX_CODE = 127
_EXACT_DEPTH = 1040
"""Products of codes are summed exactly in fp32 up to this many: 127^2 d < 2^24."""


class Rows(NamedTuple):
    """INT8 queries: ``q ~ codes * scales[..., None]``."""

    codes: npt.NDArray[np.int8]
    """[..., L, d], within -127 to 127."""
    scales: Float32
    """[..., L]."""


class Keys(NamedTuple):
    """INT8 keys: ``k ~ codes * scales + means``, a scale and a mean a block of 64 keys."""

    codes: npt.NDArray[np.int8]
    """[..., L, d], within -127 to 127."""
    scales: Float32
    """[..., blocks]."""
    means: Array
    """bfloat16 [..., blocks, d]; zeros without smoothing."""


class Attended(NamedTuple):
    """What attention gives."""

    out: Array
    """[B, Hq, Lq, dv]: fp32 (tiles) or float64 (exact); zeros for a query that sees no key."""
    lse: Array
    """[B, Hq, Lq]: natural logarithm of the sum of exponentials; -inf for a query that sees no key."""


def to_bf16(x: npt.ArrayLike) -> Float32:
    """``x`` rounded to bfloat16 (to nearest, ties to even), held in fp32."""
    return np.asarray(x).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def score_factor(scale: float) -> np.float32:
    """The fp32 product of ``scale`` and log2(e), each rounded to fp32: the multiplier of 16-bit scores."""
    return np.float32(scale) * np.float32(LOG2E)


def quantise_rows(q: npt.ArrayLike, granularity: Literal["row", "block"] = "row") -> Rows:
    """Queries in INT8, after rounding to bfloat16.

    Args:
        q: [..., L, d], finite.
        granularity: One scale a row, or one a tile of 128 rows.
    """
    x = to_bf16(q)
    peak = np.abs(x).max(axis=-1, initial=0)
    if granularity == "block":
        for start in range(0, peak.shape[-1], BLOCK_M):
            tile = peak[..., start : start + BLOCK_M]
            tile[...] = tile.max(axis=-1, keepdims=True)
    elif granularity != "row":
        raise RoutingError(f'granularity is {granularity!r}: pass "row" or "block"')
    scales = _scales(peak)
    return Rows(_codes(x, scales[..., None]), scales)


def quantise_keys(k: npt.ArrayLike, smooth: Smoothing = "block") -> Keys:
    """Keys in INT8, after rounding to bfloat16, one scale a block of 64 keys; the last block may be shorter.

    A mean is the fp32 sum in key order times the rounded reciprocal of the count, rounded to bfloat16.

    Args:
        k: [..., L, d], finite.
        smooth: What is subtracted, in fp32, before: nothing, the mean of the block's keys or that of all.
    """
    if smooth not in ("none", "block", "global"):
        raise RoutingError(f'smooth is {smooth!r}: pass "none", "block" or "global"')
    x = to_bf16(k)
    length, depth = x.shape[-2:]
    blocks = -(-length // BLOCK_N)
    codes = np.zeros(x.shape, np.int8)
    scales = np.ones((*x.shape[:-2], blocks), np.float32)
    means = np.zeros((*x.shape[:-2], blocks, depth), ml_dtypes.bfloat16)
    if smooth == "global" and length:
        means[...] = _mean(x)[..., None, :]
    for b in range(blocks):
        keys = slice(b * BLOCK_N, min((b + 1) * BLOCK_N, length))
        block = x[..., keys, :]
        if smooth == "block":
            means[..., b, :] = _mean(block)
        if smooth != "none":
            block = block - means[..., b, None, :].astype(np.float32)
        scales[..., b] = _scales(np.abs(block).max(axis=(-2, -1), initial=0))
        codes[..., keys, :] = _codes(block, scales[..., b, None, None])
    return Keys(codes, scales, means)


def int8_scores(q_codes: Array, k_codes: Array) -> npt.NDArray[np.int32]:
    """Exact int32 products of codes: [..., Lq, d] by [..., Lk, d] -> [..., Lq, Lk]."""
    wide = np.float32 if q_codes.shape[-1] <= _EXACT_DEPTH else np.float64
    found: npt.NDArray[np.int32] = (q_codes.astype(wide) @ np.swapaxes(k_codes, -1, -2).astype(wide)).astype(np.int32)
    return found


@np.errstate(invalid="ignore", over="ignore")
def attention_tiles(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    routing: Routing | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    granularity: Literal["row", "block"] = "row",
    smooth: Smoothing = "block",
    open_block_16bit: bool = False,
    order: Literal["int8 first", "ascending"] = "int8 first",
) -> Attended:
    """Attention tile by tile, as the kernels compute it; NaN and Inf spread to the row tiles that see them.

    The exponent, in base 2, is ``raw * factor + offset - m``. 16-bit tiles: raw = the fp32 sum of q k, factor = f =
    `score_factor`, offset = 0. INT8 tiles: raw = the int32 sum of codes, factor = (s_q f) s_k, offset = (q . mean) f,
    which puts back what smoothing took from the keys, so that both kinds of tile may meet in one row.

    Args:
        q: [B, Hq, Lq, d].
        k: [B, Hk, Lk, d]; Hk divides Hq, and query head h sees KV head ``h // (Hq / Hk)``.
        v: [B, Hk, Lk, dv].
        routing: The INT8 tiles; None for none. Its grid must be that of the call.
        causal: Query i sees keys up to ``i + Lk - Lq``.
        window: Query i sees keys above ``i + Lk - Lq - window``.
        scale: Of the scores; 1 / sqrt(d) if None.
        granularity: A scale of the INT8 queries a row, or a tile of 128 rows.
        smooth: The mean that is subtracted from the keys before they are quantised.
        open_block_16bit: Whether the last block of keys, if incomplete, stays in 16 bits whatever its bit, as in a KV
            cache.
        order: INT8 tiles before the others, or tiles by their keys.

    Raises:
        ShapeError: The shapes don't fit each other.
        RoutingError: The routing isn't one of this call.
    """
    q, k, v = to_bf16(q), to_bf16(k), to_bf16(v)
    # A score of -inf would be a weight of 0.
    q, k = (np.where(np.isinf(x), np.float32(np.nan), x) for x in (q, k))
    batch, kv_heads, share, scale = _check(q, k, v, scale)
    grid = _grid(q, k, routing, causal, window, kv_heads)
    queries = q.reshape(batch, kv_heads, share, *q.shape[2:])
    bits = routing.bits() if routing is not None else np.zeros((grid.row_tiles, grid.groups), np.bool_)
    bits = np.broadcast_to(bits, (kv_heads, *bits.shape[-2:]))
    rows = quantise_rows(queries, granularity)
    keys = quantise_keys(k, smooth)
    factor = score_factor(scale)
    out = np.zeros((*queries.shape[:-1], v.shape[-1]), np.float32)
    lse = np.full(queries.shape[:-1], -np.inf, np.float32)
    sealed = grid.key_len // BLOCK_N if open_block_16bit else grid.key_tiles
    for b in range(batch):
        for h in range(kv_heads):
            for m in range(grid.row_tiles):
                tiles = np.arange(grid.first[m], grid.stop[m])
                routed = bits[h, m, tiles // grid.group] & (tiles < sealed)
                if order == "int8 first":
                    by = np.argsort(~routed, kind="stable")
                    tiles, routed = tiles[by], routed[by]
                span = slice(m * grid.block_m, min((m + 1) * grid.block_m, grid.query_len))
                state = _State(share, span.stop - span.start, v.shape[-1])
                tile_q = queries[b, h, :, span]
                for n, in_int8 in zip(tiles, routed, strict=True):
                    at = slice(n * BLOCK_N, min((n + 1) * BLOCK_N, grid.key_len))
                    if in_int8:
                        raw = int8_scores(rows.codes[b, h, :, span], keys.codes[b, h, at]).astype(np.float32)
                        folded = rows.scales[b, h, :, span] * factor
                        multiplier = folded * keys.scales[b, h, n]
                        offset = (tile_q @ keys.means[b, h, n].astype(np.float32)) * factor
                    else:
                        raw = tile_q @ k[b, h, at].T
                        multiplier = np.full(raw.shape[:-1], factor)
                        offset = np.zeros(raw.shape[:-1], np.float32)
                    visible = _visible(grid, span, at)
                    raw[..., ~visible] = -np.inf
                    state.seen |= visible.any(axis=1)
                    state.add(raw, multiplier, offset, v[b, h, at])
                out[b, h, :, span], lse[b, h, :, span] = state.end()
    return Attended(out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1]))


def attention_exact(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Attended:
    """Attention in float64, of finite operands as they are; arguments as `attention_tiles` takes them.

    Raises:
        ShapeError: The shapes don't fit each other.
    """
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    batch, kv_heads, share, scale = _check(q, k, v, scale)
    grid = Grid(q.shape[2], k.shape[2], causal=causal, window=window)
    seen = _visible(grid, slice(0, grid.query_len), slice(0, grid.key_len))
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    lse = np.full(q.shape[:-1], -np.inf)
    for b in range(batch):
        for h in range(kv_heads * share):
            scores = np.where(seen, q[b, h] @ k[b, h // share].T * scale, -np.inf)
            peak = scores.max(axis=-1, keepdims=True, initial=-np.inf)
            weights = np.exp(scores - np.where(np.isneginf(peak), 0, peak))
            total = weights.sum(axis=-1)
            some = total != 0  # NaN is no zero
            out[b, h][some] = (weights @ v[b, h // share])[some] / total[some, None]
            lse[b, h][some] = peak[some, 0] + np.log(total[some])
    return Attended(out, lse)


class _State:
    """Row maximum (base 2), sum of exponentials and output of a row tile: the online softmax."""

    def __init__(self, heads: int, rows: int, depth: int) -> None:
        self.peak = np.full((heads, rows), -np.inf, np.float32)
        self.seen = np.zeros(rows, np.bool_)
        self.total = np.zeros((heads, rows), np.float32)
        self.out = np.zeros((heads, rows, depth), np.float32)

    def add(self, raw: Float32, multiplier: Float32, offset: Float32, v: Float32) -> None:
        """Takes one tile: raw scores [heads, rows, keys], -inf where masked; a multiplier > 0 and an offset a row."""
        peak = np.maximum(self.peak, _scaled(raw.max(axis=-1), multiplier, offset))
        # A row that has seen no key yet: -inf - -inf would be NaN.
        guarded = np.where(np.isneginf(peak), np.float32(0), peak)
        rescale = np.exp2(self.peak - guarded)
        p = np.exp2(_scaled(raw, multiplier[..., None], (offset - guarded)[..., None]))
        self.total = rescale * self.total + p.sum(axis=-1)
        self.out = rescale[..., None] * self.out + to_bf16(p) @ v
        self.peak = peak

    def end(self) -> tuple[Float32, Float32]:
        """The outputs [heads, rows, dv] and natural log-sum-exps [heads, rows]."""
        # With keys, but all of their scores overflowed to -inf: no weights.
        self.total[(self.total == 0) & self.seen] = np.nan
        some = self.total != 0  # NaN is no zero
        total = np.where(some, self.total, np.float32(1))
        out = np.where(some[..., None], self.out / total[..., None], np.float32(0))
        lse = np.where(some, (self.peak + np.log2(total)) / np.float32(LOG2E), np.float32(-np.inf))
        return out, lse.astype(np.float32)


def _scaled(raw: Float32, multiplier: Float32, offset: Float32) -> Float32:
    """``raw * multiplier + offset`` rounded once; -inf where raw is, even if the multiplier has underflowed to 0."""
    masked = np.isneginf(raw)
    found: Float32 = np.where(masked, raw, _fma(np.where(masked, np.float32(0), raw), multiplier, offset))
    return found


def _fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """``a b + c`` rounded to fp32 once: products of fp32 numbers are exact in float64."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def _scales(peak: Float32) -> Float32:
    return np.where(peak == 0, np.float32(1), peak / np.float32(_MAX_CODE))


def _codes(x: Float32, scales: Float32) -> npt.NDArray[np.int8]:
    with np.errstate(invalid="ignore"):
        steps = np.clip(np.rint(x / scales), -_MAX_CODE, _MAX_CODE)
    # What isn't finite spreads through its scale.
    codes: npt.NDArray[np.int8] = np.where(np.isnan(steps), np.float32(0), steps).astype(np.int8)
    return codes


def _mean(x: Float32) -> Array:
    """Mean over the keys [..., keys, d], bfloat16 [..., d]."""
    total = np.add.accumulate(x, axis=-2, dtype=np.float32)[..., -1, :]
    return (total * (np.float32(1) / np.float32(x.shape[-2]))).astype(ml_dtypes.bfloat16)


def _visible(grid: Grid, rows: slice, keys: slice) -> npt.NDArray[np.bool_]:
    """Which keys the masks leave each query, bool [rows, keys]."""
    position = np.arange(rows.start, rows.stop)[:, None] + grid.offset
    key = np.arange(keys.start, keys.stop)
    seen = np.ones((len(position), len(key)), np.bool_)
    if grid.causal:
        seen &= key <= position
    if grid.window is not None:
        seen &= key > position - grid.window
    return seen


def _check(q: Array, k: Array, v: Array, scale: float | None) -> tuple[int, int, int, float]:
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError(f"q, k, v have {q.ndim}, {k.ndim}, {v.ndim} axes: pass [B, H, L, d]")
    batch, heads, _, depth = q.shape
    kv_heads = k.shape[1]
    if k.shape[:3] != v.shape[:3] or k.shape[0] != batch or k.shape[3] != depth:
        raise ShapeError(f"q {q.shape}, k {k.shape}, v {v.shape}: batch, keys, KV heads and depth must agree")
    if not kv_heads or heads % kv_heads:
        raise ShapeError(f"q has {heads} heads and k {kv_heads}: pass a multiple of the KV heads")
    if scale is None:
        scale = depth**-0.5
    if not 0 < scale < math.inf:
        raise RoutingError(f"scale is {scale}: pass a positive number")
    return batch, kv_heads, heads // kv_heads, scale


def _grid(q: Array, k: Array, routing: Routing | None, causal: bool, window: int | None, kv_heads: int) -> Grid:
    group = routing.grid.group if routing is not None else 1
    grid = Grid(q.shape[2], k.shape[2], causal=causal, window=window, group=group)
    if routing is not None:
        if routing.grid != grid:
            raise RoutingError(f"routing is of {routing.grid}: the call is of {grid}")
        if routing.heads not in (None, 1, kv_heads):
            raise RoutingError(f"routing has maps of {routing.heads} heads: k has {kv_heads}")
    return grid
