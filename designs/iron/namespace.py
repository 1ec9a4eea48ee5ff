"""The names that designs are built with: mlir-aie's IRON, or the emulator's of the same names.

Designs are functions of a namespace, ``gemm(iron, plan)``, so that the very same code is compiled for the array and run
on the emulator. This is the one place that knows where mlir-aie keeps them.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from tilefuse import arch
from tilefuse.errors import ToolchainError
from tilefuse.kernels_build import MLIR_AIE_WHEEL, pip_install

NAMES = {
    "aie.iron": ("ObjectFifo", "Worker", "Buffer", "Kernel", "Runtime", "TaskGroup", "Program"),
    "aie.iron.controlflow": ("range_",),
    "aie.iron.device": ("Tile",),
    "aie.helpers.taplib": ("TensorAccessPattern",),
}
"""Names by the module of mlir-aie (1.4) that has them. Designs also use ``device(columns)``."""


def aie_namespace() -> SimpleNamespace:
    """The names of the installed mlir-aie.

    Raises:
        ToolchainError: It is not installed, or is of a version without these names.
    """
    install = pip_install(MLIR_AIE_WHEEL)
    found: dict[str, Any] = {}
    for module, names in NAMES.items():
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            raise ToolchainError(f"emitting MLIR takes mlir-aie ({error}): {install}") from None
        for name in names:
            if not hasattr(loaded, name):
                raise ToolchainError(
                    f"the installed mlir-aie has no {module}.{name}, and the designs are for version 1.4: {install}"
                )
            found[name] = getattr(loaded, name)
    devices = importlib.import_module("aie.iron.device")

    def device(columns: int) -> Any:
        """npu2 with its first ``columns`` columns."""
        return devices.NPU2() if columns == arch.COLUMNS else getattr(devices, f"NPU2Col{columns}")()

    return SimpleNamespace(**found, device=device)
