"""A head on a GPU begins anywhere in a request, stops and comes back.

The tokens are those of plain decoding, and the drafts those of a head whose text begins there.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

from drafts_world import Seen, reference, trees_of
from modelzoo import Pair, agree, write_eagle3, write_target
from reference_drafts import Tree
from specrs import LLM, SamplingParams, device
from specrs.engine.drafting.decisions import RoundOutcome

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_fault_is_left")
VOCAB, TAIL = 16, 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("late")
    sizes = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "max_position_embeddings": 1024}
    target = write_target(root / "target", dtype=torch.bfloat16, head_dim=64, **sizes)
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=torch.bfloat16, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


class Run:
    """An engine whose requests draft, wait and give up at random, and whose rounds with drafts are kept.

    Attributes:
        seen: the rounds, each with the position at which the head had begun.
        recalled: positions whose features were made again.
    """

    def __init__(self, llm: LLM, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
        self.llm, self.seen, self.recalled = llm, list[tuple[Seen, int]](), 0
        drafting: Any = llm._runner.drafting
        observe = drafting.observe
        drafts: Any = llm._runner.executor.drafts
        enter = drafts._enter
        drafting.tail = TAIL
        monkeypatch.setattr(drafting, "pays", lambda *_: rng.random() < 0.5)
        monkeypatch.setattr(drafting, "behind", lambda plan, *_: plan if rng.random() < 0.7 else None)
        from_dlpack(drafts.cache.tensor).fill_(math.nan)

        def observed(outcome: RoundOutcome) -> None:
            if outcome.plan.head is not None:
                trees = trees_of(outcome.verified.trees, outcome.verified.accepts)
                for p, (tree, path, drawn) in zip(outcome.passed, trees, strict=True):
                    if len(tree.tokens) > 1:
                        before = p.request.tokens[: len(p.request.tokens) - p.kept]
                        seen = Seen(p.request.request_id, before, max(tree.depths), tree, path, drawn)
                        self.seen.append((seen, p.request.head.first))
            observe(outcome)

        def entered(enters: Any, each: Any, recalls: bool) -> None:
            self.recalled += sum(entries.count for entries in each) if recalls else 0
            enter(enters, each, recalls)

        monkeypatch.setattr(drafting, "observe", observed)
        monkeypatch.setattr(drafts, "_enter", entered)


def prompts_of(rng: random.Random) -> list[list[int]]:
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (2, 9, 33, 70, 131)]
    return [*prompts, [*prompts[3], 1, 2, 0], [*prompts[4][:100], 3]]


def plainly(pair: Pair, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    with LLM(pair.target, speculative=False, device="cuda", max_batch=1, prefix_cache=False) as llm:
        return [llm.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_that_stop_and_come_back_keep_their_tokens(
    pair: Pair, page_size: int, graphs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(page_size)
    prompts = prompts_of(rng)
    params = [SamplingParams(max_tokens=90, temperature=0.9 * (i % 2), seed=i) for i in range(len(prompts))]
    want = plainly(pair, prompts, params)
    with LLM(pair.target, pair.draft, device="cuda", page_size=page_size, prefill_chunk=24, max_batch=3,
             graphs=graphs) as llm:  # fmt: skip
        run = Run(llm, rng, monkeypatch)
        for _ in range(2):  # the second time from the prefix cache
            assert [o.token_ids for o in llm.generate(prompts, params)] == want
        llm.audit()
        stats = llm._runner.pages.pool.stats()
        assert stats["free_pages"] + stats["evictable_pages"] == stats["total_pages"]
    assert run.recalled > 50, "no request came back"
    assert len({first for _, first in run.seen if first}) >= 5  # full pages: few, where they hold 16 tokens


def test_drafts_are_those_of_a_head_whose_text_begins_there(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, as near as bf16 comes; a head that saw all of the text would say something else."""
    rng = random.Random(7)
    with LLM(pair.target, pair.draft, device="cuda", page_size=4, prefill_chunk=24, max_batch=3) as llm:
        run = Run(llm, rng, monkeypatch)
        llm.generate(prompts_of(rng), SamplingParams(max_tokens=60, temperature=0.0))
        shape = llm._runner.geometry.shape
    want = reference(pair, (shape.topk, shape.steps, shape.draft_tokens))
    late = [(seen, first) for seen, first in run.seen if first and first + 3 < len(seen.tokens)]
    assert len(late) > 40
    near = far = 0.0
    for seen, first in late[::3]:
        got = paths_of(seen.tree)
        for begin in (first, 0):
            found = paths_of(want.draft(seen.tokens, seen.depth, begin=begin)[0])
            off = [abs(got[path] - found[path]) for path in got.keys() & found.keys()]
            assert len(off) > 1
            if begin:
                near += sum(off) / len(off)
                assert sum(off) / len(off) < 0.3, (len(seen.tokens), first, off)
            else:
                far += sum(off) / len(off)
    assert near < far / 2, (near, far)


def paths_of(tree: Tree) -> dict[tuple[int, ...], float]:
    """Scores of the nodes but the root, by the tokens that lead to each."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], tree.scores[1:], strict=True))
