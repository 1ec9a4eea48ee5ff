"""The whole way from one checkpoint to the other: checks, blocks one at a time, files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tilefuse.awq.blocks import Block, BlockStore
from tilefuse.awq.checks import GROUPS, check, check_space
from tilefuse.awq.families import BLOCKS, LINEARS
from tilefuse.convert import fingerprint
from tilefuse.errors import DiskSpaceError, FormatError, QuantizationError
from tilefuse.formats import autoawq_writer, compressed_tensors_writer, open_checkpoint
from tilefuse.formats.checkpoint import Checkpoint
from tilefuse.formats.config import CONFIG
from tilefuse.formats.output import DEFAULT_SHARD_BYTES, Shards, new_directory, refuse_existing, write_json
from tilefuse.quantize import quantize_linear
from tilefuse.quantized import QuantizedLinear

Array = npt.NDArray[Any]

Progress = Callable[[str, int, int], None]
"""Called as (what is being done, blocks done, blocks in all)."""

_OTHER_FILES = (
    "*.json",
    "*.jinja",
    "*.model",
    "*.txt",
    "LICENSE*",
    "NOTICE*",
)
"""What is copied: tokenizer, generation settings, chat template, licence."""

_NOT_COPIED = ("config.json", "*.safetensors.index.json", "*.bin.index.json", "quant*_config.json")


@dataclass(frozen=True)
class Options:
    """How to quantise.

    Attributes:
        bits: 4 (AutoAWQ's `gemm` layout, with zero points) or 8 (compressed-tensors' `pack-quantized`, symmetric).
        group: Input channels that share a scale, 32, 64 or 128; -1, with 8 bits, for one scale an output channel.
        method: ``"awq"``: input channels are scaled by a power of their mean magnitude before rounding, and weights
            clipped, both found by search (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023); needs torch
            and transformers. ``"rtn"``: round to nearest; needs neither.
        calibration: Text for ``"awq"``; None for the one that comes with the package.
        device: torch device for ``"awq"``.
        shard_bytes: Start another file rather than let one exceed this many bytes of tensors.

    Raises:
        QuantizationError: A value is not taken; the message says which are.
    """

    bits: int = 4
    group: int = 128
    method: Literal["awq", "rtn"] = "awq"
    calibration: str | None = None
    device: str = "cpu"
    shard_bytes: int = DEFAULT_SHARD_BYTES

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise QuantizationError(f"bits = {self.bits!r}: 4 and 8 are taken")
        groups = GROUPS if self.bits == 4 else (*GROUPS, -1)
        if self.group not in groups:
            raise QuantizationError(
                f"group = {self.group!r}: with {self.bits} bits, {', '.join(map(str, groups))} are taken"
            )
        if self.method not in ("awq", "rtn"):
            raise QuantizationError(f"method = {self.method!r}: 'awq' and 'rtn' are taken")
        if self.shard_bytes < 1:
            raise QuantizationError(f"shard_bytes = {self.shard_bytes!r}: at least 1 is needed")


@dataclass(frozen=True)
class Quantized:
    """What `quantize_checkpoint` did.

    Attributes:
        path: The checkpoint written.
        layers: Linear layers quantised.
        resumed: Blocks that an earlier, interrupted run had done.
        nbytes: Bytes of all tensors.
        source_nbytes: Bytes of all tensors of the source.
    """

    path: Path
    layers: int
    resumed: int
    nbytes: int
    source_nbytes: int


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: Options | None = None,
    *,
    resume: bool = True,
    progress: Progress | None = None,
) -> Quantized:
    """Quantises the linear layers of a Hugging Face checkpoint and writes another one; memory holds about one block.

    The new folder appears whole or not at all. Blocks that are done are kept in ``<out>.partial``, where the same call
    goes on after an interruption, provided that the source and the options are the same. Embeddings and the output head
    stay as they are, and so do norms unless scales are folded into them.

    Args:
        source: Folder of a checkpoint with float weights: safetensors, sharded or not, and ``config.json``; for
            ``method="awq"`` its tokenizer too.
        out: Folder to make.
        options: See `Options`.
        resume: Whether to go on from an interrupted run; otherwise start anew.
        progress: See `Progress`.

    Raises:
        UnsupportedFormatError: The model's architecture is not known, or the source is quantised already.
        QuantizationError: The group size does not divide the input channels of a layer, or a weight is not finite.
        DiskSpaceError: The disk has no room for the new checkpoint and the finished blocks.
        FormatError: The source is damaged, lacks a file or a tensor, or its settings and tensors are not of one model;
            or another process is quantising to ``out``.
        FileExistsError: ``out`` exists and is not an empty folder.
        ImportError: ``method="awq"`` without torch or transformers; the message says how to install them.
    """
    source, out, options = Path(source), Path(out), options or Options()
    refuse_existing(out)
    if source.is_file():
        raise FormatError(f"{source}: a file; the folder of a checkpoint is needed, config.json included")
    checkpoint = open_checkpoint(source)
    family, count = check(checkpoint, options.bits, options.group)
    place = out.resolve()
    work = place.with_name(place.name + ".partial")
    report = progress or (lambda what, done, total: None)
    store = BlockStore(work, _key(source, options), resume=resume)
    resumed = store.count()
    try:
        check_space(checkpoint, place, options.bits, options.group, options.shard_bytes, resumed, count)
        if options.method == "awq":
            from tilefuse.awq.activations import scale_blocks

            scale_blocks(checkpoint, family, options, store, report)
        else:
            for index in range(count):
                report("quantising", index, count)
                if index not in store:
                    store.write(index, _rounded_block(checkpoint, index, options))
        report("writing", count, count)
        nbytes = _assemble(checkpoint, place, options, store, count)
    except BaseException as error:
        done = store.count()
        store.close(keep=done > 0)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            kept = f"; {done} of {count} blocks are in {work}, where the same command goes on" if done else ""
            raise DiskSpaceError(f"{out}: no space left on the disk; free some{kept}") from error
        raise
    store.close(keep=False)
    source_nbytes = sum(checkpoint.tensor(name).nbytes for name in checkpoint.tensors())
    return Quantized(out, count * len(LINEARS), resumed, nbytes, source_nbytes)


def _key(source: Path, options: Options) -> str:
    chosen = asdict(options)
    del chosen["device"], chosen["shard_bytes"]  # no part of a block depends on them
    return hashlib.sha256(json.dumps([1, fingerprint(source), chosen]).encode()).hexdigest()


def _rounded_block(checkpoint: Checkpoint, index: int, options: Options) -> Block:
    tensors: Block = {}
    for linear in LINEARS:
        name = f"{BLOCKS}.{index}.{linear}"
        bias = checkpoint.tensor(f"{name}.bias") if checkpoint.info(name).bias else None
        tensors |= encode(quantize(name, checkpoint.dense(name), bias, options, scale_dtype(checkpoint, options)))
    return tensors


def scale_dtype(checkpoint: Checkpoint, options: Options) -> Literal["bfloat16", "float16"]:
    """AutoAWQ's scales are float16; those of compressed-tensors are of the model's dtype."""
    if options.bits == 4:
        return "float16"
    dtype = checkpoint.tensor(f"{BLOCKS}.0.{LINEARS[0]}.weight").dtype
    return "float16" if dtype == np.float16 else "bfloat16"


def quantize(
    name: str, w: Array, bias: Array | None, options: Options, scales: Literal["bfloat16", "float16"]
) -> QuantizedLinear:
    """One layer, w [K, N], rounded to nearest as ``options`` say."""
    try:
        return quantize_linear(
            w,
            bits=options.bits,
            group=options.group,
            symmetric=options.bits == 8,
            scale_dtype=scales,
            name=name,
            bias=bias,
        )
    except QuantizationError as error:
        raise error if name in str(error) else QuantizationError(f"layer {name!r}: {error}") from None


def encode(layer: QuantizedLinear) -> Block:
    """The tensors of a layer in the format that goes with its bits."""
    return autoawq_writer.encode(layer) if layer.bits == 4 else compressed_tensors_writer.encode(layer)


def _assemble(checkpoint: Checkpoint, out: Path, options: Options, store: BlockStore, count: int) -> int:
    """Write the new folder from the blocks and what the source has besides; returns the bytes of its tensors."""
    replaced = {
        f"{BLOCKS}.{index}.{linear}.{part}"
        for index in range(count)
        for linear in LINEARS
        for part in ("weight", "bias")
    }
    nbytes = 0
    extras: dict[str, Array] = {}
    with new_directory(out) as partial, contextlib.closing(Shards(partial, options.shard_bytes)) as shards:
        for index in range(count):
            block = store.read(index)
            shards.add_all(block)
            replaced |= block.keys()
            nbytes += sum(array.nbytes for array in block.values())
        extras = {name: checkpoint.tensor(name) for name in checkpoint.tensors() if name not in replaced}
        shards.add_all(extras)
        nbytes += sum(array.nbytes for array in extras.values())
        shards.finish()
        config = dict(checkpoint.config)
        left = autoawq_writer.unquantized(extras)
        if options.bits == 4:
            config["quantization_config"] = {
                **autoawq_writer.quantization_config(options.bits, options.group),
                "modules_to_not_convert": left or None,
            }
        else:
            group = None if options.group == -1 else options.group
            # A tied head has no tensor, but is a layer all the same.
            ignored = sorted({*left, "lm_head"})
            config["quantization_config"] = compressed_tensors_writer.quantization_config(options.bits, group, ignored)
        write_json(partial / CONFIG, config)
        for file in _other_files(checkpoint.path):
            shutil.copyfile(file, partial / file.name)
    return nbytes


def _other_files(folder: Path) -> list[Path]:
    found = {file for pattern in _OTHER_FILES for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if not any(file.match(pattern) for pattern in _NOT_COPIED))
