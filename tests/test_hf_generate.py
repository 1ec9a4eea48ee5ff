"""``tilefuse generate`` on a tiny random model with a tokenizer of its own."""

from __future__ import annotations

import functools
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS

torch = pytest.importorskip("torch", reason="the [hf] extra is not installed")
transformers = pytest.importorskip("transformers", reason="the [hf] extra is not installed")

import language_models  # noqa: E402

from tilefuse import commands  # noqa: E402
from tilefuse.errors import FormatError, ShapeError, TileFuseError  # noqa: E402
from tilefuse.hf.generation import MIN_TEMPERATURE, Loaded, _Stream, generate, load, prompt_ids  # noqa: E402
from tilefuse.hf.sequence import Sequence  # noqa: E402
from tilefuse.phases import CHUNK  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.usefixtures("cache"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]


def write_tokenizer(path: Path, *, template: str | None = None) -> None:
    """Words "w4" to "w95", the ids their numbers; below are special ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    words = special | {f"w{i}": i for i in range(4, language_models.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    fast.save_pretrained(path)


@pytest.fixture
def model(tmp_path: Path, rng: np.random.Generator) -> tuple[Path, Any]:
    """A checkpoint's folder, and the same model in plain transformers."""
    expected = language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    write_tokenizer(tmp_path / "model")
    return tmp_path / "model", expected


def theirs(expected: Any, ids: list[int], count: int) -> list[int]:
    found = expected.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens


def test_command(model: tuple[Path, Any], capfd: pytest.CaptureFixture[str], cache: Path) -> None:
    """The likeliest tokens, those of plain transformers, on the exact device; then the figures."""
    path, expected = model
    arguments = ["generate", str(path), "-p", "w5 w17 w93", "-n", "6", "--device", "reference", "--dtype", "float32"]
    for state in ("packed", "mapped"):
        assert commands.run(arguments) == 0
        out, err = capfd.readouterr()
        wanted = [f"w{token}" for token in theirs(expected, [5, 17, 93], 6) if token not in (0, 1, 2, 3)]
        assert out.split() == wanted
        assert f"of weights {state}" in err
        assert "prefill  3 tokens" in err
        assert "on reference (8 products)" in err
        assert "memory " in err
    assert list(cache.glob("*.tilefuse"))


def test_command_with_attention_by_tilefuse(model: tuple[Path, Any], capfd: pytest.CaptureFixture[str]) -> None:
    """One tile of scores a KV head, and layer, in INT8; the tokens after the first are one query each."""
    arguments = ["generate", str(model[0]), "-p", "w5 w17 w93", "-n", "6", "--device", "reference"]
    assert commands.run([*arguments, "--attention", "one"]) == 0
    err = " ".join(capfd.readouterr().err.split())
    tiles = language_models.LAYERS * language_models.KV_HEADS
    assert f"attention tilefuse, one: 100.0% of {tiles} score tiles in INT8; by sdpa: one query (" in err
    assert commands.run([*arguments, "--attention", "local_sink", "--coverage", "0.25"]) == 0
    assert "band 0.25 + diag + sink" in " ".join(capfd.readouterr().err.split())
    for wrong, word in ((["--coverage", "0.5"], "pass --attention local_sink"), (["--attention", "bnad"], "bigbird")):
        assert commands.run([*arguments, *wrong]) != 0
        assert word in capfd.readouterr().err


def test_chat_template(tmp_path: Path, model: tuple[Path, Any]) -> None:
    path, _ = model
    write_tokenizer(path, template="{% for m in messages %}w7 {{ m.content }} w8 {% endfor %}w9")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert prompt_ids(tokenizer, "w20 w21").tolist() == [[7, 20, 21, 8, 9]]
    assert prompt_ids(tokenizer, "w20 w21", chat=False).tolist() == [[20, 21]]


def test_long_prompts_go_in_parts(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from tilefuse.hf import generation

    path, expected = model
    loaded = load(path, dtype=torch.float32, device="reference")
    ids = [5, 17, 93, 4, 60, 31, 8, 44, 71]
    assert len(ids) < CHUNK
    monkeypatch.setattr(generation, "CHUNK", 4)
    done = generate(loaded, torch.tensor([ids]), max_new_tokens=4)
    assert done.tokens == theirs(expected, ids, 4)
    # 4 + 4 + 1 tokens: the last part is one row.
    blocks = 4 * language_models.LAYERS
    assert done.calls[("prefill", "reference")] == 2 * blocks
    assert done.prompt == 9


def test_interrupt_keeps_what_there_is(model: tuple[Path, Any]) -> None:
    loaded = load(model[0], dtype=torch.float32)
    said: list[str] = []

    def on_text(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            raise KeyboardInterrupt

    done = generate(loaded, torch.tensor([[5, 17]]), max_new_tokens=20, on_text=on_text)
    assert done.interrupted
    assert "".join(said).split()[:2] == done.text.split()[:2]
    assert len(done.tokens) < 20


def test_refusals(
    model: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    path, expected = model
    for option, value, word in (
        ("--device", "gpu", "gpu"),
        ("--dtype", "int8", "bfloat16"),
        ("--fallback", "x", "fallback"),
    ):
        assert commands.run(["generate", str(path), "-p", "w5", option, value]) == 1
        assert word in capsys.readouterr().err
    loaded = load(path, dtype=torch.float32)
    with pytest.raises(ShapeError, match=r"200 tokens, and the model's context 128"):
        generate(loaded, torch.full((1, 200), 5))
    with pytest.raises(ShapeError, match="no tokens"):
        generate(loaded, torch.zeros((1, 0), dtype=torch.int64))
    expected.save_pretrained(tmp_path / "plain")
    write_tokenizer(tmp_path / "plain")
    with pytest.raises(FormatError, match="not quantised"):
        load(tmp_path / "plain")
    assert commands.run(["generate", str(tmp_path / "nothing" / "there" / "at" / "all"), "-p", "w5"]) == 1


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 4}, r"not in its files, 'model\.layers\.\d+\.input_layernorm\.weight' first"),
        ({"num_hidden_layers": 1}, r"num_hidden_layers = 1, and its files go on with 'model\.layers\.1\."),
        ({"vocab_size": 8}, "transformers can't load it"),
        ({"num_attention_heads": 0}, "transformers can't load it"),
        ({"quantization_config": []}, "transformers can't load it"),
        ({"model_type": "nothing"}, "transformers can't load it"),
    ],
    ids=str,
)
def test_configurations_of_another_model(model: tuple[Path, Any], changes: dict[str, Any], words: str) -> None:
    """transformers draws at random what the files lack, leaves out what is too much, and raises errors of any class."""
    edit(model[0] / "config.json", **changes)
    with pytest.raises(FormatError, match=words):
        load(model[0])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_damaged_settings(model: tuple[Path, Any], name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (model[0] / name).write_text(text)
    assert commands.run(["generate", str(model[0]), "-p", "w5"]) == 1
    assert str(model[0]) in capsys.readouterr().err


@pytest.mark.parametrize("temperature", [1e-300, 1e-7, -1.0, float("nan"), float("inf")])
def test_temperatures_that_overflow(model: tuple[Path, Any], temperature: float) -> None:
    loaded = load(model[0], dtype=torch.float32)
    with pytest.raises(TileFuseError, match=r"temperature is .* 1e-06 and above"):
        generate(loaded, torch.tensor([[5]]), temperature=temperature)


def test_prompts_that_are_no_text(
    model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments with such bytes reach Python as lone surrogates; standard input refuses to decode them."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"w5 \xff"), "utf-8"))
    for prompt in ("w5 \udcff", "-"):
        assert commands.run(["generate", str(model[0]), "-p", prompt]) == 1
        assert "not a text in UTF-8" in capsys.readouterr().err


def test_smallest_temperature(model: tuple[Path, Any]) -> None:
    """So cold that nothing but the likeliest token is drawn."""
    loaded, ids = load(model[0], dtype=torch.float32), torch.tensor([[5, 17]])
    cold = generate(loaded, ids, max_new_tokens=6, temperature=MIN_TEMPERATURE)
    assert cold.tokens == theirs(model[1], [5, 17], 6)


def test_characters_of_several_tokens_come_whole() -> None:
    class Bytes:
        """A tokenizer whose tokens are bytes."""

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode("utf-8", "replace")

    said: list[str] = []
    stream = _Stream(Bytes(), said.append)
    stream.put(torch.tensor([[1, 2]]))  # the prompt
    for byte in "aé\n🙂b".encode():
        stream.put(torch.tensor([byte]))
    stream.put(torch.tensor([0xE2]))  # cut short
    stream.end()
    assert said == ["a", "é", "\n", "🙂", "b", "�"]
    assert stream.text == "aé\n🙂b�"


def test_a_long_line_is_decoded_in_pieces() -> None:
    most = 0

    class Words:
        """As tokenizers of whole words: the first has no space before it."""

        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            nonlocal most
            most = max(most, len(tokens))
            return " ".join(f"w{token}" for token in tokens)

    said: list[str] = []
    stream = _Stream(Words(), said.append)
    stream.put(torch.tensor([[1]]))
    for token in range(1000):
        stream.put(torch.tensor([token]))
    stream.end()
    assert "".join(said) == stream.text == " ".join(f"w{token}" for token in range(1000))
    assert most <= 64


def test_figures_of_the_emulated_array(model: tuple[Path, Any], capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("greenlet", reason="the emulator is not installed")
    command = ["generate", str(model[0]), "-p", "w5 w17", "-n", "2", "--device", "emulator"]
    assert commands.run(command) == 0
    assert "dispatches so far" in capfd.readouterr().err


def test_loaded_says_what_is_held(model: tuple[Path, Any]) -> None:
    loaded: Loaded = load(model[0])
    assert loaded.packed
    others = sum(parameter.numel() * 2 for parameter in loaded.model.parameters())
    assert loaded.other_bytes == others
    assert loaded.packed_bytes > 0


def test_threads_of_torch(model: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """One while nothing large is left to it, all of them before and after, whatever happens."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for head, expected in ((8, [3, 1]), (16, [3, 3])):
            loaded = load(model[0], dtype=torch.float32, device="cpu", head=head)
            seen: list[int] = []
            forward = type(loaded.model).forward

            @functools.wraps(forward)  # generate reads the signature
            def watched(self: Any, *args: Any, seen: list[int] = seen, forward: Any = forward, **more: Any) -> Any:
                seen.append(torch.get_num_threads())
                return forward(self, *args, **more)

            logits = Sequence.logits

            def watched_too(self: Any, token: int, seen: list[int] = seen, logits: Any = logits) -> Any:
                seen.append(torch.get_num_threads())
                return logits(self, token)

            with monkeypatch.context() as patched:
                patched.setattr(type(loaded.model), "forward", watched)
                patched.setattr(Sequence, "logits", watched_too)
                done = generate(loaded, torch.tensor([[5, 17]]), max_new_tokens=2, min_new_tokens=2)
            assert (seen, len(done.tokens)) == (expected, 2)
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
