"""src/tilefuse/_xrt: the binding of XRT, compiled against stand-ins for XRT's headers (tests/xrt_stub), and called."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sysconfig
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilefuse.runtime.xrt import Xrt

pybind11 = pytest.importorskip("pybind11")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("TILEFUSE_SANITIZED" in os.environ, reason="compiles a module of its own"),
]


@pytest.fixture(scope="module")
def binding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    root = Path(__file__).resolve().parent
    made = tmp_path_factory.mktemp("xrt") / f"_xrt{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = ["-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include")]
    stub = ["-isystem", str(root / "xrt_stub")]
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"]
    source = root.parent / "src" / "tilefuse" / "_xrt" / "module.cpp"
    command = [
        compiler,
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        *warnings,
        *includes,
        *stub,
        str(source),
        "-o",
        str(made),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location("_xrt", made)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_dispatch(binding: Any) -> None:
    """The calls of section "Host" of XRT's examples: buffers, a run, its state, results; a sync each way."""
    device = binding.device(0)
    xclbin = binding.xclbin("some.xclbin")
    assert [kernel.get_name() for kernel in xclbin.get_kernels()] == ["MLIR_AIE"]
    context = binding.hw_context(device, device.register_xclbin(xclbin))
    kernel = binding.kernel(context, "MLIR_AIE")
    code = binding.bo(device, 16, binding.bo.cacheable, kernel.group_id(1))
    into = binding.bo(device, 64, binding.bo.host_only, kernel.group_id(3))
    out = binding.bo(device, 64, binding.bo.host_only, kernel.group_id(4))
    np.frombuffer(into.map(), np.uint8)[:] = np.arange(64)
    run = binding.run(kernel)
    run.set_arg(0, 3)
    run.set_arg(1, code)
    run.set_arg(2, 16)
    run.set_arg(3, into)
    run.set_arg(4, out)
    assert run.state() == binding.ert_cmd_state.ERT_CMD_STATE_NEW
    into.sync(binding.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE)
    run.start()
    assert run.wait(1000) == binding.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    assert not np.frombuffer(out.map(), np.uint8).any()  # not synced yet
    out.sync(binding.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE, 32, 0)
    assert np.frombuffer(out.map(), np.uint8).tolist() == [*range(32), *[0] * 32]
    out.write(np.full(4, 9, np.uint8), 60)
    assert out.read(4, 60) == b"\x09" * 4


def test_a_list_of_runs(binding: Any) -> None:
    device = binding.device(0)
    context = binding.hw_context(device, device.register_xclbin(binding.xclbin("x")))
    run = binding.run(binding.kernel(context, "MLIR_AIE"))
    run.set_arg(0, 3)
    run.set_arg(3, binding.bo(device, 8, binding.bo.host_only, 0))
    runs = binding.runlist(context)
    runs.add(run)
    runs.execute()
    runs.wait()
    assert runs.wait(timedelta(milliseconds=5)) is True


def test_errors_become_python_s(binding: Any) -> None:
    with pytest.raises(RuntimeError, match="No such device with index '7'"):
        binding.device(7)
    device = binding.device(0)
    buffer = binding.bo(device, 8, binding.bo.host_only, 0)
    with pytest.raises(RuntimeError, match="past buffer size"):
        buffer.write(np.zeros(9, np.uint8), 0)
    with pytest.raises(ValueError, match="contiguous"):
        buffer.write(np.zeros(16, np.uint8)[::2], 0)
    with pytest.raises(TypeError):
        binding.run(device)


def test_the_runtime_opens_it(binding: Any) -> None:
    """The adapter takes this module as it takes pyxrt."""
    assert Xrt(binding, 0).name == "NPU Strix"
    assert set(dir(binding)) >= {"device", "xclbin", "hw_context", "kernel", "bo", "run", "runlist", "ert_cmd_state"}
