"""The measuring side of `peers.worker`: starts one, asks it, and survives it dying, hanging or talking nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers.base import Contender

BENCHMARKS = Path(__file__).resolve().parent.parent

ERROR_BYTES = 400
"""Of what a worker wrote to standard error, at its end, are told when it died."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "THP_MEM_ALLOC_ENABLE": "1"}
"""Makes glibc's malloc, and torch's, ask for huge pages: no peer does by itself."""


class PeerError(Exception):
    """A worker did not do what it was asked; the message says which and why."""


class PeerMissing(PeerError):
    """A worker's library is not installed."""


class Peer:
    """A worker process of one adapter. After a `PeerError` of `ask` that is not an answer, ``alive`` is False."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        timeout: float = 120.0,
    ) -> None:
        """Starts ``command``. Nothing is asked yet.

        Raises:
            PeerError: It can't be started.
        """
        self.name = name
        self.timeout = timeout
        self.alive = True
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]))
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                errors="replace",
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"{name}: {command[0]} can't be run: {error}") from error
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under us
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _fail(self, what: str) -> PeerError:
        self.close()
        return PeerError(f"{self.name}: {what}")

    def ask(self, what: str, *, timeout: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer.

        Raises:
            PeerError: The worker answered with an error (and goes on), or died, hung or sent something else than an
                answer (and was ended).
        """
        if not self.alive:
            raise PeerError(f"{self.name}: its process has ended")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # it died: said below, unless an answer is still on its way
        limit = self.timeout if timeout is None else timeout
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            raise self._fail(f"no answer to {what!r} within {limit:g} s") from None
        if line is None:
            code = self._process.wait()
            raise self._fail(f"its process ended ({code}) at {what!r}{self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._fail(f"answered {line.strip()[:80]!r} to {what!r}")
        if "missing" in answer:
            self.close()
            raise PeerMissing(f"{self.name}: {answer['missing']}")
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - ERROR_BYTES))
        text = " ".join(self._errors.read().decode(errors="replace").split())
        return f": {text}" if text else ""

    def hello(self) -> tuple[dict[str, str], list[Contender]]:
        """Versions and contenders.

        Raises:
            PeerMissing: The library is not installed there.
            PeerError: As `ask`, or the answer is incomplete.
        """
        answer = self.ask("hello")
        try:
            return dict(answer["versions"]), [Contender(**each) for each in answer["contenders"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._fail(f"incomplete answer to 'hello': {error!r}") from None

    def number(self, what: str, key: str, **arguments: Any) -> float:
        """The number that answers a request under ``key``.

        Raises:
            PeerError: As `ask`, or there is none above 0.
        """
        answer = self.ask(what, **arguments)
        value = answer.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._fail(f"answered {key} = {value!r} to {what!r}")
        return float(value)

    def close(self) -> None:
        """Ends the process."""
        self.alive = False
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._errors.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
