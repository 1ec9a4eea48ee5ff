"""The emulated device's files: instruction streams, xclbins, and the artifacts made of them."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilefuse import manifest
from tilefuse import plan as planning
from tilefuse.emulator import xclbin_file
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.instructions import InstructionError, decode, encode
from tilefuse.layout import Layout
from tilefuse.manifest import ManifestError
from tilefuse.plan import PlainLayout, Plan

LAYOUT = Layout(256, 1100, 4, 128)

PLANS = [
    planning.gemm(LAYOUT, 300),
    planning.gemm(Layout(640, 600, 8, 32, columns=5), 77),
    planning.gemv(LAYOUT),
    planning.gemv(LAYOUT, streams=2),
    planning.gemm_baseline(PlainLayout(300, 650), 133),
    planning.gemv_baseline(LAYOUT),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.configuration.name)
def test_a_stream_has_what_a_design_asks_of_a_plan(plan: Plan) -> None:
    words = encode(plan)
    assert words.dtype == np.uint32
    found = decode(words)
    assert found.configuration == plan.configuration
    assert found.segments == plan.segments
    assert found.sizes == {"x": plan.x_words, "w": plan.w_words, "y": plan.y_words}
    assert (encode(found) == words).all()
    assert (encode(plan) == words).all()
    assert decode(words.view(np.int32)) == found


def test_the_words_of_a_stream() -> None:
    """By hand, from the module's table."""
    plan = planning.gemv(Layout(128, 64, 4, 128))
    words = encode(plan)
    assert words[:2].tobytes() == b"TFUS\1\0\0\0"
    assert words[2] == words.size
    assert words[3] == zlib.crc32(words[4:].tobytes())
    assert words[4:7].tolist() == [plan.x_words, plan.w_words, plan.y_words]
    # One segment of eight columns' weights, the parameters and x, and eight columns' results.
    assert words[7:9].tolist() == [1, 18]
    end = 10 + int(words[9])
    assert json.loads(words[10:end].tobytes())["columns"] == 8
    assert words[end] == 18
    assert words.size == end + 1 + 18 * 10
    first, last = words[end + 1 : end + 11].tolist(), words[-10:].tolist()
    assert first[:2] == [1 << 16 | 0, 0]
    assert last[:2] == [2 << 16 | 7, 7 * 32]
    assert last[2:] == [1, 1, 1, 32, 0, 0, last[8], 1]


def test_parameters_are_not_in_a_stream() -> None:
    """Shapes that pad alike have one stream; what tells them apart is the activations."""
    one, other = (planning.gemm(Layout(256, n, 4, 128), 300) for n in (1100, 1101))
    assert (encode(one) == encode(other)).all()


def resealed(words: Any) -> Any:
    """With a checksum that is right."""
    words = words.copy()
    words[3] = zlib.crc32(words[4:].tobytes())
    return words


STREAM = encode(PLANS[2])
CONFIGURATION_END = 10 + int(STREAM[9])


def with_word(index: int, value: int) -> Any:
    words = STREAM.copy()
    words[index] = value
    return resealed(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (STREAM[:5], "5 words are no instruction stream"),
        (np.zeros(100, np.uint32), "begins with 0x53554654; this one 0x0"),
        (with_word(1, 2), "of version 2; this tilefuse reads 1"),
        (STREAM[:-1], "words; .* are given"),
        (np.append(STREAM, np.uint32(0)), "words; .* are given"),
        (np.append(STREAM[:-1], np.uint32(7)), "checksum"),
        (with_word(7, 2), "counts come to"),
        (with_word(8, 0xFFFFFFFF), "counts come to"),
        (with_word(CONFIGURATION_END, 17), "whose segments have 17"),
        (with_word(12, 0), "a configuration that is none"),
        (with_word(CONFIGURATION_END + 1, 3 << 16), "stream 3, number 0; there is none"),
        (with_word(CONFIGURATION_END + 1, 99), "stream 0, number 99; there is none"),
        (with_word(CONFIGURATION_END + 2, 1 << 31), "touches words"),
        (with_word(CONFIGURATION_END + 3, 0), "a loop runs at least once"),
        (with_word(4, 1), "touches words"),
        (STREAM.astype(np.float32), "this is float32"),
        (STREAM.reshape(1, -1), "this is uint32"),
    ],
)
def test_what_is_no_stream(words: Any, message: str) -> None:
    with pytest.raises(InstructionError, match=message):
        decode(words)


@given(st.lists(st.tuples(st.integers(0, STREAM.size - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=4))
def test_any_words_are_a_stream_or_an_error(changes: list[tuple[int, int]]) -> None:
    words = STREAM.copy()
    for index, value in changes:
        words[index] = value
    for given_words in (words, resealed(words)):
        try:
            found = decode(given_words)
        except InstructionError:
            continue
        assert (encode(found)[4:7] == given_words[4:7]).all()


@given(st.binary(max_size=400))
def test_any_bytes_are_no_stream(data: bytes) -> None:
    with pytest.raises(InstructionError):
        decode(np.frombuffer(data[: len(data) // 4 * 4], np.uint32))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.configuration.name)
def test_an_xclbin_names_its_configuration(plan: Plan) -> None:
    image = xclbin_file.load(xclbin_file.dump(plan.configuration))
    assert image.configuration == plan.configuration
    assert (image.kernel, image.host_buffers) == ("MLIR_AIE", 5)


CHANGES: list[tuple[str, Any]] = [
    ("magic", "something"),
    ("version", 2),
    ("kernel", None),
    ("host_buffers", -1),
    ("host_buffers", 5.0),
    ("configuration", []),
    ("configuration", {}),
]


@pytest.mark.parametrize(("key", "value"), CHANGES)
def test_what_is_no_xclbin(key: str, value: Any) -> None:
    document = json.loads(xclbin_file.dump(PLANS[0].configuration))
    document[key] = value
    with pytest.raises(InstructionError):
        xclbin_file.load(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("key", "value"),
    [("columns", 9), ("columns", True), ("tiles", "1"), ("weights", 3), ("op", "gemmm"), ("more", 1), ("streams", -1)],
)
def test_what_is_no_configuration(key: str, value: Any) -> None:
    document = json.loads(xclbin_file.dump(PLANS[0].configuration))
    document["configuration"][key] = value
    with pytest.raises(InstructionError, match="a configuration that is none"):
        xclbin_file.load(json.dumps(document).encode())


@given(st.binary(max_size=200))
def test_any_bytes_are_no_xclbin(data: bytes) -> None:
    with pytest.raises(InstructionError):
        xclbin_file.load(data)


# --- artifacts -------------------------------------------------------------------------------------------------------


def test_artifacts_are_made_when_asked_for(tmp_path: Path) -> None:
    made = EmulatedArtifacts(tmp_path)
    plan, other = PLANS[0], planning.gemm(LAYOUT, 40)
    found = made.xclbin(plan)
    assert found.path == tmp_path / f"{plan.configuration.name}.xclbin"
    assert found.kernel == "MLIR_AIE"
    for wanted in (plan, other, plan):
        words = made.instructions(wanted)
        assert words.dtype == np.uint32
        assert (words == encode(wanted)).all()
    known = manifest.read(tmp_path)
    for wanted in (plan, other):
        built, stream = known.find(wanted)
        assert built.configuration == wanted.configuration
        assert stream.problems == ((wanted.m, wanted.k, wanted.n),)
    assert len(known.built[plan.configuration.name].streams) + len(known.built) >= 3
    assert made.choose([plan, other]) is plan


def test_artifacts_stay_for_the_next(tmp_path: Path) -> None:
    first = EmulatedArtifacts(tmp_path)
    first.instructions(PLANS[0])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    second = EmulatedArtifacts(tmp_path)
    assert (second.instructions(PLANS[0]) == encode(PLANS[0])).all()
    assert second.xclbin(PLANS[0]) == first.xclbin(PLANS[0])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_changed_artifacts_are_refused(tmp_path: Path) -> None:
    made = EmulatedArtifacts(tmp_path)
    path = made.xclbin(PLANS[0]).path
    made.instructions(PLANS[0])
    path.write_bytes(b"{}")
    with pytest.raises(ManifestError, match="is not what was built"):
        made.xclbin(PLANS[0])
    (stream,) = tmp_path.glob("*/*.bin")
    stream.write_bytes(b"")
    with pytest.raises(ManifestError, match="is not what was built"):
        made.instructions(PLANS[0])


def test_a_temporary_folder_goes(tmp_path: Path) -> None:
    made = EmulatedArtifacts()
    made.instructions(PLANS[0])
    folder = made.folder
    assert folder.is_dir()
    made.close()
    assert not folder.exists()


# --- the end of the process ------------------------------------------------------------------------------------------

_LEFT_OPEN = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from emulated_host import Host, small_gemv, vector
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.xrt import EmulatedXrt, Fault

rng = np.random.default_rng(0)
pyxrt = EmulatedXrt()
plan, layer = small_gemv(rng)
host = Host(pyxrt, EmulatedArtifacts(), plan)
buffers = host.buffers(plan, layer, vector(rng, layer.k))
run = host.run(buffers)
run.start()
assert run.wait() == 4
pyxrt.inject(Fault.STALL)
run.start()
run.wait(1)
print("left")
"""


def test_a_process_ends_with_everything_open(repository: Path) -> None:
    """Contexts loaded, and a run stalled."""
    command = [sys.executable, "-c", _LEFT_OPEN, str(repository / "tests")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
