"""Bytes through the emulated array: fifos, links, dimensions, taps and kernels against NumPy on small designs."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from greenlet import greenlet
from small_designs import (
    CORE,
    KERNELS,
    MEM,
    SHIM,
    buffer,
    copy_core,
    copy_design,
    copy_kernel,
    count,
    linear_sequence,
    run,
    typed,
    words,
)

from tilefuse.emulator import iron
from tilefuse.emulator.iron import (
    Kernel,
    ObjectFifo,
    Program,
    PythonKernel,
    Runtime,
    TaskGroup,
    TensorAccessPattern,
    Tile,
    Worker,
    WorkerRuntimeBarrier,
    range_,
)
from tilefuse.errors import DataflowError, DeviceError, DtypeError, ShapeError


def test_copy_through_a_memory_tile_to_smaller_objects() -> None:
    a, c = count(1024), np.zeros(1024, np.int32)
    report = run(copy_design(), a, c)
    assert np.array_equal(c, a)
    assert report.cores[0].calls == {"copy": 1024 // 64}
    assert (report.dram_read, report.dram_written) == (4096, 4096)


def test_objects_in_l2_may_be_smaller_than_the_cores() -> None:
    a, c = count(1024), np.zeros(1024, np.int32)
    run(copy_design(object_words=256, l2_words=64), a, c)
    assert np.array_equal(c, a)


@pytest.mark.parametrize(("object_words", "l2_words"), [(96, 64), (64, 96)])
def test_objects_that_do_not_divide_each_other(object_words: int, l2_words: int) -> None:
    total = 64 * 96
    a, c = count(total), np.zeros(total, np.int32)
    run(copy_design(total, object_words=object_words, l2_words=l2_words), a, c)
    assert np.array_equal(c, a)


def test_dims_of_the_memory_tiles_send() -> None:
    """An object of [16][16] words leaves transposed: element (i, j) of what is sent is (j, i)."""
    a, c = count(512), np.zeros(512, np.int32)
    run(copy_design(512, send=[(16, 1), (16, 16)]), a, c)
    assert np.array_equal(c.reshape(2, 16, 16), a.reshape(2, 16, 16).transpose(0, 2, 1))


def test_dims_of_the_memory_tiles_receive() -> None:
    """What arrives in 4 runs of 64 is laid down with the runs interleaved word by word: [64][4]."""
    a, c = count(256), np.zeros(256, np.int32)
    run(copy_design(256, receive=[(4, 1), (64, 4)]), a, c)
    assert np.array_equal(c, a.reshape(4, 64).T.reshape(-1))


def test_dims_of_the_core() -> None:
    """A core receives [8][8] transposed and sends it transposed again."""
    a, c = count(256), np.zeros(256, np.int32)
    transposed = [(8, 1), (8, 8)]
    seen: list[np.ndarray[Any, Any]] = []

    def look(source: Any, target: Any) -> None:
        seen.append(source.copy())
        target[...] = source

    program = copy_design(256, l1_receive=transposed, l1_send=transposed)
    iron.load(program, {"copy": PythonKernel(look, 1, (1,))}).run(program, a, c)
    assert np.array_equal(seen[0].reshape(8, 8), a[:64].reshape(8, 8).T)
    assert np.array_equal(c, a)


def test_dims_of_bytes() -> None:
    """uint8 objects of [4][8] in runs of 4 bytes: [2][4][4] with the columns' halves apart."""
    a = ObjectFifo(typed(np.uint8, 32), name="a")
    c = a.cons().forward(tile=Tile(0, MEM), name="c", dims_to_stream=[(2, 4), (4, 8), (4, 1)])

    def sequence(x: Any, y: Any, into: Any, out: Any) -> None:
        into.fill(x)
        out.drain(y, wait=True)

    shim = Tile(0, SHIM)
    types = [typed(np.uint8, 64), typed(np.uint8, 64)]
    program = Program(iron.device(1), Runtime(sequence, [*types, a.prod(tile=shim), c.cons(tile=shim)]))
    x, y = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    run(program, x, y)
    assert np.array_equal(y.reshape(2, 2, 4, 4), x.reshape(2, 4, 2, 4).transpose(0, 2, 1, 3))


def split_join_design(total: int, depth: int = 2, **join: Any) -> Program:
    """Objects of 256 words taken apart for four cores of a column, copied, and joined again."""
    a = ObjectFifo(words(256), depth=depth, name="a")
    c = ObjectFifo(words(256), depth=depth, name="c")
    offsets, types = [0, 64, 128, 192], [words(64)] * 4
    parts = a.cons().split(offsets, tile=Tile(0, MEM), obj_types=types)
    results = c.prod().join(offsets, tile=Tile(0, MEM), obj_types=types, **join)
    workers = [
        Worker(copy_core, [parts[r].cons(), results[r].prod(), copy_kernel(64)], tile=Tile(0, CORE + r))
        for r in range(4)
    ]
    shim = Tile(0, SHIM)
    runtime = Runtime(linear_sequence, [words(total), words(total), a.prod(tile=shim), c.cons(tile=shim)])
    return Program(iron.device(1), runtime, workers)


def test_split_and_join() -> None:
    a, c = count(1024), np.zeros(1024, np.int32)
    run(split_join_design(1024), a, c)
    assert np.array_equal(c, a)


def test_join_with_dims() -> None:
    """Each core's 64 words are 2 x 2 blocks of 4 x 4; the memory tile lays them down as 8 rows of 8."""
    blocks = [(2, 32), (2, 4), (4, 8), (4, 1)]
    a, c = count(512), np.zeros(512, np.int32)
    run(split_join_design(512, dims_from_stream=[blocks] * 4), a, c)
    expected = a.reshape(-1, 2, 2, 4, 4).transpose(0, 1, 3, 2, 4).reshape(-1)
    assert np.array_equal(c, expected)


def test_split_uneven_parts() -> None:
    a = ObjectFifo(words(96), name="a")
    small, large = a.cons().split([0, 32], tile=Tile(0, MEM), obj_types=[words(32), words(64)])

    def sequence(x: Any, y: Any, z: Any, into: Any, one: Any, two: Any) -> None:
        into.fill(x)
        one.drain(y, wait=True)
        two.drain(z, wait=True)

    ends = [a.prod(tile=Tile(0, SHIM)), small.cons(tile=Tile(0, SHIM)), large.cons(tile=Tile(0, SHIM))]
    program = Program(iron.device(1), Runtime(sequence, [words(192), words(64), words(128), *ends]))
    x, y, z = count(192), np.zeros(64, np.int32), np.zeros(128, np.int32)
    run(program, x, y, z)
    assert np.array_equal(y.reshape(2, 32), x.reshape(2, 96)[:, :32])
    assert np.array_equal(z.reshape(2, 64), x.reshape(2, 96)[:, 32:])


def test_broadcast_to_cores_with_other_depths() -> None:
    a = ObjectFifo(words(64), name="a")
    outs = [ObjectFifo(words(64), name=f"c{i}") for i in range(2)]
    workers = [
        Worker(copy_core, [a.cons(depth=1 + i), outs[i].prod(), copy_kernel(64)], tile=Tile(i, CORE)) for i in range(2)
    ]

    def sequence(x: Any, y: Any, z: Any, into: Any, one: Any, two: Any) -> None:
        into.fill(x)
        one.drain(y, wait=True)
        two.drain(z, wait=True)

    ends = [a.prod(tile=Tile(0, SHIM)), *(out.cons(tile=Tile(i, SHIM)) for i, out in enumerate(outs))]
    program = Program(iron.device(2), Runtime(sequence, [words(256)] * 3 + ends), workers)
    x, y, z = count(256), np.zeros(256, np.int32), np.zeros(256, np.int32)
    report = run(program, x, y, z)
    assert np.array_equal(y, x)
    assert np.array_equal(z, x)
    assert report.dram_read == 1024  # read once


@pytest.mark.parametrize(
    ("first", "second", "holder"),
    [
        ((0, 2), (0, 3), (0, 2)),
        ((0, 3), (0, 2), (0, 3)),
        ((0, 2), (1, 2), (0, 2)),
        ((1, 2), (0, 2), (0, 2)),  # a core sees its western neighbour's memory, not the eastern one's
        ((0, 2), (0, 4), None),
    ],
)
def test_neighbours_share_memory(first: Any, second: Any, holder: Any) -> None:
    a, between, c = (ObjectFifo(words(64), name=name) for name in ("a", "between", "c"))
    workers = [
        Worker(copy_core, [a.cons(), between.prod(), copy_kernel(64)], tile=Tile(*first)),
        Worker(copy_core, [between.cons(), c.prod(), copy_kernel(64)], tile=Tile(*second)),
    ]
    ends = [a.prod(tile=Tile(0, SHIM)), c.cons(tile=Tile(0, SHIM))]
    program = Program(iron.device(2), Runtime(linear_sequence, [words(256), words(256), *ends]), workers)
    x, y = count(256), np.zeros(256, np.int32)
    run(program, x, y)
    assert np.array_equal(y, x)
    design = program.resolve_program()
    for place in (first, second):
        tile = design.tiles[place]
        # Of its own: a fifo with the DMA. Between: 2 locks in the holder, or 2 and a channel in each.
        assert tile.locks_used == 2 + 2 * (holder in (None, place))
        assert len(tile.inputs) + len(tile.outputs) == (2 if holder is None else 1)


def test_a_repeat_with_stride_zero_sends_again() -> None:
    def sequence(x: Any, y: Any, into: Any, out: Any) -> None:
        group = TaskGroup()
        into.fill(x, tap=TensorAccessPattern((1024,), 0, [4, 1, 1, 256], [0, 0, 0, 1]), group=group)
        out.drain(y, wait=True, group=group)
        group.finish()

    a, c = count(1024), np.zeros(1024, np.int32)
    run(copy_design(1024, sequence=sequence), a, c)
    assert np.array_equal(c, np.tile(a[:256], 4))


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [
        ([2, 4, 8, 16], [1, 512, 64, 4]),
        ([1, 1, 32, 32], [0, 0, 1, 32]),
        ([2, 2, 16, 16], [16, 512, 32, 1]),
        ([1024], [1]),
    ],
)
def test_taps_gather_and_scatter(sizes: list[int], strides: list[int]) -> None:
    index = np.zeros((), int)
    for size, stride in zip(sizes, strides, strict=True):
        index = index[..., None] + np.arange(size) * stride
    index = index.reshape(-1) + 1
    reach = int(index.max()) + 1
    pattern = TensorAccessPattern((2048,), 1, sizes, strides)
    assert reach <= 2048

    def gather(x: Any, y: Any, into: Any, out: Any) -> None:
        into.fill(x, tap=pattern)
        out.drain(y, tap=TensorAccessPattern((2048,), 0, [1024], [1]), wait=True)

    def scatter(x: Any, y: Any, into: Any, out: Any) -> None:
        into.fill(x, sizes=[1024], strides=[1])
        out.drain(y, tap=pattern, wait=True)

    a = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, 2048, dtype=np.int32)
    c = np.zeros(2048, np.int32)
    run(copy_design(2048, sequence=gather), a, c)
    assert np.array_equal(c[:1024], a[index])
    assert not c[1024:].any()
    c[:] = 0
    expected = c.copy()
    expected[index] = a[:1024]
    run(copy_design(2048, sequence=scatter), a, c)
    assert np.array_equal(c, expected)


def test_a_large_strided_transfer_is_gathered_in_blocks() -> None:
    """4 MiB in rows of 4 KiB with gaps."""
    rows = 1024

    def sequence(x: Any, y: Any, into: Any, out: Any) -> None:
        into.fill(x, tap=TensorAccessPattern((rows * 1025,), 0, [1, rows, 2, 512], [0, 1025, 512, 1]))
        out.drain(y, tap=TensorAccessPattern((rows * 1025,), 0, [1, rows, 2, 512], [0, 1025, 512, 1]), wait=True)

    a, c = count(rows * 1025), np.zeros(rows * 1025, np.int32)
    run(copy_design(rows * 1025, object_words=1024, l2_words=4096, sequence=sequence), a, c)
    assert np.array_equal(c.reshape(rows, 1025)[:, :1024], a.reshape(rows, 1025)[:, :1024])
    assert not c.reshape(rows, 1025)[:, 1024].any()


def counted_core(x: Any, y: Any, kernel: Any) -> None:
    """Its first object says how many follow."""
    head = x.acquire(1)
    n = head[0]
    x.release(1)
    for _ in range_(n):
        copy_core(x, y, kernel)


def counted_design(objects: int) -> Program:
    """Copies ``objects`` objects of 64 words, whose number lies in one before them."""

    def sequence(x: Any, y: Any, into: Any, out: Any) -> None:
        into.fill(x)
        out.drain(y, wait=True)

    a, c = ObjectFifo(words(64), name="a"), ObjectFifo(words(64), name="c")
    workers = [
        Worker(counted_core, [a.cons(), c.prod(), copy_kernel(64)], tile=Tile(0, CORE), dynamic_objfifo_lowering=True)
    ]
    shim = Tile(0, SHIM)
    types = [words(64 * (objects + 1)), words(64 * objects)]
    return Program(iron.device(1), Runtime(sequence, [*types, a.prod(tile=shim), c.cons(tile=shim)]), workers)


def test_one_configuration_runs_several_shapes_with_parameters_in_band() -> None:
    programs = {n: counted_design(n) for n in (3, 1, 7)}
    configuration = iron.load(programs[3], KERNELS)
    for n, program in [*programs.items(), (3, programs[3])]:
        x, y = count(64 * (n + 1)), np.zeros(64 * n, np.int32)
        x[0] = n
        report = configuration.run(program, x, y)
        assert np.array_equal(y, x[64:])
        assert report.cores[0].calls["copy"] == n


def test_timing_only_counts_by_the_head_of_the_buffer() -> None:
    program = counted_design(5)
    x, y = count(64 * 6), np.zeros(64 * 5, np.int32)
    x[0] = 5
    real = run(program, x, y)
    program = counted_design(5)
    called: list[int] = []
    kernels = {"copy": PythonKernel(lambda *_: called.append(1), 100, (1,))}
    report = iron.load(program, kernels).run(program, x[:64].copy(), None, timing_only=True)
    assert report.cycles == real.cycles
    assert report.cores == real.cores
    assert not called


def test_timing_only_says_which_data_are_missing() -> None:
    program = counted_design(5)
    with pytest.raises(DataflowError, match=r"reading an object of fifo 'a'.*the host's buffer was given, or its head"):
        run(program, None, None, timing_only=True)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"depth": 3}, "depth: 2 loaded, 3 new"),
        ({"object_words": 32}, "objects: 'int32.64.' loaded, 'int32.32.' new"),
        ({"send": [(16, 1), (16, 16)]}, "dims_to_stream: None loaded"),
        ({"stack_size": 2048}, "stack_size: None loaded, 2048 new"),
        ({"core": counted_core}, "function code"),
        ({"extra": (7,)}, "argument 3: only in the new one"),
    ],
)
def test_another_static_design_is_refused(options: Any, difference: str) -> None:
    configuration = iron.load(copy_design(), KERNELS)
    with pytest.raises(DeviceError, match=difference) as raised:
        configuration.run(copy_design(**options), count(1024), np.zeros(1024, np.int32))
    assert "another static design" in str(raised.value)


def test_what_a_core_function_captures_counts() -> None:
    def design(n: int) -> Program:
        def core(x: Any, y: Any, kernel: Any) -> None:
            for _ in range_(n):
                copy_core(x, y, kernel)

        return copy_design(core=core)

    configuration = iron.load(design(2), KERNELS)
    configuration.run(design(2), count(1024), np.zeros(1024, np.int32))
    with pytest.raises(DeviceError, match=r"captured 'n': 2 loaded, 4 new"):
        configuration.run(design(4), count(1024), np.zeros(1024, np.int32))


def test_unnamed_fifos_are_the_same_by_their_order() -> None:
    def design() -> Program:
        a, c = ObjectFifo(words(64)), ObjectFifo(words(64))
        workers = [Worker(copy_core, [a.cons(), c.prod(), copy_kernel(64)], tile=Tile(0, CORE))]
        ends = [a.prod(tile=Tile(0, SHIM)), c.cons(tile=Tile(0, SHIM))]
        return Program(iron.device(1), Runtime(linear_sequence, [words(256), words(256), *ends]), workers)

    configuration = iron.load(design(), KERNELS)
    c = np.zeros(256, np.int32)
    configuration.run(design(), count(256), c)
    assert np.array_equal(c, count(256))


def test_acquire_several_takes_only_what_is_missing() -> None:
    """A window of two objects that moves by one: sums of neighbours."""

    def core(x: Any, y: Any, add: Any) -> None:
        for _ in range_(3):
            left, right = x.acquire(2)
            out = y.acquire(1)
            add(left, right, out)
            x.release(1)
            y.release(1)
        x.release(1)

    a, c = ObjectFifo(words(16), depth=3, name="a"), ObjectFifo(words(16), name="c")
    add = Kernel("add", "add.o", [words(16)] * 3)
    workers = [Worker(core, [a.cons(), c.prod(), add], tile=Tile(0, CORE))]
    ends = [a.prod(tile=Tile(0, SHIM)), c.cons(tile=Tile(0, SHIM))]
    program = Program(iron.device(1), Runtime(linear_sequence, [words(64), words(48), *ends]), workers)
    x, y = count(64), np.zeros(48, np.int32)
    run(program, x, y)
    rows = x.reshape(4, 16)
    assert np.array_equal(y.reshape(3, 16), rows[:-1] + rows[1:])


def test_buffers_keep_their_contents_and_cores_can_index() -> None:
    total = buffer(4, "total")

    def core(x: Any, y: Any, kernel: Any, sums: Any) -> None:
        source, target = x.acquire(1), y.acquire(1)
        sums[0] = source[0] + 1
        for i in range_(64):
            target[i] = source[i] * 2 + sums[0]
        x.release(1)
        y.release(1)

    a, c = count(256), np.zeros(256, np.int32)
    run(copy_design(256, core=core, extra=(total,)), a, c)
    assert np.array_equal(c.reshape(4, 64), 2 * a.reshape(4, 64) + a.reshape(4, 64)[:, :1] + 1)


def test_a_barrier_and_a_buffer_that_the_sequence_writes() -> None:
    barrier = WorkerRuntimeBarrier()
    factor = buffer(1, "factor")

    def core(x: Any, y: Any, kernel: Any, barrier: Any, factor: Any) -> None:
        barrier.wait_for_value(1)
        n = factor[0]
        barrier.release_with_value(1)
        for _ in range_(4):
            source, target = x.acquire(1), y.acquire(1)
            for i in range_(64):
                target[i] = source[i] * n
            x.release(1)
            y.release(1)

    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        group = TaskGroup()
        into.fill(a, group=group)
        factor[0] = 3
        barrier.set(1)
        out.drain(c, wait=True, group=group)
        group.finish()

    program = copy_design(256, core=core, sequence=sequence, extra=(barrier, factor))
    configuration = iron.load(program, KERNELS)
    for _ in range(2):
        c = np.zeros(256, np.int32)
        configuration.run(program, count(256), c)
        assert np.array_equal(c, 3 * count(256))


def test_host_arrays_are_checked() -> None:
    program = copy_design()
    configuration = iron.load(program, KERNELS)
    a, c = count(1024), np.zeros(1024, np.int32)
    with pytest.raises(ShapeError, match=r"takes 2 buffers; 1 are given"):
        configuration.run(program, a)
    with pytest.raises(ShapeError, match=r"host buffer 1 has 2048 bytes; the sequence declares int32\[1024\], 4096"):
        configuration.run(program, a, c[:512])
    with pytest.raises(ShapeError, match=r"not C-contiguous"):
        configuration.run(program, np.zeros(2048, np.int32)[::2], c)
    with pytest.raises(ShapeError, match=r"timing_only=True"):
        configuration.run(program, a, None)
    with pytest.raises(DtypeError, match=r"host buffer 0 is a list; pass a NumPy array"):
        configuration.run(program, [0] * 1024, c)  # type: ignore[arg-type]
    configuration.run(program, a.view(np.uint8), c.view(np.float32))
    assert np.array_equal(c, a)
    c.setflags(write=False)
    with pytest.raises(DataflowError, match=r"drain 0 of fifo 'c': host buffer 1 is read-only"):
        configuration.run(program, a, c)


def test_a_configuration_stays_on_its_thread() -> None:
    program = copy_design()
    configuration = iron.load(program, KERNELS)
    raised: list[BaseException] = []

    def other() -> None:
        try:
            configuration.run(program, count(1024), np.zeros(1024, np.int32))
        except DeviceError as error:
            raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "thread that loaded it" in str(raised[0])


def test_a_run_from_another_greenlet() -> None:
    """Workers switch back to whoever runs them, which need not be who loaded them."""
    program = copy_design()
    configuration = iron.load(program, KERNELS)
    a, c = count(1024), np.zeros(1024, np.int32)
    reports = [greenlet(lambda: configuration.run(program, a, c)).switch() for _ in range(2)]
    reports.append(configuration.run(program, a, c))
    assert np.array_equal(c, a)
    assert [report.cores[0].calls["copy"] for report in reports] == [16] * 3
