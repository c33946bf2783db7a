"""``specrs replay FILE``: run a recorded round again, without weights; find the first write in which two runs differ.

The two runs are: the plain one and one with historical faults put back (``--revert``); or native and another format
(``--format``); or two capsules (``--against``); or one where the host decides and one where a GPU does (``--device``:
plans, trees, accepted paths, moves). Without any of these it is the recorded format against native, or of a native
capsule the kernels against their plain references. Across formats the page tables, slots, KV pools and attention
outputs are compared (these within 1e-5), else every write to every array, bit for bit.

Exit status: 0 where the runs agree, 1 where they differ, 2 for a file or an option that is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from specrs._specrs import ConfigError, faults


def add_parser(commands: Any) -> None:
    """Declare the subcommand."""
    p = commands.add_parser(
        "replay",
        help="run a recorded round again and compare its writes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("file", metavar="FILE", help="a capsule of specrs record")
    other = p.add_mutually_exclusive_group()
    other.add_argument(
        "--revert", metavar="ID[,ID]", help="historical faults to put back in the second run; see specrs.faults()"
    )
    other.add_argument("--against", metavar="FILE", help="another capsule as the second run")
    other.add_argument("--device", metavar="NAME", help="'cuda' or 'cuda:N', which decides in the second run")
    p.add_argument("--format", choices=["native", "flashinfer", "flash_attention", "triton"],
                   help="metadata format (default: the recorded one)")  # fmt: skip
    p.add_argument("--layout", choices=["dense", "holey"], help="another draft layout than the recorded one")
    p.add_argument("--draft-attention", choices=["ancestors", "lane"], help="another one than the recorded one")
    p.add_argument("--json", action="store_true", help="print the result as JSON")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay."""
    from specrs.capsule import load
    from specrs.capsule.compare import replay_against, replay_device, replay_formats, replay_reverted

    capsule = load(args.file)
    options = {"format": args.format, "layout": args.layout, "mode": args.draft_attention}
    if args.revert is not None:
        ids = _ids(args.revert)
        for fault in (f for f in faults() if f["id"] in ids):
            print(f"specrs: WARNING: the second run has a historical fault, {fault['id']}: {fault['reverts']}",
                  file=sys.stderr)  # fmt: skip
        result = replay_reverted(capsule, ids, **options)
    elif args.against is not None:
        result = replay_against(capsule, load(args.against), **options)
    elif args.device is not None:
        if re.fullmatch(r"cuda(:\d{1,4})?", args.device) is None:
            raise ConfigError(f"--device {args.device!r}: must be 'cuda' or 'cuda:N'")
        result = replay_device(capsule, args.device, **options)
    else:
        result = replay_formats(capsule, **options)
    if args.json:
        print(json.dumps({"file": args.file, **result.to_json()}, indent=1))
    else:
        from specrs.cli.record import describe

        print(describe(capsule))
        print("\n".join(result.lines()))
    return 0 if result.equal else 1


def _ids(text: str) -> Sequence[int]:
    ids = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise ConfigError(f"--revert {text!r}: {part.strip()!r} is no number of a pull request")
        ids.append(int(part))
    return ids
