"""A quantised linear layer as a checkpoint stores it: the seam between the readers and the packer.

Notation: K input channels, N output channels, group g, G = ceil(K / g); q a code, z a zero point, s a scale.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


class CodeOrder(enum.StrEnum):
    """How the integer codes lie in the array that the checkpoint stores. b = bits, W = 32 / b codes in a word."""

    KN = "kn"
    """uint8 [K, N], one unsigned code a byte."""
    WORDS_N = "words_n"
    """int32 [K, ceil(N b / 32)]: W consecutive output channels a word, lowest bits first (8-bit AWQ gemm, Quark's
    ``pack_method: "order"``)."""
    WORDS_N_AWQ = "words_n_awq"
    """int32 [K, N / 8], 4 bits: nibble i holds output channel 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i] (AutoAWQ gemm)."""
    WORDS_K = "words_k"
    """int32 [ceil(K b / 32), N]: W consecutive input channels a word, lowest bits first (GPTQ)."""
    ROWS_N = "rows_n"
    """int32 [N, ceil(K b / 32)]: one row an output channel, W consecutive input channels a word, lowest bits first
    (compressed-tensors pack-quantized, AutoAWQ gemv)."""
    ROWS_N_INT8 = "rows_n_int8"
    """int8 [N, K]: signed codes, q = value + 128 (compressed-tensors int-quantized and naive-quantized)."""
    ROWS_N_FAST = "rows_n_fast"
    """int16 [N / 4, K], 4 bits: AutoAWQ gemv_fast. Tiles of 4 output x 64 input channels are 64 words, 16 words an
    output channel; in each run of 32 input channels word w holds, low nibble first, channels w, w + 8, w + 16 and
    w + 24."""


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """One quantised linear layer, ``y = x W + bias`` with W [K, N].

    ``w[k, n] = (q[k, n] - zeros[k // g, n]) * scales[k // g, n]``, or ``q * scales + mins`` when ``mins`` is given.
    When ``perm`` is given, ``codes`` are still in the checkpoint's order: input channel ``perm[i]`` of the checkpoint
    is row i of the sorted matrix, whose groups are consecutive; k above counts sorted rows, and the layer computes
    ``x[:, perm] @ W_sorted``.

    Attributes:
        name: Name of the layer in the checkpoint.
        format: Name of the source format, e.g. ``"awq-gemm"``.
        k: Input channels.
        n: Output channels.
        bits: 4 or 8.
        group: Input channels that share a scale (K for per-channel and per-tensor scales).
        codes: The checkpoint's own array (often a view of a mapped file), laid out as ``order`` says.
        order: Layout of ``codes``.
        scales: [G, N] float16, bfloat16 or float32.
        zeros: [G, N] uint8, or None when ``mins`` is given. Symmetric schemes hold 2^(bits - 1) throughout.
        mins: [G, N] float16, bfloat16 or float32, or None.
        bias: [N] float32, or None.
        perm: [K] int32 permutation of the inputs, or None.
        symmetric: Whether the source scheme has no zero points.
    """

    name: str
    format: str
    k: int
    n: int
    bits: int
    group: int
    codes: Array = field(repr=False)
    order: CodeOrder
    scales: Array = field(repr=False)
    zeros: Array | None = field(repr=False)
    mins: Array | None = field(default=None, repr=False)
    bias: Array | None = field(default=None, repr=False)
    perm: Array | None = field(default=None, repr=False)
    symmetric: bool = False
