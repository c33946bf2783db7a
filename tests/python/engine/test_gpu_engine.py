"""The engine on a GPU: the bits of every logit that decides a token depend on the request's tokens alone.

Plain decoding of one request is the reference. Speculation of any tree, batches, chunks of any size, the prefix cache,
preemption and page sizes must give the same tokens and, at every position, the same logits bit for bit.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bits_world import PARAMS, check, plain, recorded, requests
from modelzoo import Pair, agree, write_eagle1, write_eagle3, write_target
from specrs import LLM, SamplingParams, SpecrsError, assets, device
from specrs import _specrs as core
from specrs.models import Placement, load_target, torch_ops

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

write_qwen3_head = functools.partial(write_eagle3, qk_norm=True)
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.02, "residual_multiplier": 0.22,
           "logits_scaling": 0.5}  # fmt: skip
GEMMA2 = {"query_pre_attn_scalar": 40, "sliding_window": 8192, "attn_logit_softcapping": 5.0,
          "final_logit_softcapping": 30.0}  # fmt: skip
GEMMA3 = {"query_pre_attn_scalar": 40, "sliding_window": 8192, "rope_local_base_freq": 5000.0}
# architecture, heads, kv heads, head_dim, dtype, and what else config.json says; the head is EAGLE-3's, or EAGLE-1's
SHAPES = [
    pytest.param(("LlamaForCausalLM", 4, 4, 64, torch.bfloat16), id="llama-group1-64-bf16"),
    pytest.param(("Qwen2ForCausalLM", 4, 2, 64, torch.bfloat16), id="qwen2-group2-64-bf16"),
    pytest.param(("Qwen3ForCausalLM", 4, 1, 128, torch.bfloat16), id="qwen3-group4-128-bf16"),
    pytest.param(("MistralForCausalLM", 7, 1, 64, torch.float16), id="mistral-group7-64-f16"),
    pytest.param(("LlamaForCausalLM", 8, 1, 64, torch.float16), id="llama-group8-64-f16"),
    pytest.param(("LlamaForCausalLM", 2, 1, 96, torch.bfloat16), id="llama-group2-96-bf16"),
    pytest.param(("Phi3ForCausalLM", 4, 2, 96, torch.bfloat16), id="phi3-group2-96-bf16"),
    # One layer without rope.
    pytest.param(("SmolLM3ForCausalLM", 4, 1, 64, torch.bfloat16), id="smollm3-group4-64-bf16"),
    pytest.param(("GraniteForCausalLM", 4, 2, 64, torch.bfloat16, GRANITE), id="granite-64-bf16"),
    pytest.param(("Olmo2ForCausalLM", 4, 2, 128, torch.bfloat16), id="olmo2-128-bf16"),
    pytest.param(("GemmaForCausalLM", 4, 1, 256, torch.bfloat16), id="gemma-256-bf16"),
    pytest.param(("Gemma2ForCausalLM", 4, 2, 256, torch.bfloat16, GEMMA2), id="gemma2-256-bf16"),
    pytest.param(("Gemma2ForCausalLM", 4, 2, 128, torch.float16, GEMMA2), id="gemma2-128-f16"),
    pytest.param(("Gemma3ForCausalLM", 4, 1, 256, torch.bfloat16, GEMMA3), id="gemma3-256-bf16"),
    pytest.param(("Qwen3ForCausalLM", 4, 2, 64, torch.bfloat16, {}, write_qwen3_head), id="qwen3-normed-head-bf16"),
    pytest.param(("LlamaForCausalLM", 4, 2, 64, torch.bfloat16, {}, write_eagle1), id="llama-eagle1-bf16"),
    pytest.param(("Gemma3ForCausalLM", 2, 1, 128, torch.bfloat16, GEMMA3, write_eagle1), id="gemma3-eagle1-bf16"),
]
TREES = [(1, 1, 2), (1, 6, 7), (2, 3, 8), (3, 6, 33), (4, 2, 16), (8, 6, 64), (8, 3, 5), (5, 4, 40)]


@pytest.fixture(scope="module", params=SHAPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """8 tokens only, and a head that is right often enough (`agree`)."""
    architecture, heads, kv_heads, head_dim, dtype, *more = request.param
    changes, write_head = more[0] if more else {}, more[1] if len(more) > 1 else write_eagle3
    root = tmp_path_factory.mktemp("gpu")
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    target = write_target(
        root / "target", architecture, dtype=dtype, vocab_size=8, eos_token_id=None, bos_token_id=None,
        max_position_embeddings=8192, **sizes, **changes,
    )  # fmt: skip
    own = {} if write_head is write_eagle1 else {"draft_vocab_size": 8}
    draft = write_head(root / "draft", target, dtype=dtype, head_dim=64, **own)
    agree(target, draft)
    return Pair(target, draft)


pytestmark = pytest.mark.usefixtures("no_fault_is_left")


@pytest.mark.parametrize("kind", PARAMS)
def test_every_tree_page_and_chunk_gives_the_bits_of_plain_decoding(pair: Pair, kind: str) -> None:
    prompts, params = requests(1, kind)
    want, paths = plain(pair, prompts, params), []
    for tree, page, batch, chunk, graphs in zip(
        TREES, itertools.cycle([1, 4, 16, 64]), itertools.cycle([5, 1, 3]), itertools.cycle([7, 512, 32, 1]),
        itertools.cycle(["round", "loop", "round", "loop", "off"]),
    ):  # fmt: skip
        with LLM(pair.target, pair.draft, device="cuda", tree=tree, page_size=page, max_batch=batch,
                 prefill_chunk=chunk, graphs=graphs) as llm:  # fmt: skip
            paths += check(llm, prompts, params, want)
    # To mean anything: drafts were accepted, at depth and off the spine, whose nodes are numbered by their depth.
    assert max(len(path) - 1 for path in paths) >= (2 if kind == "sampled" else 3)
    assert sum(len(path) - 1 for path in paths) >= 100
    assert sum(node != depth for path in paths for depth, node in enumerate(path)) >= 50


def test_rounds_are_captured(pair: Pair) -> None:
    """No family allocates memory, moves it, or waits for the device between kernels."""
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with LLM(pair.target, pair.draft, device="cuda", tree=(2, 3, 8), max_batch=1) as llm:
        llm.generate([[1, 2, 3]], params)
        executor: Any = llm._runner.executor
        kept = {variant: bucket for bucket in executor._buckets.values() for variant in bucket.graphs.made}
        assert any(variant.levels for variant in kept)
        assert not any(n for bucket in kept.values() for n in bucket.graphs.failures.values())


def test_long_contexts_give_the_bits_of_plain_decoding(pair: Pair) -> None:
    """Over the borders of blocks and splits."""
    prompts, params = requests(2, "greedy", long=1100)
    prompts = [[*p, *prompts[-1]] * 3 for p in prompts[:3]]
    params = [*params[:2], replace(params[2], max_tokens=60, ignore_eos=True)]  # the last request to join runs on alone
    want = plain(pair, prompts, params)
    for tree, page, chunk in (((8, 6, 64), 16, 100), ((2, 5, 12), 1, 512), ((1, 6, 7), 64, 1000)):
        with LLM(pair.target, pair.draft, device="cuda", tree=tree, page_size=page, max_batch=3,
                 prefill_chunk=chunk) as llm:  # fmt: skip
            check(llm, prompts, params, want)


def test_up_to_the_wall_of_the_context(pair: Pair) -> None:
    """Draft steps run past it, for requests that are closer to it than others."""
    prompts = [[i % 8] * n for i, n in enumerate((40, 57, 61, 62))]
    params = [SamplingParams(max_tokens=99, temperature=0.0)] * 4
    want = plain(pair, prompts, params, max_context_len=64)
    for tree, page in (((4, 4, 16), 1), ((3, 6, 20), 4), ((1, 6, 7), 16)):
        with LLM(pair.target, pair.draft, device="cuda", tree=tree, page_size=page, max_batch=3,
                 max_context_len=64) as llm:  # fmt: skip
            check(llm, prompts, params, want)


def test_rounds_that_somebody_looks_at_decide_the_same(pair: Pair) -> None:
    """The host drafts those, step by step, and its trees enter a round at verification."""
    prompts, params = requests(6, "sampled")
    plainly = plain(pair, prompts, params)
    with LLM(pair.target, pair.draft, device="cuda", tree=(3, 4, 12), page_size=4) as llm:
        seen: list[Any] = []
        want = [o.token_ids for o in llm.generate(prompts, params)]
        with llm.watching(lambda trees, accepts: seen.append((trees.sizes, accepts.paths))):
            assert check(llm, prompts, params, plainly)
        executor: Any = llm._runner.executor
        made = {variant for bucket in executor._buckets.values() for variant in bucket.graphs.failures}
        assert any(variant.trees for variant in made), "no tree of the host was launched"
        assert any(max(sizes) > 1 for sizes, _ in seen)
        assert [o.token_ids for o in llm.generate(prompts, params)] == want


@pytest.mark.parametrize("kind", ["sampled", "drawn"])
def test_prefix_cache_and_preemption_change_no_bit(pair: Pair, kind: str) -> None:
    prompts, params = requests(3, kind)
    want = plain(pair, prompts, params)
    with LLM(pair.target, pair.draft, device="cuda", tree=(4, 3, 16), page_size=4, max_batch=2) as llm:
        check(llm, prompts, params, want)
        check(llm, prompts, params, want)  # from the cache
        assert sum(o.usage.cached_tokens for o in llm.generate(prompts, params)) > 0
    most = max(len(p) + s.max_tokens for p, s in zip(prompts, params, strict=True))
    with LLM(pair.target, pair.draft, device="cuda", tree=(4, 3, 16), page_size=4, max_batch=5, prefix_cache=False,
             num_pages=-(-most // 4) + 12) as llm:  # fmt: skip
        preempted, preempt = [], llm._scheduler._preempt

        def counted(request: Any) -> None:
            preempted.append(request.request_id)
            preempt(request)

        llm._scheduler._preempt = counted  # type: ignore[method-assign]
        check(llm, prompts, params, want)
        assert preempted, "the pool had room for all"


def test_without_a_tree_the_cost_model_picks_and_nothing_changes(pair: Pair) -> None:
    prompts, params = requests(4, "sampled")
    want = plain(pair, prompts, params)
    with LLM(pair.target, pair.draft, device="cuda") as llm:
        check(llm, prompts, params, want)


def test_logits_are_as_exact_as_a_bf16_forward_in_torch(pair: Pair, tmp_path: Path) -> None:
    """Against the same weights in f32 on the host."""
    prompt = [random.Random(5).randrange(8) for _ in range(300)]
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    options: dict[str, Any] = {"speculative": False, "max_batch": 1}
    with LLM(pair.target, device="cuda", **options) as gpu, LLM(pair.target, device="cpu", **options) as cpu:
        got, want = recorded(gpu, [prompt], [greedy])[1], recorded(cpu, [prompt], [greedy])[1]
        runner = cpu._runner
        half = gpu._runner.executor.target.ops.placement.activations
        model = load_target(pair.target, torch_ops(Placement(torch.device("cuda"), half)), 8192)
        cache = model.new_cache(600, 16)
        seq = runner.pages.pool.create()
        with runner.pages.pool.reserve([(seq, len(prompt))]):
            plan = runner.executor.planner.extend([seq], [0], [len(prompt)])
            tokens, last = (torch.tensor(v, device="cuda") for v in (prompt, [len(prompt) - 1]))
            torch_bf16 = model.forward(tokens, plan, cache, None, last)[0]
        runner.pages.pool.release([seq])
    row = (0, len(prompt) - 1)
    exact, ours = (torch.frombuffer(bytearray(b[row]), dtype=torch.float32) for b in (want, got))
    error, reference = (ours - exact).abs().max(), (torch_bf16.float().cpu()[0] - exact).abs().max()
    assert error <= 2 * reference + 1e-2, (error, reference)


def test_the_model_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = assets.heldout_prompts()[:6]
    params = SamplingParams(max_tokens=48, temperature=0.0)
    with LLM(device="cuda", speculative=False, max_batch=1) as llm:
        want = [llm.generate([p], params)[0].token_ids for p in prompts]
    for options in ({}, {"tree": (4, 4, 16), "page_size": 4}, {"tree": (8, 6, 64)}, {"tree": (1, 5, 6)}):
        with LLM(device="cuda", max_batch=6, **options) as llm:
            outputs = llm.generate(prompts, params)
        assert [o.token_ids for o in outputs] == want
    assert sum(len(o.token_ids) for o in outputs) / sum(o.rounds for o in outputs) > 3


def test_engines_side_by_side_do_not_disturb_each_other(pair: Pair) -> None:
    """Two on one device in turns, round by round; scratch memory that one grows is not the other's."""
    prompts, params = requests(7, "drawn")
    want, _ = plain(pair, prompts, params)
    first = LLM(pair.target, pair.draft, device="cuda", tree=(4, 3, 16), page_size=4, max_batch=2)
    second = LLM(pair.target, pair.draft, device="cuda", tree=(2, 5, 12), page_size=1, max_batch=5, prefill_chunk=16)
    with first, second:
        assert interleaved([first, second], prompts, params) == [want, want]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_two_engines_on_two_gpus(pair: Pair) -> None:
    prompts, params = requests(8, "drawn")
    want, _ = plain(pair, prompts, params)
    engines = [LLM(pair.target, pair.draft, device=f"cuda:{i}", tree=(4, 3, 16), page_size=4) for i in (0, 1)]
    with engines[0], engines[1]:
        assert interleaved(engines, prompts, params) == [want, want]


def interleaved(engines: list[LLM], prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    """Tokens of each engine, whose steps take turns."""
    found: list[dict[int, list[int]]] = [{} for _ in engines]
    ids = [[llm.add(p, one) for p, one in zip(prompts, params, strict=True)] for llm in engines]
    while any(llm.unfinished for llm in engines):
        for llm, tokens in zip(engines, found, strict=True):
            if llm.unfinished:
                tokens |= {e.request_id: e.output.token_ids for e in llm.step() if e.output is not None}
    return [[tokens[i] for i in some] for tokens, some in zip(found, ids, strict=True)]


def test_an_engine_leaves_no_memory_behind(pair: Pair) -> None:
    def used() -> int:
        gc.collect()
        core._graph_collect(True)  # graphs go once nobody replays them, with what they keep
        torch.cuda.synchronize()
        core._device_collect(torch.cuda.current_device())
        return torch.cuda.memory_allocated() + core._device_memory(torch.cuda.current_device())[3]

    def run() -> None:
        with LLM(pair.target, pair.draft, device="cuda", tree=(4, 3, 16)) as llm:
            llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=20, temperature=0.0))

    run()
    before = used()
    for _ in range(3):
        run()
    assert used() <= before


def test_what_cannot_run_here_is_refused(pair: Pair, tmp_path: Path) -> None:
    odd = write_target(tmp_path / "odd", vocab_size=300)
    for options, model, words in (
        ({"device": "cuda:99"}, pair.target, "there are"),
        ({"device": "cuda"}, odd, "head_dim = 32"),
        ({"device": "cuda", "kv_dtype": "float32"}, pair.target, "kv_dtype = 'float32'"),
        ({"device": "cuda", "attention_backend": "flashinfer"}, pair.target, "attention_backend = 'flashinfer'"),
    ):
        with pytest.raises(SpecrsError, match=words):
            LLM(model, **options)
    for tree, words in (((8, 9, 64), "72 draft slots"), ((4, 8, 32), "at most 7 steps"), ((8, 6, 65), "65 tokens")):
        with pytest.raises(SpecrsError, match=words):
            LLM(pair.target, pair.draft, device="cuda", tree=tree)
