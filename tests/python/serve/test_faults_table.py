"""The table of faults in docs/serving.md names tests that exist, and every fault test is in it."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[2] / "docs/serving.md").read_text(encoding="utf-8")


def test_names() -> None:
    told: set[tuple[str, str]] = set()
    section = PAGE.split("\n## Faults\n")[1].split("\n## ")[0]
    for row in re.findall(r"^\|.*\|([^|]+)\|$", section, re.M)[2:]:
        [file] = set(re.findall(r"test_\w+\.py", row))
        told |= {(file, name) for name in re.findall(r"::(test_\w+)", row)}
    files = {file for file, _ in told}
    there = {(file, name) for file in files for name in re.findall(r"^def (test_\w+)", (HERE / file).read_text(), re.M)}
    whole = {"test_faults.py", "test_fault_grammars.py", "test_fuzz.py"}  # the page has each of their tests
    assert whole <= files
    assert told <= there
    assert {one for one in there if one[0] in whole} <= told
