"""The emulated device's xclbins: small files that name a configuration, from which the array is set up."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from pathlib import Path

from tilefuse.configurations import Configuration
from tilefuse.emulator.instructions import InstructionError, configuration_document, read_configuration

MAGIC = "tilefuse-emulated-xclbin"

VERSION = 1

KERNEL = "MLIR_AIE"
"""Name of the kernel, as aiecc calls it."""

HOST_BUFFERS = 5
"""Host buffers that the kernel declares: aiecc declares so many where a sequence takes fewer (SidecarFiles.h)."""

_NAMESPACE = uuid.UUID("6f4d3b1e-52b7-5d0a-9a55-3d5f3b7a9c11")


@dataclass(frozen=True)
class Image:
    """What an emulated xclbin says."""

    configuration: Configuration
    kernel: str
    host_buffers: int
    uuid: str


def dump(configuration: Configuration, kernel: str = KERNEL, host_buffers: int = HOST_BUFFERS) -> bytes:
    """The bytes of the xclbin of ``configuration``."""
    document = {
        "magic": MAGIC,
        "version": VERSION,
        "kernel": kernel,
        "host_buffers": host_buffers,
        "configuration": configuration_document(configuration),
    }
    return f"{json.dumps(document, indent=1, sort_keys=True)}\n".encode()


def load(data: bytes) -> Image:
    """What the bytes of an xclbin say.

    Raises:
        InstructionError: They are no emulated xclbin of this version; the message says what they are.
    """
    if data.startswith(b"xclbin2"):
        raise InstructionError("this xclbin is for the hardware; the emulated device loads those of EmulatedArtifacts")
    try:
        document = json.loads(data)
        magic, version = document["magic"], document["version"]
        kernel, host_buffers = document["kernel"], document["host_buffers"]
        configuration = document["configuration"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InstructionError("no xclbin of the emulated device") from None
    if magic != MAGIC or version != VERSION:
        raise InstructionError(f"{magic!r} of version {version!r}; this tilefuse reads {MAGIC!r} of version {VERSION}")
    if type(kernel) is not str or type(host_buffers) is not int or not 0 <= host_buffers <= 16:
        raise InstructionError(f"kernel {kernel!r} with {host_buffers!r} host buffers")
    if not isinstance(configuration, dict):
        raise InstructionError("no configuration")
    return Image(read_configuration(configuration), kernel, host_buffers, str(uuid.uuid5(_NAMESPACE, data.hex())))


def write(path: Path, configuration: Configuration) -> None:
    """Writes the xclbin of ``configuration``."""
    path.write_bytes(dump(configuration))
