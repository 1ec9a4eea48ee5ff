"""The machine, as far as the doctor looks at it.

Every file, program, limit and identity that a check needs comes from a `System`, so that tests can make up machines.
Nothing here raises for what is missing or forbidden: what couldn't be read is None, and listed in `System.forbidden`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from platform import machine as machine_name
from platform import node as host_name

from tilefuse.runtime.artifacts import default_folder

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

TIMEOUT = 8.0
"""Seconds that a program may take; only a broken one takes more than one or two."""

# Number of the capability that lifts the limit on locked memory, from linux/capability.h.
CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Ran:
    """What became of a program."""

    status: int | None
    """Its exit status, negative for a signal; None where it didn't start or took too long."""
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False

    @property
    def died(self) -> str | None:
        """Name of the signal that ended it."""
        if self.status is None or self.status >= 0:
            return None
        try:
            return signal.Signals(-self.status).name
        except ValueError:
            return f"signal {-self.status}"


@dataclass(frozen=True)
class Node:
    """Owner and mode of a file."""

    uid: int
    gid: int
    mode: int


def run_program(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> Ran:
    """Runs a program in a session of its own, which ends with it."""
    own_session = os.name == "posix"
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=own_session,
        )
    except (OSError, ValueError) as error:
        return Ran(None, stderr=str(error))
    with process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                if own_session:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            process.communicate()
            return Ran(None, timed_out=True)
    return Ran(process.returncode, stdout, stderr)


def _user() -> str:
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError, OSError):
        return os.environ.get("USER") or os.environ.get("USERNAME") or ""


def _memlock() -> int | None:
    if resource is None:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass
class System:
    """The machine and who asks. The defaults are this machine and this process."""

    root: Path = field(default_factory=lambda: Path("/"))
    """Where /sys, /proc, /dev, /etc and the like are."""
    platform: str = sys.platform
    architecture: str = field(default_factory=machine_name)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run_program: Callable[[Sequence[str], Mapping[str, str], float], Ran] = run_program
    user: str = field(default_factory=_user)
    uid: int = field(default_factory=lambda: os.getuid() if hasattr(os, "getuid") else -1)
    groups: frozenset[int] = field(
        default_factory=lambda: frozenset({os.getegid(), *os.getgroups()} if hasattr(os, "getgroups") else ())
    )
    """Of this process: a group that the user was added to since logging in is not among them."""
    memlock: int | None = field(default_factory=_memlock)
    """Bytes that this process may lock; None for no limit."""
    python: str = sys.executable
    python_version: tuple[int, int] = sys.version_info[:2]
    extension_suffix: str = field(default_factory=lambda: str(sysconfig.get_config_var("EXT_SUFFIX") or ""))
    """How names of this Python's own extension modules end."""
    import_path: Sequence[str] = field(default_factory=lambda: list(sys.path))
    artifacts: Path = field(default_factory=default_folder)
    """The folder of xclbins that the runtime takes; not under `root`."""
    host: str = field(default_factory=host_name)
    forbidden: list[str] = field(default_factory=list)
    """Paths that may not be read, as far as anything was looked for there."""

    def path(self, path: str | Path) -> Path:
        """Where an absolute path of the machine is for us."""
        return self.root / str(path).lstrip("/")

    def read(self, path: str | Path) -> str | None:
        """A text file, stripped."""
        data = self.read_bytes(path)
        return None if data is None else data.decode(errors="replace").strip()

    def read_bytes(self, path: str | Path) -> bytes | None:
        """A file."""
        with self._noting(path):
            return self.path(path).read_bytes()
        return None

    def names(self, path: str | Path) -> list[str] | None:
        """The entries of a folder, sorted."""
        with self._noting(path):
            return sorted(os.listdir(self.path(path)))
        return None

    def match(self, folder: str, pattern: str) -> list[str]:
        """The paths in a folder that match a glob pattern, sorted."""
        with self._noting(folder):
            found = sorted(self.path(folder).glob(pattern))
            return [f"/{path.relative_to(self.root)}" for path in found]
        return []

    def exists(self, path: str | Path) -> bool:
        """Whether anything is there."""
        return os.path.lexists(self.path(path))

    def link(self, path: str | Path) -> str | None:
        """What a symbolic link points to, as it is written."""
        try:
            return os.readlink(self.path(path))
        except OSError:
            return None

    def resolved_name(self, path: str | Path) -> str:
        """Name of the file behind symbolic links."""
        return os.path.basename(os.path.realpath(self.path(path)))

    def node(self, path: str | Path) -> Node | None:
        """Owner and mode."""
        with self._noting(path):
            status = os.stat(self.path(path))
            return Node(status.st_uid, status.st_gid, status.st_mode & 0o777)
        return None

    def may_use(self, path: str | Path) -> bool:
        """Whether this process may read and write it."""
        return os.access(self.path(path), os.R_OK | os.W_OK)

    def find_program(self, name: str, *folders: str) -> str | None:
        """A program on PATH, or else in ``folders``."""
        for folder in [*self.environment.get("PATH", "").split(os.pathsep), *folders]:
            path = f"{folder}/{name}"
            if folder and os.path.isfile(self.path(path)) and os.access(self.path(path), os.X_OK):
                return path
        return None

    def run(self, *command: str, timeout: float = TIMEOUT) -> Ran:
        """Runs a program of the machine."""
        return self.run_program(command, self.environment, timeout)

    @cached_property
    def kernel_log(self) -> list[str]:
        """The kernel's messages without their times; none where they may not be read."""
        for command in (("dmesg",), ("journalctl", "--dmesg", "--boot", "--no-pager", "--output=cat")):
            ran = self.run(*command, timeout=2.0)
            if ran.status == 0 and ran.stdout.strip():
                return [re.sub(r"^\[[^\]]*\]\s*", "", line) for line in ran.stdout.splitlines()]
        return []

    @property
    def kernel(self) -> str:
        """The running kernel's release, as in 6.17.0-7-generic."""
        return self.read("/proc/sys/kernel/osrelease") or ""

    @property
    def kernel_version(self) -> tuple[int, int]:
        """Major and minor; (0, 0) where it isn't known."""
        return version_of(self.kernel)

    @property
    def is_wsl(self) -> bool:
        """Whether this is Windows' Linux."""
        return "microsoft" in self.kernel.lower()

    @property
    def container(self) -> str | None:
        """The kind of container that this is, if it is one."""
        if self.exists("/run/.containerenv"):
            return "podman"
        if self.exists("/.dockerenv"):
            return "docker"
        said = self.environment.get("container") or self.read("/run/systemd/container")
        if said:
            return said
        control = self.read("/proc/1/cgroup") or ""
        return next((name for name in ("docker", "lxc", "kubepods", "containerd") if name in control), None)

    @property
    def may_lock_anything(self) -> bool:
        """Whether the limit on locked memory doesn't bind this process."""
        for line in (self.read("/proc/self/status") or "").splitlines():
            name, _, value = line.partition(":")
            if name == "CapEff":
                try:
                    return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
                except ValueError:
                    return False
        return False

    @property
    def secrets(self) -> list[str]:
        """What a report that is passed on shouldn't hold."""
        return [self.environment.get("HOME", ""), "" if self.user == "root" else self.user, self.host]

    @contextlib.contextmanager
    def _noting(self, path: str | Path) -> Iterator[None]:
        try:
            yield
        except PermissionError:
            if str(path) not in self.forbidden:
                self.forbidden.append(str(path))
        except (OSError, ValueError):
            pass


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) where there are none."""
    numbers = text.split(".", 2)
    try:
        return int(numbers[0]), int("".join(c for c in numbers[1] if c.isdigit()) or 0)
    except (ValueError, IndexError):
        return 0, 0
