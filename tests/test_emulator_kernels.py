"""The host-built kernels under emulated designs: found by symbol, checked, charged what they issue, and run."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from small_designs import CORE, SHIM, words

from tilefuse import arch
from tilefuse.emulator import iron, kernels
from tilefuse.emulator.iron import Buffer, Kernel, ObjectFifo, Program, Runtime, TaskGroup, Tile, Worker, range_
from tilefuse.errors import DataflowError, DeviceError

GEMV = "gemv_bf16_w4g128_mantissa_128x64"
GEMM = "gemm_bfp16_w4g128_mantissa_16x128x64"
BANDS = 3


def cycles(name: str, *arrays: Any) -> int:
    """What a call takes, from the kernel's own count."""
    kernel, _, stem = name.partition("/")
    regions = kernels.get(kernel).entry_points[stem].count(*arrays)
    return sum(slots.cycles for slots in regions.values())


def gemm_design(core: Any, *functions: Kernel, acc_bands: int = BANDS) -> Program:
    """A core with fp32 sums of some bands, that sends 16 x 64 results."""
    y = ObjectFifo(words(512), name="y")
    acc = Buffer(words(1024 * acc_bands), name="acc")
    worker = Worker(core, [y.prod(), acc, *functions], tile=Tile(0, CORE), while_true=False)

    def sequence(out: Any, end: Any) -> None:
        group = TaskGroup()
        end.drain(out, wait=True, group=group)
        group.finish()

    return Program(iron.device(1), Runtime(sequence, [words(512 * BANDS), y.cons(tile=Tile(0, SHIM))]), [worker])


def zero(bands: int = BANDS) -> Kernel:
    return Kernel(f"{GEMM}_zero", f"{GEMM}.o", [words(1024 * bands), np.int32])


def store(bands: int = BANDS) -> Kernel:
    return Kernel(f"{GEMM}_store_bf16", f"{GEMM}.o", [words(1024 * bands), np.int32, np.int32, words(512)])


def zero_and_store(y: Any, acc: Any, zero: Any, store: Any) -> None:
    for band in range_(BANDS):
        zero(acc, band)
    for band in range_(BANDS):
        piece = y.acquire(1)
        store(acc, band, 0, piece)
        y.release(1)


def test_kernels_run_and_are_charged() -> None:
    """Integers by value choose a band of the sums; all of them come out as zeros."""
    program = gemm_design(zero_and_store, zero(), store())
    out = np.full(512 * BANDS, -1, np.int32)
    report = iron.load(program).run(program, out)
    assert not out.any()
    entries = kernels.get(GEMM).entry_points
    acc = entries["zero"].arguments[0].empty(1)
    acc[...] = 0
    expected = BANDS * (
        cycles(f"{GEMM}/zero", acc, 0)
        + cycles(f"{GEMM}/store_bf16", acc, 0, 0, entries["store_bf16"].arguments[3].empty())
    )
    (core,) = report.cores
    assert core.kernel == expected
    assert core.calls == {f"{GEMM}_zero": BANDS, f"{GEMM}_store_bf16": BANDS}
    assert core.overhead >= 2 * BANDS * arch.CALL_CYCLES


def test_a_band_past_the_sums() -> None:
    program = gemm_design(zero_and_store, zero(2), store(2), acc_bands=2)
    with pytest.raises(DataflowError, match=f"{GEMM}_zero: argument 1 is 2; it may be 0 to 1"):
        iron.load(program).run(program, np.zeros(512 * BANDS, np.int32))


def test_sums_stored_before_they_are_zeroed() -> None:
    def core(y: Any, acc: Any, store: Any) -> None:
        store(acc, 0, 0, y.acquire(1))

    program = gemm_design(core, store())
    with pytest.raises(DataflowError, match=r"reads buffer 'acc' .argument 0. before anything wrote it"):
        iron.load(program).run(program, np.zeros(512 * BANDS, np.int32))


def test_a_band_that_nobody_zeroed_is_nan() -> None:
    def core(y: Any, acc: Any, zero: Any, store: Any) -> None:
        zero(acc, 0)
        for band in range_(BANDS):
            store(acc, band, 0, y.acquire(1))
            y.release(1)

    program = gemm_design(core, zero(), store())
    out = np.zeros(512 * BANDS, np.int32)
    iron.load(program).run(program, out)
    values = out.view(ml_dtypes.bfloat16).reshape(BANDS, -1).astype(np.float32)
    assert not values[0].any()
    assert np.isnan(values[1:]).all()


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (Kernel(f"{GEMM}_zeros", "x.o", []), f"no kernel has a function '{GEMM}_zeros' in this build; alike: .*_zero"),
        (Kernel("nonsense", "x.o", []), "no kernel has a function 'nonsense' in this build; see"),
        (Kernel(f"{GEMM}_zero", "x.o", [words(1024)]), "declared with 1 arguments; it takes 2: acc, band"),
        (
            Kernel(f"{GEMM}_zero", "x.o", [words(1000), np.int32]),
            "argument 0, acc, takes a multiple of 4096 bytes.*4000",
        ),
        (Kernel(f"{GEMM}_zero", "x.o", [words(1024), words(1)]), "argument 1, band, is an int32 by value"),
        (Kernel(f"{GEMM}_zero", "x.o", [np.int32, np.int32]), "argument 0, acc, is an array of 4096 bytes"),
        (
            Kernel(f"{GEMV}_zero", "x.o", [words(32)]),
            "argument 0, acc, takes 256 bytes; it is declared as int32.32., 128",
        ),
    ],
)
def test_declarations_are_checked(kernel: Kernel, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        iron.load(gemm_design(zero_and_store, kernel))
