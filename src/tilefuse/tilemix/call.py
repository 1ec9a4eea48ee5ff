"""`tilefuse.attention`: checks a call, finds its maps, and hands it to a back end."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from tilefuse.arrays import is_torch
from tilefuse.errors import DeviceError, DtypeError, OptionError, ShapeError
from tilefuse.tilemix import cpu, oracle
from tilefuse.tilemix.cache import CacheView, view_of
from tilefuse.tilemix.grid import MOST_WINDOW
from tilefuse.tilemix.maps import assemble, call_maps, context_maps
from tilefuse.tilemix.operands import Operand, axes_of, operand, target
from tilefuse.tilemix.spec import (
    MOST_CHANNELS,
    Call,
    QuantSpec,
    Sequences,
    batch_sequences,
    flag,
    integer,
    packed_sequences,
    scale_of,
    split_offsets,
)

BACKENDS = ("cpu", "triton", "emulator", "reference")

_DEFAULT_QUANT = QuantSpec()


def attention(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    routing: Any = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: Any = None,
    quant: QuantSpec = _DEFAULT_QUANT,
    kv_cache: Any = None,
    return_lse: bool = False,
    out: Any = None,
    backend: str | None = None,
) -> Any:
    """``softmax(scale q k^T) v``, with tiles of scores on a 16-bit or an INT8 path (TileMix, arXiv 2608.17336).

    q, k and v are rounded to bfloat16. 16-bit tiles sum products in float32; INT8 tiles multiply codes of q and k
    exactly (`QuantSpec`). All share one softmax in float32; its weights are rounded to bfloat16 before they meet v,
    sums are float32, and results are rounded once. A query that sees no key gets zeros, and lse = -inf.

    Query i of a sequence stands at position ``i + Lk - Lq`` of its keys: with ``causal`` it sees none after it.

    Args:
        q: [B, Hq, Lq, d], or [sum Lq, Hq, d] with ``cu_seqlens``; float32, bfloat16 or float16; NumPy (ml_dtypes for
            bfloat16) or a torch tensor; any strides, and no copy where the last axis is contiguous and d a multiple of
            8. d is 1 to 512.
        k, v: [B, Hk, Lk, d] and [B, Hk, Lk, dv], or [sum Lk, Hk, d(v)]. Hk divides Hq: query head h sees KV head
            ``h // (Hq / Hk)``. None, both, to attend to what ``kv_cache`` holds already.
        routing: Which tiles are INT8: the name of a layout of `tilefuse.routing` at its default coverage, a template
            of it (``routing.local_sink(0.75)``), a `Routing` for sequences of one shape, or a list of one for each
            sequence. None: all 16-bit.
        causal: Whether a query sees no key after its own position.
        scale: Of scores; 1 / sqrt(d) for None.
        window: A query sees only so many keys up to its own position, itself included; None for all.
        cu_seqlens: B + 1 offsets of the sequences of packed arrays, or a pair of them, for q and for k and v.
        quant: How the INT8 path quantises. With ``kv_cache`` its ``smooth`` is not looked at: keys are smoothed as the
            cache was told when they came.
        kv_cache: A `KVCache` of one layer, or a view of one (`KVCache.view`). k and v are appended first; then q, the
            newest Lq tokens, attends to all that each sequence has. A map is then one of the whole context, and a
            query keeps its bits however a prompt is cut into calls: templates are built for the cache's capacity, and
            a `Routing` has a square grid of at least the length so far (or the shape of this call).
        return_lse: Whether to return (out, lse): float32 [B, Hq, Lq] or [sum Lq, Hq], the natural logarithm of the sum
            of exponentials.
        out: Where the result is written, and returned; any of the three dtypes, any strides.
        backend: "cpu"; "triton" for torch tensors on a GPU, or in Triton's interpreter; "emulator", the NPU's design
            and kernels on an array in software, for heads of up to 128 and finite values, results rounded to bfloat16;
            "reference", NumPy; the last two slow. None: "triton" for tensors on a GPU, else "cpu".

    Returns:
        [B, Hq, Lq, dv] or [sum Lq, Hq, dv], of the library and dtype of q.

    What isn't finite in bfloat16 spreads. A result and its lse are NaN where the query or a key that it sees isn't
    finite; on the INT8 path, where a key of a block of 64 that it sees some of isn't (of any block with
    ``smooth="global"``), since they share a scale. Values that a query sees enter as numbers do, Inf or NaN.
    Other queries of its row tile of 128 may become NaN (0 * NaN is NaN), queries of other tiles that see none of it
    never. Nor does a query get zeros because all of its scores are beyond float32: it gets NaN.

    Raises:
        ShapeError, DtypeError, OptionError, RoutingError, DeviceError: An argument doesn't fit; the message says which
            and how.
    """
    causal = flag(causal, "causal")
    if window is not None:
        window = integer(window, "window", 1, MOST_WINDOW)
    if not isinstance(quant, QuantSpec):
        raise DtypeError(f"quant is a {type(quant).__name__}: pass a tilefuse.QuantSpec")
    return_lse = flag(return_lse, "return_lse")
    chosen = _backend(backend, q)
    if kv_cache is not None:
        if chosen != "cpu":
            raise DeviceError(f'kv_cache is for backend "cpu", and backend is {chosen!r}: pass k and v instead')
        return _attend_cache(
            view_of(kv_cache), q, k, v, routing, causal, scale, window, cu_seqlens, quant, return_lse, out
        )
    if k is None or v is None:
        raise DtypeError(f"{'k' if k is None else 'v'} is None: pass an array, or a kv_cache for both")

    sequences, shape_q, shape_k, dim_v = _shapes(q, k, v, cu_seqlens)
    heads, heads_kv, dim = _heads(shape_q, shape_k)
    factor = scale_of(scale, dim)
    maps = call_maps(routing, sequences, causal, window)
    words, row_tiles, groups = assemble(maps, sequences, heads_kv)
    if chosen == "triton":
        # Not typed: torch and Triton are not installed with tilefuse.
        return importlib.import_module("tilefuse.tilemix.triton_call").triton_attention(
            q,
            k,
            v,
            quant=quant,
            causal=causal,
            window=window,
            scale=factor,
            words=words,
            row_tiles=row_tiles,
            groups=groups,
            sequences=sequences,
            out=out,
            return_lse=return_lse,
        )
    query, key, value = (operand(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    result, direct, late = _target(out, (*shape_q[:-1], dim_v), q, [query, key, value])
    call = Call(
        query,
        key,
        value,
        direct,
        np.empty(shape_q[:-1], np.float32) if return_lse else None,
        sequences,
        heads,
        heads_kv,
        dim,
        dim_v,
        causal,
        window,
        factor,
        quant,
        words,
        row_tiles,
        groups,
    )
    if chosen == "reference":
        oracle.run(call, maps)
    elif chosen == "emulator":
        from tilefuse.tilemix import emulated  # plans and streams are of no use to others

        emulated.run_call(call, maps)
    else:
        cpu.run(call)
    return _result(call, result, late)


def _attend_cache(
    cache: CacheView,
    q: Any,
    k: Any,
    v: Any,
    routing: Any,
    causal: bool,
    scale: Any,
    window: int | None,
    cu_seqlens: Any,
    quant: QuantSpec,
    return_lse: bool,
    out: Any,
) -> Any:
    packed = cu_seqlens is not None
    wanted = "[sum L, H, d], with cu_seqlens" if packed else "[B, H, L, d], or [sum L, H, d] with cu_seqlens"
    shape_q = axes_of(q, "q", 3 if packed else 4, wanted)
    if (k is None) != (v is None):
        raise DtypeError(f"{'k' if k is None else 'v'} is None: pass both k and v, or neither")
    layer = cache.cache
    if shape_q[-1] != layer.dim:
        raise ShapeError(f"q has {shape_q[-1]} channels (its last axis): kv_cache has {layer.dim}")
    _check_heads(shape_q[1], layer.heads)
    factor = scale_of(scale, layer.dim)
    starts_q, starts_k = split_offsets(cu_seqlens) if packed else (None, None)
    batch = len(cache.sequences)
    if packed:
        sequences = packed_sequences(starts_q, shape_q[0], None)
        if sequences.batch != batch:
            raise ShapeError(f"cu_seqlens has {sequences.batch} sequences: kv_cache has {batch}")
    else:
        if shape_q[0] != batch:
            raise ShapeError(f"q has {shape_q[0]} sequences (its first axis): kv_cache has {batch}")
        sequences = batch_sequences(batch, shape_q[2], 0)
    query = operand(q, "q")
    shape_out = (*shape_q[:-1], layer.dim_v)
    new = cache.checked(k, v, starts_k) if k is not None else None
    k_len = cache.lengths + (new.counts if new is not None else 0)
    if (sequences.q_len > k_len).any():
        b = int(np.flatnonzero(sequences.q_len > k_len)[0])
        raise ShapeError(
            f"q has {sequences.q_len[b]} tokens of sequence {b}, and kv_cache holds {k_len[b]}: queries are the newest "
            "tokens, so append at least as many keys"
        )
    sequences = Sequences(sequences.q_first, sequences.q_first, sequences.q_len, k_len, packed)
    if routing is not None and layer.kind == "int8":
        raise OptionError(
            'routing is given, and kv_cache is of kind "int8", whose full blocks have no 16-bit form: pass None, or '
            'make the cache with kind="bf16"'
        )
    maps, phases = context_maps(routing, sequences, causal, window, layer.capacity, layer.group)
    words, row_tiles, groups = assemble(maps, sequences, layer.heads)
    sources = [query, *((new.k, new.v) if new is not None else ())]
    result, direct, late = _target(out, shape_out, q, sources)
    if new is not None:
        cache.append_checked(new)
    lse = np.empty(shape_q[:-1], np.float32) if return_lse else None
    call = Call(
        query,
        None,
        None,
        direct,
        lse,
        sequences,
        shape_q[1],
        layer.heads,
        layer.dim,
        layer.dim_v,
        causal,
        window,
        factor,
        QuantSpec(quant.q, layer.smooth),
        words,
        row_tiles,
        groups,
    )
    cpu.run(call, cache, phases)
    return _result(call, result, late)


def _backend(backend: Any, q: Any) -> str:
    if backend is None:
        return "triton" if is_torch(q) and q.device.type != "cpu" else "cpu"
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise OptionError(f"backend is {backend!r}: pass one of {', '.join(map(repr, BACKENDS))}, or None")
    return backend


def _shapes(q: Any, k: Any, v: Any, cu_seqlens: Any) -> tuple[Sequences, tuple[int, ...], tuple[int, ...], int]:
    """Where sequences lie, and the shapes of q, of k, and v's channels; all agree on all but heads."""
    packed = cu_seqlens is not None
    axes = 3 if packed else 4
    wanted = "[sum L, H, d], with cu_seqlens" if packed else "[B, H, L, d], or [sum L, H, d] with cu_seqlens"
    shape_q, shape_k, shape_v = (axes_of(x, name, axes, wanted) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    if shape_k[:-1] != shape_v[:-1]:
        raise ShapeError(f"v has shape {list(shape_v)} and k {list(shape_k)}: all axes but the last must agree")
    _check_dim(shape_q[-1], "q")
    _check_dim(shape_v[-1], "v")
    if shape_q[-1] != shape_k[-1]:
        raise ShapeError(f"k has d = {shape_k[-1]} and q {shape_q[-1]} (their last axes): they must agree")
    if packed:
        return packed_sequences(cu_seqlens, shape_q[0], shape_k[0]), shape_q, shape_k, shape_v[-1]
    if shape_q[0] != shape_k[0]:
        raise ShapeError(f"k has {shape_k[0]} sequences and q {shape_q[0]} (their first axes): they must agree")
    return batch_sequences(shape_q[0], shape_q[2], shape_k[2]), shape_q, shape_k, shape_v[-1]


def _heads(shape_q: tuple[int, ...], shape_k: tuple[int, ...]) -> tuple[int, int, int]:
    """Query heads, KV heads, channels."""
    heads, heads_kv, dim = shape_q[1], shape_k[1], shape_q[-1]
    _check_heads(heads, heads_kv)
    return heads, heads_kv, dim


def _check_heads(heads: int, heads_kv: int) -> None:
    if not heads or not heads_kv or heads % heads_kv:
        raise ShapeError(f"q has {heads} heads and k {heads_kv}: q must have a multiple of k's, at least one each")


def _check_dim(dim: int, name: str) -> None:
    if not 1 <= dim <= MOST_CHANNELS:
        raise ShapeError(f"{name} has {dim} channels (its last axis): 1 to {MOST_CHANNELS} are taken")


def _target(out: Any, shape: tuple[int, ...], q: Any, sources: list[Operand]) -> tuple[Any, Operand, bool]:
    """What is returned, where results go, and whether the one is to be assigned from the other."""
    direct, late = target(out, shape, q, sources[0].kind)
    if out is not None and not late and any(direct.overlaps(source) for source in sources):
        direct, late = target(None, shape, out, direct.kind)[0], True
    return direct.owner if out is None else out, direct, late


def _result(call: Call, result: Any, late: bool) -> Any:
    if late:
        result[...] = call.out.owner
    if call.lse is None:
        return result
    if is_torch(call.q.owner):
        return result, sys.modules["torch"].from_numpy(call.lse)
    return result, call.lse
