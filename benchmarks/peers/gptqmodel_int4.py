"""GPTQModel: its AVX512_BF16 kernel for 4-bit weights, compiled by `install` from the source distribution."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers.base import Adapter, Array, Contender, Product
from peers.torch_aten import Operator, set_threads
from peers.weights import Case, Codes

LIBRARY = "gptqmodel_int4_qzero_group_scaled_cpu"
W4 = Contender(
    "gptqmodel W4", "W4 g128, zero points", 4, 16, note="gemm_int4_qzero_group_scaled_cpu_forward, float32 scales"
)


def packed(codes: Array) -> Array:
    """uint8 codes [N, K] as the kernel reads them, [N, K / 2]: in blocks of 32 output channels, pairs of input
    channels after each other, channel i in the low half of a byte and i + 16 in the high one."""
    n, k = codes.shape
    blocks = codes.reshape(n // 32, 2, 16, k // 2, 2)
    bytes_ = blocks[:, 0] | (blocks[:, 1] << 4)
    return np.ascontiguousarray(bytes_.transpose(0, 2, 1, 3)).reshape(n, k // 2)


def int4(codes: Codes, cache_bytes: int) -> Product:
    """The codes as they are."""

    def operands(copy: int) -> list[Any]:
        part = codes.rolled(copy)
        arrays = packed(part.codes), np.ascontiguousarray(part.zeros.T), np.ascontiguousarray(part.scales.T)
        return [torch.from_numpy(array).clone() for array in arrays]

    product = getattr(torch.ops, LIBRARY).gemm_int4_qzero_group_scaled_cpu_forward
    group = codes.group
    return Operator(
        lambda x, weights, zeros, scales: product(x, weights, zeros, scales, group, None),
        operands,
        codes.n * codes.k // 2 + codes.scales.size * 5,
        cache_bytes,
        lambda channels: codes.dequantized(channels).astype(np.float64),
    )


class GptqModel(Adapter):
    """Its CPU kernel."""

    def versions(self) -> dict[str, str]:
        return {"gptqmodel": (library().parent / "version").read_text().strip(), "torch": torch.__version__}

    def contenders(self) -> list[Contender]:
        return [W4]

    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        return int4(case.schemes["w4g128"], cache_bytes)


def library() -> Path:
    """The compiled kernel."""
    return Path(sys.prefix) / "gptqmodel" / f"{LIBRARY}.so"


def adapter() -> Adapter:
    """The adapter of this module; OSError where the kernel was not compiled."""
    torch.ops.load_library(str(library()))
    set_threads()
    torch.set_grad_enabled(False)
    return GptqModel()
