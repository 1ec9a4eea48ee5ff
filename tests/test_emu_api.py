"""The host aie_api, bit for bit against models written here from the documented definitions, with exact fractions.

`tilefuse._emu.operations` gives each operation on arrays of bits (uint16 for bfloat16).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import floor

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from tilefuse import Layout, ZeroKind, _emu
from tilefuse.emulator.kernels import RoundingMode, rounding_mode

ops = _emu.operations
Array = npt.NDArray[np.generic]


@pytest.fixture(autouse=True)
def core() -> Iterator[None]:
    """Every test starts in the mode of a core that has just powered up."""
    with rounding_mode(RoundingMode.FLOOR):
        yield


def round_half(x: Fraction, mode: RoundingMode) -> int:
    """The definition of each mode, one line each."""
    low = floor(x)
    rest = x - low
    if rest == 0:
        return low
    toward_zero = low if x > 0 else low + 1
    away = low + 1 if x > 0 else low
    even = low if low % 2 == 0 else low + 1
    directed = {
        RoundingMode.FLOOR: low,
        RoundingMode.CEIL: low + 1,
        RoundingMode.SYMMETRIC_FLOOR: toward_zero,
        RoundingMode.SYMMETRIC_CEIL: away,
    }
    if mode in directed:
        return directed[mode]
    if rest != Fraction(1, 2):
        return low if rest < Fraction(1, 2) else low + 1
    return {
        RoundingMode.NEGATIVE_INF: low,
        RoundingMode.POSITIVE_INF: low + 1,
        RoundingMode.SYMMETRIC_ZERO: toward_zero,
        RoundingMode.SYMMETRIC_INF: away,
        RoundingMode.CONV_EVEN: even,
        RoundingMode.CONV_ODD: 2 * low + 1 - even,
    }[mode]


def test_round_half_against_python_and_by_hand() -> None:
    """The model itself, at 2.5, -2.5, 1.5 and 2.25: expected values worked out by hand from the modes' names."""
    halves = [Fraction(5, 2), Fraction(-5, 2), Fraction(3, 2), Fraction(9, 4)]
    by_hand = {
        "FLOOR": [2, -3, 1, 2],
        "CEIL": [3, -2, 2, 3],
        "SYMMETRIC_FLOOR": [2, -2, 1, 2],
        "SYMMETRIC_CEIL": [3, -3, 2, 3],
        "NEGATIVE_INF": [2, -3, 1, 2],
        "POSITIVE_INF": [3, -2, 2, 2],
        "SYMMETRIC_ZERO": [2, -2, 1, 2],
        "SYMMETRIC_INF": [3, -3, 2, 2],
        "CONV_EVEN": [2, -2, 2, 2],
        "CONV_ODD": [3, -3, 1, 2],
    }
    assert {mode.name: [round_half(x, mode) for x in halves] for mode in RoundingMode} == by_hand
    assert all(round_half(x, RoundingMode.CONV_EVEN) == round(x) for x in halves)


# --- unpack -----------------------------------------------------------------------------------------------------------


def test_unpack_nibbles_every_byte_in_every_place() -> None:
    packed = np.concatenate([np.roll(np.arange(256, dtype=np.uint8), shift) for shift in range(32)])
    nibbles = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)  # the low nibble is the first element
    np.testing.assert_array_equal(ops.unpack_uint4(packed), nibbles)
    signed = np.where(nibbles > 7, nibbles.astype(np.int64) - 16, nibbles)
    np.testing.assert_array_equal(ops.unpack_int4(packed), signed)


def test_unpack_bytes_every_value() -> None:
    unsigned = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(ops.unpack_uint8(unsigned), np.arange(256))
    np.testing.assert_array_equal(ops.unpack_int8(unsigned.view(np.int8)), unsigned.view(np.int8).astype(np.int64))


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def test_bf16_to_fp32_every_value() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    np.testing.assert_array_equal(ops.to_float32_bf16(bits).view(np.uint32), bits.astype(np.uint32) << 16)


@pytest.mark.parametrize("mode", RoundingMode)
def test_fp32_to_bf16_every_upper_half(mode: RoundingMode) -> None:
    """Every bfloat16 (Inf and NaN aside) with remainders at, around and between nothing, a half and a whole unit."""
    upper = np.arange(1 << 16, dtype=np.uint32)
    upper = upper[(upper & 0x7F80) != 0x7F80]
    remainders = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (upper[:, None] << 16 | remainders).reshape(-1)
    # A unit of bfloat16 within a binade is a unit of the upper half, so the magnitude rounds as an integer and a carry
    # goes into the next binade, or to Inf.
    sign = np.where(bits >> 31, -1, 1)
    magnitude = (bits & 0x7FFFFFFF).astype(np.int64)
    cases = {
        (s, r, o): round_half(s * Fraction(2 * 65536 * 8 + o * 65536 + r, 65536), mode)
        for s in (-1, 1)
        for o in (0, 1)
        for r in remainders.tolist()
    }
    table = np.zeros((2, 2, 65536), np.int64)
    for (s, r, o), rounded in cases.items():
        table[(s + 1) // 2, o, r] = abs(rounded) - (16 + o)  # 0 or 1: whether the magnitude goes up
    up = table[(sign + 1) // 2, magnitude >> 16 & 1, magnitude & 0xFFFF]
    expected = ((magnitude >> 16) + up) | np.where(sign < 0, 0x8000, 0)
    with rounding_mode(mode):
        got = ops.to_bf16_float32(np.resize(bits, -(-bits.size // 64) * 64).view(np.float32))
    np.testing.assert_array_equal(got[: bits.size], expected)


@pytest.mark.parametrize("mode", RoundingMode)
def test_fp32_to_bf16_keeps_inf_and_nan(mode: RoundingMode) -> None:
    x = np.zeros(64, np.float32)
    x[:4] = np.array([0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000], np.uint32).view(np.float32)
    with rounding_mode(mode):
        got = ops.to_bf16_float32(x)
    assert got[:2].tolist() == [0x7F80, 0xFF80]
    assert np.isnan(got[2:4].view(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_fp32_to_bf16_nearest_even_is_ml_dtypes(rng: np.random.Generator) -> None:
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    x = bits[(bits & 0x7F800000) != 0x7F800000].view(np.float32)
    x = x[: x.size // 64 * 64]
    with rounding_mode(RoundingMode.CONV_EVEN):
        np.testing.assert_array_equal(ops.to_bf16_float32(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("mode", RoundingMode)
@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "uint16"])
def test_integers_to_bf16_every_value(name: str, mode: RoundingMode) -> None:
    dtype = np.dtype(name)
    x = np.arange(1 << (8 * dtype.itemsize), dtype=np.int64).astype(dtype)
    expected = np.zeros(x.size, np.float64)
    for i, value in enumerate(x.tolist()):
        spare = max(abs(value).bit_length() - 8, 0)  # bits that bfloat16's 8 can't hold
        expected[i] = round_half(Fraction(value, 1 << spare), mode) * (1 << spare)
    with rounding_mode(mode):
        got = getattr(ops, f"to_bf16_{name}")(x)
    np.testing.assert_array_equal(got.view(ml_dtypes.bfloat16).astype(np.float64), expected)


@pytest.mark.parametrize("name", ["int4", "uint4"])
def test_nibbles_to_bf16(name: str) -> None:
    packed = np.arange(256, dtype=np.uint8)
    codes = getattr(ops, f"unpack_{name}")(packed).astype(np.float32)
    np.testing.assert_array_equal(getattr(ops, f"to_bf16_{name}")(packed).view(ml_dtypes.bfloat16), codes)


# --- bfp16 ------------------------------------------------------------------------------------------------------------


def bfp16_block(x: npt.NDArray[np.float32], mode: RoundingMode) -> tuple[int, list[int]]:
    """8 values -> exponent and mantissas: value = mantissa 2^(exponent - 127) / 64."""
    exponents = (x.view(np.uint32) >> 23 & 0xFF).tolist()
    values = [Fraction(0) if e == 0 else Fraction(float(v)) for v, e in zip(x, exponents, strict=True)]
    shared = max(exponents)
    while True:
        mantissas = [round_half(v * Fraction(2) ** (133 - shared), mode) for v in values]
        if all(-128 <= m <= 127 for m in mantissas):
            return shared, mantissas
        shared += 1


def bfp16_bytes(x: npt.NDArray[np.float32], mode: RoundingMode) -> list[int]:
    blocks = (bfp16_block(x[i : i + 8], mode) for i in range(0, x.size, 8))
    return [byte for shared, mantissas in blocks for byte in (shared, *(m & 0xFF for m in mantissas))]


def finite(bits: npt.NDArray[np.uint32], ceiling: int = 0x7F000000) -> npt.NDArray[np.float32]:
    """fp32 of those bits, those from 2^127 on made smaller (Inf, NaN, and what would round up to them)."""
    return np.where((bits & 0x7F800000) >= ceiling, bits & 0xBFFFFFFF, bits).astype(np.uint32).view(np.float32)


def test_bfp16_by_hand() -> None:
    """A block worked out on paper: largest 3.0 = 1.5 * 2^1, exponent 128, unit 2^(128 - 127 - 6) = 1/32."""
    x = np.zeros(64, np.float32)
    x[:8] = [3.0, 1.0, -1.0, 1 / 32, 1 / 64, -1 / 64, 0.0, 3 / 64]
    by_hand = {
        RoundingMode.FLOOR: [96, 32, -32, 1, 0, -1, 0, 1],
        RoundingMode.CONV_EVEN: [96, 32, -32, 1, 0, 0, 0, 2],
        RoundingMode.CEIL: [96, 32, -32, 1, 1, 0, 0, 2],
    }
    for mode, mantissas in by_hand.items():
        with rounding_mode(mode):
            got = ops.to_bfp16(x)
        assert got[0] == 128
        assert got[1:9].astype(np.int8).tolist() == mantissas
        assert not got[9:].any()


def test_bfp16_exponent_goes_up_when_the_largest_rounds_out_of_range() -> None:
    """1.9961 = 255.5/128 needs 128 mantissa units at its own exponent, 64 at the next; -2 + a little rounds to -128."""
    x = np.zeros(64, np.float32)
    x[0], x[1] = 255.5 / 128, 1.0
    x[8], x[9] = -255.5 / 128, 1.0
    with rounding_mode(RoundingMode.CONV_EVEN):
        got = ops.to_bfp16(x).reshape(8, 9)
    assert got[0, :3].tolist() == [128, 64, 32]
    assert (got[1, 0], got[1, 1:3].astype(np.int8).tolist()) == (127, [-128, 64])


@pytest.mark.parametrize("mode", RoundingMode)
def test_bfp16_random_blocks(mode: RoundingMode, rng: np.random.Generator) -> None:
    """Wide and narrow spreads of exponents, denormals, zeros, exact halves (few mantissa bits)."""
    bits = rng.integers(0, 1 << 32, (64, 64), dtype=np.uint32)
    bits[16:] = bits[16:] & 0x807FFFFF | (rng.integers(100, 108, (48, 64), dtype=np.uint32) << 23)
    bits[32:] &= 0xFFFF8000
    bits[48:] |= 0x007F0000
    bits[:4] &= 0x80FFFFFF  # exponents 0 and 1
    bits[5, ::3] = 0
    x = finite(bits).reshape(-1)
    with rounding_mode(mode):
        got = ops.to_bfp16(x)
    assert got.tolist() == bfp16_bytes(x, mode)


def test_bfp16_every_bf16_beside_one() -> None:
    """Every bfloat16 below 2^127, sharing its exponent with 1.0, to nearest even."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    x = np.ones((bits.size, 8), np.float32)
    x[:, 3] = finite(bits)
    flat = x.reshape(-1)
    with rounding_mode(RoundingMode.CONV_EVEN):
        got = ops.to_bfp16(flat).reshape(-1, 9)
    # In float64: 2^(133 - e) times a bfloat16 is exact, and rint rounds half to even.
    e = np.maximum(x[:, 3].view(np.uint32) >> 23 & 0xFF, 127).astype(np.int64)
    value = np.where(x[:, 3].view(np.uint32) >> 23 & 0xFF, x[:, 3], 0).astype(np.float64)
    e += np.abs(np.rint(value * 2.0 ** (133 - e)) + 0.5) > 127.5  # above 127 or below -128
    np.testing.assert_array_equal(got[:, 0], e)
    np.testing.assert_array_equal(got[:, 4].astype(np.int8), np.rint(value * 2.0 ** (133 - e)))
    np.testing.assert_array_equal(got[:, 1].astype(np.int8), np.rint(2.0 ** (133 - e)))


def test_bfp16_to_fp32(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, (100, 8, 9), dtype=np.uint8)
    data[..., 0] = rng.integers(20, 230, (100, 8))
    value = data[..., 1:].astype(np.int8).astype(np.float64) * 2.0 ** (data[..., :1].astype(np.float64) - 133)
    np.testing.assert_array_equal(ops.from_bfp16(data.reshape(-1)), value.astype(np.float32).reshape(-1))


def dot_model(a: Array, b: Array, acc: npt.NDArray[np.float32], rows: int, columns: int) -> npt.NDArray[np.float32]:
    """Exact dots of 8, rounded to fp32 for their range alone, added with one rounding (numpy's fp32 addition)."""
    a, b = a.reshape(-1, 9), b.reshape(-1, 9)
    out = acc.reshape(rows, columns).copy()
    for m in range(rows):
        for n in range(columns):
            total = sum(int(np.int8(p)) * int(np.int8(q)) for p, q in zip(a[m, 1:], b[n, 1:], strict=True))
            with np.errstate(over="ignore", under="ignore"):
                out[m, n] += np.float32(total * 2.0 ** (int(a[m, 0]) + int(b[n, 0]) - 266))
    return out


@pytest.mark.parametrize("case", ["near one", "any exponent", "extreme mantissas"])
def test_bfp16_multiplication(case: str, rng: np.random.Generator) -> None:
    for _ in range(20):
        data = rng.integers(0, 256, (3, 8, 9), dtype=np.uint8)
        if case != "any exponent":
            data[..., 0] = rng.integers(120, 134, (3, 8))
        if case == "extreme mantissas":
            data[..., 1:] = 0x80
        a, low, high = data.reshape(3, 72)
        acc = rng.standard_normal(64).astype(np.float32) * 100
        with np.errstate(all="ignore"):
            square = dot_model(a, low, acc, 8, 8)
            wide = dot_model(a, np.concatenate([low, high]), acc, 4, 16)
        np.testing.assert_array_equal(ops.bfp16_mac(a, low, acc).reshape(8, 8), square)
        got = ops.bfp16_mac_4x16(a, np.concatenate([low, high]), acc)
        np.testing.assert_array_equal(got.reshape(4, 16), wide)


def test_bf16_mmul_converts_both_operands(rng: np.random.Generator) -> None:
    """A [8 m][8 k], B [8 k][8 n]: blocks run along k in both, so B is transposed before it is converted."""
    a = (rng.standard_normal(64) * 4).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal(64).astype(ml_dtypes.bfloat16)
    for mode in (RoundingMode.FLOOR, RoundingMode.CONV_EVEN):
        a_bytes = np.array(bfp16_bytes(a.astype(np.float32), mode), np.uint8)
        b_bytes = np.array(bfp16_bytes(b.astype(np.float32).reshape(8, 8).T.copy().reshape(-1), mode), np.uint8)
        expected = dot_model(a_bytes, b_bytes, np.zeros(64, np.float32), 8, 8)
        with rounding_mode(mode):
            got = ops.mmul_bf16(a.view(np.uint16), b.view(np.uint16))
        np.testing.assert_array_equal(got.reshape(8, 8), expected)


# --- element-wise multiply-accumulate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [RoundingMode.FLOOR, RoundingMode.CONV_EVEN])
def test_mac_rounds_once_whatever_the_mode(mode: RoundingMode, rng: np.random.Generator) -> None:
    acc = (rng.standard_normal(64) * 1000).astype(np.float32)
    a = rng.standard_normal(64).astype(ml_dtypes.bfloat16)
    b = rng.standard_normal(64).astype(ml_dtypes.bfloat16)
    # float64 holds the product, and the sum of numbers this close, exactly.
    expected = (acc.astype(np.float64) + a.astype(np.float64) * b.astype(np.float64)).astype(np.float32)
    with rounding_mode(mode):
        np.testing.assert_array_equal(ops.mac(acc, a.view(np.uint16), b.view(np.uint16)), expected)


# --- integers, choices between lanes and 2**x -------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["random", "largest", "past int32"])
def test_int8_multiplication(case: str, rng: np.random.Generator) -> None:
    """Exact, and modulo 2**32."""
    a, b = (rng.integers(-128, 128, (8, 8)).astype(np.int8) for _ in range(2))
    if case != "random":
        a[...], b[...] = -128, -128
    acc = rng.integers(-(2**31), 2**31, 64).astype(np.int32) if case == "past int32" else np.zeros(64, np.int32)
    exact = acc.astype(np.int64).reshape(8, 8) + a.astype(np.int64) @ b.astype(np.int64)
    np.testing.assert_array_equal(ops.mmul_int8(a, b, acc).reshape(8, 8), exact.astype(np.int32))


@pytest.mark.parametrize("name", ["int8_64", "int32_16"])
def test_choices(name: str, rng: np.random.Generator) -> None:
    """min, max, lt, ge and select."""
    dtype, lanes = (np.int8, 64) if name == "int8_64" else (np.int32, 16)
    ends = np.iinfo(dtype)
    a = rng.integers(ends.min, ends.max, lanes, endpoint=True).astype(dtype)
    b = rng.integers(ends.min, ends.max, lanes, endpoint=True).astype(dtype)
    a[:4], b[:4] = [ends.min, ends.max, 0, 7], [ends.max, ends.min, 0, 7]
    smaller, larger, less, not_less, chosen = getattr(ops, f"choices_{name}")(a, b)
    np.testing.assert_array_equal(smaller, np.minimum(a, b))
    np.testing.assert_array_equal(larger, np.maximum(a, b))
    lanes_less = [less >> i & 1 == 1 for i in range(lanes)]
    np.testing.assert_array_equal(lanes_less, a < b)
    assert less ^ not_less == 2**lanes - 1
    np.testing.assert_array_equal(chosen, np.where(a < b, b, a))


@pytest.mark.parametrize("mode", [RoundingMode.CONV_EVEN, RoundingMode.FLOOR, RoundingMode.CEIL])
def test_exp2(mode: RoundingMode, rng: np.random.Generator) -> None:
    """The power in fp32, then narrowed by the core's mode; integers are exact, and below 2**-126 all is 0."""
    x = np.concatenate([rng.uniform(-130, 127, 480), rng.uniform(-0.01, 0.01, 24), [0, 1, -1, 127, -126, -126.01, 129]])
    x = np.append(x, -1e30).astype(np.float32)
    with rounding_mode(mode):
        got = ops.exp2(x).view(ml_dtypes.bfloat16).astype(np.float64)
    with np.errstate(over="ignore"):
        powers = np.where(x < -126, 0, np.exp2(x.astype(np.float64))).astype(np.float32)
    with rounding_mode(mode):
        expected = ops.to_bf16_float32(powers).view(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_array_equal(got, expected)
    assert got[-8:].tolist() == [1, 2, 0.5, 2.0**127, 2.0**-126, 0, np.inf, 0]


# --- reordering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size", "dtype"), [("u8_64", 64, np.uint8), ("bf16_64", 64, np.uint16), ("bf16_16", 16, np.uint16)]
)
def test_interleave_is_the_documented_order(name: str, size: int, dtype: npt.DTypeLike) -> None:
    v = np.arange(size).astype(dtype)
    w = (np.arange(size) + 100).astype(dtype)
    for chunk in (1 << i for i in range(size.bit_length())):
        zipped = np.stack([v.reshape(-1, chunk), w.reshape(-1, chunk)], axis=1).reshape(2, size)
        first, second = getattr(ops, f"interleave_{name}")(v, w, chunk, True)
        np.testing.assert_array_equal(first, zipped[0])
        np.testing.assert_array_equal(second, zipped[1])
        v_back, w_back = getattr(ops, f"interleave_{name}")(first, second, chunk, False)
        np.testing.assert_array_equal(v_back, v)
        np.testing.assert_array_equal(w_back, w)


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64])
def test_transpose(rows: int) -> None:
    columns = 64 // rows
    x = np.arange(64)
    expected = x.reshape(rows, columns).T.reshape(-1)
    np.testing.assert_array_equal(ops.transpose_u8_64(x.astype(np.uint8), rows, columns), expected)
    np.testing.assert_array_equal(ops.transpose_bf16_64(x.astype(np.uint16), rows, columns), expected)


# --- memory and counting ----------------------------------------------------------------------------------------------


INF, NAN, HUGE = 0x7F800000, 0x7FC00000, 0x7F7FFFFF  # bits of fp32


@pytest.mark.parametrize(
    ("what", "right", "wrong", "says"),
    [
        ("load", [0, 64, 128], range(1, 64), "needs an alignment of 64 bytes"),
        ("load of 16", [0, 16, 32, 112], [1, 8, 15, 17, 24], "needs an alignment of 16 bytes"),
        ("store", [0, 64], [1, 16, 32], "needs an alignment of 64 bytes"),
        ("unaligned load", [0, 4, 8, 60], [1, 2, 3, 5], "promised a multiple of 4 elements of 1 bytes"),
        ("interleave", [1, 2, 4, 8, 16, 32, 64], [0, 3, 5, 128], "not a power of two up to 64"),
        ("transpose", [8], [0, 4, 7, 16], "not a whole matrix"),
        ("bfp16", [0, 0x3F800000, HUGE], [INF, NAN, INF | 1 << 31], "an Inf or NaN is converted to bfp16"),
        ("subtracting mac", [0], [1], "subtraction is not emulated"),
    ],
)
def test_faults(what: str, right: Iterable[int], wrong: Iterable[int], says: str) -> None:
    """What the hardware would do silently wrong."""
    assert [ops.fault(what, value) for value in right] == ["" for _ in right]
    for value in wrong:
        assert says in ops.fault(what, value), value


@pytest.mark.parametrize(
    ("name", "load", "ldb", "st_", "mv", "vec"),
    # The rows of the reference's table of inner loops, per iteration: loads counted 4; 4 + 2 pops + 2 fills; 2 and 2
    # unpacks. Then two INT8 products that share an operand; and a comparison, a maximum, a choice and 2**x of 16 lanes.
    [
        ("bf16_8x8x8", 4, 0, 2, 4, 2),
        ("bfp16_weights_4_tiles", 8, 0, 2, 2, 5),
        ("dequant_gemv_32", 2, 2, 2, 1, 4),
        ("scores_int8", 3, 0, 0, 0, 2),
        ("weights_16", 0, 0, 0, 4, 0),
    ],
)
def test_slots_of_known_loops(name: str, load: int, ldb: int, st_: int, mv: int, vec: int) -> None:
    ops.sequence(name)
    regions = {region: (entries, slots) for region, entries, slots in _emu.counts()}
    assert regions["loop"] == (1, (load, ldb, st_, mv, vec))


# --- the packed tile --------------------------------------------------------------------------------------------------


def test_packed_tile_is_layout_py() -> None:
    tiles = _emu.packed_tiles()
    assert len(tiles) == 12
    for (bits, group, minima), numbers in tiles.items():
        layout = Layout(k=512, n=512, bits=bits, group=group, zero=ZeroKind.M16 if minima else ZeroKind.Z8)
        assert numbers == {name: getattr(layout, name) for name in numbers}
        assert set(numbers) == {
            "groups_per_tile",
            "code_bytes",
            "scale_offset",
            "zero_offset",
            "zero_bytes",
            "tile_bytes",
        }
