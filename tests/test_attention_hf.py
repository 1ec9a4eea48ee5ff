"""``attn_implementation="tilefuse"`` in transformers: masks read exactly, routing by layer, models beside sdpa."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import KINDS

torch = pytest.importorskip("torch", reason="the [hf] extra is not installed")
transformers = pytest.importorskip("transformers", reason="the [hf] extra is not installed")

import language_models  # noqa: E402
import tiny_models  # noqa: E402
from torch import nn  # noqa: E402
from transformers import masking_utils  # noqa: E402

import tilefuse.hf  # noqa: E402
from tilefuse import routing  # noqa: E402
from tilefuse.errors import RoutingError, TileFuseError  # noqa: E402
from tilefuse.hf import attention_use, rooms, set_attention  # noqa: E402
from tilefuse.hf.attention import ONE_QUERY, attention_forward  # noqa: E402
from tilefuse.hf.masks import Span, attention_mask, spans_of  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # theirs
]

D = 32


class Layer(nn.Module):
    """What transformers' attention modules have that the function reads."""

    def __init__(self, groups: int = 2, **settings: Any) -> None:
        super().__init__()
        self.config = type("config", (), settings)()
        self.num_key_value_groups, self.is_causal, self.layer_idx = groups, True, 3


def operands(batch: int, queries: int, keys: int, kv_heads: int = 2, groups: int = 2) -> tuple[Any, Any, Any]:
    """Values that bfloat16 holds, so that nothing is lost before the scores."""
    torch.manual_seed(queries * 1000 + keys)
    shapes = ((batch, kv_heads * groups, queries, D), *[(batch, kv_heads, keys, D)] * 2)
    q, k, v = (torch.randn(shape).bfloat16().float() for shape in shapes)
    return q, k, v


def exact(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Attention in float64, [B, L, Hq, d]; zeros where nothing is seen."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, 1) for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * D**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def assert_exact(out: Any, q: Any, k: Any, v: Any, mask: Any) -> None:
    """Weights are rounded to bfloat16, 2^-9 of each, and sum to one; sums of float32 and exponentials take less."""
    expected = exact(q, k, v, mask)
    bound = 2.0**-9 * float(v.abs().max()) + 1e-4
    assert (out.double() - expected).abs().max() <= bound
    assert (expected.abs() > 4 * bound).double().mean() > 0.5  # or a result of zeros would pass


def causal(queries: int, keys: int, window: int | None = None) -> Any:
    position = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    seen = key <= position
    return seen if window is None else seen & (key > position - window)


PADDINGS = {
    "none": [(0, 150), (0, 150)],
    "left": [(0, 150), (37, 150)],
    "right": [(0, 113), (0, 150)],
    "long right": [(0, 61), (0, 150)],
    "both": [(20, 140), (3, 150)],
    "the same": [(20, 150), (20, 150)],
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("queries", [150, 70])
def test_padded_batches(queries: int, window: int | None, padding: str) -> None:
    """Every row, those of padding included, as the mask says."""
    q, k, v = operands(2, queries, 150)
    inside = torch.stack([(torch.arange(150) >= a) & (torch.arange(150) < b) for a, b in PADDINGS[padding]])
    mask = causal(queries, 150, window) & inside[:, None, None, :]
    layer = Layer()
    out, weights = attention_forward(layer, q, k, v, mask)
    assert weights is None
    assert out.shape == (2, queries, 4, D)
    assert out.is_contiguous()
    assert_exact(out, q, k, v, mask)
    assert dict(attention_use(layer)[0].calls) == {"tilefuse": 1}
    attention_forward(layer, q, k, v, mask)  # by what was kept with the mask
    mask[:, :, :, 60:90] = False
    out, _ = attention_forward(layer, q, k, v, mask)  # which is another one now
    assert_exact(out, q, k, v, mask)


@pytest.mark.parametrize("queries", [1, 2, 64, 150])
def test_chunk_without_a_mask_stands_at_the_end(queries: int) -> None:
    q, k, v = operands(1, queries, 150)
    out, _ = attention_forward(Layer(), q, k, v, None)
    assert_exact(out, q, k, v, causal(queries, 150)[None, None])


def test_not_causal() -> None:
    q, k, v = operands(1, 40, 150)
    out, _ = attention_forward(Layer(), q, k, v, None, is_causal=False)
    assert_exact(out, q, k, v, torch.ones(1, 1, 40, 150, dtype=torch.bool))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"mask": "gap"}, "a mask that is not of lengths and a window"),
        ({"mask": "float"}, "a mask of torch.float32, not bool"),
        ({"mask": "heads"}, "a mask of its own for each head"),
        ({"mask": "row"}, "a mask of shape [1, 1, 1, 80] for 80 queries and 80 keys"),
        ({"double": True}, "torch.float64"),
        ({"grad": True}, "a gradient is wanted"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_sdpa_does_instead(change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the same result, the reason logged once and counted."""
    q, k, v = operands(1, 80, 80)
    seen = causal(80, 80)[None, None].clone()
    kind = change.get("mask")
    if kind == "gap":
        seen[..., 5:30, 3] = False
    given: Any = seen
    if kind == "float":
        given = torch.zeros(1, 1, 80, 80).masked_fill(~seen, -torch.inf)
    if kind == "row":
        seen = torch.arange(80)[None, None, None] < 50
        given = seen
    if kind == "heads":
        seen = seen.repeat(1, 4, 1, 1)
        seen[:, 1, 40:, 7] = False
        given = seen
    if change.get("double"):
        q, k, v = q.double(), k.double(), v.double()
    q.requires_grad_(bool(change.get("grad")))
    layer = Layer()
    with caplog.at_level(logging.WARNING, "tilefuse"):
        out, _ = attention_forward(layer, q, k, v, given)
        attention_forward(layer, q, k, v, given)
    assert [record.getMessage() for record in caplog.records] == [
        f"attention of layer 3 by SDPA instead of tilefuse: {reason}"
    ]
    assert dict(attention_use(layer)[0].calls) == {f"sdpa: {reason}": 2}
    assert_exact(out.detach(), q.detach(), k, v, seen)


def test_dropout_and_missing_terms() -> None:
    q, k, v = operands(1, 80, 80)
    layer = Layer()
    attention_forward(layer, q, k, v, None, dropout=0.1)
    assert dict(attention_use(layer)[0].calls) == {"sdpa: dropout": 1}
    for name in ("softcap", "s_aux"):
        with pytest.raises(TileFuseError, match=f'{name} is set by Layer.*pass "eager"'):
            attention_forward(layer, q, k, v, None, **{name: 30.0})


def test_chunks_by_sdpa_stand_at_the_end() -> None:
    """torch aligns a causal mask to the first key."""
    q, k, v = operands(1, 50, 150)
    out, _ = attention_forward(Layer(), q.double(), k.double(), v.double(), None)
    assert_exact(out, q, k, v, causal(50, 150)[None, None])


def test_mask_function() -> None:
    """None where there is nothing to say, else what sdpa's says."""
    ones = torch.ones(2, 150, dtype=torch.bool)
    for queries in (150, 50, 1):
        assert attention_mask(2, queries, 150, 150 - queries, 0, attention_mask=ones) is None
    padded = ones.clone()
    padded[1, :9] = False
    found = attention_mask(2, 50, 150, 100, 0, attention_mask=padded)
    assert found is not None
    assert spans_of(found, 2) == [Span(0, 150, 100), Span(9, 150, 100)]
    sliding = masking_utils.sliding_window_causal_mask_function(30)
    found = attention_mask(1, 150, 150, mask_function=sliding, local_size=30)
    assert found is not None
    assert spans_of(found, 1) == [Span(0, 150, 0, 30)]
    assert spans_of(found, 5) == [Span(0, 150, 0, 30)] * 5
    assert spans_of(found.expand(2, 1, 150, 150), 3) == "a mask of 2 sequences for 3"
    # An empty static cache: keys to come are not seen, and queries stand at its beginning.
    found = attention_mask(1, 50, 150, 0, 0)
    assert found is not None
    assert spans_of(found, 1) == [Span(0, 50, 0)]
    assert attention_mask(1, 50, 150, 0, 0, attention_mask=ones[:1, :50]) is not None


# --- models ----------------------------------------------------------------------------------------------------------

# q, k, v and the weights lose up to 2^-9 each to bfloat16, the scores that times their size; two blocks and the head
# carry that on. Shares of the largest logit: 2^-9 on average, and 2^-4 where two keys with most of the weight are close
# to equal. A key too many or too few in a window of 16 is 2^-8 and 2^-3 and more.
BOUNDS = 2.0**-4, 2.0**-9

MODELS = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text")


def close(ours: Any, theirs: Any, bounds: tuple[float, float] = BOUNDS) -> None:
    error, largest = (ours - theirs).abs(), theirs.abs().max()
    assert error.max() <= bounds[0] * largest
    assert error.mean() <= bounds[1] * largest


def pair(kind: str, **changes: Any) -> tuple[Any, Any]:
    """A model with tilefuse's attention, and the same with eager attention."""
    theirs = tiny_models.make_model(kind, **changes)
    theirs.set_attn_implementation("eager")
    for layer in theirs.model.layers:
        layer.self_attn.scaling *= 0.25  # else single keys take all, and two that are close swap by a rounding
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("tilefuse")
    return ours, theirs


def calls(model: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for use in attention_use(model, reset=True):
        for name, count in use.calls.items():
            found[name] = found.get(name, 0) + count
    return found


def tokens(*shape: int) -> Any:
    torch.manual_seed(1)
    return torch.randint(4, 64, shape)


@pytest.mark.parametrize("kind", MODELS)
def test_logits(kind: str) -> None:
    ours, theirs = pair(kind)
    ids = tokens(2, 150)
    with torch.no_grad():
        close(ours(ids).logits, theirs(ids).logits)
    assert calls(ours) == {"tilefuse": 2}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_logits_of_a_padded_batch(kind: str, side: str) -> None:
    ours, theirs = pair(kind)
    ids, mask = tokens(3, 90), torch.ones(3, 90, dtype=torch.long)
    mask[1, :21] = mask[2, :1] = 0
    if side == "right":
        mask = mask.flip(1)
    with torch.no_grad():
        found, expected = (model(ids, attention_mask=mask).logits for model in (ours, theirs))
    real = mask.bool()
    close(found[real], expected[real])
    assert calls(ours) == {"tilefuse": 2}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_chunked_prefill(kind: str) -> None:
    """Chunks after a cache, and then one token at a time, as the whole at once."""
    ours, theirs = pair(kind)
    ids = tokens(1, 160)
    cache = transformers.DynamicCache(config=ours.config)
    parts = [ids[:, :64], ids[:, 64:150], *ids[:, 150:].split(1, 1)]
    with torch.no_grad():
        found = torch.cat([ours(part, past_key_values=cache).logits for part in parts], 1)
        close(found, theirs(ids).logits)
    assert calls(ours) == {"tilefuse": 4, ONE_QUERY: 20}


def test_generate() -> None:
    """Greedy tokens, from a padded batch and with chunks of the prompt, are those of the same weights with sdpa."""
    ours, theirs = pair("llama")
    # A head that decides clearly: what bfloat16 moves doesn't change which token is the likeliest.
    for model in (ours, theirs):
        model.lm_head.weight.mul_(4)
    theirs.set_attn_implementation("sdpa")
    ids, mask = tokens(2, 70), torch.ones(2, 70, dtype=torch.long)
    mask[1, :33] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for changes in ({}, {"prefill_chunk_size": 32}):
        found, expected = (
            model.generate(ids[:1], attention_mask=mask[:1], **options, **changes) for model in (ours, theirs)
        )
        assert found.tolist() == expected.tolist()
    found, expected = (model.generate(ids, attention_mask=mask, **options) for model in (ours, theirs))
    assert found.tolist() == expected.tolist()
    assert calls(ours)["tilefuse"] == 2 + 2 * 3 + 2
    static = ours.generate(ids[:1], cache_implementation="static", **options)
    assert static.tolist() == theirs.generate(ids[:1], cache_implementation="static", **options).tolist()
    assert calls(ours) == {"tilefuse": 2, ONE_QUERY: 14}


def test_decoder_blocks_stay_one_call(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a quantised model: prefill on tilefuse, then each token by the blocks of C++."""
    monkeypatch.setenv("TILEFUSE_CACHE", str(tmp_path / "cache"))
    language_models.make(tmp_path / "model", "llama", KINDS["awq-gemm"], rng)
    grown: list[int] = []
    grow = rooms.Room.grow
    monkeypatch.setattr(rooms.Room, "grow", lambda room, layer, n: (grown.append(n), grow(room, layer, n))[1])
    found = []
    for name in ("tilefuse", "sdpa"):
        with tilefuse.hf.options(device="cpu"):
            model = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "model", dtype=torch.float32, attn_implementation=name
            ).eval()
        grown.clear()
        ids = torch.tensor([[5, 17, 93, 4, 60]])
        found.append(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
        assert grown == [length for length in (6, 7, 8) for _ in range(language_models.LAYERS)]
        if name == "tilefuse":
            assert calls(model) == {"tilefuse": language_models.LAYERS}
    assert found[0] == found[1]


# --- routing ---------------------------------------------------------------------------------------------------------


def test_routing_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The map that each layer's call gets is that of its template."""
    ours, _ = pair("llama", num_hidden_layers=4, max_position_embeddings=512)
    got: list[Any] = []
    attention = tilefuse.attention

    def watched(*args: Any, **kwargs: Any) -> Any:
        got.append(kwargs["routing"])
        return attention(*args, **kwargs)

    monkeypatch.setattr(tilefuse, "attention", watched)
    layers = {0: "zero", "2": {"routing": "band", "coverage": 0.25}, 3: {"coverage": 1.0}}
    set_attention(ours, "local_sink", coverage=0.75, layers=layers)
    assert ours.config._attn_implementation == "tilefuse"
    with torch.no_grad():
        ours(tokens(1, 500))
    assert got == [
        None,
        routing.local_sink(0.75).build(500, 500),
        routing.band(0.25).build(500, 500),
        routing.local_sink(1.0).build(500, 500),
    ]
    uses = attention_use(ours)
    assert [use.layer for use in uses] == [0, 1, 2, 3]
    assert [use.name for use in uses] == [f"model.layers.{i}.self_attn" for i in range(4)]
    # Row tiles of 128 queries and key tiles of 64: 2 + 4 + 6 + 8, for each of two KV heads.
    assert [use.tiles for use in uses] == [40] * 4
    assert [use.int8_tiles for use in uses] == [0, 30, 10, 40]
    assert [use.routing for use in uses] == ["", "band 0.75 + diag + sink", "band 0.25", "band 1 + diag + sink"]

    def by_length(layer: int, keys: int) -> Any:
        return routing.one() if layer and keys > 100 else None

    got.clear()
    set_attention(ours, by_length)
    with torch.no_grad():
        ours(tokens(1, 101))
        ours(tokens(1, 100))
    assert got == [None, *[routing.one().build(101, 101)] * 3, *[None] * 4]


def test_all_int8_is_close() -> None:
    """8-bit codes of q and k: some 2^-8 of the largest of 32 channels, ten times what bfloat16 loses."""
    ours, theirs = pair("llama", max_position_embeddings=512)
    ids = tokens(1, 400)
    errors = {}
    with torch.no_grad():
        expected = theirs(ids).logits
        for coverage in (0.0, 0.5, 1.0):
            set_attention(ours, "band", coverage=coverage)
            errors[coverage] = float((ours(ids).logits - expected).abs().mean() / expected.abs().max())
    assert errors[0.0] < errors[0.5] < errors[1.0] < 16 * BOUNDS[1]


@pytest.mark.parametrize(
    ("entry", "error", "match"),
    [
        ({"routing": "bnad"}, RoutingError, "routing is 'bnad': pass one of band"),
        ({"coverage": 1.5}, RoutingError, "coverage is 1.5"),
        ({"rooting": "band"}, TileFuseError, "config.tilefuse has rooting: there are routing, coverage"),
        ({"layers": {9: "band"}}, TileFuseError, "layers has 9: the model has layers 0 to 1"),
        ({"layers": {"first": "band"}}, TileFuseError, "layers has 'first': pass the index"),
        ({"layers": {1: {"covrage": 1}}}, TileFuseError, r'config.tilefuse\["layers"\]\[1\] has covrage'),
        ({"layers": ["band"]}, TileFuseError, '"layers"] is a list'),
        ({"layers": {1: {"layers": {}}}}, TileFuseError, "has layers of its own"),
        ({"routing": 5}, RoutingError, "the routing of layer None is a int"),
        ({"routing": routing.one(), "coverage": 0.5}, RoutingError, "coverage go with a layout's name"),
        ({"quant": {"rows": 1}}, TileFuseError, "quant is {'rows': 1}"),
    ],
    ids=str,
)
def test_bad_options(entry: dict[str, Any], error: type[Exception], match: str) -> None:
    ours, _ = pair("llama")
    with pytest.raises(error, match=match):
        set_attention(ours, **entry)
    assert not hasattr(ours.config, "tilefuse")


def test_the_configuration_survives_a_file(tmp_path: Path) -> None:
    ours, _ = pair("llama")
    set_attention(ours, "band", coverage=0.5, layers={1: "zero"})
    ours.config.save_pretrained(tmp_path)
    ours.config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.config.tilefuse["coverage"] == 0.5
    for index, layer in enumerate(ours.model.layers):
        layer.self_attn.config = ours.config
        choice = tilefuse.hf.attention.choice_of(ours.config, index)
        assert (choice.routing(200, 200, causal=True, window=None) is None) == (index == 1)
