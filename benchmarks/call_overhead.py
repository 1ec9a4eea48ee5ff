"""What a call from Python costs beyond its kernel."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable

import ml_dtypes
import numpy as np
from peers.tilefuse_packed import to_layer
from peers.weights import make_case

import tilefuse as tf
from tilefuse.arrays import FloatArray, view_rows
from tilefuse.runtime import resolve_device

K = N = 2048
CALLS = 200
ROUNDS = 80


def call_overhead(calls: int = CALLS, rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds of `tf.gemv` on one row of K = N = 2048, W4, and of its parts: ``call``, ``kernel`` and ``overhead``.

    The kernel is the device's own call less one of no rows, which does all but the kernel. The layer stays in the
    cache. Medians over many short rounds of means over calls, all taken in turn; the overhead's is that of the
    differences within a round, which are far below what the kernel's time drifts by in between.
    """
    layer = to_layer(make_case(K, N, 1).schemes["w4g128"])
    x = np.random.default_rng(0).standard_normal((1, K)).astype(ml_dtypes.bfloat16)
    y = np.zeros((1, N), ml_dtypes.bfloat16)
    device = resolve_device("cpu")

    def rows(array: np.ndarray) -> FloatArray:
        view = view_rows(array, "x")
        assert view is not None
        return view

    one, none = (rows(x), rows(y)), (rows(x[:0]), rows(y[:0]))
    parts: dict[str, Callable[[], object]] = {
        "call": lambda: tf.gemv(x[0], layer),
        "device": lambda: device.matmul(one[0], layer, one[1]),
        "nothing": lambda: device.matmul(none[0], layer, none[1]),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            times[name].append(timeit.timeit(part, number=calls) / calls)
    found = {name: statistics.median(each) for name, each in times.items()}
    rest = [call - device + nothing for call, device, nothing in zip(*times.values(), strict=True)]
    return {"call": found["call"], "kernel": found["device"] - found["nothing"], "overhead": statistics.median(rest)}
