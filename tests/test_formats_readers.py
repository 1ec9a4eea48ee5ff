"""Every format read back equals what was put in, exactly."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import numpy as np
import pytest

import tilefuse as tf


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
