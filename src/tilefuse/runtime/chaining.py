"""Whether several runs can go to the driver as one command."""

from __future__ import annotations

from pathlib import Path

FIRMWARE = (6, 15)
"""Firmware that takes a list of runs (driver, npu4 tables: AIE2_NPU_COMMAND). Older ones may drop it without a word."""

SYSFS = Path("/sys")


def firmware_version(bdf: str, sysfs: Path = SYSFS) -> tuple[int, ...] | None:
    """The NPU's firmware as the driver says it, or None; pyxrt has no way to ask."""
    text = _read(sysfs / "bus" / "pci" / "devices" / bdf / "fw_version") if bdf else None
    try:
        return tuple(int(part) for part in text.split(".")) if text else None
    except ValueError:
        return None


def watchdog_is_on(sysfs: Path = SYSFS) -> bool:
    """Whether the driver ends a run that doesn't, as far as it says: two seconds, unless a parameter is 0."""
    parameters = sysfs / "module" / "amdxdna" / "parameters"
    for name in ("timeout_in_sec", "tdr_timeout_ms"):  # of older and newer drivers
        text = _read(parameters / name)
        if text is not None:
            return text != "0"
    return (parameters / "tdr_timeout_ms").exists()  # root only may read it; its default is on


def can_chain(module: object, bdf: str, sysfs: Path = SYSFS) -> bool:
    """Whether lists of runs are to be used.

    The watchdog must be on: a list is waited for without a timeout, which pyxrt can't pass on.
    """
    if not hasattr(module, "runlist"):
        return False
    version = firmware_version(bdf, sysfs)
    return version is not None and version[:2] >= FIRMWARE and watchdog_is_on(sysfs)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
