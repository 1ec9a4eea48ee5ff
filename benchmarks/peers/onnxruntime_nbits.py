"""ONNX Runtime: MatMulNBits with accuracy_level 4, which quantises activations to 8 bits. All copies in one graph."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from peers.base import MANY_ROWS, Adapter, Array, Bound, Contender, Product, copies_beyond_cache, nibbles
from peers.weights import Case, Codes

NOTE = "MatMulNBits, accuracy_level 4, float32 in and out, all copies in one graph"
W4 = Contender("onnxruntime W4", "W4 g128, zero points", 4, 8, note=NOTE)
W8 = Contender("onnxruntime W8", "W8 g128, symmetric", 8, 8, note=NOTE)


def initializers(codes: Codes, copy: int) -> list[Any]:
    """A copy's B [N, G, bytes], scales and, for 4 bits, zero points."""
    part = codes.rolled(copy)
    n, g = part.scales.shape
    blob = part.codes.reshape(n, g, part.group)
    arrays = [nibbles(blob) if part.bits == 4 else blob, part.scales.reshape(-1)]
    if part.bits == 4:
        arrays.append(nibbles(np.pad(part.zeros, ((0, 0), (0, g % 2)))).reshape(-1))
    names = ("b", "s", "z")
    return [
        numpy_helper.from_array(np.ascontiguousarray(a), f"{name}{copy}")
        for name, a in zip(names, arrays, strict=False)
    ]


def make_session(codes: Codes, copies: int) -> Any:
    """A graph of x [M, K] times each copy."""
    made = [initializers(codes, copy) for copy in range(copies)]
    nodes = [
        helper.make_node(
            "MatMulNBits",
            ["x", *(each.name for each in operands)],
            [f"y{copy}"],
            domain="com.microsoft",
            K=codes.k,
            N=codes.n,
            bits=codes.bits,
            block_size=codes.group,
            accuracy_level=4,
        )
        for copy, operands in enumerate(made)
    ]
    graph = helper.make_graph(
        nodes,
        "copies",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", codes.k])],
        [helper.make_tensor_value_info(f"y{copy}", TensorProto.FLOAT, ["m", codes.n]) for copy in range(copies)],
        [each for operands in made for each in operands],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    onnx.checker.check_model(model, full_check=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ["OMP_NUM_THREADS"])
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Nbits(Product):
    """Sessions with all copies, and with two of them where arithmetic bounds the product."""

    def __init__(self, codes: Codes, cache_bytes: int) -> None:
        self._codes = codes
        self.weight_bytes = codes.n * codes.k * codes.bits // 8 + codes.scales.size * 4
        if codes.bits == 4:
            self.weight_bytes += codes.zeros.size // 2
        self._copies = copies_beyond_cache(self.weight_bytes, cache_bytes)
        self._sessions: dict[int, Any] = {}

    def bind(self, x: Array) -> Bound:
        copies = 2 if len(x) >= MANY_ROWS else self._copies
        if copies not in self._sessions:
            self._sessions = {copies: make_session(self._codes, copies)}
        session = self._sessions[copies]
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
        outputs = [
            onnxruntime.OrtValue.ortvalue_from_shape_and_type([len(x), self._codes.n], np.float32)
            for _ in range(copies)
        ]
        for copy, value in enumerate(outputs):
            binding.bind_ortvalue_output(f"y{copy}", value)

        def call() -> object:
            return session.run_with_iobinding(binding)

        return Bound([call], lambda: outputs[0].numpy().astype(np.float64), products=copies)

    def dequantized(self, channels: Array) -> Array:
        return self._codes.dequantized(channels).astype(np.float64)


class OnnxRuntime(Adapter):
    """The CPU execution provider."""

    def versions(self) -> dict[str, str]:
        return {"onnxruntime": onnxruntime.__version__}

    def contenders(self) -> list[Contender]:
        return [W4, W8]

    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        return Nbits(case.schemes["w4g128" if contender == W4 else "w8g128"], cache_bytes)


def adapter() -> Adapter:
    """The adapter of this module."""
    return OnnxRuntime()
