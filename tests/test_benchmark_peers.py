"""benchmarks/peers: the processes that libraries are measured in, also when they die, hang or talk nonsense."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from peers import client, ggml_graph, install, registry, weights, worker
from peers.base import Adapter, Bound, Contender, Product
from peers.client import Peer, PeerError, PeerMissing

NUMPY = Contender("numpy", "W4 g128", 4, 16)
BROKEN = Contender("broken", "W4 g128", 4, 16)


class Dense(Product):
    """float64 weights."""

    weight_bytes = 4

    def __init__(self, codes: weights.Codes) -> None:
        self.weights = codes.dequantized().astype(np.float64)
        self.called: list[int] = []

    def bind(self, x: np.ndarray) -> Bound:
        calls = [lambda copy=copy: self.called.append(copy) for copy in range(3)]
        return Bound(calls, lambda: x @ self.weights.T * (1 + 2**-3), products=2)

    def dequantized(self, channels: np.ndarray) -> np.ndarray:
        return self.weights[channels]


class NumpyAdapter(Adapter):
    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def contenders(self) -> list[Contender]:
        return [NUMPY, BROKEN]

    def load(self, contender: Contender, case: weights.Case, cache_bytes: int) -> Product:
        if contender == BROKEN:
            raise MemoryError(f"no room for {cache_bytes}")
        return Dense(case.schemes["w4g128"])


@pytest.fixture
def case_folder(tmp_path: Path) -> Path:
    weights.save_case(weights.make_case(128, 700, 20), tmp_path / "case")
    return tmp_path / "case"


def test_worker_answers(case_folder: Path) -> None:
    mine = worker.Worker(NumpyAdapter())
    hello = mine.answer({"do": "hello"})
    assert [each["name"] for each in hello["contenders"]] == ["numpy", "broken"]
    load = {"do": "load", "folder": str(case_folder), "cache_bytes": 5}
    assert mine.answer({**load, "name": "numpy"}) == {"weight_bytes": 4}
    assert mine.answer({**load, "name": "broken"}) == {"error": "MemoryError: no room for 5"}
    assert mine.answer({"do": "bind", "name": "numpy", "rows": 18}) == {}
    product = mine._products["numpy"]
    assert isinstance(product, Dense)
    assert product.called == [0, 1, 2]  # each copy once
    timed = mine.answer({"do": "time", "name": "numpy", "at_least": 1e-9})
    assert (timed["calls"], product.called[3:]) == (1, [0, 1])  # one to wake the threads, one timed
    assert timed["seconds"] > 0
    checked = mine.answer({"do": "check", "name": "numpy"})
    # Results are rounded to bfloat16 before they are compared.
    assert checked["relative"] == pytest.approx(2**-3, abs=(1 + 2**-3) * 2**-9)
    assert mine.answer({"do": "unload"}) == {}
    assert "KeyError" in mine.answer({"do": "time", "name": "numpy", "at_least": 0.0})["error"]
    assert "no such request" in mine.answer({"do": "answer"})["error"]
    assert "TypeError" in mine.answer({"do": "time"})["error"]


def test_worker_serves_lines() -> None:
    answers = io.StringIO()
    requests = io.StringIO('{"do": "hello"}\n{"do": "x"}\n')
    worker.serve(worker.Worker(NumpyAdapter()), requests, answers)
    first, second = map(json.loads, answers.getvalue().splitlines())
    assert first["versions"] == {"numpy": np.__version__}
    assert "error" in second


def test_settling_waits_for_other_threads() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert worker.settle(limit=0.05) >= 0.05
    finally:
        stop.set()
        thread.join()


def test_a_real_worker_process(case_folder: Path) -> None:
    command = [sys.executable, "-m", "peers.worker", "tilefuse_packed"]
    with Peer("tilefuse", command, {"OMP_NUM_THREADS": "1", "TILEFUSE_NUM_THREADS": "1"}) as peer:
        versions, contenders = peer.hello()
        assert "tilefuse" in versions
        name = contenders[0].name
        found = peer.number("load", "weight_bytes", folder=str(case_folder), name=name, cache_bytes=1)
        assert found == 1 * 11 * (128 * 64 // 2 + 64 * 2 + 64)  # tiles of codes, scales and zero points
        peer.ask("bind", name=name, rows=2)
        assert peer.number("time", "seconds", name=name, at_least=0.001) > 0
        assert peer.ask("check", name=name)["gate_max"] < 2.0**-8
        with pytest.raises(PeerError, match="tilefuse: KeyError"):
            peer.ask("load", folder=str(case_folder), name="nobody", cache_bytes=1)
        assert peer.alive  # an answer, if a bad one
    assert not peer.alive


def scripted(script: str, timeout: float = 20.0) -> Peer:
    return Peer("it", [sys.executable, "-c", script], timeout=timeout)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("raise SystemExit('boom')", r"its process ended \(1\) at 'hello': boom"),
        ("input(); import os; os.abort()", r"its process ended \(-6\) at 'hello'"),
        ("input(); print('Segmentation fault')", "answered 'Segmentation fault' to 'hello'"),
        ("input(); print('[1, 2]')", "answered"),
        ("input(); print(b'\\xff'); import time; time.sleep(60)", "answered"),
        ("input(); print('{}')", "incomplete answer to 'hello'"),
        ("""input(); print('{"versions": {}, "contenders": [{"name": 1}]}')""", "incomplete"),
        ("""input(); print('{"error": "no"}')""", "it: no"),
    ],
)
def test_a_worker_that_dies_or_talks_nonsense(script: str, message: str) -> None:
    with scripted(script) as peer, pytest.raises(PeerError, match=message):
        peer.hello()


def test_a_worker_that_hangs_is_ended() -> None:
    with scripted("import time; time.sleep(600)", timeout=0.2) as peer:
        with pytest.raises(PeerError, match=r"no answer to 'hello' within 0.2 s"):
            peer.hello()
        assert not peer.alive
        with pytest.raises(PeerError, match="has ended"):
            peer.ask("hello")


@pytest.mark.parametrize("figure", ["-1", "0", "NaN", "Infinity", "null", "true", '"fast"'])
def test_figures_have_to_be_numbers_above_zero(figure: str) -> None:
    with scripted(f"input(); print('{{\"seconds\": {figure}}}')") as peer, pytest.raises(PeerError, match="seconds ="):
        peer.number("time", "seconds")


def test_a_missing_library_is_told_apart() -> None:
    script = """print('{"missing": "ImportError: no x"}')"""
    with scripted(script) as peer, pytest.raises(PeerMissing, match="it: ImportError: no x"):
        peer.hello()
    with pytest.raises(PeerError, match="can't be run"):
        Peer("it", ["/no/such/python"])


def test_only_what_is_there_is_started(tmp_path: Path) -> None:
    entries = [
        registry.Entry("gone", "no_such_module", ""),
        registry.Entry("nowhere", "tilefuse_packed", ""),
        registry.Entry("avx2", "tilefuse_packed", "", {"TILEFUSE_CPU_LEVEL": "portable"}),
    ]
    started, failures = registry.start(entries, {"nowhere": "/no/python"}, None, 1)
    try:
        assert [each.contenders[0].name for each in started] == ["tilefuse W4 g128 portable"]
        assert "not installed: gone: ModuleNotFoundError" in failures[0]
        assert "can't be run: nowhere" in failures[1]
    finally:
        for each in started:
            each.peer.close()


def test_interpreters(tmp_path: Path) -> None:
    entry = registry.Entry("torch", "torch_aten", "torch")
    assert registry.python_of(entry, {"torch": "/mine"}, tmp_path) == "/mine"
    assert registry.python_of(entry, {}, tmp_path) == sys.executable
    made = tmp_path / "torch" / "bin" / "python"
    made.parent.mkdir(parents=True)
    made.touch()
    assert registry.python_of(entry, {}, tmp_path) == str(made)


def test_every_library_has_a_module_and_an_environment() -> None:
    for entry in registry.ENTRIES:
        module = entry.adapter.partition(":")[0]
        assert (client.BENCHMARKS / "peers" / f"{module}.py").exists()
        assert entry.home in ("", *install.ENVIRONMENTS)


def test_environments_are_made_once_and_failures_leave_the_others(tmp_path: Path) -> None:
    ran: list[Sequence[str]] = []

    def run(command: Sequence[str]) -> None:
        ran.append(command)
        if "openvino>=2025.0" in command:
            raise subprocess.CalledProcessError(1, command)
        if "--build" in command:
            build = Path(command[command.index("--build") + 1])
            build.mkdir(parents=True)
            (build / "libggml.so").write_bytes(b"\x7fELF")
        if "venv" in command:
            Path(command[-1]).mkdir(exist_ok=True)

    assert install.make_peers(tmp_path, run) == 1
    assert not (tmp_path / "openvino" / ".complete").exists()
    assert (tmp_path / "ik_llama" / "ggml" / "lib" / "libggml.so").read_bytes() == b"\x7fELF"
    ran.clear()
    install.make_peers(tmp_path, run)
    assert {part for command in ran for part in command if part.startswith(str(tmp_path))} == {
        str(tmp_path / "openvino"),
        str(tmp_path / "openvino" / "bin" / "python"),
    }


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_ggml_formats_mean_what_the_gguf_package_says(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    per, size = ggml_graph.BLOCK[getattr(ggml_graph, kind)]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (6, 512 // per, size), dtype=np.uint8)
    for first in (0, 2) if kind == "Q4_K" else (0,):  # scales that are numbers
        data[:, :, first : first + 2] = rng.uniform(-1, 1, data.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    expected = quants.dequantize(data.reshape(6, -1), getattr(GGMLQuantizationType, kind))
    found = ggml_graph.dequantized(getattr(ggml_graph, kind), data, 512)
    # That one rounds each of up to three operations to float32; terms are at most 64 x 16 here.
    assert np.abs(found - expected).max() <= 3 * 2.0**-24 * 2048


def test_no_ggml_here() -> None:
    with pytest.raises(ImportError, match="no ggml in this environment"):
        ggml_graph.find_libraries("llama")
    with pytest.raises(ImportError, match="no package ik_llama_cpp"):
        ggml_graph.find_libraries("ik-avx2")
    with pytest.raises(OSError, match=r"libc\.so\.6 has no ggml_init"):
        ggml_graph.Ggml([Path("libc.so.6")], 1, repack=False)


def test_library_output_is_no_answer(tmp_path: Path) -> None:
    """What a library prints, also below Python, goes to standard error."""
    (tmp_path / "noisy.py").write_text(
        "import os, sys\nprint('hi')\nos.write(1, b'there')\n"
        "sys.path.insert(0, os.environ['TESTS'])\nfrom test_benchmark_peers import NumpyAdapter as adapter\n"
    )
    script = (
        "import sys, peers; sys.argv[1:] = ['noisy']; "
        f"peers.__path__.append({str(tmp_path)!r}); from peers.worker import main; main()"
    )
    environment = {"TESTS": os.path.dirname(__file__)}
    with Peer("noisy", [sys.executable, "-c", script], environment) as peer:
        assert peer.hello()[0] == {"numpy": np.__version__}
