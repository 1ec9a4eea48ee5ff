"""What a product would take on each device. The CPU's figures come from rates, the NPU's from the planner's model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import lru_cache

from tilefuse import arch, plan
from tilefuse.configurations import BAND_BYTES, BAND_ROWS, MOST_BANDS, Configuration
from tilefuse.errors import PlanError
from tilefuse.layout import KT, NT, ROWS, Layout
from tilefuse.runtime.rates import Rates

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
    family: str = ""
    """What the configurations that may stand in for it have in common: operation, weights, columns."""
    dispatches: int = 1
    """Parts that the NPU takes it in."""

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

    One row runs as a GEMV, more as a GEMM, in parts where a buffer doesn't hold them all, as on the device.

    Args:
        layout: The packed layer.
        m: Rows of activations, at least 1.
        rates: The host's.
        another_open: Whether the array has another xclbin's configuration, which adds `tilefuse.arch.SWITCH`.

    Raises:
        PlanError: The array can't run it; the message says which limit.
    """
    rows = _rows_of_a_part(layout, m)
    full, rest = divmod(m, rows)
    whole = _array(layout, _padded(rows))
    parts = [(whole, full)] if not rest else [(whole, full), (_array(layout, _padded(rest)), 1)]
    return Estimate(
        "npu",
        work=sum(count * part.work for part, count in parts),
        bound=whole.bound,
        overhead=(full + bool(rest)) * arch.DISPATCH,
        staging=sum(count * (part.x_bytes / rates.staging + part.y_bytes / rates.results) for part, count in parts),
        switch=arch.SWITCH if another_open else 0.0,
        configuration=whole.configuration.name,
        family=f"{whole.configuration.op} {whole.configuration.weights.tag} {whole.configuration.columns}",
        dispatches=full + bool(rest),
    )


def _padded(m: int) -> int:
    return m if m == 1 else BLOCK * -(-m // BLOCK)


def _rows_of_a_part(layout: Layout, m: int) -> int:
    """As many rows as fit a buffer of activations and one of results, to some blocks."""
    row_bytes = max(layout.k_tiles * BAND_BYTES // BAND_ROWS, 2 * layout.n_padded)
    held = plan.MAX_BUFFER_BYTES // row_bytes
    # Room for the rows that pad a row block, of which none has more; half of what is held is always room enough.
    most = max(held - BLOCK * MOST_BANDS, held // 2)
    return m if m <= most else most // BLOCK * BLOCK


@dataclass(frozen=True)
class _Part:
    """What the array does in one dispatch, modelled."""

    configuration: Configuration
    work: float
    bound: str
    x_bytes: int
    y_bytes: int


@lru_cache(maxsize=2048)
def _array(layout: Layout, m: int) -> _Part:
    y_row = 2 * layout.n_padded
    if m > 1:
        made = plan.gemm_outline(layout, m)
        costs = made.costs
        return _Part(made.configuration, costs.total, costs.bound, arch.WORD * made.x_words, made.y_rows * y_row)
    one = plan.gemv(layout)
    if one.costs.bound == "weight stream":
        with contextlib.suppress(PlanError):
            one = min(one, plan.gemv(layout, streams=2), key=lambda candidate: candidate.costs.total)
    return _Part(one.configuration, one.costs.total, one.costs.bound, arch.WORD * one.x_words, y_row)


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
