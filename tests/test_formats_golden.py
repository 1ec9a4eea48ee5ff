"""Words worked out by hand for every code order, and the weights that they stand for."""

from __future__ import annotations

import numpy as np
import pytest

import tilefuse as tf
from tilefuse import CodeOrder
from tilefuse.codes import pack_awq, pack_last, unpack_awq, unpack_last


def words(*values: int) -> np.ndarray:
    """A row of int32 words written as unsigned hexadecimal; words with the top bit set are negative on disk."""
    return np.array([values], np.uint32).view(np.int32)


def layer(codes: np.ndarray, order: CodeOrder, k: int, n: int, bits: int, **more: object) -> tf.QuantizedLinear:
    fields: dict[str, object] = {
        "scales": np.ones((1, n), np.float16),
        "zeros": np.zeros((1, n), np.uint8),
        "group": k,
        **more,
    }
    return tf.QuantizedLinear("layer", "golden", k, n, bits, codes=codes, order=order, **fields)  # type: ignore[arg-type]


def test_words_n() -> None:
    # One input channel, ten output channels with codes 0 to 9. The first is in the lowest bits, so written as a number
    # the word shows the codes backwards. The second word holds codes 8 and 9; its other nibbles mean nothing.
    q = layer(words(0x76543210, 0xFFFFFF98), CodeOrder.WORDS_N, 1, 10, 4)
    assert q.codes_kn().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]


def test_words_n_8_bits() -> None:
    # Codes 1, 2, 253, 254 in one word, 255 alone in the next: bytes in order, lowest first.
    q = layer(words(0xFEFD0201, 0x000000FF), CodeOrder.WORDS_N, 1, 5, 8)
    assert q.codes_kn().tolist() == [[1, 2, 253, 254, 255]]


def test_words_n_awq() -> None:
    # Nibble i holds column (0, 2, 4, 6, 1, 3, 5, 7)[i]. Give column j the code j: nibbles from the lowest are then
    # 0, 2, 4, 6, 1, 3, 5, 7, and the number reads backwards 0x75316420. With code 8 + j: 8, A, C, E, 9, B, D, F.
    q = layer(words(0x75316420, 0xFDB9ECA8), CodeOrder.WORDS_N_AWQ, 1, 16, 4)
    assert q.codes_kn().tolist() == [list(range(16))]


def test_words_k() -> None:
    # Two output channels, ten input channels: column 0 counts 0 to 9, column 1 from 15 down to 6. Words stack along K.
    codes = np.vstack([words(0x76543210, 0x89ABCDEF), words(0x00000098, 0x00000067)])
    q = layer(codes, CodeOrder.WORDS_K, 10, 2, 4)
    assert q.codes_kn().tolist() == [[i, 15 - i] for i in range(10)]


def test_words_k_8_bits() -> None:
    # Five input channels: 10, 20, 30, 40 = 0x0A, 0x14, 0x1E, 0x28 in the first word, 255 in the second.
    codes = np.vstack([words(0x281E140A), words(0xFF)])
    q = layer(codes, CodeOrder.WORDS_K, 5, 1, 8)
    assert q.codes_kn().tolist() == [[10], [20], [30], [40], [255]]


def test_rows_n() -> None:
    # Two output channels, three input channels: rows 1 2 3 and 13 14 15, padded to a word each.
    q = layer(np.vstack([words(0x321), words(0xFED)]), CodeOrder.ROWS_N, 3, 2, 4)
    assert q.codes_kn().tolist() == [[1, 13], [2, 14], [3, 15]]


def test_rows_n_8_bits() -> None:
    q = layer(words(0x80FF0102), CodeOrder.ROWS_N, 4, 1, 8)
    assert q.codes_kn().tolist() == [[0x02], [0x01], [0xFF], [0x80]]


def test_rows_n_int8() -> None:
    # Signed -128, -1, 0, 127 are unsigned 0, 127, 128, 255.
    q = layer(np.array([[-128, -1, 0, 127]], np.int8), CodeOrder.ROWS_N_INT8, 4, 1, 8)
    assert q.codes_kn().tolist() == [[0], [127], [128], [255]]


def test_rows_n_fast() -> None:
    # 64 input and 4 output channels are one tile of 64 int16 words, 16 a channel. In the first 8 words of channel 0,
    # word w holds inputs w, w + 8, w + 16, w + 24, lowest nibble first; the next 8 words hold inputs 32 to 63 likewise.
    tile = np.zeros((1, 64), np.uint16)
    tile[0, 0] = 0x4321  # channel 0: inputs 0, 8, 16, 24 = 1, 2, 3, 4
    tile[0, 9] = 0x8765  # channel 0, second half, word 1: inputs 33, 41, 49, 57 = 5, 6, 7, 8
    tile[0, 16 + 7] = 0xC000  # channel 1, word 7, highest nibble: input 31 = 12
    tile[0, 48 + 15] = 0x000F  # channel 3, last word, lowest nibble: input 32 + 7 = 39 is 15
    expected = np.zeros((64, 4), np.uint8)
    expected[[0, 8, 16, 24], 0] = 1, 2, 3, 4
    expected[[33, 41, 49, 57], 0] = 5, 6, 7, 8
    expected[31, 1] = 12
    expected[39, 3] = 15
    q = layer(tile.view(np.int16), CodeOrder.ROWS_N_FAST, 64, 4, 4)
    np.testing.assert_array_equal(q.codes_kn(), expected)


def test_dequantize_by_hand() -> None:
    # K = 5, groups of 2, 2, 1. (q - z) s: channel 0 has z = 3, 0, 15 and s = 0.5, 2, 0.25.
    q = layer(
        np.array([[3], [5], [0], [15], [1]], np.uint8),
        CodeOrder.KN,
        5,
        1,
        4,
        group=2,
        scales=np.array([[0.5], [2], [0.25]], np.float16),
        zeros=np.array([[3], [0], [15]], np.uint8),
    )
    assert q.dequantize().tolist() == [[0.0], [1.0], [0.0], [30.0], [-3.5]]


def test_dequantize_returns_rows_to_their_inputs() -> None:
    # Inputs 2 and 0 are the first group (s = 1), 1 and 3 the second (s = 10); codes are stored by input.
    q = layer(
        np.array([[1], [2], [3], [4]], np.uint8),
        CodeOrder.KN,
        4,
        1,
        4,
        group=2,
        scales=np.array([[1], [10]], np.float16),
        zeros=np.zeros((2, 1), np.uint8),
        perm=np.array([2, 0, 1, 3], np.int32),
    )
    assert q.codes_kn().tolist() == [[3], [1], [2], [4]]
    assert q.dequantize().tolist() == [[1.0], [20.0], [3.0], [40.0]]


def test_dequantize_with_minima() -> None:
    # q s + m = 3 * 0.5 - 2 and 15 * 0.5 - 2.
    q = layer(
        np.array([[3], [15]], np.uint8),
        CodeOrder.KN,
        2,
        1,
        4,
        scales=np.array([[0.5]], np.float16),
        zeros=None,
        mins=np.array([[-2]], np.float16),
    )
    assert q.dequantize().tolist() == [[-0.5], [5.5]]


def test_large_scales_do_not_overflow_float16() -> None:
    # 255 * 60000 is far beyond float16's 65504.
    q = layer(np.array([[255]], np.uint8), CodeOrder.KN, 1, 1, 8, scales=np.array([[60000]], np.float16))
    assert q.dequantize().tolist() == [[15300000.0]]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 32, 33])
@pytest.mark.parametrize("bits", [4, 8])
def test_packing_inverts_unpacking(count: int, bits: int, rng: np.random.Generator) -> None:
    codes = rng.integers(0, 1 << bits, (3, count), dtype=np.uint8)
    np.testing.assert_array_equal(unpack_last(pack_last(codes, bits), count, bits), codes)
    if bits == 4 and count % 8 == 0:
        np.testing.assert_array_equal(unpack_awq(pack_awq(codes), count), codes)


def test_awq_words_as_written() -> None:
    """The writer's words, by the derivation of `test_words_n_awq`."""
    assert pack_awq(np.arange(16, dtype=np.uint8)[None]).view(np.uint32).tolist() == [[0x75316420, 0xFDB9ECA8]]
    assert pack_last(np.array([[1, 2, 253, 254, 255]], np.uint8), 8).view(np.uint32).tolist() == [[0xFEFD0201, 0xFF]]
