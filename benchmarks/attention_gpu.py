"""What Triton's compiler makes of the attention kernels for GPUs that need not be there.

    python benchmarks/attention_gpu.py            # a minute; writes docs/benchmarks/attention-gpu.md
    python benchmarks/attention_gpu.py --print    # prints only

Compiled, not run: nothing here is a time. Each kernel goes to machine code for each target (`triton.compile` with a
`GPUTarget`), the attention kernel with the blocks that `tilefuse.tilemix.triton_call.blocks_for` gives. Needs the
[triton] extra, and TRITON_INTERPRET unset.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from page import FOLDER, bullets, command, paragraph, table

TARGETS = {
    "cuda:80": "sm_80 (A100)",
    "cuda:90": "sm_90 (H100)",
    "hip:gfx942": "gfx942 (MI300)",
    "hip:gfx1151": "gfx1151 (Radeon 8060S)",
}
DEPTHS = (64, 128, 256)

_TYPES = {
    **dict.fromkeys(("q", "k", "v", "means", "sequence_means", "out"), "*bf16"),
    **dict.fromkeys(("k8", "codes"), "*i8"),
    **dict.fromkeys(("k_scale", "q_scale", "scales", "lse"), "*fp32"),
    **dict.fromkeys(("seqs", "rows", "tiles", "ends", "blocks", "maps", "row_tiles"), "*i32"),
    "words": "*i64",
    "scale": "fp32",
}
_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|v_wmma|v_mfma)[\w.]*")


@dataclass(frozen=True)
class Compiled:
    """Of one target and head dimension.

    Attributes:
        binary: Bytes of the attention kernel's machine code.
        rows, keys, warps: Its blocks.
        local: Bytes of local ("shared") memory that a block of threads takes.
        registers: Vector registers of a thread.
        stack: Bytes that a thread has beside registers, for what it spills.
        spills: Loads and stores of such bytes in the innermost loops over tiles; None where not counted.
        matrix: Its matrix instructions.
        divisions: Divisions of the quantisers, as PTX names them; AMD's take several instructions each.
        roundings: Additions of 1.5 * 2^23 in each quantiser.
    """

    binary: int
    rows: int
    keys: int
    warps: int
    local: int
    registers: int
    stack: int
    spills: int | None
    matrix: list[str]
    divisions: list[list[str]]
    roundings: list[int]


def compiled(target: str, depth: int) -> Compiled:
    """Compiles in this process, which must not have Triton's interpreter on."""
    from triton.backends.compiler import GPUTarget

    from tilefuse.tilemix.triton_call import blocks_for

    backend, arch = target.split(":")
    hip = backend == "hip"
    gpu = GPUTarget(backend, arch if hip else int(arch), 64 if arch.startswith("gfx9") else 32)
    exact = {"enable_fp_fusion": False}
    sides = {"D": depth, "DP": depth}
    keys = _build("quantise_keys", gpu, exact, **sides, SMOOTH=1, UPCAST=False)
    _build("key_means", gpu, {"num_warps": 1, **exact}, **sides, UPCAST=False)
    rows = _build("quantise_rows", gpu, exact, **sides, PER_TILE=True, CODES=True)
    _build("expand", gpu, exact, CAUSAL=True, WINDOW=True, ROUTED=True, BLOCK=128)
    blocks = blocks_for(arch if hip else "cuda", depth, 4096)
    attend = _build(
        "attend",
        gpu,
        {"num_warps": blocks.warps, "num_stages": blocks.stages, **exact},
        **sides,
        DV=depth,
        DVP=depth,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.keys,
        PARTS=64 // blocks.keys,
        CAUSAL=True,
        WINDOW=False,
        ROUTED=True,
        SMOOTH=True,
        PER_TILE=False,
        LSE=True,
        UPCAST=False,
    )
    text = "amdgcn" if hip else "ptx"
    registers, stack, spills = _amd_usage(attend.asm[text]) if hip else _nvidia_usage(attend.asm["cubin"])
    return Compiled(
        len(attend.asm["hsaco" if hip else "cubin"]),
        blocks.rows,
        blocks.keys,
        blocks.warps,
        attend.metadata.shared,
        registers,
        stack,
        spills,
        sorted(set(_MATRIX.findall(attend.asm[text]))),
        [sorted(set(re.findall(r"\bdiv\.[\w.]+", x.asm[text]))) for x in (keys, rows)],
        [x.asm["llir"].count("0x4B400000") for x in (keys, rows)],
    )


def _build(name: str, target: Any, options: dict[str, Any], **constants: Any) -> Any:
    from triton.compiler import ASTSource, compile

    from tilefuse.tilemix import triton_kernel

    kernel = getattr(triton_kernel, name)
    names = kernel.arg_names
    types = {arg: "constexpr" if arg in constants else _TYPES.get(arg, "i32") for arg in names}
    whole = [i for i, arg in enumerate(names) if types[arg][0] == "*" or "stride" in arg]
    return compile(
        ASTSource(kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in whole}),
        target=target,
        options=options,
    )


def _amd_usage(assembly: str) -> tuple[int, int, int]:
    def of(name: str) -> int:
        found = re.search(rf"\.{name}: +(\d+)", assembly)
        return int(found[1]) if found else 0

    # The loops that run once a tile are those with exponentials beside their matrix instructions.
    loops = [
        block
        for block in re.split(r"\n(?=\.LBB\d+_\d+:|; %bb)", assembly)
        if re.search(r"v_(wmma|mfma)", block) and "v_exp_f32" in block
    ]
    spills = sum(len(re.findall(r"scratch_(?:load|store)", loop)) for loop in loops)
    return of("vgpr_count"), of("private_segment_fixed_size"), spills


def _nvidia_usage(cubin: bytes) -> tuple[int, int, None]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))  # type: ignore[index]
    return registers, stack, None


def in_a_process(target: str, depth: int) -> Compiled:
    """`compiled`, whatever this process has set for Triton."""
    with tempfile.TemporaryDirectory() as cache:
        made = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--one", target, str(depth)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache},
        )
    if made.returncode:
        raise RuntimeError(f"no kernels for {target}, d = {depth}: {made.stderr[-2000:]}")
    return Compiled(**json.loads(made.stdout.splitlines()[-1]))


def _scores_by(found: Compiled, int8: bool) -> str:
    kind = re.compile(r"s8|_i32_") if int8 else re.compile(r"bf16")
    names = [
        re.sub(r"^wgmma\.mma_async\.sync\.aligned\.|\.row\.col|\.sync\.aligned", "", name) for name in found.matrix
    ]
    return ", ".join(f"`{name}`" for name in names if kind.search(name))


def document() -> str:
    """The page."""
    found = {(target, depth): in_a_process(target, depth) for target in TARGETS for depth in DEPTHS}
    rows = [
        (
            TARGETS[target],
            str(depth),
            f"{each.rows} x {each.keys}",
            str(each.warps),
            str(each.registers),
            str(each.stack),
            "" if each.spills is None else str(each.spills),
            f"{each.local / 1024:.0f}",
        )
        for (target, depth), each in found.items()
    ]
    instructions = [
        (TARGETS[target], _scores_by(found[target, 128], True), _scores_by(found[target, 128], False))
        for target in TARGETS
    ]
    parts = [
        "# Attention on a GPU: what the compiler makes of it",
        paragraph("""Written by `python benchmarks/attention_gpu.py`; its head states the method. Compiled, **not run**:
        no GPU was at hand, so nothing on this page is a time, and how fast the kernels are is not known."""),
        bullets([f"- {datetime.datetime.now(datetime.UTC).date().isoformat()}; Triton {version('triton')}."]),
        "## Resources",
        paragraph("""Blocks: query rows of a program by keys of a step. *Stack*: bytes a thread has beside its
        registers. *Spills*: loads and stores of these in the loops over tiles (where the assembly shows it). Local
        memory: of a block of threads."""),
        table(("target", "d", "blocks", "warps", "registers", "stack", "spills", "local, KiB"), rows),
        "## Matrix instructions",
        paragraph("""At d = 128. The 16-bit ones multiply scores and P V alike. Where INT8 ones take twice the channels
        (k32 and k16; 32x32x16 and 32x32x8), INT8 scores take half as many; where they take as many, as on gfx1151, INT8
        saves bytes of keys, and no matrix instructions."""),
        table(("target", "INT8", "16-bit"), instructions),
    ]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes or prints the page; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--one"]:
        print(json.dumps(asdict(compiled(given[1], int(given[2])))))
        return 0
    return command("Compile attention for GPUs.", document, FOLDER / "attention-gpu.md", arguments)


if __name__ == "__main__":
    sys.exit(main())
