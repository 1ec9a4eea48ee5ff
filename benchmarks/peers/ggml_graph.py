"""llama.cpp's and ik_llama.cpp's ggml, called through ctypes: products of quantised weights, all copies in one graph.

Variants: "llama" and "ik", compiled for this CPU (`peers.install` puts them into the environment), and "llama-avx2" and
"ik-avx2", the AVX2 builds in the wheels of libggml-python and ik-llama-cpp-python.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import MANY_ROWS, Adapter, Array, Bound, Contender, Product, copies_beyond_cache
from peers.weights import Case, Codes

F32, Q4_0, Q8_0, Q4_K = 0, 2, 8, 12
Q4_0_R8, Q8_0_R8, Q4_K_R4, Q8_K_R8 = 202, 208, 212, 399  # ik_llama.cpp's, rows interleaved

BLOCK = {Q4_0: (32, 18), Q8_0: (32, 34), Q4_K: (256, 144), Q4_0_R8: (32, 18), Q8_0_R8: (32, 34), Q4_K_R4: (256, 144)}
"""Weights, and the bytes that they take."""

CHUNK = 64
"""Rows that one thread quantises at a time; a multiple of those that a type interleaves."""

PLAIN = {Q4_0_R8: Q4_0, Q8_0_R8: Q8_0, Q4_K_R4: Q4_K}
"""The type with the same values in plain order."""

WEIGHTS = {Q4_0: "Q4_0: W4 g32, symmetric", Q8_0: "Q8_0: W8 g32, symmetric", Q4_K: "Q4_K: W4 g32 with minima"}


class InitParams(ctypes.Structure):
    """``ggml_init_params``."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (c_void_p, [InitParams]),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor_2d": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "ggml_mul_mat": (c_void_p, [c_void_p, c_void_p, c_void_p]),
    "ggml_new_graph_custom": (c_void_p, [c_void_p, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_quantize_chunk": (c_size_t, [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, POINTER(c_float)]),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_alloc_ctx_tensors_from_buft": (c_void_p, [c_void_p, c_void_p]),
    "ggml_backend_buffer_free": (None, [c_void_p]),
    "ggml_backend_tensor_set": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [c_void_p, c_void_p, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
}

REPACKED: dict[str, tuple[Any, list[Any]]] = {
    "ggml_backend_reg_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_reg_dev_get": (c_void_p, [c_void_p, c_size_t]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_buft_name": (c_char_p, [c_void_p]),
}
"""llama.cpp's, which keeps weights in another order in buffers of a type of their own."""


class Ggml:
    """The functions of one build of ggml. OSError where a library or a function of it is missing."""

    def __init__(
        self,
        libraries: list[Path],
        threads: int,
        *,
        repack: bool,
        more: Mapping[str, tuple[Any, list[Any]]] | None = None,
    ) -> None:
        handles = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in libraries]
        for name, (result, arguments) in {**SIGNATURES, **(REPACKED if repack else {}), **(more or {})}.items():
            function = next((getattr(handle, name) for handle in handles if hasattr(handle, name)), None)
            if function is None:
                raise OSError(f"{libraries[-1]} has no {name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ggml_"), function)
        self._threads = threads
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, threads)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self, tensors: int) -> Any:
        """A context that describes tensors; their memory is apart."""
        return self.init(InitParams((tensors + 8) * 1024, None, True))

    def repacked(self) -> Any:
        """The type of buffers in which weights are reordered for this CPU.

        Raises:
            OSError: There is none.
        """
        registry = self.backend_reg_by_name(b"CPU")
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            raise OSError("this ggml reorders no weights")
        types = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.backend_reg_dev_get(registry, 0))
        for each in types:
            if each is None:
                break
            if b"REPACK" in self.backend_buft_name(each):
                return each
        raise OSError("this ggml reorders no weights")

    def quantized(self, kind: int, weights: Array) -> Array:
        """float32 [N, K] in that type, as bytes [N, ...]."""
        values = np.ascontiguousarray(weights, np.float32)
        n, k = values.shape
        per, size = BLOCK[kind]
        out = np.empty((n, k // per * size), np.uint8)

        def chunk(first: int) -> None:
            part, into = values[first : first + CHUNK], out[first : first + CHUNK]
            self.quantize_chunk(kind, part.ctypes.data, into.ctypes.data, 0, len(part), k, None)

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(chunk, range(0, n, CHUNK)))
        return out


def dequantized(kind: int, data: Array, k: int) -> Array:
    """Bytes of a plain type as float64 [N, K], from the formats' definitions."""
    _, size = BLOCK[kind]
    blocks = data.reshape(-1, size)

    def halves(first: int) -> Array:
        found: Array = np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(np.float64)
        return found

    if kind == Q8_0:
        values = halves(0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    elif kind == Q4_0:
        codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float64)
        values = halves(0) * (codes - 8)
    else:
        packed = blocks[:, 4:16].astype(np.int64)  # 6 bits a scale and a minimum, of 8 blocks of 32
        low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
        scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1) * halves(0)
        minima = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1) * halves(2)
        runs = blocks[:, 16:].reshape(-1, 4, 32)  # each holds two blocks, the first in the low halves
        codes = np.stack([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)
        values = codes * scales[:, :, None] - minima[:, :, None]
    return values.reshape(-1, k)


class Graphs(Product):
    """Weights in a buffer, and graphs of x times each copy of them."""

    def __init__(
        self, ggml: Ggml, kind: int, codes: Codes, cache_bytes: int, quantized: list[Array], *, repack: bool
    ) -> None:
        self._ggml, self._kind, self._codes = ggml, kind, codes
        per, size = BLOCK[kind]
        self.weight_bytes = codes.n * codes.k // per * size
        copies = copies_beyond_cache(self.weight_bytes, cache_bytes)
        self._context = ggml.context(copies)
        self._weights = [ggml.new_tensor_2d(self._context, kind, codes.k, codes.n) for _ in range(copies)]
        where = ggml.repacked() if repack else ggml.backend_cpu_buffer_type()
        self._buffer = ggml.backend_alloc_ctx_tensors_from_buft(self._context, where)
        if not self._buffer:
            raise MemoryError("ggml could not allocate the weights")
        if not quantized:
            quantized.append(ggml.quantized(kind, codes.dequantized()))
        data = quantized[0].reshape(codes.n // 8, -1)
        for copy, tensor in enumerate(self._weights):
            rolled = np.ascontiguousarray(np.roll(data, copy, axis=0))  # rows are interleaved by 8 at most
            ggml.backend_tensor_set(tensor, rolled.ctypes.data, 0, rolled.nbytes)
        self._bound: list[tuple[Any, Any]] = []

    def bind(self, x: Array) -> Bound:
        ggml, m = self._ggml, len(x)
        weights = self._weights[: 2 if m >= MANY_ROWS else None]
        self._drop_graphs()
        context = ggml.context(4 * len(weights) + 64)
        inputs = ggml.new_tensor_2d(context, F32, self._codes.k, m)
        outputs = [ggml.mul_mat(context, each, inputs) for each in weights]
        graph = ggml.new_graph_custom(context, 2 * len(weights) + 16, False)
        for each in outputs:
            ggml.build_forward_expand(graph, each)
        buffer = ggml.backend_alloc_ctx_tensors_from_buft(context, ggml.backend_cpu_buffer_type())
        self._bound.append((context, buffer))
        ggml.backend_tensor_set(inputs, x.ctypes.data, 0, x.nbytes)

        def call() -> object:
            status = ggml.backend_graph_compute(ggml.backend, graph)
            if status:
                raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
            return status

        def output() -> Array:
            y = np.empty((m, self._codes.n), np.float32)
            ggml.backend_tensor_get(outputs[0], y.ctypes.data, 0, y.nbytes)
            return y.astype(np.float64)

        return Bound([call], output, products=len(weights))

    def dequantized(self, channels: Array) -> Array:
        plain = PLAIN.get(self._kind, self._kind)
        return dequantized(plain, self._ggml.quantized(plain, self._codes.dequantized(channels)), self._codes.k)

    def _drop_graphs(self) -> None:
        for context, buffer in self._bound:
            self._ggml.backend_buffer_free(buffer)
            self._ggml.free(context)
        self._bound.clear()

    def __del__(self) -> None:
        self._drop_graphs()
        self._ggml.backend_buffer_free(self._buffer)
        self._ggml.free(self._context)


@dataclass(frozen=True)
class Kind:
    """A type of weights, and whether llama.cpp reorders it."""

    type: int
    repack: bool = False


class GgmlAdapter(Adapter):
    """One build."""

    def __init__(self, variant: str) -> None:
        self._level = "avx2" if variant.endswith("-avx2") else ""
        self._ik = variant.startswith("ik")
        libraries, self._versions = find_libraries(variant)
        self._ggml = Ggml(libraries, int(os.environ["OMP_NUM_THREADS"]), repack=not self._ik)
        name = "ik_llama.cpp" if self._ik else "llama.cpp"
        types = (
            {"Q4_0_R8": Kind(Q4_0_R8), "Q4_K_R4": Kind(Q4_K_R4), "Q8_0_R8": Kind(Q8_0_R8)}
            if self._ik
            else {"Q4_0": Kind(Q4_0, True), "Q4_K": Kind(Q4_K), "Q4_K repacked": Kind(Q4_K, True), "Q8_0": Kind(Q8_0)}
        )
        if self._level:
            types = {label: kind for label, kind in types.items() if kind.type in (Q4_0, Q4_K, Q4_0_R8, Q4_K_R4)}
        self._kept: tuple[Case, int, list[Array]] | None = None  # one type's weights: quantising takes long
        suffix = f" {self._level}" if self._level else ""
        self._kinds = {f"{name} {label}{suffix}": kind for label, kind in types.items()}

    def versions(self) -> dict[str, str]:
        return self._versions

    def contenders(self) -> list[Contender]:
        found = []
        for name, kind in self._kinds.items():
            weights = WEIGHTS[PLAIN.get(kind.type, kind.type)]
            note = "ggml_mul_mat on weights that ggml quantised, all copies in one graph"
            found.append(Contender(name, weights, 8 if "W8" in weights else 4, 8, self._level, note=note))
        return found

    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        kind = self._kinds[contender.name]
        scheme = case.schemes["w8g128" if contender.bits == 8 else "w4g128"]
        if self._kept is None or self._kept[0] is not case or self._kept[1] != kind.type:
            self._kept = (case, kind.type, [])
        return Graphs(self._ggml, kind.type, scheme, cache_bytes, self._kept[2], repack=kind.repack)


def find_libraries(variant: str) -> tuple[list[Path], dict[str, str]]:
    """The libraries of a variant, in the order to load them, and whose they are; ImportError where they are missing."""
    if variant == "ik-avx2":
        spec = importlib.util.find_spec("ik_llama_cpp")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("no package ik_llama_cpp")
        folder = Path(spec.submodule_search_locations[0]) / "lib"
        version = {"ik-llama-cpp-python": importlib.metadata.version("ik-llama-cpp-python")}
    else:
        folder = Path(sys.prefix) / "ggml" / "lib"
        if not (folder / "version").exists():
            raise ImportError("no ggml in this environment")
        name, _, number = (folder / "version").read_text().strip().partition("==")
        version = {name: number}
    names = ["libggml.so"] if variant.startswith("ik") else ["libggml-base.so", "libggml-cpu.so", "libggml.so"]
    paths = [folder / name for name in names]
    if not all(path.exists() for path in paths):
        raise ImportError(f"{next(iter(version))} has no {names[0]}")
    return paths, version


def adapter(variant: str) -> Adapter:
    """The adapter of a variant."""
    return GgmlAdapter(variant)
