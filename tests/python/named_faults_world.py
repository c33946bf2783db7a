"""Graphs that plan on the device, in which the named faults can be put back: what tests of them on a GPU share."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.dlpack import from_dlpack

import specrs
from specrs import _specrs as core
from specrs import device
from specrs.backends.base import Layout
from specrs.capsule.static import Memory
from specrs.operands import PlanArrays

CUDA = torch.device("cuda", torch.cuda.current_device())
PLAN = ("rows", "versions", "qo_indptr", "prefix_lens", "positions", "out_slots", "mask")
BUCKET, BRANCHES, POISON = 3, 2, 0xFF


class Captured:
    """A graph that plans a draft step of up to three requests out of static inputs, whatever they hold then.

    Attributes:
        rows, lens, live: inputs, in device memory.
        plan, arrays: memory that the graph writes, between guards.
    """

    def __init__(
        self,
        format: str,
        reverts: Sequence[int] = (),
        at_most: int | None = None,
        *,
        tree: tuple[int, int, int] = (BRANCHES, 2, 4),
        page: int = 2,
        layout: Layout = "dense",
    ) -> None:
        self.lens_then = [5, 4, 3]
        self.geometry = g = core.Geometry(BUCKET, 16, page, core.TreeShape(*tree), layout, list(reverts))
        self.pool = core.Pool(g.pages_for_full_load + 1, page, BUCKET, g.row_pages)
        self.seqs = [self.pool.create() for _ in self.lens_then]
        self.planner = core.Planner(g, self.pool, format=format)  # type: ignore[arg-type]
        self.format = format
        # The one size there is: lengths are not known here, but for a bound.
        bound = core.DeviceLens(BUCKET, g.max_context_len if at_most is None else at_most)
        sizes = self.planner.sizes("draft", bound, 0)
        self.arrays = Memory(sizes, CUDA)
        queries = BUCKET * BRANCHES
        shapes = ([BUCKET], [BUCKET], [BUCKET + 1], [BUCKET], [queries], [queries], [queries, 1])
        own: dict[str, dict[str, Any]] = {}
        for name, shape in zip(PLAN, shapes, strict=True):
            wide = name in ("versions", "mask")
            count = shape[0]
            own[name] = {"shape": shape, "dtype": "int64" if wide else "int32", "bytes": count * (8 if wide else 4)}
        self.plan = Memory(own, CUDA)
        zeros = [torch.zeros(n, dtype=torch.int32, device=CUDA) for n in (BUCKET, BUCKET, 1)]
        self.rows, self.lens, self.live = zeros
        self.versions = torch.zeros(BUCKET, dtype=torch.int64, device=CUDA)
        self.table = torch.zeros(BUCKET, g.row_pages, dtype=torch.int32, device=CUDA)
        self.lease: core.Lease | None = None

    def capture(self) -> None:
        self.poison()
        self.launch(BUCKET)
        gc.collect()  # an older graph that is destroyed within torch's capture would break it
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.launch(BUCKET)

    def launch(self, bucket: int) -> None:
        """Plan the first `bucket` requests of the arrays."""
        ends = {"qo_indptr": bucket + 1, "positions": bucket * BRANCHES, "out_slots": bucket * BRANCHES}
        views = {n: self.plan.views[n][: ends.get(n, bucket * BRANCHES if n == "mask" else bucket)] for n in PLAN}
        arrays = {} if self.format == "native" else self.arrays.views
        core._device_plan(
            geometry=self.geometry, phase="draft", draft_step=0, table=self.table, num_pages=self.pool.num_pages,
            rows=self.rows[:bucket], versions=self.versions[:bucket], lens=self.lens[:bucket], live=self.live,
            plan=PlanArrays(**views), format=self.format, masks="both", arrays=arrays,
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip

    def reserve(self, seqs: Sequence[core.Sequence], lens: list[int]) -> None:
        """Lengths and pages of a round, and the device's copy of the page table."""
        for q, n in zip(seqs, lens, strict=True):
            if (have := self.pool.committed(q)) < n:
                self.pool.reserve([(q, n)]).commit([n])
            assert self.pool.committed(q) == n, have
        self.lease = self.pool.reserve([(q, self.geometry.alloc_target(n, 0)) for q, n in zip(seqs, lens, strict=True)])
        self.table.zero_()
        for q in seqs:
            pages = torch.tensor(self.pool.pages(q), dtype=torch.int32)
            self.table[q.row, : len(pages)] = pages

    def hand_over(self, lens: list[int], host: core.Plan | None = None) -> None:
        """Overwrite the inputs of as many requests, and no more; `host` is their plan by the host."""
        n = len(lens)
        seqs = self.seqs[:n]
        host = host or self.host(lens)
        self.rows[:n] = torch.tensor([q.row for q in seqs], dtype=torch.int32)
        self.lens[:n] = torch.tensor(lens, dtype=torch.int32)
        self.versions[:n] = from_dlpack(host.versions)[:n].to(CUDA)

    def host(self, lens: list[int]) -> core.Plan:
        """The host's plan, padded to the bucket."""
        pad = (BUCKET, BUCKET * BRANCHES)
        return self.planner.draft(self.seqs[: len(lens)], lens, 0, None, "lane", pad=pad)

    def poison(self) -> None:
        self.plan.fill(POISON, tables=True)
        self.arrays.fill(POISON, tables=True)

    def audit(self) -> core.Plan:
        """Look at the arrays' content as at a plan that was made elsewhere."""
        plan: Any = tuple(self.plan.views[name].cpu() for name in PLAN)
        return self.planner.audit("draft", plan, 0)

    def equals(self, host: core.Plan, counted: int | None = None) -> None:
        """Check that every array is the host's, dead queries included, and that nothing beside one was written.

        counted: requests whose queries have their places, where more are than are live.
        """
        self.plan.bytes(POISON)
        self.arrays.bytes(POISON)
        starts = ("qo_indptr", "cu_seqlens_q")
        placed = None if counted is None else [BRANCHES * min(i, counted) for i in range(BUCKET + 1)]
        for name in PLAN:
            want = from_dlpack(getattr(host, name))
            if placed is not None and name in starts:
                want = torch.tensor(placed, dtype=want.dtype)
            assert torch.equal(self.plan.views[name].cpu().view(want.shape), want), name
        for name, array in host.arrays().items():
            want, got = from_dlpack(array), self.arrays.views[name].cpu()
            if placed is not None and name in starts:
                want = torch.tensor(placed, dtype=want.dtype)
            got = got[: want.shape[0]] if want.dim() == 1 else got[: want.shape[0], : want.shape[1]]
            assert torch.equal(got, want.to(got.dtype)), name


def fault() -> specrs.OutOfBoundsError:
    """The fault that a kernel has recorded."""
    torch.cuda.synchronize()
    with pytest.raises(specrs.OutOfBoundsError) as e:
        device.check()
    device.check()
    return e.value


def two_of_three(format: str) -> Captured:
    """A replay of three requests, then the third ends: its row has no pages, and the inputs still name it."""
    c = Captured(format)
    c.reserve(c.seqs, [5, 4, 3])
    c.hand_over([5, 4, 3])
    c.live.fill_(3)
    c.capture()
    c.poison()
    c.graph.replay()
    torch.cuda.synchronize()
    c.equals(c.host([5, 4, 3]))
    assert c.lease is not None
    c.lease.rollback()
    c.pool.release([c.seqs[2]])
    c.reserve(c.seqs[:2], [5, 4])
    c.hand_over([5, 4])
    assert int(c.rows[2]) >= 0 and int(c.lens[2]) == 3  # the larger batch left these
    return c
