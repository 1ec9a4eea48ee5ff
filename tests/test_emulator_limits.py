"""Every limit of the array has its error; what a design takes agrees with what a real compiler took for it.

The figures of the GEMM and GEMV memory tiles and cores are from designs that were tried on a real mlir-aie build: which
depths passed, and which failed on what.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from small_designs import CORE, MEM, SHIM, buffer, copy_core, copy_design, copy_kernel, count, run, words

from tilefuse import arch
from tilefuse.emulator import iron
from tilefuse.emulator.array import Design
from tilefuse.emulator.iron import (
    Kernel,
    ObjectFifo,
    Program,
    Runtime,
    TaskGroup,
    TensorAccessPattern,
    Tile,
    Worker,
    WorkerRuntimeBarrier,
)
from tilefuse.errors import ArrayLimitError, DataflowError, DeviceError, DtypeError


def nothing(*_: Any) -> None:
    """A sequence or a core that does nothing."""


def lay(workers: list[Worker], handles: Sequence[Any], columns: int = 8) -> Design:
    """The design of ``workers`` and the host's ``handles`` on the array."""
    return Program(iron.device(columns), Runtime(nothing, list(handles)), workers).resolve_program()


# --- the tables of a real compiler ------------------------------------------------------------------------------------


def gemm(a_depth: int = 2, b_depth: int = 4, c_depth: int = 2, *, l1: Sequence[tuple[int, int]] = ()) -> Design:
    """A memory tile with A and B forwarded and four C joined, four cores on it; ``l1``: (A bytes, depth), (B ...)."""
    (a_bytes, a_l1), (b_bytes, b_l1) = l1 or ((8192, 2), (4288, 2))
    a = ObjectFifo(words(8 * a_bytes // 4), depth=a_depth, name="a")
    b = ObjectFifo(words(b_bytes // 4), depth=b_depth, name="b")
    c = ObjectFifo(words(2048), depth=c_depth, name="c")
    a_core = a.cons().forward(tile=Tile(0, MEM), obj_type=words(a_bytes // 4), depth=a_l1, name="a_core")
    b_core = b.cons().forward(tile=Tile(0, MEM), depth=b_l1, name="b_core")
    offsets = [512 * r for r in range(4)]
    c_cores = c.prod().join(offsets, tile=Tile(0, MEM), obj_types=[words(512)] * 4)
    workers = [
        Worker(nothing, [a_core.cons(), b_core.cons(), c_cores[r].prod()], tile=Tile(0, CORE + r), stack_size=3328)
        for r in range(4)
    ]
    return lay(workers, [a.prod(tile=Tile(0, 0)), b.prod(tile=Tile(0, 0)), c.cons(tile=Tile(0, 0))])


def test_a_gemm_memory_tile() -> None:
    """A 2, B 4, C 2 deep: 12 locks, 28 descriptors, 6 channels in, 3 out; a core: 6 locks, 6 descriptors, 2 + 1."""
    tile = gemm().tiles[0, MEM]
    assert (tile.locks_used, tile.descriptors_used) == (12, 28)
    assert (len(tile.inputs), len(tile.outputs)) == (6, 3)
    core = gemm().tiles[0, CORE]
    assert (core.locks_used, core.descriptors_used, len(core.inputs), len(core.outputs)) == (6, 6, 2, 1)


@pytest.mark.parametrize("depth", [8, 10])
def test_deeper_weights_that_passed(depth: int) -> None:
    assert gemm(b_depth=depth).tiles[0, MEM].descriptors_used == 20 + 2 * depth


def test_weights_that_were_too_deep() -> None:
    """12 deep failed on channel 3: the odd channels' 24 descriptors were used up."""
    with pytest.raises(ArrayLimitError, match=r"odd channels have 24 descriptors; the design needs 28.*take smaller"):
        gemm(b_depth=12)


def gemv(depth: int, with_x: bool, streams: int = 1) -> Design:
    """Weights of a column split to four cores, sums down the column; x through the memory tile, or straight."""
    x = ObjectFifo(words(256), name="x")
    x_core = x.cons().forward(tile=Tile(0, MEM), name="x_core") if with_x else x
    y = ObjectFifo(words(32), name="y")
    sums = [ObjectFifo(words(64), name=f"sums{r}") for r in range(3)]
    w_core: list[ObjectFifo] = []
    shims = []
    rows = 4 // streams
    for s in range(streams):
        w = ObjectFifo(words(rows * 1072), depth=depth, name=f"w{s}")
        shims.append(w.prod(tile=Tile(0, SHIM)))
        offsets = [1072 * r for r in range(rows)]
        w_core += w.cons().split(offsets, tile=Tile(0, MEM), depths=[2] * rows, obj_types=[words(1072)] * rows)
    workers = []
    for r in range(4):
        ends = [w_core[r].cons(), sums[r].cons() if r < 3 else None, (sums[r - 1] if r else y).prod()]
        workers.append(Worker(nothing, ends + ([x_core.cons()] if streams == 1 else []), tile=Tile(0, CORE + r)))
    x_ends = [x.prod(tile=Tile(1, SHIM))] if streams == 1 else []
    return lay(workers, [*shims, *x_ends, y.cons(tile=Tile(0, SHIM))])


@pytest.mark.parametrize(
    ("depth", "with_x", "streams", "expected"),
    [
        (2, True, 1, (10, 20, 2, 5)),
        (2, False, 1, (8, 16, 1, 4)),
        (3, True, 1, (10, 28, 2, 5)),
        (4, False, 1, (8, 32, 1, 4)),
        (2, False, 2, (8, 16, 2, 4)),
    ],
)
def test_gemv_memory_tiles_that_passed(depth: int, with_x: bool, streams: int, expected: tuple[int, ...]) -> None:
    tile = gemv(depth, with_x, streams).tiles[0, MEM]
    assert (tile.locks_used, tile.descriptors_used, len(tile.inputs), len(tile.outputs)) == expected


def test_gemv_bytes_and_cores() -> None:
    """34304 bytes of weights in the memory tile, 36352 with x; the lowest core: 6 locks, 6 descriptors, 2 in, 1 out."""
    assert gemv(2, False).tiles[0, MEM].bytes_used == 34304
    assert gemv(2, True).tiles[0, MEM].bytes_used == 36352
    core = gemv(2, True).tiles[0, CORE]
    assert (core.locks_used, core.descriptors_used, len(core.inputs), len(core.outputs)) == (6, 6, 2, 1)


def test_a_gemv_split_that_was_too_deep() -> None:
    """4 deep with x failed on channel 4 of the 24 descriptors of the even ones."""
    with pytest.raises(ArrayLimitError, match=r"even channels have 24 descriptors; the design needs 26"):
        gemv(4, True)


def core_memory(*objects: tuple[int, int], buffers: Sequence[int]) -> Design:
    """A core with two fifos in, (bytes, depth) each, one out of 1024 bytes, and buffers."""
    fifos = [ObjectFifo(words(nbytes // 4), depth=depth, name=f"f{i}") for i, (nbytes, depth) in enumerate(objects)]
    out = ObjectFifo(words(256), name="out")
    ends: list[Any] = [fifo.cons() for fifo in fifos] + [out.prod()]
    ends += [buffer(nbytes // 4, f"b{i}") for i, nbytes in enumerate(buffers)]
    host = [fifo.prod(tile=Tile(i, SHIM)) for i, fifo in enumerate(fifos)]
    return lay([Worker(nothing, ends, tile=Tile(0, CORE), stack_size=3328)], [*host, out.cons(tile=Tile(0, SHIM))])


@pytest.mark.parametrize(
    ("a", "b", "scratch", "used"),
    [
        ((8192, 2), (4288, 2), 16384, 63104),
        ((8192, 2), (4288, 2), 9216, 55936),
        ((4096, 2), (4288, 2), 16384, 54912),
        ((16384, 1), (4288, 2), 16384, 63104),
        ((8192, 2), (4864, 2), 16384, 64256),
        ((8192, 2), (8384, 2), 9216, 64128),
        ((4096, 2), (8384, 2), 16384, 63104),
        ((8192, 2), (8384, 1), 16384, 62912),
    ],
)
def test_core_memories_that_passed(a: tuple[int, int], b: tuple[int, int], scratch: int, used: int) -> None:
    """Sums of 16384 bytes, results 2 x 1024, stack 3328, and A, B and scratch as given."""
    assert core_memory(a, b, buffers=[16384, scratch]).tiles[0, CORE].bytes_used == used


@pytest.mark.parametrize(("a", "b"), [((16384, 2), (4288, 2)), ((8192, 2), (8384, 2))])
def test_core_memories_that_failed(a: tuple[int, int], b: tuple[int, int]) -> None:
    used = 3328 + 16384 * 2 + 2048 + a[0] * a[1] + b[0] * b[1]
    with pytest.raises(ArrayLimitError, match=f"has 65536 bytes; the design needs {used}") as raised:
        core_memory(a, b, buffers=[16384, 16384])
    text = str(raised.value)
    assert f"{used - 65536} too many" in text
    table = [int(n) for n in re.findall(r"^ +(\d+)  (?!of)", text, re.M)]
    assert sum(table) == used
    for what in ("stack", "buffer 'b0'", "fifo 'f0', 2 x", "fifo 'out', 2 x 1024"):
        assert what in text


# --- one by one -------------------------------------------------------------------------------------------------------


def test_memory_tile_bytes() -> None:
    with pytest.raises(ArrayLimitError, match=r"memtile \(0, 1\) has 524288 bytes; the design needs 800000"):
        copy_design(l2_words=100000, object_words=1000).resolve_program()


def test_core_channels() -> None:
    fifos = [ObjectFifo(words(16), name=f"f{i}") for i in range(3)]
    worker = Worker(nothing, [fifo.cons() for fifo in fifos], tile=Tile(0, CORE))
    with pytest.raises(ArrayLimitError, match=r"'f2': core \(0, 2\) has 2 S2MM \(input\) channels.*'f0', fifo 'f1'"):
        lay([worker], [fifo.prod(tile=Tile(i, SHIM)) for i, fifo in enumerate(fifos)])


def test_shim_channels() -> None:
    fifos = [ObjectFifo(words(16), name=f"f{i}") for i in range(3)]
    workers = [Worker(nothing, [fifo.cons()], tile=Tile(i, CORE)) for i, fifo in enumerate(fifos)]
    with pytest.raises(ArrayLimitError, match=r"'f2': shim \(0, 0\) has 2 MM2S \(output\) channels"):
        lay(workers, [fifo.prod(tile=Tile(0, SHIM)) for fifo in fifos])


def test_memory_tile_channels() -> None:
    a = ObjectFifo(words(112), depth=1, name="a")
    parts = a.cons().split([16 * i for i in range(7)], tile=Tile(0, MEM), obj_types=[words(16)] * 7)
    workers = [Worker(nothing, [part.cons()], tile=Tile(i, CORE)) for i, part in enumerate(parts)]
    with pytest.raises(ArrayLimitError, match=r"memtile \(0, 1\) has 6 MM2S \(output\) channels"):
        lay(workers, [a.prod(tile=Tile(0, SHIM))])


def test_a_pinned_channel() -> None:
    a, b = ObjectFifo(words(16), name="a"), ObjectFifo(words(16), name="b")
    worker = Worker(nothing, [a.cons(channel=0), b.cons(channel=0)], tile=Tile(0, CORE))
    with pytest.raises(ArrayLimitError, match=r"channel 0 of core .0, 2. is not to be had: fifo 'a' has it"):
        lay([worker], [a.prod(tile=Tile(0, SHIM)), b.prod(tile=Tile(0, SHIM))])
    design = copy_design().resolve_program()
    assert [channel.number for channel in design.tiles[0, CORE].inputs] == [0]


def test_core_locks() -> None:
    barriers = [WorkerRuntimeBarrier() for _ in range(17)]
    with pytest.raises(ArrayLimitError, match=r"core \(0, 2\) has 16 locks; the design needs 17: barriers 17"):
        lay([Worker(nothing, list(barriers), tile=Tile(0, CORE))], [])


def test_a_lock_counts_to_63() -> None:
    copy_design(l2_words=64, l2_depth=12).resolve_program()
    with pytest.raises(ArrayLimitError, match=r"64 objects; a lock counts up to 63"):
        copy_design(l2_words=16, object_words=16, l2_depth=64).resolve_program()


def test_core_descriptors() -> None:
    copy_design(object_words=16, depth=8).resolve_program()  # 8 in, 8 out
    with pytest.raises(ArrayLimitError, match=r"its channels have 16 descriptors; the design needs 18"):
        copy_design(object_words=16, depth=9).resolve_program()


def test_one_worker_a_core_inside_the_device() -> None:
    with pytest.raises(ArrayLimitError, match=r"two workers are pinned to core \(0, 2\)"):
        lay([Worker(nothing, [], tile=Tile(0, CORE)) for _ in range(2)], [])
    with pytest.raises(ArrayLimitError, match=r"pinned to Tile\(4, 2\); the device has 4 columns"):
        lay([Worker(nothing, [], tile=Tile(4, CORE))], [], columns=4)
    with pytest.raises(ArrayLimitError, match=r"pinned to Tile\(0, 1\), a memtile; it needs a core"):
        lay([Worker(nothing, [], tile=Tile(0, MEM))], [])
    with pytest.raises(ArrayLimitError, match=r"worker 'nothing' is not pinned to a core"):
        lay([Worker(nothing, [])], [])
    with pytest.raises(ArrayLimitError, match=r"9 columns; npu2 has 1 to 8"):
        iron.device(9)


@pytest.mark.parametrize("where", ["link", "host"])
def test_everything_is_pinned(where: str) -> None:
    a = ObjectFifo(words(16), name="a")
    b = a.cons().forward(name="b", **({} if where == "link" else {"tile": Tile(0, MEM)}))
    worker = Worker(nothing, [b.cons()], tile=Tile(0, CORE))
    what = "the link of fifo 'a'" if where == "link" else "the host's end of fifo 'a'"
    with pytest.raises(ArrayLimitError, match=f"{what} is not pinned"):
        lay([worker], [a.prod() if where == "host" else a.prod(tile=Tile(0, SHIM))])


@pytest.mark.parametrize(
    ("where", "dims", "message"),
    [
        ("send", [(2, 1)] * 5, "5 dimensions; a descriptor of a memtile has 4"),
        ("l1_send", [(2, 1)] * 4, "4 dimensions; a descriptor of a core has 3"),
        ("send", [(513, 1)], "size 513; the compiler takes 512 at most"),
        ("send", [(1, 1 << 19), (256, 1)], "stride 524288; the compiler takes 524287 at most"),
        ("send", [(2, 1 << 17), (128, 1)], "a stride of 131072 words; a memtile takes 131071"),
        ("l1_send", [(2, 1 << 13), (32, 1)], "a stride of 8192 words; a core takes 8191"),
        ("l1_send", [(1, 64), (256, 1)], "size 256 .words.; a core counts up to 255"),
        ("send", [(4, 32), (32, 1)], "they cover 512 bytes of an object of 1024"),
        ("send", [(2, 192), (128, 1)], "they reach element 319 of an object of 256"),
        ("send", [(0, 1), (256, 1)], "sizes and strides are 1 or more"),
        ("receive", [(16, 0), (16, 1)], "sizes and strides are 1 or more"),
    ],
)
def test_static_patterns(where: str, dims: Any, message: str) -> None:
    with pytest.raises(ArrayLimitError, match=message):
        copy_design(**{where: dims}).resolve_program()


def test_static_pattern_of_a_size_of_512_passes() -> None:
    """The GEMM's memory tile writes its results so; the compiler took it."""
    copy_design(object_words=2048, l2_words=2048, send=[(4, 512), (8, 8), (8, 64), (8, 1)]).resolve_program()
    copy_design(object_words=1024, l2_words=1024, send=[(2, 1), (512, 2)]).resolve_program()


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ([(16, 16), (8, 2)], "innermost stride is 2; only elements of 4 bytes"),
        ([(16, 1), (16, 16)], "stride 1 is no multiple of 4 bytes"),
        ([(128, 2), (2, 1)], "runs of 2 bytes|stride 2 is no multiple of 4 bytes"),
        ([(64, 4), (4, 1)], None),
    ],
)
def test_patterns_of_bytes_move_words(dims: Any, message: str | None) -> None:
    a = ObjectFifo(np.ndarray[(256,), np.dtype[np.uint8]], name="a")
    b = a.cons().forward(tile=Tile(0, MEM), name="b", dims_to_stream=dims)

    def make() -> Design:
        worker = Worker(nothing, [b.cons()], tile=Tile(0, CORE))
        return lay([worker], [a.prod(tile=Tile(0, SHIM))])

    if message is None:
        make()
    else:
        with pytest.raises(ArrayLimitError, match=message):
            make()


def test_stream_dims_at_a_shim() -> None:
    a = ObjectFifo(words(64), name="a", dims_to_stream=[(8, 1), (8, 8)])
    worker = Worker(nothing, [a.cons()], tile=Tile(0, CORE))
    with pytest.raises(ArrayLimitError, match=r"at a shim; there the run-time sequence gives the pattern"):
        lay([worker], [a.prod(tile=Tile(0, SHIM))])


def test_lengths() -> None:
    with pytest.raises(ArrayLimitError, match=r"16384 words; a descriptor of a core moves 16383 at most"):
        copy_design(object_words=16384, l2_words=16384, depth=1).resolve_program()
    with pytest.raises(ArrayLimitError, match=r"131072 words; a descriptor of a memtile moves 131071 at most"):
        copy_design(object_words=1024, l2_words=1 << 17, l2_depth=1).resolve_program()
    odd = ObjectFifo(np.ndarray[(6,), np.dtype[np.uint8]], name="a")
    with pytest.raises(ArrayLimitError, match=r"6 bytes; DMAs move multiples of 4"):
        lay([Worker(nothing, [odd.cons()], tile=Tile(0, CORE))], [odd.prod(tile=Tile(0, SHIM))])


@pytest.mark.parametrize(
    ("offsets", "parts", "message"),
    [
        ([0, 16], [16, 20], "'p1' has 192 bytes of an object of 'a' and objects of 80: these must fill it"),
        ([16, 32], [16, 32], "leave out the first 64 bytes"),
        ([32, 0], [32, 32], "'p0' has bytes 128 to 0 of an object of 'a', which has 256; offsets must ascend"),
        ([0, 64], [64, 64], "'p1' has bytes 256 to 256"),
    ],
)
def test_links_cover_their_objects(offsets: list[int], parts: list[int], message: str) -> None:
    """As in the compiler, a branch has the bytes up to the next one's offset."""
    a = ObjectFifo(words(64), name="a")
    types = [words(n) for n in parts]
    fifos = a.cons().split(offsets, tile=Tile(0, MEM), obj_types=types, names=["p0", "p1"])
    workers = [Worker(nothing, [fifo.cons()], tile=Tile(0, CORE + i)) for i, fifo in enumerate(fifos)]
    with pytest.raises(ArrayLimitError, match=message):
        lay(workers, [a.prod(tile=Tile(0, SHIM))])


def test_sixteen_host_buffers() -> None:
    Program(iron.device(1), Runtime(nothing, [words(4)] * 16)).resolve_program()
    with pytest.raises(ArrayLimitError, match=r"takes 17 buffers of the host; there can be 16"):
        Program(iron.device(1), Runtime(nothing, [words(4)] * 17)).resolve_program()


def test_fifos_need_both_ends() -> None:
    a = ObjectFifo(words(16), name="a")
    with pytest.raises(ValueError, match=r"nothing produces fifo 'a'"):
        lay([Worker(nothing, [a.cons()], tile=Tile(0, CORE))], [])
    b = ObjectFifo(words(16), name="b")
    with pytest.raises(ValueError, match=r"nothing consumes fifo 'b'"):
        lay([Worker(nothing, [b.prod()], tile=Tile(0, CORE))], [])
    c = ObjectFifo(words(16), name="c")
    c.cons()
    with pytest.raises(ValueError, match=r"a cons\(\) of fifo 'c' belongs to nothing"):
        lay([Worker(nothing, [c.prod()], tile=Tile(0, CORE))], [])
    d = ObjectFifo(words(16), name="d")
    with pytest.raises(ValueError, match=r"not the fifo"):
        Worker(nothing, [d])
    with pytest.raises(ValueError, match=r"has been given away already"):
        [Worker(nothing, [end]) for end in [d.prod()] * 2]


@pytest.mark.parametrize(
    "option",
    [
        {"plio": True},
        {"pad_dimensions": [(0, 1)]},
        {"pad_value": 1},
        {"disable_synchronization": True},
        {"repeat_count": 2},
        {"delegate_tile": Tile(0, 1)},
        {"init_values": [np.zeros(16)]},
        {"consumer_obj_type": words(8)},
        {"aie_stream": (0, 0)},
    ],
)
def test_arguments_that_are_not_modelled_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(DeviceError, match=f"fifo 'a': the emulator does not model {name}="):
        ObjectFifo(words(16), name="a", **option)


def test_types_are_spelled_as_in_iron() -> None:
    with pytest.raises(DtypeError, match=r"the object type of fifo 'a' is .*spell an array's type"):
        ObjectFifo(np.int32, name="a")
    with pytest.raises(DtypeError, match=r"argument 1 of f is .*; the emulator takes arrays, and np.int32 by value"):
        Kernel("f", "f.o", [words(4), np.float32])


# --- run-time descriptors ---------------------------------------------------------------------------------------------


def fill_once(
    sizes: Sequence[int], strides: Sequence[int], offset: int = 0, total: int = 1 << 22
) -> Callable[[], None]:
    """A run whose only transfer has this pattern of ``total`` words."""

    def sequence(a: Any, b: Any, into: Any, out: Any) -> None:
        into.fill(a, tap=TensorAccessPattern((total,), offset, sizes, strides))

    def go() -> None:
        program = copy_design(total, sequence=sequence)
        run(program, None, None, timing_only=True)

    return go


@pytest.mark.parametrize(
    ("sizes", "strides", "message"),
    [
        ([65, 1, 1, 256], [0, 0, 0, 1], "65 repeats; a descriptor of a shim repeats up to 64 times"),
        ([1, 1, 2, 1024], [0, 0, 2048, 1], "1024 words in dimension 3; a shim counts up to 1023"),
        ([1, 1, 1024, 2], [0, 0, 4, 1], "1024 steps in dimension 2; a shim counts up to 1023"),
        ([1, 2, 1, 8], [0, (1 << 20) + 1, 0, 1], "a stride of 1048577 words in dimension 1; a shim's are 1048576"),
        ([2, 1, 1, 8], [(1 << 20) + 1, 0, 0, 1], "a stride of 1048577 words in dimension 0"),
        ([1, 2, 2, 8], [0, 0, 8, 1], "stride 0 of dimension 1; only the outermost may repeat with 0"),
        ([1, 1, 1, 1, 8], [0, 0, 0, 0, 1], "5 dimensions; a shim has 3 and the repeat"),
    ],
)
def test_shim_descriptors(sizes: list[int], strides: list[int], message: str) -> None:
    with pytest.raises(ArrayLimitError, match=message):
        fill_once(sizes, strides)()


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [
        ([64, 1, 1, 256], [0, 0, 0, 1]),
        ([1, 1, 1, 1 << 20], [0, 0, 0, 1]),
        ([1, 4, 64, 2048], [0, 64 * 2048, 2048, 1]),  # contiguous: folded, however large
        ([1, 1, 1023, 1023], [0, 0, 2048, 1]),
        ([1, 2000, 2, 64], [0, 512, 64, 1]),  # the third dimension follows from the length
        ([2, 1, 1, 8], [1 << 20, 0, 0, 1]),
    ],
)
def test_shim_descriptors_that_pass(sizes: list[int], strides: list[int]) -> None:
    with pytest.raises(DataflowError, match=r"freed too early|left data behind|stopped in the middle"):
        fill_once(sizes, strides)()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sizes": [1, 1, 1, 64], "strides": [1]}, ArrayLimitError, "as many sizes as strides"),
        ({"sizes": [1, 1, 1, 64]}, ValueError, "fill 0 of fifo 'a': pass sizes and strides together"),
        ({"strides": [0, 0, 0, 1]}, ValueError, "pass sizes and strides together"),
        ({"sizes": [1, 1, 1, 64.5], "strides": [0, 0, 0, 1]}, DtypeError, "a size is a float, not an integer"),
        ({"sizes": [64], "strides": [1], "offset": 0.5}, DtypeError, "the offset is a float"),
        ({"tap": [64]}, DtypeError, "tap is a list; pass a TensorAccessPattern"),
    ],
)
def test_patterns_are_of_integers(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run(
            copy_design(sequence=lambda a, b, into, out: into.fill(a, **options) and None), None, None, timing_only=True
        )


@pytest.mark.parametrize("stack_size", [0, -5000, 1024.0])
def test_a_stack_is_a_number_of_bytes(stack_size: Any) -> None:
    with pytest.raises(ArrayLimitError, match="stack_size = "):
        copy_design(stack_size=stack_size)


@pytest.mark.parametrize("depth", [1.5, "2"])
def test_depths_are_integers(depth: Any) -> None:
    with pytest.raises(DtypeError, match="depth"):
        ObjectFifo(words(4), depth=depth)
    with pytest.raises(DtypeError, match="depth"):
        ObjectFifo(words(4)).cons(depth=depth)


def test_patterns_stay_inside_their_buffer() -> None:
    with pytest.raises(DataflowError, match=r"it reaches element 1024 of a buffer of 1024"):
        fill_once([1, 1, 1, 1024], [0, 0, 0, 1], offset=1, total=1024)()


def test_small_elements_move_as_words() -> None:
    halves = np.ndarray[(1024,), np.dtype[np.float16]]

    def design(sizes: list[int], strides: list[int], offset: int = 0) -> Program:
        a = ObjectFifo(words(64), name="a")

        def sequence(x: Any, into: Any) -> None:
            into.fill(x, tap=TensorAccessPattern((1024,), offset, sizes, strides))

        worker = Worker(nothing, [a.cons()], tile=Tile(0, CORE))
        return Program(iron.device(1), Runtime(sequence, [halves, a.prod(tile=Tile(0, SHIM))]), [worker])

    for sizes, strides, offset, message in (
        ([2, 3], [4, 1], 0, "runs of 6 bytes; they must be multiples of 4"),
        ([2, 4], [5, 1], 0, "stride 5 is 10 bytes, which is no multiple of 4"),
        ([2, 4], [8, 2], 0, "innermost stride 2 of elements of 2 bytes"),
        ([2, 4], [8, 1], 1, "it starts at byte 2, which is no multiple of 4"),
    ):
        program = design(sizes, strides, offset)
        program.workers[0].while_true = False
        with pytest.raises(ArrayLimitError, match=message):
            run(program, np.zeros(1024, np.float16))


def test_sixteen_descriptors_of_a_shim() -> None:
    """Four channels of a shim, each with up to six tasks in flight: the 17th descriptor is refused."""

    def sequence(x: Any, *ends: Any) -> None:
        group = TaskGroup()
        for _ in range(5):
            for end in ends:
                (end.fill if end.is_prod else end.drain)(x, group=group)
        group.finish()

    fifos = [ObjectFifo(words(16), name=f"f{i}") for i in range(4)]
    workers = [
        Worker(copy_core, [fifos[i].cons(), fifos[2 + i].prod(), copy_kernel(16)], tile=Tile(i, CORE)) for i in range(2)
    ]
    ends = [fifo.prod(tile=Tile(0, SHIM)) for fifo in fifos[:2]] + [fifo.cons(tile=Tile(0, SHIM)) for fifo in fifos[2:]]
    program = Program(iron.device(2), Runtime(sequence, [words(16), *ends]), workers)
    with pytest.raises(ArrayLimitError, match=r"fill 4 of fifo 'f0': shim 0 has 16 descriptors in use"):
        run(program, np.zeros(16, np.int32))


def test_the_seventh_task_in_flight_is_lost() -> None:
    def sequence(tasks: int) -> Callable[..., None]:
        def body(a: Any, b: Any, into: Any, out: Any) -> None:
            group = TaskGroup()
            # Nothing drains: the first task's objects fill the array and the others wait behind it.
            for _ in range(tasks):
                into.fill(a, group=group)
            out.drain(b, wait=True, group=group)
            for _ in range(tasks - 1):
                out.drain(b, wait=True, group=group)
            group.finish()

        return body

    total = 1 << 14
    assert arch.MAX_IN_FLIGHT == 6
    with pytest.raises(ArrayLimitError, match=r"fill 6 of fifo 'a'.*has 6 tasks in flight already"):
        run(copy_design(total, sequence=sequence(7)), count(total), np.zeros(total, np.int32))
    report = run(copy_design(total, sequence=sequence(6)), count(total), np.zeros(total, np.int32))
    assert report.max_in_flight == 6
