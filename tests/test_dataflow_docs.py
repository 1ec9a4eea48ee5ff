"""docs/dataflow.md and its pictures are what docs/draw_dataflow.py makes of the planner as it is."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import draw_dataflow
import pytest
from dataflow_pictures import tables

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ["gemm.svg", "gemv-two-streams.svg", "gemv.svg", "memory.svg", "packed-stream.svg", "segments.svg"]


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return draw_dataflow.pictures()


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_picture_is_the_one_drawn(name: str, drawn: dict[str, str]) -> None:
    assert sorted(drawn) == NAMES
    committed = (draw_dataflow.IMAGES / name).read_text(encoding="utf-8")
    assert committed == drawn[name], "the planner changed: run python docs/draw_dataflow.py"


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_well_formed_and_stay_inside(name: str, drawn: dict[str, str]) -> None:
    root = ElementTree.fromstring(drawn[name])
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    assert root.find(f"{SVG}title") is not None
    for element in root.iter(f"{SVG}text"):
        x, y = float(element.attrib["x"]), float(element.attrib["y"])
        # A letter takes at most 0.62 of its size: no line may leave the picture in any common font.
        length = len(element.text or "") * 0.62 * float(element.attrib["font-size"])
        left = {"start": x, "middle": x - length / 2, "end": x - length}[element.attrib["text-anchor"]]
        assert left >= 0, element.text
        assert left + length <= width, element.text
        assert 0 < y < height
    for element in root.iter(f"{SVG}rect"):
        assert float(element.get("x", 0)) + float(element.attrib["width"]) <= width
        assert float(element.get("y", 0)) + float(element.attrib["height"]) <= height


def test_pictures_say_what_was_worked_out_by_hand(drawn: dict[str, str]) -> None:
    """4-bit tiles of 4288 bytes, two side by side, four k tiles to a memory tile; 16 x 128 bfp16 are 2304 bytes."""
    gemm = texts(drawn["gemm.svg"])
    assert gemm.count("64 × 128") == 32
    assert gemm.count("w  5 × 34304") == 8
    assert gemm.count("x  4 × 9216") == 4
    assert gemm.count("y  2 × 32768") == 8
    assert [f"shim {column}" for column in range(8)] == [said for said in gemm if said.startswith("shim ")]
    assert texts(drawn["gemv.svg"]).count("w  3 × 17152") == 8
    stream = texts(drawn["packed-stream.svg"])
    assert {"byte 0", "byte 4096", "byte 4224", "4288"} <= set(stream)
    segments = texts(drawn["segments.svg"])
    assert segments.count("8 y") == 8
    assert [said for said in segments if said in "123"] == list("2322222212222222" + "12222222")
    assert "64448 B" in texts(drawn["memory.svg"])


def test_the_table_of_alternatives() -> None:
    """The issue's ceilings, 128 and 455 MAC a cycle, and 512 bytes more of a bfloat16 band; DRAM by hand."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables.alternatives().splitlines()[2:]]
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("bfloat16", "64", "128"),
        ("bfloat16", "128", "256"),
        ("bfp16", "64", "228"),
        ("bfp16", "128", "455"),
    ]
    # 4 MiB-weights of 4288 / 8192 bytes, for 8 row blocks of 4 bands; x 4 times, 9 bytes for 8.
    read = 8 * 64 * 32 * 4288 + 4 * 2048 * 4096 * 9 / 8
    assert rows[3][7] == f"{read / 1e6:.0f}"
    assert rows[3][8] == f"{2048 * 4096 * 4096 / 32 / (read / 47e9 * 1.8e9):.0f}"
    assert rows[3][10] == "64448"


def test_the_document_is_current() -> None:
    text = draw_dataflow.TEXT.read_text(encoding="utf-8")
    assert tables.refresh(text) == text, "run python docs/draw_dataflow.py"
    assert sorted(re.findall(r"\(images/([^)]*)\)", text)) == NAMES
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 126


def test_drawing_writes_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "dataflow.md"
    text.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(draw_dataflow, "IMAGES", tmp_path / "images")
    monkeypatch.setattr(draw_dataflow, "TEXT", text)
    draw_dataflow.main()
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == NAMES
    assert text.read_text(encoding="utf-8") == (
        f"before\n{tables.BEGIN}\n\n{tables.alternatives()}\n\n{tables.END}\nafter\n"
    )
