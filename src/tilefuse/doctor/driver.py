"""The kernel's side: the module amdxdna, Secure Boot, the firmware."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tilefuse.doctor.findings import Finding, Status
from tilefuse.doctor.hardware import Npu
from tilefuse.doctor.system import System

MODULE = "amdxdna"
IN_TREE = (6, 14)
"""The first kernel that has the driver."""
OUT_OF_TREE = (6, 10)
"""The first kernel that the driver's own sources build for."""
PROTOCOL_7 = (7, 0)
"""The first kernel whose driver takes firmware of protocol 7 beside 6."""
MIN_PROTOCOL = (6, 12)
"""The oldest protocol of XDNA2's firmware that the driver takes."""
CHAINS_PROTOCOL = (6, 15)
"""The oldest with which the driver hands the firmware a list of runs in one command."""

# What the driver asks for, in its order; older drivers ask for npu.sbin alone.
FIRMWARE = ("npu.dev.sbin", "npu_7.sbin", "npu.sbin")
FIRMWARE_FOLDERS = ("/lib/firmware/updates", "/lib/firmware", "/usr/lib/firmware/updates", "/usr/lib/firmware")

SECURE_BOOT = "/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

DKMS_PACKAGE = "`sudo add-apt-repository ppa:amd-team/xrt && sudo apt install amdxdna-dkms` on Ubuntu"
NEWER_KERNEL = (
    "install a kernel of 6.14 or later, which has it (Ubuntu 24.04: `sudo apt install --install-recommends "
    f"linux-generic-hwe-24.04`), or the driver as a module of its own ({DKMS_PACKAGE})"
)
LOG = f"`sudo dmesg | grep {MODULE}` says why"
FIRMWARE_PACKAGE = "the package linux-firmware (linux-firmware-amdnpu and the like on some distributions)"


@dataclass(frozen=True)
class Files:
    """What there is of the module for the running kernel."""

    in_tree: bool
    out_of_tree: str | None
    """Path under /lib/modules/<release>."""
    dkms: str | None
    """Version that DKMS has the sources of."""
    known: bool
    """Whether the kernel's modules could be looked at: containers don't have them."""


def driver(system: System, npu: Npu) -> Iterator[Finding]:
    """Whether amdxdna drives the NPU, and if not, why."""
    files = module_files(system)
    bound = (system.link(f"{npu.folder}/driver") or "").rpartition("/")[2]
    loaded = system.exists(f"/sys/module/{MODULE}")
    if bound == MODULE:
        yield Finding("driver", Status.OK, f"{MODULE} {_which(system, files)} drives the NPU")
        if files.in_tree and files.out_of_tree:
            yield Finding(
                "driver-copies",
                Status.NOTE,
                f"the kernel has its own {MODULE}, and {files.out_of_tree} takes its place",
                "if firmware and driver don't match after an update, remove the DKMS package: the kernel's is enough",
            )
    elif bound:
        yield Finding(
            "driver",
            Status.BROKEN,
            f"{bound} holds the NPU, not {MODULE}",
            f"the NPU is set aside for a virtual machine or the like: undo that, then `sudo modprobe {MODULE}`",
        )
    elif loaded:
        yield _not_driving(system)
    else:
        yield _not_loaded(system, files)


def secure_boot(system: System) -> Iterator[Finding]:
    """Secure Boot lets in signed modules only: the kernel's own, and DKMS's if the key is enrolled."""
    state = _secure_boot(system)
    if state is None:
        return
    files = module_files(system)
    loaded = system.exists(f"/sys/module/{MODULE}")
    if not state:
        yield Finding("secure-boot", Status.OK, "off")
    elif files.out_of_tree and not loaded:
        yield Finding(
            "secure-boot",
            Status.BROKEN,
            f"on, and {files.out_of_tree} is not loaded: probably its signature's key is not enrolled",
            _enrol(system),
        )
    else:
        yield Finding(
            "secure-boot", Status.OK, f"on{', with a module of its own signature' if _tainted(system) else ''}"
        )


def firmware(system: System, npu: Npu) -> Iterator[Finding]:
    """The firmware that runs on the NPU, or why none does."""
    version = system.read(f"{npu.folder}/fw_version")
    if version:
        yield Finding("firmware", Status.OK, f"version {version}{_protocol_note(version)}")
        return
    files = firmware_files(system, npu)
    if (system.link(f"{npu.folder}/driver") or "").endswith(f"/{MODULE}"):
        listed = f"; files: {', '.join(files)}" if files else ""
        yield Finding("firmware", Status.OK, f"accepted by the driver, which doesn't tell its version{listed}")
        return
    reason = _firmware_in_log(system)
    if reason:
        yield reason
    elif files:
        newest = _newest(files)
        if newest >= (1, 1) and (0, 0) < system.kernel_version < PROTOCOL_7 and not module_files(system).out_of_tree:
            yield Finding(
                "firmware",
                Status.BROKEN if system.exists(f"/sys/module/{MODULE}") else Status.NOTE,
                f"{', '.join(files)}: firmware from 1.1 on speaks protocol 7, and the driver of kernel "
                f"{'.'.join(map(str, system.kernel_version))} knows 6",
                _too_new(),
            )
        else:
            yield Finding("firmware", Status.NOTE, f"files: {', '.join(files)}; not running, as no driver is")
    elif not system.exists("/lib/firmware") and not system.exists("/usr/lib/firmware"):
        yield Finding("firmware", Status.NOTE, "no firmware folder here; the driver takes the host's")
    else:
        yield Finding(
            "firmware",
            Status.MISSING,
            f"no amdnpu/{_folders(npu)[0]}/npu.sbin in /lib/firmware",
            f"install {FIRMWARE_PACKAGE}, then `sudo modprobe -r {MODULE}; sudo modprobe {MODULE}`",
        )


def module_files(system: System) -> Files:
    """What there is of amdxdna in /lib/modules and in DKMS's folders."""
    folder = f"/lib/modules/{system.kernel}"
    dependencies = system.read(f"{folder}/modules.dep")
    builtin = system.read(f"{folder}/modules.builtin") or ""
    own = rf"kernel/drivers/accel/{MODULE}/{MODULE}\.ko"
    found = re.findall(rf"^(\S*\b{MODULE}\.ko(?:\.\w+)?):", dependencies or "", re.MULTILINE)
    # depmod lists one of two modules of a name: the kernel's own may lie there all the same.
    in_tree = bool(system.match(f"{folder}/kernel/drivers/accel/{MODULE}", f"{MODULE}.ko*"))
    in_tree = in_tree or any(re.match(own, path) for path in found) or re.search(own, builtin) is not None
    outside = next((path for path in found if not re.match(own, path)), None)
    sources = system.match("/usr/src", f"*{MODULE}*-*/dkms.conf") + system.match(
        "/var/lib/dkms", f"*{MODULE}*/*/source"
    )
    version = sources[0].split("/")[-2].rpartition("-")[2] if sources else None
    return Files(in_tree, outside, version, dependencies is not None)


def firmware_files(system: System, npu: Npu) -> list[str]:
    """Firmware for this NPU, by name, with the version where a link tells it."""
    found: dict[str, None] = {}
    for folder in FIRMWARE_FOLDERS:
        for sub in _folders(npu):
            for name in FIRMWARE:
                for path in system.match(f"{folder}/amdnpu/{sub}", f"{name}*"):
                    file = path.rpartition("/")[2]
                    if re.fullmatch(rf"{re.escape(name)}(\.(xz|zst))?", file):
                        version = re.search(r"\d+\.\d+\.\d+\.\d+", system.resolved_name(path))
                        found.setdefault(f"{sub}/{file}{f' ({version[0]})' if version else ''}")
    return list(found)


def _not_driving(system: System) -> Finding:
    """The module is there but gave the device up."""
    errors = [line for line in _log(system) if "ERROR" in line or "failed" in line]
    said = f"; the kernel's log: {errors[0]}" if errors else ""
    device = _which(system, module_files(system))
    remedy = f"see the finding on firmware{'' if errors else f'; {LOG}'}. After a change of driver or firmware, reboot"
    return Finding("driver", Status.BROKEN, f"{MODULE} {device} is loaded but doesn't drive the NPU{said}", remedy)


def _not_loaded(system: System, files: Files) -> Finding:
    blocked = _blacklisted(system)
    if blocked:
        return Finding(
            "driver", Status.BROKEN, f"{MODULE} is kept out by {blocked}", f"remove that, then `sudo modprobe {MODULE}`"
        )
    if files.in_tree or files.out_of_tree:
        if files.out_of_tree and _secure_boot(system):
            return Finding(
                "driver",
                Status.BROKEN,
                f"{MODULE} ({files.out_of_tree}) is installed and not loaded, and Secure Boot is on",
                _enrol(system),
            )
        where = files.out_of_tree or "the kernel's own"
        return Finding(
            "driver",
            Status.BROKEN,
            f"{MODULE} ({where}) is installed and not loaded",
            f"`sudo modprobe {MODULE}`; {LOG}",
        )
    release, version = system.kernel, system.kernel_version
    if files.dkms:
        return Finding(
            "driver",
            Status.BROKEN,
            f"DKMS has {MODULE} {files.dkms}, but no module of it for kernel {release}",
            "install its headers (`sudo apt install linux-headers-$(uname -r)`) and run `sudo dkms autoinstall`",
        )
    if not files.known:
        return Finding(
            "driver",
            Status.MISSING,
            f"{MODULE} is not loaded, and /lib/modules/{release} can't be read here",
            f"load it on the host: `sudo modprobe {MODULE}`",
        )
    if (0, 0) < version < IN_TREE:
        old = ", and too old to build it for" if version < OUT_OF_TREE else ""
        return Finding("driver", Status.MISSING, f"kernel {release} has no {MODULE}{old}", NEWER_KERNEL)
    return Finding(
        "driver",
        Status.MISSING,
        f"kernel {release} was built without {MODULE} (CONFIG_DRM_ACCEL_AMDXDNA)",
        f"use the distribution's standard kernel, or install the driver as a module of its own ({DKMS_PACKAGE})",
    )


def _which(system: System, files: Files) -> str:
    """Which amdxdna it is, from what the kernel says of the loaded one."""
    version = system.read(f"/sys/module/{MODULE}/version")
    if _tainted(system):
        name = f"out of tree{f', DKMS {files.dkms}' if files.dkms else ''}"
    elif system.exists(f"/sys/module/{MODULE}/initstate"):
        name = "of the kernel"
    else:
        name = "built into the kernel"
    return f"({name}{f', version {version}' if version else ''})"


def _tainted(system: System) -> bool:
    return "O" in (system.read(f"/sys/module/{MODULE}/taint") or "")


def _blacklisted(system: System) -> str | None:
    for option in (system.read("/proc/cmdline") or "").split():
        name, _, value = option.partition("=")
        if name in ("modprobe.blacklist", "module_blacklist") and MODULE in value.split(","):
            return f"{option} on the kernel's command line"
    for folder in ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d"):
        for path in system.match(folder, "*.conf"):
            pattern = rf"^\s*(blacklist\s+{MODULE}\b|install\s+{MODULE}\s+\S*/(false|true)\b)"
            if found := re.search(pattern, system.read(path) or "", re.MULTILINE):
                return f"`{found[1]}` in {path}"
    return None


def _secure_boot(system: System) -> bool | None:
    # Four bytes of attributes, one of state.
    data = system.read_bytes(SECURE_BOOT)
    return None if data is None or len(data) < 5 else data[4] == 1


def _enrol(system: System) -> str:
    keys = ("/var/lib/shim-signed/mok/MOK.der", "/var/lib/dkms/mok.pub")
    key = next((key for key in keys if system.exists(key)), keys[0])
    return (
        f"enrol the key that DKMS signs with: `sudo mokutil --import {key}`, reboot, confirm; or turn Secure Boot off "
        "in the BIOS set-up; or use a kernel of 6.14 or later and its own, signed driver"
    )


def _folders(npu: Npu) -> list[str]:
    # npu6's firmware is npu4's: the driver asks for that one.
    own = f"{npu.device:04x}_{npu.revision:02x}"
    return ["17f0_10", own] if own == "17f0_20" else [own]


def _newest(files: list[str]) -> tuple[int, int]:
    versions = [re.search(r"\((\d+)\.(\d+)\.", file) for file in files]
    return max(((int(found[1]), int(found[2])) for found in versions if found), default=(0, 0))


def _protocol_note(version: str) -> str:
    """The file's version and the protocol count apart; the protocol is not to be had without opening the device."""
    if version.startswith("1.0."):
        return (
            f" (1.0: protocol 6; the driver took it, so {MIN_PROTOCOL[0]}.{MIN_PROTOCOL[1]} or later. Lists of runs in "
            f"one command need {CHAINS_PROTOCOL[0]}.{CHAINS_PROTOCOL[1]})"
        )
    return " (protocol 7)" if re.match(r"1\.[1-9]", version) else ""


def _too_new() -> str:
    return (
        f"use a kernel of {PROTOCOL_7[0]}.{PROTOCOL_7[1]} or later, or AMD's driver as a module of its own "
        f"({DKMS_PACKAGE}), or go back to the linux-firmware whose npu.sbin is 1.0; then reboot"
    )


def _log(system: System) -> list[str]:
    return [line for line in system.kernel_log if MODULE in line]


def _firmware_in_log(system: System) -> Finding | None:
    log = "\n".join(_log(system))
    if found := re.search(r"firmware protocol major (\d+) minor (\d+)", log):
        protocol = int(found[1]), int(found[2])
        said = f"protocol {protocol[0]}.{protocol[1]}, and the driver refuses it"
        if protocol < MIN_PROTOCOL:
            needed = f"{MIN_PROTOCOL[0]}.{MIN_PROTOCOL[1]}"
            return Finding(
                "firmware",
                Status.BROKEN,
                f"too old: {said}; {needed} is the least",
                f"update {FIRMWARE_PACKAGE}, then reboot; a stale amdnpu/*/npu*.sbin put there by hand goes before it",
            )
        return Finding("firmware", Status.BROKEN, f"newer than the driver: {said}", _too_new())
    if re.search(r"failed to request_firmware|Direct firmware load for \S+ failed", log):
        name = re.search(r"amdnpu/\S+?(?=[,\s]|$)", log)
        return Finding(
            "firmware",
            Status.MISSING,
            f"the driver found no {name[0] if name else 'firmware'}",
            f"install {FIRMWARE_PACKAGE}; with the driver in the initial RAM disk, rebuild that too; then reboot",
        )
    if re.search(r"firmware is not alive|Invalid mbox magic", log):
        return Finding(
            "firmware",
            Status.BROKEN,
            "it doesn't come alive: driver and firmware don't match",
            f"take both from one source: {FIRMWARE_PACKAGE} with the kernel's own driver, or AMD's packages; reboot",
        )
    return None
