"""bitsandbytes: NF4 with bfloat16 activations, by its AVX512_BF16 kernel."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import numpy as np
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu, quantize_4bit

from peers.base import Adapter, Array, Contender, Product
from peers.torch_aten import Operator, bf16, float64, set_threads
from peers.weights import Case, Codes

BLOCK = 128
NF4 = Contender(
    "bitsandbytes NF4", f"NF4, blocks of {BLOCK}, bfloat16 scales", 4, 16, note="gemv_4bit on weights packed for CPUs"
)


def quantized(weights: Array) -> tuple[Any, Any]:
    """Codes, two a byte with the first in the high half, and their state, of float32 weights [N, K]."""
    packed, state = quantize_4bit(bf16(weights), blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
    return packed, state


def nf4(codes: Codes, cache_bytes: int) -> Product:
    """The weights that the codes stand for, quantised again: NF4 has no other way in."""

    packed, state = _convert_weight_packed_for_cpu(*quantized(codes.dequantized()))

    def operands(copy: int) -> list[Any]:
        # Output channels are packed in blocks of 32.
        rolled = torch.roll(packed, 32 * copy, 0).clone(), torch.roll(state.absmax, 32 * copy, 1).contiguous()
        return [rolled[0], state.shape, rolled[1], state.code, state.blocksize]

    def dequantized(channels: Array) -> Array:
        packed, state = quantized(codes.dequantized(channels))
        pairs = packed.numpy().reshape(-1)
        values = np.stack([pairs >> 4, pairs & 15], axis=1)
        scales = float64(state.absmax.to(torch.bfloat16)).reshape(-1, 1)
        table = state.code.numpy().astype(np.float64)
        found: Array = (table[values].reshape(-1, BLOCK) * scales).reshape(len(channels), codes.k)
        return found

    return Operator(
        torch.ops.bitsandbytes.gemv_4bit,
        operands,
        codes.n * codes.k // 2 + codes.n * codes.k // BLOCK * 2,
        cache_bytes,
        dequantized,
    )


class BitsAndBytes(Adapter):
    """Its CPU backend."""

    def versions(self) -> dict[str, str]:
        return {"bitsandbytes": bitsandbytes.__version__, "torch": torch.__version__}

    def contenders(self) -> list[Contender]:
        return [NF4]

    def load(self, contender: Contender, case: Case, cache_bytes: int) -> Product:
        return nf4(case.schemes["w4g128"], cache_bytes)


def adapter() -> Adapter:
    """The adapter of this module."""
    set_threads()
    torch.set_grad_enabled(False)
    return BitsAndBytes()
