"""The limits of the machine, and what it is."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from pathlib import Path

PROBE_BYTES = 1 << 30
"""Read by one pass of the bandwidth probe: far beyond any cache of a machine that this runs on."""

PROBE_SECONDS = 0.02

INTEGER = "int8"
"""In the name of a probe of 8-bit integer arithmetic."""

UNDISTURBED = 0.7
"""Of the best that a probe of arithmetic found, less than this means that something else ran."""


@dataclass
class Limits:
    """What the machine did at most, measured in turn with the contenders. Bytes or operations a second."""

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

    def peak(self, activations: int = 16) -> tuple[float, str]:
        """Median operations a second of the fastest multiply-add for activations of so many bits, and its kind."""
        kinds = [kind for kind in self.arithmetic if activations == 8 or INTEGER not in kind]
        return max((statistics.median(self.arithmetic[kind]), kind) for kind in kinds)


class Probes:
    """The C++ core's probes of the machine; holds `PROBE_BYTES` of memory."""

    def __init__(self, nbytes: int = PROBE_BYTES, seconds: float = PROBE_SECONDS) -> None:
        from tilefuse import _core

        self._core = _core
        self._read = _core.ReadProbe(nbytes)
        self._seconds = seconds
        self._best: dict[str, float] = {}

    def read(self) -> float:
        """Bytes a second of one pass of reads."""
        return float(self._read.run())

    def sample(self, limits: Limits) -> bool:
        """Adds one measurement of each limit to ``limits``; returns whether the processor was all ours meanwhile."""
        limits.read.append(self.read())
        undisturbed = True
        for kind in [*self._core.arithmetic_probes(), *self._core.integer_probes()]:
            rate = self._core.run_arithmetic_probe(kind, self._seconds)
            limits.arithmetic.setdefault(kind, []).append(rate)
            self._best[kind] = max(rate, self._best.get(kind, 0.0))
            undisturbed &= rate >= UNDISTURBED * self._best[kind]
        return undisturbed


def last_level_cache_bytes() -> int:
    """Size of the largest cache of this machine; 64 MiB where the system doesn't say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text))
    return max(sizes, default=64 << 20)


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
