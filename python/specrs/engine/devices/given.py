"""The host's inputs to a round that it launches: the requests, their samplers, and trees if the host has made some.

A launch begins with their copy to the device. Rounds behind the launched round get nothing from the host: they begin
with values on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from specrs import _specrs as core
from specrs.engine.devices.memory import STOPS, BucketMemory, Fields, HostInputs, Roots
from specrs.operands import SamplerArrays

_LEAST_EDITS = 64
_INV_TEMPERATURE, _PENALISED = 7, 11  # words of a `SamplerRow`: 0 if greedy; 0 if there are no penalties


class Seat(NamedTuple):
    """A request of a launch.

    Attributes:
        row: row of the page table.
        length: committed length.
        root: the root's token.
        depth: the depth to which the request drafts; 0 for no drafts.
        limit: the committed length at which the request ends.
        first_page: the column of the page table at which the head's KV begins.
        stops: the tokens at which the request ends.
        heat: the factor on scores of the request's drafts, if a head of blocks drafts them.
    """

    row: int
    length: int
    root: int
    depth: int
    limit: int
    first_page: int = 0
    stops: Collection[int] = ()
    heat: float = 1.0


class Given:
    """The host's side of a bucket's inputs.

    Attributes:
        inputs: what `upload` copies.
        edits: sampling's edits of tokens: tokens, biases and counts. The key is the room for edits.
        samplers: operands of sampling, by the room for edits.
        live: number of requests of the last launch.
    """

    def __init__(self, memory: BucketMemory, roots: Roots | None, shape: core.TreeShape) -> None:
        self._memory, self._nothing, self._steps = memory, 0 if roots is None else roots.nothing, shape.steps
        self.inputs = HostInputs(memory.given_layout, memory.arrays["given"])
        first, (last, words) = memory.given_layout.places["rows"][0], memory.given_layout.places["root_to"]
        self._seats = self.inputs.pinned[first : last + words].view(-1, memory.batch).numpy()
        self._trees = HostInputs(memory.trees_layout, memory.arrays["host trees"])
        self.edits: dict[int, HostInputs] = {}
        self.samplers: dict[int, SamplerArrays] = {}
        self._drawn_by: tuple[list[core.Sampler], int | None] = [], None  # the samplers that still hold, and their room
        self.live = 0

    def set_requests(self, seats: Sequence[Seat], nodes: int) -> None:
        """Set the requests of the next launch.

        In rounds behind it, a request that drafts does so as deep as the rounds' variants have levels.

        Args:
            nodes: the most nodes of a tree.
        """
        self.live = live = len(seats)
        nothing, numbers, stops = self._nothing, [], []
        for row, length, root, depth, limit, page, ends, _ in seats:
            few = list(ends)[:STOPS]  # the host checks the others
            stops += few + [0] * (STOPS - len(few))
            cap, at, to = (self._steps, row, row) if depth > 0 else (0, nothing, -1)
            numbers.append((row, length, root, depth, limit, page, cap, nodes, len(few), 0, at, to))
        # The fields of `given_layout` from `rows` on; those of an empty seat are dead values.
        self._seats[:, :live] = np.array(numbers, np.int32).reshape(live, len(self._seats)).T
        self._seats[:, live:] = np.array((-1, 0, 0, 0, 0, 0, 0, 0, 0, 0, nothing, -1), np.int32)[:, None]
        self.inputs.fill("stops", stops, 0)
        self.inputs.fill("tree_offsets", range(live + 1), live)
        self.inputs.fill("heats", np.array([seat.heat for seat in seats], np.float32).view(np.int32), 0)
        self.inputs.fill("live", [live], 0)

    def set_trees(self, trees: core.TreeBatch) -> None:
        """Set the trees that the next launch verifies, one for each live request. The variant must have host trees."""
        offsets = [*accumulate(trees.sizes, initial=0)]
        self._trees.fill("tree_offsets", offsets, offsets[-1])
        for name, values, dead in (
            ("tokens", trees.tokens, 0),
            ("parents", trees.parents, -1),
            ("scores", trees.scores, 0),
        ):
            self._trees.fill(f"tree_{name}", np.from_dlpack(values).view(np.int32), dead)
        self._trees.upload()

    def set_samplers(self, samplers: Sequence[core.Sampler], moving: bool) -> int | None:
        """Set the samplers of the next launch, and return the variant's ``edits``.

        Args:
            samplers: the samplers of the live requests.
            moving: True if a sampler has a grammar, whose mask differs from round to round.
        """
        if samplers == self._drawn_by[0]:
            return self._drawn_by[1]
        self._drawn_by = [], None  # until the new ones are whole
        arrays = {name: np.from_dlpack(a) for name, a in core._device_samplers(list(samplers)).items()}
        edits = [arrays[name] for name in ("edit_tokens", "edit_biases", "edit_outputs")]
        words = arrays["rows"].view(np.int32)
        used = len(edits[0])
        sampled, penalised = (bool(words[:, column].any()) for column in (_INV_TEMPERATURE, _PENALISED))
        room = None
        if used or sampled or penalised:
            self.inputs.fill("sampling", words.reshape(-1), 0)
            for name in ("edit_begins", "edit_counts"):
                self.inputs.fill(name, arrays[name], 0)
            room = _LEAST_EDITS
            while room < used:
                room *= 2
            if room not in self.edits:
                self._make_room(room)
            if used:
                for part, values in zip(self.edits[room].host.values(), edits, strict=True):
                    part[:used] = values.view(np.int32)
                self.edits[room].upload()
        # Samplers without penalties need no new upload for the same requests.
        self._drawn_by = ([] if penalised or moving else list(samplers)), room
        return room

    def least_room(self) -> int:
        """Return the ``edits`` of a variant that samples with few edits, and allocate its memory if necessary."""
        if _LEAST_EDITS not in self.edits:
            self._make_room(_LEAST_EDITS)
        return _LEAST_EDITS

    def _make_room(self, room: int) -> None:
        """Allocate memory for ``room`` edits."""
        given, layout = self._memory.given, Fields(tokens=room, biases=room, outputs=room)
        there = torch.zeros(layout.words, dtype=torch.int32, device=given["rows"].device)
        self.edits[room] = HostInputs(layout, there)
        tokens, biases, outputs = self.edits[room].there.values()
        self.samplers[room] = SamplerArrays(
            rows=given["sampling"].view(torch.int64).view(self._memory.batch, 6), edit_begins=given["edit_begins"],
            edit_counts=given["edit_counts"], edit_tokens=tokens, edit_biases=biases.view(torch.float32),
            edit_outputs=outputs,
        )  # fmt: skip

    def upload(self) -> None:
        """Copy the inputs to the device, except trees and edits, whose copies have already been started."""
        self.inputs.upload()
