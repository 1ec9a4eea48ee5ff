"""Tiny checkpoints of every format, made by code that shares nothing with the readers.

Words are built one code at a time with shifts, straight from the definitions of the formats, and files by the
`safetensors` library. `Truth` holds what was put in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors.numpy

Array = npt.NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass(frozen=True)
class Truth:
    """A layer as it was made up: codes [K, N] and ``group_of`` [K] in the checkpoint's order of inputs."""

    codes: Array
    scales: Array
    zeros: Array
    group_of: Array
    bits: int
    group: int
    symmetric: bool
    bias: Array | None = None

    @property
    def k(self) -> int:
        return self.codes.shape[0]

    @property
    def n(self) -> int:
        return self.codes.shape[1]

    def weights(self) -> Array:
        """float64 [K, N], one row at a time."""
        out = np.empty(self.codes.shape, np.float64)
        for row, group in enumerate(self.group_of):
            difference = self.codes[row].astype(np.int64) - self.zeros[group].astype(np.int64)
            out[row] = difference * self.scales[group].astype(np.float64)
        return out


def truth(
    rng: np.random.Generator,
    k: int,
    n: int,
    *,
    bits: int = 4,
    group: int = -1,
    symmetric: bool = False,
    act_order: bool = False,
    bias: bool = False,
    scale_dtype: npt.DTypeLike = np.float16,
) -> Truth:
    """A layer of random codes that uses every code and zero point, with positive scales."""
    size = k if group == -1 else group
    groups = -(-k // size)
    top = 1 << bits
    zeros = rng.integers(0, top, (groups, n), dtype=np.uint8)
    zeros.flat[: min(2, zeros.size)] = (0, top - 1)[: zeros.size]
    group_of = np.arange(k) // size
    if act_order:
        group_of = rng.permutation(group_of)
    return Truth(
        codes=rng.integers(0, top, (k, n), dtype=np.uint8),
        scales=rng.uniform(0.001, 0.1, (groups, n)).astype(scale_dtype),
        zeros=np.full_like(zeros, top // 2) if symmetric else zeros,
        group_of=group_of.astype(np.int32),
        bits=bits,
        group=size,
        symmetric=symmetric,
        bias=rng.normal(size=n).astype(np.float16) if bias else None,
    )


def pack(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Codes [R, C] -> int32 [R, ceil(C bits / 32)]: position i of a word holds code ``order[i]`` of its run."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, columns = codes.shape
    out = np.zeros((rows, -(-columns * bits // 32)), np.uint32)
    for word in range(out.shape[1]):
        for position in range(per_word):
            column = word * per_word + order[position]
            if column < columns:
                out[:, word] |= codes[:, column].astype(np.uint32) << np.uint32(position * bits)
    return out.astype(np.int64).astype(np.uint32).view(np.int32)


AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_gemm(layer: Truth, *, order: tuple[int, ...] | None = AWQ) -> dict[str, Array]:
    """AutoAWQ gemm; natural order (``order=None``) for 8 bits and for Quark's pack_method "order"."""
    order = order if layer.bits == 4 else None
    tensors = {"qweight": pack(layer.codes, layer.bits, order), "scales": layer.scales}
    if not layer.symmetric:
        tensors["qzeros"] = pack(layer.zeros, layer.bits, order)
    return _with_bias(tensors, layer)


def _awq_padding(layer: Truth) -> int:
    """Width of the padded scales: the definition, in words of eight groups."""
    groups = layer.k // layer.group
    step = {32: 4, 64: 2}.get(layer.group, 1)
    zero_words = (groups + 7) // 8
    while zero_words % step:
        zero_words += 1
    return zero_words * 8


def awq_gemv(layer: Truth) -> dict[str, Array]:
    """AutoAWQ gemv: everything transposed, natural order, scales and zeros padded with zeros."""
    width = _awq_padding(layer)
    zeros = np.zeros((layer.n, width), np.uint8)
    scales = np.zeros((layer.n, width), layer.scales.dtype)
    zeros[:, : layer.zeros.shape[0]] = layer.zeros.T
    scales[:, : layer.scales.shape[0]] = layer.scales.T
    tensors = {"qweight": pack(layer.codes.T, 4), "qzeros": pack(zeros, 4), "scales": scales}
    return _with_bias(tensors, layer)


def awq_fast(layer: Truth, mins: Array, *, zeros_name: str = "qzeros") -> dict[str, Array]:
    """AutoAWQ gemv_fast, with ``mins`` [G, N] as float zeros; word by word from the definition of its tiles."""
    words = np.zeros((layer.n // 4, layer.k), np.uint16)
    for n in range(layer.n):
        for k in range(layer.k):
            tile, column = divmod(k, 64)
            chunk, within = divmod(column, 32)
            nibble, word = divmod(within, 8)
            at = tile * 64 + (n % 4) * 16 + chunk * 8 + word
            words[n // 4, at] |= np.uint16(int(layer.codes[k, n]) << (4 * nibble))
    width, groups = _awq_padding(layer), layer.scales.shape[0]
    scales = np.zeros((width, layer.n), layer.scales.dtype)
    zeros = np.zeros((width, layer.n), mins.dtype)
    scales[:groups], zeros[:groups] = layer.scales, mins
    return _with_bias({"qweight": words.view(np.int16), "scales": scales, zeros_name: zeros}, layer)


def gptq(layer: Truth, *, version: int = 1, g_idx: bool = True) -> dict[str, Array]:
    """GPTQ; version 1 stores zero points less one, modulo 2^bits."""
    zeros = layer.zeros if version == 2 else ((layer.zeros.astype(np.int64) - 1) % (1 << layer.bits)).astype(np.uint8)
    tensors = {
        "qweight": pack(layer.codes.T, layer.bits).T.copy(),
        "qzeros": pack(zeros, layer.bits),
        "scales": layer.scales,
    }
    if g_idx:
        tensors["g_idx"] = layer.group_of
    return _with_bias(tensors, layer)


def ct_packed(layer: Truth, *, g_idx: bool = False) -> dict[str, Array]:
    """compressed-tensors pack-quantized, strategy group or channel."""
    tensors = {
        "weight_packed": pack(layer.codes.T, layer.bits),
        "weight_scale": layer.scales.T.copy(),
        "weight_shape": np.array([layer.n, layer.k], np.int64),
    }
    if not layer.symmetric:
        tensors["weight_zero_point"] = pack(layer.zeros, layer.bits).T.copy()
    if g_idx:
        tensors["weight_g_idx"] = layer.group_of
    return _with_bias(tensors, layer)


def ct_int(layer: Truth) -> dict[str, Array]:
    """compressed-tensors int-quantized and naive-quantized: signed bytes."""
    tensors = {
        "weight": (layer.codes.T.astype(np.int16) - 128).astype(np.int8),
        "weight_scale": layer.scales.T.copy(),
    }
    if not layer.symmetric:
        tensors["weight_zero_point"] = (layer.zeros.T.astype(np.int16) - 128).astype(np.int8)
    return _with_bias(tensors, layer)


def _with_bias(tensors: dict[str, Array], layer: Truth) -> dict[str, Array]:
    return tensors if layer.bias is None else {**tensors, "bias": layer.bias}


def named(name: str, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Tensors with the name of their layer in front."""
    return {f"{name}.{suffix}": array for suffix, array in tensors.items()}


def save_file(path: Path, tensors: Mapping[str, Array], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, by the library."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    safetensors.numpy.save_file(contiguous, path, {"format": "pt"} if metadata is None else metadata)


def save(
    directory: Path,
    tensors: Mapping[str, Array],
    quantization: Mapping[str, Any] | None,
    *,
    shards: int = 1,
    **config: Any,
) -> Path:
    """A checkpoint directory; the tensors are dealt to shards in turn, so that layers straddle them."""
    directory.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(directory / "model.safetensors", tensors)
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: array for i, (name, array) in enumerate(tensors.items()) if i % shards == shard}
            save_file(directory / file, part)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    if config:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def awq_config(bits: int = 4, group: int = 128, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": bits, "group_size": group, "zero_point": True, "version": "gemm", **more}


def gptq_config(bits: int = 4, group: int = 128, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **more}


def ct_config(
    bits: int = 4, group: int | None = 128, *, form: str = "pack-quantized", **weights: Any
) -> dict[str, Any]:
    arguments = {
        "num_bits": bits,
        "type": "int",
        "symmetric": False,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        **weights,
    }
    scheme = {"targets": ["Linear"], "weights": arguments, "input_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


Make = Callable[[Path, np.random.Generator, int, int], Truth]
"""Saves a checkpoint with one layer "layer" of K inputs and N outputs into a directory, and returns what it holds."""


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: how a layer's tensors are made, what the configuration says, and options of `truth`."""

    encode: Callable[[Truth], dict[str, Array]]
    config: Callable[[int, int], dict[str, Any]]
    options: Mapping[str, Any]

    def truth(self, rng: np.random.Generator, k: int, n: int, **more: Any) -> Truth:
        """A layer of this kind."""
        return truth(rng, k, n, **{**self.options, **more})

    @property
    def quantization(self) -> dict[str, Any]:
        """Its quantization_config."""
        return self.config(self.options.get("bits", 4), self.options.get("group", -1))

    def make(self, directory: Path, rng: np.random.Generator, k: int, n: int) -> Truth:
        """See `Make`."""
        layer = self.truth(rng, k, n)
        save(directory, named("layer", self.encode(layer)), self.quantization)
        return layer


def _kind(
    encode: Callable[[Truth], dict[str, Array]], config: Callable[[int, int], dict[str, Any]], **options: Any
) -> Kind:
    return Kind(encode, config, options)


def _ct(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return ct_config(bits, None if group == -1 else group, **more)


KINDS: dict[str, Kind] = {
    "awq-gemm": _kind(awq_gemm, awq_config, group=32, bias=True),
    "awq-gemm-w8": _kind(awq_gemm, awq_config, bits=8, group=32),
    "awq-gemm-symmetric": _kind(awq_gemm, lambda b, g: awq_config(b, g, zero_point=False), group=32, symmetric=True),
    "awq-gemm-channel": _kind(awq_gemm, awq_config, group=-1),
    "awq-gemm-order": _kind(
        lambda layer: awq_gemm(layer, order=None), lambda b, g: awq_config(b, g, pack_method="order"), group=64
    ),
    "awq-gemv": _kind(awq_gemv, lambda b, g: awq_config(b, g, version="gemv"), group=64),
    "gptq": _kind(gptq, gptq_config, group=32, bias=True),
    "gptq-w8": _kind(gptq, gptq_config, bits=8, group=64),
    "gptq-symmetric": _kind(gptq, lambda b, g: gptq_config(b, g, sym=True), group=64, symmetric=True),
    "gptq-v2": _kind(
        lambda layer: gptq(layer, version=2), lambda b, g: gptq_config(b, g, checkpoint_format="gptq_v2"), group=32
    ),
    "gptq-act-order": _kind(gptq, lambda b, g: gptq_config(b, g, desc_act=True), group=32, act_order=True),
    "ct-w4": _kind(ct_packed, _ct, group=32, scale_dtype=BF16, bias=True),
    "ct-w4-symmetric": _kind(ct_packed, lambda b, g: _ct(b, g, symmetric=True), group=32, symmetric=True),
    "ct-w8": _kind(ct_packed, _ct, bits=8, group=64, scale_dtype=BF16),
    "ct-w8-channel": _kind(ct_packed, _ct, bits=8, scale_dtype=np.float32),
    "ct-int8": _kind(ct_int, lambda b, g: _ct(b, g, form="int-quantized"), bits=8, scale_dtype=BF16),
}
"""One checkpoint of each kind. K a multiple of 64 and N of 32 suit all of them."""

MAKERS: dict[str, Make] = {name: kind.make for name, kind in KINDS.items()}
