"""Every code block of the README runs as it stands, in a fresh directory and a fresh interpreter.

The comment before a block says how it is tested: ``run``, or ``structure`` where it builds or installs: then its make
targets and files are looked up instead. A block without the comment fails, so that none is left out silently.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:<!-- test: (\w+) -->\n)?```(\w+)\n(.*?)```\n", TEXT, re.S)


def blocks(kind: str) -> list[tuple[str, str]]:
    return [(language, code) for how, language, code in BLOCKS if how == kind]


def test_every_block_says_how_it_is_tested() -> None:
    assert TEXT.count("```") == 2 * len(BLOCKS)
    assert [how for how, _, _ in BLOCKS if how not in ("run", "structure")] == []
    assert {language for _, language, _ in BLOCKS} == {"python", "sh"}
    assert len(blocks("run")) >= 3 and all(language == "sh" for language, _ in blocks("structure"))


@pytest.mark.parametrize("block", blocks("run"), ids=lambda b: b[1].strip().split("\n")[0][:40])
def test_a_block_runs_as_it_stands(block: tuple[str, str], tmp_path: Path) -> None:
    language, code = block
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if language == "sh":
        (tmp_path / "bin").mkdir()
        for name, runs in {"specrs": f'"{sys.executable}" -m specrs', "python": f'"{sys.executable}"'}.items():
            command = tmp_path / "bin" / name
            command.write_text(f'#!/bin/sh\nexec {runs} "$@"\n')
            command.chmod(0o755)
        env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
        argv = ["sh", "-eux", "-c", code]
    else:
        argv = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as run:
        try:
            out, err = run.communicate(timeout=600)
        finally:
            with suppress(ProcessLookupError):  # what a block has left behind: a server, where it failed
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, err
    assert "Traceback" not in err and out.strip()


def test_blocks_that_build_name_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for _, code in blocks("structure"):
        for line in code.strip().split("\n"):
            command = line.split("#")[0].split()
            if command[0] == "make":
                assert re.search(rf"^{command[1]}:", makefile, re.M), line
            else:
                assert command == ["pip", "install", "dist/specrs-*.whl"] and "--wheel-dir dist" in makefile, line


def test_links_and_make_targets_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
    assert len(TEXT.splitlines()) <= 225
