"""What the designs share: types, kernels, the streams of a GEMM, and the run-time sequence.

Objects are arrays of 32-bit words: that is what a DMA moves, and the kernels take pointers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tilefuse import arch
from tilefuse.configurations import Configuration
from tilefuse.layout import NT, ROWS
from tilefuse.plan import WINDOW, Plan

Handles = Sequence[Any]


def words(nbytes: int) -> Any:
    """The type of an array of ``nbytes`` bytes."""
    if nbytes % arch.WORD:
        raise ValueError(f"{nbytes} bytes are not whole words")
    return np.ndarray[(nbytes // arch.WORD,), np.dtype[np.int32]]  # type: ignore[misc]


class Functions:
    """The entry points of a configuration's kernel.

    Args:
        iron: The namespace.
        config: Says which kernel.
        sizes: Bytes of the arrays that signatures name; ``scratch`` is known.
    """

    def __init__(self, iron: Any, config: Configuration, sizes: Mapping[str, int]) -> None:
        self._iron = iron
        self._kernel = config.kernel
        self._types = {name: words(nbytes) for name, nbytes in sizes.items()}
        self._types["scratch"] = words(config.scratch_bytes)

    def __call__(self, stem: str, *arguments: str | type[int]) -> Any:
        """Entry point ``stem``; arguments are names of arrays, or `int` for a 32-bit integer."""
        types = [np.int32 if argument is int else self._types[str(argument)] for argument in arguments]
        symbol = f"{self._kernel}_{stem}" if stem else self._kernel
        return self._iron.Kernel(symbol, f"{self._kernel}.o", types)


def broadcast_rows(iron: Any, config: Configuration, order: Any = None) -> tuple[list[Any], list[Any]]:
    """Fifos of activations into four memory tiles, and from each along a row of cores.

    Args:
        order: How a memory tile sends an object: (size, stride) in words, outermost first.
    """
    into, out = [], []
    for row in range(ROWS):
        fifo = iron.ObjectFifo(words(config.x_l2_object), depth=config.x_l2_depth, name=f"x{row}")
        into.append(fifo)
        out.append(
            fifo.cons().forward(
                tile=iron.Tile(config.x_column(row), arch.MEM_ROW),
                obj_type=words(config.x_object),
                depth=2,
                name=f"x{row}_cores",
                dims_to_stream=order,
            )
        )
    return into, out


def join_results(iron: Any, config: Configuration, depth: int = 2) -> tuple[list[Any], list[list[Any]]]:
    """Fifos of results out of the memory tiles, and for each the four fifos of its column's cores.

    A core sends pieces of bfloat16, 64 wide, in blocks of 8 x 8; the memory tile joins `Configuration.join` of each of
    four cores, one below the other, in rows of 64.
    """
    line = NT // 2  # words of a row
    blocks = [(config.join * config.rows // 8, 8 * line), (NT // 8, 4), (8, line), (4, 1)]
    out, cores = [], []
    for column in range(config.columns):
        fifo = iron.ObjectFifo(words(config.y_l2_object), depth=2, name=f"y{column}")
        out.append(fifo)
        cores.append(
            fifo.prod().join(
                [row * config.join * config.y_object // arch.WORD for row in range(ROWS)],
                tile=iron.Tile(column, arch.MEM_ROW),
                depths=[depth] * ROWS,
                obj_types=[words(config.y_object)] * ROWS,
                names=[f"y{column}_core{row}" for row in range(ROWS)],
                dims_from_stream=[blocks] * ROWS,
            )
        )
    return out, cores


def gemm_program(
    iron: Any,
    plan: Plan,
    core: Callable[..., None],
    functions: Sequence[Any],
    sums: int,
    x: tuple[Sequence[Any], Sequence[Any]],
    w: tuple[Sequence[Any], Sequence[Any]],
    y: tuple[Sequence[Any], Sequence[Sequence[Any]]],
) -> Any:
    """The resolved program of a GEMM: ``core`` on all compute tiles.

    Args:
        core: Called with a core's ends of x, w and y, its sums, its scratch, and ``functions``.
        functions: What it calls of the kernel: a worker declares the functions among its arguments.
        sums: Bytes of a core's fp32 sums.
        x, w, y: The host's fifos, and the cores': of x by array row, of w by column, of y by column and array row.
    """
    config = plan.configuration
    workers = [
        iron.Worker(
            core,
            [
                x[1][row].cons(),
                w[1][column].cons(),
                y[1][column][row].prod(),
                iron.Buffer(words(sums), name=f"sums{column}_{row}"),
                iron.Buffer(words(config.scratch_bytes), name=f"scratch{column}_{row}"),
                *functions,
            ],
            tile=iron.Tile(column, arch.FIRST_CORE_ROW + row),
            stack_size=config.stack_bytes,
            dynamic_objfifo_lowering=True,
        )
        for column in range(config.columns)
        for row in range(ROWS)
    ]
    columns = range(config.columns)
    shims = [config.x_column(row) for row in range(ROWS)], columns, columns
    return program(iron, plan, workers, x[0], w[0], y[0], shims)


def program(
    iron: Any,
    plan: Plan,
    workers: Sequence[Any],
    x_in: Sequence[Any],
    w_in: Sequence[Any],
    y_out: Sequence[Any],
    shims: tuple[Sequence[int], Sequence[int], Sequence[int]],
) -> Any:
    """The resolved program: ``workers``, and a sequence that issues the plan's segments.

    Args:
        x_in, w_in, y_out: The fifos that the host fills and drains, by the index that transfers name.
        shims: The column of each one's shim.
    """
    buffers = ("x", "w", "y")

    def sequence(x: Any, w: Any, y: Any, x_in: Handles, w_in: Handles, y_out: Handles) -> None:
        hosts, ends = dict(zip(buffers, (x, w, y), strict=True)), dict(zip(buffers, (x_in, w_in, y_out), strict=True))
        sizes = {"x": plan.x_words, "w": plan.w_words, "y": plan.y_words}
        opened: list[Any] = []
        for segment in plan.segments:
            group = iron.TaskGroup()
            for transfer in segment.transfers:
                tap = iron.TensorAccessPattern(
                    (sizes[transfer.stream],),
                    transfer.tap.offset,
                    list(transfer.tap.sizes),
                    list(transfer.tap.strides),
                )
                end, host = ends[transfer.stream][transfer.index], hosts[transfer.stream]
                if transfer.stream == "y":
                    end.drain(host, tap=tap, wait=True, group=group)
                else:
                    # Not waited for: the results of the same group depend on them.
                    end.fill(host, tap=tap, group=group)
            opened.append(group)
            if len(opened) == WINDOW:
                opened.pop(0).finish()
        for group in opened:
            group.finish()

    x_shims, w_shims, y_shims = shims
    runtime = iron.Runtime(
        sequence,
        [
            words(arch.WORD * plan.x_words),
            words(arch.WORD * plan.w_words),
            words(arch.WORD * plan.y_words),
            [fifo.prod(tile=iron.Tile(at, arch.SHIM_ROW)) for fifo, at in zip(x_in, x_shims, strict=True)],
            [fifo.prod(tile=iron.Tile(at, arch.SHIM_ROW)) for fifo, at in zip(w_in, w_shims, strict=True)],
            [fifo.cons(tile=iron.Tile(at, arch.SHIM_ROW)) for fifo, at in zip(y_out, y_shims, strict=True)],
        ],
    )
    return iron.Program(iron.device(plan.configuration.columns), runtime, workers=list(workers)).resolve_program()
