"""The round's logic: prefill, plain decoding, and the speculative round.

A pass takes pages by a lease before it writes anything, commits the lease, and only then changes its requests. If the
pass fails, every request is as it was. A device may run ahead of the host. The lease then has the pages of all rounds
in flight, and each round is committed when it is collected (`flight`). If one request cannot go on (NaN scores), that
request ends with its error and the pass goes on without it. `Executor` does the device's part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from specrs import _specrs as core
from specrs.engine.config import EngineConfig
from specrs.engine.drafting.decisions import Drafting
from specrs.engine.drafting.gathering import Gathering, HostTrees
from specrs.engine.drafting.levels import tiers
from specrs.engine.drafting.plans import RoundOutcome, RoundPlan
from specrs.engine.drafting.sources import HEAD, Sources
from specrs.engine.drafting.trees import Drafted, traced
from specrs.engine.request.batch import Batch
from specrs.engine.request.logprobs import TokenBytes, TokenLogprobs, of_draws, of_rows
from specrs.engine.request.request import FinishReason, Passed, Request
from specrs.engine.request.traces import DraftTree, trees_of
from specrs.engine.rounds.executor import Executor, Pass, Verified
from specrs.engine.rounds.flight import Flight
from specrs.engine.rounds.head import Head
from specrs.engine.rounds.observer import RoundObserver
from specrs.engine.rounds.pages import Pages
from specrs.sampling_params import PROCESSED

_LEAST_SCORED, _MOST_SCORED = 16, 128


class Runner:
    """Runs passes over batches of requests.

    Attributes:
        executor: the device that runs the passes.
        pages: the pages of all requests.
        head: runs the draft head; ``None`` without a head.
        drafting: decides which requests draft.
        observers: are told the events of every round.
        spell: gives a token's bytes; ``None`` without a tokenizer.
        scored_rows: the most prompt rows of one pass that give logits: the rows of a round, but from 16 to 128.
    """

    def __init__(
        self, executor: Executor, pool: core.Pool, config: EngineConfig, geometry: core.Geometry, vocab_size: int
    ) -> None:
        self.executor, self.config, self.geometry = executor, config, geometry
        self.observers: list[RoundObserver] = []
        self.spell: TokenBytes | None = None
        drafts = executor.drafts
        most = config.nodes if drafts is not None or config.sources else 1
        sizes = tiers(most) if executor.launched else None
        gathering = Gathering(Sources(config.sources, vocab_size), most, config.deepest, sizes)
        unseen = executor.launched and not (drafts is not None and drafts.visible)
        page, head = config.page_size, drafts is not None
        self.drafting = Drafting(geometry.shape, page, head, gathering, unseen, executor.tail, executor.clock)
        self.drafting.cools = drafts is not None and not (executor.launched or drafts.catches_up)
        self.head = None if drafts is None else Head(drafts, self.drafting, self.observers)
        self.pages = Pages(pool, config, geometry, executor.copy, drafts is not None)
        rows = geometry.max_batch * most
        self.scored_rows = min(max(rows, _LEAST_SCORED), _MOST_SCORED)
        self._flight: Flight | None = None
        self._collected: list[Passed] = []  # results that no caller has received yet

    def calibrate(self) -> None:
        """Measure the passes for the cost model, if one decides (some hundred milliseconds at worst)."""
        if self.drafting.drafts and self.config.adaptive:
            self.drafting.price(self.executor.policy(self.pages))

    def admit(self, request: Request) -> None:
        """Give the request a row of the page table. The head follows it if it can."""
        request.head.followed &= self.head is not None
        self.pages.admit(request)
        if request.head.followed and not self.drafting.follows(request):
            request.give_up_drafts(request.head.shared)

    def release(self, request: Request) -> None:
        """Take back the request's pages; it may be admitted again."""
        self.pages.release(request)

    def end(self, request: Request) -> None:
        """Take back the pages of a request that has ended, and forget the request.

        Unless the request was aborted, offer its full pages to later requests first.
        """
        if request.row is not None and request.finish_reason is not FinishReason.ABORT:
            self.pages.share_prefix(request)
        self.pages.release(request)
        self.drafting.forget(request)

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> list[Passed]:
        """Write the KV of the next ``n`` tokens of each request, and draw the first token after a complete prompt."""
        batch, counts = Batch([r for r, _ in chunks]), [n for _, n in chunks]
        # The last position of a new prompt gives its first token. A resumed request already knows its next token.
        drawing = [i for i, r in enumerate(batch) if r.committed + counts[i] == len(r.tokens)]
        lease = self.pages.lease(batch, counts)
        # An error of a kernel may belong to a round in flight, so an error gives up the flight too.
        with _naming(batch.requests), self._abandoning(), lease:
            prefilled = self.executor.prefill(batch, counts, drawing)
            drawn = prefilled.drawn
            prompts = [self._prompt_logprobs(r, i, n, prefilled) for i, (r, n) in enumerate(chunks)]
            firsts = [
                self._logprobs(batch.requests[i], i, prefilled, [counts[i] - 1], first)
                for i, (first, _) in zip(drawing, drawn, strict=True)
            ]
            lease.commit([n + more for n, more in zip(batch.lens, counts, strict=True)])
        passed = []
        for (r, n), scored in zip(chunks, prompts, strict=True):
            r.committed += n
            if r.prompt_logprobs is not None:
                r.prompt_logprobs += scored
        for i, (first, error), scored in zip(drawing, drawn, firsts, strict=True):
            r = batch.requests[i]
            passed.append(r.commit(first, round_=False, error=error, logprobs=scored))
        if self.head is not None:
            started = self.drafting.clock()
            try:
                with self._abandoning():
                    self.head.keep(batch, prefilled, [range(n) for n in counts])
                    self.head.after_prefill([r for r in batch if r.finish_reason is None])
            except BaseException:
                self._collected += passed  # the requests already have their tokens
                raise
            entered = [r for r in batch if r.ready and r.head.followed]
            self.drafting.entered(entered, self.drafting.clock() - started)
        for r in batch:
            if r.committed >= len(r.tokens) - 1 and r.finish_reason is None:
                self.pages.share_prefix(r)
        return passed

    def _logprobs(
        self, r: Request, i: int, passed: Pass, rows: Sequence[int], tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Return the log-probabilities of tokens that rows of a request's pass gave, if the request wants them."""
        if r.params.logprobs is None or not tokens:
            return []
        logits, most = passed.logits(i, rows[: len(tokens)]), r.params.logprobs
        if r.params.logprobs_mode == PROCESSED:
            return of_draws(logits, tokens, most, r.draws.sampler, self.spell)
        return of_rows(logits, tokens, most, self.spell)

    def _prompt_logprobs(self, r: Request, i: int, count: int, prefilled: Pass) -> list[TokenLogprobs]:
        """Return the log-probabilities of the prompt's tokens that follow the rows of a chunk."""
        rows, most = r.scored_rows(count), r.params.prompt_logprobs
        if not rows or most is None:
            return []
        first = r.committed + 1
        tokens = r.tokens[first + rows.start : first + rows.stop]
        return of_rows(prefilled.logits(i, rows), tokens, most, self.spell)

    def round(self, reqs: Sequence[Request], stays: bool = True) -> list[Passed]:
        """Draft a tree for each request, verify it, and commit the accepted tokens.

        If rounds are in flight, this collects the oldest one. A round of another batch has to wait until all rounds in
        flight are collected. The result may have several entries for one request, in order.

        Args:
            reqs: the batch.
            stays: True if the next round is likely to have the same batch; if False, no round is launched ahead.
        """
        if self._collected:
            return self._news()
        if self._flight is not None:
            if self.observers or not self._flight.carries(list(reqs)):
                return self.collect()
            return self._advance(self._flight, stays)
        batch = Batch(reqs)
        return self._advance(self._launch(batch, self.drafting.plan(batch)), stays)

    def collect(self) -> list[Passed]:
        """Collect every round in flight. The result begins with the rounds that a failed step had collected."""
        if self._flight is not None:
            with _naming(self._flight.requests), self._abandoning():
                while self._flight is not None:
                    self._flight.take_following()
                    self._collect(self._flight)
        return self._news()

    def abandon(self) -> None:
        """Give up the rounds in flight. Their requests are as the last collected round left them."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            try:
                self.executor.abandon(flight.requests)
            finally:
                flight.lease.rollback()

    def close(self) -> None:
        """Give up the rounds in flight, and let go of the device's memory. Nothing runs after this call."""
        try:
            self.abandon()
        finally:
            try:
                self.drafting.gathering.close()
            finally:
                self.executor.close()
            self.warn()

    def draft_bytes(self) -> int:
        """Return the bytes of memory that the sources of drafts report to hold."""
        return self.drafting.gathering.sources.bytes()

    def warn(self) -> None:
        """Warn the user of drafters that have failed. No pass runs now, so a warning may raise."""
        self.drafting.gathering.sources.warn()

    def _news(self) -> list[Passed]:
        news, self._collected = self._collected, []
        return news

    def _launch(self, batch: Batch, plan: RoundPlan) -> Flight:
        """Launch a round: lease its pages, launch its drafts, and launch the target's pass over the drafts."""
        plan, lease, need = self._round_lease(plan)
        longest, observers = self.config.deepest + 1 if plan.drafts else 1, list(self.observers)
        self._flight = flight = Flight(batch.requests, lease, batch.lens, max(need), longest, observers)
        with _naming(batch.requests), self._abandoning():
            self.drafting.catch_up(plan.drafting, len(batch))
            for o in observers:
                positions = [n + more for n, more in zip(batch.lens, need, strict=True)]
                o.reserved(batch.requests, positions, speculative=plan.drafts)
            drafted: Drafted | None = plan.trees
            if plan.head is not None and self.head is not None:
                drafted = self.head.draft(plan)
            verified = self.executor.decode(batch) if drafted is None else self.executor.verify(batch, drafted)
        flight.rounds.append((plan, verified))
        flight.trees = drafted if isinstance(drafted, HostTrees) else plan.trees
        hosted = drafted is not None and drafted.trees is not None
        waits = hosted or bool(observers) or any(r.needs_sync for r in batch)
        flight.ahead = self.executor.ahead and not waits
        return flight

    def _round_lease(self, plan: RoundPlan) -> tuple[RoundPlan, core.Lease, list[int]]:
        """Lease the pages of a round. Returns its plan, the lease, and how many positions each request may write.

        Drafts that the host made do not push out other requests: if there are no pages for them, the plan drops them.
        """
        need = plan.positions(self.geometry.alloc_len_per_decode)
        try:
            return plan, self.pages.lease(plan.batch, need), need
        except core.PoolExhaustedError:
            if plan.trees is None:
                raise
        return self._round_lease(replace(plan, trees=None))

    def _advance(self, flight: Flight, stays: bool = True) -> list[Passed]:
        """Launch rounds ahead if possible, and collect the oldest round.

        If a request has ended, collect all rounds: its pages stay leased as long as rounds are in flight.
        """
        with _naming(flight.requests), self._abandoning():
            flight.launch_ahead(self.executor, self.drafting, stays)
            self._collect(flight)
        return self.collect() if flight.dropped else self._news()

    def _collect(self, flight: Flight) -> None:
        """Commit the tokens that the oldest round accepted, and learn from the outcome of its drafts."""
        batch, rows = flight.batch()
        plan, verified = flight.rounds.popleft()
        verified = verified.of(batch, rows)
        if not rows:
            verified.wait()  # else the next batch would be told of what the device noticed in this round
            if not flight.rounds:
                flight.lease.commit(flight.lens)
                self._flight = None
            return
        if verified.lost:
            self.abandon()
            self._collect(self._launch(batch, RoundPlan(batch)))  # nothing runs behind it before its scores are read
            return
        passed = self._commit(flight, batch, rows, verified)
        began, flight.ended = flight.ended, self.drafting.clock()
        if self.head is not None and not flight.rounds:
            self.head.after_round(batch, [plan.head is not None and plan.head[row] for row in rows])
            if plan.head is not None and not self.drafting.launched:
                self.drafting.spent = self.drafting.clock() - flight.ended, plan.drafting
        for o in flight.observers:
            o.ended()
        if began is None and not flight.ahead:
            began = plan.began  # else a device has waited for the plan of the flight's first round
        seconds = None if began is None else flight.ended - began
        self.drafting.observe(RoundOutcome(plan, flight.trees, rows, passed, verified, seconds))

    def _commit(self, flight: Flight, batch: Batch, rows: Sequence[int], verified: Verified) -> list[Passed]:
        """Give each request the tokens that a round accepted. No request changes before all results are read."""
        accepts, lease, lens = verified.accepts, flight.lease, list(flight.lens)
        paths, drawn, errors = accepts.paths, accepts.tokens, accepts.errors
        trees = self._traced(flight.trees, batch, rows, verified, paths)  # shows whole paths, before any cut
        cuts = _cut(batch, paths, drawn, errors)
        logprobs = [self._logprobs(r, i, verified, paths[i], drawn[i]) for i, r in enumerate(batch)]
        for o in flight.observers:
            o.verified(verified.trees, accepts)
        self.executor.commit(batch, lease, verified)
        # A request that keeps fewer tokens than its path has ended, and gives its pages back. So count whole paths.
        for row, n, path in zip(rows, batch.lens, paths, strict=True):
            lens[row] = n + len(path)
        if flight.rounds:
            lease.advance(lens)
        else:
            lease.commit(lens)
            self._flight = None
        flight.lens = lens
        # No request has changed up to here. From here to the head's features, nothing is called that can fail.
        for error, sound in verified.faults:
            if batch.requests[error.request].head.followed:  # rounds in flight report the same fault again
                batch.requests[error.request].give_up_drafts(sound, error)
        passed = [
            r.commit(tokens, round_=True, error=error, cut=cut, logprobs=scored, tree=trees.get(i))
            for i, (r, tokens, error, cut, scored) in enumerate(zip(batch, drawn, errors, cuts, logprobs, strict=True))
        ]
        for p in passed:
            p.request.committed += p.kept
        flight.dropped |= {row for row, p in zip(rows, passed, strict=True) if p.finished}
        self._collected += passed
        kept = [p.kept for p in passed]
        if self.head is not None:
            self.head.keep(batch, verified, [path[:n] for path, n in zip(paths, kept, strict=True)])
            for r, cut in zip(batch, cuts, strict=True):
                if cut:
                    r.head.root = None  # the head may have run beyond what stands
        for o in flight.observers:
            o.committed(kept)
        return passed

    def _traced(
        self, hosted: HostTrees | None, batch: Batch, rows: Sequence[int], verified: Verified,
        paths: Sequence[Sequence[int]],
    ) -> dict[int, DraftTree]:  # fmt: skip
        """Return the trees of the requests that want to see them. Reads nothing if no request does."""
        wanted = [i for i, r in enumerate(batch) if r.params.trace]
        if not wanted:
            return {}
        names = self.drafting.gathering.names
        if hosted is None:
            return dict(zip(wanted, trees_of(verified.trees, wanted, paths, HEAD), strict=True))
        drafts = hosted.drafts
        if verified.origins is not None:
            found = traced(verified, [drafts[row] for row in rows], wanted, paths, names)
            return dict(zip(wanted, found, strict=True))
        made = [(drafts[rows[i]], paths[i]) for i in wanted]
        trees = [DraftTree.of(tree.tokens, tree.parents, path, names, tree.sources) for tree, path in made]
        return dict(zip(wanted, trees, strict=True))

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Give up the rounds in flight if the block raises."""
        try:
            yield
        except BaseException as error:
            with _noted(error):
                self.abandon()
            raise


def _cut(
    batch: Batch,
    paths: list[list[int]],
    drawn: list[list[int]],
    errors: list[core.NonFiniteError | core.GrammarFailedError | None],
) -> list[bool]:
    """Cut each path where a request's tokens no longer stand, and return which were cut. The next round draws the token
    behind these again, as if the path had ended here."""
    cuts = [False] * len(batch)
    for i, r in enumerate(batch):
        stand = r.draws.standing(drawn[i], len(paths[i]))
        if stand < len(paths[i]):
            paths[i], drawn[i], errors[i], cuts[i] = paths[i][:stand], drawn[i][:stand], None, True
    return cuts


@contextmanager
def _noted(error: BaseException) -> Iterator[None]:
    """Attach an exception of the block to ``error`` as a note, so that cleaning up never hides the first error.

    Cleaning up fails if the device is gone, for example.
    """
    try:
        yield
    except Exception as other:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"giving up what was in flight: {other}")


@contextmanager
def _naming(batch: Sequence[Request]) -> Iterator[None]:
    """Put the request's id into an error of a pass, because the core only knows the request's row in the batch. If
    calls are nested, the innermost one knows the batch of the pass."""
    try:
        yield
    except core.SpecrsError as error:
        row = getattr(error, "request", None)
        if isinstance(row, int) and 0 <= row < len(batch) and not hasattr(error, "row"):
            name = batch[row].asked_id
            error.row, error.request = row, name  # type: ignore[attr-defined]
            error.args = (f"{error} (row {row} of the batch is request {name})",)
        raise
