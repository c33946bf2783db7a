"""Goal 10 beside transformers, on the same GPU and in the same run: the model in the package, and an 8B shape.

``package``: the model in the package, greedy, one request at a time and 8 at once. Tokens a second of whole requests by
specrs (plain, a tree of (4, 4, 16), and the tree that its cost model picks; graphs of rounds and loops of them), and by
transformers in bfloat16 (plain, and for one request prompt lookup and early exit). All take turns; medians. The tokens
of specrs's engines must be equal. transformers rounds otherwise, so that near ties may part: the share of requests
with equal tokens is told.

``shape``: Llama-3.1-8B's with random weights, one request, no prefix cache, by context. Milliseconds a token by
transformers with a static cache, forward pass and argmax compiled as one (mode "reduce-overhead"), and without
compiling; beside them specrs's plain and tree rounds, as `engine.py` takes them. transformers compiles in a process of
its own for each context, side by side; they are timed one at a time, before and after specrs. Its cache is filled
with noise instead of a prompt, which takes as long to read.

What fails or takes too long is left out, with the reason in the result.

    python benches/gpu/peers.py [--json FILE] [--contexts 1024,8192] [--compile-limit 110] [--seconds 195]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import engine
from specrs import LLM, SamplingParams, assets, device
from specrs.measuring.machine import driver

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import commit, versions

TREE = (4, 4, 16)
Decode = Callable[[], list[list[int]]]  # tokens of each request
MARK = "@"  # begins a line of a worker that is meant for the parent


# -- the model in the package --------------------------------------------------------------------------------------


def specrs_decoder(llm: LLM, prompts: list[list[int]], together: bool, count: int) -> Decode:
    """All prompts by specrs: at once, or one after the other."""
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    groups = [prompts] if together else [[p] for p in prompts]
    return lambda: [list(o.token_ids) for group in groups for o in llm.generate(group, params)]


def transformers_decoder(model: Any, prompts: list[list[int]], together: bool, count: int, **options: Any) -> Decode:
    """All prompts by transformers, padded to the left where they run at once."""
    groups = [prompts] if together else [[p] for p in prompts]

    def decode() -> list[list[int]]:
        tokens: list[list[int]] = []
        for group in groups:
            longest = max(map(len, group))
            ids = torch.tensor([[0] * (longest - len(p)) + p for p in group], device="cuda")
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in group], device="cuda")
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options)
            tokens += out[:, longest:].tolist()
        return tokens

    return decode


def in_turns(
    engines: dict[str, Decode], repeats: int, until: float
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]], dict[str, str]]:
    """Seconds of each by repeat, tokens, and why some were left out.

    The first turns warm up: two of specrs's, which makes graphs as it goes, one of the others. After two repeats that
    count, none begins behind `until`.
    """
    tokens: dict[str, list[list[int]]] = {}
    left_out: dict[str, str] = {}
    for name, decode in engines.items():
        try:
            for _ in range(2 if name.startswith("specrs") else 1):
                tokens[name] = decode()
        except Exception as error:
            left_out[name] = engine.reason(error)
            print(f"  {name} left out: {left_out[name]}", flush=True)
    order = [name for name in engines if name not in left_out]
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(repeats):
        if turn >= 2 and time.perf_counter() > until:
            break
        for name in order:
            torch.cuda.synchronize()
            started = time.perf_counter()
            tokens[name] = engines[name]()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - started)
        order.reverse()  # neither always comes after the other
    return seconds, tokens, left_out


def package_case(hf: Any, requests: int, args: argparse.Namespace, until: float) -> dict[str, Any]:
    """Measure one request at a time (over a few prompts), or so many at once."""
    together = requests > 1
    with contextlib.ExitStack() as stack:
        llms: dict[str, LLM] = {}
        left_out = {}
        kinds: dict[str, dict[str, Any]] = {
            "plain": {"speculative": False}, f"tree {TREE}": {"tree": TREE}, "default tree": {},
        }  # fmt: skip
        for kind, options in kinds.items():
            for graphs in ("round", "loop"):
                name = f"specrs {kind}, {graphs}"
                try:
                    made = LLM(device="cuda", max_batch=requests, prefix_cache=False, graphs=graphs, **options)
                    llms[name] = stack.enter_context(made)
                except Exception as error:
                    left_out[name] = engine.reason(error)
        first = next(iter(llms.values()))
        prompts = [first.encode(p) for p in assets.heldout_prompts()[-(requests if together else args.prompts) :]]
        engines = {name: specrs_decoder(llm, prompts, together, args.max_tokens) for name, llm in llms.items()}
        if hf is not None:
            peers: dict[str, dict[str, Any]] = {"transformers plain": {}}
            if together:
                left_out["transformers assisted"] = "transformers generates with assistance for one request at a time"
            else:
                peers["transformers prompt lookup"] = {"prompt_lookup_num_tokens": 8}
                peers["transformers early exit"] = {"assistant_early_exit": 4}
            for name, options in peers.items():
                engines[name] = transformers_decoder(hf, prompts, together, args.max_tokens, **options)
        seconds, tokens, failed = in_turns(engines, args.repeats, until)
    return summary(seconds, tokens, {**left_out, **failed}) | {"requests": requests, "prompts": len(prompts)}


def summary(
    seconds: dict[str, list[float]], tokens: dict[str, list[list[int]]], left_out: dict[str, str]
) -> dict[str, Any]:
    """Rates and ratios of medians; who gave whose tokens."""
    medians = {name: statistics.median(s) for name, s in seconds.items() if s}
    rates = {name: sum(map(len, tokens[name])) / s for name, s in medians.items()}
    plain = {n: r for n, r in rates.items() if n.startswith("specrs plain")}
    drafted = {n: r for n, r in rates.items() if n.startswith("specrs") and n not in plain}
    peers = {n: r for n, r in rates.items() if n.startswith("transformers")}
    reference = tokens[next(iter(plain))]
    out: dict[str, Any] = {
        "tokens_per_second": {n: round(r, 1) for n, r in rates.items()},
        "repeats": {n: len(s) for n, s in seconds.items()},
        "spread": {n: [round(min(s) / medians[n], 3), round(max(s) / medians[n], 3)] for n, s in seconds.items() if s},
        "left_out": left_out,
        "specrs_tokens_equal": all(t == reference for n, t in tokens.items() if n.startswith("specrs")),
        "requests_equal_to_specrs": {
            n: round(sum(a == b for a, b in zip(t, reference, strict=True)) / len(reference), 3)
            for n, t in tokens.items()
            if n in peers
        },
        "tokens_equal_to_specrs_until_they_part": {
            n: round(sum(map(common_prefix, t, reference)) / sum(map(len, reference)), 3)
            for n, t in tokens.items()
            if n in peers
        },
    }
    if drafted:
        out["best_tree_over_best_plain"] = round(max(drafted.values()) / max(plain.values()), 3)
    if peers:
        out["best_plain_over_transformers_plain"] = round(max(plain.values()) / peers["transformers plain"], 3)
        out["best_over_transformers_best"] = round(max(rates[n] for n in (*plain, *drafted)) / max(peers.values()), 3)
    return out


def common_prefix(a: list[int], b: list[int]) -> int:
    """Tokens until two texts part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def package(args: argparse.Namespace, until: float, keep: Callable[[], None], out: dict[str, Any]) -> None:
    """Both cases of the model in the package, into `out`."""
    hf = None
    try:
        from transformers import AutoModelForCausalLM

        hf = AutoModelForCausalLM.from_pretrained(assets.model_dir(), dtype=torch.bfloat16).to("cuda").eval()
        hf.generation_config.pad_token_id = 0
        # Has the effect of ignore_eos: min_new_tokens would forbid EOS, and change the text.
        hf.generation_config.eos_token_id = None
        out["transformers_attention"] = hf.config._attn_implementation
    except Exception as error:
        out["transformers_left_out"] = engine.reason(error)
    begun = time.perf_counter()
    for requests, share in ((1, 0.75), (8, 1.0)):
        name = "one request" if requests == 1 else f"{requests} requests"
        try:
            out[name] = package_case(hf, requests, args, begun + share * (until - begun))
        except Exception as error:
            out[name] = {"error": engine.reason(error)}
        print(name, json.dumps(out[name]), flush=True)
        keep()


# -- the 8B shape ----------------------------------------------------------------------------------------------------


def say(**what: Any) -> None:
    """A line for the parent."""
    print(MARK + json.dumps(what), flush=True)


def worker(context: int, layers: int, steps: int) -> None:
    """Compile transformers' decoding step for a context; then measure at every line that comes in."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    shape = {k: v for k, v in engine.LLAMA.items() if k not in ("architectures", "model_type", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": engine.LLAMA["rope_theta"]}
    config = LlamaConfig(**shape, num_hidden_layers=layers, rope_parameters=rope)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):  # weights are drawn there, in bfloat16
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    room = context + 64 + steps
    cache = StaticCache(config=config, max_cache_len=room)
    cache.early_initialization(
        batch_size=1, num_heads=config.num_key_value_heads, head_dim=config.head_dim, dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )  # fmt: skip
    token = torch.ones(1, 1, dtype=torch.int64, device="cuda")

    def step(token: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def begin() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(context)

    def run(call: Callable[[torch.Tensor], torch.Tensor], count: int) -> float:
        """Milliseconds a token, from a context of that length on."""
        begin()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            torch.compiler.cudagraph_mark_step_begin()
            token.copy_(call(token))
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / count * 1e3

    with torch.inference_mode():
        for layer in cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        run(step, 2)
        say(eager_ms=round(run(step, 8), 3), attention=config._attn_implementation, cache_tokens=room)
        whole, refused, compiled = True, None, None
        started = time.perf_counter()
        for whole in (True, False):
            torch._dynamo.reset()
            compiled = torch.compile(step, mode="reduce-overhead", fullgraph=whole, dynamic=False)
            try:
                run(compiled, 4)  # compiles, warms up, records the graph
                break
            except Exception as error:
                compiled, refused = None, engine.reason(error)
                say(refused=refused, fullgraph=whole)
        if compiled is None:
            say(error=refused)
            return
        run(compiled, 8)
        say(ready=True, fullgraph=whole, compile_seconds=round(time.perf_counter() - started, 1))
        for line in sys.stdin:
            if line.strip() != "measure":
                break
            say(ms=[round(run(compiled, steps), 4) for _ in range(5)])


class Worker:
    """A process that holds transformers' compiled model of a context.

    Attributes:
        said: everything it said so far.
    """

    def __init__(self, context: int, layers: int, folder: Path) -> None:
        self.context, self.said = context, dict[str, Any]()
        self._errors = folder / f"worker-{context}.txt"
        command = [sys.executable, __file__, "--worker", str(context), "--layers", str(layers)]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(line[len(MARK) :])
        self._lines.put(None)

    def wait(self, name: str, until: float) -> bool:
        """Return whether the worker said `name` in time; else ``said["left_out"]`` has the reason."""
        while name not in self.said and "left_out" not in self.said:
            try:
                line = self._lines.get(timeout=max(0.01, until - time.perf_counter()))
            except queue.Empty:
                self.said["left_out"] = "it took longer than the limit"
                break
            if line is None:
                last = self._errors.read_text().strip().splitlines()[-3:]
                self.said.setdefault("left_out", self.said.get("error") or f"it ended: {' | '.join(last)}"[:600])
            else:
                self.said |= json.loads(line)
        return "left_out" not in self.said

    def measure(self, until: float) -> None:
        """Five more runs, in ``said["runs"]``; 10 s are always given."""
        if "left_out" in self.said or "ready" not in self.said:
            return
        assert self._process.stdin is not None
        self.said.pop("ms", None)
        try:
            self._process.stdin.write("measure\n")
            self._process.stdin.flush()
        except OSError as error:
            self.said["left_out"] = engine.reason(error)
            return
        if self.wait("ms", max(until, time.perf_counter() + 10)):
            self.said.setdefault("runs", []).extend(self.said.pop("ms"))
        else:
            self.close()  # it may still run, and would slow whoever is next

    def close(self) -> None:
        """End it and the processes that compile for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def workers(contexts: list[int], layers: int) -> Iterator[dict[int, Worker]]:
    """Start a worker for each context; all are gone behind the block, whatever happens."""
    made: dict[int, Worker] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for context in contexts:
                made[context] = Worker(context, layers, Path(folder))
            yield made
        finally:
            for one in made.values():
                one.close()


def rounds_of(models: tuple[Path, Path], context: int, count: int) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """Steady plain and tree rounds of specrs at both graph levels, and their tokens."""
    out: dict[str, Any] = {}
    tokens = {}
    for kind in ("plain", "tree"):
        for graphs in ("round", "loop"):
            prompts, options, tree = engine.prepared(1, context, count, graphs)
            out["tree"] = tree
            extra: dict[str, Any] = {"speculative": False} if kind == "plain" else {"tree": tree}
            engine.collect()
            with LLM(*models, **options, **extra) as llm:
                engine.rounds(llm, [p[:64] for p in prompts], 24)  # makes the rounds' graphs
                tokens[f"{kind}_{graphs}"], out[f"{kind}_{graphs}"] = engine.steady(llm, prompts, count)
    engine.collect()
    return out, tokens


def shape(args: argparse.Namespace, until: float, keep: Callable[[], None], out: dict[str, Any]) -> None:
    """The 8B shape at every context, into `out`."""
    contexts = [int(c) for c in args.contexts.split(",")]
    engine.draw_weights()
    with tempfile.TemporaryDirectory() as folder, workers(contexts, args.layers) as compiled:
        models = engine.directories(Path(folder), args.layers)
        limit = min(until - 30, time.perf_counter() + args.compile_limit)  # 30 s for what is measured then
        for one in compiled.values():
            one.wait("ready", limit)  # none is timed while another compiles
            if "left_out" in one.said:
                one.close()
        for context, one in compiled.items():
            row: dict[str, Any] = {}
            out[str(context)] = row
            one.measure(until)
            try:
                found, tokens = rounds_of(models, context, args.rounds)
                first = tokens["plain_round"]
                row["specrs"] = {**found, "same_tokens": all(t == first for t in tokens.values())}
            except Exception as error:
                row["specrs"] = {"error": engine.reason(error)}
            one.measure(until)
            runs = one.said.pop("runs", None)
            row["transformers"] = {k: v for k, v in one.said.items() if k != "ms"}
            if runs:
                ms = statistics.median(runs)
                row["transformers"] |= {"ms": round(ms, 4), "least_ms": min(runs), "most_ms": max(runs)}
                for name in ("plain_round", "plain_loop", "tree_round", "tree_loop"):
                    if name in row["specrs"]:
                        ratio = round(row["specrs"][name]["step_ms"] / ms, 4)
                        row.setdefault("specrs_round_over_transformers_token", {})[name] = ratio
                        if name.startswith("tree"):
                            row.setdefault("specrs_at_4_tokens_over_transformers", {})[name] = round(4 / ratio, 3)
            print(context, json.dumps(row), flush=True)
            keep()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--prompts", type=int, default=3, help="of one request at a time")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="at most")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=48)
    parser.add_argument("--contexts", default="1024,8192", help="of the 8B shape; '' for none")
    parser.add_argument("--compile-limit", type=float, default=110, help="seconds until transformers is compiled")
    parser.add_argument("--seconds", type=float, default=195, help="of the whole; what does not fit is left out")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker, args.layers, 48)
        return
    until = time.perf_counter() + args.seconds
    device.init()
    result: dict[str, Any] = {
        "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()), "device": torch.cuda.get_device_name(),
        "driver": driver(), "versions": versions("triton"), "max_tokens": args.max_tokens, "layers": args.layers,
        "package": {}, "shape": {},
    }  # fmt: skip

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    package(args, time.perf_counter() + 45, keep, result["package"])
    gc.collect()
    torch.cuda.empty_cache()
    if args.contexts:
        try:
            shape(args, until, keep, result["shape"])
        except Exception as error:
            result["shape"]["error"] = engine.reason(error)
    result["seconds"] = round(time.perf_counter() - until + args.seconds, 1)
    keep()
    parted = [name for name, row in result["package"].items() if isinstance(row, dict) and not equal(row)]
    if parted:
        raise SystemExit(f"specrs's engines gave different tokens, or none: {', '.join(parted)}")


def equal(row: dict[str, Any]) -> bool:
    """Return whether a case ran, and all of specrs's engines gave the same tokens."""
    return bool(row.get("specrs_tokens_equal"))


if __name__ == "__main__":
    main()
