"""Memory for packed weights: aligned, and in huge pages where it pays."""

from __future__ import annotations

import mmap
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.layout import ALIGNMENT

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64, and on aarch64 with 4 KiB base pages."""


REGION = 32 << 20
"""Bytes of a piece of memory that several layers share."""

_LEAST, _MOST = 64 << 10, 8 << 20
"""Bytes of a buffer that is cut from a region. Beyond, the rest of its last huge page is a small loss."""

_PAGE = 4096


def advise_huge(mapping: mmap.mmap) -> None:
    """Asks for huge pages under ``mapping``; a kernel without them ignores it or refuses, and nothing is lost."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """A writable uint8 [nbytes], aligned to `ALIGNMENT`, or to `HUGE_PAGE` from that size on; contents undefined.

    Decoding reads every packed weight once a token, so it runs at the speed of memory. With 4 KiB pages the page walks
    and the prefetchers that stop at each page boundary cost a large part of that speed; huge pages give it back. They
    must be asked for before the memory is first touched, hence an own mapping. It is private: a shared anonymous one,
    Python's default, is shmem, where ``madvise`` usually has no effect.
    """
    if nbytes < HUGE_PAGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -address(raw) % ALIGNMENT
        return raw[start : start + nbytes]
    # The unaligned ends are address space only: pages that are never touched take no memory.
    try:
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{nbytes} bytes are not to be had: {error}") from None
    advise_huge(mapping)
    raw = np.frombuffer(mapping, np.uint8)
    start = -address(raw) % HUGE_PAGE
    return raw[start : start + nbytes]


class _Regions:
    """Cuts buffers from regions; a region lasts as long as any of its buffers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            if self._rest.nbytes < nbytes:
                self._rest = aligned_empty(REGION)
            taken = self._rest[:nbytes]
            self._rest = self._rest[-(-nbytes // _PAGE) * _PAGE :]
        return taken


_regions = _Regions()


def weights_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """As `aligned_empty`, for weights that stay: those below some megabytes lie in huge pages, too, side by side.

    Alone in huge pages a layer of 2.2 MB would take 4, and one of 1 MB would have none. The price is that memory goes
    back by regions, once no buffer of the region is in use.
    """
    return _regions.take(nbytes) if _LEAST <= nbytes <= _MOST else aligned_empty(nbytes)


def address(array: npt.NDArray[Any] | None) -> int:
    """Address of the first element, 0 for None."""
    return 0 if array is None else int(array.__array_interface__["data"][0])
