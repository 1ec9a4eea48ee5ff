"""Choosing the device: estimates worked out by hand, crossovers, the kept calibration, falling back."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import F32, Scheme, make_layer
from rich.console import Console

import tilefuse as tf
from tilefuse import Layout, ZeroKind, arch, commands, errors, plan, runtime
from tilefuse.arrays import FloatArray
from tilefuse.packed import PackedLinear
from tilefuse.runtime import rates as rates_module
from tilefuse.runtime.artifacts import ArtifactsError
from tilefuse.runtime.cpu import CpuDevice
from tilefuse.runtime.estimates import Crossover, cpu_estimate, crossovers, npu_estimate
from tilefuse.runtime.npu import NpuDevice
from tilefuse.runtime.rates import Rates, calibrate, default_rates
from tilefuse.runtime.route import AutoDevice, Decision, Router, bucket, decide

SQUARE = Layout(4096, 4096, 4, 128)
"""32 x 64 tiles of 4096 + 128 + 64 bytes: 8,781,824 bytes, 16,777,216 weights."""

W4 = Scheme(4, 128)


def flat(bandwidth: float, operations: float, call: float = 10e-6) -> Rates:
    """Rates with one speed whatever the rows; staging and results at round figures."""
    curve = ((1, operations),)
    return Rates(bandwidth, call, curve, curve, staging=4e9, results=8e9, source="default")


# --- estimates, by hand -----------------------------------------------------------------------------------------------


def test_cpu_by_hand() -> None:
    rates = flat(bandwidth=50e9, operations=500e9)
    one = cpu_estimate(SQUARE, 1, rates)
    # 8,781,824 / 50e9 = 175.6 us to read; 2 x 16,777,216 / 500e9 = 67.1 us a row to compute.
    assert one.work == pytest.approx(175.63648e-6)
    assert (one.bound, one.bottleneck) == ("memory", "memory")
    assert one.total == pytest.approx(185.63648e-6)
    three = cpu_estimate(SQUARE, 3, rates)
    assert three.total == pytest.approx(10e-6 + 3 * 67.108864e-6)
    assert three.bound == "arithmetic"
    # The CPU reads no tile that is padding throughout: 1 of 4 by 2 of 8.
    small = cpu_estimate(Layout(100, 100, 4, 128), 1, rates)
    assert small.work == pytest.approx(2 * 4288 / 50e9)
    assert small.bottleneck == "call"


def test_rates_between_rows() -> None:
    curve = ((1, 2e9), (3, 3e9), (5, 20e9))  # 1 ns a weight, then 2, then 0.5: many rows may be faster than few
    rates = dataclasses.replace(flat(1e9, 1e9), w8=curve)
    expected = {1: 1.0, 2: 1.5, 3: 2.0, 4: 1.25, 5: 0.5, 10: 1.0}
    for m, nanoseconds in expected.items():
        assert rates.arithmetic(8, 1000, m) == pytest.approx(nanoseconds * 1e-6)
    assert rates.arithmetic(4, 1000, 2) == pytest.approx(4e-6)  # the other curve


def test_npu_by_hand() -> None:
    rates = flat(50e9, 500e9)
    # A GEMV reads the weights, 8192 bytes of x and a head of 1024, at 47 GB/s, and writes 8192, in one segment of 2 us.
    one = npu_estimate(SQUARE, 1, rates)
    assert one.work == pytest.approx((8_781_824 + 9216) / 47e9 + 2e-6)
    assert one.staging == pytest.approx(9216 / 4e9 + 8192 / 8e9)
    assert (one.overhead, one.bound) == (60e-6, "DRAM")
    assert one.total == pytest.approx(252.3714e-6, rel=1e-6)
    # A band of 16 rows is 2304 bytes a k tile; two tiles side by side take 4 passes, and each array row reads its own
    # share in each, behind a head of 9216. The host writes it once.
    for m in (2, 64):
        few = npu_estimate(SQUARE, m, rates)
        assert few.work == pytest.approx((8_781_824 + 4 * (9216 + 4 * 32 * 2304)) / 47e9 + 4 * 2e-6)
        assert few.staging == pytest.approx((9216 + 4 * 32 * 2304) / 4e9 + 64 * 4096 * 2 / 8e9)
        assert few.total == pytest.approx(422.2985e-6, rel=1e-6)
    switched = npu_estimate(SQUARE, 64, rates, another_open=True)
    assert switched.total == pytest.approx(3122.2985e-6, rel=1e-6)
    assert switched.bottleneck == "xclbin switch"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", ZeroKind)
@pytest.mark.parametrize("m", [1, 2, 63, 64, 65, 300, 1024])
def test_npu_is_what_the_plan_costs(bits: int, zero: ZeroKind, m: int) -> None:
    layout = Layout(1024, 1536, bits, 64, zero)
    made = plan.gemv(layout) if m == 1 else plan.gemm(layout, m)
    found = npu_estimate(layout, m, flat(1e9, 1e9))
    assert found.work == made.costs.total
    assert found.bound == made.costs.bound
    assert found.configuration == made.configuration.name
    assert found.staging == pytest.approx(4 * made.x_words / 4e9 + 4 * made.y_words / 8e9)
    assert found.overhead == arch.DISPATCH


@pytest.mark.parametrize(
    ("rate", "another_open", "expected"),
    [
        # 67.1 us a row: 6 rows take 412.7 and 7 take 479.8, against 422.3. One takes 185.6, against 252.4.
        (500e9, False, [(1, "cpu"), (7, "npu")]),
        # Against 3122.3: 46 rows take 3097.0, 47 take 3164.1.
        (500e9, True, [(1, "cpu"), (47, "npu")]),
        # 6.5 us a row. 63 rows take 419.5, 64 take 426.0. From 65 on the array computes two bands, 586.7: 65 rows take
        # 432.5, 88 take 582.0 and 89 take 588.5.
        (2 * 4096**2 / 6.5e-6, False, [(1, "cpu"), (64, "npu"), (65, "cpu"), (89, "npu")]),
        # Nothing to gain: 0.1 us a row against 60 of the dispatch alone.
        (2 * 4096**2 / 0.1e-6, False, [(1, "cpu")]),
    ],
)
def test_crossovers_by_hand(rate: float, another_open: bool, expected: list[tuple[int, str]]) -> None:
    rates = flat(50e9, rate)
    found = crossovers(SQUARE, rates, 128, another_open=another_open)
    assert found == [Crossover(*pair) for pair in expected]
    # The decisions of calls agree, at least where a bucket is a number of rows.
    for crossover in found:
        if crossover.m <= 32:
            decision = decide(SQUARE, crossover.m, rates)
            assert (decision.if_another if another_open else decision.if_open) is (crossover.device == "npu")


@pytest.mark.parametrize("bits", [4, 8])
def test_in_parts(bits: int) -> None:
    """A row of 2^20 results is 2 MiB, so a buffer below 2 GiB holds 1023 of them, and half of that 7 blocks of 64."""
    wide, rates = Layout(512, 1 << 20, bits, 128), flat(50e9, 500e9)
    part = npu_estimate(wide, 448, rates)
    assert part.dispatches == 1
    found = npu_estimate(wide, 3 * 448, rates)
    assert found.dispatches == 3
    assert found.overhead == pytest.approx(3 * 60e-6)
    assert found.work == pytest.approx(3 * part.work)
    assert found.staging == pytest.approx(3 * part.staging)
    assert npu_estimate(wide, 3 * 448 + 1, rates).dispatches == 4
    for k, n in ((1024, 1 << 20), (32768, 64), (64, 64), (4096, 128256)):
        for m in (5000, 65536):
            assert npu_estimate(Layout(k, n, bits, 32), m, rates).work > 0


def test_what_the_array_cannot_run() -> None:
    narrow = Layout(4096, 4096, 4, 128, columns=2)  # a GEMM takes 4 columns, a GEMV any
    rates = flat(1e9, 1e9)
    assert crossovers(narrow, rates, 4) == [Crossover(1, "npu"), Crossover(2, "cpu")]
    assert decide(narrow, 2, rates) == Decision("", False, False)


def test_buckets() -> None:
    assert [bucket(m) for m in (1, 2, 31, 32, 33, 34, 64, 65, 68, 4097)] == [1, 2, 31, 32, 34, 34, 64, 68, 68, 4352]
    for m in range(1, 70_000):
        assert m <= bucket(m) <= m + m / 16
        assert bucket(bucket(m)) == bucket(m)


# --- the calibration --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, that does not exist yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TILEFUSE_CALIBRATE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for measuring; one entry for each time."""
    times: list[int] = []

    def measure() -> Rates:
        times.append(len(times))
        curve = tuple((m, 1e9 * (m + len(times))) for m in rates_module._ROWS)
        return Rates(1e9, 1e-6, curve, curve, 2e9, 3e9, "measured")

    monkeypatch.setattr(rates_module, "measure", measure)
    return times


def test_measured_once_and_kept(cache: Path, measured: list[int]) -> None:
    first = calibrate()
    assert calibrate() == first
    assert len(measured) == 1
    (file,) = (cache / "tilefuse").iterdir()  # and nothing half written
    assert json.loads(file.read_text())["machine"]["threads"] == tf.get_num_threads()


def test_levels_and_threads_have_their_own(cache: Path, measured: list[int]) -> None:
    before = tf.get_num_threads()
    try:
        for level in runtime.cpu_levels()[:2]:
            with runtime.force_cpu_level(level):
                for threads in (1, 3):
                    tf.set_num_threads(threads)
                    calibrate()
    finally:
        tf.set_num_threads(before)
    expected = 2 * len(runtime.cpu_levels()[:2])
    assert len(measured) == len(list((cache / "tilefuse").iterdir())) == expected


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00" * 50),
    "deep": lambda path: path.write_text("[" * 100_000),
    "a list": lambda path: path.write_text("[1, 2]"),
    "another format": lambda path: change(path, lambda d: d.update(format=99)),
    "another machine": lambda path: change(path, lambda d: d["machine"].update(cpu="another")),
    "another version": lambda path: change(path, lambda d: d["machine"].update(tilefuse="0.0.1")),
    "missing rate": lambda path: change(path, lambda d: d["rates"].pop("call")),
    "negative": lambda path: change(path, lambda d: d["rates"].update(bandwidth=-1.0)),
    "zero": lambda path: change(path, lambda d: d["rates"].update(staging=0)),
    "NaN": lambda path: change(path, lambda d: d["rates"].update(call=math.nan)),
    "infinite": lambda path: change(path, lambda d: d["rates"].update(results=math.inf)),
    "text": lambda path: change(path, lambda d: d["rates"].update(bandwidth="fast")),
    "true": lambda path: change(path, lambda d: d["rates"].update(bandwidth=True)),
    "no curve": lambda path: change(path, lambda d: d["rates"].update(w4=[])),
    "other rows": lambda path: change(path, lambda d: d["rates"]["w4"][0].__setitem__(0, 7)),
    "odd point": lambda path: change(path, lambda d: d["rates"]["w8"].__setitem__(1, [2])),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_ignores_what_is_damaged_or_foreign(damage: str, cache: Path, measured: list[int]) -> None:
    calibrate()
    (file,) = (cache / "tilefuse").iterdir()
    DAMAGE[damage](file)
    again = calibrate()
    assert len(measured) == 2
    if damage != "a folder":
        assert calibrate() == again  # written anew
        assert len(measured) == 2
    assert len(list((cache / "tilefuse").iterdir())) == 1


def test_nowhere_to_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[int]) -> None:
    monkeypatch.delenv("TILEFUSE_CALIBRATE", raising=False)
    blocker = tmp_path / "file"
    blocker.write_text("mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    assert calibrate() != calibrate()
    assert len(measured) == 2
    assert blocker.read_text() == "mine"


def test_a_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[int]) -> None:
    monkeypatch.delenv("TILEFUSE_CALIBRATE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    calibrate()
    assert len(list((tmp_path / "home" / ".cache" / "tilefuse").iterdir())) == 1
    assert not (tmp_path / "relative").exists()


def test_defaults_touch_no_disk(cache: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEFUSE_CALIBRATE", "0")
    assert calibrate() == default_rates(runtime.cpu_level(), tf.get_num_threads())
    assert calibrate().source == "default"
    assert not cache.exists()
    assert not measured
    monkeypatch.setenv("TILEFUSE_CALIBRATE", "yes")
    with pytest.raises(errors.DeviceError, match="TILEFUSE_CALIBRATE is 'yes'"):
        calibrate()


def test_no_memory_to_measure_with(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure() -> Rates:
        raise MemoryError

    monkeypatch.setattr(rates_module, "measure", measure)
    assert calibrate().source == "default"
    assert not cache.exists()


def test_defaults() -> None:
    two, many = default_rates("avx2", 2), default_rates("avx2", 16)
    assert (two.bandwidth, many.bandwidth) == (24e9, 60e9)
    assert two.w4[0] == (1, 170e9)
    assert many.w8[-1] == (128, 16 * 95e9)
    assert default_rates("unknown", 1).w4 == default_rates("portable", 1).w4
    for level in runtime.cpu_levels():
        assert (default_rates(level, 1).w4 != two.w4) or level == "avx2"


def test_measuring(cpu_level: str) -> None:
    found = rates_module.measure()
    assert found.source == "measured"
    for curve in (found.w4, found.w8):
        assert [rows for rows, _ in curve] == list(rates_module._ROWS)
    figures = [found.bandwidth, found.call, found.staging, found.results, *(r for _, r in (*found.w4, *found.w8))]
    assert all(0 < figure < 1e15 for figure in figures)


# --- the device -------------------------------------------------------------------------------------------------------


class FakeNpu:
    """An NPU that counts, and fails as told."""

    def __init__(self) -> None:
        self.calls = self.opened = 0
        self.error: Exception | None = None
        self.open_error: Exception | None = None

    def open(self) -> str:
        self.opened += 1
        if self.open_error is not None:
            raise self.open_error
        return "fake"

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        self.calls += 1
        if self.error is not None:
            y.numpy()[...] = -7  # half a result
            raise self.error
        CpuDevice().matmul(x, layer, y)


class FakeCpu(CpuDevice):
    def __init__(self) -> None:
        self.calls = 0

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        self.calls += 1
        super().matmul(x, layer, y)


FAST_NPU = flat(bandwidth=1e6, operations=1e9)
"""A CPU that takes far longer than the array for a layer of any size."""


class Auto:
    """The device "auto" with both of its devices faked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rates: Rates = FAST_NPU) -> None:
        self.cpu, self.npu = FakeCpu(), FakeNpu()
        self.opened = self.calibrated = 0
        self.open_error: Exception | None = None
        self.rates = rates
        self.device = AutoDevice(self.cpu, self.open, self.calibrate)
        monkeypatch.setitem(runtime._DEVICES, "auto", self.device)

    def open(self) -> FakeNpu:
        self.opened += 1
        if self.open_error is not None:
            raise self.open_error
        return self.npu

    def calibrate(self) -> Rates:
        self.calibrated += 1
        return self.rates


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> Auto:
    return Auto(monkeypatch)


@pytest.fixture
def layer(rng: np.random.Generator) -> PackedLinear:
    return make_layer(rng, 512, 512, W4, bias=True).layer


def product(layer: PackedLinear, m: int = 3, device: str = "auto") -> Any:
    return tf.gemm(np.ones((m, layer.k), F32), layer, device=device)


def test_takes_the_npu(auto: Auto, layer: PackedLinear) -> None:
    np.testing.assert_array_equal(product(layer), product(layer, device="cpu"))
    tf.gemv(np.ones(512, F32), layer, device="auto")
    tf.gemm(np.empty((0, 512), F32), layer, device="auto")  # nothing to send
    assert (auto.npu.calls, auto.cpu.calls, auto.opened, auto.calibrated) == (2, 1, 1, 1)


def test_takes_the_cpu(monkeypatch: pytest.MonkeyPatch, layer: PackedLinear) -> None:
    auto = Auto(monkeypatch, flat(bandwidth=1e15, operations=1e15, call=1e-6))
    for m in (1, 3, 100):
        product(layer, m)
    assert (auto.npu.calls, auto.cpu.calls) == (0, 3)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (errors.NpuUnavailable("no driver"), logging.INFO),
        (errors.NpuError("odd firmware"), logging.WARNING),
        (ImportError("a broken module"), logging.WARNING),
        (OSError("not permitted"), logging.WARNING),
    ],
)
def test_without_an_npu(
    error: Exception, level: int, auto: Auto, layer: PackedLinear, caplog: pytest.LogCaptureFixture
) -> None:
    auto.open_error = error
    with caplog.at_level(logging.DEBUG, "tilefuse"):
        for m in (1, 3, 100):
            np.testing.assert_array_equal(product(layer, m), product(layer, m, "cpu"))
    assert (auto.opened, auto.calibrated, auto.cpu.calls) == (1, 0, 3)
    assert not auto.device.npu_usable
    (record,) = caplog.records
    assert record.levelno == level
    assert type(error).__name__ in record.getMessage()
    assert str(error) in record.getMessage()


@pytest.mark.parametrize(
    ("error", "same", "other_rows", "other_layer"),
    [
        # Whether the NPU is asked again: for the same call, for other rows, for another layer like this one.
        (errors.NpuTimeout("no answer"), False, False, False),
        (errors.NpuUnavailable("gone"), False, False, False),
        (errors.NpuMemoryError("memlock"), False, False, True),
        (errors.PlanError("too large"), False, True, False),
        (errors.ToolchainError("no stream for this shape"), False, True, False),
        (ArtifactsError("no stream for this shape"), False, True, False),
        (errors.QuantizationError("x[0, 0] is NaN"), True, True, True),
    ],
)
def test_falls_back(
    error: Exception,
    same: bool,
    other_rows: bool,
    other_layer: bool,
    auto: Auto,
    rng: np.random.Generator,
    layer: PackedLinear,
    caplog: pytest.LogCaptureFixture,
) -> None:
    twin = make_layer(rng, 512, 512, W4).layer
    auto.npu.error = error
    with caplog.at_level(logging.DEBUG, "tilefuse"):
        np.testing.assert_array_equal(product(layer), product(layer, device="cpu"))
        assert (auto.npu.calls, auto.cpu.calls) == (1, 1)
        for expected, (which, m) in zip(
            (same, other_rows, other_layer), ((layer, 3), (layer, 200), (twin, 3)), strict=True
        ):
            before = auto.npu.calls
            np.testing.assert_array_equal(product(which, m), product(which, m, "cpu"))
            assert auto.npu.calls == before + expected
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (message,) = warnings  # once, however often it failed
    assert type(error).__name__ in message
    assert str(error) in message
    assert "'layer'" in message


def test_opens_what_it_is_given(auto: Auto, layer: PackedLinear, caplog: pytest.LogCaptureFixture) -> None:
    auto.npu.open_error = errors.NpuUnavailable("no driver")
    with caplog.at_level(logging.DEBUG, "tilefuse"):
        for _ in range(3):
            product(layer)
    assert (auto.npu.opened, auto.npu.calls, auto.cpu.calls) == (1, 0, 3)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_other_errors_are_not_hidden(auto: Auto, layer: PackedLinear) -> None:
    auto.npu.error = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        product(layer)


def test_a_named_device_raises(monkeypatch: pytest.MonkeyPatch, layer: PackedLinear) -> None:
    npu = FakeNpu()
    npu.error = errors.NpuTimeout("no answer")
    monkeypatch.setitem(runtime._DEVICES, "npu", npu)
    with pytest.raises(errors.NpuTimeout):
        product(layer, device="npu")


def test_goes_by_the_open_xclbin(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 row of 4096 x 4096: 250.4 us on the NPU, 2.95 ms if it must load the GEMV, 0.9 ms here. 3 rows: 2.7 here."""
    router = Router(lambda: flat(bandwidth=50e9, operations=2 * 4096**2 / 0.9e-3, call=10e-6))
    data = tf._buffers.aligned_empty(SQUARE.nbytes)
    layer = PackedLinear("layer", SQUARE, data)
    gemv, gemm = npu_estimate(SQUARE, 1, FAST_NPU).family, npu_estimate(SQUARE, 3, FAST_NPU).family
    assert gemv != gemm == npu_estimate(SQUARE, 500, FAST_NPU).family
    first = router.on_npu(layer, 1)
    assert first is not None
    assert first.family == gemv
    router.open = gemv
    assert router.on_npu(layer, 1) is not None
    assert router.on_npu(layer, 3) is None  # 2.71 ms against 3.11
    assert router.on_npu(layer, 4) is not None  # 3.61
    router.open = gemm
    assert router.on_npu(layer, 1) is None
    assert router.on_npu(layer, 3) is not None


def test_decides_anew_at_another_level_or_number_of_threads(auto: Auto, layer: PackedLinear) -> None:
    product(layer)
    auto.rates = flat(1e15, 1e15, 1e-6)
    before = tf.get_num_threads()
    try:
        tf.set_num_threads(before + 1)
        product(layer)
    finally:
        tf.set_num_threads(before)
    assert (auto.npu.calls, auto.cpu.calls, auto.calibrated) == (1, 1, 2)
    product(layer)
    assert auto.calibrated == 2  # known from before
    assert auto.npu.calls == 2


def test_threads_decide_once(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    layers = [make_layer(rng, 256, n, W4).layer for n in (128, 128, 192)]
    planned: list[tuple[Layout, int]] = []

    def counted(layout: Layout, m: int, rates: Rates) -> Decision:
        planned.append((layout, m))
        return decide(layout, m, rates)

    monkeypatch.setattr("tilefuse.runtime.route.decide", counted)
    auto, start = Auto(monkeypatch), threading.Barrier(8)
    wrong: list[str] = []

    def work(seed: int) -> None:
        start.wait()
        for i in range(60):
            m, layer = 1 + (seed + i) % 20, layers[(seed + i) % 3]
            if product(layer, m).shape != (m, layer.n):
                wrong.append(f"{seed} {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (auto.opened, auto.calibrated) == (1, 1)
    assert auto.npu.calls + auto.cpu.calls == 8 * 60
    assert len(planned) == len(set(planned)) == 40  # two layouts, 20 numbers of rows; the first two layers share one


def test_default_device_stays_the_cpu(monkeypatch: pytest.MonkeyPatch, auto: Auto, layer: PackedLinear) -> None:
    monkeypatch.delenv("TILEFUSE_DEVICE", raising=False)
    assert tf.default_device() == "cpu"
    monkeypatch.setenv("TILEFUSE_DEVICE", "auto")
    assert tf.default_device() == "auto"
    tf.gemm(np.ones((2, 512), F32), layer)
    assert auto.npu.calls == 1
    monkeypatch.delenv("TILEFUSE_DEVICE")
    try:
        tf.set_default_device("auto")
        assert auto.opened == 1  # naming it opens nothing
        tf.gemm(np.ones((2, 512), F32), layer)
        assert auto.npu.calls == 2
    finally:
        tf.set_default_device(None)
    assert "auto" in runtime.device_names()


def test_import_looks_for_nothing() -> None:
    code = (
        "import sys, tilefuse; tilefuse.set_default_device('auto'); "
        "assert not {'pyxrt', 'tilefuse.plan', 'tilefuse.runtime.rates'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


# --- over the emulated device -----------------------------------------------------------------------------------------


def test_over_the_emulated_device(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """One row as a GEMV, two as a GEMM, within their bounds of the CPU; NaN on the CPU, and the device goes on."""
    with emulated() as device:
        monkeypatch.setitem(runtime._DEVICES, "auto", AutoDevice(CpuDevice(), lambda: device, lambda: FAST_NPU))
        known = make_layer(rng, 512, 512, W4)
        for m in (1, 2):
            x = rng.standard_normal((m, 512)).astype(F32)
            y, exact = tf.gemm(x, known.layer, device="auto"), tf.gemm(x, known.layer, device="reference")
            # bfp16 has 8 bits of significand for the largest of 8 values, results are bfloat16.
            assert (np.abs(y - exact) <= 2.0**-6 * (np.abs(x) @ np.abs(known.weights))).all()
        x[1, 5] = np.nan
        y = tf.gemm(x, known.layer, device="auto")
        assert np.isnan(y[1]).all()
        np.testing.assert_array_equal(y[0], tf.gemm(x, known.layer, device="cpu")[0])
        tf.gemm(np.ones((2, 512), F32), known.layer, device="auto")
        assert device.statistics().dispatches == 3


@pytest.mark.parametrize("fault", ["TIMEOUT", "ABORT", "WEDGED", "BUSY", "NO_MEMORY", "LOCKED_MEMORY", "NO_DRIVER"])
def test_faults_of_the_emulated_device(
    fault: str, monkeypatch: pytest.MonkeyPatch, layer: PackedLinear, caplog: pytest.LogCaptureFixture
) -> None:
    with emulated(fault) as device:
        monkeypatch.setitem(runtime._DEVICES, "auto", AutoDevice(CpuDevice(), lambda: device, lambda: FAST_NPU))
        with caplog.at_level(logging.DEBUG, "tilefuse"):
            for m in (2, 2, 3):
                np.testing.assert_array_equal(product(layer, m), product(layer, m, "cpu"))
        shown = [record for record in caplog.records if record.levelno >= logging.INFO]
        assert len(shown) == 1
        assert "Npu" in shown[0].getMessage()


@contextlib.contextmanager
def emulated(fault: str | None = None) -> Iterator[NpuDevice]:
    """The NPU's device over an emulated XRT, on which every call of the fault's kind fails."""
    pytest.importorskip("greenlet")
    from tilefuse.emulator.artifacts import EmulatedArtifacts
    from tilefuse.emulator.xrt import EmulatedXrt, Fault, Injection

    faults = [] if fault is None else [Injection(Fault[fault], times=None)]
    artifacts = EmulatedArtifacts()
    device = NpuDevice(EmulatedXrt(faults), artifacts, "npu")
    try:
        yield device
    finally:
        device.close()
        artifacts.close()


# --- the command ------------------------------------------------------------------------------------------------------


def shown(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], npu: bool = False
) -> str:
    monkeypatch.setenv("TILEFUSE_CALIBRATE", "0")
    auto = Auto(monkeypatch)
    auto.open_error = None if npu else errors.NpuUnavailable("none here")
    monkeypatch.setattr(runtime, "auto_device", lambda: auto.device)
    assert commands.run(["route", *arguments.split()]) == 0
    return capsys.readouterr().out


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown("512 4096 4096", monkeypatch, capsys)
    assert "modelled; staging default; not usable here: run tilefuse doctor" in out
    assert f"default; {runtime.cpu_level()}" in out
    assert "choice: cpu (npu if it were usable)" in out
    assert "crossovers up to M = 4096: " in out
    assert "with another xclbin open: " in out
    out = shown("512 4096 4096", monkeypatch, capsys, npu=True)
    assert "doctor" not in out
    assert "choice: npu\n" in out


@pytest.mark.parametrize("width", [40, 80])
def test_the_command_drops_no_digits(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "Console", lambda: Console(width=width, force_terminal=True, color_system=None))
    lines = shown("4096 4096 65536", monkeypatch, capsys, npu=True).splitlines()
    rates = default_rates(runtime.cpu_level(), tf.get_num_threads())
    total = npu_estimate(Layout(4096, 65536, 4, 128), 4096, rates).total * 1e3
    assert 100 < total < 10000
    (row,) = [line for line in lines if line.startswith(" npu ") and "+" not in line]
    assert row.split()[-1] == f"{total:,.1f}"
    assert max(map(len, lines[:6])) <= 80
    assert "…" not in "".join(lines)


def test_command_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "5 992 700 --bits 8 --group 32 --zero m16 --columns 4 --json"
    found = json.loads(shown(arguments, monkeypatch, capsys, npu=True))
    layout = Layout(992, 700, 8, 32, ZeroKind.M16, 4)
    rates = default_rates(runtime.cpu_level(), tf.get_num_threads())
    assert found["cpu"]["total"] == cpu_estimate(layout, 5, rates).total
    assert found["npu"]["total"] == npu_estimate(layout, 5, rates).total
    assert found["npu"]["source"] == "modelled"
    assert found["crossovers"][0]["m"] == 1
    assert found["choice"] in ("cpu", "npu")


def test_command_where_the_array_cannot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown("4 128 128 --group 0 --columns 2", monkeypatch, capsys, npu=True)
    assert "g=channel" in out
    assert "the array can't run it: columns = 2" in out
    assert "choice: cpu\n" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("0 4096 4096", "M = 0"),
        ("70000 4096 4096", "M = 70000"),
        ("1 0 4096", "K = 0"),
        ("1 4096 4096 --bits 5", "bits = 5"),
        ("1 4096 4096 --group 17", "group size 17"),
        ("1 4096 4096 --columns 9", "columns = 9"),
    ],
)
def test_command_errors(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEFUSE_CALIBRATE", "0")
    assert commands.run(["route", *arguments.split()]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"tilefuse: {message}")
    assert captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize("arguments", ["x 4096 4096", "1 4096", "1 4096 4096 --zero z9"])
def test_command_usage(arguments: str) -> None:
    assert commands.run(["route", *arguments.split()]) == 2
