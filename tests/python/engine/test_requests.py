"""Results of requests: stops, limits, usage, streams; and errors of bad input."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from modelzoo import VOCAB, Pair, edit_config, read_weights
from specrs import (
    LLM,
    ConfigError,
    CudaError,
    NonFiniteError,
    PoolExhaustedError,
    SamplingParams,
    TreeShape,
    cuda_available,
)
from specrs.engine import FinishReason
from specrs.engine.config import EngineConfig

TREE: dict[str, Any] = {"tree": (4, 4, 24)}


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> LLM:
    return LLM(tiny.target, tiny.draft, max_batch=4, **TREE)


@pytest.fixture(scope="module")
def text_llm(bytes_pair: Pair) -> LLM:
    return LLM(bytes_pair.target, bytes_pair.draft, max_batch=4, **TREE)


def test_a_stop_token_inside_an_accepted_run_cuts_output_usage_and_metrics(llm: LLM) -> None:
    [free] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=100, temperature=0.9, seed=4))
    tokens = free.token_ids
    cut = next(i for i in range(20, 100) if (free.drafted[i] and tokens[i] not in tokens[:i]) or i == 60)
    stop = tokens[cut]
    first = tokens.index(stop)
    [out] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=100, temperature=0.9, seed=4, stop_token_ids=[stop]))
    assert out.token_ids == tokens[: first + 1]
    assert (out.finish_reason, out.stop_reason) == (FinishReason.STOP, stop)
    assert out.usage.completion_tokens == first + 1 == len(out.drafted)
    assert sum(n * c for n, c in enumerate(out.accepted_lengths)) == first  # the first token is prefill's
    assert sum(out.accepted_lengths) == out.rounds


def test_every_stop_position_cuts_exactly_there(llm: LLM) -> None:
    params = {"temperature": 1.0, "seed": 9}
    [free] = llm.generate([[5]], SamplingParams(max_tokens=40, **params))
    for n in range(1, 41):
        [out] = llm.generate([[5]], SamplingParams(max_tokens=n, **params))
        assert out.token_ids == free.token_ids[:n]
        assert out.finish_reason is FinishReason.LENGTH
        assert sum(i * c for i, c in enumerate(out.accepted_lengths)) == n - 1


def test_eos_ends_a_request_and_can_be_ignored(tiny: Pair, tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny.target, target)
    edit_config(target, eos_token_id=[3, 7])
    llm = LLM(target, tiny.draft, **TREE)
    free = SamplingParams(max_tokens=80, temperature=1.0, seed=2, ignore_eos=True)
    [whole] = llm.generate([[1]], free)
    [out] = llm.generate([[1]], SamplingParams(max_tokens=80, temperature=1.0, seed=2))
    end = min(whole.token_ids.index(t) for t in (3, 7) if t in whole.token_ids)
    assert out.token_ids == whole.token_ids[: end + 1]
    assert (out.finish_reason, out.stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(text_llm: LLM, include: bool) -> None:
    base = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    [free] = text_llm.generate(["hello"], SamplingParams(**base))
    stop = free.text[25:28]
    at = free.text.index(stop)
    [out] = text_llm.generate(["hello"], SamplingParams(**base, stop=["\x00never", stop], include_stop=include))
    assert out.text == free.text[: at + 3 if include else at]
    assert (out.finish_reason, out.stop_reason) == (FinishReason.STOP, stop)
    assert out.token_ids == free.token_ids[: len(out.token_ids)]
    assert text_llm.tokenizer is not None
    assert stop in text_llm.tokenizer.decode(out.token_ids)
    assert stop not in text_llm.tokenizer.decode(out.token_ids[:-1])


def test_streams_carry_the_same_text_and_tokens(text_llm: LLM) -> None:
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=8, stop=["~~~~"])
    outputs = text_llm.generate(["one", "another prompt"], params)
    texts: dict[int, str] = {}
    tokens: dict[int, list[int]] = {}
    finals = []
    for event in text_llm.stream(["one", "another prompt"], params):
        texts[event.request_id] = texts.get(event.request_id, "") + event.text
        tokens.setdefault(event.request_id, []).extend(event.token_ids)
        if event.output:
            finals.append(event.output)
    assert sorted(texts) == sorted(tokens)
    assert list(texts.values()) == [o.text for o in outputs]
    assert list(tokens.values()) == [o.token_ids for o in outputs]
    assert len(finals) == 2


def test_interleaved_streams_and_early_close(text_llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=8, ignore_eos=True)
    want = text_llm.generate(["a", "b"], params)
    one, two = text_llm.stream(["a"], params), text_llm.stream(["b"], params)
    got = ["", ""]
    alive = [one, two]
    while alive:
        for i, it in ((0, one), (1, two)):
            if it in alive:
                event = next(it, None)
                if event is None:
                    alive.remove(it)
                else:
                    got[i] += event.text
    assert got == [o.text for o in want]
    early = text_llm.stream(["c"], params)
    next(early)
    assert text_llm.unfinished == 1
    early.close()
    assert text_llm.unfinished == 0
    assert text_llm.audit()["sequences"] == 0


def test_abort_keeps_what_was_generated(llm: LLM) -> None:
    request = llm.add([1, 2], SamplingParams(max_tokens=100, seed=1, temperature=1.0))
    waiting = [llm.add([3], SamplingParams(max_tokens=5)) for _ in range(6)]
    events = llm.step() + llm.step()
    event = llm.abort(request)
    assert event is not None and event.output is not None
    assert event.output.finish_reason is FinishReason.ABORT
    assert event.output.token_ids == [t for e in events if e.request_id == request for t in e.token_ids]
    assert llm.abort(request) is None
    for w in waiting:
        llm.abort(w)
    assert llm.unfinished == 0
    assert llm.audit()["sequences"] == 0


def test_the_context_wall_ends_a_request_cleanly(tiny: Pair) -> None:
    for context in (1 + 8, 17, 31, 64):
        llm = LLM(tiny.target, tiny.draft, max_context_len=context, page_size=4, **TREE)
        for n in sorted({1, 2, context - 2, context - 1}):
            [out] = llm.generate([[1] * n], SamplingParams(max_tokens=1000, seed=1, temperature=1.0))
            assert out.finish_reason is FinishReason.LENGTH
            assert n + len(out.token_ids) == context
        with pytest.raises(ConfigError, match=f"{context} tokens leave no room.*max_context_len = {context}"):
            llm.generate([[1] * context])
        llm.audit()


def test_unseeded_requests_report_a_seed_that_repeats_them(llm: LLM) -> None:
    [a] = llm.generate([[1]], SamplingParams(max_tokens=30, temperature=1.0))
    [b] = llm.generate([[1]], SamplingParams(max_tokens=30, temperature=1.0, seed=a.seed))
    [c] = llm.generate([[1]], SamplingParams(max_tokens=30, temperature=1.0))
    assert a.token_ids == b.token_ids
    assert a.seed != c.seed


def test_sampling_follows_the_target_distribution(tiny: Pair) -> None:
    """Chi-square of the third token over 4000 seeds, against probabilities from the model's own scores."""
    llm = LLM(tiny.target, tiny.draft, max_batch=8, **TREE)
    prompt, n = [3, 1, 4, 1, 5], 4000
    params = [SamplingParams(max_tokens=3, temperature=0.8, seed=s) for s in range(n)]
    outputs = llm.generate([prompt] * n, params)
    assert sum(o.drafted[1] for o in outputs) > n / 10, "some of the tokens must be accepted drafts"
    counts = np.zeros((VOCAB, VOCAB))
    for o in outputs:
        counts[o.token_ids[0], o.token_ids[1]] += 1
    expected = np.zeros((VOCAB, VOCAB))
    first = _probabilities(tiny, prompt)
    for t in range(VOCAB):
        expected[t] = n * first[t] * _probabilities(tiny, [*prompt, t])
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    wanted = np.append(expected[big], expected[~big].sum())
    chi2 = float(((observed - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum())
    dof = len(wanted) - 1
    # Wilson-Hilferty: the cube root of chi2/dof is normal; 4.5 sigma.
    z = ((chi2 / dof) ** (1 / 3) - (1 - 2 / (9 * dof))) / (2 / (9 * dof)) ** 0.5
    assert z < 4.5, (chi2, dof)


def _probabilities(pair: Pair, tokens: list[int]) -> np.ndarray:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, -1].double()
    return torch.softmax(logits / 0.8, -1).numpy()


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], r"prompts\[1\]: empty"), ([0, VOCAB], rf"prompts\[1\]\[1\] = {VOCAB}: outside the vocabulary"),
     ([-1], r"prompts\[1\]\[0\] = -1: outside"), ([1.5], r"prompts\[1\]\[0\] = 1.5: must be a token id"),
     ([1] * 256, r"prompts\[1\]: 256 tokens leave no room"), ("text", r"prompts\[1\]: .*tokenizer.json")],
)  # fmt: skip
def test_bad_prompts_are_refused_before_anything_happens(llm: LLM, prompt: Any, message: str) -> None:
    before = llm.audit()
    with pytest.raises(ConfigError, match=message):
        llm.generate([[1, 2], prompt])
    assert llm.unfinished == 0
    assert llm.audit() == before


def test_empty_batches_and_lone_bytes(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert list(llm.stream([])) == []
    assert llm.step() == []
    with pytest.raises(ConfigError, match="list of prompts"):
        llm.generate(b"text")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 entries for 1 prompts"):
        llm.generate([[1]], [SamplingParams(), SamplingParams()])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"topk": 4}, r"topk = 4: the tree is one option, tree=\(K, S, V\)"),
     ({"steps": 4}, "steps = 4: the tree is one"), ({"draft_tokens": 4}, "draft_tokens = 4: the tree is one"),
     ({"tree": (4, 4)}, r"tree = \(4, 4\): must be"), ({"tree": 4}, "tree = 4: must be"),
     ({"tree": "444"}, "tree = '444'"), ({"tree": (True, 1.0, None)}, "must be a TreeShape or three integers"),
     ({"tree": (0, 1, 1)}, r"tree = \(0, 1, 1\): topk = 0"),
     ({"tree": (65, 1, 1)}, "topk = 65"), ({"tree": (1, 0, 1)}, "steps"),
     ({"tree": (2, 2, 8)}, "draft_tokens = 8"), ({"page_size": 12}, "page_size = 12"),
     ({"page_size": 0}, "page_size = 0"), ({"max_batch": 0}, "max_batch = 0"), ({"max_context_len": 10**6}, "1000000"),
     ({"max_context_len": 0}, "max_context_len"), ({"num_pages": 0}, "num_pages = 0"),
     ({"prefill_chunk": 0}, "prefill_chunk = 0"),
     ({"max_batch": "3"}, "max_batch = '3': must be an integer"), ({"page_size": True}, "page_size = True"),
     ({"num_pages": 2.5}, "num_pages = 2.5: must be an integer or None"), ({"prefill_chunk": None}, "prefill_chunk"),
     ({"tree": (2.0, 1, 2)}, r"tree = \(2.0, 1, 2\): must be"), ({"prefix_cache": 3}, "prefix_cache = 3"),
     ({"max_context_len": 1}, "max_context_len = 1: must be at least 2"), ({"model": 5}, "model = 5"),
     ({"kv_dtype": "int8"}, "int8"), ({"kv_dtype": ""}, "kv_dtype = ''"), ({"kv_dtype": []}, r"kv_dtype = \[\]"),
     ({"num_pages": 10**30}, "num_pages = 10{30}: must be at most 2147483646"),
     ({"speculative": "no"}, "speculative = 'no': must be a bool"), ({"speculative": 0}, "speculative = 0"),
     ({"draft_attention": "all"}, "all"), ({"beams": 3}, "unknown option 'beams'"),
     ({"max_batch": 65536, "page_size": 1024, "tree": (64, 64, 1024)}, "int32")],
)  # fmt: skip
def test_bad_options_name_value_and_limit(tiny: Pair, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": tiny.target, "draft": tiny.draft, **options})


def test_a_tree_is_a_shape_or_three_integers(tiny: Pair) -> None:
    for tree in (TreeShape(2, 3, 8), (2, 3, 8), [2, np.int64(3), torch.tensor(8)]):
        llm = LLM(tiny.target, tiny.draft, tree=tree, max_batch=np.int32(2), max_context_len=torch.tensor(64))
        assert llm.config.shape == TreeShape(2, 3, 8) == llm._runner.geometry.shape and not llm.config.adaptive
        assert (llm.config.max_batch, llm.config.max_context_len) == (2, 64)
    assert EngineConfig().adaptive and EngineConfig().shape == TreeShape(1, 8, 9)


def test_a_request_that_can_never_fit_is_refused(tiny: Pair) -> None:
    llm = LLM(tiny.target, tiny.draft, page_size=4, num_pages=20, **TREE)
    with pytest.raises(PoolExhaustedError, match="num_pages = 20"):
        llm.generate([[1] * 60], SamplingParams(max_tokens=60))
    [out] = llm.generate([[1] * 10], SamplingParams(max_tokens=10))
    assert len(out.token_ids) == 10


def test_nan_scores_are_an_error_and_nothing_is_lost(tiny: Pair, tmp_path: Path) -> None:
    """Token 7's embedding is NaN: only a request that meets it fails, and the others go on to the same tokens."""
    target = tmp_path / "target"
    shutil.copytree(tiny.target, target)
    weights = read_weights(target)
    weights["model.embed_tokens.weight"][7] = float("nan")
    save_file(weights, target / "model.safetensors")
    good = SamplingParams(max_tokens=30, logit_bias={7: -1e9})
    sound = LLM(tiny.target, tiny.draft, **TREE)
    [want] = sound.generate([[1, 2, 3]], good)
    llm = LLM(target, tiny.draft, max_batch=4, prefix_cache=False, **TREE)
    with pytest.raises(NonFiniteError, match="request 0: target logits: NaN at position 2"):
        llm.generate([[1, 7]], SamplingParams(max_tokens=4))
    assert llm.unfinished == 0
    llm.audit()
    [after] = llm.generate([[1, 2, 3]], good)
    assert after.token_ids == want.token_ids


def test_random_requests_leave_no_page_behind(llm: LLM) -> None:
    rng = random.Random(0)
    for _ in range(30):
        params = SamplingParams(max_tokens=rng.randrange(1, 30), temperature=1.0, stop_token_ids=[rng.randrange(VOCAB)])
        llm.add([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))], params)
    while llm.unfinished:
        llm.step()
        llm.audit()
    counts = llm.audit()
    assert counts["sequences"] == 0
    assert counts["free_pages"] + counts["cached_pages"] == counts["total_pages"]


def test_what_prefill_ended_survives_a_preemption_in_the_same_step(tiny: Pair) -> None:
    """The round of a full pool preempts the request admitted last, which ended with its first token in that step."""
    # A round asks for 8 pages beside what is committed: 30 for two prompts, 21 for the third and its round.
    llm = LLM(tiny.target, tiny.draft, page_size=4, num_pages=51, max_batch=3, prefix_cache=False, **TREE)
    for token in (1, 3):
        llm.add([token] * 60, SamplingParams(max_tokens=30))
    llm.step()
    short = llm.add([2] * 50, SamplingParams(max_tokens=1))
    outputs = []
    while llm.unfinished:
        outputs += [e.output for e in llm.step() if e.output]
        llm.audit()
    assert sorted(len(o.token_ids) for o in outputs) == [1, 30, 30]
    assert next(o for o in outputs if o.request_id == short).finish_reason is FinishReason.LENGTH


def test_an_error_of_the_round_loses_nothing_of_the_prefill_before(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm.add([1, 2], SamplingParams(max_tokens=20))
    llm.step()
    with monkeypatch.context() as patch:
        one, many = (llm.add([3], SamplingParams(max_tokens=n)) for n in (1, 3))

        def fail(*_: Any, **__: Any) -> Any:
            raise NonFiniteError("scores")

        patch.setattr(llm._runner, "round", fail)
        with pytest.raises(NonFiniteError):
            llm.step()
    assert llm.unfinished == 3
    event = llm.abort(many)
    assert event is not None and event.output is not None
    assert event.token_ids == event.output.token_ids and len(event.token_ids) == 1
    ended = [e.output for e in llm.step() if e.output]
    assert [(o.request_id, len(o.token_ids)) for o in ended] == [(one, 1)]
    while llm.unfinished:
        llm.step()
    assert llm.audit()["sequences"] == 0


def test_pages_computed_twice_are_not_in_the_way_of_the_last_request(tiny: Pair) -> None:
    """Two requests compute one prefix at once; the cache keeps the first one's pages, behind which the other's hang."""
    shape = {"tree": (1, 1, 2)}
    llm = LLM(tiny.target, tiny.draft, page_size=2, num_pages=33, max_batch=2, max_context_len=64, **shape)
    prompt = [i % VOCAB for i in range(21)]
    params = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=60)]
    outputs = llm.generate([prompt[:10], prompt], params)
    [want] = LLM(tiny.target, max_context_len=64).generate([prompt], params[1])
    assert outputs[1].token_ids == want.token_ids and len(want.token_ids) == 43
    llm.audit()


def test_a_stream_ends_where_its_request_is_aborted(llm: LLM) -> None:
    stream = llm.stream([[1], [2]], SamplingParams(max_tokens=20, temperature=1.0, seed=3))
    first = next(stream)
    event = llm.abort(first.request_id)
    assert event is not None
    reasons = [str(e.output.finish_reason) for e in stream if e.output]
    assert sorted(reasons) == ["abort", "length"]


def test_what_ended_while_a_stream_stepped_is_still_told(llm: LLM) -> None:
    added, aborted = (llm.add([n], SamplingParams(max_tokens=3)) for n in (1, 2))
    llm.generate([[3]], SamplingParams(max_tokens=50))
    assert llm.unfinished == 2
    event = llm.abort(aborted)
    assert event is not None and event.output is not None
    assert event.token_ids == event.output.token_ids and str(event.output.finish_reason) == "length"
    events = llm.step()
    assert {e.request_id for e in events} == {added}
    assert [t for e in events for t in e.token_ids] == events[-1].output.token_ids  # type: ignore[union-attr]
    assert llm.unfinished == 0


def test_seconds_begin_with_admission(llm: LLM) -> None:
    stream = llm.stream([[1]], SamplingParams(max_tokens=1))
    waiting = llm.add([1])
    event = llm.abort(waiting)
    assert event is not None and event.output is not None and event.output.seconds == 0.0
    time.sleep(0.3)
    [output] = [e.output for e in stream if e.output]
    assert 0.0 < output.seconds < 0.3


def test_arrays_of_token_ids_are_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5)
    [want] = llm.generate([[1, 2, 3]], params)
    for prompt in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), (1, 2, 3)):
        [out] = llm.generate([prompt], params)
        assert out.token_ids == want.token_ids and out.prompt_token_ids == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [(b"text", None, "prompts is a bytes"), (5, None, "prompts is a int"), (None, None, "prompts is a NoneType"),
     ([1, 2], None, r"prompts\[0\] is a int"), ([[1], None], None, r"prompts\[1\] is a NoneType"),
     ([{1: 2}], None, r"prompts\[0\] is a dict"), ([b"ab"], None, r"prompts\[0\] is a bytes"),
     ([[True]], None, r"prompts\[0\]\[0\] = True: must be a token id"),
     (["a", "\ud800"], None, r"prompts\[1\]: not encodable"),
     ([torch.tensor(3)], None, r"prompts\[0\] is a Tensor: must be"),
     ([np.array(3)], None, r"prompts\[0\] is a ndarray"),
     (["a"], SamplingParams(bad_words=["x", "\ud800"]), "params: SamplingParams.bad_words: .*not encodable as UTF-8"),
     ([[1]], {"max_tokens": 3}, "params is a dict"),
     ([[1]], [None], r"params\[0\] is a NoneType"), ([[1]], 5, "params is a int")],
)  # fmt: skip
def test_arguments_of_a_wrong_type(text_llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        text_llm.generate(prompts, params)
    assert text_llm.unfinished == 0


@pytest.mark.parametrize("text", [None, 3, b"x", ["x"]])
def test_only_texts_are_encoded(text_llm: LLM, text: Any) -> None:
    with pytest.raises(ConfigError, match=f"prompt is a {type(text).__name__}: must be a text"):
        text_llm.encode(text)


def test_errors_of_parameters_say_whose(text_llm: LLM, llm: LLM, tiny: Pair) -> None:
    bad = SamplingParams(stop_token_ids=[text_llm.vocab_size])
    with pytest.raises(ConfigError, match=r"params\[1\]: SamplingParams.stop_token_ids = 300: the vocabulary has 300"):
        text_llm.generate(["a", "b"], [SamplingParams(), bad])
    with pytest.raises(ConfigError, match=r"^params: SamplingParams.stop_token_ids = 300"):
        text_llm.generate(["a", "b"], bad)
    with pytest.raises(ConfigError, match=r"params\[0\]: SamplingParams.stop = .*tokenizer.json"):
        llm.generate([[1]], [SamplingParams(stop="x")])
    with pytest.raises(ConfigError, match=r"^prompt\[1\] = 99999: outside"):
        text_llm.add([1, 99999])
    small = LLM(tiny.target, page_size=4, num_pages=20, speculative=False)
    with pytest.raises(PoolExhaustedError, match=r"^prompts\[1\]: a request of up to 120 tokens"):
        small.generate([[1], [1] * 60], SamplingParams(max_tokens=60))


@pytest.mark.parametrize("context", [2, 3, 7, 40])
def test_the_cost_model_is_measured_in_any_context(tiny: Pair, context: int) -> None:
    llm = LLM(tiny.target, tiny.draft, max_context_len=context)
    [out] = llm.generate([[1]])
    assert len(out.token_ids) == context - 1


def test_a_pool_beyond_memory_is_a_typed_error(tiny: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", fail)
    with pytest.raises(ConfigError, match=r"no memory for \d+ bytes, num_pages = 41 "):
        LLM(tiny.target, page_size=4, num_pages=40)


def test_scalars_for_matrices_and_bottomless_json(tiny: Pair, tmp_path: Path) -> None:
    for name in ("fc.weight", "lm_head.weight"):
        draft = tmp_path / name
        shutil.copytree(tiny.draft, draft)
        save_file({**read_weights(draft), name: torch.tensor(1.0)}, draft / "model.safetensors")
        with pytest.raises(ConfigError, match=name):
            LLM(tiny.target, draft, **TREE)
    (draft / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json: not readable as JSON"):
        LLM(tiny.target, draft, **TREE)


def test_a_device_is_named_and_there(tiny: Pair) -> None:
    for asked in ("gpu", "cuda:", "cuda:-1", "cuda:0:1", "CUDA", "", 0, True):
        with pytest.raises(ConfigError, match="must be 'cpu', 'cuda' or 'cuda:N'"):
            LLM(tiny.target, device=asked)
    with LLM(tiny.target, device="cpu") as llm:
        assert "device='cpu'" in repr(llm)
    if not cuda_available():
        with pytest.raises(CudaError, match="device = 'cuda:1': "):
            LLM(tiny.target, device="cuda:1")


def test_one_prompt_by_itself_is_a_list_of_one(bytes_pair: Pair) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    with LLM(bytes_pair.target, speculative=False) as llm:
        [want] = llm.generate(["abc"], params)
        for prompt in ("abc", {"prompt": "abc"}, {"prompt_token_ids": llm.encode("abc")}):
            assert [o.token_ids for o in llm.generate(prompt, params)] == [want.token_ids]
        assert [e.output.token_ids for e in llm.stream("abc", params) if e.output] == [want.token_ids]
        with pytest.raises(ConfigError, match="prompts is a bytes: give a list of prompts"):
            llm.generate(b"abc", params)  # type: ignore[arg-type]


def test_long_texts_have_the_tokens_of_short_ones(bytes_pair: Pair) -> None:
    with LLM(bytes_pair.target, speculative=False) as llm:
        text = "abcdefgh" * 1024
        assert llm.encode(text) == llm.tokenizer.encode(text).ids  # type: ignore[union-attr]
