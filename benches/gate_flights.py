"""Costs and gains of speculation by default on a GPU, counted instead of timed: rounds in flight, without a GPU.

The engine runs on `tests/python/flight_world.py`, a device on the CPU that runs ahead of the host as a GPU does.
Each round has a price, which was measured on an H100 with the model in the package, and the clock is that of a host
that plans, waits and commits beside the device: a round launched behind another one begins when that one ends, and the
device waits for a round that the host has to plan. So a figure repeats to the last digit, where the host of a lent GPU
moves it by some percent. Tokens must be those of plain decoding.

    python benches/gate_flights.py [--json FILE] [--lengths 64,256] [--temperatures 0,1] [--orders 4] [--batch 1]

Requests run one at a time; with ``--batch 8``, all at once by an engine that runs 8 together, their lengths from half
to one and a half of the given one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/python"))

import flight_world as world
import specrs.engine.config as config_module
import specrs.engine.llm as llm_module
from common import commit, versions
from gate_texts import KINDS
from specrs import LLM, SamplingParams, assets
from specrs.engine.devices.head_inputs import Entries
from specrs.engine.drafting.chooser import Kind, TreePolicy
from specrs.engine.drafting.levels import costs_of_rounds
from specrs.models.acceptance import read_acceptance

# Milliseconds on an H100, by the levels of drafts: rounds of 1 request (part "rounds" of `gpu/first.py`), and of 8, by
# the time between rounds of its part "queue", of which no result is kept.
ROUNDS = {1: {0: 0.34, 1: 0.52, 3: 0.73, 6: 0.92}, 8: {0: 0.42, 1: 0.68, 3: 0.95, 6: 1.17}}
# A prompt, and passes of a head that begins behind a prompt or later.
PROMPT, ENTER, RESUME = 1.7, 0.15, 0.68
# The host's part: in a round, the more that it does for a round behind no other and for a head that begins.
HOST, PLANNED, BEGUN = 0.17, 0.42, 0.3


class Clock:
    """The host's clock, and the time at which the device is done with all that was launched, in milliseconds."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.ends: dict[int, float] = {}  # of rounds

    def launch(self, price: float) -> float:
        """Launch work behind all other, and return when it ends."""
        self.device = max(self.device, self.host) + price
        return self.device

    def seconds(self) -> float:
        """The engine's clock, in seconds."""
        return self.host / 1e3


CLOCK = Clock()


def price(batch: int, levels: int) -> float:
    """Milliseconds of a round."""
    each = [np.interp(levels, list(rounds), list(rounds.values())) for rounds in ROUNDS.values()]
    return float(np.interp(1 << (batch - 1).bit_length(), list(ROUNDS), each))


class Drafts(world.DeviceDrafts):
    """The head's passes, priced."""

    def extend(self, requests: Any) -> Any:
        for r in requests:
            if r.lag:
                CLOCK.host += BEGUN
                CLOCK.launch(ENTER if Entries(r, r.head.end, r.lag).kept else RESUME)
        return super().extend(requests)


class Priced(world.Device):
    """A device whose passes have prices."""

    clock = CLOCK.seconds

    def _drafts(self, head: Any, cache: Any, config: Any) -> Drafts:
        return Drafts(self, head, cache, config)

    def policy(self, pages: Any) -> TreePolicy:
        shape = self.planner.geometry.shape
        seconds = {b: {levels: ms / 1e3 for levels, ms in rounds.items()} for b, rounds in ROUNDS.items()}
        costs = costs_of_rounds(shape, seconds, {1: (ENTER + BEGUN) / 1e3}, {1: (RESUME + BEGUN) / 1e3})
        return TreePolicy(costs, kinds(shape.steps))

    def prefill(self, *args: Any) -> Any:
        CLOCK.host = CLOCK.launch(PROMPT)
        return super().prefill(*args)

    def _launched(self, asked: Any) -> Any:
        CLOCK.host += PLANNED
        return super()._launched(asked)

    def _round(self, run: Any) -> int:
        number = super()._round(run)
        CLOCK.ends[number] = CLOCK.launch(price(len(run.seats), run.levels))
        return number


def waited(found: Any) -> Any:
    """Return `Round._found`, which waits for the round's end."""

    def late(self: Any) -> Any:
        CLOCK.host = max(CLOCK.host, CLOCK.ends[self.number]) + HOST
        return found.func(self)

    late_property = cached_property(late)
    late_property.__set_name__(world.Round, "_found")
    return late_property


def kinds(steps: int) -> list[Kind]:
    """What an engine knows before its first request."""
    return [Kind.of(one, steps) for one in read_acceptance(assets.draft_dir())]


def engine(batch: int, **options: Any) -> LLM:
    """An engine on the device."""
    return LLM(max_batch=batch, max_context_len=1024, prefix_cache=False, **options)


def run(llm: LLM, asked: list[tuple[str, int, int]], temperature: float) -> tuple[float, list[list[int]]]:
    """Milliseconds to the end of the last request, and their tokens. asked: prompt, seed and length of each."""
    started = CLOCK.host
    params = [
        SamplingParams(max_tokens=length, temperature=temperature, top_p=1.0, seed=seed, ignore_eos=True)
        for _, seed, length in asked
    ]
    outputs = llm.generate([llm.encode(text) for text, *_ in asked], params)
    return CLOCK.host - started, [output.token_ids for output in outputs]


def main() -> None:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    parser.add_argument("--lengths", default="64,256")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--orders", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm_module.HostExecutor = type("Device", (Priced,), {"told": world.Told()})  # type: ignore[misc]
    config_module.AUTO_TREE = config_module.AUTO_GPU_TREE
    world.Round._found = waited(world.Round._found)
    drafting, plain = engine(args.batch), engine(args.batch, speculative=False)
    policy = drafting._runner.drafting.policy
    rows: dict[str, Any] = {}
    prompts = [(kind, seed, text) for kind, some in KINDS.items() for seed, text in enumerate(some)]
    for length in map(int, args.lengths.split(",")):
        for temperature in map(float, args.temperatures.split(",")):
            ratios: dict[str, list[float]] = {}
            for turn in range(args.orders):
                random.Random(turn).shuffle(order := list(prompts))
                policy.kinds[:] = kinds(len(policy.kinds[0].levels))
                sums: dict[str, list[float]] = {}
                lengths, rng = [length] * len(order), random.Random(100 + turn)
                if args.batch > 1:  # so that requests do not end together
                    lengths = [rng.randint(length // 2, length * 3 // 2) for _ in order]
                each = [(kind, (text, seed, n)) for (kind, seed, text), n in zip(order, lengths, strict=True)]
                runs = [(kind, [one]) for kind, one in each]
                if args.batch > 1:
                    runs = [("all kinds", [one for _, one in each])]
                for kind, asked in runs:
                    mine, others = (run(llm, asked, temperature) for llm in (drafting, plain))
                    assert mine[1] == others[1], "drafts must not change the tokens"
                    for name in {"all kinds", kind}:
                        both = sums.setdefault(name, [0.0, 0.0])
                        both[0] += others[0]
                        both[1] += mine[0]
                for kind, (without, took) in sums.items():
                    ratios.setdefault(kind, []).append(without / took)
            for kind, each in sorted(ratios.items()):
                name = f"{kind}, T={temperature:g}, {length} tokens, batch {args.batch}"
                rows[name] = {"ratio": round(statistics.median(each), 3), "orders": [round(r, 3) for r in each]}
                print(name, rows[name], flush=True)
    if args.json:
        head = {"commit": commit(), "device": "prices of an H100", "versions": versions()}
        Path(args.json).write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
