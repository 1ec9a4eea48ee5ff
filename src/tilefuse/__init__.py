"""Quantised linear layers straight from packed 4- and 8-bit weights, on AMD XDNA2 NPUs and any CPU."""

from tilefuse import errors, routing
from tilefuse.formats import Checkpoint, LinearInfo, open_checkpoint
from tilefuse.layout import Layout, ZeroKind
from tilefuse.ops import gemm, gemv, linear, linear_many
from tilefuse.packed import PackedLinear, pack, packed_nbytes, unpack
from tilefuse.quantize import quantize_linear
from tilefuse.quantized import CodeOrder, QuantizedLinear
from tilefuse.runtime import default_device, get_num_threads, set_default_device, set_num_threads
from tilefuse.storage import load, save
from tilefuse.tilemix.cache import KVCache
from tilefuse.tilemix.call import attention
from tilefuse.tilemix.spec import QuantSpec

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "CodeOrder",
    "KVCache",
    "Layout",
    "LinearInfo",
    "PackedLinear",
    "QuantSpec",
    "QuantizedLinear",
    "ZeroKind",
    "__version__",
    "attention",
    "default_device",
    "errors",
    "gemm",
    "gemv",
    "get_num_threads",
    "linear",
    "linear_many",
    "load",
    "open_checkpoint",
    "pack",
    "packed_nbytes",
    "quantize_linear",
    "routing",
    "save",
    "set_default_device",
    "set_num_threads",
    "unpack",
]
