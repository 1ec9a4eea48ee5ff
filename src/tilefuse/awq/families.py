"""The decoder blocks that are known here: which linear layers they have, and what scales can be folded into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilefuse.errors import UnsupportedFormatError

BLOCKS = "model.layers"
"""Prefix of the blocks' tensors."""

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
LINEARS = (*ATTENTION, "self_attn.o_proj", *MLP, "mlp.down_proj")
"""The linear layers of a block, in the order in which they run."""


@dataclass(frozen=True)
class Family:
    """What differs between architectures whose blocks have the same linear layers.

    Attributes:
        attention_norm: The norm whose output q, k and v read.
        mlp_norm: The norm whose output gate and up read.
    """

    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"


# Gemma 2 and 3 have norms behind attention and MLP too; their post_attention_layernorm is one.
_SANDWICH = Family(mlp_norm="pre_feedforward_layernorm")

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma": Family(),
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
}
"""By ``model_type`` of the configuration."""


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a model.

    Args:
        config: Its ``config.json``.
        where: What to call that file in messages.

    Raises:
        UnsupportedFormatError: There is none for its ``model_type``.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = " (of a model with vision, take the text model alone: gemma3_text)" if kind == "gemma3" else ""
        raise UnsupportedFormatError(
            f"{where}: model_type {kind!r} is not quantised; taken: {', '.join(FAMILIES)}{hint}"
        )
    return FAMILIES[kind]
