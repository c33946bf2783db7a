"""Attention from a later page on, on a GPU: as over a sequence that begins there, whatever the pages before hold."""

import random
import re
from dataclasses import replace

import pytest
import torch

import specrs
from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)

from attention_cases import CUDA, Cache, Launch, Request, Shape, folds, random_tree, reference, tokens

pytestmark = pytest.mark.usefixtures("no_fault_is_left")

# Queries times group: rows of a tile of 16, 32, 64 and (Hopper, head_dim 64 and 128) 128.
SHAPES = [
    Shape(2, 4, 128, torch.bfloat16, 16), Shape(1, 1, 64, torch.float16, 1), Shape(3, 7, 64, torch.bfloat16, 4),
    Shape(2, 2, 96, torch.bfloat16, 64), Shape(1, 8, 256, torch.float16, 16),
    Shape(2, 8, 128, torch.bfloat16, 16, 20.0),
]  # fmt: skip


def batch(
    shape: Shape, rng: random.Random, lengths: list[int], queries: int, masked: bool
) -> tuple[Cache, list[Request]]:
    """Requests that begin at any page up to that of their last key. Their pages before hold NaN."""
    cache = Cache(shape, sum((n + queries) // shape.page + 2 for n in lengths) + 3, rng)
    made = []
    for i, length in enumerate(lengths):
        first = rng.choice([0, length // shape.page, rng.randrange(length // shape.page + 1)])
        nodes = tokens(shape, queries, 100 + i)
        pages = cache.store(tokens(shape, length, i).then(nodes))
        for page in pages[:first]:
            cache.data[:, :, page * shape.page : (page + 1) * shape.page] = float("nan")
        words = random_tree(rng, queries, 5).words() if masked else None
        made.append(Request(pages, length, nodes.q, words, first))
    return cache, made


def shifted(shape: Shape, requests: list[Request]) -> list[Request]:
    """The same requests as if their sequences began at their first pages."""
    return [
        replace(r, pages=r.pages[r.first :], length=r.length - r.first * shape.page, first=0) for r in requests
    ]  # fmt: skip


def attended(cache: Cache, requests: list[Request], least: bool = False, **options: object) -> list[torch.Tensor]:
    launch = Launch(cache, requests, **options).prepare()  # type: ignore[arg-type]
    space = launch.least_workspace() if least else launch.arrays["workspace"]
    out = launch.live(launch.run(workspace=space))
    assert not least or folds(space)
    return out


def check(cache: Cache, requests: list[Request], least: bool = False, **options: object) -> None:
    got = attended(cache, requests, least, **options)
    want = attended(cache, shifted(cache.shape, requests), least, **options)
    for one, other in zip(got, want, strict=True):
        assert not one.isnan().any() and torch.equal(one.view(torch.int32), other.view(torch.int32))


@pytest.mark.parametrize("queries", [1, 5, 16, 48])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_outside_are_not_read_and_the_bits_are_those_of_a_sequence_that_begins_there(
    shape: Shape, queries: int
) -> None:
    rng = random.Random(queries)
    for lengths in ([0, 1, 17, 33], [130, 1000, 64], [2600, 40, 1300, 5]):
        for masked in (False, True):
            cache, requests = batch(shape, rng, lengths, queries, masked)
            check(cache, requests, dead=2)


@pytest.mark.parametrize("masked", [False, True])
def test_folded_batches_read_no_pages_outside(masked: bool) -> None:
    shape, rng = Shape(8, 4, 128, torch.bfloat16, 16), random.Random(3)
    cache, requests = batch(shape, rng, [rng.choice([7, 1040, 1500]) for _ in range(64)], 8, masked)
    check(cache, requests, least=True)


def test_draft_steps_read_no_pages_outside() -> None:
    shape, rng, k, s = SHAPES[0], random.Random(4), 4, 6
    for length in (3, 40, 700, 1100):
        cache, first = Cache(shape, 200, rng), rng.randrange(length // 16 + 1)
        pages = cache.store(tokens(shape, length, 1).then(tokens(shape, k * s, 2)))
        for page in pages[:first]:
            cache.data[:, :, page * 16 : (page + 1) * 16] = float("nan")
        words = [sum(1 << (b * s + t) for t in range(3)) for b in range(k)]
        check(cache, [Request(pages, length, tokens(shape, k, 3).q, words, first)], draft=(k, s))


def test_values_are_those_of_the_attended_keys() -> None:
    shape, rng = SHAPES[0], random.Random(5)
    cache = Cache(shape, 40, rng)
    prefix, nodes = tokens(shape, 300, 1), tokens(shape, 4, 2)
    [out] = attended(cache, [Request(cache.store(prefix.then(nodes)), 300, nodes.q, None, 17)])
    for j in range(4):
        keys = prefix.take(slice(17 * 16, 300)).then(nodes.take(slice(0, j + 1)))
        want = reference(shape, nodes.q[j], keys)
        plain = reference(shape, nodes.q[j], keys, shape.dtype).double()
        assert (out[j].double() - want).abs().max() <= 2 * (plain - want).abs().max() + 1e-5


def test_a_request_without_a_prefix_begins_at_its_first_page() -> None:
    """A draft step behind the context wall states no prefix, and its first page is that of the steps before."""
    shape, rng = SHAPES[0], random.Random(7)
    cache = Cache(shape, 40, rng)
    requests = [
        Request(cache.store(tokens(shape, length + 5, i)), length, tokens(shape, 5, 9 + i).q, None, first)
        for i, (length, first) in enumerate([(45, 2), (0, 0)])
    ]
    want = attended(cache, requests)
    launch = Launch(cache, requests).prepare()
    launch.arrays["first_pages"][1] = 2
    got = launch.live(launch.run())
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("bad", [3, -1, 2**31 - 1, -(2**31)])
def test_a_first_page_outside_the_keys_is_skipped_and_recorded(bad: int) -> None:
    shape, rng = SHAPES[0], random.Random(6)
    cache = Cache(shape, 40, rng)
    requests = [Request(cache.store(tokens(shape, 50, i)), 45, tokens(shape, 5, 9 + i).q, None, 2) for i in range(3)]
    want = attended(cache, requests)
    launch = Launch(cache, requests).prepare()
    launch.arrays["first_pages"][1] = bad
    got = launch.live(launch.run())
    with pytest.raises(specrs.OutOfBoundsError, match=re.escape("page table row (first page)")) as e:
        device.check()
    assert (e.value.kernel, e.value.request, e.value.index, e.value.bound) == ("attention", 1, bad, 3)
    assert not got[1].any()
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])


def test_first_pages_that_do_not_fit_are_refused_before_the_launch() -> None:
    shape, rng = SHAPES[0], random.Random(7)
    cache = Cache(shape, 40, rng)
    launch = Launch(cache, [Request(cache.store(tokens(shape, 50, 1)), 45, tokens(shape, 5, 9).q)]).prepare()
    for pages, why in (
        (torch.zeros(2, dtype=torch.int32, device=CUDA), "first pages: got 2 elements, want 1"),
        (torch.zeros(1, dtype=torch.int64, device=CUDA), "first_pages"),
        (torch.zeros(1, dtype=torch.int32), "first_pages"),
    ):
        with pytest.raises(specrs.SpecrsError, match=why):
            launch.run(first_pages=pages)
