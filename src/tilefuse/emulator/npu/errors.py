"""What pyxrt raises: pybind11 makes a RuntimeError of each C++ exception, of these two kinds among them."""

from __future__ import annotations

import os


def system_error(code: int, text: str) -> RuntimeError:
    """What pyxrt raises for an error of XRT's core."""
    return RuntimeError(f"{text}: {os.strerror(code)}")


def shim_error(code: int, text: str) -> RuntimeError:
    """What pyxrt raises for an error of the driver's library."""
    return RuntimeError(f"{text} (err={code}): {os.strerror(abs(code))}")
