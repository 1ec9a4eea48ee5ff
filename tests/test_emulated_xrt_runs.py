"""Runs on the emulated pyxrt against what XRT's sources say: arguments, states, failures, runlists, threads, leaks.

Paths in the docstrings are XRT's (Xilinx/XRT) or the driver's (amd/xdna-driver).
"""

from __future__ import annotations

import datetime
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from emulated_host import Host, small_gemv, vector
from layers import Scheme, make_layer

from tilefuse import plan as planning
from tilefuse.emulator import instructions
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.xrt import EmulatedXrt, Fault
from tilefuse.emulator.xrt_enums import ert_cmd_state
from tilefuse.testing import gemm_error

Rng = np.random.Generator

NEW = ert_cmd_state.ERT_CMD_STATE_NEW
COMPLETED = ert_cmd_state.ERT_CMD_STATE_COMPLETED
ERROR = ert_cmd_state.ERT_CMD_STATE_ERROR
ABORT = ert_cmd_state.ERT_CMD_STATE_ABORT
TIMEOUT = ert_cmd_state.ERT_CMD_STATE_TIMEOUT
NORESPONSE = ert_cmd_state.ERT_CMD_STATE_NORESPONSE


class Problem:
    """A GEMV on a context, ready to run."""

    def __init__(self, pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng) -> None:
        self.pyxrt = pyxrt
        self.plan, self.layer = small_gemv(rng)
        self.x = vector(rng, self.layer.k)
        self.host = Host(pyxrt, artifacts, self.plan)
        self.code, self.bx, self.bw, self.by = self.host.buffers(self.plan, self.layer, self.x)

    def run(self) -> Any:
        """A run, not started."""
        return self.host.run([self.code, self.bx, self.bw, self.by])

    def outcome(self, run: Any) -> Any:
        """Starts and waits."""
        run.start()
        return run.wait()

    def right(self) -> bool:
        """Whether the device's side of y is what it should be; forgets it on the host's."""
        self.by.sync(self.host.from_device)
        y = self.host.results(self.plan, self.by)[0]
        return bool(gemm_error(y, self.x, self.layer).ok)

    def spoil(self) -> None:
        """Clears y on both sides."""
        self.by.write(bytes(self.by.size()), 0)
        self.by.sync(self.host.to_device)

    def close(self) -> None:
        """Lets everything go."""
        self.__dict__.clear()


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


# --- arguments -------------------------------------------------------------------------------------------------------


def test_which_arguments_are_taken(problem: Problem) -> None:
    """pyxrt.cpp: a bo, or an int of 32 bits; core/common/api/xrt_kernel.cpp, get_arg: at() of a vector."""
    run = problem.run()
    for index, value in ((0, 3.0), (0, None), (0, "3"), (0, 1 << 31), (0, np.zeros(1)), ("0", 3), (1 << 40, 3)):
        with pytest.raises(TypeError, match="incompatible"):
            run.set_arg(index, value)
    with pytest.raises(TypeError, match="incompatible"):
        run.set_arg(3, EmulatedXrt().bo)
    run.set_arg(np.int64(0), np.uint8(3))
    for index in (8, -1):
        with pytest.raises(IndexError, match="_M_range_check"):
            run.set_arg(index, 3)
    assert problem.outcome(run) is COMPLETED


@pytest.mark.parametrize("index", [8, 9, -1])
def test_more_buffers_than_declared(problem: Problem, index: int) -> None:
    """xrt_kernel.cpp, connectivity::valid_arg_connection indexes a vector without a check."""
    with pytest.raises(RuntimeError, match=f"the real XRT crashes here: argument {index} of a kernel that declares 8"):
        problem.run().set_arg(index, problem.bx)


def test_a_buffer_of_another_bank_is_replaced_by_a_copy(problem: Problem, caplog: pytest.LogCaptureFixture) -> None:
    """xrt_kernel.cpp, validate_bo_at_index: the results go to the copy, which nobody sees."""
    bo = problem.pyxrt.bo
    y = bo(problem.host.device, problem.by.size(), bo.host_only, problem.host.kernel.group_id(1))
    run = problem.run()
    run.set_arg(5, y)
    assert "local copy" in caplog.text
    assert problem.outcome(run) is COMPLETED
    y.sync(problem.host.from_device)
    assert not y.read(y.size(), 0).any()


def test_a_call_swallows_what_it_does_not_take(problem: Problem) -> None:
    """pyxrt.cpp, kernel.__call__: 3.0 is no integer, so that the opcode stays 0, and the firmware refuses the run."""
    arguments = [problem.code, problem.code.size(), problem.bx, problem.bw, problem.by]
    run = problem.host.kernel(3, *arguments)
    assert run.wait() is COMPLETED
    assert problem.right()
    assert problem.host.kernel(3, *arguments, 1, 2, 3, 4).wait() is COMPLETED
    assert problem.host.kernel(3.0, *arguments).wait() is ERROR
    assert problem.pyxrt.last_fault is not None
    assert "argument 0, the opcode, is not set" in problem.pyxrt.last_fault.message
    with pytest.raises(RuntimeError, match="crashes"):
        problem.host.kernel(3, *arguments, *[problem.bx] * 3)


def test_a_run_does_not_keep_its_buffers(problem: Problem) -> None:
    """The driver's shim/buffer.cpp, cmd_buffer::bind_at keeps handles, which the driver then looks for."""
    run = problem.run()
    problem.bx = None
    with pytest.raises(RuntimeError, match=r"EXEC_CMD IOCTL failed, .*argument 3 was freed \(err=-2\): No such file"):
        run.start()


def change(index: int, value: Any) -> Callable[[Problem, Any], None]:
    return lambda problem, run: run.set_arg(index, value)


def too_small(problem: Problem, run: Any) -> None:
    bo = problem.pyxrt.bo
    problem.bw = bo(problem.host.device, problem.bw.size() - 4, bo.host_only, problem.host.kernel.group_id(4))
    run.set_arg(4, problem.bw)


def damaged(problem: Problem, run: Any) -> None:
    problem.code.write(bytes([99]), problem.code.size() - 4)
    problem.code.sync(problem.host.to_device)


def never_synced(problem: Problem, run: Any) -> None:
    problem.code = problem.host.buffer(problem.host.artifacts.instructions(problem.plan), 1, sync=False)
    run.set_arg(1, problem.code)


def no_parameters(problem: Problem, run: Any) -> None:
    problem.bx = problem.host.buffer(np.zeros(problem.bx.size(), np.uint8), 3)
    run.set_arg(3, problem.bx)


def other_configuration(problem: Problem, run: Any) -> None:
    layout = problem.layer.layout
    problem.code = problem.host.buffer(instructions.encode(planning.gemv(layout, streams=2)), 1)
    run.set_arg(1, problem.code)
    run.set_arg(2, problem.code.size())


@pytest.mark.parametrize(
    ("spoil", "state", "message"),
    [
        (change(0, 2), ERROR, "argument 0, the opcode, is 2"),
        (change(1, 64), ERROR, "argument 1, the instructions, is 64"),
        (change(2, 12), ERROR, "argument 2 is 12; the instructions have"),
        (damaged, ERROR, "its checksum differs"),
        (never_synced, ERROR, "an instruction stream of the emulator begins with"),
        (change(4, 64), TIMEOUT, "argument 4, the buffer of w, is 64: no buffer lies there"),
        (too_small, TIMEOUT, "argument 4, the buffer of w, has"),
        (no_parameters, TIMEOUT, ""),
        (other_configuration, TIMEOUT, "the instructions are for gemv_bf16_w4g128_mantissa_128x64_2s_8c"),
    ],
)
def test_what_the_firmware_and_the_array_make_of_wrong_arguments(
    problem: Problem, spoil: Callable[[Problem, Any], None], state: Any, message: str
) -> None:
    """The firmware refuses what it can't read: ERROR. What hangs the array ends as TIMEOUT (the driver's watchdog)."""
    run = problem.run()
    spoil(problem, run)
    assert problem.outcome(run) is state
    fault = problem.pyxrt.last_fault
    assert fault is not None
    assert fault.state is state
    assert message in fault.message
    assert fault.configuration == problem.plan.configuration.name


def test_missing_arguments_hang(problem: Problem) -> None:
    run = problem.pyxrt.run(problem.host.kernel)
    run.set_arg(0, 3)
    run.set_arg(1, problem.code)
    run.set_arg(2, problem.code.size())
    assert problem.outcome(run) is TIMEOUT
    assert problem.pyxrt.last_fault is not None
    assert "argument 3, the buffer of x, is not set" in problem.pyxrt.last_fault.message


def test_stale_activations_give_stale_results(problem: Problem, rng: Rng) -> None:
    """New activations that were written and not synced: the device computes on the old ones."""
    run = problem.run()
    assert problem.outcome(run) is COMPLETED
    assert problem.right()
    head = 4 * problem.plan.x_offset
    problem.bx.write(bytes(problem.bx.size() - head), head)
    assert problem.outcome(run) is COMPLETED
    assert problem.right()
    problem.bx.sync(problem.host.to_device)
    assert problem.outcome(run) is COMPLETED
    assert not problem.right()


def test_results_are_the_devices_until_synced(problem: Problem) -> None:
    run = problem.run()
    assert problem.outcome(run) is COMPLETED
    assert not problem.by.read(problem.by.size(), 0).any()
    assert problem.right()


# --- states ----------------------------------------------------------------------------------------------------------


def test_a_run_in_flight(problem: Problem) -> None:
    """The driver's aie2_ctx.c keeps a command NEW until it ends. xrt_kernel.cpp: wait with a time returns TIMEOUT when
    that is over, and the run goes on; it can't be started again before its end was seen by wait or state."""
    problem.pyxrt.inject(Fault.STALL)
    run = problem.run()
    run.start()
    assert run.wait(1) is TIMEOUT
    assert run.state() is NEW
    with pytest.raises(RuntimeError, match="bad command state, can't launch"):
        run.start()
    problem.pyxrt.resume()
    assert run.wait() is COMPLETED
    assert problem.right()
    run.start()
    while run.state() is NEW:
        pass
    run.start()
    assert run.wait(0) is COMPLETED


def test_a_start_needs_a_wait(problem: Problem) -> None:
    """xrt_kernel.cpp, kernel_command: m_done is set by what looks at the state, not by the device."""
    run, other = problem.run(), problem.run()
    run.start()
    assert problem.outcome(other) is COMPLETED  # so that the first has ended, too
    with pytest.raises(RuntimeError, match="bad command state"):
        run.start()
    assert run.wait() is COMPLETED
    assert problem.outcome(run) is COMPLETED


def test_waiting_for_nothing(problem: Problem) -> None:
    """The driver's shim/buffer.cpp, wait_for_submitted; with a limit as well."""
    run = problem.run()
    for arguments in ((), (100,)):
        with pytest.raises(RuntimeError, match="the real XRT waits for ever here: the run was never started"):
            run.wait(*arguments)
    assert run.state() is NEW
    problem.outcome(run)
    assert run.wait() is run.wait(5) is COMPLETED
    for limit in (-1, 1.5, datetime.timedelta(seconds=1)):
        with pytest.raises(TypeError, match="incompatible"):
            run.wait(limit)


def test_wait2(problem: Problem) -> None:
    """Raises, and returns nothing; pyxrt is built without pybind11's chrono.h, so that it takes no timedelta."""
    run = problem.run()
    run.start()
    assert run.wait2() is None
    problem.pyxrt.inject(Fault.ABORT)
    run.start()
    with pytest.raises(RuntimeError, match=r"failed to complete successfully \(ERT_CMD_STATE_ABORT\)"):
        run.wait2()
    with pytest.raises(TypeError):
        run.wait2(datetime.timedelta(seconds=1))


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "state"), [(Fault.ABORT, ABORT), (Fault.ERROR, ERROR), (Fault.NO_RESPONSE, NORESPONSE)]
)
def test_a_failed_run_leaves_the_next_one_working(problem: Problem, fault: Fault, state: Any) -> None:
    problem.pyxrt.inject(fault, at=2)
    run = problem.run()
    assert problem.outcome(run) is COMPLETED
    problem.spoil()
    assert problem.outcome(run) is state
    problem.by.sync(problem.host.from_device)
    assert not problem.by.read(problem.by.size(), 0).any()
    assert problem.pyxrt.last_fault is not None
    assert problem.pyxrt.last_fault.state is state
    assert problem.outcome(run) is COMPLETED
    assert problem.right()


def test_a_timeout_wedges_its_context(problem: Problem, artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """EXEC_CMD fails from then on, also for what was on its way; another context goes on."""
    problem.pyxrt.inject(Fault.TIMEOUT)
    run = problem.run()
    assert problem.outcome(run) is TIMEOUT
    for again in (run, problem.run()):
        with pytest.raises(RuntimeError, match=r"EXEC_CMD IOCTL failed \(err=-5\): Input/output error"):
            again.start()
    assert run.wait() is TIMEOUT
    other = Problem(problem.pyxrt, artifacts, rng)
    assert other.outcome(other.run()) is COMPLETED
    problem.pyxrt.reset()
    assert problem.outcome(run) is COMPLETED
    assert problem.right()


def test_a_deadlock_wedges_until_reset(problem: Problem) -> None:
    """No parameters, so that the cores wait for none and leave data behind; then all as it should be."""
    run = problem.run()
    right = problem.bx
    no_parameters(problem, run)
    assert problem.outcome(run) is TIMEOUT
    assert problem.pyxrt.last_fault is not None
    assert problem.pyxrt.last_fault.error in ("DeadlockError", "DataflowError")
    run.set_arg(3, right)
    with pytest.raises(RuntimeError, match="EXEC_CMD"):
        run.start()
    problem.pyxrt.reset()
    assert problem.outcome(run) is COMPLETED
    assert problem.right()


def test_what_is_queued_behind_a_timeout_is_aborted(problem: Problem) -> None:
    """The driver's aie2_ctx.c, aie2_ctx_cmd_health_data: the first is TIMEOUT, those behind it ABORT."""
    problem.pyxrt.inject(Fault.STALL)
    problem.pyxrt.inject(Fault.TIMEOUT, at=2)
    runs = [problem.run() for _ in range(3)]
    for run in runs:
        run.start()
    problem.pyxrt.resume()
    assert [run.wait() for run in runs] == [COMPLETED, TIMEOUT, ABORT]


def test_a_wedged_device(problem: Problem, artifacts: EmulatedArtifacts, rng: Rng) -> None:
    problem.pyxrt.inject(Fault.WEDGED, at=2)
    run = problem.run()
    assert problem.outcome(run) is COMPLETED
    other = Problem(problem.pyxrt, artifacts, rng)
    for start in (run.start, other.run().start, run.start):
        with pytest.raises(RuntimeError, match="EXEC_CMD"):
            start()
    problem.pyxrt.reset()
    assert problem.outcome(run) is COMPLETED


def test_a_start_that_is_refused_once(problem: Problem) -> None:
    problem.pyxrt.inject(Fault.REFUSED)
    run = problem.run()
    with pytest.raises(RuntimeError, match="EXEC_CMD"):
        run.start()
    assert problem.outcome(run) is COMPLETED


def test_a_run_that_did_nothing(problem: Problem) -> None:
    problem.pyxrt.inject(Fault.STALE)
    run = problem.run()
    assert problem.outcome(run) is COMPLETED
    assert not problem.right()
    assert problem.outcome(run) is COMPLETED
    assert problem.right()


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
    assert process.memory_info().rss - before < 1 << 20
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
