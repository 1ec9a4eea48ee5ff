"""The XDNA2 array (npu2): what a tile holds, what a descriptor can say, what a stream carries.

Each constant says what sets it. The planner refuses what breaks one of these, the emulator enforces the same numbers,
and both name the limit in their message. Sources: *AM* the register database of mlir-aie for AIE2P, *verifier* the
checks of its AIE and AIEX dialects, *observed* what others measured or reported, *assumed* ours.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

COLUMNS = 8
"""Columns of npu2."""

CORE_ROWS = 4
"""Rows of compute tiles: array rows 2 to 5."""

SHIM_ROW = 0
MEM_ROW = 1
FIRST_CORE_ROW = 2

WORD = 4
"""Bytes of a DMA address step and of a stream beat; nothing smaller can be moved or reordered."""


class TileKind(enum.StrEnum):
    """The three kinds of tiles, by their row."""

    SHIM = "shim"
    MEM = "memtile"
    CORE = "core"


@dataclass(frozen=True)
class TileLimits:
    """What one kind of tile has. Lengths and strides of descriptors are in words of `WORD` bytes (AM: field widths)."""

    kind: TileKind
    memory: int
    """Bytes of data memory, 0 for a shim."""
    locks: int
    lock_value: int
    """Largest value of a lock."""
    channels_in: int
    """S2MM channels: stream to memory."""
    channels_out: int
    """MM2S channels: memory to stream."""
    descriptors: int
    descriptors_a_channel: int
    """Descriptors that one channel can use: in a memory tile even channels have the first half, odd ones the second."""
    length: int
    """Words of a transfer at most."""
    dimensions: int
    """Dimensions of an address pattern, without the repeat."""
    size: int
    """Largest size of an inner dimension, as the compiler checks it."""
    stride: int
    """Largest stride."""
    repeat: int
    """Largest size of the repeat (iteration) dimension."""


SHIM = TileLimits(TileKind.SHIM, 0, 16, 63, 2, 2, 16, 16, (1 << 32) - 1, 3, 1023, 1 << 20, 64)
"""Run-time descriptors. The outermost of the three dimensions follows from the length and has no limit; sizes of a
linear transfer have none either (verifier: verifyStridesWraps and the folding of contiguous patterns)."""

MEMTILE = TileLimits(TileKind.MEM, 512 * 1024, 64, 63, 6, 6, 48, 24, (1 << 17) - 1, 4, 512, (1 << 17) - 1, 64)
"""Sizes: the verifier of static patterns refuses 513 and more, though the field holds 1023."""

CORE = TileLimits(TileKind.CORE, 64 * 1024, 16, 63, 2, 2, 16, 16, (1 << 14) - 1, 3, 255, (1 << 13) - 1, 64)

LIMITS = {limits.kind: limits for limits in (SHIM, MEMTILE, CORE)}

STATIC_SIZE = 512
"""Largest size of a dimension of a static pattern, in elements: the verifier refuses 513 and more on every tile."""

STATIC_STRIDE = (1 << 19) - 1
"""Largest stride of a static pattern, in elements (verifier)."""

QUEUE_DEPTH = 4
"""Tasks that wait in the queue of a DMA channel (AM). The planner keeps to it."""

MAX_IN_FLIGHT = 6
"""Tasks of a shim channel before a push is dropped and the run hangs: the queue and what the memory tile's buffers take
(observed: the seventh is lost)."""

PROGRAM_BYTES = 16 * 1024
"""Program memory of a core. The tools' linker script declares more: only our own check of kernel objects notices."""

DEFAULT_STACK = 1024
"""Bytes of stack that a core gets unless its worker asks for more; it lies below the buffers in the same memory."""

BUFFER_ALIGNMENT = 32
"""Bytes that the compiler aligns a tile's buffers to (verifier: the width of a core's loads and stores)."""

HOST_BUFFERS = 16
"""Buffers that a run-time sequence takes."""

# --- what the timing model goes by ------------------------------------------------------------------------------------

CLOCK_HZ = 1.8e9
"""Array clock at the top power level (driver table); 1.7 GHz has been seen in use."""

STREAM_BYTES = 4
"""Bytes a cycle of a stream and of a DMA channel (AM: 32-bit ports)."""

DRAM_READ = 47e9
"""Bytes a second that all shims read together where reads are long and linear (observed: pure DMA 47, in a GEMM 57)."""

DRAM_TOTAL = 63e9
"""Bytes a second, reads and writes together (observed: 63 to 70). Writes have what reads leave of it (assumed: memory
controllers serve reads first)."""

DRAM_LATENCY = 500e-9
"""Seconds from a descriptor's start to its first data (assumed)."""

TASK_ISSUE = 0.3e-6
"""Seconds that the command processor takes for a task: three commands, which write a descriptor's eight words, patch
its address and push it. A command of one word takes 66 ns (observed); the block is taken as two of them (assumed)."""

SYNC_ISSUE = 0.1e-6
"""Seconds of a wait whose task has finished already (assumed)."""

REGISTER_WRITE = 66e-9
"""Seconds that the command processor takes for a word written into a core's memory or a lock (observed)."""

DISPATCH = 60e-6
"""Seconds from the host's call to the first instruction and back (observed: 45 to 110)."""

SWITCH = 2.7e-3
"""Seconds to go from one xclbin's configuration to another's (observed: 2.67 ms)."""

LOCK_CYCLES = 12
"""Core cycles to acquire or release an object: the lock instruction and the choice of the buffer (assumed)."""

CALL_CYCLES = 20
"""Core cycles of a kernel call beside its own: arguments, branches, the rounding mode (assumed)."""


def kind_of(row: int) -> TileKind:
    """The kind of the tiles in a row of the array."""
    return TileKind.SHIM if row == SHIM_ROW else TileKind.MEM if row == MEM_ROW else TileKind.CORE
