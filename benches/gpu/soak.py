"""Thousands of rounds in poison mode at every graph level: the same tokens, no memory taken, the pool's books clean.

Requests of all kinds join at random steps and end in every way, so that batches shrink and grow across buckets. The
reference is plain decoding of one request at a time, launched kernel by kernel. The last third runs beside a stream
that hogs the GPU.

    python benches/gpu/soak.py [--json FILE] [--rounds 10000] [--levels off,round,loop]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["SPECRS_POISON"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import commit, versions
from specrs import LLM, SamplingParams, assets, device
from specrs import _specrs as core

TREES = {"plain": None, "chain": (1, 5, 6), "tree": (4, 4, 16), "wide": (8, 6, 64)}
REQUESTS = 96
KINDS = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.2})
Work = list[tuple[list[int], SamplingParams]]


def work(llm: LLM) -> Work:
    """Requests of known and of random text, greedy and sampled, that end by length or by a token."""
    rng = random.Random(7)
    known = [llm.encode(text) for text in assets.heldout_prompts()]
    found = []
    for i in range(REQUESTS):
        prompt = rng.choice(known) if rng.random() < 0.7 else [rng.randrange(llm.vocab_size) for _ in range(90)]
        kind: dict[str, Any] = rng.choice(KINDS)
        if rng.random() < 0.1:
            kind = {**kind, "repetition_penalty": 1.1}
        ends = {"max_tokens": rng.choice([1, 5, 24, 64, 96]), "ignore_eos": rng.random() < 0.5}
        found.append((prompt, SamplingParams(seed=i, **ends, **kind)))
    return found


def used(llm: LLM) -> int:
    """Bytes of torch's tensors and of specrs's buffers, without room for features that nobody has asked for yet."""
    target: Any = llm._runner.executor.target  # type: ignore[attr-defined]
    if target.features is not None:
        target.features._ready.clear()
    gc.collect()
    core._graph_collect(True)
    torch.cuda.synchronize()
    core._device_collect(0)
    return torch.cuda.memory_allocated() + core._device_memory(0)[3]


def hog(stream: torch.cuda.Stream, big: torch.Tensor) -> None:
    """Put some milliseconds of products on another stream."""
    with torch.cuda.stream(stream):
        for _ in range(4):
            torch.matmul(big, big)


def soak(kind: str, level: str, page: int, rounds: int, requests: Work, want: list[list[int]]) -> dict[str, Any]:
    """Serve the requests again and again until so many rounds have landed."""
    rng, tree = random.Random(f"{kind} {level}"), TREES[kind]
    options: dict[str, Any] = {"device": "cuda", "graphs": level, "page_size": page, "max_batch": 8,
                               "prefix_cache": False}  # fmt: skip
    options |= {"speculative": False} if tree is None else {"tree": tree}
    stream, big = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    hog(stream, big)  # takes its workspace
    landed, served, differ, before, started = 0, 0, 0, 0, time.perf_counter()
    with LLM(**options) as llm:
        executor: Any = llm._runner.executor
        for size in executor._buckets:
            executor._of(size)
        llm.generate(*map(list, zip(*requests, strict=True)))  # scratch memory has its size
        order: list[int] = []
        live: dict[int, int] = {}
        while landed < rounds or live:
            if landed < rounds and (rng.random() < 0.25 or not live):
                order = order or rng.sample(range(REQUESTS), REQUESTS)
                place = order.pop()
                live[llm.add(*requests[place])] = place
            if landed > rounds * 2 // 3 and rng.random() < 0.2:
                hog(stream, big)
            for event in llm.step():
                if event.output is not None:
                    place = live.pop(event.request_id)
                    differ += event.output.token_ids != want[place]
                    served, landed = served + 1, landed + event.output.rounds
            if not before and landed > rounds // 2:
                before = used(llm)
        llm.audit()
        device.check()
        grown = used(llm) - before
    seconds = time.perf_counter() - started
    return {"kind": kind, "tree": tree, "level": level, "page_size": page, "rounds": landed, "requests": served,
            "requests_that_differ": differ, "grown_bytes": grown, "seconds": round(seconds, 1)}  # fmt: skip


def main() -> None:
    """Soak every kind at every level, print and write the findings; exit with 1 if one was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=10_000)
    parser.add_argument("--levels", default="off,round,loop")
    args = parser.parse_args()
    with LLM(device="cuda", graphs="off", speculative=False, max_batch=1, prefix_cache=False) as llm:
        requests = work(llm)
        want = [llm.generate([prompt], params)[0].token_ids for prompt, params in requests]
    rows: list[dict[str, Any]] = []
    result = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "versions": versions(), "poison": True, "hogged": "the last third", "rows": rows,
    }  # fmt: skip
    for level in args.levels.split(","):
        for (kind, _), page in zip(TREES.items(), (1, 16, 1, 16), strict=True):
            # Kernel by kernel it takes ten times as long: a tenth of the rounds.
            count = args.rounds // (40 if level == "off" else 4)
            rows.append(soak(kind, level, page, count, requests, want))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    # Some KiB: room for sampling's edits of tokens, which doubles where a request with penalties has more of them.
    if any(row["requests_that_differ"] or row["grown_bytes"] > 1 << 16 for row in rows):
        sys.exit("something differed, or grew")


if __name__ == "__main__":
    main()
