"""Measuring: interleaved timing, the limits of the machine, the accuracy gate, and what the machine is."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

PROBE_BYTES = 1 << 30
"""Read by one pass of the bandwidth probe: far beyond any cache of a machine that this runs on."""

PROBE_SECONDS = 0.02

CACHE_MULTIPLE = 4
"""Going round and round through twice the cache still finds much of it there: caches don't replace strictly by age."""


@dataclass(frozen=True)
class Contender:
    """One way to compute x W, ready to be timed.

    Attributes:
        name: Shown in the tables.
        calls: The product on copies of the weights in distinct memory, called in turn so that they come from DRAM.
        weight_bytes: Bytes of weights, scales and zero points that one call reads.
        inputs: From bfloat16 [M, K] to what the calls take.
        outputs: From what they return to float64 [M, N].
        weights: Its own dequantised weights, float32 [K, N].
    """

    name: str
    calls: Sequence[Callable[[Any], Any]]
    weight_bytes: int
    inputs: Callable[[Array], Any]
    outputs: Callable[[Any], Array]
    weights: Callable[[], Array]


@dataclass
class Limits:
    """What the machine did at most, measured in turn with the contenders. Bytes or operations a second, per round."""

    read: list[float] = field(default_factory=list)
    arithmetic: dict[str, list[float]] = field(default_factory=dict)

    def extend(self, other: Limits) -> None:
        """Adds the measurements of ``other``."""
        self.read += other.read
        for kind, rates in other.arithmetic.items():
            self.arithmetic.setdefault(kind, []).extend(rates)

    @property
    def bandwidth(self) -> float:
        """Median bytes a second of sequential reads from huge pages."""
        return statistics.median(self.read)

    @property
    def peak(self) -> float:
        """Median operations a second of the fastest multiply-add."""
        return max(statistics.median(rates) for rates in self.arithmetic.values())

    def best_seconds(self, weight_bytes: int, operations: int) -> float:
        """No call that reads and computes as much from DRAM can be faster than this."""
        return max(weight_bytes / self.bandwidth, operations / self.peak)


class Probes:
    """The C++ core's probes of the machine; holds `PROBE_BYTES` of memory."""

    def __init__(self, nbytes: int = PROBE_BYTES, seconds: float = PROBE_SECONDS) -> None:
        from tilefuse import _core

        self._core = _core
        self._read = _core.ReadProbe(nbytes)
        self._seconds = seconds

    def sample(self, limits: Limits) -> None:
        """Adds one measurement of each limit to ``limits``."""
        limits.read.append(self._read.run())
        for kind in self._core.arithmetic_probes():
            limits.arithmetic.setdefault(kind, []).append(self._core.run_arithmetic_probe(kind, self._seconds))


def time_calls(calls: Iterator[Callable[[Any], Any]], x: Any, seconds: float) -> float:
    """Mean seconds of a call on ``x``, over as many calls as take at least ``seconds`` together."""
    done = 0
    start = time.perf_counter()
    while True:
        next(calls)(x)
        done += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / done


def interleave(
    contenders: Sequence[Contender], x: Array, rounds: int, seconds: float, between: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Times the contenders on ``x`` in turn, ``rounds`` times over, so that what slows the machine slows all of them.

    Every round starts with another contender. A turn begins with one untimed call, which wakes the contender's threads
    while those of the one before go to sleep, and goes on with the copy of the weights after the last that it used.
    ``between`` runs before every round.

    Returns:
        For every contender one time a round, in seconds a call.
    """
    inputs = {contender.name: contender.inputs(x) for contender in contenders}
    calls = {contender.name: itertools.cycle(contender.calls) for contender in contenders}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        between()
        first = turn % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            name = contender.name
            next(calls[name])(inputs[name])
            times[name].append(time_calls(calls[name], inputs[name], seconds))
    return times


def gate_error(y: Array, x: Array, weights: Array) -> tuple[float, float]:
    """Largest and mean ``|y - x W| / (|x| |W|)``, elementwise, in float64.

    Args:
        y: The product to judge, [M, N].
        x: Its inputs, [M, K], as the contender sees them.
        weights: The contender's own dequantised weights, [K, N].
    """
    x64, w64 = x.astype(np.float64), weights.astype(np.float64)
    error = np.abs(y.astype(np.float64) - x64 @ w64)
    scale = np.abs(x64) @ np.abs(w64, out=w64)
    ratio = np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)
    return float(ratio.max(initial=0.0)), float(ratio.mean())


def last_level_cache_bytes() -> int:
    """Size of the largest cache of this machine; 64 MiB where the system doesn't say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text))
    return max(sizes, default=64 << 20)


def copies_beyond_cache(weight_bytes: int, cache_bytes: int) -> int:
    """How many distinct copies of the weights take more than `CACHE_MULTIPLE` times the cache, and at least two."""
    return max(2, CACHE_MULTIPLE * cache_bytes // weight_bytes + 1)


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def default_threads() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
