"""compat="release": torch's permutation, and the coverages that are known of the authors' maps."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tilefuse import routing
from tilefuse.routing import Routing
from tilefuse.tilemix import release
from tilefuse.tilemix.grid import Grid

QUARTERS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))


def test_permutation_by_hand() -> None:
    # torch.randperm(n, generator=torch.Generator().manual_seed(42)), torch 2.14
    assert release.randperm(5, 42) == [2, 4, 3, 0, 1]
    assert release.randperm(10, 42) == [2, 6, 1, 8, 4, 5, 0, 9, 3, 7]
    assert release.randperm(1, 42) == [0]
    assert release.randperm(0, 42) == []


@pytest.mark.peers
@pytest.mark.parametrize("n", [0, 1, 2, 5, 10, 100, 623, 625, 2080, 33000])
def test_permutation_is_torchs(n: int) -> None:
    torch = pytest.importorskip("torch")
    for seed in (42, 0, 2**32 - 1):
        want = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
        assert release.randperm(n, seed) == want


def test_coverages_at_256_tokens() -> None:
    """Tiles of 64 x 64: 10 of them; rounding to even leaves 2, 5 and 8, and the cells say which."""
    grid = Grid(256, 256, block_m=64)
    found = [Routing.from_bits(release.sptrans_bits(grid, coverage), grid) for coverage in QUARTERS]
    assert [made.coverage() for made in found] == [0.2, 0.5, 0.8]
    assert [round(100 * made.coverage("cell"), 1) for made in found] == [18.8, 56.1, 75.1]


@pytest.mark.parametrize(
    ("key_len", "least", "most"),
    [(512, 0.30, 0.33), (1024, 0.39, 0.41), (2048, 0.44, 0.46), (4096, 0.47, 0.48), (4160, 0, 0), (16384, 0, 0)],
)
def test_what_the_pattern_itself_leaves_to_int8(key_len: int, least: float, most: float) -> None:
    """Above 4096 keys every group of two tiles and more holds a summary token."""
    grid = routing.zero(seq_len=key_len).grid
    pattern = Routing.from_bits(~release._pattern(grid), grid)
    assert least <= round(pattern.coverage(), 2) <= most


@pytest.mark.parametrize("key_len", [1, 100, 255, 1000, 4096, 5000, 16384])
def test_coverage_is_met(key_len: int) -> None:
    for coverage in (Fraction(0), *QUARTERS, Fraction(1)):
        made = routing.sptrans(coverage, seq_len=key_len, compat="release")
        total = int(made.grid.weights().sum())
        covered = int((made.bits() * made.grid.weights()).sum())
        assert abs(covered - coverage * total) <= Fraction(made.grid.group + 1, 2)
        assert not made.bits()[~made.grid.legal()].any()


def test_maps_follow_the_words_and_lengths_asked_for() -> None:
    made = routing.sptrans(0.5, seq_len=16384, compat="release", words=4)
    assert made.words.shape == (128, 4)
    assert made.grid.group == 1
    assert made.name == "sptrans 0.5 (release)"
    for key_len, query_len in ((1000, 100), (100, 300)):
        made = routing.sptrans(0.5, seq_len=key_len, query_len=query_len, compat="release")
        assert not made.bits()[~made.grid.legal()].any()
        assert made.coverage() == pytest.approx(0.5, abs=1.1 / made.grid.weights().sum())


def test_the_pattern_at_1000_tokens_by_hand() -> None:
    """Stride 128, tails of 32: a row tile keeps its own two groups of 64 keys, and the second of each stride before."""
    grid = Grid(1000, 1000)
    pattern = release._pattern(grid)
    for m in range(8):
        want = np.array([j in (2 * m, 2 * m + 1) or (j % 2 == 1 and j < 2 * m) for j in range(16)])
        np.testing.assert_array_equal(pattern[m], want)
