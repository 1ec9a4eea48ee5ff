"""Where xclbins and instruction streams come from.

An xclbin serves every shape of its configuration; an instruction stream serves the shapes that pad alike. Both are in a
folder that `make xclbins` fills, with a manifest: what it lists is used only if it is of today's format, sources and
plans, made by one set of tools, and byte for byte what was built.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tilefuse import manifest, plan, shapes
from tilefuse.configurations import Op, Weights
from tilefuse.errors import DeviceError, PlanError, TileFuseError, ToolchainError
from tilefuse.files import sha256_of
from tilefuse.layout import KT, Layout
from tilefuse.manifest import AGAIN, Built, Manifest, ManifestError, Stream
from tilefuse.plan import Plan

Instructions = npt.NDArray[np.uint32]

ENVIRONMENT = "TILEFUSE_XCLBINS"
"""Names the folder of artifacts."""


class Xclbin(NamedTuple):
    """An xclbin to load."""

    path: Path
    kernel: str
    """Name of the kernel in it."""
    sha256: str
    """Two of the same hash are the same."""


class Artifacts(Protocol):
    """A source of xclbins and instruction streams."""

    def xclbin(self, plan: Plan, /) -> Xclbin:
        """The xclbin of the plan's configuration, checked.

        Raises:
            TileFuseError: There is none that can be used; the message says why and what to do.
        """

    def instructions(self, plan: Plan, /) -> Instructions:
        """The plan's instruction stream.

        Raises:
            TileFuseError: There is none that can be used, and none can be built; the message says why and what to do.
        """

    def choose(self, candidates: Sequence[Plan], /) -> Plan:
        """The plan to run among several for one problem, best first: the first that `instructions` has soon.

        May return another plan for the same problem, with more rows of padding.
        """
        return candidates[0]


class ArtifactsError(ManifestError, DeviceError):
    """What was built for the array is missing, or doesn't fit this tilefuse or this problem."""


def default_folder() -> Path:
    """$TILEFUSE_XCLBINS, else build/xclbins here or in the checkout if there is a manifest, else the user's own folder.

    The last is $XDG_DATA_HOME/tilefuse/xclbins, or ~/.local/share/tilefuse/xclbins; build/xclbins for who has no home.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named)
    built = Path("build") / "xclbins"
    # isfile is false of what may not be looked at, and of everything in a working directory that was removed.
    for folder in (Path(), shapes.default_file().parent.parent):
        if os.path.isfile(folder / built / manifest.NAME):
            return (folder / built).absolute()
    data = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(data) if data else Path.home() / ".local" / "share") / "tilefuse" / "xclbins"
    except RuntimeError:  # there is no home
        return built


class FolderArtifacts:
    """The artifacts of a folder. What is missing is built into it, where the tools are installed.

    Args:
        folder: The folder; `default_folder` when None.
        build: Whether to build what is missing.
    """

    def __init__(self, folder: Path | None = None, *, build: bool = True) -> None:
        self._folder = folder
        self._build = build
        self._lock = threading.RLock()
        self._read: tuple[tuple[int, int, int], Manifest] | None = None

    @property
    def folder(self) -> Path:
        """The folder."""
        if self._folder is None:
            self._folder = default_folder()
        return self._folder

    def xclbin(self, plan: Plan, /) -> Xclbin:
        with self._lock:
            built = self._configuration(self._manifest(), plan)
        artifact = built.xclbin
        path = self.folder / artifact.file
        try:
            found = sha256_of(path)
        except OSError as error:
            raise ArtifactsError(f"can't read {path}: {error.strerror}; {AGAIN}") from None
        if found != artifact.sha256:
            raise ArtifactsError(
                f"{path} has the hash {found[:12]}..., and the manifest says {artifact.sha256[:12]}...: it is not what "
                f"was built; {AGAIN}"
            )
        return Xclbin(path, built.kernel, artifact.sha256)

    def instructions(self, plan: Plan, /) -> Instructions:
        with self._lock:
            if not self._has(plan):
                self._build_missing(plan)
            known = self._manifest()
            built = self._configuration(known, plan)
            try:
                _, stream = known.find(plan)
            except ManifestError as error:
                raise ArtifactsError(
                    f"{self.folder}: {error}; for this shape alone: {command(plan, self.folder)}"
                ) from None
            self._check_tools(known, built, stream)
            try:
                data = manifest.load(self.folder, stream.artifact)
            except ManifestError as error:
                raise ArtifactsError(str(error)) from None
        if not data or len(data) % 4:
            raise ArtifactsError(f"{stream.artifact.file} has {len(data)} bytes, no whole number of words: {AGAIN}")
        return np.frombuffer(data, np.uint32)

    def choose(self, candidates: Sequence[Plan], /) -> Plan:
        """The first that was built; else the first, if it can be built; else one that pads to rows that were built.

        Without any of these the last: `instructions` then says what to do.
        """
        with self._lock:
            for candidate in candidates:
                if self._has(candidate):
                    return candidate
            if self._build and _tools_error() is None:
                return candidates[0]
            return self._padded(candidates[-1]) or candidates[-1]

    def _padded(self, plan: Plan) -> Plan | None:
        """The cheapest plan that runs the problem with more rows of padding, on what was built."""
        layout = plan.layout
        if plan.configuration.op is not Op.GEMM or not isinstance(layout, Layout):
            return None
        try:
            known = self._manifest()
        except ManifestError:
            return None
        found = []
        for built in known.built.values():
            config = built.configuration
            same = config.op is Op.GEMM and config.columns == layout.columns and config.weights == Weights.of(layout)
            for stream in built.streams.values() if same else ():
                pads_alike = (stream.k, stream.n) == (layout.k_tiles * KT, layout.n_padded)
                if pads_alike and stream.rows >= plan.m:
                    with contextlib.suppress(PlanError):
                        found.append(_with_rows(layout, plan.m, built, stream))
        usable = [candidate for candidate in found if self._has(candidate)]
        return min(usable, key=lambda candidate: candidate.costs.total, default=None)

    def _has(self, plan: Plan) -> bool:
        try:
            self._manifest().find(plan)
        except ManifestError:
            return False
        return True

    def _manifest(self) -> Manifest:
        """The manifest as it is now: another process may have added to it."""
        path = self.folder / manifest.NAME
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            stamp = (0, 0, 0)
        if self._read is None or self._read[0] != stamp:
            try:
                self._read = stamp, manifest.read(self.folder)
            except ManifestError as error:
                self._read = None
                raise ArtifactsError(f"{error}; another folder can be named in ${ENVIRONMENT}") from None
        return self._read[1]

    def _configuration(self, known: Manifest, plan: Plan) -> Built:
        """What was built of the plan's configuration, if it is of today's sources."""
        config = plan.configuration
        built = known.built.get(config.name)
        if built is None:
            raise ArtifactsError(f"{self.folder}: {_missing(known, plan)}; {command(plan, self.folder)}")
        from tilefuse.provenance import xclbin_sources

        today, then = xclbin_sources(config), known.provenances[built.xclbin.provenance].sources
        changed = sorted(name for name in today.keys() | then.keys() if today.get(name) != then.get(name))
        if changed:
            more = f" and {len(changed) - 2} more" if len(changed) > 2 else ""
            raise ArtifactsError(
                f"{self.folder}: {built.xclbin.file} was built from other sources than this tilefuse's "
                f"({', '.join(changed[:2])}{more}): {AGAIN}"
            )
        return built

    def _check_tools(self, known: Manifest, built: Built, stream: Stream) -> None:
        """Placement and routing are mlir-aie's: a stream of another version may address another place."""
        tools = [known.provenances[of.provenance].toolchain.get("mlir_aie") for of in (built.xclbin, stream.artifact)]
        if tools[0] != tools[1]:
            raise ArtifactsError(
                f"{self.folder}: {built.xclbin.file} was built with mlir_aie {tools[0]}, and {stream.artifact.file} "
                f"with {tools[1]}, which may place things elsewhere: {AGAIN}"
            )

    def _build_missing(self, plan: Plan) -> None:
        """Builds a stream, and its xclbin if need be; another process at it is waited for.

        Raises:
            ArtifactsError: The tools are not installed, or it does not compile.
        """
        missing = self._missing_text(plan)
        problem = _tools_error() if self._build else "building is switched off"
        if problem is not None:
            raise ArtifactsError(
                f"{missing}, and can't be built here ({problem}). Where the tools are: {command(plan, self.folder)}"
            )
        from tilefuse import xclbins

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):
                self._read = None
                if not self._has(plan):
                    failures = xclbins.build_one(plan, self.folder)
                    if failures:
                        raise ArtifactsError(f"{missing}, and building it failed: {failures[0]}")
        except OSError as error:
            raise ArtifactsError(
                f"{missing}, and {self.folder} can't be written ({error.strerror}): name another folder in "
                f"${ENVIRONMENT}"
            ) from None
        except TileFuseError as error:
            if isinstance(error, ArtifactsError):
                raise
            raise ArtifactsError(f"{missing}, and building it failed: {error}") from None
        finally:
            self._read = None

    def _missing_text(self, plan: Plan) -> str:
        try:
            known = self._manifest()
        except ManifestError:
            if os.path.exists(self.folder / manifest.NAME):
                raise  # damaged, or of another version: nothing is built over it
            return f"{self.folder} has no {manifest.NAME} (${ENVIRONMENT} may name another folder)"
        try:
            known.find(plan)
        except ManifestError as error:
            return (
                f"{self.folder}: {error}"
                if plan.configuration.name in known.built
                else f"{self.folder}: {_missing(known, plan)}"
            )
        return f"{self.folder}: {manifest.stream_name(plan)} is missing"


def command(plan: Plan, folder: Path) -> str:
    """The command that builds what runs ``plan``, for messages."""
    layout = plan.layout
    scheme = plan.configuration.weights.tag
    options = [f"--shape {plan.m}x{layout.k}x{layout.n}", f"--scheme {scheme}"]
    if layout.columns != 8:
        options.append(f"--columns {layout.columns}")
    if plan.configuration.streams != 1:
        options.append(f"--streams {plan.configuration.streams}")
    return f"run `python -m tilefuse.xclbins {' '.join(options)} --output {folder}`"


def _missing(known: Manifest, plan: Plan) -> str:
    """Which configuration was not built, and whether only the number of columns is to blame."""
    config = plan.configuration
    problem = f"M = {plan.m}, K = {plan.k}, N = {plan.n} ({config.weights.tag}) takes {config.name}.xclbin"
    columns = sorted(
        {
            built.configuration.columns
            for built in known.built.values()
            if (built.configuration.op, built.configuration.weights) == (config.op, config.weights)
        }
    )
    if columns and config.columns not in columns:
        counts = ", ".join(map(str, columns))
        return (
            f"{problem}; the layer is packed for {config.columns} columns, and those that were built are for {counts}"
        )
    return f"{problem}, which was not built"


def _with_rows(layout: Layout, m: int, built: Built, stream: Stream) -> Plan:
    config = built.configuration
    found = plan.gemm(layout, stream.rows, tiles=config.tiles, bands=stream.bands, configurations=(config,))
    return replace(found, m=m)


def _tools_error() -> str | None:
    """Why nothing can be built here, or None."""
    from tilefuse.xclbin_tools import find_tools

    try:
        find_tools()
    except ToolchainError as error:
        return str(error)
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from building into a folder at the same time."""
    import fcntl

    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
