"""Requests as the runner's gate sees them, without a model: what passes cost and how likely drafts are is given."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from specrs._specrs import DraftCalibration, DraftProposal, choose_drafts
from specrs.engine.drafting.budget import Account
from specrs.engine.drafting.chooser import TAIL, TreePolicy
from specrs.engine.drafting.costs import Costs, PassCost

_ROWS = [1, 8, 64]
_DEPTH, _CLAIM = 8, 0.97


@dataclass
class Simulated:
    """A request.

    Attributes:
        account: account of the loss that drafts may cause.
        tokens: limit of the request's tokens.
        chance: probability that a draft token is accepted.
        ends: tokens at which it ends by itself.
        produced: tokens so far.
        lag: positions that the head runs over before it drafts.
        rounds: number of rounds that drafted.
    """

    account: Account
    tokens: int
    chance: float
    ends: int
    produced: int = 0
    lag: int = 1
    rounds: int = 0


@dataclass
class Decoded:
    """Figures of requests that ran together.

    Attributes:
        requests: requests that ran.
        took: rounds of plain decoding, of each request that waited for them.
        tokens: drawn in all.
        behind: loss before each round, and at the end.
        drawn: tokens by then.
    """

    requests: list[Simulated]
    took: float = 0.0
    tokens: int = 0
    behind: list[float] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)

    def note(self) -> None:
        """A round ended, or the first one begins."""
        self.behind.append(self.took - self.tokens)
        self.drawn.append(self.tokens)

    @property
    def rounds(self) -> int:
        """Rounds with drafts, over all requests."""
        return sum(r.rounds for r in self.requests)


@dataclass(eq=False)
class Engine(TreePolicy):
    """What an engine knows of drafts: the policy, and the calibration of their probabilities."""

    calibration: DraftCalibration = field(default_factory=lambda: DraftCalibration(1))


def policy(step: float = 0.2, growth: float = 0.02) -> Engine:
    """Passes in seconds: the target's of one row takes 1 and ``growth`` for each row, the head's take ``step``; writing
    draft KV takes a little for each row."""
    extend = PassCost(_ROWS, [step * (1.0 + 0.03 * r) for r in _ROWS])
    return Engine(
        Costs(
            target=PassCost(_ROWS, [1.0 + growth * r for r in _ROWS]),
            draft_step=PassCost(_ROWS, [step] * 3),
            draft_extend=extend,
        )
    )


def decode(p: Engine, requests: Sequence[Simulated], rng: random.Random) -> Decoded:
    """Decode requests in one batch as the runner does, until the last has ended. The head is sure of itself, whatever
    its chances are. Seconds count for each request of the batch, which all wait."""
    done = Decoded(list(requests))
    claims = [i * math.log(_CLAIM) for i in range(1, _DEPTH + 1)]
    while live := [r for r in requests if r.produced < r.ends]:
        done.note()
        _round(p, live, rng, claims, done)
    done.note()
    return done


def _round(p: Engine, live: Sequence[Simulated], rng: random.Random, claims: Sequence[float], done: Decoded) -> None:
    """One round of a batch."""
    batch, costs, plain, kind = len(live), p.costs, p.costs.plain(len(live)), p.kind(1.0)
    drafting = [r.account.left(batch) > 0.0 for r in live]
    some = [r for r, drafts in zip(live, drafting, strict=True) if drafts]
    nodes: list[int] = []
    seconds = plain
    if some:
        levels = 1
        while levels < _DEPTH and p.deepen(batch, levels, [(kind, claims[levels - 1 : levels]) for _ in some]):
            levels += 1
        drafts_cost = sum(costs.draft_extend.at(r.lag) for r in some) + (levels - 1) * costs.draft_step.at(len(some))
        chain = DraftProposal(list(range(-1, levels - 1)), list(range(levels)), [_CLAIM] * levels)
        cost = costs.target.table, drafts_cost, list[int]()
        asked = [(0, [chain if drafts else None], levels, None) for drafts in drafting]
        trees, _, seconds = choose_drafts(asked, p.calibration, _DEPTH, _DEPTH + 1, cost)
        nodes = [len(tree) - 1 for tree, drafts in zip(trees, drafting, strict=True) if drafts]
    done.took += seconds / plain * batch
    drawn = {
        id(r): next((i for i in range(n) if rng.random() >= r.chance), n) for r, n in zip(some, nodes, strict=True)
    }
    gain = (batch + sum(drawn.values())) / batch / (seconds / plain)
    wins: list[float] = []
    for r in live:
        accepted = min(drawn.get(id(r), 0), r.ends - r.produced - 1)  # tokens after the end won nothing
        r.produced += accepted + 1
        r.account.earn(accepted + 1, batch)
        done.tokens += accepted + 1
        if id(r) in drawn:
            wins.append(accepted)
            kind.learn(gain)
            p.calibration.grade([chain], [*range(drawn[id(r)]), _DEPTH])
            r.lag, r.rounds = accepted + 1, r.rounds + 1
        else:
            r.lag = min(r.lag + 1, TAIL)
    won = p.won(batch, sum(n > 0 for n in nodes), seconds, wins) if some else []
    for r, one in zip(some, won, strict=True):
        r.account.pay(-one, batch)


def begin(p: Engine, tokens: int, chance: float, *, ends: int | None = None) -> Simulated:
    """A new request, as the engine admits it.

    Args:
        p: policy of the engine.
        tokens: limit of the request's tokens.
        chance: see `Simulated`.
        ends: see `Simulated`; by default at its limit.
    """
    return Simulated(p.account(1.0, tokens), tokens, chance, tokens if ends is None else ends)


def request(p: Engine, tokens: int, chance: float, rng: random.Random, ends: int | None = None) -> Decoded:
    """Decode one request by itself."""
    return decode(p, [begin(p, tokens, chance, ends=ends)], rng)


def simulate(
    steps: tuple[float, ...],
    growths: tuple[float, ...],
    chances: tuple[float, ...],
    lengths: tuple[int, ...],
    batches: tuple[int, ...] = (1,),
) -> list[dict[str, float]]:
    """Speed as a multiple of plain decoding's over a grid: the mean, and the worst, of 4 engines of 16 requests.

    ``batches``: requests that run together. Half of a batch have the chance, the others none.
    """
    rows = []
    grid = ((b, s, g, c, n) for b in batches for s in steps for g in growths for c in chances for n in lengths)
    for batch, step, growth, chance, tokens in grid:
        ratios = []
        for seed in range(4):
            p, rng = policy(step, growth), random.Random(seed)
            took = drawn = 0.0
            for _ in range(-(-16 // batch)):
                some = [begin(p, tokens, chance * (i % 2 == 0)) for i in range(batch)]
                done = decode(p, some, rng)
                took, drawn = took + done.took, drawn + done.tokens
            ratios.append(drawn / took)
        costs = policy(step, growth).costs
        smallest = (costs.drafting(batch, batch, 1) + costs.target.at(2 * batch)) / costs.plain(batch)
        rows.append(
            {"batch": batch, "step": step, "growth": growth, "smallest_round": round(smallest, 3), "chance": chance}
            | {"tokens": tokens, "mean": round(statistics.mean(ratios), 4), "worst": round(min(ratios), 4)}
        )
    return rows
