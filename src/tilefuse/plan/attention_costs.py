"""What a plan of attention would cost: *modelled*, all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilefuse import arch
from tilefuse.attention_configurations import INT8_OBJECTS, PIECES, WIDE_OBJECTS, AttentionConfiguration


@dataclass(frozen=True)
class KernelCycles:
    """Cycles of the kernel's entry points, modelled: the host build counts them, and the tests hold these to it. Of
    tiles that are not masked and in which no row's maximum grows, which are nearly all of a long sequence."""

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


@dataclass(frozen=True)
class AttentionCycles:
    """Cycles, modelled, of a core with its calls and locks, and of the stream that brings it keys and values."""

    int8_tile: float
    wide_tile: float
    around: float
    """Of a core around a query tile."""
    int8_stream: float
    wide_stream: float

    def compute(self, int8: int, wide: int) -> float:
        """Of a core for a query tile with so many key tiles."""
        return self.around + int8 * self.int8_tile + wide * self.wide_tile

    def pace(self, int8: int, wide: int) -> float:
        """By which a query tile follows the one before: the core's or the stream's, of each tile what is more."""
        tiles = int8 * max(self.int8_tile, self.int8_stream) + wide * max(self.wide_tile, self.wide_stream)
        return self.around + tiles


_KERNELS = {
    64: KernelCycles(begin=156, int8_scores=598, wide_scores=492, softmax=820, values=488, store=170),
    128: KernelCycles(begin=284, int8_scores=960, wide_scores=876, softmax=820, values=976, store=234),
}


def kernel_cycles(d: int) -> KernelCycles:
    """The figures of the kernel for heads of ``d``."""
    return _KERNELS[d]


def cycles_of(configuration: AttentionConfiguration) -> AttentionCycles:
    """The figures of a configuration."""
    kernel, blocks = kernel_cycles(configuration.d), configuration.blocks
    call, lock = arch.CALL_CYCLES, 2 * arch.LOCK_CYCLES
    weigh = call + kernel.softmax + 2 * (call + kernel.values)
    int8 = INT8_OBJECTS * lock + blocks * (call + kernel.int8_scores + weigh)
    wide = WIDE_OBJECTS * lock + blocks * (2 * (call + kernel.wide_scores) + weigh)
    pieces = PIECES * (lock + call + kernel.store)
    return AttentionCycles(
        int8_tile=int8,
        wide_tile=wide,
        around=lock + blocks * (call + kernel.begin + pieces) + configuration.q_object / arch.STREAM_BYTES,
        int8_stream=configuration.tile_bytes(int8=True) / arch.STREAM_BYTES,
        wide_stream=configuration.tile_bytes(int8=False) / arch.STREAM_BYTES,
    )


@dataclass(frozen=True)
class AttentionCosts:
    """Seconds, modelled, that each part would need if the others took no time."""

    compute: float
    """The cores with most to do."""
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
