"""Errors of a product against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Errors:
    """How far y is from x W^T.

    Attributes:
        relative: ``|y - x W^T| / |x W^T|``, Frobenius norms.
        gate_max: Largest ``|y - x W^T| / (|x| |W|^T)``, elementwise: what docs/numerics.md bounds.
        gate_mean: Mean of it.
    """

    relative: float
    gate_max: float
    gate_mean: float


def errors(y: Array, x: Array, weights: Array) -> Errors:
    """Errors of y [M, N] as the product of x [M, K] and weights [N, K], in float64. Infinite where y is not finite."""
    x64, w64 = x.astype(np.float64), weights.astype(np.float64)
    exact = x64 @ w64.T
    error = np.abs(y.astype(np.float64) - exact)
    if not np.isfinite(error).all():
        return Errors(np.inf, np.inf, np.inf)
    scale = np.abs(x64) @ np.abs(w64).T
    gate = np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=scale > 0)
    norm = float(np.linalg.norm(exact))
    total = float(np.linalg.norm(error))
    relative = total / norm if norm else (np.inf if total else 0.0)
    return Errors(relative, float(gate.max(initial=0.0)), float(gate.mean()) if gate.size else 0.0)
