"""The GEMV that the fused one is compared with: one row of cores, each with the weights of its column.

Weights are bfloat16 for the full-precision baseline, or packed ones for the first step of the ladder that ends with all
32 cores. Activations are broadcast to all cores, anew for every output tile.
"""

from __future__ import annotations

import sys
from typing import Any

from tilefuse import arch
from tilefuse.configurations import Op
from tilefuse.designs.emit import main
from tilefuse.designs.parts import Functions, program, words
from tilefuse.plan import Plan


def gemv_baseline(iron: Any, plan: Plan) -> Any:
    """The program of ``plan``, built with the names of ``iron`` (see `tilefuse.designs.namespace`)."""
    config = plan.configuration
    columns = list(range(config.columns))
    x = iron.ObjectFifo(words(config.x_object), depth=2, name="x")
    w_in = [iron.ObjectFifo(words(config.w_l2_object), depth=config.w_l2_depth, name=f"w{c}") for c in columns]
    w_cores = [
        fifo.cons().forward(tile=iron.Tile(c, arch.MEM_ROW), depth=2, name=f"w{c}_core") for c, fifo in enumerate(w_in)
    ]
    y_out = [iron.ObjectFifo(words(config.y_object), depth=2, name=f"y{c}") for c in columns]

    sizes = {"x": config.x_object, "w": config.w_object, "y": config.y_object, "sums": config.sums_bytes}
    functions = Functions(iron, config, sizes)
    zero = functions("zero", "sums")
    prepare = functions("prepare", "x", "scratch")
    multiply = functions("", "scratch", "w", "sums")
    store = functions("store_bf16", "sums", "y")

    def core(x: Any, w: Any, y: Any, sums: Any, scratch: Any, *calls: Any) -> None:
        zero, prepare, multiply, store = calls
        head = x.acquire(1)
        outputs, k_tiles = head[0], head[1]
        x.release(1)
        for _ in iron.range_(outputs):
            zero(sums)
            for _ in iron.range_(k_tiles):
                part = x.acquire(1)
                prepare(part, scratch)
                x.release(1)
                weights = w.acquire(1)
                multiply(scratch, weights, sums)
                w.release(1)
            result = y.acquire(1)
            store(sums, result)
            y.release(1)

    workers = [
        iron.Worker(
            core,
            [
                x.cons(),
                w_cores[column].cons(),
                y_out[column].prod(),
                iron.Buffer(words(config.sums_bytes), name=f"sums{column}"),
                iron.Buffer(words(config.scratch_bytes), name=f"scratch{column}"),
                zero,
                prepare,
                multiply,
                store,
            ],
            tile=iron.Tile(column, arch.FIRST_CORE_ROW),
            stack_size=config.stack_bytes,
            dynamic_objfifo_lowering=True,
        )
        for column in columns
    ]
    return program(iron, plan, workers, [x], w_in, y_out, ([config.columns // 2], columns, columns))


if __name__ == "__main__":
    sys.exit(main(Op.GEMV_BASELINE))
