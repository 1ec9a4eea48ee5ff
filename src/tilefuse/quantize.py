"""Quantising the weights of a linear layer: round to nearest, or a search for the scales of least weighted error."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse.errors import DtypeError, QuantizationError, ShapeError
from tilefuse.quantized import CodeOrder, QuantizedLinear

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

BF16 = np.dtype(ml_dtypes.bfloat16)

FACTORS = (1.0, 1.08, 1.06, 1.04, 1.02, *(round(1 - 0.02 * step, 2) for step in range(1, 25)))
"""What the search multiplies the round-to-nearest scale by. Below 1 the extremes saturate and all else gains
resolution; with 4 bits the best is rarely below 0.6. Above 1, the largest weight of a symmetric group can be the top
code, which is one nearer to the midpoint than the bottom one. 1 comes first and wins ties, so the search is never worse
than rounding to nearest."""

SLAB = 1 << 20
"""Weights quantised at a time: the few temporaries of this size fit in a cache or little more."""

MAX_FP16 = 60000.0
"""Largest scale before the search and rounding that is sure to stay below float16's 65504 after them."""

MIN_FP16 = 2.0**-24
"""Smallest positive float16."""

MAX_RATIO = 2.0**30
"""Above it, and far below, every weight is nearest to 0 steps; its square and that of 255 stay in float32."""

MIN_BF16 = 2.0**-133
"""Smallest positive bfloat16."""


def quantize_linear(
    w: npt.ArrayLike,
    *,
    bits: int = 4,
    group: int | None = 128,
    symmetric: bool = False,
    method: Literal["rtn", "search"] = "rtn",
    importance: npt.ArrayLike | None = None,
    scale_dtype: Literal["bfloat16", "float16"] = "bfloat16",
    name: str = "",
    bias: npt.ArrayLike | None = None,
) -> QuantizedLinear:
    """Quantise the weights of a linear layer, ``y = x w + bias``.

    Scales are rounded to their stored form before the codes are computed, so the error is that of what is stored; a
    group of weights of any sign is represented from its extreme to 0. Without saturation the error of a weight is at
    most half its scale.

    Args:
        w: Weights, float [K, N].
        bits: 4 or 8.
        group: Consecutive input channels that share a scale; None or -1 for one scale an output channel. The last group
            is short where K is not a multiple.
        symmetric: Fix the zero point at 2^(bits - 1).
        method: ``"rtn"`` takes scales from each group's range; ``"search"`` tries scales around that and keeps, for
            each group, the one of least squared error weighted by ``importance``.
        importance: Weight of each input channel's error in the search, float [K] >= 0, such as the mean square of the
            layer's inputs. All alike by default.
        scale_dtype: ``"bfloat16"``: scales are any bfloat16, what packing keeps. ``"float16"``: scales are values that
            float16 and bfloat16 both hold, for checkpoints in formats with float16 scales.
        name: Name of the layer.
        bias: float [N], kept in float32.

    Returns:
        The layer, with codes in order `CodeOrder.KN`.

    Raises:
        ShapeError: ``w`` is not two-dimensional or is empty, or ``importance`` or ``bias`` does not fit it.
        DtypeError: An array does not hold floats.
        QuantizationError: A weight, importance or bias is NaN, infinite or (importance) negative, scales leave the
            range of ``scale_dtype``, or an option has a value that is not taken.
    """
    weights = _floats(w, "w")
    if weights.ndim != 2 or 0 in weights.shape:
        raise ShapeError(f"w has shape {list(weights.shape)}; a non-empty [K, N] is needed")
    k, n = weights.shape
    if not isinstance(bits, Integral) or bits not in (4, 8):
        raise QuantizationError(f"bits = {bits!r}: 4 and 8 are taken")
    if method not in ("rtn", "search"):
        raise QuantizationError(f"method = {method!r}: 'rtn' and 'search' are taken")
    if scale_dtype not in ("bfloat16", "float16"):
        raise QuantizationError(f"scale_dtype = {scale_dtype!r}: 'bfloat16' and 'float16' are taken")
    if group is not None and not isinstance(group, Integral):
        raise QuantizationError(f"group = {group!r}: a positive size, or None or -1 for one group, is taken")
    size = k if group is None or group == -1 else min(group, k)
    if size < 1:
        raise QuantizationError(f"group = {group!r}: a positive size, or None or -1 for one group, is taken")
    ease = np.ones(k, np.float32)
    if importance is not None:
        ease = _floats(importance, "importance")
        if ease.shape != (k,):
            raise ShapeError(f"importance has shape {list(ease.shape)}; K = {k} needs [{k}]")
        if (ease < 0).any():
            raise QuantizationError(f"importance {float(ease.min())} is negative; every value must be at least 0")
        ease = ease / np.float32(max(float(ease.max()), 1e-38))  # only ratios matter
    half = scale_dtype == "float16"
    factors = FACTORS if method == "search" else FACTORS[:1]

    groups = -(-k // size)
    codes = np.empty((k, n), np.uint8)
    scales = np.empty((groups, n), np.float32)
    zeros = np.empty((groups, n), np.uint8)
    columns = max(1, SLAB // size)
    for index in range(groups):
        rows = slice(index * size, min((index + 1) * size, k))
        for start in range(0, n, columns):
            part = slice(start, start + columns)
            found = _quantize_group(weights[rows, part], ease[rows, None], bits, symmetric, factors, half)
            codes[rows, part], scales[index, part], zeros[index, part] = found
    offset = None if bias is None else _floats(bias, "bias")
    layer = QuantizedLinear(
        name=name,
        format="quantize_linear",
        k=k,
        n=n,
        bits=bits,
        group=size,
        codes=codes,
        order=CodeOrder.KN,
        scales=scales.astype(np.float16 if half else BF16),  # exact: they were rounded above
        zeros=zeros,
        bias=offset,
        symmetric=symmetric,
    )
    layer.validate()
    return layer


def _quantize_group(
    w: Floats, ease: Floats, bits: int, symmetric: bool, factors: tuple[float, ...], half: bool
) -> tuple[npt.NDArray[np.uint8], Floats, npt.NDArray[np.uint8]]:
    """Codes [g, C], scales [C] and zero points [C] of one group of C output channels, w [g, C]."""
    top = (1 << bits) - 1
    middle = 1 << (bits - 1)
    # float64: the range of float32 weights can overflow float32, and tiny ones must not lose precision.
    low = np.minimum(w.min(axis=0), 0).astype(np.float64)
    high = np.maximum(w.max(axis=0), 0).astype(np.float64)
    base = (2 * np.maximum(-low, high) if symmetric else high - low) / top
    if half and base.max() > MAX_FP16:
        raise QuantizationError(
            f"w: weights as large as {float(np.abs(w).max()):.3g} need scales above {MAX_FP16:g}, beyond float16; "
            "rescale the layer"
        )
    base[base == 0] = 1  # nothing but zeros: any scale is exact
    # In units of the base scale, no square overflows or vanishes.
    unit = (w / base).astype(np.float32)
    best_error = np.full(w.shape[1], np.inf, np.float32)
    best_codes = np.empty(w.shape, np.uint8)
    best_scale = np.empty(w.shape[1], np.float32)
    best_zero = np.empty(w.shape[1], np.uint8)
    for factor in factors:
        scale = _storable(base * factor, half)
        # A scale held up by the smallest float16 can be 10^40 times what tiny weights need: all codes are zero then.
        ratio = np.minimum(scale / base, MAX_RATIO).astype(np.float32)
        if symmetric:
            zero = np.full(w.shape[1], middle, np.float32)
        else:
            zero = np.clip(np.rint(-low * factor / scale), 0, top).astype(np.float32)
        codes = np.clip(np.rint(unit / ratio) + zero, 0, top)
        error = np.sum(ease * np.square((codes - zero) * ratio - unit), axis=0)
        better = error < best_error
        best_error[better] = error[better]
        best_codes[:, better] = codes[:, better].astype(np.uint8)
        best_scale[better] = scale[better]
        best_zero[better] = zero[better].astype(np.uint8)
    return best_codes, best_scale, best_zero


def _storable(scale: npt.NDArray[np.float64], half: bool) -> Floats:
    """Scales rounded to bfloat16, or to values that float16 and bfloat16 both hold, and above zero.

    Rounding to float16 first makes them multiples of its smallest value; dropping low bits then keeps them so.
    """
    if half:
        return np.maximum(scale.astype(np.float16).astype(BF16).astype(np.float32), np.float32(MIN_FP16))
    return np.maximum(scale.astype(np.float32).astype(BF16).astype(np.float32), np.float32(MIN_BF16))


def _floats(values: npt.ArrayLike, name: str) -> Floats:
    """An argument as float32, refusing what is not a finite float."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # nested lists of unlike lengths
        raise ShapeError(f"{name} is no array ({error}); rows of equal lengths are needed") from None
    if array.dtype != BF16 and array.dtype.kind != "f":
        raise DtypeError(f"{name} has dtype {array.dtype}; floats are taken")
    with np.errstate(over="ignore"):
        narrow = array.astype(np.float32)
    if not np.isfinite(narrow).all():
        at = np.unravel_index(int(np.argmin(np.isfinite(narrow))), narrow.shape)
        raise QuantizationError(
            f"{name}: {float(array[at])} at {[int(i) for i in at]} is not finite in float32; every value must be"
        )
    return narrow
