"""The subcommands of ``tilefuse``; imported only once typer and rich are known to be there."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from tilefuse import __version__
from tilefuse.convert import pack_checkpoint
from tilefuse.doctor.show import main as doctor_main
from tilefuse.errors import TileFuseError
from tilefuse.inspection import Inspection
from tilefuse.inspection import inspect as inspect_path
from tilefuse.layout import DEFAULT_COLUMNS, Layout, ZeroKind
from tilefuse.tilemix.command import app as routing_app

if TYPE_CHECKING:
    from tilefuse.model_routing import ModelRoutes
    from tilefuse.product_routing import ProductRoutes

_ROUTE_WIDTH = 80
"""Columns that the table of `route` needs at most."""

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Packed quantised linear layers."
)
app.add_typer(routing_app, name="routing")


def run(arguments: Sequence[str]) -> int:
    """Runs the command with ``arguments``; returns its exit status: 1 for an error that tilefuse reports."""
    # Names of layers and files may hold what the terminal has no character for, lone surrogates included.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # Without standalone mode click returns a status that typer.Exit gave, and hands its own errors on.
        status = app(args=list(arguments), prog_name="tilefuse", standalone_mode=False)
    except (TileFuseError, OSError) as error:
        sys.stderr.write(f"tilefuse: {error}\n")
        return 1
    except typer.Abort:
        return 130
    except Exception as error:
        # Errors of usage: typer may carry a click of its own, so they are told by what they can do.
        show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
        if show is None or not isinstance(code, int):
            raise
        show()
        return code
    return status if isinstance(status, int) else 0


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"tilefuse {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def pack(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint: a folder or one safetensors file.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The packed file to write.")],
    columns: Annotated[int, typer.Option(help="Columns of the array, 1 to 8.")] = DEFAULT_COLUMNS,
    include: Annotated[list[str] | None, typer.Option(help="Layers to pack, as in '*.mlp.*'; may be repeated.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Layers to leave out; may be repeated.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on from an interrupted run.")] = True,
) -> None:
    """Pack the quantised layers of a checkpoint into one file."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("validating", total=None)

        def progress(name: str, done: int, total: int) -> None:
            bar.update(task, description=name or "writing", completed=done, total=total)

        try:
            packed = pack_checkpoint(
                checkpoint,
                out,
                columns=columns,
                include=include or (),
                exclude=exclude or (),
                force=force,
                resume=resume,
                progress=progress,
            )
        except KeyboardInterrupt:
            bar.stop()
            kept = f"; the layers done are in {out}.partial: run it again to go on"
            sys.stderr.write(f"tilefuse: interrupted{kept if Path(f'{out}.partial').exists() else ''}\n")
            raise typer.Exit(130) from None
    details = [f"{packed.nbytes:,} bytes"]
    if packed.resumed:
        details.append(f"{packed.resumed} from the interrupted run")
    if packed.skipped:
        details.append(f"{packed.skipped} unquantised ones left out")
    sys.stdout.write(f"{packed.path}: {packed.layers} layers, {', '.join(details)}\n")


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="Folder of a checkpoint with float weights.")],
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    method: Annotated[
        str, typer.Option(help="awq: scales and clipping by search on a text; rtn: round to nearest.")
    ] = "awq",
    bits: Annotated[int, typer.Option(help="4 (AutoAWQ) or 8 (compressed-tensors).")] = 4,
    group: Annotated[
        int, typer.Option(help="Input channels that share a scale: 32, 64, 128; -1 for all, with 8 bits.")
    ] = 128,
    calibration: Annotated[
        Path | None, typer.Option(help="A text to calibrate with, in place of the built-in one.")
    ] = None,
    device: Annotated[str, typer.Option(help="torch device to search on.")] = "cpu",
    shard_gb: Annotated[float, typer.Option(help="Largest size of a file, in GB.")] = 5.0,
    resume: Annotated[bool, typer.Option(help="Go on from an interrupted run.")] = True,
    report: Annotated[
        bool | None,
        typer.Option("--report/--no-report", help="Measure perplexity before and after. On with awq, off with rtn."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text to measure perplexity on, in place of the built-in one.")
    ] = None,
) -> None:
    """Quantise a full-precision checkpoint to 4 or 8 bits."""
    # Not needed by the other commands.
    from tilefuse.awq.command import run as run_quantize

    status = run_quantize(
        source,
        out,
        method=method,
        bits=bits,
        group=group,
        calibration=calibration,
        device=device,
        shard_gb=shard_gb,
        resume=resume,
        report=report,
        text=text,
    )
    raise typer.Exit(status)


@app.command()
def generate(
    model: Annotated[
        str, typer.Argument(help="A quantised checkpoint: a folder, or a repository in transformers' cache.")
    ],
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="What to answer; - reads it from standard input.")],
    device: Annotated[
        str, typer.Option(help="cpu, npu, emulator, or auto: each phase where it is estimated to be the fastest.")
    ] = "auto",
    max_new_tokens: Annotated[int, typer.Option("-n", "--max-new-tokens", min=1, help="Tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, not as a conversation.")] = False,
    dtype: Annotated[str, typer.Option(help="Of activations: bfloat16, float16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for all.")] = 0,
    cache: Annotated[
        str,
        typer.Option(
            help="Where packed weights are kept: user (your cache folder), beside (the model), off, or a folder."
        ),
    ] = "user",
    fuse: Annotated[bool, typer.Option(help="Multiply q, k and v as one, gate and up too.")] = True,
    head: Annotated[
        int, typer.Option(help="8 rounds an output head that is not quantised to 8 bits; 16 leaves it as it is.")
    ] = 16,
    fallback: Annotated[
        str, typer.Option(help="For a layer that can't be packed: error, or dequantize it into torch.")
    ] = "error",
    attention: Annotated[
        str,
        typer.Option(help="sdpa, or a layout of tilefuse routing (local_sink, band, zero, one, ...) for prefill."),
    ] = "sdpa",
    coverage: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of the score tiles in INT8; by default the layout's.")
    ] = None,
) -> None:
    """Generate text with a quantised model."""
    try:
        from tilefuse.hf.command import run as run_generate
    except ImportError as error:
        raise TileFuseError(str(error)) from None
    status = run_generate(
        model,
        prompt,
        device=device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        raw=raw,
        dtype=dtype,
        threads=threads,
        cache=cache,
        fuse=fuse,
        head=head,
        fallback=fallback,
        attention=attention,
        coverage=coverage,
    )
    raise typer.Exit(status)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A packed file or a checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the linear layers of a packed file or a checkpoint."""
    found = inspect_path(path)
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), indent=1) + "\n")
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 200  # a pipe has no width of its own, and the default of 80 would fold the columns
        console.print(_table(found))
        for reason in found.refused.values():
            console.print(f"not read: {reason}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for bug reports.")] = False) -> None:
    """Say what this machine has and lacks for the NPU; exit with 1 if the NPU can't be used."""
    raise typer.Exit(doctor_main(as_json=as_json))


def _table(found: Inspection) -> Table:
    # Text: a name in brackets is no markup.
    table = Table(title=Text(f"{found.path} ({found.kind})"), title_justify="left", box=SIMPLE_HEAD)
    table.add_column("layer", overflow="fold")
    for heading in ("K x N", "scheme", "format"):
        table.add_column(heading)
    for heading in ("bytes", "bits/weight", "padding"):
        table.add_column(heading, justify="right")
    for row in found.rows:
        padding = "-" if row.padding is None else f"{row.padding:.1%}"
        table.add_row(
            Text(row.name),
            f"{row.k} x {row.n}",
            row.scheme,
            row.format,
            f"{row.nbytes:,}",
            f"{row.bits_per_weight:.3f}",
            padding,
        )
    total = found.nbytes * 8 / max(found.weights, 1)
    table.add_section()
    table.add_row(f"{len(found.rows)} layers", f"{found.weights:,}", "", "", f"{found.nbytes:,}", f"{total:.3f}", "")
    return table


@app.command()
def route(
    m: Annotated[int | None, typer.Argument(metavar="M", help="Rows of activations.", show_default=False)] = None,
    k: Annotated[int | None, typer.Argument(metavar="K", help="Input channels.", show_default=False)] = None,
    n: Annotated[int | None, typer.Argument(metavar="N", help="Output channels.", show_default=False)] = None,
    model: Annotated[
        Path | None, typer.Option(help="A quantised checkpoint, in place of M K N: all its layers, prefill and decode.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Bits of a weight, 4 or 8.")] = 4,
    group: Annotated[int, typer.Option(help="Input channels that share a scale; 0 for all of them.")] = 128,
    zero: Annotated[ZeroKind, typer.Option(help="Zero points (z8) or float minima (m16).")] = ZeroKind.Z8,
    columns: Annotated[int, typer.Option(help="Columns of the array, 1 to 8.")] = DEFAULT_COLUMNS,
    fuse: Annotated[bool, typer.Option(help="With --model: q, k and v as one product, gate and up too.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate y = x W, or the layers of a model, on each device, and say which one device="auto" takes."""
    # Not needed by the other commands.
    from tilefuse import model_routing, product_routing
    from tilefuse.runtime import auto_device
    from tilefuse.runtime.rates import calibrate

    console = Console()
    # A narrower terminal folds the lines; the tables must not drop digits.
    console.width = max(console.width, _ROUTE_WIDTH)
    found: ProductRoutes | ModelRoutes
    if model is not None:
        if m is not None:
            raise typer.BadParameter("pass M K N or --model, not both")
        found = model_routing.route_model(
            model, calibrate, lambda: auto_device().npu_usable, fuse=fuse, columns=columns
        )
        tables = _model_tables(found)
    else:
        if m is None or k is None or n is None:
            raise typer.BadParameter("pass M K N, as in `tilefuse route 512 4096 4096`, or --model PATH")
        layout = Layout(k, n, bits, group or k, zero, columns)
        found = product_routing.route(layout, m, calibrate, lambda: auto_device().npu_usable)
        tables = [_route_table(found)]
    if as_json:
        sys.stdout.write(json.dumps(found.to_json(), indent=1) + "\n")
        return
    for table in tables:
        console.print(table)
    for line in found.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _model_tables(found: ModelRoutes) -> list[Table]:
    from tilefuse.model_routing import SHOWN

    products = Table(title=Text(f"{found.path}; ms"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    products.add_column("products", overflow="fold")
    products.add_column("K x N", no_wrap=True)
    products.add_column("scheme", no_wrap=True)
    for heading in ("cpu, 1 row", "npu", f"cpu, {SHOWN}", "npu"):
        products.add_column(heading, justify="right", no_wrap=True)
    for kind in found.kinds:
        times = (kind.decode.cpu, kind.decode.npu, kind.prefill.cpu, kind.prefill.npu)
        shape = f"{kind.layout.k} x {kind.layout.n}"
        products.add_row(Text(f"{kind.count} {kind.name}"), shape, kind.scheme, *map(_time, times))
    phases = Table(box=SIMPLE_HEAD, pad_edge=False)
    phases.add_column("phase")
    for heading in ("rows", "cpu, ms", "npu, ms", "cpu, rows/s", "npu, rows/s"):
        phases.add_column(heading, justify="right", no_wrap=True)
    phases.add_column("faster")
    for name, phase in found.phases():
        rates = (f"{phase.rows / seconds:,.0f}" if seconds else "-" for seconds in (phase.cpu, phase.npu))
        phases.add_row(name, str(phase.rows), _time(phase.cpu), _time(phase.npu), *rates, phase.cheapest)
    return [products, phases]


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else _milliseconds(seconds)


def _route_table(found: ProductRoutes) -> Table:
    table = Table(title=Text(f"{found.title}; ms"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("device", "bound by"):
        table.add_column(heading, overflow="fold")
    for heading in ("work", "call", "staging", "switch", "total"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, estimate in found.options():
        parts = (estimate.work, estimate.overhead, estimate.staging, estimate.switch, estimate.total)
        table.add_row(name, estimate.bottleneck, *map(_milliseconds, parts))
    return table


def _milliseconds(seconds: float) -> str:
    """With three decimals, or as many as leave three digits and more."""
    ms = seconds * 1e3
    return f"{ms:.3f}" if ms < 100 else f"{ms:,.0f}" if ms >= 1e4 else f"{ms:,.1f}"
