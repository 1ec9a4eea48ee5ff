"""Grids against masks counted score by score; maps: packing, coverage, chunks of a context."""

from __future__ import annotations

import numpy as np
import oracle_routing
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilefuse import routing
from tilefuse.errors import RoutingError
from tilefuse.routing import Routing
from tilefuse.tilemix.grid import Grid


@settings(max_examples=100, deadline=None)
@given(
    key_len=st.integers(0, 90),
    query_len=st.integers(0, 90),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 100)),
    group=st.integers(1, 4),
    blocks=st.sampled_from([(32, 16), (16, 16), (16, 32)]),
)
def test_grids_count_what_the_masks_leave(
    key_len: int, query_len: int, causal: bool, window: int | None, group: int, blocks: tuple[int, int]
) -> None:
    block_m, block_n = blocks
    grid = Grid(query_len, key_len, causal=causal, window=window, group=group, block_m=block_m, block_n=block_n)
    want = oracle_routing.tiles(oracle_routing.visible(query_len, key_len, causal, window), block_m, block_n, group)
    np.testing.assert_array_equal(grid.weights(), want.weights)
    np.testing.assert_array_equal(grid.cells(), want.cells)
    np.testing.assert_array_equal(grid.legal(), want.weights > 0)
    np.testing.assert_array_equal(grid.stop - grid.first, want.weights.sum(axis=1))


def test_executed_tiles_by_hand() -> None:
    grid = Grid(300, 500, causal=True)  # queries at positions 200 to 499
    assert (grid.offset, grid.row_tiles, grid.key_tiles) == (200, 3, 8)
    assert grid.stop.tolist() == [6, 8, 8]  # up to positions 327, 455, 499
    assert grid.first.tolist() == [0, 0, 0]
    assert Grid(300, 500, window=100).first.tolist() == [1, 3, 5]  # from keys 101, 229, 357
    assert Grid(300, 200).stop.tolist() == [1, 3, 4]  # queries 0 to 99 see no key
    assert Grid(200, 100, group=2).stop.tolist() == [1, 2]
    assert Grid(256, 100).stop.tolist() == [0, 2]
    assert Grid(256, 100).own.tolist() == [-1, 1]
    assert Grid(300, 500, causal=False).stop.tolist() == [8, 8, 8]
    assert Grid(1000, 1000).weights().sum() == 72


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_bits_survive_packing(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 20000))
    grid = Grid(data.draw(st.integers(1, 600)), keys, causal=False, group=data.draw(st.integers(1, 3)))
    heads = data.draw(st.sampled_from([None, 1, 3]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    bits = rng.random((*([] if heads is None else [heads]), grid.row_tiles, grid.groups)) < 0.5
    made = Routing.from_bits(bits, grid)
    np.testing.assert_array_equal(made.bits(), bits)
    assert made.heads == heads
    assert made.words.shape[-1] == -(-grid.groups // 64)
    m, j = grid.row_tiles - 1, data.draw(st.integers(0, grid.groups - 1))
    assert int(made.words[..., m, j >> 6].flat[0]) >> (j & 63) & 1 == bits[..., m, j].flat[0]


def test_bits_beyond_the_diagonal_are_dropped() -> None:
    made = Routing.from_bits(np.ones((3, 5), bool), Grid(300, 300))
    assert made.words.tolist() == [[0b11], [0b1111], [0b11111]]
    assert made == routing.one(seq_len=300)


def test_words_are_little_endian_and_read_only() -> None:
    made = routing.one(seq_len=128)
    assert made.words.tobytes() == b"\x03" + bytes(7)
    with pytest.raises(ValueError, match="read-only"):
        made.words[0, 0] = 1


def test_coverage_of_what() -> None:
    # 256 keys in groups of two tiles: row tile 0 executes two tiles, row tile 1 four; only (1, 0) is INT8.
    made = Routing.from_bits(np.array([[False, False], [True, False]]), Grid(256, 256, group=2))
    assert made.coverage() == made.coverage("tile") == 2 / 6
    assert made.coverage("group") == 1 / 3
    assert made.coverage("cell") == 128 * 128 / (256 * 257 / 2)
    # Two heads: the mean of theirs.
    both = Routing.from_bits(np.stack([made.bits(), np.zeros((2, 2), bool)]), made.grid)
    assert both.coverage() == 1 / 6
    with pytest.raises(RoutingError, match="row"):
        made.coverage("row")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["band", "bigbird", "sptrans", "local_sink", "row_random"])
@pytest.mark.parametrize("words", [1, 4])
def test_chunks_keep_the_bits_of_absolute_row_tiles(name: str, words: int) -> None:
    template = getattr(routing, name)(0.5, words=words)
    whole = template.build(16384)
    position = 0
    for length in (128, 1024, 100, 20, 8, 1152, 128, 1000):
        made = template.build(length, position + length, capacity=16384)
        assert made.grid.group == whole.grid.group
        assert made.grid == Grid(length, position + length, group=whole.grid.group)
        for m in range(made.grid.row_tiles):
            at = position // 128 + m
            legal = made.grid.legal()[m]
            np.testing.assert_array_equal(made.bits()[m][legal], whole.bits()[at, : made.grid.groups][legal])
        position += length
    # One token at a time, too.
    step = template.build(1, 9000, capacity=16384)
    kept = whole.bits()[8999 // 128, : step.grid.groups]
    np.testing.assert_array_equal(step.bits()[0], kept & step.grid.legal()[0])


def test_a_chunk_that_straddles_is_refused() -> None:
    whole = routing.band(0.5, seq_len=4096)
    assert whole.chunk(28, 128).grid.query_len == 28
    with pytest.raises(RoutingError, match="straddles row tiles"):
        whole.chunk(29, 129)
    with pytest.raises(RoutingError, match="key_len is 5000"):
        whole.chunk(128, 5000)
    with pytest.raises(RoutingError, match="query_len is 200"):
        whole.chunk(200, 100)
    with pytest.raises(RoutingError, match="has no chunks"):
        routing.band(0.5, seq_len=4096, query_len=128).chunk(128, 256)
    with pytest.raises(RoutingError, match="has no chunks"):
        routing.band(0.5, seq_len=4096, causal=False).chunk(128, 256)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda grid: Routing(grid, np.zeros((3, 1), np.int64)), "words are int64"),
        (lambda grid: Routing(grid, np.zeros((2, 1), np.uint64)), "shape"),
        (lambda grid: Routing(grid, np.zeros((3, 0), np.uint64)), "shape"),
        (lambda grid: Routing(grid, np.zeros((1, 1, 3, 1), np.uint64)), "shape"),
        (lambda grid: Routing(grid, np.array([[4], [0], [0]], np.uint64)), r"words\[0, 0\] sets bits"),
        (lambda grid: Routing(grid, np.array([[0], [0], [1 << 63]], np.uint64)), r"words\[2, 0\] sets bits"),
        (lambda grid: Routing.from_bits(np.zeros((3, 5)), grid), "bits are float64"),
        (lambda grid: Routing.from_bits(np.zeros((3, 4), bool), grid), "shape"),
        (lambda grid: Routing.from_bits(np.zeros((3, 5), bool), grid, words=0), "words is 0"),
    ],
)
def test_wrong_maps_are_named(make, named: str) -> None:
    with pytest.raises(RoutingError, match=named):
        make(Grid(300, 300))


def test_lengths_of_zero() -> None:
    for query_len, key_len in ((0, 0), (0, 100), (100, 0)):
        made = routing.bigbird(0.5, seq_len=key_len, query_len=query_len)
        assert made.words.shape == (-(-query_len // 128), 1)
        assert not made.words.any()
        assert [made.coverage(of) for of in ("tile", "group", "cell")] == [0, 0, 0]
