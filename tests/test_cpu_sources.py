"""What the sources of the CPU kernels must keep to and no compiler checks."""

import re
from pathlib import Path

import pytest

CPU = Path(__file__).resolve().parent.parent / "kernels" / "cpu"
SOURCES = sorted(path for path in CPU.rglob("*") if path.suffix in (".h", ".cpp"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CPU)))
def test_functions_that_prefetch_are_always_inlined(path: Path) -> None:
    """GCC drops calls of functions without any other effect that it doesn't inline early (prefetch.h)."""
    text = path.read_text()
    if path.name != "prefetch.h":
        assert not re.search(r"__builtin_prefetch|_mm_prefetch", text), "prefetches are those of prefetch.h"
    for line in re.findall(r"^.*\bvoid \w*fetch\w*\(.*$", text, re.MULTILINE):
        assert line.lstrip().startswith("TILEFUSE_ALWAYS_INLINE"), line
