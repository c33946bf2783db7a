"""The `openai` client, the newest and of 2.x, and `openai-agents`, against `specrs serve`: the quick part of
`tests/clients/run.sh`.

The environments are made from the package index, once; where it cannot be reached and they are not there, this skips.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the extra specrs[serve] is not installed")

RUN = Path(__file__).parents[2] / "clients/run.sh"


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PIP_RETRIES": "1",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p.endswith("python"))}  # fmt: skip


@pytest.mark.parametrize("names", [("openai", "openai2"), ("agents",)])
def test_clients(names: tuple[str, ...]) -> None:
    for name in names:
        try:
            made = subprocess.run([RUN, "--prepare", name], env=environment(), capture_output=True, text=True,
                                  timeout=120, check=False)  # fmt: skip
        except subprocess.TimeoutExpired:
            pytest.skip("the package index does not answer within two minutes")
        if made.returncode:
            pytest.skip(f"no environment for {name}: {made.stderr.strip().splitlines()[-1:]}")
    done = subprocess.run([RUN, *names], env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert all(f"{name}: passed" in done.stdout for name in names)
