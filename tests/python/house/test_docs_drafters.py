"""Every code block of docs/drafters.md runs as it stands, in a fresh directory and a fresh interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "drafters.md"


def test_blocks_run_and_links_exist(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- test: run -->\n```python\n(.*?)```\n", text, re.S)
    assert blocks and text.count("```") == 2 * len(blocks)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    for code in blocks:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True,
                              timeout=600, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "rounds instead of" in done.stdout
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (PAGE.parent / target).exists(), target
