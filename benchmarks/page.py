"""Pages of docs/benchmarks/: Markdown, and the command that writes or prints one."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tilefuse.files import write_atomically

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"

_WIDTH = 120


def paragraph(text: str) -> str:
    """The words of ``text``, in lines as long as the sources'."""
    return textwrap.fill(" ".join(text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)


def bullets(items: Iterable[str]) -> str:
    """A list, in lines as long as the sources'."""
    return "\n".join(textwrap.fill(" ".join(item.split()), _WIDTH, subsequent_indent="  ") for item in items)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, the first ``left`` columns to the left, the others to the right."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * left + "---:|" * (len(header) - left)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def command(summary: str, document: Callable[[], str], output: Path, arguments: Sequence[str] | None) -> int:
    """The command of a page, which makes it with ``document``; returns its exit code."""
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("--print", action="store_true", dest="to_stdout", help="print the page instead of writing it")
    if parser.parse_args(arguments).to_stdout:
        sys.stdout.write(document())
        return 0
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, document().encode())
    return 0
