"""A request that cannot go on ends alone, where plain decoding would have ended; a broken draft head costs speed."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelzoo import VOCAB, Pair, read_weights, write_eagle3, write_target
from specrs import LLM, ConfigError, NonFiniteError, SamplingParams
from specrs import _specrs as core
from specrs.backends import BACKENDS
from specrs.cli import main
from specrs.engine import FinishReason, RequestOutput
from specrs.engine.rounds.runner import _naming

TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": (1, 5, 6)},
    "tree": {"tree": (4, 4, 24)},
    "adaptive": {},
}
NOT_READ = {("native", "holey")}
FORBID_ALL = dict.fromkeys(range(VOCAB), -math.inf)
BAD = 7
"""A token whose embedding is NaN in `poisoned`: a request that emits it fails at the position after it."""


def edited(source: Path, directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a model directory with other weights."""
    shutil.copytree(source, directory)
    weights = read_weights(directory)
    edit(weights)
    save_file(weights, directory / "model.safetensors")
    return directory


def nan_embedding(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights[name][BAD] = math.nan

    return edit


@pytest.fixture(scope="module")
def poisoned(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """`tiny`'s target with NaN after token `BAD`, and a head that drafts every token, soundly (its embeddings are its
    own)."""
    root = tmp_path_factory.mktemp("poisoned")
    draft = write_eagle3(root / "draft", tiny.target, draft_vocab_size=None, own_embedding=True)
    return Pair(edited(tiny.target, root / "target", nan_embedding("model.embed_tokens.weight")), draft)


def told(output: RequestOutput) -> tuple[Any, ...]:
    """Return what must not depend on speculation, batch or backend."""
    e = output.error
    error = None if e is None else (e.what, e.value, e.position, e.index, e.row, e.kind)
    assert e is None or e.request == output.request_id
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, error


def is_empty(llm: LLM) -> None:
    """Check that nothing is left behind but the prefix cache."""
    counts = llm.audit()
    assert llm.unfinished == 0
    assert counts["sequences"] == 0
    assert counts["free_pages"] + counts["cached_pages"] == counts["total_pages"]


def requests(seed: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, a few with `BAD` in them; greedy and sampled; some stop before they can fail."""
    rng = random.Random(seed)
    stem = [t for t in (rng.randrange(VOCAB) for _ in range(40)) if t != BAD]
    prompts, params = [], []
    for i in range(count):
        prompt = stem[: rng.randrange(1, 30)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(3))]
        prompts.append(prompt)
        params.append(
            SamplingParams(
                max_tokens=rng.randrange(1, 40),
                temperature=rng.choice([0.0, 0.8, 1.3]),
                seed=seed * 1000 + i,
                logit_bias=rng.choice([{}, {BAD: 3.0}, {BAD: -math.inf}]),
                presence_penalty=rng.choice([0.0, 0.3]),
                stop_token_ids=rng.choice([(), (3,), (BAD,)]),
            )
        )
    return prompts, params


@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
@pytest.mark.parametrize("page_size", [1, 4])
def test_plain_and_speculative_requests_fail_at_the_same_token(
    poisoned: Pair, options: dict[str, Any], page_size: int
) -> None:
    prompts, params = requests(1, 40)
    common: dict[str, Any] = {"page_size": page_size, "prefill_chunk": 64}
    plain = LLM(poisoned.target, max_batch=1, **common).generate(prompts, params, on_error="return")
    llm = LLM(poisoned.target, poisoned.draft, max_batch=4, **common, **options)
    outputs = llm.generate(prompts, params, on_error="return")
    assert [told(o) for o in outputs] == [told(o) for o in plain]
    is_empty(llm)
    failed = [o for o in outputs if o.finish_reason == "error"]
    assert len(failed) > 10 and len(outputs) - len(failed) > 10
    in_prefill, later = [o for o in failed if not o.rounds], [o for o in failed if o.rounds]
    assert in_prefill and later
    for o in failed:
        assert o.error is not None
        assert (o.error.what, o.error.value) == ("target logits", "NaN")
        assert o.error.position == o.usage.total_tokens == len(o.prompt_token_ids) + len(o.token_ids)
        assert len(o.drafted) == len(o.token_ids)
    # A walk that fails below the root has emitted drafts alone. (Chains of an untrained head hardly meet `BAD`.)
    assert options != TREES["tree"] or any(o.drafted and o.drafted[-1] for o in failed)
    for o in outputs:
        assert sum(n * c for n, c in enumerate(o.accepted_lengths)) == max(len(o.token_ids) - 1, 0)
        assert sum(o.accepted_lengths) == o.rounds


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "native"])
def test_every_backend_fails_where_plain_decoding_does(poisoned: Pair, backend: str) -> None:
    prompts, params = requests(2, 16)
    tree = {"tree": (2, 3, 8), "page_size": 4}
    plain = LLM(poisoned.target, page_size=4, attention_backend=backend)
    llm = LLM(poisoned.target, poisoned.draft, max_batch=4, attention_backend=backend, **tree)
    outputs = llm.generate(prompts, params, on_error="return")
    assert [told(o) for o in outputs] == [told(o) for o in plain.generate(prompts, params, on_error="return")]
    assert 2 < sum(o.finish_reason == "error" for o in outputs) < 14
    is_empty(llm)


def test_text_held_back_is_told_before_an_error(bytes_pair: Pair, tmp_path: Path) -> None:
    """The error comes inside of what may be a stop string: its beginning is text, with and without speculation."""
    free = SamplingParams(max_tokens=40, temperature=1.0, seed=11, ignore_eos=True)
    [sound] = LLM(bytes_pair.target).generate(["hello"], free)
    at = next(i for i in range(10, 40) if sound.token_ids[i] not in sound.token_ids[:i] and sound.token_ids[i] > 2)
    bad = sound.token_ids[at]

    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][bad] = math.nan

    target = edited(bytes_pair.target, tmp_path / "target", edit)
    params = SamplingParams(
        max_tokens=40, temperature=1.0, seed=11, ignore_eos=True, stop=[sound.text[-6:] + "!", sound.text[5:9] + "~"]
    )
    outputs = []
    for llm in (LLM(target), LLM(target, bytes_pair.draft, **TREES["tree"]), LLM(target, bytes_pair.draft)):
        events = list(llm.stream(["hello"], params))
        output = events[-1].output
        assert output is not None and output.finish_reason is FinishReason.ERROR
        assert "".join(e.text for e in events) == output.text
        assert output.token_ids == sound.token_ids[: at + 1]
        assert output.error is not None and output.error.position == output.usage.total_tokens
        outputs.append(told(output))
        is_empty(llm)
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize("options", [{"speculative": False}, *TREES.values()], ids=["plain", *TREES])
def test_others_go_on_in_the_same_step(tiny: Pair, options: dict[str, Any]) -> None:
    """The finding's reproducer: a request whose every token is forbidden, beside one that runs."""
    llm = LLM(tiny.target, tiny.draft, max_batch=4, **options)
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=5)
    [want] = llm.generate([[1, 2, 3]], params)
    a = llm.add([1, 2, 3], params)
    llm.step()
    b = llm.add([4, 5], SamplingParams(logit_bias=FORBID_ALL))
    tokens, ends = [], {}
    while llm.unfinished:
        before = len(tokens)
        for event in llm.step():
            tokens += event.token_ids if event.request_id == a else []
            if event.output is not None:
                ends[event.request_id] = event.output
        assert len(tokens) > before or a in ends, "a moves in every step"
        llm.audit()
    assert ends[a].token_ids == want.token_ids and ends[a].error is None
    error = ends[b].error
    assert ends[b].finish_reason is FinishReason.ERROR and ends[b].token_ids == [] and error is not None
    assert (error.request, error.position, error.value) == (b, 2, "all -inf")
    assert str(error) == f"request {b}: target logits after logit_bias and penalties: all -inf at position 2, index 0"
    is_empty(llm)


def test_generate_raises_after_all_are_done_or_returns(tiny: Pair) -> None:
    llm = LLM(tiny.target, tiny.draft, max_batch=2, **TREES["tree"])
    good, bad = SamplingParams(max_tokens=30), SamplingParams(logit_bias=FORBID_ALL)
    prompts = [[1], [2, 2], [3], [4, 4, 4]]
    want = [o.token_ids for o in llm.generate([[1], [3]], good)]
    with pytest.raises(NonFiniteError, match="at position 2") as e:
        llm.generate(prompts, [good, bad, good, bad])
    is_empty(llm)
    outputs = e.value.outputs  # type: ignore[attr-defined]
    assert [str(o.finish_reason) for o in outputs] == ["length", "error", "length", "error"]
    assert [outputs[0].token_ids, outputs[2].token_ids] == want
    assert outputs[1].error is e.value and outputs[1].request_id == e.value.request
    assert outputs[3].error.position == 3
    returned = llm.generate(prompts, [good, bad, good, bad], on_error="return")
    assert [told(o) for o in returned] == [told(o) for o in outputs]
    with pytest.raises(ConfigError, match="on_error = 'ignore'"):
        llm.generate([[1]], on_error="ignore")  # type: ignore[arg-type]
    is_empty(llm)


def test_an_error_aborts_nothing_else_and_can_not_be_aborted(tiny: Pair) -> None:
    llm = LLM(tiny.target, tiny.draft, **TREES["chain"])
    b = llm.add([1], SamplingParams(logit_bias=FORBID_ALL))
    stream = llm.stream([[2]], SamplingParams(max_tokens=5))
    assert len([e for e in stream if e.output]) == 1
    assert llm.unfinished == 1, "the output of b waits for a step"
    event = llm.abort(b)
    assert event is not None and event.output is not None and event.output.finish_reason == "error"
    assert llm.abort(b) is None
    is_empty(llm)


def test_preempted_requests_fail_where_they_would_have(poisoned: Pair) -> None:
    prompts, params = requests(5, 24)
    plain = LLM(poisoned.target).generate(prompts, params, on_error="return")
    llm = LLM(poisoned.target, poisoned.draft, page_size=4, num_pages=32, max_batch=4, **TREES["chain"])
    outputs = llm.generate(prompts, params, on_error="return")
    assert [told(o) for o in outputs] == [told(o) for o in plain]
    is_empty(llm)


def test_a_round_that_fails_for_one_request_is_recorded(poisoned: Pair) -> None:
    llm = LLM(poisoned.target, poisoned.draft, **TREES["chain"])
    params = [SamplingParams(max_tokens=12, logit_bias={BAD: bias}) for bias in (100.0, -math.inf)]
    with llm.recording(round=1) as recorder:
        outputs = llm.generate([[1, 2], [3]], params, on_error="return")
    assert [str(o.finish_reason) for o in outputs] == ["error", "length"]
    assert recorder.capsule is not None
    assert len(recorder.capsule.paths[0]) >= 1 and recorder.capsule.kept[0] == 0


def test_the_command_line_prints_the_error_and_exits_1(
    bytes_pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights["model.embed_tokens.weight"][:] = math.nan

    target = edited(bytes_pair.target, tmp_path / "target", edit)
    assert main(["generate", "hello", "--model", str(target), "--compare"]) == 1
    out, err = capsys.readouterr()
    assert out == "hello\n"
    assert "finished by error" in err
    assert err.endswith("specrs: request 0: target logits: NaN at position 5, index 0\n")


# -- the target's NaN and other queries of the same request ------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_node_beside_the_walk_harms_nothing(tiny: Pair, poisoned: Pair, backend: str, temperature: float) -> None:
    """The head drafts a token whose KV is NaN in the target, as a sibling of what is accepted."""
    params = SamplingParams(max_tokens=40, logit_bias={BAD: -math.inf}, temperature=temperature, seed=3)
    options: dict[str, Any] = {"page_size": 4, "attention_backend": backend, "prefix_cache": False}
    tree = {"tree": (4, 3, 20)}
    prompts = [[1, 2, 3], [4], [5, 6]]
    want = LLM(tiny.target, **options).generate(prompts, params)
    llm = LLM(poisoned.target, poisoned.draft, **options, **tree)
    drafted = 0

    def watch(trees: core.TreeBatch, accepts: core.Accepts) -> None:
        nonlocal drafted
        drafted += trees.tokens.tolist().count(BAD)

    with llm.watching(watch):
        outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in want]
    assert drafted > 5, "the bad token must be among the nodes"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["dense", "holey"])
def test_nan_in_freed_pages_harms_nobody(tiny: Pair, backend: str, layout: str) -> None:
    """Pages come back with whatever a failed request left in them."""
    options: dict[str, Any] = {"page_size": 4, "attention_backend": backend}
    tree = {"tree": (2, 3, 8), "draft_layout": layout}
    try:
        llm = LLM(tiny.target, tiny.draft, max_batch=3, **options, **tree)
    except core.ConfigError:
        assert (backend, layout) in NOT_READ
        return
    prompts, params = [[1, 2, 3], [4] * 9, [5, 6]], SamplingParams(max_tokens=30, temperature=1.0, seed=2)
    want = LLM(tiny.target, tiny.draft, max_batch=3, **options, **tree).generate(prompts, params)
    for cache in (llm._runner.executor.cache, llm._runner.executor.drafts.cache):
        assert cache is not None
        cache.tensor[:, :, llm.config.page_size :] = math.nan
    outputs = llm.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in want]
    assert all(o.draft_error is None for o in outputs)
    assert [o.accepted_lengths for o in outputs] == [o.accepted_lengths for o in want]


# -- a broken draft head -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_broken(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A sound target; a head with embeddings of its own, NaN for token `BAD`."""
    root = tmp_path_factory.mktemp("half_broken")
    draft = write_eagle3(root / "sound", tiny.target, draft_vocab_size=None, own_embedding=True)
    return Pair(tiny.target, edited(draft, root / "draft", nan_embedding("embed_tokens.weight")))


@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
@pytest.mark.parametrize("part", ["fc.weight", "lm_head.weight", "norm.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_head_gives_the_tokens_of_plain_decoding(
    tiny: Pair, tmp_path: Path, options: dict[str, Any], part: str, value: float
) -> None:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights[part].view(-1)[3] = value

    draft = edited(tiny.draft, tmp_path / "draft", edit)
    prompts, params = [[1, 2, 3], [4] * 20, [5]], SamplingParams(max_tokens=25, temperature=0.9, seed=8)
    want = LLM(tiny.target).generate(prompts, params)
    llm = LLM(tiny.target, draft, max_batch=2, page_size=4, **options)
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(prompts, params)
        assert [told(o) for o in outputs] == [told(o) for o in want]
    for o in outputs:
        if o.rounds and (not llm.config.adaptive or o.draft_error is not None):
            assert o.draft_error is not None
            assert o.draft_error.what in ("draft hidden state", "draft logits", "draft KV")
            assert o.draft_error.request == o.request_id
    is_empty(llm)


@pytest.mark.parametrize("options", [TREES["chain"], TREES["tree"]], ids=["chain", "tree"])
def test_others_draft_beside_a_request_whose_drafts_broke(half_broken: Pair, options: dict[str, Any]) -> None:
    """Requests that meet the head's bad token decode plainly from there; the others' rounds are as they were alone."""
    base = {"max_tokens": 30, "temperature": 1.0}
    clean = SamplingParams(**base, seed=1, logit_bias={BAD: -math.inf})
    dirty = SamplingParams(**base, seed=2, logit_bias={BAD: 2.0})
    llm = LLM(half_broken.target, half_broken.draft, prefix_cache=False, max_batch=4, **options)
    [alone] = llm.generate([[1, 2, 3]], clean)
    plain = LLM(half_broken.target).generate([[1, 2, 3], [4, 5], [BAD] * 9], [clean, dirty, clean])
    outputs = llm.generate([[1, 2, 3], [4, 5], [BAD] * 9], [clean, dirty, clean])
    assert [told(o) for o in outputs] == [told(o) for o in plain]
    assert outputs[0].draft_error is None and outputs[0].accepted_lengths == alone.accepted_lengths
    assert sum(outputs[0].drafted) >= 5
    first = outputs[1].token_ids.index(BAD)
    assert outputs[1].draft_error is not None and not any(outputs[1].drafted[first + llm.max_tokens_per_round :])
    assert outputs[2].draft_error is not None and sum(outputs[2].drafted) == 0
    assert outputs[2].draft_error.position == 9 + 1


def test_bad_draft_kv_is_not_shared(half_broken: Pair) -> None:
    """Later requests get the pages of a prompt before the head's bad token, and go on drafting from there."""
    llm = LLM(half_broken.target, half_broken.draft, page_size=4, prefill_chunk=8, **TREES["tree"])
    stem = [1, 2, 3, 4, 5, 6] * 5
    params = SamplingParams(max_tokens=20, logit_bias={BAD: -math.inf}, temperature=1.0, seed=4)
    [fresh] = LLM(half_broken.target, half_broken.draft, page_size=4, **TREES["tree"]).generate([stem], params)
    [broken] = llm.generate([[*stem, BAD, 1, 2, 3, 4, 5, 6, 8, 9, 1, 2, 3]], params)
    assert broken.draft_error is not None and broken.finish_reason == "length"
    cache = llm._runner.executor.drafts.cache
    assert cache is not None
    pool = llm._runner.pages.pool
    row, shared, drafted = pool.cache_lookup([*stem, BAD, *[1] * 20])
    assert shared > drafted >= 16
    slots = [page * 4 + i for page in pool.pages(row)[: drafted // 4] for i in range(4)]
    pool.release([row])
    assert slots and bool(cache.tensor[:, :, slots].isfinite().all())
    [after] = llm.generate([stem], params)
    assert after.usage.cached_tokens >= 16
    assert after.draft_error is None and sum(after.drafted) > 3
    assert after.token_ids == fresh.token_ids
    [again] = llm.generate([[*stem, BAD, 1, 2, 3]], params)  # its head begins behind the bad part, where KV is shared
    assert again.usage.cached_tokens > len(stem) and again.draft_error is None


def test_drafts_break_in_the_prefill_of_one_request(half_broken: Pair) -> None:
    """Chunks after the bad one leave nothing waiting for the head."""
    llm = LLM(half_broken.target, half_broken.draft, prefill_chunk=5, prefix_cache=False, **TREES["tree"])
    request = llm.add([1, 2, BAD, *([3, 4] * 20)], SamplingParams(max_tokens=40))
    while llm.unfinished:
        llm.step()
        for r in llm._scheduler._admitted:
            assert r.request_id == request and not r.lag
    is_empty(llm)


# -- whole steps -------------------------------------------------------------------------------------------------------


def test_an_error_of_the_whole_step_names_the_request_and_changes_nothing(
    tiny: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny.target, tiny.draft, max_batch=4, **TREES["tree"])
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=6)
    want = [o.token_ids for o in llm.generate([[1], [2]], params)]
    ids = [llm.add([n], params) for n in (1, 2)]
    tokens: dict[int, list[int]] = {i: [] for i in ids}

    def step() -> None:
        for event in llm.step():
            tokens[event.request_id] += event.token_ids

    for _ in range(3):
        step()
    error = core.OutOfBoundsError("kv_move: index 9 into cache is outside 0..8 (request 1, step 0)")
    error.kind, error.request = "OutOfBounds", 1

    def fail(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:  # fails as late as a pass can fail
        patch.setattr(core, "kv_move", fail)
        before = [list(r.tokens) for r in llm._scheduler._admitted]
        with pytest.raises(core.OutOfBoundsError, match=rf"row 1 of the batch is request {ids[1]}") as e:
            llm.step()
        assert e.value.request == ids[1]
        assert [list(r.tokens) for r in llm._scheduler._admitted] == before
        llm.audit()
    while llm.unfinished:
        step()
    assert [tokens[i] for i in ids] == want
    is_empty(llm)


# -- parameters that could only overflow -------------------------------------------------------------------------------

LIMITS: list[tuple[str, Callable[[float], Any], float, float]] = [
    ("repetition_penalty", lambda x: x, 1e-6, 1e6),
    ("presence_penalty", lambda x: x, -1e20, 1e20),
    ("frequency_penalty", lambda x: x, -1e20, 1e20),
    ("logit_bias", lambda x: {1: x}, -1e30, 1e30),
]


@pytest.mark.parametrize(("name", "make", "low", "high"), LIMITS, ids=[name for name, *_ in LIMITS])
def test_limits_of_parameters(tiny: Pair, name: str, make: Callable[[float], Any], low: float, high: float) -> None:
    """`SamplingParams` and the core have the same limits; at them, a model's own logits never overflow."""
    llm = LLM(tiny.target, tiny.draft, **TREES["chain"])
    for value in (low, high):
        core.Sampler(VOCAB, [1], **{name: make(value)})
        for extra in ({}, {"logit_bias": {2: 1e30}, "presence_penalty": -1e20, "frequency_penalty": -1e20}):
            params = SamplingParams(max_tokens=20, **{**extra, name: make(value)})
            [output] = llm.generate([[1, 2]], params)
            assert output.finish_reason is FinishReason.LENGTH
    for value in (low - abs(low) * 1e-6, high * (1 + 1e-6), 3e38 if high > 0 else 0.0, -3e38):
        with pytest.raises(ConfigError, match=rf"{name} = .*(1e-06|1e-6|1e\+20|1e\+30)"):
            SamplingParams(**{name: make(value)})
        with pytest.raises(ConfigError, match=name):
            core.Sampler(VOCAB, [1], **{name: make(value)})


def test_logits_that_overflow_in_processing_say_so(tiny: Pair, tmp_path: Path) -> None:
    """A model with logits beyond the bound that is stated: the request ends alone, and its parameters are named."""

    def edit(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] *= 1e36

    llm = LLM(edited(tiny.target, tmp_path / "target", edit), tiny.draft, max_batch=2, **TREES["chain"])
    params = [SamplingParams(max_tokens=8, repetition_penalty=r) for r in (1.0, 1e-6)]
    good, bad = llm.generate([[1, 2, 3, 4, 5, 6, 8, 9, 0]] * 2, params, on_error="return")
    assert good.finish_reason is FinishReason.LENGTH
    assert bad.error is not None and bad.error.value == "+inf"
    assert bad.error.what == "target logits after logit_bias and penalties"


def test_beams_are_made_once_and_their_vocabulary_is_checked_then(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    draft = write_eagle3(tmp_path / "draft", target, draft_vocab_size=3)
    with pytest.raises(ConfigError, match="4 branches for a draft vocabulary of 3 tokens"):
        LLM(target, draft, tree=(4, 2, 6))
    llm = LLM(target, draft, tree=(3, 2, 6), max_batch=5)
    beams = llm._runner.executor.drafts.beams
    for count in (1, 5, 2):
        llm.generate([[1]] * count, SamplingParams(max_tokens=6))
    assert beams is llm._runner.executor.drafts.beams and beams is not None and beams.max_batch == 5


def test_an_error_of_a_nested_pass_names_its_request_once() -> None:
    """A round that is run again within the collection of another has a batch of its own."""
    outer, inner = ([SimpleNamespace(asked_id=i) for i in ids] for ids in ((5, 1, 7), (1, 7)))
    error = core.SpecrsError("scores")
    error.request = 0  # type: ignore[attr-defined]
    told = pytest.raises(core.SpecrsError, match=r"^scores \(row 0 of the batch is request 1\)$")
    with told as raised, _naming(outer), _naming(inner):  # type: ignore[arg-type]
        raise error
    assert raised.value.request == 1  # type: ignore[attr-defined]
