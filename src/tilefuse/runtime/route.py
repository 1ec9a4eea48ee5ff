"""``device="auto"``: each call goes to the device that is estimated to be the fastest.

Without a usable NPU that is always the CPU, and nothing is measured. With one, the choice is made once for a layout and
a bucket of rows and then looked up. The emulator is never chosen.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tilefuse import _core, arch
from tilefuse.arrays import FloatArray
from tilefuse.errors import NpuError, NpuMemoryError, NpuUnavailable, PlanError, QuantizationError, TileFuseError
from tilefuse.layout import Layout
from tilefuse.packed import PackedLinear
from tilefuse.runtime import cpu as cpu_settings

if TYPE_CHECKING:
    from tilefuse.runtime.rates import Rates

_log = logging.getLogger("tilefuse")

_BUCKET_BITS = 5
"""Leading bits of the number of rows that a bucket keeps: up to 32 rows each has its own, above no bucket is wider than
a sixteenth of its rows."""


class _Device(Protocol):
    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None: ...


class Decision(NamedTuple):
    """Whether the NPU is the faster device, by what the array holds when the call comes."""

    family: str
    """Operation, weights and columns of the xclbin that the call needs; empty where the NPU can't run it. The device
    takes an open one of the family rather than change."""
    if_open: bool
    """With such an xclbin open, or none."""
    if_another: bool
    """With another one open."""


ON_CPU = Decision("", False, False)

_Table = dict[int, Decision]


def bucket(m: int) -> int:
    """The number of rows that stands for ``m``: the largest of its bucket."""
    shift = (m - 1).bit_length() - _BUCKET_BITS
    return m if shift <= 0 else -(-m >> shift) << shift


def decide(layout: Layout, m: int, rates: Rates) -> Decision:
    """Which device is the faster one for ``m`` rows."""
    from tilefuse.runtime.estimates import cpu_estimate, npu_estimate

    try:
        npu = npu_estimate(layout, m, rates)
    except PlanError:
        return ON_CPU
    cpu = cpu_estimate(layout, m, rates).total
    return Decision(npu.family, npu.total < cpu, npu.total + arch.SWITCH < cpu)


class Router:
    """Decisions for a machine with an NPU. Safe to use from several threads.

    Args:
        calibrate: Gives the rates at the CPU level and number of threads in force; called once for each such pair.
    """

    def __init__(self, calibrate: Callable[[], Rates]) -> None:
        self._calibrate = calibrate
        self._lock = threading.Lock()
        self._changes = cpu_settings.changes
        self._rates: dict[tuple[str, int], Rates] = {}
        self._tables: dict[Layout, _Table] = {}
        self.open = ""
        """Family of the xclbin that the array was last sent."""

    def on_npu(self, layer: PackedLinear, m: int) -> Decision | None:
        """The decision for ``m`` rows, at least 1, if it is for the NPU; None for the CPU."""
        if cpu_settings.changes != self._changes:
            self._forget()
        tables = self._tables
        held = layer.__dict__.get("_routes")
        if held is None or held[0] is not tables:
            held = layer.__dict__["_routes"] = tables, self._table(tables, layer.layout)
        rows = bucket(m)
        try:
            decision: Decision = held[1][rows]
        except KeyError:
            decision = self._decide(held[1], layer.layout, rows)
        now = self.open
        near = not now or now == decision.family
        return decision if (decision.if_open if near else decision.if_another) else None

    def give_up(self, layer: PackedLinear, m: int) -> None:
        """Sends what is like this call, the layout and the bucket, to the CPU from now on."""
        with self._lock:
            self._tables.setdefault(layer.layout, {})[bucket(m)] = ON_CPU

    def give_up_layer(self, layer: PackedLinear) -> None:
        """Sends this layer to the CPU from now on."""
        layer.__dict__["_routes"] = self._tables, defaultdict(lambda: ON_CPU)

    def _forget(self) -> None:
        # The CPU is faster or slower than when the decisions were made.
        with self._lock:
            changes = cpu_settings.changes
            if changes != self._changes:
                self._tables = {}
                self._changes = changes

    def _table(self, tables: dict[Layout, _Table], layout: Layout) -> _Table:
        with self._lock:
            return tables.setdefault(layout, {})

    def _decide(self, table: _Table, layout: Layout, rows: int) -> Decision:
        # Under the lock: one thread measures and plans, and those that need the same wait for it.
        with self._lock:
            if rows not in table:
                settings = _core.cpu_level(), _core.num_threads()
                if settings not in self._rates:
                    self._rates[settings] = self._calibrate()
                table[rows] = decide(layout, rows, self._rates[settings])
            return table[rows]


class AutoDevice:
    """The fastest device for each call. The NPU is looked for at the first call, once in the life of the process.

    What the NPU fails at, the CPU computes, and the first failure of a kind is logged by name. After a failed run the
    NPU is left alone; what it has no memory, no plan or no binary for, only that goes to the CPU from then on.

    Args:
        cpu: Takes what the NPU does not.
        open_npu: Gives the NPU, or raises; what it gives is opened, if it has a method for that.
        calibrate: See `Router`; that of `tilefuse.runtime.rates` when None.
    """

    name = "auto"

    def __init__(
        self, cpu: _Device, open_npu: Callable[[], _Device], calibrate: Callable[[], Rates] | None = None
    ) -> None:
        self._cpu = cpu
        self._open_npu = open_npu
        self._calibrate = calibrate
        self._lock = threading.Lock()
        self._opened = False
        self._npu: _Device | None = None
        self._router: Router | None = None
        self._logged: set[type[BaseException]] = set()
        self.direct = False
        """See `CpuDevice`."""

    @property
    def npu_usable(self) -> bool:
        """Whether calls may go to the NPU; opens it if that has not been tried."""
        if not self._opened:
            self._look()
        return self._npu is not None

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        if not self._opened:
            self._look()
        npu, router = self._npu, self._router
        if npu is None or router is None:
            self._cpu.matmul(x, layer, y)
            return
        m = x.shape[0] if len(x.shape) == 2 else 1
        decision = router.on_npu(layer, m) if m else None
        if decision is None:
            self._cpu.matmul(x, layer, y)
            return
        try:
            npu.matmul(x, layer, y)
        except TileFuseError as error:
            self._fall_back(error, router, layer, m)
            self._cpu.matmul(x, layer, y)
        else:
            router.open = decision.family

    def matmul_int8(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        """On the CPU: the array has no such product."""
        cpu_settings.CpuDevice().matmul_int8(x, layer, y)

    def _look(self) -> None:
        with self._lock:
            if self._opened:
                return
            try:
                npu = self._open_npu()
                open_it = getattr(npu, "open", None)
                if open_it is not None:
                    open_it()
            except NpuUnavailable as error:
                _log.info('device="auto" computes on the CPU: %s: %s', type(error).__name__, error)
            except Exception as error:
                # Whatever is wrong with a driver, its module or its files: there is a CPU.
                _log.warning('device="auto" computes on the CPU: %s: %s', type(error).__name__, error)
            else:
                from tilefuse.runtime.rates import calibrate

                self._npu = npu
                self._router = Router(self._calibrate or calibrate)
            self._opened = True
            self.direct = self._npu is None and type(self._cpu) is cpu_settings.CpuDevice

    def _fall_back(self, error: TileFuseError, router: Router, layer: PackedLinear, m: int) -> None:
        if isinstance(error, QuantizationError):
            after = "this call runs on the CPU"  # a NaN or Inf in these activations; the next may have none
        elif isinstance(error, NpuMemoryError):
            router.give_up_layer(layer)
            after = "this layer runs on the CPU from now on"
        elif isinstance(error, NpuError):
            self._npu = None
            after = "everything runs on the CPU from now on"
        else:
            router.give_up(layer, m)
            after = f"about {m} rows by {layer.k} x {layer.n} run on the CPU from now on"
        with self._lock:
            first = type(error) not in self._logged
            self._logged.add(type(error))
        level = logging.WARNING if first else logging.DEBUG
        name = type(error).__name__
        _log.log(level, "the NPU failed at layer %r: %s: %s; %s", layer.name, name, error, after)
