"""Configurations against sums by hand, and against the host-built kernels: scratch, names, cycles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilefuse.configurations import BF16, Configuration, Op, Weights, most_bands
from tilefuse.emulator import kernels
from tilefuse.errors import PlanError
from tilefuse.kernel_cycles import cycles_of
from tilefuse.layout import Layout, ZeroKind

Z8, M16 = ZeroKind.Z8, ZeroKind.M16


def weights(bits: int, group: int, zero: ZeroKind = Z8) -> Weights:
    return Weights.of(Layout(512, 512, bits, group, zero))


ALL = [
    Configuration(op, weights(bits, group, zero), tiles=tiles)
    for op in (Op.GEMM, Op.GEMV, Op.GEMV_BASELINE)
    for bits in (4, 8)
    for group in (32, 64, 128)
    for zero in ZeroKind
    for tiles in (1, 2)
    if tiles == 1 or (op is Op.GEMM and bits == 4 and zero is Z8)
] + [Configuration(Op.GEMM_BASELINE, BF16), Configuration(Op.GEMV_BASELINE, BF16)]


def used(configuration: Configuration) -> tuple[int, int]:
    """Bytes of a core and of a memory tile."""
    core, memtile = configuration.budgets()
    assert (core.limit, memtile.limit) == (65536, 524288)
    return core.used, memtile.used


def test_the_budget_of_a_gemm() -> None:
    """stack, 4 bands of 2 tiles of sums, 2 x 2 tiles of weights, 2 bands, 2 results, scales as matrices, constants."""
    core, memtile = used(Configuration(Op.GEMM, weights(4, 128), tiles=2, max_bands=4, join=4))
    assert core == 3328 + 4 * 2 * 4096 + 2 * 2 * 4288 + 2 * 2304 + 2 * 2048 + 2 * 1152 + 192
    # Five objects of 4 k tiles x 2 tiles, four of 4 bands, two of 4 pieces from each of 4 cores.
    assert memtile == 5 * 8 * 4288 + 4 * 4 * 2304 + 2 * 4 * 4 * 2048


def test_the_budget_of_a_gemm_with_8_bits_and_minima() -> None:
    """9216 bytes of weights as bfp16; a tile of 8192 codes, 4 rows of scales and of minima."""
    core, memtile = used(Configuration(Op.GEMM, weights(8, 32, M16), max_bands=6))
    assert core == 3328 + 6 * 4096 + 2 * (8192 + 2 * 512) + 2 * 2304 + 2 * 2048 + 9216 + 192
    assert memtile == 5 * 4 * 9216 + 4 * 4 * 2304 + 2 * 8192


def test_the_budgets_of_a_gemv() -> None:
    """x kept: 8192 channels. A memory tile has three objects of four tiles."""
    core, memtile = used(Configuration(Op.GEMV, weights(4, 128)))
    assert core == 2048 + 256 + 2 * 4288 + 2 * 128 + (16 * 72 + 384) + 16384 + 2 * 1024
    assert memtile == 3 * 4 * 4288
    core, memtile = used(Configuration(Op.GEMV, weights(8, 128), streams=2))
    assert core == 2048 + 256 + 2 * 8384 + 2 * 128 + (16 * 72 + 384) + 16384
    assert memtile == 2 * 3 * 2 * 8384


def test_the_budgets_of_the_baselines() -> None:
    core, memtile = used(Configuration(Op.GEMM_BASELINE, BF16))
    assert core == 3328 + 32 * 64 * 4 + 16384 + 2 * 32 * 128 * 2 + 32 * 64 * 2 + 16384
    assert memtile == 2 * 16384 + 2 * 8192 + 2 * 128 * 64 * 2
    core, memtile = used(Configuration(Op.GEMV_BASELINE, BF16))
    assert core == 2048 + 256 + 2 * 16384 + 2 * 128 + 128 * 8 * 2 + 2 * 256
    assert memtile == 2 * 16384


@pytest.mark.parametrize(
    ("bits", "group", "zero", "tiles", "bands"),
    # As kernels/aie/gemm_bfp16_w4.cc and _w8.cc work out what L1 leaves beside everything else.
    [
        (4, 128, Z8, 1, 10),
        (4, 64, Z8, 1, 10),
        (4, 32, Z8, 1, 9),
        (4, 128, Z8, 2, 4),
        (4, 64, Z8, 2, 3),
        (4, 32, Z8, 2, 3),
        (8, 128, Z8, 1, 8),
        (8, 64, Z8, 1, 8),
        (8, 32, Z8, 1, 7),
        *((4, group, M16, 1, 8) for group in (32, 64, 128)),
        *((8, group, M16, 1, 6) for group in (32, 64, 128)),
    ],
)
def test_bands_that_fit(bits: int, group: int, zero: ZeroKind, tiles: int, bands: int) -> None:
    stored = weights(bits, group, zero)
    assert most_bands(stored, 8, tiles) == bands
    Configuration(Op.GEMM, stored, 8, tiles, bands)
    with pytest.raises(
        PlanError, match=rf"_{bands + 1}b1j_8c does not fit: core: \d+ of 65536 bytes .*; take fewer bands"
    ):
        Configuration(Op.GEMM, stored, 8, tiles, bands + 1)


def test_objects() -> None:
    gemm = Configuration(Op.GEMM, weights(4, 128), tiles=2)
    assert (gemm.w_object, gemm.w_l2_object) == (2 * 4288, 8 * 4288)
    # A band: 16 rows x 128, 9 bytes for 8. Four to a memory tile.
    assert (gemm.x_object, gemm.x_l2_object, gemm.y_object) == (2304, 9216, 16 * 64 * 2)
    gemv = Configuration(Op.GEMV, weights(8, 128))
    assert (gemv.w_object, gemv.w_l2_object, gemv.x_object, gemv.y_object) == (8384, 4 * 8384, 1024, 128)
    assert Configuration(Op.GEMV, weights(8, 128), streams=2).w_l2_object == 2 * 8384
    baseline = Configuration(Op.GEMM_BASELINE, BF16)
    assert (baseline.w_object, baseline.x_object, baseline.y_object) == (16384, 8192, 4096)
    assert Configuration(Op.GEMV_BASELINE, BF16).x_object == 256


def test_bands_that_fill_joined_objects() -> None:
    """A core sends its bands of one tile, then of the next: 4 pieces are 4 bands, or 2 bands of both tiles."""
    eight = Configuration(Op.GEMM, weights(8, 128), max_bands=8, join=4)
    assert [bands for bands in range(10) if eight.takes_bands(bands)] == [4, 8]
    assert eight.y_l2_object == 4 * 4 * 2048
    two = Configuration(Op.GEMM, weights(4, 128), tiles=2, max_bands=4, join=4)
    assert [bands for bands in range(10) if two.takes_bands(bands)] == [2, 4]
    any_number = Configuration(Op.GEMM, weights(8, 128), max_bands=8)
    assert [bands for bands in range(10) if any_number.takes_bands(bands)] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("columns", "shims"),
    [(8, [0, 2, 4, 6]), (7, [0, 1, 3, 5]), (6, [0, 1, 3, 4]), (5, [0, 1, 2, 3]), (4, [0, 1, 2, 3])],
)
def test_each_array_row_has_a_shim_for_its_activations(columns: int, shims: list[int]) -> None:
    configuration = Configuration(Op.GEMM, weights(4, 128), columns)
    assert [configuration.x_column(row) for row in range(4)] == shims


def test_names() -> None:
    assert (
        Configuration(Op.GEMM, weights(4, 64), 6, 2, 3, join=2).name == "gemm_bfp16_w4g64_mantissa_16x128x128_3b2j_6c"
    )
    assert Configuration(Op.GEMM, weights(8, 32, M16)).kernel == "gemm_bfp16_w8g32m_bfp16_16x128x64"
    assert Configuration(Op.GEMV, weights(8, 128), streams=2).name == "gemv_bf16_w8g128_mantissa_128x64_2s_8c"
    assert Configuration(Op.GEMM_BASELINE, BF16).name == "gemm_baseline_bf16_bf16_emulated_32x128x64_8c"
    assert Configuration(Op.GEMV_BASELINE, BF16).kernel == "gemv_bf16_bf16_elementwise_128x64"
    names = [configuration.name for configuration in ALL]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"op": Op.GEMM, "columns": 3}, "columns = 3: a gemm takes 4 to 8, a shim .* pack the layer for those"),
        ({"op": Op.GEMM, "columns": 9}, "columns = 9: a gemm takes 4 to 8"),
        ({"op": Op.GEMV, "columns": 0}, "columns = 0: a gemv takes 1 to 8$"),
        ({"op": Op.GEMV, "columns": 9}, "columns = 9: a gemv takes 1 to 8$"),
        ({"op": Op.GEMM, "tiles": 3}, "tiles = 3: 1 to 2"),
        ({"op": Op.GEMM, "max_bands": 0}, "max_bands = 0: 1 to 15"),
        ({"op": Op.GEMV, "streams": 0}, "streams = 0: 1 to 2"),
        ({"op": Op.GEMM, "max_bands": 4, "join": 3}, "join = 3: 1, 2 or 4 pieces, and no more than a core's 4"),
        ({"op": Op.GEMM, "max_bands": 3, "join": 4}, "join = 4: 1, 2 or 4 pieces, and no more than a core's 3"),
        ({"op": Op.GEMM, "max_bands": 8, "join": 8}, "join = 8: 1 to 4"),
        ({"op": Op.GEMV, "join": 2}, "join = 2: a gemv has 1; only a gemm has more"),
        ({"op": Op.GEMM, "streams": 2}, "streams = 2: a gemm has 1; only a gemv has more"),
        ({"op": Op.GEMV, "tiles": 2}, "tiles = 2: a gemv has 1; only a gemm has more"),
        ({"op": Op.GEMV, "max_bands": 2}, "max_bands = 2: a gemv has 1; only a gemm has more"),
        ({"op": Op.GEMV_BASELINE, "streams": 2}, "streams = 2: a gemv_baseline has 1"),
        ({"op": Op.GEMM, "tiles": 2, "weights": weights(8, 64)}, "tiles = 2 with w8g64: .*; take tiles = 1"),
        ({"op": Op.GEMM, "tiles": 2, "weights": weights(4, 64, M16)}, "tiles = 2 with w4g64m: .*; take tiles = 1"),
        ({"op": Op.GEMM, "weights": BF16}, "bf16 weights: a gemm takes packed ones, and its baseline bfloat16"),
        ({"op": Op.GEMM_BASELINE}, "w4g128 weights: a gemm takes packed ones, and its baseline bfloat16"),
    ],
)
def test_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        Configuration(**{"weights": weights(4, 128)} | options)


@pytest.mark.parametrize("configuration", ALL, ids=lambda configuration: configuration.name)
def test_buffers_laid_one_after_another_are_aligned(configuration: Configuration) -> None:
    """To the 64 bytes that kernels need, whatever their order: the compiler aligns to 32 only."""
    sizes = {item.nbytes for budget in configuration.budgets() for item in budget.items}
    assert not [nbytes for nbytes in sizes if nbytes % 64]


@pytest.mark.parametrize("configuration", ALL, ids=lambda configuration: configuration.name)
def test_the_kernel_is_there_and_takes_these_objects(configuration: Configuration) -> None:
    kernel = kernels.get(configuration.kernel)
    assert kernel.scratch_bytes == configuration.scratch_bytes
    sizes = {argument.name: argument.nbytes for entry in kernel.entry_points.values() for argument in entry.arguments}
    assert sizes["w"] == configuration.w_object
    if configuration.op is Op.GEMM:
        assert (sizes["a"], sizes["c"]) == (configuration.x_object, configuration.y_object)


@pytest.mark.parametrize("configuration", ALL, ids=lambda configuration: configuration.name)
def test_cycles_are_the_kernels_counts(configuration: Configuration, rng: np.random.Generator) -> None:
    """To within a tenth, or a pipeline's fill."""
    entries = kernels.get(configuration.kernel).entry_points
    arrays: dict[str, Any] = {}
    for stem in ("prepare", "", "store_bf16", "zero"):
        for argument in entries[stem].arguments:
            shape = [abs(extent) for extent in argument.shape]
            if argument.by_value:
                arrays[argument.name] = 0
            elif argument.name not in arrays:
                coded = argument.dtype == np.uint8
                arrays[argument.name] = argument.copy_of(
                    rng.integers(0, 16, shape) if coded else rng.normal(size=shape)
                )

    def counted(stem: str) -> int:
        counts = entries[stem].count(*(arrays[argument.name] for argument in entries[stem].arguments))
        return sum(slots.cycles for slots in counts.values())

    cycles = cycles_of(configuration)
    for stem, said in (
        ("prepare", cycles.prepare),
        ("", cycles.main),  # reads the scratch that prepare has filled
        ("store_bf16", cycles.store),
        ("zero", cycles.zero),
    ):
        assert said == pytest.approx(counted(stem), rel=0.1, abs=10), stem
