"""The function of `cuda/tree_unite.cu`, in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

OWN, OTHER = 1, 2


@dataclass(frozen=True)
class Scored:
    """A request's tree: parents stand before their children; -1 is the root's."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class United(Scored):
    """``origins``: of each node, `OWN` and `OTHER` as bits; 0 of the root."""

    origins: list[int]


def unite(root: int, own: Scored, other: Scored, most: int) -> United:
    """The root and the best nodes of both trees, ``most`` with it. Equal paths are one node, with the greater score.
    Ties go to own nodes, then to those with lower indices. The deepest path first, then own nodes, then the other's."""
    nodes = [[root, -1, 0.0, 0]]
    children: dict[tuple[int, int], int] = {}
    for i in range(1, len(own)):
        nodes.append([own.tokens[i], own.parents[i], _score(own.scores[i]), OWN])
        children.setdefault((own.parents[i], own.tokens[i]), i)
    place = {0: 0}
    for i in range(1, len(other)):
        under, score = place[other.parents[i]], _score(other.scores[i])
        found = children.get((under, other.tokens[i]))
        if found is None:
            place[i] = len(nodes)
            nodes.append([other.tokens[i], under, score, OTHER])
        else:
            place[i] = found
            nodes[found][2:] = [max(nodes[found][2], score), OWN | OTHER]
    order = sorted(range(1, len(nodes)), key=lambda i: (-nodes[i][2], i))
    kept = {0, *order[: most - 1]}
    above = [-1 if i == 0 else nodes[i][1] if nodes[i][1] in kept else 0 for i in range(len(nodes))]
    depth = [0] * len(nodes)
    for i in sorted(kept - {0}):
        depth[i] = depth[above[i]] + 1
    tip = min(kept, key=lambda i: (-depth[i], -nodes[i][2], i))
    spine = [tip]
    while above[spine[-1]] >= 0:
        spine.append(above[spine[-1]])
    spine.reverse()
    numbered = [*spine, *sorted(kept - set(spine))]
    number = {old: new for new, old in enumerate(numbered)}
    return United(
        [nodes[i][0] for i in numbered],
        [-1 if i == 0 else number[above[i]] for i in numbered],
        [nodes[i][2] for i in numbered],
        [nodes[i][3] for i in numbered],
    )


def paths(tree: Scored) -> list[tuple[int, ...]]:
    """The tokens from below the root down to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


def _score(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def random_tree(rng, root: int, size: int, vocab: int, deep: float, ties: bool = False) -> Scored:
    """A tree whose siblings differ and whose scores fall on the way down; ``deep``: how likely a node is the child of
    the last one."""
    tokens, parents, scores = [root], [-1], [0.0]
    taken: set[tuple[int, int]] = set()
    for _ in range(40 * size):
        if len(tokens) == size:
            break
        parent = len(tokens) - 1 if rng.random() < deep else rng.randrange(len(tokens))
        token = rng.randrange(vocab)
        if (parent, token) in taken:
            continue
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        step = rng.choice([0.0, 0.5, 1.0]) if ties else rng.random()
        scores.append(scores[parent] - step)
    return Scored(tokens, parents, scores)


def columns(trees: Sequence[Scored]) -> tuple[list[int], list[int], list[int], list[float]]:
    """Offsets, tokens, parents and scores of trees behind one another."""
    offsets = [0]
    for tree in trees:
        offsets.append(offsets[-1] + len(tree))
    each = [[x for tree in trees for x in getattr(tree, name)] for name in ("tokens", "parents", "scores")]
    return offsets, *each
