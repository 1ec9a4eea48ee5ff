"""``attn_implementation="tilefuse"``: `tilefuse.attention` in transformers' registry, routed per model or per layer.

Prefill and other calls of several queries run on tilefuse, with grouped heads as they are and lengths in place of
masks. One query at a time is left to SDPA (and decoder blocks in one call to `tilefuse.hf.blocks`), and so is what
tilefuse doesn't do: that is logged with its reason, once a layer, and counted (`attention_use`).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

import tilefuse
from tilefuse.errors import TileFuseError
from tilefuse.hf.attention_config import NAME, choice_of
from tilefuse.hf.masks import Span, attention_mask, spans_of
from tilefuse.routing import Grid, Routing
from tilefuse.tilemix.spec import MOST_CHANNELS

_log = logging.getLogger("tilefuse")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

ONE_QUERY = "sdpa: one query"
"""Decode: a row of scores is bound by reading keys and values, which SDPA does as they are."""


@dataclass
class AttentionUse:
    """What the attention of one layer did, by `attention_forward`. Decoder blocks in one call are not among it.

    Attributes:
        name: The module's name in the model.
        layer: Its ``layer_idx``, None where it has none.
        calls: How often by ``"tilefuse"``, `ONE_QUERY`, or ``"sdpa: "`` and a reason.
        routing: The last map's name, empty for none.
        tiles, int8_tiles: Score tiles that tilefuse executed, for each KV head and sequence, and those in INT8.
    """

    name: str = ""
    layer: int | None = None
    calls: Counter[str] = field(default_factory=Counter)
    routing: str = ""
    tiles: int = 0
    int8_tiles: int = 0


_USES: weakref.WeakKeyDictionary[nn.Module, AttentionUse] = weakref.WeakKeyDictionary()


def attention_use(model: nn.Module, *, reset: bool = False) -> list[AttentionUse]:
    """What each layer's attention did so far, in the model's order; none of layers that were not called.

    Args:
        model: A model with ``attn_implementation="tilefuse"``.
        reset: Whether to count anew from now on.
    """
    found = []
    for name, module in model.named_modules():
        use = _USES.pop(module, None) if reset else _USES.get(module)
        if use is not None:
            use.name = name
            found.append(use)
    return found


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as `transformers.AttentionInterface` calls it.

    Args:
        module: The layer; its ``config.tilefuse`` says the routing (`set_attention`).
        query: [B, Hq, Lq, d].
        key, value: [B, Hk, Lk, d]; not repeated for the heads that share them.
        attention_mask: `attention_mask`'s, or any that SDPA takes.
        dropout: Above 0, SDPA's.
        scaling: Of scores; 1 / sqrt(d) for None.
        is_causal: The module's own where None.

    Returns:
        [B, Lq, Hq, d] and None. A query that sees no key, as padding on the left doesn't, gets zeros.

    Raises:
        TileFuseError: The layer needs what neither tilefuse nor SDPA does, or ``config.tilefuse`` is wrong.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise TileFuseError(
                f'{name} is set by {type(module).__name__}, and attn_implementation="tilefuse" has no such term: '
                'pass "eager"'
            )
    if torch.compiler.is_compiling():
        traced: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return traced
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    use = _use(module)
    reason, spans = _plan(query, key, value, attention_mask, dropout, causal, kwargs)
    if reason is None and query.shape[2] == 1:
        use.calls[ONE_QUERY] += 1
    elif reason is None:
        out = _attend(module, query, key, value, attention_mask, scaling, causal, spans, use)
        use.calls[NAME] += 1
        return out, None
    else:
        if not use.calls[f"sdpa: {reason}"]:
            _log.warning("attention of layer %s by SDPA instead of tilefuse: %s", use.layer, reason)
        use.calls[f"sdpa: {reason}"] += 1
    if attention_mask is None and causal and 1 < query.shape[2] < key.shape[2]:
        attention_mask = _end_aligned(query.shape[2], key.shape[2], query.device)
    by_sdpa: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
    )
    return by_sdpa


def _use(module: nn.Module) -> AttentionUse:
    use = _USES.get(module)
    if use is None:
        layer = getattr(module, "layer_idx", None)
        use = _USES[module] = AttentionUse(layer=layer if isinstance(layer, int) else None)
    return use


def _plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    kwargs: dict[str, Any],
) -> tuple[str | None, list[Span]]:
    """Why SDPA has to do it, or None; and what the mask stands for, empty without one."""
    tensors = (query, key, value)
    if any(type(x) is not Tensor for x in tensors):
        return "tensors of another class than torch.Tensor", []
    if dropout:
        return "dropout", []
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "a gradient is wanted", []
    if kwargs.get("position_bias") is not None:
        return "a position bias", []
    if any(x.device.type != "cpu" for x in tensors):
        return f"tensors on {query.device}", []
    if any(x.dtype not in _DTYPES for x in tensors):
        return f"{query.dtype}", []
    if max(query.shape[-1], value.shape[-1]) > MOST_CHANNELS:
        return f"heads of more than {MOST_CHANNELS} channels", []
    if mask is None or query.shape[2] == 1:
        return None, []
    if mask.shape[-2:] != (query.shape[2], key.shape[2]):
        return f"a mask of shape {list(mask.shape)} for {query.shape[2]} queries and {key.shape[2]} keys", []
    found = spans_of(mask, query.shape[0])
    return (found, []) if isinstance(found, str) else (None, found)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    causal: bool,
    spans: list[Span],
    use: AttentionUse,
) -> Tensor:
    batch, heads, queries, _ = query.shape
    choice = choice_of(module.config, use.layer)
    out = query.new_empty((batch, queries, heads, value.shape[-1]))
    into = out.transpose(1, 2)

    def call(sequences: slice, rows: slice, keys: slice, causal: bool, window: int | None) -> None:
        q, k, v = query[sequences, :, rows], key[sequences, :, keys], value[sequences, :, keys]
        routing = choice.routing(q.shape[2], k.shape[2], causal=causal, window=window)
        tilefuse.attention(
            q.detach(),
            k.detach(),
            v.detach(),
            routing=routing,
            causal=causal,
            window=window,
            scale=scaling,
            quant=choice.quant,
            out=into[sequences, :, rows],
        )
        grid = routing.grid if routing is not None else Grid(q.shape[2], k.shape[2], causal=causal, window=window)
        _count(use, grid, routing, q.shape[0], k.shape[1])

    if not spans:
        call(slice(0, batch), slice(0, queries), slice(0, key.shape[2]), causal, None)
        return out
    for sequences, span in _runs(spans):
        # Before `first`, queries see nothing; from `stop` on they stand after the last key: padding, both.
        first = min(max(0, span.start - span.offset), queries)
        stop = min(max(first, span.stop - span.offset), queries)
        if first:
            into[sequences, :, :first] = 0
        if stop > first:
            call(sequences, slice(first, stop), slice(span.start, stop + span.offset), True, span.window)
        if stop < queries and mask is not None:
            rows = slice(stop, queries)
            cut = mask[sequences if mask.shape[0] > 1 else slice(0, 1), :, rows]
            q, k, v = query[sequences, :, rows], key[sequences], value[sequences]
            out[sequences, rows] = sdpa_attention_forward(module, q, k, v, cut, 0.0, scaling)[0]
    return out


def _runs(spans: list[Span]) -> Iterator[tuple[slice, Span]]:
    """Neighbours in the batch that have the same span."""
    first = 0
    for i in range(1, len(spans) + 1):
        if i == len(spans) or spans[i] != spans[first]:
            yield slice(first, i), spans[first]
            first = i


def _count(use: AttentionUse, grid: Grid, routing: Routing | None, batch: int, heads: int) -> None:
    weights = grid.weights()
    use.tiles += int(weights.sum()) * batch * heads
    use.routing = routing.name if routing is not None else ""
    if routing is not None:
        bits = routing.bits()
        use.int8_tiles += int((bits * weights).sum()) * batch * (heads if bits.ndim == 2 else 1)


def _end_aligned(queries: int, keys: int, device: torch.device) -> Tensor:
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    return (torch.arange(keys, device=device) <= position)[None, None]


def register_attention() -> None:
    """Makes "tilefuse" an ``attn_implementation`` of transformers, with its masks. Done by the import."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
