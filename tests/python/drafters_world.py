"""Drafters for tests: plain ones, and ones that do all that no drafter may."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from specrs.drafters import DraftRequest, Proposal


@dataclass
class Ngrams:
    """Proposes what followed the last tokens where they stood before, found by looking through all of them: a tree of
    what followed the longest, and the most recent, of these places.

    Attributes:
        begun, closed: ids of requests.
        told: for each request, the tokens that it was told of.
    """

    name: str = "ngrams"
    depth: int = 16
    begun: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    told: dict[int, list[int]] = field(default_factory=dict)

    def begin(self, request: DraftRequest) -> NgramDrafting:
        assert request.request_id not in self.begun, "one drafting for each request"
        self.begun.append(request.request_id)
        self.told[request.request_id] = []
        return NgramDrafting(self, request)


class NgramDrafting:
    """Drafting of one request."""

    def __init__(self, source: Ngrams, request: DraftRequest) -> None:
        self.source, self.request = source, request
        self.text = list(request.prompt)

    def extend(self, tokens: Sequence[int]) -> None:
        assert self.request.request_id not in self.source.closed
        self.text += tokens
        self.source.told[self.request.request_id] += tokens

    def propose(self, nodes: int, depth: int) -> Proposal:
        assert self.request.request_id not in self.source.closed
        whole = [*self.request.prediction, *self.text]
        found: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        parents, tokens, probs, buckets = list[int](), list[int](), list[float](), list[int]()
        for length in (6, 3, 2, 1):
            end = len(whole) - length
            key = whole[end:]
            at = [i for i in range(end - 1, -1, -1) if whole[i : i + length] == key][:2]
            for start in at:
                parent = -1
                for token in whole[start + length : start + length + depth]:
                    node = found.get((parent, token))
                    if node is None:
                        if len(tokens) == nodes:
                            return Proposal(parents, tokens, probs, buckets)
                        node = found[parent, token] = len(tokens)
                        parents.append(parent)
                        tokens.append(token)
                        probs.append(0.5 + length / 20)
                        buckets.append(length)
                    parent = node
        return Proposal(parents, tokens, probs, buckets)

    def bytes(self) -> int:
        return 8 * len(self.text)

    def close(self) -> None:
        self.source.closed.append(self.request.request_id)


class Likeliest(Ngrams):
    """The target's likeliest next tokens after a token, as it last met it: learns from verified trees.

    Attributes:
        seen: rows that it was told of.
    """

    def __init__(self, name: str = "likeliest", depth: int = 5) -> None:
        super().__init__(name, depth)
        self.seen = 0

    def begin(self, request: DraftRequest) -> LikeliestDrafting:
        super().begin(request)
        return LikeliestDrafting(self, request)


class LikeliestDrafting(NgramDrafting):
    """Drafting of one request."""

    def __init__(self, source: Likeliest, request: DraftRequest) -> None:
        super().__init__(source, request)
        self.after: dict[int, list[int]] = {}
        self.likeliest = source

    def observe(self, tokens: Sequence[int], top: Sequence[Sequence[int]]) -> None:
        assert len(tokens) == len(top)
        self.likeliest.seen += len(tokens)
        for token, row in zip(tokens, top, strict=True):
            assert len(set(row)) == len(row) <= 8 and all(0 <= t < self.request.vocab_size for t in row)
            self.after[token] = list(row)

    def propose(self, nodes: int, depth: int) -> Proposal:
        parents, tokens, probs = list[int](), list[int](), list[float]()
        level = [(-1, self.text[-1])]
        for _ in range(depth):
            below = []
            for parent, token in level:
                for rank, child in enumerate(self.after.get(token, ())[:3]):
                    if len(tokens) == nodes:
                        return Proposal(parents, tokens, probs)
                    below.append((len(tokens), child))
                    parents.append(parent)
                    tokens.append(child)
                    probs.append(0.6 / (1 + rank))
            level = below
        return Proposal(parents, tokens, probs)


@dataclass
class Knows:
    """Knows what will come, and hides it: beside a longer path that is wrong, and among siblings that are.

    Attributes:
        answers: for each prompt, the tokens that will come.
        right, wrong: levels that come, and levels of the longer path.
        vocab: tokens that there are.
    """

    answers: dict[tuple[int, ...], list[int]]
    right: int = 6
    wrong: int = 12
    vocab: int = 10
    name: str = "knows"
    depth: int = 32

    def begin(self, request: DraftRequest) -> Any:
        left = list(self.answers[tuple(request.prompt)])

        def extend(tokens: Sequence[int]) -> None:
            assert left[: len(tokens)] == list(tokens)
            del left[: len(tokens)]

        def propose(nodes: int, depth: int) -> Proposal:
            parents, tokens, probs = list[int](), list[int](), list[float]()

            def chain(path: Sequence[int], prob: float) -> None:
                for i, token in enumerate(path[: min(depth, nodes - len(tokens))]):
                    parents.append(len(tokens) - 1 if i else -1)
                    tokens.append(token)
                    probs.append(prob)

            if left:
                other = (left[0] + 1) % self.vocab
                chain([other] * self.wrong, 0.95)
                chain(left[: self.right], 0.9)
                if self.vocab > 2:
                    chain([(left[0] + 2) % self.vocab], 0.2)
            return Proposal(parents, tokens, probs)

        return SimpleNamespace(extend=extend, propose=propose, bytes=lambda: 0, close=_nothing)


@dataclass
class Says:
    """Proposes the result of a function, whatever it is."""

    says: Callable[[int, int], Any]
    name: str = "says"
    depth: int = 8

    def begin(self, request: DraftRequest) -> Any:
        return SimpleNamespace(extend=_nothing, propose=self.says, bytes=lambda: 0, close=_nothing)


@dataclass
class Fails:
    """Raises in one of its methods, and drafts as `Ngrams` do elsewhere."""

    method: str
    name: str = "fails"
    depth: int = 8

    def begin(self, request: DraftRequest) -> Any:
        if self.method == "begin":
            raise RuntimeError("no begin")
        inner = Likeliest().begin(request)

        def failing(*_: Any) -> Any:
            raise RuntimeError(f"no {self.method}")

        setattr(inner, self.method, failing)
        return inner


class Lying(Sequence[int]):
    """A list that says that it has 2 entries, and has as many as one asks for."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return 0

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0)


def _nothing(*_: object) -> None:
    """Told, and indifferent."""


RUBBISH: dict[str, Callable[[int, int], Any]] = {
    "nothing": lambda n, d: None,
    "a number": lambda n, d: 5,
    "a parent behind its child": lambda n, d: Proposal([1, -1], [1, 2], [0.5, 0.5]),
    "its own parent": lambda n, d: Proposal([0], [1], [0.5]),
    "a parent below -1": lambda n, d: Proposal([-2], [1], [0.5]),
    "a parent beyond all": lambda n, d: Proposal([2**70], [1], [0.5]),
    "a token beyond the vocabulary": lambda n, d: Proposal([-1], [10], [0.5]),
    "a token beyond 64 bits": lambda n, d: Proposal([-1], [2**70], [0.5]),
    "a token below 0": lambda n, d: Proposal([-1], [-1], [0.5]),
    "a token of another type": lambda n, d: Proposal([-1], ["a"], [0.5]),  # type: ignore[list-item]
    "a token between two": lambda n, d: Proposal([-1], [1.5], [0.5]),  # type: ignore[list-item]
    "NaN": lambda n, d: Proposal([-1], [1], [math.nan]),
    "a probability of 0": lambda n, d: Proposal([-1], [1], [0.0]),
    "a probability above 1": lambda n, d: Proposal([-1], [1], [1.5]),
    "a probability below 0": lambda n, d: Proposal([-1], [1], [-0.5]),
    "an infinite probability": lambda n, d: Proposal([-1], [1], [math.inf]),
    "no probability": lambda n, d: Proposal([-1], [1], [None]),  # type: ignore[list-item]
    "too many nodes": lambda n, d: Proposal([-1] * (n + 1), [0] * (n + 1), [0.5] * (n + 1)),
    "endless nodes": lambda n, d: Proposal(Lying(), Lying(), Lying()),
    "too deep": lambda n, d: Proposal([*range(-1, d)], [1] * (d + 1), [0.5] * (d + 1)),
    "unequal lists": lambda n, d: Proposal([-1, 0], [1], [0.5, 0.5]),
    "too few buckets": lambda n, d: Proposal([-1, 0], [1, 2], [0.5, 0.5], [0]),
    "a bucket beyond all": lambda n, d: Proposal([-1], [1], [0.5], [64]),
    "a bucket below 0": lambda n, d: Proposal([-1], [1], [0.5], [-1]),
    "a token twice": lambda n, d: Proposal([-1, -1], [1, 1], [0.5, 0.5]),
}
"""Proposals that are none, for a vocabulary of 10 tokens."""

ODD: dict[str, Callable[[int, int], Any]] = {
    "empty": lambda n, d: Proposal(),
    "the least probability": lambda n, d: Proposal([-1, -1], [1, 2], [5e-324, 5e-324]) if n > 1 else Proposal(),
    "certain and wrong": lambda n, d: Proposal([*range(-1, d - 1)], [7] * d, [1.0] * d) if d <= n else Proposal(),
    "as many as there is room for": lambda n, d: Proposal(
        [-1] * min(n, 10), [*range(min(n, 10))], [0.1] * min(n, 10), [63] * min(n, 10)
    ),
}
"""Proposals that are odd, and proposals all the same."""
