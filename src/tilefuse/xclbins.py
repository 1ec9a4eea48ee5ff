"""Builds an xclbin for each configuration and an instruction stream for each shape: ``make xclbins``.

    python -m tilefuse.xclbins [--output build/xclbins] [--shapes FILE] [--only TEXT] [--jobs N]
    python -m tilefuse.xclbins --shape MxKxN --scheme w4g128 [--columns 8] [--streams 1] [--output FOLDER]
    python -m tilefuse.xclbins --list
    python -m tilefuse.xclbins --emit-mlir [--output build/mlir]

Only an xclbin compiles cores: its kernel with Peano, then the design with aiecc. An instruction stream needs placement
and routing, which give the same result for every shape of a configuration, and no cores: aiecc asked for nothing else
compiles none. What is there and made from the same sources and tools is left alone. Artifacts get their names when they
are whole, and the manifest after them: an interrupted build goes on where it ended.

Exit code: 0; 1 when something does not compile or can't be written; 2 when a tool is missing or a shape can't run; 130
when interrupted.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from tilefuse import arch, kernels_build, manifest, shapes
from tilefuse.attention_configurations import AttentionConfiguration
from tilefuse.configurations import Configuration
from tilefuse.errors import PlanError, TileFuseError, ToolchainError
from tilefuse.files import print_text, sha256, write_atomically
from tilefuse.layout import KT
from tilefuse.manifest import (
    Artifact,
    AttentionBuilt,
    AttentionStream,
    Built,
    Manifest,
    ManifestError,
    Provenance,
    Stream,
)
from tilefuse.plan import AttentionPlan, Plan
from tilefuse.provenance import stream_sources, xclbin_sources
from tilefuse.shapes import Wanted
from tilefuse.xclbin_tools import Tools, aiecc_command, find_tools

KERNEL = "MLIR_AIE"
"""Name of the kernel in an xclbin, aiecc's own choice."""


_EMITTING = threading.Lock()

AnyConfiguration: TypeAlias = Configuration | AttentionConfiguration

AnyBuilt: TypeAlias = Built | AttentionBuilt

Chosen: TypeAlias = dict[AnyConfiguration, list[Wanted]]
"""The instruction streams to build, by the configuration that they run on."""


class XclbinBuildError(TileFuseError, RuntimeError):
    """aiecc fails, a kernel doesn't fit its core, or an artifact can't be written."""


@dataclass(frozen=True)
class Job:
    """A run of aiecc: an instruction stream, an xclbin, or both."""

    configuration: AnyConfiguration
    wanted: Wanted
    xclbin: bool
    stream: bool

    def __str__(self) -> str:
        parts = [f"{self.configuration.name}.xclbin"] if self.xclbin else []
        return " and ".join(parts + ([f"{self.configuration.name}/{self.wanted.name}.bin"] if self.stream else []))


@dataclass(frozen=True)
class Inputs:
    """What the artifacts of a configuration are made with and from."""

    xclbin: Provenance
    stream: Provenance

    @classmethod
    def of(cls, tools: Tools, configuration: AnyConfiguration) -> Inputs:
        """With these tools, from the sources as they are now."""
        # What an instruction stream holds is up to mlir-aie alone.
        mlir_aie = {"mlir_aie": tools.versions["mlir_aie"]}
        return cls(
            xclbin=Provenance(tools.versions, xclbin_sources(configuration)),
            stream=Provenance(mlir_aie, stream_sources(configuration)),
        )

    def xclbin_digest(self, configuration: AnyConfiguration) -> str:
        """Changes with whatever would change the xclbin."""
        return manifest.digest_of([self.xclbin, configuration, aiecc_command(None, "", xclbin="x", insts=None)])

    def stream_digest(self, configuration: AnyConfiguration, wanted: Wanted) -> str:
        """Changes with whatever would change an instruction stream."""
        command = aiecc_command(None, "", xclbin=None, insts="i")
        return manifest.digest_of([self.stream, configuration, wanted.name, manifest.tasks_of(wanted.plan), command])


class Builder:
    """Builds into a folder; its manifest is written after each artifact.

    Args:
        tools: The tools.
        output: The folder of artifacts.
        jobs: Compilers at a time.
        say: Takes a line for each artifact.
    """

    def __init__(self, tools: Tools, output: Path, jobs: int, say: Callable[[str], None]) -> None:
        self._tools, self._output, self._jobs, self._say = tools, output, jobs, say
        self._kernels = {kernel.name: kernel for kernel in kernels_build.configurations()}
        self._manifest = _manifest_of(output)

    def build(self, chosen: Chosen) -> list[XclbinBuildError]:
        """Builds what isn't current; returns what failed. The rest is built all the same.

        Raises:
            ToolchainError: A tool can't be run.
        """
        failures: list[XclbinBuildError] = []
        inputs = {configuration: Inputs.of(self._tools, configuration) for configuration in chosen}
        remaining: list[Job] = []
        # One after another: each compiles 32 cores, as many at a time as there are jobs.
        for configuration, streams in chosen.items():
            try:
                done = self._xclbin(configuration, streams, inputs[configuration])
            except XclbinBuildError as error:
                failures.append(error)
                continue
            remaining += [Job(configuration, w, False, True) for w in streams if w.name not in done]
        for job, made in self._run_all(remaining):
            if isinstance(made, XclbinBuildError):
                failures.append(made)
            else:
                self._record(job, made, inputs[job.configuration])
        return failures

    def _xclbin(self, configuration: AnyConfiguration, streams: list[Wanted], inputs: Inputs) -> set[str]:
        """Sees to the xclbin; returns the names of the streams that are current then."""
        self._forget_stale(configuration, inputs)
        current = self._current_streams(configuration, streams, inputs)
        built = self._built(configuration)
        if built is not None and self._is_current(built.xclbin, inputs.xclbin_digest(configuration)):
            return current
        first = next((wanted for wanted in streams if wanted.name not in current), streams[0])
        job = Job(configuration, first, True, first.name not in current)
        self._record(job, self._run(job, self._jobs), inputs)
        return current | {first.name}

    def _is_current(self, artifact: Artifact, inputs: str) -> bool:
        return artifact.inputs == inputs and manifest.is_there(self._output, artifact)

    def _current_streams(self, configuration: AnyConfiguration, streams: list[Wanted], inputs: Inputs) -> set[str]:
        built = self._built(configuration)
        found = {} if built is None else built.streams
        return {
            wanted.name
            for wanted in streams
            if wanted.name in found
            and self._is_current(found[wanted.name].artifact, inputs.stream_digest(configuration, wanted))
        }

    def _forget_stale(self, configuration: AnyConfiguration, inputs: Inputs) -> None:
        """Drops the streams made from other sources: they fit neither today's plans nor a new xclbin."""
        built = self._built(configuration)
        if built is None:
            return
        digest = inputs.stream.digest
        stale = {name for name, stream in built.streams.items() if stream.artifact.provenance != digest}
        if stale:
            files = [self._output / built.streams[name].artifact.file for name in stale]
            self._update(_without(built, stale))
            for file in files:
                file.unlink(missing_ok=True)

    def _run_all(self, jobs: list[Job]) -> Iterator[tuple[Job, dict[str, bytes] | XclbinBuildError]]:
        """Runs them, and gives each as it is done. What ends the loop early cancels those that have not begun."""

        def attempt(job: Job) -> dict[str, bytes] | XclbinBuildError:
            try:
                return self._run(job, 1)
            except XclbinBuildError as error:
                return error

        pool = ThreadPoolExecutor(self._jobs)
        try:
            pending: dict[Future[dict[str, bytes] | XclbinBuildError], Job] = {pool.submit(attempt, j): j for j in jobs}
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield pending.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, job: Job, jobs: int) -> dict[str, bytes]:
        """Runs aiecc in a folder of its own; returns the bytes of what it made, by the artifact's path."""
        config = job.configuration
        try:
            with tempfile.TemporaryDirectory(prefix=f".{config.name}.", dir=self._output) as name:
                folder = Path(name)
                if job.xclbin:
                    self._kernel(config, folder)
                # aiecc looks for kernel objects beside the MLIR.
                (folder / "design.mlir").write_text(_mlir(job.wanted.plan), encoding="utf-8")
                files = {}
                if job.xclbin:
                    files[f"{config.name}.xclbin"] = "design.xclbin"
                if job.stream:
                    files[f"{config.name}/{job.wanted.name}.bin"] = "insts.bin"
                command = aiecc_command(
                    self._tools,
                    "design.mlir",
                    xclbin="design.xclbin" if job.xclbin else None,
                    insts="insts.bin" if job.stream else None,
                    jobs=jobs,
                )
                self._aiecc(job, command, folder)
                return {path: _made(job, folder / file) for path, file in files.items()}
        except OSError as error:
            raise XclbinBuildError(f"{job}: can't write {error.filename or self._output}: {error.strerror}") from None

    def _kernel(self, configuration: AnyConfiguration, folder: Path) -> None:
        try:
            size = kernels_build.build(self._tools.kernels, self._kernels[configuration.kernel], folder)
        except kernels_build.KernelBuildError as error:
            raise XclbinBuildError(f"{configuration.name}: {error}") from None
        if size.stack is not None and size.stack > configuration.stack_bytes:
            raise XclbinBuildError(
                f"{configuration.name}: {configuration.kernel} has a stack frame of {size.stack} bytes, and the design "
                f"gives a core {configuration.stack_bytes}; keep its loops rolled"
            )

    def _aiecc(self, job: Job, command: list[str], folder: Path) -> None:
        environment = {**os.environ, "AIE_XCLBINUTIL": str(self._tools.xclbinutil)}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise ToolchainError(f"can't run {command[0]}: {error.strerror}") from None
        if done.returncode != 0:
            said = (done.stderr or done.stdout).rstrip() or "(it says nothing)"
            raise XclbinBuildError(f"{job} does not compile (exit code {done.returncode} of aiecc):\n{said}")

    def _record(self, job: Job, made: dict[str, bytes], inputs: Inputs) -> None:
        """Gives finished artifacts their names, then enters them into the manifest."""
        config = job.configuration
        built = self._built(config)
        digests = {}
        for path, data in made.items():
            target = self._output / path
            try:
                target.parent.mkdir(exist_ok=True)
                write_atomically(target, data)
            except OSError as error:
                raise XclbinBuildError(f"can't write {target}: {error.strerror}") from None
            digests[path] = sha256(data)
        if job.xclbin:
            path = f"{config.name}.xclbin"
            artifact = Artifact(path, digests[path], inputs.xclbin_digest(config), inputs.xclbin.digest)
            built = _with_xclbin(config, built, artifact)
        assert built is not None
        if job.stream:
            path = f"{config.name}/{job.wanted.name}.bin"
            digest = inputs.stream_digest(config, job.wanted)
            artifact = Artifact(path, digests[path], digest, inputs.stream.digest)
            built = _with_stream(built, job.wanted, artifact)
        self._update(built, inputs.xclbin, inputs.stream)
        self._say(f"built {job}")

    def _built(self, configuration: AnyConfiguration) -> AnyBuilt | None:
        if isinstance(configuration, AttentionConfiguration):
            return self._manifest.attention.get(configuration.name)
        return self._manifest.built.get(configuration.name)

    def _update(self, built: AnyBuilt, *provenances: Provenance) -> None:
        known = {**self._manifest.provenances, **{provenance.digest: provenance for provenance in provenances}}
        products, attention = dict(self._manifest.built), dict(self._manifest.attention)
        if isinstance(built, AttentionBuilt):
            attention[built.configuration.name] = built
        else:
            products[built.configuration.name] = built
        self._manifest = Manifest(products, known, attention)
        try:
            manifest.write(self._output, self._manifest)
        except OSError as error:
            raise XclbinBuildError(f"can't write {self._output / manifest.NAME}: {error.strerror}") from None


def _with_xclbin(configuration: AnyConfiguration, built: AnyBuilt | None, artifact: Artifact) -> AnyBuilt:
    """What is there of a configuration, with a new xclbin."""
    if built is not None:
        return replace(built, xclbin=artifact)
    if isinstance(configuration, AttentionConfiguration):
        return AttentionBuilt(configuration, KERNEL, artifact)
    return Built(configuration, KERNEL, artifact)


def _with_stream(built: AnyBuilt, wanted: Wanted, artifact: Artifact) -> AnyBuilt:
    """What is there of a configuration, with another instruction stream."""
    plan = wanted.plan
    if isinstance(built, AttentionBuilt):
        stream = AttentionStream(wanted.name, manifest.tasks_of(plan), wanted.layers, artifact)
        return replace(built, streams={**built.streams, wanted.name: stream})
    assert isinstance(plan, Plan)
    made = Stream(
        name=wanted.name,
        rows=plan.y_rows,
        k=plan.layout.k_tiles * KT,
        n=plan.layout.n_padded,
        bands=plan.bands,
        parameters=plan.parameters,
        tasks=manifest.tasks_of(plan),
        problems=wanted.problems,
        artifact=artifact,
    )
    return replace(built, streams={**built.streams, wanted.name: made})


def _without(built: AnyBuilt, names: set[str]) -> AnyBuilt:
    """What is there of a configuration, without some instruction streams."""
    if isinstance(built, AttentionBuilt):
        return replace(built, streams={name: s for name, s in built.streams.items() if name not in names})
    return replace(built, streams={name: s for name, s in built.streams.items() if name not in names})


def _manifest_of(output: Path) -> Manifest:
    """What is there already. A manifest that can't be used is none: everything is built again."""
    try:
        return manifest.read(output, files=False)
    except ManifestError:
        return Manifest()


def _made(job: Job, path: Path) -> bytes:
    if not path.is_file() or not (data := path.read_bytes()):
        raise XclbinBuildError(f"{job}: aiecc reports success and made no {path.name}")
    return data


def _mlir(plan: Plan | AttentionPlan) -> str:
    from tilefuse.designs.emit import mlir

    # One at a time: what IRON keeps in its modules is not made for threads.
    with _EMITTING:
        text: str = mlir(plan)
        return text


def build_one(plan: Plan, output: Path) -> list[XclbinBuildError]:
    """Builds what runs one plan into a folder that exists; returns what failed.

    Raises:
        ToolchainError: A tool is missing or can't be run.
    """
    wanted = Wanted(plan, ((plan.m, plan.k, plan.n),), ("",))
    builder = Builder(find_tools(), output, os.cpu_count() or 1, lambda line: None)
    return builder.build({plan.configuration: [wanted]})


def listing(chosen: Chosen) -> str:
    """What there is to build, with modelled times."""
    lines = []
    for configuration, streams in chosen.items():
        lines.append(f"{configuration.name}.xclbin: kernel {configuration.kernel}, {len(streams)} instruction streams")
        for wanted in streams:
            costs, layers = wanted.plan.costs, list(dict.fromkeys(wanted.layers))
            more = f" and {len(layers) - 2} more" if len(layers) > 2 else ""
            lines.append(
                f"  {wanted.name:<24} {wanted.plan.tasks:>5} tasks {costs.total * 1e6:>9.1f} us modelled, "
                f"bound by {costs.bound}: {', '.join(layers[:2])}{more}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tilefuse.xclbins", description="Builds the array's xclbins and instruction streams."
    )
    parser.add_argument("--output", type=Path, help="where they go (build/xclbins, or build/mlir)")
    parser.add_argument("--shapes", type=Path, help="the file of shapes (designs/shapes.toml unless said)")
    parser.add_argument("--shape", type=_shape, help="build for one product of M x K by K x N, as in 256x4096x4096")
    parser.add_argument("--scheme", help="how its weights are stored: bits, group, m for minima, as in w4g128")
    parser.add_argument("--columns", type=int, default=arch.COLUMNS, help="columns its weights are packed for")
    parser.add_argument("--streams", type=int, default=1, help="weight streams of a column, for M = 1")
    parser.add_argument("--only", default="", help="build what has this in CONFIGURATION/STREAM")
    parser.add_argument("--jobs", type=kernels_build.jobs, default=os.cpu_count(), help="compilers at a time")
    parser.add_argument("--list", action="store_true", help="print what there is to build")
    parser.add_argument("--emit-mlir", action="store_true", help="write the MLIR of each configuration instead")
    options = parser.parse_args(arguments)
    try:
        chosen = _chosen(_wanted(parser, options), options.only)
        if options.list:
            return _list(chosen)
        output = options.output or Path("build/mlir" if options.emit_mlir else "build/xclbins")
        if options.emit_mlir:
            return _emit(chosen, output)
        tools = find_tools()
        _make_folder(output)
        failures: Iterable[TileFuseError] = Builder(tools, output, options.jobs, print).build(chosen)
    except XclbinBuildError as error:
        failures = [error]
    except (PlanError, ToolchainError, ImportError) as error:
        print(f"tilefuse: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tilefuse: interrupted", file=sys.stderr)
        return 130
    for failure in failures:
        print(f"tilefuse: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _shape(text: str) -> tuple[int, int, int]:
    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape: write MxKxN, as in 256x4096x4096")
    m, k, n = map(int, sizes)
    return m, k, n


def _wanted(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Chosen:
    if options.shape is None:
        if options.scheme is not None:
            parser.error("--scheme goes with --shape")
        return shapes.wanted(shapes.read(options.shapes or shapes.default_file()))
    if options.scheme is None or options.shapes is not None:
        parser.error("--shape needs --scheme, and goes without --shapes")
    m, k, n = options.shape
    wanted = shapes.wanted_for(m, shapes.layout_of(k, n, options.scheme, options.columns), options.streams)
    chosen: Chosen = {wanted.plan.configuration: [wanted]}
    return chosen


def _chosen(wanted: Chosen, only: str) -> Chosen:
    chosen = {
        configuration: [stream for stream in streams if only in f"{configuration.name}/{stream.name}"]
        for configuration, streams in wanted.items()
    }
    chosen = {configuration: streams for configuration, streams in chosen.items() if streams}
    if not chosen:
        raise XclbinBuildError(f"nothing to build has {only!r} in its name; --list prints the names")
    return chosen


def _list(chosen: Chosen) -> int:
    try:
        print_text(f"{listing(chosen)}\n")
    except OSError as error:
        raise XclbinBuildError(f"can't write to standard output: {error.strerror}") from None
    return 0


def _emit(chosen: Chosen, output: Path) -> int:
    texts = {configuration.name: _mlir(streams[0].plan) for configuration, streams in chosen.items()}
    _make_folder(output)
    for name, text in texts.items():
        path = output / f"{name}.mlir"
        try:
            write_atomically(path, text.encode())
        except OSError as error:
            raise XclbinBuildError(f"can't write {path}: {error.strerror}") from None
        print(path)
    return 0


def _make_folder(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise XclbinBuildError(f"can't make the folder {output}: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
