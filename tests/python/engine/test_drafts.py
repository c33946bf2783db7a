"""Trees and accepted paths of every round against a reference that computes each round from scratch.

What goes wrong on the draft's side costs acceptance alone: tokens stay exact, and no comparison of tokens sees it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import headzoo
import reference_heads
from drafts_world import VOCAB, Seen, agree, choosing, head_for, reference, watched
from modelzoo import Pair, read_weights, write_target
from reference_drafts import Reference, Target
from reference_heads import Sizes
from specrs.engine.devices.head_inputs import ScoredPass
from specrs.engine.devices.host import HostDrafts
from specrs.engine.drafting.plans import RoundPlan
from specrs.engine.request.batch import Batch
from specrs.engine.request.head_state import HeadState
from specrs.engine.request.request import Passed, Request
from specrs.engine.rounds.runner import Runner
from specrs.models.features import FeatureRows


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The head differs from its target in whatever it could be given of the target's by mistake."""
    root = tmp_path_factory.mktemp("drafts")
    target = write_target(root / "target", vocab_size=VOCAB, num_hidden_layers=3, eos_token_id=None, bos_token_id=None)
    return Pair(target, head_for(target, root / "head"))


def prompt(first: int, length: int) -> list[int]:
    """Prompts that differ in their first token, so that they share no page unless a test wants it."""
    rng = random.Random(1000 * first + length)
    return [first, *(rng.randrange(VOCAB) for _ in range(length - 1))]


SHAPES = [(1, 1, 2), (1, 2, 3), (1, 3, 4), (1, 4, 5), (2, 1, 3), (2, 2, 5), (2, 3, 11), (2, 4, 9), (3, 1, 3),
          (3, 2, 13), (3, 3, 16), (3, 4, 2), (4, 1, 5), (4, 2, 12), (4, 3, 37), (4, 4, 16)]  # fmt: skip
PAGES = [1, 4, 16]


def check_shape(pair: Pair, shape: tuple[int, int, int], page_size: int) -> None:
    run = watched(pair, shape, page_size=page_size, max_batch=2, prefill_chunk=7)
    for i, length in enumerate((1, 9, 20)):
        run.add(prompt(i, length), 8)
    run.finish()
    agree(reference(pair, shape), run.rounds)


def plainly(runner: Runner, reqs: Sequence[Request]) -> list[Passed]:
    """A round without drafts."""
    batch = Batch(reqs)
    return runner._advance(runner._launch(batch, RoundPlan(batch)))


@pytest.mark.parametrize(("shape", "page_size"), [(shape, PAGES[i % 3]) for i, shape in enumerate(SHAPES)], ids=str)
def test_every_shape(pair: Pair, shape: tuple[int, int, int], page_size: int) -> None:
    check_shape(pair, shape, page_size)


@pytest.mark.long
@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_on_every_page_size(pair: Pair, shape: tuple[int, int, int], page_size: int) -> None:
    check_shape(pair, shape, page_size)


def test_drafts_are_accepted_off_the_first_branch(pair: Pair) -> None:
    """Without such paths, rows of accepted nodes would be neighbours, and wrong features would be the right ones."""
    run = watched(pair, (4, 4, 40), page_size=4)
    for i in range(3):
        run.add(prompt(i, 10), 25)
    run.finish()
    agree(reference(pair, (4, 4, 40)), run.rounds)
    assert any(seen.path != list(range(len(seen.path))) for seen in run.rounds)
    assert any(len(seen.path) > 2 for seen in run.rounds)


@pytest.mark.parametrize(
    ("options", "lanes"),
    [({"draft_attention": "lane"}, True), ({"draft_attention": "lane", "page_size": 1}, True),
     ({"prefix_cache": False}, False),
     ({"attention_backend": "flash_attention"}, False),
     ({"attention_backend": "flash_attention", "draft_layout": "holey"}, True),
     ({"attention_backend": "flashinfer", "draft_layout": "holey"}, False),
     ({"attention_backend": "triton", "draft_layout": "holey", "draft_attention": "lane"}, True)],
    ids=str,
)  # fmt: skip
def test_other_attention(pair: Pair, options: dict[str, Any], lanes: bool) -> None:
    shape = (3, 3, 14)
    run = watched(pair, shape, **{"page_size": 4, "max_batch": 2, **options})
    for i in range(3):
        run.add(prompt(i, 5 + i), 10)
    run.finish()
    agree(reference(pair, shape, lanes=lanes), run.rounds)
    if lanes:  # the two differ, so that each of them says something
        with pytest.raises(AssertionError):
            agree(reference(pair, shape), run.rounds)


def test_keys_and_values_in_bfloat16(pair: Pair) -> None:
    """The reference rounds what it would store; float32 and float64 may round an element to different neighbours."""
    shape = (2, 3, 7)
    run = watched(pair, shape, page_size=4, kv_dtype="bfloat16")
    for i in range(3):
        run.add(prompt(i, 7 + i), 12)
    run.finish()
    agree(reference(pair, shape, bf16=True), run.rounds, decided=2e-2, close=1e-2)


@pytest.mark.parametrize(
    "options",
    [{"norm_before_residual": True}, {"draft_vocab_size": None}, {"aux_layers": (1,)},
     {"own_embedding": True, "hidden_size": 48, "target_hidden_size": 64, "head_dim": 16, "num_key_value_heads": 1}],
    ids=str,
)  # fmt: skip
def test_other_heads(pair: Pair, tmp_path: Path, options: dict[str, Any]) -> None:
    other, shape = Pair(pair.target, head_for(pair.target, tmp_path, **options)), (3, 3, 12)
    run = watched(other, shape, page_size=4)
    for i in range(2):
        run.add(prompt(i, 6 + i), 10)
    run.finish()
    agree(reference(other, shape), run.rounds)


class FormHead:
    """A head of any form, as `reference_heads` has it, for a reference of rounds."""

    def __init__(self, sizes: Sizes, weights: reference_heads.Weights, tensors: Path, target: Target) -> None:
        self._sizes, self._weights, self._table = sizes, weights, target.w["model.embed_tokens.weight"]
        self.aux_layers = list(sizes.streams)
        stored = read_weights(tensors)
        self.ids: list[int] = (torch.arange(sizes.rows) + stored.get("d2t", 0)).tolist()

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return reference_heads.fuse(self._sizes, self._weights, features)

    def run(
        self, tokens: Sequence[int], features: torch.Tensor, positions: Sequence[int], visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, passed = reference_heads.logits_of(
            self._sizes, self._weights, self._table, tokens, features, positions, visible
        )
        return logits.log_softmax(-1), passed


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 3, 12)], ids=str)
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("speculators", {"layers": 3, "qk_norm": True, "norm_before_residual": True}),
        ("SpecForge", {"fc_norm": True, "norm_output": True}),
        ("SpecForge", {"layers": 2, "later_norm": "hidden_norm", "norm_output": True, "draft_vocab": None}),
        ("NVIDIA", {"norm_before_fc": True, "biases": True}),
    ],
    ids=str,
)
def test_heads_of_every_form(tmp_path: Path, form: str, options: dict[str, Any], shape: tuple[int, int, int]) -> None:
    """Catching up in chunks, drafting from what was accepted, and trees, in an engine."""
    sizes = Sizes(**{"vocab": VOCAB, "draft_vocab": 5, "streams": (2, 2, 1), "theta": 50.0, **options})
    target = write_target(
        tmp_path / "target", vocab_size=VOCAB, num_hidden_layers=4, eos_token_id=None, bos_token_id=None
    )
    weights = headzoo.write_head(tmp_path / "head", form, sizes, 4)
    run = watched(Pair(target, tmp_path / "head"), shape, page_size=4, max_batch=2, prefill_chunk=7)
    for i in range(3):
        run.add(prompt(i, 6 + 7 * i), 12)
    run.finish()
    of = Target(target)
    agree(Reference(of, FormHead(sizes, weights, tmp_path / "head", of), shape), run.rounds)


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 3, 12)], ids=str)
def test_requests_that_join_and_leave_disturb_no_other(pair: Pair, shape: tuple[int, int, int]) -> None:
    """The head's pass over a prompt overwrites the memory from which running requests would draft next."""
    run = watched(pair, shape, page_size=4, max_batch=3, prefill_chunk=5)
    for i, max_tokens in enumerate((20, 3, 20, 9, 10)):
        request = run.add(prompt(i, 4 + 5 * i), max_tokens)
        run.step()
        run.step()
        if i == 2:
            run.llm.abort(request)
    run.finish()
    agree(reference(pair, shape), run.rounds)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prompt_seen_before_gives_the_same_trees(pair: Pair, page_size: int) -> None:
    shape, run = (2, 3, 8), watched(pair, (2, 3, 8), page_size=page_size, max_batch=2)
    first = run.add(prompt(1, 23), 12)
    run.finish()
    second = run.add(prompt(1, 23), 12)
    run.finish()
    assert run.cached[first] == 0
    assert run.cached[second] == 22 // page_size * page_size
    agree(reference(pair, shape), run.rounds)
    assert [seen.tree for seen in run.of(first)] == [seen.tree for seen in run.of(second)], "to the bit"


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 4, 5), (4, 3, 20)], ids=str)
def test_what_a_finished_request_has_left_is_whole(pair: Pair, shape: tuple[int, int, int], page_size: int) -> None:
    """The head has not run over the last round's tokens when a request ends: pages that hold them are shared without
    draft KV. What a stop token cut off its round was never committed, and is not missing."""
    run, cut = watched(pair, shape, page_size=page_size, max_batch=1), 0
    pool, firsts = run.llm._runner.pages.pool, list[Seen]()
    for i in range(5):
        first = run.add(prompt(i, 5 + i), 6 + i, stop_token_ids=[5] if i in (1, 2) else [])
        run.finish()
        said, last = run.tokens[first], run.of(first)[-1]
        row, shared, drafted = pool.cache_lookup([*said, 1, 2])
        pool.release([row])
        whole = (len(last.tokens) - 1) // page_size * page_size
        assert drafted == whole <= shared
        second = run.add([*said, 1, 2], 4)
        run.finish()
        assert run.cached[second] == shared
        firsts += run.of(first)
        cut += len(said) - len(last.tokens) < len(last.path)
    agree(reference(pair, shape), firsts)
    assert cut, "no stop token within an accepted run"


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_last_entry_of_a_shared_page_is_its_first_owners(pair: Pair, page_size: int) -> None:
    """The head's entry at a position is made with the next position's token. Where two prompts part exactly behind a
    page, the second one has the first one's entry there. That costs acceptance, and no token."""
    shape, run = (2, 3, 8), watched(pair, (2, 3, 8), page_size=page_size)
    common = prompt(0, 8)
    run.add([*common, 1, 2, 3], 3)
    run.finish()
    second = run.add([*common, 4, 5, 3], 12)
    run.finish()
    assert run.cached[second] == 8
    want = reference(pair, shape)
    agree(want, run.of(second), following={7: 1})
    with pytest.raises(AssertionError):
        agree(want, run.of(second))


def test_preempted_requests_draft_as_before(pair: Pair) -> None:
    shape = (2, 3, 8)
    run = watched(pair, shape, page_size=4, max_batch=4, num_pages=20)
    for i in range(4):
        run.add(prompt(i, 10 + 3 * i), 16)
    preempted = 0
    while run.llm.unfinished:
        before = len(run.llm._scheduler._waiting)
        run.step()
        preempted += len(run.llm._scheduler._waiting) > before
    assert preempted, "none was preempted"
    agree(reference(pair, shape), run.rounds)


def test_features_that_wait_at_a_preemption_are_computed_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (2, 3, 8)
    run = watched(pair, shape, page_size=4, max_batch=2)
    scheduler, runner = run.llm._scheduler, run.llm._runner
    for i in range(2):
        run.add(prompt(i, 10 + 3 * i), 16)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "round", lambda reqs, stays: plainly(runner, reqs))
        for _ in range(6):
            run.step()
    last = scheduler._admitted[-1]
    assert last.lag
    scheduler._preempt(last)
    run.finish()
    drafted = [seen for seen in run.rounds if len(seen.tree.tokens) > 1]
    assert {seen.request for seen in drafted} == {0, 1}
    agree(reference(pair, shape), drafted)


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_tail_page_that_another_sequence_shares_is_copied_whole(
    pair: Pair, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks of every request before every round but its first, so that a round begins with copies of their tails."""
    shape, run = (2, 3, 8), watched(pair, (2, 3, 8), page_size=page_size, max_batch=6)
    runner, pool = run.llm._runner, run.llm._runner.pages.pool
    whole, copied = runner.round, 0

    def forked(reqs: Sequence[Any], stays: bool) -> Any:
        nonlocal copied
        forks = [pool.fork(r.seq, r.committed) for r in reqs if r.lag == 0]  # pages behind are never shared
        tails = [(r, r.committed // page_size, pool.pages(r.seq)[r.committed // page_size]) for r in reqs
                 if r.committed % page_size]  # fmt: skip
        try:
            passed = whole(reqs, stays)
            copied += sum(r.row is not None and pool.pages(r.seq)[at] != page for r, at, page in tails)
            return passed
        finally:
            pool.release(forks)

    monkeypatch.setattr(runner, "round", forked)
    for i in range(3):
        run.add(prompt(i, 6 + i), 12)
    run.finish()
    assert copied > 10
    agree(reference(pair, shape), run.rounds)


@pytest.mark.parametrize("shape", [(1, 4, 5), (3, 3, 12)], ids=str)
def test_plain_rounds_in_between(pair: Pair, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Features wait while a request decodes plainly, and the head catches up."""
    run = watched(pair, shape, page_size=4, max_context_len=400)
    runner, rng = run.llm._runner, random.Random(3)
    whole, plain = runner.round, [0, 1, 3, 0, 20, 0, 0, 2] + [rng.randrange(4) for _ in range(6)]
    left = iter([kind for n in plain for kind in [False] * n + [True]])

    monkeypatch.setattr(
        runner, "round", lambda reqs, stays: whole(reqs) if next(left, False) else plainly(runner, reqs)
    )
    run.add(prompt(0, 6), 70)
    run.add(prompt(1, 7), 70)
    run.finish()
    drafted = [seen for seen in run.rounds if len(seen.tree.tokens) > 1]
    assert len(drafted) >= 12
    agree(reference(pair, shape), drafted)


def test_chains_that_the_cost_model_cuts(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of any depth and size that the cost model picks is the beginning of the reference's."""
    run, rng = watched(pair, None, page_size=4, max_batch=3), random.Random(2)
    drafting = run.llm._runner.drafting
    policy = drafting.policy

    choosing(drafting.gathering, lambda tree: rng.randrange(1, len(tree) + 1), monkeypatch)
    monkeypatch.setattr(policy, "deepen", lambda *_: rng.random() < 0.8)
    monkeypatch.setattr(drafting, "warms", lambda *_: True)
    monkeypatch.setattr(drafting, "pays", lambda r, *_: r.produced < 2 or rng.random() < 0.8)
    for i in range(4):
        run.add(prompt(i, 6 + i), 40)
        run.step()
    run.finish()
    drafted = [replace(seen, depth=len(seen.tree.tokens) - 1) for seen in run.rounds if len(seen.tree.tokens) > 1]
    assert {seen.request for seen in drafted} == {0, 1, 2, 3}
    agree(reference(pair, (1, 8, 9)), drafted)


def test_trees_end_at_the_context_wall(pair: Pair) -> None:
    shape = (2, 4, 12)
    run = watched(pair, shape, page_size=4, max_batch=3, max_context_len=24)
    for i, length in enumerate((15, 20, 21, 22, 12)):
        run.add(prompt(i, length), 100 if i < 4 else 3)
    run.finish()
    agree(reference(pair, shape), run.rounds)
    assert {seen.depth for seen in run.rounds} >= {0, 1, 2}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_random_configurations(pair: Pair, seed: int) -> None:
    rng = random.Random(seed)
    k, s = rng.randrange(1, 6), rng.randrange(1, 6)
    shape = (k, s, rng.randrange(2, min(40, 1 + k + (s - 1) * k * k) + 1))
    lanes = rng.random() < 0.3
    run = watched(pair, shape, page_size=2 ** rng.randrange(6), max_batch=rng.randrange(1, 5),
                  prefill_chunk=rng.randrange(1, 40), prefix_cache=rng.random() < 0.7,
                  draft_attention="lane" if lanes else "ancestors")  # fmt: skip
    # Prompts differ in their first token or are equal: where two part behind a page, the first one's entry stays.
    prompts = [prompt(i, rng.randrange(1, 30)) for i in range(VOCAB)]
    for _ in range(8):
        run.add(rng.choice(prompts), rng.randrange(1, 30))
        run.step()
    run.finish()
    agree(reference(pair, shape, lanes=lanes), run.rounds)


def test_features_are_kept_without_a_gap_or_not_at_all() -> None:
    """Behind positions whose features nobody kept, a pass's features alone would be of no use."""
    memory = FeatureRows((0,), torch.zeros(1, 8, 4))
    for end, kept in ((6, (6, 9)), (2, None)):
        state: Any = HeadState(end=end)
        request: Any = SimpleNamespace(head=state, committed=9)
        passed: Any = ScoredPass(memory, [0], torch.zeros(8, 2))
        HostDrafts.keep(None, [request], passed, [range(3)])  # type: ignore[arg-type]
        assert (None if state.features is None else (state.features.start, state.features.end)) == kept
