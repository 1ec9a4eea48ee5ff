"""Pictures of maps: characters for a terminal, and an image by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.errors import ToolchainError, UnsupportedFormatError
from tilefuse.files import write_atomically
from tilefuse.tilemix.grid import ceil_div
from tilefuse.tilemix.routing_map import Routing

COLUMNS, LINES = 64, 32
"""Characters of a picture at most: twice as many across, as they are half as wide as high."""

SHADES = ".:+*#"
"""Of a character that stands for 16-bit tiles alone, up to INT8 tiles alone."""

LEGEND = f"{SHADES[-1]} INT8   {SHADES[0]} 16 bits   {' '.join(SHADES[1:-1])} both"

INT8_COLOUR, EXACT_COLOUR, EMPTY_COLOUR = "#c2410c", "#2563eb", "#f3f4f6"
_PANEL_INCHES = 3.0
_PANELS_ACROSS = 4
_DPI = 110

Shares = npt.NDArray[np.float64]


def shares(routing: Routing) -> Shares:
    """Share of INT8 tiles in each row tile and group, over all heads; NaN where none is executed."""
    bits = routing.bits().astype(np.float64)
    share = bits.mean(axis=0) if routing.heads else bits
    return np.where(routing.grid.legal(), share, np.nan)


def text(routing: Routing) -> str:
    """The map in characters, a line for each row tile, or for several where there are more than fit."""
    share, weights = shares(routing), routing.grid.weights()
    down, across = (max(1, ceil_div(size, most)) for size, most in zip(share.shape, (LINES, COLUMNS), strict=True))
    int8 = _summed(np.nan_to_num(share) * weights, down, across)
    total = _summed(weights.astype(np.float64), down, across)
    lines = []
    for some, all_ in zip(int8, total, strict=True):
        line = "".join(_shade(a / b) if b else " " for a, b in zip(some, all_, strict=True))
        lines.append(line.rstrip() + "\n")
    return "".join(lines)


def image(routings: Sequence[tuple[str, Routing]], path: Path) -> None:
    """Draws maps side by side, each with its title, into a file of the kind that its name ends in.

    Raises:
        ToolchainError: matplotlib is not installed.
        UnsupportedFormatError: matplotlib writes no such file.
        OSError: The file can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ToolchainError(f"pictures need {error.name}, which is not installed: pip install matplotlib") from error
    across = min(len(routings), _PANELS_ACROSS)
    down = ceil_div(len(routings), across)
    figure = Figure(figsize=(_PANEL_INCHES * across + 0.4, (_PANEL_INCHES + 0.4) * down + 0.5), layout="constrained")
    kinds = FigureCanvasAgg(figure).get_supported_filetypes()
    kind = path.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise UnsupportedFormatError(
            f"{path} would be a {kind or 'nameless'} picture: end it in {', '.join(sorted(kinds))}"
        )
    colours = LinearSegmentedColormap.from_list("routing", [EXACT_COLOUR, INT8_COLOUR]).with_extremes(bad=EMPTY_COLOUR)
    axes = np.atleast_1d(figure.subplots(down, across, squeeze=False)).ravel()
    for axis in axes[len(routings) :]:
        axis.set_axis_off()
    for axis, (title, routing) in zip(axes, routings, strict=False):
        _panel(axis, title, routing, colours)
    names = ((INT8_COLOUR, "INT8"), (EXACT_COLOUR, "16 bits"), (EMPTY_COLOUR, "not executed"))
    handles = [Patch(facecolor=colour, edgecolor="#9ca3af", label=name) for colour, name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=_DPI, metadata={"Software": None} if kind == "png" else None)
    write_atomically(path, buffer.getvalue())


def _panel(axis: Any, title: str, routing: Routing, colours: Any) -> None:
    grid = routing.grid
    extent = (0, grid.groups * grid.group_keys, grid.row_tiles * grid.block_m, 0)
    if grid.row_tiles and grid.groups:
        axis.imshow(
            shares(routing), cmap=colours, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest"
        )
    axis.set_title(title, fontsize=9)
    axis.set_xlabel("key", fontsize=8)
    axis.set_ylabel("query", fontsize=8)
    axis.tick_params(labelsize=7)


def _summed(values: Shares, down: int, across: int) -> Shares:
    """Sums of blocks of ``down`` by ``across``."""
    rows, columns = (np.arange(0, size, step) for size, step in zip(values.shape, (down, across), strict=True))
    if not values.size:
        return np.zeros((len(rows), len(columns)))
    by_row: Shares = np.add.reduceat(values, rows, axis=0)
    found: Shares = np.add.reduceat(by_row, columns, axis=1)
    return found


def _shade(share: float) -> str:
    """The first and last shade mean no INT8 tile and INT8 tiles alone."""
    between = len(SHADES) - 2
    if share <= 0 or share >= 1:
        return SHADES[0 if share <= 0 else -1]
    return SHADES[1 + min(between - 1, int(share * between))]
