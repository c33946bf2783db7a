"""The damage of the historical faults, drawn from the core itself: the arrays of a small configuration that each one
needs, and the room that there is with the fault put back. ``docs/faults.md`` tells the stories; ``tests/faults``
searches for the smallest configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specrs._specrs import ConfigError, DeviceLens, Geometry, Lease, Planner, Pool, Sequence, TreeShape
from specrs.drawing.model import Cell, Kind, Strip, row_cells


@dataclass(frozen=True)
class Story:
    """A title, and what to look at in turn."""

    title: str
    strips: list[Strip]


def fault_story(fault: int) -> Story:
    """The drawing of one of the faults that `specrs.faults` lists.

    Raises:
        ConfigError: another number; the message has the known ones.
    """
    if fault not in _STORIES:
        raise ConfigError(f"fault = {fault}: there are {', '.join(map(str, _STORIES))}")
    return _STORIES[fault]()


def _world(geometry: Geometry, lens: list[int]) -> tuple[Pool, list[Sequence], Lease]:
    """A pool for ``geometry``, sequences of these lengths, and a round reserved for each as long as the lease lives."""
    pool = Pool(geometry.pages_for_full_load + 1, geometry.page_size, geometry.max_batch, geometry.row_pages)
    seqs = [pool.create() for _ in lens]
    pool.reserve(list(zip(seqs, lens, strict=True))).commit(lens)
    wants = [geometry.alloc_target(n, 0) for n in lens]
    return pool, seqs, pool.reserve(list(zip(seqs, wants, strict=True)))


def _over(cells: list[Cell], limit: int) -> list[Cell]:
    """Return the cells, with those beyond the limit marked wrong."""
    return [c if i < limit else Cell(Kind.WRONG, text=c.label or "x") for i, c in enumerate(cells)]


def _numbers(values: list[int]) -> list[Cell]:
    return [Cell(Kind.NUMBER, text=str(v)) for v in values]


def _branch_width() -> Story:
    """27338."""
    k, length = 2, 1
    shape = TreeShape(k, 1, 1)
    right, wrong = (Geometry(1, 2, 1, shape, reverts=r) for r in ([], [27338]))
    pool, seqs, _lease = _world(right, [length])
    need = _need(right, pool, seqs, [length])
    lists = [[Cell(Kind.PREFIX)] * length + [Cell(Kind.DRAFT, branch=b, step=0)] for b in range(k)]
    cells = [cell for one in lists for cell in one]
    assert len(cells) == need
    room = {g.reverts: _capacity(g, pool) for g in (right, wrong)}
    return Story(
        "27338: kv_indices of a draft step, one list a branch (K=2 S=1, context 2, L=1)",
        [
            Strip(f"room with topk: {room[()]} entries, {need} written", cells, length + 1, room[()]),
            Strip(f"room without topk: {room[(27338,)]} entries, {need} written",
                  _over(cells, room[(27338,)]), length + 1, room[(27338,)]),
        ],
    )  # fmt: skip


def _need(geometry: Geometry, pool: Pool, seqs: list[Sequence], lens: list[int]) -> int:
    """Entries of `kv_indices` that draft step 0 writes."""
    plan = Planner(geometry, pool, "flashinfer").draft(seqs, lens, 0, None, "lane")
    return int(plan.arrays()["kv_indices"].shape[0])


def _capacity(geometry: Geometry, pool: Pool) -> int:
    return int(Planner(geometry, pool, "flashinfer").capacities("draft", 0)["kv_indices"]["shape"][0])


def _expand_table() -> Story:
    """27360."""
    p, length, steps = 2, 1, 2
    geometry = Geometry(1, 4, p, TreeShape(2, steps, 1), "holey", [])
    region = geometry.draft_region(length)
    pool, seqs, _lease = _world(geometry, [length])
    planner = Planner(geometry, pool, "flash_attention")
    table = planner.draft(seqs, [length], 0, None, "lane").arrays()["expand_page_table"]
    width, row = table.shape[1], pool.pages(seqs[0])
    strips = [Strip(f"the request's row, {p} slots a page: branch.step", row_cells(geometry, length), p)]
    for b in range(2):
        live = [row.index(page) for page in table.tolist()[b]]
        strips.append(Strip(f"branch {b}, step 0, its live slot: page {', '.join(map(str, live))} of the row",
                            _pages(live), 1, width))  # fmt: skip
    for b in range(2):
        # The allocation arrives S slots wide: the hole and all steps, even those not yet written.
        base, first = region.base, region.pos(b, 0) - region.remainder
        every = sorted({(first if b else base) // p} | {region.pos(b, s) // p for s in range(steps)})
        strips.append(
            Strip(f"branch {b}, step 0, all {steps} slots of its allocation", _over(_pages(every), width), 1, width)
        )
    return Story(f"27360: expand page table of draft step 0, {width} column wide (K=2 S=2 P=2, L=1)", strips)


def _pages(columns: list[int]) -> list[Cell]:
    return [Cell(Kind.NUMBER, text=f"p{c}") for c in columns]


def _stale_padding() -> Story:
    """23037."""
    lens = [1, 1]
    geometry = Geometry(2, 4, 1, TreeShape(1, 1, 1), reverts=[])
    pool, seqs, _lease = _world(geometry, lens)
    planner = Planner(geometry, pool, "flashinfer")
    static = planner.buffers("draft", 0)
    first = planner.draft(seqs, lens, 0, None, "lane", out=static).arrays()
    starts, slots = first["kv_indptr"].tolist(), first["kv_indices"].tolist()
    second = planner.draft(seqs[:1], lens[:1], 0, None, "lane", out=static, pad=(2, 2)).arrays()
    padded, live = second["kv_indptr"].tolist(), len(second["kv_indices"].tolist())
    stale = padded[:2] + starts[2:]
    left = [Cell(Kind.NUMBER if s == p else Kind.WRONG, text=str(s)) for s, p in zip(stale, padded, strict=True)]
    kept = [Cell(Kind.NUMBER, text=str(s)) if i < live else Cell(Kind.WRONG, text=str(s)) for i, s in enumerate(slots)]
    return Story(
        "23037: a bucket of 2 requests, replayed with 2 live ones, then with 1 (K=1 S=1, L=1)",
        [
            Strip("replay 1, kv_indptr: lists 0..2 and 2..4", _numbers(starts)),
            Strip("replay 1, kv_indices: slots of both requests", _numbers(slots), 2),
            Strip("replay 2, kv_indptr, padding written: the dead list is empty", _numbers(padded)),
            Strip("replay 2, kv_indptr, padding left as it was: the dead list is 2..4", left),
            Strip("what the dead query then reads: slots that are the second request's no more", kept, 2),
        ],
    )  # fmt: skip


def _holey_reserve() -> Story:
    """26972."""
    strips = []
    for k, s, p, length in ((2, 1, 4, 0), (2, 2, 4, 3)):
        for reverts in ([], [26972]):
            geometry = Geometry(1, 8, p, TreeShape(k, s, 1), "holey", reverts)
            room = geometry.alloc_target(length, 0)
            how = "without the holey term" if reverts else "as it must be"
            strip = (
                f"L={length} K={k} S={s}: a reserve of {geometry.reserve_per_decode}, {how}; {room} positions allocated"
            )
            cells = row_cells(geometry, length)
            for i in range(room, len(cells)):
                if cells[i].kind is not Kind.FREE:
                    cells[i] = Cell(Kind.WRONG, text=cells[i].label)
            strips.append(Strip(strip, cells, p, room if room < len(cells) else None))
    return Story("26972: branches on pages of their own (P=4), and what is reserved for them", strips)


def _host_lengths() -> Story:
    """26738."""
    bound, lens = 4, [1, 3]
    geometry = Geometry(2, 8, 1, TreeShape(1, 1, 1), reverts=[])
    pool, seqs, _lease = _world(geometry, lens)
    planner = Planner(geometry, pool, "flashinfer")
    size = planner.sizes("decode", DeviceLens(2, bound))["kv_indices"]["shape"][0]
    used = planner.decode(seqs, lens).arrays()["kv_indices"].shape[0]
    cells = [cell for n in lens for cell in [Cell(Kind.PREFIX)] * n + [Cell(Kind.DRAFT, text="new")]]
    assert len(cells) == used
    return Story(
        f"26738: kv_indices of a decode step of 2 requests, lengths on the device alone (at most {bound})",
        [
            Strip("the host's lengths: absent; a size from them is a crash, or 0", [Cell(Kind.WRONG, text="None")] * 2),
            Strip(f"sized by the bound: 2 * ({bound} + 1) = {size} entries; the device writes {used} of them",
                  cells + [Cell(Kind.FREE)] * (size - used), 1, size),
        ],
    )  # fmt: skip


_STORIES: dict[int, Callable[[], Story]] = {
    27338: _branch_width,
    27360: _expand_table,
    23037: _stale_padding,
    26972: _holey_reserve,
    26738: _host_lengths,
}
