# The types of the compiled module, one section a binding file.

# --- bind_layout.cpp ---

LAYOUT_CONSTANTS: dict[str, int]

class TileLayout:
    def __init__(
        self,
        *,
        k: int,
        n: int,
        bits: int,
        tile_group: int,
        zero: int,
        columns: int,
        k_tiles: int,
        tiles_per_column: int,
        tile_bytes: int,
        scale_offset: int,
        zero_offset: int,
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def k_tiles_used(self) -> int: ...
    @property
    def n_tiles_used(self) -> int: ...
    @property
    def groups_per_tile(self) -> int: ...
    def tile_offset(self, n_tile: int, k_tile: int) -> int: ...

def pack(
    layout: TileLayout,
    *,
    codes: int,
    order: int,
    perm: int,
    group: int,
    scales: tuple[int, int, int, int],
    zeros: tuple[int, int, int] | None,
    mins: tuple[int, int, int, int] | None,
    out: int,
) -> tuple[int, int, int]: ...
def unpack(
    layout: TileLayout,
    *,
    packed: int,
    group: int,
    perm: int,
    codes: int,
    scales: int,
    zeros: int,
    mins: int,
) -> None: ...
def dequantize(layout: TileLayout, *, packed: int, perm: int, out: int) -> None: ...
