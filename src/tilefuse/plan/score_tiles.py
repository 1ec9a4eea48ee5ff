"""Plans of attention: query tiles dealt to streams, the order in which key tiles pass by, descriptors.

    print(plan.attention([npu_streams.lengths(grid, routing)], heads=32, kv_heads=8, d=128))

Routing is static, so nothing on the array looks at it: the host counts the INT8 and the 16-bit tiles of each query
tile, writes both counts at the head of the queries, and orders the descriptors so that the INT8 tiles come first. Tiles
that the mask leaves out are not streamed at all.

Host buffers are words of 32 bits: ``q`` queries in the order of the work, ``kv`` the keys and values of all tiles, once
for each kind of tile that the routing uses, ``y`` results in the order of the work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tilefuse import arch
from tilefuse.attention_configurations import (
    CORE_ROWS,
    HEAD_DIMS,
    INT8_OBJECTS,
    KEY_TILE,
    PIECES,
    ROW_TILE,
    SHARES,
    WIDE_OBJECTS,
    AttentionConfiguration,
)
from tilefuse.configurations import checked_int
from tilefuse.descriptors import Tap, Transfer
from tilefuse.errors import PlanError
from tilefuse.plan.attention_costs import AttentionCosts, AttentionCycles, cycles_of
from tilefuse.plan.score_runs import Bits, Runs, pattern, runs_of, strided
from tilefuse.plan.value import MAX_BUFFER_BYTES

NO_HEAD = -1
"""In the place of a head: rows of zeros, whose results nobody asks for."""


@dataclass(frozen=True)
class Lengths:
    """One sequence: how long it is, and what is done with each key tile.

    Attributes:
        query_len, key_len: Rows of q, and of k and v.
        int8: bool [maps][query tiles][key tiles]: whether a tile takes the INT8 path. One map for all key/value heads,
            or one for each.
        first, stop: Of each query tile, the key tiles that are executed: from first up to stop.
    """

    query_len: int
    key_len: int
    int8: Bits = field(repr=False)
    first: tuple[int, ...] = field(repr=False)
    stop: tuple[int, ...] = field(repr=False)

    @property
    def query_tiles(self) -> int:
        """Tiles of 128 query rows."""
        return -(-self.query_len // ROW_TILE)

    @property
    def key_tiles(self) -> int:
        """Tiles of 64 keys."""
        return -(-self.key_len // KEY_TILE)


@dataclass(frozen=True)
class Item:
    """A query tile of some heads that see the same keys: what the columns of a stream compute at a time."""

    sequence: int
    heads: tuple[int, ...]
    """Of each column in turn, those of its blocks; `NO_HEAD` where there is none left."""
    query_tile: int
    int8: Runs
    wide: Runs

    @property
    def counts(self) -> tuple[int, int]:
        """INT8 tiles and 16-bit tiles, as the cores count them."""
        return sum(count for _, count in self.int8), sum(count for _, count in self.wide)


@dataclass(frozen=True)
class Step:
    """A task to issue, and which of those before must be over by then."""

    transfer: Transfer
    after: int | None = None
    """Its position among the steps."""


@dataclass(frozen=True)
class AttentionPlan:
    """How the attention of some sequences runs on one configuration.

    Raises:
        PlanError: A buffer, a descriptor or a queue is past what the array takes; the message says which.
    """

    configuration: AttentionConfiguration
    heads: int
    kv_heads: int
    lengths: tuple[tuple[int, int], ...]
    """(query length, key length) of each sequence."""
    teams: tuple[tuple[Item, ...], ...] = field(repr=False)
    """What the columns of each stream of keys and values compute, in this order."""
    has_int8: bool
    has_wide: bool
    steps: tuple[Step, ...] = field(repr=False)
    """In the order of their issue."""

    def __post_init__(self) -> None:
        words = {"q": self.q_words, "kv": self.kv_words, "y": self.y_words}
        for step in self.steps:
            tap, stream = step.transfer.tap, step.transfer.stream
            tap.check(f"{self.problem}: {stream} of column {step.transfer.index}", words[stream])
        for (stream, index), depth in self.queue_depths.items():
            if depth > arch.QUEUE_DEPTH:
                raise PlanError(f"{stream}{index}: {depth} tasks at a time; a channel queues {arch.QUEUE_DEPTH}")

    @property
    def problem(self) -> str:
        """The problem, for messages."""
        if len(self.lengths) == 1:
            rows = f"{self.lengths[0][0]} queries, {self.lengths[0][1]} keys"
        else:
            rows = f"{len(self.lengths)} sequences of up to {max(q for q, _ in self.lengths)} queries"
        return f"attention of {rows}, {self.heads} heads ({self.kv_heads} of keys), d = {self.configuration.d}"

    # --- host buffers, in words ---------------------------------------------------------------------------------------

    @cached_property
    def key_tiles(self) -> tuple[int, ...]:
        """Of each sequence, its key tiles."""
        return tuple(-(-keys // KEY_TILE) for _, keys in self.lengths)

    @cached_property
    def first_tiles(self) -> tuple[int, ...]:
        """Of each sequence, how many key tiles the buffer has before its own, all heads together."""
        return tuple(_starts([tiles * self.kv_heads for tiles in self.key_tiles]))

    @property
    def all_tiles(self) -> int:
        """Key tiles of all sequences and heads."""
        return self.kv_heads * sum(self.key_tiles)

    @property
    def slot_q_words(self) -> int:
        """Words of the queries of a query tile and head."""
        return arch.CORE_ROWS * self.configuration.q_object // arch.WORD

    @property
    def slot_y_words(self) -> int:
        """Words of the results of a query tile and head."""
        return arch.CORE_ROWS * PIECES * self.configuration.y_object // arch.WORD

    def slots(self) -> Iterator[tuple[Item, int]]:
        """Query tiles and heads in the order of the buffers: each column's work, of each item its blocks."""
        config = self.configuration
        for items in self.teams:
            for column in range(config.share):
                for item in items:
                    for head in item.heads[column * config.blocks : (column + 1) * config.blocks]:
                        yield item, head

    @cached_property
    def column_slots(self) -> tuple[int, ...]:
        """Of each column, its query tiles and heads."""
        config = self.configuration
        return tuple(len(items) * config.blocks for items in self.teams for _ in range(config.share))

    @property
    def q_words(self) -> int:
        """Words of the queries' buffer."""
        return sum(self.column_slots) * self.slot_q_words

    @property
    def y_words(self) -> int:
        """Words of the results' buffer."""
        return sum(self.column_slots) * self.slot_y_words

    def tile_words(self, *, int8: bool) -> int:
        """Words of a key tile of that kind."""
        return self.configuration.tile_bytes(int8=int8) // arch.WORD

    @property
    def int8_offset(self) -> int:
        """Word of ``kv`` at which the INT8 tiles begin, behind the 16-bit ones."""
        return self.all_tiles * self.tile_words(int8=False) if self.has_wide else 0

    @property
    def kv_words(self) -> int:
        """Words of the keys' and values' buffer; one that nobody reads where no query sees a key."""
        words = self.int8_offset + (self.all_tiles * self.tile_words(int8=True) if self.has_int8 else 0)
        return max(words, 1)

    # --- what it takes ------------------------------------------------------------------------------------------------

    @cached_property
    def queue_depths(self) -> dict[tuple[str, int], int]:
        """Most tasks outstanding on each channel."""
        now: dict[tuple[str, int], int] = {}
        most: dict[tuple[str, int], int] = {}
        for step in self.steps:
            channel = step.transfer.stream, step.transfer.index
            if step.after is not None:
                before = self.steps[step.after].transfer
                now[before.stream, before.index] -= 1
            now[channel] = now.get(channel, 0) + 1
            most[channel] = max(most.get(channel, 0), now[channel])
        return most

    @property
    def tasks(self) -> int:
        """Tasks to issue."""
        return len(self.steps)

    @property
    def counts(self) -> tuple[int, int]:
        """INT8 tiles and 16-bit tiles that are executed, all heads together."""
        totals = [(sum(head != NO_HEAD for head in item.heads), *item.counts) for items in self.teams for item in items]
        return sum(heads * n8 for heads, n8, _ in totals), sum(heads * n16 for heads, _, n16 in totals)

    @cached_property
    def kv_bytes(self) -> tuple[int, ...]:
        """Bytes of each stream of keys and values."""
        sizes = self.configuration.tile_bytes(int8=True), self.configuration.tile_bytes(int8=False)
        counts = [[item.counts for item in items] for items in self.teams]
        return tuple(sum(n8 * sizes[0] + n16 * sizes[1] for n8, n16 in each) for each in counts)

    @property
    def dram_bytes(self) -> tuple[int, int]:
        """Bytes read from and written to the host's memory."""
        return arch.WORD * self.q_words + sum(self.kv_bytes), arch.WORD * self.y_words

    @cached_property
    def costs(self) -> AttentionCosts:
        """What each part of the array would need, modelled."""
        cycles = cycles_of(self.configuration)
        read, written = self.dram_bytes
        return AttentionCosts.modelled(
            compute=[sum(cycles.compute(*item.counts) for item in items) for items in self.teams],
            kv_bytes=self.kv_bytes,
            read=read,
            written=written,
            tasks=self.tasks,
        )

    @property
    def macs(self) -> tuple[int, int]:
        """Products of the executed tiles: with INT8 scores, and in bfloat16 (scores of 16-bit tiles, and all P V)."""
        n8, n16 = self.counts
        tile = ROW_TILE * KEY_TILE * self.configuration.d
        return n8 * tile, (n8 + 2 * n16) * tile

    def __str__(self) -> str:
        return "\n".join(self._summary())

    def details(self) -> str:
        """All tasks, a line each: the one that it waits for, stream, loops (size@stride in words)."""
        lines = ["  task  after  stream  words"]
        for number, step in enumerate(self.steps):
            after = "" if step.after is None else str(step.after)
            lines.append(f"{number:6} {after:>6}  {step.transfer.stream}{step.transfer.index:<5}  {step.transfer.tap}")
        return "\n".join(lines)

    def _summary(self) -> Iterator[str]:
        config, costs = self.configuration, self.costs
        n8, n16 = self.counts
        yield f"{self.problem}, on {config.name}"
        yield f"  kernel      {config.kernel}"
        yield (
            f"  work        {sum(map(len, self.teams))} query tiles of {ROW_TILE} rows by {config.heads} heads, in "
            f"{config.teams} streams; {CORE_ROWS} rows a core, {config.blocks} heads"
        )
        yield (
            f"  key tiles   {n8} INT8 of {INT8_OBJECTS} objects, {n16} 16-bit of {WIDE_OBJECTS}; an object has "
            f"{config.kv_object} bytes"
        )
        for budget in config.budgets():
            yield f"  {budget}"
        deepest = max(self.queue_depths.values(), default=0)
        yield f"  tasks       {self.tasks}, at most {deepest} on a channel (of {arch.QUEUE_DEPTH})"
        yield "  DRAM        {} bytes read, {} written".format(*self.dram_bytes)
        yield f"  modelled    {costs}"


def attention(
    sequences: Sequence[Lengths],
    *,
    heads: int,
    kv_heads: int,
    d: int,
    columns: int = arch.COLUMNS,
    blocks: int | None = None,
    share: int | None = None,
) -> AttentionPlan:
    """The plan of softmax(q k') v for some sequences.

    Args:
        sequences: Their lengths and routing.
        heads: Heads of q.
        kv_heads: Heads of k and v; divides ``heads``.
        d: Size of a head, of q, k and v, as the kernels take it (`AttentionConfiguration`).
        columns: Columns of the array.
        blocks, share: Heads of a core and columns of a stream (`AttentionConfiguration`); the model's choice when None.

    Raises:
        PlanError: The array can't run it; the message says which limit.
    """
    heads, kv_heads = checked_int(heads, "heads"), checked_int(kv_heads, "kv_heads")
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise PlanError(f"heads = {heads}, kv_heads = {kv_heads}: each head of k serves the same number of heads of q")
    for number, sequence in enumerate(sequences):
        _check(number, sequence, kv_heads)
    configurations = _configurations(d, columns, heads // kv_heads, blocks, share)
    plans = [_laid_out(config, sequences, heads, kv_heads) for config in configurations]
    return _with_steps(min(plans, key=lambda plan: plan.costs.total))


def _configurations(
    d: int, columns: int, group: int, blocks: int | None, share: int | None
) -> list[AttentionConfiguration]:
    """Those to choose among: as asked for, or such that no more than a half of the heads is padding."""
    found = []
    for each in (1, 2) if blocks is None else (blocks,):
        for columns_each in SHARES if share is None else (share,):
            possible = (blocks is not None or each == 1 or d == min(HEAD_DIMS)) and (
                share is not None or columns % columns_each == 0
            )
            mostly_heads = blocks is not None or share is not None or each * columns_each < 2 * group
            if possible and mostly_heads:
                found.append(AttentionConfiguration(d, columns, each, columns_each))
    return found


def _laid_out(config: AttentionConfiguration, sequences: Sequence[Lengths], heads: int, kv_heads: int) -> AttentionPlan:
    """The plan but for its steps."""
    _check_buffers(config, sequences, heads, kv_heads)
    items = list(_items(sequences, heads, kv_heads, config.heads))
    return AttentionPlan(
        config,
        heads,
        kv_heads,
        tuple((s.query_len, s.key_len) for s in sequences),
        _deal(items, config.teams, cycles_of(config)),
        has_int8=any(item.int8 for item in items),
        has_wide=any(item.wide for item in items),
        steps=(),
    )


def _check(number: int, sequence: Lengths, kv_heads: int) -> None:
    maps, *shape = sequence.int8.shape
    tiles = sequence.query_tiles, sequence.key_tiles
    if maps not in (1, kv_heads) or tuple(shape) != tiles:
        raise PlanError(
            f"sequence {number}: routing of shape {list(sequence.int8.shape)}; {sequence.query_len} queries and "
            f"{sequence.key_len} keys have {tiles[0]} x {tiles[1]} tiles, for 1 or {kv_heads} heads"
        )
    if len(sequence.first) != tiles[0] or len(sequence.stop) != tiles[0]:
        raise PlanError(f"sequence {number}: executed tiles of {len(sequence.first)} query tiles; it has {tiles[0]}")
    if any(not 0 <= first <= stop <= tiles[1] for first, stop in zip(sequence.first, sequence.stop, strict=True)):
        raise PlanError(f"sequence {number}: executed tiles are from 0 to {tiles[1]}, first before stop")


def _check_buffers(config: AttentionConfiguration, sequences: Sequence[Lengths], heads: int, kv_heads: int) -> None:
    """Before anything is listed: whether the host's buffers can be addressed."""
    tiles = kv_heads * sum(s.key_tiles for s in sequences)
    padded = kv_heads * config.heads * -(-heads // (kv_heads * config.heads))
    items = padded * sum(s.query_tiles for s in sequences)
    both = config.tile_bytes(int8=True) + config.tile_bytes(int8=False)
    sizes = {"keys and values": tiles * both, "queries": items * arch.CORE_ROWS * config.q_object}
    for name, nbytes in sizes.items():
        if nbytes > MAX_BUFFER_BYTES:
            raise PlanError(
                f"the {name} of {heads} heads ({kv_heads} of keys), d = {config.d}, take {nbytes} bytes, and a buffer "
                f"holds {MAX_BUFFER_BYTES}; split the sequences or the heads"
            )


def _items(sequences: Sequence[Lengths], heads: int, kv_heads: int, together: int) -> Iterator[Item]:
    """The query tiles of ``together`` heads of a group at a time."""
    group = heads // kv_heads
    for number, sequence in enumerate(sequences):
        maps = len(sequence.int8)
        for m in range(sequence.query_tiles):
            first, stop = sequence.first[m], sequence.stop[m]
            routed = []
            for which in range(maps):
                bits = sequence.int8[which, m, first:stop]
                routed.append((runs_of(bits, first), runs_of(~bits, first)))
            for kv_head in range(kv_heads):
                int8, wide = routed[kv_head if maps > 1 else 0]
                for start in range(0, group, together):
                    own = [kv_head * group + i if i < group else NO_HEAD for i in range(start, start + together)]
                    yield Item(number, tuple(own), m, int8, wide)


def _deal(items: list[Item], teams: int, cycles: AttentionCycles) -> tuple[tuple[Item, ...], ...]:
    """Query tiles to streams, the longest first, each to the one that is done soonest."""
    dealt: list[list[Item]] = [[] for _ in range(teams)]
    done = [(0.0, team) for team in range(teams)]
    for item in sorted(items, key=lambda item: -cycles.pace(*item.counts)):  # stable: equal ones stay in order
        time, team = heapq.heappop(done)
        dealt[team].append(item)
        heapq.heappush(done, (time + cycles.pace(*item.counts), team))
    return tuple(map(tuple, dealt))


def _with_steps(plan: AttentionPlan) -> AttentionPlan:
    """``plan`` with its steps, in an order in which no wait holds up another stream's for long.

    A column's queries and results are a run each. Its keys and values take a task for each run of tiles, of which four
    at a time are outstanding: the next is issued once the fourth before is over.
    """
    steps: list[Step] = []
    for column, (start, count) in enumerate(zip(_starts(plan.column_slots), plan.column_slots, strict=True)):
        if count:
            q = Tap.run(start * plan.slot_q_words, count * plan.slot_q_words)
            y = Tap.run(start * plan.slot_y_words, count * plan.slot_y_words)
            steps += [Step(Transfer("q", column, q)), Step(Transfer("y", column, y))]
    moved = [list(_streamed(plan, items)) for items in plan.teams]
    depth = arch.QUEUE_DEPTH
    order = [
        (taps[i - depth][0] if i >= depth else 0.0, i, team)
        for team, taps in enumerate(moved)
        for i in range(len(taps))
    ]
    issued: list[list[int]] = [[] for _ in moved]
    for _, i, team in sorted(order):
        after = issued[team][i - depth] if i >= depth else None
        issued[team].append(len(steps))
        steps.append(Step(Transfer("kv", team, moved[team][i][1]), after))
    return replace(plan, steps=tuple(steps))


def _streamed(plan: AttentionPlan, items: Sequence[Item]) -> Iterator[tuple[float, Tap]]:
    """A stream's tasks, with the modelled time by which its cores are done with each."""
    cycles = cycles_of(plan.configuration)
    group = plan.heads // plan.kv_heads
    now = 0.0
    for item in items:
        start = plan.first_tiles[item.sequence] + item.heads[0] // group * plan.key_tiles[item.sequence]
        for int8, runs in ((True, item.int8), (False, item.wide)):
            words = plan.tile_words(int8=int8)
            base = (plan.int8_offset if int8 else 0) + start * words
            for first, count, times, step in strided(runs, words):
                tiles = count * times
                now += cycles.pace(tiles, 0) if int8 else cycles.pace(0, tiles)
                yield now, pattern(base + first * words, count * words, times, step * words)


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts
