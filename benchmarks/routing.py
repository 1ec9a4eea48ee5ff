"""What choosing the device costs, and how near the CPU's estimates are to what calls take.

    python benchmarks/routing.py            # writes docs/benchmarks/routing.md
    python benchmarks/routing.py --print    # prints only

Method. The devices behind ``device="auto"`` do nothing here, so that only the choice is timed: the fastest of seven
rounds of 100,000 calls. Estimates are of a calibration made on the spot, not of one kept on disk. They are set against
calls on weights that go round in more memory than the cache holds: the fastest of nine, as a calibration takes the
fastest too.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Iterator, Sequence

import numpy as np
from measure import cpu_model, last_level_cache_bytes
from page import FOLDER, bullets, command, paragraph, table
from peers.base import copies_beyond_cache

import tilefuse as tf
from tilefuse._buffers import aligned_empty
from tilefuse.arrays import FloatArray, view_rows
from tilefuse.errors import NpuUnavailable
from tilefuse.packed import PackedLinear
from tilefuse.runtime import cpu_level
from tilefuse.runtime.cpu import CpuDevice
from tilefuse.runtime.estimates import cpu_estimate
from tilefuse.runtime.rates import Rates, measure
from tilefuse.runtime.route import AutoDevice

SHAPES = ((2048, 2048), (4096, 4096), (4096, 14336))
ROWS = (1, 4, 16, 128, 512)
CALLS = 100_000
TIMED = 9


class Idle:
    """A device that returns at once."""

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        """Does nothing."""


def make_layer(k: int, n: int, bits: int) -> PackedLinear:
    """A packed layer of zeros, which take as long as anything else."""
    layout = tf.Layout(k, n, bits, 128)
    data = aligned_empty(layout.nbytes)
    data[:] = 0
    return PackedLinear("zeros", layout, data)


def rows_of(array: np.ndarray) -> FloatArray:
    """The array as a device takes it."""
    view = view_rows(array, "x")
    assert view is not None
    return view


def choice_rows(rates: Rates) -> Iterator[tuple[str, str]]:
    """(what, microseconds) of a call that goes through the choice."""
    layer = make_layer(4096, 4096, 4)

    def no_npu() -> Idle:
        raise NpuUnavailable("none for this benchmark")

    idle = Idle()
    devices: list[tuple[str, AutoDevice | Idle]] = [
        ("the device called directly", idle),
        ('"auto" without an NPU', AutoDevice(idle, no_npu)),
        ('"auto" with one, choice looked up', AutoDevice(idle, Idle, lambda: rates)),
    ]
    for what, device in devices:
        for m in (1, 512):
            x, y = rows_of(np.zeros((m, 4096), np.float32)), rows_of(np.zeros((m, 4096), np.float32))

            def call(device: AutoDevice | Idle = device, x: FloatArray = x, y: FloatArray = y) -> None:
                device.matmul(x, layer, y)

            seconds = min(timeit.repeat(call, number=CALLS, repeat=7)) / CALLS
            yield f"{what}, M = {m}", f"{seconds * 1e6:.2f}"


def estimate_rows(rates: Rates, rng: np.random.Generator) -> Iterator[tuple[str, int, float, float, str]]:
    """(layer, M, seconds that a call takes, estimate, what bounds it)."""
    for (k, n), bits in itertools.product(SHAPES, (4, 8)):
        first = make_layer(k, n, bits)
        copies = copies_beyond_cache(first.nbytes, last_level_cache_bytes())
        layers = itertools.cycle([first, *(make_layer(k, n, bits) for _ in range(copies - 1))])
        for m in ROWS:
            estimate = cpu_estimate(first.layout, m, rates)
            yield f"{k} x {n} W{bits}", m, fastest_call(layers, m, rng), estimate.total, estimate.bottleneck


def fastest_call(layers: Iterator[PackedLinear], m: int, rng: np.random.Generator) -> float:
    """Seconds of the fastest of `TIMED` calls, each with the next of the layers."""
    layer = next(layers)
    x = rows_of(rng.standard_normal((m, layer.k), np.float32))
    y = rows_of(np.empty((m, layer.n), np.float32))
    device, best = CpuDevice(), math.inf
    for _ in range(TIMED):
        layer = next(layers)
        start = time.perf_counter()
        device.matmul(x, layer, y)
        best = min(best, time.perf_counter() - start)
    return best


def document() -> str:
    """The page, in Markdown."""
    start = time.perf_counter()
    rates = measure()
    took = time.perf_counter() - start
    ratios, compared = [], []
    for name, m, seconds, estimate, bound in estimate_rows(rates, np.random.default_rng(0)):
        ratios.append(estimate / seconds)
        compared.append((name, str(m), f"{seconds * 1e6:.0f}", f"{estimate * 1e6:.0f}", f"{ratios[-1]:.2f}", bound))
    parts = [
        "# Choosing the device: what it costs, and how near the estimates are",
        paragraph(
            "Written by `python benchmarks/routing.py`; its head states the method. Everything here is measured on a "
            "CPU; nothing of an NPU is. [routing.md](../routing.md) says how the choice is made."
        ),
        bullets(
            [
                f"- {cpu_model()}, level {cpu_level()}, {tf.get_num_threads()} threads, Python "
                f"{platform.python_version()}; load average {os.getloadavg()[0]:.1f} at the end.",
                f"- A calibration took {took * 1e3:.0f} ms: weights {rates.bandwidth / 1e9:.1f} GB/s, staging "
                f"{rates.staging / 1e9:.1f} GB/s, results {rates.results / 1e9:.1f} GB/s.",
                f"- Estimate over call: {min(ratios):.2f} to {max(ratios):.2f}, "
                f"median {statistics.median(ratios):.2f}.",
            ]
        ),
        table(("a call that does nothing else", "us"), choice_rows(rates)),
        table(("K x N", "M", "call, us", "estimate, us", "estimate / call", "bound by"), compared),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the page; returns the exit code."""
    return command("Measure what choosing the device costs.", document, FOLDER / "routing.md", arguments)


if __name__ == "__main__":
    sys.exit(main())
