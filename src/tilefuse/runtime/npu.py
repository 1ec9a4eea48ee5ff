"""The NPU as a device: plans, buffers and contexts put together, and dispatched through XRT."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tilefuse import host_buffers
from tilefuse.arrays import FloatArray
from tilefuse.configurations import Configuration
from tilefuse.errors import DeviceError, NpuError, NpuMemoryError, TileFuseError
from tilefuse.packed import PackedLinear
from tilefuse.plan import MAX_BUFFER_BYTES
from tilefuse.runtime.artifacts import Artifacts, FolderArtifacts
from tilefuse.runtime.buffers import Dropped, Pool, WeightStore
from tilefuse.runtime.chaining import can_chain
from tilefuse.runtime.contexts import Context, Contexts, Instructions
from tilefuse.runtime.jobs import Planner, Step
from tilefuse.runtime.xrt import RESET, Buffer, PyXrt, Words, Xrt, causes, load_module

TIMEOUT_MS = 10_000
"""Milliseconds that a run may take unless TILEFUSE_NPU_TIMEOUT_MS says: longer than the driver's watchdog, which ends a
run after 2 s and is the first to know (it has been seen to take 6)."""

MOST_CHAINED = 16
"""Runs in a list."""

MARK = bytes.fromhex("a5ff5aff") * 16
"""Bytes that stand for "no results yet": NaNs with bits that no kernel makes."""

_MARK = np.frombuffer(MARK, np.uint8)

_Words = dict[str, Words]

Call = tuple[FloatArray, PackedLinear, FloatArray]


@dataclass(frozen=True)
class Statistics:
    """What a device holds and has done since it was opened."""

    contexts: int
    """Contexts opened so far."""
    dispatches: int
    """Runs that went well."""
    lists: int
    """Lists of runs among them."""
    uploads: int
    """Buffers of weights filled so far."""
    layers: int
    """Layers whose weights are on the device."""
    weight_bytes: int
    idle_bytes: int
    """Bytes of buffers that wait for their next use."""


EMULATED_TIMEOUT_MS = 3_600_000
"""The same of the emulated device: what it takes an array milliseconds to compute takes it minutes, and it tells a
deadlock from that at once."""


def timeout_ms(default: int = TIMEOUT_MS) -> int:
    """TILEFUSE_NPU_TIMEOUT_MS, or ``default``.

    Raises:
        DeviceError: It is no number of milliseconds.
    """
    text = os.environ.get("TILEFUSE_NPU_TIMEOUT_MS")
    if not text:
        return default
    if not text.isdecimal() or not 1 <= int(text) < 1 << 31:
        raise DeviceError(f"TILEFUSE_NPU_TIMEOUT_MS is {text!r}: set milliseconds, 1 to {(1 << 31) - 1}, or nothing")
    return int(text)


class _Session:
    """An open device with all that is on it. Used by any number of threads, closed by the last."""

    def __init__(self, device: NpuDevice, module: PyXrt, artifacts: Artifacts, most_bytes: int) -> None:
        self.timeout = timeout_ms(device.timeout_ms)
        self.xrt = Xrt(module, device.index)
        self.dropped = Dropped()
        self.pool = Pool(self.xrt, self.drop)
        self.weights = WeightStore(self.pool, self.drop)
        self.contexts = Contexts(self.xrt, artifacts)
        self.planner = Planner(artifacts, most_bytes)
        self.artifacts = artifacts
        self.chain = can_chain(module, self.xrt.bdf) if device.chain is None else device.chain
        self.chain = self.chain and hasattr(module, "runlist")
        self.pid = os.getpid()
        self.users = 0
        self.closing = False
        self.dispatches = 0
        self.lists = 0
        self.counting = threading.Lock()

    @property
    def is_copy(self) -> bool:
        """Whether this is what a fork has left of its parent's: nothing of it may be used, or given back."""
        return self.pid != os.getpid()

    def drop(self, buffer: Buffer) -> None:
        """Frees a buffer as soon as no run is bound to it: now, unless something runs just now. Waits for nothing."""
        self.dropped.add(buffer)
        self.reap()

    def reap(self) -> None:
        """Frees buffers that were dropped. Waits for nothing."""
        if self.is_copy:
            return
        gone = self.dropped.take()
        if gone and not self.contexts.forget(set(gone)):
            for buffer in gone:
                self.dropped.add(buffer)

    def ran(self, context: Context, count: int) -> None:
        """Notes runs that went well, several as a list."""
        self.contexts.ran(context)
        with self.counting:
            self.dispatches += count
            self.lists += count > 1

    def close(self) -> None:
        """Gives everything back: runs, buffers, kernels, contexts, the device, in this order."""
        self.contexts.drop_runs()
        self.weights.clear()
        self.pool.trim(0)
        self.dropped.take()
        self.contexts.close()
        self.xrt.close()


class _Staged:
    """A step with its buffers of activations, weights and results; None once a failed run has them."""

    __slots__ = ("buffers", "call", "step")

    def __init__(self, step: Step, call: Call, buffers: tuple[Buffer, Buffer, Buffer]) -> None:
        self.step, self.call = step, call
        self.buffers: tuple[Buffer, Buffer, Buffer] | None = buffers


class NpuDevice:
    """Multiplies on the array, through pyxrt or what binds the same.

    Safe to share between threads: runs of one configuration go one after another, those of several side by side.
    Results are bfloat16 when they leave the array, whatever the type of y; a bias is added to them in float32.

    Args:
        module: pyxrt, or `tilefuse.emulator.xrt.EmulatedXrt`.
        artifacts: Where xclbins and instruction streams come from.
        name: The device's name in messages.
        index: Which device of XRT's.
        chain: Whether `matmul_many` may send lists of runs; None to find out from the driver.
        timeout_ms: Milliseconds that a run may take, unless TILEFUSE_NPU_TIMEOUT_MS says.
        most_bytes: Bytes of a buffer at most; larger problems go in parts.
    """

    def __init__(
        self,
        module: PyXrt,
        artifacts: Artifacts,
        name: str = "npu",
        *,
        index: int = 0,
        chain: bool | None = None,
        timeout_ms: int = TIMEOUT_MS,
        most_bytes: int = MAX_BUFFER_BYTES,
    ) -> None:
        self.name = name
        self.timeout_ms = timeout_ms
        self.index = index
        self.chain = chain
        self._module, self._artifacts, self._most_bytes = module, artifacts, most_bytes
        self._condition = threading.Condition()
        self._session: _Session | None = None
        _OPENED.add(self)

    # --- what it is for -----------------------------------------------------------------------------------------------

    def matmul(self, x: FloatArray, layer: PackedLinear, y: FloatArray) -> None:
        """Writes ``x W + bias`` to ``y``: a GEMV for one row, a GEMM for more.

        Raises:
            QuantizationError: x has a value that is not finite in bfloat16. y is as it was, or written in part.
            NpuError: The device failed; the message says why it may have, and whether the next call will do.
            PlanError, TileFuseError: The array can't run the problem, or what runs it was not built.
        """
        rows = _rows_of(x)
        if not rows:
            return
        session = self._enter()
        try:
            for step in session.planner.steps(layer.layout, rows, session.contexts.configurations):
                self._dispatch(session, [(step, (x, layer, y))])
        finally:
            self._leave(session)

    def matmul_many(self, calls: Sequence[Call]) -> None:
        """As `matmul` for each call, of which none reads what another writes.

        Runs of one configuration follow each other, and go to the driver as one command where it takes lists.
        """
        with self._using() as session:
            by_configuration: dict[Configuration, list[tuple[Step, Call]]] = {}

            def is_open() -> list[Configuration]:
                return [*session.contexts.configurations(), *by_configuration]

            for call in calls:
                x, layer, _ = call
                rows = _rows_of(x)
                for step in session.planner.steps(layer.layout, rows, is_open) if rows else ():
                    by_configuration.setdefault(step.plan.configuration, []).append((step, call))
            most = MOST_CHAINED if session.chain else 1
            for work in by_configuration.values():
                for first in range(0, len(work), most):
                    self._dispatch(session, work[first : first + most])

    def open(self) -> str:
        """Opens the device if it isn't; returns its name as the driver says it.

        Raises:
            NpuUnavailable: It can't be opened.
        """
        with self._using() as session:
            return session.xrt.name

    def statistics(self) -> Statistics:
        """What the device holds and has done; zeros if it isn't open."""
        session = self._session
        if session is None:
            return Statistics(0, 0, 0, 0, 0, 0, 0)
        session.reap()
        return Statistics(
            session.contexts.opened,
            session.dispatches,
            session.lists,
            session.weights.uploads,
            len(session.weights),
            session.weights.nbytes,
            session.pool.idle_bytes,
        )

    def close(self) -> None:
        """Gives everything back, once what runs has ended. The next product opens the device anew."""
        with self._condition:
            session, self._session = self._session, None
            if session is None or session.is_copy:
                return
            session.closing = True
            self._condition.wait_for(lambda: not session.users, timeout=2 * session.timeout / 1000)
            session.closing = False
            if not session.users:
                session.close()

    def _after_fork(self) -> None:
        """In the child: other threads had the lock, perhaps. What is on the device is kept for the process's life."""
        self._condition = threading.Condition()
        if self._session is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._session))

    # --- sessions -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _using(self) -> Iterator[_Session]:
        session = self._enter()
        try:
            yield session
        finally:
            self._leave(session)

    def _enter(self) -> _Session:
        session = self._session
        if session is not None and session.is_copy:
            raise NpuError(
                f"device {self.name!r} was opened before this process was forked, and a device can't be shared so: "
                'start processes with multiprocessing\'s "spawn", or open the device after the fork'
            )
        with self._condition:
            if self._session is None:
                self._session = _Session(self, self._module, self._artifacts, self._most_bytes)
            self._session.users += 1
            return self._session

    def _leave(self, session: _Session) -> None:
        with self._condition:
            session.users -= 1
            if not session.users:
                if session is not self._session and not session.closing:
                    session.close()  # the device is to be reset: whoever was left has gone now
                self._condition.notify_all()
        if session.dropped:
            session.reap()

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def _dispatch(self, session: _Session, work: Sequence[tuple[Step, Call]]) -> None:
        """Runs steps of one configuration: one, or a list of them as one command."""
        staged: list[_Staged] = []
        try:
            # A context may fail in another thread's hands, or be of an xclbin that is built anew: then in the next one.
            while not self._attempt(session, work, staged):
                pass
        finally:
            for item in staged:
                if item.buffers is not None:
                    session.pool.give(item.buffers[0])
                    session.pool.give(item.buffers[2])

    def _attempt(self, session: _Session, work: Sequence[tuple[Step, Call]], staged: list[_Staged]) -> bool:
        """Stages what isn't and runs it; False if that is to be tried in another context."""
        context = session.contexts.lease(work[0][0].plan)
        try:
            words = self._load(session, context, work)
            if words is None:
                return False
            for step, call in work[len(staged) :]:
                staged.append(self._stage(session, context, step, call))
            if not self._run(session, context, staged, words):
                return False
            for item in staged:
                if not _write(item):
                    nothing = f"{item.step.title}: the run completed, and wrote no results"
                    error = NpuError(f"{nothing}; {causes('NOTHING WRITTEN')}")
                    raise self._failed(session, context, staged, error)
            session.ran(context, len(staged))
            return True
        finally:
            session.contexts.leave(context)

    def _load(self, session: _Session, context: Context, work: Sequence[tuple[Step, Call]]) -> _Words | None:
        """The instruction streams that are not on the device yet; None if the context is of another xclbin."""
        words: _Words = {}
        for step, _ in work:
            if step.name not in words and not context.has(step.name):
                words[step.name] = session.artifacts.instructions(step.plan)
        if words and session.contexts.is_stale(context, work[0][0].plan):
            return None
        return words

    def _stage(self, session: _Session, context: Context, step: Step, call: Call) -> _Staged:
        x, layer, _ = call
        _, x_group, w_group, y_group = context.groups
        weights = session.weights.get(layer, step.index, step.piece, w_group)
        activations = session.pool.take(step.x_size, x_group, "activations")
        try:
            view = x if step.plan.m == _rows_of(x) else _some_rows(x, step.row, step.plan.m)
            host_buffers.fill(step.plan, view, layer.perm, activations.array[: step.x_bytes].view(np.int32))
            activations.to_device(step.x_bytes)
            results = session.pool.take(step.y_size, y_group, "results")
            _mark(results, step.y_bytes)
        except BaseException:
            session.pool.give(activations)
            raise
        return _Staged(step, call, (activations, weights, results))

    def _run(self, session: _Session, context: Context, staged: Sequence[_Staged], words: _Words) -> bool:
        """Runs what is staged; False if that is to be tried in another context."""
        with context.lock:
            if context.failed:
                return False
            try:
                streams = context.streams([item.step.name for item in staged], words)
                if streams is None:
                    return False
                if len(staged) == 1:
                    self._run_one(session, context, staged[0], streams[0])
                else:
                    self._run_list(session, context, staged, streams)
            except NpuMemoryError:
                raise
            except NpuError as error:
                raise self._failed(session, context, staged, error) from error
            except BaseException as error:
                # An interrupt may leave the run to go on: nothing of it can be used again.
                _forget_frames(error)
                title = staged[0].step.title
                failure = self._failed(session, context, staged, NpuError(f"{title}: XRT fails ({error})"))
                if isinstance(error, RuntimeError):
                    raise failure from error
                raise
        return True

    def _run_one(self, session: _Session, context: Context, item: _Staged, stream: Instructions) -> None:
        assert item.buffers is not None
        slot = context.slot(stream)
        slot.bind(item.buffers)
        session.xrt.start(slot.run, item.step.title)
        session.xrt.wait(slot.run, session.timeout, item.step.title)

    def _run_list(
        self, session: _Session, context: Context, staged: Sequence[_Staged], streams: Sequence[Instructions]
    ) -> None:
        runs = []
        for item, stream in zip(staged, streams, strict=True):
            assert item.buffers is not None
            slot = context.new_slot(stream)  # a run in a list can't be started alone any more
            slot.bind(item.buffers)
            runs.append(slot.run)
        titles = [item.step.title for item in staged]
        session.xrt.run_all(context.xrt_context, runs, session.timeout, titles)

    def _failed(self, session: _Session, context: Context, staged: Sequence[_Staged], error: NpuError) -> NpuError:
        """What to raise for a failed run. The context is left, and with it the buffers that may still be written to."""
        _forget_frames(error)
        for item in staged:
            if item.buffers is not None:
                context.keep(item.buffers[0], item.buffers[2])
                item.buffers = None
        if session.contexts.fail(context):
            with self._condition:
                if self._session is session:
                    self._session = None  # whatever was on the device goes with a reset
            return type(error)(
                f"{error}. The run before failed too, and this one was the first in a new context: reset the device "
                f"({RESET}), then call again"
            )
        return type(error)(f"{error}. The context was dropped; the next call opens a new one")


def _rows_of(x: FloatArray) -> int:
    return x.shape[0] if len(x.shape) == 2 else 1


def _some_rows(x: FloatArray, first: int, count: int) -> FloatArray:
    rows = x.numpy()[first : first + count]
    return FloatArray(rows, x.kind, rows.ctypes.data, x.row_stride)


def _mark(results: Buffer, nbytes: int) -> None:
    """Writes what no run leaves there to the end of the results: a run that is dropped without a word shows by it."""
    start = nbytes - len(MARK)
    results.array[start:nbytes] = _MARK
    results.to_device(len(MARK), start)


def _write(item: _Staged) -> bool:
    """Results to where the caller wants them; False if there are none."""
    step, (_, layer, y), buffers = item.step, item.call, item.buffers
    assert buffers is not None
    buffers[2].from_device(step.y_bytes)
    if buffers[2].array[step.y_bytes - len(MARK) : step.y_bytes].tobytes() == MARK:
        return False
    target = y.numpy()
    if target.ndim == 1:
        target = target.reshape(1, -1)
    bias, layout, first = layer.bias, step.piece.layout, step.piece.first
    if layout.n < layer.n:
        target = target[:, first : first + layout.n]
        bias = None if bias is None else bias[first : first + layout.n]
    if step.plan.m < target.shape[0]:
        target = target[step.row : step.row + step.plan.m]
    host_buffers.write_results(step.plan, buffers[2].array[: step.y_bytes].view(np.int32), bias, target)
    return True


def _forget_frames(error: BaseException) -> None:
    """Whoever keeps an error, as an interactive session does, must not keep a run by its frames, and so a context."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__


_OPENED: weakref.WeakSet[NpuDevice] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """While there still is an interpreter: XRT's objects must not be destroyed in any order."""
    for device in list(_OPENED):
        with contextlib.suppress(TileFuseError):
            device.close()


def _after_fork() -> None:
    """XRT's objects must not be destroyed in a child: the driver's file is shared, and the parent would lose them."""
    for device in list(_OPENED):
        device._after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def open_npu() -> NpuDevice:
    """The NPU, opened by its first product.

    Raises:
        NpuUnavailable: pyxrt is not installed for this Python.
    """
    return NpuDevice(load_module(), FolderArtifacts(), "npu")


def open_emulator() -> NpuDevice:
    """The emulated device: the NPU's code, from plans to results, on an array in software.

    Raises:
        DeviceError: The emulator is not installed.
    """
    try:
        from tilefuse.emulator.artifacts import EmulatedArtifacts
        from tilefuse.emulator.xrt import EmulatedXrt
    except ImportError as error:
        raise DeviceError(
            f'device="emulator" needs the array emulator, which is not installed ({error}): pip install '
            "greenlet, and build tilefuse with -C cmake.define.TILEFUSE_EMULATOR=ON"
        ) from error
    return NpuDevice(EmulatedXrt(), EmulatedArtifacts(), "emulator", chain=True, timeout_ms=EMULATED_TIMEOUT_MS)
