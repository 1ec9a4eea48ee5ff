"""What a run took, *modelled*: times, utilisation, and what held it up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tilefuse import arch
from tilefuse.errors import DeviceError

if TYPE_CHECKING:
    from tilefuse.emulator.configuration import Configuration
    from tilefuse.emulator.engine import Flow, Port
    from tilefuse.emulator.sequence import Sequence

_BOUND = 0.7
"""A resource that is busy for a smaller part of the time does not explain it."""


def seconds(cycles: float) -> float:
    """Cycles of the array's clock in seconds."""
    return cycles / arch.CLOCK_HZ


def _time(cycles: float) -> str:
    s = seconds(cycles)
    return f"{s * 1e3:.3f} ms" if s >= 1e-3 else f"{s * 1e6:.2f} us"


@dataclass(frozen=True)
class CoreTiming:
    """A core's share of a run, in cycles."""

    column: int
    row: int
    kernel: float
    """In kernels."""
    overhead: float
    """In locks and calls."""
    stalls: dict[str, float]
    """Waiting, by fifo, from the first object that it acquired on."""
    calls: dict[str, int]
    """By kernel."""


@dataclass(frozen=True)
class ChannelTiming:
    """A DMA channel's share of a run."""

    label: str
    fifo: str
    nbytes: int

    @property
    def busy(self) -> float:
        """Cycles in which a word passes."""
        return self.nbytes / arch.STREAM_BYTES


@dataclass(frozen=True)
class Trace:
    """Spans of a run: (track, begin, end, name), in cycles from the run's start."""

    spans: list[tuple[str, float, float, str]]
    depths: dict[str, list[tuple[float, int]]]


@dataclass(frozen=True)
class Report:
    """A run, *modelled*; cycles are those of the array at `arch.CLOCK_HZ`."""

    cycles: float
    """From the first instruction of the sequence to the last completion."""
    cores: list[CoreTiming]
    channels: list[ChannelTiming]
    dram_read: int
    """Bytes."""
    dram_written: int
    """Bytes."""
    tasks: int
    """Transfers that the sequence issued."""
    waits: int
    processor: float
    """Cycles of the command processor, without its waiting."""
    queues: dict[str, list[tuple[float, int]]]
    """Tasks in flight by shim channel, whenever their number changes: (cycles, number)."""
    trace: Trace | None = field(default=None, repr=False)

    @property
    def array_seconds(self) -> float:
        """Modelled time of the array."""
        return seconds(self.cycles)

    @property
    def seconds(self) -> float:
        """Modelled time with the dispatch."""
        return self.array_seconds + arch.DISPATCH

    @property
    def dram_rate(self) -> float:
        """Bytes a second of the host's memory, modelled, over the whole run."""
        return (self.dram_read + self.dram_written) / self.array_seconds if self.cycles else 0.0

    @property
    def core_utilisation(self) -> float:
        """Part of the time that the cores spend in kernels, on average."""
        if not self.cores or not self.cycles:
            return 0.0
        return sum(core.kernel for core in self.cores) / len(self.cores) / self.cycles

    @property
    def max_in_flight(self) -> int:
        """Tasks of a shim channel at the same time, at most."""
        return max((number for depths in self.queues.values() for _, number in depths), default=0)

    def _loads(self) -> list[tuple[float, str]]:
        """(part of the time, what) of each resource."""
        if not self.cycles:
            return []
        loads = []
        if self.cores:
            core = max(self.cores, key=lambda core: core.kernel + core.overhead)
            part = (core.kernel + core.overhead) / self.cycles
            loads.append((part, f"the cores: core ({core.column}, {core.row}) is in kernels and locks"))
        if self.channels:
            channel = max(self.channels, key=lambda channel: channel.busy)
            loads.append((channel.busy / self.cycles, f"the stream of fifo '{channel.fifo}' ({channel.label})"))
        total, reads = self.dram_read + self.dram_written, self.dram_read
        needed = max(total / arch.DRAM_TOTAL, reads / arch.DRAM_READ)
        loads.append((needed / self.array_seconds, "the host's memory"))
        loads.append((self.processor / self.cycles, "the command processor"))
        return sorted(loads, reverse=True)

    @property
    def bottleneck(self) -> str:
        """What holds the run up, in a sentence."""
        loads = self._loads()
        if not loads:
            return "nothing ran"
        part, what = loads[0]
        if part >= _BOUND:
            return f"modelled bottleneck: {what}, busy {part:.0%} of the time"
        return f"modelled: nothing is busy for long (at most {what}, {part:.0%}); latencies and waits make up the time"

    def write_trace(self, path: str | Path) -> None:
        """Writes the run as a Chrome trace (JSON), which Perfetto opens.

        Raises:
            DeviceError: The run was not traced.
        """
        from tilefuse.emulator.trace import write

        if self.trace is None:
            raise DeviceError("this run kept no trace; run it with trace=True")
        write(self.trace, Path(path))

    def __str__(self) -> str:
        lines = [
            f"modelled: {_time(self.cycles)} on the array ({self.cycles:.0f} cycles at {arch.CLOCK_HZ / 1e9:g} GHz), "
            f"{self.seconds * 1e6:.1f} us with the dispatch",
            f"  cores: {len(self.cores)}, in kernels {self.core_utilisation:.1%} of the time on average",
        ]
        if self.cores:
            busiest = max(self.cores, key=lambda core: core.kernel)
            stalls = sorted(busiest.stalls.items(), key=lambda item: -item[1])[:3]
            waits = ", ".join(f"{cycles / self.cycles:.1%} for '{fifo}'" for fifo, cycles in stalls) or "none"
            lines.append(
                f"  busiest core ({busiest.column}, {busiest.row}): kernels {busiest.kernel / self.cycles:.1%}, "
                f"locks and calls {busiest.overhead / self.cycles:.1%}, waits {waits}"
            )
        streams = {channel.fifo: channel for channel in self.channels}
        for channel in sorted(streams.values(), key=lambda channel: -channel.nbytes)[:3]:
            lines.append(
                f"  stream of '{channel.fifo}': {channel.nbytes} bytes, {channel.busy / self.cycles:.1%} of the time"
            )
        lines += [
            f"  host's memory: {self.dram_read} bytes read, {self.dram_written} written, "
            f"{self.dram_rate / 1e9:.1f} GB/s",
            f"  command processor: {self.tasks} tasks, {self.waits} waits, {_time(self.processor)}; "
            f"at most {self.max_in_flight} tasks in flight on a channel",
            f"  {self.bottleneck}",
            "  not counted: scalar code of workers beside locks and calls",
        ]
        return "\n".join(lines)


def make_report(configuration: Configuration, sequence: Sequence, start: float) -> Report:
    """What ``sequence`` took since ``start``."""
    cores = configuration.cores.values()
    return Report(
        cycles=max(sequence.time, sequence.statistics.last_done) - start,
        cores=[
            CoreTiming(
                core.column, core.row, core.kernel_cycles, core.overhead_cycles, dict(core.stalls), dict(core.calls)
            )
            for core in cores
        ],
        channels=[
            ChannelTiming(end.label, flow.fifo, flow.bytes_moved) for flow in configuration.flows for end in _ends(flow)
        ],
        dram_read=configuration.dram.bytes_read,
        dram_written=configuration.dram.bytes_written,
        tasks=sequence.statistics.tasks,
        waits=sequence.statistics.waits,
        processor=sequence.statistics.busy,
        queues={
            channel.label: [(time - start, number) for time, number in channel.depths]
            for channel in configuration.channels.values()
        },
        trace=_trace(configuration, sequence, start),
    )


def _ends(flow: Flow) -> Iterable[Port]:
    return (flow.source, *flow.sinks)


def _trace(configuration: Configuration, sequence: Sequence, start: float) -> Trace | None:
    if all(flow.spans is None for flow in configuration.flows):
        return None
    spans = [("command processor", a - start, b - start, name) for a, b, name in sequence.statistics.spans]
    for core in configuration.cores.values():
        spans += [(core.name, a - start, b - start, name) for a, b, name in core.spans or []]
    for flow in configuration.flows:
        spans += [(f"stream {flow.fifo}", a - start, b - start, flow.fifo) for a, b in flow.spans or []]
    depths = {
        channel.label: [(time - start, number) for time, number in channel.depths]
        for channel in configuration.channels.values()
    }
    return Trace(spans, depths)
