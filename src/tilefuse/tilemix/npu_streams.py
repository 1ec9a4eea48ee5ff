"""The streams of attention on the array: queries, keys and values in the order of a plan's work, and results from it.

Operands are rounded to bfloat16 and quantised here, once for all tiles, by the rules of `tilefuse.tilemix.reference`;
`tilefuse.tilemix.npu_operands` has their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tilefuse import arch
from tilefuse._buffers import aligned_empty
from tilefuse.attention_configurations import (
    CORE_ROWS,
    HEADER_BYTES,
    INT8_OBJECTS,
    KEY_TILE,
    META_BYTES,
    PIECES,
    ROW_TILE,
    WIDE_OBJECTS,
    AttentionConfiguration,
)
from tilefuse.errors import QuantizationError
from tilefuse.plan.score_tiles import NO_HEAD, AttentionPlan, Lengths
from tilefuse.tilemix import npu_operands
from tilefuse.tilemix.grid import Grid
from tilefuse.tilemix.reference import Smoothing, quantise_keys, quantise_rows, score_factor, to_bf16
from tilefuse.tilemix.routing_map import Routing

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

_NO_WINDOW = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Operands:
    """One sequence: q [Hq, Lq, d], k and v [Hk, Lk, d], of any float type, and its masks."""

    q: Array
    k: Array
    v: Array
    grid: Grid


@dataclass(frozen=True)
class Quantising:
    """How the operands of INT8 tiles are made; see `tilefuse.tilemix.reference`."""

    granularity: Literal["row", "block"] = "row"
    smooth: Smoothing = "block"


def lengths(grid: Grid, routing: Routing | None, *, open_block_16bit: bool = False) -> Lengths:
    """What the planner asks of a sequence.

    Args:
        grid: The sequence's tiles and masks.
        routing: Its INT8 tiles; None for none.
        open_block_16bit: Whether an incomplete last block of keys stays in 16 bits.
    """
    tiles = np.arange(grid.key_tiles)
    if routing is None:
        int8 = np.zeros((1, grid.row_tiles, grid.key_tiles), np.bool_)
    else:
        bits = routing.bits()
        int8 = (bits if bits.ndim == 3 else bits[None])[..., tiles // routing.grid.group]
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

    Raises:
        QuantizationError: A value is NaN or infinite, in bfloat16 too: bfp16 has neither.
    """
    chosen = quantising or Quantising()
    for number, sequence in enumerate(sequences):
        for name in ("q", "k", "v"):
            _check_finite(getattr(sequence, name), f"{name} of sequence {number}" if len(sequences) > 1 else name)
    return pack_queries(plan, sequences, scale, chosen), pack_keys(plan, sequences, chosen)


def _check_finite(x: Array, what: str) -> None:
    with np.errstate(over="ignore"):
        wrong = np.argwhere(~np.isfinite(to_bf16(x)))
    if len(wrong):
        at = ", ".join(map(str, wrong[0]))
        raise QuantizationError(
            f"{what}[{at}] is {x[tuple(wrong[0])]}: the array's multipliers take finite numbers, in bfloat16; use "
            'backend="cpu"'
        )


def pack_queries(plan: AttentionPlan, sequences: Sequence[Operands], scale: float, quantising: Quantising) -> Words:
    """The buffer ``q``: each column's query tiles in the order of its work, a core's 32 rows as one object."""
    config = plan.configuration
    factor = score_factor(scale)
    tiled = [
        _query_objects(config, sequence, factor, quantising) if sequence.grid.row_tiles else np.empty(0, np.uint8)
        for sequence in sequences
    ]
    out = pack_counts(plan).view(np.uint8).reshape(-1, arch.CORE_ROWS, config.q_object)
    behind = 2 * arch.WORD
    for number, (item, head) in enumerate(plan.slots()):
        if head != NO_HEAD:
            out[number, :, behind:] = tiled[item.sequence][head, item.query_tile, :, behind:]
    return out.reshape(-1).view(np.int32)


def pack_counts(plan: AttentionPlan) -> Words:
    """The buffer ``q`` with zeros for queries: the counts of tiles are all that the cores' loops go by."""
    out = aligned_empty(plan.q_words * arch.WORD).view(np.int32)
    out[...] = 0
    heads = out.reshape(-1, arch.CORE_ROWS, plan.configuration.q_object // arch.WORD)
    for number, (item, _) in enumerate(plan.slots()):
        heads[number, :, :2] = item.counts
    return out


def _query_objects(
    config: AttentionConfiguration, sequence: Operands, factor: np.float32, quantising: Quantising
) -> Bytes:
    """uint8 [heads][query tiles][cores][bytes], without the counts."""
    grid, d = sequence.grid, config.d
    heads = len(sequence.q)
    rows = quantise_rows(sequence.q, quantising.granularity)
    cores = (heads, grid.row_tiles, arch.CORE_ROWS, CORE_ROWS)
    padded = grid.row_tiles * ROW_TILE
    scales = np.ones((heads, padded), np.float32)
    scales[:, : grid.query_len] = rows.scales
    codes = _padded(rows.codes, padded, d).reshape(*cores, d)
    wide = _padded(to_bf16(sequence.q), padded, d).reshape(*cores, d)

    out = np.zeros((*cores[:3], config.q_object), np.uint8)
    head = out[..., :HEADER_BYTES].view(np.int32)
    tile, core = np.meshgrid(np.arange(grid.row_tiles), np.arange(arch.CORE_ROWS), indexing="ij")
    head[..., 2] = tile * ROW_TILE + core * CORE_ROWS + grid.offset
    head[..., 3] = grid.key_len
    head[..., 4] = _NO_WINDOW if grid.window is None else min(grid.window, _NO_WINDOW)
    head[..., 6] = grid.causal
    first, rest = HEADER_BYTES + 4 * CORE_ROWS, HEADER_BYTES + (4 + d) * CORE_ROWS
    out[..., HEADER_BYTES:first] = (scales * factor).reshape(cores).view(np.uint8)
    out[..., first:rest] = npu_operands.query_codes(codes)
    out[..., rest:] = npu_operands.query_rest(wide, codes, scales.reshape(cores))
    return out


def pack_keys(plan: AttentionPlan, sequences: Sequence[Operands], quantising: Quantising) -> Words:
    """The buffer ``kv``: every tile as a 16-bit one, then every tile as an INT8 one, as far as the routing has them."""
    config = plan.configuration
    out = aligned_empty(plan.kv_words * arch.WORD)
    payload = config.kv_object - META_BYTES
    for number, sequence in enumerate(sequences):
        shape = (plan.kv_heads, plan.key_tiles[number])
        if not shape[1]:
            continue
        first = np.arange(shape[1], dtype=np.int32)[:, None] * KEY_TILE
        values = npu_operands.values(_tiles(to_bf16(sequence.v), config.d))
        start, count = plan.first_tiles[number], shape[0] * shape[1]
        if plan.has_wide:
            size = config.tile_bytes(int8=False)
            tiles = out[start * size :][: count * size].reshape(*shape, WIDE_OBJECTS, -1)
            tiles[:, :, :2, :payload] = npu_operands.wide_keys(_tiles(to_bf16(sequence.k), config.d))
            tiles[:, :, 2:, :payload] = values
            _meta(tiles)[..., 0] = first
        if plan.has_int8:
            size = config.tile_bytes(int8=True)
            tiles = out[plan.int8_offset * arch.WORD + start * size :][: count * size]
            tiles = tiles.reshape(*shape, INT8_OBJECTS, -1)
            keys = quantise_keys(sequence.k, quantising.smooth)
            means = _padded(keys.means, shape[1], config.d)
            tiles[:, :, 0, :payload] = npu_operands.int8_keys(_tiles(keys.codes, config.d), means)
            tiles[:, :, 1:, :payload] = values
            meta = _meta(tiles)
            meta[..., 0] = first
            meta[:, :, 0, 1] = keys.scales.view(np.int32)
    return out.view(np.int32)


def _meta(tiles: Bytes) -> Words:
    """What stands behind the objects' payload, zeroed: int32 [..., 16]."""
    meta: Words = tiles[..., -META_BYTES:].view(np.int32)
    meta[...] = 0
    return meta


def _tiles(x: Array, d: int) -> Array:
    """[heads][L][..] as [heads][key tiles][64][d], zeros behind."""
    tiles = -(-x.shape[1] // KEY_TILE)
    return _padded(x, tiles * KEY_TILE, d).reshape(len(x), tiles, KEY_TILE, d)


def _padded(x: Array, rows: int, d: int) -> Array:
    """[heads][L][..] with zeros up to ``rows`` and ``d``."""
    out = np.zeros((len(x), rows, d), x.dtype)
    out[:, : x.shape[1], : x.shape[2]] = x
    return out


def unpack(plan: AttentionPlan, y: Words) -> tuple[list[Float32], list[Float32]]:
    """The results in the buffer ``y``, of each sequence: outputs [Hq, Lq, d], bfloat16 in fp32, and lse [Hq, Lq]."""
    config = plan.configuration
    pieces = y.view(np.uint8).reshape(-1, PIECES, arch.CORE_ROWS, config.y_object)
    rows, maxima, sums = npu_operands.results(np.swapaxes(pieces, 1, 2), config.d)
    rows = rows.reshape(len(pieces), ROW_TILE, config.d)
    logs = npu_operands.lse(maxima, sums).reshape(len(pieces), ROW_TILE)
    outputs = [np.empty((plan.heads, queries, config.d), np.float32) for queries, _ in plan.lengths]
    lse = [np.empty((plan.heads, queries), np.float32) for queries, _ in plan.lengths]
    for number, (item, head) in enumerate(plan.slots()):
        if head != NO_HEAD:
            start = item.query_tile * ROW_TILE
            count = min(ROW_TILE, plan.lengths[item.sequence][0] - start)
            outputs[item.sequence][head, start : start + count] = rows[number, :count]
            lse[item.sequence][head, start : start + count] = logs[number, :count]
    return outputs, lse
