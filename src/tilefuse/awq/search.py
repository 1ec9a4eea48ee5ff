"""The searches of AWQ: how strongly input channels are scaled by their activations, and where weights are clipped.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023). A linear layer
``y = x Wᵀ`` is the same as ``(x / s) (W s)ᵀ``, so that the rounding error of an input channel's weights counts 1 / s
times. Channels whose activations are large get a larger s, at the expense of those in their group.
"""

from __future__ import annotations

from typing import Any

from tilefuse.awq.rounding import Rounding

EXPONENTS = tuple(step / 20 for step in range(20))
"""Of the mean magnitude of an input channel; 0, which scales nothing, comes first and wins ties."""

SHRINKS = tuple(1 - step / 20 for step in range(11))
"""Fractions of a group's range that weights are clipped to; 1, which clips nothing, wins ties."""

SMALLEST = 1e-4
"""Mean magnitudes below this are taken as this: a channel that is never active must not get a scale of zero."""

_CHUNK = 1 << 22
"""Weights clipped at a time."""


def compressed(x: Any) -> Any:
    """Inputs [T, K] as at most K rows with the same Gram matrix, so that ``|x e|`` is the same for every e."""
    import torch

    return x if x.shape[0] <= x.shape[1] else torch.linalg.qr(x, mode="r").R


def scales_of(magnitude: Any, exponent: float) -> Any:
    """Scales [K] for mean magnitudes [K], about 1 in the (geometric) middle of their range."""
    import torch

    s = magnitude.clamp(min=SMALLEST) ** exponent
    return s / torch.sqrt(s.max() * s.min())


def find_scales(x: Any, w: Any, magnitude: Any, rounding: Rounding, shared: Any = None) -> Any:
    """The scales [K] of least output error among `EXPONENTS`.

    Args:
        x: Inputs, [T, K].
        w: The weights that read them, [N, K]; of several layers, one below the other.
        magnitude: Mean magnitude of the channels that are scaled, [C].
        rounding: How weights are rounded.
        shared: Index [K] of the scale that each input channel has; None where C is K.

    Returns:
        Scales, [C].
    """
    import torch

    x = compressed(x)
    best, best_error = torch.ones_like(magnitude), None
    for exponent in EXPONENTS:
        s = scales_of(magnitude, exponent)
        wide = s if shared is None else s[shared]
        scaled = w * wide
        error = rounding.nearest(scaled, *rounding.range(scaled)).div_(wide).sub_(w)
        total = float((x @ error.T).square_().sum(dtype=torch.float64))
        if best_error is None or total < best_error:
            best, best_error = s, total
    return best


def clipped(x: Any, w: Any, rounding: Rounding) -> Any:
    """Weights [N, K] clipped to the share of their group's range, one of `SHRINKS`, of least error in x wᵀ, [T, K].

    Each group counts by itself: as if the errors of the others were independent of its own.
    """
    import torch

    count = w.shape[1] // rounding.group
    inputs = x.reshape(x.shape[0], count, rounding.group).transpose(0, 1)  # [G, T, group]
    gram = inputs.transpose(1, 2) @ inputs  # [G, group, group]
    out = torch.empty_like(w)
    rows = max(1, _CHUNK // w.shape[1])
    for start in range(0, w.shape[0], rows):
        part = w[start : start + rows]
        low, high = rounding.range(part)
        best = torch.ones_like(low)
        least = torch.full_like(low, float("inf"))
        for shrink in SHRINKS:
            error = rounding.nearest(part, low * shrink, high * shrink).sub_(part)
            error = rounding.groups(error).transpose(0, 1)  # [G, N, group]
            total = ((error @ gram) * error).sum(-1).T.unsqueeze(-1)  # [N, G, 1]
            better = total < least
            least = torch.where(better, total, least)
            best = torch.where(better, torch.full_like(best, shrink), best)
        kept = torch.minimum(torch.maximum(rounding.groups(part), low * best), high * best)
        out[start : start + rows] = kept.reshape(part.shape)
    return out
