"""What a mask of transformers stands for: lengths and a window, which attention takes in its place.

A mask is read, not trusted: its structure is guessed from a few rows and then compared with every element. So what
transformers or anyone else puts into it, a result is never that of another mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

_ROWS = 1024
"""Queries compared at a time, so that comparing takes little memory."""


@dataclass(frozen=True)
class Span:
    """What the queries of one sequence see: query i, keys from ``start`` to below ``stop``, none after ``i + offset``.

    Attributes:
        window: Keys up to that position that it sees at most, None for all.
    """

    start: int
    stop: int
    offset: int
    window: int | None = None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for ``attn_implementation="tilefuse"``, as `transformers.AttentionMaskInterface` calls it.

    None for plain causal attention aligned to the end of the keys, chunks of a prefill included; else sdpa's bool
    [B, 1, q_length, kv_length].
    """
    eager = not torch.compiler.is_compiling()
    if (
        eager
        and allow_is_causal_skip
        and mask_function is causal_mask_function
        and local_size is None
        and not use_vmap
        and isinstance(q_offset, int)
        and isinstance(kv_offset, int)
        and kv_offset == 0
        and q_offset + q_length == kv_length
        and (attention_mask is None or bool(attention_mask[:, :kv_length].all()))
    ):
        return None
    # None means the above here; with an empty static cache it would mean something else to sdpa.
    skip = allow_is_causal_skip and not (eager and 1 < q_length < kv_length)
    found: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=skip,
        use_vmap=use_vmap,
        **kwargs,
    )
    return found


def spans_of(mask: Tensor, batch: int) -> list[Span] | str:
    """The spans of a batch, or why the mask is none of lengths and a window. Kept with the mask, for the next layers.

    Args:
        mask: [batch or 1, heads or 1, queries, keys], True where a query sees a key.
        batch: Sequences.
    """
    version = None if mask.is_inference() else mask._version
    kept = mask.__dict__.get("_tilefuse_spans")
    if kept is None or kept[0] != version:
        kept = mask.__dict__["_tilefuse_spans"] = version, _read(mask)
    found: list[Span] | str = kept[1]
    if isinstance(found, str):
        return found
    if len(found) not in (1, batch):
        return f"a mask of {len(found)} sequences for {batch}"
    return found * (batch // len(found))


def _read(mask: Tensor) -> list[Span] | str:
    if mask.dtype is not torch.bool:
        return f"a mask of {mask.dtype}, not bool"
    if mask.dim() != 4:
        return f"a mask of {mask.dim()} axes"
    if mask.shape[1] != 1 and mask.stride(1):
        return "a mask of its own for each head"
    spans = []
    for each in mask[:, 0]:
        span = _span(each)
        if span is None:
            return "a mask that is not of lengths and a window"
        spans.append(span)
    return spans


def _span(mask: Tensor) -> Span | None:
    queries, keys = mask.shape
    rows, seen = mask.any(1).nonzero(), mask.any(0).nonzero()
    if not len(rows):
        return None
    start, stop = int(seen[0]), int(seen[-1]) + 1
    row = int(rows[-1])
    first = int(mask[row].nonzero()[0])
    # Queries stand at the end of the keys; or, where a static cache has keys to come, the last sees up to itself.
    for offset in dict.fromkeys((keys - queries, stop - queries)):
        window = row + offset + 1 - first if first > start else None
        span = Span(start, stop, offset, window)
        if offset >= 0 and _equal(mask, span):
            return span
    return None


def _equal(mask: Tensor, span: Span) -> bool:
    key = torch.arange(mask.shape[1], device=mask.device)
    inside = (key >= span.start) & (key < span.stop)
    for first in range(0, mask.shape[0], _ROWS):
        rows = mask[first : first + _ROWS]
        position = torch.arange(first, first + len(rows), device=mask.device)[:, None] + span.offset
        expected = inside & (key <= position)
        if span.window is not None:
            expected &= key > position - span.window
        if not torch.equal(rows, expected):
            return False
    return True
