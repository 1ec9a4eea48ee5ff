"""The CPU back end: a checked call as what the C++ kernels take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilefuse import _core
from tilefuse._buffers import address
from tilefuse.tilemix.grid import BLOCK_M, ceil_div
from tilefuse.tilemix.operands import Operand, operand, padded
from tilefuse.tilemix.spec import Call

if TYPE_CHECKING:
    from tilefuse.tilemix.cache import CacheView

SMOOTHINGS = {"none": 0, "block": 1, "global": 2}
"""The values of the C++ side."""

CHANNELS = 8
"""The kernels take channels in multiples of it; zeros beyond change neither scores nor scales."""

_SEQUENCE = np.dtype([(name, np.int64) for name in _core.SEQUENCE_FIELDS])


def channels(count: int) -> int:
    """Channels that the kernels see of so many."""
    return CHANNELS * ceil_div(count, CHANNELS)


def rows_of(x: Operand, packed: bool) -> tuple[int, int, int, int]:
    """Address, dtype, row stride, head stride of [B, H, L, d] or [sum L, H, d]."""
    return x.address, int(x.kind), x.strides[0 if packed else 2], x.strides[1]


def first_of(x: Operand, first: npt.NDArray[np.int64], packed: bool) -> npt.NDArray[np.int64]:
    """Element at which each sequence's rows start."""
    if packed:
        return first * x.strides[0]
    return np.arange(len(first), dtype=np.int64) * x.strides[0]


def run(call: Call, cache: CacheView | None = None, positions: npt.NDArray[np.int64] | None = None) -> None:
    """Writes the call's results.

    Args:
        call: The call.
        cache: Keys and values where the call has none.
        positions: Of each sequence's first query in its map; None for 0. Not multiples of a row tile only with a cache.
    """
    dim, dim_v = channels(call.dim), channels(call.dim_v)
    q = padded(call.q, dim)
    packed = call.sequences.packed
    nothing = (0, 0, 0, 0)
    table = _table(call, q)
    k_rows = v_rows = nothing
    layouts: dict[str, Any] = {}
    keep: list[Any] = [q]
    if cache is None:
        assert call.k is not None
        assert call.v is not None
        k, v = padded(call.k, dim), padded(call.v, dim_v)
        keep += [k, v]
        k_rows, v_rows = rows_of(k, packed), rows_of(v, packed)
        table["k_at"] = first_of(k, call.sequences.k_first, packed)
        table["v_at"] = first_of(v, call.sequences.k_first, packed)
    else:
        layouts, held = cache.place(table)
        keep.append(held)
    out = call.out
    if dim_v != call.dim_v:
        wide = np.empty((*out.shape[:-1], dim_v), np.float32)
        out = operand(wide, "out")
    table["out_at"] = first_of(out, call.sequences.q_first, packed)
    if positions is not None:
        table = _cut(table, positions, q, out, call)
    words = call.words
    if words is not None:
        words = np.ascontiguousarray(words)
    lse = call.lse
    _core.attend(
        q=rows_of(q, packed),
        k=k_rows,
        v=v_rows,
        out=rows_of(out, packed),
        lse=(0, 0, 0) if lse is None else (address(lse), *_lse_strides(lse, packed)),
        sequences=address(table),
        batch=len(table),
        heads=call.heads,
        kv_heads=call.heads_kv,
        d=dim,
        dv=dim_v,
        scale=call.scale,
        causal=call.causal,
        window=call.window or 0,
        words=(0, 1, 0, 0) if words is None else (address(words), *words.shape),
        scale_per_row=call.quant.q == "row",
        smoothing=SMOOTHINGS[call.quant.smooth],
        **layouts,
    )
    if out is not call.out:
        with np.errstate(over="ignore"):  # beyond float16: Inf, as from the kernels
            call.out.numpy()[...] = out.owner[..., : call.dim_v].astype(call.out.numpy().dtype)
    del keep


def _lse_strides(lse: npt.NDArray[np.float32], packed: bool) -> tuple[int, int]:
    return (lse.strides[0] // 4, lse.strides[1] // 4) if packed else (lse.strides[2] // 4, lse.strides[1] // 4)


def _table(call: Call, q: Operand) -> npt.NDArray[Any]:
    spans = call.sequences
    table = np.zeros(spans.batch, _SEQUENCE)
    table["query_len"] = spans.q_len
    table["key_len"] = spans.k_len
    table["position"] = spans.k_len - spans.q_len
    table["q_at"] = first_of(q, spans.q_first, spans.packed)
    if call.lse is not None:
        stride = call.lse.strides[0] // 4
        table["lse_at"] = (spans.q_first if spans.packed else np.arange(spans.batch)) * stride
    table["row_tile"] = call.row_tiles
    table["group"] = call.groups
    return table


def _cut(
    table: npt.NDArray[Any], positions: npt.NDArray[np.int64], q: Operand, out: Operand, call: Call
) -> npt.NDArray[Any]:
    """The sequences with queries cut where a row tile of their maps ends: a kernel's row tile has bits of one."""
    table["row_tile"] += positions // BLOCK_M
    room = -positions % BLOCK_M
    cut = np.flatnonzero((room > 0) & (table["query_len"] > room))
    if not len(cut):
        return table
    rest = table[cut]
    head = room[cut]
    table["query_len"][cut] = head
    rest["query_len"] -= head
    rest["position"] += head
    rest["row_tile"] += 1
    packed = call.sequences.packed
    axis = 0 if packed else 2
    rest["q_at"] += head * q.strides[axis]
    rest["out_at"] += head * out.strides[axis]
    if call.lse is not None:
        rest["lse_at"] += head * (call.lse.strides[axis] // 4)
    return np.concatenate([table, rest])
