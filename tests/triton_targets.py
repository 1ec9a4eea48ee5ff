"""Compiles the attention kernels for a GPU that need not be there and prints what came of it, as JSON.

A process of its own: `python triton_targets.py cuda:90`, with TRITON_INTERPRET=0, since a module of kernels is either
compiled or interpreted.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tilefuse.tilemix import triton_kernel
from tilefuse.tilemix.triton_call import blocks_for

TYPES = {
    **dict.fromkeys(("q", "k", "v", "means", "sequence_means", "out"), "*bf16"),
    **dict.fromkeys(("k8", "codes"), "*i8"),
    **dict.fromkeys(("k_scale", "q_scale", "scales", "lse"), "*fp32"),
    **dict.fromkeys(("seqs", "rows", "tiles", "ends", "blocks", "maps", "row_tiles"), "*i32"),
    "words": "*i64",
    "scale": "fp32",
}


def build(name: str, target: GPUTarget, options: dict[str, Any], **constants: Any) -> Any:
    kernel = getattr(triton_kernel, name)
    names = kernel.arg_names
    types = {arg: "constexpr" if arg in constants else TYPES.get(arg, "i32") for arg in names}
    whole = [i for i, arg in enumerate(names) if types[arg][0] == "*" or "stride" in arg]
    aligned = {(i,): [["tt.divisibility", 16]] for i in whole}
    return compile(ASTSource(kernel, types, constants, aligned), target=target, options=options)


def main() -> None:
    backend, arch = sys.argv[1].split(":")
    depth = int(sys.argv[2])
    hip = backend == "hip"
    target = GPUTarget(backend, arch if hip else int(arch), 64 if arch.startswith("gfx9") else 32)
    exact = {"enable_fp_fusion": False}
    sides = {"D": depth, "DP": depth}
    keys = build("quantise_keys", target, exact, **sides, SMOOTH=1, UPCAST=False)
    build("key_means", target, {"num_warps": 1, **exact}, **sides, UPCAST=False)
    rows = build("quantise_rows", target, exact, **sides, PER_TILE=True, CODES=True)
    build("expand", target, exact, CAUSAL=True, WINDOW=True, ROUTED=True, BLOCK=128)
    blocks = blocks_for(arch if hip else "cuda", depth, 4096)
    attend = build(
        "attend",
        target,
        {"num_warps": blocks.warps, "num_stages": blocks.stages, **exact},
        **sides,
        DV=depth,
        DVP=depth,
        BLOCK_M=blocks.rows,
        BLOCK_N=blocks.keys,
        PARTS=64 // blocks.keys,
        CAUSAL=True,
        WINDOW=True,
        ROUTED=True,
        SMOOTH=True,
        PER_TILE=False,
        LSE=True,
        UPCAST=False,
    )
    text = "amdgcn" if hip else "ptx"
    words = re.compile(r"\b(?:wgmma|mma|v_wmma|v_mfma|div)[\w.:]*")
    print(
        json.dumps(
            {
                "binary": len(attend.asm["hsaco" if hip else "cubin"]),
                "shared": attend.metadata.shared,
                "attend": sorted(set(words.findall(attend.asm[text]))),
                "quantise": [sorted(set(words.findall(x.asm[text]))) for x in (keys, rows)],
                "rounding": [x.asm["llir"].count("0x4B400000") for x in (keys, rows)],
            }
        )
    )


if __name__ == "__main__":
    main()
