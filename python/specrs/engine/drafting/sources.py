"""Sources of drafts beside the head: one engine's drafters, and their proposals for each request.

A drafter may be a user's own. If it raises an error or proposes no valid tree, the request goes on without it, and a
warning tells the user its name. Nothing leaves this module that is out of bounds.

A warning may be an error (``-W error``), and a drafter is called in the midst of passes. So warnings wait until
`Sources.warn` is called, between passes.
"""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from specrs._specrs import DraftProposal
from specrs.drafters import (
    CorpusDrafter,
    Drafter,
    Drafting,
    DraftRequest,
    Drafts,
    Holding,
    Observing,
    RecyclingDrafter,
    SuffixDrafter,
)
from specrs.engine.request.request import Request

HEAD = "head"  # among `drafters`
GRAMMAR = "grammar"  # what a request's grammar forces, beside all of them

_BUCKETS = 64  # of calibration, of a source
_LEAST = 1e-30  # the core's probabilities have 32 bits: one below these would be 0


@dataclass(frozen=True)
class Source:
    """A drafter of an engine, under the name and depth that it had when the engine was made.

    Attributes:
        name: in warnings and counts.
        depth: levels below a request's last token that it is asked for at most.
        drafter: what drafts.
    """

    name: str
    depth: int
    drafter: Drafter

    @classmethod
    def of(cls, drafter: Drafter) -> Source:
        """Return the source of a drafter, with its present name and depth."""
        return drafter if isinstance(drafter, Source) else cls(drafter.name, drafter.depth, drafter)

    def begin(self, request: DraftRequest) -> Drafting:
        """Begin a request, as `Drafter.begin` does."""
        return self.drafter.begin(request)

    @property
    def foreign(self) -> bool:
        """True if the drafter is a user's own, which may wait for other threads or machines."""
        return not isinstance(self.drafter, SuffixDrafter | RecyclingDrafter | CorpusDrafter)

    def bytes(self) -> int:
        """Return the bytes that the drafter shares between requests, as far as it says so."""
        try:
            return max(operator.index(self.drafter.bytes()), 0) if isinstance(self.drafter, Holding) else 0
        except Exception:  # the drafter can draft all the same
            return 0


def checked(proposal: Drafts, nodes: int, depth: int, vocab_size: int) -> DraftProposal:
    """Return a drafter's proposal as a valid tree; if it is none, raise ValueError, TypeError or an error of its own.

    A proposal of the core's own drafters may be deeper than ``depth``; merging cuts it. No more of a proposal is read
    than one node above ``nodes``.
    """
    if proposal is None:
        raise TypeError("it returned None; it returns a Proposal, perhaps an empty one")
    if isinstance(proposal, DraftProposal):  # a tree, if not perhaps of this request
        if not proposal.fits(nodes, vocab_size):
            raise ValueError(f"{proposal} for at most {nodes} nodes of a vocabulary of {vocab_size} tokens")
        return proposal
    parents = [operator.index(p) for p in islice(proposal.parents, nodes + 1)]
    tokens = [operator.index(t) for t in islice(proposal.tokens, nodes + 1)]
    probs = [float(p) for p in islice(proposal.probs, nodes + 1)]
    count = len(tokens)
    buckets = [0] * count
    if proposal.buckets is not None:
        buckets = [operator.index(b) for b in islice(proposal.buckets, nodes + 1)]
    if count > nodes:
        raise ValueError(f"more than {nodes} nodes")
    sizes = [len(parents), count, len(probs), len(buckets)]
    if any(size != count for size in sizes):
        raise ValueError(f"parents, tokens, probs and buckets of {sizes} entries: they must be of equal length")
    _check_nodes(parents, tokens, probs, buckets, depth, vocab_size)
    return DraftProposal(parents, tokens, [max(p, _LEAST) for p in probs], buckets)


def _check_nodes(
    parents: Sequence[int], tokens: Sequence[int], probs: Sequence[float], buckets: Sequence[int], depth: int,
    vocab_size: int,
) -> None:  # fmt: skip
    """Raise ValueError unless these are the nodes of a tree of up to ``depth`` levels."""
    levels: list[int] = []
    seen: set[tuple[int, int]] = set()
    for i, (parent, token, prob, bucket) in enumerate(zip(parents, tokens, probs, buckets, strict=True)):
        if not -1 <= parent < i:
            raise ValueError(f"parents[{i}] = {parent}: must be -1 or a node before it")
        if not 0 <= token < vocab_size:
            raise ValueError(f"tokens[{i}] = {token}: outside the vocabulary 0..{vocab_size - 1}")
        if not 0.0 < prob <= 1.0:  # neither is NaN
            raise ValueError(f"probs[{i}] = {prob}: must be in (0, 1]")
        if not 0 <= bucket < _BUCKETS:
            raise ValueError(f"buckets[{i}] = {bucket}: must be in 0..{_BUCKETS - 1}")
        if (parent, token) in seen:
            raise ValueError(f"tokens[{i}] = {token}: a sibling before it has the same token")
        seen.add((parent, token))
        levels.append(1 if parent < 0 else levels[parent] + 1)
        if levels[i] > depth:
            raise ValueError(f"node {i} lies {levels[i]} levels deep; {depth} were asked for")


@dataclass(eq=False)
class DraftSession:
    """One request's drafting of one source.

    Attributes:
        drafting: ``None`` once it has failed or is closed.
        tokens: of the request, that it has been told of.
        observes: whether it learns from verified trees.
        faults: warnings that wait, of all draftings.
    """

    source: Source
    request_id: int
    faults: deque[str]
    drafting: Drafting | None = None
    tokens: int = 0
    observes: bool = False

    def begin(self, request: DraftRequest) -> None:
        """Begin to draft for the request."""
        try:
            self.drafting = self.source.begin(request)
            if self.drafting is None:
                raise TypeError("begin() returned None; it returns a drafting")
            self.observes = isinstance(self.drafting, Observing)
        except Exception as error:
            self.fail("begin", error)
        self.tokens = len(request.prompt)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Tell the drafter the request's tokens that it does not know."""
        if self.drafting is None or len(tokens) <= self.tokens:
            return
        new, self.tokens = list(tokens[self.tokens :]), len(tokens)
        try:
            self.drafting.extend(new)
        except Exception as error:
            self.fail("extend", error)

    def propose(self, tokens: Sequence[int], nodes: int, depth: int, vocab_size: int) -> DraftProposal | None:
        """Tell the drafter the request's tokens, and return its proposal; ``None`` if it proposes nothing."""
        depth = min(depth, self.source.depth)
        if nodes < 1 or depth < 1:
            return None
        self.catch_up(tokens)
        if self.drafting is None:
            return None
        try:
            proposal = checked(self.drafting.propose(nodes, depth), nodes, depth, vocab_size)
            return proposal if len(proposal) else None
        except Exception as error:
            self.fail("propose", error)
            return None

    def observe(self, tokens: Sequence[int], top: Sequence[Sequence[int]]) -> None:
        """Tell the drafter the tokens of a verified tree, and the likeliest tokens behind each."""
        if self.drafting is None or not self.observes:
            return
        try:
            self.drafting.observe(tokens, top)  # type: ignore[attr-defined]
        except Exception as error:
            self.fail("observe", error)

    def bytes(self) -> int:
        """Return the bytes that the drafting says it holds."""
        if self.drafting is None:
            return 0
        try:
            return max(operator.index(self.drafting.bytes()), 0)
        except Exception as error:
            self.fail("bytes", error)
            return 0

    def fail(self, what: str, error: Exception) -> None:
        """End the drafting after an error; the request goes on without it."""
        self.close(quiet=True)
        self.faults.append(f"{self._said(what, error)}; request {self.request_id} goes on without it")

    def close(self, quiet: bool = False) -> None:
        """End the drafting; ``quiet`` if it has failed already, so that no other error is reported."""
        drafting, self.drafting = self.drafting, None
        if drafting is None:
            return
        try:
            drafting.close()
        except Exception as error:
            if not quiet:
                self.faults.append(self._said("close", error))

    def _said(self, what: str, error: Exception) -> str:
        try:
            why = str(error)
        except Exception:  # an exception of a user's may fail too
            why = "no message"
        return f"drafter {self.source.name!r}: {what}(): {type(error).__name__}: {why}"


@dataclass(eq=False)
class Sources:
    """The drafters of one engine, and their draftings of each live request.

    Attributes:
        all: the drafters, in the user's order.
        vocab_size: of the target.
    """

    all: tuple[Source, ...]
    vocab_size: int
    _told: dict[int, list[DraftSession]] = field(default_factory=dict)  # by request
    _faults: deque[str] = field(default_factory=deque)

    @cached_property
    def foreign(self) -> bool:
        """True if any is a user's own."""
        return any(source.foreign for source in self.all)

    def begun(self, request: Request) -> list[DraftSession]:
        """Return a request's draftings; none if it has not begun."""
        return self._told.get(request.request_id, [])

    def begin(self, request: Request) -> list[DraftSession]:
        """Begin a request's draftings. `DraftSession.propose` tells each of them new tokens."""
        told = [DraftSession(source, request.request_id, self._faults) for source in self.all]
        self._told[request.request_id] = told
        prompt = tuple(request.tokens[: request.prompt_len])
        known = DraftRequest(
            request.request_id, prompt, self.vocab_size, tuple(request.prediction), request.params.cache_salt
        )
        for one in told:
            one.begin(known)
        return told

    def forget(self, request: Request) -> None:
        """Forget a request that has ended, or has never begun."""
        for one in self._told.pop(request.request_id, ()):
            one.close()

    def close(self) -> None:
        """Forget all requests, which have ended."""
        told, self._told = self._told, {}
        for each in told.values():
            for one in each:
                one.close()

    def bytes(self) -> int:
        """Return the bytes that draftings say they hold, and that drafters share between requests."""
        held = sum(one.bytes() for told in self._told.values() for one in told)
        return held + sum(source.bytes() for source in self.all)

    def warn(self) -> None:
        """Warn the user of the failures since the last call.

        Where warnings are errors, the first one is raised, with the others as notes, so that each step raises once.
        """
        if not self._faults:  # every step asks
            return
        faults = list(self._faults)
        self._faults.clear()
        for i, fault in enumerate(faults, 1):
            try:
                warnings.warn(fault, RuntimeWarning, stacklevel=2)
            except RuntimeWarning as error:
                if hasattr(error, "add_note"):  # from Python 3.11 on
                    for other in faults[i:]:
                        error.add_note(other)
                raise
