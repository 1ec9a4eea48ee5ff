"""Tensor parallelism: two processes that hold half of a model each compute what one computes with all of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the [hf] extra is not installed")
pytest.importorskip("transformers.distributed", reason="the [hf] extra is not installed")
pytest.importorskip("accelerate", reason="transformers needs accelerate for tensor parallelism")

import tiny_models  # noqa: E402

import tilefuse as tf  # noqa: E402
from tilefuse import hf  # noqa: E402
from tilefuse.awq import Options, quantize_checkpoint  # noqa: E402
from tilefuse.errors import LayoutError, UnsupportedFormatError  # noqa: E402
from tilefuse.hf import parallel  # noqa: E402

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # theirs
]

WORLD = 2
TOKENS = 16
# Biases along both axes, head norms, sandwich norms and (1 + w) gains; 4 bits with zero points and 8 without.
CASES = {"llama": 4, "qwen2": 4, "qwen3": 8, "gemma2": 4, "gemma3_text": 8}


def checkpoint(kind: str, bits: int, root: Path, **changes: Any) -> Path:
    """A tiny quantised checkpoint whose logits are some units apart, so that rounding does not choose the token."""
    source = tiny_models.save(tiny_models.make_model(kind, **changes), root / f"{kind}-source")
    quantize_checkpoint(source, root / kind, Options(bits=bits, group=32, method="rtn"))
    return root / kind


def computed(path: Path, **divided: Any) -> tuple[Any, list[int], int]:
    """Logits of a prompt, the tokens that follow it, and the bytes of packed weights in this process."""
    from transformers import AutoModelForCausalLM

    with hf.options(device="cpu", cache="off"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **divided).eval()
    ids = torch.randint(4, 64, (2, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = model(ids).logits
        found = model.generate(ids[:1], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return logits, found[0, 24:].tolist(), hf.packed_bytes(model)


def work(rank: int, folder: str, world: int) -> None:
    """One process: all checkpoints of ``folder``, and messages of what is refused."""
    from transformers.distributed import DistributedConfig

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the machine's name resolves to
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    root = Path(folder)
    found: dict[str, Any] = {}
    for kind in CASES:
        logits, tokens, nbytes = computed(root / kind, distributed_config=DistributedConfig(tp_size=world))
        np.save(root / f"{kind}-{rank}.npy", logits.numpy())
        found[kind] = [tokens, nbytes]
    for kind in ("mistral", "gemma"):
        try:
            computed(root / kind, distributed_config=DistributedConfig(tp_size=world))
        except (LayoutError, UnsupportedFormatError) as error:
            found[kind] = str(error)
    whole = {f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"}
    logits, tokens, nbytes = computed(
        root / "mistral", distributed_config=DistributedConfig(tp_size=world, tp_plan=whole)
    )
    np.save(root / f"mistral-{rank}.npy", logits.numpy())
    found["mistral whole"] = [tokens, nbytes]
    (root / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def bytes_of_parts(path: Path, rank: int, *, whole: bool) -> int:
    """Of the packed layers that a rank holds: outputs divided, but inputs of o and down; ``whole``: attention isn't."""
    opened = tf.open_checkpoint(path)
    total = 0
    for info in opened.linears():
        if info.quantized:
            axis: Any = "in" if info.name.endswith(("o_proj", "down_proj")) else "out"
            shard = None if whole and "self_attn" in info.name else (rank, WORLD)
            total += tf.packed_nbytes(opened.linear(info.name), shard=shard, axis=axis if shard else None)
    return total


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    paths = {kind: checkpoint(kind, bits, tmp_path) for kind, bits in CASES.items()}
    # Three heads of keys can't be divided among two, and 96 / 2 inputs of down cut a group of 32.
    paths["mistral"] = checkpoint("mistral", 4, tmp_path, num_attention_heads=6, num_key_value_heads=3)
    paths["gemma"] = checkpoint("gemma", 4, tmp_path, intermediate_size=96)
    torch.multiprocessing.spawn(work, (str(tmp_path), WORLD), WORLD)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    for kind in (*CASES, "mistral"):
        logits, tokens, _ = computed(paths[kind])
        for rank, found in enumerate(ranks):
            # Sums of products in float32, in two parts: 2^-24 of their size each; then activations are rounded to
            # bfloat16, where a few of a thousand then fall to the other side, by 2^-8. Halving a layer wrongly
            # changes logits by all of their size.
            theirs = np.load(tmp_path / f"{kind}-{rank}.npy")
            assert np.abs(theirs - logits.numpy()).max() <= 2.0**-6 * np.abs(logits.numpy()).max()
            label = "mistral whole" if kind == "mistral" else kind
            assert found[label][0] == tokens
            assert len(tokens) == TOKENS
            assert found[label][1] == bytes_of_parts(paths[kind], rank, whole=kind == "mistral")
    for found in ranks:
        assert "num_key_value_heads = 3" in found["mistral"]
        assert "leave attention whole" in found["mistral"]
        assert "down_proj" in found["gemma"]
        assert "48 input channels a rank cut a group of 32" in found["gemma"]


def test_the_example_divides_what_can_be_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "examples"))
    import tensor_parallel

    path = tiny_models.save(tiny_models.make_model("llama"), tmp_path / "llama")  # 4 heads, 2 of keys
    assert tensor_parallel.plan(path, 2) is None
    assert set(tensor_parallel.plan(path, 4).values()) == {"replicate"}


def test_the_example_says_where_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "examples"))
    import tensor_parallel

    def answer(tokens: list[int]) -> Any:
        return tensor_parallel.Answer(tokens, [4.0, 0.125, 4.0], "", 0, 1.0)

    alone = answer([5, 6, 7])
    assert tensor_parallel.differing(0, answer([5, 6, 7]), alone) == 0
    assert capsys.readouterr().out == ""
    assert tensor_parallel.differing(0, answer([5, 8, 9]), alone) == 0
    assert "after 1, where the two likeliest are 0.125 logits apart" in capsys.readouterr().out
    assert tensor_parallel.differing(0, answer([5, 6, 8]), alone) == 1
    assert tensor_parallel.differing(0, answer([5, 6]), alone) == 1


@pytest.mark.slow
def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    examples = str(Path(__file__).resolve().parent.parent / "examples")
    monkeypatch.syspath_prepend(examples)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([examples, os.environ.get("PYTHONPATH", "")]))
    import tensor_parallel

    path = checkpoint("qwen2", 4, tmp_path)
    assert tensor_parallel.main([str(path), "a fox", "--tokens", "4"]) == 0
    text = capfd.readouterr().out
    assert "rank 1 of 2" in text
    assert "tokens from one process and from 2" in text


def test_styles_of_the_plans_are_known() -> None:
    from transformers import AutoConfig

    for kind in tiny_models.FAMILIES:
        plan = AutoConfig.for_model(kind).base_model_tp_plan
        linears = {name: style for name, style in plan.items() if name.endswith("_proj")}
        assert len(linears) == 7
        assert set(plan.values()) <= {*parallel.AXES, *parallel.WHOLE}
