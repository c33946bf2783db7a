"""Drafts that the host gathers from sources beside the head: which sources to ask, and which nodes to verify.

Before a round, sources propose a tree for each request. One call of the core (`choose_drafts`) merges the proposals of
a request, drops what its grammar forbids, and keeps the nodes that give the most expected tokens a second. After the
round, another call compares all proposals with the tokens that the target drew, verified or not: that calibrates the
sources' probabilities, and tells what each source gains. A source that gains less than asking it costs is asked rarely
(`worth`). The request's account (`budget`) pays for all of this, so that drafts that lose are soon left alone.

Nothing decided here can change a token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specrs._specrs import DraftCalibration, DraftProposal, MergedDrafts, TreeBatch, choose_drafts
from specrs.engine.drafting.budget import Account
from specrs.engine.drafting.chooser import Share, TreePolicy
from specrs.engine.drafting.costs import HOSTED, Costs
from specrs.engine.drafting.sources import GRAMMAR, HEAD, DraftSession, Sources
from specrs.engine.drafting.trees import VerifiedTrees, head_proposals
from specrs.engine.drafting.worth import SourceWorth
from specrs.engine.request.batch import Batch
from specrs.engine.request.grammars import Grammars
from specrs.engine.request.request import Passed, Request

LIKELIEST = 8
"""Next tokens of a verified node that sources which observe are told."""

_POOR = 8  # rounds until a request that cannot pay is looked at again, which takes 1% of a plain round

Said = list[DraftProposal | None]
"""What was proposed for a request: an entry for each of `Gathering.names`."""
_Cost = tuple[tuple[list[int], list[float], float], float, float, list[int]]  # of a round, as `choose_drafts` takes it


@dataclass(eq=False)
class _Answer:
    """What was proposed for a request, until it is compared with the tokens that came.

    Attributes:
        at: tokens of the request when it was proposed.
        took: seconds of each source that was asked, by its index.
        spare: seconds that cost nothing.
        batch: requests of the round.
        pays: whether verifying drafts of this round is better than plain decoding.
    """

    request: Request
    at: int
    said: Said
    took: dict[int, float]
    spare: float
    batch: int
    pays: bool = True


@dataclass(eq=False)
class Proposals:
    """What sources propose for a round of a batch.

    Attributes:
        said: of each request.
        trees: of each request, the nodes that are worth verifying, in one tree.
        seconds: that a round with these trees is expected to take; 0 where no cost model decides.
        rate: tokens a second that it is expected to yield.
        most: rows of a request's tree.
        pays: whether that is better than plain decoding.
    """

    said: list[Said]
    trees: list[MergedDrafts]
    seconds: float = 0.0
    rate: float = math.inf
    most: int = 1
    pays: bool = True

    @property
    def nodes(self) -> int:
        """Drafts that were proposed."""
        return sum(len(one) for said in self.said for one in said if one is not None)


@dataclass(eq=False)
class HostTrees:
    """Trees that the host made, as an executor verifies them (`executor.Drafted`).

    Attributes:
        proposals: what sources other than the head proposed.
        steps, faults: of the head's drafting.
        head: of each request, what the head proposed; empty without a head.
    """

    proposals: Proposals
    drafts: list[MergedDrafts]
    steps: int = 0
    faults: Sequence[object] = ()
    head: list[DraftProposal | None] = field(default_factory=list)

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
        self.sources, self._nodes, self._depth, self._tiers = sources, nodes, depth, list(tiers or ())
        self.names = [*(source.name for source in sources.all), HEAD, GRAMMAR]
        """All that draft, in the order of `MergedDrafts.sources`."""
        self.calibration = DraftCalibration(len(self.names))
        self.grammars: Grammars | None = None
        """Grammars of the engine, where requests may have some."""
        self._worth = [SourceWorth() for _ in sources.all]
        self._policy: TreePolicy | None = None
        self._account_of: Callable[[Request], Account] | None = None
        self._answers: dict[int, _Answer] = {}  # to the last `ask`, by request
        self._round = 0  # calls of `ask`
        self._wakes: dict[int, int] = {}  # round from which on a request that could not pay may pay again

    def price(self, costs: Costs, account: Callable[[Request], Account]) -> None:
        """From now on a cost model decides what is asked and verified, and a request's account pays for it."""
        self._policy, self._account_of = TreePolicy(costs), account

    # -- before a round -----------------------------------------------------------------------------------------

    def ask(self, batch: Batch, *, spare: float = 0.0) -> Proposals | None:
        """Ask the sources that are due; ``None`` where nothing is proposed.

        Args:
            spare: seconds for which a device is busy meanwhile, so that they cost nothing.
        """
        for answer in self._answers.values():
            self._settle(answer)
        self._answers.clear()
        self._round += 1
        for r in batch.requests:  # a loop, since most rounds of requests that cannot pay end here
            if self._wakes.get(r.request_id, 0) <= self._round or r.draws.grammar is not None:
                break
        else:
            return None
        spare /= len(batch)
        due = self._due(len(batch), spare)
        if not due and all(r.draws.grammar is None for r in batch.requests):
            return None
        answers = [self._answer(r, due, len(batch), spare) for r in batch]
        self._answers = {answer.request.request_id: answer for answer in answers if answer.took or any(answer.said)}
        started = time.perf_counter()
        said, proposals = [answer.said for answer in answers], None
        if any(map(any, said)):
            proposals = self._weighed(batch, said)
        merging = (time.perf_counter() - started) / (sum(len(answer.took) for answer in answers) or 1)
        for answer in self._answers.values():
            answer.took = {source: seconds + merging for source, seconds in answer.took.items()}
            answer.pays = proposals is not None and proposals.pays
        return proposals

    def _due(self, batch: int, spare: float) -> list[int]:
        """Sources to ask for this round."""
        if self._policy is None:
            return list(range(len(self._worth)))
        plain = self._policy.costs.plain(batch) / batch
        return [i for i, worth in enumerate(self._worth) if worth.due(self._round, plain, spare)]

    def _answer(self, r: Request, due: Sequence[int], batch: int, spare: float) -> _Answer:
        """Ask those of the sources that the request can pay for, so that it can still pay for a round with drafts."""
        answer = _Answer(r, len(r.tokens), [None] * len(self.names), {}, spare, batch)
        depth = min(self._depth, r.max_depth)
        if depth < 1 or not r.params.speculative:
            return answer
        answer.said[-1] = self._forced(r, min(depth, self._nodes - 1))
        if not due or self._wakes.get(r.request_id, 0) > self._round:
            return answer
        left, sessions = self._affordable(r, batch) + spare, list[DraftSession]()
        for source in due:
            worth = self._worth[source]
            if worth.cost > left:
                continue
            left, worth.last = left - worth.cost, self._round
            sessions = sessions or self._sessions(r, batch)
            started = time.perf_counter()
            answer.said[source] = sessions[source].propose(r.tokens, self._nodes - 1, depth, self.sources.vocab_size)
            answer.took[source] = time.perf_counter() - started
        if not answer.took:
            self._wakes[r.request_id] = self._round + _POOR
        return answer

    def _sessions(self, r: Request, batch: int) -> list[DraftSession]:
        """A request's sessions. Beginning them is paid by the request alone: it is no part of what asking costs."""
        started = time.perf_counter()
        sessions = self.sources.of(r)
        self._pay(r, time.perf_counter() - started, batch)
        return sessions

    def _forced(self, r: Request, most: int) -> DraftProposal | None:
        """A chain of up to so many tokens that a request's grammar forces; making it costs as good as nothing."""
        if self.grammars is None or r.draws.grammar is None:
            return None
        chain = self.grammars.forced(r.draws.grammar)
        buckets = list(chain.buckets or ())
        lists = DraftProposal(chain.parents[:most], chain.tokens[:most], chain.probs[:most], buckets[:most])
        return lists if len(lists) else None

    def _weighed(self, batch: Batch, said: list[Said]) -> Proposals:
        """Merge what was proposed, and choose the nodes to verify."""
        policy, size = self._policy, len(batch)
        if policy is None:
            return Proposals(said, self._chosen(batch, said, None)[0])
        costs, least = policy.costs, self._least_loss(policy, size)
        # A round of what a grammar forces may be tried whatever the account holds: those tokens do come.
        rooms = [max(self._room(r, size), least) for r, own in zip(batch, said, strict=True) if any(own)]
        limit = policy.limit(size, rooms)
        cost = costs.target.table, costs.overhead.at(HOSTED), limit, self._tiers
        trees, tokens, seconds = self._chosen(batch, said, cost)
        most, rate = max(map(len, trees)), tokens / seconds
        pays = most > 1 and rate > size / costs.plain(size)
        most = next((tier for tier in self._tiers if tier >= most), most)
        return Proposals(said, trees, seconds, rate, most, pays)

    def _chosen(
        self, batch: Batch, said: Sequence[Said], cost: _Cost | None
    ) -> tuple[list[MergedDrafts], float, float]:
        """As `choose_drafts`."""
        each = zip(batch, said, strict=True)
        asked = [(r.tokens[-1], own, max(min(self._depth, r.max_depth), 0), r.draws.grammar) for r, own in each]
        return choose_drafts(asked, self.calibration, self.sources.vocab_size, self._nodes, cost)

    def _least_loss(self, policy: TreePolicy, size: int) -> float:
        """Plain rounds that a request loses by a round with the least drafts, all of them its own and refused."""
        costs, least = policy.costs, size * self._tiers[0] if self._tiers else size + 1
        plain, took = costs.plain(size), costs.target.at(least) + costs.overhead.at(HOSTED)
        return (took - plain) / plain * size

    def trees_of(self, proposals: Proposals) -> HostTrees:
        """The trees of the sources alone."""
        return HostTrees(proposals, proposals.trees)

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
        head, cost = head_proposals(trees), None
        said = [[*others[:-2], own, others[-1]] for others, own in zip(proposals.said, head, strict=True)]
        if costs is not None:
            cost = costs.target.table, costs.drafting(len(batch), len(batch), steps), limit, list[int]()
        return HostTrees(proposals, self._chosen(batch, said, cost)[0], steps, faults, head)

    # -- accounts -----------------------------------------------------------------------------------------------

    def _room(self, r: Request, batch: int) -> float:
        """Plain rounds that a request may lose."""
        return math.inf if self._account_of is None else self._account_of(r).room(r.produced, batch)

    def _affordable(self, r: Request, batch: int) -> float:
        """Seconds of asking that a request can pay for, and for a round with drafts behind it."""
        if self._policy is None:
            return math.inf
        room = self._room(r, batch) - self._least_loss(self._policy, batch)
        return room * self._policy.costs.plain(batch) / batch

    def _pay(self, r: Request, seconds: float, batch: int) -> None:
        """A request pays for seconds that its whole batch has waited."""
        if self._policy is not None and self._account_of is not None:
            self._account_of(r).pay(seconds / self._policy.costs.plain(batch) * batch, batch)

    # -- after it -----------------------------------------------------------------------------------------------

    def observe(
        self,
        passed: Sequence[Passed],
        rows: Sequence[int],
        hosted: HostTrees,
        others: Sequence[int] | None,
    ) -> None:
        """Requests pay for a round with these trees, or are paid what it won.

        Args:
            passed: what it gave each request that it tells of.
            rows: of these requests in the round's batch.
            hosted: its trees.
            others: of each of these requests, tokens that the head has won, which pays for the round; ``None`` without
                the head.
        """
        policy, size = self._policy, len(passed)
        if policy is None or any(p.request.error is not None for p in passed):
            return
        took = hosted.proposals.seconds if others is None else policy.costs.plain(size)
        wins = {
            i: p.kept - 1 - (0 if others is None else others[i])
            for i, (p, row) in enumerate(zip(passed, rows, strict=True))
            if len(hosted.drafts[row]) > 1
        }
        if wins and self._account_of is not None:
            for i, won in zip(wins, policy.won(size, len(wins), took, list(wins.values())), strict=True):
                self._account_of(passed[i].request).pay(-won, size)

    def share(self, head: DraftProposal | None, passed: Passed) -> Share:
        """The head's part of what a round gave a request, by which the head is calibrated."""
        if head is None:
            return Share([], 0)
        scores: list[float] = []
        for parent, prob in zip(head.parents, head.probs, strict=True):
            scores.append(math.log(prob) + (scores[parent] if parent >= 0 else 0.0))
        hits = self.calibration.grade([*[None] * len(self.sources.all), head], passed.tokens)
        return Share(sorted(scores, reverse=True), hits[-1])

    def watch(self, batch: Sequence[Request], verified: VerifiedTrees) -> None:
        """Tell what the target made of verified trees: to sources that learn from it and were asked for the round, of
        requests that go on."""
        learning: list[tuple[int, _Answer, int, DraftSession]] = []
        for i, r in enumerate(batch if self._answers else ()):
            answer = self._answers.get(r.request_id)
            if answer is not None and r.finish_reason is None:
                sessions = self.sources.of(r) if answer.took else ()
                learning += [
                    (i, answer, source, sessions[source]) for source in answer.took if sessions[source].observes
                ]
        if not learning:
            return
        started = time.perf_counter()
        requests = sorted({i for i, *_ in learning})
        rows = verified.likeliest(requests, LIKELIEST)
        if rows is None:  # a device has moved on
            return
        # All sessions of a request are told one and the same, which none of them can change.
        each_row = zip(requests, rows, strict=True)
        told = {i: (tuple(tokens), tuple(map(tuple, top))) for i, (tokens, top) in each_row}
        for i, _, _, session in learning:
            session.observe(*told[i])
        each = (time.perf_counter() - started) / len(learning)
        for _, answer, source, _ in learning:
            answer.took[source] += each

    def _settle(self, answer: _Answer) -> None:
        """Compare what was proposed for a request with the tokens that came, and let the request pay for asking."""
        drawn = answer.request.tokens[answer.at :]
        hits = self.calibration.grade(answer.said, drawn) if drawn else None
        for source, seconds in answer.took.items():
            self._worth[source].learn(None if hits is None else hits[source] * answer.pays, seconds)
        self._pay(answer.request, max(sum(answer.took.values()) - answer.spare, 0.0), answer.batch)

    def forget(self, r: Request) -> None:
        """The request has ended."""
        answer = self._answers.pop(r.request_id, None)
        if answer is not None:
            self._settle(answer)
        self._wakes.pop(r.request_id, None)
        self.sources.forget(r)

    def close(self) -> None:
        """Every request has ended."""
        self._answers.clear()
        self._wakes.clear()
        self.sources.close()
