"""Tiny models with random weights, written as Hugging Face directories: config.json, safetensors, tokenizer.json.

Deterministic in `seed`, without transformers. Weights are large enough that logits differ clearly between tokens, so
that a test on the chosen token is a test on the whole computation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specrs.models.config import ModelConfig
from specrs.models.families import FAMILIES
from specrs.models.head_config import Eagle1Config, Eagle3Config
from specrs.models.layer import LayerKind, layer_shapes
from specrs.models.llama import LlamaModel

VOCAB = 10  # tokens of the tiny pair


@dataclass(frozen=True)
class Pair:
    """Directories of a target and a head for it."""

    target: Path
    draft: Path


def target_config(architecture: str = "LlamaForCausalLM", **overrides: Any) -> dict[str, Any]:
    """config.json of a small target: GQA with 2 kv heads, 4 layers, 300 tokens."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": FAMILIES[architecture].model_type,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": FAMILIES[architecture].acts[0],
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if FAMILIES[architecture].act_key != "hidden_act":
        config[FAMILIES[architecture].act_key] = config.pop("hidden_act")
    if architecture.startswith(("Phi3", "SmolLM3")):  # their own default is beyond this vocabulary
        config["pad_token_id"] = 0
    if architecture == "MistralForCausalLM":
        config["sliding_window"] = None
    if FAMILIES[architecture].caps:
        config["attn_logit_softcapping"] = None
    config.update(overrides)
    null = ("sliding_window", "attn_logit_softcapping")
    return {key: value for key, value in config.items() if value is not None or key in null}


def write_target(
    directory: str | Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a target with random weights; `overrides` go into config.json. Returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    raw = target_config(architecture, **overrides)
    config = ModelConfig.from_dict(raw)
    write_json(directory / "config.json", raw)
    weights = random_weights(LlamaModel.shapes(config), seed, dtype)
    if offset := config.block.norm_offset:  # the offset brings norms near 1
        weights |= {name: weight - offset for name, weight in weights.items() if name.endswith("norm.weight")}
    write_weights(directory, weights, shards)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_eagle3(
    directory: str | Path,
    target: str | Path,
    *,
    seed: int = 1,
    draft_vocab_size: int | None = 120,
    aux_layers: tuple[int, ...] | None = (1, 2, 3),
    dtype: torch.dtype = torch.float32,
    own_embedding: bool = False,
    qk_norm: bool = False,
    **overrides: Any,
) -> Path:
    """Writes an EAGLE-3 head with random weights for the target in a directory.

    `draft_vocab_size` None: the target's own vocabulary, without d2t and t2d. `aux_layers` are inputs of layers,
    written at the top level of config.json; None: left out. `qk_norm`: its layer is Qwen3's, whose norms of queries and
    keys make scores large enough to tell.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    base = ModelConfig.from_directory(target)
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": base.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": base.vocab_size,
        "draft_vocab_size": draft_vocab_size or base.vocab_size,
        "max_position_embeddings": base.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    if aux_layers is not None:
        raw["eagle_aux_hidden_state_layer_ids"] = list(aux_layers)
    raw.update(overrides)
    write_json(directory / "config.json", raw)
    config = Eagle3Config.from_dict(raw)
    shapes = eagle3_shapes(config, len(config.aux_layers_for(base)), qk_norm)
    if own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, config.hidden_size)
    weights = random_weights(shapes, seed, dtype)
    for name in ("q_norm", "k_norm") if qk_norm else ():
        weights[f"midlayer.self_attn.{name}.weight"] *= 2
    if draft_vocab_size is not None:
        ids = torch.randperm(base.vocab_size, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size].sort()[
            0
        ]
        weights["d2t"] = ids - torch.arange(draft_vocab_size)
        weights["t2d"] = torch.zeros(base.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    write_weights(directory, weights)
    return directory


def write_eagle1(
    directory: str | Path,
    target: str | Path,
    *,
    seed: int = 1,
    bias: bool = True,
    own_embedding: bool = True,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Writes an EAGLE-1 (or EAGLE-2) head with random weights for the target in a directory, as published: the
    configuration of a model of one layer, `fc`, and a layer without a norm on its input. `qk_norm`: its layer is
    Qwen3's, as of `write_eagle3`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    base = ModelConfig.from_directory(target)
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": base.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": base.vocab_size,
        "max_position_embeddings": base.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bias": bias,
        **overrides,
    }
    write_json(directory / "config.json", raw)
    config, h = Eagle1Config.from_dict(raw), base.hidden_size
    shapes = {
        "fc.weight": (h, 2 * h),
        **layer_shapes(config, LayerKind(qkv_bias=qkv_bias, qk_norm=qk_norm), "layers.0.", h),
    }
    if bias:
        shapes["fc.bias"] = (h,)
    if own_embedding:
        shapes["embed_tokens.weight"] = (config.vocab_size, h)
    weights = random_weights(shapes, seed, dtype)
    for name in ("q_norm", "k_norm") if qk_norm else ():
        weights[f"layers.0.self_attn.{name}.weight"] *= 2
    write_weights(directory, weights)
    return directory


def agree(target: str | Path, draft: str | Path, common: float = 1.0, slope: float = 0.4) -> None:
    """Makes a random head draft what its target would choose, often and for several tokens, in trees and chains.

    One direction is added to every embedding (`common`), and its score grows by `slope` from token to token, in a
    random order; so all hidden states rank the tokens alike, but for what the context makes of them. The head passes
    the target's features on, adds little, and scores by the target's weights. Its vocabulary is the target's. A head of
    EAGLE-1 passes its one feature on.
    """
    big, small = read_weights(target), read_weights(draft)
    first = "midlayer.self_attn.o_proj.weight" not in small
    table, scores, fc = big["model.embed_tokens.weight"], big["lm_head.weight"], small["fc.weight"]
    (tokens, h), dtype = table.shape, table.dtype
    generator = torch.Generator().manual_seed(9)
    direction = torch.randn(h, generator=generator).sign()
    bonus = slope * (1.0 + torch.randperm(tokens, generator=generator))
    big["model.embed_tokens.weight"] = (table.float() + common * direction).to(dtype)
    big["lm_head.weight"] = (scores.float() + bonus[:, None] * direction / h).to(dtype)
    features = fc.shape[1] // h
    passes = torch.eye(h).repeat(1, features) / features
    if first:  # [embedding, feature]
        passes[:, :h] = 0.0
        passes[:, h:] = torch.eye(h)
    small["fc.weight"] = (0.1 * fc.float() + passes).to(dtype)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        small[f"{'layers.0' if first else 'midlayer'}.{name}.weight"] *= 0.3
    if not first:
        small["lm_head.weight"] = big["lm_head.weight"].clone()
    write_weights(Path(target), big)
    write_weights(Path(draft), small)


def eagle3_shapes(config: Eagle3Config, features: int, qk_norm: bool = False) -> dict[str, tuple[int, ...]]:
    """Tensors of a head as published, without the vocabulary map."""
    h = config.hidden_size
    return {
        "fc.weight": (h, features * config.target_hidden_size),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        **layer_shapes(config, LayerKind(qk_norm=qk_norm), "midlayer.", 2 * h),
        "norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
    }


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Norm weights near 1, biases near 0, matrices scaled to keep activations at about unit size."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1.0 + 0.1 * noise
        elif name.endswith(".bias"):
            value = 0.1 * noise
        elif name.endswith("embed_tokens.weight"):
            value = noise
        else:
            value = noise * 1.5 / shape[-1] ** 0.5
        weights[name] = value.to(dtype)
    return weights


def write_weights(directory: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """model.safetensors, or `shards` files of it and their index."""
    if shards == 1:
        save_file(weights, directory / "model.safetensors")
        return
    names = sorted(weights)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[i::shards]}
        save_file(part, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def read_weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a directory of one file."""
    return load_file(Path(directory) / "model.safetensors")


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def edit_config(directory: str | Path, **changes: Any) -> None:
    """Changes keys of config.json; None removes one."""
    path = Path(directory) / "config.json"
    raw = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    write_json(path, {key: value for key, value in raw.items() if value is not None})


def write_tokenizer(directory: str | Path) -> None:
    """A byte-level tokenizer.json: ids 0..2 are <unk>, <s>, </s>; 3..258 the bytes. Every text round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i + 3 for i, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab={"<unk>": 0, "<s>": 1, "</s>": 2, **vocab}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(Path(directory) / "tokenizer.json"))
