"""The host memory that a model's weights take once they are loaded, from its files' headers.

Products keep their matrices packed, in the dtype that `kept_dtype` says; embeddings stay as they are stored, norms and
biases become f32. A head's matrices stand in two parts, and the rows of keys and values of its last layer (of a block's
each layer) a second time, for passes that want no more.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from specrs.models.block_config import BlockConfig
from specrs.models.config import ModelConfig
from specrs.models.dense import kept_dtype
from specrs.models.head_config import Eagle1Config, HeadConfig
from specrs.models.head_files import layer_prefix
from specrs.models.head_forms import IGNORED, plain_name
from specrs.models.live import ModelSource
from specrs.models.llama import LlamaModel
from specrs.models.loader import Checkpoint, dtype_of
from specrs.models.placement import Placement

_TABLES = ("model.embed_tokens.weight", "embed_tokens.weight", "markov_head.markov_w1.weight",
           "markov_head.markov_w2.weight", "embed_proj.2.weight", "candidate_selector.predecessor_codebook",
           "candidate_selector.successor_codebook")  # fmt: skip


def target_bytes(config: ModelConfig, model: ModelSource, placement: Placement) -> int:
    """Return the bytes of host memory for a model whose files were checked."""
    weights = Checkpoint(model)
    names = list(LlamaModel.shapes(config))
    tied = _packed(weights, _TABLES[0], placement) if config.tie_word_embeddings else 0
    return tied + sum(_bytes(weights, name, placement) for name in names)


def head_bytes(config: HeadConfig, directory: str | Path, placement: Placement) -> int:
    """Return the bytes of host memory for a draft head whose files were checked."""
    weights = Checkpoint(directory, plain_name)
    unread = {"t2d", *IGNORED, "confidence_head.proj.weight", "confidence_head.proj.bias"}
    if isinstance(config, Eagle1Config):
        unread.add("lm_head.weight")  # a copy of the target's
    masked = config.hidden_size * placement.activations.itemsize if "mask_hidden" in weights else 0  # its feature
    names = [name for name in weights if name not in (*unread, "mask_hidden")]
    first = 0 if isinstance(config, BlockConfig) else config.num_layers - 1
    layers = map(layer_prefix, range(first, config.num_layers))
    twice = [f"{prefix}self_attn.{name}_proj.weight" for prefix in layers for name in "kv"]
    again = sum(_packed(weights, name, placement) for name in names if name in twice)
    return masked + again + sum(_bytes(weights, name, placement) for name in names)


def _bytes(weights: Checkpoint, name: str, placement: Placement) -> int:
    shape, stored = weights.shape(name), dtype_of(weights.dtype(name))
    if name in _TABLES or not stored.is_floating_point:
        return math.prod(shape) * (stored.itemsize if stored.is_floating_point else torch.int64.itemsize)
    if len(shape) == 2:
        return _packed(weights, name, placement)
    return math.prod(shape) * placement.activations.itemsize


def _packed(weights: Checkpoint, name: str, placement: Placement) -> int:
    return math.prod(weights.shape(name)) * kept_dtype(placement, dtype_of(weights.dtype(name))).itemsize
