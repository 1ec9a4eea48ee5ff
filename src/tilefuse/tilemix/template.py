"""Layouts before they meet a sequence, and the assignment of a grid's groups to INT8 up to a coverage."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal, SupportsFloat, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from tilefuse.errors import RoutingError
from tilefuse.tilemix import layouts, release
from tilefuse.tilemix.grid import BLOCK_M, BLOCK_N, Grid, IntArray, auto_group, index
from tilefuse.tilemix.routing_map import BoolArray, Routing, word_count

Auto = Literal["auto"]
Protect = str | Iterable[str]
Coverage = SupportsFloat

PROTECTABLE = ("diag", "sink")
MAX_SEED = (1 << 63) - 1
MAX_BITS = 1 << 24
"""Of a map; a sequence of a million keys has half a million with one word a row."""

_KEPT_MAPS = 128

_NAME = re.compile(r"([A-Za-z_]*[A-Za-z])_?(\d{1,3}(?:\.\d{1,9})?)?")
_FIXED = {"zero": Fraction(0), "one": Fraction(1)}
_LOCAL_SINK = "local_sink"
_DEFAULT_COVERAGE = Fraction(1, 2)
_LOCAL_SINK_COVERAGE = Fraction(3, 4)
NAMES = (*layouts.KEYS, _LOCAL_SINK)


@dataclass(frozen=True)
class Template:
    """A layout at a coverage, for sequences of any length.

    Attributes:
        layout: Its name.
        coverage: Share of the executed tiles that become INT8.
        protect: Groups that become INT8 only after all others: ``"diag"``, those that touch the row tile's own
            positions; ``"sink"``, the first of the sequence.
        seed: Of what is random, and of ties.
        compat: ``"release"`` for the maps of the paper's authors (sptrans only), None for tilefuse's.
        group: Key tiles that share a bit; ``"auto"`` for the fewest that the words hold.
        words: 64-bit words of a row; ``"auto"`` for one, or for as many as a ``group`` that is given takes.

    Raises:
        RoutingError: A value is none of these.
    """

    layout: str
    coverage: Fraction = _DEFAULT_COVERAGE
    protect: frozenset[str] = frozenset()
    seed: int = 0
    compat: str | None = None
    group: int | Auto = "auto"
    words: int | Auto = "auto"

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        if self.layout not in layouts.KEYS:
            raise RoutingError(f"layout is {self.layout!r}: pass one of {', '.join(layouts.KEYS)}")
        set_field(self, "coverage", fraction(self.coverage))
        set_field(self, "protect", _protect(self.protect))
        set_field(self, "seed", index(self.seed, "seed", 0, MAX_SEED))
        for name in ("group", "words"):
            if not _is_auto(getattr(self, name)):
                set_field(self, name, index(getattr(self, name), name, 1))
        fixed = _FIXED.get(self.layout)
        if fixed is not None and self.coverage != fixed:
            raise RoutingError(
                f"coverage is {float(self.coverage):g}: {self.layout} is the map of coverage {fixed}; leave it out"
            )
        if self.compat not in (None, "release"):
            raise RoutingError(f'compat is {self.compat!r}: pass "release" or None')
        if self.compat and (self.layout != "sptrans" or self.protect or self.seed):
            raise RoutingError(
                'compat="release" is a map of sptrans without protection, whose seed is fixed: pass neither protect '
                "nor seed, or no compat"
            )

    def build(
        self,
        query_len: int,
        key_len: int | None = None,
        *,
        causal: bool = True,
        window: int | None = None,
        capacity: int | None = None,
        group: int | Auto | None = None,
        words: int | Auto | None = None,
        block_m: int = BLOCK_M,
        block_n: int = BLOCK_N,
    ) -> Routing:
        """The map of one sequence. Maps are kept: the same arguments give the same object for a while.

        Args:
            query_len: Queries.
            key_len: Keys; as many as queries if None. The last query stands at the last key.
            causal: Whether a query sees no keys after its position.
            window: Keys that a query sees at most, up to its position; None for all.
            capacity: Keys that the context may grow to. The map is then that of a whole context of so many, cut to
                these queries: a query's bits depend neither on the chunks of a prefill nor on what is yet to come.
            group: Instead of the template's.
            words: Instead of the template's.
            block_m: Queries of a tile.
            block_n: Keys of a tile.

        Raises:
            RoutingError: A length outside its limits, more groups than the words hold, or a chunk that isn't one of the
                capacity's (`Routing.chunk`).
        """
        key_len = query_len if key_len is None else key_len
        if capacity is not None:
            whole = self.build(
                capacity,
                causal=causal,
                window=window,
                group=group,
                words=words,
                block_m=block_m,
                block_n=block_n,
            )
            return whole.chunk(query_len, key_len)
        grid = Grid(query_len, key_len, causal=causal, window=window, block_m=block_m, block_n=block_n)
        group = self.group if group is None else group
        words = self.words if words is None else words
        grid, count = _with_group(grid, group, words)
        return _build(replace(self, group="auto", words="auto"), grid, count)

    @property
    def name(self) -> str:
        """The layout, coverage and protection, as people write them."""
        if self.layout in _FIXED:
            return self.layout
        protect = "".join(f" + {name}" for name in PROTECTABLE if name in self.protect)
        compat = f" ({self.compat})" if self.compat else ""
        return f"{self.layout} {float(self.coverage):.4g}{protect}{compat}"


class _Options(TypedDict, total=False):
    protect: Protect
    seed: int
    compat: str | None
    group: int | Auto
    words: int | Auto


def named(name: str) -> Template:
    """The template that a name means: a layout's, with a percentage after it or not.

    ``"bigbird"`` is bigbird at its default coverage of one half, ``"bigbird75"`` or ``"bigbird_75"`` at three quarters;
    capitals don't matter. ``"local_sink"``'s default is three quarters.

    Raises:
        RoutingError: No layout is called so.
    """
    return by_name(name)


def by_name(name: str, coverage: Coverage | None = None, **options: Unpack[_Options]) -> Template:
    """`named`, with the options that `template` takes; a coverage and a percentage in the name exclude each other."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    layout = match.group(1).lower().removesuffix("_") if match else ""
    if match is None or layout not in NAMES:
        raise RoutingError(
            f'routing is {name!r}: pass one of {", ".join(NAMES)}, a percentage after it or not ("band75")'
        )
    percent = match.group(2)
    if percent is not None:
        if coverage is not None:
            raise RoutingError(f"routing is {name!r} and coverage {coverage!r}: pass one or the other")
        coverage = Fraction(percent) / 100
    return template(layout, coverage, **options)


def template(
    name: str,
    coverage: Coverage | None = None,
    *,
    protect: Protect = (),
    seed: int = 0,
    compat: str | None = None,
    group: int | Auto = "auto",
    words: int | Auto = "auto",
) -> Template:
    """`Template` of a layout's name, ``"local_sink"`` included, with its default coverage where that is None."""
    chosen = _protect(protect)
    if name == _LOCAL_SINK:
        name, chosen = "band", frozenset(PROTECTABLE)
        coverage = _LOCAL_SINK_COVERAGE if coverage is None else coverage
    if coverage is None:
        coverage = _FIXED.get(name, _DEFAULT_COVERAGE)
    return Template(name, fraction(coverage), chosen, seed, compat, group, words)


def scored(
    scores: npt.ArrayLike,
    coverage: Coverage,
    query_len: int,
    key_len: int,
    *,
    causal: bool = True,
    window: int | None = None,
    protect: Protect = (),
    seed: int = 0,
    group: int | Auto = "auto",
    words: int | Auto = "auto",
) -> Routing:
    """The map that makes the groups of the lowest scores INT8; see `tilefuse.routing.from_scores`."""
    try:
        found = np.asarray(scores)
    except ValueError:
        raise RoutingError("scores are ragged: pass [row tiles, groups] or [kv heads, row tiles, groups]") from None
    if found.dtype.kind not in "fiu" and found.dtype.name != "bfloat16":
        raise RoutingError(f"scores are {found.dtype}: pass real numbers")
    found = found.astype(np.float64)
    if found.ndim not in (2, 3):
        raise RoutingError(
            f"scores have shape {found.shape}: pass [row tiles, groups] or [kv heads, row tiles, groups]"
        )
    if np.isnan(found).any():
        raise RoutingError(f"scores[{', '.join(map(str, np.argwhere(np.isnan(found))[0]))}] is NaN: pass numbers")
    grid = Grid(query_len, key_len, causal=causal, window=window)
    if _is_auto(group) and found.shape[-1]:
        group = max(1, -(-grid.key_tiles // found.shape[-1]))
    grid, count = _with_group(grid, group, "auto" if _is_auto(words) else words)
    if found.shape[-2:] != (grid.row_tiles, grid.groups):
        raise RoutingError(
            f"scores have shape {found.shape}: {query_len} queries and {key_len} keys have {grid.row_tiles} row tiles "
            f"of {grid.groups} groups of {grid.group} key tiles; pass scores of that shape, or another group"
        )
    share, seed = fraction(coverage), index(seed, "seed", 0, MAX_SEED)
    kept = layouts.protected(grid, _protect(protect))
    heads = [
        _assign(np.where(kept, np.inf, head), grid, share, seed) for head in (found if found.ndim == 3 else found[None])
    ]
    bits = np.stack(heads) if heads else np.zeros(found.shape, np.bool_)
    name = f"scores {float(share):.4g}"
    return Routing.from_bits(bits.reshape(found.shape), grid, words=count, name=name)


def fraction(coverage: Coverage) -> Fraction:
    """A coverage exactly: of a float, what its shortest decimal form says.

    Raises:
        RoutingError: It isn't a number from 0 to 1.
    """
    try:
        found = coverage if isinstance(coverage, Fraction) else Fraction(repr(float(coverage)))
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None or isinstance(coverage, str) or not 0 <= found <= 1:
        shown = str(coverage) if isinstance(coverage, Fraction) else repr(coverage)
        raise RoutingError(f"coverage is {shown}: pass the share of tiles in INT8, 0 to 1")
    return found


@lru_cache(_KEPT_MAPS)
def _build(chosen: Template, grid: Grid, words: int) -> Routing:
    if chosen.layout in _FIXED:
        bits = np.full((grid.row_tiles, grid.groups), chosen.layout == "one")
    elif chosen.compat:
        bits = release.sptrans_bits(grid, chosen.coverage)
    else:
        keys = layouts.KEYS[chosen.layout](grid, chosen.seed)
        keys = np.where(layouts.protected(grid, chosen.protect), layouts.PROTECTED, keys)
        bits = _assign(-keys, grid, chosen.coverage, chosen.seed)
    return Routing.from_bits(bits, grid, words=words, name=chosen.name)


def _assign(
    cost: npt.NDArray[np.int64] | npt.NDArray[np.float64], grid: Grid, coverage: Fraction, seed: int
) -> BoolArray:
    """The groups of the lowest cost, whose tiles make up ``coverage`` of those executed to within half a group.

    Equal costs go by their hash, equal hashes by row tile and group. Groups are taken in that order while that brings
    the number of tiles nearer to the target, ``floor((2 W n + q) / (2 q))`` of W at n/q: a larger coverage only adds.
    """
    weights: IntArray = grid.weights().ravel()
    legal = np.flatnonzero(weights)
    ties = layouts.hashes(grid.row_tiles, grid.groups, seed + layouts.TIES).ravel()[legal]
    order = legal[np.argsort(ties, kind="stable")]
    order = order[np.argsort(cost.ravel()[order], kind="stable")]
    total, n, q = int(weights.sum()), coverage.numerator, coverage.denominator
    target = (2 * total * n + q) // (2 * q)
    taken = weights[order]
    # |after - target| < |before - target| if and only if before + after < 2 target.
    both = 2 * np.cumsum(taken) - taken
    bits = np.zeros(len(weights), np.bool_)
    bits[order[: np.searchsorted(both, 2 * target)]] = True
    return bits.reshape(grid.row_tiles, grid.groups)


def _with_group(grid: Grid, group: int | Auto, words: int | Auto) -> tuple[Grid, int]:
    """The grid with its group, and the words of a row."""
    if _is_auto(group):
        count = 1 if _is_auto(words) else index(words, "words", 1)  # type: ignore[arg-type]
        grid = replace(grid, group=auto_group(grid.key_len, count, grid.block_n))
    else:
        grid = replace(grid, group=index(group, "group", 1))  # type: ignore[arg-type]
    if grid.row_tiles * grid.groups > MAX_BITS:
        raise RoutingError(
            f"the map has {grid.row_tiles} row tiles of {grid.groups} groups of {grid.group}: {MAX_BITS} bits is the "
            "limit; pass a larger group, or fewer words"
        )
    return grid, word_count(grid, None if _is_auto(words) else words)  # type: ignore[arg-type]


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


def _protect(protect: Protect) -> frozenset[str]:
    try:
        names = frozenset([protect] if isinstance(protect, str) else protect)
    except TypeError:
        raise RoutingError(f'protect is {protect!r}: pass any of "diag" and "sink"') from None
    wrong = sorted(map(repr, names - set(PROTECTABLE)))
    if wrong:
        raise RoutingError(f'protect has {", ".join(wrong)}: pass any of "diag" and "sink"')
    return names
