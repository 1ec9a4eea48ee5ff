"""A cache's keys and values with room for more tokens: a token is written in place instead of copying all before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

ROOM = 128
"""Tokens that a cache grows by at least."""


class Room:
    """Keys and values [1, heads, capacity, head_dim]; copies of a layer may share its beginning."""

    __slots__ = ("capacity", "keys", "sizes", "used", "values")

    def __init__(self, layer: Any, length: int) -> None:
        heads, d = layer.keys.shape[1], layer.keys.shape[3]
        self.capacity = (length + length // 4 + ROOM) // ROOM * ROOM
        self.keys = layer.keys.new_empty((1, heads, self.capacity, d))
        self.values = layer.values.new_empty((1, heads, self.capacity, d))
        self.keys[:, :, :length] = layer.keys
        self.values[:, :, :length] = layer.values
        self.sizes = (heads, d, layer.keys.dtype)
        self.used = length  # a copy of the layer that has fewer tokens may not write here

    def grow(self, layer: Any, length: int) -> None:
        """Shows ``length`` tokens in a layer whose room this is."""
        self.used = length
        state = layer.__dict__
        state["_tilefuse_length"] = length
        state["_tilefuse_keys"] = state["_tilefuse_values"] = None


class RoomyLayer(DynamicLayer):  # type: ignore[misc,unused-ignore]
    """A `DynamicLayer` whose tensors are views of a room's beginning, made when somebody looks.

    It is an ordinary one again as soon as anything sets its tensors.
    """

    @property
    def keys(self) -> Any:
        """[1, heads, length, head_dim]."""
        return self._view("keys")

    @keys.setter
    def keys(self, value: Any) -> None:
        self._leave()
        self.keys = value

    @property
    def values(self) -> Any:
        """[1, heads, length, head_dim]."""
        return self._view("values")

    @values.setter
    def values(self, value: Any) -> None:
        self._leave()
        self.values = value

    def get_seq_length(self) -> int:
        """Tokens."""
        length: int = self.__dict__["_tilefuse_length"]
        return length

    def _view(self, name: str) -> Tensor:
        state = self.__dict__
        view: Tensor | None = state[f"_tilefuse_{name}"]
        if view is None:
            whole: Tensor = getattr(state["_tilefuse_room"], name)
            view = state[f"_tilefuse_{name}"] = whole[:, :, : state["_tilefuse_length"]]
        return view

    def _leave(self) -> None:
        keys, values = self.keys, self.values
        state = self.__dict__
        for name in ("room", "length", "keys", "values"):
            del state[f"_tilefuse_{name}"]
        self.__class__ = DynamicLayer
        self.keys, self.values = keys, values


def length_of(layer: Any, heads: int, d: int, dtype: torch.dtype) -> int:
    """Tokens in a layer of a cache; -1 if it can't have a room or has tensors of other sizes than these."""
    if type(layer) is RoomyLayer:
        state = layer.__dict__
        length: int = state["_tilefuse_length"]
        return length if state["_tilefuse_room"].sizes == (heads, d, dtype) else -1
    if type(layer) is not DynamicLayer or not layer.is_initialized:
        return -1
    keys, values = layer.keys, layer.values
    if keys.dim() != 4 or keys.dtype is not dtype or values.dtype is not dtype or keys.device.type != "cpu":
        return -1
    length = keys.shape[2]
    return length if keys.shape == values.shape == (1, heads, length, d) else -1


def room_of(layer: Any, length: int) -> Room:
    """Where a layer's next token is written.

    Args:
        layer: One that `length_of` has a length of.
        length: That length.
    """
    state = layer.__dict__
    room: Room | None = state.get("_tilefuse_room")
    if room is not None and room.used == length < room.capacity:
        return room
    room = Room(layer, length)
    if type(layer) is DynamicLayer:
        del state["keys"], state["values"]
        layer.__class__ = RoomyLayer
    state["_tilefuse_room"], state["_tilefuse_length"] = room, length
    state["_tilefuse_keys"] = state["_tilefuse_values"] = None
    return room
