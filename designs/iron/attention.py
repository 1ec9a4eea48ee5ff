"""Attention on the 4x8 array, INT8 or bfloat16 scores by tile: softmax(q k') v.

A column computes a query tile of 128 rows at a time, a fourth on each of its cores. Keys and values come through a
memory tile as equal objects and are broadcast to the cores of one, two or four columns, each with heads of its own:
first the tiles with INT8 scores, three objects each, then those with bfloat16 scores, four each. How many of either is
written at the head of a core's queries, so the program has neither branches nor lengths, and the routing is nothing but
the order of the run-time sequence.

A core keeps maxima, sums and outputs in fp32, of one head or two, and sends its rows when the last tile has passed.
docs/dataflow.md has the picture.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilefuse import arch, shapes
from tilefuse.attention_configurations import P_BYTES, PIECES, SCORES_BYTES, STATE_BYTES, AttentionConfiguration
from tilefuse.designs.emit import add_options, write
from tilefuse.designs.parts import words
from tilefuse.plan.score_tiles import AttentionPlan


def attention(iron: Any, plan: AttentionPlan) -> Any:
    """The program of ``plan``, built with the names of ``iron`` (see `tilefuse.designs.namespace`)."""
    config = plan.configuration
    blocks = config.blocks
    q_in, q_cores = _queries(iron, config)
    kv_in, kv_teams = _keys_and_values(iron, config)
    y_out, y_cores = _results(iron, config)

    q, kv, y = words(config.q_object), words(config.kv_object), words(config.y_object)
    o, scores, p, state = words(config.o_bytes), words(SCORES_BYTES), words(P_BYTES), words(STATE_BYTES)

    def function(stem: str, *types: Any) -> Any:
        return iron.Kernel(f"{config.kernel}_{stem}", f"{config.kernel}.o", list(types))

    calls = (
        function("begin", state, o),
        function("scores_int8", q, kv, scores),
        function("scores_bf16", q, kv, np.int32, scores),
        function("softmax", scores, state, p),
        function("values", p, kv, np.int32, o),
        function("store", o, state, np.int32, y),
    )

    def core_of_one(q: Any, kv: Any, y: Any, scores: Any, o: Any, state: Any, p: Any, *calls: Any) -> None:
        begin, scores_int8, scores_bf16, softmax, values, store = calls

        def weigh() -> None:
            softmax(scores, state, p)
            for half in range(2):
                rows = kv.acquire(1)
                values(p, rows, half, o)
                kv.release(1)

        # Held until the rows are done: there is no copy of the queries.
        queries = q.acquire(1)
        int8_tiles, wide_tiles = queries[0], queries[1]
        begin(state, o)
        for _ in iron.range_(int8_tiles):
            keys = kv.acquire(1)
            scores_int8(queries, keys, scores)
            kv.release(1)
            weigh()
        for _ in iron.range_(wide_tiles):
            for half in range(2):
                keys = kv.acquire(1)
                scores_bf16(queries, keys, half, scores)
                kv.release(1)
            weigh()
        for block in iron.range_(PIECES):
            piece = y.acquire(1)
            store(o, state, block, piece)
            y.release(1)
        q.release(1)

    def core_of_two(
        q: Any, kv: Any, y: Any, scores: Any, o0: Any, o1: Any, state0: Any, state1: Any, p0: Any, p1: Any, *calls: Any
    ) -> None:
        begin, scores_int8, scores_bf16, softmax, values, store = calls
        heads = ((0, o0, state0, p0), (1, o1, state1, p1))

        def weigh() -> None:
            for half in range(2):
                rows = kv.acquire(1)
                for _, o, _, p in heads:
                    values(p, rows, half, o)
                kv.release(1)

        queries = q.acquire(2)
        int8_tiles, wide_tiles = queries[0][0], queries[0][1]
        for _, o, state, _ in heads:
            begin(state, o)
        for _ in iron.range_(int8_tiles):
            keys = kv.acquire(1)
            for head, _, state, p in heads:
                scores_int8(queries[head], keys, scores)
                softmax(scores, state, p)
            kv.release(1)
            weigh()
        for _ in iron.range_(wide_tiles):
            # There is memory for the scores of one head only, and so for both halves of the keys.
            halves = kv.acquire(2)
            for head, _, state, p in heads:
                for half in range(2):
                    scores_bf16(queries[head], halves[half], half, scores)
                softmax(scores, state, p)
            kv.release(2)
            weigh()
        for _, o, state, _ in heads:
            for block in iron.range_(PIECES):
                piece = y.acquire(1)
                store(o, state, block, piece)
                y.release(1)
        q.release(2)

    def buffers(kind: Any, name: str, at: str) -> list[Any]:
        return [iron.Buffer(kind, name=f"{name}{at}" + (f"_{block}" if blocks > 1 else "")) for block in range(blocks)]

    workers = [
        iron.Worker(
            core_of_one if blocks == 1 else core_of_two,
            [
                q_cores[column][row].cons(depth=blocks),
                kv_teams[column // config.share].cons(),
                y_cores[column][row].prod(),
                iron.Buffer(scores, name=f"scores{column}_{row}"),
                *buffers(o, "o", f"{column}_{row}"),
                *buffers(state, "state", f"{column}_{row}"),
                *buffers(p, "p", f"{column}_{row}"),
                *calls,
            ],
            tile=iron.Tile(column, arch.FIRST_CORE_ROW + row),
            stack_size=config.stack_bytes,
            dynamic_objfifo_lowering=True,
        )
        for column in range(config.columns)
        for row in range(arch.CORE_ROWS)
    ]
    return _program(iron, plan, workers, q_in, kv_in, y_out)


def _queries(iron: Any, config: AttentionConfiguration) -> tuple[list[Any], list[list[Any]]]:
    """Fifos into the memory tiles, and from each the four to its cores.

    Both ends of a core's fifo must not have one depth if the core takes two objects at a time: of such a fifo the
    compiler makes one object more than are taken, to read ahead, and there is no memory for a third. The memory tile's
    end has no objects of its own, so its depth says nothing.
    """
    rows = range(arch.CORE_ROWS)
    into, cores = [], []
    for column in range(config.columns):
        fifo = iron.ObjectFifo(words(arch.CORE_ROWS * config.q_object), depth=2, name=f"q{column}")
        into.append(fifo)
        cores.append(
            fifo.cons().split(
                [row * config.q_object // arch.WORD for row in rows],
                tile=iron.Tile(column, arch.MEM_ROW),
                depths=[1 for _ in rows],
                obj_types=[words(config.q_object) for _ in rows],
                names=[f"q{column}_core{row}" for row in rows],
            )
        )
    return into, cores


def _keys_and_values(iron: Any, config: AttentionConfiguration) -> tuple[list[Any], list[Any]]:
    """Fifos into the memory tile of a stream's first column, and from each the one that all its cores read."""
    into, out = [], []
    for team in range(config.teams):
        fifo = iron.ObjectFifo(words(config.kv_object), depth=config.kv_l2_depth, name=f"kv{team}")
        into.append(fifo)
        tile = iron.Tile(team * config.share, arch.MEM_ROW)
        out.append(fifo.cons().forward(tile=tile, depth=config.kv_depth, name=f"kv{team}_cores"))
    return into, out


def _results(iron: Any, config: AttentionConfiguration) -> tuple[list[Any], list[list[Any]]]:
    """Fifos out of the memory tiles, and for each the four of its cores: a piece of each makes an object."""
    rows = range(arch.CORE_ROWS)
    out, cores = [], []
    for column in range(config.columns):
        fifo = iron.ObjectFifo(words(arch.CORE_ROWS * config.y_object), depth=2, name=f"y{column}")
        out.append(fifo)
        cores.append(
            fifo.prod().join(
                [row * config.y_object // arch.WORD for row in rows],
                tile=iron.Tile(column, arch.MEM_ROW),
                depths=[1 for _ in rows],
                obj_types=[words(config.y_object) for _ in rows],
                names=[f"y{column}_core{row}" for row in rows],
            )
        )
    return out, cores


def _program(
    iron: Any, plan: AttentionPlan, workers: list[Any], q_in: list[Any], kv_in: list[Any], y_out: list[Any]
) -> Any:
    """The resolved program: ``workers``, and a sequence that issues the plan's tasks, each once its turn has come."""
    sizes = {"q": plan.q_words, "kv": plan.kv_words, "y": plan.y_words}

    def sequence(q: Any, kv: Any, y: Any, q_in: Any, kv_in: Any, y_out: Any) -> None:
        hosts, ends = {"q": q, "kv": kv, "y": y}, {"q": q_in, "kv": kv_in, "y": y_out}
        opened: dict[int, Any] = {}
        for number, step in enumerate(plan.steps):
            if step.after is not None:
                opened.pop(step.after).finish()
            transfer = step.transfer
            group = opened[number] = iron.TaskGroup()
            tap = iron.TensorAccessPattern(
                (sizes[transfer.stream],), transfer.tap.offset, list(transfer.tap.sizes), list(transfer.tap.strides)
            )
            end, host = ends[transfer.stream][transfer.index], hosts[transfer.stream]
            if transfer.stream == "y":
                end.drain(host, tap=tap, wait=True, group=group)
            else:
                end.fill(host, tap=tap, wait=True, group=group)
        for group in opened.values():
            group.finish()

    config = plan.configuration
    columns, firsts = range(config.columns), range(0, config.columns, config.share)

    def shims(fifos: list[Any], at: range) -> list[tuple[Any, Any]]:
        return [(fifo, iron.Tile(column, arch.SHIM_ROW)) for fifo, column in zip(fifos, at, strict=True)]

    runtime = iron.Runtime(
        sequence,
        [
            *(words(arch.WORD * sizes[name]) for name in ("q", "kv", "y")),
            [fifo.prod(tile=tile) for fifo, tile in shims(q_in, columns)],
            [fifo.prod(tile=tile) for fifo, tile in shims(kv_in, firsts)],
            [fifo.cons(tile=tile) for fifo, tile in shims(y_out, columns)],
        ],
    )
    return iron.Program(iron.device(config.columns), runtime, workers=workers).resolve_program()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code, see `tilefuse.designs.emit`."""
    parser = argparse.ArgumentParser(
        prog="python -m tilefuse.designs.attention", description="Prints the plan of one sequence's attention."
    )
    parser.add_argument("queries", type=int, metavar="QUERIES", help="rows of q")
    parser.add_argument("keys", type=int, metavar="KEYS", help="rows of k and v")
    parser.add_argument("heads", type=int, metavar="HEADS", help="heads of q")
    parser.add_argument("kv_heads", type=int, metavar="KV_HEADS", help="heads of k and v")
    parser.add_argument("d", type=int, metavar="D", help="size of a head: 64 or 128")
    parser.add_argument("--routing", default="local_sink75", help="which tiles are INT8 (local_sink75 unless said)")
    parser.add_argument("--full", action="store_true", help="every query sees every key")
    parser.add_argument("--window", type=int, help="keys that a query sees at most")
    add_options(parser)
    options = parser.parse_args(arguments)
    sizes = options.queries, options.keys, options.heads, options.kv_heads, options.d
    return write(
        lambda: shapes.attention_plan(
            *sizes, options.routing, causal=not options.full, window=options.window, columns=options.columns
        ),
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
