"""Modelled times against hand-worked ones, and what a report says and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_designs import CORE, KERNELS, MEM, SHIM, copy_design, count, run, words

from tilefuse import arch
from tilefuse.emulator import iron
from tilefuse.emulator.iron import ObjectFifo, Program, PythonKernel, Runtime, TaskGroup, Tile, Worker
from tilefuse.errors import DeviceError

ISSUE = arch.TASK_ISSUE * arch.CLOCK_HZ
LATENCY = arch.DRAM_LATENCY * arch.CLOCK_HZ
LOCK, CALL = arch.LOCK_CYCLES, arch.CALL_CYCLES


def through(n_words: int, object_words: int = 256, depth: int = 12) -> Program:
    """Host -> memory tile -> host."""
    a = ObjectFifo(words(object_words), depth=depth, name="a")
    b = a.cons().forward(tile=Tile(0, MEM), name="b")

    def sequence(x: Any, y: Any, into: Any, out: Any) -> None:
        group = TaskGroup()
        into.fill(x, group=group)
        out.drain(y, wait=True, group=group)
        group.finish()

    ends = [a.prod(tile=Tile(0, SHIM)), b.cons(tile=Tile(0, SHIM))]
    return Program(iron.device(1), Runtime(sequence, [words(n_words), words(n_words), *ends]))


def test_a_stream_carries_four_bytes_a_cycle() -> None:
    """The drain starts two issues and a latency in; by then objects wait, and one comes every 256 cycles."""
    n = 1 << 14
    report = run(through(n), count(n), np.zeros(n, np.int32))
    assert report.cycles == pytest.approx(2 * ISSUE + LATENCY + n, abs=1)
    assert report.array_seconds == pytest.approx(report.cycles / 1.8e9)
    assert report.seconds == pytest.approx(report.array_seconds + 60e-6)
    assert {channel.busy for channel in report.channels} == {n}
    assert report.processor == pytest.approx(2 * ISSUE + arch.SYNC_ISSUE * arch.CLOCK_HZ)


def test_one_object_at_a_time_does_not_overlap() -> None:
    """With a depth of 1 an object comes in, goes out, and only then the next comes: 2 x 256 cycles each."""
    n = 1 << 14
    report = run(through(n, depth=1), count(n), np.zeros(n, np.int32))
    first_in = ISSUE + LATENCY + 256  # done before the drain starts
    assert first_in < 2 * ISSUE + LATENCY
    objects = n // 256
    assert report.cycles == pytest.approx(2 * ISSUE + LATENCY + 256 * (2 * objects - 1), abs=1)


def test_a_slow_kernel_bounds_the_run() -> None:
    """The first object is there after an issue, the latency, 256 cycles into L2 and 64 into the core."""
    program = copy_design(1024)
    kernel = {"copy": PythonKernel(lambda x, y: None, 100_000, (1,))}
    report = iron.load(program, kernel).run(program, None, None, timing_only=True)
    step = 100_000 + CALL + 4 * LOCK
    assert report.cycles == pytest.approx(ISSUE + LATENCY + 256 + 64 + 16 * step + 64, abs=1)
    (core,) = report.cores
    assert core.kernel == 16 * 100_000
    assert core.overhead == 16 * (CALL + 4 * LOCK)
    assert sum(core.stalls.values()) == 0
    assert report.core_utilisation == pytest.approx(16 * 100_000 / report.cycles)
    assert "modelled bottleneck: the cores: core (0, 2) is in kernels and locks" in report.bottleneck


def test_a_core_ahead_of_the_clock_is_woken_once() -> None:
    """While it is in its kernel several objects arrive, each of which could end its next wait."""

    def core(x: Any, y: Any, kernel: Any) -> None:
        source, target = x.acquire(1), y.acquire(1)
        kernel(source, target)
        x.release(1)
        y.release(1)
        pair = x.acquire(2)
        for source in pair:
            kernel(source, y.acquire(1))
            y.release(1)
        x.release(2)

    n = 12 * 64
    program = copy_design(n, core=core, depth=3, l2_words=128)
    a, c = count(n), np.zeros(n, np.int32)
    kernel = {"copy": PythonKernel(KERNELS["copy"].function, 5000, (1,))}
    report = iron.load(program, kernel).run(program, a, c)
    assert np.array_equal(c, a)
    # Three calls in two rounds of locks: 4, and 1 for the pair, 2 for each of its results, 1.
    step = 3 * (5000 + CALL) + (4 + 1 + 2 * 2 + 1) * LOCK
    last = 64 - LOCK  # the last result leaves while the core gives the pair back
    assert report.cycles == pytest.approx(ISSUE + LATENCY + 128 + 64 + 4 * step + last, abs=1)


def test_a_core_that_waits_for_its_stream() -> None:
    """Kernels of 10 cycles take 78 with locks and call; an object comes every 64 cycles, a larger one every 256."""
    n = 1 << 14
    program = copy_design(n)
    kernel = {"copy": PythonKernel(lambda x, y: None, 10, (1,))}
    report = iron.load(program, kernel).run(program, None, None, timing_only=True)
    step = 10 + CALL + 4 * LOCK
    assert step == 78  # longer than 64: the core is the slower one, once its results are taken away
    assert report.cycles == pytest.approx(2 * ISSUE + LATENCY + n / 64 * step, rel=0.01)
    wide = copy_design(n, object_words=256)
    report = iron.load(wide, kernel).run(wide, None, None, timing_only=True)
    assert report.cycles == pytest.approx(2 * ISSUE + LATENCY + n, rel=0.03)
    assert sum(report.cores[0].stalls.values()) == pytest.approx((256 - step) * (n / 256), rel=0.05)
    assert "the stream of fifo" in report.bottleneck


def spreading(n_words: int, columns: int, *, writes: bool = False) -> Program:
    """Both channels of each column's shim read ``n_words`` each, into a core that throws them away."""

    def core(x: Any) -> None:
        x.acquire(1)
        x.release(1)

    fifos = [ObjectFifo(words(1024), name=f"f{i:02}") for i in range(2 * columns)]
    workers = [Worker(core, [fifo.cons()], tile=Tile(i // 2, CORE + i % 2)) for i, fifo in enumerate(fifos)]

    def sequence(x: Any, *ends: Any) -> None:
        group = TaskGroup()
        for end in ends:
            end.fill(x, wait=True, group=group)
        group.finish()

    ends = [fifo.prod(tile=Tile(i // 2, SHIM)) for i, fifo in enumerate(fifos)]
    return Program(iron.device(columns), Runtime(sequence, [words(n_words), *ends]), workers)


def test_dram_bounds_sixteen_channels() -> None:
    """Sixteen streams would carry 64 bytes a cycle, 115 GB/s; reads have 47 GB/s."""
    n = 1 << 18
    report = run(spreading(n, 8), None, timing_only=True)
    least = 16 * 4 * n / arch.DRAM_READ
    assert least <= report.array_seconds <= least + 16 * arch.TASK_ISSUE + arch.DRAM_LATENCY
    assert report.dram_rate == pytest.approx(arch.DRAM_READ, rel=0.03)
    assert "modelled bottleneck: the host's memory" in report.bottleneck


def test_dram_does_not_bound_four_channels() -> None:
    """Four streams carry 16 bytes a cycle, 29 GB/s."""
    n = 1 << 18
    report = run(spreading(n, 2), None, timing_only=True)
    assert report.cycles == pytest.approx(4 * ISSUE + LATENCY + n, rel=0.001)


def test_a_broadcast_takes_the_time_of_one() -> None:
    def design(cores: int) -> Program:
        def core(x: Any) -> None:
            x.acquire(1)
            x.release(1)

        a = ObjectFifo(words(256), name="a")
        workers = [Worker(core, [a.cons()], tile=Tile(i % 8, CORE + i // 8)) for i in range(cores)]

        def sequence(x: Any, into: Any) -> None:
            into.fill(x, wait=True)

        return Program(iron.device(8), Runtime(sequence, [words(1 << 14), a.prod(tile=Tile(0, SHIM))]), workers)

    cycles = [run(design(cores), None, timing_only=True).cycles for cores in (1, 32)]
    assert cycles[0] == cycles[1] == pytest.approx(ISSUE + LATENCY + (1 << 14), abs=1)


def test_runs_do_not_add_up() -> None:
    program = copy_design(1024)
    configuration = iron.load(program, KERNELS)
    reports = [configuration.run(program, count(1024), np.zeros(1024, np.int32)) for _ in range(3)]
    assert reports[1].cycles == pytest.approx(reports[0].cycles)
    assert reports[2].dram_read == reports[0].dram_read
    assert reports[2].cores[0].calls == reports[0].cores[0].calls


def test_the_same_run_takes_the_same_time() -> None:
    """To the last bit, wherever in a configuration's life it comes: sums of times begin anew."""
    total = 1 << 14

    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        for _ in range(3):
            group = TaskGroup()
            into.fill(a, group=group)
            out.drain(c, wait=True, group=group)
            group.finish()

    program = copy_design(total, sequence=sequence)
    configuration = iron.load(program, KERNELS)
    arrays = count(total), np.zeros(total, np.int32)
    reports = [configuration.run(program, *arrays) for _ in range(4)] + [run(program, *arrays)]
    reports.append(configuration.run(program, None, None, timing_only=True))
    assert len({report.cycles for report in reports}) == 1
    assert len({str(report.cores) for report in reports}) == 1


def three_drains(a: Any, c: Any, into: Any, out: Any) -> None:
    group = TaskGroup()
    into.fill(a, group=group)
    for i in range(2):
        tap = iron.TensorAccessPattern((1024,), 512 * i, [512], [1])
        out.drain(c, tap=tap, wait=True, group=group)
    group.finish()


def test_the_report(tmp_path: Path) -> None:
    program: Callable[[], Program] = lambda: copy_design(1024, sequence=three_drains)  # noqa: E731
    report = run(program(), count(1024), np.zeros(1024, np.int32), trace=True)
    text = str(report)
    assert text.startswith("modelled: ")
    assert "4096 bytes read, 4096 written" in text
    assert "3 tasks, 2 waits" in text
    assert "at most 2 tasks in flight" in text
    (queue,) = [depths for label, depths in report.queues.items() if label.startswith("S2MM")]
    assert [number for _, number in queue] == [1, 2, 1, 0]
    assert [time for time, _ in queue][:2] == pytest.approx([2 * ISSUE, 3 * ISSUE])

    path = tmp_path / "trace.json"
    report.write_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    calls = [event for event in events if event["name"] == "copy"]
    assert len(calls) == 16
    assert all(event["dur"] == pytest.approx((100 + CALL) / 1800) for event in calls)  # microseconds
    assert max(event["ts"] + event.get("dur", 0) for event in events if "ts" in event) <= report.cycles / 1800 + 1e-6
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"command processor", "core (0, 2)", "stream a", "stream c"} <= tracks
    assert "modelled" in events[0]["args"]["name"]

    with pytest.raises(DeviceError, match="trace=True"):
        run(program(), count(1024), np.zeros(1024, np.int32)).write_trace(path)
