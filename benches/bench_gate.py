"""Goal 12: what the default of speculation costs and brings on texts that the model was never trained on.

``LLM()`` against ``LLM(speculative=False)``: whole requests, prompt and its draft prefill included, greedy and at
temperature 1, one request at a time, one kernel thread. Tokens must be equal. The same engine's speed differs by up to
10% from load to load, by where its weights lie in memory; so both engines read the same weights. At each prompt and
repeat both run in step (`in_step`), and their times make a pair: a machine that slows for a while slows both. A
prompt's ratio is the median of its pairs', a row's that of the sums over its prompts, each with its median seconds of
plain decoding. "null" rows hold a plain engine against another one, the same way: what they
differ from 1 by is the machine's. "fresh" rows have a new engine for each request: nothing is learnt, and its passes
are measured anew. Seconds are of the thread's CPU time: all work is on one thread, and neighbours on a shared machine
count for less. Beside that, the same requests are counted instead of timed (`gate_counted`), which a noisy machine does
not change, and the gate's arithmetic is simulated over a grid of costs and acceptance.

    python benches/bench_gate.py [--lengths 64,128,256,512] [--temperatures 0,1] [--timed 64,256] [--repeats 5]
        [--fresh 1] [--name gate] [--parts counted,tails,yields,simulated,timed] [--cores 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

import torch

from common import RESULTS, commit, write_result
from gate_counted import counted, tails, yields
from gate_simulation import simulate
from gate_texts import KINDS
from in_step import in_step
from specrs import LLM, SamplingParams
from specrs import _specrs as core

GRID = {
    "steps": (0.05, 0.1, 0.2, 0.4),
    "growths": (0.02, 0.06, 0.12),
    "chances": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "lengths": (64, 128, 256, 512),
}
BATCHES = GRID | {"lengths": (128,), "batches": (4,)}


def request(speculative: LLM, plain: LLM, prompt: str, params: SamplingParams, repeats: int) -> dict[str, float]:
    """The median of plain seconds, and of the pairs' ratios, over repeats that alternate in who is first."""
    seconds: dict[str, list[float]] = {"speculative": [], "plain": []}
    rounds = 0
    for repeat in range(repeats):
        (took, _, out), (alone, _, want) = in_step((speculative, plain), prompt, params, repeat % 2)
        seconds["speculative"].append(took)
        seconds["plain"].append(alone)
        rounds = out.rounds
        assert out.token_ids == want.token_ids, "speculation must not change the tokens"
    ratios = [alone / took for alone, took in zip(seconds["plain"], seconds["speculative"], strict=True)]
    plain_seconds, ratio = statistics.median(seconds["plain"]), statistics.median(ratios)
    return {"plain": plain_seconds, "ratio": ratio, "low": min(ratios), "high": max(ratios), "rounds": rounds}


def engines(plain: LLM | None = None) -> tuple[LLM, LLM]:
    """A speculative engine, and a plain one (this one, if given) over its weights."""
    options: dict[str, Any] = {"max_batch": 1, "max_context_len": 1024, "prefix_cache": False}
    speculative, plain = LLM(**options), plain or LLM(speculative=False, **options)
    plain._runner.executor.target = speculative._runner.executor.target
    return speculative, plain


def row(requests: list[dict[str, float]]) -> dict[str, Any]:
    """Requests of one kind, temperature and length."""
    plain = sum(r["plain"] for r in requests)
    return {
        "ratio": round(plain / sum(r["plain"] / r["ratio"] for r in requests), 4),
        "requests": [round(r["ratio"], 3) for r in requests],
        "pairs": [[round(r["low"], 3), round(r["high"], 3)] for r in requests],
        "rounds": [r["rounds"] for r in requests],
    }


def main() -> None:
    """Count, simulate, measure, and write benches/results/gate.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="64,128,256,512")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fresh", type=int, default=1, help="0 leaves the fresh engines out")
    parser.add_argument("--name", default="gate", help="of the file in benches/results")
    parser.add_argument(
        "--parts", default="counted,tails,yields,simulated,timed", help="what to run; the others' figures stay"
    )
    parser.add_argument("--cores", type=int, default=1, help="of the counted part")
    parser.add_argument("--timed", help="lengths to time (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    core.set_num_threads(1)
    lengths, temperatures = [int(n) for n in args.lengths.split(",")], [float(t) for t in args.temperatures.split(",")]
    parts, path = args.parts.split(","), RESULTS / f"{args.name}.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    result: dict[str, Any] = {"goal": 12, "threads": 1}
    result |= {part: before[part] for part in ("counted", "tails", "yields", "simulated", "timed") if part in before}
    if "counted" in parts:
        result["counted"] = {"commit": commit(), **counted(lengths, temperatures, args.cores)}
        print(f"worst: counted {result['counted']['worst']}")
    if "tails" in parts:
        result["tails"] = {"commit": commit(), **tails()}
    if "yields" in parts:
        result["yields"] = {"commit": commit(), **yields()}
    if "simulated" in parts:
        grid = simulate(**GRID) + simulate(**BATCHES)
        worst = min(grid, key=lambda r: r["mean"])
        result["simulated"] = {"commit": commit(), "worst": worst, "grid": grid}
        print(f"worst: simulated {worst}")
    if "timed" in parts:
        timed = lengths if args.timed is None else [int(n) for n in args.timed.split(",") if n]
        result["timed"] = {"commit": commit()} | in_turns(timed, temperatures, args.repeats, bool(args.fresh))
    write_result(args.name, result)


def in_turns(lengths: list[int], temperatures: list[float], repeats: int, fresh: bool) -> dict[str, Any]:
    """Time both engines."""
    warm, plain = engines()
    twin = LLM(speculative=False, max_batch=1, max_context_len=1024, prefix_cache=False)
    rows: dict[str, dict[str, Any]] = {}
    for engine in ("null", "fresh", "warm") if fresh else ("null", "warm"):
        for length in [64] if engine == "fresh" else lengths:
            for temperature in temperatures[:1] if engine == "null" else temperatures:
                for kind, prompts in list(KINDS.items())[:2] if engine == "null" else KINDS.items():
                    done = []
                    for seed, prompt in enumerate(prompts):
                        params = SamplingParams(
                            max_tokens=length, temperature=temperature, top_p=1.0, seed=seed, ignore_eos=True
                        )
                        speculative, turns = warm, repeats
                        if engine == "fresh":
                            (speculative, plain), turns = engines(plain), 1
                        else:
                            plain._runner.executor.target = warm._runner.executor.target
                        if engine == "null":
                            speculative = twin
                            twin._runner.executor.target = warm._runner.executor.target
                        done.append(request(speculative, plain, prompt, params, turns))
                    name = f"{engine}, {kind}, T={temperature:g}, {length} tokens"
                    rows[name] = row(done)
                    print(f"{name}: {rows[name]['ratio']:.3f}  {rows[name]['requests']}", flush=True)
    drafting = [name for name in rows if not name.startswith("null")]
    worst = min(drafting, key=lambda name: rows[name]["ratio"])
    print(f"worst: timed {rows[worst]['ratio']:.3f}: {worst}")
    spread = [rows[name]["ratio"] for name in rows if name not in drafting]
    return {
        "rows": rows,
        "worst": {"row": worst, "ratio": rows[worst]["ratio"]},
        "below 0.98": sorted(name for name in drafting if rows[name]["ratio"] < 0.98),
        "null": [min(spread), max(spread)],
    }


if __name__ == "__main__":
    main()
