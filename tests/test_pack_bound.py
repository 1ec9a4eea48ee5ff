"""Packing takes less memory above the mapped files than twice the largest tensor, whatever the format.

The kernel holds the process to it: RLIMIT_DATA counts writable private memory, touched or not, so that nothing
short-lived is missed, and an allocation beyond the limit fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import made_checkpoints
import pytest
from conftest import SANITIZED

SHAPE = (8192, 8192)
TENSOR = SHAPE[0] * SHAPE[1] // 2  # bytes of 4-bit codes, the largest tensor

# Twice the tensor, of which the buffer of the packed layer takes more than one: 4288 bytes for 4096 of codes.
PROGRAM = """
import re, resource, sys
from pathlib import Path
import numpy as np
import tilefuse as tf
from tilefuse.convert import pack_checkpoint

def writable():
    return 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

tf.set_num_threads(2)
tf.pack(tf.quantize_linear(np.ones((128, 64), np.float32)))  # the threads have their stacks
limit = writable() + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print(pack_checkpoint(sys.argv[1], sys.argv[2]).layers)
"""


def packs(folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    arguments = [str(folder), str(folder / "packed"), str(limit)]
    return subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.skipif(SANITIZED, reason="the sanitizers' own memory counts")
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
@pytest.mark.parametrize("form", made_checkpoints.FORMATS)
def test_memory_above_the_files(tmp_path: Path, form: str) -> None:
    made_checkpoints.write_checkpoint(tmp_path, form, [SHAPE])
    done = packs(tmp_path, 2 * TENSOR)
    (tmp_path / "packed").unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"
    # What the limit is worth: the packed layer alone does not fit in one tensor's memory.
    done = packs(tmp_path, TENSOR)
    (tmp_path / "model.safetensors").unlink()  # pytest keeps the folders of its last runs
    assert done.returncode != 0
    assert "MemoryError" in done.stderr or "Cannot allocate memory" in done.stderr
