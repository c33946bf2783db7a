"""Measures the acceptance of a head on held-out prompts, and writes `acceptance.json` into its directory.

    python -m training.acceptance [--model DIR --draft DIR] [--prompts FILE] [--count 48] [--max-tokens 128]

Runs the specrs that is installed, with trees of a fixed shape, at temperatures 0, 0.7 and 1. The temper is the one at
which the nodes' chances sum to what was accepted, of chains: a host verifies the likeliest nodes, which are nearly one.
A level's share is counted in bushes, which a device drafts before it sees their scores.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from torch.utils.dlpack import from_dlpack

from specrs import LLM, SamplingParams, assets
from specrs.engine.rounds.observer import Watching
from specrs.models.acceptance import FILE, HEATS

CHAIN, BUSH = (1, 7, 8), (4, 6, 32)
TEMPERATURES = dict(zip(HEATS, (0.0, 0.7, 1.0), strict=True))


class Counts:
    """Scores of drafts that were verified, and how deep they were accepted."""

    def __init__(self, steps: int) -> None:
        self.scores: list[float] = []
        self.accepted = 0
        self.reached = [0] * (steps + 1)

    def watch(self, trees: Any, accepts: Any) -> None:
        """A round was verified."""
        scores, first = from_dlpack(trees.scores).tolist(), 0
        for size, path in zip(trees.sizes, accepts.paths, strict=True):
            if size > 1:
                self.scores += scores[first + 1 : first + size]
                self.accepted += len(path) - 1
                for level in range(len(path)):
                    self.reached[level] += 1
            first += size

    def temper(self) -> float:
        """The one at which chances sum to what was accepted, by bisection."""
        low, high = 0.2, 2.0
        for _ in range(40):
            middle = (low + high) / 2
            more = sum(math.exp(middle * s) for s in self.scores) > self.accepted
            low, high = (middle, high) if more else (low, middle)
        return low

    def levels(self) -> list[float]:
        """Return for each level the share that is accepted where the one above is."""
        pairs = zip(self.reached, self.reached[1:], strict=False)
        return [round(below / above, 3) for above, below in pairs if above]


def main() -> None:
    """Measure a head and write its file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=assets.model_dir())
    parser.add_argument("--draft", type=Path, default=assets.draft_dir())
    parser.add_argument("--prompts", type=Path, help="JSON list of texts; default: the package's held-out prompts")
    parser.add_argument("--count", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    prompts = assets.heldout_prompts() if args.prompts is None else json.loads(args.prompts.read_text("utf-8"))
    said: dict[str, dict[str, Any]] = {heat: {} for heat in HEATS}
    for tree, what in ((CHAIN, "temper"), (BUSH, "levels")):
        llm = LLM(args.model, args.draft, tree=tree, max_batch=8)
        for heat, temperature in TEMPERATURES.items():
            counts = Counts(tree[1])
            params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, top_p=1.0, seed=1)
            with llm._observed_by(Watching(counts.watch)):
                llm.generate(prompts[: args.count], params)
            said[heat][what] = round(counts.temper(), 3) if tree is CHAIN else counts.levels()
            print(heat, said[heat], flush=True)
        llm.close()
    (args.draft / FILE).write_text(json.dumps(said, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
