"""Plans through the bindings: worked arrays, staleness, commits with and without moves."""

from __future__ import annotations

import resource

import pytest
import torch

from specrs import _specrs as core

SHAPE = core.TreeShape(2, 2, 4)


def world(page_size: int) -> tuple[core.Pool, core.Planner, core.Sequence]:
    """A pool with one sequence of 3 committed tokens, and a planner over it."""
    g = core.Geometry(4, 64, page_size, SHAPE)
    pool = core.Pool(64, page_size, 4, g.row_pages)
    seq = pool.create()
    pool.reserve([(seq, 3)]).commit([3])
    return pool, core.Planner(g, pool), seq


def slots(pool: core.Pool, seq: core.Sequence, positions: list[int]) -> list[int]:
    pages, p = pool.pages(seq), pool.page_size
    return [pages[i // p] * p + i % p for i in positions]


@pytest.mark.parametrize("page_size", [1, 4])
def test_extend(page_size: int) -> None:
    pool, planner, a = world(page_size)
    b = pool.create()
    with pool.reserve([(a, 5), (b, 1)]):
        plan = planner.extend([a, b], [3, 0], [2, 1])
        assert (plan.phase, plan.step, plan.batch, plan.queries) == ("extend", None, 2, 3)
        assert plan.rows.tolist() == [a.row, b.row]
        assert plan.qo_indptr.tolist() == [0, 2, 3]
        assert plan.prefix_lens.tolist() == [3, 0]
        assert plan.positions.tolist() == [3, 4, 0]
        assert plan.out_slots.tolist() == slots(pool, a, [3, 4]) + slots(pool, b, [0])
        assert plan.mask.shape == (3, 0)
        table = plan.page_table().tolist()
        assert [[p for p in row if p] for row in table] == [pool.pages(a), pool.pages(b)]
        assert {x.dtype for x in (plan.rows, plan.positions, plan.page_table())} == {"int32"}
        assert plan.mask.dtype == "int64"


def test_verify() -> None:
    pool, planner, seq = world(4)
    trees = core.TreeBatch.from_parents([[-1, 0, 0, 1]], [[5, 6, 7, 8]])
    with pool.reserve([(seq, 7)]):
        plan = planner.verify([seq], [3], trees)
        assert plan.phase == "verify"
        assert plan.positions.tolist() == [3, 4, 4, 5]
        assert plan.mask.tolist() == [[0b0001], [0b0011], [0b0101], [0b1011]]
        assert plan.out_slots.tolist() == slots(pool, seq, [3, 4, 5, 6])


@pytest.mark.parametrize("mode", ["ancestors", "lane"])
def test_draft(mode: str) -> None:
    pool, planner, seq = world(4)
    beams = core.DraftBeams(1, SHAPE, None, 8)
    beams.start(torch.tensor([[0.0, 5.0, 0.0, 4.0, 0, 0, 0, 0]]))
    with pool.reserve([(seq, 3 + planner.geometry.alloc_len_per_decode)]):
        plan = planner.draft([seq], [3], 0, beams, mode)
        assert (plan.phase, plan.step, plan.queries) == ("draft", 0, 2)
        assert plan.positions.tolist() == [3, 3]
        assert plan.out_slots.tolist() == slots(pool, seq, [3, 5])  # branch b at L + b * S
        assert plan.mask.tolist() == beams.ancestors.tolist() == [[0b0001], [0b0100]]
        # Both beams of step 1 descend from beam 1 of step 0: their lanes differ from their ancestors.
        beams.advance(torch.tensor([[0.0] * 8, [50.0, 49.5, 0, 0, 0, 0, 0, 0]]))
        assert beams.parents.tolist() == [1, 1]
        plan = planner.draft([seq], [3], 1, beams, mode)
        assert plan.positions.tolist() == [4, 4]
        ancestors = {"ancestors": [[0b0110], [0b1100]], "lane": [[0b0011], [0b1100]]}
        assert plan.mask.tolist() == ancestors[mode]
        assert beams.ancestors.tolist() == ancestors["ancestors"]
        for step in [2, -1, 2**40]:
            with pytest.raises(core.ConfigError, match="step"):
                planner.draft([seq], [3], step, beams, mode)
        with pytest.raises(core.ConfigError, match="mode"):
            planner.draft([seq], [3], 1, beams, "both")
        with pytest.raises(core.ConfigError, match="beams' batch"):
            planner.draft([], [], 1, beams, mode)


def accepts_of(parents: list[int], tokens: list[int], follow: list[int], vocab: int = 16) -> core.Accepts:
    """Accepts of one tree whose logits prefer, at node i, the token follow[i]."""
    logits = torch.zeros(len(parents), vocab)
    for i, token in enumerate(follow):
        logits[i, token] = 1.0
    trees = core.TreeBatch.from_parents([parents], [tokens])
    return core.verify(trees, logits, [core.Sampler(vocab, [])], [3])


def test_commit_moves_or_remaps() -> None:
    accepts = accepts_of([-1, 0, 0, 2], [9, 1, 2, 3], [2, 0, 3, 7])
    assert accepts.paths == [[0, 2, 3]]
    assert accepts.tokens == [[2, 3, 7]]
    pool, planner, seq = world(4)
    with pool.reserve([(seq, 7)]) as lease:
        moves = planner.commit(lease, [seq], [3], accepts)
        assert moves.src.tolist() == slots(pool, seq, [5, 6])
        assert moves.dst.tolist() == slots(pool, seq, [4, 5])
        lease.commit([6])
    pool, planner, seq = world(1)
    with pool.reserve([(seq, 7)]) as lease:
        before = slots(pool, seq, [3, 4, 5, 6])
        assert len(planner.commit(lease, [seq], [3], accepts)) == 0
        assert slots(pool, seq, [3, 4, 5, 6]) == [before[i] for i in [0, 2, 3, 1]]
        lease.commit([6])
    assert pool.committed(seq) == 6
    pool.audit()


@pytest.mark.parametrize("page_size", [1, 4])
def test_commit_takes_the_lease_of_its_sequences(page_size: int) -> None:
    accepts = accepts_of([-1, 0, 0, 2], [9, 1, 2, 3], [2, 0, 3, 7])
    pool, planner, seq = world(page_size)
    other_pool, _, theirs = world(page_size)
    other = pool.create()
    pool.reserve([(other, 3)]).commit([3])
    with (
        pool.reserve([(seq, 7)]) as lease,
        pool.reserve([(other, 7)]) as of_another,
        other_pool.reserve([(theirs, 7)]) as of_another_pool,
        pool.reserve([]) as of_none,
    ):
        before = pool.pages(seq)
        for wrong, got in [
            (of_another, f"one without sequence {seq.row}.1"),
            (of_none, f"one without sequence {seq.row}.1"),
            (of_another_pool, "a lease of another pool"),
        ]:
            with pytest.raises(core.ConfigError, match=f"lease: got {got}") as e:
                planner.commit(wrong, [seq], [3], accepts)
            assert (e.value.kind, e.value.operand) == ("Mismatch", "lease")
        nothing = core.verify(core.TreeBatch.from_parents([], []), torch.zeros(0, 8), [], [])
        with pytest.raises(core.ConfigError, match="a lease of another pool"):
            planner.commit(of_another_pool, [], [], nothing)
        assert pool.pages(seq) == before
        assert lease.live and of_another.live and of_another_pool.live
        planner.commit(lease, [seq], [3], accepts)
        lease.commit([6])
    with pytest.raises(core.StaleHandleError, match="lease"):
        planner.commit(lease, [seq], [3], accepts)
    pool.audit()


def test_a_planner_refuses_a_pool_that_it_cannot_use() -> None:
    g = core.Geometry(4, 64, 4, SHAPE)
    core.Planner(g, core.Pool(64, 4, 4, g.row_pages + 1))
    with pytest.raises(core.ConfigError, match="page size: got a pool with pages of 8, want 4"):
        core.Planner(g, core.Pool(64, 8, 4, g.row_pages))
    with pytest.raises(core.ConfigError, match=f"make the pool with row_pages = {g.row_pages}") as e:
        core.Planner(g, core.Pool(64, 4, 4, g.row_pages - 1))
    assert (e.value.kind, e.value.what) == ("Capacity", "row_pages")
    assert (e.value.need, e.value.have) == (g.row_pages, g.row_pages - 1)


def test_a_bucket_is_inside_the_limits() -> None:
    pool, planner, seq = world(4)
    with pool.reserve([(seq, 7)]):
        for pad, what in [((1, 2**31 - 1), "queries"), ((2**31 - 1, 1), "requests"), ((1, 5), "queries")]:
            with pytest.raises(core.ConfigError, match=f"bucket {what}") as e:
                planner.decode([seq], [3], pad=pad)
            assert (e.value.kind, e.value.max) == ("OutOfRange", 4)
        assert planner.decode([seq], [3], pad=(4, 4)).queries == 4


def test_a_plan_may_attend_from_a_later_page() -> None:
    """What such a plan reads, attention's own tests say; here, that nothing else is taken for a start."""
    pool, planner, seq = world(4)
    pool.reserve([(seq, 9)]).commit([9])
    with pool.reserve([(seq, 11)]):
        plan = planner.extend([seq], [9], [2], pad=(2, 4))
        late = plan.attending_from([8])
        assert plan.whole and not late.whole
        assert plan.first_pages == [] and late.first_pages == [2, 0]
        assert late.positions.tolist() == plan.positions.tolist() and late.prefix_lens.tolist() == [9, 0]
        assert not plan.attending_from([0]).whole
        for starts, why in (([2], "multiple of the page size 4"), ([12], "at most the prefix 9"), ([-4], "starts")):
            with pytest.raises(core.ConfigError, match=why):
                plan.attending_from(starts)
        for starts in ([], [0, 0]):
            with pytest.raises(core.ConfigError, match="1, one a live request"):
                plan.attending_from(starts)
        assert planner.extend([seq], [0], [2]).attending_from([12]).first_pages == [0]  # as behind the context wall
        other = core.Planner(planner.geometry, pool, format="flashinfer").extend([seq], [9], [2])
        with pytest.raises(core.ConfigError, match="format"):
            other.attending_from([8])


def test_the_queries_of_a_block_may_attend_to_all_of_it() -> None:
    pool, planner, seq = world(4)
    pool.reserve([(seq, 9)]).commit([9])
    with pool.reserve([(seq, 30)]):
        plan = planner.extend([seq], [9], [3], pad=(2, 5))
        block = plan.attending_block()
        assert plan.mask.tolist() == [[]] * 5 and block.mask.tolist() == [[7]] * 3 + [[0]] * 2
        assert block.positions.tolist() == plan.positions.tolist() == [9, 10, 11, 0, 0]
        later = plan.attending_from([8]).attending_block()
        assert later.first_pages == [2, 0] and later.mask.tolist() == block.mask.tolist()
        assert block.attending_from([8]).mask.tolist() == block.mask.tolist()
        with pytest.raises(core.ConfigError, match="plan of a block = decode: blocks are planned as an extend"):
            planner.decode([seq], [9]).attending_block()
        other = core.Planner(planner.geometry, pool, format="flashinfer").extend([seq], [9], [2])
        with pytest.raises(core.ConfigError, match="format"):
            other.attending_block()
    pool.release([seq])
    with pytest.raises(core.StaleHandleError):
        block.page_table()


def test_a_block_has_at_most_a_word_of_queries() -> None:
    geometry = core.Geometry(1, 200, 4, core.TreeShape(1, 1, 2))
    pool = core.Pool(60, 4, 1, geometry.row_pages)
    planner, seq = core.Planner(geometry, pool), pool.create()
    with pool.reserve([(seq, 65)]):
        assert planner.extend([seq], [0], [64]).attending_block().mask.tolist() == [[-1]] * 64
        with pytest.raises(core.ConfigError, match="queries of a block"):
            planner.extend([seq], [0], [65]).attending_block()


def test_plans_go_stale_with_their_rows() -> None:
    pool, planner, seq = world(4)
    with pool.reserve([(seq, 5)]):
        plan = planner.extend([seq], [3], [2])
        plan.page_table()
    pool.release([seq])
    with pytest.raises(core.StaleHandleError, match="version"):
        plan.page_table()
    assert plan.positions.tolist() == [3, 4]  # its own arrays stay readable


ARRAYS = ["rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask"]


@pytest.mark.parametrize("format", ["native", "flashinfer", "flash_attention", "triton"])
@pytest.mark.parametrize("phase", ["extend", "draft", "verify"])
def test_a_plan_made_elsewhere_is_audited(format: str, phase: str) -> None:
    pool, native, a = world(4)
    planner = core.Planner(native.geometry, pool, format)
    trees = core.TreeBatch.from_parents([[-1, 0, 0]], [[1, 2, 3]])
    with pool.reserve([(a, 24)]):
        plan = {
            "extend": lambda: planner.extend([a], [3], [2], pad=(2, 3)),
            "draft": lambda: planner.draft([a], [3], 1, None, "lane", pad=(2, 4)),
            "verify": lambda: planner.verify([a], [3], trees, pad=(2, 4)),
        }[phase]()
        arrays = [torch.from_dlpack(getattr(plan, name)).clone() for name in ARRAYS]
        audited = planner.audit(phase, tuple(arrays), plan.step)
        for name in ARRAYS:
            assert getattr(audited, name).tolist() == getattr(plan, name).tolist()
        assert {n: x.tolist() for n, x in audited.arrays().items()} == {n: x.tolist() for n, x in plan.arrays().items()}
        for name, at, error in [
            ("rows", 0, core.StaleHandleError),
            ("versions", 0, core.StaleHandleError),
            ("qo_indptr", 1, core.ConfigError),
            ("prefix_lens", 0, core.SpecrsError),
            ("positions", -1, core.ConfigError),
            ("out_slots", 0, core.ConfigError),
        ]:
            bad = [x.clone() for x in arrays]
            bad[ARRAYS.index(name)][at] += 1
            with pytest.raises(error):
                planner.audit(phase, tuple(bad), plan.step)


def test_empty_batch() -> None:
    pool, planner, _ = world(4)
    plan = planner.extend([], [], [])
    assert (plan.batch, plan.queries, plan.qo_indptr.tolist()) == (0, 0, [0])
    assert plan.page_table().shape == (0, 0)
    plan = planner.verify([], [], core.TreeBatch.from_parents([], []))
    assert (plan.batch, plan.queries) == (0, 0)
    beams = core.DraftBeams(0, SHAPE, None, 8)
    beams.start(torch.zeros(0, 8))
    assert planner.draft([], [], 0, beams).queries == 0
    accepts = core.verify(core.TreeBatch.from_parents([], []), torch.zeros(0, 8), [], [])
    assert (len(accepts), accepts.paths, accepts.tokens) == (0, [], [])
    with pool.reserve([]) as lease:
        assert len(planner.commit(lease, [], [], accepts)) == 0
        lease.commit([])


def test_a_hostile_count_allocates_nothing() -> None:
    _, planner, seq = world(4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(core.OutOfBoundsError, match="2147483649"):
        planner.extend([seq], [3], [2**31 - 1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "kB"


@pytest.mark.parametrize("value", [-1, 4, 61, 2**31 - 1, 2**31, 2**63, -(2**100)])
def test_hostile_lengths(value: int) -> None:
    _, planner, seq = world(4)
    beams = core.DraftBeams(1, SHAPE, None, 8)
    beams.start(torch.zeros(1, 8))
    trees = core.TreeBatch.from_parents([[-1, 0]], [[1, 2]])
    for call in [
        lambda: planner.extend([seq], [value], [1]),
        lambda: planner.extend([seq], [3], [value]),
        lambda: planner.verify([seq], [value], trees),
        lambda: planner.draft([seq], [value], 0, beams),
    ]:
        with pytest.raises(core.SpecrsError):
            call()
    with pytest.raises(core.ConfigError):
        planner.extend([seq, seq], [3, 3], [1, 1])
    with pytest.raises(core.ConfigError):
        planner.extend([seq], [3, 3], [1])


def test_raw_moves_are_ordered() -> None:
    moves = core.Moves([5, 6, 7], [6, 7, 8], num_slots=16)
    assert moves.src.tolist() == [7, 6, 5]
    assert moves.dst.tolist() == [8, 7, 6]
    with pytest.raises(core.ConfigError):
        core.Moves([5, 6], [6, 5], 16)
    assert len(core.Moves([5, 6], [6, 5], 16, scratch=9)) == 3
    for src, dst in [([16], [1]), ([1], [16]), ([-1], [1]), ([1], [0])]:
        with pytest.raises(core.OutOfBoundsError):
            core.Moves(src, dst, 16)
    for src, dst, n in [([2**40], [1], 16), ([1, 2], [3, 3], 16), ([1], [2, 3], 16), ([1], [2], 2**40)]:
        with pytest.raises(core.ConfigError):
            core.Moves(src, dst, n)
