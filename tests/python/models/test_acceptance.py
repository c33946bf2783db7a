"""`acceptance.json` of a head's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specrs import LLM, ConfigError, assets
from specrs.models.acceptance import FILE, HEATS, UNKNOWN, Acceptance, read_acceptance


def write(directory: Path, said: Any) -> Path:
    (directory / FILE).write_text(said if isinstance(said, str) else json.dumps(said))
    return directory


def test_a_head_without_a_file_is_hoped_for(tmp_path: Path) -> None:
    assert read_acceptance(tmp_path) == UNKNOWN


def test_what_is_said_of_some_heats_is_read(tmp_path: Path) -> None:
    found = read_acceptance(write(tmp_path, {"hot": {"temper": 1, "levels": [1, 0.5]}}))
    assert found == (*UNKNOWN[:2], Acceptance(1.0, (1.0, 0.5)))
    assert [found[2].level(i) for i in range(4)] == [1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("{", "JSON"),
        ("[]", "JSON"),
        ({"warm": {}}, "a heat is one of greedy, cool, hot"),
        ({"hot": 1}, "hot = 1: must be an object"),
        ({"hot": {"temper": 1.0}}, "must be an object with temper and levels"),
        ({"hot": {"temper": 1.0, "levels": [0.5], "more": 1}}, "must be an object with temper and levels"),
        ({"hot": {"temper": 0.1, "levels": [0.5]}}, r"hot.temper = 0.1: must be a number from 0.2 to 2"),
        ({"hot": {"temper": True, "levels": [0.5]}}, r"hot.temper = True"),
        ({"hot": {"temper": "1", "levels": [0.5]}}, r"hot.temper = '1'"),
        ('{"hot": {"temper": NaN, "levels": [0.5]}}', r"hot.temper = nan"),
        ({"hot": {"temper": 1.0, "levels": []}}, r"hot.levels = \[\]: must be a list of one or more"),
        ({"hot": {"temper": 1.0, "levels": [1.1]}}, r"hot.levels = \[1.1\]"),
        ({"hot": {"temper": 1.0, "levels": 0.5}}, r"hot.levels = 0.5"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_key(tmp_path: Path, said: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        read_acceptance(write(tmp_path, said))
    assert FILE in str(refused.value)


def test_an_engine_begins_with_what_its_head_says() -> None:
    said = read_acceptance(assets.draft_dir())
    assert not set(said) & set(UNKNOWN)
    with LLM(max_batch=1) as llm:
        policy = llm._runner.drafting.policy
        assert [kind.temper for kind in policy.kinds] == [one.temper for one in said]
    assert len(said) == len(HEATS)
