"""A map of score tiles: one bit for each row tile and group of key tiles, set where the scores are computed in INT8."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from tilefuse.errors import RoutingError
from tilefuse.tilemix.grid import WORD_BITS, Grid, ceil_div, index

WORD = np.dtype("<u8")
"""Words are little-endian wherever they are, so that every device reads the same buffer."""

BoolArray = npt.NDArray[np.bool_]
WordArray = npt.NDArray[np.uint64]


@dataclass(frozen=True, eq=False, repr=False)
class Routing:
    """Which score tiles of one sequence are INT8.

    Attributes:
        grid: The tiles.
        words: Read-only uint64 [row tiles, words], or [kv heads, row tiles, words] for a map of each head: group j is
            bit ``j & 63`` of word ``j >> 6``, 1 for INT8. The bits of groups that a row tile doesn't execute are 0.
        name: What it was made from, for people.

    Raises:
        RoutingError: The words' dtype or shape doesn't fit the grid, or a bit is set that governs no executed tile.
    """

    grid: Grid
    words: WordArray
    name: str = field(default="")

    def __post_init__(self) -> None:
        words = np.asarray(self.words)
        if words.dtype != np.uint64:
            raise RoutingError(f"words are {words.dtype}: pass uint64")
        least = max(1, ceil_div(self.grid.groups, WORD_BITS))
        if words.ndim not in (2, 3) or words.shape[-2] != self.grid.row_tiles or words.shape[-1] < least:
            raise RoutingError(
                f"words have shape {words.shape}: {self.grid.row_tiles} row tiles of {self.grid.groups} groups take "
                f"[{self.grid.row_tiles}, {least}] or [kv heads, {self.grid.row_tiles}, {least}]"
            )
        if words.ndim == 3 and not len(words):
            raise RoutingError(f"words have shape {words.shape}: pass the map of at least one KV head")
        words = np.array(words, WORD, order="C")
        words.flags.writeable = False
        object.__setattr__(self, "words", words)
        legal = _pack(self.grid.legal(), words.shape[-1])
        wrong = np.argwhere(words & ~legal)
        if len(wrong):
            raise RoutingError(
                f"words[{', '.join(map(str, wrong[0]))}] sets bits of groups that its row tile does not execute: clear "
                "them, or make the map by Routing.from_bits"
            )

    @classmethod
    def from_bits(cls, bits: npt.ArrayLike, grid: Grid, *, words: int | None = None, name: str = "bits") -> Routing:
        """The map of ``bits``, bool [row tiles, groups] or [kv heads, row tiles, groups], True for INT8.

        Args:
            bits: What governs no executed tile is ignored.
            grid: The tiles.
            words: Words of a row; as many as it takes where None.
            name: For people.

        Raises:
            RoutingError: The bits' dtype or shape doesn't fit the grid, or ``words`` words hold fewer groups.
        """
        if not isinstance(grid, Grid):
            raise RoutingError(f"grid is a {type(grid).__name__}: pass a tilefuse.routing.Grid")
        try:
            found = np.asarray(bits)
        except ValueError:
            raise RoutingError("bits are ragged: pass bool [row tiles, groups]") from None
        if found.dtype != np.bool_:
            raise RoutingError(f"bits are {found.dtype}: pass bool, True for INT8")
        if found.ndim not in (2, 3) or found.shape[-2:] != (grid.row_tiles, grid.groups):
            raise RoutingError(
                f"bits have shape {found.shape}: the grid has [{grid.row_tiles}, {grid.groups}] row tiles and groups, "
                "with an axis of kv heads before them or not"
            )
        return cls(grid, _pack(found & grid.legal(), word_count(grid, words)), name)

    @property
    def heads(self) -> int | None:
        """KV heads that have a map of their own; None for one map of all."""
        return self.words.shape[0] if self.words.ndim == 3 else None

    def bits(self) -> BoolArray:
        """The map as bool [row tiles, groups] or [kv heads, row tiles, groups], True for INT8."""
        as_bytes = self.words.view(np.uint8)
        return np.unpackbits(as_bytes, axis=-1, count=self.grid.groups, bitorder="little").view(np.bool_)

    def coverage(self, of: Literal["tile", "group", "cell"] = "tile") -> float:
        """Share in INT8, 0 where there is nothing to compute.

        Args:
            of: ``"tile"``: of the tiles that are executed; ``"group"``: of the bits that govern any; ``"cell"``: of the
                scores that no mask hides.

        Raises:
            RoutingError: ``of`` is none of them.
        """
        if of == "tile":
            weights = self.grid.weights()
        elif of == "group":
            weights = self.grid.legal().astype(np.int64)
        elif of == "cell":
            weights = self.grid.cells()
        else:
            raise RoutingError(f'of is {of!r}: pass "tile", "group" or "cell"')
        bits = self.bits()
        total = int(weights.sum()) * (self.heads or 1)
        return int((bits * weights).sum()) / total if total else 0.0

    def chunk(self, query_len: int, key_len: int) -> Routing:
        """The map of the last ``query_len`` queries once there are ``key_len`` keys, this being a whole context's map.

        A query keeps the bits of its absolute row tile, whatever the chunks: so this map's grid is of as many queries
        as keys, the most that the context may hold.

        Args:
            query_len: Queries of the chunk.
            key_len: Keys so far, the chunk's included.

        Raises:
            RoutingError: This map isn't of a whole causal context, the chunk lies beyond it, or one of its row tiles
                would straddle two row tiles of the context.
        """
        whole = self.grid
        if whole.offset or not whole.causal:
            raise RoutingError(
                f"a map of {whole.query_len} queries and {whole.key_len} keys (causal: {whole.causal}) has no chunks: "
                "build it causal, for as many queries as keys"
            )
        key_len = index(key_len, "key_len", 0, whole.key_len)
        query_len = index(query_len, "query_len", 0, key_len)
        start, phase = divmod(key_len - query_len, whole.block_m)
        if phase and phase + query_len > whole.block_m:
            raise RoutingError(
                f"a chunk of {query_len} queries at position {key_len - query_len} straddles row tiles: start it at a "
                f"multiple of {whole.block_m}, or split it there"
            )
        grid = replace(whole, query_len=query_len, key_len=key_len)
        kept = self.words[..., start : start + grid.row_tiles, :]
        return Routing(grid, kept & _pack(grid.legal(), kept.shape[-1]), self.name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Routing):
            return NotImplemented
        return self.grid == other.grid and np.array_equal(self.words, other.words)

    def __hash__(self) -> int:
        return hash((self.grid, self.words.tobytes()))

    def __repr__(self) -> str:
        grid = self.grid
        return (
            f"<Routing {self.name}: {grid.query_len} x {grid.key_len}, {grid.row_tiles} row tiles x {grid.groups} "
            f"groups of {grid.group}, {self.coverage():.1%} of tiles INT8>"
        )


def word_count(grid: Grid, words: int | None) -> int:
    """Words of a row: ``words``, or as many as the groups take.

    Raises:
        RoutingError: ``words`` words hold fewer groups than the grid has.
    """
    least = max(1, ceil_div(grid.groups, WORD_BITS))
    if words is None:
        return least
    words = index(words, "words", 1)
    if words < least:
        raise RoutingError(
            f"words is {words}: {grid.groups} groups of {grid.group} tiles take {least}; pass words={least} or more, "
            "or a larger group"
        )
    return words


def _pack(bits: BoolArray, words: int) -> WordArray:
    padded = np.zeros((*bits.shape[:-1], words * WORD_BITS), np.bool_)
    padded[..., : bits.shape[-1]] = bits
    return np.packbits(padded, axis=-1, bitorder="little").view(WORD)
