"""The executor that plans, picks drafts and accepts on the host. Models compute wherever their memory lies.

Plans, trees, samplers and beams are objects of the Rust core. If a pass ran on another device, its logits are copied to
the host, and the host decides by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.engine.config import BlockEngineConfig, EngineConfig
from specrs.engine.devices.calibration import calibrated, thread_clock
from specrs.engine.devices.head_inputs import Entries, HostDrafted, KeptInputs, ScoredPass, begun, non_finite
from specrs.engine.devices.host_blocks import HostBlocks, HostMasks
from specrs.engine.drafting.chooser import TAIL, TreePolicy
from specrs.engine.drafting.trees import Drafted
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Request
from specrs.engine.rounds.executor import Deepen, Verified
from specrs.engine.rounds.pages import Pages
from specrs.models.features import FeatureRows
from specrs.models.head import Head, StepDrafter
from specrs.models.llama import LlamaModel
from specrs.models.ops import KvMemory


@dataclass(eq=False)
class HostPrefilled(ScoredPass):
    drawn: list[tuple[list[int], core.NonFiniteError | core.GrammarFailedError | None]]
    kept: dict[int, int]  # maps a row of the pass to its row in `scores`

    def logits(self, request: int, rows: Sequence[int]) -> torch.Tensor:
        first = self.starts[request]
        return self.scores[[self.kept[first + row] for row in rows]]


@dataclass(eq=False)
class HostVerified(ScoredPass):
    trees: core.TreeBatch
    accepts: core.Accepts
    faults: Sequence[tuple[core.NonFiniteError, int]]
    lost: bool = False
    origins: None = None
    ahead = 0

    def of(self, batch: Batch, rows: Sequence[int]) -> HostVerified:
        return self

    def wait(self) -> None:
        pass

    def following(self, goes_on: bool) -> None:
        return None

    def likeliest(self, requests: Sequence[int], count: int) -> list[tuple[list[int], list[list[int]]]]:
        return core.likeliest(self.trees, self.scores, requests, count)


@dataclass(eq=False)
class Root:
    """The head's result for a request's root: logits and hidden state. Both lie in the head's memory until `keep`."""

    logits: torch.Tensor
    hidden: torch.Tensor

    def keep(self) -> None:
        """Copy the logits and the hidden state, before the head's next pass overwrites them."""
        self.logits, self.hidden = self.logits.clone(), self.hidden.clone()


class HostExecutor:
    """Runs one target, and perhaps a head.

    Attributes:
        target: the target model. Its attention decides the format of plans.
        cache: the target's KV, in the pool's pages.
        drafts: the head's passes; ``None`` without a head.
        launched: as `Executor.launched`.
        ahead: as `Executor.ahead`.
        clock: as `Executor.clock`.
    """

    launched = ahead = False

    def __init__(
        self,
        target: LlamaModel,
        head: Head | None,
        config: EngineConfig,
        geometry: core.Geometry,
        pool: core.Pool,
    ) -> None:
        self.target, self.clock = target, thread_clock()
        assert config.kv_dtype is not None
        capabilities, dtype = target.ops.attention.capabilities, getattr(torch, config.kv_dtype)
        self.planner = core.Planner(geometry, pool, format=capabilities.format, mask=capabilities.mask)
        self.cache = target.new_cache(pool.num_pages, pool.page_size, dtype)
        self.drafts: HostDrafts | HostBlocks | HostMasks | None = None
        if head is not None:
            self.drafts = self._drafts(head, head.new_cache(pool.num_pages, pool.page_size, dtype), config)

    def _drafts(self, head: Head, cache: KvMemory, config: EngineConfig) -> HostDrafts | HostBlocks | HostMasks:
        """Return the object that runs the head's passes."""
        if head.passes == "block":
            return HostBlocks(head, cache, self.planner, config)
        if isinstance(config, BlockEngineConfig):
            return HostMasks(head, cache, self.planner, config)
        return HostDrafts(head, cache, self.planner, config, self.target.config.vocab_size)

    def entered(self) -> AbstractContextManager[object]:
        return torch.inference_mode(False)

    @property
    def tail(self) -> int | None:
        if self.planner.format != "native":  # lists of other formats begin at a first position
            return None
        return self.planner.geometry.max_context_len if isinstance(self.drafts, HostBlocks) else TAIL

    def policy(self, pages: Pages) -> TreePolicy:
        head = None if self.drafts is None else (self.drafts.head, self.drafts.cache)
        return calibrated(self.target, self.cache, head, self.planner, pages, self.clock)

    def copy(self, moves: core.Moves) -> None:
        move = self.target.ops.dense.kv_move
        move(self.cache, moves)
        if self.drafts is not None:
            move(self.drafts.cache, moves)

    def prefill(self, batch: Batch, counts: Sequence[int], drawing: Sequence[int]) -> HostPrefilled:
        each = zip(batch, batch.lens, counts, strict=True)
        tokens = [t for r, start, n in each for t in r.tokens[start : start + n]]
        ends = list(accumulate(counts))
        plan = self.planner.extend(batch.seqs, batch.lens, counts)
        starts = [end - n for end, n in zip(ends, counts, strict=True)]
        kept = [ends[i] - 1 for i in drawing]
        for r, start, n in zip(batch, starts, counts, strict=True):
            kept += [start + row for row in r.scored_rows(n)]
        rows = torch.tensor(kept, dtype=torch.int64)
        logits, aux = self._logits(torch.tensor(tokens), plan, self._wants_features(batch), rows)
        drawn = [_draw(batch.requests[i], logits[j]) for j, i in enumerate(drawing)]
        return HostPrefilled(aux, starts, logits, drawn, {row: i for i, row in enumerate(kept)})

    def decode(self, batch: Batch) -> Verified:
        trees = core.TreeBatch.from_parents([[-1]] * len(batch), [[r.tokens[-1]] for r in batch])
        plan = self.planner.decode(batch.seqs, batch.lens)
        return self._verify(batch, trees, plan, range(len(batch)), ())

    def verify(self, batch: Batch, drafted: Drafted) -> Verified:
        trees = drafted.trees
        assert trees is not None
        plan = self.planner.verify(batch.seqs, batch.lens, trees)
        starts = list(accumulate(trees.sizes, initial=0))
        return self._verify(batch, trees, plan, starts, drafted.faults)

    def _verify(
        self,
        batch: Batch,
        trees: core.TreeBatch,
        plan: core.Plan,
        starts: Sequence[int],
        faults: Sequence[tuple[core.NonFiniteError, int]],
    ) -> HostVerified:
        tokens = from_dlpack(trees.tokens)
        logits, aux = self._logits(tokens, plan, self._wants_features(batch), None)
        accepts = core.verify(trees, logits, [r.sampler for r in batch], batch.lens)
        return HostVerified(aux, starts, logits, trees, accepts, faults)

    def commit(self, batch: Batch, lease: core.Lease, verified: Verified) -> None:
        moves = self.planner.commit(lease, batch.seqs, batch.lens, verified.accepts)
        self.target.ops.dense.kv_move(self.cache, moves)

    def launch(self, verified: Verified, rounds: int, levels: int) -> Verified | None:
        return None

    def abandon(self, requests: Sequence[Request]) -> None:
        """Do nothing, because a failed round of the host has changed nothing."""

    def close(self) -> None:
        """Do nothing, because only this object keeps models and caches."""

    def _logits(
        self, tokens: torch.Tensor, plan: core.Plan, features: bool, rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, FeatureRows | None]:
        """Run a pass of the target, and return its logits on the host, and features if they are wanted."""
        memory = self.target.features
        aux = memory.rows(tokens.numel()) if features and memory is not None else None
        return self.target.ops.dense.host(self.target.forward(tokens, plan, self.cache, aux, rows)[0]), aux

    def _wants_features(self, batch: Batch) -> bool:
        """Return whether the head may soon run over positions of any of the requests."""
        return self.drafts is not None and any(r.head.followed and r.head.warm for r in batch)


class HostDrafts(KeptInputs):
    """Runs the passes of a head that drafts step by step.

    Attributes:
        head: the model.
        cache: the head's KV, in the same pages as the target's.
        beams: the round's candidates.
    """

    catches_up = False
    visible = True

    def __init__(
        self,
        head: StepDrafter,
        cache: KvMemory,
        planner: core.Planner,
        config: EngineConfig,
        vocab_size: int,
    ) -> None:
        super().__init__(planner)
        geometry = planner.geometry
        self.head, self.cache = head, cache
        self.beams = core.DraftBeams(geometry.max_batch, geometry.shape, head.d2t, vocab_size)
        self._geometry, self._mode = geometry, config.branches_attend
        self._levels = config.head_shape.steps  # deeper sources may raise the geometry's steps, but not these
        self._lent: list[tuple[Request, Root]] = []  # roots that lie in the head's own memory
        # The root of requests that do not draft.
        self._no_root = Root(torch.zeros(self.beams.draft_vocab), head.placement.empty(head.config.hidden_size).zero_())

    def extend(self, requests: Sequence[Request]) -> Sequence[object]:
        self._keep_lent()
        entries = [Entries(r, r.head.end, r.lag) for r in requests]
        inputs = self._inputs(entries)
        rows = torch.tensor([end - 1 for end in accumulate(e.count for e in entries)])
        logits, hidden = self._extend(*inputs, rows)
        # A hidden state depends on all draft KV before it. So if it is sound, all of that draft KV is sound.
        sound = core.all_finite(self.head.dense.host(hidden))
        found: list[object] = []
        for i, r in enumerate(requests):
            error = None if sound else non_finite("draft hidden state", hidden[i])
            found.append(self._lend(r, logits[i], hidden[i]) if error is None else error)
        return found

    def draft(self, batch: Batch, depths: Sequence[int], deepen: Deepen | None) -> Drafted:
        beams, shape = self.beams, self._geometry.shape
        roots = [self._root(r) for r in batch]
        beams.start(_stack([root.logits for root in roots]))
        hidden = _stack([root.hidden for root in roots])
        # The hidden states of faulty requests were sound, so all of their draft KV is sound too.
        depths, faults = list(depths), [(error, batch.lens[error.request]) for error in beams.faults]
        for error, _ in faults:
            depths[error.request] = 0
        if self._geometry.layout == "holey":
            # A branch begins with whole pages, so copy the tail of the prefix there.
            self.head.dense.kv_move(self.cache, self._planner.tail_copies(batch.seqs, batch.lens))
        deepest = min(self._levels, max(depths))
        levels = min(1, deepest)
        # The head may begin behind the end of a request that it does not draft for.
        firsts = [r.head.first if depth else 0 for r, depth in zip(batch, depths, strict=True)]
        while levels < deepest and (deepen is None or deepen(beams, depths, levels)):
            plan = self._planner.draft(batch.seqs, batch.lens, levels - 1, beams, self._mode)
            plan = begun(plan, firsts)
            tokens = from_dlpack(beams.tokens)
            # With one beam per request, each beam continues itself.
            inputs = hidden if shape.topk == 1 else hidden.index_select(0, from_dlpack(beams.parents).to(hidden.device))
            logits, hidden = self._step(tokens, inputs, plan)
            beams.advance(logits)
            levels += 1
        trees = beams.finish([r.tokens[-1] for r in batch], depths, [shape.draft_tokens] * len(batch))
        return HostDrafted(trees, levels, faults)

    def _extend(
        self, tokens: torch.Tensor, aux: Sequence[torch.Tensor], plan: core.Plan, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = self.head.extend(tokens, aux, plan, self.cache, rows)
        return self.head.dense.host(logits), hidden

    def _step(self, tokens: torch.Tensor, hidden: torch.Tensor, plan: core.Plan) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = self.head.step(tokens, hidden, plan, self.cache)
        return self.head.dense.host(logits), hidden

    def _lend(self, request: Request, logits: torch.Tensor, hidden: torch.Tensor) -> object:
        root = Root(logits, hidden)
        self._lent.append((request, root))
        return root

    def _root(self, request: Request) -> Root:
        return request.head.root if isinstance(request.head.root, Root) else self._no_root

    def _keep_lent(self) -> None:
        """Copy the roots that requests still use. Call this before a pass of the head, which overwrites them."""
        for request, root in self._lent:
            if request.head.root is root:
                root.keep()
        self._lent.clear()


def likeliest(
    trees: core.TreeBatch, starts: Sequence[int], logits: torch.Tensor, requests: Sequence[int], count: int
) -> list[tuple[list[int], list[list[int]]]]:
    """Compute `Verified.likeliest` of a device from the logits of all nodes.

    Args:
        starts: each request's first row, and the end of the last request's rows.
    """
    tokens, sizes = from_dlpack(trees.tokens), trees.sizes
    rows = [row for i in requests for row in range(starts[i], starts[i] + sizes[i])]
    whole = len(rows) == len(logits)
    top = (logits if whole else logits[rows]).topk(min(count, logits.shape[1])).indices.tolist()
    each, first, offsets = [], 0, [0, *accumulate(sizes)]
    for i in requests:
        each.append((tokens[offsets[i] : offsets[i] + sizes[i]].tolist(), top[first : first + sizes[i]]))
        first += sizes[i]
    return each


def _stack(rows: list[torch.Tensor]) -> torch.Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _draw(
    request: Request, logits: torch.Tensor
) -> tuple[list[int], core.NonFiniteError | core.GrammarFailedError | None]:
    """Draw the first token of a request. Returns the token, or no token and the error that prevented it."""
    try:
        return [request.sampler.draw(logits, len(request.tokens), [])], None
    except (core.NonFiniteError, core.GrammarFailedError) as error:
        return [], error
