"""`tilefuse.emulator.kernels`: names, argument specifications, what the door refuses, counting.

What the kernels compute is in test_kernels_gemm.py, test_kernels_gemv.py and test_kernels_attention.py.
"""

from __future__ import annotations

import copy
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tilefuse.emulator import kernels
from tilefuse.emulator.kernels import RoundingMode, Slots
from tilefuse.errors import DeviceError, DtypeError, LayoutError, ShapeError

NAME = re.compile(
    r"gem[mv]_(bf16|bfp16)_(bf16|w[48]g(32|64|128)m?)_(emulated|bfp16|mantissa|elementwise)_((64|32|16)x)?128x(64|128)"
)
PRODUCTS = [name for name in kernels.names() if not name.startswith("attention")]
GEMM = "gemm_bf16_w4g128_mantissa_64x128x64"
GEMV = "gemv_bf16_w8g64m_mantissa_128x64"


def test_names_follow_the_grammar_and_say_what_the_kernel_is() -> None:
    names = kernels.names()
    assert names == sorted(set(names))
    for d in (64, 128):
        attention = kernels.get(f"attention_bf16_d{d}_32x64")
        assert (attention.op, attention.activation, attention.bits) == ("attention", "bf16", 16)
        assert (attention.m, attention.d) == (32, d)
        assert (attention.path, attention.group, attention.scratch_bytes) == ("", 0, 0)
        assert "" not in attention.entry_points
    assert len(names) == len(PRODUCTS) + 2
    for name in PRODUCTS:
        match = NAME.fullmatch(name)
        assert match, name
        activation, weights, group, path, _, m, n = match.groups()
        kernel = kernels.get(name)
        assert (kernel.name, kernel.op, kernel.activation, kernel.path) == (name, name[:4], activation, path)
        assert (kernel.tiles, kernel.d) == (int(n) // 64, 0)
        assert kernel.m == (int(m) if m else 1)
        assert kernel.group == (int(group) if group else 0)
        assert kernel.bits == (16 if weights == "bf16" else int(weights[1]))
        assert kernel.minima == weights.endswith("m")


def test_every_scheme_is_there() -> None:
    """Bits x group x zero kind for both operations, and the unquantised baselines."""
    have = {(k.op, k.bits, k.group, k.minima) for k in map(kernels.get, PRODUCTS)}
    schemes = {(bits, group, minima) for bits in (4, 8) for group in (32, 64, 128) for minima in (False, True)}
    assert have == {(op, *scheme) for op in ("gemm", "gemv") for scheme in schemes | {(16, 0, False)}}
    bands = [k for k in map(kernels.get, kernels.names()) if k.activation == "bfp16"]
    assert {(k.bits, k.group, k.minima) for k in bands if k.tiles == 1} == schemes
    assert {(k.bits, k.group, k.minima) for k in bands if k.tiles == 2} == {(4, g, False) for g in (32, 64, 128)}


def test_arguments_of_a_gemm() -> None:
    kernel = kernels.get(GEMM)
    entries = {
        stem: [(a.name, a.shape, a.dtype.name, a.written) for a in entry.arguments]
        for stem, entry in kernel.entry_points.items()
    }
    a = ("a", (8, 16, 8, 8), "bfloat16", False)
    w = ("w", (4288,), "uint8", False)  # 4096 of codes, 128 of scales, 64 of zero points
    acc_shape = (8, 8, 8, 8)
    size = (kernel.scratch_bytes,)
    assert entries == {
        "": [a, w, ("scratch", size, "uint8", False), ("acc", acc_shape, "float32", True)],
        "zero": [("acc", acc_shape, "float32", True)],
        "prepare": [w, ("scratch", size, "uint8", True)],
        "store_bf16": [("acc", acc_shape, "float32", False), ("c", acc_shape, "bfloat16", True)],
        "store_f32": [("acc", acc_shape, "float32", False), ("c", acc_shape, "float32", True)],
    }
    assert kernel.entry_points["zero"].name == f"{GEMM}_zero"
    assert kernel.entry_points[""].name == GEMM


@pytest.mark.parametrize("name", PRODUCTS)
def test_zero_and_store(name: str, rng: np.random.Generator) -> None:
    """The entry points whose result needs no model: zero, and narrowing to nearest even."""
    entries = kernels.get(name).entry_points
    shape = [abs(extent) for extent in entries["zero"].arguments[0].shape]
    acc = entries["zero"].arguments[0].copy_of(rng.standard_normal(shape))
    out = entries["store_bf16"].arguments[-1].empty()
    # One band of one tile, where the sums have several: test_kernels_band.py has all.
    which = [0] * (len(entries["store_bf16"].arguments) - 2)
    stored = acc[tuple(which)]
    expected = stored.astype(ml_dtypes.bfloat16)
    entries["store_bf16"](acc, *which, out)
    np.testing.assert_array_equal(out, expected)
    entries["zero"](acc, *which[:1])
    assert not acc[tuple(which[:1])].any()


def test_door_refuses_with_the_argument_and_the_remedy() -> None:
    kernel = kernels.get(GEMV)
    good = [argument.empty() for argument in kernel.arguments]
    x_scratch, w, acc = good
    with pytest.raises(ShapeError, match=r"2 arrays; the kernel takes 3: x_scratch, w, acc"):
        kernel(x_scratch, w)
    with pytest.raises(ShapeError, match=r"acc has shape \[8, 8\]; the kernel takes \[64\]"):
        kernel(x_scratch, w, acc.reshape(8, 8))
    with pytest.raises(DtypeError, match="acc has dtype float64; the kernel takes float32"):
        kernel(x_scratch, w, acc.astype(np.float64))
    with pytest.raises(DtypeError, match="acc is a list"):
        kernel(x_scratch, w, acc.tolist())
    twice = np.zeros(128, np.float32)
    with pytest.raises(LayoutError, match="acc is not C-contiguous"):
        kernel(x_scratch, w, twice[::2])
    raw = np.zeros(256 + 128, np.uint8)
    start = -raw.ctypes.data % 64 + 4
    with pytest.raises(LayoutError, match=r"acc starts 4 bytes past a multiple of 64.*Argument.empty"):
        kernel(x_scratch, w, raw[start : start + 256].view(np.float32))
    acc.flags.writeable = False
    with pytest.raises(LayoutError, match="acc is read-only"):
        kernel(x_scratch, w, acc)
    store = kernels.get(GEMV).entry_points["add"]
    both = store.arguments[0].empty()
    with pytest.raises(LayoutError, match="acc, which the kernel writes, shares memory with partial"):
        store(both, both)


def test_unknown_names() -> None:
    with pytest.raises(DeviceError, match="no kernel 'gemv_bf16_w3'"):
        kernels.get("gemv_bf16_w3")
    with pytest.raises(DeviceError, match=r"no entry point 'sum'; it has '', 'zero'"):
        kernels.count(GEMV, "sum")
    not_text: list[Any] = [None, 4, [], b"gemv"]
    for name in not_text:
        with pytest.raises(DtypeError, match="name of a kernel is text"):
            kernels.get(name)
        with pytest.raises(DeviceError, match="no entry point"):
            kernels.count(GEMV, name)


def test_all_kernels_run_in_one_thread_and_their_counts_stay_apart() -> None:
    """Together they have more regions than one core counts."""
    for _ in range(2):
        for name in kernels.names():
            for entry in kernels.get(name).entry_points.values():
                entry(*(0 if a.by_value else a.copy_of(np.zeros([abs(n) for n in a.shape])) for a in entry.arguments))
    acc = kernels.get(GEMM).entry_points["zero"].arguments[0].empty()
    assert kernels.count(GEMM, "zero", acc).keys() == {"", "zero"}


def test_threads_count_apart(rng: np.random.Generator) -> None:
    """Each is a core of its own."""
    entries = [kernels.get(name).entry_points[""] for name in (GEMM, GEMV, GEMM, GEMV)]
    arrays = [[a.copy_of(rng.integers(0, 9, a.shape)) for a in entry.arguments] for entry in entries]
    alone = [entry.count(*given) for entry, given in zip(entries, arrays, strict=True)]

    def counts(i: int) -> list[dict[str, Slots]]:
        return [entries[i].count(*arrays[i]) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(counts, range(4))) == [[slots] * 20 for slots in alone]


def test_kernels_and_entry_points_are_pickled_by_name() -> None:
    kernel = kernels.get(GEMV)
    for thing in (kernel, kernel.entry_points["add"], kernel.arguments[0]):
        assert pickle.loads(pickle.dumps(thing)) == thing
        assert copy.deepcopy(thing) == thing


def test_arrays_of_values_that_the_dtype_does_not_reach() -> None:
    """`Argument.copy_of` rounds, and loses nothing else."""
    add = kernels.get(GEMV).entry_points["add"].arguments[0]
    codes = kernels.get(GEMV).arguments[1]
    x = kernels.get(GEMV).entry_points["prepare"].arguments[0]
    for values in ([1.0] * 63, 1.0, [[1.0]], np.zeros((64, 0))):
        with pytest.raises(ShapeError, match=r"partial: values of shape \["):
            add.copy_of(values)
    no_numbers: list[Any] = [None, ["1"] * 64, [[1], [1, 2]], np.ones(64, complex), np.zeros(64, "M8[s]"), [None] * 64]
    for values in no_numbers:
        with pytest.raises(DtypeError, match="partial: "):
            add.copy_of(values)
    for value in (-1, 256, 0.5, np.nan, np.inf, 2**40):
        with pytest.raises(DtypeError, match=r"w: .* is among the values, and uint8 does not reach it"):
            codes.copy_of(np.full(codes.shape, value))
    for value in (1e39, -3.4e38):
        with pytest.raises(DtypeError, match=r"x: .* is among the values, and bfloat16 does not reach it"):
            x.copy_of(np.full(x.shape, value))
    with pytest.raises(DtypeError, match="float32 does not reach it"):
        add.copy_of([1e39] * 64)
    for dtype in (np.float16, np.float32, np.float64, np.int8, np.uint16, bool, ml_dtypes.bfloat16):
        np.testing.assert_array_equal(codes.copy_of(np.ones(codes.shape, dtype)), 1)
        np.testing.assert_array_equal(x.copy_of(np.ones(x.shape, dtype)), x.dtype.type(1))
    assert np.isnan(x.copy_of(np.full(x.shape, np.nan))).all()
    assert np.isinf(add.copy_of([np.inf] * 64)).all()


def test_addresses_are_checked_as_far_as_they_can_be() -> None:
    entry = kernels.get(GEMV).entry_points["add"]
    with pytest.raises(ShapeError, match="1 addresses; the kernel takes 2: partial, acc"):
        entry.call_addresses(64)
    not_addresses: list[Any] = [0, -64, 1 << 64, 1.5, None, "64"]
    for where in not_addresses:
        with pytest.raises(DtypeError, match="is not an address"):
            entry.call_addresses(64, where)


def test_a_rounding_mode_that_no_core_has() -> None:
    before = kernels.current_rounding_mode()
    no_modes: list[Any] = [4, -1, 99, 1 << 40, None, "floor", []]
    for mode in no_modes:
        with (
            pytest.raises(DeviceError, match=r"no rounding mode .*; it has FLOOR 0, CEIL 1"),
            kernels.rounding_mode(mode),
        ):
            pass
        assert kernels.current_rounding_mode() == before


def test_fault_of_the_core_is_an_error_and_leaves_no_trace() -> None:
    """Addresses that the caller vouches for, wrongly: the vector accesses themselves find it."""
    entry = kernels.get(GEMM).entry_points["zero"]
    nbytes = entry.arguments[0].nbytes
    memory = np.zeros(nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64
    with pytest.raises(DeviceError, match=r"zero: vector access at address \.\.\..*needs an alignment of 64 bytes"):
        entry.call_addresses(memory.ctypes.data + start + 16)
    entry.call_addresses(memory.ctypes.data + start)


def test_counts_are_of_one_call() -> None:
    """64 x 64 fp32 sums are 256 registers: so many stores, one register of zeros, nothing else."""
    acc = kernels.get(GEMM).entry_points["zero"].arguments[0].empty()
    for _ in range(2):
        regions = kernels.count(GEMM, "zero", acc)
        assert sum(r.st for r in regions.values()) == 256
        assert sum(r.mv for r in regions.values()) == 1
        assert sum(r.load + r.ldb + r.vec for r in regions.values()) == 0


def test_cycles_of_slots() -> None:
    """Two loads a cycle, unpacks on one of the two units, one of everything else."""
    assert Slots(load=7, ldb=2, st=1, mv=3, vec=4).bound == 5
    assert Slots(load=1, ldb=6).bound == 6
    assert Slots(vec=9, mv=3).bound == 9
    assert Slots(vec=9, entries=3).cycles == 9 + 3 * kernels.PIPELINE_FILL


def test_rounding_mode_belongs_to_the_thread_and_is_given_back() -> None:
    """A new thread is a core that has just powered up; a kernel leaves the mode that it set."""
    seen = []

    def look() -> None:
        seen.append(kernels.current_rounding_mode())
        with kernels.rounding_mode(RoundingMode.CEIL):
            seen.append(kernels.current_rounding_mode())
            zero = kernels.get(GEMM).entry_points["zero"]
            zero(zero.arguments[0].empty())
            seen.append(kernels.current_rounding_mode())
        seen.append(kernels.current_rounding_mode())

    with kernels.rounding_mode(RoundingMode.SYMMETRIC_INF):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        seen.append(kernels.current_rounding_mode())
    expected = ["FLOOR", "CEIL", "CONV_EVEN", "FLOOR", "SYMMETRIC_INF"]
    assert [mode.name for mode in seen] == expected


def test_a_held_mode_is_held_again_after_another_inside() -> None:
    zero = kernels.get(GEMM).entry_points["zero"]
    acc = zero.arguments[0].empty()
    with kernels.rounding_mode(RoundingMode.CEIL, held=True):
        with kernels.rounding_mode(RoundingMode.FLOOR):
            assert kernels.current_rounding_mode() == RoundingMode.FLOOR
            zero(acc)
            assert kernels.current_rounding_mode() == RoundingMode.CONV_EVEN
        zero(acc)
        assert kernels.current_rounding_mode() == RoundingMode.CEIL
    zero(acc)
    assert kernels.current_rounding_mode() == RoundingMode.CONV_EVEN
