"""The pool of a capsule made again: the same page tables, the same sharing, under the same lease."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from specrs._specrs import Geometry, Lease, Pool
from specrs._specrs import Sequence as PoolSequence
from specrs.capsule.errors import CapsuleError
from specrs.capsule.schema import Capsule


@dataclass(frozen=True)
class World:
    """A pool whose batch is under a lease.

    Attributes:
        pool: a pool of the capsule's sizes (the row of a geometry with other reserves is longer or shorter).
        seqs: sequences of the batch, in rows of the table as recorded.
        lease: lease of the batch.
        pages: pages that each request has under the lease.
        recorded: columns of these that are as recorded.
        columns: columns in all.
    """

    pool: Pool
    seqs: list[PoolSequence]
    lease: Lease
    pages: list[list[int]]
    recorded: int
    columns: int


def rebuild(c: Capsule, geometry: Geometry) -> World:
    """Make the pool again and reserve the round in it.

    Each request asks for what it asked for when it was recorded, more or less by what `geometry` reserves more or less
    for a round than the recorded one does (another draft layout, a reverted fault).

    Raises:
        CapsuleError: page tables that come out otherwise than recorded.
        SpecrsError: the pool refuses something, as it would have refused it in the engine.
    """
    recorded = c.shape.geometry()
    row_pages = max(c.pool.row_pages + geometry.row_pages - recorded.row_pages, geometry.row_pages)
    shared = _shared_columns(c)
    pool = Pool(c.pool.num_pages, c.shape.page_size, c.pool.max_seqs + sum(n > 0 for n in shared), row_pages)
    seqs = _commit(c, pool)
    for seq, n in zip(seqs, shared, strict=True):
        if n:
            pool.fork(seq, n * c.shape.page_size)  # stands for whoever else owns these pages
    held = {page for r in c.rows for page in r.pages}
    foreign = sorted({page for page, _ in c.others} - held)
    pool.take_next(foreign)
    pool.alloc_pages(len(foreign))
    wants = _wants(c, geometry)
    pool.take_next(_speculative(c, pool, wants, held.union(foreign)))
    lease = pool.reserve(list(zip(seqs, wants, strict=True)))
    pages = [pool.pages(seq) for seq in seqs]
    same = 0
    for i, (r, got, want) in enumerate(zip(c.rows, pages, wants, strict=True)):
        n = min(len(r.pages), -(-want // c.shape.page_size))
        if tuple(got[:n]) != r.pages[:n]:
            raise CapsuleError(f"rows[{i}].pages", f"{list(r.pages[:n])}: the pool made {got[:n]} of them")
        same += n
    pool.audit()
    return World(pool, seqs, lease, pages, same, sum(len(p) for p in pages))


def with_room(c: Capsule, geometry: Geometry) -> Capsule:
    """The capsule with the pages that `geometry` takes beyond the free ones of its pool: what another layout would do
    with the round is to be seen in a pool that was sized for the recorded one, too."""
    owned = {page for r in c.rows for page in r.pages} | {page for page, _ in c.others}
    pages = (-(-want // c.shape.page_size) for want in _wants(c, geometry))
    more = sum(max(n - len(r.pages), 0) for n, r in zip(pages, c.rows, strict=True))
    lacking = max(more - (c.pool.num_pages - 1 - len(owned)), 0)
    return replace(c, pool=replace(c.pool, num_pages=c.pool.num_pages + lacking))


def _wants(c: Capsule, geometry: Geometry) -> list[int]:
    """Positions that each request asks pages for under `geometry`."""
    recorded = c.shape.geometry().alloc_len_per_decode
    more = geometry.alloc_len_per_decode - recorded if c.kind == "speculative" else 0
    return [max(r.reserved + more, r.committed) for r in c.rows]


def _shared_columns(c: Capsule) -> list[int]:
    """Return the leading columns of each request up to the last page that has an owner outside of the batch too."""
    others = {page for page, _ in c.others}
    return [max((col + 1 for col, page in enumerate(r.pages) if page in others), default=0) for r in c.rows]


def _commit(c: Capsule, pool: Pool) -> list[PoolSequence]:
    """Sequences in their rows with their committed pages, shared where they were."""
    p = c.shape.page_size
    made: dict[int, PoolSequence] = {}
    for row in range(max(r.row for r in c.rows) + 1):
        found = [i for i, r in enumerate(c.rows) if r.row == row]
        if not found:
            pool.create()  # a row of somebody else, without pages
            continue
        [i] = found
        r = c.rows[i]
        common, source = max(((_common(c, i, j), j) for j in made), default=(0, 0))
        made[i] = pool.fork(made[source], common * p) if common else pool.create()
        own = r.pages[common : -(-r.committed // p)]
        pool.take_next(own)
        with pool.reserve([(made[i], r.committed)]) as lease:
            lease.commit([r.committed])
        if made[i].row != row:
            raise CapsuleError(f"rows[{i}].row", f"{row}: the pool gave row {made[i].row}")
    return [made[i] for i in range(len(c.rows))]


def _common(c: Capsule, i: int, j: int) -> int:
    """Leading full pages that two requests share."""
    a, b = c.rows[i], c.rows[j]
    full = min(a.committed, b.committed) // c.shape.page_size
    for n, (x, y) in enumerate(zip(a.pages[:full], b.pages[:full], strict=True)):
        if x != y:
            return n
    return full


def _speculative(c: Capsule, pool: Pool, wants: Sequence[int], taken: set[int]) -> list[int]:
    """The pages that the reservation shall take: the recorded ones, and free ones behind where it wants more."""
    p = c.shape.page_size
    spare = (page for page in range(1, pool.num_pages) if page not in taken)
    order: list[int] = []
    for r, want in zip(c.rows, wants, strict=True):
        base = -(-r.committed // p)
        n = -(-want // p) - base
        known = list(r.pages[base : base + n])
        order += known
        order += islice(spare, n - len(known))
    return order
