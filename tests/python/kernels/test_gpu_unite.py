"""Uniting two trees of each request on a GPU, against the plain reference."""

from __future__ import annotations

import math
import random

import pytest
import torch

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from gpu_world import CUDA, I32_MAX, I32_MIN, handle, neighbour
from operands_world import named
from reference_unite import Scored, columns, random_tree, unite
from specrs.operands import BuiltTrees, ScoredTrees

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def shape(v):
    return core.TreeShape(1, max(v - 1, 1), v)


def as_f32(tree):
    return Scored(tree.tokens, tree.parents, torch.tensor(tree.scores, dtype=torch.float32).tolist())


class Batch:
    """Two trees for each request between canaries, poison behind them, and poisoned outputs."""

    def __init__(self, canaries, v, own, other, roots, most, dead=0, masks=True):
        self.v, self.own, self.other, self.roots, self.most, self.dead = v, own, other, roots, most, dead
        self.requests = n = len(roots) + dead
        self.live = canaries.of([I32_MAX, len(roots)]) if dead else None
        self.given = [self._given(canaries, trees) for trees in (own, other)]
        self.limits = tuple(canaries.of(x + [I32_MIN] * dead) for x in (roots, most))
        i32 = torch.int32
        self.trees = (
            canaries.empty(n + 1, dtype=i32),
            *(canaries.empty(n * v, dtype=i32) for _ in range(5)),
            canaries.empty(n * v, dtype=torch.float32),
        )
        self.masks = canaries.empty(n * v, -(-v // 64), dtype=torch.int64) if masks else None
        self.origins = canaries.empty(n * v, dtype=i32)

    def _given(self, canaries, trees):
        offsets, tokens, parents, scores = columns(trees)
        room = self.requests * self.v - len(tokens)
        return (
            canaries.of(offsets + [offsets[-1]] * self.dead),
            canaries.of(tokens + [I32_MIN] * room),
            canaries.of(parents + [I32_MAX] * room),
            canaries.of(scores + [math.nan] * room, dtype=torch.float32),
        )

    def launch(self):
        core._device_tree_unite(
            shape=shape(self.v), own=named(ScoredTrees, self.given[0]), other=named(ScoredTrees, self.given[1]),
            roots=self.limits[0], max_nodes=self.limits[1], live=self.live, trees=named(BuiltTrees, self.trees),
            masks=self.masks, origins=self.origins, stream=handle(),
        )  # fmt: skip

    def check(self):
        each = zip(self.roots, self.own, self.other, self.most, strict=True)
        want = [unite(root, own, other, most) for root, own, other, most in each]
        offsets, tokens, parents, scores = columns(want)
        total, room = offsets[-1], self.requests * self.v - offsets[-1]
        depths, children, siblings, above = [], [], [], []
        for tree in want:
            for node, parent in enumerate(tree.parents):
                chain = {node} if parent < 0 else {node} | above[len(above) - node + parent]
                above.append(chain)
                depths.append(len(chain) - 1)
                behind = range(node + 1, len(tree))
                children.append(next((k for k in behind if tree.parents[k] == node), -1))
                siblings.append(next((k for k in behind if tree.parents[k] == parent), -1))
        assert self.trees[0].tolist() == offsets + [total] * self.dead
        columns_and_pads = zip(
            self.trees[1:], (tokens, depths, parents, children, siblings, scores), (0, 0, -1, -1, -1, 0.0), strict=True
        )
        for got, column, pad in columns_and_pads:
            assert got.tolist() == column + [pad] * room
        assert self.origins.tolist() == [o for tree in want for o in tree.origins] + [0] * room
        if self.masks is not None:
            words = [row[0] & (2**64 - 1) for row in self.masks.tolist()]
            assert words == [sum(1 << bit for bit in chain) for chain in above] + [0] * room


def trees(rng, roots, v, vocab, deep, ties):
    return [as_f32(random_tree(rng, root, rng.randint(1, v), vocab, deep, ties)) for root in roots]


@pytest.mark.parametrize("v", [1, 2, 5, 31, 32, 33, 63, 64])
@pytest.mark.parametrize("batch,dead", [(1, 0), (3, 2), (17, 0), (64, 3)])
def test_trees_are_the_references(canaries, v, batch, dead):
    rng = random.Random(100 * v + batch)
    for trial in range(6):
        vocab, ties = rng.choice([2, 5, 50_000]), trial % 2 == 0
        roots = [rng.randrange(vocab) for _ in range(batch)]
        own = trees(rng, roots, v, vocab, 0.2, ties)
        other = trees(rng, roots, v, vocab, rng.choice([0.3, 0.95]), ties)
        if trial == 5:  # the same twice
            other = own
        most = [v if trial == 0 else rng.randint(1, v) for _ in range(batch)]
        world = Batch(canaries, v, own, other, roots, most, dead, masks=trial != 1)
        world.launch()
        world.check()


def test_scores_that_are_none(canaries):
    """NaN counts as the least; scores that rise on the way down leave parents in front of children."""
    rng = random.Random(7)
    own, other = trees(rng, [1] * 8, 64, 3, 0.2, False), trees(rng, [1] * 8, 64, 3, 0.8, False)
    bad = [math.nan, -math.inf]
    own = [Scored(t.tokens, t.parents, [0.0, *(rng.choice([*bad, s]) for s in t.scores[1:])]) for t in own]
    other = [Scored(t.tokens, t.parents, [0.0, *(rng.choice([-9.0, s, 0.0]) for s in t.scores[1:])]) for t in other]
    for most in (5, 40, 64):
        world = Batch(canaries, 64, own, [as_f32(t) for t in other], [1] * 8, [most] * 8)
        world.launch()
        world.check()


def test_what_is_no_tree_is_recorded_and_read_no_further(canaries):
    rng = random.Random(3)
    v = 16
    own, other = (
        [as_f32(random_tree(rng, 4, n, 3, 0.3)) for n in (9, 12, 5)],
        [as_f32(random_tree(rng, 4, n, 3, 0.9)) for n in (16, 1, 14)],
    )
    root = Scored([4], [-1], [0.0])

    def fault():
        torch.cuda.synchronize()
        with pytest.raises(specrs.OutOfBoundsError) as e:
            device.check()
        return e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound

    for side in (0, 1):
        # The last tree's end is outside, or its size is none.
        for end, expected in (
            (I32_MAX, "nodes of a tree"), (-5, "nodes of a tree"), (3 * v + 1, None),
        ):  # fmt: skip
            world = Batch(canaries, v, own, other, [4] * 3, [v] * 3)
            begin = int(world.given[side][0][2])
            world.given[side][0][3] = end
            size = end - begin
            wrong = "nodes of a tree" if size > v or size < 1 else "nodes of all trees"
            assert expected in (None, wrong)
            world.launch()
            index, bound = (size, v + 1) if wrong == "nodes of a tree" else (end, 3 * v + 1)
            assert fault() == ("tree_unite", wrong, 2, side, index, bound)
            (world.own if side == 0 else world.other)[2] = root
            world.check()
            own, other = list(own), list(other)
            own[2], other[2] = (as_f32(random_tree(random.Random(3), 4, n, 3, d)) for n, d in ((5, 0.3), (14, 0.9)))
        for bad in (5, I32_MAX, -1, I32_MIN):
            world = Batch(canaries, v, own, other, [4] * 3, [v] * 3)
            tree = (own if side == 0 else other)[2]
            node = len(tree) - 1
            world.given[side][2][int(world.given[side][0][2]) + node] = bad if bad != 5 else node
            world.launch()
            assert fault() == ("tree_unite", "tree parents", 2, node, bad if bad != 5 else node, node)
            parents = [*tree.parents[:-1], 0]  # the root stands in
            (world.own if side == 0 else world.other)[2] = Scored(tree.tokens, parents, tree.scores)
            if (0, tree.tokens[-1]) not in zip(parents[1:-1], tree.tokens[1:-1], strict=True):
                world.check()
            own, other = list(own), list(other)
            own[2], other[2] = (as_f32(random_tree(random.Random(3), 4, n, 3, d)) for n, d in ((5, 0.3), (14, 0.9)))
    for bad in (v + 1, 0, -1, I32_MAX):
        world = Batch(canaries, v, own, other, [4] * 3, [v, bad, v])
        world.launch()
        assert fault() == ("tree_unite", "max_nodes", 1, -1, bad, v + 1)
        world.most = [v, 1, v]
        world.check()


def test_limits_of_operands(canaries):
    one = Scored([1], [-1], [0.0])
    with pytest.raises(specrs.SpecrsError, match="nodes of a united tree"):
        Batch(canaries, 65, [one], [one], [1], [65]).launch()
    world = Batch(canaries, 8, [one], [one], [1], [8])
    world.trees = (world.trees[0], world.trees[1][:7], *world.trees[2:])
    with pytest.raises(specrs.SpecrsError, match="tree tokens"):
        world.launch()
    empty = Batch(canaries, 8, [], [], [], [])
    empty.launch()  # nobody is there


def test_it_replays_in_a_graph_beside_a_neighbour(canaries):
    rng = random.Random(11)
    roots = [rng.randrange(9) for _ in range(20)]
    batches = [
        Batch(canaries, 32, trees(rng, roots, 32, 4, 0.2, False), trees(rng, roots, 32, 4, 0.8, False), roots,
              [rng.randint(1, 32) for _ in roots])
        for _ in range(3)
    ]  # fmt: skip
    static = batches[0]
    static.launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.launch()
    with neighbour():
        for world in batches:
            for mine, theirs in zip((*static.given[0], *static.given[1], *static.limits),
                                    (*world.given[0], *world.given[1], *world.limits), strict=True):  # fmt: skip
                mine.copy_(theirs)
            graph.replay()
            static.own, static.other, static.most = world.own, world.other, world.most
            torch.cuda.synchronize()
            static.check()
    assert static.origins.device.type == CUDA.type
