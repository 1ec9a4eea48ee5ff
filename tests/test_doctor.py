"""The doctor, on machines made up in a folder. Ids, paths and messages are those of the driver's and XRT's sources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_machines import KERNEL, MODULES, PCI, PYXRT, RENDER, SECURE_BOOT, USERS, Machine

from tilefuse import commands
from tilefuse.doctor import Finding, Report, Status, System, examine, show, userspace
from tilefuse.doctor.findings import redact
from tilefuse.doctor.system import Node, Ran, run_program

OK, NOTE, MISSING, BROKEN = Status.OK, Status.NOTE, Status.MISSING, Status.BROKEN
NODE = "/dev/accel/accel0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def by_id(report: Report) -> dict[str, Finding]:
    found = {finding.id: finding for finding in report.findings}
    assert len(found) == len(report.findings), "an id is used twice"
    return found


def wrong(report: Report) -> set[str]:
    return {finding.id for finding in report.findings if finding.status in (MISSING, BROKEN)}


def test_a_laptop_where_all_is_well(machine: Machine) -> None:
    report = examine(machine.system())
    found = by_id(report)
    assert report.usable, report
    assert {finding.id for finding in report.findings if finding.status is not OK} == {"power"}
    assert "NPU Strix (npu4), PCI 1022:17f0 rev 10" in found["npu"].found
    assert found["driver"].found == "amdxdna (of the kernel) drives the NPU"
    assert found["firmware"].found == "version 1.1.2.64 (protocol 7)"
    assert found["iommu"].found == "on, the NPU is in group 27 (iommu=pt)"
    assert found["xrt"].found == "2.21.75 in /usr/lib/x86_64-linux-gnu"
    assert found["xrt-plugin"].found == "2.21.75"
    assert found["device"].found == "opens as NPU Strix"
    assert "1 xclbins, 0 instruction streams" in found["artifacts"].found
    assert found["power"].found == "mode Default, on mains"
    assert "--pmode turbo" in found["power"].remedy
    assert report.verdict == "The NPU can be used."


def test_what_is_wrong_has_a_remedy_and_the_first_of_it_is_named(machine: Machine) -> None:
    machine.not_loaded()
    machine.without("/work", "/usr/lib/x86_64-linux-gnu", PYXRT)
    machine.says["pyxrt"] = Ran(0, '["absent", ""]')
    report = examine(machine.system(memlock=8 << 20))
    assert wrong(report) == {"driver", "node", "memlock", "xrt", "pyxrt", "artifacts"}
    assert all(finding.remedy for finding in report.findings if finding.id in wrong(report))
    assert "begin with: driver." in report.verdict


# --- hardware ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("revision", "name"), [("10", "npu4"), ("11", "npu5"), ("20", "npu6")])
def test_the_xdna2_npus(machine: Machine, revision: str, name: str) -> None:
    machine.pci("1022", "17f0", revision)
    found = by_id(examine(machine.system()))["npu"]
    assert found.status is OK
    assert f"({name})" in found.found


@pytest.mark.parametrize(
    ("device", "revision", "says"),
    [
        ("1502", "00", "npu1 (Phoenix, Hawk Point)"),
        ("17f0", "00", "a revision that the driver doesn't take"),
        ("17f1", "10", "a later generation"),
        ("1b0a", "00", "a later generation"),
    ],
)
def test_npus_that_are_not_supported(machine: Machine, device: str, revision: str, says: str) -> None:
    machine.pci("1022", device, revision)
    report = examine(machine.system())
    assert wrong(report) == {"npu"}
    assert says in by_id(report)["npu"].found
    assert "memlock" not in by_id(report)


def test_a_desktop_without_an_npu(machine: Machine) -> None:
    machine.without(PCI, "/work")
    machine.cpu("AMD Ryzen 9 7950X 16-Core Processor")
    machine.says["pyxrt"] = Ran(0, '["absent", ""]')
    report = examine(machine.system())
    assert wrong(report) == {"npu"}
    found = by_id(report)
    assert "device='cpu'" in found["npu"].remedy
    assert found["processor"].status is NOTE
    assert found["pyxrt"].remedy == ""
    assert found["artifacts"].remedy


def test_an_npu_that_the_bios_hides(machine: Machine) -> None:
    machine.without(PCI)
    found = by_id(examine(machine.system()))["npu"]
    assert found.status is MISSING
    assert "BIOS" in found.remedy


@pytest.mark.parametrize("option", ["amd_iommu=off", "iommu=off"])
def test_iommu_off(machine: Machine, option: str) -> None:
    machine.file("/proc/cmdline", f"root=/dev/sda1 {option} quiet")
    found = by_id(examine(machine.system()))["iommu"]
    assert found.status is BROKEN
    assert option in found.remedy


def test_iommu_off_in_the_bios(machine: Machine) -> None:
    machine.without(f"{PCI}/iommu_group", "/sys/kernel/iommu_groups")
    found = by_id(examine(machine.system()))["iommu"]
    assert (found.status, found.found) == (BROKEN, "off: there are no IOMMU groups")


@pytest.mark.parametrize(("platform", "name"), [("win32", "Windows"), ("darwin", "macOS"), ("freebsd14", "freebsd14")])
def test_other_systems(tmp_path: Path, platform: str, name: str) -> None:
    report = examine(System(root=tmp_path, platform=platform, run_program=lambda *_: Ran(None)))
    assert wrong(report) == {"system"}
    assert by_id(report)["system"].found == name


def test_wsl(machine: Machine) -> None:
    machine.kernel("6.6.87.2-microsoft-standard-WSL2")
    machine.without("/sys")
    report = examine(machine.system())
    assert wrong(report) == {"system"}
    assert "WSL" in by_id(report)["system"].found


# --- the driver -------------------------------------------------------------------------------------------------------


def without_module(machine: Machine) -> None:
    machine.not_loaded()
    machine.without(f"{MODULES}/kernel")
    machine.file(f"{MODULES}/modules.dep", "kernel/fs/fuse/fuse.ko.zst:\n")


def old_kernel(machine: Machine) -> None:
    without_module(machine)
    machine.kernel("6.8.0-60-generic")
    machine.file("/lib/modules/6.8.0-60-generic/modules.dep", "")


def dkms_module(machine: Machine) -> None:
    without_module(machine)
    machine.file(f"{MODULES}/modules.dep", "updates/dkms/amdxdna.ko.zst: kernel/drivers/gpu/sched.ko.zst\n")


def dkms_not_built(machine: Machine) -> None:
    without_module(machine)
    machine.file("/usr/src/xrt-amdxdna-2.21.75/dkms.conf", "")


def blacklisted(machine: Machine) -> None:
    machine.not_loaded()
    machine.file("/etc/modprobe.d/npu.conf", "# off\nblacklist amdxdna\n")


def disabled(machine: Machine) -> None:
    machine.not_loaded()
    machine.file("/etc/modprobe.d/npu.conf", "install amdxdna /bin/false\n")


def blacklisted_at_boot(machine: Machine) -> None:
    machine.not_loaded()
    machine.file("/proc/cmdline", "ro module_blacklist=nouveau,amdxdna")


@pytest.mark.parametrize(
    ("prepare", "status", "found", "remedy"),
    [
        (Machine.not_loaded, BROKEN, "(the kernel's own) is installed and not loaded", "`sudo modprobe amdxdna`"),
        (without_module, MISSING, f"kernel {KERNEL} was built without amdxdna", "amdxdna-dkms"),
        (
            old_kernel,
            MISSING,
            "kernel 6.8.0-60-generic has no amdxdna, and too old to build it for",
            "linux-generic-hwe",
        ),
        (dkms_module, BROKEN, "(updates/dkms/amdxdna.ko.zst) is installed and not loaded", "`sudo modprobe amdxdna`"),
        (
            dkms_not_built,
            BROKEN,
            f"DKMS has amdxdna 2.21.75, but no module of it for kernel {KERNEL}",
            "dkms autoinstall",
        ),
        (blacklisted, BROKEN, "`blacklist amdxdna` in /etc/modprobe.d/npu.conf", "remove that"),
        (disabled, BROKEN, "`install amdxdna /bin/false` in /etc/modprobe.d/npu.conf", "remove that"),
        (blacklisted_at_boot, BROKEN, "module_blacklist=nouveau,amdxdna on the kernel's command line", "remove that"),
    ],
)
def test_the_module_is_not_loaded(
    machine: Machine, prepare: Callable[[Machine], None], status: Status, found: str, remedy: str
) -> None:
    prepare(machine)
    report = examine(machine.system())
    finding = by_id(report)["driver"]
    assert finding.status is status
    assert found in finding.found
    assert remedy in finding.remedy
    assert wrong(report) == {"driver", "node"}


def test_dkms_blocked_by_secure_boot(machine: Machine) -> None:
    dkms_module(machine)
    machine.file(SECURE_BOOT, b"\x06\0\0\0\x01")
    machine.file("/var/lib/dkms/mok.pub", "")
    report = examine(machine.system())
    assert wrong(report) == {"driver", "secure-boot", "node"}
    assert "mokutil --import /var/lib/dkms/mok.pub" in by_id(report)["driver"].remedy


def test_secure_boot_with_the_kernels_own_driver(machine: Machine) -> None:
    machine.file(SECURE_BOOT, b"\x06\0\0\0\x01")
    report = examine(machine.system())
    assert report.usable
    assert by_id(report)["secure-boot"].found == "on"


def test_a_driver_of_dkms_in_place_of_the_kernels(machine: Machine) -> None:
    machine.file("/sys/module/amdxdna/taint", "OE\n")
    machine.file("/sys/module/amdxdna/version", "0.1\n")
    machine.file(f"{MODULES}/modules.dep", "updates/dkms/amdxdna.ko.zst:\n")
    machine.file("/usr/src/amdxdna-2.21.75/dkms.conf", "")
    report = examine(machine.system())
    assert report.usable
    assert "amdxdna (out of tree, DKMS 2.21.75, version 0.1)" in by_id(report)["driver"].found
    assert by_id(report)["driver-copies"].status is NOTE


def test_a_driver_built_into_the_kernel(machine: Machine) -> None:
    machine.without("/sys/module/amdxdna/initstate")
    assert "built into the kernel" in by_id(examine(machine.system()))["driver"].found


def test_another_driver_holds_the_npu(machine: Machine) -> None:
    machine.link(f"{PCI}/driver", "../../../../bus/pci/drivers/vfio-pci")
    machine.without(f"{PCI}/accel", f"{PCI}/fw_version")
    found = by_id(examine(machine.system()))["driver"]
    assert (found.status, found.found) == (BROKEN, "vfio-pci holds the NPU, not amdxdna")


# --- firmware ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "status", "says", "remedy"),
    [
        (
            "[drm] *ERROR* aie2_check_protocol: Incompatible firmware protocol major 6 minor 8",
            BROKEN,
            "too old: protocol 6.8, and the driver refuses it; 6.12 is the least",
            "update the package linux-firmware",
        ),
        (
            "[drm] *ERROR* aie2_check_protocol: Incompatible firmware protocol major 7 minor 2",
            BROKEN,
            "newer than the driver: protocol 7.2",
            "kernel of 7.0 or later",
        ),
        (
            "[drm] *ERROR* aie2_init: failed to request_firmware amdnpu/17f0_10/npu.sbin, ret -2",
            MISSING,
            "the driver found no amdnpu/17f0_10/npu.sbin",
            "install the package linux-firmware",
        ),
        (
            "[drm] *ERROR* aie2_hw_start: firmware is not alive",
            BROKEN,
            "driver and firmware don't match",
            "one source",
        ),
    ],
)
def test_firmware_that_the_driver_refuses(machine: Machine, log: str, status: Status, says: str, remedy: str) -> None:
    machine.unbound(log, "probe with driver amdxdna failed with error -22")
    report = examine(machine.system())
    assert wrong(report) == {"driver", "firmware", "node"}
    assert f"the kernel's log: amdxdna 0000:c6:00.1: {log}" in by_id(report)["driver"].found
    finding = by_id(report)["firmware"]
    assert finding.status is status
    assert says in finding.found
    assert remedy in finding.remedy


def test_new_firmware_under_an_old_driver_is_seen_without_the_log(machine: Machine) -> None:
    machine.unbound()
    machine.kernel("6.19.6-amd64")
    machine.file("/lib/modules/6.19.6-amd64/modules.dep", "kernel/drivers/accel/amdxdna/amdxdna.ko.xz:\n")
    machine.without("/lib/firmware/amdnpu/17f0_10/npu_7.sbin.zst")
    machine.firmware("17f0_10", "npu.sbin", "1.1.2.64")
    found = by_id(examine(machine.system()))["firmware"]
    assert found.status is BROKEN
    assert "17f0_10/npu.sbin.zst (1.1.2.64)" in found.found
    assert "the driver of kernel 6.19 knows 6" in found.found


def test_no_firmware(machine: Machine) -> None:
    machine.unbound()
    machine.without("/lib/firmware/amdnpu")
    found = by_id(examine(machine.system()))["firmware"]
    assert (found.status, found.found) == (MISSING, "no amdnpu/17f0_10/npu.sbin in /lib/firmware")


def test_krackan_takes_the_firmware_of_strix(machine: Machine) -> None:
    machine.pci("1022", "17f0", "20")
    machine.without(f"{PCI}/fw_version")
    assert "files: 17f0_10/npu_7.sbin.zst (1.1.2.64)" in by_id(examine(machine.system()))["firmware"].found


def test_firmware_of_protocol_6(machine: Machine) -> None:
    machine.file(f"{PCI}/fw_version", "1.0.0.63\n")
    found = by_id(examine(machine.system()))["firmware"]
    assert found.status is OK
    assert "6.12 or later" in found.found
    assert "6.15" in found.found


# --- the device node --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "owner", "says", "remedy"),
    [
        ("", Node(0, RENDER, 0o660), "the user is not in it", "sudo usermod -aG render $USER"),
        ("bob,ada", Node(0, RENDER, 0o660), "this session is older", "sg render -c"),
        ("ada", Node(0, 0, 0o600), "closed to users", "udev"),
        ("ada", Node(0, 0, 0o660), "closed to users", "udev"),
    ],
)
def test_no_rights_to_the_node(machine: Machine, members: str, owner: Node, says: str, remedy: str) -> None:
    machine.file("/etc/group", f"root:x:0:\nrender:x:{RENDER}:{members}\n")
    report = examine(machine.system(groups=frozenset({USERS}), owners={NODE: owner}))
    assert wrong(report) == {"permissions"}
    found = by_id(report)["permissions"]
    assert says in found.found
    assert remedy in found.remedy
    assert "device" not in by_id(report), "it was opened all the same"
    assert not any("open" in command[4:] for command in machine.ran)


def test_rights_by_other_ways_than_the_group(machine: Machine) -> None:
    system = machine.system(groups=frozenset({USERS}), owners={NODE: Node(0, 0, 0o666)})
    assert examine(system).usable


def test_a_container_without_the_node(machine: Machine) -> None:
    machine.file("/.dockerenv", "")
    machine.without("/dev", "/lib/modules", "/lib/firmware")
    report = examine(machine.system())
    assert wrong(report) == {"node"}
    assert "--device /dev/accel/accel0 --ulimit memlock=-1" in by_id(report)["node"].remedy
    assert by_id(report)["system"].status is NOTE


def test_a_container_with_the_node_and_without_the_group(machine: Machine) -> None:
    machine.file("/run/.containerenv", "")
    machine.file("/etc/group", "root:x:0:\n")
    found = by_id(examine(machine.system(groups=frozenset({0}))))["permissions"]
    assert found.status is BROKEN
    assert "--group-add 992" in found.remedy


def test_a_node_that_udev_did_not_make(machine: Machine) -> None:
    machine.without("/dev")
    found = by_id(examine(machine.system()))["node"]
    assert found.status is MISSING
    assert "udevadm" in found.remedy


@pytest.mark.parametrize(
    ("limit", "capabilities", "status"),
    [
        (8 << 20, "0000000000000000", BROKEN),
        ((64 << 20) - 1, "0000000000000000", BROKEN),
        (64 << 20, "0000000000000000", NOTE),
        (8 << 20, "0000000000004000", OK),
        (8 << 20, "000000ffffffbfff", BROKEN),
        (None, "0000000000000000", OK),
    ],
)
def test_memlock(machine: Machine, limit: int | None, capabilities: str, status: Status) -> None:
    """XRT's plugin locks a heap of 64 MiB; CAP_IPC_LOCK is bit 14."""
    machine.file("/proc/self/status", f"CapEff:\t{capabilities}\n")
    found = by_id(examine(machine.system(memlock=limit)))["memlock"]
    assert found.status is status
    assert bool(found.remedy) == (status is not OK)


def test_permission_denied_everywhere(machine: Machine) -> None:
    denied = ("/sys", "/proc", "/dev", "/etc", "/lib", "/usr", "/run", "/boot", "/var", "/opt")
    machine.says.clear()
    report = examine(machine.system(denied=denied))
    assert not report.usable
    assert "can't be seen" in by_id(report)["npu"].found
    assert "/sys/bus/pci/devices" in by_id(report)["forbidden"].found


@pytest.mark.parametrize("rubbish", [b"", b"\xff\xfe\0", b"0x\n", b"a:b\n" * 100])
def test_files_that_hold_something_else(machine: Machine, rubbish: bytes) -> None:
    paths = [
        "/proc/cpuinfo",
        "/proc/cmdline",
        "/proc/self/status",
        "/proc/sys/kernel/osrelease",
        "/etc/group",
        SECURE_BOOT,
    ]
    paths += [f"{PCI}/{name}" for name in ("vbnv", "fw_version")] + ["/sys/module/amdxdna/taint"]
    for path in paths:
        machine.file(path, rubbish)
    machine.says = {name: Ran(0, rubbish.decode(errors="replace")) for name in machine.says}
    assert by_id(examine(machine.system()))["npu"].status is OK
    machine.file(f"{PCI}/device", rubbish)
    assert by_id(examine(machine.system()))["npu"].status is MISSING


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
    found = list(userspace.pyxrt(System(environment={**os.environ, "PYTHONPATH": str(tmp_path)}), opens=True))
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
    folder = machine.root / "work" / "build" / "xclbins"
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
    machine.environment["TILEFUSE_XCLBINS"] = str(machine.root / "nowhere")
    found = by_id(examine(machine.system()))["artifacts"]
    assert found.status is MISSING
    assert "nowhere (TILEFUSE_XCLBINS)" in found.found


# --- the report -------------------------------------------------------------------------------------------------------


def test_json_tells_nothing_about_its_user(machine: Machine) -> None:
    private = "/home/ada/venv/lib/pyxrt.cpython-312-x86_64-linux-gnu.so"
    machine.says["pyxrt"] = Ran(
        0, json.dumps(["found", private]) + '\n["import failed", "ImportError: adas-laptop, ada"]'
    )
    machine.environment["TILEFUSE_XCLBINS"] = "/home/ada/xclbins"
    system = machine.system(groups=frozenset({USERS}), python="/home/ada/venv/bin/python")
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
    assert all(len(line) <= 110 for line in lines)
    assert any(line.startswith("broken   permissions") for line in lines)
    assert "-> `sudo usermod -aG render $USER`" in text
    assert lines[-1].startswith("The NPU can't be used; begin with: permissions.")


def test_exit_status_and_table(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert show.main(as_json=False, system=machine.system()) == 0
    assert "ok       npu" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert show.main(as_json=False, system=machine.system(memlock=1 << 20)) == 1
    table = capsys.readouterr().out
    assert "memlock" in table
    assert "begin with: memlock" in table


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
