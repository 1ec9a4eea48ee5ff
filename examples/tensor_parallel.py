"""A quantised model divided among processes: tensor parallelism on torch.distributed, under transformers' own plan.

    python examples/tensor_parallel.py CHECKPOINT "a question"     # two processes here, compared with one
    python examples/tensor_parallel.py --processes 3               # SmolLM2-135M, made as in generate_smollm2.py
    torchrun --nnodes 2 --nproc-per-node 1 ... examples/tensor_parallel.py CHECKPOINT     # on several machines

Needs tilefuse[hf] and accelerate. Each process packs its part of the layers (`tf.pack(..., shard=, axis=)`) and holds
no others. transformers says which axis a layer is divided along, and adds up and gathers results, here by gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import tilefuse as tf
from tilefuse import hf

ROOT = Path(__file__).resolve().parent.parent
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

CLOSE = 0.3
"""Logits. Sums in another order, and activations that then round to another bfloat16, move those of SmolLM2-135M by
0.06 (root mean square, a prompt and 64 tokens, float32 between layers): 3.5 standard deviations of a difference."""


@dataclass(frozen=True)
class Answer:
    """What a process found.

    Attributes:
        tokens: New tokens.
        gaps: Between the two greatest logits, at each of them.
        text: As text.
        nbytes: Of packed weights in this process.
        seconds: That generating took.
    """

    tokens: list[int]
    gaps: list[float]
    text: str
    nbytes: int
    seconds: float


def plan(path: Path, world: int) -> dict[str, str] | None:
    """What to change of transformers' plan: attention stays whole where its heads can't be divided."""
    config = AutoConfig.from_pretrained(path).get_text_config()
    if config.num_attention_heads % world == 0 and config.num_key_value_heads % world == 0:
        return None
    return {f"model.layers.*.self_attn.{name}": "replicate" for name in ATTENTION}


def answer(path: Path, prompt: str, count: int, dtype: str, world: int = 1) -> Answer:
    """Greedy generation; with a world of more than one, in each of its processes.

    Raises:
        TileFuseError: The checkpoint, or what is asked of it, is not taken; the message says why.
    """
    divided: dict[str, Any] = {}
    if world > 1:
        divided["distributed_config"] = DistributedConfig(tp_size=world, tp_plan=plan(path, world))
    with hf.options(device="cpu", cache="off"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), **divided).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = tokenizer(prompt, return_tensors="pt")
    given = ids["input_ids"]
    begin = time.perf_counter()
    with torch.no_grad():
        found = model.generate(
            given,
            attention_mask=ids["attention_mask"],
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    seconds = time.perf_counter() - begin
    tokens = found.sequences[0, given.shape[1] :].tolist()
    gaps = [float(-step[0].float().topk(2).values.diff()) for step in found.logits]
    return Answer(tokens, gaps, tokenizer.decode(tokens, skip_special_tokens=True), hf.packed_bytes(model), seconds)


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One of the local processes; its answer goes into a file of ``folder``."""
    world = args.processes
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    torch.set_num_threads(threads)
    tf.set_num_threads(threads)
    # transformers asks for these, whoever has begun the group.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # whatever the machine's name resolves to
    # A file as meeting place: no port that could be taken.
    torch.distributed.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        found = answer(args.checkpoint, args.prompt, args.tokens, args.dtype, world)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(found)))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def together(args: argparse.Namespace) -> list[Answer]:
    """The answers of all local processes, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (args, folder), args.processes)
        return [
            Answer(**json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")))
            for rank in range(args.processes)
        ]


def show(title: str, found: Answer) -> None:
    rate = len(found.tokens) / found.seconds
    print(f"{title}: {found.nbytes:,} bytes of packed weights, {len(found.tokens)} tokens, {rate:.1f} a second")


def launched(args: argparse.Namespace) -> int:
    """One of the processes that torchrun has started."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        found = answer(args.checkpoint, args.prompt, args.tokens, args.dtype, world)
        show(f"rank {rank} of {world}", found)
        if rank == 0:
            print(found.text)
    finally:
        torch.distributed.destroy_process_group()
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a quantised model divided among processes.")
    parser.add_argument("checkpoint", nargs="?", type=Path, help="folder of a quantised checkpoint")
    parser.add_argument("prompt", nargs="?", default="Explain in a few sentences why the sky is blue.")
    parser.add_argument("--processes", type=int, default=2, help="here; torchrun's own with it (default: 2)")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer (default: 64)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of activations between layers; in bfloat16, sums in another order now and then pick another token "
        "(default: float32)",
    )
    args = parser.parse_args(arguments)
    if args.processes < 1 or args.tokens < 1:
        parser.error("--processes and --tokens: at least 1")
    if args.checkpoint is None:
        from generate_smollm2 import checkpoint

        args.checkpoint = checkpoint(Path(os.environ.get("TILEFUSE_CACHE", ROOT / "build")) / "smollm2", 8)
    return args


def main(arguments: list[str] | None = None) -> int:
    """The command; 1 if the processes together find other tokens than one alone, and no near tie explains it."""
    args = parse(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return launched(args)
    alone = answer(args.checkpoint, args.prompt, args.tokens, args.dtype)
    found = together(args)
    print(found[0].text)
    show("one process", alone)
    for rank, each in enumerate(found):
        show(f"rank {rank} of {args.processes}", each)
    if all(each.tokens == alone.tokens for each in found):
        print(f"the same {len(alone.tokens)} tokens from one process and from {args.processes}")
        return 0
    return max(differing(rank, each, alone) for rank, each in enumerate(found))


def differing(rank: int, found: Answer, alone: Answer) -> int:
    """Says where a rank's tokens leave those of one process; 1 if it is not between two that are as likely."""
    at = next((i for i, (a, b) in enumerate(zip(found.tokens, alone.tokens, strict=False)) if a != b), None)
    if at is None:
        return 0 if len(found.tokens) == len(alone.tokens) else 1
    gap = alone.gaps[at]
    print(f"rank {rank}: another token than one process after {at}, where the two likeliest are {gap:.3f} logits apart")
    return 0 if gap <= CLOSE else 1


if __name__ == "__main__":
    sys.exit(main())
