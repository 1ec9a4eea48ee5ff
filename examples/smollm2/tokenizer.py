"""SmolLM2's tokenizer and chat format, built from what the GGUF file stores."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from smollm2.gguf_model import GgufModel

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system message that the model was tuned with."""

_CONTROL = 3
"""``tokenizer.ggml.token_type`` of tokens that are matched whole and never made by merging."""


def load_tokenizer(model: GgufModel) -> Tokenizer:
    """A byte-level BPE tokenizer from the file's vocabulary and merges.

    Raises:
        ValueError: The file's tokenizer is of another kind.
    """
    kind = (model.field("tokenizer.ggml.model"), model.field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind}: this builds ('gpt2', 'smollm') only")
    tokens: list[str] = model.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in model.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # "smollm": every digit is a piece of its own, the rest is cut as GPT-2 does.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = model.field("tokenizer.ggml.token_type")
    control = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def chat(question: str, system: str = SYSTEM) -> str:
    """The text of a conversation's first turn (ChatML), up to where the answer starts."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
