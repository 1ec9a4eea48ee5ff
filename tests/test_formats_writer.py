"""`formats.autoawq.write`: what it saves reads back, by our reader and by a decoder that shares nothing with it."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import safetensors.numpy

import tilefuse as tf
from tilefuse.errors import FormatError, QuantizationError, UnsupportedFormatError
from tilefuse.formats import autoawq


def make(
    rng: np.random.Generator, k: int = 64, n: int = 32, name: str = "layer", **options: object
) -> tf.QuantizedLinear:
    options = {"group": 32, "scale_dtype": "float16", **options}
    return tf.quantize_linear(rng.normal(size=(k, n)), name=name, **options)  # type: ignore[arg-type]


def decode(directory: Path, name: str, bits: int, group: int) -> np.ndarray:
    """float64 [K, N] of a layer, one code at a time from the safetensors library's arrays."""
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(file)
    scales = tensors[f"{name}.scales"].astype(np.float64)
    per_word = 32 // bits
    order = [0, 4, 1, 5, 2, 6, 3, 7] if bits == 4 else [0, 1, 2, 3]  # nibble (or byte) of each column of a run

    def codes(words: np.ndarray) -> np.ndarray:
        out = np.empty((words.shape[0], words.shape[1] * per_word), np.int64)
        for row in range(out.shape[0]):
            for column in range(out.shape[1]):
                word = int(words[row, column // per_word]) & 0xFFFFFFFF
                out[row, column] = (word >> (bits * order[column % per_word])) & ((1 << bits) - 1)
        return out

    q, z = codes(tensors[f"{name}.qweight"]), codes(tensors[f"{name}.qzeros"])
    rows = np.arange(q.shape[0]) // group
    return (q - z[rows]) * scales[rows]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, -1])
@pytest.mark.parametrize("n", [8, 40])
def test_round_trip(bits: int, symmetric: bool, group: int, n: int, tmp_path: Path, rng: np.random.Generator) -> None:
    bias = rng.normal(size=n)
    layer = make(rng, 64, n, bits=bits, symmetric=symmetric, group=group, bias=bias)
    autoawq.write(tmp_path / "model", [layer])
    checkpoint = tf.open_checkpoint(tmp_path / "model")
    read = checkpoint.linear("layer")
    np.testing.assert_array_equal(read.codes_kn(), layer.codes)
    np.testing.assert_array_equal(read.zeros, layer.zeros)
    np.testing.assert_array_equal(read.scales, layer.scales)
    np.testing.assert_array_equal(read.bias, bias.astype(np.float32))
    by_hand = decode(tmp_path / "model", "layer", bits, layer.group)
    np.testing.assert_array_equal(by_hand, layer.dequantize().astype(np.float64))
    settings = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    # A group of all K is stated as -1 only where no number fits all layers.
    assert settings == {
        "quant_method": "awq",
        "bits": bits,
        "group_size": layer.group,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def test_whole_model_in_shards(tmp_path: Path, rng: np.random.Generator) -> None:
    """A tied model with norms and an unquantised layer, in files of at most 4 KiB (or one tensor): all comes back."""
    layers = [make(rng, k, n, f"model.layers.{i}.{k}x{n}") for i in range(2) for k, n in ((64, 32), (96, 64))]
    extras = {
        "model.embed_tokens.weight": rng.normal(size=(40, 64)).astype(np.float16),
        "model.norm.weight": rng.normal(size=3).astype(checkpoints.BF16),
        "odd": np.arange(3, dtype=np.uint8),
        "model.gate.weight": rng.normal(size=(5, 64)).astype(np.float32),
    }
    config = {"model_type": "llama", "tie_word_embeddings": True, "quantization_config": {"backend": "auto", "bits": 2}}
    autoawq.write(tmp_path / "m", iter(layers), config=config, extra_tensors=extras, shard_bytes=4096)
    files = sorted(path.name for path in (tmp_path / "m").iterdir())
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert files == ["config.json", *shards, "model.safetensors.index.json"]
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    for shard in shards:
        tensors = safetensors.numpy.load_file(tmp_path / "m" / shard)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 4096

    checkpoint = tf.open_checkpoint(tmp_path / "m")
    for name, array in extras.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), array)
    for layer in layers:
        np.testing.assert_array_equal(checkpoint.linear(layer.name).dequantize(), layer.dequantize())
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    assert written["model_type"] == "llama"
    assert written["quantization_config"] == {
        "backend": "auto",
        "bits": 4,
        "group_size": 32,
        "modules_to_not_convert": ["model.gate"],
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    }
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(checkpoint.tensor(name).nbytes for name in checkpoint.tensors())
    assert checkpoint.info("lm_head").k == 64  # still tied


def test_channels_of_different_k_are_group_minus_one(tmp_path: Path, rng: np.random.Generator) -> None:
    layers = [make(rng, k, 8, f"l{k}", group=-1) for k in (64, 96)]
    autoawq.write(tmp_path / "m", layers)
    assert tf.open_checkpoint(tmp_path / "m").quantization["group_size"] == -1
    np.testing.assert_array_equal(tf.open_checkpoint(tmp_path / "m").linear("l96").dequantize(), layers[1].dequantize())


def test_gptq_layer_becomes_awq(tmp_path: Path, rng: np.random.Generator) -> None:
    """From another order of codes, and with zero points that are one broadcast byte."""
    truth = checkpoints.truth(rng, 64, 32, group=32, symmetric=True)
    checkpoints.save(
        tmp_path / "gptq", checkpoints.named("layer", checkpoints.gptq(truth)), checkpoints.gptq_config(4, 32, sym=True)
    )
    autoawq.write(tmp_path / "awq", [tf.open_checkpoint(tmp_path / "gptq").linear("layer")])
    np.testing.assert_array_equal(decode(tmp_path / "awq", "layer", 4, 32), truth.weights())


def refused(rng: np.random.Generator) -> Iterator[tuple[str, list[tf.QuantizedLinear], type[Exception], str]]:
    good = make(rng)
    yield "n", [make(rng, 64, 12)], UnsupportedFormatError, "N = 12 is not a multiple of 8"
    yield "n8", [make(rng, 64, 6, bits=8)], UnsupportedFormatError, "N = 6 is not a multiple of 4"
    yield "k", [make(rng, 80)], UnsupportedFormatError, "K = 80 is not a multiple of the group size 32"
    perm = np.arange(64, dtype=np.int32)[::-1].copy()
    yield "perm", [dataclasses.replace(good, perm=perm)], UnsupportedFormatError, "permutes"
    mins = dataclasses.replace(good, zeros=None, mins=good.scales)
    yield "mins", [mins], UnsupportedFormatError, "float minima"
    yield "bits", [good, make(rng, bits=8, name="b")], UnsupportedFormatError, "'b': bits = 8"
    yield "group", [good, make(rng, group=64, name="b")], UnsupportedFormatError, "'b': group size 64"
    yield "twice", [good, good], FormatError, r"'layer\.qweight' occurs twice"
    yield "nameless", [make(rng, name="")], FormatError, "without a name"
    coarse = dataclasses.replace(good, scales=np.full_like(good.scales, 2.0**-30, dtype=np.float32))
    yield "scales", [coarse], QuantizationError, "not exact in float16"
    broken = dataclasses.replace(good, scales=np.full_like(good.scales, np.nan))
    yield "nan", [broken], QuantizationError, "nan"


@pytest.mark.parametrize(
    "case", ["n", "n8", "k", "perm", "mins", "bits", "group", "twice", "nameless", "scales", "nan"]
)
def test_refuses_what_the_format_cannot_hold(case: str, tmp_path: Path, rng: np.random.Generator) -> None:
    (layers, error, message) = next(rest for name, *rest in refused(rng) if name == case)
    with pytest.raises(error, match=message):
        autoawq.write(tmp_path / "m", layers)
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_refuses_dtypes_without_a_name(tmp_path: Path, rng: np.random.Generator) -> None:
    with pytest.raises(FormatError, match="'c' has dtype complex64"):
        autoawq.write(tmp_path / "m", [make(rng)], extra_tensors={"c": np.zeros(2, np.complex64)})


def test_does_not_overwrite(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "m").mkdir()
    autoawq.write(tmp_path / "m", [make(rng)])  # an empty directory may be filled
    with pytest.raises(FileExistsError, match="not an empty directory"):
        autoawq.write(tmp_path / "m", [make(rng)])


def test_streams(tmp_path: Path) -> None:
    """Memory stays at a few layers, however many there are."""
    k = n = 512

    def layers() -> Iterator[tf.QuantizedLinear]:
        for i in range(40):
            yield tf.QuantizedLinear(
                name=f"l{i}",
                format="made",
                k=k,
                n=n,
                bits=4,
                group=k,
                codes=np.full((k, n), i % 16, np.uint8),
                order=tf.CodeOrder.KN,
                scales=np.ones((1, n), np.float16),
                zeros=np.zeros((1, n), np.uint8),
            )

    tracemalloc.start()
    autoawq.write(tmp_path / "m", layers())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    total = sum(path.stat().st_size for path in (tmp_path / "m").glob("*.safetensors"))
    # Codes a byte each, their packed form and its parts for two layers, and two copy buffers of 1 MiB.
    assert total > 40 * k * n // 2
    assert peak < 2 * 4 * k * n + 3 * (1 << 20)
    np.testing.assert_array_equal(tf.open_checkpoint(tmp_path / "m").linear("l39").codes_kn(), np.full((k, n), 7))
