"""A thread in the place of the NPU, which runs what is submitted in the order of submission.

The array's workers are greenlets, which belong to a thread: hence one thread for all contexts.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

from tilefuse.emulator.npu.enums import ert_cmd_state

_LOG = logging.getLogger(__name__)


class Pending:
    """A command on its way: NEW until it ends, as with this driver."""

    __slots__ = ("_ended", "state")

    def __init__(self) -> None:
        self.state = ert_cmd_state.ERT_CMD_STATE_NEW
        self._ended = threading.Event()

    def end(self, state: ert_cmd_state) -> None:
        """Tells that it has ended."""
        self.state = state
        self._ended.set()

    def wait(self, seconds: float | None) -> bool:
        """Waits until it has ended; False if that takes longer."""
        return self._ended.wait(seconds)


class Processor:
    """A thread that runs what it is given, one after another, from the first call on."""

    def __init__(self) -> None:
        self._begin()
        _processors.add(self)

    def _begin(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self.gate = threading.Event()
        """What a stalled run waits for."""
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, job: Callable[[], None]) -> bool:
        """Runs ``job`` on the thread, later; False if that was stopped, as it is when the interpreter ends."""
        with self._lock:
            if self._stopped:
                return False
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_work, args=(self._jobs,), name="tilefuse-emulated-npu", daemon=True
                )
                self._thread.start()
            self._jobs.put(job)
            return True

    def post(self, job: Callable[[], None]) -> None:
        """As `submit`, where there is a thread; may be called by the garbage collector."""
        if self._thread is not None:
            self._jobs.put(job)

    def drain(self) -> None:
        """Waits until all that was submitted has run."""
        if self._thread is not None and self._thread is not threading.current_thread():
            done = threading.Event()
            self._jobs.put(done.set)
            done.wait()

    def stop(self) -> None:
        """Ends the thread, once all that was submitted has run."""
        self.gate.set()
        with self._lock:
            self._stopped = True
            self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10)


_processors: weakref.WeakSet[Processor] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for processor in list(_processors):
        processor.stop()


def _begin_all() -> None:
    # A fork has no threads but the one that forked.
    for processor in list(_processors):
        processor._begin()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_begin_all)


def _work(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            # Whoever waits for a command is told by the command; the thread must not end.
            _LOG.exception("the emulated device failed")
        # Or what it refers to would live until the next one comes.
        del job
