"""`backend="reference"`: a call through the executable specification, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from tilefuse.tilemix.by_sequence import operands_of, write
from tilefuse.tilemix.reference import Smoothing, attention_tiles
from tilefuse.tilemix.routing_map import Routing
from tilefuse.tilemix.spec import Call


def run(call: Call, maps: Sequence[Routing | None]) -> None:
    """Writes the call's results; NumPy, slow."""
    for b, ((q, k, v), routing) in enumerate(zip(operands_of(call), maps, strict=True)):
        found = attention_tiles(
            q[None],
            k[None],
            v[None],
            routing,
            causal=call.causal,
            window=call.window,
            scale=call.scale,
            granularity="row" if call.quant.q == "row" else "block",
            smooth=cast(Smoothing, call.quant.smooth),
        )
        write(call, b, found.out[0], found.lse[0])
