"""The gate in the engine: what a request that drafts little, or not at all, costs beside plain decoding.

Whether the head follows a request is forced here where it matters; `test_policy` has the policy's own choices.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch.utils.dlpack import from_dlpack

from drafts_world import VOCAB, Seen, Watched, agree, choosing, head_for, reference
from gate_counted import Twins
from modelzoo import Pair, write_target
from reference_drafts import Tree
from specrs import LLM, SamplingParams
from specrs.drafters import Proposal
from specrs.engine.drafting.budget import RATE
from specrs.engine.drafting.chooser import TAIL, TreePolicy
from specrs.engine.drafting.plans import RoundPlan


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("gate")
    target = write_target(root / "target", vocab_size=VOCAB, num_hidden_layers=3, eos_token_id=None, bos_token_id=None)
    return Pair(target, head_for(target, root / "head"))


class Counted:
    """An engine whose passes are counted, by rows."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm = llm
        self.target: list[int] = []
        self.head: list[int] = []
        executor: Any = llm._runner.executor
        self._count(monkeypatch, executor.target, "forward", self.target)
        if executor.drafts is not None:
            for name in ("extend", "step"):
                self._count(monkeypatch, executor.drafts.head, name, self.head)

    def _count(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, rows: list[int]) -> None:
        run: Callable[..., Any] = getattr(owner, name)

        def counted(tokens: Any, *args: Any) -> Any:
            rows.append(len(tokens))
            return run(tokens, *args)

        monkeypatch.setattr(owner, name, counted)

    def turn(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], int]:
        """A request's tokens and how many of its prompt were cached."""
        self.target.clear()
        self.head.clear()
        [out] = self.llm.generate([list(prompt)], SamplingParams(max_tokens=max_tokens))
        self.llm.audit()
        return out.token_ids, out.usage.cached_tokens


def policy_of(llm: LLM) -> TreePolicy:
    return llm._runner.drafting.policy


def begins(llm: LLM, tail: int | None) -> None:
    """The head may begin anywhere, so many positions before its first draft, or reads requests from their beginning."""
    llm._runner.drafting.tail = tail


def decide(monkeypatch: pytest.MonkeyPatch, llm: LLM, follows: bool, drafts: bool = False) -> None:
    """The head follows every request from its prompt on, or none, and drafts in all rounds, or in none."""
    monkeypatch.setattr(llm._runner.drafting, "follows", lambda *_: follows)
    monkeypatch.setattr(llm._runner.drafting, "warms", lambda *_: True)
    monkeypatch.setattr(llm._runner.drafting, "pays", lambda r, *_: drafts or (r.head.root is None and r.produced < 2))
    monkeypatch.setattr(policy_of(llm), "deepen", lambda *_: True)
    gathering = llm._runner.drafting.gathering
    choosing(gathering, len, monkeypatch)


PROMPT = [1, 2, 3, 4, 5, 0, 1, 3, 5, 2]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_second_turn_computes_no_more_than_plain_decoding(
    pair: Pair, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head does not follow the first turn, so that there is no draft KV of its answer; its target KV is shared."""
    seen = []
    for llm in (LLM(pair.target, pair.draft, page_size=page_size),
                LLM(pair.target, speculative=False, page_size=page_size)):  # fmt: skip
        if llm.speculative:
            decide(monkeypatch, llm, False)
        run = Counted(llm, monkeypatch)
        answer, _ = run.turn(PROMPT, 40)
        first = list(run.target)
        again, cached = run.turn([*PROMPT, *answer, 2, 2], 8)
        seen.append((answer, again, cached, first, list(run.target)))
        assert not run.head, "nothing pays for passes of the head over a prompt that it does not follow"
    assert seen[0] == seen[1]
    assert seen[0][2] == 49 // page_size * page_size


@pytest.mark.parametrize("anywhere", [False, True])
def test_a_head_given_up_midway_shares_all_that_the_target_computed(
    pair: Pair, anywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(pair.target, pair.draft, page_size=4)
    begins(llm, TAIL if anywhere else None)
    decide(monkeypatch, llm, True)
    run = Counted(llm, monkeypatch)
    answer, _ = run.turn(PROMPT, 40)
    assert run.head == [len(PROMPT)]
    pool = llm._runner.pages.pool
    row, shared, drafted = pool.cache_lookup([*PROMPT, *answer])
    assert (shared, drafted) == (48, 8)
    pool.release([row])
    _, cached = run.turn([*PROMPT, *answer, 2, 2], 8)
    assert cached == 48, "nobody reads a prompt again for the head alone"
    decide(monkeypatch, llm, False)
    _, cached = run.turn([*PROMPT, *answer, 2, 2, 1], 8)
    assert cached == 52


def trees(run: Watched, request: int) -> list[Tree]:
    return [seen.tree for seen in run.of(request) if len(seen.tree.tokens) > 1]


class Begun:
    """Where each request's draft KV begins, as its rounds draft."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: dict[int, list[int]] = {}
        head = llm._runner.head
        assert head is not None
        draft = head._step_by_step

        def kept(plan: RoundPlan) -> Any:
            for r in plan.drafting:
                self.rounds.setdefault(r.request_id, []).append(r.head.first)
            return draft(plan)

        monkeypatch.setattr(head, "_step_by_step", kept)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_head_that_begins_late_drafts_as_one_that_sees_nothing_before(
    pair: Pair, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of a batch stop and go on drafting at random, over shared prefixes and chunks; each round's trees are
    those of a head whose text begins where its draft KV does. What stands in the pages before is NaN."""
    rng = random.Random(page_size)
    llm = LLM(pair.target, pair.draft, page_size=page_size, prefill_chunk=7, max_batch=3)
    run, tail = Watched(llm), 3
    begins(llm, tail)
    decide(monkeypatch, llm, True)
    monkeypatch.setattr(llm._runner.drafting, "pays", lambda *_: rng.random() < 0.3)
    begun = Begun(llm, monkeypatch)
    from_dlpack(llm._runner.executor.drafts.cache.tensor).fill_(math.nan)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 9, 23, 40)]
    for prompt in (*prompts, [*prompts[3], 1, 2, 0], [*prompts[2], 3]):
        run.add(prompt, 60)
    run.finish()
    shape = llm._runner.geometry.shape
    want = reference(pair, (shape.topk, shape.steps, shape.draft_tokens))
    rounds, firsts = list[Seen](), list[int]()
    for request, starts in begun.rounds.items():
        assert all(first % page_size == 0 for first in starts) and starts == sorted(starts)
        rounds += [seen for seen in run.of(request) if len(seen.tree.tokens) > 1]
        firsts += starts
    agree(want, rounds, firsts=firsts)
    assert sum(first > 0 for first in firsts) > 20 and len(set(firsts)) > (1 if page_size == 16 else 3), firsts


# -- books -------------------------------------------------------------------------------------------------------------


def test_a_preempted_request_keeps_its_account(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preemption is no ending: what a request lost before, it has lost."""
    llm = LLM(pair.target, pair.draft, page_size=4, max_batch=4, num_pages=40)
    decide(monkeypatch, llm, True, True)
    scheduler, drafting = llm._scheduler, llm._runner.drafting
    requests = [llm.add([i, *PROMPT], SamplingParams(max_tokens=40)) for i in range(4)]
    accounts: dict[int, Any] = {}
    preempted = set()
    while llm.unfinished:
        llm.step()
        preempted |= {r.request_id for r in scheduler._waiting if r.request_id in accounts}
        for request, account in drafting._accounts.items():
            assert accounts.setdefault(request, account) is account
    assert preempted and set(accounts) == set(requests)
    assert not drafting._accounts


def test_an_abort_closes_the_books(pair: Pair) -> None:
    """The books close for a request that runs, for one that was preempted, and for one that never began."""
    llm = LLM(pair.target, pair.draft, max_batch=2, page_size=4)
    scheduler = llm._scheduler
    one, two, three = (llm.add([i, *PROMPT], SamplingParams(max_tokens=60)) for i in range(3))
    for _ in range(5):
        llm.step()
    scheduler._preempt(scheduler._admitted[-1])
    for request in (one, two, three):
        event = llm.abort(request)
        assert event is not None and event.output is not None and event.output.finish_reason == "abort"
    assert not llm._runner.drafting._accounts
    counts = llm.audit()
    assert counts["owned_pages"] == counts["cached_pages"]


def test_the_first_request_of_an_engine_drafts_from_its_first_rounds() -> None:
    """Costs are counted prices, so that no other work on the machine decides the test."""
    for text in ("class Stack:", "def read(path):\n    with open("):
        twins = Twins(max_batch=1, max_context_len=512)
        plain, took, [out] = twins.run([twins.encode(text)], [SamplingParams(max_tokens=64, temperature=0.0)])
        assert plain > 1.5 * took and out.rounds < 24, (text, plain / took, out.rounds)


def test_short_answers_cost_little() -> None:
    """Each may lose a round, so that the engine stops them soon."""
    twins = Twins(max_batch=1, max_context_len=512)
    whole = [0.0, 0.0]
    for text in ("class Stack:", "The harbour was quiet that morning, and") * 20:
        params = [SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)]
        plain, took, _ = twins.run([twins.encode(text)], params)
        whole = [whole[0] + plain, whole[1] + took]
    assert whole[1] <= 1.03 * whole[0]


def test_a_batch_drafts_by_default_where_that_wins() -> None:
    """Costs are counted prices, so that no other work on the machine decides the test."""
    twins = Twins(max_batch=4, max_context_len=512)
    texts = ["def read(path):\n    with open(", "class Stack:\n    def __init__(self):\n        ",
             "import os\nimport sys\n\n\ndef main():\n", "for i in range(10):\n    print("]  # fmt: skip
    params = [SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)] * 32
    plain, took, outputs = twins.run([[i, *twins.encode(text)] for i in range(4, 12) for text in texts], params)
    assert plain > 1.05 * took
    assert sum(sum(o.drafted) > 20 for o in outputs[16:]) >= 12


def test_outputs_of_a_prompt_prefill_no_more_than_without_a_head() -> None:
    """A head that begins late has no entries to write behind a complete prompt, so that its pages can be shared."""
    prompt, prefilled = [i * i % VOCAB for i in range(75)], []
    for speculative in (True, False):
        twin = Twins(max_batch=8, max_context_len=256, page_size=16)._llms[0 if speculative else 1]
        if speculative:
            twin._runner.drafting.follows = lambda *_: True  # type: ignore[method-assign]
        twin.generate([prompt], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, n=4))
        prefilled.append(twin._scheduler.prefilled)
    assert prefilled[0] == prefilled[1]


class Interrupts:
    """A drafter that is interrupted as it learns from its first tree."""

    name, depth, left = "interrupts", 4, 1

    def begin(self, request: Any) -> Interrupts:
        return self

    def extend(self, tokens: Sequence[int]) -> None:
        """Nothing to learn."""

    def propose(self, nodes: int, depth: int) -> Proposal:
        return Proposal([-1], [1], [0.5])

    def bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing to free."""

    def observe(self, tokens: Sequence[int], top: Sequence[Sequence[int]]) -> None:
        if self.left:
            self.left -= 1
            raise KeyboardInterrupt


def test_an_interrupt_in_a_drafter_leaves_the_heads_books_right(pair: Pair) -> None:
    """The head has run over what the round accepted, whatever a user's code does behind that."""
    prompt, params = [i * i % VOCAB for i in range(20)], SamplingParams(max_tokens=30)
    [want] = LLM(pair.target, speculative=False).generate([prompt], params)
    llm = LLM(pair.target, pair.draft, drafters=[Interrupts(), "head"], tree=(2, 3, 8), page_size=4)
    llm.add(prompt, params)
    out, interrupted = None, 0
    while llm.unfinished:
        try:
            for event in llm.step():
                out = event.output or out
        except KeyboardInterrupt:
            interrupted += 1
            [r] = llm._scheduler._admitted
            assert r.committed == len(r.tokens) - 1 and r.lag == 0 and r.head.root is not None
    assert interrupted == 1 and out is not None and out.token_ids == want.token_ids
    assert out.draft_error is None


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_head_that_may_begin_anywhere_is_not_given_up_for_what_waits(
    pair: Pair, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last positions are kept, as pages allow, however long a request decodes plainly."""
    llm = LLM(pair.target, pair.draft, page_size=page_size, max_context_len=512)
    decide(monkeypatch, llm, True)
    llm.add(PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))
    most = 0
    while llm.unfinished:
        llm.step()
        for r in llm._scheduler._admitted:
            assert r.head.followed or r.remaining < 5  # near its end it waits for no more drafts
            most = max(most, r.lag)
    assert 32 <= most < 32 + page_size


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_features_are_kept_only_while_drafts_may_soon_be_paid(pair: Pair, page_size: int) -> None:
    """A request whose bucket is empty keeps none until it is nearly full enough, and then drafts behind the positions
    that it has kept; tokens stay those of plain decoding."""
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    [want] = LLM(pair.target, speculative=False).generate([PROMPT], params)
    llm = LLM(pair.target, pair.draft, page_size=page_size, max_context_len=512)
    drafting = llm._runner.drafting
    llm.add(PROMPT, params)
    events = llm.step()
    [r] = llm._scheduler._admitted
    account, cold, back = drafting.account(r), 0, 0
    account.request.pay(account.request.left + 100 * RATE)  # what it earns by 100 tokens
    account.engine.left = 1e9
    while llm.unfinished:
        empty = account.left(1) <= -RATE * (TAIL + page_size)
        events += llm.step()
        if r.finish_reason is None:
            assert r.head.warm != empty and (r.head.warm or r.head.features is None)
            cold, back = cold + (empty and not back), back or (r.drafting_rounds > 0 and r.head.first)
    assert events[-1].output is not None and events[-1].output.token_ids == want.token_ids
    assert events[-1].output.draft_error is None
    assert 100 - TAIL - page_size - 2 < cold < 100, "it was empty for so many tokens"
    assert back and back >= cold, "the head has read what came behind these"
    llm.audit()


def test_a_request_that_warms_up_disturbs_none_that_drafts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head begins behind the end of the one, by less than a page, while it drafts several levels for the other."""
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    plain = LLM(pair.target, speculative=False).generate([PROMPT, PROMPT[:5]], params)
    llm = LLM(pair.target, pair.draft, page_size=64, max_context_len=512, max_batch=2)
    monkeypatch.setattr(TreePolicy, "deepen", lambda *_: True)
    drafting = llm._runner.drafting
    for prompt in (PROMPT, PROMPT[:5]):
        llm.add(prompt, params)
    outputs, emptied, ahead = [], False, 0
    while llm.unfinished:
        outputs += [event.output for event in llm.step() if event.output is not None]
        if len(running := llm._scheduler._admitted) == 2:
            drafts, waits = (drafting.account(r) for r in running)
            drafts.request.left, drafts.engine.left = 16.0, 1e9
            if not emptied:
                waits.request.left, emptied = -RATE * (TAIL + 64 + 5), True  # what it earns by so many tokens, and five
            ahead += running[1].head.warm and running[1].head.first > running[1].committed
    assert ahead, "the head was to begin behind the end"
    by_prompt = sorted(outputs, key=lambda out: out.request_id)
    assert [out.token_ids for out in by_prompt] == [out.token_ids for out in plain]


def test_a_cool_request_that_is_read_again_is_followed(pair: Pair) -> None:
    """Preempted while its bucket was empty, and admitted when it can pay: its features are kept from then on."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    [want] = LLM(pair.target, speculative=False).generate([PROMPT], params)
    llm = LLM(pair.target, pair.draft, max_context_len=512)
    llm.add(PROMPT, params)
    events = [event for _ in range(12) for event in llm.step()]
    [r] = llm._scheduler._admitted
    account = llm._runner.drafting.account(r)
    account.request.left = -16.0
    events += llm.step()
    assert not r.head.warm
    llm._scheduler._preempt(r)
    account.request.left = account.engine.left = 16.0
    while llm.unfinished:
        events += llm.step()
    assert r.head.followed and events[-1].output is not None and events[-1].output.token_ids == want.token_ids


def test_a_drafter_that_waits_for_others_is_charged_for_the_wait(pair: Pair) -> None:
    class Waits:
        name, depth, asked = "waits", 4, 0

        def begin(self, request: Any) -> Any:
            return self

        def extend(self, tokens: Sequence[int]) -> None: ...

        def propose(self, nodes: int, depth: int) -> Proposal:
            self.asked += 1
            time.sleep(0.02)
            return Proposal([], [], [])

        def bytes(self) -> int:
            return 0

        def close(self) -> None: ...

    drafter = Waits()
    llm = LLM(pair.target, drafters=[drafter])
    llm.generate([PROMPT], SamplingParams(max_tokens=60, ignore_eos=True))
    assert 1 <= drafter.asked <= 3
