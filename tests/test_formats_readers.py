"""Every format read back equals what was put in, exactly."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path

import checkpoints
import numpy as np
import pytest

import tilefuse as tf
from tilefuse.convert import pack_checkpoint
from tilefuse.formats.safetensors_map import MappedFile
from tilefuse.inspection import inspect


def assert_reads(layer: tf.QuantizedLinear, truth: checkpoints.Truth) -> None:
    """The layer holds exactly the codes, zero points, scales, bias and weights of ``truth``."""
    layer.validate()
    assert (layer.k, layer.n, layer.bits, layer.group) == (truth.k, truth.n, truth.bits, truth.group)
    assert layer.symmetric == truth.symmetric
    order = np.arange(truth.k) if layer.perm is None else layer.perm
    np.testing.assert_array_equal(layer.codes_kn(), truth.codes[order])
    np.testing.assert_array_equal(truth.group_of[order], np.arange(truth.k) // truth.group)
    np.testing.assert_array_equal(layer.zeros, truth.zeros)
    assert layer.scales.dtype == truth.scales.dtype
    np.testing.assert_array_equal(layer.scales, truth.scales)
    if truth.bias is None:
        assert layer.bias is None
    else:
        assert layer.bias.dtype == np.float32
        np.testing.assert_array_equal(layer.bias, truth.bias.astype(np.float32))
    # Nine bits of code difference times at most 24 of scale, rounded once to float32.
    np.testing.assert_array_equal(layer.dequantize(), truth.weights().astype(np.float32))


@pytest.mark.parametrize("form", checkpoints.MAKERS)
@pytest.mark.parametrize(("k", "n"), [(64, 32), (192, 96)])
def test_every_format(form: str, k: int, n: int, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.MAKERS[form](tmp_path, rng, k, n)
    checkpoint = tf.open_checkpoint(tmp_path)
    (info,) = checkpoint.linears()
    assert (info.name, info.k, info.n, info.bits, info.group) == ("layer", k, n, truth.bits, truth.group)
    assert info.symmetric == truth.symmetric
    assert info.bias == (truth.bias is not None)
    assert info.nbytes == sum(
        checkpoint.tensor(name).nbytes for name in checkpoint.tensors() if "shape" not in name
    ) + (16 if form.startswith("ct-w") else 0)
    assert_reads(checkpoint.linear("layer"), truth)


def open_layer(directory: Path, tensors: dict[str, np.ndarray], config: dict[str, object] | None) -> tf.QuantizedLinear:
    checkpoints.save(directory, checkpoints.named("layer", tensors), config)
    return tf.open_checkpoint(directory).linear("layer")


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("n", [8, 24, 40])
def test_awq_gemm_takes_any_multiple_of_eight(group: int, n: int, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 256, n, group=group)
    assert_reads(open_layer(tmp_path, checkpoints.awq_gemm(truth), checkpoints.awq_config(4, group)), truth)


@pytest.mark.parametrize(("k", "group"), [(11008, 128), (576, 64), (320, 32), (256, 128), (1024, -1)])
def test_awq_gemv_padding(k: int, group: int, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, k, 8, group=group)
    config = checkpoints.awq_config(4, group, version="GEMV")
    assert_reads(open_layer(tmp_path, checkpoints.awq_gemv(truth), config), truth)


@pytest.mark.parametrize(("version", "zeros"), [("gemv_fast", "qzeros"), ("llm-awq", "scaled_zeros")])
@pytest.mark.parametrize(("k", "group"), [(128, 128), (192, 64), (320, 32)])
def test_awq_gemv_fast(version: str, zeros: str, k: int, group: int, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, k, 8, group=group, bias=True)
    mins = rng.normal(size=truth.scales.shape).astype(np.float16)
    tensors = checkpoints.awq_fast(truth, mins, zeros_name=zeros)
    layer = open_layer(tmp_path, tensors, checkpoints.awq_config(4, group, version=version))
    np.testing.assert_array_equal(layer.codes_kn(), truth.codes)
    np.testing.assert_array_equal(layer.mins, mins)
    assert layer.zeros is None
    rows = truth.group_of
    exact = truth.codes * truth.scales[rows].astype(np.float64) + mins[rows].astype(np.float64)
    np.testing.assert_array_equal(layer.dequantize(), exact.astype(np.float32))


@pytest.mark.parametrize("version", [None, "gemm", "GEMM", "exllama"])
def test_awq_version_names(version: str | None, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 64, 32, group=32)
    config = checkpoints.awq_config(4, 32)
    config.pop("version")
    if version:
        config["version"] = version
    assert_reads(open_layer(tmp_path, checkpoints.awq_gemm(truth), config), truth)


@pytest.mark.parametrize("side", ["quant_config.json", "quantize_config.json"])
def test_awq_side_file(side: str, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 64, 32, group=32)
    checkpoints.save(tmp_path, checkpoints.named("layer", checkpoints.awq_gemm(truth)), None)
    (tmp_path / side).write_text(json.dumps({"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}))
    assert_reads(tf.open_checkpoint(tmp_path).linear("layer"), truth)


def test_quantised_head_may_have_its_own_group(tmp_path: Path, rng: np.random.Generator) -> None:
    truths = {"layer": checkpoints.truth(rng, 128, 16, group=64), "lm_head": checkpoints.truth(rng, 128, 32, group=32)}
    tensors = {}
    for name, truth in truths.items():
        tensors |= checkpoints.named(name, checkpoints.awq_gemm(truth))
    checkpoint = tf.open_checkpoint(checkpoints.save(tmp_path, tensors, checkpoints.awq_config(4, 64)))
    for name, truth in truths.items():
        assert_reads(checkpoint.linear(name), truth)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("k", "group"), [(64, 32), (304, 128), (96, 64), (64, -1)])
def test_gptq_zero_points(
    bits: int, version: int, k: int, group: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Both versions give the same weights; a zero point of 0 beside others neither carries nor is lost; K % g != 0."""
    truth = checkpoints.truth(rng, k, 12, bits=bits, group=group)
    config = checkpoints.gptq_config(bits, group, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    assert_reads(open_layer(tmp_path, checkpoints.gptq(truth, version=version), config), truth)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("stored", [1, 2])
def test_gptq_symmetric_ignores_mislabelled_zero_points(
    bits: int, stored: int, tmp_path: Path, rng: np.random.Generator
) -> None:
    truth = checkpoints.truth(rng, 64, 8, bits=bits, group=32, symmetric=True)
    config = checkpoints.gptq_config(bits, 32, sym=True, checkpoint_format="gptq")
    assert_reads(open_layer(tmp_path, checkpoints.gptq(truth, version=stored), config), truth)


@pytest.mark.parametrize(("k", "group"), [(128, 32), (304, 128)])
def test_gptq_activation_order(k: int, group: int, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, k, 16, group=group, act_order=True)
    layer = open_layer(tmp_path, checkpoints.gptq(truth), checkpoints.gptq_config(4, group, desc_act=True))
    assert layer.perm is not None
    assert_reads(layer, truth)
    # Sorted within a group by original position: the sort is stable.
    assert all((np.diff(layer.perm[start : start + group]) > 0).all() for start in range(0, k, group))


def test_gptq_trivial_g_idx_is_no_permutation(tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 128, 16, group=32)
    config = checkpoints.gptq_config(4, 32, desc_act=True)
    assert open_layer(tmp_path, checkpoints.gptq(truth), config).perm is None


def test_gptq_dynamic_overrides(tmp_path: Path, rng: np.random.Generator) -> None:
    """The first matching pattern counts; "-:" on a layer that is quantised all the same changes nothing."""
    kinds = {
        "model.layers.0.up": checkpoints.truth(rng, 64, 16, bits=8, group=64),
        "model.layers.1.up": checkpoints.truth(rng, 64, 16, bits=4, group=32),
        "model.layers.2.up": checkpoints.truth(rng, 64, 16, bits=4, group=32),
    }
    dynamic = {
        r"+:.*\.0\.up": {"bits": 8, "group_size": 64},
        r".*\.0\..*": {"bits": 2},
        r"-:.*\.2\.": {},
        "-:.*visual": {},
    }
    tensors = {"model.visual.weight": np.zeros((8, 8), np.float16)}
    for name, truth in kinds.items():
        tensors |= checkpoints.named(name, checkpoints.gptq(truth))
    checkpoints.save(tmp_path, tensors, checkpoints.gptq_config(4, 32, dynamic=dynamic), shards=3)
    checkpoint = tf.open_checkpoint(tmp_path)
    assert [info.format for info in checkpoint.linears()] == ["gptq", "gptq", "gptq", "fp16"]
    for name, truth in kinds.items():
        assert_reads(checkpoint.linear(name), truth)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("k", "n", "group"), [(576, 192, 64), (100, 13, 32), (37, 5, -1)])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, checkpoints.BF16, np.float32])
def test_compressed_tensors_shapes(
    bits: int, k: int, n: int, group: int, symmetric: bool, dtype: type, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Zero points packed along N where N differs from 8 G; K and N that no word divides; short groups."""
    truth = checkpoints.truth(rng, k, n, bits=bits, group=group, symmetric=symmetric, scale_dtype=dtype)
    config = checkpoints.ct_config(bits, None if group == -1 else group, symmetric=symmetric)
    assert_reads(open_layer(tmp_path, checkpoints.ct_packed(truth), config), truth)


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_tensor_strategy(bits: int, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 64, 16, bits=bits, symmetric=True)
    truth = dataclasses.replace(truth, scales=np.broadcast_to(truth.scales[:, :1], (1, 16)))
    tensors = checkpoints.ct_packed(truth) | {"weight_scale": truth.scales[0, :1].copy()}
    config = checkpoints.ct_config(bits, None, symmetric=True, strategy="tensor")
    assert_reads(open_layer(tmp_path, tensors, config), truth)


def test_compressed_tensors_activation_order(tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 128, 16, group=32, act_order=True)
    layer = open_layer(tmp_path, checkpoints.ct_packed(truth, g_idx=True), checkpoints.ct_config(4, 32))
    assert layer.perm is not None
    assert_reads(layer, truth)
    plain = checkpoints.truth(rng, 128, 16, group=32)
    tensors = checkpoints.ct_packed(plain) | {"weight_g_idx": np.full(128, -1, np.int32)}
    (tmp_path / "none").mkdir()
    assert open_layer(tmp_path / "none", tensors, checkpoints.ct_config(4, 32)).perm is None


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [-1, 32])
def test_int8_weights(form: str, symmetric: bool, group: int, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 96, 10, bits=8, group=group, symmetric=symmetric, bias=True)
    config = checkpoints.ct_config(8, None if group == -1 else group, form=form, symmetric=symmetric)
    layer = open_layer(tmp_path, checkpoints.ct_int(truth), config)
    assert layer.format == form
    assert_reads(layer, truth)


def test_compressed_tensors_groups_match_by_target(tmp_path: Path, rng: np.random.Generator) -> None:
    small = checkpoints.truth(rng, 64, 16, bits=4, group=32)
    large = checkpoints.truth(rng, 64, 16, bits=8, group=-1, symmetric=True)
    config = checkpoints.ct_config(4, 32)
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj$"],
        "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True, "type": "int"},
    }
    tensors = checkpoints.named("h.0.up_proj", checkpoints.ct_packed(small))
    tensors |= checkpoints.named("h.0.down_proj", checkpoints.ct_packed(large))
    checkpoint = tf.open_checkpoint(checkpoints.save(tmp_path, tensors, config))
    assert_reads(checkpoint.linear("h.0.up_proj"), small)
    assert_reads(checkpoint.linear("h.0.down_proj"), large)


@pytest.mark.parametrize("form", [form for form in checkpoints.MAKERS if form not in ("gptq", "gptq-w8", "gptq-v2")])
def test_without_configuration(form: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """A lone file tells its format by its tensors, except for what no tensor tells."""
    truth = checkpoints.MAKERS[form](tmp_path, rng, 64, 32)
    (tmp_path / "config.json").unlink()
    checkpoint = tf.open_checkpoint(tmp_path / "model.safetensors")
    if form.startswith("awq-gemm") and form != "awq-gemm-w8":
        # Only the configuration tells natural nibble order from AutoAWQ's.
        with pytest.raises(tf.errors.FormatError, match=r"layer\.qweight.*pack_method"):
            checkpoint.linears()
    elif form == "gptq-act-order":
        with pytest.raises(tf.errors.FormatError, match=r"layer\.qzeros.*gptq_v2"):
            checkpoint.linear("layer")
    else:
        assert_reads(checkpoint.linear("layer"), truth)


@pytest.mark.parametrize("form", checkpoints.MAKERS)
def test_configuration_as_an_argument(form: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """It stands in for one that is missing, and beats one that is wrong."""
    truth = checkpoints.MAKERS[form](tmp_path, rng, 64, 32)
    config = tmp_path / "config.json"
    quantization = json.loads(config.read_text())["quantization_config"]
    for text in ("{}", '{"quantization_config": {"quant_method": "none"}}'):
        config.write_text(text)
        for path in (tmp_path, tmp_path / "model.safetensors"):
            checkpoint = tf.open_checkpoint(path, quantization=quantization)
            assert checkpoint.quantization == quantization
            assert_reads(checkpoint.linear("layer"), truth)


def test_a_refused_layer_hides_no_other(tmp_path: Path, rng: np.random.Generator) -> None:
    """compressed-tensors with a layer in fp8, GPTQ with one in 3 bits."""
    good = checkpoints.truth(rng, 64, 32, group=32)
    fp8 = {"weight": np.zeros((8, 32), checkpoints.FP8), "weight_scale": np.ones((8, 1), np.float32)}
    mixed = checkpoints.ct_config(4, 32) | {"format": "mixed-precision"}
    mixed["config_groups"]["group_0"].pop("format")
    three = {
        "qweight": np.zeros((6, 32), np.int32),
        "qzeros": np.zeros((2, 3), np.int32),
        "scales": np.ones((2, 32), np.float16),
    }
    cases = {
        "ct": (checkpoints.ct_packed(good), fp8, mixed, "float-quantized"),
        "gptq": (checkpoints.gptq(good), three, checkpoints.gptq_config(4, 32, dynamic={"bad": {"bits": 3}}), "3 bits"),
    }
    for name, (tensors, refused, config, message) in cases.items():
        path = checkpoints.save(
            tmp_path / name, {**checkpoints.named("bad", refused), **checkpoints.named("good", tensors)}, config
        )
        checkpoint = tf.open_checkpoint(path)
        assert [info.name for info in checkpoint.linears()] == ["good"]
        assert_reads(checkpoint.linear("good"), good)
        assert list(checkpoint.refused()) == ["bad"]
        with pytest.raises(tf.errors.UnsupportedFormatError, match=message) as raised:
            checkpoint.linear("bad")
        assert checkpoint.refused() == {"bad": str(raised.value)}
        # Nothing is left out of a packed file unasked, and what is left out is shown.
        with pytest.raises(tf.errors.UnsupportedFormatError, match=f"{message}.*--exclude 'bad'"):
            pack_checkpoint(path, tmp_path / f"{name}.packed")
        assert pack_checkpoint(path, tmp_path / f"{name}.packed", exclude=["bad"]).layers == 1
        assert inspect(path).refused == checkpoint.refused()
        alone = checkpoints.save(tmp_path / f"{name}-only", checkpoints.named("bad", refused), config)
        with pytest.raises(tf.errors.UnsupportedFormatError, match=message):
            tf.open_checkpoint(alone).linears()


@pytest.mark.parametrize(("dtype", "form"), [(np.float16, "fp16"), (checkpoints.BF16, "bf16"), (np.float32, "fp32")])
def test_unquantised(dtype: type, form: str, tmp_path: Path, rng: np.random.Generator) -> None:
    weight = rng.normal(size=(24, 40)).astype(dtype)
    tensors = {
        "model.embed_tokens.weight": rng.normal(size=(56, 40)).astype(dtype),
        "model.layers.10.up.weight": weight,
        "model.layers.9.up.weight": weight,
        "model.layers.9.up.bias": weight[:, 0].copy(),
        "model.norm.weight": weight[0].copy(),
    }
    checkpoints.save(tmp_path, tensors, None, shards=2, tie_word_embeddings=True)
    checkpoint = tf.open_checkpoint(tmp_path)
    assert [(i.name, i.k, i.n, i.format, i.bias) for i in checkpoint.linears()] == [
        ("lm_head", 40, 56, form, False),
        ("model.layers.9.up", 40, 24, form, True),
        ("model.layers.10.up", 40, 24, form, False),
    ]
    assert checkpoint.format == form
    np.testing.assert_array_equal(checkpoint.dense("model.layers.9.up"), weight.T)
    np.testing.assert_array_equal(checkpoint.dense("lm_head"), tensors["model.embed_tokens.weight"].T)
    with pytest.raises(tf.errors.UnsupportedFormatError, match=f"model.layers.9.up.*{form}"):
        checkpoint.linear("model.layers.9.up")


def test_head_by_what_the_file_holds(tmp_path: Path, rng: np.random.Generator) -> None:
    """A redundant head is read where it is, plain or quantised; only without one is the embedding the head."""
    embedding = {"model.embed_tokens.weight": rng.normal(size=(32, 64)).astype(np.float16)}
    body = checkpoints.named("layer", checkpoints.awq_gemm(checkpoints.truth(rng, 64, 32, group=32)))
    head = checkpoints.truth(rng, 64, 32, group=32)
    heads = {
        "none": {},
        "plain": {"lm_head.weight": np.ones((32, 64), np.float16)},
        "quantised": checkpoints.named("lm_head", checkpoints.awq_gemm(head)),
    }
    for name, extra in heads.items():
        directory = checkpoints.save(tmp_path / name, {**body, **embedding, **extra}, checkpoints.awq_config(4, 32))
        checkpoint = tf.open_checkpoint(directory)
        info = checkpoint.info("lm_head")
        assert checkpoint.format == "awq-gemm"
        if name == "quantised":
            assert_reads(checkpoint.linear("lm_head"), head)
        else:
            assert (info.format, info.quantized) == ("fp16", False)
            expected = extra.get("lm_head.weight", embedding["model.embed_tokens.weight"])
            np.testing.assert_array_equal(checkpoint.dense("lm_head"), expected.T)
    config = checkpoints.awq_config(4, 32)
    untied = checkpoints.save(tmp_path / "untied", {**body, **embedding}, config, tie_word_embeddings=False)
    assert [info.name for info in tf.open_checkpoint(untied).linears()] == ["layer"]


def test_the_tensors_decide_what_is_quantised(tmp_path: Path, rng: np.random.Generator) -> None:
    """Software disagrees on whether "gate" means gate_proj."""
    gate_proj = checkpoints.truth(rng, 64, 32, group=32)
    tensors = checkpoints.named("mlp.gate_proj", checkpoints.awq_gemm(gate_proj))
    tensors["mlp.gate.weight"] = np.zeros((8, 64), np.float16)
    config = checkpoints.awq_config(4, 32, modules_to_not_convert=["gate"])
    checkpoint = tf.open_checkpoint(checkpoints.save(tmp_path, tensors, config))
    assert {info.name: info.format for info in checkpoint.linears()} == {
        "mlp.gate": "fp16",
        "mlp.gate_proj": "awq-gemm",
    }
    assert_reads(checkpoint.linear("mlp.gate_proj"), gate_proj)


@pytest.mark.parametrize("form", checkpoints.MAKERS)
def test_codes_are_views_of_the_file(form: str, tmp_path: Path, rng: np.random.Generator) -> None:
    checkpoints.MAKERS[form](tmp_path, rng, 64, 32)
    checkpoint = tf.open_checkpoint(tmp_path)
    names = ("qweight", "weight_packed", "weight")
    (stored,) = (checkpoint.tensor(f"layer.{name}") for name in names if f"layer.{name}" in checkpoint.tensors())
    layer = checkpoint.linear("layer")
    assert np.shares_memory(layer.codes, stored)
    assert not layer.codes.flags.writeable
    scales = next(name for name in checkpoint.tensors() if "scale" in name)
    assert np.shares_memory(layer.scales, checkpoint.tensor(scales))


def test_unaligned_tensors_are_read(tmp_path: Path) -> None:
    """A header of odd length, as old writers made: the data is copied into alignment."""
    values = np.arange(6, dtype=np.float32)
    header = json.dumps({"t": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    header += b" " * ((1 - len(header)) % 4)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    tensor = tf.open_checkpoint(tmp_path).tensor("t")
    assert tensor.flags.aligned
    np.testing.assert_array_equal(tensor, values)


@pytest.mark.parametrize("order", ["order", "reorder"])
def test_zero_points_of_zero(order: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """W = q s where every zero point is 0: nothing is taken off or added anywhere."""
    truth = checkpoints.truth(rng, 64, 32, group=32)
    truth = dataclasses.replace(truth, zeros=np.zeros_like(truth.zeros), codes=np.full_like(truth.codes, 15))
    tensors = checkpoints.awq_gemm(truth, order=checkpoints.AWQ if order == "reorder" else None)
    layer = open_layer(tmp_path, tensors, checkpoints.awq_config(4, 32, pack_method=order))
    np.testing.assert_array_equal(layer.dequantize(), 15 * truth.scales[truth.group_of].astype(np.float32))


@pytest.mark.parametrize("form", checkpoints.MAKERS)
def test_listing_reads_headers_only(
    form: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.MAKERS[form](tmp_path, rng, 64, 32)
    read: list[str] = []
    tensor = MappedFile.tensor
    monkeypatch.setattr(MappedFile, "tensor", lambda self, name: read.append(name) or tensor(self, name))
    tf.open_checkpoint(tmp_path).linears()
    assert set(read) <= {"layer.weight_shape"}
