"""What a wheel and a source distribution carry: all that a checkout can do."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # they run CMake: seconds when nothing changed, else a build


def build(hook: str, repository: Path, directory: Path) -> Path:
    """Runs a PEP 517 hook in the checkout, in the environment that the tests run in, and returns what it made."""
    pytest.importorskip("scikit_build_core", reason="the build backend is not installed in this environment")
    code = f"import sys; from scikit_build_core.build import {hook}; {hook}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(directory)], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = directory.iterdir()
    return made


def checkout_files(repository: Path, folder: str) -> dict[str, bytes]:
    """Contents of the files that git tracks or would track under ``folder``, by their path in it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder],
        cwd=repository,
        capture_output=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = (repository / name for name in listed.stdout.decode().split("\0") if name)
    return {path.relative_to(repository / folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}


def test_wheel_carries_package_designs_and_kernel_sources(repository: Path, tmp_path: Path) -> None:
    expected = {f"tilefuse/designs/{name}": data for name, data in checkout_files(repository, "designs/iron").items()}
    expected["tilefuse/designs/shapes.toml"] = checkout_files(repository, "designs")["shapes.toml"]
    for name, data in checkout_files(repository, "kernels").items():
        # What is compiled into the extensions, and how, is of no use beside them.
        if not name.startswith("cpu/") and not name.endswith("CMakeLists.txt"):
            expected[f"tilefuse/kernels/{name}"] = data
    for name, data in checkout_files(repository, "src/tilefuse").items():
        if not name.startswith(("_core/", "_emu/", "_xrt/")):  # likewise
            expected[f"tilefuse/{name}"] = data

    with zipfile.ZipFile(build("build_wheel", repository, tmp_path)) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))).decode()

    built = {name: name.split(".")[0] for name in found if name.startswith("tilefuse/_") and name.endswith(".so")}
    extensions = set(built)
    # The binding of XRT comes where its headers are.
    assert set(built.values()) - {"tilefuse/_xrt"} == {"tilefuse/_core", "tilefuse/_emu"}
    assert found.keys() - extensions == expected.keys()
    assert {name: data for name, data in found.items() if name not in extensions} == expected
    assert {"tilefuse/py.typed", "tilefuse/designs/__init__.py", "tilefuse/plan/__init__.py"} <= expected.keys()
    # A plain install brings these three and nothing else.
    requires = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert sorted(line.split()[1].split(">")[0] for line in requires) == ["ml_dtypes", "numpy", "safetensors"]


def test_sdist_carries_what_the_build_reads(repository: Path, tmp_path: Path) -> None:
    archive = build("build_sdist", repository, tmp_path)
    root = archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as sdist:
        found = {name.removeprefix(f"{root}/") for name in sdist.getnames()}
    for folder in ("src", "kernels", "designs", "tests"):
        assert {f"{folder}/{name}" for name in checkout_files(repository, folder)} <= found
    assert {"pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "PKG-INFO"} <= found
