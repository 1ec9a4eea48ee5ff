"""benchmarks/cpu.py measures what it says: no times here, only the sums they are made of."""

from __future__ import annotations

from pathlib import Path

import call_overhead
import cpu
import cpu_page
import interleave
import measure
import numpy as np
import pytest
import results
import targets
from interleave import Guard, Seat, Turns
from measure import Limits
from peers import accuracy, base, client, tilefuse_packed, weights
from peers.accuracy import Errors
from peers.base import Contender
from results import CaseResult, Measurement, Run

from tilefuse import _core

EXACT_BF16_OUTPUT = 2.0**-8
"""Bound on |y - x W| / (|x| |W|) of fp32 accumulation narrowed once to bf16: half a unit in the last of 8 bits of y,
which is at most |x| |W|, with as much again for the accumulation."""

NO_ERRORS = Errors(0.0, 0.0, 0.0)


class FakePeer:
    """Answers 1 s to every turn, but to one contender's, and notes who was asked."""

    def __init__(self, seconds: dict[str, float], fails: str = "") -> None:
        self.log: list[str] = []
        self.seconds, self.fails = seconds, fails

    def number(self, what: str, key: str, *, name: str, **_: object) -> float:
        assert (what, key) == ("time", "seconds")
        self.log.append(name)
        if name == self.fails and self.log.count(name) == 2:
            raise client.PeerError("no more")
        return self.seconds[name]


def seats_of(peer: FakePeer, **activations: int) -> list[Seat]:
    return [Seat(Contender(name, "W4", 4, bits), peer) for name, bits in activations.items()]  # type: ignore[arg-type]


def test_contenders_take_turns_and_each_round_starts_with_another() -> None:
    peer = FakePeer({"a": 1.0, "b": 2.0, "c": 1.5})
    failed: list[str] = []
    seats = seats_of(peer, a=16, b=16, c=16)
    times, _ = interleave.take_turns(seats, Turns(3, 0.1, 60.0), lambda: not peer.log.append("|"), failed.append)
    # Probes run before the first and the second of three turns.
    assert "".join(peer.log) == "|a|bc" + "|b|ca" + "|c|ab"
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3, "c": [1.5] * 3}
    assert not failed


def test_those_far_behind_in_their_class_and_those_that_fail_have_no_more_turns() -> None:
    peer = FakePeer({"a": 1.0, "slow": 3.5, "other": 9.0, "fails": 1.0}, fails="fails")
    failed: list[str] = []
    seats = seats_of(peer, a=16, slow=16, other=8, fails=16)
    times, _ = interleave.take_turns(seats, Turns(3, 0.1, 60.0), lambda: True, failed.append)
    assert {name: len(rounds) for name, rounds in times.items()} == {"a": 3, "slow": 1, "other": 3}
    assert failed == ["fails: no more"]


def test_a_case_gets_two_rounds_whatever_its_budget() -> None:
    peer = FakePeer({"a": 1.0})
    assert interleave.take_turns(seats_of(peer, a=16), Turns(9, 0.1, 0.0), lambda: True, print)[0] == {"a": [1.0, 1.0]}


def test_disturbed_rounds_are_taken_again_so_many_times_at_most() -> None:
    peer = FakePeer({"a": 1.0})
    answers = iter([True, False, True, True])
    times, _ = interleave.take_turns(seats_of(peer, a=16), Turns(2, 0.1, 60.0), lambda: next(answers), print)
    assert times == {"a": [1.0, 1.0]}
    assert len(peer.log) == 3
    assert interleave.take_turns(seats_of(peer, a=16), Turns(2, 0.1, 60.0), lambda: False, print)[0] == times


def test_reads_are_probed_before_each_turn_of_ours() -> None:
    peer = FakePeer({"a": 1.0, "b": 2.0})
    seats = [*seats_of(peer, a=16), Seat(Contender("b", "W4", 4, 16, ours=True), peer)]  # type: ignore[arg-type]
    probes = iter([3.0, 5.0])
    _, reads = interleave.take_turns(seats, Turns(2, 0.1, 60.0), lambda: True, print, read=lambda: next(probes))
    assert reads == {"b": [3.0, 5.0]}


def test_guard_runs_its_command_while_held(tmp_path: Path) -> None:
    mark = tmp_path / "held"
    guard = Guard(["sh", "-c", 'touch "$0"; "$@"; rm "$0"', str(mark)], seconds=0.0)
    with guard:
        guard.hold()  # is held
        assert mark.exists()
        guard.rest()  # held for longer than nothing
        assert not mark.exists()
    with pytest.raises(SystemExit, match="false"):
        Guard(["false"]).hold()
    with Guard() as nothing:
        nothing.rest()


def test_errors_by_hand() -> None:
    x = np.array([[1.0, -2.0]])
    matrix = np.array([[3.0, 1.0], [0.0, 0.0]])  # [N, K]
    # x W^T = [1, 0] and |x| |W|^T = [5, 0]; an output where every term is zero has to be exact.
    found = accuracy.errors(np.array([[1.5, 0.0]]), x, matrix)
    assert found == Errors(pytest.approx(0.5), pytest.approx(0.1), pytest.approx(0.05))
    assert accuracy.errors(np.array([[1.0, 1e-9]]), x, matrix).gate_max == np.inf
    assert accuracy.errors(np.array([[np.nan, 0.0]]), x, matrix) == Errors(np.inf, np.inf, np.inf)


@pytest.mark.parametrize(("nbytes", "cache", "copies"), [(10, 48, 20), (192, 48, 2), (193, 48, 2), (1000, 48, 2)])
def test_copies_take_more_than_four_times_the_cache(nbytes: int, cache: int, copies: int) -> None:
    assert base.copies_beyond_cache(nbytes, cache) == copies
    assert copies * nbytes > 4 * cache


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    import ml_dtypes

    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    values[:2] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # halfway
    assert np.array_equal(base.round_bf16(values), values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_limits() -> None:
    limits = Limits([1e9, 2e9, 3e9], {"fp32": [1e11], "bf16-dot": [4e11], "int8-dot": [9e11]})
    assert limits.bandwidth == 2e9
    assert limits.peak(16) == (4e11, "bf16-dot")
    assert limits.peak(8) == (9e11, "int8-dot")
    assert Limits([1.0], {"fp32": [1e11]}).peak(8) == (1e11, "fp32")


def test_probes_measure_every_limit() -> None:
    limits = Limits()
    measure.Probes(nbytes=3 << 20, seconds=1e-4).sample(limits)
    assert limits.bandwidth > 0
    assert list(limits.arithmetic) == _core.arithmetic_probes() + _core.integer_probes()
    assert limits.peak(16)[0] > 0
    assert _core.ReadProbe(1).nbytes == 2 << 20  # whole huge pages


# --- weights ---------------------------------------------------------------------------------------------------------


def test_quantisation_by_hand() -> None:
    dense = np.array([[-0.5, 1.0, 0.25, 0.0, 2.0, 2.0, 3.75, 0.0]], np.float32)
    codes = weights.quantize(dense, 4, 4, symmetric=False)
    # 1.5 / 15 = 0.1 cut to 8 significant bits, 204 / 2048; 3.75 / 15 is exact.
    assert codes.scales.tolist() == [[204 / 2048, 0.25]]
    assert codes.zeros.tolist() == [[5, 0]]
    assert codes.codes.tolist() == [[0, 15, 8, 5, 8, 8, 15, 0]]
    assert codes.dequantized()[0, 4:].tolist() == [2.0, 2.0, 3.75, 0.0]
    symmetric = weights.quantize(np.array([[-127.0, 1.0]], np.float32), 8, 2, symmetric=True)
    assert (symmetric.scales.item(), symmetric.codes.tolist(), symmetric.zeros.item()) == (1.0, [[1, 129]], 128)


def test_codes_are_within_half_a_step_of_the_dense_weights_and_files_keep_them(tmp_path: Path) -> None:
    case = weights.make_case(256, 300, 3)
    weights.save_case(case, tmp_path)
    kept = weights.open_case(tmp_path)
    assert np.array_equal(kept.x, case.x)
    assert set(kept.schemes) == {"w4g128", "w4g32", "w8g128", "w8"}
    for name, codes in case.schemes.items():
        again = kept.schemes[name]
        assert (again.bits, again.group, again.k, again.n) == (codes.bits, codes.group, 256, 300)
        assert np.array_equal(again.dequantized(), codes.dequantized())
        moved = codes.rolled(7)
        assert np.array_equal(moved.dequantized()[7:], codes.dequantized()[:-7])
    # The 8-bit weights are the dense ones to within half of their steps, so 4-bit ones are to within half of both.
    w4, w8 = case.schemes["w4g128"], case.schemes["w8g128"]
    step = np.repeat(w4.scales, 128, axis=1)
    # Scales are cut short: codes at the ends of the range are up to a 127th of 15 steps further away.
    assert (np.abs(w4.dequantized() - w8.dequantized()) <= (0.5 + 15 / 127) * step + w8.scales.max()).all()


def test_nibbles() -> None:
    assert base.nibbles(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("m", [1, 3])
def test_tilefuse_computes_the_product_of_the_weights_it_is_given(m: int) -> None:
    case = weights.make_case(256, 64, m)
    ours = tilefuse_packed.adapter()
    for contender in ours.contenders():
        if contender.activations == 8:
            continue
        product = ours.load(contender, case, cache_bytes=1)
        bound = product.bind(case.x)
        y = bound.output()
        assert y.shape == (m, 64)
        own = product.dequantized(np.arange(64))
        assert accuracy.errors(y, case.x, own).gate_max < EXACT_BF16_OUTPUT, contender.name
        # Another copy holds the same output channels, moved on by one.
        assert np.array_equal(np.roll(y, 1, axis=1), np.atleast_2d(np.asarray(bound.calls[1](), np.float64)))
        # 2 x 1 tiles of codes, scales and zero points; the padding tiles are not read.
        if contender.name == "tilefuse W8 g128":
            assert product.weight_bytes == 2 * (128 * 64 + 64 * 2 + 64)


@pytest.mark.peers
def test_torch_computes_the_product_of_the_weights_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from peers import torch_aten

    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    case = weights.make_case(256, 64, 3)
    with torch.inference_mode():
        theirs = torch_aten.adapter()
        for contender in theirs.contenders():
            product = theirs.load(contender, case, cache_bytes=1)
            y = product.bind(case.x).output()
            own = product.dequantized(np.arange(64))
            assert accuracy.errors(y, case.x, own).gate_max < EXACT_BF16_OUTPUT, contender.name
    torch.set_grad_enabled(True)


# --- figures and the page -------------------------------------------------------------------------------------------


def made_up() -> Run:
    """One shape at M = 1 and 64: ours, two 16-bit peers, an 8-bit one; DRAM at 10 GB/s, 100 and 200 GOP/s."""
    contenders = [
        Contender("tilefuse W4 g128", "W4 g128", 4, 16, ours=True),
        Contender("tilefuse W4 g128 int8", "W4 g128", 4, 8, ours=True),
        Contender("near", "W4", 4, 16),
        Contender("far", "W4", 4, 16),
        Contender("eight", "W4", 4, 8),
    ]
    limits = Limits([1e10], {"fp32": [5e10], "bf16-dot": [1e11], "int8-dot": [2e11]})
    seconds = {
        1: {"tilefuse W4 g128": [1e-3, 2e-3, 4e-3], "near": [2e-3, 5e-3, 4e-3], "far": [9e-3], "eight": [1e-3] * 3},
        64: {"tilefuse W4 g128": [8e-3], "tilefuse W4 g128 int8": [5e-3], "near": [9e-3], "eight": [6e-3]},
    }
    cases = [
        CaseResult(2048, 4096, m, limits, {name: Measurement(each, 10_000_000, NO_ERRORS) for name, each in of.items()})
        for m, of in seconds.items()
    ]
    return Run({"CPU": "one"}, {each.name: each for each in contenders}, cases, ["not installed: x"])


def test_ratios_are_medians_over_rounds_to_the_fastest_of_the_class() -> None:
    run = made_up()
    case = run.cases[0]
    w4, any4, int8 = results.COMPARISONS[:3]
    assert results.compare(run, case, w4) == (pytest.approx(2.0), "near")  # of 2, 2.5, 1
    assert results.compare(run, case, any4) == (pytest.approx(0.5), "eight")  # of 1, 0.5, 0.25
    assert results.compare(run, case, int8) is None
    assert results.compare(run, run.cases[1], int8) == (pytest.approx(1.2), "eight")


def test_share_is_of_the_limit_that_binds() -> None:
    run = made_up()
    # 10 MB at 10 GB/s take 1 ms, 2 x 2048 x 4096 operations at 100 GOP/s 0.17 ms.
    assert results.share(run, run.cases[0], "tilefuse W4 g128") == (pytest.approx(1e-3 / 2e-3), "DRAM")
    operations = 2 * 64 * 2048 * 4096
    assert results.share(run, run.cases[1], "tilefuse W4 g128") == (pytest.approx(operations / 1e11 / 8e-3), "bf16-dot")
    assert results.share(run, run.cases[1], "tilefuse W4 g128 int8") == (
        pytest.approx(operations / 2e11 / 5e-3),
        "int8-dot",
    )


def test_share_of_the_bandwidth_is_of_the_reads_before() -> None:
    run = made_up()
    # 10 MB in 1, 2 and 4 ms: 10, 5 and 2.5 GB/s.
    ours = Measurement([1e-3, 2e-3, 4e-3], 10_000_000, NO_ERRORS, [20e9, 5e9, 5e9])
    run.cases[0].measured["tilefuse W4 g128"] = ours
    assert results.share(run, run.cases[0], "tilefuse W4 g128") == (pytest.approx(0.5), "DRAM")
    assert results.from_json(results.to_json(run)) == run


def test_what_became_of_targets() -> None:
    run = made_up()
    found = {target.text: targets.verdict(run, target) for target in targets.TARGETS}
    dram, ratio = found["M = 1: 0.95 of the DRAM bandwidth"], found[targets.TARGETS[1].text]
    assert dram is not None
    assert (dram.worst, dram.met, dram.cases) == (pytest.approx(0.5), 0, 1)
    assert dram.where == "2048x4096, M = 1, DRAM"
    assert ratio is not None
    assert (ratio.best, ratio.met) == (pytest.approx(2.0), 1)
    int8 = next(each for text, each in found.items() if "1.15 times" in text)
    assert int8 is not None
    assert int8.mean == pytest.approx(1.2)
    assert sum(each is None for each in found.values()) == 6  # nothing of W8 and AVX2, and no M between


def test_no_dip_is_told_from_rates_of_two_cases() -> None:
    run = made_up()
    limits = run.cases[0].limits
    for m, seconds in ((100, 1.0), (128, 1.28 * 0.9)):
        taken = {targets.W4: Measurement([seconds], 1, NO_ERRORS)}
        run.cases.append(CaseResult(2048, 4096, m, limits, taken))
    found = targets.verdict(run, next(each for each in targets.TARGETS if "dip" in each.text))
    assert found is not None
    assert found.worst == pytest.approx(0.9)


def test_results_survive_a_file_and_later_ones_replace_earlier() -> None:
    run = made_up()
    again = results.from_json(results.to_json(run))
    assert again == run
    later = made_up()
    later.cases = [CaseResult(2048, 4096, 64, later.cases[0].limits, {})]
    again.merge(later)
    assert [(case.m, len(case.measured)) for case in again.cases] == [(1, 4), (64, 0)]
    assert again.failures == ["not installed: x"]
    with pytest.raises((KeyError, TypeError, ValueError)):
        results.from_json("{}")


def test_page_has_every_figure() -> None:
    run = made_up()
    run.overhead = {"call": 30e-6, "kernel": 27e-6, "overhead": 3e-6}
    text = cpu_page.document(run, [("a plot", "../images/a.svg")])
    assert "- CPU: one." in text
    assert "![a plot](../images/a.svg)" in text
    assert "| 2048x4096 | 2.00 near | 1.12 near |" in text
    assert "| 2048x4096 | **0.50** eight |" in text
    assert "| 2048x4096 | **50%** DRAM | 134% bf16-dot |" in text
    assert "| near | 4000 (2.5) |" in text
    assert "| near | 9000 (119) |" in text
    assert "27.0 and the way to it from Python 3.0" in " ".join(text.split())
    assert "- not installed: x" in text
    assert "| far | W4 |  | 16 | 0.0e+00 |" in text


def test_page_of_nothing() -> None:
    assert "## Targets" in cpu_page.document(Run({}, {}), [])


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import cpu_plots

    written = cpu_plots.write_plots(made_up(), tmp_path)
    assert [path.name for _, path in written] == ["cpu-decode.svg", "cpu-rows.svg"]
    first = (tmp_path / "cpu-rows.svg").read_bytes()
    cpu_plots.write_plots(made_up(), tmp_path)
    assert (tmp_path / "cpu-rows.svg").read_bytes() == first
    assert cpu_plots.write_plots(Run({}, {}), tmp_path) == []
    many = made_up()
    many.cases[:] = [case for case in many.cases if case.m > 1]
    assert many.cases
    assert "cpu-decode.svg" not in [path.name for _, path in cpu_plots.write_plots(many, tmp_path)]


def test_call_overhead_is_what_the_kernel_leaves() -> None:
    found = call_overhead.call_overhead(calls=3, rounds=1)
    assert found["overhead"] == pytest.approx(found["call"] - found["kernel"])
    assert found["call"] > 0


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(cpu.parse_arguments(["--shapes", "all"]).shapes) == 9
    assert cpu.parse_arguments(["--shapes", "256x64", "--batches", "all"]).shapes == [(256, 64)]
    assert cpu.parse_arguments([]).output == cpu.OUTPUT
    assert cpu.parse_arguments(["--quick"]).output is None
    assert cpu.parse_arguments(["--peer-python", "torch=/a/b=c"]).peer_python == {"torch": "/a/b=c"}
    for wrong in (
        ["--shapes", "12"],
        ["--shapes", "100x64"],
        ["--batches", "x"],
        ["--batches", "0"],
        ["--peer-python", "torch"],
        ["--peer-python", "no=such"],
        ["--report-only"],
    ):
        with pytest.raises(SystemExit):
            cpu.parse_arguments(wrong)
    assert "--shapes takes K x N" in capsys.readouterr().err


def test_reports_without_measuring(tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    kept.write_text(results.to_json(made_up()))
    page = tmp_path / "new" / "cpu.md"
    command = ["--report-only", "--merge", str(kept), "--output", str(page), "--images", str(tmp_path / "img")]
    assert cpu.main(command) == 0
    assert "| 2048x4096 | 2.00 near | 1.12 near |" in page.read_text()
