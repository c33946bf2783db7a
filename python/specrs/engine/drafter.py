"""The head's passes: its KV behind the target's, and the trees that it drafts.

The head's entry at position p pairs the target's features of p with the token at p + 1. Features wait on their request
until the head runs over them. A head that gives NaN costs its request the drafts, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.engine.batch import Batch
from specrs.engine.observer import RoundObserver
from specrs.engine.policy import LOOK_BACK
from specrs.engine.request import Request
from specrs.engine.speculation import GivenTree
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import FeatureMemory, FeatureRows, Features, gather

_MAX_LAG = 256  # features that a request may hold before its draft KV is brought up to date


@dataclass(frozen=True)
class Drafted:
    """Trees to verify, and the draft steps that led to them."""

    trees: core.TreeBatch
    steps: int


class Drafter:
    """A head, its cache and its beams.

    Args:
        cache: of the head's one layer, over the pages of the target's.
        features: where the target's features are written (`LlamaModel.features`).
        vocab_size: of the target.
        branches_attend: how draft branches attend to each other (``draft_attention``).
        observers: shared with the runner.
    """

    def __init__(
        self,
        head: Eagle3Head,
        cache: core.KvCache,
        planner: core.Planner,
        geometry: core.Geometry,
        features: FeatureMemory,
        vocab_size: int,
        branches_attend: Literal["ancestors", "lane"],
        observers: Sequence[RoundObserver],
    ) -> None:
        self.head, self.cache = head, cache
        self.beams = core.DraftBeams(geometry.max_batch, geometry.shape, head.d2t, vocab_size)
        self._vocabulary = frozenset(head.target_ids.tolist())
        self._planner, self._geometry, self._features = planner, geometry, features
        self._mode, self._observers = branches_attend, observers
        self._borrowers: list[Request] = []  # whose root_logits and root_hidden are the head's own memory

    # -- features -----------------------------------------------------------------------------------------------

    def features(self, batch: Batch, rows: int) -> FeatureRows | None:
        """Memory for the features of a pass over ``rows`` rows; ``None`` where the head follows nobody."""
        return self._features.rows(rows) if any(r.followed for r in batch) else None

    def remember(self, batch: Batch, aux: FeatureRows | None, rows: Sequence[Sequence[int]]) -> None:
        """Keep the target's features of newly committed positions until the head has run over them."""
        if aux is None:
            return
        for r, index in zip(batch, rows, strict=True):
            if index and r.followed:
                r.wait(Features(aux, index))

    def catch_up(self, batch: Batch) -> None:
        """Write the draft KV of requests whose features have waited for long."""
        self.write([r for r in batch if r.finish_reason is None and r.lag >= _MAX_LAG])

    # -- passes -------------------------------------------------------------------------------------------------

    def write(self, reqs: Sequence[Request], keep: int = 1) -> None:
        """Write the draft KV of all features that wait but each request's last ``keep``, whose logits are wanted."""
        reqs = [r for r in reqs if r.lag > keep]
        if not reqs:
            return
        counts, starts = [r.lag - keep for r in reqs], [r.draft_valid for r in reqs]
        tokens, plan = self._plan(reqs, starts, counts)
        features = gather(p for r, n in zip(reqs, counts, strict=True) for p in r.oldest(n))
        written = self.head.write(tokens, features, plan, self.cache)
        sound = math.isfinite(written.sum().item())
        end = 0
        for r, start, n in zip(reqs, starts, counts, strict=True):
            first, end = end, end + n
            error = None if sound else _non_finite("draft KV", written[first:end].flatten())
            if error is not None:
                r.give_up_drafts(start, error)
            else:
                r.drop_oldest(n)

    def extend(self, reqs: Sequence[Request], speculation: GivenTree) -> None:
        """Run the head over the features that wait, so that draft KV, logits and hidden state reach the root."""
        reqs = [r for r in reqs if r.pending]
        if not reqs:
            return
        self._keep_borrowed()
        counts, starts = [r.lag for r in reqs], [r.draft_valid for r in reqs]
        tokens, plan = self._plan(reqs, starts, counts)
        rows = torch.tensor([end - 1 for end in accumulate(counts)])
        aux = gather(p for r in reqs for p in r.pending)
        logits, hidden = speculation.timed(
            "draft_extend", len(tokens), self.head.extend, tokens, aux, plan, self.cache, rows
        )
        # Hidden states attend to all draft KV before them: a sound one shows that all of that is sound.
        sound = math.isfinite(hidden.sum().item())
        for i, (r, start) in enumerate(zip(reqs, starts, strict=True)):
            error = None if sound else _non_finite("draft hidden state", hidden[i])
            if error is not None:
                r.give_up_drafts(start, error)
            else:
                r.drop_pending()
                r.root_logits, r.root_hidden = logits[i], hidden[i]
        self._borrowers = reqs

    def reach(self, r: Request) -> int:
        """Of a request's last `LOOK_BACK` tokens, those of the head's vocabulary."""
        return sum(token in self._vocabulary for token in r.tokens[-LOOK_BACK:])

    def look_back(self, r: Request) -> int:
        """Bring a request's drafts up to date, and count the tokens among its last `LOOK_BACK` that were first choices
        of the head."""
        self.write([r], LOOK_BACK + 1)
        if not r.followed:
            return 0
        self._keep_borrowed()
        start, count = r.draft_valid, r.lag
        tokens, plan = self._plan([r], [start], [count])
        logits, hidden = self.head.extend(tokens, gather(r.pending), plan, self.cache)
        if (error := _non_finite("draft hidden state", hidden.flatten())) is not None:
            r.give_up_drafts(start, error)
            return 0
        r.drop_pending()
        r.root_logits, r.root_hidden = logits[-1], hidden[-1]
        self._borrowers = [r]
        choices = self.head.target_ids[logits[:-1].argmax(1)]
        return int((choices == tokens[1:]).sum())

    def draft(self, batch: Batch, drafting: Sequence[bool], speculation: GivenTree) -> Drafted:
        """Draft trees for those that are ``drafting``, whose draft KV is up to date; roots for the others."""
        head, cache, beams = self.head, self.cache, self.beams
        beams.start(_stack([r.root_logits for r in batch], beams.draft_vocab))
        hidden = _stack([r.root_hidden for r in batch], head.config.hidden_size)
        for error in beams.faults:  # its hidden state was sound, and so is its draft KV
            batch.requests[error.request].give_up_drafts(batch.lens[error.request], error)
        depths = [r.max_depth if d and r.followed else 0 for r, d in zip(batch, drafting, strict=True)]
        limit = speculation.limit(batch, drafting)
        if self._geometry.layout == "holey":
            # What whole pages bring along before a branch.
            core.kv_move(cache, self._planner.tail_copies(batch.seqs, batch.lens))
        shape, steps = self._geometry.shape, 0
        while steps < min(shape.steps, max(depths)) - 1 and speculation.deepen(batch, beams, depths, steps + 1, limit):
            plan = self._planner.draft(batch.seqs, batch.lens, steps, beams, self._mode)
            for o in self._observers:
                o.drafted(beams)
            tokens = from_dlpack(beams.tokens)
            # The only beam of a request continues itself.
            inputs = hidden if shape.topk == 1 else hidden.index_select(0, from_dlpack(beams.parents))
            logits, hidden = speculation.timed("draft_step", len(tokens), head.step, tokens, inputs, plan, cache)
            beams.advance(logits)
            steps += 1
        roots, most = [r.tokens[-1] for r in batch], [shape.draft_tokens] * len(batch)
        trees = beams.finish(roots, depths, most)
        least = speculation.least_score(batch, trees, steps, limit)
        return Drafted(trees if least is None else beams.finish(roots, depths, most, least), steps)

    def _plan(
        self, reqs: Sequence[Request], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[torch.Tensor, core.Plan]:
        """Tokens and plan of the head's entries at ``counts`` positions from ``starts`` on."""
        each = zip(reqs, starts, counts, strict=True)
        tokens = torch.tensor([t for r, start, n in each for t in r.tokens[start + 1 : start + 1 + n]])
        seqs = [r.seq for r in reqs]
        plan = self._planner.extend(seqs, starts, counts)
        for o in self._observers:
            o.extended(seqs, starts, counts)
        return tokens, plan

    def _keep_borrowed(self) -> None:
        """Before a pass of the head: it overwrites what requests have borrowed."""
        for r in self._borrowers:
            if not r.pending and r.root_logits is not None and r.root_hidden is not None:
                r.root_logits, r.root_hidden = r.root_logits.clone(), r.root_hidden.clone()
        self._borrowers = []


def _stack(rows: list[torch.Tensor | None], columns: int) -> torch.Tensor:
    """What the last extend gave for each request's root, as rows; zeros for a request that does not draft."""
    some = [torch.zeros(columns) if row is None else row for row in rows]
    return some[0][None] if len(some) == 1 else torch.stack(some)


def _non_finite(what: str, row: torch.Tensor) -> core.NonFiniteError | None:
    """The error of a row that holds NaN or an infinity."""
    bad = (~row.isfinite()).nonzero()
    if not len(bad):
        return None
    index = int(bad[0])
    value = str(row[index].item())
    error = core.NonFiniteError(f"{what}: {value} at index {index}")
    error.kind, error.what, error.value, error.index = "NonFinite", what, value, index
    return error
