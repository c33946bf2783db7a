"""The protocol of a source of drafts, as the engine sees it. A class of a user's own may follow it.

A source proposes trees of tokens that may come next. Verification draws the target's own tokens and follows the drafts
that carry them, so nothing that a source says can change an output: probabilities decide time alone. A source never
sees another request's text, unless it is written to share it.

One `Drafter` serves an engine; it begins a `Drafting` for each request that drafts. The engine tells a drafting the
tokens that were committed, asks it for a tree before each round, and closes it when the request ends.
``examples/own_drafter.py`` has one.

All calls for one engine come from one thread. What one raises becomes a warning at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from specrs._specrs import DraftProposal


@dataclass(frozen=True)
class DraftRequest:
    """Facts of a request that a source may know as it begins.

    Attributes:
        request_id: the engine's, unique while the engine lives.
        prompt: tokens of the prompt.
        vocab_size: vocabulary size of the target; every token proposed must be below.
        prediction: tokens that the user expects in the output, in order; they need not follow the prompt.
        cache_salt: name by which the operator separates shared state; requests of different salts may share nothing.
            ``None``: the request shares nothing with any other.
    """

    request_id: int
    prompt: Sequence[int]
    vocab_size: int
    prediction: Sequence[int] = ()
    cache_salt: str | None = None


@dataclass(frozen=True)
class Proposal:
    """A tree below a request's last token, as lists of equal length; parents stand before their children.

    Attributes:
        parents: index of each node's parent in this proposal; -1 for a child of the request's last token.
        tokens: token of each node; siblings have different ones.
        probs: probability of each node that it is accepted, given that its parent is; in (0, 1].
        buckets: class of each node, in 0..63, for calibration: a source's nodes of one bucket are corrected alike (a
            length of match, a rank); ``None``: all are of class 0.
    """

    parents: Sequence[int] = ()
    tokens: Sequence[int] = ()
    probs: Sequence[float] = ()
    buckets: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


Drafts: TypeAlias = "Proposal | DraftProposal"
"""A proposal of a source, a user's own or one of the package: both hold the same four lists."""


class Drafting(Protocol):
    """One request's drafts from one source."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that were committed, in order, behind the prompt and the tokens told before."""

    def propose(self, nodes: int, depth: int) -> Drafts:
        """Return at most so many nodes, none deeper than so many levels below the last token; perhaps none."""

    def bytes(self) -> int:
        """Memory that it holds."""

    def close(self) -> None:
        """The request has ended, or drafts no longer. Called once or more often; no other call follows."""


@runtime_checkable
class Observing(Protocol):
    """A `Drafting` that learns from what the target made of a verified tree, accepted or not (token recycling)."""

    def observe(self, tokens: Sequence[int], top: Sequence[Sequence[int]]) -> None:
        """Learn the target's likeliest next tokens, ``top``, after each of ``tokens``, which are nodes of a verified
        tree; the likeliest first, at most 8."""


@runtime_checkable
class Holding(Protocol):
    """A `Drafter` that holds memory of its own, beside that of its draftings, such as a table that requests share."""

    def bytes(self) -> int:
        """Memory that it holds."""


class Drafter(Protocol):
    """A source of drafts; one serves an engine.

    Attributes:
        name: name in warnings, and in the sources of a traced tree; the names of an engine's drafters are different,
            and none is ``"head"`` or ``"grammar"``.
        depth: levels below a request's last token that it proposes at most, at least 1. The engine reads both once.
    """

    name: str
    depth: int

    def begin(self, request: DraftRequest) -> Drafting:
        """The request drafts from now on."""
