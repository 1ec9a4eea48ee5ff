"""The doctor on XRT, pyxrt, toolchain and artifacts, and its report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_machines import PYXRT, RENDER, USERS, Machine, by_id, wrong

from tilefuse import commands
from tilefuse.doctor import Status, System, examine, show, userspace
from tilefuse.doctor.findings import redact
from tilefuse.doctor.system import Ran, run_program

OK, NOTE, MISSING, BROKEN = Status.OK, Status.NOTE, Status.MISSING, Status.BROKEN


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- XRT and pyxrt ----------------------------------------------------------------------------------------------------


def test_xrt_of_its_own_installer(machine: Machine) -> None:
    machine.without("/usr/lib/x86_64-linux-gnu", "/usr/bin/xrt-smi")
    for name in ("coreutil", "core", "driver_xdna"):
        machine.file(f"/opt/xilinx/xrt/lib/libxrt_{name}.so.2", "")
    machine.file("/opt/xilinx/xrt/version.json", '{"BUILD_VERSION": "2.26.0", "BUILD_BRANCH": "HEAD"}')
    machine.program("/opt/xilinx/xrt/bin/xrt-smi")
    found = by_id(examine(machine.system()))
    assert found["xrt"].found == "2.26.0 in /opt/xilinx/xrt/lib"
    assert found["xrt-smi"].found == "/opt/xilinx/xrt/bin/xrt-smi"


def test_xrt_without_its_plugin(machine: Machine) -> None:
    machine.without("/usr/lib/x86_64-linux-gnu/libxrt_driver_xdna.so.2")
    report = examine(machine.system())
    assert wrong(report) == {"xrt-plugin"}
    assert "libxrt-npu2" in by_id(report)["xrt-plugin"].remedy


def test_plugin_of_another_xrt(machine: Machine) -> None:
    folder = "/usr/lib/x86_64-linux-gnu"
    machine.file(f"{folder}/libxrt_driver_xdna.so.2.19.0", "")
    machine.link(f"{folder}/libxrt_driver_xdna.so.2", "libxrt_driver_xdna.so.2.19.0")
    found = by_id(examine(machine.system()))["xrt-plugin"]
    assert (found.status, found.found) == (NOTE, "the plugin is 2.19.0 and XRT 2.21.75")
    machine.without(f"{folder}/libxrt_driver_xdna.so.2")
    machine.file("/opt/xilinx/xrt/lib/libxrt_driver_xdna.so.2", "")
    assert by_id(examine(machine.system()))["xrt-plugin"].status is BROKEN


def test_pyxrt_for_another_python(machine: Machine) -> None:
    machine.says["pyxrt"] = Ran(0, '["absent", ""]\n')
    report = examine(machine.system(python_version=(3, 11), import_path=["/usr/lib/python3.11"]))
    assert wrong(report) == {"pyxrt"}
    found = by_id(report)["pyxrt"]
    assert found.found == f"{PYXRT} is for Python 3.12, and this is 3.11"
    assert "python3.12 -m venv" in found.remedy


def test_pyxrt_for_this_python_that_is_not_on_its_path(machine: Machine) -> None:
    machine.says["pyxrt"] = Ran(0, '["absent", ""]\n')
    machine.without(PYXRT)
    machine.file("/opt/xilinx/xrt/python/pyxrt.cpython-312-x86_64-linux-gnu.so", "")
    found = by_id(examine(machine.system()))["pyxrt"]
    assert found.status is MISSING
    assert "source /opt/xilinx/xrt/setup.sh" in found.remedy
    assert "PYTHONPATH=/opt/xilinx/xrt/python" in found.remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("libxrt_coreutil.so.2: cannot open shared object file: No such file or directory", "setup.sh"),
        ("/opt/conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found", "conda"),
        ("pyxrt.so: undefined symbol: _ZN3xrt6deviceC1Ej", "another XRT"),
    ],
)
def test_pyxrt_that_does_not_load(machine: Machine, error: str, remedy: str) -> None:
    lines = [["found", PYXRT], ["import failed", f"ImportError: {error}"]]
    machine.says["pyxrt"] = Ran(0, "\n".join(map(json.dumps, lines)))
    found = by_id(examine(machine.system()))["pyxrt"]
    assert found.status is BROKEN
    assert error in found.found
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("No such device with index '0'", "permissions"),
        ("DRM_IOCTL_AMDXDNA_CREATE_BO IOCTL failed (err=-22): Invalid argument", "iommu"),
        ("mmap failed: Resource temporarily unavailable", "memlock"),
        ("DRM_IOCTL_AMDXDNA_GET_ARRAY IOCTL failed (err=-95): Operation not supported", "newer than the driver"),
        ("something else", "xrt-smi examine"),
    ],
)
def test_the_device_does_not_open(machine: Machine, error: str, remedy: str) -> None:
    lines = [["found", PYXRT], ["imported", ""], ["open failed", f"RuntimeError: {error}"]]
    machine.says["pyxrt"] = Ran(0, "\n".join(map(json.dumps, lines)))
    report = examine(machine.system())
    assert wrong(report) == {"device"}
    assert remedy in by_id(report)["device"].remedy


FAKE_PYXRT = """
class device:
    def __init__(self, index): {opening}
    def get_info(self, key): return "NPU Strix"
class xrt_info_device: name = 0
xclbin = hw_context = kernel = bo = run = device
"""


@pytest.mark.parametrize(
    ("source", "says", "broken"),
    [
        (FAKE_PYXRT.format(opening="print('XRT says something of its own')"), "opens as NPU Strix", None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "`import pyxrt` crashes (SIGSEGV)", "pyxrt"),
        ("import os; os.abort()", "`import pyxrt` crashes (SIGABRT)", "pyxrt"),
        ("raise ImportError('undefined symbol: x')", "ImportError: undefined symbol: x", "pyxrt"),
        ("raise SystemExit(3)", "SystemExit: 3", "pyxrt"),
        ("class device: pass", "lacks xclbin, hw_context, kernel, bo, run", "pyxrt"),
        (FAKE_PYXRT.format(opening="import os; os.abort()"), "opening the NPU crashes (SIGABRT)", "device"),
        (FAKE_PYXRT.format(opening="raise RuntimeError('err=-22')"), "RuntimeError: err=-22", "device"),
    ],
)
def test_a_pyxrt_in_a_process_of_its_own(tmp_path: Path, source: str, says: str, broken: str | None) -> None:
    (tmp_path / "pyxrt.py").write_text(source)
    # An address sanitizer would turn the signal into a report and an exit.
    sanitizer = f"{os.environ.get('ASAN_OPTIONS', '')}:handle_segv=0"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "ASAN_OPTIONS": sanitizer}
    found = list(userspace.pyxrt(System(environment=environment), opens=True))
    assert says in found[-1].found
    assert {finding.id for finding in found if finding.status is not OK} == ({broken} if broken else set())


def test_a_pyxrt_that_hangs(tmp_path: Path) -> None:
    """Its children go with it."""
    (tmp_path / "pyxrt.py").write_text("import subprocess; subprocess.run(['sleep', '100'])")

    def impatient(command: list[str], environment: dict[str, str], timeout: float) -> Ran:
        return run_program(command, environment, 1.0)

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    system = System(environment=environment, run_program=impatient)  # type: ignore[arg-type]
    (found,) = userspace.pyxrt(system, opens=False)
    assert found.status is BROKEN
    assert "hangs" in found.found


# --- toolchain and artifacts ------------------------------------------------------------------------------------------


def test_no_toolchain_is_no_obstacle(machine: Machine) -> None:
    machine.says["tools"] = Ran(0, '["missing", "no Peano, the compiler (not installed): install it with `pip ...`"]')
    report = examine(machine.system())
    assert report.usable
    found = by_id(report)["toolchain"]
    assert found.status is NOTE
    assert found.remedy == "install it with `pip ...`"


def test_a_toolchain_that_crashes(machine: Machine) -> None:
    machine.says["tools"] = Ran(-11)
    report = examine(machine.system())
    assert report.usable
    assert "SIGSEGV" in by_id(report)["toolchain"].found


def test_artifacts(machine: Machine) -> None:
    folder = machine.root / "work" / "xclbins"
    (folder / "one.xclbin").write_bytes(b"xclbin3")
    found = by_id(examine(machine.system()))["artifacts"]
    assert found.status is BROKEN
    assert "not as they were built: one.xclbin" in found.found
    (folder / "one.xclbin").unlink()
    assert "missing in" in by_id(examine(machine.system()))["artifacts"].found
    (folder / "manifest.json").write_text('{"version": 99}')
    found = by_id(examine(machine.system()))["artifacts"]
    assert found.status is BROKEN
    assert "version 99" in found.found
    machine.environment["TILEFUSE_XCLBINS"] = "nowhere"
    found = by_id(examine(machine.system(artifacts=machine.root / "nowhere")))["artifacts"]
    assert found.status is MISSING
    assert "nowhere (TILEFUSE_XCLBINS)" in found.found


def test_the_folder_of_artifacts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEFUSE_XCLBINS", "some/where")
    assert System().artifacts == Path("some/where")
    monkeypatch.delenv("TILEFUSE_XCLBINS")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build" / "xclbins").mkdir(parents=True)
    (tmp_path / "build" / "xclbins" / "manifest.json").touch()
    assert System().artifacts == tmp_path / "build" / "xclbins"


# --- the report -------------------------------------------------------------------------------------------------------


def test_json_tells_nothing_about_its_user(machine: Machine) -> None:
    private = "/home/ada/venv/lib/pyxrt.cpython-312-x86_64-linux-gnu.so"
    machine.says["pyxrt"] = Ran(
        0, json.dumps(["found", private]) + '\n["import failed", "ImportError: adas-laptop, ada"]'
    )
    system = machine.system(
        groups=frozenset({USERS}), python="/home/ada/venv/bin/python", artifacts=Path("/home/ada/xclbins")
    )
    report = examine(system)
    assert "ada" in str(report)
    text = json.dumps(report.to_json(system.secrets))
    assert "ada" not in text
    assert "~/venv/lib/pyxrt" in text
    document = json.loads(text)
    assert document["usable"] is False
    assert {"id", "status", "found", "remedy"} == set(document["findings"][0])
    assert {finding["status"] for finding in document["findings"]} <= {"ok", "note", "missing", "broken"}


def test_redact() -> None:
    secrets = ["/srv/people/eve", "eve", "box-7"]
    assert redact("/srv/people/eve/x, /home/bob/y (eve@box-7)", secrets) == "~/x, ~/y (...@...)"
    assert redact("/root/a /Users/c/d eve-n evening /sys/root", secrets) == "~/a ~/d eve-n evening /sys/root"
    assert redact("/usr/lib/x", ["", "", ""]) == "/usr/lib/x"
    assert redact("/usr/lib/x", ["/", ""]) == "/usr/lib/x"


def test_plain_lines(machine: Machine) -> None:
    machine.file("/etc/group", f"render:x:{RENDER}:\n")
    text = show.plain(examine(machine.system(groups=frozenset({USERS}))))
    lines = text.splitlines()
    (place,) = (i for i, line in enumerate(lines) if line.startswith("broken   permissions   "))
    # In one line, whatever its length: a command that is broken in two can't be copied.
    assert lines[place + 1].split(None, 1)[1] == "`sudo usermod -aG render $USER`, then log out and in"
    assert lines[-1].startswith("The NPU can't be used; begin with: permissions.")


def test_exit_status_and_table(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert show.main(as_json=False, system=machine.system()) == 0
    assert "ok       npu" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert show.main(as_json=False, system=machine.system(memlock=1 << 20)) == 1
    table = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "begin with: memlock" in table
    assert (
        "memlock: `printf '@render - memlock unlimited\\n' | sudo tee /etc/security/limits.d/99-amdxdna.conf`;" in table
    )


def test_the_command_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = commands.run(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == (0 if document["usable"] else 1)


def test_without_the_command_lines_packages(tmp_path: Path) -> None:
    """`tilefuse doctor` and `python -m tilefuse.doctor` run without rich and typer, and load nothing that may crash."""
    for name in ("rich", "typer"):
        (tmp_path / f"{name}.py").write_text("raise ImportError(name=__name__)")
    (tmp_path / "pyxrt.py").write_text("import os; os.abort()")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    for command in (["-m", "tilefuse.doctor"], ["-m", "tilefuse.cli", "doctor"]):
        ran = subprocess.run([sys.executable, *command, "--json"], env=environment, capture_output=True, text=True)
        assert ran.returncode in (0, 1), ran.stderr
        assert ran.stderr == ""
        assert json.loads(ran.stdout)["findings"]
