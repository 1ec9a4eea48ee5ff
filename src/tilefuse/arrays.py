"""NumPy, ml_dtypes and torch arrays as addresses, strides and one of three dtypes, without importing torch."""

from __future__ import annotations

import enum
import sys
from typing import Any

import ml_dtypes
import numpy as np

from tilefuse.errors import DtypeError

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)


class FloatType(enum.IntEnum):
    """The float types of activations and results; the values are the C++ side's."""

    F32 = 0
    BF16 = 1
    F16 = 2


_NUMPY: dict[FloatType, np.dtype[Any]] = {
    FloatType.F32: np.dtype(np.float32),
    FloatType.BF16: BFLOAT16,
    FloatType.F16: np.dtype(np.float16),
}
_FROM_NUMPY = {dtype: kind for kind, dtype in _NUMPY.items()}
_NAMES = {"float32": FloatType.F32, "bfloat16": FloatType.BF16, "float16": FloatType.F16}
_TAKEN = "float32, bfloat16 (ml_dtypes or torch) or float16"


def is_torch(x: object) -> bool:
    """Whether ``x`` is a torch tensor. Never imports torch: who holds a tensor has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def float_type(dtype: object, argument: str) -> FloatType:
    """The float type that a NumPy dtype, torch dtype or name means.

    Raises:
        DtypeError: It is none of float32, bfloat16, float16; names ``argument``.
    """
    if isinstance(dtype, FloatType):
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name in _NAMES:
        return _NAMES[name]
    try:
        found = _FROM_NUMPY.get(np.dtype(dtype))  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError):  # NumPy parses strings as lists of types
        found = None
    if found is None:
        raise DtypeError(f"{argument} is {name}: pass {_TAKEN}")
    return found


def numpy_dtype(kind: FloatType) -> np.dtype[Any]:
    """The NumPy dtype of a float type."""
    return _NUMPY[kind]


class FloatArray:
    """A float array whose last axis is contiguous: what a device reads or writes.

    Attributes:
        owner: The NumPy array or torch tensor that holds the memory.
        kind: Float type of the elements.
        shape: Its shape.
        address: Address of element 0.
        row_stride: Elements from one row (last axis) to the next; only for one or two axes.
    """

    __slots__ = ("address", "kind", "owner", "row_stride", "shape")

    def __init__(self, owner: Any, kind: FloatType, address: int, row_stride: int) -> None:
        self.owner = owner
        self.kind = kind
        self.shape: tuple[int, ...] = tuple(owner.shape)
        self.address = address
        self.row_stride = row_stride

    def numpy(self) -> np.ndarray[Any, Any]:
        """The same memory as a NumPy array (bfloat16 by ml_dtypes)."""
        if not is_torch(self.owner):
            return self.owner  # type: ignore[no-any-return]
        if self.kind is FloatType.BF16:
            torch = sys.modules["torch"]
            return self.owner.view(torch.uint16).numpy().view(BFLOAT16)  # type: ignore[no-any-return]
        return self.owner.numpy()  # type: ignore[no-any-return]


def _torch_address(x: Any, argument: str) -> int:
    """Address of a CPU tensor's memory, which those within transformations of torch.func, for one, don't have."""
    try:
        address = int(x.data_ptr())
    except RuntimeError:
        address = 0
    if not address and x.numel():
        raise DtypeError(f"{argument} is a torch tensor without memory: pass it outside of torch.func and tracing")
    return address


def view_rows(x: Any, argument: str, *, copy: bool = True) -> FloatArray | None:
    """``x`` as a `FloatArray` of one or two axes, without a copy where its layout allows.

    Args:
        x: NumPy array or torch CPU tensor.
        argument: Name for error messages.
        copy: Whether an unsuitable layout may be copied; if not, None is returned for it.

    Raises:
        DtypeError: Not an array of a float type that is taken, or not in CPU memory.
    """
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise DtypeError(f"{argument} is a masked array, whose mask would be lost: pass {argument}.filled(0)")
        kind = _FROM_NUMPY.get(x.dtype)
        if kind is None:
            raise DtypeError(f"{argument} is {x.dtype}: pass {_TAKEN}")
        item = x.dtype.itemsize
        strides = x.strides
        regular = x.flags.aligned and (x.ndim == 0 or x.shape[-1] <= 1 or strides[-1] == item)
        if x.ndim == 2 and x.shape[0] > 1:
            regular = regular and strides[0] % item == 0
        if not regular:
            if not copy:
                return None
            x = np.ascontiguousarray(x)
            strides = x.strides
        return FloatArray(x, kind, x.ctypes.data, strides[0] // item if x.ndim == 2 else 0)
    if is_torch(x):
        if x.device.type != "cpu":
            raise DtypeError(f"{argument} is on {x.device}: move it to the CPU first (.cpu())")
        kind = float_type(x.dtype, argument)
        if x.layout != sys.modules["torch"].strided:
            raise DtypeError(f"{argument} is {x.layout}: pass a dense tensor (.to_dense())")
        x = x.detach()
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        if x.ndim and x.shape[-1] > 1 and x.stride(-1) != 1:
            if not copy:
                return None
            x = x.contiguous()
        return FloatArray(x, kind, _torch_address(x, argument), x.stride(0) if x.ndim == 2 else 0)
    raise DtypeError(f"{argument} is a {type(x).__name__}: pass a NumPy array or a torch tensor ({_TAKEN})")


def empty_like(x: Any, shape: tuple[int, ...], kind: FloatType) -> Any:
    """A new array of the same library as ``x``."""
    if is_torch(x):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, _NUMPY[kind].name))
    return np.empty(shape, _NUMPY[kind])
