"""What `tilefuse.attention` is asked for, checked: options, lengths, and where each sequence lies."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.arrays import is_torch
from tilefuse.errors import DtypeError, OptionError, ShapeError
from tilefuse.tilemix.grid import MAX_LEN
from tilefuse.tilemix.operands import Operand

MOST_CHANNELS = 512
"""Channels of a head; sums of products of codes stay exact in float32 up to 1040."""


@dataclass(frozen=True)
class QuantSpec:
    """How the INT8 path quantises.

    Codes are ``round(x / scale)`` to nearest, ties to even, from -127 to 127, of bfloat16-rounded values; a scale is
    the largest magnitude / 127.

    Attributes:
        q: Queries share a scale by "row", or by "block" of 128 rows.
        smooth: What is subtracted from keys first, and its product with q added back: the mean of each "block" of 64
            keys, the "global" mean of the call's keys (of a sequence and head), or "none". With "global" and q="block"
            results depend on how a prompt is cut into calls.
    """

    q: str = "row"
    smooth: str = "block"

    def __post_init__(self) -> None:
        for name, value, taken in (
            ("q", self.q, ("row", "block")),
            ("smooth", self.smooth, ("block", "none", "global")),
        ):
            if not isinstance(value, str) or value not in taken:
                raise OptionError(f"quant.{name} is {value!r}: pass one of {', '.join(map(repr, taken))}")


@dataclass(frozen=True, eq=False)
class Sequences:
    """Where the sequences of a batch lie, each int64 [batch].

    Attributes:
        q_first, k_first: First row of each in a packed array; zeros where the batch is an axis.
        q_len, k_len: Lengths in tokens.
        packed: Whether rows of all sequences follow each other in one axis.
    """

    q_first: npt.NDArray[np.int64]
    k_first: npt.NDArray[np.int64]
    q_len: npt.NDArray[np.int64]
    k_len: npt.NDArray[np.int64]
    packed: bool

    @property
    def batch(self) -> int:
        return len(self.q_len)


@dataclass(eq=False)
class Call:
    """One checked call, as a back end takes it.

    Operands are [B, H, L, d], or [sum L, H, d] where ``sequences.packed``; k and v are None where ``cache`` has them.

    Attributes:
        scale: Of scores, before the exponential.
        window: Keys that a query sees up to its own position, or None.
        words: uint64 [map heads, row tiles, words]: bit j of a row tile's words set where its j-th group is INT8.
            None: all 16-bit.
        row_tiles: int64 [batch], each sequence's first row tile in ``words``.
        groups: int64 [batch], key tiles to a bit.
        lse: float32 [B, H, Lq] or [sum Lq, H], or None.
    """

    q: Operand
    k: Operand | None
    v: Operand | None
    out: Operand
    lse: npt.NDArray[np.float32] | None
    sequences: Sequences
    heads: int
    heads_kv: int
    dim: int
    dim_v: int
    causal: bool
    window: int | None
    scale: float
    quant: QuantSpec
    words: npt.NDArray[np.uint64] | None
    row_tiles: npt.NDArray[np.int64]
    groups: npt.NDArray[np.int64]


def integer(value: Any, name: str, least: int, most: int) -> int:
    """``value`` as an int within limits.

    Raises:
        DtypeError: Not an integer.
        OptionError: Out of range.
    """
    if isinstance(value, bool | np.bool_):
        raise DtypeError(f"{name} is a {type(value).__name__}: pass an integer from {least} to {most}")
    try:
        found = operator.index(value)
    except TypeError:
        raise DtypeError(f"{name} is a {type(value).__name__}: pass an integer from {least} to {most}") from None
    if not least <= found <= most:
        raise OptionError(f"{name} is {found}: pass an integer from {least} to {most}")
    return found


def flag(value: Any, name: str) -> bool:
    """``value`` as a bool; DtypeError for anything that is none."""
    if not isinstance(value, bool | np.bool_):
        raise DtypeError(f"{name} is {value!r}: pass True or False")
    return bool(value)


def scale_of(scale: Any, dim: int) -> float:
    """The scale of scores, 1 / sqrt(d) for None.

    Raises:
        DtypeError, OptionError: Not a number, or none that float32 can hold, with log2(e), as a normal positive number.
    """
    if scale is None:
        return 1.0 / math.sqrt(dim)
    try:
        found = float(scale)
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(
            f"scale is a {type(scale).__name__}: pass a positive number, or None for 1 / sqrt(d)"
        ) from None
    except OverflowError:
        found = math.inf
    if not 2.0**-100 <= found <= 2.0**100:
        raise OptionError(f"scale is {found}: pass a number from 2^-100 to 2^100, or None for 1 / sqrt(d)")
    return found


def starts_of(value: Any, name: str, total: int) -> npt.NDArray[np.int64]:
    """Offsets of the sequences of a packed array of ``total`` rows, int64 [B + 1].

    Raises:
        ShapeError, DtypeError: They are no such offsets.
    """
    if is_torch(value):
        value = value.detach().cpu().numpy()
    try:
        starts = np.asarray(value)
    except ValueError:
        raise ShapeError(f"{name} is ragged: pass B + 1 offsets, 0 first") from None
    if starts.ndim != 1 or not len(starts):
        raise ShapeError(f"{name} has shape {list(starts.shape)}: pass B + 1 offsets, 0 first")
    if starts.dtype.kind not in "iu":
        raise DtypeError(f"{name} is {starts.dtype}: pass integers")
    if starts.dtype.itemsize == 8 and starts.dtype.kind == "u" and int(starts.max()) > total:
        raise ShapeError(f"{name} ends at {int(starts.max())}: must end at {total}, the rows of the array")
    starts = starts.astype(np.int64)
    if starts[0]:
        raise ShapeError(f"{name} starts at {starts[0]}: must start at 0")
    falling = np.flatnonzero(np.diff(starts) < 0)
    if len(falling):
        at = int(falling[0])
        raise ShapeError(f"{name} falls from {starts[at]} to {starts[at + 1]} at {at + 1}: offsets must not decrease")
    if starts[-1] != total:
        raise ShapeError(f"{name} ends at {starts[-1]}: must end at {total}, the rows of the array")
    return starts


def split_offsets(cu_seqlens: Any) -> tuple[Any, Any]:
    """Offsets of queries and of keys: those of a pair, or the same twice."""
    if (
        isinstance(cu_seqlens, tuple | list)
        and len(cu_seqlens) == 2
        and not isinstance(cu_seqlens[0], int | float | np.number)
    ):
        return cu_seqlens[0], cu_seqlens[1]
    return cu_seqlens, cu_seqlens


def packed_sequences(cu_seqlens: Any, q_rows: int, k_rows: int | None) -> Sequences:
    """Sequences of packed arrays.

    Args:
        cu_seqlens: B + 1 offsets, integers, NumPy, torch or a sequence of ints; or a pair (queries', keys').
        k_rows: Rows of k, None where there are none (a cache has them).

    Raises:
        ShapeError, DtypeError: Offsets don't fit.
    """
    starts_q, starts_k = split_offsets(cu_seqlens)
    pair = starts_q is not starts_k
    names = ("cu_seqlens[0]", "cu_seqlens[1]") if pair else ("cu_seqlens", "cu_seqlens")
    q_starts = starts_of(starts_q, names[0], q_rows)
    k_starts = starts_of(starts_k, names[1], k_rows) if k_rows is not None else q_starts
    if len(k_starts) != len(q_starts):
        raise ShapeError(f"cu_seqlens[1] has {len(k_starts)} offsets and cu_seqlens[0] {len(q_starts)}: pass as many")
    for name, starts in zip(names, (q_starts, k_starts), strict=True):
        _check_length(int(np.diff(starts).max(initial=0)), name)
    return Sequences(q_starts[:-1], k_starts[:-1], np.diff(q_starts), np.diff(k_starts), True)


def batch_sequences(batch: int, q_len: int, k_len: int) -> Sequences:
    """Sequences of arrays with a batch axis."""
    _check_length(q_len, "q")
    _check_length(k_len, "k")
    zeros = np.zeros(batch, np.int64)
    return Sequences(zeros, zeros, np.full(batch, q_len, np.int64), np.full(batch, k_len, np.int64), False)


def _check_length(length: int, name: str) -> None:
    if length > MAX_LEN:
        raise ShapeError(f"{name} has a sequence of {length} tokens: up to {MAX_LEN} are taken")
