"""Samplers, trees and verification through the bindings."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

from specrs import _specrs as core


def test_greedy_and_seeded_draws() -> None:
    logits = torch.tensor([0.1, 3.0, 2.5, 3.0])
    greedy = core.Sampler(4, [])
    assert greedy.vocab == 4
    assert greedy.draw(logits, 0) == 1  # the lowest of equals
    assert greedy.draw(logits.numpy(), 0) == 1
    seeded = core.Sampler(4, [], temperature=1.0, seed=2**64 - 1)
    draws = [seeded.draw(logits, p) for p in range(400)]
    assert draws == [core.Sampler(4, [], temperature=1.0, seed=2**64 - 1).draw(logits, p) for p in range(400)]
    share = np.bincount(draws, minlength=4) / 400
    assert np.abs(share - torch.softmax(logits, -1).numpy()).max() < 0.1


def test_history_and_path_move_the_draw() -> None:
    logits = torch.tensor([1.0, 1.5, 1.2])
    s = core.Sampler(3, [], presence_penalty=1.0)
    assert s.draw(logits, 1) == 1
    assert s.draw(logits, 1, [1]) == 2
    s.commit([1])
    assert s.draw(logits, 2, path=[2]) == 0
    assert core.Sampler(3, [1], repetition_penalty=2.0).draw(logits, 1) == 2
    assert core.Sampler(3, [], logit_bias={0: 5.0, 1: -math.inf}).draw(logits, 1) == 0


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("vocab", [0, -1, 2**31, 2**80]),
        ("prompt_tokens", [[4], [-1], [2**31], [2**64]]),
        ("temperature", [-0.1, math.nan, math.inf]),
        ("top_k", [-1, 2**63, 2**100]),
        ("top_p", [0.0, -0.5, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("seed", [-1, 2**64]),
        ("repetition_penalty", [0.0, -1.0, math.inf, math.nan, 9e-7, 1.1e6]),
        ("presence_penalty", [math.nan, math.inf, 1e300, 1.1e20]),
        ("frequency_penalty", [math.nan, -math.inf, -1.1e20]),
        ("logit_bias", [{4: 1.0}, {-1: 1.0}, {0: math.nan}, {0: math.inf}, {0: 1e300}, {0: -1.1e30}, {2**70: 0.0}]),
    ],
)
def test_parameters_that_cannot_be_honoured(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(core.ConfigError) as e:
            core.Sampler(**{"vocab": 4, "prompt_tokens": [], name: value})
        assert name.split("_tokens")[0] in str(e.value)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_cannot_be_sampled(bad: float) -> None:
    s = core.Sampler(3, [])
    with pytest.raises(core.NonFiniteError) as e:
        s.draw(torch.tensor([0.0, bad, 1.0]), 0)
    assert (e.value.what, e.value.position, e.value.index) == ("target logits", 0, 1)
    with pytest.raises(core.NonFiniteError, match="all -inf"):
        s.draw(torch.full((3,), -math.inf), 0)
    with pytest.raises(core.NonFiniteError, match=r"after logit_bias and penalties: all -inf .* position 9"):
        core.Sampler(1, [], logit_bias={0: -math.inf}).draw(torch.zeros(1), 9)


def test_operands_of_draw() -> None:
    s = core.Sampler(3, [])
    for logits in [torch.zeros(4), torch.zeros(1, 3), torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2]]:
        with pytest.raises(core.ConfigError, match="logits"):
            s.draw(logits, 0)
    for position in [-1, 2**32, 2**99]:
        with pytest.raises(core.ConfigError, match="position"):
            s.draw(torch.zeros(3), position)
    for path in [[3], [-1], [2**40]]:
        with pytest.raises(core.ConfigError, match="path token"):
            s.draw(torch.zeros(3), 0, path)
    with pytest.raises(core.ConfigError, match="output token"):
        s.commit([0, 3])


def test_tree_batch() -> None:
    t = core.TreeBatch.from_parents([[-1, 0, 0, 1], [-1]], [[5, 6, 7, 8], [9]])
    assert (len(t), t.sizes) == (2, [4, 1])
    assert t.tokens.tolist() == [5, 6, 7, 8, 9]
    assert t.parents.tolist() == [-1, 0, 0, 1, -1]
    assert t.depths.tolist() == [0, 1, 1, 2, 0]
    assert t.scores.tolist() == [0.0] * 5
    for parents, tokens in [
        ([[-1]], []),
        ([[-1, 0]], [[1]]),
        ([[]], [[]]),
        ([[-1, 1]], [[1, 2]]),
        ([[-1]], [[-5]]),
        ([[-1]], [[2**31]]),
        ([[-1, -(2**77)]], [[1, 2]]),
    ]:
        with pytest.raises(core.ConfigError):
            core.TreeBatch.from_parents(parents, tokens)


def test_beams_grow_the_most_probable_tree() -> None:
    shape = core.TreeShape(2, 2, 4)
    d2t = torch.tensor([10, 10, 10, 10])
    beams = core.DraftBeams(1, shape, d2t, 20)
    assert (beams.shape, beams.max_batch, beams.batch, beams.draft_vocab, beams.steps_done) == (shape, 1, 0, 4, 0)
    beams.start(torch.tensor([[3.0, 1.0, 2.0, -9.0]]))
    assert beams.batch == 1
    assert beams.tokens.tolist() == [10, 12]
    assert beams.parents.tolist() == [0, 0]
    first = torch.log_softmax(torch.tensor([3.0, 1.0, 2.0, -9.0]), -1)
    assert beams.scores()[0] == pytest.approx([float(first[0]), float(first[2])], abs=1e-5)
    beams.advance(torch.tensor([[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]]))
    assert beams.steps_done == 2
    assert beams.tokens.tolist() == [11, 13]
    assert beams.parents.tolist() == [0, 1]
    trees = beams.finish([7], [2], [4])
    assert trees.tokens.tolist() == [7, 10, 12, 11]
    assert trees.parents.tolist() == [-1, 0, 0, 1]
    assert beams.finish([7], [1], [4]).tokens.tolist() == [7, 10, 12]
    assert beams.finish([7], [0], [4]).tokens.tolist() == [7]
    assert beams.finish([7], [2], [2]).tokens.tolist() == [7, 10]
    scores = trees.scores.tolist()
    assert scores[0] == 0
    assert scores[1:3] == pytest.approx([float(first[0]), float(first[2])], abs=1e-5)
    assert scores[1] > scores[3] > scores[2]
    assert beams.finish([7], [2], [4], min_score=scores[3]).tokens.tolist() == [7, 10, 11]
    assert beams.finish([7], [2], [4], 0.0).tokens.tolist() == [7]
    with pytest.raises(core.ConfigError, match="min_score"):
        beams.finish([7], [2], [4], math.nan)
    with pytest.raises(core.ConfigError):
        beams.advance(torch.zeros(2, 4))  # S steps are done


def test_operands_of_beams() -> None:
    shape = core.TreeShape(2, 2, 4)
    for batch, d2t, vocab in [
        (-1, None, 8),
        (2**17, None, 8),
        (1, None, 0),
        (1, None, 1),
        (1, torch.tensor([9]), 8),
        (1, torch.tensor([0, 0, -9]), 8),
        (1, torch.tensor([0, 0], dtype=torch.int32), 8),
        (1, torch.tensor([[0, 0]]), 8),
        (1, None, 2**90),
    ]:
        with pytest.raises(core.ConfigError):
            core.DraftBeams(batch, shape, d2t, vocab)
    beams = core.DraftBeams(2, shape, None, 8)
    for logits in [torch.zeros(3, 8), torch.zeros(2, 7), torch.zeros(16), torch.zeros(2, 8, dtype=torch.bfloat16)]:
        with pytest.raises(core.ConfigError, match="draft logits"):
            beams.start(logits)
    assert (beams.batch, beams.steps_done) == (0, 0)
    beams.start(torch.zeros(2, 8))
    with pytest.raises(core.ConfigError, match="at most 2"):
        beams.start(torch.zeros(3, 8))
    assert (beams.batch, beams.steps_done) == (2, 1)
    for roots, depths, nodes in [
        ([1], [1, 1], [1, 1]),
        ([1, 8], [1, 1], [1, 1]),
        ([1, -1], [1, 1], [1, 1]),
        ([1, 1], [1, -1], [1, 1]),
        ([1, 1], [1, 1], [0, 1]),
        ([1, 1], [1, 1], [5, 1]),
        ([1, 1], [1, 1], [2**65, 1]),
    ]:
        with pytest.raises(core.ConfigError):
            beams.finish(roots, depths, nodes)


def test_beams_serve_every_batch_and_a_bad_request_alone_stops() -> None:
    """One set of beams, rounds of 3, 1, 0 and 2 requests; a row that is NaN costs its own request the drafts."""
    beams = core.DraftBeams(3, core.TreeShape(2, 3, 8), torch.tensor([1, 1, 1, 1]), 8)
    sound = torch.tensor([3.0, 1.0, 2.0, -9.0])
    for batch in (3, 1, 0, 2):
        beams.start(sound.repeat(batch, 1))
        assert (beams.batch, beams.faults) == (batch, [])
        assert beams.finish([5] * batch, [3] * batch, [8] * batch).sizes == [3] * batch
    logits = sound.repeat(3, 1)
    logits[1, 2] = math.nan
    beams.start(logits)
    [error] = beams.faults
    assert isinstance(error, core.NonFiniteError)
    assert (error.what, error.value, error.request, error.row, error.index) == ("draft logits", "NaN", 1, 1, 2)
    deeper = sound.repeat(6, 1)
    deeper[5] = -math.inf
    beams.advance(deeper)
    assert [(e.value, e.request, e.row) for e in beams.faults] == [("NaN", 1, 1), ("all -inf", 2, 5)]
    trees = beams.finish([5] * 3, [3] * 3, [8] * 3)
    assert trees.sizes == [7, 1, 3]
    assert trees.tokens.tolist()[-4:] == [5, 5, 1, 3]
    beams.start(sound.repeat(2, 1))
    assert beams.faults == []


def test_verification_is_plain_decoding() -> None:
    rng = np.random.default_rng(1)
    vocab = 6
    for trial in range(50):
        n = int(rng.integers(1, 20))
        parents = [-1] + [int(rng.integers(0, i)) for i in range(1, n)]
        tokens = [int(t) for t in rng.integers(0, vocab, n)]
        logits = torch.from_numpy(rng.normal(size=(n, vocab)).astype(np.float32) * 2)
        sampler = core.Sampler(vocab, [1, 2], temperature=0.9, top_p=0.9, seed=trial, presence_penalty=0.5)
        accepts = core.verify(core.TreeBatch.from_parents([parents], [tokens]), logits, [sampler], [7])
        node, path, drawn, drafts = 0, [0], [], list[int]()
        while True:
            drawn.append(sampler.draw(logits[node], 8 + len(drafts), drafts))
            children = [j for j in range(n) if parents[j] == node and tokens[j] == drawn[-1]]
            if not children:
                break
            node = children[0]
            path.append(node)
            drafts.append(tokens[node])
        assert (accepts.paths, accepts.tokens) == ([path], [drawn])


def test_operands_of_verify() -> None:
    trees = core.TreeBatch.from_parents([[-1, 0], [-1]], [[1, 2], [3]])
    samplers, logits = [core.Sampler(4, []), core.Sampler(4, [])], torch.zeros(3, 4)
    calls: list[tuple[Any, ...]] = [
        (trees, torch.zeros(2, 4), samplers, [1, 1]),
        (trees, torch.zeros(3, 5), samplers, [1, 1]),
        (trees, logits, samplers[:1], [1, 1]),
        (trees, logits, samplers, [1]),
        (trees, logits, samplers, [1, -1]),
        (trees, logits, samplers, [1, 2**32]),
        (trees, logits, [samplers[0], core.Sampler(5, [])], [1, 1]),
    ]
    for call in calls:
        with pytest.raises(core.ConfigError):
            core.verify(*call)
    logits[2, 1] = math.nan
    accepts = core.verify(trees, logits, samplers, [1, 1])
    none, error = accepts.errors
    assert none is None and isinstance(error, core.NonFiniteError)
    assert (error.what, error.request, error.row, error.position, error.index) == ("target logits", 1, 2, 2, 1)
    assert (accepts.paths, accepts.tokens) == ([[0], [0]], [[0], []])
    logits[2, 1] = 0
    assert core.verify(trees, logits, samplers, [1, 1]).errors == [None, None]
    assert core.verify(trees, logits, [samplers[0]] * 2, [1, 1]).tokens == [[0], [0]]  # one sampler may serve two


def test_samplers_are_not_shared_by_writers() -> None:
    vocab = 1 << 14
    sampler = core.Sampler(vocab, [], temperature=1.0, presence_penalty=0.1)
    trees = core.TreeBatch.from_parents([[-1]] * 64, [[1]] * 64)
    logits = torch.zeros(64, vocab)
    outcomes: list[str] = []
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            try:
                sampler.commit([1])
                outcomes.append("")
            except core.ConfigError as e:
                outcomes.append(str(e))

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(20):
        try:
            core.verify(trees, logits, [sampler] * 64, [1] * 64)
        except core.ConfigError as e:
            assert "in use" in str(e)
    done.set()
    writer.join()
    assert all(o == "" or "in use by another thread" in o for o in outcomes)
    sampler.commit([1])
    assert len(core.verify(trees, logits, [sampler] * 64, [1] * 64)) == 64


@pytest.mark.parametrize("vocab", [1, 7, 128, 129, 1000, 4096])
def test_likeliest_tokens_of_nodes(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    trees = core.TreeBatch.from_parents([[-1, 0], [-1], [-1, 0, 0]], [[0] * 2, [0], [0] * 3])
    rows = rng.normal(size=(6, vocab)).astype(np.float32).round(1)  # many equals
    rows[1], rows[2, : vocab // 2] = 0.5, -np.inf

    def best(count: int, requests: list[int]) -> list[list[list[int]]]:
        found = core.likeliest(trees, torch.from_numpy(rows), requests, count)
        assert [tokens for tokens, _ in found] == [[[0] * 2, [0], [0] * 3][r] for r in requests]
        return [each for _, each in found]

    for count in (0, 1, 8, vocab, vocab + 3):
        want = [[int(i) for i in np.lexsort((np.arange(vocab), -row))][:count] for row in rows]
        finite = [[i for i in best if row[i] > -np.inf] for best, row in zip(want, rows, strict=True)]
        found = [one for each in best(count, [0, 1, 2]) for one in each]
        assert [[i for i in one if row[i] > -np.inf] for one, row in zip(found, rows, strict=True)] == finite
        assert [len(one) for one in found] == [min(count, vocab)] * 6
        assert best(count, [2, 0]) == [found[3:], found[:2]] and best(count, []) == []
    rows[0, -1], rows[3] = np.nan, -np.inf
    rows[4, 0] = np.inf
    first, _, third = best(2, [0, 1, 2])
    assert (first[0], third[0], third[1]) == ([], [], []) and len(third[2]) == min(2, vocab)
    for wrong in (3, -1):
        with pytest.raises(core.SpecrsError, match="requests"):
            core.likeliest(trees, rows, [wrong], 2)
    with pytest.raises(core.ConfigError, match="logits"):
        core.likeliest(trees, rows[0], [0], 2)
