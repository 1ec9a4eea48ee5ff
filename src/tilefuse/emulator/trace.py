"""Traces for Chrome's viewer and Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefuse import arch
from tilefuse.files import write_atomically

if TYPE_CHECKING:
    from tilefuse.emulator.timing import Trace


def write(trace: Trace, path: Path) -> None:
    """Writes ``trace`` to ``path``, whole or not at all. Times are microseconds, modelled."""
    microseconds = 1e6 / arch.CLOCK_HZ
    tracks = {track: i for i, track in enumerate(dict.fromkeys(span[0] for span in trace.spans))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "XDNA2 array (modelled)"}}
    ]
    events += [
        {"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": track}} for track, i in tracks.items()
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": tracks[track],
            "name": name,
            "ts": begin * microseconds,
            "dur": (end - begin) * microseconds,
        }
        for track, begin, end, name in trace.spans
    ]
    events += [
        {"ph": "C", "pid": 0, "name": f"tasks, {label}", "ts": time * microseconds, "args": {"in flight": number}}
        for label, depths in trace.depths.items()
        for time, number in depths
    ]
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}).encode())
