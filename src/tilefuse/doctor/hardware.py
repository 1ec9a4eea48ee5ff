"""The machine, its NPU, and what stands between them: /sys/bus/pci, the IOMMU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tilefuse.doctor.findings import Finding, Status
from tilefuse.doctor.system import System

PCI = "/sys/bus/pci/devices"

AMD = 0x1022

# (device, revision) of what the driver amdxdna takes: its table amdxdna_ids. The names are those of mlir-aie's list of
# models; the driver itself may know better (its attribute vbnv), as for Gorgon Point.
XDNA2 = {
    (0x17F0, 0x10): ("npu4", "Strix Point"),
    (0x17F0, 0x11): ("npu5", "Strix Halo"),
    (0x17F0, 0x20): ("npu6", "Krackan Point"),
}
XDNA1 = 0x1502
LATER = frozenset({0x17F1, 0x17F2, 0x17F3, 0x1B0A, 0x1B0B, 0x1B0C})

WITHOUT = "device='cpu' runs everything, and device='emulator' the NPU's designs, on any machine"


@dataclass(frozen=True)
class Npu:
    """A PCI function that the driver amdxdna is for."""

    address: str
    device: int
    revision: int

    @property
    def kind(self) -> tuple[str, str] | None:
        """Names of an XDNA2 NPU, as the driver's sources and as shops have it."""
        return XDNA2.get((self.device, self.revision))

    @property
    def folder(self) -> str:
        """Where it is in sysfs."""
        return f"{PCI}/{self.address}"

    @property
    def id(self) -> str:
        """As in "17f0 rev 10", and as firmware folders are named."""
        return f"{self.device:04x} rev {self.revision:02x}"


def find_npus(system: System) -> list[Npu] | None:
    """AMD's NPUs of any generation, XDNA2 first; None where it can't be known."""
    names = system.names(PCI)
    if names is None:
        return None
    found = []
    for name in names:
        vendor, device = _number(system, name, "vendor"), _number(system, name, "device")
        if vendor == AMD and device is not None and (device in LATER or device in (XDNA1, 0x17F0)):
            found.append(Npu(name, device, _number(system, name, "revision") or 0))
    return sorted(found, key=lambda npu: npu.kind is None)


def usable_npu(system: System) -> Npu | None:
    """The NPU that tilefuse would run on."""
    npus = find_npus(system)
    return npus[0] if npus and npus[0].kind else None


def machine(system: System) -> Iterator[Finding]:
    """Operating system, kernel, container."""
    if not system.platform.startswith("linux"):
        name = {"win32": "Windows", "darwin": "macOS"}.get(system.platform, system.platform)
        yield Finding("system", Status.MISSING, name, f"tilefuse drives the NPU on Linux only; {WITHOUT}")
        return
    what = f"Linux {system.kernel or '(unknown release)'}, {system.architecture}"
    if system.is_wsl:
        yield Finding(
            "system",
            Status.MISSING,
            f"{what}, under Windows (WSL)",
            f"Windows doesn't pass the NPU on to WSL: boot Linux itself; {WITHOUT}",
        )
    elif system.container:
        yield Finding(
            "system", Status.NOTE, f"{what}, in a container ({system.container}): driver and firmware are the host's"
        )
    else:
        yield Finding("system", Status.OK, what)


def processor(system: System) -> Iterator[Finding]:
    """The CPU's name. What counts is the PCI device; the name says whether there should be one."""
    name = _cpu(system)
    if not name:
        yield Finding("processor", Status.NOTE, "unknown: /proc/cpuinfo says no model name")
    elif _has_npu_by_name(name):
        yield Finding("processor", Status.OK, f"{name}: of the series with an XDNA2 NPU")
    else:
        yield Finding(
            "processor", Status.NOTE, f"{name}: by its name not one with an XDNA2 NPU (Ryzen AI 300 and later)"
        )


def npu(system: System) -> Iterator[Finding]:
    """The NPU's PCI function."""
    npus = find_npus(system)
    if npus is None:
        yield Finding(
            "npu",
            Status.MISSING,
            f"can't be seen: {PCI} can't be read here",
            "run this where /sys is mounted and readable",
        )
        return
    if not npus:
        yield _no_npu(system)
        return
    first = npus[0]
    if first.kind:
        said = system.read(f"{first.folder}/vbnv")
        code, name = first.kind
        yield Finding("npu", Status.OK, f"{said or name} ({code}), PCI 1022:{first.id} at {first.address}")
    elif first.device == XDNA1:
        yield Finding(
            "npu",
            Status.BROKEN,
            f"npu1 (Phoenix, Hawk Point), PCI 1022:{first.id} at {first.address}: first-generation XDNA",
            f"tilefuse's kernels are for XDNA2 (Ryzen AI 300 and later), another instruction set; {WITHOUT}",
        )
    elif first.device == 0x17F0:
        yield Finding(
            "npu",
            Status.BROKEN,
            f"an XDNA2 NPU of a revision that the driver doesn't take, PCI 1022:{first.id} at {first.address}",
            f"known are {', '.join(f'rev {revision:02x} ({names[0]})' for (_, revision), names in XDNA2.items())}",
        )
    else:
        yield Finding(
            "npu",
            Status.BROKEN,
            f"a later generation than XDNA2, PCI 1022:{first.id} at {first.address}",
            f"tilefuse's kernels are for XDNA2 only; {WITHOUT}",
        )


def iommu(system: System, device: Npu) -> Iterator[Finding]:
    """The NPU reaches a process's memory through the IOMMU, with the process's own page tables."""
    options = (system.read("/proc/cmdline") or "").split()
    off = [option for option in options if option in ("amd_iommu=off", "iommu=off")]
    group = system.link(f"{device.folder}/iommu_group")
    modes = [option for option in options if option.startswith(("iommu=", "amd_iommu="))]
    if off:
        yield Finding(
            "iommu",
            Status.BROKEN,
            f"off by the kernel's command line: {' '.join(off)}",
            f"remove {' '.join(off)} from the boot loader's options (iommu=pt may stay) and reboot",
        )
    elif group:
        said = f" ({' '.join(modes)})" if modes else ""
        yield Finding("iommu", Status.OK, f"on, the NPU is in group {group.rpartition('/')[2]}{said}")
    else:
        any_group = bool(system.names("/sys/kernel/iommu_groups"))
        yield Finding(
            "iommu",
            Status.BROKEN,
            "on, but the NPU is in no group" if any_group else "off: there are no IOMMU groups",
            "enable IOMMU (and SVM, where there is such an option) in the BIOS set-up, or update the BIOS",
        )


def _no_npu(system: System) -> Finding:
    if _has_npu_by_name(_cpu(system)):
        return Finding(
            "npu",
            Status.MISSING,
            "no NPU on the PCI bus, though the processor should have one",
            "enable the NPU (or IPU) in the BIOS set-up, update the BIOS; a virtual machine needs it passed through",
        )
    return Finding("npu", Status.MISSING, "no AMD NPU on the PCI bus", f"this machine has none; {WITHOUT}")


def _cpu(system: System) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", system.read("/proc/cpuinfo") or "", re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def _has_npu_by_name(name: str) -> bool:
    """Ryzen AI 9 HX 370, Ryzen AI Max+ 395, Ryzen AI 7 350, ...: all of that name have XDNA2; Ryzen 7040, 8040 XDNA."""
    return re.search(r"\bRyzen AI\b", name) is not None


def _number(system: System, device: str, attribute: str) -> int | None:
    try:
        return int(system.read(f"{PCI}/{device}/{attribute}") or "", 16)
    except ValueError:
        return None
