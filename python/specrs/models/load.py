"""Loads models from directories, and checks draft heads before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from specrs.models.acceptance import read_acceptance
from specrs.models.block_head import BlockHead
from specrs.models.config import ModelConfig
from specrs.models.eagle3 import Eagle3Head
from specrs.models.head_config import HeadConfig
from specrs.models.head_files import check_files, open_head, vocabulary_map
from specrs.models.head_forms import form_of
from specrs.models.live import ModelSource, model_json
from specrs.models.llama import LlamaModel
from specrs.models.ops import Ops
from specrs.models.pairs import ops_for
from specrs.models.placement import HOST


def load_target(directory: ModelSource, ops: Ops | None = None, max_context_len: int | None = None) -> LlamaModel:
    """The target model of a Hugging Face directory, or in memory; see `LlamaModel.load`."""
    return LlamaModel.load(directory, ops or ops_for(), max_context_len)


def load_draft(directory: str | Path, target: LlamaModel, ops: Ops | None = None) -> Eagle3Head | BlockHead:
    """The draft head of a directory, of any form, bound to its target, by default over the target's ops."""
    blocks = form_of(*model_json(directory, "config.json")).kind == "block"
    return (BlockHead if blocks else Eagle3Head).load(directory, ops or target.ops, target)


def check_draft(directory: str | Path, target: ModelConfig) -> tuple[HeadConfig, dict[str, tuple[int, ...]]]:
    """Return a head's configuration and the shapes of its tensors, checked against a target of which nothing is loaded.

    Raises as loading does, but for the vocabulary map, which is in the weights.
    """
    config, weights = open_head(directory, HOST)
    read_acceptance(directory)
    return config, check_files(config, weights, target)


def drafted_tokens(directory: str | Path, target: ModelConfig) -> int:
    """Return how many of the target's tokens a head that has passed `check_draft` can draft, by its vocabulary map.

    Raises DraftMismatchError.
    """
    config, weights = open_head(directory, HOST)
    return len(vocabulary_map(config, weights, target)[1])
