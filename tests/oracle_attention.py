"""How far the tile loop may be from exact attention, by an error analysis in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import oracle_routing

UNIT = 2.0**-24
"""Relative rounding error of fp32."""
UNIT_BF16 = 2.0**-8
"""Relative rounding error of bfloat16."""


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def softmax(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one head, in float64: outputs, log-sum-exps, and the outputs of |v|; zeros and -inf without keys."""
    scores = np.where(seen, q.astype(np.float64) @ k.astype(np.float64).T * scale, -np.inf)
    lse = np.logaddexp.reduce(scores, axis=1, initial=-np.inf)
    p = np.exp(scores - np.where(seen.any(axis=1), lse, 0)[:, None])
    return p @ v.astype(np.float64), lse, p @ np.abs(v.astype(np.float64))


def score_error(
    q: np.ndarray,
    k: np.ndarray,
    seen: np.ndarray,
    int8: np.ndarray,
    scale: float,
    *,
    smooth: str,
    block_rows: bool,
) -> np.ndarray:
    """The largest error of each row's exponents, in nats, [rows]; q, k are bfloat16's numbers, int8 [rows, keys].

    A 16-bit score is d exact products summed in fp32. An INT8 one is off by half a step of q times |k'|, half a step of
    k' times |q|, and half a step of both times each other, k' being k less its block's mean; the mean's own product is
    added in fp32. Then come a handful of roundings of the exponent, its exponential, and another one for each tile.
    """
    q, k = q.astype(np.float64), k.astype(np.float64)
    depth = q.shape[1]
    gamma = (depth + 4) * UNIT
    size = np.abs(q) @ np.abs(k).T
    error = scale * gamma * size
    if len(k):
        mean = np.zeros_like(k)
        step_k = np.ones(len(k))
        for start in range(0, len(k), 64):
            block = slice(start, start + 64)
            over = k if smooth == "global" else k[block]
            if smooth != "none":
                mean[block] = _mean(over)
            step_k[block] = np.abs(k[block] - mean[block]).max() / 127
        step_q = np.abs(q).max(axis=1) / 127
        if block_rows:
            step_q = np.repeat([step_q[s : s + 128].max() for s in range(0, len(q), 128)], 128)[: len(q)]
        less = np.abs(k - mean)
        step = (
            np.outer(step_q, less.sum(axis=1)) / 2
            + np.outer(np.abs(q).sum(axis=1), step_k) / 2
            + depth * np.outer(step_q, step_k) / 4
        )
        # 127 steps of a code that is itself rounded: 2^-16 of half a step.
        step = step * (1 + 2.0**-15) + 2 * gamma * (np.abs(q) @ np.abs(mean).T + np.abs(q) @ less.T)
        error = np.where(int8, scale * step, error)
    reach = np.where(seen, size * scale, 0).max(axis=1, initial=0)
    tiles = len(k) // 64 + 1
    error = np.where(seen, error, 0).max(axis=1, initial=0)
    return error + (tiles + 1) * (16 * UNIT * reach + 2.0**-20)


def _mean(keys: np.ndarray) -> np.ndarray:
    total = np.zeros(keys.shape[1], np.float32)
    for key in keys:
        total = total + key.astype(np.float32)
    return bf16(total * (np.float32(1) / np.float32(len(keys))))


def output_bound(error: np.ndarray, size: np.ndarray, keys: int) -> np.ndarray:
    """|out - exact| at most, [rows, dv]: each weight is off by exp(2 E), and P by a rounding to bfloat16.

    With weights w = p exp(e) / sum p exp(e), |e| <= E, w / p lies within exp(2 E) of 1 either way.
    """
    twice = 2 * error[:, None]
    return (np.expm1(twice) + UNIT_BF16 * np.exp(twice) * 1.01 + 4 * (keys + 8) * UNIT) * size + 1e-37


def expand(bits: np.ndarray, group: int, query_len: int, key_len: int) -> np.ndarray:
    """Bits of groups as a mask of scores."""
    wide = np.repeat(np.repeat(bits, 128, axis=0), 64 * group, axis=1)
    return wide[:query_len, :key_len]


visible = oracle_routing.visible
