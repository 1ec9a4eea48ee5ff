"""Layers packed as one: which ones, and that each still is what the checkpoint says."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from checkpoints import KINDS, Truth

import tilefuse as tf
from tilefuse import fusion
from tilefuse.errors import QuantizationError
from tilefuse.fusion import Product

SIZES = {"q_proj": 96, "k_proj": 32, "v_proj": 32, "o_proj": 64, "gate_proj": 64, "up_proj": 64, "down_proj": 64}
"""Output channels."""

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def save(
    path: Path, rng: np.random.Generator, kind: str, architecture: str = "llama", **options: Any
) -> dict[str, Truth]:
    """A block's layers; those with the same input have the same activation order."""
    truths: dict[str, Truth] = {}
    tensors: dict[str, Any] = {}
    for leaf, n in SIZES.items():
        truth = KINDS[kind].truth(rng, 128, n, **options)
        first = truths.get("q_proj" if leaf in QKV else "gate_proj" if leaf in GATE_UP else "")
        if first is not None:
            truth = dataclasses.replace(truth, group_of=first.group_of)
        truths[leaf] = truth
        tensors |= checkpoints.named(f"h.0.{leaf}", KINDS[kind].encode(truth))
    checkpoints.save(path, tensors, KINDS[kind].quantization, model_type=architecture)
    return truths


def plan(path: Path, **more: Any) -> list[Product]:
    checkpoint = tf.open_checkpoint(path)
    return fusion.products(checkpoint, [info.name for info in checkpoint.linears() if info.quantized], **more)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_lie_beside_each_other(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Packed and unpacked again, a fused layer is its parts: codes, scales, zero points, biases, order of inputs."""
    truths = save(tmp_path, rng, kind)
    checkpoint = tf.open_checkpoint(tmp_path)
    products = {product.name: product for product in plan(tmp_path)}
    assert set(products) == {"h.0.qkv_proj", "h.0.gate_up_proj", "h.0.o_proj", "h.0.down_proj"}
    for name, leaves in (("h.0.qkv_proj", QKV), ("h.0.gate_up_proj", GATE_UP), ("h.0.o_proj", ("o_proj",))):
        layer = fusion.read(checkpoint, products[name])
        layer.validate()
        packed = tf.pack(layer)
        assert fusion.spec(checkpoint, products[name]) == tf.storage.LayerSpec.of(packed)
        weights = np.concatenate([truths[leaf].weights() for leaf in leaves], axis=1)
        # float16 and bfloat16 scales times a difference of codes fit float32.
        exact = truths[leaves[0]].scales.dtype != np.float32
        np.testing.assert_allclose(layer.dequantize(), weights, rtol=0 if exact else 2.0**-23)
        # Scales are rounded to bfloat16 (half a unit in the last of 8 bits: 2^-8), products too.
        np.testing.assert_allclose(packed.dequantize().astype(np.float64), weights, rtol=2.0**-7 + 2.0**-16)
        biases = [truths[leaf].bias for leaf in leaves]
        if all(bias is None for bias in biases):
            assert packed.bias is None
        else:
            np.testing.assert_array_equal(packed.bias, np.concatenate(biases).astype(np.float32))


def test_a_bias_that_one_lacks_is_zero(tmp_path: Path, rng: np.random.Generator) -> None:
    with_bias = [KINDS["ct-w4"].truth(rng, 64, 32, bias=bias) for bias in (True, False)]
    tensors: dict[str, Any] = {}
    for leaf, truth in zip(GATE_UP, with_bias, strict=True):
        tensors |= checkpoints.named(leaf, checkpoints.ct_packed(truth))
    checkpoints.save(tmp_path, tensors, KINDS["ct-w4"].quantization)
    checkpoint = tf.open_checkpoint(tmp_path)
    layer = fusion.concatenate([checkpoint.linear(leaf) for leaf in GATE_UP], "both")
    assert layer.bias is not None
    assert with_bias[0].bias is not None
    np.testing.assert_array_equal(layer.bias[:32], with_bias[0].bias.astype(np.float32))
    np.testing.assert_array_equal(layer.bias[32:], 0)


def test_words_that_two_layers_would_share(rng: np.random.Generator) -> None:
    """Natural order along N with N no multiple of the codes in a word; with and without a permutation."""
    for perm in (None, rng.permutation(64).astype(np.int32)):
        parts, expected = [], []
        for n in (12, 20):
            truth = checkpoints.truth(rng, 64, n, bits=4, group=32)
            packed = checkpoints.pack(truth.codes, 4)
            layer = tf.QuantizedLinear(
                f"n{n}", "test", 64, n, 4, 32, packed, tf.CodeOrder.WORDS_N, truth.scales, truth.zeros, perm=perm
            )
            parts.append(layer)
            expected.append(layer.dequantize())
        joined = fusion.concatenate(parts, "both")
        joined.validate()
        np.testing.assert_array_equal(joined.dequantize(), np.concatenate(expected, axis=1))


def test_float_minima(tmp_path: Path, rng: np.random.Generator) -> None:
    """gemv_fast: q s + m."""
    expected, tensors = [], {}
    for leaf in GATE_UP:
        truth = checkpoints.truth(rng, 128, 64, group=64)
        mins = rng.normal(size=truth.scales.shape).astype(np.float16)
        tensors |= checkpoints.named(leaf, checkpoints.awq_fast(truth, mins))
        rows = truth.group_of
        expected.append(truth.codes * truth.scales.astype(np.float64)[rows] + mins.astype(np.float64)[rows])
    checkpoints.save(tmp_path, tensors, checkpoints.awq_config(4, 64, version="gemv_fast"))
    checkpoint = tf.open_checkpoint(tmp_path)
    layer = fusion.concatenate([checkpoint.linear(leaf) for leaf in GATE_UP], "both")
    np.testing.assert_allclose(layer.dequantize(), np.concatenate(expected, axis=1), rtol=0, atol=1e-6)


def test_what_is_not_fused(tmp_path: Path, rng: np.random.Generator) -> None:
    save(tmp_path / "other", rng, "awq-gemm", "nonesuch")
    assert not any(product.fused for product in plan(tmp_path / "other"))
    save(tmp_path / "model", rng, "awq-gemm")
    assert not any(product.fused for product in plan(tmp_path / "model", fuse=False))
    checkpoint = tf.open_checkpoint(tmp_path / "model")
    some = [f"h.0.{leaf}" for leaf in ("q_proj", "k_proj", "gate_proj", "up_proj")]
    assert [product.name for product in fusion.products(checkpoint, some)] == [
        "h.0.q_proj",
        "h.0.k_proj",
        "h.0.gate_up_proj",
    ]


def test_layers_that_cant_be_one(rng: np.random.Generator) -> None:
    def layer(**changes: Any) -> tf.QuantizedLinear:
        truth = checkpoints.truth(rng, 64, 32, group=32)
        fields = {"codes": truth.codes, "order": tf.CodeOrder.KN, "scales": truth.scales, "zeros": truth.zeros}
        return tf.QuantizedLinear("layer", "test", 64, 32, 4, 32, **{**fields, **changes})  # type: ignore[arg-type]

    perm = np.arange(64, dtype=np.int32)[::-1].copy()
    others = [layer(perm=perm), dataclasses.replace(layer(), bits=8), dataclasses.replace(layer(), group=64)]
    for other in others:
        with pytest.raises(QuantizationError, match="can't be one"):
            fusion.concatenate([layer(), other], "both")
