"""Every kind of damaged or contradictory checkpoint gives a typed error that names the tensor or file."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest

import tilefuse as tf
from tilefuse.errors import (
    DtypeError,
    FormatError,
    QuantizationError,
    ShapeError,
    TileFuseError,
    UnsupportedFormatError,
)

Tensors = dict[str, np.ndarray]


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file of any header (an object or raw bytes)."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def tensor(dtype: str = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: dict[str, tuple[Any, bytes, str]] = {
    "not-utf8": (b'{"\xff": {}}', b"", "UTF-8"),
    "not-json": (b"{", b"", "JSON"),
    "not-an-object": ([1], b"", "must be an object, not list"),
    "deep": (b"[" * 100_000, b"", "JSON"),
    "huge-number": (b'{"t": ' + b"9" * 5000 + b"}", b"", "JSON"),
    "duplicate": (b'{"t": {}, "t": {}}', b"", "'t' occurs twice"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "not-a-tensor": ({"t": 3}, b"", "tensor 't'.*dtype, shape and data_offsets"),
    "extra-key": ({"t": {**tensor(), "x": 1}}, bytes(4), "tensor 't'"),
    "dtype": ({"t": tensor("F12")}, bytes(4), "tensor 't'.*'F12'"),
    "dtype-kind": ({"t": tensor(["U8"])}, bytes(4), "tensor 't'"),  # type: ignore[arg-type]
    "shape": ({"t": tensor(shape="4")}, bytes(4), "tensor 't'.*shape"),
    "shape-negative": ({"t": tensor(shape=[-4])}, bytes(4), "tensor 't'.*shape"),
    "shape-bool": ({"t": tensor(shape=[True, 4])}, bytes(4), "tensor 't'.*shape"),
    "shape-float": ({"t": tensor(shape=[4.0])}, bytes(4), "tensor 't'.*shape"),
    "shape-rank": ({"t": tensor(shape=[1] * 40 + [4])}, bytes(4), "tensor 't'.*shape"),
    "shape-overflow": ({"t": tensor(shape=[1 << 40, 1 << 40, 0], offsets=[0, 0])}, b"", "tensor 't'.*beyond"),
    "offsets": ({"t": tensor(offsets=[0])}, bytes(4), "tensor 't'.*data_offsets"),
    "offsets-negative": ({"t": tensor(offsets=[-4, 0])}, bytes(4), "tensor 't'.*data_offsets"),
    "offsets-reversed": ({"t": tensor(offsets=[4, 0])}, bytes(4), "tensor 't'.*4 bytes"),
    "size": ({"t": tensor(offsets=[0, 5])}, bytes(5), "tensor 't'.*takes 4 bytes"),
    "overlap": ({"t": tensor(), "u": tensor(offsets=[2, 6])}, bytes(6), "tensor 'u'.*overlaps tensor 't'"),
    "same": ({"t": tensor(), "u": tensor()}, bytes(4), "tensor 'u'.*overlaps tensor 't'"),
    "hole": ({"t": tensor(), "u": tensor(offsets=[5, 9])}, bytes(9), "tensor 'u'.*hole after tensor 't'"),
    "hole-first": ({"t": tensor(offsets=[1, 5])}, bytes(5), "tensor 't'.*hole"),
    "truncated": ({"t": tensor()}, bytes(3), "truncated.*tensor 't'"),
    "beyond": ({"t": tensor("U8", [1 << 60], [0, 1 << 60])}, bytes(3), "truncated.*tensor 't'"),
    "trailing": ({"t": tensor()}, bytes(5), "no tensor covers"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_bad_headers(case: str, tmp_path: Path) -> None:
    header, data, message = HEADERS[case]
    path = write_raw(tmp_path / "model.safetensors", header, data)
    for opened in (path, tmp_path):
        with pytest.raises(FormatError, match=message) as caught:
            tf.open_checkpoint(opened)
        assert "model.safetensors" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", struct.pack("<Q", 1), struct.pack("<Q", 2**63), b"\xff" * 64])
def test_bad_lengths(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        tf.open_checkpoint(tmp_path)


def test_a_packed_file_is_no_checkpoint(tmp_path: Path, rng: np.random.Generator) -> None:
    layer = tf.pack(tf.quantize_linear(rng.normal(0, 1, (64, 32)).astype(np.float32), group=32, name="layer"))
    path = tmp_path / "model.safetensors"
    tf.save(path, layer)
    for place in (path, tmp_path):
        with pytest.raises(FormatError, match=r"packed file, not a checkpoint; load\(\)"):
            tf.open_checkpoint(place)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tf.open_checkpoint(tmp_path / "absent")
    with pytest.raises(FormatError, match=r"no \.safetensors file"):
        tf.open_checkpoint(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        write_raw(tmp_path / name, {})
    with pytest.raises(FormatError, match=r"2 \.safetensors files and no model\.safetensors\.index\.json"):
        tf.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"t": "gone.safetensors"}}, r"'t' is in 'gone\.safetensors', which is missing"),
        ({"weight_map": {"u": "a.safetensors"}}, r"'u' is not in .*a\.safetensors"),
        ({"weight_map": {"t": "../a.safetensors"}}, "not the name of a file"),
        ({"weight_map": {"t": "/etc/passwd"}}, "not the name of a file"),
        ({"weight_map": {"t": "a\0"}}, "not the name of a file"),
        ({"weight_map": {"t": 3}}, "not the name of a file"),
        ({"weight_map": []}, "weight_map"),
        ({}, "weight_map"),
        ([], "must be an object"),
    ],
)
def test_bad_index(index: Any, message: str, tmp_path: Path) -> None:
    write_raw(tmp_path / "a.safetensors", {"t": tensor()}, bytes(4))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=message) as caught:
        tf.open_checkpoint(tmp_path)
    assert "index.json" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json.*JSON"),
        ("[]", r"config\.json.*object"),
        ('{"quantization_config": 3}', r"config\.json.*not an object"),
        ('{"quantization_config": {"bits": 4}}', "quant_method is missing"),
        ('{"quantization_config": {"quant_method": 4}}', "quant_method = 4"),
    ],
)
def test_bad_config(text: str, message: str, tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {})
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=message):
        tf.open_checkpoint(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Formats that are refused by name.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (checkpoints.awq_config(version="marlin"), "'marlin'.*'gemm'"),
        (checkpoints.awq_config(version="ipex"), "'ipex'"),
        (checkpoints.gptq_config(checkpoint_format="marlin"), "'marlin'.*'gptq'"),
        (checkpoints.gptq_config(is_marlin_format=True), "'marlin'"),
        (checkpoints.gptq_config(pack_dtype="int16"), "pack_dtype 'int16'"),
        (checkpoints.ct_config(form="float-quantized"), "'float-quantized'"),
        (checkpoints.ct_config(form="nvfp4-pack-quantized"), "'nvfp4-pack-quantized'"),
        (checkpoints.ct_config(form="marlin-24"), "'marlin-24'"),
        (checkpoints.ct_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (checkpoints.ct_config() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "quark"}, "'quark'.*custom_mode 'awq'"),
    ],
)
def test_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, {"t": np.zeros(1, np.float32)}, settings)
    with pytest.raises(UnsupportedFormatError, match=message):
        tf.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (checkpoints.awq_config(3, 32), "bits = 3"),
        (checkpoints.awq_config(4, 32, pack_method="zigzag"), "'zigzag'"),
        (checkpoints.gptq_config(3, 32), "'layer'.*3 bits"),
        (checkpoints.gptq_config(4, 32, dynamic={"layer": {"bits": 2}}), "'layer'.*2 bits"),
        (checkpoints.gptq_config(4, 32, checkpoint_format="gptq_p"), "'gptq_p'"),
        (checkpoints.ct_config(3, 32), "'layer'.*3 bits"),
        (checkpoints.ct_config(4, 32, type="float"), "'layer'.*'float'"),
        (checkpoints.ct_config(4, 32, strategy="block"), "'layer'.*'block'"),
    ],
)
def test_options_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    truth = checkpoints.truth(rng, 64, 32, group=32)
    encode = {"awq": checkpoints.awq_gemm, "gptq": checkpoints.gptq}.get(config["quant_method"], checkpoints.ct_packed)
    checkpoints.save(tmp_path, checkpoints.named("layer", encode(truth)), config)
    with pytest.raises(UnsupportedFormatError, match=message):
        tf.open_checkpoint(tmp_path).linear("layer")


def test_float_layers_are_refused_by_name(tmp_path: Path) -> None:
    layers = {
        "fp8": {"weight": np.zeros((8, 32), checkpoints.FP8), "weight_scale": np.ones((8, 1), np.float32)},
        "fp4": {"weight_packed": np.zeros((8, 16), np.uint8), "weight_scale": np.ones((8, 2), checkpoints.FP8)},
        "sparse": {"weight_packed": np.zeros((2, 8), np.int32), "meta": np.zeros((2, 8), np.int16)},
    }
    tensors: Tensors = {}
    for name, parts in layers.items():
        tensors |= checkpoints.named(name, parts)
    config = checkpoints.ct_config() | {"format": "mixed-precision"}
    config["config_groups"]["group_0"].pop("format")
    checkpoint = tf.open_checkpoint(checkpoints.save(tmp_path, tensors, config))
    for name, message in {"fp8": "float-quantized", "fp4": "nvfp4", "sparse": "marlin-24"}.items():
        with pytest.raises(UnsupportedFormatError, match=f"'{name}'.*{message}"):
            checkpoint.linear(name)


# ---------------------------------------------------------------------------------------------------------------------
# Layers whose tensors are wrong.

Edit = Callable[[Tensors], None]
BAD: list[tuple[str, str, Edit, str, type[TileFuseError]]] = []
"""(form of checkpoint, name of the case, edit of its tensors, what the message says, class of error)."""


def bad(forms: str, case: str, message: str, error: type[TileFuseError] = FormatError) -> Callable[[Edit], Edit]:
    def register(edit: Edit) -> Edit:
        for form in forms.split():
            BAD.append((form, case, edit, message, error))
        return edit

    return register


AWQ_GPTQ = "awq-gemm awq-gemm-w8 awq-gemv gptq gptq-w8 gptq-v2 gptq-act-order"
CT = "ct-w4 ct-w8 ct-w8-channel ct-w4-symmetric"
ALL = f"{AWQ_GPTQ} {CT} ct-int8"
SCALES = r"layer\.(scales|weight_scale)' in .*model\.safetensors"


def _scales(tensors: Tensors) -> str:
    return next(name for name in tensors if name.endswith(("scales", "weight_scale")))


def _poke(tensors: Tensors, name: str, value: float, at: int = 0) -> None:
    copy = tensors[name].copy()
    copy.flat[at] = value
    tensors[name] = copy


@bad(ALL, "scales-nan", rf"{SCALES}: nan at \[", QuantizationError)
def _(tensors: Tensors) -> None:
    _poke(tensors, _scales(tensors), np.nan)


@bad(ALL, "scales-inf", rf"{SCALES}: -inf at \[", QuantizationError)
def _(tensors: Tensors) -> None:
    _poke(tensors, _scales(tensors), -np.inf)


@bad("ct-w8-channel", "scales-overflow", rf"{SCALES}.*overflows bfloat16", QuantizationError)
def _(tensors: Tensors) -> None:
    _poke(tensors, _scales(tensors), 2.0**128 - 2.0**119)


@bad(ALL, "scales-dtype", rf"{SCALES} has dtype float64")
def _(tensors: Tensors) -> None:
    tensors[_scales(tensors)] = tensors[_scales(tensors)].astype(np.float64)


@bad(ALL, "scales-shape", r"tensor 'layer\.\w+' in ")
def _(tensors: Tensors) -> None:
    name = _scales(tensors)
    tensors[name] = np.concatenate([tensors[name]] * 3, axis=1)[:, :-1].copy()


@bad(ALL, "scales-rank", SCALES)
def _(tensors: Tensors) -> None:
    tensors[_scales(tensors)] = tensors[_scales(tensors)][None]


@bad(ALL, "scales-missing", r"tensor 'layer\.(scales|weight_scale)' is missing")
def _(tensors: Tensors) -> None:
    del tensors[_scales(tensors)]


@bad(ALL, "codes-missing", r"tensor 'layer\.(qweight|weight)' is missing")
def _(tensors: Tensors) -> None:
    for name in ("qweight", "weight_packed", "weight"):
        tensors.pop(f"layer.{name}", None)


@bad(AWQ_GPTQ + " ct-w4 ct-w8 ct-w8-channel ct-int8", "zeros-missing", "(qzeros|weight_zero_point)' is missing")
def _(tensors: Tensors) -> None:
    for name in ("qzeros", "weight_zero_point"):
        tensors.pop(f"layer.{name}", None)


@bad(AWQ_GPTQ + " ct-w4 ct-w8 ct-int8", "zeros-shape", r"layer\.(qzeros|weight_zero_point)' in .*has shape")
def _(tensors: Tensors) -> None:
    name = next(name for name in tensors if name.endswith(("qzeros", "zero_point")))
    tensors[name] = tensors[name][:-1].copy()


@bad(AWQ_GPTQ + " ct-w4 ct-w8 ct-int8", "zeros-dtype", r"layer\.(qzeros|weight_zero_point)' in .*has dtype int64")
def _(tensors: Tensors) -> None:
    name = next(name for name in tensors if name.endswith(("qzeros", "zero_point")))
    tensors[name] = tensors[name].astype(np.int64)


@bad("ct-w4", "zeros-range", r"weight_zero_point' in .*: zero point 8 at \[1, 0\]", QuantizationError)
def _(tensors: Tensors) -> None:
    # Unpacked zero points are signed: -8 to 7 in 4 bits.
    zeros = np.zeros((32, 2), np.int8)
    zeros[1, 0] = 8
    tensors["layer.weight_zero_point"] = zeros


@bad("ct-w4-symmetric", "zeros-in-symmetric", "weight_zero_point.*symmetric")
def _(tensors: Tensors) -> None:
    tensors["layer.weight_zero_point"] = np.ones((32, 2), np.int8)


@bad(ALL, "codes-dtype", r"layer\.(qweight|weight_packed|weight)' in .*has dtype float32")
def _(tensors: Tensors) -> None:
    for name in ("layer.qweight", "layer.weight_packed", "layer.weight"):
        if name in tensors:
            tensors[name] = tensors[name].astype(np.float32)


@bad(ALL, "codes-rank", r"layer\.(qweight|weight_packed|weight)' in .*has shape")
def _(tensors: Tensors) -> None:
    for name in ("layer.qweight", "layer.weight_packed", "layer.weight"):
        if name in tensors:
            tensors[name] = tensors[name].reshape(-1)


@bad(ALL, "codes-shape", r"tensor 'layer\.\w+' in ")
def _(tensors: Tensors) -> None:
    for name in ("layer.qweight", "layer.weight_packed", "layer.weight"):
        if name in tensors:
            tensors[name] = tensors[name][:-1, :-1].copy()


@bad("awq-gemm gptq ct-w4", "bias-shape", r"layer\.bias' in .*expected \[32\]")
def _(tensors: Tensors) -> None:
    tensors["layer.bias"] = np.zeros(31, np.float16)


@bad("awq-gemm gptq ct-w4", "bias-dtype", r"layer\.bias' in .*dtype int32")
def _(tensors: Tensors) -> None:
    tensors["layer.bias"] = np.zeros(32, np.int32)


@bad("awq-gemm gptq ct-w4", "bias-nan", r"layer\.bias' in .*: nan at \[3\]", QuantizationError)
def _(tensors: Tensors) -> None:
    _poke(tensors, "layer.bias", np.nan, 3)


@bad(
    "gptq gptq-act-order", "g-idx-range", r"layer\.g_idx' in .*: group 2 at \[5\] is outside 0 to 1", QuantizationError
)
def _(tensors: Tensors) -> None:
    _poke(tensors, "layer.g_idx", 2, 5)


@bad("gptq gptq-act-order", "g-idx-negative", r"layer\.g_idx' in .*: group -7 at \[5\]", QuantizationError)
def _(tensors: Tensors) -> None:
    _poke(tensors, "layer.g_idx", -7, 5)


@bad("gptq", "g-idx-unequal", r"layer\.g_idx' in .*not of 32", QuantizationError)
def _(tensors: Tensors) -> None:
    _poke(tensors, "layer.g_idx", 1, 5)


@bad("gptq gptq-act-order", "g-idx-shape", r"tensor 'layer\.\w+' in ")
def _(tensors: Tensors) -> None:
    tensors["layer.g_idx"] = tensors["layer.g_idx"][:-9].copy()


@bad("gptq gptq-act-order", "g-idx-dtype", r"layer\.g_idx' in .*dtype int64")
def _(tensors: Tensors) -> None:
    tensors["layer.g_idx"] = tensors["layer.g_idx"].astype(np.int64)


@bad("gptq-act-order", "g-idx-missing", r"tensor 'layer\.g_idx' is missing")
def _(tensors: Tensors) -> None:
    del tensors["layer.g_idx"]


@bad(CT, "weight-shape", r"weight_shape' in .*says \[32, 1000\]")
def _(tensors: Tensors) -> None:
    tensors["layer.weight_shape"] = np.array([32, 1000])


@bad(CT, "weight-shape-negative", r"weight_shape' in .*says \[32, -64\]")
def _(tensors: Tensors) -> None:
    tensors["layer.weight_shape"] = np.array([32, -64])


@bad(CT, "weight-shape-k", r"weight_packed' in .*contradict K = 40")
def _(tensors: Tensors) -> None:
    tensors["layer.weight_shape"] = np.array([32, 40])


@bad(CT, "weight-shape-dtype", "weight_shape' in .*dtype float32")
def _(tensors: Tensors) -> None:
    tensors["layer.weight_shape"] = np.array([32, 64], np.float32)


@pytest.mark.parametrize(
    ("form", "edit", "message", "error"),
    [pytest.param(form, *rest, id=f"{form}-{case}") for form, case, *rest in BAD],
)
def test_bad_layers(
    form: str, edit: Edit, message: str, error: type[TileFuseError], tmp_path: Path, rng: np.random.Generator
) -> None:
    checkpoints.MAKERS[form](tmp_path, rng, 64, 32)
    good = tf.open_checkpoint(tmp_path)
    tensors = {name: good.tensor(name).copy() for name in good.tensors()}
    edit(tensors)
    checkpoints.save_file(tmp_path / "model.safetensors", tensors)
    with pytest.raises(error, match=message) as caught:
        tf.open_checkpoint(tmp_path).linear("layer")
    assert type(caught.value) is error


def test_negative_zero_scales_are_taken(tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 64, 32, group=32)
    truth = dataclasses.replace(truth, scales=np.full_like(truth.scales, -0.0))
    checkpoints.save(tmp_path, checkpoints.named("layer", checkpoints.awq_gemm(truth)), checkpoints.awq_config(4, 32))
    assert not tf.open_checkpoint(tmp_path).linear("layer").dequantize().any()


@pytest.mark.parametrize(
    ("form", "key", "value", "message"),
    [
        ("awq-gemm", "group_size", 16, "2 groups.*group size 16"),
        ("awq-gemm", "group_size", 0, "group size 0"),
        ("awq-gemm", "group_size", "32", "group_size = '32' is not an integer"),
        ("awq-gemm", "group_size", 48, "not a multiple of the group size 48"),
        ("awq-gemm", "bits", 8, "layer.qweight"),
        ("awq-gemm-w8", "bits", 4, "layer.qweight"),
        ("awq-gemm", "version", "gemv", "shape of AWQ version 'gemm'.*says 'gemv'"),
        ("awq-gemv", "version", "gemm", "shape of AWQ version 'gemv'.*says 'gemm'"),
        ("awq-gemv", "group_size", 48, "K = 64 with group size 48"),
        ("gptq", "group_size", 64, "2 groups.*group size 64"),
        ("gptq", "bits", 8, "layer.qweight"),
        ("gptq", "bits", True, "bits = True is not an integer"),
        ("gptq", "sym", "yes", "sym = 'yes'"),
        ("gptq", "dynamic", {"(": {}}, "not a regular expression"),
        ("gptq", "dynamic", {"layer": 3}, "not an object"),
    ],
)
def test_contradictory_configuration(
    form: str, key: str, value: Any, message: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    checkpoints.MAKERS[form](tmp_path, rng, 64, 32)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=message):
        tf.open_checkpoint(tmp_path).linears()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"group_size": 64}, "2 groups.*group size 64"),
        ({"num_bits": 8}, r"weight_packed'.*contradict K = 64 with 8 bits"),
        ({"strategy": "channel"}, "weight_scale'.*strategy 'channel'"),
        ({"strategy": "tensor"}, "weight_scale'.*strategy 'tensor'"),
        ({"symmetric": True}, "weight_zero_point'.*symmetric"),
        ({"symmetric": 1}, "symmetric = 1"),
    ],
)
def test_contradictory_scheme(weights: dict[str, Any], message: str, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 64, 32, group=32)
    config = checkpoints.ct_config(4, 32, **weights)
    checkpoints.save(tmp_path, checkpoints.named("layer", checkpoints.ct_packed(truth)), config)
    with pytest.raises(FormatError, match=message):
        tf.open_checkpoint(tmp_path).linear("layer")


@pytest.mark.parametrize("config_groups", [{"g": 3}, {"g": {"targets": "Linear"}}, {"g": {"targets": [3]}}, []])
def test_bad_config_groups(config_groups: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    truth = checkpoints.truth(rng, 64, 32, group=32)
    config = checkpoints.ct_config(4, 32) | {"config_groups": config_groups}
    checkpoints.save(tmp_path, checkpoints.named("layer", checkpoints.ct_packed(truth)), config)
    with pytest.raises(FormatError, match=r"config_groups|target"):
        tf.open_checkpoint(tmp_path).linear("layer")


def test_unknown_names(tmp_path: Path, rng: np.random.Generator) -> None:
    checkpoints.MAKERS["awq-gemm"](tmp_path, rng, 64, 32)
    checkpoint = tf.open_checkpoint(tmp_path)
    with pytest.raises(FormatError, match="no linear layer 'other'"):
        checkpoint.linear("other")
    with pytest.raises(FormatError, match="tensor 'other' is missing"):
        checkpoint.tensor("other")
    with pytest.raises(FormatError, match="'layer' is quantised"):
        checkpoint.dense("layer")


# ---------------------------------------------------------------------------------------------------------------------
# Layers that a caller puts together.


def good_layer() -> tf.QuantizedLinear:
    return tf.QuantizedLinear(
        name="l",
        format="made",
        k=8,
        n=4,
        bits=4,
        group=4,
        codes=np.zeros((8, 4), np.uint8),
        order=tf.CodeOrder.KN,
        scales=np.ones((2, 4), np.float32),
        zeros=np.zeros((2, 4), np.uint8),
        bias=np.zeros(4, np.float32),
        perm=np.arange(8, dtype=np.int32),
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": 0}, ShapeError, "k = 0"),
        ({"group": 9}, ShapeError, "group = 9"),
        ({"bits": 3}, QuantizationError, "bits = 3"),
        ({"codes": np.zeros((8, 5), np.uint8)}, ShapeError, "codes"),
        ({"codes": np.zeros((8, 4), np.int64)}, DtypeError, "codes"),
        ({"codes": np.full((8, 4), 16, np.uint8)}, QuantizationError, r"codes: code 16 at \[0, 0\]"),
        ({"order": tf.CodeOrder.ROWS_N_FAST}, ShapeError, "multiple of 64"),
        ({"order": tf.CodeOrder.WORDS_N_AWQ}, ShapeError, "multiple of 8"),
        ({"order": tf.CodeOrder.ROWS_N_INT8}, QuantizationError, "8-bit codes only"),
        ({"order": tf.CodeOrder.WORDS_N_AWQ, "bits": 8}, QuantizationError, "4-bit codes only"),
        ({"scales": np.ones((2, 4))}, DtypeError, "scales"),
        ({"scales": np.ones((1, 4), np.float32)}, ShapeError, "scales"),
        ({"scales": np.full((2, 4), 3.4e38, np.float32)}, QuantizationError, "overflows bfloat16"),
        ({"zeros": None}, QuantizationError, "exactly one of zeros and mins"),
        ({"mins": np.zeros((2, 4), np.float32)}, QuantizationError, "exactly one of zeros and mins"),
        ({"zeros": np.full((2, 4), 16, np.uint8)}, QuantizationError, r"zeros: zero point 16 at \[0, 0\]"),
        ({"zeros": None, "mins": np.full((2, 4), np.inf, np.float32)}, QuantizationError, "mins: inf"),
        ({"bias": np.zeros(4)}, DtypeError, "bias"),
        ({"bias": np.zeros(5, np.float32)}, ShapeError, "bias"),
        ({"perm": np.zeros(8, np.int32)}, QuantizationError, "perm"),
        ({"perm": np.arange(8)}, DtypeError, "perm"),
    ],
)
def test_validate(change: dict[str, Any], error: type[TileFuseError], message: str) -> None:
    good_layer().validate()
    with pytest.raises(error, match=f"layer 'l'.*{message}") as caught:
        dataclasses.replace(good_layer(), **change).validate()
    assert type(caught.value) is error


def test_largest_scale_that_bfloat16_holds() -> None:
    """The last float32 below the limit rounds to bfloat16's largest value, 2^128 - 2^120."""
    last = np.nextafter(np.float32(2.0**128 - 2.0**119), np.float32(0))
    assert float(last.astype(checkpoints.BF16)) == 2.0**128 - 2.0**120
    dataclasses.replace(good_layer(), scales=np.full((2, 4), last)).validate()
