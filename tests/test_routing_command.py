"""``tilefuse routing show``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tilefuse import commands, routing
from tilefuse.tilemix import picture


def test_the_map_in_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["routing", "show", "band", "--coverage", "0.5", "-L", "1000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "band 0.5: 1000 queries x 1000 keys, 8 row tiles x 16 groups of 1 tile (64 keys), 1 word"
    )
    # The golden vector of band at one half, and the 2, 4, ... 16 groups that a row tile executes.
    words = [0x0, 0x0, 0x1, 0x7, 0x1F, 0x7F, 0x1FF, 0x7FF]
    for m, (line, word) in enumerate(zip(lines[2:10], words, strict=True)):
        assert line == "".join("#" if word >> j & 1 else "." for j in range(2 * m + 2))
    # 36 of 72 tiles, none on the diagonal; 11 are in the last row tile, of 104 queries; 1000 * 1001 / 2 scores.
    assert (
        lines[-1] == f"INT8: 50.0% of tiles, 50.0% of groups, {64 * (25 * 128 + 11 * 104) / (500 * 1001):.1%} of cells"
    )


def test_several_row_tiles_a_character(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["routing", "show", "one", "-L", "131072", "--words", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:34]
    assert [len(line) for line in lines] == [2 * i + 2 for i in range(32)]
    assert set("".join(lines)) == {"#"}
    shades = picture.text(routing.row_random(0.5, seq_len=131072, words=4, causal=False))
    assert set(shades) == {"+", "\n"}


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["routing", "show", "bigbird50", "-L", "8192", "--query-len", "8192", "--json"]
    assert commands.run(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["words"][63] == ["00f7fbff6fff79c0"]
    assert found["coverage"]["tile"] == 0.5
    assert (found["group"], found["row_tiles"], found["groups"], found["asked"]) == (2, 64, 64, 0.5)
    options = [
        "--window",
        "300",
        "--no-causal",
        "--protect",
        "diag",
        "--protect",
        "sink",
        "--seed",
        "3",
        "--group",
        "2",
    ]
    assert commands.run(["routing", "show", "global", "-L", "1000", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    want = routing.global_(seq_len=1000, window=300, causal=False, protect=("diag", "sink"), seed=3, group=2)
    assert found["words"] == [[f"{int(row[0]):016x}"] for row in want.words]


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("matplotlib.image")
    out = tmp_path / "map.png"
    assert commands.run(["routing", "show", "global", "--coverage", "0.5", "-L", "4096", "-o", str(out)]) == 0
    assert f"wrote {out}" in capsys.readouterr().out
    pixels = (image.imread(out)[..., :3] * 255).round().astype(int)

    def share(colour: str) -> float:
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        return float((np.abs(pixels - rgb).max(axis=-1) <= 2).mean())

    # Half of the executed tiles each; of 32 x 64 cells, 1056 are executed and 992 are not. The legend takes a little.
    int8, exact, empty = (share(c) for c in (picture.INT8_COLOUR, picture.EXACT_COLOUR, picture.EMPTY_COLOUR))
    assert int8 == pytest.approx(exact, rel=0.1)
    assert empty / (int8 + exact) == pytest.approx(992 / 1056, rel=0.1)
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]
    svg = tmp_path / "map.svg"
    assert commands.run(["routing", "show", "local_sink", "-L", "0", "-o", str(svg)]) == 0
    assert svg.read_text().lstrip().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["stripes"], 1, "routing is 'stripes'"),
        (["band", "--coverage", "1.5"], 1, "coverage is 1.5"),
        (["band75", "--coverage", "0.5"], 1, "pass one or the other"),
        (["band", "-L", "-3"], 1, "-3"),
        (["band", "--protect", "all"], 1, "protect has 'all'"),
        (["band", "--compat", "release"], 1, "sptrans"),
        (["band", "--group", "many"], 2, "neither auto nor a number"),
        (["band", "-L", "65536", "--group", "1", "--words", "2"], 1, "words is 2"),
        ([], 2, "LAYOUT"),
    ],
)
def test_wrong_arguments(arguments: list[str], status: int, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["routing", "show", *arguments]) == status
    assert named.lower() in capsys.readouterr().err.lower()


def test_wrong_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    assert commands.run(["routing", "show", "band", "-o", str(tmp_path / "map.xyz")]) == 1
    assert ".png" in (error := capsys.readouterr().err) or "png" in error
    assert commands.run(["routing", "show", "band", "-o", str(tmp_path / "missing" / "map.png")]) == 1
    assert "No such file" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert commands.run(["routing", "show", "band", "-o", str(tmp_path / "map.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
