"""What `benchmarks/cpu.py` measured, and what follows from it: who is fastest, ratios, shares of the limits."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from measure import Limits
from peers.accuracy import Errors
from peers.base import MANY_ROWS, Contender


@dataclass(frozen=True)
class Measurement:
    """A contender on one case.

    Attributes:
        rounds: Seconds a product, one a round. A contender far slower than the others has only its first.
        weight_bytes: Read by one product.
        errors: Against float64.
        reads: Bytes a second that a probe read right before, one a round; empty where that was not measured.
    """

    rounds: list[float]
    weight_bytes: int
    errors: Errors
    reads: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class CaseResult:
    """All contenders on x [M, K] times W [K, N], and what the machine could do meanwhile."""

    k: int
    n: int
    m: int
    limits: Limits
    measured: dict[str, Measurement]

    @property
    def shape(self) -> str:
        return f"{self.k}x{self.n}"

    @property
    def operations(self) -> int:
        return 2 * self.m * self.k * self.n


@dataclass
class Run:
    """Everything that one run, or several merged ones, found."""

    facts: dict[str, str]
    contenders: dict[str, Contender]
    cases: list[CaseResult] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    overhead: dict[str, float] = field(default_factory=dict)

    def merge(self, other: Run) -> None:
        """Takes what ``other``, the later one, has; a case in both is the other's."""
        self.facts |= other.facts
        self.contenders |= other.contenders
        again = {(case.k, case.n, case.m) for case in other.cases}
        self.cases = [case for case in self.cases if (case.k, case.n, case.m) not in again] + other.cases
        self.failures = list(dict.fromkeys(self.failures + other.failures))
        self.overhead = other.overhead or self.overhead

    def shapes(self) -> list[str]:
        """In the order measured."""
        return list(dict.fromkeys(case.shape for case in self.cases))

    def rows(self) -> list[int]:
        """Values of M, ascending."""
        return sorted({case.m for case in self.cases})

    def at(self, shape: str, m: int) -> CaseResult | None:
        """The case, if it was measured."""
        return next((case for case in self.cases if case.shape == shape and case.m == m), None)


def to_json(run: Run) -> str:
    """``run`` as text."""
    return json.dumps(asdict(run), indent=1) + "\n"


def from_json(text: str) -> Run:
    """What `to_json` wrote; ValueError, KeyError or TypeError for another text."""
    found = json.loads(text)
    cases = []
    for case in found["cases"]:
        measured = {
            name: Measurement(each["rounds"], each["weight_bytes"], Errors(**each["errors"]), each.get("reads", []))
            for name, each in case["measured"].items()
        }
        cases.append(CaseResult(case["k"], case["n"], case["m"], Limits(**case["limits"]), measured))
    contenders = {name: Contender(**each) for name, each in found["contenders"].items()}
    return Run(found["facts"], contenders, cases, found["failures"], found["overhead"])


# --- who is compared with whom ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One of ours against the fastest of a class of peers.

    Attributes:
        title: Of its table.
        ours: Name of the contender.
        peers: Says which contenders are in the class.
        target: Ratio aimed at for M, or None where there is none.
    """

    title: str
    ours: str
    peers: Callable[[Contender], bool]
    target: Callable[[int], float | None]


def _class(bits: int, activations: int | None, level: str = "", library: str = "") -> Callable[[Contender], bool]:
    def belongs(peer: Contender) -> bool:
        same = peer.bits == bits and activations in (None, peer.activations) and peer.level == level
        return same and not peer.ours and peer.name.startswith(library)

    return belongs


def _from(first: int, ratio: float, last: int = 1 << 30) -> Callable[[int], float | None]:
    return lambda m: ratio if first <= m <= last else None


def _none(m: int) -> None:
    return None


SHORT_W4 = Comparison(
    "W4, against 4-bit peers with 16-bit activations",
    "tilefuse W4 g128",
    _class(4, 16),
    lambda m: 1.8 if m == 1 else 1.4 if m <= 32 else None,
)
ANY_W4 = Comparison("W4, against all 4-bit peers", "tilefuse W4 g128", _class(4, None), _from(1, 1.0, 1))
INT8_W4 = Comparison(
    'W4 with `compute="int8"`, against 4-bit peers with 8-bit activations',
    "tilefuse W4 g128 int8",
    _class(4, 8),
    _from(4, 1.15),
)
INT8_W8 = Comparison(
    'W8 with `compute="int8"`, against 8-bit peers with 8-bit activations',
    "tilefuse W8 g128 int8",
    _class(8, 8),
    _from(MANY_ROWS, 1.0),
)
AVX2_LLAMA = Comparison(
    "W4 with AVX2 only, against llama.cpp with AVX2 only",
    "tilefuse W4 g128 avx2",
    _class(4, None, "avx2", "llama.cpp"),
    _from(1, 1.0, 1),
)

COMPARISONS = (
    SHORT_W4,
    ANY_W4,
    INT8_W4,
    Comparison("W4, against dense bfloat16", "tilefuse W4 g128", _class(16, 16), _none),
    Comparison("W8, against 8-bit peers with 16-bit activations", "tilefuse W8 g128", _class(8, 16), _none),
    INT8_W8,
    AVX2_LLAMA,
    Comparison(
        "W4 with AVX2 only, against ik_llama.cpp with AVX2 only",
        "tilefuse W4 g128 avx2",
        _class(4, None, "avx2", "ik_llama.cpp"),
        _none,
    ),
)


def limit_target(contender: Contender, m: int) -> float | None:
    """Share of the binding limit that is aimed at, or None where there is none."""
    if not contender.ours or contender.level or "g128" not in contender.name:
        return None
    if contender.activations == 16:
        return 0.95 if m == 1 or m >= MANY_ROWS else None
    return 0.90 if contender.bits == 4 and m >= MANY_ROWS else None


# --- figures ---------------------------------------------------------------------------------------------------------


def fastest(run: Run, case: CaseResult, belongs: Callable[[Contender], bool]) -> str | None:
    """The fastest contender of a class in ``case``."""
    names = [name for name in case.measured if belongs(run.contenders[name])]
    return min(names, key=lambda name: case.measured[name].seconds, default=None)


def ratio(case: CaseResult, ours: str, peer: str) -> float:
    """How many times faster ``ours`` is: the median over rounds of the peer's time over ours in the same round."""
    pairs = zip(case.measured[ours].rounds, case.measured[peer].rounds, strict=False)
    return statistics.median(other / mine for mine, other in pairs)


def compare(run: Run, case: CaseResult, comparison: Comparison) -> tuple[float, str] | None:
    """(ratio, the fastest peer's name), or None where one of both is missing."""
    peer = fastest(run, case, comparison.peers)
    if peer is None or comparison.ours not in case.measured:
        return None
    return ratio(case, comparison.ours, peer), peer


def limit_of(case: CaseResult, contender: Contender, weight_bytes: int) -> tuple[float, str]:
    """Seconds that no product of this case can be faster than, and what binds: "DRAM" or a kind of arithmetic."""
    read = weight_bytes / case.limits.bandwidth
    rate, kind = case.limits.peak(contender.activations)
    compute = case.operations / rate
    return (read, "DRAM") if read >= compute else (compute, kind)


def share(run: Run, case: CaseResult, name: str) -> tuple[float, str]:
    """Of the binding limit, what a contender reaches, and which one that is.

    Of reads, where they were probed before every turn, the median over rounds.
    """
    measured = case.measured[name]
    seconds, kind = limit_of(case, run.contenders[name], measured.weight_bytes)
    if kind == "DRAM" and measured.reads:
        pairs = zip(measured.rounds, measured.reads, strict=False)
        return statistics.median(measured.weight_bytes / mine / read for mine, read in pairs), kind
    return seconds / measured.seconds, kind


def geomean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers."""
    return statistics.geometric_mean(values)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest."""
    return min(values), max(values)


def plain(value: Any) -> str:
    """A number to three digits, as people write it."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
