"""The head's pass over a request's last positions, up to its root, as CUDA graphs of a fixed number of rows.

Such a pass begins the drafts of a request: behind its prompt, and when it drafts again after rounds without drafts. No
round kept features in the second case, so the target first runs over the same positions again. The KV of these
positions is there already, and a pass would write the same bits. So the target's pass writes none: their pages may be
shared with the prefix cache.

Launched one by one, the kernels of these passes take the host longer than several rounds take the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import cast

import numpy as np
import torch

from specrs import _specrs as core
from specrs.engine.devices.graphs import Graphs
from specrs.engine.devices.memory import Fields, Models
from specrs.models.cuda import DevicePlan
from specrs.models.features import FeatureRows, Features


class Entering:
    """Graphs of the pass for up to ``batch`` requests of up to ``rows`` positions each.

    Attributes:
        batch: number of seats.
        rows: positions of a seat.
    """

    def __init__(self, models: Models, batch: int, rows: int) -> None:
        self.batch, self.rows, self._m = batch, rows, models
        columns, total, at = models.geometry.row_pages, batch * rows, models.dense.placement
        layout = Fields(
            tokens=total, after=total, positions=total, slots=total, unwritten=total, lens=batch, first_pages=batch,
            starts=batch + 1, last=batch, roots=batch, table=batch * columns,
        )  # fmt: skip
        self._host = torch.zeros(layout.words, dtype=torch.int32)
        self._there = torch.zeros(layout.words, dtype=torch.int32, device=at.device)
        self._given = {name: array.numpy() for name, array in layout.of(self._host).items()}
        self._arrays = a = layout.of(self._there)
        target = models.target
        self._features = at.empty(len(target.aux_layers), total, target.config.hidden_size).zero_()
        table, page_size = a["table"].view(batch, columns), models.geometry.page_size

        def plan(slots: torch.Tensor, first_pages: torch.Tensor | None) -> core.Plan:
            found = DevicePlan(
                "extend", a["positions"], slots, a["lens"], a["starts"], table, None, None, rows, page_size, first_pages
            )  # fmt: skip
            return cast(core.Plan, found)

        self._of_head, self._of_target = plan(a["slots"], a["first_pages"]), plan(a["unwritten"], None)
        self._graphs = Graphs(models)

    def run(
        self,
        plan: core.Plan,
        texts: Sequence[Sequence[int]],
        features: Sequence[Sequence[Features]] | None,
        roots: Sequence[int],
    ) -> None:
        """Run the pass, and store the root of each request.

        Args:
            plan: the head's pass over the requests' positions, planned by the host.
            texts: the tokens at the positions of each request, and the token behind.
            features: the features of each request's positions; ``None`` to make them by a pass of the target.
            roots: the row of each request's root.
        """
        given, live = self._given, len(texts)
        ends = list(accumulate(len(text) - 1 for text in texts))
        for name, values, dead in (
            ("tokens", [t for text in texts for t in text[:-1]], 0),
            ("after", [t for text in texts for t in text[1:]], 0),
            ("positions", np.from_dlpack(plan.positions), 0),
            ("slots", np.from_dlpack(plan.out_slots), 0),
            ("lens", np.from_dlpack(plan.prefix_lens), 0),
            ("first_pages", plan.first_pages or [0] * live, 0),
            ("starts", [0, *ends], ends[-1]),
            ("last", [end - 1 for end in ends], 0),
            ("roots", roots, -1),
        ):
            given[name][: len(values)], given[name][len(values) :] = values, dead
        pages = np.from_dlpack(plan.page_table())
        given["table"].reshape(self.batch, -1)[:live, : pages.shape[1]] = pages
        # Torch hands pinned memory out again only once the copies from it have ended.
        self._there.copy_(self._host.pin_memory(), non_blocking=True)
        if features is not None:
            for first, pieces in zip([0, *ends], features, strict=False):
                for piece in pieces:
                    self._features[:, first : first + len(piece)].copy_(piece.read())
                    first += len(piece)
        self.launch(features is None)

    def launch(self, recalls: bool) -> None:
        """Run the pass over the present inputs. All seats are empty at first.

        Args:
            recalls: True if the target makes the features first.
        """
        name = f"the pass that enters {self.batch} requests{', with the target' if recalls else ''}:"
        self._graphs.run(name, self._passes(recalls), self._kept)

    def _kept(self) -> list[object]:
        m = self._m
        return [m.cache, m.draft_cache, m.target, m.head, m.roots, self._there, self._features]

    def _passes(self, recalls: bool) -> Callable[[int], None]:
        """Return a function that launches the passes. It does not refer to this object, because a graph keeps it."""
        m, a, features, plan, of_target = self._m, self._arrays, self._features, self._of_head, self._of_target

        def run(_: int) -> None:
            assert m.head is not None and m.draft_cache is not None and m.roots is not None
            m.dense.forget()
            if recalls:
                memory = FeatureRows(m.target.aux_layers, features)
                m.target.forward(a["tokens"], of_target, m.cache, memory, a["tokens"][:0])
            logits, hidden = m.head.extend(a["after"], features.unbind(0), plan, m.draft_cache, a["last"])
            stream = m.dense.stream
            core._device_copy_rows(logits, None, m.roots.logits, a["roots"], None, stream)
            core._device_copy_rows(hidden, None, m.roots.hidden, a["roots"], None, stream)

        return run
