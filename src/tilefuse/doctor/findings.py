"""What the doctor finds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tilefuse import __version__


class Status(StrEnum):
    """How it is with one thing that the NPU takes."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; the NPU works all the same."""
    MISSING = "missing"
    """Not there, and the NPU can't be used without."""
    BROKEN = "broken"
    """There, but the NPU can't be used with it as it is."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    id: str
    """What it is about; stable, for scripts."""
    status: Status
    found: str
    remedy: str = ""
    """What to do, where there is something to do."""


@dataclass(frozen=True)
class Report:
    """All findings, in the order in which to see to them."""

    findings: tuple[Finding, ...]

    @property
    def usable(self) -> bool:
        """Whether nothing is in the NPU's way."""
        return all(finding.status in (Status.OK, Status.NOTE) for finding in self.findings)

    @property
    def verdict(self) -> str:
        """One line."""
        wrong = [finding.id for finding in self.findings if finding.status in (Status.MISSING, Status.BROKEN)]
        if not wrong:
            return "The NPU can be used."
        return f"The NPU can't be used; begin with: {wrong[0]}. Everything runs on device='cpu' meanwhile."

    def to_json(self, secrets: Sequence[str] = ()) -> dict[str, Any]:
        """For bug reports: no home folders, nor any of ``secrets`` (names of users and hosts)."""
        return {
            "tilefuse": __version__,
            "usable": self.usable,
            "findings": [
                {
                    "id": finding.id,
                    "status": str(finding.status),
                    "found": redact(finding.found, secrets),
                    "remedy": redact(finding.remedy, secrets),
                }
                for finding in self.findings
            ],
        }


def redact(text: str, secrets: Sequence[str] = ()) -> str:
    """``text`` with ~ for home folders and ... for ``secrets``."""
    for secret in sorted((secret for secret in secrets if secret.startswith("/") and len(secret) > 1), key=len)[::-1]:
        text = re.sub(rf"{re.escape(secret.rstrip('/'))}(?![\w.-])", "~", text)
    text = re.sub(r"(?<![\w/.~])/(?:home|Users)/[^\s/:,;'\"`)]+|(?<![\w/.~])/root(?![\w.-])", "~", text)
    for secret in secrets:
        if secret and not secret.startswith("/"):
            text = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", "...", text)
    return text
