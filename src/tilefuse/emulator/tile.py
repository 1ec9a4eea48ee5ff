"""Places of the array, and the device as a whole."""

from __future__ import annotations

from tilefuse import arch
from tilefuse.arch import TileKind
from tilefuse.errors import ArrayLimitError


class Tile:
    """A place: column, row, both or neither. What stands there says which kind of tile it is."""

    def __init__(
        self,
        col: int | None = None,
        row: int | None = None,
        *,
        tile_type: TileKind | None = None,
        allocation_scheme: str | None = None,
    ) -> None:
        self.col = col
        self.row = row
        self.tile_type = tile_type
        self.allocation_scheme = allocation_scheme

    def is_at(self, other: Tile | None) -> bool:
        """Whether both say the same place."""
        return other is not None and (self.col, self.row) == (other.col, other.row)

    def __str__(self) -> str:
        return f"Tile({'?' if self.col is None else self.col}, {'?' if self.row is None else self.row})"


AnyShimTile = Tile(tile_type=TileKind.SHIM)
AnyMemTile = Tile(tile_type=TileKind.MEM)
AnyComputeTile = Tile(tile_type=TileKind.CORE)


class Device:
    """npu2, or its first columns.

    Raises:
        ArrayLimitError: It has no such number of columns.
    """

    def __init__(self, columns: int) -> None:
        if not isinstance(columns, int) or not 1 <= columns <= arch.COLUMNS:
            raise ArrayLimitError(f"{columns!r} columns; npu2 has 1 to {arch.COLUMNS}")
        self.cols = columns
        self.rows = arch.FIRST_CORE_ROW + arch.CORE_ROWS

    def place(self, tile: Tile, kind: TileKind, what: str) -> tuple[int, int]:
        """Column and row of ``what``.

        Raises:
            ArrayLimitError: It is not pinned, lies outside the device, or on a tile of another kind.
        """
        if tile.col is None or tile.row is None:
            raise ArrayLimitError(
                f"{what} is not pinned to a {kind}; pass tile=Tile(column, row): the compiler's placer does not find "
                "places for designs that fill the array"
            )
        if not (0 <= tile.col < self.cols and 0 <= tile.row < self.rows):
            raise ArrayLimitError(f"{what} is pinned to {tile}; the device has {self.cols} columns, {self.rows} rows")
        if arch.kind_of(tile.row) != kind:
            raise ArrayLimitError(f"{what} is pinned to {tile}, a {arch.kind_of(tile.row)}; it needs a {kind}")
        return tile.col, tile.row

    def __str__(self) -> str:
        return "NPU2" if self.cols == arch.COLUMNS else f"NPU2Col{self.cols}"


def device(columns: int) -> Device:
    """The device with that many columns."""
    return Device(columns)
