"""Reference EAGLE-2 decoding (arXiv:2406.16858) of one greedy request, as plain as it can be written.

K branches are kept at each of S steps, and the V - 1 best nodes by cumulative log-probability are verified under the
root. Every draft node attends to its true ancestors. L is the committed length: KV is valid for positions [0, L); the
bonus token, the tree's root, sits at position L and is not in the cache yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .config import BOS_ID
from .head import Head
from .target import KVCache, Target


@dataclass(frozen=True)
class TreeShape:
    """K branches, S steps, V nodes."""

    k: int
    s: int
    v: int


@dataclass
class Node:
    """One drafted token; `parent` indexes the candidate list, -1 is the root; `slot` its key in the draft's cache."""

    token: int
    parent: int
    depth: int
    score: float
    slot: int = -1


@dataclass
class Decoded:
    """A continuation and how each round earned its part of it."""

    tokens: list[int] = field(default_factory=list)
    per_round: list[int] = field(default_factory=list)


def greedy(model: Target, prompt: list[int], new: int) -> list[int]:
    """Plain greedy decoding, token by token."""
    device = model.rope.device
    cache = KVCache(model.cfg, 1, len(prompt) + new, device, torch.float32)
    n = len(prompt)
    at = torch.arange(n, device=device)
    hidden, _ = model.step(torch.tensor([prompt], device=device), at, at, cache, n, at[:, None] >= at[None, :])
    out = [int(model.logits(hidden[0, -1]).argmax())]
    while len(out) < new and out[-1] != BOS_ID:
        at = torch.tensor([n + len(out) - 1], device=device)
        hidden, _ = model.step(torch.tensor([[out[-1]]], device=device), at, at, cache, n + len(out), None)
        out.append(int(model.logits(hidden[0, -1]).argmax()))
    return out


class TreeDecoder:
    """The target, the head and their caches, for one request at a time."""

    def __init__(self, model: Target, head: Head, shape: TreeShape) -> None:
        self.model, self.head, self.shape = model, head, shape
        self.device = model.rope.device
        self.target_ids = head.target_ids.tolist()

    def embed(self, tokens: list[int]) -> Tensor:
        return self.model.model.embed_tokens(torch.tensor([tokens], device=self.device))

    def extend_draft(self, feats: Tensor, next_tokens: list[int], start: int) -> None:
        """Run the head on committed positions start.., of which features and next tokens are known."""
        n = len(next_tokens)
        at = torch.arange(start, start + n, device=self.device)
        mask = at[:, None] >= torch.arange(start + n, device=self.device)[None, :]
        out = self.head.step(self.embed(next_tokens), self.head.fc(feats), at, at, self.draft_kv, mask)
        self.last = out[:, -1:]

    def best_next(self, hidden: Tensor) -> tuple[list[list[float]], list[list[int]]]:
        """The K best continuations of each row of hidden [1, n, h]: log-probabilities and target tokens."""
        top = torch.log_softmax(self.head.logits(hidden[0]).float(), dim=-1).topk(self.shape.k)
        return top.values.tolist(), [[self.target_ids[i] for i in row] for row in top.indices.tolist()]

    def draft(self, length: int) -> list[Node]:
        """All candidates of the round, then the V - 1 best of them: parents come before children."""
        scores, tokens = self.best_next(self.last)
        nodes = [Node(t, -1, 1, s) for s, t in zip(scores[0], tokens[0], strict=True)]
        beam, hidden = list(range(len(nodes))), self.last.expand(-1, len(nodes), -1)
        used = length
        for depth in range(2, self.shape.s + 1):
            for b in beam:
                nodes[b].slot = used
                used += 1
            slots = torch.tensor([nodes[b].slot for b in beam], device=self.device)
            mask = torch.zeros(len(beam), used, dtype=torch.bool, device=self.device)
            mask[:, :length] = True
            for row, b in enumerate(beam):
                while b >= 0:
                    mask[row, nodes[b].slot] = True
                    b = nodes[b].parent
            at = torch.full((len(beam),), length + depth - 2, device=self.device)
            out = self.head.step(self.embed([nodes[b].token for b in beam]), hidden, at, slots, self.draft_kv, mask)
            scores, tokens = self.best_next(out)
            level = [
                (row, Node(t, b, depth, nodes[b].score + s))
                for row, b in enumerate(beam)
                for s, t in zip(scores[row], tokens[row], strict=True)
            ]
            best = sorted(range(len(level)), key=lambda i: -level[i][1].score)[: self.shape.k]
            beam = [len(nodes) + i for i in best]
            hidden = out[:, [level[i][0] for i in best]]
            nodes += [node for _, node in level]
        keep = sorted(sorted(range(len(nodes)), key=lambda i: -nodes[i].score)[: self.shape.v - 1])
        renamed = {old: new for new, old in enumerate(keep)}
        return [Node(n.token, renamed.get(n.parent, -1), n.depth, n.score) for n in (nodes[i] for i in keep)]

    def verify(self, root: int, nodes: list[Node], length: int) -> tuple[list[int], Tensor]:
        """(the target's token after each accepted node, root first; those nodes' aux features)."""
        n = len(nodes) + 1
        mask = torch.zeros(n, length + n, dtype=torch.bool, device=self.device)
        mask[:, : length + 1] = True
        for row, node in enumerate(nodes, start=1):
            mask[row, length:] = mask[node.parent + 1, length:]
            mask[row, length + row] = True
        at = torch.tensor([length, *(length + node.depth for node in nodes)], device=self.device)
        slots = torch.arange(length, length + n, device=self.device)
        ids = torch.tensor([[root, *(node.token for node in nodes)]], device=self.device)
        hidden, feats = self.model.step(ids, at, slots, self.kv, length + n, mask)
        answers = self.model.logits(hidden[0]).argmax(-1).tolist()
        path = [0]
        while True:
            wanted = answers[path[-1]]
            child = next((i + 1 for i, c in enumerate(nodes) if c.parent == path[-1] - 1 and c.token == wanted), None)
            if child is None:
                break
            path.append(child)
        rows = torch.tensor(path, device=self.device)
        self.kv.move(length + rows, length)
        return [answers[i] for i in path], feats[:, rows]

    @torch.no_grad()
    def decode(self, prompt: list[int], new: int) -> Decoded:
        """Greedy continuation of `prompt` until `new` tokens or the end of the document."""
        cfg = self.model.cfg
        spare = max(self.shape.v, self.shape.k * self.shape.s) + 1
        room = len(prompt) + new + self.shape.s + spare
        self.kv = KVCache(cfg, 1, room, self.device, torch.float32)
        self.draft_kv = torch.zeros(2, 1, cfg.num_key_value_heads, room, cfg.head_dim, device=self.device)
        length = len(prompt)
        at = torch.arange(length, device=self.device)
        hidden, feats = self.model.step(
            torch.tensor([prompt], device=self.device), at, at, self.kv, length, at[:, None] >= at[None, :]
        )
        bonus = int(self.model.logits(hidden[0, -1]).argmax())
        self.extend_draft(feats, [*prompt[1:], bonus], 0)
        result = Decoded(tokens=[bonus])
        while len(result.tokens) < new and result.tokens[-1] != BOS_ID:
            answers, feats = self.verify(bonus, self.draft(length), length)
            if BOS_ID in answers:
                answers = answers[: answers.index(BOS_ID) + 1]
            result.tokens += answers
            result.per_round.append(len(answers))
            bonus = answers[-1]
            self.extend_draft(feats[:, : len(answers)], answers, length)
            length += len(answers)
        return result
