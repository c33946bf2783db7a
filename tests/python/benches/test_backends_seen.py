"""The page about attention backends on a GPU has the results of committed runs, and they saw every cell declared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import backends_seen
from specrs.backends import MATRIX

ROOT = Path(__file__).parents[3]
MEASURED, TESTED = (json.loads(path.read_text("utf-8")) for path in (backends_seen.MEASURED, backends_seen.TESTED))
ROWS = [row for row in MATRIX if row.device == "cuda" and row.backend.name != "native"]


def test_the_page_has_the_tables_of_the_results() -> None:
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    block = page.partition(backends_seen.BEGIN)[2].partition(backends_seen.END)[0]
    assert block == backends_seen.tables(MEASURED, TESTED), "run `python benches/backends_seen.py docs/backends.md`"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.backend.name)
def test_the_cells_that_are_declared_are_those_that_were_seen(row: backends_seen.Row) -> None:
    assert backends_seen.cells(MEASURED, TESTED, row.backend.name) == backends_seen.declared(row)


def test_a_cell_that_nobody_saw_is_found() -> None:
    (row,) = [row for row in ROWS if row.backend.name == "triton"]
    less = {**TESTED, "heads": [r for r in TESTED["heads"] if (r["head_dim"], r["phase"]) != (96, "draft")]}
    missing = backends_seen.declared(row) - backends_seen.cells(MEASURED, less, "triton")
    assert missing == {("heads", "draft", 96, name) for name in row.backend.kv_dtypes}


def test_nothing_waited_and_tokens_part_at_ties_alone() -> None:
    for rows in backends_seen.seen(MEASURED, TESTED).values():
        for row in rows:
            assert all(0 <= margin < 0.05 for margin in row["ties"]), row["ties"]
            assert row.get("found", {"synchronisations": 0})["synchronisations"] == 0


def line(commit: str, **row: object) -> str:
    return f"SEEN {json.dumps({'kind': 'engine', **row, 'run': {'commit': commit, 'device': 'a card'}})}\n"


def test_a_row_keeps_the_commit_and_the_card_of_its_own_run() -> None:
    logs = [
        f"--- Captured stdout call ---\n{line('aaa', backend='triton')}===== 1 passed, 2 skipped in 3.00s =====\n",
        f"{line('bbb', backend='flashinfer')}{line('bbb', backend='triton')}2 passed, 1 warning in 93.49s (0:01:33)\n",
    ]
    found = backends_seen.tested(logs)
    assert found["passed"] == 3
    commits = [(row["backend"], found["runs"][row["run"]]["commit"]) for row in found["engine"]]
    assert sorted(commits) == [("flashinfer", "bbb"), ("triton", "aaa"), ("triton", "bbb")]


@pytest.mark.parametrize(
    "end",
    ["1 failed, 7 passed in 1.0s\n", "7 passed, 1 error in 1.0s\n", "2 errors in 1.0s\n", "3 skipped in 1.0s\n", ""],
)
def test_a_log_in_which_not_all_passed_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match="did not all pass"):
        backends_seen.tested([line("aaa", backend="triton") + end])


def test_figures_without_a_backend_are_refused() -> None:
    with pytest.raises(ValueError, match="without flashinfer"):
        backends_seen.tables({**MEASURED, "missing": {"flashinfer": "no package"}}, TESTED)
