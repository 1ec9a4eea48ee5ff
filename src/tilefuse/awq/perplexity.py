"""How well a checkpoint predicts a text."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tilefuse.awq.stream import StreamedModel, Weights
from tilefuse.awq.text import evaluation_text, rows
from tilefuse.formats import open_checkpoint
from tilefuse.formats.checkpoint import Checkpoint

_LARGEST = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        value: ``exp`` of the mean negative log-likelihood of a token given those before it in its row.
        tokens: Tokens predicted.
    """

    value: float
    tokens: int


def float_weights(checkpoint: Checkpoint) -> Weights:
    """The tensors of a checkpoint by name, those of quantised layers dequantised."""
    quantized = {info.name for info in checkpoint.linears() if info.quantized}

    def get(name: str) -> npt.NDArray[Any]:
        layer = name.removesuffix(".weight")
        return checkpoint.linear(layer).dequantize().T if layer in quantized else checkpoint.tensor(name)

    return get


def perplexity(
    folder: str | Path,
    text: str | None = None,
    *,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The perplexity of a checkpoint, quantised or not, on a text. All arithmetic is float32; one block is in memory.

    Args:
        folder: Folder of the checkpoint, tokenizer included.
        text: The text; None for the one that comes with the package.
        device: torch device to run on.
        progress: Called as (blocks done, blocks in all).

    Raises:
        ImportError: torch or transformers is not installed.
        TileFuseError: The checkpoint is damaged or of a kind that is not read, or the text is too short.
    """
    folder = Path(folder)
    model = StreamedModel(folder, float_weights(open_checkpoint(folder)), device)
    ids = rows(folder, evaluation_text() if text is None else text)
    count = len(model.blocks)
    hidden = model.hidden(ids, lambda index, block: progress(index + 1, count) if progress else None)
    found = model.log_likelihoods(hidden[:, :-1].reshape(-1, hidden.shape[-1]), ids[:, 1:].reshape(-1))
    mean = -float(found.mean())
    return Perplexity(math.exp(mean) if mean < _LARGEST else math.inf, found.numel())
