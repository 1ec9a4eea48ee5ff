"""A NumPy model of the packed layout, written from design.md and not from the C++ or from layout.py's offsets.

`pack_oracle` is slow and plain on purpose: it places every tile by the sentences of the design. `encode` stores codes
in each checkpoint order, likewise.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse.quantized import CodeOrder, QuantizedLinear

Array = npt.NDArray[Any]
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
BITS_OF = {
    CodeOrder.KN: (4, 8),
    CodeOrder.WORDS_N: (4, 8),
    CodeOrder.WORDS_N_AWQ: (4,),
    CodeOrder.WORDS_K: (4, 8),
    CodeOrder.ROWS_N: (4, 8),
    CodeOrder.ROWS_N_INT8: (8,),
    CodeOrder.ROWS_N_FAST: (4,),
}


def tile_group(k: int, group: int, floating: bool) -> int:
    """Rows of a tile that can share a scale: none may span two source groups nor, for minima, the end of K."""
    for size in (128, 64, 32):
        starts = range(0, k, size)
        whole = all(start // group == (min(start + size, k) - 1) // group for start in starts)
        if whole and (not floating or k % size == 0):
            return size
    raise ValueError("not representable")


def pack_oracle(
    codes: Array, scales: Array, zeros: Array | None, mins: Array | None, bits: int, group: int, columns: int
) -> npt.NDArray[np.uint8]:
    """The packed bytes of sorted codes uint8 [K, N] with bfloat16 scales and minima [G, N] or uint8 zero points."""
    k, n = codes.shape
    k_padded, n_padded = -(-k // 512) * 512, -(-n // (64 * columns)) * 64 * columns
    size = tile_group(k, group, mins is not None)

    # Scales and zeros at each padded tile group; a group whose first row is padding is all 0.
    rows = np.array([start // group for start in range(0, k, size)])
    grid_scales = np.zeros((k_padded // size, n_padded), np.uint16)
    grid_scales[: len(rows), :n] = scales.view(np.uint16)[rows]
    offsets = mins.view(np.uint16) if mins is not None else zeros
    assert offsets is not None
    grid_offsets = np.zeros((k_padded // size, n_padded), offsets.dtype)
    grid_offsets[: len(rows), :n] = offsets[rows]

    grid_codes = np.zeros((k_padded, n_padded), np.uint8)
    if zeros is not None:
        grid_codes[:] = np.repeat(grid_offsets, size, axis=0)
    grid_codes[:k, :n] = codes

    streams = []
    for column in range(columns):
        for n_tile in range(column, n_padded // 64, columns):
            for k_tile in range(k_padded // 128):
                block = grid_codes[k_tile * 128 :, n_tile * 64 :][:128, :64]
                blocks = block.reshape(16, 8, 8, 8).transpose(0, 2, 3, 1)  # [k block, n block, n, k]
                code_bytes = blocks[..., 0::2] + 16 * blocks[..., 1::2] if bits == 4 else blocks
                cells = slice(k_tile * 128 // size, (k_tile + 1) * 128 // size), slice(n_tile * 64, n_tile * 64 + 64)
                tile = code_bytes.tobytes() + grid_scales[cells].tobytes() + grid_offsets[cells].tobytes()
                streams.append(tile + bytes(-len(tile) % 64))
    return np.frombuffer(b"".join(streams), np.uint8)


def _words(digits: Array, bits: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """[R, C] codes -> int32 [R, ceil(C bits / 32)], lowest bits first; the spare bits are random."""
    per_word = 32 // bits
    rows, columns = digits.shape
    count = -(-columns // per_word)
    padded = rng.integers(0, 2**bits, (rows, count * per_word), np.uint32)
    padded[:, :columns] = digits
    shifts = np.arange(per_word, dtype=np.uint32) * bits
    return np.bitwise_or.reduce(padded.reshape(rows, count, per_word) << shifts, axis=2).view(np.int32)


def encode(codes: Array, order: CodeOrder, bits: int, rng: np.random.Generator) -> Array:
    """Stores codes uint8 [K, N] in ``order``."""
    k, n = codes.shape
    match order:
        case CodeOrder.KN:
            return codes.copy()
        case CodeOrder.WORDS_N:
            return _words(codes, bits, rng)
        case CodeOrder.WORDS_N_AWQ:
            shuffled = codes.reshape(k, n // 8, 8)[:, :, AWQ_NIBBLES].reshape(k, n)
            return _words(shuffled, bits, rng)
        case CodeOrder.WORDS_K:
            return np.ascontiguousarray(_words(codes.T, bits, rng).T)
        case CodeOrder.ROWS_N:
            return _words(codes.T, bits, rng)
        case CodeOrder.ROWS_N_INT8:
            return (np.ascontiguousarray(codes.T).astype(np.int16) - 128).astype(np.int8)
        case CodeOrder.ROWS_N_FAST:
            # [n tile, channel, k tile, run, nibble, word]
            tiles = codes.T.astype(np.uint16).reshape(n // 4, 4, k // 64, 2, 4, 8)
            packed = tiles[..., 0, :] | tiles[..., 1, :] << 4 | tiles[..., 2, :] << 8 | tiles[..., 3, :] << 12
            words = np.ascontiguousarray(packed.transpose(0, 2, 1, 3, 4)).reshape(n // 4, k)
            return words.view(np.int16)


def random_layer(
    rng: np.random.Generator,
    k: int,
    n: int,
    bits: int,
    group: int,
    order: CodeOrder = CodeOrder.KN,
    *,
    floating: bool = False,
    perm: bool = False,
    bias: bool = False,
    scale_dtype: Any = ml_dtypes.bfloat16,
) -> tuple[QuantizedLinear, Array]:
    """A random layer, and its codes uint8 [K, N] in the checkpoint's row order."""
    groups = -(-k // group)
    codes = rng.integers(0, 2**bits, (k, n), np.uint8)
    scales = (rng.standard_normal((groups, n)) * 0.01).astype(scale_dtype)
    layer = QuantizedLinear(
        name=f"layer.{order.value}",
        format="random",
        k=k,
        n=n,
        bits=bits,
        group=group,
        codes=encode(codes, order, bits, rng),
        order=order,
        scales=scales,
        zeros=None if floating else rng.integers(0, 2**bits, (groups, n), np.uint8),
        mins=rng.standard_normal((groups, n)).astype(scale_dtype) if floating else None,
        bias=rng.standard_normal(n).astype(np.float32) if bias else None,
        perm=rng.permutation(k).astype(np.int32) if perm else None,
    )
    return layer, codes
