"""The numerics gate: what a product must satisfy on every device.

The reference is ``y = bf16(x) @ bf16(W) + bias`` in float64. The error of an element is taken relative to
``|x| @ |W| + |bias|``, what a backward-stable sum is held to: it does not shrink when the terms cancel, unlike the
plain relative error, and it sees every element, unlike a cosine.

With u the unit roundoff of bfloat16 (2^-8: 8 significant bits), a kernel may differ from the reference by

* u per weight: one that keeps ``(q - z) s`` exact, where the reference rounds it to bfloat16;
* K 2^-24 from summing K products in float32, in any order (gamma_K of Higham's Accuracy and Stability, section 3.1);
* the unit roundoff of the result's dtype.

Their sum bounds the largest error. Errors spread evenly below it have half of it as their mean, give or take 3.5
standard deviations of such a mean over N output channels (bound / sqrt(N)); a bias (truncating instead of rounding to
nearest, say) doubles the mean long before it moves the maximum, so the mean is gated too.

The array's GEMM rounds x to bfp16 after bfloat16, which is coarser than all of that beside an outlier. With ``array``
the reference is rounded so too, and the same gate tells whether the array computed right; docs/numerics.md says how far
that is from the reference above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.arrays import BFLOAT16, FloatType, numpy_dtype, view_rows
from tilefuse.errors import DtypeError
from tilefuse.layout import ZeroKind
from tilefuse.packed import PackedLinear, unpack

UNIT_ROUNDOFF = {FloatType.F32: 2.0**-24, FloatType.BF16: 2.0**-8, FloatType.F16: 2.0**-11}
"""Unit roundoff of each result dtype."""

LARGEST = {FloatType.F32: 2.0**128 - 2.0**104, FloatType.BF16: 2.0**128 - 2.0**120, FloatType.F16: 65504.0}
"""Largest finite value of each result dtype."""

NOT_CANCELLED = 0.25
"""A result at least this fraction of ``|x| @ |W|`` counts as not cancelled: its plain relative error is gated too."""


@dataclass(frozen=True)
class GemmError:
    """How far a result is from the reference.

    Attributes:
        max: Largest ``|y - ref| / (|x| @ |W| + |bias|)``.
        mean: Mean of it.
        relative: Largest ``|y - ref| / |ref|`` over the results that are not cancelled (0 when there are none).
        bound: Bound on ``max``; ``relative`` is held to ``bound / NOT_CANCELLED``.
        mean_bound: Bound on ``mean``.
    """

    max: float
    mean: float
    relative: float
    bound: float
    mean_bound: float

    @property
    def ok(self) -> bool:
        """Whether the gate holds."""
        return self.max <= self.bound and self.mean <= self.mean_bound and self.relative <= self.bound / NOT_CANCELLED


def gemm_bound(k: int, kind: FloatType) -> float:
    """Bound on the largest error for K = ``k`` and results of that type (see the module's text)."""
    return UNIT_ROUNDOFF[FloatType.BF16] + k * 2.0**-24 + UNIT_ROUNDOFF[kind]


def round_to_bfp16(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Values [..., K] as the array's multiplier takes them: 8 along K share the exponent of the largest.

    Each is a multiple of 2^-7 of the power of two above the largest, to nearest even, from -128 to 127 of them; where
    one would become 128, of twice that. Finite values whose largest is a normal float32.
    """
    k = values.shape[-1]
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -k % 8)]
    blocks = np.pad(values.astype(np.float64), padding).reshape(*values.shape[:-1], -1, 8)
    _, exponent = np.frexp(np.abs(blocks).max(axis=-1, keepdims=True))
    unit = np.ldexp(1.0, exponent - 7)
    unit = np.where((np.rint(blocks / unit) > 127).any(axis=-1, keepdims=True), 2 * unit, unit)
    rounded: npt.NDArray[np.float64] = (np.rint(blocks / unit) * unit).reshape(*values.shape[:-1], -1)[..., :k]
    return rounded


def _array_operands(
    x: npt.NDArray[np.float64], layer: PackedLinear
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """What the array's GEMM multiplies: x [M, K] as bfp16, and W [K, N], as bfp16 too where it has minima."""
    perm = slice(None) if layer.perm is None else layer.perm
    if layer.layout.zero is ZeroKind.Z8:
        w = layer.dequantize().astype(np.float64)[perm]
    else:
        parts = unpack(layer)
        assert parts.mins is not None
        group = np.arange(layer.k) // parts.group
        scales, minima = (grid.astype(np.float64)[group] for grid in (parts.scales, parts.mins))
        w = round_to_bfp16((parts.codes_kn() * scales + minima).astype(np.float32).T).T
    return round_to_bfp16(x[:, perm]), w


def gemm_error(
    y: Any,
    x: Any,
    layer: PackedLinear | npt.NDArray[Any],
    bias: npt.NDArray[Any] | None = None,
    *,
    array: bool = False,
) -> GemmError:
    """Measures ``y`` against the float64 reference.

    Args:
        y: [M, N] or [N]; the dtype sets the bound.
        x: [M, K] or [K].
        layer: A packed layer, or W [K, N] itself (rounded to bfloat16 here).
        bias: [N] when ``layer`` is an array; a packed layer brings its own.
        array: ``y`` is of the array's GEMM (``device="npu"`` or ``"emulator"``, two rows or more; `Session`). The
            reference then has x as bfp16, and W where the layer has minima, and the bound allows for results that
            leave the array as bfloat16. ``layer`` is a packed one.

    Raises:
        DtypeError: ``array`` with W itself.
        AssertionError: A result is not finite where the reference is finite in y's dtype, or the other way round.
    """
    y_view, x_view = view_rows(y, "y"), view_rows(x, "x")
    assert y_view is not None
    assert x_view is not None
    if isinstance(layer, PackedLinear):
        weights, bias = layer.dequantize(), layer.bias
    else:
        weights = layer.astype(BFLOAT16)
    with np.errstate(over="ignore", invalid="ignore"):
        w = weights.astype(np.float64)
        x64 = x_view.numpy().astype(BFLOAT16).astype(np.float64)
        if array:
            if not isinstance(layer, PackedLinear):
                raise DtypeError(f"array=True with a layer that is a {type(layer).__name__}: pass a PackedLinear")
            x64, w = _array_operands(x64.reshape(-1, layer.k), layer)
            x64 = x64.reshape(*x_view.shape[:-1], layer.k)
        reference = x64 @ w
        magnitude = np.abs(x64) @ np.abs(w)
        if bias is not None:
            reference = reference + bias
            magnitude = magnitude + np.abs(bias)
        got = y_view.numpy().astype(np.float64)
        assert got.shape == reference.shape, f"y has shape {got.shape}, the reference {reference.shape}"
        in_range = np.isfinite(reference.astype(numpy_dtype(y_view.kind)))
        # Next to the largest finite value either side may round to Inf.
        near_limit = np.abs(reference) > 0.98 * LARGEST[y_view.kind]
        wrong = np.isfinite(got) != in_range
        assert not np.any(wrong & ~near_limit), "finite where the reference is not, or the other way round"
        both = in_range & np.isfinite(got)
        error = np.abs(got - reference)[both]
        scale = magnitude[both]
        ratio = np.divide(error, scale, out=np.where(error == 0, 0.0, np.inf), where=scale > 0)
        steady = np.abs(reference[both]) >= NOT_CANCELLED * scale
        steady &= scale > 0
        relative = error[steady] / np.abs(reference[both][steady])
    bound = gemm_bound(w.shape[0], y_view.kind) + (UNIT_ROUNDOFF[FloatType.BF16] if array else 0.0)
    return GemmError(
        max=float(ratio.max(initial=0.0)),
        mean=float(ratio.mean()) if ratio.size else 0.0,
        relative=float(relative.max(initial=0.0)),
        bound=bound,
        mean_bound=bound * min(1.0, 0.5 + w.shape[1] ** -0.5),
    )


def assert_gemm_close(
    y: Any,
    x: Any,
    layer: PackedLinear | npt.NDArray[Any],
    bias: npt.NDArray[Any] | None = None,
    *,
    array: bool = False,
) -> GemmError:
    """Asserts that ``y`` passes the gate; arguments as in `gemm_error`, which it returns."""
    error = gemm_error(y, x, layer, bias, array=array)
    assert error.ok, (
        f"error max {error.max:.3g} (bound {error.bound:.3g}), mean {error.mean:.3g} (bound {error.mean_bound:.3g}), "
        f"relative {error.relative:.3g} (bound {error.bound / NOT_CANCELLED:.3g})"
    )
    return error
