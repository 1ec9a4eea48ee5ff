# The types of the compiled module, one section a binding file.

from typing import Any

# --- bind_layout.cpp ---

LAYOUT_CONSTANTS: dict[str, int]

class TileLayout:
    def __init__(
        self,
        *,
        k: int,
        n: int,
        bits: int,
        tile_group: int,
        zero: int,
        columns: int,
        k_tiles: int,
        tiles_per_column: int,
        tile_bytes: int,
        scale_offset: int,
        zero_offset: int,
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def k_tiles_used(self) -> int: ...
    @property
    def n_tiles_used(self) -> int: ...
    @property
    def groups_per_tile(self) -> int: ...
    def tile_offset(self, n_tile: int, k_tile: int) -> int: ...

def pack(
    layout: TileLayout,
    *,
    codes: int,
    order: int,
    perm: int,
    group: int,
    scales: tuple[int, int, int, int],
    zeros: tuple[int, int, int] | None,
    mins: tuple[int, int, int, int] | None,
    out: int,
) -> tuple[int, int, int]: ...
def unpack(
    layout: TileLayout,
    *,
    packed: int,
    group: int,
    perm: int,
    codes: int,
    scales: int,
    zeros: int,
    mins: int,
) -> None: ...
def dequantize(layout: TileLayout, *, packed: int, perm: int, out: int) -> None: ...

# --- bind_attention.cpp ---

class BlockLayout:
    def __init__(self, *, d: int, dv: int, k16: bool, k8: bool, v16: bool, v8: bool) -> None: ...
    @property
    def bytes(self) -> int: ...

SEQUENCE_FIELDS: tuple[str, ...]

def attend(
    *,
    q: tuple[int, int, int, int],
    k: tuple[int, int, int, int],
    v: tuple[int, int, int, int],
    out: tuple[int, int, int, int],
    lse: tuple[int, int, int],
    sequences: int,
    batch: int,
    heads: int,
    kv_heads: int,
    d: int,
    dv: int,
    scale: float,
    causal: bool,
    window: int,
    words: tuple[int, int, int, int],
    scale_per_row: bool,
    smoothing: int,
    sealed: BlockLayout | None = ...,
    open: BlockLayout | None = ...,
) -> None: ...
def cache_open_bytes(open: BlockLayout, /) -> int: ...

CACHED_FIELDS: tuple[str, ...]

def cache_append(
    *,
    sealed: BlockLayout,
    open: BlockLayout,
    heads: int,
    smoothing: int,
    k: tuple[int, int, int, int],
    v: tuple[int, int, int, int],
    sequences: int,
    batch: int,
) -> None: ...
def cache_reopen(
    *, sealed: BlockLayout, open: BlockLayout, heads: int, smoothing: int, sequences: int, batch: int
) -> None: ...
def attention_probe(
    *,
    q: tuple[int, int, int, int],
    k: tuple[int, int, int, int],
    query_len: int,
    key_len: int,
    head: int,
    heads: int,
    kv_heads: int,
    d: int,
    scale_per_row: bool,
    smoothing: int,
    to: tuple[int, ...],
) -> None: ...

# --- bind_call.cpp ---

class CpuLayer:
    def __init__(self, layout: TileLayout, weights: int, perm: int, bias: int, /) -> None: ...
    def __call__(self, x: Any, axes: int, out: Any, /) -> Any: ...

def environment(name: str, /) -> str | None: ...

# --- bind_block.cpp ---

class DecoderBlock:
    def __init__(
        self,
        qkv: CpuLayer,
        o: CpuLayer,
        gate_up: CpuLayer,
        down: CpuLayer,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        eps: list[float],
        plus_one: bool,
        activation: int,
        /,
    ) -> None: ...
    def step(
        self,
        dtype: int,
        x: int,
        norm_in: int,
        norm_post: int,
        q_norm: int,
        k_norm: int,
        cos: int,
        sin: int,
        keys: int,
        values: int,
        length: int,
        capacity: int,
        y: int,
        /,
    ) -> None: ...

class DecoderBlocks:
    def __init__(self, blocks: tuple[DecoderBlock, ...], /) -> None: ...
    def step(
        self,
        dtype: int,
        x: int,
        addresses: Any,
        cos: int,
        sin: int,
        length: int,
        y: int,
        /,
    ) -> None: ...
    def step_to_end(
        self,
        dtype: int,
        x: int,
        addresses: Any,
        cos: int,
        sin: int,
        length: int,
        norm: int,
        eps: float,
        plus_one: bool,
        head: CpuLayer | None,
        y: int,
        /,
    ) -> None: ...

# --- bind_matmul.cpp ---

def matmul(
    layout: TileLayout,
    weights: int,
    x: int,
    x_dtype: int,
    x_stride: int,
    m: int,
    perm: int,
    bias: int,
    y: int,
    y_dtype: int,
    y_stride: int,
    /,
) -> None: ...
def matmul_int8(
    layout: TileLayout,
    weights: int,
    x: int,
    x_dtype: int,
    x_stride: int,
    m: int,
    perm: int,
    bias: int,
    y: int,
    y_dtype: int,
    y_stride: int,
    /,
) -> None: ...
def cpu_levels() -> list[str]: ...
def cpu_level() -> str: ...
def set_cpu_level(name: str, /) -> None: ...
def num_threads() -> int: ...
def set_num_threads(n: int, /) -> None: ...

# --- bind_probe.cpp ---

class ReadProbe:
    def __init__(self, nbytes: int) -> None: ...
    def run(self) -> float: ...
    @property
    def nbytes(self) -> int: ...

def arithmetic_probes() -> list[str]: ...
def integer_probes() -> list[str]: ...
def run_arithmetic_probe(kind: str, seconds: float) -> float: ...

# --- bind_staging.cpp ---

def stage_bfp16(
    x: int,
    x_dtype: int,
    x_stride: int,
    m: int,
    k: int,
    perm: int,
    out: int,
    k_tiles: int,
    bands: int,
    joined: int,
    row_blocks: int,
    /,
) -> tuple[int, int] | None: ...
