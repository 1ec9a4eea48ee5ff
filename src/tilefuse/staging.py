"""Activations for the array's GEMM: bfp16 in bands, straight from the caller's array into the device's buffer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse import _core
from tilefuse.arrays import FloatArray
from tilefuse.configurations import BAND_BYTES, BAND_ROWS
from tilefuse.errors import DtypeError, LayoutError, QuantizationError, ShapeError
from tilefuse.layout import KT, ROWS


def stage_activations(
    x: FloatArray,
    perm: npt.NDArray[np.int32] | None,
    k_tiles: int,
    bands: int,
    row_blocks: int,
    out: npt.NDArray[np.uint8],
    joined: int = 1,
) -> None:
    """Writes ``x``, rounded to bfloat16 and then to bfp16, to ``out`` as the array's GEMM streams it.

    The bytes are those that a core's own conversion makes (docs/emulated-core.md, mode ``conv_even``), whatever the
    CPU and the number of threads. ``out`` is [row_blocks][4 array rows][k_tiles][bands] bands of 2304 bytes, and a band
    [16 k blocks][16 rows] of an exponent and 8 mantissas. Of a row block, the first 16 * joined rows are the first
    ``joined`` bands of array row 0, the next ones those of row 1, and so on. Rows beyond M and channels beyond K are
    zero.

    Args:
        x: [M, K], or [K] for one row.
        perm: int32 [K] or None; input channel i of the packed weights is ``x[:, perm[i]]``.
        k_tiles: Tiles of 128 input channels, at least K / 128.
        bands: Bands of an array row in a row block.
        row_blocks: Blocks of 64 * bands rows; together at least M rows.
        out: uint8, C-contiguous, row_blocks * 4 * k_tiles * bands * 2304 bytes; overwritten.
        joined: Bands of an array row whose rows follow each other; divides ``bands``.

    Raises:
        ShapeError: ``x`` has more rows or channels than the blocks, ``out`` another size, or ``perm`` another length.
        DtypeError: ``out`` is not uint8 or ``perm`` not int32.
        LayoutError: ``out`` or ``perm`` is not contiguous, ``out`` read-only, or ``perm`` names a channel that x lacks.
        QuantizationError: A value is NaN, or infinite once it is a bfloat16: bfp16 holds neither. ``out`` is then of no
            use.
    """
    m, k = x.shape if len(x.shape) == 2 else (1, *x.shape)
    for name, value in (("k_tiles", k_tiles), ("bands", bands), ("row_blocks", row_blocks)):
        if value < 1:
            raise ShapeError(f"{name} = {value}: pass at least 1")
    if joined < 1 or bands % joined:
        raise ShapeError(f"joined = {joined}: pass a divisor of the {bands} bands")
    rows, channels = BAND_ROWS * ROWS * bands * row_blocks, KT * k_tiles
    if m > rows or k > channels:
        raise ShapeError(
            f"x has shape {list(x.shape)}; {row_blocks} row blocks of {bands} bands and {k_tiles} k tiles hold "
            f"{rows} rows of {channels} channels"
        )
    nbytes = row_blocks * ROWS * k_tiles * bands * BAND_BYTES
    _check(out, "out", np.dtype(np.uint8))
    if out.size != nbytes:
        raise ShapeError(f"out has {out.size} bytes; these activations take {nbytes}")
    if not out.flags.writeable:
        raise LayoutError("out is read-only; pass an array that can be written")
    if perm is not None:
        check_perm(perm, k)
    bad = _core.stage_bfp16(
        x.address,
        int(x.kind),
        x.row_stride,
        m,
        k,
        0 if perm is None else perm.ctypes.data,
        out.ctypes.data,
        k_tiles,
        bands,
        joined,
        row_blocks,
    )
    if bad is not None:
        row, channel = bad
        raise not_finite(row, channel)


def check_perm(perm: npt.NDArray[np.int32], k: int) -> None:
    """Raises unless ``perm`` is int32 [``k``] of channels that there are; see `stage_activations`."""
    _check(perm, "perm", np.dtype(np.int32))
    if perm.shape != (k,):
        raise ShapeError(f"perm has shape {list(perm.shape)}; x has {k} channels")
    if k and not 0 <= perm.min() <= perm.max() < k:
        raise LayoutError(f"perm has values from {perm.min()} to {perm.max()}; x has channels 0 to {k - 1}")


def not_finite(row: int, channel: int) -> QuantizationError:
    """The error for a value that the array can't take."""
    return QuantizationError(
        f"x[{row}, {channel}] is not finite in bfloat16, and the array's block floating point has no Inf and no NaN: "
        "scale or mask x first, or compute on the CPU"
    )


def _check(array: npt.NDArray[Any], name: str, dtype: np.dtype[Any]) -> None:
    """Raises unless ``array`` is a C-contiguous array of ``dtype``."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise DtypeError(f"{name} is {getattr(array, 'dtype', type(array).__name__)}; pass a NumPy array of {dtype}")
    if not array.flags.c_contiguous:
        raise LayoutError(f"{name} is not C-contiguous; pass np.ascontiguousarray of it")
