"""Attention in `make xclbins` and `make mlir`, with tools that only pretend; the design's command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_designs_build import SHAPES, FakeTools, kinds

from tilefuse import kernels_build, manifest, plan, provenance, shapes
from tilefuse.attention_configurations import AttentionConfiguration
from tilefuse.designs import attention
from tilefuse.errors import PlanError
from tilefuse.manifest import ManifestError

ATTENTION = """
[attention]
lengths = [200, 256]
routings = ["zero", "local_sink75"]
[attention.models]
Small = [4, 2, 64]
Twin = [4, 2, 64]
"""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    made = FakeTools(tmp_path, monkeypatch)
    made.shapes.write_text(SHAPES + ATTENTION)
    return made


def configuration_of(length: int, routing: str) -> plan.AttentionPlan:
    return shapes.attention_plan(length, length, 4, 2, 64, routing)


def test_the_default_shapes_have_attention_on_kernels_that_are_there() -> None:
    wanted = shapes.wanted(shapes.read(shapes.default_file()))
    found = [configuration for configuration in wanted if isinstance(configuration, AttentionConfiguration)]
    assert {configuration.d for configuration in found} == {64, 128}
    assert {c.kernel for c in found} <= {kernel.name for kernel in kernels_build.configurations()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ATTENTION.replace("[200, 256]", "[]"), r"lengths = \[\]"),
        (ATTENTION.replace('"zero"', "0"), "routings = "),
        (ATTENTION.replace("zero", "zeros"), "routing is 'zeros'"),
        (ATTENTION.replace("[4, 2, 64]", "[4, 2]", 1), r"attention of Small = \[4, 2\]"),
        (ATTENTION.replace("[4, 2, 64]", "[4, 3, 64]", 1), "heads = 4, kv_heads = 3"),
        (ATTENTION.replace("[4, 2, 64]", "[4, 2, 96]", 1), "d = 96: kernels are for heads of 64 and 128"),
        (ATTENTION.replace("lengths", "length"), "lengths, routings and models are needed"),
        (ATTENTION.partition("[attention.models]")[0] + "models = 3\n", "attention.models = 3"),
    ],
)
def test_bad_shapes_are_refused(tools: FakeTools, text: str, message: str) -> None:
    tools.shapes.write_text(SHAPES + text)
    with pytest.raises(PlanError, match=message):
        shapes.wanted(shapes.read(tools.shapes))


def test_builds_an_xclbin_and_a_stream_for_each_length_and_routing(
    tools: FakeTools, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tools.build("--only", "attention") == 0
    plans = [configuration_of(length, routing) for length in (200, 256) for routing in ("zero", "local_sink75")]
    (config,) = {each.configuration for each in plans}
    names = {manifest.stream_name(each) for each in plans}
    assert len(names) == 4
    assert tools.made() == {"manifest.json", f"{config.name}.xclbin"} | {f"{config.name}/{n}.bin" for n in names}
    assert kinds(tools.take_runs()) == ["i", "i", "i", "xi"]

    found = manifest.read(tools.output)
    built = found.attention[config.name]
    assert (built.configuration, built.kernel, found.built) == (config, "MLIR_AIE", {})
    first = built.streams[manifest.stream_name(plans[0])]
    assert first.problems == ("Small 200 zero", "Twin 200 zero")
    assert first.tasks == manifest.tasks_of(plans[0])
    sources = found.provenances[built.xclbin.provenance].sources
    assert {"designs/iron/attention.py", "tilefuse/attention_configurations.py"} < sources.keys()
    assert {"kernels/aie/attention_layout.h"} < sources.keys()

    # Beside products in one folder, and none is built twice.
    assert tools.build() == 0
    assert len(manifest.read(tools.output).built) == 2
    tools.take_runs()
    assert tools.build() == 0
    assert tools.take_runs() == []
    # A change of the planner costs the streams, not the xclbin.
    provenance._hash.cache_clear()
    hash_of = provenance.sha256_of
    monkeypatch.setattr(
        provenance, "sha256_of", lambda path: "0" * 64 if path.name == "score_tiles.py" else hash_of(path)
    )
    assert tools.build("--only", "attention") == 0
    assert kinds(tools.take_runs()) == ["i"] * 4
    provenance._hash.cache_clear()


def test_a_damaged_manifest_is_refused(tools: FakeTools) -> None:
    assert tools.build("--only", "attention") == 0
    path = tools.output / "manifest.json"
    text = path.read_text()
    for old, new in (('"d": 64', '"d": 65'), ('"share": 2', '"share": 8'), ('"problems": [', '"problems": [1, ')):
        assert old in text
        path.write_text(text.replace(old, new))
        with pytest.raises(ManifestError, match="is damaged"):
            manifest.read(tools.output)


def test_streams_differ_by_their_routing() -> None:
    one, other = configuration_of(512, "band50"), configuration_of(512, "global50")
    assert manifest.stream_name(one) != manifest.stream_name(other)
    again = replace(one)
    assert manifest.stream_name(again) == manifest.stream_name(one)


def test_mlir_of_each_configuration(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.build("--emit-mlir", "--only", "attention") == 0
    (path,) = (Path(line) for line in capsys.readouterr().out.splitlines())
    text = path.read_text()
    assert "module on NPU2 with 32 cores" in text
    chosen = configuration_of(200, "zero")
    assert text.count("fill") + text.count("drain") == chosen.tasks
    assert text.count("wait") == chosen.tasks


def test_the_command_line(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    assert attention.main(["300", "400", "8", "2", "64", "--full", "--routing", "one"]) == 0
    said = capsys.readouterr().out
    assert "attention of 300 queries, 400 keys, 8 heads (2 of keys), d = 64" in said
    assert attention.main(["300", "400", "8", "2", "64", "--emit-mlir"]) == 0
    assert "module on NPU2 with 32 cores" in capsys.readouterr().out
    assert attention.main(["300", "400", "8", "3", "64"]) == 2
    assert "heads = 8, kv_heads = 3" in capsys.readouterr().err
    assert attention.main(["300", "400", "8", "2", "64", "--window", "0"]) == 2
