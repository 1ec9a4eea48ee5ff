"""What is measured of a model besides its single layers: how well it predicts, and how fast it answers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from smollm2.llama import Floats, Llama
from smollm2.tokenizer import chat


@dataclass(frozen=True)
class Reply:
    """Greedy text and how fast it came; ``decode_seconds`` is the time from the first token to the last."""

    text: str
    tokens: int
    decode_seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second after the first."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 else 0.0


def ask(model: Llama, tokenizer: Tokenizer, question: str, count: int) -> Reply:
    """Answer a question with at most ``count`` tokens."""
    ids = tokenizer.encode(chat(question)).ids
    times, tokens = [], []
    for token in model.generate(ids, count, stop=tokenizer.token_to_id("<|im_end|>")):
        times.append(time.perf_counter())
        tokens.append(token)
    return Reply(tokenizer.decode(tokens), len(tokens), times[-1] - times[0] if times else 0.0)


def log_softmax(logits: Floats) -> Floats:
    """Natural logarithms of the probabilities, over the last axis."""
    shifted: Floats = logits - logits.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


@dataclass(frozen=True)
class Quality:
    """How a model predicts a text.

    Attributes:
        kl: Mean Kullback-Leibler divergence from the original's predictions, in nats.
        agreement: Fraction of positions where its likeliest token is the original's.
        perplexity: ``exp`` of the mean negative log-probability of the token that follows.
    """

    kl: float
    agreement: float
    perplexity: float


def quality(log_p: Floats, original: Floats, ids: list[int]) -> Quality:
    """Compare log-probabilities [T, vocab] after each of the T ``ids`` with the original's."""
    kl = float((np.exp(original) * (original - log_p)).sum(axis=-1).mean())
    agreement = float((log_p.argmax(axis=-1) == original.argmax(axis=-1)).mean())
    following = log_p[np.arange(len(ids) - 1), ids[1:]]
    return Quality(kl, agreement, float(np.exp(-following.mean())))
