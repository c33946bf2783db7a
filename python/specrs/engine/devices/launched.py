"""Rounds on a GPU as the engine sees them: rounds to be launched, and launched rounds with their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from specrs import _specrs as core
from specrs.engine.devices.graphs import MOST_AHEAD, Bucket
from specrs.engine.devices.head_inputs import non_finite
from specrs.engine.devices.host import likeliest
from specrs.engine.devices.launches import Variant
from specrs.engine.devices.memory import Arrays
from specrs.engine.request.batch import Batch


@dataclass(frozen=True)
class DeviceRoot:
    """A request's root that lies in `Roots`, until the next round that drafts for the same row.

    Attributes:
        row: the row of the request's sequence in the page table, and of the root in `Roots`.
        start: position of the first entry of draft KV that was written by the pass which gave the root.
    """

    row: int
    start: int


@dataclass(frozen=True)
class BlockRoot:
    """What a request needs to draft by blocks: draft KV of all of its positions.

    Attributes:
        sound: positions whose draft KV the host has seen to be finite. Rounds write that of others, and a block's
            scores tell if it is not.
    """

    sound: int


@dataclass(eq=False)
class AskedRound:
    """Drafts that `CudaExecutor.verify` launches together with their verification.

    Attributes:
        depths: the depth to which each request drafts; 0 for no drafts.
        levels: levels of drafts that the round runs; 0 without drafts.
        trees: trees of the host that the device unites with the drafts; ``None`` without.
    """

    depths: list[int]
    levels: int
    trees: core.TreeBatch | None = None
    faults = ()


@dataclass(eq=False)
class LaunchedRound:
    """A round that runs or has run.

    Asking for its results waits for the round. The results stay readable for many rounds; logits, which stay in
    device memory, only until the next round.

    Attributes:
        batch: the requests to give results for, as they are once all rounds before are collected.
        bucket: the bucket that runs the round.
        number: the round's number in the bucket.
        variant: the variant that was launched.
        seats: each request's seat.
        host_trees: trees that the host made; ``None`` if the device drafted all or some of their nodes.
        host_faults: faults of the host's drafts.
    """

    batch: Batch
    bucket: Bucket
    number: int
    variant: Variant
    seats: Sequence[int]
    host_trees: core.TreeBatch | None = None
    host_faults: Sequence[tuple[core.NonFiniteError, int]] = ()

    @cached_property
    def _found(self) -> Arrays:
        found, seats = self.bucket.collect(self.number), self.seats
        began = found["lens"].tolist()
        if any(began[seat] != n for seat, n in zip(seats, self.batch.lens, strict=True)):
            starts = [began[seat] for seat in seats]
            raise RuntimeError(f"round {self.number} began at positions {starts}, its requests at {self.batch.lens}")
        return found

    def of(self, batch: Batch, rows: Sequence[int]) -> LaunchedRound:
        if len(rows) == len(self.seats):
            return replace(self, batch=batch)
        return replace(self, batch=batch, seats=[self.seats[row] for row in rows], host_trees=None)

    def wait(self) -> None:
        self.bucket.collect(self.number)

    @property
    def ahead(self) -> int:
        if self.variant.loop:
            return 0 if self.bucket.ended(self.number) else MOST_AHEAD
        return MOST_AHEAD if self.bucket.loops(self.variant) else 1

    def following(self, goes_on: bool) -> LaunchedRound | None:
        number = self.bucket.followed_by(self.number, goes_on)
        return None if number is None else replace(self, number=number)

    @cached_property
    def starts(self) -> list[int]:
        """Each request's first row of the pass, and the end of the pass's rows."""
        if not self.variant.levels:
            return [*self.seats, self.bucket.given.live]
        if self.host_trees is not None:
            return list(accumulate(self.host_trees.sizes, initial=0))
        offsets: list[int] = self._found["tree_offsets"].tolist()
        return [*(offsets[seat] for seat in self.seats), offsets[self.bucket.given.live]]

    @cached_property
    def trees(self) -> core.TreeBatch:
        if self.host_trees is not None:
            return self.host_trees
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
            # This is rare: the host looks at the rows itself, and finds the error of each request.
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
        """Copy the logits of some rows of the pass to the host.

        Raises:
            StaleOutputError: a later round or pass has overwritten them.
        """
        bucket = self.bucket
        if not bucket.holds(self.number):
            what, current = f"logits of round {self.number} of the bucket of {bucket.batch} requests", bucket.rounds - 1
            error = core.StaleOutputError(f"{what}: round {current}, or a pass behind it, has overwritten it")
            error.what, error.held, error.current = what, self.number, current
            raise error
        return bucket.logits[rows].to("cpu", torch.float32)

    def _of_seats(
        self, offsets: torch.Tensor, arrays: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the parts of the arrays that belong to the requests' seats, with their offsets."""
        seats = self.seats
        if isinstance(seats, range):  # every request of the launch is still in the batch
            return offsets[: len(seats) + 1], arrays
        ends: list[int] = offsets.tolist()
        index = torch.tensor([i for seat in seats for i in range(ends[seat], ends[seat + 1])], dtype=torch.int64)
        counts = [ends[seat + 1] - ends[seat] for seat in seats]
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32), tuple(a[index] for a in arrays)

    @cached_property
    def _faulty(self) -> list[bool]:
        """True for each request whose scores from the target were not finite."""
        faults: list[int] = self._found["faults"].tolist()
        return [faults[seat] != 0 for seat in self.seats]

    @property
    def lost(self) -> bool:
        return not self.bucket.holds(self.number) and any(self._faulty)

    @cached_property
    def faults(self) -> list[tuple[core.NonFiniteError, int]]:
        """Errors of requests whose root has draft scores without a distribution, and their sound draft KV positions."""
        if self.host_trees is not None:
            return list(self.host_faults)
        if not self.variant.levels:
            return []
        sound: list[int] = self._found["sound"].tolist()
        bad = [i for i, seat in enumerate(self.seats) if self.drafted(i) and sound[seat] == 0]
        logits = self.bucket.launches.root_logits if self.bucket.holds(self.number) else None
        scores = [None if logits is None else logits[self.seats[i]].cpu() for i in bad]
        return [(_bad_root(i, row), self._sound_until(i)) for i, row in zip(bad, scores, strict=True)]

    def _sound_until(self, request: int) -> int:
        root = self.batch.requests[request].head.root
        if isinstance(root, BlockRoot):
            return root.sound
        return root.start if isinstance(root, DeviceRoot) else self.batch.lens[request]

    def likeliest(self, requests: Sequence[int], count: int) -> list[tuple[list[int], list[list[int]]]] | None:
        if not self.bucket.holds(self.number):
            return None  # a later round or pass may have overwritten the logits
        return likeliest(self.trees, self.starts, self.bucket.logits, requests, count)

    @cached_property
    def _depths(self) -> list[int]:
        """The depth to which each seat drafted."""
        depths: list[int] = self._found["depths"].tolist()
        return depths

    def drafted(self, request: int) -> bool:
        """Return whether the request drafted. If so, the head has already run over its accepted tokens."""
        return self.variant.levels > 0 and self._depths[self.seats[request]] > 0

    def root(self, request: int) -> DeviceRoot | None:
        """Return the root behind the request's accepted tokens, if the head has run over them."""
        if not self.drafted(request):
            return None
        return DeviceRoot(self.batch.seqs[request].row, self.batch.lens[request])


def _bad_root(request: int, logits: torch.Tensor | None) -> core.NonFiniteError:
    """Return the error of a root whose logits cannot be drafted from.

    Args:
        logits: the root's logits; ``None`` if a later round has overwritten them.
    """
    error = None if logits is None or bool(logits.isneginf().all()) else non_finite("draft logits", logits)
    if error is None:
        value, index = ("all -inf", 0) if logits is not None else ("not finite", -1)
        error = core.NonFiniteError(f"draft logits: {value} at index {index}")
        error.kind, error.what, error.value, error.index = "NonFinite", "draft logits", value, index
    error.request = request
    return error
