"""All blocks of a model in one call, and the loop around it, against the same block by block and transformers' loop."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS

torch = pytest.importorskip("torch", reason="the [hf] extra is not installed")
transformers = pytest.importorskip("transformers", reason="the [hf] extra is not installed")

import language_models  # noqa: E402

import tilefuse as tf  # noqa: E402
import tilefuse.hf  # noqa: E402
from tilefuse.hf import decode, rooms  # noqa: E402
from tilefuse.hf.generation import Loaded, generate  # noqa: E402
from tilefuse.hf.sequence import Sequence  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.usefixtures("cache"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

PROMPT = [5, 17, 93, 4, 60]
NEXT = [31, 8, 44, 71, 12, 9]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call of a model's short way, whether it was taken."""
    found: list[bool] = []
    step = decode.ModelForward._step

    def counted(self: Any, given: Any) -> Any:
        y = step(self, given)
        found.append(y is not None)
        return y

    monkeypatch.setattr(decode.ModelForward, "_step", counted)
    return found


def load(path: Path, dtype: Any = torch.bfloat16, **options: Any) -> Any:
    with tilefuse.hf.options(device="cpu", **options):
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def logits(model: Any, tokens: list[int] = NEXT, cache: Any = None) -> Any:
    """Of tokens one by one after a prompt: [tokens, vocabulary]."""
    with torch.no_grad():
        if cache is None:
            cache = transformers.DynamicCache(config=model.config)
            model(torch.tensor([PROMPT]), past_key_values=cache)
        return torch.stack([model(torch.tensor([[t]]), past_key_values=cache).logits[0, 0] for t in tokens])


def block_by_block(model: Any) -> Any:
    """The same model without the short way of the whole; its blocks keep theirs."""
    del model.model.forward
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "smollm", "qwen2", "qwen3", "gemma"])
def test_as_block_by_block(
    architecture: str, dtype: Any, tmp_path: Path, rng: np.random.Generator, steps: list[bool]
) -> None:
    """The same bits, in the cache too."""
    language_models.make(tmp_path / "model", architecture, KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model", dtype)
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    one, other = model, block_by_block(copy.deepcopy(model))
    with torch.no_grad():
        for tokens in (PROMPT, *([token] for token in NEXT)):
            found, expected = (
                each.model(input_ids=torch.tensor([tokens]), past_key_values=cache).last_hidden_state
                for each, cache in zip((one, other), caches, strict=True)
            )
            assert torch.equal(found, expected)
    assert steps == [False] + [True] * len(NEXT)
    for a, b in zip(caches[0].layers, caches[1].layers, strict=True):
        assert a.get_seq_length() == a.keys.shape[2] == len(PROMPT) + len(NEXT)
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
    assert tilefuse.hf.phases_of(model).calls["decode", "cpu"] == 4 * language_models.LAYERS * len(NEXT)


@pytest.mark.parametrize("architecture", language_models.ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_tokens_of_the_loop(architecture: str, temperature: float, tmp_path: Path, rng: np.random.Generator) -> None:
    """Those of transformers' own, drawn from the same numbers; with and without a least number of them."""
    language_models.make(tmp_path / "model", architecture, KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model", torch.float32, head=8)
    model.generation_config.eos_token_id = list(range(2, 40))
    for least in (0, 12):
        settings: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": least, "pad_token_id": 0}
        settings |= {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        ids = torch.tensor([PROMPT])
        torch.manual_seed(7)
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        torch.manual_seed(7)
        loaded = Loaded(model, _Words(), 0.0, False, 0, 0)
        ours = generate(loaded, ids, max_new_tokens=20, min_new_tokens=least, temperature=temperature)
        assert ours.tokens == theirs[0, len(PROMPT) :].tolist()
        assert len(ours.tokens) >= max(least, 1)


class _Words:
    """A tokenizer whose words are numbers."""

    pad_token_id, eos_token_id = 0, 2

    def decode(self, tokens: list[int], **options: Any) -> str:
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("head", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "smollm", "qwen2", "qwen3", "gemma"])
def test_sequence(architecture: str, dtype: Any, head: int, tmp_path: Path, rng: np.random.Generator) -> None:
    """The logits of the model called as a module, across a room's end and that of the computed turns.

    (What its blocks give is compared with transformers' own in test_hf_blocks.)
    """
    language_models.make(tmp_path / "model", architecture, KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model", dtype, head=head)
    prompt, tokens = (rng.integers(0, model.config.vocab_size, count).tolist() for count in (100, 80))
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(torch.tensor([prompt]), past_key_values=cache)
        sequence = Sequence.of(model, caches[0])
        assert sequence is not None
        for token in tokens:
            found = sequence.logits(token)
            expected = model(torch.tensor([[token]]), past_key_values=caches[1]).logits
            assert found is not None
            assert found.shape == expected.shape
            # The last norm's sum has another order, so that its results may be a step apart, in bfloat16 or what the
            # product rounds to bfloat16: see test_hf_blocks.
            assert (found - expected).abs().max() <= 2.0**-6 * expected.abs().max()
        sequence.finish()
    for ours, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length() == 180
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
    assert tilefuse.hf.phases_of(model).calls["decode", "cpu"] == (4 * language_models.LAYERS + (head == 8)) * 160


def test_sequences_that_are_not_made(tmp_path: Path, rng: np.random.Generator) -> None:
    """Hooks, other heads, gradients and caches that can't be written in place: the model's own code is called."""
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model", torch.float32, head=8)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        assert Sequence.of(model, cache) is None  # empty
        model(torch.tensor([PROMPT]), past_key_values=cache)
        assert Sequence.of(model, cache) is not None
        for part in (model, model.model, model.model.norm, model.lm_head, model.model.layers[1].mlp):
            hook = part.register_forward_hook(lambda *args: None)
            assert Sequence.of(model, cache) is None
            hook.remove()
        assert Sequence.of(model, transformers.StaticCache(config=model.config, max_cache_len=32)) is None
        assert Sequence.of(torch.nn.Linear(2, 2), cache) is None
        sequence = Sequence.of(model, cache)
        assert sequence is not None
        assert sequence.logits(7) is not None
        with pytest.raises(IndexError):  # torch's own
            sequence.logits(10**6)
    assert Sequence.of(model, cache) is None  # gradients


def test_other_settings_of_the_loop(tmp_path: Path, rng: np.random.Generator) -> None:
    """A checkpoint's own penalties hold; beams and time limits are left to transformers."""
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model", torch.float32)
    ids = torch.tensor([PROMPT])
    for own in ({"repetition_penalty": 3.0}, {"no_repeat_ngram_size": 1}, {"num_beams": 2}, {"max_time": 1e6}):
        for name, value in own.items():
            setattr(model.generation_config, name, value)
        settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
        theirs = model.generate(ids, max_new_tokens=12, **settings)
        if "num_beams" in own:
            with pytest.raises(ValueError, match="beam"):
                generate(Loaded(model, _Words(), 0.0, False, 0, 0), ids, max_new_tokens=12)
        else:
            ours = generate(Loaded(model, _Words(), 0.0, False, 0, 0), ids, max_new_tokens=12)
            assert ours.tokens == theirs[0, len(PROMPT) :].tolist()
        for name in own:
            setattr(model.generation_config, name, None)


def test_what_steps_aside(tmp_path: Path, rng: np.random.Generator, steps: list[bool]) -> None:
    """Masks that hide, hooks, other outputs, replaced parts: as without the short way."""
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model", torch.float32)
    plain = load(tmp_path / "model", torch.float32, blocks=False)

    def taken(**given: Any) -> bool:
        found = []
        for each in (model, plain):
            cache = transformers.DynamicCache(config=model.config)
            with torch.no_grad():
                each(torch.tensor([PROMPT]), past_key_values=cache)
                steps.clear()
                found.append(each(torch.tensor([[31]]), past_key_values=cache, **given).logits[0, 0])
                if each is model:
                    was = steps[-1]
        # In bfloat16's steps of the products' inputs; see test_hf_blocks.
        assert (found[0] - found[1]).abs().max() <= 2.0**-6 * found[1].abs().max()
        return was

    ones = torch.ones(1, 6, dtype=torch.long)
    hiding = ones.clone()
    hiding[0, 1] = 0
    assert taken()
    assert taken(attention_mask=ones)
    assert taken(position_ids=torch.tensor([[9]]))
    assert not taken(attention_mask=hiding)
    hook = model.model.layers[1].register_forward_hook(lambda *args: None)
    assert not taken()
    hook.remove()
    assert taken()
    for each in (model, plain):
        weight = torch.linspace(0.5, 2, model.config.hidden_size)
        each.model.norm.weight = torch.nn.Parameter(weight, requires_grad=False)
        each.model.layers[1].input_layernorm.weight.data = weight.clone()
    assert taken()
    for each in (model, plain):
        each.model.norm.weight.data = weight.double().to(torch.float16).to(torch.bfloat16).to(torch.float32)
        del each.model.layers[1]
        each.config.num_hidden_layers = 1
    assert not taken()
    assert not taken(output_hidden_states=True)


def test_copies_of_a_model(tmp_path: Path, rng: np.random.Generator, steps: list[bool]) -> None:
    language_models.make(tmp_path / "model", "qwen2", KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model")
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.model.forward.model is other.model
        steps.clear()
        assert torch.equal(logits(other), expected)
        assert all(steps[1:])


def test_rooms() -> None:
    """What a layer shows is what an ordinary one holds, however it is copied, cropped and continued."""
    rng = np.random.default_rng(5)

    def tokens(count: int) -> Any:
        return torch.from_numpy(rng.standard_normal((2, 1, 3, count, 16)))

    def append(layer: Any, token: Any) -> None:
        length = rooms.length_of(layer, 3, 16, torch.float64)
        room = rooms.room_of(layer, length)
        room.keys[:, :, length : length + 1], room.values[:, :, length : length + 1] = token
        room.grow(layer, length + 1)

    layer = transformers.cache_utils.DynamicLayer()
    first = tokens(7)
    layer.update(*first)
    new = [tokens(1) for _ in range(200)]
    for token in new:
        append(layer, token)
    whole = torch.cat([first, *new], dim=3)
    assert torch.equal(torch.stack([layer.keys, layer.values]), whole)
    assert layer.get_seq_length() == 207
    twins = [copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer]
    ends = [tokens(1) for _ in twins]
    for twin, end in zip(twins, ends, strict=True):
        append(twin, end)
    for twin, end in zip(twins, ends, strict=True):
        assert torch.equal(torch.stack([twin.keys, twin.values]), torch.cat([whole, end], dim=3))
    layer.crop(-100)
    assert type(layer) is transformers.cache_utils.DynamicLayer
    append(layer, ends[0])
    assert torch.equal(torch.stack([layer.keys, layer.values]), torch.cat([whole[:, :, :, :108], ends[0]], dim=3))
    layer.update(*first)
    assert torch.equal(layer.keys[:, :, -7:], first[0])
    assert rooms.length_of(layer, 3, 32, torch.float64) == rooms.length_of(layer, 3, 16, torch.float32) == -1
    layer.reset()
    assert layer.get_seq_length() == 0


def test_refusals_of_the_core() -> None:
    layer = tf.pack(tf.quantize_linear(np.ones((64, 128), np.float32), bits=8, group=64))
    square = tf.pack(tf.quantize_linear(np.ones((64, 64), np.float32), bits=8, group=64))
    native = [tf.runtime.cpu.native_call(each) for each in (layer, square)]
    block = tf._core.DecoderBlock(native[0], native[1], native[0], native[1], 2, 1, 32, 1.0, [0.0] * 4, False, 0)
    with pytest.raises(ValueError, match="no blocks"):
        tf._core.DecoderBlocks(())
    blocks = tf._core.DecoderBlocks((block,))
    with pytest.raises(ValueError, match="shape"):
        blocks.step(0, 0, np.zeros((2, 7), np.uint64), 0, 0, 0, 0)
    with pytest.raises(ValueError, match="full"):
        blocks.step(0, 0, np.zeros((1, 7), np.uint64), 0, 0, 0, 0)
    with pytest.raises(ValueError, match="full"):
        blocks.step_to_end(0, 0, np.zeros((1, 7), np.uint64), 0, 0, 0, 0, 0.0, False, None, 0)
    room = np.full((1, 7), 4, np.uint64)
    wide = tf.runtime.cpu.native_call(tf.pack(tf.quantize_linear(np.ones((192, 64), np.float32), bits=8, group=64)))
    with pytest.raises(ValueError, match="another width"):
        blocks.step_to_end(0, 0, room, 0, 0, 0, 0, 0.0, False, wide, 0)
