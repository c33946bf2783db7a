"""Drafts without a head, in nanoseconds a token or a draft: ``cargo bench --bench drafts``, kept as JSON.

Goals: a token is appended in 500 ns at most, and looked up in 200 ns.

    python benches/bench_drafts.py [--binary FILE]

Without a binary that `cargo bench --no-run --bench drafts` has built, cargo builds and runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from common import ROOT, write_result

GOALS_NS = {"append": 500.0, "look-up": 200.0}
CARGO = ["cargo", "bench", "--no-default-features", "--bench", "drafts", "--"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, help="of the bench, built before")
    binary: Path | None = parser.parse_args().binary
    command = CARGO if binary is None else [str(binary.resolve()), "--bench"]
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [*command, "--noplot"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT if binary is None else folder,
            env=os.environ | {"CRITERION_HOME": folder},
        ).stdout
        rows = {}
        for file in sorted(Path(folder).glob("*/*/*/new/estimates.json")):
            group, what, size = file.parts[-5:-2]
            median = json.loads(file.read_text())["median"]
            each = int(size) if group == "automaton" else 1
            rows[f"{group}, {what}, {size}"] = {
                "ns": round(median["point_estimate"] / each, 1),
                "low": round(median["confidence_interval"]["lower_bound"] / each, 1),
                "high": round(median["confidence_interval"]["upper_bound"] / each, 1),
            }
    bytes_a_token = {n: float(b) for n, b in re.findall(r"automaton of (\d+) tokens: ([\d.]+) bytes a token", told)}
    missed = [
        row for row, found in rows.items() for what, goal in GOALS_NS.items() if what in row and found["ns"] > goal
    ]
    for row, found in rows.items():
        print(f"{row:28} {found['ns']:>10} ns")
    print(f"goals missed: {missed or 'none'}")
    write_result("drafts", {"goals_ns": GOALS_NS, "rows": rows, "missed": missed, "bytes_a_token": bytes_a_token})


if __name__ == "__main__":
    main()
