"""``python -m tilefuse.doctor``: the doctor where the command line's packages are not installed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tilefuse.doctor import show


def main(arguments: Sequence[str]) -> int:
    """Runs the doctor; returns its exit status: 1 if the NPU can't be used."""
    parser = argparse.ArgumentParser(prog="tilefuse doctor", description="What this machine has and lacks for the NPU.")
    parser.add_argument("--json", action="store_true", help="print JSON, for bug reports")
    return show.main(as_json=parser.parse_args(arguments).json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
