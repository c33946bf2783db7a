"""The engine generates the same tokens from the same trees through every backend as through specrs's own kernels.

The backends compute attention in another precision than the Rust kernels, so a tie that is nearer than their rounding
could fall either way. Where tokens or trees differ, the margin is printed; below `NEAR` that is such a tie, and what
follows it is not compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from modelrun import Driver
from modelzoo import Pair, write_eagle3, write_target
from specrs import LLM, SamplingParams, assets
from specrs import _specrs as core
from specrs.backends import BACKENDS, Combination, FlashInfer, UnsupportedCombinationError, resolve
from specrs.engine.devices import host
from specrs.engine.rounds.scheduler import Scheduler
from specrs.models import LlamaModel, ops_for

VOCAB = 10
NEAR = 1e-4
NEAR_BF16 = 2e-2  # bound where a rounding of keys and values may differ too
TREES = {1: (1, 4, 5), 2: (2, 3, 8), 4: (4, 3, 16), 8: (8, 3, 24)}
PAGES = [1, 4, 16, 64]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two layers and ten tokens."""
    root = tmp_path_factory.mktemp("small")
    target = write_target(
        root / "target", vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, max_position_embeddings=256,
        num_hidden_layers=2,
    )  # fmt: skip
    return Pair(target, write_eagle3(root / "draft", target, draft_vocab_size=8, aux_layers=(0, 1)))


@dataclass(frozen=True)
class Tree:
    """The trees of a round, and what was accepted."""

    sizes: list[int]
    parents: list[int]
    nodes: list[int]
    scores: list[float]
    accepted: list[list[int]]

    @classmethod
    def of(cls, trees: core.TreeBatch, accepts: core.Accepts) -> Tree:
        nodes, parents, scores = trees.tokens.tolist(), trees.parents.tolist(), trees.scores.tolist()
        return cls(trees.sizes, parents, nodes, scores, accepts.paths)

    def each(self) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """Parents, nodes and accepted path of each request."""
        first = 0
        for size, path in zip(self.sizes, self.accepted, strict=True):
            yield self.parents[first : first + size], self.nodes[first : first + size], path
            first += size


@dataclass(frozen=True)
class Run:
    tokens: list[list[int]]
    rounds: list[Tree]
    prompts: list[list[int]]


def requests(page: int, seed: int, count: int = 5) -> tuple[list[list[int]], list[int]]:
    """Prompts of mixed lengths, most of which end shortly before a page does, and some that share a beginning."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(2 * page + 8)]
    borders = [n for n in (page - 1, page - 2, 2 * page - 3, page, 2 * page + 1) if 0 < n < 140]
    lens = [*borders, 1, 7, 33][: count - 1]
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in lens]
    prompts.append(stem[: page + 3])
    prompts[0] = stem[: len(prompts[0])]
    return prompts, [rng.choice([6, 11, 16]) for _ in prompts]


def generate(pair: Pair, prompts: list[list[int]], most: list[int], sampled: bool = False, **options: Any) -> Run:
    llm = LLM(pair.target, pair.draft, **options)
    rounds: list[Tree] = []
    params = [SamplingParams(max_tokens=n, seed=i, **(SAMPLED if sampled else {})) for i, n in enumerate(most)]
    with llm.watching(lambda trees, accepts: rounds.append(Tree.of(trees, accepts))):
        outputs = llm.generate(prompts, params)
    llm.audit()
    return Run([o.token_ids for o in outputs], rounds, prompts)


def margin(pair: Pair, prefix: list[int]) -> float:
    """Return by how much the target prefers its next token to the second best."""
    logits, _ = Driver(LlamaModel.load(pair.target, ops_for())).decode_all(prefix)
    best, second = logits[-1].topk(2).values.tolist()
    return float(best - second)


def compare(pair: Pair, got: Run, want: Run, limit: float = NEAR, in_step: bool = True) -> int:
    """Tokens and trees of two runs; returns how many rounds were the same.

    in_step: whether both run the same batches; else each request's trees are compared, in whatever order they came.
    """
    near = False
    for prompt, mine, theirs in zip(want.prompts, got.tokens, want.tokens, strict=True):
        if mine != theirs:
            at = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
            gap = margin(pair, prompt + theirs[:at])
            print(f"token {at} behind a prompt of {len(prompt)} differs; margin {gap:.3g}")
            assert gap < limit, f"token {at}: {mine[at]}, not {theirs[at]}, with a margin of {gap:.3g}"
            near = True
    if not in_step:
        mine, theirs = (sorted(one for tree in run.rounds for one in tree.each()) for run in (got, want))
        assert mine == theirs
        return len(want.rounds)
    for i, (a, b) in enumerate(zip(got.rounds, want.rounds, strict=False)):
        if (a.sizes, a.parents, a.nodes) != (b.sizes, b.parents, b.nodes):
            assert a.sizes == b.sizes, f"trees of round {i} have {a.sizes} nodes, not {b.sizes}"
            gap = max(abs(x - y) for x, y in zip(sorted(a.scores), sorted(b.scores), strict=True))
            print(f"trees of round {i} differ; their scores by {gap:.3g}")
            assert gap < limit, f"trees of round {i} differ, their scores by {gap:.3g}"
            return i
        if a.accepted != b.accepted:
            assert near, f"round {i} accepts {a.accepted}, not {b.accepted}"
            return i
        assert max(abs(x - y) for x, y in zip(a.scores, b.scores, strict=True)) < limit
    assert near or len(got.rounds) == len(want.rounds)
    return len(got.rounds)


def able(k: int, page: int) -> list[tuple[str, Any, Any]]:
    """Every backend, layout and draft attention that differ at this tree and page size."""
    found = []
    for name in [n for n in BACKENDS if n != "native"]:
        for layout in ("dense", "holey") if k > 1 and page > 1 else ("dense",):
            for mode in ("ancestors", "lane") if k > 1 else ("ancestors",):
                try:
                    asked: Any = {"topk": k, "page_size": page, "layout": layout, "draft_attention": mode}
                    resolve(name, Combination(**asked))
                except UnsupportedCombinationError:
                    assert (name, layout, mode) == ("flash_attention", "holey", "ancestors")
                else:
                    found.append((name, layout, mode))
    return found


def options(k: int, page: int, mode: Any) -> dict[str, Any]:
    topk, steps, nodes = TREES[k]
    return {
        "tree": (topk, steps, nodes), "page_size": page, "draft_attention": mode,
        "max_batch": 3, "prefill_chunk": 50, "max_context_len": 200,
    }  # fmt: skip


def check_cell(pair: Pair, k: int, page: int, seed: int = 0, **more: Any) -> int:
    """All backends at one tree and page size; the most draft tokens that a round accepted."""
    prompts, most = requests(page, seed)
    sampled, in_step = more.pop("sampled", False), more.pop("in_step", True)
    want: dict[str, Run] = {}
    compared = rounds = 0
    for name, layout, mode in able(k, page):
        if mode not in want:
            want[mode] = generate(pair, prompts, most, sampled, **{**options(k, page, mode), **more})
        other = {"attention_backend": name, "draft_layout": layout}
        got = generate(pair, prompts, most, sampled, **{**options(k, page, mode), **more, **other})
        rounds += len(want[mode].rounds)
        compared += compare(pair, got, want[mode], in_step=in_step)
    assert compared > 0.9 * rounds > 0
    if k > 2:
        assert want["ancestors"].rounds != want["lane"].rounds, "both ways to draft must have been seen"
    return max(len(path) - 1 for run in want.values() for tree in run.rounds for path in tree.accepted)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("k", TREES)
def test_tokens_trees_and_accepted_lengths_are_those_of_native(small: Pair, k: int, page: int) -> None:
    assert check_cell(small, k, page) >= (2 if k > 2 else 1), "drafts must be accepted for this to mean anything"


@pytest.mark.parametrize(("k", "page"), [(1, 4), (2, 16), (4, 4), (8, 64), (4, 1)])
def test_seeded_sampling_too(small: Pair, k: int, page: int) -> None:
    assert check_cell(small, k, page, seed=1, sampled=True) > 0


@pytest.mark.parametrize(("k", "page"), [(1, 4), (2, 4), (2, 2)])
def test_preempted_requests_too(small: Pair, k: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool that cannot hold all, the youngest request starts over. Layouts take different pages, so that it is not
    the same one everywhere; its trees are."""
    preempted = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, r: (preempted.append(r), preempt(self, r)))
    need = core.Geometry(3, 200, page, core.TreeShape(*TREES[k]), "holey").alloc_len_per_decode
    prompts, most = requests(page, 2)
    # The largest request fits alone. Rounds of two fit at first, so that they are admitted together, and not when they
    # have grown by several pages each.
    pages = -(-(max(map(len, prompts)) + max(most) + need) // page) + 1
    check_cell(small, k, page, seed=2, num_pages=pages, prefix_cache=False, in_step=False)
    assert len(preempted) >= len(able(k, page))


@pytest.mark.parametrize("name", [n for n in BACKENDS if n != "native"])
def test_bfloat16_pools_give_the_tokens_of_native(small: Pair, name: str) -> None:
    prompts, most = requests(4, 3)
    common = {**options(2, 4, "lane"), "kv_dtype": "bfloat16"}
    want = generate(small, prompts, most, **common)
    layout = "holey" if name == "flash_attention" else "dense"
    got = generate(small, prompts, most, **common, attention_backend=name, draft_layout=layout)
    assert compare(small, got, want, NEAR_BF16) > 0


@pytest.mark.parametrize("backend", [*(n for n in BACKENDS if n != "native"), FlashInfer("bool")],
                         ids=lambda b: b if isinstance(b, str) else "flashinfer-bool")  # fmt: skip
def test_every_plan_of_an_engine_stands_the_audit(small: Pair, backend: Any) -> None:
    """Whole generations over a planner that checks each array against the plan, slot by slot."""
    prompts, most = requests(4, 4)
    llm = LLM(
        small.target, small.draft, attention_backend=backend, **{**options(4, 4, "lane"), "draft_layout": "holey"}
    )
    llm._runner.executor.planner.set_debug(True)
    want = generate(small, prompts, most, **options(4, 4, "lane"))
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=n, seed=i) for i, n in enumerate(most)])
    assert [o.token_ids for o in outputs] == want.tokens


@pytest.mark.parametrize("name", [n for n in BACKENDS if n != "native"])
def test_plain_decoding_and_picked_trees(small: Pair, name: str) -> None:
    """Without a draft, the decode phase; without a tree asked for, chains picked by the cost model."""
    prompts, most = requests(16, 5)
    params = [SamplingParams(max_tokens=n) for n in most]
    want = [o.token_ids for o in LLM(small.target, max_batch=2).generate(prompts, params)]
    for draft in (None, small.draft):
        llm = LLM(small.target, draft, max_batch=2, attention_backend=name)
        assert [o.token_ids for o in llm.generate(prompts, params)] == want


@pytest.mark.parametrize("name", [n for n in BACKENDS if n != "native"])
def test_the_model_in_the_package(name: str) -> None:
    """With a head that is right most of the time, so that trees are deep: tokens are `native`'s, dense and holey trees
    are equal. `native`'s head begins near the end of a prompt, that of others reads all of it, so that trees differ."""
    prompts = [p[:150] for p in assets.heldout_prompts()[:2]]
    common: dict[str, Any] = {"tree": (4, 4, 16), "page_size": 4, "max_batch": 2,
                              "draft_attention": "lane", "max_context_len": 512}  # fmt: skip
    params = SamplingParams(max_tokens=24, temperature=0)
    runs = []
    for more in ({}, {"attention_backend": name}, {"attention_backend": name, "draft_layout": "holey"}):
        llm = LLM(**common, **more)
        lengths: list[list[int]] = []
        with llm.watching(lambda _, accepts: lengths.append([len(path) for path in accepts.paths])):  # noqa: B023
            runs.append(([o.token_ids for o in llm.generate(prompts, params)], lengths))
    assert runs[0][0] == runs[1][0] and runs[1] == runs[2]
    assert all(sum(map(sum, lengths)) > 2 * sum(map(len, lengths)) for _, lengths in runs)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_random_cells(small: Pair, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "TAIL", 256)  # `native`'s head reads all of a long prompt, as that of others does
    rng = random.Random(seed)
    k, page = rng.choice(list(TREES)), rng.choice([1, 2, 4, 8, 16, 32, 64])
    more: dict[str, Any] = {"sampled": rng.random() < 0.5, "max_batch": rng.randrange(1, 6),
                            "prefill_chunk": rng.randrange(5, 90), "prefix_cache": rng.random() < 0.5}  # fmt: skip
    check_cell(small, k, page, seed=100 + seed, **more)


def test_a_difference_would_be_seen(small: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails where a backend drops one key of its draft steps, which changes trees and no token."""
    from specrs.backends import Triton

    prepare = Triton.prepare

    def short(self: Triton, step: Any) -> Any:
        if step.phase == "draft" and step.queries:
            first = int(step.arrays["kv_indptr"][0])
            step.arrays["kv_indices"][first] = step.arrays["kv_indices"][first + 1].clone()
        return prepare(self, step)

    prompts, most = requests(4, 0)
    want = generate(small, prompts, most, **options(4, 4, "lane"))
    monkeypatch.setattr(Triton, "prepare", short)
    got = generate(small, prompts, most, **options(4, 4, "lane"), attention_backend="triton")
    assert got.tokens == want.tokens
    with pytest.raises(AssertionError):
        compare(small, got, want)
