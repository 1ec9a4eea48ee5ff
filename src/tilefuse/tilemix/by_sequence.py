"""A checked call as arrays of its sequences, for back ends that take one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.tilemix.spec import Call

Array = npt.NDArray[Any]


def operands_of(call: Call) -> Iterator[tuple[Array, Array, Array]]:
    """q [Hq, Lq, d], k [Hk, Lk, d] and v [Hk, Lk, dv] of each sequence, views of the call's arrays."""
    assert call.k is not None
    assert call.v is not None
    q, k, v = (x.numpy() for x in (call.q, call.k, call.v))
    spans = call.sequences
    for b in range(spans.batch):
        if spans.packed:
            rows, keys = _span(spans.q_first[b], spans.q_len[b]), _span(spans.k_first[b], spans.k_len[b])
            yield q[rows].swapaxes(0, 1), k[keys].swapaxes(0, 1), v[keys].swapaxes(0, 1)
        else:
            yield q[b], k[b], v[b]


@np.errstate(over="ignore")  # beyond float16: Inf
def write(call: Call, b: int, out: Array, lse: Array) -> None:
    """Writes sequence b's results, [Hq, Lq, dv] and [Hq, Lq], where the call wants them."""
    into = call.out.numpy()
    spans = call.sequences
    if spans.packed:
        rows = _span(spans.q_first[b], spans.q_len[b])
        into[rows] = out.swapaxes(0, 1).astype(into.dtype)
        if call.lse is not None:
            call.lse[rows] = lse.T
    else:
        into[b] = out.astype(into.dtype)
        if call.lse is not None:
            call.lse[b] = lse


def _span(first: Any, count: Any) -> slice:
    return slice(int(first), int(first + count))
