"""Plots of what `benchmarks/cpu.py` measured, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from peers.base import Contender
from results import CaseResult, Run, geomean

OURS = ("#c2410c", "#fb923c", "#fdba74")
LIBRARIES = {
    "onnxruntime": "#1e3a8a",
    "openvino": "#2563eb",
    "zentorch": "#0e7490",
    "torch": "#94a3b8",
    "bitsandbytes": "#65a30d",
    "gptqmodel": "#ca8a04",
    "llama.cpp": "#a78bfa",
    "ik_llama.cpp": "#6d28d9",
}
OTHER = "#64748b"
LIMIT = "#111827"

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "tilefuse",
}

MOST_PEERS = 6
"""Peers in one panel at most: the fastest."""


def write_plots(run: Run, folder: Path) -> list[tuple[str, Path]]:
    """Writes those that ``run`` has figures for; (what it shows, file) of each."""
    written = []
    plots: list[tuple[str, str, Callable[[Run], Any]]] = [
        ("cpu-decode.svg", "Weights read a second at M = 1, with the measured DRAM bandwidth", decode),
        ("cpu-rows.svg", "Operations a second over M, with the measured peaks", rows),
    ]
    with pyplot.rc_context(cast(Any, STYLE)):
        for name, title, draw in plots:
            figure = draw(run)
            if figure is None:
                continue
            figure.savefig(folder / name, metadata={"Date": None})
            pyplot.close(figure)
            written.append((title, folder / name))
    return written


def library(name: str) -> str:
    """The first word of a contender's name."""
    return name.split(" ")[0]


def colours(run: Run, names: Sequence[str]) -> dict[str, str]:
    """Ours in shades of one hue, each library's in its own."""
    ours = [name for name in names if run.contenders[name].ours]
    return {
        name: OURS[ours.index(name) % len(OURS)] if name in ours else LIBRARIES.get(library(name), OTHER)
        for name in names
    }


def chosen(run: Run, cases: Sequence[CaseResult], belongs: Callable[[Contender], bool]) -> list[str]:
    """Ours of a class that all ``cases`` have, then the fastest one of each library, by geometric mean of the time."""
    names = [
        name for name, each in run.contenders.items() if belongs(each) and all(name in case.measured for case in cases)
    ]
    fastest: dict[str, str] = {}
    for name in sorted(names, key=lambda name: geomean(case.measured[name].seconds for case in cases)):
        if not run.contenders[name].ours:
            fastest.setdefault(library(name), name)
    return [name for name in names if run.contenders[name].ours] + list(fastest.values())[:MOST_PEERS]


def decode(run: Run) -> Any:
    """Bars of gigabytes a second, a group for each shape, under a line at what DRAM did."""
    cases = [case for case in run.cases if case.m == 1]
    if not cases:
        return None
    names = chosen(run, cases, lambda each: each.bits == 4 and not each.level)
    if not names:
        return None
    palette = colours(run, names)
    figure, axes = pyplot.subplots(figsize=(max(7.5, 1.6 + 1.25 * len(cases)), 4.0), layout="constrained")
    width = 0.84 / len(names)
    for place, name in enumerate(names):
        rates = [case.measured[name].weight_bytes / case.measured[name].seconds / 1e9 for case in cases]
        left = [position - 0.42 + width * (place + 0.5) for position in range(len(cases))]
        axes.bar(left, rates, width * 0.92, color=palette[name], label=name)
    for position, case in enumerate(cases):
        axes.hlines(
            case.limits.bandwidth / 1e9,
            position - 0.46,
            position + 0.46,
            color=LIMIT,
            linewidth=1.6,
            label="DRAM, measured in turn" if position == 0 else "_nolegend_",
        )
    axes.set_xticks(range(len(cases)), [case.shape.replace("x", " x ") for case in cases])
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("K x N")
    axes.set_ylabel("GB/s of weights")
    axes.grid(axis="y")
    axes.set_title("Decode: one row, 4-bit weights from DRAM")
    figure.legend(loc="outside lower center", ncols=3 if len(cases) < 5 else 5)
    return figure


def rows(run: Run) -> Any:
    """Lines of operations a second over M, a panel for each kind of activations.

    Geometric means over the shapes that were measured at every M.
    """
    batches = run.rows()
    shapes = [shape for shape in run.shapes() if all(run.at(shape, m) for m in batches)]
    cases = [case for case in run.cases if case.shape in shapes]
    if len(batches) < 2 or not cases:
        return None
    panels = [
        ("16-bit activations", 16, lambda each: each.bits == 4 and each.activations == 16 and not each.level),
        ("8-bit activations", 8, lambda each: each.bits == 4 and each.activations == 8 and not each.level),
    ]
    figure, both = pyplot.subplots(1, 2, figsize=(11, 5.2), layout="constrained", sharex=True)
    for axes, (title, activations, belongs) in zip(both, panels, strict=True):
        names = chosen(run, [case for case in cases if case.m == batches[-1]], belongs)
        palette = colours(run, names)
        for name in reversed(names):
            points = line(run, name, shapes, batches)
            ours = run.contenders[name].ours
            axes.plot(
                [m for m, _ in points],
                [rate for _, rate in points],
                color=palette[name],
                linewidth=2.6 if ours else 1.5,
                marker="o",
                markersize=4.5 if ours else 3,
                label=name,
                zorder=3 if ours else 2,
            )
        peak = geomean(case.limits.peak(activations)[0] / 1e9 for case in cases)
        kind = cases[0].limits.peak(activations)[1]
        axes.axhline(peak, color=LIMIT, linewidth=1.4, linestyle=(0, (5, 3)))
        axes.annotate(
            f"{kind} peak, measured: {peak:.0f}", (batches[0], peak), (0, 4), textcoords="offset points", color=LIMIT
        )
        axes.set_xscale("log", base=2)
        # Powers of two have room for their labels.
        axes.set_xticks(batches, ["" if m & (m - 1) else str(m) for m in batches])
        axes.minorticks_off()
        axes.set_ylim(0, 1.12 * max([peak, *(rate for name in names for _, rate in line(run, name, shapes, batches))]))
        axes.set_xlabel("rows M")
        axes.grid(axis="y")
        axes.set_title(f"4-bit weights, {title}")
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9)
    both[0].set_ylabel("2 M K N operations, billions a second")
    return figure


def line(run: Run, name: str, shapes: Sequence[str], batches: Sequence[int]) -> list[tuple[int, float]]:
    """(M, geometric mean over the shapes of operations a second, in billions), where all shapes have it."""
    points = []
    for m in batches:
        found = [run.at(shape, m) for shape in shapes]
        rates = [
            case.operations / case.measured[name].seconds / 1e9 for case in found if case and name in case.measured
        ]
        if len(rates) == len(shapes):
            points.append((m, geomean(rates)))
    return points
