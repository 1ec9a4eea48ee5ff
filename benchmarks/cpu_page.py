"""The page docs/benchmarks/cpu.md, from what `benchmarks/cpu.py` measured."""

from __future__ import annotations

from collections.abc import Sequence

from page import bullets, paragraph, table
from results import (
    COMPARISONS,
    CaseResult,
    Comparison,
    Run,
    compare,
    geomean,
    limit_target,
    plain,
    share,
)
from targets import OVERHEAD_SECONDS, TARGETS, verdict

TABLE_HEAD = "K x N"


def document(run: Run, plots: Sequence[tuple[str, str]]) -> str:
    """The page in Markdown; ``plots`` are (what it shows, path)."""
    parts = [
        "# The CPU kernels against other libraries",
        paragraph("""Written by `python benchmarks/cpu.py`; its head states the method. Everything here is measured, on
        one machine, which it shares with whatever else runs there: ratios and shares are of figures taken in turn."""),
        bullets(f"- {what}: {value}." for what, value in run.facts.items()),
        targets(run),
        *(f"![{title}]({path})" for title, path in plots),
        "## How many times faster",
        paragraph("""The time of the fastest peer of the class over tilefuse's: above 1, tilefuse is faster. The peer is
        named where it is the fastest."""),
    ]
    for comparison in COMPARISONS:
        rows = ratio_rows(run, comparison)
        if rows:
            parts += [f"### {comparison.title}", table((TABLE_HEAD, *(f"M = {m}" for m in run.rows())), rows)]
    parts += [
        "## Share of the limit",
        paragraph("""What reading the weights at the measured bandwidth, or the arithmetic at the measured peak, would
        take, whichever is longer, over the time taken. The peak is that of the bfloat16 dot product for 16-bit
        activations (fp32 where there is none) and that of the 8-bit one for 8-bit activations."""),
    ]
    for name, contender in run.contenders.items():
        if contender.ours and not contender.level and any(name in case.measured for case in run.cases):
            parts += [f"### {name}", table((TABLE_HEAD, *(f"M = {m}" for m in run.rows())), share_rows(run, name))]
    parts += ["## Contenders and accuracy", ACCURACY, contenders_table(run)]
    if run.overhead:
        parts += ["## What a call costs", overhead(run)]
    parts += ["## All times", ALL_TIMES]
    for m in run.rows():
        parts += [f"### M = {m}", times_table(run, m)]
    if run.failures:
        parts += ["## Left out", bullets(f"- {failure}" for failure in run.failures)]
    return "\n\n".join(parts) + "\n"


ACCURACY = paragraph("""
Largest over all cases. *Relative*: the Frobenius norm of y - x W over that of x W, float64 on the contender's own
dequantised weights. *Gate*: largest and mean `|y - x W| / (|x| |W|)`, elementwise, which
[numerics.md](../numerics.md) bounds for tilefuse. Results are rounded to bfloat16 first, which most contenders
return. Formats that hold other weights than the checkpoint's are quantised again: their loss in that is not counted
here. Up to 16 rows and 512 output channels of each case.""")

ALL_TIMES = paragraph("""
Microseconds a product; at M = 1 with gigabytes of weights, scales and zero points a second, else
with 2 M K N operations in billions a second.""")


TARGETS_TEXT = paragraph("""
What the project wants of these kernels: W4 in groups of 128 with 16-bit activations unless said, in every case with
such an M below. A row compares with the fastest peer of each case. In the tables after this one, what misses a target
is set in bold. A ratio at M = 1 can't be larger than that of the DRAM bandwidth to what the peer reads a second.
Packing has [a page of its own](packing.md).""")


def short(peer: str) -> str:
    """A peer's name for a cell."""
    return peer.replace("onnxruntime", "ORT").replace("bitsandbytes", "bnb")


def ratio_rows(run: Run, comparison: Comparison) -> list[list[str]]:
    """A row a shape, and their geometric mean; none where nothing can be compared."""
    rows: list[list[str]] = []
    columns: dict[int, list[float]] = {m: [] for m in run.rows()}
    for shape in run.shapes():
        cells = [shape]
        for m in run.rows():
            case = run.at(shape, m)
            compared = compare(run, case, comparison) if case else None
            if compared is None:
                cells.append("")
                continue
            columns[m].append(compared[0])
            target = comparison.target(m)
            mark = "**" if target and compared[0] < target else ""
            cells.append(f"{mark}{compared[0]:.2f}{mark} {short(compared[1])}")
        rows.append(cells)
    if not any(columns.values()):
        return []
    return [*rows, ["geometric mean", *(f"{geomean(each):.2f}" if each else "" for each in columns.values())]]


def share_rows(run: Run, name: str) -> list[list[str]]:
    """A row a shape."""
    rows = []
    for shape in run.shapes():
        cells = [shape]
        for m in run.rows():
            case = run.at(shape, m)
            if case is None or name not in case.measured:
                cells.append("")
                continue
            reached, kind = share(run, case, name)
            target = limit_target(run.contenders[name], m)
            mark = "**" if target and reached < target else ""
            cells.append(f"{mark}{reached:.0%}{mark} {kind}")
        rows.append(cells)
    return rows


def targets(run: Run) -> str:
    """What the project wants, and what was measured of it."""
    rows = []
    for found in filter(None, (verdict(run, target) for target in TARGETS)):
        outcome = "met" if found.met == found.cases else f"**missed** in {found.cases - found.met} of {found.cases}"
        figures = (f"{value:.2f}" for value in (found.mean, found.worst))
        rows.append((found.target.text, outcome, *figures, found.where, f"{found.best:.2f}"))
    if run.overhead:
        beyond = run.overhead["overhead"]
        outcome = "met" if beyond < OVERHEAD_SECONDS else "**missed**"
        figure = f"{beyond * 1e6:.1f} us"
        rows.append(
            ("a call from Python, K = N = 2048, M = 1: under 5 us beyond its kernel", outcome, figure, "", "", "")
        )
    header = ("target: at least", "outcome", "geometric mean", "worst", "in the case and against", "best")
    return f"## Targets\n\n{TARGETS_TEXT}\n\n{table(header, rows, left=2)}"


def contenders_table(run: Run) -> str:
    """What each is, how it was called, and its largest errors."""
    rows = []
    for name, contender in run.contenders.items():
        errors = [case.measured[name].errors for case in run.cases if name in case.measured]
        if not errors:
            continue
        rows.append(
            (
                name,
                contender.weights,
                contender.note,
                str(contender.activations),
                f"{max(each.relative for each in errors):.1e}",
                f"{max(each.gate_max for each in errors):.1e}",
                f"{max(each.gate_mean for each in errors):.1e}",
            )
        )
    return table(("contender", "weights", "called by", "activations", "relative", "gate max", "mean"), rows, left=3)


def overhead(run: Run) -> str:
    """A sentence of the call's cost."""
    call, kernel, rest = (run.overhead[key] * 1e6 for key in ("call", "kernel", "overhead"))
    return paragraph(f"""`tf.gemv` on one row, K = N = 2048, W4, weights in the cache: {call:.1f} us, of which
    the kernel takes {kernel:.1f} and the way to it from Python {rest:.1f} (target: under 5).""")


def cell(case: CaseResult | None, name: str) -> str:
    """Time and rate."""
    if case is None or name not in case.measured:
        return ""
    measured = case.measured[name]
    rate = measured.weight_bytes / measured.seconds if case.m == 1 else case.operations / measured.seconds
    return f"{plain(measured.seconds * 1e6)} ({plain(rate / 1e9)})"


def times_table(run: Run, m: int) -> str:
    """A row a contender, a column a shape."""
    names = [name for name in run.contenders if any(name in case.measured for case in run.cases if case.m == m)]
    rows = [[name, *(cell(run.at(shape, m), name) for shape in run.shapes())] for name in names]
    limits = ["measured limit"]
    for shape in run.shapes():
        case = run.at(shape, m)
        limits.append("" if case is None else limit_cell(case))
    return table(("", *run.shapes()), [*rows, limits])


def limit_cell(case: CaseResult) -> str:
    """The rates that bind: of reads at M = 1, else of both kinds of arithmetic."""
    if case.m == 1:
        return f"({case.limits.bandwidth / 1e9:.1f})"
    peaks = dict.fromkeys(f"{case.limits.peak(activations)[0] / 1e9:.0f}" for activations in (16, 8))
    return f"({', '.join(peaks)})"
