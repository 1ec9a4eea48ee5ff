"""The Triton kernels of the routed attention: key quantisation, expansion of the routing words, attention.

Imports Triton, and so is imported by `tilefuse.tilemix.triton_call` alone, on the first call. Blocks of Triton have
sides that are powers of two: `DP` is a head dimension `D` rounded up. `UPCAST` is set where Triton's interpreter runs
the kernels: it multiplies the bits of bfloat16 as integers and truncates a conversion to it, so there operands are
widened to float32, and values are rounded to bfloat16 by hand. Sums of products are the same, products of bfloat16
being exact in float32.

Tables, all int32 (`triton_call` makes them):

* `seqs` [sequences, 8]: first query row, first key row, queries, keys, first key block, first map row, group, first row
  tile.
* `rows` [programs, 2]: sequence and first query row of a program's block of rows.
* `blocks` [key blocks, 2]: sequence and index of a 64-key block.
* `row_tiles` [row tiles, 2]: sequence and index of a tile of 128 rows; `maps` [map rows, 2]: the same for the rows of
  the routing map, which sequences of a batch may share.
* `tiles` [map heads, map rows, capacity]: the executed key tiles of a row tile, INT8 before 16-bit and, in each, those
  that need no mask before those that do; `ends` [map heads, map rows, 4]: where each of these four runs ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments by kind, several to a line.
# fmt: off

ROW_TILE = tl.constexpr(128)
KEY_TILE = tl.constexpr(64)
# Key tiles whose q.mean terms one matrix product gives.
BIASES = tl.constexpr(16)
# Adding and subtracting 1.5 * 2^23 rounds a float32 of magnitude up to 2^22 to an integer, ties to even.
ROUNDER = tl.constexpr(12582912.0)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _bf16(x, UPCAST: tl.constexpr):
    """float32 to bfloat16, ties to even; the same values in float32 under the interpreter."""
    if UPCAST:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = bits.to(tl.float32, bitcast=True)
    else:
        rounded = x.to(tl.bfloat16)
    return rounded


@triton.jit
def _operand(x, UPCAST: tl.constexpr):
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def _magnitude(x):
    """Bits of |x|, float32: they order as the magnitudes do, Inf above all numbers and NaN above Inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(largest):
    """Scale of codes, given the largest of the magnitudes' bits; NaN if that isn't finite."""
    absmax = largest.to(tl.float32, bitcast=True)
    scale = tl.where(absmax == 0.0, 1.0, tl.div_rn(absmax, 127.0))
    return tl.where(largest < 0x7F800000, scale, float("nan"))


@triton.jit
def _codes(x, scale):
    ratio = tl.minimum(tl.maximum(tl.div_rn(x, scale), -127.0), 127.0)
    return ((ratio + ROUNDER) - ROUNDER).to(tl.int32).to(tl.int8)


@triton.jit
def key_means(k, means, seqs, stride_b, stride_l, stride_h, sequences, D: tl.constexpr, DP: tl.constexpr,
              UPCAST: tl.constexpr):
    """One bfloat16 mean of all the keys of a sequence and head, summed in key order: means [heads, sequences, D]."""
    seq, head = tl.program_id(0), tl.program_id(1)
    info = seqs + seq * 8
    count = tl.load(info + 3)
    cols = tl.arange(0, DP)
    base = (k + seq.to(tl.int64) * stride_b + tl.load(info + 1).to(tl.int64) * stride_l
            + head.to(tl.int64) * stride_h + cols)
    total = tl.zeros([DP], tl.float32)
    for _ in range(count):
        total += tl.load(base, mask=cols < D, other=0.0).to(tl.float32)
        base += stride_l
    divisor = tl.zeros([DP], tl.float32) + tl.maximum(count, 1).to(tl.float32)
    inverse = tl.div_rn(tl.full([DP], 1.0, tl.float32), divisor)
    at = means + (head * sequences + seq) * D + cols
    tl.store(at, _bf16(total * inverse, UPCAST).to(tl.bfloat16), mask=cols < D)


@triton.jit
def quantise_keys(k, codes, scales, means, sequence_means, seqs, blocks, stride_b, stride_l, stride_h, sequences,
                  key_blocks, D: tl.constexpr, DP: tl.constexpr, SMOOTH: tl.constexpr, UPCAST: tl.constexpr):
    """One 64-key block: codes [heads, blocks, 64, D] int8, scales [heads, blocks], means [heads, blocks, D] bfloat16.

    SMOOTH: 0 no mean, 1 the block's own, 2 that of `sequence_means`. Rows past the sequence's end get codes of 0.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(blocks + block * 2)
    info = seqs + seq * 8
    start = tl.load(blocks + block * 2 + 1) * KEY_TILE
    count = tl.minimum(tl.load(info + 3) - start, KEY_TILE)
    cols = tl.arange(0, DP)
    base = (k + seq.to(tl.int64) * stride_b + (tl.load(info + 1) + start).to(tl.int64) * stride_l
            + head.to(tl.int64) * stride_h)
    rows = tl.arange(0, KEY_TILE)
    real = (rows[:, None] < count) & (cols[None, :] < D)
    x = tl.load(base + rows[:, None] * stride_l + cols[None, :], mask=real, other=0.0).to(tl.float32)
    at = (head * key_blocks + block).to(tl.int64)
    if SMOOTH != 0:
        if SMOOTH == 1:
            total = tl.zeros([DP], tl.float32)
            for row in range(count):
                total += tl.load(base + row * stride_l + cols, mask=cols < D, other=0.0).to(tl.float32)
            divisor = tl.zeros([DP], tl.float32) + count.to(tl.float32)
            mean = _bf16(total * tl.div_rn(tl.full([DP], 1.0, tl.float32), divisor), UPCAST)
        else:
            mean = tl.load(sequence_means + (head * sequences + seq) * D + cols, mask=cols < D, other=0.0)
        tl.store(means + at * D + cols, mean.to(tl.bfloat16), mask=cols < D)
        x = tl.where(real, x - mean.to(tl.float32)[None, :], 0.0)
    scale = _scale(tl.max(tl.max(_magnitude(x), 1), 0))
    tl.store(scales + at, scale)
    where = codes + at * (KEY_TILE * D) + rows[:, None] * D + cols[None, :]
    tl.store(where, _codes(x, tl.zeros_like(x) + scale), mask=cols[None, :] < D)


@triton.jit
def quantise_rows(q, codes, scales, seqs, row_tiles, stride_b, stride_l, stride_h, tile_count, D: tl.constexpr,
                  DP: tl.constexpr, PER_TILE: tl.constexpr, CODES: tl.constexpr):
    """A 128-row tile of the queries: scales [heads, tiles, 128], and, with CODES, codes [heads, tiles, 128, D]."""
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(row_tiles + tile * 2)
    info = seqs + seq * 8
    start = tl.load(row_tiles + tile * 2 + 1) * ROW_TILE
    count = tl.load(info + 2) - start
    rows = tl.arange(0, ROW_TILE)
    cols = tl.arange(0, DP)
    base = (q + seq.to(tl.int64) * stride_b + (tl.load(info) + start).to(tl.int64) * stride_l
            + head.to(tl.int64) * stride_h)
    real = (rows[:, None] < count) & (cols[None, :] < D)
    x = tl.load(base + rows[:, None] * stride_l + cols[None, :], mask=real, other=0.0).to(tl.float32)
    largest = tl.max(_magnitude(x), 1)
    if PER_TILE:
        largest = tl.zeros_like(largest) + tl.max(largest, 0)
    scale = _scale(largest)
    at = (head * tile_count + tile).to(tl.int64) * ROW_TILE
    tl.store(scales + at + rows, scale)
    if CODES:
        where = codes + at * D + rows[:, None] * D + cols[None, :]
        tl.store(where, _codes(x, tl.zeros_like(x) + scale[:, None]), mask=cols[None, :] < D)


@triton.jit
def int8_scores(codes_q, codes_k, out, columns, D: tl.constexpr, DP: tl.constexpr):
    """The integer scores of one row tile and one key tile, as the attention kernel forms them; for checks."""
    rows = tl.program_id(0) * ROW_TILE + tl.arange(0, ROW_TILE)
    keys = tl.program_id(1) * KEY_TILE + tl.arange(0, KEY_TILE)
    cols = tl.arange(0, DP)
    q8 = tl.load(codes_q + rows[:, None] * D + cols[None, :], mask=cols[None, :] < D, other=0)
    k8 = tl.load(codes_k + keys[None, :] * D + cols[:, None], mask=cols[:, None] < D, other=0)
    tl.store(out + rows[:, None] * columns + keys[None, :], tl.dot(q8, k8, out_dtype=tl.int32))


@triton.jit
def _kinds(words, tile, begin, stop, first, last, keys, window, group, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
           ROUTED: tl.constexpr):
    """Kind of each key tile: 0 INT8, 1 INT8 with a mask, 2 16-bit, 3 16-bit with a mask, 4 not executed."""
    start = tile * KEY_TILE
    edge = start + KEY_TILE > keys
    if CAUSAL:
        edge = edge | (start + KEY_TILE - 1 > first)
    if WINDOW:
        edge = edge | (start <= last - window)
    kind = edge.to(tl.int32)
    live = (tile >= begin) & (tile < stop)
    if ROUTED:
        unit = tile // group
        word = tl.load(words + (unit >> 6), mask=live, other=0)
        kind += 2 - 2 * ((word >> (unit & 63).to(tl.int64)) & 1).to(tl.int32)
    else:
        kind += 2
    return tl.where(live, kind, 4)


@triton.jit
def expand(words, tiles, ends, seqs, maps, map_rows, width, capacity, window, CAUSAL: tl.constexpr,
           WINDOW: tl.constexpr, ROUTED: tl.constexpr, BLOCK: tl.constexpr):
    """The routing words [map heads, map rows, width], int64 of the same bits, to `tiles` and `ends`."""
    row, head = tl.program_id(0), tl.program_id(1)
    info = seqs + tl.load(maps + row * 2) * 8
    queries, keys, group = tl.load(info + 2), tl.load(info + 3), tl.load(info + 6)
    m = tl.load(maps + row * 2 + 1)
    # Positions of the tile's first and last query among the keys, aligned at the bottom right.
    first = m * ROW_TILE + keys - queries
    last = tl.minimum((m + 1) * ROW_TILE, queries) - 1 + keys - queries
    begin = m * 0
    stop = (keys + KEY_TILE - 1) // KEY_TILE
    if CAUSAL:
        stop = tl.minimum(stop, tl.maximum(last + KEY_TILE, 0) // KEY_TILE)
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // KEY_TILE
    at = (head * map_rows + row).to(tl.int64)
    words += at * width
    tiles += at * capacity
    lanes = tl.arange(0, BLOCK)
    kinds = tl.arange(0, 8)
    counts = tl.zeros([8], tl.int32)
    for chunk in range(begin // BLOCK, (stop + BLOCK - 1) // BLOCK):
        kind = _kinds(words, chunk * BLOCK + lanes, begin, stop, first, last, keys, window, group, CAUSAL, WINDOW,
                      ROUTED)
        counts += tl.sum((kind[:, None] == kinds[None, :]).to(tl.int32), 0)
    done = tl.cumsum(counts, 0)
    tl.store(ends + at * 4 + kinds, done, mask=kinds < 4)
    place = done - counts
    for chunk in range(begin // BLOCK, (stop + BLOCK - 1) // BLOCK):
        tile = chunk * BLOCK + lanes
        kind = _kinds(words, tile, begin, stop, first, last, keys, window, group, CAUSAL, WINDOW, ROUTED)
        same = (kind[:, None] == kinds[None, :]).to(tl.int32)
        slot = tl.sum(same * (place[None, :] + tl.cumsum(same, 0) - 1), 1)
        tl.store(tiles + slot, tile, mask=kind < 4)
        place += tl.sum(same, 0)


@triton.jit
def _softmax_step(acc, total, top, raw, factor, offset, keep, values, CHECK: tl.constexpr, EDGE: tl.constexpr,
                  UPCAST: tl.constexpr):
    """One tile into the running softmax: its scores in base 2 are raw * factor + offset.

    With CHECK a score of -inf, of an operand that isn't finite, makes its row NaN, and doesn't count as masked.

    acc [rows, DV], total and top [rows]: weighted values, sum of weights and maximum so far.
    """
    if CHECK:
        least = tl.min(tl.where(keep, raw, 0.0), 1) if EDGE else tl.min(raw, 1)
        offset = tl.where(least == float("-inf"), float("nan"), offset)
    if EDGE:
        best = tl.max(tl.where(keep, raw, float("-inf")), 1)
        # Not a product with -inf: a factor can have underflowed to zero.
        seen = best > float("-inf")
        best = tl.where(seen, tl.fma(tl.where(seen, best, 0.0), factor, offset), float("-inf"))
    else:
        best = tl.fma(tl.max(raw, 1), factor, offset)
    new_top = tl.maximum(top, best)
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    exponent = tl.fma(raw, tl.zeros_like(raw) + factor[:, None], tl.zeros_like(raw) + (offset - pivot)[:, None])
    if EDGE:
        exponent = tl.where(keep, exponent, float("-inf"))
    weights = tl.math.exp2(exponent)
    decay = tl.math.exp2(top - pivot)
    total = total * decay + tl.sum(weights, 1)
    acc = tl.dot(_bf16(weights, UPCAST), values, acc * decay[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def _visible(position, key, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    keep = (key < keys)[None, :] & (position > -2147483647)[:, None]
    if CAUSAL:
        keep = keep & (key[None, :] <= position[:, None])
    if WINDOW:
        keep = keep & (key[None, :] > position[:, None] - window)
    return keep


@triton.jit
def _values(v, key, keys, stride, DV: tl.constexpr, DVP: tl.constexpr, EDGE: tl.constexpr, UPCAST: tl.constexpr):
    cols = tl.arange(0, DVP)
    where = v + key.to(tl.int64)[:, None] * stride + cols[None, :]
    if EDGE:
        x = tl.load(where, mask=(key < keys)[:, None] & (cols[None, :] < DV), other=0.0)
    elif DV != DVP:
        x = tl.load(where, mask=cols[None, :] < DV, other=0.0)
    else:
        x = tl.load(where)
    return _operand(x, UPCAST)


@triton.jit
def _run16(acc, total, top, q, k, v, tiles, first, stop, position, keys, window, factor, stride_k, stride_v,
           D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
           BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
           CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EDGE: tl.constexpr, UPCAST: tl.constexpr):
    """The 16-bit tiles tiles[first:stop]."""
    cols = tl.arange(0, DP)
    for step in range(first * PARTS, stop * PARTS):
        key = tl.load(tiles + step // PARTS) * KEY_TILE + (step % PARTS) * BLOCK_N + tl.arange(0, BLOCK_N)
        where = k + key.to(tl.int64)[None, :] * stride_k + cols[:, None]
        if EDGE:
            keep = _visible(position, key, keys, window, CAUSAL, WINDOW)
            x = tl.load(where, mask=(key < keys)[None, :] & (cols[:, None] < D), other=0.0)
        else:
            keep = 0
            x = tl.load(where, mask=cols[:, None] < D, other=0.0) if DP != D else tl.load(where)
        raw = tl.dot(q, _operand(x, UPCAST), input_precision="ieee")
        values = _values(v, key, keys, stride_v, DV, DVP, EDGE, UPCAST)
        acc, total, top = _softmax_step(acc, total, top, raw, factor, tl.zeros_like(factor), keep, values, True, EDGE,
                                        UPCAST)
    return acc, total, top


@triton.jit
def _run8(acc, total, top, q, q8, row_scale, k8, k_scale, means, v, tiles, first, stop, position, keys, window, scale,
          stride_v, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
          BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
          CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SMOOTH: tl.constexpr, EDGE: tl.constexpr, UPCAST: tl.constexpr):
    """The INT8 tiles tiles[first:stop], BIASES at a time: these share one product of queries and the tiles' means."""
    cols = tl.arange(0, DP)
    lanes = tl.arange(0, BIASES)
    for chunk in range(first, stop, BIASES):
        end = tl.minimum(chunk + BIASES, stop)
        if SMOOTH:
            several = tl.load(tiles + chunk + lanes, mask=chunk + lanes < end, other=0)
            mean = tl.load(means + several.to(tl.int64)[None, :] * D + cols[:, None], mask=cols[:, None] < D, other=0.0)
            bias = tl.dot(q, _operand(mean, UPCAST), input_precision="ieee") * scale
        for step in range(chunk * PARTS, end * PARTS):
            tile = tl.load(tiles + step // PARTS)
            inner = (step % PARTS) * BLOCK_N + tl.arange(0, BLOCK_N)
            key = tile * KEY_TILE + inner
            where = k8 + tile.to(tl.int64) * (KEY_TILE * D) + inner[None, :] * D + cols[:, None]
            x = tl.load(where, mask=cols[:, None] < D, other=0) if DP != D else tl.load(where)
            raw = tl.dot(q8, x, out_dtype=tl.int32).to(tl.float32)
            factor = row_scale * tl.load(k_scale + tile)
            if SMOOTH:
                offset = tl.sum(tl.where((lanes == step // PARTS - chunk)[None, :], bias, 0.0), 1)
            else:
                offset = tl.zeros_like(row_scale)
            keep = _visible(position, key, keys, window, CAUSAL, WINDOW) if EDGE else 0
            values = _values(v, key, keys, stride_v, DV, DVP, EDGE, UPCAST)
            acc, total, top = _softmax_step(acc, total, top, raw, factor, offset, keep, values, False, EDGE, UPCAST)
    return acc, total, top


@triton.jit
def attend(q, k, v, k8, k_scale, means, q_scale, out, lse, seqs, rows, tiles, ends,
           stride_qb, stride_ql, stride_qh, stride_kb, stride_kl, stride_kh, stride_vb, stride_vl, stride_vh,
           stride_ob, stride_ol, stride_oh, stride_lb, stride_ll, stride_lh,
           heads, heads_per_key_head, tile_count, map_rows, map_heads, capacity, key_blocks, window, scale,
           D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
           CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ROUTED: tl.constexpr, SMOOTH: tl.constexpr,
           PER_TILE: tl.constexpr, LSE: tl.constexpr, UPCAST: tl.constexpr):
    """BLOCK_M query rows of one head. `scale` is the softmax scale times log2(e) (`reference.score_factor`).

    Heads are the fastest part of the program's number: those that share keys run side by side.
    """
    program = tl.program_id(0)
    head = program % heads
    entry = program // heads
    key_head = head // heads_per_key_head
    seq = tl.load(rows + entry * 2)
    info = seqs + seq * 8
    start = tl.load(rows + entry * 2 + 1)
    queries, keys = tl.load(info + 2), tl.load(info + 3)
    batch = seq.to(tl.int64)
    q_row, k_row = tl.load(info).to(tl.int64), tl.load(info + 1).to(tl.int64)

    index = start + tl.arange(0, BLOCK_M)
    position = index + (keys - queries)
    cols = tl.arange(0, DP)
    live = (index < queries)[:, None]
    q += batch * stride_qb + q_row * stride_ql + head.to(tl.int64) * stride_qh
    x = tl.load(q + index.to(tl.int64)[:, None] * stride_ql + cols[None, :], mask=live & (cols[None, :] < D), other=0.0)
    query = _operand(x, UPCAST)

    map_head = key_head
    if map_heads == 1:
        map_head = 0
    m = start // ROW_TILE
    at = (map_head * map_rows + tl.load(info + 5) + m).to(tl.int64)
    tiles += at * capacity
    k += batch * stride_kb + k_row * stride_kl + key_head.to(tl.int64) * stride_kh
    v += batch * stride_vb + k_row * stride_vl + key_head.to(tl.int64) * stride_vh

    acc = tl.zeros([BLOCK_M, DVP], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    middle = tl.load(ends + at * 4 + 1)
    if ROUTED:
        values = x.to(tl.float32)
        if PER_TILE:
            where = q_scale + (head * tile_count + tl.load(info + 7) + m) * ROW_TILE + (start % ROW_TILE)
            row_scale = tl.load(where + tl.arange(0, BLOCK_M))
        else:
            row_scale = _scale(tl.max(_magnitude(values), 1))
        q8 = _codes(values, tl.zeros_like(values) + row_scale[:, None])
        row_scale = row_scale * scale
        block = (key_head * key_blocks + tl.load(info + 4)).to(tl.int64)
        k8 += block * (KEY_TILE * D)
        k_scale += block
        means += block * D
        full = tl.load(ends + at * 4)
        acc, total, top = _run8(acc, total, top, query, q8, row_scale, k8, k_scale, means, v, tiles, 0, full,
                                position, keys, window, scale, stride_vl, D, DP, DV, DVP, BLOCK_N, PARTS, CAUSAL,
                                WINDOW, SMOOTH, False, UPCAST)
        acc, total, top = _run8(acc, total, top, query, q8, row_scale, k8, k_scale, means, v, tiles, full, middle,
                                position, keys, window, scale, stride_vl, D, DP, DV, DVP, BLOCK_N, PARTS, CAUSAL,
                                WINDOW, SMOOTH, True, UPCAST)
    factor = tl.zeros([BLOCK_M], tl.float32) + scale
    full = tl.load(ends + at * 4 + 2)
    last = tl.load(ends + at * 4 + 3)
    acc, total, top = _run16(acc, total, top, query, k, v, tiles, middle, full, position, keys, window, factor,
                             stride_kl, stride_vl, D, DP, DV, DVP, BLOCK_N, PARTS, CAUSAL, WINDOW, False, UPCAST)
    acc, total, top = _run16(acc, total, top, query, k, v, tiles, full, last, position, keys, window, factor,
                             stride_kl, stride_vl, D, DP, DV, DVP, BLOCK_N, PARTS, CAUSAL, WINDOW, True, UPCAST)

    none = total == 0.0
    safe = tl.where(none, 1.0, total)
    acc = acc / safe[:, None]
    out += batch * stride_ob + q_row * stride_ol + head.to(tl.int64) * stride_oh
    cols_v = tl.arange(0, DVP)
    if out.dtype.element_ty == tl.bfloat16:
        acc = _bf16(acc, UPCAST)
    where = out + index.to(tl.int64)[:, None] * stride_ol + cols_v[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=live & (cols_v[None, :] < DV))
    if LSE:
        value = tl.where(none, float("-inf"), (top + tl.math.log2(safe)) * LN2)
        lse += batch * stride_lb + head.to(tl.int64) * stride_lh
        tl.store(lse + (q_row + index) * stride_ll, value, mask=index < queries)
