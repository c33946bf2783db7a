"""The head's pass over a request's last positions, up to its root, as CUDA graphs of a fixed number of rows.

Such a pass begins the drafts of a request: behind its prompt, and when it drafts again after rounds without drafts. No
round kept features in the second case, so the target first runs over the same positions again. The KV of these
positions is there already, and a pass would write the same bits. So the target's pass writes none: their pages may be
shared with the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from specrs import _specrs as core
from specrs.engine.devices.graphs import Graphs
from specrs.engine.devices.memory import Models
from specrs.engine.devices.prompt_pass import PassInputs
from specrs.models.features import FeatureRows, Features


class Entering:
    """Graphs of the pass for up to ``batch`` requests of up to ``rows`` positions each.

    Attributes:
        batch: number of seats.
        rows: positions of a seat.
    """

    def __init__(self, models: Models, batch: int, rows: int) -> None:
        self.batch, self.rows, self._m = batch, rows, models
        total, at, target = batch * rows, models.dense.placement, models.target
        self._inputs = inputs = PassInputs(
            models, batch, total, after=total, unwritten=total, first_pages=batch, roots=batch
        )
        self._features = at.empty(len(target.aux_layers), total, target.config.hidden_size).zero_()
        self._of_head, self._of_target = inputs.plan("slots", rows, first_pages=True), inputs.plan("unwritten", rows)
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
        ends = list(accumulate(len(text) - 1 for text in texts))
        self._inputs.set(
            plan,
            tokens=([t for text in texts for t in text[:-1]], 0),
            after=([t for text in texts for t in text[1:]], 0),
            first_pages=(plan.first_pages or [0] * len(texts), 0),
            last=([end - 1 for end in ends], ends[-1] - 1),
            roots=(roots, -1),
        )
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
        return [m.cache, m.draft_cache, m.target, m.head, m.roots, self._inputs, self._features, *m.format.kept()]

    def _passes(self, recalls: bool) -> Callable[[int], None]:
        """Return a function that launches the passes. It does not refer to this object, because a graph keeps it."""
        m, inputs, features = self._m, self._inputs, self._features
        plan, of_target, a = self._of_head, self._of_target, inputs.there

        def run(_: int) -> None:
            assert m.head is not None and m.head.passes == "steps"
            assert m.draft_cache is not None and m.roots is not None
            m.dense.forget()
            inputs.write_arrays(m.dense.stream)
            if recalls:
                memory = FeatureRows(m.target.aux_layers, features)
                m.target.forward(a["tokens"], of_target, m.cache, memory, a["tokens"][:0])
            logits, hidden = m.head.extend(a["after"], features.unbind(0), plan, m.draft_cache, a["last"])
            stream = m.dense.stream
            core._device_copy_rows(logits, None, m.roots.logits, a["roots"], None, stream)
            core._device_copy_rows(hidden, None, m.roots.hidden, a["roots"], None, stream)

        return run
