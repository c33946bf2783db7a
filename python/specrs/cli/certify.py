"""``specrs certify``: prove that a configuration cannot write out of bounds, and print the size of its buffers.

The placements of every residue of the committed length are run in both draft layouts, and whole rounds are planned and
audited: used <= capacity, and no slot written twice. For each format it counts full batches, and writes the arrays of
representative rows and reads them back the way the format's kernel does. Exit status 1 where that does not hold, or
where the one format that was asked for cannot do the configuration.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from specrs._specrs import certify, faults
from specrs.backends import FORMATS
from specrs.cli import options
from specrs.drawing.terminal import aligned

#: Phases whose bytes stand side by side; a prefill's arrays are as long as its chunk.
PHASES = ("draft", "verify", "draft_extend", "decode")


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("certify", help="prove used <= capacity for a configuration", description=__doc__)
    p.add_argument("--format", choices=(*FORMATS, "all"), default="all", help="whose arrays to prove (default: all)")
    options.add_tree(p, "4,4,16")
    p.add_argument("--page-size", type=int, default=16, help="P: tokens per page")
    p.add_argument("--max-batch", type=int, default=8)
    p.add_argument("--max-context", type=int, default=2048)
    p.add_argument("--json", action="store_true", help="print the whole result as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Certify."""
    shape = options.tree_of(args.tree)
    formats = FORMATS if args.format == "all" else (args.format,)
    result = certify(args.max_batch, args.max_context, args.page_size, shape, list(formats))
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _report(result, args, shape.steps)
    usable = args.format == "all" or all(f["usable"] for f in result["formats"])
    return 0 if result["holds"] and usable else 1


def _report(result: dict[str, Any], args: argparse.Namespace, steps: int) -> None:
    _warn(result["reverts"])
    if args.format in ("native", "all"):
        _native(result)
    else:
        shown: list[dict[str, Any]] = []
        for layout in result["formats"][0]["layouts"]:
            _arrays(layout, shown[-1] if shown else None)
            shown.append(layout)
    for layout in result["layouts"]:
        print(f"{layout['layout']:>6} layout: alloc_len_per_decode {layout['alloc_len_per_decode']}, "
              f"reserve_per_decode {layout['reserve_per_decode']}, row_width {layout['row_width']:,}")  # fmt: skip
    _side_by_side(result, steps, args.max_context)
    checked = (
        f"{result['residues']} residues, {result['placements']:,} placements, {result['plans']:,} plans: "
        "used <= capacity, writes disjoint"
    )
    for f in result["formats"]:
        for layout in f["layouts"]:
            if layout["refused"] is not None:
                print(f"CANNOT  {f['format']}, {layout['layout']} layout: {layout['refused']}")
    failed = [(result["failed"], result["failures"])]
    failed += [(y["failed"], y["failures"]) for f in result["formats"] for y in f["layouts"]]
    if result["holds"]:
        print(f"HOLDS   {checked}")
    else:
        print(f"FAILS   {sum(n for n, _ in failed)} time(s); checked were {checked}; the first failures:")
        for _, failures in failed:
            for failure in failures[:8]:
                _print_failure(failure)
    _warn(result["reverts"])


def _print_failure(f: dict[str, Any]) -> None:
    print(
        f"  {f['what']}: got {f['got']}, limit {f['limit']} ({f['layout']} layout, committed {f['committed']}, "
        f"residue {f['residue']}, branch {f['branch']}, step {f['step']})"
    )


def _warn(reverts: list[int]) -> None:
    """Warn loudly if the run has faults put back."""
    for fault in faults():
        if fault["id"] in reverts:
            print(f"!!!!!!  REVERT {fault['id']} IS IN FORCE (SPECRS_DEBUG_REVERT): {fault['reverts']}")


def _native(result: dict[str, Any]) -> None:
    rows = [("buffer", "phase", "elements", "bytes", "formula")]
    for b in result["buffers"]:
        rows.append((b["name"], b["phase"], f"{b['elements']:,} {b['dtype']}", f"{b['bytes']:,}", b["formula"]))
    _table(rows, "<<>><")
    other = result["per_branch"]
    fits = "" if result["per_branch_fits"] else " (does not fit int32 indexing)"
    print(f"native metadata in all: {human(result['native_bytes'])}")
    print(f"for comparison, {other['name']}: {human(other['bytes'])}{fits} = {other['formula']}")


def _arrays(layout: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Every array of a format in one layout; ``before`` is the layout that was shown before it."""
    if before and layout["arrays"] == before["arrays"]:
        print(f"{layout['layout']} layout: the same arrays")
        return
    rows = [("array", "phase", "shape", "bytes", "formula")]
    for a in layout["arrays"]:
        phase = a["phase"] if a["step"] is None else f"{a['phase']} {a['step']}"
        shape = f"{' x '.join(f'{n:,}' for n in a['shape'])} {a['dtype']}"
        rows.append((a["name"], phase, shape, f"{a['bytes']:,}", a["formula"]))
    if len(rows) > 1:
        print(f"{layout['layout']} layout")
        _table(rows, "<<>><")


def _side_by_side(result: dict[str, Any], steps: int, max_context: int) -> None:
    """Print the bytes of each format, layout and phase, with the results of their proofs."""
    rows = [("format", "layout", f"draft, {steps} steps", *PHASES[1:], "in all", "sizes", "plans", "slots read", "")]
    for f in result["formats"]:
        for layout in f["layouts"]:
            if layout["refused"] is not None:
                continue
            sizes = [human(layout["bytes_of"].get(phase, 0)) for phase in PHASES]
            proved = [f"{layout[key]:,}" for key in ("sizes", "plans", "reads")]
            verdict = "FAILS" if layout["failed"] else "holds"
            if layout["written_context"] < max_context:
                verdict += f" (rows written up to {layout['written_context']:,} tokens)"
            rows.append((f["format"], layout["layout"], *sizes, human(layout["bytes"]), *proved, verdict))
    _table(rows, "<<>>>>>>>><")


def _table(rows: Sequence[tuple[str, ...]], align: str) -> None:
    print("\n".join(aligned(rows, align)))


def human(size: int) -> str:
    """Bytes in the unit that reads best."""
    value, unit = float(size), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, bigger
    return f"{value:.3g} {unit}"
