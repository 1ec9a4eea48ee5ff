"""torch's scaled_dot_product_attention on bfloat16, and zentorch's."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import numpy as np
import torch

from peers.attention import Attention, AttentionAdapter, Ready
from peers.base import Array, Contender
from peers.torch_aten import bf16, set_threads

TORCH = Contender("torch SDPA", "bfloat16", 16, 16, note="scaled_dot_product_attention, enable_gqa")
ZENTORCH = Contender("zentorch SDPA", "bfloat16", 16, 16, note="zentorch_sdpa")


class TorchAttention(AttentionAdapter):
    """torch's, or zentorch's."""

    def __init__(self, variant: str) -> None:
        self._zen = variant == "zentorch"
        if self._zen:
            importlib.import_module("zentorch")

    def versions(self) -> dict[str, str]:
        own = {"zentorch": importlib.metadata.version("zentorch")} if self._zen else {}
        return {**own, "torch": torch.__version__}

    def contenders(self) -> list[Contender]:
        return [ZENTORCH if self._zen else TORCH]

    def load(self, contender: Contender, case: Attention) -> Ready:
        q, k, v = (bf16(x)[None] for x in (case.q, case.k, case.v))
        one = case.q.shape[1] == 1  # sees all keys; is_causal would align it to the first
        if not one and q.shape[2] != k.shape[2]:
            raise ValueError("neither aligns a causal mask to the end of the keys")
        if self._zen:

            def call() -> Any:
                return torch.ops.zentorch.zentorch_sdpa(q, k, v, is_causal=not one)[0]

        else:

            def call() -> Any:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=not one, enable_gqa=True)

        def output() -> Array:
            found: Array = call()[0].to(torch.float32).numpy().astype(np.float64)
            return found

        return Ready(call, output)


def adapter(variant: str) -> AttentionAdapter:
    """The adapter of "torch" or "zentorch"."""
    made = TorchAttention(variant)
    set_threads()
    torch.set_grad_enabled(False)
    return made
