"""Parts of layers for tensor parallelism: each has the bytes of the sliced layer, and together they compute it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle_layout import BITS_OF, pack_oracle, random_layer

import tilefuse as tf
from tilefuse.errors import LayoutError, ShapeError
from tilefuse.quantized import CodeOrder
from tilefuse.testing import assert_gemm_close

SCHEMES = [(order, bits) for order in CodeOrder for bits in BITS_OF[order]]


def rounded(values: Any) -> Any:
    return None if values is None else np.asarray(values).astype(np.float32).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("floating", [False, True], ids=["zeros", "minima"])
@pytest.mark.parametrize(("order", "bits"), SCHEMES)
@pytest.mark.parametrize(
    ("k", "n", "group", "world"),
    # The second and the last cut words of all orders that have any.
    [(512, 128, 64, 2), (192, 60, 32, 3), (576, 192, 576, 3), (384, 36, 64, 6)],
)
def test_bytes_are_those_of_the_slice(
    order: CodeOrder, bits: int, k: int, n: int, group: int, world: int, floating: bool
) -> None:
    if order is CodeOrder.WORDS_N_AWQ:
        n = -(-n // (8 * world)) * 8 * world if n % 8 else n
    rng = np.random.default_rng([k, n, world])
    q, codes = random_layer(rng, k, n, bits, group, order, floating=floating, bias=True)
    scales, mins = rounded(q.scales), rounded(q.mins)
    assert q.bias is not None
    for rank in range(world):
        part = slice(rank * n // world, (rank + 1) * n // world)
        zeros = None if q.zeros is None else q.zeros[:, part]
        packed = tf.pack(q, shard=(rank, world), axis="out")
        expected = pack_oracle(
            codes[:, part], scales[:, part], zeros, None if mins is None else mins[:, part], bits, group, 8
        )
        np.testing.assert_array_equal(packed.data, expected)
        np.testing.assert_array_equal(packed.bias, q.bias[part])
        assert (packed.k, packed.n) == (k, n // world)
        assert tf.packed_nbytes(q, shard=(rank, world), axis="out") == packed.nbytes

        rows = slice(rank * k // world, (rank + 1) * k // world)
        cells = slice(0, 1) if group == k else slice(rows.start // group, rows.stop // group)
        zeros = None if q.zeros is None else q.zeros[cells]
        packed = tf.pack(q, shard=(rank, world), axis="in")
        expected = pack_oracle(
            codes[rows], scales[cells], zeros, None if mins is None else mins[cells], bits, min(group, k // world), 8
        )
        np.testing.assert_array_equal(packed.data, expected)
        assert (packed.bias is None) == (rank > 0)
        assert (packed.k, packed.n) == (k // world, n)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("m", [1, 7])
def test_parts_compute_the_layer(bits: int, m: int) -> None:
    k, n, world = 768, 192, 3
    rng = np.random.default_rng(bits)
    q, _ = random_layer(rng, k, n, bits, 64, CodeOrder.WORDS_N, bias=True)
    x = rng.standard_normal((m, k)).astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    whole = tf.pack(q)
    y = tf.gemm(x, whole)
    beside = [tf.gemm(x, tf.pack(q, shard=(rank, world), axis="out")) for rank in range(world)]
    assert_gemm_close(y, x, whole)
    assert_gemm_close(np.concatenate(beside, axis=1), x, whole)

    width = k // world
    added = sum(
        tf.gemm(x[:, rank * width : (rank + 1) * width], tf.pack(q, shard=(rank, world), axis="in"))
        for rank in range(world)
    )
    # Adding the parts rounds a few more times, by 2^-24: nothing beside the gate's 2^-8.
    assert_gemm_close(added, x, whole)


def test_permuted_inputs_are_divided_along_the_outputs_only() -> None:
    q, codes = random_layer(np.random.default_rng(0), 256, 64, 4, 64, CodeOrder.WORDS_K, perm=True)
    assert q.perm is not None
    packed = tf.pack(q, shard=(1, 2), axis="out")
    assert q.zeros is not None
    expected = pack_oracle(codes[q.perm][:, 32:], rounded(q.scales)[:, 32:], q.zeros[:, 32:], None, 4, 64, 8)
    np.testing.assert_array_equal(packed.data, expected)
    np.testing.assert_array_equal(packed.perm, q.perm)
    with pytest.raises(LayoutError, match=r"activation order.*axis='out'"):
        tf.pack(q, shard=(0, 2), axis="in")


def test_one_rank_has_the_whole() -> None:
    q, _ = random_layer(np.random.default_rng(0), 256, 64, 4, 64, perm=True, bias=True)
    for axis in ("in", "out"):
        packed = tf.pack(q, shard=(0, 1), axis=axis)  # type: ignore[arg-type]
        np.testing.assert_array_equal(packed.data, tf.pack(q).data)
        assert packed.bias is not None


@pytest.mark.parametrize(
    ("shard", "axis", "error", "message"),
    [
        ((0, 2), None, ShapeError, "both or neither"),
        (None, "in", ShapeError, "both or neither"),
        ((2, 2), "in", ShapeError, "0 <= rank < world"),
        ((-1, 2), "in", ShapeError, "0 <= rank < world"),
        ((0, 0), "out", ShapeError, "0 <= rank < world"),
        ((0.0, 2), "out", ShapeError, "integers"),
        (3, "out", ShapeError, "rank, world"),
        ((0, 2), "k", ShapeError, "'in'.*'out'"),
        ((0, 5), "out", LayoutError, "192 output channels can't be divided among 5"),
        ((0, 7), "in", LayoutError, "576 input channels can't be divided among 7"),
        # 576 / 2 = 288 = 4.5 groups of 64; 576 / 1 is no world, so that only the other remedies are named.
        ((0, 2), "in", LayoutError, r"288 input channels a rank cut a group of 64; shard along axis='out'"),
        # 576 / 4 = 144 = 2.25 groups, and 576 / 3 = 192 is 3.
        ((0, 4), "in", LayoutError, r"cut a group of 64; take a world of 3"),
    ],
)
def test_what_is_refused(shard: Any, axis: Any, error: type[Exception], message: str) -> None:
    q, _ = random_layer(np.random.default_rng(0), 576, 192, 4, 64)
    with pytest.raises(error, match=message):
        tf.pack(q, shard=shard, axis=axis)
    with pytest.raises(error, match=message):
        tf.packed_nbytes(q, shard=shard, axis=axis)


def test_minima_of_a_part_that_ends_inside_a_tile() -> None:
    q, _ = random_layer(np.random.default_rng(0), 96, 64, 4, 96, floating=True)
    with pytest.raises(LayoutError, match="K = 48 with minima"):
        tf.pack(q, shard=(0, 2), axis="in")
