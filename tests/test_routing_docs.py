"""docs/attention.md: its picture is drawn by its script, its code runs, and what it says of lengths is so."""

from __future__ import annotations

import re
from pathlib import Path

import draw_routing
import pytest

from tilefuse import routing

TEXT = (Path(__file__).parents[1] / "docs" / "attention.md").read_text(encoding="utf-8")


def test_the_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert draw_routing.PICTURE.is_file()
    monkeypatch.setattr(draw_routing, "PICTURE", tmp_path / "routing.png")
    draw_routing.main()
    assert (tmp_path / "routing.png").stat().st_size > 10_000


def test_its_code_runs() -> None:
    section = TEXT[TEXT.index("## Routing") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    names: dict[str, object] = {}
    exec(code.group(1), names)
    assert names["m"] == routing.bigbird(0.5, seq_len=4096)


def test_every_layout_is_in_its_table() -> None:
    table = TEXT[TEXT.index("### Layouts") : TEXT.index("**Coverage**")]
    named = set(re.findall(r"`(\w+)`(?= \||, `one`|` \|)", table)) | {"one"}
    layouts = set(routing.__all__) - {"Grid", "Routing", "Template", "from_scores", "named"}
    assert layouts <= named
