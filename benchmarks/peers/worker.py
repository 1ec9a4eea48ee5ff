"""The process that one library runs in: takes requests on standard input, one JSON object a line, and answers likewise.

    python -m peers.worker MODULE[:VARIANT]      # with benchmarks/ on PYTHONPATH; started by `peers.client`

Requests have "do": "hello" (versions, contenders), "load" (a case's folder, a contender), "bind" (rows), "time",
"check", "unload". A failure is answered with "error", and the process goes on. What libraries print to standard output
goes to standard error, so that it can't be taken for an answer.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from peers.accuracy import errors
from peers.base import Adapter, Bound, Product, round_bf16
from peers.weights import Case, open_case

CHECKED_ROWS = 16
"""Rows that accuracy is taken over: rows are computed alike, and the reference is slow."""

CHECKED_CHANNELS = 512
"""Output channels that it is taken over, spread over all."""

SETTLE_SECONDS = 0.3
"""How long to wait at most until the library's threads sleep after a turn: some spin for a while."""


def time_calls(calls: Iterator[Callable[[], object]], seconds: float) -> tuple[float, int]:
    """Mean seconds of a call, over as many as take at least ``seconds`` together, and how many that were."""
    done = 0
    start = time.perf_counter()
    while True:
        next(calls)()
        done += 1
        elapsed = time.perf_counter() - start
        if elapsed >= seconds:
            return elapsed / done, done


def turn(calls: Iterator[Callable[[], object]], seconds: float, *, wake: bool) -> tuple[float, int]:
    """`time_calls` without collections of garbage, after an untimed call if ``wake``."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        if wake:
            next(calls)()
        return time_calls(calls, seconds)
    finally:
        if collecting:
            gc.enable()


def settle(limit: float = SETTLE_SECONDS) -> float:
    """Waits until no other thread of this process runs, at most ``limit`` seconds; returns how long it waited."""
    start = time.perf_counter()
    own = str(os.getpid())
    while (waited := time.perf_counter() - start) < limit:
        running = 0
        for task in Path("/proc/self/task").glob("[0-9]*"):
            try:
                state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            running += task.name != own and state == "R"
        if not running:
            return waited
        time.sleep(0.002)
    return waited


class Requests:
    """Answers requests by its methods of their names, those in ``KNOWN``."""

    KNOWN: tuple[str, ...] = ()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what ``request`` says; a failure is an answer, too."""
        arguments = dict(request)
        what = arguments.pop("do", None)
        if what not in self.KNOWN:
            return {"error": f"no such request: {what!r}"}
        try:
            result: dict[str, Any] = getattr(self, what)(**arguments)
            return result
        except Exception as error:  # whatever a library raises
            return {"error": f"{type(error).__name__}: {error}"[:500]}


class Worker(Requests):
    """Holds the products of one adapter; a method for each request."""

    KNOWN = ("hello", "load", "bind", "time", "check", "unload")

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._contenders = {contender.name: contender for contender in adapter.contenders()}
        self._folder = ""
        self._case: Case | None = None
        self._products: dict[str, Product] = {}
        self._bound: dict[str, tuple[Bound, Iterator[Callable[[], object]]]] = {}
        self._rows = 0
        self._weights: dict[str, Any] = {}
        self._last: dict[str, float] = {}

    def hello(self) -> dict[str, Any]:
        """Versions, and every contender."""
        return {
            "versions": self._adapter.versions(),
            "contenders": [asdict(contender) for contender in self._contenders.values()],
        }

    def load(self, folder: str, name: str, cache_bytes: int) -> dict[str, Any]:
        """Gives a contender the weights of the case in ``folder``."""
        if folder != self._folder or self._case is None:
            self.unload()
            self._case, self._folder = open_case(Path(folder)), folder
        self._products[name] = product = self._adapter.load(self._contenders[name], self._case, cache_bytes)
        return {"weight_bytes": product.weight_bytes}

    def bind(self, name: str, rows: int) -> dict[str, Any]:
        """Gives it that many rows of the case's activations; one call on each copy does what it leaves to the first."""
        assert self._case is not None
        self._rows = rows
        bound = self._products[name].bind(np.ascontiguousarray(self._case.x[:rows]))
        for call in bound.calls:
            call()
        self._bound[name] = (bound, itertools.cycle(bound.calls))
        self._last.pop(name, None)
        return {}

    def time(self, name: str, at_least: float) -> dict[str, Any]:
        """One turn: an untimed call, which wakes its threads, unless calls are long; then ``at_least`` seconds."""
        bound, calls = self._bound[name]
        mean, done = turn(calls, at_least, wake=self._last.get(name, 0.0) < at_least)
        self._last[name] = mean
        return {"seconds": mean / bound.products, "calls": done, "settled": settle()}

    def check(self, name: str) -> dict[str, Any]:
        """Its errors, against float64 on its own weights."""
        assert self._case is not None
        bound, _ = self._bound[name]
        rows = min(self._rows, CHECKED_ROWS)
        channels = np.unique(np.linspace(0, self._case.n - 1, CHECKED_CHANNELS).astype(np.int64))
        y = bound.output()
        if y.shape != (self._rows, self._case.n):
            raise ValueError(f"y has shape {list(y.shape)}")
        if name not in self._weights:
            self._weights[name] = self._products[name].dequantized(channels)
        # Most return bfloat16: what its rounding adds is nobody's merit or fault.
        return asdict(errors(round_bf16(y[:rows, channels]), self._case.x[:rows], self._weights[name]))

    def unload(self) -> dict[str, Any]:
        """Drops all weights."""
        for held in (self._bound, self._products, self._weights, self._last):
            held.clear()
        self._case, self._folder = None, ""
        gc.collect()
        return {}


def serve(worker: Requests, requests: TextIO, answers: TextIO) -> None:
    """Answers until the requests end."""
    for line in requests:
        answers.write(json.dumps(worker.answer(json.loads(line))) + "\n")
        answers.flush()


def adapter_of(name: str) -> Adapter:
    """The adapter in ``peers.MODULE``, of ``MODULE[:VARIANT]``; ImportError or OSError where its library is missing."""
    module, _, variant = name.partition(":")
    make = importlib.import_module(f"peers.{module}").adapter
    made: Adapter = make(variant) if variant else make()
    return made


def run_worker(make: Callable[[], Requests]) -> int:
    """Answers with what ``make`` gives; the exit code: 3 where its library is not here."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        worker = make()
    except (ImportError, OSError) as error:
        answers.write(json.dumps({"missing": f"{type(error).__name__}: {error}"[:500]}) + "\n")
        return 3
    serve(worker, sys.stdin, answers)
    return 0


def main() -> int:
    """Serves the adapter that the command line names."""
    return run_worker(lambda: Worker(adapter_of(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
