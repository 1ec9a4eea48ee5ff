"""Layouts of weights, as far as a plan cares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tilefuse import arch
from tilefuse.configurations import BF16, checked_int
from tilefuse.errors import PlanError
from tilefuse.layout import KT, MAX_K, MAX_N, NT


class Stored(Protocol):
    """What a plan asks of a layout of weights: `tilefuse.layout.Layout`, or `PlainLayout` for the baselines."""

    @property
    def k(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def k_tiles(self) -> int: ...
    @property
    def n_padded(self) -> int: ...
    @property
    def tiles_per_column(self) -> int: ...
    @property
    def tile_bytes(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class PlainLayout:
    """Unquantised bfloat16 weights in tiles of 128 x 64, in the order of the packed format; for the baselines."""

    k: int
    n: int
    columns: int = arch.COLUMNS

    def __post_init__(self) -> None:
        for name in ("k", "n", "columns"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name))
        if not (1 <= self.k <= MAX_K and 1 <= self.n <= MAX_N):
            raise PlanError(f"K = {self.k}, N = {self.n}: K is 1 to {MAX_K}, N is 1 to {MAX_N}; split the layer")
        if not 1 <= self.columns <= arch.COLUMNS:
            raise PlanError(f"columns = {self.columns}: the array has 1 to {arch.COLUMNS}")

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return BF16.tile_bytes

    @property
    def k_tiles(self) -> int:
        """K tiles, padding included."""
        return -(-self.k // KT)

    @property
    def tiles_per_column(self) -> int:
        """Output tiles of a column, padding included."""
        return -(-self.n // (NT * self.columns))

    @property
    def n_padded(self) -> int:
        """N rounded up to whole tiles for each column."""
        return self.tiles_per_column * NT * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return self.columns * self.tiles_per_column * self.k_tiles * self.tile_bytes
