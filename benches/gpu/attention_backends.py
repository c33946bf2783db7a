"""An engine with each attention backend that runs on a GPU: tokens, the ties at which they part from native's, times.

The model is the one in the package, with its head. Requests decode greedily from held-out prompts, by trees of K in 1,
4 and 8, over pages of 1, 16 and 64 tokens. The reference are the tokens of plain decoding by ``native``, which do not
depend on trees, pages or batches. A tie is the first position at which a request's tokens part from them; its margin is
how much larger the log-probability of the reference's token is there. Seconds are those of all requests together,
medians of turns that the backends take in one process, after one turn that is not counted. "Accepted" are tokens a
round. A synchronisation is a call of CUDA by which the host waits, counted over 8 steady steps.

``kernels`` are attention alone at the heads of an 8B Llama (32 over 8, of 128), bf16: each phase behind 8192 positions
of each request, pages of 16 that lie anywhere, a tree of 64 nodes and 8 branches, 40 new positions in ``extend``; from
CUDA graphs that take turns, with the largest difference of both backends' results.

    python benches/gpu/attention_backends.py [--json FILE] [--tokens 96] [--turns 3] [--requests 4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))
import torch
from timing import times

from common import commit, versions
from driver_calls import driver_calls
from specrs import LLM, SamplingParams, assets
from specrs.measuring.machine import driver
from triton_world import PHASES, Heads, Pass, Requests

BACKENDS = ("native", "triton")
TREES = {1: (1, 4, 5), 4: (4, 4, 16), 8: (8, 4, 32)}
PAGES = (1, 16, 64)
OPTIONS: dict[str, Any] = {"device": "cuda", "max_context_len": 512, "prefix_cache": False}


def ties(reference: list[Any], outputs: list[Any]) -> list[dict[str, Any]]:
    """Positions at which requests part from the reference, each with its margin."""
    found = []
    for i, (want, got) in enumerate(zip(reference, outputs, strict=True)):
        pairs = enumerate(zip(want.token_ids, got.token_ids, strict=True))
        at = next((n for n, (a, b) in pairs if a != b), None)
        if at is not None:
            scores, tokens = want.logprobs[at], (want.token_ids[at], got.token_ids[at])
            other = scores.get(tokens[1])
            margin = None if other is None else round(scores[tokens[0]].logprob - other.logprob, 5)
            found.append({"request": i, "position": at, "tokens": list(tokens), "margin": margin})
    return found


def synchronisations(llm: LLM, texts: list[str]) -> int:
    """Waits of 8 steady steps."""
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    ids = [llm.add(text, params) for text in texts]
    for _ in range(8):
        llm.step()
    with driver_calls() as seen:
        for _ in range(8):
            llm.step()
    for i in ids:
        llm.abort(i)
    return sum(seen.synchronisations.values())


def kernels(batch: int) -> list[dict[str, Any]]:
    """Microseconds of each phase's attention."""
    requests = Requests(1, (8, 6, 64), 16, "dense", 8192 + 256, [8192] * batch)
    requests.counts = [40] * batch
    found = []
    for phase in PHASES:
        one = Pass(requests, phase, Heads(8, 4, 128, torch.bfloat16), padded=False)
        (triton, got), (native, want) = one.launch(torch.device("cuda", 0)), one.native(torch.device("cuda", 0))
        us = times({"native": native, "triton": triton}, launches=10)
        apart = float((got.float() - want.float()).abs().max())
        row = {"phase": phase, "requests": batch, "us": us, "largest_difference": round(apart, 5)}
        found.append(row | {"triton_over_native": round(us["triton"] / us["native"], 2)})
        print(json.dumps(found[-1]), flush=True)
    return found


def measure(k: int, page: int, texts: list[str], reference: list[Any], tokens: int, turns: int) -> dict[str, Any]:
    """One tree and page size."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    row: dict[str, Any] = {"tree": list(TREES[k]), "page_size": page}
    given = {"tree": TREES[k], "page_size": page, "max_batch": len(texts), **OPTIONS}
    engines = {name: LLM(assets.model_dir(), assets.draft_dir(), attention_backend=name, **given) for name in BACKENDS}
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    try:
        for turn in range(turns + 1):
            for name, llm in engines.items():
                begun = time.perf_counter()
                outputs = [o.outputs[0] for o in llm.generate(texts, params)]
                if turn:
                    seconds[name].append(time.perf_counter() - begun)
                row[name] = {
                    "ties": ties(reference, outputs),
                    "accepted": round(statistics.mean(o.mean_accepted for o in outputs), 3),
                }
        for name, llm in engines.items():
            row[name] |= {
                "seconds": round(statistics.median(seconds[name]), 4),
                "synchronisations": synchronisations(llm, texts),
            }
    finally:
        for llm in engines.values():
            llm.close()
    row["triton_over_native"] = round(row["triton"]["seconds"] / row["native"]["seconds"], 3)
    return row


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4)
    args = parser.parse_args()
    texts, rows = assets.heldout_prompts()[: args.requests], list[dict[str, Any]]()
    result: dict[str, Any] = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": versions("triton"), "model": "pystdlib-16m", "requests": args.requests,
        "tokens": args.tokens, "turns": args.turns, "rows": rows,
    }  # fmt: skip
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True, logprobs=5)
    with LLM(assets.model_dir(), speculative=False, max_batch=1, **OPTIONS) as llm:
        reference = [o.outputs[0] for o in llm.generate(texts, params)]
    for k in TREES:
        for page in PAGES:
            rows.append(measure(k, page, texts, reference, args.tokens, args.turns))
            print(json.dumps(rows[-1]), flush=True)
            if args.json:  # after each row: a run may be cut off
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    result["kernels"] = [row for batch in (1, 8) for row in kernels(batch)]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
