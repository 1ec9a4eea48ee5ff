"""benchmarks/array_model.py: the targets that the designs were made for, and the page that it writes."""

from __future__ import annotations

from pathlib import Path

import array_model as benchmark
import emulator_speed
import pytest

from tilefuse import plan
from tilefuse.layout import Layout


def test_the_large_gemm() -> None:
    """2048 x 4096 x 4096 of 4-bit weights: at least 250 products a cycle and core of the whole array, modelled, and
    never more than what the streams and DRAM allow: 108040192 bytes at 47 GB/s are 2298.7 us, 259.5 products."""
    large = benchmark.gemm(2048, 4096, 4096)
    assert 250 <= large.macs <= 259.6
    assert large.busy_cores == 32
    assert large.seconds > large.dram == pytest.approx(108040192 / 47e9)


def test_gains_over_the_baselines() -> None:
    """Published: up to 2.216x (GEMM) and 3.81x (GEMV, whose bytes are 16384 to 4288 a tile)."""
    assert benchmark.gemm_baseline(1024, 1024, 2048).seconds / benchmark.gemm(1024, 1024, 2048).seconds >= 2.2
    assert benchmark.gemv_baseline(4096, 14336).seconds / benchmark.gemv(4096, 14336).seconds >= 3.8
    assert benchmark.gemv(4096, 14336).busy_cores == 32


def test_a_slow_kernel_on_one_row_bounds_a_gemv() -> None:
    """8192 weights at 3.7 a cycle are 2214 cycles, 8 x 32 tiles a core: 315 us at 1.8 GHz, where DRAM needs 187."""
    slow = benchmark.gemv_one_row(4096, 4096, 3.7)
    assert slow.kernels == pytest.approx(8 * 32 * 2214 / 1.8e9, rel=0.01)
    assert slow.seconds > slow.kernels


def test_the_planner_and_the_emulator_agree() -> None:
    """What the planner weighs tilings by is within a fifth of the emulated time, where neither latency nor the command
    processor decides."""
    for layout, m in [(Layout(4096, 4096, 4, 128), 1024), (Layout(2048, 4096, 4, 32), 512)]:
        timed = benchmark.timed(plan.gemm(layout, m))
        assert timed.seconds == pytest.approx(timed.plan.costs.total, rel=0.2)


def test_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "OUTPUT", tmp_path / "docs" / "array.md")
    monkeypatch.setattr(benchmark, "GEMM_SHAPES", [(2048, 4096, 4096)])
    monkeypatch.setattr(benchmark, "GEMV_SHAPES", [(4096, 14336)])
    monkeypatch.setattr(benchmark, "FEW_ROWS", [16])
    assert benchmark.main([]) == 0
    page = (tmp_path / "docs" / "array.md").read_text()
    assert "**Every figure here is modelled**" in page
    assert "| 2048 x 4096 x 4096 | " in page
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["array.md"]


def test_the_emulators_own_speed_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each shape, GEMM or GEMV; how long it takes is no test's business."""
    monkeypatch.setattr(emulator_speed, "SHAPES", [(2, 128, 64, 20.0), (1, 128, 64, 5.0)])
    rows = [line for line in emulator_speed.lines() if "128" in line]
    assert [row.split("|")[1].strip() for row in rows] == ["2 x 128 x 64", "1 x 128 x 64"]
