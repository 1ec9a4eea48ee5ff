"""GEMM on the 4x8 array: y = x W straight from packed weights.

Activations of an array row come through one memory tile and are broadcast along the row; the packed weights of a column
come through its memory tile and are broadcast to its four rows. A core keeps the fp32 sums of its rows by 64 or 128
outputs across all of K, and sends them as bfloat16 pieces that its column's memory tile joins into rows of y.

How much there is to do reaches the cores at the head of the activations, so nothing here depends on M, K or N but the
run-time sequence. docs/dataflow.md has the pictures.
"""

from __future__ import annotations

import sys
from typing import Any

from tilefuse import arch
from tilefuse.configurations import L2_BATCH, Configuration, Op
from tilefuse.designs.emit import main
from tilefuse.designs.parts import Functions, broadcast_rows, gemm_program, join_results, words
from tilefuse.plan import Plan


def gemm(iron: Any, plan: Plan) -> Any:
    """The program of ``plan``, built with the names of ``iron`` (see `tilefuse.designs.namespace`)."""
    config = plan.configuration
    x_in, x_rows = broadcast_rows(iron, config)
    w_in, w_columns = _weights(iron, config)
    y_out, y_cores = join_results(iron, config)

    sums = config.max_bands * config.sums_bytes
    sizes = {"x": config.x_object, "w": config.w_object, "y": config.y_object, "sums": sums}
    functions = Functions(iron, config, sizes)
    zero = functions("zero", "sums", int)
    prepare = functions("prepare", "w", "scratch")
    multiply = functions("", "x", "w", "scratch", "sums", int)
    store = functions("store_bf16", "sums", int, int, "y")

    def core(x: Any, w: Any, y: Any, sums: Any, scratch: Any, *calls: Any) -> None:
        zero, prepare, multiply, store = calls
        head = x.acquire(1)
        passes, k_tiles, bands = head[0], head[1], head[2]
        x.release(1)
        # The memory tile takes activations in fours; these fill the first four.
        for _ in iron.range_(L2_BATCH - 1):
            x.acquire(1)
            x.release(1)
        for _ in iron.range_(passes):
            for band in iron.range_(bands):
                zero(sums, band)
            for _ in iron.range_(k_tiles):
                weights = w.acquire(1)
                prepare(weights, scratch)
                for band in iron.range_(bands):
                    rows = x.acquire(1)
                    multiply(rows, weights, scratch, sums, band)
                    x.release(1)
                w.release(1)
            for half in range(config.tiles):
                for band in iron.range_(bands):
                    piece = y.acquire(1)
                    store(sums, band, half, piece)
                    y.release(1)

    calls = (zero, prepare, multiply, store)
    return gemm_program(iron, plan, core, calls, sums, (x_in, x_rows), (w_in, w_columns), (y_out, y_cores))


def _weights(iron: Any, config: Configuration) -> tuple[list[Any], list[Any]]:
    """Fifos into the memory tiles, and from there to the four cores of a column."""
    tile = config.weights.tile_bytes // arch.WORD
    # Two output tiles side by side arrive as [output tile][4 k tiles] and leave as [4 k tiles][output tile]. A tile is
    # sent in quarters, because no size of a static pattern may exceed 512.
    order = [(L2_BATCH, tile), (2, L2_BATCH * tile), (4, tile // 4), (tile // 4, 1)] if config.tiles == 2 else None
    into, out = [], []
    for column in range(config.columns):
        fifo = iron.ObjectFifo(words(config.w_l2_object), depth=config.w_l2_depth, name=f"w{column}")
        into.append(fifo)
        out.append(
            fifo.cons().forward(
                tile=iron.Tile(column, arch.MEM_ROW),
                obj_type=words(config.w_object),
                depth=2,
                name=f"w{column}_cores",
                dims_to_stream=order,
            )
        )
    return into, out


if __name__ == "__main__":
    sys.exit(main(Op.GEMM))
