"""The finished blocks of a run, kept on disk until all are there: what an interrupted run goes on from."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tilefuse.errors import FormatError
from tilefuse.files import write_atomically
from tilefuse.formats.output import Shards, new_directory
from tilefuse.formats.safetensors_map import SINGLE, MappedFile

Block = dict[str, npt.NDArray[Any]]
"""The tensors of a block that differ from the source's, by name."""


class BlockStore:
    """A folder with the blocks of one run, each a folder that appears whole.

    Args:
        path: The folder; made if it is not there.
        key: Says what was quantised and how. Blocks under another key are dropped.
        resume: Whether to keep blocks under this key.

    Raises:
        FileExistsError: The folder is there and is not such a store.
        FormatError: Another process works in it.
    """

    def __init__(self, path: Path, key: str, *, resume: bool) -> None:
        self._path = path
        mark = path / "key"
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path)
        try:
            if not resume or not mark.is_file() or mark.read_text(encoding="utf-8") != key:
                if not mark.is_file() and any(path.iterdir()):
                    raise FileExistsError(f"{path} exists and was not made by this command; remove it")
                self._clear()
                write_atomically(mark, key.encode())
        except BaseException:
            os.close(self._lock)
            raise

    def _clear(self) -> None:
        # The folder itself stays: it holds the lock. The key goes last: it says whose the rest is.
        for entry in sorted(self._path.iterdir(), key=lambda entry: entry.name == "key"):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def close(self, *, keep: bool) -> None:
        """Lets others have the folder; without ``keep`` it is removed."""
        if not keep:
            shutil.rmtree(self._path, ignore_errors=True)
        os.close(self._lock)

    def _block(self, index: int) -> Path:
        return self._path / f"block-{index:05}"

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and (self._block(index) / SINGLE).is_file()

    def count(self) -> int:
        """Blocks that are there."""
        return sum(1 for _ in self._path.glob(f"block-*/{SINGLE}"))

    def write(self, index: int, tensors: Block) -> None:
        """Keep a block."""
        with new_directory(self._block(index)) as partial, contextlib.closing(Shards(partial, sys.maxsize)) as shards:
            shards.add_all(tensors)
            shards.finish()

    def read(self, index: int) -> Block:
        """A block, as views of its mapped file."""
        file = MappedFile(self._block(index) / SINGLE)
        return {name: file.tensor(name) for name in file}


def _locked(path: Path) -> int:
    """The folder, open and locked for as long as it stays open."""
    import fcntl

    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The other one may have finished, and removed it, between open and lock.
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(handle)):
            raise BlockingIOError
    except BlockingIOError:
        os.close(handle)
        raise FormatError(f"{path}: another process is working in it; wait for it or end it") from None
    return handle
