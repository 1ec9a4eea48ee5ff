"""What a shim's descriptor can say, at its limits and one past them. The limits: xdna2-iron.md, section 1.4."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle_plan import words_of

from tilefuse.descriptors import Segment, Tap, Transfer, outstanding
from tilefuse.errors import PlanError

ROOM = 1 << 34
"""Words of a buffer that no tap here leaves."""


@pytest.mark.parametrize(
    ("sizes", "strides", "said"),
    [
        ((1, 1, 1, 0), (0, 0, 0, 1), r"innermost loop has a size of 0; a loop runs at least once"),
        ((-1, 1, 1, 8), (0, 0, 0, 1), r"outermost loop has a size of -1"),
        ((65, 1, 1, 8), (0, 0, 0, 1), r"outermost loop has 65 repeats; the shim allows 64, split the transfer"),
        ((1, 1, 2, 1024), (0, 0, 2048, 1), r"innermost loop has a size of 1024; the shim allows 1023"),
        ((1, 1, 1024, 8), (0, 0, 16, 1), r"second loop has a size of 1024; the shim allows 1023"),
        ((1, 2, 1, 8), (0, (1 << 20) + 1, 0, 1), r"third loop has a stride of 1048577 words; the shim allows 1048576"),
        ((2, 1, 1, 8), ((1 << 20) + 1, 0, 0, 1), r"outermost loop has a stride of 1048577 words"),
        ((1, 1, 2, 8), (0, 0, 0, 1), r"second loop has a stride of 0 words; only the outermost loop may stand still"),
        ((1, 1, 1, 8), (0, 0, 0, 0), r"innermost loop has a stride of 0 words"),
        ((1, 2, 1, 8), (0, -8, 0, 1), r"third loop has a stride of -8 words; a descriptor can't go backwards"),
        ((2, 1, 1, 8), (-8, 0, 0, 1), r"outermost loop has a stride of -8 words"),
        ((1, 1, 1, 1 << 32), (0, 0, 0, 1), r"4294967296 words; a descriptor moves at most 4294967295"),
    ],
)
def test_refused(sizes: tuple[int, int, int, int], strides: tuple[int, int, int, int], said: str) -> None:
    with pytest.raises(PlanError, match=f"^the weights of column 3: .*{said}"):
        Tap(0, sizes, strides).check("the weights of column 3", ROOM)


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [
        ((64, 1, 1, 8), (0, 0, 0, 1)),  # read 64 times
        ((64, 1, 1, 8), (1 << 20, 0, 0, 1)),
        ((1, 1, 2, 1023), (0, 0, 2048, 1)),
        ((1, 1, 1023, 8), (0, 0, 16, 1)),
        ((1, 4096, 8, 8), (0, 512, 16, 1)),  # the third loop follows from the length
        ((1, 2, 2, 8), (0, 1 << 20, 1 << 20, 1)),
        ((1, 1, 1, 8), (1 << 30, 1 << 30, 0, 1)),  # a loop that runs once needs no stride
        ((1, 1, 1, (1 << 32) - 1), (0, 0, 0, 1)),  # a linear run has no limit but the length
        ((1, 3, 2048, 512), (0, 1 << 20, 512, 1)),  # and neither has what folds to one
        ((64, 1, 2048, 4096), (0, 0, 4096, 1)),
        ((1, 1, 8, 8), (0, 0, 8, 2)),
    ],
)
def test_taken(sizes: tuple[int, int, int, int], strides: tuple[int, int, int, int]) -> None:
    Tap(0, sizes, strides).check("a transfer", ROOM)


def test_the_buffers_ends() -> None:
    tap = Tap(100, (2, 3, 4, 5), (1000, 100, 10, 1))
    # The last word: 100 + 1000 + 200 + 30 + 4.
    assert tap.end == 1335
    tap.check("y", 1335)
    with pytest.raises(PlanError, match=r"^y: touches words 100 to 1334 of a buffer of 1334"):
        tap.check("y", 1334)
    with pytest.raises(PlanError, match=r"^y: touches words -1 to 6 of a buffer of 8"):
        Tap.run(-1, 8).check("y", 8)


def test_messages_name_the_cause() -> None:
    tap = Tap(0, (1, 1, 256, 32), (0, 0, 1 << 21, 1))
    with pytest.raises(PlanError, match=r"^y: N = 4194304 needs a stride of 2097152 words; the shim allows 1048576"):
        tap.check("y", ROOM, ("", "", "N = 4194304", ""))


def test_contiguous() -> None:
    assert Tap.run(5, 1 << 20, 3).contiguous
    assert Tap(0, (2, 3, 4, 5), (0, 20, 5, 1)).contiguous
    assert Tap(0, (2, 3, 1, 5), (99, 5, 77, 1)).contiguous  # what runs once has no stride, and repeats are apart
    assert not Tap(0, (1, 3, 4, 5), (0, 21, 5, 1)).contiguous
    assert not Tap(0, (1, 1, 4, 5), (0, 0, 6, 1)).contiguous
    assert not Tap(0, (1, 1, 1, 5), (0, 0, 0, 2)).contiguous


def test_printing() -> None:
    assert str(Tap(7, (2, 1, 4, 5), (0, 0, 10, 1))) == "+7 2@0 4@10 5@1"
    assert str(Tap.run(0, 1)) == "+0 1@1"


@given(
    offset=st.integers(0, 50),
    sizes=st.tuples(*[st.integers(1, 5)] * 4),
    strides=st.tuples(*[st.integers(0, 40)] * 4),
)
def test_extent_and_contiguity(
    offset: int, sizes: tuple[int, int, int, int], strides: tuple[int, int, int, int]
) -> None:
    tap = Tap(offset, sizes, strides)
    words = list(words_of(tap))
    assert (tap.words, tap.end) == (len(words), max(words) + 1)
    once = words[: len(words) // sizes[0]]
    assert tap.contiguous == (once == list(range(offset, offset + len(once))))


def test_outstanding() -> None:
    """With two segments open, a channel has what the last two brought; a third segment waits for the first."""

    def segment(*names: str) -> Segment:
        return Segment(tuple(Transfer(name[0], int(name[1]), Tap.run(0, 1)) for name in names))

    segments = [segment("w0", "x0", "x0", "y0"), segment("w0", "y0"), segment("w1", "y1"), segment("w1", "w1", "y1")]
    assert [segment.tasks for segment in segments] == [4, 2, 2, 3]

    def channel(transfer: Transfer) -> tuple[str, int]:
        return ("w", 0) if transfer.stream == "x" else (transfer.stream, transfer.index)

    assert list(outstanding(segments, 2, channel)) == [
        Counter({("w", 0): 3, ("y", 0): 1}),
        Counter({("w", 0): 4, ("y", 0): 2}),
        Counter({("w", 0): 1, ("y", 0): 1, ("w", 1): 1, ("y", 1): 1}),
        Counter({("w", 1): 3, ("y", 1): 2}),
    ]
    assert [max(counts.values()) for counts in outstanding(segments, 1, channel)] == [3, 1, 1, 2]
    assert list(outstanding([], 2, channel)) == []
