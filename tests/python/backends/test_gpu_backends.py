"""Each backend's kernels on a GPU: every phase beside float64 and specrs's own kernels, and an engine over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from driver_calls import driver_calls
from modelzoo import Pair, agree, write_eagle3, write_target
from pass_world import PHASES, Heads, Layout, Pass, Requests
from seen_runs import seen
from specrs import LLM, ConfigError, SamplingParams, device
from specrs.backends import MATRIX, FlashAttentionCuda, FlashInferCuda, TritonCuda
from specrs.backends.base import Format, Phase
from specrs.engine.rounds.observer import Watching
from specrs.models.cuda_attention import device_attention

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)


def formats() -> list[Any]:
    """The formats whose backend has kernels on this machine; the others with the reason why they are skipped."""
    found = []
    for row in MATRIX:
        if row.device == "cuda" and row.backend.format != "native":
            try:
                device_attention(row.backend())
            except ConfigError as error:
                found.append(pytest.param(row.backend.format, marks=pytest.mark.skip(str(error))))
            else:
                found.append(row.backend.format)
    return found


FORMATS = formats()
CUDA = torch.device("cuda", 0)
CLASSES: dict[str, Any] = {
    "flashinfer": FlashInferCuda, "flash_attention": FlashAttentionCuda, "triton": TritonCuda
}  # fmt: skip
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of a result near 1
LEVELS = ("round", "loop", "off")
VOCAB = 16
NEAR = 0.05
"""Most that two log-probabilities may differ where two backends, both of bfloat16, take one for the other."""
MOST_TIES = 4
"""Most requests of ten that may part from the reference: two of five prompts, each run twice."""

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def native(one: Pass) -> torch.Tensor:
    """The output of specrs's own kernels over the same KV."""
    launch, out = one.native(CUDA)
    launch()
    torch.cuda.synchronize()
    device.check()
    return out.float().cpu()


@contextmanager
def compiled() -> Iterator[None]:
    """Skip where FlashInfer has no kernels for the heads at hand and cannot compile them."""
    try:
        yield
    except ConfigError as error:
        if "no compiled kernels" in str(error):
            pytest.skip(str(error))
        raise


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Equal within the roundings of the weights, the values' sums and the result."""
    torch.testing.assert_close(got, want, rtol=4 * ULP[dtype], atol=4 * ULP[dtype])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("shape", "page", "layout"),
    [((1, 1, 2), 1, "dense"), ((1, 4, 5), 64, "dense"), ((4, 3, 9), 1, "dense"), ((4, 3, 33), 16, "holey"),
     ((8, 6, 64), 16, "dense"), ((8, 6, 64), 64, "holey")],
)  # fmt: skip
def test_every_phase_and_layout(
    format: Format, phase: Phase, shape: tuple[int, int, int], page: int, layout: Layout
) -> None:
    for heads in (Heads(2, 4, 128, torch.bfloat16), Heads(1, 3, 64, torch.bfloat16)):
        for seed in (1, 2):
            one = Pass(Requests(seed, shape, page, layout, context=700), phase, heads, format=format)
            want = one.reference()
            got = one.kernels(CUDA)
            close(got, want, heads.dtype)
            if format != "triton":
                launch, out = one.planned(CUDA)  # as another engine calls the backend
                launch()
                close(out.float().cpu(), want, heads.dtype)
            if layout == "dense":
                want = native(one)
                close(got[: len(want)], want, heads.dtype)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_head_size_and_type(format: Format, dim: int, dtype: str) -> None:
    """FlashInfer compiles its kernels for each type and size when they first run."""
    if dim not in CLASSES[format].head_dims:
        pytest.skip(f"{format} does not declare heads of {dim}")
    heads = Heads(1, 7 if dim == 96 else 2, dim, DTYPES[dtype])
    for phase in PHASES:
        one = Pass(Requests(5, (4, 3, 17), 16, "dense", context=500), phase, heads, format=format)
        with compiled():
            got = one.kernels(CUDA)
        close(got, one.reference(), heads.dtype)
        want = native(one)
        close(got[: len(want)], want, heads.dtype)
        seen("heads", backend=format, phase=phase, head_dim=dim, dtype=dtype)


@pytest.mark.parametrize("format", [name for name in FORMATS if name == "flashinfer"])
def test_kernels_that_are_not_compiled_are_named(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    heads = Heads(1, 2, 192, torch.bfloat16)  # a size that no backend declares, so that nobody has compiled it
    one = Pass(Requests(5, (4, 3, 17), 16, "dense", context=500), "decode", heads, format=format)
    with pytest.raises(ConfigError, match=r"no compiled kernels for heads of 192 in bfloat16, .* nvcc, ninja"):
        one.kernels(CUDA)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("layout", ["dense", "holey"])
def test_another_engine_calls_the_backend_in_its_graph(format: Format, phase: Phase, layout: Layout) -> None:
    """`prepare` and `attend` over tensors of the device; ``attend`` in a graph of torch, replayed over other KV."""
    requests = Requests(3, (4, 3, 9), 4, layout, context=300)
    one, other = (Pass(requests, phase, Heads(2, 2, 64, torch.bfloat16), seed=n, format=format) for n in (0, 1))
    arrays = {name: array.to(CUDA) for name, array in one.arrays.items()}
    q, keys, values = (t.to(CUDA) for t in (one.q, one.keys, one.values))
    backend = CLASSES[format]()
    prepared = backend.prepare(one.step(arrays))
    close(backend.attend(prepared, keys, values, q, one.scale).float().cpu(), one.reference(), torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.attend(prepared, keys, values, q, one.scale)
    for there, here in ((q, other.q), (keys, other.keys), (values, other.values)):
        there.copy_(here)
    out.fill_(torch.nan)
    graph.replay()
    close(out.float().cpu(), other.reference(), torch.bfloat16)
    seen("foreign graph", backend=format, phase=phase, draft_layout=layout)


# -- an engine --------------------------------------------------------------------------------------------------------


def pair_of(root: Path, dtype: torch.dtype) -> Pair:
    target = write_target(
        root / "target", dtype=dtype, head_dim=64, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None,
        max_position_embeddings=1024, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=dtype, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(tmp_path_factory.mktemp("backends"), torch.bfloat16)


def engine(pair: Pair, backend: str, **options: Any) -> LLM:
    options = {"max_context_len": 320, "max_batch": 3, "device": "cuda", "num_pages": None, **options}
    return LLM(pair.target, pair.draft, attention_backend=backend, **options)


PROMPTS = [[random.Random(n).randrange(VOCAB) for _ in range(n)] for n in (1, 17, 63, 200, 260)]
GREEDY = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


def plainly(pair: Pair) -> list[Any]:
    """Plain decoding by specrs's own kernels, whose tokens do not depend on trees, pages or batches."""
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, logprobs=3)
    with LLM(pair.target, speculative=False, max_context_len=320, max_batch=1, device="cuda") as llm:
        return [o.outputs[0] for o in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def reference(pair: Pair) -> list[Any]:
    return plainly(pair)


def compare(reference: list[Any], got: list[list[int]]) -> list[tuple[int, int, float]]:
    """Return the ties at which tokens part: request, position, and how much more probable the reference's token is."""
    ties = []
    for i, (want, tokens) in enumerate(zip(reference, got, strict=True)):
        at = next((n for n, (a, b) in enumerate(zip(want.token_ids, tokens, strict=True)) if a != b), None)
        if at is not None:
            scores = want.logprobs[at]
            assert tokens[at] in scores, (i, at, tokens[at], scores)
            margin = scores[want.token_ids[at]].logprob - scores[tokens[at]].logprob
            ties.append((i, at, margin))
    return ties


@pytest.fixture(scope="module")
def accepted(pair: Pair) -> Any:
    """The tokens a round of native's engine with a tree, what its branches attend to, and pages."""
    known: dict[Any, float] = {}

    def of(tree: Any, page: int, attention: str) -> float:
        if (tree, page, attention) not in known:
            with engine(pair, "native", tree=tree, page_size=page, draft_attention=attention) as llm:
                known[tree, page, attention] = mean_accepted(llm.generate(PROMPTS, GREEDY))
        return known[tree, page, attention]

    return of


def mean_accepted(outputs: list[Any]) -> float:
    return sum(o.mean_accepted for o in outputs) / len(outputs)


def combinations() -> list[Any]:
    """K in 1, 4, 8 by P in 1, 16, 64 by both layouts, where they differ; the graph levels take turns."""
    found: list[Any] = [(None, 16, {"graphs": "round"})]
    for i, tree in enumerate(((1, 4, 5), (4, 3, 12), (8, 6, 40))):
        for j, page in enumerate((1, 16, 64)):
            found.append((tree, page, {"graphs": LEVELS[(i + j) % 3]}))
            if tree[0] > 1 and page > 1:
                found.append((tree, page, {"graphs": LEVELS[(i + j + 1) % 3], "draft_layout": "holey"}))
    # The other draft attention than the layout's first.
    found.append(((4, 3, 12), 16, {"graphs": "round", "draft_attention": "lane"}))
    found.append(((4, 3, 12), 16, {"graphs": "round", "draft_attention": "lane", "draft_layout": "holey"}))
    return found


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("tree", "page", "options"), combinations())
def test_an_engines_tokens_are_natives_but_at_ties(
    pair: Pair, reference: list[Any], accepted: Any, format: Format, tree: Any, page: int, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("SPECRS_POISON", "1")
    with engine(pair, format, tree=tree, page_size=page, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
        ties = compare(reference, [o.outputs[0].token_ids for o in outputs])
        again = llm.generate(PROMPTS, GREEDY)
        ties += compare(reference, [o.outputs[0].token_ids for o in again])  # with the prefix cache
        buckets: Any = llm._runner.executor._buckets
        made = {variant for bucket in buckets.values() for variant in bucket.graphs.made}
        assert bool(made) is (options["graphs"] != "off")
        assert any(variant.loop for variant in made) is (options["graphs"] == "loop")
        llm.audit()
        attention = llm.config.draft_attention
    assert all(margin < NEAR for *_, margin in ties), ties
    assert len(ties) <= MOST_TIES, ties
    if tree is None:
        # An engine that picks its trees drafts by what passes take: a head that agrees pays at once.
        assert mean_accepted(outputs) > 1.2, [o.mean_accepted for o in outputs]
    else:
        assert mean_accepted(outputs) == pytest.approx(accepted(tree, page, attention), rel=0.1)
    seen_engine(format, tree, page, {**options, "draft_attention": attention}, ties)


def seen_engine(format: Format, tree: Any, page: int, options: dict[str, Any], ties: list[Any]) -> None:
    margins = [round(margin, 5) for *_, margin in ties]
    row = {"draft_layout": "dense", "kv_dtype": "bfloat16", **options}
    seen("engine", backend=format, tree=tree, page_size=page, **row, ties=margins)


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_of_float16(tmp_path: Path, format: Format) -> None:
    pair = pair_of(tmp_path, torch.float16)
    with compiled(), engine(pair, format, tree=(4, 3, 12), page_size=16) as llm:
        assert llm.config.kv_dtype == "float16"
        ties = compare(plainly(pair), [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY)])
        attention = llm.config.draft_attention
    assert len(ties) <= MOST_TIES and all(margin < NEAR for *_, margin in ties), ties
    seen_engine(format, (4, 3, 12), 16, {"graphs": "round", "draft_attention": attention, "kv_dtype": "float16"}, ties)


@pytest.mark.parametrize("format", FORMATS)
def test_drafts_of_a_long_prompt_are_priced_by_its_length(pair: Pair, format: Format) -> None:
    """The head reads all of a request, which native's does not."""
    with engine(pair, format, tree=None) as llm, engine(pair, "native", tree=None) as other:
        costs, natives = (each._runner.drafting.policy.costs for each in (llm, other))
        for passes in (costs.enter, costs.resume):
            assert passes.at(300) > passes.at(64) > 0, passes.table
        assert natives.enter.at(300) == natives.enter.at(64)


@pytest.mark.parametrize("format", FORMATS)
def test_the_hosts_drafts_and_sampling(pair: Pair, format: Format) -> None:
    """Rounds whose drafts the host makes step by step, as it does where somebody looks on, and sampled rounds."""
    drawn = SamplingParams(max_tokens=30, temperature=0.9, seed=3, ignore_eos=True)
    with engine(pair, format, tree=(4, 3, 12), page_size=16) as llm:
        want = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:2], [GREEDY, drawn])]
        assert [len(tokens) for tokens in want] == [48, 30]
        sizes: list[int] = []
        llm._runner.observers.append(Watching(lambda trees, _: sizes.append(max(trees.sizes))))
        llm.generate(PROMPTS[:2], [GREEDY, drawn])
        assert max(sizes) > 1
        llm.audit()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("graphs", ["round", "loop"])
def test_a_steady_round_makes_no_synchronisation(pair: Pair, format: Format, graphs: str) -> None:
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    with engine(pair, format, tree=(4, 3, 12), graphs=graphs, max_batch=4, page_size=16) as llm:
        llm.generate([[1, 2, 3]] * 4, params)
        ids = [llm.add([1, 2, 3], params) for _ in range(4)]
        for _ in range(8):
            llm.step()
        with driver_calls() as calls:
            for _ in range(12):
                llm.step()
        assert llm.unfinished == 4 and calls.calls
        assert not calls.synchronisations, calls
        for i in ids:
            llm.abort(i)
        llm.audit()
    seen("synchronisations", backend=format, graphs=graphs, steps=12, waits=0)


@pytest.mark.parametrize("format", FORMATS)
def test_what_the_engine_says_of_its_numerics(pair: Pair, format: Format) -> None:
    with engine(pair, format, tree=(1, 4, 5)) as llm:
        assert llm.numerics["attention"] == format and "attention_rule" not in llm.numerics
        assert format in str(llm.budget)


@pytest.mark.parametrize("format", FORMATS)
def test_scores_that_are_capped_are_refused(tmp_path: Path, format: Format) -> None:
    target = write_target(
        tmp_path / "target", "Gemma2ForCausalLM", dtype=torch.bfloat16, head_dim=128, vocab_size=VOCAB,
        eos_token_id=None, bos_token_id=None, query_pre_attn_scalar=40, sliding_window=8192,
        attn_logit_softcapping=5.0, final_logit_softcapping=30.0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=rf"'{format}': caps no scores.*which 'native' does"):
        LLM(target, attention_backend=format, device="cuda")
