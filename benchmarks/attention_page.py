"""The page docs/benchmarks/attention.md and its picture, from what `benchmarks/attention.py` measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from attention_results import BASE, AttentionCase, AttentionRun, fastest_peer, outcomes, times_faster
from page import bullets, paragraph, table

OPERATIONS = "4 Hq d L (L + 1) / 2"


def document(run: AttentionRun, plots: Sequence[tuple[str, str]]) -> str:
    """The page in Markdown; ``plots`` are (what it shows, path)."""
    parts = [
        "# Attention against other libraries",
        paragraph(
            f"""Written by `python benchmarks/attention.py`; its head states the method. Causal attention of one
            sequence and one layer, keys of all queries, grouped-query heads, independent normal values. Everything here
            is measured, in turn: figures are of each contender's fastest round, since what else runs on the machine
            only slows; the last column has the slowest over the fastest. GFLOP/s are {OPERATIONS} over the time; no
            operation is counted twice for being done in INT8, nor less for being skipped. A share is of the peak of
            bfloat16 dot products that a probe found between turns."""
        ),
        paragraph(
            """A percentage is that of the score tiles whose q k products are 8-bit integers (`local_sink`: the diagonal
            and the first keys stay in 16 bits as long as they can); P v stays in bfloat16. INT8 thus takes at most half
            of all operations, at twice the rate: the limit is 1.23 times all 16-bit at 75 %, and 1.33 times at 100 %,
            before what softmax and quantising take. That holds for AVX2, too (docs/attention.md), where the target of
            1.3 times at 75 % lies beyond it. tilefuse's times hold packing, quantising and its own output;
            ggml's keys and values were quantised before."""
        ),
        bullets(f"- {what}: {value}." for what, value in run.facts.items()),
        targets(run),
        *(f"![{title}]({path})" for title, path in plots),
    ]
    for case in run.cases:
        parts += [f"## {title(case)}", case_table(run, case)]
    if run.failures:
        parts += ["## Left out", bullets(f"- {failure}" for failure in run.failures)]
    return "\n\n".join(parts) + "\n"


def title(case: AttentionCase) -> str:
    """Of a case's section."""
    kind = f"Decode, one query, {case.keys} keys" if case.decode else f"Prefill, L = {case.keys}"
    return f"{kind}, {case.heads}/{case.kv_heads} heads, d = {case.d}"


def targets(run: AttentionRun) -> str:
    """What the project wants, and what was measured of it."""
    rows = [
        (
            each.target.text,
            each.case.name,
            "met" if each.met else "**missed**",
            f"{each.value:.3f}",
            each.against,
        )
        for each in outcomes(run)
    ]
    if not rows:
        return "## Targets\n\nNone was measured."
    header = ("target: at least", "case", "outcome", "ratio", "against")
    return f"## Targets\n\n{table(header, rows, left=3)}"


def case_table(run: AttentionRun, case: AttentionCase) -> str:
    """A row a contender, the fastest first."""
    peer = fastest_peer(run, case)
    rows: list[tuple[str, ...]] = []
    for name in sorted(case.measured, key=lambda name: case.measured[name].seconds):
        measured = case.measured[name]
        rows.append(
            (
                name,
                run.contenders[name].note,
                f"{measured.seconds * 1e3:.{0 if measured.seconds > 0.1 else 2}f}",
                f"{case.rate(name) / 1e9:.0f}",
                f"{case.share(name):.0%}",
                ratio(times_faster(case, name, peer) if peer else None),
                ratio(times_faster(case, name, BASE)),
                f"{measured.mean:.1e}",
                f"{measured.largest:.1e}",
                f"{len(measured.rounds)}, {max(measured.rounds) / measured.seconds:.2f}",
            )
        )
    rows.append(("measured peak", case.limits.peak(16)[1], "", f"{case.limits.peak(16)[0] / 1e9:.0f}", *[""] * 6))
    header = (
        "",
        "called by",
        "ms",
        "GFLOP/s",
        "of the peak",
        f"times {peer or 'the fastest peer'}",
        f"times {BASE}",
        "error, mean of rows",
        "largest",
        "rounds, slowest / fastest",
    )
    return table(header, rows, left=2)


def ratio(value: float | None) -> str:
    """For a cell."""
    return "" if value is None else f"{value:.2f}"


def write_plot(run: AttentionRun, path: Path) -> bool:
    """Bars of GFLOP/s, a group for each length, under a line at the measured peak; False where nothing was measured."""
    from cpu_plots import LIBRARIES, LIMIT, OTHER, STYLE, library
    from matplotlib import pyplot

    cases = [case for case in run.cases if not case.decode]
    names = [name for name in run.contenders if any(name in case.measured for case in cases)]
    if not names:
        return False
    shades = ("#7c2d12", "#c2410c", "#f97316", "#fdba74", "#78716c", "#d6d3d1")
    ours = [name for name in names if run.contenders[name].ours]
    of_library: dict[str, int] = {}
    with pyplot.rc_context(cast(Any, STYLE)):
        figure, axes = pyplot.subplots(figsize=(max(8.0, 4.2 * len(cases)), 4.4), layout="constrained")
        width = 0.88 / len(names)
        for place, name in enumerate(names):
            if name in ours:
                colour, alpha = shades[ours.index(name) % len(shades)], 1.0
            else:
                colour = LIBRARIES.get(library(name), OTHER)
                alpha = (1.0, 0.55, 0.3)[min(of_library.get(library(name), 0), 2)]
                of_library[library(name)] = of_library.get(library(name), 0) + 1
            for position, case in enumerate(cases):
                if name not in case.measured:
                    continue
                rate = case.rate(name) / 1e9
                left = position - 0.44 + width * (place + 0.5)
                label = name if case is next(c for c in cases if name in c.measured) else "_nolegend_"
                axes.bar(left, rate, width * 0.92, color=colour, alpha=alpha, label=label)
                axes.text(left, rate + 4, f"{rate:.0f}", ha="center", fontsize=7.5, color="#374151")
        for position, case in enumerate(cases):
            peak = case.limits.peak(16)[0] / 1e9
            label = f"{case.limits.peak(16)[1]} peak, measured" if position == 0 else "_nolegend_"
            axes.hlines(peak, position - 0.47, position + 0.47, color=LIMIT, linewidth=1.6, label=label)
        axes.set_xticks(range(len(cases)), [f"L = {case.keys}" for case in cases])
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel(f"GFLOP/s, of {OPERATIONS}")
        axes.grid(axis="y")
        axes.set_title(f"Causal attention, {cases[0].heads}/{cases[0].kv_heads} heads, d = {cases[0].d}")
        figure.legend(loc="outside lower center", ncols=4, fontsize=9)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    return True
