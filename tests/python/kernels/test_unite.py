"""The reference of uniting two trees: which nodes stay, and that exact attention can read the result."""

from __future__ import annotations

import random

import pytest

from reference_unite import OTHER, OWN, Scored, paths, random_tree, unite
from specrs import _specrs as core

BRANCH = 8  # nodes of a path off the spine at most, as attention and `merge_drafts` have it


def off_spine(tree: Scored) -> int:
    """Most nodes that a path has behind the chain that begins at the root and is numbered first."""
    spine = 0
    while spine + 1 < len(tree) and tree.parents[spine + 1] == spine:
        spine += 1
    off = [0] * len(tree)
    for i in range(spine + 1, len(tree)):
        off[i] = off[tree.parents[i]] + 1
    return max(off)


def test_a_case_by_hand() -> None:
    own = Scored([9, 1, 2, 3], [-1, 0, 0, 1], [0.0, -0.5, -1.0, -0.75])
    other = Scored([9, 1, 4, 3, 5], [-1, 0, 1, 1, 3], [0.0, -0.25, -0.5, -2.0, -2.0])
    got = unite(9, own, other, 64)
    # The path 1, 3 is in both and goes on with 5 in the other one alone: it is the deepest.
    assert (got.tokens, got.parents) == ([9, 1, 3, 5, 2, 4], [-1, 0, 1, 2, 0, 1])
    assert got.scores == [0.0, -0.25, -0.75, -2.0, -1.0, -0.5]
    assert got.origins == [0, 3, 3, OTHER, OWN, OTHER]
    four = unite(9, own, other, 4)  # without the two that score least; of three paths of two, the best leads
    assert (four.tokens, four.parents) == ([9, 1, 4, 3], [-1, 0, 1, 1])


@pytest.mark.parametrize("seed", range(300))
def test_the_best_of_both_stay(seed: int) -> None:
    rng = random.Random(seed)
    vocab, ties = rng.choice([2, 3, 9]), rng.random() < 0.5
    own = random_tree(rng, 0, rng.randint(1, 64), vocab, rng.random() / 2, ties)
    other = random_tree(rng, 0, rng.randint(1, 64), vocab, rng.random(), ties)
    most = rng.randint(1, 64)
    got = unite(0, own, other, most)
    best: dict[tuple[int, ...], float] = {}
    for tree in (own, other):
        for path, score in zip(paths(tree), tree.scores, strict=True):
            best[path] = max(score, best.get(path, score))
    found = dict(zip(paths(got), got.scores, strict=True))
    assert len(got) == len(found) == min(most, len(best)), "equal paths are one node"
    assert all(best[path] == score for path, score in found.items())
    assert all(0 <= parent < node for node, parent in enumerate(got.parents) if node)
    left = [score for path, score in best.items() if path not in found]
    assert not left or max(left) <= min(found.values())
    depth = max(map(len, found))
    assert all(got.parents[node] == node - 1 for node in range(1, depth + 1)), "the deepest path leads"
    of = [set(paths(own)), set(paths(other))]
    want = [0] + [OWN * (path in of[0]) + OTHER * (path in of[1]) for path in paths(got)[1:]]
    assert got.origins == want


@pytest.mark.parametrize("seed", range(300))
def test_no_branch_grows_too_long_for_exact_attention(seed: int) -> None:
    """A head's tree of up to 8 levels and a tree of the host's, which keeps its branches short itself."""
    rng = random.Random(seed)
    vocab = rng.choice([2, 3, 9])
    own = random_tree(rng, 0, rng.randint(1, 64), vocab, rng.random())
    low = [i for i, path in enumerate(paths(own)) if len(path) <= BRANCH]
    number = {old: new for new, old in enumerate(low)}
    own = Scored([own.tokens[i] for i in low], [-1, *(number[own.parents[i]] for i in low[1:])],
                 [own.scores[i] for i in low])  # fmt: skip
    proposals = []
    for _ in range(rng.randint(1, 3)):
        tree = random_tree(rng, 0, rng.randint(2, 60), vocab, rng.random())
        probs = [rng.uniform(0.05, 1.0) for _ in tree.tokens[1:]]
        proposals.append(core.DraftProposal([p - 1 for p in tree.parents[1:]], tree.tokens[1:], probs))
    merged = core.merge_drafts(0, vocab, proposals, rng.randint(2, 64), 31)
    other = Scored(list(merged.tokens), list(merged.parents), list(merged.scores))
    for most in (2, 9, 32, 64):
        assert off_spine(unite(0, own, other, most)) <= BRANCH
