"""How long the emulator itself takes on this machine: measured, unlike the times that it models.

    python benchmarks/emulator_speed.py

A run is all of it: the activations staged, the design built, every byte moved and every kernel called. The first run of
a kernel counts its cycles, and is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
from measure import cpu_model, default_threads

import tilefuse as tf
from tilefuse import plan
from tilefuse.emulator.session import Session

SHAPES = [(2048, 2048, 256, 20.0), (256, 2048, 2048, 20.0), (1, 4096, 4096, 5.0)]
"""(M, K, N, seconds that it should stay below on two cores); M = 1 is a GEMV."""

RUNS = 3


def seconds(m: int, k: int, n: int) -> float:
    """Of the fastest of `RUNS` runs with 4-bit weights in groups of 128."""
    rng = np.random.default_rng(0)
    layer = tf.pack(tf.quantize_linear(rng.standard_normal((k, n), dtype=np.float32)))
    x = rng.standard_normal((m, k), dtype=np.float32).astype(ml_dtypes.bfloat16)
    chosen = plan.gemv(layer.layout) if m == 1 else plan.gemm(layer.layout, m)
    session = Session(chosen)

    def run() -> float:
        start = time.perf_counter()
        session.run(chosen, x, layer)
        return time.perf_counter() - start

    run()
    return min(run() for _ in range(RUNS))


def lines() -> Iterator[str]:
    """The table."""
    yield f"{cpu_model()}, {default_threads()} CPUs; the fastest of {RUNS} runs, measured"
    yield "| M x K x N | seconds | target |"
    yield "|---|---:|---:|"
    for m, k, n, target in SHAPES:
        yield f"| {m} x {k} x {n} | {seconds(m, k, n):.2f} | {target:g} |"


if __name__ == "__main__":
    for line in lines():
        print(line, flush=True)
