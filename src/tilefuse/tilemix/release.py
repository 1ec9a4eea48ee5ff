"""SpTrans maps as the paper's authors released them, as far as is known: a strided pattern, then random flips.

From a description of the release, not its source: its published shares of tiles and of cells are met where there are
any, on 256 tokens in tiles of 64 x 64. Above 4096 keys every group holds a summary token of the pattern, and the rest
is random.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from tilefuse.tilemix.grid import Grid

SEED = 42
"""Of the flips' order."""

_LONGEST_STRIDE = 128
_LONGEST_TAIL = 32
_MT_WORDS = 624


def randperm(n: int, seed: int) -> list[int]:
    """What ``torch.randperm(n, generator=torch.Generator().manual_seed(seed))`` gives, without torch.

    A Fisher-Yates shuffle from the front by the remainders of MT19937's 32-bit outputs, seeded by its ``init_genrand``.
    """
    key = [seed & 0xFFFFFFFF]
    for i in range(1, _MT_WORDS):
        key.append((1812433253 * (key[-1] ^ key[-1] >> 30) + i) & 0xFFFFFFFF)
    generator = np.random.MT19937()
    generator.state = {
        "bit_generator": "MT19937",
        "state": {"key": np.array(key, np.uint32), "pos": _MT_WORDS},
    }
    found = list(range(n))
    steps = np.asarray(generator.random_raw(max(n - 1, 0))) % np.arange(n, 1, -1, dtype=np.uint64)
    for i, step in enumerate(steps.tolist()):
        found[i], found[i + step] = found[i + step], found[i]
    return found


def sptrans_bits(grid: Grid, coverage: Fraction) -> npt.NDArray[np.bool_]:
    """The map, bool [row tiles, groups], whose share of the executed tiles the flips bring to ``coverage``."""
    weights = grid.weights()
    legal = weights > 0
    bits = legal & ~_pattern(grid)
    target = round(coverage * int(weights.sum()))  # ties to even
    covered = int(weights[bits].sum())
    fewer = covered > target
    cells = np.argwhere(bits if fewer else legal & ~bits)
    for at in randperm(len(cells), SEED):
        if covered == target:
            break
        m, j = cells[at]
        moved = covered + (-1 if fewer else 1) * int(weights[m, j])
        if abs(moved - target) <= abs(covered - target):
            covered = moved
            bits[m, j] = not fewer
    return bits


def _pattern(grid: Grid) -> npt.NDArray[np.bool_]:
    """The 16-bit groups: the row tile's own blocks of keys, and the last keys of each block before them."""
    stride = max(1, min(_LONGEST_STRIDE, grid.key_len // 4))
    tail = max(1, min(_LONGEST_TAIL, stride // 4))
    found = np.zeros((grid.row_tiles, grid.groups), np.bool_)
    blocks = np.arange(-(-grid.key_len // stride), dtype=np.int64)
    # A tail has at most 32 keys: it touches one group or two.
    low = ((blocks + 1) * stride - tail) // grid.group_keys
    high = ((blocks + 1) * stride - 1) // grid.group_keys
    for m, (start, last) in enumerate(zip(*grid.positions, strict=True)):
        if last >= 0:
            own, after = max(start, 0) // stride, (last // stride + 1) * stride
            found[m, own * stride // grid.group_keys : (after - 1) // grid.group_keys + 1] = True
            found[m, low[:own]] = found[m, high[:own]] = True
    return found
