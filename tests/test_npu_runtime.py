"""The NPU runtime on the emulated device: reuse, parts, weights, threads, lists, closing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from layers import F32, Scheme, make_layer
from npu_rig import Rig, view
from test_designs_emulated import check_gemm

from tilefuse import plan
from tilefuse.configurations import Op
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.errors import DeviceError, NpuError, PlanError, QuantizationError
from tilefuse.layout import Layout
from tilefuse.packed import PackedLinear
from tilefuse.runtime import buffers, contexts, jobs
from tilefuse.runtime.buffers import pieces_of, size_class
from tilefuse.runtime.npu import TIMEOUT_MS, timeout_ms
from tilefuse.testing import gemm_error

Rng = np.random.Generator


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> EmulatedArtifacts:
    return EmulatedArtifacts(tmp_path_factory.mktemp("xclbins"))


@pytest.fixture
def rig(artifacts: EmulatedArtifacts) -> Iterator[Rig]:
    made = Rig(artifacts, chain=True)
    yield made
    made.close()


def layer_of(rng: Rng, k: int = 256, n: int = 520, **options: Any) -> PackedLinear:
    return make_layer(rng, k, n, options.pop("scheme", Scheme(4, 128)), **options).layer


def activations(rng: Rng, m: int, k: int = 256) -> Any:
    return rng.normal(0, 1, (m, k)).astype(F32)


# --- reuse ------------------------------------------------------------------------------------------------------------


def test_what_is_reused(rig: Rig, rng: Rng) -> None:
    """Weights are uploaded once, and the second call of a kind opens and allocates nothing."""
    layer = layer_of(rng, bias=True)
    x = activations(rng, 20)
    first = rig(x, layer), rig(x[0], layer)
    before, live = rig.device.statistics(), rig.xrt.live()
    assert before.uploads == 1
    assert before.weight_bytes == layer.nbytes
    assert before.contexts == 2
    for _ in range(3):
        np.testing.assert_array_equal(rig(x, layer), first[0])
        np.testing.assert_array_equal(rig(x[0], layer), first[1])
    after = rig.device.statistics()
    assert (after.uploads, after.contexts, after.idle_bytes) == (before.uploads, before.contexts, before.idle_bytes)
    assert rig.xrt.live() == live
    assert after.dispatches == before.dispatches + 6


def test_buffers_that_were_used_before_leave_nothing_behind(rig: Rig, rng: Rng) -> None:
    """A buffer of the same size, full of another problem's activations: padding is written anew."""
    big, small = layer_of(rng, 512, 600), layer_of(rng, 500, 590)
    want = rig(activations(rng, 1, 500), small), rig(x := activations(rng, 3, 500), small)
    del want
    for m in (64, 1):
        rig(np.full((m, 512), 1e30, F32), big)
        y = rig(x, small)
        check_gemm(y, x, small)
        assert gemm_error(rig(x[0], small).astype("bfloat16"), x[0], small).ok


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 10_000, 1 << 20, (1 << 20) + 1, 3_000_000, (1 << 31) - 1])
def test_size_classes(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size <= max(4096, 1.25 * nbytes + 1024)
    assert size_class(size) == size


def test_unused_buffers_are_bounded(rig: Rig, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "IDLE_BYTES", 1)
    monkeypatch.setattr(buffers.Pool.__init__, "__defaults__", (150_000,))
    layer = layer_of(rng)
    for m in (1, 2, 65, 130, 200, 300):
        x = activations(rng, m)
        check_gemm(np.atleast_2d(rig(x, layer)), x, layer) if m > 1 else rig(x, layer)
        assert rig.device.statistics().idle_bytes <= 150_000
    gc.collect()
    assert rig.xrt.live().buffer_bytes < 150_000 + layer.nbytes + 200_000  # instructions, a page each at least


def test_few_instruction_streams_are_kept(rig: Rig, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "STREAM_BYTES", 1)
    layer = layer_of(rng)
    before = None
    for m in (2, 65, 130, 2, 65):
        x = activations(rng, m)
        check_gemm(rig(x, layer), x, layer)
        live = rig.xrt.live()
        before = before or live.runs
        assert live.runs <= 2
    results = rig.many([(activations(rng, m), layer) for m in (2, 65, 130)])
    assert all(np.isfinite(y).all() for y in results)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "columns", "n"), [(4, 8, 2600), (8, 5, 1300), (4, 8, 512)])
def test_a_layer_in_pieces(artifacts: EmulatedArtifacts, rng: Rng, bits: int, columns: int, n: int) -> None:
    """Weights that exceed a buffer go in pieces of outputs: same result, bit for bit; what needs no pieces has one."""
    layer = layer_of(rng, 256, n, scheme=Scheme(bits, 64), columns=columns, bias=True, perm=True)
    whole, parted = Rig(artifacts), Rig(artifacts, most_bytes=300_000)
    for m in (1, 40):
        x = activations(rng, m)
        np.testing.assert_array_equal(parted(x, layer), whole(x, layer))
    pieces = pieces_of(layer.layout, 300_000)
    assert parted.device.statistics().uploads == len(pieces)
    assert parted.device.statistics().weight_bytes == layer.nbytes
    assert sum(piece.layout.n for piece in pieces) == n
    assert all(piece.layout.nbytes <= 300_000 for piece in pieces)
    whole.close()
    parted.close()


def test_rows_in_parts(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """Activations or results that exceed a buffer go in blocks of rows."""
    layer = layer_of(rng, 256, 500, bias=True)
    whole, parted = Rig(artifacts), Rig(artifacts, most_bytes=400_000)
    x = activations(rng, 1000)
    np.testing.assert_array_equal(parted(x, layer), whole(x, layer))
    assert parted.device.statistics().dispatches > 2
    whole.close()
    parted.close()


def test_what_no_parts_can_help(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """A GEMM on three columns is refused by the planner, in the problem's terms, however its rows are parted."""
    rig = Rig(artifacts)
    with pytest.raises(PlanError, match="columns = 3: a gemm takes 4 to 8"):
        rig(activations(rng, 2), layer_of(rng, columns=3))
    rig.close()


def test_the_limit_is_that_of_a_plan() -> None:
    """8-bit weights of 32768 x 131072 are more than 2 GiB: two pieces, each of which has a plan."""
    layout = Layout(32768, 131072, 8, 128)
    pieces = pieces_of(layout, plan.MAX_BUFFER_BYTES)
    assert layout.nbytes > 2 * plan.MAX_BUFFER_BYTES
    assert len(pieces) == 3
    for piece in pieces:
        plan.gemv(piece.layout)
        plan.gemm(piece.layout, 16)


# --- configurations ---------------------------------------------------------------------------------------------------


def test_a_configuration_that_is_open_is_preferred(artifacts: EmulatedArtifacts) -> None:
    """4096 x 4096: the best plans of 64 and of 512 rows are of two configurations; a change costs more than that."""
    layout = Layout(4096, 4096, 4, 128)
    planner = jobs.Planner(artifacts, plan.MAX_BUFFER_BYTES)
    best = {m: plan.gemm(layout, m) for m in (64, 512)}
    assert best[64].configuration != best[512].configuration
    (alone,) = planner.steps(layout, 512, list)
    assert alone.plan == best[512]
    planner = jobs.Planner(artifacts, plan.MAX_BUFFER_BYTES)
    (step,) = planner.steps(layout, 512, lambda: [best[64].configuration])
    assert step.plan.configuration == best[64].configuration
    assert step.plan.costs.total <= best[512].costs.total + jobs.SWITCH_SECONDS
    other = plan.gemm(Layout(4096, 4096, 8, 128), 64).configuration
    (step,) = planner.steps(layout, 300, lambda: [other])
    assert step.plan == plan.gemm(layout, 300)


def test_few_contexts_are_kept(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """Six configurations: four stay open, and the first is opened again when it is needed."""
    rig = Rig(artifacts)
    layers = [layer_of(rng, 128, 64, scheme=Scheme(bits, group)) for bits in (4, 8) for group in (32, 64, 128)]
    for layer in (*layers, layers[0]):
        rig(activations(rng, 1, 128), layer)
        assert rig.xrt.live().contexts <= contexts.MOST_CONTEXTS
    assert rig.device.statistics().contexts == 7
    rig.close()


def test_fewer_contexts_than_wanted(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """Others have all but one: the own ones make room for each other."""
    rig = Rig(artifacts, contexts=1)
    layers = [layer_of(rng, 128, 64, scheme=Scheme(bits, 64)) for bits in (4, 8)]
    for layer in (*layers, *layers):
        x = activations(rng, 1, 128)
        assert gemm_error(rig(x, layer).astype("bfloat16"), x, layer).ok
    rig.close()


def test_one_row_takes_two_streams_where_they_pay(artifacts: EmulatedArtifacts) -> None:
    """On one column a second weight stream doubles the width; on eight DRAM is the limit, and one stream does."""
    planner = jobs.Planner(artifacts, plan.MAX_BUFFER_BYTES)
    for columns, streams in ((1, 2), (8, 1)):
        (step,) = planner.steps(Layout(4096, 4096, 4, 128, columns=columns), 1, list)
        assert step.plan.configuration.op is Op.GEMV
        assert step.plan.configuration.streams == streams


# --- weights ----------------------------------------------------------------------------------------------------------


def test_weights_go_with_their_layer(rig: Rig, rng: Rng) -> None:
    keep, drop = layer_of(rng), layer_of(rng)
    x = activations(rng, 5)
    for layer in (keep, drop):
        rig(x, layer)
        rig(x[0], layer)
    assert rig.device.statistics().layers == 2
    before = rig.xrt.live()
    nbytes = drop.nbytes
    del drop, layer
    gc.collect()
    after = rig.xrt.live()
    assert rig.device.statistics().layers == 1
    assert before.buffers - after.buffers == 1
    assert before.buffer_bytes - after.buffer_bytes == nbytes
    check_gemm(rig(x, keep), x, keep)


def test_many_layers_that_come_and_go(rig: Rig, rng: Rng) -> None:
    """New layers may get the identity of old ones: each has its own weights all the same."""
    x = activations(rng, 2, 128)
    for _ in range(20):
        layer = layer_of(rng, 128, 64)
        check_gemm(rig(x, layer), x, layer)
    del layer
    gc.collect()
    assert rig.device.statistics().layers == 0
    assert rig.device.statistics().weight_bytes == 0


# --- lists of runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", [True, False], ids=["lists", "one by one"])
def test_many_calls(artifacts: EmulatedArtifacts, rng: Rng, chain: bool) -> None:
    rig = Rig(artifacts, chain=chain)
    layers = [layer_of(rng, n=n, bias=n > 200) for n in (64, 520, 520, 200)]
    calls = [(activations(rng, m), layer) for layer in layers for m in (1, 7, 0)]
    for (x, layer), y in zip(calls, rig.many(calls), strict=True):
        np.testing.assert_array_equal(y, rig(x, layer))
    assert rig.device.statistics().lists == (2 if chain else 0)
    rig.close()


def test_a_list_with_activations_that_are_not_finite_runs_nothing(rig: Rig, rng: Rng) -> None:
    layer = layer_of(rng)
    good, bad = activations(rng, 3), activations(rng, 3)
    bad[1, 1] = np.inf
    rig(good, layer)
    live = rig.xrt.live()
    with pytest.raises(QuantizationError, match=r"x\[1, 1\]"):
        rig.many([(good, layer), (bad, layer)])
    rig.many([(good, layer)])
    assert rig.xrt.live().runs == live.runs


@pytest.mark.parametrize(
    ("firmware", "parameters", "chained"),
    [
        ("1.0.15.6\n", {"timeout_in_sec": "2"}, False),
        ("6.14.0.1\n", {"timeout_in_sec": "2"}, False),
        ("6.15.0.1\n", {"timeout_in_sec": "2"}, True),
        ("7.1.0.0\n", {"tdr_timeout_ms": "2000"}, True),
        ("6.15.0.1\n", {"timeout_in_sec": "0"}, False),
        ("6.15.0.1\n", {}, False),
        ("what", {"timeout_in_sec": "2"}, False),
        (None, {"timeout_in_sec": "2"}, False),
    ],
)
def test_lists_need_firmware_and_a_watchdog(
    tmp_path: Path, firmware: str | None, parameters: dict[str, str], chained: bool
) -> None:
    from tilefuse.runtime.chaining import can_chain

    device = tmp_path / "bus" / "pci" / "devices" / "0000:c5:00.1"
    device.mkdir(parents=True)
    if firmware is not None:
        (device / "fw_version").write_text(firmware)
    folder = tmp_path / "module" / "amdxdna" / "parameters"
    folder.mkdir(parents=True)
    for name, value in parameters.items():
        (folder / name).write_text(value)

    class Module:
        runlist = object()

    assert can_chain(Module(), "0000:c5:00.1", tmp_path) is chained
    assert not can_chain(object(), "0000:c5:00.1", tmp_path)
    assert not can_chain(Module(), "", tmp_path)


# --- threads, processes, time -----------------------------------------------------------------------------------------


def test_threads(rig: Rig, rng: Rng) -> None:
    """Two configurations and two layers of one, from four threads."""
    layers = [layer_of(rng), layer_of(rng), layer_of(rng, scheme=Scheme(8, 64)), layer_of(rng, bias=True)]
    problems = [(activations(rng, m), layer) for m, layer in zip((3, 70, 5, 1), layers, strict=True)]
    want = [rig(x, layer) for x, layer in problems]
    wrong: list[str] = []

    def work(index: int) -> None:
        x, layer = problems[index]
        for _ in range(6):
            if not np.array_equal(rig(x, layer), want[index]):
                wrong.append(f"thread {index}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert rig.device.statistics().uploads == len(layers)


def test_threads_that_begin_together(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """Nothing is open, and all want the same layer: it is uploaded once, its context opened once."""
    rig = Rig(artifacts)
    layer, x = layer_of(rng), activations(rng, 4)
    barrier, results = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        results.append(rig(x, layer))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for y in results:
        check_gemm(y, x, layer)
    assert len(results) == 4
    found = rig.device.statistics()
    assert (found.uploads, found.contexts) == (1, 1)
    rig.close()


@pytest.mark.slow
def test_a_thousand_dispatches_take_no_more_memory(rig: Rig, rng: Rng) -> None:
    layer, process = layer_of(rng, 128, 64), psutil.Process()
    x = activations(rng, 2, 128)
    for _ in range(100):
        rig(x, layer)
        rig(x[0], layer)
    gc.collect()
    resident, live = process.memory_info().rss, rig.xrt.live()
    for _ in range(500):
        rig(x, layer)
        rig(x[0], layer)
    gc.collect()
    assert rig.xrt.live() == live
    # A buffer of each dispatch would be 8 MB at least.
    assert process.memory_info().rss - resident < 3 << 20


def test_closing(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """Closing twice is once; the next call opens the device again."""
    rig = Rig(artifacts)
    rig.device.close()
    layer, x = layer_of(rng), activations(rng, 4)
    want = rig(x, layer)
    rig.close()
    rig.close()
    assert rig.device.statistics().layers == 0
    np.testing.assert_array_equal(rig(x, layer), want)
    rig.close()


def test_closing_waits_for_what_runs(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    rig = Rig(artifacts)
    layer, x = layer_of(rng, 512, 2048), activations(rng, 130, 512)
    results = []
    thread = threading.Thread(target=lambda: results.append(rig(x, layer)))
    thread.start()
    while not rig.xrt.live().contexts:
        pass
    rig.close()
    thread.join()
    check_gemm(results[0], x, layer)
    rig.close()


def test_closes_at_exit(tmp_path: Path) -> None:
    """The interpreter ends with the device open: nothing is said, nothing is left."""
    script = f"""
import atexit, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from layers import Scheme, make_layer
import tilefuse as tf
from tilefuse.runtime import resolve_device
layer = make_layer(np.random.default_rng(0), 128, 64, Scheme(4, 128)).layer
device = resolve_device("emulator")
tf.gemv(np.ones(128, np.float32), layer, device="emulator")
print(bool(device._module.live()))
def last():
    print(bool(device._module.live()))
import tilefuse.runtime.npu as npu
atexit.unregister(npu._close_all)
atexit.register(last)
atexit.register(npu._close_all)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["True", "False"]


def _in_child(rig: Rig, x: Any, layers: list[PackedLinear], queue: Any) -> None:
    before = rig.xrt.live()
    try:
        rig(x, layers[0])
    except NpuError as error:
        queue.put(str(error))
    layers.pop()
    gc.collect()
    rig.device.statistics()
    rig.device.close()
    gc.collect()
    queue.put((before, rig.xrt.live()))
    queue.put(rig(x, layers[0]))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_is_told(rig: Rig, rng: Rng) -> None:
    """The parent's device is of no use there, and giving any of it back would take it from the parent.

    Once it is closed there, the child opens its own.
    """
    layers, x = [layer_of(rng), layer_of(rng)], activations(rng, 2)
    wanted = [rig(x, layer) for layer in layers]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with rig.device._condition:  # as another thread may have it
        child = context.Process(target=_in_child, args=(rig, x, layers, queue))
        child.start()
    said = queue.get(timeout=60)
    before, after = queue.get(timeout=60)
    computed = queue.get(timeout=60)
    child.join()
    assert "opened before this process was forked" in said
    assert '"spawn"' in said
    assert before.buffers > 2
    assert after == before
    np.testing.assert_array_equal(computed, wanted[0])
    for layer, want in zip(layers, wanted, strict=True):
        np.testing.assert_array_equal(rig(x, layer), want)


def test_a_run_when_the_emulated_device_has_stopped(rig: Rig, rng: Rng) -> None:
    """Threads may go on while the interpreter ends, which must not wait for them for ever."""
    layer, x = layer_of(rng), activations(rng, 2)
    rig(x, layer)
    rig.xrt._system.processor.stop()
    with pytest.raises(NpuError, match=r"ended as ABORT .*: the process ends"):
        rig(x, layer)


def test_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEFUSE_NPU_TIMEOUT_MS", raising=False)
    assert timeout_ms() == TIMEOUT_MS > 2000  # the driver's watchdog is first
    monkeypatch.setenv("TILEFUSE_NPU_TIMEOUT_MS", "700")
    assert timeout_ms() == 700
    for bad in ("0", "-1", "1e3", "4294967296"):
        monkeypatch.setenv("TILEFUSE_NPU_TIMEOUT_MS", bad)
        with pytest.raises(DeviceError, match="TILEFUSE_NPU_TIMEOUT_MS is"):
            timeout_ms()


def test_a_view_is_what_devices_take(rig: Rig, rng: Rng) -> None:
    """Several row blocks of a view with rows apart, in parts."""
    layer = layer_of(rng)
    x = activations(rng, 30)[::3]
    y = np.empty((10, layer.n), F32)
    rig.device.matmul(view(x), layer, view(y))
    check_gemm(y, x, layer)
