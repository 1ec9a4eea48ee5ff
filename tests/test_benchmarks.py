"""The benchmarks measure what they say: no times here, only the sums they are made of."""

from __future__ import annotations

import json
from pathlib import Path

import matmul
import measure
import numpy as np
import pytest

from tilefuse import _core

EXACT_BF16_OUTPUT = 2.0**-8
"""Bound on |y - x W| / (|x| |W|) of fp32 accumulation narrowed once to bf16: half a unit in the last of 8 bits of y,
which is at most |x| |W|, with as much again for the accumulation."""


def contender(name: str, log: list[str], weights: np.ndarray, copies: int = 2) -> measure.Contender:
    def call(copy: int):
        def run(x: np.ndarray) -> np.ndarray:
            log.append(f"{name}{copy}")
            return x.astype(np.float64) @ weights

        return run

    calls = [call(copy) for copy in range(copies)]
    return measure.Contender(name, calls, weights.nbytes, lambda x: x, lambda y: y, lambda: weights)


def test_contenders_take_turns_and_each_round_starts_with_another() -> None:
    log: list[str] = []
    weights = np.eye(3)
    pair = [contender(name, log, weights, copies=3) for name in "ab"]
    times = measure.interleave(pair, np.ones((1, 3)), 2, 0.0, lambda: log.append("|"))
    # One call that is not timed and one that is; the copies go round.
    assert log == ["|", "a0", "a1", "b0", "b1", "|", "b2", "b0", "a2", "a0"]
    assert {name: len(samples) for name, samples in times.items()} == {"a": 2, "b": 2}


def test_gate_error_by_hand() -> None:
    x = np.array([[1.0, -2.0]])
    weights = np.array([[3.0, 0.0], [1.0, 0.0]])
    # x W = [1, 0] and |x| |W| = [5, 0]; an output where every term is zero has to be exact.
    assert measure.gate_error(np.array([[1.5, 0.0]]), x, weights) == (pytest.approx(0.1), pytest.approx(0.05))
    assert measure.gate_error(np.array([[1.0, 1e-9]]), x, weights)[0] == np.inf


@pytest.mark.parametrize(("weights", "cache", "copies"), [(10, 48, 20), (192, 48, 2), (193, 48, 2), (1000, 48, 2)])
def test_copies_take_more_than_four_times_the_cache(weights: int, cache: int, copies: int) -> None:
    assert measure.copies_beyond_cache(weights, cache) == copies
    assert copies * weights > 4 * cache


def test_limit_is_the_slower_of_reading_and_computing() -> None:
    limits = measure.Limits([1e9, 2e9, 3e9], {"fp32": [1e11], "bf16-dot": [4e11]})
    assert limits.best_seconds(2_000_000_000, 10) == pytest.approx(1.0)
    assert limits.best_seconds(10, 800_000_000_000) == pytest.approx(2.0)


def test_probes_measure_every_limit() -> None:
    limits = measure.Limits()
    measure.Probes(nbytes=3 << 20, seconds=1e-4).sample(limits)
    assert limits.bandwidth > 0
    assert list(limits.arithmetic) == _core.arithmetic_probes()
    assert limits.peak > 0
    assert _core.ReadProbe(1).nbytes == 2 << 20  # whole huge pages


def test_report_has_a_row_for_each_measurement_and_the_ratios() -> None:
    limits = measure.Limits()

    def sample(here: measure.Limits) -> None:
        here.read.append(1e10)
        here.arithmetic.setdefault("fp32", []).append(1e11)

    names = ["tilefuse W4", "tilefuse W8", "torch int4pack", "torch int8pack", "torch bf16", "torch fp32"]
    contenders = [contender(name, [], np.ones((4, 2))) for name in names]
    rows = matmul.run_case(contenders, np.ones((3, 4)), limits, sample, 2, 0.0)
    assert [(row.shape, row.m, row.name) for row in rows] == [("4x2", 3, name) for name in names]
    assert all(row.error_max == 0 for row in rows)
    assert all(row.gflop_per_s == pytest.approx(2 * 3 * 4 * 2 / row.seconds / 1e9) for row in rows)
    assert len(limits.read) == 2
    ratios = matmul.speed_ratios(rows)
    assert ratios["4x2", 3, "tilefuse W4"] == (
        pytest.approx(rows[2].seconds / rows[0].seconds),
        pytest.approx(rows[4].seconds / rows[0].seconds),
    )
    text = matmul.report(rows, {"CPU": "one"})
    assert "| CPU | one |" in text
    assert sum(line.startswith("| 4x2 |") for line in text.splitlines()) == len(names)


@pytest.mark.parametrize("m", [1, 3])
def test_tilefuse_computes_the_product_of_the_weights_it_is_given(m: int, rng: np.random.Generator) -> None:
    weights = matmul.make_weights(256, 64, rng)
    x = matmul.make_inputs(m, 256, rng)
    for ours in matmul.tilefuse_contenders(weights, cache_bytes=1):
        y = ours.outputs(ours.calls[1](ours.inputs(x)))
        assert y.shape == (m, 64)
        assert measure.gate_error(y, x, ours.weights())[0] < EXACT_BF16_OUTPUT, ours.name
    # 2 x 1 tiles of codes, scales and zero points; the padding tiles are not read.
    assert ours.weight_bytes == 2 * (128 * 64 + 64 * 2 + 64)


@pytest.mark.peers
def test_torch_computes_the_product_of_the_weights_it_is_given(rng: np.random.Generator) -> None:
    pytest.importorskip("torch")
    weights = matmul.make_weights(256, 64, rng)
    x = matmul.make_inputs(3, 256, rng)
    for peer in matmul.torch_contenders(weights, cache_bytes=1):
        y = peer.outputs(peer.calls[1](peer.inputs(x)))
        assert measure.gate_error(y, x, peer.weights())[0] < EXACT_BF16_OUTPUT, peer.name


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(matmul.parse_arguments(["--shapes", "all"]).shapes) == 9
    assert matmul.parse_arguments(["--shapes", "256x64"]).shapes == [(256, 64)]
    assert matmul.parse_arguments([]).output == matmul.OUTPUT
    assert matmul.parse_arguments(["--quick"]).output is None
    for wrong in (["--shapes", "12"], ["--batches", "x"], ["--batches", "0"]):
        with pytest.raises(SystemExit):
            matmul.parse_arguments(wrong)
    assert "--shapes takes K x N" in capsys.readouterr().err


def test_files_are_written_whole(tmp_path: Path) -> None:
    matmul.write_atomically(tmp_path / "new" / "a.json", json.dumps([1]))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]
