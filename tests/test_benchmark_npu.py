"""benchmarks/dispatch.py and npu.py: the pages that they write; how long things take is no test's business."""

from __future__ import annotations

from pathlib import Path

import dispatch
import npu
import pytest

from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.xrt import EmulatedXrt, Fault
from tilefuse.errors import NpuError
from tilefuse.runtime import device_names


def test_the_page_of_dispatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "K", 512)
    monkeypatch.setattr(dispatch, "N", 512)
    monkeypatch.setattr(dispatch, "CALLS", {1: 30, 256: 3})
    page = " ".join(dispatch.document().split())
    assert "512 x 512, 4 bits in groups of 128. The target is 60 us" in page
    for row in (
        "| M = 1: a call | float32 |",
        "| M = 256: a call | bfloat16 |",
        "| M = 1: each of 7 calls in a list |",
    ):
        assert row in page
    assert "idle" not in device_names()


def test_the_page_of_the_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the emulated device, whose driver tells of a power mode."""
    monkeypatch.setattr(npu, "SHAPES", ((512, 500),))
    monkeypatch.setattr(npu, "ROWS", (1, 40))
    monkeypatch.setattr(npu, "CALLS", 2)
    module = EmulatedXrt(info={"platform": '{"platforms": [{"status": {"power_mode": "turbo"}}]}'})
    page = npu.document(module, EmulatedArtifacts(tmp_path))
    assert "- NPU Strix, power mode turbo, firmware unknown." in page
    for row in ("| 1 x 512 x 500 | ", "| 40 x 512 x 500 | "):
        (line,) = [line for line in page.splitlines() if line.startswith(row)]
        call, host, dispatched, array, modelled = (int(cell) for cell in line.split("|")[2:-1])
        assert abs(call - host - dispatched - array) <= 2  # each is rounded
        assert modelled > 0
    assert not module.live()


def test_wrong_results_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = EmulatedXrt()
    module.inject(Fault.STALE)
    with pytest.raises(NpuError, match="wrote no results"):
        npu.document(module, EmulatedArtifacts(tmp_path))
    assert not module.live()


def test_no_npu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert npu.main(["--print"]) == 2
    assert 'nothing was measured: device="npu" needs pyxrt' in capsys.readouterr().err
