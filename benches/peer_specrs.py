"""specrs's own arrays of a round, through its Python bindings, in the words of `peer_checks`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import specrs
from peer_rounds import Inputs, K, S, V, live
from specrs import _specrs


class Session:
    """A batch like ``inputs`` in a pool of specrs's, whose pages take the place of the inputs' own."""

    def __init__(self, inputs: Inputs) -> None:
        batch, page = len(inputs.lens), inputs.page
        layout = "holey" if inputs.holey else "dense"
        context = 2 * int(inputs.lens.max())
        self.geometry = specrs.Geometry(batch, context, page, specrs.TreeShape(K, S, V), layout)
        pages = self.geometry.pages_for_full_load
        self.pool = specrs.Pool(pages + 1, page, batch, self.geometry.row_pages)
        order = np.random.default_rng(0).permutation(self.pool.alloc_pages(pages))
        self.pool.free_pages([int(p) for p in order])
        self.lens = [int(n) for n in inputs.lens]
        self.seqs = [self.pool.create() for _ in self.lens]
        self.pool.reserve(list(zip(self.seqs, self.lens, strict=True))).commit(self.lens)
        wants = [(s, self.geometry.alloc_target(n, 0)) for s, n in zip(self.seqs, self.lens, strict=True)]
        self.lease = self.pool.reserve(wants)  # pages stay ours while it lives
        rows = np.zeros((batch, max(len(self.pool.pages(s)) for s in self.seqs)), dtype=np.int32)
        for row, seq in zip(rows, self.seqs, strict=True):
            owned = self.pool.pages(seq)
            row[: len(owned)] = owned
        table = (rows[:, :, None] * page + np.arange(page, dtype=np.int32)).reshape(batch, -1)
        self.inputs = Inputs(page, table, inputs.lens, inputs.ancestors)
        depths = inputs.ancestors.sum(2)
        above = inputs.ancestors & ~np.eye(V, dtype=bool)
        parents = np.where(above, depths[:, None, :], -1).argmax(2)  # the deepest of the nodes above
        parents[:, 0] = -1
        self.trees = _specrs.TreeBatch.from_parents(parents.tolist(), [[0] * V] * batch)
        self.beams = _specrs.DraftBeams(batch, specrs.TreeShape(K, S, V), None, 64)
        self.beams.start(torch.rand(batch, 64))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of format ``name``, every request extended by V tokens in draft_extend, as the peers do."""
        planner = specrs.Planner(self.geometry, self.pool, name)
        out: dict[str, np.ndarray] = {}
        for t in range(S - 1):
            if self.beams.steps_done <= t:
                self.beams.advance(torch.rand(len(self.seqs) * K, 64))
            self._put(out, f"draft{t}", planner.draft(self.seqs, self.lens, t, self.beams, "lane"))
        self._put(out, "verify", planner.verify(self.seqs, self.lens, self.trees))
        self._put(out, "extend", planner.extend(self.seqs, self.lens, [V] * len(self.seqs)))
        return out

    def _put(self, out: dict[str, np.ndarray], phase: str, plan: Any) -> None:
        arrays = {name: torch.from_dlpack(a) for name, a in plan.arrays().items()}
        for name, array in arrays.items():
            if name.startswith(("cu_", "expand_cu_")) or name == "kv_last_page_len":
                continue  # constants, which the peers set once at capture
            if name.endswith("page_table"):
                lens = arrays[name.replace("page_table", "cache_seqlens")]
                unit = 1 if name.startswith("expand_") and phase == "verify" else self.inputs.page
                out[f"{phase}.{name}"] = live(array, -(-lens // unit))
            else:
                array = array.view(torch.uint8) if array.dtype == torch.bool else array
                out[f"{phase}.{name}"] = array.numpy().copy()
