"""Tokens a round and speed over plain decoding on public prompt sets, by category, with and without draft heads.

Prompts are read from files that you have; nothing of them is kept but hashes. `--set` takes Spec-Bench's
`data/spec_bench/question.jsonl` (https://github.com/hemingkx/Spec-Bench; MT-bench's 80 questions are among them),
`HumanEval.jsonl.gz` (https://github.com/openai/human-eval), `grade_school_math/data/test.jsonl`
(https://github.com/openai/grade-school-math), and any file of lines with `prompt`, `question` or `turns`.

    python benches/spec_bench.py --model DIR --draft eagle3=DIR --draft dspark=DIR --set spec=question.jsonl@COMMIT
        --set humaneval=HumanEval.jsonl.gz@COMMIT [--device cpu] [--each 4] [--tokens 96] [--name spec_bench_cpu]

First turns alone, in the model's chat template, greedy, one request at a time. All engines answer a prompt in turns, so
that each sees the machine as plain decoding does; their tokens are compared with plain's. `chain` and `tree` are drafts
of the fixed shapes 1,7,8 and 4,6,32 without other sources; `alone` are trees as the engine picks them; `sources` are
suffix and recycling without a head, and `all` both.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, write_result
from specrs import LLM, SamplingParams
from specrs.measuring import machine
from specrs.train.checkpoint import model_digest

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SHAPES = {"chain": (1, 7, 8), "tree": (4, 6, 32)}


@dataclass(frozen=True)
class Set:
    """A file of prompts.

    Attributes:
        prompts: category and text of each.
        told: name, source's commit and SHA-256.
    """

    prompts: list[tuple[str, str]]
    told: dict[str, Any]

    @classmethod
    def read(cls, asked: str) -> Set:
        """Read ``NAME=PATH@COMMIT``."""
        name, _, rest = asked.partition("=")
        path, _, commit = rest.partition("@")
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if path.endswith(".gz") else raw).decode("utf-8")
        found = []
        for line in filter(None, text.splitlines()):
            said = json.loads(line)
            content = said["turns"][0] if "turns" in said else said.get("prompt") or said["question"]
            category = str(said.get("category", name))
            found.append(("mt_bench" if category in MT_BENCH else category, content))
        told = {"set": name, "commit": commit or None, "sha256": hashlib.sha256(raw).hexdigest(), "prompts": len(found)}
        return cls(found, told)


def picked(prompts: Sequence[tuple[str, str]], each: int) -> list[tuple[str, str]]:
    """So many prompts of each category, at equal distances."""
    found = []
    for category in dict.fromkeys(name for name, _ in prompts):
        texts = [text for name, text in prompts if name == category]
        count = min(each, len(texts))
        found += [(category, texts[i * len(texts) // count]) for i in range(count)]
    return found


@dataclass
class Count:
    """What an engine did on the prompts of a category."""

    tokens: int = 0
    rounds: int = 0
    accepted: float = 0.0
    seconds: float = 0.0
    differ: int = 0

    def add(self, out: Any, seconds: float, plain: Sequence[int]) -> None:
        self.tokens += len(out.token_ids)
        self.rounds += out.rounds
        self.accepted += out.mean_accepted * out.rounds
        self.seconds += seconds
        self.differ += list(out.token_ids) != list(plain)


@dataclass
class Measured:
    """Counts by engine and category, as they come."""

    found: dict[str, dict[str, Count]] = field(default_factory=dict)
    prompts: int = 0

    def rows(self) -> dict[str, dict[str, dict[str, float]]]:
        """Figures by category and engine; `all` has all categories."""
        table: dict[str, dict[str, dict[str, float]]] = {}
        for name, counts in self.found.items():
            every = {**counts, "all": _sum(list(counts.values()))}
            plain = {**self.found["plain"], "all": _sum(list(self.found["plain"].values()))}
            for category, c in every.items():
                row: dict[str, float] = {
                    "tokens_a_round": round(c.accepted / c.rounds, 3) if c.rounds else 1.0, "tokens": c.tokens,
                    "rounds": c.rounds, "prompts_that_differ": c.differ,
                }  # fmt: skip
                if c.seconds:
                    row |= {"speed": round(plain[category].seconds / c.seconds, 3), "seconds": round(c.seconds, 3)}
                table.setdefault(category, {})[name] = row
        return table


def _sum(counts: Sequence[Count]) -> Count:
    total = Count()
    for c in counts:
        for name in vars(c):
            setattr(total, name, getattr(total, name) + getattr(c, name))
    return total


def engines_of(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Options of each engine, by name."""
    found: dict[str, dict[str, Any]] = {"plain": {"speculative": False}, "sources": {}}
    for one in args.draft:
        name, _, path = one.partition("=")
        for shape, tree in SHAPES.items():
            found[f"{name} {shape}"] = {"draft": path, "tree": tree, "drafters": ["head"]}
        found[f"{name} alone"] = {"draft": path, "drafters": ["head"]}
        found[f"{name} all"] = {"draft": path, "drafters": ["head", "suffix", "recycling"]}
    return {
        name: options
        for name, options in found.items()
        if name == "plain" or not args.only or name.split()[-1] in args.only
    }


def table_of(rows: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Lines for people: tokens a round, and speed over plain in brackets."""
    names = [name for name in next(iter(rows.values())) if name != "plain"]
    lines = [" | ".join(["category", *names])]
    for category, each in rows.items():
        speeds = {n: f" ({each[n]['speed']:.2f}x)" if "speed" in each[n] else "" for n in names}
        cells = [f"{each[n]['tokens_a_round']:.2f}{speeds[n]}" for n in names]
        lines.append(" | ".join([category, *cells]))
    return "\n".join(lines)


def plot(rows: Mapping[str, Mapping[str, Mapping[str, float]]], title: str, path: Path) -> None:
    """Draw tokens a round, and below them speed over plain, where it was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in next(iter(rows.values())) if name != "plain"]
    shown = {"tokens_a_round": "tokens a round", "speed": "speed over plain decoding"}
    shown = {key: label for key, label in shown.items() if key in rows["all"][names[0]]}
    figure = Figure(figsize=(2 + 1.3 * len(rows), 1 + 2.5 * len(shown)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    every = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (key, label) in zip(every, shown.items(), strict=True):
        wide = 0.84 / len(names)
        for i, name in enumerate(names):
            at = [x - 0.42 + i * wide for x in range(len(rows))]
            axes.bar(at, [each[name][key] for each in rows.values()], wide, align="edge", label=name)
        axes.axhline(1.0, color="#cb181d", linewidth=1)
        axes.set_ylabel(label, size=8)
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks(range(len(rows)), list(rows), size=7)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def measured(args: argparse.Namespace, prompts: Sequence[tuple[str, str]], device: str) -> tuple[Measured, str]:
    """Have all engines answer prompts in turns. Returns the counts, and the device in words."""
    began = time.perf_counter()
    # A run that is cut off has seen every category alike.
    order = sorted(range(len(prompts)), key=lambda i: sum(prompts[i][0] == name for name, _ in prompts[:i]))
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0)
    counts = Measured()
    with ExitStack() as stack:
        common = {"device": device, "max_batch": 1, "max_context_len": 2048, "progress": False}
        engines = {
            name: stack.enter_context(LLM(args.model, **common, **options))
            for name, options in engines_of(args).items()
        }
        plain, names = engines["plain"], list(engines)
        for llm in engines.values():
            llm.generate([llm.chat_prompt([{"role": "user", "content": "Count to ten."}])], params)
        for turn, index in enumerate(order):
            category, text = prompts[index]
            content = plain.chat_prompt([{"role": "user", "content": text}])
            outputs = {}
            for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                start = time.perf_counter()
                [out] = engines[name].generate([content], params)
                outputs[name] = (out, time.perf_counter() - start)
            for name, (out, seconds) in outputs.items():
                by_category = counts.found.setdefault(name, {})
                by_category.setdefault(category, Count()).add(out, seconds, outputs["plain"][0].token_ids)
            counts.prompts += 1
            if time.perf_counter() - began > args.seconds:
                break
        return counts, plain.device


def counted(args: argparse.Namespace, prompts: Sequence[tuple[str, str]], device: str) -> tuple[Measured, str]:
    """Have each engine answer all prompts, several at once; times mean nothing then. Returns what `measured` does."""
    params, counts, name_of_device = SamplingParams(max_tokens=args.tokens, temperature=0.0), Measured(), device
    plain: list[list[int]] = []
    for name, options in engines_of(args).items():
        with LLM(args.model, device=device, max_batch=8, max_context_len=2048, progress=False, **options) as llm:
            name_of_device = llm.device
            contents = [llm.chat_prompt([{"role": "user", "content": text}]) for _, text in prompts]
            outputs = llm.generate(contents, params)
        plain = plain or [out.token_ids for out in outputs]
        for (category, _), out, tokens in zip(prompts, outputs, plain, strict=True):
            counts.found.setdefault(name, {}).setdefault(category, Count()).add(out, 0.0, tokens)
    counts.prompts = len(prompts)
    return counts, name_of_device


def main() -> None:
    """Measure, write the record and the plot, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR")
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--set", action="append", required=True, metavar="NAME=PATH@COMMIT")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--each", type=int, default=4, help="prompts of a category")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer, at most")
    parser.add_argument("--only", nargs="*", default=[], help="engines by the last word of their names, and plain")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no prompt after so long")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the categories")
    parser.add_argument("--name", default="spec_bench", help="of the record in benches/results")
    parser.add_argument("--counted", action="store_true", help="tokens a round alone, which a busy machine has too")
    args = parser.parse_args()
    sets = [Set.read(one) for one in args.set]
    prompts = picked([prompt for one in sets for prompt in one.prompts], args.each)
    categories = list(dict.fromkeys(name for name, _ in prompts))
    shares = [
        [prompt for prompt in prompts if categories.index(prompt[0]) % args.workers == i] for i in range(args.workers)
    ]
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        work = counted if args.counted else measured
        done = [pool.submit(work, args, share, args.device) for share in shares]
        results = [one.result() for one in done]
    found: dict[str, dict[str, Count]] = {}
    for counts, _ in results:
        for name, by_category in counts.found.items():
            found.setdefault(name, {}).update(by_category)
    rows = Measured(found).rows()
    device = results[0][1]
    heads = {
        name: {"sha256": model_digest(Path(path)), **_about(Path(path))}
        for name, _, path in (one.partition("=") for one in args.draft)
    }
    write_result(
        args.name,
        {
            "device": device, "driver": machine.driver(), "model": Path(args.model).name,
            "model_sha256": model_digest(Path(args.model)), "heads": heads, "sets": [one.told for one in sets],
            "prompts": sum(counts.prompts for counts, _ in results), "max_tokens": args.tokens,
            "workers": args.workers, "rows": rows,
        },
    )  # fmt: skip
    plot(rows, f"{Path(args.model).name}, greedy, {device}", RESULTS / f"{args.name}.svg")
    print(table_of(rows))


def _about(head: Path) -> dict[str, Any]:
    """What a head's own record says of its training."""
    record = head / "training.json"
    said = json.loads(record.read_text()) if record.exists() else {}
    return {name: said[name] for name in ("form", "seconds", "counts") if name in said}


if __name__ == "__main__":
    main()
