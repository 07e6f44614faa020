"""``python -m perfed``; the console script ``perfed`` is the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see :mod:`perfed.cli`)."""
    from perfed.cli import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
