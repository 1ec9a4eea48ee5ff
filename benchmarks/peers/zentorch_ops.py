"""zentorch (AMD's extension of torch): 4-bit weights with bfloat16 or int8 activations, 8-bit ones, dense bfloat16."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import torch
import zentorch  # noqa: F401  (registers torch.ops.zentorch)

from peers.base import Adapter, Array, Contender, Product
from peers.torch_aten import Operator, bf16, float64, set_threads
from peers.weights import Case, Codes

W4A16 = Contender("zentorch W4A16", "W4 g128, zero points", 4, 16, note="zentorch_woq_linear")
DA8W4 = Contender("zentorch DA8W4", "W4 g128, symmetric", 4, 8, note="zentorch_dynamic_qlinear, codes less 8")
DA8W8 = Contender("zentorch DA8W8", "W8, symmetric, a scale an output channel", 8, 8, note="zentorch_dynamic_qlinear")
DENSE = Contender("zentorch bf16", "dense bfloat16", 16, 16, note="zentorch_linear_unary on prepacked weights")


def signed(codes: Array) -> Any:
    """Codes as an int8 tensor."""
    return torch.from_numpy(np.ascontiguousarray(codes).view(np.int8))


def asymmetric(codes: Codes, cache_bytes: int) -> Product:
    """Unsigned codes and zero points; its packed words lie along K and are passed transposed."""

    def operands(copy: int) -> list[Any]:
        part = codes.rolled(copy)
        packed = torch.ops.zentorch.zentorch_woq_repack_weight(signed(part.codes))
        return [packed.t(), bf16(part.scales.T), signed(part.zeros.T)]

    return Operator(
        torch.ops.zentorch.zentorch_woq_linear,
        operands,
        codes.n * codes.k // 2 + codes.scales.size * 3,
        cache_bytes,
        lambda channels: codes.dequantized(channels).astype(np.float64),
    )


def centred(codes: Codes) -> Codes:
    """The same codes and scales with a zero point of 8: what symmetric formats can hold of them."""
    return Codes(codes.bits, codes.group, codes.codes, codes.scales, np.full_like(codes.zeros, 8))


def dynamic4(codes: Codes, cache_bytes: int) -> Product:
    """Symmetric 4-bit codes; float32 scales [G, N]."""

    def operands(copy: int) -> list[Any]:
        part = codes.rolled(copy)
        packed = torch.ops.zentorch.zentorch_woq_repack_weight(signed(part.codes.view(np.int8) - 8))
        return [packed, torch.from_numpy(np.ascontiguousarray(part.scales.T))]

    return Operator(
        torch.ops.zentorch.zentorch_dynamic_qlinear,
        operands,
        codes.n * codes.k // 2 + codes.scales.size * 4,
        cache_bytes,
        lambda channels: centred(codes).dequantized(channels).astype(np.float64),
    )


def dynamic8(codes: Codes, cache_bytes: int) -> Product:
    """Symmetric 8-bit codes; float32 scales [N]. Not prepacked: that gives wrong results in 2.13.0.2."""

    def operands(copy: int) -> list[Any]:
        part = codes.rolled(copy)
        return [signed(part.codes ^ 0x80), torch.from_numpy(np.ascontiguousarray(part.scales[:, 0]))]

    return Operator(
        torch.ops.zentorch.zentorch_dynamic_qlinear,
        operands,
        codes.n * codes.k + codes.n * 4,
        cache_bytes,
        lambda channels: codes.dequantized(channels).astype(np.float64),
    )


def dense(codes: Codes, cache_bytes: int) -> Product:
    """The weights that the codes stand for, rounded to bfloat16."""

    def operands(copy: int) -> list[Any]:
        weights = bf16(codes.rolled(copy).dequantized())
        return [torch.ops.zentorch.zentorch_weight_prepack_for_linear(weights)]

    return Operator(
        lambda x, w: torch.ops.zentorch.zentorch_linear_unary(x, w, is_weight_prepacked=True),
        operands,
        codes.n * codes.k * 2,
        cache_bytes,
        lambda channels: float64(bf16(codes.dequantized(channels))),
    )


class Zentorch(Adapter):
    """zentorch at its defaults."""

    def versions(self) -> dict[str, str]:
        return {"zentorch": importlib.metadata.version("zentorch"), "torch": torch.__version__}

    def contenders(self) -> list[Contender]:
        return [W4A16, DA8W4, DA8W8, DENSE]

    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        if contender == W4A16:
            return asymmetric(case.schemes["w4g128"], cache_bytes)
        if contender == DA8W4:
            return dynamic4(case.schemes["w4g128"], cache_bytes)
        if contender == DA8W8:
            return dynamic8(case.schemes["w8"], cache_bytes)
        return dense(case.schemes["w4g128"], cache_bytes)


def adapter() -> Adapter:
    """The adapter of this module."""
    set_threads()
    torch.set_grad_enabled(False)
    return Zentorch()
