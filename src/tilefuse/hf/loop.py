"""The loop that makes tokens one by one, for `transformers`' ``generate(custom_generate=...)``.

Its own, at a token, builds masks, positions and the sequence so far anew, and looks for the end with operators that
torch gives to its threads; beside a small model that costs as much as a block or two. The tokens are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationMode
from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from tilefuse.hf.sequence import Sequence

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def suits(model: Any) -> bool:
    """Whether the model's own settings have a token follow the other: no beams, say."""
    return model.generation_config.get_generation_mode() in _MODES


def sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: Iterable[Any],
    stopping_criteria: Iterable[Any],
    generation_config: Any,
    streamer: Any = None,
    **given: Any,
) -> Any:
    """The sequence [1, T] continued: what ``_sample`` of transformers returns, which takes over what this can't do."""
    name = "cache" if "cache" in given else "past_key_values"
    cache, mask = given.get(name), given.get("attention_mask")
    criteria = list(stopping_criteria)
    if (
        input_ids.shape[0] != 1
        or cache is None
        or cache.get_seq_length()
        or not given.get("use_cache")
        or (mask is not None and (mask.shape != input_ids.shape or not mask.all()))
        or not given.keys() <= {name, "attention_mask", "use_cache", "logits_to_keep", "position_ids"}
        or generation_config.return_dict_in_generate
        or any(type(criterion) not in (MaxLengthCriteria, EosTokenCriteria) for criterion in criteria)
    ):
        return type(model)._sample(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            **({} if streamer is None else {"streamer": streamer}),
            **given,
        )
    # Nothing is hidden, and positions are those of the cache: neither is passed on.
    longest = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=math.inf)
    ends = {int(end) for c in criteria if type(c) is EosTokenCriteria for end in c.eos_token_id.reshape(-1)}
    processors = [_MinNewTokens(p) if type(p) is MinNewTokensLengthLogitsProcessor else p for p in logits_processor]
    only_lengths = all(isinstance(processor, _MinNewTokens) for processor in processors)

    parts = input_ids.split(generation_config.prefill_chunk_size or input_ids.shape[1], dim=1)
    shown: dict[str, Any] = {name: cache, "use_cache": True, "return_dict": True}
    kept = {key: given[key] for key in ("logits_to_keep",) if key in given}
    for part in parts:
        logits = model(input_ids=part, **shown, **kept).logits
    sequence = Sequence.of(model, cache) if input_ids.device.type == "cpu" else None
    tokens: list[int] = []
    try:
        while True:
            scores = logits[:, -1].to(copy=True, dtype=torch.float32, device=input_ids.device)
            so_far = input_ids
            if not only_lengths and tokens:
                so_far = torch.cat([input_ids, torch.tensor([tokens], device=input_ids.device)], dim=1)
            for processor in processors:
                if isinstance(processor, _MinNewTokens):
                    processor.apply(scores, input_ids.shape[1] + len(tokens))
                else:
                    scores = processor(so_far, scores)
            tokens.append(_next(scores, generation_config.do_sample))
            if streamer is not None:
                streamer.put(torch.tensor(tokens[-1:]))
            if tokens[-1] in ends or input_ids.shape[1] + len(tokens) >= longest:
                break
            found = None if sequence is None else sequence.logits(tokens[-1])
            if found is None:
                if sequence is not None:
                    sequence.finish()
                    sequence = None
                token = torch.tensor([tokens[-1:]], device=input_ids.device)
                found = model(input_ids=token, **shown).logits
            logits = found
    finally:
        if sequence is not None:
            sequence.finish()
    if streamer is not None:
        streamer.end()
    return torch.cat([input_ids, torch.tensor([tokens], device=input_ids.device)], dim=1)


def _next(scores: Tensor, draw: bool) -> int:
    """The next token, of ``scores`` [1, vocabulary]."""
    if draw:
        return int(torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1))
    if scores.device.type == "cpu":  # without waking torch's threads; the first of several, as torch's
        return int(scores.numpy().argmax())
    return int(scores.argmax(dim=-1))


class _MinNewTokens:
    """transformers' processor, which compares the whole vocabulary with the ends."""

    def __init__(self, theirs: MinNewTokensLengthLogitsProcessor) -> None:
        self.until = theirs.prompt_length_to_skip + theirs.min_new_tokens
        self.ends = theirs.eos_token_id.reshape(-1)

    def apply(self, scores: Tensor, length: int) -> None:
        """Rules the ends out in ``scores`` [1, vocabulary] of a sequence of ``length`` tokens, if it is too short."""
        if length < self.until:
            scores[:, self.ends] = -math.inf
