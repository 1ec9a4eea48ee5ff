"""One core's part in attention on the array, in NumPy and with the kernels of the host build: what the designs do with
a query tile, call by call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.emulator import kernels
from tilefuse.emulator.kernels import EntryPoint, Slots
from tilefuse.tilemix import npu_operands
from tilefuse.tilemix.npu_operands import KEYS, ROWS
from tilefuse.tilemix.reference import Smoothing, quantise_keys, quantise_rows, score_factor, to_bf16

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

NO_WINDOW = np.iinfo(np.int32).max
FREE = 64
"""Bytes before a core's queries and behind keys: header and meta."""


@dataclass(frozen=True)
class Masks:
    """What rows see: row i stands at key ``position + i``."""

    position: int = 0
    causal: bool = False
    window: int | None = None


def aligned(content: Array) -> Bytes:
    """A copy of ``content``'s bytes that kernels take."""
    raw = np.ascontiguousarray(content).view(np.uint8).reshape(-1)
    block = np.zeros(raw.size + 64, np.uint8)
    start = -block.ctypes.data % 64
    block[start : start + raw.size] = raw
    return block[start : start + raw.size]


class Core:
    """32 query rows of one head, and all keys that they may meet.

    Args:
        q: [32, d].
        k, v: [L, d].
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        masks: Masks | None = None,
        scale: float | None = None,
        smooth: Smoothing = "block",
    ) -> None:
        self.d = q.shape[1]
        self.length = len(k)
        self.tiles = -(-self.length // KEYS)
        self.masks = masks or Masks()
        self.factor = score_factor(self.d**-0.5 if scale is None else scale)
        self.rows, self.keys = quantise_rows(q), quantise_keys(k, smooth)
        self.kernel = kernels.get(f"attention_bf16_d{self.d}_{ROWS}x{KEYS}")
        self.q = self._queries(q)
        self._k, self._v = (self._padded(to_bf16(x)) for x in (k, v))
        self._codes = self._padded(self.keys.codes)
        self.buffers = {
            argument.name: argument.empty()
            for entry in self.kernel.entry_points.values()
            for argument in entry.arguments
            if argument.name in ("scores", "state", "p", "o", "y")
        }

    def entry(self, stem: str) -> EntryPoint:
        """A function of the kernel."""
        return self.kernel.entry_points[stem]

    def _padded(self, x: Array) -> Array:
        out = np.zeros((self.tiles, KEYS, self.d), x.dtype)
        out.reshape(-1, self.d)[: self.length] = x
        return out

    def _queries(self, q: Array) -> Bytes:
        head = np.zeros(FREE // 4, np.int32)
        window = NO_WINDOW if self.masks.window is None else self.masks.window
        head[2:7] = self.masks.position, self.length, window, 0, self.masks.causal
        scales = (self.rows.scales * self.factor).view(np.uint8)
        rest = npu_operands.query_rest(to_bf16(q), self.rows.codes, self.rows.scales)
        return aligned(np.concatenate([head.view(np.uint8), scales, npu_operands.query_codes(self.rows.codes), rest]))

    def _object(self, payload: Bytes, tile: int, scale: float = 0) -> Bytes:
        meta = np.zeros(FREE // 4, np.int32)
        meta[0] = KEYS * tile
        meta[1:2].view(np.float32)[0] = scale
        return aligned(np.concatenate([payload, meta.view(np.uint8)]))

    def calls(self, int8: Iterable[int], wide: Iterable[int]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The calls for these tiles, INT8 ones first: (entry point, arguments)."""
        b = self.buffers
        yield "begin", (b["state"], b["o"])
        for tile in int8:
            payload = npu_operands.int8_keys(self._codes[tile], self.keys.means[tile])
            keys = self._object(payload, tile, float(self.keys.scales[tile]))
            yield "scores_int8", (self.q, keys, b["scores"])
            yield from self._weigh(tile)
        for tile in wide:
            for half, payload in enumerate(npu_operands.wide_keys(self._k[tile])):
                yield "scores_bf16", (self.q, self._object(payload, tile), half, b["scores"])
            yield from self._weigh(tile)

    def _weigh(self, tile: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
        b = self.buffers
        yield "softmax", (b["scores"], b["state"], b["p"])
        for half, payload in enumerate(npu_operands.values(self._v[tile])):
            yield "values", (b["p"], self._object(payload, tile), half, b["o"])

    def run(self, int8: Iterable[int] = (), wide: Iterable[int] = ()) -> tuple[Float32, Float32]:
        """Outputs [32, d] and lse [32] after these tiles."""
        for stem, arguments in self.calls(int8, wide):
            self.entry(stem)(*arguments)
        return self.results()

    def results(self) -> tuple[Float32, Float32]:
        """Outputs [32, d] and lse [32] as they are."""
        b = self.buffers
        pieces = []
        for block in range(ROWS // 8):
            self.entry("store")(b["o"], b["state"], block, b["y"])
            pieces.append(npu_operands.results(b["y"].copy(), self.d))
        out, maxima, sums = (np.concatenate(part) for part in zip(*pieces, strict=True))
        return out.astype(np.float32), npu_operands.lse(maxima, sums)

    def raw_scores(self) -> Float32:
        """What the last call of a scores function left, [32, 64] and without the base."""
        raw = self.buffers["scores"][: ROWS * KEYS * 4].view(np.float32).reshape(ROWS // 8, KEYS // 8, 8, 8)
        base = self.buffers["scores"].view(np.float32)[ROWS * (KEYS + 2) + 4]
        found: Float32 = np.swapaxes(raw, 1, 2).reshape(ROWS, KEYS) - base
        return found

    def row_terms(self) -> tuple[Float32, Float32]:
        """Multiplier and offset of each row of the last scores."""
        both = self.buffers["scores"].view(np.float32)[ROWS * KEYS :][: 2 * ROWS]
        return both[:ROWS].copy(), both[ROWS:].copy()

    def count(self, int8: Iterable[int], wide: Iterable[int]) -> Iterator[tuple[str, Mapping[str, Slots]]]:
        """The same calls, and what each issues."""
        for stem, arguments in self.calls(int8, wide):
            yield stem, self.entry(stem).count(*arguments)
