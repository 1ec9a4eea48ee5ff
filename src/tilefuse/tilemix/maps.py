"""The maps of a call's sequences, and the words of all of them in one array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.errors import DtypeError, RoutingError
from tilefuse.tilemix.grid import BLOCK_M, BLOCK_N, auto_group, ceil_div
from tilefuse.tilemix.routing_map import Routing
from tilefuse.tilemix.spec import Sequences
from tilefuse.tilemix.template import Template, named

IntArray = npt.NDArray[np.int64]


def _listed(routing: Any, batch: int) -> list[Any]:
    """One entry for each sequence: None, a template or a map.

    Raises:
        RoutingError: A list of another length, or an unknown name.
        DtypeError: Something else.
    """
    entries = list(routing) if isinstance(routing, list | tuple) else [routing] * batch
    if len(entries) != batch:
        raise RoutingError(f"routing lists {len(entries)} maps: pass one for each of the {batch} sequences")
    entries = [named(entry) if isinstance(entry, str) else entry for entry in entries]
    for entry in entries:
        if entry is not None and not isinstance(entry, Template | Routing):
            raise DtypeError(f"routing is a {type(entry).__name__}: pass a name, or what tilefuse.routing makes")
        if isinstance(entry, Routing) and (entry.grid.block_m, entry.grid.block_n) != (BLOCK_M, BLOCK_N):
            raise RoutingError(
                f"routing has tiles of {entry.grid.block_m} x {entry.grid.block_n}: attention takes {BLOCK_M} x "
                f"{BLOCK_N}"
            )
    return entries


def _fits(routing: Routing, query_len: int, key_len: int, causal: bool, window: int | None) -> bool:
    grid = routing.grid
    return (grid.query_len, grid.key_len, grid.causal, grid.window) == (query_len, key_len, causal, window)


def _misfit(routing: Routing, query_len: int, key_len: int, causal: bool, window: int | None) -> RoutingError:
    grid = routing.grid
    return RoutingError(
        f"routing is for {grid.query_len} queries and {grid.key_len} keys, causal={grid.causal}, "
        f"window={grid.window}; the call has {query_len} and {key_len}, causal={causal}, window={window}: build it for "
        "these, or pass a template"
    )


def call_maps(routing: Any, sequences: Sequences, causal: bool, window: int | None) -> list[Routing | None]:
    """The map of each sequence, None for all 16-bit.

    Raises:
        RoutingError, DtypeError: A map is of another shape, or no map.
    """
    if routing is None:
        return [None] * sequences.batch
    maps: list[Routing | None] = []
    for entry, lq, lk in zip(_listed(routing, sequences.batch), sequences.q_len, sequences.k_len, strict=True):
        if isinstance(entry, Template):
            entry = entry.build(int(lq), int(lk), causal=causal, window=window)
        elif entry is not None and not _fits(entry, lq, lk, causal, window):
            raise _misfit(entry, lq, lk, causal, window)
        maps.append(entry)
    return maps


def context_maps(
    routing: Any, sequences: Sequences, causal: bool, window: int | None, capacity: int, group: int
) -> tuple[list[Routing | None], IntArray]:
    """The map of each sequence's whole context, and the position in it of the sequence's first query.

    A query's bits are those of its position, whatever the call. A map of the call's own shape stands for itself:
    position 0.

    Args:
        routing: As `tilefuse.attention` takes it.
        sequences: Queries are the last of each sequence's keys.
        causal: Of the call.
        window: Of the call.
        capacity: Tokens that a context may grow to.
        group: Key tiles to a bit of the templates' maps.

    Raises:
        RoutingError, DtypeError: A map is of another shape, or no map.
    """
    positions = np.zeros(sequences.batch, np.int64)
    if routing is None:
        return [None] * sequences.batch, positions
    maps: list[Routing | None] = []
    listed = _listed(routing, sequences.batch)
    for b, (entry, lq, lk) in enumerate(zip(listed, sequences.q_len, sequences.k_len, strict=True)):
        whole = entry
        if isinstance(entry, Template):
            keep = entry.group != "auto" or entry.words != "auto"
            whole = entry.build(capacity, causal=causal, window=window, group=None if keep else group)
        elif entry is not None and _fits(entry, lq, lk, causal, window):
            maps.append(entry)
            continue
        elif entry is not None and not (
            entry.grid.key_len >= lk and _fits(entry, entry.grid.key_len, entry.grid.key_len, causal, window)
        ):
            raise _misfit(entry, lq, lk, causal, window)
        if whole is not None:
            positions[b] = lk - lq
        maps.append(whole)
    return maps, positions


def assemble(
    maps: list[Routing | None], sequences: Sequences, heads_kv: int
) -> tuple[npt.NDArray[np.uint64] | None, IntArray, IntArray]:
    """The maps' words one after the other, each map once: words, and each sequence's first row tile and group.

    Words are uint64 [1 or KV heads, row tiles, words], or None where no sequence has a map. Sequences without one have
    row tiles of zeros.

    Raises:
        RoutingError: A map has heads of another number.
    """
    first = np.zeros(len(maps), np.int64)
    groups = np.ones(len(maps), np.int64)
    unique = {id(entry): entry for entry in maps if entry is not None}
    if not unique:
        return None, first, groups
    heads = {entry.heads or 1 for entry in unique.values()}
    wrong = heads - {1, heads_kv}
    if wrong:
        raise RoutingError(f"routing has maps of {wrong.pop()} heads: k has {heads_kv}")
    if len(unique) == 1 and None not in maps:
        (entry,) = unique.values()
        groups[:] = entry.grid.group
        words = entry.words
        return (words if words.ndim == 3 else words[None]), first, groups
    width = max(entry.words.shape[-1] for entry in unique.values())
    blank = max((ceil_div(int(n), BLOCK_M) for n, e in zip(sequences.q_len, maps, strict=True) if e is None), default=0)
    rows = sum(entry.words.shape[-2] for entry in unique.values()) + blank
    words = np.zeros((max(heads), max(rows, 1), width), np.uint64)
    places: dict[int, int] = {}
    at = 0
    for key, entry in unique.items():
        places[key] = at
        words[:, at : at + entry.words.shape[-2], : entry.words.shape[-1]] = entry.words
        at += entry.words.shape[-2]
    for b, found in enumerate(maps):
        first[b] = at if found is None else places[id(found)]
        groups[b] = auto_group(int(sequences.k_len[b]), width) if found is None else found.grid.group
    return words, first, groups
