"""The load of `benches/serve_load.py`, small: every token, status and usage, and nothing left behind."""

from __future__ import annotations

import pytest

pytest.importorskip("uvicorn", reason="the extra specrs[serve] is not installed")


def test_load() -> None:
    from serve_load import arguments, measure

    argv = "--requests 300 --streams 48 --clients 1 --max-batch 32 --most 12 --seed 3 --turns 0"
    result, wrong = measure(arguments(argv.split()))
    assert not wrong, wrong[:5]
    assert result["checked"]["requests"] == 300 and result["checked"]["whole"] > 200
    assert result["checked"]["tokens"] > 800 and result["checked"]["refused"] > 10
    phases = result["phases"]
    assert phases["closed"]["most_running"] > 16
