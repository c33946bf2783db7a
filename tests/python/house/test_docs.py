"""Code blocks of docs/*.md run as the README's do: in a fresh directory and a fresh interpreter.

Those with `<!-- test: run -->` before them run; a block without it is one that a machine without the model, or the
network, cannot run, and its Python must parse.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from blocks import ROOT, Block, blocks_of, failed, run, shims

PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.how == "run"]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs_as_it_stands(block: Block, tmp_path: Path) -> None:
    told = run(block, sys.executable, tmp_path, shims(tmp_path))
    assert not failed(*told), told[2]


def test_the_other_blocks_parse_and_import_what_they_use() -> None:
    assert {block.how for block in BLOCKS} <= {"", "run"} and len(RUN) >= 2
    for block in BLOCKS:
        if block.how == "" and block.language == "python":
            names = {node.id for node in ast.walk(ast.parse(block.code)) if isinstance(node, ast.Name)}
            for name in names & {"LLM", "AsyncLLM", "SamplingParams"}:
                assert re.search(rf"^from specrs.* import .*\b{name}\b", block.code, re.M), f"{block}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
