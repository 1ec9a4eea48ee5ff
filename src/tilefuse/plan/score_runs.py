"""Runs of neighbouring key tiles, and the descriptors that stream them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tilefuse import arch
from tilefuse.descriptors import Tap

Bits = npt.NDArray[np.bool_]

Runs = tuple[tuple[int, int], ...]
"""(first, count) of each run of key tiles, ascending."""


def runs_of(bits: Bits, first: int) -> Runs:
    """Where ``bits`` is True, tiles counted from ``first``."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], bits, [False])).astype(np.int8)))
    return tuple((first + int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True))


def strided(runs: Runs, words: int) -> Iterator[tuple[int, int, int, int]]:
    """Runs of equal length and distance as one: (first, tiles of a run, runs, tiles from one to the next).

    Args:
        runs: Of tiles.
        words: Words of a tile.
    """
    position = 0
    while position < len(runs):
        first, count = runs[position]
        times, step = 1, 0
        if position + 1 < len(runs) and _loops(count * words) is not None:
            step = runs[position + 1][0] - first
            while (
                position + times < len(runs)
                and runs[position + times] == (first + times * step, count)
                and step * words <= arch.SHIM.stride
            ):
                times += 1
        yield first, count, times, step
        position += times


def pattern(offset: int, words: int, times: int, step: int) -> Tap:
    """``times`` runs of ``words`` words, ``step`` words from one to the next, as `strided` has them."""
    if times == 1:
        return Tap.run(offset, words)
    loops = _loops(words)
    assert loops is not None
    outer, inner = loops
    return Tap(offset, (1, times, outer, inner), (0, step, inner, 1))


def _loops(words: int) -> tuple[int, int] | None:
    """``words`` as a product of two sizes that a descriptor's inner loops hold; None if there are none."""
    most = arch.SHIM.size
    inners = (inner for inner in range(most, 0, -1) if words % inner == 0)
    inner = next(inners)
    return (words // inner, inner) if words // inner <= most else None
