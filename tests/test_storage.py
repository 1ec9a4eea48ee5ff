"""Packed files: what is saved is loaded, other software can read it, and nothing damaged is misread."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle_layout import random_layer
from safetensors import safe_open

import tilefuse as tf
from tilefuse.errors import FormatError, LayoutError, TileFuseError, UnsupportedFormatError
from tilefuse.storage import LayerSpec, PackedFile, PackedWriter


def layers() -> dict[str, tf.PackedLinear]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, int, int, int, dict[str, bool]]] = {
        "model.layers.0.q_proj": (576, 192, 4, 64, {"bias": True}),
        "model.layers.0.down_proj": (300, 70, 8, 128, {"perm": True}),
        "model.layers.1.up_proj": (320, 130, 4, 32, {"floating": True, "perm": True, "bias": True}),
        "über": (1, 1, 8, 1, {}),
    }
    out = {}
    for name, (k, n, bits, group, options) in shapes.items():
        layer, _ = random_layer(rng, k, n, bits, group, **options)
        out[name] = tf.pack(dataclasses.replace(layer, name=name))
    return out


def same(a: tf.PackedLinear, b: tf.PackedLinear) -> bool:
    pairs = ((a.data, b.data), (a.bias, b.bias), (a.perm, b.perm))
    return (a.name, a.layout, a.source) == (b.name, b.layout, b.source) and all(
        x is y or (x is not None and y is not None and np.array_equal(x, y)) for x, y in pairs
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.tilefuse"
    tf.save(path, layers(), {"made by": "a test"})
    return path


@pytest.mark.parametrize("copy", [False, True])
def test_round_trip(saved: Path, copy: bool) -> None:
    loaded, expected = tf.load(saved, copy=copy), layers()
    assert list(loaded) == list(expected)
    for name, layer in loaded.items():
        assert same(layer, expected[name])
        assert layer.data.flags.writeable is copy
        assert layer.data.ctypes.data % 64 == 0
    assert PackedFile(saved).metadata == {"made by": "a test"}
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def mapping_flags(address: int) -> list[str]:
    """What the kernel says of the mapping at ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages")
@pytest.mark.parametrize("copy", [False, True])
def test_huge_pages_are_asked_for(tmp_path: Path, copy: bool) -> None:
    layout = tf.Layout(2048, 2048, 4, 128)
    data = np.zeros(layout.nbytes + 64, np.uint8)
    start = -data.ctypes.data % 64
    layer = tf.PackedLinear("large", layout, data[start : start + layout.nbytes])
    tf.save(tmp_path / "x", [layer])
    (loaded,) = tf.load(tmp_path / "x", copy=copy).values()
    assert "hg" in mapping_flags(loaded.data.ctypes.data + loaded.nbytes // 2)


def test_a_copy_needs_no_file(saved: Path) -> None:
    loaded = tf.load(saved, copy=True)
    os.truncate(saved, 0)  # a mapping would fault
    assert all(same(layer, layers()[name]) for name, layer in loaded.items())
    ends = [layer.data.ctypes.data for layer in loaded.values()]
    assert max(ends) - min(ends) < sum(layer.nbytes for layer in loaded.values()), "one piece"


def test_a_file_without_layers(tmp_path: Path) -> None:
    tf.save(tmp_path / "x", [])
    assert tf.load(tmp_path / "x") == tf.load(tmp_path / "x", copy=True) == {}


def test_the_safetensors_library_reads_it(saved: Path) -> None:
    expected = layers()
    with safe_open(saved, "np") as file:
        names = {name + suffix for name, p in expected.items() for suffix in _suffixes(p)}
        assert set(file.keys()) == names
        for name, layer in expected.items():
            np.testing.assert_array_equal(file.get_tensor(name), layer.data)
            if layer.bias is not None:
                np.testing.assert_array_equal(file.get_tensor(f"{name}.bias"), layer.bias)
            if layer.perm is not None:
                np.testing.assert_array_equal(file.get_tensor(f"{name}.perm"), layer.perm)
        metadata = file.metadata()
    assert metadata["version"] == "1"
    assert json.loads(metadata["layers"])["model.layers.0.q_proj"]["group"] == 64


def _suffixes(layer: tf.PackedLinear) -> list[str]:
    return ["", *([".bias"] if layer.bias is not None else []), *([".perm"] if layer.perm is not None else [])]


def test_data_start_on_a_page(saved: Path) -> None:
    raw = saved.read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 4096 == 0


def test_a_mapped_layer_outlives_the_file_object(saved: Path) -> None:
    layer = tf.load(saved)["model.layers.0.q_proj"]
    saved.unlink()
    assert same(layer, layers()["model.layers.0.q_proj"])


def test_save_replaces_or_leaves_alone(saved: Path, tmp_path: Path) -> None:
    before = saved.read_bytes()
    first, second, *_ = layers().values()
    with (  # noqa: PT012
        pytest.raises(RuntimeError),
        PackedWriter(saved, [LayerSpec.of(first), LayerSpec.of(second)]) as writer,
    ):
        writer.write(first)
        raise RuntimeError
    with (
        pytest.raises(FormatError, match="1 announced layers were not written"),
        PackedWriter(saved, [LayerSpec.of(first), LayerSpec.of(second)]) as writer,
    ):
        writer.write(first)
    assert saved.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [saved.name]
    tf.save(saved, [first])
    assert list(tf.load(saved)) == [first.name]


def test_refuses_clashing_names(tmp_path: Path) -> None:
    layer = next(iter(layers().values()))
    with pytest.raises(FormatError, match="two tensors would be named"):
        tf.save(tmp_path / "x", [layer, layer])
    with pytest.raises(FormatError, match="two tensors would be named"):
        tf.save(tmp_path / "x", [layer, dataclasses.replace(layer, name=f"{layer.name}.bias")])
    with pytest.raises(FormatError, match="two tensors would be named"):
        tf.save(tmp_path / "x", [dataclasses.replace(layer, name="__metadata__")])
    with pytest.raises(FormatError, match="is named"):
        tf.save(tmp_path / "x", {"other": layer})
    with pytest.raises(FormatError, match="must map a string to a string"):
        tf.save(tmp_path / "x", [layer], {"a": 1})  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    first, second, *_ = layers().values()
    for wrong in (second, dataclasses.replace(first, bias=None)):
        with (
            pytest.raises(FormatError, match="announced"),
            PackedWriter(tmp_path / "x", [LayerSpec.of(first)]) as writer,
        ):
            writer.write(wrong)


def test_resume(tmp_path: Path) -> None:
    path, all_layers = tmp_path / "x", list(layers().values())
    specs = [LayerSpec.of(layer) for layer in all_layers]

    def interrupted(key: str, count: int) -> set[str]:
        with pytest.raises(KeyboardInterrupt), PackedWriter(path, specs, resume_key=key) as writer:  # noqa: PT012
            found = set(writer.done)
            for layer in all_layers[:count]:
                if layer.name not in writer.done:
                    writer.write(layer)
            raise KeyboardInterrupt
        return found

    names = [layer.name for layer in all_layers]
    assert interrupted("a", 2) == set()
    assert interrupted("a", 3) == set(names[:2])
    with (tmp_path / "x.journal").open("a") as journal:
        journal.write('"cut sho')
    assert interrupted("a", 0) == set(names[:3])
    assert interrupted("b", 1) == set()  # another key
    with PackedWriter(path, specs, resume_key="b") as writer:
        assert writer.done == {names[0]}
        with pytest.raises(FormatError, match="another process"):
            PackedWriter(path, specs, resume_key="b")
        for layer in all_layers[1:]:
            writer.write(layer)
    assert all(same(layer, tf.load(path)[layer.name]) for layer in all_layers)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header's JSON, signs it again, and keeps the data."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    header["__metadata__"]["layers"] = json.loads(header["__metadata__"]["layers"])
    change(header)
    if isinstance(header.get("__metadata__", {}).get("layers"), dict):
        header["__metadata__"]["layers"] = json.dumps(header["__metadata__"]["layers"])
    described = header.get("__metadata__", {})
    signed = json.dumps([described.get("layers"), described.get("metadata")])
    described["sha256"] = hashlib.sha256(signed.encode()).hexdigest()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])


Q = "model.layers.0.q_proj"
CORRUPT: dict[str, tuple[Callable[[dict[str, Any]], Any], type[TileFuseError], str]] = {
    "no metadata": (lambda h: h.pop("__metadata__"), FormatError, "not a packed file"),
    "other format": (lambda h: h["__metadata__"].update(format="pt"), FormatError, "not a packed file"),
    "other version": (lambda h: h["__metadata__"].update(version="2"), UnsupportedFormatError, "layout version '2'"),
    "no version": (lambda h: h["__metadata__"].pop("version"), UnsupportedFormatError, "layout version None"),
    "no layers": (lambda h: h["__metadata__"].pop("layers"), FormatError, "'layers' is missing"),
    "layers not JSON": (lambda h: h["__metadata__"].update(layers="{"), FormatError, "not JSON"),
    "layers a list": (lambda h: h["__metadata__"].update(layers="[]"), FormatError, "must be a JSON object"),
    "user metadata": (lambda h: h["__metadata__"].update(metadata='{"a": 1}'), FormatError, "strings to strings"),
    "unknown tensor": (lambda h: h["__metadata__"]["layers"].pop(Q), FormatError, "belongs to no layer"),
    "missing tensor": (lambda h: h.update(other=h.pop(Q)), FormatError, "belongs to no layer"),
    "no tensor": (lambda h: h["__metadata__"]["layers"].update(x=h["__metadata__"]["layers"][Q]), FormatError, "'x'"),
    "missing field": (lambda h: h["__metadata__"]["layers"][Q].pop("k"), FormatError, "must give exactly"),
    "extra field": (lambda h: h["__metadata__"]["layers"][Q].update(x=1), FormatError, "must give exactly"),
    "layer a number": (lambda h: h["__metadata__"]["layers"].update({Q: 3}), FormatError, "must give exactly"),
    "k a bool": (lambda h: h["__metadata__"]["layers"][Q].update(k=True), FormatError, "k = True"),
    "k a float": (lambda h: h["__metadata__"]["layers"][Q].update(k=576.0), FormatError, "k = 576.0"),
    "k too large": (lambda h: h["__metadata__"]["layers"][Q].update(k=2**40), LayoutError, "q_proj.*K = "),
    "k beyond the data": (lambda h: h["__metadata__"]["layers"][Q].update(k=4096), FormatError, "its layout takes"),
    "other bits": (lambda h: h["__metadata__"]["layers"][Q].update(bits=8), FormatError, "its layout takes"),
    "bits 5": (lambda h: h["__metadata__"]["layers"][Q].update(bits=5), LayoutError, "bits = 5"),
    "zero kind": (lambda h: h["__metadata__"]["layers"][Q].update(zero="z9"), FormatError, "zero = 'z9'"),
    "no bias": (lambda h: h["__metadata__"]["layers"][Q].update(bias=False), FormatError, "belongs to no layer"),
    "perm announced": (lambda h: h["__metadata__"]["layers"][Q].update(perm=True), FormatError, "perm' is missing"),
    "data as int8": (lambda h: h[Q].update(dtype="I8"), FormatError, "is int8"),
    "bias as int32": (lambda h: h[f"{Q}.bias"].update(dtype="I32"), FormatError, "is int32"),
    "shape": (lambda h: h[Q].update(shape=[2, h[Q]["shape"][0] // 2]), FormatError, "its layout takes"),
    "offsets": (lambda h: h[Q]["data_offsets"].reverse(), FormatError, Q),
}  # fmt: skip


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_header(saved: Path, case: str) -> None:
    change, error, message = CORRUPT[case]
    rewrite(saved, change)
    with pytest.raises(error, match=message) as caught:
        tf.load(saved)
    assert str(saved) in str(caught.value)


def test_altered_description(saved: Path) -> None:
    raw = saved.read_bytes()
    saved.write_bytes(raw.replace(b'\\"k\\": 300', b'\\"k\\": 301'))
    assert saved.read_bytes() != raw
    with pytest.raises(FormatError, match="sha256 differs"):
        tf.load(saved)


def test_corrupt_perm(saved: Path) -> None:
    layer = tf.load(saved)["model.layers.0.down_proj"]
    assert layer.perm is not None
    raw = saved.read_bytes()
    saved.write_bytes(raw.replace(layer.perm.tobytes(), np.zeros(300, np.int32).tobytes()))
    with pytest.raises(LayoutError, match=r"down_proj.*each input channel"):
        tf.load(saved)


@pytest.mark.parametrize("size", [0, 7, 8, 100, 4096, -1, -64])
def test_truncated(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(FormatError):
        tf.load(saved)


def test_misaligned_data(saved: Path) -> None:
    # Stock writers align the data section to 8 bytes; such a file is refused, not read slowly or wrongly.
    raw = saved.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    text = raw[8:start].rstrip()
    text += b" " * (-(8 + len(text)) % 64 + 8)
    saved.write_bytes(len(text).to_bytes(8, "little") + text + raw[start:])
    with pytest.raises(LayoutError, match="bytes past a multiple of 64"):
        tf.load(saved)


def test_a_folder_is_not_a_packed_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        tf.load(tmp_path)


def test_a_checkpoint_is_not_a_packed_file(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match="open_checkpoint"):
        tf.load(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError):
        tf.load(tmp_path / "none")


def test_mutated_headers_are_refused_or_read_the_same(saved: Path) -> None:
    raw = saved.read_bytes()
    text_end = len(raw[: 8 + int.from_bytes(raw[:8], "little")].rstrip())
    expected, source = layers(), random.Random(1)
    alphabet = b'0123456789{}[]",:\\ \x00\xffabktruefalsenull-.'
    refused = 0
    for _ in range(1500):
        mutant = bytearray(raw)
        for _ in range(source.choice((1, 1, 2, 5))):
            at = source.randrange(text_end)
            mutant[at] = source.choice((source.choice(alphabet), mutant[at] ^ (1 << source.randrange(8))))
        if source.random() < 0.2:
            del mutant[source.randrange(len(mutant)) :]
        saved.write_bytes(mutant)
        try:
            loaded = tf.load(saved)
        except TileFuseError:
            refused += 1
            continue
        assert list(loaded) == list(expected)
        assert all(same(layer, expected[name]) for name, layer in loaded.items())
    assert refused > 1000


@pytest.mark.parametrize("suffix", [".partial", ".journal"])
@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_what_is_in_the_way_is_left_alone(tmp_path: Path, suffix: str, kind: str) -> None:
    precious, way = tmp_path / "precious", tmp_path / f"out{suffix}"
    precious.write_text("precious")
    if kind == "folder":
        way.mkdir()
    elif kind == "pipe":
        os.mkfifo(way)
    else:
        way.symlink_to(precious if kind == "link" else "nowhere")
    with pytest.raises(FormatError, match="in the way"):
        PackedWriter(tmp_path / "out", [], resume_key="key")
    assert precious.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"precious", way.name}


def test_a_writer_that_was_overtaken_leaves_the_result_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial file was opened, and before it was locked another process had completed and renamed it."""
    out = tmp_path / "out"
    made = list(layers().values())
    specs = [LayerSpec.of(layer) for layer in made]
    lock = PackedWriter._lock

    def overtaken(writer: PackedWriter) -> None:
        monkeypatch.setattr(PackedWriter, "_lock", lock)
        with PackedWriter(out, specs, resume_key="key") as other:
            for layer in made:
                other.write(layer)
        lock(writer)

    monkeypatch.setattr(PackedWriter, "_lock", overtaken)
    with pytest.raises(FormatError, match="has just completed"):
        PackedWriter(out, specs, resume_key="key")
    assert {name: same(layer, layers()[name]) for name, layer in tf.load(out).items()} == dict.fromkeys(layers(), True)


def test_threads_save_to_the_same_path(tmp_path: Path) -> None:
    """Each writes a file of its own: the result is one of them, whole."""
    made = list(layers().values())
    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(tf.save, tmp_path / "out", made[: 1 + i % 2]) for i in range(8)]:
            result.result()
    assert len(tf.load(tmp_path / "out")) in (1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("path", [None, 3, b"bytes", ["a"], "nul\0"])
def test_what_is_no_path(path: Any) -> None:
    made = list(layers().values())
    for call in (tf.load, lambda path: tf.save(path, made), tf.open_checkpoint):
        with pytest.raises(tf.errors.TileFuseError, match="path is"):
            call(path)
