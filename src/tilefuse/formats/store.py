"""What the readers of all formats share: checked access to tensors, and the facts that headers give about a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.errors import DtypeError, FormatError, QuantizationError, ShapeError
from tilefuse.formats.safetensors_map import Entry, MappedFile
from tilefuse.quantized import CodeOrder, QuantizedLinear
from tilefuse.validation import FLOATS

Array = npt.NDArray[Any]

INT32 = (np.dtype(np.int32),)


@dataclass(frozen=True)
class LinearInfo:
    """What the headers say about one linear layer.

    Attributes:
        name: Name of the layer, as `Checkpoint.linear` takes it.
        k: Input channels.
        n: Output channels.
        bits: Bits of a weight: 4 or 8 quantised, 16 or 32 otherwise.
        group: Input channels that share a scale (K for per-channel scales, 0 for an unquantised layer).
        format: ``"awq-gemm"``, ``"awq-gemv"``, ``"awq-gemv_fast"``, ``"gptq"``, ``"gptq_v2"``, ``"pack-quantized"``,
            ``"int-quantized"``, ``"naive-quantized"``, or ``"bf16"``, ``"fp16"``, ``"fp32"`` for an unquantised layer.
        symmetric: Whether the scheme has no zero points.
        bias: Whether the layer has a bias.
        nbytes: Bytes of its tensors in the file.
    """

    name: str
    k: int
    n: int
    bits: int
    group: int
    format: str
    symmetric: bool
    bias: bool
    nbytes: int

    @property
    def quantized(self) -> bool:
        """Whether `Checkpoint.linear` can read it."""
        return self.group > 0


@dataclass(frozen=True)
class Facts:
    """A quantised layer as its headers describe it, before any of its data is read."""

    info: LinearInfo
    order: CodeOrder


class Store:
    """The tensors of a checkpoint, whichever of its files they are in."""

    def __init__(self, files: Mapping[str, MappedFile]) -> None:
        self._files = dict(files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def files(self) -> list[Path]:
        """The files, each once."""
        return list(dict.fromkeys(file.path for file in self._files.values()))

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name].path

    def where(self, name: str) -> str:
        """How messages name a tensor."""
        return f"tensor {name!r} in {self.path(name)}" if name in self._files else f"tensor {name!r}"

    def entry(self, name: str) -> Entry:
        """The header of a tensor that must exist."""
        if name not in self._files:
            raise FormatError(
                f"tensor {name!r} is missing; fetch the checkpoint again, or, if this is one shard, open its directory"
            )
        return self._files[name][name]

    def get(self, name: str) -> Array:
        """A view of a tensor that must exist."""
        self.entry(name)
        return self._files[name].tensor(name)

    def expect(
        self,
        name: str,
        dtypes: tuple[np.dtype[Any], ...],
        *,
        ndim: int | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Entry:
        """The header of a tensor that must exist with one of ``dtypes`` and the given rank or shape."""
        entry = self.entry(name)
        if entry.dtype not in dtypes:
            raise FormatError(
                f"{self.where(name)} has dtype {entry.dtype}; expected {' or '.join(str(dtype) for dtype in dtypes)}"
            )
        if ndim is not None and (len(entry.shape) != ndim or 0 in entry.shape):
            raise FormatError(f"{self.where(name)} has shape {list(entry.shape)}; expected {ndim} non-empty dimensions")
        if shape is not None and entry.shape != shape:
            raise FormatError(
                f"{self.where(name)} has shape {list(entry.shape)}, which contradicts the other tensors of its layer: "
                f"expected {list(shape)}"
            )
        return entry

    def nbytes(self, layer: str, *suffixes: str) -> int:
        """Bytes of those tensors of a layer that exist."""
        names = [f"{layer}.{suffix}" for suffix in suffixes]
        return sum(self.entry(name).nbytes for name in names if name in self._files)

    def has_bias(self, layer: str, n: int) -> bool:
        """Whether a layer has a bias; checks it if so."""
        name = f"{layer}.bias"
        if name not in self._files:
            return False
        self.expect(name, FLOATS, shape=(n,))
        return True

    def bias(self, layer: str) -> npt.NDArray[np.float32] | None:
        """The bias of a layer as float32 [N], or None."""
        name = f"{layer}.bias"
        return self.get(name).astype(np.float32) if name in self._files else None


def build(
    store: Store,
    facts: Facts,
    *,
    codes: str,
    scales: tuple[str, Array],
    zeros: tuple[str, Array] | None = None,
    mins: tuple[str, Array] | None = None,
    perm: Array | None = None,
) -> QuantizedLinear:
    """Assemble and validate a layer; every argument names the tensor that it came from, for messages."""
    info = facts.info
    layer = QuantizedLinear(
        name=info.name,
        format=info.format,
        k=info.k,
        n=info.n,
        bits=info.bits,
        group=info.group,
        codes=store.get(codes),
        order=facts.order,
        scales=scales[1],
        zeros=None if zeros is None else zeros[1],
        mins=None if mins is None else mins[1],
        bias=store.bias(info.name),
        perm=perm,
        symmetric=info.symmetric,
    )
    where = {"codes": store.where(codes), "scales": store.where(scales[0]), "bias": store.where(f"{info.name}.bias")}
    where |= {"zeros": store.where(zeros[0])} if zeros else {}
    where |= {"mins": store.where(mins[0])} if mins else {}
    try:
        layer.validate(where=where)
    except (ShapeError, DtypeError) as error:  # a file's fault here, not an argument's
        raise FormatError(str(error)) from None
    return layer


def midpoint(info: LinearInfo) -> Array:
    """Zero points of a symmetric scheme, [G, N], 2^(bits - 1) throughout; one byte of memory, broadcast."""
    return np.broadcast_to(np.uint8(1 << (info.bits - 1)), (-(-info.k // info.group), info.n))


def resolve_group(k: int, groups: int, configured: int | None, where: str, *, short: bool) -> int:
    """The group size of a layer of K inputs that has ``groups`` rows of scales.

    Args:
        k: Input channels.
        groups: Rows of scales in the file.
        configured: What the configuration says (-1 for one group), or None if it is silent.
        where: Names the tensor of scales in messages.
        short: Whether the format lets the last group be short.

    Raises:
        FormatError: The rows contradict the configuration, or leave more than one possibility without one.
    """
    if configured is not None:
        if configured < -1 or configured == 0:
            raise FormatError(f"group size {configured} in the configuration is neither positive nor -1")
        group = k if configured == -1 else min(configured, k)
        if not short and k % group:
            raise FormatError(f"{where}: K = {k} is not a multiple of the group size {group}, as this format requires")
        if -(-k // group) != groups:
            raise FormatError(
                f"{where} has {groups} groups, which contradicts K = {k} and the group size {configured} of the "
                f"configuration ({-(-k // group)} groups)"
            )
        return group
    if groups == 1:
        return k
    even = {k // groups} if k % groups == 0 else set()
    if short:
        even |= {1 << shift for shift in range(5, 16) if -(-k // (1 << shift)) == groups}
    if len(even) != 1:
        raise FormatError(
            f"{where}: {groups} groups of K = {k} do not tell the group size; put the checkpoint's configuration "
            "(config.json or quantize_config.json) beside it"
        )
    return even.pop()


def input_permutation(store: Store, name: str, k: int, group: int) -> npt.NDArray[np.int32] | None:
    """The permutation that makes the groups of a ``g_idx`` tensor consecutive, or None where they already are."""
    store.expect(name, INT32, shape=(k,))
    group_of = store.get(name)
    last = -(-k // group) - 1
    # compressed-tensors fills the tensor with -1 where there is no activation order.
    if (group_of == -1).all():
        return None
    outside = (group_of < 0) | (group_of > last)
    if outside.any():
        at = int(np.argmax(outside))
        raise QuantizationError(f"{store.where(name)}: group {int(group_of[at])} at [{at}] is outside 0 to {last}")
    expected = np.arange(k, dtype=np.int32) // np.int32(group)
    if np.array_equal(group_of, expected):
        return None
    perm = np.argsort(group_of, kind="stable").astype(np.int32)
    if not np.array_equal(group_of[perm], expected):
        raise QuantizationError(
            f"{store.where(name)}: the groups are not of {group} input channels each (the last one K mod {group}), so "
            "sorting cannot make them regular; requantise with equal groups"
        )
    return perm
