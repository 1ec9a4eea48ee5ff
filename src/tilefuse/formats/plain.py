"""Linear layers that a checkpoint leaves in bfloat16, float16 or float32."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tilefuse.formats.store import LinearInfo, Store

NAMES = {"bfloat16": ("bf16", 16), "float16": ("fp16", 16), "float32": ("fp32", 32)}
"""NumPy's name of a dtype -> the name of the format, and its bits."""

_EMBEDDING = re.compile(r"(wte|wpe|shared|(?!embed_out$).*embed.*)$")

EMBEDDINGS = ("embed_tokens", "wte")
"""Last part of the name of the input embedding, which a tied output head shares."""

HEADS = ("lm_head", "embed_out")


def is_linear(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the two-dimensional float weight of something that is not an embedding."""
    layer, _, last = name.rpartition(".")
    if last != "weight" or not layer or dtype.name not in NAMES or len(shape) != 2 or 0 in shape:
        return False
    return _EMBEDDING.match(layer.rpartition(".")[2]) is None


def describe(store: Store, layer: str, weight: str) -> LinearInfo:
    """The facts about an unquantised layer whose weight is the tensor ``weight``, [N, K]."""
    entry = store.entry(weight)
    n, k = entry.shape
    form, bits = NAMES[entry.dtype.name]
    nbytes = entry.nbytes + store.nbytes(layer, "bias")
    return LinearInfo(layer, k, n, bits, 0, form, True, store.has_bias(layer, n), nbytes)


def tied_embedding(store: Store) -> str | None:
    """The embedding that serves as output head: there is one, and no tensor of a head."""
    found = None
    for name in store:
        layer, _, last = name.rpartition(".")
        if layer.rpartition(".")[2] in HEADS:
            return None
        if last == "weight" and layer.rpartition(".")[2] in EMBEDDINGS and len(store.entry(name).shape) == 2:
            found = found or name
    return found if found is not None and store.entry(found).dtype.name in NAMES else None
