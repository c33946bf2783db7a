"""The code blocks of README.md and docs/*.md, and running them as they stand.

    python tests/python/blocks.py WHEEL [--environment DIR] [--only TEXT]

makes a new environment with the wheel and its extra ``examples``, which README names, and nothing else, and runs every
block in it, each in a fresh directory; ``--environment`` keeps the environment, ``--only`` takes blocks whose page or
code has the text. Exit status 1 where one fails. It needs no package itself.

The comment before a block says how it is tested: ``run``, or ``structure`` where it builds or installs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"(?:<!-- test: (\w+) -->\n)?```(\w+)\n(.*?)```\n", re.S)
EXTRA = "examples"


@dataclass(frozen=True)
class Block:
    """One block: its page, how it is tested (``""``: it says nothing), its language and its text."""

    page: str
    how: str
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}-{self.code.strip().split(chr(10))[0][:40]}"


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, in order."""
    return [Block(page.name, *found) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def run(block: Block, python: Path | str, directory: Path, env: Mapping[str, str]) -> tuple[int, str, str]:
    """Run a block, and return its exit status, stdout and stderr; processes that it leaves behind, such as a server,
    are ended."""
    argv = ["sh", "-eux", "-c", block.code] if block.language == "sh" else [str(python), "-c", block.code]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, cwd=directory, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            out, err = "", "600 s were over"
            child.kill()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return child.returncode, out, err


def shims(directory: Path) -> dict[str, str]:
    """Return this process's environment, in which ``specrs`` and ``python`` are of this interpreter and its
    packages."""
    (directory / "bin").mkdir()
    for name, runs in {"specrs": f'"{sys.executable}" -m specrs', "python": f'"{sys.executable}"'}.items():
        command = directory / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {runs} "$@"\n')
        command.chmod(0o755)
    path = os.pathsep.join(p for p in sys.path if p)
    programs = f"{directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": programs}


def failed(status: int, out: str, err: str) -> bool:
    """Return whether a block failed a reader's expectation: to end well, and to show something."""
    return status != 0 or "Traceback" in err or not out.strip()


def main() -> int:
    """Run the blocks, as the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--environment", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    chosen = [b for page in PAGES for b in blocks_of(page) if b.how == "run" and args.only in f"{b.page}\n{b.code}"]
    with tempfile.TemporaryDirectory() as folder:
        place = args.environment or Path(folder) / "environment"
        if not (place / "bin/python").exists():
            venv.create(place, with_pip=True)
        wheel = f"{args.wheel.resolve()}[{EXTRA}]"
        subprocess.run([place / "bin/python", "-m", "pip", "install", "--quiet", wheel], check=True)
        # The environment has nothing of this checkout, and of the caller's only the places of programs and the home.
        env = {"PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": folder, "LANG": "C.UTF-8"}
        wrong = 0
        for number, block in enumerate(chosen):
            directory = Path(folder) / f"block{number}"
            directory.mkdir()
            began = time.monotonic()
            status, out, err = run(block, place / "bin/python", directory, env)
            bad = failed(status, out, err)
            wrong += bad
            print(f"{'FAILED' if bad else 'ok    '} {time.monotonic() - began:6.1f} s  {block}", flush=True)
            if bad:
                print(f"exit status {status}\n{out}\n{err}", flush=True)
        print(f"{len(chosen) - wrong} of {len(chosen)} blocks ran")
        return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
