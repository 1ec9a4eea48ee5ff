"""What ``tilefuse route --model`` shows: the estimates of a model's layers, phase by phase, and the devices chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilefuse import fusion
from tilefuse.errors import FormatError
from tilefuse.formats import Checkpoint, open_checkpoint
from tilefuse.layout import DEFAULT_COLUMNS, Layout, ZeroKind
from tilefuse.phases import BUCKETS, ModelRouting, Phase, estimate, model_routing
from tilefuse.runtime import cpu_level, get_num_threads
from tilefuse.runtime.rates import Rates

SHOWN = BUCKETS[1]
"""Rows of the table of products, besides one."""


@dataclass(frozen=True)
class Kind:
    """The products of one name and layout in all blocks of a model.

    Attributes:
        name: Last part of their names.
        count: How many there are.
        layout: Of each.
        decode: All of them at one row.
        prefill: All of them at `SHOWN` rows.
    """

    name: str
    count: int
    layout: Layout
    decode: Phase
    prefill: Phase

    @property
    def scheme(self) -> str:
        """Bits and group."""
        lay = self.layout
        return f"w{lay.bits} g={'channel' if lay.group >= lay.k else lay.group}"


@dataclass(frozen=True)
class ModelRoutes:
    """A model's quantised layers and what they are estimated to take."""

    path: Path
    kinds: list[Kind]
    routing: ModelRouting
    level: str
    threads: int
    rates: Rates
    left: int
    """Linear layers that are not quantised and stay with torch."""

    def phases(self) -> Iterator[tuple[str, Phase]]:
        """Each phase with its name."""
        yield "decode", self.routing.decode
        for phase in self.routing.prefill:
            yield "prefill", phase

    def lines(self) -> Iterator[str]:
        """What is said below the tables."""
        chosen = self.routing.phases()
        yield f"cpu: {self.rates.source}; {self.level}, {self.threads} threads"
        unusable = "" if self.routing.npu_usable else "; not usable here: run tilefuse doctor"
        yield f"npu: modelled, with the right xclbin open; staging {self.rates.source}{unusable}"
        refused = next((phase.refused for _, phase in self.phases() if phase.refused), "")
        if refused:
            yield f"npu: the array can't run a layer: {refused}"
        rows = self.routing.min_rows
        prompts = f"the npu is the faster one from prompts of {rows} tokens on" if rows else "the cpu is the faster one"
        yield f"prefill: {prompts}; decode: the {self.routing.decode.cheapest}"
        yield f'device="auto" here: prefill on {chosen.prefill}, decode on {chosen.decode} ({chosen.reason})'
        if self.left:
            yield f"not counted: {self.left} linear layers that are not quantised, attention, norms"

    def to_json(self) -> dict[str, Any]:
        """Everything, seconds and rates in SI units."""
        chosen = self.routing.phases()
        return {
            "model": str(self.path),
            "products": [
                {
                    "name": kind.name,
                    "count": kind.count,
                    "k": kind.layout.k,
                    "n": kind.layout.n,
                    "bits": kind.layout.bits,
                    "group": kind.layout.group,
                    "decode": asdict(kind.decode),
                    "prefill": asdict(kind.prefill),
                }
                for kind in self.kinds
            ],
            "phases": [{"phase": name, **asdict(phase), "cheapest": phase.cheapest} for name, phase in self.phases()],
            "npu_from_rows": self.routing.min_rows or None,
            "npu_usable": self.routing.npu_usable,
            "prefill": chosen.prefill,
            "decode": chosen.decode,
            "reason": chosen.reason,
            "cpu_level": self.level,
            "threads": self.threads,
            "rates": asdict(self.rates),
        }


def layouts_of(
    checkpoint: Checkpoint, *, fuse: bool = True, columns: int = DEFAULT_COLUMNS
) -> list[tuple[str, Layout]]:
    """Name and layout of each product of a checkpoint's quantised layers, by its headers.

    Raises:
        LayoutError: The packed format cannot hold a layer.
        FormatError, UnsupportedFormatError: As in `Checkpoint.linears`.
    """
    infos = {info.name: info for info in checkpoint.linears() if info.quantized}
    found = []
    for product in fusion.products(checkpoint, infos, fuse=fuse):
        first = fusion.layout_of(infos[product.parts[0]], columns)
        n = sum(infos[part].n for part in product.parts)
        found.append((product.name, Layout(first.k, n, first.bits, first.group, ZeroKind.Z8, columns)))
    return found


def route_model(
    path: Path,
    calibrate: Callable[[], Rates],
    npu_usable: Callable[[], bool],
    *,
    fuse: bool = True,
    columns: int = DEFAULT_COLUMNS,
) -> ModelRoutes:
    """Estimates a checkpoint's quantised layers.

    Args:
        path: The checkpoint.
        calibrate: Gives the rates of this machine.
        npu_usable: Whether its NPU can be opened.
        fuse: See `tilefuse.fusion`.
        columns: Columns of the array, 1 to 8.

    Raises:
        FormatError: None of its layers is quantised.
        TileFuseError: As `open_checkpoint` and `layouts_of`.
    """
    checkpoint = open_checkpoint(path)
    named = layouts_of(checkpoint, fuse=fuse, columns=columns)
    if not named:
        raise FormatError(f"{path}: none of its linear layers is quantised; `tilefuse inspect` lists them")
    rates = calibrate()
    counts = Counter((name.rpartition(".")[2], layout) for name, layout in named)
    kinds = [
        Kind(name, count, layout, estimate([layout] * count, 1, rates), estimate([layout] * count, SHOWN, rates))
        for (name, layout), count in counts.items()
    ]
    routing = model_routing([layout for _, layout in named], rates, npu_usable=npu_usable())
    left = sum(not info.quantized for info in checkpoint.linears())
    return ModelRoutes(path, kinds, routing, cpu_level(), get_num_threads(), rates, left)
