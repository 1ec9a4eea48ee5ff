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
        kernel: Source distribution that `compile_gptqmodel` compiles the kernel of, or "".
    """

    requirements: Sequence[Sequence[str]]
    source: str = ""
    root: str = ""
    options: Sequence[str] = ()
    kernel: str = ""


LLAMA = "llama-cpp-python==0.3.36"
LLAMA_OPTIONS = [f"-DLLAMA_BUILD_{part}=OFF" for part in ("APP", "COMMON", "EXAMPLES", "SERVER", "TESTS", "TOOLS")]

# Together where they get along: zentorch takes the one torch that it was built for.
ENVIRONMENTS: Mapping[str, Environment] = {
    "torch": Environment(
        [["numpy", "torch==2.13.0"], ["zentorch==2.13.0.2"], ["bitsandbytes>=0.50"], ["ninja", "setuptools"]],
        kernel="gptqmodel==7.7.0",
    ),
    "onnxruntime": Environment([["numpy", "onnx", "onnxruntime>=1.20"]]),
    "openvino": Environment([["numpy", "openvino>=2025.0"]]),
    "llama": Environment(
        [["numpy"]],
        LLAMA,
        "vendor/llama.cpp",
        LLAMA_OPTIONS,
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
    # The wheel is built for AVX2, and so is a ggml that isn't built for the machine at hand.
    "avx2": Environment(
        [["numpy", "ik-llama-cpp-python==0.1.5"]], LLAMA, "vendor/llama.cpp", [*LLAMA_OPTIONS, "-DGGML_NATIVE=OFF"]
    ),
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
    if not environment.source and not environment.kernel:
        return
    run([*pip, "install", "scikit-build-core", "setuptools"])  # to read the metadata of source distributions
    with tempfile.TemporaryDirectory(prefix="tilefuse-peers-") as name:
        work = Path(name)
        for requirement in filter(None, (environment.source, environment.kernel)):
            download = ["download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", str(work)]
            run([*pip, *download, requirement])
        for archive in work.glob("*.tar.gz"):
            with tarfile.open(archive) as tar:
                tar.extractall(work, filter="data")
        if environment.source:
            source = next(iter(work.glob(f"*/{environment.root}")), work / environment.root)
            run(["cmake", "-S", str(source), "-B", str(work / "build"), *CMAKE, *environment.options])
            run(["cmake", "--build", str(work / "build"), "--target", "ggml", "--parallel", str(os.cpu_count() or 1)])
            keep_libraries(work / "build", home / "ggml" / "lib")
            (home / "ggml" / "lib" / "version").write_text(environment.source + "\n")
        if environment.kernel:
            unpacked = work / environment.kernel.replace("==", "-")
            script = Path(__file__).with_name("compile_gptqmodel.py")
            path = os.pathsep.join([str(home / "bin"), os.environ.get("PATH", "")])  # where ninja is
            run(["env", f"PATH={path}", pip[0], str(script), str(unpacked), str(home / "gptqmodel")])


def keep_libraries(build: Path, into: Path) -> None:
    """Copies the ggml libraries of a build, each under the name that the others link to."""
    into.mkdir(parents=True, exist_ok=True)
    for library in build.rglob("libggml*.so*"):
        (into / library.name).write_bytes(library.read_bytes())
