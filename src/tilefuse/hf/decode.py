"""All decoder blocks of a model at one token, in one call of C++.

What `blocks` does for a block, for the model around it: masks, module calls and checks of a token then cost once what
they cost at each block. ``forward`` of the instance is replaced, and steps aside under the same conditions and at
gradients that are enabled; what steps aside here may still go block by block.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from tilefuse import _core
from tilefuse.hf.blocks import ATTENTION, BLOCKS, DTYPES, BlockForward, is_array
from tilefuse.hf.rooms import Room, length_of, room_of
from tilefuse.phases import Phases
from tilefuse.runtime import is_direct_cpu

MODELS = frozenset(kind.replace("DecoderLayer", "Model") for kind in BLOCKS)
"""Models of the known shape."""

_ARGUMENTS = frozenset(
    {"attention_mask", "cache", "cache_position", "input_ids", "inputs_embeds", "past_key_values", "position_ids"}
    | {"use_cache"}
)

_CACHE = next(
    field.name
    for field in dataclasses.fields(BaseModelOutputWithPast)
    if field.name in ("cache", "past_key_values")  # by the release
)


class Built:
    """What is found out once, for the packed layers and vectors that a model has."""

    def __init__(self, blocks: list[BlockForward]) -> None:
        self.layers = [linear.layer for block in blocks for linear in block.linears]
        natives = tuple(block.native() for block in blocks)
        self.native = _core.DecoderBlocks(natives)
        self.kind = -1
        self.addresses = np.zeros((len(blocks), 7), np.uint64)
        self.vectors: list[tuple[Any, Tensor, int]] = []
        self.dtype = blocks[0].norms[0].weight.dtype
        width = blocks[0].linears[0].in_features
        fits = self.dtype in DTYPES
        for row, block in enumerate(blocks):
            d = block.head_dim
            each = zip((*block.norms, *block.head_norms), (width, width, d, d), strict=True)
            for column, (part, size) in enumerate(each):
                if part is not None:
                    fits = self._takes(part, size) and fits
                    self.addresses[row, column] = part.weight.data_ptr()
        if fits:
            self.kind = DTYPES[self.dtype]

    def _takes(self, part: Any, size: int) -> bool:
        weight = part._parameters.get("weight")
        if weight is None:
            return False
        self.vectors.append((part._parameters, weight, weight.data_ptr()))
        return bool(weight.numel() == size and is_array(weight, self.dtype))

    def addresses_with(self, rooms: list[Room]) -> np.ndarray[Any, Any]:
        """[blocks, 7], the caller's own: as DecoderBlocks.step takes them."""
        addresses = self.addresses.copy()
        addresses[:, 4:] = [(room.keys.data_ptr(), room.values.data_ptr(), room.capacity) for room in rooms]
        return addresses

    def is_current(self, blocks: list[BlockForward]) -> bool:
        dtype = self.dtype
        for parameters, weight, at in self.vectors:
            if parameters.get("weight") is not weight or weight.data_ptr() != at or weight.dtype is not dtype:
                return False
        layers = iter(self.layers)
        return all(linear.layer is next(layers) for block in blocks for linear in block.linears)


class ModelForward:
    """``forward`` of a model without its head."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks: list[BlockForward] = [block.__dict__["forward"] for block in model.layers]
        self._built: Built | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_built": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not args and not torch.compiler.is_compiling():
            found = self._step(kwargs)
            if found is not None:
                return found
        return type(self.model).forward(self.model, *args, **kwargs)

    def _step(self, given: dict[str, Any]) -> BaseModelOutputWithPast | None:
        """The model's output for one token, or None where the long way has to be taken."""
        ids: Any = given.get("input_ids")
        cache: Any = given.get("cache")
        if cache is None:
            cache = given.get("past_key_values")
        if (
            type(ids) is not Tensor
            or ids.shape != (1, 1)
            or ids.device.type != "cpu"
            or given.get("inputs_embeds") is not None
            or not given.keys() <= _ARGUMENTS
            or not self.is_plain(given.get("use_cache"))
        ):
            return None
        built = self.ready(cache)
        if built is None:
            return None
        length = self.length(cache, built.dtype)
        if length < 0 or not _sees_all(given.get("attention_mask"), length):
            return None
        positions = given.get("position_ids")
        if positions is None:
            positions = torch.tensor([[length]])
        elif type(positions) is not Tensor or positions.shape != (1, 1):
            return None
        x = self.model.embed_tokens(ids)
        turns = self.model.rotary_emb(x, position_ids=positions)
        if type(turns) is not tuple or len(turns) != 2:
            return None
        d = self.blocks[0].head_dim
        for vector, size in ((x, self.blocks[0].linears[0].in_features), *((turn, d) for turn in turns)):
            if type(vector) is not Tensor or vector.numel() != size or not is_array(vector, built.dtype):
                return None
        layers = cache.layers[: len(self.blocks)]
        rooms = [room_of(layer, length) for layer in layers]
        addresses = built.addresses_with(rooms)
        y = torch.empty_like(x)
        built.native.step(
            built.kind,
            x.data_ptr(),
            addresses,
            turns[0].data_ptr(),
            turns[1].data_ptr(),
            length,
            y.data_ptr(),
        )
        for room, layer in zip(rooms, layers, strict=True):
            room.grow(layer, length + 1)
        self.phases.count(1, self.phases.name(1), 4 * len(self.blocks))
        return BaseModelOutputWithPast(last_hidden_state=self.model.norm(y), **{_CACHE: cache})

    def ready(self, cache: Any) -> Built | None:
        """What C++ needs to know of the model, if model, device and cache, as they are now, allow the short way."""
        if (
            torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or type(cache) is not DynamicCache
            or len(cache.layers) < len(self.blocks)
            or not is_direct_cpu(self.phases.name(1))
            or not self._as_built()
        ):
            return None
        built = self._built
        if built is None or not built.is_current(self.blocks):
            built = self._built = Built(self.blocks)
        return built if built.kind >= 0 else None

    @property
    def phases(self) -> Phases:
        """That of the blocks' layers."""
        phases: Phases = self.blocks[0].linears[0].phases
        return phases

    def is_plain(self, use_cache: Any) -> bool:
        """Whether the configuration asks for nothing beside the hidden state and the cache."""
        config = self.model.config
        return bool(
            (config.use_cache if use_cache is None else use_cache)
            and config._attn_implementation in ATTENTION
            and getattr(config, "sliding_window", None) is None
            and config.return_dict
            and not config.output_hidden_states
            and not config.output_attentions
            and config.num_hidden_layers == len(self.blocks)
        )

    def _as_built(self) -> bool:
        """Whether all parts are those that the short way was made for, and none is watched by a hook."""
        held, phases = self.model.layers._modules, self.phases
        if len(held) != len(self.blocks):
            return False
        config = self.model.config
        for forward, block in zip(self.blocks, held.values(), strict=True):
            if (
                block is not forward.block
                or block.__dict__.get("forward") is not forward
                or block._forward_hooks
                or block._forward_pre_hooks
                or block.training
                or block.self_attn.config is not config
                or forward.linears[0].phases is not phases
                or not forward.as_built()
            ):
                return False
        return True

    def length(self, cache: Any, dtype: torch.dtype) -> int:
        """Tokens in every layer of the cache; -1 if they differ or a layer can't be written in place."""
        blocks = self.blocks
        length = length_of(cache.layers[0], blocks[0].kv_heads, blocks[0].head_dim, dtype)
        for forward, layer in zip(blocks, cache.layers, strict=False):
            if length_of(layer, forward.kv_heads, forward.head_dim, dtype) != length:
                return -1
        return length


def _sees_all(mask: Any, length: int) -> bool:
    """Whether a mask of tokens hides none of those before the next, nor it."""
    if mask is None:
        return True
    return bool(type(mask) is Tensor and mask.shape == (1, length + 1) and mask.device.type == "cpu" and mask.all())


def install(model: nn.Module) -> int:
    """Gives the models of the known shape, all of whose blocks have the short way, theirs; returns how many.

    Args:
        model: A model whose blocks have theirs: see `blocks.install`.
    """
    count = 0
    for part in model.modules():
        kind = f"{type(part).__module__}.{type(part).__qualname__}"
        if kind in MODELS and _fits(part):
            part.forward = ModelForward(part)
            count += 1
    return count


def _fits(model: Any) -> bool:
    blocks = [block.__dict__.get("forward") for block in model.layers]
    return (
        bool(blocks)
        and all(type(block) is BlockForward for block in blocks)
        and all(block.block.self_attn.layer_idx == i for i, block in enumerate(blocks))
        and len({block.head_dim for block in blocks}) == 1
        and len(model.layers) == model.config.num_hidden_layers
    )
