"""What `benchmarks/attention.py` measured, and what the project wants of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace

from measure import Limits
from peers.attention import operations
from peers.base import Contender

BASE, HALF, MOST, ALL = (f"tilefuse {kind}" for kind in ("16-bit", "50 %", "75 %", "INT8"))
AVX2_BASE, AVX2_MOST = f"{BASE} avx2", f"{MOST} avx2"


@dataclass(frozen=True)
class Measured:
    """A contender on one case.

    Attributes:
        rounds: Seconds a call, one a round. A contender far slower than the others has only its first.
        mean, largest: Errors of rows against float64, relative to their 2-norms.
    """

    rounds: list[float]
    mean: float
    largest: float

    @property
    def seconds(self) -> float:
        """Of the fastest round: what else runs on a machine only slows, some contenders more than others."""
        return min(self.rounds)


@dataclass(frozen=True)
class AttentionCase:
    """All contenders on causal attention of one sequence, and what the machine could do meanwhile."""

    heads: int
    kv_heads: int
    queries: int
    keys: int
    d: int
    limits: Limits
    measured: dict[str, Measured]

    @property
    def key(self) -> tuple[int, ...]:
        return self.heads, self.kv_heads, self.queries, self.keys, self.d

    @property
    def decode(self) -> bool:
        return self.queries == 1

    @property
    def name(self) -> str:
        return f"{'one query, ' if self.decode else ''}L = {self.keys}"

    @property
    def operations(self) -> int:
        return operations(self.heads, self.queries, self.keys, self.d)

    def rate(self, name: str) -> float:
        """Operations a second."""
        return self.operations / self.measured[name].seconds

    def share(self, name: str) -> float:
        """Of the measured peak of bfloat16 dot products."""
        return self.rate(name) / self.limits.peak(16)[0]


@dataclass
class AttentionRun:
    """Everything that one run, or several merged ones, found."""

    facts: dict[str, str]
    contenders: dict[str, Contender]
    cases: list[AttentionCase] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def merge(self, other: AttentionRun) -> None:
        """Takes what ``other``, the later one, has; of a contender in the same case of both, the rounds of both."""
        self.facts |= other.facts
        self.contenders |= other.contenders
        cases = {case.key: case for case in self.cases}
        for case in other.cases:
            known = cases.setdefault(case.key, case)
            if known is not case:
                known.limits.extend(case.limits)
                for name, each in case.measured.items():
                    before = known.measured[name].rounds if name in known.measured else []
                    known.measured[name] = replace(each, rounds=before + each.rounds)
        self.cases = sorted(cases.values(), key=lambda case: (case.decode, case.key))
        self.failures = list(dict.fromkeys(self.failures + other.failures))


def to_json(run: AttentionRun) -> str:
    """``run`` as text."""
    return json.dumps(asdict(run), indent=1) + "\n"


def from_json(text: str) -> AttentionRun:
    """What `to_json` wrote; ValueError, KeyError or TypeError for another text."""
    found = json.loads(text)
    cases = [
        AttentionCase(
            **{
                **case,
                "limits": Limits(**case["limits"]),
                "measured": {name: Measured(**each) for name, each in case["measured"].items()},
            }
        )
        for case in found["cases"]
    ]
    contenders = {name: Contender(**each) for name, each in found["contenders"].items()}
    return AttentionRun(found["facts"], contenders, cases, found["failures"])


def times_faster(case: AttentionCase, name: str, than: str) -> float | None:
    """The time of ``than`` over that of ``name``, each in its fastest round; None where one is missing."""
    if name not in case.measured or than not in case.measured:
        return None
    return case.measured[than].seconds / case.measured[name].seconds


def fastest_peer(run: AttentionRun, case: AttentionCase) -> str | None:
    """The fastest contender that is not ours; None without one."""
    peers = [name for name in case.measured if not run.contenders[name].ours]
    return min(peers, key=lambda name: case.measured[name].seconds, default=None)


Figure = Callable[[AttentionRun, AttentionCase], tuple[float, str] | None]


def _than_peers(name: str) -> Figure:
    def figure(run: AttentionRun, case: AttentionCase) -> tuple[float, str] | None:
        peer = fastest_peer(run, case)
        ratio = times_faster(case, name, peer) if peer else None
        return (ratio, str(peer)) if ratio is not None else None

    return figure


def _than(name: str, base: str) -> Figure:
    def figure(run: AttentionRun, case: AttentionCase) -> tuple[float, str] | None:
        ratio = times_faster(case, name, base)
        return (ratio, base) if ratio is not None else None

    return figure


@dataclass(frozen=True)
class Target:
    """A ratio that is to be at least so large in every case of many queries."""

    text: str
    least: float
    figure: Figure


TARGETS = (
    Target("all tiles 16-bit: 1.2 times the fastest peer", 1.2, _than_peers(BASE)),
    Target("75 % INT8: 1.15 times all 16-bit", 1.15, _than(MOST, BASE)),
    Target("all INT8: 1.25 times all 16-bit", 1.25, _than(ALL, BASE)),
    Target("AVX2, 75 % INT8: 1.3 times its own all 16-bit", 1.3, _than(AVX2_MOST, AVX2_BASE)),
)


@dataclass(frozen=True)
class Outcome:
    """A target in one case."""

    target: Target
    case: AttentionCase
    value: float
    against: str

    @property
    def met(self) -> bool:
        return self.value >= self.target.least


def outcomes(run: AttentionRun) -> Iterable[Outcome]:
    """Every target in every case that measured it."""
    for target in TARGETS:
        for case in run.cases:
            figure = None if case.decode else target.figure(run, case)
            if figure is not None:
                yield Outcome(target, case, *figure)
