"""What a plan of attention would cost: *modelled*, all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilefuse import arch
from tilefuse.attention_configurations import INT8_OBJECTS, PIECES, WIDE_OBJECTS, AttentionConfiguration


@dataclass(frozen=True)
class AttentionCycles:
    """Cycles of the kernel's entry points, modelled: the host build counts them, and the tests hold these to it."""

    begin: int
    int8_scores: int
    """Of a whole tile."""
    wide_scores: int
    """Of half a tile."""
    softmax: int
    values: int
    """Of half a tile."""
    store: int
    """Of a piece."""

    @property
    def int8_tile(self) -> float:
        """Cycles of a core for an INT8 tile, with calls and locks."""
        return self._around(INT8_OBJECTS) + self.int8_scores + self.softmax + 2 * self.values

    @property
    def wide_tile(self) -> float:
        """Cycles of a core for a 16-bit tile, with calls and locks."""
        return self._around(WIDE_OBJECTS) + 2 * self.wide_scores + self.softmax + 2 * self.values

    def _around(self, objects: int) -> float:
        return objects * (2 * arch.LOCK_CYCLES + arch.CALL_CYCLES) + arch.CALL_CYCLES

    def item(self, int8: int, wide: int) -> float:
        """Cycles of a core for a query tile with so many key tiles."""
        around = 2 * arch.LOCK_CYCLES + arch.CALL_CYCLES + self.begin
        pieces = PIECES * (2 * arch.LOCK_CYCLES + arch.CALL_CYCLES + self.store)
        return around + pieces + int8 * self.int8_tile + wide * self.wide_tile


_CYCLES = {
    64: AttentionCycles(begin=150, int8_scores=600, wide_scores=5400, softmax=2500, values=5400, store=100),
    128: AttentionCycles(begin=280, int8_scores=1100, wide_scores=10800, softmax=2600, values=10800, store=200),
}


def cycles_of(configuration: AttentionConfiguration) -> AttentionCycles:
    """The figures of a configuration's kernel."""
    return _CYCLES[configuration.d]


@dataclass(frozen=True)
class AttentionCosts:
    """Seconds, modelled, that each part would need if the others took no time."""

    compute: float
    """The column with most to do."""
    kv_stream: float
    """The fullest channel of keys and values."""
    dram: float
    control: float
    """The command processor, issuing tasks."""

    @classmethod
    def modelled(
        cls, compute: Sequence[float], kv_bytes: Sequence[int], read: int, written: int, tasks: int
    ) -> AttentionCosts:
        """From each column's cycles and bytes, and the traffic of all."""
        return cls(
            compute=max(compute, default=0.0) / arch.CLOCK_HZ,
            kv_stream=max(kv_bytes, default=0) / (arch.CLOCK_HZ * arch.STREAM_BYTES),
            dram=max(read / arch.DRAM_READ, (read + written) / arch.DRAM_TOTAL),
            control=tasks * (arch.TASK_ISSUE + arch.SYNC_ISSUE),
        )

    @property
    def _parts(self) -> dict[str, float]:
        return {
            "compute": self.compute,
            "key and value stream": self.kv_stream,
            "DRAM": self.dram,
            "command processor": self.control,
        }

    @property
    def total(self) -> float:
        """The slowest part, which hides the others, and the latency of the first data."""
        return max(self._parts.values()) + 2 * arch.DRAM_LATENCY

    @property
    def bound(self) -> str:
        """Which part is the slowest."""
        return max(self._parts, key=lambda name: self._parts[name])

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in self._parts.items())
        return f"{self.total * 1e6:.1f} us, bound by {self.bound}: {parts}"
