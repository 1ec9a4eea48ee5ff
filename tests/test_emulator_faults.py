"""What a design can do wrong while it runs: each is caught, with its own error, in the design's terms."""

from __future__ import annotations

import gc
import importlib
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
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
    range_,
)
from tilefuse.errors import ArrayLimitError, DataflowError, DeadlockError, DeviceError, DtypeError, TileFuseError


def fails(error: type[TileFuseError], message: str, **design: Any) -> str:
    """Runs a copy design that must fail, and returns its message."""
    with pytest.raises(error, match=message) as raised:
        run(copy_design(256, **design), count(256), np.zeros(256, np.int32))
    return str(raised.value)


# --- deadlocks --------------------------------------------------------------------------------------------------------


def test_a_drain_of_what_nothing_sends() -> None:
    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        out.drain(c, wait=True)

    text = fails(DeadlockError, "nothing can go on", sequence=sequence)
    assert "the run-time sequence waits for drain 0 of fifo 'c' (0 of 1024 bytes) on S2MM 0 of shim (0, 0)" in text
    assert (
        "worker 'copy_core' on core (0, 2) waits for 1 object of fifo 'a_core': 0 of 2 filled, "
        "2 free in core (0, 2) (at its first wait)" in text
    )


def test_a_fill_too_short() -> None:
    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        into.fill(a, tap=TensorAccessPattern((256,), 0, [1, 1, 1, 192], [0, 0, 0, 1]))
        out.drain(c, wait=True)

    text = fails(DeadlockError, "deadlock", sequence=sequence)
    # The memory tile passes objects of 256 words on, and this one never comes whole.
    assert "drain 0 of fifo 'c' (0 of 1024 bytes)" in text
    assert "the stream of fifo 'a' waits for a fill of fifo 'a' by the run-time sequence" in text


def test_a_worker_that_holds_what_it_waits_for() -> None:
    def core(x: Any, y: Any, kernel: Any) -> None:
        x.acquire(1)
        x.acquire(2)
        x.release(2)

    text = fails(DeadlockError, "deadlock", core=core, l2_words=64, depth=3, sequence=one_object)
    assert re.search(r"waits for 1 object of fifo 'a_core', holding 1: 0 of 3 filled.*1 being read", text)


def one_object(a: Any, c: Any, into: Any, out: Any) -> None:
    """Fills one object of 64 words and drains one."""
    tap = TensorAccessPattern((256,), 0, [1, 1, 1, 64], [0, 0, 0, 1])
    into.fill(a, tap=tap)
    out.drain(c, tap=tap, wait=True)


def test_a_fifo_too_shallow_for_its_users() -> None:
    """Two cores want the other's result first: a ring of waits, which names both."""

    def core(mine: Any, theirs: Any, kernel: Any) -> None:
        source = theirs.acquire(1)
        target = mine.acquire(1)
        kernel(source, target)
        theirs.release(1)
        mine.release(1)

    p, q = ObjectFifo(words(64), name="p"), ObjectFifo(words(64), name="q")
    workers = [
        Worker(core, [p.prod(), q.cons(), copy_kernel(64)], tile=Tile(0, 2)),
        Worker(core, [q.prod(), p.cons(), copy_kernel(64)], tile=Tile(0, 3)),
    ]
    # The sequence waits for nothing, so this is no deadlock of a run: both cores are where they started.
    run(Program(iron.device(1), Runtime(lambda: None, []), workers))
    a, c = ObjectFifo(words(64), name="a"), ObjectFifo(words(64), name="c")

    def first(x: Any, y: Any, mine: Any, theirs: Any, kernel: Any) -> None:
        start = x.acquire(1)
        kernel(theirs.acquire(1), mine.acquire(1))
        kernel(start, y.acquire(1))

    p, q = ObjectFifo(words(64), name="p"), ObjectFifo(words(64), name="q")
    workers = [
        Worker(first, [a.cons(), c.prod(), p.prod(), q.cons(), copy_kernel(64)], tile=Tile(0, 2)),
        Worker(core, [q.prod(), p.cons(), copy_kernel(64)], tile=Tile(0, 3)),
    ]
    ends = [a.prod(tile=Tile(0, SHIM)), c.cons(tile=Tile(0, SHIM))]
    program = Program(iron.device(1), Runtime(linear_sequence, [words(64), words(64), *ends]), workers)
    with pytest.raises(DeadlockError) as raised:
        run(program, count(64), np.zeros(64, np.int32))
    text = str(raised.value)
    assert "worker 'first' on core (0, 2) waits for 1 object of fifo 'q': 0 of 2 filled" in text
    assert "worker 'core' on core (0, 3) waits for 1 object of fifo 'p': 0 of 2 filled" in text


def test_a_depth_of_one_where_two_are_needed() -> None:
    def window(x: Any, y: Any, kernel: Any) -> None:
        pair = x.acquire(2)
        kernel(pair[0], y.acquire(1))
        x.release(2)
        y.release(1)

    with pytest.raises(ValueError, match=r"2 objects to acquire are more than the depth 1"):
        run(copy_design(256, core=window, depth=1), count(256), np.zeros(256, np.int32))


def test_no_room_to_read_ahead() -> None:
    """Both ends of a_core have two objects: the compiler would give the core a third (findObjectFifoSize)."""

    def pairs(x: Any, y: Any, kernel: Any) -> None:
        for source in x.acquire(2):
            kernel(source, y.acquire(1))
            y.release(1)
        x.release(2)

    program = copy_design(256, core=pairs, depth=2)
    with pytest.raises(ArrayLimitError, match=r"acquires 2 objects of fifo 'a_core', which has 2.* Make this depth 3"):
        run(program, count(256), np.zeros(256, np.int32))
    c = np.zeros(256, np.int32)
    run(copy_design(256, core=pairs, depth=3), count(256), c)
    assert np.array_equal(c, count(256))


def test_a_hanging_configuration_stays_so() -> None:
    program = copy_design(256, sequence=lambda a, c, into, out: out.drain(c, wait=True) and None)
    configuration = iron.load(program, KERNELS)
    arrays = count(256), np.zeros(256, np.int32)
    with pytest.raises(DeadlockError):
        configuration.run(program, *arrays)
    with pytest.raises(
        DeviceError, match=r"hangs since a run failed \(DeadlockError: deadlock.*load the program again"
    ):
        configuration.run(program, *arrays)


def test_workers_of_dropped_configurations_are_let_go() -> None:
    program = copy_design(256)
    configuration = iron.load(program, KERNELS)
    configuration.run(program, count(256), np.zeros(256, np.int32))
    core = weakref.ref(next(iter(configuration.cores.values())))
    del configuration
    gc.collect()
    assert core() is None


# --- transfers --------------------------------------------------------------------------------------------------------


def test_freed_too_early() -> None:
    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        filling, draining = TaskGroup(), TaskGroup()
        into.fill(a, group=filling)
        filling.finish()
        out.drain(c, wait=True, group=draining)
        draining.finish()

    fails(DataflowError, "fill 0 of fifo 'a' is freed too early: 0 of 1024 bytes", sequence=sequence)


def test_a_missing_wait() -> None:
    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        into.fill(a)
        out.drain(c)

    fails(DataflowError, "is freed too early.*wait=True", sequence=sequence)


def test_a_token_does_not_say_whose_it_is() -> None:
    """Waiting for the second drain takes the first one's token; then the second is freed too early."""

    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        halves = [TensorAccessPattern((256,), 128 * i, [1, 1, 1, 128], [0, 0, 0, 1]) for i in range(2)]
        groups = [TaskGroup(), TaskGroup()]
        into.fill(a, group=groups[0])
        for half, group in zip(halves, groups, strict=True):
            out.drain(c, tap=half, wait=True, group=group)
        groups[1].finish()
        groups[0].finish()

    slow = {"copy": PythonKernel(lambda x, y: y.__setitem__(slice(None), x), 10000, (1,))}
    program = copy_design(256, sequence=sequence)
    with pytest.raises(DataflowError, match=r"drain 1 of fifo 'c' is freed too early"):
        iron.load(program, slow).run(program, count(256), np.zeros(256, np.int32))


@pytest.mark.parametrize("which", ["open", "mixed", "finished", "twice"])
def test_task_groups(which: str) -> None:
    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        group = TaskGroup()
        if which == "finished":
            group.finish()
        task = into.fill(a, group=group)
        out.drain(c, wait=True, group=None if which == "mixed" else group)
        if which == "twice":
            group.finish()
            task.free()
        if which == "mixed":
            into.fill(a, group=group)
        if which != "open":
            group.finish()

    messages = {
        "open": r"the sequence ends with groups open: TaskGroup\(1\)",
        "mixed": "freed too early|with and without a group",
        "finished": r"TaskGroup\(1\) has been finished already",
        "twice": "fill 0 of fifo 'a' is freed twice",
    }
    fails(DataflowError, messages[which], sequence=sequence)


def test_transfers_belong_into_sequences() -> None:
    with pytest.raises(RuntimeError, match=r"in the function given to Runtime"):
        TaskGroup()
    a = ObjectFifo(words(16), name="a")
    with pytest.raises(DeviceError, match=r"'a'.prod\(\).fill: only the function given to Runtime"):
        a.prod().fill(None)
    with pytest.raises(DeviceError, match=r"'a'.prod\(\).acquire: only a worker's function"):
        a.prod().acquire(1)
    with pytest.raises(ValueError, match=r"fill.. is for a producer's handle"):
        a.cons().fill(None)
    with pytest.raises(ValueError, match=r"drain.. is for a consumer's handle"):
        a.prod().drain(None)


def test_what_is_drained_must_come_from_the_sequences_buffers() -> None:
    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        into.fill(np.zeros(4))

    with pytest.raises(ValueError, match=r"is no buffer of the sequence"):
        run(copy_design(256, sequence=sequence), count(256), np.zeros(256, np.int32))
    fails(
        DataflowError,
        r"the pattern is one of a tensor \[512\]; host buffer 0 is int32\[256\]",
        sequence=lambda a, c, into, out: into.fill(a, tap=TensorAccessPattern((512,), 0, [256], [1])) and None,
    )


# --- objects and buffers ----------------------------------------------------------------------------------------------


def test_an_object_used_after_its_release() -> None:
    def core(x: Any, y: Any, kernel: Any) -> None:
        source, target = x.acquire(1), y.acquire(1)
        x.release(1)
        kernel(source, target)
        y.release(1)

    fails(DataflowError, "copy: argument 0 is an object of fifo 'a_core' that the worker has released", core=core)

    def reading(x: Any, y: Any, kernel: Any) -> None:
        source = x.acquire(1)
        x.release(1)
        y.acquire(1)[0] = source[0]

    fails(DataflowError, "reading an object of fifo 'a_core' that the worker has released", core=reading)


def test_more_released_than_held() -> None:
    def core(x: Any, y: Any, kernel: Any) -> None:
        x.acquire(1)
        x.release(2)

    fails(DataflowError, "releases 2 objects of fifo 'a_core' and holds 1", core=core)


def test_a_worker_uses_only_its_arguments() -> None:
    other = ObjectFifo(words(64), name="other")

    def core(x: Any, y: Any, kernel: Any) -> None:
        other.cons().acquire(1)

    fails(DeviceError, r"uses 'other'.cons\(\), which is not among its arguments", core=core)

    def calling(x: Any, y: Any, kernel: Any) -> None:
        copy_kernel(64)(x.acquire(1), y.acquire(1))

    fails(DeviceError, "calls copy, which is not among its arguments", core=calling)


def test_a_buffer_read_before_it_is_written() -> None:
    def core(x: Any, y: Any, kernel: Any, sums: Any) -> None:
        kernel(sums, y.acquire(1))

    sums = buffer(64, "sums")
    fails(DataflowError, "copy reads buffer 'sums' .argument 0. before anything wrote it", core=core, extra=(sums,))

    def indexing(x: Any, y: Any, kernel: Any, sums: Any) -> None:
        x.acquire(1)
        y.acquire(1)[0] = sums[0]

    sums = buffer(64, "sums")
    fails(DataflowError, "reading buffer 'sums' before anything wrote it", core=indexing, extra=(sums,))


def test_an_object_read_before_its_producer_wrote_it() -> None:
    def core(x: Any, y: Any, kernel: Any) -> None:
        target = y.acquire(1)
        kernel(target, target)

    fails(DataflowError, r"copy reads an object of fifo 'c' \(argument 0\) before anything wrote it", core=core)

    def indexing(x: Any, y: Any, kernel: Any) -> None:
        target = y.acquire(1)
        target[1] = target[0]

    fails(DataflowError, "reading an object of fifo 'c' before anything wrote it", core=indexing)


def test_an_object_that_nobody_filled() -> None:
    """A worker that forgets its kernel: whoever takes the object next says so, the host or another core."""

    def core(x: Any, y: Any, kernel: Any) -> None:
        for end in (x, y):
            end.acquire(1)
            end.release(1)

    fails(DataflowError, r"drain 0 of fifo 'c' takes bytes that nothing wrote: a worker released an object", core=core)
    run(copy_design(core=core), None, None, timing_only=True)  # the times are what they are

    def forgetful(to: Any) -> None:
        to.acquire(1)
        to.release(1)

    def passing(source: Any, to: Any, kernel: Any) -> None:
        kernel(source.acquire(1), to.acquire(1))
        source.release(1)
        to.release(1)

    for via_dma in (False, True):
        between, out = ObjectFifo(words(64), name="between", via_DMA=via_dma), ObjectFifo(words(64), name="out")
        workers = [
            Worker(forgetful, [between.prod()], tile=Tile(0, CORE)),
            Worker(passing, [between.cons(), out.prod(), copy_kernel(64)], tile=Tile(0, CORE + 1)),
        ]
        runtime = Runtime(lambda c, end: end.drain(c, wait=True) and None, [words(64), out.cons(tile=Tile(0, SHIM))])
        with pytest.raises(
            DataflowError, match=r"copy reads an object of fifo 'between' \(argument 0\) before anything"
        ):
            run(Program(iron.device(1), runtime, workers), np.zeros(64, np.int32))


@pytest.mark.parametrize(
    ("write", "error", "message"),
    [
        (lambda x, y: y.__setitem__(64, 0), DataflowError, r"fifo 'c'\[64\]: it is int32\[64\]"),
        (lambda x, y: y.__setitem__(-1, 0), DataflowError, r"fifo 'c'\[-1\]: it is int32\[64\]"),
        (lambda x, y: y.__setitem__(x[0] - 1, 0), DataflowError, r"fifo 'c'\[-1\]"),
        (lambda x, y: y.__setitem__(0, x[99]), DataflowError, r"fifo 'a_core'\[99\]"),
        (lambda x, y: y.__setitem__(slice(None), 0), DeviceError, "a core reads and writes scalars; give 1 indices"),
        (lambda x, y: y.__setitem__((0, 0), 0), DeviceError, "a core reads and writes scalars"),
        (lambda x, y: y.__setitem__("a", 0), DtypeError, "an index of an object of fifo 'c' is a str"),
        (lambda x, y: y.__setitem__(0, 1.5), DtypeError, "written to an object of fifo 'c', of int32, is a float"),
        (lambda x, y: y.__setitem__(0, x[1] << 31), DataflowError, "writing 2147483648 to .*: int32 does not hold it"),
        (lambda x, y: y.__setitem__(0, 5 // x[0]), DataflowError, "a core computes with 5 and 0"),
        (lambda x, y: y.__setitem__(0, 5 << (x[0] - 1)), DataflowError, "a core computes with 5 and -1"),
    ],
)
def test_scalars_that_a_core_reads_and_writes(write: Any, error: type[Exception], message: str) -> None:
    fails(error, message, core=lambda x, y, kernel: write(x.acquire(1), y.acquire(1)))


def test_memory_is_poisoned() -> None:
    """What nobody wrote, and what was given back, is NaN in every float format."""
    seen = []

    def look(source: Any, target: Any) -> None:
        seen.append((source.copy(), target.copy()))
        target[:32] = source[:32]

    program = copy_design(512)
    c = np.zeros(512, np.int32)
    iron.load(program, {"copy": PythonKernel(look, 1, (1,))}).run(program, count(512), c)
    assert all((target == -1).all() for _, target in seen)  # also from the third on, in memory used before
    assert all((source >= 0).all() for source, _ in seen)
    assert np.isnan(c.view(np.float32).reshape(-1, 64)[:, 32:]).all()


def test_leftovers() -> None:
    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        group = TaskGroup()
        into.fill(a, group=group)
        out.drain(c, tap=TensorAccessPattern((256,), 0, [1, 1, 1, 192], [0, 0, 0, 1]), wait=True, group=group)
        group.finish()

    fails(
        DataflowError,
        r"left data behind\s+leftover: 1 object in fifo 'c' in core \(0, 2\)|being sent",
        sequence=sequence,
    )


def test_half_an_object_is_a_leftover() -> None:
    def sequence(a: Any, c: Any, into: Any, out: Any) -> None:
        group = TaskGroup()
        into.fill(a, group=group, wait=True)
        into.fill(a, tap=TensorAccessPattern((256,), 0, [1, 1, 1, 100], [0, 0, 0, 1]), group=group, wait=True)
        out.drain(c, wait=True, group=group)
        group.finish()

    fails(DataflowError, "leftover: 400 bytes of an object that has not come whole, in fifo 'a'", sequence=sequence)


def test_a_worker_in_the_middle_of_its_function() -> None:
    def core(x: Any, y: Any, kernel: Any) -> None:
        for _ in range_(3):
            copy_core(x, y, kernel)

    text = fails(DataflowError, "workers stopped in the middle of their function", core=core)
    assert "worker 'core' on core (0, 2) waits for 1 object" in text


def test_a_worker_that_returns() -> None:
    """Without while_true a core serves one run; a second finds nobody."""

    def core(x: Any, y: Any, kernel: Any) -> None:
        for _ in range_(4):
            copy_core(x, y, kernel)

    program = copy_design(256, core=core, while_true=False)
    configuration = iron.load(program, KERNELS)
    configuration.run(program, count(256), np.zeros(256, np.int32))
    with pytest.raises(DeadlockError, match=r"worker 'core' on core \(0, 2\) has returned \(while_true=False\)"):
        configuration.run(program, count(256), np.zeros(256, np.int32))


def test_a_worker_that_never_waits() -> None:
    fails(DataflowError, "returned without having acquired anything", core=lambda x, y, kernel: None)


# --- run-time values --------------------------------------------------------------------------------------------------


def looping(loop: Callable[[Any], Any]) -> Callable[..., None]:
    """A core that loops over what its objects begin with."""

    def core(x: Any, y: Any, kernel: Any) -> None:
        source, target = x.acquire(1), y.acquire(1)
        for i in loop(source[0] + 1):
            target[i] = source[i]
        x.release(1)
        y.release(1)

    return core


@pytest.mark.parametrize("lowering", [None, False])
def test_a_run_time_count_needs_the_dynamic_lowering(lowering: bool | None) -> None:
    text = fails(
        DataflowError,
        "range_ over a value known at run time only: the static lowering",
        core=looping(range_),
        dynamic_objfifo_lowering=lowering,
    )
    assert "dynamic_objfifo_lowering=True" in text


@pytest.mark.parametrize(
    "use", [range, lambda n: [0] if n else [], lambda n: [0] * (n > 3), lambda n: [1, 2][n : n + 1], lambda n: [int(n)]]
)
def test_python_cannot_decide_by_run_time_values(use: Any) -> None:
    fails(DataflowError, "only knows at run time", core=looping(use), dynamic_objfifo_lowering=True)


def test_a_count_that_is_poison() -> None:
    """-1 is what memory holds that nobody wrote: here all but the first word of a buffer."""

    def core(x: Any, y: Any, kernel: Any, counts: Any) -> None:
        x.acquire(1)
        counts[0] = 1
        for _ in range_(counts[1]):
            pass

    fails(
        DataflowError,
        r"range_\(0, -1\): the end lies below.*was it written",
        core=core,
        dynamic_objfifo_lowering=True,
        extra=(buffer(2, "counts"),),
    )


# --- kernels ----------------------------------------------------------------------------------------------------------


def test_kernel_calls_are_checked() -> None:
    def short(x: Any, y: Any, kernel: Any) -> None:
        kernel(x.acquire(1))

    fails(DeviceError, "copy is declared with 2 arguments; 1 are given", core=short)

    def number(x: Any, y: Any, kernel: Any) -> None:
        kernel(x.acquire(1), 3)

    fails(DeviceError, "argument 1 is 3; pass an acquired object or a Buffer", core=number)

    def small(x: Any, y: Any, kernel: Any, sums: Any) -> None:
        kernel(x.acquire(1), sums)

    fails(
        DeviceError,
        r"argument 1 is declared as int32\[64\]; buffer 'sums' holds int32\[32\]",
        core=small,
        extra=(buffer(32, "sums"),),
    )

    def array(x: Any, y: Any, kernel: Any, scale: Any) -> None:
        scale(x.acquire(1), x.acquire(1))

    scale = Kernel("scale", "scale.o", [words(64), np.int32])
    program = copy_design(256, core=array, extra=(scale,))
    with pytest.raises(DtypeError, match=r"scale: argument 1, by value, is a Element, not an integer"):
        iron.load(program, KERNELS | {"scale": PythonKernel(lambda a, b: None, 1)}).run(
            program, count(256), np.zeros(256, np.int32)
        )


def test_errors_name_the_worker() -> None:
    def core(x: Any, y: Any, kernel: Any) -> None:
        x.acquire(1)
        x.release(2)

    with pytest.raises(DataflowError) as raised:
        run(copy_design(256, core=core), count(256), np.zeros(256, np.int32))
    assert "in worker 'core' on core (0, 2)" in raised.value.__notes__


def test_buffers_of_other_tiles_are_refused() -> None:
    shared = buffer(16, "shared")
    Worker(copy_core, [shared], tile=Tile(0, CORE))
    with pytest.raises(ValueError, match=r"buffer 'shared' is shared by workers"):
        Worker(copy_core, [shared], tile=Tile(0, CORE + 1))
    far = iron.Buffer(words(16), name="far", tile=Tile(0, CORE))
    with pytest.raises(DeviceError, match=r"keeps a worker's buffers in its own tile"):
        Worker(copy_core, [far], tile=Tile(0, CORE + 1))


def test_a_link_in_a_core_is_refused() -> None:
    a = ObjectFifo(words(16), name="a")
    b = a.cons().forward(tile=Tile(0, CORE), name="b")
    worker = Worker(copy_core, [b.cons()], tile=Tile(1, CORE))
    ends = [a.prod(tile=Tile(0, SHIM))]
    with pytest.raises(
        ArrayLimitError, match=r"the link of fifo 'a' is pinned to Tile.0, 2., a core; it needs a memtile"
    ):
        Program(iron.device(2), Runtime(lambda _: None, ends), [worker]).resolve_program()
    assert MEM == 1


def test_without_greenlet_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tilefuse.emulator.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(ImportError, match=r"pip install greenlet"):
        importlib.import_module("tilefuse.emulator.iron")
