"""transformers' plug: the quantiser that puts packed layers in place of a checkpoint's quantised ones."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from tilefuse import fusion
from tilefuse.errors import FormatError, LayoutError, UnsupportedFormatError
from tilefuse.formats import Checkpoint, open_checkpoint
from tilefuse.formats.checkpoint import METHODS
from tilefuse.fusion import Product
from tilefuse.hf import blocks, decode, parallel
from tilefuse.hf.linear import FusedLinear, FusedPart, TileFuseLinear
from tilefuse.hf.options import Options, current
from tilefuse.packcache import packed_layers
from tilefuse.packed import PackedLinear
from tilefuse.phases import Phases, choose

_log = logging.getLogger("tilefuse")

_SUFFIXES = (
    "qweight",
    "qzeros",
    "scales",
    "scaled_zeros",
    "g_idx",
    "bias",
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    r"(?:input|output)_(?:scale|zero_point)",
)
"""Tensors of a quantised layer, which are read from the files by tilefuse and not by transformers."""


class TileFuseConfig(QuantizationConfigMixin):
    """A checkpoint's quantisation settings, kept as they are: what they mean, the reader of the format decides."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.quant_method = str(settings.get("quant_method", ""))

    def to_dict(self) -> dict[str, Any]:
        """The settings, as ``config.json`` holds them."""
        return copy.deepcopy(self.settings)

    def to_diff_dict(self) -> dict[str, Any]:
        """All of them."""
        return self.to_dict()


class _Pending(nn.Module):
    """Holds the place of a layer while transformers loads all others."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a quantised layer was called while its model was being loaded")


class TileFuseQuantizer(HfQuantizer):
    """Loads the quantised layers of a checkpoint straight into packed tiles; all else is left to transformers."""

    requires_calibration = True

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._checkpoint: Checkpoint | None = None
        self._products: list[Product] = []
        self._paths: dict[str, str] = {}
        self._dense: list[str] = []

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        opened = current()
        checkpoint = self._checkpoint = _open(kwargs.get("checkpoint_files"), self.quantization_config)
        self._paths = _module_paths(model, checkpoint)
        names = _packable(checkpoint, list(self._paths), opened)
        self._dense = [name for name in self._paths if name not in set(names)]
        self._products = fusion.products(checkpoint, names, fuse=opened.fuse)
        if opened.head == 8:
            self._products += _head(model, checkpoint, self._paths)
        patterns = set(model._keys_to_ignore_on_load_unexpected or ())
        tied = getattr(model, "all_tied_weights_keys", {})
        places = set()
        for name, path in self._paths.items():
            if f"{path}.weight" in tied:  # transformers ties it before it goes
                continue
            model.set_submodule(path, _Pending(model.get_submodule(path)))
            places |= {re.escape(name), re.escape(path)}
        # On this instance: the files' tensors of these layers are no surprise. One pattern, since each takes a
        # millisecond to compile.
        patterns.add(rf"^(?:{'|'.join(sorted(places))})\.(?:{'|'.join(_SUFFIXES)})$")
        model._keys_to_ignore_on_load_unexpected = patterns

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        opened, checkpoint = current(), self._checkpoint
        assert checkpoint is not None
        self._checkpoint = None
        if parallel.world_of(model) > 1:
            if opened.head == 8:
                raise LayoutError("head=8 is not done under tensor parallelism: load it without one of them")
            if self._dense:
                raise LayoutError(
                    f"layer {self._dense[0]!r} would run in torch, which is not done under tensor parallelism: load it "
                    "without distributed_config, or in another format"
                )
            parallel.place(model, checkpoint, self._paths, list(self._paths), opened.device)
            return model
        layers = packed_layers(checkpoint, self._products, opened.folder(checkpoint.path), progress=opened.progress)
        phases = choose(opened.device, [layer.layout for layer in layers.values()])
        for product in self._products:
            _place(model, product, layers[product.name], self._paths, phases)
        for name in self._dense:
            model.set_submodule(self._paths[name], _dense(checkpoint, name, model.dtype))
        if opened.blocks:
            blocks.install(model)
            decode.install(model)
        return model

    def is_serializable(self) -> bool:
        """No: the packed layout is the machine's. The checkpoint itself is what to copy, or `tilefuse.save`."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No; the gradient goes through the layers to what lies before them."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Yes, by the operator ``tilefuse::linear``."""
        return True


# --- before -----------------------------------------------------------------------------------------------------------


def _open(files: Any, settings: TileFuseConfig) -> Checkpoint:
    if not files:
        raise FormatError("no checkpoint files were given: quantised layers are read from files, not from a state dict")
    paths = [Path(file) for file in files]
    others = [path for path in paths if path.suffix != ".safetensors"]
    if others:
        raise UnsupportedFormatError(f"{others[0]}: quantised checkpoints are read from safetensors files only")
    checkpoint = open_checkpoint(paths[0].parent, quantization=settings.to_dict())
    read, given = {path.resolve() for path in checkpoint.files()}, {path.resolve() for path in paths}
    if read != given:
        differing = sorted(str(path) for path in read ^ given)
        raise FormatError(
            f"{checkpoint.path}: transformers and tilefuse would read other files ({differing[0]}); leave one set of "
            "safetensors files, with its index, in the folder"
        )
    return checkpoint


def _module_paths(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """The module of each quantised layer that the model has, by the names of the files."""
    refused = checkpoint.refused()
    names = [info.name for info in checkpoint.linears() if info.quantized]
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    state = model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", {})
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for name in [*names, *refused]:
        key, converter = rename_source_key(f"{name}.weight", renamings, converters, model.base_model_prefix, state)
        path = key.removesuffix(".weight")
        module = modules.get(path) if converter is None else None
        if isinstance(module, nn.Linear):
            if name in refused:
                raise UnsupportedFormatError(refused[name])
            if f"{path}.weight" in tied:
                _log.info("layer %r is tied to the embedding: its quantised copy in the files is not used", name)
                continue
            info = checkpoint.info(name)
            if (info.k, info.n) != (module.in_features, module.out_features):
                raise FormatError(
                    f"layer {name!r} has {info.k} inputs and {info.n} outputs in the files, and the model's has "
                    f"{module.in_features} and {module.out_features}: config.json and the files are not of one model"
                )
            found[name] = path
        elif converter is not None or key in state or _holds_experts(model, path):
            raise UnsupportedFormatError(
                f"layer {name!r} is quantised, and {type(model).__name__} has no torch.nn.Linear there but "
                f"{'a tensor of several layers (experts)' if module is None else type(module).__name__}: this "
                "architecture can't run on tilefuse; tilefuse.hf.unregister() leaves it to transformers' own quantiser"
            )
        else:
            _log.warning("layer %r of the files has no place in %s and is left out", name, type(model).__name__)
    if not found:
        raise FormatError(
            f"{checkpoint.path}: none of its {len(names)} quantised layers has a place in {type(model).__name__}: "
            "load it with the class that config.json names"
        )
    return found


def _holds_experts(model: nn.Module, path: str) -> bool:
    parent = path
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if parent.endswith("experts"):
            return True
    return False


def _packable(checkpoint: Checkpoint, names: list[str], opened: Options) -> list[str]:
    """Those that the packed format holds."""
    fit = []
    for name in names:
        try:
            fusion.layout_of(checkpoint.info(name))
        except LayoutError as error:
            if opened.fallback != "dequantize":
                raise LayoutError(
                    f"{error}; load it within tilefuse.hf.options(fallback='dequantize') to run this layer in torch"
                ) from None
            _log.warning("layer %r runs in torch, dequantised: %s", name, error)
        else:
            fit.append(name)
    return fit


def _head(model: nn.Module, checkpoint: Checkpoint, paths: dict[str, str]) -> list[Product]:
    """The output head as a product of 8 bits, where it is a plain layer; ``paths`` is told its place."""
    head = model.get_output_embeddings()
    path = next((path for path, module in model.named_modules() if module is head), "")
    if type(head) is not nn.Linear or head.bias is not None or path in paths.values():
        return []
    key = f"{path}.weight"
    wanted = getattr(model, "all_tied_weights_keys", {}).get(key, key)
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    state = model.state_dict()
    for tensor in checkpoint.tensors():
        found, _ = rename_source_key(tensor, renamings, [], model.base_model_prefix, state)
        if found == wanted and tensor.endswith(".weight"):
            shape = checkpoint.tensor(tensor).shape
            if shape != (head.out_features, head.in_features):
                return []  # what is wrong with it, transformers says
            paths[path] = path
            return [Product(path, (tensor.removesuffix(".weight"),), bits=8)]
    return []


# --- after ------------------------------------------------------------------------------------------------------------


def _place(model: nn.Module, product: Product, layer: PackedLinear, paths: dict[str, str], phases: Phases) -> None:
    """Puts a packed layer where the layers that it stands for were."""
    if not product.fused:
        model.set_submodule(paths[product.name], TileFuseLinear(layer, phases))
        return
    places = [paths[part] for part in product.parts]
    splits = tuple(model.get_submodule(place).out_features for place in places)
    fused = FusedLinear(layer, splits, phases)
    parent = model.get_submodule(places[0].rpartition(".")[0])
    parent.add_module(product.name.rpartition(".")[2], fused)
    for index, place in enumerate(places):
        model.set_submodule(place, FusedPart(fused, index))


def _dense(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> nn.Linear:
    layer = checkpoint.linear(name)
    with torch.device("meta"):
        linear = nn.Linear(layer.k, layer.n, bias=layer.bias is not None)
    linear.weight = nn.Parameter(torch.from_numpy(layer.dequantize()).T.to(dtype).contiguous(), requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(torch.from_numpy(layer.bias).to(dtype), requires_grad=False)
    return linear


# --- the registry -----------------------------------------------------------------------------------------------------

_BEFORE: dict[str, tuple[Any, Any]] = {}


def register() -> None:
    """Makes tilefuse the quantiser of the formats that it reads. Done by the import."""
    for method in METHODS:
        if AUTO_QUANTIZER_MAPPING.get(method) is TileFuseQuantizer:
            continue
        _BEFORE[method] = AUTO_QUANTIZER_MAPPING.get(method), AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
        # Its own decorators refuse a name that is taken.
        AUTO_QUANTIZER_MAPPING[method] = TileFuseQuantizer
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = TileFuseConfig


def unregister() -> None:
    """Gives the registry back to what was there before; loaded models stay as they are."""
    for method, (quantizer, config) in _BEFORE.items():
        AUTO_QUANTIZER_MAPPING[method] = quantizer
        AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config
    _BEFORE.clear()
