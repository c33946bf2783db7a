"""Attention on a GPU over arrays that nobody should give it: what is outside is not read, rows that cannot be served
are 0, the fault is told, and the other requests keep their bits. Query starts that decrease end the batch: the requests
behind them are not served."""

import random

import pytest
import torch

import specrs
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
    Tree,
    attend,
    folds,
    same,
    slots_of,
    tokens,
    two_requests,
)

pytestmark = pytest.mark.usefixtures("no_fault_is_left")

# Five queries of so many heads take a tile of 32 rows, or, where there are some, of 128.
heights = pytest.mark.parametrize("group", [4, 16])


def fault(launch, **other):
    """The record after a launch, and the output."""
    out = launch.arrays["out"]
    out.fill_(float("nan"))
    launch.run(**other)
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    device.check()  # reported once
    v = e.value
    return (v.kernel, v.buffer, v.request, v.step, v.index, v.bound), out


@heights
@pytest.mark.parametrize("bad", [60, 61, -1, 2**31 - 1, -(2**31)])
def test_a_page_outside_the_cache_is_skipped_and_recorded(bad, group):
    launch, before = two_requests(group=group)
    row = int(launch.arrays["rows"][0])
    launch.arrays["table"][row, 3] = bad
    record, out = fault(launch)
    assert record == ("attention", "cache (page)", 0, 3, bad, 60)
    assert same(out[5:10], before[5:10])
    assert not out.isnan().any()


@heights
@pytest.mark.parametrize(("bad", "index"), [(-1, -1), (-(2**31), -(2**31)), (235, 239), (2**31 - 1, 2**31 - 1 + 4)])
def test_a_length_outside_the_table_is_skipped_and_recorded(bad, index, group):
    launch, before = two_requests(group=group)
    capacity = launch.arrays["table"].shape[1] * 16
    launch.arrays["lens"][0] = bad if bad != 235 else capacity - 4
    record, out = fault(launch)
    assert record == ("attention", "page table row (tokens)", 0, -1, index if bad != 235 else capacity, capacity)
    assert same(out[5:10], before[5:10])
    assert torch.equal(out[:5], torch.zeros_like(out[:5]))


@pytest.mark.parametrize("bad", [2**31 - 2, 2**31 - 1025])
def test_a_length_that_int32_does_not_round_up_is_skipped_and_recorded(bad):
    """A row of 2^31 tokens: the kernel counts whole splits, so it takes no length within one of the end."""
    shape = Shape(1, 2, 64, torch.bfloat16, 1024)
    cache, stored = Cache(shape, 4, random.Random(1)), tokens(shape, 30, 1)
    launch = Launch(cache, [Request(cache.store(stored), 29, stored.q[29:])]).prepare()
    before, row = launch.run().clone(), int(launch.arrays["rows"][0])
    table = torch.full((row + 1, 2**21), 2**30 + 7, dtype=torch.int32, device=CUDA)
    table[row, :1] = launch.arrays["table"][row, :1]
    launch.arrays["table"] = table
    launch.arrays["workspace"] = launch.least_workspace()
    assert same(launch.run(), before)
    launch.arrays["lens"][0] = bad
    record, out = fault(launch)
    assert record == ("attention", "page table row (tokens)", 0, -1, bad, 2**31 - 1025)
    assert torch.equal(out, torch.zeros_like(out))


@heights
@pytest.mark.parametrize("bad", [4, -1, 2**31 - 1])
def test_a_table_row_outside_the_table_is_skipped_and_recorded(bad, group):
    launch, before = two_requests(group=group)
    launch.arrays["rows"][1] = bad
    record, out = fault(launch)
    assert record == ("attention", "page table rows", 1, -1, bad, 4)
    assert same(out[:5], before[:5])
    assert torch.equal(out[5:10], torch.zeros_like(out[5:10]))


@heights
@pytest.mark.parametrize(
    ("starts", "buffer", "index"),
    [
        ([0, 5, 14], "queries", 13),
        ([0, 5, 2**31 - 1], "queries", 2**31 - 2),
        ([0, 5, 2], "queries (starts decrease)", 2),
    ],
)
def test_query_starts_outside_the_batch_are_skipped_and_recorded(starts, buffer, index, group):
    launch, before = two_requests(group=group)
    launch.arrays["starts"].copy_(torch.tensor(starts, dtype=torch.int32))
    record, out = fault(launch)
    assert record == ("attention", buffer, 1, -1, index, 13)
    assert same(out[:5], before[:5])


def test_more_queries_than_the_launch_was_made_for_are_skipped_and_recorded():
    launch, before = two_requests("causal")
    launch.arrays["starts"].copy_(torch.tensor([0, 5, 11], dtype=torch.int32))
    record, out = fault(launch)
    assert record == ("attention", "queries of one request", 1, -1, 5, 5)
    assert same(out[:5], before[:5])
    assert torch.equal(out[5:11], torch.zeros_like(out[5:11]))


@heights
def test_mask_bits_of_no_key_are_skipped_and_recorded(group):
    launch, before = two_requests(group=group)
    launch.arrays["mask"][7] = 0b100101  # a leaf: the keys of its descendants would lose their place
    record, out = fault(launch)
    assert record == ("attention", "mask (bit of no key)", 1, 2, 5, 5)
    keep = [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert same(out[keep], before[keep])
    assert torch.equal(out[7], torch.zeros_like(out[7]))


def test_a_branch_longer_than_the_tail_is_skipped_and_recorded():
    """Nine nodes off the spine: their keys cannot all be taken one by one, and no bits may be promised."""
    shape = Shape(1, 4, 64, torch.bfloat16, 16)
    cache = Cache(shape, 20, random.Random(1))
    stored = tokens(shape, 100, 1).then(tokens(shape, 12, 2))
    good = Tree([-1, 0, 0, *range(2, 9), 0])  # node 9 is the eighth off the spine
    bad = Tree([-1, 0, 0, *range(2, 10)])  # node 10 the ninth
    pages = cache.store(stored)
    attend(cache, [Request(pages, 100, stored.q[100:111], good.words())])
    torch.cuda.synchronize()
    device.check()
    launch = Launch(cache, [Request(pages, 100, stored.q[100:111], bad.words())]).prepare()
    record, out = fault(launch)
    assert record == ("attention", "mask (nodes off the spine)", 0, 10, 9, 9)
    assert torch.equal(out[10], torch.zeros_like(out[10]))


def is_zero(out):
    return torch.equal(out, torch.zeros_like(out))


THREE = (200, 70, 30)
"""Keys before the queries of three requests: 15 queries, and room for 18."""


@heights
@pytest.mark.parametrize(
    ("starts", "kept"),
    [
        ([0, 5, 10, 19], [0, 1]),
        ([0, 5, 10, 2**31 - 1], [0, 1]),
        ([0, 5, 10, 7], [0, 1]),
        ([0, 5, 2, 7], [0]),  # the third's queries would be the first's
        ([0, 5, -1, 4], [0]),
        ([0, 5, -(2**31), 2**31 - 1], [0]),
        ([0, 5, 18, 15], [0]),
        ([-1, 5, 10, 15], [1, 2]),
        ([-(2**31), 5, 10, 15], [1, 2]),
        ([-(2**31), 2**31 - 1, 5, 10], []),
        ([5, 0, 5, 10], []),
        ([0, 20, 25, 30], []),
        ([18, 2**31 - 1, 2**31 - 1, 5], []),
        ([0, 12, 10, 15], []),  # the batch ends in front of the second, though the third is sound
    ],
)
def test_all_queries_of_wild_starts_that_nobody_has_are_skipped_and_recorded(starts, kept, group):
    launch, before = two_requests(group=group, lengths=THREE)
    launch.arrays["starts"].copy_(torch.tensor(starts, dtype=torch.int32))
    for workspace in (launch.arrays["workspace"], launch.least_workspace()):
        record, out = fault(launch, workspace=workspace)
        assert record[0] == "attention" and record[1].startswith("queries"), record
        want = torch.zeros_like(before)
        for i in kept:
            want[5 * i : 5 * i + 5] = before[5 * i : 5 * i + 5]
        assert same(out, want), starts


@heights
def test_queries_in_front_of_the_first_request_are_zeros(group):
    launch, before = two_requests(group=group, lengths=THREE)
    launch.arrays["starts"][0] = 5  # the first request is dead
    out = launch.arrays["out"].fill_(float("nan"))
    launch.run()
    assert is_zero(out[:5]) and same(out[5:], before[5:])


@heights
def test_starts_that_decrease_behind_many_lanes_are_skipped_and_recorded(group):
    """Hundreds of lanes, which the threads of a block read in several turns. The last has queries of the first request,
    but is refused, and may not clear them."""
    launch, before = two_requests(group=group)
    many = Launch(launch.cache, launch.requests, dead=800).prepare()
    for first in (3, 100, 127, 128, 383, 384, 500, 790):
        many.arrays["starts"][2:] = 10
        many.arrays["starts"][first:] = 2
        many.arrays["starts"][-1] = 7
        record, out = fault(many)
        # Two are found at once.
        assert record[:3] in {
            ("attention", "queries (starts decrease)", first - 1),
            ("attention", "page table row (tokens)", 801),
        }
        assert same(out, before), first


class Refused:
    """Requests of 5 queries that share a prefix of 1200 keys, in a batch of more items than blocks."""

    def __init__(self, group):
        shape, tree = Shape(8, group, 64, torch.bfloat16, 16), Tree([-1, 0, 0, 1, 3])
        cache = Cache(shape, 110, random.Random(2))
        prefix = cache.store(tokens(shape, 1200, 1))
        requests = []
        for i in range(13):
            nodes = tokens(shape, 5, 10 + i)
            requests.append(Request(prefix + cache.store(nodes), 1200, nodes.q, tree.words()))
        self.launch = Launch(cache, requests).prepare()


@pytest.mark.parametrize("group", [3, 4, 12, 16])  # tiles of 16, 32, 64 and, where there are some, 128 rows
@pytest.mark.parametrize("folded", [False, True])
def test_a_refused_mask_behind_many_blocks_is_skipped_and_recorded(group, folded):
    launch = Refused(group).launch
    workspace = launch.least_workspace() if folded else launch.arrays["workspace"]
    before = launch.run(workspace=workspace).clone()
    assert folds(workspace) == folded
    launch.arrays["mask"][32] = 0b100101
    record, out = fault(launch, workspace=workspace)
    assert record == ("attention", "mask (bit of no key)", 6, 2, 5, 5)
    before[32] = 0
    assert same(out, before)


@heights
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("bad", [2, -1, 2**31 - 1])
def test_wild_starts_of_a_batch_of_more_items_than_blocks_are_skipped_and_recorded(bad, folded, group):
    launch = Refused(group).launch
    workspace = launch.least_workspace() if folded else launch.arrays["workspace"]
    want = launch.run(workspace=workspace).clone()
    launch.arrays["starts"][13] = bad  # what the others take is still more than there are blocks
    record, out = fault(launch, workspace=workspace)
    assert record[1].startswith("queries"), record
    assert folds(workspace) == folded
    want[60:] = 0  # the last request
    assert same(out, want)


@heights
def test_slots_of_a_refused_mask_of_a_draft_are_skipped_and_recorded(group):
    """A refused row's bits may name slots of steps to come, which are NaN here."""
    k, s, length = 5, 3, 200
    shape = Shape(2, group, 64, torch.bfloat16, 16)
    cache = Cache(shape, 20, random.Random(1))
    pages = cache.store(tokens(shape, length, 1).then(tokens(shape, k * s, 2)))
    written = [length + b * s + t for b in range(k) for t in range(2)]
    unwritten = [x for x in range(length, length + k * s) if x not in written]
    cache.data[1, :, slots_of(pages, 16)[unwritten]] = float("nan")
    words = [0b11 << b * s for b in range(k)]
    launch = Launch(cache, [Request(pages, length, tokens(shape, k, 3).q, words)], draft=(k, s)).prepare()
    before = launch.run().clone()
    launch.arrays["mask"][2] = 1 << 15 | 0b111 << 6
    record, out = fault(launch)
    assert record == ("attention", "mask (bit of no key)", 0, 2, 15, 15)
    before[2] = 0
    assert same(out, before)


@heights
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_keys_that_are_no_numbers_change_no_other_request(group, bad):
    launch, before = two_requests(group=group)
    slots = slots_of(launch.requests[0].pages, 16)
    for at in ([3], [127], [150, 151], [201], list(range(0, 205, 7)), list(range(205))):
        launch.cache.data[1, 0, slots[at]] = bad
        out = launch.arrays["out"].fill_(0.0)
        launch.run()
        assert same(out[5:], before[5:]), at


@heights
def test_nan_keys_that_a_row_sum_counts_to_any_number_change_no_other_request(group):
    """The count of a block's weights, a NaN among them, is 0x80000001 here: no numbers give it, once a trap."""
    shape = Shape(2, group, 64, torch.bfloat16, 16, scale=0.6931471805599453)  # scores are exponents of 2
    cache = Cache(shape, 60, random.Random(1))
    wild, nodes = tokens(shape, 300, 1), tokens(shape, 5, 2)
    for part in (wild, nodes):
        part.q[:] = 0
        part.q[..., 0] = 1
        part.k[:] = 0
    # Behind a block of maximum 0: the largest weights count 2^22 each in units of 2^-87, and one counts 2.
    wild.k[128, :, 0] = float("nan")
    wild.k[129:209, :, 0] = -88
    wild.k[209, :, 0] = -109
    wild.k[210:256, :, 0] = -300
    words = Tree([-1, 0, 0, 1, 3]).words()
    requests = [Request(cache.store(wild.then(nodes)), 300, nodes.q, words)]
    stored = tokens(shape, 70, 3).then(tokens(shape, 5, 4))
    requests.append(Request(cache.store(stored), 70, stored.q[70:], words))
    [want] = attend(cache, requests[1:])
    launch = Launch(cache, requests).prepare()
    assert same(launch.run()[5:10], want)
    torch.cuda.synchronize()
