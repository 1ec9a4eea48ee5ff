"""benchmarks/microkernels.py: the targets that the kernels were written for, and the page that it writes."""

from __future__ import annotations

import re
from pathlib import Path

import microkernels as benchmark
import numpy as np
import pytest

from tilefuse.emulator import kernels
from tilefuse.emulator.kernels import PIPELINE_FILL, Slots


def test_gemv_targets() -> None:
    """4-bit GEMV: at least 6 weights a cycle, modelled, with everything that a tile needs (published: 3.7)."""
    for kernel in benchmark.all_kernels("gemv"):
        if kernel.bits == 4 and kernel.path == "mantissa":
            cycles = benchmark.cost(kernel.name).cycles + benchmark.cost(kernel.name, "prepare").cycles
            assert benchmark.WEIGHTS / cycles > 3 * 6
            assert benchmark.l1_bytes(kernel) < 16 * 1024


def test_gemm_target() -> None:
    """The best 4-bit GEMM on 64x128x64: at least 300 products a cycle, modelled, preparation included."""
    fastest = min(benchmark.gemm_cycles(k) for k in benchmark.all_kernels("gemm") if k.bits == 4 and k.m == 64)
    assert benchmark.MACS / fastest >= 300


def test_band_target() -> None:
    """4-bit GEMM of bfp16 activations, groups of 128: at least 300 products a cycle over four bands of 16 rows, for one
    tile and for two; the stream of activations lets a core do 228 and 455 (131072 products for 2304 bytes at 4 a
    cycle)."""
    for kernel in benchmark.all_kernels("gemm", "bfp16"):
        if (kernel.bits, kernel.group, kernel.path) == (4, 128, "mantissa"):
            assert benchmark.MACS * kernel.tiles / benchmark.gemm_cycles(kernel) >= 300
    rows = {row.split("`")[1]: row.split(" | ")[-1] for row in benchmark.band_table().splitlines()[2:]}
    assert rows["gemm_bfp16_w4g128_mantissa_16x128x64"] == "228 |"
    assert rows["gemm_bfp16_w4g128_mantissa_16x128x128"] == "455 |"


def test_attention_figures(repository: Path) -> None:
    """docs/kernels.md has the counts; INT8 scores are worth a fifth of a tile, and all of it more than a seventh of the
    multiplier's peak."""
    page = (repository / "docs" / "kernels.md").read_text()
    for d in (64, 128):
        products = 2 * 32 * 64 * d
        cycles = {
            int8: sum(c.cycles for c in benchmark.attention_tile(d, int8=int8).values()) for int8 in (True, False)
        }
        first = sum(c.cycles for c in benchmark.attention_tile(d, int8=True, grown=True).values())
        (row,) = [line for line in page.splitlines() if line.startswith(f"| d = {d} |")]
        numbers = [int(number) for number in re.findall(r"\d+", row.split("|", 2)[2])]
        shares = [value for n in cycles.values() for value in (n, products / n, 100 * products / n / benchmark.PEAK)]
        streams = [objects * (72 * d + 64) // 4 for objects in (3, 4)]
        assert numbers == [round(value) for value in shares] + [first, *streams]
        assert cycles[False] > 1.2 * cycles[True]
        assert products / cycles[False] > benchmark.PEAK / 7


def test_inner_loop_is_what_the_source_says() -> None:
    """gemv_bf16_w4.cc: a k block is 4 loads, 4 unpacks, a pop of two loads and 4 multiplications, so 5 cycles."""
    kernel = kernels.get("gemv_bf16_w4g128_mantissa_128x64")
    arrays = [argument.copy_of(np.ones(argument.shape)) for argument in kernel.arguments]
    dots = kernel.entry_points[""].count(*arrays)["dots"]
    assert (dots.load, dots.ldb, dots.vec, dots.entries) == (16 * 6, 16 * 4, 16 * 4, 1)
    assert dots.bound == 16 * 5


def test_busiest_slot() -> None:
    assert benchmark.busiest_slot(Slots(load=5, ldb=2, vec=3)) == "loads"
    assert benchmark.busiest_slot(Slots(load=5, ldb=2, vec=4)) == "VEC"
    assert benchmark.busiest_slot(Slots(ldb=9, mv=8)) == "LDB"
    total = benchmark.add([Slots(load=1, st=2, entries=1), Slots(load=3, mv=4, entries=2)])
    assert (total.load, total.st, total.mv, total.cycles) == (4, 2, 4, 4 + 3 * PIPELINE_FILL)


def test_page_is_labelled_and_lists_every_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "OUTPUT", tmp_path / "docs" / "kernels.md")
    assert benchmark.main([]) == 0
    page = (tmp_path / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "docs").iterdir()] == ["kernels.md"]
    assert "**Every figure here is modelled**" in page
    assert all(f"| `{name}` |" in page for name in kernels.names())
    assert benchmark.main(["--print"]) == 0
    assert capsys.readouterr().out == page
