"""The finished blocks of a run, kept on disk until all are there: what an interrupted run goes on from."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy.typing as npt

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
    """

    def __init__(self, path: Path, key: str, *, resume: bool) -> None:
        self._path = path
        mark = path / "key"
        if not resume or not mark.is_file() or mark.read_text(encoding="utf-8") != key:
            if path.exists() and not mark.is_file() and any(path.iterdir()):
                raise FileExistsError(f"{path} exists and was not made by this command; remove it")
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            write_atomically(mark, key.encode())

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
