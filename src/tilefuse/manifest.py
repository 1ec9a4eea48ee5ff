"""What `make xclbins` has built: one xclbin a configuration, one instruction stream a shape, and what they came from.

A folder of artifacts has a ``manifest.json``. `read` refuses one of another version, and one that lists files that are
not there; `Manifest.find` gives what runs a plan, and `load` the bytes of an artifact, checked against its hash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from tilefuse.attention_configurations import AttentionConfiguration
from tilefuse.configurations import Configuration, Op, Weights
from tilefuse.errors import PlanError, TileFuseError
from tilefuse.files import sha256, sha256_of, write_atomically
from tilefuse.layout import KT
from tilefuse.plan import AttentionPlan, Plan

VERSION = 1

NAME = "manifest.json"

AGAIN = "run `make xclbins` again"

ADD = f"add the shape to designs/shapes.toml and {AGAIN}"

T = TypeVar("T")


class ManifestError(TileFuseError, ValueError):
    """A manifest is missing, of another version or damaged, or what it lists is not there."""


@dataclass(frozen=True)
class Artifact:
    """A file of the folder."""

    file: str
    """Its path in the folder, slashes between."""
    sha256: str
    inputs: str
    """Hash of all that it was made from: it is current as long as that doesn't change."""
    provenance: str
    """Key of `Manifest.provenances`."""


@dataclass(frozen=True)
class Stream:
    """An instruction stream: what the command processor runs for shapes that pad alike."""

    name: str
    """See `stream_name`."""
    rows: int
    """Rows of y, padding included."""
    k: int
    """Input channels, padding included."""
    n: int
    """Output channels, padding included."""
    bands: int
    parameters: tuple[int, ...]
    """Words that the host writes at the head of the activations."""
    tasks: str
    """Hash of the plan's tasks: what the stream does with the host's buffers."""
    problems: tuple[tuple[int, int, int], ...]
    """(M, K, N) that it was built for; others that pad alike run as well."""
    artifact: Artifact


@dataclass(frozen=True)
class Built:
    """An xclbin and its instruction streams."""

    configuration: Configuration
    kernel: str
    """Name of the kernel in the xclbin, for the driver."""
    xclbin: Artifact
    streams: Mapping[str, Stream] = field(default_factory=dict)
    """By name."""


@dataclass(frozen=True)
class AttentionStream:
    """An instruction stream of attention: the routing is in its descriptors."""

    name: str
    """See `stream_name`."""
    tasks: str
    """Hash of the plan's tasks."""
    problems: tuple[str, ...]
    """What it was built for, in words."""
    artifact: Artifact


@dataclass(frozen=True)
class AttentionBuilt:
    """An xclbin of attention and its instruction streams."""

    configuration: AttentionConfiguration
    kernel: str
    xclbin: Artifact
    streams: Mapping[str, AttentionStream] = field(default_factory=dict)
    """By name."""


@dataclass(frozen=True)
class Provenance:
    """What artifacts were made with and from."""

    toolchain: Mapping[str, str]
    """Tool -> version."""
    sources: Mapping[str, str]
    """Source -> its sha256."""

    @property
    def digest(self) -> str:
        """Hash of all of it."""
        return digest_of(self)


@dataclass(frozen=True)
class Manifest:
    """All artifacts of a folder."""

    built: Mapping[str, Built] = field(default_factory=dict)
    """By the configuration's name."""
    provenances: Mapping[str, Provenance] = field(default_factory=dict)
    """By their digests."""
    attention: Mapping[str, AttentionBuilt] = field(default_factory=dict)
    """By the configuration's name."""

    def find(self, plan: Plan) -> tuple[Built, Stream]:
        """What runs ``plan``.

        Raises:
            ManifestError: It was not built, or from another plan; the message says what to do.
        """
        name, shape = plan.configuration.name, stream_name(plan)
        built = self.built.get(name)
        problem = f"M = {plan.m}, K = {plan.k}, N = {plan.n} ({plan.configuration.weights.tag})"
        if built is None:
            raise ManifestError(
                f"{problem} takes {name}.xclbin, which was not built: add it to shapes.toml and {AGAIN}"
            )
        stream = built.streams.get(shape)
        if stream is None:
            raise ManifestError(f"{problem} takes the instruction stream {name}/{shape}, which was not built: {ADD}")
        if (stream.parameters, stream.tasks) != (plan.parameters, tasks_of(plan)):
            raise ManifestError(f"{name}/{shape} was built from another plan than today's: {AGAIN}")
        return built, stream

    def artifacts(self) -> list[Artifact]:
        """All of them."""
        products = [a for b in self.built.values() for a in (b.xclbin, *(s.artifact for s in b.streams.values()))]
        attention = [a for b in self.attention.values() for a in (b.xclbin, *(s.artifact for s in b.streams.values()))]
        return products + attention


def stream_name(plan: Plan | AttentionPlan) -> str:
    """What an instruction stream is called: padded rows, K and N, and bands of a GEMM.

    Plans of one configuration that agree in these have the same tasks, whatever M, K and N they pad. Of attention:
    queries and keys (or the number of sequences), heads, and a part of the tasks' hash, which stands for the routing.
    """
    if isinstance(plan, AttentionPlan):
        one = len(plan.lengths) == 1
        what = "{}x{}".format(*plan.lengths[0]) if one else f"{len(plan.lengths)}s"
        return f"{what}_{plan.heads}h{plan.kv_heads}_{tasks_of(plan)[:8]}"
    bands = f"_{plan.bands}b" if plan.configuration.op is Op.GEMM else ""
    return f"{plan.y_rows}x{plan.layout.k_tiles * KT}x{plan.layout.n_padded}{bands}"


def tasks_of(plan: Plan | AttentionPlan) -> str:
    """Hash of a plan's tasks, in their order."""
    return digest_of(plan.steps if isinstance(plan, AttentionPlan) else plan.segments)


def digest_of(value: Any) -> str:
    """Hash of dataclasses, mappings, lists, strings and numbers."""
    return sha256(json.dumps(value, sort_keys=True, default=_plain).encode())


def read(folder: Path, *, files: bool = True) -> Manifest:
    """The manifest of a folder.

    Args:
        folder: The folder of artifacts.
        files: Whether to refuse it where listed files are missing.

    Raises:
        ManifestError: There is none, it is damaged or of another version, or listed files are missing.
    """
    path = folder / NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"no {NAME} in {folder}: run `make xclbins`") from None
    except OSError as error:
        raise ManifestError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{path} is damaged ({error}): {AGAIN}") from None
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise ManifestError(f"{path} is of version {version!r}, and this tilefuse reads {VERSION}: {AGAIN}")
    try:
        manifest = _manifest(document)
    except (KeyError, TypeError, ValueError, AttributeError, PlanError) as error:
        raise ManifestError(f"{path} is damaged ({type(error).__name__}: {error}): {AGAIN}") from None
    if files:
        missing = [artifact.file for artifact in manifest.artifacts() if not os.path.isfile(folder / artifact.file)]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ManifestError(f"{path} lists {', '.join(missing[:3])}{more}, missing in {folder}: {AGAIN}")
    return manifest


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a folder, all of it or nothing. Provenances that no artifact names are left out.

    Raises:
        OSError: The folder can't be written.
    """
    used = {artifact.provenance for artifact in manifest.artifacts()}
    kept = {key: value for key, value in manifest.provenances.items() if key in used}
    document = {"version": VERSION, "built": manifest.built, "provenances": kept, "attention": manifest.attention}
    text = json.dumps(document, indent=1, sort_keys=True, default=_plain)
    write_atomically(folder / NAME, f"{text}\n".encode())


def load(folder: Path, artifact: Artifact) -> bytes:
    """The bytes of an artifact.

    Raises:
        ManifestError: It is missing, or its bytes are not those that were built.
    """
    path = folder / artifact.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"can't read {path}: {error.strerror}; {AGAIN}") from None
    if sha256(data) != artifact.sha256:
        raise ManifestError(f"{path} is not what was built (its hash differs from the manifest's): {AGAIN}")
    return data


def is_there(folder: Path, artifact: Artifact) -> bool:
    """Whether an artifact's file is there as it was built."""
    try:
        return sha256_of(folder / artifact.file) == artifact.sha256
    except OSError:
        return False


def _plain(value: Any) -> Any:
    """What json can't write itself: our dataclasses, and mappings of any kind."""
    if isinstance(value, Mapping):
        return dict(value)
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _manifest(document: dict[str, Any]) -> Manifest:
    provenances = {
        key: Provenance(_strings(entry["toolchain"]), _strings(entry["sources"]))
        for key, entry in document["provenances"].items()
    }
    built = {name: _built(name, entry) for name, entry in document["built"].items()}
    attention = {name: _attention_built(name, entry) for name, entry in document.get("attention", {}).items()}
    manifest = Manifest(built, provenances, attention)
    for artifact in manifest.artifacts():
        if artifact.provenance not in provenances:
            raise ValueError(f"{artifact.file} has no provenance")
    return manifest


def _built(name: str, entry: dict[str, Any]) -> Built:
    values = dict(entry["configuration"])
    weights = _record(Weights, values["weights"])
    for number in (weights.tile_bytes, weights.bits, weights.groups):
        _integer(number)
    values["op"], values["weights"] = Op(values["op"]), weights
    configuration = _record(Configuration, values)
    if configuration.name != name:
        raise ValueError(f"{name} is called {configuration.name} now")
    streams = {key: _stream(key, stream) for key, stream in entry["streams"].items()}
    return Built(configuration, _string(entry["kernel"]), _artifact(entry["xclbin"]), streams)


def _attention_built(name: str, entry: dict[str, Any]) -> AttentionBuilt:
    configuration = _record(AttentionConfiguration, entry["configuration"])
    if configuration.name != name:
        raise ValueError(f"{name} is called {configuration.name} now")
    streams = {}
    for key, values in entry["streams"].items():
        problems = tuple(_string(problem) for problem in values["problems"])
        streams[key] = AttentionStream(
            _string(values["name"]), _string(values["tasks"]), problems, _artifact(values["artifact"])
        )
        if streams[key].name != key:
            raise ValueError(f"{key} is called {streams[key].name}")
    return AttentionBuilt(configuration, _string(entry["kernel"]), _artifact(entry["xclbin"]), streams)


def _stream(name: str, entry: dict[str, Any]) -> Stream:
    values = dict(entry)
    values["artifact"] = _artifact(values["artifact"])
    values["parameters"] = tuple(_integer(word) for word in values["parameters"])
    values["problems"] = tuple((_integer(m), _integer(k), _integer(n)) for m, k, n in values["problems"])
    for key in ("rows", "k", "n", "bands"):
        _integer(values[key])
    _string(values["tasks"])
    stream = _record(Stream, values)
    if stream.name != name:
        raise ValueError(f"{name} is called {stream.name}")
    return stream


def _artifact(entry: dict[str, Any]) -> Artifact:
    artifact = _record(Artifact, _strings(entry))
    # Nothing outside the folder is ever opened.
    path = PurePosixPath(artifact.file)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in artifact.file:
        raise ValueError(f"{artifact.file} is no path in the folder")
    return artifact


def _record(kind: type[T], values: Mapping[str, Any]) -> T:
    return kind(**values)


def _strings(entry: Mapping[str, Any]) -> dict[str, str]:
    return {key: _string(value) for key, value in entry.items()}


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value
