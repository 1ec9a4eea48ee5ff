"""Loading: what is registered, which files and layers, the cache of packed weights, memory, refusals."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from checkpoints import KINDS

torch = pytest.importorskip("torch", reason="the [hf] extra is not installed")
transformers = pytest.importorskip("transformers", reason="the [hf] extra is not installed")

import language_models  # noqa: E402
from test_hf_models import EXACT, close, logits_of  # noqa: E402

import tilefuse.hf  # noqa: E402
from tilefuse import packcache  # noqa: E402
from tilefuse.errors import FormatError, LayoutError, TileFuseError, UnsupportedFormatError  # noqa: E402
from tilefuse.hf import FusedLinear, TileFuseLinear  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.usefixtures("cache"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]


def load(path: Path, **more: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **{"dtype": torch.float32, **more})


def packed(model: Any) -> dict[str, TileFuseLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, TileFuseLinear)}


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# --- what is loaded ---------------------------------------------------------------------------------------------------


def test_none_of_the_formats_software_is_needed(tmp_path: Path, rng: np.random.Generator) -> None:
    """In a process where importing it fails, and no model class is changed."""
    for kind in ("awq-gemm", "gptq", "ct-w4"):
        language_models.make(tmp_path / kind, "llama", KINDS[kind], rng)
    program = """
        import importlib.abc, sys
        class Missing(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("compressed_tensors", "gptqmodel", "awq", "auto_gptq", "optimum"):
                    raise ModuleNotFoundError(name)
        sys.meta_path.insert(0, Missing())
        import torch, transformers
        from transformers.models.llama import modeling_llama
        def methods():
            classes = {name: item for name, item in vars(modeling_llama).items() if isinstance(item, type)}
            return {(name, key): id(value) for name, item in classes.items() for key, value in vars(item).items()
                    if callable(value) and key != "__doc__"}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=1, hidden_size=8, intermediate_size=8,
            num_attention_heads=1, vocab_size=8))
        before = methods()
        import tilefuse.hf
        for kind in ("awq-gemm", "gptq", "ct-w4"):
            model = transformers.AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{kind}", dtype=torch.bfloat16)
            assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
            assert sum(isinstance(m, tilefuse.hf.TileFuseLinear) for m in model.modules()) == 8
        assert methods() == before
    """
    environment = {**os.environ, "TILEFUSE_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True, env=environment)


def test_sharded(tmp_path: Path, rng: np.random.Generator) -> None:
    expected = language_models.make(tmp_path / "model", "qwen2", KINDS["awq-gemm"], rng, shards=3)
    with tilefuse.hf.options(device="reference"):
        close(logits_of(load(tmp_path / "model")), logits_of(expected), *EXACT)


@pytest.mark.parametrize("kind", ["awq-gemm", "gptq-act-order", "ct-w8-channel"])
def test_fused_equals_unfused(kind: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The same products: each output channel is summed on its own."""
    language_models.make(tmp_path / "model", "qwen2", KINDS[kind], rng)
    fused = load(tmp_path / "model")
    with tilefuse.hf.options(fuse=False):
        single = load(tmp_path / "model")
    assert (len(packed(fused)), len(packed(single))) == (8, 14)
    assert not any(isinstance(module, FusedLinear) for module in single.modules())
    np.testing.assert_array_equal(logits_of(fused), logits_of(single))


def test_layers_that_differ_are_not_fused(tmp_path: Path, rng: np.random.Generator) -> None:
    """An activation order of its own for v_proj; gate_proj left in 16 bits."""
    expected = language_models.make(tmp_path / "model", "llama", KINDS["gptq-act-order"], rng)
    import safetensors.numpy

    file = tmp_path / "model" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "model.layers.0.self_attn.v_proj"
    other = np.roll(tensors[f"{name}.g_idx"], 1)
    tensors[f"{name}.g_idx"] = other
    gate = "model.layers.1.mlp.gate_proj"
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{gate}.{suffix}"]
    weight = dict(expected.named_modules())[gate].weight.detach().numpy().astype(np.float16)
    tensors[f"{gate}.weight"] = weight
    checkpoints.save_file(file, tensors)
    model = load(tmp_path / "model")
    names = set(packed(model))
    assert "model.layers.0.self_attn.v_proj" in names
    assert "model.layers.1.self_attn.qkv_proj" in names
    assert "model.layers.1.mlp.up_proj" in names
    assert type(model.get_submodule(gate)) is torch.nn.Linear
    np.testing.assert_array_equal(model.get_submodule(gate).weight.detach().numpy(), weight)
    source = tilefuse.open_checkpoint(tmp_path / "model").linear(name)
    np.testing.assert_array_equal(model.get_submodule(name).layer.perm, source.perm)


def test_generates_what_plain_transformers_does(tmp_path: Path, rng: np.random.Generator) -> None:
    """Greedy tokens, one at a time and with the prompt in parts."""
    expected = language_models.make(tmp_path / "model", "qwen3", KINDS["awq-gemm"], rng)
    with tilefuse.hf.options(device="reference"):
        model = load(tmp_path / "model")
    ids = torch.tensor([[1, 17, 93, 4, 60, 31, 8]])
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    theirs = expected.generate(ids, **settings)
    assert torch.equal(model.generate(ids, **settings), theirs)
    assert torch.equal(model.generate(ids, prefill_chunk_size=3, **settings), theirs)


def test_heads(tmp_path: Path, rng: np.random.Generator) -> None:
    """A quantised output head runs on tilefuse; one beside a tied embedding is what transformers leaves out."""
    for tied in (False, True):
        path = tmp_path / f"tied-{tied}"
        expected = language_models.make(path, "smollm" if tied else "llama", KINDS["awq-gemm"], rng)
        truth = KINDS["awq-gemm"].truth(rng, language_models.HIDDEN, language_models.VOCABULARY, bias=False)
        import safetensors.numpy

        tensors = safetensors.numpy.load_file(path / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        checkpoints.save_file(
            path / "model.safetensors", tensors | checkpoints.named("lm_head", checkpoints.awq_gemm(truth))
        )
        with tilefuse.hf.options(device="reference"):
            model, info = load(path, output_loading_info=True)
        assert not info["missing_keys"]
        assert isinstance(model.lm_head, torch.nn.Linear) == tied
        if not tied:
            expected.lm_head.weight = torch.nn.Parameter(torch.from_numpy(truth.weights().T.astype(np.float32)))
            narrow = truth.scales.astype("bfloat16").astype(np.float64)[truth.group_of]
            weights = (truth.codes.astype(np.float64) - truth.zeros[truth.group_of]) * narrow
            expected.lm_head.weight.data = torch.from_numpy(weights.astype("bfloat16").astype(np.float32).T.copy())
        close(logits_of(model), logits_of(expected), *EXACT)


@pytest.mark.parametrize("architecture", ["llama", "smollm", "gemma2"])
def test_heads_of_8_bits(architecture: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Half a scale off at most, each weight; the second start maps it; a tied embedding is what it was."""
    language_models.make(tmp_path / "model", architecture, KINDS["awq-gemm"], rng)
    plain = load(tmp_path / "model")
    weights = plain.lm_head.weight.detach().numpy()
    for _ in range(2):
        with tilefuse.hf.options(head=8):
            model, info = load(tmp_path / "model", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        layer = model.lm_head.layer
        assert (layer.layout.bits, layer.layout.group) == (8, 64)
        # At most half a scale, and where scales were rounded down to bfloat16, 127 2^-8 of one at the largest weight;
        # and 2^-9 of the weight, which comes back in bfloat16.
        error = np.abs(layer.dequantize().astype(np.float32).T - weights)
        scale = np.abs(weights).max(1, keepdims=True) / 127
        assert (error <= scale * 1.0 + 2.0**-9 * np.abs(weights)).all()
        assert torch.equal(model.get_input_embeddings().weight, plain.get_input_embeddings().weight)
        assert len(packed(model)) == 4 * language_models.LAYERS + 1
        ids = torch.tensor([[1, 17, 93]])
        assert model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None).shape == (1, 6)
    with pytest.raises(TileFuseError, match="head is 4"), tilefuse.hf.options(head=4):
        pass


def test_registry_is_given_back() -> None:
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    assert AUTO_QUANTIZER_MAPPING["awq"] is tilefuse.hf.TileFuseQuantizer
    tilefuse.hf.unregister()
    try:
        assert {AUTO_QUANTIZER_MAPPING[name].__name__ for name in ("awq", "gptq", "compressed-tensors")} == {
            "AwqQuantizer",
            "GptqHfQuantizer",
            "CompressedTensorsHfQuantizer",
        }
        tilefuse.hf.unregister()
    finally:
        tilefuse.hf.register()
    assert AUTO_QUANTIZER_MAPPING["gptq"] is tilefuse.hf.TileFuseQuantizer


def test_saving_is_refused_and_the_configuration_kept(tmp_path: Path, rng: np.random.Generator) -> None:
    language_models.make(tmp_path / "model", "llama", KINDS["ct-w4"], rng)
    model = load(tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    assert model.config.to_dict()["quantization_config"] == settings
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "again")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_formats_that_are_not_read(tmp_path: Path, rng: np.random.Generator) -> None:
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    edit(tmp_path / "model", quantization_config=checkpoints.awq_config(4, 32, version="marlin"))
    with pytest.raises(UnsupportedFormatError, match="marlin"):
        load(tmp_path / "model")
    edit(tmp_path / "model", quantization_config=checkpoints.awq_config(3, 32))
    with pytest.raises(UnsupportedFormatError, match="3"):
        load(tmp_path / "model")


def test_another_models_configuration(tmp_path: Path, rng: np.random.Generator) -> None:
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    edit(tmp_path / "model", intermediate_size=192)
    with pytest.raises(FormatError, match=r"128 inputs and 64 outputs in the files, and the model's has 192 and 64"):
        load(tmp_path / "model")


def test_experts_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    """Layers that the architecture holds as one tensor."""
    config = transformers.MixtralConfig(
        **{**language_models._COMMON, "num_local_experts": 2, "num_experts_per_tok": 1, "tie_word_embeddings": False}
    )
    truth = KINDS["awq-gemm"].truth(rng, 64, 64, bias=False)
    names = ("self_attn.q_proj", "block_sparse_moe.experts.0.w1")
    tensors: dict[str, Any] = {}
    for name in names:
        tensors |= checkpoints.named(f"model.layers.0.{name}", checkpoints.awq_gemm(truth))
    checkpoints.save(
        tmp_path / "model", tensors, KINDS["awq-gemm"].quantization, **json.loads(config.to_json_string(False))
    )
    with pytest.raises(UnsupportedFormatError, match=r"experts.0.w1.*MixtralForCausalLM.*experts.*unregister"):
        load(tmp_path / "model")


def test_fallback_only_when_asked(tmp_path: Path, rng: np.random.Generator) -> None:
    """Groups of 16 fit no tile."""
    expected = language_models.make(tmp_path / "model", "qwen2", _group16(), rng)
    with pytest.raises(LayoutError, match=r"group.*fallback='dequantize'"):
        load(tmp_path / "model")
    with tilefuse.hf.options(fallback="dequantize"):
        model = load(tmp_path / "model")
    assert not packed(model)
    # Weights here are (q - z) s in float32, those of the other rounded to bfloat16, 2^-9 of each.
    close(logits_of(model), logits_of(expected), 2.0**-3, 2.0**-7)
    with pytest.raises(TileFuseError, match="fallback is 'torch'"), tilefuse.hf.options(fallback="torch"):
        pass
    with pytest.raises(TileFuseError, match="option 'cach'"), tilefuse.hf.options(cach="off"):
        pass


def _group16() -> checkpoints.Kind:
    kind = KINDS["awq-gemm"]
    return checkpoints.Kind(kind.encode, kind.config, {**kind.options, "group": 16})


def test_devices(tmp_path: Path, rng: np.random.Generator) -> None:
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    with tilefuse.hf.options(device="auto"):
        model = load(tmp_path / "model")
    logits_of(model)
    assert set(tilefuse.hf.phases_of(model).calls) <= {("prefill", "cpu"), ("prefill", "auto")}
    with pytest.raises(TileFuseError, match="device is 'gpu'"):
        tilefuse.hf.set_device(model, "gpu")
    with pytest.raises(TileFuseError, match="no layers of tilefuse"):
        tilefuse.hf.phases_of(torch.nn.Linear(1, 1))


# --- the cache --------------------------------------------------------------------------------------------------------


def age(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes files look as if they had been there for a while."""
    monkeypatch.setattr(packcache, "SETTLED", -1.0)


def kept(cache: Path) -> dict[str, int]:
    return {file.name: file.stat().st_ino for file in cache.iterdir()}


def test_second_start_maps(
    tmp_path: Path, cache: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    age(tmp_path, monkeypatch)
    seen: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        assert 0 <= done <= total
        seen.append(what)

    with tilefuse.hf.options(progress=progress):
        first = load(tmp_path / "model")
        assert set(seen) == {"reading", "validating", "packing"}
        files = kept(cache)
        assert sorted(Path(name).suffix for name in files) == [".contents", ".sha256", ".tilefuse"]
        seen.clear()
        second = load(tmp_path / "model")
    assert not seen
    assert kept(cache) == files
    np.testing.assert_array_equal(logits_of(first), logits_of(second))
    for layer in packed(second).values():
        assert not layer.layer.data.flags.writeable  # mapped


def test_other_contents_are_packed_anew(
    tmp_path: Path, cache: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same name, size, header and times; a copy of the folder, on the other hand, has the same contents."""
    path = tmp_path / "model"
    language_models.make(path, "llama", KINDS["awq-gemm"], rng)
    age(tmp_path, monkeypatch)
    load(path)
    before = kept(cache)
    file = path / "model.safetensors"
    status, data = file.stat(), bytearray(file.read_bytes())
    data[-8] ^= 0x10
    with file.open("r+b") as stream:
        stream.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    load(path)
    after = kept(cache)
    assert len([name for name in after if name.endswith(".tilefuse")]) == 2
    assert before.items() <= after.items()
    import shutil

    shutil.copytree(path, tmp_path / "copy" / "model")
    load(tmp_path / "copy" / "model")
    assert len([name for name in kept(cache) if name.endswith(".tilefuse")]) == 2
    # How the layers are packed is part of the key.
    with tilefuse.hf.options(fuse=False):
        load(path)
    assert len([name for name in kept(cache) if name.endswith(".tilefuse")]) == 3


def test_files_that_have_just_changed_are_hashed_each_time(
    tmp_path: Path, cache: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    monkeypatch.setattr(packcache, "SETTLED", 3600.0)
    load(tmp_path / "model")
    assert sorted(Path(name).suffix for name in kept(cache)) == [".sha256", ".tilefuse"]


@pytest.mark.parametrize("damage", ["truncated", "another", "garbage", "order", "tiles", "voucher"])
def test_damaged_files_are_made_anew(
    damage: str, tmp_path: Path, cache: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    language_models.make(tmp_path / "model", "llama", KINDS["gptq-act-order"], rng)
    expected = logits_of(load(tmp_path / "model"))
    (file,) = cache.glob("*.tilefuse")
    good = file.read_bytes()
    if damage == "another":
        tilefuse.save(file, dict(tilefuse.load(file)))
    elif damage == "order":
        file.write_bytes(good[:-8] + bytes(8))  # the last tensor is a permutation
    elif damage == "tiles":  # as well-formed as before
        file.write_bytes(good[:8192] + bytes(4096) + good[12288:])
    elif damage == "voucher":
        file.with_suffix(".sha256").write_text("[1]")
    else:
        file.write_bytes(good[:-100] if damage == "truncated" else b"\0" * 100)
    with caplog.at_level(logging.WARNING, "tilefuse"):
        np.testing.assert_array_equal(logits_of(load(tmp_path / "model")), expected)
    assert "packed again" in caplog.text
    assert file.read_bytes() == good


def test_a_cache_that_was_copied_is_read_once_more(
    tmp_path: Path, cache: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    expected = logits_of(load(tmp_path / "model"))
    (file,) = cache.glob("*.tilefuse")
    file.write_bytes(file.read_bytes())
    seen: list[str] = []
    watched = tilefuse.hf.options(progress=lambda what, done, total: seen.append(what))
    with caplog.at_level(logging.WARNING, "tilefuse"), watched:
        np.testing.assert_array_equal(logits_of(load(tmp_path / "model")), expected)
    assert "packing" not in seen
    assert not caplog.text


def test_folders(tmp_path: Path, cache: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model"
    language_models.make(path, "llama", KINDS["awq-gemm"], rng)
    with tilefuse.hf.options(cache="off"):
        load(path)
    assert not cache.exists()
    with tilefuse.hf.options(cache="beside"):
        load(path)
        load(path)
    assert list((path / ".tilefuse").glob("*.tilefuse"))
    with tilefuse.hf.options(cache=tmp_path / "own" / "folder"):
        load(path)
    assert list((tmp_path / "own" / "folder").glob("*.tilefuse"))
    (tmp_path / "file").write_text("")
    with tilefuse.hf.options(cache=tmp_path / "file" / "below"), caplog.at_level(logging.WARNING, "tilefuse"):
        logits_of(load(path))
    assert "not kept" in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))


# --- memory -----------------------------------------------------------------------------------------------------------

PROBE = """
import sys, threading, time
import torch, transformers
import tilefuse.hf
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.bfloat16)  # imports, threads
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
before = most = anonymous()
done = False
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.0005)
thread = threading.Thread(target=watch); thread.start()
with tilefuse.hf.options(cache=sys.argv[3] if sys.argv[3] == "off" else __import__("pathlib").Path(sys.argv[3])):
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
most = max(most, anonymous())
done = True; thread.join()
layers = [m.layer for m in model.modules() if isinstance(m, tilefuse.hf.TileFuseLinear)]
others = sum(p.numel() * p.element_size() for p in model.parameters())
print(most - before, sum(layer.nbytes for layer in layers), max(layer.nbytes for layer in layers), others)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("cached", [False, True])
def test_peak_memory(cached: bool, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private memory while loading: the packed tiles and one layer being packed; with a cache the one layer alone."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 96}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**{**language_models._COMMON, **sizes, **heads})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tensors: dict[str, Any] = {
        name: np.ones(tuple(tensor.shape), np.float16)
        for name, tensor in model.state_dict().items()
        if "proj" not in name
    }
    for name, module in language_models.linears(model):
        k, n = module.in_features, module.out_features
        words = rng.integers(-(2**31), 2**31, (k + k // 128, n // 8)).astype(np.int32)
        tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"] = words[:k].copy(), words[k:].copy()
        tensors[f"{name}.scales"] = np.full((k // 128, n), 0.01, np.float16)
    tensors.pop("lm_head.weight")
    settings = checkpoints.awq_config(4, 128)
    checkpoints.save(tmp_path / "model", tensors, settings, **json.loads(config.to_json_string(False)))
    language_models.make(tmp_path / "small", "llama", KINDS["awq-gemm"], rng)
    where = str(tmp_path / "cache") if cached else "off"
    result = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path / "model"), str(tmp_path / "small"), where],
        check=True,
        capture_output=True,
        text=True,
    )
    peak, tiles, largest, others = map(int, result.stdout.split())
    assert tiles > 30e6
    # A fused layer's codes are copied together (as large as its tiles), packed beside that; the rest is Python's.
    allowed = (0 if cached else tiles) + 2 * largest + others + 12e6
    print(f"peak {peak / 1e6:.1f} MB of {allowed / 1e6:.1f}; tiles {tiles / 1e6:.1f} MB, largest {largest / 1e6:.1f}")
    assert peak <= allowed
