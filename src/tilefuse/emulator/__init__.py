"""The AIE2P array on this machine.

`tilefuse.emulator.kernels` are the microkernels, compiled for this machine; `tilefuse.emulator.iron` is the namespace
that runs IRON designs with them on a model of the array (it needs greenlet: ``pip install greenlet``).
"""

from __future__ import annotations

from tilefuse.emulator import kernels

__all__ = ["kernels"]
