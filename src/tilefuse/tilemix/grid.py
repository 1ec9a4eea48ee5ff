"""The tiles of one sequence's score matrix: which a row tile executes, and the groups that a bit governs."""

from __future__ import annotations

import operator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from tilefuse.errors import RoutingError

BLOCK_M = 128
"""Query rows of a tile."""

BLOCK_N = 64
"""Keys of a tile: also the block whose keys share an INT8 scale and a mean."""

WORD_BITS = 64
"""Groups that one word of a map governs."""

MAX_LEN = 1 << 26
"""Queries or keys of a sequence: the tie-breaking hash of the layouts holds 2^20 key tiles of 64."""

MOST_WINDOW = 1 << 30
"""Keys of a window: any that hides nothing may be given."""

IntArray = npt.NDArray[np.int64]


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def auto_group(key_len: int, words: int = 1, block_n: int = BLOCK_N) -> int:
    """Key tiles of a group such that ``words`` words hold a row: 1 up to 4096 keys, 2 up to 8192, ... with one word."""
    return max(1, ceil_div(ceil_div(key_len, block_n), WORD_BITS * words))


def index(value: SupportsIndex, name: str, least: int, most: int = MAX_LEN) -> int:
    """``value`` as an integer within its limits.

    Raises:
        RoutingError: It isn't one, or lies outside; names ``name``.
    """
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool | np.bool_):
        raise RoutingError(f"{name} is {value!r}: pass an integer, {least} to {most}")
    if not least <= found <= most:
        raise RoutingError(f"{name} is {found}: pass {least} to {most}")
    return found


@dataclass(frozen=True)
class Grid:
    """The score matrix of ``query_len`` queries and ``key_len`` keys in tiles, queries aligned to the end of the keys.

    Query i stands at position ``i + offset`` of the keys; with ``causal`` it sees keys up to there, with ``window``
    only those above ``i + offset - window``. An incomplete last tile counts as one tile.

    Raises:
        RoutingError: A length, tile or group outside its limits.
    """

    query_len: int
    key_len: int
    _: KW_ONLY
    causal: bool = True
    window: int | None = None
    group: int = 1
    """Key tiles of a group, which share a bit."""
    block_m: int = BLOCK_M
    block_n: int = BLOCK_N

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "query_len", index(self.query_len, "query_len", 0))
        set_field(self, "key_len", index(self.key_len, "key_len", 0))
        set_field(self, "causal", bool(self.causal))
        if self.window is not None:
            set_field(self, "window", index(self.window, "window", 1, MOST_WINDOW))
        set_field(self, "group", index(self.group, "group", 1))
        for name in ("block_m", "block_n"):
            set_field(self, name, index(getattr(self, name), name, 16, 1 << 12))

    @property
    def offset(self) -> int:
        """Position of query 0 among the keys; negative with more queries than keys."""
        return self.key_len - self.query_len

    @property
    def row_tiles(self) -> int:
        """Tiles of ``block_m`` queries."""
        return ceil_div(self.query_len, self.block_m)

    @property
    def key_tiles(self) -> int:
        """Tiles of ``block_n`` keys."""
        return ceil_div(self.key_len, self.block_n)

    @property
    def groups(self) -> int:
        """Groups of ``group`` key tiles."""
        return ceil_div(self.key_tiles, self.group)

    @property
    def group_keys(self) -> int:
        """Keys of a group."""
        return self.group * self.block_n

    @cached_property
    def positions(self) -> tuple[IntArray, IntArray]:
        """Positions among the keys of each row tile's first and last query, int64 [row tiles] each."""
        start = np.arange(self.row_tiles, dtype=np.int64) * self.block_m
        last = np.minimum(start + self.block_m, self.query_len) - 1
        return start + self.offset, last + self.offset

    @cached_property
    def stop(self) -> IntArray:
        """One past the last key tile that each row tile executes, int64 [row tiles]."""
        if not self.causal:
            return np.full(self.row_tiles, self.key_tiles, dtype=np.int64)
        last = self.positions[1]
        found: IntArray = np.where(last < 0, 0, np.minimum(self.key_tiles, last // self.block_n + 1))
        return found

    @cached_property
    def first(self) -> IntArray:
        """The first key tile that each row tile executes, int64 [row tiles]; above 0 only with a window."""
        if self.window is None:
            return np.zeros(self.row_tiles, dtype=np.int64)
        lowest: IntArray = np.maximum(self.positions[0] - self.window + 1, 0) // self.block_n
        return np.minimum(lowest, self.stop)

    @cached_property
    def own(self) -> IntArray:
        """The group that holds the position of each row tile's last query, int64 [row tiles]; -1 where it has none."""
        tile = np.minimum(self.positions[1] // self.block_n, self.key_tiles - 1)
        found: IntArray = np.where((tile < 0) | (self.stop == 0), -1, tile // self.group)
        return found

    def weights(self) -> IntArray:
        """Executed tiles that each bit governs, int64 [row tiles, groups]; 0 where the bit is illegal."""
        low = np.arange(self.groups, dtype=np.int64) * self.group
        high = low + self.group
        found: IntArray = np.maximum(np.minimum(high, self.stop[:, None]) - np.maximum(low, self.first[:, None]), 0)
        return found

    def legal(self) -> npt.NDArray[np.bool_]:
        """Whether a bit governs any executed tile, bool [row tiles, groups]."""
        return self.weights() > 0

    def cells(self) -> IntArray:
        """Scores (query, key) that no mask hides in each row tile's groups, int64 [row tiles, groups]."""
        bounds = np.minimum(np.arange(self.groups + 1, dtype=np.int64) * self.group_keys, self.key_len)
        start, last = (position[:, None] for position in self.positions)
        below = _sum_clipped(start + 1, last + 2, bounds) if self.causal else (last + 1 - start) * bounds
        if self.window is not None:
            below = below - _sum_clipped(start - self.window + 1, last - self.window + 2, bounds)
        return np.diff(below, axis=1)


def _sum_clipped(start: IntArray, stop: IntArray, limit: IntArray) -> IntArray:
    """Sum of ``min(max(t, 0), limit)`` over ``start <= t < stop``."""

    def up_to(n: IntArray) -> IntArray:
        n = np.maximum(n, 0)
        rising = np.minimum(n, limit + 1)
        found: IntArray = rising * (rising - 1) // 2 + (n - rising) * limit
        return found

    return up_to(stop) - up_to(start)
