"""How fast this machine is, which the choice of a device goes by: measured once and kept, or documented defaults.

A calibration reads a buffer larger than the caches, multiplies by a small packed layer with a few numbers of rows, and
stages activations for the array. It belongs to one CPU at one instruction-set level and number of threads. The file
says which; any other, or one that is damaged, is measured anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tilefuse import _core
from tilefuse._buffers import aligned_empty
from tilefuse.arrays import BFLOAT16, view_rows
from tilefuse.configurations import BAND_BYTES, BAND_ROWS
from tilefuse.errors import DeviceError
from tilefuse.files import write_atomically
from tilefuse.layout import KT, NT, ROWS, Layout
from tilefuse.packed import PackedLinear
from tilefuse.runtime.cpu import CpuDevice
from tilefuse.staging import stage_activations

_log = logging.getLogger("tilefuse")

FILE_FORMAT = 1
"""Bumped when a figure is measured otherwise; files of another format are ignored."""

Curve = tuple[tuple[int, float], ...]
"""(rows of activations, operations a second), rows rising from 1; a multiply-add is two operations."""


@dataclass(frozen=True)
class Rates:
    """What the machine does a second, at one instruction-set level and number of threads."""

    bandwidth: float
    """Bytes of weights read from memory, by all threads."""
    call: float
    """Seconds of a call that has next to nothing to do."""
    w4: Curve
    """Operations of the CPU kernels on 4-bit weights that are in the cache."""
    w8: Curve
    """On 8-bit weights."""
    staging: float
    """Bytes of the array's activations written: rounding, permuting, block floating point."""
    results: float
    """Bytes of the array's results copied out as float32."""
    source: str
    """"measured" or "default"."""

    def arithmetic(self, bits: int, weights: int, m: int) -> float:
        """Seconds that the CPU computes for ``m`` rows by ``weights`` weights.

        Between the rows of the curve, the time is interpolated; beyond the last, it grows with the rows. It may fall
        as a row is added: where the kernels for few rows give way to those for many.
        """
        rows, seconds = _seconds(self.w4 if bits == 4 else self.w8)
        at = bisect_left(rows, m)
        if at == len(rows):
            return weights * seconds[-1] * m / rows[-1]
        if rows[at] == m:
            return weights * seconds[at]
        share = (m - rows[at - 1]) / (rows[at] - rows[at - 1])
        return weights * (seconds[at - 1] + share * (seconds[at] - seconds[at - 1]))


@cache
def _seconds(curve: Curve) -> tuple[list[int], list[float]]:
    """The rows of the curve, and the seconds that each takes a weight."""
    return [m for m, _ in curve], [2 * m / rate for m, rate in curve]


# --- defaults ---------------------------------------------------------------------------------------------------------

DEFAULT_BANDWIDTH = 12e9, 60e9
"""Bytes a second of a thread, and of all together at most (assumed: LPDDR5X-7500 on 128 bits is 120e9)."""

DEFAULT_CALL = 5e-6
DEFAULT_STAGING = 2e9
DEFAULT_RESULTS = 10e9


def default_rates(level: str, threads: int) -> Rates:
    """The documented defaults (docs/routing.md): as if every thread had a core like the one they were measured on."""
    w4, w8 = _DEFAULT_CURVES.get(level, _DEFAULT_CURVES["portable"])
    thread, most = DEFAULT_BANDWIDTH
    return Rates(
        bandwidth=min(thread * threads, most),
        call=DEFAULT_CALL,
        w4=tuple((m, rate * threads) for m, rate in w4),
        w8=tuple((m, rate * threads) for m, rate in w8),
        staging=DEFAULT_STAGING,
        results=DEFAULT_RESULTS,
        source="default",
    )


def _giga(*points: tuple[int, float]) -> Curve:
    return tuple((rows, rate * 1e9) for rows, rate in points)


_DEFAULT_CURVES: dict[str, tuple[Curve, Curve]] = {
    # Of a thread: 4-bit and 8-bit weights, measured on one core of a Zen 4 server.
    "portable": (_giga((1, 10), (4, 20), (128, 25)), _giga((1, 3), (4, 9), (16, 17), (128, 22))),
    "avx2": (
        _giga((1, 85), (2, 105), (4, 110), (16, 115), (128, 115)),
        _giga((1, 60), (2, 85), (4, 95), (128, 95)),
    ),
    "avx512": (
        _giga((1, 40), (2, 64), (3, 47), (5, 63), (16, 86), (128, 98)),
        _giga((1, 17), (2, 31), (4, 52), (8, 67), (32, 90), (128, 95)),
    ),
    "avx512_vnni": (
        _giga((1, 175), (4, 180), (128, 183)),
        _giga((1, 125), (2, 143), (3, 160), (8, 166), (128, 171)),
    ),
    "avx512_bf16": (
        _giga((1, 175), (3, 185), (4, 200), (8, 212), (128, 213)),
        _giga((1, 125), (2, 143), (3, 160), (8, 168), (16, 184), (32, 184), (128, 211)),
    ),
}
"""A level that is not listed, such as the modelled one for tests, counts as portable."""


# --- measuring --------------------------------------------------------------------------------------------------------

_ROWS = (1, 2, 3, 4, 5, 8, 16, 32, 128)
"""Rows that are timed: the kernels for few rows take 1 to 8, depending on the level."""

_PROBE_K = 1024
_STAGED = 512, 2048
"""Rows and channels of the activations that are staged."""


def measure() -> Rates:
    """Measures this machine, at the level and number of threads in force. Takes tens of milliseconds."""
    rng = np.random.default_rng(0)
    return Rates(
        bandwidth=_bandwidth(),
        call=_call(rng),
        w4=_curve(4, rng),
        w8=_curve(8, rng),
        staging=_staging(rng),
        results=_results(),
        source="measured",
    )


def _best(call: Callable[[], object], least: int = 3, most: int = 9, budget: float = 1e-3) -> float:
    """Seconds of the fastest of some calls: what slows one down is something else on the machine."""
    best, spent = math.inf, 0.0
    for done in range(most):
        if done >= least and spent > budget:
            break
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return max(best, 1e-9)


def _bandwidth() -> float:
    # Twice the last-level cache, so that little of it is still there; not so much that filling it takes long.
    probe = _core.ReadProbe(min(max(2 * last_level_cache(), 32 << 20), 128 << 20))
    return max(probe.run() for _ in range(3))


def _product(layer: PackedLinear, m: int, rng: np.random.Generator) -> Callable[[], object]:
    x = view_rows(rng.standard_normal((m, layer.k), np.float32), "x")
    y = view_rows(np.empty((m, layer.n), np.float32), "y")
    assert x is not None
    assert y is not None
    device = CpuDevice()
    return lambda: device.matmul(x, layer, y)


def _layer(bits: int, k: int, n: int) -> PackedLinear:
    layout = Layout(k, n, bits, KT)
    data = aligned_empty(layout.nbytes)
    data[:] = 0  # weights of 0 take as long as others
    return PackedLinear("calibration", layout, data)


def _call(rng: np.random.Generator) -> float:
    return _best(_product(_layer(4, KT, NT), 1, rng))


def _curve(bits: int, rng: np.random.Generator) -> Curve:
    # As many tiles of outputs as give every thread the same share.
    threads = _core.num_threads()
    layer = _layer(bits, _PROBE_K, NT * threads * -(-16 // threads))
    weights = layer.k * layer.n
    return tuple((m, 2 * weights * m / _best(_product(layer, m, rng))) for m in _ROWS)


def _staging(rng: np.random.Generator) -> float:
    m, k = _STAGED
    x = view_rows(rng.standard_normal((m, k), np.float32).astype(BFLOAT16), "x")
    assert x is not None
    k_tiles, bands = k // KT, m // (BAND_ROWS * ROWS)
    out = np.zeros(ROWS * k_tiles * bands * BAND_BYTES, np.uint8)
    return out.nbytes / _best(lambda: stage_activations(x, None, k_tiles, bands, 1, out))


def _results() -> float:
    y = np.zeros(_STAGED, BFLOAT16)
    out = np.empty(_STAGED, np.float32)
    return y.nbytes / _best(lambda: np.copyto(out, y))


def last_level_cache() -> int:
    """Bytes of this machine's largest cache; 32 MiB where the system doesn't say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text))
        except (OSError, ValueError, IndexError):
            continue
    return max(sizes, default=32 << 20)


# --- keeping ----------------------------------------------------------------------------------------------------------


def calibrate() -> Rates:
    """The rates of this machine: from its file, else measured and written there; defaults with TILEFUSE_CALIBRATE=0.

    A file that can't be written is no error: the rates are measured again by the next process. Nor is it one that there
    is no memory to measure with: the defaults are taken.

    Raises:
        DeviceError: TILEFUSE_CALIBRATE is neither 0 nor 1.
    """
    wanted = os.environ.get("TILEFUSE_CALIBRATE") or "1"
    if wanted not in ("0", "1"):
        raise DeviceError(
            f"TILEFUSE_CALIBRATE is {wanted!r}: set 0 for the documented defaults, 1 or nothing to measure"
        )
    level, threads = str(_core.cpu_level()), int(_core.num_threads())
    if wanted == "0":
        return default_rates(level, threads)
    of = machine(level, threads)
    path = cache_file(of)
    if path is not None and (kept := _read(path, of)) is not None:
        return kept
    try:
        rates = measure()
    except MemoryError:
        return default_rates(level, threads)
    if path is not None:
        _write(path, of, rates)
    return rates


def machine(level: str, threads: int) -> dict[str, Any]:
    """What a calibration belongs to."""
    from tilefuse import __version__

    return {
        "cpu": _cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "level": level,
        "threads": threads,
        "tilefuse": __version__,
    }


def cache_file(of: dict[str, Any]) -> Path | None:
    """Where the calibration of a machine is kept: in $XDG_CACHE_HOME/tilefuse, else ~/.cache/tilefuse.

    None if there is neither.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # The specification has relative paths ignored.
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "tilefuse" / f"rates-{name}.json"


def _read(path: Path, of: dict[str, Any]) -> Rates | None:
    """The rates in a file, or None where it is missing, damaged or another machine's."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FILE_FORMAT or document["machine"] != of:
            return None
        rates = document["rates"]
        figures = {name: _figure(rates[name]) for name in ("bandwidth", "call", "staging", "results")}
        return Rates(w4=_checked(rates["w4"]), w8=_checked(rates["w8"]), source="measured", **figures)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.debug("%s is ignored: %s", path, error)
        return None


def _figure(value: object) -> float:
    """A positive, finite number, or ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is no rate")
    return float(value)


def _checked(points: list[list[Any]]) -> Curve:
    curve = tuple((rows, _figure(rate)) for rows, rate in points)
    if [rows for rows, _ in curve] != list(_ROWS):
        raise ValueError("other rows")
    return curve


def _write(path: Path, of: dict[str, Any], rates: Rates) -> None:
    figures = {name: getattr(rates, name) for name in ("bandwidth", "call", "w4", "w8", "staging", "results")}
    document = {"format": FILE_FORMAT, "machine": of, "rates": figures}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(document, indent=1) + "\n").encode())
    except OSError as error:
        _log.debug("the calibration is not kept: %s", error)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except (OSError, UnicodeDecodeError):
        pass
    return platform.processor() or platform.machine()
