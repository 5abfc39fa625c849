"""`python -m trimtab` and the `trimtab` script."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trimtab.cli.main import run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: arguments without the program name; `sys.argv[1:]` if None.

    Returns:
        0 pass, 1 the check failed, 2 usage or configuration error, 3 no feasible plan,
        130 interrupted.
    """
    return run(sys.argv[1:] if argv is None else list(argv))


if __name__ == "__main__":
    sys.exit(main())
