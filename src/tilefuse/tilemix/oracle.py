"""`backend="reference"`: a call through the executable specification, one sequence at a time."""

from __future__ import annotations

from typing import cast

import numpy as np

from tilefuse.tilemix.reference import Smoothing, attention_tiles
from tilefuse.tilemix.routing_map import Routing
from tilefuse.tilemix.spec import Call


@np.errstate(over="ignore")  # beyond float16: Inf
def run(call: Call, maps: list[Routing | None]) -> None:
    """Writes the call's results; NumPy, slow."""
    assert call.k is not None
    assert call.v is not None
    arrays = [x.numpy() for x in (call.q, call.k, call.v)]
    out = call.out.numpy()
    lse = call.lse
    spans = call.sequences
    for b, routing in enumerate(maps):
        rows, keys = (
            slice(int(first[b]), int(first[b] + count[b]))
            for first, count in ((spans.q_first, spans.q_len), (spans.k_first, spans.k_len))
        )
        if spans.packed:
            q, k, v = (x[span].swapaxes(0, 1)[None] for x, span in zip(arrays, (rows, keys, keys), strict=True))
        else:
            q, k, v = (x[b : b + 1] for x in arrays)
        found = attention_tiles(
            q,
            k,
            v,
            routing,
            causal=call.causal,
            window=call.window,
            scale=call.scale,
            granularity="row" if call.quant.q == "row" else "block",
            smooth=cast(Smoothing, call.quant.smooth),
        )
        if spans.packed:
            out[rows] = found.out[0].swapaxes(0, 1).astype(out.dtype)
            if lse is not None:
                lse[rows] = found.lse[0].T
        else:
            out[b] = found.out[0].astype(out.dtype)
            if lse is not None:
                lse[b] = np.asarray(found.lse[0])
