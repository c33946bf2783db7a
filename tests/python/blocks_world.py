"""Heads that draft all levels in one pass, for engines: a small one of each form, which its target often follows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import blockzoo
import headzoo
import modelzoo
import reference_blocks
import reference_heads
from modelzoo import VOCAB, Pair
from reference_blocks import Block
from reference_heads import Sizes

LAYERS = 4
SMALL = Block(vocab=VOCAB, mask=3, streams=(1, 3), rows=6)
FORMS: dict[str, tuple[str, Any]] = {
    "DFlash": ("DFlash", SMALL),
    "JetSpec": ("JetSpec", replace(SMALL, causal=True, rows=16)),
    "DFlash2": ("DFlash2", replace(SMALL, taps=2, candidates=6)),
    "DSpark": ("DSpark", replace(SMALL, anchor=True, markov="vanilla")),
    "DSpark of DeepSpec": ("DeepSpec", replace(SMALL, anchor=True, markov="rnn", own_embedding=True)),
    "Domino": ("Domino", replace(SMALL, free=1, anchor=True)),
    "DSpark of speculators": (
        "speculators",
        replace(SMALL, anchor=True, markov="gated", draft_vocab=7, own_embedding=True, own_scores=True),
    ),
}
FORMS["P-EAGLE"] = (
    "P-EAGLE", Sizes(hidden=64, vocab=VOCAB, draft_vocab=None, mask=3, levels=5, layers=2, streams=(1, 2, 3)),
)  # fmt: skip


def pair_of(directory: Path, name: str, **changes: Any) -> Pair:
    """A target and a head that often foretells it."""
    form, b = FORMS[name]
    b = replace(b, **changes)
    target = modelzoo.write_target(directory / "target", vocab_size=b.vocab, max_position_embeddings=256)
    if isinstance(b, Sizes):
        headzoo.save_head(
            directory / "head", form, b, LAYERS, headzoo.agree(target, b, reference_heads.random_head(b, 1))
        )
        return Pair(target, directory / "head")
    weights = reference_blocks.random_block(b, 1)
    if b.draft_vocab is None:
        weights = blockzoo.agree(target, b, weights)
    blockzoo.save_block(directory / "head", form, b, LAYERS, weights)
    return Pair(target, directory / "head")
