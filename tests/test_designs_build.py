"""`make xclbins` and `make mlir` with tools that only pretend, and without them; the designs' command lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fake_aie
import pytest
from test_kernels_build import FakePeano, forget_aie

from tilefuse import kernels_build, manifest, plan, provenance, shapes, xclbins
from tilefuse.configurations import Op
from tilefuse.designs import emit
from tilefuse.errors import PlanError
from tilefuse.layout import Layout
from tilefuse.manifest import ManifestError

AIECC = """#!{python}
import json, os, sys
if "--aie-version" in sys.argv:
    print("aiecc {version}")
    sys.exit()
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[1:], sorted(os.listdir())]) + "\\n")
mlir = open(sys.argv[-1]).read()
{behaviour}
for argument in sys.argv:
    if "-name=" in argument:
        with open(argument.partition("=")[2], "w") as made:
            made.write(argument + mlir)
"""

SHAPES = """
columns = 8
designs = ["gemm", "gemv"]
schemes = ["w4g128"]
rows = [64, 100]
gemv_streams = [1]
[models.Small]
q_proj = [512, 512]
k_proj = [512, 500]
lm_head = [512, 2048]
"""
GEMM = plan.gemm(Layout(512, 512, 4, 128), 64).configuration.name
GEMV = plan.gemv(Layout(512, 512, 4, 128)).configuration.name
FILES = {
    f"{GEMM}.xclbin",
    f"{GEMM}/64x512x512_1b.bin",
    f"{GEMM}/128x512x512_2b.bin",
    f"{GEMV}.xclbin",
    f"{GEMV}/1x512x512.bin",
    f"{GEMV}/1x512x2048.bin",
}
"""Of `SHAPES`: M = 64 is a band of 16 rows in four array rows, 100 are two; N = 500 and 512 pad alike."""


class FakeTools(FakePeano):
    """Peano, mlir-aie and xclbinutil."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root, monkeypatch)
        fake_aie.write(root / "site")
        for name in fake_aie.NAMES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        self.runs = root / "runs"
        (root / "mlir" / "bin").mkdir()
        (root / "tools").mkdir()
        monkeypatch.setenv("PATH", str(root / "tools"), prepend=os.pathsep)
        monkeypatch.delenv("AIE_XCLBINUTIL", raising=False)
        self.xclbinutil("2.19")
        self.aiecc()
        self.shapes = root / "shapes.toml"
        self.shapes.write_text(SHAPES)
        self.output = root / "out"

    def aiecc(self, behaviour: str = "", version: str = "1.4") -> None:
        """The fake's version, and Python that it runs before it makes what it was asked for."""
        script = AIECC.format(python=sys.executable, log=str(self.runs), behaviour=behaviour, version=version)
        path = self.root / "mlir" / "bin" / "aiecc"
        path.write_text(script)
        path.chmod(0o755)

    def xclbinutil(self, version: str) -> None:
        path = self.root / "tools" / "xclbinutil"
        path.write_text(f"#!/bin/sh\necho xclbinutil {version}\n")
        path.chmod(0o755)

    def build(self, *arguments: str) -> int:
        command = ["--output", str(self.output), "--shapes", str(self.shapes), "--jobs", "2", *arguments]
        return xclbins.main(command)

    def take_runs(self) -> list[tuple[list[str], list[str]]]:
        """Arguments and files of each run since the last call."""
        lines = self.runs.read_text().splitlines() if self.runs.exists() else []
        self.runs.unlink(missing_ok=True)
        return [(arguments, files) for arguments, files in map(json.loads, lines)]

    def made(self) -> set[str]:
        return {path.relative_to(self.output).as_posix() for path in self.output.rglob("*") if path.is_file()}


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTools:
    return FakeTools(tmp_path, monkeypatch)


def kinds(runs: list[tuple[list[str], list[str]]]) -> list[str]:
    """x for an xclbin, i for instructions, of each run."""
    return sorted(
        "".join(kind for kind, flag in (("x", "--get-xclbin"), ("i", "--get-npu-insts")) if flag in arguments)
        for arguments, _ in runs
    )


# --- the shapes -------------------------------------------------------------------------------------------------------


def test_the_shapes_are_those_of_the_models() -> None:
    """K and N follow from the models' cards: hidden, query and key/value heads, a head's width, MLP, vocabulary."""
    cards = {
        "Llama-3-8B": (4096, 32, 8, 128, 14336, 128256),
        "Gemma-2B": (2048, 8, 1, 256, 16384, 256000),
        "Qwen2.5-3B": (2048, 16, 2, 128, 11008, 151936),
    }
    expected = set()
    for model, (hidden, heads, kv_heads, width, mlp, vocabulary) in cards.items():
        for name, k, n in (
            ("q_proj", hidden, heads * width),
            ("k_proj", hidden, kv_heads * width),
            ("v_proj", hidden, kv_heads * width),
            ("o_proj", heads * width, hidden),
            ("gate_proj", hidden, mlp),
            ("up_proj", hidden, mlp),
            ("down_proj", mlp, hidden),
            ("lm_head", hidden, vocabulary),
        ):
            expected.add((f"{model} {name}", k, n, name == "lm_head"))
    found = shapes.read(shapes.default_file())
    assert {(layer.name, layer.k, layer.n, layer.head) for layer in found.layers} == expected
    assert found.rows == (256, 512, 1024, 2048, 4096)


def test_every_shape_runs_on_a_configuration_whose_kernel_is_there() -> None:
    read = shapes.read(shapes.default_file())
    wanted = shapes.wanted(replace(read, schemes=("w4g128", "w4g64m", "w8g32")))
    names = [configuration.name for configuration in wanted]
    assert len(set(names)) == len(names)
    kernels = {kernel.name for kernel in kernels_build.configurations()}
    assert {configuration.kernel for configuration in wanted} <= kernels
    for configuration, streams in wanted.items():
        for budget in configuration.budgets():
            assert budget.used <= budget.limit
        assert len({stream.name for stream in streams}) == len(streams)
    problems = {(p, op) for c, streams in wanted.items() for s in streams for p, op in ((q, c.op) for q in s.problems)}
    for layer in read.layers:
        assert ((1, layer.k, layer.n), Op.GEMV) in problems
        for m in read.rows:
            assert (((m, layer.k, layer.n), Op.GEMM) in problems) == (not layer.head)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("columns = ", "is not TOML"),
        ("colums = 8", "unknown key 'colums'"),
        (SHAPES.replace("8", '"eight"', 1), "columns = 'eight'"),
        (SHAPES.replace('"gemm"', '"gemn"'), "'gemn'; there are gemm, gemv"),
        (SHAPES.replace("w4g128", "w3g128"), "schemes has 'w3g128'"),
        (SHAPES.replace("w4g128", "w4g24"), "Small q_proj in w4g24: group size 24"),
        (SHAPES.replace("[64, 100]", "[]"), r"rows = \[\]"),
        (SHAPES.replace("[64, 100]", "[true]"), r"rows = \[True\]"),
        (SHAPES.replace("[64, 100]", "[0]"), "M = 0"),
        (SHAPES.replace("[512, 500]", "[512]"), r"k_proj of Small = \[512\]"),
        (SHAPES.replace("[512, 500]", "[40000, 500]"), "K = 40000"),
        (SHAPES.partition("[models")[0], r"no \[models"),
        (SHAPES.partition("[models")[0] + "[models]\nq_proj = [1, 1]", r"models.q_proj = \[1, 1\]"),
    ],
)
def test_a_bad_file_of_shapes_is_refused(
    tools: FakeTools, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tools.shapes.write_text(text)
    with pytest.raises(PlanError, match=message):
        shapes.wanted(shapes.read(tools.shapes))
    assert tools.build() == 2
    assert not tools.output.exists()
    assert capsys.readouterr().err.startswith("tilefuse: ")


def test_problems_that_share_a_stream_have_the_same_tasks() -> None:
    """Whatever M, K and N they pad."""
    layouts = [Layout(k, n, 4, 128) for k in (1, 500, 512, 513) for n in (1, 500, 513, 1100)]
    plans = [plan.gemm(layout, m) for layout in layouts for m in (1, 63, 64, 65, 300, 700)]
    plans += [plan.gemv(layout, streams=streams) for layout in layouts for streams in (1, 2)]
    shared: dict[tuple[str, str], plan.Plan] = {}
    for one in plans:
        other = shared.setdefault((one.configuration.name, manifest.stream_name(one)), one)
        assert (one.segments, one.parameters, one.y_words) == (other.segments, other.parameters, other.y_words)
    assert len(shared) < len(plans) / 2


# --- building ---------------------------------------------------------------------------------------------------------


def test_builds_an_xclbin_a_configuration_and_a_stream_a_shape(
    tools: FakeTools, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools.build() == 0
    assert tools.made() == FILES | {"manifest.json"}
    said = capsys.readouterr().out
    assert f"built {GEMM}.xclbin and {GEMM}/64x512x512_1b.bin\n" in said
    runs = tools.take_runs()
    assert kinds(runs) == ["i", "i", "xi", "xi"]
    common = {f"--peano={tools.root}", "--alloc-scheme=basic-sequential", "--dynamic-objFifos", "--output-dir=."}
    for arguments, files in runs:
        assert common < set(arguments)
        assert arguments[-1] == "design.mlir"
        assert "--npu-insts-name=insts.bin" in arguments
        # Objects lie beside the MLIR, for those runs that link.
        objects = [file for file in files if file.endswith(".o")]
        if "--get-xclbin" in arguments:
            assert {"--xclbin-name=design.xclbin", "-j2"} < set(arguments)
            assert objects in (
                ["gemm_bfp16_w4g128_mantissa_16x128x64.o"],
                ["gemv_bf16_w4g128_mantissa_128x64.o"],
            )
        else:
            assert objects == []
            assert "-j1" in arguments
    # The fake's artifacts hold the MLIR that they were made from: one task of 4 x 4 weight tiles for each column.
    text = (tools.output / GEMV / "1x512x512.bin").read_text()
    assert "module on NPU2 with 32 cores" in text
    assert text.count("fill w") == text.count("drain y") == 8


def test_the_manifest_says_what_was_built_and_from_what(tools: FakeTools, repository: Path) -> None:
    assert tools.build() == 0
    found = manifest.read(tools.output)
    assert set(found.built) == {GEMM, GEMV}
    chosen = plan.gemm(Layout(512, 480, 4, 128), 90)
    built, stream = found.find(chosen)
    assert (built.configuration, built.kernel) == (chosen.configuration, "MLIR_AIE")
    assert (stream.rows, stream.k, stream.n, stream.bands) == (128, 512, 512, 2)
    assert stream.parameters == (1, 4, 2)
    assert stream.problems == ((100, 512, 512), (100, 512, 500))
    other = replace(chosen, segments=chosen.segments * 2)
    with pytest.raises(ManifestError, match=f"{GEMM}/128x512x512_2b was built from another plan than today's"):
        found.find(other)
    assert manifest.load(tools.output, stream.artifact) == (tools.output / GEMM / "128x512x512_2b.bin").read_bytes()
    made_with = found.provenances[built.xclbin.provenance]
    assert made_with.toolchain.keys() == {"mlir_aie", "llvm_aie", "xclbinutil"}
    assert made_with.toolchain["xclbinutil"] == "xclbinutil 2.19"
    for name, digest in made_with.sources.items():
        path = repository / (f"src/{name}" if name.startswith("tilefuse/") else name)
        expected = subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout.split()[
            0
        ]
        assert digest == expected
    kernels = {f"kernels/aie/{path.name}" for path in (repository / "kernels/aie").iterdir()}
    assert kernels | {"designs/iron/gemm.py", "designs/iron/parts.py"} < made_with.sources.keys()
    assert "designs/iron/gemv.py" not in made_with.sources
    planned = found.provenances[stream.artifact.provenance].sources
    assert {"tilefuse/plan/matrix.py", "tilefuse/descriptors.py", "designs/iron/gemm.py"} < planned.keys()


def test_what_is_current_is_left_alone(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    assert tools.build() == 0
    tools.take_runs()
    capsys.readouterr()
    assert tools.build() == 0
    assert (tools.take_runs(), capsys.readouterr().out) == ([], "")
    # One goes missing, one is cut short: these two are made again.
    (tools.output / GEMV / "1x512x2048.bin").unlink()
    (tools.output / f"{GEMM}.xclbin").write_bytes(b"half")
    assert tools.build() == 0
    assert kinds(tools.take_runs()) == ["i", "x"]
    assert tools.made() == FILES | {"manifest.json"}
    manifest.read(tools.output)
    # A new shape costs a stream.
    tools.shapes.write_text(SHAPES + "up_proj = [1024, 512]\n")
    assert tools.build("--only", "gemv") == 0
    assert kinds(tools.take_runs()) == ["i"]
    assert (tools.output / GEMV / "1x1024x512.bin").is_file()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("kernels/aie/loops.h", ["x", "x"]),
        ("plan/vector.py", ["i", "i", "i", "i"]),
        ("layout.py", ["i", "i", "xi", "xi"]),
        ("xclbinutil", ["x", "x"]),
        ("aiecc", ["i", "i", "xi", "xi"]),
    ],
)
def test_what_a_change_concerns_is_built_again(
    tools: FakeTools, monkeypatch: pytest.MonkeyPatch, changed: str, expected: list[str]
) -> None:
    assert tools.build() == 0
    tools.take_runs()
    before = {path: (tools.output / path).read_bytes() for path in FILES}
    hash_of = provenance.sha256_of
    if changed == "xclbinutil":
        tools.xclbinutil("2.20")
    elif changed == "aiecc":
        tools.aiecc(version="1.5")
    else:
        provenance._hash.cache_clear()
        monkeypatch.setattr(
            provenance,
            "sha256_of",
            lambda path: "0" * 64 if path.as_posix().endswith(changed) else hash_of(path),
        )
        if changed.startswith("plan"):
            # Both kinds of streams: a plan's modules are taken as one.
            assert "tilefuse/plan/vector.py" in provenance.stream_sources(
                plan.gemm(Layout(1, 1, 4, 128), 1).configuration
            )
    assert tools.build() == 0
    assert kinds(tools.take_runs()) == expected
    assert {path: (tools.output / path).read_bytes() for path in FILES} == before
    assert tools.build() == 0
    assert tools.take_runs() == []
    provenance._hash.cache_clear()


def test_streams_of_another_design_do_not_outlive_it(tools: FakeTools, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would meet an xclbin that has other channels: the manifest drops them even where they aren't built again."""
    assert tools.build() == 0
    hash_of = provenance.sha256_of
    provenance._hash.cache_clear()
    monkeypatch.setattr(provenance, "sha256_of", lambda path: "0" * 64 if path.name == "parts.py" else hash_of(path))
    assert tools.build("--only", f"{GEMM}/64x") == 0
    provenance._hash.cache_clear()
    assert tools.made() == FILES - {f"{GEMM}/128x512x512_2b.bin"} | {"manifest.json"}
    found = manifest.read(tools.output)
    assert set(found.built[GEMM].streams) == {"64x512x512_1b"}
    with pytest.raises(ManifestError, match=f"{GEMM}/128x512x512_2b, which was not built"):
        found.find(plan.gemm(Layout(512, 512, 4, 128), 100))


def test_a_failure_is_named_and_the_rest_is_built(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.aiecc("if 'fill x0' in mlir and '--get-xclbin' in sys.argv: sys.exit('error: buffers exceed the memory')")
    assert tools.build() == 1
    said = capsys.readouterr().err
    assert f"{GEMM}.xclbin and {GEMM}/64x512x512_1b.bin does not compile (exit code 1 of aiecc)" in said
    assert "error: buffers exceed the memory" in said
    assert tools.made() == {path for path in FILES if path.startswith("gemv")} | {"manifest.json"}
    tools.take_runs()
    tools.aiecc()
    assert tools.build() == 0
    assert kinds(tools.take_runs()) == ["i", "xi"]
    assert tools.made() == FILES | {"manifest.json"}


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("sys.exit()", "aiecc reports success and made no design.xclbin"),
        ("open('design.xclbin', 'w').close(); sys.exit()", "made no design.xclbin"),
        ("os.kill(os.getpid(), 9)", r"exit code -9 of aiecc"),
    ],
)
def test_an_aiecc_that_misbehaves(
    tools: FakeTools, capsys: pytest.CaptureFixture[str], behaviour: str, message: str
) -> None:
    tools.aiecc(behaviour)
    assert tools.build("--only", "gemm") == 1
    assert message in capsys.readouterr().err
    assert tools.made() == set()


def test_a_stream_that_fails_is_named(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.aiecc("if '--get-xclbin' not in sys.argv: sys.exit('too many descriptors')")
    assert tools.build("--only", "gemm") == 1
    assert f"{GEMM}/128x512x512_2b.bin does not compile" in capsys.readouterr().err
    assert tools.made() == {f"{GEMM}.xclbin", f"{GEMM}/64x512x512_1b.bin", "manifest.json"}


def test_a_kernel_that_does_not_fit_its_core_is_refused(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.behave(stack=2080)
    assert tools.build() == 1
    said = capsys.readouterr().err
    assert "gemv_bf16_w4g128_mantissa_128x64 has a stack frame of 2080 bytes, and the design gives a core 2048" in said
    assert {path for path in FILES if path.startswith("gemm")} <= tools.made()
    tools.behave(reject="gemm_bfp16_w4.cc")
    assert tools.build("--only", "gemm") == 0  # current: nothing is compiled
    tools.behave(text=20000)
    assert tools.build("--only", "gemv") == 1
    assert "20000 bytes of instructions" in capsys.readouterr().err


def test_an_interrupted_build_goes_on_where_it_ended(tools: FakeTools, tmp_path: Path) -> None:
    """The first run for instructions only interrupts the build, once."""
    once = "os.mkdir({!r}); os.kill(os.getppid(), 2); import time; time.sleep(0.3)".format(str(tmp_path / "once"))
    tools.aiecc(f"if '--get-xclbin' not in sys.argv and not os.path.exists({str(tmp_path / 'once')!r}):\n    {once}")
    # A shell ignores interrupts for what it runs in the background, and its children inherit that.
    listen = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run = "runpy.run_module('tilefuse.xclbins', run_name='__main__', alter_sys=True)"
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", listen + run, "--output", str(tools.output), "--shapes", str(tools.shapes)]
    done = subprocess.run(
        [*command, "--jobs", "1"], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "tilefuse: interrupted"
    # No half artifacts, no folders of runs, and a manifest that lists just what is there.
    listed = {artifact.file for artifact in manifest.read(tools.output).artifacts()}
    assert tools.made() == listed | {"manifest.json"}
    assert {f"{GEMM}.xclbin", f"{GEMV}.xclbin"} <= listed < FILES
    tools.take_runs()
    assert tools.build() == 0
    assert kinds(tools.take_runs()) == ["i"] * (len(FILES) - len(listed))
    assert tools.made() == FILES | {"manifest.json"}


def test_a_manifest_that_can_not_be_used_is_no_obstacle(tools: FakeTools) -> None:
    tools.output.mkdir()
    (tools.output / "manifest.json").write_text('{"version": 0}')
    assert tools.build() == 0
    assert set(manifest.read(tools.output).built) == {GEMM, GEMV}


def test_only_and_list(tools: FakeTools, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert tools.build("--only", f"{GEMV}/1x512x2048") == 0
    assert tools.made() == {f"{GEMV}.xclbin", f"{GEMV}/1x512x2048.bin", "manifest.json"}
    assert tools.build("--only", "w3") == 1
    assert "nothing to build has 'w3' in its name" in capsys.readouterr().err
    # A listing takes no tools.
    monkeypatch.setenv("PEANO_INSTALL_DIR", "/nonexistent")
    assert tools.build("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"{GEMM}.xclbin: kernel gemm_bfp16_w4g128_mantissa_16x128x64, 2 instruction streams" in lines
    (line,) = (line for line in lines if line.startswith("  1x512x512 "))
    assert line.endswith("Small q_proj, Small k_proj")
    assert "us modelled, bound by" in line


def test_an_output_that_can_not_be_written(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    tools.output.touch()
    assert tools.build() == 1
    assert f"can't make the folder {tools.output}" in capsys.readouterr().err
    tools.output.unlink()
    in_the_way = tools.output / f"{GEMM}.xclbin"
    in_the_way.mkdir(parents=True)
    assert tools.build("--only", "gemm") == 1
    assert f"can't write {in_the_way}" in capsys.readouterr().err


# --- missing tools ----------------------------------------------------------------------------------------------------


def test_without_a_tool_one_sentence_names_the_command(
    tools: FakeTools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(command: str) -> None:
        assert tools.build() == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert command in captured.err
        assert not tools.output.exists()

    monkeypatch.setenv("PATH", str(tools.root / "nowhere"))
    refused("no xclbinutil (not on PATH)")
    monkeypatch.setenv("AIE_XCLBINUTIL", "my-xclbinutil")
    refused("no xclbinutil (AIE_XCLBINUTIL=my-xclbinutil is no program)")
    monkeypatch.setenv("AIE_XCLBINUTIL", str(tools.root / "tools" / "xclbinutil"))
    (tools.root / "mlir" / "bin" / "aiecc").chmod(0o644)
    refused("aiecc is not executable")
    (tools.root / "mlir" / "bin" / "aiecc").unlink()
    refused("no aiecc, which mlir_aie brings: install it with")
    monkeypatch.setenv("PEANO_INSTALL_DIR", str(tools.root / "nowhere"))
    refused("-m pip install llvm-aie==")


def test_a_broken_aiecc_is_a_missing_tool(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    (tools.root / "mlir" / "bin" / "aiecc").write_bytes(b"\x7fELF of another machine")
    assert tools.build() == 2
    assert f"can't run {tools.root / 'mlir' / 'bin' / 'aiecc'}" in capsys.readouterr().err


# --- the manifest -----------------------------------------------------------------------------------------------------


def test_a_manifest_is_refused_by_name(tools: FakeTools) -> None:
    with pytest.raises(ManifestError, match=r"no manifest\.json in .*out: run `make xclbins`"):
        manifest.read(tools.output)
    assert tools.build() == 0
    path = tools.output / "manifest.json"
    whole = json.loads(path.read_text())

    def refuses(message: str, **changed: object) -> None:
        path.write_text(json.dumps({**whole, **changed}))
        with pytest.raises(ManifestError, match=message):
            manifest.read(tools.output)

    refuses("is of version 2, and this tilefuse reads 1: run `make xclbins` again", version=2)
    refuses("is damaged", provenances=None)
    refuses("is damaged .*has no provenance", provenances={})
    for name, bad in (
        ("columns", 4),  # another name than it is listed under
        ("columns", 9),
        ("colour", 1),
    ):
        entry = json.loads(json.dumps(whole["built"]))
        entry[GEMM]["configuration"][name] = bad
        refuses("is damaged", built=entry)
    for name, bad in (("file", "../../etc/passwd"), ("file", "/etc/passwd"), ("sha256", 7)):
        entry = json.loads(json.dumps(whole["built"]))
        entry[GEMV]["xclbin"][name] = bad
        refuses("is damaged", built=entry)
    for name, bad in (("file", ""), ("file", "."), ("file", "a\0b")):
        entry = json.loads(json.dumps(whole["built"]))
        entry[GEMM]["streams"]["64x512x512_1b"]["artifact"][name] = bad
        refuses("is no path in the folder", built=entry)
    for name in ("tile_bytes", "bits", "groups"):
        entry = json.loads(json.dumps(whole["built"]))
        entry[GEMM]["configuration"]["weights"][name] = "4"
        refuses("'4' is no integer", built=entry)
    path.write_text("[" * 100_000)
    with pytest.raises(ManifestError, match="is damaged"):
        manifest.read(tools.output)
    path.write_text(json.dumps(whole)[:-40])
    with pytest.raises(ManifestError, match="is damaged"):
        manifest.read(tools.output)
    path.write_text(json.dumps(whole))
    (tools.output / GEMM / "64x512x512_1b.bin").unlink()
    with pytest.raises(ManifestError, match=f"lists {GEMM}/64x512x512_1b.bin, missing in"):
        manifest.read(tools.output)
    found = manifest.read(tools.output, files=False)
    with pytest.raises(ManifestError, match=r"can't read .*64x512x512_1b.bin"):
        manifest.load(tools.output, found.built[GEMM].streams["64x512x512_1b"].artifact)
    (tools.output / f"{GEMV}.xclbin").write_bytes(b"something else")
    with pytest.raises(ManifestError, match="is not what was built"):
        manifest.load(tools.output, found.built[GEMV].xclbin)
    with pytest.raises(ManifestError, match=r"w8g64\) takes gemv_bf16_w8g64.*\.xclbin, which was not built"):
        found.find(plan.gemv(Layout(512, 512, 8, 64)))


# --- MLIR, and the designs' command lines -----------------------------------------------------------------------------


def test_emits_the_mlir_of_each_configuration(tools: FakeTools, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert tools.build("--emit-mlir") == 0
        assert tools.made() == {f"{GEMM}.mlir", f"{GEMV}.mlir"}
    assert (tools.output / f"{GEMM}.mlir").read_text().startswith("module on NPU2 with 32 cores\n")
    assert str(tools.output / f"{GEMM}.mlir") in capsys.readouterr().out
    assert tools.take_runs() == []


PROBLEMS = [
    (Op.GEMM, ["64", "512", "512"]),
    (Op.GEMV, ["512", "512"]),
    (Op.GEMM_BASELINE, ["64", "512", "512"]),
    (Op.GEMV_BASELINE, ["512", "512"]),
]


@pytest.mark.parametrize(("op", "problem"), PROBLEMS)
def test_a_design_prints_its_plan_or_its_mlir(
    tools: FakeTools, op: Op, problem: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert emit.main(op, problem) == 0
    assert capsys.readouterr().out.startswith(
        f"{op} of {'64' if len(problem) == 3 else '1'} x 512 by 512 x 512, weights"
    )
    assert emit.main(op, [*problem, "--emit-mlir", "--columns", "4"]) == 0
    cores = 4 if op is Op.GEMV_BASELINE else 16
    printed = capsys.readouterr().out
    assert printed.startswith(f"module on NPU2Col4 with {cores} cores\n")
    tools.output.mkdir()
    file = tools.output / "design.mlir"
    assert emit.main(op, [*problem, "--emit-mlir", "--columns", "4", "--output", str(file)]) == 0
    assert (file.read_text(), capsys.readouterr().out) == (printed, "")
    assert tools.made() == {"design.mlir"}
    assert emit.main(op, [*problem, "--output", str(file / "more")]) == 1
    assert f"can't write {file / 'more'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (Op.GEMM, ["0", "512", "512"], "M = 0"),
        (Op.GEMM, ["64", "40000", "512"], "K = 40000"),
        (Op.GEMM, ["64", "512", "512", "--columns", "2"], "columns = 2"),
        (Op.GEMM, ["64", "512", "512", "--bands", "99"], "99"),
        (Op.GEMM, ["64", "512", "4096", "--bits", "8", "--tiles", "2"], "tiles = 2 with w8g128"),
        (Op.GEMV, ["512", "0"], "N = 0"),
        (Op.GEMV, ["512", "512", "--group", "24"], "group size 24"),
        (Op.GEMM_BASELINE, ["64", "0", "1"], "K = 0"),
        (Op.GEMV_BASELINE, ["512", "512", "--columns", "9"], "columns = 9"),
    ],
)
def test_a_problem_that_can_not_run_is_refused_in_its_terms(
    op: Op, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert emit.main(op, arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_options_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert emit.main(Op.GEMM, ["64", "512", "4096", "--bits", "8", "--group", "64", "--zero", "m16"]) == 0
    assert "weights w8g64m" in capsys.readouterr().out
    assert emit.main(Op.GEMM, ["640", "512", "4096", "--tiles", "1", "--bands", "3"]) == 0
    assert "16x128x64" in (said := capsys.readouterr().out)
    assert "blocks of 192" in said
    assert emit.main(Op.GEMV, ["512", "512", "--streams", "2"]) == 0
    assert "_2s_8c" in capsys.readouterr().out
    assert emit.main(Op.GEMV_BASELINE, ["512", "512", "--bits", "4"]) == 0
    assert "gemv_baseline_bf16_w4g128" in capsys.readouterr().out


@pytest.mark.parametrize("op", list(Op))
def test_each_design_is_a_command(op: Op) -> None:
    problem = ["1"] * (3 if op in (Op.GEMM, Op.GEMM_BASELINE) else 2)
    done = subprocess.run([sys.executable, "-m", f"tilefuse.designs.{op}", *problem], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{op} of 1 x 1 by 1 x 1,")


@pytest.mark.parametrize("command", [["tilefuse.designs.gemm", "64", "512", "512"], ["tilefuse.xclbins", "--list"]])
def test_a_reader_that_has_seen_enough(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-m", *command], stdout=writing, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_mlir_aie_one_sentence_names_the_command(
    tools: FakeTools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taplib = tools.root / "site" / "aie" / "helpers" / "taplib.py"
    taplib.write_text("")
    assert emit.main(Op.GEMV, ["512", "512", "--emit-mlir"]) == 2
    assert (
        "has no aie.helpers.taplib.TensorAccessPattern, and the designs are for version 1.4" in capsys.readouterr().err
    )
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("/site")])
    for name in fake_aie.NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    forget_aie(monkeypatch)
    for arguments in (["512", "512", "--emit-mlir"], ["512", "512", "--emit-mlir", "--output", str(tools.output)]):
        assert emit.main(Op.GEMV, arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert "emitting MLIR takes mlir-aie" in captured.err
        assert "-m pip install mlir_aie -f https://github.com/Xilinx/mlir-aie/" in captured.err
    assert tools.build("--emit-mlir") == 2
    assert "pip install mlir_aie" in capsys.readouterr().err
    assert not tools.output.exists()
