"""Which device runs which phase of a language model: prefill, many rows at a time, and decode, one."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tilefuse import arch
from tilefuse.errors import DeviceError, PlanError
from tilefuse.layout import Layout
from tilefuse.runtime import default_device, device_names, resolve_device
from tilefuse.runtime.estimates import cpu_estimate, npu_estimate
from tilefuse.runtime.rates import Rates

BUCKETS = (256, 512, 1024, 2048)
"""Rows that prefill is planned for: of those that `make xclbins` builds instruction streams for. The NPU pads the last
rows of a prompt to what was built."""

_LADDER = (2, 4, 8, 16, 32, 64, 128, *BUCKETS)

CHUNK = BUCKETS[-1]
"""Tokens of a prompt that go through the model at once. Longer ones go in parts, so that activations, whose size grows
with the rows, stay bounded."""


@dataclass
class Phases:
    """Names of the devices, as ``device=`` of `tilefuse.gemm` takes them; None for `tilefuse.default_device()`.

    Attributes:
        prefill: Multiplies ``min_rows`` rows and more.
        decode: Multiplies fewer.
        min_rows: See above.
        reason: Why, in a sentence.
        calls: Products so far, by phase and device.
    """

    prefill: str | None = None
    decode: str | None = None
    min_rows: int = 2
    reason: str = ""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)

    def device(self, rows: int) -> str:
        """The device for a product of ``rows`` rows of activations; counts it."""
        name = self.name(rows)
        self.count(rows, name)
        return name

    def name(self, rows: int) -> str:
        """The device for a product of ``rows`` rows of activations."""
        return (self.prefill if rows >= self.min_rows else self.decode) or default_device()

    def count(self, rows: int, name: str, products: int = 1) -> None:
        """Counts products of ``rows`` rows on device ``name``."""
        self.calls["prefill" if rows > 1 else "decode", name] += products

    def set(self, other: Phases) -> None:
        """Takes the devices of ``other``; the layers that share this object follow."""
        self.prefill, self.decode = other.prefill, other.decode
        self.min_rows, self.reason = other.min_rows, other.reason


@dataclass(frozen=True)
class Phase:
    """What all quantised layers of a model take for some rows on each device, in seconds.

    Attributes:
        rows: Rows of activations.
        cpu: On the CPU, estimated from its rates.
        npu: On the NPU, modelled; None where it can't run one of the layers.
        refused: Why it can't.
    """

    rows: int
    cpu: float
    npu: float | None
    refused: str = ""

    @property
    def cheapest(self) -> str:
        """The device that takes the least."""
        return "cpu" if self.npu is None or self.cpu <= self.npu else "npu"


def estimate(layouts: Iterable[Layout], rows: int, rates: Rates) -> Phase:
    """The sum over the layers of a model, in the order in which they run.

    A change of the kind of weights from one layer to the next is a change of the xclbin, which is counted; layers that
    follow each other with the same are not.
    """
    cpu = npu = 0.0
    refused, family = "", ""
    known: dict[Layout, tuple[float, float, str]] = {}
    for layout in layouts:
        if layout not in known:
            try:
                array = npu_estimate(layout, rows, rates)
                known[layout] = cpu_estimate(layout, rows, rates).total, array.total, array.family
            except PlanError as error:
                refused = refused or str(error)
                known[layout] = cpu_estimate(layout, rows, rates).total, 0.0, family
        on_cpu, on_npu, needed = known[layout]
        cpu += on_cpu
        npu += on_npu + (arch.SWITCH if family and needed != family else 0.0)
        family = needed
    return Phase(rows, cpu, None if refused else npu, refused)


@dataclass(frozen=True)
class ModelRouting:
    """The phases of a model, estimated.

    Attributes:
        decode: One row.
        prefill: Rows of `BUCKETS`.
        min_rows: From how many rows on the NPU is the faster one, at any length of prompt; 0 where it never is. Fewer
            rows than the first bucket are padded to it.
        npu_usable: Whether this machine's NPU could be opened.
    """

    decode: Phase
    prefill: tuple[Phase, ...]
    min_rows: int
    npu_usable: bool

    def phases(self) -> Phases:
        """The devices that follow: "auto" where the NPU pays, so that what it fails at runs on the CPU."""
        if not self.npu_usable:
            return Phases("cpu", "cpu", reason="there is no usable NPU (tilefuse doctor says why)")
        decode = "auto" if self.decode.cheapest == "npu" else "cpu"
        if not self.min_rows:
            return Phases("cpu", decode, reason="the NPU is not estimated to be faster at any length of prompt")
        return Phases("auto", decode, self.min_rows, "by the estimates of tilefuse route --model")


def model_routing(layouts: Sequence[Layout], rates: Rates, *, npu_usable: bool) -> ModelRouting:
    """Estimates both phases of a model with these layers."""
    prefill = tuple(estimate(layouts, rows, rates) for rows in BUCKETS)
    min_rows = 0
    for rows in reversed(_LADDER):
        npu = prefill[bisect_left(BUCKETS, rows)].npu
        if npu is None or npu >= estimate(layouts, rows, rates).cpu:
            break
        min_rows = rows
    return ModelRouting(estimate(layouts, 1, rates), prefill, min_rows, npu_usable)


def choose(device: str | None, layouts: Sequence[Layout]) -> Phases:
    """The phases for ``device``: a device for both, or "auto" to have them chosen by what they are estimated to take.

    Raises:
        DeviceError: There is no such device.
    """
    if device is None:
        return Phases()
    if device not in device_names():
        raise DeviceError(f"device is {device!r}: there are {', '.join(device_names())}")
    if device != "auto":
        resolve_device(device)
        return Phases(device, device, reason=f"device={device!r} was asked for")
    from tilefuse.runtime import auto_device
    from tilefuse.runtime.rates import calibrate

    if not auto_device().npu_usable:
        return Phases("cpu", "cpu", reason="there is no usable NPU (tilefuse doctor says why)")
    return model_routing(layouts, calibrate(), npu_usable=True).phases()
