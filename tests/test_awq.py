"""`tilefuse quantize`: folding changes nothing, the searches choose as stated, and checkpoints read back elsewhere."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tiny_models

import tilefuse as tf
from tilefuse import commands
from tilefuse.awq import Options, quantize_checkpoint
from tilefuse.awq.families import LINEARS, family_of
from tilefuse.awq.perplexity import perplexity
from tilefuse.errors import FormatError, QuantizationError, UnsupportedFormatError

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # theirs
]

KINDS = list(tiny_models.FAMILIES)
TEXT = "The quick brown fox jumps over the lazy dog, and then it sits down. Why would it not? " * 12


@pytest.fixture(scope="module", autouse=True)
def torch() -> ModuleType:
    module: ModuleType = pytest.importorskip("torch", reason="the [peers] extra is not installed")
    pytest.importorskip("transformers", minversion="5", reason="the [peers] extra is not installed")
    return module


def dequantized(path: Path) -> Any:
    """transformers' model of a quantised checkpoint, all of its weights as float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = tf.open_checkpoint(path)
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {}
    for name in model.state_dict():
        layer = name.removesuffix(".weight")
        if f"{layer}.qweight" in checkpoint.tensors() or f"{layer}.weight_packed" in checkpoint.tensors():
            array = checkpoint.linear(layer).dequantize().T
        elif name in checkpoint.tensors():
            array = checkpoint.tensor(name).astype(np.float32)
        else:
            assert name == "lm_head.weight"
            assert config.tie_word_embeddings
            array = checkpoint.tensor("model.embed_tokens.weight").astype(np.float32)
        state[name] = torch.from_numpy(np.ascontiguousarray(array))
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_folding_changes_nothing(kind: str, torch: ModuleType) -> None:
    from tilefuse.awq.fold import into_linear, into_norm, shared_heads

    model = tiny_models.make_model(kind)
    family = family_of({"model_type": kind}, "config.json")
    ids = torch.randint(4, 64, (2, 48), generator=torch.Generator().manual_seed(0))
    before = model(ids).logits
    weights = {name: value.clone() for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp

        def wanted(count: int) -> Any:
            return torch.exp(torch.randn(count, generator=generator))

        into_norm(
            block.get_submodule(family.attention_norm),
            [attention.q_proj, attention.k_proj, attention.v_proj],
            wanted(64),
            torch.bfloat16,
        )
        shared = shared_heads(attention.v_proj, attention.o_proj, 2)
        assert shared is not None  # grouped heads: 4 of queries, 2 of keys and values
        into_linear(attention.v_proj, attention.o_proj, wanted(64), shared)
        into_norm(block.get_submodule(family.mlp_norm), [mlp.gate_proj, mlp.up_proj], wanted(64), torch.bfloat16)
        into_linear(mlp.up_proj, mlp.down_proj, wanted(128))
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, weights[name])}
    assert len([name for name in changed if "proj.weight" in name]) == 2 * len(LINEARS)
    assert len([name for name in changed if "norm" in name]) == 2 * 2
    # Weights are rounded by 2^-24 once or twice; two blocks with some 10 products in a row, whose errors their sums and
    # norms average out rather than add up: far below 1000 roundings. (Folding wrongly changes logits by their size.)
    after = model(ids).logits
    assert float((after - before).abs().max()) <= 1000 * 2.0**-24 * float(before.abs().max())


def test_norms_are_stored_exactly(torch: ModuleType) -> None:
    from tilefuse.awq.fold import into_norm

    block = tiny_models.make_model("gemma").model.layers[0]
    norm, linear = block.input_layernorm, block.self_attn.q_proj
    norm.weight[3] = -1  # a gain of zero: nothing to divide
    gain, w = norm.weight + 1, linear.weight.clone()
    applied = into_norm(norm, [linear], torch.full((64,), 3.0), torch.bfloat16)
    assert torch.equal(norm.weight.bfloat16().float(), norm.weight)
    assert applied[3] == 1
    # bfloat16 rounds w = gain / 3 - 1 by at most 2^-9 of it, and the gain is 1 + w.
    assert ((applied - 3).abs()[norm.weight.abs() < 0.5] <= 3 * 2.0**-8).all()
    # The product of both is the old gain to float32's rounding of two operations.
    assert (((norm.weight + 1) * applied - gain).abs() <= 3 * 2.0**-24 * (gain.abs() + 1)).all()
    assert torch.allclose(linear.weight, w * applied, rtol=2.0**-23, atol=0)


def test_norms_of_another_kind_are_refused(torch: ModuleType) -> None:
    from tilefuse.awq.fold import weight_offset

    class Odd(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((8,), 5.0), requires_grad=False)

        def forward(self, x: Any) -> Any:
            return x * torch.exp(self.weight)

    odd = Odd()
    with pytest.raises(UnsupportedFormatError, match="Odd multiplies neither"):
        weight_offset(odd)
    assert (odd.weight == 5).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_that_of_quantize_linear(bits: int, torch: ModuleType) -> None:
    from tilefuse.awq.rounding import Rounding

    rng = np.random.default_rng(0)
    # Multiples of 1/64 with a range of 15/4 or 255/4: every intermediate of both is exact, so that ties fall alike.
    w = (rng.integers(-120, 120, (96, 128)) / 64).astype(np.float32)
    w[:, ::32] = -1.875
    w[:, 1::32] = 1.875 if bits == 4 else 1.84375
    rounding = Rounding(bits, 32, bits == 8, True)
    t = torch.from_numpy(w)
    layer = tf.quantize_linear(w.T, bits=bits, group=32, symmetric=bits == 8, scale_dtype="float16")
    np.testing.assert_array_equal(rounding.nearest(t, *rounding.range(t)).numpy(), layer.dequantize().T)


def test_scales_and_clipping_minimise_what_they_say(torch: ModuleType) -> None:
    from tilefuse.awq.rounding import Rounding
    from tilefuse.awq.search import EXPONENTS, SHRINKS, clipped, find_scales

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 64, generator=generator) * torch.exp(2 * torch.randn(64, generator=generator))
    w = torch.randn(24, 64, generator=generator) ** 3  # long tails, which clipping gains from
    rounding = Rounding(4, 32, False, True)
    magnitude = x.abs().mean(0)
    scales = find_scales(x, w, magnitude, rounding)

    def output_error(s: Any) -> float:
        """In float64, by quantize_linear on the scaled weights."""
        scaled = (w * s).numpy().T
        read = tf.quantize_linear(scaled, group=32, scale_dtype="float16").dequantize().T.astype(np.float64)
        return float(
            np.square(x.numpy().astype(np.float64) @ (read / s.numpy().astype(np.float64) - w.numpy()).T).sum()
        )

    errors = []
    for exponent in EXPONENTS:
        s = magnitude**exponent
        errors.append(output_error(s / (s.max() * s.min()).sqrt()))
    assert output_error(scales) == pytest.approx(min(errors), rel=1e-3)
    assert min(errors) < 0.7 * errors[0]  # scaling is worth something here

    cut = clipped(x, w, rounding)
    for n in range(0, 24, 7):
        for group in range(2):
            part = slice(group * 32, group * 32 + 32)
            inputs = x[:, part].double().numpy()

            def error_of(weights: Any, inputs: Any = inputs, n: int = n, part: slice = part) -> float:
                read = tf.quantize_linear(weights[:, None], group=32, scale_dtype="float16").dequantize()[:, 0]
                return float(np.square(inputs @ (read - w[n, part].numpy().astype(np.float64))).sum())

            original = w[n, part].numpy()
            tried = [
                error_of(
                    np.clip(original, min(original.min(), 0) * np.float32(f), max(original.max(), 0) * np.float32(f))
                )
                for f in SHRINKS
            ]
            assert error_of(cut[n, part].numpy()) == pytest.approx(min(tried), rel=1e-3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {kind: tiny_models.save(tiny_models.make_model(kind), root / kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_streaming_is_the_model(kind: str, sources: dict[str, Path], torch: ModuleType) -> None:
    from transformers import AutoModelForCausalLM

    from tilefuse.awq.text import rows

    model = AutoModelForCausalLM.from_pretrained(sources[kind], dtype=torch.float32)
    ids = rows(sources[kind], TEXT)
    assert ids.shape[1] == 512
    found = model(ids).logits[:, :-1].double().log_softmax(-1).gather(-1, ids[:, 1:, None]).mean()
    measured = perplexity(sources[kind], TEXT)
    # The mean of logarithms of float32 logits: 1e-5 is 170 roundings of their size.
    assert np.log(measured.value) == pytest.approx(-float(found), rel=1e-5)
    assert measured.tokens == ids[:, 1:].numel()


def noisy(model: Any, bits: int, group: int) -> Any:
    """A copy whose linear weights are off by a random part of the step of their group, from -1/2 to 1/2."""
    import torch

    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for block in other.model.layers:
        for name in LINEARS:
            weight = block.get_submodule(name).weight.data
            groups = weight.reshape(weight.shape[0], -1, group)
            if bits == 4:
                step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
            else:
                step = 2 * groups.abs().amax(-1, keepdim=True) / 255
            weight += ((torch.rand(groups.shape, generator=generator) - 0.5) * step).reshape(weight.shape)
    return other


@pytest.mark.parametrize(("kind", "bits"), [*((kind, 4) for kind in KINDS), ("qwen2", 8), ("gemma3_text", 8)])
def test_every_family(kind: str, bits: int, sources: dict[str, Path], tmp_path: Path, torch: ModuleType) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, out = sources[kind], tmp_path / "out"
    done = quantize_checkpoint(source, out, Options(bits=bits, group=32, calibration=TEXT))
    assert done.layers == 14
    assert list(tmp_path.iterdir()) == [out]
    AutoTokenizer.from_pretrained(out)
    checkpoint = tf.open_checkpoint(out)
    assert {info.bits for info in checkpoint.linears() if info.quantized} == {bits}
    settings = tiny_models.read_config(out)["quantization_config"]
    assert settings["quant_method"] == ("awq" if bits == 4 else "compressed-tensors")

    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.randint(4, 64, (2, 96), generator=torch.Generator().manual_seed(0))
    before = original(ids).logits
    error = float((dequantized(out)(ids).logits - before).norm())
    noise = float((noisy(original, bits, 32)(ids).logits - before).norm())
    # Rounding is noise of that size, which the search can only make less harmful on its text; half as much again for
    # another text and other noise. A fold by the wrong rule changes logits by all of their size.
    assert 0 < error <= 1.5 * noise, (error, noise)


@pytest.mark.parametrize("group", [32, -1])
def test_transformers_reads_eight_bits(group: int, sources: dict[str, Path], tmp_path: Path, torch: ModuleType) -> None:
    pytest.importorskip("compressed_tensors", reason="the [peers] extra is not installed")
    from transformers import AutoModelForCausalLM

    from tilefuse import hf

    out = tmp_path / "out"
    quantize_checkpoint(sources["llama"], out, Options(bits=8, group=group, method="rtn"))
    ids = torch.randint(4, 64, (1, 32), generator=torch.Generator().manual_seed(0))
    hf.unregister()
    try:
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(ids).logits
    finally:
        hf.register()
    ours = dequantized(out)(ids).logits
    # Two float32 computations of one model.
    assert torch.allclose(theirs, ours, rtol=0, atol=1e-4 * float(ours.abs().max()))


def test_awq_is_better_than_rounding(sources: dict[str, Path], tmp_path: Path, torch: ModuleType) -> None:
    from transformers import AutoModelForCausalLM

    source = sources["llama"]
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.randint(4, 64, (4, 64), generator=torch.Generator().manual_seed(2))
    before = original(ids).logits
    errors = {}
    for method in ("awq", "rtn"):
        quantize_checkpoint(source, tmp_path / method, Options(group=32, method=method, calibration=TEXT))  # type: ignore[arg-type]
        errors[method] = float((dequantized(tmp_path / method)(ids).logits - before).norm())
    assert errors["awq"] < errors["rtn"]


def test_an_interrupted_run_goes_on(sources: dict[str, Path], tmp_path: Path) -> None:
    options = Options(group=32, calibration=TEXT)
    whole = quantize_checkpoint(sources["qwen2"], tmp_path / "whole", options)
    assert whole.resumed == 0

    def stop(what: str, done: int, total: int) -> None:
        if what == "quantising" and done == 1:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(sources["qwen2"], out, options, progress=stop)
    assert not out.exists()
    other = quantize_checkpoint(sources["qwen2"], out, Options(group=64, method="rtn"))
    assert other.resumed == 0  # other options: what is there counts for nothing
    shutil.rmtree(out)

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(sources["qwen2"], out, options, progress=stop)
    again = quantize_checkpoint(sources["qwen2"], out, options)
    assert again.resumed == 1
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert not (tmp_path / "out.partial").exists()


def test_shards_and_files(tmp_path: Path) -> None:
    source = tiny_models.save(tiny_models.make_model("llama"), tmp_path / "source", max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    (source / "LICENSE").write_text("as you like")
    (source / "pytorch_model.bin").write_bytes(b"weights of another kind")
    out = tmp_path / "out"
    quantize_checkpoint(source, out, Options(group=64, method="rtn", shard_bytes=40_000))
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 1
    found: dict[str, Any] = {}
    for file in files:
        found |= safetensors.numpy.load_file(file) if file.stat().st_size else {}
    assert not {name for name in found if name.endswith("proj.weight")}
    assert sum(name.endswith(".qweight") for name in found) == 14
    assert (out / "LICENSE").read_text() == "as you like"
    assert not (out / "pytorch_model.bin").exists()
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert dequantized(out) is not None


def test_what_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(QuantizationError, match=r"q_proj.*K = 64.*take a group size of 64"):
        quantize_checkpoint(sources["llama"], out, Options(group=128))
    with pytest.raises(QuantizationError, match="group = 48"):
        Options(group=48)
    with pytest.raises(QuantizationError, match="group = -1: with 4 bits"):
        Options(group=-1)
    with pytest.raises(QuantizationError, match="bits = 3"):
        Options(bits=3)
    with pytest.raises(QuantizationError, match="'awq' and 'rtn'"):
        Options(method="gptq")  # type: ignore[arg-type]
    quantize_checkpoint(sources["llama"], tmp_path / "done", Options(group=32, method="rtn"))
    with pytest.raises(UnsupportedFormatError, match="quantised already"):
        quantize_checkpoint(tmp_path / "done", out, Options(group=32))
    with pytest.raises(FileExistsError, match="not an empty directory"):
        quantize_checkpoint(sources["llama"], tmp_path / "done", Options(group=32))
    with pytest.raises(FormatError, match="at least 2"):
        quantize_checkpoint(sources["llama"], out, Options(group=32, calibration="a"))
    with pytest.raises(UnsupportedFormatError, match="device = 'nowhere'"):
        quantize_checkpoint(sources["llama"], out, Options(group=32, device="nowhere"))
    assert not out.exists()


def test_command(sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    options = ["--group", "32", "--calibration", str(tmp_path / "text")]
    report = ["--report", "--text", str(tmp_path / "text")]
    assert commands.run(["quantize", str(sources["llama"]), str(tmp_path / "out"), *options, *report]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "14 layers" in lines[0]
    assert "perplexity" in lines[1]
    before = perplexity(sources["llama"], TEXT)
    assert f"on {before.tokens} tokens: before {before.value:.4f}, after " in lines[1]
    assert commands.run(["quantize", str(sources["llama"]), str(tmp_path / "out")]) == 1
    assert "exists" in capsys.readouterr().err
