"""Costs and gains of speculation by default, counted instead of timed: real requests, priced passes.

Each pass of the engine is priced by a table that was measured on a quiet machine, and the engine's clock shows the sum
of the prices, so that neither a noisy neighbour nor a throttled core enters: the figures repeat to the last digit. Left
out is what Python spends beside the passes of a request that does not draft, about 6 us a round.
"""

from __future__ import annotations

import multiprocessing
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import specrs.engine.drafting.chooser as chooser
from gate_texts import CODE, KINDS
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs.assets import model_dir
from specrs.engine.drafting.costs import Costs, Pace, PassCost
from specrs.engine.drafting.sources import DraftSession
from specrs.engine.rounds.flight import Flight

ROWS = (1, 2, 4, 8, 16, 32, 64)
# Milliseconds on a quiet machine of two cores, one thread, the model in the package.
TABLE = {
    "target": (1.518, 1.650, 1.850, 2.420, 4.602, 9.294, 16.548),
    "draft_step": (0.237, 0.250, 0.266, 0.348, 0.646, 1.170, 2.147),
    "draft_extend": (0.324, 0.324, 0.324, 0.361, 0.461, 0.690, 1.134),
}
BESIDE = (0.1, 0.3)  # milliseconds of a plain round, and of one that drafts, beside its passes
ASKED = 0.03  # milliseconds of asking a source of drafts once, merging what it says and judging it
BATCH = 4


class Block:
    """Prices of the passes of a head that drafts blocks: the target's for as many rows, by the share of the target's
    multiply-adds that a row of the pass takes. By that rule a step of the package's own head costs 15.4% of a pass;
    the table has 15.6%."""

    def __init__(self, head: Any, target: Any) -> None:
        def size(of: Any) -> dict[str, int]:
            return {name: product.in_features * product.out_features for name, product in of.products()}

        parts, whole = size(head), sum(size(target).values())
        writes = sum(n for name, n in parts.items() if name == "fc" or name.endswith(".kv_proj"))
        self.rows, self.write = (
            PassCost(ROWS, [ms / 1e3 * some / whole for ms in TABLE["target"]])
            for some in (sum(parts.values()) - writes, writes)
        )


class Counter:
    """The sum of prices of the passes that an engine has run; the clock of one that drafts by default.

    Attributes:
        seconds: sum of the seconds so far.
        first_token: seconds that the first token of the last `price` took.
    """

    def __init__(self, llm: LLM) -> None:
        self.seconds = self.first_token = 0.0
        runner: Any = llm._runner
        tables = {name: PassCost(ROWS, [ms / 1e3 for ms in row]) for name, row in TABLE.items()}
        drafts = runner.executor.drafts
        block = None if drafts is None or drafts.head.passes != "block" else Block(drafts.head, runner.executor.target)
        extend, nothing = tables["draft_extend"], PassCost([1], [0.0])
        self.costs, pace = Costs(tables["target"], nothing if block is not None else tables["draft_step"]), Pace()
        self._price(runner.executor.target, "forward", lambda n: self.costs.target.at(n))
        runner.drafting.clock = lambda: self.seconds
        collect = runner._collect

        def collected(flight: Flight) -> None:
            plan, _ = flight.rounds[0]
            self.seconds += BESIDE[plan.drafts] / 1e3  # what Python spends beside the passes of a round
            collect(flight)

        runner._collect = collected
        if llm.speculative:
            own = (PassCost(one.rows, one.table[1], pace) for one in (self.costs.target, self.costs.draft_step))
            runner.drafting.policy.costs = Costs(*own)
            runner.drafting.price(runner.drafting.policy)
        if drafts is None:
            return
        head, costs = drafts.head, self.costs
        if block is not None:
            self._price(head, "draft", block.rows.at)
            self._price_writes(head, block.write)
            return
        self._price(head, "step", lambda n: costs.draft_step.at(n))
        self._price(head, "write", extend.at)
        self._price(head, "extend", extend.at)

    def _price(self, owner: Any, name: str, price: Any) -> None:
        run = getattr(owner, name)

        def counted(tokens: Any, *args: Any) -> Any:
            self.seconds += price(len(tokens))
            return run(tokens, *args)

        setattr(owner, name, counted)

    def _price_writes(self, head: Any, cost: PassCost) -> None:
        run = head.write

        def counted(aux: Any, plan: core.Plan, *args: Any) -> Any:
            self.seconds += cost.at(plan.queries)
            return run(aux, plan, *args)

        head.write = counted

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Within the context, let asking sources take time."""
        asks: Any = DraftSession.propose

        def charged(told: DraftSession, *args: Any) -> Any:
            self.seconds += ASKED / 1e3
            return asks(told, *args)

        DraftSession.propose = charged  # type: ignore[method-assign]
        try:
            yield
        finally:
            DraftSession.propose = asks

    def price(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], llm: LLM
    ) -> tuple[float, list[Any]]:
        """Seconds that requests take together, and their outputs."""
        started = self.seconds
        self.first_token = 0.0
        with self.clock():
            ids = [llm.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
            found: dict[int, Any] = {}
            while llm.unfinished:
                for event in llm.step():
                    if event.token_ids and not self.first_token:
                        self.first_token = self.seconds - started
                    if event.output is not None:
                        found[event.request_id] = event.output
        return self.seconds - started, [found[i] for i in ids]

    def rate(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], llm: LLM, batch: int
    ) -> tuple[float, list[list[int]]]:
        """Tokens a second from the first full batch of requests to the last, and all tokens.

        Requests that draft end at different times. What is left of a queue at its end decodes in smaller batches, which
        says nothing of an engine that has more to do. A prompt counts as far as its request has got by then: requests
        that start together end together, and all of their tokens count, while those that do not leave some behind.
        """
        ids = [llm.add(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        tokens: dict[int, list[int]] = {i: [] for i in ids}
        started, full = self.seconds, (0, 0.0)
        with self.clock():
            while llm.unfinished:
                for event in llm.step():
                    tokens[event.request_id] += event.token_ids
                if llm.unfinished >= batch:
                    early = sum(
                        self.costs.target.at(len(prompt)) * (1.0 - len(tokens[i]) / (p.max_tokens or 1))
                        for i, prompt, p in zip(ids, prompts, params, strict=True)
                        if tokens[i]
                    )
                    full = sum(map(len, tokens.values())), self.seconds - started - early
        return full[0] / full[1], [tokens[i] for i in ids]


class Twins:
    """The default engine and a plain one, priced; tokens must be equal."""

    def __init__(self, **options: Any) -> None:
        self._llms = LLM(**options), LLM(speculative=False, **options)
        self._counters = [Counter(llm) for llm in self._llms]

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt."""
        return self._llms[0].encode(text)

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> tuple[float, float, list[Any]]:
        """Return seconds of plain decoding, of the default, and the outputs."""
        each = zip(self._counters, self._llms, strict=True)
        (took, outputs), (alone, plain) = [counter.price(prompts, params, llm) for counter, llm in each]
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain], "speculation must not change the tokens"
        return alone, took, outputs

    def rates(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], batch: int) -> tuple[float, float]:
        """Tokens a second of the default, and of plain decoding, while batches are full."""
        each = zip(self._counters, self._llms, strict=True)
        (default, tokens), (plain, same) = [counter.rate(prompts, params, llm, batch) for counter, llm in each]
        assert tokens == same, "speculation must not change the tokens"
        return default, plain


def _params(length: int, temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, temperature=temperature, top_p=1.0, seed=seed, ignore_eos=True)


def _row(rows: dict[str, Any], name: str, runs: Sequence[tuple[float, float]]) -> None:
    """Add a row: pairs of plain and default seconds."""
    ratio = sum(plain for plain, _ in runs) / sum(took for _, took in runs)
    rows[name] = {"ratio": round(ratio, 4), "requests": [round(plain / took, 3) for plain, took in runs]}
    print(f"counted: {name}: {rows[name]['ratio']:.3f}  {rows[name]['requests']}", flush=True)


class Fresh:
    """A plain engine whose answers are remembered, beside default ones that know nothing yet; tokens must be equal.

    head: a directory of a head for the package's model; ``None``: the package's own.
    """

    def __init__(self, head: Path | None = None) -> None:
        self._options: dict[str, Any] = {"max_batch": 1, "max_context_len": 1024, "prefix_cache": False}
        self._pair = () if head is None else (model_dir(), head)
        self._plain = Counter(plain := LLM(speculative=False, **self._options)), plain
        self._known: dict[tuple[str, int, float, int], tuple[float, list[int]]] = {}
        self._default: tuple[Counter, LLM] | None = None

    def begin(self, *tail: int) -> None:
        """Use a new default engine from now on. tail: positions that its head reads before its first draft, if not the
        default."""
        if self._default is not None:
            self._default[1].close()
        llm = LLM(*self._pair, **self._options)
        for value in tail:
            llm._runner.drafting.tail = value
        self._default = Counter(llm), llm

    def run(self, text: str, length: int, temperature: float, seed: int) -> tuple[float, float, Any]:
        """Return seconds of plain decoding, of the default, and its output."""
        assert self._default is not None
        params, key = [_params(length, temperature, seed)], (text, length, temperature, seed)
        if key not in self._known:
            counter, llm = self._plain
            seconds, [out] = counter.price([llm.encode(text)], params, llm)
            self._known[key] = seconds, out.token_ids
        counter, llm = self._default
        took, [out] = counter.price([llm.encode(text)], params, llm)
        plain, tokens = self._known[key]
        assert out.token_ids == tokens, "speculation must not change the tokens"
        return plain, took, out


def _geometric(runs: Sequence[tuple[float, float, Any]]) -> float:
    return statistics.geometric_mean(plain / took for plain, took, _ in runs)


def first_requests(fresh: Fresh, lengths: Sequence[int], temperatures: Sequence[float]) -> dict[str, Any]:
    """Return the gain of a new engine's first request on code that drafts foretell, and its tokens a round."""
    rows: dict[str, Any] = {}
    for temperature in temperatures:
        for length in lengths:
            runs = []
            for seed, text in enumerate(CODE):
                fresh.begin()
                runs.append(fresh.run(text, length, temperature, seed))
            tokens, rounds = sum(len(out.token_ids) for *_, out in runs), sum(out.rounds for *_, out in runs)
            each = [round(plain / took, 3) for plain, took, _ in runs]
            row = {"ratio": round(_geometric(runs), 4), "requests": each, "tokens_a_round": round(tokens / rounds, 3)}
            rows[f"first request, code, T={temperature:g}, {length} tokens"] = row
            print(f"counted: first request, T={temperature:g}, {length} tokens: {row}", flush=True)
    return rows


def orders(fresh: Fresh, lengths: Sequence[int], temperatures: Sequence[float], times: int = 4) -> dict[str, Any]:
    """All prompts by one new engine, in several orders: a kind's ratio is the median over these."""
    rows: dict[str, Any] = {}
    prompts = [(kind, seed, text) for kind, some in KINDS.items() for seed, text in enumerate(some)]
    for temperature in temperatures:
        for length in lengths:
            found: dict[str, list[float]] = {}
            for turn in range(times):
                random.Random(turn).shuffle(order := list(prompts))
                fresh.begin()
                runs: dict[str, list[tuple[float, float, Any]]] = {}
                for kind, seed, text in order:
                    runs.setdefault(kind, []).append(fresh.run(text, length, temperature, seed))
                runs["all kinds"] = [run for some in runs.values() for run in some]
                for kind, some in runs.items():
                    ratio = sum(plain for plain, *_ in some) / sum(took for _, took, _ in some)
                    found.setdefault(kind, []).append(ratio)
                found.setdefault("all kinds, geometric mean of requests", []).append(_geometric(runs["all kinds"]))
            for kind, ratios in sorted(found.items()):
                name = f"{kind}, T={temperature:g}, {length} tokens"
                rows[name] = {"ratio": round(statistics.median(ratios), 4), "orders": [round(r, 3) for r in ratios]}
                print(f"counted: {name}: {rows[name]}", flush=True)
    return rows


def mixed(fresh: Fresh, count: int = 200) -> dict[str, Any]:
    """A long mix of requests of all kinds, lengths and temperatures by one new engine; and of one kind alone."""
    rows: dict[str, Any] = {}
    prompts = [(seed, text) for some in KINDS.values() for seed, text in enumerate(some)]
    for name, texts in [("all kinds", prompts), ("cjk", list(enumerate(KINDS["cjk"])))]:
        rng = random.Random(7)
        fresh.begin()
        runs = []
        for _ in range(count):
            seed, text = rng.choice(texts)
            runs.append(fresh.run(text, rng.choice((32, 64, 128, 256)), rng.choice((0.0, 0.7, 1.0)), seed))
        ratio = sum(plain for plain, *_ in runs) / sum(took for _, took, _ in runs)
        rows[f"{count} requests, {name}"] = {"ratio": round(ratio, 4)}
        print(f"counted: {count} requests, {name}: {ratio:.4f}", flush=True)
    return rows


def tails(kinds: Sequence[str] = ("c", "python", "json", "sql", "mixed", "cjk")) -> dict[str, Any]:
    """Gains of first requests of 256 greedy tokens, by how many positions the head reads before its first draft; "all"
    is a head that reads requests from their beginning, or not at all."""
    fresh, rows = Fresh(), dict[str, Any]()
    for tail in (16, 32, 64, None):
        runs = []
        for kind in kinds:
            for seed, text in enumerate(KINDS[kind]):
                fresh.begin(tail)
                runs.append(fresh.run(text, 256, 0.0, seed))
        each = [round(plain / took, 3) for plain, took, _ in runs]
        name = f"{'all' if tail is None else tail} positions"
        rows[name] = {"ratio": round(_geometric(runs), 4), "requests": each}
        print(f"tails: {name}: {rows[name]}", flush=True)
    return rows


def yields() -> dict[str, Any]:
    """Gains of first requests on code, 64 tokens, by the share of a level's chance that the next one keeps."""
    rows: dict[str, Any] = {}
    real = chooser._YIELD
    for share in (0.55, 0.65, real, 0.85, 1.0):
        chooser._YIELD = share
        found = first_requests(Fresh(), [64], [0.0, 1.0])
        rows[f"{share:g}"] = {name: row["ratio"] for name, row in found.items()}
        print(f"yields: {share:g}: {rows[f'{share:g}']}", flush=True)
    chooser._YIELD = real
    return rows


def counted(lengths: list[int], temperatures: list[float], cores: int = 1, turns: int = 128) -> dict[str, Any]:
    """Return ratios of plain decoding's price to that of the default, for each kind of text, temperature and length.

    Beside whole requests: second turns of a chat (``turns`` tokens each) with the prefix cache, which an engine has by
    default; requests that end long before their limit; and batches of `BATCH`. Prices do not depend on the machine, so
    that parts may run on several cores.
    """
    parts: list[tuple[str, tuple[Any, ...]]] = []
    for t in temperatures:
        parts += [("first", (n, t)) for n in lengths if n < 512]
        parts += [("orders", (n, t)) for n in lengths]
        parts += [("chats", (turns, t)), ("short", (t,)), ("batches", (turns, t))]
    parts.append(("mixed", ()))
    rows: dict[str, Any] = {}
    if cores == 1:
        for one in parts:
            rows |= _part(one)
    else:
        with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
            longest = sorted(parts, key=lambda one: -max([0, *one[1]]))
            found = {one: pool.submit(_part, one) for one in longest}
            for one in parts:
                rows |= found[one].result()
    worst = min(rows, key=lambda name: rows[name]["ratio"])
    return {"table_ms": TABLE, "worst": {"row": worst, "ratio": rows[worst]["ratio"]}, "rows": rows}


def _part(part: tuple[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the rows of a part of `counted`, by its name and arguments."""
    torch.set_num_threads(1)
    core.set_num_threads(1)
    name, args = part
    rows: dict[str, Any] = {}
    if name in ("first", "orders"):
        length, temperature = args
        return (first_requests if name == "first" else orders)(Fresh(), [length], [temperature])
    if name == "mixed":
        return mixed(Fresh())
    if name == "short":
        _short(rows, args)
    else:
        (_chats if name == "chats" else _batches)(rows, args[1:], args[0])
    return rows


def _chats(rows: dict[str, Any], temperatures: Sequence[float], length: int) -> None:
    twins = Twins(max_batch=1, max_context_len=1024)
    for temperature in temperatures:
        for kind, prompts in KINDS.items():
            turns: list[list[tuple[float, float]]] = [[], []]
            for seed, text in enumerate(prompts):
                prompt = twins.encode(text)
                for turn in turns:
                    plain, took, [out] = twins.run([prompt], [_params(length, temperature, seed)])
                    turn.append((plain, took))
                    prompt = [*prompt, *out.token_ids, *twins.encode("\n\nAnd then?\n")]
            for name, turn in zip(("first", "second"), turns, strict=True):
                _row(rows, f"{name} turn, {kind}, T={temperature:g}, {length} tokens", turn)


def _short(rows: dict[str, Any], temperatures: Sequence[float]) -> None:
    """Add rows of short requests: the limit says 512, but a stop token ends them. New engines cannot know that."""
    for temperature in temperatures:
        runs = []
        for prompts in KINDS.values():
            twins = Twins(max_batch=1, max_context_len=1024)
            for seed, text in enumerate(prompts):
                prompt = twins.encode(text)
                _, _, [whole] = twins.run([prompt], [_params(40, temperature, seed)])
                stop = SamplingParams(
                    max_tokens=512,
                    temperature=temperature,
                    top_p=1.0,
                    seed=seed,
                    ignore_eos=True,
                    stop_token_ids=[whole.token_ids[-1]],
                )
                runs.append(twins.run([[*prompt]], [stop])[:2])
        _row(rows, f"ends within 40 of 512 tokens, T={temperature:g}", runs)


def _batches(rows: dict[str, Any], temperatures: Sequence[float], length: int) -> None:
    """A queue that keeps the batch full."""
    twins = Twins(max_batch=BATCH, max_context_len=1024, prefix_cache=False)
    for temperature in temperatures:
        for kind, prompts in KINDS.items():
            some = [twins.encode(prompts[i % len(prompts)]) for i in range(4 * BATCH)]
            for i, prompt in enumerate(some):
                prompt[0] += i // len(prompts)  # greedy requests differ too
            params = [_params(length, temperature, i) for i in range(4 * BATCH)]
            _row(
                rows, f"{BATCH} at once, {kind}, T={temperature:g}, {length} tokens", [twins.rates(some, params, BATCH)]
            )
