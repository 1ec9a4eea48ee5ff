"""Mutated checkpoints: a typed error, or a layer that is valid by every rule; never another exception or a crash."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import checkpoints
import numpy as np
import numpy.typing as npt
import pytest

import tilefuse as tf
from tilefuse.codes import unpack

SECONDS = 0.8
"""For each form of checkpoint, and so ~15 s in all."""

CONFIG_VALUES = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    4,
    8,
    16,
    32,
    64,
    1 << 70,
    1.5,
    "",
    "gemm",
    "gptq_v2",
    [],
    {},
    [1],
    {"a": 1},
)
HEADER_VALUES = (
    None,
    -1,
    0,
    1,
    3,
    7,
    8,
    31,
    64,
    1 << 31,
    1 << 62,
    1 << 64,
    True,
    0.5,
    "F16",
    "I8",
    "BF16",
    "",
    [],
    [0, 0],
    {},
)


def edit_json(rng: np.random.Generator, value: object, values: tuple[object, ...]) -> object:
    """A copy of a JSON value with one place in it replaced, dropped or duplicated."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = str(rng.choice(list(value)))
        if rng.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if rng.random() < 0.1:
            return {**value, key + "x": value[key]}
        return {**value, key: edit_json(rng, value[key], values)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = int(rng.integers(len(value)))
        return [*value[:at], edit_json(rng, value[at], values), *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + int(rng.integers(-4, 5))
    return values[int(rng.integers(len(values)))]


def mutate(rng: np.random.Generator, directory: Path, model: bytes, config: str) -> None:
    """Write the two files back with one to three mutations."""
    data = bytearray(model)
    for _ in range(int(rng.integers(1, 4))):
        (length,) = struct.unpack_from("<Q", model)
        kind = rng.integers(7)
        if kind == 0 and data:  # a flipped bit anywhere
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        elif kind == 1 and len(data) > 8:  # a byte of the header
            data[8 + int(rng.integers(min(length, len(data) - 8)))] = int(rng.integers(256))
        elif kind == 2:  # truncated
            del data[int(rng.integers(len(data) + 1)) :]
        elif kind == 3:  # longer
            data += rng.bytes(int(rng.integers(1, 64)))
        elif kind == 4 and len(data) >= 8:  # a header length
            data[:8] = struct.pack("<Q", int(rng.choice([0, 1, length - 1, length + 1, len(data), 2**62])))
        elif kind == 5:  # a structural edit of the header, with the data kept
            header = edit_json(rng, json.loads(model[8 : 8 + length]), HEADER_VALUES)
            raw = json.dumps(header).encode()
            data = bytearray(struct.pack("<Q", len(raw)) + raw + model[8 + length :])
        else:  # a structural edit of the configuration
            config = json.dumps(edit_json(rng, json.loads(config), CONFIG_VALUES))
    (directory / "model.safetensors").write_bytes(data)
    (directory / "config.json").write_text(config)


def check_packed(layer: tf.QuantizedLinear, weights: npt.NDArray[np.float32]) -> None:
    """The layer goes through the C++ packer, unpacker and kernels as it goes through NumPy."""
    try:
        packed = tf.pack(layer)
    except tf.errors.LayoutError:  # a group size that the tiles do not take
        return
    np.testing.assert_array_equal(
        tf.unpack(packed).codes, unpack(layer.codes, layer.order, layer.k, layer.n, layer.bits)
    )
    # Two roundings to bfloat16, of the scale and of the product; with minima the terms' own roundings count.
    size = np.abs(weights).astype(np.float64)
    if layer.mins is not None:
        size += 2 * np.abs(layer.mins).astype(np.float64).max(axis=0)
    close = np.abs(packed.dequantize().astype(np.float64) - weights) <= 2.01 * 2.0**-8 * size + 2.0**-125
    assert (close | (size > 1e38)).all()  # next to bfloat16's largest value a product may overflow
    assert tf.gemv(np.zeros(layer.k, np.float32), packed).shape == (layer.n,)


@pytest.mark.parametrize("form", checkpoints.MAKERS)
def test_mutated_checkpoints(form: str, tmp_path: Path, rng: np.random.Generator) -> None:
    checkpoints.MAKERS[form](tmp_path, rng, 64, 32)
    model, config = (tmp_path / "model.safetensors").read_bytes(), (tmp_path / "config.json").read_text()
    deadline = time.monotonic() + SECONDS
    rejected = read = 0
    while time.monotonic() < deadline:
        mutate(rng, tmp_path, model, config)
        try:
            checkpoint = tf.open_checkpoint(tmp_path)
            layers = [checkpoint.linear(info.name) for info in checkpoint.linears() if info.quantized]
            weights = [layer.dequantize() for layer in layers]
        except tf.errors.TileFuseError:
            rejected += 1
            continue
        read += 1
        for layer, values in zip(layers, weights, strict=True):
            layer.validate()
            assert values.shape == (layer.k, layer.n)
            assert np.isfinite(values).all()
            check_packed(layer, values)
    assert rejected > 0
    assert read > 0  # a flipped bit of a code leaves a good file
