"""`KVCache`: keys and values of a context, packed for the CPU's kernels once, as they come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilefuse import _core
from tilefuse._buffers import address, aligned_empty
from tilefuse.errors import DtypeError, OptionError, ShapeError
from tilefuse.tilemix import cpu
from tilefuse.tilemix.grid import BLOCK_N, auto_group, ceil_div
from tilefuse.tilemix.operands import Operand, axes_of, operand, padded
from tilefuse.tilemix.spec import MOST_CHANNELS, flag, integer, starts_of

KINDS = ("bf16", "int8")

MOST_TOKENS = 1 << 26
"""Capacity of a cache, at most: what a map holds."""

_CACHED = np.dtype([(name, np.int64) for name in _core.CACHED_FIELDS])

_LEAST_BLOCKS = 16
"""Blocks that a sequence has room for at first."""


class New(NamedTuple):
    """Checked tokens to append."""

    k: Operand
    v: Operand
    first: npt.NDArray[np.int64]
    """First row of each sequence, in packed arrays."""
    counts: npt.NDArray[np.int64]
    packed: bool


class _Layer:
    """What a cache holds for one layer."""

    def __init__(self, cache: KVCache) -> None:
        self.lengths = np.zeros(cache.batch, np.int64)
        self.blocks = 0
        self.sealed: npt.NDArray[np.uint8] = np.zeros((cache.batch, cache.heads, 0, cache.block_bytes), np.uint8)
        shape = (cache.batch, cache.heads, cache.open_bytes)
        self.open = aligned_empty(math.prod(shape)).reshape(shape)
        self.sink = aligned_empty(math.prod(shape)).reshape(shape) if cache.sink else None
        self.reserve(cache, 1)

    def reserve(self, cache: KVCache, blocks: int) -> None:
        """Room for so many blocks of every sequence; blocks keep their place and bytes."""
        if blocks <= self.blocks:
            return
        most = ceil_div(cache.capacity, BLOCK_N)
        blocks = min(max(blocks, 2 * self.blocks, _LEAST_BLOCKS), most)
        shape = (cache.batch, cache.heads, blocks, cache.block_bytes)
        grown = aligned_empty(math.prod(shape)).reshape(shape)
        filled = int(self.lengths.max(initial=0)) // BLOCK_N
        grown[:, :, :filled] = self.sealed[:, :, :filled]
        # A call that still reads the old blocks holds them (`CacheView.place`).
        self.sealed, self.blocks = grown, blocks

    @property
    def nbytes(self) -> int:
        return self.sealed.nbytes + self.open.nbytes + (self.sink.nbytes if self.sink is not None else 0)


class KVCache:
    """Keys and values of one or more sequences and layers, packed for the kernels as they are appended.

    Keys come in blocks of 64. A full block is packed and, once and for all, quantised by its own keys alone; the last,
    incomplete one stays in 16 bits until it is full, so appending never changes what a block's keys were taken as.
    With ``kind="bf16"`` a block has its keys in 16 bits and in codes: a call's routing picks. With ``kind="int8"`` it
    has codes of keys, and of values with a scale for each token: half the memory, and no choice.

    Not to be changed by two threads at a time.

    Args:
        heads: KV heads.
        dim: Channels of keys, 1 to 512.
        capacity: Tokens that a sequence may have at most. Maps of routing templates are made for it, so that a query's
            bits don't depend on how long the context is yet; memory is only taken as tokens come.
        batch: Sequences, each of its own length.
        layers: Layers. `attention` takes a cache of one layer, or `view` of one.
        dim_v: Channels of values, 1 to 512; ``dim`` if None.
        kind: "bf16" or "int8".
        smooth: What is subtracted from keys before they are quantised: the mean of each "block", or "none".
        sink: Whether the first block of each sequence, which many heads attend to, also stays in 16 bits.

    Raises:
        OptionError, DtypeError: An argument is out of range.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        *,
        capacity: int,
        batch: int = 1,
        layers: int = 1,
        dim_v: int | None = None,
        kind: str = "bf16",
        smooth: str = "block",
        sink: bool = False,
    ) -> None:
        self.heads = integer(heads, "heads", 1, 1 << 16)
        self.dim = integer(dim, "dim", 1, MOST_CHANNELS)
        self.dim_v = self.dim if dim_v is None else integer(dim_v, "dim_v", 1, MOST_CHANNELS)
        self.capacity = integer(capacity, "capacity", 1, MOST_TOKENS)
        self.batch = integer(batch, "batch", 1, 1 << 16)
        if not isinstance(kind, str) or kind not in KINDS:
            raise OptionError(f'kind is {kind!r}: pass "bf16" or "int8"')
        if not isinstance(smooth, str) or smooth not in ("block", "none"):
            raise OptionError(
                f'smooth is {smooth!r}: pass "block" or "none"; a mean of all keys would change as they come'
            )
        self.kind = kind
        self.smooth = smooth
        self.sink = flag(sink, "sink")
        d, dv = cpu.channels(self.dim), cpu.channels(self.dim_v)
        full = kind == "bf16"
        self.sealed_layout = _core.BlockLayout(d=d, dv=dv, k16=full, k8=True, v16=full, v8=not full)
        self.open_layout = _core.BlockLayout(d=d, dv=dv, k16=True, k8=False, v16=True, v8=False)
        self.block_bytes = self.sealed_layout.bytes
        self.open_bytes = 64 * ceil_div(_core.cache_open_bytes(self.open_layout), 64)
        self.group = auto_group(self.capacity)
        self.layers = [_Layer(self) for _ in range(integer(layers, "layers", 1, 1 << 12))]

    def view(self, layer: int = 0, sequences: Sequence[int] | None = None) -> CacheView:
        """One layer of some sequences, what `attention` takes.

        Args:
            layer: Which one.
            sequences: Which ones, in the order of a call's batch, each once; None for all.

        Raises:
            OptionError, ShapeError: There is no such layer or sequence, or one comes twice.
        """
        layer = integer(layer, "layer", 0, len(self.layers) - 1)
        if sequences is None:
            return CacheView(self, layer, np.arange(self.batch))
        chosen = np.array([integer(b, "sequences", 0, self.batch - 1) for b in sequences], np.int64)
        if len(np.unique(chosen)) != len(chosen):
            raise ShapeError(f"sequences are {chosen.tolist()}: one comes twice")
        return CacheView(self, layer, chosen)

    def append(self, k: Any, v: Any, *, layer: int = 0, cu_seqlens: Any = None) -> None:
        """Appends tokens of all sequences; arguments as `attention` takes them, of shapes of the cache.

        Raises:
            ShapeError, DtypeError, OptionError: They don't fit, or don't find room.
        """
        self.view(layer).append(k, v, cu_seqlens=cu_seqlens)

    def lengths(self, layer: int = 0) -> npt.NDArray[np.int64]:
        """Tokens that each sequence has, int64 [batch]."""
        return self.layers[integer(layer, "layer", 0, len(self.layers) - 1)].lengths.copy()

    def crop(self, length: int, *, sequences: Sequence[int] | None = None) -> None:
        """Forgets all but the first ``length`` tokens of each sequence, in all layers; shorter ones stay.

        Raises:
            OptionError: With ``kind="int8"``, ``length`` lies within a block that is full in 8 bits: there is no 16-bit
                form to go on from.
        """
        length = integer(length, "length", 0, self.capacity)
        views = [self.view(layer, sequences) for layer in range(len(self.layers))]
        if self.kind == "int8" and length % BLOCK_N and not (self.sink and length < BLOCK_N):
            for view in views:
                if (view.lengths // BLOCK_N > length // BLOCK_N).any():
                    raise OptionError(
                        f'length is {length}, within a full block of 64 tokens, which kind="int8" has no 16-bit form '
                        "of: crop to a multiple of 64"
                    )
        for view in views:
            view.crop_to(length)

    def reset(self, *, sequences: Sequence[int] | None = None) -> None:
        """Forgets all tokens; keeps the memory."""
        self.crop(0, sequences=sequences)

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated; room that was never written may not take memory yet."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def token_nbytes(self) -> float:
        """Bytes that a token of a full block takes, in all layers."""
        return self.block_bytes * self.heads * len(self.layers) / BLOCK_N

    def __repr__(self) -> str:
        return (
            f"<KVCache {self.kind}: {len(self.layers)} layers, {self.batch} sequences of up to {self.capacity}, "
            f"{self.heads} heads of {self.dim}>"
        )


class CacheView:
    """One layer of some sequences of a `KVCache`."""

    def __init__(self, cache: KVCache, layer: int, sequences: npt.NDArray[np.int64]) -> None:
        self.cache = cache
        self.layer = layer
        self.sequences = sequences

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens that each sequence has, int64 [sequences]."""
        return self.cache.layers[self.layer].lengths[self.sequences]

    def append(self, k: Any, v: Any, *, cu_seqlens: Any = None) -> None:
        """Appends tokens: [B, H, L, d] and [B, H, L, dv], or [sum L, H, d(v)] with offsets of the sequences.

        Raises:
            ShapeError, DtypeError: They don't fit, or don't find room.
        """
        self.append_checked(self.checked(k, v, cu_seqlens))

    def checked(self, k: Any, v: Any, cu_seqlens: Any) -> New:
        """The arguments of `append`, checked against the cache and its room."""
        cache, batch = self.cache, len(self.sequences)
        packed = cu_seqlens is not None
        wanted = f"[sum L, {cache.heads}, d]" if packed else f"[{batch}, {cache.heads}, L, d]"
        shape_k, shape_v = (axes_of(x, name, 3 if packed else 4, wanted) for x, name in ((k, "k"), (v, "v")))
        for shape, name, dim in ((shape_k, "k", cache.dim), (shape_v, "v", cache.dim_v)):
            if shape[1] != cache.heads or shape[-1] != dim or not (packed or shape[0] == batch):
                wanted = f"[sum L, {cache.heads}, {dim}]" if packed else f"[{batch}, {cache.heads}, L, {dim}]"
                raise ShapeError(f"{name} has shape {list(shape)}: kv_cache takes {wanted}")
        if shape_k[:-1] != shape_v[:-1]:
            raise ShapeError(f"v has shape {list(shape_v)} and k {list(shape_k)}: all axes but the last must agree")
        if packed:
            starts = starts_of(cu_seqlens, "cu_seqlens", shape_k[0])
            if len(starts) != batch + 1:
                raise ShapeError(f"cu_seqlens has {len(starts) - 1} sequences: kv_cache has {batch}")
            first, counts = starts[:-1], np.diff(starts)
        else:
            first, counts = np.zeros(batch, np.int64), np.full(batch, shape_k[2], np.int64)
        over = np.flatnonzero(self.lengths + counts > cache.capacity)
        if len(over):
            b = int(over[0])
            raise ShapeError(
                f"k has {counts[b]} tokens for sequence {b}, which has {self.lengths[b]} of a capacity of "
                f"{cache.capacity}: make a KVCache of a larger capacity"
            )
        new_k = padded(operand(k, "k"), cpu.channels(cache.dim))
        new_v = padded(operand(v, "v"), cpu.channels(cache.dim_v))
        return New(new_k, new_v, first, counts, packed)

    def append_checked(self, new: New) -> None:
        """Appends what `checked` gave."""
        layer = self.cache.layers[self.layer]
        lengths = self.lengths
        layer.reserve(self.cache, int((lengths + new.counts).max(initial=0)) // BLOCK_N)
        table = self._table(layer, new.counts)
        table["k_at"] = cpu.first_of(new.k, new.first, new.packed)
        table["v_at"] = cpu.first_of(new.v, new.first, new.packed)
        _core.cache_append(
            **self._description(),
            k=cpu.rows_of(new.k, new.packed),
            v=cpu.rows_of(new.v, new.packed),
            sequences=address(table),
            batch=len(table),
        )
        layer.lengths[self.sequences] = lengths + new.counts

    def crop_to(self, length: int) -> None:
        """As `KVCache.crop`, of this view, checked."""
        layer = self.cache.layers[self.layer]
        kept = np.minimum(self.lengths, length)
        table = self._table(layer, kept)
        _core.cache_reopen(**self._description(), sequences=address(table), batch=len(table))
        layer.lengths[self.sequences] = kept

    def place(self, table: npt.NDArray[Any]) -> tuple[dict[str, Any], npt.NDArray[np.uint8]]:
        """Enters where the sequences' blocks are into the CPU kernels' table.

        Returns:
            Their layouts, and the sealed blocks' array, to be held until the kernels are done: a cache that grows lets
            go of it.
        """
        layer = self.cache.layers[self.layer]
        sealed = layer.sealed
        table["sealed"] = address(sealed) + self.sequences * sealed.strides[0]
        table["open"] = address(layer.open) + self.sequences * layer.open.strides[0]
        table["sealed_stride"] = sealed.strides[1]
        table["open_stride"] = layer.open.strides[1]
        if layer.sink is not None:
            table["sink"] = address(layer.sink) + self.sequences * layer.sink.strides[0]
        return {"sealed": self.cache.sealed_layout, "open": self.cache.open_layout}, sealed

    def _table(self, layer: _Layer, counts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        table = np.zeros(len(self.sequences), _CACHED)
        self.place(table)
        table["length"] = layer.lengths[self.sequences]
        table["count"] = counts
        return table

    def _description(self) -> dict[str, Any]:
        cache = self.cache
        return {
            "sealed": cache.sealed_layout,
            "open": cache.open_layout,
            "heads": cache.heads,
            "smoothing": cpu.SMOOTHINGS[cache.smooth],
        }


def view_of(cache: Any) -> CacheView:
    """A view of all sequences of a cache of one layer; a view as it is.

    Raises:
        DtypeError, OptionError: No cache, or one of several layers.
    """
    if isinstance(cache, CacheView):
        return cache
    if not isinstance(cache, KVCache):
        raise DtypeError(f"kv_cache is a {type(cache).__name__}: pass a KVCache, or a view of one")
    if len(cache.layers) != 1:
        raise OptionError(f"kv_cache has {len(cache.layers)} layers: pass kv_cache.view(layer)")
    return cache.view()
