"""The tensors and the configuration of compressed-tensors `pack-quantized` layers, symmetric ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.codes import pack_last
from tilefuse.errors import FormatError, UnsupportedFormatError
from tilefuse.formats.autoawq_writer import narrowed
from tilefuse.quantized import CodeOrder, QuantizedLinear

Array = npt.NDArray[Any]


def encode(layer: QuantizedLinear) -> dict[str, Array]:
    """The tensors of a layer by name.

    Raises:
        UnsupportedFormatError: The layer has zero points, minima or a permutation. (Readers disagree on packed zero
            points: transformers 5 with compressed-tensors 0.20 does not load them.)
        QuantizationError: The layer is invalid.
    """
    layer.validate()
    where = f"layer {layer.name!r}"
    if not layer.name:
        raise FormatError("a layer without a name cannot be written")
    if not layer.symmetric or layer.perm is not None:
        raise UnsupportedFormatError(
            f"{where} has zero points, minima or a permutation; requantise with symmetric=True"
        )
    tensors = {
        "weight_packed": layer.codes
        if layer.order is CodeOrder.ROWS_N
        else pack_last(np.ascontiguousarray(layer.codes_kn().T), layer.bits),
        "weight_scale": np.ascontiguousarray(layer.scales.T),
        "weight_shape": np.array([layer.n, layer.k], np.int64),
    }
    if layer.bias is not None:
        tensors["bias"] = narrowed(layer.bias)
    return {f"{layer.name}.{suffix}": array for suffix, array in tensors.items()}


def quantization_config(bits: int, group: int | None, ignore: Sequence[str]) -> dict[str, Any]:
    """The ``quantization_config`` of symmetric weights.

    Args:
        bits: 4 or 8.
        group: Input channels that share a scale, or None for one scale an output channel.
        ignore: Names of the linear layers that are not quantised.
    """
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }
