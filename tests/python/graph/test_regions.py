"""Declared memory, buckets and generations of `specrs.graph`: what needs no GPU."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import specrs
from specrs.graph import Family, Generations, Region, SeatError, graph_bytes, poison

TOKENS = Region("tokens", "int32", dead=0)
SCORES = Region("scores", "float32", (4, 33), role="output")
SPACE = Region("space", "uint8", (7,), role="scratch", more=3)


def test_shapes_are_seats_times_n_and_what_is_behind() -> None:
    assert [TOKENS.shape(5), SCORES.shape(5), SPACE.shape(5)] == [(5,), (20, 33), (38,)]
    assert [r.rows(5) for r in (TOKENS, SCORES, SPACE)] == [5, 20, 35]
    assert [r.elements(5) for r in (TOKENS, SCORES, SPACE)] == [5, 660, 38]
    assert Region("x", str(torch.bfloat16), dead=0.5).dtype == "bfloat16"
    assert Region("x", torch.int64, dead=-1).dtype == "int64"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("region '': name", {"name": "", "dtype": "int32", "dead": 0}),
        ("region 'a': dtype = complex64", {"name": "a", "dtype": "complex64", "dead": 0}),
        (r"seat_shape = \(2, 0\)", {"name": "a", "dtype": "int32", "seat_shape": (2, 0), "dead": 0}),
        ("role = temporary", {"name": "a", "dtype": "int32", "role": "temporary"}),
        ("dead = None: an input says", {"name": "a", "dtype": "int32"}),
        ("dead = 1: scratch has no dead", {"name": "a", "dtype": "int32", "role": "scratch", "dead": 1}),
        ("dead = 0.5: an integer from", {"name": "a", "dtype": "int32", "dead": 0.5}),
        ("dead = 256: an integer from 0 to 255", {"name": "a", "dtype": "uint8", "dead": 256}),
        ("dead = 2147483648", {"name": "a", "dtype": "int32", "dead": 2**31}),
        ("more = 1: 0 or more rows in outputs", {"name": "a", "dtype": "int32", "dead": 0, "more": 1}),
        ("more = -1", {"name": "a", "dtype": "int32", "role": "output", "more": -1}),
    ],
)
def test_what_cannot_be_declared_is_refused(text: str, asked: dict[str, Any]) -> None:
    with pytest.raises(specrs.ConfigError, match=text):
        Region(**asked)


@pytest.mark.parametrize("buckets", [[], [0], [4, 4], [4, 2], [-1, 3]])
def test_buckets_increase(buckets: list[int]) -> None:
    with pytest.raises(specrs.ConfigError, match="buckets = "):
        Family(buckets, [TOKENS])


def test_a_batch_takes_the_smallest_bucket_that_fits() -> None:
    family = Family([1, 4, 6], [TOKENS])
    assert [family.bucket(n) for n in range(1, 8)] == [1, 4, 4, 4, 6, 6, None]
    for batch in (0, -1):
        with pytest.raises(specrs.ConfigError, match=f"batch = {batch}"):
            family.bucket(batch)


def test_names_and_copies() -> None:
    with pytest.raises(specrs.ConfigError, match="'tokens' is declared 2 times"):
        Family([1], [TOKENS, SCORES, TOKENS])
    for copies in (0, 17):
        with pytest.raises(specrs.ConfigError, match=f"copies = {copies}"):
            Family([1], [TOKENS], copies)
    names = [name for name, _, _ in Family([3], [TOKENS, SCORES, SPACE], 2).declared()]
    assert names == ["tokens", "scores (copy 0)", "scores (copy 1)", "space"]
    assert [name for name, _, _ in Family([3], [SCORES], 1).declared()] == ["scores"]


def test_bytes_are_those_of_the_largest_bucket_aligned_and_guarded() -> None:
    def aligned(n: int) -> int:
        return -(-n // 256) * 256

    rng = random.Random(5)
    for _ in range(100):
        seats, copies = rng.randrange(1, 200), rng.randrange(1, 4)
        sizes = [4 * seats, *[4 * 4 * 33 * seats] * copies, 7 * seats + 3]
        want = 256 + sum(aligned(n) + 256 for n in sizes)  # a guard before the first and behind each
        assert graph_bytes([seats], [TOKENS, SCORES, SPACE], copies) == want
        # Smaller buckets live in the largest one's memory.
        assert graph_bytes(sorted({1, seats}), [TOKENS, SCORES, SPACE], copies) == want
    with pytest.raises(specrs.ConfigError, match="does not fit int64"):
        graph_bytes([2**40], [Region("a", "int64", (2**20, 2**10), dead=0)])


def test_outputs_are_stale_after_as_many_replays_as_there_are_sets() -> None:
    rng = random.Random(9)
    for copies in (1, 2, 3, 5):
        made, held = Generations(copies), []
        assert made.last == 0
        for number in range(1, 60):
            following = made.next_copy
            generation, copy = made.begin()
            assert (generation, copy, made.last) == (number, following, number)
            held.append((generation, copy))
            generation, copy = rng.choice(held)
            if number - generation < copies:
                made.check("output 'scores'", generation, copy)
                assert made.current(copy) == generation
            else:
                with pytest.raises(specrs.StaleOutputError, match="output 'scores' is stale") as e:
                    made.check("output 'scores'", generation, copy)
                last = number - (number - generation) % copies
                assert (e.value.held, e.value.current, e.value.kind) == (generation, last, "StaleOutput")
                assert f"replay {generation} of" in str(e.value) and f"replay {last} has" in str(e.value)


ALL = [
    (torch.float32, "float32"), (torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.int32, "int32"),
    (torch.int64, "int64"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "name"), ALL)
@pytest.mark.parametrize("seat_shape", [(), (3,), (2, 5)])
def test_a_seat_that_nobody_wrote_is_named(dtype: torch.dtype, name: str, seat_shape: tuple[int, ...]) -> None:
    region = Region("r", name, seat_shape, role="output")
    for seat in range(4):
        memory = torch.empty(region.shape(4), dtype=dtype)
        poison.poison(memory)
        if memory.is_floating_point():
            assert memory.isnan().all()
        written = torch.randn(memory.shape).mul(100).to(dtype)
        rows = [i for i in range(memory.shape[0]) if i // region.rows_per_seat != seat]
        memory[rows] = written[rows]
        with pytest.raises(SeatError, match="nobody wrote it") as e:
            poison.check_output(memory, region, 4, 2)
        assert (e.value.region, e.value.seat, e.value.bucket, e.value.batch) == ("r", seat, 4, 2)
        assert ("live seat" if seat < 2 else "dead seat") in str(e.value)
        poison.check_output(written, region, 4, 2)
    if memory.is_floating_point():  # NaN of arithmetic is not poison
        poison.check_output(torch.full_like(memory, float("nan")), region, 4, 2)


def test_bytes_are_poison_in_rows() -> None:
    region = Region("r", "uint8", (2, 8), role="output")
    memory = torch.zeros(8, 8, dtype=torch.uint8)
    memory[3, :7] = 0xD5
    poison.check_output(memory, region, 4, 4)
    memory[3] = 0xD5
    with pytest.raises(SeatError) as e:
        poison.check_output(memory, region, 4, 4)
    assert e.value.seat == 1


def test_dead_seats_hold_their_value_and_seats_outside_stay_poisoned() -> None:
    region = Region("r", "int32", (2,), dead=-1)
    memory = torch.tensor([5, 6, 7, 8, -1, -1, -1, -1], dtype=torch.int32)
    poison.check_dead(memory, region, 4, 2, "the body left")
    memory[7] = 3
    with pytest.raises(SeatError, match=r"seat 3 .*the body left \[3\], its dead value is -1"):
        poison.check_dead(memory, region, 4, 2, "the body left")
    poison.check_dead(memory, region, 4, 4, "nobody asks for live seats")
    nan = Region("n", "float32", dead=float("nan"))
    poison.check_dead(torch.tensor([1.0, float("nan")]), nan, 2, 1, "the body left")
    whole = torch.empty(10, dtype=torch.int32)
    poison.poison(whole)
    whole[:4] = 1
    poison.check_outside(whole, region, 2, 1)
    with pytest.raises(SeatError, match=r"seat 1 .*has no such seat"):
        poison.check_outside(whole, region, 1, 1)
    whole[9] = 1
    with pytest.raises(SeatError) as e:
        poison.check_outside(whole, region, 2, 1)
    assert e.value.seat == 4


def test_without_a_gpu_the_runtime_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(specrs.CudaError):
        specrs.GraphRuntime(lambda at: None, [1], [TOKENS])
    with pytest.raises(specrs.CudaError):
        specrs.graph.capture(lambda: None)
