"""What is in a checkpoint or a packed file, layer by layer: the data behind ``tilefuse inspect``."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilefuse.errors import LayoutError
from tilefuse.formats import LinearInfo, open_checkpoint
from tilefuse.formats.safetensors_map import MappedFile
from tilefuse.layout import FORMAT, Layout, ZeroKind
from tilefuse.storage import LayerSpec, PackedFile


@dataclass(frozen=True)
class Row:
    """One layer.

    Attributes:
        name: Its name.
        k: Input channels.
        n: Output channels.
        scheme: Bits, group and zero points in words, e.g. ``"w4 g128 asym"``.
        format: The format of the checkpoint.
        nbytes: Bytes in the file.
        padding: Bytes that the packed form takes beyond one code a weight and one scale and zero point a group and
            output channel, as a share of those; None for a layer that can't be packed.
    """

    name: str
    k: int
    n: int
    scheme: str
    format: str
    nbytes: int
    padding: float | None

    @property
    def bits_per_weight(self) -> float:
        """Bits in the file for each weight."""
        return self.nbytes * 8 / (self.k * self.n)


@dataclass(frozen=True)
class Inspection:
    """A file or checkpoint: what it is, and its linear layers."""

    path: Path
    kind: str
    rows: list[Row]
    refused: dict[str, str] = field(default_factory=dict)
    """Layers of formats that are not read, and why."""

    def to_json(self) -> dict[str, Any]:
        """The same in JSON's types."""
        layers = [{**vars(row), "bits_per_weight": row.bits_per_weight} for row in self.rows]
        total = {
            "layers": len(self.rows),
            "weights": self.weights,
            "nbytes": self.nbytes,
            "bits_per_weight": self.nbytes * 8 / max(self.weights, 1),
        }
        return {
            "path": str(self.path),
            "kind": self.kind,
            "layers": layers,
            "refused": self.refused,
            "total": total,
        }

    @property
    def weights(self) -> int:
        """Weights of all layers."""
        return sum(row.k * row.n for row in self.rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(row.nbytes for row in self.rows)


def _padding(layout: Layout) -> float:
    grid = layout.source_groups * layout.n * (2 + layout.zero_bytes)
    least = layout.k * layout.n * layout.bits / 8 + grid
    return layout.nbytes / least - 1


def _group(group: int, k: int) -> str:
    return "channel" if group >= k else f"g{group}"


def _packed_row(spec: LayerSpec) -> Row:
    lay = spec.layout
    extras = "".join(f" +{what}" for what, there in (("bias", spec.bias), ("perm", spec.perm)) if there)
    nbytes = sum(size for _, _, size in spec.tensors().values())
    scheme = f"w{lay.bits} {_group(lay.group, lay.k)} {lay.zero.value} c{lay.columns}{extras}"
    return Row(spec.name, lay.k, lay.n, scheme, spec.source, nbytes, _padding(lay))


def _checkpoint_row(info: LinearInfo) -> Row:
    if not info.quantized:
        return Row(info.name, info.k, info.n, info.format, info.format, info.nbytes, None)
    kind = "sym" if info.symmetric else "asym"
    scheme = f"w{info.bits} {_group(info.group, info.k)} {kind}{' +bias' if info.bias else ''}"
    zero = ZeroKind.M16 if info.format == "awq-gemv_fast" else ZeroKind.Z8
    try:
        padding = _padding(Layout(k=info.k, n=info.n, bits=info.bits, group=info.group, zero=zero))
    except LayoutError:
        padding = None
    return Row(info.name, info.k, info.n, scheme, info.format, info.nbytes, padding)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """What is in a packed file or a checkpoint; reads headers only.

    Raises:
        TileFuseError: It is neither, or damaged.
    """
    path = Path(path)
    if path.is_file() and MappedFile(path).metadata.get("format") == FORMAT:
        return Inspection(path, "packed", [_packed_row(spec) for spec in PackedFile(path).specs.values()])
    checkpoint = open_checkpoint(path)
    rows = [_checkpoint_row(info) for info in checkpoint.linears()]
    return Inspection(path, "checkpoint", rows, checkpoint.refused())
