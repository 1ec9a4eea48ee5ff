"""Builds the AIE2P kernel objects with Peano (llvm-aie) and reports what each takes: ``make kernels``.

    python -m tilefuse.kernels_build --output build/kernels [--only TEXT]

The configurations are those of the host build (`tilefuse.emulator.kernels`): what is tested on this machine is what is
compiled for the array. Exit code: 0; 1 when a kernel does not compile or does not fit; 2 when Peano, the aie_api
headers or the host build are missing; 130 when interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.resources
import os
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilefuse import arch
from tilefuse.errors import TileFuseError, ToolchainError

if TYPE_CHECKING:
    from tilefuse.emulator.kernels import HostKernel

FLAGS = (
    "-O2",
    "-std=c++20",
    "--target=aie2p-none-unknown-elf",
    "-Wno-parentheses",
    "-Wno-attributes",
    "-Wno-macro-redefined",
    "-Wno-empty-body",
    "-Wno-missing-template-arg-list-after-template-kw",
    "-DNDEBUG",
    "-D__AIE_API_AIE_ADF_HPP__",
)
"""What mlir-aie compiles kernels with."""

OUR_FLAGS = ("-DAIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16=1", "-fstack-usage", "-c")

PEANO_WHEEL = (
    "llvm-aie==21.0.0.2026080301+c9c5ecb7 -f https://github.com/Xilinx/llvm-aie/releases/expanded_assets/nightly"
)
MLIR_AIE_WHEEL = "mlir_aie -f https://github.com/Xilinx/mlir-aie/releases/expanded_assets/latest-wheels-4"


class KernelBuildError(TileFuseError, RuntimeError):
    """A kernel does not compile, its object does not fit a core, or can't be written."""


@dataclass(frozen=True)
class Configuration:
    """One kernel object: a source and the values of its configuration macros (kernels/aie/config.h).

    Attributes:
        name: Name of the main entry point, and of the object file.
        source: File name in kernels/aie.
        macros: Macro -> value.
    """

    name: str
    source: str
    macros: dict[str, str]


@dataclass(frozen=True)
class Size:
    """What a built object takes.

    Attributes:
        name: The configuration's name.
        text: Bytes of instructions, all entry points together.
        stack: Bytes of the deepest frame of any function in it, or None where the compiler did not say.
    """

    name: str
    text: int
    stack: int | None


@dataclass(frozen=True)
class Toolchain:
    """Where the compiler and the headers are."""

    compiler: Path
    include: Path


def configurations() -> list[Configuration]:
    """All kernel objects: one for each kernel of the host build."""
    from tilefuse.emulator import kernels

    return [_configuration(kernels.get(name)) for name in kernels.names()]


def _configuration(kernel: HostKernel) -> Configuration:
    if kernel.op == "attention":
        return Configuration(kernel.name, f"{kernel.op}_{kernel.activation}.cc", {"TF_D": str(kernel.d)})
    weights = "" if kernel.bits == 16 else f"_w{kernel.bits}"
    macros = {"TF_PATH": f"TF_PATH_{kernel.path.upper()}", "TF_MINIMA": str(int(kernel.minima))}
    if kernel.bits != 16:
        macros["TF_GROUP"] = str(kernel.group)
    if kernel.activation == "bfp16":
        macros["TF_TILES"] = str(kernel.tiles)
    elif kernel.op == "gemm":
        macros["TF_M"] = str(kernel.m)
    return Configuration(kernel.name, f"{kernel.op}_{kernel.activation}{weights}.cc", macros)


def find_toolchain() -> Toolchain:
    """Peano in PEANO_INSTALL_DIR or the installed llvm-aie; the headers in MLIR_AIE_DIR or the installed mlir_aie.

    Raises:
        ToolchainError: One of them is missing; the message names the command that installs it.
    """
    where = os.environ.get("PEANO_INSTALL_DIR")
    candidates = [Path(where)] if where else [Path(entry) / "llvm-aie" for entry in sys.path if entry]
    # os.path, unlike Path, says no to a path that can't even be looked at.
    compiler = next((path for root in candidates if os.path.isfile(path := root / "bin" / "clang++")), None)
    if compiler is None:
        place = f"PEANO_INSTALL_DIR={where} has no bin/clang++" if where else "llvm-aie is not installed"
        raise ToolchainError(f"no Peano, the AIE2P compiler ({place}): {pip_install(PEANO_WHEEL)}")
    if not os.access(compiler, os.X_OK):
        raise ToolchainError(f"{compiler} is not executable: `chmod +x` it, or {pip_install(PEANO_WHEEL)}")
    root = os.environ.get("MLIR_AIE_DIR") or mlir_aie()
    if not root:
        raise ToolchainError(f"no aie_api headers, which mlir_aie brings: {pip_install(MLIR_AIE_WHEEL)}")
    include = Path(root) / "include"
    if not os.path.isfile(include / "aie_api" / "aie.hpp"):
        raise ToolchainError(f"no aie_api/aie.hpp in {include}: {pip_install(MLIR_AIE_WHEEL)}")
    return Toolchain(compiler, include)


def mlir_aie() -> str | None:
    """Where the installed mlir_aie is. Other packages, and any folder on the path, may have the name of its module."""
    try:
        return str(importlib.import_module("aie.utils.config").root_path())
    except (ImportError, AttributeError):
        return None


def pip_install(wheel: str) -> str:
    """How to install a wheel into this environment, for messages."""
    return f"install it with `{sys.executable} -m pip install {wheel}`"


def compile_command(tools: Toolchain, sources: Path, configuration: Configuration, output: Path) -> list[str]:
    """The command that compiles one configuration to ``output``."""
    macros = [f"-D{name}={value}" for name, value in configuration.macros.items()]
    includes = ["-I", str(sources), "-I", str(tools.include)]
    source = str(sources / configuration.source)
    return [str(tools.compiler), *FLAGS, *includes, *OUR_FLAGS, *macros, source, "-o", str(output)]


def build(tools: Toolchain, configuration: Configuration, output: Path) -> Size:
    """Compiles one configuration into the directory ``output``, under its own name; a failure leaves no object there.

    Raises:
        KernelBuildError: The compiler fails or makes no object, the object is larger than a core's program memory, or
            ``output`` can't be written.
        ToolchainError: The compiler can't be run.
    """
    name = configuration.name
    # By way of a file: an installed folder without __init__.py is no path to importlib, only what it holds is.
    sources = Path(str(importlib.resources.files("tilefuse.kernels.aie") / "config.h")).parent
    made = output / f"{name}.o"
    # For messages: the command to try again by hand.
    command = shlex.join(compile_command(tools, sources, configuration, made))
    try:
        made.unlink(missing_ok=True)
        # A folder of its own: no other run writes there, and nothing of a failure stays.
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=output) as folder:
            partial = Path(folder) / made.name
            done = _run(compile_command(tools, sources, configuration, partial))
            if done.returncode != 0:
                said = (done.stderr or done.stdout).rstrip() or "(it says nothing)"
                raise KernelBuildError(f"{name} does not compile (exit code {done.returncode}):\n{command}\n{said}")
            if not partial.is_file():
                raise KernelBuildError(f"{name}: the compiler reports success and made no object:\n{command}")
            try:
                text = text_bytes(partial.read_bytes())
            except KernelBuildError as error:
                raise KernelBuildError(f"{name}: {error}:\n{command}") from None
            if text > arch.PROGRAM_BYTES:
                raise KernelBuildError(
                    f"{name}: {text} bytes of instructions, and a core holds {arch.PROGRAM_BYTES}; "
                    "take a smaller TF_M or keep its loops rolled"
                )
            usage = partial.with_suffix(".su")
            stack = stack_bytes(usage.read_text(errors="replace")) if usage.is_file() else None
            partial.replace(made)
    except OSError as error:
        raise KernelBuildError(f"{name}: can't write {error.filename or output}: {error.strerror}") from None
    return Size(name, text, stack)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise ToolchainError(f"can't run {command[0]}: {error.strerror}; {pip_install(PEANO_WHEEL)}") from None


def stack_bytes(usage: str) -> int | None:
    """The largest frame that a compiler's stack usage file states: lines of place, bytes and kind, tabs between."""
    fields = [line.split("\t") for line in usage.splitlines()]
    frames = [int(line[1]) for line in fields if len(line) > 2 and line[1].isdecimal()]
    return max(frames, default=None)


def text_bytes(elf: bytes) -> int:
    """Bytes of the executable sections of an ELF object.

    Raises:
        KernelBuildError: It is no little-endian ELF object.
    """
    if len(elf) < 52 or elf[:4] != b"\x7fELF" or elf[5] != 1:
        raise KernelBuildError("the compiler did not make a little-endian ELF object")
    wide = elf[4] == 2
    try:
        (table,) = struct.unpack_from("<Q" if wide else "<I", elf, 40 if wide else 32)
        entry, count = struct.unpack_from("<HH", elf, 58 if wide else 46)
        total = 0
        for i in range(count):
            header = table + i * entry
            (flags,) = struct.unpack_from("<Q" if wide else "<I", elf, header + 8)
            (size,) = struct.unpack_from("<Q" if wide else "<I", elf, header + (32 if wide else 20))
            if flags & 4:  # SHF_EXECINSTR
                total += size
    except (struct.error, OverflowError):
        raise KernelBuildError("the compiler made an ELF object that is cut short") from None
    return total


def report(sizes: Iterable[Size]) -> str:
    """The sizes as a table; a frame deeper than the default stack is marked."""
    lines = [f"{'kernel':<44} {'text':>6} {'stack':>6}"]
    for size in sizes:
        stack = "?" if size.stack is None else str(size.stack)
        deep = size.stack is not None and size.stack > arch.DEFAULT_STACK
        note = f"  more than the default {arch.DEFAULT_STACK}: set the worker's stack_size" if deep else ""
        lines.append(f"{size.name:<44} {size.text:>6} {stack:>6}{note}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tilefuse.kernels_build", description="Builds the AIE2P kernels.")
    parser.add_argument("--output", type=Path, default=Path("build/kernels"), help="where the objects go")
    parser.add_argument("--jobs", type=jobs, default=os.cpu_count(), help="compilers at a time")
    parser.add_argument("--only", default="", help="build the kernels whose name contains this")
    options = parser.parse_args(arguments)
    try:
        return _build_all(options.output, options.jobs, options.only)
    except (ToolchainError, ImportError) as error:
        print(f"tilefuse: {error}", file=sys.stderr)
        return 2
    except KernelBuildError as error:
        print(f"tilefuse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tilefuse: interrupted", file=sys.stderr)
        return 130


def jobs(text: str) -> int:
    """The argument of ``--jobs``."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{count} compilers at a time; at least 1")
    return count


def _build_all(output: Path, jobs: int, only: str) -> int:
    tools = find_toolchain()
    chosen = [configuration for configuration in configurations() if only in configuration.name]
    if not chosen:
        raise KernelBuildError(f"no kernel's name contains {only!r}")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(f"can't make the folder {output}: {error.strerror}") from None

    def attempt(configuration: Configuration) -> Size | KernelBuildError:
        try:
            return build(tools, configuration, output)
        except KernelBuildError as error:
            return error

    # What interrupts the map cancels the builds that have not begun.
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(attempt, chosen))
    print(report(result for result in results if isinstance(result, Size)))
    failures = [result for result in results if isinstance(result, KernelBuildError)]
    for failure in failures:
        print(f"tilefuse: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
