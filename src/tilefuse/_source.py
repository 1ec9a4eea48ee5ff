"""The checks on a `QuantizedLinear` before the C++ packer, which trusts every shape and dtype, may see it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse.errors import DtypeError, LayoutError, QuantizationError, ShapeError
from tilefuse.quantized import CodeOrder, QuantizedLinear

Array = npt.NDArray[Any]

FLOAT_KINDS = {np.dtype(np.float16): 0, np.dtype(ml_dtypes.bfloat16): 1, np.dtype(np.float32): 2}
"""The C++ side's `FloatKind` of each dtype that scales and minima may have."""

_CODE_DTYPES: dict[CodeOrder, tuple[type[np.generic], ...]] = {
    CodeOrder.KN: (np.uint8,),
    CodeOrder.WORDS_N: (np.int32, np.uint32),
    CodeOrder.WORDS_N_AWQ: (np.int32, np.uint32),
    CodeOrder.WORDS_K: (np.int32, np.uint32),
    CodeOrder.ROWS_N: (np.int32, np.uint32),
    CodeOrder.ROWS_N_INT8: (np.int8,),
    CodeOrder.ROWS_N_FAST: (np.int16, np.uint16),
}


def _code_shape(q: QuantizedLinear) -> tuple[int, int]:
    words_k, words_n = -(-q.k * q.bits // 32), -(-q.n * q.bits // 32)
    match q.order:
        case CodeOrder.KN:
            return q.k, q.n
        case CodeOrder.WORDS_N | CodeOrder.WORDS_N_AWQ:
            return q.k, words_n
        case CodeOrder.WORDS_K:
            return words_k, q.n
        case CodeOrder.ROWS_N:
            return q.n, words_k
        case CodeOrder.ROWS_N_INT8:
            return q.n, q.k
        case CodeOrder.ROWS_N_FAST:
            return q.n // 4, q.k


def _check_codes(q: QuantizedLinear) -> None:
    only = {CodeOrder.WORDS_N_AWQ: 4, CodeOrder.ROWS_N_FAST: 4, CodeOrder.ROWS_N_INT8: 8}.get(q.order, q.bits)
    if q.bits != only:
        raise LayoutError(f"{q.name}: code order {q.order.value} holds {only}-bit codes, and bits = {q.bits}")
    if q.order is CodeOrder.ROWS_N_FAST and (q.k % 64 or q.n % 4):
        raise LayoutError(
            f"{q.name}: K = {q.k}, N = {q.n}: code order {q.order.value} has tiles of 64 input by 4 output channels"
        )
    if q.codes.dtype.type not in _CODE_DTYPES[q.order] or not q.codes.dtype.isnative:
        expected = " or ".join(np.dtype(t).name for t in _CODE_DTYPES[q.order])
        raise DtypeError(f"{q.name}: codes are {q.codes.dtype}; code order {q.order.value} takes {expected}")
    if q.codes.shape != _code_shape(q):
        raise ShapeError(
            f"{q.name}: codes have shape {q.codes.shape}; K = {q.k}, N = {q.n}, {q.bits} bits in code order "
            f"{q.order.value} take {_code_shape(q)}"
        )


def _check_grid(q: QuantizedLinear, what: str, grid: Array, *, floats: bool) -> None:
    shape = (-(-q.k // q.group), q.n)
    if floats and grid.dtype not in FLOAT_KINDS:
        raise DtypeError(f"{q.name}: {what} are {grid.dtype}; float16, bfloat16 or float32 are taken")
    if not floats and grid.dtype != np.uint8:
        raise DtypeError(f"{q.name}: {what} are {grid.dtype}; uint8 is taken")
    if grid.shape != shape:
        raise ShapeError(
            f"{q.name}: {what} have shape {grid.shape}; K = {q.k}, N = {q.n} and group {q.group} take {shape}"
        )


def check_perm(name: str, perm: Array, k: int) -> None:
    """Raises unless ``perm`` is a permutation of range(k), int32 and contiguous."""
    if perm.dtype != np.int32:
        raise DtypeError(f"{name}: perm is {perm.dtype}; int32 is taken")
    if perm.shape != (k,):
        raise ShapeError(f"{name}: perm has shape {perm.shape}; K = {k} takes ({k},)")
    out_of_range = (perm < 0) | (perm >= k)
    if out_of_range.any():
        at = int(out_of_range.argmax())
        raise QuantizationError(f"{name}: perm[{at}] = {perm[at]} is outside 0..{k - 1}")
    counts = np.bincount(perm, minlength=k)
    if counts.max() > 1:
        twice = int(counts.argmax())
        raise QuantizationError(
            f"{name}: perm holds input channel {twice} {counts[twice]} times; it must be a permutation"
        )


def check_source(q: QuantizedLinear) -> None:
    """Raises unless the arrays of ``q`` have the shapes and dtypes that its other fields say.

    Values other than ``perm``'s are not looked at: the packer checks those as it reads them.
    """
    _check_codes(q)
    _check_grid(q, "scales", q.scales, floats=True)
    if (q.zeros is None) == (q.mins is None):
        raise QuantizationError(
            f"{q.name}: needs either zero points or minima, and has {'both' if q.mins is not None else 'neither'}"
        )
    if q.zeros is not None:
        _check_grid(q, "zeros", q.zeros, floats=False)
    if q.mins is not None:
        _check_grid(q, "mins", q.mins, floats=True)
    if q.bias is not None and q.bias.shape != (q.n,):
        raise ShapeError(f"{q.name}: bias has shape {q.bias.shape}; N = {q.n} takes ({q.n},)")
    if q.perm is not None:
        check_perm(q.name, q.perm, q.k)
