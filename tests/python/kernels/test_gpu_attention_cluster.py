"""Batches of few low tiles on a GPU, whose splits the blocks of a cluster share: bits are those of other launches."""

from __future__ import annotations

import random

import pytest
import torch

from specrs import device

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU in this machine", allow_module_level=True)
if not device.cuda_available():
    pytest.skip(f"no CUDA kernels: {device.cuda_unavailable_reason()}", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("clusters share splits on Hopper alone", allow_module_level=True)

from attention_cases import CUDA, Cache, Launch, Request, Shape, attend, random_tree, reference, same, tokens

# Dead requests with which a launch has too many tiles for clusters.
MANY = 30
# Around the ends of the tail, of groups, blocks and splits; 7000 are more splits than run at once for 8 heads.
LENGTHS = [0, 1, 7, 8, 15, 23, 24, 135, 136, 137, 500, 903, 904, 905, 1030, 1031, 1032, 1033, 1160, 2055, 2500, 3100]
LENGTHS += [4200, 7000]
DRAFT = (8, 6)

pytestmark = pytest.mark.usefixtures("no_fault_is_left")


def kernels_of(launch: Launch) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launch.run()
        torch.cuda.synchronize()
    return [e.key for e in profile.key_averages() if e.key.startswith("attention_")]


def request_of(cache: Cache, what: str, length: int, queries: int, seed: int) -> Request:
    """A request of which nothing is stored behind its own tokens, in the page of the last one too."""
    shape, rng = cache.shape, random.Random(seed)
    prefix = tokens(shape, length, seed)
    if what == "draft":
        k, s = DRAFT
        pages = cache.store(prefix.then(tokens(shape, k * s, seed + 1)))
        words = [sum(1 << (b * s + t) for t in range(3)) for b in range(queries)]
        return Request(pages, length, tokens(shape, queries, seed + 2).q, words)
    own = tokens(shape, queries, seed + 1)
    words = random_tree(rng, queries, 5).words() if what == "tree" else None
    return Request(cache.store(prefix.then(own)), length, own.q, words)


@pytest.mark.parametrize(("queries", "what"), [(1, "decode"), (4, "chunk"), (3, "tree"), (8, "tree"), (8, "draft")])
@pytest.mark.parametrize(
    "shape",
    [Shape(8, 4, 128), Shape(4, 4, 64, torch.float16, 64), Shape(1, 3, 128, torch.float16), Shape(2, 4, 128, cap=20.0)],
    ids=str,
)
def test_shared_splits_have_the_bits_of_others(shape: Shape, queries: int, what: str) -> None:
    cache = Cache(shape, sum(LENGTHS) // shape.page + 6 * len(LENGTHS), random.Random(queries))
    draft = DRAFT if what == "draft" else None
    requests = [request_of(cache, what, length, queries, 10 * i) for i, length in enumerate(LENGTHS)]
    for request in requests:
        [shared] = attend(cache, [request], draft=draft)
        [other] = attend(cache, [request], draft=draft, dead=MANY)
        assert same(shared, other), request.length
    for three in ([4, 18, 9], [21, 16, 2], [22, 23, 20]):
        batch = [requests[i] for i in three]
        for shared, other in zip(
            attend(cache, batch, draft=draft), attend(cache, batch, draft=draft, dead=MANY), strict=True
        ):
            assert same(shared, other), three


@pytest.mark.parametrize("length", [40, 1031, 2500])
def test_shared_splits_are_as_near_float64_as_torch_in_bf16(length: int) -> None:
    shape = Shape(8, 4, 128)
    cache = Cache(shape, length // shape.page + 2, random.Random(1))
    stored = tokens(shape, length + 1, 1)
    request = Request(cache.store(stored), length, stored.q[length:])
    launch = Launch(cache, [request]).prepare()
    assert "attention_cluster_16" in kernels_of(launch)
    [[out]] = launch.live(launch.run())
    want = reference(shape, request.q[0], stored)
    plain = reference(shape, request.q[0], stored, shape.dtype).double()
    assert (out.double() - want).abs().max() <= 2 * (plain - want).abs().max() + 1e-5


def test_launches_of_many_tiles_high_tiles_or_small_pages_share_no_split() -> None:
    def kernels(shape: Shape, queries: int, dead: int = 0) -> list[str]:
        cache = Cache(shape, 40, random.Random(2))
        own = tokens(shape, queries, 1)
        return kernels_of(Launch(cache, [Request(cache.store(own), 0, own.q)], dead=dead).prepare())

    assert "attention_cluster_32" in kernels(Shape(8, 4, 128), 8)
    assert "attention_cluster_16" in kernels(Shape(8, 4, 128), 4, dead=2)
    for names in (
        kernels(Shape(8, 4, 128), 1, dead=MANY),
        kernels(Shape(8, 4, 128), 8, dead=1),
        kernels(Shape(8, 4, 128), 9),
        kernels(Shape(8, 4, 128, page=8), 1),
        kernels(Shape(8, 4, 256), 1),
    ):
        assert len(names) == 2 and not any("cluster" in name for name in names), names


def test_repeats_give_the_same_bits_beside_other_work() -> None:
    shape = Shape(8, 4, 128)
    cache = Cache(shape, 300, random.Random(3))
    launch = Launch(cache, [request_of(cache, "tree", 3000, 8, 1)]).prepare()
    first = launch.run().clone()
    side, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device=CUDA)
    for turn in range(300):
        if turn % 2:
            with torch.cuda.stream(side):
                noise @ noise
        launch.arrays["out"].fill_(float("nan"))
        launch.arrays["workspace"].fill_(turn % 256)
        assert same(launch.run(), first), turn
