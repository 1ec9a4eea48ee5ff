"""Decoder blocks in one call, against transformers' own code around the same products."""

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
from tilefuse.hf import rooms  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.usefixtures("cache"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]

SHORT = ("llama", "smollm", "qwen2", "qwen3", "gemma")
"""Architectures whose blocks have the short way. (Mistral's too, without a sliding window.)"""

PROMPT = [5, 17, 93, 4, 60]
NEXT = [31, 8, 44, 71, 12, 9]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that the caches were grown to by the short way."""
    found: list[int] = []
    grow = rooms.Room.grow

    def counted(self: Any, layer: Any, length: int) -> None:
        found.append(length)
        grow(self, layer, length)

    monkeypatch.setattr(rooms.Room, "grow", counted)
    return found


def load(path: Path, dtype: Any = torch.float32, **options: Any) -> Any:
    with tilefuse.hf.options(device="cpu", **options):
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def logits(model: Any, tokens: list[int] = NEXT, cache: Any = None) -> Any:
    """Of a prompt at once, then of tokens one by one: [tokens, vocabulary]."""
    rows = []
    with torch.no_grad():
        if cache is None:
            cache = transformers.DynamicCache(config=model.config)
            model(torch.tensor([PROMPT]), past_key_values=cache)
        for token in tokens:
            rows.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, 0].float())
    return torch.stack(rows)


def close(ours: Any, theirs: Any, bounds: tuple[float, float]) -> None:
    """Compares logits; bounds, of the largest error and of the mean one, are shares of the largest logit."""
    error, largest = (ours - theirs).abs(), theirs.abs().max()
    assert error.max() <= bounds[0] * largest
    assert error.mean() <= bounds[1] * largest


# Sums in another order round differently now and then. That moves an input of a product, in bfloat16 whatever the
# dtype, by 2^-8 of itself, at one of 64 and more, and what follows amplifies it; more often where all is bfloat16.
UNITS = {
    torch.float32: (2.0**-6, 2.0**-9),
    torch.float16: (2.0**-6, 2.0**-9),
    torch.bfloat16: (2.0**-5, 2.0**-7),
}


@pytest.mark.parametrize("dtype", UNITS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("architecture", SHORT)
def test_as_transformers(
    architecture: str, dtype: Any, tmp_path: Path, rng: np.random.Generator, steps: list[int]
) -> None:
    language_models.make(tmp_path / "model", architecture, KINDS["awq-gemm"], rng)
    expected = logits(load(tmp_path / "model", dtype, blocks=False))
    assert not steps
    model = load(tmp_path / "model", dtype)
    found = logits(model)
    assert steps == [len(PROMPT) + 1 + i for i in range(len(NEXT)) for _ in range(language_models.LAYERS)]
    close(found, expected, UNITS[dtype])
    assert tilefuse.hf.phases_of(model).calls["decode", "cpu"] == 4 * language_models.LAYERS * len(NEXT)


def test_levels(cpu_level: str, tmp_path: Path, rng: np.random.Generator, steps: list[int]) -> None:
    """Each instruction set, an activation order, a cache long enough for threads."""
    language_models.make(tmp_path / "model", "qwen3", KINDS["gptq-act-order"], rng)
    ids = torch.from_numpy(rng.integers(4, 96, (1, 1100)))
    found = []
    for short in (True, False):
        model = load(tmp_path / "model", blocks=short)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        found.append(logits(model, NEXT, cache))
        assert len(steps) == len(NEXT) * language_models.LAYERS
    close(found[0], found[1], UNITS[torch.float32])


def test_generation(tmp_path: Path, rng: np.random.Generator, steps: list[int]) -> None:
    """Greedy tokens past the room that a cache starts with; in inference mode; with a mask that shows everything."""
    language_models.make(tmp_path / "model", "smollm", KINDS["ct-w8"], rng)
    ids = torch.tensor([PROMPT])
    settings = {"max_new_tokens": 120, "do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    theirs = load(tmp_path / "model", blocks=False).generate(ids, **settings)
    model = load(tmp_path / "model")
    assert torch.equal(model.generate(ids, **settings), theirs)
    assert max(steps) == len(PROMPT) + 119
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, **settings), theirs)


def test_caches_that_are_copied_and_cropped(tmp_path: Path, rng: np.random.Generator, steps: list[int]) -> None:
    """Two continuations of one prompt don't write into each other; what was cropped is gone."""
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([PROMPT]), past_key_values=cache)
    first = logits(model, NEXT[:2], cache)
    deep, shallow = copy.deepcopy(cache), copy.copy(cache)
    shallow.layers = [copy.copy(layer) for layer in cache.layers]
    rest = NEXT[2:]
    other = [90, 91, 92, 20]
    logits(model, other, cache)
    expected = logits(load(tmp_path / "model", blocks=False))
    for each in (deep, shallow):
        close(torch.cat([first, logits(model, rest, each)]), expected, UNITS[torch.float32])
    cache.crop(-len(other))
    close(logits(model, rest, cache), expected[2:], UNITS[torch.float32])
    assert len(steps) == language_models.LAYERS * (2 + 4 * len(rest))


def test_what_takes_the_long_way(tmp_path: Path, rng: np.random.Generator, steps: list[int]) -> None:
    """Batches, several tokens, other caches, autocast, hooks, gradients, other devices, replaced parts, other sizes."""
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model")
    ids = torch.tensor([PROMPT + NEXT])
    with torch.no_grad():
        whole = model(ids).logits[0]
        model(torch.tensor([PROMPT, PROMPT]), use_cache=True)
        static = transformers.StaticCache(config=model.config, max_cache_len=32)
        for i, token in enumerate(ids[0]):
            one = model(token.reshape(1, 1), past_key_values=static).logits[0, 0]
            close(one, whole[i], UNITS[torch.float32])
        model(torch.tensor([[5]]), use_cache=False)
        with torch.autocast("cpu"):
            logits(model, NEXT[:1])
    seen: list[Any] = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(args))
    model.model.layers[1].mlp.register_forward_hook(lambda *args: seen.append(args))
    logits(model, NEXT[:1])
    hook.remove()
    assert len(seen) == 4
    assert not steps
    tilefuse.hf.set_device(model, "reference")
    logits(model, NEXT[:1])
    assert not steps
    tilefuse.hf.set_device(model, "cpu")
    logits(model, NEXT[:1])
    assert len(steps) == 1  # the second block is still watched
    block = model.model.layers[0]
    cache = transformers.DynamicCache(config=model.config)
    model(torch.tensor([PROMPT]), past_key_values=cache)
    model.requires_grad_(False)
    block.input_layernorm.weight.requires_grad_(True)
    assert model(torch.tensor([[5]]), past_key_values=cache).logits.requires_grad
    block.input_layernorm.weight.requires_grad_(False)
    wide = torch.zeros(1, 1, 2 * model.config.hidden_size)
    turns = (torch.ones(1, 1, block.self_attn.head_dim),) * 2
    with pytest.raises(RuntimeError):
        block(wide, past_key_values=cache, position_embeddings=turns)
    block.mlp.forward = lambda x: 0 * x
    logits(model, NEXT[:1])
    del block.mlp.forward
    assert len(steps) == 1
    block.self_attn.o_proj = torch.nn.Identity()
    logits(model, NEXT[:1])
    assert len(steps) == 1


def test_copies_of_a_model(tmp_path: Path, rng: np.random.Generator, steps: list[int]) -> None:
    language_models.make(tmp_path / "model", "qwen2", KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model")
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.model.layers[0].forward.block is other.model.layers[0]
        steps.clear()
        assert torch.equal(logits(other), expected)
        assert steps


def test_sizes_that_dont_fit() -> None:
    layers = [
        tf.pack(tf.quantize_linear(np.ones((k, n), np.float32), bits=8, group=64)) for k, n in ((64, 128), (64, 64))
    ]
    native = [tf.runtime.cpu.native_call(layer) for layer in layers]
    with pytest.raises(ValueError, match="heads' sizes"):
        tf._core.DecoderBlock(native[0], native[1], native[0], native[1], 2, 2, 32, 1.0, [0.0] * 4, False, 0)
    with pytest.raises(ValueError, match="no multiple of 16"):
        tf._core.DecoderBlock(native[0], native[1], native[0], native[1], 2, 1, 8, 1.0, [0.0] * 4, False, 0)
    fitting = tf._core.DecoderBlock(native[0], native[1], native[0], native[1], 2, 1, 32, 1.0, [0.0] * 4, False, 0)
    with pytest.raises(ValueError, match="full"):
        fitting.step(0, *[0] * 9, 4, 4, 0)


def test_compiled(tmp_path: Path, rng: np.random.Generator, steps: list[int]) -> None:
    """A compiled model has the operators in its graph and not the short way, without a graph break."""
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    model = load(tmp_path / "model")
    token = torch.tensor([[5]])
    with torch.no_grad():
        expected = model(token, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        close(compiled(token, use_cache=False).logits, expected, UNITS[torch.float32])
    assert not steps
