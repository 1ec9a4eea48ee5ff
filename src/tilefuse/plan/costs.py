"""What a plan would cost: by how much each part of the array has to move or compute. *Modelled*, all of it."""

from __future__ import annotations

from dataclasses import dataclass

from tilefuse import arch
from tilefuse.configurations import Configuration, Op
from tilefuse.kernel_cycles import cycles_of
from tilefuse.layout import ROWS
from tilefuse.plan.stored import Stored

SEGMENT = 2e-6
"""Seconds of a segment that its neighbours don't hide: the latency of its first bytes and of its last results, and the
waits for them. Fitted to the emulated array, which takes 2 to 3.5 us."""


@dataclass(frozen=True)
class Costs:
    """Seconds, modelled, that each part would need if the others took no time."""

    compute: float
    """The fullest core."""
    x_stream: float
    """The channel that brings a core its activations."""
    w_stream: float
    """The channel that brings a column its weights."""
    y_wait: float
    """Cores waiting for their results to leave: what a memory tile has no room for waits for the column's stream."""
    y_stream: float
    """The channel that takes a column's results to the host."""
    dram: float
    control: float
    """The command processor, issuing tasks."""
    between: float
    """What the beginning and the end of each segment add to that."""

    @property
    def _parts(self) -> dict[str, float]:
        return {
            "compute": self.compute + self.y_wait,
            "activation stream": self.x_stream,
            "weight stream": self.w_stream,
            "result stream": self.y_stream,
            "DRAM": self.dram,
            "command processor": self.control,
        }

    @property
    def total(self) -> float:
        """The slowest part, which hides the others, and what no part hides."""
        return max(self._parts.values()) + self.between

    @property
    def bound(self) -> str:
        """Which part is the slowest."""
        return max(self._parts, key=lambda name: self._parts[name])


@dataclass(frozen=True)
class Traffic:
    """Bytes that the shims move, what several of them read alike counted for each; tasks and segments that it takes."""

    x: int
    w: int
    y: int
    tasks: int
    segments: int


def passes(config: Configuration, layout: Stored) -> int:
    """Output tiles of a column, or pairs of them."""
    return -(-layout.tiles_per_column // config.tiles)


def modelled(config: Configuration, layout: Stored, bands: int, row_blocks: int, traffic: Traffic) -> Costs:
    """The costs of ``row_blocks`` blocks of ``bands`` bands (1 and 1 for a GEMV)."""
    cycles = cycles_of(config)
    outputs = row_blocks * passes(config, layout)
    steps = outputs * layout.k_tiles
    in_rows = ROWS if config.op is Op.GEMV else 1
    compute = steps / in_rows * cycles.step(bands) + outputs * cycles.output(bands)
    if config.op in (Op.GEMV, Op.GEMV_BASELINE):
        x_bytes = traffic.x / (2 * config.columns if config.streams == 2 else 1)
        y_core = y_room = 0  # a tile's are 128 bytes
    else:
        x_bytes = steps * bands * config.x_object
        y_core = bands * config.tiles * config.y_object
        y_room = 2 * config.y_l2_object
    y_column = ROWS * y_core
    second = arch.CLOCK_HZ * arch.STREAM_BYTES
    read = traffic.x + traffic.w
    return Costs(
        compute=compute / arch.CLOCK_HZ,
        x_stream=x_bytes / second,
        w_stream=traffic.w / config.columns / config.streams / second,
        y_wait=outputs * max(y_core, y_column - y_room) / second,
        y_stream=outputs * y_column / second,
        dram=max(read / arch.DRAM_READ, (read + traffic.y) / arch.DRAM_TOTAL),
        control=traffic.tasks * arch.TASK_ISSUE,
        between=traffic.segments * SEGMENT,
    )
