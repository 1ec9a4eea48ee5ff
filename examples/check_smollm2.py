"""The main job of tilefuse on a small real model: quantise, pack, check every layer, generate text.

    python examples/check_smollm2.py ["a question"]

Everything that multiplies by a weight matrix is tilefuse; norms, attention and activations are NumPy.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from smollm2.convert import VARIANTS, Build, build, calibrate
from smollm2.evaluate import Reply, ask, log_softmax, quality
from smollm2.gguf_model import GgufModel, find_gguf
from smollm2.llama import Floats, KVCache, Llama
from smollm2.measure import CHECK_EVERY, Calls, Checked, Packed
from smollm2.report import Result, Sizes, layer_table, megabytes, resident, summary_table, where
from smollm2.tokenizer import load_tokenizer

import tilefuse as tf

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / "examples" / "smollm2" / "texts"
PREFILL = 512
"""Tokens of the passage; every layer is run on the activations of all of them at once."""

NOTES = f"""
Errors are |y - reference| / (|x| @ |W|) on the activations of {PREFILL} tokens, every {CHECK_EVERY}th compared (gemv:
the last one). GFLOP/s: those tokens in one call; GB/s: packed bytes read while answering, as called from Python.
KL (nats), the likeliest token and perplexity: on the same tokens, against fp32. packed: all tiles, with the padding
of the array's format; read: those that the CPU reads. resident: the process, mapped files and fp32 embedding included.
"""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run SmolLM2-135M-Instruct on tilefuse.")
    parser.add_argument("question", nargs="?", default="Explain in a few sentences why the sky is blue.")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer (default: 48)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("TILEFUSE_CACHE", ROOT / "build")) / "smollm2",
        help="folder for checkpoints and packed files (default: $TILEFUSE_CACHE/smollm2, else build/smollm2)",
    )
    parser.add_argument("--fresh", action="store_true", help="quantise and pack again what is in the cache")
    return parser.parse_args()


def measure(
    built: Build, model: Llama, passage: list[int], original: Floats, answer: Callable[[Llama], Reply]
) -> Result:
    """Check every layer on the passage's activations, compare predictions with the original's, then answer."""
    checked = Checked(Packed(built.layers), built.source)
    dataclasses.replace(model, linear=checked).logits(passage)

    packed = Packed(built.layers)
    ours = dataclasses.replace(model, linear=packed)
    start = time.perf_counter()
    hidden = ours.hidden(passage, KVCache(model.config, len(passage)))
    seconds = time.perf_counter() - start
    predictions = quality(log_softmax(packed("lm_head", hidden)), original, passage)
    prefill, packed.prefill = packed.prefill, defaultdict(Calls)
    return Result(
        variant=built.variant,
        sizes=Sizes.of(built),
        gemm=checked.gemm,
        gemv=checked.gemv,
        prefill=prefill,
        reply=answer(ours),
        decode=packed.decode,
        quality=predictions,
        prefill_rate=len(passage) / seconds,
        resident=resident(),
    )


def main() -> None:
    args = arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    path = find_gguf()
    gguf = GgufModel(path)
    tokenizer = load_tokenizer(gguf)
    config = gguf.config
    console.print(f"tilefuse {tf.__version__} on {where()}", highlight=False)
    console.print(
        f"{path.name}: {megabytes(path.stat().st_size)}, {config.num_hidden_layers} blocks\n", highlight=False
    )

    def read(name: str) -> list[int]:
        ids: list[int] = tokenizer.encode((TEXTS / name).read_text(encoding="utf-8")).ids
        return ids[-PREFILL:]

    passage = read("passage.txt")
    embedding, norms = gguf.weight("model.embed_tokens"), gguf.norms()
    results = []
    with Progress(console=console, transient=True) as progress:
        step = progress.add_task("reading two texts in fp32", total=None)
        weights = {name: gguf.weight(name) for name in config.linear_names()} | {"lm_head": embedding}
        fp32 = Llama(config, embedding, norms, lambda name, x: x @ weights[name].T)
        original = log_softmax(fp32.logits(passage))
        importance = calibrate(fp32, read("calibration.txt"))
        layers = len(weights)
        weights.clear()

        for variant in VARIANTS:
            progress.reset(step, description=f"{variant.name}: quantise and pack", total=2 * layers)
            built = build(gguf, variant, args.cache, importance, lambda name: progress.advance(step), args.fresh)
            progress.reset(step, description=f"{variant.name}: check every layer, answer", total=None)
            model = Llama(config, embedding, norms, Packed(built.layers))
            results.append(
                measure(built, model, passage, original, lambda m: ask(m, tokenizer, args.question, args.tokens))
            )

    for result in results:
        console.print(layer_table(result), "")
    console.print(summary_table(results, quality(original, original, passage)))
    console.print(NOTES, highlight=False)
    for result in results:
        console.print(f"[bold]{result.variant.name}[/]  {escape(result.reply.text)}\n", highlight=False)


if __name__ == "__main__":
    main()
