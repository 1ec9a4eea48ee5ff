"""The bit layouts of `CodeOrder`: expected shapes, unpacking to [K, N], and packing back.

Everything here is NumPy and vectorised. It is the readable form of what the C++ packer does straight from the words;
zero points, which are small, are unpacked with it too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tilefuse.quantized import CodeOrder

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output channel, within its run of eight, that nibble i of an AutoAWQ word holds."""

WORD_BITS = 32

FAST_ROWS, FAST_COLUMNS = 4, 64
"""Output and input channels of a `ROWS_N_FAST` tile."""


def words(count: int, bits: int) -> int:
    """Number of int32 words that ``count`` codes of ``bits`` bits take."""
    return -(-count * bits // WORD_BITS)


def storage(order: CodeOrder, k: int, n: int, bits: int) -> tuple[tuple[int, int], npt.DTypeLike]:
    """Shape and dtype of the stored array of codes of a K x N layer."""
    match order.value:
        case "kn":
            return (k, n), np.uint8
        case "words_n" | "words_n_awq":
            return (k, words(n, bits)), np.int32
        case "words_k":
            return (words(k, bits), n), np.int32
        case "rows_n":
            return (n, words(k, bits)), np.int32
        case "rows_n_int8":
            return (n, k), np.int8
        case _:
            return (n // FAST_ROWS, k), np.int16


def unpack_last(packed: Array, count: int, bits: int) -> Codes:
    """Codes packed along the last axis, lowest bits first: int32 [..., W] -> uint8 [..., count]."""
    octets = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        return octets[..., :count]
    out = np.empty((*octets.shape[:-1], octets.shape[-1] * 2), np.uint8)
    np.bitwise_and(octets, 15, out=out[..., 0::2])
    np.right_shift(octets, 4, out=out[..., 1::2])
    return out[..., :count]


def unpack_first(packed: Array, count: int, bits: int) -> Codes:
    """Codes packed along the first axis, lowest bits first: int32 [W, C] -> uint8 [count, C]."""
    per_word = WORD_BITS // bits
    unsigned = np.ascontiguousarray(packed).view(np.uint32)
    out = np.empty((unsigned.shape[0] * per_word, unsigned.shape[1]), np.uint8)
    for i in range(per_word):
        # Any uint32 shifted and cut to its low byte: the narrowing cast keeps the low 8 bits.
        out[i::per_word] = (unsigned >> np.uint32(bits * i)).astype(np.uint8)
    if bits == 4:
        out &= 15
    return out[:count]


def unpack_awq(packed: Array, count: int) -> Codes:
    """4-bit codes in AutoAWQ's nibble order: int32 [R, W] -> uint8 [R, count]."""
    nibbles = unpack_last(packed, packed.shape[1] * 8, 4).reshape(packed.shape[0], packed.shape[1], 8)
    out = np.empty_like(nibbles)
    out[..., AWQ_ORDER] = nibbles
    return out.reshape(packed.shape[0], -1)[:, :count]


def _unpack_fast(packed: Array, k: int, n: int) -> Codes:
    """`ROWS_N_FAST` -> uint8 [N, K]."""
    tiles = np.ascontiguousarray(packed).view(np.uint16).reshape(n // FAST_ROWS, k // FAST_COLUMNS, FAST_ROWS, 2, 1, 8)
    shifts = np.array([0, 4, 8, 12], np.uint16).reshape(4, 1)
    codes = ((tiles >> shifts) & np.uint16(15)).astype(np.uint8)  # [N/4, K/64, row, half, nibble, word]
    return np.ascontiguousarray(codes.transpose(0, 2, 1, 3, 4, 5)).reshape(n, k)


def unpack(codes: Array, order: CodeOrder, k: int, n: int, bits: int) -> Codes:
    """Stored codes in any order -> uint8 [K, N], C-contiguous, in the checkpoint's own order of input channels."""
    match order.value:
        case "kn":
            out = np.asarray(codes, np.uint8)
        case "words_n":
            out = unpack_last(codes, n, bits)
        case "words_n_awq":
            out = unpack_awq(codes, n)
        case "words_k":
            out = unpack_first(codes, k, bits)
        case "rows_n":
            out = unpack_last(codes, k, bits).T
        case "rows_n_int8":
            # q = value + 128 is a flip of the sign bit.
            out = (np.ascontiguousarray(codes).view(np.uint8) ^ np.uint8(0x80)).T
        case _:
            out = _unpack_fast(codes, k, n).T
    return np.ascontiguousarray(out)


def pack_last(codes: Codes, bits: int) -> npt.NDArray[np.int32]:
    """Inverse of `unpack_last`: uint8 [R, C] -> int32 [R, ceil(C bits / 32)], zero padded."""
    per_word = WORD_BITS // bits
    padding = -codes.shape[1] % per_word
    padded = np.pad(codes, ((0, 0), (0, padding))) if padding else np.ascontiguousarray(codes)
    octets = padded if bits == 8 else padded[:, 0::2] | (padded[:, 1::2] << np.uint8(4))
    return np.ascontiguousarray(octets).view(np.int32)


def pack_awq(codes: Codes) -> npt.NDArray[np.int32]:
    """Inverse of `unpack_awq`: uint8 [R, C], C a multiple of 8 -> int32 [R, C / 8]."""
    runs = codes.reshape(codes.shape[0], -1, 8)
    return pack_last(runs[..., AWQ_ORDER].reshape(codes.shape), 4)
