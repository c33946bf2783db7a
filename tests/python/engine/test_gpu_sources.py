"""Drafts that the host makes, on a GPU: their trees enter the device's rounds at verification, and tokens are the plain
ones, at every level of graphs, whoever drafts and whatever he says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from drafters_world import ODD, RUBBISH, Fails, Knows, Likeliest, Ngrams, Says
from modelzoo import Pair, agree, write_eagle3, write_target
from specrs import LLM, SamplingParams, device
from specrs.engine import RequestOutput

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

VOCAB = 10
MIXES: dict[str, Any] = {
    "ngrams": lambda: [Ngrams(depth=31)],
    "suffix and recycling": lambda: ["suffix", "recycling"],
    "likeliest": lambda: [Ngrams(), Likeliest()],
    "all": lambda: ["head", "suffix", "recycling", Ngrams()],
    "hostile": lambda: [Says(RUBBISH["too deep"]), Ngrams(), Says(ODD["certain and wrong"], name="wrong")],
    "hostile with a head": lambda: ["head", Says(ODD["certain and wrong"]), Fails("propose")],
}
TREES: dict[str, dict[str, Any]] = {
    "chain": {"tree": (1, 31, 32)}, "tree": {"tree": (4, 3, 32)}, "small": {"tree": (1, 4, 5)}, "auto": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("gpu_drafters")
    sizes = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "max_position_embeddings": 1024}
    target = write_target(root / "target", dtype=torch.bfloat16, head_dim=64, **sizes)
    draft = write_eagle3(root / "draft", target, draft_vocab_size=VOCAB, dtype=torch.bfloat16, head_dim=64)
    agree(target, draft)
    return Pair(target, draft)


@pytest.fixture(autouse=True)
def no_fault_is_left() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    device.check()


def work(sampled: bool, count: int = 9) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat themselves, and some that do not."""
    prompts = [[(i * j) % VOCAB for j in range(3 + 17 * i)] + [1, 2, 3, i % VOCAB] * (i % 3) for i in range(count)]
    hot = {"temperature": 0.8, "top_p": 0.95} if sampled else {"temperature": 0.0}
    return prompts, [SamplingParams(max_tokens=[1, 2, 9, 40, 60][i % 5], seed=i, **hot) for i in range(count)]


@pytest.fixture(scope="module")
def want(pair: Pair) -> dict[bool, list[list[int]]]:
    """Tokens of `work`: one request at a time, no graphs, no drafts."""
    with LLM(pair.target, device="cuda", speculative=False, graphs="off", max_batch=1, prefix_cache=False) as llm:
        found = {}
        for sampled in (False, True):
            prompts, params = work(sampled)
            found[sampled] = [llm.generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
        return found


def engine(pair: Pair, drafters: list[Any], **options: Any) -> LLM:
    draft = pair.draft if "head" in drafters else None
    return LLM(pair.target, draft, device="cuda", drafters=drafters, max_context_len=512, **options)


def won(outputs: list[RequestOutput]) -> int:
    return sum(sum(o.drafted) for o in outputs)


@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.filterwarnings("ignore:drafter")
def test_every_mix_gives_the_plain_tokens(
    pair: Pair, want: dict[bool, list[list[int]]], mix: str, tree: str, graphs: Any
) -> None:
    for sampled in (False, True):
        for page_size, batch in ((1, 3), (4, 9), (16, 1)):
            prompts, params = work(sampled)
            with engine(pair, MIXES[mix](), graphs=graphs, page_size=page_size, max_batch=batch, prefill_chunk=37,
                        **TREES[tree]) as llm:  # fmt: skip
                for _ in range(2):  # captured rounds, and a warm prefix cache
                    outputs = llm.generate(prompts, params)
                    assert [o.token_ids for o in outputs] == want[sampled]
                    if tree in ("chain", "tree") and not sampled:
                        assert won(outputs) > 5, "drafts must have been accepted for this to mean anything"
                    llm.audit()


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("right", [1, 5, 8])
def test_what_comes_is_found_beside_a_longer_path(
    pair: Pair, want: dict[bool, list[list[int]]], right: int, page_size: int, poison: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Accepted nodes off the spine: their KV moves, and their rows are the bits of plain decoding."""
    if poison:
        monkeypatch.setenv("SPECRS_POISON", "1")
    for sampled in (False, True):
        prompts, params = work(sampled)
        answers = {tuple(p): w for p, w in zip(prompts, want[sampled], strict=True)}
        for tree in ((1, 23, 24), (4, 6, 24)):
            source = Knows(answers, right, vocab=VOCAB)
            with engine(pair, [source], tree=tree, page_size=page_size, max_batch=4) as llm:
                outputs = llm.generate(prompts, params)
                assert [o.token_ids for o in outputs] == want[sampled]
                lengths = {n for o in outputs for n, count in enumerate(o.accepted_lengths) if count}
                assert max(lengths) == right + 1
                llm.audit()


@pytest.mark.parametrize("graphs", ["off", "round", "loop"])
def test_the_head_follows_what_others_drafted(pair: Pair, want: dict[bool, list[list[int]]], graphs: Any) -> None:
    """Rounds whose trees the host made and rounds of the head, by turns: the head runs over deep paths too."""
    prompts, params = work(False)
    answers = {tuple(p): w for p, w in zip(prompts, want[False], strict=True)}

    class Sometimes(Knows):
        asked = 0

        def begin(self, request: Any) -> Any:
            inner = super().begin(request)
            propose = inner.propose

            def sometimes(nodes: int, depth: int) -> Any:
                self.asked += 1
                return propose(nodes if self.asked % 3 == 0 else 0, depth)

            inner.propose = sometimes
            return inner

    for tree in ({"tree": (4, 3, 32)}, {"tree": (1, 8, 9)}, {}):
        with engine(pair, ["head", Sometimes(answers, vocab=VOCAB)], graphs=graphs, page_size=4, max_batch=4,
                    **tree) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params)
            assert [o.token_ids for o in outputs] == want[False]
            llm.audit()


@pytest.mark.parametrize("graphs", ["round", "loop"])
def test_rounds_without_drafts_run_ahead(pair: Pair, graphs: Any) -> None:
    launched = [0]
    with engine(pair, [Says(ODD["empty"])], tree=(1, 7, 8), graphs=graphs, max_batch=2) as llm:
        executor: Any = llm._runner.executor
        launch = executor.launch

        def counted(verified: Any, rounds: int) -> Any:
            launched[0] += 1
            return launch(verified, rounds)

        executor.launch = counted
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=60))
        del executor.launch
    assert launched[0] >= (30 if graphs == "round" else 3)


def test_memory_stays_within_the_budget(pair: Pair) -> None:
    with engine(pair, ["suffix", "recycling"], page_size=16, max_batch=8) as llm:
        prompts, params = work(False)
        torch.cuda.reset_peak_memory_stats()
        llm.generate(prompts, params)
        assert llm.budget is not None
        assert torch.cuda.max_memory_allocated() <= llm.budget.bytes
