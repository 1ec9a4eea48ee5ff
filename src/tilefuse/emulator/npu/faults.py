"""Faults of the emulated device: what goes wrong, and at which call."""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


class Fault(enum.StrEnum):
    """What goes wrong. Each is of one operation: opening a device, a context or a buffer, or a run."""

    NO_DRIVER = "no driver"
    """device(): there is no NPU, or its driver is not loaded."""
    NO_PERMISSION = "no permission"
    """device(): the device's file can't be opened by this user."""
    BUSY = "busy"
    """hw_context(): others have the array."""
    NO_MEMORY = "no memory"
    """bo(): the kernel has no memory."""
    LOCKED_MEMORY = "locked memory"
    """bo(): the limit of locked memory is reached (memlock)."""
    TIMEOUT = "timeout"
    """A run ends as TIMEOUT; later ones of its context are refused until `EmulatedXrt.reset`."""
    ABORT = "abort"
    """A run ends as ABORT: what firmware that doesn't fit the driver does."""
    ERROR = "error"
    """A run ends as ERROR: the firmware refuses it."""
    NO_RESPONSE = "no response"
    """A run ends as NORESPONSE."""
    STALE = "stale"
    """A run reports COMPLETED, and has written nothing."""
    STALL = "stall"
    """A run goes on until `EmulatedXrt.resume`, then does what it should."""
    REFUSED = "refused"
    """start() raises, this once."""
    WEDGED = "wedged"
    """start() raises, for all runs of the device until `EmulatedXrt.reset`."""

    @property
    def operation(self) -> str:
        """Of which calls: ``device``, ``hw_context``, ``bo`` or ``run``."""
        return {
            Fault.NO_DRIVER: "device",
            Fault.NO_PERMISSION: "device",
            Fault.BUSY: "hw_context",
            Fault.NO_MEMORY: "bo",
            Fault.LOCKED_MEMORY: "bo",
        }.get(self, "run")


@dataclass(frozen=True)
class Call:
    """A call that a fault may strike."""

    operation: str
    """As in `Fault.operation`. A run of a runlist counts like one that is started."""
    number: int
    """Counts the calls of an operation, from 1."""
    size: int = 0
    """Bytes of the buffer."""
    configuration: str = ""
    """Name of the context's or the run's configuration."""


@dataclass
class Injection:
    """A fault, and when it strikes.

    Args:
        fault: What goes wrong.
        at: At which call from now on, 1 for the next; of those that ``when`` takes.
        times: How many calls from there on; None for all.
        when: Takes a call, and says whether it counts. It may be called from any thread.
    """

    fault: Fault
    at: int = 1
    times: int | None = 1
    when: Callable[[Call], bool] | None = None
    seen: int = field(default=0, init=False)
    """Calls that counted so far."""

    def strikes(self, call: Call) -> bool:
        """Whether it strikes ``call``, which is counted."""
        if call.operation != self.fault.operation or (self.when is not None and not self.when(call)):
            return False
        self.seen += 1
        return self.at <= self.seen and (self.times is None or self.seen < self.at + self.times)


class Faults:
    """The injected faults of a device. Thread-safe."""

    def __init__(self, injections: Iterable[Injection] = ()) -> None:
        self._injections = list(injections)
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def inject(self, injection: Injection) -> None:
        """Adds one."""
        with self._lock:
            self._injections.append(injection)

    def clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._injections.clear()

    def calls(self, operation: str) -> int:
        """Calls of an operation so far."""
        return self._calls[operation]

    def strike(self, operation: str, size: int = 0, configuration: str = "") -> Fault | None:
        """Counts a call; the first fault that strikes it."""
        with self._lock:
            self._calls[operation] += 1
            if not self._injections:
                return None
            call = Call(operation, self._calls[operation], size, configuration)
            struck = [injection.fault for injection in self._injections if injection.strikes(call)]
            return struck[0] if struck else None
