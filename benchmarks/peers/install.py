"""Makes environments with the libraries that `benchmarks/cpu.py` compares."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """What is installed together, by pip, and what is compiled.

    Attributes:
        requirements: For pip, one call each.
        source: Source distribution that contains a ggml, or "".
        root: Of that ggml's own project, inside it.
        options: CMake's, besides the common ones.
    """

    requirements: Sequence[Sequence[str]]
    source: str = ""
    root: str = ""
    options: Sequence[str] = ()


# Together where they get along: zentorch takes the one torch that it was built for.
ENVIRONMENTS: Mapping[str, Environment] = {
    "torch": Environment([["numpy", "torch==2.13.0"], ["zentorch==2.13.0.2"], ["bitsandbytes>=0.50"]]),
    "onnxruntime": Environment([["numpy", "onnx", "onnxruntime>=1.20"]]),
    "openvino": Environment([["numpy", "openvino>=2025.0"]]),
    "llama": Environment(
        [["numpy"]],
        "llama-cpp-python==0.3.36",
        "vendor/llama.cpp",
        [f"-DLLAMA_BUILD_{part}=OFF" for part in ("APP", "COMMON", "EXAMPLES", "SERVER", "TESTS", "TOOLS")],
    ),
    "ik_llama": Environment(
        [["numpy"]],
        "ik-llama-cpp-python==0.1.5",
        "vendor/ik_llama.cpp",
        [
            *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("EXAMPLES", "SERVER", "TESTS")),
            "-DGGML_IQK_FA_ALL_QUANTS=OFF",  # attention is not compared, and takes long to compile
        ],
    ),
    # Their wheels are built for AVX2.
    "avx2": Environment([["numpy", "libggml-python==0.20.2.post1", "ik-llama-cpp-python==0.1.5"]]),
}

CMAKE = (
    "-DBUILD_SHARED_LIBS=ON",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_CURL=OFF",
)

Runner = Callable[[Sequence[str]], object]


def run_command(command: Sequence[str]) -> None:
    """Runs ``command``; CalledProcessError or OSError if that fails."""
    print("+", " ".join(command), file=sys.stderr, flush=True)
    subprocess.run(command, check=True)


def make_peers(folder: Path, run: Runner = run_command) -> int:
    """Makes every environment in ``folder`` that is not there; returns 1 where one failed, which leaves the others."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, environment in ENVIRONMENTS.items():
        home = folder / name
        done = home / ".complete"
        if done.exists():
            continue
        try:
            make_environment(home, environment, run)
            done.touch()
        except (OSError, subprocess.CalledProcessError, tarfile.TarError) as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    if failed:
        print(f"not made: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def make_environment(home: Path, environment: Environment, run: Runner) -> None:
    """Makes one, with its compiled ggml in ``ggml/lib``."""
    run([sys.executable, "-m", "venv", str(home)])
    pip = [str(home / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for requirements in environment.requirements:
        run([*pip, "install", *requirements])
    if not environment.source:
        return
    run([*pip, "install", "scikit-build-core"])  # to read the metadata of source distributions
    with tempfile.TemporaryDirectory(prefix="tilefuse-ggml-") as name:
        work = Path(name)
        download = ["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(work)]
        run([*pip, *download, environment.source])
        for archive in work.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(work, filter="data")
        source = next(iter(work.glob(f"*/{environment.root}")), work / environment.root)
        run(["cmake", "-S", str(source), "-B", str(work / "build"), *CMAKE, *environment.options])
        run(["cmake", "--build", str(work / "build"), "--target", "ggml", "--parallel", str(os.cpu_count() or 1)])
        keep_libraries(work / "build", home / "ggml" / "lib")


def keep_libraries(build: Path, into: Path) -> None:
    """Copies the ggml libraries of a build, each under the name that the others link to."""
    into.mkdir(parents=True, exist_ok=True)
    for library in build.rglob("libggml*.so*"):
        (into / library.name).write_bytes(library.read_bytes())
