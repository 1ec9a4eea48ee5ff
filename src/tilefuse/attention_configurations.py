"""What an attention xclbin is built for: head size, columns, the objects that move, and what each tile's memory holds.

As with the products (`tilefuse.configurations`) a configuration knows no lengths, heads or routing: these reach the
cores at the head of each query tile, and the command processor as descriptors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from tilefuse import arch
from tilefuse.configurations import Budget, Item, checked_int
from tilefuse.errors import PlanError

ROW_TILE = 128
"""Query rows that share a word of the routing, and that a column computes at a time."""

CORE_ROWS = ROW_TILE // arch.CORE_ROWS
"""Query rows of a core."""

KEY_TILE = 64
"""Keys of a tile, and of an INT8 scale."""

INT8_OBJECTS = 3
"""Objects of an INT8 tile: codes of K, two halves of V."""

WIDE_OBJECTS = 4
"""Objects of a 16-bit tile: two halves of K, two of V."""

HEAD_DIMS = (64, 128)
"""Head sizes that there are kernels for; smaller heads are padded with zeros."""

SHARES = (1, 2, 4)
"""Columns that may read one stream of keys and values."""

PIECE_ROWS = 8
"""Rows of results that a core sends at a time."""

PIECES = CORE_ROWS // PIECE_ROWS
"""Times that a core sends for a query tile."""

META_BYTES = 64
"""Bytes behind an object of keys or values, and behind a piece of results (kernels/aie/attention_layout.h)."""

HEADER_BYTES = 64
"""Bytes before a core's queries: counts of tiles, positions, masks."""

_OPERAND = 72
"""Bytes of 64 bfp16 values."""

STACK = 3328
"""Bytes of stack (assumed, as for a GEMM; a build measures the frames)."""

CONSTANTS = 320
"""Bytes of constants that a kernel keeps in the core's memory."""

STATE_BYTES = CORE_ROWS * 4 + CORE_ROWS // 8 * 64 * 4
"""Bytes of the maxima and sums of a core's rows."""

SCORES_BYTES = CORE_ROWS * KEY_TILE * 4 + 2 * CORE_ROWS * 4 + META_BYTES
"""Bytes of the raw scores of a core's rows by a key tile, and of each row a multiplier and an offset."""

P_BYTES = CORE_ROWS // 8 * KEY_TILE // 8 * 2 * _OPERAND + CORE_ROWS // 8 * 64 * 2 + META_BYTES
"""Bytes of the weights of a core's rows by a key tile, and by what their outputs shrink."""


@dataclass(frozen=True)
class AttentionConfiguration:
    """One xclbin of attention.

    Args:
        d: Size of a head: 64 or 128.
        columns: Columns of the array, 1 to 8.
        blocks: Heads whose 32 rows a core takes past the same keys, 1 or 2 (as memory permits: 1 for d = 128).
        share: Columns that read one stream of keys and values, each for its own heads: 1, 2 or 4; divides ``columns``.

    Raises:
        PlanError: There is no such kernel, or it doesn't fit the array.
    """

    d: int
    columns: int = arch.COLUMNS
    blocks: int = 1
    share: int = 1

    op: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        for name in ("d", "columns", "blocks", "share"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name))
        if self.d not in HEAD_DIMS:
            known = " and ".join(map(str, HEAD_DIMS))
            raise PlanError(f"d = {self.d}: kernels are for heads of {known}; pad smaller heads with zeros")
        if not 1 <= self.columns <= arch.COLUMNS:
            raise PlanError(f"columns = {self.columns}: the array has 1 to {arch.COLUMNS}")
        if self.blocks not in (1, 2):
            raise PlanError(f"blocks = {self.blocks}: 1 or 2 heads of a core")
        if self.share not in SHARES or self.columns % self.share:
            raise PlanError(f"share = {self.share}: 1, 2 or 4 columns of {self.columns}, which it has to divide")
        for budget in self.budgets():
            if budget.used > budget.limit:
                raise PlanError(f"{self.name} does not fit: {budget}")

    @cached_property
    def kernel(self) -> str:
        """Name of the kernel object."""
        return f"attention_bf16_d{self.d}_{CORE_ROWS}x{KEY_TILE}"

    @cached_property
    def name(self) -> str:
        """Unique among configurations; what the xclbin's file is called."""
        return f"{self.kernel}_{self.blocks}b{self.share}s_{self.columns}c"

    @property
    def stack_bytes(self) -> int:
        """Stack of a core."""
        return STACK

    @property
    def teams(self) -> int:
        """Streams of keys and values: each is read by `share` columns."""
        return self.columns // self.share

    @property
    def heads(self) -> int:
        """Heads that read one stream at a time."""
        return self.blocks * self.share

    # --- objects, in bytes --------------------------------------------------------------------------------------------

    @property
    def kv_object(self) -> int:
        """Keys or values that a core takes at a time."""
        return _OPERAND * self.d + META_BYTES

    @property
    def q_object(self) -> int:
        """Queries of a core, of one head: header, a scale for each row, codes, what codes leave as bfp16."""
        return HEADER_BYTES + CORE_ROWS * (4 + self.d) + CORE_ROWS * self.d // 64 * _OPERAND

    @property
    def y_object(self) -> int:
        """Results that a core sends at a time: bfloat16 rows, and fp32 maximum and sum of each."""
        return PIECE_ROWS * self.d * 2 + META_BYTES

    @property
    def o_bytes(self) -> int:
        """fp32 sums of a core's outputs, of one head."""
        return CORE_ROWS * self.d * 4

    @property
    def kv_depth(self) -> int:
        """Objects of keys and values in a core: two heads take both halves of a 16-bit tile at once."""
        return self.blocks + 1

    @property
    def kv_l2_depth(self) -> int:
        """Objects of keys and values in a memory tile: as many as its descriptors allow."""
        return 8

    def tile_bytes(self, *, int8: bool) -> int:
        """Bytes that a key tile of that kind streams, values included."""
        return self.kv_object * (INT8_OBJECTS if int8 else WIDE_OBJECTS)

    def budgets(self) -> Iterator[Budget]:
        """Of a core and of the fullest memory tile."""
        core = (
            Item("stack", self.stack_bytes),
            Item("outputs", self.o_bytes, self.blocks),
            Item("queries", self.q_object, self.blocks),
            Item("keys and values", self.kv_object, self.kv_depth),
            Item("scores", SCORES_BYTES),
            Item("weights", P_BYTES, self.blocks),
            Item("maxima and sums", STATE_BYTES, self.blocks),
            Item("results", self.y_object),
            Item("constants", CONSTANTS),
        )
        yield Budget("core", core, arch.CORE.memory)
        memtile = (
            Item("keys and values", self.kv_object, self.kv_l2_depth),
            Item("queries", arch.CORE_ROWS * self.q_object, 2),
            Item("results", arch.CORE_ROWS * self.y_object, 2),
        )
        yield Budget("memory tile", memtile, arch.MEMTILE.memory)
