"""Many runs on the emulated pyxrt: runlists against what XRT's sources say, threads, leaks.

Paths in the docstrings are XRT's (Xilinx/XRT) or the driver's (amd/xdna-driver).
"""

from __future__ import annotations

import datetime
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from emulated_host import Host, Problem, vector
from layers import Scheme, make_layer

from tilefuse import plan as planning
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.npu.enums import ert_cmd_state
from tilefuse.emulator.xrt import EmulatedXrt, Fault
from tilefuse.testing import gemm_error

Rng = np.random.Generator

NEW = ert_cmd_state.ERT_CMD_STATE_NEW
COMPLETED = ert_cmd_state.ERT_CMD_STATE_COMPLETED
ERROR = ert_cmd_state.ERT_CMD_STATE_ERROR
ABORT = ert_cmd_state.ERT_CMD_STATE_ABORT
TIMEOUT = ert_cmd_state.ERT_CMD_STATE_TIMEOUT


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> EmulatedArtifacts:
    return EmulatedArtifacts(tmp_path_factory.mktemp("xclbins"))


@pytest.fixture
def problem(artifacts: EmulatedArtifacts, rng: Rng) -> Iterator[Problem]:
    pyxrt = EmulatedXrt()
    made = Problem(pyxrt, artifacts, rng)
    yield made
    made.close()
    gc.collect()
    assert not pyxrt.live()


# --- runlists --------------------------------------------------------------------------------------------------------


def test_a_runlist(problem: Problem) -> None:
    """xrt_kernel.cpp, runlist_impl; the driver's aie2_sched_cmdlist_resp_handler sets the state of the chain only."""
    runlist = problem.pyxrt.runlist(hwctx=problem.host.context)
    runlist.execute()
    runlist.wait()
    runs = [problem.run() for _ in range(30)]
    for run in runs:
        runlist.add(run)
    with pytest.raises(RuntimeError, match="belongs to a runlist and cannot be explicitly started: Invalid argument"):
        runs[0].start()
    for _ in range(2):
        runlist.execute()
        with pytest.raises(RuntimeError, match="must be idle before submitting for execution, current state: running"):
            runlist.execute()
        with pytest.raises(RuntimeError, match="must be idle before adding run objects"):
            runlist.add(problem.run())
        runlist.wait()
        assert {run.state() for run in runs} == {NEW}
        assert problem.right()
        problem.spoil()
    with pytest.raises(RuntimeError, match="waits for ever"):
        runs[0].wait()
    with pytest.raises(TypeError, match="incompatible"):
        runlist.wait(datetime.timedelta(seconds=1))
    with pytest.raises(TypeError, match="incompatible"):
        runlist.add(problem.code)
    assert not hasattr(runlist, "state")
    del runlist, run
    assert problem.outcome(runs[0]) is COMPLETED


@pytest.mark.parametrize(("fault", "state"), [(Fault.ERROR, ERROR), (Fault.TIMEOUT, TIMEOUT)])
def test_a_runlist_ends_with_the_first_that_fails(problem: Problem, fault: Fault, state: Any) -> None:
    """xrt_kernel.cpp, runlist_impl::wait: it has its state, what is behind it ABORT, and the list is idle."""
    runlist = problem.pyxrt.runlist(problem.host.context)
    runs = [problem.run() for _ in range(4)]
    for run in runs:
        runlist.add(run)
    problem.pyxrt.inject(fault, at=2)
    runlist.execute()
    with pytest.raises(RuntimeError, match=rf"runlist failed execution \({state.name}\)"):
        runlist.wait()
    assert [run.state() for run in runs] == [NEW, state, ABORT, ABORT]
    problem.pyxrt.reset()
    runlist.execute()
    runlist.wait()
    assert problem.right()


def test_a_runlist_that_is_refused_must_be_waited_for(problem: Problem) -> None:
    """xrt_kernel.cpp, runlist_impl::execute: a submission that fails counts as running."""
    runlist = problem.pyxrt.runlist(problem.host.context)
    runlist.add(problem.run())
    problem.pyxrt.inject(Fault.REFUSED)
    with pytest.raises(RuntimeError, match="EXEC_CMD"):
        runlist.execute()
    with pytest.raises(RuntimeError, match="current state: running"):
        runlist.execute()
    runlist.wait()
    runlist.execute()
    runlist.wait()
    assert problem.right()


# --- threads, leaks --------------------------------------------------------------------------------------------------


def test_threads_with_a_layer_each(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """Two contexts of different configurations on one device, and two threads that share one of them."""
    pyxrt = EmulatedXrt()
    device = pyxrt.device(0)
    layers = [make_layer(rng, 256, 128, Scheme(bits, 128)).layer for bits in (4, 8)]
    plans = [planning.gemv(layer.layout) for layer in layers]
    hosts = [Host(pyxrt, artifacts, plan, device) for plan in plans]
    inputs = [[vector(rng, 256) for _ in range(4)] for _ in range(3)]
    wrong: list[Any] = []

    def work(number: int) -> None:
        which = number % 2
        host, plan, layer = hosts[which], plans[which], layers[which]
        for x in inputs[number]:
            buffers = host.buffers(plan, layer, x)
            run = host.run(buffers)
            run.start()
            state = run.wait()
            buffers[3].sync(host.from_device)
            if state is not COMPLETED or not gemm_error(host.results(plan, buffers[3])[0], x, layer).ok:
                wrong.append((number, state))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for host in hosts:
        host.__dict__.clear()
    gc.collect()
    assert not pyxrt.live()


def test_nothing_is_left_after_runs(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """As soon as wait returns, the device keeps nothing: what the host gives back is gone at once."""
    pyxrt = EmulatedXrt()
    for _ in range(5):
        problem = Problem(pyxrt, artifacts, rng)
        run = problem.run()
        assert problem.outcome(run) is COMPLETED
        assert pyxrt.live().buffers == 4
        assert (pyxrt.live().contexts, pyxrt.live().runs) == (1, 1)
        del run
        problem.close()
        assert not pyxrt.live()


@pytest.mark.skipif("TILEFUSE_SANITIZED" in os.environ, reason="an address sanitizer keeps what is freed")
def test_many_dispatches_in_flat_memory(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """What the module itself keeps: runs that do nothing, failing ones among them."""
    pyxrt = EmulatedXrt(executes=False)
    problem = Problem(pyxrt, artifacts, rng)
    pyxrt.inject(Fault.ERROR, at=1, times=None, when=lambda call: call.number % 10 == 0)
    process = psutil.Process()

    def dispatch(times: int) -> None:
        for _ in range(times):
            run = problem.run()
            run.start()
            run.wait()

    dispatch(500)
    before = process.memory_info().rss
    dispatch(5000)
    assert process.memory_info().rss - before < 4 << 20
    assert pyxrt.live().runs == 0
    assert pyxrt.calls("run") == 5500


def test_without_execution_runs_complete_at_once(artifacts: EmulatedArtifacts, rng: Rng) -> None:
    pyxrt = EmulatedXrt(executes=False)
    problem = Problem(pyxrt, artifacts, rng)
    run = problem.run()
    run.start()
    assert run.state() is COMPLETED
    assert not problem.by.read(problem.by.size(), 0).any()
    assert pyxrt.last_report is None


def test_the_devices_time_is_told_apart(problem: Problem) -> None:
    assert problem.pyxrt.device_seconds == 0
    assert problem.outcome(problem.run()) is COMPLETED
    assert problem.pyxrt.device_seconds > 0
