"""Access patterns of the host's buffers, and the descriptors that a shim makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from tilefuse import arch
from tilefuse.emulator.engine import Bytes
from tilefuse.emulator.values import ArrayType, known
from tilefuse.errors import ArrayLimitError, DataflowError

_BLOCK = 1 << 20
"""Bytes that are gathered or scattered at a time."""


class TensorAccessPattern:
    """``sizes`` and ``strides`` in elements, the outermost dimension first, from ``offset`` on."""

    def __init__(self, tensor_dims: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        self.tensor_dims = list(tensor_dims)
        self.offset = offset = known(offset, "the offset of a pattern")
        if not self.tensor_dims or min(self.tensor_dims) < 1:
            raise ValueError(f"tensor dimensions are 1 or more, not {self.tensor_dims}")
        if not 0 <= offset < prod(self.tensor_dims):
            raise ValueError(f"offset {offset} lies outside a tensor of {prod(self.tensor_dims)} elements")
        if not sizes or len(sizes) != len(strides):
            raise ValueError(f"as many sizes as strides, one at least: {list(sizes)} and {list(strides)}")
        if min(sizes) < 1 or min(strides) < 0:
            raise ValueError(f"sizes are 1 or more, strides 0 or more: {list(sizes)} and {list(strides)}")
        self.sizes = [known(size, "a size of a pattern") for size in sizes]
        self.strides = [known(stride, "a stride of a pattern") for stride in strides]
        for i in range(len(self.sizes) - 1):  # The stride of an outer dimension of one step is never used.
            if self.sizes[i] != 1:
                break
            self.strides[i] = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorAccessPattern) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"offset {self.offset}, sizes {self.sizes}, strides {self.strides}"


@dataclass(frozen=True)
class Descriptor:
    """What a shim's descriptor says, in words, the repeat first and the innermost dimension last."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    linear: bool
    """Whether a repeat is one run; then all but the first and the last size are 1."""

    @property
    def run(self) -> int:
        """Bytes of a repeat."""
        return prod(self.sizes[1:]) * arch.WORD

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return prod(self.sizes) * arch.WORD


def shim_descriptor(
    what: str, type: ArrayType, offset: int, sizes: Sequence[int], strides: Sequence[int]
) -> Descriptor:
    """The descriptor of a pattern (elements of ``type``) of a host buffer.

    Raises:
        ArrayLimitError: A shim can't say it.
        DataflowError: It reaches outside the buffer.
    """
    width = type.dtype.itemsize
    pattern = f"{what}: sizes {list(sizes)}, strides {list(strides)} of {type}"
    if width > arch.WORD:
        raise ArrayLimitError(f"{pattern}: elements of {width} bytes; at most {arch.WORD}, so view the buffer as int32")
    if len(sizes) != len(strides):
        raise ArrayLimitError(f"{pattern}: as many sizes as strides")
    if len(sizes) > 4:
        raise ArrayLimitError(f"{pattern}: {len(sizes)} dimensions; a shim has 3 and the repeat")
    pad = 4 - len(sizes)
    size = [1] * pad + [known(n, f"{what}: a size") for n in sizes]
    stride = [0] * pad + [known(n, f"{what}: a stride") for n in strides]
    offset = known(offset, f"{what}: the offset")
    if any(n < 1 for n in size):
        raise ArrayLimitError(f"{pattern}: sizes must be above 0")
    if size[3] * width % arch.WORD:
        raise ArrayLimitError(
            f"{pattern}: runs of {size[3] * width} bytes; they must be multiples of {arch.WORD} bytes"
        )
    if offset * width % arch.WORD:
        raise ArrayLimitError(f"{pattern}: it starts at byte {offset * width}, which is no multiple of {arch.WORD}")
    for i in (1, 2, 3):
        if size[i] > 1 and stride[i] < 1:
            raise ArrayLimitError(
                f"{pattern}: stride {stride[i]} of dimension {i}; only the outermost may repeat with 0"
            )
    if stride[0] < 0:
        raise ArrayLimitError(f"{pattern}: stride {stride[0]} is negative")
    for i in range(4):
        if size[i] > 1 and not (i == 3 and stride[i] == 1) and stride[i] * width % arch.WORD:
            raise ArrayLimitError(
                f"{pattern}: stride {stride[i]} is {stride[i] * width} bytes, which is no multiple of {arch.WORD}"
            )
    if size[3] > 1 and stride[3] != 1 and width < arch.WORD:
        raise ArrayLimitError(
            f"{pattern}: innermost stride {stride[3]} of elements of {width} bytes; nothing smaller than {arch.WORD} "
            "bytes can be picked"
        )
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if offset < 0 or last >= type.size:
        raise DataflowError(f"{pattern}, offset {offset}: it reaches element {last} of a buffer of {type.size}")
    linear = stride[3] == 1 or size[3] == 1
    inner = size[3]
    for i in (2, 1):
        linear = linear and (size[i] == 1 or stride[i] == inner)
        inner *= size[i]
    _check_shim_fields(pattern, size, stride, width, linear)
    words = [n * width // arch.WORD for n in stride]
    if linear:
        return Descriptor(
            offset * width // arch.WORD, (size[0], 1, 1, inner * width // arch.WORD), (words[0], 0, 0, 1), True
        )
    innermost = (size[3] * width // arch.WORD, 1) if stride[3] == 1 else (size[3], words[3])
    return Descriptor(offset * width // arch.WORD, (*size[:3], innermost[0]), (*words[:3], innermost[1]), False)


def _check_shim_fields(pattern: str, size: list[int], stride: list[int], width: int, linear: bool) -> None:
    """Raises unless the sizes and strides fit a shim's descriptor. A linear transfer has no inner sizes."""
    limits = arch.SHIM
    if size[0] > limits.repeat:
        raise ArrayLimitError(
            f"{pattern}: {size[0]} repeats; a descriptor of a shim repeats up to {limits.repeat} times: issue several"
        )
    if not linear:
        for i, words in ((3, size[3] * width // arch.WORD), (2, size[2])):
            if words > limits.size:
                unit = "words" if i == 3 else "steps"
                raise ArrayLimitError(
                    f"{pattern}: {words} {unit} in dimension {i}; a shim counts up to {limits.size}: factor it, or "
                    "make the pattern contiguous"
                )
    for i in range(4):
        words = stride[i] * width // arch.WORD
        if size[i] > 1 and words > limits.stride and not (linear and i > 0):
            raise ArrayLimitError(
                f"{pattern}: a stride of {words} words in dimension {i}; a shim's are {limits.stride} at most"
            )


class Walker:
    """Goes through the bytes of a descriptor in order, in a buffer of the host or in the part of it that is there."""

    def __init__(self, descriptor: Descriptor, memory: Bytes | None) -> None:
        self._d = descriptor
        self._memory = memory
        self._at = 0
        self._stage: Bytes | None = None
        self._staged = -1
        """Number of the block in `_stage`."""
        self._outer = 1 if descriptor.linear else _outer_dimensions(descriptor.sizes)
        """Dimensions to step through; what is left of them is a block."""
        self._block = prod(descriptor.sizes[self._outer :]) * arch.WORD

    def _start(self, block: int) -> int:
        """Where a block begins, in words."""
        start = self._d.offset
        for i in reversed(range(self._outer)):
            block, step = divmod(block, self._d.sizes[i])
            start += step * self._d.strides[i]
        return start

    def _view(self, block: int) -> npt.NDArray[np.uint32] | None:
        """The strided view of a block, None where the buffer ends before."""
        assert self._memory is not None
        sizes, strides = self._d.sizes[self._outer :], self._d.strides[self._outer :]
        span = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) + 1
        start = self._start(block) * arch.WORD
        part = self._memory[start : start + span * arch.WORD]
        if part.nbytes < span * arch.WORD:
            return None
        return np.lib.stride_tricks.as_strided(part.view(np.uint32), sizes, tuple(s * arch.WORD for s in strides))

    def read(self, nbytes: int) -> Bytes | None:
        """The next bytes, None where the buffer is not there or ends before."""
        at = self._at
        self._at = at + nbytes
        if self._memory is None:
            return None
        parts = []
        while nbytes:
            block, within = divmod(at, self._block)
            step = min(nbytes, self._block - within)
            part = self._read_block(block, within, step)
            if part is None:
                return None
            parts.append(part)
            at += step
            nbytes -= step
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read_block(self, block: int, within: int, nbytes: int) -> Bytes | None:
        assert self._memory is not None
        if self._d.linear:
            start = self._start(block) * arch.WORD + within
            part = self._memory[start : start + nbytes]
            return part if part.nbytes == nbytes else None
        if self._stage is None or self._staged != block:
            view = self._view(block)
            if view is None:
                return None
            self._stage = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
            self._staged = block
        return self._stage[within : within + nbytes]

    def write(self, data: Bytes | None, nbytes: int) -> None:
        """Takes the next bytes; nothing where there are none or the buffer is not there."""
        at = self._at
        self._at = at + nbytes
        if self._memory is None or data is None:
            return
        done = 0
        while done < nbytes:
            block, within = divmod(at + done, self._block)
            step = min(nbytes - done, self._block - within)
            self._write_block(block, within, data[done : done + step])
            done += step

    def _write_block(self, block: int, within: int, chunk: Bytes) -> None:
        assert self._memory is not None
        if self._d.linear:
            start = self._start(block) * arch.WORD + within
            self._memory[start : start + chunk.nbytes] = chunk
            return
        if self._stage is None or self._staged != block:
            self._stage = np.empty(self._block, np.uint8)
            self._staged = block
        self._stage[within : within + chunk.nbytes] = chunk
        if within + chunk.nbytes == self._block:
            view = self._view(block)
            assert view is not None
            view[...] = self._stage.view(np.uint32).reshape(view.shape)


def _outer_dimensions(sizes: Sequence[int]) -> int:
    """How many dimensions to step through so that what is left fits `_BLOCK`."""
    for outer in range(len(sizes) - 1):
        if prod(sizes[outer:]) * arch.WORD <= _BLOCK:
            return outer
    return len(sizes) - 1
