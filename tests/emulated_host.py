"""A host in the words of pyxrt and nothing else, for tests of the emulated module: what a user would write."""

from __future__ import annotations

from typing import Any

import numpy as np
from layers import Scheme, make_layer

from tilefuse import host_buffers
from tilefuse import plan as planning
from tilefuse.emulator.artifacts import EmulatedArtifacts
from tilefuse.emulator.xrt import EmulatedXrt
from tilefuse.packed import PackedLinear
from tilefuse.plan import Plan
from tilefuse.testing import gemm_error

Rng = np.random.Generator


class Host:
    """A context of ``plan``'s xclbin, and what a run of it takes."""

    def __init__(self, pyxrt: Any, artifacts: EmulatedArtifacts, plan: Plan, device: Any = None) -> None:
        self.pyxrt = pyxrt
        self.artifacts = artifacts
        self.to_device = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_TO_DEVICE
        self.from_device = pyxrt.xclBOSyncDirection.XCL_BO_SYNC_BO_FROM_DEVICE
        self.device = device if device is not None else pyxrt.device(0)
        found = artifacts.xclbin(plan)
        self.xclbin = pyxrt.xclbin(str(found.path))
        self.device.register_xclbin(self.xclbin)
        self.context = pyxrt.hw_context(self.device, self.xclbin.get_uuid())
        self.kernel = pyxrt.kernel(self.context, found.kernel)

    def buffer(self, data: Any, index: int, *, sync: bool = True) -> Any:
        """A buffer of ``data`` for argument ``index``."""
        flags = self.pyxrt.bo.cacheable if index == 1 else self.pyxrt.bo.host_only
        made = self.pyxrt.bo(self.device, data.nbytes, flags, self.kernel.group_id(index))
        made.write(np.ascontiguousarray(data).view(np.uint8), 0)
        if sync:
            made.sync(self.to_device)
        return made

    def buffers(self, plan: Plan, layer: PackedLinear, x: Any) -> list[Any]:
        """Of the instructions, x, w and y."""
        return [
            self.buffer(self.artifacts.instructions(plan), 1),
            self.buffer(host_buffers.stage(plan, x, layer.perm), 3),
            self.buffer(layer.data, 4),
            self.buffer(np.zeros(plan.y_words, np.int32), 5),
        ]

    def run(self, buffers: list[Any]) -> Any:
        """A run of these, not started."""
        run = self.pyxrt.run(self.kernel)
        run.set_arg(0, 3)
        run.set_arg(1, buffers[0])
        run.set_arg(2, buffers[0].size())
        for index, data in enumerate(buffers[1:], 3):
            run.set_arg(index, data)
        return run

    def results(self, plan: Plan, y: Any) -> Any:
        """What is in the host's side of ``y``."""
        return host_buffers.results(plan, np.frombuffer(y.map(), np.int32).copy())


def small_gemv(rng: Rng, k: int = 128, n: int = 64) -> tuple[Plan, PackedLinear]:
    """The quickest problem."""
    layer = make_layer(rng, k, n, Scheme(4, 128)).layer
    return planning.gemv(layer.layout), layer


def vector(rng: Rng, k: int) -> Any:
    """Activations of one row."""
    return rng.normal(0, 1, k).astype(np.float32)


class Problem:
    """A GEMV on a context, ready to run."""

    def __init__(self, pyxrt: EmulatedXrt, artifacts: EmulatedArtifacts, rng: Rng) -> None:
        self.pyxrt = pyxrt
        self.plan, self.layer = small_gemv(rng)
        self.x = vector(rng, self.layer.k)
        self.host = Host(pyxrt, artifacts, self.plan)
        self.code, self.bx, self.bw, self.by = self.host.buffers(self.plan, self.layer, self.x)

    def run(self) -> Any:
        """A run, not started."""
        return self.host.run([self.code, self.bx, self.bw, self.by])

    def outcome(self, run: Any) -> Any:
        """Starts and waits."""
        run.start()
        return run.wait()

    def right(self) -> bool:
        """Whether the device's side of y is what it should be; forgets it on the host's."""
        self.by.sync(self.host.from_device)
        y = self.host.results(self.plan, self.by)[0]
        return bool(gemm_error(y, self.x, self.layer).ok)

    def spoil(self) -> None:
        """Clears y on both sides."""
        self.by.write(bytes(self.by.size()), 0)
        self.by.sync(self.host.to_device)

    def close(self) -> None:
        """Lets everything go."""
        self.__dict__.clear()
