"""Prefill and decode: estimates of a whole model, the devices chosen, `tilefuse route --model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_fusion import save

from tilefuse import arch, commands, model_routing, phases
from tilefuse.errors import DeviceError, FormatError
from tilefuse.layout import Layout
from tilefuse.phases import BUCKETS, ModelRouting, Phase, Phases, choose, estimate
from tilefuse.runtime import rates, route
from tilefuse.runtime.estimates import cpu_estimate, npu_estimate
from tilefuse.runtime.rates import default_rates

RATES = default_rates("avx2", 8)
W4 = Layout(4096, 4096, 4, 128)
W8 = Layout(4096, 1024, 8, 128)


def test_a_phase_is_the_sum_of_its_layers() -> None:
    layouts = [W4, W4, W4]
    found = estimate(layouts, 512, RATES)
    assert found.cpu == pytest.approx(3 * cpu_estimate(W4, 512, RATES).total)
    assert found.npu == pytest.approx(3 * npu_estimate(W4, 512, RATES).total)
    assert found.rows == 512


def test_changes_of_the_xclbin_are_counted() -> None:
    """4 bits, 4 bits, 8 bits, 4 bits: two changes."""
    single = sum(npu_estimate(layout, 512, RATES).total for layout in (W4, W4, W8, W4))
    assert estimate([W4, W4, W8, W4], 512, RATES).npu == pytest.approx(single + 2 * arch.SWITCH)


def test_layers_that_the_array_cant_run() -> None:
    odd = Layout(4096, 4096, 4, 96)
    found = estimate([W4, odd], 512, RATES)
    if found.npu is None:
        assert found.refused
        assert found.cheapest == "cpu"
    assert found.cpu == pytest.approx(sum(cpu_estimate(layout, 512, RATES).total for layout in (W4, odd)))


def test_where_the_npu_starts_to_pay() -> None:
    """Its first row costs what a bucket does, so it pays once the CPU needs longer than that."""
    found = phases.model_routing([W4] * 4, RATES, npu_usable=True)
    bucket = 4 * npu_estimate(W4, BUCKETS[0], RATES).total
    rows = found.min_rows
    assert 2 <= rows <= BUCKETS[0]
    assert 4 * cpu_estimate(W4, rows, RATES).total > bucket
    assert rows == 2 or 4 * cpu_estimate(W4, rows // 2, RATES).total <= bucket


@pytest.mark.parametrize(
    ("decode", "min_rows", "usable", "expected"),
    [
        ((1.0, 2.0), 64, True, ("auto", "cpu", 64)),
        ((2.0, 1.0), 64, True, ("auto", "auto", 64)),
        ((1.0, None), 0, True, ("cpu", "cpu", 2)),
        ((2.0, 1.0), 64, False, ("cpu", "cpu", 2)),
    ],
)
def test_choice(
    decode: tuple[float, float | None], min_rows: int, usable: bool, expected: tuple[str, str, int]
) -> None:
    found = ModelRouting(Phase(1, *decode), (), min_rows, usable).phases()
    assert (found.prefill, found.decode, found.min_rows) == expected
    assert found.reason


def test_devices_by_rows() -> None:
    found = Phases("auto", "cpu", 64)
    assert [found.device(rows) for rows in (1, 2, 63, 64, 5000)] == ["cpu", "cpu", "cpu", "auto", "auto"]
    assert found.calls == {("decode", "cpu"): 1, ("prefill", "cpu"): 2, ("prefill", "auto"): 2}


def test_asked_for() -> None:
    found = choose("reference", [W4])
    assert (found.prefill, found.decode) == ("reference", "reference")
    assert choose(None, [W4]).prefill is None
    with pytest.raises(DeviceError, match="there are cpu"):
        choose("gpu", [W4])


def test_auto_without_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route.AutoDevice, "npu_usable", property(lambda self: False))
    found = choose("auto", [W4])
    assert (found.prefill, found.decode) == ("cpu", "cpu")
    assert "no usable NPU" in found.reason


def test_auto_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route.AutoDevice, "npu_usable", property(lambda self: True))
    monkeypatch.setattr(rates, "calibrate", lambda: RATES)
    assert choose("auto", [W4] * 8).prefill == "auto"


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator) -> Path:
    save(tmp_path / "model", rng, "awq-gemm")
    return tmp_path / "model"


def test_route_of_a_model(model: Path) -> None:
    found = model_routing.route_model(model, lambda: RATES, lambda: False)
    assert {(kind.count, kind.name, kind.layout.n) for kind in found.kinds} == {
        (1, "qkv_proj", 160),
        (1, "o_proj", 64),
        (1, "gate_up_proj", 128),
        (1, "down_proj", 64),
    }
    assert found.routing.decode.cpu == pytest.approx(sum(kind.decode.cpu for kind in found.kinds))
    single = model_routing.route_model(model, lambda: RATES, lambda: False, fuse=False)
    assert len(single.kinds) == 7


def test_command(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEFUSE_CALIBRATE", "0")
    assert commands.run(["route", "--model", str(model)]) == 0
    out = capsys.readouterr().out
    for word in ("1 qkv_proj", "128 x 160", "prefill", "decode", 'device="auto" here'):
        assert word in out
    assert all(len(line) <= 80 for line in out.splitlines() if line.startswith((" 1 ", " decode", " prefill")))
    assert commands.run(["route", "--model", str(model), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [phase["rows"] for phase in found["phases"]] == [1, *BUCKETS]
    assert {product["name"] for product in found["products"]} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


def test_command_refuses(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["route", "512", "--model", str(model)]) == 2
    assert "not both" in capsys.readouterr().err
    assert commands.run(["route", "512", "4096"]) == 2
    assert "pass M K N" in capsys.readouterr().err
    (model / "model.safetensors").unlink()
    assert commands.run(["route", "--model", str(model)]) == 1


def test_nothing_quantised(tmp_path: Path) -> None:
    from checkpoints import save as save_checkpoint

    save_checkpoint(tmp_path, {"layer.weight": np.zeros((64, 64), np.float16)}, None, model_type="llama")
    with pytest.raises(FormatError, match="none of its linear layers is quantised"):
        model_routing.route_model(tmp_path, lambda: RATES, lambda: False)
