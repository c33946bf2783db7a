"""A head that drafts blocks, driven by hand through the real pool and planner beside its restatement."""

from __future__ import annotations

from pathlib import Path

import torch

import blockzoo
import modelzoo
import reference_blocks
from reference_blocks import Block
from specrs import _specrs as core
from specrs.models import BlockHead, LlamaModel, Ops, load_draft

LAYERS = 6
"""Layers of the target."""


class Driven:
    """A target and a head over a pool, driven pass by pass."""

    def __init__(self, directory: Path, ops: Ops, form: str, block: Block, page: int = 4) -> None:
        self.block, half = block, ops.placement.activations
        target = directory / "target"
        if not target.exists():
            sizes = {"vocab_size": block.vocab, "head_dim": 64} if ops.placement.device.type == "cuda" else {}
            modelzoo.write_target(target, num_hidden_layers=LAYERS, dtype=half, **sizes)
        weights = {name: weight.to(half) for name, weight in reference_blocks.random_block(block, 1).items()}
        blockzoo.save_block(directory / "head", form, block, LAYERS, weights)
        self.weights = {name: weight.float() for name, weight in weights.items()}
        self.target = LlamaModel.load(target, ops)
        head = load_draft(directory / "head", self.target)
        assert isinstance(head, BlockHead)
        self.head = head
        geometry = core.Geometry(4, 200, page, core.TreeShape(1, 31, 32))
        pages = 4 * geometry.row_pages + 1
        self.pool = core.Pool(pages, page, 4, geometry.row_pages)
        self.planner = core.Planner(geometry, self.pool)
        self.planner.set_debug(True)
        self.kv, self.draft_kv = (model.new_cache(pages, page, half) for model in (self.target, head))
        read = modelzoo.read_weights(target)
        self.tables = read["model.embed_tokens.weight"], read["lm_head.weight"]

    def begin(self, tokens: list[int], chunks: tuple[int, ...] = ()) -> tuple[core.Sequence, torch.Tensor]:
        """A sequence with these tokens, written by the head in chunks up to these positions, and all features."""
        seq, n = self.pool.create(), len(tokens)
        with self.pool.reserve([(seq, n)]) as lease:
            plan = self.planner.extend([seq], [0], [n])
            _, aux = self.target.forward(torch.tensor(tokens), plan, self.kv, aux=True)
            lease.commit([n])
        assert aux is not None
        start = 0
        for end in (*chunks, n):
            plan = self.planner.extend([seq], [start], [end - start])
            written = self.head.write([a[start:end].contiguous() for a in aux.layers], plan, self.draft_kv)
            assert [w.shape for w in written] == [(end - start, 2 * self.block.kv_heads * self.block.head_dim)] * len(
                written
            )
            start = end
        return seq, torch.cat(aux.layers, 1).clone()

    def draft(
        self, seqs: list[core.Sequence], lens: list[int], roots: list[int], rows: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = rows or self.block.rows
        with self.pool.reserve([(s, length + n) for s, length in zip(seqs, lens, strict=True)]):
            plan = self.planner.extend(seqs, lens, [n] * len(seqs))
            if not self.block.causal:
                plan = plan.attending_block()
            tokens = torch.tensor([t for root in roots for t in self.head.block(root, n)])
            skipped = 0 if self.block.anchor else 1
            wanted = torch.tensor([i * n + row for i in range(len(seqs)) for row in range(skipped, n)])
            logits, hidden = self.head.draft(tokens, plan, self.draft_kv, wanted)
            return logits.clone(), hidden.clone()

    def reference(
        self, features: torch.Tensor, token: int, rows: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_blocks.logits_of(self.block, self.weights, *self.tables, features, token, rows)
