"""Plans against numbers worked out by hand, and against plain loops over their descriptors (`oracle_plan`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_plan import (
    BAND_WORDS,
    gemm_bands,
    gemm_results,
    gemm_weights,
    objects_of,
    runs_of,
    taps_of,
    tile_word,
    words_of,
)

from tilefuse import arch, manifest, plan
from tilefuse.configurations import Op
from tilefuse.descriptors import Tap
from tilefuse.errors import LayoutError, PlanError
from tilefuse.layout import Layout, ZeroKind
from tilefuse.plan import PlainLayout, Plan
from tilefuse.plan.matrix import _traffic

SCHEMES = [(bits, group, zero) for bits in (4, 8) for group in (32, 64, 128) for zero in ZeroKind]
LM_HEADS = [128256, 151936, 256000]


def check_gemm(made: Plan) -> None:
    """Every stream of a GEMM is what its cores expect, word for word."""
    layout, columns = made.layout, made.layout.columns
    for column in range(columns):
        weights = list(objects_of(taps_of(made, "w", column), layout.tile_bytes // 4))
        assert weights == list(gemm_weights(made, column))
        assert set(weights) == {
            tile_word(layout, n_tile, k_tile)
            for n_tile in range(column, layout.n_padded // 64, columns)
            for k_tile in range(layout.k_tiles)
        }
        results = [start for tap in taps_of(made, "y", column) for start, count in runs_of(tap)]
        assert {count for tap in taps_of(made, "y", column) for _, count in runs_of(tap)} == {32}
        # The drains of a pass list its tiles in one loop, and each tile's rows in the next: the cores' order.
        assert results == list(gemm_results(made, column))
    for row in range(4):
        assert list(objects_of(taps_of(made, "x", row), BAND_WORDS)) == list(gemm_bands(made, row))
    check_results_cover(made)
    check_balance(made)
    check_queues(made)


def check_results_cover(made: Plan) -> None:
    """Every word of y is written; once, but twice for the overlap of an odd number of tiles taken by twos."""
    counts: Counter[int] = Counter()
    for transfer in made.transfers():
        if transfer.stream == "y":
            for start, words in runs_of(transfer.tap):
                assert start % 32 == 0
                assert words == 32
                counts[start // 32] += 1
    tiles = made.layout.n_padded // 64
    assert made.y_rows >= made.m
    assert counts.keys() == set(range(made.y_rows * tiles))
    odd = made.configuration.tiles == 2 and made.layout.tiles_per_column % 2 == 1
    twice = range(tiles - 2 * made.layout.columns, tiles - made.layout.columns) if odd else range(0)
    for place, count in counts.items():
        assert count == (2 if place % tiles in twice else 1)


def check_balance(made: Plan) -> None:
    """The streams bring a core exactly what its loops take: passes x k tiles (x bands), as the parameters say."""
    passes, k_tiles, bands = made.parameters
    tiles = made.configuration.tiles
    assert tiles * bands % made.configuration.join == 0, "a core's pieces fill whole joined objects"
    for column in range(made.layout.columns):
        words = sum(tap.words for tap in taps_of(made, "w", column))
        assert words * 4 == passes * k_tiles * tiles * made.layout.tile_bytes
        words = sum(tap.words for tap in taps_of(made, "y", column))
        assert words * 4 == passes * tiles * bands * 64 * 64 * 2
    for row in range(4):
        words = sum(tap.words for tap in taps_of(made, "x", row))
        assert words == (4 + passes * k_tiles * bands) * BAND_WORDS


def check_queues(made: Plan) -> None:
    """At most 4 tasks on a channel when two segments are open, counted anew; shims have 16 descriptors."""
    for first, second in zip(made.segments, made.segments[1:] or made.segments[:0], strict=False):
        counts = Counter((t.stream, t.index) for s in (first, second) for t in s.transfers)
        assert max(counts.values()) <= 4
    assert max(made.queue_depths.values()) <= 4


def check_gemv(made: Plan) -> None:
    """Every stream of a GEMV on all cores."""
    layout, columns = made.layout, made.layout.columns
    tile, slots = layout.tile_bytes // 4, layout.tiles_per_column
    streams = made.configuration.streams
    for column in range(columns):
        taken: dict[int, list[int]] = {row: [] for row in range(4)}
        for stream in range(streams):
            rows = 4 // streams
            # The memory tile gives its rows in turn what arrives.
            for i, start in enumerate(objects_of(taps_of(made, "w", streams * column + stream), tile)):
                taken[stream * rows + i % rows].append(start)
        for row in range(4):
            assert taken[row] == [
                tile_word(layout, slot * columns + column, k_tile)
                for slot in range(slots)
                for k_tile in range(row, layout.k_tiles, 4)
            ]
        results = [start for tap in taps_of(made, "y", column) for start, _ in runs_of(tap)]
        assert results == [(slot * columns + column) * 32 for slot in range(slots)]
    check_results_cover(made)
    check_queues(made)
    assert made.parameters[:2] == (slots, layout.k_tiles // 4)


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_large_gemm_by_hand() -> None:
    """2048 x 4096 x 4096, 4-bit: 4288-byte tiles, 32 by 8 a column; blocks of 4 bands x 4 rows x 16 = 256 rows."""
    made = plan.gemm(Layout(k=4096, n=4096, bits=4, group=128), m=2048)
    assert (made.configuration.tiles, made.bands, made.row_blocks, made.passes) == (2, 4, 8, 4)
    assert made.parameters == (8 * 4, 32, 4)
    assert (made.x_offset, made.x_words) == (2304, 2304 + 8 * 4 * 32 * 4 * 576)
    assert (made.y_rows, made.y_words) == (2048, 2048 * 4096 // 2)
    assert made.w_words == 64 * 32 * 4288 // 4
    assert len(made.segments) == 8 * 4
    assert made.tasks == 8 * 4 * (8 + 4 + 8) + 4
    weights = 8 * 64 * 32 * 4288
    activations = 8 * 4 * 4 * (32 * 4 * 2304) + 4 * 4 * 2304
    assert made.dram_bytes == (weights + activations, 2048 * 4096 * 2)
    assert made.queue_depths == {
        **{("w", column): 2 for column in range(8)},
        **{("x", row): 3 for row in range(4)},  # the head, and a run of each open segment
        **{("y", column): 2 for column in range(8)},
    }
    w, y = taps_of(made, "w", 3)[0], taps_of(made, "y", 3)[5]
    # 8 groups of k tiles, 2 output tiles 32 tiles apart, 4 tiles in halves of 536 words.
    assert w == Tap(3 * 8 * 32 * 1072, (8, 2, 8, 536), (4 * 1072, 32 * 1072, 536, 1))
    # Row block 1, output tiles 2 and 3 of column 3: tiles 19 and 27.
    assert y == Tap(256 * 2048 + 19 * 32, (1, 2, 256, 32), (0, 256, 2048, 1))


def test_the_models_budget_by_hand() -> None:
    """What each part needs for that GEMM, from the clock, 4 bytes a cycle and 47 GB/s."""
    costs = plan.gemm(Layout(k=4096, n=4096, bits=4, group=128), m=2048).costs
    steps = 8 * 4 * 32
    assert costs.x_stream == pytest.approx(steps * 4 * 2304 / 4 / 1.8e9)
    assert costs.w_stream == pytest.approx(steps * 2 * 4288 / 4 / 1.8e9)
    # A column's stream takes what four cores make; each sends 8 pieces of 2048 bytes, all of which find room.
    assert costs.y_stream == pytest.approx(8 * 4 * 4 * 8 * 2048 / 4 / 1.8e9)
    assert costs.y_wait == pytest.approx(8 * 4 * 8 * 2048 / 4 / 1.8e9)
    assert costs.dram == pytest.approx(108040192 / 47e9)
    assert costs.control == pytest.approx(644 * arch.TASK_ISSUE)
    assert costs.total >= max(costs.compute, costs.x_stream, costs.w_stream, costs.dram, costs.control)
    assert costs.bound == "DRAM"


def test_the_drains_of_one_tile_at_a_time_are_those_that_the_compiler_took() -> None:
    """feasibility.md: C row-major, one a row block and column, bf16 [1, nt, 256, 64] strides [0, 512, N, 1]."""
    made = plan.gemm(Layout(k=4096, n=32768, bits=8, group=128), m=256, tiles=1, bands=4)
    assert taps_of(made, "y", 0) == [Tap(0, (1, 64, 256, 32), (0, 256, 16384, 1))]
    assert taps_of(made, "w", 1) == [Tap.run(64 * 32 * 8384 // 4, 64 * 32 * 8384 // 4)]
    assert taps_of(made, "x", 2)[1:] == [Tap.run(2304 + 2 * 32 * 4 * 576, 32 * 4 * 576, 64)]


@pytest.mark.parametrize(("bits", "tile"), [(4, 4288), (8, 8384)])
def test_two_streams_are_those_that_the_compiler_took(bits: int, tile: int) -> None:
    """feasibility.md: [1, groups, p, s] strides [0, TB, s, 1] words with p s = TB / 2; 4 objects of x for K = 32768."""
    made = plan.gemv(Layout(k=32768, n=32768, bits=bits, group=128), streams=2)
    assert made.parameters == (64, 64, 4)
    for stream in range(2):
        (tap,) = taps_of(made, "w", 2 * 5 + stream)
        _, groups, p, s = tap.sizes
        assert (groups, p * s, tap.strides) == (64 * 64, tile // 2, (0, tile, s, 1))
        assert s <= 1023
        assert tap.offset == 5 * 64 * 256 * tile // 4 + stream * 2 * tile // 4
        # For each of the stream's two rows an object of a tile's size, four times.
        assert taps_of(made, "x", 2 * 5 + stream) == [Tap.run(stream * 2 * tile, 2 * tile)]
    assert (made.x_offset, made.x_words) == (0, 4 * tile)
    assert set(made.queue_depths.values()) == {1, 2}  # x and w share a channel
    assert made.queue_depths["w", 0] == 2


def test_a_gemv_by_hand() -> None:
    """4096 x 4096: one linear run of 8 x 32 tiles a column, x once, 18 tasks in one group."""
    made = plan.gemv(Layout(k=4096, n=4096, bits=4, group=128))
    assert made.parameters == (8, 8)
    (segment,) = made.segments
    assert segment.tasks == 8 + 2 + 8
    assert taps_of(made, "w", 7) == [Tap.run(7 * 8 * 32 * 1072, 8 * 32 * 1072)]
    assert taps_of(made, "x", 0) == [Tap.run(0, 256), Tap.run(256, 2048)]
    assert taps_of(made, "y", 7) == [Tap(7 * 32, (1, 1, 8, 32), (0, 0, 256, 1))]
    assert made.dram_bytes == (64 * 32 * 4288 + 1024 + 8192, 8192)
    # 8 bytes a cycle and column do not help where DRAM's 47 GB/s are less than 8 x 4 bytes x 1.8 GHz = 57.6 GB/s.
    assert made.costs.bound == "DRAM"
    assert made.costs.w_stream == pytest.approx(64 * 32 * 4288 / 57.6e9)


def test_the_baselines_by_hand() -> None:
    """32 rows a core; 128 rows of y and 16384-byte tiles. A GEMV of one row takes x anew for each output tile."""
    made = plan.gemm_baseline(PlainLayout(k=4096, n=4096), m=200)
    assert made.parameters == (2 * 8, 32)
    assert made.y_rows == 256
    assert taps_of(made, "w", 1) == [Tap.run(8 * 32 * 4096, 8 * 32 * 4096)] * 2
    # Object by object of 32 rows x 128 channels, 1 KiB and 2048 words of x a row.
    assert taps_of(made, "x", 1)[1] == Tap(2048 + 32 * 2048, (8, 32, 32, 64), (0, 64, 2048, 1))
    assert taps_of(made, "y", 1)[1] == Tap(128 * 2048 + 32, (1, 8, 128, 32), (0, 256, 2048, 1))
    check_results_cover(made)

    for layout, tile in ((PlainLayout(4096, 4096), 16384), (Layout(4096, 4096, 4, 128), 4288)):
        vector = plan.gemv_baseline(layout)
        assert vector.parameters == (8, 32)
        assert taps_of(vector, "w", 2) == [Tap.run(2 * 8 * 32 * tile // 4, 8 * 32 * tile // 4)]
        assert taps_of(vector, "x", 0) == [Tap.run(0, 64), Tap.run(64, 2048, 8)]
        check_results_cover(vector)


def test_the_order_of_issue() -> None:
    """Weights, then the head before the activations of its row, then results; the head in the first segment only."""
    made = plan.gemm(Layout(k=512, n=2048, bits=4, group=128), m=512, tiles=2, bands=4)
    kinds = ["".join(t.stream for t in segment.transfers) for segment in made.segments]
    assert kinds == ["w" * 8 + "x" * 8 + "y" * 8] + ["w" * 8 + "x" * 4 + "y" * 8] * 3
    heads = [t.tap for t in made.segments[0].transfers if t.stream == "x"]
    assert [tap.offset for tap in heads[:4]] == [0] * 4
    made = plan.gemv(Layout(k=512, n=2048, bits=4, group=128), streams=2)
    assert [t.stream for t in made.segments[0].transfers if t.index == 3] == ["x", "w", "y"]


# --- every stream, on shapes at the edges -----------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group", "zero"), SCHEMES)
@pytest.mark.parametrize("columns", [4, 5, 6, 7, 8])
def test_streams_of_every_scheme_and_number_of_columns(bits: int, group: int, zero: ZeroKind, columns: int) -> None:
    layout = Layout(k=512, n=64 * columns * 3, bits=bits, group=group, zero=zero, columns=columns)
    for tiles in (1, 2) if bits == 4 and zero is ZeroKind.Z8 else (1,):
        check_gemm(plan.gemm(layout, m=65, tiles=tiles))
    check_gemv(plan.gemv(layout))
    check_gemv(plan.gemv(layout, streams=2))


@pytest.mark.parametrize("m", [1, 63, 64, 65, 640, 641, 4096])
def test_rows(m: int) -> None:
    layout = Layout(k=512, n=1024, bits=4, group=128)
    for tiles in (1, 2):
        made = plan.gemm(layout, m, tiles=tiles)
        check_gemm(made)
        assert made.y_rows - m < 64 * made.bands
        assert made.bands in ((1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (1, 2, 4))[tiles - 1]
        assert made.row_blocks >= -(-m // (64 * (10, 4)[tiles - 1]))


@pytest.mark.parametrize(("k", "n"), [(32768, 512), (1, 1), (513, 1), (129, 32768), (32768, 1536), (640, 4672)])
@pytest.mark.parametrize("bits", [4, 8])
def test_thin_and_ragged(k: int, n: int, bits: int) -> None:
    layout = Layout(k=k, n=n, bits=bits, group=128)
    assert layout.k_tiles % 4 == 0
    assert layout.k_tiles == {1: 4, 129: 4, 513: 8, 640: 8, 32768: 256}[k]
    check_gemm(plan.gemm(layout, 100))
    check_gemv(plan.gemv(layout))
    check_gemv(plan.gemv(layout, streams=2))


@pytest.mark.parametrize("n", [32768, *LM_HEADS])
def test_wide(n: int) -> None:
    """No N is too wide for the results: strides are N / 2 words of the 2^20 that the shim takes."""
    layout = Layout(k=512, n=n, bits=4, group=128)
    for tiles in (1, 2):
        check_gemm(plan.gemm(layout, 65, tiles=tiles))
    for streams in (1, 2):
        made = plan.gemv(layout, streams=streams)
        check_gemv(made)
        assert len(made.segments) == 1


def test_the_longest_and_the_widest() -> None:
    layout = Layout(k=32768, n=32768, bits=4, group=128)
    check_gemm(plan.gemm(layout, 1, tiles=1))
    check_gemm(plan.gemm(layout, 1, tiles=2))
    made = plan.gemv(layout)
    check_gemv(made)
    assert made.parameters == (64, 64)


def test_the_widest_layer_of_the_format() -> None:
    """2^20 outputs: 2048 tiles a column, so the results take three loops of at most 1023."""
    made = plan.gemv(Layout(k=128, n=1 << 20, bits=4, group=128))
    assert len(made.segments) == 3
    check_gemv(made)


def test_words_of_a_small_plan_one_by_one() -> None:
    """The same with no notion of runs: every word of the weights once a row block, every word of y once."""
    made = plan.gemm(Layout(k=512, n=512, bits=4, group=128, columns=4), m=260, tiles=2, bands=4)
    assert made.row_blocks == 2
    moved = {stream: Counter[int]() for stream in "wxy"}
    for transfer in made.transfers():
        moved[transfer.stream].update(words_of(transfer.tap))
    assert moved["w"] == dict.fromkeys(range(4 * 2 * 4 * 1072), 2)
    assert moved["y"] == dict.fromkeys(range(512 * 256), 1)
    # Each array row takes the head; a row block's part is read by one row, once for its one pair of outputs.
    assert moved["x"] == {word: 4 if word < 2304 else 1 for word in range(2304 + 2 * 4 * 4 * 4 * 576)}


@given(
    k=st.integers(1, 3000),
    n=st.integers(1, 3000),
    m=st.integers(1, 1500),
    scheme=st.sampled_from([scheme for scheme in SCHEMES if scheme[2] is ZeroKind.Z8]),
    columns=st.integers(4, 8),
)
def test_any_shape(k: int, n: int, m: int, scheme: tuple[int, int, ZeroKind], columns: int) -> None:
    bits, group, zero = scheme
    layout = Layout(k, n, bits, group, zero, columns)
    buffers = []
    for made in (plan.gemm(layout, m), plan.gemv(layout), plan.gemv(layout, streams=2)):
        buffers = {"x": made.x_words, "w": layout.nbytes // 4, "y": made.y_words}
        assert made.w_words == buffers["w"]
        for transfer in made.transfers():
            tap = transfer.tap
            assert tap.offset >= 0
            last = tap.offset + sum((s - 1) * step for s, step in zip(tap.sizes, tap.strides, strict=True))
            assert last < buffers[transfer.stream]
            assert tap.sizes[0] <= 64
            assert max(step for size, step in zip(tap.sizes, tap.strides, strict=True) if size > 1) <= 1 << 20
        check_results_cover(made)
        check_queues(made)
        assert made.costs.total > 0
        str(made)
        if made.configuration.op is Op.GEMM:
            # What the choice was weighed by is what the transfers come to.
            assert _traffic(made.configuration, layout, made.bands, made.row_blocks) == made.traffic
    check_balance(plan.gemm(layout, m))


@given(m=st.integers(1, 12000), scheme=st.sampled_from(SCHEMES))
def test_the_chosen_plan_costs_least(m: int, scheme: tuple[int, int, ZeroKind]) -> None:
    """No tiles and bands that one may ask for are cheaper, by the model, than those chosen."""
    bits, group, zero = scheme
    layout = Layout(512, 1024, bits, group, zero)
    chosen = plan.gemm(layout, m)
    for tiles in (1, 2):
        for bands in range(1, 11):
            try:
                asked = plan.gemm(layout, m, tiles=tiles, bands=bands)
            except PlanError:
                continue
            assert (asked.bands, asked.configuration.tiles) == (bands, tiles)
            assert chosen.costs.total <= asked.costs.total * (1 + 1e-12)


# --- choice, printing, refusals ---------------------------------------------------------------------------------------


def test_the_model_chooses() -> None:
    """Two tiles where they halve what the activations' channel carries, one where there is no second."""
    assert plan.gemm(Layout(4096, 4096, 4, 128), 2048).configuration.tiles == 2
    assert plan.gemm(Layout(4096, 512, 4, 128), 2048).configuration.tiles == 1
    assert plan.gemm(Layout(4096, 4096, 8, 128), 2048).configuration.tiles == 1
    # 64 rows need one band; nine rows of 64 go in two blocks of five bands, not of eight.
    assert plan.gemm(Layout(4096, 4096, 8, 128), 64).bands == 1
    assert plan.gemm(Layout(4096, 4096, 8, 128), 9 * 64).bands in (3, 5)


def test_one_configuration_serves_every_shape() -> None:
    shapes = [(200, 512, 1024), (500, 4096, 4096), (4096, 2048, 32768)]
    configurations = {plan.gemm(Layout(k, n, 4, 128), m, tiles=2).configuration for m, k, n in shapes}
    assert len(configurations) == 1


def test_printing() -> None:
    made = plan.gemm(Layout(k=4096, n=4096, bits=4, group=128), m=2048)
    text = str(made)
    for fact in (
        "gemm of 2048 x 4096 by 4096 x 4096, weights w4g128, on gemm_bfp16_w4g128_mantissa_16x128x128_4b4j_8c",
        "rows        8 blocks of 256 (padded to 2048)",
        "passes      4 a block; parameters [32, 32, 4]",
        "core: 64448 of 65536 bytes (stack 3328, sums 4 x 8192, weights 2 x 8576, activations 2 x 2304",
        "segments    32, 644 tasks, at most 3 on a channel (of 4), 2 segments open",
        "w0  +0 8@4288 2@34304 8@536 536@1",
        "108040192 bytes read, 16777216 written",
        "modelled",
        "bound by DRAM",
    ):
        assert fact in text
    assert "rows" not in str(plan.gemv(Layout(512, 512, 4, 128)))
    lines = made.details().splitlines()
    assert len(lines) == 1 + 644
    assert lines[1].split() == ["0", "w0", "1", "+0", "8@4288", "2@34304", "8@536", "536@1"]
    last = 7 * 256 * 2048 + (6 * 8 + 7) * 32  # row block 7, output tiles 6 and 7 of column 7
    assert lines[-1].split() == ["31", "y7", "2", f"+{last}", "2@256", "256@2048", "32@1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"m": 0}, r"M = 0: pass the number of rows, at least 1"),
        ({"m": -5}, r"M = -5"),
        ({"m": 2.0}, r"M = 2.0"),
        ({"m": 64, "bands": 0}, r"bands = 0: a core computes at least one band of 16 rows"),
        ({"m": 64, "bands": 1.5}, r"bands = 1.5"),
        (
            {"m": 64, "tiles": 2, "bands": 5},
            r"does not fit: core: 72640 of 65536 bytes \(.*sums 5 x 8192.*take fewer bands",
        ),
        ({"m": 64, "tiles": 1, "bands": 11}, r"core: 67008 of 65536 bytes"),
        ({"m": 64, "bands": 16}, r"max_bands = 16: 1 to 15"),
        ({"m": 64, "tiles": 2, "bands": 3}, r"tiles = 2 with bands = 3, N = 1024: .*and 4 bands of w4g128 fit"),
        ({"m": 64, "tiles": 2, "bands": 1, "n": 131584}, r"N = 131584: .* from 1 where N is at most 131072"),
        ({"m": 64, "tiles": 3}, r"tiles = 3: 1 to 2"),
        ({"m": 64, "tiles": 0}, r"tiles = 0: 1 to 2"),
        ({"m": 64, "columns": 3}, r"columns = 3: a gemm takes 4 to 8, a shim for the activations of each of 4 rows"),
        ({"m": 64, "tiles": 2, "n": 512}, r"tiles = 2 with N = 512: a column has 1 tile of outputs; take tiles = 1"),
        ({"m": 64, "tiles": 2, "bits": 8}, r"tiles = 2 with w8g128: .* 4-bit weights with zero points; take tiles = 1"),
        ({"m": 64, "tiles": 2, "zero": ZeroKind.M16}, r"tiles = 2 with w4g128m"),
        (
            {"m": 1 << 20, "k": 512, "n": 4096, "tiles": 2, "bands": 4},
            r"M = 1048576.*: the results take 8589934592 bytes.* 2147483647.*along M",
        ),
        ({"m": 10**12}, r"the activations take"),
        ({"m": 64, "k": 32768, "n": 262144, "bits": 4}, r"the weights take 4496293888 bytes.*along N"),
    ],
)
def test_refusals(arguments: dict[str, Any], said: str) -> None:
    layout = {"k": 4096, "n": 1024, "bits": 4, "group": 128} | {
        name: arguments.pop(name) for name in list(arguments) if name in ("k", "n", "bits", "group", "zero", "columns")
    }
    with pytest.raises(PlanError, match=said):
        plan.gemm(Layout(**layout), **arguments)


@pytest.mark.parametrize("kind", [np.int16, np.int32, np.int64, np.uint16])
def test_numpys_integers_are_taken_as_pythons(kind: type[Any]) -> None:
    """Sizes of these are far past what 16 bits hold, and past 32."""
    layout = Layout(kind(4096), kind(4096), kind(4), kind(128), ZeroKind.Z8, kind(8))
    made = plan.gemm(layout, kind(30000), tiles=kind(2), bands=kind(4))
    assert made == plan.gemm(Layout(4096, 4096, 4, 128), 30000, tiles=2, bands=4)
    assert manifest.tasks_of(made)  # JSON takes Python's only
    assert plan.gemv(layout, streams=kind(2)) == plan.gemv(Layout(4096, 4096, 4, 128), streams=2)
    plain = plan.PlainLayout(kind(4096), kind(4096), kind(8))
    assert plan.gemm_baseline(plain, kind(30000)) == plan.gemm_baseline(plan.PlainLayout(4096, 4096), 30000)


def test_layouts_of_the_other_kind_are_refused() -> None:
    packed, plain = Layout(512, 512, 4, 128), plan.PlainLayout(512, 512)
    with pytest.raises(PlanError, match=r"the layout is a PlainLayout: pass a packed layer's Layout"):
        plan.gemm(plain, 64)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"the layout is a PlainLayout"):
        plan.gemv(plain)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"the layout is a Layout: a baseline GEMM takes bfloat16 weights"):
        plan.gemm_baseline(packed, 64)  # type: ignore[arg-type]
    for sizes in ((300.5, 10, 8), (300, "10", 8), (300, 10, 4.0)):
        with pytest.raises(PlanError, match="pass an integer"):
            plan.PlainLayout(*sizes)  # type: ignore[arg-type]
    for options in ({"tiles": 1.0}, {"tiles": "2"}):
        with pytest.raises(PlanError, match=r"tiles = .*: pass an integer"):
            plan.gemm(packed, 64, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"streams = None: pass an integer"):
        plan.gemv(packed, streams=None)  # type: ignore[arg-type]


def test_refusals_of_a_gemv() -> None:
    layout = Layout(4096, 1024, 4, 128)
    with pytest.raises(PlanError, match="streams = 3: 1 to 2"):
        plan.gemv(layout, streams=3)
    with pytest.raises(PlanError, match="the weights take 4496293888 bytes"):
        plan.gemv(Layout(32768, 262144, 4, 128))


def test_refusals_of_a_baseline() -> None:
    for k, n in ((0, 64), (32769, 64), (64, 0), (64, (1 << 20) + 1)):
        with pytest.raises(PlanError, match=f"K = {k}, N = {n}"):
            PlainLayout(k, n)
    for columns in (0, 9):
        with pytest.raises(PlanError, match=f"columns = {columns}"):
            PlainLayout(64, 64, columns)
    with pytest.raises(PlanError, match="columns = 2: a gemm_baseline takes 4 to 8"):
        plan.gemm_baseline(PlainLayout(512, 512, 2), 64)
    with pytest.raises(PlanError, match="M = 0"):
        plan.gemm_baseline(PlainLayout(512, 512), 0)
    with pytest.raises(PlanError, match="results take"):
        plan.gemm_baseline(PlainLayout(512, 1 << 20), 1 << 20)


def test_just_inside_the_limits() -> None:
    """What lies beside each refusal is planned."""
    check_gemm(plan.gemm(Layout(512, 1024, 4, 128), m=64, tiles=2, bands=4))
    check_gemm(plan.gemm(Layout(512, 131072, 4, 128), m=64, tiles=2, bands=1))
    check_gemm(plan.gemm(Layout(512, 1024, 4, 128), m=64, tiles=1, bands=10))
    check_gemm(plan.gemm(Layout(512, 256, 4, 128, columns=4), m=64))
    check_gemv(plan.gemv(Layout(512, 64, 4, 128, columns=1)))
    check_gemv(plan.gemv(Layout(512, 192, 4, 128, columns=3), streams=2))
    # 1023 blocks of 256 rows by 4096: 2^31 - 2^21 bytes of results; one block more would be 2^31.
    assert plan.gemm(Layout(512, 4096, 4, 128), m=1023 * 256, tiles=2, bands=4).y_words * 4 == (1 << 31) - (1 << 21)
    with pytest.raises(PlanError, match="results take 2147483648 bytes"):
        plan.gemm(Layout(512, 4096, 4, 128), m=1023 * 256 + 1, tiles=2, bands=4)
    assert plan.gemm(Layout(32768, 124928, 4, 128), m=1).w_words * 4 == 124928 // 64 * 256 * 4288
    PlainLayout(32768, 1 << 20)


def test_a_layer_that_cannot_be_packed_has_no_plan() -> None:
    with pytest.raises(LayoutError, match="K = 32769"):
        plan.gemm(Layout(32769, 64, 4, 128), 1)
