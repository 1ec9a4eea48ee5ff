"""An NPU without hardware: what pyxrt is to the real one, on the emulated array.

>>> from tilefuse.emulator.xrt import EmulatedXrt
>>> pyxrt = EmulatedXrt()                                   # in the place of `import pyxrt`
>>> device = pyxrt.device(0)
>>> xclbin = pyxrt.xclbin("gemm.xclbin")                    # of tilefuse.emulator.artifacts.EmulatedArtifacts
>>> uuid = device.register_xclbin(xclbin)
>>> context = pyxrt.hw_context(device, uuid)
>>> kernel = pyxrt.kernel(context, "MLIR_AIE")

An `EmulatedXrt` has that part of the module which hosts need to run kernels on instruction streams: the same classes,
methods, arguments, values and errors, as XRT's src/python/pybind11 and core, and the driver amdxdna have them. Buffers
have two sides, which only `bo.sync` makes equal. Where the real one would crash or hang the process, a RuntimeError
says so. What the module does not have is `EmulatedXrt`'s own, below.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tilefuse.emulator.npu import enums, objects, runs
from tilefuse.emulator.npu.binding import Bound
from tilefuse.emulator.npu.faults import Call, Fault, Injection
from tilefuse.emulator.npu.system import FaultReport, Live, System
from tilefuse.emulator.timing import Report

__all__ = ["Call", "EmulatedXrt", "Fault", "FaultReport", "Injection", "Live"]

INFO = {
    "bdf": "0000:c5:00.1",
    "kdma": "0",
    "m2m": "0",
    "name": "NPU Strix",
    "host": json.dumps({"version": "2.21.0", "branch": "emulated", "drivers": [{"name": "amdxdna", "version": "0"}]}),
}
"""What `device.get_info` tells. Other keys have no answer; none of them would be the firmware's version."""

CONTEXTS = 16
"""Contexts at a time (amdxdna, npu4_family.h: hwctx_limit)."""

HEAP = 64 << 20
"""Bytes of cacheable buffers, all together (amdxdna, aie2_pci.h: AIE2_DEVM_SIZE)."""


class EmulatedXrt:
    """The module pyxrt, with a machine of its own.

    Args:
        faults: What goes wrong, and when.
        devices: NPUs; 0 is a machine without one, or without its driver.
        contexts: Contexts at a time.
        heap: Bytes of cacheable buffers.
        memlock: Bytes of all buffers, as the limit of locked memory sets them; None for no limit.
        executes: Whether runs do anything. Without, they complete at once: to see what the host does beside.
        info: Answers of `device.get_info` by key, in the place of `INFO`'s or beside them.
    """

    def __init__(
        self,
        faults: Iterable[Injection] = (),
        *,
        devices: int = 1,
        contexts: int = CONTEXTS,
        heap: int = HEAP,
        memlock: int | None = None,
        executes: bool = True,
        info: Mapping[str, str] | None = None,
    ) -> None:
        self._system = System(
            faults,
            devices=devices,
            contexts=contexts,
            heap=heap,
            memlock=memlock,
            executes=executes,
            info=INFO | dict(info or {}),
        )
        self.ert_cmd_state = enums.ert_cmd_state
        self.xclBOSyncDirection = enums.xclBOSyncDirection
        self.xrt_info_device = enums.xrt_info_device
        self.uuid: Any = self._bind("uuid", objects.Uuid)
        kernels = self._bind("xclbinkernel", objects.XclbinKernel)
        self.xclbin: Any = self._bind("xclbin", objects.Xclbin, _uuid=self.uuid, xclbinkernel=kernels)
        self.device: Any = self._bind("device", objects.Device, _uuid=self.uuid, _xclbin=self.xclbin)
        self.hw_context: Any = self._bind(
            "hw_context", objects.HwContext, _device=self.device, _uuid=self.uuid, _xclbin=self.xclbin
        )
        self.kernel: Any = self._bind("kernel", objects.Kernel, _hw_context=self.hw_context)
        self.bo: Any = self._bind("bo", objects.Bo, _device=self.device, _hw_context=self.hw_context)
        self.run: Any = self._bind("run", runs.Run, _kernel=self.kernel, _bo=self.bo)
        self.runlist: Any = self._bind("runlist", runs.Runlist, _hw_context=self.hw_context, _run=self.run)
        self.kernel._run = self.run

    def _bind(self, name: str, base: type[Bound], **related: Any) -> Any:
        return type(name, (base,), {"__slots__": (), "__module__": "pyxrt", "_system": self._system, **related})

    def enumerate_devices(self) -> int:
        """NPUs of the machine."""
        return self._system.devices

    # --- what the module does not have ---

    def live(self) -> Live:
        """Buffers, contexts and runs that are not given back yet; false if there are none."""
        return self._system.live()

    @property
    def last_report(self) -> Report | None:
        """What the last completed run took, *modelled*."""
        return self._system.last_report

    @property
    def last_fault(self) -> FaultReport | None:
        """Why the last failed run failed: for a design's fault, the emulator's message."""
        return self._system.last_fault

    @property
    def device_seconds(self) -> float:
        """Seconds, measured, from the end of each `run.start` until its `run.wait` knew: not the host's."""
        return self._system.device_seconds

    def calls(self, operation: str) -> int:
        """Calls so far of an operation (see `Fault.operation`)."""
        return self._system.faults.calls(operation)

    def inject(self, fault: Fault, *, at: int = 1, times: int | None = 1, when: Any = None) -> None:
        """Adds a fault; see `Injection`."""
        self._system.faults.inject(Injection(fault, at, times, when))

    def clear_faults(self) -> None:
        """Forgets the injected faults."""
        self._system.faults.clear()

    def resume(self) -> None:
        """Lets a stalled run go on."""
        self._system.processor.gate.set()

    def reset(self) -> None:
        """Resets the device, as loading its driver again does: after it, contexts that hang take runs again."""
        self._system.reset()
