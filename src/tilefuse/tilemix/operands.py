"""Arrays of attention: NumPy or torch, any number of axes, as an address and strides."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.arrays import BFLOAT16, FloatType, empty_like, float_type, is_torch, numpy_dtype
from tilefuse.errors import DtypeError, ShapeError


class Operand:
    """A float array in CPU memory whose last axis is contiguous.

    Attributes:
        owner: The NumPy array or torch tensor that holds the memory.
        kind: Float type of the elements.
        address: Address of element 0.
        shape: Its shape.
        strides: In elements.
    """

    __slots__ = ("address", "kind", "owner", "shape", "strides")

    def __init__(self, owner: Any, kind: FloatType, address: int, strides: tuple[int, ...]) -> None:
        self.owner = owner
        self.kind = kind
        self.address = address
        self.shape: tuple[int, ...] = tuple(owner.shape)
        self.strides = strides

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def extent(self) -> tuple[int, int]:
        """Addresses of the first byte and the one after the last."""
        item = numpy_dtype(self.kind).itemsize
        if not self.size:
            return self.address, self.address
        reach = [(size - 1) * stride * item for size, stride in zip(self.shape, self.strides, strict=True)]
        return self.address + sum(r for r in reach if r < 0), self.address + sum(r for r in reach if r > 0) + item

    def overlaps(self, other: Operand) -> bool:
        """Whether memory from the first to the last element of each meets."""
        (begin, end), (other_begin, other_end) = self.extent(), other.extent()
        return begin < other_end and other_begin < end

    def numpy(self) -> npt.NDArray[Any]:
        """The same memory as a NumPy array (bfloat16 by ml_dtypes)."""
        if not is_torch(self.owner):
            return self.owner  # type: ignore[no-any-return]
        if self.kind is FloatType.BF16:
            return self.owner.view(sys.modules["torch"].uint16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]
        return self.owner.numpy()  # type: ignore[no-any-return]


def _of_numpy(x: npt.NDArray[Any], argument: str, copy: bool) -> Operand | None:
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(f"{argument} is a masked array, whose mask would be lost: pass {argument}.filled(0)")
    kind = float_type(x.dtype, argument)
    item = x.dtype.itemsize
    regular = x.flags.aligned and (x.shape[-1] <= 1 or x.strides[-1] == item)
    regular = regular and all(size <= 1 or s % item == 0 for size, s in zip(x.shape, x.strides, strict=True))
    if not regular:
        if not copy:
            return None
        x = np.array(x, order="C")  # also where it is contiguous, at an address that isn't aligned
    return Operand(x, kind, x.ctypes.data, tuple(s // item for s in x.strides))


def _of_torch(x: Any, argument: str, copy: bool) -> Operand | None:
    torch = sys.modules["torch"]
    if x.requires_grad and torch.is_grad_enabled():
        raise DtypeError(
            f"{argument} requires a gradient, and attention has none: call it under torch.no_grad(), or pass "
            f"{argument}.detach()"
        )
    if x.device.type != "cpu":
        raise DtypeError(f'{argument} is on {x.device}: move it to the CPU (.cpu()), or pass backend="triton"')
    kind = float_type(x.dtype, argument)
    if x.layout != torch.strided:
        raise DtypeError(f"{argument} is {x.layout}: pass a dense tensor (.to_dense())")
    x = x.detach()
    if x.is_neg():
        if not copy:
            return None
        x = x.resolve_neg()
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        if not copy:
            return None
        x = x.contiguous()
    try:
        address = int(x.data_ptr())
    except RuntimeError:
        address = 0
    if not address and x.numel():
        raise DtypeError(f"{argument} is a torch tensor without memory: pass it outside of torch.func and tracing")
    return Operand(x, kind, address, tuple(x.stride()))


def axes_of(x: Any, argument: str, axes: int, wanted: str) -> tuple[int, ...]:
    """Shape of an array that must have that many axes.

    Raises:
        DtypeError: Not an array.
        ShapeError: Another number of axes; ``wanted`` says what is taken.
    """
    if not isinstance(x, np.ndarray) and not is_torch(x):
        raise DtypeError(f"{argument} is a {type(x).__name__}: pass a NumPy array or a torch tensor")
    shape = tuple(int(size) for size in x.shape)
    if len(shape) != axes:
        raise ShapeError(f"{argument} has shape {list(shape)}: expected {wanted}")
    return shape


def operand(x: Any, argument: str) -> Operand:
    """``x`` (at least one axis) without a copy where its last axis is contiguous, else copied.

    Raises:
        DtypeError: Not float32, bfloat16 or float16, not in CPU memory, masked, sparse, or wants a gradient.
    """
    made = _of_torch(x, argument, True) if is_torch(x) else _of_numpy(x, argument, True)
    assert made is not None
    return made


def padded(x: Operand, columns: int) -> Operand:
    """``x`` with zeros after its last axis, up to that many columns; itself where it has them."""
    if x.shape[-1] == columns:
        return x
    wide = np.zeros((*x.shape[:-1], columns), numpy_dtype(x.kind))
    wide[..., : x.shape[-1]] = x.numpy()
    return operand(wide, "padded")


def target(out: Any, shape: tuple[int, ...], like: Any, kind: FloatType) -> tuple[Operand, bool]:
    """Where a result goes: ``out`` itself, or a new array of the library of ``like`` (True) that ``out`` is to be
    assigned from, or that is the result where ``out`` is None.

    Raises:
        ShapeError, DtypeError: ``out`` can't hold the result.
    """
    if out is None:
        return operand(empty_like(like, shape, kind), "out"), False
    if axes_of(out, "out", len(shape), f"{list(shape)}, that of q but for v's last axis") != shape:
        raise ShapeError(f"out has shape {list(out.shape)}: expected {list(shape)}, that of q but for v's last axis")
    if getattr(getattr(out, "flags", None), "writeable", True) is False:
        raise DtypeError("out is read-only: pass an array that can be written")
    direct = _of_torch(out, "out", False) if is_torch(out) else _of_numpy(out, "out", False)
    if direct is None:
        return operand(empty_like(out, shape, float_type(out.dtype, "out")), "out"), True
    if _overlaps_itself(direct):
        raise ShapeError(
            f"out has shape {list(shape)} and strides {list(direct.strides)}: its elements overlap; copy it"
        )
    return direct, False


def _overlaps_itself(x: Operand) -> bool:
    """Whether two elements may share memory: false for all arrays whose axes nest."""
    if not x.size:
        return False
    reach = 1
    pairs = sorted((abs(st), size) for size, st in zip(x.shape, x.strides, strict=True) if size > 1)
    for stride, size in pairs:
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False
