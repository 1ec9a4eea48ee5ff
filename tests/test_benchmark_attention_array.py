"""benchmarks/attention_array.py: modelled times against what the bytes and the kernels need, and the page."""

from __future__ import annotations

from pathlib import Path

import attention_array as benchmark
import pytest


@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(8, 2, 128), (8, 2, 64), (8, 8, 64)])
def test_times_are_what_the_slowest_part_takes(heads: int, kv_heads: int, d: int) -> None:
    """Never less than a part alone, and with few query tiles a column not twice the planner's estimate."""
    found = benchmark.timed(1024, heads, kv_heads, d, "local_sink75")
    costs, seconds = found.plan.costs, found.report.array_seconds
    assert seconds > max(found.kernels, costs.kv_stream, costs.dram)
    assert costs.total < seconds < 1.6 * costs.total
    int8, wide = found.plan.counts
    # 8 heads, 8 query tiles: 2, 4, ... 16 key tiles each.
    assert int8 + wide == 8 * 72
    objects = 3 * int8 + 4 * wide
    assert sum(found.plan.kv_bytes) == objects // found.plan.configuration.heads * (72 * d + 64)


def test_int8_tiles_take_less_time() -> None:
    times = [benchmark.timed(1024, 8, 2, 128, name).report.array_seconds for name in ("zero", "local_sink75", "one")]
    assert times[0] > times[1] > times[2]
    # Four objects to three: no more than their bytes say.
    assert times[0] / times[2] < 4 / 3


def test_the_page_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "OUTPUT", tmp_path / "docs" / "attention-array.md")
    monkeypatch.setattr(benchmark, "MODELS", {"Llama-3-8B": (8, 2, 128)})
    monkeypatch.setattr(benchmark, "LENGTHS", (256,))
    monkeypatch.setattr(benchmark, "ESTIMATED", (512,))
    assert benchmark.main([]) == 0
    text = benchmark.OUTPUT.read_text()
    assert "Every figure here is modelled" in text
    assert text.count("| Llama-3-8B |") == 4 + 2
