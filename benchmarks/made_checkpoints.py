"""Checkpoints of random codes, as large as real layers, for benchmarks of packing and loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[Any]

GROUP = 128

AWQ, GPTQ, GPTQ_ORDER, COMPRESSED = "AutoAWQ gemm", "GPTQ", "GPTQ, activation order", "compressed-tensors"

_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
_SETTINGS: dict[str, dict[str, Any]] = {
    AWQ: {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    GPTQ: {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False},
    GPTQ_ORDER: {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": True},
    COMPRESSED: {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    },
}

FORMATS = tuple(_SETTINGS)


def write_checkpoint(folder: Path, form: str, shapes: list[tuple[int, int]]) -> Path:
    """Writes a checkpoint of one layer for each (K, N) of ``shapes``, 4 bits in groups of 128; returns its file."""
    rng = np.random.default_rng(0)
    tensors: dict[str, Array] = {}
    for index, (k, n) in enumerate(shapes):
        made = _layer(rng, form, k, n)
        tensors |= {f"model.layers.{index}.mlp.proj.{suffix}": array for suffix, array in made.items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": _SETTINGS[form]}))
    path = folder / "model.safetensors"
    save_file(tensors, path)
    return path


def _layer(rng: np.random.Generator, form: str, k: int, n: int) -> dict[str, Array]:
    def words(*shape: int) -> Array:
        return rng.integers(0, 2**32, shape, np.uint32).view(np.int32)

    groups = k // GROUP
    scales = rng.uniform(0.001, 0.02, (groups, n)).astype(np.float16)
    if form == AWQ:
        return {"qweight": words(k, n // 8), "qzeros": words(groups, n // 8), "scales": scales}
    if form == COMPRESSED:
        shape = np.array([n, k], np.int64)
        return {
            "weight_packed": words(n, k // 8),
            "weight_scale": np.ascontiguousarray(scales.T),
            "weight_shape": shape,
        }
    g_idx = np.arange(k, dtype=np.int32) // GROUP
    if form == GPTQ_ORDER:
        rng.shuffle(g_idx)
    middle = np.full((groups, n // 8), 0x77777777, np.int32)  # stored less one
    return {"qweight": words(k // 8, n), "qzeros": middle, "scales": scales, "g_idx": g_idx}
