"""The packed stream: what lies where, which row of a GEMV takes what, and how a pass of a GEMM reads it."""

from __future__ import annotations

from dataflow_pictures.svg import INK, PAPER, QUIET, RULE, TINTS, Picture, W, Y
from tilefuse.configurations import L2_BATCH
from tilefuse.layout import KT, NT, ROWS, Layout

ROW_TINTS = ["#fbe6cf", "#f3cda3", "#e9b274", "#dc9443"]
"""Of the k tiles of a GEMV's rows 0 to 3."""

CELL, HEIGHT = 43, 32


def _cell(picture: Picture, x: float, y: float, said: str, fill: str, width: float = CELL) -> None:
    picture.box(x, y, width - 3, HEIGHT, fill=fill, stroke=RULE if fill != PAPER else PAPER)
    picture.text(x + (width - 3) / 2, y + 20, said, size=10.5, anchor="middle")


def packed(layout: Layout) -> str:
    """Of one layer."""
    columns, k_tiles, slots = layout.columns, layout.k_tiles, layout.tiles_per_column
    picture = Picture(1016, 712, "The packed stream of weights")
    left, width = 20.0, 976.0

    def heading(y: float, said: str, more: str) -> None:
        picture.text(left, y, said, size=13, bold=True)
        picture.text(left, y + 18, more, size=11, colour=QUIET)

    heading(
        32,
        f"The buffer: K = {layout.k}, N = {layout.n}, {layout.bits} bits, groups of {layout.group}",
        f"Output tile t belongs to column t mod {columns}; a column's {slots} × {k_tiles} tiles are one run of "
        f"{layout.column_bytes} B.",
    )
    each = width / columns
    for column in range(columns):
        fill = TINTS[W] if column == 0 else TINTS[QUIET]
        picture.box(left + column * each, 62, each - 4, 40, fill=fill)
        middle = left + column * each + each / 2 - 2
        picture.text(middle, 79, f"column {column}", size=11, anchor="middle", bold=column == 0)
        tiles = ", ".join(str(column + i * columns) for i in range(2))
        picture.text(middle, 94, f"tiles {tiles}, ...", size=10, colour=QUIET, anchor="middle")
    for a, b in ((left, left), (left + each - 4, left + width)):
        picture.line([(a, 103), (b, 176)], RULE, width=1, dashed=True)

    picture.text(left + 10, 142, "A column's run: output tile by output tile, k tile by k tile", size=13, bold=True)
    at = left
    first_slot: list[float] = []
    for slot, shown in ((0, 11), (1, 10)):
        n_tile = slot * columns
        begin = at
        cells = [*range(shown - 1), None, k_tiles - 1] if slot == 0 else [*range(shown), None]
        for k_tile in cells:
            if k_tile is None:
                _cell(picture, at, 198, "...", PAPER, 26)
                at += 26
                continue
            _cell(picture, at, 198, f"k {k_tile}", ROW_TINTS[k_tile % ROWS])
            if slot == 0 and k_tile < 2 * ROWS:
                first_slot.append(at)
            at += CELL
        picture.line([(begin, 190), (at - 4, 190)], W, width=1.5)
        picture.text(begin, 184, f"output tile {n_tile}", size=10.5, colour=W, bold=True)
        at += 8

    y = 258.0
    picture.text(left, y + 4, "GEMV: the memory tile deals the run to its four rows", size=11.5, bold=True)
    for row in range(ROWS):
        x = left + 384 + row * 150
        picture.box(x, y - 10, 18, 18, fill=ROW_TINTS[row])
        picture.text(x + 25, y + 4, f"row {row}: k {row}, {row + ROWS}, ...", size=11)

    y = 312.0
    heading(
        y,
        "A tile",
        f"{KT} input x {NT} output channels in {layout.tile_bytes} B: "
        f"{layout.tile_bytes * 8 / (KT * NT):.2f} bits a weight; nothing else is stored for a weight (not to scale)",
    )
    parts = [
        ("codes", layout.code_bytes, f"blocks of 8 × 8, [{KT // 8}][{NT // 8}]", 560.0, TINTS[W]),
        (
            "scales",
            layout.zero_offset - layout.scale_offset,
            f"bfloat16 [{layout.groups_per_tile}][{NT}]",
            208.0,
            TINTS[Y],
        ),
        ("zero points", layout.groups_per_tile * NT, f"uint8 [{layout.groups_per_tile}][{NT}]", 208.0, "#e4ecf6"),
    ]
    at = left
    offset = 0
    for name, nbytes, order, wide, fill in parts:
        picture.box(at, y + 32, wide, 44, fill=fill)
        picture.text(at + wide / 2, y + 51, name, size=11.5, anchor="middle", bold=True)
        picture.text(at + wide / 2, y + 67, order, size=10.5, anchor="middle")
        picture.text(at, y + 92, f"byte {offset}", size=10, colour=QUIET)
        at += wide
        offset += nbytes
    picture.text(at, y + 92, f"{layout.tile_bytes}", size=10, colour=QUIET, anchor="end")

    y = 446.0
    heading(
        y,
        "GEMM: a pass takes one output tile, or two side by side",
        f"One: the run as it is, {L2_BATCH} k tiles an object of the memory tile. Two: the descriptor goes to and fro "
        f"between two output tiles, {L2_BATCH} k tiles at a time,",
    )
    picture.text(
        left,
        y + 34,
        "and the memory tile sends them in turn, so that a core gets both tiles of a k tile as one object.",
        colour=QUIET,
    )
    names = [(n_tile, k) for n_tile in (0, columns) for k in range(L2_BATCH)]
    sent = [(n_tile, k) for k in range(L2_BATCH) for n_tile in (0, columns)]
    fills = {0: TINTS[W], columns: "#f0c795"}
    wide, gap, x0 = 92.0, 12, left + 192

    def leaving(i: int) -> float:
        return x0 + i * wide + (i // 2 - 1.5) * gap

    up, down = y + 66, y + 190
    picture.text(left, up + 14, "arrives: one object", size=11.5, bold=True)
    picture.text(left, up + 30, f"{2 * L2_BATCH} × {layout.tile_bytes} B", size=10.5, colour=QUIET)
    picture.text(left, down + 14, "leaves: an object a k tile", size=11.5, bold=True)
    picture.text(left, down + 30, f"2 × {layout.tile_bytes} B", size=10.5, colour=QUIET)
    for i, (n_tile, k) in enumerate(names):
        j = sent.index((n_tile, k))
        a, b = x0 + i * wide + wide / 2 - 2, leaving(j) + wide / 2 - 2
        picture.line([(a, up + HEIGHT), (a, up + HEIGHT + 12), (b, down - 14), (b, down - 2)], W, width=1.2, arrow=True)
    for i, (n_tile, k) in enumerate(names):
        _cell(picture, x0 + i * wide, up, f"tile {n_tile}, k {k}", fills[n_tile], wide)
    for i, (n_tile, k) in enumerate(sent):
        _cell(picture, leaving(i), down, f"tile {n_tile}, k {k}", fills[n_tile], wide)
    for k in range(L2_BATCH):
        picture.box(leaving(2 * k) - 4, down - 5, 2 * wide + 5, HEIGHT + 10, fill="none", stroke=INK, radius=5)
        picture.text(
            leaving(2 * k) + wide - 2, down + HEIGHT + 21, f"step {k}", size=10.5, colour=QUIET, anchor="middle"
        )
    return picture.render()
