"""A wrong length, a stale plan and a second use of moves are errors, and leave committed KV as it is."""

from collections.abc import Callable

import numpy as np
import pytest

import specrs
from specrs import Geometry, Planner, Pool, TreeShape
from specrs._specrs import Accepts, KvCache, Lease, Moves, Plan, TreeBatch, kv_move, kv_write


def _i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Round:
    """One sequence of pages of 16 with a round within its first page, of which 7 tokens are committed; its lease lives
    on where ``ended`` is false."""

    def __init__(self, ended: bool = True) -> None:
        self.geometry = Geometry(2, 64, 16, TreeShape(2, 2, 4))
        self.pool = Pool(64, 16, 4, self.geometry.row_pages)
        self.planner = Planner(self.geometry, self.pool)
        self.kv = np.zeros((1, 2, 64 * 16, 1, 1), np.float32)
        self.cache, self.seq = KvCache(self.kv, 16), self.pool.create()
        with self.pool.reserve([(self.seq, 4)]) as lease:
            self.prefill = self.planner.extend([self.seq], [0], [4])
            self.write(self.prefill, 1, 2, 3, 4)
            lease.commit([4])
        lease = self.reserve(4)
        self.tree = TreeBatch.from_parents([[-1, 0, 0, 2]], [[5, 6, 7, 8]])
        self.verify = self.planner.verify([self.seq], [4], self.tree)
        self.write(self.verify, 5, 6, 7, 8)
        self.moves = self.path(lease, 4)
        kv_move(self.cache, self.moves)
        if ended:
            lease.commit([7])
        else:
            lease.advance([7])
            self.lease = lease

    def reserve(self, length: int) -> Lease:
        return self.pool.reserve([(self.seq, self.geometry.alloc_target(length, 16))])

    def write(self, plan: Plan, *values: float) -> None:
        a = np.array(values, np.float32).reshape(-1, 1, 1)
        kv_write(self.cache, 0, plan, a, a)

    def path(self, lease: Lease, length: int) -> Moves:
        accepts = Accepts.from_arrays(_i32(0, 3), _i32(0, 2, 3), _i32(7, 8, 9))
        return self.planner.commit(lease, [self.seq], [length], accepts)

    def row(self, n: int) -> list[float]:
        pages = self.pool.pages(self.seq)
        return [float(self.kv[0, 0, pages[p // 16] * 16 + p % 16, 0, 0]) for p in range(n)]

    def refuses(self, error: type[specrs.SpecrsError], words: str, call: Callable[[], object]) -> None:
        before = self.kv.copy()
        with pytest.raises(error, match=words):
            call()
        assert (self.kv == before).all()


def test_a_round_keeps_the_accepted_path() -> None:
    r = Round()
    assert (r.pool.committed(r.seq), r.row(7)) == (7, [1, 2, 3, 4, 5, 7, 8])
    assert (r.prefill.committed.tolist(), r.verify.committed.tolist()) == ([0], [4])


@pytest.mark.parametrize("ended", [True, False])
def test_what_was_planned_for_the_round_is_refused_after_it(ended: bool) -> None:
    r = Round(ended)
    r.refuses(specrs.StaleHandleError, "plan verify of row 0", lambda: r.write(r.verify, -1, -2, -3, -4))
    r.refuses(specrs.StaleHandleError, "plan extend of row 0", lambda: r.write(r.prefill, -1, -2, -3, -4))
    r.refuses(specrs.StaleHandleError, "moves", lambda: kv_move(r.cache, r.moves))


def test_steps_without_a_lease_are_refused() -> None:
    r = Round()
    for length in (7, 2, 9):
        words = {7: "allocated positions", 2: "7 tokens are committed", 9: "nobody wrote"}[length]
        error = specrs.OutOfBoundsError if length == 7 else specrs.ConfigError
        r.refuses(error, words, lambda n=length: r.planner.decode([r.seq], [n]))
        r.refuses(error, words, lambda n=length: r.planner.verify([r.seq], [n], r.tree))
        r.refuses(error, words, lambda n=length: r.planner.draft([r.seq], [n], 0, None, "lane"))
    # The draft model catches up: positions that are committed, in a cache of its own.
    assert r.planner.extend([r.seq], [2], [5]).committed.tolist() == [7]
    r.refuses(specrs.OutOfBoundsError, "allocated positions", lambda: r.planner.extend([r.seq], [2], [6]))
    r.refuses(specrs.ConfigError, "nobody wrote", lambda: r.planner.extend([r.seq], [8], [1]))


def test_steps_behind_wrong_lengths_are_refused_under_a_lease_too() -> None:
    r = Round()
    with r.reserve(7) as lease:
        for length, words in ((2, "7 tokens are committed"), (9, "nobody wrote")):
            r.refuses(specrs.ConfigError, words, lambda n=length: r.planner.decode([r.seq], [n]))
            r.refuses(specrs.ConfigError, words, lambda n=length: r.planner.verify([r.seq], [n], r.tree))
            r.refuses(specrs.ConfigError, words, lambda n=length: r.planner.draft([r.seq], [n], 0, None, "lane"))
            r.refuses(specrs.ConfigError, words, lambda n=length: r.path(lease, n))
        r.write(r.planner.decode([r.seq], [7]), 9)
        r.write(r.planner.decode([r.seq], [8]), 10)  # while the round before is in flight
        r.refuses(specrs.ConfigError, "nobody wrote", lambda: r.planner.decode([r.seq], [10]))
        lease.commit([9])
    assert r.row(9) == [1, 2, 3, 4, 5, 7, 8, 9, 10]


def test_a_commit_is_planned_once_and_its_moves_run_once_over_each_cache() -> None:
    r = Round()
    lease = r.reserve(7)
    plan = r.planner.verify([r.seq], [7], r.tree)
    r.write(plan, 15, 16, 17, 18)
    other = KvCache(r.kv.copy(), 16)
    moves = r.path(lease, 7)
    kv_move(r.cache, moves)
    kv_move(other, moves)  # the draft model's cache
    for again in (r.cache, other, KvCache(r.kv, 16)):
        r.refuses(specrs.StaleHandleError, "run over this cache", lambda c=again: kv_move(c, moves))
    r.refuses(specrs.ConfigError, "has been planned", lambda: r.path(lease, 7))
    r.refuses(specrs.StaleHandleError, "verify of row 0", lambda: r.write(plan, -1, -2, -3, -4))
    lease.commit([10])
    assert r.row(10)[7:] == [15, 17, 18]


def test_claimed_moves_are_not_run_again() -> None:
    r = Round()
    lease = r.reserve(7)
    r.write(r.planner.verify([r.seq], [7], r.tree), 15, 16, 17, 18)
    moves = r.path(lease, 7)
    moves.claim(r.kv.ctypes.data, r.kv.nbytes)  # a kernel of the caller's own runs them
    r.refuses(specrs.StaleHandleError, "run over this cache", lambda: kv_move(r.cache, moves))
    lease.rollback()
    r.refuses(specrs.StaleHandleError, "moves", lambda: moves.claim(8, 8))


def test_the_copies_of_a_lease_run_once() -> None:
    r = Round()
    fork = r.pool.fork(r.seq, 7)
    with r.pool.reserve([(fork, 16)]) as lease:
        kv_move(r.cache, lease.copies)
        r.write(r.planner.decode([fork], [7]), 9)
        r.refuses(specrs.StaleHandleError, "run over this cache", lambda: kv_move(r.cache, lease.copies))
        lease.commit([8])


@pytest.mark.parametrize("phase", ["extend", "decode", "draft", "verify"])
def test_an_audit_holds_positions_against_the_other_arrays(phase: str) -> None:
    g = Geometry(2, 64, 4, TreeShape(2, 2, 4))
    pool = Pool(64, 4, 4, g.row_pages)
    planner, seq = Planner(g, pool), pool.create()
    lease = pool.reserve([(seq, 40)])
    lease.advance([20])
    tree = TreeBatch.from_parents([[-1, 0, 1]], [[1, 2, 3]])
    step = 1 if phase == "draft" else None
    plan = {
        "extend": lambda: planner.extend([seq], [20], [3]),
        "decode": lambda: planner.decode([seq], [20]),
        "draft": lambda: planner.draft([seq], [20], 1, None, "lane"),
        "verify": lambda: planner.verify([seq], [20], tree),
    }[phase]()
    names = ("rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask")
    wide = ("versions", "mask")
    arrays = [
        np.array(getattr(plan, n).tolist(), np.int64 if n in wide else np.int32).reshape(getattr(plan, n).shape)
        for n in names
    ]
    assert planner.audit(phase, arrays, step).committed.tolist() == [20]
    for at in range(len(arrays[4])):
        for wrong in (0, 19, arrays[4][at] - 1, arrays[4][at] + 1, 63):
            bad = [a.copy() for a in arrays]
            bad[4][at] = wrong
            with pytest.raises(specrs.ConfigError, match=r"positions = .* RoPE position is"):
                planner.audit(phase, bad, step)
    # The lengths are the pool's: an audit is as strict as a planner.
    lease.advance([21])
    if phase != "extend":
        with pytest.raises(specrs.ConfigError, match="prefix length"):
            planner.audit(phase, arrays, step)
    lease.rollback()
    with pytest.raises(specrs.StaleHandleError):
        planner.audit(phase, arrays, step)
