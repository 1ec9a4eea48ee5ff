"""Cycles of the kernels' entry points, modelled: what the planner chooses tiles by.

The host build counts them (`tilefuse.emulator.kernels`), and the tests hold these figures to within a tenth of its
counts. They are written down so that a plan is the same where there is no emulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilefuse import arch
from tilefuse.configurations import Configuration, Op


@dataclass(frozen=True)
class KernelCycles:
    """Of one kernel. ``main``, ``store`` and ``zero`` are of a band (or of a GEMV's tile)."""

    prepare: int
    main: int
    store: int
    zero: int
    tiles: int = 1

    def step(self, bands: int) -> float:
        """Cycles of a core for one object of weights and ``bands`` bands."""
        call, lock = arch.CALL_CYCLES, 2 * arch.LOCK_CYCLES
        return lock + call + self.prepare + bands * (lock + call + self.main)

    def output(self, bands: int) -> float:
        """Cycles of a core around a tile of outputs: zeroing and storing its sums."""
        call, lock = arch.CALL_CYCLES, 2 * arch.LOCK_CYCLES
        return bands * (call + self.zero + self.tiles * (lock + call + self.store))


_GEMM = {
    # (bits, groups in a tile, minima): (prepare of a tile, main of a band and a tile)
    (4, 1, False): (60, 392),
    (4, 2, False): (108, 528),
    (4, 4, False): (204, 800),
    (8, 1, False): (60, 438),
    (8, 2, False): (108, 588),
    (8, 4, False): (204, 888),
    (4, 1, True): (528, 360),
    (4, 2, True): (672, 360),
    (4, 4, True): (960, 360),
    (8, 1, True): (673, 360),
    (8, 2, True): (833, 360),
    (8, 4, True): (1153, 360),
}
_GEMV = {
    # (bits, groups in a tile): (prepare of a k tile of x, main of a tile)
    (4, 1): (125, 119),
    (4, 2): (137, 158),
    (4, 4): (161, 236),
    (8, 1): (125, 168),
    (8, 2): (137, 207),
    (8, 4): (161, 285),
    (16, 0): (58, 272),
}


def cycles_of(configuration: Configuration) -> KernelCycles:
    """The figures of a configuration's kernel."""
    weights = configuration.weights
    if configuration.op is Op.GEMM:
        prepare, main = _GEMM[weights.bits, weights.groups, weights.minima]
        tiles = configuration.tiles
        return KernelCycles(tiles * prepare, tiles * main, store=74, zero=11 + 64 * tiles, tiles=tiles)
    if configuration.op is Op.GEMM_BASELINE:
        return KernelCycles(prepare=296, main=2256, store=138, zero=139)
    prepare, main = _GEMV[weights.bits, weights.groups]
    return KernelCycles(prepare, main, store=14, zero=4)
