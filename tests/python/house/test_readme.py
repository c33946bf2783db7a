"""Every code block of the README runs as it stands, in a fresh directory and a fresh interpreter.

The comment before a block says how it is tested: ``run``, or ``structure`` where it builds or installs: then its make
targets and files are looked up instead. A block without the comment fails, so that none is left out silently. These
tests run blocks in the environment of the tests; ``make test-blocks`` runs them in one that has the wheel alone.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from blocks import EXTRA, PAGES, ROOT, Block, blocks_of, failed, run, shims

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = blocks_of(ROOT / "README.md")
RUN = [b for b in BLOCKS if b.how == "run"]
PACKAGE_PAGE = ROOT / "python/README.md"


def project(section: str) -> str:
    """A section of pyproject.toml, as text: Python 3.10 has no tomllib."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return text.partition(f"\n[{section}]\n")[2].partition("\n[")[0]


def test_every_block_says_how_it_is_tested() -> None:
    assert TEXT.count("```") == 2 * len(BLOCKS)
    assert [b for b in BLOCKS if b.how not in ("run", "structure")] == []
    assert {b.language for b in BLOCKS} == {"python", "sh"}
    assert len(RUN) >= 3 and all(b.language == "sh" for b in BLOCKS if b.how == "structure")


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_block_runs_as_it_stands(block: Block, tmp_path: Path) -> None:
    told = run(block, sys.executable, tmp_path, shims(tmp_path))
    assert not failed(*told), told[2]


def test_blocks_that_build_name_targets_and_extras_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    extras = re.findall(r"^(\w+) = \[", project("project.optional-dependencies"), re.M)
    assert EXTRA in extras and f"[{EXTRA}]" in TEXT
    for block in (b for b in BLOCKS if b.how == "structure"):
        for line in block.code.strip().split("\n"):
            command = line.split("  #")[0].strip()
            if command.startswith("make "):
                assert re.search(rf"^{command.split()[1]}:", makefile, re.M), line
                continue
            assert "--wheel-dir dist" in makefile, line
            found = re.fullmatch(
                r'pip install (?:dist/specrs-\*\.whl|"\$\(echo dist/specrs-\*\.whl\)\[(\w+)\]")', command
            )
            assert found and found[1] in (None, *extras), line


def test_what_blocks_import_comes_with_the_wheel_and_the_extra() -> None:
    needs = project("project") + project("project.optional-dependencies").partition("\ndev = ")[0]
    own = {"specrs"} | set(sys.stdlib_module_names)
    for block in (b for page in PAGES for b in blocks_of(page) if b.how == "run"):
        code = block.code
        if block.language == "sh":
            code = "\n".join(re.findall(r"python -c '(.*?)'$", code, re.M | re.S))
        for node in ast.walk(ast.parse(code)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in {one.partition(".")[0] for one in names} - own:
                assert re.search(rf'"{name}[>"]', needs), f"{block}: {name}"


def test_links_and_make_targets_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", TEXT):
        assert (ROOT / target).exists(), target
    assert len(TEXT.splitlines()) <= 225


def test_what_an_index_shows_links_to_nothing_beside_it() -> None:
    assert f'readme = "{PACKAGE_PAGE.relative_to(ROOT)}"' in project("project")
    text = PACKAGE_PAGE.read_text(encoding="utf-8")
    assert re.findall(r"\]\((?!https?:)[^)]*\)|\]\[|<img", text) == []
    assert [b.language for b in blocks_of(PACKAGE_PAGE)] == ["python", "sh"]


def test_wheels_of_make_have_the_tag_that_the_project_names() -> None:
    tag = re.search(r'^compatibility = "(manylinux_\d+_\d+)"$', project("tool.maturin"), re.M)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert tag and f"COMPATIBILITY ?= {tag[1]}\n" in makefile
    assert 'MATURIN_PEP517_ARGS="--compatibility $(COMPATIBILITY)"' in makefile  # maturin's own default is off


def test_the_compiler_that_is_asked_for_is_the_one_that_is_needed() -> None:
    needed = re.search(r'^rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text(encoding="utf-8"), re.M)
    assert needed
    for name in ("README.md", "Makefile"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert f"Rust >= {needed[1]}" in text and "C++ compiler" in text, name
