"""Keeps what a run of `run.sh` came to: ``record.py FOLDER NAME:SECONDS:PASSED ...`` writes
benches/results/serve_clients.json; FOLDER has what each client printed, its name and version first."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benches"))

from common import versions, write_result  # noqa: E402


def main() -> None:
    """Read the command line, and record."""
    folder, *runs = sys.argv[1:]
    clients = {}
    for run in runs:
        name, seconds, passed = run.split(":")
        first, *told = (Path(folder) / f"{name}.said").read_text(errors="replace").splitlines() or [""]
        clients[name] = {"version": first, "passed": passed == "1", "seconds": int(seconds), "said": told[-8:]}
    write_result(
        "serve_clients",
        {"versions": versions("starlette", "uvicorn", "httptools", "uvloop"), "clients": clients},
    )


if __name__ == "__main__":
    main()
