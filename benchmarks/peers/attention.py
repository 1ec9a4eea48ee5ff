"""What the contenders of `benchmarks/attention.py` provide, and the process that one library's attention runs in.

    python -m peers.attention MODULE[:VARIANT]      # with benchmarks/ on PYTHONPATH; started by `peers.client`

Requests have "do": "hello" (versions, contenders), "load" (a case's folder, a contender), "time", "check", "unload";
the rest is as in `peers.worker`. Nothing here needs more than NumPy.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peers.base import Array, Contender, bf16_bits, bf16_values, round_bf16
from peers.worker import Requests, run_worker, settle, turn

CHECKED_ROWS = 16
"""Queries of every head that errors are taken over, spread over all."""


@dataclass(frozen=True)
class Attention:
    """A case: causal attention of one sequence, aligned to the end of the keys. Values are those of bfloat16.

    Attributes:
        q: float32 [Hq, Lq, d].
        k, v: float32 [Hk, Lk, d].
        rows: Queries that errors are taken over.
        expected: Attention of those in float64 [Hq, rows, d].
    """

    q: Array
    k: Array
    v: Array
    rows: Array
    expected: Array


def operations(heads: int, queries: int, keys: int, d: int) -> int:
    """Multiplications and additions of causal attention, scores and their product with v."""
    pairs = queries * keys - queries * (queries - 1) // 2
    return 4 * heads * d * pairs


def exact_rows(q: Array, k: Array, v: Array, rows: Array) -> Array:
    """Causal attention of some queries in float64 [Hq, rows, d], scores times 1 / sqrt(d)."""
    share, offset = len(q) // len(k), k.shape[1] - q.shape[1]
    wide_k, wide_v = k.astype(np.float64), v.astype(np.float64)
    out = np.empty((len(q), len(rows), v.shape[2]))
    for h in range(len(q)):
        scores = q[h, rows].astype(np.float64) @ wide_k[h // share].T / np.sqrt(q.shape[2])
        scores[np.arange(k.shape[1]) > rows[:, None] + offset] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[h] = weights @ wide_v[h // share] / weights.sum(axis=1, keepdims=True)
    return out


def make_attention(heads: int, kv_heads: int, queries: int, keys: int, d: int, seed: int = 0) -> Attention:
    """Independent normal values."""
    rng = np.random.default_rng(seed)

    def normal(count: int, length: int) -> Array:
        return round_bf16(rng.standard_normal((count, length, d), np.float32))

    q, k, v = normal(heads, queries), normal(kv_heads, keys), normal(kv_heads, keys)
    rows = np.unique(np.linspace(0, queries - 1, CHECKED_ROWS).astype(np.int64))
    return Attention(q, k, v, rows, exact_rows(q, k, v, rows))


def save_attention(case: Attention, folder: Path) -> None:
    """Writes the case, operands as bfloat16."""
    for name in ("q", "k", "v"):
        np.save(folder / f"{name}.npy", bf16_bits(getattr(case, name)))
    np.save(folder / "rows.npy", case.rows)
    np.save(folder / "expected.npy", case.expected)


def open_attention(folder: Path) -> Attention:
    """What `save_attention` wrote."""
    q, k, v = (bf16_values(np.load(folder / f"{name}.npy")) for name in ("q", "k", "v"))
    return Attention(q, k, v, np.load(folder / "rows.npy"), np.load(folder / "expected.npy"))


@dataclass(frozen=True)
class Ready:
    """A contender with a case's operands in place.

    Attributes:
        call: Computes attention once.
        output: What a call gives, [Hq, Lq, d], of any float type that NumPy has.
    """

    call: Callable[[], object]
    output: Callable[[], Array]


class AttentionAdapter(ABC):
    """A library."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the library and of what it stands on."""

    @abstractmethod
    def contenders(self) -> list[Contender]:
        """What it has. ``bits`` is of the keys' and values', ``activations`` of the scores' operands."""

    @abstractmethod
    def load(self, contender: Contender, case: Attention) -> Ready:
        """The contender on the operands of ``case``."""


class AttentionWorker(Requests):
    """Holds the contenders of one adapter; a method for each request."""

    KNOWN = ("hello", "load", "time", "check", "unload")

    def __init__(self, adapter: AttentionAdapter) -> None:
        self._adapter = adapter
        self._contenders = {contender.name: contender for contender in adapter.contenders()}
        self._folder = ""
        self._case: Attention | None = None
        self._ready: dict[str, Ready] = {}
        self._last: dict[str, float] = {}

    def hello(self) -> dict[str, Any]:
        """Versions, and every contender."""
        return {
            "versions": self._adapter.versions(),
            "contenders": [asdict(contender) for contender in self._contenders.values()],
        }

    def load(self, folder: str, name: str) -> dict[str, Any]:
        """Gives a contender the case in ``folder``; one call does what it leaves to the first."""
        if folder != self._folder or self._case is None:
            self.unload()
            self._case, self._folder = open_attention(Path(folder)), folder
        self._ready[name] = ready = self._adapter.load(self._contenders[name], self._case)
        ready.call()
        return {}

    def time(self, name: str, at_least: float) -> dict[str, Any]:
        """One turn: an untimed call, which wakes its threads, unless calls are long; then ``at_least`` seconds."""
        calls = itertools.repeat(self._ready[name].call)
        mean, done = turn(calls, at_least, wake=self._last.get(name, 0.0) < at_least)
        self._last[name] = mean
        return {"seconds": mean, "calls": done, "settled": settle()}

    def check(self, name: str) -> dict[str, Any]:
        """Errors against float64, relative to each checked row's 2-norm: their mean, and the largest."""
        assert self._case is not None
        out = self._ready[name].output()
        if out.shape != (*self._case.q.shape[:2], self._case.v.shape[2]):
            raise ValueError(f"the result has shape {list(out.shape)}")
        # Most return bfloat16: what its rounding adds is nobody's merit or fault.
        found = round_bf16(out[:, self._case.rows].astype(np.float32)).astype(np.float64)
        expected = self._case.expected
        relative = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        return {"mean": float(relative.mean()), "largest": float(relative.max())}

    def unload(self) -> dict[str, Any]:
        """Drops all operands."""
        self._ready.clear()
        self._last.clear()
        self._case, self._folder = None, ""
        gc.collect()
        return {}


def adapter_of(name: str) -> AttentionAdapter:
    """The adapter in ``peers.MODULE``, of ``MODULE[:VARIANT]``; ImportError or OSError where its library is missing."""
    module, _, variant = name.partition(":")
    make = importlib.import_module(f"peers.{module}").adapter
    made: AttentionAdapter = make(variant) if variant else make()
    return made


if __name__ == "__main__":
    sys.exit(run_worker(lambda: AttentionWorker(adapter_of(sys.argv[1]))))
