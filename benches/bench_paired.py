"""Allocator and planner of two checkouts, in turns: what a change cost. ``python benches/bench_paired.py OLD``.

OLD is a checkout of the earlier commit. The release drivers of both (``examples/allocator_driver.rs``,
``examples/planner_driver.rs``) stay alive and answer the same questions alternately, so that noise hits both; a figure
is the median over the pairs of new time over old time, with its quartiles. ``same`` is what the old driver makes of a
second copy of itself in the same turns: a ratio within its quartiles says nothing. All three share one core: a
neighbour that is busy on another one would slow one driver and not the rest.

Goal 1: ``raw`` and ``round`` of the allocator; goal 2: a round's arrays in ``native``, and the same rounds in every
other format. Writes ``results/paired.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from common import ROOT, Driver, write_result

ALLOCATOR = [
    ("raw", 1 << 16, 1, 0),
    ("raw", 1 << 16, 64, 0),
    ("raw", 1 << 20, 4096, 1),
    *(("round", page, batch, 1 << 20, 0) for page in (1, 16, 64) for batch in (1, 16, 64)),
]
PLANNER = [
    *((page, batch, 20, "native") for page in (1, 16, 64) for batch in (1, 16, 64, 256)),
    *(
        (page, batch, 30, *how)
        for how in (
            ("flash_attention", "dense", "ancestors"),
            ("flash_attention", "holey", "lanes"),
            ("flashinfer", "dense", "ancestors"),
            ("triton", "dense", "ancestors"),
        )
        for page, batch in ((1, 1), (1, 16), (16, 16), (64, 1), (64, 64))
    ),
]


def binary(checkout: Path, name: str) -> Path:
    """The release driver of a checkout, built there."""
    command = ["cargo", "build", "--release", "--example", name, "--message-format=json"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return next(Path(m["executable"]) for m in found if m.get("executable") and m["target"]["name"] == name)


def ratios(drivers: tuple[Driver, Driver, Driver], words: tuple[Any, ...], pairs: int) -> dict[str, Any]:
    """Ask one question in turns: old, new, and the second old."""

    def ask(driver: Driver) -> float:
        answer = driver.ask(*words)
        return float(answer.get("ns", answer.get("median_ns")))

    old, new, again = drivers
    samples: dict[Driver, list[float]] = {driver: [] for driver in drivers}
    for turn in range(pairs + 1):
        for driver in (old, new, again) if turn % 2 else (again, new, old):
            samples[driver].append(ask(driver))
    samples = {driver: times[1:] for driver, times in samples.items()}  # the first turn warms up

    def over(driver: Driver) -> list[float]:
        pairs = zip(samples[driver], samples[old], strict=True)
        low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
        return [round(x, 4) for x in (middle, low, high)]

    times = {name: round(statistics.median(samples[d]) / 1e3, 3) for name, d in (("old_us", old), ("new_us", new))}
    return {"ask": list(words), **times, "new_over_old": over(new), "same": over(again)}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("old", type=Path, help="checkout of the earlier commit")
    p.add_argument("--pairs", type=int, default=24)
    args = p.parse_args()
    rev = ["git", "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(rev, cwd=args.old, capture_output=True, text=True, check=True).stdout.strip()
    names = "allocator", "planner"
    binaries = {name: [binary(checkout, f"{name}_driver") for checkout in (args.old, ROOT)] for name in names}
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the drivers inherit it
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, questions in zip(names, (ALLOCATOR, PLANNER), strict=True):
        old, new = binaries[name]
        drivers = Driver(old), Driver(new), Driver(old)
        rows[name] = []
        for words in questions:
            rows[name].append(ratios(drivers, words, args.pairs))
            print(name, *rows[name][-1].values(), flush=True)
        for driver in drivers:
            driver.close()
    mean = {name: round(statistics.geometric_mean(r["new_over_old"][0] for r in all), 4) for name, all in rows.items()}
    note = "new_over_old, same: median, lower and upper quartile of the pairs' ratios; geometric_mean: of the medians"
    write_result("paired", {"old": head, "pairs": args.pairs, "note": note, "geometric_mean": mean, **rows})


if __name__ == "__main__":
    main()
