"""`benchmarks/perplexity.py` on a tiny model: its figures are those of other computations of the same."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny_models

from tilefuse.awq import Options, quantize_checkpoint
from tilefuse.awq.perplexity import perplexity as measured

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # theirs
]

TEXT = "The quick brown fox jumps over the lazy dog, and then it sits down. " * 6  # fewer tokens than a row


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("torch", reason="the [peers] extra is not installed")
    pytest.importorskip("gguf", reason="the [test] extra is not installed")
    import perplexity

    model = tiny_models.make_model("llama", tie_word_embeddings=True)
    model.model.embed_tokens.weight.mul_(0.05)  # and with it the logits, to a size that real ones have
    source = tiny_models.save(model, tmp_path / "source")
    monkeypatch.setattr(perplexity, "source", lambda: source)
    monkeypatch.setattr(perplexity, "CACHE", tmp_path)
    monkeypatch.setattr(perplexity, "CHECKPOINTS", {"w8": Options(bits=8, group=32, method="rtn")})
    return perplexity


def test_parts_of_a_run_are_put_together(
    page: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = (
        page.Variant("float32", dtype="float32"),
        page.Variant("bf16"),
        page.Variant("W8, dequantised", "w8"),
        page.Variant("W8A16", "w8", layers="tilefuse"),
    )
    monkeypatch.setattr(page, "VARIANTS", variants)
    monkeypatch.setattr(page, "evaluation_text", lambda: TEXT)
    monkeypatch.setattr(page, "facts", lambda ids: {"tokens": "7", "machine": "this", "versions": "these"})
    assert page.main(["--print", "--seconds", "0"]) == 3
    assert "1 of 4" in capsys.readouterr().err
    measure = page.measure

    def measure_some(variant: Any, ids: Any, reference: Any) -> Any:
        if variant.name == "W8A16":
            raise KeyboardInterrupt
        return measure(variant, ids, reference)

    monkeypatch.setattr(page, "measure", measure_some)
    with pytest.raises(KeyboardInterrupt):
        page.main(["--print", "--resume"])
    again: list[str] = []

    def measure_rest(variant: Any, ids: Any, reference: Any) -> Any:
        again.append(variant.name)
        return measure(variant, ids, reference)

    monkeypatch.setattr(page, "measure", measure_rest)
    assert page.main(["--print", "--resume"]) == 0
    assert again == ["float32", "W8A16"]  # the first is what the others are compared with
    text = capsys.readouterr().out
    assert page.main(["--print", "--resume"]) == 0
    assert capsys.readouterr().out == text
    assert len(again) == 2
    assert "1 of 1 are within 0.5%" in " ".join(text.split())
    # Other versions: nothing of it counts.
    monkeypatch.setattr(page, "facts", lambda ids: {"tokens": "7", "machine": "this", "versions": "others"})
    assert page.main(["--print", "--resume", "--seconds", "0"]) == 3


def test_figures(page: ModuleType, tmp_path: Path) -> None:
    ids = page.rows(tmp_path / "source", TEXT)
    exact, reference = page.measure(page.Variant("float32", dtype="float32"), ids, None)
    assert exact.kl == 0
    assert exact.agreement == 1
    # The blocks are given what they were given before, and nothing is rounded otherwise.
    assert max(exact.blocks) < 1e-5
    assert len(exact.blocks) == 2

    ours, _ = page.measure(page.Variant("W8", "w8", "float32", "tilefuse"), ids, reference)
    again = tmp_path / "again"
    quantize_checkpoint(tmp_path / "source", again, Options(bits=8, group=32, method="rtn"))
    before, after = (measured(folder, TEXT) for folder in (tmp_path / "source", again))
    # Two computations of float32 logits, and a mean of their logarithms.
    assert exact.perplexity == pytest.approx(before.value, rel=1e-5)
    # Here tilefuse's layers, which round activations to bfloat16: 2^-9 each, through 14 layers, of logits of size 1.
    assert ours.perplexity == pytest.approx(after.value, rel=0.02)
    assert 0 < ours.kl < 0.01
    # 8 bits: 0.5 % of a weight of a group of 32 normal ones, and the activations', in 7 layers a block.
    assert all(0 < error < 0.05 for error in ours.blocks)
