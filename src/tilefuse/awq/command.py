"""``tilefuse quantize``: the progress bar and the report around `quantize_checkpoint`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilefuse.awq.pipeline import Options, quantize_checkpoint
from tilefuse.errors import FormatError, QuantizationError, TileFuseError


def run(
    source: Path,
    out: Path,
    *,
    method: Any,
    bits: int,
    group: int,
    calibration: Path | None,
    device: str,
    shard_gb: float,
    resume: bool,
    report: bool | None,
    text: Path | None,
) -> int:
    """The command with its options; returns its exit status.

    Raises:
        TileFuseError, OSError: As `quantize_checkpoint`.
    """
    if not 0 < shard_gb < math.inf:
        raise QuantizationError(f"--shard-gb = {shard_gb}: a positive number is needed")
    evaluated = None if text is None else _read(text)  # before hours of work, not after
    options = Options(
        bits=bits,
        group=group,
        method=method,
        calibration=None if calibration is None else _read(calibration),
        device=device,
        shard_bytes=max(1, round(shard_gb * 1e9)),
    )
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("reading", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        try:
            done = quantize_checkpoint(source, out, options, resume=resume, progress=progress)
            details = [
                f"{done.layers} layers",
                f"{done.nbytes:,} bytes, {done.nbytes / done.source_nbytes:.1%} of before",
            ]
            if done.resumed:
                details.append(f"{done.resumed} blocks from the interrupted run")
            sys.stdout.write(f"{done.path}: {', '.join(details)}\n")
            if report or (report is None and method == "awq"):
                _report(source, out, evaluated, device, progress)
        except ImportError as error:
            raise TileFuseError(str(error)) from None
        except KeyboardInterrupt:
            bar.stop()
            kept = f"; the blocks done are in {out}.partial: run it again to go on"
            sys.stderr.write(f"tilefuse: interrupted{kept if Path(f'{out}.partial').exists() else ''}\n")
            return 130
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not a text in UTF-8 ({error})") from None


def _report(source: Path, out: Path, text: str | None, device: str, progress: Any) -> None:
    from tilefuse.awq.perplexity import perplexity

    before = perplexity(source, text, device=device, progress=lambda done, total: progress("before", done, total))
    after = perplexity(out, text, device=device, progress=lambda done, total: progress("after", done, total))
    sys.stdout.write(
        f"perplexity on {before.tokens} tokens: before {before.value:.4f}, after {after.value:.4f} "
        f"({after.value / before.value - 1:+.2%})\n"
    )
