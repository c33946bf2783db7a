"""Drafts that the host makes, on a device that runs ahead: rounds with them are waited for, the others are not."""

from __future__ import annotations

from typing import Any

import pytest

from drafters_world import Likeliest, NgramDrafting, Ngrams, Says
from exact_world import SAMPLED, plain, requests
from flight_world import Level, Told, flying
from modelzoo import Pair
from specrs import LLM, SamplingParams
from specrs.drafters import DraftRequest, Proposal
from specrs.engine import RequestOutput

MIXES: dict[str, Any] = {
    "alone": lambda: [Ngrams(), Likeliest()],
    "with a head": lambda: ["head", Ngrams()],
    "with a head, too": lambda: ["head", Ngrams(), "recycling"],
    "rarely": lambda: [Says(lambda n, d: Proposal([-1], [3], [0.9]) if d % 5 == 0 else Proposal())],
}
TREES: dict[str, dict[str, Any]] = {"chain": {"tree": (1, 8, 9)}, "tree": {"tree": (2, 3, 11)}, "auto": {}}


def won(outputs: list[RequestOutput]) -> int:
    return sum(sum(o.drafted) for o in outputs)


@pytest.mark.parametrize("level", ["off", "round", "loop"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("mix", MIXES)
def test_tokens_are_the_plain_ones(
    tiny: Pair, mix: str, tree: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sampled, page_size in ((False, 4), (True, 1), (True, 4)):
        prompts, params = requests(8, seed=page_size, **(SAMPLED if sampled else {}))
        params = [SamplingParams(max_tokens=p.max_tokens, seed=p.seed, temperature=0.8 if sampled else 0)
                  for p in params]  # fmt: skip
        want = plain(tiny, prompts, params)
        told, drafters = Told(level=level), MIXES[mix]()
        llm = flying(tiny.target, tiny.draft if "head" in drafters else None, monkeypatch, told, drafters=drafters,
                     max_batch=3, page_size=page_size, **TREES[tree])  # fmt: skip
        outputs = llm.generate(prompts, params)
        assert [o.token_ids for o in outputs] == want
        if tree != "auto" and mix != "rarely":
            assert won(outputs) > 2
        assert level != "off" or not told.ahead
        if tree != "auto" and "head" in drafters and (tree == "chain" or page_size > 1):
            assert told.united > 5, "one tree of both"
        llm.audit()


def test_a_united_round_tells_whose_its_nodes_are(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(level="round")
    llm = flying(tiny.target, tiny.draft, monkeypatch, told, drafters=["head", Ngrams()], tree=(2, 3, 11), max_batch=3)
    prompts, params = requests(6, seed=9)
    params = [SamplingParams(max_tokens=40, seed=p.seed, temperature=0, trace=True) for p in params]
    alone = [0, 0]
    both = 0
    for event in (e for i in range(0, 6, 3) for e in stepped(llm, prompts[i : i + 3], params[i : i + 3])):
        for one in event.rounds:
            if set(one.sources) != {"head", "ngrams"}:
                continue
            bits = [1 << one.sources.index(name) for name in ("head", "ngrams")]
            assert len(one.proposed) == len(one.tokens) and one.proposed[0] == 0
            for node, parent in enumerate(one.parents):
                assert parent < 1 or one.proposed[node] & ~one.proposed[parent] == 0, "who has a node has its parent"
                assert node == 0 or one.proposed[node], "somebody has it"
            for i in (0, 1):
                alone[i] += any(mask == bits[i] for mask in one.proposed)
            both += any(mask == sum(bits) for mask in one.proposed)
    assert told.united > 10 and min(*alone, both) > 2
    llm.audit()


def stepped(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
    """Events of some requests, to their ends."""
    for prompt, one in zip(prompts, params, strict=True):
        llm.add(prompt, one)
    while llm.unfinished:
        yield from llm.step()


@pytest.mark.parametrize("level", ["round", "loop"])
def test_rounds_without_drafts_run_ahead_until_there_are_some(
    tiny: Pair, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, asked = [True], [0]

    def says(nodes: int, depth: int) -> Proposal:
        asked[0] += 1
        return Proposal() if silent[0] else Proposal([-1, -1], [0, 1], [0.5, 0.4])

    params = SamplingParams(max_tokens=120)
    want = LLM(tiny.target, speculative=False).generate([[1, 2, 3]], params)[0].token_ids
    told = Told(level=level)
    llm = flying(tiny.target, None, monkeypatch, told, drafters=[Says(says)], tree=(2, 2, 3), max_batch=2)
    seen: list[int] = []
    request = llm.add([1, 2, 3], params)
    for _ in range(20):
        seen += [t for e in llm.step() for t in e.token_ids]
    ahead = told.ahead
    assert ahead >= 8 and llm.unfinished
    silent[0] = False
    for _ in range(12):  # lets those in flight run out
        seen += [t for e in llm.step() for t in e.token_ids]
    before = told.ahead
    for _ in range(5):
        seen += [t for e in llm.step() for t in e.token_ids]
    assert told.ahead == before, "a round with drafts is waited for"
    silent[0] = True
    while llm.unfinished:
        seen += [t for e in llm.step() for t in e.token_ids]
    assert told.ahead > before and seen == want and asked[0] > 20 and request == 0
    llm.audit()


@pytest.mark.parametrize("fails", ["collect", "commit", "first", "prefill", "beside"])
def test_a_failed_round_leaves_requests_as_they_were(tiny: Pair, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, params = requests(4, seed=7)
    want = plain(tiny, prompts, params)
    count = [0]

    def fail(what: str) -> None:
        if what == fails:
            count[0] += 1
            if count[0] % 5 == 2:
                raise RuntimeError("planted")

    class Sometimes(Ngrams):
        def begin(self, request: DraftRequest) -> NgramDrafting:
            inner = super().begin(request)
            propose = inner.propose
            inner.propose = lambda n, d: Proposal() if len(inner.text) % 3 else propose(n, d)  # type: ignore[method-assign]
            return inner

    told, source = Told(fails=fail), Sometimes()
    llm = flying(tiny.target, tiny.draft, monkeypatch, told, drafters=["head", source], tree=(2, 3, 11), max_batch=2)
    got: dict[int, list[int]] = {llm.add(p, s): [] for p, s in zip(prompts, params, strict=True)}
    failed = 0
    while llm.unfinished:
        try:
            for event in llm.step():
                got[event.request_id] += event.token_ids
        except RuntimeError:
            failed += 1
            llm.audit()
    assert list(got.values()) == want and failed
    assert sorted(source.begun) == sorted(source.closed)
    llm.audit()
