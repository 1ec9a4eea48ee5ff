"""The tokens of one sequence one after the other, from a token's number to its logits in one call of C++.

`decode` looks at every part of a model before each token, as anybody may have changed one since. The weights of a token
drive all that out of the caches, so looking again takes as long as some blocks. While a loop of our own generates,
nobody is there to change the model, and a `Sequence` looks once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilefuse.hf.blocks import BLOCKS, epsilon, is_array
from tilefuse.hf.decode import Built, ModelForward
from tilefuse.hf.linear import TileFuseLinear
from tilefuse.hf.rooms import room_of
from tilefuse.runtime import is_direct_cpu
from tilefuse.runtime.cpu import native_call

MODELS = frozenset(kind.replace("DecoderLayer", "ForCausalLM") for kind in BLOCKS)
"""Models that are a model of the known shape and a head, nothing else."""

TURNS = 64
"""Positions whose cosines and sines are computed together."""


class Sequence:
    """A cache with a sequence's tokens so far, and the model that continues it; `of` makes them.

    Between two calls the model and the cache belong to this object: the layers of the cache show their new tokens once
    `finish` was called.
    """

    def __init__(self, model: Any, forward: ModelForward, built: Built, cache: Any, length: int) -> None:
        inner = model.model
        self._built, self._phases, self._length = built, forward.phases, length
        self._embed, self._turn, self._head = inner.embed_tokens, inner.rotary_emb, model.lm_head
        self._head_dim = forward.blocks[0].head_dim
        self._layers = cache.layers[: len(forward.blocks)]
        self._rooms: list[Any] = []
        self._addresses: Any = None
        self._norm = inner.norm.weight
        self._epsilon, self._plus_one = epsilon(inner.norm), forward.blocks[0].plus_one
        self._width = self._norm.numel()
        packed = type(self._head) is TileFuseLinear
        self._layer = self._head.layer if packed else None  # kept alive for C++, whatever becomes of the module's
        self._native_head = native_call(self._layer) if self._layer is not None else None
        self._products = 4 * len(forward.blocks) + packed
        self._y = torch.empty((1, 1, self._head.out_features if packed else self._width), dtype=built.dtype)
        # Anything else than a plain table of rows, one that scales them say, makes the row itself.
        plain = type(self._embed) is nn.Embedding and self._embed.max_norm is None and _is_bare(self._embed)
        self._table = self._embed.weight if plain and self._fits(self._embed.weight) else None
        self._row_bytes = self._width * self._norm.element_size()
        # What other kinds of turns are depends on the longest position asked for.
        kind = getattr(self._turn, "rope_type", "dynamic")
        self._at_once = 1 if "dynamic" in kind or kind == "longrope" else TURNS
        self._turns: tuple[Tensor, Tensor] | None = None
        self._first = 0

    @classmethod
    def of(cls, model: Any, cache: Any) -> Sequence | None:
        """The sequence in a cache of ``model``; None if tokens have to go through the model's own code."""
        kind = f"{type(model).__module__}.{type(model).__qualname__}"
        if kind not in MODELS or not _is_bare(model) or torch.compiler.is_compiling():
            return None
        inner, head = model.model, model.lm_head
        forward = inner.__dict__.get("forward")
        if (
            type(forward) is not ModelForward
            or forward.model is not inner
            or inner._forward_hooks
            or inner._forward_pre_hooks
            or type(inner.norm) is not type(forward.blocks[0].norms[0])
            or not _is_bare(inner.norm)
            or not isinstance(head, nn.Module)
            or not forward.is_plain(None)
        ):
            return None
        if type(head) is TileFuseLinear and not (_is_bare(head) and head.phases is forward.phases):
            return None
        built = forward.ready(cache)
        if built is None:
            return None
        length = forward.length(cache, built.dtype)
        found = cls(model, forward, built, cache, length) if length >= 0 else None
        return found if found is not None and found._fits(found._norm) else None

    def _fits(self, weight: Any) -> bool:
        return is_array(weight, self._built.dtype) and weight.shape[-1] == self._width

    def logits(self, token: int) -> Tensor | None:
        """The logits [1, 1, vocabulary] that follow ``token``, until the next call; None, and nothing has happened, if
        the token has to go through the model's own code from here on."""
        device = self._phases.name(1)
        if not is_direct_cpu(device):
            return None
        length = self._length
        if not self._rooms or length >= self._rooms[0].capacity:
            self.finish()
            self._rooms = [room_of(layer, length) for layer in self._layers]
            self._addresses = self._built.addresses_with(self._rooms)
        if self._table is not None and 0 <= token < self._table.shape[0]:
            at = self._table.data_ptr() + token * self._row_bytes
        else:
            x = self._embed(torch.tensor([[token]]))
            if not self._fits(x) or x.numel() != self._width:
                return None
            at = x.data_ptr()
        turns = self._turns_at(length)
        if turns is None:
            return None
        self._built.native.step_to_end(
            self._built.kind,
            at,
            self._addresses,
            *turns,
            length,
            self._norm.data_ptr(),
            self._epsilon,
            self._plus_one,
            self._native_head,
            self._y.data_ptr(),
        )
        self._length = length + 1
        self._phases.count(1, device, self._products)
        y: Tensor = self._y if self._native_head is not None else self._head(self._y)
        return y

    def _turns_at(self, position: int) -> tuple[int, int] | None:
        """Addresses of cosines and sines."""
        row = position - self._first
        if self._turns is None or row >= self._at_once:
            positions = torch.arange(position, position + self._at_once)[None]
            found = self._turn(self._y, position_ids=positions)
            shape = (1, self._at_once, self._head_dim)
            if type(found) is not tuple or len(found) != 2:
                return None
            for each in found:
                if each.shape != shape or each.dtype is not self._built.dtype or each.device.type != "cpu":
                    return None
            self._turns, self._first, row = (found[0].contiguous(), found[1].contiguous()), position, 0
        offset = row * self._head_dim * self._norm.element_size()
        return self._turns[0].data_ptr() + offset, self._turns[1].data_ptr() + offset

    def finish(self) -> None:
        """Has the cache's layers show all tokens."""
        for room, layer in zip(self._rooms, self._layers, strict=False):
            room.grow(layer, self._length)


def _is_bare(module: Any) -> bool:
    """Whether nothing but the module's own code runs at a call."""
    return not ("forward" in module.__dict__ or module._forward_hooks or module._forward_pre_hooks)
