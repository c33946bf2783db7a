"""Heads that draft all levels in one pass, in engines on a GPU: tokens and the bits of the logits that decide them are
those of plain decoding."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import blockzoo
import headzoo
import modelzoo
import reference_blocks
import reference_heads
from bits_world import PARAMS, check, plain, requests
from modelzoo import Pair
from reference_blocks import Block
from reference_heads import Sizes
from specrs import LLM, ConfigError, SamplingParams, StructuredOutputs, device
from specrs import _specrs as core

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

LAYERS = 4
SMALL = Block(
    rows=6, mask=3, heads=4, kv_heads=2, head_dim=64, inner=96, vocab=8, streams=(1, 3), rank=16, state=16
)  # fmt: skip
FORMS: dict[str, tuple[str, Any]] = {
    "DFlash": ("DFlash", replace(SMALL, rows=16)),
    "JetSpec": ("JetSpec", replace(SMALL, causal=True, rows=16)),
    "DSpark-Markov": ("DSpark", replace(SMALL, anchor=True, markov="vanilla")),
    "DeepSpec-Markov": ("DeepSpec", replace(SMALL, anchor=True, markov="rnn", own_embedding=True)),
    "Domino-GRU": ("Domino", replace(SMALL, free=1, anchor=True)),
    "Flash2": ("DFlash2", replace(SMALL, taps=2, group=8, candidates=5, rows=7)),
    "P-EAGLE": (
        "P-EAGLE",
        Sizes(hidden=64, heads=4, kv_heads=2, head_dim=64, inner=96, vocab=8, draft_vocab=None, mask=3, levels=5,
              layers=2, streams=(1, 2, 3)),
    ),
}  # fmt: skip
TREES: list[Any] = [(1, 5, 6), (3, 6, 33), (8, 15, 64), (2, 1, 2), None]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def pair_of(directory: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Pair:
    """A target of 8 tokens and a head that often foretells it."""
    form, b = FORMS[name]
    target = modelzoo.write_target(
        directory / "target", "Qwen3ForCausalLM", head_dim=64, dtype=dtype, vocab_size=b.vocab, eos_token_id=None,
        bos_token_id=None, max_position_embeddings=8192,
    )  # fmt: skip
    if isinstance(b, Sizes):
        weights = headzoo.agree(target, b, reference_heads.random_head(b, 1))
        headzoo.save_head(directory / "head", form, b, LAYERS, {n: w.to(dtype) for n, w in weights.items()})
    else:
        weights = blockzoo.agree(target, b, reference_blocks.random_block(b, 1))
        blockzoo.save_block(directory / "head", form, b, LAYERS, {n: w.to(dtype) for n, w in weights.items()})
    return Pair(target, directory / "head")


@pytest.fixture(scope="module", params=FORMS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_of(tmp_path_factory.mktemp("blocks"), request.param)


@pytest.mark.parametrize("kind", PARAMS)
def test_every_tree_page_and_chunk_gives_the_bits_of_plain_decoding(pair: Pair, kind: str) -> None:
    prompts, params = requests(1, kind)
    want, paths = plain(pair, prompts, params), []
    for tree, page, batch, chunk, graphs in zip(
        TREES, itertools.cycle([1, 4, 16, 64]), itertools.cycle([5, 1, 3]), itertools.cycle([7, 512, 32]),
        itertools.cycle(["round", "loop", "off"]),
    ):  # fmt: skip
        with LLM(pair.target, pair.draft, device="cuda", tree=tree, page_size=page, max_batch=batch,
                 prefill_chunk=chunk, graphs=graphs) as llm:  # fmt: skip
            paths += check(llm, prompts, params, want)
    accepted = sum(len(path) - 1 for path in paths)
    assert accepted >= 40, "drafts must have been accepted for this to mean anything"
    if kind == "sampled":  # the others' targets hardly ever leave the likeliest path
        assert any(node != depth for path in paths for depth, node in enumerate(path)), "and off the spine"


def test_prefix_cache_and_preemption_change_no_bit(pair: Pair) -> None:
    prompts, params = requests(3, "drawn")
    want = plain(pair, prompts, params)
    with LLM(pair.target, pair.draft, device="cuda", tree=(4, 3, 16), page_size=4, max_batch=2) as llm:
        check(llm, prompts, params, want)
        check(llm, prompts, params, want)  # from the cache
        outputs = llm.generate(prompts, params)
        assert sum(o.usage.cached_tokens for o in outputs) > 0 and sum(o.proposed for o in outputs) > 0
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


@pytest.mark.parametrize("graphs", ["off", "loop"])
def test_the_cost_model_picks_among_all_sources(pair: Pair, graphs: Any) -> None:
    """Rounds without drafts run ahead between those with some, and write the draft KV of a head of blocks."""
    prompts, params = requests(4, "drawn")
    params = [replace(one, max_tokens=90) for one in params]
    want = plain(pair, prompts, params)
    for drafters in (None, ["suffix", "recycling", "head"]):
        with LLM(pair.target, pair.draft, device="cuda", drafters=drafters, graphs=graphs, max_batch=3) as llm:
            check(llm, prompts, params, want)


def test_up_to_the_wall_of_the_context(pair: Pair) -> None:
    prompts = [[i % 8] * n for i, n in enumerate((40, 57, 61, 62, 63))]
    params = [SamplingParams(max_tokens=99, temperature=0.0)] * 5
    want = plain(pair, prompts, params, max_context_len=64)
    for tree, page in (((4, 4, 16), 1), ((3, 15, 20), 4), (None, 16)):
        with LLM(pair.target, pair.draft, device="cuda", tree=tree, page_size=page, max_batch=3,
                 max_context_len=64) as llm:  # fmt: skip
            check(llm, prompts, params, want)


def test_a_batch_of_more_rows_than_a_pass_takes(tmp_path: Path) -> None:
    """32 requests of blocks of 16 rows, in two passes."""
    pair = pair_of(tmp_path, "DFlash", torch.float16)
    prompts = [[i % 8, i // 8, *[1, 2, 3][: i % 4]] for i in range(32)]
    params = [SamplingParams(max_tokens=20, seed=i, temperature=i % 2 * 0.8) for i in range(32)]
    want = plain(pair, prompts, params)
    with LLM(pair.target, pair.draft, device="cuda", tree=(4, 8, 16), max_batch=32) as llm:
        paths = check(llm, prompts, params, want)
    assert sum(len(path) - 1 for path in paths) > 50


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("DFlash", "layers.1.mlp.down_proj.weight"), ("DFlash", "layers.1.self_attn.v_proj.weight"),
     ("P-EAGLE", "layers.1.mlp.down_proj.weight"), ("P-EAGLE", "mask_hidden"),
     ("Flash2", "layers.1.mlp_conv.base_kernel"), ("Flash2", "candidate_selector.hidden_projection.weight")],
)  # fmt: skip
@pytest.mark.parametrize("tree", [None, (3, 4, 9)])
def test_a_head_that_gives_nan_costs_its_drafts_alone(tmp_path: Path, name: str, tensor: str, tree: Any) -> None:
    """Its weights are numbers, and what it computes from them leaves f16."""
    pair = pair_of(tmp_path, name, torch.float16)
    prompts, params = requests(2, "greedy")
    want = plain(pair, prompts, params)
    tensors = modelzoo.read_weights(pair.draft)
    large = torch.full_like(tensors[tensor], 6e4) if tensor == "mask_hidden" else tensors[tensor].float() * 1e8
    tensors[tensor] = large.clamp(-6e4, 6e4).half()
    modelzoo.write_weights(pair.draft, tensors)
    with LLM(pair.target, pair.draft, device="cuda", tree=tree) as llm:
        check(llm, prompts, params, want)
        outputs = llm.generate(prompts, params)
    assert tree is None or any(out.draft_error is not None for out in outputs)
    assert sum(out.proposed for out in outputs) == 0


def test_a_grammar_gives_the_plain_tokens(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": True, "head_dim": 64, "dtype": torch.bfloat16, "vocab_size": 304}
    target = modelzoo.write_target(tmp_path / "target", **options)
    blockzoo.write_block(tmp_path / "head", "DFlash", replace(SMALL, vocab=304), LAYERS)
    form = StructuredOutputs(regex="[a-c]{4,30}")
    params = [SamplingParams(max_tokens=24, seed=i, temperature=i % 2, structured_outputs=form) for i in range(4)]
    prompts = [[5 + i, 9, 30] for i in range(4)]
    with LLM(target, device="cuda", speculative=False, max_batch=1) as llm:
        want = [llm.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]
    for tree in (None, (4, 4, 16)):
        with LLM(target, tmp_path / "head", device="cuda", tree=tree) as llm:
            assert [out.token_ids for out in llm.generate(prompts, params)] == want


def test_rounds_that_somebody_looks_at_decide_the_same(pair: Pair) -> None:
    prompts, params = requests(6, "sampled")
    want = plain(pair, prompts, params)
    with LLM(pair.target, pair.draft, device="cuda", tree=(3, 4, 12), page_size=4) as llm:
        seen: list[Any] = []
        with llm.watching(lambda trees, accepts: seen.append(trees.sizes)):
            assert check(llm, prompts, params, want)
        assert any(max(sizes) > 1 for sizes in seen)


@pytest.mark.parametrize("options", [
    {"max_batch": 8, "tree": (8, 15, 64), "prefill_chunk": 512}, {"max_batch": 3, "page_size": 1},
])  # fmt: skip
def test_an_engine_at_its_limits_stays_within_its_budget(pair: Pair, options: dict[str, Any]) -> None:
    def mine() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        core._device_collect(torch.cuda.current_device())
        return torch.cuda.memory_reserved() + core._device_memory(torch.cuda.current_device())[3]

    before = mine()
    torch.cuda.reset_peak_memory_stats()
    with LLM(pair.target, pair.draft, device="cuda", max_context_len=500, **options) as llm:
        for seed in (None, 1):
            params = SamplingParams(max_tokens=40, temperature=0.0 if seed is None else 0.8, seed=seed, ignore_eos=True)
            prompts = [[(3 + i * j) % 8 for j in range(400)] for i in range(2 * llm.config.max_batch)]
            llm.generate(prompts, params)
        budget = llm.budget
        used = torch.cuda.max_memory_reserved() + core._device_memory(torch.cuda.current_device())[3] - before
    assert budget is not None
    assert budget.pages * budget.page_bytes < used <= budget.bytes, budget


def test_what_a_gpu_cannot_run_is_refused(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, "DFlash")
    with pytest.raises(ConfigError, match="33 branches"):
        LLM(pair.target, pair.draft, device="cuda", tree=(33, 2, 40))
    with pytest.raises(ConfigError, match="65 tokens"):
        LLM(pair.target, pair.draft, device="cuda", tree=(9, 8, 65))
