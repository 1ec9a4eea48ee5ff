"""An NPU device of its own on an emulated XRT, for tests of the runtime."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
from layers import F32

from tilefuse.arrays import FloatArray, view_rows
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.xrt import EmulatedXrt
from tilefuse.packed import PackedLinear
from tilefuse.runtime.npu import EMULATED_TIMEOUT_MS, NpuDevice


def view(array: Any) -> FloatArray:
    """As `tilefuse.ops` hands arrays to devices."""
    found = view_rows(array, "array")
    assert found is not None
    return found


class Rig:
    """A device, and the emulated module under it."""

    def __init__(self, artifacts: EmulatedArtifacts, **options: Any) -> None:
        self.artifacts = artifacts
        self.xrt = EmulatedXrt(**{k: options.pop(k) for k in ("contexts", "memlock", "heap") if k in options})
        options.setdefault("timeout_ms", EMULATED_TIMEOUT_MS)
        self.device = NpuDevice(self.xrt, artifacts, "emulator", **options)

    def __call__(self, x: Any, layer: PackedLinear, dtype: Any = F32) -> Any:
        """x W + bias."""
        y = np.full((*x.shape[:-1], layer.n), np.nan, dtype)
        self.device.matmul(view(x), layer, view(y))
        return y

    def many(self, calls: Sequence[tuple[Any, PackedLinear]]) -> list[Any]:
        """Several at once."""
        results = [np.full((*x.shape[:-1], layer.n), np.nan, F32) for x, layer in calls]
        self.device.matmul_many([(view(x), layer, view(y)) for (x, layer), y in zip(calls, results, strict=True)])
        return results

    def close(self) -> None:
        """Closes the device; nothing may be left."""
        self.device.close()
        gc.collect()
        assert not self.xrt.live(), self.xrt.live()
