"""Files that are there whole or not at all, and their hashes; text for the terminal."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from pathlib import Path

from tilefuse.errors import DtypeError, FormatError


def as_path(value: str | os.PathLike[str], name: str = "path") -> Path:
    """``value`` as a path.

    Raises:
        DtypeError: It is none.
        FormatError: It holds a NUL, which no file's name can.
    """
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise DtypeError(f"{name} is {value!r}, a {type(value).__name__}: pass a string or a pathlib.Path")
    if "\0" in os.fspath(value):
        raise FormatError(f"{name} is {os.fspath(value)!r}: a file's name can't hold a NUL; correct it")
    return Path(value)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes ``data`` under another name beside ``path`` and renames it; a failure leaves what was there before.

    Raises:
        OSError: The folder can't be written.
    """
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp keeps a file to its owner; others read ours as they read any.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def print_text(text: str) -> None:
    """Prints ``text`` as it is. A reader that has seen enough (``| head``) is no error.

    Raises:
        OSError: Standard output can't be written.
    """
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sha256(data: bytes) -> str:
    """The hash of bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def sha256_of(path: Path) -> str:
    """The hash of a file's contents.

    Raises:
        OSError: It can't be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
