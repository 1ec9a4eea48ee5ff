"""Maps of score tiles from their definitions, one score or one bit at a time: what the vectorised code is held to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def cell_hash(m: int, j: int, seed: int) -> int:
    return splitmix64((seed * 0xD1342543DE82EF95 + (m << 20) + j) & MASK)


def visible(query_len: int, key_len: int, causal: bool, window: int | None) -> np.ndarray:
    """bool [queries, keys]: what the masks leave."""
    at = np.arange(query_len)[:, None] + key_len - query_len
    keys = np.arange(key_len)[None]
    return ((not causal) | (keys <= at)) & (True if window is None else keys > at - window)


@dataclass
class Tiles:
    """Weights and scores of groups, counted on the mask itself."""

    weights: np.ndarray
    cells: np.ndarray


def tiles(seen: np.ndarray, block_m: int, block_n: int, group: int) -> Tiles:
    queries, keys = seen.shape
    rows, columns = -(-queries // block_m), -(-keys // block_n)
    groups = -(-columns // group)
    weights = np.zeros((rows, groups), int)
    cells = np.zeros((rows, groups), int)
    for m in range(rows):
        for n in range(columns):
            count = int(seen[m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n].sum())
            weights[m, n // group] += count > 0
            cells[m, n // group] += count
    return Tiles(weights, cells)


def causal_bits(
    layout: str,
    coverage: Fraction,
    query_len: int,
    key_len: int,
    group: int,
    *,
    seed: int = 0,
    protect: tuple[str, ...] = (),
    block_m: int = 128,
    block_n: int = 64,
) -> np.ndarray:
    """A causal map without a window, from the definitions, in Python's integers."""
    offset = key_len - query_len
    columns = -(-key_len // block_n)
    groups = -(-columns // group)
    width = group * block_n
    legal = []
    for m in range(-(-query_len // block_m)):
        last = min((m + 1) * block_m, query_len) - 1 + offset
        stop = 0 if last < 0 else min(columns, last // block_n + 1)
        own = (stop - 1) // group
        ranked = sorted(range(own + 1), key=lambda j, m=m: cell_hash(m, j, seed))
        for j in range(groups):
            weight = min(max(stop - j * group, 0), group)
            if not weight:
                continue
            d, r = own - j, ranked.index(j)
            key = {
                "band": lambda d=d: d,
                "global": lambda j=j: j,
                "row_random": lambda r=r, own=own: ((2 * r + 1) << 20) // (2 * (own + 1)),
                "aligned": lambda j=j: int(f"{j:0{max(1, (groups - 1).bit_length())}b}"[::-1], 2),
                "bigbird": lambda d=d, j=j, r=r: min(2 * d, 3 * j, 2 * r),
                "sptrans": lambda d=d, j=j, own=own: _sptrans(d, j, own, groups),
            }[layout]()
            if ("diag" in protect and (j + 1) * width > offset + m * block_m) or ("sink" in protect and j == 0):
                key = -(1 << 40)
            legal.append((-key, cell_hash(m, j, seed + 77), m, j, weight))
    total = sum(cell[4] for cell in legal)
    target = (2 * total * coverage.numerator + coverage.denominator) // (2 * coverage.denominator)
    bits = np.zeros((-(-query_len // block_m), groups), bool)
    covered = 0
    for _, _, m, j, weight in sorted(legal):
        if not abs(covered + weight - target) < abs(covered - target):
            break
        covered += weight
        bits[m, j] = True
    return bits


def _sptrans(d: int, j: int, own: int, groups: int) -> int:
    stride = max(2, round(math.sqrt(groups)))
    return d - 2 * stride if j // stride == own // stride else stride - 1 - j % stride
