"""``tilefuse routing``: maps of attention's score tiles, in the terminal or as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tilefuse.tilemix.routing_map import Routing

app = typer.Typer(no_args_is_help=True, help="Which tiles of attention's scores are INT8.")

_AUTO = "auto"


@app.callback()
def _group() -> None:
    pass  # keeps `show` a subcommand while it is the only one


@app.command()
def show(
    layout: Annotated[str, typer.Argument(help="A layout, a percentage after it or not: bigbird, band75, local_sink.")],
    coverage: Annotated[
        float | None, typer.Option(help="Share of the tiles in INT8, 0 to 1.", show_default="the layout's")
    ] = None,
    seq_len: Annotated[int, typer.Option("-L", "--seq-len", help="Keys.")] = 4096,
    query_len: Annotated[
        int | None, typer.Option(help="Queries, the last at the last key.", show_default="as many as keys")
    ] = None,
    causal: Annotated[bool, typer.Option(help="Whether queries see no keys after their position.")] = True,
    window: Annotated[int | None, typer.Option(help="Keys that a query sees at most.")] = None,
    protect: Annotated[
        list[str] | None, typer.Option(help="diag or sink: INT8 only after all else; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of what is random.")] = 0,
    compat: Annotated[str | None, typer.Option(help='"release" for the maps of sptrans\' authors.')] = None,
    group: Annotated[str, typer.Option(help="Key tiles that share a bit, or auto.")] = _AUTO,
    words: Annotated[str, typer.Option(help="64-bit words of a row, or auto.")] = _AUTO,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A picture to write: .png, .svg, .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the map of a layout: rows are tiles of 128 queries, columns groups of tiles of 64 keys."""
    from tilefuse.tilemix import picture
    from tilefuse.tilemix.template import by_name

    chosen = by_name(
        layout,
        coverage,
        protect=protect or (),
        seed=seed,
        compat=compat,
        group=_count(group, "group"),
        words=_count(words, "words"),
    )
    routing = chosen.build(seq_len if query_len is None else query_len, seq_len, causal=causal, window=window)
    if out is not None:
        picture.image([(f"{routing.name}, {seq_len} keys", routing)], out)
    if as_json:
        sys.stdout.write(json.dumps(_to_json(routing, float(chosen.coverage)), indent=1) + "\n")
        return
    sys.stdout.write(f"{_title(routing)}\n\n{picture.text(routing)}\n{picture.LEGEND}\n{_coverages(routing)}\n")
    if out is not None:
        sys.stdout.write(f"wrote {out}\n")


def _count(value: str, name: str) -> Any:
    if value == _AUTO:
        return value
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither {_AUTO} nor a number", param_hint=f"--{name}") from None


def _title(routing: Routing) -> str:
    grid = routing.grid
    tiles = "tile" if grid.group == 1 else "tiles"
    rows = "row tile" if grid.row_tiles == 1 else "row tiles"
    words = "word" if routing.words.shape[-1] == 1 else "words"
    return (
        f"{routing.name}: {grid.query_len} queries x {grid.key_len} keys, {grid.row_tiles} {rows} x {grid.groups} "
        f"groups of {grid.group} {tiles} ({grid.group_keys} keys), {routing.words.shape[-1]} {words} a row"
    )


def _coverages(routing: Routing) -> str:
    tile, group, cell = (f"{routing.coverage(of):.1%}" for of in ("tile", "group", "cell"))
    return f"INT8: {tile} of tiles, {group} of groups, {cell} of cells"


def _to_json(routing: Routing, coverage: float) -> dict[str, Any]:
    grid = routing.grid
    return {
        "name": routing.name,
        "query_len": grid.query_len,
        "key_len": grid.key_len,
        "causal": grid.causal,
        "window": grid.window,
        "row_tiles": grid.row_tiles,
        "groups": grid.groups,
        "group": grid.group,
        "asked": coverage,
        "coverage": {of: routing.coverage(of) for of in ("tile", "group", "cell")},
        "words": [[f"{int(word):016x}" for word in row] for row in routing.words],
    }
