"""A mutant whose text has gone from its file guards nothing, and only `make test-long` runs `tests/mutants.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_text_of_every_mutant_is_in_its_file_once() -> None:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tests/mutants.py")
    assert spec is not None and spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = mutants  # a dataclass looks for its module there
    try:
        spec.loader.exec_module(mutants)
    finally:
        del sys.modules["mutants"]
    assert len(mutants.MUTANTS) > 15
    for mutant in mutants.MUTANTS:
        times = (ROOT / mutant.file).read_text().count(mutant.old)
        assert times == 1, f"{mutant.what}: {times} times in {mutant.file}: {mutant.old}"
        assert mutant.old != mutant.new, mutant.what
