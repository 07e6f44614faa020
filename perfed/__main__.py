"""``python -m perfed``; the console script ``perfed`` is the same."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing's own is one import more that a Ctrl-C could hit outside of main()
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (see :mod:`perfed.cli`), 130 when a Ctrl-C comes while it is being imported."""
    try:
        from perfed.cli import main as run

        return run(argv)
    except KeyboardInterrupt:
        print("perfed: interrupted", file=sys.stderr, flush=True)
        return 130
    finally:
        exec("")  # a Ctrl-C inside another exec, such as dataclass's, marks the process to die of SIGINT at its exit; this clears the mark


if __name__ == "__main__":
    sys.exit(main())
