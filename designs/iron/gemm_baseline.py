"""The GEMM that quantised ones are compared with: bfloat16 activations as they are, bfloat16 weights.

The dataflow of a well-known whole-array design: activations broadcast along rows and re-ordered into blocks by the
memory tile, weights broadcast down columns, 32 x 64 fp32 sums a core. The multiplication converts both operands for
each product. Weights are in plain tiles, in the order of the packed format, which is kinder to it than row-major ones.
"""

from __future__ import annotations

import sys
from typing import Any

from tilefuse import arch
from tilefuse.configurations import Op
from tilefuse.designs.emit import main
from tilefuse.designs.parts import Functions, broadcast_rows, gemm_program, join_results, words
from tilefuse.layout import KT
from tilefuse.plan import Plan


def gemm_baseline(iron: Any, plan: Plan) -> Any:
    """The program of ``plan``, built with the names of ``iron`` (see `tilefuse.designs.namespace`)."""
    config = plan.configuration
    line = KT // 2  # words of a row
    blocks = [(config.rows // 8, 8 * line), (KT // 8, 4), (8, line), (4, 1)]
    x_in, x_rows = broadcast_rows(iron, config, blocks)
    w_in, w_columns = [], []
    for column in range(config.columns):
        fifo = iron.ObjectFifo(words(config.w_l2_object), depth=config.w_l2_depth, name=f"w{column}")
        w_in.append(fifo)
        # One object in a core: once prepared it is given back, and the next arrives during the multiplication.
        w_columns.append(fifo.cons().forward(tile=iron.Tile(column, arch.MEM_ROW), depth=1, name=f"w{column}_cores"))
    y_out, y_cores = join_results(iron, config, depth=1)

    sums = config.sums_bytes
    sizes = {"x": config.x_object, "w": config.w_object, "y": config.y_object, "sums": sums}
    functions = Functions(iron, config, sizes)
    zero = functions("zero", "sums")
    prepare = functions("prepare", "w", "scratch")
    multiply = functions("", "x", "scratch", "scratch", "sums")
    store = functions("store_bf16", "sums", "y")

    def core(x: Any, w: Any, y: Any, sums: Any, scratch: Any, *calls: Any) -> None:
        zero, prepare, multiply, store = calls
        head = x.acquire(1)
        passes, k_tiles = head[0], head[1]
        x.release(1)
        for _ in iron.range_(passes):
            zero(sums)
            for _ in iron.range_(k_tiles):
                weights = w.acquire(1)
                prepare(weights, scratch)
                w.release(1)
                block = x.acquire(1)
                # The weights themselves are not looked at again.
                multiply(block, scratch, scratch, sums)
                x.release(1)
            piece = y.acquire(1)
            store(sums, piece)
            y.release(1)

    calls = (zero, prepare, multiply, store)
    return gemm_program(iron, plan, core, calls, sums, (x_in, x_rows), (w_in, w_columns), (y_out, y_cores))


if __name__ == "__main__":
    sys.exit(main(Op.GEMM_BASELINE))
