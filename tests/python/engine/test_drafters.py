"""Drafts without a head, and beside one: tokens are those of plain decoding, whoever drafts and whatever he says."""

from __future__ import annotations

import gc
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from drafters_world import ODD, RUBBISH, Fails, Knows, Likeliest, Ngrams, Says
from exact_world import PAGES, SAMPLED, check, plain, requests
from modelzoo import VOCAB, Pair
from specrs import LLM, ConfigError, SamplingParams
from specrs.drafters import CorpusDrafter, DraftRequest, Proposal, RecyclingDrafter
from specrs.engine import RequestOutput


def ngrams() -> list[Any]:
    return [Ngrams()]


def both() -> list[Any]:
    return [Ngrams(depth=32), Likeliest()]


MIXES: dict[str, Any] = {
    "ngrams": ngrams,
    "likeliest": lambda: [Likeliest()],
    "both": both,
    "package": lambda: ["suffix", "recycling"],
    "package and head": lambda: ["suffix", "recycling", "head"],
    "head": lambda: ["head"],
    "all": lambda: ["head", *both()],
    "hostile": lambda: [Says(RUBBISH["too deep"]), Ngrams(), Says(ODD["certain and wrong"], name="wrong")],
    "hostile with a head": lambda: ["head", Says(ODD["certain and wrong"]), Fails("propose")],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "chain": {"tree": (1, 15, 16)},
    "tree": {"tree": (2, 3, 11)},
    "auto": {},
    "holey": {"tree": (2, 3, 11), "draft_layout": "holey", "attention_backend": "triton"},
    "flashinfer": {"tree": (1, 12, 13), "attention_backend": "flashinfer"},
    "flash_attention": {"tree": (2, 3, 9), "attention_backend": "flash_attention"},
}


def engine(pair: Pair, drafters: Sequence[Any], **options: Any) -> LLM:
    return LLM(pair.target, pair.draft if "head" in drafters else None, drafters=drafters, **options)


def won(outputs: Sequence[RequestOutput]) -> int:
    return sum(sum(o.drafted) for o in outputs)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.filterwarnings("ignore:drafter")
def test_every_mix_gives_the_plain_tokens(tiny: Pair, mix: str, page_size: int, sampled: bool) -> None:
    prompts, params = requests(8, seed=page_size, **(SAMPLED if sampled else {}))
    want = plain(tiny, prompts, params)
    for i, (name, layout) in enumerate(LAYOUTS.items()):
        if name == "holey" and page_size == 1:
            continue
        llm = engine(tiny, MIXES[mix](), page_size=page_size, max_batch=[8, 3, 1, 5][i % 4], prefill_chunk=11, **layout)
        outputs = check(llm, prompts, params, want)
        if not sampled and name in ("chain", "tree"):
            assert won(outputs) > 2, f"{name}: drafts must have been accepted for this to mean anything"
        llm.close()


@pytest.mark.parametrize("drafters", [ngrams, both], ids=["ngrams", "both"])
def test_deep_chains_are_accepted_whole(ternary: Pair, drafters: Any) -> None:
    """A text that repeats itself: paths of more than 20 tokens."""
    prompt = [0, 1, 2] * 20
    params = SamplingParams(max_tokens=120, logit_bias={0: -1e9})
    want = LLM(ternary.target, speculative=False).generate([prompt], [params])[0].token_ids
    for page_size in PAGES:
        llm = engine(ternary, drafters(), tree=(1, 32, 33), page_size=page_size)
        out = llm.generate([prompt], [params])[0]
        assert out.token_ids == want
        llm.audit()


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("right", [1, 5, 8])
def test_what_comes_is_found_beside_a_longer_path(tiny: Pair, right: int, page_size: int, sampled: bool) -> None:
    """Accepted nodes lie behind others that are not, so that their KV moves, in a geometry of chains too."""
    prompts, params = requests(6, seed=right, **(SAMPLED if sampled else {}))
    want = plain(tiny, prompts, params)
    answers = {tuple(p): w for p, w in zip(prompts, want, strict=True)}
    for tree in ((1, 23, 24), (2, 6, 23)):
        llm = engine(tiny, [Knows(answers, right)], tree=tree, page_size=page_size, max_batch=3)
        outputs = check(llm, prompts, params, want)
        lengths = {n for o in outputs for n, count in enumerate(o.accepted_lengths) if count}
        assert max(lengths) == right + 1, "what comes was accepted as far as it was known"


def test_drafting_is_told_every_token_once_and_closed_once(tiny: Pair) -> None:
    prompts, params = requests(8, seed=5, **SAMPLED)
    source = Ngrams()
    llm = engine(tiny, [source], tree=(1, 12, 13), page_size=4, max_batch=3)
    outputs = llm.generate(prompts, params)
    assert sorted(source.begun) == sorted(set(source.closed)) == sorted(source.closed)
    for out in outputs:
        if out.request_id in source.told:
            told = source.told[out.request_id]
            assert told == out.token_ids[: len(told)] and len(told) <= len(out.token_ids)


def test_a_source_that_observes_is_told_the_targets_likeliest_tokens(tiny: Pair) -> None:
    seen: list[tuple[list[int], list[list[int]]]] = []

    class Watches(Likeliest):
        def begin(self, request: DraftRequest) -> Any:
            inner = super().begin(request)
            observe = inner.observe

            def watched(tokens: Sequence[int], top: Sequence[Sequence[int]]) -> None:
                seen.append((list(tokens), [list(row) for row in top]))
                observe(tokens, top)

            inner.observe = watched  # type: ignore[method-assign]
            return inner

    out = engine(tiny, [Watches()], tree=(1, 12, 13)).generate([[1, 2, 3]], SamplingParams(max_tokens=30))[0]
    following = dict(zip([3, *out.token_ids], out.token_ids, strict=False))
    rounds = [(tokens, top) for tokens, top in seen if tokens]
    assert len(rounds) >= out.rounds - 1
    # A greedy target's likeliest token after a root is the token that came.
    produced = iter(out.token_ids)
    assert all(len(row) == 8 for _, top in rounds for row in top)
    roots = [tokens[0] for tokens, _ in rounds]
    assert all(token in out.token_ids for token in roots) and following
    first = next(produced)
    assert roots[0] == first and rounds[0][1][0][0] == out.token_ids[1]


@pytest.mark.parametrize("slow", ["propose", "observe"])
def test_a_source_that_does_not_pay_is_neither_asked_nor_told(tiny: Pair, slow: str) -> None:
    calls = {"propose": 0, "observe": 0}

    class Dear(Likeliest):
        def begin(self, request: DraftRequest) -> Any:
            inner = super().begin(request)
            wrong = Proposal([-1], [request.vocab_size - 1], [0.5])

            def propose(nodes: int, depth: int) -> Proposal:
                return called("propose") or wrong

            inner.propose = propose  # type: ignore[method-assign]
            inner.observe = lambda tokens, top: called("observe")  # type: ignore[method-assign]
            return inner

    def called(what: str) -> None:
        calls[what] += 1
        if what == slow:
            time.sleep(0.005)  # takes as long as several plain rounds

    params = SamplingParams(max_tokens=120, logit_bias={VOCAB - 1: -100.0}, ignore_eos=True)
    out = engine(tiny, [Dear()]).generate([[1, 2, 3]], params)[0]
    assert out.rounds >= 100 and 1 <= calls["propose"] <= 20 and calls["observe"] <= 20, (out.rounds, calls)


@pytest.mark.parametrize("slow", ["begin", "propose"])
def test_a_source_that_begins_slowly_is_asked_again(tiny: Pair, slow: str) -> None:
    """The first call of anything meets cold caches; that says nothing of the next ones."""
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=80, ignore_eos=True)
    tokens = LLM(tiny.target, speculative=False).generate([prompt], params)[0].token_ids

    class Cold(Knows):
        slept = False

        def begin(self, request: DraftRequest) -> Any:
            drafting = super().begin(request)
            propose = drafting.propose
            drafting.propose = lambda *limits: self.once("propose") or propose(*limits)
            self.once("begin")
            return drafting

        def once(self, what: str) -> None:
            if what == slow and not self.slept:
                self.slept = True
                time.sleep(0.2)  # takes as long as hundreds of rounds

    llm = LLM(tiny.target, drafters=[Cold({tuple(prompt): tokens}, right=8, wrong=0)], tree=(1, 8, 9))
    out = llm.generate([prompt], params)[0]
    assert out.token_ids == tokens and out.rounds < 60, out.rounds


def test_requests_that_want_none_are_not_drafted_for(tiny: Pair) -> None:
    prompts, params = requests(6, seed=9)
    params = [SamplingParams(max_tokens=p.max_tokens, seed=p.seed, speculative=i % 2 == 0)
              for i, p in enumerate(params)]  # fmt: skip
    want = plain(tiny, prompts, params)
    for mix in ("ngrams", "all", "head"):
        source: list[Any] = MIXES[mix]()
        llm = engine(tiny, source, tree=(2, 3, 11), max_batch=4)
        outputs = check(llm, prompts, params, want)
        assert not any(any(o.drafted) for i, o in enumerate(outputs) if i % 2), "it asked for none"
        assert won(outputs) > 5
        for one in source:
            if isinstance(one, Ngrams):
                assert set(one.begun) <= {o.request_id for i, o in enumerate(outputs) if i % 2 == 0}


def test_a_prediction_is_drafted_from(bytes_pair: Pair) -> None:
    llm = LLM(bytes_pair.target, drafters=[Ngrams(depth=32)], tree=(1, 32, 33))
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True)
    plainly = llm.generate([prompt], params)[0]
    told = SamplingParams(max_tokens=60, ignore_eos=True, prediction=[7, *plainly.token_ids])
    expected = llm.generate([prompt], told)[0]
    assert expected.token_ids == plainly.token_ids
    assert expected.rounds < plainly.rounds / 3
    text = llm.tokenizer.decode(plainly.token_ids) if llm.tokenizer is not None else ""
    assert llm.generate([prompt], SamplingParams(max_tokens=60, ignore_eos=True, prediction=text))[
        0
    ].token_ids == plainly.token_ids  # fmt: skip
    with pytest.raises(ConfigError, match=r"prediction = 300: the vocabulary has 300 tokens"):
        llm.generate([prompt], SamplingParams(prediction=[300]))
    assert SamplingParams.from_dict({"prediction": {"type": "content", "content": "abc"}}).prediction == "abc"


@pytest.mark.parametrize("says", [*RUBBISH, *ODD])
@pytest.mark.parametrize("options", [{"tree": (1, 12, 13)}, {}], ids=["tree", "auto"])
def test_rubbish_costs_drafts_and_a_warning(tiny: Pair, says: str, options: dict[str, Any]) -> None:
    prompts, params = requests(3, seed=2)
    want = plain(tiny, prompts, params)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        llm = engine(tiny, [Says({**RUBBISH, **ODD}[says], name="mine"), Ngrams()], max_batch=3, **options)
        check(llm, prompts, params, want)
    mine = [str(w.message) for w in told if "drafter" in str(w.message)]
    if options:
        assert bool(mine) == (says in RUBBISH)
    else:  # a cost model may find asking too dear for answers as short as these
        assert not mine or says in RUBBISH
    assert all("drafter 'mine': propose()" in m and "goes on without it" in m for m in mine), mine


@pytest.mark.parametrize("method", ["begin", "extend", "propose", "observe", "close", "bytes"])
def test_an_error_of_a_drafter_is_no_error_of_the_request(tiny: Pair, method: str) -> None:
    prompts, params = requests(4, seed=4)
    want = plain(tiny, prompts, params)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        llm = engine(tiny, [Fails(method, name="mine"), Ngrams()], tree=(1, 12, 13), max_batch=2)
        outputs = check(llm, prompts, params, want)
        llm.add(prompts[0], params[0])
        llm.step()
        llm.step()
        llm._runner.drafting.gathering.sources.bytes()
        llm.step()
    mine = [str(w.message) for w in told if "drafter 'mine'" in str(w.message)]
    assert won(outputs) > 5 and mine
    assert all(f"no {method}" in m for m in mine), mine


@pytest.mark.parametrize("head", [False, True], ids=["alone", "beside a head"])
@pytest.mark.parametrize("method", ["begin", "extend", "propose", "observe", "close"])
def test_a_warning_that_is_an_error_comes_between_passes(tiny: Pair, method: str, head: bool) -> None:
    """A step raises the warning, as with ``python -W error``; no event is lost, and the next step goes on."""
    prompts, params = requests(6, seed=5)
    want = plain(tiny, prompts, params)
    drafters = [Fails(method, name="mine"), Ngrams(), *(["head"] if head else [])]
    llm = engine(tiny, drafters, tree=(2, 3, 11), max_batch=3, page_size=4, num_pages=200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=rf"drafter 'mine': {method}\(\)") as failed:
            llm.generate(prompts, params)
        notes = getattr(failed.value, "__notes__", [])
        assert method == "close" or sys.version_info < (3, 11) or len(notes) == 2, "of the other requests of the step"
        llm.audit()
        ids = [llm.add(p, s) for p, s in zip(prompts, params, strict=True)]
        got: dict[int, list[int]] = {i: [] for i in ids}
        raised, ended = 0, set[int]()
        for _ in range(400):
            try:
                events = llm.step()
            except RuntimeWarning:
                raised += 1
                continue
            for event in events:
                got[event.request_id] += event.token_ids
                ended |= {event.request_id} if event.output is not None else set()
            if not llm.unfinished:
                break
        assert list(got.values()) == want and ended == set(ids) and raised >= 2
        assert llm.audit()["sequences"] == 0
        llm.add(prompts[0], SamplingParams(max_tokens=50))
        for _ in range(3):
            with suppress(RuntimeWarning):
                llm.step()
        llm.close()
        assert llm.closed


@pytest.mark.parametrize("head", [False, True], ids=["alone", "beside a head"])
@pytest.mark.parametrize("method", ["begin", "extend", "propose", "observe", "close"])
def test_an_interrupt_in_a_drafter_loses_no_event(tiny: Pair, method: str, head: bool) -> None:
    """Ctrl-C comes wherever the time goes; who goes on to step gets every token."""
    prompts, params = requests(8, seed=5)
    want = plain(tiny, prompts, params)
    rng = random.Random(3)

    class Interrupted(Likeliest):
        def begin(self, request: DraftRequest) -> Any:
            inner = super().begin(request)
            if method != "begin":
                setattr(inner, method, self._or_stop(getattr(inner, method)))
            return inner if method != "begin" else self._or_stop(lambda: inner)()

        @staticmethod
        def _or_stop(call: Callable[..., Any]) -> Callable[..., Any]:
            def stops(*args: Any) -> Any:
                if rng.random() < 0.3:
                    raise KeyboardInterrupt
                return call(*args)

            return stops

    drafters = [Interrupted(), "recycling", *(["head"] if head else [])]
    llm = engine(tiny, drafters, tree=(2, 3, 11), max_batch=3, page_size=4)
    ids = [llm.add(p, s) for p, s in zip(prompts, params, strict=True)]
    got: dict[int, list[int]] = {i: [] for i in ids}
    ended, stopped = set[int](), 0
    for _ in range(1000):
        if not llm.unfinished:
            break
        try:
            events = llm.step()
        except KeyboardInterrupt:
            stopped += 1
            continue
        for event in events:
            got[event.request_id] += event.token_ids
            ended |= {event.request_id} if event.output is not None else set()
    assert stopped and list(got.values()) == want and ended == set(ids)
    assert llm.audit()["sequences"] == 0


def test_an_exception_without_a_message_ends_a_drafting_too(tiny: Pair) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no message")

    def raises(nodes: int, depth: int) -> Any:
        raise Mute

    llm = engine(tiny, [Says(raises, name="mine")], tree=(1, 3, 4))
    with pytest.warns(RuntimeWarning, match=r"drafter 'mine': propose\(\): Mute"):
        assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=9))[0].token_ids) == 9


def test_what_one_source_does_to_its_lists_another_one_does_not_see(tiny: Pair) -> None:
    seen: list[tuple[Any, Any]] = []

    class Vandal(Likeliest):
        def begin(self, request: DraftRequest) -> Any:
            inner = super().begin(request)

            def observe(tokens: Any, top: Any) -> None:
                for some in (tokens, *top, top):
                    with suppress(AttributeError):
                        some.clear()

            inner.observe = observe  # type: ignore[method-assign]
            return inner

    class Watches(Likeliest):
        def begin(self, request: DraftRequest) -> Any:
            inner = super().begin(request)
            inner.observe = lambda tokens, top: seen.append((tokens, top))  # type: ignore[method-assign]
            return inner

    llm = engine(tiny, [Vandal("vandal"), Watches(), "recycling"], tree=(1, 12, 13))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20))
    assert seen and all(tokens and len(top) == len(tokens) and all(map(len, top)) for tokens, top in seen)


def test_a_depth_that_changes_later_changes_no_size(tiny: Pair) -> None:
    """Pages, buffers and rounds are made for the depth that a drafter had when the engine was."""
    prompts, params = requests(4, seed=4)
    want = plain(tiny, prompts, params)
    source = Ngrams(depth=16)
    llm = engine(tiny, [source], max_batch=2)
    deepest = llm.max_tokens_per_round
    for depth in (32, 1, 10**9):
        source.depth, source.name = depth, str(depth)
        check(llm, prompts, params, want)
        assert (llm.max_tokens_per_round, llm.config.deepest) == (deepest, deepest - 1)


def test_a_corpus_of_a_larger_vocabulary_is_refused_before_weights_are_read(tiny: Pair, tmp_path: Path) -> None:
    CorpusDrafter.build(tmp_path / "c", [[1, 2, 3]], VOCAB + 1)
    CorpusDrafter.build(tmp_path / "d", [[1, 2, 3]], VOCAB)
    with pytest.raises(
        ConfigError, match="drafter 'texts': its corpus has a vocabulary of 11 tokens, the model one of 10"
    ):
        LLM(tiny.target, drafters=["suffix", CorpusDrafter(tmp_path / "c", name="texts")])
    two = [CorpusDrafter(tmp_path / "d"), CorpusDrafter(tmp_path / "d", name="more")]
    assert [s.name for s in LLM(tiny.target, drafters=two).config.sources] == ["corpus", "more"]


def test_a_drafter_that_calls_the_engine_is_refused(tiny: Pair) -> None:
    llm: LLM

    def reenters(nodes: int, depth: int) -> Any:
        return llm.generate([[1]])

    llm = engine(tiny, [Says(reenters)], tree=(1, 3, 4))
    with pytest.warns(RuntimeWarning, match="EngineBusyError"):
        out = llm.generate([[1, 2]], SamplingParams(max_tokens=9))[0]
    assert len(out.token_ids) == 9


def test_preempted_and_aborted_requests_keep_their_drafting(tiny: Pair) -> None:
    prompts, params = requests(8, seed=11, **SAMPLED)
    want = plain(tiny, prompts, params)
    source = Ngrams()
    llm = engine(tiny, [source, Likeliest()], tree=(2, 3, 8), page_size=4, max_batch=8, num_pages=40)
    check(llm, prompts, params, want)
    ids = [llm.add(p, s) for p, s in zip(prompts, params, strict=True)]
    for _ in range(3):
        llm.step()
    for request in ids[::2]:
        llm.abort(request)
    while llm.unfinished:
        llm.step()
    assert sorted(source.begun) == sorted(source.closed)
    assert not llm._runner.drafting.gathering._last.requests
    llm.audit()


def test_what_drafts_hold_is_told(tiny: Pair) -> None:
    shared = RecyclingDrafter(shared=True)
    with engine(tiny, ["suffix", shared, Fails("bytes")], tree=(1, 3, 4)) as llm:
        assert llm.stats().draft_bytes == 0
        told = []
        for salt in (None, "ada"):
            llm.add([1, 2, 3], SamplingParams(max_tokens=20, cache_salt=salt))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(4):
                    llm.step()
                told.append(llm.stats().draft_bytes)
                while llm.unfinished:
                    llm.step()
            told.append(llm.stats().draft_bytes)
        assert told[0] > 100 and told[1] == 0 and told[2] > told[3] == shared.bytes() > 0


def test_closing_an_engine_closes_its_draftings(tiny: Pair) -> None:
    source = Ngrams()
    llm = engine(tiny, [source], tree=(1, 3, 4))
    llm.add([1, 2, 3], SamplingParams(max_tokens=50))
    for _ in range(4):
        llm.step()
    assert source.begun == [0] and not source.closed
    llm.close()
    assert source.closed == [0]
    gc.collect()


def test_prefix_cache_and_chunks_change_nothing(tiny: Pair) -> None:
    prompts, params = requests(8, seed=3, **SAMPLED)
    want = plain(tiny, prompts, params)
    llm = engine(tiny, both(), tree=(1, 12, 13), page_size=4, max_batch=2, prefill_chunk=7)
    check(llm, prompts, params, want)
    again = check(llm, prompts, params, want)
    assert sum(o.usage.cached_tokens for o in again) > 150


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.filterwarnings("ignore:drafter")
def test_random_configurations(tiny: Pair, seed: int) -> None:
    rng = random.Random(seed)
    k, s = rng.randrange(1, 5), rng.randrange(1, 6)
    v = rng.randrange(1, min(40, 1 + k + (s - 1) * k * k) + 1)
    tree = {} if rng.random() < 0.2 else {"tree": (k, s, v)}
    prompts, params = requests(rng.randrange(1, 9), seed=2000 + seed, **(SAMPLED if rng.random() < 0.7 else {}))
    want = plain(tiny, prompts, params)
    llm = engine(tiny, MIXES[rng.choice([*MIXES])](), page_size=2 ** rng.randrange(6), max_batch=rng.randrange(1, 9),
                 prefill_chunk=rng.randrange(1, 80), prefix_cache=rng.random() < 0.5, **tree)  # fmt: skip
    check(llm, prompts, params, want)


def test_options_that_name_no_drafter_are_refused(tiny: Pair) -> None:
    class NoName:
        depth = 3

        def begin(self, request: DraftRequest) -> Any:
            return None

    for drafters, match in [
        ("suffix", "must be a list"), ([1], "has a name"), (["sufix"], "must be one of 'suffix', 'recycling', 'head'"),
        (["head"], "there is no draft head"), ([NoName()], "has a name"), ([Ngrams], "has a method begin"),
        ([Ngrams(), Ngrams()], "stands before it"), ([Ngrams(depth=0)], "at least 1"), ([Ngrams(name="head")], "names"),
        ([Ngrams(name="grammar")], "names what a request's grammar forces"),
        ([Ngrams(name=str(i)) for i in range(17)], "at most 16"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            LLM(tiny.target, drafters=drafters)
    llm = LLM(tiny.target, drafters=[])
    assert (not llm.speculative and llm.max_tokens_per_round == 1) or llm.config.deepest >= 0
    assert VOCAB == 10 and Proposal().tokens == ()
