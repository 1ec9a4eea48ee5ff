"""The sources that artifacts are made from, and their hashes."""

from __future__ import annotations

import importlib.resources
from functools import cache
from pathlib import Path

from tilefuse.attention_configurations import AttentionConfiguration
from tilefuse.configurations import Configuration
from tilefuse.files import sha256_of

_PLANNING = ("arch", "configurations", "descriptors", "kernel_cycles", "layout")
"""Modules of the package that decide what a plan is, beside the plan's own."""

_LAYING_OUT = ("arch", "configurations", "kernels_build", "layout")
"""Modules of the package that decide what is in an xclbin."""


def stream_sources(configuration: Configuration | AttentionConfiguration) -> dict[str, str]:
    """Source -> sha256 of what decides an instruction stream: the design, and the planner."""
    return _hashes(
        {
            **_designs(configuration),
            **_modules(configuration, _PLANNING),
            **{f"tilefuse/plan/{path.name}": path for path in sorted((_package() / "plan").glob("*.py"))},
        }
    )


def xclbin_sources(configuration: Configuration | AttentionConfiguration) -> dict[str, str]:
    """Source -> sha256 of what decides an xclbin: the design, the kernel, and how both are laid out and compiled."""
    folder = kernel_sources()
    own = {f"kernels/aie/{path.name}": path for path in sorted(folder.iterdir()) if path.suffix in (".cc", ".h")}
    return _hashes(
        {
            **_designs(configuration),
            **own,
            **_modules(configuration, _LAYING_OUT),
        }
    )


def kernel_sources() -> Path:
    """The folder of the kernels' sources."""
    # By way of a file: an installed folder without __init__.py is no path to importlib, only what it holds is.
    return Path(str(importlib.resources.files("tilefuse.kernels.aie") / "config.h")).parent


def _package() -> Path:
    return Path(__file__).parent


def _modules(configuration: Configuration | AttentionConfiguration, names: tuple[str, ...]) -> dict[str, Path]:
    if isinstance(configuration, AttentionConfiguration):
        names = (*names, "attention_configurations")
    return {f"tilefuse/{name}.py": _package() / f"{name}.py" for name in names}


def _designs(configuration: Configuration | AttentionConfiguration) -> dict[str, Path]:
    folder = Path(str(importlib.resources.files("tilefuse.designs") / "parts.py")).parent
    return {f"designs/iron/{name}.py": folder / f"{name}.py" for name in (configuration.op, "namespace", "parts")}


def _hashes(sources: dict[str, Path]) -> dict[str, str]:
    return {name: _hash(path, path.stat().st_mtime_ns) for name, path in sources.items()}


@cache
def _hash(path: Path, changed: int) -> str:
    return sha256_of(path)
