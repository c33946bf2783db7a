"""The tables of draft heads in docs/models.md, from `head_forms`: `make heads-table` writes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from specrs.models.head_forms import FORMS, OTHERS

BEGIN = "<!-- heads: written by `make heads-table` from python/specrs/models/head_forms.py; do not edit -->\n"
END = "<!-- heads: end -->\n"


def table() -> str:
    """Markdown: a row for each form that runs, and in a second table one for each that is refused."""
    rows = ["| form | written by | recognised by | for example |", "|---|---|---|---|"]
    for form in FORMS:
        names = [*form.architectures, *([f"speculators_model_type: {form.speculators}"] if form.speculators else [])]
        marks = f"{_code(names)}{' with ' if form.tensors else ''}{_code(form.tensors)}"
        rows.append(f"| {form.name} | {form.trainer} | {marks} | {_code(form.heads)} |")
    rows += ["", "| refused by name | because it |", "|---|---|"]
    rows += [f"| {other.name} | {other.drafts} |" for other in OTHERS]
    return "".join(f"{row}\n" for row in rows)


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(argv: Sequence[str]) -> int:
    """Print the tables, or write them between the markers of files. Exit status 2 where one has no markers."""
    if not argv:
        print(table(), end="")
    for name in argv:
        head, begin, rest = Path(name).read_text(encoding="utf-8").partition(BEGIN)
        _, end, tail = rest.partition(END)
        if not begin or not end:
            print(f"specrs: {name}: has no {BEGIN.strip()} and {END.strip()}", file=sys.stderr)
            return 2
        Path(name).write_text(head + begin + table() + end + tail, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
