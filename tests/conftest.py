"""Fixtures that every test may use."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest

# Before anything imports Triton, which reads it as it defines its own functions: kernels are tested in its interpreter.
os.environ.setdefault("TRITON_INTERPRET", "1")

SANITIZED = os.environ.get("TILEFUSE_SANITIZED") == "1"
"""Whether the C++ code under test is the instrumented build (`make sanitize`), which is some ten times slower."""

# No deadline: a shared machine stalls for longer than any example takes.
hypothesis.settings.register_profile("tilefuse", deadline=None, print_blob=True)
hypothesis.settings.register_profile("sanitized", deadline=None, print_blob=True, max_examples=25)
hypothesis.settings.load_profile("sanitized" if SANITIZED else "tilefuse")


def pytest_report_header() -> str:
    """Says which build is under test."""
    from tilefuse import _core

    return f"tilefuse._core: {_core.__file__}"


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator with a seed of its own for every test, the same in every run.

    TILEFUSE_TEST_SEED=n shifts all of them. A failing test shows its seed.
    """
    shift = int(os.environ.get("TILEFUSE_TEST_SEED", "0"))
    seed = zlib.crc32(request.node.nodeid.encode()) + shift
    print(f"rng seed: {seed} (TILEFUSE_TEST_SEED={shift})")
    return np.random.default_rng(seed)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that asks for `cpu_level` once for each instruction-set level that this CPU has."""
    if "cpu_level" in metafunc.fixturenames:
        from tilefuse import runtime

        metafunc.parametrize("cpu_level", runtime.cpu_levels(), indirect=True)


@pytest.fixture
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the instruction-set level that the CPU kernels are held to while the test runs."""
    from tilefuse import runtime

    with runtime.force_cpu_level(request.param):
        yield request.param


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, of this test alone."""
    monkeypatch.setenv("TILEFUSE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"
