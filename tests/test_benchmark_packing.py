"""benchmarks/packing.py and loading.py measure what they say: no times here, only the sums they are made of."""

from __future__ import annotations

import sys
from pathlib import Path

import loading
import numpy as np
import packing
import pytest
from conftest import SANITIZED
from loading import State
from made_checkpoints import AWQ, FORMATS, write_checkpoint
from packing import Found

import tilefuse as tf

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_made_checkpoints_are_read_as_their_format(tmp_path: Path) -> None:
    for form, expected in zip(FORMATS, ("awq-gemm", "gptq", "gptq", "pack-quantized"), strict=True):
        checkpoint = tf.open_checkpoint(write_checkpoint(tmp_path / form, form, [(256, 128), (512, 64)]).parent)
        first, second = checkpoint.linears()
        assert (first.k, first.n, first.bits, first.group) == (256, 128, 4, 128)
        assert (second.k, second.n) == (512, 64)
        assert expected in first.format
        assert (checkpoint.linear(first.name).perm is None) == ("order" not in form)


def test_the_page_of_packing_has_rates_of_the_file_and_the_worst_memory() -> None:
    rates = {"copy": 8e9, "one": 2e9, "new": 1.5e9, "all": 3e9}
    found = {form: Found(rates, 0.25, 61_000_000, 20_000_000, 21_000_000) for form in FORMATS}
    found["GPTQ"] = Found(rates, 0.25, 61_000_000, 20_000_000, 30_000_000)
    page = packing.page(found)
    assert "| AutoAWQ gemm | 2.00 | 1.50 | 3.00 | 8.00 | 0.25 |" in page
    assert "| GPTQ | 61.0 | 20.0 | 30.0 | 1.50 |" in page
    assert "it is 1.50 at most" in " ".join(page.split())


@linux
@pytest.mark.skipif(SANITIZED, reason="the sanitizers' own memory counts")
def test_packing_is_measured(tmp_path: Path) -> None:
    found = packing.measure(tmp_path, rounds=1, shapes=[(512, 512)])
    assert set(found) == set(FORMATS)
    assert found[AWQ].tensor_bytes == 512 * 512 // 2
    assert all(rate > 0 for each in found.values() for rate in each.rates.values())
    assert not list(tmp_path.glob("packed*"))


@linux
def test_peak_memory_is_at_least_the_packed_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", AWQ, [(4096, 4096)])
    peak = packing.peak_memory(tmp_path / "model", tmp_path / "packed")
    assert peak >= 4096 * 4096 // 2  # the codes alone


@linux
def test_loading_is_measured(tmp_path: Path) -> None:
    states, reads, nbytes = loading.measure(tmp_path, shapes=[(512, 512)], files=2, rounds=1)
    assert nbytes == 4 * 8 * 4288  # tiles of 128 x 64
    assert len(reads) == 1
    for state in states:
        assert len(state.first) == len(state.layers) == 2
        assert [len(turn) for turn in state.rates] == [2]
        assert all(0 <= share <= 1 for share in state.huge)
        for layers in state.layers:
            np.testing.assert_array_equal(layers[0].data, states[-1].layers[0][0].data)


def test_the_page_of_loading_compares_within_rounds() -> None:
    def state(title: str, rates: list[list[float]]) -> State:
        return State(title, lambda *_: None, lambda _: [], [[], []], [0.1, 0.3], [0.0, 0.5], rates)

    slow = state("mapped", [[10e9, 20e9], [20e9, 40e9]])
    best = state("copied", [[20e9, 40e9], [40e9, 80e9]])  # twice as fast in every round
    page = loading.page([slow, best], [50e9], 1000)
    assert "| mapped | 0% to 50% | 20.0 | 15.0 to 30.0 | 0.50 | 0.20 |" in page
    assert "| copied | 0% to 50% | 40.0 | 30.0 to 60.0 | 1.00 | 0.20 |" in page
