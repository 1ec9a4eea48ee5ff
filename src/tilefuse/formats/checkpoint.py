"""Opening a checkpoint: its files, its configuration, and which reader each layer needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.errors import FormatError, UnsupportedFormatError
from tilefuse.files import as_path
from tilefuse.formats import autoawq, compressed_tensors, gptq, plain
from tilefuse.formats.config import Settings, load
from tilefuse.formats.safetensors_map import INDEX, SINGLE, MappedFile, read_json
from tilefuse.formats.store import Facts, LinearInfo, Store
from tilefuse.layout import FORMAT
from tilefuse.quantized import QuantizedLinear

Array = npt.NDArray[Any]

METHODS = {"awq": autoawq, "gptq": gptq, "compressed-tensors": compressed_tensors}


class Checkpoint:
    """A quantised model on disk, mapped into memory. Made by `open_checkpoint`.

    The files must not change or shrink while it, or any array that it gave, is in use.

    Attributes:
        path: What was opened.
        format: The commonest format of its linear layers (see `LinearInfo.format`), quantised ones first.
        config: The model's ``config.json``, empty if there is none.
        quantization: The quantisation settings, as found, empty if there are none.
    """

    def __init__(self, path: Path, store: Store, config: dict[str, Any], settings: Settings, *, tied: bool) -> None:
        self.path = path
        self.config = config
        self.quantization = settings.raw
        self._store = store
        self._settings = settings
        method = settings.method
        if method and method not in METHODS:
            raise UnsupportedFormatError(
                f"{settings.source}: quant_method {method!r} is not read; taken: {', '.join(METHODS)} and unquantised "
                "checkpoints. Export the model to one of these"
                + (" (Quark: custom_mode 'awq')" if method == "quark" else "")
            )
        if method:
            METHODS[method].refuse(settings)
        self._weights = dict(_plain_layers(store))
        self._quantized = dict(_quantized_layers(store, method))
        for layer in self._quantized:
            self._weights.pop(layer, None)
        embedding = plain.tied_embedding(store) if tied else None
        if embedding is not None:
            self._weights["lm_head"] = embedding
        self._facts: dict[str, Facts] = {}
        self._refused: dict[str, str] | None = None
        self._layers = sorted({*self._weights, *self._quantized}, key=_natural)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self._layers)} linear layers, {len(list(self._store))} tensors)"

    @property
    def format(self) -> str:
        """The commonest format of the linear layers, quantised ones before the others; empty without any."""
        counts: dict[tuple[bool, str], int] = {}
        for info in self.linears():
            key = (info.quantized, info.format)
            counts[key] = counts.get(key, 0) + 1
        return max(counts, key=lambda key: (key[0], counts[key]))[1] if counts else ""

    def files(self) -> list[Path]:
        """The files that hold the tensors."""
        return self._store.files()

    def tensors(self) -> list[str]:
        """Names of all tensors."""
        return list(self._store)

    def tensor(self, name: str) -> Array:
        """A tensor as a read-only view of the mapped file.

        Raises:
            FormatError: There is none of that name.
        """
        return self._store.get(name)

    def linears(self) -> list[LinearInfo]:
        """The linear layers that are read, in the natural order of their names; `refused` has the others.

        Reads headers (and ``weight_shape``) only.

        Raises:
            FormatError: The tensors of a layer are missing or contradict each other or the configuration.
            UnsupportedFormatError: All quantised layers are of formats that are not read.
        """
        refused = self.refused()
        if refused and len(refused) == len(self._quantized):
            raise UnsupportedFormatError(next(iter(refused.values())))
        return [self.info(name) for name in self._layers if name not in refused]

    def refused(self) -> dict[str, str]:
        """The layers of formats that are not read, and why: what `linear` raises for each.

        Raises:
            FormatError: As in `linears`.
        """
        if self._refused is None:
            found: dict[str, str] = {}
            for name in self._layers:
                try:
                    self.info(name)
                except UnsupportedFormatError as error:
                    found[name] = str(error)
            self._refused = found
        return self._refused

    def info(self, name: str) -> LinearInfo:
        """What `linears` says about one layer."""
        if name in self._quantized:
            return self._describe(name).info
        if name in self._weights:
            return plain.describe(self._store, name, self._weights[name])
        raise FormatError(f"{self.path} has no linear layer {name!r}; linears() lists them")

    def linear(self, name: str) -> QuantizedLinear:
        """A quantised layer, validated. Its codes are a view of the mapped file.

        Raises:
            FormatError: There is no such layer, or its tensors are missing or contradictory.
            UnsupportedFormatError: It is not quantised (see `dense`), or in a way that is not read.
            QuantizationError: A scale, zero point, bias or group index has a value that is out of range.
        """
        info = self.info(name)
        if not info.quantized:
            raise UnsupportedFormatError(
                f"layer {name!r} is stored as {info.format}, not quantised: read it with dense(), and quantise it with "
                "quantize_linear() if it is to be packed"
            )
        layer: QuantizedLinear = self._quantized[name].read(self._store, self._describe(name))
        return layer

    def dense(self, name: str) -> Array:
        """The weight of an unquantised layer as a view [K, N] of the mapped file (its transpose is what is stored).

        Raises:
            FormatError: There is no such layer, or it is quantised.
        """
        if self.info(name).quantized:
            raise FormatError(f"layer {name!r} is quantised; read it with linear()")
        return self._store.get(self._weights[name]).T

    def _describe(self, name: str) -> Facts:
        if name not in self._facts:
            self._facts[name] = self._quantized[name].describe(self._store, name, self._settings)
        return self._facts[name]


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() and len(part) < 10 else (-1, part) for part in name.split(".")]


def _plain_layers(store: Store) -> Iterator[tuple[str, str]]:
    for name in store:
        entry = store.entry(name)
        if plain.is_linear(name, entry.dtype, entry.shape):
            yield name.removesuffix(".weight"), name


def _quantized_layers(store: Store, method: str) -> Iterator[tuple[str, Any]]:
    """Layers that the tensors show to be quantised, with their reader.

    The tensors decide, not the configuration's lists of layers to skip: software disagrees on how those match names.
    """
    for name in store:
        layer, _, suffix = name.rpartition(".")
        if suffix in ("qweight", "qzeros"):
            yield layer, _words_reader(store, layer, method)
        elif suffix in ("weight_packed", "weight_scale") or (suffix == "weight" and store.entry(name).dtype == np.int8):
            yield layer, compressed_tensors


def _words_reader(store: Store, layer: str, method: str) -> Any:
    """AutoAWQ and GPTQ give their tensors the same names: the configuration tells them apart, or else the shapes."""
    if method in ("awq", "gptq"):
        return METHODS[method]
    if f"{layer}.g_idx" in store:
        return gptq
    if f"{layer}.qweight" in store and f"{layer}.scales" in store:
        qweight, scales = store.entry(f"{layer}.qweight"), store.entry(f"{layer}.scales")
        if qweight.dtype == np.int32 and qweight.shape[1:] == scales.shape[1:]:
            return gptq
    return autoawq


def open_checkpoint(path: str | Path, *, quantization: Mapping[str, Any] | None = None) -> Checkpoint:
    """Open a checkpoint: AutoAWQ, GPTQ, compressed-tensors, or unquantised.

    Files are mapped, not read; nothing is unpacked here.

    Args:
        path: A directory with safetensors files (sharded by ``model.safetensors.index.json`` or one file) and
            ``config.json``, or one safetensors file (its directory's configuration is used if there is one; otherwise
            the tensors tell the format as far as they can).
        quantization: The quantisation settings, as ``quantization_config`` in ``config.json`` would hold them, in place
            of those found.

    Raises:
        FormatError: A file is missing, damaged, contradicts another or is a packed file; the message names the file
            and tensor.
        UnsupportedFormatError: The checkpoint is of a format that is not read; the message says what to do.
        FileNotFoundError: There is nothing at ``path``.
    """
    path = as_path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if not path.is_dir():
        file = _open_file(path)
        store = Store(dict.fromkeys(file, file))
        config, settings = load(path.parent, file.metadata, quantization)
        return Checkpoint(path, store, config, settings, tied=config.get("tie_word_embeddings") is True)
    files, metadata = _open_directory(path)
    config, settings = load(path, metadata, quantization)
    return Checkpoint(path, Store(files), config, settings, tied=_tied(config))


def _tied(config: dict[str, Any]) -> bool:
    """Whether the output head is the input embedding when no tensor is a head: transformers' default is that it is."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        if "tie_word_embeddings" in holder:
            return holder["tie_word_embeddings"] is True
    return bool(config)


def _open_file(path: Path) -> MappedFile:
    file = MappedFile(path)
    if file.metadata.get("format") == FORMAT:
        raise FormatError(f"{path}: a packed file, not a checkpoint; load() reads it")
    return file


def _open_directory(path: Path) -> tuple[dict[str, MappedFile], dict[str, str]]:
    """The file of each tensor of a directory, and the metadata of the first file."""
    indices = [path / INDEX] if (path / INDEX).is_file() else sorted(path.glob("*.safetensors.index.json"))
    if len(indices) == 1 and not (path / SINGLE).is_file():
        return _open_shards(path, indices[0])
    singles = [path / SINGLE] if (path / SINGLE).is_file() else sorted(path.glob("*.safetensors"))
    if len(singles) == 1:
        file = _open_file(singles[0])
        return dict.fromkeys(file, file), file.metadata
    if not singles:
        raise FormatError(f"{path}: no .safetensors file; checkpoints in other containers must be saved as safetensors")
    raise FormatError(f"{path}: {len(singles)} .safetensors files and no {INDEX} to tell which tensors count; fetch it")


def _open_shards(path: Path, index: Path) -> tuple[dict[str, MappedFile], dict[str, str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise FormatError(f"{index}: weight_map is missing or not an object")
    shards: dict[str, MappedFile] = {}
    files: dict[str, MappedFile] = {}
    for name, shard in weight_map.items():
        # A shard is a file of this directory: a path could lead anywhere.
        if not isinstance(shard, str) or "\0" in shard or PurePosixPath(shard).name != shard:
            raise FormatError(f"{index}: tensor {name!r} is in {shard!r}, which is not the name of a file beside it")
        if shard not in shards:
            if not (path / shard).is_file():
                raise FormatError(f"{index}: tensor {name!r} is in {shard!r}, which is missing; fetch it")
            shards[shard] = MappedFile(path / shard)
        if name not in shards[shard]:
            raise FormatError(f"{index}: tensor {name!r} is not in {path / shard}, where the index puts it")
        files[name] = shards[shard]
    return files, next(iter(shards.values())).metadata if shards else {}
