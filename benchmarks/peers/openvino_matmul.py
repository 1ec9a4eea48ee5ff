"""OpenVINO: 4-bit weights as it compresses them, with its dynamic quantisation of activations on and off."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as op

from peers.base import MANY_ROWS, Adapter, Array, Bound, Contender, Product, copies_beyond_cache, nibbles
from peers.weights import Case, Codes

A8 = Contender(
    "openvino W4 int8",
    "W4 g128, zero points",
    4,
    8,
    note="MatMul on decompressed u4, dynamic quantisation in groups of 128, all copies in one model",
)
A16 = Contender(
    "openvino W4 bf16",
    "W4 g128, zero points",
    4,
    16,
    note="the same without dynamic quantisation, inference precision bf16",
)


def packed(values: Array, shape: list[int]) -> Any:
    """A u4 constant of that shape, from uint8 values."""
    tensor = ov.Tensor(ov.Type.u4, shape)
    tensor.data[:] = nibbles(np.ascontiguousarray(values).reshape(-1)).reshape(tensor.data.shape)
    return op.constant(tensor)


def weights_of(codes: Codes, copy: int) -> Any:
    """The chain that OpenVINO recognises as compressed weights [N, K]."""
    part = codes.rolled(copy)
    n, g = part.scales.shape
    values = op.convert(packed(part.codes, [n, g, part.group]), np.float16)
    zeros = op.convert(packed(part.zeros, [n, g, 1]), np.float16)
    scales = op.constant(part.scales.astype(np.float16).reshape(n, g, 1))
    scaled = op.multiply(op.subtract(values, zeros), scales)
    return op.convert(op.reshape(scaled, op.constant(np.array([n, part.k])), special_zero=False), np.float32)


def compile_model(codes: Codes, copies: int, activations: int) -> Any:
    """x [M, K] times each copy."""
    x = op.parameter([-1, codes.k], np.float32, name="x")
    results = [op.matmul(x, weights_of(codes, copy), False, True) for copy in range(copies)]
    config = {
        "INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"]),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128 if activations == 8 else 0,
    }
    return ov.Core().compile_model(ov.Model(results, [x]), "CPU", config)


class Compressed(Product):
    """Models with all copies, and with two of them where arithmetic bounds the product."""

    def __init__(self, codes: Codes, cache_bytes: int, activations: int) -> None:
        self._codes, self._activations = codes, activations
        self.weight_bytes = codes.n * codes.k // 2 + codes.scales.size * 2 + codes.zeros.size // 2
        self._copies = copies_beyond_cache(self.weight_bytes, cache_bytes)
        self._models: dict[int, Any] = {}

    def bind(self, x: Array) -> Bound:
        copies = 2 if len(x) >= MANY_ROWS else self._copies
        if copies not in self._models:
            self._models = {copies: compile_model(self._codes, copies, self._activations)}
        request = self._models[copies].create_infer_request()
        request.set_input_tensor(ov.Tensor(x))

        def call() -> object:
            return request.infer(share_inputs=True, share_outputs=True)

        return Bound([call], lambda: request.get_output_tensor(0).data.astype(np.float64), products=copies)

    def dequantized(self, channels: Array) -> Array:
        return self._codes.dequantized(channels).astype(np.float64)


class OpenVino(Adapter):
    """The CPU plugin."""

    def versions(self) -> dict[str, str]:
        return {"openvino": ov.__version__.split("-")[0]}

    def contenders(self) -> list[Contender]:
        return [A8, A16]

    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        return Compressed(case.schemes["w4g128"], cache_bytes, contender.activations)


def adapter() -> Adapter:
    """The adapter of this module."""
    return OpenVino()
