"""The round's logic: prefill, plain decoding, and the speculative round.

A pass takes pages by a lease before it writes anything, commits the lease, and only then changes its requests: where
it fails, every request is as it was. A device may run ahead: then the lease spans its rounds, and each is committed
when it lands (`flight`). Where one request cannot go on (NaN scores), the pass goes on without it: that
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
from specrs.engine.drafting.gathering import Gathered, Gathering, Planted
from specrs.engine.drafting.sources import HEAD, Sources
from specrs.engine.drafting.speculation import GivenTree
from specrs.engine.request.batch import Batch, Passed
from specrs.engine.request.logprobs import TokenBytes, TokenLogprobs, of_draws, of_rows
from specrs.engine.request.request import FinishReason, Request
from specrs.engine.request.traces import DraftTree, trees_of
from specrs.engine.rounds.executor import Drafted, Executor, Pass, Verified
from specrs.engine.rounds.flight import Flight
from specrs.engine.rounds.head import Drafter
from specrs.engine.rounds.observer import RoundObserver
from specrs.engine.rounds.pages import Pages
from specrs.sampling_params import PROCESSED

_LEAST_SCORED, _MOST_SCORED = 16, 128


class Runner:
    """Runs passes over batches of requests.

    Attributes:
        executor: the device that runs them.
        pages: of all requests.
        drafter: what the head is told; ``None`` without a head.
        gathering: drafts of other sources; ``None`` without any.
        speculation: whether and how far a batch drafts.
        observers: see every round.
        spell: gives a token's bytes; ``None`` without a tokenizer.
    """

    def __init__(
        self, executor: Executor, pool: core.Pool, config: EngineConfig, geometry: core.Geometry, vocab_size: int
    ) -> None:
        self.executor, self.config, self.geometry = executor, config, geometry
        self.observers: list[RoundObserver] = []
        self.spell: TokenBytes | None = None
        self.speculation: GivenTree = GivenTree()
        drafts = executor.drafts
        self.drafter = None if drafts is None else Drafter(drafts, self.observers, config.page_size)
        self.gathering: Gathering | None = None
        if config.sources or (drafts is not None and executor.placement.is_host):  # beside a head, what grammars force
            named = Sources(config.sources, vocab_size)
            most = geometry.shape.draft_tokens
            sizes = None if executor.placement.is_host else tiers(most)
            self.gathering = Gathering(named, most, config.deepest, sizes)
        self.pages = Pages(pool, config, geometry, executor.copy, drafts is not None)
        trees = drafts is not None or self.gathering is not None
        rows = geometry.max_batch * (geometry.shape.draft_tokens if trees else 1)
        #: Rows of the prompt, in one pass, whose logits are wanted: no more than rounds have memory for.
        self.scored_rows = min(max(rows, _LEAST_SCORED), _MOST_SCORED)
        self._flight: Flight | None = None
        self._landed: list[Passed] = []  # that nobody has been told of
        self._waited = 0.0  # `Executor.waited`, as a landing began
        self._ended: float | None = None  # when the last one had
        self._alone = False  # the next round runs with none behind it

    def calibrate(self) -> None:
        """Measure the passes for the cost model, where it decides (some hundred milliseconds at worst)."""
        if (self.drafter is not None or self.gathering is not None) and self.config.adaptive:
            self.speculation = adaptive = self.executor.speculation(self.pages)
            if self.gathering is not None:
                self.gathering.price(adaptive.policy.costs, adaptive.account)

    def admit(self, request: Request) -> None:
        """Give the request a row of the page table, and decide whether the head follows it.

        The head can run only where the target's features are, which no cache has. Where the prefix cache has target
        KV without draft KV, a head that may begin anywhere begins behind them. Another one's following costs the
        target's pass over those positions, into pages of the request's own, which are cached in place of the others.
        """
        self.pages.admit(request)
        if self.drafter is None:
            request.followed = False
        if not request.followed:
            return
        if not self.speculation.follows(request):
            request.give_up_drafts(request.draft_shared)
        elif request.draft_shared < request.committed:
            if self.speculation.tail is not None:
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
        self.speculation.forget(request)
        if self.gathering is not None:
            self.gathering.forget(request)

    def _complete(self, r: Request) -> None:
        """Write the last entries of draft KV where they complete a page that a later request would go on from."""
        page, drafter = self.config.page_size, self.drafter
        if drafter is None or not self.config.prefix_cache or not r.followed or r.error is not None:
            return
        if r.committed // page > r.draft_valid // page and not r.draft_from and self.speculation.completes(r):
            drafter.write([r], 0)

    def prefill(self, chunks: Sequence[tuple[Request, int]]) -> list[Passed]:
        """Write the KV of the next ``n`` tokens of each request; draw the first token where a prompt is complete."""
        batch, counts = Batch([r for r, _ in chunks]), [n for _, n in chunks]
        # A fresh prompt yields its first token with its last position; a resumed request knows its root already.
        drawing = [i for i, r in enumerate(batch) if r.committed + counts[i] == len(r.tokens)]
        lease = self._prefill_lease(batch, counts)
        # What a kernel skipped may be a round's in flight, whose results then count for nothing.
        with _naming(batch.requests), self._abandoning(), lease:
            prefilled = self.executor.prefill(batch, counts, drawing, self._follow(batch))
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
        if self.drafter is not None:
            try:
                with self._abandoning():
                    self.drafter.remember(batch, prefilled, [range(n) for n in counts])
                    self.drafter.begin([r for r in batch if r.finish_reason is None], self.speculation)
            except BaseException:
                self._landed += passed  # the requests have their tokens
                raise
            self.speculation.prefilled(batch, counts)
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
        self._land_flight(self._flight)  # pages for rounds that nobody has launched yet come back
        return self.pages.lease(batch, counts)

    def decode(self, reqs: Sequence[Request]) -> list[Passed]:
        """One token for each request, without drafts."""
        return self.land() or self._go(self._begin(Batch(reqs), None))

    def round(self, reqs: Sequence[Request], stays: bool = True) -> list[Passed]:
        """Draft a tree for each request, verify it, commit what was accepted.

        Where the executor runs ahead, this lands the oldest round in flight; a round of another batch waits until all
        have landed. Each request may pass several times, in order.

        Args:
            reqs: the batch.
            stays: whether the next round is likely to be one of the same batch; else none is launched ahead.
        """
        if self._landed:
            return self._news()
        if self._flight is not None:
            if self.observers or not self._flight.carries(list(reqs)):
                return self.land()
            self.speculation.begin(self._flight.drafting is not None, self._ended)
            return self._go(self._flight, stays)
        since, batch, drafter, drafting = time.perf_counter(), Batch(reqs), self.drafter, None
        gathered = None if self.gathering is None else self.gathering.ask(batch)
        if drafter is not None and self.speculation.awake(batch):
            asked = self.speculation.drafting(batch)
            drafting = [d and r.draws.room > 1 for r, d in zip(batch, asked, strict=True)]
        drafting = drafting if drafting and any(drafting) else None
        return self._go(self._begin(batch, drafting, gathered, since), stays)

    def land(self) -> list[Passed]:
        """Land every round in flight. What a failed step had landed comes too."""
        if self._flight is not None:
            self._land_flight(self._flight)
        return self._news()

    def _land_flight(self, flight: Flight) -> None:
        with _naming(flight.requests), self._abandoning():
            self._land_all(flight)

    def abandon(self) -> None:
        """Give up what is in flight: its requests are as the last landing left them."""
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
                if self.gathering is not None:
                    self.gathering.close()
            finally:
                self.executor.close()
            self.warn()

    def draft_bytes(self) -> int:
        """Memory that sources of drafts say they hold."""
        return 0 if self.gathering is None else self.gathering.sources.bytes()

    def warn(self) -> None:
        """Tell the user which drafters have failed; no pass runs now, so that a warning may be an error."""
        if self.gathering is not None:
            self.gathering.sources.warn()

    def _news(self) -> list[Passed]:
        news, self._landed = self._landed, []
        return news

    def _begin(
        self,
        batch: Batch,
        drafting: list[bool] | None,
        gathered: Gathered | None = None,
        since: float | None = None,
    ) -> Flight:
        """Launch a round.

        Args:
            drafting: for whom the head drafts; ``None`` for nobody.
            gathered: drafts of other sources; ``None`` without any.
            since: when the host turned to it; ``None``: now.
        """
        drafter, speculation = self.drafter, self.speculation
        alone = gathered is not None and gathered.pays
        if drafting is not None and gathered is not None and alone:
            alone = speculation.alone(batch, drafting, gathered)
            drafting = None if alone else drafting
        began = time.perf_counter()
        drafted: Drafted | None = None
        beside: Planted | None = None
        need = [1] * len(batch)
        if drafting is not None:
            need = [self.geometry.alloc_len_per_decode] * len(batch)
        elif alone and gathered is not None and self.gathering is not None:
            drafted = hosted = self.gathering.planted(gathered)
            need = [len(tree) for tree in hosted.drafts]
        try:
            lease = self.pages.lease(batch, need)
        except core.PoolExhaustedError:
            if drafted is None:
                raise
            drafted, need = None, [1] * len(batch)  # nobody gives way to drafts that cost nothing
            lease = self.pages.lease(batch, need)
        drafts = drafting is not None or drafted is not None
        speculation.begin(drafts, since)
        with _naming(batch.requests), self._rolled_back(batch, lease):
            for o in self.observers:
                positions = [n + more for n, more in zip(batch.lens, need, strict=True)]
                o.reserved(batch.requests, positions, speculative=drafts)
            if drafting is not None and drafter is not None:
                drafted, beside = self._drafted(batch, drafting, drafter, gathered)
            if drafted is None:
                verified = self.executor.decode(batch, self._follow(batch), speculation.timed)
            else:
                verified = self.executor.verify(batch, drafted, self._follow(batch), speculation.timed)
            planted = drafted if isinstance(drafted, Planted) else None
            longest = self.config.deepest + 1 if drafts else 1
            waits = planted is not None or beside is not None  # the next trees need its tokens
            single = self._alone or bool(self.observers) or waits or any(r.alone for r in batch)
            self._alone = False
            steps = 0 if drafted is None else drafted.steps
            self._flight = flight = Flight(
                batch.requests, lease, batch.lens, max(need), longest, drafting, steps, deque([verified]), planted,
                beside, single, began=began,
            )  # fmt: skip
        return flight

    def _drafted(
        self, batch: Batch, drafting: list[bool], drafter: Drafter, gathered: Gathered | None
    ) -> tuple[Drafted, Planted | None]:
        """The head's drafts, with those of other sources in one tree where there are any; and the latter, where a
        device makes that tree."""
        speculation, gathering, drafts = self.speculation, self.gathering, self.executor.drafts
        followed = [r for r, d in zip(batch, drafting, strict=True) if d]
        drafter.resume(followed, speculation)
        if gathering is None or gathered is None or not gathered.nodes:
            return drafter.draft(batch, drafting, speculation), None
        if drafts is not None and drafts.unites and speculation.given and not self.observers:
            drafted = drafter.draft(batch, drafting, speculation)
            if not speculation.joined(batch, drafting, gathered):
                return drafted, None
            planted = gathering.planted(gathered)
            both = drafts.beside(drafted, planted.trees)
            return (drafted, None) if both is None else (both, planted)
        if not speculation.merges:
            return drafter.draft(batch, drafting, speculation), None
        limit = speculation.limit(batch, drafting)
        grown = drafter.grow(batch, drafting, speculation, limit)
        merged = gathering.beside(batch, gathered, grown.trees, grown.steps, grown.faults, limit, speculation.costs)
        return merged, None

    def _go(self, flight: Flight, stays: bool = True) -> list[Passed]:
        """Launch what can be, and land the oldest round; all of them once a request has ended, whose pages are leased
        as long as rounds are in flight."""
        self._waited = self.executor.waited
        with _naming(flight.requests), self._abandoning():
            self._launch_ahead(flight, stays)
            self._land(flight)
            if flight.out:
                self._land_all(flight)
        return self._news()

    def _launch_ahead(self, flight: Flight, stays: bool) -> None:
        last = flight.rounds[-1]
        # It waits for the last round: only where that is the one to land.
        following = self.executor.following(last) if len(flight.rounds) == 1 else None
        if following is not None:
            flight.rounds.append(following)
            return
        if not stays or flight.alone or flight.last or len(flight.rounds) > 1:
            return
        most = self.executor.ahead(last)
        if most and flight.drafting is not None:
            batch, _ = flight.batch()
            if not self.speculation.stays(batch, flight.drafting):
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

    def _land_all(self, flight: Flight) -> None:
        self.executor.hasten()
        while flight.rounds:
            following = self.executor.following(flight.rounds[-1]) if len(flight.rounds) == 1 else None
            if following is not None:
                flight.rounds.append(following)
            self.speculation.begin(flight.drafting is not None, self._ended)
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Commit what the oldest round accepted."""
        verified = flight.rounds.popleft()
        batch, rows = flight.batch()
        if flight.landed or len(rows) < len(flight.requests):
            verified = self.executor.landing(verified, batch, rows)
        if not rows:
            self._close(flight)
            return
        lost = set(verified.lost)
        if lost:
            flight.out |= {rows[i] for i in lost}
            self._alone = True  # the next round, which meets it again, has the device for itself
            for i in lost:
                batch.requests[i].root = None  # the head has run over what there was
            kept = [i for i in range(len(batch)) if i not in lost]
            batch, rows = Batch([batch.requests[i] for i in kept]), [rows[i] for i in kept]
            verified = self.executor.landing(verified, batch, kept)
        if not rows:
            self._close(flight)
            return
        drafting = None if flight.drafting is None else [flight.drafting[row] for row in rows]
        observers = self.observers if flight.alone else []
        passed = self._commit(flight, batch, rows, verified, drafting, observers)
        for o in observers:
            o.ended()
        planted = flight.planted
        if planted is not None or drafting is not None:
            sizes = verified.trees.sizes if planted is None else [planted.trees.sizes[row] for row in rows]
            for p, nodes in zip(passed, sizes, strict=True):
                p.request.proposed += nodes - 1
                p.request.drafting_rounds += nodes > 1
        if flight.beside is not None and self.gathering is not None and drafting is not None:
            heads, hosts = united.shares(verified, passed, [flight.beside.drafts[row] for row in rows])
            self.speculation.spec_round(passed, lambda: verified.trees, drafting, flight.steps, heads)
            won = [share.accepted for share in heads]
            self.gathering.landed(passed, rows, flight.beside, self._took(flight), won, hosts)
        elif planted is not None and self.gathering is not None:
            self._settle(flight, planted, self.gathering, rows, passed, drafting)
        elif drafting is None:
            self.speculation.plain_round(batch)
        else:
            self.speculation.spec_round(passed, lambda: verified.trees, drafting, flight.steps)
        self._ended = time.perf_counter()
        if flight.rounds and not flight.last and self._tempted(flight):
            flight.last = True  # the next one drafts, from tokens that the host must know
            self.executor.hasten()

    def _settle(
        self,
        flight: Flight,
        planted: Planted,
        gathering: Gathering,
        rows: Sequence[int],
        passed: Sequence[Passed],
        drafting: Sequence[bool] | None,
    ) -> None:
        """Tell those who drafted what came of a round with drafts of the host's sources."""
        if drafting is None:
            self.speculation.spec_round(passed, lambda: planted.trees, [], 0)
            gathering.landed(passed, rows, planted, self._took(flight), None)
            return
        shares = [gathering.share(planted.head[row], p) for row, p in zip(rows, passed, strict=True)]
        self.speculation.spec_round(passed, lambda: planted.trees, drafting, flight.steps, shares)
        others = [share.accepted for share in shares]
        gathering.landed(passed, rows, planted, self._took(flight), others)

    def _took(self, flight: Flight) -> float | None:
        """Seconds of its round; ``None`` where these say nothing of others like it."""
        return None if self.speculation.cold else time.perf_counter() - flight.began

    def _tempted(self, flight: Flight) -> bool:
        """Whether the host's sources know better than the rounds that run: these are let run out then."""
        batch, _ = flight.batch()
        if self.gathering is None or not len(batch):
            return False
        gathered = self.gathering.ask(batch, spare=self.executor.waited - self._waited)
        if gathered is None or not gathered.pays:
            return False
        speculation, drafting = self.speculation, flight.drafting
        if drafting is None or speculation.merges:
            return True
        drew, drafts = [drafting[row] for row in flight.batch()[1]], self.executor.drafts
        if not any(drew):
            return False
        unites = drafts is not None and drafts.unites
        return speculation.alone(batch, drew, gathered) or (unites and speculation.joined(batch, drew, gathered))

    def _commit(
        self,
        flight: Flight,
        batch: Batch,
        rows: Sequence[int],
        verified: Verified,
        drafting: Sequence[bool] | None,
        observers: Sequence[RoundObserver],
    ) -> list[Passed]:
        accepts, faults, lease = verified.accepts, verified.faults, flight.lease
        paths, drawn, errors, lens = accepts.paths, accepts.tokens, accepts.errors, list(flight.lens)
        cuts = [False] * len(batch)
        trees = self._traced(flight, batch, rows, verified, paths)  # before a path is cut
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
        overtaken = bool(flight.rounds)
        if overtaken:
            lease.advance(lens)
        else:
            lease.commit(lens)
            self._flight = None
        flight.lens, flight.landed = lens, flight.landed + 1
        # Nothing fails from here on; up to here, no request has changed.
        for error, sound in faults:
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
        self._landed += passed
        kept = [p.committed.kept for p in passed]
        for o in observers:
            o.committed(kept)
        if self.gathering is not None:
            self.gathering.watch(batch, verified)
        if self.drafter is not None and self._follow(batch):  # else: most rounds of requests that gave it up
            self.drafter.remember(batch, verified, [p[:n] for p, n in zip(paths, kept, strict=True)], overtaken)
            for r, cut in zip(batch, cuts, strict=True):
                if cut:
                    r.root = None  # a device's head has run beyond what stands
            if drafting is not None and not overtaken:
                drew = [r for r, drafts in zip(batch, drafting, strict=True) if drafts and r.finish_reason is None]
                self.drafter.extend(drew, self.speculation)
            if not overtaken:
                self.drafter.catch_up(batch, self.speculation)
        return passed

    def _traced(
        self, flight: Flight, batch: Batch, rows: Sequence[int], verified: Verified, paths: Sequence[Sequence[int]]
    ) -> dict[int, DraftTree]:
        """The trees of those requests of a landing that want to see them; reads nothing where none does."""
        wanted = [i for i, r in enumerate(batch) if r.params.trace]
        if not wanted:
            return {}
        planted, beside = flight.planted, flight.beside
        if beside is not None and self.gathering is not None:
            drafts = [beside.drafts[row] for row in rows]
            found = united.traced(verified, drafts, wanted, paths, self.gathering.names)
            return dict(zip(wanted, found, strict=True))
        if planted is None or self.gathering is None:
            return dict(zip(wanted, trees_of(verified.trees, wanted, paths, HEAD), strict=True))
        names, drafts = self.gathering.names, planted.drafts
        made = [(drafts[rows[i]], paths[i]) for i in wanted]
        trees = [DraftTree.of(tree.tokens, tree.parents, path, names, tree.sources) for tree, path in made]
        return dict(zip(wanted, trees, strict=True))

    def _close(self, flight: Flight) -> None:
        """A landing that says nothing of any request: where it is the last, the flight has ended."""
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

    def _follow(self, batch: Batch) -> bool:
        """Whether a pass has to keep features: the head follows one of its requests."""
        if self.drafter is None:
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
