"""Drafts that the host gathers from sources beside the head, and whether they pay.

Before a round each source may propose a tree for each request; those of one request are merged into one, whose best
nodes are verified, as many as their expected tokens are worth of the round's modelled time. After it every proposal is
held against what the target drew, verified or not: that calibrates the source's probabilities, and tells what it
gains. A source that gains less than asking it costs is asked rarely; a request whose drafts lose decodes plainly, and
nothing at all is done for it until a source is due again.

Nothing decided here can change a token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch.utils.dlpack import from_dlpack

from specrs._specrs import DraftCalibration, DraftNodes, DraftProposal, MergedDrafts, TreeBatch, merge_drafts
from specrs.engine.drafting.budget import RATE, Account
from specrs.engine.drafting.chooser import Kind, Share, TreePolicy
from specrs.engine.drafting.costs import HOSTED, SPECULATIVE, Costs
from specrs.engine.drafting.sources import GRAMMAR, HEAD, SourceProposal, Sources
from specrs.engine.drafting.trees import Deferral, VerifiedTrees
from specrs.engine.drafting.worth import SourceState, SourceStats
from specrs.engine.request.batch import Batch
from specrs.engine.request.grammars import Grammars
from specrs.engine.request.request import Passed, Request

LIKELIEST = 8
"""Next tokens of a verified node that sources which observe are told."""

_LONGEST_SLEEP = 32  # rounds of a request that cannot pay for asking, until its account is looked at again
_SPARED = 3  # rounds of a request until a source that said nothing is asked again, where asking costs nothing
_PRICE = 0.02  # plain rounds that verifying a draft takes at least
_HEARD = 0.005  # of a plain round, what a source that was not asked may take to learn from it
_MARGIN = 1.01  # by which drafts must beat plain decoding
MAX_NODES = 1024  # of a tree, as the core has it
_LEAST = math.log(0.02)  # nodes less likely are never verified, where a cost model decides
_NOTHING = DraftProposal([], [], [])
_DECILES = 10


@dataclass(eq=False)
class _Live:
    """A request that drafts.

    Attributes:
        sources: in the engine's order.
        account: where a cost model decides, which the head shares.
        at: tokens of the request when the sources last proposed; 0 once that has been judged.
        began: seconds of beginning its draftings that it has not paid yet.
        asked: sources that were asked for the round.
        forced: what its grammar forces.
        price: plain rounds that verifying one node takes, where their nodes, one or many, are likely enough to pay for
            their verification; ``None`` else.
        seen, wakes: calls of `Gathering.ask`, by number: the last one that looked at the request, and the next one to.
        heard: sources that are told of verified trees.
        deferral: drafts that wait for a doubtful token.
    """

    sources: list[SourceState]
    account: Account | None
    seen: int
    at: int = 0
    began: float = 0.0
    asked: list[SourceState] = field(default_factory=list)
    forced: SourceProposal | None = None
    price: float | None = None
    wakes: int = 0
    heard: Sequence[SourceState] = ()
    deferral: Deferral = field(default_factory=Deferral)

    @property
    def parts(self) -> list[SourceProposal | None]:
        """What each source proposed last."""
        return [source.part for source in self.sources]


@dataclass(eq=False)
class Proposals:
    """What sources propose for a round of a batch.

    Attributes:
        batch: its requests.
        parts: of each request, each source's proposal.
        forced: of each request, what its grammar forces.
        merged: of each request, the tree of all of them; a root alone where there is nothing.
        rate: tokens a second that a round with the best nodes of these trees is expected to yield.
        least: score from which on nodes are worth verifying.
        most: nodes of a tree that are, root included.
        pays: whether that is better than plain decoding.
    """

    batch: Batch
    parts: list[list[SourceProposal | None]]
    forced: list[SourceProposal | None]
    merged: list[MergedDrafts]
    rate: float = math.inf
    least: float = -math.inf
    most: int = MAX_NODES
    pays: bool = True

    @property
    def nodes(self) -> int:
        """Drafts of all requests."""
        return sum(len(tree) - 1 for tree in self.merged)


@dataclass(eq=False)
class HostTrees:
    """Trees that the host made, as an executor verifies them (`executor.Watched`).

    Attributes:
        proposals: where their nodes are from.
        head: of each request, what the head proposed; empty without a head.
    """

    proposals: Proposals
    drafts: list[MergedDrafts]
    steps: int = 0
    faults: Sequence[object] = ()
    head: list[SourceProposal | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.trees = TreeBatch.from_drafts(self.drafts)


class Gathering:
    """Asks the sources of an engine, and decides by what they are worth.

    Args:
        sources: of the engine.
        nodes: of a request's tree, root included.
        depth: its levels at most.
        tiers: where each request of a round takes as many rows as the largest tree, the sizes that rounds are made for,
            ascending; ``None`` where a round takes a row for each node.
    """

    def __init__(self, sources: Sources, nodes: int, depth: int, tiers: Sequence[int] | None = None) -> None:
        self.sources, self._nodes, self._depth, self._tiers = sources, nodes, depth, tiers
        self._kind_of_round = SPECULATIVE if tiers is None else HOSTED  # among overheads
        self._head, self._forced = len(sources.all), len(sources.all) + 1  # what no source says
        self.calibration = DraftCalibration(self._forced + 1)
        self.grammars: Grammars | None = None
        """Of the engine, where requests may have grammars."""
        self._account_of: Callable[[Request], Account] | None = None
        self._proposing = bool(sources.all)
        self._policy: TreePolicy | None = None
        self._worth = [SourceStats() for _ in sources.all]
        self._live: dict[int, _Live] = {}
        self._batch = 1  # of the last round
        self._terms: tuple[float, float] | None = None  # of this one: seconds of a request's plain round, its least
        self._spare = 0.0  # of this one, seconds that cost a request nothing
        self._asks = 0  # calls of `ask`
        self._learns = False  # some drafting learns from verified trees
        self._hearing = set[int]()  # requests whose draftings are told of them

    @property
    def names(self) -> list[str]:
        """Of all that draft, in the order of `MergedDrafts.sources`."""
        return [*(source.name for source in self.sources.all), HEAD, GRAMMAR]

    def price(self, costs: Costs, account: Callable[[Request], Account] | None = None) -> None:
        """From now on a cost model decides what is asked and verified, and a request's account pays for it."""
        # Each source's claims are calibrated. What several say alike is not as likely as if they said it by chance, and
        # so a kind of requests still has a temper of its own.
        self._policy = TreePolicy(costs)
        self._account_of = account or self._account_of

    # -- before a round -----------------------------------------------------------------------------------------

    def ask(self, batch: Batch, *, spare: float = 0.0) -> Proposals | None:
        """What the sources propose; ``None`` for nothing.

        Args:
            spare: seconds for which a device is busy meanwhile, so that they cost nothing.
        """
        self._asks += 1
        for r in batch.requests:
            live = self._live.get(r.request_id)
            awake = self._may_draft(r) if live is None else live.wakes <= self._asks
            if awake:
                break
        else:  # most rounds of requests whose drafts lose: they must not notice that they might draft
            return None
        started = time.perf_counter()
        self._batch, self._terms, self._spare = len(batch), None, spare / len(batch)
        each = [self._parts(r, len(batch)) for r in batch]
        parts, forced = [told for told, _ in each], [forced for _, forced in each]
        proposals = None
        if any(one is not None for told in (*parts, forced) for one in told):
            proposals = self._weighed(batch, parts, forced)
        self._charge(batch, time.perf_counter() - started)
        return proposals

    def _may_draft(self, r: Request) -> bool:
        """Whether anything may ever propose for a request."""
        return (self._proposing or r.draws.grammar is not None) and r.params.speculative

    def _charge(self, batch: Batch, seconds: float) -> None:
        """Those that were asked, and their requests, pay for all that it took: each for its proposal, and all alike for
        holding them against the tokens that came, for merging and for weighing them. Where none was asked, the requests
        that were looked at pay. One that waits for no tokens now is not looked at until there is something to ask."""
        policy, each = self._policy, [(r, self._live.get(r.request_id)) for r in batch]
        looked = [(r, live) for r, live in each if live is not None and live.seen == self._asks]
        if policy is None or not looked:
            return
        asked, plain = sum(len(live.asked) for _, live in looked), policy.costs.plain(len(batch)) / len(batch)
        own = sum(live.began + sum(one.proposing for one in live.asked) for _, live in looked)
        shared = max(seconds - own, 0.0) / (asked or len(looked))
        for r, live in looked:
            took, live.began = live.began, 0.0
            took += sum(one.took(one.proposing + shared, plain, self._spare) for one in live.asked)
            if not asked and r.draws.grammar is None:  # else it was looked at for what that forces
                took += shared
            if not live.at:
                for one in live.asked:
                    one.gained(0.0)
            if live.account is None:
                continue
            live.account.pay(max(took - self._spare, 0.0) / plain, len(batch))
            if not live.at and r.draws.grammar is None:
                live.wakes = self._asks + 1 + self._sleep(r, live, live.account, len(batch))

    def _parts(self, r: Request, batch: int) -> tuple[list[SourceProposal | None], SourceProposal | None]:
        """What each source proposes, and what the request's grammar forces."""
        nothing: list[SourceProposal | None] = [None] * len(self.sources.all)
        if r.max_depth < 1 or not self._may_draft(r):
            return nothing, None
        live = self._of(r, batch)
        if live.wakes > self._asks:
            return nothing, None
        self._judge(r, live)
        live.asked, live.price = [], None
        rounds, live.seen = self._asks - live.seen, self._asks
        # Of the rounds since, all but this one have passed.
        due = [one for one in live.sources if one.rest < rounds or one.spared(self._spare)]
        for one in live.sources:
            one.part = None
            if self._policy is not None:
                one.rest = max(one.rest - rounds, 0)
        left = math.inf
        if due and self._policy is not None and live.account is not None:
            plain, least = self._priced(self._policy, batch)
            # What asking takes leaves enough for a round that drafts.
            left = (live.account.room(r.produced, batch) - least) * plain + self._spare
        for one in due:
            if one.needs > left:
                continue
            left -= one.needs
            live.asked.append(one)
            depth = min(self._depth, r.max_depth)
            started = time.perf_counter()
            one.part = one.told.propose(r.tokens, self._nodes - 1, depth, self.sources.vocab_size)
            one.proposing = time.perf_counter() - started
        live.forced = self._forces(r)
        said = live.forced is not None or any(one.part is not None for one in live.asked)
        live.at = len(r.tokens) if said else 0
        if self._learns:
            self._attend(r, live, batch)
        return live.parts, live.forced

    def _priced(self, policy: TreePolicy, batch: int) -> tuple[float, float]:
        """Seconds of a request's plain round, and the least that it loses by one with drafts, in this round."""
        if self._terms is None:
            self._terms = policy.costs.plain(batch) / batch, self._least_loss(policy, batch)
        return self._terms

    def _sleep(self, r: Request, live: _Live, account: Account, batch: int) -> int:
        """Rounds until a source is due that the request can pay."""
        if self._policy is None or not live.sources:
            return _LONGEST_SLEEP
        plain, least = self._priced(self._policy, batch)
        short, sleeps = least - account.room(r.produced, batch), list[int]()
        for one in live.sources:
            if one.spared(self._spare):
                sleeps.append(_SPARED)
                continue
            wait = (max(one.needs - self._spare, 0.0) / plain + short) / RATE
            sleeps.append(max(one.rest, min(math.ceil(wait) - 1, _LONGEST_SLEEP)))
        return max(min(sleeps), 0)

    def _forces(self, r: Request) -> SourceProposal | None:
        """What the grammar of a request forces; it costs as good as nothing."""
        if self.grammars is None or r.draws.grammar is None:
            return None
        chain, most = self.grammars.forced(r.draws.grammar), min(self._depth, r.max_depth, self._nodes - 1)
        tokens, probs = list(chain.tokens[:most]), list(chain.probs[:most])
        buckets = list((chain.buckets or ())[:most])
        return (
            SourceProposal(self._forced, DraftProposal(list(chain.parents[:most]), tokens, probs, buckets))
            if tokens
            else None
        )

    def _of(self, r: Request, batch: int) -> _Live:
        live = self._live.get(r.request_id)
        if live is None:
            account = None if self._policy is None or self._account_of is None else self._account_of(r)
            known, started = [replace(w) for w in self._worth], time.perf_counter()
            each = zip(self.sources.of(r), self._worth, known, strict=True)
            live = _Live([SourceState(*one) for one in each], account, self._asks - 1)
            live.began = time.perf_counter() - started
            self._live[r.request_id] = live
            self._learns |= any(one.told.observes for one in live.sources)
        return live

    def _weighed(
        self, batch: Batch, parts: list[list[SourceProposal | None]], forced: list[SourceProposal | None]
    ) -> Proposals:
        """The merged trees, and what they are worth."""
        roots = [r.tokens[-1] for r in batch]
        merged = [self._merged(r, p, None, f) for r, p, f in zip(batch, parts, forced, strict=True)]
        proposals = Proposals(batch, parts, forced, merged)
        policy, size = self._policy, len(batch)
        if policy is None:
            return proposals
        nodes = self._nodes_of(batch, merged)
        self._promise(proposals, nodes, policy)
        least = self._least_loss(policy, size) if self._terms is None else self._terms[1]
        # What a grammar forces does come.
        accounts = [max(self._room(r, size), 0.0 if f is None else least) for r, f in zip(batch, forced, strict=True)]
        if poor := [i for i, account in enumerate(accounts) if account < least]:
            for i in poor:
                merged[i] = merge_drafts(roots[i], self.sources.vocab_size, [], 1, 0)
            nodes = self._nodes_of(batch, merged)
        drafting = [a for a, tree in zip(accounts, merged, strict=True) if len(tree) > 1]
        limit = policy.limit(size, drafting) if drafting else 0.0
        if self._tiers is not None:
            self._tier(proposals, policy, limit)
            return proposals
        overhead = policy.costs.overhead.at(self._kind_of_round)
        choice = policy.choose(size, nodes, overhead, limit)
        live = self._live.get(batch.requests[0].request_id)
        if size == 1 and live is not None:
            choice = live.deferral.choose(batch.requests[0].tokens, choice, nodes, policy, overhead)
        seconds = overhead + policy.costs.target.at(size + choice.nodes)
        proposals.rate, proposals.least = choice.expected / seconds, choice.min_score
        proposals.pays = choice.nodes > 0 and proposals.rate > _MARGIN * size / policy.costs.plain(size)
        return proposals

    def _promise(self, proposals: Proposals, nodes: DraftNodes, policy: TreePolicy) -> None:
        """Note whose drafts are worth verifying where all of the batch draft, whatever their accounts hold."""
        costs, size = policy.costs, len(proposals.merged)
        overhead, plain = costs.overhead.at(self._kind_of_round), costs.plain(size)
        for i, (r, tree) in enumerate(zip(proposals.batch, proposals.merged, strict=True)):
            live = self._live.get(r.request_id)
            if live is not None and len(tree) > 1:
                live.price = nodes.price(i, size, costs.target.table, overhead, plain, _PRICE, self._tiers)

    def _nodes_of(self, batch: Batch, trees: list[MergedDrafts]) -> DraftNodes:
        """Nodes that may be worth verifying, by what has come of such nodes of each request's kind."""
        return DraftNodes(trees, [self._kind(r).temper for r in batch], _LEAST)

    def _kind(self, r: Request) -> Kind:
        assert self._policy is not None
        return self._policy.kind(r.params.temperature)

    def _tier(self, proposals: Proposals, policy: TreePolicy, limit: float) -> None:
        """Choose the size of all trees, each of which takes as many rows."""
        size, costs = len(proposals.merged), policy.costs
        chances = []
        for r, tree in zip(proposals.batch, proposals.merged, strict=True):
            kind = self._kind(r)
            chances.append(sorted((kind.chance(s) for s in tree.scores[1:] if s >= _LEAST), reverse=True))
        plain = size / costs.plain(size)
        proposals.rate, proposals.least, proposals.pays = plain, _LEAST, False
        deepest = max(map(len, chances), default=0)
        for i, tier in enumerate(self._tiers or ()):
            if i and (self._tiers or ())[i - 1] > deepest:
                break  # it would be filled by no tree
            seconds = costs.overhead.at(self._kind_of_round) + costs.target.at(size * tier)
            rate = (size + sum(sum(c[: tier - 1]) for c in chances)) / seconds
            if seconds <= limit and rate > max(proposals.rate, _MARGIN * plain):
                proposals.rate, proposals.most, proposals.pays = rate, tier, True

    def _least_loss(self, policy: TreePolicy, size: int) -> float:
        """Plain rounds that a request loses by a round with the least drafts, all of them its own and refused."""
        costs, least = policy.costs, size + 1 if self._tiers is None else size * self._tiers[0]
        plain, took = costs.plain(size), costs.target.at(least) + costs.overhead.at(self._kind_of_round)
        return (took - plain) / plain * size

    def _room(self, r: Request, batch: int) -> float:
        """What a request may lose."""
        live = self._live.get(r.request_id)
        return 0.0 if live is None or live.account is None else live.account.room(r.produced, batch)

    def _merged(
        self,
        r: Request,
        parts: Sequence[SourceProposal | None],
        head: SourceProposal | None,
        forced: SourceProposal | None,
    ) -> MergedDrafts:
        """One tree of all; without what the request's grammar does not allow, which the target never draws."""
        each = [_NOTHING if p is None else p.proposal for p in (*parts, head, forced)]
        depth, grammar = max(min(self._depth, r.max_depth), 0), r.draws.grammar
        nodes = self._nodes if grammar is None else min(2 * self._nodes, MAX_NODES)
        tree = merge_drafts(r.tokens[-1], self.sources.vocab_size, each, nodes, depth, calibration=self.calibration)
        return tree if grammar is None else tree.allowed(grammar, self._nodes, depth)

    def trees_of(self, proposals: Proposals) -> HostTrees:
        """The best of what the sources proposed, as trees."""
        least = proposals.least
        most = min(self._nodes, proposals.most)
        drafts = [tree.pruned(most, self._depth, min_score=least) for tree in proposals.merged]
        return HostTrees(proposals, drafts)

    def merge_with_head(
        self, batch: Batch, proposals: Proposals, trees: TreeBatch, steps: int, faults: Sequence[object], limit: float,
        costs: Costs | None,
    ) -> HostTrees:  # fmt: skip
        """The trees of the head and of the other sources, merged.

        Args:
            batch: requests of the round.
            proposals: of the other sources.
            trees: the head's, with the cumulative log-probability that it gives each node.
            steps, faults: of the head's drafting.
            limit: seconds that the round may take.
            costs: by which the best nodes are chosen; ``None``: all that there is room for.
        """
        head = head_proposals(trees, self._head)
        each = zip(batch, proposals.parts, head, proposals.forced, strict=True)
        drafts = [self._merged(r, p, h, f) for r, p, h, f in each]
        policy = self._policy
        if costs is not None and policy is not None:
            drafting = costs.drafting(len(batch), len(batch), steps)
            choice = policy.choose(len(batch), self._nodes_of(batch, drafts), drafting, limit)
            drafts = [tree.pruned(self._nodes, self._depth, min_score=choice.min_score) for tree in drafts]
        return HostTrees(proposals, drafts, steps, faults, head)

    # -- after it -----------------------------------------------------------------------------------------------

    def observe(
        self,
        passed: Sequence[Passed],
        rows: Sequence[int],
        hosted: HostTrees,
        seconds: float | None,
        others: Sequence[int] | None,
        shares: Sequence[Share] | None = None,
    ) -> None:
        """A round with these trees ended.

        Args:
            passed: what it gave each request that it tells of.
            rows: of these requests in the round's batch.
            hosted: its trees.
            seconds: that it took; ``None``: as it is modelled.
            others: of each of these requests, tokens that another source has won and pays for; ``None`` without one.
            shares: of each, what of its tree was verified and accepted, where a device has united it with another.
        """
        policy, batch = self._policy, len(passed)
        if policy is None or any(p.request.error is not None for p in passed):
            return
        costs, trees = policy.costs, [hosted.drafts[row] for row in rows]
        most = max(map(len, hosted.drafts))
        queries = sum(map(len, hosted.drafts))
        if self._tiers is not None:
            queries = len(hosted.drafts) * next((n for n in self._tiers if n >= most), most)
        modelled = costs.overhead.at(self._kind_of_round) + costs.target.at(queries)
        seconds = modelled if seconds is None else min(max(seconds, modelled / 2), 2 * modelled)
        took = seconds / costs.plain(batch)
        gain = sum(len(p.tokens) for p in passed) / batch / took
        wins: dict[int, float] = {}
        for i, (p, tree) in enumerate(zip(passed, trees, strict=True)):
            if len(tree) > 1:
                share = Share(tree.scores[1:], len(p.tokens) - 1) if shares is None else shares[i]
                self._kind(p.request).learn(share.scores, share.accepted, gain)
                wins[i] = p.kept - 1 - (0 if others is None else others[i])
        if not wins:
            return
        alone = seconds if others is None else costs.plain(batch)  # else the other source pays for the round
        for i, won in zip(wins, policy.won(batch, len(wins), alone, list(wins.values())), strict=True):
            live = self._live.get(passed[i].request.request_id)
            if live is not None and live.account is not None:
                live.account.pay(-won, batch)

    def _judge(self, r: Request, live: _Live) -> None:
        """Hold what the sources proposed last against the tokens that came."""
        if not live.at:
            return
        drawn, live.at = r.tokens[live.at :], 0
        if not drawn:
            return
        if live.forced is not None:
            self.grade(live.forced, drawn)
        for one in live.asked:
            hits = 0 if one.part is None else self.grade(one.part, drawn)
            one.gained(0.0 if live.price is None or one.part is None else hits - live.price)

    def grade(self, part: SourceProposal, drawn: list[int]) -> int:
        """Calibrate a source by a proposal and the tokens that came; how many of these it had proposed."""
        return self.calibration.grade(part.source, part.proposal, drawn)

    def share(self, head: SourceProposal | None, passed: Passed) -> Share:
        """The head's part of what a round gave a request, by which the head is calibrated."""
        if head is None:
            return Share([], 0)
        scores: list[float] = []
        for parent, prob in zip(head.proposal.parents, head.proposal.probs, strict=True):
            scores.append(math.log(prob) + (scores[parent] if parent >= 0 else 0.0))
        return Share(sorted(scores, reverse=True), self.grade(head, passed.tokens))

    def watch(self, batch: Sequence[Request], verified: VerifiedTrees) -> None:
        """Tell sources that learn from verified trees what the target made of these, of requests that go on."""
        if not self._hearing:
            return
        started = time.perf_counter()
        learning: list[tuple[int, SourceState]] = []
        for i, r in enumerate(batch):
            if r.request_id in self._hearing and r.finish_reason is None:
                learning += [(i, one) for one in self._live[r.request_id].heard if one.told.drafting]
        if not learning:
            return
        requests = sorted({i for i, _ in learning})
        rows = verified.likeliest(requests, LIKELIEST)
        if rows is not None:  # else a device has moved on
            # All draftings of a request are told one and the same, which none of them can change.
            each_row = zip(requests, rows, strict=True)
            told_of = {i: (tuple(tokens), tuple(map(tuple, top))) for i, (tokens, top) in each_row}
            for i, one in learning:
                one.told.observe(*told_of[i])
            each = (time.perf_counter() - started) / len(learning)
            for _, one in learning:
                one.watched(each)
        for r in (batch[i] for i in requests):
            live = self._live[r.request_id]
            if not live.at and live.asked:  # they said nothing, and nobody looks at the request in the next round
                live.asked = []
                self._attend(r, live, len(batch))

    def _attend(self, r: Request, live: _Live, batch: int) -> None:
        """Sources are told of the next rounds that were asked, and others that take little."""
        most = math.inf if self._policy is None else _HEARD * self._policy.costs.plain(batch)
        able = [one for one in live.sources if one.told.observes]
        live.heard = [one for one in able if one in live.asked or (not one.rest and one.worth.watching < most)]
        (self._hearing.add if live.heard else self._hearing.discard)(r.request_id)

    def forget(self, r: Request) -> None:
        """The request has ended."""
        self._hearing.discard(r.request_id)
        live = self._live.pop(r.request_id, None)
        if live is not None:
            self._judge(r, live)
        self.sources.forget(r)

    def close(self) -> None:
        """Every request has ended."""
        self._live.clear()
        self._hearing.clear()
        self.sources.close()


def head_proposals(trees: TreeBatch, source: int) -> list[SourceProposal | None]:
    """The head's trees as proposals: a node's probability is what it adds to its parent's."""
    arrays = [from_dlpack(a).tolist() for a in (trees.parents, trees.tokens, trees.scores)]
    parts: list[SourceProposal | None] = []
    first = 0
    for size in trees.sizes:
        parents, tokens, scores = (array[first : first + size] for array in arrays)
        first += size
        probs = [min(max(math.exp(s - scores[p]), 1e-6), 1.0) for s, p in zip(scores[1:], parents[1:], strict=True)]
        buckets = [min(int(p * _DECILES), _DECILES - 1) for p in probs]
        proposal = DraftProposal([p - 1 for p in parents[1:]], tokens[1:], probs, buckets)
        parts.append(SourceProposal(source, proposal) if len(proposal) else None)
    return parts
