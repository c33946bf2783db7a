"""Gains and costs of drafts by default on a GPU from an engine's first request on: the model in the package.

"first": new engines, one request of Python code each, over plain decoding of the same request by a warm plain engine;
what a new engine takes to make its graphs is in it. "mix": one engine and all kinds of text, in orders that differ; a
kind's ratio is the median over the orders. Its graphs are there, made by other requests, and what it learnt is not:
each order begins with the budget and the guesses of a new engine. "batch": likewise, 8 requests at once, by the time
to the end of the last one, and by the mean time to the end of a request. "queue": likewise, all requests at once to an
engine that runs 8, their lengths from half to one and a half of the given one, by the time to the end of the last one.
Whole requests, prompt included. Tokens must be equal. "rounds": microseconds of a round behind a like one, by the
levels of its drafts, and to the first token; medians over the requests of "mix" (prices of `gate_flights.py`).

    python benches/gpu/first.py [--json FILE] [--lengths 64,128,256] [--orders 4] [--temperatures 0,1]
        [--parts first,rounds,mix,batch,queue]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from specrs import LLM, SamplingParams, assets
from specrs.engine.drafting.chooser import Kind
from specrs.measuring.machine import driver
from specrs.models.acceptance import read_acceptance

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import commit, versions
from gate_texts import CODE, KINDS

OPTIONS: dict[str, Any] = {"max_context_len": 1024, "prefix_cache": False, "device": "cuda"}


def run(llm: LLM, asked: list[tuple[str, int, float, int]]) -> tuple[float, list[Any]]:
    """Seconds of requests that run at once, and their outputs. asked: prompt, length, temperature, seed of each."""
    params = [
        SamplingParams(max_tokens=n, temperature=t, top_p=1.0, seed=seed, ignore_eos=True) for _, n, t, seed in asked
    ]
    prompts = [llm.encode(text) for text, *_ in asked]
    torch.cuda.synchronize()
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return time.perf_counter() - started, outputs


class Pair:
    """A plain engine, warm, and drafting ones that are new when they are asked for."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.plain = LLM(speculative=False, max_batch=batch, **OPTIONS)
        run(self.plain, [(CODE[0], 64, 0.0, 0)] * batch)
        self.default: LLM | None = None
        self._warm = False

    def begin(self) -> None:
        """A new engine."""
        if self.default is not None:
            self.default.close()
        self._warm = False
        self.default = LLM(max_batch=self.batch, **OPTIONS)

    def anew(self) -> None:
        """An engine that has its graphs, and knows no more than a new one."""
        if self.default is None or not self._warm:
            self.begin()
            for temperature in (0.0, 1.0):
                for some in KINDS.values():
                    run(self.default, [(text, 192, temperature, 9) for text in (some * 8)[: self.batch]])  # type: ignore[arg-type]
            self._warm = True
        policy = self.default._runner.drafting.policy  # type: ignore[union-attr]
        steps = len(policy.kinds[0].levels)
        policy.kinds[:] = [Kind.of(one, steps) for one in read_acceptance(assets.draft_dir())]

    def both(self, asked: list[tuple[str, int, float, int]]) -> tuple[float, float, list[Any], list[Any]]:
        """Return seconds of plain decoding, the less of two runs; of the new engine; its outputs; and the others."""
        assert self.default is not None
        took, outputs = run(self.default, asked)
        plain, want = min((run(self.plain, asked) for _ in range(2)), key=lambda one: one[0])
        assert [o.token_ids for o in outputs] == [o.token_ids for o in want], "drafts must not change the tokens"
        return plain, took, outputs, want


def rounds_of(pair: Pair, prompts: list[tuple[str, int, str]], temperature: float) -> dict[str, float]:
    """Return median microseconds of rounds behind a like one by their levels, and to the first token."""
    pair.anew()
    llm = pair.default
    assert llm is not None
    drafting, times, firsts = llm._runner.drafting, dict[str, list[float]](), list[float]()
    observe, before = drafting.observe, (-1, 0.0)

    def observed(outcome: Any) -> None:
        nonlocal before
        levels, now = outcome.plan.levels if outcome.plan.head else 0, time.perf_counter()
        if before[0] == levels:
            times.setdefault(str(levels), []).append(now - before[1])
        observe(outcome)
        before = levels, now

    drafting.observe = observed  # type: ignore[method-assign]
    for _, seed, text in prompts:
        before = -1, 0.0
        run(llm, [(text, 64, temperature, seed)])
        firsts.append(run(llm, [(text, 1, temperature, seed)])[0])
    del drafting.observe  # type: ignore[attr-defined]
    found = {levels: statistics.median(each) for levels, each in sorted(times.items())}
    return {
        name: round(1e6 * seconds) for name, seconds in (found | {"first_token": statistics.median(firsts)}).items()
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    parser.add_argument("--lengths", default="64,128,256")
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--parts", default="first,rounds,mix,batch,queue")
    args = parser.parse_args()
    parts = args.parts.split(",")
    lengths, temperatures = [int(n) for n in args.lengths.split(",")], [float(t) for t in args.temperatures.split(",")]
    rows: dict[str, Any] = {}

    def told(name: str, **row: Any) -> None:
        rows[name] = row
        print(name, row, flush=True)

    one = Pair(1)
    one.begin()
    one.both([(CODE[1], 64, 0.0, 0)])  # the process is warm: kernels are loaded
    for temperature in temperatures:
        for length in lengths if "first" in parts else ():
            done = []
            for seed, text in enumerate(CODE):
                one.begin()
                done.append(one.both([(text, length, temperature, seed)]))
            tokens, rounds = length * len(CODE), sum(out.rounds for *_, [out], _ in done)
            ratios = [plain / took for plain, took, *_ in done]
            told(
                f"first, T={temperature:g}, {length} tokens", ratio=round(statistics.geometric_mean(ratios), 3),
                requests=[round(r, 2) for r in ratios], tokens_a_round=round(tokens / rounds, 2),
            )  # fmt: skip
    prompts = [(kind, seed, text) for kind, some in KINDS.items() for seed, text in enumerate(some)]
    eight = Pair(8)
    for temperature in temperatures if "rounds" in parts else ():
        told(f"rounds, T={temperature:g}, us by levels", **rounds_of(one, prompts, temperature))
    for temperature in temperatures if "queue" in parts else ():
        for length in lengths[:: len(lengths) - 1 or 1]:
            ratios = []
            for turn in range(args.orders):
                random.Random(turn).shuffle(order := list(prompts))
                eight.anew()
                lens = [random.Random(100 * turn + i).randint(length // 2, length * 3 // 2) for i in range(len(order))]
                plain, took, *_ = eight.both(
                    [(text, n, temperature, s) for (_, s, text), n in zip(order, lens, strict=True)]
                )
                ratios.append(plain / took)
            told(
                f"queue, all kinds, T={temperature:g}, {length} tokens",
                ratio=round(statistics.median(ratios), 3), orders=[round(r, 3) for r in ratios],
            )  # fmt: skip
    for name, pair in (("mix", one), ("batch", eight)):
        for temperature in temperatures if name in parts else ():
            for length in lengths[:: len(lengths) - 1 or 1]:
                found: dict[str, list[float]] = {}
                for turn in range(args.orders):
                    random.Random(turn).shuffle(order := list(prompts))
                    pair.anew()
                    sums: dict[str, list[float]] = {}
                    for first in range(0, len(order), pair.batch):
                        some = order[first : first + pair.batch]
                        plain, took, *outputs = pair.both([(text, length, temperature, seed) for _, seed, text in some])
                        times = {"all kinds": (plain, took)}
                        if pair.batch == 1:
                            times[some[0][0]] = plain, took
                        else:
                            mine, others = (sum(o.seconds for o in each) for each in outputs)
                            times["all kinds, mean of requests"] = others, mine
                        for kind, (plain, took) in times.items():
                            both = sums.setdefault(kind, [0.0, 0.0])
                            both[0] += plain
                            both[1] += took
                    for kind, (plain, took) in sums.items():
                        found.setdefault(kind, []).append(plain / took)
                for kind, ratios in sorted(found.items()):
                    told(
                        f"{name}, {kind}, T={temperature:g}, {length} tokens",
                        ratio=round(statistics.median(ratios), 3), orders=[round(r, 3) for r in ratios],
                    )  # fmt: skip
    if args.json:
        head = {"commit": commit(), "device": torch.cuda.get_device_name(), "driver": driver(), "versions": versions()}
        Path(args.json).write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
