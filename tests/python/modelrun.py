"""A model driven by hand through the real pool and planner: what the engine does, one pass at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specrs import _specrs as core
from specrs.models import Eagle3Head, LlamaModel


class Driver:
    """A pool, a planner and the KV caches of a target and perhaps a head."""

    def __init__(
        self,
        target: LlamaModel,
        head: Eagle3Head | None = None,
        *,
        page_size: int = 4,
        kv_dtype: torch.dtype = torch.float32,
        shape: tuple[int, int, int] = (4, 4, 16),
        max_context: int = 256,
        max_batch: int = 4,
    ) -> None:
        self.target, self.head = target, head
        self.shape = core.TreeShape(*shape)
        geometry = core.Geometry(max_batch, max_context, page_size, self.shape)
        pages = max_batch * geometry.row_pages + 1
        self.pool = core.Pool(pages, page_size, max_batch, geometry.row_pages)
        reads = target.ops.attention.capabilities
        self.planner = core.Planner(geometry, self.pool, format=reads.format, mask=reads.mask)
        self.kv = target.new_cache(pages, page_size, kv_dtype)
        self.draft_kv = head.new_cache(pages, page_size, kv_dtype) if head is not None else None
        self.reserve = geometry.alloc_len_per_decode

    def new(self) -> core.Sequence:
        return self.pool.create()

    def extend(
        self, seqs: Sequence[core.Sequence], starts: list[int], rows: list[list[int]], **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Appends rows[i] tokens at starts[i] of each sequence; (logits, features [Q, n_aux * h]) of all rows."""
        counts = [len(tokens) for tokens in rows]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        with self.pool.reserve(list(zip(seqs, ends, strict=True))) as lease:
            plan = self.planner.extend(seqs, starts, counts)
            tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
            logits, aux = self.target.forward(tokens, plan, self.kv, **options)
            lease.commit(ends)
        return logits.clone(), None if aux is None else torch.cat(aux.layers, 1)

    def decode_all(self, tokens: list[int], **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits (and features) of every position of a fresh sequence, fed one token at a time."""
        seq = self.new()
        parts = [self.extend([seq], [i], [[token]], **options) for i, token in enumerate(tokens)]
        self.pool.release([seq])
        logits = torch.cat([part[0] for part in parts])
        return logits, torch.cat([a for _, a in parts if a is not None]) if parts[0][1] is not None else None

    def verify(
        self, seqs: Sequence[core.Sequence], lens: list[int], parents: list[list[int]], tokens: list[list[int]]
    ) -> torch.Tensor:
        """Logits of every tree node, rows of all requests in order; nothing is committed."""
        trees = core.TreeBatch.from_parents(parents, tokens)
        needs = [(seq, n + len(p)) for seq, n, p in zip(seqs, lens, parents, strict=True)]
        with self.pool.reserve(needs):
            plan = self.planner.verify(seqs, lens, trees)
            logits, _ = self.target.forward(torch.tensor([t for row in tokens for t in row]), plan, self.kv)
            return logits.clone()

    def head_extend(
        self, seq: core.Sequence, start: int, tokens: list[int], aux: torch.Tensor, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft rows over the target's features, within what the sequence has allocated."""
        assert self.head is not None and self.draft_kv is not None
        plan = self.planner.extend([seq], [start], [len(tokens)])
        logits, hidden = self.head.extend(torch.tensor(tokens), self.by_layer(aux), plan, self.draft_kv, rows)
        return logits.clone(), hidden.clone()

    def head_write(self, seq: core.Sequence, start: int, tokens: list[int], aux: torch.Tensor) -> torch.Tensor:
        """Draft rows whose keys and values alone are wanted; returns them before the rotation."""
        assert self.head is not None and self.draft_kv is not None
        plan = self.planner.extend([seq], [start], [len(tokens)])
        return self.head.write(torch.tensor(tokens), self.by_layer(aux), plan, self.draft_kv).clone()

    def by_layer(self, aux: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Features [Q, n_aux * h] as the head takes them."""
        return aux.chunk(len(self.target.aux_layers), 1)


def path_to(node: int, parents: list[int]) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def random_parents(nodes: int, generator: torch.Generator) -> list[int]:
    """A random tree in parent order, root first."""
    return [-1, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes))]


def random_tokens(count: int, seed: int, vocab: int = 300) -> list[int]:
    """Tokens from a seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(0, vocab, (count,), generator=generator).tolist()
    return tokens
