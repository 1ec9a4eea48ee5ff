"""The GEMV kernels' host build: against float64 within the bound of docs/kernels.md, and bit for bit against NumPy.

Reference: the exact sum of x (q - z) s, or x (q s + m), in float64, with x, s and m as the bfloat16 that the kernel is
given (53 bits: its own error is below 2^-40 of the bound).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilefuse as tf
from tilefuse.emulator import kernels
from tilefuse.emulator.kernels import RoundingMode
from tilefuse.errors import ShapeError
from tilefuse.layout import KT, NT, ROWS

BF16 = ml_dtypes.bfloat16
F32 = np.float32
F64 = np.float64
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Scheme:
    """What a kernel is built for; group and minima mean nothing at 16 bits."""

    bits: int
    group: int
    minima: bool
    path: str

    @property
    def name(self) -> str:
        weights = f"w{self.bits}g{self.group}{'m' if self.minima else ''}" if self.bits < 16 else "bf16"
        return f"gemv_bf16_{weights}_{self.path}_128x64"

    @property
    def offset(self) -> int:
        """What the path takes off every code before it multiplies."""
        return {("mantissa", 8): 128, ("elementwise", 4): -128}.get((self.path, self.bits), 0)

    def __str__(self) -> str:
        return self.name.removeprefix("gemv_bf16_").removesuffix("_128x64")


QUANTISED = [
    Scheme(bits, group, minima, path)
    for path in ("mantissa", "elementwise")
    for bits in (4, 8)
    for group in (32, 64, 128)
    for minima in (False, True)
]
BASELINE = Scheme(16, KT, False, "elementwise")
MANTISSA = [scheme for scheme in QUANTISED if scheme.path == "mantissa"]
each_scheme = pytest.mark.parametrize("scheme", QUANTISED, ids=str)


@dataclass(frozen=True)
class Weights:
    """A matrix [K, 64] in parts, and its packed tiles [k tiles][bytes]."""

    codes: Array
    scales: Array
    zeros: Array  # uint8 zero points or bfloat16 minima
    tiles: Array


def pack(scheme: Scheme, codes: Array, scales: Array, zeros: Array) -> Weights:
    """Packs through `tf.pack`, so that the kernel reads what the library writes."""
    k = codes.shape[0]
    z, m = (None, zeros) if scheme.minima else (zeros, None)
    layer = tf.QuantizedLinear(
        "layer", "test", k, NT, scheme.bits, scheme.group, codes, tf.CodeOrder.KN, scales, z, m, None, None
    )
    packed = tf.pack(layer, columns=1)
    assert packed.layout.tile_group == scheme.group
    lay = packed.layout
    return Weights(codes, scales, zeros, packed.data.reshape(lay.k_tiles, lay.tile_bytes))


def random_weights(rng: np.random.Generator, scheme: Scheme, k: int) -> Weights:
    top = 1 << scheme.bits
    groups = (k // scheme.group, NT)
    codes = rng.integers(0, top, (k, NT), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.03, groups).astype(BF16)
    zeros = rng.normal(0, 0.1, groups).astype(BF16) if scheme.minima else rng.integers(0, top, groups, dtype=np.uint8)
    return pack(scheme, codes, scales, zeros)


def call(scheme: Scheme, stem: str, *arrays: Array) -> None:
    """Calls an entry point; what it only reads may lie anywhere."""
    entry = kernels.get(scheme.name).entry_points[stem]
    entry(*(a if k.written else k.copy_of(a) for k, a in zip(entry.arguments, arrays, strict=True)))


def empty(scheme: Scheme, name: str) -> Array:
    """An array for the argument ``name``."""
    arguments = (a for entry in kernels.get(scheme.name).entry_points.values() for a in entry.arguments)
    return next(argument for argument in arguments if argument.name == name).empty()


def run(scheme: Scheme, x: Array, tiles: Array) -> Array:
    """fp32 [64]: the reduction as the array does it, k tile t on row t mod 4, the rows' sums added on the way down."""
    column = [empty(scheme, "acc") for _ in range(ROWS)]
    scratch = empty(scheme, "x_scratch")
    for acc in column:
        call(scheme, "zero", acc)
    for t in range(len(x) // KT):
        call(scheme, "prepare", x[t * KT : (t + 1) * KT], scratch)
        call(scheme, "", scratch, tiles[t], column[t % ROWS])
    for row in reversed(range(ROWS - 1)):
        call(scheme, "add", column[row + 1], column[row])
    return column[0]


def exact(scheme: Scheme, x: Array, w: Weights) -> Array:
    """float64 [64]"""
    rows = np.arange(len(x)) // scheme.group
    scales, zeros = w.scales.astype(F64)[rows], w.zeros.astype(F64)[rows]
    matrix = w.codes * scales + zeros if scheme.minima else (w.codes - zeros) * scales
    return x.astype(F64) @ matrix


def bound(scheme: Scheme, x: Array, w: Weights) -> Array:
    """float64 [64]: docs/kernels.md's bound of |acc - exact|."""
    g = scheme.group
    block_max = np.abs(x.astype(F64)).reshape(-1, 8).max(1).repeat(8)
    codes = np.abs(w.codes.astype(F64) - scheme.offset)
    scales = np.abs(w.scales.astype(F64))
    folded = np.full_like(scales, abs(scheme.offset)) if scheme.minima else np.abs(w.zeros.astype(F64) - scheme.offset)
    minima = np.abs(w.zeros.astype(F64)) if scheme.minima else np.zeros_like(scales)

    def mass(weight_of_x: Array) -> Array:
        dots = (weight_of_x[:, None] * codes).reshape(-1, g, NT).sum(1)
        sums = weight_of_x.reshape(-1, g, 1).sum(1)
        return (scales * (dots + folded * sums) + minima * sums).sum(0)

    additions = g // 8 + 20 + 3 * len(scales)
    relative = 2.0**-27 + additions * 2.0**-24
    smallest = mass(np.full(len(x), 2.0**-124)) + additions * 2.0**-149
    return 1.05 * relative * mass(block_max) + smallest


def check(scheme: Scheme, x: Array, w: Weights) -> Array:
    """Holds a run to the bound, and its narrowing to bfloat16 to be one rounding of it; returns the error."""
    acc = run(scheme, x, w.tiles)
    error = np.abs(acc.astype(F64) - exact(scheme, x, w))
    assert (error <= bound(scheme, x, w)).all()
    y = empty(scheme, "y")
    call(scheme, "store_bf16", acc, y)
    np.testing.assert_array_equal(y, acc.astype(BF16))
    return error


@each_scheme
@pytest.mark.parametrize("k", [KT, 5 * KT])
def test_random_layers(rng: np.random.Generator, scheme: Scheme, k: int) -> None:
    w = random_weights(rng, scheme, k)
    x = rng.normal(0, 1, k).astype(BF16)
    error = check(scheme, x, w)
    # What the whole design is gated on: the error over |x| @ |W|, here far below the 2^-8 of the result's own rounding.
    rows = np.arange(k) // scheme.group
    scales, zeros = w.scales.astype(F64)[rows], w.zeros.astype(F64)[rows]
    matrix = w.codes * scales + zeros if scheme.minima else (w.codes - zeros) * scales
    assert (error <= 2.0**-18 * (np.abs(x.astype(F64)) @ np.abs(matrix))).all()


@each_scheme
def test_integers_are_exact(rng: np.random.Generator, scheme: Scheme) -> None:
    """Integers of x, and scales that are powers of two: every sum is below 2^24 units, so nothing may be lost."""
    k = 4 * KT
    x = rng.integers(-31, 32, k).astype(BF16)
    groups = (k // scheme.group, NT)
    codes = rng.integers(0, 1 << scheme.bits, (k, NT), dtype=np.uint8)
    scales = np.full(groups, 0.125, BF16)
    zeros = rng.integers(0, 1 << scheme.bits, groups)
    w = pack(scheme, codes, scales, zeros.astype(BF16) if scheme.minima else zeros.astype(np.uint8))
    np.testing.assert_array_equal(run(scheme, x, w.tiles).astype(F64), exact(scheme, x, w))


@pytest.mark.parametrize("k", [KT, 5 * KT])
def test_unquantised_baseline(rng: np.random.Generator, k: int) -> None:
    """Products of two bfloat16 are exact in fp32; 16 + 3 additions in a tile, one for each tile, 3 down the column."""
    x = rng.normal(0, 1, k).astype(BF16)
    matrix = rng.normal(0, 1, (k, NT)).astype(BF16)
    # [k/8][n/8][8 n][8 k], as code blocks lie in a packed tile
    tiles = matrix.reshape(k // KT, KT // 8, 8, NT // 8, 8).transpose(0, 1, 3, 4, 2)
    acc = run(BASELINE, x, np.ascontiguousarray(tiles).reshape(k // KT, -1).view(np.uint8))
    mass = np.abs(x.astype(F64)) @ np.abs(matrix.astype(F64))
    error = np.abs(acc - x.astype(F64) @ matrix.astype(F64))
    assert (error <= (22 + k // KT) * 2.0**-24 * 1.01 * mass).all()


@pytest.mark.parametrize("scheme", [s for s in QUANTISED if s.group == 128 and not s.minima], ids=str)
def test_longest_reduction(rng: np.random.Generator, scheme: Scheme) -> None:
    """K = 32768: 64 tiles a row."""
    check(scheme, rng.normal(0, 1, 32768).astype(BF16), random_weights(rng, scheme, 32768))


# --- x in pieces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", [*QUANTISED, BASELINE], ids=str)
def test_prepare_of_a_piece_of_x(rng: np.random.Generator, scheme: Scheme) -> None:
    """What `prepare` makes of x[128 i:], for each of the 64 k tiles of a resident x."""
    entry = kernels.get(scheme.name).entry_points["prepare_resident"]
    x = entry.arguments[0].copy_of(rng.normal(0, 1, 64 * KT).astype(BF16))
    assert entry.arguments[1].extent_in(x.nbytes) == 64
    for i in range(64):
        scratch, expected = empty(scheme, "x_scratch"), empty(scheme, "x_scratch")
        call(scheme, "prepare", x[i * KT : (i + 1) * KT], expected)
        entry(x, i, scratch)
        np.testing.assert_array_equal(scratch, expected)


@pytest.mark.parametrize("scheme", [*QUANTISED, BASELINE], ids=str)
def test_keep(rng: np.random.Generator, scheme: Scheme) -> None:
    """4096 bytes from byte 64 of an object of a tile's size go to one quarter of x, and nothing else changes."""
    entry = kernels.get(scheme.name).entry_points["keep"]
    tile_bytes = kernels.get(scheme.name).arguments[1].nbytes
    assert [(a.name, a.shape, a.dtype) for a in entry.arguments] == [
        ("object", (tile_bytes,), np.uint8),
        ("index", (), np.int32),
        ("x_resident", (8192,), BF16),
    ]
    resident = entry.arguments[2].copy_of(rng.normal(0, 1, 8192).astype(BF16))
    expected = resident.view(np.uint16).copy()
    for index in (2, 0, 3, 1):
        item = entry.arguments[0].copy_of(rng.integers(0, 256, tile_bytes))
        expected[2048 * index : 2048 * (index + 1)] = item[64 : 64 + 4096].view(np.uint16)
        entry(item, index, resident)
        np.testing.assert_array_equal(resident.view(np.uint16), expected)


@pytest.mark.parametrize("scheme", [*QUANTISED, BASELINE], ids=str)
def test_keep_row(rng: np.random.Generator, scheme: Scheme) -> None:
    """One k tile of four goes to one of 64, and nothing else changes."""
    entry = kernels.get(scheme.name).entry_points["keep_row"]
    assert [a.shape for a in entry.arguments] == [(512,), (), (), (8192,)]
    resident = entry.arguments[3].copy_of(rng.normal(0, 1, 8192).astype(BF16))
    expected = resident.copy().reshape(64, KT)
    x = entry.arguments[0].copy_of(rng.normal(0, 1, 512).astype(BF16))
    for row, k_tile in ((0, 63), (3, 0), (1, 17)):
        expected[k_tile] = x.reshape(4, KT)[row]
        entry(x, row, k_tile, resident)
        np.testing.assert_array_equal(resident.view(np.uint16), expected.reshape(-1).view(np.uint16))


def test_pieces_beyond_x_are_refused() -> None:
    entries = kernels.get(MANTISSA[0].name).entry_points
    places = (
        ("keep", 1, 4),
        ("prepare_resident", 1, 64),
        ("keep_row", 1, 4),
        ("keep_row", 2, 64),
    )
    for stem, at, extent in places:
        arrays: list[Any] = [0 if a.by_value else a.empty() for a in entries[stem].arguments]
        for index in (-1, extent):
            arrays[at] = index
            with pytest.raises(ShapeError, match=rf"{stem}: \w+ is {index}; .*: pass 0 to {extent - 1}$"):
                entries[stem](*arrays)


# --- properties -------------------------------------------------------------------------------------------------------

X_KINDS = ("normal", "equal", "denormal", "wide", "outlier", "huge", "tiny", "zero")
SMALL_X_KINDS = ("denormal", "tiny", "zero")


def make_x(rng: np.random.Generator, kind: str, k: int) -> Array:
    normal = rng.normal(0, 1, k)
    if kind == "equal":
        return np.full(k, normal[0]).astype(BF16)
    if kind == "denormal":
        return (rng.integers(-127, 128, k) * 2.0**-133).astype(BF16)
    if kind == "wide":
        return (normal * 2.0 ** rng.integers(-60, 8, k)).astype(BF16)
    if kind == "outlier":
        normal[rng.integers(k)] *= 2.0**20
    return (normal * {"huge": 2.0**90, "tiny": 2.0**-110, "zero": 0.0}.get(kind, 1.0)).astype(BF16)


@given(data=st.data())
def test_any_layer_is_within_the_bound(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from(QUANTISED))
    k = KT * data.draw(st.integers(1, 6), label="k tiles")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    top = (1 << scheme.bits) - 1
    groups = (k // scheme.group, NT)
    fill = {"random": None, "zero": 0, "max": top}
    code = fill[data.draw(st.sampled_from(sorted(fill)), label="codes")]
    zero = fill[data.draw(st.sampled_from(sorted(fill)), label="zeros")]
    codes = rng.integers(0, top + 1, (k, NT), dtype=np.uint8) if code is None else np.full((k, NT), code, np.uint8)
    # Scales from the smallest denormal to the largest of bfloat16, as far as the sum of 768 x 255 x |x| stays finite.
    x_kind = data.draw(st.sampled_from(X_KINDS), label="x")
    ranges = [(-133, -120), (-12, -3), (8, 12), (-133, 12)] + [(120, 127.99)] * (x_kind in SMALL_X_KINDS)
    lowest, highest = data.draw(st.sampled_from(ranges), label="scales")
    scales = (rng.choice([-1, 1], groups) * 2.0 ** rng.uniform(lowest, highest, groups)).astype(BF16)
    scales[0, 0] = BF16(2.0**highest)
    if scheme.minima:
        zeros = np.zeros(groups, BF16) if zero == 0 else (rng.uniform(-1, 1, groups) * scales.astype(F32)).astype(BF16)
    else:
        zeros = rng.integers(0, top + 1, groups, dtype=np.uint8) if zero is None else np.full(groups, zero, np.uint8)
    check(scheme, make_x(rng, x_kind, k), pack(scheme, codes, scales, zeros))


@pytest.mark.parametrize("mode", list(RoundingMode))
@pytest.mark.parametrize("scheme", [MANTISSA[0], QUANTISED[-1]], ids=str)
def test_result_does_not_depend_on_the_callers_rounding(
    rng: np.random.Generator, scheme: Scheme, mode: RoundingMode
) -> None:
    w, x = random_weights(rng, scheme, KT), rng.normal(0, 1, KT).astype(BF16)
    expected = run(scheme, x, w.tiles)
    scratch, acc, y = empty(scheme, "x_scratch"), empty(scheme, "acc"), empty(scheme, "y")
    steps = (("zero", acc), ("prepare", x, scratch), ("", scratch, w.tiles[0], acc), ("store_bf16", acc, y))
    for stem, *arrays in steps:
        with kernels.rounding_mode(mode):
            call(scheme, stem, *arrays)
    np.testing.assert_array_equal(acc, expected)
    np.testing.assert_array_equal(y, expected.astype(BF16))


# --- bit for bit ------------------------------------------------------------------------------------------------------


def to_bfp16(x: Array) -> tuple[Array, Array]:
    """fp32 [..., 8] -> mantissas int [..., 8] and exponents [..., 1], value = mantissa 2^(exponent - 6)."""
    x = np.where(np.abs(x) < 2.0**-126, 0, x).astype(F64)
    largest = np.abs(x).max(-1, keepdims=True)
    exponents = np.where(largest > 0, np.frexp(np.where(largest > 0, largest, 1))[1] - 1, -127)
    mantissas = np.rint(x * 2.0 ** (6 - exponents))  # to nearest even
    outside = ((mantissas > 127) | (mantissas < -128)).any(-1, keepdims=True)
    exponents = exponents + outside
    return np.rint(x * 2.0 ** (6 - exponents)).astype(np.int64), exponents


def split_rows(x: Array) -> tuple[Array, Array]:
    """bfloat16 [128] -> mantissas [16 k blocks, 4 rows, 8], exponents [16, 4, 1]."""
    rest = x.astype(F32).reshape(16, 8)
    mantissas, exponents = [], []
    for _ in range(4):
        m, e = to_bfp16(rest)
        mantissas.append(m)
        exponents.append(e)
        rest = (rest - m * 2.0 ** (e - 6)).astype(F32)
        np.testing.assert_array_equal(rest, rest.astype(BF16).astype(F32))  # what is left over is exact in bfloat16
    return np.stack(mantissas, 1), np.stack(exponents, 1)


def fold(rows: Array) -> Array:
    """fp32 [..., 4, N] -> [..., N], in the kernel's order."""
    return (rows[..., 0, :] + rows[..., 2, :]) + (rows[..., 1, :] + rows[..., 3, :])


def digits(value: Array) -> list[Array]:
    """fp32 -> three bfloat16 (as fp32) that sum to it, largest first."""
    high = value.astype(BF16).astype(F32)
    middle = (value - high).astype(BF16).astype(F32)
    low = (value - high - middle).astype(BF16).astype(F32)
    return [high, middle, low]


def model(scheme: Scheme, x: Array, w: Weights) -> Array:
    """One tile on the mantissa path, operation by operation in fp32, from acc = 0."""
    mantissas, exponents = split_rows(x)
    units = 2.0 ** (exponents - 6.0)
    codes = (w.codes.astype(np.int64) - scheme.offset).reshape(16, 8, NT)
    dots = (np.einsum("brk,bkn->brn", mantissas, codes) * units).astype(F32)  # exact integers, then exact scaling
    ones = (mantissas.sum(-1, keepdims=True) * units).astype(F32)
    acc = np.zeros(NT, F32)
    quarters = []
    for quarter in range(4):
        total = np.zeros((4, 1), F32)
        for block in range(4 * quarter, 4 * quarter + 4):
            total = total + ones[block]
        quarters.append(total)
    pairs = [quarters[0] + quarters[1], quarters[2] + quarters[3]]
    sums = {32: quarters, 64: pairs, 128: [pairs[0] + pairs[1]]}[scheme.group]
    for group in range(KT // scheme.group):
        rows = np.zeros((4, NT), F32)
        for block in range(group * scheme.group // 8, (group + 1) * scheme.group // 8):
            rows = rows + dots[block]
        dot, x_digits = fold(rows), digits(fold(sums[group]))
        zeros, scale = w.zeros[group].astype(F32), w.scales[group].astype(F32)
        if scheme.minima:
            for d in x_digits if scheme.offset else []:
                dot = dot + F32(scheme.offset) * d
            for d in x_digits:
                acc = acc + zeros * d
        else:
            for d in x_digits:
                dot = dot - (zeros - scheme.offset) * d
        for d in digits(dot):
            acc = acc + scale * d
    return acc


@pytest.mark.parametrize("scheme", MANTISSA, ids=str)
@pytest.mark.parametrize("kind", ["normal", "wide", "outlier", "equal"])
def test_mantissa_path_bit_for_bit(rng: np.random.Generator, scheme: Scheme, kind: str) -> None:
    w, x = random_weights(rng, scheme, KT), make_x(rng, kind, KT)
    np.testing.assert_array_equal(run(scheme, x, w.tiles), model(scheme, x, w))


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["normal", "wide", "outlier", "equal", "zero"]))
def test_operands_bit_for_bit(seed: int, kind: str) -> None:
    """The rows that `prepare` writes: 16 times 8 x [exponent][8 mantissas], rows 4 to 7 repeating 0 to 3."""
    x = make_x(np.random.default_rng(seed), kind, KT)
    scratch = empty(MANTISSA[0], "x_scratch")
    call(MANTISSA[0], "prepare", x, scratch)
    written = scratch[: 16 * 72].reshape(16, 8, 9)
    mantissas, exponents = split_rows(x)
    used = (mantissas != 0).any(-1)
    np.testing.assert_array_equal(written[:, :4, 1:].view(np.int8), mantissas)
    np.testing.assert_array_equal(written[:, :4, 0][used], (exponents[..., 0] + 127)[used])
    np.testing.assert_array_equal(written[:, 4:], written[:, :4])
