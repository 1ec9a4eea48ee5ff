"""A strict, memory-mapped reader of safetensors files.

The `safetensors` library copies every tensor that it hands to NumPy and has no bfloat16 there, so it can't give views
of a mapped file. The format is small enough to read directly: 8 bytes of header length, a JSON header, the data.
Everything that the header claims is checked before it is believed.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse._buffers import advise_huge, aligned_empty
from tilefuse.errors import FormatError
from tilefuse.layout import ALIGNMENT

Array = npt.NDArray[Any]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Names of a checkpoint's only file, and of the list of its files where there are several."""

MAX_HEADER = 100_000_000
"""Bytes: the limit that the format's own library sets."""

MAX_DIMS = 32
"""What every supported NumPy can hold."""

MAX_INDEX = 2**63 - 1

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype and shape, and where its bytes start in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class MappedFile:
    """A safetensors file mapped read-only.

    Args:
        path: The file.

    Raises:
        FormatError: The file is not a well-formed safetensors file; the message names it, and the tensor if one is at
            fault.
        OSError: It can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A pipe without a writer would block right here.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path}: not a regular file; give a safetensors file or the folder of a checkpoint")
            size = status.st_size
            if size < 8:
                raise FormatError(f"{path}: {size} bytes, too short for a safetensors file; fetch it again")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._memory: npt.NDArray[np.uint8] | None = None
        self._memory_base = 0
        (length,) = struct.unpack_from("<Q", self._map)
        if length > min(MAX_HEADER, size - 8):
            raise FormatError(
                f"{path}: the header claims {length} bytes of a file of {size} (limit {MAX_HEADER}): not a safetensors "
                "file, or truncated; fetch it again"
            )
        header = _parse_json(self._map[8 : 8 + length], str(path))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise FormatError(f"{path}: __metadata__ must map strings to strings")
        self.metadata: dict[str, str] = metadata
        self._start = 8 + length
        self._entries = {name: _entry(name, item, self._start, path) for name, item in header.items()}
        self._check_extents(self._start, size)

    def ask_for_huge_pages(self) -> None:
        """Asks for huge pages under the mapping, see `tilefuse._buffers.advise_huge`."""
        advise_huge(self._map)

    def read_to_memory(self) -> None:
        """Reads all tensors to memory in huge pages; those taken from now on are views of it, and can be written."""
        base = self._start // ALIGNMENT * ALIGNMENT  # what the file aligns stays so
        memory = aligned_empty(len(self._map) - base)
        memory[:] = np.frombuffer(self._map, np.uint8)[base:]
        self._memory, self._memory_base = memory, base

    def _check_extents(self, start: int, size: int) -> None:
        """Tensors must fill the data section end to end: overlaps and holes are both refused."""
        end, before = start, "the header"
        for name, entry in sorted(self._entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
            if entry.offset != end:
                what = "overlaps" if entry.offset < end else "leaves a hole after"
                raise FormatError(
                    f"{self.path}: tensor {name!r} at byte {entry.offset} {what} {before} (ends at {end})"
                )
            end, before = end + entry.nbytes, f"tensor {name!r}"
        if end != size:
            what = f"truncated: {before} ends" if end > size else "has bytes that no tensor covers: data ends"
            raise FormatError(f"{self.path}: {what} at byte {end} of {size}; fetch it again")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def tensor(self, name: str) -> Array:
        """A view of a tensor (a copy only where the file does not align it to its dtype), read-only in the mapping."""
        entry = self._entries[name]
        view: Array
        if self._memory is None:
            view = np.ndarray(entry.shape, entry.dtype, self._map, entry.offset)
        else:
            view = np.ndarray(entry.shape, entry.dtype, self._memory.data, entry.offset - self._memory_base)
        # Old writers did not pad the header. Kernels may not take unaligned pointers, so such tensors are copied.
        return view if view.flags.aligned else view.copy()


def _parse_json(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object, refusing invalid UTF-8 and duplicate keys."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in pairs:
            if key in out:
                raise FormatError(f"{where}: {key!r} occurs twice in the JSON")
            out[key] = value
        return out

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: not valid JSON in UTF-8 ({error})") from None
    if not isinstance(parsed, dict):
        raise FormatError(f"{where}: the JSON must be an object, not {type(parsed).__name__}")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, refusing invalid UTF-8 and duplicate keys."""
    return _parse_json(path.read_bytes(), str(path))


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INDEX  # `type is`: JSON's true is an int in Python


def _entry(name: str, item: Any, start: int, path: Path) -> Entry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: the header must give dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(f"{where}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        raise FormatError(f"{where}: shape {shape!r} is not a list of at most {MAX_DIMS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise FormatError(f"{where}: data_offsets {offsets!r} is not a pair of byte offsets")
    if math.prod(max(size, 1) for size in shape) * DTYPES[dtype].itemsize > MAX_INDEX:
        raise FormatError(f"{where}: shape {shape} is beyond what an array can have")
    begin, end = offsets
    entry = Entry(DTYPES[dtype], tuple(shape), start + begin)
    if end - begin != entry.nbytes:
        raise FormatError(f"{where}: {dtype} {shape} takes {entry.nbytes} bytes, and data_offsets give {end - begin}")
    return entry
