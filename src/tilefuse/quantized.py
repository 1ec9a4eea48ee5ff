"""A quantised linear layer as a checkpoint stores it: the seam between the readers and the packer.

Notation: K input channels, N output channels, group g, G = ceil(K / g); q a code, z a zero point, s a scale.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse import validation
from tilefuse.codes import unpack

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

    def codes_kn(self) -> npt.NDArray[np.uint8]:
        """The codes as uint8 [K, N], C-contiguous, rows sorted by ``perm`` where there is one.

        A new array, except that `CodeOrder.KN` without ``perm`` returns ``codes`` itself.
        """
        out = unpack(self.codes, self.order, self.k, self.n, self.bits)
        return out if self.perm is None else out[self.perm]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The weights as float32 [K, N] in the checkpoint's own order of inputs, so ``y = x @ dequantize() + bias``.

        Exact for float16 and bfloat16 scales with integer zero points: a code difference has 9 bits and such a scale at
        most 11. With float32 scales the product, and with ``mins`` the sum, is rounded once to float32.
        """
        weights = self.codes_kn().astype(np.float32)
        scales = self.scales.astype(np.float32)
        whole = self.k // self.group  # groups that are not short
        head = weights[: whole * self.group].reshape(whole, self.group, self.n)
        tail = weights[whole * self.group :]
        # float32 throughout: a scale that overflows float16 arithmetic must not do so here.
        if self.mins is None:
            assert self.zeros is not None
            zeros = self.zeros.astype(np.float32)
            head -= zeros[:whole, None, :]
            head *= scales[:whole, None, :]
            tail -= zeros[whole:]
            tail *= scales[whole:]
        else:
            mins = self.mins.astype(np.float32)
            head *= scales[:whole, None, :]
            head += mins[:whole, None, :]
            tail *= scales[whole:]
            tail += mins[whole:]
        if self.perm is None:
            return weights
        out = np.empty_like(weights)
        out[self.perm] = weights
        return out

    def validate(self, *, where: Mapping[str, str] | None = None) -> None:
        """Check every shape, dtype and value that the packer and the kernels rely on.

        Args:
            where: What to call an attribute in messages (``{"scales": "'h.0.weight_scale' in 'model.safetensors'"}``);
                the default is the layer's name and the attribute's.

        Raises:
            ShapeError: An array does not have the shape that k, n, bits, group and order imply.
            DtypeError: An array has a dtype that is not taken.
            QuantizationError: A scale, minimum or bias is NaN or infinite or overflows bfloat16; a code or a zero point
                is above 2^bits - 1; ``perm`` is not a permutation.
        """
        validation.check(self, where or {})
