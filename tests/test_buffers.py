"""Memory for weights: no two buffers overlap, none is wasted, and what is dropped goes back."""

from __future__ import annotations

import gc
import itertools
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import SANITIZED

from tilefuse._buffers import REGION, address, weights_empty

SIZES = [0, 1, 64, (64 << 10) - 64, 64 << 10, (64 << 10) + 64, 1_100_000, 2_196_000, 8 << 20, (8 << 20) + 64, REGION]


def overlaps(buffers: list[np.ndarray]) -> bool:
    places = sorted((address(buffer), address(buffer) + buffer.nbytes) for buffer in buffers if buffer.nbytes)
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(places))


def anonymous() -> int:
    """Anonymous memory of this process, bytes."""
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def test_buffers_are_whole_aligned_and_apart() -> None:
    buffers = [weights_empty(size) for size in SIZES * 3]
    assert [buffer.nbytes for buffer in buffers] == SIZES * 3
    assert all(buffer.dtype == np.uint8 and buffer.flags.writeable for buffer in buffers)
    assert all(address(buffer) % 64 == 0 for buffer in buffers if buffer.nbytes)
    assert not overlaps(buffers)


def test_threads_get_buffers_of_their_own() -> None:
    def take(seed: int) -> list[np.ndarray]:
        sizes = np.random.default_rng(seed).integers(64 << 10, 3 << 20, 40)
        return [weights_empty(int(size)) for size in sizes]

    with ThreadPoolExecutor(8) as pool:
        taken = [buffer for found in pool.map(take, range(8)) for buffer in found]
    assert len(taken) == 320
    assert not overlaps(taken)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(SANITIZED, reason="the sanitizers' own memory counts")
def test_small_layers_take_their_own_size_and_give_it_back() -> None:
    size, count = 2_196_000, 56  # a 4-bit layer of 2048 x 2048; 14 to a region
    gc.collect()
    before = anonymous()
    buffers = [weights_empty(size) for _ in range(count)]
    for buffer in buffers:
        buffer[:] = 1
    # A page each, a huge page at the end of each region, and one region that others have begun.
    most = count * (size + 4096) + 5 * (2 << 20)
    assert count * size <= anonymous() - before + (1 << 20) <= most + (1 << 20)
    del buffers, buffer
    gc.collect()
    assert anonymous() - before <= REGION + (4 << 20)  # the region that is being cut stays
