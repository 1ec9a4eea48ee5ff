"""What the writer of a first design reads: the page's example as it stands, and what its likely slips are told."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilefuse
from tilefuse.emulator import iron
from tilefuse.emulator.iron import PythonKernel
from tilefuse.errors import DataflowError, DeadlockError, DeviceError, DtypeError
from tilefuse.runtime.npu import open_emulator
from tilefuse.testing import assert_gemm_close

PAGE = Path(__file__).parents[1] / "docs" / "emulated-array.md"


def example() -> str:
    """The first block of code of docs/emulated-array.md."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def names(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the example leaves behind."""
    left: dict[str, Any] = {}
    exec(compile(example(), str(PAGE), "exec"), left)
    return left


def changed(old: str, new: str) -> Callable[[], None]:
    """The example with one thing wrong, to be run."""
    code = example()
    assert code.count(old) == 1
    return lambda: exec(compile(code.replace(old, new), str(PAGE), "exec"), {})


def test_the_example_runs_as_written(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    np.testing.assert_array_equal(names["z"], np.arange(4096) + 7)
    report = names["report"]
    # 4096 elements in objects of 256 over two cores, 40 cycles a call.
    assert [core.calls for core in report.cores] == [{"add_i32": 8}] * 2
    assert [core.kernel for core in report.cores] == [320, 320]
    assert (report.dram_read, report.dram_written) == (2 * 4096 * 4, 4096 * 4)
    assert str(report).endswith("not counted: scalar code of workers beside locks and calls")


def test_the_readme_s_examples_run_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    use, *others = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    emulated = [code for code in others if "from_pretrained" not in code]
    left: dict[str, Any] = {"np": np, "tf": tilefuse}
    # The first part takes a checkpoint.
    exec(use[use.index("w = np.random") :], left)
    for code in emulated[:2]:
        exec(code, left)
    assert left["y"].shape == (300, 128)
    assert_gemm_close(left["y"], left["x"], left["mine"], array=True)
    out = capsys.readouterr().out
    assert "gemm of 300 x 256 by 256 x 128" in out
    assert "modelled: " in out


def test_the_namespace_has_what_the_page_lists() -> None:
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| there |"))
    listed = re.findall(r"`(\w+)(?:\(\w*\))?`", row)
    assert {"ObjectFifo", "TaskGroup", "range_", "device"} < set(listed)
    assert [name for name in listed if name not in ("NPU2", "NPU2ColN")] == [
        name for name in listed if hasattr(iron, name)
    ]
    missing = ("if_", "yield_", "jit", "ExternalFunction", "kernels", "Lock", "Flow", "TileDma", "ScratchpadParameter")
    assert not any(hasattr(iron, name) for name in missing)


def test_arrays_of_the_host_are_checked_by_bytes(names: dict[str, Any]) -> None:
    z = np.zeros(8192, np.int16)
    names["configuration"].run(names["program"], names["x"], names["y"].view(np.float32), z)
    np.testing.assert_array_equal(z.view(np.int32), names["z"])


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            "iron.PythonKernel(add, cycles=40, writes=(2,))",
            "add",
            DeviceError,
            r"kernels\['add_i32'\] is a function: wrap it, PythonKernel\(f, cycles, writes=\(2,\)\)",
        ),
        (
            ", writes=(2,)",
            "",
            DataflowError,
            r"add_i32 reads an object of fifo 'c0' \(argument 2\) before anything wrote it; if it writes it, name it: "
            r"PythonKernel\(..., writes=\(2,\)\)",
        ),
        (
            "iron.load(program, kernels)",
            "iron.load(program)",
            DeviceError,
            r"no kernel has a function 'add_i32' in this build.*or pass load\(program, kernels=\{'add_i32': Py",
        ),
        (
            "in (a, b, c):",
            "in (a, c):",
            DataflowError,
            r"fill 0 of fifo 'b0' is freed too early: .*\. If it can't end: core \(0, 2\) holds 1 of 'b0' and has not "
            "released it$",
        ),
        (
            "iron.Runtime(sequence, [whole, whole, whole, *ends])",
            "iron.Runtime()",
            DtypeError,
            r"Runtime\(\): IRON 1.4 takes the sequence as a function: Runtime\(function, arguments\)",
        ),
        (
            "iron.Runtime(sequence, [whole, whole, whole, *ends])",
            "iron.Runtime([whole, whole, whole, *ends])",
            TypeError,
            "IRON 1.4 takes the sequence as a function",
        ),
        (", tile=iron.Tile(i, 2)", "", DeviceError, "worker 'core' is not pinned to a core; pass tile="),
    ],
)
def test_slips(old: str, new: str, error: type[Exception], message: str) -> None:
    run = changed(old, new)
    with pytest.raises(error, match=message):
        run()


def test_without_the_emulator_the_device_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilefuse.emulator.artifacts", None)
    with pytest.raises(
        DeviceError, match=r"needs the array emulator.*pip install greenlet, and build tilefuse with -C"
    ):
        open_emulator()


def test_a_deadlock_says_what_a_worker_holds_of_other_fifos() -> None:
    """b is never released, and the sequence waits for its fill: the core has all that it asks for, and holds that."""
    code = example().replace("in (a, b, c):", "in (a, c):").replace("b[i].fill(y, ", "b[i].fill(y, wait=True, ")
    with pytest.raises(DeadlockError) as raised:
        exec(compile(code, str(PAGE), "exec"), {})
    assert re.search(
        r"worker 'core' on core \(0, 2\) waits for 1 object of fifo 'a0': 0 of 2 filled, 2 free in core \(0, 2\); "
        r"it holds 1 of 'b0' \(at its first wait\)",
        str(raised.value),
    )


def test_who_holds_is_found_behind_a_memory_tile() -> None:
    """The fifo that the host fills ends in the memory tile; the core holds one of those that it is forwarded to."""
    words = np.ndarray[(64,), np.dtype[np.int32]]
    a, c = iron.ObjectFifo(words, name="a"), iron.ObjectFifo(words, name="c")
    a_core = a.cons().forward(tile=iron.Tile(0, 1), name="a_core")

    def core(a: Any, c: Any, copy: Any) -> None:
        copy(a.acquire(1), c.acquire(1))
        c.release(1)

    def sequence(x: Any, z: Any, a: Any, c: Any) -> None:
        group = iron.TaskGroup()
        a.fill(x, group=group)
        c.drain(z, wait=True, group=group)
        group.finish()

    copy = iron.Kernel("copy", "copy.o", [words, words])
    worker = iron.Worker(core, [a_core.cons(), c.prod(), copy], tile=iron.Tile(0, 2))
    whole = np.ndarray[(1024,), np.dtype[np.int32]]
    ends = [a.prod(tile=iron.Tile(0, 0)), c.cons(tile=iron.Tile(0, 0))]
    program = iron.Program(iron.device(1), iron.Runtime(sequence, [whole, whole, *ends]), [worker])
    kernels = {"copy": PythonKernel(lambda source, target: target.__setitem__(slice(None), source), 10, writes=(1,))}
    with pytest.raises(DataflowError, match=r"fill 0 of fifo 'a' is freed.*core \(0, 2\) holds 1 of 'a_core' and has"):
        iron.load(program, kernels).run(program, np.zeros(1024, np.int32), np.zeros(1024, np.int32))
