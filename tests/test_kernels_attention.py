"""The AIE2P attention kernels on the host, a core's 32 rows at a time: INT8 scores bit for bit, everything else against
float64 within bounds that are derived here, and against the executable specification.

Notation: e is an exponent (base 2) less the running maximum, p = 2**e a weight, l the sum of a row's weights. A
bfloat16 is rounded by 2**-8 of itself at most, by 2**-8 / sqrt(3) in the mean. Of a number x that is split into bfp16
parts, each part errs by half of its unit: high + low is x within 2**-12 of the largest of the 8, low itself at most
2**-6 of it, rounding up of the largest included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from attention_core import NO_WINDOW, Core, Masks

from tilefuse import _emu
from tilefuse.attention_configurations import P_BYTES, SCORES_BYTES, STATE_BYTES, AttentionConfiguration
from tilefuse.emulator import kernels
from tilefuse.emulator.kernels import RoundingMode, rounding_mode
from tilefuse.tilemix import npu_operands
from tilefuse.tilemix.grid import Grid
from tilefuse.tilemix.npu_operands import from_bfp16, split_bfp16, to_bfp16
from tilefuse.tilemix.reference import attention_exact, attention_tiles, int8_scores, to_bf16
from tilefuse.tilemix.routing_map import Routing

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

BF16 = 2.0**-8
FP32 = 2.0**-24
SPLIT = 2.0**-12
SIZES = (64, 128)
MIXES = {"int8": lambda t: True, "16-bit": lambda t: False, "mixed": lambda t: t % 3 != 1}


def operands(rng: np.random.Generator, d: int, length: int, *, shift: float = 0.5) -> tuple[Array, Array, Array]:
    """q [32, d], k and v [length, d], all bfloat16; keys with a common mean, which smoothing takes off."""
    q, k, v = (to_bf16(rng.standard_normal((n, d))) for n in (32, length, length))
    return q, to_bf16(k + shift * rng.standard_normal(d)), v


def split(core: Core, mix: str) -> tuple[list[int], list[int]]:
    """The INT8 and the 16-bit tiles of a core."""
    chosen = [t for t in range(core.tiles) if MIXES[mix](t)]
    return chosen, [t for t in range(core.tiles) if t not in chosen]


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exact:
    """What a core computes, in float64: outputs [32, d], lse [32], and what the kernels' may differ by."""

    out: Float64
    out_bound: Float64
    lse: Float64
    lse_bound: Float64


def seen(core: Core) -> npt.NDArray[np.bool_]:
    """Which keys each row sees, [32, L]."""
    position = core.masks.position + np.arange(32)[:, None]
    key = np.arange(core.length)
    found = np.ones((32, core.length), np.bool_)
    if core.masks.causal:
        found &= key <= position
    if core.masks.window is not None:
        found &= key > position - core.masks.window
    return found


def largest_of_8(x: Float64, axis: int) -> Float64:
    """|x| replaced by the largest of its 8 neighbours along ``axis``, whose length need not be a multiple."""
    x = np.moveaxis(np.abs(x), axis, -1)
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])
    peaks = padded.reshape(*x.shape[:-1], -1, 8).max(axis=-1)
    return np.moveaxis(np.repeat(peaks, 8, axis=-1)[..., : x.shape[-1]], -1, axis)


def product_bound(core: Core, q: Array, k: Array) -> Float64:
    """How far a 16-bit product of the core's queries and ``k`` [n, d] may be from the exact one, [32, n].

    The queries' high part is their codes, exact; rest x low is left out; and 3 products for each 8 channels are added
    in fp32.
    """
    scales = core.rows.scales.astype(np.float64)[:, None]
    rest = q.astype(np.float64) / scales - core.rows.codes
    lost_q = np.abs(rest - from_bfp16(*to_bfp16(rest)))
    high, low = (from_bfp16(*part).astype(np.float64) for part in split_bfp16(k))
    size_q, size_k = np.abs(core.rows.codes) + np.abs(rest), np.abs(k).astype(np.float64)
    bound = size_q @ np.abs(k - high - low).T + lost_q @ size_k.T + np.abs(rest) @ np.abs(low).T
    found: Float64 = scales * (bound + (3 * core.d / 8 + 8) * FP32 * (size_q @ size_k.T))
    return found


def exact(core: Core, q: Array, k: Array, v: Array, mix: str) -> Exact:
    """The model: exponents as the specification defines them, of codes where a tile is INT8."""
    q64, k64, v64 = (x.astype(np.float64) for x in (q, k, v))
    exponents = q64 @ k64.T
    bounds = product_bound(core, q, k)
    for tile in split(core, mix)[0]:
        at = slice(64 * tile, min(64 * tile + 64, core.length))
        mean = core.keys.means[tile].astype(np.float64)[None]
        codes = int8_scores(core.rows.codes, core.keys.codes[at]).astype(np.float64)
        scales = core.rows.scales.astype(np.float64)[:, None] * core.keys.scales[tile]
        exponents[:, at] = codes * scales + q64 @ mean.T
        bounds[:, at] = product_bound(core, q, mean.astype(np.float32))
    factor = float(core.factor)
    exponents, bounds = exponents * factor, bounds * factor
    visible = seen(core)
    peak = np.where(visible, exponents, -np.inf).max(axis=1, keepdims=True, initial=-np.inf)
    some = np.isfinite(peak)
    e = np.where(visible & some, exponents - np.where(some, peak, 0), -np.inf)
    p = np.exp2(e)
    total = np.maximum(p.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    out = p @ v64 / total
    # A weight's relative error: what its exponent is off by - products, 2**-15 of the distance from the tile's largest
    # (two factors of 16 bits), 2**-21 of the whole - and its rounding.
    off = bounds + 2.0**-15 * np.abs(np.where(np.isfinite(e), e, 0)) + 2.0**-21 * np.abs(exponents)
    relative = BF16 + np.log(2) * off
    steps = 24 * core.tiles + 40
    p8, v8 = largest_of_8(p, 1), largest_of_8(v64, 0)
    spread = np.einsum("ij,ijc->ic", p * relative, np.abs(v64[None] - out[:, None]))
    mass = p @ np.abs(v64)
    sums = (spread + 3 * SPLIT * (p8 @ v8) + steps * FP32 * mass) / total
    lse = (peak[:, 0] + np.log2(total[:, 0])) * np.log(2)
    lse_bound = (p * relative).sum(axis=1) / total[:, 0] + steps * FP32 + FP32 * 8 * np.abs(peak[:, 0])
    return Exact(out, 1.02 * (sums + BF16 * (np.abs(out) + sums)), lse, 1.02 * lse_bound)


def check(core: Core, q: Array, k: Array, v: Array, mix: str) -> None:
    """Runs the core and holds it to `exact`."""
    model = exact(core, q, k, v, mix)
    out, lse = core.run(*split(core, mix))
    assert np.isfinite(out).all()
    assert (np.abs(out - model.out) <= model.out_bound).all()
    nobody = np.isneginf(model.lse)
    np.testing.assert_array_equal(np.isneginf(lse), nobody)
    assert not out[nobody].any()
    assert (np.abs(lse[~nobody] - model.lse[~nobody]) <= model.lse_bound[~nobody]).all()


# --- the host's operands ----------------------------------------------------------------------------------------------


def test_bfp16_is_what_a_core_converts_to(rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 64)) * np.exp2(rng.integers(-140, 120, (64, 1)))
    x[3:5] = [[-2.0, 127.7 / 64] * 32, [1.9999] * 64]  # -128 stays, 127.7 raises the exponent
    x = x.astype(np.float32)
    with rounding_mode(RoundingMode.CONV_EVEN):
        core = _emu.operations.to_bfp16(x.reshape(-1)).reshape(-1, 9)
    mantissas, exponents = to_bfp16(x)
    np.testing.assert_array_equal(exponents.reshape(-1), core[:, 0])
    np.testing.assert_array_equal(mantissas.view(np.uint8).reshape(-1, 8), core[:, 1:])
    lost = np.abs(x - from_bfp16(mantissas, exponents))
    assert (lost <= 2.0**-6 * largest_of_8(x.astype(np.float64), 1) + 2.0**-126).all()


def test_parts_of_bfloat16(rng: np.random.Generator) -> None:
    x = to_bf16(rng.standard_normal((40, 64)) * np.exp2(rng.integers(-9, 9, (40, 64))))
    high, low = (from_bfp16(*part) for part in split_bfp16(x))
    peaks = largest_of_8(x.astype(np.float64), 1)
    assert (np.abs(low) <= 2.0**-6 * peaks).all()
    assert (np.abs(x - high - low) <= SPLIT * peaks).all()
    # 7 bits of the largest and 7 more: bfloat16 within 2**6 of the largest have no bit below.
    near = np.abs(x) >= 2.0**-5 * peaks
    np.testing.assert_array_equal((high + low)[near], x[near])


@pytest.mark.parametrize("d", SIZES)
def test_objects_are_as_large_as_the_kernels_say(d: int) -> None:
    config = AttentionConfiguration(d)
    arguments = {
        argument.name: argument.nbytes
        for entry in kernels.get(config.kernel).entry_points.values()
        for argument in entry.arguments
        if not argument.by_value
    }
    assert arguments == {
        "q": config.q_object,
        "kv": config.kv_object,
        "scores": SCORES_BYTES,
        "state": STATE_BYTES,
        "p": P_BYTES,
        "o": config.o_bytes,
        "y": config.y_object,
    }


def test_a_query_is_its_scale_times_codes_and_rest(rng: np.random.Generator) -> None:
    q = to_bf16(rng.standard_normal((32, 64)) * np.exp2(rng.integers(-8, 8, (32, 1))))
    core = Core(q, q, q)
    rest = npu_operands.query_rest(q, core.rows.codes, core.rows.scales).reshape(8, 4, 8, 9)
    values = from_bfp16(rest[..., 1:].view(np.int8), rest[..., :1])
    values = values.transpose(1, 2, 0, 3).reshape(32, 64)
    sums = core.rows.scales[:, None].astype(np.float64) * (core.rows.codes + values.astype(np.float64))
    assert (np.abs(sums - q) <= 2.0**-8 * core.rows.scales[:, None]).all()


# --- scores -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", SIZES)
def test_int8_scores_are_exact(d: int, rng: np.random.Generator) -> None:
    q, k, v = operands(rng, d, 256)
    core = Core(q, k, v)
    for tile in range(core.tiles):
        core.run([tile])
        expected = int8_scores(core.rows.codes, core.keys.codes[64 * tile : 64 * tile + 64])
        np.testing.assert_array_equal(core.raw_scores(), expected)


@pytest.mark.parametrize("d", SIZES)
def test_int8_scores_of_the_largest_codes(d: int) -> None:
    """All codes +-127, so that sums are +-127**2 d, and one of each sign that cancels."""
    q, k = np.ones((32, d)), np.ones((64, d))
    q[1::2] = -1
    k[1::3] = -1
    k[2::3, ::2] = -1
    core = Core(q, k, k, smooth="none")
    assert set(np.unique(core.rows.codes)) == {-127, 127}
    core.run([0])
    expected = (q @ k.T * 127**2).astype(np.int64)
    assert np.abs(expected).max() == 127**2 * d
    np.testing.assert_array_equal(core.raw_scores(), expected)


@pytest.mark.parametrize("d", SIZES)
def test_terms_of_int8_rows(d: int, rng: np.random.Generator) -> None:
    """Multiplier: a product of two fp32 numbers, within 2**-22. Offset: q . mean, a 16-bit product, times another."""
    q, k, v = operands(rng, d, 64, shift=4)
    core = Core(q, k, v)
    core.run([0])
    multiplier, offset = (x.astype(np.float64) for x in core.row_terms())
    folded = (core.rows.scales * core.factor).astype(np.float64)
    np.testing.assert_allclose(multiplier, folded * core.keys.scales[0], rtol=2.0**-22)
    mean = core.keys.means[0].astype(np.float64)[None]
    bound = product_bound(core, q, mean.astype(np.float32))[:, 0] * core.factor
    expected = (q.astype(np.float64) @ mean.T)[:, 0] * core.factor
    # The folded scale is rounded once; sums and products of fp32 numbers add 2**-22 of the offset.
    assert (np.abs(offset - expected) <= bound + 2.0**-21 * np.abs(expected)).all()


@pytest.mark.parametrize("d", SIZES)
def test_16_bit_scores(d: int, rng: np.random.Generator) -> None:
    q, k, v = operands(rng, d, 64)
    core = Core(q, k, v)
    core.run((), [0])
    multiplier, offset = (x.astype(np.float64) for x in core.row_terms())
    assert not offset.any()
    expected = q.astype(np.float64) @ k.T * core.factor
    bound = product_bound(core, q, k) * core.factor + 2.0**-22 * np.abs(expected)
    error = np.abs(core.raw_scores() * multiplier[:, None] - expected)
    assert (error <= bound).all()
    # On such data the operands' own roundings, of 2**-8, come to sixteen times as much.
    assert error.max() < 2.0**-12 * np.abs(expected).max()


# --- all of it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("length", [64, 300, 321])
@pytest.mark.parametrize("d", SIZES)
def test_against_float64(d: int, length: int, mix: str, rng: np.random.Generator) -> None:
    q, k, v = operands(rng, d, length)
    check(Core(q, k, v), q, k, v, mix)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "masks",
    [
        Masks(position=0, causal=True),
        Masks(position=200, causal=True),
        Masks(position=-20, causal=True),
        Masks(position=190, causal=True, window=100),
        Masks(position=131, causal=True, window=1),
        Masks(position=150, causal=False, window=70),
        Masks(position=-40, causal=True),
        Masks(position=1000, causal=True, window=500),
        Masks(position=2**30, causal=True, window=NO_WINDOW),
    ],
    ids=str,
)
def test_masks(masks: Masks, mix: str, rng: np.random.Generator) -> None:
    """Rows that see all keys of a tile, some, none; and none at all. Every tile is passed, needed or not."""
    q, k, v = operands(rng, 64, 233)
    check(Core(q, k, v, masks=masks), q, k, v, mix)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_scales(scale: float, mix: str, rng: np.random.Generator) -> None:
    """Weights that are all alike, and scores of some 10000, of which one key has everything."""
    q, k, v = operands(rng, 64, 200)
    check(Core(q, k, v, scale=scale), q, k, v, mix)


@pytest.mark.parametrize("mix", MIXES)
def test_maxima_that_grow_with_every_tile_and_never(mix: str, rng: np.random.Generator) -> None:
    """Rescaling by powers of two is exact, and by more than 2**126 it is 0."""
    q, k, v = operands(rng, 64, 400)
    for step in (0.5, -0.5, 20):
        ramp = to_bf16(k + q[:1] * step * (np.arange(400) // 64)[:, None])
        q_alike = to_bf16(q[:1] + 0.1 * q)
        check(Core(q_alike, ramp, v), q_alike, ramp, v, mix)


@pytest.mark.parametrize("mix", MIXES)
def test_zeros(mix: str, rng: np.random.Generator) -> None:
    """A block of zero keys, rows of zero queries, channels of zero values."""
    q, k, v = operands(rng, 128, 192)
    q[5:9], k[64:128], v[:, 10:40] = 0, 0, 0
    core = Core(q, k, v)
    check(core, q, k, v, mix)
    assert not core.run(*split(core, mix))[0][:, 10:40].any()


@pytest.mark.parametrize("mix", MIXES)
def test_equal_values_come_out(mix: str, rng: np.random.Generator) -> None:
    """Outputs and sums have the same weights, so equal values come out."""
    q, k, _ = operands(rng, 64, 200)
    v = np.broadcast_to(to_bf16(rng.standard_normal(64)), (200, 64))
    core = Core(q, k, v)
    out, _ = core.run(*split(core, mix))
    np.testing.assert_array_equal(out, v[:32])


def test_tiles_in_any_order(rng: np.random.Generator) -> None:
    """Only fp32 sums and roundings of weights under another maximum differ."""
    q, k, v = operands(rng, 64, 320)
    core = Core(q, k, v)
    one, lse = core.run([0, 2], [1, 3, 4])
    other, lse_too = core.run([2, 0], [4, 1, 3])
    assert relative(other, one) < BF16
    np.testing.assert_allclose(lse_too, lse, atol=BF16)


# --- against the executable specification -----------------------------------------------------------------------------


def relative(a: Array, b: Array) -> float:
    """Relative error in the 2-norm."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def specification(core: Core, q: Array, k: Array, v: Array, int8: Sequence[int]) -> Any:
    """`attention_tiles` of the same tiles: 32 rows at the end of the keys."""
    grid = Grid(32, core.length, causal=core.masks.causal)
    bits = np.zeros((1, grid.groups), np.bool_)
    bits[0, list(int8)] = True
    routing = Routing.from_bits(bits, grid)
    return attention_tiles(*(x[None, None] for x in (q, k, v)), routing, causal=core.masks.causal)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("d", SIZES)
def test_against_the_specification(d: int, mix: str, rng: np.random.Generator) -> None:
    """Three roundings to bfloat16 are independent: of the weights here and there, and of the results here. So their
    root mean square is sqrt(3) times that of one."""
    q, k, v = operands(rng, d, 491)
    core = Core(q, k, v, masks=Masks(position=491 - 32, causal=True))
    int8, wide = split(core, mix)
    out, lse = core.run(int8, wide)
    expected = specification(core, q, k, v, int8)
    assert relative(out, expected.out[0, 0]) < BF16
    np.testing.assert_allclose(lse, expected.lse[0, 0], atol=BF16)


@pytest.mark.parametrize("positive", [False, True])
def test_16384_keys(positive: bool, rng: np.random.Generator) -> None:
    """The state is fp32: at 16384 keys, where a bfloat16 state is off by 4 %, the error is still that of rounding
    weights and results, 3e-3 at most."""
    q, k, v = operands(rng, 64, 16384)
    if positive:
        v = to_bf16(rng.uniform(0, 4, v.shape))
    core = Core(q, k, v)
    out, lse = core.run((), range(core.tiles))
    expected = attention_exact(*(x[None, None] for x in (q, k, v)), causal=False)
    assert relative(out, expected.out[0, 0]) < 3e-3
    np.testing.assert_allclose(lse, expected.lse[0, 0], atol=BF16)


def test_every_function_sets_its_rounding(rng: np.random.Generator) -> None:
    """A core powers up in `floor`, and other kernels may leave any mode behind."""
    q, k, v = operands(rng, 64, 128)
    core = Core(q, k, v)
    results = []
    for mode in (RoundingMode.FLOOR, RoundingMode.CONV_EVEN):
        for stem, arguments in core.calls([0], [1]):
            with rounding_mode(mode):
                core.entry(stem)(*arguments)
        with rounding_mode(mode):
            results.append(core.results()[0])
    np.testing.assert_array_equal(*results)
