"""Gains from sources of drafts: tokens a round, and speed over plain decoding, by kind of work.

``LLM(speculative=False)`` against the same model with drafts of the head, of the text itself (suffix), of both and
recycled tokens, and of the default without a head. Whole requests, prompt included, one at a time, one kernel thread.
Tokens must be equal.

The model in the package is too small to edit a file as it is asked to, or to quote. So tasks that are "done" have an
answer, which the target is told: its passes run as ever, and then the logits behind each token of the text are those of
a model that goes on with the answer (`Told`). A head that was trained on other texts foretells such a target badly, as
it does one that it was not trained for; these rows say what the text itself is worth.

Counted: each pass at a fixed price (`gate_counted`), which no neighbour changes. Timed: at each task and repeat both
engines run in step (`in_step`); of a task the median of the runs' ratios counts, by what it takes in plain decoding.
Where an engine's memory lies makes it up to 1% faster or slower as long as it lives, so several pairs of engines are
made for a row; for one that comes out below 0.99x, `CLOSER` times as many, all of which count. "null" holds a plain
engine against another, of two kinds. "behind the prompt" is the ratio of what follows the first token. Rows do not know
of each other, so that a machine of many cores measures several at once, each in a process on a core of its own.

    python benches/bench_drafters.py [--length 160] [--temperatures 0,1] [--pairs 4] [--repeats 3]
        [--parts counted,timed] [--name drafters] [--kinds code] [--cores 8]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from common import write_result
from drafters_texts import TASKS, Task
from gate_counted import ASKED, BESIDE, TABLE, Counter
from in_step import in_step
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs.engine import RequestOutput

MIXES: dict[str, list[str]] = {
    "head": ["head"],
    "suffix": ["suffix"],
    "suffix + recycling": ["suffix", "recycling"],
    "head + suffix + recycling": ["head", "suffix", "recycling"],
}
NULLS = ("prose", "random tokens")
GOALS = {"code editing": 3.0, "over the head alone": 1.5, "never below": 0.98}
DOUBTFUL, CLOSER = 0.99, 4

Run = Callable[[LLM, list[int], SamplingParams], tuple[float, RequestOutput]]


def engine(drafters: Sequence[str] | None) -> LLM:
    """An engine with these sources; ``None``: plain."""
    options: dict[str, Any] = {"max_batch": 1, "max_context_len": 1024, "prefix_cache": False}
    return LLM(speculative=False, **options) if drafters is None else LLM(drafters=drafters, **options)


class Told:
    """A target that goes on with a given text, at the cost of running the real one."""

    def __init__(self, llm: LLM) -> None:
        target: Any = llm._runner.executor.target
        self._run, self.text = target.forward, torch.empty(0, dtype=torch.int64)
        target.forward = self._forward

    def _forward(self, tokens: Any, plan: Any, kv: Any, aux: Any = None, rows: Any = None) -> Any:
        logits, features = self._run(tokens, plan, kv, aux, rows)
        if len(self.text):
            positions = from_dlpack(plan.positions).long()
            behind = (positions if rows is None else positions[rows]) + 1
            known = behind < len(self.text)
            logits[known.nonzero().flatten(), self.text[behind[known]]] = 1e4
        return logits, features

    def tell(self, llm: LLM, prompt: list[int], task: Task) -> int | None:
        """Go on with the answer of a task, if it has one: as many tokens as that has."""
        answer = None if task.answer is None else llm.encode(task.answer)
        self.text = torch.tensor([] if answer is None else [*prompt, *answer], dtype=torch.int64)
        return None if answer is None else len(answer)


def params(task: Task, length: int, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=length, temperature=temperature, top_p=1.0, seed=seed, ignore_eos=True, prediction=task.prediction
    )


def ids(llm: LLM, task: Task) -> list[int]:
    return llm.encode(task.prompt) if isinstance(task.prompt, str) else task.prompt


Took = tuple[float, float]  # seconds, and those before the first token


def row(pairs: Sequence[tuple[Took, Took, RequestOutput]]) -> dict[str, Any]:
    """Return the figures of one kind: for each task the seconds of plain decoding and with drafts, and the output of
    the latter."""
    outputs = [out for _, _, out in pairs]
    rounds = sum(o.rounds for o in outputs)
    decoding = [(plain[0] - plain[1], took[0] - took[1]) for plain, took, _ in pairs]
    return {
        "ratio": round(sum(plain for (plain, _), _, _ in pairs) / sum(took for _, (took, _), _ in pairs), 4),
        "behind the prompt": round(sum(plain for plain, _ in decoding) / sum(took for _, took in decoding), 4),
        "tasks": [round(plain / took, 3) for (plain, _), (took, _), _ in pairs],
        "tokens a round": round(sum(sum(n * c for n, c in enumerate(o.accepted_lengths)) for o in outputs) / rounds, 3),
    }


def counted(length: int, temperature: float, kind: str, mix: str) -> dict[str, Any]:
    """A row by priced passes."""
    pairs = []
    with engine(None) as plain, engine(MIXES[mix]) as llm:  # new engines have learnt nothing of other kinds
        alone, other, counter, told = Counter(plain), Told(plain), Counter(llm), Told(llm)
        for seed, task in enumerate(TASKS[kind]):
            prompt = ids(llm, task)
            told.tell(llm, prompt, task)
            tokens = other.tell(llm, prompt, task) or length
            asked = params(task, tokens, temperature, seed)
            before, [want] = alone.price([prompt], [asked], plain)
            took, [out] = counter.price([prompt], [asked], llm)
            assert out.token_ids == want.token_ids, "drafts must not change the tokens"
            pairs.append(((before, alone.first_token), (took, counter.first_token), out))
    return row(pairs)


InStep = list[tuple[float, float, RequestOutput]]  # figures of both engines, the one with drafts first


def by_the_clock(
    drafters: Sequence[str] | None, tasks: Sequence[Task], length: int, temperature: float, repeats: int
) -> list[list[InStep]]:
    """Time a pair of engines over the same weights: for each task, ``repeats`` requests behind one that warms up."""
    found: list[list[InStep]] = []
    with engine(None) as plain, engine(drafters) as llm:
        plain._runner.executor.target = llm._runner.executor.target  # type: ignore[attr-defined]
        told = Told(llm)
        for seed, task in enumerate(tasks):
            prompt = ids(llm, task)
            tokens = told.tell(llm, prompt, task) or length
            asked = params(task, tokens, temperature, seed)
            runs = [in_step((llm, plain), prompt, asked, repeat % 2) for repeat in range(repeats + 1)]
            assert all(one[2].token_ids == other[2].token_ids for one, other in runs)
            found.append(runs[1:])
    return found


def timed(length: int, engines: int, repeats: int, temperature: float, kind: str, mix: str) -> dict[str, Any]:
    """A row by the clock, with so many pairs of engines, or more where it is in doubt."""
    each: list[list[list[InStep]]] = []
    for most in (engines, CLOSER * engines):
        while len(each) < most:
            each.append(by_the_clock(MIXES.get(mix), TASKS[kind], length, temperature, repeats))
        found = {**of_pairs(each), "pairs": most}
        if found["ratio"] >= DOUBTFUL:
            break
    return found


def of_pairs(each: Sequence[list[list[InStep]]]) -> dict[str, Any]:
    """A row by the runs of several pairs of engines."""
    pairs = []
    for runs in zip(*each, strict=True):  # runs of one task
        both = [run for some in runs for run in some]
        # A pass over a prompt takes once and a half as long in one second as in the next, so each run is its own peer.
        whole = statistics.median(alone[0] / drafted[0] for drafted, alone in both)
        behind = statistics.median((alone[0] - alone[1]) / (drafted[0] - drafted[1]) for drafted, alone in both)
        before, first = (statistics.median(alone[i] for _, alone in both) for i in (0, 1))
        took = before / whole
        pairs.append(((before, first), (took, took - (before - first) / behind), both[-1][0][2]))
    return row(pairs)


def worst(rows: dict[str, Any]) -> dict[str, Any]:
    """The row that loses most, and those below the goal."""
    least = min(rows, key=lambda name: rows[name]["ratio"])
    below = sorted(name for name in rows if rows[name]["ratio"] < GOALS["never below"])
    return {"worst": {"row": least, "ratio": rows[least]["ratio"]}, "below 0.98": below}


def one_thread() -> None:
    """Let the process use one thread."""
    core.set_num_threads(1)
    torch.set_num_threads(1)


def apart(cores: Any) -> None:
    """A process that measures beside others: the next core is its own."""
    os.sched_setaffinity(0, {cores.get()})
    one_thread()


def physical() -> list[int]:
    """Return the processors that this process may use, one of each core."""
    found: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        found.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(found.values())


Unit = tuple[float, str, str]  # temperature, kind, mix


def measured(part: Callable[..., dict[str, Any]], units: Sequence[Unit], cores: int, *args: Any) -> dict[str, Any]:
    """The rows of a part."""
    names = [f"{mix}, {kind}, T={temperature:g}" for temperature, kind, mix in units]
    rows: dict[str, Any] = {}

    def note(name: str, found: dict[str, Any]) -> None:
        rows[name] = found
        print(f"{part.__name__}: {name}: {found}", flush=True)

    if cores == 1:
        for name, unit in zip(names, units, strict=True):
            note(name, part(*args, *unit))
        return rows
    spawn = multiprocessing.get_context("spawn")
    own = spawn.Queue()
    for cpu in physical()[:cores]:
        own.put(cpu)
    with ProcessPoolExecutor(cores, mp_context=spawn, initializer=apart, initargs=(own,)) as pool:
        for name, future in [(n, pool.submit(part, *args, *u)) for n, u in zip(names, units, strict=True)]:
            note(name, future.result())
    return rows


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=160, help="tokens of a request whose answer is not told")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of engines for a timed row")
    parser.add_argument("--repeats", type=int, default=3, help="of a task with each pair")
    parser.add_argument("--parts", default="counted,timed")
    parser.add_argument("--name", default="drafters")
    parser.add_argument("--kinds", default="", help="the one of this name, else those whose name has this in it")
    parser.add_argument("--cores", type=int, default=1, help="of kinds and temperatures, each has one for itself")
    args = parser.parse_args()
    one_thread()
    cores = min(args.cores, len(physical()))
    temperatures, parts = [float(t) for t in args.temperatures.split(",")], args.parts.split(",")
    kinds = [kind for kind in TASKS if args.kinds == kind or (args.kinds not in TASKS and args.kinds in kind)]
    units = [(t, kind, mix) for mix in MIXES for t in temperatures for kind in kinds]
    nulls = [(t, kind, "null") for t in temperatures for kind in kinds if kind in NULLS]
    result: dict[str, Any] = {"goals": GOALS, "threads": 1, "cores": cores, "length": args.length}
    result |= {"pairs": args.pairs, "repeats": args.repeats}
    if "timed" in parts:
        rows = measured(timed, [*nulls, *units], cores, args.length, args.pairs, args.repeats)
        result["timed"] = {"rows": rows, **worst({name: r for name, r in rows.items() if not name.startswith("null")})}
        write_result(args.name, result)  # the other part takes long, and may be stopped
    if "counted" in parts:
        rows = measured(counted, units, cores, args.length)
        prices = {"table_ms": TABLE, "beside_ms": BESIDE, "asked_ms": ASKED}
        result["counted"] = {**prices, "rows": rows, **worst(rows)}
        write_result(args.name, result)


if __name__ == "__main__":
    main()
