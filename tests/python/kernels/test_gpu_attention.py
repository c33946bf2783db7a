"""Paged attention on a GPU: every way to compute a row gives the same bits, and they are near float64's.

The rows of a tree are compared with plain decoding of prefix and path and with prefill in chunks, each over its own
pages, as the f32 values before they are rounded. All slots that nobody stored to are NaN, and all entries of the page
table that nobody may read are wild.
"""

import random
from dataclasses import replace

import pytest
import torch

import specrs
from specrs import _specrs as core
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from attention_cases import (
    CUDA,
    Cache,
    Launch,
    Request,
    Shape,
    Tokens,
    Tree,
    attend,
    beam_tree,
    folds,
    random_tree,
    reference,
    same,
    spine_tree,
    tokens,
    two_requests,
)

LENGTHS = [*range(18), 31, 32, 33, 63, 64, 65, *range(120, 130), 250, 255, 257, *range(1016, 1027), 2047, 3071, 4000]
GROUPS = [1, 2, 4, 7, 8]
HEADS = [(128, None), (128, None), (64, None), (96, None), (256, None), (256, 20.0), (128, 5.0)]  # elements, cap
KINDS = ["normal", "peaked", "equal", "huge", "sink", "zeros", "tiny"]

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def any_shape(rng: random.Random, i: int) -> Shape:
    dim, cap = rng.choice(HEADS)
    return Shape(
        kv_heads=rng.choice([1, 2, 3]),
        group=GROUPS[i % len(GROUPS)],
        dim=dim,
        dtype=[torch.bfloat16, torch.float16][rng.randrange(4) // 3],
        page=rng.choice([1, 4, 16, 64, 256]),
        cap=cap,
    )


def any_tree(rng: random.Random) -> Tree:
    v = rng.choice([2, 5, 16, 17, 33, 48, 64, 64])
    kind = rng.randrange(6)
    if kind == 0:
        return random_tree(rng, v, rng.randrange(1, 8))
    if kind == 1:
        return spine_tree(rng, v, rng.randrange(1, v))
    if kind == 2:
        return Tree(list(range(-1, v - 1)))  # a chain
    if kind == 3:
        return Tree([-1] + [0] * (v - 1))  # a star
    k, s = rng.randrange(1, 9), rng.randrange(1, 7)
    return beam_tree(rng, k, s, min(v, 1 + k + (s - 1) * k * k))


class Case:
    """A prefix, a tree behind it, and each of some paths of the tree as a sequence of its own."""

    def __init__(self, shape: Shape, length: int, tree: Tree, seed: int, kind: str, leaves: int):
        rng = random.Random(seed)
        self.shape, self.length, self.tree = shape, length, tree
        self.prefix = tokens(shape, length, seed, kind)
        self.nodes = tokens(shape, len(tree), seed + 1, kind)
        paths = [tree.path(n) for n in rng.sample(tree.leaves(), min(leaves, len(tree.leaves())))]
        room = sum(length + len(p) for p in [*paths, tree.parents]) // shape.page + 3 * len(paths) + 4
        self.cache = Cache(shape, room, rng)
        everything = self.prefix.then(self.nodes)
        self.verify = Request(self.cache.store(everything), length, self.nodes.q, tree.words())
        self.paths = [(p, self.cache.store(self.prefix.then(self.nodes.take(p)))) for p in paths]

    def decodes(self) -> list[tuple[int, Request]]:
        """Each node of the paths, decoded alone."""
        found = {}
        for path, pages in self.paths:
            for depth, node in enumerate(path):
                found.setdefault(node, Request(pages, self.length + depth, self.nodes.q[node : node + 1]))
        return list(found.items())

    def chunk(self, path: list[int], pages: list[int], first: int, end: int) -> Request:
        q = self.prefix.then(self.nodes.take(path)).q[first:end]
        return Request(pages, first, q)


CASES = list(enumerate(LENGTHS))


def check_tree(i, length, turn, rng, tree=None, shape=None):
    """Each node against decoding and prefill, of a random shape."""
    shape = shape or any_shape(rng, i + turn)
    case = Case(shape, length, tree or any_tree(rng), i * 10 + turn, rng.choice(KINDS), leaves=4)
    where = (length, shape, case.tree.parents)
    [verified] = attend(case.cache, [case.verify])
    nodes = case.decodes()
    decoded = attend(case.cache, [r for _, r in nodes], dead=rng.randrange(3))
    for (node, _), out in zip(nodes, decoded, strict=True):
        assert same(out[0], verified[node]), ("decode", node, where)
    seen: dict[int, torch.Tensor] = {}
    for path, pages in case.paths[:2]:
        end = length + len(path)
        for size in rng.sample([1, 2, 3, 7, 16, 33, 64, 128, 500], 3):
            start = max(0, length - rng.randrange(40)) // size * size
            cuts = [(a, min(a + size, end)) for a in range(start, end, size)]
            requests = [case.chunk(path, pages, a, b) for a, b in cuts]
            # Together in one batch, which no engine would do: the chunks' KV is all there.
            for (a, b), out in zip(cuts, attend(case.cache, requests), strict=True):
                for position in range(a, b):
                    row = out[position - a]
                    if position >= length:
                        assert same(row, verified[path[position - length]]), ("extend", size, position, where)
                    else:
                        earlier = seen.setdefault(position, row)  # holds whatever path follows
                        assert same(row, earlier), ("prefix", size, position, where)


@pytest.mark.parametrize(("dim", "cap"), [(256, None), (256, 20.0), (128, 5.0)])
def test_tiles_of_every_height_give_the_same_bits_of_wide_and_capped_heads(dim, cap):
    """A request's rows choose the height by capacity: 16, 32 or 64, on Hopper 128 for heads of 128."""
    rng = random.Random(dim)
    for dtype in (torch.bfloat16, torch.float16):
        shape = Shape(2, 4, dim, dtype, 16, cap)
        cache = Cache(shape, 700, rng)
        requests = []
        for i, length in enumerate((0, 7, 129, 1030, 2500)):
            stored = tokens(shape, length, i).then(tokens(shape, 4, 100 + i))
            requests.append(Request(cache.store(stored), length, stored.q[length:], Tree([-1, 0, 0, 1]).words()))
        want = attend(cache, requests)
        for capacity in (4, 8, 16, 64):
            for got, one in zip(attend(cache, requests, max_queries=capacity), want, strict=True):
                assert same(got, one), capacity


def test_a_cap_changes_scores_and_a_high_one_does_not():
    shape, rng = Shape(1, 2, 128, torch.bfloat16, 16), random.Random(5)
    stored = tokens(shape, 300, 1, "peaked")
    cache = Cache(shape, 40, rng)
    request = Request(cache.store(stored), 299, stored.q[299:])
    launch = Launch(cache, [request]).prepare()
    plain = launch.run().clone()
    high, low = launch.run(cap=1e4).clone(), launch.run(cap=1.0).clone()
    assert torch.allclose(plain[:1], high[:1], atol=1e-2, rtol=1e-2)
    assert not torch.allclose(plain[:1], low[:1], atol=0.1)
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(specrs.ConfigError, match=r"cap = .*positive and finite"):
            launch.run(cap=bad)


@pytest.mark.parametrize(("dim", "cap", "takes"), [(32, None, "64, 96, 128 or 256"), (64, 20.0, "128 or 256 where")])
def test_heads_without_a_kernel_are_refused(dim, cap, takes):
    shape = Shape(1, 2, dim, torch.bfloat16, 16, cap)
    cache = Cache(shape, 4, random.Random(5))
    stored = tokens(shape, 3, 1)
    with pytest.raises(specrs.ConfigError, match=f"head_dim = {dim}: attention on a GPU takes {takes}"):
        attend(cache, [Request(cache.store(stored), 2, stored.q[2:])])


@pytest.mark.parametrize("part", range(4))
def test_a_tree_equals_plain_decoding_and_prefill_in_chunks(part):
    for i, length in CASES[part::4]:
        rng = random.Random(1000 + i)
        for turn in range(3 if length < 300 else 2):
            check_tree(i, length, turn, rng)


@pytest.mark.parametrize(("i", "length"), [(0, 0), (3, 17), (4, 130)])
def test_small_trees(i, length):
    """Small cases, which a sanitizer gets through."""
    rng = random.Random(i)
    check_tree(i, length, 0, rng, random_tree(rng, 9, 4))


@pytest.mark.parametrize(("dim", "cap"), [(256, None), (256, 20.0), (128, 5.0)])
def test_small_trees_of_wide_and_capped_heads(dim, cap):
    for i, length in enumerate((0, 17, 130)):
        rng = random.Random(i)
        shape = Shape(1 + i % 2, GROUPS[i], dim, [torch.bfloat16, torch.float16][i % 2], 16, cap)
        check_tree(i, length, 0, rng, random_tree(rng, 9, 4), shape)


def test_rounded_outputs_are_those_of_the_f32_values():
    rng = random.Random(3)
    for dtype in (torch.bfloat16, torch.float16):
        shape = Shape(2, 4, 128, dtype, 16)
        case = Case(shape, 300, beam_tree(rng, 8, 6, 64), 5, "normal", 2)
        [exact] = attend(case.cache, [case.verify])
        [rounded] = attend(case.cache, [case.verify], f32=False)
        assert same(rounded, exact.to(dtype))


def test_attention_is_as_near_float64_as_torch_in_bf16():
    rng = random.Random(11)
    for i, length in enumerate([1, 15, 127, 129, 700, 1025, 2100]):
        for kind in ("normal", "peaked", "huge", "sink"):
            shape = any_shape(rng, i)
            case = Case(shape, length, any_tree(rng), i, kind, 2)
            [out] = attend(case.cache, [case.verify])
            worst = torch_worst = 0.0
            for node in range(0, len(case.tree), 5):
                keys = case.prefix.then(case.nodes.take(case.tree.path(node)))
                want = reference(shape, case.nodes.q[node], keys)
                plain = reference(shape, case.nodes.q[node], keys, shape.dtype).double()
                worst = max(worst, float((out[node].double() - want).abs().max()))
                torch_worst = max(torch_worst, float((plain - want).abs().max()))
            assert worst <= 2 * torch_worst + 1e-5, (length, kind, shape, worst, torch_worst)


@pytest.mark.parametrize("page", [1, 2, 4, 16, 64, 256, 1024])
def test_pages_and_their_order_change_no_bit(page):
    want = None
    for p in (16, page):
        shape = Shape(2, 4, 128, torch.bfloat16, p)
        case = Case(shape, 1100, beam_tree(random.Random(1), 8, 6, 48), 77, "normal", 1)
        [out] = attend(case.cache, [case.verify])
        want = out if want is None else want
        assert same(out, want)


def test_batch_composition_changes_no_bit():
    """Alone, in every kind of batch, with dead lanes; with few slots, so that tiles are folded on the way."""
    rng = random.Random(21)
    shape = Shape(2, 4, 128, torch.bfloat16, 16)
    lengths = [0, 5, 127, 128, 1030, 2500, 9000, 333]
    cache = Cache(shape, 1200, rng)
    requests = []
    for i, length in enumerate(lengths):
        tree = any_tree(rng)
        stored = tokens(shape, length, i).then(tokens(shape, len(tree), 100 + i))
        requests.append(Request(cache.store(stored), length, stored.q[length:], tree.words()))
    alone = [attend(cache, [r])[0] for r in requests]
    for dead, count in [(0, 8), (5, 8), (1000, 8), (1, 3), (2, 5)]:
        order = rng.sample(range(len(requests)), count)
        for k, out in zip(order, attend(cache, [requests[k] for k in order], dead=dead), strict=True):
            assert same(out, alone[k]), (dead, count, lengths[k])
    launch = Launch(cache, requests).prepare()
    full = launch.run().clone()
    for share in (2, 10, 1000):
        least = 256 * 64 * 520 + 4096 if share == 1000 else 0
        small = max(len(launch.arrays["workspace"]) // share, 300 * 64 * 520, least)
        out = launch.run(workspace=torch.full((small,), 255, dtype=torch.uint8, device=CUDA))
        assert same(out, full), share
    # Tiles of another height: a request's rows decide by capacity.
    small_trees = [r for r in requests if len(r.q) <= 5]
    for r in small_trees:
        [lone] = attend(cache, [r])
        for capacity in (5, 8, 16, 64):
            assert same(attend(cache, [r], max_queries=capacity)[0], lone)


def test_many_requests_fold_their_splits_on_the_way():
    """More tiles than blocks: the serial path, with ragged lengths, against each request alone."""
    rng = random.Random(5)
    shape = Shape(4, 2, 64, torch.bfloat16, 16)
    cache = Cache(shape, 30000, rng)
    base = tokens(shape, 3000, 1)
    requests = []
    for i in range(130):
        length = rng.choice([0, 1, 7, 8, 100, 1023, 1024, 1031, 1032, 2047, 2999])
        own = base.take(slice(0, length)).then(tokens(shape, 1, 50 + i))
        requests.append(Request(cache.store(own), length, own.q[length:]))
    together = attend(cache, requests, dead=6)
    for k in rng.sample(range(len(requests)), 30):
        assert same(attend(cache, [requests[k]])[0], together[k]), requests[k].length


class Folded:
    """Requests whose prefixes share their whole pages, as a prefix cache has it, in a batch that folds its splits.

    Requests i and i + len(lengths) have prefixes of one length; each has a tree, or a chunk, of its own.
    """

    def __init__(self, shape: Shape, queries: int, lengths: list[int], turns: int, masked: bool):
        rng = random.Random(queries)
        self.shape, self.queries, self.lengths, self.requests = shape, queries, lengths * turns, []
        self.base, own = tokens(shape, max(lengths), 1), shape.page + queries
        self.cache = Cache(shape, max(lengths) // shape.page + len(self.lengths) * (own // shape.page + 1) + 3, rng)
        self.nodes = [tokens(shape, queries, 100 + i) for i in range(len(self.lengths))]
        self.trees = [random_tree(rng, queries, 5) if masked else None for _ in self.nodes]
        whole = self.cache.store(self.base)
        for length, nodes, tree in zip(self.lengths, self.nodes, self.trees, strict=True):
            shared = length // shape.page
            tail = self.base.take(slice(shared * shape.page, length)).then(nodes)
            pages = whole[:shared] + self.cache.store(tail)
            self.requests.append(Request(pages, length, nodes.q, None if tree is None else tree.words()))

    def keys(self, request: int, query: int):
        """The keys that a query attends to, in logical order."""
        tree, nodes = self.trees[request], self.nodes[request]
        path = list(range(query + 1)) if tree is None else tree.path(query)
        return self.base.take(slice(0, self.lengths[request])).then(nodes.take(path))

    def check(self, samples: list[int]) -> list[torch.Tensor]:
        """All at once, folded, against each sample alone, unfolded; what all were."""
        launch = Launch(self.cache, self.requests, dead=6).prepare()
        workspace = launch.least_workspace()
        together = launch.live(launch.run(workspace=workspace))
        assert folds(workspace), "the batch has no more items than the grid has blocks"
        for k in samples:
            alone = Launch(self.cache, [self.requests[k]]).prepare()
            [want] = alone.live(alone.run())
            assert not folds(alone.arrays["workspace"])
            assert same(together[k], want), (self.shape, self.lengths[k], k)
        return together


# Rows of a request are queries times group: tiles of 16, 32 and 64 rows, and of 128 elements on Hopper of 128.
FOLDED = [(256, None, 2, torch.bfloat16), (256, 20.0, 4, torch.float16), (128, 5.0, 8, torch.bfloat16)]


@pytest.mark.parametrize("queries", [1, 8, 16])
@pytest.mark.parametrize(("dim", "cap", "group", "dtype"), FOLDED)
def test_wide_and_capped_heads_fold_their_splits_on_the_way(dim, cap, group, dtype, queries):
    """Bits of the unfolded path, and values near float64's, of trees and of chunks."""
    shape = Shape(4, group, dim, dtype, 16, cap)
    lengths = [0, 7, 1023, 1040, 2047, 2999]
    for masked in (True, False):
        batch = Folded(shape, queries, lengths, 11, masked)
        samples = [*range(6), *range(54, 66)]
        together = batch.check(samples)
        for length in lengths:
            worst = torch_worst = 0.0
            for k in (k for k in samples if batch.lengths[k] == length):
                for j in {0, queries // 2, queries - 1}:
                    q, keys = batch.nodes[k].q[j], batch.keys(k, j)
                    want = reference(shape, q, keys)
                    plain = reference(shape, q, keys, dtype).double()
                    worst = max(worst, float((together[k][j].double() - want).abs().max()))
                    torch_worst = max(torch_worst, float((plain - want).abs().max()))
            assert worst <= 2 * torch_worst + 1e-5, (masked, length, worst, torch_worst)


@pytest.mark.parametrize("queries", [1, 8, 16])
@pytest.mark.parametrize(("dim", "cap", "group", "dtype"), FOLDED)
def test_small_folded_batches_of_wide_and_capped_heads(dim, cap, group, dtype, queries):
    """Small cases, which a sanitizer gets through: two splits and a tail to fold, and the bits of the unfolded path."""
    batch = Folded(Shape(8, group, dim, dtype, 16, cap), queries, [0, 7, 1040, 1060], 6, queries == 8)
    batch.check([2, 20, 23])


@pytest.mark.parametrize(
    ("dim", "cap", "scale"),
    [(64, None, 0.015625), (128, None, 0.0078125), (256, None, 144**-0.5), (128, 50.0, 144**-0.5), (256, 50.0, 0.0625)],
)
def test_small_batches_take_the_scale_that_is_asked_for(dim, cap, scale):
    """Granite's multiplier and Gemma's scalar take the place of dim ** -0.5, under a cap too."""
    for dtype in (torch.bfloat16, torch.float16):
        shape, rng = Shape(2, 4, dim, dtype, 16, cap, scale), random.Random(dim)
        cache, tree = Cache(shape, 12, rng), random_tree(rng, 9, 4)
        kind = "peaked" if scale < 0.05 else "normal"  # scores of about 1: neither flat nor one key's alone
        prefix, nodes = tokens(shape, 130, 1, kind), tokens(shape, 9, 2, kind)
        [out] = attend(cache, [Request(cache.store(prefix.then(nodes)), 130, nodes.q, tree.words())])
        worst = torch_worst = other = 0.0
        for j in range(9):
            q, keys = nodes.q[j].cpu(), Tokens(*(t.cpu() for t in prefix.then(nodes.take(tree.path(j))).parts()))
            want, got = reference(shape, q, keys), out[j].double().cpu()
            plain = reference(shape, q, keys, dtype).double()
            usual = reference(replace(shape, scale=2 * scale), q, keys)
            worst = max(worst, float((got - want).abs().max()))
            torch_worst = max(torch_worst, float((plain - want).abs().max()))
            other = max(other, float((got - usual).abs().max()))
        assert worst <= 2 * torch_worst + 1e-5, (dtype, worst, torch_worst)
        assert other > 4 * torch_worst, "another scale would pass as well"


@pytest.mark.parametrize("mode", ["ancestors", "lanes"])
def test_draft_steps_attend_to_the_slots_of_their_mask(mode):
    rng = random.Random(9)
    for k, s, length in [(8, 6, 1000), (3, 6, 7), (1, 5, 0), (4, 16, 129), (8, 8, 31), (64, 1, 1020), (1, 64, 50)]:
        shape = any_shape(rng, k)
        prefix = tokens(shape, length, k)
        slots = tokens(shape, k * s, s)  # slots by branch and step
        for step in {0, s // 2, s - 1}:
            cache = Cache(shape, (length + k * s) // shape.page + 4, rng)
            pages = cache.store(prefix.then(slots))
            # Later steps have not been written.
            layout = slots_of_draft(pages, shape.page, length, k, s)
            cache.data[1, :, layout[:, step + 1 :].reshape(-1)] = float("nan")
            lists = []
            for b in range(k):
                chain = [b] * (step + 1) if mode == "lanes" else [rng.randrange(k) for _ in range(step)] + [b]
                lists.append([chain[t] * s + t for t in range(step + 1)])
            words = [sum(1 << bit for bit in bits) for bits in lists]
            q = tokens(shape, k, 99 + step).q
            [out] = attend(cache, [Request(pages, length, q, words)], draft=(k, s))
            for b in range(0, k, 3):
                keys = prefix.then(slots.take(lists[b]))
                want = reference(shape, q[b], keys)
                plain = reference(shape, q[b], keys, shape.dtype).double()
                bound = 2 * float((plain - want).abs().max()) + 1e-2 * float(want.abs().max())
                assert float((out[b].double() - want).abs().max()) <= bound, (k, s, length, step, b)


def slots_of_draft(pages, page, length, k, s):
    first = torch.tensor(pages, device=CUDA, dtype=torch.long) * page
    slots = (first[:, None] + torch.arange(page, device=CUDA)).reshape(-1)
    return slots[length : length + k * s].view(k, s)


def test_a_draft_step_of_a_beam_has_the_bits_of_decoding():
    """Exactness does not need this, but there is one rule for all: a draft's chain of at most 8 nodes is the same list
    of keys."""
    shape = Shape(2, 4, 128, torch.bfloat16, 16)
    rng = random.Random(2)
    prefix, slots = tokens(shape, 1021, 1), tokens(shape, 8 * 6, 2)
    cache = Cache(shape, 600, rng)
    pages = cache.store(prefix.then(slots))
    chain = [3 * 6 + 0, 1 * 6 + 1, 7 * 6 + 2, 0 * 6 + 3]
    plain = cache.store(prefix.then(slots.take(chain)))
    q = tokens(shape, 1, 7).q
    [draft] = attend(cache, [Request(pages, 1021, q, [sum(1 << b for b in chain)])], draft=(8, 6))
    [decode] = attend(cache, [Request(plain, 1024, q)])
    assert same(draft, decode)


def test_control_another_order_of_the_keys_gives_other_bits():
    """The tests above can fail: two nodes swapped in their path, or the same keys in another split, differ."""
    shape = Shape(2, 4, 128, torch.bfloat16, 16)
    rng = random.Random(4)
    prefix, q = tokens(shape, 1200, 1), tokens(shape, 1, 2).q
    cache = Cache(shape, 400, rng)
    [plain] = attend(cache, [Request(cache.store(prefix), 1199, q)])
    swapped = [*range(1196), 1197, 1196, 1198, 1199]
    [other] = attend(cache, [Request(cache.store(prefix.take(swapped)), 1199, q)])
    shifted = [*range(8, 1024), *range(8), *range(1024, 1200)]  # other groups of 16
    [moved] = attend(cache, [Request(cache.store(prefix.take(shifted)), 1199, q)])
    within = [*range(15, -1, -1), *range(16, 1200)]  # the same groups of 16, another order within one
    [kept] = attend(cache, [Request(cache.store(prefix.take(within)), 1199, q)])
    assert not same(plain, other)
    assert not same(plain, moved)
    assert same(plain, kept)
    assert torch.allclose(plain, other, atol=1e-4)
    assert torch.allclose(plain, moved, atol=1e-3)


def test_repeats_give_the_same_bits_beside_other_work():
    rng = random.Random(8)
    shape = Shape(4, 4, 128, torch.bfloat16, 16)
    cache = Cache(shape, 2600, rng)
    requests = []
    for i in range(6):
        tree = beam_tree(rng, 8, 6, 64)
        stored = tokens(shape, 4000 + i * 311, i).then(tokens(shape, 64, 100 + i))
        requests.append(Request(cache.store(stored), len(stored) - 64, stored.q[-64:], tree.words()))
    launch = Launch(cache, requests).prepare()
    first = launch.run().clone()
    side, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device=CUDA)
    for turn in range(100):
        if turn % 2:
            with torch.cuda.stream(side):
                noise @ noise
        launch.arrays["out"].fill_(float("nan"))
        launch.arrays["workspace"].fill_(turn)
        assert same(launch.run(), first), turn


def test_a_captured_launch_serves_every_batch_of_its_bucket():
    rng = random.Random(6)
    shape = Shape(2, 4, 128, torch.bfloat16, 16)
    cache = Cache(shape, 2000, rng)
    tree = beam_tree(rng, 4, 4, 16)
    batches = []
    for lengths in ([5, 4000, 129, 0], [1030, 17], [2000], []):
        requests = []
        for i, n in enumerate(lengths):
            stored = tokens(shape, n, n + i).then(tokens(shape, 16, 300 + i))
            requests.append(Request(cache.store(stored), n, stored.q[n:], tree.words()))
        batches.append((requests, attend(cache, requests, max_queries=16) if requests else []))
    # The bucket's arrays: the largest batch's.
    bucket = Launch(cache, batches[0][0], max_queries=16).prepare()
    device.init()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bucket.run()
    for requests, want in batches:
        mine = Launch(cache, requests, dead=4 - len(requests), max_queries=16).prepare()
        for name in ("starts", "lens"):
            bucket.arrays[name].copy_(mine.arrays[name])
        bucket.arrays["rows"].copy_(torch.arange(4))
        live = sum(len(r.q) for r in requests)
        for i, r in enumerate(requests):
            bucket.arrays["table"][i, : len(r.pages)] = torch.tensor(r.pages, dtype=torch.int32)
        if live:
            bucket.arrays["q"][:live] = mine.arrays["q"][:live]
            bucket.arrays["mask"][:live] = mine.arrays["mask"][:live]
        bucket.arrays["out"].fill_(float("nan"))
        graph.replay()
        out = bucket.arrays["out"]
        assert torch.equal(out[live:], torch.zeros_like(out[live:]))
        for r, w, got in zip(requests, want, torch.split(out[:live], [16] * len(requests)), strict=True):
            assert same(got, w), r.length


def test_empty_batches():
    shape = Shape()
    cache = Cache(shape, 8, random.Random(0))
    for requests, dead in ([], 0), ([], 4):
        launch = Launch(cache, requests, dead=dead).prepare()
        launch.live(launch.run())
    launch = Launch(cache, [], slack=0).prepare()
    launch.run()
    # A query that attends to nothing: a draft step behind the context wall.
    pages = cache.store(tokens(shape, 4, 1))
    [out] = attend(cache, [Request(pages, 0, tokens(shape, 3, 2).q, [0, 1, 0])], draft=(3, 1))
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert not torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(out[2], torch.zeros_like(out[2]))


def test_operands_that_do_not_fit_are_refused_before_the_launch():
    launch, before = two_requests()
    a = launch.arrays
    small = torch.zeros(64, dtype=torch.uint8, device=CUDA)

    def refused(match, **other):
        with pytest.raises(specrs.ConfigError, match=match):
            launch.run(**other)

    refused("workspace: got 64 bytes, want at least", workspace=small)
    refused("lens: got int64, want int32", lens=a["lens"].long())
    refused("starts: got 2 elements, want 3", starts=a["starts"][:2])
    refused("mask: got 12 words, want one for each of 13 queries", mask=a["mask"][:12])
    refused("table: got cpu", table=a["table"].cpu())
    refused("page_size", page_size=3)
    refused("scale = 0", scale=0.0)
    refused("scale = NaN", scale=float("nan"))
    refused("scale = 1000000.*in float32 too", scale=1e39)
    refused("draft slots = 72", draft=(8, 9))
    refused("draft step needs one", draft=(2, 2), mask=None)
    refused("queries of one request = 0", max_queries=0)
    out = a["out"]
    a["out"] = out[:12]
    refused("out: got shape")
    a["out"] = out
    assert same(out, before)


def test_sizes_of_the_workspace_follow_capacities():
    def size(**other):
        sizes = {"requests": 1, "max_queries": 1, "kv_heads": 8, "group": 4, "head_dim": 128, "max_keys": 8192}
        return core._device_attention_workspace(CUDA.index, **(sizes | other))

    assert size(max_keys=32768) > size() > 0
    assert size(requests=2) > size()
    with pytest.raises(specrs.ConfigError, match="query heads of a key"):
        size(group=65)


def test_tokens_of_one_sequence_in_a_cache_of_more_than_four_gigabytes():
    """Byte offsets beyond 32 bits."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("less than 12 GiB of GPU memory is free")
    shape = Shape(8, 4, 128, torch.bfloat16, 16)
    stored = tokens(shape, 300, 1)
    outs = []
    for pages in (64, 70_000):
        cache = Cache(shape, pages, random.Random(1))
        cache.free.sort()  # the last pages first
        outs.append(attend(cache, [Request(cache.store(stored), 299, stored.q[299:])])[0])
    assert same(*outs)
