"""The host's buffers of a plan: activations as the array wants them, and results as the caller does.

The array reads words. Activations lie behind a head that tells the cores how much there is to do; a GEMM's are bfp16 in
bands (`tilefuse.staging`), a GEMV's bfloat16. Results come as bfloat16 [rows][padded N].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse import arch
from tilefuse._buffers import aligned_empty
from tilefuse.arrays import BFLOAT16, FloatArray, FloatType, view_rows
from tilefuse.configurations import X_HEAD_BYTES, X_PART, Op
from tilefuse.errors import DtypeError, LayoutError, ShapeError
from tilefuse.layout import KT, ROWS
from tilefuse.plan import Plan
from tilefuse.staging import check_perm, not_finite, stage_activations

Words = npt.NDArray[np.int32]

_EXPONENT = np.uint16(0x7F80)
"""Bits of a bfloat16's exponent; all set in Inf and NaN."""

_ROWS_AT_ONCE = 1 << 16
"""Results that get their bias at a time: few enough that what lies between is in the caches."""


def stage(plan: Plan, x: Any, perm: npt.NDArray[np.int32] | None = None, out: Words | None = None) -> Words:
    """The activations' buffer of ``plan``, head included.

    Args:
        plan: Any.
        x: float32, bfloat16 or float16 [M, K], or [K] for a GEMV (NumPy or torch); rounded to bfloat16 first.
        perm: The packed layer's permutation of input channels, if it has one.
        out: int32 [plan.x_words] to fill, contiguous; allocated when None.

    Raises:
        ShapeError: ``x``, ``perm`` or ``out`` is not of the plan's shape.
        DtypeError: ``x`` is no float array that is taken, or ``perm`` or ``out`` not int32.
        LayoutError: ``perm`` names a channel that x lacks, or ``out`` can't be written.
        QuantizationError: A value is NaN or infinite, in bfloat16 too: bfp16 has neither.
    """
    view = view_rows(x, "x")
    assert view is not None
    shape = view.shape if len(view.shape) == 2 else (1, *view.shape)
    if shape != (plan.m, plan.k):
        raise ShapeError(f"x has shape {list(view.shape)}; the plan is for {plan.m} rows of K = {plan.k}")
    if out is None:
        out = aligned_empty(arch.WORD * plan.x_words).view(np.int32)
    else:
        _check_words(out, "out", plan.x_words)
        if not out.flags.writeable:
            raise LayoutError("out is read-only; pass an array that can be written")
    if perm is not None:
        check_perm(perm, plan.k)
    fill(plan, view, perm, out)
    return out


def fill(plan: Plan, view: FloatArray, perm: npt.NDArray[np.int32] | None, out: Words) -> None:
    """As `stage`, into ``out``; shapes have been checked."""
    if plan.x_offset:
        out[: plan.x_offset] = _head(plan)
    if plan.configuration.op is Op.GEMM:
        data = out[plan.x_offset :].view(np.uint8)
        stage_activations(view, perm, plan.layout.k_tiles, plan.bands, plan.row_blocks, data, plan.joined)
        return
    channels = plan.layout.k_tiles * KT
    if plan.configuration.streams == 2:
        rows = np.empty((1, channels), BFLOAT16)
        _pad(view, perm, rows)
        _spread_to_rows(plan, rows.reshape(-1), out)
    else:
        _pad(view, perm, out[plan.x_offset :].view(BFLOAT16).reshape(plan.y_rows, channels))


def _head(plan: Plan) -> Words:
    """As `stage_parameters`; kept with the plan, which may be staged for every token."""
    head: Words | None = plan.__dict__.get("_head")
    if head is None:
        head = plan.__dict__["_head"] = stage_parameters(plan)
    return head


def stage_parameters(plan: Plan) -> Words:
    """The head of the activations alone: what the cores need to know, for runs that move no data.

    int32 [plan.x_offset]; with two weight streams, whose objects have it inside, all of [plan.x_words], x zero.
    """
    if plan.configuration.streams == 2:
        out = np.zeros(plan.x_words, np.int32)
        _spread_to_rows(plan, np.zeros(plan.layout.k_tiles * KT, BFLOAT16), out)
        return out
    head = np.zeros(plan.x_offset, np.int32)
    head[: len(plan.parameters)] = plan.parameters
    return head


def _pad(view: FloatArray, perm: npt.NDArray[np.int32] | None, out: npt.NDArray[Any]) -> None:
    """x as bfloat16 in the corner of ``out``, zeros around it."""
    given = view.numpy()
    given = given.reshape(-1, given.shape[-1])
    m, k = given.shape
    real = out[:m, :k]
    if view.kind is FloatType.BF16:
        real[...] = given if perm is None else given[:, perm]
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            real[...] = given if perm is None else given[:, perm]
    if k < out.shape[1]:
        out[:m, k:] = 0
    if m < out.shape[0]:
        out[m:] = 0
    exponents = real.view(np.uint16) & _EXPONENT
    if exponents.max(initial=0) == _EXPONENT:
        row, channel = np.argwhere(exponents == _EXPONENT)[0]
        raise not_finite(int(row), int(channel if perm is None else perm[channel]))


def _spread_to_rows(plan: Plan, x: npt.NDArray[Any], out: Words) -> None:
    """x for two weight streams: for each stream objects as large as a tile, one for each of its rows in turn."""
    out[:] = 0
    objects = plan.parameters[2]
    words = out.reshape(2, objects, ROWS // 2, -1)
    words[:, 0, :, : len(plan.parameters)] = plan.parameters
    tiles = np.zeros((objects * X_PART, ROWS, KT), BFLOAT16)
    tiles[: plan.layout.k_tiles // ROWS] = x.reshape(-1, ROWS, KT)
    start = X_HEAD_BYTES // arch.WORD
    for row in range(ROWS):
        parts = np.ascontiguousarray(tiles[:, row]).reshape(objects, X_PART * KT).view(np.int32)
        words[row // 2, :, row % 2, start : start + parts.shape[1]] = parts


def empty_results(plan: Plan) -> Words:
    """A buffer for the results of ``plan``: int32 [plan.y_words], contents undefined."""
    return aligned_empty(arch.WORD * plan.y_words).view(np.int32)


def results(plan: Plan, y: Words) -> npt.NDArray[Any]:
    """The results in ``y`` without padding: a bfloat16 view [M, N].

    Raises:
        ShapeError, DtypeError: ``y`` is not int32 [plan.y_words], contiguous.
    """
    _check_words(y, "y", plan.y_words)
    return y.view(BFLOAT16).reshape(plan.y_rows, plan.layout.n_padded)[: plan.m, : plan.n]


def write_results(plan: Plan, y: Words, bias: npt.NDArray[np.float32] | None, target: npt.NDArray[Any]) -> None:
    """Writes the results in ``y`` to ``target``, [M, N] of any float type.

    The array's results are bfloat16. A bias is added to them in float32, and the sum rounded once, to the type of
    ``target``.
    """
    found = results(plan, y)
    if bias is None:
        if target.dtype == found.dtype or target.dtype == np.float32:
            target[...] = found
            return
        with np.errstate(over="ignore"):
            target[...] = found
        return
    step = max(1, _ROWS_AT_ONCE // plan.n)
    with np.errstate(over="ignore", invalid="ignore"):
        for row in range(0, plan.m, step):
            sums = found[row : row + step].astype(np.float32)
            sums += bias
            target[row : row + step] = sums


def _check_words(array: Words, name: str, words: int) -> None:
    """Raises unless ``array`` is contiguous int32 [``words``]."""
    if not isinstance(array, np.ndarray) or array.dtype != np.int32:
        raise DtypeError(f"{name} is {getattr(array, 'dtype', type(array).__name__)}; pass a NumPy array of int32")
    if array.shape != (words,) or not array.flags.c_contiguous:
        raise ShapeError(f"{name} has shape {list(array.shape)}; the plan takes [{words}], contiguous")
