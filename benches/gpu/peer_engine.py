"""sglang's engine and specrs on one GPU in the same shapes: plain steps, rounds with a tree of 8 x 6 x 64, chains of 8.

Llama-3.1-8B's shape with random weights and a one-layer EAGLE-3 head. Each part is a process of its own, so that
neither engine holds memory of the other's; parts run in the order that ``--parts`` has them. `peer_sglang/bundle.py`
makes the bundle with sglang, `peer_sglang/worker.py` runs it.

Drafts of random weights are never accepted, so both engines are told what to accept: ``--accept`` tokens a round, by
sglang's ``SGLANG_SIMULATE_ACC_LEN`` and by `accepting` here. Verification runs as ever in both. What `accepting` adds
to a round, ten small kernels and copies, counts as specrs's.

A ratio is sglang's milliseconds a round over specrs's, by medians; of sglang's backends the fastest one counts.
``read_bytes`` is what a round has to read: weights once a pass, keys and values of every request. A JSON
file that exists is continued, so that parts may run in several calls on one machine. ``kernels`` is the part that tells
the GPU time of specrs's rounds by kernel; it comes last, since a profiler slows what runs beside it.

    python benches/gpu/peer_engine.py --bundle DIR --json FILE [--cases 1x1024,...] [--parts specrs,plain:fa3,...]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import commit, versions
from gpu.peer_sglang.worker import MARK
from specrs import _specrs as core
from specrs.engine.devices.memory_plan import Head
from specrs.measuring.cases import TURNS, Case, Subject, Tree
from specrs.measuring.floors import Reads
from specrs.measuring.kernels import attach, kernels, reason
from specrs.measuring.machine import driver
from specrs.measuring.rounds import Steady, random_prompts, rounds
from specrs.measuring.shapes import directories, random_weights, shape_config
from specrs.models import ModelConfig, check_draft

WORKER = Path(__file__).with_name("peer_sglang") / "worker.py"
KINDS: dict[str, Tree | None] = {"plain": None, "tree": (8, 6, 64), "chain": (1, 7, 8)}
CASES = "1x1024,1x8192,16x1024,16x8192,64x1024"
PARTS = "specrs,plain:fa3,tree:fa3,chain:fa3,plain:triton,specrs,kernels"
ROUNDS = 48
GOALS = {"plain": 1.1, "tree": 1.5, "chain": 1.5}


def spread(count: int, nodes: int, chain: bool) -> list[int]:
    """Nodes of the path that is accepted: the first ones of a chain, and of a tree ones that lie apart, so that their
    keys and values have to be moved."""
    return [i if chain else i * ((nodes - 1) // max(count - 1, 1)) for i in range(count)]


@contextlib.contextmanager
def accepting(count: int, chain: bool) -> Iterator[None]:
    """Greedy rounds of engines that are made meanwhile accept ``count`` tokens, whatever the target says.

    Verification runs, and its results are overwritten. All memory is allocated in a variant's first round, before
    its graph is captured.
    """
    verify = core._device_verify_greedy
    kept: dict[tuple[int, int], Callable[[], None]] = {}

    def verified(**given: Any) -> None:
        verify(**given)
        if given["max_path"] > 1:
            key = given["accepts"].paths.data_ptr(), given["max_nodes"]
            if key not in kept:
                kept[key] = _overwriting(given, min(count, given["max_path"]), chain)
            kept[key]()

    core._device_verify_greedy = verified  # type: ignore[assignment]
    try:
        yield
    finally:
        core._device_verify_greedy = verify


def _overwriting(given: dict[str, Any], count: int, chain: bool) -> Callable[[], None]:
    """Launches that write a path of ``count`` nodes for every live request over what verification found."""
    trees, accepts, lens, live = given["trees"], given["accepts"], given["lens"], given["live"]
    batch, most = lens.numel(), trees.tokens.numel() - 1
    whole: dict[str, Any] = {"dtype": torch.int32, "device": lens.device}
    nodes = torch.tensor(spread(count, given["max_nodes"], chain), **whole).repeat(batch)
    seats = torch.arange(batch + 1, **whole)
    owners = torch.arange(batch, **whole).repeat_interleave(count)
    paths, rows, tokens = (a[: batch * count] for a in (accepts.paths, accepts.rows, accepts.tokens))

    def overwrite() -> None:
        torch.minimum(seats, live[:1], out=accepts.offsets)
        accepts.offsets.mul_(count)
        torch.sub(accepts.offsets[1:], accepts.offsets[:-1], out=accepts.new_lens)
        accepts.new_lens.add_(lens)
        paths.copy_(nodes)
        torch.index_select(trees.offsets, 0, owners, out=rows)
        rows.add_(nodes).clamp_(max=most)
        torch.index_select(trees.tokens, 0, rows, out=tokens)
        accepts.roots.copy_(tokens[count - 1 :: count])

    return overwrite


def listed(text: str) -> list[tuple[int, int]]:
    """Batches and contexts of ``1x1024,16x8192``."""
    return [(int(b), int(c)) for b, c in (case.split("x") for case in text.split(","))]


def say(**row: Any) -> None:
    """Tell the process that started this one."""
    print(MARK + json.dumps(row), flush=True)


@contextlib.contextmanager
def subject_of(layers: int) -> Iterator[Subject]:
    """The shape, with random weights."""
    with tempfile.TemporaryDirectory() as folder, random_weights():
        yield Subject.of(*directories(Path(folder), shape_config("llama-3.1-8b", layers)), "cuda", random=True)


@contextlib.contextmanager
def accepted(kind: str, count: int) -> Iterator[None]:
    """`accepting` for a kind of round; nothing for plain ones."""
    with contextlib.nullcontext() if kind == "plain" else accepting(count, kind == "chain"):
        yield


def measure(cases: list[tuple[int, int]], accept: int, layers: int) -> None:
    """Tell the milliseconds of specrs's rounds, by kind and case."""
    with subject_of(layers) as subject:
        for batch, context in cases:
            prompts = random_prompts(batch, context, subject.sizes.vocab_size)
            for kind, tree in KINDS.items():
                case = Case.of(batch, context, tree, ROUNDS)
                try:
                    with accepted(kind, accept), subject.open(case, kind) as llm:
                        rounds(llm, [p[:64] for p in prompts], 8 * accept)  # makes the rounds' graphs
                        run = Steady(llm, prompts, case.tokens)
                        before = sum(map(len, run.tokens))
                        for _ in range(TURNS):
                            run.turn(case.turn)
                        each = (sum(map(len, run.tokens)) - before) / (batch * TURNS * case.turn)
                        run.drop()
                    found: dict[str, Any] = {**run.figures(), "tokens_a_round": round(each, 3)}
                except Exception as error:  # the other cases stay
                    found = {"error": reason(error)}
                say(kind=kind, batch=batch, context=context, **found)


def profile(cases: list[tuple[int, int]], accept: int, layers: int) -> None:
    """Tell the GPU time of specrs's rounds by kernel, by kind and case."""
    with subject_of(layers) as subject:
        attach()
        for batch, context in cases:
            prompts = random_prompts(batch, context, subject.sizes.vocab_size)
            for kind, tree in KINDS.items():
                case = Case.of(batch, context, tree, ROUNDS)
                with accepted(kind, accept):
                    opened = partial(_opened, subject, case)
                    told = kernels(opened, prompts, case.tokens, ["plain" if kind == "plain" else "tree"])
                [found] = told.values()
                say(kind=kind, batch=batch, context=context, **found)


def _opened(subject: Subject, case: Case, kind: str, graphs: str) -> Any:
    return subject.open(case, kind, graphs)


def command_of(part: str, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command of a part, and its environment."""
    common = ["--cases", args.cases, "--accept", str(args.accept)]
    if part in ("specrs", "kernels"):
        command = [sys.executable, __file__, "--measure", part, "--layers", str(args.layers), *common]
        return command, dict(os.environ)
    kind, backend = part.split(":")
    site = str(args.bundle.resolve() / "site")
    cache = {"TVM_FFI_CACHE_DIR": str(Path(tempfile.gettempdir()) / "sglang-jit")}  # kernels that it compiles itself
    return [sys.executable, str(WORKER), kind, backend, *common], {**os.environ, "PYTHONPATH": site, **cache}


def end(leader: int) -> None:
    """End a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def run(command: list[str], environment: dict[str, str], log: Path, until: float) -> Iterator[dict[str, Any]]:
    """What a process tells; at the end an error if it failed or its time was over. Its children end with it."""
    with log.open("w") as errors:
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
    timer = threading.Timer(until - time.time(), end, [child.pid])
    timer.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith(MARK):
                yield json.loads(line[len(MARK) :])
        if code := child.wait():
            yield {"error": f"exit {code}: {' | '.join(log.read_text().strip().splitlines()[-6:])}"[-1500:]}
    finally:
        timer.cancel()
        end(child.pid)
        child.wait()


def reads_of(layers: int) -> Reads:
    """Bytes that passes of the shape and its head read."""
    with tempfile.TemporaryDirectory() as folder, random_weights():
        target, draft = directories(Path(folder), shape_config("llama-3.1-8b", layers))
        sizes = ModelConfig.from_directory(target)
        return Reads.of(sizes, Head(*check_draft(draft, sizes)))


def table(parts: list[dict[str, Any]], reads: Reads) -> list[dict[str, Any]]:
    """A row for each kind and case that both engines ran: milliseconds, sglang's fastest backend, and the ratio."""
    ours: dict[tuple[str, int, int], list[float]] = {}
    theirs: dict[tuple[str, int, int], dict[str, float]] = {}
    for part in parts:
        for row in part["rows"]:
            if part["part"] == "specrs" and "step_ms" in row:
                ours.setdefault((row["kind"], row["batch"], row["context"]), []).append(row["step_ms"])
            elif ":" in part["part"] and "ms" in row:
                kind, backend = part["part"].split(":")
                theirs.setdefault((kind, row["batch"], row["context"]), {})[backend] = row["ms"]
    out = []
    for key in sorted(ours.keys() & theirs.keys(), key=lambda k: (list(KINDS).index(k[0]), k[1:])):
        (kind, batch, context), ms = key, statistics.median(ours[key])
        backend = min(theirs[key], key=lambda name: theirs[key][name])
        tree = KINDS[kind]
        read = reads.plain(batch, context) if tree is None else reads.tree(batch, context, tree[1])
        out.append({
            "kind": kind, "batch": batch, "context": context, "specrs_ms": round(ms, 4),
            "sglang_ms": theirs[key][backend], "backend": backend, "ratio": round(theirs[key][backend] / ms, 4),
            "goal": GOALS[kind], "read_bytes": read,
        })  # fmt: skip
    return out


def begun(args: argparse.Namespace) -> dict[str, Any]:
    """The result to continue, or a new one.

    Raises:
        SystemExit: the file is of another commit or device.
    """
    head = {
        "commit": commit(), "device": torch.cuda.get_device_name(), "driver": driver(), "versions": versions("triton"),
        "layers": args.layers, "accept": args.accept, "trees": KINDS,
    }  # fmt: skip
    if args.json.exists():
        found: dict[str, Any] = json.loads(args.json.read_text())
        for name in ("commit", "device", "layers", "accept"):
            if found[name] != head[name]:
                raise SystemExit(f"{args.json} is of {name} {found[name]}, not {head[name]}")
        return found
    return {**head, "date": time.strftime("%Y-%m-%d", time.gmtime()), "table": [], "parts": []}


def main() -> None:
    """Run the parts, print and write what they tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="the folder that peer_sglang/bundle.py made")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--parts", default=PARTS)
    parser.add_argument("--accept", type=int, default=4, help="tokens a round of trees and chains, in both engines")
    parser.add_argument("--layers", type=int, default=32, help="of specrs's model, to try this script")
    parser.add_argument("--seconds", type=float, default=570, help="of the whole; parts beyond it are left out")
    parser.add_argument("--measure", choices=("specrs", "kernels"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        (measure if args.measure == "specrs" else profile)(listed(args.cases), args.accept, args.layers)
        return
    if args.json is None or (args.bundle is None and ":" in args.parts):
        parser.error("--json, and --bundle for parts of sglang, are needed")
    until, result, reads = time.time() + args.seconds, begun(args), reads_of(args.layers)
    for i, part in enumerate(args.parts.split(",")):
        started, rows = time.time(), list[dict[str, Any]]()
        if until - started < 45:
            print(f"{part}: left out, {until - started:.0f} s are left", flush=True)
            continue
        result["parts"].append({"part": part, "rows": rows})
        log = args.json.with_name(f"{args.json.stem}-{i}-{part.replace(':', '-')}.log")
        for row in run(*command_of(part, args), log, until):
            print(part, json.dumps(row)[:600], flush=True)
            rows.append(row)
            result["table"] = table(result["parts"], reads)
            args.json.write_text(json.dumps(result, indent=1) + "\n")
        result["parts"][-1]["seconds"] = round(time.time() - started, 1)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["table"]:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
