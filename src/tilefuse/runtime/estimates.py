"""What a product would take on each device. The CPU's figures come from rates, the NPU's from the planner's model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilefuse import arch, plan
from tilefuse.configurations import BAND_ROWS
from tilefuse.errors import PlanError
from tilefuse.layout import KT, NT, ROWS, Layout
from tilefuse.runtime.rates import Rates

SWITCH = 2.7e-3
"""Seconds that a run takes longer if the array has another xclbin's configuration (observed: 2.67 ms)."""

BLOCK = BAND_ROWS * ROWS
"""Rows of activations that the array computes at a time, at least: between two multiples, its time is the same."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one product on one device, and what they are made of.

    Parts that overlap count by the largest of them: `work` is what the memory or the arithmetic needs, the rest is
    added.
    """

    device: str
    work: float
    """What the slowest part of the work itself needs."""
    bound: str
    """Which part that is."""
    overhead: float
    """What a call or a dispatch costs beside it."""
    staging: float = 0.0
    """Activations written for the array, and results copied out."""
    switch: float = 0.0
    """Loading the xclbin where another one is open."""
    configuration: str = ""
    """Name of the NPU's configuration."""

    @property
    def total(self) -> float:
        """Seconds of the call."""
        return self.work + self.overhead + self.staging + self.switch

    @property
    def bottleneck(self) -> str:
        """The largest of the parts."""
        parts = {self.bound: self.work, "dispatch" if self.device == "npu" else "call": self.overhead}
        parts |= {"staging": self.staging, "xclbin switch": self.switch}
        return max(parts, key=lambda name: parts[name])


def cpu_estimate(layout: Layout, m: int, rates: Rates) -> Estimate:
    """Seconds on the CPU, weights read from memory: max(bytes / bandwidth, operations / rate) + call.

    Args:
        layout: The packed layer; tiles that are padding throughout are not read.
        m: Rows of activations, at least 1.
        rates: Of the level and number of threads in force.
    """
    tiles = layout.k_tiles_used * layout.n_tiles_used
    memory = tiles * layout.tile_bytes / rates.bandwidth
    arithmetic = rates.arithmetic(layout.bits, tiles * KT * NT, m)
    work, bound = max((memory, "memory"), (arithmetic, "arithmetic"))
    return Estimate("cpu", work, bound, rates.call)


def npu_estimate(layout: Layout, m: int, rates: Rates, *, another_open: bool = False) -> Estimate:
    """Seconds on the NPU, modelled: dispatch, the plan's costs, and the host's staging of activations and results.

    One row runs as a GEMV, more as a GEMM, as on the device.

    Args:
        layout: The packed layer.
        m: Rows of activations, at least 1.
        rates: The host's.
        another_open: Whether the array has another xclbin's configuration, which adds `SWITCH`.

    Raises:
        PlanError: The array can't run it; the message says which limit.
    """
    work, bound, x_bytes, y_bytes, configuration = _array(layout, m if m == 1 else BLOCK * -(-m // BLOCK))
    staging = x_bytes / rates.staging + y_bytes / rates.results
    switch = SWITCH if another_open else 0.0
    return Estimate("npu", work, bound, arch.DISPATCH, staging, switch, configuration)


@lru_cache(maxsize=2048)
def _array(layout: Layout, m: int) -> tuple[float, str, int, int, str]:
    """(seconds, what bounds them, bytes of the activations and of the results, configuration), modelled."""
    if m == 1:
        made = plan.gemv(layout)
        costs, config, x_words, y_rows = made.costs, made.configuration, made.x_words, made.y_rows
    else:
        outline = plan.gemm_outline(layout, m)
        costs, config, x_words, y_rows = outline.costs, outline.configuration, outline.x_words, outline.y_rows
    return costs.total, costs.bound, arch.WORD * x_words, 2 * y_rows * layout.n_padded, config.name


# --- where the choice flips -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossover:
    """From ``m`` rows on, up to the next one, ``device`` is the cheapest."""

    m: int
    device: str


def crossovers(layout: Layout, rates: Rates, most: int, *, another_open: bool = False) -> list[Crossover]:
    """Every number of rows from 1 to ``most`` at which the cheapest device changes, the first being 1.

    What the array can't run is the CPU's.
    """

    def choice(m: int) -> str:
        cpu = cpu_estimate(layout, m, rates)
        try:
            npu = npu_estimate(layout, m, rates, another_open=another_open)
        except PlanError:
            return cpu.device
        return cheapest(cpu, npu).device

    found: list[Crossover] = []
    for m in range(1, most + 1):
        device = choice(m)
        if not found or found[-1].device != device:
            found.append(Crossover(m, device))
    return found


def cheapest(cpu: Estimate, npu: Estimate) -> Estimate:
    """The one that takes less; the CPU where they are equal."""
    return npu if npu.total < cpu.total else cpu
