"""The libraries that are known, where each is looked for, and starting those that are there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.base import Contender
from peers.client import HUGE_PAGES, Peer, PeerError, PeerMissing


@dataclass(frozen=True)
class Entry:
    """A library.

    Attributes:
        name: What the command line calls it.
        adapter: ``MODULE[:VARIANT]`` in this package.
        home: Folder of its environment, among those that `install` makes; "" for the running one.
        environment: Variables that its process gets.
        worker: Module that the process runs.
    """

    name: str
    adapter: str
    home: str
    environment: Mapping[str, str] = field(default_factory=dict)
    worker: str = "peers.worker"


ENTRIES = (
    Entry("tilefuse", "tilefuse_packed", ""),
    Entry("tilefuse-avx2", "tilefuse_packed", "", {"TILEFUSE_CPU_LEVEL": "avx2"}),
    Entry("torch", "torch_aten", "torch"),
    Entry("zentorch", "zentorch_ops", "torch"),
    Entry("bitsandbytes", "bitsandbytes_nf4", "torch"),
    Entry("gptqmodel", "gptqmodel_int4", "torch"),
    Entry("onnxruntime", "onnxruntime_nbits", "onnxruntime"),
    Entry("openvino", "openvino_matmul", "openvino"),
    Entry("llama.cpp", "ggml_graph:llama", "llama"),
    Entry("ik_llama.cpp", "ggml_graph:ik", "ik_llama"),
    Entry("llama.cpp-avx2", "ggml_graph:llama-avx2", "avx2"),
    Entry("ik_llama.cpp-avx2", "ggml_graph:ik-avx2", "avx2"),
)


def python_of(entry: Entry, given: Mapping[str, str], folder: Path | None) -> str:
    """The interpreter to run ``entry`` with: the given one, that of its environment in ``folder``, or the running."""
    if entry.name in given:
        return given[entry.name]
    if folder is not None and entry.home:
        made = folder / entry.home / "bin" / "python"
        if made.exists():
            return str(made)
    return sys.executable


@dataclass(frozen=True)
class Started:
    """A library that is there: its process, versions, and contenders."""

    entry: Entry
    peer: Peer
    versions: dict[str, str]
    contenders: list[Contender]


def start(
    entries: Sequence[Entry], given: Mapping[str, str], folder: Path | None, threads: int
) -> tuple[list[Started], list[str]]:
    """Starts what can be started; what is missing or fails is told in the second list."""
    common = {
        **HUGE_PAGES,
        "OMP_NUM_THREADS": str(threads),
        "TILEFUSE_NUM_THREADS": str(threads),
        "TILEFUSE_DEVICE": "cpu",
    }
    started, failures = [], []
    for entry in entries:
        command = [python_of(entry, given, folder), "-m", entry.worker, entry.adapter]
        try:
            peer = Peer(entry.name, command, {**common, **entry.environment})
            versions, contenders = peer.hello()
        except PeerMissing as error:
            failures.append(f"not installed: {error}")
        except PeerError as error:
            failures.append(f"can't be run: {error}")
        else:
            started.append(Started(entry, peer, versions, contenders))
    return started, failures


def versions_of(libraries: Sequence[Started]) -> str:
    """All versions, comma-separated; both of what two processes have in different ones."""
    versions: dict[str, str] = {}
    for each in libraries:
        for name, version in each.versions.items():
            known = versions.setdefault(name, version)
            if version not in known.split(" and "):
                versions[name] = f"{known} and {version}"
    return ", ".join(f"{name} {version}" for name, version in versions.items())
