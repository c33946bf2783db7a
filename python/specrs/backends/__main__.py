"""``python -m specrs.backends [FILE]``: print the table of backends, or write it between the markers of a file."""

from __future__ import annotations

import sys
from pathlib import Path

from specrs._specrs import SpecrsError
from specrs.backends import BACKENDS
from specrs.backends.table import rewrite, table


def main(argv: list[str]) -> int:
    """Exit status 2 where the file cannot be rewritten."""
    backends = [cls() for cls in BACKENDS.values()]
    if not argv:
        print(table(backends), end="")
        return 0
    try:
        for name in argv:
            print(f"{name}: {'rewritten' if rewrite(Path(name), backends) else 'up to date'}")
    except (SpecrsError, OSError) as error:
        print(f"specrs: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
