"""A linear layer in the packed format, ready for every device; packing and its inverse."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse import _core, validation
from tilefuse._buffers import address, weights_empty
from tilefuse.errors import DtypeError, LayoutError, QuantizationError, ShapeError
from tilefuse.layout import ALIGNMENT, DEFAULT_COLUMNS, Layout, ZeroKind
from tilefuse.quantized import CodeOrder, QuantizedLinear
from tilefuse.shards import Axis, shard_of

Array = npt.NDArray[Any]

_ORDERS = list(CodeOrder)
_ZERO_KINDS = list(ZeroKind)
_FLOAT_KINDS = {np.dtype(np.float16): 0, np.dtype(ml_dtypes.bfloat16): 1, np.dtype(np.float32): 2}  # FloatKind
_ISSUES = ("", "scale", "min", "zero point", "code")  # PackIssue::Kind


def _plain(array: Array) -> bool:
    """Whether C++ may read the array through a pointer to its elements."""
    return bool(array.flags.c_contiguous and array.flags.aligned)


@lru_cache(maxsize=4096)
def native_layout(layout: Layout) -> _core.TileLayout:
    """The C++ side's form of ``layout``."""
    return _core.TileLayout(
        k=layout.k,
        n=layout.n,
        bits=layout.bits,
        tile_group=layout.tile_group,
        zero=_ZERO_KINDS.index(layout.zero),
        columns=layout.columns,
        k_tiles=layout.k_tiles,
        tiles_per_column=layout.tiles_per_column,
        tile_bytes=layout.tile_bytes,
        scale_offset=layout.scale_offset,
        zero_offset=layout.zero_offset,
    )


@dataclass(frozen=True, eq=False, repr=False)
class PackedLinear:
    """One linear layer in packed tiles (see `tilefuse.layout`).

    Attributes:
        name: Name of the layer in its checkpoint.
        layout: Where everything is in ``data``.
        data: uint8 [layout.nbytes], contiguous, 64-byte aligned; may be a read-only view of a mapped file.
        bias: float32 [N], or None.
        perm: int32 [K] permutation of the inputs (the layer computes ``x[:, perm] @ W``), or None.
        source: Name of the format that it was packed from, e.g. ``"awq-gemm"``.

    Raises:
        LayoutError: ``data``, ``bias`` or ``perm`` do not fit ``layout``.
    """

    name: str
    layout: Layout
    data: npt.NDArray[np.uint8] = field()
    bias: npt.NDArray[np.float32] | None = None
    perm: npt.NDArray[np.int32] | None = None
    source: str = ""

    def __post_init__(self) -> None:
        data, nbytes = self.data, self.layout.nbytes
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise LayoutError(
                f"{self.name}: data is {data.dtype} {list(data.shape)}; a contiguous uint8 [{nbytes}] is taken"
            )
        if data.nbytes != nbytes:
            raise LayoutError(f"{self.name}: data has {data.nbytes} bytes; {self._scheme()} takes {nbytes}")
        if address(data) % ALIGNMENT:
            raise LayoutError(
                f"{self.name}: data starts {address(data) % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
            )
        bias, perm = self.bias, self.perm
        if bias is not None and (bias.dtype != np.float32 or bias.shape != (self.n,) or not _plain(bias)):
            raise LayoutError(
                f"{self.name}: bias is {bias.dtype} {list(bias.shape)}; "
                f"a contiguous, aligned float32 [{self.n}] is taken"
            )
        if perm is not None:
            if perm.dtype != np.int32 or perm.shape != (self.k,) or not _plain(perm):
                raise LayoutError(
                    f"{self.name}: perm is {perm.dtype} {list(perm.shape)}; "
                    f"a contiguous, aligned int32 [{self.k}] is taken"
                )
            if not np.array_equal(np.sort(perm), np.arange(self.k)):
                raise LayoutError(f"{self.name}: perm must hold each input channel 0 to {self.k - 1} once")

    @property
    def k(self) -> int:
        """Input channels."""
        return self.layout.k

    @property
    def n(self) -> int:
        """Output channels."""
        return self.layout.n

    @property
    def nbytes(self) -> int:
        """Bytes of the packed buffer, without bias and permutation."""
        return self.layout.nbytes

    def dequantize(self) -> Array:
        """The weights, bfloat16 [K, N], rows in the original input order.

        Each is ``(q - z) s`` rounded once to bfloat16 (to nearest, ties to even); with minima, ``q s + m`` in float32
        and then rounded to bfloat16.
        """
        out = np.empty((self.k, self.n), ml_dtypes.bfloat16)
        _core.dequantize(
            native_layout(self.layout), packed=address(self.data), perm=address(self.perm), out=address(out)
        )
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        # What a device keeps beside the fields holds addresses, and a copied array is not aligned as `data` must be.
        return _rebuild, (self.name, self.layout, self.data, self.bias, self.perm, self.source)

    def _scheme(self) -> str:
        lay = self.layout
        group = "channel" if lay.group >= lay.k else lay.group
        return f"{lay.k} x {lay.n}, w{lay.bits} g={group} {lay.zero.value}, {lay.columns} columns"

    def __repr__(self) -> str:
        extras = [what for what, there in (("bias", self.bias), ("perm", self.perm)) if there is not None]
        parts = [self._scheme(), *extras, f"{self.nbytes:,} B"]
        return f"PackedLinear({self.name!r}, {', '.join(parts)}{f', from {self.source}' if self.source else ''})"


def _rebuild(
    name: str, layout: Layout, data: Array, bias: Array | None, perm: Array | None, source: str
) -> PackedLinear:
    """A layer from what pickle or copy made of its fields."""
    if address(data) % ALIGNMENT:
        moved = weights_empty(data.nbytes)
        moved[:] = data
        data = moved
    return PackedLinear(name, layout, data, bias, perm, source)


def packed_layout(q: QuantizedLinear, columns: int = DEFAULT_COLUMNS) -> Layout:
    """The layout that `pack` gives ``q``; its ``nbytes`` is the size of the packed buffer.

    Raises:
        DtypeError: ``q`` is not a `QuantizedLinear`.
        LayoutError: The packed format cannot hold the layer.
    """
    if not isinstance(q, QuantizedLinear):
        raise DtypeError(f"q is a {type(q).__name__}: pass a QuantizedLinear (Checkpoint.linear, quantize_linear)")
    try:
        zero = ZeroKind.Z8 if q.mins is None else ZeroKind.M16
        return Layout(k=q.k, n=q.n, bits=q.bits, group=q.group, zero=zero, columns=columns)
    except LayoutError as error:
        raise LayoutError(f"{_title(q)}: {error}") from None


def packed_nbytes(
    q: QuantizedLinear,
    columns: int = DEFAULT_COLUMNS,
    *,
    shard: tuple[int, int] | None = None,
    axis: Axis | None = None,
) -> int:
    """Bytes of the buffer that `pack` fills for ``q``, or for a part of it; arguments and errors as there."""
    return packed_layout(_part(q, shard, axis), columns).nbytes


def _part(q: QuantizedLinear, shard: tuple[int, int] | None, axis: Axis | None) -> QuantizedLinear:
    if shard is None and axis is None:
        return q
    if shard is None or axis is None:
        raise ShapeError(f"shard = {shard!r} and axis = {axis!r}: pass both or neither")
    return shard_of(q, shard, axis)


def pack(
    q: QuantizedLinear,
    columns: int = DEFAULT_COLUMNS,
    *,
    out: npt.NDArray[np.uint8] | None = None,
    shard: tuple[int, int] | None = None,
    axis: Axis | None = None,
) -> PackedLinear:
    """Packs one quantised layer; codes are moved, never requantised, and scales rounded once to bfloat16.

    Args:
        q: The layer, in any `CodeOrder`.
        columns: Columns of the array that the stream is interleaved over, 1 to 8.
        out: uint8 [packed_nbytes(q, columns)], contiguous and 64-byte aligned, to pack into; allocated when None.
        shard: (rank, world), 0 <= rank < world: pack the part that this rank of a tensor-parallel group holds. None for
            all of the layer.
        axis: Which channels are divided. ``"out"``: the part is output channels rank N / world onwards; the results of
            the ranks are put side by side. ``"in"``: input channels likewise; the results are to be added up, and
            rank 0 alone has the bias.

    Raises:
        LayoutError: The packed format cannot hold the layer, ``out`` does not fit, or the layer can't be divided so:
            world does not divide the channels, a group would be cut, or inputs that are permuted would be divided.
        ShapeError, DtypeError: An array of ``q`` contradicts its other fields, or ``shard`` or ``axis`` is not taken.
        QuantizationError: A scale or minimum is NaN, infinite or overflows bfloat16, or a zero point or code has more
            than ``bits`` bits; names the tensor and the place.
    """
    if shard is not None or axis is not None:
        validation.check(q, {}, values=False)
        q = _part(q, shard, axis)
    layout = packed_layout(q, columns)
    validation.check(q, {}, values=False)
    if out is not None and not isinstance(out, np.ndarray):
        raise DtypeError(f"{_title(q)}: out is a {type(out).__name__}: pass a NumPy array, uint8 [{layout.nbytes}]")
    data = weights_empty(layout.nbytes) if out is None else out
    if not data.flags.writeable:
        raise LayoutError(f"{_title(q)}: out is read-only; pass an array that can be written")
    packed = PackedLinear(
        name=q.name,
        layout=layout,
        data=data,
        bias=None if q.bias is None else np.require(q.bias, np.float32, ["C", "A"]),
        perm=None if q.perm is None else np.require(q.perm, np.int32, ["C", "A"]),
        source=q.format,
    )
    # Held until the call returns; copies only where strides are not whole elements.
    codes = np.ascontiguousarray(q.codes)
    scales, zeros, mins = _whole_strides(q.scales), _whole_strides(q.zeros), _whole_strides(q.mins)
    assert scales is not None
    kind, row, channel = _core.pack(
        native_layout(layout),
        codes=address(codes),
        order=_ORDERS.index(q.order),
        perm=address(packed.perm),
        group=q.group,
        scales=_float_grid(scales),
        zeros=None if zeros is None else (address(zeros), *_strides(zeros)),
        mins=None if mins is None else _float_grid(mins),
        out=address(data),
    )
    if kind:
        raise _issue(q, _ISSUES[kind], row, channel)
    return packed


def unpack(packed: PackedLinear) -> QuantizedLinear:
    """The inverse of `pack`, bit for bit.

    Returns:
        A layer of order ``KN``: codes uint8 [K, N], scales bfloat16 [G, N], zero points uint8 or minima bfloat16
        [G, N]; bias and permutation are those of ``packed``.

    Raises:
        DtypeError: ``packed`` is not a `PackedLinear`.
    """
    if not isinstance(packed, PackedLinear):
        raise DtypeError(f"packed is a {type(packed).__name__}: pass a PackedLinear (pack, load)")
    lay = packed.layout
    grid = (lay.source_groups, lay.n)
    codes = np.empty((lay.k, lay.n), np.uint8)
    scales = np.empty(grid, ml_dtypes.bfloat16)
    zeros = np.empty(grid, np.uint8) if lay.zero is ZeroKind.Z8 else None
    mins = np.empty(grid, ml_dtypes.bfloat16) if lay.zero is ZeroKind.M16 else None
    _core.unpack(
        native_layout(lay),
        packed=address(packed.data),
        group=lay.group,
        perm=address(packed.perm),
        codes=address(codes),
        scales=address(scales),
        zeros=address(zeros),
        mins=address(mins),
    )
    return QuantizedLinear(
        name=packed.name,
        format=packed.source,
        k=lay.k,
        n=lay.n,
        bits=lay.bits,
        group=lay.group,
        codes=codes,
        order=CodeOrder.KN,
        scales=scales,
        zeros=zeros,
        mins=mins,
        bias=packed.bias,
        perm=packed.perm,
        symmetric=zeros is not None and bool((zeros == 1 << (lay.bits - 1)).all()),
    )


def _title(q: QuantizedLinear) -> str:
    """How messages name the layer."""
    return f"layer {q.name!r}" if q.name else "the layer"


def _whole_strides(grid: Array | None) -> Array | None:
    if grid is None or all(stride % grid.itemsize == 0 for stride in grid.strides):
        return grid
    return np.ascontiguousarray(grid)


def _strides(grid: Array) -> tuple[int, int]:
    group, channel = (stride // grid.itemsize for stride in grid.strides)
    return group, channel


def _float_grid(grid: Array) -> tuple[int, int, int, int]:
    return (address(grid), _FLOAT_KINDS[grid.dtype], *_strides(grid))


def _issue(q: QuantizedLinear, what: str, row: int, channel: int) -> QuantizationError:
    limit = 2**q.bits - 1
    if what == "code":
        source_row = row if q.perm is None else int(q.perm[row])
        value = q.codes[source_row, channel]
        return QuantizationError(
            f"{_title(q)}: code {value} of input channel {source_row}, output channel {channel} is above {limit} "
            f"({q.bits} bits)"
        )
    grid = {"scale": q.scales, "min": q.mins, "zero point": q.zeros}[what]
    assert grid is not None
    value = grid[row, channel]
    where = f"{_title(q)}: {what} {value} of group {row}, output channel {channel}"
    if what == "zero point":
        return QuantizationError(f"{where} is above {limit} ({q.bits} bits)")
    if np.isfinite(np.float32(value)):
        return QuantizationError(f"{where} overflows bfloat16 (largest 3.3895e38); rescale the layer")
    return QuantizationError(f"{where} is not finite; requantise the layer")
