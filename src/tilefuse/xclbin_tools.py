"""The tools that build xclbins: Peano, aiecc of mlir-aie, xclbinutil of XRT; where they are and how they are called."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tilefuse import kernels_build
from tilefuse.errors import ToolchainError

XRT_FOLDER = Path("/opt/xilinx/xrt/bin")
"""Where XRT's own installer puts its tools, which are on PATH after its setup script only."""


@dataclass(frozen=True)
class Tools:
    """Where the tools are, and their versions by the names mlir_aie, llvm_aie and xclbinutil."""

    kernels: kernels_build.Toolchain
    aiecc: Path
    xclbinutil: Path
    versions: dict[str, str]

    @property
    def peano(self) -> Path:
        """The folder that Peano is installed in."""
        return self.kernels.compiler.parent.parent


def find_tools() -> Tools:
    """aiecc from MLIR_AIE_DIR or the installed mlir_aie, xclbinutil from AIE_XCLBINUTIL, PATH or XRT's folder.

    Raises:
        ToolchainError: One of them is missing; the message names the command that installs it.
    """
    kernels = kernels_build.find_toolchain()
    aiecc, xclbinutil = _aiecc(), _xclbinutil()
    versions = {
        "mlir_aie": _version("mlir_aie") or _says(aiecc, "--aie-version"),
        "llvm_aie": _peano_version(kernels.compiler),
        "xclbinutil": _says(xclbinutil, "--version"),
    }
    return Tools(kernels, aiecc, xclbinutil, versions)


def aiecc_command(
    tools: Tools | None, mlir: str, *, xclbin: str | None, insts: str | None, jobs: int | None = None
) -> list[str]:
    """The command that makes an xclbin, an instruction stream or both from MLIR in the folder that it runs in.

    The tools' places and the jobs are left out where they are None: what is left decides what is made.
    """
    command = [] if tools is None else [str(tools.aiecc), f"--peano={tools.peano}", "--no-progress"]
    if jobs is not None:
        command.append(f"-j{jobs}")
    # Largest buffers first, one after another, as the budgets of configurations count; loop counts known at run time
    # only are what the dynamic lowering of object fifos is for (its default, said because nothing works without it).
    command += ["--alloc-scheme=basic-sequential", "--dynamic-objFifos"]
    if xclbin is not None:
        command += ["--get-xclbin", f"--xclbin-name={xclbin}"]
    if insts is not None:
        command += ["--get-npu-insts", f"--npu-insts-name={insts}"]
    return [*command, "--output-dir=.", "--tmpdir=work", *([mlir] if mlir else [])]


def _aiecc() -> Path:
    install = kernels_build.pip_install(kernels_build.MLIR_AIE_WHEEL)
    where = os.environ.get("MLIR_AIE_DIR") or kernels_build.mlir_aie()
    path = Path(where or "") / "bin" / "aiecc"
    if not where or not os.path.isfile(path):
        found = shutil.which("aiecc")
        if found is None:
            raise ToolchainError(f"no aiecc, which mlir_aie brings: {install}")
        path = Path(found)
    if not os.access(path, os.X_OK):
        raise ToolchainError(f"{path} is not executable: `chmod +x` it, or {install}")
    return path


def _xclbinutil() -> Path:
    install = (
        "install it with `sudo add-apt-repository ppa:amd-team/xrt && sudo apt-get install libxrt-utils`, "
        "or name one in AIE_XCLBINUTIL"
    )
    named = os.environ.get("AIE_XCLBINUTIL")
    found = shutil.which(named or "xclbinutil") or (None if named else shutil.which("xclbinutil", path=str(XRT_FOLDER)))
    if found is None:
        place = f"AIE_XCLBINUTIL={named} is no program" if named else "not on PATH"
        raise ToolchainError(f"no xclbinutil ({place}), which packs xclbins and is part of XRT: {install}")
    return Path(found).absolute()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _peano_version(compiler: Path) -> str:
    """The wheel's version where the compiler is the wheel's: another one may be named by the environment."""
    version = _version("llvm-aie")
    if version is not None and not os.environ.get("PEANO_INSTALL_DIR"):
        return version
    return _says(compiler, "--version")


def _says(tool: Path, argument: str) -> str:
    """What a tool says of its version, one line."""
    try:
        done = subprocess.run(
            [str(tool), argument], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise ToolchainError(f"can't run {tool}: {error.strerror}") from None
    words = " ".join((done.stdout or done.stderr).split())
    return words or "unknown"
