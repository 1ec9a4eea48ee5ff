"""Attention on the emulated array: planned, packed, run and unpacked.

>>> from tilefuse.tilemix.emulated import attend
>>> out, lse, report = attend([Operands(q, k, v, grid)], [routing], scale)  # doctest: +SKIP

Times in reports are *modelled*.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tilefuse import arch, plan
from tilefuse._buffers import aligned_empty
from tilefuse.attention_configurations import HEAD_DIMS
from tilefuse.errors import DeviceError, PlanError
from tilefuse.plan import AttentionPlan
from tilefuse.tilemix import npu_streams
from tilefuse.tilemix.by_sequence import operands_of, write
from tilefuse.tilemix.grid import Grid
from tilefuse.tilemix.npu_streams import Operands, Quantising
from tilefuse.tilemix.reference import Smoothing
from tilefuse.tilemix.routing_map import Routing
from tilefuse.tilemix.spec import Call

Float32 = npt.NDArray[np.float32]

_LOADED = threading.local()
"""Arrays with a configuration on them: each runs on the thread that loaded it."""


class Attended(NamedTuple):
    """What a run gives, of each sequence."""

    out: list[Float32]
    """[Hq, Lq, dv], bfloat16 values."""
    lse: list[Float32]
    """[Hq, Lq]."""
    report: Any
    """`tilefuse.emulator.timing.Report`; None where there was nothing to do."""


def head_dim(d: int, dv: int) -> int:
    """The head size of the kernels for heads of ``d`` and values of ``dv``, which are padded to it.

    Raises:
        PlanError: There is none so large.
    """
    found = next((each for each in HEAD_DIMS if max(d, dv) <= each), None)
    if found is None:
        raise PlanError(f"heads of {max(d, dv)}: the array's kernels take up to {HEAD_DIMS[-1]}; take the CPU")
    return found


def run_call(call: Call, maps: Sequence[Routing | None]) -> None:
    """Writes the results of a call of `tilefuse.attention`; all its sequences are one run.

    Raises:
        PlanError: The array can't run it.
        QuantizationError: q, k or v has a value that is not finite in bfloat16.
        DeviceError: The emulator is not installed.
    """
    sequences = [
        Operands(q, k, v, Grid(q.shape[1], k.shape[1], causal=call.causal, window=call.window))
        for q, k, v in operands_of(call)
    ]
    quantising = Quantising(cast(Literal["row", "block"], call.quant.q), cast(Smoothing, call.quant.smooth))
    found = attend(sequences, maps, call.scale, quantising)
    for b, (out, lse) in enumerate(zip(found.out, found.lse, strict=True)):
        write(call, b, out, lse)


def plan_of(
    sequences: Sequence[Operands],
    routings: Sequence[Routing | None],
    *,
    open_block_16bit: bool = False,
    columns: int = arch.COLUMNS,
    blocks: int | None = None,
    share: int | None = None,
) -> AttentionPlan:
    """The plan of some sequences with the same heads; the last three arguments are `tilefuse.plan.attention`'s.

    Raises:
        PlanError: The array can't run it; the message says which limit.
    """
    first = sequences[0]
    described = [
        npu_streams.lengths(sequence.grid, routing, open_block_16bit=open_block_16bit)
        for sequence, routing in zip(sequences, routings, strict=True)
    ]
    d = head_dim(first.q.shape[-1], first.v.shape[-1])
    heads, kv_heads = len(first.q), len(first.k)
    return plan.attention(described, heads=heads, kv_heads=kv_heads, d=d, columns=columns, blocks=blocks, share=share)


def attend(
    sequences: Sequence[Operands],
    routings: Sequence[Routing | None],
    scale: float,
    quantising: Quantising | None = None,
    *,
    open_block_16bit: bool = False,
    columns: int = arch.COLUMNS,
) -> Attended:
    """softmax(scale q k') v of some sequences with the same heads, on the emulated array.

    Args:
        sequences: Operands, with the masks in their grids.
        routings: The INT8 tiles of each; None for none.
        scale: Of the scores.
        quantising: How INT8 operands are made.
        open_block_16bit: Whether an incomplete last block of keys stays in 16 bits.
        columns: Columns of the array.

    Raises:
        PlanError: The array can't run it.
        QuantizationError: q, k or v has a value that is not finite in bfloat16.
        DeviceError: The emulator is not installed.
    """
    if not sequences:
        return Attended([], [], None)
    chosen = plan_of(sequences, routings, open_block_16bit=open_block_16bit, columns=columns)
    return run(chosen, sequences, scale, quantising)


def run(
    chosen: AttentionPlan, sequences: Sequence[Operands], scale: float, quantising: Quantising | None = None
) -> Attended:
    """As `attend`, by a plan of these sequences.

    Raises:
        DeviceError: The emulator is not installed.
    """
    y = aligned_empty(chosen.y_words * arch.WORD).view(np.int32)
    report = None
    if chosen.steps:
        q, kv = npu_streams.pack(chosen, sequences, scale, quantising)
        report = _run(chosen, q, kv, y)
    out, lse = npu_streams.unpack(chosen, y)
    dv = sequences[0].v.shape[-1]
    return Attended([each[..., :dv] for each in out], lse, report)


def time(chosen: AttentionPlan) -> Any:
    """The `tilefuse.emulator.timing.Report` of a plan's run, *modelled*, without computing it.

    Raises:
        DeviceError: The emulator is not installed.
    """
    return _run(chosen, npu_streams.pack_counts(chosen), None, None, timing_only=True)


def _run(chosen: AttentionPlan, *buffers: npu_streams.Words | None, timing_only: bool = False) -> Any:
    try:
        from tilefuse.designs.attention import attention
        from tilefuse.emulator import iron
    except ImportError as error:
        raise DeviceError(
            f'backend="emulator" needs the array emulator, which is not installed ({error}): pip install '
            "greenlet, and build tilefuse with -C cmake.define.TILEFUSE_EMULATOR=ON"
        ) from error
    program = attention(iron, chosen)
    loaded: dict[Any, iron.Configuration] = _LOADED.__dict__.setdefault("configurations", {})
    array = loaded.pop(chosen.configuration, None) or iron.load(program)
    report = array.run(program, *buffers, timing_only=timing_only)
    # Only now: what a failed run leaves hangs.
    loaded[chosen.configuration] = array
    return report
