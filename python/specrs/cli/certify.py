"""``specrs certify``: prove that a configuration cannot write out of bounds, and print what its buffers cost.

The placements of every residue of the committed length are run in both draft layouts, and whole rounds are planned
and audited: used <= capacity, and no slot written twice. Exit status 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from specrs._specrs import TreeShape, certify


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser("certify", help="prove used <= capacity for a configuration", description=__doc__)
    p.add_argument("--topk", type=int, default=4, help="K: branches kept per draft step")
    p.add_argument("--steps", type=int, default=4, help="S: draft steps")
    p.add_argument("--draft-tokens", type=int, default=16, help="V: tokens verified per request, root included")
    p.add_argument("--page-size", type=int, default=16, help="P: tokens per page")
    p.add_argument("--max-batch", type=int, default=8)
    p.add_argument("--max-context", type=int, default=2048)
    p.add_argument("--json", action="store_true", help="print the whole result as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Certify."""
    shape = TreeShape(args.topk, args.steps, args.draft_tokens)
    result = certify(args.max_batch, args.max_context, args.page_size, shape)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _report(result)
    return 0 if result["holds"] else 1


def _report(result: dict[str, Any]) -> None:
    rows = [("buffer", "phase", "elements", "bytes", "formula")]
    for b in result["buffers"]:
        rows.append((b["name"], b["phase"], f"{b['elements']:,} {b['dtype']}", f"{b['bytes']:,}", b["formula"]))
    widths = [max(len(r[i]) for r in rows) for i in range(4)]
    for name, phase, elements, size, formula in rows:
        print(f"{name:<{widths[0]}}  {phase:<{widths[1]}}  {elements:>{widths[2]}}  {size:>{widths[3]}}  {formula}")
    other = result["per_branch"]
    fits = "" if result["per_branch_fits"] else " (does not fit int32 indexing)"
    print(f"native metadata in all: {human(result['native_bytes'])}")
    print(f"for comparison, {other['name']}: {human(other['bytes'])}{fits} = {other['formula']}")
    for layout in result["layouts"]:
        print(f"{layout['layout']:>6} layout: alloc_len_per_decode {layout['alloc_len_per_decode']}, "
              f"reserve_per_decode {layout['reserve_per_decode']}, row_width {layout['row_width']:,}")  # fmt: skip
    checked = (
        f"{result['residues']} residues, {result['placements']:,} placements, {result['plans']:,} plans: "
        "used <= capacity, writes disjoint"
    )
    if result["holds"]:
        print(f"HOLDS   {checked}")
        return
    print(f"FAILS   {result['failed']} of {checked}; the first:")
    for f in result["failures"]:
        print(
            f"  {f['what']}: got {f['got']}, limit {f['limit']} ({f['layout']} layout, committed {f['committed']}, "
            f"residue {f['residue']}, branch {f['branch']}, step {f['step']})"
        )


def human(size: int) -> str:
    """Bytes in the unit that reads best."""
    value, unit = float(size), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, bigger
    return f"{value:.3g} {unit}"
