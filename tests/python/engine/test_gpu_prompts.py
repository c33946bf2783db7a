"""Passes over prompts as CUDA graphs of more rows: logits and features have the bits of passes without graphs."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from modelzoo import Pair, agree, write_eagle3, write_target
from specrs import LLM, SamplingParams, device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_fault_is_left")
VOCAB = 64
LENGTHS = [1, 2, 15, 16, 17, 33, 63, 64, 65, 128, 200, 255, 256, 257, 300]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("prompts")
    sizes = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "max_position_embeddings": 1024}
    target = write_target(root / "target", dtype=torch.bfloat16, head_dim=64, **sizes)
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=torch.bfloat16, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


class Passes:
    """The passes over prompts of an engine: how many ran as graphs, their logits, and the features that they left."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs, self.logits, self.features = 0, list[torch.Tensor](), list[torch.Tensor]()
        executor: Any = llm._runner.executor
        for cache in (executor.cache, *([] if executor.drafts is None else [executor.drafts.cache])):
            from_dlpack(cache.tensor)[1:].fill_(math.nan)  # what no pass has written shows
        logits = executor._logits

        def seen(*operands: Any) -> Any:
            found, features = logits(*operands)
            self.logits.append(found.clone())
            if features is not None:
                self.features.append(features.stacked.cpu())
            return found, features

        monkeypatch.setattr(executor, "_logits", seen)
        for each in executor._prompts:
            monkeypatch.setattr(each, "run", self._counted(each.run))

    def _counted(self, run: Any) -> Any:
        def counted(*operands: Any) -> Any:
            self.graphs += 1
            return run(*operands)

        return counted


@pytest.mark.parametrize("speculative", [True, False], ids=["head", "plain"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_bits_of_a_prompts_pass_do_not_depend_on_graphs(
    pair: Pair, page_size: int, speculative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(page_size)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in LENGTHS]
    params = [SamplingParams(max_tokens=5, temperature=0.8 * (i % 2), seed=i) for i in range(len(prompts))]
    found: list[tuple[list[Any], Passes]] = []
    for graphs in ("off", "round", "round"):
        llm = LLM(
            pair.target, pair.draft, device="cuda", page_size=page_size, graphs=graphs, max_batch=9,
            prefix_cache=False, speculative=speculative, tree=(4, 3, 12),
        )  # fmt: skip
        with llm:
            passes = Passes(llm, monkeypatch)
            for _ in range(2):  # the second time all graphs are there
                alone = [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
            logits, features = list(passes.logits), list(passes.features)
            # Which prompts share a pass hangs on when other requests end.
            assert alone == [o.token_ids for o in llm.generate(prompts, params)]
            passes.logits, passes.features = logits, features
            llm.audit()
            found.append((alone, passes))
    off, on, again = found
    assert off[0] == on[0] == again[0]
    assert off[1].graphs == 0 and on[1].graphs >= 2 * sum(n <= 256 for n in LENGTHS)
    for one, other in ((on, off), (again, off)):
        assert len(one[1].logits) == len(other[1].logits)
        assert all(map(torch.equal, one[1].logits, other[1].logits))
        assert len(one[1].features) == len(other[1].features)
        assert all(map(torch.equal, one[1].features, other[1].features))


def test_a_prompt_behind_the_prefix_cache_and_pages_of_others(pair: Pair) -> None:
    """Table columns of longer prompts before stay in the inputs; a shorter one must not read them."""
    rng = random.Random(3)
    base = [rng.randrange(VOCAB) for _ in range(240)]
    prompts = [base, base[:100], [*base[:64], 1, 2, 3], [5] * 7, [*base[:230], 9], base[:17]]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    with LLM(pair.target, speculative=False, device="cuda", graphs="off", prefix_cache=False) as llm:
        want = [llm.generate([p], params)[0].token_ids for p in prompts]
    for options in ({}, {"max_batch": 2}, {"prefill_chunk": 48}):
        with LLM(pair.target, pair.draft, device="cuda", page_size=16, **options) as llm:
            for _ in range(3):
                assert [o.token_ids for o in llm.generate(prompts, params)] == want
                assert [llm.generate([p], params)[0].token_ids for p in prompts] == want
            llm.audit()


def test_prompt_logprobs_of_more_rows_than_a_graph_has(pair: Pair) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 7, 9, 40)]
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=2)
    seen = []
    for graphs in ("off", "round", "round"):
        with LLM(pair.target, speculative=False, device="cuda", graphs=graphs, prefix_cache=False) as llm:
            for _ in range(2):
                outputs = llm.generate(prompts, params)
            seen.append([(o.token_ids, o.prompt_logprobs, o.logprobs) for o in outputs])
    assert seen[0] == seen[1] == seen[2]


def test_memory_of_a_graph_stays_where_it_is_whatever_rows_are_scored(pair: Pair) -> None:
    """A pass that scores many rows of a prompt must not move the memory in which graphs gather the rows they score."""
    rng = random.Random(9)
    short, long = [1, 2, 3], [rng.randrange(VOCAB) for _ in range(90)]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    with LLM(pair.target, pair.draft, device="cuda", prefix_cache=False) as llm:
        want = [llm.generate([short], params)[0].token_ids for _ in range(3)]
        target: Any = llm._runner.executor.target  # type: ignore[attr-defined]
        before = target._tail_work.rows(1)["x"].data_ptr()
        llm.generate([long], SamplingParams(max_tokens=2, prompt_logprobs=1))
        assert target._tail_work.rows(1)["x"].data_ptr() == before
        torch.cuda.empty_cache()
        taken = [torch.full((1 << 16,), 7.0, device="cuda") for _ in range(64)]
        assert [llm.generate([short], params)[0].token_ids for _ in range(3)] == want
        assert all(bool((one == 7.0).all()) for one in taken)
