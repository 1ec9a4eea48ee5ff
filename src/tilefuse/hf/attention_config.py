"""The routing of a model's attention: ``config.tilefuse``, checked, and the maps that it means for each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from tilefuse import QuantSpec
from tilefuse.errors import RoutingError, TileFuseError
from tilefuse.routing import Routing, Template, named
from tilefuse.tilemix.template import by_name

NAME = "tilefuse"
"""Of the ``attn_implementation``, and of the configuration's attribute."""

_TEMPLATE_KEYS = ("coverage", "protect", "seed", "compat", "group", "words")
_KEYS = ("routing", *_TEMPLATE_KEYS, "quant", "layers")


@dataclass(frozen=True)
class Choice:
    """A layer's: what makes its map, and how its INT8 path quantises."""

    layer: int | None
    made_by: Any
    quant: QuantSpec

    def routing(self, query_len: int, key_len: int, *, causal: bool, window: int | None) -> Routing | None:
        """The map of a call of so many queries and keys, None for all 16-bit.

        Raises:
            RoutingError: A function returned something else than a name, a template, a map or None.
        """
        found = self.made_by
        if callable(found):
            found = found(self.layer, key_len)
        if isinstance(found, str):
            found = named(found)
        if isinstance(found, Template):
            if not found.coverage:
                return None
            return found.build(query_len, key_len, causal=causal, window=window)
        if found is None or isinstance(found, Routing):
            return found
        raise RoutingError(
            f"the routing function returned a {type(found).__name__} for layer {self.layer}: return a layout's name, "
            "a template of tilefuse.routing, a Routing, or None"
        )


def choice_of(config: Any, layer: int | None) -> Choice:
    """A layer's choice by ``config.tilefuse``; all 16-bit where that is missing or None.

    Raises:
        TileFuseError: The entry is none that `set_attention` takes.
    """
    entry = getattr(config, NAME, None)
    if entry is None:
        return Choice(layer, None, QuantSpec())
    entry = _entry(entry, f"config.{NAME}")
    layers = entry.pop("layers", None) or {}
    if not isinstance(layers, Mapping):
        raise TileFuseError(f'config.{NAME}["layers"] is a {type(layers).__name__}: pass a mapping of layer to routing')
    # JSON has no integer keys.
    own = layers.get(layer, layers.get(str(layer)))
    if own is not None:
        changed = _entry(own, f'config.{NAME}["layers"][{layer}]')
        if "layers" in changed:
            raise TileFuseError(f'config.{NAME}["layers"][{layer}] has layers of its own: leave them out')
        # Another layout has another meaning of coverage, seed, ...: none of the model's then.
        entry = (
            {**({"quant": entry["quant"]} if "quant" in entry else {}), **changed}
            if "routing" in changed
            else (entry | changed)
        )
    return Choice(layer, _made_by(entry, layer), _quant(entry.get("quant")))


def _entry(value: Any, where: str) -> dict[str, Any]:
    """An entry as a dict: a routing alone is one with nothing else."""
    if not isinstance(value, Mapping):
        return {"routing": value}
    unknown = [str(key) for key in value if key not in _KEYS]
    if unknown:
        raise TileFuseError(f"{where} has {', '.join(unknown)}: there are {', '.join(_KEYS)}")
    return dict(value)


def _made_by(entry: Mapping[str, Any], layer: int | None) -> Any:
    made_by = entry.get("routing", "local_sink")
    options = {key: entry[key] for key in _TEMPLATE_KEYS if entry.get(key) is not None}
    if isinstance(made_by, str):
        return by_name(made_by, **options)
    if made_by is None or isinstance(made_by, Template | Routing) or callable(made_by):
        if options:
            raise RoutingError(
                f"{', '.join(options)} go with a layout's name, and the routing of layer {layer} is a "
                f"{type(made_by).__name__}: leave them out"
            )
        return made_by
    raise RoutingError(
        f"the routing of layer {layer} is a {type(made_by).__name__}: pass a layout's name, a template of "
        "tilefuse.routing, a function (layer, keys) -> template, or None"
    )


def _quant(value: Any) -> QuantSpec:
    if value is None:
        return QuantSpec()
    if isinstance(value, QuantSpec):
        return value
    if not isinstance(value, Mapping) or not value.keys() <= {"q", "smooth"}:
        raise TileFuseError(f"quant is {value!r}: pass a tilefuse.QuantSpec, or a mapping with q and smooth")
    return QuantSpec(**value)


def set_attention(model: nn.Module, routing: Any = "local_sink", **options: Any) -> None:
    """Attention of a loaded model by tilefuse: sets ``attn_implementation`` and ``config.tilefuse``.

    The same as ``model.set_attn_implementation("tilefuse")`` and
    ``model.config.tilefuse = {"routing": ..., "coverage": ..., "layers": {0: "zero"}}``, checked at once.

    Args:
        model: A model of transformers.
        routing: Which score tiles are INT8: the name of a layout of `tilefuse.routing`, a template or a `Routing` of
            it, a function of (layer, keys) that returns one of these, or None for all 16-bit.
        **options: ``coverage``, ``protect``, ``seed``, ``compat``, ``group`` and ``words`` of a layout by name, as the
            layouts take them; ``quant``, a `tilefuse.QuantSpec` or its fields as a dict; ``layers``, a dict from a
            layer's index to its own routing or to a dict of these options.

    Raises:
        TileFuseError: There is no such option or layout, or it has no such value.
        RoutingError: Of these, a routing's.
    """
    config = model.config.get_text_config()
    entry = {"routing": routing, **options}
    probe = type("probe", (), {NAME: entry})()
    layers = entry.get("layers")
    count = getattr(config, "num_hidden_layers", None)
    for layer in (*(layers if isinstance(layers, Mapping) else ()), None):
        try:
            index = None if layer is None else int(layer)
        except (TypeError, ValueError):
            raise TileFuseError(f"layers has {layer!r}: pass the index of a layer") from None
        if index is not None and count is not None and not 0 <= index < count:
            raise TileFuseError(f"layers has {index}: the model has layers 0 to {count - 1}")
        choice_of(probe, index)
    model.set_attn_implementation(NAME)
    setattr(config, NAME, entry)
