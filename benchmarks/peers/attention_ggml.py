"""Flash attention of llama.cpp's and ik_llama.cpp's ggml, on keys and values in the types that a cache holds."""

from __future__ import annotations

import os
from ctypes import c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np

from peers.attention import Attention, AttentionAdapter, Ready
from peers.base import Array, Contender, bf16_bits
from peers.ggml_graph import BLOCK, F32, Q8_0, Ggml, find_libraries

F16, BF16 = 1, 30

MASK_ROWS = 64
"""The mask's rows are a multiple of this."""

SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_new_tensor_3d": (c_void_p, [c_void_p, c_int, c_int64, c_int64, c_int64]),
    "ggml_flash_attn_ext": (c_void_p, [*[c_void_p] * 5, c_float, c_float, c_float]),
    "ggml_nbytes": (c_size_t, [c_void_p]),
}

TYPES = {"q8_0": (Q8_0, 8), "bf16": (BF16, 16), "f16": (F16, 16)}


class Graph:
    """One attention, in a graph of its own."""

    def __init__(self, ggml: Ggml, kind: int, case: Attention) -> None:
        self._ggml = ggml
        heads, queries, d = case.q.shape
        kv_heads, keys, dv = case.v.shape
        self._shape = (queries, heads, dv)
        self._context = ggml.context(16)
        q = ggml.new_tensor_3d(self._context, F32, d, queries, heads)
        k, v = (ggml.new_tensor_3d(self._context, kind, d, keys, kv_heads) for _ in range(2))
        rows = -(-queries // MASK_ROWS) * MASK_ROWS
        mask = ggml.new_tensor_2d(self._context, F16, keys, rows)
        self._out = ggml.flash_attn_ext(self._context, q, k, v, mask, float(d) ** -0.5, 0.0, 0.0)
        self._graph = ggml.new_graph_custom(self._context, 32, False)
        ggml.build_forward_expand(self._graph, self._out)
        self._buffer = ggml.backend_alloc_ctx_tensors_from_buft(self._context, ggml.backend_cpu_buffer_type())
        if not self._buffer:
            raise MemoryError("ggml could not allocate the operands")
        hidden = np.arange(keys) > np.arange(rows)[:, None] + (keys - queries)
        self._set(mask, np.where(hidden, np.float16(-np.inf), np.float16(0)))
        self._set(q, case.q)
        self._set(k, self._stored(kind, case.k))
        self._set(v, self._stored(kind, case.v))

    def _stored(self, kind: int, values: Array) -> Array:
        if kind in BLOCK:
            return self._ggml.quantized(kind, values.reshape(-1, values.shape[-1]))
        return bf16_bits(values) if kind == BF16 else values.astype(np.float16)

    def _set(self, tensor: Any, values: Array) -> None:
        data = np.ascontiguousarray(values)
        if data.nbytes != self._ggml.nbytes(tensor):
            raise ValueError(f"{data.nbytes} bytes for a tensor of {self._ggml.nbytes(tensor)}")
        self._ggml.backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    def call(self) -> object:
        """Computes it; RuntimeError where ggml says that it failed."""
        status = self._ggml.backend_graph_compute(self._ggml.backend, self._graph)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return status

    def output(self) -> Array:
        """[Hq, Lq, d]."""
        self.call()
        out = np.empty(self._shape, np.float32)
        self._ggml.backend_tensor_get(self._out, out.ctypes.data, 0, out.nbytes)
        return np.swapaxes(out, 0, 1)

    def __del__(self) -> None:
        self._ggml.backend_buffer_free(self._buffer)
        self._ggml.free(self._context)


class GgmlAttention(AttentionAdapter):
    """One build: "llama" or "ik"."""

    def __init__(self, variant: str) -> None:
        libraries, self._versions = find_libraries(variant)
        self._ggml = Ggml(libraries, int(os.environ["OMP_NUM_THREADS"]), repack=False, more=SIGNATURES)
        name, types = ("ik_llama.cpp", ("q8_0", "bf16")) if variant == "ik" else ("llama.cpp", ("f16",))
        self._types = {f"{name} {each}": TYPES[each] for each in types}

    def versions(self) -> dict[str, str]:
        return self._versions

    def contenders(self) -> list[Contender]:
        note = "ggml_flash_attn_ext, keys and values stored before"
        return [
            Contender(name, name.rpartition(" ")[2], bits, bits, note=note) for name, (_, bits) in self._types.items()
        ]

    def load(self, contender: Contender, case: Attention) -> Ready:
        graph = Graph(self._ggml, self._types[contender.name][0], case)
        return Ready(graph.call, graph.output)


def adapter(variant: str) -> AttentionAdapter:
    """The adapter of a variant."""
    return GgmlAttention(variant)
