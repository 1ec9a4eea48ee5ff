"""The process's side: the device node, its permissions, the limit on locked memory."""

from __future__ import annotations

from collections.abc import Iterator

from tilefuse.doctor.findings import Finding, Status
from tilefuse.doctor.hardware import Npu
from tilefuse.doctor.system import System

HEAP = 64 << 20
"""Bytes that XRT's plugin maps locked when it opens the device; all buffers follow it."""

LIMIT = "/etc/security/limits.d/99-amdxdna.conf"
UDEV = (
    """echo 'SUBSYSTEM=="accel", KERNEL=="accel*", GROUP="render", MODE="0660"' | """
    "sudo tee /etc/udev/rules.d/99-amdxdna.rules"
)
RELOAD = "sudo udevadm control --reload-rules && sudo udevadm trigger --subsystem-match=accel --action=add"


def node_of(system: System, npu: Npu) -> str | None:
    """The device node that the driver has made, as XRT's plugin finds it."""
    names = [name for name in system.names(f"{npu.folder}/accel") or [] if name.startswith("accel")]
    return f"/dev/accel/{names[0]}" if names else None


def node(system: System, npu: Npu) -> Iterator[Finding]:
    """The device node and whether this process may use it."""
    path = node_of(system, npu)
    if path is None:
        yield Finding("node", Status.MISSING, "the driver has made no device node", "see the findings on the driver")
        return
    if not system.exists(path):
        if system.container:
            flags = f"--device {path} --ulimit memlock=-1"
            yield Finding(
                "node", Status.MISSING, f"{path} is not in this container", f"start it with `{flags}` (docker, podman)"
            )
        else:
            yield Finding(
                "node", Status.MISSING, f"the driver has made {path}, but it is not there", f"start udev: `{RELOAD}`"
            )
        return
    yield Finding("node", Status.OK, path)
    yield _permission(system, path)


def memlock(system: System) -> Iterator[Finding]:
    """The limit on locked memory."""
    limit = system.memlock
    if limit is None:
        yield Finding("memlock", Status.OK, "unlimited")
        return
    found = f"{limit >> 10} KiB may be locked (`ulimit -l`)"
    if system.may_lock_anything:
        yield Finding("memlock", Status.OK, f"{found}, which doesn't bind this process (CAP_IPC_LOCK)")
        return
    if system.container:
        remedy = "start the container with `--ulimit memlock=-1`"
    else:
        remedy = (
            f"`printf '@render - memlock unlimited\\n' | sudo tee {LIMIT}`; for programs started from the desktop also "
            "`sudo systemctl edit user@.service` with [Service] LimitMEMLOCK=infinity; log out and in"
        )
    if limit < HEAP:
        why = f"XRT locks {HEAP >> 20} MiB when it opens the NPU, and every buffer after that"
        yield Finding("memlock", Status.BROKEN, f"{found}: {why}", remedy)
    else:
        yield Finding(
            "memlock",
            Status.NOTE,
            f"{found}: weights and activations on the NPU count, beside {HEAP >> 20} MiB",
            remedy,
        )


def _permission(system: System, path: str) -> Finding:
    owner = system.node(path)
    if owner is None:
        return Finding(
            "permissions", Status.BROKEN, f"{path} can't be looked at", f"`ls -l {path}` as root shows its owner"
        )
    entries = _group_entries(system)
    group = next((name for name, (gid, _) in entries.items() if gid == owner.gid), None)
    shown = f"{path} is of group {group or owner.gid}, mode {owner.mode:04o}"
    if system.may_use(path):
        return Finding("permissions", Status.OK, f"{shown}; this process may use it")
    if owner.mode & 0o060 != 0o060 or owner.gid == 0:
        return Finding(
            "permissions",
            Status.BROKEN,
            f"{shown}: closed to users",
            f"`{UDEV}`, then `{RELOAD}`, and `sudo usermod -aG render $USER`; log out and in",
        )
    if owner.gid in system.groups:
        return Finding(
            "permissions",
            Status.BROKEN,
            f"{shown}, and this process is of that group, yet it may not use it",
            "a container's device rules or a security module forbid it: start the container with "
            f"`--device {path}`, or look for denials in `sudo dmesg`",
        )
    if system.container:
        return Finding(
            "permissions",
            Status.BROKEN,
            f"{shown}; this process is not of that group",
            f"start the container with `--group-add {owner.gid}`",
        )
    if group is not None and system.user in entries[group][1]:
        return Finding(
            "permissions",
            Status.BROKEN,
            f"{shown}: the user was added to it, but this session is older than that",
            f"log out and in again (of the desktop, and of tmux and screen), or at once: `sg {group} -c '...'`",
        )
    return Finding(
        "permissions",
        Status.BROKEN,
        f"{shown}: the user is not in it",
        f"`sudo usermod -aG {group or owner.gid} $USER`, then log out and in",
    )


def _group_entries(system: System) -> dict[str, tuple[int, list[str]]]:
    """Name -> (gid, members) from /etc/group."""
    entries: dict[str, tuple[int, list[str]]] = {}
    for line in (system.read("/etc/group") or "").splitlines():
        fields = line.split(":")
        if len(fields) == 4 and fields[2].isdigit():
            entries[fields[0]] = int(fields[2]), [name for name in fields[3].split(",") if name]
    return entries
