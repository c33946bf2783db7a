"""The tables of docs/backends.md: what was seen to run on a GPU, from results that are committed.

    PYTHONPATH=benches:python python benches/backends_seen.py [PAGE ...]
    PYTHONPATH=benches:python python benches/backends_seen.py --log LOG ...

The first writes the tables, or prints them without a page: from the result of ``gpu/attention_backends.py``, and from
that of the tests on a GPU. The second makes the latter from logs of ``pytest -rP`` over ``test_gpu_backends.py`` and
``test_gpu_real_kernels.py``: lines that the tests print once something was right, each with its commit and card. A log
with a failure or an error is refused. A test compares the page with both results, and every cell that
`specrs.backends.MATRIX` declares on a GPU with the cells that were seen.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specrs.backends.matrix import Row
from specrs.marked import write_tables

RESULTS = Path(__file__).parent / "results"
MEASURED, TESTED = RESULTS / "attention_backends_gpu.json", RESULTS / "attention_backends_tests_gpu.json"
BEGIN = "<!-- seen: written by `python benches/backends_seen.py docs/backends.md`; do not edit -->\n"
END = "<!-- seen: end -->\n"
PHASES = ("extend", "decode", "draft", "verify")
TOPK, PAGES = (1, 4, 8), (1, 16, 64)

_SEEN = re.compile(r"^SEEN ({.*})$", re.MULTILINE)
_KINDS = ("heads", "foreign graph", "synchronisations")
_SUMMARY = re.compile(r"^(?:=+ )?((?:\d+ \w+(?:, )?)+) in [\d.]+s", re.MULTILINE)


def tested(logs: Sequence[str]) -> dict[str, Any]:
    """The result of tests, by their logs: the runs, each with commit and card, and what was seen in which of them.

    Raises:
        ValueError: a log does not end with pytest's summary, or a test in it failed.
    """
    runs, passed, rows = list[dict[str, Any]](), 0, dict[str, list[dict[str, Any]]]()
    for log in logs:
        summaries = _SUMMARY.findall(log)
        counts = {
            word.rstrip("s"): int(n) for n, word in re.findall(r"(\d+) (\w+)", summaries[-1] if summaries else "")
        }
        if not counts.get("passed") or counts.get("failed") or counts.get("error"):
            raise ValueError(f"a log in which tests did not all pass: {counts or 'no summary'}")
        passed += counts["passed"]
        for line in _SEEN.findall(log):
            row = json.loads(line)
            kind, run = row.pop("kind"), row.pop("run")
            if run not in runs:
                runs.append(run)
            rows.setdefault(kind, []).append({**row, "run": runs.index(run)})
    return {"runs": runs, "passed": passed, **{kind: sorted(rows[kind], key=str) for kind in sorted(rows)}}


def seen(measured: dict[str, Any], tests: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Each backend's engines: tree, pages, layout, graph level, and the margins of ties."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in measured["rows"]:
        for name, of in row.items():
            if isinstance(of, dict) and "ties" in of and name != "native":
                margins = [tie["margin"] for tie in of["ties"]]
                of_it = {"draft_attention": of["draft_attention"], "kv_dtype": "bfloat16", "ties": margins, "found": of}
                found.setdefault(name, []).append({**row, **of_it})
    for row in tests["engine"]:
        found.setdefault(row["backend"], []).append(row)
    return found


def declared(row: Row) -> set[tuple[Any, ...]]:
    """The cells that a backend declares on a GPU: an engine's trees, pages, layouts and drafts, its graph levels and
    types; the kernels' sizes and types of heads in each phase; and graphs of another engine."""
    of: Any = row.backend
    layouts = of.draft_attention
    cells: set[tuple[Any, ...]] = {("engine", "graphs", level) for level in row.graphs}
    cells |= {("engine", "kv_dtype", name) for name in of.kv_dtypes} | {("engine", "picks its trees")}
    cells |= {("engine", k, page, "dense") for k in TOPK for page in PAGES}
    cells |= {("engine", k, page, layout) for k in TOPK[1:] for page in PAGES[1:] for layout in layouts}
    cells |= {("engine", layout, mode) for layout, modes in layouts.items() for mode in modes}
    cells |= {("heads", phase, n, name) for phase in PHASES for n in of.head_dims for name in of.kv_dtypes}
    cells |= {("foreign graph", phase, layout) for phase in PHASES for layout in layouts}
    if row.device_plans and not of.needs_cpu_seq_lens:
        cells |= {("no synchronisation", level) for level in row.graphs if level != "off"}
    return cells


def cells(measured: dict[str, Any], tests: dict[str, Any], name: str) -> set[tuple[Any, ...]]:
    """The cells of a backend that were seen, as `declared` has them."""
    found: set[tuple[Any, ...]] = set()
    for row in seen(measured, tests).get(name, []):
        found |= {("engine", "graphs", row["graphs"]), ("engine", "kv_dtype", row["kv_dtype"])}
        if row["tree"] is None:
            found.add(("engine", "picks its trees"))
            continue
        found.add(("engine", row["tree"][0], row["page_size"], row["draft_layout"]))
        if row["tree"][0] > 1:
            found.add(("engine", row["draft_layout"], row["draft_attention"]))
    mine = {kind: [row for row in tests[kind] if row["backend"] == name] for kind in _KINDS}
    found |= {("heads", row["phase"], row["head_dim"], row["dtype"]) for row in mine["heads"]}
    found |= {("foreign graph", row["phase"], row["draft_layout"]) for row in mine["foreign graph"]}
    return found | {("no synchronisation", row["graphs"]) for row in mine["synchronisations"] if not row["waits"]}


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, dict.fromkeys(values)))


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _ran(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """The engines of one backend."""

    def pages(k: int) -> str:
        """The pages of trees of K branches, by layout."""
        found: dict[str, set[int]] = {}
        for row in rows:
            if row["tree"] is not None and row["tree"][0] == k:
                found.setdefault(row["draft_layout"], set()).add(row["page_size"])
        return "; ".join(f"{_list(sorted(found[layout]))}{'' if k == 1 else f' {layout}'}" for layout in sorted(found))

    modes: dict[str, set[str]] = {}
    for row in rows:
        if row["tree"] is not None and row["tree"][0] > 1:
            modes.setdefault(row["draft_layout"], set()).add(row["draft_attention"])
    margins = [margin for row in rows for margin in row["ties"]]
    return [
        f"`{name}`",
        *(pages(k) for k in TOPK),
        "; ".join(f"{layout}: {_list(sorted(modes[layout]))}" for layout in sorted(modes)),
        "yes" if any(row["tree"] is None for row in rows) else "no",
        _list(sorted({row["graphs"] for row in rows})),
        _list(sorted({row["kv_dtype"] for row in rows})),
        f"{max(margins):.4f}" if margins else "none",
        f"{max(row['found']['apart'] for row in rows if 'found' in row):.3f}",
        str(sum(row["found"]["synchronisations"] for row in rows if "found" in row)),
    ]


def _kernels(name: str, tests: dict[str, Any]) -> list[str]:
    """The kernels of one backend apart from an engine: sizes and types of heads, and graphs of torch."""
    mine = {kind: [row for row in tests[kind] if row["backend"] == name] for kind in _KINDS}
    sizes = {
        dtype: sorted({row["head_dim"] for row in mine["heads"] if row["dtype"] == dtype})
        for dtype in sorted({row["dtype"] for row in mine["heads"]})
    }
    graphs = {(row["phase"], row["draft_layout"]) for row in mine["foreign graph"]}
    waits = {row["graphs"]: row["waits"] for row in mine["synchronisations"]}
    return [
        f"`{name}`",
        "; ".join(f"{dtype}: {_list(of)}" for dtype, of in sizes.items()),
        _list(phase for phase in PHASES if any(row["phase"] == phase for row in mine["heads"])),
        "; ".join(
            f"{layout}: {_list(phase for phase in PHASES if (phase, layout) in graphs)}"
            for layout in sorted({layout for _, layout in graphs})
        ),
        ", ".join(f"{level}: {n}" for level, n in sorted(waits.items())),
    ]


def _run(run: dict[str, Any]) -> str:
    """The build and the machine of a run."""
    known = run["versions"]
    versions = _list(f"{name} {known[name]}" for name in ("torch", "triton", "flashinfer-python", "vllm"))
    return f"commit {run['commit'][:7]}, {run['date']}, one {run['device']}, driver {run['driver']}, {versions}"


def tables(measured: dict[str, Any], tests: dict[str, Any]) -> str:
    """Markdown: the engines and kernels that ran, and how long they took.

    Raises:
        ValueError: a backend's package was missing where the figures were taken.
    """
    if measured["missing"]:
        raise ValueError(f"figures without {', '.join(measured['missing'])}")
    engines, alone = seen(measured, tests), measured["kernels"]
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
        [
            row["phase"], f"{row['requests']} x {row['context']}",
            *(f"{row['us'][name]:.0f}" for name in columns), f"{row['plan_us']:.0f}",
        ]
        for row in alone
    ]  # fmt: skip
    made = list(measured["metadata"][0]["us"])
    arrays = [[str(row["requests"]), *(f"{row['us'][name]:.0f}" for name in made)] for row in measured["metadata"]]
    most = max(apart for row in alone for apart in row["largest_difference"].values())
    runs = "".join(f"- Tests, {tests['passed']} passed in all: {_run(run)}.\n" for run in tests["runs"])
    parts = [
        f"- Figures, and {len(measured['rows'])} of the engines: {_run(measured)}.\n{runs}",
        _table(
            ["`attention_backend`", *(f"P with K = {k}" for k in TOPK), "a branch attends to", "picks its trees",
             "graphs", "KV", "largest margin of a tie", "log-probabilities apart, at most", "waits in steady steps"],
            [_ran(name, rows) for name, rows in engines.items()],
        ),
        _table(
            ["`attention_backend`", "heads", "phases", "in a graph of another engine", "waits in 12 steady steps"],
            [_kernels(name, tests) for name in engines],
        ),
        "Milliseconds of all requests, pages of 16, dense, a graph a round (and over `native`'s):\n",
        _table(["tree", "`native`", *(f"`{name}`" for name in engines)], times),
        "Microseconds of attention alone, 32 heads over 8 of 128. Results differ from\n"
        f"`native`'s by {most:.4f} at most. `flashinfer, planned` is by a plan for these lengths; the last\n"
        "column is the host's time to make a wrapper and its plan:\n",
        _table(["phase", "requests x context", *(f"`{name}`" for name in columns), "plan, on the host"], kernels),
        "Microseconds in which the device makes a round's arrays, tree (8, 6, 64) behind 8192 tokens, pages of 1:\n",
        _table(["requests", *(f"`{name}`" for name in made)], arrays),
    ]  # fmt: skip
    return "\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """Write the tables, or the result of tests."""
    if argv[:1] == ["--log"]:
        result = tested([Path(name).read_text(encoding="utf-8") for name in argv[1:]])
        TESTED.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        return 0
    measured, tests = (json.loads(path.read_text(encoding="utf-8")) for path in (MEASURED, TESTED))
    return write_tables(argv, BEGIN, END, tables(measured, tests))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
