"""Xclbins and instruction streams of the emulated device, made when they are asked for.

They are in a folder with a manifest, like those for the hardware: `tilefuse.manifest` reads and checks them.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tilefuse import __version__, manifest
from tilefuse.configurations import Configuration
from tilefuse.emulator import instructions, xclbin_file
from tilefuse.files import sha256, write_atomically
from tilefuse.layout import KT
from tilefuse.manifest import Artifact, Built, Manifest, ManifestError, Provenance, Stream
from tilefuse.plan import Plan
from tilefuse.provenance import stream_sources, xclbin_sources
from tilefuse.runtime.artifacts import Xclbin

TOOLCHAIN = {"emulator": __version__}
"""What artifacts are made with, in the manifest."""


class EmulatedArtifacts:
    """What `tilefuse.runtime.artifacts.Artifacts` asks for, on demand.

    Args:
        folder: Where the files go; what is there already is used if it is current. A temporary one when None, which
            goes with this object.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="tilefuse-emulated-") if folder is None else None
        self.folder = Path(self._temporary.name) if self._temporary is not None else Path(folder or "")
        self._lock = threading.RLock()
        self._sources: dict[str, tuple[Provenance, Provenance]] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._manifest = manifest.read(self.folder)
        except ManifestError:
            self._manifest = Manifest()

    def xclbin(self, plan: Plan, /) -> Xclbin:
        """The xclbin of the plan's configuration.

        Raises:
            ManifestError: Its file was changed since it was written.
        """
        with self._lock:
            built = self._built(plan.configuration)
            manifest.load(self.folder, built.xclbin)
        return Xclbin(self.folder / built.xclbin.file, built.kernel, built.xclbin.sha256)

    def instructions(self, plan: Plan, /) -> instructions.Words:
        """The plan's instruction stream: uint32 [words].

        Raises:
            ManifestError: Its file was changed since it was written.
        """
        with self._lock:
            try:
                _, stream = self._manifest.find(plan)
                current = stream.artifact.provenance == self._provenances(plan.configuration)[1].digest
            except ManifestError:
                current = False
            if not current:
                stream = self._add(plan)
            return np.frombuffer(manifest.load(self.folder, stream.artifact), np.uint32)

    def choose(self, candidates: Sequence[Plan], /) -> Plan:
        """The first: all can be made."""
        return candidates[0]

    def close(self) -> None:
        """Removes the folder, if it is a temporary one."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def _provenances(self, configuration: Configuration) -> tuple[Provenance, Provenance]:
        """Of xclbins and of streams, as the sources were when this was made."""
        found = self._sources.get(configuration.name)
        if found is None:
            found = self._sources[configuration.name] = (
                Provenance(TOOLCHAIN, xclbin_sources(configuration)),
                Provenance(TOOLCHAIN, stream_sources(configuration)),
            )
        return found

    def _built(self, configuration: Configuration) -> Built:
        built = self._manifest.built.get(configuration.name)
        provenance, _ = self._provenances(configuration)
        if built is not None and built.xclbin.provenance == provenance.digest:
            return built
        data = xclbin_file.dump(configuration)
        artifact = self._write(f"{configuration.name}.xclbin", data, provenance)
        built = Built(configuration, xclbin_file.KERNEL, artifact)
        self._record(built, provenance)
        return built

    def _add(self, plan: Plan) -> Stream:
        configuration, name = plan.configuration, manifest.stream_name(plan)
        built, (_, provenance) = self._built(configuration), self._provenances(configuration)
        data = instructions.encode(plan).tobytes()
        stream = Stream(
            name=name,
            rows=plan.y_rows,
            k=plan.layout.k_tiles * KT,
            n=plan.layout.n_padded,
            bands=plan.bands,
            parameters=plan.parameters,
            tasks=manifest.tasks_of(plan),
            problems=((plan.m, plan.k, plan.n),),
            artifact=self._write(f"{configuration.name}/{name}.bin", data, provenance),
        )
        self._record(replace(built, streams={**built.streams, name: stream}), provenance)
        return stream

    def _write(self, file: str, data: bytes, provenance: Provenance) -> Artifact:
        path = self.folder / file
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, data)
        return Artifact(file, sha256(data), sha256(data), provenance.digest)

    def _record(self, built: Built, provenance: Provenance) -> None:
        provenances = {**self._manifest.provenances, provenance.digest: provenance}
        self._manifest = Manifest({**self._manifest.built, built.configuration.name: built}, provenances)
        manifest.write(self.folder, self._manifest)
