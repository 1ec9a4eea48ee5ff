"""The ``tilefuse`` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command; returns its exit status."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        # What is wrong with an installation should not take a complete one to be found.
        if sys.argv[1:2] == ["doctor"]:
            from tilefuse.doctor.__main__ import main as doctor

            return doctor(sys.argv[2:])
        sys.stderr.write(
            f"tilefuse: the command line needs {error.name}, which is not installed: pip install rich typer\n"
        )
        return 2
    from tilefuse.commands import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
