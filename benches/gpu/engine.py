"""The engine on a GPU with an 8B-shaped model of random weights and a one-layer EAGLE-3 head: seconds of a round.

Only config.json exists: weights are drawn on the device. Random drafts are never accepted, so a round yields one token,
and what it yields per second says nothing; what is measured is how long a plain round and a speculative one take, their
ratio (the tokens a round that would pay), whether both give the same tokens, and whether memory grows.

``exactness`` is goal 13: the same rounds by an engine whose products keep one class of bits for each weight, and by one
whose products take the fastest algorithm of any class for each number of rows (`_DeviceProducts.without_contract`).
Both engines live in one process and step in turns. Attention is the same kernel in both, the contract's: what another
attention would save is not measured.

``levels`` rows also hold ``share_of_floor`` (goal 10's floor over the measured period), ``synchronisations`` (the calls
of CUDA that 8 steady steps make, counted apart from the timed steps) and ``kernels`` (GPU time of a steady round by
kernel, profiled after everything that is timed, since a profiler slows whoever comes later).

    python benches/gpu/engine.py [--json FILE] [--layers 32] [--rounds 24] [--graphs off] [--cases 1x1024,16x8192,...]
        [--levels 1x8192,...] [--no-kernels] [--exactness 1x1024,16x1024,...]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))
from timing import driver

import specrs.models.eagle3 as eagle3
import specrs.models.llama as llama
from common import commit, versions
from driver_calls import driver_calls
from specrs import LLM, SamplingParams, device, models
from specrs import _specrs as core
from specrs.engine.devices.graphs import Bucket

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
DRAFT_VOCAB = 32000
BANDWIDTH = 4.3e12  # bytes a second that goal 10 takes an H200's memory to give
PROFILED = 3  # rounds
# A round's kernels by the start of their names, or what is in them; the first that fits counts.
MODEL = {
    "products": r"nvjet|gemm|gemv|cublas|cutlass|splitK|xmma|^dot_kernel|^reduce_1Block",
    "attention": r"^attention_",
    "rope_kv": r"^rope_kv_",
    "row operations": r"^(add_)?rms_norm|^(silu|gelu)_up",
}
NOT_MODEL = {
    "selection": r"^draft_select",
    "tree build": r"^tree_build",
    "plan": r"^plan_|^table_update",
    "verify, sample": r"^(verify|sample)_",
    "commit": r"^kv_commit",
    "move": r"^kv_(move|remap|list)",
    "round end": r"^round_end|^loop_count",
    "copies": r"^Memcpy|^Memset",
}
# One kernel embeds tokens (model), and gathers features and copies rows between tables (not the model).
GATHERS = {"row gathers": r"^gather_rows"}
TREES = {1: (8, 6, 64), 4: (4, 5, 24), 16: (2, 4, 8), 64: (1, 2, 3)}  # trees by batch: some 64 to 192 rows to verify


class Random:
    """A checkpoint whose tensors are drawn when they are asked for.

    Attributes:
        bytes: bytes of all tensors drawn so far, of any checkpoint.
    """

    bytes = 0

    def __init__(self, directory: Path, rename: Any = None, placement: Any = None) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.draft = Path(directory).name == "draft"
        self.generator = torch.Generator("cuda").manual_seed(1)

    def check(self, expected: dict[str, tuple[int, ...]], **_: Any) -> None:
        self.shapes = dict(expected)

    def __iter__(self) -> Iterator[str]:
        return iter(("lm_head.weight", "fc.weight", "d2t") if self.draft else ())

    def __contains__(self, name: str) -> bool:
        return name in list(self)

    def path(self, name: str) -> Path:
        return Path(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return {"fc.weight": (4096, 3 * 4096), "lm_head.weight": (DRAFT_VOCAB, 4096)}[name]

    def dtype(self, name: str) -> str:
        return "BF16"

    def load(self, name: str) -> torch.Tensor:
        if name == "d2t":
            return torch.zeros(DRAFT_VOCAB, dtype=torch.int64)
        shape = self.shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        noise = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        Random.bytes += noise.nbytes
        return noise.normal_(0.0, 1.0 if "embed" in name else shape[-1] ** -0.5, generator=self.generator)


def directories(root: Path, layers: int) -> tuple[Path, Path]:
    """config.json of the target and of the head."""
    target, draft = root / "target", root / "draft"
    head = {
        **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1],
    }  # fmt: skip
    for path, config in ((target, {**LLAMA, "num_hidden_layers": layers}), (draft, head)):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        (path / "tokenizer.json").write_text(
            json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})
        )
    return target, draft


def add(llm: LLM, prompts: list[list[int]], count: int) -> list[int]:
    """Requests for `count` tokens each."""
    return [llm.add(p, SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)) for p in prompts]


def written(llm: LLM) -> bool:
    """Return whether all prompts are written, so that the next step is a round of every request."""
    scheduler = llm._scheduler
    return not scheduler._waiting and all(r.committed >= len(r.tokens) - 1 for r in scheduler._admitted)


def timed(llm: LLM, tokens: dict[int, list[int]]) -> float:
    """Seconds of a step, the device idle before and after; the tokens of requests that end in it."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for event in llm.step():
        if event.output is not None:
            tokens[event.request_id] = event.output.token_ids
    torch.cuda.synchronize()
    return time.perf_counter() - started


def rounds(llm: LLM, prompts: list[list[int]], count: int) -> tuple[list[list[int]], float]:
    """Tokens of each request, and the median seconds of a step once all prompts are written."""
    ids = add(llm, prompts, count)
    tokens: dict[int, list[int]] = {}
    seconds = []
    while llm.unfinished:
        whole = written(llm)
        took = timed(llm, tokens)
        if whole:
            seconds.append(took)
    return [tokens[i] for i in ids], statistics.median(seconds[1:-1] or seconds)


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
    round."""
    ids: dict[str, list[int]] = {}
    tokens: dict[str, dict[int, list[int]]] = {name: {} for name in engines}
    for name, llm in engines.items():
        ids[name] = add(llm, prompts, count)
        while not written(llm):
            timed(llm, tokens[name])
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    order = list(engines)
    while any(llm.unfinished for llm in engines.values()):
        for name in order:
            if engines[name].unfinished:
                seconds[name].append(timed(engines[name], tokens[name]))
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


@dataclasses.dataclass
class Watch:
    """Record of the host while rounds ran on: seconds that it waited for them, and when each ended on the device.

    Attributes:
        waited: seconds by step.
        ends: nanoseconds of the device's clock, by round.
    """

    waited: float = 0.0
    ends: dict[int, int] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        collect = Bucket.collect

        def timed(bucket: Bucket, number: int) -> dict[str, torch.Tensor]:
            started = time.perf_counter()
            found = collect(bucket, number)
            self.waited += time.perf_counter() - started
            first = bucket.memory.ring.time_at
            self.ends[number] = int(found["header"][first : first + 2].view(torch.int64))
            return found

        Bucket.collect = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            Bucket.collect = collect  # type: ignore[method-assign]


def steady(llm: LLM, prompts: list[list[int]], count: int) -> tuple[list[list[int]], dict[str, float]]:
    """Return tokens of each request, and milliseconds of its steady rounds; only the engine waits for the device.

    ``step_ms``: from step to step. ``host_ms``: the host's part of a step, without its wait. ``period_ms``: from the
    end of a round to the end of the next one, by the device's clock.
    """
    # Prompts are written in turn, while the first requests decode already: none may end before the last one begins.
    more = sum(map(len, prompts)) // 2048 + count
    ids, tokens, watch = add(llm, prompts, more), dict[int, list[int]](), Watch()
    steps, hosts, whole = [], [], False
    with watch.on():
        while llm.unfinished:
            if not whole and written(llm):
                whole = True
                torch.cuda.synchronize()
                watch.ends.clear()
            watch.waited, started = 0.0, time.perf_counter()
            for event in llm.step():
                if event.output is not None:
                    tokens[event.request_id] = event.output.token_ids
            took = time.perf_counter() - started
            if whole and llm.unfinished == len(prompts):
                steps.append(took)
                hosts.append(took - watch.waited)
    numbers = sorted(watch.ends)
    periods = [watch.ends[b] - watch.ends[a] for a, b in itertools.pairwise(numbers) if b == a + 1]
    middle = slice(3, -3)
    if len(steps) < 9:
        raise RuntimeError(f"{len(steps)} steady rounds: a request of {more} tokens ended too early")
    figures = {"step_ms": statistics.median(steps[middle]) * 1e3, "host_ms": statistics.median(hosts[middle]) * 1e3,
               "period_ms": statistics.median(periods[middle]) / 1e6}  # fmt: skip
    return [tokens[i] for i in ids], {name: round(ms, 4) for name, ms in figures.items()}


def draw_weights() -> None:
    """Give models of this process random weights from here on."""
    llama.Checkpoint = eagle3.Checkpoint = models.cuda.Checkpoint = Random  # type: ignore[misc, assignment]


def reason(error: BaseException) -> str:
    """An error in a line, for the result."""
    return f"{type(error).__name__}: {error}"[:600]


def floors(config: dict[str, Any], batch: int, context: int, levels: int) -> dict[str, float]:
    """Milliseconds that reading weights and KV of a round takes at goal 10's bandwidth.

    ``plain``: a pass of the target. ``tree``: with as many passes of the head as goal 10 counts, one more than levels.
    ``tree_as_run``: with as many as the engine runs, a level less of draft steps and the pass over what was accepted.
    """
    h, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    # Elements of 2 bytes. A layer: q, k, v, o (its input h wide, in the head 2 h), gate, up and down; K and V of a
    # token: 2 kv. The target has a layer's as often as it has layers, and lm_head; the head one layer, its own lm_head.
    layers = config["num_hidden_layers"]
    target = layers * (h * (q + 2 * kv) + q * h + 3 * h * width) + vocab * h + batch * context * layers * 2 * kv
    head = 2 * h * (q + 2 * kv) + q * h + 3 * h * width + DRAFT_VOCAB * h + batch * context * 2 * kv
    fc = 3 * h * h  # once a round
    elements = {
        "plain": target, "tree": target + fc + (levels + 1) * head, "tree_as_run": target + fc + levels * head,
    }  # fmt: skip
    return {name: n * 2 / BANDWIDTH * 1e3 for name, n in elements.items()}


def share_of_floor(config: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Goal 10's floor of a case over its measured period, by kind of round and graph level."""
    batch, steps = row["batch"], row["tree"][1]
    floor = floors(config, batch, row["context"], steps)
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


@contextlib.contextmanager
def under_way(llm: LLM, prompts: list[list[int]], count: int) -> Iterator[None]:
    """Requests that decode, all prompts written and the first rounds over; dropped behind the block."""
    ids = add(llm, prompts, sum(map(len, prompts)) // 2048 + count)
    try:
        while not written(llm):
            llm.step()
        for _ in range(4):
            llm.step()
        torch.cuda.synchronize()
        yield
    finally:
        for i in ids:
            llm.abort(i)


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


def traced(run: Any) -> list[tuple[str, float, float]]:
    """Return the GPU's work meanwhile: name, start and microseconds of every kernel and copy, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted(
        ((e["name"], float(e["ts"]), float(e["dur"])) for e in events if e.get("cat") in kinds), key=lambda e: e[1]
    )


def by_class(spent: dict[str, float]) -> dict[str, Any]:
    """Microseconds by kernel, as classes: their time and shares, and the names that none knows."""
    classes = {**MODEL, **NOT_MODEL, **GATHERS}
    time_of, unknown = dict.fromkeys(classes, 0.0), {}
    for name, us in spent.items():
        known = next((c for c, pattern in classes.items() if re.search(pattern, name)), None)
        if known is None:
            unknown[name[:160]] = round(us, 3)
        else:
            time_of[known] += us
    whole = sum(spent.values())
    rest, gathers = sum(time_of[c] for c in NOT_MODEL), sum(time_of[c] for c in GATHERS)
    return {
        "classes": {c: {"us": round(us, 3), "share": round(us / whole, 5)} for c, us in time_of.items()},
        "model_share": round(sum(time_of[c] for c in MODEL) / whole, 5),
        # The gathers are the model's in part: the truth is between these two.
        "non_model_share": {"least": round(rest / whole, 5), "with_all_gathers": round((rest + gathers) / whole, 5)},
        "unknown_share": round(sum(unknown.values()) / whole, 5),
        "unknown_us": unknown,
    }


def profiled(llm: LLM, prompts: list[list[int]], count: int) -> dict[str, Any]:
    """GPU time of a steady round by kernel: means over the profiled rounds."""
    with under_way(llm, prompts, count):
        events = traced(lambda: [llm.step() for _ in range(PROFILED)])
    ran = sum(name.startswith("round_end") for name, _, _ in events)
    if not ran:
        return {"rounds": 0, "error": f"the profiler saw {len(events)} kernels and copies, and no end of a round"}
    spent: dict[str, float] = {}
    launches: dict[str, int] = {}
    busy, until = 0.0, 0.0  # kernels that overlap count their time once
    for name, start, us in events:
        spent[name] = spent.get(name, 0.0) + us / ran
        launches[name] = launches.get(name, 0) + 1
        busy += max(0.0, start + us - max(start, until))
        until = max(until, start + us)
    top = sorted(spent, key=lambda name: -spent[name])
    return {
        "rounds": ran,
        "launches": round(len(events) / ran, 1),
        "sum_us": round(sum(spent.values()), 2),
        "busy_us": round(busy / ran, 2),
        **by_class(spent),
        "top": [
            {"name": n[:160], "launches": round(launches[n] / ran, 2), "us": round(spent[n], 3)} for n in top[:25]
        ],
        "below_top_us": round(sum(spent[n] for n in top[25:]), 3),
    }  # fmt: skip


def kernels(models_: tuple[Path, Path], batch: int, context: int, count: int) -> dict[str, Any]:
    """`profiled` for plain and tree rounds of a case: of graphs, or where those report no kernels, without them."""
    out: dict[str, Any] = {}
    for kind in ("plain", "tree"):
        missed = []
        for level in ("round", "off"):
            try:
                prompts, options, tree = prepared(batch, context, count, level)
                collect()
                with LLM(*models_, **options, **({"speculative": False} if kind == "plain" else {"tree": tree})) as llm:
                    rounds(llm, [p[:64] for p in prompts], 8)  # makes the rounds' graphs
                    found = profiled(llm, prompts, count)
            except Exception as error:  # the timed figures stay
                found = {"rounds": 0, "error": reason(error)}
            if found["rounds"]:
                break
            missed.append({"graphs": level, "error": found["error"]})
        out[kind] = {"graphs": level, **found, **({"missed": missed} if missed else {})}
    return out


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
    row["share_of_floor"] = share_of_floor(json.loads((models_[0] / "config.json").read_text()), row)
    return row


def collect() -> None:
    """Give memory of closed engines back."""
    gc.collect()
    torch.cuda.empty_cache()
    Random.bytes = 0


def prepared(
    batch: int, context: int, count: int, graphs: str
) -> tuple[list[list[int]], dict[str, Any], tuple[int, int, int]]:
    """Prompts, options of the engine and the tree of a case."""
    prompts = [
        torch.randint(1, 128000, (context,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(batch)
    ]
    options: dict[str, Any] = {
        "device": "cuda", "max_batch": batch, "max_context_len": context + count + batch * context // 2048 + 64,
        "prefill_chunk": 2048, "prefix_cache": False, "page_size": 16, "graphs": graphs,
    }  # fmt: skip
    return prompts, options, next(t for most, t in sorted(TREES.items()) if batch <= most)


def listed(text: str) -> list[tuple[int, int]]:
    """Batches and contexts of ``1x1024,16x8192``."""
    return [(int(b), int(c)) for b, c in (case.split("x") for case in text.split(",") if case)]


def beside(llm: LLM) -> int:
    """Bytes of device memory that are neither weights nor KV."""
    executor: Any = llm._runner.executor
    caches = [executor.cache, *([executor.drafts.cache] if executor.drafts is not None else [])]
    owned: int = core._device_memory(0)[3]
    return torch.cuda.memory_reserved() + owned - Random.bytes - sum(c.tensor.nbytes for c in caches)


def main() -> None:
    """Measure every case, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--graphs", default="round")
    parser.add_argument("--cases", default="1x1024,1x8192,1x32768,4x8192,16x1024,16x8192,64x1024,64x8192")
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
            prompts, options, tree = prepared(batch, context, args.rounds, args.graphs)
            row: dict[str, Any] = {"batch": batch, "context": context, "tree": tree}
            outputs = []
            for name, extra in (("plain", {"speculative": False}), ("speculative", {"tree": tree})):
                collect()
                with LLM(target, draft, **options, **extra) as llm:
                    tokens, seconds = rounds(llm, prompts, args.rounds)
                    rounds(llm, [p[:64] for p in prompts], args.rounds)
                    before = torch.cuda.memory_reserved()
                    rounds(llm, [p[:64] for p in prompts], args.rounds)
                    row[f"{name}_ms"] = round(seconds * 1e3, 3)
                    row[f"{name}_grown_bytes"] = torch.cuda.memory_reserved() - before
                    row[f"{name}_beside_bytes"] = beside(llm)
                outputs.append(tokens)
            # Yield of the round with drafts that are accepted so far.
            row["tokens_per_second_at_4"] = round(batch * 4e3 / row["speculative_ms"], 1)
            row |= {"same_tokens": outputs[0] == outputs[1], "ratio": round(row["speculative_ms"] / row["plain_ms"], 2)}
            keep(cases, row)
        for batch, context in listed(args.levels):
            keep(at_levels, levels((target, draft), batch, context, 2 * args.rounds))
        for batch, context in listed(args.exactness):
            keep(rows, exactness((target, draft), batch, context, args.rounds, args.graphs))
        if at_levels and not args.no_kernels:
            # Nothing is timed from here on. The first use attaches the profiler, before the graphs to come are made.
            with contextlib.suppress(Exception):
                traced(lambda: torch.zeros(1, device="cuda"))
            for row in at_levels:
                row["kernels"] = kernels((target, draft), row["batch"], row["context"], 2 * args.rounds)
                show({"batch": row["batch"], "context": row["context"], "kernels": row["kernels"]})


if __name__ == "__main__":
    main()
