"""``tilefuse doctor``: what this machine has and lacks for the NPU, each finding with its remedy.

Everything is looked at through a `System`, without root and without loading anything into this process: pyxrt and the
toolchain are tried in processes of their own, so that their crashes are findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tilefuse.doctor import access, driver, hardware, userspace
from tilefuse.doctor.findings import Finding, Report, Status
from tilefuse.doctor.system import System

__all__ = ["Finding", "Report", "Status", "System", "examine"]

# Forbidden paths that are named.
SHOWN = 6


def examine(system: System | None = None) -> Report:
    """Looks at all that running on the NPU takes.

    Args:
        system: The machine to look at; None for this one.
    """
    system = system or System()
    findings = [*hardware.machine(system), *hardware.processor(system)]
    if not system.platform.startswith("linux") or system.is_wsl:
        return Report((*findings, *_as_notes([*userspace.toolchain(system), *userspace.artifacts(system)])))
    findings += hardware.npu(system)
    npu = hardware.usable_npu(system)
    if npu is not None:
        findings += [*hardware.iommu(system, npu), *driver.driver(system, npu), *driver.secure_boot(system)]
        findings += [*driver.firmware(system, npu), *access.node(system, npu), *access.memlock(system)]
    node = access.node_of(system, npu) if npu else None
    usable = node is not None and system.exists(node) and system.may_use(node)
    # What waits for other programs does so side by side.
    with ThreadPoolExecutor(3) as pool:
        tried = pool.submit(lambda: list(userspace.pyxrt(system, opens=usable)))
        tools = pool.submit(lambda: list(userspace.toolchain(system)))
        supply = pool.submit(lambda: list(userspace.power(system, npu)) if npu and usable else [])
        installed = list(userspace.xrt(system))
        built = list(userspace.artifacts(system))
        runtime = [*installed, *tried.result(), *tools.result(), *built, *supply.result()]
    # Without an NPU there is nothing that XRT would be installed for.
    findings += runtime if npu else _as_notes(runtime)
    if system.forbidden:
        shown = ", ".join(system.forbidden[:SHOWN])
        more = f" and {len(system.forbidden) - SHOWN} more" if len(system.forbidden) > SHOWN else ""
        findings.append(
            Finding("forbidden", Status.NOTE, f"may not be read: {shown}{more}; findings may be incomplete")
        )
    return Report(tuple(findings))


def _as_notes(findings: list[Finding]) -> Iterator[Finding]:
    for finding in findings:
        remedy = finding.remedy if finding.id in ("toolchain", "artifacts") else ""
        yield finding if finding.status is Status.OK else replace(finding, status=Status.NOTE, remedy=remedy)
