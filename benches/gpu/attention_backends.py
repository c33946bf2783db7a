"""An engine with each attention backend that runs on a GPU: tokens, the ties at which they part from native's, times.

The model is the one in the package, with its head. Requests decode greedily from held-out prompts, by trees of K in 1,
4 and 8, over pages of 1, 16 and 64 tokens, dense and holey where the two differ, in CUDA graphs of a round; for one
tree also without graphs and in loops. The reference are the tokens of plain decoding by ``native``, which do not depend
on trees, pages or batches. A tie is the first position at which a request's tokens part from them; its margin is how
much larger the log-probability of the reference's token is there. "Apart" is the largest difference of the tokens'
log-probabilities before that. "Accepted" are tokens a round. A synchronisation is a call of CUDA by which the host
waits, counted over 8 steady steps. Holey rows have no ``native``, which knows one layout.

Rows of pages of 16, dense, in graphs of a round have seconds: those of all requests together, medians of turns that the
backends take in one process, after one turn that is not counted. The other rows run beside each other, since what they
find does not depend on time.

``kernels`` are attention alone at the heads of an 8B Llama (32 over 8, of 128), bf16: each phase behind 1024, 8192 or
32768 positions of each request, pages of 16 that lie anywhere, a tree of 64 nodes and 8 branches, 40 new positions in
``extend``; from CUDA graphs that take turns, with the largest difference from ``native``'s results. FlashInfer's is by
the plan that an engine keeps, which splits no keys; ``flashinfer, planned`` by a plan for these lengths, and
``plan_us`` is the host's time for one such plan. ``metadata`` are the microseconds in which the device makes all arrays
of a round in each format (tree 8, 6, 64 behind 8192 positions, pages of 1): plans of the draft steps, the tree, plans
of verification and of the head's pass; from CUDA graphs that take turns.

    python benches/gpu/attention_backends.py [--json FILE] [--tokens 96] [--turns 3] [--requests 4] [--jobs 8]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))
import torch
from parts import DRAFT_VOCAB, Round, steered, verification
from timing import times

from common import commit, versions
from driver_calls import driver_calls
from pass_world import PHASES, Heads, Pass, Requests
from specrs import LLM, ConfigError, SamplingParams, assets, device
from specrs.backends import MATRIX, Combination, FlashInferCuda, resolve
from specrs.backends.base import Format, Layout
from specrs.backends.packages import PACKAGES
from specrs.measuring.machine import driver
from specrs.models.cuda_attention import device_attention

TREES = {1: (1, 4, 5), 4: (4, 4, 16), 8: (8, 4, 32)}
PAGES = (1, 16, 64)
ALONE = ((1, 1024), (16, 1024), (1, 8192), (16, 8192), (1, 32768))  # requests and positions
LEVELS = (4, 16)  # K and P of the engines that run at every graph level
OPTIONS: dict[str, Any] = {"device": "cuda", "max_context_len": 512, "prefix_cache": False}


def loaded() -> tuple[list[str], dict[str, str]]:
    """Names of the backends whose kernels load here, native first, and the reasons of the others."""
    found, missing = list[str](), dict[str, str]()
    for row in MATRIX:
        if row.device == "cuda":
            try:
                device_attention(row.backend())
                found.append(row.backend.name)
            except ConfigError as error:
                missing[row.backend.name] = str(error)
    return found, missing


def apart(reference: list[Any], outputs: list[Any]) -> float:
    """The largest difference of the log-probabilities of tokens, as far as they are the reference's."""
    most = 0.0
    for want, got in zip(reference, outputs, strict=True):
        for at, (a, b) in enumerate(zip(want.token_ids, got.token_ids, strict=True)):
            if a != b:
                break
            most = max(most, abs(want.logprobs[at][a].logprob - got.logprobs[at][a].logprob))
    return round(most, 5)


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


def plan_us(one: Pass) -> float:
    """Microseconds that the host takes for FlashInfer's plan of a pass, the device idle before."""
    cuda = torch.device("cuda", 0)
    backend, (q, keys, values) = FlashInferCuda(), (t.to(cuda) for t in (one.q, one.keys, one.values))
    prepared = backend.prepare(one.step({name: array.to(cuda) for name, array in one.arrays.items()}))
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(21):
        for plans in took:
            if plans:
                prepared.wrappers.clear()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            backend.attend(prepared, keys, values, q, one.scale)
            took[plans].append(time.perf_counter() - begun)
    return round((statistics.median(took[True]) - statistics.median(took[False])) * 1e6, 1)


def kernels(batch: int, length: int, formats: list[Format]) -> list[dict[str, Any]]:
    """Microseconds of each phase's attention."""
    requests, cuda = Requests(1, (8, 6, 64), 16, "dense", length + 256, [length] * batch), torch.device("cuda", 0)
    requests.counts = [40] * batch
    found = []
    for phase in PHASES:
        launches, outputs, row = {}, {}, {"phase": phase, "requests": batch, "context": length}
        for format in formats:
            one = Pass(requests, phase, Heads(8, 4, 128, torch.bfloat16), padded=False, format=format)
            launches[format], outputs[format] = one.launch(cuda)
            if format == "flashinfer":
                launches["flashinfer, planned"], outputs["flashinfer, planned"] = one.planned(cuda)
                row["plan_us"] = plan_us(one)
        launches["native"], want = one.native(cuda)
        row["us"] = us = times(launches, launches=10)
        row["largest_difference"] = {
            name: round(float((got.float() - want.float()).abs().max()), 5) for name, got in outputs.items()
        }
        row["over_native"] = {name: round(us[name] / us["native"], 2) for name in outputs}
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def metadata(batch: int, formats: list[Format]) -> dict[str, Any]:
    """Microseconds of all arrays of a round in each format."""
    rounds = {format: Round(batch, 1, format) for format in ("native", *formats)}
    for one in rounds.values():
        one.draft(DRAFT_VOCAB)
        verification(one, steered(one.trees, batch))["greedy_walk"]()
    row = {"requests": batch, "us": times({name: one.metadata for name, one in rounds.items()})}
    device.check()
    print(json.dumps(row), flush=True)
    return row


def measure(
    asked: dict[str, Any], names: list[str], texts: list[str], reference: list[Any], tokens: int, turns: int
) -> dict[str, Any]:
    """Engines of one tree, page size, layout and graph level."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    scored = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=1)
    row: dict[str, Any] = {**asked, "tree": list(asked["tree"])}
    given = {**asked, "max_batch": len(texts), **OPTIONS}
    engines = {name: LLM(assets.model_dir(), assets.draft_dir(), attention_backend=name, **given) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    try:
        for turn in range(turns + 1):
            for name, llm in engines.items():
                begun = time.perf_counter()
                outputs = [o.outputs[0] for o in llm.generate(texts, params if turn else scored)]
                if turn:
                    seconds[name].append(time.perf_counter() - begun)
                    continue
                row[name] = {
                    "ties": ties(reference, outputs),
                    "apart": apart(reference, outputs),
                    "accepted": round(statistics.mean(o.mean_accepted for o in outputs), 3),
                }
        for name, llm in engines.items():
            if turns:
                row[name]["seconds"] = round(statistics.median(seconds[name]), 4)
            row[name] |= {
                "synchronisations": synchronisations(llm, texts),
                "draft_attention": llm.config.draft_attention,
            }
    finally:
        for llm in engines.values():
            llm.close()
    if "native" in row and turns:
        of_native = row["native"]["seconds"]
        row["over_native"] = {name: round(row[name]["seconds"] / of_native, 3) for name in names if name != "native"}
    return row


def asked_for() -> list[dict[str, Any]]:
    """The options of all engines."""
    layouts: tuple[Layout, ...] = ("dense", "holey")
    rows = [
        {"tree": tree, "page_size": page, "draft_layout": layout, "graphs": "round"}
        for k, tree in TREES.items()
        for page in PAGES
        for layout in (layouts if k > 1 and page > 1 else layouts[:1])
    ]
    k, page = LEVELS
    at_levels = [row for row in rows if (row["tree"], row["page_size"]) == (TREES[k], page)]
    return [*rows, *({**row, "graphs": level} for row in at_levels for level in ("off", "loop"))]


def able(name: str, asked: dict[str, Any]) -> bool:
    """Whether a backend can do what is asked."""
    try:
        resolve(name, Combination(
            topk=asked["tree"][0], page_size=asked["page_size"], layout=asked["draft_layout"], graphs=asked["graphs"],
            device="cuda", kv_dtype="bfloat16",
        ))  # fmt: skip
    except ConfigError:
        return False
    return True


def some_rows(
    some: list[dict[str, Any]], names: list[str], texts: list[str], tokens: int, turns: int
) -> list[dict[str, Any]]:
    """Rows of engines, one after another."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=5)
    with LLM(assets.model_dir(), speculative=False, max_batch=1, **OPTIONS) as llm:
        reference = [o.outputs[0] for o in llm.generate(texts, params)]
    found = []
    for asked in some:
        able_here = [name for name in names if able(name, asked)]
        found.append(measure(asked, able_here, texts, reference, tokens, turns))
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=8)
    args = parser.parse_args()
    texts, rows = assets.heldout_prompts()[: args.requests], list[dict[str, Any]]()
    names, missing = loaded()
    result: dict[str, Any] = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": versions() | {p.name: p.installed() for p in PACKAGES}, "missing": missing,
        "model": "pystdlib-16m", "requests": args.requests, "tokens": args.tokens, "turns": args.turns, "rows": rows,
    }  # fmt: skip

    def write() -> None:  # in between: a run may be cut off
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    formats: list[Any] = [name for name in names if name != "native"]
    result["metadata"] = [metadata(batch, formats) for batch in (1, 16, 64)]
    result["kernels"] = [row for batch, length in ALONE for row in kernels(batch, length, formats)]
    asked = asked_for()
    timed = [
        row for row in asked if row["page_size"] == 16 and row["draft_layout"] == "dense" and row["graphs"] == "round"
    ]
    rows += some_rows(timed, names, texts, args.tokens, args.turns)
    write()
    rest = [row for row in asked if row not in timed]
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        beside = partial(some_rows, names=names, texts=texts, tokens=args.tokens, turns=0)
        for done in as_completed([pool.submit(beside, [row]) for row in rest]):
            rows += done.result()
            rows.sort(
                key=lambda row: asked.index({**{name: row[name] for name in asked[0]}, "tree": tuple(row["tree"])})
            )
            write()


if __name__ == "__main__":
    main()
