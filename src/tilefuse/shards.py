"""Parts of a quantised layer for tensor parallelism: each of several processes holds one.

Along the outputs (``axis="out"``, "colwise" in transformers' plans) every rank computes N / world output channels, and
the results are put side by side. Along the inputs (``axis="in"``, "rowwise") every rank multiplies K / world of the
input channels, and the results are added up.
"""

from __future__ import annotations

import dataclasses
from numbers import Integral
from typing import Literal

import numpy as np

from tilefuse.codes import AWQ_ORDER, FAST_COLUMNS, FAST_ROWS, WORD_BITS, unpack
from tilefuse.errors import DtypeError, LayoutError, ShapeError
from tilefuse.quantized import Array, CodeOrder, QuantizedLinear

Axis = Literal["in", "out"]


def shard_of(q: QuantizedLinear, shard: tuple[int, int], axis: Axis) -> QuantizedLinear:
    """The part of a layer that one rank holds: consecutive channels, as many on every rank. Nothing is requantised.

    Codes stay as the checkpoint has them, as views, where words of several codes are not cut; otherwise they are
    unpacked. Along the inputs, rank 0 alone has the bias: it must be added once.

    Args:
        q: The layer.
        shard: (rank, world): which part, of how many.
        axis: ``"out"`` for output channels ``rank * N / world`` onwards, ``"in"`` for input channels likewise.

    Raises:
        ShapeError: ``shard`` is not 0 <= rank < world, or ``axis`` is neither.
        LayoutError: The channels can't be divided so: world does not divide them, a group of input channels would be
            cut, or a permutation of the inputs (GPTQ with activation order) scatters them.
    """
    if not isinstance(q, QuantizedLinear):
        raise DtypeError(f"q is a {type(q).__name__}: pass a QuantizedLinear (Checkpoint.linear, quantize_linear)")
    rank, world = _checked(shard)
    if axis not in ("in", "out"):
        raise ShapeError(f"axis = {axis!r}: 'in' (input channels) and 'out' (output channels) are taken")
    if world == 1:
        return q
    title = f"layer {q.name!r}" if q.name else "the layer"
    total = q.n if axis == "out" else q.k
    if total % world:
        raise LayoutError(
            f"{title}: {total} {axis}put channels can't be divided among {world} ranks alike; take a world that "
            f"divides {total}, or leave the layer whole"
        )
    count = total // world
    begin, end = rank * count, (rank + 1) * count
    return _outputs(q, begin, end) if axis == "out" else _inputs(q, begin, end, world, title)


def _checked(shard: object) -> tuple[int, int]:
    if (
        not isinstance(shard, tuple)
        or len(shard) != 2
        or not all(isinstance(part, Integral) for part in shard)
        or not 0 <= shard[0] < shard[1]
    ):
        raise ShapeError(f"shard = {shard!r}: (rank, world) is taken, integers with 0 <= rank < world")
    return int(shard[0]), int(shard[1])


def _outputs(q: QuantizedLinear, begin: int, end: int) -> QuantizedLinear:
    codes, order = _cut_outputs(q, begin, end)
    part = slice(begin, end)
    return dataclasses.replace(
        q,
        n=end - begin,
        codes=codes,
        order=order,
        scales=q.scales[:, part],
        zeros=None if q.zeros is None else q.zeros[:, part],
        mins=None if q.mins is None else q.mins[:, part],
        bias=None if q.bias is None else q.bias[part],
    )


def _inputs(q: QuantizedLinear, begin: int, end: int, world: int, title: str) -> QuantizedLinear:
    if q.perm is not None:
        raise LayoutError(
            f"{title}: its inputs are permuted (GPTQ with activation order), so that consecutive ones are of many "
            "groups; shard it along axis='out', or requantise without desc_act"
        )
    count = end - begin
    if q.group < q.k and count % q.group:
        fitting = [w for w in range(world - 1, 0, -1) if q.k % w == 0 and (q.k // w) % q.group == 0]
        instead = f"take a world of {fitting[0]}, " if fitting and fitting[0] > 1 else ""
        raise LayoutError(
            f"{title}: {count} input channels a rank cut a group of {q.group}; {instead}shard along axis='out', or "
            "requantise with a smaller group size"
        )
    codes, order = _cut_inputs(q, begin, end)
    # One group for all of K is one for the part.
    part = slice(0, 1) if q.group >= q.k else slice(begin // q.group, end // q.group)
    return dataclasses.replace(
        q,
        k=count,
        group=min(q.group, count),
        codes=codes,
        order=order,
        scales=q.scales[part],
        zeros=None if q.zeros is None else q.zeros[part],
        mins=None if q.mins is None else q.mins[part],
        bias=q.bias if begin == 0 else None,
    )


def _cut_outputs(q: QuantizedLinear, begin: int, end: int) -> tuple[Array, CodeOrder]:
    per_word = WORD_BITS // q.bits
    match q.order:
        case CodeOrder.ROWS_N | CodeOrder.ROWS_N_INT8:
            return q.codes[begin:end], q.order
        case CodeOrder.KN | CodeOrder.WORDS_K:
            return q.codes[:, begin:end], q.order
        case CodeOrder.WORDS_N if begin % per_word == 0 and (end % per_word == 0 or end == q.n):
            return q.codes[:, begin // per_word : -(-end // per_word)], q.order
        case CodeOrder.WORDS_N_AWQ if begin % len(AWQ_ORDER) == 0 and end % len(AWQ_ORDER) == 0:
            return q.codes[:, begin // len(AWQ_ORDER) : end // len(AWQ_ORDER)], q.order
        case CodeOrder.ROWS_N_FAST if begin % FAST_ROWS == 0 and end % FAST_ROWS == 0:
            return q.codes[begin // FAST_ROWS : end // FAST_ROWS], q.order
    return np.ascontiguousarray(_unsorted(q)[:, begin:end]), CodeOrder.KN


def _cut_inputs(q: QuantizedLinear, begin: int, end: int) -> tuple[Array, CodeOrder]:
    per_word = WORD_BITS // q.bits
    match q.order:
        case CodeOrder.KN | CodeOrder.WORDS_N | CodeOrder.WORDS_N_AWQ:
            return q.codes[begin:end], q.order
        case CodeOrder.ROWS_N_INT8:
            return q.codes[:, begin:end], q.order
        case CodeOrder.WORDS_K if begin % per_word == 0 and (end % per_word == 0 or end == q.k):
            return q.codes[begin // per_word : -(-end // per_word)], q.order
        case CodeOrder.ROWS_N if begin % per_word == 0 and (end % per_word == 0 or end == q.k):
            return q.codes[:, begin // per_word : -(-end // per_word)], q.order
        case CodeOrder.ROWS_N_FAST if begin % FAST_COLUMNS == 0 and end % FAST_COLUMNS == 0:
            return q.codes[:, begin:end], q.order
    return np.ascontiguousarray(_unsorted(q)[begin:end]), CodeOrder.KN


def _unsorted(q: QuantizedLinear) -> Array:
    """Codes [K, N] in the checkpoint's own order of inputs, as `QuantizedLinear.codes` has them."""
    return unpack(q.codes, q.order, q.k, q.n, q.bits)
