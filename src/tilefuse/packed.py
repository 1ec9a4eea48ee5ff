"""A linear layer in the packed format, ready for every device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.layout import Layout

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class PackedLinear:
    """One linear layer in packed tiles (see `tilefuse.layout`).

    Attributes:
        name: Name of the layer in its checkpoint.
        layout: Where everything is in ``data``.
        data: uint8 [layout.nbytes], contiguous, 64-byte aligned; may be a read-only view of a mapped file.
        bias: float32 [N], or None.
        perm: int32 [K] permutation of the inputs (the layer computes ``x[:, perm] @ W``), or None.
        source: Name of the format that it was packed from, e.g. ``"awq-gemm"``.
    """

    name: str
    layout: Layout
    data: npt.NDArray[np.uint8] = field(repr=False)
    bias: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    perm: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    source: str = ""

    @property
    def k(self) -> int:
        """Input channels."""
        return self.layout.k

    @property
    def n(self) -> int:
        """Output channels."""
        return self.layout.n
