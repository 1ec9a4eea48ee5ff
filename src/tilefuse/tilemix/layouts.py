"""The layouts: an integer key for each group of a grid; the larger it is, the earlier the group becomes INT8.

D is the group of a row tile's own position, d = |D - j| the distance of group j from it. Integers only: maps don't
depend on a library, a number type or the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tilefuse.tilemix.grid import Grid, IntArray

PROTECTED = -(1 << 40)
"""Key of protected groups: below that of any other."""

TIES = 77
"""Added to the seed to decide between groups of the same key."""

_SEED_STEP = 0xD1342543DE82EF95
_ROW_SHIFT = 20
_RANDOM_BITS = 20
_MASK = (1 << 64) - 1

HashArray = npt.NDArray[np.uint64]


def splitmix64(state: HashArray) -> HashArray:
    """One output of the SplitMix64 generator for each state."""
    with np.errstate(over="ignore"):
        z = state + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def hashes(row_tiles: int, groups: int, seed: int) -> HashArray:
    """H(m, j, seed) = splitmix64(seed * 0xD1342543DE82EF95 + (m << 20) + j), uint64 [row tiles, groups]."""
    rows: HashArray = np.arange(row_tiles, dtype=np.uint64)[:, None] << np.uint64(_ROW_SHIFT)
    columns: HashArray = np.arange(groups, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state: HashArray = rows + columns + np.uint64(seed * _SEED_STEP & _MASK)
    return splitmix64(state)


def _distance(grid: Grid) -> IntArray:
    found: IntArray = np.abs(grid.own[:, None] - np.arange(grid.groups, dtype=np.int64))
    return found


def _columns(grid: Grid) -> IntArray:
    return np.broadcast_to(np.arange(grid.groups, dtype=np.int64), (grid.row_tiles, grid.groups))


def _ranks(grid: Grid, seed: int) -> IntArray:
    """Rank of each group in its row tile by its hash, among the groups that the row tile executes."""
    drawn = np.where(grid.legal(), hashes(grid.row_tiles, grid.groups, seed), np.uint64(_MASK))
    order = np.argsort(drawn, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, _columns(grid), axis=1)
    return ranks


def _band(grid: Grid, seed: int) -> IntArray:
    return _distance(grid)


def _global(grid: Grid, seed: int) -> IntArray:
    return _columns(grid)


def _row_random(grid: Grid, seed: int) -> IntArray:
    executed = np.maximum(grid.legal().sum(axis=1, dtype=np.int64), 1)[:, None]
    found: IntArray = ((2 * _ranks(grid, seed) + 1) << _RANDOM_BITS) // (2 * executed)
    return found


def _aligned(grid: Grid, seed: int) -> IntArray:
    columns = _columns(grid)
    bits = max(grid.groups - 1, 0).bit_length()
    reversed_columns = np.zeros_like(columns)
    for bit in range(bits):
        reversed_columns |= (columns >> bit & 1) << (bits - 1 - bit)
    return reversed_columns


def _bigbird(grid: Grid, seed: int) -> IntArray:
    return np.minimum(np.minimum(2 * _distance(grid), 3 * _columns(grid)), 2 * _ranks(grid, seed))


def _sptrans(grid: Grid, seed: int) -> IntArray:
    stride = max(2, (math.isqrt(4 * grid.groups) + 1) // 2)  # 2, or the square root of the groups, rounded
    columns = _columns(grid)
    own = columns // stride == grid.own[:, None] // stride
    found: IntArray = np.where(own, _distance(grid) - 2 * stride, stride - 1 - columns % stride)
    return found


def _any(grid: Grid, seed: int) -> IntArray:
    return np.zeros((grid.row_tiles, grid.groups), np.int64)


KEYS: dict[str, Callable[[Grid, int], IntArray]] = {
    "band": _band,
    "global": _global,
    "row_random": _row_random,
    "aligned": _aligned,
    "bigbird": _bigbird,
    "sptrans": _sptrans,
    "zero": _any,
    "one": _any,
}
"""Each layout's keys, int64 [row tiles, groups], of a grid and a seed."""


def protected(grid: Grid, protect: frozenset[str]) -> npt.NDArray[np.bool_]:
    """The groups that ``"diag"`` (those that touch the row tile's own positions) and ``"sink"`` (the first) name."""
    found = np.zeros((grid.row_tiles, grid.groups), np.bool_)
    if "sink" in protect:
        found[:, :1] = True
    if "diag" in protect:
        first, last = (position[:, None] for position in grid.positions)
        start = _columns(grid) * grid.group_keys
        found |= (start + grid.group_keys > first) & (start <= last)
    return found
