"""Decoder blocks at one token, in one call of C++ in place of dozens of torch, which cost as much as the weights.

The modules stay what they are: a block's ``forward`` is replaced on the instance, and takes the short way only where
its result is the long way's, rounding by rounding: one token of one sequence, on the CPU, with a `DynamicCache` that
grows, no mask, no gradient, no hooks. Anything else goes through transformers' own code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from tilefuse import _core
from tilefuse.hf.linear import FusedLinear, FusedPart, TileFuseLinear
from tilefuse.hf.rooms import length_of, room_of
from tilefuse.runtime import is_direct_cpu
from tilefuse.runtime.cpu import native_call

BLOCKS: Mapping[str, bool] = {
    "transformers.models.gemma.modeling_gemma.GemmaDecoderLayer": True,
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer": False,
    "transformers.models.mistral.modeling_mistral.MistralDecoderLayer": False,
    "transformers.models.qwen2.modeling_qwen2.Qwen2DecoderLayer": False,
    "transformers.models.qwen3.modeling_qwen3.Qwen3DecoderLayer": False,
}
"""Blocks of the known shape -> whether their norms multiply by one plus the weight."""

_ACTIVATIONS = {"SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}
"""As in block_ops.h."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "cache",
        "cache_position",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)

ATTENTION = ("sdpa", "tilefuse")
"""Of one query, both are the same."""


def is_array(tensor: Any, dtype: torch.dtype) -> bool:
    """Whether C++ finds the elements of ``tensor``, all of ``dtype``, one after the other at its address."""
    return bool(
        isinstance(tensor, Tensor)
        and tensor.dtype is dtype
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.data_ptr()
    )


class BlockForward:
    """``forward`` of a block."""

    def __init__(self, block: nn.Module, plus_one: bool) -> None:
        self.block, self.plus_one = block, plus_one
        self._native: tuple[tuple[Any, ...], Any] | None = None
        attention, mlp = block.self_attn, block.mlp
        self.parts: tuple[Any, ...] = tuple(_parts(block))
        self.linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        self.norms = (block.input_layernorm, block.post_attention_layernorm)
        self.head_dim = attention.head_dim
        self.heads = attention.o_proj.in_features // self.head_dim
        self.kv_heads = self.heads // attention.num_key_value_groups
        self.head_norms = (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_native": None}

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not torch.compiler.is_compiling():
            y = self._step(hidden_states, kwargs)
            if y is not None:
                return y
        return type(self.block).forward(self.block, hidden_states, *args, **kwargs)

    def _step(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """The block's output for one token, or None where the long way has to be taken."""
        kind = DTYPES.get(x.dtype)
        cache: Any = given.get("cache")
        if cache is None:
            cache = given.get("past_key_values")
        attention = self.block.self_attn
        index = attention.layer_idx
        if (
            type(x) is not Tensor
            or kind is None
            or x.shape != (1, 1, self.linears[0].in_features)
            or x.device.type != "cpu"
            or not x.is_contiguous()
            or not x.data_ptr()
            or (torch.is_grad_enabled() and x.requires_grad)
            or given.get("attention_mask") is not None
            or not given.keys() <= _ARGUMENTS
            or type(cache) is not DynamicCache
            or index >= len(cache.layers)
            or self.block.training
            or torch.is_autocast_enabled("cpu")
            or attention.config._attn_implementation not in ATTENTION
        ):
            return None
        layer = cache.layers[index]
        length = length_of(layer, self.kv_heads, self.head_dim, x.dtype)
        if length < 0:
            return None
        phases = self.linears[0].phases
        device = phases.name(1)
        if not is_direct_cpu(device) or not self.as_built():
            return None
        positions = given.get("position_embeddings")
        if type(positions) is not tuple or len(positions) != 2:
            return None
        vectors: list[Any] = [norm.weight if norm is not None else None for norm in (*self.norms, *self.head_norms)]
        vectors += positions
        d, width = self.head_dim, x.shape[-1]
        for vector, size in zip(vectors, (width, width, d, d, d, d), strict=True):
            if vector is not None and (
                vector.numel() != size
                or not is_array(vector, x.dtype)
                or (torch.is_grad_enabled() and vector.requires_grad)
            ):
                return None
        native = self.native()
        room = room_of(layer, length)
        y = torch.empty_like(x)
        native.step(
            kind,
            x.data_ptr(),
            *[0 if vector is None else vector.data_ptr() for vector in vectors],
            room.keys.data_ptr(),
            room.values.data_ptr(),
            length,
            room.capacity,
            y.data_ptr(),
        )
        room.grow(layer, length + 1)
        phases.count(1, device, len(self.linears))
        return y

    def as_built(self) -> bool:
        """Whether no part was replaced, as adapters do, has another ``forward``, or is watched by a hook."""
        for children, name, part in self.parts:
            if (
                children.get(name) is not part
                or part._forward_hooks
                or part._forward_pre_hooks
                or "forward" in part.__dict__
            ):
                return False
        return True

    def native(self) -> Any:
        """The block as C++ holds it, of the layers that it has now."""
        layers = tuple(linear.layer for linear in self.linears)
        if self._native is not None and all(a is b for a, b in zip(self._native[0], layers, strict=True)):
            return self._native[1]
        attention = self.block.self_attn
        native = _core.DecoderBlock(
            native_call(layers[0]),
            native_call(layers[1]),
            native_call(layers[2]),
            native_call(layers[3]),
            self.heads,
            self.kv_heads,
            self.head_dim,
            attention.scaling,
            [epsilon(norm) for norm in (*self.norms, *self.head_norms)],
            self.plus_one,
            _ACTIVATIONS[type(self.block.mlp.act_fn).__name__],
        )
        self._native = layers, native
        return native


def epsilon(norm: nn.Module | None) -> float:
    """What a norm adds to the variance; 0 for none."""
    if norm is None:
        return 0.0
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


def _parts(block: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Module]]:
    """What the short way stands for: where each module is held, its name there, and itself."""
    for parent in (block, block.self_attn, block.mlp):
        for name, part in parent._modules.items():
            if part is not None:
                yield parent._modules, name, part


def install(model: nn.Module) -> int:
    """Gives the blocks of a model that have the known shape the short way; returns how many.

    Args:
        model: A model whose packed layers are in their places.
    """
    count = 0
    for block in model.modules():
        kind = f"{type(block).__module__}.{type(block).__qualname__}"
        if kind in BLOCKS and _fits(block):
            block.forward = BlockForward(block, BLOCKS[kind])
            count += 1
    return count


def _fits(block: nn.Module) -> bool:
    attention, mlp = block.self_attn, block.mlp
    fused = (getattr(attention, "qkv_proj", None), getattr(mlp, "gate_up_proj", None))
    whole = (attention.o_proj, mlp.down_proj)
    parts = (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj)
    return (
        all(type(module) is FusedLinear for module in fused)
        and all(type(module) is TileFuseLinear for module in whole)
        and all(type(module) is FusedPart for module in parts)
        and type(mlp.act_fn).__name__ in _ACTIVATIONS
        and attention.head_dim % 16 == 0
    )
