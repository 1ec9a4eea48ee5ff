"""Pictures of the array: which way activations, weights, sums and results go."""

from __future__ import annotations

from dataclasses import dataclass

from dataflow_pictures.svg import INK, PAPER, QUIET, RULE, SUMS, TINTS, W2, Picture, W, X, Y
from tilefuse import arch
from tilefuse.configurations import BAND_ROWS, L2_BATCH, X_PART
from tilefuse.layout import NT, ROWS
from tilefuse.plan import Plan

LEFT, PITCH = 62, 124
"""Where the first column starts; from a column to the next."""

CORE_X, CORE_WIDTH, CORE_HEIGHT, ROW_PITCH = 34, 74, 48, 82


@dataclass(frozen=True)
class Grid:
    """Where the tiles of an array are."""

    columns: int
    top: float
    memtile_height: int

    def column(self, column: int) -> float:
        """Left edge of a column."""
        return LEFT + column * PITCH

    def core(self, column: int, row: int) -> tuple[float, float]:
        """Upper left corner; row 0 is the lowest."""
        return self.column(column) + CORE_X, self.top + (ROWS - 1 - row) * ROW_PITCH

    @property
    def memtile(self) -> float:
        """Upper edge of the memory tiles."""
        return self.top + ROWS * ROW_PITCH + 6

    @property
    def shim(self) -> float:
        """Upper edge of the shims."""
        return self.memtile + self.memtile_height + 34

    @property
    def dram(self) -> float:
        """Upper edge of the host's buffers."""
        return self.shim + 66

    def draw(self, picture: Picture, core: list[str], memtile: list[list[str]]) -> None:
        """Boxes and their names, ``core`` in every core and ``memtile`` by column."""
        for row in range(ROWS):
            y = self.core(0, row)[1]
            picture.text(14, y + 22, f"row {row}", size=11.5, bold=True)
            picture.text(14, y + 36, "cores", size=10, colour=QUIET)
        middle = self.memtile + self.memtile_height / 2
        for name, y in (("memory", middle - 3), ("tiles", middle + 11), ("shims", self.shim + 21)):
            picture.text(14, y, name, size=10.5, colour=QUIET)
        for column in range(self.columns):
            left = self.column(column) + 10
            for row in range(ROWS):
                x, y = self.core(column, row)
                picture.box(x, y, CORE_WIDTH, CORE_HEIGHT, fill=TINTS[QUIET])
                for i, said in enumerate(core):
                    picture.text(
                        x + CORE_WIDTH / 2,
                        y + (29 if len(core) == 1 else 21 + 15 * i),
                        said,
                        size=10.5,
                        anchor="middle",
                    )
            picture.box(left, self.memtile, PITCH - 14, self.memtile_height, fill=TINTS[QUIET])
            for i, said in enumerate(memtile[column]):
                colour = {"w": W, "x": X, "y": Y}[said[0]]
                picture.text(left + (PITCH - 14) / 2, self.memtile + 21 + 18 * i, said, colour=colour, anchor="middle")
            picture.box(left, self.shim, PITCH - 14, 34, fill=TINTS[QUIET])
            picture.text(left + (PITCH - 14) / 2, self.shim + 21, f"shim {column}", anchor="middle")

    def draw_dram(self, picture: Picture, lines: list[tuple[str, str]]) -> None:
        """The host's memory, and (text, colour) side by side in it."""
        width = self.columns * PITCH - 4
        picture.box(LEFT + 6, self.dram, width, 36, fill=PAPER, stroke=INK)
        picture.text(LEFT + 20, self.dram + 22, "DRAM", size=11.5, bold=True)
        for i, (said, colour) in enumerate(lines):
            picture.text(LEFT + 84 + i * (width - 90) / len(lines), self.dram + 22, said, colour=colour)


def key(picture: Picture, cards: list[tuple[str, str, list[str]]], top: float, width: float) -> None:
    """Cards side by side: (colour, title, lines)."""
    each = (width - 28 - 12 * (len(cards) - 1)) / len(cards)
    for i, (colour, title, lines) in enumerate(cards):
        picture.card(14 + i * (each + 12), top, each, colour, title, lines)


def gemm(plan: Plan) -> str:
    """The GEMM's streams on all columns."""
    config = plan.configuration
    columns, tiles = config.columns, config.tiles
    grid = Grid(columns, 146, 70)
    width = LEFT + columns * PITCH + 16
    picture = Picture(width, int(grid.dram) + 50, "The dataflow of a GEMM on the array")
    picture.text(14, 28, f"GEMM: {config.name}", size=15, bold=True)
    key(
        picture,
        [
            (
                X,
                "activations, bfp16",
                [
                    f"a row: shim, memory tile, {columns} cores (broadcast)",
                    f"memory tile: {config.x_l2_depth} objects of {L2_BATCH} bands = {config.x_l2_object} B",
                    f"core: 2 objects of a band, {BAND_ROWS} rows × 128 = {config.x_object} B",
                ],
            ),
            (
                W,
                "packed weights",
                [
                    f"a column: shim, memory tile, {ROWS} cores (broadcast)",
                    f"memory tile: {config.w_l2_depth} of {L2_BATCH} k tiles × {tiles} = {config.w_l2_object} B",
                    f"core: 2 objects of {tiles} tile{'s' * (tiles > 1)} = {config.w_object} B",
                ],
            ),
            (
                Y,
                "results, bfloat16",
                [
                    f"core: 2 pieces of {BAND_ROWS} × {NT} = {config.y_object} B",
                    f"memory tile: 2 objects of {config.y_l2_object} B, joined from",
                    f"{config.join} piece{'s' * (config.join > 1)} of each of a column's {ROWS} cores: rows of y",
                ],
            ),
        ],
        44,
        width,
    )
    x_columns = {config.x_column(row): row for row in range(ROWS)}
    held = [f"w  {config.w_l2_depth} × {config.w_l2_object}", f"y  2 × {config.y_l2_object}"]
    memtiles = [
        [*held, f"x  {config.x_l2_depth} × {config.x_l2_object}"] if column in x_columns else held
        for column in range(columns)
    ]

    # Weights and results of a column run beside its cores; activations below a row of them.
    for column in range(columns):
        left = grid.column(column)
        up, down = left + 24, left + PITCH - 8
        picture.line([(up, grid.memtile), (up, grid.core(column, ROWS - 1)[1] + 24)], W)
        picture.line([(down, grid.core(column, ROWS - 1)[1] + 24), (down, grid.memtile)], Y, arrow=True)
        for row in range(ROWS):
            x, y = grid.core(column, row)
            picture.line([(up, y + 24), (x, y + 24)], W, arrow=True)
            picture.line([(x + CORE_WIDTH, y + 24), (down, y + 24)], Y)
            if row < ROWS - 1:
                picture.dot(up, y + 24, W)
        for at, colour, goes_up in ((left + 40, W, True), (left + 88, Y, False)):
            for upper, lower in ((grid.memtile + grid.memtile_height, grid.shim), (grid.shim + 34, grid.dram)):
                ends = [(at, lower), (at, upper)]
                picture.line(ends if goes_up else ends[::-1], colour, arrow=True)
    for column, row in x_columns.items():
        at = grid.column(column) + 64
        for upper, lower in ((grid.memtile + grid.memtile_height, grid.shim), (grid.shim + 34, grid.dram)):
            picture.line([(at, lower), (at, upper)], X, arrow=True)
        y = grid.core(0, row)[1] + CORE_HEIGHT + 16
        riser = grid.column(column) + 14
        first, last = (grid.core(c, row)[0] + CORE_WIDTH / 2 for c in (0, columns - 1))
        picture.line([(min(riser, first), y), (last, y)], X, bridge=True)
        picture.line([(riser, grid.memtile), (riser, y)], X, bridge=True)
        picture.dot(riser, y, X)
        for c in range(columns):
            x = grid.core(c, row)[0] + CORE_WIDTH / 2
            picture.line([(x, y), (x, y - 16)], X, arrow=True)
            if c < columns - 1:
                picture.dot(x, y, X)
    grid.draw(picture, ["sums fp32", f"{plan.bands * BAND_ROWS} × {tiles * NT}"], memtiles)
    grid.draw_dram(
        picture,
        [
            (f"x {4 * plan.x_words} B [block][row][k tile][band]", X),
            (f"w {4 * plan.w_words} B, one run a column", W),
            (f"y {plan.y_rows} × {plan.layout.n_padded} bfloat16", Y),
        ],
    )
    return picture.render()


def gemv(plan: Plan) -> str:
    """The GEMV with one weight stream a column."""
    config = plan.configuration
    columns = config.columns
    grid = Grid(columns, 146, 34)
    width = LEFT + columns * PITCH + 16
    picture = Picture(width, int(grid.dram) + 50, "The dataflow of a GEMV on the array")
    picture.text(14, 28, f"GEMV: {config.name}", size=15, bold=True)
    key(
        picture,
        [
            (
                X,
                "activations, bfloat16",
                [
                    f"one shim, all {ROWS * columns} cores (broadcast), once",
                    f"core: 2 objects of {config.x_object // 2} values = {config.x_object} B,",
                    f"of which row r keeps the r-th {config.x_object // 2 // ROWS}",
                ],
            ),
            (
                W,
                "packed weights",
                [
                    "a column: one shim, a linear run",
                    f"memory tile: {config.w_l2_depth} of {config.w_l2_object} B, split:",
                    f"row r: k tiles r, r + {ROWS}, ...; 2 of {config.w_object} B",
                ],
            ),
            (
                SUMS,
                "sums, fp32",
                [
                    "go down the column, from neighbour",
                    "to neighbour, in shared memory:",
                    f"2 objects of {NT} = {NT * 4} B",
                ],
            ),
            (
                Y,
                "results, bfloat16",
                ["row 0 rounds once and sends", f"{NT} outputs = {config.y_object} B,", "straight to its shim"],
            ),
        ],
        44,
        width,
    )
    x_shim = columns // 2
    riser = grid.column(x_shim) + 5
    rows_y = [grid.core(0, row)[1] + CORE_HEIGHT + 13 for row in range(ROWS)]
    for column in range(columns):
        left = grid.column(column)
        # Four fifos leave the memory tile; each ends at its row.
        for row in range(ROWS):
            at = left + 15 + 4 * (ROWS - 1 - row) if row else left + 27
            x, y = grid.core(column, row)
            picture.line([(at, grid.memtile), (at, y + 30), (x, y + 30)], W, width=1.5, arrow=True)
        down = left + PITCH - 8
        x, y = grid.core(column, 0)
        picture.line([(x + CORE_WIDTH, y + 24), (down, y + 24), (down, grid.shim)], Y, arrow=True)
        picture.line([(left + 40, grid.shim), (left + 40, grid.memtile + grid.memtile_height)], W, arrow=True)
        picture.line([(left + 40, grid.dram), (left + 40, grid.shim + 34)], W, arrow=True)
        picture.line([(left + 88, grid.shim + 34), (left + 88, grid.dram)], Y, arrow=True)
    for row in range(ROWS):
        first, last = (grid.core(c, row)[0] + 18 for c in (0, columns - 1))
        picture.line([(first, rows_y[row]), (last, rows_y[row])], X, bridge=True)
        for column in range(columns):
            x = grid.core(column, row)[0] + 18
            picture.line([(x, rows_y[row]), (x, rows_y[row] - 13)], X, arrow=True)
    shim_x = grid.column(x_shim) + 24
    picture.line([(shim_x, grid.dram), (shim_x, grid.shim + 34)], X, arrow=True)
    picture.line(
        [(shim_x, grid.shim), (shim_x, grid.shim - 18), (riser, grid.shim - 18), (riser, rows_y[-1])], X, bridge=True
    )
    for y in rows_y:
        picture.dot(riser, y, X)
    for column in range(columns):
        for row in range(1, ROWS):
            x, y = grid.core(column, row)
            at = x + CORE_WIDTH - 16
            picture.line([(at, y + CORE_HEIGHT), (at, y + ROW_PITCH)], SUMS, width=2.4, arrow=True, bridge=True)
    grid.draw(picture, ["x, sums"], [[f"w  {config.w_l2_depth} × {config.w_l2_object}"]] * columns)
    grid.draw_dram(
        picture,
        [
            (f"x {4 * plan.x_words} B: parameters, then K values", X),
            (f"w {4 * plan.w_words} B, one run a column", W),
            (f"y {plan.layout.n_padded} bfloat16", Y),
        ],
    )
    return picture.render()


def gemv_two_streams(plan: Plan) -> str:
    """One column of the GEMV with two weight streams, and what they bring."""
    config = plan.configuration
    _, groups, objects = plan.parameters
    picture = Picture(960, 470, "A column of the GEMV with two weight streams")
    picture.text(14, 28, f"GEMV, two streams a column: {config.name}", size=15, bold=True)
    left, core_x, top = 84.0, 124.0, 56.0
    for row in range(ROWS):
        y = top + (ROWS - 1 - row) * 62
        picture.box(core_x, y, 104, 40, fill=TINTS[QUIET])
        picture.text(core_x + 52, y + 25, f"row {row}: x, sums", anchor="middle")
        if row:
            picture.line([(core_x + 80, y + 40), (core_x + 80, y + 62)], SUMS, width=2.4, arrow=True)
        stream = row // 2
        at = left + 8 * (ROWS - 1 - row) - 4
        picture.line([(at, 312), (at, y + 22), (core_x, y + 22)], W if stream == 0 else W2, arrow=True)
    picture.line([(core_x + 104, top + 3 * 62 + 20), (262, top + 3 * 62 + 20), (262, 376)], Y, arrow=True)
    picture.box(66, 312, 170, 36, fill=TINTS[QUIET])
    picture.text(151, 334, f"2 fifos, each {config.w_l2_depth} × {config.w_l2_object}", size=10.5, anchor="middle")
    picture.box(66, 376, 216, 32, fill=TINTS[QUIET])
    picture.text(151, 396, "shim: both channels out", size=10.5, anchor="middle")
    for at, colour, name in ((96, W2, "stream 1"), (206, W, "stream 0")):
        picture.line([(at, 376), (at, 348)], colour, arrow=True)
        picture.line([(at, 436), (at, 408)], colour, arrow=True)
        picture.text(at, 452, name, size=10.5, colour=colour, anchor="middle")
    picture.line([(262, 408), (262, 436)], Y, arrow=True)
    picture.text(262, 452, "y", size=10.5, colour=Y, anchor="middle")

    x = 330.0
    picture.text(
        x, 76, "What a stream brings, in objects of a tile's size for each of its two rows:", size=12, bold=True
    )
    for stream, colour in ((0, W), (1, W2)):
        y = 96.0 + 96 * stream
        rows = (2 * stream, 2 * stream + 1)
        picture.text(x, y + 12, f"stream {stream}, to rows {rows[0]} and {rows[1]}", size=11, colour=colour, bold=True)
        at = x
        shown = [(f"x, row {row}", X) for row in rows] + [("...", PAPER)]
        shown += [(f"k tile {k}", colour) for k in (rows[0], rows[1], rows[0] + ROWS, rows[1] + ROWS)] + [
            ("...", PAPER)
        ]
        for said, fill in shown:
            wide = 70.0 if said != "..." else 26.0
            picture.box(at, y + 22, wide, 34, fill=TINTS.get(fill, PAPER), stroke=RULE if said != "..." else PAPER)
            picture.text(at + wide / 2, y + 43, said, size=10.5, anchor="middle")
            at += wide + 4
        picture.text(x, y + 72, f"{objects} × 2 objects of x", size=10.5, colour=QUIET)
        picture.text(
            x + 178, y + 72, f"2 of every {ROWS} tiles, {groups} times an output tile", size=10.5, colour=QUIET
        )
    y = 306.0
    picture.text(x, y, f"An object of x: {config.w_object} B, as large as a tile of weights", size=12, bold=True)
    parts = [("parameters", 64, 96, QUIET), (f"{X_PART} k tiles of the row's x", X_PART * 256, 300, X)]
    rest = config.w_object - 64 - X_PART * 256
    parts.append(("unused", rest, 96, PAPER))
    at = x
    for said, nbytes, wide, colour in parts:
        picture.box(at, y + 12, wide, 34, fill=TINTS.get(colour, PAPER), dashed=colour == PAPER)
        picture.text(at + wide / 2, y + 33, said, size=10.5, anchor="middle")
        picture.text(at + wide / 2, y + 62, f"{nbytes} B", size=10.5, colour=QUIET, anchor="middle")
        at += wide
    shim = 2 * arch.STREAM_BYTES
    for i, said in enumerate(
        (
            f"A column takes {shim} B a cycle instead of {shim // 2}, and a core needs one channel in instead of two.",
            f"It pays where DRAM brings more than {config.columns} × {shim // 2} B × {arch.CLOCK_HZ / 1e9:.1f} GHz = "
            f"{config.columns * shim / 2 * arch.CLOCK_HZ / 1e9:.1f} GB/s.",
        )
    ):
        picture.text(x, y + 100 + 18 * i, said, size=11.5)
    return picture.render()
