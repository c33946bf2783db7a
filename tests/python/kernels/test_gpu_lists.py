"""Trees of the lists of a block's levels on a GPU, against `DraftLists` of the host, and the rows of blocks."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from gpu_world import CUDA, I32_MAX, I32_MIN, handle, neighbour
from operands_world import named
from specrs.operands import BeamArrays, BlockArrays, BuiltTrees, ListArrays

pytestmark = pytest.mark.usefixtures("no_fault_is_left")

INF = math.inf


def random_lists(rng, rows, width, vocab, kind):
    """Ids that differ, and log-probabilities that fall: of a distribution, with many equal ones, or with some of 0."""
    ids, scores = [], []
    for _ in range(rows):
        ids.append(rng.sample(range(vocab), width))
        if kind == "ties":
            row = sorted((rng.choice([-0.5, -1.0, -1.5, 0.0]) for _ in range(width)), reverse=True)
        elif kind == "sure":  # long chains, and branches that leave them early
            row = sorted((-rng.choice([1e-3, 0.02, 0.1]) * (j + rng.random()) for j in range(width)), reverse=True)
        else:
            weights = sorted((rng.random() ** 6 + 1e-9 for _ in range(width)), reverse=True)
            row = [math.log(w / sum(weights)) for w in weights]
        if kind == "nothing":
            row[rng.randrange(width + 1) :] = [-INF] * (width - len(row[: rng.randrange(width + 1)]))
            row = sorted((row + [-INF] * width)[:width], reverse=True)
        scores.append(row)
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(scores, dtype=torch.float32).clamp(max=0.0)


class Batch:
    """Lists between canaries, limits with poison behind the live ones, and poisoned outputs."""

    def __init__(self, canaries, rng, live, dead, levels, width, v, kind, vocab=50, mapped=False, unsound=0.0):
        self.canaries, self.live, self.batch, self.levels, self.width, self.v = (
            canaries, live, live + dead, levels, width, v,
        )  # fmt: skip
        rows = self.batch * levels
        self.ids, self.scores = random_lists(rng, rows, width, vocab, kind)
        self.sound = torch.tensor([int(rng.random() >= unsound) for _ in range(rows)], dtype=torch.int32)
        self.scores[self.sound == 0] = math.nan
        self.target_ids = torch.tensor(rng.sample(range(1000), vocab)) if mapped else None
        self.roots = [rng.randrange(vocab) for _ in range(live)]
        self.depths = [rng.choice([0, 1, levels, levels, I32_MAX, rng.randint(0, levels)]) for _ in range(live)]
        self.nodes = [rng.choice([1, v, v, rng.randint(1, v)]) for _ in range(live)]
        self.lists = ListArrays(
            scores=canaries.of(self.scores.flatten()), ids=canaries.of(self.ids.flatten()),
            sound=canaries.of(self.sound),
        )  # fmt: skip
        self.to_target = None if self.target_ids is None else canaries.of(self.target_ids.int())
        self.limits = [canaries.of(x + [I32_MIN] * dead) for x in (self.roots, self.depths, self.nodes)]
        self.counted = canaries.of([I32_MAX, live]) if dead else None
        i32, n = torch.int32, self.batch * v
        self.trees = [
            canaries.empty(self.batch + 1, dtype=i32),
            *(canaries.empty(n, dtype=i32) for _ in range(5)),
            canaries.empty(n, dtype=torch.float32),
        ]
        self.masks = canaries.empty(n, 1, dtype=torch.int64)
        self.found = canaries.empty(self.batch, dtype=i32)

    def launch(self):
        roots, depths, nodes = self.limits
        core._device_tree_lists(
            draft_tokens=self.v, width=self.width, lists=self.lists, to_target=self.to_target, roots=roots,
            max_depths=depths, max_nodes=nodes, live=self.counted, trees=named(BuiltTrees, self.trees),
            masks=self.masks, sound=self.found, stream=handle(),
        )  # fmt: skip

    def alone(self):
        """Let the host's lists be distributions: tokens that are not listed have no chance."""
        some = (self.sound == 1) & (self.scores[:, 0] > -INF)
        self.scores[some] = self.scores[some].log_softmax(-1)

    def of_host(self, i):
        """The host's lists of a request."""
        first, count = i * self.levels, min(self.depths[i], self.levels)
        rows = slice(first, first + count)
        return core.DraftLists.of(
            self.ids[rows].contiguous(), self.scores[rows].contiguous(), self.sound[rows].contiguous(), [count],
            self.target_ids,
        )  # fmt: skip

    def got(self, name):
        return self.trees[["offsets", "tokens", "depths", "parents", "child", "sibling", "scores"].index(name)].tolist()

    def check(self):
        tokens, parents, scores, offsets = [], [], [], [0]
        for i in range(self.live):
            tree = self.of_host(i).trees([self.roots[i]], self.nodes[i])
            for into, array in ((tokens, tree.tokens), (parents, tree.parents), (scores, tree.scores)):
                into += from_dlpack(array).tolist()
            offsets.append(len(tokens))
        pad = self.batch * self.v - len(tokens)
        assert self.got("offsets") == offsets + [offsets[-1]] * (self.batch - self.live)
        assert self.got("tokens") == tokens + [0] * pad
        assert self.got("parents") == parents + [-1] * pad
        assert self.got("scores") == scores + [0.0] * pad
        for i in range(self.live):
            own = parents[offsets[i] : offsets[i + 1]]
            above = []
            for node, parent in enumerate(own):
                above.append({node} | (above[parent] if parent >= 0 else set()))
            behind = [range(node + 1, len(own)) for node in range(len(own))]
            links = [
                (len(above[j]) - 1, next((k for k in behind[j] if own[k] == j), -1),
                 next((k for k in behind[j] if own[k] == own[j]), -1))
                for j in range(len(own))
            ]  # fmt: skip
            here = slice(offsets[i], offsets[i + 1])
            assert list(zip(*(self.got(n)[here] for n in ("depths", "child", "sibling")), strict=True)) == links
            words = [row[0] & (2**64 - 1) for row in self.masks[here].tolist()]
            assert words == [sum(1 << bit for bit in chain) for chain in above]
        first = [i * self.levels for i in range(self.live)]
        bad = [not all(self.sound[f : f + min(d, self.levels)]) for f, d in zip(first, self.depths, strict=True)]
        assert self.found.tolist() == [int(not b) for b in bad] + [1] * (self.batch - self.live)


@pytest.mark.parametrize("kind", ["some", "ties", "sure", "nothing"])
@pytest.mark.parametrize("levels,width,v", [
    (1, 1, 2), (1, 8, 6), (5, 1, 6), (7, 8, 64), (15, 8, 64), (15, 2, 33), (31, 3, 63), (64, 32, 64), (40, 5, 1),
])  # fmt: skip
def test_trees_are_the_hosts(canaries, kind, levels, width, v):
    rng = random.Random(f"{kind} {levels} {width} {v}")
    for live, dead in ((1, 0), (3, 2), (17, 0), (64, 3)):
        world = Batch(canaries, rng, live, dead, levels, width, v, kind, mapped=live == 3, unsound=0.02 * (live == 17))
        world.launch()
        world.check()


def test_limits_outside_their_range_leave_the_root_alone(canaries):
    rng = random.Random(5)
    for bad in (0, -1, 17, I32_MAX):
        world = Batch(canaries, rng, 3, 0, 4, 3, 16, "some")
        world.limits[2][1] = bad
        world.nodes[1] = 1
        world.launch()
        torch.cuda.synchronize()
        with pytest.raises(specrs.OutOfBoundsError) as e:
            device.check()
        assert (e.value.kernel, e.value.buffer, e.value.request, e.value.index) == ("tree_lists", "max_nodes", 1, bad)
        world.check()


def test_it_replays_in_a_graph_beside_a_neighbour(canaries):
    rng = random.Random(11)
    batches = [Batch(canaries, rng, 20, 0, 15, 8, 64, kind) for kind in ("some", "ties", "sure")]
    static = batches[0]
    static.launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static.launch()
    with neighbour():
        for world in batches:
            for name in ("ids", "scores", "sound"):
                getattr(static.lists, name).copy_(getattr(world, name).flatten())
                setattr(static, name, getattr(world, name))
            for mine, theirs in zip(static.limits, world.limits, strict=True):
                mine.copy_(theirs)
            static.roots, static.depths, static.nodes = world.roots, world.depths, world.nodes
            graph.replay()
            torch.cuda.synchronize()
            static.check()
    assert static.found.device.type == CUDA.type


def paths(tokens, parents, scores):
    """Each node's score by the tokens down to it."""
    found = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    assert len(set(found)) == len(found)
    return dict(zip(found, scores, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["some", "sure", "nothing"])
@pytest.mark.parametrize(
    "levels,k,listed,v", [(1, 2, 5, 3), (5, 1, 8, 6), (7, 8, 32, 64), (7, 3, 31, 33), (4, 32, 32, 64)]
)
@pytest.mark.parametrize("selects", [False, True])
def test_beams_are_the_hosts(canaries, dtype, kind, levels, k, listed, v, selects):
    """Products of small whole numbers, so that their sums are the same in any order. Where a head selects, they have
    factors, and tokens that are not listed have no chance."""
    rng, vocab, rank = random.Random(f"{kind} {levels} {k} {listed}"), 50, 24
    for live, dead in ((1, 0), (5, 2), (33, 0)):
        world = Batch(canaries, rng, live, dead, levels, listed, v, kind, vocab, mapped=live == 5,
                      unsound=0.02 * (live == 33))  # fmt: skip
        generator = torch.Generator().manual_seed(rng.randrange(1000))
        before, behind = (
            torch.randint(-2, 3, (rows, rank), generator=generator).to(dtype) / 4 for rows in (1000, vocab)
        )
        weights = torch.randint(-1, 3, (world.batch * levels, rank), generator=generator).to(dtype)
        weights = weights if selects else torch.ones_like(weights)
        if selects:
            world.alone()
        heats = [rng.choice([1.0, 0.5, 2.0]) for _ in range(world.batch)]
        shape, n = core.TreeShape(k, levels, v), k + (levels - 1) * k * k
        words = -(-k * levels // 64)
        empty, i32 = canaries.empty, torch.int32
        beams = named(BeamArrays, (
            empty(world.batch, n, dtype=torch.float32), empty(world.batch, n, dtype=i32),
            empty(world.batch, n, dtype=i32), empty(world.batch, k, dtype=i32), empty(world.batch * k, dtype=i32),
            empty(world.batch * k, dtype=i32), empty(world.batch * k, words, dtype=torch.int64),
            empty(world.batch, dtype=i32),
        ))  # fmt: skip
        roots, depths, nodes = world.limits
        rows = torch.tensor(heats).repeat_interleave(levels)
        core._device_list_beams(
            shape=shape, width=listed, lists=world.lists, heats=canaries.of(rows), to_target=world.to_target,
            roots=roots, max_depths=depths, before=canaries.of(before), behind=canaries.of(behind),
            weights=canaries.of(weights) if selects else None, closed=selects, live=world.counted, beams=beams,
            stream=handle(),
        )  # fmt: skip
        least = canaries.of([torch.finfo(torch.float32).min], dtype=torch.float32)
        core._device_tree_build(
            shape=shape, beams=beams, roots=roots, max_depths=depths, max_nodes=nodes, min_score=least,
            live=world.counted, trees=named(BuiltTrees, world.trees), masks=None, stream=handle(),
        )  # fmt: skip
        offsets, tokens, parents, scores = (world.got(name) for name in ("offsets", "tokens", "parents", "scores"))
        for i in range(live):
            lists = world.of_host(i)
            count = min(world.depths[i], levels)
            if lists.begin([world.roots[i]], k):
                for level in range(count):
                    row = i * levels + level
                    last, ids = from_dlpack(lists.tokens).long()[0], world.ids[row].long()
                    left = before[last].float() * weights[row].float()
                    lists.advance((left @ behind[ids].float().T * heats[i])[None].contiguous())
            tree = lists.trees([world.roots[i]], world.nodes[i])
            want = paths(*(from_dlpack(a).tolist() for a in (tree.tokens, tree.parents, tree.scores)))
            here = slice(offsets[i], offsets[i + 1])
            got = paths(tokens[here], parents[here], scores[here])
            assert set(got) == set(want)
            assert all(abs(got[path] - want[path]) <= 1e-6 * (1 - want[path]) for path in want)
            assert beams.sound.tolist()[i] == (0 if lists.faults else levels)


def test_a_product_that_is_none_leaves_the_root_alone(canaries):
    world = Batch(canaries, random.Random(1), 2, 0, 3, 8, 16, "some")
    world.depths[:] = [3, 3]
    world.limits[1].fill_(3)
    shape, i32 = core.TreeShape(4, 3, 16), torch.int32
    empty = canaries.empty
    beams = named(BeamArrays, (
        empty(2, 36, dtype=torch.float32), empty(2, 36, dtype=i32), empty(2, 36, dtype=i32), empty(2, 4, dtype=i32),
        empty(8, dtype=i32), empty(8, dtype=i32), empty(8, 1, dtype=torch.int64), empty(2, dtype=i32),
    ))  # fmt: skip
    before = torch.zeros(1000, 8, dtype=torch.bfloat16)
    before[world.roots[0]] = math.inf
    if world.roots[1] == world.roots[0]:
        world.roots[1] = (world.roots[0] + 1) % 50
        world.limits[0][1] = world.roots[1]
    behind = torch.ones(50, 8, dtype=torch.bfloat16)
    core._device_list_beams(
        shape=shape, width=8, lists=world.lists, heats=canaries.of(torch.ones(6)), to_target=None,
        roots=world.limits[0], max_depths=world.limits[1], before=canaries.of(before), behind=canaries.of(behind),
        weights=None, closed=False, live=None, beams=beams, stream=handle(),
    )  # fmt: skip
    sound = beams.sound.tolist()
    assert sound[0] == 0
    assert sound[1] == 3 or world.roots[0] in world.ids[3:].tolist()[0]


@pytest.mark.parametrize("wrong", ["id", "root"])
def test_a_token_without_a_row_is_recorded_and_is_no_candidate(canaries, wrong):
    """Each with the bound of its own table: the draft's vocabulary for ids, the target's for the token before."""
    world = Batch(canaries, random.Random(2), 2, 0, 2, 8, 16, "some")
    world.limits[1].fill_(2)
    if wrong == "id":
        world.lists.ids[3] = 50
        want = ("list_beams", "vocabulary (d2t target id)", 0, 0, 50, 50)
    else:
        world.limits[0][1] = 70
        want = ("list_beams", "tokens before (rows of their table)", 1, 0, 70, 70)
    empty, i32 = canaries.empty, torch.int32
    beams = named(BeamArrays, (
        empty(2, 20, dtype=torch.float32), empty(2, 20, dtype=i32), empty(2, 20, dtype=i32), empty(2, 4, dtype=i32),
        empty(8, dtype=i32), empty(8, dtype=i32), empty(8, 1, dtype=torch.int64), empty(2, dtype=i32),
    ))  # fmt: skip
    core._device_list_beams(
        shape=core.TreeShape(4, 2, 16), width=8, lists=world.lists, heats=canaries.of(torch.ones(4)), to_target=None,
        roots=world.limits[0], max_depths=world.limits[1], before=canaries.of(torch.ones(70, 8).half()),
        behind=canaries.of(torch.ones(50, 8).half()), weights=None, closed=False, live=None, beams=beams,
        stream=handle(),
    )  # fmt: skip
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    v = e.value
    assert (v.kernel, v.buffer, v.request, v.step, v.index, v.bound) == want
    scores = beams.scores.view(2, 20).cpu()
    if wrong == "id":
        assert world.ids[0, 3] not in beams.candidate_tokens.view(2, 20)[0, :4].tolist() and scores[0, 0] > -INF
    else:
        assert (scores[1] == -INF).all() and scores[0, 0] > -INF


@pytest.mark.parametrize(
    "rows,levels,skipped", [(1, 1, 0), (7, 7, 0), (16, 15, 1), (16, 5, 1), (64, 63, 1), (1, 2, -1), (7, 8, -1)]
)
def test_rows_of_blocks(canaries, rows, levels, skipped):
    rng, context = random.Random(rows), 100
    for live, dead in ((1, 0), (4, 0), (19, 2)):
        batch, i32 = live + dead, torch.int32
        lens = [rng.choice([0, 7, context - 3, context - 1, context, rng.randrange(context)]) for _ in range(live)]
        roots = [rng.randrange(1000) for _ in range(live)]
        depths = [rng.choice([0, 1, 200, rng.randint(0, 70)]) for _ in range(live)]
        nodes = [rng.randint(1, 64) for _ in range(live)]
        heats = [rng.random() for _ in range(live)]
        given = [canaries.of(x + [I32_MIN] * dead) for x in (lens, roots, depths, nodes)]
        blocks = BlockArrays(
            offsets=canaries.empty(batch + 1, dtype=i32), tokens=canaries.empty(batch * rows, dtype=i32),
            masks=canaries.empty(batch * rows, dtype=torch.int64), wanted=canaries.empty(batch * levels, dtype=i32),
            heats=canaries.empty(batch * levels, dtype=torch.float32), levels=canaries.empty(batch, dtype=i32),
            nodes=canaries.empty(batch, dtype=i32),
        )  # fmt: skip
        core._device_block_rows(
            rows=rows, skipped=skipped, context=context, most=32, mask_token=1234, lens=given[0], roots=given[1],
            depths=given[2], nodes=given[3], heats=canaries.of(heats + [0.0] * dead, dtype=torch.float32),
            live=canaries.of([live]) if dead else None, blocks=blocks, stream=handle(),
        )  # fmt: skip
        offsets, tokens, masks, wanted, most = [0], [], [], [], []
        for i in range(live):
            count = min(rows, context - lens[i]) if depths[i] else 0
            tokens += ([roots[i]] * (skipped >= 0) + [1234] * rows)[:count]
            masks += [(1 << count) - 1] * count
            most.append(min(levels, depths[i], max(count - skipped, 0)))
            of_levels = [offsets[-1] + row if row >= 0 else -1 for row in range(skipped, skipped + most[-1])]
            wanted += of_levels + [0] * (levels - most[-1])
            offsets.append(len(tokens))
        pad = batch * rows - len(tokens)
        assert blocks.offsets.tolist() == offsets + [offsets[-1]] * dead
        assert blocks.tokens.tolist() == tokens + [0] * pad
        assert [word & (2**64 - 1) for word in blocks.masks.tolist()] == masks + [0] * pad
        assert blocks.wanted.tolist() == wanted + [0] * levels * dead
        assert blocks.levels.tolist() == most + [0] * dead
        assert blocks.nodes.tolist()[:live] == [min(n, 32) for n in nodes]
        want = torch.tensor(heats).repeat_interleave(levels)
        assert torch.equal(blocks.heats[: live * levels].cpu(), want)
