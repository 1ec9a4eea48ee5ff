"""The command line: packing and inspecting AutoAWQ checkpoints made here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import tilefuse as tf
from tilefuse import commands, convert
from tilefuse.storage import PackedFile

CONFIG = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}}
SHAPES = {"model.layers.0.q_proj": (256, 128), "model.layers.0.up_proj": (256, 512), "model.layers.1.q_proj": (256, 96)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {"lm_head.weight": rng.standard_normal((100, 256)).astype(np.float16)}
    for name, (k, n) in SHAPES.items():
        words = rng.integers(-(2**31), 2**31, (k + k // 64, n // 8), np.int64).astype(np.int32)
        tensors[f"{name}.qweight"] = words[:k].copy()
        tensors[f"{name}.qzeros"] = words[k:].copy()
        tensors[f"{name}.scales"] = (rng.standard_normal((k // 64, n)) * 0.01).astype(np.float16)
    tensors["model.layers.0.q_proj.bias"] = rng.standard_normal(128).astype(np.float16)
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_pack(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed.safetensors"
    assert commands.run(["pack", str(checkpoint), "-o", str(out)]) == 0
    assert "3 layers" in (printed := capsys.readouterr().out)
    assert "1 unquantised ones left out" in printed
    loaded, opened = tf.load(out), tf.open_checkpoint(checkpoint)
    assert set(loaded) == set(SHAPES)
    for name, layer in loaded.items():
        source = opened.linear(name)
        np.testing.assert_array_equal(tf.unpack(layer).codes, source.codes_kn())
        np.testing.assert_array_equal(layer.bias, source.bias)
        assert layer.layout.columns == 8
        assert layer.source == "awq-gemm"
    assert PackedFile(out).metadata == {"checkpoint": "model"}
    assert {path.name for path in tmp_path.iterdir()} == {"model", out.name}


def test_pack_options(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "some"
    arguments = [
        "pack",
        str(checkpoint),
        "-o",
        str(out),
        "--columns",
        "4",
        "--include",
        "*.q_proj",
        "--exclude",
        "*.1.*",
    ]
    assert commands.run(arguments) == 0
    ((name, layer),) = tf.load(out).items()
    assert name == "model.layers.0.q_proj"
    assert layer.layout.columns == 4


def test_refuses_to_overwrite(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.write_text("precious")
    assert commands.run(["pack", str(checkpoint), "-o", str(out)]) == 1
    assert "--force" in (message := capsys.readouterr().err)
    assert message.count("\n") == 1
    assert out.read_text() == "precious"
    assert commands.run(["pack", str(checkpoint), "-o", str(out), "--force"]) == 0
    assert len(tf.load(out)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack", "none", "-o", "out"], "none"),
        (["pack", "CKPT", "-o", "out", "--columns", "9"], "columns = 9"),
        (["pack", "CKPT", "-o", "out", "--include", "nothing"], "none of its linear layers"),
        (["pack", "CKPT", "-o", "no/such/folder/out"], "no/such/folder"),
        (["inspect", "none"], "none"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert commands.run([str(checkpoint) if a == "CKPT" else a for a in arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("tilefuse: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_bad_scale_stops_before_packing(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = (checkpoint / "model.safetensors").read_bytes()
    last = tf.open_checkpoint(checkpoint).tensor("model.layers.1.q_proj.scales").tobytes()
    broken = np.frombuffer(last, np.float16).copy()
    broken[5] = np.nan
    (checkpoint / "model.safetensors").write_bytes(raw.replace(last, broken.tobytes()))
    assert commands.run(["pack", str(checkpoint), "-o", str(tmp_path / "out")]) == 1
    assert "model.layers.1.q_proj.scales" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def interrupt_at(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Ctrl-C when layer `count` is about to be packed."""
    calls, real = [0], tf.pack

    def pack(*args: Any, **kwargs: Any) -> tf.PackedLinear:
        calls[0] += 1
        if calls[0] > count:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(convert, "pack", pack)


def test_interrupted_and_resumed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["pack", str(checkpoint), "-o", str(out)]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert commands.run(arguments) == 130
    assert "out.partial" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out.partial", "out.journal"}
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)  # one layer is left
        assert commands.run(arguments) == 0
    assert "2 from the interrupted run" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
    assert commands.run(["pack", str(checkpoint), "-o", str(tmp_path / "again")]) == 0
    assert out.read_bytes() == (tmp_path / "again").read_bytes()


@pytest.mark.parametrize("change", ["none", "options", "no-resume", "mtime", "data"])
def test_resumes_only_the_same_work(
    change: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pack", str(checkpoint), "-o", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        assert commands.run(arguments) == 130
    weights = checkpoint / "model.safetensors"
    if change == "options":
        arguments += ["--columns", "4"]
    elif change == "no-resume":
        arguments += ["--no-resume"]
    elif change == "mtime":
        os.utime(weights, ns=(1, 1))
    elif change == "data":
        weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert commands.run(arguments) == 0
    assert ("interrupted run" in capsys.readouterr().out) is (change == "none")
    opened = tf.open_checkpoint(checkpoint)
    for name, layer in tf.load(tmp_path / "out").items():
        np.testing.assert_array_equal(tf.unpack(layer).codes, opened.linear(name).codes_kn())


def test_inspect(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.run(["inspect", str(checkpoint), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "checkpoint"
    rows = {row["name"]: row for row in found["layers"]}
    assert rows["lm_head"]["scheme"] == "fp16"
    assert rows["lm_head"]["bits_per_weight"] == 16
    assert rows["lm_head"]["padding"] is None
    assert rows["model.layers.1.q_proj"]["scheme"] == "w4 g64 asym"

    out = tmp_path / "out"
    assert commands.run(["pack", str(checkpoint), "-o", str(out)]) == 0
    capsys.readouterr()
    assert commands.run(["inspect", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kind"] == "packed"
    (row,) = [row for row in found["layers"] if row["name"] == "model.layers.0.up_proj"]
    # 256 x 512 in 4 x 8 tiles of 4096 + 2 x 128 + 2 x 64 bytes, K padded to 512: half of it is padding.
    assert (row["k"], row["n"], row["nbytes"]) == (256, 512, 4 * 8 * 4480)
    assert row["padding"] == 1.0
    assert found["total"]["layers"] == 3
    assert found["total"]["nbytes"] == sum(row["nbytes"] for row in found["layers"])

    assert commands.run(["inspect", str(out)]) == 0
    assert "w4 g64 z8 c8" in capsys.readouterr().out


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment, check=False
    )


def test_version_and_usage() -> None:
    done = run("-m", "tilefuse.cli", "--version")
    assert (done.returncode, done.stdout) == (0, f"tilefuse {tf.__version__}\n")
    assert run("-m", "tilefuse.cli", "pack").returncode == 2
    assert run("-m", "tilefuse.cli", "nonsense").returncode == 2
    assert "inspect" in run("-m", "tilefuse.cli", "--help").stdout


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_without_the_extra(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from tilefuse.cli import main; sys.exit(main())"
    done = run("-c", code)
    assert done.returncode == 2
    assert done.stderr == (
        f"tilefuse: the command line needs {module}, which is not installed: pip install rich typer\n"
    )


NAMES = ["a[/b]", "[red]x", "a/b/c", "a\nb", "x\x1b[31m", "日本語", "..", "{x}", "%s", " ", "-o", "\ud800"]
"""Names that are markup, paths, options, format strings, or no text at all to something on the way."""


def rename(folder: Path, names: dict[str, str]) -> None:
    """Renames layers in the header of a folder's file."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = dict(json.loads(data[8:end]).items())
    for old, new in names.items():
        header = {key.replace(f"{old}.", f"{new}."): value for key, value in header.items()}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_any_name(checkpoint: Path, tmp_path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer and file name is packed, loaded and shown as it is, whatever the terminal can write."""
    (tmp_path / "out[").mkdir()
    out = tmp_path / "out[/x].p"
    present = list(SHAPES)
    for i in range(0, len(NAMES), len(SHAPES)):
        rename(checkpoint, dict(zip(present, NAMES[i : i + len(SHAPES)], strict=True)))
        present = NAMES[i : i + len(SHAPES)]
        assert commands.run(["pack", str(checkpoint), "-o", str(out), "--force"]) == 0
        assert set(tf.load(out)) == set(present)
        for path in (checkpoint, out):
            stream = io.TextIOWrapper(io.BytesIO(), encoding)
            monkeypatch.setattr(sys, "stdout", stream)
            assert commands.run(["inspect", str(path)]) == 0
            stream.flush()
            shown = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
            for name in present:
                if name.isprintable() and name.isascii():
                    assert name in shown
            monkeypatch.undo()


def test_never_replaces_its_source_or_what_is_no_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint / "model.safetensors"
    before = source.read_bytes()
    link, hard, folder, pipe = (tmp_path / name for name in ("link", "hard", "folder", "pipe"))
    link.symlink_to(source)
    hard.hardlink_to(source)
    folder.mkdir()
    os.mkfifo(pipe)
    for out in (source, link, hard, folder, pipe):
        for given in (checkpoint, source):
            assert commands.run(["pack", str(given), "-o", str(out), "--force"]) == 1
            assert "never replaced" in capsys.readouterr().err
    assert source.read_bytes() == before
    assert link.is_symlink()
    assert folder.is_dir()
    assert pipe.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "link", "hard", "folder", "pipe"}


def test_pipes_and_broken_links_among_the_files(checkpoint: Path, tmp_path: Path) -> None:
    """A pipe without a writer blocks whoever opens it: none is opened, or none is waited for."""
    os.mkfifo(tmp_path / "pipe")
    assert commands.run(["inspect", str(tmp_path / "pipe")]) == 1
    os.mkfifo(checkpoint / "generation.json")
    (checkpoint / "broken.json").symlink_to("nowhere")
    assert commands.run(["pack", str(checkpoint), "-o", str(tmp_path / "out")]) == 0
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    assert commands.run(["inspect", str(checkpoint)]) == 1


@pytest.mark.parametrize("name", ["packed.bin", "packed.safetensors"])
def test_resumes_beside_the_checkpoint(checkpoint: Path, name: str) -> None:
    """What is being written is no part of the checkpoint that it is made from."""
    out = checkpoint / name

    def interrupt(name: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert.pack_checkpoint(checkpoint, out, progress=interrupt)
    assert convert.pack_checkpoint(checkpoint, out).resumed == 1
