"""What a `QuantizedLinear` must satisfy: the one door that bad layers do not pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse.codes import AWQ_ORDER, FAST_COLUMNS, FAST_ROWS, storage
from tilefuse.errors import DtypeError, QuantizationError, ShapeError

if TYPE_CHECKING:
    from tilefuse.quantized import QuantizedLinear

Array = npt.NDArray[Any]

FLOATS = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
"""Dtypes of scales and minima."""

BF16_OVERFLOW = float(2**128 - 2**119)
"""Smallest magnitude that rounds to infinity in bfloat16: its largest value is 2^128 - 2^120, and the tie half a step
above that goes to the even neighbour, 2^128. Float16 and bfloat16 values are all below; only float32 can reach it."""


def check(layer: QuantizedLinear, where: Mapping[str, str], *, values: bool = True) -> None:
    """Raise the error that `QuantizedLinear.validate` documents, or return.

    Without ``values``, codes, scales, minima and zero points are only checked for shape and dtype: the packer checks
    their values as it reads them.
    """

    def name(attribute: str) -> str:
        return where.get(attribute) or f"layer {layer.name!r}: {attribute}"

    for attribute in ("k", "n", "group"):
        if getattr(layer, attribute) < 1:
            raise ShapeError(f"{name(attribute)} = {getattr(layer, attribute)}: must be at least 1")
    if layer.bits not in (4, 8):
        raise QuantizationError(f"{name('bits')} = {layer.bits}: codes of 4 and 8 bits are taken; requantise")
    if layer.group > layer.k:
        raise ShapeError(f"{name('group')} = {layer.group}: above K = {layer.k}; a scale per channel has group = K")
    _check_codes(layer, name("codes"))
    if values and layer.order.value == "kn":
        _check_below(layer.codes, layer.bits, name("codes"), "code")

    shape = (-(-layer.k // layer.group), layer.n)
    _check_grid(layer.scales, shape, name("scales"), values=values)
    if (layer.zeros is None) == (layer.mins is None):
        raise QuantizationError(f"{name('zeros')}: exactly one of zeros and mins must be given")
    if layer.zeros is not None:
        _check_array(layer.zeros, shape, (np.dtype(np.uint8),), name("zeros"))
        if values:
            _check_below(layer.zeros, layer.bits, name("zeros"), "zero point")
    if layer.mins is not None:
        _check_grid(layer.mins, shape, name("mins"), values=values)
    if layer.bias is not None:
        _check_array(layer.bias, (layer.n,), (np.dtype(np.float32),), name("bias"))
        check_finite(layer.bias, name("bias"))
    if layer.perm is not None:
        _check_array(layer.perm, (layer.k,), (np.dtype(np.int32),), name("perm"))
        if not np.array_equal(np.sort(layer.perm), np.arange(layer.k)):
            raise QuantizationError(f"{name('perm')}: must hold each input channel 0 to {layer.k - 1} once")


def _check_codes(layer: QuantizedLinear, name: str) -> None:
    order = layer.order.value
    if order in ("words_n_awq", "rows_n_fast") and layer.bits != 4:
        raise QuantizationError(f"{name}: order {order!r} exists for 4-bit codes only, and bits = {layer.bits}")
    if order == "rows_n_int8" and layer.bits != 8:
        raise QuantizationError(f"{name}: order {order!r} exists for 8-bit codes only, and bits = {layer.bits}")
    if order == "words_n_awq" and layer.n % len(AWQ_ORDER):
        raise ShapeError(f"{name}: N = {layer.n} is not a multiple of {len(AWQ_ORDER)}, as order {order!r} needs")
    if order == "rows_n_fast" and (layer.k % FAST_COLUMNS or layer.n % FAST_ROWS):
        raise ShapeError(
            f"{name}: K = {layer.k} must be a multiple of {FAST_COLUMNS} and N = {layer.n} of {FAST_ROWS} "
            f"for order {order!r}"
        )
    shape, dtype = storage(layer.order, layer.k, layer.n, layer.bits)
    _check_array(layer.codes, shape, (np.dtype(dtype),), name)


def _check_grid(array: Array, shape: tuple[int, ...], name: str, *, values: bool) -> None:
    if values:
        check_floats(array, shape, name)
    else:
        _check_array(array, shape, FLOATS, name)


def _check_array(array: Array, shape: tuple[int, ...], dtypes: tuple[np.dtype[Any], ...], name: str) -> None:
    if array.dtype not in dtypes:
        raise DtypeError(f"{name} has dtype {array.dtype}; taken: {', '.join(map(str, dtypes))}")
    if array.shape != shape:
        raise ShapeError(f"{name} has shape {list(array.shape)}; the layer needs {list(shape)}")


def _check_below(array: Array, bits: int, name: str, what: str) -> None:
    limit = 1 << bits
    if limit > 255 or not array.size or int(array.max()) < limit:
        return
    at = np.unravel_index(int(np.argmax(array >= limit)), array.shape)
    raise QuantizationError(
        f"{name}: {what} {int(array[at])} at {[int(i) for i in at]} is outside 0 to {limit - 1} ({bits} bits)"
    )


def check_floats(array: Array, shape: tuple[int, ...], name: str) -> None:
    """Scales or minima: shape, dtype, finite, and finite again once rounded to bfloat16."""
    _check_array(array, shape, FLOATS, name)
    check_finite(array, name)
    if array.dtype == np.float32:
        too_large = np.abs(array) >= BF16_OVERFLOW
        if too_large.any():
            at = np.unravel_index(int(np.argmax(too_large)), array.shape)
            raise QuantizationError(
                f"{name}: {float(array[at])!r} at {[int(i) for i in at]} overflows bfloat16 (limit: below 2^128 - "
                "2^119); rescale the layer"
            )


def check_finite(array: Array, name: str) -> None:
    """Raise QuantizationError at the first NaN or infinity."""
    finite = np.isfinite(array)
    if not finite.all():
        at = np.unravel_index(int(np.argmin(finite)), array.shape)
        raise QuantizationError(
            f"{name}: {float(array[at])} at {[int(i) for i in at]}; every value must be finite. The file is damaged or "
            "its quantisation failed: make it anew"
        )
