"""Language models of Hugging Face transformers on tilefuse.

Importing this registers tilefuse as the quantiser of AutoAWQ, GPTQ and compressed-tensors checkpoints in transformers'
registry, so that ``AutoModelForCausalLM.from_pretrained(path)`` gives a model whose quantised layers are
`TileFuseLinear`, without the software that made the checkpoint; `unregister` gives the registry back. It also registers
`tilefuse.attention` under ``attn_implementation="tilefuse"``.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(f"tilefuse.hf needs torch and transformers ({error}): pip install 'tilefuse[hf]'") from error

from tilefuse.hf.attention import AttentionUse, attention_use, register_attention
from tilefuse.hf.attention_config import set_attention
from tilefuse.hf.linear import FusedLinear, FusedPart, TileFuseLinear
from tilefuse.hf.options import Options, options
from tilefuse.hf.parallel import ParallelLinear, packed_bytes
from tilefuse.hf.quantizer import TileFuseConfig, TileFuseQuantizer, register, unregister
from tilefuse.hf.routing import phases_of, set_device

__all__ = [
    "AttentionUse",
    "FusedLinear",
    "FusedPart",
    "Options",
    "ParallelLinear",
    "TileFuseConfig",
    "TileFuseLinear",
    "TileFuseQuantizer",
    "attention_use",
    "options",
    "packed_bytes",
    "phases_of",
    "register",
    "set_attention",
    "set_device",
    "unregister",
]

register()
register_attention()
