"""tilefuse: `tf.attention` on bfloat16 arrays, with a part of the scores' tiles in INT8, and on an INT8 cache."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import tilefuse as tf
from peers.attention import Attention, AttentionAdapter, Ready
from peers.base import Array, Contender
from tilefuse.runtime import cpu_level

COVERAGES = {"16-bit": 0.0, "50 %": 0.5, "75 %": 0.75, "INT8": 1.0}
CACHES = {"bf16 cache": "bf16", "INT8 cache": "int8"}
"""For one query."""

LIMITED = ("16-bit", "75 %")
"""What is measured on a lower level than the machine's."""


class Tilefuse(AttentionAdapter):
    """This package, at the level of the environment."""

    def __init__(self) -> None:
        self._level = os.environ.get("TILEFUSE_CPU_LEVEL", "")
        suffix = f" {self._level}" if self._level else ""
        kinds = LIMITED if self._level else tuple(COVERAGES)
        self._coverages = {f"tilefuse {kind}{suffix}": COVERAGES[kind] for kind in kinds}
        self._caches = {} if self._level else {f"tilefuse {name}": kind for name, kind in CACHES.items()}

    def versions(self) -> dict[str, str]:
        return {"tilefuse": f"{importlib.metadata.version('tilefuse')} ({cpu_level()})"}

    def contenders(self) -> list[Contender]:
        return [
            Contender(
                name,
                "bfloat16",
                16,
                16 if coverage == 0 else 8,
                self._level,
                True,
                "attention(q, k, v)" if coverage == 0 else f"routing: local_sink, coverage {coverage:.0%}",
            )
            for name, coverage in self._coverages.items()
        ] + [
            Contender(name, kind, 8 if kind == "int8" else 16, 16, ours=True, note="KVCache, filled before")
            for name, kind in self._caches.items()
        ]

    def load(self, contender: Contender, case: Attention) -> Ready:
        q, k, v = (x.astype(ml_dtypes.bfloat16)[None] for x in (case.q, case.k, case.v))
        if contender.name in self._caches:
            return self._cached(self._caches[contender.name], q, k, v)
        coverage = self._coverages[contender.name]
        routing: Any = None
        if coverage:
            template = tf.routing.local_sink(coverage=coverage)
            routing = template.build(q.shape[2], k.shape[2], causal=True)
        call: Callable[[], Any] = lambda: tf.attention(q, k, v, routing=routing, causal=True)  # noqa: E731

        def output() -> Array:
            found: Array = call()[0].astype(np.float64)
            return found

        return Ready(call, output)

    def _cached(self, kind: str, q: Any, k: Any, v: Any) -> Ready:
        cache = tf.KVCache(k.shape[1], k.shape[3], capacity=k.shape[2], kind=kind)
        cache.append(k, v)

        def output() -> Array:
            found: Array = tf.attention(q, kv_cache=cache)[0].astype(np.float64)
            return found

        return Ready(lambda: tf.attention(q, kv_cache=cache), output)


def adapter() -> AttentionAdapter:
    """The adapter of this module."""
    return Tilefuse()
