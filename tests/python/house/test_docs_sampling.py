"""Every code block of docs/sampling.md runs as it stands, in a fresh directory and a fresh interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[3] / "docs" / "sampling.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- test: run -->\n```python\n(.*?)```\n", TEXT, re.S)


def test_every_block_runs() -> None:
    assert TEXT.count("```") == 2 * len(BLOCKS) and len(BLOCKS) >= 4


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs_as_it_stands(code: str, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.strip()
