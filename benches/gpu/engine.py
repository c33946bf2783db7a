"""The engine on a GPU with an 8B-shaped model of random weights and a one-layer EAGLE-3 head: seconds of a round.

Only config.json exists: weights are drawn on the device. Random drafts are never accepted, so a round yields one token,
and what it yields per second says nothing; what is measured is how long a plain round and a speculative one take, their
ratio (the tokens a round that would pay), whether both give the same tokens, and whether memory grows. ``stated_bytes``
is the budget of everything but weights and KV, counted before the first of it is allocated; ``beside_bytes`` what is
held once every round has run (goal 14).

``exactness`` is goal 13: the same rounds by an engine whose products keep one class of bits for each weight, and by one
whose products take the fastest algorithm of any class for each number of rows (`_DeviceProducts.without_contract`).
Both engines live in one process and step in turns. Attention is the same kernel in both, the contract's: what another
attention would save is not measured.

``levels`` rows also hold ``share_of_floor`` (goal 10's floor over the measured period), ``synchronisations`` (the calls
of CUDA that 8 steady steps make, counted apart from the timed steps) and ``kernels`` (GPU time of a steady round by
kernel, profiled after everything that is timed, since a profiler slows whoever comes later).

    python benches/gpu/engine.py [--json FILE] [--layers 32] [--rounds 24] [--graphs off] [--cases 1x1024,16x8192,...]
        [--tree K,S,V] [--levels 1x8192,...] [--no-kernels] [--exactness 1x1024,16x1024,...]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))
from common import commit, versions
from driver_calls import driver_calls
from specrs import LLM, device
from specrs import _specrs as core
from specrs._specrs import SpecrsError
from specrs.engine.devices.memory_plan import Head
from specrs.measuring import shapes
from specrs.measuring.cases import check_room, stated_beside, usual_tree
from specrs.measuring.floors import Reads
from specrs.measuring.kernels import attach, kernels, reason
from specrs.measuring.machine import driver
from specrs.measuring.rounds import (
    add,
    count_beside_prompts,
    random_prompts,
    rounds,
    steady,
    timed,
    under_way,
    written,
)
from specrs.measuring.shapes import SHAPES, RandomCheckpoint, draw_weights, shape_config
from specrs.models import ModelConfig, check_draft

LLAMA = {key: value for key, value in SHAPES["llama-3.1-8b"].items() if key != "num_hidden_layers"}
BANDWIDTH = 4.3e12  # bytes a second that goal 10 takes an H200's memory to give


def directories(root: Path, layers: int) -> tuple[Path, Path]:
    """config.json of the target and of the head."""
    return shapes.directories(root, shape_config("llama-3.1-8b", layers))


@contextlib.contextmanager
def without_contract() -> Iterator[None]:
    """Engines that are made meanwhile take the fastest algorithm of any class for each number of rows."""
    opened = device.products
    device.products = lambda *args, **named: opened(*args, **named).without_contract()  # type: ignore[assignment]
    try:
        yield
    finally:
        device.products = opened


def in_turns(
    engines: dict[str, LLM], prompts: list[list[int]], count: int
) -> tuple[dict[str, list[list[int]]], dict[str, float]]:
    """Run the engines in turns, and return for each of them the tokens of each request and the median seconds of a
    round of all requests."""
    ids: dict[str, list[int]] = {}
    tokens: dict[str, dict[int, list[int]]] = {name: {} for name in engines}
    for name, llm in engines.items():
        ids[name] = add(llm, prompts, count_beside_prompts(prompts, count))
        while not written(llm):
            timed(llm, tokens[name])
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    order = list(engines)
    while any(llm.unfinished for llm in engines.values()):
        for name in order:
            if engines[name].unfinished:
                took = timed(engines[name], tokens[name])
                if engines[name].unfinished == len(prompts):
                    seconds[name].append(took)
        order.reverse()  # neither always comes after the other
    found = {name: [tokens[name][i] for i in ids[name]] for name in engines}
    return found, {name: statistics.median(s[1:-1] or s) for name, s in seconds.items()}


def exactness(models_: tuple[Path, Path], batch: int, context: int, count: int, graphs: str) -> dict[str, Any]:
    """Goal 13 for a batch: milliseconds of plain and tree rounds by both choices of products, and their ratio."""
    prompts, options, tree = prepared(batch, context, count, graphs)
    row: dict[str, Any] = {"batch": batch, "context": context, "tree": tree}
    outputs = {}
    for kind, extra in (("plain", {"speculative": False}), ("tree", {"tree": tree})):
        collect()
        with contextlib.ExitStack() as stack:
            engines = {"contract": stack.enter_context(LLM(*models_, **options, **extra))}
            with without_contract():
                engines["fastest"] = stack.enter_context(LLM(*models_, **options, **extra))
            said = {name: "products" in llm.numerics for name, llm in engines.items()}
            assert said == {"contract": False, "fastest": True}, said
            in_turns(engines, [p[:64] for p in prompts], 4)  # makes the rounds' graphs
            outputs[kind], seconds = in_turns(engines, prompts, count)
            splits = {
                name: {w: entry["split"] for w, entry in list(llm.numerics["weights"].items())[-5:]}
                for name, llm in engines.items()
            }
        row[f"{kind}_ms"] = {name: round(s * 1e3, 3) for name, s in seconds.items()}
        row[f"{kind}_ratio"] = round(seconds["contract"] / seconds["fastest"], 4)
        row["splits_of_the_last_layer_and_lm_head"] = splits  # splits of the fastest: for one row
    row["same_tokens_plain_and_tree"] = {name: outputs["plain"][name] == outputs["tree"][name] for name in seconds}
    return row


def floors(models_: tuple[Path, Path], batch: int, context: int, levels: int) -> dict[str, float]:
    """Milliseconds that reading weights and KV of a round takes at goal 10's bandwidth.

    ``plain``: a pass of the target. ``tree``: with as many passes of the head as goal 10 counts, one more than levels.
    ``tree_as_run``: with as many as the engine runs, a level less of draft steps and the pass over what was accepted.
    """
    sizes = ModelConfig.from_directory(models_[0])
    reads = Reads.of(sizes, Head(*check_draft(models_[1], sizes)))
    read = {
        "plain": reads.plain(batch, context), "tree": reads.tree(batch, context, levels + 1),
        "tree_as_run": reads.tree(batch, context, levels),
    }  # fmt: skip
    return {name: n / BANDWIDTH * 1e3 for name, n in read.items()}


def share_of_floor(models_: tuple[Path, Path], row: dict[str, Any]) -> dict[str, Any]:
    """Goal 10's floor of a case over its measured period, by kind of round and graph level."""
    batch, steps = row["batch"], row["tree"][1]
    floor = floors(models_, batch, row["context"], steps)
    out: dict[str, Any] = {
        "bytes_per_second": BANDWIDTH, "floor_ms": {name: round(ms, 4) for name, ms in floor.items()},
        "draft_passes": {"tree": steps + 1, "tree_as_run": steps},
        "tokens_per_second_at_4": {"floor": round(batch * 4e3 / floor["tree"], 1)},
    }  # fmt: skip
    for level in ("off", "round", "loop"):
        for name, ms in floor.items():
            out.setdefault(name, {})[level] = round(ms / row[f"{name.partition('_')[0]}_{level}"]["period_ms"], 4)
        out["tokens_per_second_at_4"][level] = round(batch * 4e3 / row[f"tree_{level}"]["period_ms"], 1)
    return out


def synchronisations(llm: LLM, prompts: list[list[int]], count: int, steps: int = 8) -> dict[str, Any]:
    """Count the CUDA calls of steady steps: every call that lets the host wait, and all calls by name, summed over
    steps."""
    try:
        with under_way(llm, [p[:64] for p in prompts], count):
            with driver_calls() as seen:
                for _ in range(steps):
                    llm.step()
            steady = llm.unfinished == len(prompts)
        return {
            "steps": steps,
            "no_request_ended": steady,
            "synchronisations": sum(seen.synchronisations.values()),
            "synchronisations_by_name": dict(seen.synchronisations),
            "driver": dict(seen.calls.most_common()),
            "runtime": dict(seen.runtime.most_common()),
        }
    except Exception as error:  # the timed figures stay
        return {"error": reason(error)}


def opened(models_: tuple[Path, Path], batch: int, context: int, count: int, kind: str, graphs: str) -> LLM:
    """The engine of a case."""
    _, options, tree = prepared(batch, context, count, graphs)
    collect()
    return LLM(*models_, **options, **({"speculative": False} if kind == "plain" else {"tree": tree}))


def levels(models_: tuple[Path, Path], batch: int, context: int, count: int) -> dict[str, Any]:
    """Rounds of a case at every graph level; the tokens of all are compared.

    ``idle_ms`` of a level: by how much its period exceeds that of the loop, which leaves nothing to the host.
    """
    row: dict[str, Any] = {"batch": batch, "context": context}
    outputs = []
    for kind in ("plain", "tree"):
        for level in ("off", "round", "loop"):
            prompts, options, tree = prepared(batch, context, count, level)
            row["tree"] = tree
            collect()
            with LLM(*models_, **options, **({"speculative": False} if kind == "plain" else {"tree": tree})) as llm:
                rounds(llm, [p[:64] for p in prompts], 24)  # makes the rounds' graphs
                found, row[f"{kind}_{level}"] = steady(llm, prompts, count)
                outputs.append(found)
                if level != "off":
                    row.setdefault("synchronisations", {})[f"{kind}_{level}"] = synchronisations(llm, prompts, count)
        least = row[f"{kind}_loop"]["period_ms"]
        for level in ("off", "round"):
            row[f"{kind}_{level}"]["idle_ms"] = round(row[f"{kind}_{level}"]["period_ms"] - least, 4)
    row["tokens_per_second_at_4"] = {
        level: round(batch * 4e3 / row[f"tree_{level}"]["step_ms"], 1) for level in ("off", "round", "loop")
    }
    row["same_tokens"] = all(found == outputs[0] for found in outputs)
    row["share_of_floor"] = share_of_floor(models_, row)
    return row


def collect() -> None:
    """Give memory of closed engines back."""
    gc.collect()
    torch.cuda.empty_cache()
    RandomCheckpoint.bytes = 0


def prepared(
    batch: int, context: int, count: int, graphs: str
) -> tuple[list[list[int]], dict[str, Any], tuple[int, int, int]]:
    """Prompts, options of the engine and the tree of a case."""
    prompts = random_prompts(batch, context, 128000)
    options: dict[str, Any] = {
        "device": "cuda", "max_batch": batch, "max_context_len": context + count + batch * context // 2048 + 64,
        "prefill_chunk": 2048, "prefix_cache": False, "page_size": 16, "graphs": graphs,
    }  # fmt: skip
    return prompts, options, usual_tree(batch)


def listed(text: str) -> list[tuple[int, int]]:
    """Batches and contexts of ``1x1024,16x8192``."""
    return [(int(b), int(c)) for b, c in (case.split("x") for case in text.split(",") if case)]


def tree_of(text: str) -> tuple[int, int, int]:
    """The tree of ``8,6,64``."""
    topk, steps, nodes = map(int, text.split(","))
    return topk, steps, nodes


def beside(llm: LLM) -> int:
    """Bytes of device memory that are neither weights nor KV."""
    executor: Any = llm._runner.executor
    caches = [executor.cache, *([executor.drafts.cache] if executor.drafts is not None else [])]
    owned: int = core._device_memory(0)[3]
    return torch.cuda.memory_reserved() + owned - RandomCheckpoint.bytes - sum(c.tensor.nbytes for c in caches)


def measured(models_: tuple[Path, Path], batch: int, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """Steady plain rounds and rounds with a tree, one engine after the other, and what memory each holds."""
    prompts, options, usual = prepared(batch, context, args.rounds, args.graphs)
    tree = args.tree or usual
    row: dict[str, Any] = {"batch": batch, "context": context, "tree": tree}
    outputs = []
    for name, extra in (("plain", {"speculative": False}), ("speculative", {"tree": tree})):
        collect()
        try:
            with LLM(*models_, **options, **extra) as llm:
                check_room(llm, batch, context, count_beside_prompts(prompts, args.rounds))
                rounds(llm, [p[:64] for p in prompts], args.rounds)  # makes the rounds' graphs
                tokens, figures = steady(llm, prompts, args.rounds)
                before = torch.cuda.memory_reserved()
                rounds(llm, [p[:64] for p in prompts], args.rounds)
                row[f"{name}_ms"] = figures["step_ms"]
                row[f"{name}_grown_bytes"] = torch.cuda.memory_reserved() - before
                row[f"{name}_stated_bytes"], row[f"{name}_beside_bytes"] = stated_beside(llm), beside(llm)
        except SpecrsError as error:  # the other cases stay
            return row | {"error": reason(error)}
        outputs.append(tokens)
    # Yield of the round with drafts that are accepted so far.
    row["tokens_per_second_at_4"] = round(batch * 4e3 / row["speculative_ms"], 1)
    return row | {
        "same_tokens": outputs[0] == outputs[1], "ratio": round(row["speculative_ms"] / row["plain_ms"], 2)
    }  # fmt: skip


def main() -> None:
    """Measure every case, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--graphs", default="round")
    parser.add_argument("--cases", default="1x1024,1x8192,1x32768,4x8192,16x1024,16x8192,64x1024,64x8192")
    parser.add_argument("--tree", type=tree_of, metavar="K,S,V", help="tree of --cases (default: by batch)")
    parser.add_argument("--exactness", default="1x1024,16x1024,64x1024", help="cases of goal 13; '' for none")
    parser.add_argument("--levels", default="1x8192,16x1024,64x1024", help="cases at every graph level; '' for none")
    parser.add_argument("--no-kernels", action="store_true", help="do not profile the cases of --levels")
    args = parser.parse_args()
    draw_weights()
    cases: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    at_levels: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name(), "driver": driver(), "versions": versions(), "layers": args.layers,
        "graphs": args.graphs,
        "cases": cases,
        "levels": at_levels,
        "exactness": {
            "ratio": "round of the contract over the same round with the fastest algorithms of any class",
            "attention": "the contract's kernel in both; its alternative is not measured",
            "rows": rows,
        },
    }  # fmt: skip

    def keep(to: list[dict[str, Any]], row: dict[str, Any]) -> None:
        to.append(row)
        show(row)

    def show(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        target, draft = directories(Path(folder), args.layers)
        for batch, context in listed(args.cases):
            keep(cases, measured((target, draft), batch, context, args))
        for batch, context in listed(args.levels):
            keep(at_levels, levels((target, draft), batch, context, 2 * args.rounds))
        for batch, context in listed(args.exactness):
            keep(rows, exactness((target, draft), batch, context, args.rounds, args.graphs))
        if at_levels and not args.no_kernels:
            # Nothing is timed from here on. The first use attaches the profiler, before the graphs to come are made.
            attach()
            for row in at_levels:
                case = row["batch"], row["context"], 2 * args.rounds
                row["kernels"] = kernels(partial(opened, (target, draft), *case), prepared(*case, "off")[0], case[2])
                show({"batch": row["batch"], "context": row["context"], "kernels": row["kernels"]})


if __name__ == "__main__":
    main()
