"""The weights that contenders are given: one dense matrix, quantised as checkpoints are, shared through files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK = 256
"""Output channels made at a time: what they take stays in the cache."""


@dataclass(frozen=True)
class Codes:
    """Quantised weights: ``w[n, k] = (codes[n, k] - zeros[n, k // group]) * scales[n, k // group]``.

    Attributes:
        bits: 4 or 8.
        group: Input channels that share a scale.
        codes: uint8 [N, K].
        scales: float32 [N, G], values that both bfloat16 and float16 hold.
        zeros: uint8 [N, G]; 2^(bits - 1) throughout where the scheme is symmetric.
    """

    bits: int
    group: int
    codes: Array
    scales: Array
    zeros: Array

    @property
    def n(self) -> int:
        return int(self.codes.shape[0])

    @property
    def k(self) -> int:
        return int(self.codes.shape[1])

    def rolled(self, by: int) -> Codes:
        """Other contents of the same kind: output channels moved on by ``by``, which costs one copy."""
        if by == 0:
            return self
        arrays = (np.roll(array, by, axis=0) for array in (self.codes, self.scales, self.zeros))
        return Codes(self.bits, self.group, *arrays)

    def dequantized(self, channels: Array | slice = slice(None)) -> npt.NDArray[np.float32]:
        """The weights of these output channels, float32 [channels, K]. Exact."""
        difference = self.codes[channels].astype(np.float32)
        grouped = difference.reshape(len(difference), -1, self.group)
        grouped -= self.zeros[channels].astype(np.float32)[:, :, None]
        grouped *= self.scales[channels][:, :, None]
        return difference


@dataclass(frozen=True)
class Case:
    """One matrix W [K, N] in the schemes of common checkpoints, and activations for it.

    Attributes:
        schemes: By name: "w4g128" and "w4g32" with zero points, as AutoAWQ's; "w8g128" and "w8" (one scale an output
            channel) symmetric.
        x: float32 [M, K] of values that bfloat16 holds, normal.
    """

    schemes: dict[str, Codes]
    x: Array

    @property
    def k(self) -> int:
        return self.schemes["w4g128"].k

    @property
    def n(self) -> int:
        return self.schemes["w4g128"].n


def _short(values: Array) -> npt.NDArray[np.float32]:
    """Positive float32 values cut to 8 significant bits, which bfloat16 and float16 hold (2^-14 and above)."""
    cut: npt.NDArray[np.float32] = (np.ascontiguousarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(
        np.float32
    )
    return cut


def quantize(dense: Array, bits: int, group: int, *, symmetric: bool) -> Codes:
    """Round to nearest: dense float32 [N, K] to codes. K must be a multiple of ``group``."""
    n, k = dense.shape
    grouped = dense.reshape(n, k // group, group)
    top = (1 << bits) - 1
    if symmetric:
        scales = _short(np.abs(grouped).max(axis=2) / (top >> 1))
        zeros = np.full(scales.shape, (top + 1) // 2, np.uint8)
    else:
        low, high = np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0)
        scales = _short((high - low) / top)
        zeros = np.clip(np.rint(-low / scales), 0, top).astype(np.uint8)
    codes = grouped / scales[:, :, None]
    np.rint(codes, out=codes)
    codes += zeros[:, :, None]
    np.clip(codes, 0, top, out=codes)
    return Codes(bits, group, codes.astype(np.uint8).reshape(n, k), scales, zeros)


def make_case(k: int, n: int, rows: int, seed: int = 0) -> Case:
    """Normal weights whose products with the normal x [rows, K] are about 1 in size."""
    rng = np.random.default_rng((seed, k, n))
    specs = {"w4g128": (4, 128, False), "w4g32": (4, 32, False), "w8g128": (8, 128, True), "w8": (8, k, True)}
    schemes = {
        name: Codes(
            bits,
            group,
            np.empty((n, k), np.uint8),
            np.empty((n, k // group), np.float32),
            np.empty((n, k // group), np.uint8),
        )
        for name, (bits, group, _) in specs.items()
    }
    for start in range(0, n, BLOCK):
        part = slice(start, min(start + BLOCK, n))
        dense = rng.standard_normal((part.stop - start, k), dtype=np.float32)
        dense /= np.sqrt(k, dtype=np.float32)
        for name, (bits, group, symmetric) in specs.items():
            made, whole = quantize(dense, bits, group, symmetric=symmetric), schemes[name]
            whole.codes[part], whole.scales[part], whole.zeros[part] = made.codes, made.scales, made.zeros
    x = rng.standard_normal((rows, k), dtype=np.float32)
    return Case(schemes, _short(x))


def save_case(case: Case, folder: Path) -> None:
    """Writes the arrays of ``case`` into ``folder``, for `open_case` in another process."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "x.npy", case.x)
    for name, scheme in case.schemes.items():
        for part in ("codes", "scales", "zeros"):
            np.save(folder / f"{name}.{part}.npy", getattr(scheme, part))


def open_case(folder: Path) -> Case:
    """What `save_case` wrote, mapped."""

    def mapped(name: str) -> Array:
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

    schemes = {}
    for path in sorted(folder.glob("*.codes.npy")):
        name = path.name.removesuffix(".codes.npy")
        codes, scales, zeros = (mapped(f"{name}.{part}") for part in ("codes", "scales", "zeros"))
        schemes[name] = Codes(
            4 if name.startswith("w4") else 8, codes.shape[1] // scales.shape[1], codes, scales, zeros
        )
    return Case(schemes, mapped("x"))
