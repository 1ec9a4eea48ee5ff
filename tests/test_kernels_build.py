"""`make kernels` with a compiler that only pretends, and without one."""

from __future__ import annotations

import importlib
import os
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilefuse import kernels_build as kb

FAKE = """#!/bin/sh
record=$(printf '%s\\t' "$@")
printf '%s\\n' "$record" >> {log}
case "$*" in {reject}) echo "error: no matching function for call to 'mac'" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
cp {elf} "$2"
{usage}
"""
USAGE = """printf 'a.cc:1:1:zero\\t32\\tstatic\\na.cc:9:1:main one\\t{stack}\\tstatic\\n' > "${{2%.o}}.su\""""


def elf_object(text: int, *, wide: bool = False) -> bytes:
    """A little-endian ELF object: a null section, two executable ones of ``text`` bytes together, one of data."""
    sections = [(0, 0), (6, text - 16), (6, 16), (3, 4096)]
    head = b"\x7fELF" + bytes([2 if wide else 1, 1, 1]) + bytes(9)
    if wide:
        head += struct.pack("<HHIQQQIHHHHHH", 1, 264, 1, 0, 0, 64, 0, 64, 0, 0, 64, len(sections), 0)
        return head + b"".join(struct.pack("<IIQQQQIIQQ", 0, 1, f, 0, 0, size, 0, 0, 4, 0) for f, size in sections)
    head += struct.pack("<HHIIIIIHHHHHH", 1, 264, 1, 0, 0, 52, 0, 52, 0, 0, 40, len(sections), 0)
    return head + b"".join(struct.pack("<IIIIIIIIII", 0, 1, f, 0, 0, size, 0, 0, 4, 0) for f, size in sections)


class FakePeano:
    """A directory that looks like an installed Peano, with an `aie` package that looks like mlir_aie."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.log, self.include = root, root / "calls", root / "mlir" / "include"
        (root / "bin").mkdir()
        (self.include / "aie_api").mkdir(parents=True)
        (self.include / "aie_api" / "aie.hpp").touch()
        package = root / "site" / "aie" / "utils"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "config.py").write_text(f"def root_path():\n    return {str(root / 'mlir')!r}\n")
        monkeypatch.setenv("PEANO_INSTALL_DIR", str(root))
        monkeypatch.delenv("MLIR_AIE_DIR", raising=False)
        monkeypatch.syspath_prepend(str(root / "site"))
        forget_aie(monkeypatch)
        self.behave()

    def behave(self, text: int = 4000, stack: int | None = 96, reject: str = "") -> None:
        """Objects of ``text`` bytes and a ``stack`` frame; a command line that contains ``reject`` is an error."""
        compiler, elf = self.root / "bin" / "clang++", self.root / "object"
        elf.write_bytes(elf_object(text))
        usage = "" if stack is None else USAGE.format(stack=stack)
        pattern = f"*{reject}*" if reject else "''"
        compiler.write_text(FAKE.format(log=self.log, reject=pattern, elf=elf, usage=usage))
        compiler.chmod(0o755)

    def calls(self) -> list[list[str]]:
        return [line.rstrip("\t").split("\t") for line in self.log.read_text().splitlines()]


def forget_aie(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aie", "aie.utils", "aie.utils.config"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()


@pytest.fixture
def peano(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePeano:
    return FakePeano(tmp_path, monkeypatch)


def test_every_kernel_of_the_host_build_has_a_source(repository: Path) -> None:
    listed = kb.configurations()
    assert len({configuration.name for configuration in listed}) == len(listed)
    sources = {path.name for path in (repository / "kernels" / "aie").glob("*.cc")}
    assert {configuration.source for configuration in listed} == sources


def test_compiles_each_kernel_with_the_stated_flags(
    peano: FakePeano, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert kb.main(["--output", str(output)]) == 0
    names = [configuration.name for configuration in kb.configurations()]
    assert sorted(path.name for path in output.iterdir()) == sorted(f"{name}.o" for name in names)
    calls = {call[call.index("-o") + 1].rpartition("/")[2].removesuffix(".o"): call for call in peano.calls()}
    assert calls.keys() == set(names)
    call = calls["gemv_bf16_w4g64m_mantissa_128x64"]
    # As section "make kernels" of docs/kernels.md has them.
    assert call[:3] == ["-O2", "-std=c++20", "--target=aie2p-none-unknown-elf"]
    assert {"-DNDEBUG", "-D__AIE_API_AIE_ADF_HPP__", "-Wno-macro-redefined", "-c", "-fstack-usage"} <= set(call)
    assert {"-DTF_PATH=TF_PATH_MANTISSA", "-DTF_GROUP=64", "-DTF_MINIMA=1"} <= set(call)
    assert not any(argument.startswith("-DTF_M=") for argument in call)
    includes = [call[i + 1] for i, argument in enumerate(call) if argument == "-I"]
    assert len(includes) == 2
    # In a checkout or, installed, in the package: the folder that is named holds the kernels as they are here.
    for source in (repository / "kernels" / "aie").iterdir():
        assert (Path(includes[0]) / source.name).read_bytes() == source.read_bytes()
    assert Path(includes[1]).resolve() == peano.include.resolve()
    assert Path(call[-3]) == Path(includes[0]) / "gemv_bf16_w4.cc"
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["kernel", "text", "stack"]
    assert [line.split() for line in table[1:]] == [[name, "4000", "96"] for name in names]


def test_only_builds_what_is_asked_for(peano: FakePeano, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert kb.main(["--output", str(tmp_path / "out"), "--only", "gemv_bf16_w8g32_mantissa"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["gemv_bf16_w8g32_mantissa_128x64.o"]
    assert kb.main(["--output", str(tmp_path / "out"), "--only", "w3"]) == 1
    assert "'w3'" in capsys.readouterr().err


def test_marks_a_deep_stack_and_an_unstated_one(
    peano: FakePeano, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--output", str(tmp_path / "out"), "--only", "gemv_bf16_bf16"]
    peano.behave(stack=1056)
    assert kb.main(only) == 0
    assert "1056  more than the default 1024: set the worker's stack_size" in capsys.readouterr().out
    peano.behave(stack=None)
    assert kb.main(only) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "?"


def test_an_object_that_does_not_fit_is_refused(
    peano: FakePeano, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--output", str(tmp_path / "out"), "--only", "gemv_bf16_bf16"]
    peano.behave(text=16384)
    assert kb.main(only) == 0
    peano.behave(text=16388)
    assert kb.main(only) == 1
    assert "gemv_bf16_bf16_elementwise_128x64: 16388 bytes of instructions" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_a_kernel_that_does_not_compile_is_named_and_the_others_are_built(
    peano: FakePeano, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peano.behave(reject="gemv_bf16_w8.cc")
    assert kb.main(["--output", str(tmp_path / "out"), "--only", "g32_mantissa_128"]) == 1
    captured = capsys.readouterr()
    assert "gemv_bf16_w8g32_mantissa_128x64 does not compile" in captured.err
    assert "no matching function" in captured.err
    assert "gemv_bf16_w4g32_mantissa_128x64" in captured.out
    assert "gemv_bf16_w4g32_mantissa_128x64.o" in {path.name for path in (tmp_path / "out").iterdir()}


def test_without_peano_one_sentence_names_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for where in (None, str(tmp_path / "nowhere")):
        if where is None:
            monkeypatch.delenv("PEANO_INSTALL_DIR", raising=False)
        else:
            monkeypatch.setenv("PEANO_INSTALL_DIR", where)
        assert kb.main(["--output", str(tmp_path / "out")]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert (
            "-m pip install llvm-aie==21.0.0.2026080301+c9c5ecb7 -f https://github.com/Xilinx/llvm-aie/" in captured.err
        )
    assert not (tmp_path / "out").exists()


def test_the_wheel_is_found(peano: FakePeano, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PEANO_INSTALL_DIR")
    (tmp_path / "site" / "llvm-aie").symlink_to(peano.root)
    tools = kb.find_toolchain()
    assert tools.compiler == tmp_path / "site" / "llvm-aie" / "bin" / "clang++"
    assert tools.include == peano.include
    monkeypatch.setenv("MLIR_AIE_DIR", str(tmp_path / "elsewhere"))
    with pytest.raises(kb.ToolchainError, match=r"no aie_api/aie\.hpp in .*elsewhere"):
        kb.find_toolchain()


def test_without_the_headers_the_command_is_named(
    peano: FakePeano, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (peano.include / "aie_api" / "aie.hpp").unlink()
    assert kb.main([]) == 2
    assert "-m pip install mlir_aie -f https://github.com/Xilinx/mlir-aie/" in capsys.readouterr().err
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("/site")])
    forget_aie(monkeypatch)
    assert kb.main([]) == 2
    assert "pip install mlir_aie" in capsys.readouterr().err


def test_text_is_what_executes() -> None:
    assert kb.text_bytes(elf_object(1234)) == 1234
    assert kb.text_bytes(elf_object(1234, wide=True)) == 1234
    with pytest.raises(kb.KernelBuildError, match="ELF"):
        kb.text_bytes(b"!<arch>\n" + bytes(100))


@pytest.mark.parametrize("wide", [False, True])
def test_an_object_cut_short_anywhere_is_refused(wide: bool) -> None:
    """Sections' headers are at its end."""
    whole = elf_object(1234, wide=wide)
    for length in range(len(whole) - 40):
        with pytest.raises(kb.KernelBuildError):
            kb.text_bytes(whole[:length])
    far = bytearray(whole)
    far[32:48] = b"\xff" * 16
    with pytest.raises(kb.KernelBuildError, match="cut short"):
        kb.text_bytes(bytes(far))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("exit 0", "made no object"),
        ("kill -9 $$", r"does not compile \(exit code -9\).*\(it says nothing\)"),
        (r"printf '\377\376 \200' >&2; exit 3", r"does not compile \(exit code 3\)"),
        ('while [ "$1" != -o ]; do shift; done; echo garbage > "$2"', "not make a little-endian ELF object"),
        ('while [ "$1" != -o ]; do shift; done; mkdir "$2"', "made no object"),
        ('while [ "$1" != -o ]; do shift; done; echo > "$2"; exit 1', "does not compile"),
    ],
)
def test_a_compiler_that_misbehaves(
    peano: FakePeano, tmp_path: Path, capsys: pytest.CaptureFixture[str], script: str, message: str
) -> None:
    """Each kernel's failure is named, with the command, and leaves nothing behind, not even the object of before."""
    only = ["--output", str(tmp_path / "out"), "--only", "gemv_bf16_bf16"]
    assert kb.main(only) == 0
    (peano.root / "bin" / "clang++").write_text(f"#!/bin/sh\n{script}\n")
    assert kb.main(only) == 1
    said = capsys.readouterr().err
    assert re.search(f"gemv_bf16_bf16_elementwise_128x64:? .*{message}", said, re.DOTALL), said
    assert f"-o {tmp_path / 'out' / 'gemv_bf16_bf16_elementwise_128x64.o'}" in said
    assert list((tmp_path / "out").iterdir()) == []


def test_a_compiler_that_can_not_run(peano: FakePeano, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiler = peano.root / "bin" / "clang++"
    compiler.write_bytes(b"\x7fELF of another machine")
    assert kb.main(["--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert f"can't run {compiler}" in captured.err
    compiler.chmod(0o644)
    assert kb.main(["--output", str(tmp_path / "out")]) == 2
    assert f"{compiler} is not executable" in capsys.readouterr().err


def test_a_stack_usage_file_that_is_garbage_says_nothing() -> None:
    assert kb.stack_bytes("a.cc:1:1:f\tmany\tstatic\n\ufffd\t\t\n") is None
    assert kb.stack_bytes("") is None


def test_an_output_that_can_not_be_written(
    peano: FakePeano, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "out"):
        assert kb.main(["--output", str(output)]) == 1
        assert f"can't make the folder {output}" in capsys.readouterr().err
    in_the_way = tmp_path / "out" / "gemv_bf16_bf16_elementwise_128x64.o"
    in_the_way.mkdir(parents=True)
    assert kb.main(["--output", str(tmp_path / "out"), "--only", "gemv_bf16_bf16"]) == 1
    assert f"can't write {in_the_way}" in capsys.readouterr().err


def test_folders_with_spaces(peano: FakePeano, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a $(place) 'of' spaces").symlink_to(peano.root)
    monkeypatch.setenv("PEANO_INSTALL_DIR", str(tmp_path / "a $(place) 'of' spaces"))
    output = tmp_path / "out put"
    assert kb.main(["--output", str(output), "--only", "gemv_bf16_bf16"]) == 0
    assert [path.name for path in output.iterdir()] == ["gemv_bf16_bf16_elementwise_128x64.o"]


def test_jobs_are_at_least_one(peano: FakePeano, capsys: pytest.CaptureFixture[str]) -> None:
    for jobs in ("0", "-2", "two"):
        with pytest.raises(SystemExit):
            kb.main(["--jobs", jobs])
        assert "--jobs" in capsys.readouterr().err
    assert not peano.log.exists()


def test_another_package_of_the_name_is_no_mlir_aie(
    peano: FakePeano, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site" / "aie" / "utils" / "config.py").write_text("answer = 42\n")
    assert kb.main([]) == 2
    (tmp_path / "site" / "aie" / "utils" / "config.py").unlink()
    assert kb.main([]) == 2
    assert capsys.readouterr().err.count("pip install mlir_aie") == 2


def test_runs_at_the_same_time_do_not_meet(peano: FakePeano, tmp_path: Path) -> None:
    tools = kb.find_toolchain()
    (tmp_path / "out").mkdir()
    configuration = kb.configurations()[0]
    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(lambda _: kb.build(tools, configuration, tmp_path / "out"), range(24)))
    assert sizes == [kb.Size(configuration.name, 4000, 96)] * 24
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{configuration.name}.o"]


def test_an_interrupt_ends_it_and_starts_no_more(peano: FakePeano, tmp_path: Path) -> None:
    """The first compiler interrupts the build, once: a second signal would hit the clean-up of the first."""
    script = f'while [ "$1" != -o ]; do shift; done; mkdir {tmp_path}/once && kill -INT $PPID; sleep 0.3'
    (peano.root / "bin" / "clang++").write_text(f"#!/bin/sh\necho >> {peano.log}\n{script}\n")
    # A shell ignores interrupts for what it runs in the background, and its children inherit that.
    listen = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run = "runpy.run_module('tilefuse.kernels_build', run_name='__main__', alter_sys=True)"
    environment = {**os.environ, "MLIR_AIE_DIR": str(tmp_path / "mlir")}
    command = [sys.executable, "-c", listen + run, "--output", str(tmp_path / "out"), "--jobs", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "tilefuse: interrupted"
    assert peano.log.read_text().count("\n") <= 4
    assert list((tmp_path / "out").iterdir()) == []


def test_without_the_host_build_one_sentence(
    peano: FakePeano, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tilefuse._emu", None)
    monkeypatch.delattr("tilefuse._emu")
    monkeypatch.delitem(sys.modules, "tilefuse.emulator.kernels")
    monkeypatch.delattr("tilefuse.emulator.kernels")
    assert kb.main([]) == 2
    assert "TILEFUSE_EMULATOR=ON" in capsys.readouterr().err
