"""Packed layers under transformers' tensor parallelism: each process packs its part of a layer, and nothing else.

``from_pretrained(path, distributed_config=DistributedConfig(tp_size=world))`` gives every layer of the model's plan a
style, which says along which axis it is divided and what is communicated; the latter is left to transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from tilefuse.errors import LayoutError, UnsupportedFormatError
from tilefuse.formats import Checkpoint
from tilefuse.hf.linear import TileFuseLinear
from tilefuse.packed import pack
from tilefuse.phases import choose
from tilefuse.shards import Axis

AXES: Mapping[str, Axis] = {
    "colwise": "out",
    "colwise_gather_output": "out",
    "colwise_rep": "out",
    "rowwise": "in",
    "rowwise_rep": "in",
    "rowwise_split_input": "in",
}
"""Style -> the channels that are divided."""

WHOLE = frozenset({"replicate", "replicated_with_grad_allreduce"})
"""Styles that leave a layer whole on every rank."""

_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}


class ParallelLinear(nn.Module):
    """One rank's part of a layer; transformers' style, around ``forward``, moves inputs and results.

    Along the inputs, results are summed over ranks in float32 and rounded once, to the dtype of x.

    Args:
        local: This rank's part.
        in_features, out_features: K and N of the whole layer.
        axis: Which of both is divided.
    """

    _hf_quantized_needs_local_tp = True  # transformers: x and results are this rank's tensors, not DTensors

    def __init__(self, local: TileFuseLinear, in_features: int, out_features: int, axis: Axis) -> None:
        super().__init__()
        self.local, self.axis = local, axis
        self.in_features, self.out_features = in_features, out_features
        if axis == "in":
            self.register_forward_hook(_narrowed)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.local(x.float() if self.axis == "in" else x)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, axis={self.axis}"


def _narrowed(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
    return y.to(inputs[0].dtype)


def world_of(model: nn.Module) -> int:
    """Processes that transformers divides the layers of a model among; 1 without tensor parallelism."""
    return int(getattr(model, "_tp_size", None) or 1)


def place(model: Any, checkpoint: Checkpoint, paths: Mapping[str, str], names: Iterable[str], device: Any) -> None:
    """Packs this rank's parts of layers, and puts them where the layers were.

    Projections are not fused, and nothing is kept on disk: parts are packed at each start.

    Args:
        model: Within ``from_pretrained``, its other weights loaded.
        checkpoint: Where the layers come from.
        paths: The module of each layer, by its name in the files.
        names: The layers.
        device: See `tilefuse.hf.options`.

    Raises:
        LayoutError: A layer can't be divided so.
        UnsupportedFormatError: The plan has a style for a layer that is not known here.
    """
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

    mesh = model._device_mesh["tp"]
    rank, world = mesh.get_local_rank(), mesh.size()
    config = model.config.get_text_config()
    placed: dict[str, tuple[Any, str | None, int, int]] = {}
    for name in names:
        style = (model.tp_plan or {}).get(replace_layer_number_by_wildcard(paths[name]))
        q = checkpoint.linear(name)
        if style is None or style in WHOLE:
            placed[name] = pack(q), None, q.k, q.n
            continue
        axis = AXES.get(style)
        if axis is None:
            raise UnsupportedFormatError(
                f"layer {name!r} has the style {style!r} in the tensor-parallel plan; taken: {', '.join(AXES)} and "
                f"{', '.join(sorted(WHOLE))}"
            )
        if axis == "out":
            _check_heads(config, name, style, world)
        placed[name] = pack(q, shard=(rank, world), axis=axis), style, q.k, q.n
    phases = choose(device, [layer.layout for layer, *_ in placed.values()])
    for name, (layer, style, k, n) in placed.items():
        module: nn.Module = TileFuseLinear(layer, phases)
        if style is not None:
            module = ParallelLinear(module, k, n, AXES[style])
            ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
            module._is_hooked = True
        model.set_submodule(paths[name], module)


def _check_heads(config: Any, name: str, style: str, world: int) -> None:
    """A rank must have whole heads: attention would take parts of several for one."""
    if style != "colwise":
        return
    counted = _HEADS.get(name.rpartition(".")[2])
    heads = getattr(config, counted, None) if counted else None
    if isinstance(heads, int) and heads % world:
        raise LayoutError(
            f"layer {name!r}: {counted} = {heads} can't be divided among {world} ranks; take a tp_size that divides "
            "it, or leave attention whole: DistributedConfig(tp_size=..., tp_plan={'model.layers.*.self_attn.q_proj': "
            "'replicate', ...}), for q, k, v and o"
        )


def packed_bytes(model: nn.Module) -> int:
    """Bytes of packed weights that this process holds for a model."""
    return sum(module.layer.nbytes for module in model.modules() if isinstance(module, TileFuseLinear))
