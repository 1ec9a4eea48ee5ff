"""The emulated device's instruction streams: a plan's tasks as words, in the place of the command processor's code.

Like a real one, a stream is of one configuration, tells which host buffers are moved where and when, and knows nothing
of the parameters: these are at the head of the activations. Words, unsigned of 32 bits, little-endian:

====================  ==================================================================================================
0 to 3                `MAGIC`, `VERSION`, words in all, CRC-32 of all words from 4 on
4 to 6                words of the buffers x, w and y
7 to 9                segments, transfers, words of the configuration
then                  the configuration: JSON, padded with spaces
then                  transfers of each segment
then, each transfer   stream (0 to 2 for x, w, y) << 16 | index, offset, sizes[4], strides[4]
====================  ==================================================================================================
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.configurations import Configuration, Op, Weights
from tilefuse.descriptors import Segment, Tap, Transfer
from tilefuse.errors import DeviceError, PlanError
from tilefuse.plan import Plan

Words = npt.NDArray[np.uint32]

MAGIC = 0x53554654
"""The bytes ``TFUS``."""

VERSION = 1

_HEAD = 10
_SUMMED = 4
"""The first word that the checksum covers."""
_TRANSFER = 10
_STREAMS = ("x", "w", "y")
_MOST_INDEX = 2 * 8
"""Streams of a kind at most: two weight streams for each of eight columns."""


class InstructionError(DeviceError):
    """Words that are no instruction stream, or one that is damaged or of another version."""


@dataclass(frozen=True)
class Instructions:
    """What a stream tells: as much of a plan as a design asks for."""

    configuration: Configuration
    segments: tuple[Segment, ...]
    x_words: int
    w_words: int
    y_words: int

    @property
    def sizes(self) -> dict[str, int]:
        """Words of each host buffer, in the order of the kernel's arguments."""
        return {"x": self.x_words, "w": self.w_words, "y": self.y_words}


def encode(plan: Plan | Instructions) -> Words:
    """The instruction stream of ``plan``: uint32 [words]."""
    text = json.dumps(configuration_document(plan.configuration), sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    counts = [len(segment.transfers) for segment in plan.segments]
    rows = [_row(transfer) for segment in plan.segments for transfer in segment.transfers]
    configuration = np.frombuffer(text, np.uint32)
    body = np.concatenate(
        [
            np.array([plan.x_words, plan.w_words, plan.y_words], np.uint32),
            np.array([len(counts), len(rows), configuration.size], np.uint32),
            configuration,
            np.array(counts, np.uint32),
            np.array(rows, np.uint32).reshape(-1),
        ]
    )
    return np.concatenate([np.array([MAGIC, VERSION, _SUMMED + body.size, _sum(body)], np.uint32), body])


def words_of(head: npt.NDArray[Any]) -> int:
    """Words of the stream that begins with ``head``.

    Raises:
        InstructionError: It is no stream of this version.
    """
    if head.size < _HEAD:
        raise InstructionError(f"{head.size} words are no instruction stream; the head alone has {_HEAD}")
    if int(head[0]) != MAGIC:
        raise InstructionError(f"an instruction stream of the emulator begins with {MAGIC:#x}; this one {head[0]:#x}")
    if int(head[1]) != VERSION:
        raise InstructionError(f"an instruction stream of version {head[1]}; this tilefuse reads {VERSION}")
    return int(head[2])


def decode(words: npt.NDArray[Any]) -> Instructions:
    """The stream in ``words``, uint32 or int32 [words].

    Raises:
        InstructionError: See there; or a task is one that the array can't do.
    """
    if words.dtype not in (np.uint32, np.int32) or words.ndim != 1:
        raise InstructionError(f"an instruction stream is uint32 [words]; this is {words.dtype} {list(words.shape)}")
    words = np.ascontiguousarray(words).view(np.uint32)
    total = words_of(words)
    if total != words.size:
        raise InstructionError(f"an instruction stream of {total} words; {words.size} are given")
    if int(words[3]) != _sum(words[_SUMMED:]):
        raise InstructionError("an instruction stream is damaged: its checksum differs")
    x_words, w_words, y_words, segments, transfers, configuration = (int(word) for word in words[_SUMMED:_HEAD])
    expected = _HEAD + configuration + segments + _TRANSFER * transfers
    if expected != total:
        raise InstructionError(f"an instruction stream of {total} words, whose counts come to {expected}")
    end = _HEAD + configuration
    counts = words[end : end + segments].tolist()
    if sum(counts) != transfers:
        raise InstructionError(f"an instruction stream of {transfers} transfers, whose segments have {sum(counts)}")
    sizes = {"x": x_words, "w": w_words, "y": y_words}
    decoded = (_transfer(row, sizes) for row in words[end + segments :].reshape(-1, _TRANSFER).tolist())
    return Instructions(
        read_configuration(words[_HEAD:end].tobytes()),
        tuple(Segment(tuple(islice(decoded, count))) for count in counts),
        x_words,
        w_words,
        y_words,
    )


def configuration_document(configuration: Configuration) -> dict[str, Any]:
    """A configuration as JSON takes it."""
    return asdict(configuration)


def read_configuration(text: bytes | Mapping[str, Any]) -> Configuration:
    """The configuration of a document, or of its JSON.

    Raises:
        InstructionError: It is none.
    """
    try:
        values = dict(json.loads(text) if isinstance(text, bytes) else text)
        values["op"], values["weights"] = Op(values["op"]), Weights(**values["weights"])
        _check_types(values)
        configuration = Configuration(**values)
        assert configuration.name
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, PlanError) as error:
        raise InstructionError(f"a configuration that is none ({type(error).__name__}: {error})") from None
    return configuration


def _check_types(values: dict[str, Any]) -> None:
    """Raises TypeError for what isn't of its field's type, which the configuration itself takes as given."""
    weights: Weights = values["weights"]
    numbers = {name: value for name, value in values.items() if name not in ("op", "weights")}
    numbers |= {"tile_bytes": weights.tile_bytes, "bits": weights.bits, "groups": weights.groups}
    for name, value in numbers.items():
        if type(value) is not int or value < 0:
            raise TypeError(f"{name} is {value!r}")
    if type(weights.tag) is not str or type(weights.minima) is not bool:
        raise TypeError(f"the weights are {weights.tag!r}")


def _row(transfer: Transfer) -> tuple[int, ...]:
    tap = transfer.tap
    return (_STREAMS.index(transfer.stream) << 16 | transfer.index, tap.offset, *tap.sizes, *tap.strides)


def _transfer(row: list[int], sizes: dict[str, int]) -> Transfer:
    stream, index = divmod(row[0], 1 << 16)
    if stream >= len(_STREAMS) or index >= _MOST_INDEX:
        raise InstructionError(f"an instruction stream moves stream {stream}, number {index}; there is none")
    name = _STREAMS[stream]
    tap = Tap(row[1], (row[2], row[3], row[4], row[5]), (row[6], row[7], row[8], row[9]))
    try:
        tap.check(f"a task of {name}{index}", sizes[name])
    except PlanError as error:
        raise InstructionError(f"an instruction stream has {error}") from None
    return Transfer(name, index, tap)


def _sum(words: Words) -> int:
    return zlib.crc32(words.tobytes())
