"""Texts as tokens, in rows of one length."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from tilefuse.awq.stream import libraries, said
from tilefuse.errors import FormatError

ROW = 512
"""Tokens of a row: long enough for attention to matter, short enough for a few KB to give several."""


def calibration_text() -> str:
    """The text that scales are searched on unless another is given; written for this package."""
    return _text("calibration.txt")


def evaluation_text() -> str:
    """The text that perplexity is measured on unless another is given; it shares nothing with the other."""
    return _text("evaluation.txt")


def _text(name: str) -> str:
    return (files("tilefuse.awq") / "texts" / name).read_text(encoding="utf-8")


def rows(folder: Path, text: str, length: int = ROW) -> Any:
    """The tokens of a text, torch int64 [B, length]; what does not fill a row is left out, unless it is all there is.

    Every row starts as the tokenizer starts a text: models that expect a token there predict badly without it.

    Raises:
        FormatError: The text has fewer than two tokens, or the folder has no tokenizer that can be read.
    """
    torch, transformers = libraries()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # of any type, by what is missing or wrong
        raise FormatError(
            f"{folder}: no tokenizer that transformers can read, and a text needs one; copy the model's tokenizer "
            f"files there (--method rtn without --report needs none). transformers says: {said(error)}"
        ) from error
    bare = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer("", add_special_tokens=True)["input_ids"]
    if tokenizer.eos_token_id is not None:
        start = [token for token in start if token != tokenizer.eos_token_id or token == tokenizer.bos_token_id]
    if len(bare) < 2:
        raise FormatError(f"the text has {len(bare)} tokens; at least 2 are needed, and a few thousand are useful")
    step = min(length - len(start), len(bare))
    return torch.tensor([start + bare[at : at + step] for at in range(0, len(bare) - step + 1, step)])
