"""From the GGUF file to packed layers: calibrate, quantise, save an AutoAWQ checkpoint, open it, pack it, map it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import tilefuse as tf
from smollm2.gguf_model import GgufModel
from smollm2.llama import Floats, KVCache, Llama
from tilefuse.formats import autoawq

Progress = Callable[[str], None]
"""Called with the name of each layer as it is done."""


@dataclass(frozen=True)
class Variant:
    """One way of holding the model's weights.

    Attributes:
        name: Short name, also that of its files.
        bits: Bits of a code.
        group: Input channels that share a scale. K = 576 is 4.5 x 128, so the usual 128 does not divide it; 64 does,
            and divides the 1536 of the down projection too.
        about: What is stored.
    """

    name: str
    bits: int
    group: int
    about: str


W4 = Variant("w4", 4, 64, "AutoAWQ, 4 bits, group 64, quantised again from the GGUF's weights")
W8 = Variant("w8", 8, 64, "AutoAWQ, 8 bits, group 64, quantised again from the GGUF's weights")
Q4_1 = Variant("q4_1", 4, 32, "the GGUF's own 4-bit codes, group 32, float minima")
VARIANTS = (W4, W8, Q4_1)


def calibrate(model: Llama, ids: list[int]) -> dict[str, Floats]:
    """Mean square of each input channel of each layer [K] while the model reads ``ids``: how much its errors matter."""
    squares: dict[str, Floats] = {}

    def recording(name: str, x: Floats) -> Floats:
        squares[name] = np.mean(x * x, axis=0)
        return model.linear(name, x)

    dataclasses.replace(model, linear=recording).hidden(ids, KVCache(model.config, len(ids)))
    return squares


def quantize(model: GgufModel, variant: Variant, importance: dict[str, Floats]) -> Iterator[tf.QuantizedLinear]:
    """The linear layers of all blocks, quantised; a few at a time, on all cores (NumPy releases the GIL)."""

    def one(name: str) -> tf.QuantizedLinear:
        return tf.quantize_linear(
            np.ascontiguousarray(model.weight(name).T),
            bits=variant.bits,
            group=variant.group,
            # Rounding to nearest costs nothing noticeable with 8 bits and a lot with 4.
            method="search" if variant.bits == 4 else "rtn",
            importance=importance[name],
            scale_dtype="float16",
            name=name,
        )

    with ThreadPoolExecutor() as pool:
        yield from pool.map(one, model.config.linear_names())


def hf_config(model: GgufModel) -> dict[str, object]:
    """The model's ``config.json``, so that other software can load the checkpoint."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **dataclasses.asdict(model.config),
        "head_dim": model.config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": model.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": model.field("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float16",
    }


def write_checkpoint(
    path: Path, model: GgufModel, variant: Variant, importance: dict[str, Floats], progress: Progress
) -> None:
    """Quantise the model and save it as an AutoAWQ checkpoint, replacing one that is there."""

    def layers() -> Iterator[tf.QuantizedLinear]:
        for layer in quantize(model, variant, importance):
            yield layer
            progress(layer.name)

    others = {f"{name}.weight": weight.astype(np.float16) for name, weight in model.norms().items()}
    others["model.embed_tokens.weight"] = model.weight("model.embed_tokens").astype(np.float16)
    shutil.rmtree(path, ignore_errors=True)
    autoawq.write(path, layers(), config=hf_config(model), extra_tensors=others)


@dataclass(frozen=True)
class Build:
    """A variant, packed.

    Attributes:
        variant: What it is.
        layers: The packed layers by name, ``lm_head`` included, views of the mapped file.
        source: The layer that a packed one was made from.
        checkpoint: Folder of the AutoAWQ checkpoint, or None where there is none.
        path: The packed file.
    """

    variant: Variant
    layers: dict[str, tf.PackedLinear]
    source: Callable[[str], tf.QuantizedLinear]
    checkpoint: Path | None
    path: Path


def build(
    model: GgufModel,
    variant: Variant,
    folder: Path,
    importance: dict[str, Floats],
    progress: Progress = lambda name: None,
    fresh: bool = False,
) -> Build:
    """Make what is missing in ``folder`` and map the packed file.

    Args:
        model: The model.
        variant: How to hold its weights.
        folder: Where the checkpoint and the packed file go, or already are.
        importance: What `calibrate` gave.
        progress: Called with the name of each layer as it is quantised or packed.
        fresh: Make everything anew.
    """
    checkpoint: Path | None = None
    source = model.quantized
    if variant is not Q4_1:
        checkpoint = folder / f"SmolLM2-135M-Instruct-{variant.name}-awq"
        if fresh or not checkpoint.exists():
            fresh = True  # a packed file that is there was made from another checkpoint
            write_checkpoint(checkpoint, model, variant, importance, progress)
        opened = tf.open_checkpoint(checkpoint)

        def source(name: str) -> tf.QuantizedLinear:
            # The output head is tied to the embedding, which AutoAWQ leaves in 16 bits; the GGUF has it in 8.
            return model.quantized(name) if name == "lm_head" else opened.linear(name)

    path = folder / f"SmolLM2-135M-Instruct-{variant.name}.tilefuse"
    if fresh or not path.exists():

        def packed() -> Iterator[tf.PackedLinear]:
            for name in [*model.config.linear_names(), "lm_head"]:
                yield tf.pack(source(name))
                progress(name)

        tf.save(path, packed())
    return Build(variant, tf.load(path), source, checkpoint, path)
