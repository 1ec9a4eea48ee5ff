"""The doctor, on machines made up in a folder. Ids, paths and messages are those of the driver's and XRT's sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_machines import KERNEL, MODULES, PCI, PYXRT, RENDER, SECURE_BOOT, USERS, Machine, by_id, wrong

from tilefuse.doctor import Status, System, examine
from tilefuse.doctor.system import Node, Ran

OK, NOTE, MISSING, BROKEN = Status.OK, Status.NOTE, Status.MISSING, Status.BROKEN
NODE = "/dev/accel/accel0"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


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
    assert "xclbins: 1, instruction streams: 0" in found["artifacts"].found
    assert found["power"].found == "mode default, on mains"
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
