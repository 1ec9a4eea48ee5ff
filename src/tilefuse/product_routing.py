"""What `tilefuse route` shows: the devices' estimates for one product, the choice, and where it would flip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tilefuse.errors import PlanError, ShapeError
from tilefuse.layout import Layout
from tilefuse.runtime import cpu_level, get_num_threads
from tilefuse.runtime.estimates import Crossover, Estimate, cheapest, cpu_estimate, crossovers, npu_estimate
from tilefuse.runtime.rates import Rates

MOST_ROWS = 4096
"""Crossovers are looked for up to so many rows, or the rows asked for if they are more."""

MAX_ROWS = 1 << 16


@dataclass(frozen=True)
class ProductRoutes:
    """The options of a product of M rows by a layer."""

    layout: Layout
    m: int
    level: str
    threads: int
    rates: Rates
    cpu: Estimate
    npu: Estimate | None
    """Modelled; None where the array can't run it."""
    npu_switched: Estimate | None
    """With another xclbin open."""
    refused: str
    """Why the array can't run it, or empty."""
    npu_usable: bool
    """Whether this machine's NPU could be opened."""
    crossovers: list[Crossover]
    crossovers_switched: list[Crossover]
    most: int
    """Rows up to which crossovers were looked for."""

    @property
    def cheapest(self) -> str:
        """The device that takes the least, usable here or not."""
        return self.cpu.device if self.npu is None else cheapest(self.cpu, self.npu).device

    @property
    def choice(self) -> str:
        """What device="auto" takes here, with the right xclbin open or none."""
        return self.cheapest if self.npu_usable else self.cpu.device

    @property
    def title(self) -> str:
        """The problem."""
        lay = self.layout
        group = "channel" if lay.group >= lay.k else lay.group
        return f"M = {self.m}, K = {lay.k}, N = {lay.n}, w{lay.bits} g={group} {lay.zero.value}, {lay.columns} columns"

    def options(self) -> Iterator[tuple[str, Estimate]]:
        """Each option: what it is called, and its estimate."""
        yield "cpu", self.cpu
        if self.npu is not None and self.npu_switched is not None:
            yield "npu", self.npu
            yield "npu + switch", self.npu_switched

    def lines(self) -> Iterator[str]:
        """What is said below the table: where its figures come from, and what follows from them."""
        yield f"cpu: {self.rates.source}; {self.level}, {self.threads} threads"
        if self.npu is not None:
            unusable = "" if self.npu_usable else "; not usable here: run tilefuse doctor"
            yield f"npu: modelled; staging {self.rates.source}{unusable}"
            yield "npu + switch: with another xclbin open"
        if self.refused:
            yield f"npu: the array can't run it: {self.refused}"
        if self.npu is not None:
            yield f"configuration: {self.npu.configuration}"
        unusable = "" if self.npu_usable or self.cheapest == "cpu" else " (npu if it were usable)"
        yield f"choice: {self.choice}{unusable}"
        yield f"crossovers up to M = {self.most}: {_listed(self.crossovers)}"
        yield f"with another xclbin open: {_listed(self.crossovers_switched)}"
        rates = self.rates
        yield (
            f"rates, {rates.source}: weights {rates.bandwidth / 1e9:.1f} GB/s, staging {rates.staging / 1e9:.1f} GB/s, "
            f"results {rates.results / 1e9:.1f} GB/s"
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, seconds and rates in SI units."""

        def listed(estimate: Estimate | None, source: str) -> dict[str, Any] | None:
            if estimate is None:
                return None
            parts = asdict(estimate)
            return parts | {"total": estimate.total, "bottleneck": estimate.bottleneck, "source": source}

        lay = self.layout
        return {
            "m": self.m,
            "k": lay.k,
            "n": lay.n,
            "bits": lay.bits,
            "group": lay.group,
            "zero": lay.zero.value,
            "columns": lay.columns,
            "cpu_level": self.level,
            "threads": self.threads,
            "rates": asdict(self.rates),
            "cpu": listed(self.cpu, self.rates.source),
            "npu": listed(self.npu, "modelled"),
            "npu_another_xclbin_open": listed(self.npu_switched, "modelled"),
            "npu_refused": self.refused or None,
            "npu_usable": self.npu_usable,
            "choice": self.choice,
            "cheapest": self.cheapest,
            "crossovers": [asdict(crossover) for crossover in self.crossovers],
            "crossovers_another_xclbin_open": [asdict(crossover) for crossover in self.crossovers_switched],
            "crossovers_up_to": self.most,
        }


def route(layout: Layout, m: int, calibrate: Callable[[], Rates], npu_usable: Callable[[], bool]) -> ProductRoutes:
    """Estimates ``m`` rows of activations by a layer of ``layout``.

    Args:
        layout: The packed layer.
        m: Rows.
        calibrate: Gives the rates of this machine.
        npu_usable: Whether its NPU can be opened.

    Raises:
        ShapeError: ``m`` is below 1 or above `MAX_ROWS`.
    """
    if not 1 <= m <= MAX_ROWS:
        raise ShapeError(f"M = {m} rows: pass 1 to {MAX_ROWS}")
    rates = calibrate()
    npu = switched = None
    refused = ""
    try:
        npu = npu_estimate(layout, m, rates)
        switched = npu_estimate(layout, m, rates, another_open=True)
    except PlanError as error:
        refused = str(error)
    most = max(m, MOST_ROWS)
    return ProductRoutes(
        layout,
        m,
        cpu_level(),
        get_num_threads(),
        rates,
        cpu_estimate(layout, m, rates),
        npu,
        switched,
        refused,
        npu_usable(),
        crossovers(layout, rates, most),
        crossovers(layout, rates, most, another_open=True),
        most,
    )


def _listed(found: list[Crossover]) -> str:
    return ", ".join(f"{crossover.device} from {crossover.m}" for crossover in found)
