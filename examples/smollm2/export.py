"""The GGUF's model as a Hugging Face folder with bfloat16 weights: what `tilefuse quantize` starts from."""

from __future__ import annotations

import contextlib
from pathlib import Path

import ml_dtypes

from smollm2.convert import hf_config
from smollm2.gguf_model import GgufModel
from smollm2.tokenizer import load_tokenizer
from tilefuse.formats.output import DEFAULT_SHARD_BYTES, Shards, new_directory, write_json


def write_bfloat16(path: Path, model: GgufModel) -> None:
    """Write config.json, model.safetensors and the tokenizer. The weights are the GGUF's, rounded once to bfloat16.

    Raises:
        FileExistsError: ``path`` exists and is not an empty folder.
    """
    with new_directory(path) as partial:
        with contextlib.closing(Shards(partial, DEFAULT_SHARD_BYTES)) as shards:
            names = ["model.embed_tokens", *model.norms(), *model.config.linear_names()]
            for name in names:
                shards.add(f"{name}.weight", model.weight(name).astype(ml_dtypes.bfloat16))
            shards.finish()
        write_json(partial / "config.json", {**hf_config(model), "torch_dtype": "bfloat16"})
        load_tokenizer(model).save(str(partial / "tokenizer.json"))
        write_json(
            partial / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "unk_token": "<|endoftext|>",
                "model_max_length": model.config.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
                "chat_template": model.field("tokenizer.chat_template"),
            },
        )
