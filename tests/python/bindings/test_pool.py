"""The pool through the bindings: leases as context managers, all-or-nothing calls, hostile values."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest

from specrs import _specrs as core


@pytest.fixture
def pool() -> core.Pool:
    return core.Pool(num_pages=9, page_size=4, max_seqs=3, row_pages=6)


def free(pool: core.Pool) -> int:
    pool.audit()
    return pool.stats()["free_pages"]


def test_sizes(pool: core.Pool) -> None:
    assert (pool.num_pages, pool.page_size, pool.max_seqs, pool.row_pages) == (9, 4, 3, 6)
    stats = pool.stats()
    assert (stats["total_pages"], stats["free_pages"], stats["live_sequences"]) == (8, 8, 0)
    assert pool.audit()["owned_pages"] == 0


def test_commit_keeps_and_frees_whole_pages(pool: core.Pool) -> None:
    seq = pool.create()
    with pool.reserve([(seq, 11)]) as lease:
        assert lease.live
        assert lease.sequences == [seq]
        assert len(lease.copies) == 0
        assert (pool.allocated(seq), pool.committed(seq)) == (12, 0)
        lease.commit([5])
        assert not lease.live
    assert (pool.allocated(seq), pool.committed(seq), len(pool.pages(seq))) == (8, 5, 2)
    assert free(pool) == 6
    pool.release([seq])
    assert free(pool) == 8


def test_leaving_without_commit_rolls_back(pool: core.Pool) -> None:
    seq = pool.create()
    with pool.reserve([(seq, 8)]) as lease:
        pass
    assert free(pool) == 8
    with pytest.raises(core.StaleHandleError, match="rolled back"):
        lease.commit([1])
    with pytest.raises(ZeroDivisionError), pool.reserve([(seq, 8)]):
        _ = 1 / 0
    assert (free(pool), pool.allocated(seq)) == (8, 0)


def test_a_dropped_lease_rolls_back(pool: core.Pool) -> None:
    seq = pool.create()
    lease = pool.reserve([(seq, 8)])
    assert free(pool) == 6
    del lease
    gc.collect()
    assert free(pool) == 8


def test_ended_leases_are_stale(pool: core.Pool) -> None:
    seq = pool.create()
    lease = pool.reserve([(seq, 4)])
    lease.commit([2])
    for use in [lease.rollback, lambda: lease.commit([2]), lambda: lease.copies, lease.__enter__]:
        with pytest.raises(core.StaleHandleError, match="it was committed") as e:
            use()
        assert e.value.kind == "Dead"
    lease = pool.reserve([(seq, 4)])
    lease.rollback()
    with pytest.raises(core.StaleHandleError):
        lease.rollback()


def test_a_lease_spans_rounds(pool: core.Pool) -> None:
    seqs = [pool.create(), pool.create()]
    with pool.reserve([(s, 8) for s in seqs]) as lease:
        lease.renew([16, 12])
        assert [pool.allocated(s) for s in seqs] == [16, 12]
        with pytest.raises(core.PoolExhaustedError) as e:
            lease.renew([20, 20])
        assert (e.value.need, e.value.free) == (3, 1)
        with pytest.raises(core.ConfigError):
            lease.renew([16])
        lease.advance([5, 3])
        for wrong in [[4, 3], [17, 3], [5]]:
            with pytest.raises(core.ConfigError):
                lease.advance(wrong)
        assert lease.live
        assert [pool.allocated(s) for s in seqs] == [16, 12]
        fork = pool.fork(seqs[0], 5)
        lease.renew([9, 3])
        assert len(lease.copies) == 4
        lease.advance([6, 3])
        assert len(lease.copies) == 0
    assert [(pool.committed(s), pool.allocated(s)) for s in seqs] == [(6, 8), (3, 4)]
    assert free(pool) == 8 - 3 - 1
    pool.release([*seqs, fork])
    assert free(pool) == 8
    for use in [lambda: lease.renew([1, 1]), lambda: lease.advance([6, 3])]:
        with pytest.raises(core.StaleHandleError, match="rolled back"):
            use()


def test_a_refused_commit_leaves_the_lease_live(pool: core.Pool) -> None:
    seqs = [pool.create(), pool.create()]
    with pool.reserve([(s, 6) for s in seqs]) as lease:
        for wrong in [[1], [1, 2, 3], [9, 1], [-1, 0], [2**40, 1]]:
            with pytest.raises(core.ConfigError):
                lease.commit(wrong)
            assert lease.live
        lease.commit([6, 3])
    assert [pool.committed(s) for s in seqs] == [6, 3]


def test_exhaustion_changes_nothing(pool: core.Pool) -> None:
    a, b = pool.create(), pool.create()
    with pytest.raises(core.PoolExhaustedError) as e:
        pool.reserve([(a, 24), (b, 24)])
    assert (e.value.need, e.value.free, e.value.total) == (12, 8, 8)
    assert free(pool) == 8
    pool.create()
    with pytest.raises(core.PoolExhaustedError) as e:
        pool.create()
    assert e.value.kind == "TooManySequences"
    assert e.value.limit == 3


def test_handles_do_not_outlive_their_sequence(pool: core.Pool) -> None:
    seq = pool.create()
    pool.release([seq])
    again = pool.create()
    assert (again.row, again.generation) == (seq.row, seq.generation + 1)
    assert again != seq
    calls: list[Any] = [
        lambda: pool.committed(seq),
        lambda: pool.allocated(seq),
        lambda: pool.pages(seq),
        lambda: pool.reserve([(seq, 1)]),
        lambda: pool.release([again, seq]),
        lambda: pool.fork(seq, 0),
        lambda: pool.cache_insert(seq, []),
    ]
    for call in calls:
        with pytest.raises(core.StaleHandleError):
            call()
    assert pool.committed(again) == 0
    other = core.Pool(9, 4, 3, 6)
    with pytest.raises(core.StaleHandleError):
        other.committed(again)


def test_fork_copies_a_shared_tail_before_writing(pool: core.Pool) -> None:
    a = pool.create()
    pool.reserve([(a, 6)]).commit([6])
    b = pool.fork(a, 6)
    assert pool.pages(b) == pool.pages(a)
    with pool.reserve([(b, 8)]) as lease:
        copies = lease.copies
        tail, fresh = pool.pages(a)[1], pool.pages(b)[1]
        assert tail != fresh
        assert copies.src.tolist() == [4 * tail, 4 * tail + 1]
        assert copies.dst.tolist() == [4 * fresh, 4 * fresh + 1]
        assert len(copies) == 2
    assert pool.pages(b) == pool.pages(a)


def test_prefix_cache(pool: core.Pool) -> None:
    a = pool.create()
    pool.reserve([(a, 10)]).commit([10])
    assert pool.cache_insert(a, list(range(10))) == 2
    b, shared, drafted = pool.cache_lookup(list(range(9)))
    assert (shared, drafted) == (8, 0)
    assert pool.pages(b) == pool.pages(a)[:2]
    pool.release([b])
    assert pool.cache_insert(a, list(range(10)), 4) == 0  # draft KV of the first page
    c, shared, drafted = pool.cache_lookup(list(range(9)), max=8)
    assert (shared, drafted) == (8, 4)
    pool.release([c])
    c, shared, _ = pool.cache_lookup(list(range(9)), max=7)
    assert shared == 4
    assert pool.committed(c) == 4
    d, shared, _ = pool.cache_lookup(list(range(9)), salt=2**64 - 1)
    assert shared == 0
    with pytest.raises(core.ConfigError, match="under other tokens, or another salt"):
        pool.cache_insert(a, list(range(10)), salt=1)
    pool.release([a, c, d])
    assert pool.stats()["cached_pages"] == 2
    assert pool.cache_clear() == 2
    assert free(pool) == 8


def test_raw_pages(pool: core.Pool) -> None:
    pages = pool.alloc_pages(3)
    assert len(set(pages)) == 3
    assert 0 not in pages
    for wrong in [[pages[0], pages[0]], [*pages, pages[2]]]:
        with pytest.raises(core.LedgerError) as e:
            pool.free_pages(wrong)
        assert e.value.kind == "DoubleFree"
        assert (e.value.owners, e.value.frees) == (1, 2)
    assert free(pool) == 5
    pool.free_pages(pages)
    with pytest.raises(core.LedgerError):
        pool.free_pages(pages[:1])
    for page in [0, 9, -1, 2**31, 2**70]:
        with pytest.raises(core.SpecrsError):
            pool.free_pages([page])
    with pytest.raises(core.PoolExhaustedError):
        pool.alloc_pages(9)
    assert free(pool) == 8


def test_remap_needs_pages_of_one_token(pool: core.Pool) -> None:
    seq = pool.create()
    with pool.reserve([(seq, 4)]) as lease, pytest.raises(core.ConfigError):
        lease.remap(seq, 0, [1, 0])
    pool = core.Pool(9, 1, 1, 8)
    seq = pool.create()
    with pool.reserve([(seq, 5)]) as lease:
        before = pool.pages(seq)
        lease.remap(seq, 1, [0, 2])
        after = pool.pages(seq)
        assert after == [before[0], before[1], before[3], before[2], before[4]]
        for order in [[0, 0], [9], [-1], [2**64]]:
            with pytest.raises(core.SpecrsError):
                lease.remap(seq, 1, order)
        assert pool.pages(seq) == after


@pytest.mark.parametrize("value", [-1, 0, 2**31, 2**32, 2**63, 2**100, -(2**100)])
def test_hostile_sizes(value: int) -> None:
    good = {"num_pages": 9, "page_size": 4, "max_seqs": 3, "row_pages": 6}
    for name in good:
        with pytest.raises(core.ConfigError) as e:
            core.Pool(**{**good, name: value})
        assert name in str(e.value)
    pool = core.Pool(**good)
    seq = pool.create()
    calls: list[Any] = [
        lambda: pool.fork(seq, value or 1),
        lambda: pool.reserve([(seq, value or 25)]),
        lambda: pool.alloc_pages(value or 9),
        lambda: pool.cache_lookup([value or -1], max=-1),
        lambda: pool.cache_insert(seq, [value]),
        lambda: pool.cache_insert(seq, [], value or 1),
    ]
    for call in calls:
        with pytest.raises(core.SpecrsError):
            call()
    assert free(pool) == 8


def test_products_that_leave_int32() -> None:
    for sizes in [(2**31 - 1, 1024, 1, 1), (2, 1, 2**20, 2**31 - 1), (2, 1024, 1, 2**31 - 1)]:
        with pytest.raises(core.ConfigError) as e:
            core.Pool(*sizes)
        assert e.value.kind == "Overflow"


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_sizes_without_memory_are_an_error() -> None:
    script = """
import resource
from specrs import _specrs as core
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for sizes in [(2**31 - 1, 1, 1, 1), (2, 1, 2**20, 2047)]:
    try:
        core.Pool(*sizes)
    except core.ConfigError as e:
        print(e)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert "num_pages 2147483647" in lines[0]
    assert "max_seqs 1048576 * row_pages 2047" in lines[1]
    assert all("bytes" in line for line in lines)


def test_owners_and_the_order_of_free_pages(pool: core.Pool) -> None:
    pool.take_next([7, 3])
    a = pool.create()
    with pool.reserve([(a, 9)]) as lease:
        lease.commit([9])
    assert pool.pages(a) == [7, 3, 1]
    pool.cache_insert(a, [1, 2, 3, 4])
    b = pool.fork(a, 5)
    assert pool.alloc_pages(1) == [2]
    first, second = f"sequence {a.row}.{a.generation}", f"sequence {b.row}.{b.generation}"
    assert pool.owners() == [(1, first), (2, "raw pages"), (3, first), (3, second), (7, first), (7, second),
                             (7, "prefix cache")]  # fmt: skip
    for pages, message in [([4, 7], "page to take next = 7: it has 3 owner"), ([4, 4], "given twice"),
                           ([9], "outside 1..=8"), ([0], "outside 1..=8"), ([-1], "page id")]:  # fmt: skip
        with pytest.raises(core.ConfigError, match=message):
            pool.take_next(pages)
    assert pool.alloc_pages(2) == [4, 5]
    pool.audit()
