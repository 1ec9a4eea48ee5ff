"""Quantised linear layers straight from packed 4- and 8-bit weights, on AMD XDNA2 NPUs and any CPU."""

from tilefuse.layout import Layout, ZeroKind
from tilefuse.packed import PackedLinear, pack, packed_nbytes, unpack
from tilefuse.quantized import CodeOrder, QuantizedLinear

__version__ = "0.1.0"

__all__ = [
    "CodeOrder",
    "Layout",
    "PackedLinear",
    "QuantizedLinear",
    "ZeroKind",
    "__version__",
    "pack",
    "packed_nbytes",
    "unpack",
]
