"""Tables in pages of the documentation, which programs write between two markers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path


def write_tables(pages: Sequence[str], begin: str, end: str, table: str) -> int:
    """Write a table between the markers of pages, or print it where no page is named.

    Returns:
        The exit status: 2 where a page has no such markers, which ends the work.
    """
    if not pages:
        print(table, end="")
    for name in pages:
        head, first, rest = Path(name).read_text(encoding="utf-8").partition(begin)
        _, last, tail = rest.partition(end)
        if not first or not last:
            print(f"specrs: {name}: has no {begin.strip()} and {end.strip()}", file=sys.stderr)
            return 2
        Path(name).write_text(head + begin + table + end + tail, encoding="utf-8")
    return 0
