"""From a layer and a number of rows to the plans that compute it: which configuration, and in how many parts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from tilefuse import arch, plan
from tilefuse.configurations import Configuration, Op, Weights
from tilefuse.errors import PlanError
from tilefuse.layout import Layout
from tilefuse.manifest import stream_name
from tilefuse.plan import Plan
from tilefuse.runtime.artifacts import Artifacts
from tilefuse.runtime.buffers import Piece, pieces_of, size_class

SWITCH_SECONDS = 2.7e-3
"""What it costs to go from one configuration to another (observed: 2.67 ms between two contexts)."""

MOST_JOBS = 512
"""Jobs that are kept."""

GEMV_STREAMS = (1, 2)
"""Weight streams of a column to choose among, for one row."""


@dataclass(frozen=True, eq=False)
class Step:
    """One dispatch.

    Attributes:
        index: Of the piece of the layer.
        piece: Which outputs.
        row: First row of x and y.
        plan: How.
        name: Of the instruction stream.
        title: For messages.
    """

    index: int
    piece: Piece
    row: int
    plan: Plan
    name: str
    title: str
    x_bytes: int
    y_bytes: int
    x_size: int
    """Bytes of the buffer that the activations are in, and of the results' below."""
    y_size: int


class Planner:
    """Plans what a device is asked for, and keeps it.

    Args:
        artifacts: What there is to run.
        most_bytes: Bytes of a buffer at most; larger problems go in parts.
    """

    def __init__(self, artifacts: Artifacts, most_bytes: int) -> None:
        self._artifacts, self._most = artifacts, most_bytes
        self._lock = threading.Lock()
        self._jobs: OrderedDict[tuple[Layout, int], tuple[Step, ...]] = OrderedDict()

    def steps(self, layout: Layout, rows: int, is_open: Callable[[], Collection[Configuration]]) -> tuple[Step, ...]:
        """The dispatches of ``rows`` rows.

        Args:
            layout: The packed layer.
            rows: At least 1.
            is_open: Gives the configurations on the device: one of these is taken if what it costs more is less than
                a change.

        Raises:
            PlanError: The array can't run it.
        """
        key = (layout, rows)
        found = self._jobs.get(key)
        if found is None:
            with self._lock:
                found = self._jobs.get(key)
                if found is None:
                    found = self._jobs[key] = tuple(self._plan(layout, rows, is_open()))
                    if len(self._jobs) > MOST_JOBS:
                        self._jobs.popitem(last=False)
        return found

    def _plan(self, layout: Layout, rows: int, is_open: Collection[Configuration]) -> list[Step]:
        found = []
        for index, piece in enumerate(pieces_of(layout, self._most)):
            row = 0
            while row < rows:
                chosen = self._chunk(piece.layout, rows - row, is_open)
                x_bytes, y_bytes = arch.WORD * chosen.x_words, arch.WORD * chosen.y_words
                title = f"{chosen.configuration.op} of {chosen.m} x {chosen.k} by {chosen.k} x {chosen.n}"
                found.append(
                    Step(
                        index,
                        piece,
                        row,
                        chosen,
                        stream_name(chosen),
                        f"{title} on {chosen.configuration.name}",
                        x_bytes,
                        y_bytes,
                        size_class(x_bytes),
                        size_class(y_bytes),
                    )
                )
                # Built now if it must be: no context is waited for meanwhile.
                self._artifacts.instructions(chosen)
                row += chosen.m
        return found

    def _chunk(self, layout: Layout, rows: int, is_open: Collection[Configuration]) -> Plan:
        """The plan of as many rows as fit a buffer."""
        if rows == 1:
            return self._artifacts.choose(_gemvs(layout))
        # Rows are padded by less than the largest row block; the rest of a buffer is theirs alone.
        row_bytes = max(layout.k_tiles * 144, 2 * layout.n_padded)
        chunk = min(rows, max(1, self._most // row_bytes))
        while True:
            try:
                chosen = self._gemm(layout, chunk, is_open)
                if arch.WORD * max(chosen.x_words, chosen.y_words) <= self._most or chunk == 1:
                    return chosen
            except PlanError:
                if chunk == 1 or (arch.WORD * layout.n_padded <= self._most and row_bytes * chunk <= self._most // 2):
                    raise
            chunk = max(1, chunk * 3 // 4)

    def _gemm(self, layout: Layout, rows: int, is_open: Collection[Configuration]) -> Plan:
        best = plan.gemm(layout, rows)
        weights = Weights.of(layout)
        usable = [
            config
            for config in is_open
            if config.op is Op.GEMM and config.weights == weights and config.columns == layout.columns
        ]
        candidates = [best]
        if usable and best.configuration not in usable:
            try:
                other = plan.gemm(layout, rows, configurations=usable)
            except PlanError:
                pass
            else:
                if other.costs.total <= best.costs.total + SWITCH_SECONDS:
                    candidates.insert(0, other)
        return self._artifacts.choose(candidates)


def _gemvs(layout: Layout) -> list[Plan]:
    """Cheapest first, and of equal ones that with fewer streams."""
    found = [plan.gemv(layout, streams=streams) for streams in GEMV_STREAMS]
    return sorted(found, key=lambda candidate: candidate.costs.total)
