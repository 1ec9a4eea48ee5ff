"""Tiny random checkpoints of each architecture, made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 32, "sliding_window_pattern": 2},
}
"""model_type -> what its configuration has besides `SIZES`."""


def make_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random model in float32 whose norms, biases and input channels are of uneven size."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **FAMILIES[kind], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.eval().requires_grad_(False)
    for name, value in model.named_parameters():
        if "norm" in name:
            # A few channels much larger than the others, as in real models: what scaling is for.
            gain = torch.exp(torch.randn_like(value))
            value.copy_(gain - 1 if kind.startswith("gemma") else gain)
        elif name.endswith("bias"):
            value.copy_(torch.randn_like(value) * 0.1)
        elif "proj" in name:
            value.copy_(torch.randn_like(value) * value.shape[1] ** -0.5)
        else:
            value.copy_(torch.randn_like(value))
    return model


def save(model: Any, path: Path, dtype: str = "bfloat16", **options: Any) -> Path:
    """The model in ``dtype`` with a tokenizer that has a token for each printable character; returns ``path``."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.to(getattr(torch, dtype)).save_pretrained(path, **options)
    model.float()
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,'?\n"
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    for letter in letters:
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.save_pretrained(path)
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config
