"""What is said of attention backends on a GPU is what committed runs saw."""

from __future__ import annotations

import json
from pathlib import Path

import backends_seen
from specrs.backends import MATRIX

ROOT = Path(__file__).parents[3]
MEASURED, TESTED = (json.loads(path.read_text("utf-8")) for path in (backends_seen.MEASURED, backends_seen.TESTED))


def test_the_page_has_the_tables_of_the_results() -> None:
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    block = page.partition(backends_seen.BEGIN)[2].partition(backends_seen.END)[0]
    assert block == backends_seen.tables(MEASURED, TESTED), "run `python benches/backends_seen.py docs/backends.md`"


def test_every_row_of_the_matrix_was_seen_to_run() -> None:
    """At every graph level that it declares, with K of 1, 4 and 8, pages of 1, 16 and 64, and each draft layout."""
    seen = backends_seen.seen(MEASURED, TESTED)
    for row in MATRIX:
        if row.device == "cuda" and row.backend.name != "native":
            rows = seen[row.backend.name]
            assert {r["graphs"] for r in rows} == set(row.graphs)
            assert {r["tree"][0] for r in rows if r["tree"] is not None} == {1, 4, 8}
            assert {r["page_size"] for r in rows} == {1, 16, 64}
            assert {r["draft_layout"] for r in rows} == set(row.backend.draft_attention)


def test_nothing_failed_or_waited_and_tokens_part_at_ties_alone() -> None:
    assert TESTED["passed"] > 0 and TESTED["failed"] == 0
    for rows in backends_seen.seen(MEASURED, TESTED).values():
        for row in rows:
            assert all(0 <= margin < 0.05 for margin in row["ties"]), row["ties"]
            assert row.get("found", {"synchronisations": 0})["synchronisations"] == 0


def test_a_log_is_read() -> None:
    log = (
        "___ test_an_engines_tokens ___\nties of triton, None, P = 16, {}: []\n"
        "ties of flashinfer, (4, 3, 12), P = 1, {'graphs': 'off'}: [(0, 3, 0.0123456)]\n1 failed, 7 passed in 1.0s\n"
    )
    found = backends_seen.tested([log, "2 passed in 3s"], MEASURED)
    assert (found["passed"], found["failed"], found["commit"]) == (9, 1, MEASURED["commit"])
    first, second = found["engines"]
    assert (first["backend"], first["tree"], first["graphs"], first["ties"]) == (
        "flashinfer",
        (4, 3, 12),
        "off",
        [0.01235],
    )
    assert (second["backend"], second["tree"], second["draft_layout"]) == ("triton", None, "dense")
