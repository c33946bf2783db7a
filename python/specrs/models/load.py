"""Loads models from directories."""

from __future__ import annotations

from pathlib import Path

from specrs.models.eagle3 import Eagle3Head
from specrs.models.live import ModelSource
from specrs.models.llama import LlamaModel
from specrs.models.ops import Ops
from specrs.models.pairs import ops_for


def load_target(directory: ModelSource, ops: Ops | None = None, max_context_len: int | None = None) -> LlamaModel:
    """The target model of a Hugging Face directory, or in memory; see `LlamaModel.load`."""
    return LlamaModel.load(directory, ops or ops_for(), max_context_len)


def load_draft(directory: str | Path, target: LlamaModel, ops: Ops | None = None) -> Eagle3Head:
    """The EAGLE-3 head of a directory, bound to its target, by default over the target's ops."""
    return Eagle3Head.load(directory, ops or target.ops, target)
