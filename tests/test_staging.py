"""`tilefuse.staging`: the bytes that the array's GEMM reads, against the conversion in exact arithmetic and against the
emulated core's own, at every instruction set."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_gemm import operand_bytes

from tilefuse import _core
from tilefuse.arrays import view_rows
from tilefuse.errors import DtypeError, LayoutError, QuantizationError, ShapeError, TileFuseError
from tilefuse.layout import KT
from tilefuse.runtime import cpu
from tilefuse.staging import stage_activations

BF16 = ml_dtypes.bfloat16
DTYPES: list[Any] = [np.float32, np.float16, BF16]
LEVELS = [level for level in ("portable", "avx2", "avx512") if level in cpu.cpu_levels()]
"""Higher levels stage as avx512 does."""
U8 = npt.NDArray[np.uint8]


def stage(
    x: Any, k_tiles: int, bands: int, row_blocks: int, perm: npt.NDArray[np.int32] | None = None, level: str = ""
) -> U8:
    """[row_blocks][4][k_tiles][bands][16 k blocks][2][8 rows][9]; every byte has been written."""
    view = view_rows(x, "x")
    assert view is not None
    nbytes = row_blocks * 4 * k_tiles * bands * 2304
    outs = []
    with cpu.force_cpu_level(level or cpu.cpu_level()):
        for fill in (0x55, 0xAA):
            out = np.full(nbytes, fill, np.uint8)
            stage_activations(view, perm, k_tiles, bands, row_blocks, out)
            outs.append(out)
    np.testing.assert_array_equal(*outs)
    return outs[0].reshape(row_blocks, 4, k_tiles, bands, 16, 2, 8, 9)


def expected(x: Any, k_tiles: int, bands: int, row_blocks: int, perm: npt.NDArray[np.int32] | None = None) -> U8:
    """The same, from the definitions."""
    x = np.atleast_2d(x)
    held = x.astype(BF16).astype(np.float64)
    held = held if perm is None else held[:, perm]
    rows, channels = 64 * bands * row_blocks, KT * k_tiles
    padded = np.pad(held, ((0, rows - held.shape[0]), (0, channels - held.shape[1])))
    # (row block, band, array row, block of 8 rows, row, k tile, k block, channel)
    parts = padded.reshape(row_blocks, bands, 4, 2, 8, k_tiles, 16, 8).transpose(0, 2, 5, 1, 6, 3, 4, 7)
    return operand_bytes(parts).reshape(*parts.shape[:-1], 9)


def activations(rng: np.random.Generator, m: int, k: int, dtype: Any) -> npt.NDArray[Any]:
    """Magnitudes spread as a transformer's are, some zero."""
    x = rng.normal(0, 1, (m, k)) * np.exp(rng.normal(0, 0.7, (m, k)))
    return np.where(rng.random((m, k)) < 0.1, 0, x).astype(dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(
    ("m", "k", "k_tiles", "bands", "row_blocks"),
    [(1, 1, 4, 1, 1), (16, KT, 4, 1, 1), (63, 5 * KT - 1, 8, 1, 1), (64, 512, 4, 4, 2), (200, 300, 4, 2, 2)],
)
def test_layout(
    rng: np.random.Generator, level: str, dtype: Any, m: int, k: int, k_tiles: int, bands: int, row_blocks: int
) -> None:
    """Odd numbers of rows and channels, blocks that are all padding, k tiles that are all padding."""
    x = activations(rng, m, k, dtype)
    np.testing.assert_array_equal(
        stage(x, k_tiles, bands, row_blocks, level=level), expected(x, k_tiles, bands, row_blocks)
    )


def test_one_row_without_axis(rng: np.random.Generator) -> None:
    x = activations(rng, 1, 200, np.float32)[0]
    np.testing.assert_array_equal(stage(x, 4, 1, 1), expected(x, 4, 1, 1))


def test_place_of_each_row() -> None:
    """Row blocks of two bands: band b of array row r has rows (4 b + r) 16 on. Rows hold their own number."""
    x = np.repeat(np.arange(256, dtype=np.float32)[:, None] % 64, 8, axis=1)
    x[:, 1:] = 0
    x[:, 1] = np.arange(256) // 64
    staged = stage(x, 4, 2, 2)
    for row in range(256):
        block, rest = divmod(row, 128)
        band, rest = divmod(rest, 64)
        array_row, rest = divmod(rest, 16)
        exponent, first, second = staged[block, array_row, 0, band, 0, rest // 8, rest % 8, :3].view(np.int8)
        unit = 2.0 ** (int(exponent) % 256 - 133)
        assert (first * unit, second * unit) == (row % 64, row // 64)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_permutation(rng: np.random.Generator, level: str, dtype: Any) -> None:
    """Input channel i of the packed weights is x[:, perm[i]]."""
    x = activations(rng, 70, 300, dtype)
    perm = rng.permutation(300).astype(np.int32)
    np.testing.assert_array_equal(stage(x, 4, 2, 1, perm, level), expected(x, 4, 2, 1, perm))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_rows_with_a_stride_of_their_own(rng: np.random.Generator, dtype: Any) -> None:
    wide = activations(rng, 40, 700, dtype)
    x = wide[::2, 13:400]
    assert view_rows(x, "x", copy=False) is not None
    np.testing.assert_array_equal(stage(x, 4, 1, 1), expected(x, 4, 1, 1))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_make_no_difference(rng: np.random.Generator, threads: int) -> None:
    """Enough work to be shared out."""
    x = activations(rng, 300, 1200, np.float32)
    before = cpu.get_num_threads()
    cpu.set_num_threads(threads)
    try:
        np.testing.assert_array_equal(stage(x, 12, 3, 2), expected(x, 12, 3, 2))
    finally:
        cpu.set_num_threads(before)


# --- the conversion --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_every_bfloat16_beside_every_exponent(level: str) -> None:
    """All finite bfloat16, each with a larger value beside it that is 0 to 10 exponents above, of either sign."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    bits = bits[(bits & 0x7F80) != 0x7F80]
    for above in range(11):
        for top_bits in (0x007F, 0x8000, 0x807F):
            top = np.minimum(((bits >> 7) & 0xFF) + above, 254) << 7 | top_bits
            x = np.zeros((len(bits), 8), np.uint32)
            x[:, 3], x[:, 6] = bits, top
            # Rows of 512 channels: 64 blocks of 8.
            rows = x.astype(np.uint16).view(BF16).reshape(-1, 512)
            blocks = -(-len(rows) // 128)
            np.testing.assert_array_equal(stage(rows, 4, 2, blocks, level=level), expected(rows, 4, 2, blocks))


@given(st.integers(0, 2**32), st.integers(1, 254), st.integers(0, 40), st.sampled_from(LEVELS))
def test_random_bits(seed: int, exponent: int, spread: int, level: str) -> None:
    """float32 of all magnitudes: two roundings, of which the first may carry into the next exponent."""
    rng = np.random.default_rng(seed)
    shape = (64, 512)
    fields = rng.integers(max(exponent - spread, 0), exponent + 1, shape)
    fractions = np.where(
        rng.random(shape) < 0.3, 0x7F8000 + rng.integers(-3, 4, shape), rng.integers(0, 1 << 23, shape)
    )
    x = (fields << 23 | fractions | rng.integers(0, 2, shape) << 31).astype(np.uint32).view(np.float32)
    x = np.where(np.isfinite(x.astype(BF16).astype(np.float32)), x, np.float32(1))
    np.testing.assert_array_equal(stage(x, 4, 1, 1, level=level), expected(x, 4, 1, 1))


@pytest.mark.parametrize("level", LEVELS)
def test_every_float16(level: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    x = bits[(bits & 0x7C00) != 0x7C00].view(np.float16).reshape(-1, 512)
    blocks = -(-len(x) // 64)
    np.testing.assert_array_equal(stage(x, 4, 1, blocks, level=level), expected(x, 4, 1, blocks))


@pytest.mark.parametrize("level", LEVELS)
def test_the_emulated_core_makes_the_same_bytes(rng: np.random.Generator, level: str) -> None:
    """The operation that the kernels of bfloat16 activations convert with."""
    emu = pytest.importorskip("tilefuse._emu")
    from tilefuse.emulator.kernels import RoundingMode, rounding_mode

    x = activations(rng, 64, 512, BF16)
    x[:, :64] = (rng.normal(0, 1, (64, 64)) * 2.0 ** rng.integers(-126, 100, (64, 64))).astype(BF16)
    staged = stage(x, 4, 1, 1, level=level)
    blocks = x.astype(np.float32).reshape(4, 2, 8, 4, 16, 8).transpose(0, 3, 4, 1, 2, 5)
    with rounding_mode(RoundingMode.CONV_EVEN):
        for at in np.ndindex(4, 4, 16, 2):
            made = emu.operations.to_bfp16(np.ascontiguousarray(blocks[at]).reshape(64))
            np.testing.assert_array_equal(staged[0, at[0], at[1], 0, at[2], at[3]].reshape(-1), made)


# --- what bfp16 does not hold ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((dtype, value) for dtype in DTYPES for value in (np.nan, -np.inf)),
        (np.float32, 3.3961776e38),  # beyond the largest bfloat16 by more than half a unit
        (np.float32, -3.4028235e38),
    ],
)
def test_not_finite(rng: np.random.Generator, level: str, permuted: bool, dtype: Any, value: float) -> None:
    """The first place, row by row, whatever thread finds it."""
    perm = rng.permutation(500).astype(np.int32) if permuted else None
    for m in (50, 600):  # on one thread, and shared out
        x = activations(rng, m, 500, dtype)
        x[m // 2, 77], x[m // 2, 300], x[m - 1, 3] = value, value, value
        with pytest.raises(QuantizationError, match=rf"x\[{m // 2}, 77\] is not finite in bfloat16"):
            stage(x, 4, 5, 2, perm, level)


def test_nan_of_any_bits(rng: np.random.Generator) -> None:
    """Those that plain rounding would turn into Inf or into zero, too."""
    for bits in (0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000):
        x = activations(rng, 3, 9, np.float32)
        x.view(np.uint32)[2, 8] = bits
        with pytest.raises(QuantizationError, match=r"x\[2, 8\]"):
            stage(x, 4, 1, 1)


def test_largest_finite_values_are_held() -> None:
    x = np.full((2, 16), ml_dtypes.finfo(BF16).max, BF16)
    x[1] = -x[1]
    np.testing.assert_array_equal(stage(x, 4, 1, 1), expected(x, 4, 1, 1))


# --- the door --------------------------------------------------------------------------------------------------------


def test_door(rng: np.random.Generator) -> None:
    x = view_rows(activations(rng, 65, 130, np.float32), "x")
    assert x is not None
    out = np.empty(4 * 2 * 2 * 2304, np.uint8)
    perm = np.arange(130, dtype=np.int32)
    stage_activations(x, perm, 2, 2, 1, out)

    def refuse(error: type[TileFuseError], match: str, **changed: Any) -> None:
        arguments = {"x": x, "perm": perm, "k_tiles": 2, "bands": 2, "row_blocks": 1, "out": out} | changed
        before = out.copy()
        with pytest.raises(error, match=match):
            stage_activations(**arguments)
        np.testing.assert_array_equal(out, before)

    refuse(ShapeError, r"x has shape \[65, 130\]; 1 row blocks of 1 bands .* hold 64 rows", bands=1)
    refuse(ShapeError, r"hold 128 rows of 128 channels", k_tiles=1)
    for name in ("k_tiles", "bands", "row_blocks"):
        refuse(ShapeError, f"{name} = 0: pass at least 1", **{name: 0})
    refuse(ShapeError, "out has 36863 bytes; these activations take 36864", out=out[:-1])
    refuse(DtypeError, "out is int8", out=out.view(np.int8))
    refuse(LayoutError, "out is not C-contiguous", out=np.empty(2 * out.size, np.uint8)[::2])
    locked = out.copy()
    locked.flags.writeable = False
    refuse(LayoutError, "out is read-only", out=locked)
    refuse(DtypeError, "perm is int64", perm=perm.astype(np.int64))
    refuse(ShapeError, r"perm has shape \[129\]; x has 130 channels", perm=perm[:-1])
    refuse(LayoutError, "perm is not C-contiguous", perm=np.arange(260, dtype=np.int32)[::2])
    for bad in (-1, 130):
        wrong = perm.copy()
        wrong[5] = bad
        refuse(LayoutError, "x has channels 0 to 129", perm=wrong)


def test_no_rows() -> None:
    """M = 0 leaves padding."""
    assert not stage(np.zeros((0, 130), np.float32), 4, 1, 1).any()
    assert _core.stage_bfp16(0, 0, 0, 0, 0, 0, np.empty(4 * 2304, np.uint8).ctypes.data, 1, 1, 1, 1) is None
