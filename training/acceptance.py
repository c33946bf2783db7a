"""Measures heads on prompts, and writes `acceptance.json` into the directory of each.

    python -m training.acceptance [MODEL HEAD...] [--prompts FILE] [--count 48] [--max-tokens 128] [--json FILE]

Without arguments it measures the head in the package, on the package's held-out prompts.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from specrs import __version__, assets
from specrs.measuring import machine
from specrs.train.answers import Prompt
from specrs.train.measured import Engines, measured


def main() -> None:
    """Measure heads and write their files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=assets.model_dir())
    parser.add_argument("heads", type=Path, nargs="*", default=[assets.draft_dir()])
    parser.add_argument("--prompts", type=Path, help="JSON list of texts; default: the package's held-out prompts")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="file for everything that was measured")
    args = parser.parse_args()
    texts = assets.heldout_prompts() if args.prompts is None else json.loads(args.prompts.read_text("utf-8"))
    prompts = [Prompt("prompts", text) for text in texts[: args.count]]
    said = {
        "specrs": __version__, "commit": machine.commit_of(), "driver": machine.driver(),
        "versions": machine.versions(), "prompts": len(prompts), "max_tokens": args.max_tokens, "heads": {},
    }  # fmt: skip
    for head in args.heads:
        found = measured(Engines(args.model, head, prompts, args.max_tokens, {}))
        said["heads"][head.name] = asdict(found)
        print(head.name, json.dumps(asdict(found)), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(said, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
