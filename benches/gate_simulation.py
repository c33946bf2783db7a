"""A request as the runner's gate sees it, without a model: what passes cost and how likely drafts are is given."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from specrs.engine.costs import PLAIN, SPECULATIVE, Costs, PassCost
from specrs.engine.policy import LOOK_BACK, SpeculationGate, TreePolicy

_ROWS = [1, 8, 64]
_DEPTH = 8


@dataclass
class Decoded:
    """What a request took.

    Attributes:
        tokens: drawn.
        took: rounds of plain decoding.
        rounds: those that drafted.
        deceived: looks back that opened the gate.
    """

    tokens: int = 0
    took: float = 0.0
    rounds: int = 0
    deceived: int = 0


def policy(step: float = 0.2, growth: float = 0.02) -> TreePolicy:
    """Passes in seconds: the target's of one row takes 1 and ``growth`` for each row, the head's take ``step``; writing
    draft KV takes a little for each row."""
    return TreePolicy(
        Costs(
            target=PassCost(_ROWS, [1.0 + growth * r for r in _ROWS]),
            draft_step=PassCost(_ROWS, [step] * 3),
            draft_extend=PassCost(_ROWS, [step * (1.0 + 0.03 * r) for r in _ROWS]),
            overhead=PassCost([PLAIN, SPECULATIVE], [1e-4, 2e-4]),
        )
    )


def decode(p: TreePolicy, gate: SpeculationGate, tokens: int, chance: float, rng: random.Random) -> Decoded:
    """``tokens`` as the runner decodes them. Each draft token is accepted, and each token of a look back is a hit, with
    ``chance``, whatever the head claims: it is sure of itself."""
    costs, done = p.costs, Decoded()
    claims = [i * math.log(0.97) for i in range(1, _DEPTH + 1)]
    lag: int | None = 1  # features that wait; none where the head is ready to draft
    while done.tokens < tokens:
        stake, drafts = p.stake(1, 1), False
        ready = lag is None and not gate.refused
        gate.follows = gate.follows and gate.account >= (stake if ready else p.needed(gate, 1, lag or 0))
        gate.follows = gate.follows and (ready or not p.too_late(gate, lag or 0, tokens - done.tokens))
        if gate.follows and lag is not None and lag > gate.patience:
            before = gate.account
            gate.pay(p.looked_back(1, lag, p.look_back(1) * p.costs.plain(1)))
            done.took += before - gate.account
            drafts = gate.looked_back(sum(rng.random() < chance for _ in range(LOOK_BACK)), stake)
            done.deceived += drafts
            lag = None
        elif gate.follows:
            drafts = (lag is None and not gate.refused) or (
                lag is not None and p.early(gate, lag) and gate.would_open(LOOK_BACK, stake)
            )
        if not (drafts and gate.follows and p.drafting([gate.account])[0]):
            done.took, done.tokens = done.took + 1.0, done.tokens + 1
            if gate.follows:
                gate.pay(p.waiting(1, 1))
                done.took, lag = done.took + p.waiting(1, 1), (lag or 0) + 1
            continue
        lag = None
        limit, levels = p.limit(1, [gate.account]), 1
        while levels < _DEPTH and p.deepen(1, levels, [(gate.kind, claims[levels - 1 : levels])], limit):
            levels += 1
        drafting = costs.drafting(1, 1, levels - 1)
        choice = p.choose(1, [(score, gate.kind) for score in claims[:levels]], drafting, limit)
        accepted = next((i for i in range(choice.nodes) if rng.random() >= chance), choice.nodes)
        cost = (drafting + costs.target.at(1 + choice.nodes)) / costs.plain(1)
        gate.spec_round(accepted - (cost - 1.0))
        gate.kind.learn(claims[: choice.nodes], accepted, (accepted + 1) / cost)
        done.took, done.tokens, done.rounds = done.took + cost, done.tokens + accepted + 1, done.rounds + 1
    return done


def request(p: TreePolicy, tokens: int, chance: float, rng: random.Random) -> Decoded:
    """One request from its gate's opening to what the engine learns of it."""
    gate = p.gate(1.0, tokens, 0)
    done = decode(p, gate, tokens, chance, rng)
    gate.kind.ended(done.tokens, gate.net, gate.loan)
    return done


def simulate(
    steps: tuple[float, ...], growths: tuple[float, ...], chances: tuple[float, ...], lengths: tuple[int, ...]
) -> list[dict[str, float]]:
    """Speed as a multiple of plain decoding's over a grid: the mean, and the worst, of 6 engines of 16 requests."""
    rows = []
    for step in steps:
        for growth in growths:
            for chance in chances:
                for tokens in lengths:
                    ratios = []
                    for seed in range(6):
                        p, rng = policy(step, growth), random.Random(seed)
                        done = [request(p, tokens, chance, rng) for _ in range(16)]
                        ratios.append(sum(d.tokens for d in done) / sum(d.took for d in done))
                    stake = policy(step, growth).stake(1, 1)
                    rows.append(
                        {"step": step, "growth": growth, "smallest_round": round(1.0 + stake, 3), "chance": chance}
                        | {"tokens": tokens, "mean": round(statistics.mean(ratios), 4), "worst": round(min(ratios), 4)}
                    )
    return rows
