"""What can be known to be wrong with a run before its first block."""

from __future__ import annotations

import shutil
from pathlib import Path

from tilefuse.awq.families import BLOCKS, LINEARS, Family, family_of
from tilefuse.errors import DiskSpaceError, FormatError, QuantizationError, UnsupportedFormatError
from tilefuse.formats.checkpoint import Checkpoint
from tilefuse.formats.config import CONFIG

GROUPS = (128, 64, 32)
"""Group sizes that are taken, the usual first."""

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def check(checkpoint: Checkpoint, bits: int, group: int) -> tuple[Family, int]:
    """The family of a model and the number of its blocks, all of whose linear layers can be quantised.

    Args:
        checkpoint: The source.
        bits, group: See `tilefuse.awq.Options`.

    Raises:
        UnsupportedFormatError, FormatError, QuantizationError: As in `tilefuse.awq.quantize_checkpoint`.
    """
    where = checkpoint.path / CONFIG
    if not where.is_file():
        raise FormatError(f"{where} is missing: it says which architecture the tensors are of")
    family = family_of(checkpoint.config, str(where))
    if checkpoint.quantization or any(info.quantized for info in checkpoint.linears()):
        raise UnsupportedFormatError(
            f"{checkpoint.path} is quantised already ({checkpoint.format}); start from the full-precision checkpoint"
        )
    sizes = {name: _positive(checkpoint, name) for name in _SIZES if name in checkpoint.config}
    count = _positive(checkpoint, "num_hidden_layers")
    for index in range(count):
        _check_block(checkpoint, index, group, sizes)
    return family, count


def _positive(checkpoint: Checkpoint, name: str) -> int:
    value = checkpoint.config.get(name)
    if type(value) is not int or value < 1:
        raise FormatError(f"{checkpoint.path / CONFIG}: {name} = {value!r} is not a positive integer")
    return value


def _check_block(checkpoint: Checkpoint, index: int, group: int, sizes: dict[str, int]) -> None:
    infos = {linear: checkpoint.info(f"{BLOCKS}.{index}.{linear}") for linear in LINEARS}
    hidden, inner = sizes.get("hidden_size"), sizes.get("intermediate_size")
    heads, kv_heads = sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")
    queries, keys = infos["self_attn.q_proj"].n, infos["self_attn.k_proj"].n
    expected: dict[str, tuple[int | None, int | None]] = {
        "self_attn.q_proj": (hidden, None),
        "self_attn.k_proj": (hidden, queries * kv_heads // heads if heads and kv_heads else None),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    for linear, info in infos.items():
        for what, found, size in zip(("input", "output"), (info.k, info.n), expected[linear], strict=True):
            if size is not None and found != size:
                raise FormatError(
                    f"layer {info.name!r} has {found} {what} channels, and by {checkpoint.path / CONFIG} it has "
                    f"{size}: they are not of one model"
                )
        if group != -1 and info.k % group:
            fitting = [size for size in GROUPS if info.k % size == 0]
            raise QuantizationError(
                f"group = {group}: layer {info.name!r} has K = {info.k} input channels, not a multiple; "
                + (f"take a group size of {fitting[0]}" if fitting else "no group size that is taken divides it")
            )
        if info.n % 8:
            raise QuantizationError(f"layer {info.name!r} has N = {info.n} output channels, not a multiple of 8")


def check_space(
    checkpoint: Checkpoint, out: Path, bits: int, group: int, shard_bytes: int, done: int, count: int
) -> None:
    """Refuse what the disk cannot hold: finished blocks, the new checkpoint, and one of its files twice.

    Args:
        checkpoint: The source.
        out: The folder to make.
        bits, group, shard_bytes: See `tilefuse.awq.Options`.
        done: Blocks that are on the disk already.
        count: Blocks in all.

    Raises:
        DiskSpaceError: It has less free.
    """
    layers = kept = 0
    for index in range(count):
        for linear in LINEARS:
            info = checkpoint.info(f"{BLOCKS}.{index}.{linear}")
            scales = info.n * (1 if group == -1 else info.k // group)
            layers += info.k * info.n * bits // 8 + scales * 2 + (scales // 2 if bits == 4 else 0)
            kept -= checkpoint.tensor(f"{info.name}.weight").nbytes
    kept += sum(checkpoint.tensor(name).nbytes for name in checkpoint.tensors())
    total = layers + kept
    needed = layers * (count - done) // count + total + min(total, shard_bytes)
    place = next(folder for folder in out.parents if folder.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DiskSpaceError(
            f"{out}: {needed / 1e9:.2f} GB are needed while quantising, {total / 1e9:.2f} GB of them for good, and "
            f"{place} has {free / 1e9:.2f} GB free; free some or choose another folder"
        )
