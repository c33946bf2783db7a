"""Draft selection and tree building on a GPU, against `DraftBeams` of the host."""

from __future__ import annotations

import itertools
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

from gpu_world import CUDA, I32_MAX, bits, handle, neighbour
from operands_world import named
from specrs.operands import BeamArrays, BuiltTrees

INF = float("inf")
SHAPES = [(1, 1, 2), (1, 5, 6), (2, 3, 5), (4, 4, 32), (8, 6, 64), (3, 7, 33), (16, 3, 65), (32, 2, 200), (8, 8, 100)]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


class Beams:
    """Poisoned tables of a round between canaries."""

    def __init__(self, canaries, shape, batch, draft_vocab, vocab, to_target=None):
        self.k, self.s, self.v = shape
        self.shape, self.batch, self.vocab = core.TreeShape(*shape), batch, vocab
        self.candidates = n = self.k + (self.s - 1) * self.k**2
        self.words = -(-self.k * self.s // 64)
        i32 = torch.int32
        self.arrays = (
            canaries.empty(batch, n, dtype=torch.float32),
            canaries.empty(batch, n, dtype=i32),
            canaries.empty(batch, n, dtype=i32),
            canaries.empty(batch, self.k, dtype=i32),
            canaries.empty(batch * self.k, dtype=i32),
            canaries.empty(batch * self.k, dtype=i32),
            canaries.empty(batch * self.k, self.words, dtype=torch.int64),
            canaries.empty(batch, dtype=i32),
        )
        self.scores, self.tokens_of, self.parents_of, self.beams, self.tokens, self.parents, self.bits, self.sound = (
            self.arrays
        )
        words = core._device_draft_scratch(self.shape, batch, draft_vocab, 0)
        self.scratch = canaries.of(torch.zeros(words, dtype=torch.int64))
        self.to_target = None if to_target is None else canaries.of(to_target)

    def select(self, step, logits, live=None):
        core._device_draft_select(
            step=step, logits=logits, to_target=self.to_target, vocab=self.vocab, live=live, shape=self.shape,
            beams=named(BeamArrays, self.arrays), scratch=self.scratch, stream=handle(),
        )  # fmt: skip


def build_trees(mine, trees, limits, live=None, min_score=None):
    roots, max_depths, max_nodes = limits
    core._device_tree_build(
        shape=mine.shape, beams=named(BeamArrays, mine.arrays), roots=roots, max_depths=max_depths,
        max_nodes=max_nodes, min_score=min_score, live=live, trees=named(BuiltTrees, trees.arrays), masks=trees.masks,
        stream=handle(),
    )  # fmt: skip


def draft_logits(seed, rows, vocab, dtype=torch.float32):
    """Continuous values: two scores are as good as never equal."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=g) * 3).to(dtype)


def check_beams(mine, host, live):
    rows = live * mine.k
    assert mine.tokens[:rows].tolist() == torch.from_dlpack(host.tokens).tolist()
    assert mine.parents[:rows].tolist() == torch.from_dlpack(host.parents).tolist()
    assert torch.equal(mine.bits[:rows].cpu(), torch.from_dlpack(host.ancestors))
    got = torch.stack([mine.scores[i][mine.beams[i].long()] for i in range(live)]).cpu()
    torch.testing.assert_close(got, torch.tensor(host.scores()), rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [33, 511, 1030, 32000])
def test_beams_are_the_hosts(canaries, dtype, shape, vocab):
    k, s, _ = shape
    if dtype != torch.float32 and vocab > 511:
        vocab = 515 if vocab < 2000 else 4104  # 16-bit logits of a large vocabulary tie, and so do scores
    for batch, dead in ((1, 0), (3, 2)):
        host = core.DraftBeams(batch, core.TreeShape(*shape), None, vocab)
        mine = Beams(canaries, shape, batch + dead, vocab, vocab)
        live = canaries.of([batch]) if dead else None
        for step in range(s):
            rows = batch if step == 0 else batch * k
            logits = draft_logits(step * 100 + batch, rows, vocab)
            if dtype != torch.float32:
                # Distinct values that 16 bits hold: a permutation of a ladder a row.
                order = torch.stack(
                    [torch.randperm(vocab, generator=torch.Generator().manual_seed(r * 7 + step)) for r in range(rows)]
                )
                ladder = torch.arange(1, vocab + 1).flip(0).float().log().neg()
                logits = (ladder[order] + torch.arange(rows)[:, None] * 0.003).to(dtype)
            (host.start if step == 0 else host.advance)(logits.float())
            stale = torch.full((dead * (1 if step == 0 else k), vocab), float("nan"), dtype=dtype)
            mine.select(step, canaries.of(torch.cat([logits, stale])), live)
            if dtype == torch.float32:
                check_beams(mine, host, batch)
            else:
                check_step(mine, step, logits, batch)
        assert mine.sound.tolist() == [s] * batch + [0] * dead
        if dead:
            assert (mine.tokens[batch * k :] == 0).all() and (mine.bits[batch * k :] == 0).all()


def check_step(mine, step, logits, live):
    """The step's own tables: children by logit, beams by the tables' scores, both with ties to the lower index."""
    k, first = mine.k, 0 if step == 0 else mine.k + (step - 1) * mine.k**2
    rows = 1 if step == 0 else k
    scores, tokens, beams = (t.cpu() for t in (mine.scores, mine.tokens_of, mine.beams))
    for i in range(live):
        for b in range(rows):
            row = logits[i * rows + b].float()
            values = row.tolist()
            order = sorted(range(len(row)), key=lambda c: (-values[c], c))[:k]
            at = first + b * k
            assert tokens[i, at : at + k].tolist() == order
            own = torch.log_softmax(row.double(), 0)[order]
            if step > 0:
                own = own + scores[i, int(mine.parents_of[i, at])].double()
            torch.testing.assert_close(scores[i, at : at + k].double(), own, rtol=2e-6, atol=4e-6)
        made = scores[i, first : first + rows * k].tolist()
        best = sorted(range(rows * k), key=lambda c: (-made[c], c))[:k]
        assert beams[i].tolist() == [first + c for c in best]


def test_a_vocabulary_of_the_heads_own(canaries):
    shape, vocab, draft = (4, 3, 12), 1000, 300
    rng = random.Random(1)
    ids = sorted(rng.sample(range(vocab), draft))
    d2t = torch.tensor([t - i for i, t in enumerate(ids)])
    host = core.DraftBeams(2, core.TreeShape(*shape), d2t, vocab)
    mine = Beams(canaries, shape, 2, draft, vocab, ids)
    for step in range(3):
        logits = draft_logits(step, 2 if step == 0 else 8, draft)
        (host.start if step == 0 else host.advance)(logits)
        mine.select(step, canaries.of(logits))
        check_beams(mine, host, 2)
        assert set(mine.tokens.tolist()) <= set(ids)


def test_a_mapped_token_outside_the_vocabulary_is_recorded(canaries):
    for bad in (50, -1, I32_MAX):
        mine = Beams(canaries, (2, 2, 4), 1, 9, 50, [0, 1, 2, bad, 4, 5, 6, 7, 8])
        logits = torch.zeros(1, 9)
        logits[0, 3], logits[0, 5] = 4.0, 2.0
        mine.select(0, canaries.of(logits))
        assert mine.tokens.tolist() == [0, 5]
        torch.cuda.synchronize()
        with pytest.raises(specrs.OutOfBoundsError) as e:
            device.check()
        found = (e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound)
        assert found == ("draft_select", "vocabulary (d2t target id)", 0, 0, bad, 50)


def test_ties_go_to_the_lower_index(canaries):
    for vocab in (40, 5000):
        host, mine = (
            core.DraftBeams(2, core.TreeShape(8, 3, 20), None, vocab),
            Beams(canaries, (8, 3, 20), 2, vocab, vocab),
        )
        for step in range(3):
            logits = torch.zeros(2 if step == 0 else 16, vocab)
            logits[:, 7::13] = -0.0
            (host.start if step == 0 else host.advance)(logits)
            mine.select(step, canaries.of(logits))
            check_beams(mine, host, 2)
        assert mine.beams.tolist()[0] == [8 + 64 + i for i in range(8)]


@pytest.mark.parametrize("value", ["NaN", "+inf", "all -inf"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_bad_logits_end_the_drafting_of_their_request_alone(canaries, value, at):
    shape, vocab, k = (4, 4, 20), 2100, 4
    host, mine = core.DraftBeams(3, core.TreeShape(*shape), None, vocab), Beams(canaries, shape, 3, vocab, vocab)
    for step in range(4):
        rows = 1 if step == 0 else k
        logits = draft_logits(step, 3 * rows, vocab)
        if step >= at:  # later faults of the request say nothing new
            for b in (rows - 1, rows // 2):
                row = logits[rows + b]
                if value == "NaN":
                    row[[2000, 700 + b]] = float("nan")
                    row[3] = INF
                elif value == "+inf":
                    row[[2000, 700 + b]] = INF
                else:
                    row[:] = -INF
        (host.start if step == 0 else host.advance)(logits)
        mine.select(step, canaries.of(logits))
        for i in (0, 2):
            assert mine.tokens.view(3, k)[i].tolist() == torch.from_dlpack(host.tokens).view(3, k)[i].tolist()
        torch.cuda.synchronize()
        if step == at:
            with pytest.raises(specrs.NonFiniteError) as e:
                device.check()
            fields = ("what", "value", "request", "row", "position", "index")
            assert [getattr(e.value, f) for f in fields] == [getattr(host.faults[0], f) for f in fields]
        else:
            device.check()
    assert mine.sound.tolist() == [4, at, 4]
    assert mine.tokens.min() >= 0 and mine.tokens.max() < vocab


def test_a_rows_numbers_do_not_depend_on_the_batch(canaries):
    vocab, shape = 32000, (8, 2, 16)
    first, second = draft_logits(1, 64, vocab), draft_logits(2, 64 * 8, vocab)

    def run(requests):
        mine = Beams(canaries, shape, len(requests), vocab, vocab)
        mine.select(0, first[requests].to(CUDA))
        mine.select(1, second.view(64, 8, vocab)[requests].reshape(-1, vocab).to(CUDA))
        return mine

    whole = run(list(range(64)))
    for part in ([0], [63], [5, 6, 7], list(range(10, 40))):
        mine = run(part)
        for a, b in zip(mine.arrays[:3], whole.arrays[:3], strict=True):
            assert torch.equal(bits(a), bits(b[part]))
        assert torch.equal(bits(mine.tokens.view(-1, 8)), bits(whole.tokens.view(-1, 8)[part]))
    logits = second.to(CUDA)
    want = [bits(a) for a in whole.arrays]
    with neighbour():
        for _ in range(30):
            whole.select(0, first.to(CUDA))
            whole.select(1, logits)
            assert all(torch.equal(bits(a), w) for a, w in zip(whole.arrays, want, strict=True))


@pytest.mark.parametrize("bad", [4, -1, I32_MAX])
def test_a_beam_outside_the_candidates_is_recorded(canaries, bad):
    mine = Beams(canaries, (4, 3, 9), 1, 50, 50)
    mine.select(0, draft_logits(0, 1, 50).to(CUDA))
    mine.beams[0, 2] = bad
    mine.select(1, draft_logits(1, 4, 50).to(CUDA))
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    found = (e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound)
    assert found == ("draft_select", "candidates (beam)", 0, 2, bad, 4)


# --- trees -----------------------------------------------------------------------------------------------------------


class Trees:
    def __init__(self, canaries, batch, v, masks=True):
        i32, n = torch.int32, batch * v
        self.arrays = (
            canaries.empty(batch + 1, dtype=i32),
            *(canaries.empty(n, dtype=i32) for _ in range(5)),
            canaries.empty(n, dtype=torch.float32),
        )
        self.masks = canaries.empty(n, -(-v // 64), dtype=torch.int64) if masks else None


def tree_reference(mine, roots, depths, nodes, least):
    """`finish_above` of the host, from the device's own tables; arrays of `Trees`, and ancestors as sets."""
    scores, tokens, parents, sound = (t.tolist() for t in (mine.scores, mine.tokens_of, mine.parents_of, mine.sound))
    offsets, flat, masks = [0], [], []
    for i in range(len(roots)):
        levels = max(0, min(sound[i], depths[i]))
        within = mine.k + (levels - 1) * mine.k**2 if levels else 0
        ranked = sorted(range(within), key=lambda c: (-scores[i][c], c))[: nodes[i] - 1]
        chosen = sorted(c for c in ranked if scores[i][c] >= least)
        node = {c: n + 1 for n, c in enumerate(chosen)}
        p = [-1] + [node.get(parents[i][c], 0) for c in chosen]
        t = [roots[i]] + [tokens[i][c] for c in chosen]
        depth, above = [0], [{0}]
        for j in range(1, len(p)):
            depth.append(depth[p[j]] + 1)
            above.append(above[p[j]] | {j})
        child = [min((k for k in range(len(p)) if p[k] == j), default=-1) for j in range(len(p))]
        sibling = [min((k for k in range(j + 1, len(p)) if p[k] == p[j]), default=-1) for j in range(len(p))]
        score = [0.0] + [scores[i][c] for c in chosen]
        flat += zip(t, depth, p, child, sibling, score, strict=True)
        masks += above
        offsets.append(len(flat))
    return offsets, [list(x) for x in zip(*flat, strict=True)], masks


def check_trees(mine, trees, reference, dead):
    offsets, columns, masks = reference
    total, capacity = offsets[-1], len(trees.arrays[1])
    assert trees.arrays[0].tolist() == offsets + [total] * dead
    for got, want, pad in zip(trees.arrays[1:], columns, (0, 0, -1, -1, -1, 0.0), strict=True):
        assert got.tolist() == want + [pad] * (capacity - total)
    if trees.masks is not None:
        words = trees.masks.tolist()
        sets = [{w * 64 + b for w in range(len(row)) for b in range(64) if row[w] >> b & 1} for row in words]
        assert sets == masks + [set()] * (capacity - total)


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_are_those_of_their_scores(canaries, shape):
    k, s, v = shape
    rng, vocab = random.Random(v), 400
    for batch, dead in ((1, 0), (5, 3)):
        mine = Beams(canaries, shape, batch + dead, vocab, vocab)
        host = core.DraftBeams(batch, core.TreeShape(*shape), None, vocab)
        live = canaries.of([batch]) if dead else None
        for step in range(s):
            logits = draft_logits(step + 50 * batch, batch if step == 0 else batch * k, vocab)
            (host.start if step == 0 else host.advance)(logits)
            stale = torch.zeros(dead * (1 if step == 0 else k), vocab)
            mine.select(step, canaries.of(torch.cat([logits, stale])), live)
        roots = [rng.randrange(vocab) for _ in range(batch)]
        for trial in range(4):
            depths = [s if trial == 0 else rng.randint(0, s + 1) for _ in range(batch)]
            nodes = [v if trial == 0 else rng.randint(1, v) for _ in range(batch)]
            least = -INF if trial < 2 else float(mine.scores[:batch].flatten()[rng.randrange(batch * mine.candidates)])
            if trial == 3:
                # Ties, within levels and across them; a parent's score stays at or above its child's.
                mine.scores[0] = torch.round(mine.scores[0])
                least = -7.0
            limits = tuple(canaries.of(x + [I32_MAX] * dead) for x in (roots, depths, nodes))
            trees = Trees(canaries, batch + dead, v, masks=trial != 1)
            given = None if least == -INF else canaries.of([least], dtype=torch.float32)
            build_trees(mine, trees, limits, live, min_score=given)
            check_trees(mine, trees, tree_reference(mine, roots, depths, nodes, least), dead)
            if trial == 0:
                want = host.finish(roots, depths, nodes)
                total = sum(want.sizes)
                assert trees.arrays[1][:total].tolist() == torch.from_dlpack(want.tokens).tolist()
                assert trees.arrays[2][:total].tolist() == torch.from_dlpack(want.depths).tolist()
                assert trees.arrays[3][:total].tolist() == torch.from_dlpack(want.parents).tolist()


def test_limits_outside_their_range_are_recorded_and_leave_the_root(canaries):
    shape, vocab = (3, 3, 12), 100
    mine = Beams(canaries, shape, 2, vocab, vocab)
    for step in range(3):
        mine.select(step, draft_logits(step, 2 if step == 0 else 6, vocab).to(CUDA))
    kept = [a.clone() for a in mine.arrays]

    def build(depths, nodes):
        trees = Trees(canaries, 2, 12)
        limits = tuple(canaries.of(x) for x in ([8, 9], depths, nodes))
        build_trees(mine, trees, limits)
        return trees

    def fault():
        torch.cuda.synchronize()
        with pytest.raises(specrs.OutOfBoundsError) as e:
            device.check()
        return e.value.kernel, e.value.buffer, e.value.request, e.value.step, e.value.index, e.value.bound

    for bad in (13, 0, -1, I32_MAX):
        trees = build([3, 3], [12, bad])
        assert fault() == ("tree_build", "max_nodes", 1, -1, bad, 13)
        check_trees(mine, trees, tree_reference(mine, [8, 9], [3, 3], [12, 1], -INF), 0)
    build([-1, I32_MAX], [12, 12])  # any depth is one
    torch.cuda.synchronize()
    device.check()
    for bad in (4, -1, I32_MAX):
        mine.sound[1] = bad
        trees = build([3, 3], [12, 12])
        assert fault() == ("tree_build", "sound steps", 1, -1, bad, 4)
        assert trees.arrays[0].tolist()[2] == trees.arrays[0].tolist()[1] + 1
    mine.sound[1] = 3
    best = int(mine.scores[1, 3:].argmax()) + 3
    for bad in (best, -2, I32_MAX):
        mine.parents_of[1, best] = bad
        build([3, 3], [12, 12])
        assert fault() == ("tree_build", "candidates (parent)", 1, best, bad, best)
        mine.parents_of[1] = kept[2][1]


def test_a_round_of_drafting_replays_in_a_graph(canaries):
    shape, vocab, batch = (8, 4, 24), 3000, 5
    k, s, v = shape
    mine, trees = Beams(canaries, shape, batch, vocab, vocab), Trees(canaries, batch, v)
    logits = [torch.zeros(batch * (1 if t == 0 else k), vocab, device=CUDA) for t in range(s)]
    limits = tuple(torch.zeros(batch, dtype=torch.int32, device=CUDA) for _ in range(3))
    live = torch.zeros(1, dtype=torch.int32, device=CUDA)

    def launch():
        for t in range(s):
            mine.select(t, logits[t], live)
        build_trees(mine, trees, limits, live)

    for column, value in zip(limits, (0, s, v), strict=True):
        column.fill_(value)
    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for n, seed in ((5, 1), (1, 2), (0, 3), (3, 4)):
        live.fill_(n)
        host = core.DraftBeams(batch, mine.shape, None, vocab)
        for t in range(s):
            made = draft_logits(seed * 10 + t, n * (1 if t == 0 else k), vocab)
            logits[t].fill_(float("nan"))
            logits[t][: len(made)] = made
            if n:
                (host.start if t == 0 else host.advance)(made)
        for array in (*trees.arrays, trees.masks, *mine.arrays):
            array.view(torch.int32).fill_(-1)
        graph.replay()
        if n:
            check_beams(mine, host, n)
            want = host.finish([0] * n, [s] * n, [v] * n)
            total = sum(want.sizes)
            assert trees.arrays[0].tolist() == [0, *itertools.accumulate(want.sizes)] + [total] * (batch - n)
            assert trees.arrays[1][:total].tolist() == torch.from_dlpack(want.tokens).tolist()
            assert trees.arrays[3][:total].tolist() == torch.from_dlpack(want.parents).tolist()
        else:
            assert trees.arrays[0].tolist() == [0] * 6
            assert (trees.masks == 0).all()


def test_shapes_and_operands_that_the_kernels_lack_are_refused(canaries):
    mine = Beams(canaries, (2, 3, 5), 2, 50, 50)

    def refused(match, step, logits, **changed):
        given = {"to_target": None, "vocab": 50, "live": None, "shape": mine.shape}
        with pytest.raises(specrs.ConfigError, match=match):
            core._device_draft_select(
                step=step, logits=logits, **{**given, **changed}, beams=named(BeamArrays, mine.arrays),
                scratch=mine.scratch, stream=handle(),
            )  # fmt: skip

    logits = torch.zeros(2, 50, device=CUDA)
    refused("draft step = 3 is outside 0..=2", 3, logits)
    refused("draft logits|logits: got float32 .2, 50., want float32 .4, 50.", 1, logits)
    refused("at most 49, the target's vocabulary", 0, logits, vocab=49)
    refused("to_target: got 3 elements, want 50", 0, logits, to_target=torch.zeros(3, dtype=torch.int32, device=CUDA))
    refused("scores: got 28 elements|scores: got 20 elements", 0, logits, shape=core.TreeShape(2, 2, 5))
    refused("topk on a GPU = 33 is outside 1..=32", 0, logits, shape=core.TreeShape(33, 1, 5))
    refused("draft vocabulary = 1 is outside 2..=", 0, logits[:, :1].contiguous())
    refused("logits: got int32", 0, logits.int())
    torch.cuda.synchronize()
