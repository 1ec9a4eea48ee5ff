"""DMA access patterns of the host side, and what the shim's descriptors can say of them.

A pattern is up to four nested loops over the words of a host buffer. Its outermost loop is the descriptor's repeat; the
next has no limit, because the hardware derives it from the length; the inner two have the limits of `arch.SHIM`, unless
the pattern is a contiguous run, which needs no loops at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from tilefuse import arch
from tilefuse.errors import PlanError

_NAMES = ("outermost", "third", "second", "innermost")


@dataclass(frozen=True)
class Tap:
    """An access pattern over a host buffer of 32-bit words, outermost loop first, in words throughout."""

    offset: int
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]

    @classmethod
    def run(cls, offset: int, words: int, repeat: int = 1) -> Tap:
        """``words`` contiguous words, read ``repeat`` times."""
        return cls(offset, (repeat, 1, 1, words), (0, 0, 0, 1))

    @property
    def words(self) -> int:
        """Words moved."""
        return prod(self.sizes)

    @property
    def end(self) -> int:
        """One past the last word touched."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)) + 1

    @property
    def contiguous(self) -> bool:
        """Whether the inner three loops are one run."""
        expected = 1
        for size, stride in zip(self.sizes[:0:-1], self.strides[:0:-1], strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def check(self, what: str, buffer_words: int, causes: tuple[str, str, str, str] = ("", "", "", "")) -> None:
        """Raises PlanError for what the shim would refuse.

        Args:
            what: The transfer, for messages.
            buffer_words: Words of the host buffer.
            causes: For each loop, what of the problem sets its size and stride ("N = 4096"), for messages.
        """
        limits = arch.SHIM
        for i in range(4):
            size, stride = self.sizes[i], self.strides[i]
            said = f"{what}: {causes[i]} needs" if causes[i] else f"{what}: its {_NAMES[i]} loop has"
            if size < 1:
                raise PlanError(f"{said} a size of {size}; a loop runs at least once")
            if i == 0 and size > limits.repeat:
                raise PlanError(f"{said} {size} repeats; the shim allows {limits.repeat}, split the transfer")
            if i >= 2 and size > limits.size and not self.contiguous:
                raise PlanError(f"{said} a size of {size}; the shim allows {limits.size}")
            if size > 1 and stride < 0:
                raise PlanError(f"{said} a stride of {stride} words; a descriptor can't go backwards")
            if size > 1 and stride == 0 and i > 0:
                raise PlanError(f"{said} a stride of 0 words; only the outermost loop may stand still")
            if size > 1 and stride > limits.stride:
                raise PlanError(f"{said} a stride of {stride} words; the shim allows {limits.stride}")
        if self.words // self.sizes[0] > limits.length:
            raise PlanError(
                f"{what}: {self.words // self.sizes[0]} words; a descriptor moves at most {limits.length} before it "
                "repeats: split the transfer"
            )
        if self.offset < 0 or self.end > buffer_words:
            raise PlanError(f"{what}: touches words {self.offset} to {self.end - 1} of a buffer of {buffer_words}")

    def __str__(self) -> str:
        loops = " ".join(f"{size}@{stride}" for size, stride in zip(self.sizes, self.strides, strict=True) if size > 1)
        return f"+{self.offset} {loops or '1@1'}"


@dataclass(frozen=True)
class Transfer:
    """One task of a shim channel."""

    stream: str
    """``x`` and ``w`` go to the array, ``y`` comes from it; also the name of the host buffer."""
    index: int
    """Which of the streams: of a GEMM's x the array row, of a GEMV's 0; of w and y the column. With two weight streams
    a column, of x and w twice the column, and 1 more for the second."""
    tap: Tap


@dataclass(frozen=True)
class Segment:
    """Transfers that are issued together and waited for together: one task group."""

    transfers: tuple[Transfer, ...]

    @property
    def tasks(self) -> int:
        """Tasks to issue."""
        return len(self.transfers)


def outstanding(
    segments: Sequence[Segment], window: int, channel: Callable[[Transfer], tuple[str, int]]
) -> Iterator[Counter[tuple[str, int]]]:
    """Tasks that each channel may have once a segment is issued, with ``window`` segments open at a time.

    Args:
        segments: In the order of their issue.
        window: Segments open at a time; the oldest is waited for when as many are.
        channel: The channel that takes a transfer.
    """
    counts = [Counter(channel(transfer) for transfer in segment.transfers) for segment in segments]
    for last in range(len(segments)):
        yield sum(counts[max(0, last + 1 - window) : last + 1], Counter())
