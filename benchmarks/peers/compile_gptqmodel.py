"""Compiles GPTQModel's CPU kernel for 4-bit weights: compile_gptqmodel.py SOURCE INTO, by an interpreter with torch."""

import sys
from pathlib import Path

from torch.utils.cpp_extension import load

NAME = "int4_qzero_group_scaled_cpu"
FLAGS = ["fma", "f16c", "avx512f", "avx512bf16", "avx512vl", "avx512dq", "avx512bw", "avx512vbmi"]


def main(source: Path, into: Path) -> None:
    """``source`` is the unpacked source distribution; the library goes into the folder ``into``, with its version."""
    folder = source / "gptqmodel_ext" / NAME
    into.mkdir(parents=True, exist_ok=True)
    load(
        name=f"gptqmodel_{NAME}",
        sources=[str(path) for path in sorted(folder.glob("*.cpp"))],
        extra_cflags=["-O3", "-fopenmp", *(f"-m{flag}" for flag in FLAGS)],
        extra_ldflags=["-fopenmp"],
        extra_include_paths=[str(folder)],
        build_directory=str(into),
        is_python_module=False,
    )
    (into / "version").write_text(source.name.rpartition("-")[2] + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
