"""Which layers of a model are multiplied as one: q, k and v of an attention, gate and up of an MLP.

They have the same input, so their weights beside each other along N are one product: a decode step has four calls a
layer rather than seven.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.errors import LayoutError, QuantizationError
from tilefuse.formats import Checkpoint, LinearInfo
from tilefuse.layout import DEFAULT_COLUMNS, Layout, ZeroKind
from tilefuse.quantize import quantize_linear
from tilefuse.quantized import CodeOrder, QuantizedLinear
from tilefuse.storage import LayerSpec

Array = npt.NDArray[Any]

SETS: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Name of the fused layer -> the layers that it stands for, in the order in which a forward pass asks for them."""

MODEL_TYPES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "smollm3",
    }
)
"""Architectures (``model_type``) whose code is known to give the layers of a set the same input; no other is fused."""

_N_AXIS = {
    CodeOrder.KN: 1,
    CodeOrder.WORDS_N: 1,
    CodeOrder.WORDS_N_AWQ: 1,
    CodeOrder.WORDS_K: 1,
    CodeOrder.ROWS_N: 0,
    CodeOrder.ROWS_N_INT8: 0,
    CodeOrder.ROWS_N_FAST: 0,
}


@dataclass(frozen=True)
class Product:
    """One product of a forward pass.

    Attributes:
        name: Name of the packed layer: the checkpoint's, or that of the fused layer beside its parts.
        parts: Names of the checkpoint's layers in it.
        bits: That a layer which is not quantised in the files is rounded to; 0 for quantised ones.
    """

    name: str
    parts: tuple[str, ...]
    bits: int = 0

    @property
    def fused(self) -> bool:
        """Whether it stands for several layers."""
        return len(self.parts) > 1


def products(checkpoint: Checkpoint, names: Iterable[str], *, fuse: bool = True) -> list[Product]:
    """The products that the quantised layers ``names`` are packed into, in their order.

    Layers are fused where the architecture is one of `MODEL_TYPES` and their bits, groups and permutations agree.
    """
    names = list(names)
    there = set(names)
    fuse = fuse and _model_type(checkpoint.config) in MODEL_TYPES
    tensors = frozenset(checkpoint.tensors())
    found: list[Product] = []
    taken: set[str] = set()
    for name in names:
        if name in taken:
            continue
        product = Product(name, (name,))
        parent, _, leaf = name.rpartition(".")
        for fused, leaves in SETS.items() if fuse else ():
            parts = tuple(f"{parent}.{part}" for part in leaves)
            if leaf in leaves and there.issuperset(parts) and _alike(checkpoint, parts, tensors):
                product = Product(f"{parent}.{fused}", parts)
        taken.update(product.parts)
        found.append(product)
    return found


def _model_type(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    holder = text if isinstance(text, dict) and "model_type" in text else config
    found = holder.get("model_type")
    return found if isinstance(found, str) else ""


def _alike(checkpoint: Checkpoint, parts: tuple[str, ...], tensors: frozenset[str]) -> bool:
    first, *others = (checkpoint.info(part) for part in parts)
    scheme = (first.k, first.bits, first.group, first.format)
    if any((other.k, other.bits, other.group, other.format) != scheme for other in others):
        return False
    orders = [_group_indices(checkpoint, part, tensors) for part in parts]
    return all(
        order is None if orders[0] is None else order is not None and np.array_equal(order, orders[0])
        for order in orders
    )


def _group_indices(checkpoint: Checkpoint, name: str, tensors: frozenset[str]) -> Array | None:
    for suffix in ("g_idx", "weight_g_idx"):
        if f"{name}.{suffix}" in tensors:
            return checkpoint.tensor(f"{name}.{suffix}")
    return None


def layout_of(info: LinearInfo, columns: int = DEFAULT_COLUMNS) -> Layout:
    """The layout of a layer by its headers; which kind of zeros it has matters for no limit.

    Raises:
        LayoutError: The packed format cannot hold it.
    """
    try:
        return Layout(info.k, info.n, info.bits, info.group, ZeroKind.Z8, columns)
    except LayoutError as error:
        raise LayoutError(f"layer {info.name!r}: {error}") from None


def read(checkpoint: Checkpoint, product: Product) -> QuantizedLinear:
    """The quantised layer of a product; for a fused one the codes are copied together.

    Raises:
        FormatError, UnsupportedFormatError, QuantizationError: As in `Checkpoint.linear`.
    """
    if product.bits:
        weights = _weights(checkpoint, product)
        return quantize_linear(
            weights.T, bits=product.bits, group=_group(weights.shape[1]), symmetric=True, name=product.name
        )
    parts = [checkpoint.linear(name) for name in product.parts]
    return parts[0] if len(parts) == 1 else concatenate(parts, product.name)


def _weights(checkpoint: Checkpoint, product: Product) -> Array:
    """[N, K], as stored."""
    return checkpoint.tensor(f"{product.parts[0]}.weight")


def _group(k: int) -> int:
    """The largest group size that divides K, or K itself."""
    return next((group for group in (128, 64, 32) if k % group == 0), k)


def spec(checkpoint: Checkpoint, product: Product, columns: int = DEFAULT_COLUMNS) -> LayerSpec:
    """What the packed layer of a product will be. Validates its parts.

    Raises:
        LayoutError: The packed format cannot hold it.
        FormatError, UnsupportedFormatError, QuantizationError: As in `Checkpoint.linear`.
    """
    if product.bits:
        n, k = _weights(checkpoint, product).shape
        return LayerSpec(
            product.name, Layout(k, n, product.bits, _group(k), ZeroKind.Z8, columns), source="quantize_linear"
        )
    parts = [checkpoint.linear(name) for name in product.parts]
    first = parts[0]
    zero = ZeroKind.Z8 if first.mins is None else ZeroKind.M16
    layout = Layout(first.k, sum(part.n for part in parts), first.bits, first.group, zero, columns)
    bias = any(part.bias is not None for part in parts)
    return LayerSpec(product.name, layout, bias, first.perm is not None, first.format)


def concatenate(parts: list[QuantizedLinear], name: str) -> QuantizedLinear:
    """Layers with the same input beside each other along N. Nothing is quantised again.

    Raises:
        QuantizationError: They differ in K, bits, group size or permutation, or in having zero points or minima.
    """
    first = parts[0]
    for part in parts[1:]:
        same = (part.k, part.bits, part.group, part.mins is None) == (
            first.k,
            first.bits,
            first.group,
            first.mins is None,
        )
        if not same or not _same(part.perm, first.perm):
            raise QuantizationError(
                f"layers {first.name!r} and {part.name!r} can't be one: they differ in K, bits, group size, kind of "
                "zero points or order of inputs"
            )
    order = first.order
    # Words of several output channels are laid side by side only where none is shared.
    whole = order is not CodeOrder.WORDS_N or all(part.n * part.bits % 32 == 0 for part in parts)
    if whole and all(part.order is order for part in parts):
        codes = np.concatenate([part.codes for part in parts], axis=_N_AXIS[order])
        perm = first.perm
    else:
        codes, order = np.concatenate([part.codes_kn() for part in parts], axis=1), CodeOrder.KN
        perm = first.perm
        if perm is not None:  # codes_kn() has sorted the rows, and codes are in the checkpoint's order
            unsorted = np.empty_like(codes)
            unsorted[perm] = codes
            codes = unsorted
    bias = None
    if any(part.bias is not None for part in parts):
        bias = np.concatenate([np.zeros(p.n, np.float32) if p.bias is None else p.bias for p in parts])
    return QuantizedLinear(
        name=name,
        format=first.format,
        k=first.k,
        n=sum(part.n for part in parts),
        bits=first.bits,
        group=first.group,
        codes=codes,
        order=order,
        scales=_joined([part.scales for part in parts]),
        zeros=None if first.zeros is None else _joined([part.zeros for part in parts]),
        mins=None if first.mins is None else _joined([part.mins for part in parts]),
        bias=bias,
        perm=perm,
        symmetric=all(part.symmetric for part in parts),
    )


def _same(a: Array | None, b: Array | None) -> bool:
    return b is None if a is None else b is not None and np.array_equal(a, b)


def _joined(grids: list[Array | None]) -> Array:
    return np.concatenate([grid for grid in grids if grid is not None], axis=1)
