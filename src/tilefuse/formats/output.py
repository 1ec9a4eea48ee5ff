"""Writing checkpoints in safetensors: files split by size, their index, and a directory that appears whole."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tilefuse.errors import FormatError
from tilefuse.formats.safetensors_map import DTYPES, INDEX, SINGLE

Array = npt.NDArray[Any]

DEFAULT_SHARD_BYTES = 5_000_000_000
"""The size that AutoAWQ splits at."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_COPY_BYTES = 1 << 20
_HEADER_ALIGNMENT = 8


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory under a temporary name beside ``path``, renamed to it at the end and removed upon an error.

    Raises:
        FileExistsError: ``path`` exists and is not an empty directory.
    """
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if ``path`` is something that `new_directory` would have to replace."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path} exists and is not an empty directory; remove it or choose another")


class Shards:
    """Streams tensors into safetensors files whose headers are known only once their last tensor is.

    The data of a file goes to a nameless one first; the header, and then that data, follow when it is complete.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._shards: list[list[str]] = []  # names of the tensors of each finished file
        self._seen: set[str] = set()
        self._header: dict[str, Any] = {}
        self._size = 0
        self._total = 0
        self._body: IO[bytes] | None = None

    def add(self, name: str, array: Array) -> None:
        """Append a tensor."""
        if name in self._seen or name == "__metadata__":
            raise FormatError(f"tensor {name!r} occurs twice or has a reserved name")
        if array.dtype not in _DTYPE_NAMES:
            raise FormatError(f"tensor {name!r} has dtype {array.dtype}, which safetensors has no name for")
        if self._header and self._size + array.nbytes > self._limit:
            self._end_shard()
        if self._body is None:
            self._body = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115  (closed by close)
        self._body.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        self._seen.add(name)
        self._header[name] = {
            "dtype": _DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [self._size, self._size + array.nbytes],
        }
        self._size += array.nbytes

    def add_all(self, tensors: Mapping[str, Array]) -> None:
        """Append tensors in descending item size: all are aligned then, without holes, which the format forbids."""
        for name, array in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
            self.add(name, array)

    def close(self) -> None:
        """Drop the data of an unfinished file."""
        if self._body is not None:
            self._body.close()
            self._body = None

    def finish(self) -> None:
        """End the last file, give all their names, and write the index if there are several."""
        self._end_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            name = SINGLE if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._part(i).rename(self._directory / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
            write_json(self._directory / INDEX, index)

    def _part(self, i: int) -> Path:
        return self._directory / f"part-{i}"

    def _end_shard(self) -> None:
        # transformers refuses files that do not name their framework.
        header = json.dumps({"__metadata__": {"format": "pt"}, **self._header}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _HEADER_ALIGNMENT)
        with self._part(len(self._shards)).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            if self._body is not None:
                self._body.seek(0)
                shutil.copyfileobj(self._body, file, _COPY_BYTES)
            _sync(file)
        self.close()
        self._shards.append(list(self._header))
        self._total += self._size
        self._header, self._size = {}, 0


def _sync(file: IO[Any]) -> None:
    """A rename must not reach the disk before the data does."""
    file.flush()
    os.fsync(file.fileno())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes an object as JSON, to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        _sync(file)
