"""Products of activations with packed layers: ``y = x W + bias``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from tilefuse.arrays import FloatArray, empty_like, float_type, view_rows
from tilefuse.errors import DeviceError, DtypeError, ShapeError
from tilefuse.packed import PackedLinear
from tilefuse.runtime import is_direct_cpu, resolve_device


def _layer_of(layer: object) -> PackedLinear:
    if not isinstance(layer, PackedLinear):
        raise DtypeError(f"layer is a {type(layer).__name__}: pass a PackedLinear (see tilefuse.pack)")
    return layer


def _quick(
    x: Any, layer: PackedLinear, device: str | None, out: Any, out_dtype: Any, compute: str | None, axes: int
) -> Any:
    """The product by one call of C++, for plain arrays on the CPU; None where `_matmul` is to have a look.

    Args:
        axes: That x must have, 0 for any number.
    """
    if out_dtype is not None or compute is not None or type(layer) is not PackedLinear:
        return None
    call = layer.__dict__.get("_cpu_direct")
    return None if call is None or not is_direct_cpu(device) else call(x, axes, out)


def _overlap(a: FloatArray, b: FloatArray) -> bool:
    def extent(array: FloatArray) -> tuple[int, int]:
        item = 4 if array.kind == 0 else 2
        rows = array.shape[0] if len(array.shape) == 2 else 1
        ends = (array.address, array.address + (rows - 1) * array.row_stride * item)
        return min(ends), max(ends) + array.shape[-1] * item

    (a_begin, a_end), (b_begin, b_end) = extent(a), extent(b)
    return a_begin < b_end and b_begin < a_end


def _matmul_of(device: str | None, compute: str | None) -> Callable[[FloatArray, PackedLinear, FloatArray], None]:
    """The product of that device in that arithmetic."""
    found = resolve_device(device)
    if compute is None or (isinstance(compute, str) and compute == "bf16"):
        return found.matmul
    if not isinstance(compute, str) or compute != "int8":
        raise DtypeError(f'compute is {compute!r}: pass None or "bf16" (the default), or "int8"')
    int8: Callable[[FloatArray, PackedLinear, FloatArray], None] | None = getattr(found, "matmul_int8", None)
    if int8 is None:
        raise DeviceError(
            f'compute is "int8", which device {found.name!r} does not have: pass device="cpu", or "auto", which takes '
            "the CPU for it, or no compute"
        )
    return int8


def _matmul(
    x: Any, layer: PackedLinear, device: str | None, out: Any, out_dtype: Any, compute: str | None, rows_axis: bool
) -> Any:
    view = view_rows(x, "x")
    assert view is not None
    shape = view.shape
    if len(shape) != (2 if rows_axis else 1) or shape[-1] != layer.k:
        wanted = f"[M, {layer.k}]" if rows_axis else f"[{layer.k}]"
        raise ShapeError(
            f"x has shape {list(shape)}: layer {layer.name!r} takes {wanted} (K = {layer.k} input channels)"
        )
    y_shape = (*shape[:-1], layer.n)
    if out is None:
        kind = view.kind if out_dtype is None else float_type(out_dtype, "out_dtype")
        result = empty_like(x, y_shape, kind)
        target = direct = view_rows(result, "out")
        assert target is not None
    else:
        result = out
        direct = _check_out(out, y_shape)
        target = direct if direct is not None else view_rows(empty_like(out, tuple(out.shape), _kind_of(out)), "out")
        assert target is not None
        if out_dtype is not None and float_type(out_dtype, "out_dtype") != target.kind:
            raise DtypeError(f"out is {out.dtype} and out_dtype is {out_dtype}: pass one of them, or make them agree")
        if len(target.shape) == 2 and target.shape[0] > 1 and abs(target.row_stride) < layer.n:
            raise ShapeError(
                f"out has rows {target.row_stride} elements apart, which overlap: N = {layer.n} are written"
            )
        if target.shape[-1] and _overlap(view, target):
            view = view_rows(x.clone() if hasattr(x, "clone") else x.copy(), "x")
            assert view is not None
    _matmul_of(device, compute)(view, layer, target)
    if direct is None:
        result[...] = target.owner
    return result


def _check_out(out: Any, shape: tuple[int, ...]) -> FloatArray | None:
    """``out`` as what a device writes, or None where only a copy can be that."""
    view = view_rows(out, "out", copy=False)
    if tuple(out.shape) != shape:
        raise ShapeError(f"out has shape {list(out.shape)}: expected {list(shape)} (that of x, but N for K)")
    if getattr(getattr(out, "flags", None), "writeable", True) is False:
        raise DtypeError("out is read-only: pass an array that can be written")
    return view


def _kind_of(out: Any) -> Any:
    return float_type(out.dtype, "out")


def _address_of(array: Any) -> int:
    return int(array.data_ptr()) if hasattr(array, "data_ptr") else int(array.ctypes.data)


def gemm(
    x: Any,
    layer: PackedLinear,
    *,
    device: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    compute: str | None = None,
) -> Any:
    """``y = x W + bias`` for a matrix of activations.

    Activations are rounded to bfloat16, products are summed in float32 over all of K, and the result is rounded once;
    `tilefuse.testing` states the bound. On the array ("npu", "emulator") activations are then rounded to bfp16, and
    results to bfloat16: docs/numerics.md.

    Args:
        x: [M, K] float32, bfloat16 or float16; NumPy (ml_dtypes for bfloat16) or a torch CPU tensor; any strides; M may
            be 0.
        layer: A packed layer (`tilefuse.pack`, `tilefuse.load`).
        device: "cpu", "auto" or another of `tilefuse.runtime.device_names()`; None for `tilefuse.default_device()`.
        out: [M, N], written and returned.
        out_dtype: Type of the result; None for that of ``x``.
        compute: "int8" quantises activations to signed 8 bits, a scale for each row and group of input channels, and
            multiplies in integers: faster for many rows, and off by some 0.65 % of the results' usual magnitude
            (docs/numerics.md). A NaN or Inf in a row makes its results NaN. Devices "cpu", "auto"
            (which takes the CPU) and "reference". None or "bf16": as above.

    Returns:
        [M, N], of the library of ``x``.

    Raises:
        ShapeError, DtypeError, DeviceError: An argument doesn't fit; the message says which and how.
    """
    quick = _quick(x, layer, device, out, out_dtype, compute, 2)
    return quick if quick is not None else _matmul(x, _layer_of(layer), device, out, out_dtype, compute, rows_axis=True)


def gemv(
    x: Any,
    layer: PackedLinear,
    *,
    device: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    compute: str | None = None,
) -> Any:
    """``y = x W + bias`` for one vector of activations: [K] -> [N]. Arguments as in `gemm`."""
    quick = _quick(x, layer, device, out, out_dtype, compute, 1)
    return (
        quick if quick is not None else _matmul(x, _layer_of(layer), device, out, out_dtype, compute, rows_axis=False)
    )


def linear(
    x: Any,
    layer: PackedLinear,
    *,
    device: str | None = None,
    out: Any = None,
    out_dtype: Any = None,
    compute: str | None = None,
) -> Any:
    """``y = x W + bias`` over the last axis: [..., K] -> [..., N]. Arguments as in `gemm`."""
    quick = _quick(x, layer, device, out, out_dtype, compute, 0)
    if quick is not None:
        return quick
    layer = _layer_of(layer)
    shape = tuple(getattr(x, "shape", ()))
    if len(shape) <= 2:
        return _matmul(x, layer, device, out, out_dtype, compute, rows_axis=len(shape) == 2)
    if shape[-1] != layer.k:
        raise ShapeError(f"x has shape {list(shape)}: the last axis must be K = {layer.k} (layer {layer.name!r})")
    rows = math.prod(shape[:-1])
    y_shape = (*shape[:-1], layer.n)
    x = x.reshape(rows, layer.k)
    if out is None:
        return _matmul(x, layer, device, None, out_dtype, compute, rows_axis=True).reshape(y_shape)
    _check_out(out, y_shape)
    flat = out.reshape(rows, layer.n)  # a view, or a copy where no view has this shape
    _matmul(x, layer, device, flat, out_dtype, compute, rows_axis=True)
    if _address_of(flat) != _address_of(out):
        out[...] = flat.reshape(y_shape)
    return out


def _pairs(calls: Any) -> list[tuple[Any, PackedLinear]]:
    if not isinstance(calls, Iterable):
        raise DtypeError(f"calls is a {type(calls).__name__}: pass a list of (x, layer)")
    found = list(calls)
    for index, call in enumerate(found):
        if not isinstance(call, tuple | list) or len(call) != 2:
            raise DtypeError(f"calls[{index}] is a {type(call).__name__} and no pair: pass (x, layer)")
    return found


def linear_many(
    calls: Iterable[tuple[Any, PackedLinear]],
    *,
    device: str | None = None,
    out_dtype: Any = None,
    compute: str | None = None,
) -> list[Any]:
    """Several products that don't need each other's results, such as those with a block's q, k and v weights.

    Each is ``linear(x, layer)``. The NPU gets those of one kind of weights as one command, where its driver takes that.

    Args:
        calls: (x, layer) of each, x [..., K] as in `gemm`.
        device: As in `gemm`.
        out_dtype: Type of all results; None for that of each x.
        compute: As in `gemm`.

    Returns:
        [..., N] of each.

    Raises:
        ShapeError, DtypeError, DeviceError: As in `gemm`, for the first call that can't be done; no result is returned.
    """
    calls = _pairs(calls)
    prepared, results = [], []
    if out_dtype is None and compute is None and is_direct_cpu(device):
        for x, given in calls:
            results.append(_quick(x, given, device, None, None, None, 0))
            if results[-1] is None:
                break
        else:
            return results
        results = []
    for x, given in calls:
        layer, shape = _layer_of(given), tuple(getattr(x, "shape", ()))
        if not shape or shape[-1] != layer.k:
            view_rows(x, "x")  # says so if it is no array
            raise ShapeError(f"x has shape {list(shape)}: the last axis must be K = {layer.k} (layer {layer.name!r})")
        view = view_rows(x.reshape(math.prod(shape[:-1]), layer.k), "x")
        assert view is not None
        kind = view.kind if out_dtype is None else float_type(out_dtype, "out_dtype")
        result = empty_like(x, (view.shape[0], layer.n), kind)
        target = view_rows(result, "out")
        assert target is not None
        prepared.append((view, layer, target))
        results.append(result.reshape((*shape[:-1], layer.n)))
    matmul = _matmul_of(device, compute)
    together = None if compute == "int8" else getattr(resolve_device(device), "matmul_many", None)
    if together is not None:
        together(prepared)
    else:
        for view, layer, target in prepared:
            matmul(view, layer, target)
    return results
