"""Requests and sources in a world of numbers: real gathering by a clock that only passes, proposals and asking move."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from specrs._specrs import TreeShape
from specrs.drafters import DraftRequest, Proposal
from specrs.engine.drafting.chooser import TreePolicy
from specrs.engine.drafting.costs import Costs, PassCost
from specrs.engine.drafting.decisions import Drafting
from specrs.engine.drafting.gathering import Gathering
from specrs.engine.drafting.plans import RoundOutcome, RoundPlan
from specrs.engine.drafting.sources import Source, Sources
from specrs.engine.request.batch import Batch
from specrs.engine.request.request import Passed

VOCAB = 1000


@dataclass
class Clock:
    """Seconds, of which a plain round takes about one."""

    now: float = 0.0

    def seconds(self) -> float:
        return self.now


@dataclass(eq=False)
class Text:
    """A request, and the tokens that its target will draw.

    Attributes:
        prompt_len: tokens that are there from the beginning.
        tokens: tokens that are there.
        all: all tokens, with those that will come.
    """

    request_id: int
    all: list[int]
    prompt_len: int
    temperature: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = self.all[: self.prompt_len]
        self.params = SimpleNamespace(speculative=True, temperature=self.temperature, cache_salt=None)
        self.draws = SimpleNamespace(grammar=None)
        self.prediction: list[int] = []
        self.prefill_target = self.prompt_len
        self.proposed = self.drafting_rounds = 0
        self.seq, self.committed, self.error, self.finish_reason = None, 0, None, None

    @property
    def produced(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        return len(self.all) - len(self.tokens)

    @property
    def max_depth(self) -> int:
        return self.remaining - 1


def text(length: int, request_id: int = 0, prompt: int = 100) -> Text:
    rng = random.Random(request_id)
    return Text(request_id, [rng.randrange(VOCAB) for _ in range(prompt + length)], prompt)


@dataclass(eq=False)
class Foretells:
    """A source that knows what will come, and says what a function makes of it.

    Attributes:
        says: a function that returns the proposal, from the tokens that will come and the most nodes that it may have.
        beginning, asking: seconds.
        asked: position in the output of each time.
    """

    clock: Clock
    texts: Sequence[Text]
    says: Callable[[list[int], int], Proposal]
    beginning: float = 0.0
    asking: float = 0.01
    name: str = "foretells"
    depth: int = 15
    asked: list[int] = field(default_factory=list)

    def begin(self, request: DraftRequest) -> Any:
        self.clock.now += self.beginning
        told = next(t for t in self.texts if t.request_id == request.request_id)

        def propose(nodes: int, depth: int) -> Proposal:
            self.clock.now += self.asking
            self.asked.append(told.produced)
            return self.says(told.all[len(told.tokens) :], min(nodes, depth))

        return SimpleNamespace(extend=lambda _: None, propose=propose, bytes=lambda: 0, close=lambda: None)


@dataclass
class World:
    """One engine's gathering.

    Attributes:
        target: what the target's passes take.
        rounds, drafted: number of rounds that it has run, and of those with drafts.
    """

    clock: Clock
    drafting: Drafting
    gathering: Gathering
    target: PassCost
    rounds: int = 0
    drafted: int = 0

    @property
    def policy(self) -> TreePolicy:
        return self.drafting.policy

    @property
    def costs(self) -> Costs:
        return self.policy.costs

    def run(self, texts: Sequence[Text]) -> float:
        """Decode until all have ended; seconds."""
        began = self.clock.now
        while live := [t for t in texts if t.remaining > 0]:
            batch = Batch(live)  # type: ignore[arg-type]
            proposals = self.drafting._ask(batch)
            planned = self.clock.now
            self.rounds += 1
            hosted = None if proposals is None else proposals.trees
            sizes = [1] * len(live) if hosted is None else [len(tree) for tree in hosted.drafts]
            if hosted is None:
                self.clock.now += self.target.at(len(live))
                for t in live:
                    t.tokens.append(t.all[len(t.tokens)])
                passed = [Passed(t, t.tokens[-1:], 1) for t in live]  # type: ignore[arg-type]
            else:
                self.drafted += 1
                self.clock.now += self.target.at(sum(sizes))
                passed = [self._walk(t, tree) for t, tree in zip(live, hosted.drafts, strict=True)]
            verified: Any = SimpleNamespace(trees=SimpleNamespace(sizes=sizes))
            plan, took = RoundPlan(batch, trees=hosted, began=planned), self.clock.now - planned
            self.drafting.observe(RoundOutcome(plan, hosted, range(len(live)), passed, verified, took))
            for t in live:
                if t.remaining <= 0:
                    self.drafting.forget(t)  # type: ignore[arg-type]
        return self.clock.now - began

    def _walk(self, t: Text, tree: Any) -> Passed:
        node, drawn = 0, list[int]()
        while t.remaining > len(drawn):
            drawn.append(t.all[len(t.tokens) + len(drawn)])
            below = [i for i in range(1, len(tree)) if tree.parents[i] == node and tree.tokens[i] == drawn[-1]]
            if not below:
                break
            node = below[0]
        t.tokens += drawn
        return Passed(t, drawn, len(drawn))  # type: ignore[arg-type]


def world(clock: Clock, sources: Sequence[Any], rows: dict[int, float], tiers: Sequence[int] | None = None) -> World:
    """An engine whose target's passes take so many seconds, by their rows."""
    target, known = (PassCost(list(rows), list(rows.values())) for _ in range(2))
    gathering = Gathering(Sources(tuple(map(Source.of, sources)), VOCAB), 16, 15, tiers)
    drafting = Drafting(TreeShape(1, 8, 9), 1, False, gathering, tiers is not None, clock=clock.seconds)
    drafting.waiting = clock.seconds
    drafting.price(TreePolicy(Costs(known)))
    return World(clock, drafting, gathering, target)
