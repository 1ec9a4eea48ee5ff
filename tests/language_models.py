"""Tiny random language models of every architecture, quantised in every format, and the same in plain transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import checkpoints
import ml_dtypes
import numpy as np
import torch
import transformers
from checkpoints import Kind
from torch import nn

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 64, 128, 2, 4, 2, 96

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": (
        "LlamaConfig",
        {
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "smollm": ("LlamaConfig", {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "mistral": ("MistralConfig", {"sliding_window": 8, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}),
}
"""Name -> (class of the configuration, what differs from the common sizes)."""


def config_of(architecture: str) -> Any:
    """The configuration of a tiny model."""
    name, changes = ARCHITECTURES[architecture]
    return getattr(transformers, name)(**{**_COMMON, **changes})


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that checkpoints quantise: all but the output head."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            yield name, module


def _as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().to(torch.float32).numpy().astype(np.float16)


def make(directory: Path, architecture: str, kind: Kind, rng: np.random.Generator, *, shards: int = 1) -> nn.Module:
    """Saves a checkpoint; returns the model with the same weights, float32, dequantised by the definition.

    Weights are rounded as the packed format rounds them: scales to bfloat16, then each weight to bfloat16. The model's
    layers round their inputs to bfloat16, as tilefuse does.
    """
    torch.manual_seed(int(rng.integers(1 << 30)))
    config = config_of(architecture)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: _as_numpy(tensor) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    order = None
    for name, module in linears(model):
        k, n = module.in_features, module.out_features
        truth = kind.truth(rng, k, n, bias=module.bias is not None)
        # Of the size that keeps activations near one.
        size = np.float32(0.4 if truth.bits == 4 else 0.025)
        truth = dataclasses.replace(truth, scales=(truth.scales.astype(np.float32) * size).astype(truth.scales.dtype))
        if kind.options.get("act_order") and name.endswith(("k_proj", "v_proj", "up_proj")):
            # Layers with the same input have the same order, as what sorts by the inputs' sizes gives them.
            truth = dataclasses.replace(truth, group_of=order)
        order = truth.group_of
        del state[f"{name}.weight"]
        state.pop(f"{name}.bias", None)
        state |= checkpoints.named(name, kind.encode(truth))
        narrow = dataclasses.replace(truth, scales=truth.scales.astype(ml_dtypes.bfloat16))
        weights = narrow.weights().astype(ml_dtypes.bfloat16).astype(np.float32)
        module.weight = nn.Parameter(torch.from_numpy(weights.T.copy()))
        if module.bias is not None:
            assert truth.bias is not None
            module.bias = nn.Parameter(torch.from_numpy(truth.bias.astype(np.float32)))
        module.register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16).to(args[0].dtype),))
    checkpoints.save(directory, state, kind.quantization, shards=shards, **json.loads(config.to_json_string(False)))
    for name, parameter in model.named_parameters():
        if name in state and state[name].dtype == np.float16:
            parameter.data = torch.from_numpy(state[name].astype(np.float32))
    model.tie_weights()
    return model
