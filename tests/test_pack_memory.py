"""Peak memory of packing a large checkpoint."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tilefuse as tf

K, N, GROUP, LAYERS, SHARDS = 8192, 28672, 128, 16, 4
LIMIT = 600 << 20

# Runs in a process of its own, whose anonymous memory is sampled while it packs. RssAnon is the right figure: the pages
# of the mapped checkpoint (RssFile) are given back whenever memory is short, so VmHWM, which counts them, says how much
# memory the machine has and not how much the job needs.
PROGRAM = """
import re, sys, threading
from pathlib import Path
from tilefuse.convert import pack_checkpoint

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

before = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
packed = pack_checkpoint(sys.argv[1], sys.argv[2])
done.set()
thread.join()
print(packed.layers, max(peak, anonymous()) - before)
"""


def write_checkpoint(folder: Path) -> int:
    """A sharded AutoAWQ checkpoint of random codes; returns its bytes. Written without the library, in small pieces."""
    block = np.random.default_rng(0).bytes(16 << 20)
    scales = np.full(1 << 20, 0.01, np.float16).tobytes()
    shapes = {
        "qweight": ("I32", [K, N // 8], 4, block),
        "qzeros": ("I32", [K // GROUP, N // 8], 4, block),
        "scales": ("F16", [K // GROUP, N], 2, scales),
    }
    weight_map, total = {}, 0
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        header, pieces, end = {}, [], 0
        for layer in range(shard, LAYERS, SHARDS):
            for suffix, (dtype, shape, size, data) in shapes.items():
                nbytes = shape[0] * shape[1] * size
                tensor = f"model.layers.{layer}.proj.{suffix}"
                header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
                weight_map[tensor] = name
                pieces.append((nbytes, data))
                end += nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for nbytes, data in pieces:
                for start in range(0, nbytes, len(data)):
                    file.write(data[: nbytes - start])
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantization = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return total


@pytest.mark.slow
def test_packing_two_gigabytes_takes_little_memory(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "packed"
    folder.mkdir()
    try:
        size = write_checkpoint(folder)
        assert size > 1.9e9
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(folder), str(out)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        layers, peak = map(int, done.stdout.split())
        print(f"peak of anonymous memory: {peak / 2**20:.0f} MiB for {size / 1e9:.2f} GB")
        assert layers == LAYERS
        assert peak < LIMIT
        # The stricter promise: less than twice the largest tensor.
        assert peak < 2 * (K * N // 2)
        first = tf.load(out)["model.layers.0.proj"]
        source = tf.open_checkpoint(folder).linear("model.layers.0.proj")
        np.testing.assert_array_equal(tf.unpack(first).codes[:256], source.codes_kn()[:256])
    finally:
        # pytest keeps the folders of its last runs.
        for path in [*folder.iterdir(), out]:
            path.unlink(missing_ok=True)
