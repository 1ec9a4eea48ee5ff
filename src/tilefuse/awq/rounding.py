"""Rounding weights as `quantize_linear` does, in torch and fast enough for a search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilefuse.quantize import MIN_BF16, MIN_FP16


@dataclass(frozen=True)
class Rounding:
    """A scheme of quantisation, on weights [N, K] whose K is a multiple of the group size.

    Attributes:
        bits: 4 or 8.
        group: Input channels that share a scale.
        symmetric: Whether the zero point is fixed at 2^(bits - 1).
        half: Whether scales are values of float16 too, or any bfloat16.
    """

    bits: int
    group: int
    symmetric: bool
    half: bool

    def groups(self, w: Any) -> Any:
        """Weights [N, K] as [N, G, group], a view."""
        return w.reshape(w.shape[0], -1, self.group)

    def range(self, w: Any) -> tuple[Any, Any]:
        """Least and greatest weight of each group, 0 included, [N, G, 1] each."""
        groups = self.groups(w)
        return groups.amin(-1, keepdim=True).clamp_(max=0), groups.amax(-1, keepdim=True).clamp_(min=0)

    def nearest(self, w: Any, low: Any, high: Any) -> Any:
        """The weights [N, K] as stored and read again, for ranges [N, G, 1] of groups. What is outside saturates."""
        import torch

        top, middle = (1 << self.bits) - 1, 1 << (self.bits - 1)
        base = (2 * torch.maximum(-low, high) if self.symmetric else high - low) / top
        base = torch.where(base == 0, torch.ones_like(base), base)
        scale = (
            base.half().bfloat16().float().clamp_(min=MIN_FP16)
            if self.half
            else base.bfloat16().float().clamp_(min=MIN_BF16)
        )
        zero = torch.full_like(scale, middle) if self.symmetric else torch.round(-low / scale).clamp_(0, top)
        out = self.groups(w) / scale
        out.round_().add_(zero).clamp_(0, top).sub_(zero).mul_(scale)
        return out.reshape(w.shape)
