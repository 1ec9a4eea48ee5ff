"""How models are loaded: options in force for ``from_pretrained``, which has no argument for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tilefuse import packcache
from tilefuse.errors import TileFuseError
from tilefuse.packcache import Progress

Cache = Literal["user", "beside", "off"]


@dataclass(frozen=True)
class Options:
    """See `options`."""

    device: str | None = None
    fuse: bool = True
    blocks: bool = True
    head: Literal[16, 8] = 16
    cache: Cache | Path = "user"
    fallback: Literal["error", "dequantize"] = "error"
    progress: Progress | None = None

    def folder(self, checkpoint: Path) -> Path | None:
        """Where packed weights are kept, None for nowhere."""
        if self.cache == "off":
            return None
        if self.cache == "user":
            return packcache.default_folder()
        if self.cache == "beside":
            return (checkpoint if checkpoint.is_dir() else checkpoint.parent) / ".tilefuse"
        return Path(self.cache)


_CURRENT: ContextVar[Options] = ContextVar("tilefuse.hf.options", default=Options())  # noqa: B039 (frozen)


def current() -> Options:
    """The options in force."""
    return _CURRENT.get()


@contextlib.contextmanager
def options(**changes: Any) -> Iterator[Options]:
    """Loads models otherwise within the block.

    Args:
        device: "cpu", "npu", "emulator", or "auto": each phase where it is estimated to be the fastest. None for
            `tilefuse.default_device()`, looked up at each product. `tilefuse.hf.set_device` changes it later.
        fuse: Whether q, k and v, and gate and up, are one product each (`tilefuse.fusion`).
        blocks: Whether a decoder block of a known architecture is one call of C++ at one token (`tilefuse.hf.blocks`).
        head: 8 rounds an output head that is not quantised to 8 bits, symmetric, and runs it on tilefuse; 16 leaves it
            to torch. A tied embedding itself stays as it is.
        cache: Where packed weights are kept: "user" ($TILEFUSE_CACHE/packed or the user's cache folder), "beside" (the
            folder ``.tilefuse`` in the checkpoint's), "off" or a folder.
        fallback: What to do about a layer that the packed format can't hold: "error", or "dequantize", which makes it a
            `torch.nn.Linear` in the model's dtype.
        progress: See `tilefuse.packcache.Progress`.

    Raises:
        TileFuseError: There is no such option, or an option has no such value.
    """
    known = Options.__dataclass_fields__
    for name, value in changes.items():
        if name not in known:
            raise TileFuseError(f"option {name!r}: there are {', '.join(known)}")
        if name == "fallback" and value not in ("error", "dequantize"):
            raise TileFuseError(f"fallback is {value!r}: pass 'error' or 'dequantize'")
        if name == "head" and value not in (8, 16):
            raise TileFuseError(f"head is {value!r}: pass 16 to leave the output head as it is, or 8 for 8 bits")
        if name == "cache" and not isinstance(value, Path) and value not in ("user", "beside", "off"):
            raise TileFuseError(f"cache is {value!r}: pass 'user', 'beside', 'off' or a pathlib.Path")
    token = _CURRENT.set(replace(_CURRENT.get(), **changes))
    try:
        yield _CURRENT.get()
    finally:
        _CURRENT.reset(token)
