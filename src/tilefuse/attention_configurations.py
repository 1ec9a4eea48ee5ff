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

HALF = KEY_TILE // 2
"""Keys whose bfloat16 rows, of K or V, are an object: as many bytes as the codes of a whole tile."""

INT8_OBJECTS = 3
"""Objects of an INT8 tile: codes of K, two halves of V."""

WIDE_OBJECTS = 4
"""Objects of a 16-bit tile: two halves of K, two of V."""

HEAD_DIMS = (64, 128)
"""Head sizes that there are kernels for; smaller heads are padded with zeros."""

PIECE_ROWS = 8
"""Rows of results that a core sends at a time."""

PIECES = CORE_ROWS // PIECE_ROWS
"""Times that a core sends for a query tile."""

META_BYTES = 64
"""Bytes behind an object's payload and mean: its first key, its scale. Behind a piece of results: the rows' lse."""

HEADER_BYTES = 64
"""Bytes before a core's queries: counts, positions, the multiplier of scores."""

STACK = 3328
"""Bytes of stack (assumed, as for a GEMM; a build measures the frames)."""

STATE_BYTES = 2 * CORE_ROWS * 4
"""Bytes of the running maxima and sums of a core's rows."""


@dataclass(frozen=True)
class AttentionConfiguration:
    """One xclbin of attention.

    Args:
        d: Size of a head: 64 or 128.
        columns: Columns of the array, 1 to 8.

    Raises:
        PlanError: There is no such kernel, or it doesn't fit the array.
    """

    d: int
    columns: int = arch.COLUMNS

    op: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        for name in ("d", "columns"):
            object.__setattr__(self, name, checked_int(getattr(self, name), name))
        if self.d not in HEAD_DIMS:
            known = " and ".join(map(str, HEAD_DIMS))
            raise PlanError(f"d = {self.d}: kernels are for heads of {known}; pad smaller heads with zeros")
        if not 1 <= self.columns <= arch.COLUMNS:
            raise PlanError(f"columns = {self.columns}: the array has 1 to {arch.COLUMNS}")
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
        return f"{self.kernel}_{self.columns}c"

    @property
    def stack_bytes(self) -> int:
        """Stack of a core."""
        return STACK

    # --- objects, in bytes --------------------------------------------------------------------------------------------

    @property
    def payload_bytes(self) -> int:
        """Codes of a key tile, or bfloat16 rows of half of one."""
        return KEY_TILE * self.d

    @property
    def kv_object(self) -> int:
        """Keys or values that a core takes at a time: payload, a bfloat16 mean of keys, what is said of them."""
        return self.payload_bytes + 2 * self.d + META_BYTES

    @property
    def q_object(self) -> int:
        """Queries of a core: header, a scale for each row, codes, bfloat16 rows."""
        return HEADER_BYTES + CORE_ROWS * (4 + self.d + 2 * self.d)

    @property
    def y_object(self) -> int:
        """Results that a core sends at a time: bfloat16 rows, and the lse of each in fp32."""
        return PIECE_ROWS * self.d * 2 + META_BYTES

    @property
    def o_bytes(self) -> int:
        """fp32 sums of a core's outputs."""
        return CORE_ROWS * self.d * 4

    @property
    def scores_bytes(self) -> int:
        """Raw scores of a core's rows by a key tile, a multiplier for the tile and an offset for each row."""
        return CORE_ROWS * KEY_TILE * 4 + CORE_ROWS * 4 + META_BYTES

    @property
    def p_bytes(self) -> int:
        """bfloat16 weights of a core's rows by a key tile."""
        return CORE_ROWS * KEY_TILE * 2

    @property
    def kv_l2_depth(self) -> int:
        """Objects of keys and values in a memory tile: as many as its descriptors allow."""
        return 8

    def tile_bytes(self, *, int8: bool) -> int:
        """Bytes that a key tile of that kind streams, values included."""
        return self.kv_object * (INT8_OBJECTS if int8 else WIDE_OBJECTS)

    def budgets(self) -> Iterator[Budget]:
        """Of a core and of a memory tile."""
        core = (
            Item("stack", self.stack_bytes),
            Item("outputs", self.o_bytes),
            Item("queries", self.q_object),
            Item("keys and values", self.kv_object, 2),
            Item("scores", self.scores_bytes),
            Item("weights", self.p_bytes),
            Item("maxima and sums", STATE_BYTES),
            Item("results", self.y_object),
        )
        yield Budget("core", core, arch.CORE.memory)
        memtile = (
            Item("keys and values", self.kv_object, self.kv_l2_depth),
            Item("queries", arch.CORE_ROWS * self.q_object, 2),
            Item("results", arch.CORE_ROWS * self.y_object, 2),
        )
        yield Budget("memory tile", memtile, arch.MEMTILE.memory)
