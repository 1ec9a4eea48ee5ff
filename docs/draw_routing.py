"""Draws the layouts of INT8 score tiles: docs/images/routing.png.

    python docs/draw_routing.py

It needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path

from tilefuse import routing
from tilefuse.tilemix.picture import image

PICTURE = Path(__file__).resolve().parent / "images" / "routing.png"
KEYS = 4096


def panels() -> list[tuple[str, routing.Routing]]:
    """Each layout at one half of the tiles, and the default."""
    half = {
        "band": routing.band,
        "global_": routing.global_,
        "row_random": routing.row_random,
        "aligned": routing.aligned,
        "bigbird": routing.bigbird,
        "sptrans": routing.sptrans,
    }
    found = [(f"{name}(0.5)", make(0.5, seq_len=KEYS)) for name, make in half.items()]
    found.append(('sptrans(0.5, compat="release")', routing.sptrans(0.5, seq_len=KEYS, compat="release")))
    found.append(("local_sink(0.75)", routing.local_sink(0.75, seq_len=KEYS)))
    return found


def main() -> None:
    """Writes the picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    image(panels(), PICTURE)
    print(PICTURE)


if __name__ == "__main__":
    main()
