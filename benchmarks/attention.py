"""tilefuse's attention against that of other libraries: ratios, share of what the machine can do, accuracy.

    python benchmarks/attention.py --peers DIR        # L = 2048 and 8192; writes docs/benchmarks/attention.md
    python benchmarks/attention.py --quick            # L = 512, prints only
    python benchmarks/attention.py --lengths 1024,4096 --heads 16/16 --d 64 --print
    python benchmarks/attention.py --decode 8192      # one query on as many keys, too
    python benchmarks/cpu.py --make-peers DIR         # makes the peers' environments, once

Method. That of `benchmarks/cpu.py`: a process a library, all with as many threads, turns in every round, rounds taken
again where a probe of arithmetic fell below 0.7 of the best. Figures are of each contender's fastest round; --merge
adds those of earlier runs. All have the same bfloat16 q, k and v; the errors are of
16 queries of every head against float64, results rounded to bfloat16 first.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from attention_page import document, write_plot
from attention_results import (
    BASE,
    AttentionCase,
    AttentionRun,
    Measured,
    fastest_peer,
    from_json,
    times_faster,
    to_json,
)
from interleave import Guard, Seat, Turns, say, take_turns
from measure import Limits, Probes, cpu_model, default_threads
from page import FOLDER
from peers.attention import make_attention, save_attention
from peers.base import Contender
from peers.client import PeerError
from peers.registry import Entry, Started, start, versions_of

from tilefuse.files import write_atomically

OUTPUT = FOLDER / "attention.md"
IMAGES = FOLDER.parent / "images"

WORKER = "peers.attention"
ENTRIES = (
    Entry("tilefuse", "attention_tilefuse", "", worker=WORKER),
    Entry("tilefuse-avx2", "attention_tilefuse", "", {"TILEFUSE_CPU_LEVEL": "avx2"}, WORKER),
    Entry("torch", "attention_torch:torch", "torch", worker=WORKER),
    Entry("zentorch", "attention_torch:zentorch", "torch", worker=WORKER),
    Entry("ik_llama.cpp", "attention_ggml:ik", "ik_llama", worker=WORKER),
    Entry("llama.cpp", "attention_ggml:llama", "llama", worker=WORKER),
)

PROBE_BYTES = 64 << 20
"""What is read isn't looked at: attention is bound by arithmetic."""


def measure_case(
    seats: Sequence[Seat],
    shape: tuple[int, int, int, int, int],
    turns: Turns,
    probes: Probes,
    guards: tuple[Guard, Guard],
    failed: Callable[[str], None],
) -> AttentionCase:
    """Checks and times the contenders on one case, (heads, kv heads, queries, keys, d).

    ``guards`` are held while operands are made and results checked, and while it is timed.
    """
    loading, guard = guards
    here, disturbed = Limits(), Limits()

    def sample() -> bool:
        found = Limits()
        undisturbed = probes.sample(found)
        (here if undisturbed else disturbed).extend(found)
        return undisturbed

    errors = {}
    able = []
    with tempfile.TemporaryDirectory(prefix="tilefuse-bench-") as name:
        loading.hold()
        save_attention(make_attention(*shape), Path(name))
        for seat in seats:
            try:
                seat.peer.ask("load", folder=name, name=seat.name)
                errors[seat.name] = seat.peer.ask("check", name=seat.name)
                able.append(seat)
            except PeerError as error:
                failed(f"{seat.name}, L = {shape[3]}: {error}")
        loading.release()
        times, _ = take_turns(able, turns, sample, failed, guard)
    guard.release()
    for peer in {id(seat.peer): seat.peer for seat in seats}.values():
        if peer.alive:
            peer.ask("unload")
    measured = {name: Measured(rounds, errors[name]["mean"], errors[name]["largest"]) for name, rounds in times.items()}
    return AttentionCase(*shape, here if here.read else disturbed, measured)


def plays(contender: Contender, queries: int) -> bool:
    """Whether it is measured with so many queries: a cache with one, INT8 tiles of arrays with more."""
    if not contender.ours:
        return True
    one = queries == 1
    return contender.name == BASE or one == ("cache" in contender.name)


def brief(run: AttentionRun, case: AttentionCase) -> str:
    """A line a contender, for those who watch."""
    peer = fastest_peer(run, case)
    lines = [f"{case.name}: the peak is {case.limits.peak(16)[0] / 1e9:.0f} GFLOP/s"]
    for name in sorted(case.measured, key=lambda name: case.measured[name].seconds):
        ratio = times_faster(case, name, peer) if peer else None
        lines.append(
            f"  {name:24} {case.measured[name].seconds * 1e3:9.2f} ms {case.rate(name) / 1e9:6.0f} GFLOP/s "
            f"{case.share(name):5.0%}  error {case.measured[name].mean:.1e}"
            + (f"  {ratio:.2f}x {peer}" if ratio is not None else "")
        )
    return "\n".join(lines)


def facts_of(libraries: Sequence[Started], limits: Limits, threads: int, turns: Turns) -> dict[str, str]:
    """Where, when and with what it was measured."""
    peaks = [f"{kind} {statistics.median(rates) / 1e9:.0f}" for kind, rates in limits.arithmetic.items()]
    return {
        "Date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "CPU": cpu_model(),
        "Threads": str(threads),
        "System": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "Versions": versions_of(libraries),
        "Rounds": f"up to {turns.rounds}, turns of {turns.seconds:g} s or one call",
        "Measured limits": f"multiply-adds, in billions of operations a second: {', '.join(peaks)}",
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--lengths", default="2048,8192", help="queries, as many keys; comma-separated (default: %(default)s)")
    add("--decode", default="", help="numbers of keys of one query, comma-separated")
    add("--heads", default="32/8", help="of queries / of keys and values (default: %(default)s)")
    add("--d", type=int, default=128, help="channels of a head (default: %(default)s)")
    add("--only", default="", help="contenders whose names contain one of these, comma-separated")
    add("--without", default="", help="not those whose names contain one of these")
    add("--threads", type=int, default=default_threads(), help="default: all CPUs (%(default)s)")
    add("--rounds", type=int, default=7, help="at most (default: %(default)s)")
    add("--seconds", type=float, default=0.2, help="at least, for one turn (default: %(default)s)")
    add("--budget", type=float, default=60.0, help="seconds after which a case gets no further round")
    add("--quick", action="store_true", help="L = 512, three rounds, no file unless --output")
    add("--peers", type=Path, metavar="DIR", help="environments that cpu.py --make-peers made")
    add("--peer-python", action="append", default=[], metavar="NAME=PATH", help="interpreter for a library")
    add("--guard", default="", metavar="CMD", help="a command such as 'flock FILE' to hold while timing")
    add("--loading-guard", default="", metavar="CMD", help="one to hold while operands are made")
    add("--merge", type=Path, action="append", default=[], metavar="JSON", help="start from these earlier results")
    add("--report-only", action="store_true", help="measure nothing; write the page of what --merge names")
    add("--print", action="store_true", dest="to_stdout", help="print the page instead of writing it")
    add("--output", type=Path, help="where the page goes (default: docs/benchmarks/attention.md)")
    add("--images", type=Path, default=IMAGES, help="where the plot goes, if matplotlib is there")
    add("--json", type=Path, help="write every figure there, too")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.lengths, arguments.rounds, arguments.seconds = "512", 3, 0.05
    elif arguments.output is None and not arguments.to_stdout:
        arguments.output = OUTPUT
    try:
        arguments.lengths = [int(text) for text in arguments.lengths.split(",") if text]
        arguments.decode = [int(text) for text in arguments.decode.split(",") if text]
        arguments.heads, arguments.kv_heads = map(int, arguments.heads.split("/"))
        arguments.peer_python = dict(each.split("=", 1) for each in arguments.peer_python)
    except ValueError:
        parser.error("--lengths and --decode take whole numbers, --heads two as in 32/8, --peer-python NAME=PATH")
    least = (arguments.threads, arguments.rounds, arguments.d, arguments.heads, arguments.kv_heads)
    if min(*least, *arguments.lengths, *arguments.decode) < 1 or arguments.heads % arguments.kv_heads:
        parser.error("all numbers must be at least 1, and the heads of q a multiple of those of k")
    known = [entry.name for entry in ENTRIES]
    if unknown := set(arguments.peer_python) - set(known):
        parser.error(f"--peer-python: no library {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if arguments.report_only and not arguments.merge:
        parser.error("--report-only takes results with --merge")
    return arguments


def measure_all(arguments: argparse.Namespace) -> AttentionRun:
    """Starts the libraries and measures."""
    # Before tilefuse's pool is made: the probes use it.
    os.environ["TILEFUSE_NUM_THREADS"] = str(arguments.threads)
    turns = Turns(arguments.rounds, arguments.seconds, arguments.budget)
    only, without = (list(filter(None, text.split(","))) for text in (arguments.only, arguments.without))
    libraries, missing = start(ENTRIES, arguments.peer_python, arguments.peers, arguments.threads)
    run = AttentionRun({}, {}, failures=missing)

    def failed(what: str) -> None:
        say(what)
        run.failures.append(what)

    seats = [Seat(contender, each.peer) for each in libraries for contender in each.contenders]
    seats = [seat for seat in seats if not only or any(part in seat.name for part in only)]
    seats = [seat for seat in seats if not any(part in seat.name for part in without)]
    run.contenders = {seat.name: seat.contender for seat in seats}
    if not seats:
        for each in libraries:
            each.peer.close()
        raise SystemExit("--only and --without leave no contender of those installed: see the names in the page")
    shapes = [(queries, queries) for queries in arguments.lengths] + [(1, keys) for keys in arguments.decode]
    guard, loading = Guard(shlex.split(arguments.guard)), Guard(shlex.split(arguments.loading_guard))
    probes = Probes(PROBE_BYTES)
    try:
        for queries, keys in shapes:
            here = [seat for seat in seats if seat.peer.alive and plays(seat.contender, queries)]
            shape = (arguments.heads, arguments.kv_heads, queries, keys, arguments.d)
            say(f"{queries} queries, {keys} keys")
            case = measure_case(here, shape, turns, probes, (loading, guard), failed)
            run.cases.append(case)
            say(brief(run, case))
    finally:
        guard.release()
        loading.release()
        for each in libraries:
            each.peer.close()
    limits = Limits()
    for case in run.cases:
        limits.extend(case.limits)
    run.facts = facts_of(libraries, limits, arguments.threads, turns)
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line says; returns the exit code."""
    arguments = parse_arguments(argv)
    run = AttentionRun({}, {})
    for path in arguments.merge:
        run.merge(from_json(path.read_text(encoding="utf-8")))
    if not arguments.report_only:
        run.merge(measure_all(arguments))
    if arguments.json:
        write_atomically(arguments.json, to_json(run).encode())
    if arguments.output is None:
        print(document(run, []))
        return 0
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.output, document(run, draw(run, arguments.images, arguments.output.parent)).encode())
    return 0


def draw(run: AttentionRun, images: Path, beside: Path) -> list[tuple[str, str]]:
    """Writes the plot; (what it shows, its path from ``beside``), none without matplotlib."""
    images.mkdir(parents=True, exist_ok=True)
    try:
        drawn = write_plot(run, images / "attention.svg")
    except ImportError as error:
        say(f"no plot: {error}")
        return []
    return [("Attention, GFLOP/s by length", os.path.relpath(images / "attention.svg", beside))] if drawn else []


if __name__ == "__main__":
    sys.exit(main())
