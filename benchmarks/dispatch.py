"""What a product on the NPU costs the host: everything but the device.

    python benchmarks/dispatch.py            # writes docs/benchmarks/dispatch.md
    python benchmarks/dispatch.py --print    # prints only

Method. `tilefuse.gemm` goes the whole way that it goes on the NPU, from the caller's x to the caller's y, through a
module with pyxrt's calls whose device does nothing, but for a mark that it clears as a run that writes results would.
The calls of one kind follow each other; median and 90th percentile of all, after a warm-up. What the real pyxrt adds
is the driver's submission and its wake-up, and flushing caches over the synchronised bytes: not in here.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from measure import cpu_model
from page import FOLDER, bullets, command, paragraph, table

import tilefuse as tf
from tilefuse import host_buffers
from tilefuse._buffers import aligned_empty
from tilefuse.arrays import FloatArray, view_rows
from tilefuse.packed import PackedLinear
from tilefuse.plan import Plan
from tilefuse.plan import gemm as plan_gemm
from tilefuse.plan import gemv as plan_gemv
from tilefuse.runtime.artifacts import Xclbin
from tilefuse.runtime.npu import NpuDevice

K = N = 4096
ROWS = (1, 256)
CALLS = {1: 5000, 256: 300}
LIST = 7
"""Layers in a list: those of a transformer's block."""

TARGET = 60.0
"""Microseconds for one row."""

DTYPES: dict[str, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


class _Buffer:
    host_only = cacheable = 0

    def __init__(self, device: object, size: int, flags: object, group: int) -> None:
        self.memory = memoryview(bytearray(size))

    def map(self) -> memoryview:
        return self.memory

    def sync(self, direction: object, size: int, offset: int) -> None:
        if direction and size > offset:  # from the device: a run has overwritten what was there
            self.memory[size - 4 : size] = b"\0\0\0\0"


class _Run:
    def __init__(self, kernel: object) -> None:
        pass

    def set_arg(self, index: int, value: object) -> None:
        pass

    def start(self) -> None:
        pass

    def wait(self, timeout_ms: int) -> int:
        return 4

    def state(self) -> int:
        return 0


class _RunList:
    def __init__(self, context: object) -> None:
        pass

    def add(self, run: object) -> None:
        pass

    def execute(self) -> None:
        pass

    def wait(self, *timeout: object) -> bool:
        return True


def idle_module() -> Any:
    """pyxrt's calls on a device that does nothing."""
    kernel = SimpleNamespace(get_name=lambda: "MLIR_AIE", get_num_args=lambda: 8)
    device = SimpleNamespace(register_xclbin=lambda xclbin: 0, get_info=lambda key: "idle")
    return SimpleNamespace(
        ert_cmd_state=SimpleNamespace(ERT_CMD_STATE_NEW=0, ERT_CMD_STATE_COMPLETED=4),
        xclBOSyncDirection=SimpleNamespace(XCL_BO_SYNC_BO_TO_DEVICE=0, XCL_BO_SYNC_BO_FROM_DEVICE=1),
        xrt_info_device=SimpleNamespace(name=0, bdf=0),
        device=lambda index: device,
        xclbin=lambda path: SimpleNamespace(get_kernels=lambda: [kernel]),
        hw_context=lambda device, uuid: object(),
        kernel=lambda context, name: SimpleNamespace(group_id=lambda argument: 0),
        bo=_Buffer,
        run=_Run,
        runlist=_RunList,
    )


class IdleArtifacts:
    """Artifacts without contents."""

    def xclbin(self, plan: Plan, /) -> Xclbin:
        """None that could be loaded."""
        return Xclbin(Path(plan.configuration.name), "MLIR_AIE", plan.configuration.name)

    def instructions(self, plan: Plan, /) -> Any:
        """Some words."""
        return np.zeros(1024, np.uint32)

    def choose(self, candidates: Sequence[Plan], /) -> Plan:
        """The best."""
        return candidates[0]


def make_layer() -> PackedLinear:
    """A packed layer of zeros: the host never looks at weights after it has uploaded them."""
    layout = tf.Layout(K, N, 4, 128)
    data = aligned_empty(layout.nbytes)
    data[:] = 0
    return PackedLinear("zeros", layout, data)


def timed(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """Median and 90th percentile, in microseconds."""
    for _ in range(max(20, calls // 10)):
        call()
    found = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(found), statistics.quantiles(found, n=10)[-1]


def _view(array: Any) -> FloatArray:
    view = view_rows(array, "x")
    assert view is not None
    return view


def measured(device: NpuDevice) -> Iterator[tuple[str, str, float, float]]:
    """(what, dtype, median, 90th percentile) in microseconds of a call."""
    layer, rng = make_layer(), np.random.default_rng(0)
    for m in ROWS:
        plan = plan_gemv(layer.layout) if m == 1 else plan_gemm(layer.layout, m)
        for name, dtype in DTYPES.items():
            x, y = rng.normal(0, 1, (m, K)).astype(dtype), np.empty((m, N), dtype)
            calls, view, target = CALLS[m], _view(x), _view(y)

            def whole(view: FloatArray = view, target: FloatArray = target) -> None:
                device.matmul(view, layer, target)

            def checked(x: Any = x, y: Any = y) -> None:
                tf.gemm(x, layer, device="idle", out=y)

            words, results = host_buffers.stage(plan, x), host_buffers.empty_results(plan)
            results[:] = 0

            def stage(plan: Plan = plan, view: FloatArray = view, words: Any = words) -> None:
                host_buffers.fill(plan, view, None, words)

            def write(plan: Plan = plan, results: Any = results, y: Any = y) -> None:
                host_buffers.write_results(plan, results, None, y)

            yield f"M = {m}: a call", name, *timed(checked, calls)
            yield f"M = {m}: of that, without checking the arguments", name, *timed(whole, calls)
            yield f"M = {m}: of that, x into the buffer", name, *timed(stage, calls)
            yield f"M = {m}: of that, y out of the buffer", name, *timed(write, calls)
    row = _view(np.ones((1, K), np.float32))
    work = [(row, layer, _view(np.empty((1, N), np.float32))) for _ in range(LIST)]
    median, tail = timed(lambda: device.matmul_many(work), CALLS[1] // LIST)
    yield f"M = 1: each of {LIST} calls in a list", "float32", median / LIST, tail / LIST


def document() -> str:
    """The page, in Markdown."""
    from tilefuse import runtime

    device = NpuDevice(idle_module(), IdleArtifacts(), "idle", chain=True)
    runtime._MAKERS["idle"] = lambda: device
    try:
        rows = list(measured(device))
    finally:
        runtime._MAKERS.pop("idle")
        runtime._DEVICES.pop("idle", None)
        device.close()
    first = {(what, dtype): median for what, dtype, median, _ in rows}
    one = max(first["M = 1: a call", dtype] for dtype in DTYPES)
    parts = [
        "# The host's share of a dispatch",
        paragraph(
            f"Written by `python benchmarks/dispatch.py`; its head states the method. Measured, on a CPU without an "
            f"NPU: {K} x {N}, 4 bits in groups of 128. The target is {TARGET:.0f} us for one row, whatever its type; "
            f"here it is {one:.1f} us. Hardware's own share, 45 to 110 us by others' reports, comes on top."
        ),
        bullets(
            [
                f"- {cpu_model()}, {tf.get_num_threads()} threads, Python {platform.python_version()}, NumPy "
                f"{np.__version__}; load average {os.getloadavg()[0]:.1f} at the end.",
            ]
        ),
        table(
            ("", "x and y", "median, us", "90th percentile, us"),
            [(what, dtype, f"{median:.1f}", f"{tail:.1f}") for what, dtype, median, tail in rows],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the page; returns the exit code."""
    return command("Measure the host's share of a dispatch.", document, FOLDER / "dispatch.md", arguments)


if __name__ == "__main__":
    sys.exit(main())
