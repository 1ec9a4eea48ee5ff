"""Which tiles of attention's scores are computed in INT8: layouts at any coverage, and maps made from anything else.

A layout function gives a `Routing`, the map of one sequence, if it is told the sequence's length, and otherwise a
`Template`, from which `tilefuse.attention` builds the map of each sequence that it meets::

    tilefuse.attention(q, k, v, routing=tilefuse.routing.local_sink(0.75))
    tilefuse.routing.bigbird(0.5, seq_len=4096).words      # uint64 [32, 1]

Maps are deterministic and made by integer arithmetic alone; those of one layout are nested: what is INT8 at one
coverage is so at every larger one. docs/attention.md defines the layouts.
"""

from __future__ import annotations

from typing import Protocol, overload

import numpy.typing as npt

from tilefuse.errors import RoutingError
from tilefuse.tilemix.grid import Grid, index
from tilefuse.tilemix.routing_map import Routing
from tilefuse.tilemix.template import Auto, Coverage, Protect, Template, named, scored
from tilefuse.tilemix.template import template as _template

__all__ = [
    "Grid",
    "Routing",
    "Template",
    "aligned",
    "band",
    "bigbird",
    "from_scores",
    "global_",
    "local_sink",
    "named",
    "one",
    "row_random",
    "sptrans",
    "zero",
]


class Layout(Protocol):
    """A function that makes the maps of one layout."""

    @overload
    def __call__(
        self,
        coverage: Coverage | None = None,
        *,
        seq_len: None = None,
        query_len: None = None,
        causal: bool = True,
        window: int | None = None,
        protect: Protect = (),
        seed: int = 0,
        compat: str | None = None,
        group: int | Auto = "auto",
        words: int | Auto = "auto",
    ) -> Template: ...

    @overload
    def __call__(
        self,
        coverage: Coverage | None = None,
        *,
        seq_len: int,
        query_len: int | None = None,
        causal: bool = True,
        window: int | None = None,
        protect: Protect = (),
        seed: int = 0,
        compat: str | None = None,
        group: int | Auto = "auto",
        words: int | Auto = "auto",
    ) -> Routing: ...


_ARGUMENTS = """

    Args:
        coverage: Share of the executed tiles that become INT8, 0 to 1: a float (taken as the decimal number that it
            prints as), a Fraction, ...; by default {default}.
        seq_len: Keys of a sequence, for its map; None for a template.
        query_len: Its queries, the last of which stands at the last key; as many as keys if None.
        causal: Whether a query sees no keys after its position.
        window: Keys that a query sees at most, up to its position; None for all.
        protect: Groups that become INT8 only after all others: "diag", those that touch the row tile's own positions;
            "sink", the first of the sequence.
        seed: Of what is random, and of ties.
        compat: "release" for the maps of TileMix's authors, as far as they are known (sptrans alone).
        group: Key tiles that share a bit; by default the fewest that the words hold.
        words: 64-bit words of a row; by default one, or as many as a group that is given takes.

    Raises:
        RoutingError: An argument is none of these.
    """


def _layout(name: str, summary: str, default: str = "one half") -> Layout:
    def make(
        coverage: Coverage | None = None,
        *,
        seq_len: int | None = None,
        query_len: int | None = None,
        causal: bool = True,
        window: int | None = None,
        protect: Protect = (),
        seed: int = 0,
        compat: str | None = None,
        group: int | Auto = "auto",
        words: int | Auto = "auto",
    ) -> Template | Routing:
        chosen = _template(name, coverage, protect=protect, seed=seed, compat=compat, group=group, words=words)
        if seq_len is not None:
            keys = index(seq_len, "seq_len", 0)
            return chosen.build(keys if query_len is None else query_len, keys, causal=causal, window=window)
        if query_len is not None or window is not None or not causal:
            raise RoutingError("query_len, window and causal are a map's: pass seq_len too, or leave them to the call")
        return chosen

    make.__name__ = make.__qualname__ = f"{name}_" if name == "global" else name
    make.__doc__ = summary + _ARGUMENTS.format(default=default)
    return make  # type: ignore[return-value]


band = _layout("band", "Keeps the keys nearest to each row tile in 16 bits longest.")
global_ = _layout("global", "Keeps the first keys of the sequence in 16 bits longest.")
row_random = _layout("row_random", "Makes the same share of every row tile INT8, drawn at random.")
aligned = _layout("aligned", "Keeps stripes of keys, the same for all row tiles and evenly spread, in 16 bits.")
bigbird = _layout("bigbird", "Keeps near, first and random groups, 3 : 2 : 3, in 16 bits longest.")
sptrans = _layout("sptrans", "Keeps a row tile's own stride of groups longest, then the last groups of every stride.")
local_sink = _layout(
    "local_sink",
    "Keeps the row tile's own positions and the first keys in 16 bits longest, then the nearest keys: the default.\n\n"
    '    `band` with protect=("diag", "sink"): of the layouts the nearest to 16 bits on models\' queries and keys.',
    "three quarters",
)
zero = _layout("zero", "All tiles in 16 bits.", "and only, 0")
one = _layout("one", "All tiles in INT8.", "and only, 1")


def from_scores(
    scores: npt.ArrayLike,
    coverage: Coverage,
    *,
    seq_len: int,
    query_len: int | None = None,
    causal: bool = True,
    window: int | None = None,
    protect: Protect = (),
    seed: int = 0,
    group: int | Auto = "auto",
    words: int | Auto = "auto",
) -> Routing:
    """The map in which the groups that matter least, by any statistic, become INT8.

    The error that a group adds grows with the sum of its squared probabilities, which is the statistic to measure if
    there is a choice.

    Args:
        scores: How much each group matters: real [row tiles, groups], or [kv heads, row tiles, groups] for a map of
            each head. What lies outside of the masks is ignored.
        coverage: Share of the executed tiles that become INT8, 0 to 1, in each head.
        seq_len: Keys of the sequence.
        query_len: Its queries, the last of which stands at the last key; as many as keys if None.
        causal: Whether a query sees no keys after its position.
        window: Keys that a query sees at most, up to its position; None for all.
        protect: As the layouts take it.
        seed: Of ties.
        group: Key tiles that share a bit; by default the fewest that make up as many groups as the scores have.
        words: 64-bit words of a row; by default as many as it takes.

    Raises:
        RoutingError: An argument is none of these, or a score is NaN.
    """
    keys = index(seq_len, "seq_len", 0)
    return scored(
        scores,
        coverage,
        keys if query_len is None else query_len,
        keys,
        causal=causal,
        window=window,
        protect=protect,
        seed=seed,
        group=group,
        words=words,
    )
