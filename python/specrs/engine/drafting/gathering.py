"""The drafts of sources beside the head, gathered by the host: which sources to ask, and which nodes to verify.

Before a round, sources propose a tree for each request. One call of the core (`choose_drafts`) merges the proposals of
a request, drops what its grammar forbids, and keeps the nodes that give the most expected tokens a second. After the
round, another call compares all proposals with the tokens that the target drew, verified or not: that calibrates the
sources' probabilities, and tells what each source gains. A source that gains less than asking it costs is asked rarely
(`worth`). The request's account (`budget`) pays for all of this, so that drafts that lose are soon left alone.

Nothing decided here can change a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from specrs._specrs import DraftCalibration, DraftProposal, MergedDrafts, NonFiniteError, TreeBatch, choose_drafts
from specrs.engine.drafting.budget import WAIT, Account
from specrs.engine.drafting.chooser import TreePolicy
from specrs.engine.drafting.costs import HOSTED
from specrs.engine.drafting.sources import GRAMMAR, HEAD, DraftSession, Sources
from specrs.engine.drafting.trees import Drafted, VerifiedTrees, head_proposals
from specrs.engine.drafting.worth import SourceWorth
from specrs.engine.request.batch import Batch
from specrs.engine.request.grammars import Grammars
from specrs.engine.request.request import Passed, Request

LIKELIEST = 8
"""Next tokens of a verified node that sources which observe are told."""

Said = list[DraftProposal | None]
"""The proposals for a request: an entry for each of `Gathering.names`."""


@dataclass(eq=False)
class HostTrees:
    """Trees that the host chose, as an executor verifies them (`executor.Drafted`).

    Attributes:
        drafts: the tree of each request.
        tokens: tokens that a round with these trees is expected to give, over the batch.
        seconds: seconds that it is expected to take.
        levels, faults: of the head's drafts.
        head: the head's proposal for each request; empty without a head.
    """

    drafts: list[MergedDrafts]
    tokens: float
    seconds: float
    levels: int = 0
    faults: Sequence[tuple[NonFiniteError, int]] = ()
    head: list[DraftProposal | None] = field(default_factory=list)

    @cached_property
    def trees(self) -> TreeBatch:
        """The trees, as they are verified."""
        return TreeBatch.from_drafts(self.drafts)

    @property
    def rate(self) -> float:
        """Tokens a second that a round with these trees is expected to give."""
        return self.tokens / self.seconds


@dataclass(eq=False)
class Answers:
    """The proposals for one request, until they are compared with the tokens that came.

    Attributes:
        said: the proposals.
        at: tokens of the request when they were made.
        took: seconds of each source that was asked, by its index.
    """

    request: Request
    said: Said
    at: int
    took: dict[int, float] = field(default_factory=dict)


@dataclass(eq=False)
class Proposals:
    """The proposals of sources for a round of a batch.

    Attributes:
        answers: those for each request, in the batch's order, by its id.
        spare: seconds of asking that cost nothing, for each request.
        trees: the nodes that are worth verifying; ``None`` if plain decoding yields more tokens a second.
    """

    answers: dict[int, Answers] = field(default_factory=dict)
    spare: float = 0.0
    trees: HostTrees | None = None

    @property
    def said(self) -> list[Said]:
        """The proposals for each request."""
        return [answers.said for answers in self.answers.values()]


class Gathering:
    """Asks the sources of an engine, and decides by their worth.

    Args:
        sources: the sources beside the head.
        nodes: most nodes of a request's tree, root included.
        depth: most levels of a tree.
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
        self._policy: TreePolicy
        self._account_of: Callable[[Request], Account]
        self._asked = Proposals()  # of the last `ask`, until it is settled

    def price(self, policy: TreePolicy, account: Callable[[Request], Account]) -> None:
        """Let a policy decide from now on what is asked and verified, and a request's account pay for it."""
        self._policy, self._account_of = policy, account

    # -- before a round -----------------------------------------------------------------------------------------

    def ask(self, batch: Batch, *, spare: float = 0.0) -> Proposals | None:
        """Settle the last answers, and ask the sources that are due; ``None`` where nothing is proposed.

        Args:
            spare: seconds for which a device is busy meanwhile, so that they cost nothing.
        """
        if not self._worth and self.grammars is None:
            return None
        self._settle_all()
        for worth in self._worth:
            worth.rested += 1
        for r in batch.requests:  # a loop, since most rounds of requests that cannot pay end here
            if self._awake(r) or r.draws.grammar is not None:
                break
        else:
            return None
        size, spare = len(batch), spare / len(batch)
        due = self._due(size, spare)
        if not due and all(r.draws.grammar is None for r in batch.requests):
            return None
        each = {r.request_id: self._answers(r, due, size, spare) for r in batch}
        self._asked = asked = Proposals(each, spare)
        if not any(map(any, asked.said)):
            return None
        started = time.perf_counter()
        asked.trees = self._weighed(batch, asked.said)
        merging = (time.perf_counter() - started) / (sum(len(answers.took) for answers in each.values()) or 1)
        for answers in each.values():
            answers.took = {source: seconds + merging for source, seconds in answers.took.items()}
        return asked

    def _awake(self, r: Request) -> bool:
        """Return whether a request may be able to pay for asking."""
        return r.params.speculative and self._account_of(r).asks_from <= len(r.tokens)

    def _due(self, size: int, spare: float) -> list[int]:
        """Return the sources to ask for this round."""
        costs = self._policy.costs
        plain = costs.plain(size) / size
        return [i for i, worth in enumerate(self._worth) if costs.free or worth.due(plain, spare)]

    def _answers(self, r: Request, due: Sequence[int], size: int, spare: float) -> Answers:
        """Ask those of the sources that the request can pay for, so that it can still pay for a round with drafts."""
        answers = Answers(r, [None] * len(self.names), len(r.tokens))
        depth = min(self._depth, r.max_depth)
        if depth < 1 or not r.params.speculative:
            return answers
        answers.said[-1] = self._forced(r, min(depth, self._nodes - 1))
        if not due or not self._awake(r):
            return answers
        left, sessions = self._affordable(r, size) + spare, list[DraftSession]()
        for source in due:
            worth = self._worth[source]
            if worth.cost > left:
                continue
            left, worth.rested = left - worth.cost, 0
            sessions = sessions or self._sessions(r, size)
            started = time.perf_counter()
            answers.said[source] = sessions[source].propose(r.tokens, self._nodes - 1, depth, self.sources.vocab_size)
            answers.took[source] = time.perf_counter() - started
        if not answers.took:
            self._account_of(r).asks_from = len(r.tokens) + WAIT
        return answers

    def _affordable(self, r: Request, size: int) -> float:
        """Return the seconds of asking that a request can pay for, so that it can pay for a round with drafts, too."""
        plain = self._policy.costs.plain(size)
        # It may be the only one with drafts, all of which are refused.
        return self._account_of(r).room(size) * plain / size - (self._least_round(size, 1) - plain)

    def _sessions(self, r: Request, size: int) -> list[DraftSession]:
        """Return a request's sessions. If they begin now, the request pays for that: it is no part of asking's cost."""
        if not (sessions := self.sources.begun(r)):
            started = time.perf_counter()
            sessions = self.sources.begin(r)
            self._pay(r, time.perf_counter() - started, size)
        return sessions

    def _forced(self, r: Request, most: int) -> DraftProposal | None:
        """Return a chain of up to ``most`` tokens that a request's grammar forces; making it costs next to nothing."""
        if self.grammars is None or r.draws.grammar is None:
            return None
        chain = self.grammars.forced(r.draws.grammar)
        buckets = list(chain.buckets or ())
        lists = DraftProposal(chain.parents[:most], chain.tokens[:most], chain.probs[:most], buckets[:most])
        return lists if len(lists) else None

    def _weighed(self, batch: Batch, said: list[Said]) -> HostTrees | None:
        """Merge the proposals, and choose the nodes to verify; ``None`` if plain decoding yields more tokens a second.

        A round with one draft each is allowed whatever the accounts hold: tokens that a grammar forces do come.
        """
        policy, costs, size = self._policy, self._policy.costs, len(batch)
        rooms = [self._account_of(r).room(size) for r, own in zip(batch, said, strict=True) if any(own)]
        limit = policy.limit(size, rooms, self._least_round(size, len(rooms)))
        trees = HostTrees(*self._chosen(batch, said, costs.overhead.at(HOSTED), limit, self._tiers))
        pays = costs.free or trees.rate > size / costs.plain(size)
        return trees if pays and max(map(len, trees.drafts)) > 1 else None

    def _chosen(
        self, batch: Batch, said: Sequence[Said], beside: float, limit: float, tiers: Sequence[int] = ()
    ) -> tuple[list[MergedDrafts], float, float]:
        """Return the trees to verify, and the tokens and seconds of their round, as `choose_drafts` does.

        Args:
            beside: seconds that the round takes beside the target's pass.
            limit: seconds that the round may take.
            tiers: the rows that a tree may take, where all trees of the round take as many.
        """
        costs, each = self._policy.costs, zip(batch, said, strict=True)
        cost = None if costs.free else (costs.target.table, beside, limit, list(tiers))
        asked = [(r.tokens[-1], own, max(min(self._depth, r.max_depth), 0), r.draws.grammar) for r, own in each]
        trees, tokens, seconds = choose_drafts(asked, self.calibration, self.sources.vocab_size, self._nodes, cost)
        return trees, tokens, costs.plain(len(batch)) if costs.free else seconds

    def _least_round(self, size: int, drafting: int) -> float:
        """Return the seconds of a round with the fewest drafts for each of ``drafting`` requests."""
        costs, rows = self._policy.costs, size * self._tiers[0] if self._tiers else size + drafting
        return costs.target.at(rows) + costs.overhead.at(HOSTED)

    def merge_with_head(self, batch: Batch, proposals: Proposals | None, drafted: Drafted, limit: float) -> HostTrees:
        """Return the best nodes of what the head and the other sources propose.

        Args:
            batch: requests of the round.
            proposals: proposals of the other sources; ``None`` without any.
            drafted: the head's trees, with the cumulative log-probability that it gives each node.
            limit: seconds that the round may take.
        """
        assert drafted.trees is not None
        head, nothing = head_proposals(drafted.trees), list[DraftProposal | None]([None] * len(self.names))
        others = [nothing] * len(head) if proposals is None else proposals.said
        said = [[*said[:-2], own, said[-1]] for said, own in zip(others, head, strict=True)]
        beside = self._policy.costs.drafting(len(batch), len(batch), drafted.levels)
        return HostTrees(*self._chosen(batch, said, beside, limit), drafted.levels, drafted.faults, head)

    # -- accounts -----------------------------------------------------------------------------------------------

    def _pay(self, r: Request, seconds: float, size: int) -> None:
        """Let a request pay for seconds that a batch of ``size`` requests has waited for it."""
        self._account_of(r).pay(seconds / self._policy.costs.plain(size) * size, size)

    # -- after it -----------------------------------------------------------------------------------------------

    def grade_head(self, head: DraftProposal | None, passed: Passed) -> int:
        """Compare the head's proposal for a request with the tokens that came, and return how many it had foretold."""
        if head is None:
            return 0
        return self.calibration.grade([*[None] * len(self.sources.all), head], passed.tokens)[-1]

    def watch(self, batch: Sequence[Request], verified: VerifiedTrees) -> None:
        """Tell the target's likeliest tokens in verified trees to the sources that learn from them and were asked for
        the round, for requests that go on."""
        learning: list[tuple[int, Answers, int, DraftSession]] = []
        for i, r in enumerate(batch if self._asked.answers else ()):
            answers = self._asked.answers.get(r.request_id)
            if answers is not None and r.finish_reason is None:
                sessions = self.sources.begun(r)
                learning += [(i, answers, source, sessions[source]) for source in answers.took]
        learning = [one for one in learning if one[-1].observes]
        if not learning:
            return
        started = time.perf_counter()
        requests = sorted({i for i, *_ in learning})
        rows = verified.likeliest(requests, LIKELIEST)
        if rows is None:  # a device has moved on
            return
        # All sessions of a request are told the same objects, which none of them can change.
        each_row = zip(requests, rows, strict=True)
        told = {i: (tuple(tokens), tuple(map(tuple, top))) for i, (tokens, top) in each_row}
        for i, _, _, session in learning:
            session.observe(*told[i])
        each = (time.perf_counter() - started) / len(learning)
        for _, answers, source, _ in learning:
            answers.took[source] += each

    def _settle_all(self) -> None:
        """Settle the last answers."""
        asked, self._asked = self._asked, Proposals()
        for answers in asked.answers.values():
            self._settle(answers, asked, len(asked.answers))

    def _settle(self, answers: Answers, asked: Proposals, size: int) -> None:
        """Compare the proposals for a request of ``size`` with the tokens that came, and let it pay for asking."""
        if not answers.took and not any(answers.said):
            return
        drawn = answers.request.tokens[answers.at :]
        hits = self.calibration.grade(answers.said, drawn) if drawn else None
        for source, seconds in answers.took.items():
            self._worth[source].learn(None if hits is None else hits[source] * (asked.trees is not None), seconds)
        self._pay(answers.request, max(sum(answers.took.values()) - asked.spare, 0.0), size)

    def forget(self, r: Request) -> None:
        """Forget a request that has ended."""
        size = len(self._asked.answers)
        if (answers := self._asked.answers.pop(r.request_id, None)) is not None:
            self._settle(answers, self._asked, size)
        self.sources.forget(r)

    def close(self) -> None:
        """Forget all requests, which have ended."""
        self._asked = Proposals()
        self.sources.close()
