"""The process that one library generates in: answers `generation.py` line by line, as `peers.worker` does.

python benchmarks/generation_worker.py tilefuse|llama.cpp
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

IDS = np.random.default_rng(3).integers(100, 40000, 8192).tolist()
"""Tokens of prompts: which ones doesn't change how long they take."""


class TileFuse:
    """transformers on tilefuse's layers."""

    def load(self, path: str, threads: int, head: int) -> dict[str, Any]:
        import torch

        from tilefuse import set_num_threads
        from tilefuse.hf.generation import load

        torch.set_num_threads(threads)
        set_num_threads(threads)
        choices: dict[str, Any] = {"head": head} if head else {}
        self.loaded = load(path, device="cpu", cache=Path(path).parent / "packed", **choices)
        self.torch = torch
        return {"seconds": self.loaded.seconds}

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("tilefuse", "torch", "transformers")}

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Seconds of a prompt up to its last logits."""
        ids = self.torch.tensor([IDS[:tokens]])
        with self.torch.inference_mode():
            start = time.perf_counter()
            self.loaded.model(ids, use_cache=True, logits_to_keep=1)
            return {"seconds": time.perf_counter() - start}

    def decode(self, context: int, tokens: int) -> dict[str, Any]:
        """Seconds of a token after a prompt, as `tilefuse generate` makes them."""
        from tilefuse.hf.generation import generate

        ids = self.torch.tensor([IDS[:context]])
        # The first token is the prompt's.
        done = generate(self.loaded, ids, max_new_tokens=tokens + 1, min_new_tokens=tokens + 1)
        return {"seconds": 1 / done.decode_rate}


class LlamaCpp:
    """llama.cpp through llama-cpp-python."""

    def load(self, path: str, threads: int, head: int) -> dict[str, Any]:
        import llama_cpp

        start = time.perf_counter()
        self.model = llama_cpp.Llama(
            path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
        )
        return {"seconds": time.perf_counter() - start}

    def versions(self) -> dict[str, str]:
        import llama_cpp

        return {"llama-cpp-python": llama_cpp.__version__}

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Seconds of a prompt up to its last logits."""
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(IDS[:tokens])
        return {"seconds": time.perf_counter() - start}

    def decode(self, context: int, tokens: int) -> dict[str, Any]:
        """Seconds of a token after a prompt, the likeliest each time."""
        self.prefill(context)
        start = time.perf_counter()
        for _ in range(tokens):
            self.model.eval([int(np.argmax(self.model.scores[self.model.n_tokens - 1]))])
        return {"seconds": (time.perf_counter() - start) / tokens}


def memory() -> dict[str, Any]:
    """Bytes resident at most so far, and private ones now: mapped files are in the first only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {key: value for key, _, value in (line.partition(":") for line in lines)}
    return {key: int(fields[field].split()[0]) * 1024 for key, field in (("peak", "VmHWM"), ("private", "RssAnon"))}


def main() -> None:
    """Answers requests until there are none."""
    # What libraries print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    library: Any = {"tilefuse": TileFuse, "llama.cpp": LlamaCpp}[sys.argv[1]]()
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        try:
            answer = memory() if what == "memory" else getattr(library, what)(**request)
        except ImportError as error:
            answer = {"missing": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
