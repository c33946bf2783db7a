"""`specrs serve` under load: every token checked against `LLM.generate`, and what serving costs the engine.

The server runs in this process, its engine in one of its own, as `specrs serve` has them; clients are further processes
(`serve_drive`), over loopback. Requests are seeded: texts, token ids and conversations, greedy and sampled, with stops,
penalties, ``n``, logprobs; streams and whole answers; readers that are slow, that leave, that vanish within a request;
bad requests, whose refusal is checked.

1. closed loop: so many streams, each with its next request at once
2. open loop: Poisson arrivals at a share of what the closed loop served a second
3. overload: Poisson arrivals at more than that, with a short queue: 429 and ``Retry-After``, then again
4. `LLM.generate` of the same prompts and parameters, alone; all outputs must be equal, those that were left be prefixes
5. what serving costs: the same requests, one for each stream, plainly decoded, by `LLM.generate` alone, by `AsyncLLM`
   in a thread and in a process, and over HTTP, taking turns; with all of them running, the median step, and the median
   turn, which is from the beginning of a step to that of the next one and has all that lies between

Behind each served phase `audit()` must find no page, no sequence and no lease.

    python benches/serve_load.py [--requests 10000] [--streams 256] [--clients 2] [--seed 1] [--no-write]

Exits with 1 where a token, a status or an audit is wrong. Goals: loop lag p99 < 5 ms, engine slowed by < 3%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import write_result
from serve_cases import CHAT_TEMPLATE, FATES, MODEL, Case, case
from serve_client import percentile
from serve_drive import lag
from specrs import LLM, AsyncLLM, RequestOutput, SamplingParams, assets
from specrs.engine.loops.worker import Step

HERE = Path(__file__).parent
LAG_GOAL, SLOWED_GOAL = 5e-3, 0.03
Make = Callable[..., AsyncLLM]


@dataclass
class Steps:
    """Record of an engine while it is watched: each step, and how many outputs went on in it."""

    began: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    def told(self, step: Step) -> None:
        """Note a step; an `AsyncLLM` calls this."""
        self.add(step.began, step.seconds, step.tokens, len(step.gaps))

    def add(self, began: float, seconds: float, tokens: int, running: int) -> None:
        """Add one step."""
        for kept, value in zip((self.began, self.seconds, self.tokens, self.running),
                               (began, seconds, tokens, running), strict=True):  # fmt: skip
            kept.append(value)

    def full(self, rows: int) -> list[int]:
        """Return the steps that gave each of so many requests one token: no prompt was read in them."""
        return [i for i, (t, r) in enumerate(zip(self.tokens, self.running, strict=True)) if t == r == rows]

    def medians(self, rows: int) -> dict[str, float]:
        """Return figures of full steps: the median step, the median turn (where the next step is a full one too), and
        their number."""
        full = self.full(rows)
        turns = [self.began[i + 1] - self.began[i] for i in full if i + 1 in set(full)]
        step = statistics.median(self.seconds[i] for i in full)
        return {"step": step, "turn": statistics.median(turns), "full_steps": len(full)}


@contextmanager
def watched(llm: LLM) -> Iterator[Steps]:
    """Times each step of an engine that is used directly."""
    steps, scheduler = Steps(), llm._scheduler
    step = scheduler.step

    def timed() -> Any:
        began = time.perf_counter()
        events = step()
        steps.add(began, time.perf_counter() - began, sum(len(e.token_ids) for e in events),
                  sum(bool(e.token_ids) for e in events))  # fmt: skip
        return events

    scheduler.step = timed  # type: ignore[method-assign]
    try:
        yield steps
    finally:
        del scheduler.step  # the class's again


def chat_model(folder: Path) -> Path:
    """The model in the package, with a chat template beside it."""
    for path in assets.model_dir().iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


async def serving(make: Make, work: Callable[[AsyncLLM, int], Awaitable[None]], **limits: Any) -> dict[str, int]:
    """Serve while ``work`` runs, given the engine and the port; the audit behind it."""
    from specrs.serve import ServeConfig, server
    from specrs.serve.process import listener

    engine = make(**limits)
    config = ServeConfig(served_names=(MODEL,), port=0, log="none")
    sock = listener(config)
    try:
        http = server(config, engine)
        task = asyncio.ensure_future(http.serve([sock]))
        while not http.started:
            if task.done():
                task.result()
                raise RuntimeError("the server ended before it began")
            await asyncio.sleep(0.01)
        port = sock.getsockname()[1]
        try:
            await work(engine, port)
            audit = await engine.audit()
            stats = engine.stats()
            audit["waiting"] = stats.submitted
        finally:
            http.should_exit = True
            await task
    finally:
        sock.close()
        await engine.aclose(drain=False)
    return audit


def leaks(audit: dict[str, int]) -> list[str]:
    """Return the pages of an audit that no request has any more."""
    names = ("sequences", "leased_sequences", "held_pages", "waiting")
    return [f"audit: {name} = {audit[name]}" for name in names if audit[name]]


async def drive(port: int, clients: int, streams: int, first: int, count: int, *more: str) -> list[dict[str, Any]]:
    """Drive cases ``first`` to ``first + count`` from so many processes; their records."""
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for i in range(clients):
            share = streams // clients + (i < streams % clients)
            argv = ["--port", port, "--first", first + i, "--count", count - i, "--step", clients, "--streams", share]
            argv += ["--out", Path(folder) / f"{i}.jsonl", *more]
            running.append(await asyncio.create_subprocess_exec(sys.executable, str(HERE / "serve_drive.py"),
                                                                *map(str, argv)))  # fmt: skip
        statuses = [await process.wait() for process in running]
        if any(statuses):
            raise RuntimeError(f"clients ended with {statuses}")
        files = [Path(folder) / f"{i}.jsonl" for i in range(clients)]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


# -- what is due ------------------------------------------------------------------------------------------------------


def _named(llm: LLM, model: Path) -> str:
    """An engine as text, without this machine's folders."""
    draft = assets.draft_dir()
    return repr(llm).replace(str(model), "pystdlib-16m").replace(str(draft), draft.name)


def answered(llm: LLM, cases: Sequence[Case]) -> dict[int, RequestOutput]:
    """Return the output that `LLM.generate` gives each case that a server would run."""
    due = [one for one in cases if one.fate not in ("bad", "vanish")]
    prompts: list[Any] = [llm.chat_prompt(one.prompt) if one.chat else one.prompt for one in due]
    outputs = llm.generate(prompts, [SamplingParams.from_dict(one.params) for one in due], progress=False)
    return {one.index: output for one, output in zip(due, outputs, strict=True)}


def faults(one: Case, record: dict[str, Any] | None, want: RequestOutput | None) -> list[str]:
    """Return the faults in the outcome of a case."""
    if record is None:
        return ["no record"]
    if "fault" in record:
        return [record["fault"]]
    if one.fate in ("vanish", "leave at once"):
        return []
    if record["status"] != one.status:
        return [f"status {record['status']} for {one.status}: {record.get('error')}"]
    if one.fate == "bad":
        got = record["error"]["param"] or ""
        right = one.param is None or got == one.param or got.startswith((f"{one.param}[", f"{one.param}."))
        return [] if right else [f"param {got!r} for {one.param!r}: {record['error']}"]
    assert want is not None
    found: list[str] = []
    due = {str(o.index): o for o in want.outputs}
    if record["stream_error"] is not None:
        return [f"an error within the stream: {record['stream_error']}"]
    left = one.fate == "leave"
    if record["outputs"].keys() != due.keys() and not (left and record["outputs"].keys() <= due.keys()):
        found.append(f"outputs {sorted(record['outputs'])} for {sorted(due)}")
    for index, got in record["outputs"].items():
        output = due.get(index)
        if output is None:
            continue
        ids, text = got["token_ids"], got["text"]
        if left and got["finish"] is None:
            output_ids, output_text = output.token_ids[: len(ids)], output.text[: len(text)]
        else:
            output_ids, output_text = output.token_ids, output.text
            if got["finish"] != str(output.finish_reason):
                found.append(f"output {index}: finish {got['finish']} for {output.finish_reason}")
        if ids != output_ids:
            found.append(f"output {index}: tokens {ids} for {output_ids}")
        if text != output_text:
            found.append(f"output {index}: text {text!r} for {output_text!r}")
    if record["prompt_token_ids"] not in (None, want.prompt_token_ids):
        found.append("the prompt's tokens differ")
    usage, tokens = record["usage"], sum(len(o.token_ids) for o in want.outputs)
    asked = not one.body.get("stream") or one.body.get("stream_options", {}).get("include_usage")
    if not left and asked:
        if usage is None:
            found.append("no usage")
        elif (usage["prompt_tokens"], usage["completion_tokens"]) != (len(want.prompt_token_ids), tokens):
            found.append(f"usage {usage} for {len(want.prompt_token_ids)} and {tokens}")
    return found


# -- phases ----------------------------------------------------------------------------------------------------------


def times(
    records: list[dict[str, Any]], lags: list[float], seconds: float, steps: Steps, tokens: int
) -> dict[str, Any]:  # fmt: skip
    """Figures of a served phase, in which so many tokens were generated."""
    firsts = [r["first"] for r in records if r.get("first") is not None]
    gaps = [gap for r in records for gap, _ in r.get("gaps", ()) if r["fate"] != "slow"]
    each = [gap / n for r in records for gap, n in r.get("gaps", ()) if r["fate"] != "slow" and n]

    def both(values: list[float]) -> dict[str, float]:
        return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99)}

    return {
        "requests": len(records),
        "seconds": seconds,
        "requests_per_second": len(records) / seconds,
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "steps": len(steps.seconds),
        "engine_share": sum(steps.seconds) / seconds,
        "most_running": max(steps.running, default=0),
        "first_token_seconds": both(firsts),
        "between_chunks_seconds": both(gaps),
        "between_tokens_seconds": both(each),
        "loop_lag_seconds": {**both(lags), "max": max(lags, default=0.0)},
        "refused_for_overload": sum(r["tries"] for r in records),
        "fates": dict(Counter(r["fate"] for r in records)),
        "statuses": dict(Counter(str(r.get("status")) for r in records)),
    }


def phase(make: Make, args: argparse.Namespace, first: int, count: int, rate: float, waiting: int) -> tuple[Any, ...]:
    """Serve a range of cases; their records, the figures, what the audit found."""
    records: list[dict[str, Any]] = []
    lags: list[float] = []
    steps, spent, generated = Steps(), [], []

    async def work(engine: AsyncLLM, port: int) -> None:
        clock = asyncio.ensure_future(lag(lags))
        began = time.perf_counter()
        more = ["--seed", str(args.seed), "--most", str(args.most), "--rate", str(rate / args.clients)]
        more += ["--fates", json.dumps(args.fates)]
        with engine.watching_steps(steps.told):
            records.extend(await drive(port, args.clients, args.streams, first, count, *more))
        spent.append(time.perf_counter() - began)
        clock.cancel()
        for _ in range(200):  # readers that left at the very end may not be noticed yet
            stats = engine.stats()
            if not (stats.submitted or stats.engine.running or stats.engine.waiting):
                break
            await asyncio.sleep(0.05)
        generated.append(engine.stats().engine.generated)

    audit = run(serving(make, work, max_waiting=waiting))
    client = [s for r in records if "lags" in r for s in r["lags"]]
    records = [r for r in records if "lags" not in r]
    figures = times(records, lags, spent[0], steps, generated[0])
    figures["client_lag_p99_seconds"] = percentile(client, 0.99)
    return records, figures, leaks(audit)


def run(work: Any) -> Any:
    """Run in a fresh event loop, of the kind that `specrs serve` runs in."""
    from specrs.serve import new_event_loop

    loop = new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def slowed(llm: LLM, make: Make, args: argparse.Namespace) -> dict[str, Any]:
    """The median step and turn of an engine with a request for each stream: alone, in a thread, in a process, behind
    HTTP."""
    rows, most = min(args.streams, args.max_batch), args.slowed_tokens
    params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, speculative=False)
    prompts = [[1 + (7 * i + j) % 4000 for j in range(8)] for i in range(rows)]
    fields = {"max_tokens": most, "temperature": 0, "ignore_eos": True, "speculative": False}

    def alone() -> Steps:
        with watched(llm) as steps:
            llm.generate(prompts, params, progress=False)
        return steps

    def read_by(make: Make) -> Callable[[], Steps]:
        def way() -> Steps:
            steps = Steps()

            async def main() -> None:
                engine = make()
                try:

                    async def read(prompt: list[int]) -> None:
                        async for _ in engine.generate(prompt, params):
                            pass

                    with engine.watching_steps(steps.told):
                        await asyncio.gather(*map(read, prompts))
                finally:
                    await engine.aclose()

            run(main())
            return steps

        return way

    def http_of(make: Make) -> Callable[[], Steps]:
        def way() -> Steps:
            steps = Steps()

            async def work(engine: AsyncLLM, port: int) -> None:
                with engine.watching_steps(steps.told):
                    found = await drive(port, args.clients, rows, 0, rows, "--same", json.dumps([prompts, fields]))
                bad = [r for r in found if "lags" not in r and ("fault" in r or r["status"] != 200)]
                if bad:
                    raise RuntimeError(f"{len(bad)} of {rows} failed: {bad[0]}")

            run(serving(make, work))
            return steps

        return way

    def here(**limits: Any) -> AsyncLLM:
        return AsyncLLM(llm, **limits)

    ways = {"alone": alone, "thread": read_by(here), "process": read_by(make), "http": http_of(make)}
    if args.with_thread:
        ways["http, engine in a thread"] = http_of(here)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(args.turns + 1):
        for name, way in ways.items():
            steps = way()
            if turn:
                found[name].append(steps.medians(rows))
    step, turns = (
        {name: statistics.median(one[what] for one in each) for name, each in found.items()}
        for what in ("step", "turn")
    )
    return {
        "rows": rows,
        "tokens_each": most,
        "turns": args.turns,
        "step_seconds": step,
        "turn_seconds": turns,
        "each": found,
        "slowed_step": {name: seconds / step["alone"] - 1 for name, seconds in step.items()},
        "slowed_turn": {name: seconds / turns["alone"] - 1 for name, seconds in turns.items()},
    }


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """All phases; figures, and everything that is wrong."""
    result: dict[str, Any] = {"streams": args.streams, "clients": args.clients, "seed": args.seed, "phases": {}}
    wrong: list[str] = []
    records: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = chat_model(Path(folder))
        options: dict[str, Any] = {"max_batch": args.max_batch, "max_context_len": 1024}

        def make(**limits: Any) -> AsyncLLM:
            return AsyncLLM(model, assets.draft_dir(), process=True, **options, **limits)

        with LLM(model, assets.draft_dir(), **options) as llm:
            result |= {"engine": _named(llm, model), "threads": os.cpu_count()}
            shares = {"closed": 0.5, "open": 0.4, "overload": 0.1}
            first, capacity = 0, 0.0
            for name, share in shares.items():
                count = round(args.requests * share)
                rate = {"closed": 0.0, "open": 0.7 * capacity, "overload": 3.0 * capacity}[name]
                waiting = 16 if name == "overload" else max(512, args.streams)
                found, figures, leaked = phase(make, args, first, count, rate, waiting)
                capacity = capacity or figures["requests_per_second"]
                figures["rate"] = rate or None
                result["phases"][name] = figures
                wrong += [f"{name}: {leak}" for leak in leaked]
                records |= {r["index"]: r for r in found}
                first += count
                told = {k: figures[k] for k in ("tokens", "engine_share", "most_running", "refused_for_overload")}
                print(f"{name}: {count} requests in {figures['seconds']:.1f} s, {json.dumps(told)}", flush=True)
            cases = [case(args.seed, i, args.most, args.fates) for i in range(first)]
            began = time.perf_counter()
            with watched(llm) as steps:
                want = answered(llm, cases)
            result["alone"] = {"seconds": time.perf_counter() - began, "tokens": sum(steps.tokens)}
            print(f"alone: {result['alone']['tokens']} tokens in {result['alone']['seconds']:.1f} s", flush=True)
            for one in cases:
                bad = faults(one, records.get(one.index), want.get(one.index))
                wrong += [f"case {one.index} ({one.fate}): {fault}" for fault in bad]
            whole = [records[c.index] for c in cases if c.fate in ("read", "slow") and c.index in records]
            result["checked"] = {
                "requests": len(cases),
                "whole": len(whole),
                "tokens": sum(len(o["token_ids"]) for r in whole for o in r.get("outputs", {}).values()),
                "refused": sum(c.fate == "bad" for c in cases),
                "wrong": len(wrong),
            }
            if args.turns:
                keep(result, wrong, args.no_write)  # should time run out
                result["slowed"] = slowed(llm, make, args)
            wrong += [f"after all: {leak}" for leak in leaks({**llm.audit(), "waiting": llm.unfinished})]
    lags = {name: f["loop_lag_seconds"]["p99"] for name, f in result["phases"].items()}
    result["goals"] = {
        "loop_lag_p99_seconds": {"goal": LAG_GOAL, "got": max(lags.values()), "met": max(lags.values()) < LAG_GOAL},
    }
    if args.turns:
        got = result["slowed"]["slowed_turn"]["http"]
        result["goals"]["slowed_by_http"] = {"goal": SLOWED_GOAL, "got": got, "met": got < SLOWED_GOAL}
    return result, wrong


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--clients", type=int, default=2, help="processes that drive the server")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument("--most", type=int, default=48, help="tokens an output, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--turns", type=int, default=3, help="of the comparison with an engine alone; 0: none")
    parser.add_argument("--slowed-tokens", type=int, default=48, help="tokens of each of its requests")
    parser.add_argument("--with-thread", action="store_true", help="compare HTTP with the engine in a thread, too")
    parser.add_argument("--fates", type=json.loads, default=FATES, help="JSON: weight of each fate")
    parser.add_argument("--no-write", action="store_true", help="print the result instead of keeping it")
    return parser.parse_args(argv)


def keep(result: dict[str, Any], wrong: list[str], printed: bool) -> None:
    """Write benches/results/serve_load.json, or print it."""
    whole = result | {"wrong": wrong[:50]}
    if printed:
        print(json.dumps(whole, indent=1))
    else:
        write_result("serve_load", whole)


def main() -> int:
    """Measure, and keep it."""
    args = arguments()
    result, wrong = measure(args)
    keep(result, wrong, args.no_write)
    for line in wrong[:50]:
        print(line[:500], file=sys.stderr)
    for name, goal in result["goals"].items():
        print(f"{name}: {goal['got']:.4g}, goal {goal['goal']:g}: {'met' if goal['met'] else 'MISSED'}")
    print(
        f"{len(wrong)} wrong of {result['checked']['requests']} requests, {result['checked']['tokens']} tokens checked"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
