"""Packed layers on disk: one safetensors file, written a layer at a time and mapped when read.

A layer is one uint8 tensor under its own name, plus ``<name>.bias`` (float32 [N]) and ``<name>.perm`` (int32 [K]) where
it has them. The header's ``__metadata__`` holds the layout of each. The header is padded with spaces so that the data
start on a page, and the packed tensors, whose sizes are multiples of 64, come first: each is aligned as the kernels
need it, straight from the mapping.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefuse.errors import DtypeError, FormatError, LayoutError, UnsupportedFormatError
from tilefuse.files import as_path
from tilefuse.formats.safetensors_map import MappedFile
from tilefuse.layout import FORMAT, FORMAT_VERSION, Layout, ZeroKind
from tilefuse.packed import PackedLinear

Array = npt.NDArray[Any]

DATA_ALIGNMENT = 4096
"""Bytes: the data section starts on a page."""

_CHUNK = 64 << 20  # bytes of one write: Linux takes at most 2^31 - 4096
_LAYOUT_FIELDS = ("k", "n", "bits", "group", "columns")


@dataclass(frozen=True)
class LayerSpec:
    """All that the header says about a layer: known before the layer is packed."""

    name: str
    layout: Layout
    bias: bool = False
    perm: bool = False
    source: str = ""

    @classmethod
    def of(cls, layer: PackedLinear) -> LayerSpec:
        """The spec of a packed layer."""
        return cls(layer.name, layer.layout, layer.bias is not None, layer.perm is not None, layer.source)

    def tensors(self) -> dict[str, tuple[str, int, int]]:
        """Name -> (safetensors dtype, elements, bytes) of each tensor of the layer, the packed one first."""
        lay = self.layout
        out = {self.name: ("U8", lay.nbytes, lay.nbytes)}
        if self.bias:
            out[f"{self.name}.bias"] = ("F32", lay.n, 4 * lay.n)
        if self.perm:
            out[f"{self.name}.perm"] = ("I32", lay.k, 4 * lay.k)
        return out

    def to_json(self) -> dict[str, Any]:
        """The layer's entry in the metadata."""
        layout = {key: value for key, value in asdict(self.layout).items() if key in _LAYOUT_FIELDS}
        extras = {"bias": self.bias, "perm": self.perm, "source": self.source}
        return {**layout, "zero": self.layout.zero.value, **extras}

    @classmethod
    def from_json(cls, name: str, item: Any, where: str) -> LayerSpec:
        """The inverse of `to_json`; ``item`` is untrusted."""
        types = {**dict.fromkeys(_LAYOUT_FIELDS, int), "zero": str, "bias": bool, "perm": bool, "source": str}
        if not isinstance(item, dict) or set(item) != set(types):
            raise FormatError(f"{where}: layer {name!r}: the metadata must give exactly {', '.join(types)}")
        for key, kind in types.items():
            if type(item[key]) is not kind:  # `type is`: JSON's true is an int in Python
                raise FormatError(f"{where}: layer {name!r}: {key} = {item[key]!r} must be of type {kind.__name__}")
        if item["zero"] not in list(ZeroKind):
            raise FormatError(f"{where}: layer {name!r}: zero = {item['zero']!r} is not one of {', '.join(ZeroKind)}")
        try:
            layout = Layout(zero=ZeroKind(item["zero"]), **{key: item[key] for key in _LAYOUT_FIELDS})
        except LayoutError as error:
            raise LayoutError(f"{where}: layer {name!r}: {error}") from None
        return cls(name, layout, item["bias"], item["perm"], item["source"])


class PackedWriter:
    """Writes a packed file one layer at a time, in any order; memory holds nothing but the layer at hand.

    A context manager: leaving it normally completes the file (flushed to the disk, then renamed into place); leaving it
    by an exception removes what was written or, with ``resume_key``, keeps it for the next run.

    Args:
        path: The file to make; one that exists is replaced at the end.
        layers: What will be written.
        metadata: Strings to keep in the file, see `PackedFile.metadata`.
        resume_key: Identifies the work. The layers go to ``<path>.partial``, and those that are whole are listed in
            ``<path>.journal``; a writer with the same key, layers and metadata goes on from there (see `done`), any
            other starts anew.

    Raises:
        FormatError: Two tensors would have the same name, or another process is writing ``<path>.partial``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layers: Iterable[LayerSpec],
        metadata: Mapping[str, str] | None = None,
        *,
        resume_key: str | None = None,
    ) -> None:
        self.path = as_path(path)
        specs = list(layers)
        self.specs = {spec.name: spec for spec in specs}
        self.done: set[str] = set()
        self._resumable = resume_key is not None
        suffix = ".partial" if self._resumable else f".{uuid.uuid4().hex}.tmp"
        self.partial = self.path.with_name(self.path.name + suffix)
        self.journal = self.path.with_name(self.path.name + ".journal")
        header, self._offsets, self._size = _header(specs, dict(metadata or {}))
        for side in (self.partial, self.journal):
            # Whatever a link leads to is not ours to overwrite, and a pipe would block.
            if side.is_symlink() or (side.exists() and not side.is_file()):
                raise FormatError(f"{side} is in the way and not a regular file; remove it or give another name")
        self._file = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            if self._resumable:
                self._lock()
                self.done = self._finished(str(resume_key), header)
            if not self.done:
                self._start(str(resume_key), header)
        except BaseException:
            os.close(self._file)
            if not self._resumable:
                self.partial.unlink(missing_ok=True)
            raise

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FormatError(f"{self.partial}: another process is writing it; wait for it or end it") from None
        # The other one may have finished between open and lock: what is locked then is its result, under another name.
        if not self.partial.exists() or not os.path.samestat(self.partial.stat(), os.fstat(self._file)):
            raise FormatError(f"{self.partial}: another process has just completed {self.path}")

    def _finished(self, key: str, header: bytes) -> set[str]:
        """Layers that an earlier run with the same key and header completed."""
        if not self.journal.exists() or os.fstat(self._file).st_size != self._size:
            return set()
        if os.pread(self._file, len(header), 0) != header:
            return set()
        lines = self.journal.read_text("utf-8", "replace").split("\n")
        if lines[0] != json.dumps(key):
            return set()
        # The last piece is empty, or a line that the interruption cut short.
        return {name for name in self.specs if json.dumps(name) in lines[1:-1]}

    def _start(self, key: str, header: bytes) -> None:
        if self._resumable:
            # First of all: the old list must not vouch for new data.
            self.journal.write_text("", "utf-8")
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, self._size)
        self._write_at(0, np.frombuffer(header, np.uint8))
        if self._resumable:
            self.journal.write_text(json.dumps(key) + "\n", "utf-8")

    def _write_at(self, offset: int, array: Array) -> None:
        view = np.ascontiguousarray(array).view(np.uint8).data
        while view.nbytes:
            written = os.pwrite(self._file, view[:_CHUNK], offset)
            offset, view = offset + written, view[written:]

    def write(self, layer: PackedLinear) -> None:
        """Writes one layer; afterwards its buffers may be reused.

        Raises:
            FormatError: It was not announced, or not like this.
        """
        spec = self.specs.get(layer.name)
        if spec is None or spec != LayerSpec.of(layer):
            raise FormatError(f"{self.path}: layer {layer.name!r} is {LayerSpec.of(layer)}; announced: {spec}")
        arrays = {layer.name: layer.data, f"{layer.name}.bias": layer.bias, f"{layer.name}.perm": layer.perm}
        for name in spec.tensors():
            array = arrays[name]
            assert array is not None
            self._write_at(self._offsets[name], array)
        if self._resumable:
            # The list may vouch only for what has reached the disk.
            os.fdatasync(self._file)
            with self.journal.open("a", encoding="utf-8") as journal:
                journal.write(json.dumps(layer.name) + "\n")
        self.done.add(layer.name)

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            os.close(self._file)
            if not self._resumable:
                self.partial.unlink(missing_ok=True)  # there only if the file was not completed

    def _complete(self) -> None:
        missing = [name for name in self.specs if name not in self.done]
        if missing:
            raise FormatError(f"{self.path}: {len(missing)} announced layers were not written, {missing[0]!r} first")
        os.fsync(self._file)
        self.partial.replace(self.path)
        if self._resumable:
            self.journal.unlink(missing_ok=True)
        _sync_folder(self.path.parent)


def _sync_folder(folder: Path) -> None:
    """Makes a rename in ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _header(specs: list[LayerSpec], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The file's first bytes, the offset of each tensor in the file, and the file's size."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise FormatError(f"metadata {key!r}: {value!r} must map a string to a string")
    tensors = [item for spec in specs for item in spec.tensors().items()]
    tensors.sort(key=lambda item: item[1][0] != "U8")  # stable: the packed tensors first, in the order given
    described = {
        "layers": json.dumps({spec.name: spec.to_json() for spec in specs}),
        "metadata": json.dumps(metadata),
    }
    described |= {"format": FORMAT, "version": str(FORMAT_VERSION), "sha256": _digest(described)}
    entries: dict[str, Any] = {"__metadata__": described}
    end = 0
    for name, (dtype, elements, nbytes) in tensors:
        if name in entries:
            raise FormatError(f"two tensors would be named {name!r}; rename a layer")
        entries[name] = {"dtype": dtype, "shape": [elements], "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(entries).encode()
    length = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - 8
    header = length.to_bytes(8, "little") + text.ljust(length)
    offsets = {name: len(header) + entries[name]["data_offsets"][0] for name, _ in tensors}
    return header, offsets, len(header) + end


def _digest(described: Mapping[str, str]) -> str:
    """Vouches for what nothing else in the file contradicts: K = 577 for 576, say, takes as many bytes."""
    text = json.dumps([described.get("layers"), described.get("metadata")])
    return hashlib.sha256(text.encode()).hexdigest()


class PackedFile(Mapping[str, PackedLinear]):
    """A packed file, mapped read-only and checked: layer name -> `PackedLinear`, made when asked for.

    The file must not change while it, or a layer from it, is in use. Huge pages are asked for under the mapping.

    Args:
        path: The file.
        copy: Read it to memory instead of mapping it, see `load`.

    Attributes:
        path: The file.
        specs: Layer name -> what the header says about it.
        metadata: The strings that were saved with it.

    Raises:
        DtypeError: ``path`` is no path.
        FormatError: Not a well-formed packed file; the message names it and the tensor at fault.
        UnsupportedFormatError: A packed file of another layout version.
        LayoutError: A layer's layout is outside the format's limits.
    """

    def __init__(self, path: str | os.PathLike[str], *, copy: bool = False) -> None:
        self.path = as_path(path)
        self._mapped = MappedFile(self.path)
        found = self._mapped.metadata
        if found.get("format") != FORMAT:
            raise FormatError(
                f"{self.path}: not a packed file (metadata format {found.get('format')!r}, not {FORMAT!r}); "
                "open_checkpoint() reads checkpoints, and pack() packs them"
            )
        if found.get("version") != str(FORMAT_VERSION):
            raise UnsupportedFormatError(
                f"{self.path}: packed layout version {found.get('version')!r}; this tilefuse reads {FORMAT_VERSION}: "
                "pack the checkpoint again"
            )
        layers = self._json("layers")
        if found.get("sha256") != _digest(found):
            raise FormatError(
                f"{self.path}: the layers' description was altered (sha256 differs); fetch or pack it again"
            )
        self.specs = {name: LayerSpec.from_json(name, item, str(self.path)) for name, item in layers.items()}
        self.metadata: dict[str, str] = self._json("metadata")
        if not all(isinstance(value, str) for value in self.metadata.values()):
            raise FormatError(f"{self.path}: the saved metadata must map strings to strings")
        self._check_tensors()
        if copy:
            self._mapped.read_to_memory()
        else:
            self._mapped.ask_for_huge_pages()

    def _json(self, key: str) -> dict[str, Any]:
        try:
            parsed = json.loads(self._mapped.metadata[key])
        except (KeyError, ValueError, RecursionError) as error:
            raise FormatError(f"{self.path}: metadata {key!r} is missing or not JSON ({error})") from None
        if not isinstance(parsed, dict):
            raise FormatError(f"{self.path}: metadata {key!r} must be a JSON object, not {type(parsed).__name__}")
        return parsed

    def _check_tensors(self) -> None:
        numpy_names = {"U8": np.uint8, "F32": np.float32, "I32": np.int32}
        expected: dict[str, tuple[str, int, int]] = {}
        for spec in self.specs.values():
            for name, tensor in spec.tensors().items():
                if name in expected:
                    raise FormatError(f"{self.path}: tensor {name!r} belongs to two layers")
                expected[name] = tensor
        for name in self._mapped:
            if name not in expected:
                raise FormatError(f"{self.path}: tensor {name!r} belongs to no layer of the metadata")
        for name, (dtype, elements, _) in expected.items():
            if name not in self._mapped:
                raise FormatError(f"{self.path}: tensor {name!r} is missing")
            entry = self._mapped[name]
            if entry.dtype != numpy_names[dtype] or entry.shape != (elements,):
                raise FormatError(
                    f"{self.path}: tensor {name!r} is {entry.dtype} {list(entry.shape)}; its layout takes {dtype} "
                    f"[{elements}]"
                )

    def __len__(self) -> int:
        return len(self.specs)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __getitem__(self, name: str) -> PackedLinear:
        spec = self.specs[name]
        try:
            return PackedLinear(
                name=name,
                layout=spec.layout,
                data=self._mapped.tensor(name),
                bias=self._mapped.tensor(f"{name}.bias") if spec.bias else None,
                perm=self._mapped.tensor(f"{name}.perm") if spec.perm else None,
                source=spec.source,
            )
        except LayoutError as error:
            raise LayoutError(f"{self.path}: {error}") from None


def save(
    path: str | os.PathLike[str],
    layers: PackedLinear | Mapping[str, PackedLinear] | Iterable[PackedLinear],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes packed layers to one safetensors file; atomic: it appears whole or not at all.

    Args:
        path: The file; one that exists is replaced.
        layers: One layer or several, each saved under its ``name``; the keys of a mapping must be those names.
        metadata: Strings to keep with them.

    Raises:
        FormatError: Two layers have the same name, or a key is not its layer's name.
        DtypeError: ``layers`` holds something else than packed layers.
    """
    if isinstance(layers, Mapping):
        for key, layer in layers.items():
            if key != getattr(layer, "name", key):
                raise FormatError(f"layers[{key!r}] is named {layer.name!r}; save it under its own name")
        layers = layers.values()
    layers = [layers] if isinstance(layers, PackedLinear) else list(layers)
    for layer in layers:
        if not isinstance(layer, PackedLinear):
            raise DtypeError(f"layers holds a {type(layer).__name__}: pass packed layers (see pack)")
    with PackedWriter(path, map(LayerSpec.of, layers), metadata) as writer:
        for layer in layers:
            writer.write(layer)


def load(path: str | os.PathLike[str], *, copy: bool = False) -> dict[str, PackedLinear]:
    """The layers of a packed file.

    Decoding streams all weights, and is fastest where they lie in huge pages. A mapping asks for them; whether it gets
    them is up to the kernel, the file system and how the file came into the page cache (docs/benchmarks/loading.md).

    Args:
        path: A file that `save` or ``tilefuse pack`` wrote.
        copy: Read all layers now, to one piece of memory in huge pages, which lasts as long as any of them. Without it
            they are read-only views of the mapped file: nothing is read before it is used, processes share the pages,
            and the file must not change.

    Raises:
        FormatError, UnsupportedFormatError, LayoutError: See `PackedFile`.
    """
    return dict(PackedFile(path, copy=copy))
