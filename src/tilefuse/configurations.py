"""What an xclbin is built for: a kernel, its tiles in a core's memory, and the streams that feed it.

A configuration knows no M, K or N: these reach the cores in-band, so one xclbin serves every shape. What it fixes is
what the compiler lays out: objects, depths, buffers, and by that the memory of every tile, which is checked here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from tilefuse import arch
from tilefuse.errors import PlanError
from tilefuse.layout import KT, MAX_K, NT, ROWS, Layout, ZeroKind

BAND_ROWS = 16
"""Rows of activations in a band: two blocks of 8, so that a GEMM's inner loop has 2 x 2 sums."""

MOST_BANDS = arch.SHIM.size // (BAND_ROWS * ROWS)
"""Bands whose results, of all four array rows, one loop of a descriptor can write."""

BAND_BYTES = BAND_ROWS * KT * 9 // 8
"""Bytes of a band of one k tile as bfp16: 9 bytes for 8 values."""

L2_BATCH = 4
"""Objects of a GEMM's core that move as one through a memory tile: k tiles of weights, bands of activations. K is
stored in multiples of `ROWS` tiles, so it divides both."""

BASELINE_ROWS = 32
"""Rows of activations in a block of the GEMM baseline, as in the design that it stands for."""

GEMM_STACK = 3328
"""Bytes of stack, GEMM (0xD00, what mlir-aie's own whole-array GEMM asks for)."""

GEMM_CONSTANTS = 192
"""Bytes of constants that a GEMM kernel on bfp16 activations keeps in the core's memory."""

GEMV_STACK = 2048
"""Bytes of stack, GEMV: twice the default, for kernels that spill (assumed; a build measures their frames)."""

X_PART = 16
"""K tiles of activations in a weight-sized object, for a GEMV with two streams: a power of two, and with their head no
larger than the smallest tile."""

X_HEAD_BYTES = 64
"""Bytes before them: the parameters, and alignment."""

RESIDENT_BYTES = MAX_K // ROWS * 2
"""Bytes of a core's share of the longest x."""

_OPERAND = 72
"""Bytes of 64 bfp16 values."""


def checked_int(value: Any, name: str) -> int:
    """``value`` as Python's integer: NumPy's would overflow in sizes.

    Raises:
        PlanError: It is none.
    """
    if not isinstance(value, Integral):
        raise PlanError(f"{name} = {value!r}: pass an integer")
    return int(value)


class Op(enum.StrEnum):
    """The designs."""

    GEMM = "gemm"
    GEMV = "gemv"
    GEMM_BASELINE = "gemm_baseline"
    GEMV_BASELINE = "gemv_baseline"


@dataclass(frozen=True)
class Item:
    """Memory of a tile: ``count`` buffers of ``nbytes``."""

    name: str
    nbytes: int
    count: int = 1

    @property
    def total(self) -> int:
        """Bytes."""
        return self.nbytes * self.count


@dataclass(frozen=True)
class Budget:
    """What a tile's memory holds.

    All sizes are multiples of 64 bytes. So buffers that the compiler lays one after another, aligned to no more than
    32, are aligned as kernels need: hardware would truncate another address, and not complain.
    """

    tile: str
    items: tuple[Item, ...]
    limit: int

    @property
    def used(self) -> int:
        """Bytes."""
        return sum(item.total for item in self.items)

    def __str__(self) -> str:
        items = ", ".join(
            f"{item.name} {item.count} x {item.nbytes}" if item.count > 1 else f"{item.name} {item.nbytes}"
            for item in self.items
        )
        return f"{self.tile}: {self.used} of {self.limit} bytes ({items})"


@dataclass(frozen=True)
class Weights:
    """How weights are stored, as far as a configuration cares."""

    tag: str
    """As in kernel names: ``w4g128``, ``w8g32m``, ``bf16``."""
    tile_bytes: int
    bits: int
    groups: int
    """Rows of scales in a tile."""
    minima: bool

    @property
    def side_by_side(self) -> bool:
        """Whether there are kernels for two tiles side by side: they keep no dequantised weights."""
        return self.bits == 4 and not self.minima

    @classmethod
    def of(cls, layout: Layout) -> Weights:
        """Of a packed layer.

        Raises:
            PlanError: ``layout`` is no packed layer's.
        """
        if not isinstance(layout, Layout):
            raise PlanError(
                f"the layout is a {type(layout).__name__}: pass a packed layer's Layout, or plan a baseline with it"
            )
        minima = layout.zero is ZeroKind.M16
        tag = f"w{layout.bits}g{layout.tile_group}{'m' if minima else ''}"
        return cls(tag, layout.tile_bytes, layout.bits, layout.groups_per_tile, minima)


BF16 = Weights("bf16", KT * NT * 2, 16, 0, False)
"""Unquantised weights, for the baselines."""


@dataclass(frozen=True)
class Configuration:
    """One xclbin.

    Args:
        op: Which design.
        weights: How weights are stored.
        columns: Columns of the array, 4 to 8 for a GEMM, 1 to 8 for a GEMV.
        tiles: Packed tiles side by side in a core, GEMM: 1 or 2 (64 or 128 outputs).
        max_bands: Bands of 16 rows that a core has sums for, GEMM: 1 to `MOST_BANDS`, as memory permits.
        streams: Weight streams of a column, GEMV: 1 or 2.
        join: Pieces of results that a memory tile takes from a core as one object, GEMM: 1, 2 or 4. More make room for
            the results of more bands, so that cores are sooner rid of them; but a plan's bands must fill the objects.

    Raises:
        PlanError: It doesn't fit the array; the message has the budget.
    """

    op: Op
    weights: Weights
    columns: int = arch.COLUMNS
    tiles: int = 1
    max_bands: int = 1
    streams: int = 1
    join: int = 1

    def __post_init__(self) -> None:
        for name in ("columns", "tiles", "max_bands", "streams", "join"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name))
        gemm = self.op in (Op.GEMM, Op.GEMM_BASELINE)
        least = ROWS if gemm else 1
        if not least <= self.columns <= arch.COLUMNS:
            raise PlanError(
                f"columns = {self.columns}: a {self.op} takes {least} to {arch.COLUMNS}"
                + (f", a shim for the activations of each of {ROWS} rows; pack the layer for those" if gemm else "")
            )
        self._check_option("tiles", self.tiles, 2, Op.GEMM)
        self._check_option("streams", self.streams, 2, Op.GEMV)
        self._check_option("max_bands", self.max_bands, MOST_BANDS, Op.GEMM)
        self._check_option("join", self.join, 4, Op.GEMM)
        if self.join == 3 or self.join > self.tiles * self.max_bands:
            raise PlanError(
                f"join = {self.join}: 1, 2 or 4 pieces, and no more than a core's {self.tiles * self.max_bands}"
            )
        if self.tiles == 2 and not self.weights.side_by_side:
            raise PlanError(
                f"tiles = 2 with {self.weights.tag}: the kernels take it for 4-bit weights with zero points; "
                "take tiles = 1"
            )
        if gemm and (self.weights.bits == 16) != (self.op is Op.GEMM_BASELINE):
            raise PlanError(f"{self.weights.tag} weights: a gemm takes packed ones, and its baseline bfloat16")
        for budget in self.budgets():
            if budget.used > budget.limit:
                fewer = "; take fewer bands" if self.max_bands > 1 else ""
                raise PlanError(f"{self.name} does not fit: {budget}{fewer}")

    def _check_option(self, name: str, value: int, most: int, op: Op) -> None:
        if not 1 <= value <= most:
            raise PlanError(f"{name} = {value}: 1 to {most}")
        if value > 1 and self.op is not op:
            raise PlanError(f"{name} = {value}: a {self.op} has 1; only a {op} has more")

    @property
    def rows(self) -> int:
        """Rows of activations that a call of the kernel takes."""
        return {Op.GEMM: BAND_ROWS, Op.GEMM_BASELINE: BASELINE_ROWS}.get(self.op, 1)

    @property
    def stack_bytes(self) -> int:
        """Stack of a core, below its buffers in the same memory."""
        return GEMM_STACK if self.op in (Op.GEMM, Op.GEMM_BASELINE) else GEMV_STACK

    @property
    def sums_bytes(self) -> int:
        """Bytes of the fp32 sums that a call of the kernel adds to."""
        return self.rows * self.tiles * NT * 4

    @cached_property
    def kernel(self) -> str:
        """Name of the kernel object (kernels/aie/config.h)."""
        tag = self.weights.tag
        if self.op is Op.GEMM:
            path = "bfp16" if self.weights.minima else "mantissa"
            return f"gemm_bfp16_{tag}_{path}_{self.rows}x{KT}x{NT * self.tiles}"
        if self.op is Op.GEMM_BASELINE:
            return f"gemm_bf16_{tag}_emulated_{self.rows}x{KT}x{NT}"
        return f"gemv_bf16_{tag}_{'elementwise' if self.weights.bits == 16 else 'mantissa'}_{KT}x{NT}"

    @cached_property
    def name(self) -> str:
        """Unique among configurations; what the xclbin's file is called."""
        tile = {Op.GEMM: f"_{self.max_bands}b{self.join}j", Op.GEMV: f"_{self.streams}s"}.get(self.op, "")
        return f"{self.op}_{self.kernel.split('_', 1)[1]}{tile}_{self.columns}c"

    @cached_property
    def scratch_bytes(self) -> int:
        """Bytes that the kernel's ``prepare`` fills (asserted against the kernels by the tests)."""
        groups, bits = self.weights.groups, self.weights.bits
        if self.op is Op.GEMM and self.weights.minima:
            return KT * NT // 64 * _OPERAND
        if self.op is Op.GEMM:
            mark = 64 if bits == 8 else 0
            return self.tiles * (groups * 8 * 2 * _OPERAND + mark)
        if self.op is Op.GEMM_BASELINE:
            return KT * NT * 2
        return KT * 8 * 2 if bits == 16 else KT // 8 * _OPERAND + groups * 3 * 64 * 2

    # --- objects, in bytes --------------------------------------------------------------------------------------------

    @property
    def w_object(self) -> int:
        """Weights that a core takes at a time."""
        return self.tiles * self.weights.tile_bytes

    @property
    def w_l2_object(self) -> int:
        """Weights that a memory tile takes at a time."""
        if self.op is Op.GEMM:
            return L2_BATCH * self.w_object
        return self.w_object * (ROWS // self.streams if self.op is Op.GEMV else 1)

    @property
    def x_object(self) -> int:
        """Activations that a core takes at a time."""
        if self.op is Op.GEMM:
            return BAND_BYTES
        if self.op is Op.GEMM_BASELINE:
            return self.rows * KT * 2
        return KT * 2 * (ROWS if self.op is Op.GEMV else 1)

    @property
    def x_l2_object(self) -> int:
        """Activations that a memory tile takes at a time, GEMM."""
        return L2_BATCH * BAND_BYTES if self.op is Op.GEMM else self.x_object

    @property
    def y_object(self) -> int:
        """Results that a core sends at a time: of `rows` rows and one tile of outputs, bfloat16."""
        return self.rows * NT * 2

    @property
    def y_l2_object(self) -> int:
        """Results that a memory tile joins: `join` pieces of each of the four cores."""
        return ROWS * self.join * self.y_object

    @property
    def w_l2_depth(self) -> int:
        """Objects of weights in a memory tile: as many as its descriptors allow, whichever channels they fall to.

        A GEMM's channels of one parity have 24 descriptors: 8 for the results' way out, a depth of weights in and one
        out, 4 for activations, 2 for the results of a core.
        """
        if self.op is Op.GEMV:
            return 3
        return 5 if self.op is Op.GEMM else 2

    @property
    def x_l2_depth(self) -> int:
        """Objects of activations in a memory tile, GEMM."""
        return 4 if self.op is Op.GEMM else 2

    def x_column(self, row: int) -> int:
        """Column whose shim and memory tile bring the activations of an array row, GEMM."""
        return row * self.columns // ROWS

    # --- budgets ------------------------------------------------------------------------------------------------------

    def budgets(self) -> Iterator[Budget]:
        """Of the fullest core and the fullest memory tile."""
        yield Budget("core", self._core_items(), arch.CORE.memory)
        yield Budget("memory tile", self._memtile_items(), arch.MEMTILE.memory)

    def _core_items(self) -> tuple[Item, ...]:
        stack, scratch = Item("stack", self.stack_bytes), Item("scratch", self.scratch_bytes)
        if self.op is Op.GEMM:
            return (
                stack,
                Item("sums", self.sums_bytes, self.max_bands),
                Item("weights", self.w_object, 2),
                Item("activations", self.x_object, 2),
                Item("results", self.y_object, 2),
                scratch,
                Item("constants", GEMM_CONSTANTS),
            )
        if self.op is Op.GEMM_BASELINE:
            return (
                stack,
                Item("sums", self.sums_bytes),
                Item("weights", self.w_object),
                Item("activations", self.x_object, 2),
                Item("results", self.y_object),
                scratch,
            )
        # Of the lowest core of a column; the others have two objects of sums to pass on instead of sums and results.
        items = [
            stack,
            Item("sums", self.sums_bytes),
            Item("weights", self.w_object, 2),
            Item("results", self.y_object, 2),
            scratch,
        ]
        if self.op is Op.GEMV:
            items.append(Item("x kept", RESIDENT_BYTES))
        if self.streams == 1:
            items.append(Item("activations", self.x_object, 2))
        return tuple(items)

    def _memtile_items(self) -> tuple[Item, ...]:
        weights = Item("weights", self.w_l2_object, self.w_l2_depth * self.streams)
        if self.op in (Op.GEMV, Op.GEMV_BASELINE):
            return (weights,)
        return (
            weights,
            Item("activations", self.x_l2_object, self.x_l2_depth),
            Item("results", self.y_l2_object, 2),
        )

    def takes_bands(self, bands: int) -> bool:
        """Whether a GEMM's plan may have that many bands: they fit, and their results fill whole objects."""
        fill = self.join == self.tiles * bands or bands % self.join == 0
        return 1 <= bands <= self.max_bands and fill


def most_bands(weights: Weights, columns: int, tiles: int) -> int:
    """Bands that fit a core of a GEMM.

    Raises:
        PlanError: Not even one does, or no GEMM has these columns or tiles.
    """
    one = Configuration(Op.GEMM, weights, columns, tiles)
    core = next(one.budgets())
    return min(MOST_BANDS, 1 + (core.limit - core.used) // one.sums_bytes)
