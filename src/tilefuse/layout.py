"""The packed weight format, version 1: the only place that knows byte offsets.

A *tile* holds ``KT = 128`` input channels by ``NT = 64`` output channels, as one contiguous, 64-byte aligned run:

1. codes: blocks of 8x8 weights, block order ``[KT/8][NT/8]``; in a block the output channel is the outer index and 8
   consecutive input channels the inner one. 4-bit codes: 4 bytes an output channel, low nibble = even input channel.
   8-bit codes: 8 bytes an output channel.
2. scales, bfloat16, ``[KT/tile_group][NT]``.
3. zero points, same shape: uint8 codes (``z8``: ``w = (q - z) s``) or bfloat16 minima (``m16``: ``w = q s + m``).
4. zero bytes up to a multiple of 64.

Tiles are ordered ``[column][output tile div columns][k tile]``: output tile ``t`` belongs to array column
``t mod columns``, so the whole stream of a column is one run. K is padded to ``KT * ROWS`` and N to ``NT * columns``
with weights that dequantise to exactly 0 (scale, zero point and code all 0 in groups that are padding throughout; the
code of a padded row in a group that is partly real equals its zero point).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

from tilefuse.errors import LayoutError

FORMAT = "tilefuse-packed"
"""Value of ``format`` in the metadata of a packed file."""

FORMAT_VERSION = 1
"""Bumped whenever the meaning of a packed byte changes; a file of another version is refused."""

KT = 128
"""Input channels in a tile: the commonest group size, so that a tile has whole groups of 32, 64 or 128."""

NT = 64
"""Output channels in a tile."""

BLOCK = 8
"""Rows and columns of a code block: the 8x8x8 shape of the AIE2P multiplier (B operand n-major)."""

ROWS = 4
"""Compute rows of the array that share the reduction of a GEMV: k tile ``r + 4 i`` goes to row ``r``."""

DEFAULT_COLUMNS = 8
"""Columns of the npu2 array."""

MIN_TILE_GROUP = 32
"""Smallest group that the kernels take."""

MAX_K = 32768
"""Input channels at most: the 64-entry repeat field of the array's descriptors is sized for it (see `plan`)."""

SLICE_N = 32768
"""Output channels in one pass of the array; a larger N runs in slices, each a contiguous sub-run of every column."""

MAX_N = 1 << 20
"""Output channels at most: four times the largest vocabulary in use, far below what would overflow an offset."""

ALIGNMENT = 64
"""Bytes: tiles start on this boundary and are padded to it."""


class ZeroKind(enum.StrEnum):
    """What a tile stores beside its scales."""

    Z8 = "z8"
    """uint8 zero points: ``w = (q - z) s``."""
    M16 = "m16"
    """bfloat16 minima: ``w = q s + m``."""


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Where everything is in the packed form of one linear layer.

    Args:
        k: Input channels, 1 <= k <= `MAX_K`.
        n: Output channels, 1 <= n <= `MAX_N`.
        bits: Bits of a code, 4 or 8.
        group: Consecutive input channels that share a scale in the source (K for per-channel scales).
        zero: What is stored beside the scales.
        columns: Columns of the array that the stream is interleaved over, 1 to 8.

    Raises:
        LayoutError: The layer does not fit the format; the message says which limit.
    """

    k: int
    n: int
    bits: int
    group: int
    zero: ZeroKind = ZeroKind.Z8
    columns: int = DEFAULT_COLUMNS

    def __post_init__(self) -> None:
        for name in ("k", "n", "bits", "group", "columns"):
            if not isinstance(getattr(self, name), Integral):
                raise LayoutError(f"{name} = {getattr(self, name)!r}: must be an integer")
            object.__setattr__(self, name, int(getattr(self, name)))  # NumPy's would overflow in sizes
        if self.zero not in list(ZeroKind):
            raise LayoutError(f"zero = {self.zero!r}: pass a ZeroKind, {' or '.join(ZeroKind)}")
        object.__setattr__(self, "zero", ZeroKind(self.zero))
        if not 1 <= self.k <= MAX_K:
            raise LayoutError(
                f"K = {self.k} input channels: the packed format holds 1 to {MAX_K}; "
                "split the layer along K and add the results"
            )
        if not 1 <= self.n <= MAX_N:
            raise LayoutError(
                f"N = {self.n} output channels: the packed format holds 1 to {MAX_N}; split the layer along N"
            )
        if self.bits not in (4, 8):
            raise LayoutError(f"bits = {self.bits}: the packed format holds 4- and 8-bit codes")
        if not 1 <= self.columns <= DEFAULT_COLUMNS:
            raise LayoutError(f"columns = {self.columns}: the array has 1 to {DEFAULT_COLUMNS}")
        if self.group < 1:
            raise LayoutError(f"group = {self.group}: must be at least 1 (K for per-channel scales)")
        if self.tile_group < MIN_TILE_GROUP:
            if self.group >= self.k or math.gcd(self.group, KT) >= MIN_TILE_GROUP:  # K is to blame, not the group
                raise LayoutError(
                    f"K = {self.k} with minima: a minimum can't be cancelled in rows that pad a group, so K must be a "
                    f"multiple of {MIN_TILE_GROUP}; requantise with zero points"
                )
            raise LayoutError(
                f"group size {self.group} with K = {self.k}: its largest common group with a tile of {KT} is "
                f"{self.tile_group}, and at least {MIN_TILE_GROUP} is needed; requantise with a group size that is a "
                f"multiple of {MIN_TILE_GROUP}"
            )

    @cached_property
    def tile_group(self) -> int:
        """Input channels that share a scale in a tile: 32, 64 or 128."""
        if self.group >= self.k:
            # One group for all of K: rows repeat in every tile. A minimum can't cancel the rows that pad the last tile,
            # so there the group must end where K does.
            if self.zero is ZeroKind.Z8 or self.k % KT == 0:
                return KT
            return math.gcd(self.k, KT)
        common = math.gcd(self.group, KT)
        return math.gcd(common, self.k) if self.zero is ZeroKind.M16 else common

    @property
    def groups_per_tile(self) -> int:
        """Rows of scales in a tile."""
        return KT // self.tile_group

    @property
    def source_groups(self) -> int:
        """Rows of scales in the source, G = ceil(K / group)."""
        return -(-self.k // self.group)

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in a tile."""
        return KT * NT * self.bits // 8

    @property
    def scale_offset(self) -> int:
        """Byte offset of the scales in a tile."""
        return self.code_bytes

    @property
    def zero_offset(self) -> int:
        """Byte offset of the zero points or minima in a tile."""
        return self.scale_offset + 2 * self.groups_per_tile * NT

    @property
    def zero_bytes(self) -> int:
        """Bytes of one zero point or minimum."""
        return 1 if self.zero is ZeroKind.Z8 else 2

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile, a multiple of `ALIGNMENT`."""
        return _round_up(self.zero_offset + self.zero_bytes * self.groups_per_tile * NT, ALIGNMENT)

    @property
    def k_padded(self) -> int:
        """K rounded up to whole tiles for each of the `ROWS` rows."""
        return _round_up(self.k, KT * ROWS)

    @property
    def n_padded(self) -> int:
        """N rounded up to whole tiles for each column."""
        return _round_up(self.n, NT * self.columns)

    @property
    def k_tiles(self) -> int:
        """K tiles stored, padding included."""
        return self.k_padded // KT

    @property
    def k_tiles_used(self) -> int:
        """K tiles that hold at least one real input channel; a device that needs no padding reads only these."""
        return -(-self.k // KT)

    @property
    def n_tiles(self) -> int:
        """Output tiles stored, padding included."""
        return self.n_padded // NT

    @property
    def n_tiles_used(self) -> int:
        """Output tiles that hold at least one real output channel."""
        return -(-self.n // NT)

    @property
    def tiles_per_column(self) -> int:
        """Output tiles of one column."""
        return self.n_tiles // self.columns

    @property
    def column_bytes(self) -> int:
        """Bytes of one column's stream."""
        return self.tiles_per_column * self.k_tiles * self.tile_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole packed buffer: the size query of `tilefuse.pack`."""
        return self.columns * self.column_bytes

    @property
    def bits_per_weight(self) -> float:
        """Packed bits per real weight, padding included."""
        return self.nbytes * 8 / (self.k * self.n)

    def tile_offset(self, n_tile: int, k_tile: int) -> int:
        """Byte offset of output tile ``n_tile``, k tile ``k_tile``."""
        if not (0 <= n_tile < self.n_tiles and 0 <= k_tile < self.k_tiles):
            raise LayoutError(f"tile ({n_tile}, {k_tile}) is outside {self.n_tiles} x {self.k_tiles} tiles")
        column, slot = n_tile % self.columns, n_tile // self.columns
        return column * self.column_bytes + (slot * self.k_tiles + k_tile) * self.tile_bytes
