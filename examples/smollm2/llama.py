"""A Llama forward pass in NumPy that owns no weight matrix: every linear layer is a call to a function it is given.

That function, ``linear(name, x)`` with x [T, K] float32 -> [T, N] float32, is the only thing that changes between the
fp32 original, a recording of activations, and tilefuse's packed layers. Layer names are those of Hugging Face
checkpoints (``model.layers.0.self_attn.q_proj``), and ``lm_head`` turns the last hidden state into logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Linear = Callable[[str, Floats], Floats]

KINDS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The seven linear layers of a block, in the order in which they run."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; the names are those of a Hugging Face ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def linear_names(self) -> Iterator[str]:
        """Names of the linear layers of all blocks, in the order in which they run (``lm_head`` is apart)."""
        for layer in range(self.num_hidden_layers):
            for suffix in KINDS.values():
                yield f"model.layers.{layer}.{suffix}"


class KVCache:
    """Keys and values of the tokens seen so far: two float32 arrays [layers, kv heads, capacity, head dim]."""

    def __init__(self, config: LlamaConfig, capacity: int) -> None:
        shape = (config.num_hidden_layers, config.num_key_value_heads, capacity, config.head_dim)
        self.keys: Floats = np.zeros(shape, np.float32)
        self.values: Floats = np.zeros(shape, np.float32)
        self.length = 0

    def append(self, layer: int, k: Floats, v: Floats) -> tuple[Floats, Floats]:
        """Store k and v [kv heads, T, head dim] after the tokens seen so far; returns views of all of them."""
        end = self.length + k.shape[1]
        if end > self.keys.shape[2]:
            raise ValueError(f"{end} tokens do not fit a cache of {self.keys.shape[2]}: make it larger")
        self.keys[layer, :, self.length : end] = k
        self.values[layer, :, self.length : end] = v
        return self.keys[layer, :, :end], self.values[layer, :, :end]


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """``x / rms(x) * weight`` over the last axis."""
    scaled: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return scaled * weight


def rope(x: Floats, positions: npt.NDArray[np.int64], theta: float) -> Floats:
    """Rotate x [heads, T, d] by its positions; elements i and i + d / 2 are a pair (the Hugging Face order)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    angles = positions[:, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(q: Floats, k: Floats, v: Floats) -> Floats:
    """Causal attention with grouped heads.

    q [heads, T, d]; k and v [kv heads, S, d], S >= T, the queries being the last T of the S positions.
    Returns [heads, T, d].
    """
    heads, t, d = q.shape
    kv_heads, s, _ = k.shape
    # The query heads of one group share its keys: stack them as rows, one matrix product a group.
    grouped = q.reshape(kv_heads, heads // kv_heads * t, d)
    scores = (grouped @ k.swapaxes(1, 2) / np.float32(np.sqrt(d))).reshape(heads, t, s)
    if t > 1:
        scores += np.triu(np.full((t, s), -np.inf, np.float32), k=s - t + 1)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed: Floats = scores.reshape(kv_heads, -1, s) @ v
    return mixed.reshape(heads, t, d)


def swiglu(gate: Floats, up: Floats) -> Floats:
    """``silu(gate) * up``, the sigmoid written with tanh because it can't overflow."""
    sigmoid: Floats = np.float32(0.5) * (np.float32(1) + np.tanh(gate * np.float32(0.5)))
    return gate * sigmoid * up


@dataclass(frozen=True)
class Llama:
    """A Llama model whose linear layers are calls.

    Attributes:
        config: Sizes.
        embedding: [vocab, hidden], any float dtype; rows are looked up, never multiplied.
        norms: float32 [hidden] by Hugging Face name, e.g. ``model.layers.0.input_layernorm`` and ``model.norm``.
        linear: ``linear(name, x [T, K]) -> [T, N]``.
    """

    config: LlamaConfig
    embedding: npt.NDArray[np.generic] = field(repr=False)
    norms: dict[str, Floats] = field(repr=False)
    linear: Linear = field(repr=False)

    def hidden(self, ids: list[int], cache: KVCache) -> Floats:
        """Run ``ids`` after the tokens in ``cache``, and add them to it. Returns [T, hidden], after the last norm."""
        cfg, linear = self.config, self.linear
        t = len(ids)
        positions = np.arange(cache.length, cache.length + t)
        x = self.embedding[ids].astype(np.float32)
        for layer in range(cfg.num_hidden_layers):
            block = f"model.layers.{layer}"
            h = self._norm(f"{block}.input_layernorm", x)
            q = self._split_heads(linear(f"{block}.self_attn.q_proj", h), cfg.num_attention_heads)
            k = self._split_heads(linear(f"{block}.self_attn.k_proj", h), cfg.num_key_value_heads)
            v = self._split_heads(linear(f"{block}.self_attn.v_proj", h), cfg.num_key_value_heads)
            keys, values = cache.append(layer, rope(k, positions, cfg.rope_theta), v)
            mixed = attention(rope(q, positions, cfg.rope_theta), keys, values)
            x = x + linear(f"{block}.self_attn.o_proj", mixed.swapaxes(0, 1).reshape(t, -1))
            h = self._norm(f"{block}.post_attention_layernorm", x)
            gated = swiglu(linear(f"{block}.mlp.gate_proj", h), linear(f"{block}.mlp.up_proj", h))
            x = x + linear(f"{block}.mlp.down_proj", gated)
        cache.length += t
        return self._norm("model.norm", x)

    def logits(self, ids: list[int], cache: KVCache | None = None) -> Floats:
        """Logits [T, vocab] after each of the tokens."""
        return self.linear("lm_head", self.hidden(ids, cache or KVCache(self.config, len(ids))))

    def generate(self, ids: list[int], count: int, stop: int | None) -> Iterator[int]:
        """Greedy continuation of ``ids``: at most ``count`` tokens, ending before the token ``stop``."""
        cache = KVCache(self.config, len(ids) + count)
        for _ in range(count):
            last = self.hidden(ids, cache)[-1:]
            token = int(np.argmax(self.linear("lm_head", last)))
            if token == stop:
                return
            yield token
            ids = [token]

    def _norm(self, name: str, x: Floats) -> Floats:
        return rms_norm(x, self.norms[name], self.config.rms_norm_eps)

    def _split_heads(self, x: Floats, heads: int) -> Floats:
        return x.reshape(x.shape[0], heads, -1).swapaxes(0, 1)
