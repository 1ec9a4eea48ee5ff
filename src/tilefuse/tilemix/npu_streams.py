"""The streams of attention on the array: queries, keys and values as its cores read them, and results from theirs.

Which byte goes where is up to `tilefuse.attention_configurations` and the kernels, the order of the work to the plan.
Operands are rounded to bfloat16 and quantised here, once for all tiles, by the rules of
`tilefuse.tilemix.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse import arch
from tilefuse._buffers import aligned_empty
from tilefuse.attention_configurations import (
    CORE_ROWS,
    HALF,
    HEADER_BYTES,
    INT8_OBJECTS,
    KEY_TILE,
    META_BYTES,
    PIECE_ROWS,
    PIECES,
    ROW_TILE,
    WIDE_OBJECTS,
    AttentionConfiguration,
)
from tilefuse.plan.score_tiles import AttentionPlan, Lengths
from tilefuse.tilemix.grid import Grid
from tilefuse.tilemix.reference import Keys, Smoothing, quantise_keys, quantise_rows, score_factor
from tilefuse.tilemix.routing_map import Routing

Array = npt.NDArray[Any]
Words = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

_NO_WINDOW = np.iinfo(np.int32).max
_BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Operands:
    """One sequence: q [Hq, Lq, d], k and v [Hk, Lk, d], of any float type."""

    q: Array
    k: Array
    v: Array
    grid: Grid


@dataclass(frozen=True)
class Quantising:
    """How the operands of INT8 tiles are made; see `tilefuse.tilemix.reference`."""

    granularity: Any = "row"
    smooth: Smoothing = "block"


def lengths(grid: Grid, routing: Routing | None, *, open_block_16bit: bool = False) -> Lengths:
    """What the planner asks of a sequence.

    Args:
        grid: The sequence's tiles, for a product without routing.
        routing: Its INT8 tiles; None for none.
        open_block_16bit: Whether an incomplete last block of keys stays in 16 bits.
    """
    tiles = np.arange(grid.key_tiles)
    if routing is None:
        int8 = np.zeros((1, grid.row_tiles, grid.key_tiles), np.bool_)
    else:
        bits = routing.bits()
        int8 = bits.reshape(-1, *bits.shape[-2:])[..., tiles // grid.group]
    if open_block_16bit and grid.key_len % KEY_TILE:
        int8 = int8.copy()
        int8[..., -1] = False
    return Lengths(grid.query_len, grid.key_len, int8, tuple(grid.first.tolist()), tuple(grid.stop.tolist()))


def pack(
    plan: AttentionPlan, sequences: Sequence[Operands], scale: float, quantising: Quantising | None = None
) -> tuple[Words, Words]:
    """The buffers ``q`` and ``kv`` of a plan.

    Args:
        plan: The plan for `lengths` of these sequences, in this order.
        sequences: Their operands; heads smaller than the plan's d are padded with zeros.
        scale: Of the scores, before the softmax.
        quantising: How INT8 operands are made.
    """
    chosen = quantising or Quantising()
    return pack_queries(plan, sequences, scale, chosen), pack_keys(plan, sequences, chosen)


def pack_queries(plan: AttentionPlan, sequences: Sequence[Operands], scale: float, quantising: Quantising) -> Words:
    """The buffer ``q``: each column's query tiles in the order of its work, a core's 32 rows as one object."""
    config = plan.configuration
    factor = score_factor(scale)
    tiled = [_query_objects(config, sequence, factor, quantising) for sequence in sequences]
    out = aligned_empty(plan.q_words * arch.WORD).reshape(plan.items, arch.CORE_ROWS, config.q_object)
    head = out[..., :HEADER_BYTES].view(np.int32)
    number = 0
    for items in plan.columns:
        for item in items:
            out[number] = tiled[item.sequence][item.head, item.query_tile]
            head[number, :, :2] = item.counts
            number += 1
    return out.reshape(-1).view(np.int32)


def _query_objects(
    config: AttentionConfiguration, sequence: Operands, factor: np.float32, quantising: Quantising
) -> npt.NDArray[np.uint8]:
    """uint8 [heads][query tiles][cores][bytes], without the counts."""
    grid, d = sequence.grid, config.d
    heads = len(sequence.q)
    rows = quantise_rows(sequence.q, quantising.granularity)
    cores = (heads, grid.row_tiles, arch.CORE_ROWS)
    out = np.zeros((*cores, config.q_object), np.uint8)
    head = out[..., :HEADER_BYTES].view(np.int32)
    tile, core = np.meshgrid(np.arange(grid.row_tiles), np.arange(arch.CORE_ROWS), indexing="ij")
    head[..., 2] = tile * ROW_TILE + core * CORE_ROWS + grid.offset
    head[..., 3] = grid.key_len
    head[..., 4] = _NO_WINDOW if grid.window is None else min(grid.window, _NO_WINDOW)
    head[..., 5] = np.float32(factor).view(np.int32)
    head[..., 6] = grid.causal
    codes, scales = HEADER_BYTES + 4 * CORE_ROWS, HEADER_BYTES
    wide = codes + CORE_ROWS * d
    padded = grid.row_tiles * ROW_TILE
    folded = np.zeros((heads, padded), np.float32)
    folded[:, : grid.query_len] = rows.scales * factor
    out[..., scales:codes].view(np.float32)[...] = folded.reshape(*cores, CORE_ROWS)
    out[..., codes:wide].view(np.int8)[...] = _left_blocks(
        _padded(rows.codes, padded, d).reshape(*cores, CORE_ROWS, d), 8
    )
    q16 = _padded(sequence.q.astype(np.float32).astype(_BF16), padded, d).reshape(*cores, CORE_ROWS, d)
    out[..., wide:].view(_BF16)[...] = _left_blocks(q16, 4)
    return out


def pack_keys(plan: AttentionPlan, sequences: Sequence[Operands], quantising: Quantising) -> Words:
    """The buffer ``kv``: every tile as a 16-bit one, then every tile as an INT8 one, as far as the routing has them."""
    config = plan.configuration
    out = aligned_empty(plan.kv_words * arch.WORD)
    wide_bytes, int8_bytes = config.tile_bytes(int8=False), config.tile_bytes(int8=True)
    for number, sequence in enumerate(sequences):
        start, count = plan.first_tiles[number], plan.kv_heads * plan.key_tiles[number]
        values = _value_objects(config, sequence)
        if plan.has_wide:
            at = out[start * wide_bytes :][: count * wide_bytes]
            _pack_tiles(at, _key_halves(config, sequence), values, WIDE_OBJECTS)
        if plan.has_int8:
            at = out[plan.int8_offset * arch.WORD + start * int8_bytes :][: count * int8_bytes]
            _pack_tiles(at, _key_codes(config, sequence, quantising), values, INT8_OBJECTS)
    return out.view(np.int32)


def _pack_tiles(out: npt.NDArray[np.uint8], keys: Array, values: Array, objects: int) -> None:
    tiles = out.reshape(*values.shape[:2], objects, -1)
    tiles[:, :, : objects - 2] = keys
    tiles[:, :, objects - 2 :] = values


def _objects(config: AttentionConfiguration, sequence: Operands, count: int) -> npt.NDArray[np.uint8]:
    """uint8 [heads][key tiles][objects][bytes], all 0 but the first key of each."""
    tiles = sequence.grid.key_tiles
    out = np.zeros((len(sequence.k), tiles, count, config.kv_object), np.uint8)
    step = KEY_TILE // count
    meta = out[..., -META_BYTES:].view(np.int32)
    meta[..., 0] = np.arange(tiles)[:, None] * KEY_TILE + np.arange(count) * step
    return out


def _key_halves(config: AttentionConfiguration, sequence: Operands) -> npt.NDArray[np.uint8]:
    out = _objects(config, sequence, 2)
    halves = _wide_halves(config, sequence.k, sequence.grid)
    out[..., : config.payload_bytes].view(_BF16)[...] = _right_blocks(np.swapaxes(halves, -1, -2))
    return out


def _value_objects(config: AttentionConfiguration, sequence: Operands) -> npt.NDArray[np.uint8]:
    out = _objects(config, sequence, 2)
    out[..., : config.payload_bytes].view(_BF16)[...] = _right_blocks(_wide_halves(config, sequence.v, sequence.grid))
    return out


def _wide_halves(config: AttentionConfiguration, x: Array, grid: Grid) -> Array:
    """bfloat16 [heads][key tiles][2][32 keys][d]."""
    padded = _padded(x.astype(np.float32).astype(_BF16), grid.key_tiles * KEY_TILE, config.d)
    return padded.reshape(len(x), grid.key_tiles, 2, HALF, config.d)


def _key_codes(config: AttentionConfiguration, sequence: Operands, quantising: Quantising) -> npt.NDArray[np.uint8]:
    grid, d = sequence.grid, config.d
    keys: Keys = quantise_keys(sequence.k, quantising.smooth)
    out = _objects(config, sequence, 1)
    codes = _padded(keys.codes, grid.key_tiles * KEY_TILE, d).reshape(len(sequence.k), grid.key_tiles, 1, KEY_TILE, d)
    payload = config.payload_bytes
    out[..., :payload].view(np.int8)[...] = _right_blocks(np.swapaxes(codes, -1, -2))
    means = out[..., 0, payload : payload + 2 * d].view(_BF16)
    means[..., : keys.means.shape[-1]] = keys.means
    out[..., 0, -META_BYTES:].view(np.float32)[..., 1] = keys.scales
    return out


def _padded(x: Array, rows: int, d: int) -> Array:
    """[heads][L][d] with zeros up to ``rows`` and ``d``."""
    out = np.zeros((len(x), rows, d), x.dtype)
    out[:, : x.shape[1], : x.shape[2]] = x
    return out


def _left_blocks(x: Array, rows: int) -> Array:
    """A matrix [..., m, k] as the left operand of products: blocks [m / rows][k / 8] of [rows][8], flat."""
    *batch, m, k = x.shape
    return np.swapaxes(x.reshape(*batch, m // rows, rows, k // 8, 8), -3, -2).reshape(*batch, m * k)


def _right_blocks(x: Array) -> Array:
    """A matrix [..., k, n] as the right operand of products: blocks [k / 8][n / 8] of [8][8], flat."""
    return _left_blocks(x, 8)


def unpack(plan: AttentionPlan, y: Words) -> tuple[list[Float32], list[Float32]]:
    """The results in the buffer ``y``, of each sequence: outputs [Hq, Lq, d], bfloat16 in fp32, and lse [Hq, Lq]."""
    config = plan.configuration
    d = config.d
    pieces = y.view(np.uint8).reshape(plan.items, PIECES, arch.CORE_ROWS, config.y_object)
    rows = pieces[..., : PIECE_ROWS * d * 2].view(_BF16).reshape(plan.items, PIECES, arch.CORE_ROWS, PIECE_ROWS, d)
    lse = pieces[..., PIECE_ROWS * d * 2 :].view(np.float32)[..., :PIECE_ROWS]
    outputs = [np.empty((plan.heads, q, d), np.float32) for q, _ in plan.lengths]
    sums = [np.empty((plan.heads, q), np.float32) for q, _ in plan.lengths]
    number = 0
    for items in plan.columns:
        for item in items:
            start = item.query_tile * ROW_TILE
            count = min(ROW_TILE, plan.lengths[item.sequence][0] - start)
            tile = np.swapaxes(rows[number], 0, 1).reshape(ROW_TILE, d)
            outputs[item.sequence][item.head, start : start + count] = tile[:count]
            sums[item.sequence][item.head, start : start + count] = np.swapaxes(lse[number], 0, 1).reshape(-1)[:count]
            number += 1
    return outputs, sums
