"""Attention on the 4x8 array, INT8 or bfloat16 scores by tile: softmax(q k') v.

A column computes a query tile of 128 rows at a time, a fourth on each of its cores. Keys and values come through the
column's memory tile as equal objects and are broadcast to the four: first the tiles with INT8 scores, three objects
each, then those with bfloat16 scores, four each. How many of either is written at the head of a core's queries, so the
program has neither branches nor lengths, and the routing is nothing but the order of the run-time sequence.

A core keeps maxima, sums and outputs in fp32 and sends its rows when the last tile has passed. docs/dataflow.md has the
picture.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilefuse import arch
from tilefuse.attention_configurations import PIECES, STATE_BYTES, AttentionConfiguration
from tilefuse.designs.parts import words
from tilefuse.plan.score_tiles import AttentionPlan


def attention(iron: Any, plan: AttentionPlan) -> Any:
    """The program of ``plan``, built with the names of ``iron`` (see `tilefuse.designs.namespace`)."""
    config = plan.configuration
    q_in, q_cores = _queries(iron, config)
    kv_in, kv_columns = _keys_and_values(iron, config)
    y_out, y_cores = _results(iron, config)

    q, kv, y = words(config.q_object), words(config.kv_object), words(config.y_object)
    o, scores, p = words(config.o_bytes), words(config.scores_bytes), words(config.p_bytes)
    state = words(STATE_BYTES)

    def function(stem: str, *types: Any) -> Any:
        return iron.Kernel(f"{config.kernel}_{stem}", f"{config.kernel}.o", list(types))

    begin = function("begin", state, o)
    scores_int8 = function("scores_int8", q, kv, scores)
    scores_bf16 = function("scores_bf16", q, kv, np.int32, scores)
    softmax = function("softmax", scores, state, o, p)
    values = function("values", p, kv, np.int32, o)
    store = function("store", o, state, np.int32, y)

    def core(q: Any, kv: Any, y: Any, o: Any, scores: Any, p: Any, state: Any, *calls: Any) -> None:
        begin, scores_int8, scores_bf16, softmax, values, store = calls

        def weigh() -> None:
            softmax(scores, state, o, p)
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

    workers = [
        iron.Worker(
            core,
            [
                q_cores[column][row].cons(),
                kv_columns[column].cons(),
                y_cores[column][row].prod(),
                iron.Buffer(o, name=f"o{column}_{row}"),
                iron.Buffer(scores, name=f"scores{column}_{row}"),
                iron.Buffer(p, name=f"p{column}_{row}"),
                iron.Buffer(state, name=f"state{column}_{row}"),
                *(begin, scores_int8, scores_bf16, softmax, values, store),
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
    """Fifos into the memory tiles, and from each the four to its cores."""
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
    """Fifos into the memory tiles, and from each the one that all four cores read."""
    into, out = [], []
    for column in range(config.columns):
        fifo = iron.ObjectFifo(words(config.kv_object), depth=config.kv_l2_depth, name=f"kv{column}")
        into.append(fifo)
        out.append(fifo.cons().forward(tile=iron.Tile(column, arch.MEM_ROW), depth=2, name=f"kv{column}_cores"))
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

    columns = range(plan.configuration.columns)
    runtime = iron.Runtime(
        sequence,
        [
            *(words(arch.WORD * sizes[name]) for name in ("q", "kv", "y")),
            [fifo.prod(tile=iron.Tile(column, arch.SHIM_ROW)) for column, fifo in zip(columns, q_in, strict=True)],
            [fifo.prod(tile=iron.Tile(column, arch.SHIM_ROW)) for column, fifo in zip(columns, kv_in, strict=True)],
            [fifo.cons(tile=iron.Tile(column, arch.SHIM_ROW)) for column, fifo in zip(columns, y_out, strict=True)],
        ],
    )
    return iron.Program(iron.device(plan.configuration.columns), runtime, workers=workers).resolve_program()
