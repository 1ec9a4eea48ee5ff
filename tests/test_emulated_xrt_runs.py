"""Runs on the emulated pyxrt against what XRT's sources say: arguments, states, failures.

Paths in the docstrings are XRT's (Xilinx/XRT) or the driver's (amd/xdna-driver).
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from emulated_host import Problem

from tilefuse import plan as planning
from tilefuse.emulator import instructions
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.npu.enums import ert_cmd_state
from tilefuse.emulator.xrt import EmulatedXrt, Fault

Rng = np.random.Generator

NEW = ert_cmd_state.ERT_CMD_STATE_NEW
COMPLETED = ert_cmd_state.ERT_CMD_STATE_COMPLETED
ERROR = ert_cmd_state.ERT_CMD_STATE_ERROR
ABORT = ert_cmd_state.ERT_CMD_STATE_ABORT
TIMEOUT = ert_cmd_state.ERT_CMD_STATE_TIMEOUT
NORESPONSE = ert_cmd_state.ERT_CMD_STATE_NORESPONSE


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
