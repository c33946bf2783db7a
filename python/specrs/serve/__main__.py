"""``python -m specrs.serve FILE``: write the table of request fields between the markers of a page."""

from __future__ import annotations

import sys
from pathlib import Path

from specrs.serve.fields import table

_BEGIN, _END = "<!-- fields -->\n", "<!-- /fields -->\n"


def main(argv: list[str]) -> int:
    """Exit status 2 where a page has no markers."""
    for name in argv:
        head, begin, rest = Path(name).read_text(encoding="utf-8").partition(_BEGIN)
        _, end, tail = rest.partition(_END)
        if not begin or not end:
            print(f"specrs: {name}: has no {_BEGIN.strip()} and {_END.strip()}", file=sys.stderr)
            return 2
        Path(name).write_text(head + begin + table() + end + tail, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
