"""Code blocks of docs/*.md run as the README's do: in a fresh directory and a fresh interpreter.

Those with `<!-- test: run -->` before them run; a block without it is one that a machine without the model, or the
network, cannot run, and its Python must parse.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"(?:<!-- test: (\w+) -->\n)?```python\n(.*?)```\n", re.S)
BLOCKS = [(page.name, how, code) for page in PAGES for how, code in BLOCK.findall(page.read_text(encoding="utf-8"))]
RUN = [(page, code) for page, how, code in BLOCKS if how == "run"]


@pytest.mark.parametrize("block", RUN, ids=lambda b: f"{b[0]}-{b[1].strip().split(chr(10))[0][:30]}")
def test_a_block_runs_as_it_stands(block: tuple[str, str], tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", block[1]]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and done.stdout.strip()


def test_the_other_blocks_parse() -> None:
    assert {how for _, how, _ in BLOCKS} <= {"", "run"} and len(RUN) >= 2
    for _, how, code in BLOCKS:
        if how == "":
            ast.parse(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
