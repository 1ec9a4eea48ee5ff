"""A configuration on the emulated array, and what its firmware makes of a run's arguments."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import cast

import numpy as np

from tilefuse import arch
from tilefuse.emulator import instructions, iron
from tilefuse.emulator.instructions import InstructionError, Instructions
from tilefuse.emulator.npu.memory import Memory
from tilefuse.emulator.session import program
from tilefuse.emulator.timing import Report
from tilefuse.emulator.xclbin_file import Image
from tilefuse.errors import DataflowError
from tilefuse.plan import Plan

OPCODE = 3
"""What argument 0 must be: run the instructions (mlir-aie's hosts)."""

FIRST_BUFFER = 3
"""Index of the first host buffer among a kernel's arguments."""

_KEPT = 64
"""Decoded streams that a context keeps."""

Arguments = Mapping[int, Memory | int]


class Misuse(DataflowError):
    """A run that hangs the array: a missing or too small buffer, or another configuration's instructions."""


class Loaded:
    """A context's configuration on the array. All but the constructor runs on the device's thread."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self._array: iron.Configuration | None = None
        self._programs: OrderedDict[bytes, tuple[Instructions, iron.Design]] = OrderedDict()
        self._latest: tuple[weakref.ref[Memory], int, bytes] | None = None

    def unload(self) -> None:
        """Takes it off the array."""
        self._array = None
        self._programs.clear()
        self._latest = None

    def run(self, arguments: Arguments) -> Report:
        """Runs what the arguments say.

        Raises:
            InstructionError: They don't point at instructions that can be read.
            TileFuseError: The array hangs.
        """
        stream, design = self._program(self._code(arguments))
        if stream.configuration != self.image.configuration:
            raise Misuse(
                f"the instructions are for {stream.configuration.name}, and the context has "
                f"{self.image.configuration.name}"
            )
        hosts = [
            self._host(arguments, FIRST_BUFFER + number, name, words)
            for number, (name, words) in enumerate(stream.sizes.items())
        ]
        if self._array is None:
            self._array = iron.load(design)
        try:
            return self._array.run(design, *(memory.device[: arch.WORD * words] for memory, words in hosts))
        finally:
            for memory, _ in hosts:
                memory.version += 1

    def _code(self, arguments: Arguments) -> bytes:
        """The instructions on the device's side of argument 1."""
        if arguments.get(0) != OPCODE:
            raise InstructionError(f"argument 0, the opcode, is {_said(arguments, 0)}; the firmware knows {OPCODE}")
        code, count = arguments.get(1), arguments.get(2)
        if not isinstance(code, Memory):
            raise InstructionError(f"argument 1, the instructions, is {_said(arguments, 1)}; a buffer is needed")
        if self._latest is not None and self._latest[0]() is code and self._latest[1] == code.version:
            found = self._latest[2]
        else:
            words = code.device[: code.size - code.size % arch.WORD].view(np.uint32)
            total = instructions.words_of(words[:16])
            if total > words.size:
                raise InstructionError(f"{total} words of instructions in a buffer of {words.size}")
            found = words[:total].tobytes()
            self._latest = (weakref.ref(code), code.version, found)
        if count not in (len(found), len(found) // arch.WORD):
            raise InstructionError(
                f"argument 2 is {_said(arguments, 2)}; the instructions have {len(found)} bytes, "
                f"{len(found) // arch.WORD} words"
            )
        return found

    def _program(self, code: bytes) -> tuple[Instructions, iron.Design]:
        known = self._programs.get(code)
        if known is not None:
            self._programs.move_to_end(code)
            return known
        stream = instructions.decode(np.frombuffer(code, np.uint32))
        # A design asks no more of a plan than a stream has.
        made = self._programs[code] = stream, program(cast(Plan, stream))
        if len(self._programs) > _KEPT:
            self._programs.popitem(last=False)
        return made

    def _host(self, arguments: Arguments, index: int, name: str, words: int) -> tuple[Memory, int]:
        memory = arguments.get(index)
        if not isinstance(memory, Memory):
            raise Misuse(f"argument {index}, the buffer of {name}, is {_said(arguments, index)}: no buffer lies there")
        if memory.size < arch.WORD * words:
            raise Misuse(
                f"argument {index}, the buffer of {name}, has {memory.size} bytes; the instructions move "
                f"{arch.WORD * words}"
            )
        return memory, words


def _said(arguments: Arguments, index: int) -> str:
    value = arguments.get(index)
    return "not set" if value is None else "a buffer" if isinstance(value, Memory) else str(value)
