"""The routed attention on a GPU: operands and tables for the kernels of `triton_kernel`, and their launches.

Neither torch nor Triton is imported before the first call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tilefuse.errors import DeviceError, DtypeError, RoutingError, ShapeError
from tilefuse.tilemix.grid import BLOCK_M, BLOCK_N, MAX_LEN
from tilefuse.tilemix.reference import score_factor

IntArray = npt.NDArray[np.int64]

MOST_CHANNELS = 256
"""Channels of a head: a block of queries and a tile of keys and values have to fit a small GPU's local memory."""

_SMOOTHINGS = ("none", "block", "global")


class Quantisation(Protocol):
    """`tilefuse.QuantSpec`."""

    @property
    def q(self) -> str: ...
    @property
    def smooth(self) -> str: ...


class Spans(Protocol):
    """Where the sequences of a batch lie, int64 [batch] each: first rows in packed arrays, and lengths."""

    @property
    def q_first(self) -> IntArray: ...
    @property
    def k_first(self) -> IntArray: ...
    @property
    def q_len(self) -> IntArray: ...
    @property
    def k_len(self) -> IntArray: ...
    @property
    def packed(self) -> bool: ...


class Blocks(NamedTuple):
    """How the attention kernel is cut: rows and keys of a step, warps of a program, stages of its loads."""

    rows: int
    keys: int
    warps: int
    stages: int


def blocks_for(target: str, depth: int, most_queries: int) -> Blocks:
    """Blocks for a head of ``depth`` channels, rounded up to a power of two, on ``target`` ("cuda", "gfx1151", ...).

    Chosen by what the compiler reports (registers that loops spill, at most 64 KiB of local memory on AMD's GPUs), not
    by measurement.
    """
    if target == "cuda":
        chosen = Blocks(128, 64, 8, 2) if depth <= 128 else Blocks(64, 32, 8, 2)
    elif target.startswith("gfx9"):
        chosen = Blocks(128, 64, 4, 1) if depth <= 128 else Blocks(64, 32, 4, 1)
    elif depth <= 64:
        chosen = Blocks(128, 64, 8, 1)
    else:
        chosen = Blocks(128, 32, 8, 1) if depth <= 128 else Blocks(32, 32, 4, 1)
    rows = min(chosen.rows, max(16, 1 << (most_queries - 1).bit_length()))
    return chosen if rows == chosen.rows else chosen._replace(rows=rows, warps=4)


@dataclass(frozen=True)
class Tables:
    """The kernels' int32 tables (described there) on the device, and their counts."""

    seqs: Any
    rows: Any
    blocks: Any
    row_tiles: Any
    maps: Any
    programs: int
    sequences: int
    key_blocks: int
    tile_count: int
    map_rows: int
    capacity: int


class Keys(NamedTuple):
    """INT8 keys in blocks of 64, those past a sequence's end zero; blocks of the sequences follow each other."""

    codes: Any
    """int8 [KV heads, blocks, 64, d]."""
    scales: Any
    """float32 [KV heads, blocks]."""
    means: Any
    """bfloat16 [KV heads, blocks, d]; not written without smoothing."""


class Rows(NamedTuple):
    """INT8 queries in tiles of 128 rows, those past a sequence's end zero; tiles of the sequences follow each other."""

    codes: Any
    """int8 [heads, tiles, 128, d], None where only scales were asked for."""
    scales: Any
    """float32 [heads, tiles, 128]."""


def load() -> tuple[ModuleType, ModuleType, bool]:
    """torch, the kernels, and whether Triton's interpreter runs them.

    Raises:
        DeviceError: torch or Triton is missing.
    """
    try:
        import torch
        import triton
    except ImportError as missing:
        raise DeviceError(
            f'backend "triton" needs torch and Triton, and {missing.name or "one of them"} cannot be imported '
            f'({missing}): pip install "tilefuse[triton]"'
        ) from missing
    from tilefuse.tilemix import triton_kernel

    return torch, triton_kernel, not isinstance(triton_kernel.attend, triton.runtime.JITFunction)


def triton_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    quant: Quantisation,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    words: npt.NDArray[np.uint64] | None = None,
    row_tiles: IntArray | None = None,
    groups: IntArray | int = 1,
    sequences: Spans | None = None,
    out: Any = None,
    return_lse: bool = False,
    blocks: Blocks | None = None,
) -> Any:
    """Routed attention of torch tensors on one GPU; on the CPU where Triton's interpreter is on, for checks.

    Operands of another type are rounded to bfloat16 first.

    Args:
        q: float16, bfloat16 or float32 [B, Hq, Lq, d], or [sum Lq, Hq, d] with packed ``sequences``.
        k: [B, Hk, Lk, d] or [sum Lk, Hk, d]; Hk divides Hq.
        v: [B, Hk, Lk, dv] or [sum Lk, Hk, dv].
        quant: How the INT8 path quantises.
        causal: Query i of a sequence sees keys up to i + Lk - Lq.
        window: Query i sees keys above i + Lk - Lq - window.
        scale: Of the scores, positive; 1 / sqrt(d) if None.
        words: uint64 [row tiles, words] or [1 or Hk, row tiles, words], group j of a row tile being bit ``j & 63`` of
            word ``j >> 6``, 1 for INT8; None: all 16-bit.
        row_tiles: [B], each sequence's first row tile in ``words``; None: one after the other where packed, else all 0.
        groups: Key tiles to a bit, one number or [B].
        sequences: Where they lie; None: every b is one.
        out: Where the result goes: q's shape but for v's last axis, last axis contiguous.
        return_lse: Whether to return the natural logarithms of the sums of exponentials too.
        blocks: In place of those of `blocks_for`.

    Returns:
        The output, of q's dtype and zero for queries that see no key; with ``return_lse``, and float32 [B, Hq, Lq] or
        [sum Lq, Hq], -inf for these.

    Raises:
        DeviceError: torch or Triton is missing, or the tensors are in CPU memory and the interpreter is off.
        DtypeError: Not tensors of these types, or on different devices.
        ShapeError: The shapes don't fit each other, or a head has more than 256 channels.
        RoutingError: The words don't fit the sequences, or an option is out of range.
    """
    torch, kernels, interpreted = load()
    packed = sequences is not None and sequences.packed
    _check(torch, q, k, v, packed, interpreted)
    heads, heads_kv, depth, depth_v = q.shape[1], k.shape[1], q.shape[-1], v.shape[-1]
    if scale is None:
        scale = depth**-0.5
    if not 0 < scale < math.inf:
        raise RoutingError(f"scale is {scale}: pass a positive number, or None for 1 / sqrt(d)")
    if quant.q not in ("row", "block") or quant.smooth not in _SMOOTHINGS:
        raise RoutingError(f'quant is {quant}: q is "row" or "block", smooth one of {_SMOOTHINGS}')
    if window is not None:
        if window < 1:
            raise RoutingError(f"window is {window}: pass a positive number, or None")
        window = min(int(window), 2 * MAX_LEN)
    lengths = _lengths(q, k, sequences)
    shape = (*q.shape[:-1], depth_v)
    if out is None:
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    elif tuple(out.shape) != shape or out.device != q.device:
        raise ShapeError(f"out has shape {list(out.shape)} on {out.device}: expected {list(shape)} on {q.device}")
    lse = torch.empty(q.shape[:-1] if return_lse else (0,), dtype=torch.float32, device=q.device)
    result = (out, lse) if return_lse else out
    if not out.numel() and not lse.numel():
        return result
    into = out if out.stride(-1) == 1 or depth_v == 1 else torch.empty(shape, dtype=out.dtype, device=out.device)
    if blocks is None:
        widest = max(_padded(depth), _padded(depth_v))
        blocks = blocks_for(_target(torch, q.device), widest, int(lengths[:, 2].max(initial=1)))
    bits = _words(words, lengths, row_tiles, groups, packed, heads_kv)
    tables = _tables(torch, q.device, lengths, causal, window, blocks.rows)

    q, k, v = (_operand(torch, x) for x in (q, k, v))
    routed = bits is not None
    with _on(torch, q.device):
        keys = _NO_KEYS
        scales = None
        if routed:
            keys = quantised_keys(k, tables, quant.smooth, packed)
            if quant.q == "block":
                scales = quantised_rows(q, tables, "block", packed, codes=False).scales
        tiles, ends = _expand(torch, kernels, q.device, bits, tables, causal, window)
        anything = q  # a pointer that nothing reads
        kernels.attend[(tables.programs * heads,)](
            q, k, v,
            *((x if x is not None else anything) for x in (*keys, scales)),
            into, lse, tables.seqs, tables.rows, tiles, ends,
            *_strides(q, packed), *_strides(k, packed), *_strides(v, packed), *_strides(into, packed),
            *(_strides(lse, packed) if return_lse else (0, 0, 0)),
            heads, heads // heads_kv, tables.tile_count, tables.map_rows, tiles.shape[0], tables.capacity,
            tables.key_blocks, window or 0, float(score_factor(scale)),
            D=depth, DP=_padded(depth), DV=depth_v, DVP=_padded(depth_v),
            BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, PARTS=BLOCK_N // blocks.keys,
            CAUSAL=bool(causal), WINDOW=window is not None, ROUTED=routed, SMOOTH=quant.smooth != "none",
            PER_TILE=quant.q == "block", LSE=return_lse, UPCAST=interpreted,
            num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=False,
        )  # fmt: skip
    if into is not out:
        out.copy_(into)
    return result


_NO_KEYS = Keys(None, None, None)


def quantised_keys(k: Any, tables: Tables, smooth: str, packed: bool) -> Keys:
    """bfloat16 keys [B, Hk, Lk, d] or [sum Lk, Hk, d] in INT8."""
    torch, kernels, interpreted = load()
    heads, depth = k.shape[1], k.shape[-1]
    new = {"device": k.device}
    keys = Keys(
        torch.empty((heads, tables.key_blocks, BLOCK_N, depth), dtype=torch.int8, **new),
        torch.empty((heads, tables.key_blocks), dtype=torch.float32, **new),
        torch.empty((heads, tables.key_blocks, depth), dtype=torch.bfloat16, **new),
    )
    whole = keys.means
    shape = {"D": depth, "DP": _padded(depth), "UPCAST": interpreted, "enable_fp_fusion": False}
    if not tables.key_blocks:
        return keys
    if smooth == "global":
        whole = torch.empty((heads, tables.sequences, depth), dtype=torch.bfloat16, **new)
        kernels.key_means[(tables.sequences, heads)](
            k, whole, tables.seqs, *_strides(k, packed), tables.sequences, **shape, num_warps=1
        )
    kernels.quantise_keys[(tables.key_blocks, heads)](
        k, *keys, whole, tables.seqs, tables.blocks, *_strides(k, packed), tables.sequences, tables.key_blocks, **shape,
        SMOOTH=_SMOOTHINGS.index(smooth),
    )  # fmt: skip
    return keys


def quantised_rows(q: Any, tables: Tables, granularity: str, packed: bool, *, codes: bool = True) -> Rows:
    """bfloat16 queries [B, Hq, Lq, d] or [sum Lq, Hq, d] in INT8; the attention kernel quantises rows by itself."""
    torch, kernels, _ = load()
    heads, depth = q.shape[1], q.shape[-1]
    shape = (heads, tables.tile_count, BLOCK_M)
    scales = torch.empty(shape, dtype=torch.float32, device=q.device)
    made = torch.empty((*shape, depth), dtype=torch.int8, device=q.device) if codes else None
    kernels.quantise_rows[(tables.tile_count, heads)](
        q, scales if made is None else made, scales, tables.seqs, tables.row_tiles, *_strides(q, packed),
        tables.tile_count, D=depth, DP=_padded(depth), PER_TILE=granularity == "block", CODES=codes,
        enable_fp_fusion=False,
    )  # fmt: skip
    return Rows(made, scales)


def integer_scores(rows: Any, keys: Any) -> Any:
    """Products of codes, int8 [rows, d] by [keys, d] -> int32 [rows, keys]: multiples of 128 rows and 64 keys."""
    torch, kernels, _ = load()
    depth = rows.shape[-1]
    scores = torch.empty((len(rows), len(keys)), dtype=torch.int32, device=rows.device)
    grid = (len(rows) // BLOCK_M, len(keys) // BLOCK_N)
    kernels.int8_scores[grid](rows, keys, scores, len(keys), D=depth, DP=_padded(depth))
    return scores


def _expand(
    torch: ModuleType, kernels: ModuleType, device: Any, words: IntArray | None, tables: Tables, causal: bool,
    window: int | None,
) -> tuple[Any, Any]:  # fmt: skip
    """Lists of the executed tiles, by kind: `tiles` and `ends` of the kernels."""
    heads, width = (1, 1) if words is None else (words.shape[0], words.shape[2])
    tiles = torch.empty((heads, tables.map_rows, tables.capacity), dtype=torch.int32, device=device)
    ends = torch.empty((heads, tables.map_rows, 4), dtype=torch.int32, device=device)
    bits = tiles if words is None else torch.from_numpy(words).to(device)
    kernels.expand[(tables.map_rows, heads)](
        bits, tiles, ends, tables.seqs, tables.maps, tables.map_rows, width, tables.capacity, window or 0,
        CAUSAL=bool(causal), WINDOW=window is not None, ROUTED=words is not None, BLOCK=128, enable_fp_fusion=False,
    )  # fmt: skip
    return tiles, ends


def _padded(depth: int) -> int:
    """Side of a block that holds ``depth`` channels: products of INT8 take 32 at least."""
    return max(32, 1 << (depth - 1).bit_length())


def _strides(x: Any, packed: bool) -> tuple[int, int, int]:
    """From a sequence, row and head to the next, in elements."""
    return (0, x.stride(0), x.stride(1)) if packed else (x.stride(0), x.stride(2), x.stride(1))


def _operand(torch: ModuleType, x: Any) -> Any:
    x = x.detach().to(torch.bfloat16)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _target(torch: ModuleType, device: Any) -> str:
    """ "cuda", or the name of an AMD architecture without its features."""
    if device.type == "cpu" or not torch.version.hip:
        return "cuda"
    return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]


def _on(torch: ModuleType, device: Any) -> Any:
    import contextlib

    return contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)


def _check(torch: ModuleType, q: Any, k: Any, v: Any, packed: bool, interpreted: bool) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise DtypeError(f'{name} is a {type(x).__name__}: backend "triton" takes torch tensors on a GPU')
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise DtypeError(f"{name} is {x.dtype}: pass float32, bfloat16 or float16")
        if x.device != q.device:
            raise DtypeError(f"{name} is on {x.device} and q on {q.device}: move them to one device")
        if x.ndim != (3 if packed else 4):
            raise ShapeError(f"{name} has shape {list(x.shape)}: pass {'[sum L, H, d]' if packed else '[B, H, L, d]'}")
        if not 1 <= x.shape[-1] <= MOST_CHANNELS:
            raise ShapeError(
                f'{name} has {x.shape[-1]} channels (its last axis): backend "triton" takes 1 to {MOST_CHANNELS}'
            )
    if q.device.type == "cpu" and not interpreted:
        raise DeviceError(
            "q is in CPU memory, where Triton has only its interpreter, which is for checks: leave out "
            'backend="triton", or set TRITON_INTERPRET=1 before triton is imported'
        )
    same = (0, 1) if packed else (0, 1, 2)
    if any(k.shape[i] != v.shape[i] for i in same) or k.shape[-1] != q.shape[-1]:
        shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        raise ShapeError(f"{shapes}: keys, KV heads and channels must agree")
    if not packed and k.shape[0] != q.shape[0]:
        raise ShapeError(f"q has a batch of {q.shape[0]} and k of {k.shape[0]}: they must agree")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ShapeError(f"q has {q.shape[1]} heads and k {k.shape[1]}: pass a multiple of the KV heads")


def _lengths(q: Any, k: Any, sequences: Spans | None) -> IntArray:
    """[B, 8], as the kernels' `seqs`: first query row, first key row, queries, keys; the rest is filled in later."""
    batch = len(sequences.q_len) if sequences is not None else q.shape[0]
    table = np.zeros((batch, 8), np.int64)
    if sequences is None:
        table[:, 2], table[:, 3] = q.shape[2], k.shape[2]
    else:
        for i, column in enumerate((sequences.q_first, sequences.k_first, sequences.q_len, sequences.k_len)):
            table[:, i] = column
    if table[:, 2:4].max(initial=0) > MAX_LEN or table.max(initial=0) >= 1 << 31 or (table < 0).any():
        raise ShapeError(f"a sequence has more than {MAX_LEN} rows, or starts beyond row 2^31: split the call")
    ends = (table[:, 0] + table[:, 2], table[:, 1] + table[:, 3])
    if sequences is not None and sequences.packed:
        limits: tuple[int, int] = (q.shape[0], k.shape[0])
    else:
        limits = (q.shape[2], k.shape[2])
    for end, limit, name in zip(ends, limits, "qk", strict=True):
        if end.max(initial=0) > limit:
            raise ShapeError(f"a sequence ends at row {end.max()} of {name}, which has {limit}")
    return table


def _words(
    words: npt.NDArray[np.uint64] | None, seqs: IntArray, row_tiles: IntArray | None, groups: IntArray | int,
    packed: bool, heads_kv: int,
) -> IntArray | None:  # fmt: skip
    """Fills in map rows and groups of ``seqs``; the words as int64 [map heads, map rows, words]."""
    tiles = _ceil(seqs[:, 2], BLOCK_M)
    seqs[:, 6] = groups
    if words is None:
        same = len(seqs) > 0 and (seqs[:, 2:4] == seqs[:1, 2:4]).all()
        seqs[:, 5] = 0 if same else np.cumsum(tiles) - tiles
        return None
    if words.dtype != np.uint64 or words.ndim not in (2, 3):
        found = f"{words.dtype} {list(words.shape)}"
        raise RoutingError(f"words are {found}: pass uint64 [row tiles, words], with an axis of heads before or not")
    words = words if words.ndim == 3 else words[None]
    if words.shape[0] not in (1, heads_kv):
        raise RoutingError(f"words have maps of {words.shape[0]} heads: pass 1 or {heads_kv}, those of k")
    if row_tiles is None:
        row_tiles = np.cumsum(tiles) - tiles if packed else np.zeros(len(seqs), np.int64)
    seqs[:, 5] = row_tiles
    if (seqs[:, 6] < 1).any() or (seqs[:, 5] < 0).any():
        raise RoutingError(f"groups are {groups}, first row tiles {row_tiles}: pass at least 1 and 0")
    if (seqs[:, 5] + tiles).max(initial=0) > words.shape[1]:
        raise RoutingError(f"words have {words.shape[1]} row tiles: the sequences take {(seqs[:, 5] + tiles).max()}")
    least = _word_counts(seqs)
    if least.max(initial=0) > words.shape[2]:
        raise RoutingError(f"words have {words.shape[2]} a row: the keys take {least.max()} with these groups")
    return np.array(words, "<u8", order="C").view(np.int64)


def _word_counts(seqs: IntArray) -> IntArray:
    return _ceil(_ceil(_ceil(seqs[:, 3], BLOCK_N), seqs[:, 6]), 64)


def _ceil(a: IntArray, b: IntArray | int) -> IntArray:
    found: IntArray = -(-a // b)
    return found


def _tables(torch: ModuleType, device: Any, seqs: IntArray, causal: bool, window: int | None, rows: int) -> Tables:
    row_tiles, key_tiles = _ceil(seqs[:, 2], BLOCK_M), _ceil(seqs[:, 3], BLOCK_N)
    seqs[:, 4] = np.cumsum(key_tiles) - key_tiles
    seqs[:, 7] = np.cumsum(row_tiles) - row_tiles
    tiles = _pairs(row_tiles)
    maps = np.zeros((int((seqs[:, 5] + row_tiles).max(initial=0)), 2), np.int64)
    maps[seqs[tiles[:, 0], 5] + tiles[:, 1]] = tiles
    starts = _pairs(_ceil(seqs[:, 2], rows))
    starts[:, 1] *= rows
    # The longest rows first, so that none starts when the others are done.
    starts = starts[np.argsort(-_executed(seqs[starts[:, 0]], starts[:, 1] // BLOCK_M, causal, window), kind="stable")]
    parts = [seqs, starts, _pairs(key_tiles), tiles, maps]
    flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts]).astype(np.int32)).to(device)
    on_device = flat.split([part.size for part in parts])
    return Tables(
        on_device[0],
        on_device[1],
        on_device[2],
        on_device[3],
        on_device[4],
        programs=len(starts),
        sequences=len(seqs),
        key_blocks=int(key_tiles.sum()),
        tile_count=len(tiles),
        map_rows=len(maps),
        capacity=max(1, int(key_tiles.max(initial=0))),
    )


def _pairs(counts: IntArray) -> IntArray:
    """(b, i) for every b and 0 <= i < counts[b]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.stack([owner, np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]], axis=1)


def _executed(seqs: IntArray, tile: IntArray, causal: bool, window: int | None) -> IntArray:
    """Key tiles that row tiles execute, given each one's row of `seqs`."""
    queries, keys = seqs[:, 2], seqs[:, 3]
    stop = _ceil(keys, BLOCK_N)
    first = np.zeros_like(stop)
    offset = keys - queries
    if causal:
        last = np.minimum((tile + 1) * BLOCK_M, queries) - 1 + offset
        stop = np.minimum(stop, np.maximum(last // BLOCK_N + 1, 0))
    if window is not None:
        first = np.maximum(tile * BLOCK_M + offset - window + 1, 0) // BLOCK_N
    executed: IntArray = np.maximum(stop - first, 0)
    return executed
