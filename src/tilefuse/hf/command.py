"""``tilefuse generate``: the progress bar, the stream and the figures around `tilefuse.hf.generation`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tilefuse.errors import FormatError, TileFuseError
from tilefuse.hf.attention import AttentionUse, attention_use
from tilefuse.hf.attention_config import NAME, set_attention
from tilefuse.hf.generation import DTYPES, Generated, Loaded, check_temperature, generate, load, peak_memory, prompt_ids
from tilefuse.hf.routing import phases_of
from tilefuse.routing import Template
from tilefuse.runtime import resolve_device, set_num_threads
from tilefuse.tilemix.template import by_name


def run(
    model: str,
    prompt: str,
    *,
    device: str,
    max_new_tokens: int,
    temperature: float,
    raw: bool,
    dtype: str,
    threads: int,
    cache: str,
    fuse: bool,
    head: int,
    fallback: str,
    attention: str,
    coverage: float | None,
) -> int:
    """The command with its options; returns its exit status.

    Raises:
        TileFuseError, OSError: As `tilefuse.hf.generation.load` and `generate`.
    """
    if dtype not in DTYPES:
        raise TileFuseError(f"dtype is {dtype!r}: there are {', '.join(DTYPES)}")
    check_temperature(temperature)
    routing = _routing(attention, coverage)
    if threads:
        set_num_threads(threads)
        import torch

        torch.set_num_threads(threads)
    if prompt == "-":
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise FormatError(f"the prompt on standard input is not a text in UTF-8 ({error})") from None
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("loading", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        where = cache if cache in ("user", "beside", "off") else Path(cache)
        loaded = load(
            model,
            dtype=DTYPES[dtype],
            progress=progress,
            device=device,
            cache=where,
            fuse=fuse,
            head=head,
            fallback=fallback,
        )
    if routing is not None:
        set_attention(loaded.model, routing)
    ids = prompt_ids(loaded.tokenizer, prompt, chat=not raw)

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    done = generate(loaded, ids, max_new_tokens=max_new_tokens, temperature=temperature, on_text=show)
    sys.stdout.write("\n")
    sys.stdout.flush()
    for line in figures(loaded, done):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 130 if done.interrupted else 0


def figures(loaded: Loaded, done: Generated) -> list[str]:
    """What is said below the text."""
    phases = phases_of(loaded.model)
    packed = "packed" if loaded.packed else "mapped"
    lines = [
        f"load     {loaded.seconds:.2f} s: {loaded.packed_bytes / 1e6:,.1f} MB of weights {packed}, "
        f"{loaded.other_bytes / 1e6:,.1f} MB of others read",
        f"prefill  {done.prompt} tokens, {done.prefill_rate:,.1f} tokens/s, on {_where(done, 'prefill')}",
        f"decode   {len(done.tokens)} tokens, {done.decode_rate:,.1f} tokens/s, on {_where(done, 'decode')}",
        f"memory   {peak_memory() / 1e6:,.0f} MB resident at most, mapped files included",
    ]
    if phases.reason:
        lines.append(f"devices  {phases.reason}")
    if uses := attention_use(loaded.model):
        lines.append(f"attention {_attention(uses)}")
    return lines


def _routing(attention: str, coverage: float | None) -> Template | None:
    """The routing that the options ask for, None for sdpa.

    Raises:
        TileFuseError: There is no such layout, or a coverage that no layout is to have.
    """
    if attention == "sdpa":
        if coverage is not None:
            raise TileFuseError("coverage goes with a layout: pass --attention local_sink, for one")
        return None
    return by_name(attention, coverage)


def _attention(uses: Sequence[AttentionUse]) -> str:
    """What ran where, over all layers."""
    calls: Counter[str] = Counter()
    for use in uses:
        calls += use.calls
    tiles, int8 = sum(use.tiles for use in uses), sum(use.int8_tiles for use in uses)
    routings = ", ".join(dict.fromkeys(use.routing or "16-bit" for use in uses))
    ours = f"tilefuse, {routings}: {int8 / tiles:.1%} of {tiles:,} score tiles in INT8" if tiles else "no prefill"
    by_sdpa = [f"{name.removeprefix('sdpa: ')} ({count:,} calls)" for name, count in calls.items() if name != NAME]
    return ours + (f"; by sdpa: {', '.join(by_sdpa)}" if by_sdpa else "")


def _where(done: Generated, phase: str) -> str:
    """The devices of a phase. What "auto" sent to the NPU, that device has counted."""
    counts = {device: count for (name, device), count in done.calls.items() if name == phase}
    parts = []
    for device, count in counts.items():
        text = f"{device} ({count:,} products"
        if device in ("npu", "emulator"):
            statistics = getattr(resolve_device(device), "statistics", None)
            text += f", {statistics().dispatches:,} dispatches so far" if statistics is not None else ""
        parts.append(f"{text})")
    return ", ".join(parts) or "no device"
