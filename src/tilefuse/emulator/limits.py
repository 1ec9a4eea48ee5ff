"""What a design uses of each tile, against what the tile has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from tilefuse import arch
from tilefuse.arch import TileKind, TileLimits
from tilefuse.errors import ArrayLimitError

Place = tuple[int, int]
"""Column and row."""


@dataclass
class Channel:
    """A DMA channel in use."""

    number: int
    what: str
    descriptors: int


@dataclass
class TileUse:
    """What is used of a tile."""

    place: Place
    memory: list[tuple[str, int]] = field(default_factory=list)
    """(what, bytes)."""
    locks: list[tuple[str, int]] = field(default_factory=list)
    """(what, number)."""
    inputs: list[Channel] = field(default_factory=list)
    outputs: list[Channel] = field(default_factory=list)

    @property
    def kind(self) -> TileKind:
        """Which kind of tile it is."""
        return arch.kind_of(self.place[1])

    @property
    def limits(self) -> TileLimits:
        """What it has."""
        return arch.LIMITS[self.kind]

    @property
    def bytes_used(self) -> int:
        """Bytes of memory, each buffer rounded up to its alignment."""
        return sum(-(-size // arch.BUFFER_ALIGNMENT) * arch.BUFFER_ALIGNMENT for _, size in self.memory)

    @property
    def locks_used(self) -> int:
        """Locks."""
        return sum(number for _, number in self.locks)

    @property
    def descriptors_used(self) -> int:
        """Descriptors of the static program; a shim's are run-time ones, and not counted here."""
        return sum(channel.descriptors for channel in self.inputs + self.outputs)

    def __str__(self) -> str:
        return f"{self.kind} {self.place}"

    def add_channel(self, sends: bool, what: str, descriptors: int, pinned: int | None) -> Channel:
        """Takes a channel: ``pinned``, or the first that is free.

        Raises:
            ArrayLimitError: There is none left, or the pinned one is taken.
        """
        used = self.outputs if sends else self.inputs
        have = self.limits.channels_out if sends else self.limits.channels_in
        direction = "MM2S (output)" if sends else "S2MM (input)"
        taken = {channel.number: channel.what for channel in used}
        free = [number for number in range(have) if number not in taken]
        if pinned is not None and pinned not in free:
            reason = f"{taken[pinned]} has it" if pinned in taken else f"there are {have}"
            raise ArrayLimitError(f"{what}: {direction} channel {pinned} of {self} is not to be had: {reason}")
        if not free:
            raise ArrayLimitError(
                f"{what}: {self} has {have} {direction} channels, and they are taken by {', '.join(taken.values())}"
            )
        channel = Channel(free[0] if pinned is None else pinned, what, descriptors)
        used.append(channel)
        return channel

    def check(self) -> None:
        """Raises `ArrayLimitError` unless it all fits."""
        limits = self.limits
        if limits.memory and self.bytes_used > limits.memory:
            raise ArrayLimitError(
                f"{self} has {limits.memory} bytes; the design needs {self.bytes_used}, "
                f"{self.bytes_used - limits.memory} too many:\n{self.memory_table()}"
            )
        if self.locks_used > limits.locks:
            parts = ", ".join(f"{what} {number}" for what, number in self.locks)
            raise ArrayLimitError(f"{self} has {limits.locks} locks; the design needs {self.locks_used}: {parts}")
        if self.kind is not TileKind.SHIM:
            self._check_descriptors()

    def _check_descriptors(self) -> None:
        limits = self.limits
        halves = limits.descriptors // limits.descriptors_a_channel
        for half in range(halves):
            channels = [
                (direction, channel)
                for direction, used in (("S2MM", self.inputs), ("MM2S", self.outputs))
                for channel in used
                if channel.number % halves == half
            ]
            need = sum(channel.descriptors for _, channel in channels)
            if need > limits.descriptors_a_channel:
                which = "" if halves == 1 else " even" if half == 0 else " odd"
                parts = ", ".join(f"{d} {c.number} ({c.what}) {c.descriptors}" for d, c in channels)
                raise ArrayLimitError(
                    f"{self}: its{which} channels have {limits.descriptors_a_channel} descriptors; the design needs "
                    f"{need}: {parts}; take smaller depths"
                )

    def memory_table(self) -> str:
        """What lies in the tile, a line each, and the sum."""
        lines = [f"  {size:>8}  {what}" for what, size in self.memory]
        return "\n".join([*lines, f"  {self.bytes_used:>8}  of {self.limits.memory}"])


def check_static_pattern(
    what: str, kind: TileKind, dims: Sequence[Sequence[int]], itemsize: int, nbytes: int
) -> tuple[list[int], list[int]]:
    """Sizes and strides of a fifo's stream pattern over an object of ``nbytes``.

    Raises:
        ArrayLimitError: The tile's descriptors can't say it, or it does not cover the object.
    """
    limits = arch.LIMITS[kind]
    text = f"{what}: dimensions {[tuple(dim) for dim in dims]} of {itemsize}-byte elements"
    if kind is TileKind.SHIM:
        raise ArrayLimitError(f"{text} at a shim; there the run-time sequence gives the pattern (tap)")
    if len(dims) > limits.dimensions:
        raise ArrayLimitError(f"{text}: {len(dims)} dimensions; a descriptor of a {kind} has {limits.dimensions}")
    sizes, strides = [int(dim[0]) for dim in dims], [int(dim[1]) for dim in dims]
    for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        innermost = i == len(dims) - 1
        if size < 1 or stride < 1:
            raise ArrayLimitError(f"{text}: sizes and strides are 1 or more")
        if size > arch.STATIC_SIZE:
            raise ArrayLimitError(f"{text}: size {size}; the compiler takes {arch.STATIC_SIZE} at most: factor it")
        if stride > arch.STATIC_STRIDE:
            raise ArrayLimitError(f"{text}: stride {stride}; the compiler takes {arch.STATIC_STRIDE} at most")
        if innermost and stride == 1:
            words = -(-size * itemsize // arch.WORD)
            if size * itemsize % arch.WORD:
                raise ArrayLimitError(f"{text}: runs of {size * itemsize} bytes; DMAs move multiples of {arch.WORD}")
        else:
            words = size
            if innermost and itemsize != arch.WORD:
                raise ArrayLimitError(
                    f"{text}: the innermost stride is {stride}; only elements of {arch.WORD} bytes can be picked singly"
                )
            if stride * itemsize % arch.WORD:
                raise ArrayLimitError(f"{text}: stride {stride} is no multiple of {arch.WORD} bytes")
            if size > 1 and stride * itemsize // arch.WORD > limits.stride:
                raise ArrayLimitError(
                    f"{text}: a stride of {stride * itemsize // arch.WORD} words; a {kind} takes {limits.stride}"
                )
        outermost_is_implied = i == 0 and len(dims) == limits.dimensions
        if words > max(limits.size, arch.STATIC_SIZE if outermost_is_implied else 0):
            raise ArrayLimitError(f"{text}: size {words} (words); a {kind} counts up to {limits.size}: factor it")
    if prod(sizes) * itemsize != nbytes:
        raise ArrayLimitError(f"{text}: they cover {prod(sizes) * itemsize} bytes of an object of {nbytes}")
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if (last + 1) * itemsize > nbytes:
        raise ArrayLimitError(f"{text}: they reach element {last} of an object of {nbytes // itemsize}")
    return sizes, strides


def check_length(what: str, kind: TileKind, nbytes: int) -> None:
    """Raises `ArrayLimitError` unless a descriptor of the tile can move ``nbytes``."""
    limits = arch.LIMITS[kind]
    if nbytes % arch.WORD:
        raise ArrayLimitError(f"{what}: {nbytes} bytes; DMAs move multiples of {arch.WORD}")
    if nbytes // arch.WORD > limits.length:
        raise ArrayLimitError(
            f"{what}: {nbytes // arch.WORD} words; a descriptor of a {kind} moves {limits.length} at most"
        )
