"""What sources of drafts bring: tokens a round, and speed over plain decoding, by kind of work.

``LLM(speculative=False)`` against the same model with drafts of the head, of the text itself (suffix), of both and
recycled tokens, and of the default without a head. Whole requests, prompt included, one at a time, one kernel thread.
Tokens must be equal. Counted: each pass at a fixed price (`gate_counted`), which no neighbour changes. Timed: at each
task and repeat both engines run one after the other, in turns as to who is first; a row's ratio is that of the sums of
medians. "null" holds a plain engine against another.

    python benches/bench_drafters.py [--length 160] [--temperatures 0,1] [--repeats 5] [--parts counted,timed]
        [--name drafters]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from common import write_result
from drafters_texts import TASKS, Task
from gate_counted import ASKED, BESIDE, TABLE, Counter
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs.engine import RequestOutput

MIXES: dict[str, list[str]] = {
    "head": ["head"],
    "suffix": ["suffix"],
    "suffix + recycling": ["suffix", "recycling"],
    "head + suffix + recycling": ["head", "suffix", "recycling"],
}
GOALS = {"code editing": 3.0, "over the head alone": 1.5, "never below": 0.98}

Run = Callable[[LLM, list[int], SamplingParams], tuple[float, RequestOutput]]


def engine(drafters: Sequence[str] | None) -> LLM:
    """An engine with these sources; ``None``: plain."""
    options: dict[str, Any] = {"max_batch": 1, "max_context_len": 1024, "prefix_cache": False}
    return LLM(speculative=False, **options) if drafters is None else LLM(drafters=drafters, **options)


def params(task: Task, length: int, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=length, temperature=temperature, top_p=1.0, seed=seed, ignore_eos=True, prediction=task.prediction
    )


def ids(llm: LLM, task: Task) -> list[int]:
    return llm.encode(task.prompt) if isinstance(task.prompt, str) else task.prompt


def row(pairs: Sequence[tuple[float, float, RequestOutput]]) -> dict[str, Any]:
    """Of one kind: seconds of plain decoding and with drafts, and the output of the latter, of each task."""
    outputs = [out for _, _, out in pairs]
    rounds = sum(o.rounds for o in outputs)
    return {
        "ratio": round(sum(plain for plain, _, _ in pairs) / sum(took for _, took, _ in pairs), 4),
        "tasks": [round(plain / took, 3) for plain, took, _ in pairs],
        "tokens a round": round(sum(sum(n * c for n, c in enumerate(o.accepted_lengths)) for o in outputs) / rounds, 3),
    }


def counted(length: int, temperatures: Sequence[float]) -> dict[str, Any]:
    """Every mix by priced passes."""
    plain = engine(None)
    alone = Counter(plain)
    rows: dict[str, Any] = {}
    for mix, drafters in MIXES.items():
        for temperature in temperatures:
            for kind, tasks in TASKS.items():
                llm = engine(drafters)  # which has learnt nothing of other kinds
                counter, pairs = Counter(llm), []
                for seed, task in enumerate(tasks):
                    asked, prompt = params(task, length, temperature, seed), ids(llm, task)
                    before, [want] = alone.price([prompt], [asked], plain)
                    took, [out] = counter.price([prompt], [asked], llm)
                    assert out.token_ids == want.token_ids, "drafts must not change the tokens"
                    pairs.append((before, took, out))
                name = f"{mix}, {kind}, T={temperature:g}"
                rows[name] = row(pairs)
                print(f"counted: {name}: {rows[name]}", flush=True)
                llm.close()
    return {"table_ms": TABLE, "beside_ms": BESIDE, "asked_ms": ASKED, "rows": rows, **worst(rows)}


def timed(length: int, temperatures: Sequence[float], repeats: int) -> dict[str, Any]:
    """Every mix by the clock, over the same weights."""
    plain = engine(None)
    rows: dict[str, Any] = {}
    for mix, drafters in {"null": None, **MIXES}.items():
        for temperature in temperatures:
            for kind, tasks in TASKS.items():
                llm = engine(drafters)
                plain._runner.executor.target = llm._runner.executor.target  # type: ignore[attr-defined]
                pairs = []
                for seed, task in enumerate(tasks):
                    asked, prompt = params(task, length, temperature, seed), ids(llm, task)
                    seconds: dict[str, list[float]] = {"plain": [], "drafts": []}
                    outputs: dict[str, RequestOutput] = {}
                    for repeat in range(repeats + 1):
                        order = [("drafts", llm), ("plain", plain)]
                        for name, one in order if repeat % 2 else reversed(order):
                            started = time.thread_time()
                            outputs[name] = one.generate([prompt], asked)[0]
                            if repeat:  # the first one warms up
                                seconds[name].append(time.thread_time() - started)
                    assert outputs["drafts"].token_ids == outputs["plain"].token_ids
                    medians = {name: statistics.median(values) for name, values in seconds.items()}
                    pairs.append((medians["plain"], medians["drafts"], outputs["drafts"]))
                name = f"{mix}, {kind}, T={temperature:g}"
                rows[name] = row(pairs)
                print(f"timed: {name}: {rows[name]}", flush=True)
                llm.close()
    return {"rows": rows, **worst({name: r for name, r in rows.items() if not name.startswith("null")})}


def worst(rows: dict[str, Any]) -> dict[str, Any]:
    """The row that loses most, and those below the goal."""
    least = min(rows, key=lambda name: rows[name]["ratio"])
    below = sorted(name for name in rows if rows[name]["ratio"] < GOALS["never below"])
    return {"worst": {"row": least, "ratio": rows[least]["ratio"]}, "below 0.98": below}


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=160)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="counted,timed")
    parser.add_argument("--name", default="drafters")
    args = parser.parse_args()
    core.set_num_threads(1)
    torch.set_num_threads(1)
    temperatures, parts = [float(t) for t in args.temperatures.split(",")], args.parts.split(",")
    result: dict[str, Any] = {"goals": GOALS, "threads": 1, "length": args.length}
    if "counted" in parts:
        result["counted"] = counted(args.length, temperatures)
        write_result(args.name, result)  # the clock takes long, and may be stopped
    if "timed" in parts:
        result["timed"] = timed(args.length, temperatures, args.repeats)
        write_result(args.name, result)


if __name__ == "__main__":
    main()
