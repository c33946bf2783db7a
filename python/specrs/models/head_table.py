"""The tables of draft heads in docs/models.md, from `head_forms`: `make heads-table` writes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from specrs.marked import write_tables
from specrs.models.head_forms import FORMS, OTHERS

BEGIN = "<!-- heads: written by `make heads-table` from python/specrs/models/head_forms.py; do not edit -->\n"
END = "<!-- heads: end -->\n"


def table() -> str:
    """Markdown: a row for each form that runs, and in a second table one for each that is refused."""
    rows = ["| form | written by | recognised by | for example |", "|---|---|---|---|"]
    for form in FORMS:
        names = [*form.architectures, *([f"speculators_model_type: {form.speculators}"] if form.speculators else [])]
        keys = [key if value is None else f"{key}: {value}" for key, value in form.keys.items()]
        marks = f"{_code(names)}{' with ' if form.tensors or keys else ''}{_code([*form.tensors, *keys])}"
        rows.append(f"| {form.name} | {form.trainer} | {marks} | {_code(form.heads)} |")
    rows += ["", "| refused by name | because it |", "|---|---|"]
    rows += [f"| {other.name} | {other.drafts} |" for other in OTHERS]
    return "".join(f"{row}\n" for row in rows)


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(argv: Sequence[str]) -> int:
    """Print the tables, or write them between the markers of pages (`write_tables`)."""
    return write_tables(argv, BEGIN, END, table())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
