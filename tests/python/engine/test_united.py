"""A round with one tree of two drafters tells whose its nodes are, and credits each drafter with its own."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

from flight_world import scored
from reference_unite import OTHER, OWN, Scored, paths, random_tree, unite
from specrs._specrs import DraftProposal, TreeBatch, merge_drafts
from specrs.engine.drafting.sources import HEAD
from specrs.engine.drafting.trees import head_accepted, traced
from specrs.engine.request.traces import DraftTree

VOCAB, ROOT = 6, 1
NAMES = ("ngrams", "suffix", HEAD)


def host_tree(rng: random.Random) -> Any:
    """Merge the proposals of two sources."""
    said = []
    for _ in range(2):
        tree = random_tree(rng, ROOT, 1 + rng.randrange(9), VOCAB, 0.5)
        probs = [rng.choice([0.2, 0.5, 0.9]) for _ in range(len(tree) - 1)]
        said.append(DraftProposal([p - 1 for p in tree.parents[1:]], tree.tokens[1:], probs))
    return merge_drafts(ROOT, VOCAB, said, 12, 8)


def drafted_by(tree: DraftTree) -> list[set[str]]:
    """Return the names of the sources that drafted each node."""
    if not tree.proposed:
        return [set(tree.sources) for _ in tree.tokens]
    return [{name for i, name in enumerate(tree.sources) if mask >> i & 1} for mask in tree.proposed]


def test_the_head_has_its_own_nodes_and_their_scores() -> None:
    rng = random.Random(5)
    better = dropped = 0
    for _ in range(60):
        drafts = [host_tree(rng) for _ in range(3)]
        heads = [random_tree(rng, ROOT, 1 + rng.randrange(12), VOCAB, 0.5) for _ in drafts]
        trees = [
            unite(ROOT, head, host, rng.choice([6, 24]))
            for head, host in zip(heads, scored(TreeBatch.from_drafts(drafts)), strict=True)
        ]
        batch = TreeBatch.from_parents(
            [t.parents for t in trees], [t.tokens for t in trees], [t.scores for t in trees]
        )  # fmt: skip
        ways = [[0] for _ in trees]
        for way, tree in zip(ways, trees, strict=True):
            node = rng.randrange(len(tree))
            while node:
                way.insert(1, node)
                node = tree.parents[node]
        passed = [SimpleNamespace(tokens=[0] * rng.randrange(len(way) + 1)) for way in ways]  # some are cut
        verified: Any = SimpleNamespace(
            trees=batch, origins=[t.origins for t in trees], accepts=SimpleNamespace(paths=ways)
        )
        own = head_accepted(verified, passed)  # type: ignore[arg-type]
        seen = traced(verified, drafts, range(3), ways, NAMES)
        for i, (tree, draft) in enumerate(zip(trees, drafts, strict=True)):
            said = dict(zip(paths(Scored(draft.tokens, draft.parents, draft.scores)), range(len(draft)), strict=True))
            nodes = list(zip(paths(tree), tree.scores, tree.origins, strict=True))[1:]
            theirs = [(draft.scores[said[path]], score) for path, score, bits in nodes if bits & OTHER]
            better += sum(score > claimed + 1e-6 for claimed, score in theirs)
            dropped += len(draft) - 1 - len(theirs)
            stands = [tree.origins[node] for node in ways[i][1 : len(passed[i].tokens)]]
            assert own[i] == sum(bits & OWN > 0 for bits in stands)
            masks = [4 * (bits & OWN) | (draft.sources[said[path]] if bits & OTHER else 0) for path, _, bits in nodes]
            assert drafted_by(seen[i])[1:] == [{n for j, n in enumerate(NAMES) if mask >> j & 1} for mask in masks]
            assert (list(seen[i].tokens), list(seen[i].parents)) == (tree.tokens, tree.parents)
    assert better > 20 and dropped > 20, "else this says nothing"
