"""Scaling the inputs of linear layers, and whatever makes them by the inverse: what a block computes stays the same.

Each function takes the scales that are wanted and returns those that it has applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilefuse.errors import UnsupportedFormatError


def weight_offset(norm: Any) -> float:
    """What a norm adds to its weight before it multiplies by it: 0, or 1 in Gemma.

    Measured and not looked up: a checkpoint folded by the wrong rule computes something else and says nothing.

    Raises:
        UnsupportedFormatError: It does neither.
    """
    import torch

    weight = norm.weight
    x = torch.linspace(-1, 1, weight.shape[0], dtype=torch.float32, device=weight.device)
    with torch.no_grad():
        kept = weight.clone()
        try:
            weight.fill_(1)
            one = norm(x)
            weight.zero_()
            zero = norm(x)
        finally:
            weight.copy_(kept)
    for offset in (0.0, 1.0):
        if torch.allclose(zero * (1 + offset), one * offset, rtol=1e-5, atol=1e-7):
            return offset
    raise UnsupportedFormatError(
        f"{type(norm).__name__} multiplies neither by its weight nor by 1 plus its weight; quantise with --method rtn"
    )


def into_norm(norm: Any, linears: Sequence[Any], scales: Any, dtype: Any) -> Any:
    """Divide the output of a norm by ``scales`` [K], and multiply the weights that read it.

    The norm's new weight is rounded to ``dtype``, that of the checkpoint, and the scales applied are those that it then
    has: what is stored is exact, and a channel whose weight rounds to nothing stays as it is.
    """
    import torch

    offset = weight_offset(norm)
    with torch.no_grad():
        gain = norm.weight + offset
        stored = (gain / scales - offset).to(dtype).float()
        applied = gain / (stored + offset)
        usable = torch.isfinite(applied) & (applied > 0)
        applied = torch.where(usable, applied, torch.ones_like(applied))
        norm.weight.copy_(torch.where(usable, stored, norm.weight))
        for linear in linears:
            linear.weight.mul_(applied)
    return applied


def into_linear(source: Any, linear: Any, scales: Any, shared: Any = None) -> Any:
    """Divide the outputs of ``source`` by ``scales`` [C], and multiply the weights of ``linear`` that read them.

    What is between the two must be linear in each channel: attention in v, ``act(gate) * up`` in up.

    Args:
        source: Linear layer with C outputs.
        linear: Linear layer with K inputs.
        scales: [C].
        shared: Index [K] of the output of ``source`` that each input of ``linear`` comes from; None where C is K.
    """
    import torch

    with torch.no_grad():
        source.weight.div_(scales[:, None])
        if source.bias is not None:
            source.bias.div_(scales)
        linear.weight.mul_(scales if shared is None else scales[shared])
    return scales


def shared_heads(v: Any, o: Any, kv_heads: int) -> Any:
    """Index [K] of the output of v that each input of o comes from, or None where they correspond one to one.

    Query heads of a group read the same values, so the columns of o that belong to them must be scaled alike.

    Raises:
        UnsupportedFormatError: The shapes are not those of grouped heads.
    """
    import torch

    outputs, inputs = v.weight.shape[0], o.weight.shape[1]
    if outputs == inputs:
        return None
    if inputs % outputs or outputs % kv_heads:
        raise UnsupportedFormatError(
            f"v has {outputs} outputs, o has {inputs} inputs, and there are {kv_heads} heads of keys and values: not "
            "grouped heads; quantise with --method rtn"
        )
    index = torch.arange(outputs, device=v.weight.device).reshape(kv_heads, 1, -1)
    return index.expand(-1, inputs // outputs, -1).reshape(-1)
