"""Plans of attention on the array: the order of the descriptors against the routing's bits, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tilefuse import plan as planning
from tilefuse.attention_configurations import AttentionConfiguration
from tilefuse.errors import PlanError
from tilefuse.plan import AttentionPlan, Lengths
from tilefuse.plan.attention_costs import cycles_of, kernel_cycles
from tilefuse.routing import named
from tilefuse.tilemix.grid import Grid
from tilefuse.tilemix.npu_streams import lengths
from tilefuse.tilemix.routing_map import Routing

Tile = tuple[str, int]
"""(kind, key tile)."""


def words_of(tap: Any) -> Iterator[int]:
    """Every word that a pattern touches, in its order."""
    a, b, c, d = (np.arange(size) * stride for size, stride in zip(tap.sizes, tap.strides, strict=True))
    yield from (tap.offset + a[:, None, None, None] + b[:, None, None] + c[:, None] + d).reshape(-1).tolist()


def streamed(plan: AttentionPlan, team: int) -> list[tuple[str, int]]:
    """The key tiles that a stream brings, as (kind, number among all): from the descriptors' words alone."""
    wide, int8 = plan.configuration.kv_object, plan.configuration.kv_object  # bytes of an object, whatever its kind
    sizes = {"wide": 4 * wide // 4, "int8": 3 * int8 // 4}
    words = [
        word
        for step in plan.steps
        if step.transfer.stream == "kv" and step.transfer.index == team
        for word in words_of(step.transfer.tap)
    ]
    tiles = []
    while words:
        kind = "wide" if words[0] < plan.int8_offset or not plan.has_int8 else "int8"
        number, rest = divmod(words[0] - (plan.int8_offset if kind == "int8" else 0), sizes[kind])
        assert rest == 0
        assert words[: sizes[kind]] == list(range(words[0], words[0] + sizes[kind]))
        words = words[sizes[kind] :]
        tiles.append((kind, number))
    return tiles


def expected(grid: Grid, bits: Any, m: int) -> list[Tile]:
    """The tiles of a query tile with a key that any of its queries sees, INT8 ones first, by the masks' definition."""
    queries = np.arange(m * 128, min((m + 1) * 128, grid.query_len))[:, None] + grid.key_len - grid.query_len
    keys = np.arange(grid.key_len)
    seen = np.ones((len(queries), grid.key_len), bool)
    if grid.causal:
        seen &= keys <= queries
    if grid.window is not None:
        seen &= keys > queries - grid.window
    executed = [n for n in range(grid.key_tiles) if seen[:, n * 64 : (n + 1) * 64].any()]
    in_int8 = [n for n in executed if bits[m, n // grid.group]]
    return [("int8", n) for n in in_int8] + [("wide", n) for n in executed if n not in in_int8]


def check_order(plan: AttentionPlan, grids: list[Grid], maps: list[Any]) -> None:
    """Every head's query tiles once, each with its tiles in the order of the rule."""
    found: Counter[tuple[int, int, int]] = Counter()
    for team, items in enumerate(plan.teams):
        tiles = streamed(plan, team)
        for item in items:
            n8, n16 = item.counts
            mine, tiles = tiles[: n8 + n16], tiles[n8 + n16 :]
            group = plan.heads // plan.kv_heads
            kv_head = item.heads[0] // group
            bits = maps[item.sequence]
            bits = bits[kv_head if len(bits) > 1 else 0]
            grid = grids[item.sequence]
            base = plan.kv_heads * sum(g.key_tiles for g in grids[: item.sequence]) + kv_head * grid.key_tiles
            assert [(kind, number - base) for kind, number in mine] == expected(grid, bits, item.query_tile)
            assert (n8, n16) == (sum(k == "int8" for k, _ in mine), sum(k == "wide" for k, _ in mine))
            for head in item.heads:
                if head >= 0:
                    assert head // group == kv_head
                    found[item.sequence, head, item.query_tile] += 1
        assert tiles == []
    everything = {(s, h, m) for s, grid in enumerate(grids) for h in range(plan.heads) for m in range(grid.row_tiles)}
    assert found == Counter(everything)


def check_waits(plan: AttentionPlan) -> None:
    """At most four tasks outstanding on a channel, and waits for what was issued before, once each."""
    outstanding: dict[tuple[str, int], list[int]] = {}
    for number, step in enumerate(plan.steps):
        mine = outstanding.setdefault((step.transfer.stream, step.transfer.index), [])
        if step.after is not None:
            mine.remove(step.after)
        mine.append(number)
        assert len(mine) <= 4


@pytest.mark.parametrize(
    ("query_len", "key_len", "causal", "window"),
    [
        (1, 1, True, None),
        (300, 300, True, None),
        (129, 1000, True, None),
        (300, 100, True, None),
        (200, 333, False, 70),
        (640, 640, True, 100),
        (128, 64, False, None),
    ],
)
@pytest.mark.parametrize("coverage", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "columns"), [(4, 1, 64, 4), (3, 3, 128, 1), (6, 2, 128, 8), (8, 2, 64, 2)]
)
def test_tiles_stream_in_the_order_of_the_bits(
    query_len: int,
    key_len: int,
    causal: bool,
    window: int | None,
    coverage: float,
    heads: int,
    kv_heads: int,
    d: int,
    columns: int,
) -> None:
    rng = np.random.default_rng(query_len + key_len)
    grid = Grid(query_len, key_len, causal=causal, window=window, group=1 + query_len % 2)
    bits = rng.random((kv_heads, grid.row_tiles, grid.groups)) < coverage
    routing = Routing.from_bits(bits, grid)
    plan = planning.attention([lengths(grid, routing)], heads=heads, kv_heads=kv_heads, d=d, columns=columns)
    check_order(plan, [grid], [bits])
    check_waits(plan)
    assert plan.has_int8 == any(item.int8 for items in plan.teams for item in items)


def test_sequences_of_several_lengths_and_one_map_of_all_heads() -> None:
    grids = [Grid(200, 200, group=2), Grid(64, 700), Grid(1, 129)]
    rng = np.random.default_rng(1)
    maps = [rng.random((1, grid.row_tiles, grid.groups)) < 0.5 for grid in grids]
    sequences = [lengths(g, Routing.from_bits(bits[0], g)) for g, bits in zip(grids, maps, strict=True)]
    plan = planning.attention(sequences, heads=4, kv_heads=2, d=64, columns=2)
    check_order(plan, grids, maps)
    check_waits(plan)


def test_the_last_block_of_a_cache_stays_in_16_bits() -> None:
    grid = Grid(100, 300)
    one = named("one").build(100, 300)
    assert lengths(grid, one).int8[0, 0].tolist() == [True] * 5
    assert lengths(grid, one, open_block_16bit=True).int8[0, 0].tolist() == [True] * 4 + [False]


def test_stripes_are_one_descriptor() -> None:
    """Every other tile INT8: two loops, over tiles and within one, in place of 32 tasks."""
    grid = Grid(128, 4096, causal=False)
    bits = np.zeros((1, 64), bool)
    bits[0, ::2] = True
    plan = planning.attention(
        [lengths(grid, Routing.from_bits(bits, grid))], heads=1, kv_heads=1, d=64, columns=1, blocks=1, share=1
    )
    taps = [step.transfer.tap for step in plan.steps if step.transfer.stream == "kv"]
    tile8, tile16 = 3 * 4672 // 4, 4 * 4672 // 4
    assert [(tap.sizes[1], tap.strides[1]) for tap in taps] == [(32, 2 * tile8), (32, 2 * tile16)]
    assert [tap.sizes[2] * tap.sizes[3] for tap in taps] == [tile8, tile16]
    check_order(plan, [grid], [bits[None]])


def test_a_run_of_any_length_is_one_descriptor() -> None:
    grid = Grid(128, 1 << 17, causal=False)
    plan = planning.attention([lengths(grid, None)], heads=1, kv_heads=1, d=64, columns=1, blocks=1, share=1)
    assert [s.transfer.tap.words for s in plan.steps if s.transfer.stream == "kv"] == [2048 * 4672]


def test_long_and_short_query_tiles_meet() -> None:
    """Causal work grows with the row; no stream has more than one query tile above another."""
    routing = named("zero").build(4096, 4096)
    plan = planning.attention([lengths(routing.grid, routing)], heads=8, kv_heads=8, d=128)
    cycles = cycles_of(plan.configuration)
    times = [sum(cycles.pace(*item.counts) for item in items) for items in plan.teams]
    assert len(times) == 8
    assert max(times) <= 1.01 * min(times)


def test_a_stream_is_shared_where_heads_share_keys() -> None:
    """32 heads with keys of their own can't; 4 heads of a group can, and DRAM then is not the limit."""
    routing = named("local_sink75").build(4096, 4096)
    alone = planning.attention([lengths(routing.grid, routing)], heads=32, kv_heads=32, d=128)
    shared = planning.attention([lengths(routing.grid, routing)], heads=32, kv_heads=8, d=128)
    assert alone.configuration.share == 1
    assert shared.configuration.share > 1
    assert sum(shared.kv_bytes) * shared.configuration.share == sum(alone.kv_bytes)
    assert shared.costs.total < alone.costs.total
    two = planning.attention([lengths(routing.grid, routing)], heads=32, kv_heads=8, d=64)
    assert two.configuration.blocks == 2


@pytest.mark.parametrize(
    ("d", "blocks", "core", "memtile"),
    [
        # stack, o, q, kv, scores, p, state, y, constants
        (64, 1, 3328 + 8192 + 4544 + 2 * 4672 + 8512 + 5184 + 1152 + 1088 + 320, 8 * 4672 + 8 * 4544 + 8 * 1088),
        (64, 2, 3328 + 16384 + 9088 + 3 * 4672 + 8512 + 10368 + 2304 + 1088 + 320, 8 * 4672 + 8 * 4544 + 8 * 1088),
        (128, 1, 3328 + 16384 + 8896 + 2 * 9280 + 8512 + 5184 + 1152 + 2112 + 320, 8 * 9280 + 8 * 8896 + 8 * 2112),
    ],
)
def test_budgets(d: int, blocks: int, core: int, memtile: int) -> None:
    budgets = list(AttentionConfiguration(d, blocks=blocks).budgets())
    assert [budget.used for budget in budgets] == [core, memtile]
    assert [budget.limit for budget in budgets] == [65536, 524288]


def test_what_is_refused() -> None:
    some = lengths(Grid(64, 64), None)
    with pytest.raises(PlanError, match=r"d = 256: kernels are for heads of 64 and 128"):
        planning.attention([some], heads=1, kv_heads=1, d=256)
    with pytest.raises(PlanError, match=r"attention_bf16_d128_32x64_2b1s_8c does not fit: core: \d+ of 65536"):
        planning.attention([some], heads=2, kv_heads=1, d=128, blocks=2)
    with pytest.raises(PlanError, match="share = 4: 1, 2 or 4 columns of 6"):
        planning.attention([some], heads=4, kv_heads=1, d=64, columns=6, share=4)
    with pytest.raises(PlanError, match="heads = 4, kv_heads = 3"):
        planning.attention([some], heads=4, kv_heads=3, d=64)
    with pytest.raises(PlanError, match="columns = 9: the array has 1 to 8"):
        planning.attention([some], heads=4, kv_heads=2, d=64, columns=9, share=1)
    wrong = Lengths(64, 64, np.zeros((1, 1, 2), bool), (0,), (1,))
    with pytest.raises(PlanError, match=r"routing of shape \[1, 1, 2\]; 64 queries and 64 keys have 1 x 1 tiles"):
        planning.attention([wrong], heads=1, kv_heads=1, d=64)
    with pytest.raises(PlanError, match=r"keys and values of 64 heads .* a buffer holds 2147483647; split"):
        planning.attention([lengths(Grid(128, 1 << 16), None)], heads=64, kv_heads=64, d=128)


def test_a_plan_prints() -> None:
    routing = named("aligned50").build(1024, 1024)
    plan = planning.attention([lengths(routing.grid, routing)], heads=4, kv_heads=1, d=64, columns=2)
    text = str(plan)
    assert "attention of 1024 queries, 1024 keys, 4 heads (1 of keys), d = 64" in text
    assert "modelled" in text
    assert plan.details().count("\n") == plan.tasks


@pytest.mark.parametrize("d", [64, 128])
def test_the_kernels_cycles(d: int) -> None:
    """The planner's figures are the host build's counts to within a tenth."""
    binding = pytest.importorskip("tilefuse.emulator.binding")
    known = kernel_cycles(d)
    entries = {
        "begin": known.begin,
        "scores_int8": known.int8_scores,
        "scores_bf16": known.wide_scores,
        "softmax": known.softmax,
        "values": known.values,
        "store": known.store,
    }
    for stem, cycles in entries.items():
        counted = binding.entry_cycles(AttentionConfiguration(d).kernel, stem)
        assert cycles == pytest.approx(counted, rel=0.1), stem
