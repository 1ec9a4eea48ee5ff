"""Machines made up in a folder, for the doctor: /sys, /proc, /dev, /lib, /etc, and what programs say."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilefuse import manifest, plan
from tilefuse.doctor import Finding, Report, Status
from tilefuse.doctor.system import Node, Ran, System
from tilefuse.doctor.userspace import PROBE, TOOLS_PROBE
from tilefuse.files import sha256
from tilefuse.layout import Layout

ADDRESS = "0000:c6:00.1"
PCI = f"/sys/bus/pci/devices/{ADDRESS}"
KERNEL = "7.0.0-14-generic"
MODULES = f"/lib/modules/{KERNEL}"
PYXRT = "/usr/lib/python3/dist-packages/pyxrt.cpython-312-x86_64-linux-gnu.so"
RENDER, USERS = 992, 1000
SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

TOOLS = '["found", {"mlir_aie": "1.4.0", "llvm_aie": "21.0.0", "xclbinutil": "2.21.75"}]'
GOOD_PYXRT = f'["found", "{PYXRT}"]\n["imported", ""]\n["opened", "NPU Strix"]\n'
PLATFORM = "Platform\n  Name                   : NPU Strix \n  Power Mode             : default \n"


@dataclass
class FakeSystem(System):
    """A machine under a folder. Owners and rights are told apart from the files': tests may run as anyone."""

    owners: dict[str, Node] = field(default_factory=dict)
    denied: tuple[str, ...] = ()

    def path(self, path: str | Path) -> Path:
        if str(path).startswith(self.denied):
            raise PermissionError(13, "Permission denied", str(path))
        return super().path(path)

    def exists(self, path: str | Path) -> bool:
        return not str(path).startswith(self.denied) and super().exists(path)

    def node(self, path: str | Path) -> Node | None:
        return self.owners.get(str(path)) if self.exists(path) else None

    def may_use(self, path: str | Path) -> bool:
        owner = self.node(path)
        if owner is None:
            return False
        mode = owner.mode >> (6 if owner.uid == self.uid else 3 if owner.gid in self.groups else 0)
        return mode & 6 == 6


class Machine:
    """Builds one, piece by piece; as it starts: a Strix laptop with Ubuntu where all is well."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.says: dict[str, Ran] = {
            "pyxrt": Ran(0, GOOD_PYXRT),
            "tools": Ran(0, TOOLS),
            "xrt-smi": Ran(0, PLATFORM),
            "dmesg": Ran(1, stderr="dmesg: read kernel buffer failed: Operation not permitted"),
        }
        self.ran: list[list[str]] = []
        self.environment = {"PATH": "/usr/bin:/bin", "HOME": "/home/ada"}
        self.cpu("AMD Ryzen AI 9 HX 370 w/ Radeon 890M")
        self.kernel(KERNEL)
        self.file("/proc/cmdline", "BOOT_IMAGE=/vmlinuz root=UUID=1 ro quiet iommu=pt")
        self.file("/proc/self/status", "Name:\tpython\nCapEff:\t0000000000000000\n")
        self.file("/proc/1/cgroup", "0::/init.scope\n")
        self.pci("1022", "17f0", "10")
        self.file(
            f"{MODULES}/modules.dep", "kernel/drivers/accel/amdxdna/amdxdna.ko.zst: kernel/drivers/gpu/sched.ko.zst\n"
        )
        self.file(f"{MODULES}/kernel/drivers/accel/amdxdna/amdxdna.ko.zst", "")
        self.file("/sys/module/amdxdna/initstate", "live\n")
        self.file("/sys/module/amdxdna/taint", "\n")
        self.link(f"{PCI}/driver", "../../../../bus/pci/drivers/amdxdna")
        self.file(f"{PCI}/vbnv", "NPU Strix\n")
        self.file(f"{PCI}/fw_version", "1.1.2.64\n")
        self.firmware("17f0_10", "npu_7.sbin", "1.1.2.64")
        self.file(f"{PCI}/accel/accel0/dev", "261:0\n")
        self.file("/dev/accel/accel0", "")
        self.file("/etc/group", f"root:x:0:\nrender:x:{RENDER}:ada\nusers:x:{USERS}:\n")
        self.file(SECURE_BOOT, b"\x06\0\0\0\0")
        self.file("/usr/lib/x86_64-linux-gnu/libxrt_coreutil.so.2.21.75", "")
        for name in ("coreutil", "core", "driver_xdna"):
            self.file(f"/usr/lib/x86_64-linux-gnu/libxrt_{name}.so.2.21.75", "")
            self.link(f"/usr/lib/x86_64-linux-gnu/libxrt_{name}.so.2", f"libxrt_{name}.so.2.21.75")
        self.program("/usr/bin/xrt-smi")
        self.file(PYXRT, "")
        self.file("/sys/class/power_supply/AC/online", "1\n")
        self.artifacts()

    def file(self, path: str, content: str | bytes) -> None:
        """Writes a file."""
        there = self.root / path[1:]
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(content if isinstance(content, bytes) else content.encode())

    def link(self, path: str, target: str) -> None:
        """Makes a symbolic link; what it points to need not be there."""
        there = self.root / path[1:]
        there.parent.mkdir(parents=True, exist_ok=True)
        there.unlink(missing_ok=True)
        there.symlink_to(target)

    def program(self, path: str) -> None:
        """Something that may be executed; what it says is in `says`."""
        self.file(path, "")
        (self.root / path[1:]).chmod(0o755)

    def without(self, *paths: str) -> None:
        """Removes files, links or whole folders."""
        for path in paths:
            there = self.root / path[1:]
            if there.is_dir() and not there.is_symlink():
                for folder, folders, files in os.walk(there, topdown=False):
                    for name in files:
                        os.unlink(f"{folder}/{name}")
                    for name in folders:
                        entry = f"{folder}/{name}"
                        os.unlink(entry) if os.path.islink(entry) else os.rmdir(entry)
                there.rmdir()
            else:
                there.unlink(missing_ok=True)

    def cpu(self, name: str) -> None:
        """The processor."""
        self.file(
            "/proc/cpuinfo", f"processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: {name}\n\nprocessor\t: 1\n"
        )

    def kernel(self, release: str) -> None:
        """The running kernel."""
        self.file("/proc/sys/kernel/osrelease", f"{release}\n")

    def pci(self, vendor: str, device: str, revision: str) -> None:
        """The NPU's ids; there are a bridge and another vendor's accelerator beside it."""
        for name, value in (("vendor", vendor), ("device", device), ("revision", revision)):
            self.file(f"{PCI}/{name}", f"0x{value}\n")
        self.link(f"{PCI}/iommu_group", "../../../../kernel/iommu_groups/27")
        self.file("/sys/kernel/iommu_groups/27/type", "DMA-FQ\n")
        for address, other in (("0000:00:00.0", "0x1022"), ("0000:00:0b.0", "0x8086")):
            for name, value in (("vendor", other), ("device", "0x1507"), ("revision", "0x10")):
                self.file(f"/sys/bus/pci/devices/{address}/{name}", f"{value}\n")

    def firmware(self, folder: str, name: str, version: str) -> None:
        """Firmware as linux-firmware installs it: compressed, with a link that tells the version."""
        self.file(f"/lib/firmware/amdnpu/{folder}/npu.sbin.{version}.zst", "")
        self.link(f"/lib/firmware/amdnpu/{folder}/{name}.zst", f"npu.sbin.{version}.zst")

    def artifacts(self) -> None:
        """A folder with one xclbin and no stream."""
        configuration = plan.gemm(Layout(512, 512, 4, 128), 64).configuration
        folder = self.root / "work" / "xclbins"
        folder.mkdir(parents=True)
        (folder / "one.xclbin").write_bytes(b"xclbin2")
        provenance = manifest.Provenance({"mlir_aie": "1.4.0"}, {"gemm.py": "00"})
        artifact = manifest.Artifact("one.xclbin", sha256(b"xclbin2"), "00", provenance.digest)
        built = {configuration.name: manifest.Built(configuration, "MLIR_AIE", artifact)}
        manifest.write(folder, manifest.Manifest(built, {provenance.digest: provenance}))

    def unbound(self, *log: str) -> None:
        """The module is loaded and didn't take the device; the kernel's log says ``log``, if it may be read."""
        self.without(f"{PCI}/driver", f"{PCI}/vbnv", f"{PCI}/fw_version", f"{PCI}/accel", "/dev/accel")
        if log:
            lines = [
                "[    0.1] usb 1-1: new device",
                *(f"[   12.{i}] amdxdna {ADDRESS}: {line}" for i, line in enumerate(log)),
            ]
            self.says["dmesg"] = Ran(0, "\n".join(lines))

    def not_loaded(self) -> None:
        """The module isn't loaded."""
        self.unbound()
        self.without("/sys/module/amdxdna")

    def system(self, **changes: object) -> FakeSystem:
        """The machine, seen by its user, who is in the group render."""
        values: dict[str, object] = {
            "root": self.root,
            "platform": "linux",
            "architecture": "x86_64",
            "environment": self.environment,
            "run_program": self._run,
            "user": "ada",
            "uid": 1000,
            "groups": frozenset({USERS, RENDER}),
            "memlock": None,
            "python": "/usr/bin/python3.12",
            "python_version": (3, 12),
            "import_path": ["/usr/lib/python3/dist-packages"],
            "artifacts": self.root / "work" / "xclbins",
            "host": "adas-laptop",
            "owners": {"/dev/accel/accel0": Node(0, RENDER, 0o660)},
        }
        return FakeSystem(**{**values, **changes})  # type: ignore[arg-type]

    def _run(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Ran:
        self.ran.append(list(command))
        name = {PROBE: "pyxrt", TOOLS_PROBE: "tools"}.get(command[3] if len(command) > 3 else "", Path(command[0]).name)
        return self.says.get(name, Ran(None, stderr=f"no {name}"))


def by_id(report: Report) -> dict[str, Finding]:
    """The findings; no two have the same id."""
    found = {finding.id: finding for finding in report.findings}
    assert len(found) == len(report.findings), "an id is used twice"
    return found


def wrong(report: Report) -> set[str]:
    """Ids of what keeps the NPU from being used."""
    return {finding.id for finding in report.findings if finding.status in (Status.MISSING, Status.BROKEN)}
