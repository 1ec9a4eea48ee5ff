"""Turns: every contender has one in every round, so that what slows the machine slows all of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from measure import Limits, Probes
from peers.accuracy import Errors
from peers.base import Contender
from peers.client import Peer, PeerError
from results import CaseResult, Measurement

FAR_BEHIND = 3.0
"""A contender that takes so many times the fastest of its class in the first round has no further turns."""


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Seat:
    """A contender and the process that it runs in."""

    contender: Contender
    peer: Peer

    @property
    def name(self) -> str:
        return self.contender.name


@dataclass(frozen=True)
class Turns:
    """How long to measure.

    Attributes:
        rounds: At most.
        seconds: Of calls in one turn, at least one call.
        budget: Seconds after which no further round starts; two are always made.
    """

    rounds: int
    seconds: float
    budget: float


class Guard:
    """Holds a lock by means of a command that runs another one undisturbed, such as ``flock FILE``.

    Without one it does nothing.

    Args:
        command: The command, before that which it runs.
        seconds: `rest` lets go after this long.
    """

    def __init__(self, command: Sequence[str] = (), seconds: float = 60.0) -> None:
        self._command = list(command)
        self._seconds = seconds
        self._since = 0.0
        self._process: subprocess.Popen[str] | None = None

    def hold(self) -> None:
        """Takes the lock, waiting for it, unless it is held.

        Raises:
            SystemExit: The command doesn't run what it is given.
        """
        if not self._command or self._process is not None:
            return
        holder = [sys.executable, "-c", "print('held', flush=True); input()"]
        self._process = subprocess.Popen(
            [*self._command, *holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "held":
            self.release()
            raise SystemExit(f"{self._command[0]} doesn't run what it is given")
        self._since = time.perf_counter()

    def rest(self) -> None:
        """Lets others have the lock if it was held for long."""
        if time.perf_counter() - self._since > self._seconds:
            self.release()

    def release(self) -> None:
        """Lets go of the lock."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate("\n")

    def __enter__(self) -> Guard:
        self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def load(seats: Sequence[Seat], folder: Path, cache_bytes: int, failed: Callable[[str], None]) -> dict[str, int]:
    """Gives every contender the weights in ``folder``; returns the bytes that a product of each reads."""
    found = {}
    for seat in seats:
        try:
            arguments = {"folder": str(folder), "name": seat.name, "cache_bytes": cache_bytes}
            found[seat.name] = int(seat.peer.number("load", "weight_bytes", **arguments))
        except PeerError as error:
            failed(f"{seat.name}: {error}")
    return found


def check(
    seats: Sequence[Seat], rows: int, weight_bytes: dict[str, int], failed: Callable[[str], None]
) -> dict[str, Errors]:
    """Gives every contender that has weights that many rows of x; returns the errors of those that computed.

    One that did not loses its entry in ``weight_bytes``.
    """
    found = {}
    for seat in [seat for seat in seats if seat.name in weight_bytes]:
        try:
            seat.peer.ask("bind", name=seat.name, rows=rows)
            found[seat.name] = Errors(**seat.peer.ask("check", name=seat.name))
        except (PeerError, TypeError) as error:
            failed(f"{seat.name}, M = {rows}: {error}")
            del weight_bytes[seat.name]
    return found


def take_turns(
    seats: Sequence[Seat],
    turns: Turns,
    sample: Callable[[], bool],
    failed: Callable[[str], None],
    guard: Guard | None = None,
    read: Callable[[], float] | None = None,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Times the contenders in turn, every round starting with another; ``sample`` probes the machine twice a round.

    A round in which ``sample`` returns False doesn't count, unless so many were lost already as there are to be.

    Returns:
        For every contender that did not fail its seconds a product, one a round; and for ours what ``read`` returned
        before each of these turns.
    """
    guard = guard or Guard()
    times: dict[str, list[float]] = {}
    reads: dict[str, list[float]] = {}
    playing = list(seats)
    start = time.perf_counter()
    kept = lost = 0
    while kept < turns.rounds and (kept < 2 or time.perf_counter() - start <= turns.budget):
        guard.rest()
        guard.hold()
        first = kept % max(1, len(playing))
        undisturbed = True
        here: dict[str, float] = {}
        before: dict[str, float] = {}
        for place, seat in enumerate([*playing[first:], *playing[:first]]):
            if place in (0, len(playing) // 2):
                undisturbed &= sample()
            if read is not None and seat.contender.ours:
                before[seat.name] = read()
            try:
                here[seat.name] = seat.peer.number("time", "seconds", name=seat.name, at_least=turns.seconds)
            except PeerError as error:
                failed(f"{seat.name}: {error}")
                times.pop(seat.name, None)
                playing.remove(seat)
        if not undisturbed and lost < turns.rounds:
            lost += 1
            continue
        for name, seconds in here.items():
            times.setdefault(name, []).append(seconds)
            if name in before:
                reads.setdefault(name, []).append(before[name])
        if kept == 0:
            playing = [seat for seat in playing if not far_behind(seat.contender, seats, times)]
        kept += 1
    return times, reads


def far_behind(contender: Contender, seats: Sequence[Seat], times: dict[str, list[float]]) -> bool:
    """Whether the first round showed that it is not the fastest of its class; ours never is."""
    key = (contender.bits, contender.activations, contender.level)
    of_class = [
        times[seat.name][0]
        for seat in seats
        if seat.name in times
        and key == (seat.contender.bits, seat.contender.activations, seat.contender.level)
        and not seat.contender.ours
    ]
    return not contender.ours and times[contender.name][0] > FAR_BEHIND * min(of_class)


def run_case(
    seats: Sequence[Seat],
    shape: tuple[int, int],
    rows: int,
    weight_bytes: dict[str, int],
    turns: Turns,
    probes: Probes,
    guard: Guard,
    failed: Callable[[str], None],
) -> CaseResult:
    """Checks and times the contenders that have weights, on that many rows, with ``guard`` held; see `check`."""
    here, disturbed = Limits(), Limits()

    def sample() -> bool:
        found = Limits()
        undisturbed = probes.sample(found)
        (here if undisturbed else disturbed).extend(found)
        return undisturbed

    guard.hold()
    errors = check(seats, rows, weight_bytes, failed)
    able = [seat for seat in seats if seat.name in errors]
    read = probes.read if rows == 1 else None
    times, reads = take_turns(able, turns, sample, failed, guard, read)
    guard.rest()
    if not here.read:
        here = disturbed
    measured = {
        name: Measurement(rounds, weight_bytes[name], errors[name], reads.get(name, []))
        for name, rounds in times.items()
    }
    return CaseResult(*shape, rows, here, measured)
