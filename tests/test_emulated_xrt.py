"""The emulated pyxrt against what XRT's sources say: its classes, arguments, values, errors and memory.

Paths in the docstrings are XRT's (Xilinx/XRT) or the driver's (amd/xdna-driver).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from emulated_host import Host, small_gemv, vector
from layers import Scheme, make_layer
from test_designs_emulated import check_gemm

from tilefuse import host_buffers
from tilefuse import plan as planning
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.xrt import EmulatedXrt, Fault, Injection
from tilefuse.testing import gemm_error

Rng = np.random.Generator


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> EmulatedArtifacts:
    return EmulatedArtifacts(tmp_path_factory.mktemp("xclbins"))


@pytest.fixture
def pyxrt() -> Iterator[EmulatedXrt]:
    """The module; nothing of it may be left when the test has ended."""
    module = EmulatedXrt()
    yield module
    gc.collect()
    assert not module.live()


@pytest.fixture
def host(pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng) -> Iterator[Host]:
    made: Host = Host(pyxrt, artifacts, small_gemv(rng)[0])
    yield made
    made.__dict__.clear()


# --- the sequence of a host ------------------------------------------------------------------------------------------


def test_a_gemm_end_to_end(pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng) -> None:
    layer = make_layer(rng, 640, 1100, Scheme(4, 128), perm=True).layer
    plan = planning.gemm(layer.layout, 77)
    x = rng.normal(0, 1, (77, 640)).astype(np.float32)
    host = Host(pyxrt, artifacts, plan)
    buffers = host.buffers(plan, layer, x)
    run = host.run(buffers)
    assert run.state() == pyxrt.ert_cmd_state.ERT_CMD_STATE_NEW
    run.start()
    assert run.wait() == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    assert run.state() == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    buffers[3].sync(host.from_device)
    check_gemm(host.results(plan, buffers[3]), x, layer)
    assert pyxrt.last_report is not None
    assert pyxrt.last_report.cycles > 0
    assert pyxrt.last_fault is None


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("words", [False, True], ids=["bytes", "words"])
def test_a_gemv_end_to_end(
    pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng, streams: int, words: bool
) -> None:
    """ninstr in bytes is what mlir-aie's Python host passes, in words what its C++ hosts do: both must work."""
    layer = make_layer(rng, 1184, 700, Scheme(8, 64)).layer
    plan = planning.gemv(layer.layout, streams=streams)
    x = vector(rng, 1184)
    host = Host(pyxrt, artifacts, plan)
    buffers = host.buffers(plan, layer, x)
    run = host.run(buffers)
    run.set_arg(2, buffers[0].size() // (4 if words else 1))
    run.start()
    assert run.wait(60000) == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    buffers[3].sync(host.from_device)
    assert gemm_error(host.results(plan, buffers[3])[0], x, layer).ok


def test_three_shapes_on_one_context(pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """One xclbin, three instruction streams, the first once more; buffers may be larger than a stream needs."""
    problems = []
    for m, k, n in [(300, 256, 600), (250, 640, 1030), (400, 32, 520)]:
        layer = make_layer(rng, k, n, Scheme(4, 128)).layer
        problems.append((planning.gemm(layer.layout, m, tiles=2, bands=4), layer, (m, k)))
    host = Host(pyxrt, artifacts, problems[0][0])
    assert {artifacts.xclbin(plan).sha256 for plan, _, _ in problems} == {artifacts.xclbin(problems[0][0]).sha256}
    y = pyxrt.bo(host.device, 8 << 20, pyxrt.bo.host_only, host.kernel.group_id(5))
    for plan, layer, shape in (*problems, problems[0]):
        x = rng.normal(0, 1, shape).astype(np.float32)
        buffers = [*host.buffers(plan, layer, x)[:3], y]
        run = host.run(buffers)
        run.start()
        assert run.wait() == pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
        y.sync(host.from_device, 4 * plan.y_words, 0)
        found = np.frombuffer(y.map(), np.int32)[: plan.y_words].copy()
        check_gemm(host_buffers.results(plan, found), x, layer)
        del run, buffers


# --- enumerations ----------------------------------------------------------------------------------------------------


def test_values_are_those_of_xrt(pyxrt: EmulatedXrt) -> None:
    """core/include/xrt/detail/ert.h, xrt_mem.h, xrt_bo.h, deprecated/xrt.h; RUNNING = 3 is not bound by pyxrt."""
    states = {member.name.removeprefix("ERT_CMD_STATE_"): int(member) for member in pyxrt.ert_cmd_state}
    assert states == {
        "NEW": 1,
        "QUEUED": 2,
        "COMPLETED": 4,
        "ERROR": 5,
        "ABORT": 6,
        "SUBMITTED": 7,
        "TIMEOUT": 8,
        "NORESPONSE": 9,
        "SKERROR": 10,
        "SKCRASHED": 11,
    }
    assert [int(member) for member in pyxrt.xclBOSyncDirection] == [0, 1, 2, 3]
    flags = {name: int(getattr(pyxrt.bo, name)) for name in ("normal", "cacheable", "device_only", "host_only", "svm")}
    assert flags == {
        "normal": 0,
        "cacheable": 0x01000000,
        "device_only": 0x10000000,
        "host_only": 0x20000000,
        "svm": 0x08000000,
    }
    assert pyxrt.bo.flags.p2p is pyxrt.bo.p2p
    assert int(pyxrt.bo.p2p) == 0x40000000


def test_enumerations_compare_as_pybind11_has_it(pyxrt: EmulatedXrt) -> None:
    """C's enumerations compare with integers, scoped ones don't; text and representation are alike."""
    completed = pyxrt.ert_cmd_state.ERT_CMD_STATE_COMPLETED
    assert completed == 4
    assert completed != 5
    assert len({completed, completed}) == 1
    assert pyxrt.bo.host_only != 0x20000000
    assert str(completed) == "ert_cmd_state.ERT_CMD_STATE_COMPLETED"
    assert repr(completed) == "<ert_cmd_state.ERT_CMD_STATE_COMPLETED: 4>"
    assert pyxrt.ert_cmd_state(4) is completed


@pytest.mark.parametrize("name", ["graph", "elf", "module", "carveout", "no_such_thing"])
def test_what_the_module_has_not_is_an_attribute_error(pyxrt: EmulatedXrt, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(pyxrt, name)


def test_objects_take_no_new_attributes(host: Host) -> None:
    """pybind11's classes have no __dict__."""
    for made in (host.device, host.context, host.kernel, host.pyxrt.run(host.kernel)):
        with pytest.raises(AttributeError):
            made.anything = 1


# --- device, xclbin, context, kernel ---------------------------------------------------------------------------------


def test_a_device_that_is_not_there(pyxrt: EmulatedXrt) -> None:
    """core/pcie/linux/system_linux.cpp: get_pcidev."""
    assert pyxrt.enumerate_devices() == 1
    for module, index in ((pyxrt, 9), (EmulatedXrt(devices=0), 0)):
        with pytest.raises(RuntimeError, match=f"No such device with index '{index}'"):
            module.device(index)
    for index in (-1, 0.0, None):
        with pytest.raises(TypeError, match="incompatible"):
            pyxrt.device(index)


def test_a_device_by_its_address(pyxrt: EmulatedXrt) -> None:
    bdf = pyxrt.device(0).get_info(pyxrt.xrt_info_device.bdf)
    assert pyxrt.device(bdf).get_info(pyxrt.xrt_info_device.bdf) == bdf
    with pytest.raises(RuntimeError, match=r"No such device '0000:00:00.0': Invalid argument"):
        pyxrt.device("0000:00:00.0")


def test_what_a_device_tells() -> None:
    module = EmulatedXrt(info={"name": "NPU Krackan 1"})
    device = module.device(index=0)
    assert device.get_info(module.xrt_info_device.name) == "NPU Krackan 1"
    assert EmulatedXrt().device(0).get_info(module.xrt_info_device.name) == "NPU Strix"
    with pytest.raises(RuntimeError, match="vmr"):
        device.get_info(module.xrt_info_device.vmr)
    with pytest.raises(TypeError):
        device.get_info("name")


def test_files_that_are_no_xclbins(pyxrt: EmulatedXrt, tmp_path: Path) -> None:
    """core/common/api/xrt_xclbin.cpp: read_xclbin, read_file, init_axlf. pybind11 takes no Path for a std::string."""
    path = tmp_path / "file.xclbin"
    with pytest.raises(RuntimeError, match=f"Failed to open file '{path}' for reading"):
        pyxrt.xclbin(str(path))
    with pytest.raises(RuntimeError, match="No xclbin specified"):
        pyxrt.xclbin("")
    with pytest.raises(TypeError, match="incompatible"):
        pyxrt.xclbin(path)
    for data in (b"", b"{}", b"[" * 100_000, b'{"magic": 3}', b"\xff\x00", b"xclbin2\0" + bytes(600)):
        path.write_bytes(data)
        with pytest.raises(RuntimeError, match="Invalid xclbin"):
            pyxrt.xclbin(str(path))


def test_an_xclbin_says_what_it_has(host: Host) -> None:
    """mlir-aie, tools/aiecc/SidecarFiles.h: opcode, instr, ninstr, and at least five host buffers."""
    (kernel,) = host.xclbin.get_kernels()
    assert kernel.get_name() == "MLIR_AIE"
    assert kernel.get_num_args() == 8
    assert host.xclbin.get_xsa_name() == ""
    assert len(host.xclbin.get_uuid().to_string()) == 36


def test_xclbins_are_told_apart(host: Host, artifacts: EmulatedArtifacts, rng: Rng) -> None:
    layer = make_layer(rng, 128, 64, Scheme(4, 128)).layer
    other = host.pyxrt.xclbin(str(artifacts.xclbin(planning.gemv(layer.layout, streams=2)).path))
    again = host.pyxrt.xclbin(str(artifacts.xclbin(planning.gemv(layer.layout)).path))
    assert other.get_uuid().to_string() != again.get_uuid().to_string() == host.xclbin.get_uuid().to_string()
    with pytest.raises(RuntimeError, match=r"No xclbin with uuid .*: Invalid argument"):
        host.pyxrt.hw_context(host.device, other.get_uuid())


def test_kernels_by_name(host: Host) -> None:
    """core/common/api/xrt_kernel.cpp: get_kernel_or_error; an instance may be named behind a colon."""
    with pytest.raises(RuntimeError, match="No such kernel 'MLIR': Invalid argument"):
        host.pyxrt.kernel(host.context, "MLIR")
    assert host.pyxrt.kernel(host.context, "MLIR_AIE:MLIRAIE")
    with pytest.raises(TypeError):
        host.pyxrt.kernel(host.device, "MLIR_AIE")


def test_group_ids(host: Host) -> None:
    """xrt_kernel.cpp, kernel_impl::group_id: bank in the low 16 bits (HOST is 0, SRAM 1), the context's slot above;
    scalars and what is not declared have bank -1."""
    slot = host.kernel.group_id(3) >> 16
    banks = [host.kernel.group_id(index) & 0xFFFF for index in range(9)]
    assert banks == [0xFFFF, 1, 0xFFFF, 0, 0, 0, 0, 0, 0xFFFF]
    assert {host.kernel.group_id(index) >> 16 for index in range(9)} == {slot}
    assert slot > 0


def test_sixteen_contexts(pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """The driver's npu4_family.h, hwctx_limit; aie2_ctx_runqueue.c, aie2_rq_add: ENOENT. A kernel or run keeps one."""
    plan, _ = small_gemv(rng)
    hosts = [Host(pyxrt, artifacts, plan) for _ in range(16)]
    with pytest.raises(RuntimeError, match=r"CREATE_HWCTX IOCTL failed \(err=-2\): No such file or directory"):
        Host(pyxrt, artifacts, plan)
    kept = hosts.pop().kernel
    with pytest.raises(RuntimeError, match="CREATE_HWCTX"):
        Host(pyxrt, artifacts, plan)
    run = pyxrt.run(kept)
    del kept
    assert pyxrt.live().contexts == 16
    del run
    assert pyxrt.live().contexts == 15
    hosts.append(Host(pyxrt, artifacts, plan))


# --- buffers ---------------------------------------------------------------------------------------------------------


def test_sides_of_a_buffer_meet_in_sync_only(host: Host) -> None:
    buffer = host.pyxrt.bo(host.device, 256, host.pyxrt.bo.host_only, host.kernel.group_id(3))
    assert not buffer.read(256, 0).any()
    buffer.write(bytes([7] * 256), 0)
    buffer.sync(host.from_device)  # the wrong way: what was written is lost
    assert not buffer.read(256, 0).any()
    buffer.write(bytes([7] * 256), 0)
    buffer.sync(host.to_device, 64, 128)
    buffer.write(bytes(256), 0)
    buffer.sync(host.from_device)
    found = buffer.read(256, 0)
    assert (np.flatnonzero(found) == np.arange(128, 192)).all()


@pytest.mark.parametrize(("size", "offset"), [(257, 0), (1, 256), (0, 257), (256, 1)])
def test_sync_beyond_the_end(host: Host, size: int, offset: int) -> None:
    """The driver's shim/buffer.cpp, buffer::sync."""
    buffer = host.pyxrt.bo(host.device, 256, host.pyxrt.bo.host_only, host.kernel.group_id(3))
    with pytest.raises(RuntimeError, match=rf"Invalid BO offset and size .* {offset}, {size} \(err=22\)"):
        buffer.sync(host.to_device, size, offset)


def test_sync_takes_a_direction_and_both_or_none(host: Host) -> None:
    buffer = host.pyxrt.bo(host.device, 256, host.pyxrt.bo.host_only, host.kernel.group_id(3))
    for arguments in ((0,), (host.to_device, 64), (host.to_device, -1, 0), (host.to_device, 1.0, 0)):
        with pytest.raises(TypeError, match="incompatible"):
            buffer.sync(*arguments)
    buffer.sync(host.to_device, 256, 0)
    buffer.sync(host.to_device, 0, 256)


def test_writing_and_reading(host: Host, rng: Rng) -> None:
    """core/common/api/xrt_bo.cpp, bo_impl::write and read. pyxrt's forms take both arguments, and give chars: int8."""
    buffer = host.pyxrt.bo(host.device, 100, host.pyxrt.bo.host_only, host.kernel.group_id(3))
    data = rng.integers(-(2**31), 2**31, 25, dtype=np.int32)
    buffer.write(data, 0)
    assert (buffer.read(100, 0).view(np.int32) == data).all()
    assert buffer.read(8, 4).dtype == np.int8
    assert (buffer.read(8, 4).view(np.int32) == data[1:3]).all()
    buffer.write(np.zeros(0, np.uint8), 100)
    for size, seek in ((101, 0), (1, 100), (100, 1), (0, 101)):
        with pytest.raises(RuntimeError, match="attempting to write past buffer size: Invalid argument"):
            buffer.write(bytes(size), seek)
        with pytest.raises(RuntimeError, match="attempting to read past buffer size: Invalid argument"):
            buffer.read(size, seek)
    with pytest.raises(TypeError):
        buffer.write(data)
    with pytest.raises(TypeError):
        buffer.read(100)
    with pytest.raises(TypeError, match="incompatible"):
        buffer.write([1, 2], 0)
    with pytest.raises(RuntimeError, match="strides"):
        buffer.write(data[::2], 0)


def test_a_mapping(host: Host) -> None:
    """pyxrt.cpp: a memoryview of bytes over the buffer's memory, writable. It doesn't keep the buffer."""
    buffer = host.pyxrt.bo(host.device, 96, host.pyxrt.bo.host_only, host.kernel.group_id(3))
    view = buffer.map()
    assert isinstance(view, memoryview)
    assert (view.format, view.nbytes, view.readonly) == ("B", 96, False)
    np.frombuffer(view, np.uint8)[:] = 5
    assert (buffer.read(96, 0) == 5).all()
    assert bytes(buffer.map()) == bytes(view)
    assert buffer.size() == 96
    del buffer
    assert set(view) == {0xDD}


def test_addresses_are_apart(host: Host) -> None:
    made = [host.pyxrt.bo(host.device, 5000, host.pyxrt.bo.host_only, host.kernel.group_id(3)) for _ in range(3)]
    addresses = sorted(buffer.address() for buffer in made)
    assert all(b - a >= 5000 and a % 4096 == 0 for a, b in pairwise(addresses))


@pytest.mark.parametrize(
    ("size", "flags", "message"),
    [
        (0, "host_only", r"mmap_range\(len=0\) failed \(err=-22\): Invalid argument"),
        (64, "normal", "unsupported buffer type: none flag"),
        (64, "device_only", "Bad BO type"),
        (64, "svm", "Bad BO type"),
        ((4 << 30) + 1, "host_only", "CREATE_BO IOCTL failed"),
        ((64 << 20) + 1, "cacheable", "Heap at max size"),
    ],
)
def test_buffers_that_the_driver_refuses(host: Host, size: int, flags: str, message: str) -> None:
    """The driver's shim/buffer.cpp (mmap_ptr, bo_flags_to_type), shim/device.cpp (alloc_bo)."""
    before = host.pyxrt.live()
    with pytest.raises(RuntimeError, match=message):
        host.pyxrt.bo(host.device, size, getattr(host.pyxrt.bo, flags), host.kernel.group_id(3))
    assert host.pyxrt.live() == before


def test_arguments_of_a_buffer(host: Host) -> None:
    bo = host.pyxrt.bo
    group = host.kernel.group_id(3)
    for arguments in (
        (host.device, -1, bo.host_only, group),
        (host.device, 64.0, bo.host_only, group),
        (host.device, 64, 0, group),
        (host.device, 64, bo.host_only, -1),
        (host.kernel, 64, bo.host_only, group),
    ):
        with pytest.raises(TypeError, match="incompatible"):
            bo(*arguments)
    assert bo(device=host.device, size=np.int64(64), flags=bo.host_only, group=group).size() == 64


def test_a_buffer_of_a_context_keeps_it(pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng) -> None:
    """xrt_bo.cpp, device_type: such a buffer shares the context; one of the device doesn't."""
    host = Host(pyxrt, artifacts, small_gemv(rng)[0])
    loose = pyxrt.bo(host.device, 64, pyxrt.bo.host_only, 0)
    tied = pyxrt.bo(host.context, 64, pyxrt.bo.host_only, 0)
    host.__dict__.clear()
    assert pyxrt.live().contexts == 1
    del tied
    assert pyxrt.live().contexts == 0
    loose.write(bytes(64), 0)


def test_locked_memory_is_limited(artifacts: EmulatedArtifacts) -> None:
    """The driver's shim maps buffers with MAP_LOCKED: EAGAIN beyond the limit, until something is given back."""
    module = EmulatedXrt(memlock=1000)
    device = module.device(0)
    first = module.bo(device, 800, module.bo.host_only, 0)
    with pytest.raises(RuntimeError, match=r"mmap\(.*\(err=-11\): Resource temporarily unavailable"):
        module.bo(device, 300, module.bo.host_only, 0)
    assert module.live().buffer_bytes == 800
    del first
    module.bo(device, 300, module.bo.host_only, 0)


def test_the_heap_of_instructions_is_given_back() -> None:
    module = EmulatedXrt(heap=1000)
    device = module.device(0)
    made = [module.bo(device, 500, module.bo.cacheable, 1) for _ in range(2)]
    with pytest.raises(RuntimeError, match="Heap at max size 1000, can't expand further"):
        module.bo(device, 1, module.bo.cacheable, 1)
    module.bo(device, 5000, module.bo.host_only, 0)
    made.pop()
    module.bo(device, 500, module.bo.cacheable, 1)


# --- faults of what is opened ----------------------------------------------------------------------------------------


def test_faults_of_opening() -> None:
    module = EmulatedXrt([Injection(Fault.NO_DRIVER), Injection(Fault.NO_PERMISSION, at=2)])
    with pytest.raises(RuntimeError, match="No such device with index '0'"):
        module.device(0)
    with pytest.raises(RuntimeError, match=r"Open /dev/accel/accel0 failed \(err=-13\): Permission denied"):
        module.device(0)
    module.device(0)
    assert module.calls("device") == 3


def test_a_busy_device(pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng) -> None:
    plan, _ = small_gemv(rng)
    pyxrt.inject(Fault.BUSY)
    with pytest.raises(RuntimeError, match=r"CREATE_HWCTX IOCTL failed \(err=-16\): Device or resource busy"):
        Host(pyxrt, artifacts, plan)
    assert pyxrt.live().contexts == 0
    Host(pyxrt, artifacts, plan)


def test_the_third_large_buffer_fails(pyxrt: EmulatedXrt) -> None:
    """By a predicate: only calls that it takes are counted."""
    pyxrt.inject(Fault.NO_MEMORY, at=3, when=lambda call: call.size > 100)
    device = pyxrt.device(0)
    made = [pyxrt.bo(device, size, pyxrt.bo.host_only, 0) for size in (101, 10, 101, 10)]
    with pytest.raises(RuntimeError, match=r"CREATE_BO IOCTL failed \(err=-12\): Cannot allocate memory"):
        pyxrt.bo(device, 101, pyxrt.bo.host_only, 0)
    made.append(pyxrt.bo(device, 101, pyxrt.bo.host_only, 0))
    assert pyxrt.live().buffers == 5


def test_faults_go_on_until_they_are_cleared() -> None:
    module = EmulatedXrt([Injection(Fault.NO_DRIVER, at=2, times=None)])
    module.device(0)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            module.device(0)
    module.clear_faults()
    module.device(0)
