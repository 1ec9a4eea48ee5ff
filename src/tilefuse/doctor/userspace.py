"""XRT, its Python module, the toolchain and what it has built."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from tilefuse import manifest
from tilefuse.doctor.findings import Finding, Status
from tilefuse.doctor.hardware import Npu
from tilefuse.doctor.system import Ran, System

XRT = "/opt/xilinx/xrt"
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib64", "/usr/local/lib")
LIBRARIES = ("libxrt_coreutil.so.2", "libxrt_core.so.2")
PLUGIN = "libxrt_driver_xdna.so.2"
PYTHON_FOLDERS = (
    "/usr/lib/python3/dist-packages",
    "/usr/lib/python3.*/dist-packages",
    "/usr/lib/python3.*/site-packages",
    "/usr/lib64/python3.*/site-packages",
    "/usr/local/lib/python3.*/dist-packages",
    "/usr/local/lib/python3.*/site-packages",
    "/usr/local/lib64/python3.*/site-packages",
)

INSTALL = (
    "Ubuntu 26.04: `sudo apt install libxrt2 libxrt-npu2 libxrt-utils-npu python3-xrt`; Ubuntu 24.04: `sudo "
    "add-apt-repository ppa:amd-team/xrt && sudo apt install libxrt2 libxrt-npu2 libxrt-utils libxrt-utils-npu`; Arch: "
    "`sudo pacman -S xrt xrt-plugin-amdxdna`; others: build it from github.com/amd/xdna-driver"
)

# Each line that it writes is a stage that it got past: a crash tells where. It opens the device only if told to.
PROBE = """
import importlib.util, json, sys
def say(stage, text=""):
    print(json.dumps([stage, str(text)]), flush=True)
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except (ImportError, OSError, ValueError):
    pass
spec = importlib.util.find_spec("pyxrt")
if spec is None:
    say("absent")
    raise SystemExit
say("found", spec.origin)
try:
    import pyxrt
except BaseException as error:
    say("import failed", f"{type(error).__name__}: {error}")
    raise SystemExit
lacking = [name for name in ("device", "xclbin", "hw_context", "kernel", "bo", "run") if not hasattr(pyxrt, name)]
say("imported", ", ".join(lacking))
if "open" in sys.argv:
    try:
        device = pyxrt.device(0)
        name = device.get_info(pyxrt.xrt_info_device.name)
    except BaseException as error:
        say("open failed", f"{type(error).__name__}: {error}")
    else:
        say("opened", name)
"""

TOOLS_PROBE = """
import json
from tilefuse.errors import ToolchainError
from tilefuse.xclbin_tools import find_tools
try:
    print(json.dumps(["found", find_tools().versions]))
except ToolchainError as error:
    print(json.dumps(["missing", str(error)]))
"""


def xrt(system: System) -> Iterator[Finding]:
    """XRT's libraries, its plugin for the NPU and xrt-smi."""
    paths = {name: _library(system, name) for name in (*LIBRARIES, PLUGIN)}
    lacking = [name for name in LIBRARIES if paths[name] is None]
    if lacking:
        yield Finding("xrt", Status.MISSING, f"no {' nor '.join(lacking)} in the usual places", INSTALL)
        return
    core, plugin = paths[LIBRARIES[1]], paths[PLUGIN]
    version = _xrt_version(system, str(core))
    yield Finding("xrt", Status.OK, f"{version or 'unknown version'} in {Path(str(core)).parent}")
    if plugin is None:
        yield Finding(
            "xrt-plugin",
            Status.MISSING,
            f"no {PLUGIN} beside {core}: XRT sees no NPU without it",
            f"install the plugin of the same version. {INSTALL}",
        )
    elif Path(plugin).parent != Path(str(core)).parent:
        # XRT looks for plugins in the folder of its own library alone.
        yield Finding(
            "xrt-plugin",
            Status.BROKEN,
            f"{plugin} is not in the folder of {core}: two installations are mixed",
            "remove one of the two XRTs; both packages are to come from one source",
        )
    else:
        own = _file_version(system, plugin)
        if own and version and own.split(".")[:2] != version.split(".")[:2]:
            yield Finding(
                "xrt-plugin",
                Status.NOTE,
                f"the plugin is {own} and XRT {version}",
                "install both from one source: they are made for each other within one minor version",
            )
        else:
            yield Finding("xrt-plugin", Status.OK, own or plugin)
    smi = smi_of(system)
    if smi is None:
        old = system.find_program("xbutil", f"{XRT}/bin")
        instead = f"; {old} is its old name, of an XRT from before the NPU was served well" if old else ""
        yield Finding(
            "xrt-smi", Status.NOTE, f"no xrt-smi{instead}", "it sets the power mode: install libxrt-utils-npu"
        )
    else:
        yield Finding("xrt-smi", Status.OK, smi)


def smi_of(system: System) -> str | None:
    """xrt-smi, which is on PATH only after XRT's set-up script."""
    return system.find_program("xrt-smi", *(f"{root}/bin" for root in _roots(system)))


def pyxrt(system: System, *, opens: bool) -> Iterator[Finding]:
    """Whether this Python imports pyxrt, and with ``opens`` whether that opens the NPU; in a process of its own."""
    # -P: not from the folder that we happen to be in.
    ran = system.run(system.python, "-P", "-c", PROBE, *(["open"] if opens else []))
    stages = dict(_stages(ran))
    here = ".".join(map(str, system.python_version))
    if "imported" not in stages:
        yield _not_imported(system, ran, stages, here)
        return
    where = stages.get("found", "pyxrt")
    if stages["imported"]:
        yield Finding(
            "pyxrt",
            Status.BROKEN,
            f"{where} lacks {stages['imported']}",
            f"it is of an old XRT, or another package. {INSTALL}",
        )
        return
    yield Finding("pyxrt", Status.OK, f"{where}, for this Python {here}")
    if not opens:
        return
    if "opened" in stages:
        yield Finding("device", Status.OK, f"opens as {stages['opened']}")
    else:
        yield _not_opened(ran, stages)


def toolchain(system: System) -> Iterator[Finding]:
    """What builds for the NPU; what is built already runs without it."""
    ran = system.run(system.python, "-P", "-c", TOOLS_PROBE)
    stages = dict(_stages(ran))
    if isinstance(versions := stages.get("found"), dict):
        yield Finding("toolchain", Status.OK, ", ".join(f"{name} {version}" for name, version in versions.items()))
    elif "missing" in stages:
        reason, _, remedy = str(stages["missing"]).partition(": ")
        yield Finding("toolchain", Status.NOTE, f"{reason}: it is needed to build, not to run", remedy)
    else:
        yield Finding("toolchain", Status.NOTE, f"can't be looked at: {_end_of(ran)}", "`make xclbins` shows the error")


def artifacts(system: System) -> Iterator[Finding]:
    """The xclbins that the runtime would take."""
    folder = system.artifacts
    named = system.environment.get("TILEFUSE_XCLBINS")
    origin = "TILEFUSE_XCLBINS" if named else "the default; TILEFUSE_XCLBINS names another"
    remedy = "run `make xclbins` where mlir-aie, Peano and xclbinutil are, and name the folder in TILEFUSE_XCLBINS"
    try:
        found = manifest.read(folder)
    except manifest.ManifestError as error:
        there = os.path.exists(folder / manifest.NAME)
        status = Status.BROKEN if there else Status.MISSING
        yield Finding("artifacts", status, f"{str(error).partition(': run ')[0]} ({origin})", remedy)
        return
    changed = [artifact.file for artifact in found.artifacts() if not manifest.is_there(folder, artifact)]
    built = len(found.built) + len(found.attention)
    streams = len(found.artifacts()) - built
    if changed:
        yield Finding(
            "artifacts",
            Status.BROKEN,
            f"{len(changed)} files in {folder} are not as they were built: {', '.join(changed[:3])}",
            remedy,
        )
    elif not built:
        yield Finding("artifacts", Status.MISSING, f"{folder} lists no xclbin ({origin})", remedy)
    else:
        yield Finding("artifacts", Status.OK, f"xclbins: {built}, instruction streams: {streams}, in {folder}")


def power(system: System, npu: Npu) -> Iterator[Finding]:
    """Power mode of the NPU and supply of the machine: what figures depend on."""
    said = []
    smi = smi_of(system)
    if smi is not None:
        ran = system.run(smi, "examine", "--device", npu.address, "--report", "platform")
        if mode := re.search(r"^\s*Power Mode\s*:\s*(\S+)", ran.stdout, re.MULTILINE):
            said.append(f"mode {mode[1].lower()}")
    supplies = [system.read(path) for path in system.match("/sys/class/power_supply", "*/online")]
    if supplies:
        said.append("on mains" if "1" in supplies else "on battery")
    if profile := system.read("/sys/firmware/acpi/platform_profile"):
        said.append(f"platform profile {profile}")
    if not said:
        return
    hint = "" if "mode turbo" in said else "for figures: `sudo xrt-smi configure --pmode turbo`, on mains"
    yield Finding("power", Status.NOTE, ", ".join(said), hint)


def installed_modules(system: System) -> list[tuple[str, str | None]]:
    """pyxrt's files anywhere, each with the Python that it is for."""
    folders = [*system.import_path, *(f"{root}/python" for root in _roots(system))]
    patterns = [(folder, "pyxrt*.so") for folder in folders if folder.startswith("/")]
    patterns += [("/", f"{folder[1:]}/pyxrt*.so") for folder in PYTHON_FOLDERS]
    paths = dict.fromkeys(path for folder, pattern in patterns for path in system.match(folder, pattern))
    return [(path, _python_of(path)) for path in paths]


def _not_imported(system: System, ran: Ran, stages: dict[str, str], here: str) -> Finding:
    if ran.died or ran.timed_out:
        did = "hangs" if ran.timed_out else f"crashes ({ran.died})"
        return Finding(
            "pyxrt",
            Status.BROKEN,
            f"`import pyxrt` {did}: {stages.get('found', 'pyxrt')}",
            "it is of another XRT than the libraries that it finds, or of another Python: install XRT and pyxrt from "
            "one source, and look for a second XRT in LD_LIBRARY_PATH and PYTHONPATH",
        )
    error = stages.get("import failed", "")
    if error:
        return _import_error(stages.get("found", "pyxrt"), error, here)
    if "absent" not in stages:
        return Finding(
            "pyxrt",
            Status.BROKEN,
            f"this Python can't be tried: {_end_of(ran)}",
            f"`{system.python} -c 'import pyxrt'`",
        )
    modules = installed_modules(system)
    fitting = next((path for path, python in modules if python in (here, None)), None)
    if fitting:
        folder = fitting.rpartition("/")[0]
        script = f"`source {folder.removesuffix('/python')}/setup.sh`, or " if folder.endswith("/xrt/python") else ""
        return Finding(
            "pyxrt",
            Status.MISSING,
            f"{fitting} is for this Python, which doesn't look there",
            f"{script}`export PYTHONPATH={folder}`; or make the virtual environment with --system-site-packages",
        )
    if modules:
        path, python = modules[0]
        return Finding(
            "pyxrt",
            Status.BROKEN,
            f"{path} is for Python {python}, and this is {here}",
            f"make the environment with that Python: `python{python} -m venv --system-site-packages .venv`; or build "
            f"XRT's pyxrt for {here}",
        )
    return Finding("pyxrt", Status.MISSING, f"no pyxrt for any Python; this is {here}", INSTALL)


def _import_error(where: str, error: str, here: str) -> Finding:
    python = _python_of(where)
    if "cannot open shared object" in error:
        remedy = (
            f"`source {XRT}/setup.sh`, or name the libraries' folder in LD_LIBRARY_PATH; if there is none: {INSTALL}"
        )
    elif "GLIBCXX" in error or "CXXABI" in error or "GLIBC_" in error:
        remedy = "this Python brings a C++ library older than XRT's (conda does): use the system's Python"
    elif python not in (here, None):
        remedy = f"it is for Python {python}: use that, or build pyxrt for {here}"
    else:
        remedy = "it is of another XRT than the libraries that it finds: install XRT and pyxrt from one source"
    return Finding("pyxrt", Status.BROKEN, f"{where} can't be imported by Python {here}: {error}", remedy)


def _not_opened(ran: Ran, stages: dict[str, str]) -> Finding:
    if ran.died or ran.timed_out:
        did = "hangs" if ran.timed_out else f"crashes ({ran.died})"
        return Finding(
            "device",
            Status.BROKEN,
            f"opening the NPU {did}",
            "driver and XRT's plugin don't match, or a run has wedged the array: reboot, and take both from one source",
        )
    error = stages.get("open failed", _end_of(ran))
    if re.search(r"No such device|with index", error):
        remedy = "XRT sees no NPU: see the findings on permissions and xrt-plugin"
    elif re.search(r"lock|EAGAIN|Resource temporarily|Cannot allocate|ENOMEM", error, re.IGNORECASE):
        remedy = "see the finding on memlock"
    elif re.search(r"Invalid argument|EINVAL|err=-?22", error):
        remedy = (
            "the driver gives this process no address space: see the finding on iommu; LXC and Incus can't pass it on"
        )
    elif re.search(r"not supported|EOPNOTSUPP|err=-?95", error):
        remedy = "XRT is newer than the driver: update the kernel or take AMD's driver, or an XRT of the driver's time"
    else:
        remedy = "`xrt-smi examine` and `sudo dmesg | grep amdxdna` may say more"
    return Finding("device", Status.BROKEN, f"the NPU doesn't open: {error}", remedy)


def _roots(system: System) -> list[str]:
    named = system.environment.get("XILINX_XRT")
    return list(dict.fromkeys([*([named.rstrip("/")] if named else []), XRT]))


def _library(system: System, name: str) -> str | None:
    folders = [f"{root}/{lib}" for root in _roots(system) for lib in ("lib", "lib64", "lib/x86_64-linux-gnu")]
    folders += [folder for folder in system.environment.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/")]
    return next(
        (f"{folder}/{name}" for folder in (*folders, *LIBRARY_FOLDERS) if system.exists(f"{folder}/{name}")), None
    )


def _xrt_version(system: System, core: str) -> str | None:
    for root in _roots(system):
        if core.startswith(f"{root}/"):
            try:
                return str(json.loads(system.read(f"{root}/version.json") or "{}")["BUILD_VERSION"])
            except (ValueError, KeyError, TypeError):
                break
    return _file_version(system, core)


def _file_version(system: System, library: str) -> str | None:
    """libxrt_core.so.2 is a link to libxrt_core.so.2.21.75."""
    found = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", system.resolved_name(library))
    return found[1] if found else None


def _python_of(path: str) -> str | None:
    """The Python that an extension module is for, from its name; None for any."""
    found = re.search(r"\.cpython-(\d)(\d+)\w*-", path.rpartition("/")[2])
    return f"{found[1]}.{found[2]}" if found else None


def _stages(ran: Ran) -> Iterator[tuple[str, str]]:
    for line in ran.stdout.splitlines():
        try:
            stage, text = json.loads(line)
        except (ValueError, TypeError):
            continue  # XRT may print lines of its own
        if isinstance(stage, str):
            yield stage, text


def _end_of(ran: Ran) -> str:
    if ran.timed_out:
        return "it took too long"
    if ran.died:
        return f"it crashed ({ran.died})"
    return (ran.stderr.strip().splitlines() or [f"exit status {ran.status}"])[-1]
