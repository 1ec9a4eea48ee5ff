"""What an adapter of a library provides, and helpers that several of them share.

Adapters are imported by worker processes whose environment may lack tilefuse: nothing here or in `weights` needs more
than NumPy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from peers.weights import Case

Array = npt.NDArray[Any]

CACHE_MULTIPLE = 4
"""Going round and round through twice the cache still finds much of it there: caches don't replace strictly by age."""

MANY_ROWS = 64
"""From here on arithmetic bounds a product, and two copies of the weights do."""


@dataclass(frozen=True)
class Contender:
    """One way to multiply by quantised weights.

    Attributes:
        name: Shown in tables; unique among all libraries.
        weights: What the weights are, e.g. ``"W4 g128, zero points"``.
        bits: Of a weight's code; 16 where the weights are dense.
        activations: Bits of the activations as they are multiplied: 16 (or more), or 8 where they are quantised.
        level: Instruction set that it is limited to, or "" where it takes the best of the machine.
        ours: Whether it is tilefuse.
        note: How it was called.
    """

    name: str
    weights: str
    bits: int
    activations: int
    level: str = ""
    ours: bool = False
    note: str = ""


@dataclass(frozen=True)
class Bound:
    """A product with its activations in place, ready to be timed.

    Attributes:
        calls: Called in turn. Each uses the copies of the weights after those of the one before.
        products: Products that one call computes: more than 1 where copies share a graph, so that the cost of calling
            one is spread.
        output: y [M, N] of the first copy of the weights, as float64.
    """

    calls: Sequence[Callable[[], object]]
    output: Callable[[], Array]
    products: int = 1


class Product(ABC):
    """A contender with a case's weights.

    Attributes:
        weight_bytes: Bytes of weights, scales and zero points that one product reads.
    """

    weight_bytes: int

    @abstractmethod
    def bind(self, x: Array) -> Bound:
        """Takes x [M, K], float32 whose values bfloat16 holds."""

    @abstractmethod
    def dequantized(self, channels: Array) -> Array:
        """Its own weights of these output channels, float64 [len(channels), K]."""


class Adapter(ABC):
    """A library."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the library and of what it stands on."""

    @abstractmethod
    def contenders(self) -> list[Contender]:
        """What it has."""

    @abstractmethod
    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        """The contender on the weights of ``case``, in copies that exceed `CACHE_MULTIPLE` times ``cache_bytes``."""


def copies_beyond_cache(weight_bytes: int, cache_bytes: int) -> int:
    """How many distinct copies of the weights take more than `CACHE_MULTIPLE` times the cache, and at least two."""
    return max(2, CACHE_MULTIPLE * cache_bytes // weight_bytes + 1)


def bf16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """float32 values as bfloat16, to nearest even, as bits. NaN is not expected."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return rounded


def bf16_values(bits: Array) -> npt.NDArray[np.float32]:
    """bfloat16, given as bits, as float32."""
    values: npt.NDArray[np.float32] = (bits.astype(np.uint32) << 16).view(np.float32)
    return values


def round_bf16(values: Array) -> npt.NDArray[np.float32]:
    """float32 values rounded to what bfloat16 holds."""
    return bf16_values(bf16_bits(values))


def nibbles(codes: Array) -> npt.NDArray[np.uint8]:
    """uint8 codes [..., 2 c] of 4 bits as bytes [..., c], the first of two in the low half."""
    packed: npt.NDArray[np.uint8] = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return packed
