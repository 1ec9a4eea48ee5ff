"""A package ``aie`` that has mlir-aie's names as far as designs use them, and prints what a design does with them."""

from __future__ import annotations

from pathlib import Path

IRON = """
TASKS = []


class Handle:
    def __init__(self, fifo):
        self.fifo = fifo

    def fill(self, host, *, tap, group, wait=False):
        TASKS.append(f"fill {self.fifo.name} {tap.offset} {tap.sizes} {tap.strides}")

    def drain(self, host, *, tap, wait, group):
        TASKS.append(f"drain {self.fifo.name} {tap.offset} {tap.sizes} {tap.strides}")

    def forward(self, **_):
        return ObjectFifo(None, name="forwarded")

    def split(self, offsets, **_):
        return [ObjectFifo(None, name="part") for _ in offsets]

    join = split


class ObjectFifo:
    def __init__(self, obj_type, *, depth=2, name=None):
        self.name = name

    def prod(self, tile=None, depth=None):
        return Handle(self)

    cons = prod


class Record:
    def __init__(self, *arguments, **keywords):
        pass


class Worker(Record):
    pass


class Buffer(Record):
    pass


class Kernel(Record):
    pass


class TaskGroup(Record):
    def finish(self):
        TASKS.append("wait")


class Runtime:
    def __init__(self, sequence, arguments):
        self.sequence, self.arguments = sequence, arguments


class Program:
    def __init__(self, device, runtime, workers):
        self.device, self.runtime, self.workers = device, runtime, workers

    def resolve_program(self):
        TASKS.clear()
        self.runtime.sequence(*self.runtime.arguments)
        return "\\n".join([f"module on {type(self.device).__name__} with {len(self.workers)} cores", *TASKS])
"""

DEVICE = """
class Tile:
    def __init__(self, column, row):
        pass


class NPU2:
    pass


class NPU2Col4:
    pass
"""

TAPLIB = """
class TensorAccessPattern:
    def __init__(self, tensor_dims, offset, sizes, strides):
        self.offset, self.sizes, self.strides = offset, sizes, strides
"""

MODULES = {
    "aie/iron/__init__.py": IRON,
    "aie/iron/device.py": DEVICE,
    "aie/iron/controlflow.py": "range_ = range\n",
    "aie/helpers/__init__.py": "",
    "aie/helpers/taplib.py": TAPLIB,
}

NAMES = ("aie.iron", "aie.iron.device", "aie.iron.controlflow", "aie.helpers", "aie.helpers.taplib")


def write(site: Path) -> None:
    """Adds the modules to a folder that has a package ``aie`` or none yet."""
    for name, text in MODULES.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (site / "aie" / "__init__.py").touch()
