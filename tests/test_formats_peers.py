"""Bit-for-bit agreement with the software that defines the formats: compressed-tensors and gptqmodel."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import checkpoints
import numpy as np
import pytest

import tilefuse as tf
from tilefuse.formats import autoawq

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # theirs
]


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    module: ModuleType = pytest.importorskip("torch", reason="the [peers] extra is not installed")
    return module


@pytest.fixture(scope="module")
def ct(torch: ModuleType) -> ModuleType:
    return pytest.importorskip("compressed_tensors", reason="the [peers] extra is not installed")


def scheme(bits: int, group: int, symmetric: bool, form: str) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **strategy),
        format=form,
    )


@pytest.mark.parametrize(
    ("form", "bits"), [("pack-quantized", 4), ("pack-quantized", 8), ("int-quantized", 8), ("naive-quantized", 8)]
)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("k", "n", "group"), [(576, 192, 64), (128, 40, 32), (100, 13, -1)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_compressed_tensors(
    form: str,
    bits: int,
    symmetric: bool,
    k: int,
    n: int,
    group: int,
    dtype: str,
    torch: ModuleType,
    ct: ModuleType,
    tmp_path: Path,
    rng: np.random.Generator,
) -> None:
    """Its compressor makes the file, its decompressor the weights: (q - z) s with one rounding to the scales' dtype."""
    from compressed_tensors.compressors.base import BaseCompressor
    from safetensors.torch import save_file

    compressor = BaseCompressor.get_value_from_registry(form)
    truth = checkpoints.truth(rng, k, n, bits=bits, group=group, symmetric=symmetric, scale_dtype=dtype)
    middle = 1 << (bits - 1)
    state = {
        "weight": torch.from_numpy(truth.weights().T.astype(np.float32)).to(getattr(torch, dtype)),
        "weight_scale": torch.from_numpy(truth.scales.T.copy()),
        "weight_zero_point": torch.from_numpy((truth.zeros.T.astype(np.int16) - middle).astype(np.int8)),
    }
    settings = scheme(bits, group, symmetric, form)
    compressed = compressor.compress(dict(state), settings)
    save_file(
        {f"layer.{name}": value.contiguous() for name, value in compressed.items()}, tmp_path / "model.safetensors"
    )
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"g": settings.model_dump(mode="json")},
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))

    layer = tf.open_checkpoint(tmp_path).linear("layer")
    assert layer.format == form
    theirs = compressor.decompress(dict(compressed), settings)["weight"]
    assert theirs.dtype == getattr(torch, dtype)
    ours = layer.dequantize().astype(dtype)
    np.testing.assert_array_equal(ours.T, theirs.numpy())


@pytest.mark.parametrize(("k", "n", "group"), [(128, 40, 64), (256, 8, -1)])
def test_autoawq_converter(
    k: int, n: int, group: int, torch: ModuleType, ct: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    """What the writer saves, converted by their converter, is the same layer to the other reader."""
    pytest.importorskip("transformers", reason="the [peers] extra is not installed")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
    from safetensors.torch import load_file, save_file

    layer = tf.quantize_linear(rng.normal(size=(k, n)), group=group, scale_dtype="float16", name="layer")
    autoawq.write(tmp_path / "awq", [layer])
    settings = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]
    converter = AutoAWQConverter.from_autoawq_config(settings)
    tensors = load_file(tmp_path / "awq" / "model.safetensors")
    converter.validate(tensors)
    converted = converter.process(tensors)
    (tmp_path / "ct").mkdir()
    save_file({name: value.contiguous() for name, value in converted.items()}, tmp_path / "ct" / "model.safetensors")
    config = {"quantization_config": converter.update_config(None).model_dump(mode="json")}
    (tmp_path / "ct" / "config.json").write_text(json.dumps(config))
    read = tf.open_checkpoint(tmp_path / "ct").linear("layer")
    assert read.format == "pack-quantized"
    np.testing.assert_array_equal(read.codes_kn(), layer.codes)
    np.testing.assert_array_equal(read.zeros, layer.zeros)
    np.testing.assert_array_equal(read.dequantize(), layer.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [32, -1])
def test_gptqmodel(
    bits: int, version: int, act_order: bool, group: int, torch: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Its layer dequantises the same tensors: (q - z) s with one rounding to float16."""
    qlinear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="gptqmodel is not installed")
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    truth = checkpoints.truth(rng, 128, 64, bits=bits, group=group, act_order=act_order)
    if version == 1:
        # Its conversion adds 1 to whole words, which carries where a zero point is 0 (stored as all ones).
        truth.zeros[truth.zeros == 0] = 1
    tensors = checkpoints.gptq(truth, version=version)
    form = "gptq" if version == 1 else "gptq_v2"
    config = checkpoints.gptq_config(bits, group, desc_act=act_order, checkpoint_format=form)
    checkpoints.save(tmp_path, checkpoints.named("layer", tensors), config)

    module = qlinear.TorchLinear(
        bits=bits, group_size=group, sym=False, desc_act=act_order, in_features=128, out_features=64, bias=False
    )
    for name, array in tensors.items():
        getattr(module, name).data.copy_(torch.from_numpy(array))
    if version == 1:
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    theirs = module.dequantize_weight()
    assert theirs.dtype == torch.float16
    ours = tf.open_checkpoint(tmp_path).linear("layer").dequantize().astype(np.float16)
    np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptqmodel_reads_what_the_writer_saves(
    bits: int, symmetric: bool, torch: ModuleType, tmp_path: Path, rng: np.random.Generator
) -> None:
    packing = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils", reason="gptqmodel is not installed")
    from safetensors.torch import load_file

    w = rng.normal(size=(128, 64))
    layer = tf.quantize_linear(w, bits=bits, group=32, symmetric=symmetric, scale_dtype="float16", name="layer")
    autoawq.write(tmp_path / "m", [layer])
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    parts = (tensors[f"layer.{name}"] for name in ("qweight", "qzeros", "scales"))
    theirs = packing.dequantize_gemm(*parts, bits, 32)
    np.testing.assert_array_equal(layer.dequantize().astype(np.float16), theirs.to(torch.float16).numpy())
