"""The tables of docs/backends.md: what was seen to run on a GPU, from results that are committed.

    PYTHONPATH=benches:python python benches/backends_seen.py [PAGE ...]
    PYTHONPATH=benches:python python benches/backends_seen.py --log LOG ...

The first writes the tables, or prints them without a page: from the result of ``gpu/attention_backends.py``, and from
that of the tests on a GPU. The second makes the latter of logs of ``pytest -rP`` over ``test_gpu_backends.py`` and
``test_gpu_real_kernels.py``, which ran on the machine of the former. A test compares the page with both results, and
`specrs.backends.MATRIX` with what was seen.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specrs.marked import write_tables

RESULTS = Path(__file__).parent / "results"
MEASURED, TESTED = RESULTS / "attention_backends_gpu.json", RESULTS / "attention_backends_tests_gpu.json"
BEGIN = "<!-- seen: written by `python benches/backends_seen.py docs/backends.md`; do not edit -->\n"
END = "<!-- seen: end -->\n"

_OUTCOMES = "passed", "failed"
_TIES = re.compile(r"^ties of (\w+), (.+), P = (\d+), ({.*}): (\[.*\])$", re.MULTILINE)


def tested(logs: Sequence[str], measured: dict[str, Any]) -> dict[str, Any]:
    """The result of tests, by their logs: each engine that ran, and how many tests passed."""
    engines = []
    for name, tree, page, options, ties in (found for log in logs for found in _TIES.findall(log)):
        given = ast.literal_eval(options)
        engines.append({
            "backend": name, "tree": ast.literal_eval(tree), "page_size": int(page),
            "draft_layout": given.get("draft_layout", "dense"), "graphs": given.get("graphs", "round"),
            "draft_attention": given.get("draft_attention", "ancestors"),
            "ties": [round(margin, 5) for *_, margin in ast.literal_eval(ties)],
        })  # fmt: skip
    said = {name: measured[name] for name in ("commit", "date", "device", "driver", "versions")}
    passed, failed = (sum(int(n) for log in logs for n in re.findall(rf"(\d+) {word}", log)) for word in _OUTCOMES)
    return {**said, "passed": passed, "failed": failed, "engines": sorted(engines, key=str)}


def seen(measured: dict[str, Any], tests: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What each backend's engines were: a backend, tree, pages, layout, graph level, and the margins of ties."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in measured["rows"]:
        for name, of in row.items():
            if isinstance(of, dict) and "ties" in of and name != "native":
                found.setdefault(name, []).append({**row, "ties": [tie["margin"] for tie in of["ties"]], "found": of})
    for row in tests["engines"]:
        found.setdefault(row["backend"], []).append(row)
    return found


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, dict.fromkeys(values)))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _ran(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """What one backend's engines ran."""

    def pages(k: int) -> str:
        """The pages of trees of K branches, by layout."""
        found: dict[str, set[int]] = {}
        for row in rows:
            if row["tree"] is not None and row["tree"][0] == k:
                found.setdefault(row["draft_layout"], set()).add(row["page_size"])
        return "; ".join(f"{_list(sorted(found[layout]))}{'' if k == 1 else f' {layout}'}" for layout in sorted(found))

    picks = any(row["tree"] is None for row in rows)
    margins = [margin for row in rows for margin in row["ties"]]
    return [
        f"`{name}`",
        *(pages(k) for k in (1, 4, 8)),
        "yes" if picks else "no",
        ", ".join(sorted({row["graphs"] for row in rows})),
        f"{max(margins):.4f}" if margins else "none",
        f"{max(row['found']['apart'] for row in rows if 'found' in row):.3f}",
        str(sum(row["found"]["synchronisations"] for row in rows if "found" in row)),
    ]


def tables(measured: dict[str, Any], tests: dict[str, Any]) -> str:
    """Markdown: what ran, and how long it took."""
    engines, alone, known = seen(measured, tests), measured["kernels"], measured["versions"]
    versions = _list(f"{name} {known[name]}" for name in ("torch", "triton", "flashinfer-python", "vllm"))
    times = [
        [
            f"K = {row['tree'][0]}, {row['tree'][2]} nodes",
            f"{row['native']['seconds'] * 1e3:.1f}",
            *(f"{row[name]['seconds'] * 1e3:.1f} ({row['over_native'][name]:.2f})" for name in engines),
        ]
        for row in measured["rows"]
        if "over_native" in row
    ]
    columns = ["native", *dict.fromkeys(name for row in alone for name in row["us"] if name != "native")]
    kernels = [
        [row["phase"], str(row["requests"]), *(f"{row['us'][name]:.0f}" for name in columns), f"{row['plan_us']:.0f}"]
        for row in alone
    ]
    most = max(apart for row in alone for apart in row["largest_difference"].values())
    parts = [
        f"One {measured['device']}, driver {measured['driver']}, {versions}.\n"
        f"Commit {measured['commit'][:7]}, {measured['date']}.\n"
        f"Tests: {tests['passed']} passed, {tests['failed']} failed.\n",
        _table(
            ["`attention_backend`", "P with K = 1", "P with K = 4", "P with K = 8", "picks its trees", "graphs",
             "largest margin of a tie", "log-probabilities apart, at most", "waits in steady steps"],
            [_ran(name, rows) for name, rows in engines.items()],
        ),
        "Milliseconds of all requests, pages of 16, dense, a graph a round (and over `native`'s):\n",
        _table(["tree", "`native`", *(f"`{name}`" for name in engines)], times),
        "Microseconds of attention alone behind 8192 tokens, 32 heads over 8 of 128. Results differ from\n"
        f"`native`'s by {most:.4f} at most. `flashinfer, planned` is by a plan for these lengths; the last\n"
        "column is what the host takes to make a wrapper and its plan:\n",
        _table(["phase", "requests", *(f"`{name}`" for name in columns), "plan, on the host"], kernels),
    ]  # fmt: skip
    return "\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """Write the tables, or the result of tests."""
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))
    if argv[:1] == ["--log"]:
        result = tested([Path(name).read_text(encoding="utf-8") for name in argv[1:]], measured)
        TESTED.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return 0
    return write_tables(argv, BEGIN, END, tables(measured, json.loads(TESTED.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
