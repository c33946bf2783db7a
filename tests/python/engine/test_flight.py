"""Rounds in flight: whatever a device runs before the host knows what the round before found, a request gets the tokens
of rounds one by one, and pages go back.

The device is simulated (`flight_world`): it runs ahead on the CPU, from its own lengths, roots and beams.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file

from flight_world import Broken, Level, Told, flying
from modelzoo import agree, read_weights, write_eagle3, write_target
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs.engine import RequestOutput, StreamEvent
from specrs.engine.drafting.plans import RoundOutcome, RoundPlan
from specrs.engine.rounds.head import Head

VOCAB, CONTEXT, EOS, BAD = 12, 96, 2, 7
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32,
}  # fmt: skip
LEVELS: list[Level] = ["round", "loop"]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"speculative": False},
    "chain": {"tree": (1, 3, 4)},
    "tree": {"tree": (2, 3, 8)},
}


@dataclass(frozen=True)
class World:
    """A model of few letters, so that an untrained head is right often enough, and stops occur.

    Attributes:
        plain: an engine without drafts, with pages in plenty.
    """

    target: Path
    draft: Path
    plain: LLM


def world_in(root: Path, **options: Any) -> World:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    target = write_target(root / "target", vocab_size=VOCAB, num_hidden_layers=3, eos_token_id=EOS,
                          max_position_embeddings=CONTEXT, **SIZES)  # fmt: skip
    letters = {letter: i for i, letter in enumerate("abcdefghi", 3)}
    tokenizer = Tokenizer(models.BPE(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, **letters}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(target / "tokenizer.json"))
    draft = write_eagle3(root / "draft", target, draft_vocab_size=None, aux_layers=(0, 1, 2), **SIZES, **options)
    agree(target, draft, slope=0.8)
    return World(target, draft, LLM(target, prefix_cache=False, max_batch=4, max_context_len=CONTEXT))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_in(tmp_path_factory.mktemp("flight"))


# -- what a run is ----------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """Requests, when each arrives, and when somebody aborts one (by step)."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    arrivals: list[int]
    aborts: dict[int, int] = field(default_factory=dict)


def work(
    rng: random.Random, count: int, *, penalties: float = 0.1, tokens: Sequence[int] = range(3, VOCAB), **fixed: Any
) -> Work:
    """Prompts that share beginnings; greedy and sampled; ended by EOS, stop tokens, stop strings, their length, or the
    context."""
    stem = rng.choices(tokens, k=CONTEXT)
    prompts, params = [], []
    for _ in range(count):
        own = rng.choices(tokens, k=rng.randrange(1, 4))
        prompts.append(stem[: rng.choice([0, 0, 3, 8, 17, rng.randrange(30), CONTEXT - 20])] + own)
        options: dict[str, Any] = {
            "max_tokens": rng.choice([1, rng.randrange(2, 10), *rng.choices(range(10, 41), k=3), 40]),
            "temperature": rng.choice([0.0, 0.5, 0.8]), "seed": rng.randrange(1000),
            "ignore_eos": rng.random() < 0.6,
            "stop": rng.choice([(), (), ("".join(rng.choices("defh", k=3)),)]),
            "stop_token_ids": rng.choice([(), (), (), (), (rng.randrange(3, VOCAB),)]),
            "logit_bias": rng.choice([{}, {EOS: -2.0}, {EOS: -4.0}]),
            "presence_penalty": 0.3 if rng.random() < penalties else 0.0,
        }  # fmt: skip
        params.append(SamplingParams(**{**options, **fixed}))
    return Work(prompts, params, [rng.choice([0, 0, 0, 2, rng.randrange(12), rng.randrange(40)]) for _ in prompts])


def told(output: RequestOutput) -> tuple[Any, ...]:
    """Return what must not depend on when rounds ran."""
    e = output.error
    error = None if e is None else (e.what, e.value, e.position, e.index, e.row, e.kind)
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, error


@dataclass
class Ran:
    """Events of a run, by the request's place in the work."""

    outputs: dict[int, RequestOutput] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    raised: list[BaseException] = field(default_factory=list)  # errors, with what their tracebacks keep
    most_events: int = 0  # most events of one request in one step

    def take(self, events: Sequence[StreamEvent], place: dict[int, int]) -> None:
        seen: dict[int, int] = {}
        for event in events:
            i = place[event.request_id]
            assert i not in self.outputs, f"request {i}: an event behind its last"
            seen[i] = seen.get(i, 0) + 1
            self.tokens.setdefault(i, []).extend(event.token_ids)
            self.text[i] = self.text.get(i, "") + event.text
            if event.output is not None:
                self.outputs[i] = event.output
        self.most_events = max([self.most_events, *seen.values()])


def run(llm: LLM, job: Work, bound: int = 2000, each: Callable[[int], None] = lambda _: None) -> Ran:
    """Step until nothing is left. The engine goes on after any error."""
    ran, place, step = Ran(), {}, 0
    while len(place) < len(job.prompts) or llm.unfinished:
        assert step < bound, f"no end after {bound} steps, {len(ran.raised)} errors"
        for i, at in enumerate(job.arrivals):
            if at == step:
                place[llm.add(job.prompts[i], job.params[i])] = i
        each(step)
        try:
            for request, i in place.items():
                if job.aborts.get(step) == i and (event := llm.abort(request)) is not None:
                    ran.take([event], place)
            ran.take(llm.step(), place)
        except (Broken, KeyboardInterrupt) as error:
            ran.raised.append(error)
            assert llm.audit()["leased_sequences"] == 0
        llm.audit()
        step += 1
    return ran


def idle(llm: LLM) -> None:
    """Check that nothing is left behind but the prefix cache."""
    counts = llm.audit()
    assert llm.unfinished == 0 and llm._runner._flight is None and not llm._runner._collected
    assert (counts["sequences"], counts["leased_sequences"]) == (0, 0)
    assert counts["free_pages"] + counts["cached_pages"] == counts["total_pages"]


def check(world: World, job: Work, ran: Ran) -> None:
    """Check that tokens and text are those of plain decoding, and that every event came once and in order."""
    wanted = world.plain.generate(job.prompts, job.params, on_error="return")
    assert sorted(ran.outputs) == list(range(len(job.prompts)))
    for i, want in enumerate(wanted):
        got = ran.outputs[i]
        if got.finish_reason == "abort":
            assert got.token_ids == want.token_ids[: len(got.token_ids)], f"aborted request {i}"
        else:
            assert told(got) == told(want), f"request {i}"
        assert (ran.tokens[i], ran.text[i]) == (got.token_ids, got.text), f"request {i}: events"
        assert sum(n * c for n, c in enumerate(got.accepted_lengths)) == max(len(got.token_ids) - 1, 0)


def options_of(shape: str, page: int, **more: Any) -> dict[str, Any]:
    return {"page_size": page, "max_batch": 4, "max_context_len": CONTEXT, **SHAPES[shape], **more}


every = pytest.mark.parametrize(
    ("level", "shape", "page"),
    [(level, shape, page) for level in LEVELS for shape in SHAPES for page in (1, 4) if (shape, page) != ("tree", 1)],
)


# -- tokens -----------------------------------------------------------------------------------------------------------


@every
def test_tokens_are_those_of_rounds_one_by_one(
    world: World, level: Level, shape: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Told(level=level)
    rng = random.Random(f"{shape} {page}")
    options = options_of(shape, page, prefill_chunk=16)
    llm = flying(world.target, world.draft, monkeypatch, device, **options)
    several = 0
    for _ in range(3):
        job = work(rng, 8)
        ran = run(llm, job)
        check(world, job, ran)
        idle(llm)
        several = max(several, ran.most_events)
    assert device.ahead > 20, device
    assert several > 1, "nobody had two rounds in one step"


@every
def test_drafts_are_those_of_rounds_one_by_one(
    world: World, level: Level, shape: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong root, or wrong features, would cost acceptance and no token."""
    device = Told(level=level)
    job = work(random.Random(page), 20, penalties=0.0)
    options = options_of(shape, page, prefix_cache=False)
    ordinary = run(LLM(world.target, world.draft, **options), job)
    llm = flying(world.target, world.draft, monkeypatch, device, **options)
    ran = run(llm, job)
    idle(llm)
    for i, want in ordinary.outputs.items():
        got = ran.outputs[i]
        assert (told(got), got.accepted_lengths, got.drafted, got.rounds) == (
            told(want), want.accepted_lengths, want.drafted, want.rounds), i  # fmt: skip
    assert device.ahead > 20
    if shape != "plain":
        assert sum(sum(o.drafted) for o in ran.outputs.values()) > 20


@every
@pytest.mark.parametrize("cache", [True, False], ids=["cached", "uncached"])
def test_tiny_pools(
    world: World, level: Level, shape: str, page: int, cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages for more rounds are not always there; then fewer run, or none, and requests are preempted as ever."""
    device, preempted = Told(level=level), 0
    rng = random.Random(f"{shape} {page} {cache}")
    for done in range(8):
        if done > 1 and device.ahead > 20 and preempted:
            break
        job = work(rng, 7)
        options = options_of(shape, page, prefill_chunk=rng.choice([5, 64]), prefix_cache=cache)
        pages = CONTEXT // page + rng.choice([3, 6])
        llm = flying(world.target, world.draft, monkeypatch, device, **options, num_pages=pages)
        preempt = llm._scheduler._preempt

        def counted(request: Any, preempt: Any = preempt) -> None:
            nonlocal preempted
            preempted += 1
            preempt(request)

        llm._scheduler._preempt = counted  # type: ignore[method-assign]
        check(world, job, run(llm, job))
        idle(llm)
    assert device.ahead > 0 and preempted > 0, (device, preempted)


@every
def test_a_prompt_seen_before(
    world: World, level: Level, shape: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that a request left in the prefix cache from within a flight are whole: a later request that goes on from
    there has its tokens, and drafts like a request that computed everything itself."""
    device, rng = Told(level=level), random.Random(page)
    options = options_of(shape, page, max_batch=2)
    llm = flying(world.target, world.draft, monkeypatch, device, **options)
    ordinary = LLM(world.target, world.draft, **options, prefix_cache=False)
    shared = 0
    for seed in range(6):
        first = [rng.randrange(3, VOCAB) for _ in range(9)]
        params = [SamplingParams(max_tokens=n, temperature=0.5, seed=seed, stop=("d",)) for n in (13, 18)]
        for engine in (llm, ordinary):
            said = engine.generate([first, first[:5]], params)
            outputs = engine.generate([first + said[0].token_ids + [3, 4], first[:5] + said[1].token_ids], params)
            if engine is llm:
                ahead = outputs
        assert [(told(o), o.accepted_lengths) for o in ahead] == [(told(o), o.accepted_lengths) for o in outputs], seed
        shared += sum(o.usage.cached_tokens for o in ahead)
        idle(llm)
    assert shared > 20


def test_prefill_gets_the_pages_of_rounds_that_nobody_launched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flight has pages for as far as it could get. Who joins does not wait for the end of those who fly."""
    llm = flying(world.target, world.draft, monkeypatch, Told(level="loop"), **options_of("chain", 1), num_pages=60)
    first = llm.add([3, 4, 5], SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        llm.step()
    pool = llm._runner.pages.pool
    assert pool.stats()["free_pages"] < 34 <= 60 - 2 * llm._scheduler._admitted[0].committed
    second = llm.add([6] * 34, SamplingParams(max_tokens=1))
    ended: list[int] = []
    while llm.unfinished:
        ended += [e.request_id for e in llm.step() if e.output is not None]
    assert ended == [second, first]
    idle(llm)


# -- requests that leave, and errors ----------------------------------------------------------------------------------


@every
def test_aborts_at_random_steps(
    world: World, level: Level, shape: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, rng = Told(level=level), random.Random(f"{shape} {page}")
    llm = flying(world.target, world.draft, monkeypatch, device, **options_of(shape, page))
    aborted = 0
    for done in range(8):
        if done > 1 and aborted > 2:
            break
        job = work(rng, 8)
        job.aborts = {rng.randrange(30): rng.randrange(8) for _ in range(5)}
        ran = run(llm, job)
        check(world, job, ran)
        aborted += sum(o.finish_reason == "abort" for o in ran.outputs.values())
        idle(llm)
    assert aborted > 2


@pytest.mark.parametrize("level", LEVELS)
def test_streams_that_are_closed_early(world: World, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = flying(world.target, world.draft, monkeypatch, Told(level=level), **options_of("chain", 4))
    job = work(random.Random(1), 6, penalties=0.0, stop=(), stop_token_ids=(), ignore_eos=True, max_tokens=40)
    wanted = world.plain.generate(job.prompts, job.params)
    for events in (1, 5, 9, 14):
        left, kept = llm.stream(job.prompts[:3], job.params[:3]), llm.stream(job.prompts[3:], job.params[3:])
        for _ in range(events):
            next(left)
            next(kept)
        assert llm._runner._flight is not None or events == 1
        left.close()
        outputs = [e.output for e in kept if e.output is not None]
        outputs.sort(key=lambda o: o.request_id)
        assert [told(o) for o in outputs] == [told(w) for w in wanted[3:]]
        idle(llm)


SITES = ("launch", "launched", "collect", "commit", "prefill", "extend", "draft", "first")


@every
@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt])
def test_errors_anywhere(
    world: World, level: Level, shape: str, page: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on, and what was collected before an error is told by the next step."""
    rng, seen = random.Random(f"{shape} {page} {level}"), set()

    def fails(site: str) -> None:
        if rng.random() < 0.08:
            seen.add(site)
            raise error(site)

    device = Told(level=level, refuses=lambda: rng.random() < 0.1)
    llm = flying(world.target, world.draft, monkeypatch, device, **options_of(shape, page, prefill_chunk=16))
    always = {"launch", "launched", "collect", "commit", "first", "prefill"}
    for done in range(8):
        if done > 1 and device.ahead > 10 and always <= seen:
            break
        job = work(rng, 8)
        device.fails = fails
        ran = run(llm, job)
        device.fails = lambda _: None
        check(world, job, ran)
        idle(llm)
    assert device.ahead > 10
    assert always <= seen <= set(SITES)


@pytest.mark.parametrize("level", LEVELS)
def test_an_error_while_what_was_left_is_aborted(world: World, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next caller of the engine gets the error; the requests of a closed stream are aborted all the same."""
    device = Told(level=level)
    llm = flying(world.target, world.draft, monkeypatch, device, **options_of("chain", 4))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    stream = llm.stream([[3], [4]], params)
    while llm._runner._flight is None:
        next(stream)

    def broken(site: str) -> None:
        if site == "collect":
            device.fails = lambda _: None
            raise Broken

    device.fails = broken
    with pytest.raises(Broken):
        stream.close()
    assert llm.generate([[5]], params)[0].token_ids == world.plain.generate([[5]], params)[0].token_ids
    idle(llm)


@pytest.mark.parametrize("level", LEVELS)
def test_a_fault_of_a_round_whose_requests_have_ended_is_theirs(
    world: World, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Told(level=level)
    llm = flying(world.target, world.draft, monkeypatch, device, **options_of("chain", 4))

    def fails(site: str) -> None:
        flight = llm._runner._flight
        if site == "collect" and flight is not None and len(flight.dropped) == len(flight.requests):
            error = core.OutOfBoundsError("index 9 is outside the cache")
            error.request = 0
            raise error

    device.fails = fails
    text = world.plain.generate([[3]], SamplingParams(max_tokens=40, ignore_eos=True))[0].text
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=text[9:15])  # which no device foresees
    ended, errors = llm.add([3], params), []
    while llm.unfinished:
        try:
            llm.step()
        except core.OutOfBoundsError as error:
            errors.append(error.request)
    assert errors == [ended], "the round behind the last token was waited for"
    device.fails = lambda _: None
    assert llm.generate([[5]], params)[0].token_ids == world.plain.generate([[5]], params)[0].token_ids
    idle(llm)


@pytest.mark.parametrize("level", LEVELS)
def test_close_with_rounds_in_flight(world: World, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Told(level=level)
    llm = flying(world.target, world.draft, monkeypatch, device, **options_of("chain", 4))
    pool = llm._runner.pages.pool
    for prompt in ([3, 4, 5], [6]):
        llm.add(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(4):
        llm.step()
    assert pool.audit()["leased_sequences"] == 2
    llm.close()
    assert device.abandoned == 1
    assert pool.audit()["leased_sequences"] == 0


# -- NaN --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A request that emits `BAD` fails at the position after it; the head stays sound."""
    world = world_in(tmp_path_factory.mktemp("poisoned"), own_embedding=True)
    weights = read_weights(world.target)
    weights["model.embed_tokens.weight"][BAD] = math.nan
    save_file(weights, world.target / "model.safetensors")
    return World(world.target, world.draft, LLM(world.target, prefix_cache=False, max_context_len=CONTEXT))


@every
def test_a_lane_with_nan_ends_alone(
    poisoned: World, level: Level, shape: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that were overwritten before anybody saw that they were NaN are computed once more, and say the same."""
    device, rng, failed = Told(level=level), random.Random(f"{shape} {page}"), 0
    llm = flying(poisoned.target, poisoned.draft, monkeypatch, device, **options_of(shape, page, prefill_chunk=8))
    for _ in range(5):
        job = work(rng, 10, penalties=0.0, tokens=[t for t in range(3, VOCAB) if t != BAD])
        ran = run(llm, job)
        check(poisoned, job, ran)
        idle(llm)
        failed += sum(o.finish_reason == "error" for o in ran.outputs.values())
        assert all(o.draft_error is None for o in ran.outputs.values())
    assert failed > 3 and device.lost > 1, (failed, device)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_head_with_nan_costs_drafts_alone(
    world: World, level: Level, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = world_in(tmp_path, own_embedding=True)
    weights = read_weights(other.draft)
    weights["embed_tokens.weight"][BAD] = math.nan
    save_file(weights, other.draft / "model.safetensors")
    device, rng, gave_up = Told(level=level), random.Random(shape), []
    llm = flying(other.target, other.draft, monkeypatch, device, **options_of(shape, 4))
    for _ in range(3):
        job = work(rng, 8, penalties=0.0)
        ran = run(llm, job)
        check(other, job, ran)
        idle(llm)
        for o in ran.outputs.values():
            if o.draft_error is not None:
                assert o.draft_error.request == o.request_id
                gave_up.append(o.draft_error.what)  # fault of what prefill met, draft KV
    assert gave_up.count("draft logits") > 1 and device.ahead > 20
    assert device.unsound <= 2 * gave_up.count("draft logits"), "rounds go on to ask a head that cannot draft"


# -- those who look on ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_who_looks_on_sees_whole_rounds(world: World, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds in flight are collected first, and are not told of; from then on each round runs alone."""
    device = Told(level=level)
    llm = flying(world.target, world.draft, monkeypatch, device, **options_of("chain", 4))
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.5, seed=1)
    ids = [llm.add([3, 4, 5], params), llm.add([6], params)]
    got: dict[int, list[int]] = {i: [] for i in ids}

    def step() -> int:
        events = llm.step()
        for e in events:
            got[e.request_id] += e.token_ids
        return sum(len(e.token_ids) for e in events)

    for _ in range(4):
        step()
    assert llm._runner._flight is not None
    seen: list[int] = []
    with llm.recording(round=2) as recorder, llm.watching(lambda _, a: seen.append(sum(map(len, a.tokens)))):
        step()
        assert not seen and llm._runner._flight is None
        ahead = device.ahead
        assert [step() for _ in range(3)] == seen
        assert device.ahead == ahead
    assert recorder.capsule is not None and recorder.capsule.round == 2
    while llm.unfinished:
        step()
    assert device.ahead > ahead
    wanted = world.plain.generate([[3, 4, 5], [6]], params)
    assert [got[i] for i in ids] == [w.token_ids for w in wanted]
    idle(llm)


def test_those_who_draft_may_have_ended(world: World) -> None:
    """A later round of a flight may tell of requests without drafts alone."""
    llm = LLM(world.target, world.draft, max_batch=2, max_context_len=CONTEXT)
    trees = core.TreeBatch.from_parents([[-1]], [[3]])
    params = SimpleNamespace(speculative=False)
    request = SimpleNamespace(request_id=0, finish_reason=None, proposed=0, drafting_rounds=0, params=params)
    plan: Any = RoundPlan([request, request], head=[True, False], levels=3)  # type: ignore[arg-type]
    verified: Any = SimpleNamespace(trees=trees)
    passed: Any = [SimpleNamespace(request=request, tokens=[3], kept=1)]
    llm._runner.drafting.observe(RoundOutcome(plan, None, [1], passed, verified, 0.1))


def test_a_cost_model_decides_flights(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an adaptive engine, requests that draft fly beside those that do not."""
    device, rng = Told(level="round"), random.Random(4)
    llm = flying(world.target, world.draft, monkeypatch, device, max_batch=4, max_context_len=CONTEXT, page_size=4)
    for _ in range(4):
        job = work(rng, 8, penalties=0.0)
        check(world, job, run(llm, job))
        idle(llm)
    assert device.ahead > 10


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("page", [1, 4])
def test_requests_that_stop_drafting_fly_on_and_come_back(
    world: World, page: int, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their plain rounds keep no features, and the head begins where the target has run again."""
    device, rng = Told(level=level), random.Random(page)
    llm = flying(world.target, world.draft, monkeypatch, device, max_batch=4, max_context_len=CONTEXT, page_size=page)
    drafting: Any = llm._runner.drafting
    drafting.tail = 5
    monkeypatch.setattr(drafting, "pays", lambda *_: rng.random() < 0.3)
    for _ in range(4):
        job = work(rng, 8, penalties=0.0)
        check(world, job, run(llm, job))
        idle(llm)
    assert device.ahead > 10 and device.recalled > 20


@pytest.mark.parametrize("level", LEVELS)
def test_requests_draft_on_after_a_flight_was_given_up(
    world: World, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roots of the flight are gone; the head runs over the last positions again."""
    device = Told(level=level)
    llm = flying(world.target, world.draft, monkeypatch, device, **options_of("chain", 4))
    ids = [llm.add([3, 4, i], SamplingParams(max_tokens=60, ignore_eos=True)) for i in (5, 6)]
    steps, outputs = 0, dict[int, RequestOutput]()
    while llm.unfinished:
        steps += 1
        if steps in (6, 9):
            llm._runner.abandon()
        for event in llm.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
    for i in ids:
        assert outputs[i].drafting_rounds >= outputs[i].rounds - 3, (outputs[i].drafting_rounds, outputs[i].rounds)
    wanted = world.plain.generate([[3, 4, 5], [3, 4, 6]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert [outputs[i].token_ids for i in ids] == [w.token_ids for w in wanted]
    assert device.recalled > 0
    idle(llm)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("call", [1, 3, 6], ids=["first chunk", "last chunk", "round"])
@pytest.mark.parametrize("flies", [False, True])
def test_an_interrupt_before_features_are_kept_costs_drafts_alone(
    world: World, flies: bool, call: int, adaptive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positions are committed by then. A head that needs their features gives the request up, or has them made."""
    options: dict[str, Any] = {"page_size": 4, "prefill_chunk": 16, "max_context_len": CONTEXT}
    options |= {} if adaptive else {"tree": (2, 2, 4)}
    make = partial(flying, monkeypatch=monkeypatch, told=Told()) if flies else LLM
    llm, keep, calls = make(world.target, world.draft, **options), Head.keep, count(1)

    def interrupted(*args: Any) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        keep(*args)

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    monkeypatch.setattr(Head, "keep", interrupted)
    llm.add([1, 2, 3, 4, 5] * 8, params)
    outputs, interrupts = list[RequestOutput](), 0
    for _ in range(80):
        if not llm.unfinished:
            break
        try:
            outputs += [event.output for event in llm.step() if event.output is not None]
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    assert outputs[0].token_ids == world.plain.generate([[1, 2, 3, 4, 5] * 8], params)[0].token_ids
    idle(llm)
