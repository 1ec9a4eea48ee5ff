"""tilefuse's CPU matmul against torch's: speed, share of what the machine can do, accuracy.

    python benchmarks/matmul.py                       # a subset of the shapes; writes docs/benchmarks/matmul.md
    python benchmarks/matmul.py --shapes all
    python benchmarks/matmul.py --quick               # one shape, few rounds; prints only

Method. All in one process, with as many threads for torch as for tilefuse. Contenders take turns (ABAB...), as do the
probes of the machine's limits; figures are medians over rounds of means over calls. Weights are cold, for every M:
every contender goes through distinct copies of its weights that together exceed four times the last-level cache. Both
libraries hold the same codes: 4 bits with zero points in groups of 128, and 8 bits symmetric per output channel. Inputs
are bf16 (fp32 for the fp32 matmul). tilefuse's weights lie where `tilefuse.pack` puts them, in huge pages if the system
grants them; torch's where torch puts them.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from measure import (
    Array,
    Contender,
    Limits,
    Probes,
    copies_beyond_cache,
    cpu_model,
    default_threads,
    gate_error,
    interleave,
    last_level_cache_bytes,
)

if TYPE_CHECKING:
    from tilefuse import QuantizedLinear

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "benchmarks" / "matmul.md"

# K x N of the linear layers of common models of 1 to 8 billion parameters.
SHAPES = (
    "4096x4096",
    "4096x1024",
    "4096x14336",
    "14336x4096",
    "2048x2048",
    "2048x11008",
    "11008x2048",
    "2048x16384",
    "16384x2048",
)
SUBSET = ("4096x4096", "4096x14336", "2048x2048")
BATCHES = (1, 16, 128, 512)
GROUP = 128

ACCURACY_ROWS = 16
"""Rows of the inputs that the float64 reference covers: rows are computed alike, and the reference is slow."""


@dataclass(frozen=True)
class Weights:
    """One matrix W [K, N] in each of the schemes."""

    w4: QuantizedLinear
    """4 bits, zero points, groups of 128."""
    w8: QuantizedLinear
    """8 bits, symmetric, one scale an output channel."""


@dataclass(frozen=True)
class Row:
    """What was measured of one contender on one problem."""

    shape: str
    m: int
    name: str
    seconds: float
    weight_gb_per_s: float
    gflop_per_s: float
    share_of_limit: float
    error_max: float
    error_mean: float
    round_seconds: list[float]


def make_weights(k: int, n: int, rng: np.random.Generator) -> Weights:
    """Random codes, with scales that keep the outputs for normal inputs near 1."""
    from tilefuse import CodeOrder, QuantizedLinear

    def layer(bits: int, group: int, zeros: Array) -> QuantizedLinear:
        spread = (1 << bits) / np.sqrt(12)  # standard deviation of uniform codes
        scales = rng.uniform(0.5, 1.5, zeros.shape) / (spread * np.sqrt(k))
        return QuantizedLinear(
            name=f"{k}x{n}-w{bits}",
            format="random",
            k=k,
            n=n,
            bits=bits,
            group=group,
            codes=rng.integers(0, 1 << bits, (k, n), dtype=np.uint8),
            order=CodeOrder.KN,
            scales=scales.astype(ml_dtypes.bfloat16),  # what both libraries hold: nothing left to round
            zeros=zeros,
            symmetric=bits == 8,
        )

    return Weights(
        w4=layer(4, GROUP, rng.integers(5, 11, (-(-k // GROUP), n), dtype=np.uint8)),
        w8=layer(8, k, np.full((1, n), 128, np.uint8)),
    )


def make_inputs(m: int, k: int, rng: np.random.Generator) -> Array:
    """Normal inputs, bfloat16 [M, K]."""
    return rng.standard_normal((m, k), dtype=np.float32).astype(ml_dtypes.bfloat16)


# --- tilefuse ---


def tilefuse_contenders(weights: Weights, cache_bytes: int) -> list[Contender]:
    """tilefuse on the packed 4-bit and 8-bit weights."""
    import tilefuse as tf

    def product(layer: tf.PackedLinear) -> Callable[[Array], Array]:
        return lambda x: tf.gemv(x, layer) if x.ndim == 1 else tf.gemm(x, layer)

    def contender(source: QuantizedLinear) -> Contender:
        first = tf.pack(source)
        layout = first.layout
        nbytes = layout.k_tiles_used * layout.n_tiles_used * layout.tile_bytes  # the CPU reads no padding tiles
        layers = [first, *(tf.pack(source) for _ in range(copies_beyond_cache(nbytes, cache_bytes) - 1))]
        return Contender(
            name=f"tilefuse W{source.bits}",
            calls=[product(layer) for layer in layers],
            weight_bytes=nbytes,
            inputs=lambda x: x[0] if len(x) == 1 else x,
            outputs=lambda y: np.atleast_2d(y).astype(np.float64),
            weights=lambda: first.dequantize().astype(np.float32),
        )

    return [contender(weights.w4), contender(weights.w8)]


# --- torch ---


def import_torch() -> Any:
    """torch, or an exit that says how to get it."""
    try:
        import torch
    except ImportError:
        raise SystemExit("this benchmark compares with torch, which is missing: pip install torch") from None
    return torch


def torch_contenders(weights: Weights, cache_bytes: int) -> list[Contender]:
    """torch's int4 and int8 weight-only kernels, and its dense matmul in bf16 and fp32."""
    torch = import_torch()

    def bf16(array: Array) -> Any:
        return torch.from_numpy(array.astype(np.float32)).to(torch.bfloat16)

    def fp32(tensor: Any) -> Array:
        array: Array = tensor.float().numpy()
        return array

    def bind(product: Callable[..., Any], operands: Sequence[Any]) -> Callable[[Any], Any]:
        return lambda x: product(x, *operands)

    def contender(
        name: str,
        operands: Sequence[Any],
        product: Callable[..., Any],
        dequantized: Callable[[], Array],
        inputs: Callable[[Array], Any] = bf16,
    ) -> Contender:
        nbytes = sum(t.numel() * t.element_size() for t in operands)
        copies = [operands]
        copies += [[t.clone() for t in operands] for _ in range(copies_beyond_cache(nbytes, cache_bytes) - 1)]
        return Contender(
            name=name,
            calls=[bind(product, copy) for copy in copies],
            weight_bytes=nbytes,
            inputs=inputs,
            outputs=lambda y: fp32(y).astype(np.float64),
            weights=dequantized,
        )

    # (q - z) s is held as (q - 8) s + b, with b rounded to bf16.
    w4 = weights.w4
    codes4 = w4.codes.astype(np.int32)
    scales4 = bf16(w4.scales)
    shift4 = bf16((8 - np.asarray(w4.zeros, np.float32)) * w4.scales.astype(np.float32))
    group_of = np.arange(w4.k) // GROUP
    int4 = contender(
        "torch int4pack",
        [
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(np.ascontiguousarray(codes4.T)), 1),
            torch.stack([scales4, shift4], dim=2),
        ],
        lambda x, codes, scales: torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, GROUP, scales),
        lambda: (codes4 - 8) * fp32(scales4)[group_of] + fp32(shift4)[group_of],
    )

    w8 = weights.w8
    signed8 = w8.codes.astype(np.int16) - 128
    dense = signed8 * w8.scales.astype(np.float32)
    int8 = contender(
        "torch int8pack",
        [torch.from_numpy(np.ascontiguousarray(signed8.T.astype(np.int8))), bf16(w8.scales[0])],
        torch.ops.aten._weight_int8pack_mm,
        lambda: dense,
    )

    dense32 = torch.from_numpy(np.ascontiguousarray(dense.T))
    dense16 = dense32.to(torch.bfloat16)
    return [
        int4,
        int8,
        contender("torch bf16", [dense16], lambda x, w: x @ w.t(), lambda: fp32(dense16).T),
        contender("torch fp32", [dense32], lambda x, w: x @ w.t(), lambda: dense, lambda x: bf16(x).float()),
    ]


# --- running and reporting ---


def run_case(
    contenders: Sequence[Contender],
    x: Array,
    limits: Limits,
    sample: Callable[[Limits], object],
    rounds: int,
    seconds: float,
) -> list[Row]:
    """Times the contenders on one x [M, K]; ``sample`` probes the machine before every round and adds to ``limits``."""
    here = Limits()
    times = interleave(contenders, x, rounds, seconds, lambda: sample(here))
    limits.extend(here)
    checked = x[:ACCURACY_ROWS]
    rows = []
    for contender in contenders:
        elapsed = statistics.median(times[contender.name])
        weights = contender.weights()
        operations = 2 * len(x) * weights.size
        y = contender.outputs(contender.calls[0](contender.inputs(x)))
        error_max, error_mean = gate_error(y[:ACCURACY_ROWS], checked, weights)
        rows.append(
            Row(
                shape="x".join(map(str, weights.shape)),
                m=len(x),
                name=contender.name,
                seconds=elapsed,
                weight_gb_per_s=contender.weight_bytes / elapsed / 1e9,
                gflop_per_s=operations / elapsed / 1e9,
                share_of_limit=here.best_seconds(contender.weight_bytes, operations) / elapsed,
                error_max=error_max,
                error_mean=error_mean,
                round_seconds=times[contender.name],
            )
        )
    return rows


PEER_OF = {"tilefuse W4": "torch int4pack", "tilefuse W8": "torch int8pack"}
DENSE = "torch bf16"


def speed_ratios(rows: Iterable[Row]) -> dict[tuple[str, int, str], tuple[float, float]]:
    """For each tilefuse row, how many times faster it is than torch's kernel of the same bits and than dense bf16."""
    by_key = {(row.shape, row.m, row.name): row for row in rows}
    ratios = {}
    for (shape, m, name), row in by_key.items():
        if name in PEER_OF:
            peer, dense = by_key[shape, m, PEER_OF[name]], by_key[shape, m, DENSE]
            ratios[shape, m, name] = (peer.seconds / row.seconds, dense.seconds / row.seconds)
    return ratios


def describe_run(threads: int, rounds: int, limits: Limits) -> dict[str, str]:
    """Where, when and with what it was measured."""
    arithmetic = ", ".join(
        f"{kind} {statistics.median(rates) / 1e9:.0f} GFLOP/s" for kind, rates in limits.arithmetic.items()
    )
    low, *_, high = sorted(limits.read) if len(limits.read) > 1 else limits.read * 2
    return {
        "Date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "CPU": cpu_model(),
        "Threads": str(threads),
        "System": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "Versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("tilefuse", "torch", "numpy")),
        "Rounds": str(rounds),
        "Measured limits": f"reads from huge pages {limits.bandwidth / 1e9:.1f} GB/s "
        f"({low / 1e9:.1f} to {high / 1e9:.1f}), {arithmetic}",
    }


def report(rows: Sequence[Row], facts: dict[str, str]) -> str:
    """The results as Markdown."""
    lines = [
        "# Matmul on the CPU, against torch",
        "",
        "Written by `benchmarks/matmul.py`; its head states the method.",
        "",
    ]
    lines += ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in facts.items())]
    lines += [
        "",
        "*Speed-up* is the time of torch's kernel for weights of as many bits over tilefuse's, then the time of",
        "torch's dense bf16 matmul over tilefuse's: above 1, tilefuse is faster. *Of limit* is the time that reading",
        "the weights at the measured bandwidth or the arithmetic at the measured peak would take, whichever is longer,",
        "over the time taken. *Error* is `|y - x W| / (|x| |W|)` against float64 on the contender's own dequantised",
        "weights, largest and mean.",
    ]
    ratios = speed_ratios(rows)
    for m in dict.fromkeys(row.m for row in rows):
        lines += ["", f"## M = {m}", ""]
        lines += ["| K x N | | us | GB/s of weights | GFLOP/s | of limit | speed-up | error max | mean |"]
        lines += ["| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for row in rows:
            if row.m != m:
                continue
            ratio = ratios.get((row.shape, row.m, row.name))
            speed_up = f"{ratio[0]:.2f}, {ratio[1]:.2f}" if ratio else ""
            cells = [row.shape, row.name, f"{row.seconds * 1e6:.0f}"]
            cells += [f"{row.weight_gb_per_s:.1f}", f"{row.gflop_per_s:.0f}", f"{row.share_of_limit:.0%}"]
            cells += [speed_up, f"{row.error_max:.1e}", f"{row.error_mean:.1e}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


def parse_shape(text: str) -> tuple[int, int]:
    """``(K, N)`` of a text such as 4096x1024; ValueError for another."""
    k, n = map(int, text.split("x"))
    if min(k, n) < 1:
        raise ValueError(text)
    return k, n


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", default=",".join(SUBSET), help="K x N, comma-separated, or 'all' (default: %(default)s)"
    )
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="values of M (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=default_threads(), help="default: all CPUs (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.15, help="at least, for one turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="4096x4096, 3 rounds, no file unless --output")
    parser.add_argument("--output", type=Path, help=f"where the tables go (default: {OUTPUT.relative_to(ROOT)})")
    parser.add_argument("--json", type=Path, help="write every figure there, too")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.shapes, arguments.rounds = "4096x4096", 3
    elif arguments.output is None:
        arguments.output = OUTPUT
    names = SHAPES if arguments.shapes == "all" else arguments.shapes.split(",")
    try:
        arguments.shapes = [parse_shape(name) for name in names]
        arguments.batches = [int(m) for m in arguments.batches.split(",")]
    except ValueError:
        parser.error("--shapes takes K x N as in 4096x1024, --batches whole numbers, both comma-separated")
    if min(arguments.threads, arguments.rounds, *arguments.batches) < 1:
        parser.error("--threads, --rounds and --batches must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    # Before either library is imported: both size their pools then.
    os.environ["TILEFUSE_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import_torch().set_num_threads(arguments.threads)

    rng = np.random.default_rng(0)
    cache_bytes = last_level_cache_bytes()
    limits = Limits()
    probes = Probes()
    rows: list[Row] = []
    for k, n in arguments.shapes:
        weights = make_weights(k, n, rng)
        contenders = [*tilefuse_contenders(weights, cache_bytes), *torch_contenders(weights, cache_bytes)]
        for m in arguments.batches:
            print(f"{k}x{n}, M = {m}", file=sys.stderr, flush=True)
            x = make_inputs(m, k, rng)
            rows += run_case(contenders, x, limits, probes.sample, arguments.rounds, arguments.seconds)
    facts = describe_run(arguments.threads, arguments.rounds, limits)
    text = report(rows, facts)
    print(text)
    if arguments.output is not None:
        write_atomically(arguments.output, text)
    if arguments.json is not None:
        record = {"facts": facts, "limits": asdict(limits), "rows": [asdict(row) for row in rows]}
        write_atomically(arguments.json, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
