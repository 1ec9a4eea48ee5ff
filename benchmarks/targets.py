"""What the project wants of its CPU kernels, and how far what was measured meets that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from results import (
    ANY_W4,
    AVX2_LLAMA,
    INT8_W4,
    INT8_W8,
    SHORT_W4,
    CaseResult,
    Comparison,
    Run,
    compare,
    geomean,
    share,
)

Figure = Callable[[Run, CaseResult], tuple[float, str] | None]

W4, W4_INT8, W8 = "tilefuse W4 g128", "tilefuse W4 g128 int8", "tilefuse W8 g128"

ODD_ROWS, ROUND_ROWS = 100, 128
"""Rows that are no multiple of any block, and the next that are one of all."""

OVERHEAD_SECONDS = 5e-6

TINY = 1e-12
"""Below any error of 8-bit activations; keeps the ratio of two errors finite."""


@dataclass(frozen=True)
class Target:
    """A figure that is to be at least so large in every case with certain rows.

    Attributes:
        text: What is wanted, with the value.
        least: That value.
        rows: Says for which M it is.
        figure: The figure of a case and what it was compared with; None where it was not measured.
    """

    text: str
    least: float
    rows: Callable[[int], bool]
    figure: Figure


def _share_of(name: str) -> Figure:
    return lambda run, case: share(run, case, name) if name in case.measured else None


def _ratio_of(comparison: Comparison) -> Figure:
    return lambda run, case: compare(run, case, comparison)


def _error_ratio(run: Run, case: CaseResult) -> tuple[float, str] | None:
    """The relative error of the fastest 8-bit 4-bit peer over ours."""
    compared = compare(run, case, INT8_W4)
    if compared is None:
        return None
    peer = compared[1]
    theirs, mine = (max(case.measured[name].errors.relative, TINY) for name in (peer, W4_INT8))
    return theirs / mine, peer


def _dip(run: Run, case: CaseResult) -> tuple[float, str] | None:
    """The rate with an odd number of rows over that of the next round one of the same shape."""
    other = run.at(case.shape, ROUND_ROWS)
    if other is None or W4 not in case.measured or W4 not in other.measured:
        return None
    rates = [each.operations / each.measured[W4].seconds for each in (case, other)]
    return rates[0] / rates[1], f"M = {ROUND_ROWS}"


TARGETS = (
    Target("M = 1: 0.95 of the DRAM bandwidth", 0.95, lambda m: m == 1, _share_of(W4)),
    Target(
        "M = 1: 1.8 times the fastest 4-bit peer with 16-bit activations", 1.8, lambda m: m == 1, _ratio_of(SHORT_W4)
    ),
    Target("M = 1: 1.0 times the fastest 4-bit peer of any kind", 1.0, lambda m: m == 1, _ratio_of(ANY_W4)),
    Target(
        "2 <= M <= 32: 1.4 times the fastest 4-bit peer with 16-bit activations",
        1.4,
        lambda m: 2 <= m <= 32,
        _ratio_of(SHORT_W4),
    ),
    Target("M >= 64: 0.95 of the peak of bfloat16 dot products", 0.95, lambda m: m >= 64, _share_of(W4)),
    Target(
        f"no dip between blocks: at M = {ODD_ROWS} 0.95 of the rate at M = {ROUND_ROWS}",
        0.95,
        lambda m: m == ODD_ROWS,
        _dip,
    ),
    Target(
        '`compute="int8"`, M >= 64: 0.90 of the peak of 8-bit dot products', 0.9, lambda m: m >= 64, _share_of(W4_INT8)
    ),
    Target(
        '`compute="int8"`, M >= 4: 1.15 times the fastest 4-bit peer with 8-bit activations',
        1.15,
        lambda m: m >= 4,
        _ratio_of(INT8_W4),
    ),
    Target('`compute="int8"`, M >= 4: an error at or below that peer\'s', 1.0, lambda m: m >= 4, _error_ratio),
    Target("W8, M = 1: 0.95 of the DRAM bandwidth", 0.95, lambda m: m == 1, _share_of(W8)),
    Target("W8, M >= 64: 0.95 of the peak of bfloat16 dot products", 0.95, lambda m: m >= 64, _share_of(W8)),
    Target(
        'W8, `compute="int8"`, M >= 64: 1.0 times the fastest 8-bit peer with 8-bit activations',
        1.0,
        lambda m: m >= 64,
        _ratio_of(INT8_W8),
    ),
    Target("AVX2 only, M = 1: 1.0 times llama.cpp, as limited", 1.0, lambda m: m == 1, _ratio_of(AVX2_LLAMA)),
)


@dataclass(frozen=True)
class Verdict:
    """What became of a target.

    Attributes:
        mean: Geometric mean of the figure over the cases.
        worst, where: The smallest figure, and its case and what it was compared with.
        best: The largest.
        met, cases: In how many of the cases.
    """

    target: Target
    mean: float
    worst: float
    where: str
    best: float
    met: int
    cases: int


def verdict(run: Run, target: Target) -> Verdict | None:
    """What became of ``target``; None where no case measured it."""
    found = []
    for case in run.cases:
        figure = target.figure(run, case) if target.rows(case.m) else None
        if figure is not None:
            found.append((figure[0], f"{case.shape}, M = {case.m}, {figure[1]}"))
    if not found:
        return None
    values = [value for value, _ in found]
    worst, where = min(found)
    met = sum(value >= target.least for value in values)
    return Verdict(target, geomean(values), worst, where, max(values), met, len(values))
