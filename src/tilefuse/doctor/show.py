"""The doctor's report on a terminal: a table where rich is installed, plain lines elsewhere."""

from __future__ import annotations

import json
import sys

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


def plain(report: Report) -> str:
    """The report as lines, long ones included: a command that is broken in two can't be copied."""
    lines = []
    for finding in report.findings:
        head = f"{finding.status:<8} {finding.id:<13} "
        lines.append(f"{head}{finding.found}")
        if finding.remedy:
            lines.append(f"{'->':>{len(head) - 1}} {finding.remedy}")
    return "\n".join([*lines, "", report.verdict, ""])


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
    for heading in ("", "", "found"):
        table.add_column(heading, overflow="fold")
    for finding in report.findings:
        # Text: brackets in paths are no markup.
        table.add_row(Text(str(finding.status), style=COLOURS[finding.status]), Text(finding.id), Text(finding.found))
    console = Console()
    console.print(table)
    # Under the table, where the terminal alone breaks lines: commands are for copying.
    for finding in report.findings:
        if finding.remedy:
            text = Text(f"{finding.id}: ", style=COLOURS[finding.status]).append(finding.remedy, style="default")
            console.print(text, soft_wrap=True)
    console.print(f"\n{report.verdict}", markup=False, highlight=False, soft_wrap=True)
    return True
