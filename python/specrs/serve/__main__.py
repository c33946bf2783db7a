"""``python -m specrs.serve FILE``: write the table of request fields between the markers of a page."""

from __future__ import annotations

import sys

from specrs.marked import write_tables
from specrs.serve.fields import table

_BEGIN, _END = "<!-- fields -->\n", "<!-- /fields -->\n"


def main(argv: list[str]) -> int:
    """Print the table, or write it between the markers of pages (`write_tables`)."""
    return write_tables(argv, _BEGIN, _END, table())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
