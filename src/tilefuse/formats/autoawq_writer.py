"""Writing checkpoints in the AutoAWQ `gemm` layout, which most software that runs AWQ models reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tilefuse.codes import WORD_BITS, pack_awq, pack_last
from tilefuse.errors import FormatError, QuantizationError, UnsupportedFormatError
from tilefuse.formats import plain
from tilefuse.formats.config import CONFIG
from tilefuse.formats.output import DEFAULT_SHARD_BYTES, Shards, new_directory, write_json
from tilefuse.quantized import CodeOrder, QuantizedLinear

Array = npt.NDArray[Any]

BF16 = np.dtype(ml_dtypes.bfloat16)


def write(
    path: str | Path,
    layers: Iterable[QuantizedLinear],
    *,
    config: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, Array] | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Save a checkpoint in the AutoAWQ `gemm` layout: safetensors files, their index, and ``config.json``.

    The directory appears whole or not at all: everything is written under a temporary name beside it and renamed.
    Layers are taken one at a time, so a generator keeps memory to one layer.

    8-bit layers are written in natural order, an extension that gptqmodel 7 reads and AutoAWQ itself does not. Zero
    points are always written, the midpoint for symmetric layers.

    Args:
        path: Directory to make; it must not exist, or be empty.
        layers: Quantised layers with names, all of the same bits and group size (or all with one group a channel).
        config: The model's ``config.json``; ``quantization_config`` is set here, and keys of one that is given are kept
            where they say nothing of the layout.
        extra_tensors: Whatever else belongs to the model: embeddings, norms, unquantised weights.
        shard_bytes: Start another file rather than let one exceed this many bytes of tensors.

    Raises:
        UnsupportedFormatError: The format cannot hold a layer: N or K not a multiple of what it needs, float minima, a
            permutation of the inputs, another bits or group size than the first layer's.
        QuantizationError: A layer is invalid, or has scales that float16 can't hold exactly.
        FormatError: Two tensors have the same name, or a tensor has a dtype that safetensors has no name for.
        FileExistsError: ``path`` exists and is not an empty directory.
    """
    with new_directory(Path(path)) as partial:
        scheme = Scheme()
        extras = dict(extra_tensors or {})
        with contextlib.closing(Shards(partial, shard_bytes)) as shards:
            for layer in layers:
                scheme.add(layer)
                for name, array in encode(layer).items():
                    shards.add(name, array)
            shards.add_all(extras)
            shards.finish()
        merged = dict(config or {})
        merged["quantization_config"] = scheme.config(merged.get("quantization_config") or {}, extras)
        write_json(partial / CONFIG, merged)


class Scheme:
    """The bits and group size that all layers of a checkpoint must share, as the configuration states them once."""

    def __init__(self) -> None:
        self._bits: int | None = None
        self._groups: set[int] = set()
        self._all_channel = True

    def add(self, layer: QuantizedLinear) -> None:
        """Take a layer into account, or refuse it."""
        if self._bits not in (None, layer.bits):
            raise UnsupportedFormatError(
                f"layer {layer.name!r}: bits = {layer.bits}, and the layers before have {self._bits}; AutoAWQ has one "
                "for all"
            )
        self._bits = layer.bits
        groups = self._groups | {layer.group}
        channel = self._all_channel and layer.group == layer.k
        if len(groups) > 1 and not channel:
            raise UnsupportedFormatError(
                f"layer {layer.name!r}: group size {layer.group}, and the layers before have "
                f"{'/'.join(map(str, sorted(self._groups)))}; AutoAWQ has one group size for all"
            )
        self._groups, self._all_channel = groups, channel

    def config(self, given: Mapping[str, Any], extras: Mapping[str, Array]) -> dict[str, Any]:
        """The ``quantization_config``."""
        group = self._groups.copy().pop() if len(self._groups) == 1 else -1
        left = {"modules_to_not_convert": unquantized(extras) or None}
        return {**left, **given, **quantization_config(self._bits or 4, group)}


def quantization_config(bits: int, group: int) -> dict[str, Any]:
    """What ``quantization_config`` says of the layout."""
    return {"quant_method": "awq", "bits": bits, "group_size": group, "zero_point": True, "version": "gemm"}


def unquantized(tensors: Mapping[str, Array]) -> list[str]:
    """The linear layers among tensors that are left as they are."""
    return sorted(
        name.removesuffix(".weight")
        for name, array in tensors.items()
        if plain.is_linear(name, array.dtype, array.shape)
    )


def encode(layer: QuantizedLinear) -> dict[str, Array]:
    """The tensors of a layer by name, or the reason why the format has none for it: see `write`."""
    layer.validate()
    where = f"layer {layer.name!r}"
    assert layer.zeros is not None or layer.mins is not None
    if not layer.name:
        raise FormatError("a layer without a name cannot be written")
    if layer.zeros is None:
        raise UnsupportedFormatError(f"{where} has float minima; AutoAWQ 'gemm' has integer zero points: requantise")
    if layer.perm is not None:
        raise UnsupportedFormatError(f"{where} permutes its inputs; AutoAWQ has no activation order: requantise")
    if layer.k % layer.group:
        raise UnsupportedFormatError(
            f"{where}: K = {layer.k} is not a multiple of the group size {layer.group}, as AutoAWQ needs; requantise"
        )
    per_word = WORD_BITS // layer.bits
    if layer.n % per_word:
        raise UnsupportedFormatError(f"{where}: N = {layer.n} is not a multiple of {per_word}, as AutoAWQ words need")
    stored_order = CodeOrder.WORDS_N_AWQ if layer.bits == 4 else CodeOrder.WORDS_N
    zeros = np.ascontiguousarray(layer.zeros)
    tensors = {
        "qweight": layer.codes if layer.order is stored_order else _words(layer.codes_kn(), layer.bits),
        "qzeros": _words(zeros, layer.bits),
        "scales": _half(layer.scales, where),
    }
    if layer.bias is not None:
        tensors["bias"] = narrowed(layer.bias)
    return {f"{layer.name}.{suffix}": array for suffix, array in tensors.items()}


def _words(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.int32]:
    return pack_awq(codes) if bits == 4 else pack_last(codes, bits)


def _half(scales: Array, where: str) -> npt.NDArray[np.float16]:
    """Scales in float16, as all readers expect, if nothing is lost."""
    wide = scales.astype(np.float32)
    with np.errstate(over="ignore"):
        half = wide.astype(np.float16)
    lost = half.astype(np.float32) != wide
    if lost.any():
        at = np.unravel_index(int(np.argmax(lost)), lost.shape)
        raise QuantizationError(
            f"{where}: scale {float(wide[at])!r} at {[int(i) for i in at]} is not exact in float16, the format's "
            "dtype; quantise with quantize_linear(..., scale_dtype='float16')"
        )
    return half


def narrowed(bias: npt.NDArray[np.float32]) -> Array:
    """A bias in float16, or bfloat16, where that is exact; readers take any float dtype."""
    for dtype in (np.dtype(np.float16), BF16):
        with np.errstate(over="ignore"):
            narrow = bias.astype(dtype)
        if np.array_equal(narrow.astype(np.float32), bias):
            return narrow
    return bias
