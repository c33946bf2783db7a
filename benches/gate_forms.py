"""The demand of drafting, counted, for each form of head: first requests gain, and no kind of text loses much.

Heads for the package's model, of any form that `specrs train-head` writes. Prices are those of `gate_counted`: the
target's passes by its table, a block's by the multiply-adds that it takes. What Python spends on a Markov head's walk
over the levels is not counted.

    specrs train-head --out HEADS/dspark --form dspark --text SOME/CODE --minutes 10
    python benches/gate_forms.py --head dspark=HEADS/dspark --head dflash=HEADS/dflash [--lengths 64,128]
        [--temperatures 0,1] [--orders 2] [--name gate_forms]

`first` is the gain of a new engine's first request on code (geometric mean), with its tokens a round; `kinds` the
ratio of plain decoding's price to the default's for each kind of text, the median over some orders of all prompts;
`worst` the smallest of these. `own` is the package's own EAGLE-3 head.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import write_result
from gate_counted import Fresh, first_requests, orders
from specrs.assets import draft_dir, model_dir
from specrs.models import ModelConfig, check_draft
from specrs.train.checkpoint import model_digest


def gate(head: Path | None, lengths: list[int], temperatures: list[float], times: int) -> dict[str, Any]:
    """Count one head."""
    at = draft_dir() if head is None else head
    config, _ = check_draft(at, ModelConfig.from_directory(model_dir()))
    fresh = Fresh(head)
    first = first_requests(fresh, lengths, temperatures)
    kinds = orders(fresh, lengths, temperatures, times)
    alone = {name: row["ratio"] for name, row in kinds.items() if not name.startswith("all kinds")}
    worst = min(alone, key=lambda name: alone[name])
    return {
        "form": config.form_name, "digest": model_digest(at), "first": first, "kinds": kinds,
        "worst": {"kind": worst, "ratio": alone[worst]},
    }  # fmt: skip


def main() -> None:
    """Count all heads, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--lengths", default="64,128")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--orders", type=int, default=2)
    parser.add_argument("--own", action="store_true", help="count the package's own head, too")
    parser.add_argument("--name", default="gate_forms")
    args = parser.parse_args()
    heads: dict[str, Path | None] = {"own": None} if args.own else {}
    heads |= {name: Path(directory) for name, _, directory in (asked.partition("=") for asked in args.head)}
    lengths = [int(n) for n in args.lengths.split(",")]
    temperatures = [float(t) for t in args.temperatures.split(",")]
    found = {}
    for name, head in heads.items():
        found[name] = gate(head, lengths, temperatures, args.orders)
        print(f"{name} ({found[name]['form']}): worst {found[name]['worst']}", flush=True)
    write_result(args.name, {"lengths": lengths, "temperatures": temperatures, "orders": args.orders, "heads": found})


if __name__ == "__main__":
    main()
