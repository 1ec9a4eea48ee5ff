"""The errors that tilefuse raises.

Every message names the tensor or argument, the value found, the limit, and what to do. Each class also derives from
the built-in exception that a caller would expect, so ``except ValueError`` keeps working.
"""

from __future__ import annotations


class TileFuseError(Exception):
    """Base of every error that tilefuse raises on purpose."""


class FormatError(TileFuseError, ValueError):
    """A checkpoint or file is malformed, contradictory, truncated, or of a format that is not read here."""


class UnsupportedFormatError(FormatError):
    """A well-formed file of a format, version or option that tilefuse does not take; the message says what does."""


class QuantizationError(TileFuseError, ValueError):
    """A scale, zero point or code is out of its range (NaN, Inf, overflow of bfloat16, zero point above 2^bits - 1)."""


class LayoutError(TileFuseError, ValueError):
    """The packed layout cannot hold this layer, or a packed buffer does not match its layout."""


class ShapeError(TileFuseError, ValueError):
    """An argument has the wrong shape."""


class RoutingError(TileFuseError, ValueError):
    """A map of attention's score tiles can't be made as asked, or doesn't fit the call."""


class OptionError(TileFuseError, ValueError):
    """An option has a value that is not taken."""


class DtypeError(TileFuseError, TypeError):
    """An argument has a dtype or array type that is not taken."""


class DiskSpaceError(TileFuseError, OSError):
    """The disk has no room for what would be written; the message says how much is needed."""


class DeviceError(TileFuseError, RuntimeError):
    """A device is not there, can't take the call, or failed."""


class NpuError(DeviceError):
    """The NPU, its driver or what was built for it failed; the message names the likely causes, most likely first."""


class NpuUnavailable(NpuError):
    """There is no NPU that can be used: XRT's Python module, the driver or the device is missing."""


class NpuTimeout(NpuError):
    """A run did not end in time, or the driver's watchdog ended it."""


class NpuMemoryError(NpuError, MemoryError):
    """The driver gives no memory for a buffer."""


class PlanError(TileFuseError, ValueError):
    """The array can't run this problem, or not with these tiles: a limit of the hardware, in the problem's terms."""


class ToolchainError(TileFuseError, RuntimeError):
    """What builds for the array (mlir-aie, Peano, XRT's tools) is not installed, or can't be used."""


class ArrayLimitError(DeviceError):
    """A design needs more than the array has, or says what a descriptor cannot: `tilefuse.arch` has the numbers."""


class DataflowError(DeviceError):
    """A design moves data wrongly: it reads what nothing wrote, uses what it gave back, frees a transfer that still
    runs, or leaves data behind."""


class DeadlockError(DataflowError):
    """Nothing can go on; the message says who waits for what, and who holds it."""
