"""SmolLM2-135M-Instruct through Hugging Face transformers on tilefuse, without a hub.

    python examples/generate_smollm2.py ["a question"] [--bits 4] [--device auto]

The model comes out of a GGUF file in a package, is saved as a Hugging Face folder in bfloat16, quantised by
`tilefuse quantize`, and run by `tilefuse generate`. All is kept in a folder, so that the next call starts at once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from smollm2.export import write_bfloat16
from smollm2.gguf_model import GgufModel, find_gguf

from tilefuse.commands import run

ROOT = Path(__file__).resolve().parent.parent
NAME = "SmolLM2-135M-Instruct"


def checkpoint(folder: Path, bits: int) -> Path:
    """The quantised checkpoint, made if it isn't there.

    Args:
        folder: Where it goes, with the bfloat16 one that it is made from.
        bits: 8, rounded to nearest, or 4 by AWQ's search, which takes some minutes.

    Raises:
        SystemExit: Quantising failed; it has said why.
    """
    source, target = folder / f"{NAME}-bf16", folder / f"{NAME}-w{bits}-hf"
    if not source.exists():
        write_bfloat16(source, GgufModel(find_gguf()))
    if not target.exists():
        method = "rtn" if bits == 8 else "awq"
        command = ["quantize", str(source), str(target), "--bits", str(bits), "--group", "64", "--method", method]
        if status := run(command):
            raise SystemExit(status)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Run SmolLM2-135M-Instruct through transformers on tilefuse.")
    parser.add_argument("question", nargs="?", default="Explain in a few sentences why the sky is blue.")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    parser.add_argument("--device", default="auto", help="as in tilefuse generate (default: auto)")
    parser.add_argument("--tokens", type=int, default=96, help="longest answer (default: 96)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(os.environ.get("TILEFUSE_CACHE", ROOT / "build")) / "smollm2",
        help="folder for checkpoints and packed files (default: $TILEFUSE_CACHE/smollm2, else build/smollm2)",
    )
    args = parser.parse_args()
    model = checkpoint(args.cache, args.bits)
    # The embedding, which is the output head too, has 8 bits in the GGUF file.
    options = ["--device", args.device, "--head", "8", "--cache", str(args.cache / "packed")]
    options += ["--max-new-tokens", str(args.tokens)]
    raise SystemExit(run(["generate", str(model), "--prompt", args.question, *options]))


if __name__ == "__main__":
    main()
