"""A draft head's directory: which form it has, and whether its tensors are those that its configuration calls for.

Everything here reads headers alone, but for `vocabulary_map`, whose map is in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specrs.models.block_config import BlockConfig
from specrs.models.config import ModelConfig
from specrs.models.errors import DraftMismatchError, ModelFileError, UnsupportedModelError
from specrs.models.head_config import Eagle1Config, Eagle3Config, HeadConfig
from specrs.models.head_forms import IGNORED, LAYER, form_of, other_by_tensor, plain_name, why_not
from specrs.models.layer import LayerKind, layer_shapes
from specrs.models.live import model_json
from specrs.models.loader import Checkpoint
from specrs.models.placement import HOST, Placement

# Tensors that a key of config.json calls for, by the beginnings of their names.
_BY_KEY = {"input_norm.": "norm_before_fc", "fc_norm.": "fc_norm"}


def open_head(directory: str | Path, placement: Placement) -> tuple[HeadConfig, Checkpoint]:
    """Return a head's configuration, and its file. Raises UnsupportedModelError and ModelFileError."""
    raw, path = model_json(directory, "config.json")
    form_of(raw, path)  # a form that its name alone refuses is refused without the file
    weights = Checkpoint(directory, plain_name, placement)
    for name in weights:
        if (other := other_by_tensor(name)) is not None:
            raise UnsupportedModelError(f"tensor {name}", list(weights.shape(name)), why_not(other), weights.path(name))
    form = form_of(raw, path, {*weights})
    if form.kind == "eagle1":
        return Eagle1Config.from_dict(raw, path, form), weights
    config = (BlockConfig if form.kind == "block" else Eagle3Config).from_dict(raw, path, form)
    if isinstance(config, BlockConfig) and (extra := weights.directory / "mask_embedding.pt").exists():
        why = "an embedding of the mask beside the weights is not implemented; heads without the file run"
        raise UnsupportedModelError("mask_embedding.pt", extra.name, why, extra)
    if raw.get("tie_word_embeddings") and "embed_tokens.weight" in weights and "lm_head.weight" not in weights:
        why = (
            "the file has embed_tokens.weight and no lm_head.weight, and servers would score by these embeddings: "
            "not implemented; add lm_head.weight, or set false for the target's lm_head"
        )
        raise UnsupportedModelError("tie_word_embeddings", raw["tie_word_embeddings"], why, path)
    numbers = [name.split(".")[1] for name in weights if name.startswith("layers.")]
    layers = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
    if layers != config.num_layers and not (layers == 1 and form.says_target_layers):
        raise UnsupportedModelError("num_hidden_layers", config.num_layers, f"the file has {layers}", path)
    return replace(config, num_layers=layers), weights


def layer_prefix(index: int) -> str:
    """Return the prefix of a layer's tensors."""
    return f"layers.{index}." if index else LAYER


def layer_kind(weights: Checkpoint, prefix: str) -> LayerKind:
    """Return the kind of a layer. Published heads disagree on which key of config.json switches biases on, and none has
    one for the norms of queries and keys, so the file decides."""
    return LayerKind(
        qkv_bias=f"{prefix}self_attn.q_proj.bias" in weights,
        o_bias=f"{prefix}self_attn.o_proj.bias" in weights,
        mlp_bias=f"{prefix}mlp.up_proj.bias" in weights,
        qk_norm=any(f"{prefix}self_attn.{name}.weight" in weights for name in ("q_norm", "k_norm")),
    )


def first_norm(weights: Checkpoint, prefix: str) -> str:
    """Return the name of the norm with which a layer behind the first begins: sglang's readers take `hidden_norm`,
    those of vLLM and speculators `input_layernorm`, which counts where a file has both."""
    usual, other = f"{prefix}input_layernorm", f"{prefix}hidden_norm"
    return other if f"{other}.weight" in weights and f"{usual}.weight" not in weights else usual


def check_files(config: HeadConfig, weights: Checkpoint, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Check every tensor's name, shape and dtype, and what the target must lend if the file lacks it.

    Returns:
        The shapes.
    """
    config.check_target(target)
    if isinstance(config, Eagle1Config):
        return _check_eagle1(config, weights)
    if isinstance(config, BlockConfig):
        return _check_block(config, weights, target)
    h, features = config.hidden_size, len(config.aux_layers_for(target))
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, features * config.target_hidden_size),
        f"{LAYER}input_layernorm.weight": (h,),
        f"{LAYER}hidden_norm.weight": (h,),
        "norm.weight": (h,),
        **layer_shapes(config, layer_kind(weights, LAYER), LAYER, 2 * h),
    }
    ignored = [*IGNORED]
    for prefix in map(layer_prefix, range(1, config.num_layers)):
        expected[f"{first_norm(weights, prefix)}.weight"] = (h,)
        expected |= layer_shapes(config, layer_kind(weights, prefix), prefix, h)
        ignored.append(f"{prefix}hidden_norm.weight")
    if config.mask_token is not None:
        expected["mask_hidden"] = (1, 1, features * config.target_hidden_size)
    if config.norm_before_fc:
        expected["input_norm.weight"] = (features * config.target_hidden_size,)
    if config.fc_norm:
        expected |= {f"fc_norm.{i}.weight": (config.target_hidden_size,) for i in range(features)}
    if "fc.bias" in weights:
        expected["fc.bias"] = (h,)
    _check_fc(weights, features, config.target_hidden_size)
    for name in weights:
        key = next((key for start, key in _BY_KEY.items() if name.startswith(start)), None)
        if key is not None and not getattr(config, key):
            why = f"a norm that {key} = true in config.json calls for, which has not; add it if the head has that norm"
            raise UnsupportedModelError(f"tensor {name}", list(weights.shape(name)), why, weights.path(name))
    return _checked(config, weights, target, expected, ignored)


def _checked(
    config: Eagle3Config | BlockConfig,
    weights: Checkpoint,
    target: ModelConfig,
    expected: dict[str, tuple[int, ...]],
    ignored: Sequence[str],
) -> dict[str, tuple[int, ...]]:
    """Check the tensors that are expected, those of vocabularies beside them. Returns the shapes of all."""
    _check_vocabulary(config, weights, target, expected)
    integers = [name for name in ("d2t", "t2d") if name in weights]
    expected.update({name: (config.draft_vocab_size if name == "d2t" else config.vocab_size,) for name in integers})
    weights.check(expected, integers=integers, ignored=[name for name in ignored if name not in expected])
    return expected


def _check_fc(weights: Checkpoint, features: int, size: int) -> None:
    """Raise DraftMismatchError where `fc` reads another number of features than the configuration names."""
    if "fc.weight" in weights:
        columns = (weights.shape("fc.weight") or (0,))[-1]
        if columns != features * size:
            raise DraftMismatchError("columns of fc.weight", columns, f"{features} aux layers x hidden_size {size}")


def _check_block(config: BlockConfig, weights: Checkpoint, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    h, features, rank = config.hidden_size, config.aux_count, config.markov_rank
    scale = target.block.embedding_scale
    if scale != 1.0 and config.embedding_scale is None and "embed_tokens.weight" not in weights:
        why = (
            f"the target multiplies embeddings by {scale:g}, and the head reads the target's; say in config.json which "
            f"it was trained with, {scale:g} or 1"
        )
        raise UnsupportedModelError(
            "input_embedding_scale", None, why, weights.path("fc.weight").parent / "config.json"
        )
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, features * config.target_hidden_size), "hidden_norm.weight": (h,), "norm.weight": (h,),
    }  # fmt: skip
    for prefix in map(layer_prefix, range(config.num_layers)):
        expected[f"{prefix}input_layernorm.weight"] = (h,)
        expected |= layer_shapes(config, layer_kind(weights, prefix), prefix, h)
    if "fc.bias" in weights:
        expected["fc.bias"] = (h,)
    if config.markov is not None:
        expected["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        expected["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
    if config.markov == "gated":
        expected |= {"markov_head.gate_proj.weight": (rank, h + rank), "markov_head.gate_proj.bias": (rank,)}
    if config.markov == "rnn":
        expected["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + h)
        expected["markov_head.joint_proj.bias"] = (3 * rank,)
    if (gru := config.gru) is not None:
        expected |= {
            "prefix_gru.weight_ih_l0": (3 * gru.state, h), "prefix_gru.weight_hh_l0": (3 * gru.state, gru.state),
            "embed_proj.0.weight": (gru.inner, h + gru.state), "embed_proj.2.weight": (config.vocab_size, gru.inner),
        }  # fmt: skip
    if (conv := config.conv) is not None:
        kernel, rows = (2, conv.taps, h), 2 * conv.taps * h // conv.group
        for place in (
            f"{layer_prefix(i)}{part}_conv" for i in range(config.num_layers) for part in ("attention", "mlp")
        ):
            expected |= {f"{place}.base_kernel": kernel, f"{place}.kernel_projection.weight": (rows, h)}
    if (selector := config.selector) is not None:
        expected["candidate_selector.hidden_projection.weight"] = (selector.rank, h)
        for side in ("predecessor", "successor"):
            expected[f"candidate_selector.{side}_codebook"] = (config.vocab_size, selector.rank)
    if config.confidence is not None:
        expected |= {"confidence_head.proj.weight": (1, config.confidence), "confidence_head.proj.bias": (1,)}
    _check_fc(weights, features, config.target_hidden_size)
    return _checked(config, weights, target, expected, IGNORED)


def _check_vocabulary(
    config: Eagle3Config | BlockConfig, weights: Checkpoint, target: ModelConfig, expected: dict[str, tuple[int, ...]]
) -> None:
    """Add the embeddings and the last product to what is expected, where the file has them; else the target's must
    fit."""
    h = config.hidden_size
    lends = target.hidden_size == h
    if "embed_tokens.weight" in weights:
        expected["embed_tokens.weight"] = (config.vocab_size, h)
    elif not lends:
        raise DraftMismatchError(
            "hidden_size",
            h,
            f"embeddings of width {target.hidden_size}",
            "the head has no embed_tokens.weight of its own",
        )
    if "lm_head.weight" in weights:
        rows = (weights.shape("lm_head.weight") or (0,))[0]
        if rows != config.draft_vocab_size:
            raise DraftMismatchError("draft_vocab_size", config.draft_vocab_size, f"lm_head.weight with {rows} rows")
        expected["lm_head.weight"] = (config.draft_vocab_size, h)
    elif not lends or config.draft_vocab_size != target.vocab_size:
        raise ModelFileError(weights.path("lm_head.weight"), "missing, and the target's does not fit", "lm_head.weight")


def _check_eagle1(config: Eagle1Config, weights: Checkpoint) -> dict[str, tuple[int, ...]]:
    h = config.hidden_size
    expected = {"fc.weight": (h, 2 * h), **layer_shapes(config, layer_kind(weights, LAYER), LAYER, h)}
    if "fc.bias" in weights:
        expected["fc.bias"] = (h,)
    if "embed_tokens.weight" in weights:
        expected["embed_tokens.weight"] = (config.vocab_size, h)
    weights.check(expected, ignored=("lm_head.weight", *IGNORED))  # some have a copy of the target's
    return expected


def vocabulary_map(
    config: HeadConfig, weights: Checkpoint, target: ModelConfig
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (d2t int64 [draft vocabulary]: the number to add to a draft id, None where nothing is added; and the sums:
    target ids), on the host."""
    draft = torch.arange(config.draft_vocab_size)
    if "d2t" not in weights:
        if config.draft_vocab_size != config.vocab_size:
            why = f"a d2t map, since vocab_size is {config.vocab_size}; the file has none"
            raise DraftMismatchError("draft_vocab_size", config.draft_vocab_size, why)
        return None, draft
    d2t = weights.load("d2t").to(HOST.device).long()
    ids = draft + d2t
    limit = target.vocab_size
    outside = ((ids < 0) | (ids >= limit)).nonzero().flatten()
    if outside.numel():
        at = int(outside[0])
        raise DraftMismatchError(
            "d2t", f"{int(d2t[at])} at draft id {at}, so target id {int(ids[at])},", f"ids in 0..{limit}"
        )
    first = torch.full((limit,), -1)
    first[ids.flip(0)] = draft.flip(0)
    twice = (first[ids] != draft).nonzero().flatten()
    if twice.numel():
        at = int(twice[0])
        got = f"target id {int(ids[at])} for draft ids {int(first[ids[at]])} and {at}"
        raise DraftMismatchError("d2t", got, "one draft id for each target id")
    if "t2d" in weights:
        known = weights.load("t2d").to(HOST.device).bool()
        odd = (known != (first >= 0)).nonzero().flatten()
        if odd.numel():
            at = int(odd[0])
            raise DraftMismatchError("t2d", f"{bool(known[at])} at target id {at}", f"d2t says {bool(first[at] >= 0)}")
    return d2t, ids
