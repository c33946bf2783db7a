"""Gains from sources of drafts on a GPU, over plain decoding, by kind of work: the model in the package.

The kinds of `bench_drafters`, whose answers are what the model itself says. Engines of every mix live beside each other
and take turns; whole requests, prompt included, one at a time. A ratio is the median over repeats of plain decoding's
seconds over the mix's, of all tasks of a kind together. Tokens must be equal. "united" counts rounds whose trees the
device made of the head's drafts and of other sources'.

    python benches/gpu/drafters.py [--json FILE] [--length 160] [--repeats 5] [--temperatures 0,1] [--kinds code]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from specrs import LLM, SamplingParams
from specrs.engine.devices.graphs import Bucket
from specrs.engine.devices.launches import Variant
from specrs.measuring.machine import driver

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import commit, versions
from drafters_texts import TASKS, Task

MIXES: dict[str, dict[str, Any]] = {
    "plain": {"speculative": False},
    "plain again": {"speculative": False},
    "head": {"drafters": ["head"]},
    "suffix": {"drafters": ["suffix"]},
    "suffix + recycling": {"drafters": ["suffix", "recycling"]},
    "head + suffix + recycling": {"drafters": ["head", "suffix", "recycling"]},
}


def watch() -> Counter[int]:
    """From now on counts rounds whose trees a device unites, by bucket."""
    united: Counter[int] = Counter()
    again = Bucket.again

    def counted(self: Bucket, variant: Variant, rounds: int = 1) -> int:
        united[id(self)] += variant.drafts > 0
        return again(self, variant, rounds)

    Bucket.again = counted  # type: ignore[method-assign]
    return united


def run(llm: LLM, tasks: list[Task], length: int, temperature: float) -> tuple[float, list[Any]]:
    """Return seconds of all tasks, one after the other, and their outputs."""
    outputs, seconds = [], 0.0
    for seed, task in enumerate(tasks):
        prompt = llm.encode(task.prompt) if isinstance(task.prompt, str) else task.prompt
        params = SamplingParams(
            max_tokens=length,
            temperature=temperature,
            top_p=1.0,
            seed=seed,
            ignore_eos=True,
            prediction=task.prediction,
        )
        torch.cuda.synchronize()
        started = time.perf_counter()
        outputs += llm.generate([prompt], params)
        seconds += time.perf_counter() - started
    return seconds, outputs


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--kinds", default="", help="those whose name has this in it")
    args = parser.parse_args()
    united = watch()
    kinds = [kind for kind in TASKS if args.kinds in kind and TASKS[kind][0].answer is None]
    common: dict[str, Any] = {"max_batch": 1, "max_context_len": 1024, "prefix_cache": False, "device": "cuda"}
    rows: dict[str, Any] = {}
    engines = {name: LLM(**common, **options) for name, options in MIXES.items()}
    for temperature in map(float, args.temperatures.split(",")):
        for kind in kinds:
            tasks = TASKS[kind]
            took: dict[str, list[float]] = {name: [] for name in engines}
            found: dict[str, dict[str, Any]] = {}
            want: list[list[int]] = []
            for repeat in range(args.repeats + 1):  # the first one makes memory and graphs
                names = list(engines) if repeat % 2 else [*reversed(engines)]
                tokens: dict[str, list[list[int]]] = {}
                for name in names:
                    before = sum(united.values())
                    seconds, outputs = run(engines[name], tasks, args.length, temperature)
                    tokens[name] = [list(o.token_ids) for o in outputs]
                    if repeat:
                        took[name].append(seconds)
                    rounds = sum(o.rounds for o in outputs)
                    emitted = sum(n * c for o in outputs for n, c in enumerate(o.accepted_lengths))
                    found[name] = {
                        "tokens a round": round(emitted / max(rounds, 1), 3),
                        "rounds": rounds,
                        "united": sum(united.values()) - before,
                    }
                want = tokens["plain"]
                assert all(t == want for t in tokens.values()), f"{kind}: drafts must not change the tokens"
            for name in engines:
                pairs = zip(took["plain"], took[name], strict=True)
                found[name]["ratio"] = round(statistics.median(plain / mine for plain, mine in pairs), 3)
                found[name]["tokens_per_second"] = round(sum(map(len, want)) / statistics.median(took[name]), 1)
            rows[f"{kind}, T={temperature:g}"] = found
            told = {name: [f["ratio"], f["tokens a round"], f["united"]] for name, f in found.items()}
            print(f"{kind}, T={temperature:g}", json.dumps(told), flush=True)
            result = {
                "commit": commit(), "device": torch.cuda.get_device_name(), "driver": driver(), "versions": versions(),
                "length": args.length, "repeats": args.repeats, "rows": rows,
            }  # fmt: skip
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
