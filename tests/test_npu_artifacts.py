"""Folders of artifacts: what is refused, what is chosen, what is built on the spot (with tools that only pretend)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import F32, Scheme, make_layer
from npu_rig import view
from test_designs_build import FakeTools, kinds, tools  # noqa: F401
from test_designs_emulated import check_gemm

from tilefuse import manifest, plan, xclbins
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.xrt import EmulatedXrt
from tilefuse.errors import DeviceError
from tilefuse.layout import Layout, ZeroKind
from tilefuse.manifest import ManifestError
from tilefuse.plan import Plan
from tilefuse.runtime import artifacts as module
from tilefuse.runtime.artifacts import ArtifactsError, FolderArtifacts, default_folder
from tilefuse.runtime.npu import NpuDevice

LAYOUT = Layout(512, 500, 4, 128)
GEMM = plan.gemm(LAYOUT, 100)
GEMV = plan.gemv(LAYOUT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what runs `GEMM` and `GEMV`, for the emulated device."""
    made = EmulatedArtifacts(tmp_path / "xclbins")
    for each in (GEMM, GEMV):
        made.instructions(each)
    return tmp_path / "xclbins"


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Changes the manifest behind everybody's back."""
    path = folder / manifest.NAME
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def built(document: Any, of: Plan = GEMM) -> Any:
    return document["built"][of.configuration.name]


def stream(document: Any, of: Plan = GEMM) -> Any:
    return built(document, of)["streams"][manifest.stream_name(of)]


# --- use --------------------------------------------------------------------------------------------------------------


def test_what_a_folder_gives(folder: Path) -> None:
    found = FolderArtifacts(folder)
    for each in (GEMM, GEMV):
        path, kernel, digest = found.xclbin(each)
        assert (path, kernel) == (folder / f"{each.configuration.name}.xclbin", "MLIR_AIE")
        assert (
            digest
            == json.loads((folder / manifest.NAME).read_text())["built"][each.configuration.name]["xclbin"]["sha256"]
        )
        words = found.instructions(each)
        assert words.dtype == np.uint32
        assert words.tobytes() == (folder / each.configuration.name / f"{manifest.stream_name(each)}.bin").read_bytes()
        assert found.choose([each]) is each


def test_a_product_on_a_folder(folder: Path, rng: np.random.Generator) -> None:
    """What the NPU does with a folder that `make xclbins` filled, on the emulated device."""
    layer = make_layer(rng, 512, 500, Scheme(4, 128)).layer
    device = NpuDevice(EmulatedXrt(), FolderArtifacts(folder), "npu")
    x, y = rng.normal(0, 1, (100, 512)).astype(F32), np.empty((100, 500), F32)
    device.matmul(view(x), layer, view(y))
    check_gemm(y, x, layer)
    device.close()


def test_rows_that_were_not_built_take_padding(
    folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tools, 70 rows run on what was built for 100; more rows than were built are an error."""
    monkeypatch.setattr(module, "_tools_error", lambda: "no tools")
    assert manifest.stream_name(plan.gemm(LAYOUT, 30)) != manifest.stream_name(GEMM)
    layer = make_layer(rng, 512, 500, Scheme(4, 128), bias=True).layer
    device = NpuDevice(EmulatedXrt(), FolderArtifacts(folder), "npu")
    for m in (30, 2, 128):
        x, y = rng.normal(0, 1, (m, 512)).astype(F32), np.empty((m, 500), F32)
        device.matmul(view(x), layer, view(y))
        check_gemm(y, x, layer)
    x, y = np.zeros((129, 512), F32), np.empty((129, 500), F32)
    with pytest.raises(ArtifactsError, match="which was not built"):
        device.matmul(view(x), layer, view(y))
    device.close()


def test_another_process_adds_to_the_folder(folder: Path) -> None:
    found = FolderArtifacts(folder, build=False)
    more = plan.gemv(Layout(512, 2048, 4, 128))
    with pytest.raises(ArtifactsError):
        found.instructions(more)
    EmulatedArtifacts(folder).instructions(more)
    assert len(found.instructions(more))


# --- where ------------------------------------------------------------------------------------------------------------


def test_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TILEFUSE_XCLBINS", str(tmp_path / "named"))
    assert default_folder() == tmp_path / "named"
    monkeypatch.delenv("TILEFUSE_XCLBINS")
    monkeypatch.setattr(module.shapes, "default_file", lambda: tmp_path / "checkout" / "designs" / "shapes.toml")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_folder() == tmp_path / "data" / "tilefuse" / "xclbins"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".local" / "share" / "tilefuse" / "xclbins"
    for root in (tmp_path / "checkout", tmp_path):  # what is here goes before what is in the checkout
        (root / "build" / "xclbins").mkdir(parents=True)
        (root / "build" / "xclbins" / manifest.NAME).write_text("{}")
        assert default_folder() == root / "build" / "xclbins"


def test_the_folder_of_who_has_neither_a_home_nor_a_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    monkeypatch.delenv("TILEFUSE_XCLBINS", raising=False)
    monkeypatch.setattr(module.shapes, "default_file", lambda: tmp_path / "designs" / "shapes.toml")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "tilefuse" / "xclbins"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert default_folder() == Path("build/xclbins")


def test_a_folder_whose_name_is_too_long() -> None:
    with pytest.raises(ArtifactsError, match=r"can't read x.*: File name too long"):
        FolderArtifacts(Path("x" * 6000)).xclbin(GEMM)


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_folder_without_a_manifest(tmp_path: Path) -> None:
    with pytest.raises(ArtifactsError, match=r"no manifest.json in .*: run `make xclbins`.*\$TILEFUSE_XCLBINS"):
        FolderArtifacts(tmp_path, build=False).xclbin(GEMM)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=99), r"is of version 99, and this tilefuse reads 1: run `make xclbins` again"),
        (lambda d: d.pop("built"), "manifest.json is damaged"),
        (lambda d: built(d)["xclbin"].update(file="x" * 5000), "missing in"),
        (lambda d: built(d).update(kernel=3), "manifest.json is damaged"),
        (lambda d: stream(d).update(tasks="0" * 64), "built from another plan than today's: run `make xclbins` again"),
        (lambda d: stream(d).update(parameters=[1, 2]), "built from another plan than today's"),
        (lambda d: stream(d)["artifact"].update(sha256="0" * 64), r"128x512x512_2b.bin is not what was built"),
    ],
    ids=["version", "damaged", "a long name", "types", "tasks", "parameters", "hash of a stream"],
)
def test_a_manifest_that_does_not_fit(folder: Path, change: Callable[[Any], object], message: str) -> None:
    edit(folder, change)
    with pytest.raises(ArtifactsError, match=message):
        FolderArtifacts(folder, build=False).instructions(GEMM)


def test_the_errors_are_a_devices_and_a_manifests(tmp_path: Path) -> None:
    for kind in (DeviceError, ManifestError):
        with pytest.raises(kind):
            FolderArtifacts(tmp_path, build=False).instructions(GEMM)


def test_an_xclbin_that_was_changed(folder: Path) -> None:
    path = folder / f"{GEMM.configuration.name}.xclbin"
    path.write_bytes(path.read_bytes() + b"x")
    found = FolderArtifacts(folder)
    with pytest.raises(ArtifactsError, match=r"and the manifest says .* not what was built; run `make xclbins` again"):
        found.xclbin(GEMM)
    path.unlink()
    with pytest.raises(ArtifactsError, match=f"manifest.json lists {path.name}, missing in"):
        FolderArtifacts(folder).xclbin(GEMM)


def test_other_sources(folder: Path) -> None:
    """A kernel or design was changed since."""

    def change(document: Any) -> None:
        sources = document["provenances"][built(document)["xclbin"]["provenance"]]["sources"]
        sources["kernels/aie/config.h"] = "0" * 64

    edit(folder, change)
    with pytest.raises(
        ArtifactsError, match=r"built from other sources than this tilefuse's \(kernels/aie/config.h\): run"
    ):
        FolderArtifacts(folder).xclbin(GEMM)


def test_other_tools(folder: Path) -> None:
    """A stream's addresses are those of one placement: it must come from the tools that made the xclbin."""

    def change(document: Any) -> None:
        provenances = document["provenances"]
        for name, version in (("xclbin", "1.4.0"), ("stream", "1.5.0")):
            artifact = built(document)["xclbin"] if name == "xclbin" else stream(document)["artifact"]
            provenances[name] = {**provenances[artifact["provenance"]], "toolchain": {"mlir_aie": version}}
            artifact["provenance"] = name

    edit(folder, change)
    with pytest.raises(ArtifactsError, match=r"built with mlir_aie 1.4.0, and .*bin with 1.5.0, which may place"):
        FolderArtifacts(folder).instructions(GEMM)


def test_other_columns(folder: Path) -> None:
    """The layer is packed for another array than the xclbins."""
    with pytest.raises(ArtifactsError, match="the layer is packed for 4 columns, and those that were built are for 8"):
        FolderArtifacts(folder, build=False).instructions(plan.gemm(Layout(512, 500, 4, 128, columns=4), 100))


def test_a_kernel_that_is_not_in_the_xclbin(folder: Path, rng: np.random.Generator) -> None:
    edit(folder, lambda d: built(d, GEMV).update(kernel="OTHER"))
    layer = make_layer(rng, 512, 500, Scheme(4, 128)).layer
    device = NpuDevice(EmulatedXrt(), FolderArtifacts(folder), "npu")
    with pytest.raises(DeviceError, match="has no kernel 'OTHER', only MLIR_AIE"):
        device.matmul(view(np.zeros(512, F32)), layer, view(np.empty(500, F32)))
    device.close()


# --- building ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "m", "command"),
    [
        (LAYOUT, 700, "--shape 700x512x500 --scheme w4g128 --output"),
        (Layout(512, 500, 8, 64, columns=4), 1, "--shape 1x512x500 --scheme w8g64 --columns 4 --output"),
        (Layout(512, 500, 4, 32, ZeroKind.M16), 9, "--shape 9x512x500 --scheme w4g32m --output"),
        (Layout(512, 500, 4, 512), 9, "--shape 9x512x500 --scheme w4g128 --output"),
    ],
)
def test_the_command_builds_what_is_missing(
    tools: FakeTools,  # noqa: F811
    layout: Layout,
    m: int,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message of a missing stream has a command; after it, nothing is missing."""
    wanted = plan.gemm(layout, m) if m > 1 else plan.gemv(layout)
    found = FolderArtifacts(tools.output)
    monkeypatch.setattr(module, "_tools_error", lambda: "no aiecc")
    with pytest.raises(ArtifactsError) as raised:
        found.instructions(wanted)
    message = str(raised.value)
    assert "can't be built here (no aiecc)" in message
    assert command in message
    arguments = message.partition("python -m tilefuse.xclbins ")[2].rstrip("`").split()
    assert xclbins.main(arguments) == 0
    assert found.xclbin(wanted).path.is_file()
    found._read = None
    assert found._has(wanted)


def test_a_missing_stream_is_built(tools: FakeTools) -> None:  # noqa: F811
    """First with its xclbin; another shape of the configuration, the stream alone; what is there, not at all."""
    found = FolderArtifacts(tools.output)
    assert found.choose([GEMM]) is GEMM
    found._build_missing(GEMM)
    assert kinds(tools.take_runs()) == ["xi"]
    other = plan.gemm(Layout(512, 400, 4, 128), 500, configurations=[GEMM.configuration])
    found._build_missing(other)
    assert kinds(tools.take_runs()) == ["i"]
    found._build_missing(other)
    assert not tools.take_runs()
    assert set(found._manifest().built[GEMM.configuration.name].streams) == {
        manifest.stream_name(GEMM),
        manifest.stream_name(other),
    }


def test_what_does_not_compile(tools: FakeTools) -> None:  # noqa: F811
    tools.aiecc("print('no route', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ArtifactsError, match=r"(?s)has no manifest.json.*building it failed: .*no route"):
        FolderArtifacts(tools.output).instructions(GEMM)


def test_a_damaged_manifest_is_not_built_over(tools: FakeTools) -> None:  # noqa: F811
    tools.output.mkdir()
    (tools.output / manifest.NAME).write_text('{"version": 99}')
    with pytest.raises(ArtifactsError, match="version 99"):
        FolderArtifacts(tools.output).instructions(GEMM)
    assert not tools.take_runs()


def test_an_xclbin_that_was_built_anew(tools: FakeTools, rng: np.random.Generator, folder: Path) -> None:  # noqa: F811
    """A stream of a new build runs on the new build's xclbin: the context of the old one is left."""
    made = EmulatedArtifacts(folder)
    layer = make_layer(rng, 512, 500, Scheme(4, 128)).layer

    class Rebuilt:
        """Counts as another build from the second stream on."""

        streams = 0

        def xclbin(self, wanted: Plan, /) -> Any:
            return (*made.xclbin(wanted)[:2], str(self.streams > 1))

        def instructions(self, wanted: Plan, /) -> Any:
            self.streams += 1
            return made.instructions(wanted)

        def choose(self, candidates: Any, /) -> Plan:
            return made.choose(candidates)

    device = NpuDevice(EmulatedXrt(), Rebuilt(), "npu")
    for m in (3, 3, 100, 100):
        x, y = rng.normal(0, 1, (m, 512)).astype(F32), np.empty((m, 500), F32)
        device.matmul(view(x), layer, view(y))
        check_gemm(y, x, layer)
    assert device.statistics().contexts == 2
    device.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "4x4"], "'4x4' is no shape: write MxKxN"),
        (["--shape", "0x4x4", "--scheme", "w4g128"], "no shape"),
        (["--shape", "4x128x64"], "--shape needs --scheme"),
        (["--scheme", "w4g128"], "--scheme goes with --shape"),
        (["--shape", "4x128x64", "--scheme", "w4g128", "--shapes", "x"], "goes without --shapes"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        xclbins.main(arguments)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "4x128x64", "--scheme", "w3"], "scheme 'w3': write bits, group and m"),
        (["--shape", "4x128x64", "--scheme", "w4g24"], "w4g24: group size 24"),
        (["--shape", "4x128x64", "--scheme", "w4g32", "--columns", "3"], "columns = 3"),
    ],
)
def test_shapes_that_can_not_be_run(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert xclbins.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_product_builds_what_it_needs(tools: FakeTools, rng: np.random.Generator) -> None:  # noqa: F811
    """Once; that the pretending tools make no instructions is found."""
    layer = make_layer(rng, 512, 500, Scheme(4, 128)).layer
    device = NpuDevice(EmulatedXrt(), FolderArtifacts(tools.output), "npu")
    for runs in (["xi"], []):
        with pytest.raises(DeviceError, match="bytes, no whole number of words"):
            device.matmul(view(np.zeros((100, 512), F32)), layer, view(np.empty((100, 500), F32)))
        assert kinds(tools.take_runs()) == runs
    device.close()
