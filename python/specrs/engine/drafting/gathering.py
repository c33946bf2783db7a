"""The drafts of sources beside the head, gathered by the host: whom to ask for them, and which nodes to verify.

Before a round, sources propose a tree for each request. One call of the core (`choose_drafts`) merges the proposals of
a request, drops what its grammar forbids, and keeps the nodes that give the most expected tokens a second. After the
round, another call compares all proposals with the tokens that the target drew, verified or not, which calibrates the
sources' probabilities. The request's account (`budget`) pays for the time that asking takes, so that sources that say
nothing of use are soon left alone.

Nothing decided here can change a token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from specrs._specrs import DraftCalibration, DraftProposal, MergedDrafts, NonFiniteError, TreeBatch, choose_drafts
from specrs.engine.drafting.chooser import TreePolicy
from specrs.engine.drafting.sources import GRAMMAR, HEAD, DraftSession, Sources
from specrs.engine.drafting.trees import Drafted, VerifiedTrees
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
    """

    drafts: list[MergedDrafts]
    tokens: float
    seconds: float
    levels: int = 0
    faults: Sequence[tuple[NonFiniteError, int]] = ()

    @cached_property
    def trees(self) -> TreeBatch:
        """The trees, as they are verified."""
        return TreeBatch.from_drafts(self.drafts)

    @property
    def rate(self) -> float:
        """Tokens a second that a round with these trees is expected to give."""
        return self.tokens / self.seconds


@dataclass(eq=False)
class Proposals:
    """The proposals for a round of a batch.

    Attributes:
        requests: the requests of the batch.
        said: the proposals for each of them.
        asked: ids of the requests that sources were asked for.
        trees: the nodes that are worth verifying; ``None`` if plain decoding yields more tokens a second.
    """

    requests: Sequence[Request] = ()
    said: Sequence[Said] = ()
    asked: Collection[int] = ()
    trees: HostTrees | None = None


class Gathering:
    """Asks the sources of an engine, and chooses among what they propose.

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
        self._policy: TreePolicy
        self._last = Proposals()  # for the round whose tokens are the next to come

    def price(self, policy: TreePolicy) -> None:
        """Let a policy decide from now on what is verified."""
        self._policy = policy

    @property
    def asks(self) -> bool:
        """True if there is anything to ask."""
        return bool(self.sources.all) or self.grammars is not None

    # -- before a round -----------------------------------------------------------------------------------------

    def ask(self, batch: Batch, able: Sequence[Request]) -> Proposals | None:
        """Ask the sources for the requests that are ``able`` to pay for it; ``None`` where nothing is proposed."""
        asked = able if self.sources.all else []
        if not asked and all(r.draws.grammar is None for r in batch):
            return None
        ids = {r.request_id for r in asked}
        said = [self._said(r, r.request_id in ids) for r in batch]
        self._last = last = Proposals(batch.requests, said, ids)
        return last if any(map(any, said)) else None

    def _said(self, r: Request, asks: bool) -> Said:
        """Return the proposals for a request: of what its grammar forces, and if it ``asks``, of all sources."""
        said, depth = Said([None] * len(self.names)), min(self._depth, r.max_depth)
        if depth < 1 or not r.params.speculative:
            return said
        said[-1] = self._forced(r, min(depth, self._nodes - 1))
        if asks:
            sessions = self.sources.begun(r) or self.sources.begin(r)
            each = [one.propose(r.tokens, self._nodes - 1, depth, self.sources.vocab_size) for one in sessions]
            said[: len(each)] = each
        return said

    def _forced(self, r: Request, most: int) -> DraftProposal | None:
        """Return a chain of up to ``most`` tokens that a request's grammar forces; making it costs next to nothing."""
        if self.grammars is None or r.draws.grammar is None:
            return None
        chain = self.grammars.forced(r.draws.grammar)
        buckets = list(chain.buckets or ())
        lists = DraftProposal(chain.parents[:most], chain.tokens[:most], chain.probs[:most], buckets[:most])
        return lists if len(lists) else None

    def weighed(self, batch: Batch, said: Sequence[Said], beside: float) -> HostTrees | None:
        """Merge the proposals, and choose the nodes to verify; ``None`` if plain decoding yields more tokens a second.

        Args:
            batch: requests of the round.
            said: the proposals for each.
            beside: seconds that asking has taken.
        """
        costs, size = self._policy.costs, len(batch)
        trees = HostTrees(*self._chosen(batch, said, beside))
        return trees if trees.rate > size / costs.plain(size) and max(map(len, trees.drafts)) > 1 else None

    def _chosen(self, batch: Batch, said: Sequence[Said], beside: float) -> tuple[list[MergedDrafts], float, float]:
        """Return the trees to verify, and the tokens and seconds of their round, as `choose_drafts` does.

        Args:
            beside: seconds that the round takes beside the target's pass.
        """
        cost, each = (self._policy.costs.target.table, beside, self._tiers), zip(batch, said, strict=True)
        asked = [(r.tokens[-1], own, max(min(self._depth, r.max_depth), 0), r.draws.grammar) for r, own in each]
        return choose_drafts(asked, self.calibration, self.sources.vocab_size, self._nodes, cost)

    def merge_with_head(self, batch: Batch, proposals: Proposals | None, drafted: Drafted, beside: float) -> HostTrees:
        """Return the best nodes of what the head and the other sources propose.

        Args:
            batch: requests of the round.
            proposals: proposals of the other sources; ``None`` without any.
            drafted: the head's trees, with the cumulative log-probability that it gives each node.
            beside: seconds that drafting has taken.
        """
        assert drafted.trees is not None
        head, nothing = drafted.trees.proposals(), list[DraftProposal | None]([None] * len(self.names))
        others = [nothing] * len(head) if proposals is None else proposals.said
        said = [[*said[:-2], own, said[-1]] for said, own in zip(others, head, strict=True)]
        self._last = Proposals(batch.requests, said, () if proposals is None else proposals.asked)
        return HostTrees(*self._chosen(batch, said, beside), drafted.levels, drafted.faults)

    # -- after it -----------------------------------------------------------------------------------------------

    def learn(self, passed: Sequence[Passed], verified: VerifiedTrees) -> list[Request]:
        """Compare the last proposals with the tokens that came, verified or not, and tell sources that learn from
        verified trees of them. Returns the requests of such sources."""
        last, self._last = self._last, Proposals()
        came = {p.request.request_id: p.tokens for p in passed}
        for r, said in zip(last.requests, last.said, strict=True):
            if any(said) and (tokens := came.get(r.request_id)):
                self.calibration.grade(said, tokens)
        return self._watch(last.asked, [p.request for p in passed], verified) if last.asked else []

    def _watch(self, asked: Collection[int], batch: Sequence[Request], verified: VerifiedTrees) -> list[Request]:
        """Tell the target's likeliest tokens in verified trees to the sources that learn from them and were ``asked``
        for the round, for requests that go on. Returns these requests."""
        learning = list[tuple[int, Request, list[DraftSession]]]()
        for i, r in enumerate(batch):
            if r.request_id in asked and r.finish_reason is None:
                sessions = [session for session in self.sources.begun(r) if session.observes]
                learning += [(i, r, sessions)] if sessions else []
        rows = verified.likeliest([i for i, *_ in learning], LIKELIEST) if learning else None
        if rows is None:  # also where a device has moved on
            return []
        for (*_, sessions), (tokens, top) in zip(learning, rows, strict=True):
            told = tuple(tokens), tuple(map(tuple, top))  # the same objects for all, which none of them can change
            for session in sessions:
                session.observe(*told)
        return [r for _, r, _ in learning]

    def forget(self, r: Request) -> None:
        """Forget a request that has ended."""
        self.sources.forget(r)

    def close(self) -> None:
        """Forget all requests, which have ended."""
        self._last = Proposals()
        self.sources.close()
