"""Contexts of a device: an xclbin each, its instruction streams and their runs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from tilefuse.configurations import Configuration
from tilefuse.errors import NpuError
from tilefuse.plan import Plan
from tilefuse.runtime.artifacts import Artifacts
from tilefuse.runtime.xrt import FIRST_BUFFER, Buffer, RunObject, Words, Xrt
from tilefuse.runtime.xrt import Context as XrtContext

MOST_CONTEXTS = 4
"""Contexts that are kept: a model needs one for its GEMMs and one for its GEMVs, and the hardware has 16 for all."""

STREAM_BYTES = 8 << 20
"""Bytes of instructions that a context keeps: they come out of 64 MB that the driver sets aside for a process."""


class Slot:
    """A run of an instruction stream, and what it is bound to."""

    __slots__ = ("buffers", "run")

    def __init__(self, run: RunObject) -> None:
        self.run = run
        self.buffers: list[Buffer | None] = [None, None, None]

    def bind(self, buffers: tuple[Buffer, Buffer, Buffer]) -> None:
        """Sets the arguments that have changed."""
        bound = self.buffers
        for i, buffer in enumerate(buffers):
            if bound[i] is not buffer:
                bound[i] = None
                self.run.set_arg(FIRST_BUFFER + i, buffer.bo)
                bound[i] = buffer


@dataclass
class Instructions:
    """An instruction stream on the device."""

    buffer: Buffer
    slot: Slot | None = None


class Context:
    """A configuration on the device. Its runs go one after another, under its lock.

    Attributes:
        lock: Held while something runs.
        users: Threads that lease it; guarded by the lock of `Contexts`.
        failed: A run failed: it is to be left, and closed by the last to leave.
        after_failure: It was opened since a run failed, and none has gone well since.
    """

    def __init__(self, xrt: Xrt, configuration: Configuration, xclbin_hash: str, context: XrtContext) -> None:
        self.configuration = configuration
        self.xclbin_hash = xclbin_hash
        self.groups = context.groups
        self.lock = threading.Lock()
        self.users = 0
        self.failed = False
        self.after_failure = False
        self.xrt_context = context
        self._xrt = xrt
        self._streams: OrderedDict[str, Instructions] = OrderedDict()
        self._kept: list[Buffer] = []

    def has(self, name: str) -> bool:
        """Whether the stream of that name is on the device, for now."""
        return name in self._streams

    def streams(self, names: Sequence[str], words: Mapping[str, Words]) -> list[Instructions] | None:
        """The streams of these names, put on the device from ``words`` if they must. Under the lock.

        Others go where there are too many. None if one is neither there nor in ``words``.
        """
        if len(names) == 1 and (there := self._streams.get(names[0])) is not None:
            self._streams.move_to_end(names[0])
            return [there]
        found: dict[str, Instructions] = {}
        for name in names:
            stream = found.get(name) or self._streams.get(name)
            if stream is None:
                if name not in words:
                    return None
                stream = Instructions(self._xrt.instructions(words[name], self.groups[0]))
                self._streams[name] = stream
            else:
                self._streams.setdefault(name, stream)
                self._streams.move_to_end(name)
            found[name] = stream
        total = sum(stream.buffer.nbytes for stream in self._streams.values())
        for name in list(self._streams):
            if total <= STREAM_BYTES:
                break
            if name not in found:
                old = self._streams.pop(name)
                total -= old.buffer.nbytes
                old.slot = None
        return [found[name] for name in names]

    def slot(self, stream: Instructions) -> Slot:
        """The stream's own run, made when it is first asked for. Under the lock."""
        if stream.slot is None:
            stream.slot = self.new_slot(stream)
        return stream.slot

    def new_slot(self, stream: Instructions) -> Slot:
        """Another run of the stream."""
        return Slot(self.xrt_context.run(stream.buffer))

    def forget(self, gone: Set[Buffer]) -> bool:
        """Lets go of the runs that are bound to buffers that are gone; False if something runs just now."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            for stream in self._streams.values():
                if stream.slot is not None and not gone.isdisjoint(stream.slot.buffers):
                    stream.slot = None
        finally:
            self.lock.release()
        return True

    def keep(self, *buffers: Buffer) -> None:
        """Keeps buffers that the device may still write to until the context is closed."""
        self._kept += buffers

    def drop_runs(self) -> None:
        """Gives runs and instructions back."""
        for stream in self._streams.values():
            stream.slot = None
        self._streams.clear()

    def close(self) -> None:
        """Gives everything back: runs, instructions, the kernel and the context, then kept buffers."""
        self.drop_runs()
        self.xrt_context.close()
        self._kept.clear()


class Contexts:
    """The open contexts of a device, by configuration; the longest unused goes when there are too many."""

    def __init__(self, xrt: Xrt, artifacts: Artifacts, most: int = MOST_CONTEXTS) -> None:
        self._xrt, self._artifacts, self._most = xrt, artifacts, most
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Context] = OrderedDict()
        self._failures = 0
        self.opened = 0

    def lease(self, plan: Plan) -> Context:
        """The context of the plan's configuration, opened if need be; to be given back with `leave`.

        Raises:
            TileFuseError: There is no usable xclbin, or the driver has no context left.
        """
        name = plan.configuration.name
        with self._lock:
            context = self._open.get(name)
            if context is None:
                context = self._add(plan)
            else:
                self._open.move_to_end(name)
            context.users += 1
            return context

    def leave(self, context: Context) -> None:
        """Gives a lease back."""
        with self._lock:
            context.users -= 1
            if context.failed and not context.users:
                context.close()

    def ran(self, context: Context) -> None:
        """Notes a run that went well."""
        if self._failures:
            with self._lock:
                self._failures = 0
                context.after_failure = False

    def fail(self, context: Context) -> bool:
        """Drops a context whose run failed; the next lease opens another. Called by who leases it.

        Returns:
            Whether the device must be reset: the run before failed too, and this context was opened since.
        """
        with self._lock:
            self._failures += 1
            self._leave_behind(context)
            return context.after_failure

    def is_stale(self, context: Context, plan: Plan) -> bool:
        """Whether a context's xclbin is not today's: an instruction stream was built anew, and its xclbin with it.

        If so it is left, and closed by the last to leave.
        """
        if self._artifacts.xclbin(plan)[2] == context.xclbin_hash:
            return False
        with self._lock:
            self._leave_behind(context)
        return True

    def drop_runs(self) -> None:
        """Gives all runs and instructions back. Nobody may lease a context."""
        with self._lock:
            for context in self._open.values():
                context.drop_runs()

    def configurations(self) -> list[Configuration]:
        """Those that are open."""
        with self._lock:
            return [context.configuration for context in self._open.values()]

    def forget(self, gone: Set[Buffer]) -> bool:
        """Lets go of all runs bound to these buffers; False if a context runs something just now."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            forgotten = [context.forget(gone) for context in self._open.values()]
            return all(forgotten)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Closes all. Nobody may lease one."""
        with self._lock:
            for context in self._open.values():
                context.close()
            self._open.clear()

    def _leave_behind(self, context: Context) -> None:
        context.failed = True
        if self._open.get(context.configuration.name) is context:
            del self._open[context.configuration.name]

    def _add(self, plan: Plan) -> Context:
        path, kernel, digest = self._artifacts.xclbin(plan)
        while len(self._open) >= self._most and self._close_unused():
            pass
        while True:
            try:
                opened = self._xrt.context(path, kernel)
                break
            except NpuError:
                # What the driver says when it has no context left differs; fewer of our own may help.
                if not self._close_unused():
                    raise
        context = Context(self._xrt, plan.configuration, digest, opened)
        context.after_failure = self._failures > 0
        self._open[plan.configuration.name] = context
        self.opened += 1
        return context

    def _close_unused(self) -> bool:
        for name, context in self._open.items():
            if not context.users:
                del self._open[name]
                context.close()
                return True
        return False
