"""GEMV on all 32 cores: y = x W for one row of activations.

Four cores of a column share the reduction: the column's weights come through its memory tile, which gives row r the k
tiles r, r + 4, ...; partial sums go down the column from neighbour to neighbour, and the lowest core sends the outputs.
Every core first keeps its quarter of x, for all outputs.

With one weight stream a column, x comes from one shim to all cores at once, behind the parameters. With two, each feeds
two rows, and brings their x and the parameters itself, in objects as large as a tile of weights: no core then needs a
second stream, and a column takes 8 bytes a cycle.
"""

from __future__ import annotations

import sys
from typing import Any

from tilefuse import arch
from tilefuse.configurations import RESIDENT_BYTES, Configuration, Op
from tilefuse.designs.emit import main
from tilefuse.designs.parts import Functions, program, words
from tilefuse.layout import ROWS
from tilefuse.plan import Plan


def gemv(iron: Any, plan: Plan) -> Any:
    """The program of ``plan``, built with the names of ``iron`` (see `tilefuse.designs.namespace`)."""
    config = plan.configuration
    columns = range(config.columns)
    w_in, w_cores = _weights(iron, config)
    sums_type = words(config.sums_bytes)
    # Partial sums go down a column: down_to[column][row] brings row those of row + 1.
    down_to = [
        [iron.ObjectFifo(sums_type, depth=2, name=f"sums{column}_{row + 1}") for row in range(ROWS - 1)]
        for column in columns
    ]
    y_out = [iron.ObjectFifo(words(config.y_object), depth=2, name=f"y{column}") for column in columns]

    sizes = {
        "w": config.w_object,
        "x": config.x_object,
        "y": config.y_object,
        "sums": config.sums_bytes,
        "kept": RESIDENT_BYTES,
    }
    functions = Functions(iron, config, sizes)
    zero = functions("zero", "sums")
    prepare = functions("prepare_resident", "kept", int, "scratch")
    multiply = functions("", "scratch", "w", "sums")
    add = functions("add", "sums", "sums")
    store = functions("store_bf16", "sums", "y")

    def reduce_own(w: Any, kept: Any, scratch: Any, sums: Any, above: Any, steps: Any) -> None:
        """sums = this row's part of the reduction, and what comes from above."""
        zero(sums)
        for step in iron.range_(steps):
            prepare(kept, step, scratch)
            weights = w.acquire(1)
            multiply(scratch, weights, sums)
            w.release(1)
        if above is not None:
            partial = above.acquire(1)
            add(partial, sums)
            above.release(1)

    def make_outputs(outputs: Any, steps: Any, w: Any, kept: Any, scratch: Any, sums: Any, above: Any, to: Any) -> None:
        for _ in iron.range_(outputs):
            target = to.acquire(1)
            if sums is None:
                reduce_own(w, kept, scratch, target, above, steps)
            else:
                reduce_own(w, kept, scratch, sums, above, steps)
                store(sums, target)
            to.release(1)

    def core_beside_x(
        row: int, x: Any, w: Any, kept: Any, scratch: Any, sums: Any, above: Any, to: Any, *_: Any
    ) -> None:
        head = x.acquire(1)
        outputs, steps = head[0], head[1]
        x.release(1)
        for step in iron.range_(steps):
            part = x.acquire(1)
            keep(part, row, step, kept)
            x.release(1)
        make_outputs(outputs, steps, w, kept, scratch, sums, above, to)

    def core(w: Any, kept: Any, scratch: Any, sums: Any, above: Any, to: Any, *_: Any) -> None:
        head = w.acquire(1)
        outputs, steps, objects = head[0], head[1], head[2]
        keep(head, 0, kept)
        w.release(1)
        for index in iron.range_(1, objects):
            part = w.acquire(1)
            keep(part, index, kept)
            w.release(1)
        make_outputs(outputs, steps, w, kept, scratch, sums, above, to)

    if config.streams == 1:
        x = iron.ObjectFifo(words(config.x_object), depth=2, name="x")
        keep = functions("keep_row", "x", int, int, "kept")
    else:
        keep = functions("keep", "w", int, "kept")
    workers = []
    for column in columns:
        for row in range(ROWS):
            lowest = row == 0
            arguments = [
                w_cores[column][row].cons(),
                iron.Buffer(words(RESIDENT_BYTES), name=f"kept{column}_{row}"),
                iron.Buffer(words(config.scratch_bytes), name=f"scratch{column}_{row}"),
                # The lowest core sums beside its output; the others where the core below reads it.
                iron.Buffer(sums_type, name=f"own_sums{column}") if lowest else None,
                down_to[column][row].cons() if row < ROWS - 1 else None,
                y_out[column].prod() if lowest else down_to[column][row - 1].prod(),
                # Named here too: a worker declares the functions among its arguments.
                *(keep, zero, prepare, multiply, add, store),
            ]
            workers.append(
                iron.Worker(
                    core if config.streams == 2 else core_beside_x,
                    arguments if config.streams == 2 else [row, x.cons(), *arguments],
                    tile=iron.Tile(column, arch.FIRST_CORE_ROW + row),
                    stack_size=config.stack_bytes,
                    dynamic_objfifo_lowering=True,
                )
            )

    w_shims = [column for column in columns for _ in range(config.streams)]
    if config.streams == 1:
        shims = [config.columns // 2], w_shims, list(columns)
        return program(iron, plan, workers, [x], w_in, y_out, shims)
    # x goes the way of the weights: the same ends under both names.
    return program(iron, plan, workers, w_in, w_in, y_out, (w_shims, w_shims, list(columns)))


def _weights(iron: Any, config: Configuration) -> tuple[list[Any], list[list[Any]]]:
    """Fifos into the memory tiles, and the four fifos from each to its column's cores."""
    rows = ROWS // config.streams
    into: list[Any] = []
    cores: list[list[Any]] = []
    for column in range(config.columns):
        cores.append([])
        for stream in range(config.streams):
            name = f"w{column}" if config.streams == 1 else f"w{column}_{stream}"
            fifo = iron.ObjectFifo(words(config.w_l2_object), depth=config.w_l2_depth, name=name)
            into.append(fifo)
            cores[column] += fifo.cons().split(
                [row * config.w_object // arch.WORD for row in range(rows)],
                tile=iron.Tile(column, arch.MEM_ROW),
                depths=[2] * rows,
                obj_types=[words(config.w_object)] * rows,
                names=[f"{name}_core{stream * rows + row}" for row in range(rows)],
            )
    return into, cores


if __name__ == "__main__":
    sys.exit(main(Op.GEMV))
