"""The doctor's report on a terminal: a table where rich is installed, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import textwrap

from tilefuse.doctor import Report, Status, System, examine

COLOURS = {Status.OK: "green", Status.NOTE: "cyan", Status.MISSING: "bold red", Status.BROKEN: "bold red"}


def main(*, as_json: bool, system: System | None = None) -> int:
    """Examines and prints; returns the exit status: 1 if the NPU can't be used."""
    system = system or System()
    report = examine(system)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(system.secrets), indent=1) + "\n")
    elif not _print_table(report):
        sys.stdout.write(plain(report))
    return 0 if report.usable else 1


def plain(report: Report, width: int = 110) -> str:
    """The report as lines."""
    lines = []
    for finding in report.findings:
        head = f"{finding.status:<8} {finding.id:<13} "
        indent = " " * len(head)
        lines.append(_wrapped(finding.found, head, indent, width))
        if finding.remedy:
            lines.append(_wrapped(finding.remedy, f"{indent}-> ", f"{indent}   ", width))
    return "\n".join([*lines, "", report.verdict, ""])


def _wrapped(text: str, first: str, rest: str, width: int) -> str:
    # Neither paths nor commands are broken in the middle of a word, so that they can be copied.
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _print_table(report: Report) -> bool:
    """False where rich isn't installed, or nobody looks at colours."""
    if not sys.stdout.isatty():
        return False
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=SIMPLE_HEAD)
    for heading in ("", "", "found, and what to do"):
        table.add_column(heading, overflow="fold")
    for finding in report.findings:
        # Text: brackets in paths are no markup.
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="bold" if finding.status is not Status.NOTE else "")
        table.add_row(Text(str(finding.status), style=COLOURS[finding.status]), Text(finding.id), text)
    console = Console()
    console.print(table)
    console.print(report.verdict, markup=False, highlight=False)
    return True
