"""The round's logic: prefill, plain decoding, and the speculative round.

A pass takes pages by a lease before it writes anything, commits the lease, and only then changes its requests: where
it fails, every request is as it was. A device may run ahead: then the lease spans its rounds, and each is committed
when it is collected (`flight`). Where one request cannot go on (NaN scores), the pass goes on without it: that
request ends with its error. The device's part stands behind `Executor`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specrs import _specrs as core
from specrs.engine.config import EngineConfig
from specrs.engine.drafting import trees as united
from specrs.engine.drafting.ahead import tiers
from specrs.engine.drafting.decisions import Drafting, RoundOutcome, RoundPlan
from specrs.engine.drafting.gathering import Gathering
from specrs.engine.drafting.sources import HEAD, Sources
from specrs.engine.request.batch import Batch, Passed
from specrs.engine.request.logprobs import TokenBytes, TokenLogprobs, of_draws, of_rows
from specrs.engine.request.request import FinishReason, Request
from specrs.engine.request.traces import DraftTree, trees_of
from specrs.engine.rounds.executor import Drafted, Executor, Pass, Verified
from specrs.engine.rounds.flight import Flight
from specrs.engine.rounds.head import Head
from specrs.engine.rounds.observer import RoundObserver
from specrs.engine.rounds.pages import Pages
from specrs.sampling_params import PROCESSED

_LEAST_SCORED, _MOST_SCORED = 16, 128


class Runner:
    """Runs passes over batches of requests.

    Attributes:
        executor: the device that runs them.
        pages: of all requests.
        head: runs the draft head; ``None`` without one.
        drafting: decides who drafts.
        observers: see every round.
        spell: gives a token's bytes; ``None`` without a tokenizer.
    """

    def __init__(
        self, executor: Executor, pool: core.Pool, config: EngineConfig, geometry: core.Geometry, vocab_size: int
    ) -> None:
        self.executor, self.config, self.geometry = executor, config, geometry
        self.observers: list[RoundObserver] = []
        self.spell: TokenBytes | None = None
        drafts = executor.drafts
        self.head = None if drafts is None else Head(drafts, self.observers, config.page_size)
        gathering: Gathering | None = None
        if config.sources or (drafts is not None and executor.placement.is_host):  # beside a head, what grammars force
            named = Sources(config.sources, vocab_size)
            most = geometry.shape.draft_tokens
            sizes = None if executor.placement.is_host else tiers(most)
            gathering = Gathering(named, most, config.deepest, sizes)
        self.drafting = Drafting(drafts is not None, gathering, drafts is not None and drafts.unites)
        self.pages = Pages(pool, config, geometry, executor.copy, drafts is not None)
        trees = drafts is not None or gathering is not None
        rows = geometry.max_batch * (geometry.shape.draft_tokens if trees else 1)
        #: Rows of the prompt, in one pass, whose logits are wanted: no more than rounds have memory for.
        self.scored_rows = min(max(rows, _LEAST_SCORED), _MOST_SCORED)
        self._flight: Flight | None = None
        self._collected: list[Passed] = []  # that nobody has been told of
        self._waited = 0.0  # `Executor.waited`, as collecting a round began
        self._ended: float | None = None  # when the last one had
        self._single = False  # the next round runs with none behind it

    def calibrate(self) -> None:
        """Measure the passes for the cost model, where it decides (some hundred milliseconds at worst)."""
        if (self.head is not None or self.drafting.gathering is not None) and self.config.adaptive:
            self.drafting.price(self.executor.speculation(self.pages))

    def admit(self, request: Request) -> None:
        """Give the request a row of the page table, and decide whether the head follows it.

        The head can run only where the target's features are, which no cache has. Where the prefix cache has target
        KV without draft KV, a head that may begin anywhere begins behind them. Another one's following costs the
        target's pass over those positions, into pages of the request's own, which are cached in place of the others.
        """
        self.pages.admit(request)
        if self.head is None:
            request.followed = False
        if not request.followed:
            return
        if not self.drafting.speculation.follows(request):
            request.give_up_drafts(request.draft_shared)
        elif request.draft_shared < request.committed:
            if self.drafting.speculation.tail is not None:
                request.draft_from = request.committed  # whole pages
                return
            most = request.draft_shared
            self.pages.release(request)
            self.pages.admit(request, most)

    def release(self, request: Request) -> None:
        """Take back the request's pages; it may be admitted again."""
        self.pages.release(request)

    def end(self, request: Request) -> None:
        """Take back the pages of a request that has ended, offer them to others, and close its books."""
        if request.row is not None and request.finish_reason is not FinishReason.ABORT:
            self._complete(request)
            self.pages.share_prefix(request)
        self.pages.release(request)
        self.drafting.forget(request)

    def _complete(self, r: Request) -> None:
        """Write the last entries of draft KV where they complete a page that a later request would go on from."""
        page, head = self.config.page_size, self.head
        if head is None or not self.config.prefix_cache or not r.followed or r.error is not None:
            return
        if r.committed // page > r.draft_valid // page and not r.draft_from and self.drafting.speculation.completes(r):
            head.write([r], 0)

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> list[Passed]:
        """Write the KV of the next ``n`` tokens of each request; draw the first token where a prompt is complete."""
        batch, counts = Batch([r for r, _ in chunks]), [n for _, n in chunks]
        # A fresh prompt yields its first token with its last position; a resumed request knows its root already.
        drawing = [i for i, r in enumerate(batch) if r.committed + counts[i] == len(r.tokens)]
        lease = self._prefill_lease(batch, counts)
        # What a kernel skipped may be a round's in flight, whose results then count for nothing.
        with _naming(batch.requests), self._abandoning(), lease:
            prefilled = self.executor.prefill(batch, counts, drawing, self._keeps_features(batch))
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
            passed.append(Passed(r, first, r.commit(first, round_=False, error=error, logprobs=scored)))
        if self.head is not None:
            try:
                with self._abandoning():
                    self.head.remember(batch, prefilled, [range(n) for n in counts])
                    self.head.begin([r for r in batch if r.finish_reason is None], self.drafting.speculation)
            except BaseException:
                self._collected += passed  # the requests have their tokens
                raise
            self.drafting.speculation.prefilled(batch, counts)
        for r in batch:
            if r.committed >= len(r.tokens) - 1 and r.finish_reason is None:
                self.pages.share_prefix(r)
        return passed

    def _logprobs(
        self, r: Request, i: int, passed: Pass, rows: Sequence[int], tokens: Sequence[int]
    ) -> list[TokenLogprobs]:
        """Of tokens that rows of a request's pass gave, where the request wants them."""
        if r.params.logprobs is None or not tokens:
            return []
        logits, most = passed.logits(i, rows[: len(tokens)]), r.params.logprobs
        if r.params.logprobs_mode == PROCESSED:
            return of_draws(logits, tokens, most, r.draws.sampler, self.spell)
        return of_rows(logits, tokens, most, self.spell)

    def _prompt_logprobs(self, r: Request, i: int, count: int, prefilled: Pass) -> list[TokenLogprobs]:
        """Of the prompt's tokens behind rows of a chunk."""
        rows, most = r.scored_rows(count), r.params.prompt_logprobs
        if not rows or most is None:
            return []
        first = r.committed + 1
        tokens = r.tokens[first + rows.start : first + rows.stop]
        return of_rows(prefilled.logits(i, rows), tokens, most, self.spell)

    def _prefill_lease(self, batch: Batch, counts: Sequence[int]) -> core.Lease:
        try:
            return self.pages.lease(batch, counts)
        except core.PoolExhaustedError:
            if self._flight is None:
                raise
        self._collect_flight(self._flight)  # pages for rounds that nobody has launched yet come back
        return self.pages.lease(batch, counts)

    def decode(self, reqs: Sequence[Request]) -> list[Passed]:
        """One token for each request, without drafts."""
        batch = Batch(reqs)
        return self.collect() or self._go(self._launch(batch, RoundPlan(batch)))

    def round(self, reqs: Sequence[Request], stays: bool = True) -> list[Passed]:
        """Draft a tree for each request, verify it, commit what was accepted.

        Where the executor runs ahead, this collects the oldest round in flight; a round of another batch waits until
        all are collected. Each request may pass several times, in order.

        Args:
            reqs: the batch.
            stays: whether the next round is likely to be one of the same batch; else none is launched ahead.
        """
        if self._collected:
            return self._news()
        if self._flight is not None:
            if self.observers or not self._flight.carries(list(reqs)):
                return self.collect()
            self.drafting.speculation.begin(self._flight.plan.drafts, self._ended)
            return self._go(self._flight, stays)
        batch = Batch(reqs)
        return self._go(self._launch(batch, self.drafting.plan(batch)), stays)

    def collect(self) -> list[Passed]:
        """Collect every round in flight. What a failed step had collected comes too."""
        if self._flight is not None:
            self._collect_flight(self._flight)
        return self._news()

    def _collect_flight(self, flight: Flight) -> None:
        with _naming(flight.requests), self._abandoning():
            self._collect_all(flight)

    def abandon(self) -> None:
        """Give up what is in flight: its requests are as the last collected round left them."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            try:
                self.executor.abandon(flight.requests)
            finally:
                flight.lease.rollback()

    def close(self) -> None:
        """Give up what is in flight, and let go of the device's memory; nothing runs after it."""
        try:
            self.abandon()
        finally:
            try:
                if self.drafting.gathering is not None:
                    self.drafting.gathering.close()
            finally:
                self.executor.close()
            self.warn()

    def draft_bytes(self) -> int:
        """Memory that sources of drafts say they hold."""
        return 0 if self.drafting.gathering is None else self.drafting.gathering.sources.bytes()

    def warn(self) -> None:
        """Tell the user which drafters have failed; no pass runs now, so that a warning may be an error."""
        if self.drafting.gathering is not None:
            self.drafting.gathering.sources.warn()

    def _news(self) -> list[Passed]:
        news, self._collected = self._collected, []
        return news

    def _launch(self, batch: Batch, plan: RoundPlan) -> Flight:
        """Launch a round: its pages, its drafts, and the target's pass over them."""
        lease, need = self._round_lease(batch, plan)
        plan.began = time.perf_counter()
        self.drafting.speculation.begin(plan.drafts, plan.asked)
        with _naming(batch.requests), self._rolled_back(batch, lease):
            for o in self.observers:
                positions = [n + more for n, more in zip(batch.lens, need, strict=True)]
                o.reserved(batch.requests, positions, speculative=plan.drafts)
            drafted: Drafted | None = plan.trees
            if plan.head is not None and self.head is not None:
                drafted = self._draft(batch, plan, plan.head, self.head)
            if drafted is None:
                verified = self.executor.decode(batch, self._keeps_features(batch), self.drafting.speculation.timed)
            else:
                plan.steps = drafted.steps
                verified = self.executor.verify(
                    batch, drafted, self._keeps_features(batch), self.drafting.speculation.timed
                )
            single = self._single or bool(self.observers) or plan.needs_tokens or any(r.needs_sync for r in batch)
            self._single = False
            longest = self.config.deepest + 1 if plan.drafts else 1
            self._flight = flight = Flight(plan, lease, batch.lens, max(need), longest, deque([verified]), single)
        return flight

    def _round_lease(self, batch: Batch, plan: RoundPlan) -> tuple[core.Lease, list[int]]:
        """Pages for a round, and positions that each request's part of it writes. Nobody gives way to drafts that cost
        no pass: where there are no pages for them, the plan is left without."""
        need = plan.positions(self.geometry.alloc_len_per_decode)
        try:
            return self.pages.lease(batch, need), need
        except core.PoolExhaustedError:
            if plan.trees is None:
                raise
        plan.trees = None
        need = plan.positions(1)
        return self.pages.lease(batch, need), need

    def _draft(self, batch: Batch, plan: RoundPlan, drafting: list[bool], head: Head) -> Drafted:
        """The head's drafts, with those of other sources in one tree where there are any."""
        speculation, gathering, drafts = self.drafting.speculation, self.drafting.gathering, self.executor.drafts
        head.resume([r for r, d in zip(batch, drafting, strict=True) if d], speculation)
        proposals = plan.proposals
        if gathering is None or proposals is None or not proposals.nodes:
            return head.draft(batch, drafting, speculation)
        if drafts is not None and drafts.unites and speculation.given and not self.observers:
            drafted = head.draft(batch, drafting, speculation)
            if not speculation.unites(batch, drafting, proposals):
                return drafted
            hosted = gathering.trees_of(proposals)
            both = drafts.unite(drafted, hosted.trees)
            plan.beside_head = None if both is None else hosted
            return drafted if both is None else both
        if not speculation.merges:
            return head.draft(batch, drafting, speculation)
        limit = speculation.limit(batch, drafting)
        grown = head.grow(batch, drafting, speculation, limit)
        plan.trees = gathering.merge_with_head(
            batch, proposals, grown.trees, grown.steps, grown.faults, limit, speculation.costs
        )
        return plan.trees

    def _go(self, flight: Flight, stays: bool = True) -> list[Passed]:
        """Launch what can be, and collect the oldest round; all of them once a request has ended, whose pages are
        leased as long as rounds are in flight."""
        self._waited = self.executor.waited
        with _naming(flight.requests), self._abandoning():
            self._launch_ahead(flight, stays)
            self._collect(flight)
            if flight.out:
                self._collect_all(flight)
        return self._news()

    def _launch_ahead(self, flight: Flight, stays: bool) -> None:
        last = flight.rounds[-1]
        # It waits for the last round: only where that is the one to collect.
        following = self.executor.following(last) if len(flight.rounds) == 1 else None
        if following is not None:
            flight.rounds.append(following)
            return
        if not stays or flight.single or flight.last or len(flight.rounds) > 1:
            return
        most = self.executor.ahead(last)
        if most and flight.plan.head is not None:
            batch, _ = flight.batch()
            if not self.drafting.speculation.stays(batch, flight.plan.head):
                return
        while most:
            try:
                flight.lease.renew(flight.reach(most))
            except (core.PoolExhaustedError, core.ConfigError):  # of pages, of the row
                most //= 2  # fewer may fit; else those that run finish first
                continue
            copies = flight.lease.copies
            if len(copies):
                self.executor.copy(copies)
            launched = self.executor.launch(last, most)
            if launched is not None:
                flight.rounds.append(launched)
            return

    def _collect_all(self, flight: Flight) -> None:
        self.executor.request_stop()
        while flight.rounds:
            following = self.executor.following(flight.rounds[-1]) if len(flight.rounds) == 1 else None
            if following is not None:
                flight.rounds.append(following)
            self.drafting.speculation.begin(flight.plan.drafts, self._ended)
            self._collect(flight)

    def _collect(self, flight: Flight) -> None:
        """Commit what the oldest round accepted, and observe what came of its drafts."""
        verified = flight.rounds.popleft()
        batch, rows = flight.batch()
        if flight.collected or len(rows) < len(flight.requests):
            verified = self.executor.collect(verified, batch, rows)
        if rows and verified.lost:
            batch, rows, verified = self._without_lost(flight, batch, rows, verified)
        if not rows:
            self._close(flight)
            return
        observers = self.observers if flight.single else []
        passed = self._commit(flight, batch, rows, verified, observers)
        for o in observers:
            o.ended()
        self.drafting.observe(RoundOutcome(flight.plan, rows, batch, passed, verified))
        self._ended = time.perf_counter()
        if flight.rounds and not flight.last:
            spare = self.executor.waited - self._waited
            if self.drafting.tempts(*flight.batch(), flight.plan, spare):
                flight.last = True  # the next one drafts, from tokens that the host must know
                self.executor.request_stop()

    def _without_lost(
        self, flight: Flight, batch: Batch, rows: list[int], verified: Verified
    ) -> tuple[Batch, list[int], Verified]:
        """A round's results without the requests whose scores the device has lost: they meet the round again."""
        lost = set(verified.lost)
        flight.out |= {rows[i] for i in lost}
        self._single = True  # the next round, which meets it again, has the device for itself
        for i in lost:
            batch.requests[i].root = None  # the head has run over what there was
        kept = [i for i in range(len(batch)) if i not in lost]
        batch, rows = Batch([batch.requests[i] for i in kept]), [rows[i] for i in kept]
        return batch, rows, self.executor.collect(verified, batch, kept) if rows else verified

    def _commit(
        self,
        flight: Flight,
        batch: Batch,
        rows: Sequence[int],
        verified: Verified,
        observers: Sequence[RoundObserver],
    ) -> list[Passed]:
        """Give each request what a round accepted. Nothing changes a request before all of that is read."""
        accepts, lease, lens = verified.accepts, flight.lease, list(flight.lens)
        paths, drawn, errors = accepts.paths, accepts.tokens, accepts.errors
        trees = self._traced(flight, batch, rows, verified, paths)  # before a path is cut
        cuts = [False] * len(batch)
        for i, r in enumerate(batch):
            stand = r.draws.standing(drawn[i], len(paths[i]))
            if stand < len(paths[i]):
                # The token behind these is drawn again, as if the walk had ended there.
                paths[i], drawn[i], errors[i], cuts[i] = paths[i][:stand], drawn[i][:stand], None, True
        logprobs = [self._logprobs(r, i, verified, paths[i], drawn[i]) for i, r in enumerate(batch)]
        for o in observers:
            o.verified(verified.trees, accepts)
        self.executor.commit(batch, lease, verified)
        # Whole paths, or what stands of them: where a request keeps less, it has ended, and gives its pages back.
        for row, n, path in zip(rows, batch.lens, paths, strict=True):
            lens[row] = n + len(path)
        if flight.rounds:
            lease.advance(lens)
        else:
            lease.commit(lens)
            self._flight = None
        flight.lens, flight.collected = lens, flight.collected + 1
        # Nothing fails from here on; up to here, no request has changed.
        for error, sound in verified.faults:
            flight.last = True  # the next one is begun without drafts of this request
            if batch.requests[error.request].followed:  # a round in flight tells it again
                batch.requests[error.request].give_up_drafts(sound, error)
        passed = [
            Passed(r, tokens, r.commit(tokens, round_=True, error=error, cut=cut, logprobs=scored, tree=trees.get(i)))
            for i, (r, tokens, error, cut, scored) in enumerate(zip(batch, drawn, errors, cuts, logprobs, strict=True))
        ]
        for p in passed:
            p.request.committed += p.committed.kept
        flight.out |= {row for row, p in zip(rows, passed, strict=True) if p.committed.finished}
        self._collected += passed
        kept = [p.committed.kept for p in passed]
        for o in observers:
            o.committed(kept)
        if self.drafting.gathering is not None:
            self.drafting.gathering.watch(batch, verified)
        if self.head is not None and self._keeps_features(batch):  # else: most rounds of requests that gave it up
            kept_rows = [path[:n] for path, n in zip(paths, kept, strict=True)]
            self._tell_head(self.head, flight, batch, rows, verified, kept_rows, cuts)
        return passed

    def _tell_head(
        self, head: Head, flight: Flight, batch: Batch, rows: Sequence[int], verified: Verified,
        kept: Sequence[Sequence[int]], cuts: Sequence[bool],
    ) -> None:  # fmt: skip
        """Give the head the features of what each request kept, and where no later round runs, have it go on.

        Args:
            kept: rows of the pass, of each request.
            cuts: of each request, whether the head may have run beyond them.
        """
        overtaken = bool(flight.rounds)
        head.remember(batch, verified, kept, overtaken)
        for r, cut in zip(batch, cuts, strict=True):
            if cut:
                r.root = None
        if overtaken:
            return
        if flight.plan.head is not None:
            drew = [r for r, row in zip(batch, rows, strict=True) if flight.plan.head[row] and r.finish_reason is None]
            head.extend(drew, self.drafting.speculation)
        head.catch_up(batch, self.drafting.speculation)

    def _traced(
        self, flight: Flight, batch: Batch, rows: Sequence[int], verified: Verified, paths: Sequence[Sequence[int]]
    ) -> dict[int, DraftTree]:
        """The trees of those requests of a round that want to see them; reads nothing where none does."""
        wanted = [i for i, r in enumerate(batch) if r.params.trace]
        if not wanted:
            return {}
        hosted, beside = flight.plan.trees, flight.plan.beside_head
        if beside is not None and self.drafting.gathering is not None:
            drafts = [beside.drafts[row] for row in rows]
            found = united.traced(verified, drafts, wanted, paths, self.drafting.gathering.names)
            return dict(zip(wanted, found, strict=True))
        if hosted is None or self.drafting.gathering is None:
            return dict(zip(wanted, trees_of(verified.trees, wanted, paths, HEAD), strict=True))
        names, drafts = self.drafting.gathering.names, hosted.drafts
        made = [(drafts[rows[i]], paths[i]) for i in wanted]
        trees = [DraftTree.of(tree.tokens, tree.parents, path, names, tree.sources) for tree, path in made]
        return dict(zip(wanted, trees, strict=True))

    def _close(self, flight: Flight) -> None:
        """A round that says nothing of any request: where it is the last, the flight has ended."""
        if not flight.rounds:
            flight.lease.commit(flight.lens)
            self._flight = None

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """An error gives up what is in flight."""
        try:
            yield
        except BaseException as error:
            with _noted(error):
                self.abandon()
            raise

    @contextmanager
    def _rolled_back(self, batch: Batch, lease: core.Lease) -> Iterator[None]:
        """A round that cannot be launched gives its pages back."""
        try:
            yield
        except BaseException as error:
            with _noted(error):
                try:
                    self.executor.abandon(batch.requests)
                finally:
                    lease.rollback()
            raise

    def _keeps_features(self, batch: Batch) -> bool:
        """Whether a pass has to keep features: the head follows one of its requests."""
        if self.head is None:
            return False
        for r in batch.requests:  # noqa: SIM110 - twice a round, of which most follow nobody
            if r.followed:
                return True
        return False


@contextmanager
def _noted(error: BaseException) -> Iterator[None]:
    """What fails on the way out, of a device that is gone say, does not take the place of the error itself."""
    try:
        yield
    except Exception as other:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(f"giving up what was in flight: {other}")


@contextmanager
def _naming(batch: Sequence[Request]) -> Iterator[None]:
    """Errors of a pass name a request by its id, where the core names its row of the batch."""
    try:
        yield
    except core.SpecrsError as error:
        row = getattr(error, "request", None)
        if isinstance(row, int) and 0 <= row < len(batch):
            name = batch[row].asked_id
            error.request = name  # type: ignore[attr-defined]
            error.args = (f"{error} (row {row} of the batch is request {name})",)
        raise
