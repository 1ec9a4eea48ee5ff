"""Queries, keys and values for `benchmarks/attention_accuracy.py`, and what is known of their softmax in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from peers.base import round_bf16

from tilefuse.routing import Grid

Array = npt.NDArray[Any]

THETA = 5e5
"""Of the rotary embedding."""


@dataclass(frozen=True)
class Operands:
    """Causal attention of one sequence, values those of bfloat16.

    Attributes:
        q: float32 [Hq, L, d].
        k, v: float32 [Hk, L, d].
    """

    q: Array
    k: Array
    v: Array

    @property
    def length(self) -> int:
        return int(self.q.shape[1])

    def probabilities(self, head: int) -> Array:
        """Of a query head, float64 [L, L], scores times 1 / sqrt(d)."""
        share = len(self.q) // len(self.k)
        scores: Array = self.q[head].astype(np.float64) @ self.k[head // share].astype(np.float64).T
        scores /= np.sqrt(self.q.shape[2])
        scores[np.triu_indices(self.length, 1)] = -np.inf
        np.exp(scores - scores.max(axis=1, keepdims=True), out=scores)
        scores /= scores.sum(axis=1, keepdims=True)
        return scores

    @cached_property
    def exact(self) -> tuple[Array, Array, Array]:
        """Attention in float64 [Hq, L, d]; sums of p and of p^2 over each group, [Hq, row tiles, groups]."""
        grid = Grid(self.length, self.length)
        share = len(self.q) // len(self.k)
        outputs, mass, squares = [], [], []
        for head in range(len(self.q)):
            p = self.probabilities(head)
            outputs.append(p @ self.v[head // share].astype(np.float64))
            mass.append(group_sums(p, grid))
            np.square(p, out=p)
            squares.append(group_sums(p, grid))
        return np.stack(outputs), np.stack(mass), np.stack(squares)


def group_sums(values: Array, grid: Grid) -> Array:
    """Sums of [queries, keys] over the grid's row tiles and groups, [row tiles, groups]."""
    rows = np.arange(0, grid.query_len, grid.block_m)
    columns = np.arange(0, grid.key_len, grid.group_keys)
    found: Array = np.add.reduceat(np.add.reduceat(values, rows, axis=0), columns, axis=1)
    return found


def gauss(length: int, d: int = 128, heads: int = 2) -> Operands:
    """Independent normal values."""
    rng = np.random.default_rng(0)
    q, k, v = (round_bf16(rng.standard_normal((heads, length, d), np.float32)) for _ in range(3))
    return Operands(q, k, v)


def outliers(length: int, d: int = 128, heads: int = 2) -> Operands:
    """What makes models' keys hard to quantise, made up: local content, constant channels, a sink.

    q and k share content that follows itself from token to token (AR(1), 0.98), turned by a rotary embedding. Four
    channels of k, among the slowest of that, are 12 larger at every token. The first key lies along a constant part of
    all queries, 3 long in a third of the channels.
    """
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((heads, length, d))
    content = np.empty_like(noise)
    content[:, 0] = noise[:, 0]
    for token in range(1, length):
        content[:, token] = 0.98 * content[:, token - 1] + np.sqrt(1 - 0.98**2) * noise[:, token]
    q, k = (rotate(1.2 * content + 0.3 * rng.standard_normal(content.shape)) for _ in range(2))
    constant = np.where(rng.random((heads, 1, d)) < 1 / 3, 0.5, 0.0)
    q = q + constant
    k[:, :1] += 6 * constant
    slow = np.array([d // 2 - 1, d // 2 - 3, d - 1, d - 2])  # rotate() pairs channel i with i + d / 2
    k[:, :, slow] += 12
    v = rng.standard_normal((heads, length, d))
    return Operands(*(round_bf16(x.astype(np.float32)) for x in (q, k, v)))


def rotate(x: Array) -> Array:
    """Rotary embedding of [..., L, d], the halves of d in pairs."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * THETA ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def of_model(model: Any, ids: Any, layers: tuple[int, ...]) -> dict[int, Operands]:
    """The operands of some layers' attention in a model of transformers, after the rotary embedding, and rounded."""
    import torch
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    found: dict[int, Operands] = {}

    def record(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        if module.layer_idx in layers:
            found[module.layer_idx] = Operands(*(round_bf16(x[0].float().numpy()) for x in (q, k, v)))
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)

    name = "tilefuse-record"
    AttentionInterface.register(name, record)
    AttentionMaskInterface.register(name, sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return found
