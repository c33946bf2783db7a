"""The passes of a step: prefill, plain decoding, and the speculative round, over models, pool and planner.

A pass takes pages by a lease before it writes anything. Where a pass fails (exhausted pool), the lease rolls back and
every request is as it was before the pass. Where one request cannot go on (NaN scores), the pass goes on without it:
that request ends with its error. A draft head that gives NaN costs its request the drafts, nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, ParamSpec, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from specrs import _specrs as core
from specrs.backends import AttentionBackend, Capabilities
from specrs.capsule.recorder import RoundRecorder
from specrs.engine.config import EngineConfig
from specrs.engine.costs import PLAIN, SPECULATIVE, Costs, Pace, PassCost
from specrs.engine.policy import LOOK_BACK, SpeculationGate, TreePolicy
from specrs.engine.request import Committed, Request
from specrs.models.eagle3 import Eagle3Head
from specrs.models.features import FeatureRows, Features, gather
from specrs.models.llama import LlamaModel

_CALIBRATED_ROWS = (1, 2, 4, 8, 16, 32, 64)
_CALIBRATION_RUNS = 7
_CALIBRATED_CONTEXT = 256  # tokens before the rows: attention has its share in what a row costs
_MAX_LAG = 256  # features held for a request that decodes plainly before its draft KV is brought up to date
_OBSERVED = 4  # of so many plain rounds, one is timed


_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Drafted:
    """Trees to verify, and what the cost model made of them (nothing where the tree's shape is given)."""

    trees: core.TreeBatch
    scores: list[list[float]]  # of each request, cumulative log-probabilities of its draft nodes
    cost: float  # modelled seconds of the whole round


@dataclass(frozen=True)
class Passed:
    """What a pass gave one request."""

    request: Request
    tokens: list[int]
    committed: Committed


class Runner:
    """Runs passes over batches of requests; owns the KV caches, the pool and the planner."""

    def __init__(
        self, target: LlamaModel, head: Eagle3Head | None, config: EngineConfig, geometry: core.Geometry
    ) -> None:
        assert config.num_pages is not None
        self.target, self.head, self.config, self.geometry = target, head, config, geometry
        self.shape = geometry.shape
        pages = config.num_pages + 1  # page 0 is the sink
        self.pool = core.Pool(pages, config.page_size, config.max_batch, geometry.row_pages)
        self.planner = _planner(geometry, self.pool, config.backend)
        dtype = getattr(torch, config.kv_dtype)
        self.cache = target.new_cache(pages, config.page_size, dtype)
        self.draft_cache = head.new_cache(pages, config.page_size, dtype) if head is not None else None
        self.policy: TreePolicy | None = None
        self.gates: dict[int, SpeculationGate] = {}
        self.watch: Callable[[core.TreeBatch, core.Accepts], None] | None = None
        self.recorder: RoundRecorder | None = None
        self._in_passes = 0.0  # seconds
        self._plain_rounds = 0
        self._observing = True  # passes are timed
        self._beams: core.DraftBeams | None = None
        if head is not None:
            self._beams = core.DraftBeams(config.max_batch, self.shape, head.d2t, target.config.vocab_size)
        self._borrowers: list[Request] = []  # whose root_logits and root_hidden are the head's own memory

    # -- target passes ------------------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> list[Passed]:
        """Write the KV of the next ``n`` tokens of each request; draw the first token where a prompt is complete."""
        reqs = [r for r, _ in chunks]
        starts, counts = [r.committed for r in reqs], [n for _, n in chunks]
        tokens = [t for r, n in chunks for t in r.tokens[r.committed : r.committed + n]]
        ends = list(accumulate(counts))
        # A fresh prompt yields its first token with its last position; a resumed request knows its root already.
        drawing = [i for i, r in enumerate(reqs) if r.committed + counts[i] == len(r.tokens)]
        for r in reqs:
            # What others may share has draft KV; a prompt for itself alone needs none where the head does not follow.
            if self.policy is not None and not self.config.prefix_cache and not self._gate(r).follows and r.followed:
                r.give_up_drafts(r.draft_valid)
        with _naming(reqs), self._lease(reqs, counts) as lease:
            plan = self.planner.extend([r.seq for r in reqs], starts, counts)
            rows = torch.tensor([ends[i] - 1 for i in drawing], dtype=torch.int64)
            aux = self._new_features(reqs, len(tokens))
            logits, _ = self.target.forward(torch.tensor(tokens), plan, self.cache, aux, rows)
            drawn = [_draw(reqs[i], logits[j]) for j, i in enumerate(drawing)]
            lease.commit([r.committed + n for r, n in chunks])
        passed = []
        for r, n in chunks:
            r.committed += n
        for i, (first, error) in zip(drawing, drawn, strict=True):
            passed.append(Passed(reqs[i], first, reqs[i].commit(first, round_=False, error=error)))
        self._remember(reqs, aux, [list(range(e - n, e)) for e, n in zip(ends, counts, strict=True)])
        self._draft_write([r for r in reqs if r.finish_reason is None])
        for r in reqs:
            if r.committed >= len(r.tokens) - 1:
                going = r.followed and r.finish_reason is None
                if self.policy is not None and going and not self._gate(r).follows:
                    self._draft_write([r], 0)
                    r.give_up_drafts(r.committed)
                if self.config.prefix_cache:
                    self.share_prefix(r)
        return passed

    def decode(self, reqs: Sequence[Request]) -> list[Passed]:
        """One token for each request, without drafts."""
        self._plain_rounds += 1
        self._observing = self._plain_rounds % _OBSERVED == 0
        started, self._in_passes = time.perf_counter(), 0.0
        trees = core.TreeBatch.from_parents([[-1]] * len(reqs), [[r.tokens[-1]] for r in reqs])
        with _naming(reqs), self._lease(reqs, [1] * len(reqs)) as lease:
            if self.recorder is not None:
                self.recorder.reserved(reqs, [r.committed + 1 for r in reqs], speculative=False)
            plan = self.planner.decode([r.seq for r in reqs], [r.committed for r in reqs])
            passed, aux, _ = self._verify(reqs, trees, plan, lease)
        self._remember(reqs, aux, [[i] for i in range(len(reqs))])
        self._draft_write([r for r in reqs if r.finish_reason is None and r.lag >= _MAX_LAG])
        if self.recorder is not None:
            self.recorder.ended()
        if self.policy is not None:
            if self._observing:
                self.policy.costs.overhead.observe(PLAIN, time.perf_counter() - started - self._in_passes)
            for r in reqs:
                self._gate(r).plain_round()
        return passed

    def round(self, reqs: Sequence[Request]) -> list[Passed]:
        """Draft a tree for each request, verify it, commit what was accepted."""
        if self.head is None or max(r.max_depth for r in reqs) == 0:
            return self.decode(reqs)
        drafting = self._drafting(reqs)
        if not any(drafting):
            return self.decode(reqs)
        self._observing = True
        behind = [r for r, d in zip(reqs, drafting, strict=True) if d and r.root_logits is None]
        started, self._in_passes = time.perf_counter(), 0.0
        need = self.geometry.alloc_len_per_decode
        with _naming(reqs), self._lease(reqs, [need] * len(reqs)) as lease:
            if self.recorder is not None:
                self.recorder.reserved(reqs, [r.committed + need for r in reqs], speculative=True)
            self._draft_write(behind)
            self._draft_extend(behind)
            drafted = self._draft(reqs, drafting)
            plan = self.planner.verify([r.seq for r in reqs], [r.committed for r in reqs], drafted.trees)
            passed, aux, paths = self._verify(reqs, drafted.trees, plan, lease)
        first = 0
        rows = []
        for size, path, p in zip(drafted.trees.sizes, paths, passed, strict=True):
            rows.append([first + node for node in path[: p.committed.kept]])
            first += size
        self._remember(reqs, aux, rows)
        self._draft_extend([r for r, d in zip(reqs, drafting, strict=True) if d and r.finish_reason is None])
        self._draft_write([r for r in reqs if r.finish_reason is None and r.lag >= _MAX_LAG])
        if self.recorder is not None:
            self.recorder.ended()
        if self.policy is not None:
            self.policy.costs.overhead.observe(SPECULATIVE, time.perf_counter() - started - self._in_passes)
            if all(r.error is None for r in reqs):  # a walk cut short says nothing of drafts
                self._learn(passed, drafted, drafting)
        return passed

    def _verify(
        self, reqs: Sequence[Request], trees: core.TreeBatch, plan: core.Plan, lease: core.Lease
    ) -> tuple[list[Passed], FeatureRows | None, list[list[int]]]:
        """Run the target over the nodes of trees, as planned, and commit what it accepts."""
        seqs, lens = [r.seq for r in reqs], [r.committed for r in reqs]
        tokens = from_dlpack(trees.tokens)
        aux = self._new_features(reqs, len(tokens))
        logits, _ = self._timed("target", len(tokens), self.target.forward, tokens, plan, self.cache, aux, None)
        accepts = core.verify(trees, logits, [r.sampler for r in reqs], lens)
        if self.watch is not None:
            self.watch(trees, accepts)
        if self.recorder is not None:
            self.recorder.verified(trees, accepts)
        moves = self.planner.commit(lease, seqs, lens, accepts)
        core.kv_move(self.cache, moves)
        paths = accepts.paths
        # Whole paths: where a request keeps less, it has ended, and gives its pages back.
        lease.commit([n + len(path) for n, path in zip(lens, paths, strict=True)])
        # Nothing fails from here on; up to here, no request has changed.
        passed = [
            Passed(r, drawn, r.commit(drawn, round_=True, error=error))
            for r, drawn, error in zip(reqs, accepts.tokens, accepts.errors, strict=True)
        ]
        for p in passed:
            p.request.committed += p.committed.kept
        if self.recorder is not None:
            self.recorder.committed([p.committed.kept for p in passed])
        return passed, aux, paths

    # -- draft passes -------------------------------------------------------------------------------------------

    def _draft(self, reqs: Sequence[Request], drafting: Sequence[bool]) -> Drafted:
        """Draft trees for those of ``reqs`` that are ``drafting``, whose draft KV is up to date; roots for others."""
        assert self.head is not None and self.draft_cache is not None and self._beams is not None
        head, cache, beams = self.head, self.draft_cache, self._beams
        seqs, lens = [r.seq for r in reqs], [r.committed for r in reqs]
        beams.start(_stack([r.root_logits for r in reqs], beams.draft_vocab))
        hidden = _stack([r.root_hidden for r in reqs], head.config.hidden_size)
        for error in beams.faults:  # its hidden state was sound, and so is its draft KV
            reqs[error.request].give_up_drafts(reqs[error.request].committed, error)
        depths = [r.max_depth if d and r.followed else 0 for r, d in zip(reqs, drafting, strict=True)]
        limit = self._limit(reqs, drafting)
        if self.geometry.layout == "holey":
            core.kv_move(cache, self.planner.tail_copies(seqs, lens))  # what whole pages bring along before a branch
        steps = 0
        while steps < min(self.shape.steps, max(depths)) - 1 and self._deepen(reqs, beams, depths, steps + 1, limit):
            plan = self.planner.draft(seqs, lens, steps, beams, self.config.branches_attend)
            if self.recorder is not None:
                self.recorder.drafted(beams)
            tokens = from_dlpack(beams.tokens)
            # The only beam of a request continues itself.
            inputs = hidden if self.shape.topk == 1 else hidden.index_select(0, from_dlpack(beams.parents))
            logits, hidden = self._timed("draft_step", len(tokens), head.step, tokens, inputs, plan, cache)
            beams.advance(logits)
            steps += 1
        return self._finish(reqs, beams, depths, steps, limit)

    def _deepen(
        self, reqs: Sequence[Request], beams: core.DraftBeams, depths: list[int], levels: int, limit: float
    ) -> bool:
        if self.policy is None:
            return True
        each = zip(reqs, beams.scores(), depths, strict=True)
        live = [(self._gate(r).kind, scores) for r, scores, depth in each if depth > levels]
        return self.policy.deepen(len(depths), levels, live, limit)

    def _finish(
        self, reqs: Sequence[Request], beams: core.DraftBeams, depths: list[int], steps: int, limit: float
    ) -> Drafted:
        roots = [r.tokens[-1] for r in reqs]
        most = [self.shape.draft_tokens] * len(reqs)
        trees = beams.finish(roots, depths, most)
        if self.policy is None:
            return Drafted(trees, [], 0.0)
        costs, batch = self.policy.costs, len(reqs)
        scores = _draft_scores(trees)
        nodes = [(s, self._gate(r).kind) for r, some in zip(reqs, scores, strict=True) for s in some]
        nodes.sort(key=lambda node: -node[0])
        drafting = costs.drafting(batch, batch * self.shape.topk, steps)
        choice = self.policy.choose(batch, nodes, drafting, limit)
        if choice.nodes < len(nodes):
            trees = beams.finish(roots, depths, most, choice.min_score)
            scores = _draft_scores(trees)
        return Drafted(trees, scores, drafting + costs.target.at(sum(trees.sizes)))

    def _draft_extend(self, reqs: Sequence[Request]) -> None:
        """Run the head over the features that wait, so that draft KV, logits and hidden state reach the root."""
        reqs = [r for r in reqs if r.pending]
        if self.head is None or self.draft_cache is None or not reqs:
            return
        self._keep_borrowed()
        counts, starts = [r.lag for r in reqs], [r.draft_valid for r in reqs]
        # The draft's entry at position p pairs the target's feature of p with the token at p + 1.
        tokens = [t for r, s in zip(reqs, starts, strict=True) for t in r.tokens[s + 1 : r.committed + 1]]
        plan = self.planner.extend([r.seq for r in reqs], starts, counts)
        if self.recorder is not None:
            self.recorder.extended([r.seq for r in reqs], starts, counts)
        rows = torch.tensor([end - 1 for end in accumulate(counts)])
        aux = gather(p for r in reqs for p in r.pending)
        logits, hidden = self._timed(
            "draft_extend", len(tokens), self.head.extend, torch.tensor(tokens), aux, plan, self.draft_cache, rows
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

    def _look_back(self, r: Request) -> int:
        """Bring a request's drafts up to date, and count the tokens among its last `LOOK_BACK` that were first choices
        of the head."""
        assert self.head is not None and self.draft_cache is not None
        self._draft_write([r], LOOK_BACK + 1)
        start = r.draft_valid
        tokens = r.tokens[start + 1 : r.committed + 1]
        plan = self.planner.extend([r.seq], [start], [len(tokens)])
        self._keep_borrowed()
        logits, hidden = self.head.extend(torch.tensor(tokens), gather(r.pending), plan, self.draft_cache)
        if (error := _non_finite("draft hidden state", hidden.flatten())) is not None:
            r.give_up_drafts(start, error)
            return 0
        choices = self.head.target_ids[logits[:-1].argmax(1)].tolist()
        r.drop_pending()
        r.root_logits, r.root_hidden = logits[-1], hidden[-1]
        self._borrowers = [r]
        return sum(a == b for a, b in zip(choices, tokens[1:], strict=True))

    def _draft_write(self, reqs: Sequence[Request], keep: int = 1) -> None:
        """Write the draft KV of all features that wait but each request's last ``keep``, whose logits are wanted."""
        reqs = [r for r in reqs if r.lag > keep]
        if self.head is None or self.draft_cache is None or not reqs:
            return
        seqs, starts, counts = [r.seq for r in reqs], [r.draft_valid for r in reqs], [r.lag - keep for r in reqs]
        tokens = [t for r, s, n in zip(reqs, starts, counts, strict=True) for t in r.tokens[s + 1 : s + 1 + n]]
        plan = self.planner.extend(seqs, starts, counts)
        if self.recorder is not None:
            self.recorder.extended(seqs, starts, counts)
        features = gather(p for r in reqs for p in r.oldest(r.lag - keep))
        written = self.head.write(torch.tensor(tokens), features, plan, self.draft_cache)
        sound = math.isfinite(written.sum().item())
        end = 0
        for r, start, n in zip(reqs, starts, counts, strict=True):
            first, end = end, end + n
            error = None if sound else _non_finite("draft KV", written[first:end].flatten())
            if error is not None:
                r.give_up_drafts(start, error)
            else:
                r.drop_oldest(r.lag - keep)

    def _keep_borrowed(self) -> None:
        """Before a pass of the head: it overwrites what requests have borrowed."""
        for r in self._borrowers:
            if not r.pending and r.root_logits is not None and r.root_hidden is not None:
                r.root_logits, r.root_hidden = r.root_logits.clone(), r.root_hidden.clone()
        self._borrowers = []

    def _remember(self, reqs: Sequence[Request], aux: FeatureRows | None, rows: Sequence[Sequence[int]]) -> None:
        """Keep the target's features of newly committed positions until the head has run over them."""
        if aux is None:
            return
        for r, index in zip(reqs, rows, strict=True):
            if index and r.followed:
                r.wait(Features(aux, index))

    # -- pages --------------------------------------------------------------------------------------------------

    @property
    def round_positions(self) -> int:
        """Positions behind the committed ones that a round may write, per request."""
        return self.geometry.alloc_len_per_decode if self.head is not None else 1

    def most_positions(self, request: Request) -> int:
        """Most row positions that a request that runs alone ever has reserved, from its prompt to its last round.

        Its last token's KV is never written, so before a round at most ``max_total - 2`` positions are committed. A
        round of one token is decoded plainly; at most ``max_total - 3`` are committed before one that drafts.
        """
        most = request.ending.max_total
        drafts = most - request.prompt_len >= 3  # prefill draws a token, and the first round may draw two
        return max(most - 1, most - 3 + self.round_positions if drafts else 0)

    def has_room(self, admitted: Sequence[Request]) -> bool:
        """Whether the pages that can be had take the prompts of admitted requests and then a round of all of them."""
        page, need = self.config.page_size, 0
        for r in admitted:
            positions = max(r.committed, r.prefill_target) + self.round_positions
            need += -(-positions // page) - -(-r.committed // page)  # without a lease it has pages of what is committed
        stats = self.pool.stats()
        return stats["free_pages"] + stats["evictable_pages"] >= need

    def admit(self, request: Request) -> None:
        """Give the request a row of the page table, sharing the pages of a cached prefix of its tokens."""
        if self.config.prefix_cache:
            # At least one position is computed: its logits, or its features for the draft, are wanted.
            request.admit(*self.pool.cache_lookup(request.tokens[: request.prefill_target - 1]))
        else:
            request.admit(self.pool.create(), 0)

    def release(self, request: Request) -> None:
        """Take the request's pages back."""
        if request.row is not None:
            self.pool.release([request.row])
            request.row = None
        request.committed = 0
        self.gates.pop(request.request_id, None)

    def share_prefix(self, request: Request) -> None:
        """Offer the full pages of what is computed and sound (draft KV included) to later requests."""
        valid = request.committed if self.head is None else request.draft_valid
        if valid > 0 and request.error is None:
            self.pool.cache_insert(request.seq, request.tokens[:valid])

    def _lease(self, reqs: Sequence[Request], extra: Sequence[int]) -> core.Lease:
        lease = self.pool.reserve([(r.seq, r.committed + n) for r, n in zip(reqs, extra, strict=True)])
        copies = lease.copies
        if len(copies):
            core.kv_move(self.cache, copies)
            if self.draft_cache is not None:
                core.kv_move(self.draft_cache, copies)
        return lease

    # -- cost model ---------------------------------------------------------------------------------------------

    def _new_features(self, reqs: Sequence[Request], rows: int) -> FeatureRows | None:
        """Memory for the features of a pass over ``rows`` rows; ``None`` where nobody can use them."""
        memory = self.target.features
        if self.head is None or memory is None or not any(r.followed for r in reqs):
            return None
        return memory.rows(rows)

    def _gate(self, request: Request) -> SpeculationGate:
        assert self.policy is not None
        gate = self.gates.get(request.request_id)
        if gate is None:
            gate = self.gates[request.request_id] = self.policy.gate(request.params.temperature > 0)
        return gate

    def _drafting(self, reqs: Sequence[Request]) -> list[bool]:
        """Which requests' next round should draft."""
        if self.policy is None:
            return [r.followed for r in reqs]
        return self.policy.drafting([self._account(r, len(reqs)) for r in reqs])

    def _account(self, r: Request, batch: int) -> float | None:
        """What a request may lose to drafts; ``None`` for one that cannot draft, or has not looked back yet."""
        assert self.policy is not None
        if not r.followed:
            return None
        gate = self._gate(r)
        if r.root_logits is not None:
            return gate.account
        if r.lag <= LOOK_BACK or gate.account < (price := self.policy.look_back(batch)):
            return None
        gate.looked_back(self._look_back(r), self.policy.stake(1, 1), price)
        if not gate.follows:
            r.give_up_drafts(r.draft_valid)
        return gate.account if r.followed else None

    def _limit(self, reqs: Sequence[Request], drafting: Sequence[bool]) -> float:
        """Seconds that a round may take."""
        if self.policy is None:
            return math.inf
        return self.policy.limit(len(reqs), [self._gate(r).account for r, d in zip(reqs, drafting, strict=True) if d])

    def _timed(
        self,
        kind: Literal["target", "draft_step", "draft_extend"],
        rows: int,
        run: Callable[_P, _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T:
        """Run a pass and let the cost model see what it took."""
        if self.policy is None or not self._observing:
            return run(*args, **kwargs)
        started = time.perf_counter()
        result = run(*args, **kwargs)
        seconds = time.perf_counter() - started
        cost: PassCost = getattr(self.policy.costs, kind)
        cost.observe(rows, seconds)
        self._in_passes += seconds
        return result

    def _learn(self, passed: Sequence[Passed], drafted: Drafted, drafting: Sequence[bool]) -> None:
        """Let policy and gates see a speculative round. The requests that drafted share the time that it took more."""
        assert self.policy is not None
        batch, drawn = len(passed), sum(len(p.tokens) for p in passed)
        cost = drafted.cost / self.policy.costs.plain(batch)  # in rounds of plain decoding
        extra = (cost - 1.0) * batch / sum(drafting)
        for p, drafts, scores in zip(passed, drafting, drafted.scores, strict=True):
            gate = self._gate(p.request)
            if drafts:
                gate.kind.learn(scores, len(p.tokens) - 1, drawn / batch / cost)
                gate.spec_round(len(p.tokens) - 1 - extra)
            else:
                gate.plain_round()

    def calibrate(self) -> None:
        """Measure the passes at a few row counts, for the cost model (some hundred milliseconds at worst)."""
        if self.head is None or not self.config.adaptive:
            return
        head, draft_cache = self.head, self.draft_cache
        assert draft_cache is not None
        config = self.config
        room = min(config.max_context_len or 1, config.page_size * (config.num_pages or 1))
        most = min(_CALIBRATED_ROWS[-1], room)
        table = [n for n in _CALIBRATED_ROWS if n <= most]
        context = min(_CALIBRATED_CONTEXT, room - most)
        aux = torch.zeros(len(head.aux_layers), most, self.target.config.hidden_size)
        hidden = torch.zeros(most, head.config.hidden_size)
        seq = self.pool.create()
        last = torch.zeros(1, dtype=torch.int64)

        def target(n: int, plan: core.Plan) -> None:
            self.target.forward(torch.arange(n) % self.target.config.vocab_size, plan, self.cache, True, None)

        def step(n: int, plan: core.Plan) -> None:
            head.step(torch.zeros(n, dtype=torch.int64), hidden[:n], plan, draft_cache)

        def extend(n: int, plan: core.Plan) -> None:
            head.extend(torch.zeros(n, dtype=torch.int64), [a[:n] for a in aux], plan, draft_cache, last)

        pace = Pace()  # one machine

        def measure(run: Callable[[int, core.Plan], None]) -> PassCost:
            seconds = []
            for n in table:
                plan = self.planner.extend([seq], [context], [n])
                run(n, plan)  # makes the buffers of this row count
                times = []
                for _ in range(_CALIBRATION_RUNS):
                    started = time.perf_counter()
                    run(n, plan)
                    times.append(time.perf_counter() - started)
                seconds.append(min(times))  # what else the machine does has the smallest part in it
            return PassCost(table, seconds, pace)

        with self.pool.reserve([(seq, context + most)]):
            self.policy = TreePolicy(Costs(measure(target), measure(step), measure(extend)))
        self.pool.release([seq])


def _planner(geometry: core.Geometry, pool: core.Pool, backend: AttentionBackend) -> core.Planner:
    """The planner of a backend's format."""
    capabilities = Capabilities.of(backend)
    return core.Planner(geometry, pool, format=capabilities.format, mask=capabilities.mask)


def _stack(rows: list[torch.Tensor | None], columns: int) -> torch.Tensor:
    """What the last draft_extend gave for each request's root, as rows; zeros for a request that does not draft."""
    some = [torch.zeros(columns) if row is None else row for row in rows]
    return some[0][None] if len(some) == 1 else torch.stack(some)


def _draw(request: Request, logits: torch.Tensor) -> tuple[list[int], core.NonFiniteError | None]:
    """The first token of a request, or why there is none."""
    try:
        return [request.sampler.draw(logits, len(request.tokens), [])], None
    except core.NonFiniteError as error:
        return [], error


def _draft_scores(trees: core.TreeBatch) -> list[list[float]]:
    """Of each request, its draft nodes' scores, best first."""
    scores: list[float] = from_dlpack(trees.scores).tolist()
    ends = list(accumulate(trees.sizes))
    # Without its root, whose score is 0.
    return [sorted(scores[end - n + 1 : end], reverse=True) for n, end in zip(trees.sizes, ends, strict=True)]


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


@contextmanager
def _naming(reqs: Sequence[Request]) -> Iterator[None]:
    """Errors of a pass over ``reqs`` name a request by its id, where the core names its row of the batch."""
    try:
        yield
    except core.SpecrsError as error:
        row = getattr(error, "request", None)
        if isinstance(row, int) and 0 <= row < len(reqs):
            error.request = reqs[row].request_id  # type: ignore[attr-defined]
            error.args = (f"{error} (row {row} of the batch is request {reqs[row].request_id})",)
        raise
