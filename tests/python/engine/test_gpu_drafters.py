"""Drafts of the host on a GPU: whoever drafts, tokens and logits are those of plain decoding.

Plain decoding of one request at a time, launched kernel by kernel, is the reference. Trees of the host enter the graphs
of rounds at verification; plain rounds in between run ahead as ever.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from drafters_world import ODD, RUBBISH, Fails, Likeliest, Ngrams, Says
from modelzoo import Pair, agree, write_eagle3, write_target
from specrs import LLM, SamplingParams, device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from specrs.engine.devices.graphs import Bucket
from specrs.engine.devices.launches import Variant

VOCAB, REQUESTS = 16, 14
MIXES: dict[str, Callable[[], list[Any]]] = {
    "suffix": lambda: ["suffix"],
    "default": lambda: ["suffix", "recycling"],
    "all": lambda: ["head", "suffix", "recycling"],
    "deep": lambda: [Ngrams(depth=30)],
    "hostile": lambda: [
        Says(RUBBISH["too deep"]), Fails("propose"), Says(ODD["certain and wrong"], name="wrong"), "suffix",
    ],
}  # fmt: skip
LEVELS = ("off", "round", "loop")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("gpu")
    sizes = {"vocab_size": VOCAB, "eos_token_id": 3, "bos_token_id": None, "max_position_embeddings": 1024}
    target = write_target(root / "target", dtype=torch.bfloat16, head_dim=64, **sizes)
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=torch.bfloat16, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def work() -> list[tuple[list[int], SamplingParams]]:
    """Texts that repeat themselves, and others; requests end by length, by a token, at the wall of the context."""
    rng = random.Random(4)
    found = []
    for i in range(REQUESTS):
        stem = [rng.randrange(VOCAB) for _ in range(rng.choice([3, 9, 40]))]
        prompt = (stem * 9)[: rng.choice([5, 60, 130, 245])]
        kind: dict[str, Any] = rng.choice([{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.8}])
        if rng.random() < 0.15:
            kind = {**kind, "repetition_penalty": 1.2}
        if rng.random() < 0.3:
            kind = {**kind, "prediction": stem * 3}
        found.append((prompt, SamplingParams(max_tokens=rng.choice([2, 20, 70]), seed=i, ignore_eos=i % 3 > 0, **kind)))
    return found


@pytest.fixture(scope="module")
def want(pair: Pair) -> list[list[int]]:
    with LLM(pair.target, speculative=False, device="cuda", max_context_len=256, max_batch=1, graphs="off",
             prefix_cache=False) as llm:  # fmt: skip
        return [llm.generate([prompt], params)[0].token_ids for prompt, params in work()]


def served(llm: LLM, rng: random.Random) -> list[Any]:
    """Outputs of requests that join at random steps."""
    waiting, ids, outputs = work(), [], {}
    while waiting or llm.unfinished:
        while waiting and (rng.random() < 0.3 or not llm.unfinished):
            ids.append(llm.add(*waiting.pop(0)))
        outputs |= {e.request_id: e.output for e in llm.step() if e.output is not None}
    return [outputs[i] for i in ids]


@pytest.mark.parametrize("graphs", LEVELS)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.filterwarnings("ignore:drafter")
def test_every_mix_gives_the_tokens_of_plain_decoding(pair: Pair, want: list[list[int]], mix: str, graphs: str) -> None:
    won = 0
    for page, batch, tree in ((1, 5, (1, 12, 13)), (16, 8, None), (4, 3, (3, 4, 24))):
        sources = MIXES[mix]()
        options: dict[str, Any] = {} if tree is None else {"tree": tree}
        with LLM(pair.target, pair.draft if "head" in sources else None, drafters=sources, device="cuda",
                 page_size=page, max_batch=batch, max_context_len=256, graphs=graphs, **options) as llm:  # fmt: skip
            assert llm.device.startswith("cuda")
            for again in range(2):
                outputs = served(llm, random.Random(again))
                assert [o.token_ids for o in outputs] == want, (page, batch, tree, again)
                won += sum(sum(o.drafted) for o in outputs)
            assert llm.audit()["leased_sequences"] == 0
    assert won > 20, "drafts must have been accepted for this to mean anything"


def test_a_pool_that_preempts(pair: Pair, want: list[list[int]]) -> None:
    for graphs in LEVELS:
        with LLM(pair.target, device="cuda", drafters=["suffix", "recycling"], tree=(1, 12, 13), page_size=4,
                 max_batch=6, max_context_len=256, num_pages=90, graphs=graphs) as llm:  # fmt: skip
            assert [o.token_ids for o in served(llm, random.Random(5))] == want
            llm.audit()


def test_long_paths_are_accepted_whole(pair: Pair) -> None:
    """A chain of 30 beside short branches: the deepest path lies at its logical positions."""
    params = SamplingParams(
        max_tokens=150, temperature=0.0, ignore_eos=True, logit_bias=dict.fromkeys(range(3, VOCAB), -1e9)
    )
    prompt = [0, 1, 2] * 20
    with LLM(pair.target, speculative=False, device="cuda", max_context_len=256, max_batch=1, graphs="off") as llm:
        plain = llm.generate([prompt], params)[0].token_ids
    for page in (1, 16):
        with LLM(pair.target, device="cuda", drafters=[Ngrams(depth=30)], tree=(1, 30, 31), page_size=page,
                 max_context_len=256, max_batch=2) as llm:  # fmt: skip
            out = llm.generate([prompt], params)[0]
            assert out.token_ids == plain
            llm.audit()


def test_rounds_with_drafts_of_the_host_take_no_memory(pair: Pair) -> None:
    with LLM(pair.target, device="cuda", drafters=["suffix", "recycling"], max_batch=4, max_context_len=256) as llm:
        for _ in range(2):
            served(llm, random.Random(1))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            served(llm, random.Random(1))
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + (1 << 16)


@pytest.mark.parametrize("graphs", LEVELS)
@pytest.mark.parametrize("page", [1, 16])
def test_a_round_unites_the_heads_drafts_with_others(
    pair: Pair, want: list[list[int]], page: int, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In poisoned memory: one tree of both, without the host between the head's passes and verification."""
    monkeypatch.setenv("SPECRS_POISON", "1")
    launched: list[Variant] = []
    again = Bucket.again

    def watched(self: Bucket, variant: Variant, *rest: Any) -> int:
        launched.append(variant)
        return again(self, variant, *rest)

    monkeypatch.setattr(Bucket, "again", watched)
    for tree, names in (((3, 4, 24), ("head", "ngrams")), ((3, 7, 40), ("head", "ngrams", "likeliest"))):
        others = [Ngrams(depth=30), *([Likeliest()] if "likeliest" in names else [])]
        with LLM(pair.target, pair.draft, drafters=["head", *others], device="cuda", page_size=page, max_batch=4,
                 max_context_len=256, graphs=graphs, tree=tree) as llm:  # fmt: skip
            seen: dict[int, list[Any]] = {}
            ids = [llm.add(prompt, replace(params, trace=True)) for prompt, params in work()]
            outputs = {}
            while llm.unfinished:
                for event in llm.step():
                    seen.setdefault(event.request_id, []).extend(event.rounds)
                    if event.output is not None:
                        outputs[event.request_id] = event.output
            assert [outputs[i].token_ids for i in ids] == want, (tree, page)
            rounds = [one for some in seen.values() for one in some if {"head", "ngrams"} <= set(one.sources)]
            assert len(rounds) > 20
            for one in rounds:
                for node, parent in enumerate(one.parents):
                    assert node == 0 or (one.proposed[node] and (parent == 0 or not one.proposed[node]
                                                                 & ~one.proposed[parent]))  # fmt: skip
            assert llm.audit()["leased_sequences"] == 0
    united = [v for v in launched if v.drafts]
    assert len(united) > 40 and all(v.trees and v.levels >= v.drafts for v in united)
    assert not any(v.loop for v in united), "the host makes the next trees"
