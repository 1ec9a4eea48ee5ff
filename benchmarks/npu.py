"""What the NPU takes: array, dispatch and host apart. Needs a Ryzen AI machine with XRT, and built artifacts.

    python benchmarks/npu.py            # writes docs/benchmarks/npu.md
    python benchmarks/npu.py --print    # prints only

Method. Calls of one layer follow each other; medians after a warm-up. A run is from `run.start` until `run.wait`
returns; *host* is the rest of the call. *dispatch* is the run of a problem with a tile of weights for each core: what a
run costs whatever it computes. *array* is what a run takes beyond it, beside what the planner models. The results of
every shape are checked against the CPU's before anything is timed. The power mode decides the array's clock: it is
recorded, and figures of different modes are not to be compared.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from measure import cpu_model
from page import FOLDER, bullets, command, paragraph, table

import tilefuse as tf
from tilefuse import plan
from tilefuse.arrays import FloatArray, view_rows
from tilefuse.errors import TileFuseError
from tilefuse.packed import PackedLinear
from tilefuse.runtime.artifacts import FolderArtifacts
from tilefuse.runtime.chaining import SYSFS, firmware_version
from tilefuse.runtime.npu import NpuDevice
from tilefuse.runtime.xrt import load_module

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096))
ROWS = (1, 256, 1024, 2048)
CALLS = 50
SMALLEST = (512, 512)


@dataclass
class Clock:
    """Seconds from a run's start until its wait returned, of each run."""

    runs: list[float] = field(default_factory=list)
    started: float = 0.0


class TimedRun:
    """A run that notes its time."""

    def __init__(self, run: Any, clock: Clock) -> None:
        self._run, self._clock = run, clock
        self.set_arg, self.state = run.set_arg, run.state

    def start(self) -> None:
        """As the run's."""
        self._clock.started = time.perf_counter()
        self._run.start()

    def wait(self, timeout_ms: int) -> Any:
        """As the run's."""
        state = self._run.wait(timeout_ms)
        self._clock.runs.append(time.perf_counter() - self._clock.started)
        return state


class TimedModule:
    """pyxrt, whose runs note their time."""

    def __init__(self, module: Any, clock: Clock) -> None:
        self._module, self._clock = module, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def run(self, kernel: Any) -> TimedRun:
        """A run of the kernel."""
        return TimedRun(self._module.run(kernel), self._clock)


@dataclass(frozen=True)
class Times:
    """Medians in seconds."""

    call: float
    run: float


def make_layer(rng: np.random.Generator, k: int, n: int) -> PackedLinear:
    """A random layer of 4 bits in groups of 128."""
    return tf.pack(tf.quantize_linear(rng.normal(0, 0.02, (k, n)).astype(np.float32), bits=4, group=128))


def view_of(array: Any) -> FloatArray:
    """As devices take arrays."""
    view = view_rows(array, "x")
    assert view is not None
    return view


def measure(device: NpuDevice, clock: Clock, layer: PackedLinear, m: int, rng: np.random.Generator) -> Times:
    """Times of calls with ``m`` rows, whose results are right.

    Raises:
        AssertionError: They are not.
    """
    x, y = rng.normal(0, 1, (m, layer.k)).astype(np.float32), np.empty((m, layer.n), np.float32)
    view, target = view_of(x), view_of(y)
    device.matmul(view, layer, target)
    want = tf.gemm(x, layer, device="cpu")
    error = float(np.abs(y - want).max() / np.abs(want).max())
    assert error < 0.05, f"{m} x {layer.k} x {layer.n}: results differ from the CPU's by {error:.3f} of the largest"
    for _ in range(5):
        device.matmul(view, layer, target)
    clock.runs.clear()
    calls = []
    for _ in range(CALLS):
        start = time.perf_counter()
        device.matmul(view, layer, target)
        calls.append(time.perf_counter() - start)
    return Times(statistics.median(calls), statistics.median(clock.runs))


def power_mode(module: Any) -> str:
    """As the driver says it."""

    def search(value: Any) -> str | None:
        if isinstance(value, dict):
            found = value.get("power_mode")
            return str(found) if found is not None else next(filter(None, map(search, value.values())), None)
        return next(filter(None, map(search, value)), None) if isinstance(value, list) else None

    try:
        return search(json.loads(module.device(0).get_info(module.xrt_info_device.platform))) or "unknown"
    except (RuntimeError, AttributeError, ValueError):
        return "unknown"


def bdf(module: Any) -> str:
    """Where the device is on its bus."""
    try:
        return str(module.device(0).get_info(module.xrt_info_device.bdf))
    except (RuntimeError, AttributeError):
        return ""


def document(module: Any | None = None, artifacts: Any | None = None) -> str:
    """The page, in Markdown.

    Args:
        module: pyxrt, or what binds the same; XRT's own when None.
        artifacts: Where what runs on it comes from; a folder when None.
    """
    clock = Clock()
    module = load_module() if module is None else module
    device = NpuDevice(TimedModule(module, clock), FolderArtifacts() if artifacts is None else artifacts, chain=False)
    rng = np.random.default_rng(0)
    try:
        name = device.open()
        floors = {m: measure(device, clock, make_layer(rng, *SMALLEST), m, rng).run for m in (1, 2)}
        rows = []
        for k, n in SHAPES:
            layer = make_layer(rng, k, n)
            for m in ROWS:
                times = measure(device, clock, layer, m, rng)
                modelled = (plan.gemv(layer.layout) if m == 1 else plan.gemm(layer.layout, m)).costs.total
                parts = (times.call, times.call - times.run, floors[min(m, 2)], times.run - floors[min(m, 2)], modelled)
                rows.append((f"{m} x {k} x {n}", *(f"{part * 1e6:.0f}" for part in parts)))
    finally:
        device.close()
    version = firmware_version(bdf(module), SYSFS)
    return (
        "\n\n".join(
            [
                "# The NPU",
                paragraph(
                    "Written by `python benchmarks/npu.py`; its head states the method. Measured, but for the last "
                    "column: 4 bits in groups of 128, float32 in and out."
                ),
                bullets(
                    [
                        f"- {name}, power mode {power_mode(module)}, firmware "
                        f"{'.'.join(map(str, version)) if version else 'unknown'}.",
                        f"- {cpu_model()}, Linux {platform.release()}, Python {platform.python_version()}, NumPy "
                        f"{np.__version__}; load average {os.getloadavg()[0]:.1f} at the end.",
                    ]
                ),
                table(("M x K x N", "call, us", "host, us", "dispatch, us", "array, us", "array modelled, us"), rows),
            ]
        )
        + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the page; returns the exit code, 2 where nothing can be measured."""
    try:
        return command("Measure the NPU.", document, FOLDER / "npu.md", arguments)
    except TileFuseError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
