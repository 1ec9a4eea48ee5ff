"""The AIE2P array on this machine: what is there so far are the microkernels (`tilefuse.emulator.kernels`)."""

from __future__ import annotations

from tilefuse.emulator import kernels

__all__ = ["kernels"]
