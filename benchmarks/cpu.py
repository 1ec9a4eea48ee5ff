"""tilefuse's CPU kernels against those of other libraries: ratios, share of what the machine can do, accuracy.

    python benchmarks/cpu.py                          # a subset in some ten minutes; writes docs/benchmarks/cpu.md
    python benchmarks/cpu.py --shapes all --batches all
    python benchmarks/cpu.py --quick                  # under a minute; prints only
    python benchmarks/cpu.py --make-peers DIR         # installs all peers, each where it gets along with its torch
    python benchmarks/cpu.py --peers DIR              # compares with those, too
    python benchmarks/cpu.py --peer-python torch=/some/venv/bin/python

Peers. Without --peers, those that the running environment has: ``pip install 'tilefuse[bench]'`` brings torch,
onnxruntime, openvino and bitsandbytes. zentorch takes one release of torch and no other, and ggml is compiled for this
CPU from the source distributions of llama-cpp-python and ik-llama-cpp-python: --make-peers makes environments for them
(some minutes, a C++ compiler and cmake). What is not installed is said, and left out.

Method. Every library has a process of its own. All have as many threads; huge pages are asked for on behalf of those
that allocate by malloc (GLIBC_TUNABLES=glibc.malloc.hugetlb=1, and torch's THP_MEM_ALLOC_ENABLE=1). Contenders take
turns, each in every round, as do probes of the machine's limits: reading from huge pages, and multiply-adds. A turn
starts with an untimed call and ends when the process's threads sleep. A round is taken again if a probe of arithmetic
in it fell below 0.7 of the best: something else ran. A contender that is three times slower than the fastest of its
class in the first round has no more turns. Ratios are medians over rounds of the ratio within a round, and so is
tilefuse's share of the DRAM bandwidth, which is measured before each of its turns; other figures are of medians. Below
64 rows a contender goes through copies of its weights, of distinct contents, that together exceed four times the last-
level cache; from there on arithmetic bounds the product, and peers alternate two copies. Contenders hold the same
weights where their formats can; errors are against float64 on each one's own.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import results
from call_overhead import call_overhead
from cpu_page import document
from interleave import Guard, Seat, Turns, load, run_case, say
from measure import Limits, Probes, cpu_model, default_threads, last_level_cache_bytes
from peers.install import make_peers
from peers.registry import ENTRIES, Started, start, versions_of
from peers.weights import make_case, save_case
from results import Run

from tilefuse.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
OUTPUT = ROOT / "docs" / "benchmarks" / "cpu.md"
IMAGES = ROOT / "docs" / "images"

# K x N of the linear layers of common models of 1 to 8 billion parameters.
SHAPES = (
    "4096x4096",
    "4096x1024",
    "4096x14336",
    "14336x4096",
    "2048x2048",
    "2048x11008",
    "11008x2048",
    "2048x16384",
    "16384x2048",
)
SUBSET = ("4096x4096", "14336x4096", "2048x2048")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 100, 128, 512, 2048)
FEW_BATCHES = (1, 4, 16, 64, 128, 512)


def measure(
    shapes: Sequence[tuple[int, int]],
    batches: Sequence[int],
    libraries: Sequence[Started],
    wanted: Callable[[str], bool],
    turns: Turns,
    guards: tuple[Guard, Guard],
    run: Run,
    keep: Callable[[], object],
) -> None:
    """Measures every case, adding to ``run``; ``keep`` is called after each.

    ``guards`` are held while weights are made and while it is timed.
    """
    seats = [Seat(contender, each.peer) for each in libraries for contender in each.contenders]
    seats = [seat for seat in seats if wanted(seat.name)]
    run.contenders |= {seat.name: seat.contender for seat in seats}
    probes, cache_bytes = Probes(), last_level_cache_bytes()

    def failed(what: str) -> None:
        say(what)
        run.failures.append(what)

    for k, n in shapes:
        with tempfile.TemporaryDirectory(prefix="tilefuse-bench-") as name:
            folder = Path(name)
            say(f"{k}x{n}: weights")
            guards[0].hold()
            save_case(make_case(k, n, max(batches)), folder)
            weight_bytes = load(seats, folder, cache_bytes, failed)
            if guards[0] is not guards[1]:
                guards[0].release()
            for m in batches:
                say(f"{k}x{n}, M = {m}")
                with_weights = [seat for seat in seats if seat.peer.alive]
                case = run_case(with_weights, (k, n), m, weight_bytes, turns, probes, guards[1], failed)
                run.cases.append(case)
                say(brief(run, case))
                keep()
            guards[1].release()
            for each in libraries:
                if each.peer.alive:
                    each.peer.ask("unload")


def brief(run: Run, case: results.CaseResult) -> str:
    """A line a comparison, for those who watch."""
    lines = []
    for comparison in results.COMPARISONS:
        compared = results.compare(run, case, comparison)
        if compared:
            reached, kind = results.share(run, case, comparison.ours)
            lines.append(f"  {comparison.ours}: {compared[0]:.2f}x {compared[1]}, {reached:.0%} of {kind}")
    return "\n".join(lines)


def facts_of(libraries: Sequence[Started], limits: Limits, threads: int, turns: Turns) -> dict[str, str]:
    """Where, when and with what it was measured."""
    low, high = results.spread(limits.read)
    peaks = [f"{kind} {sorted(rates)[len(rates) // 2] / 1e9:.0f}" for kind, rates in limits.arithmetic.items()]
    return {
        "Date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "CPU": cpu_model(),
        "Last-level cache": f"{last_level_cache_bytes() >> 20} MiB",
        "Threads": str(threads),
        "System": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "Versions": versions_of(libraries),
        "Rounds": f"up to {turns.rounds}, turns of {turns.seconds:g} s or one call",
        "Measured limits": f"reads from huge pages {limits.bandwidth / 1e9:.1f} GB/s "
        f"({low / 1e9:.1f} to {high / 1e9:.1f}); multiply-adds, in billions of operations a second: {', '.join(peaks)}",
    }


def parse_shape(text: str) -> tuple[int, int]:
    """``(K, N)`` of a text such as 4096x1024; ValueError for another, or where K is no multiple of 128."""
    k, n = map(int, text.split("x"))
    if min(k, n) < 1 or k % 128:
        raise ValueError(text)
    return k, n


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", default=",".join(SUBSET), help="K x N, comma-separated, or 'all' (default: %(default)s)")
    add("--batches", default=",".join(map(str, FEW_BATCHES)), help="values of M, or 'all' (default: %(default)s)")
    add("--only", default="", help="contenders whose names contain one of these, comma-separated, and tilefuse's")
    add("--threads", type=int, default=default_threads(), help="default: all CPUs (%(default)s)")
    add("--rounds", type=int, default=7, help="at most (default: %(default)s)")
    add("--seconds", type=float, default=0.08, help="at least, for one turn (default: %(default)s)")
    add("--budget", type=float, default=20.0, help="seconds after which a case gets no further round")
    add("--quick", action="store_true", help="2048x2048 at M = 1, 16 and 128, few rounds, no file unless --output")
    add("--peers", type=Path, metavar="DIR", help="environments that --make-peers made")
    add("--peer-python", action="append", default=[], metavar="NAME=PATH", help="interpreter for a library")
    add("--make-peers", type=Path, metavar="DIR", help="make environments with all peers, and end")
    add("--guard", default="", metavar="CMD", help="a command such as 'flock FILE' to hold while timing")
    add("--loading-guard", default="", metavar="CMD", help="one to hold while weights are made; the same: held on")
    add("--merge", type=Path, action="append", default=[], metavar="JSON", help="start from these earlier results")
    add("--report-only", action="store_true", help="measure nothing; write the page of what --merge names")
    add("--output", type=Path, help=f"where the page goes (default: {OUTPUT.relative_to(ROOT)})")
    add("--images", type=Path, default=IMAGES, help="where plots go, if matplotlib is there")
    add("--json", type=Path, help="write every figure there, too")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.shapes, arguments.batches, arguments.rounds, arguments.seconds = "2048x2048", "1,16,128", 3, 0.05
    elif arguments.output is None:
        arguments.output = OUTPUT
    names = SHAPES if arguments.shapes == "all" else arguments.shapes.split(",")
    try:
        arguments.shapes = [parse_shape(name) for name in names]
        batches = BATCHES if arguments.batches == "all" else arguments.batches.split(",")
        arguments.batches = [int(m) for m in batches]
        arguments.peer_python = dict(each.split("=", 1) for each in arguments.peer_python)
    except ValueError:
        parser.error(
            "--shapes takes K x N as in 4096x1024, K a multiple of 128, --batches whole numbers, both comma-separated; "
            "--peer-python NAME=PATH"
        )
    known = [entry.name for entry in ENTRIES]
    if unknown := set(arguments.peer_python) - set(known):
        parser.error(f"--peer-python: no library {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if min(arguments.threads, arguments.rounds, *arguments.batches) < 1:
        parser.error("--threads, --rounds and --batches must be at least 1")
    if arguments.report_only and not arguments.merge:
        parser.error("--report-only takes results with --merge")
    return arguments


def measure_all(arguments: argparse.Namespace) -> Run:
    """Starts the libraries and measures."""
    # Before tilefuse's pool is made: the probes use it.
    os.environ["TILEFUSE_NUM_THREADS"] = str(arguments.threads)
    turns = Turns(arguments.rounds, arguments.seconds, arguments.budget)
    only = list(filter(None, arguments.only.split(",")))

    def wanted(name: str) -> bool:
        return not only or name.startswith("tilefuse") or any(part in name for part in only)

    libraries, missing = start(ENTRIES, arguments.peer_python, arguments.peers, arguments.threads)
    for what in missing:
        say(what)
    run = Run({}, {}, failures=missing)
    guard, loading = Guard(shlex.split(arguments.guard)), Guard(shlex.split(arguments.loading_guard))
    guards = (guard if arguments.loading_guard == arguments.guard else loading), guard
    try:
        measure(
            arguments.shapes,
            arguments.batches,
            libraries,
            wanted,
            turns,
            guards,
            run,
            lambda: write_json(run, arguments.json),
        )
        with guards[1]:
            run.overhead = call_overhead()
    finally:
        for guard in guards:
            guard.release()
        for each in libraries:
            each.peer.close()
    limits = Limits()
    for case in run.cases:
        limits.extend(case.limits)
    run.facts = facts_of(libraries, limits, arguments.threads, turns)
    return run


def write_json(run: Run, path: Path | None) -> None:
    """Every figure, if there is a ``path``."""
    if path is not None:
        write_atomically(path, results.to_json(run).encode())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line says; returns the exit code."""
    arguments = parse_arguments(argv)
    if arguments.make_peers:
        return make_peers(arguments.make_peers)
    run = Run({}, {})
    for path in arguments.merge:
        run.merge(results.from_json(path.read_text()))
    if not arguments.report_only:
        run.merge(measure_all(arguments))
    write_json(run, arguments.json)
    if arguments.output is None:
        print(document(run, []))
        return 0
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.output, document(run, draw(run, arguments.images, arguments.output.parent)).encode())
    return 0


def draw(run: Run, images: Path, beside: Path) -> list[tuple[str, str]]:
    """Writes the plots; (what it shows, its path from ``beside``) of each, none without matplotlib."""
    try:
        from cpu_plots import write_plots
    except ImportError as error:
        say(f"no plots: {error}")
        return []
    images.mkdir(parents=True, exist_ok=True)
    return [(title, os.path.relpath(path, beside)) for title, path in write_plots(run, images)]


if __name__ == "__main__":
    sys.exit(main())
