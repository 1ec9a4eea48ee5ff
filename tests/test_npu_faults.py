"""Every fault that the emulated device can be made to have: a clear error, nothing lost, the next call right."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from layers import F32, Scheme, make_layer
from npu_rig import Rig, view
from test_designs_emulated import check_gemm

from tilefuse import plan
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.xrt import EmulatedXrt, Fault
from tilefuse.errors import NpuError, NpuMemoryError, NpuTimeout, NpuUnavailable
from tilefuse.packed import PackedLinear
from tilefuse.runtime import xrt as adapter
from tilefuse.runtime.contexts import Slot
from tilefuse.runtime.npu import MARK, NpuDevice

Rng = np.random.Generator


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> EmulatedArtifacts:
    return EmulatedArtifacts(tmp_path_factory.mktemp("xclbins"))


@pytest.fixture
def rig(artifacts: EmulatedArtifacts, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(adapter, "OPEN_ATTEMPTS", (0.001, 0.001))
    made = Rig(artifacts, chain=True)
    yield made
    made.xrt.clear_faults()
    made.xrt.resume()
    made.close()


@pytest.fixture
def layer(rng: Rng) -> PackedLinear:
    return make_layer(rng, 256, 520, Scheme(4, 128), bias=True).layer


@pytest.fixture
def x(rng: Rng) -> Any:
    return rng.normal(0, 1, (9, 256)).astype(F32)


def in_order(text: str, *parts: str) -> None:
    """Each part is in the text, after the one before."""
    start = 0
    for part in parts:
        assert part in text[start:], f"{part!r} is not, or not in this place, in {text!r}"
        start = text.index(part, start) + len(part)


RUNS = {
    Fault.TIMEOUT: (NpuTimeout, "ended as TIMEOUT", "waits for itself", "firmware", "another device", "reset"),
    Fault.ABORT: (NpuError, "ended as ABORT", "firmware", "another device", "waits for itself", "reset"),
    Fault.ERROR: (NpuError, "ended as ERROR", "another device", "firmware", "reset", "waits for itself"),
    Fault.NO_RESPONSE: (NpuError, "ended as NORESPONSE", "another device", "firmware", "reset"),
    Fault.STALE: (NpuError, "completed, and wrote no results", "another device", "firmware", "reset"),
    Fault.REFUSED: (NpuError, "could not be started", "reset", "firmware", "another device"),
}


@pytest.mark.parametrize("fault", RUNS, ids=str)
@pytest.mark.parametrize("first", [True, False], ids=["at first", "later"])
def test_a_failed_run(rig: Rig, layer: PackedLinear, x: Any, fault: Fault, first: bool) -> None:
    """The causes are named in order, the weights stay, y is untouched, and the next call works in a new context."""
    kind, *causes = RUNS[fault]
    if not first:
        rig(x, layer)
    before = rig.device.statistics()
    rig.xrt.inject(fault)
    with pytest.raises(kind) as raised:
        rig(x, layer)
    assert type(raised.value) is kind
    in_order(str(raised.value), "gemm of 9 x 256 by 256 x 520", *causes, "The context was dropped; the next call opens")
    # Who holds the error holds nothing of the device by it.
    assert rig.xrt.live().contexts == 0
    assert rig.xrt.live().runs == 0
    check_gemm(rig(x, layer), x, layer)
    after = rig.device.statistics()
    assert (after.uploads, after.layers) == (1, 1)
    assert after.dispatches == before.dispatches + 1
    live = rig.xrt.live()
    rig(x, layer)
    assert rig.xrt.live() == live


def test_a_failed_run_leaves_y(rig: Rig, layer: PackedLinear, x: Any) -> None:
    rig.xrt.inject(Fault.ABORT)
    y = np.full((9, layer.n), 7, F32)
    with pytest.raises(NpuError):
        rig.device.matmul(view(x), layer, view(y))
    assert (y == 7).all()


def test_other_contexts_go_on(rig: Rig, layer: PackedLinear, x: Any) -> None:
    """A GEMM that hangs leaves the GEMV's context as it is."""
    want = rig(x[0], layer)
    rig(x, layer)
    rig.xrt.inject(Fault.TIMEOUT)
    with pytest.raises(NpuTimeout):
        rig(x, layer)
    gc.collect()
    assert rig.xrt.live().contexts == 1
    np.testing.assert_array_equal(rig(x[0], layer), want)
    check_gemm(rig(x, layer), x, layer)


def test_a_run_that_does_not_end(
    artifacts: EmulatedArtifacts, layer: PackedLinear, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host gives up; the buffers that the device still writes to are not used again."""
    monkeypatch.setenv("TILEFUSE_NPU_TIMEOUT_MS", "60")
    rig = Rig(artifacts)
    rig.xrt.inject(Fault.STALL)
    with pytest.raises(NpuTimeout, match=r"ended as TIMEOUT after 0.1 s"):
        rig(x, layer)
    rig.xrt.resume()
    monkeypatch.setenv("TILEFUSE_NPU_TIMEOUT_MS", "60000")
    rig.device.close()
    check_gemm(rig(x, layer), x, layer)
    rig.close()


def test_a_wedged_array(rig: Rig, layer: PackedLinear, x: Any) -> None:
    """The second failure, in a new context, says that a reset is needed; after it the next call works."""
    want = rig(x, layer)
    rig.xrt.inject(Fault.WEDGED, times=None)
    with pytest.raises(NpuError, match="The context was dropped"):
        rig(x, layer)
    for _ in range(2):
        with pytest.raises(NpuError) as raised:
            rig(x, layer)
        text = str(raised.value)
        del raised
        if "The run before failed too" in text:
            in_order(text, "could not be started", "reset the device", "modprobe", "then call again")
            break
    else:
        raise AssertionError(text)
    rig.xrt.clear_faults()
    rig.xrt.reset()
    np.testing.assert_array_equal(rig(x, layer), want)
    assert rig.device.statistics().uploads == 1  # in a session of its own


@pytest.mark.parametrize("fault", [Fault.NO_DRIVER, Fault.NO_PERMISSION], ids=str)
def test_a_device_that_does_not_open(rig: Rig, layer: PackedLinear, x: Any, fault: Fault) -> None:
    rig.xrt.inject(fault, times=3)
    with pytest.raises(NpuUnavailable) as raised:
        rig(x, layer)
    in_order(str(raised.value), "can't open device 0", "amdxdna", "render", "another process", "tilefuse doctor")
    check_gemm(rig(x, layer), x, layer)


def test_a_device_that_opens_at_the_third_attempt(rig: Rig, layer: PackedLinear, x: Any) -> None:
    rig.xrt.inject(Fault.NO_DRIVER, times=2)
    check_gemm(rig(x, layer), x, layer)


def test_no_npu(artifacts: EmulatedArtifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "OPEN_ATTEMPTS", ())
    with pytest.raises(NpuUnavailable, match="can't open device 0"):
        NpuDevice(EmulatedXrt(devices=0), artifacts).open()
    assert NpuDevice(EmulatedXrt(), artifacts).open() == "NPU Strix"


@pytest.mark.parametrize("name", ["NPU Phoenix", "RyzenAI-npu1", "NPU Hawk Point"])
def test_a_device_of_the_first_generation(artifacts: EmulatedArtifacts, name: str) -> None:
    with pytest.raises(NpuUnavailable, match=f"{name}.*first-generation.*Strix"):
        NpuDevice(EmulatedXrt(info={"name": name}), artifacts).open()


def test_no_pyxrt() -> None:
    from tilefuse.runtime.npu import open_npu

    with pytest.raises(
        NpuUnavailable,
        match=r'device="npu" needs pyxrt.*`tilefuse doctor`.*"emulator" runs the same code.*"cpu" computes more prec',
    ):
        open_npu()


def test_no_context(rig: Rig, layer: PackedLinear, x: Any) -> None:
    rig.xrt.inject(Fault.BUSY)
    with pytest.raises(NpuError) as raised:
        rig(x, layer)
    in_order(str(raised.value), "gives no context", "other processes", "another device", "firmware")
    del raised
    gc.collect()
    assert not rig.xrt.live()
    check_gemm(rig(x, layer), x, layer)


@pytest.mark.parametrize(
    ("of", "method", "message"),
    [("xclbin", "get_kernels", "XRT can't read"), ("kernel", "group_id", "the driver gives no context")],
)
def test_an_xclbin_that_xrt_has_trouble_with(
    rig: Rig, layer: PackedLinear, x: Any, monkeypatch: pytest.MonkeyPatch, of: str, method: str, message: str
) -> None:
    def trouble(*arguments: object) -> None:
        raise RuntimeError("no such section")

    with monkeypatch.context() as patch:
        patch.setattr(getattr(rig.xrt, of), method, trouble)
        with pytest.raises(NpuError, match=f"{message}.*no such section"):
            rig(x, layer)
    check_gemm(rig(x, layer), x, layer)


def test_no_context_until_another_is_closed(rig: Rig, layer: PackedLinear, x: Any) -> None:
    want = rig(x[0], layer)
    rig.xrt.inject(Fault.BUSY)
    check_gemm(rig(x, layer), x, layer)
    assert rig.xrt.live().contexts == 1
    np.testing.assert_array_equal(rig(x[0], layer), want)


@pytest.mark.parametrize("fault", [Fault.NO_MEMORY, Fault.LOCKED_MEMORY], ids=str)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_no_memory(rig: Rig, layer: PackedLinear, x: Any, fault: Fault, number: int) -> None:
    """For the instructions, the weights, the activations or the results: nothing is kept, and the next call works."""
    rig.xrt.inject(fault, at=number)
    with pytest.raises(NpuMemoryError) as raised:
        rig(x, layer)
    in_order(str(raised.value), "gives no buffer of", "bytes for", "memlock", "no memory left")
    del raised
    gc.collect()
    check_gemm(rig(x, layer), x, layer)
    live = rig.xrt.live()
    assert live.buffers == 4
    rig(x, layer)
    assert rig.xrt.live() == live
    assert rig.device.statistics().uploads == 1


def test_memory_that_unused_buffers_had(rig: Rig, layer: PackedLinear, rng: Rng) -> None:
    """Before memory is refused, buffers that wait for their next use are given back."""
    rig(rng.normal(0, 1, (200, 256)).astype(F32), layer)
    idle = rig.device.statistics().idle_bytes
    assert idle
    rig.xrt.inject(Fault.NO_MEMORY)
    x = rng.normal(0, 1, (700, 256)).astype(F32)
    check_gemm(rig(x, layer), x, layer)


def test_the_limit_of_locked_memory(artifacts: EmulatedArtifacts, layer: PackedLinear, x: Any) -> None:
    rig = Rig(artifacts, memlock=layer.nbytes)
    with pytest.raises(NpuMemoryError, match="memlock"):
        rig(x, layer)
    rig.close()


# --- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.TIMEOUT, Fault.ABORT, Fault.ERROR, Fault.STALE, Fault.REFUSED], ids=str)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failed_list(rig: Rig, rng: Rng, fault: Fault, number: int) -> None:
    """The message names the run that failed; then the list runs."""
    layers = [make_layer(rng, 256, n, Scheme(4, 128)).layer for n in (530, 540, 550)]
    calls = [(rng.normal(0, 1, (3, 256)).astype(F32), layer) for layer in layers]
    rig.xrt.inject(fault, at=number)
    _, *causes = RUNS[fault]
    with pytest.raises(NpuTimeout if fault is Fault.TIMEOUT else NpuError) as raised:
        rig.many(calls)
    text = str(raised.value)
    del raised
    if fault is not Fault.REFUSED:
        in_order(text, f"gemm of 3 x 256 by 256 x {layers[number - 1].n}", *causes[1:])
    assert "The context was dropped" in text
    gc.collect()
    assert rig.xrt.live().contexts == 0
    for (x, layer), y in zip(calls, rig.many(calls), strict=True):
        check_gemm(y, x, layer)
    assert rig.device.statistics().uploads == 3


# --- synchronisation --------------------------------------------------------------------------------------------------


class Careless:
    """A host that leaves out synchronisations: which ones is up to the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.skip_to = self.skip_from = False
        to_device, from_device = adapter.Buffer.to_device, adapter.Buffer.from_device

        def to(buffer: adapter.Buffer, nbytes: int, offset: int = 0) -> None:
            if not self.skip_to or nbytes == len(MARK):
                to_device(buffer, nbytes, offset)

        def back(buffer: adapter.Buffer, nbytes: int) -> None:
            if not self.skip_from:
                from_device(buffer, nbytes)

        monkeypatch.setattr(adapter.Buffer, "to_device", to)
        monkeypatch.setattr(adapter.Buffer, "from_device", back)


def test_activations_that_were_not_synchronised_are_stale(
    rig: Rig, layer: PackedLinear, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated device tells a missing synchronisation: it computes with what it was shown before."""
    first, second = rng.normal(0, 1, (2, 9, 256)).astype(F32)
    careless = Careless(monkeypatch)
    want = rig(first, layer)
    careless.skip_to = True
    np.testing.assert_array_equal(rig(second, layer), want)
    careless.skip_to = False
    check_gemm(rig(second, layer), second, layer)


def test_results_that_were_not_synchronised_are_noticed(
    rig: Rig, layer: PackedLinear, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless = Careless(monkeypatch)
    careless.skip_from = True
    with pytest.raises(NpuError, match="wrote no results"):
        rig(x, layer)
    careless.skip_from = False
    check_gemm(rig(x, layer), x, layer)


def test_no_buffer_is_copied_behind_our_back(
    rig: Rig, layer: PackedLinear, x: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """XRT replaces a buffer in the wrong bank by a copy, with a warning."""
    with caplog.at_level(logging.WARNING):
        rig(x, layer)
        rig(x[0], layer)
        rig.many([(x, layer), (x[0], layer), (x, layer)])
    assert not caplog.records


# --- what only our own code can do wrong ------------------------------------------------------------------------------


def test_what_the_emulated_device_knows_is_said(
    artifacts: EmulatedArtifacts, layer: PackedLinear, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instruction stream of another problem, which moves more than there is."""
    rig = Rig(artifacts)
    other = make_layer(np.random.default_rng(0), 512, 2000, Scheme(4, 128)).layer
    instructions = artifacts.instructions

    def wrong(wanted: Any, /) -> Any:
        return instructions(plan.gemm(other.layout, 300, configurations=[wanted.configuration]))

    monkeypatch.setattr(artifacts, "instructions", wrong)
    with pytest.raises(NpuError) as raised:
        rig(x, layer)
    in_order(str(raised.value), "the run ended as TIMEOUT", "the buffer of x", "the instructions move", "likely causes")
    monkeypatch.undo()
    rig.device.close()
    check_gemm(rig(x, layer), x, layer)
    del raised
    rig.close()


def test_an_interrupt_while_a_run_goes_on(
    artifacts: EmulatedArtifacts, layer: PackedLinear, x: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers of the run are not used again as long as its context is there."""
    rig = Rig(artifacts)
    want = rig(x, layer)
    rig.xrt.inject(Fault.STALL)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adapter.Xrt, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig(x, layer)
    assert rig.device.statistics().idle_bytes == 0
    rig.xrt.resume()
    np.testing.assert_array_equal(rig(x, layer), want)
    gc.collect()
    rig.close()


def test_an_argument_that_xrt_refuses(rig: Rig, layer: PackedLinear, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig(x, layer)
    with monkeypatch.context() as patch:

        def refused(*arguments: object) -> None:
            raise RuntimeError("no such argument")

        patch.setattr(Slot, "bind", refused)
        with pytest.raises(NpuError, match=r"XRT fails \(no such argument\). The context was dropped"):
            rig(x, layer)
    check_gemm(rig(x, layer), x, layer)


def test_threads_while_everything_fails_now_and_then(
    artifacts: EmulatedArtifacts, rng: Rng, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that come and go, lists, pieces, closing, and a fault every few calls: what returns is right."""
    monkeypatch.setattr(adapter, "OPEN_ATTEMPTS", (0.001, 0.001))
    rig = Rig(artifacts, chain=True, most_bytes=300_000)
    schemes = [(520, Scheme(4, 128)), (64, Scheme(8, 64)), (200, Scheme(4, 32, True))]
    layers = [make_layer(rng, 256, n, scheme, bias=True).layer for n, scheme in schemes]
    faults = [Fault.TIMEOUT, Fault.ABORT, Fault.STALE, Fault.NO_MEMORY, Fault.BUSY, Fault.REFUSED, Fault.NO_DRIVER]
    wrong: list[str] = []

    def work(seed: int) -> None:
        own = np.random.default_rng(seed)
        for turn in range(12):
            layer = layers[own.integers(len(layers))]
            if turn % 4 == 3:
                layer = make_layer(own, 256, 130, Scheme(4, 128)).layer
            if turn % 3 == 2:
                rig.xrt.inject(faults[own.integers(len(faults))])
            if turn == 8:
                rig.device.close()
            x = own.normal(0, 1, (int(own.choice([2, 3, 70])), 256)).astype(F32)
            try:
                y = rig.many([(x, layer), (x, layers[0])])[0] if turn % 2 else rig(x, layer)
                check_gemm(y, x, layer)
            except NpuError:
                continue
            except Exception as error:
                wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    rig.xrt.clear_faults()
    x = rng.normal(0, 1, (5, 256)).astype(F32)
    check_gemm(rig(x, layers[0]), x, layers[0])
    gc.collect()
    assert rig.device.statistics().layers <= len(layers)
    rig.close()
