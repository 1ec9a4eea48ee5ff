"""The models of `generation.py`, each as a checkpoint that tilefuse reads and as a GGUF file that llama.cpp reads."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse.awq import Options, quantize_checkpoint
from tilefuse.formats.output import DEFAULT_SHARD_BYTES, Shards, new_directory, write_json

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from smollm2.convert import hf_config  # noqa: E402
from smollm2.export import write_bfloat16  # noqa: E402
from smollm2.gguf_model import GgufModel, find_gguf  # noqa: E402
from smollm2.llama import LlamaConfig  # noqa: E402

CACHE = Path(os.environ.get("TILEFUSE_CACHE", ROOT / "build")) / "generation"

Array = npt.NDArray[Any]
Type = gguf.GGMLQuantizationType


@dataclass(frozen=True)
class Model:
    """A model with its bits.

    Attributes:
        name: In the tables and of its files.
        bits: Of its linear layers.
        group: Input channels that share a scale, in the checkpoint.
        kind: GGUF type of the linear layers.
        sizes: None for SmolLM2-135M-Instruct itself; other sizes have random weights, which take as long.
    """

    name: str
    bits: int
    group: int
    kind: Any
    sizes: dict[str, int] | None = None

    @property
    def checkpoint(self) -> Path:
        return CACHE / self.name

    @property
    def gguf(self) -> Path:
        return CACHE / f"{self.name}.gguf"

    @property
    def real(self) -> bool:
        """Whether it says something."""
        return self.sizes is None


LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
"""SmolLM2-1.7B's."""

MODELS = {
    model.name: model
    for model in (
        Model("SmolLM2-135M-w8", 8, 64, Type.Q8_0),
        Model("SmolLM2-135M-w4", 4, 64, Type.Q4_0),
        Model("SmolLM2-1.7B-random-w4", 4, 128, Type.Q4_0, LARGE),
    )
}


def source() -> Path:
    """SmolLM2-135M-Instruct with bfloat16 weights."""
    path = CACHE / "SmolLM2-135M-bf16"
    if not path.exists():
        write_bfloat16(path, GgufModel(find_gguf()))
    return path


def make(model: Model) -> None:
    """Writes what is missing of a model's two files."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not model.checkpoint.exists():
        if model.real:
            quantize_checkpoint(source(), model.checkpoint, Options(bits=model.bits, group=model.group, method="rtn"))
        else:
            _write_random_checkpoint(model)
    if not model.gguf.exists():
        partial = model.gguf.with_suffix(".partial")
        _write_gguf(model, partial)
        partial.rename(model.gguf)


# --- sizes ------------------------------------------------------------------------------------------------------------


def _config(model: Model) -> LlamaConfig:
    config = GgufModel(find_gguf()).config
    return config if model.sizes is None else replace(config, **model.sizes)


def _linears(config: LlamaConfig) -> Iterator[tuple[str, int, int]]:
    """(Hugging Face name, K, N) of the linear layers."""
    d, inner = config.hidden_size, config.intermediate_size
    kv = config.num_key_value_heads * config.head_dim
    shapes = {
        "q_proj": (d, d),
        "k_proj": (d, kv),
        "v_proj": (d, kv),
        "o_proj": (d, d),
        "gate_proj": (d, inner),
        "up_proj": (d, inner),
        "down_proj": (inner, d),
    }
    for name in config.linear_names():
        yield name, *shapes[name.rpartition(".")[2]]


def _write_random_checkpoint(model: Model) -> None:
    """An AutoAWQ checkpoint, 4 bits. Weights keep activations about where they are."""
    rng = np.random.default_rng(7)
    config, bfloat16 = _config(model), ml_dtypes.bfloat16
    with new_directory(model.checkpoint) as partial:
        with contextlib.closing(Shards(partial, DEFAULT_SHARD_BYTES)) as shards:
            embedding = rng.standard_normal((config.vocab_size, config.hidden_size), np.float32)
            shards.add("model.embed_tokens.weight", (embedding * 0.02).astype(bfloat16))
            for name in _norms(config):
                shards.add(f"{name}.weight", np.ones(config.hidden_size, bfloat16))
            for name, k, n in _linears(config):
                groups = k // model.group
                shards.add(f"{name}.qweight", rng.integers(-(2**31), 2**31, (k, n // 8)).astype(np.int32))
                shards.add(f"{name}.qzeros", np.full((groups, n // 8), 0x77777777, np.int32))
                # Codes around 7.5 with zeros of 7: standard deviation 4.6.
                shards.add(f"{name}.scales", np.full((groups, n), 1 / (4.6 * k**0.5), np.float16))
            shards.finish()
        settings = {"quant_method": "awq", "bits": 4, "group_size": model.group, "zero_point": True, "version": "gemm"}
        sizes = {**hf_config(GgufModel(find_gguf())), **(model.sizes or {}), "head_dim": config.head_dim}
        write_json(partial / "config.json", {**sizes, "torch_dtype": "bfloat16", "quantization_config": settings})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(source() / name, partial / name)


def _norms(config: LlamaConfig) -> list[str]:
    leaves = ("input_layernorm", "post_attention_layernorm")
    return ["model.norm", *(f"model.layers.{i}.{leaf}" for i in range(config.num_hidden_layers) for leaf in leaves)]


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _write_gguf(model: Model, path: Path) -> None:
    """The package's file with its linear layers of another type, or other sizes with random ones; the head is Q8_0."""
    reader = gguf.GGUFReader(find_gguf())
    writer = gguf.GGUFWriter(path, "llama")
    sizes = _gguf_sizes(model)
    for key, each in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kind, *inner = each.types
        value = sizes.get(key, each.contents())
        writer.add_key_value(key, value, kind, inner[0] if inner else None)
    rng = np.random.default_rng(7)
    for name, data, kind in _tensors(model, reader, rng):
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_sizes(model: Model) -> dict[str, int]:
    config = _config(model)
    return {
        "llama.block_count": config.num_hidden_layers,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.rope.dimension_count": config.head_dim,
    }


def _tensors(model: Model, reader: Any, rng: np.random.Generator) -> Iterator[tuple[str, Array, Any]]:
    if model.real:
        for tensor in reader.tensors:
            kind = model.kind if tensor.tensor_type == Type.Q4_1 else tensor.tensor_type
            data = tensor.data
            if kind != tensor.tensor_type:
                data = gguf.quantize(gguf.dequantize(data, tensor.tensor_type), kind)
            yield tensor.name, data, kind
        return
    config = _config(model)
    yield "token_embd.weight", _random_blocks(rng, config.vocab_size, config.hidden_size, Type.Q8_0), Type.Q8_0
    yield "output_norm.weight", np.ones(config.hidden_size, np.float32), Type.F32
    leaves = {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    for index in range(config.num_hidden_layers):
        for norm in ("attn_norm", "ffn_norm"):
            yield f"blk.{index}.{norm}.weight", np.ones(config.hidden_size, np.float32), Type.F32
    for name, k, n in _linears(config):
        block = name.split(".")[2]
        leaf = leaves[name.rpartition(".")[2]]
        yield f"blk.{block}.{leaf}.weight", _random_blocks(rng, n, k, model.kind), model.kind


def _random_blocks(rng: np.random.Generator, n: int, k: int, kind: Any) -> Array:
    """Random codes [N, K] with one scale."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n, k // size, nbytes), np.uint8)
    deviation = 4.6 if kind == Type.Q4_0 else 74.0
    blocks[..., :2] = np.array([1 / (deviation * k**0.5)], np.float16).view(np.uint8)
    return blocks.reshape(n, -1)
