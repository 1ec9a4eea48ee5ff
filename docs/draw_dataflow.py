"""Draws the pictures of docs/dataflow.md into docs/images/ from plans, and rewrites its table of alternatives.

    python docs/draw_dataflow.py

Every number and box comes from `tilefuse.plan` and `tilefuse.configurations`; tests/test_dataflow_docs.py holds the
committed files to what this draws.
"""

from __future__ import annotations

from pathlib import Path

from dataflow_pictures import array, stream, tables, time

from tilefuse import plan
from tilefuse.layout import Layout

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "images"
TEXT = DOCS / "dataflow.md"


def pictures() -> dict[str, str]:
    """Text of each picture, by the name of its file."""
    layer = Layout(k=4096, n=4096, bits=4, group=128)
    gemm = plan.gemm(layer, m=2048)
    return {
        "gemm.svg": array.gemm(gemm),
        "gemv.svg": array.gemv(plan.gemv(layer)),
        "gemv-two-streams.svg": array.gemv_two_streams(plan.gemv(layer, streams=2)),
        "packed-stream.svg": stream.packed(layer),
        "segments.svg": time.segments(plan.gemm(layer, m=512)),
        "memory.svg": time.memory(),
    }


def main() -> None:
    """Writes everything."""
    IMAGES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
        print(IMAGES / name)
    TEXT.write_text(tables.refresh(TEXT.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
