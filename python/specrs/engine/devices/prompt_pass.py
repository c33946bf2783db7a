"""Passes over the new positions of a few requests as CUDA graphs of a fixed number of rows, and the target's own one.

Launched one by one, the kernels of a pass over a short prompt take the host several times as long as the device. A
graph of a few more rows than the prompt has takes one launch. Dead rows behind the prompt's write nothing, and a row's
bits do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import ArrayLike

from specrs import _specrs as core
from specrs.engine.devices.graphs import Graphs
from specrs.engine.devices.memory import Fields, HostInputs, Models
from specrs.models.cuda import DevicePlan
from specrs.models.features import FeatureRows
from specrs.operands import PlanArrays


class PassInputs:
    """The inputs of a captured pass over new positions, on the host and on the device.

    Args:
        models: the models, and what the engine's passes share.
        batch: the most requests.
        rows: the most positions of all requests together.
        more: numbers of words of further inputs, by name.

    Attributes:
        there: the arrays on the device, by name.
    """

    def __init__(self, models: Models, batch: int, rows: int, **more: int) -> None:
        columns, cuda = models.geometry.row_pages, models.dense.placement.device
        layout = Fields(
            tokens=rows, positions=rows, slots=rows, lens=batch, starts=batch + 1, last=batch, table=batch * columns,
            **more,
        )  # fmt: skip
        self._batch, self._format, self._page_size = batch, models.format, models.geometry.page_size
        self._num_pages = models.num_pages
        self._inputs = HostInputs(layout, torch.zeros(layout.words, dtype=torch.int32, device=cuda))
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.there = self._inputs.there
        self._table = self._inputs.host["table"].reshape(batch, columns)
        queries = min(rows, batch * models.geometry.max_context_len)
        self._rows = torch.arange(batch, dtype=torch.int32, device=cuda)
        self._versions = torch.zeros(batch, dtype=torch.int64, device=cuda)
        sizes = {
            "rows": batch,
            "qo_indptr": batch + 1,
            "prefix_lens": batch,
            "positions": queries,
            "out_slots": queries,
        }
        self._planned = PlanArrays(
            **{name: torch.zeros(n, dtype=torch.int32, device=cuda) for name, n in sizes.items()},
            versions=torch.zeros_like(self._versions), mask=self._versions[:0],
        )  # fmt: skip

    def plan(self, slots: str, most: int, first_pages: bool = False) -> core.Plan:
        """Return the plan of a pass over these inputs.

        Args:
            slots: name of the input that says where the positions' KV is written.
            most: the most positions of a request.
            first_pages: True if the keys of each request begin at an input of this name.
        """
        a = self.there
        found = DevicePlan(
            "extend", a["positions"], a[slots], a["lens"], a["starts"], a["table"].view(self._batch, -1), None, None,
            most, self._page_size, a["first_pages"] if first_pages else None, self._format.of("extend"),
        )  # fmt: skip
        return cast(core.Plan, found)

    def write_arrays(self, stream: core._DeviceStream) -> None:
        """Launch the device planner over these inputs, for the arrays of the attention backend's format, if it has any.

        What it plans beside them is what the inputs say already.
        """
        if not self._format.arrays:
            return
        a = self.there
        self._format.plan(
            stream, "extend", draft_step=None, table=a["table"].view(self._batch, -1), num_pages=self._num_pages,
            rows=self._rows, versions=self._versions, lens=a["lens"], live=None, offsets=a["starts"],
            plan=self._planned,
        )  # fmt: skip

    def set(self, plan: core.Plan, **values: tuple[ArrayLike, int]) -> None:
        """Set the inputs of the next pass, and copy them to the device in stream order.

        Args:
            plan: the host's plan of the pass.
            values: values of the other inputs by name, each with the value of dead rows behind them.
        """
        if not self._copied.query():  # type: ignore[no-untyped-call]  # the copy before this one; it is nearly always over
            self._copied.synchronize()
        starts = np.from_dlpack(plan.qo_indptr)
        planned: dict[str, tuple[ArrayLike, int]] = {
            "positions": (np.from_dlpack(plan.positions), 0),
            "slots": (np.from_dlpack(plan.out_slots), 0),  # nothing is ever written to slot 0
            "lens": (np.from_dlpack(plan.prefix_lens), 0),
            "starts": (starts, int(starts[-1])),
        }
        for name, (some, dead) in (planned | values).items():
            self._inputs.fill(name, some, dead)
        pages = np.from_dlpack(plan.page_table())
        self._table[: len(pages), : pages.shape[1]] = pages
        self._inputs.upload()
        self._copied.record()


class PromptPass:
    """Graphs of the target's pass over the next positions of up to ``batch`` requests.

    Attributes:
        batch: the most requests, and the most rows whose logits are wanted.
        rows: the most positions of all requests together.
    """

    def __init__(self, models: Models, batch: int, rows: int, features: torch.Tensor | None) -> None:
        self.batch, self.rows, self._m = batch, rows, models
        self._inputs = PassInputs(models, batch, rows)
        self._plan, self._graphs = self._inputs.plan("slots", rows), Graphs(models)
        self._features = None if features is None else FeatureRows(models.target.aux_layers, features[:, :rows])

    def run(
        self, tokens: ArrayLike, plan: core.Plan, last: ArrayLike, features: bool
    ) -> tuple[torch.Tensor, FeatureRows | None]:
        """Run the pass. Nothing here waits for it.

        Args:
            tokens: token of each position.
            plan: the pass, planned by the host.
            last: the rows whose logits are wanted.
            features: True if the rows' features are wanted.

        Returns:
            Logits [rows of ``last``, vocab] on the device, which the target's next pass overwrites, and features.
        """
        self._inputs.set(plan, tokens=(tokens, 0), last=(last, 0))
        logits, found = self.launch(), None
        if features and self._features is not None:
            rows = len(cast(Sequence[int], tokens))
            found = FeatureRows(self._features.aux_layers, self._features.stacked[:, :rows].clone())
        return logits[: len(cast(Sequence[int], last))], found

    def launch(self) -> torch.Tensor:
        """Run the pass over the present inputs, and return its logits. There are no requests at first."""
        name = f"the pass over prompts of {self.rows} tokens, {self.batch} at once:"
        return self._graphs.run(name, self._passes(), self._kept)

    def _kept(self) -> list[object]:
        m = self._m
        return [m.cache, m.target, self._features, self._inputs, *m.format.kept()]

    def _passes(self) -> Callable[[int], torch.Tensor]:
        """Return a function that launches the pass. It does not refer to this object, because a graph keeps it."""
        m, inputs, features, plan = self._m, self._inputs, self._features, self._plan
        a = inputs.there

        def run(_: int) -> torch.Tensor:
            m.dense.forget()
            inputs.write_arrays(m.dense.stream)
            return m.target.forward(a["tokens"], plan, m.cache, features, a["last"])[0]

        return run


def prompt_passes(models: Models, sizes: Iterable[tuple[int, int]]) -> list[PromptPass]:
    """Return passes of several sizes (requests, positions), smallest first. Their features share memory."""
    sizes, target, features = sorted(sizes, key=lambda size: size[::-1]), models.target, None
    if models.head is not None and sizes:
        features = models.dense.placement.empty(len(target.aux_layers), sizes[-1][1], target.config.hidden_size).zero_()
    return [PromptPass(models, batch, rows, features) for batch, rows in sizes]
