"""Rounds on a GPU as the engine sees them: what is asked for, and what has been launched and not been read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from specrs import _specrs as core
from specrs.engine.devices.graphs import Bucket
from specrs.engine.devices.host import likeliest, non_finite
from specrs.engine.devices.launches import Variant
from specrs.engine.devices.memory import Arrays
from specrs.engine.request.batch import Batch
from specrs.engine.rounds.executor import Watched
from specrs.models.features import FeatureRows, Features


@dataclass(frozen=True)
class DeviceRoot:
    """A request's root lies in `Roots`, in the row of its sequence, until the next round that drafts for that row.

    Attributes:
        row: of the page table.
        start: of the head's KV, the first entry that the pass which gave the root wrote.
    """

    row: int
    start: int


@dataclass(eq=False)
class AskedRound:
    """Drafts that `CudaExecutor.verify` launches together with their verification.

    Attributes:
        depths: how deep each request drafts, 0 for not at all.
        levels: of drafts that are run, 0 without any.
        trees: of the host, with which the drafts are united.
    """

    batch: Batch
    depths: list[int]
    levels: int
    trees: core.TreeBatch | None = None

    @property
    def steps(self) -> int:
        return max(self.levels - 1, 0)


@dataclass(eq=False)
class LaunchedRound:
    """A round that runs or has run. What it found is waited for when it is asked for, and is there until many rounds
    later; what it left in device memory (features, logits), until the next one.

    Attributes:
        batch: requests that are asked about, as they are once all rounds before are collected.
        bucket, number: where it runs, and which of the rounds there it is.
        variant: what was launched.
        seats: of each request.
        host_drafted: trees that the host made; ``None`` where the device drafted them, or some of their nodes.
    """

    batch: Batch
    bucket: Bucket
    number: int
    variant: Variant
    seats: Sequence[int]
    host_drafted: Watched | None = None

    @cached_property
    def _found(self) -> Arrays:
        found, seats = self.bucket.collect(self.number), self.seats
        began = found["lens"].tolist()
        if any(began[seat] != n for seat, n in zip(seats, self.batch.lens, strict=True)):
            starts = [began[seat] for seat in seats]
            raise RuntimeError(f"round {self.number} began at positions {starts}, its requests at {self.batch.lens}")
        return found

    def _held(self, what: str, held: bool) -> Bucket:
        """The bucket, whose device memory still has what this round left. Raises StaleOutputError."""
        bucket = self.bucket
        if not held:
            what = f"{what} of round {self.number} of the bucket of {bucket.batch} requests"
            current = bucket.rounds - 1
            error = core.StaleOutputError(f"{what}: round {current}, or a pass behind it, has overwritten it")
            error.what, error.held, error.current = what, self.number, current
            raise error
        return bucket

    @cached_property
    def starts(self) -> list[int]:
        """Each request's first row of the pass, and behind the last seat's."""
        if not self.variant.levels:
            return [*self.seats, self.bucket.given.live]
        if self.host_drafted is not None:
            return list(accumulate(self.host_drafted.trees.sizes, initial=0))
        offsets: list[int] = self._found["tree_offsets"].tolist()
        return [*(offsets[seat] for seat in self.seats), offsets[self.bucket.given.live]]

    @cached_property
    def trees(self) -> core.TreeBatch:
        if self.host_drafted is not None:
            return self.host_drafted.trees
        found = self._found
        if not self.variant.levels:
            return core.TreeBatch.from_parents([[-1]] * len(self.seats), [[r.tokens[-1]] for r in self.batch])
        scores = found["tree_scores"].view(torch.float32)
        offsets, arrays = self._of_seats(found["tree_offsets"], (found["tree_tokens"], found["tree_parents"], scores))
        return core.TreeBatch.from_arrays(offsets, *arrays)

    @cached_property
    def origins(self) -> list[list[int]] | None:
        found = self._found
        if not self.variant.drafts:
            return None
        offsets, origins = found["tree_offsets"].tolist(), found["tree_origins"]
        return [origins[offsets[seat] : offsets[seat + 1]].tolist() for seat in self.seats]

    @cached_property
    def accepts(self) -> core.Accepts:
        found = self._found
        if any(self._faulty):
            # Rare: the host looks at the rows, and says of each request what was wrong.
            trees = self.trees
            each = zip(self.starts, trees.sizes, strict=False)
            logits = self._logits([row for first, size in each for row in range(first, first + size)])
            return core.verify(trees, logits, [r.sampler for r in self.batch], self.batch.lens)
        offsets, arrays = self._of_seats(found["offsets"], (found["paths"], found["tokens"]))
        return core.Accepts.from_arrays(offsets, *arrays)

    def logits(self, request: int, rows: Sequence[int]) -> torch.Tensor:
        first = self.starts[request]
        return self._logits([first + row for row in rows])

    def _logits(self, rows: list[int]) -> torch.Tensor:
        """Of rows of the pass, on the host."""
        bucket = self._held("logits", self.bucket.holds_logits(self.number))
        return bucket.logits[rows].to("cpu", torch.float32)

    def _of_seats(
        self, offsets: torch.Tensor, arrays: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Of arrays with a part for each seat, those of the requests' seats."""
        seats = self.seats
        if isinstance(seats, range):  # of every request since the launch
            return offsets[: len(seats) + 1], arrays
        ends: list[int] = offsets.tolist()
        index = torch.tensor([i for seat in seats for i in range(ends[seat], ends[seat + 1])], dtype=torch.int64)
        counts = [ends[seat + 1] - ends[seat] for seat in seats]
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32), tuple(a[index] for a in arrays)

    @cached_property
    def _faulty(self) -> list[bool]:
        """Of each request, whether the target's scores were not finite."""
        faults: list[int] = self._found["faults"].tolist()
        return [faults[seat] != 0 for seat in self.seats]

    @property
    def lost(self) -> list[int]:
        return [] if self.bucket.holds_logits(self.number) else [i for i, faulty in enumerate(self._faulty) if faulty]

    @cached_property
    def faults(self) -> list[tuple[core.NonFiniteError, int]]:
        """Requests whose root's draft scores give no distribution."""
        if self.host_drafted is not None:
            return list(self.host_drafted.faults)
        if not self.variant.levels:
            return []
        sound: list[int] = self._found["sound"].tolist()
        bad = [i for i, seat in enumerate(self.seats) if self.drafted(i) and sound[seat] == 0]
        kept = self.bucket.holds(self.number)
        scores = [self.bucket.launches.root_logits[self.seats[i]].cpu() if kept else None for i in bad]
        return [(_bad_root(i, row), self._sound_until(i)) for i, row in zip(bad, scores, strict=True)]

    def _sound_until(self, request: int) -> int:
        root = self.batch.requests[request].root
        return root.start if isinstance(root, DeviceRoot) else self.batch.lens[request]

    def features(self, request: int, rows: Sequence[int]) -> Features:
        memory = self._held("features", self.bucket.holds(self.number)).launches.features
        assert memory is not None and not self.drafted(request)
        # The next round overwrites them. Without drafts there is one row, the root's.
        first = self.starts[request]
        if list(rows) == [0]:
            kept = memory.stacked.narrow(1, first, 1).clone()
        else:
            index = torch.tensor([first + row for row in rows], device=memory.stacked.device)
            kept = memory.stacked.index_select(1, index)
        return Features(FeatureRows(memory.aux_layers, kept), range(len(rows)))

    def likeliest(self, requests: Sequence[int], count: int) -> list[tuple[list[int], list[list[int]]]] | None:
        if not self.bucket.holds_logits(self.number):
            return None  # and nobody waits for a round that runs
        return likeliest(self.trees, self.starts, self.bucket.logits, requests, count)

    @cached_property
    def _depths(self) -> list[int]:
        """How deep each seat drafted."""
        depths: list[int] = self._found["depths"].tolist()
        return depths

    def drafted(self, request: int) -> bool:
        """Whether the request had drafts, and the head has run over what was accepted of them."""
        return self.variant.levels > 0 and self._depths[self.seats[request]] > 0

    def root(self, request: int) -> DeviceRoot | None:
        if not self.drafted(request):
            return None
        return DeviceRoot(self.batch.seqs[request].row, self.batch.lens[request])


def _bad_root(request: int, logits: torch.Tensor | None) -> core.NonFiniteError:
    """Why nothing can be drafted from a root's logits; ``None`` where a later round has overwritten them."""
    error = None if logits is None or bool(logits.isneginf().all()) else non_finite("draft logits", logits)
    if error is None:
        value, index = ("all -inf", 0) if logits is not None else ("not finite", -1)
        error = core.NonFiniteError(f"draft logits: {value} at index {index}")
        error.kind, error.what, error.value, error.index = "NonFinite", "draft logits", value, index
    error.request = request
    return error
