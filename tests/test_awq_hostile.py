"""`tilefuse quantize` given what it can't take: an error that says what, at once, and nothing half written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tiny_models

from tilefuse import commands
from tilefuse.awq import Options, checks, quantize_checkpoint
from tilefuse.errors import DiskSpaceError, FormatError, QuantizationError, UnsupportedFormatError
from tilefuse.formats.output import Shards

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore"),  # theirs
]

TEXT = "The quick brown fox jumps over the lazy dog, and then it sits down. Why would it not? " * 12
WEIGHTS = "model.safetensors"
RTN = Options(group=32, method="rtn")
AWQ = Options(group=32, calibration=TEXT)

Change = Callable[[Path], Any]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch", reason="the [peers] extra is not installed")
    pytest.importorskip("transformers", minversion="5", reason="the [peers] extra is not installed")
    return tiny_models.save(tiny_models.make_model("llama"), tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "source")
    return tmp_path / "source"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        found = tiny_models.read_config(folder) | changes
        found = {key: value for key, value in found.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(found))

    return change


def weights(**changes: Any) -> Change:
    """Tensors by name: a function of the old one, or None to drop it."""

    def change(folder: Path) -> None:
        found = safetensors.numpy.load_file(folder / WEIGHTS)
        for name, new in changes.items():
            found[name] = np.ascontiguousarray(new(found[name])) if new else None
        kept = {name: value for name, value in found.items() if value is not None}
        safetensors.numpy.save_file(kept, folder / WEIGHTS, {"format": "pt"})

    return change


def drop(*files: str) -> Change:
    return lambda folder: [(folder / file).unlink() for file in files]


def write(file: str, text: str) -> Change:
    return lambda folder: (folder / file).write_text(text)


def one_shard_less(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()


BOTH: list[tuple[str, Change, type[Exception], str]] = [
    ("no config", drop("config.json"), FormatError, r"config\.json is missing"),
    ("no weights", drop(WEIGHTS), FormatError, r"no \.safetensors file"),
    ("a shard that is not there", one_shard_less, FormatError, "model-00001-of-00002"),
    ("config is no JSON", write("config.json", "{"), FormatError, "not valid JSON"),
    ("config is a list", write("config.json", "[1]"), FormatError, "must be an object"),
    ("truncated", lambda folder: os.truncate(folder / WEIGHTS, 99_000), FormatError, "truncated"),
    ("empty", lambda folder: os.truncate(folder / WEIGHTS, 0), FormatError, "safetensors"),
    ("another architecture", config(model_type="opt"), UnsupportedFormatError, "'opt' is not quantised; taken: llama"),
    ("with vision", config(model_type="gemma3"), UnsupportedFormatError, "gemma3_text"),
    ("no architecture", config(model_type=None), UnsupportedFormatError, "None is not quantised"),
    ("a list of them", config(model_type=["llama"]), UnsupportedFormatError, r"\['llama'\] is not quantised"),
    ("more blocks", config(num_hidden_layers=3), FormatError, r"model\.layers\.2\.self_attn\.q_proj"),
    ("countless blocks", config(num_hidden_layers=1 << 40), FormatError, r"model\.layers\.2\."),
    ("blocks in words", config(num_hidden_layers="two"), FormatError, "'two' is not a positive integer"),
    ("no number of blocks", config(num_hidden_layers=None), FormatError, "None is not a positive integer"),
    ("wider", config(hidden_size=128), FormatError, "q_proj' has 64 input channels.*128: they are not of one model"),
    ("wider inside", config(intermediate_size=256), FormatError, "gate_proj' has 128 output channels.*256"),
    ("heads in words", config(num_attention_heads="4"), FormatError, "num_attention_heads = '4'"),
    ("no keys", config(num_key_value_heads=0), FormatError, "num_key_value_heads = 0 is not a positive"),
    ("fewer keys", config(num_key_value_heads=1), FormatError, "k_proj' has 64 output channels.*32"),
    (
        "a layer that is missing",
        weights(**{"model.layers.1.mlp.up_proj.weight": None}),
        FormatError,
        r"no linear layer 'model\.layers\.1\.mlp\.up_proj'",
    ),
    (
        "a layer of another size",
        weights(**{"model.layers.1.mlp.up_proj.weight": lambda w: w[:120]}),
        FormatError,
        "up_proj' has 120 output channels.*128",
    ),
    (
        "integers",
        weights(**{"model.layers.0.mlp.up_proj.weight": lambda w: w.astype(np.int8)}),
        FormatError,
        "up_proj",
    ),
]


@pytest.mark.parametrize("options", [RTN, AWQ], ids=["rtn", "awq"])
@pytest.mark.parametrize(("change", "error", "message"), [case[1:] for case in BOTH], ids=[case[0] for case in BOTH])
def test_sources(
    change: Change, error: type[Exception], message: str, options: Options, source: Path, tmp_path: Path
) -> None:
    change(source)
    with pytest.raises(error, match=message):
        quantize_checkpoint(source, tmp_path / "out", options)
    assert names(tmp_path) == ["source"]


FOR_AWQ: list[tuple[str, Change, str]] = [
    ("no tokenizer", drop("tokenizer.json", "tokenizer_config.json"), "no tokenizer .* copy the model's tokenizer"),
    ("a damaged tokenizer", write("tokenizer.json", "{"), "no tokenizer that transformers can read"),
    ("an activation that is not there", config(hidden_act="nope"), "transformers can't make a model of it .*'nope'"),
    (
        "a norm of another size",
        weights(**{"model.norm.weight": lambda w: w[:32]}),
        r"'model\.norm\.weight' has shape \[32\].*\[64\]",
    ),
    ("no norm", weights(**{"model.norm.weight": None}), r"model\.norm\.weight"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in FOR_AWQ], ids=[case[0] for case in FOR_AWQ])
def test_sources_that_rounding_takes(change: Change, message: str, source: Path, tmp_path: Path) -> None:
    change(source)
    with pytest.raises(FormatError, match=message):
        quantize_checkpoint(source, tmp_path / "out", AWQ)
    assert names(tmp_path) == ["source"]
    assert quantize_checkpoint(source, tmp_path / "out", RTN).layers == 14


def with_nan(w: Any) -> Any:
    w[5, 7] = np.nan
    return w


@pytest.mark.parametrize("options", [RTN, AWQ], ids=["rtn", "awq"])
def test_weights_that_are_not_finite(options: Options, source: Path, tmp_path: Path) -> None:
    weights(**{"model.layers.1.self_attn.o_proj.weight": with_nan})(source)
    with pytest.raises(QuantizationError, match=r"model\.layers\.1\.self_attn\.o_proj|model\.layers\.1\.mlp"):
        quantize_checkpoint(source, tmp_path / "out", options)
    assert names(tmp_path) == ["out.partial", "source"]  # the first block, which was good


def test_activations_that_are_not_finite(source: Path, tmp_path: Path) -> None:
    def row(w: Any) -> Any:
        w[:] = np.inf
        return w

    weights(**{"model.layers.0.input_layernorm.weight": row})(source)
    with pytest.raises(QuantizationError, match=r"inputs of 'model\.layers\.0\.self_attn\.q_proj' are not finite"):
        quantize_checkpoint(source, tmp_path / "out", AWQ)
    assert names(tmp_path) == ["source"]


def test_what_is_there_stays(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(FileExistsError, match="out exists"):
        quantize_checkpoint(source, out, RTN)
    assert out.read_text() == "mine"
    out.unlink()
    out.mkdir()
    (out / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="out exists"):
        quantize_checkpoint(source, out, RTN)
    with pytest.raises(FileExistsError, match="source exists"):
        quantize_checkpoint(source, source, RTN)
    shutil.rmtree(out)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="not made by this command"):
        quantize_checkpoint(source, out, RTN)
    assert (tmp_path / "out.partial" / "file").read_text() == "mine"
    assert names(tmp_path) == ["out.partial", "source"]


def test_an_output_that_appears_meanwhile(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def progress(what: str, done: int, total: int) -> None:
        if what == "writing":
            out.mkdir()
            (out / "file").write_text("mine")

    with pytest.raises(FileExistsError, match="out exists"):
        quantize_checkpoint(source, out, RTN, progress=progress)
    assert names(out) == ["file"]
    assert names(tmp_path) == ["out", "out.partial", "source"]
    shutil.rmtree(out)
    assert quantize_checkpoint(source, out, RTN).resumed == 2
    assert names(tmp_path) == ["out", "source"]


def test_two_at_once(source: Path, tmp_path: Path) -> None:
    """The second is refused, whatever its options, and does the first no harm."""
    out = tmp_path / "out"
    refused = 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal refused
        for resume in (True, False):
            with pytest.raises(FormatError, match=r"out\.partial: another process is working in it"):
                quantize_checkpoint(source, out, RTN, resume=resume)
            refused += 1

    quantize_checkpoint(source, out, RTN, progress=progress)
    assert refused
    assert names(tmp_path) == ["out", "source"]


def test_into_the_empty_folder_one_is_in(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    quantize_checkpoint(source, ".", RTN)
    assert (tmp_path / "here" / "model.safetensors").is_file()
    assert names(tmp_path) == ["here", "source"]


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_a_disk_that_is_too_small(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, blocks = tmp_path / "new" / "out", 0

    def progress(what: str, done: int, total: int) -> None:
        nonlocal blocks
        if what == "writing":
            blocks = size_of(tmp_path / "new" / "out.partial")

    quantize_checkpoint(source, out, RTN, progress=progress)
    whole = size_of(out / "model.safetensors") + (out / "model.safetensors").stat().st_size
    shutil.rmtree(tmp_path / "new")

    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))
    # The blocks and the file are there together, and the file twice for a moment. Headers and settings are not counted.
    free = int(0.95 * (blocks + whole))
    with pytest.raises(DiskSpaceError, match=r"0\.00 GB are needed.*free some"):
        quantize_checkpoint(source, out, RTN)
    assert names(tmp_path) == ["new", "source"] or names(tmp_path) == ["source"]
    assert not out.exists()
    free = int(1.05 * (blocks + 2 * whole))
    assert quantize_checkpoint(source, out, RTN).layers == 14


@pytest.mark.parametrize(("tensors", "left"), [(3, []), (60, ["out.partial"])])
def test_a_disk_that_fills_up(
    tensors: int, left: list[str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, added = Shards.add, 0

    def add_some(self: Shards, name: str, array: Any) -> None:
        nonlocal added
        added += 1
        if added > tensors:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, name, array)

    monkeypatch.setattr(Shards, "add", add_some)
    with pytest.raises(DiskSpaceError, match="no space left on the disk; free some"):
        quantize_checkpoint(source, tmp_path / "out", RTN)
    assert names(tmp_path) == [*left, "source"]
    monkeypatch.setattr(Shards, "add", add)
    done = quantize_checkpoint(source, tmp_path / "out", RTN)
    assert done.resumed == (2 if left else 0)
    assert names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard-gb", "nan"], "--shard-gb = nan"),
        (["--shard-gb", "inf"], "--shard-gb = inf"),
        (["--shard-gb", "0"], "--shard-gb = 0"),
        (["--bits", "5"], "bits = 5"),
        (["--group", "0"], "group = 0"),
        (["--method", "best"], "'awq' and 'rtn'"),
        (["--calibration", "nowhere"], "nowhere"),
        (["--calibration", "latin"], "not a text in UTF-8"),
        (["--text", "latin"], "not a text in UTF-8"),
    ],
)
def test_command(
    options: list[str],
    message: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    assert commands.run(["quantize", str(source), "out", "--group", "32", *options]) == 1
    found = capsys.readouterr()
    assert message in found.err
    assert found.out == ""
    assert names(tmp_path) == ["latin", "source"]


def test_perplexity_is_reported_where_torch_is_needed_anyway(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text(TEXT)
    text = ["--text", str(tmp_path / "text"), "--calibration", str(tmp_path / "text"), "--group", "32"]
    for name, options, reported in (
        ("a", [], True),
        ("b", ["--method", "rtn"], False),
        ("c", ["--no-report"], False),
        ("d", ["--method", "rtn", "--report"], True),
    ):
        assert commands.run(["quantize", str(source), str(tmp_path / name), *text, *options]) == 0
        assert ("perplexity on" in capsys.readouterr().out) == reported
