"""Packed layers as torch modules, and the operator that compiled graphs call."""

from __future__ import annotations

import itertools
import json
import math
import warnings
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilefuse import ops
from tilefuse._buffers import weights_empty
from tilefuse.errors import ShapeError, TileFuseError
from tilefuse.packed import PackedLinear
from tilefuse.phases import Phases
from tilefuse.storage import LayerSpec

_LAYERS: weakref.WeakValueDictionary[int, TileFuseLinear] = weakref.WeakValueDictionary()
"""Modules by handle: a graph holds the number, and one that outlives its module must fail, not read freed memory."""

_HANDLES = itertools.count(1)


class TileFuseLinear(nn.Module):
    """``y = x W + bias`` from packed tiles: [..., K] -> [..., N], in the dtype of x (under autocast, in autocast's).

    The weights stay in CPU memory, outside torch: ``to``, ``half`` and the like leave them alone. Activations on
    another torch device are copied to the CPU and the results back. The gradient goes to x; the weights are constants.

    In the state dict: ``packed`` uint8 (the tiles), ``layout`` uint8 (JSON), ``bias`` float32 [N] and ``perm`` int32
    [K] where the layer has them. Loading one takes a copy of the tensors and any layout of the same K and N.

    Args:
        layer: What to multiply by.
        phases: Which device multiplies, by rows; shared by the layers of a model. The CPU when None.
    """

    def __init__(self, layer: PackedLinear, phases: Phases | None = None) -> None:
        super().__init__()
        self.in_features = layer.k
        self.out_features = layer.n
        self.phases = Phases() if phases is None else phases
        self.layer = layer
        self._take_handle()

    def _take_handle(self) -> None:
        self._handle = next(_HANDLES)
        _LAYERS[self._handle] = self

    def forward(self, x: Tensor) -> Tensor:
        # The op costs some microseconds a call, which a decode step pays at every layer: only where it is needed.
        if (
            torch.compiler.is_compiling()
            or type(x) is not Tensor
            or x.device.type != "cpu"
            or (x.requires_grad and torch.is_grad_enabled())
            or torch.jit.is_tracing()
        ):
            return self._by_op(x)
        if torch.is_autocast_enabled("cpu"):
            x = _autocast(x)
        return self.multiply(x)

    def _by_op(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = _autocast(x)
        y: Tensor = torch.ops.tilefuse.linear(x, self._handle, self.out_features)
        return y

    def multiply(self, x: Tensor) -> Tensor:
        """The product itself, for a tensor in CPU memory that needs no gradient."""
        y: Tensor = ops.linear(x, self.layer, device=self.phases.device(math.prod(x.shape[:-1])))
        return y

    def extra_repr(self) -> str:
        lay = self.layer.layout
        group = "channel" if lay.group >= lay.k else lay.group
        bias = self.layer.bias is not None
        return (
            f"in_features={lay.k}, out_features={lay.n}, bias={bias}, bits={lay.bits}, group={group}, "
            f"zero={lay.zero.value}, {self.layer.nbytes:,} bytes from {self.layer.source}"
        )

    # --- what torch does to modules -----------------------------------------------------------------------------------

    def _apply(self, fn: Any, recurse: bool = True) -> TileFuseLinear:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_handle"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._take_handle()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        layer = self.layer
        text = json.dumps(LayerSpec.of(layer).to_json()).encode()
        destination[f"{prefix}packed"] = tensor_of(layer.data)
        destination[f"{prefix}layout"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        for name, array in (("bias", layer.bias), ("perm", layer.perm)):
            if array is not None:
                destination[f"{prefix}{name}"] = tensor_of(array)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # The tiles may be a read-only mapping, so nothing is copied into what is there.
        found = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        missing = [name for name in ("packed", "layout") if name not in found]
        if strict:
            unexpected_keys += [prefix + key for key in found if key not in ("packed", "layout", "bias", "perm")]
        if missing:
            missing_keys += [prefix + name for name in missing]
            return
        try:
            layer = _rebuilt(self.layer.name, found)
        except (TileFuseError, ValueError, TypeError) as error:
            error_msgs.append(f"{prefix}packed, {prefix}layout: {error}")
            return
        if (layer.k, layer.n) == (self.in_features, self.out_features):
            self.layer = layer
        else:
            error_msgs.append(
                f"{prefix}layout: K x N is {layer.k} x {layer.n}, and the module's is "
                f"{self.in_features} x {self.out_features}"
            )


def _rebuilt(name: str, tensors: dict[str, Any]) -> PackedLinear:
    spec = LayerSpec.from_json(name, json.loads(bytes(tensors["layout"].tolist())), "the state dict")
    given = tensors["packed"].detach().cpu().contiguous().numpy()
    data = weights_empty(given.nbytes)
    data[:] = given.reshape(-1).view(np.uint8)
    bias, perm = (tensors[key].detach().cpu().numpy().copy() if key in tensors else None for key in ("bias", "perm"))
    if (bias is not None, perm is not None) != (spec.bias, spec.perm):
        raise ShapeError(f"bias and perm: the layout says {spec.bias} and {spec.perm}, the state dict has others")
    return PackedLinear(name, spec.layout, data, bias, perm, spec.source)


def tensor_of(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over the memory of ``array``, which it must not be written through if that is mapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that NumPy says it is read-only
        return torch.from_numpy(array)


def _autocast(x: Tensor) -> Tensor:
    """x as autocast hands it to `torch.nn.Linear`: float64 is left alone."""
    if x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


# --- the operator -----------------------------------------------------------------------------------------------------


def _module(handle: int) -> TileFuseLinear:
    module = _LAYERS.get(handle)
    if module is None:
        raise TileFuseError(f"layer {handle} of this graph is gone: keep the model alive, or trace the graph anew")
    return module


@torch.library.custom_op("tilefuse::linear", mutates_args=())
def _linear(x: Tensor, handle: int, n: int) -> Tensor:
    y = _module(handle).multiply(x.detach().cpu())
    return y if x.device.type == "cpu" else y.to(x.device)


@_linear.register_fake
def _(x: Tensor, handle: int, n: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _remember(ctx: Any, inputs: tuple[Tensor, int, int], output: Tensor) -> None:
    ctx.handle = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.ops.tilefuse.linear_grad(grad, ctx.handle, _module(ctx.handle).in_features), None, None


@torch.library.custom_op("tilefuse::linear_grad", mutates_args=())
def _linear_grad(grad: Tensor, handle: int, k: int) -> Tensor:
    weights = tensor_of(_module(handle).layer.dequantize().view(np.uint16)).view(torch.bfloat16)
    flat = grad.detach().cpu().reshape(-1, weights.shape[1])
    out = (flat.float() @ weights.float().T).to(grad.dtype)
    return out.reshape(*grad.shape[:-1], k).to(grad.device)


@_linear_grad.register_fake
def _(grad: Tensor, handle: int, k: int) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], k))


_linear.register_autograd(_backward, setup_context=_remember)


# --- several layers as one --------------------------------------------------------------------------------------------


class FusedLinear(TileFuseLinear):
    """Layers with the same input, packed as one: the first that is asked for computes all, the others take theirs.

    Args:
        layer: The layers beside each other along N.
        splits: Output channels of each.
        phases: As in `TileFuseLinear`.
    """

    def __init__(self, layer: PackedLinear, splits: tuple[int, ...], phases: Phases | None = None) -> None:
        super().__init__(layer, phases)
        if sum(splits) != layer.n:
            raise ShapeError(f"layer {layer.name!r}: splits {splits} add up to {sum(splits)}, and N = {layer.n}")
        self.splits = splits
        self._held: _Held | None = None

    def part(self, x: Tensor, index: int) -> Tensor:
        """Output channels of layer ``index`` for ``x``: computed with the others, or taken from when they were."""
        held = self._held
        if held is not None and held.x is x and held.parts[index] is not None and held.is_current():
            part: Tensor = held.parts[index]
            held.parts[index] = None
            if all(other is None for other in held.parts):
                self._held = None
            return part
        parts: list[Any] = list(self(x).split(self.splits, dim=-1))
        part, parts[index] = parts[index], None
        self._held = _Held(x, parts)
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_held": None}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, splits={self.splits}"


class _Held:
    """Parts that have not been asked for yet, and the activations that they belong to."""

    def __init__(self, x: Tensor, parts: list[Any]) -> None:
        self.x, self.parts = x, parts
        self.copy: Tensor | None = None
        self.version = 0
        # A graph is traced from code that is known to leave x alone.
        if torch.compiler.is_compiling():
            return
        if x.is_inference():  # such tensors count no versions
            self.copy = x.clone()
        else:
            self.version = x._version

    def is_current(self) -> bool:
        """Whether x still holds what the parts were computed from."""
        if torch.compiler.is_compiling():
            return True
        if self.copy is not None:
            return bool(torch.equal(self.x, self.copy))
        return bool(self.x._version == self.version)


class FusedPart(nn.Module):
    """One of the layers of a `FusedLinear`, in its place in the model."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        # Not a submodule: the state dict has the tiles once, where the parent has the fused layer.
        self.__dict__["fused"] = fused
        self.index = index
        self.in_features = fused.in_features
        self.out_features = fused.splits[index]

    def forward(self, x: Tensor) -> Tensor:
        fused: FusedLinear = self.__dict__["fused"]
        return fused.part(x, self.index)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
