"""The AIE2P GEMM kernels of bfp16 activations on the host: against float64 within the bound of `oracle_gemm`, and bit
for bit against the kernels that convert activations themselves.

Bands reach them as the host stages them, written here from the format's definition (`oracle_gemm.operand_bytes`).
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Scheme, make_layer
from oracle_gemm import (
    Weights,
    addition_bound,
    bfp16_scratch,
    error_bound,
    from_blocks,
    held_weights,
    operand_bytes,
    to_blocks,
)

import tilefuse as tf
from tilefuse.emulator import kernels
from tilefuse.emulator.kernels import HostKernel, RoundingMode
from tilefuse.errors import DtypeError, ShapeError
from tilefuse.layout import KT, NT

BF16 = ml_dtypes.bfloat16
BAND_ROWS = 16
EVERY = [
    *product((4, 8), (32, 64, 128), (False, True), (1,)),
    *product((4,), (32, 64, 128), (False,), (2,)),
]
"""Bits, group, minima and packed tiles side by side of every kernel."""
each_kernel = pytest.mark.parametrize(("bits", "group", "minima", "side"), EVERY)


def path_of(minima: bool) -> str:
    """Minima are no mantissas."""
    return "bfp16" if minima else "mantissa"


def kernel(bits: int, group: int, minima: bool = False, side: int = 1) -> HostKernel:
    """The kernel of that configuration."""
    weights = f"w{bits}g{group}{'m' if minima else ''}"
    return kernels.get(f"gemm_bfp16_{weights}_{path_of(minima)}_16x128x{64 * side}")


def band_objects(x: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """x [M, K] -> [k tiles][bands][2304]: [16 k blocks][2 blocks of 8 rows] operands of [8 rows][8 channels]."""
    m, k = x.shape
    blocks = x.astype(np.float64).reshape(m // 16, 2, 8, k // KT, 16, 8)
    return operand_bytes(blocks.transpose(3, 0, 4, 1, 2, 5)).reshape(k // KT, m // 16, 2304)


def weight_objects(layer: tf.PackedLinear, side: int) -> npt.NDArray[np.uint8]:
    """The packed tiles of 64 * side output channels -> [k tiles][side * tile bytes]."""
    lay = layer.layout
    at = [[lay.tile_offset(n, k) for n in range(side)] for k in range(lay.k_tiles_used)]
    return np.stack([np.concatenate([layer.data[a : a + lay.tile_bytes] for a in row]) for row in at])


def run(k: HostKernel, x: npt.NDArray[Any], w: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """x [M, K] bfloat16, whole tiles, times weight objects -> fp32 [M, 64 * side], as a design calls the kernel."""
    entry = k.entry_points
    bands = len(x) // BAND_ROWS
    acc = entry["zero"].arguments[0].empty(bands)
    scratch = entry["prepare"].arguments[1].empty()
    for band in range(bands):
        entry["zero"](acc, band)
    for objects, packed in zip(band_objects(x), w, strict=True):
        weights = entry["prepare"].arguments[0].copy_of(packed)
        entry["prepare"](weights, scratch)
        for band in range(bands):
            k(k.arguments[0].copy_of(objects[band]), weights, scratch, acc, band)
    return unblocked(acc)


def unblocked(acc: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[bands][tiles][2][8] blocks of [8][8] -> [16 * bands, 64 * tiles]."""
    bands, tiles = acc.shape[:2]
    return acc.transpose(0, 2, 4, 1, 3, 5).reshape(16 * bands, 64 * tiles)


def activations(rng: np.random.Generator, m: int, k: int) -> npt.NDArray[Any]:
    """bfloat16 [M, K], magnitudes spread as a transformer's are."""
    return (rng.normal(0, 1, (m, k)) * np.exp(rng.normal(0, 0.7, (m, k)))).astype(BF16)


def check(y: npt.NDArray[Any], x: npt.NDArray[Any], weights: Weights, path: str) -> float:
    """Asserts the bound on fp32 results; returns the largest error as a fraction of it."""
    x64 = x.astype(np.float64)
    assert np.isfinite(y).all()
    error = np.abs(y.astype(np.float64) - x64 @ weights.exact())
    worst = float((error / error_bound(x64, weights, path)).max())
    assert worst <= 1, f"error is {worst:.3g} of the bound"
    return worst


# --- results ---------------------------------------------------------------------------------------------------------


@each_kernel
def test_product(rng: np.random.Generator, bits: int, group: int, minima: bool, side: int) -> None:
    """Several bands and calls: within the bound, and not by luck."""
    k, m = 3 * KT, 5 * BAND_ROWS
    known = make_layer(rng, k, NT * side, Scheme(bits, group, minima), columns=1)
    x = activations(rng, m, k)
    y = run(kernel(bits, group, minima, side), x, weight_objects(known.layer, side))
    worst = check(y, x, Weights.of(known.layer), path_of(minima))
    assert worst > 1e-3  # a bound that nothing comes near holds nothing


@each_kernel
def test_product_of_exact_operands(rng: np.random.Generator, bits: int, group: int, minima: bool, side: int) -> None:
    """Activations that lose nothing as operands (integers, the largest of every 8 from 64 to 127) leave only the fp32
    additions and the fold."""
    k, m = 3 * KT, BAND_ROWS
    x = rng.integers(-127, 128, (m, k // 8, 8))
    x[..., 0] = rng.integers(64, 128, (m, k // 8))
    x = x.reshape(m, k).astype(BF16)
    known = make_layer(rng, k, NT * side, Scheme(bits, group, minima), columns=1)
    weights, path = Weights.of(known.layer), path_of(minima)
    y = run(kernel(bits, group, minima, side), x, weight_objects(known.layer, side))
    x64 = x.astype(np.float64)
    assert (np.abs(y - x64 @ held_weights(weights, path)) <= addition_bound(x64, weights, path)).all()


@each_kernel
def test_same_bits_as_with_bfloat16_activations(
    rng: np.random.Generator, bits: int, group: int, minima: bool, side: int
) -> None:
    """Where activations are rounded makes no difference to any result."""
    k, m = 2 * KT, 2 * BAND_ROWS
    known = make_layer(rng, k, NT * side, Scheme(bits, group, minima), columns=1)
    x, w = activations(rng, m, k), weight_objects(known.layer, side)
    y = run(kernel(bits, group, minima, side), x, w)
    weights = f"w{bits}g{group}{'m' if minima else ''}"
    other = kernels.get(f"gemm_bf16_{weights}_{path_of(minima)}_16x128x64")
    a, packed, scratch, acc = (argument.empty() for argument in other.arguments)
    for tile, rows in product(range(side), range(0, m, BAND_ROWS)):
        other.entry_points["zero"](acc)
        for k_tile, both in enumerate(w):
            packed[...] = both.reshape(side, -1)[tile]
            a[...] = to_blocks(x[rows : rows + BAND_ROWS, k_tile * KT : (k_tile + 1) * KT])
            other.entry_points["prepare"](packed, scratch)
            other(a, packed, scratch, acc)
        np.testing.assert_array_equal(
            y[rows : rows + BAND_ROWS, tile * NT : (tile + 1) * NT].view(np.uint32), from_blocks(acc).view(np.uint32)
        )


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("elsewhere", [127, 129, None])
def test_zero_points_of_8_bits(rng: np.random.Generator, group: int, elsewhere: int | None) -> None:
    """All 128, where the sums of activations are left out, and all but one, the last, where they must not be."""
    zeros = np.full((2 * KT // group, NT), 128, np.uint8)
    if elsewhere is not None:
        zeros[-1, -1] = elsewhere
    known = make_layer(rng, 2 * KT, NT, Scheme(8, group), zeros=zeros, columns=1)
    x = np.abs(activations(rng, 2 * BAND_ROWS, 2 * KT))
    k, w = kernel(8, group), weight_objects(known.layer, 1)
    check(run(k, x, w), x, Weights.of(known.layer), "mantissa")
    scratch = k.entry_points["prepare"].arguments[1].empty()
    acc = k.arguments[3].empty(1)
    acc[...] = 0
    folded = []
    for objects, packed in zip(band_objects(x), w, strict=True):
        weights = k.arguments[1].copy_of(packed)
        k.entry_points["prepare"](weights, scratch)
        folded.append(
            "row_sums" in k.entry_points[""].count(k.arguments[0].copy_of(objects[0]), weights, scratch, acc, 0)
        )
    assert folded == [False, elsewhere is not None]


def test_padding_channels_are_nothing(rng: np.random.Generator) -> None:
    """N that ends within a tile, K within a group of the last tile, and one tile of two that is padding."""
    k, n = KT + 40, 61
    known = make_layer(rng, k, n, Scheme(4, 0), columns=1)
    assert known.layer.layout.tile_group in (32, 64, 128)
    group = known.layer.layout.tile_group
    x = np.pad(activations(rng, BAND_ROWS, k), ((0, 0), (0, 2 * KT - k)))
    w = weight_objects(known.layer, 1)
    y = run(kernel(4, group, side=2), x, np.concatenate([w, np.zeros_like(w)], axis=1))
    check(y[:, :n], x[:, :k], Weights.of(known.layer), "mantissa")
    assert (y[:, n:] == 0).all()


@pytest.mark.parametrize(("bits", "minima"), [(4, False), (8, False), (4, True)])
def test_longest_sums(rng: np.random.Generator, bits: int, minima: bool) -> None:
    """K = 32768: 256 calls for one band."""
    known = make_layer(rng, 32768, NT, Scheme(bits, 128, minima), columns=1)
    x = activations(rng, BAND_ROWS, 32768)
    y = run(kernel(bits, 128, minima), x, weight_objects(known.layer, 1))
    check(y, x, Weights.of(known.layer), path_of(minima))


@each_kernel
def test_prepare(rng: np.random.Generator, bits: int, group: int, minima: bool, side: int) -> None:
    """The scratch, bit for bit: weights as operands, or scale matrices (high and low) and the mark."""
    known = make_layer(rng, KT, NT * side, Scheme(bits, group, minima), columns=1)
    prepare = kernel(bits, group, minima, side).entry_points["prepare"]
    scratch = prepare.arguments[1].copy_of(np.zeros(prepare.arguments[1].shape))
    prepare(prepare.arguments[0].copy_of(weight_objects(known.layer, side)[0]), scratch)
    parts = Weights.of(known.layer)
    for tile, own in enumerate(scratch.reshape(side, -1)):
        columns = slice(tile * NT, (tile + 1) * NT)
        if minima:
            np.testing.assert_array_equal(own, bfp16_scratch(parts.exact()[:, columns]))
            continue
        groups = KT // group
        matrices = own[: 1152 * groups].reshape(groups, 8, 2, 8, 9)
        digits = matrices[..., 1:].view(np.int8) * np.ldexp(1.0, matrices[..., :1].astype(int) - 133)
        scales = parts.s[::group, columns].reshape(groups, 8, 8)
        np.testing.assert_array_equal(digits.sum(axis=2), scales[..., None] * np.eye(8))
        assert len(own) == 1152 * groups + (64 if bits == 8 else 0)
        if bits == 8:
            assert parts.z is not None
            assert own[1152 * groups] == (parts.z != 128).any()


@given(
    st.sampled_from(EVERY), st.sampled_from(["random", "lowest", "highest"]), st.integers(0, 2**32), st.integers(9, 127)
)
@settings(max_examples=60)
def test_extremes(configuration: tuple[int, int, bool, int], which: str, seed: int, exponent: int) -> None:
    """The bound for zero points at either end, scales of any sign and many magnitudes, x with outliers and zeros."""
    bits, group, minima, side = configuration
    rng = np.random.default_rng(seed)
    shape = (KT // group, NT * side)
    top = (1 << bits) - 1
    zeros = {"lowest": np.zeros(shape), "highest": np.full(shape, top)}.get(which, rng.integers(0, top + 1, shape))
    scales = rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-20, 5, shape)
    given_zeros = None if minima else zeros.astype(np.uint8)
    known = make_layer(rng, KT, NT * side, Scheme(bits, group, minima), scales=scales, zeros=given_zeros, columns=1)
    x_bits = rng.integers(exponent - 9, exponent, (BAND_ROWS, KT)) << 7 | rng.integers(0, 128, (BAND_ROWS, KT))
    x = (x_bits | rng.integers(0, 2, (BAND_ROWS, KT)) << 15).astype(np.uint16).view(BF16)
    x[rng.random(x.shape) < 0.2] = 0
    y = run(kernel(bits, group, minima, side), x, weight_objects(known.layer, side))
    check(y, x, Weights.of(known.layer), path_of(minima))


# --- bands -----------------------------------------------------------------------------------------------------------


@each_kernel
def test_only_its_band_is_touched(rng: np.random.Generator, bits: int, group: int, minima: bool, side: int) -> None:
    """Each entry point reads and writes the band that it is given, and a piece of it where it says so."""
    k = kernel(bits, group, minima, side)
    known = make_layer(rng, KT, NT * side, Scheme(bits, group, minima), columns=1)
    entry, bands, band = k.entry_points, 4, 2
    w = entry["prepare"].arguments[0].copy_of(weight_objects(known.layer, side)[0])
    scratch = entry["prepare"].arguments[1].empty()
    entry["prepare"](w, scratch)
    acc = k.arguments[3].copy_of(rng.normal(0, 1, (bands, side, 2, 8, 8, 8)))
    before = acc.copy()
    x = activations(rng, BAND_ROWS, KT)
    k(k.arguments[0].copy_of(band_objects(x)[0, 0]), w, scratch, acc, band)
    alone = run(k, x, weight_objects(known.layer, side))
    mass = np.abs(before[band]).max() + np.abs(alone).max()
    assert np.abs(unblocked(acc)[band * 16 : band * 16 + 16] - unblocked(before)[band * 16 :][:16] - alone).max() < (
        2.0**-12 * mass
    )
    others = [b for b in range(bands) if b != band]
    np.testing.assert_array_equal(acc[others], before[others])

    before = acc.copy()
    c = entry["store_bf16"].arguments[3].empty()
    for half in range(side):
        entry["store_bf16"](acc, band, half, c)
        np.testing.assert_array_equal(c, acc[band, half].astype(BF16))
    np.testing.assert_array_equal(acc, before)

    entry["zero"](acc, band)
    assert not acc[band].any()
    np.testing.assert_array_equal(acc[others], before[others])


def test_an_index_outside_its_array_never_reaches_memory() -> None:
    k = kernel(4, 128, side=2)
    zero, store = k.entry_points["zero"], k.entry_points["store_bf16"]
    acc, c = zero.arguments[0].empty(3), store.arguments[3].empty()
    for band in (-1, 3, 2**31 - 1, -(2**31)):
        with pytest.raises(ShapeError, match=rf"zero: band is {band}; it is an index of acc: pass 0 to 2"):
            zero(acc, band)
    for half in (-1, 2):
        with pytest.raises(ShapeError, match=rf"half is {half}; it is an index of acc: pass 0 to 1"):
            store(acc, 0, half, c)
        with pytest.raises(ShapeError, match="half is"):  # a number that no size of the array changes
            store.call_addresses(64, 0, half, 64)
    not_integers: list[Any] = [2**31, 1.0, "1", None, True, np.zeros(1, np.int32)]
    for band in not_integers:
        with pytest.raises(DtypeError, match=r"band is .*; pass an integer that int32 holds"):
            zero(acc, band)
        with pytest.raises(DtypeError, match="band is"):
            zero.call_addresses(64, band)
    with pytest.raises(DtypeError, match="acc is a int"):
        zero(0, acc)
    zero(acc, np.int64(2))
    zero.call_addresses(acc.ctypes.data, 2)


def test_arrays_of_any_number_of_items() -> None:
    zero = kernel(4, 128, side=2).entry_points["zero"]
    acc, band = zero.arguments
    assert (acc.shape, acc.item_nbytes, acc.nbytes, acc.is_open) == ((-1, 2, 2, 8, 8, 8), 8192, 8192, True)
    assert (band.shape, band.dtype, band.indexes, band.by_value) == ((), np.dtype(np.int32), "acc", True)
    assert band.extent_in(5 * 8192 + 8191) == 5
    assert acc.empty(7).shape == (7, 2, 2, 8, 8, 8)
    assert acc.copy_of(np.zeros(3 * 2048)).shape == (3, 2, 2, 8, 8, 8)
    for leading in (None, 0, -1, 1.5):
        with pytest.raises(ShapeError, match="acc"):
            acc.empty(leading)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"c: empty\(3\) of an array of shape"):
        kernel(4, 128).entry_points["store_bf16"].arguments[3].empty(3)
    for values in (np.zeros(2047), np.zeros(0)):
        with pytest.raises(ShapeError, match="acc: values of shape"):
            acc.copy_of(values)
    for make in (band.empty, lambda: band.copy_of([1])):
        with pytest.raises((DtypeError, ShapeError)):
            make()
    for shape in ((0, 2, 2, 8, 8, 8), (1, 1, 2, 8, 8, 8), (2, 2, 8, 8, 8), (4096,)):
        with pytest.raises(ShapeError, match="acc has shape"):
            zero(np.zeros(shape, np.float32), 0)


# --- modes, figures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "minima"), [(4, False), (8, False), (4, True)])
def test_the_callers_mode_does_not_matter(rng: np.random.Generator, bits: int, minima: bool) -> None:
    known = make_layer(rng, 2 * KT, NT, Scheme(bits, 64, minima), columns=1)
    x, w = activations(rng, BAND_ROWS, 2 * KT), weight_objects(known.layer, 1)
    results = []
    for mode in RoundingMode:
        with kernels.rounding_mode(mode):
            results.append(run(kernel(bits, 64, minima), x, w))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


def counted(bits: int, group: int, minima: bool, side: int, z: int | None = None) -> dict[tuple[str, str], list[int]]:
    """Entries, slots and cycles by entry point and region, of one call each."""
    rng = np.random.default_rng(0)
    k = kernel(bits, group, minima, side)
    zeros = None if z is None else np.full((KT // group, NT * side), z, np.uint8)
    known = make_layer(rng, KT, NT * side, Scheme(bits, group, minima), zeros=zeros, columns=1)
    w = k.arguments[1].copy_of(weight_objects(known.layer, side)[0])
    a = k.arguments[0].copy_of(band_objects(activations(rng, BAND_ROWS, KT))[0, 0])
    scratch, acc = k.arguments[2].empty(), k.arguments[3].copy_of(np.zeros(1024 * side))
    calls = {
        "prepare": k.entry_points["prepare"].count(w, scratch),
        "multiply": k.entry_points[""].count(a, w, scratch, acc, 0),
    }
    return {
        (stem, region): [s.entries, s.load, s.ldb, s.st, s.mv, s.vec, s.cycles]
        for stem, regions in calls.items()
        for region, s in regions.items()
    }


def cycles(regions: dict[tuple[str, str], list[int]], stem: str) -> int:
    """Cycles, modelled, of a call."""
    return sum(numbers[-1] for (entry, _), numbers in regions.items() if entry == stem)


def per_cycle(regions: dict[tuple[str, str], list[int]], side: int) -> float:
    """Products a cycle, modelled, of four bands with preparation."""
    return 4 * BAND_ROWS * KT * NT * side / (cycles(regions, "prepare") + 4 * cycles(regions, "multiply"))


def test_target() -> None:
    """300 products a cycle and core, modelled, with all of prepare(), for a weight object that four bands use."""
    for bits, side, z in ((4, 1, None), (4, 2, None), (8, 1, 128)):
        assert per_cycle(counted(bits, 128, False, side, z), side) >= 300


def test_inner_loop_is_what_the_source_says() -> None:
    """gemm_band_mantissa.h: four cycles for 2048 products, on the multiplier, the loads and moves in its shadow."""
    for bits in (4, 8):
        entries, load, ldb, st, mv, vec, total = counted(bits, 128, False, 1)["multiply", "multiply"]
        assert (entries, vec, total) == (4, 4 * 64, 4 * (64 + kernels.PIPELINE_FILL))
        assert max(st, mv, -(-(load + ldb) // 2)) <= 3 * 64


BANDS = {
    (4, False, 1): [9, 10, 10],
    (4, True, 1): [8, 8, 8],
    (8, False, 1): [7, 8, 8],
    (8, True, 1): [6, 6, 6],
    (4, False, 2): [3, 3, 4],
}
"""Bands whose sums fit a core beside all else, for groups of 32, 64 and 128, as the sources say."""


@each_kernel
def test_scratch_and_memory(bits: int, group: int, minima: bool, side: int) -> None:
    """64 KiB hold the sums, weights, activations and results doubled, scratch, constants and a stack."""
    k = kernel(bits, group, minima, side)
    operands = 128 * 64 // 64 * 72
    assert k.scratch_bytes == (operands if minima else side * (1152 * KT // group + (64 if bits == 8 else 0)))
    fixed = 2 * k.arguments[1].nbytes + k.scratch_bytes + 2 * 2304 + 2 * 2048 + 192 + 3328
    assert (65536 - fixed) // (4096 * side) == BANDS[bits, minima, side][(32, 64, 128).index(group)]


@pytest.mark.parametrize("bits", [4, 8])
def test_documented_slots(repository: Path, bits: int) -> None:
    """The tables in the sources are what the host counts."""
    text = (repository / "kernels" / "aie" / f"gemm_bfp16_w{bits}.cc").read_text()
    stated = {
        (path, entry, "" if region == "-" else region): [int(n) for n in numbers.split()]
        for path, entry, region, numbers in re.findall(r"//   (\w+) +(prepare|multiply) +(\w+|-)((?: +\d+){7})\n", text)
    }
    counts = {
        (path_of(minima), *where): numbers
        for minima in (False, True)
        for where, numbers in counted(bits, 128, minima, 1).items()
    }
    assert stated == counts
    totals = {name: numbers.split() for name, numbers in re.findall(r"//   (mantissa|bfp16)((?: +\d+){6})\n", text)}
    expected = {
        path_of(minima): [
            str(cycles(counted(bits, group, minima, 1), stem))
            for group in (32, 64, 128)
            for stem in ("prepare", "multiply")
        ]
        for minima in (False, True)
    }
    assert totals == expected
    page = (repository / "docs" / "kernels.md").read_text()
    rows = re.findall(rf"\| W{bits} `(mantissa|bfp16)` on bands[^|]*\| (\d+) \| (\d+) \| \**(\d+)", page)
    assert {name: numbers for name, *numbers in rows} == {
        path_of(minima): [
            str(cycles(counted(bits, g, minima, 1), "prepare") + 4 * cycles(counted(bits, g, minima, 1), "multiply"))
            for g in (32, 64, 128)
        ]
        for minima in (False, True)
    }
