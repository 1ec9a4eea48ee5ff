"""The arithmetic of benchmarks/attention.py and attention_accuracy.py, and the process of one library."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import attention_data
import attention_results as results
import numpy as np
import pytest
from attention_page import document
from measure import Limits
from peers import attention
from peers.base import Contender

from tilefuse import routing


def naive(case: attention.Attention, head: int, row: int) -> list[float]:
    """One row of one head, key by key in Python's floats."""
    share, offset = len(case.q) // len(case.k), case.k.shape[1] - case.q.shape[1]
    total, out = 0.0, [0.0] * case.v.shape[2]
    for key in range(row + offset + 1):
        products = zip(case.q[head, row], case.k[head // share, key], strict=True)
        weight = math.exp(sum(float(a) * float(b) for a, b in products) / math.sqrt(case.q.shape[2]))
        total += weight
        out = [have + weight * float(x) for have, x in zip(out, case.v[head // share, key], strict=True)]
    return [x / total for x in out]


@pytest.mark.parametrize(("queries", "keys"), [(20, 20), (3, 20), (1, 20)])
def test_reference_rows(queries: int, keys: int) -> None:
    case = attention.make_attention(4, 2, queries, keys, 8)
    assert case.rows[0] == 0
    assert case.rows[-1] == queries - 1
    for head, (place, row) in itertools.product(range(4), enumerate(case.rows)):
        np.testing.assert_allclose(case.expected[head, place], naive(case, head, row), rtol=0, atol=1e-12)


def test_operations() -> None:
    """4 d for each query and key that it sees."""
    for queries, keys in ((5, 5), (2, 9), (1, 7)):
        pairs = sum(keys - queries + i + 1 for i in range(queries))
        assert attention.operations(3, queries, keys, 8) == 4 * 3 * 8 * pairs
    assert attention.operations(32, 2048, 2048, 128) == 4 * 32 * 128 * 2048 * 2049 // 2


class Exact(attention.AttentionAdapter):
    """The reference, of which the second contender is off by an eighth and the third can't be had."""

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def contenders(self) -> list[Contender]:
        return [Contender(name, "", 16, 16) for name in ("exact", "off", "none")]

    def load(self, contender: Contender, case: attention.Attention) -> attention.Ready:
        if contender.name == "none":
            raise MemoryError("no room")
        rows = np.arange(case.q.shape[1])
        factor = 1.125 if contender.name == "off" else 1.0
        return attention.Ready(lambda: None, lambda: factor * attention.exact_rows(case.q, case.k, case.v, rows))


def test_worker(tmp_path: Path) -> None:
    attention.save_attention(attention.make_attention(2, 1, 30, 40, 8), tmp_path)
    worker = attention.AttentionWorker(Exact())
    assert len(worker.answer({"do": "hello"})["contenders"]) == 3
    for name, error in (("exact", 0.0), ("off", 0.125)):
        assert worker.answer({"do": "load", "folder": str(tmp_path), "name": name}) == {}
        assert worker.answer({"do": "time", "name": name, "at_least": 1e-6})["seconds"] > 0
        checked = worker.answer({"do": "check", "name": name})
        # Results are rounded to bfloat16 first.
        for key in ("mean", "largest"):
            assert checked[key] == pytest.approx(error, abs=(1 + error) * 2**-8)
    assert worker.answer({"do": "load", "folder": str(tmp_path), "name": "none"}) == {"error": "MemoryError: no room"}
    assert worker.answer({"do": "unload"}) == {}
    assert "KeyError" in worker.answer({"do": "time", "name": "exact", "at_least": 0.0})["error"]
    assert "no such request" in worker.answer({"do": "bind"})["error"]


def run_of(seconds: dict[str, list[float]]) -> results.AttentionRun:
    limits = Limits([1e9], {"fp32": [1e9], "bf16-dot": [4e9, 2e9, 3e9], "int8-dot": [9e9]})
    measured = {name: results.Measured(rounds, 1e-3, 2e-3) for name, rounds in seconds.items()}
    contenders = {name: Contender(name, "", 16, 16, ours=name.startswith("tilefuse")) for name in seconds}
    return results.AttentionRun({}, contenders, [results.AttentionCase(2, 1, 100, 100, 8, limits, measured)])


def test_targets_are_ratios_of_fastest_rounds() -> None:
    run = run_of(
        {
            results.BASE: [1.0, 2.0, 1.0],
            results.MOST: [1.0, 1.0, 0.5],
            "zentorch SDPA": [1.5, 2.2, 1.1],
            "torch SDPA": [9.0],
        }
    )
    case = run.cases[0]
    assert results.fastest_peer(run, case) == "zentorch SDPA"
    assert results.times_faster(case, results.MOST, results.BASE) == 2
    assert results.times_faster(case, results.BASE, "torch SDPA") == 9
    assert results.times_faster(case, results.ALL, results.BASE) is None
    found = [(each.target.least, each.value, each.against, each.met) for each in results.outcomes(run)]
    assert found == [(1.2, pytest.approx(1.1), "zentorch SDPA", False), (1.15, 2, results.BASE, True)]
    assert case.rate(results.BASE) == 4 * 2 * 8 * 5050
    assert case.share(results.BASE) == pytest.approx(4 * 2 * 8 * 5050 / 3e9)
    page = document(run, [])
    assert "| all tiles 16-bit: 1.2 times the fastest peer | L = 100 | **missed** | 1.100 | zentorch SDPA |" in page
    assert "| 75 % INT8: 1.15 times all 16-bit | L = 100 | met | 2.000 | tilefuse 16-bit |" in page


def test_runs_merge_and_survive_a_file() -> None:
    first, second = run_of({results.BASE: [1.0]}), run_of({results.BASE: [2.0], "x": [3.0]})
    again = results.from_json(results.to_json(second))
    assert again == second
    first.merge(again)
    assert [case.measured[results.BASE].rounds for case in first.cases] == [[1.0, 2.0]]
    assert first.cases[0].measured["x"].rounds == [3.0]
    assert len(first.cases[0].limits.read) == 2
    assert set(first.contenders) == {results.BASE, "x"}


def test_sums_of_groups() -> None:
    grid = routing.Grid(300, 300, group=2)
    values = np.random.default_rng(0).random((300, 300))
    found = attention_data.group_sums(values, grid)
    assert found.shape == (grid.row_tiles, grid.groups) == (3, 3)
    for m, j in itertools.product(range(3), range(3)):
        part = values[128 * m : 128 * (m + 1), 128 * j : 128 * (j + 1)]
        assert found[m, j] == pytest.approx(part.sum())


def test_mass_and_deviation() -> None:
    """q = 0: every query sees all keys so far alike."""
    accuracy = pytest.importorskip("attention_accuracy")
    length = 256
    v = np.ones((1, length, 8), np.float32)
    operands = attention_data.Operands(np.zeros((2, length, 8), np.float32), v, v)
    np.testing.assert_allclose(operands.exact[0], 1.0)
    # The second row tile's first two key tiles: 128 of the i + 1 keys of query i.
    bits = np.zeros((2, 4), bool)
    bits[1, :2] = True
    routed = routing.Routing.from_bits(bits, routing.Grid(length, length))
    expected = sum(128 / (i + 1) for i in range(128, 256)) / 256
    assert accuracy.mass_in_int8(operands, routed) == pytest.approx(expected)
    by_head = routing.Routing.from_bits(bits[None], routing.Grid(length, length))
    assert accuracy.mass_in_int8(operands, by_head) == pytest.approx(expected)
    assert accuracy.mass_in_int8(operands, routing.one(seq_len=length)) == pytest.approx(1.0)
    out = np.full((2, length, 8), 1.5, np.float32)
    found = accuracy.deviation(operands, out, np.full_like(out, 1.25), routed)
    assert (found.exact, found.base) == (pytest.approx(0.5), 0.25)
    assert found.relative == pytest.approx(0.5)
    assert accuracy.mean_of([found, accuracy.Deviation(1.5, 0.5, 0.75, found.mass)]).exact == pytest.approx(1.0)
    # Sum of p^2 of a group: each of the keys that a query sees has 1 / (i + 1).
    squares = operands.exact[2]
    assert squares[0, 1, 0] == pytest.approx(sum(64 / (i + 1) ** 2 for i in range(128, 256)))
    assert accuracy.oracle(operands, 0.5).heads == 1


def test_growth() -> None:
    accuracy = pytest.importorskip("attention_accuracy")

    def of(*steps: float) -> bool:
        made = [accuracy.Deviation(step, 0.0, 0.0, 0.0) for step in steps]
        by_layout = {("band", coverage): each for coverage, each in zip(accuracy.COVERAGES, made[1:4], strict=True)}
        grown: bool = accuracy.grows(accuracy.Results(by_layout, {"all 16-bit": made[0], "all INT8": made[4]}), "band")
        return grown

    assert of(1, 2, 3, 4, 5)
    assert of(1, 2, 1.95, 4, 5)  # within the slack
    assert not of(1, 2, 1.8, 4, 5)
    assert not of(1, 2, 3, 4, 3)


def test_made_up_keys() -> None:
    """Four channels are constant, the sink draws every query, and what is near weighs more than what is far."""
    operands = attention_data.outliers(512, d=64, heads=1)
    means = np.abs(operands.k[0].astype(np.float64).mean(axis=0))
    assert np.sum(means > 8) == 4
    p = operands.probabilities(0)
    np.testing.assert_allclose(p.sum(axis=1), 1.0)
    near = np.mean([p[i, i - 63 : i + 1].sum() for i in range(256, 512)])
    assert near > 0.5
    assert attention_data.gauss(64, d=8).q.shape == (2, 64, 8)


def test_rotation_keeps_lengths_and_products() -> None:
    """A product of two turned vectors depends on the distance of their positions alone."""
    x = np.random.default_rng(0).standard_normal(8)
    turned = attention_data.rotate(np.tile(x, (10, 1)))
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(x))
    np.testing.assert_allclose(turned[9] @ turned[6], turned[3] @ turned[0])
