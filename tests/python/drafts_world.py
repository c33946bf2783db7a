"""An engine whose rounds are watched, and held against a reference that computes each round from scratch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo import Pair, write_eagle3
from reference_drafts import Head, Reference, Target, Tree
from specrs import LLM, SamplingParams
from specrs import _specrs as core
from specrs._specrs import MergedDrafts, merge_drafts
from specrs.engine.drafting.gathering import Gathering, HostTrees

VOCAB = 6  # few, so that an untrained head is right often enough
# A decision counts where the reference's scores are further apart than this. Float32 moves them by about 1e-5.
DECIDED = 1e-3
CLOSE = 2e-4
MOST_NODES = 64


def head_for(target: Path, directory: Path, **options: Any) -> Path:
    odd = {"draft_vocab_size": 5, "aux_layers": (2, 0, 1), "rope_theta": 50.0, "rms_norm_eps": 1e-2}
    return write_eagle3(directory, target, **{**odd, **options})


@dataclass(frozen=True)
class Seen:
    """A round of one request, as the engine ran it."""

    request: int
    tokens: list[int]  # before the round; the last one is the root
    depth: int  # depth of the deepest node that can still be used
    tree: Tree
    path: list[int]
    drawn: list[int]


def trees_of(batch: core.TreeBatch, accepts: core.Accepts) -> list[tuple[Tree, list[int], list[int]]]:
    """The trees of a batch, each with its accepted path and drawn tokens."""
    fields = (batch.tokens, batch.parents, batch.depths, batch.scores)
    tokens, parents, depths, scores = (torch.from_dlpack(a).tolist() for a in fields)
    ends = list(itertools.accumulate(batch.sizes))
    cuts = [slice(end - size, end) for end, size in zip(ends, batch.sizes, strict=True)]
    trees = [Tree(tokens[c], parents[c], depths[c], scores[c]) for c in cuts]
    return list(zip(trees, accepts.paths, accepts.tokens, strict=True))


@dataclass
class Watched:
    """An engine whose rounds are kept."""

    llm: LLM
    tokens: dict[int, list[int]] = field(default_factory=dict)  # tokens of each request so far
    prompts: dict[int, int] = field(default_factory=dict)  # lengths of the prompts
    most: dict[int, int] = field(default_factory=dict)  # tokens at its end
    rounds: list[Seen] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)  # prompt tokens from the prefix cache

    def add(self, prompt: Sequence[int], max_tokens: int, **params: Any) -> int:
        request = self.llm.add(prompt, SamplingParams(max_tokens=max_tokens, **params))
        context = self.llm.config.max_context_len
        assert context is not None
        self.tokens[request], self.prompts[request] = list(prompt), len(prompt)
        self.most[request] = min(len(prompt) + max_tokens, context)
        return request

    def step(self) -> None:
        verified: list[tuple[Tree, list[int], list[int]]] = []
        with self.llm.watching(lambda batch, accepts: verified.extend(trees_of(batch, accepts))):
            events = self.llm.step()
        # The first token comes with the prompt's prefill, all others with rounds, in the order of the batch.
        of_rounds = [e for e in events if len(self.tokens[e.request_id]) > self.prompts[e.request_id]]
        for event, (drafted, path, drawn) in zip(of_rounds, verified, strict=True):
            before = list(self.tokens[event.request_id])
            assert event.token_ids == drawn[: len(event.token_ids)]
            depth = self.most[event.request_id] - len(before) - 1
            self.rounds.append(Seen(event.request_id, before, depth, drafted, path, drawn))
        for event in events:
            self.tokens[event.request_id] += event.token_ids
            if event.output is not None:
                self.cached[event.request_id] = event.output.usage.cached_tokens

    def finish(self) -> None:
        while self.llm.unfinished:
            self.step()
        self.llm.audit()

    def of(self, request: int) -> list[Seen]:
        return [seen for seen in self.rounds if seen.request == request]


def watched(pair: Pair, shape: tuple[int, int, int] | None, **options: Any) -> Watched:
    return Watched(LLM(pair.target, pair.draft, tree=shape, **options))


def choosing(gathering: Gathering, sizes: Callable[[MergedDrafts], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the head's trees be verified as the head scored them, each as far as ``sizes`` says; the root counts."""
    merged, vocab = gathering.merge_with_head, gathering.sources.vocab_size

    def cut(*args: Any) -> HostTrees:
        trees, found = merged(*args), []
        for tree, said in zip(trees.drafts, gathering._last.said, strict=True):
            own = said[-2]  # the head's
            whole = merge_drafts(tree.tokens[0], vocab, [] if own is None else [own], MOST_NODES, MOST_NODES)
            found.append(whole.pruned(sizes(whole), MOST_NODES))
        return replace(trees, drafts=found)

    monkeypatch.setattr(gathering, "merge_with_head", cut)


def reference(pair: Pair, shape: tuple[int, int, int], *, lanes: bool = False, bf16: bool = False) -> Reference:
    kv = torch.bfloat16 if bf16 else None
    target = Target(pair.target, kv)
    return Reference(target, Head(pair.draft, target, kv), shape, lanes)


def agree(
    want: Reference, rounds: Sequence[Seen], *, decided: float = DECIDED, close: float = CLOSE,
    firsts: Sequence[int] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Every decided round has the reference's tree, path and tokens, and nearly all are decided. firsts: of each round,
    the position that the head began at."""
    undecided = 0
    for last in {seen.request: seen for seen in rounds}.values():
        want.target.run([*last.tokens, *last.drawn])  # once for all rounds of a request
    for i, seen in enumerate(rounds):
        expected = want.round(seen.tokens, seen.depth, begin=0 if firsts is None else firsts[i], **options)
        if expected.gap < decided:
            undecided += 1
            continue
        at = f"round {i}, request {seen.request}, {len(seen.tokens)} tokens"
        assert seen.tree.tokens == expected.tree.tokens, at
        assert seen.tree.parents == expected.tree.parents, at
        assert seen.tree.depths == expected.tree.depths, at
        assert seen.tree.scores == pytest.approx(expected.tree.scores, abs=close), at
        assert (seen.path, seen.drawn) == (expected.path, expected.drawn), at
    assert undecided <= len(rounds) // 4, f"{undecided} of {len(rounds)} rounds rest on near ties"
