"""The devices of a loaded model."""

from __future__ import annotations

from torch import nn

from tilefuse.errors import DeviceError
from tilefuse.hf.linear import TileFuseLinear
from tilefuse.phases import Phases, choose


def phases_of(model: nn.Module) -> Phases:
    """Which device runs which phase of a model, shared by its packed layers.

    Raises:
        DeviceError: It has none.
    """
    for module in model.modules():
        if isinstance(module, TileFuseLinear):
            return module.phases
    raise DeviceError("the model has no layers of tilefuse: load a quantised checkpoint after `import tilefuse.hf`")


def set_device(model: nn.Module, device: str | None) -> Phases:
    """Sets the device of a model's packed layers; returns what was chosen.

    Args:
        model: A loaded model.
        device: As in `tilefuse.hf.options`.

    Raises:
        DeviceError: There is no such device, or the model has no layers of tilefuse.
    """
    layers = [module for module in model.modules() if isinstance(module, TileFuseLinear)]
    chosen = choose(device, [module.layer.layout for module in layers])
    phases = phases_of(model)
    phases.set(chosen)
    for module in layers:
        module.phases = phases
    return phases
