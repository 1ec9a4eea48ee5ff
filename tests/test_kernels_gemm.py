"""The AIE2P GEMM kernels on the host: against float64 within derived bounds, and what they prepare bit for bit.

Weights reach them as `tilefuse.pack` writes them, so that the format is tested from end to end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import Known, Scheme, make_layer
from oracle_gemm import (
    LEAST_EXACT_SCALE,
    Weights,
    addition_bound,
    bfp16_scratch,
    blocks,
    emulated_scratch,
    error_bound,
    from_blocks,
    held_weights,
    operand_bytes,
    operand_errors,
    to_blocks,
)

import tilefuse as tf
from tilefuse.emulator import kernels
from tilefuse.emulator.kernels import HostKernel, RoundingMode
from tilefuse.layout import KT, NT

BF16 = ml_dtypes.bfloat16
ROWS = (16, 32, 64)
PATHS = ("emulated", "bfp16", "mantissa")

# What the tables in the kernels' sources are counted on.
TABLES = {4: "gemm_bf16_w4.cc", 8: "gemm_bf16_w8.cc", 16: "gemm_bf16.cc"}
TARGET = 524288 / 300
"""Cycles, modelled, of a 64 x 128 x 64 tile at 300 multiplications a cycle."""


def kernel(bits: int, group: int, path: str, m: int = 64, minima: bool = False) -> HostKernel:
    """The kernel of that configuration."""
    weights = "bf16" if bits == 16 else f"w{bits}g{group}{'m' if minima else ''}"
    return kernels.get(f"gemm_bf16_{weights}_{path}_{m}x128x64")


def configurations() -> Iterator[tuple[int, int, str, bool]]:
    """Bits, group, path, minima of every kernel with quantised weights."""
    for bits, group, path, minima in product((4, 8), (32, 64, 128), PATHS, (False, True)):
        if not (minima and path == "mantissa"):
            yield bits, group, path, minima


def name_of(configuration: tuple[int, int, str, bool]) -> str:
    """For test identifiers."""
    bits, group, path, minima = configuration
    return f"w{bits}g{group}{'m' if minima else ''}-{path}"


EVERY = [pytest.param(*c, id=name_of(c)) for c in configurations()]
WITH_ZEROS = [pytest.param(*c[:3], id=name_of(c)) for c in configurations() if not c[3]]


def tiles(layer: tf.PackedLinear, n_tile: int = 0) -> Iterator[npt.NDArray[np.uint8]]:
    """The packed tiles of 64 output channels, along K."""
    lay = layer.layout
    for k_tile in range(lay.k_tiles_used):
        at = lay.tile_offset(n_tile, k_tile)
        yield layer.data[at : at + lay.tile_bytes]


def unquantized_tiles(w: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.uint8]]:
    """bfloat16 weights [K, 64] in the packed tiles' block order, along K."""
    for tile in w.reshape(-1, 16, 8, 8, 8):
        yield np.ascontiguousarray(tile.transpose(0, 2, 3, 1)).view(np.uint8).reshape(-1)


def run(k: HostKernel, x: npt.NDArray[Any], w: Iterator[npt.NDArray[np.uint8]], store: str = "f32") -> npt.NDArray[Any]:
    """x [M, K] bfloat16 times the tiles of 64 output channels -> [M, 64], as a design would call the kernel."""
    entry = k.entry_points
    a, packed, scratch, acc = (argument.empty() for argument in k.arguments)
    bands = [acc.copy() if i else acc for i in range(len(x) // k.m)]
    bands = [entry[""].arguments[3].copy_of(b) for b in bands]
    for band in bands:
        entry["zero"](band)
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % KT)))
    for i, tile in enumerate(w):
        packed[...] = tile
        entry["prepare"](packed, scratch)
        for j, band in enumerate(bands):
            a[...] = to_blocks(padded[j * k.m : (j + 1) * k.m, i * KT : (i + 1) * KT])
            entry[""](a, packed, scratch, band)
    out = entry[f"store_{store}"].arguments[1].empty()
    results = []
    for band in bands:
        entry[f"store_{store}"](band, out)
        results.append(from_blocks(out).copy())
    return np.concatenate(results)


def activations(rng: np.random.Generator, m: int, k: int) -> npt.NDArray[Any]:
    """bfloat16 [M, K], magnitudes spread as a transformer's are."""
    return (rng.normal(0, 1, (m, k)) * np.exp(rng.normal(0, 0.7, (m, k)))).astype(BF16)


def check(y: npt.NDArray[Any], x: npt.NDArray[Any], weights: Any, path: str) -> float:
    """Asserts the bound on fp32 results; returns the largest error as a fraction of it."""
    x64 = x.astype(np.float64)
    exact = weights.exact() if isinstance(weights, Weights) else weights
    bound = error_bound(x64, weights, path)
    error = np.abs(y.astype(np.float64) - x64 @ exact)
    assert np.isfinite(y).all()
    worst = float((error / bound).max())
    assert worst <= 1, f"error is {worst:.3g} of the bound"
    return worst


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group", "path", "minima"), EVERY)
def test_product(rng: np.random.Generator, bits: int, group: int, path: str, minima: bool) -> None:
    """Every kernel, for every number of rows, over several tiles: within the bound, and not by luck."""
    k, m = 3 * KT, 64
    known = make_layer(rng, k, NT, Scheme(bits, group, minima))
    x = activations(rng, m, k)
    results = [run(kernel(bits, group, path, rows, minima), x, tiles(known.layer)) for rows in ROWS]
    worst = check(results[0], x, Weights.of(known.layer), path)
    assert worst > 1e-3  # a bound that nothing comes near holds nothing
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize(("bits", "group", "path", "minima"), EVERY)
def test_product_of_exact_operands(rng: np.random.Generator, bits: int, group: int, path: str, minima: bool) -> None:
    """Activations that lose nothing as operands (integers, the largest of every 8 from 64 to 127) leave only the fp32
    additions and the fold: some 2^-12 of what rounded activations hide, a bit of a scale, say."""
    k, m = 3 * KT, 16
    x = rng.integers(-127, 128, (m, k // 8, 8))
    x[..., 0] = rng.integers(64, 128, (m, k // 8))
    x = x.reshape(m, k).astype(BF16)
    weights = Weights.of((known := make_layer(rng, k, NT, Scheme(bits, group, minima))).layer)
    y = run(kernel(bits, group, path, 16, minima), x, tiles(known.layer))
    x64 = x.astype(np.float64)
    error = np.abs(y - x64 @ held_weights(weights, path))
    assert (error <= addition_bound(x64, weights, path)).all()


@pytest.mark.parametrize(("bits", "group", "path", "minima"), EVERY)
def test_product_against_the_reference(
    rng: np.random.Generator, bits: int, group: int, path: str, minima: bool
) -> None:
    """The design's reference: bfloat16 weights, float64 sums. Operands of 7 bits beside the sign are as far from it, on
    average, as 8 values that share an exponent let them be: half a unit is 2^-7 of the largest of them."""
    known = make_layer(rng, 8 * KT, NT, Scheme(bits, group, minima))
    x = activations(rng, 16, 8 * KT)
    y = run(kernel(bits, group, path, 16, minima), x, tiles(known.layer), "bf16").astype(np.float64)
    x64 = x.astype(np.float64)
    error = np.abs(y - x64 @ known.weights) / (np.abs(x64) @ np.abs(known.weights))
    assert error.max() < 2.0**-7
    assert error.mean() < 2.0**-10


@pytest.mark.parametrize("path", ["emulated", "bfp16"])
def test_unquantized_product(rng: np.random.Generator, path: str) -> None:
    k = 3 * KT
    w = (rng.normal(0, 0.02, (k, NT))).astype(BF16)
    x = activations(rng, 64, k)
    results = [run(kernel(16, 0, path, rows), x, unquantized_tiles(w)) for rows in ROWS]
    check(results[0], x, w.astype(np.float64), path)
    for other in results[1:]:
        np.testing.assert_array_equal(results[0], other)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scheme", [Scheme(4, 0), Scheme(4, 192), Scheme(8, 0)], ids=str)
def test_schemes_that_share_a_kernel(rng: np.random.Generator, scheme: Scheme, path: str) -> None:
    """Per-channel scales and groups that are no tile's: rows of scales repeat; K ends in a tile, N in a block."""
    k, n = 3 * 192 + 64, 61
    known = make_layer(rng, k, n, scheme)
    x = activations(rng, 16, k)
    y = run(kernel(scheme.bits, known.layer.layout.tile_group, path, 16), x, tiles(known.layer))
    check(y[:, :n], x, Weights.of(known.layer), path)
    assert (y[:, n:] == 0).all()  # padding is exactly nothing


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_layers(rng: np.random.Generator, bits: int, path: str) -> None:
    """Zero points at the midpoint, where the 8-bit mantissa path leaves out the sums of activations."""
    k = 2 * KT
    zeros = np.full((2, NT), 1 << (bits - 1), np.uint8)
    known = make_layer(rng, k, NT, Scheme(bits, 128), zeros=zeros)
    x = activations(rng, 64, k)
    y = run(kernel(bits, 128, path), x, tiles(known.layer))
    check(y, x, Weights.of(known.layer), path)


@pytest.mark.parametrize(("bits", "path"), list(product((4, 8), PATHS)))
def test_longest_sums(rng: np.random.Generator, bits: int, path: str) -> None:
    """256 tiles: the bound holds, and errors add up as independent ones do, not as a drift does."""
    k = 32768
    known = make_layer(rng, k, NT, Scheme(bits, 128))
    x = activations(rng, 16, k)
    y = run(kernel(bits, 128, path, 16), x, tiles(known.layer)).astype(np.float64)
    weights = Weights.of(known.layer)
    check(y, x, weights, path)
    x64, exact = x.astype(np.float64), weights.exact()
    error = y - x64 @ exact
    # Rounding errors of every operand, each uniform over its unit (variance unit^2 / 12): their standard deviation.
    d_a = operand_errors(x64.reshape(16, -1, 8)).reshape(16, -1)
    variance = (d_a**2 / 3) @ exact**2
    if path != "mantissa":
        d_w = operand_errors(exact.T.reshape(NT, -1, 8)).reshape(NT, -1).T
        variance += x64**2 @ (d_w**2 / 3)
    if path == "emulated":
        variance += x64**2 @ ((exact * 2.0**-8) ** 2 / 3)
    normalised = error / np.sqrt(variance)
    assert np.sqrt((normalised**2).mean()) < 1.15
    assert abs(normalised.mean()) < 5 / np.sqrt(normalised.size)  # no bias: 1024 results, 5 standard deviations


def test_stores(rng: np.random.Generator) -> None:
    """The epilogue narrows once, to nearest even, whatever the sums; fp32 is copied."""
    k = kernel(4, 128, "bfp16", 16)
    acc = k.arguments[3].copy_of(rng.normal(0, 1, k.arguments[3].shape))
    acc.view(np.uint32).reshape(-1)[:4] = (0x3F808000, 0x3F818000, 0x3F808001, 0xBF808000)  # ties, and one above
    narrow = k.entry_points["store_bf16"].arguments[1].empty()
    wide = k.entry_points["store_f32"].arguments[1].empty()
    k.entry_points["store_bf16"](acc, narrow)
    k.entry_points["store_f32"](acc, wide)
    np.testing.assert_array_equal(narrow.view(np.uint16), acc.astype(BF16).view(np.uint16))
    np.testing.assert_array_equal(wide, acc)
    k.entry_points["zero"](acc)
    assert not acc.any()


# --- what prepare() leaves, bit for bit ------------------------------------------------------------------------------


def prepared(k: HostKernel, tile: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The scratch of one tile."""
    w = k.arguments[1].copy_of(tile)
    scratch = k.arguments[2].empty()
    scratch[...] = 0
    k.entry_points["prepare"](w, scratch)
    return scratch


def check_prepared(known: Known, bits: int, group: int, path: str, minima: bool) -> None:
    """Asserts the scratch of a one-tile layer."""
    scratch = prepared(kernel(bits, group, path, 64, minima), next(tiles(known.layer)))
    parts = Weights.of(known.layer)
    if path == "emulated":
        want = emulated_scratch(known.layer.dequantize()).astype(np.float32)
        np.testing.assert_array_equal(scratch.view(BF16).astype(np.float32), want)  # -0 is as good as 0
    elif path == "bfp16":
        np.testing.assert_array_equal(scratch, bfp16_scratch(parts.exact()))
    else:
        check_mantissa_scratch(scratch, parts, bits, group)


def check_mantissa_scratch(scratch: npt.NDArray[np.uint8], parts: Weights, bits: int, group: int) -> None:
    """Mantissas, scale matrices, zero points and the mark, where gemm_mantissa.h says they are."""
    assert parts.z is not None
    z = parts.z if bits == 4 else np.full_like(parts.z, 128)
    mantissas = blocks(parts.q - z).reshape(2, 2, 16, 2, 64)[:, 0].astype(np.int8)
    np.testing.assert_array_equal(scratch[:4096].view(np.int8), mantissas.reshape(-1))

    groups = KT // group
    matrices = scratch[4096 : 4096 + 1152 * groups].reshape(groups, 8, 2, 8, 9)
    exponents, digits = matrices[..., 0].astype(int), matrices[..., 1:].view(np.int8).astype(np.float64)
    value = (digits * np.ldexp(1.0, exponents - 133)[..., None]).sum(axis=2)
    scales = parts.s[::group].reshape(groups, 8, 8)
    np.testing.assert_array_equal(value, scales[..., None] * np.eye(8))

    rest = scratch[4096 + 1152 * groups :].view(np.int8)
    zeros = parts.z[::group]
    if bits == 4:
        others = zeros.reshape(groups, 2, 2, 2, 8)[:, :, 1]
        np.testing.assert_array_equal(rest, np.repeat(others.astype(np.int8), 8, axis=-1).reshape(-1))
    else:
        operand = np.zeros((groups, NT, 8), np.int8)
        operand[..., 0] = zeros - 128
        np.testing.assert_array_equal(rest[: groups * 512], operand.reshape(-1))
        assert rest[groups * 512] == (zeros != 128).any()


@pytest.mark.parametrize(("bits", "group", "path", "minima"), EVERY)
def test_prepare(rng: np.random.Generator, bits: int, group: int, path: str, minima: bool) -> None:
    check_prepared(make_layer(rng, KT, NT, Scheme(bits, group, minima)), bits, group, path, minima)


@pytest.mark.parametrize("path", ["emulated", "bfp16"])
def test_prepare_unquantized(rng: np.random.Generator, path: str) -> None:
    w = (rng.normal(0, 0.02, (KT, NT)) * np.exp(rng.normal(0, 2, (KT, NT)))).astype(BF16)
    scratch = prepared(kernel(16, 0, path), next(unquantized_tiles(w)))
    if path == "emulated":
        np.testing.assert_array_equal(scratch.view(np.uint16), emulated_scratch(w).view(np.uint16))
    else:
        np.testing.assert_array_equal(scratch, bfp16_scratch(w.astype(np.float64)))


# --- extremes --------------------------------------------------------------------------------------------------------

EXPONENTS = st.sampled_from([0, 1, 2, 60, 100, 120, 127, 140, 200, 230])


@st.composite
def layers(draw: st.DrawFn) -> tuple[int, int, Known]:
    """Bits, group and a layer of one tile: codes random, all equal or all equal to the zero point; zero points random
    or at either end; scales of any sign and bfloat16 exponent, from denormal up, alike or far apart."""
    bits, group = draw(st.sampled_from([4, 8])), draw(st.sampled_from([32, 64, 128]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = (1 << bits) - 1
    shape = (KT // group, NT)
    zeros = {
        "random": rng.integers(0, top + 1, shape),
        "lowest": np.zeros(shape),
        "highest": np.full(shape, top),
    }[draw(st.sampled_from(["random", "lowest", "highest"]))].astype(np.uint8)
    codes = {
        "random": rng.integers(0, top + 1, (KT, NT)),
        "equal": np.full((KT, NT), rng.integers(0, top + 1)),
        "zero": np.repeat(zeros, group, axis=0),
        "ends": rng.integers(0, 2, (KT, NT)) * top,
    }[draw(st.sampled_from(["random", "equal", "zero", "ends"]))].astype(np.uint8)
    low, high = sorted([draw(EXPONENTS), draw(EXPONENTS)])
    scale_bits = rng.integers(low, high + 1, shape) << 7 | rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15
    scales = scale_bits.astype(np.uint16).view(BF16)
    return bits, group, make_layer(rng, KT, NT, Scheme(bits, group), codes=codes, zeros=zeros, scales=scales)


@given(layers(), st.sampled_from(PATHS), st.sampled_from([1, 20, 100, 127]), st.integers(0, 2**32))
@settings(max_examples=150)
def test_extremes(drawn: tuple[int, int, Known], path: str, exponent: int, seed: int) -> None:
    """The bound for anything that a tile can hold whose products fp32 can."""
    bits, group, known = drawn
    rng = np.random.default_rng(seed)
    shape = (16, KT)
    x_bits = rng.integers(max(exponent - 8, 0), exponent, shape) << 7 | rng.integers(0, 128, shape)
    x = (x_bits | rng.integers(0, 2, shape) << 15).astype(np.uint16).view(BF16)
    y = run(kernel(bits, group, path, 16), x, tiles(known.layer))
    weights = Weights.of(known.layer)
    check(y, x, weights, path)
    # Codes equal to their zero points are exactly nothing where the difference is taken before anything is rounded: the
    # 8-bit mantissa path takes it of sums, and the others of products with a scale that has to have all its bits.
    if bits == 4 or (path != "mantissa" and (np.abs(weights.s) >= LEAST_EXACT_SCALE).all()):
        assert not y[:, (weights.q == weights.z).all(axis=0)].any()


@given(layers(), st.sampled_from(PATHS))
@settings(max_examples=150)
def test_prepare_extremes(drawn: tuple[int, int, Known], path: str) -> None:
    """Bit for bit wherever the scales are not so small that their last bit is a denormal's."""
    bits, group, known = drawn
    if (np.abs(Weights.of(known.layer).s) >= LEAST_EXACT_SCALE).all():
        check_prepared(known, bits, group, path, False)


@given(st.integers(0, 2**32), st.sampled_from([1, 4, 60, 120, 250]), st.integers(1, 30))
def test_operand_model(seed: int, exponent: int, spread: int) -> None:
    """The model of the conversion, against its definition in exact arithmetic: the unit is that of the largest value,
    or the next one where that would not hold it, and nothing is further from its operand than half a unit."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(max(exponent - spread, 0), exponent + 1, (64, 8)) << 23 | rng.integers(0, 1 << 23, (64, 8))
    x = (bits | rng.integers(0, 2, (64, 8)) << 31).astype(np.uint32).view(np.float32).astype(np.float64)
    data = operand_bytes(x.reshape(8, 8, 8)).reshape(64, 9)
    unit = np.ldexp(1.0, data[:, 0].astype(int) - 133)[:, None]
    mantissas = data[:, 1:].view(np.int8).astype(np.float64)
    normal = np.where(np.abs(x) < 2.0**-126, 0, x)
    assert (np.abs(mantissas * unit - normal) <= unit / 2).all()
    largest = np.abs(normal).max(axis=1)
    assert (np.where(largest > 0, largest < 128 * unit[:, 0], True)).all()
    assert (np.where(largest > 0, largest >= 63.5 * unit[:, 0], True)).all()


# --- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_the_callers_mode_does_not_matter(rng: np.random.Generator, path: str) -> None:
    known = make_layer(rng, 2 * KT, NT, Scheme(4, 64))
    x = activations(rng, 16, 2 * KT)
    results = []
    for mode in RoundingMode:
        with kernels.rounding_mode(mode):
            results.append(run(kernel(4, 64, path, 16), x, tiles(known.layer), "bf16"))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint16), other.view(np.uint16))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("path", PATHS)
def test_floor_is_worse(rng: np.random.Generator, bits: int, path: str) -> None:
    """In the mode that a core powers up with, the errors of operands have one sign, and add up."""
    k = 16 * KT
    known = make_layer(rng, k, NT, Scheme(bits, 128))
    x = np.abs(activations(rng, 16, k))
    exact = x.astype(np.float64) @ Weights.of(known.layer).exact()
    mass = x.astype(np.float64) @ np.abs(Weights.of(known.layer).exact())

    def errors() -> npt.NDArray[np.float64]:
        y = run(kernel(bits, 128, path, 16), x, tiles(known.layer))
        return (y.astype(np.float64) - exact) / mass

    nearest = errors()
    with kernels.rounding_mode(RoundingMode.FLOOR, held=True):
        floor = errors()
    assert np.abs(floor).mean() > 3 * np.abs(nearest).mean()


# --- the issue slots -------------------------------------------------------------------------------------------------


def counted(k: HostKernel, tile: npt.NDArray[np.uint8], a: npt.NDArray[Any]) -> dict[tuple[str, str], kernels.Slots]:
    """Slots of a tile by entry point and region."""
    x, w, scratch, acc = (argument.empty() for argument in k.arguments)
    x[...], w[...], acc[...] = to_blocks(a), tile, 0
    regions = {("prepare", r): s for r, s in k.entry_points["prepare"].count(w, scratch).items()}
    return regions | {("multiply", r): s for r, s in k.entry_points[""].count(x, w, scratch, acc).items()}


def tile_cycles(regions: dict[tuple[str, str], kernels.Slots]) -> int:
    """Cycles, modelled, of a tile and one band."""
    return sum(slots.cycles for slots in regions.values())


def table(path: Path) -> tuple[dict[tuple[str, str, str], list[int]], dict[str, list[int]]]:
    """What a source says: by path, entry point and region, entries, slots and cycles; by path, the cycles of a tile."""
    regions, totals = {}, {}
    for line in path.read_text().splitlines():
        if found := re.fullmatch(r"//   (\w+) +(prepare|multiply) +(\w+|-)((?: +\d+){7})", line):
            name, entry, region, numbers = found.groups()
            regions[name, entry, "" if region == "-" else region] = [int(n) for n in numbers.split()]
        elif (found := re.fullmatch(r"//   (\w+)((?: +\d+){1,3})", line)) and found[1] != "groups":
            totals[found[1]] = [int(n) for n in found[2].split()]
    return regions, totals


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_documented_slots(rng: np.random.Generator, repository: Path, bits: int) -> None:
    """The tables in the sources are what the host counts."""
    counts: dict[tuple[str, str, str], list[int]] = {}
    totals: dict[str, list[int]] = {}
    for path in PATHS[: 2 if bits == 16 else 3]:
        for group in (0,) if bits == 16 else (32, 64, 128):
            if bits == 16:
                tile = next(unquantized_tiles(rng.normal(0, 1, (KT, NT)).astype(BF16)))
            else:
                tile = next(tiles(make_layer(rng, KT, NT, Scheme(bits, group)).layer))
            regions = counted(kernel(bits, group, path), tile, activations(rng, 64, KT))
            totals.setdefault(path, []).append(tile_cycles(regions))
            if group in (0, 128):
                for (entry, region), s in regions.items():
                    counts[path, entry, region] = [s.entries, s.load, s.ldb, s.st, s.mv, s.vec, s.cycles]
    assert table(repository / "kernels" / "aie" / TABLES[bits]) == (counts, totals)
    page = (repository / "docs" / "kernels.md").read_text()
    for path, numbers in re.findall(rf"\| W{bits} `(\w+)` \| (\d+ \| \d+ \| \**\d+)", page):
        assert [int(n) for n in re.findall(r"\d+", numbers)] == totals[path]


def test_target(rng: np.random.Generator) -> None:
    """300 products a cycle, modelled, with all of prepare(): 4-bit weights, and 8-bit symmetric ones, group 128."""
    x = activations(rng, 64, KT)
    w4 = make_layer(rng, KT, NT, Scheme(4, 128))
    assert tile_cycles(counted(kernel(4, 128, "mantissa"), next(tiles(w4.layer)), x)) <= TARGET
    w8 = make_layer(rng, KT, NT, Scheme(8, 128), zeros=np.full((1, NT), 128, np.uint8))
    assert tile_cycles(counted(kernel(8, 128, "mantissa"), next(tiles(w8.layer)), x)) <= TARGET


@pytest.mark.parametrize(("bits", "group", "path"), WITH_ZEROS)
def test_scratch_fits(bits: int, group: int, path: str) -> None:
    """The bands that leave room in the 64 KiB of a core: two of activations, two of weights, sums, results, stack."""
    tile = tf.layout.Layout(KT, NT, bits, group).tile_bytes
    fits = [
        m
        for m in ROWS
        if 2 * m * KT * 2 + 2 * tile + kernel(bits, group, path, m).scratch_bytes + 64 * NT * 4 + 2048 + 192 + 3328
        <= 65536
    ]
    only_16 = bits == 8 and (path == "emulated" or (path == "mantissa" and group == 32))
    assert fits == ([16] if only_16 else [16, 32])
