"""A speculative round computed again from scratch, in float64: the reference for what costs acceptance alone.

Tokens are exact whatever the draft proposes, so a fault on the draft's side shows in no token. It shows in the trees
and in how far they are accepted. Here are no caches, no pages, no plans, and none of the package's code. Each round
takes the target over all tokens, runs the head over all positions with the target's features, and grows the tree by
the rules of EAGLE-2 (arXiv:2406.16858): the K best children of each of the K best beams a step, and in the end the
V - 1 best of all candidates by cumulative log-probability, ties by lower index.

Where two candidates are so close that float32 may order them otherwise, the round is undecided: `Round.gap` is the
smallest distance between two scores, or two logits, that a decision of the round rests on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import functional

from modelzoo import read_weights

Weights = Mapping[str, torch.Tensor]


@dataclass
class Tree:
    """Nodes in order, the root first."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    scores: list[float] = field(default_factory=lambda: [0.0])  # cumulative log-probabilities

    def child(self, node: int, token: int) -> int | None:
        """The first child of a node that has this token."""
        return next((i for i, p in enumerate(self.parents) if p == node and self.tokens[i] == token), None)


@dataclass(frozen=True)
class Round:
    """The expected results of a round."""

    tree: Tree
    path: list[int]  # accepted nodes, the root first
    drawn: list[int]  # accepted tokens and one more
    gap: float


class Layers:
    """The parts that target and head have in common: norms, rotary attention, feed-forward."""

    def __init__(self, directory: Path, kv_dtype: torch.dtype | None) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.w: Weights = {k: v.double() if v.is_floating_point() else v for k, v in read_weights(directory).items()}
        self.kv_dtype = kv_dtype

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.config["rms_norm_eps"])

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """Return values as the KV cache holds them."""
        return x if self.kv_dtype is None else x.float().to(self.kv_dtype).double()

    def attend(self, name: str, x: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        """Attention of rows at `positions`; row i sees row j where `visible[i, j]`."""
        size = self.config["head_dim"]
        q, k, v = (self.linear(f"{name}.{p}_proj", x).view(len(x), -1, size).transpose(0, 1) for p in "qkv")
        frequency = self.config["rope_theta"] ** -(torch.arange(0, size, 2).double() / size)
        turn = torch.polar(torch.ones(1).double(), positions[:, None] * frequency)

        def turned(t: torch.Tensor) -> torch.Tensor:
            z = torch.complex(*t.chunk(2, dim=-1)) * turn
            return torch.cat((z.real, z.imag), dim=-1)

        group = self.config["num_attention_heads"] // self.config["num_key_value_heads"]
        k, v = (self.stored(t).repeat_interleave(group, dim=0) for t in (turned(k), v))
        read = functional.scaled_dot_product_attention(turned(q), k, v, attn_mask=visible)
        return self.linear(f"{name}.o_proj", read.transpose(0, 1).reshape(len(x), -1))

    def feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        act = functional.silu(self.linear(f"{name}.gate_proj", x)) * self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", act)


class Target(Layers):
    """A Llama, over one row of tokens at a time."""

    def __init__(self, directory: Path, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(directory, kv_dtype)
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def run(self, tokens: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(logits [n, vocab], what enters each layer [n, h]).

        A row depends on nothing behind it: after a run over a whole text, its beginnings cost nothing.
        """
        n, key = len(tokens), tuple(tokens)
        found = next((result for known, result in self._known.items() if known[:n] == key), None)
        if found is None:
            found = self._known[key] = self._run(key)
        logits, entering = found
        return logits[:n], [x[:n] for x in entering]

    def _run(self, tokens: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        n = len(tokens)
        x, entering = self.w["model.embed_tokens.weight"][list(tokens)], []
        causal = torch.ones(n, n).tril().bool()
        for i in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{i}"
            entering.append(x)
            x = x + self.attend(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x), torch.arange(n), causal)
            x = x + self.feed_forward(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))
        return self.norm("model.norm", x) @ self.w["lm_head.weight"].T, entering

    def next(self, tokens: Sequence[int]) -> tuple[int, float]:
        """The greedy token after `tokens`, and how far its logit is above the second."""
        logits = self.run(tokens)[0][-1]
        first, second = logits.topk(2).values.tolist()
        return int(logits.argmax()), first - second


class DraftHead(Protocol):
    """A head as a reference asks it: `Head`, or one of another form.

    Attributes:
        aux_layers: the layers whose input is a feature.
        ids: the target's token of each of the head's.
    """

    aux_layers: list[int]
    ids: list[int]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The head's feature of each row of the target's features, side by side."""

    def run(
        self, tokens: Sequence[int], features: torch.Tensor, positions: Sequence[int], visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities over the draft's vocabulary, hidden states) of every row; row i sees row j where
        `visible[i, j]`."""


class Head(Layers):
    """An EAGLE-3 head. A row pairs the feature of its position with the token of the next one."""

    def __init__(self, directory: Path, target: Target, kv_dtype: torch.dtype | None = None) -> None:
        super().__init__(directory, kv_dtype)
        self.embedding = self.w.get("embed_tokens.weight", target.w["model.embed_tokens.weight"])
        n = self.config["draft_vocab_size"]
        self.ids = (torch.arange(n) + self.w["d2t"] if "d2t" in self.w else torch.arange(n)).tolist()
        self.aux_layers: list[int] = self.config["eagle_aux_hidden_state_layer_ids"]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The head's feature of each row of the target's features, side by side."""
        return self.linear("fc", features)

    def run(
        self, tokens: Sequence[int], features: torch.Tensor, positions: Sequence[int], visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities over the draft's vocabulary, hidden states) of every row."""
        normed = self.norm("midlayer.hidden_norm", features)
        embedded = self.norm("midlayer.input_layernorm", self.embedding[list(tokens)])
        x = normed if self.config.get("norm_before_residual") else features
        x = x + self.attend(
            "midlayer.self_attn", torch.cat((embedded, normed), dim=-1), torch.tensor(positions), visible
        )
        x = x + self.feed_forward("midlayer.mlp", self.norm("midlayer.post_attention_layernorm", x))
        return (self.norm("norm", x) @ self.w["lm_head.weight"].T).log_softmax(-1), x


@dataclass(frozen=True)
class _Candidate:
    token: int
    parent: int  # candidate, or -1 for the root
    depth: int
    score: float


@dataclass(frozen=True)
class Reference:
    """A target and a head for it, and the shape of their trees: K, S, V."""

    target: Target
    head: DraftHead
    shape: tuple[int, int, int]
    lanes: bool = False  # a branch sees the earlier rows of its lane instead of its ancestors

    def round(
        self, tokens: Sequence[int], depth: int, following: Mapping[int, int] | None = None, begin: int = 0
    ) -> Round:
        """The greedy round after `tokens`, whose last one is the root, with a tree of at most `depth` levels.

        following: tokens in place of those that come after some positions, as the head saw them.
        begin: position that the head begins at; its rows before are never seen.
        """
        tree, gap = self.draft(tokens, depth, following, begin)
        path, drawn = [0], []
        while True:
            token, ahead = self.target.next([*tokens, *drawn])
            gap = min(gap, ahead)
            drawn.append(token)
            node = tree.child(path[-1], token)
            if node is None:
                return Round(tree, path, drawn, gap)
            path.append(node)

    def draft(
        self, tokens: Sequence[int], depth: int, following: Mapping[int, int] | None = None, begin: int = 0
    ) -> tuple[Tree, float]:
        """The tree of the next round, and the smallest distance that decided anything in it."""
        topk, steps, nodes = self.shape
        length = len(tokens) - 1
        levels = min(steps, depth)
        if levels <= 0:
            return Tree([tokens[-1]]), float("inf")
        _, entering = self.target.run(tokens[:-1])
        features = self.head.fuse(torch.cat([entering[i] for i in self.head.aux_layers], dim=-1))
        inputs = list(tokens[1:])
        for position, token in (following or {}).items():
            inputs[position] = token
        positions = list(range(length))
        sees: dict[int, set[int]] = {length - 1: set()}  # draft rows that the last row and the draft rows see
        gaps = [float("inf")]

        def states() -> tuple[torch.Tensor, torch.Tensor]:
            visible = torch.ones(len(inputs), len(inputs)).tril().bool()
            visible[begin:, :begin] = False
            for row, seen in sees.items():
                visible[row, length:] = torch.tensor([j in seen for j in range(length, len(inputs))])
            return self.head.run(inputs, features, positions, visible)

        def children(logprobs: torch.Tensor, parent: int, level: int, score: float) -> list[_Candidate]:
            best = _ranked(logprobs.tolist(), topk, gaps)
            return [_Candidate(self.head.ids[i], parent, level, score + float(logprobs[i])) for i in best]

        logprobs, hidden = states()
        candidates = children(logprobs[-1], -1, 1, 0.0)
        beams = list(range(topk))
        row_of: dict[int, int] = {-1: length - 1}  # row of a candidate that was expanded
        lanes: list[list[int]] = [[] for _ in range(topk)]
        for level in range(2, levels + 1):
            own = [len(inputs) + b for b in range(topk)]
            for b, at in enumerate(beams):
                beam = candidates[at]
                sees[own[b]] = {*(lanes[b] if self.lanes else sees[row_of[beam.parent]]), own[b]}
                lanes[b].append(own[b])
                inputs.append(beam.token)
                positions.append(length + level - 2)
                features = torch.cat((features, hidden[row_of[beam.parent]][None]))
            row_of |= dict(zip(beams, own, strict=True))
            logprobs, hidden = states()
            first = len(candidates)
            for b, at in enumerate(beams):
                candidates += children(logprobs[own[b]], at, level, candidates[at].score)
            if level < levels:
                beams = [first + i for i in _ranked([c.score for c in candidates[first:]], topk, gaps)]
        kept = sorted(_ranked([c.score for c in candidates], nodes - 1, gaps, in_order=False))
        tree = Tree([tokens[-1]])
        node_of = {-1: 0}
        for at in kept:
            node_of[at] = len(tree.tokens)
            tree.tokens.append(candidates[at].token)
            tree.parents.append(node_of[candidates[at].parent])
            tree.depths.append(candidates[at].depth)
            tree.scores.append(candidates[at].score)
        return tree, min(gaps)


def _ranked(scores: Sequence[float], count: int, gaps: list[float], in_order: bool = True) -> list[int]:
    """Indices of the `count` best scores, best first, ties by lower index.

    What the choice rests on is added to `gaps`: the distances between neighbours where the order counts, and the one
    between the last that is in and the first that is out.
    """
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    for i in range(min(count, len(order) - 1)):
        if in_order or i == count - 1:
            gaps.append(scores[order[i]] - scores[order[i + 1]])
    return order[:count]
