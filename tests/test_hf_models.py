"""Every architecture in every format through `AutoModelForCausalLM.from_pretrained`, without the formats' software."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS

torch = pytest.importorskip("torch", reason="the [hf] extra is not installed")
transformers = pytest.importorskip("transformers", reason="the [hf] extra is not installed")

import language_models  # noqa: E402

import tilefuse.hf  # noqa: E402
from tilefuse.hf import FusedLinear, TileFuseLinear  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.usefixtures("cache"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

IDS = torch.tensor([[1, 17, 93, 4, 4, 60, 31, 8, 55, 23, 76, 12]])


def logits_of(model: Any, ids: Any = IDS) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = model(ids).logits.float().numpy()
    return found


def close(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any], most: float, mean: float) -> None:
    """Compares logits; bounds are shares of the largest one."""
    error, largest = np.abs(ours - theirs), np.abs(theirs).max()
    assert error.max() <= most * largest
    assert error.mean() <= mean * largest


EXACT = 2.0**-6, 2.0**-10
"""On the device "reference": the same products, rounded once to float32; mostly 1e-7. Where sums in another order make
an activation round to bfloat16 the other way, it is off by 2^-8, one of 64 inputs and more, and what follows amplifies
that."""

ON_CPU = 2.0**-3, 2.0**-7
"""Kernels may round weights to bfloat16 or not: 2^-9 of each, four times in each of two blocks of random weights, which
amplify it. A wrong layer is off by the whole."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", language_models.ARCHITECTURES)
def test_logits(architecture: str, kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    expected = language_models.make(tmp_path / "model", architecture, KINDS[kind], rng)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    fused = [module for module in model.modules() if isinstance(module, FusedLinear)]
    layers = [module for module in model.modules() if isinstance(module, TileFuseLinear)]
    assert (len(fused), len(layers)) == (2 * language_models.LAYERS, 4 * language_models.LAYERS)
    assert not any(type(module) is torch.nn.Linear for name, module in model.named_modules() if "lm_head" not in name)
    theirs = logits_of(expected)
    close(logits_of(model), theirs, *ON_CPU)
    assert set(tilefuse.hf.phases_of(model).calls) == {("prefill", "cpu")}
    tilefuse.hf.set_device(model, "reference")
    close(logits_of(model), theirs, *EXACT)
