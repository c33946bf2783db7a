"""Directories of heads that draft blocks, as trainers write them, over random weights of `reference_blocks`.

Sources: the code of DFlash's authors, SpecForge's `configs`, JetSpec, speculators' `models/dflash`, `models/dflash2`
and `models/dspark`, DeepSpec's `modeling/dspark`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from modelzoo import read_weights, write_json, write_weights
from reference_blocks import Block, Weights, random_block


def config_of(form: str, b: Block, target_layers: int) -> dict[str, Any]:
    """The head's config.json, as a trainer writes it."""
    layer = {
        "hidden_size": b.hidden, "num_hidden_layers": b.layers, "num_attention_heads": b.heads,
        "num_key_value_heads": b.kv_heads, "head_dim": b.head_dim, "intermediate_size": b.inner, "vocab_size": b.vocab,
        "rms_norm_eps": b.eps, "hidden_act": "silu", "max_position_embeddings": 512, "attention_bias": b.biases,
        "layer_types": ["full_attention"] * b.layers,
    }  # fmt: skip
    outputs = [stream - 1 for stream in b.streams]
    markov = {} if b.markov is None else {"markov_rank": b.rank, "markov_head_type": b.markov}
    said = {"enable_confidence_head": b.confidence, "confidence_head_with_markov": b.markov is not None}
    scales = {
        key: value
        for key, value, usual in (
            ("output_multiplier", b.logit_scale, 1.0), ("input_embedding_scale", b.embedding_scale, 1.0),
            ("final_logit_softcapping", b.cap, None),
        )
        if value != usual
    }  # fmt: skip
    gru = {} if b.free is None else {"emb_dim": b.rank, "gru_hidden_dim": b.state, "pure_draft_prefix_len": b.free}
    sizes = {"conv_kernel_size": b.taps, "conv_group_size": b.group, "selector_rank": b.rank,
             "selector_top_k": b.candidates} if b.taps else {}  # fmt: skip
    if form == "speculators":
        kind = "dspark" if b.anchor else "dflash2" if b.taps else "dflash"
        name = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator", "dflash2": "DFlash2DraftModel"}[kind]
        usual = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "head_dim": 128}
        nested = {key: value for key, value in layer.items() if usual.get(key) != value}
        more: dict[str, Any] = {}
        if kind == "dspark":
            more = {"num_anchors": 256, "sample_from_anchor": True, **markov, **said}
        if kind == "dflash2":
            more = {"sample_from_anchor": False, "draft_ffn_type": "dense", **sizes}
        return {
            "architectures": [name], "speculators_model_type": kind, "block_size": b.rows, "mask_token_id": b.mask,
            "aux_hidden_state_layer_ids": list(b.streams), "draft_vocab_size": b.draft_vocab or b.vocab,
            "target_hidden_size": b.target_hidden, "sliding_window_non_causal": False, "tie_word_embeddings": False,
            "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/model"}},
            "speculators_version": "0.9.0", "transformers_version": "5.24.0", "dtype": "float32", **more, **scales,
            "transformer_layer_config": {
                **nested, "model_type": "qwen3", "rope_parameters": {"rope_theta": b.theta, "rope_type": "default"},
            },
        }  # fmt: skip
    flat = {
        **layer, "model_type": "qwen3", "rope_theta": b.theta, "rope_scaling": None, "block_size": b.rows,
        "num_target_layers": target_layers, "tie_word_embeddings": False, "use_cache": True, "sliding_window": None,
        "use_sliding_window": False, "max_window_layers": 5, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
        "initializer_range": 0.02, "attention_dropout": 0.0,
    }  # fmt: skip
    if b.draft_vocab is not None:
        flat["draft_vocab_size"] = b.draft_vocab
    if b.target_hidden != b.hidden:
        flat["target_hidden_size"] = b.target_hidden
    if form == "DeepSpec":
        return {
            **flat, "architectures": ["Qwen3DSparkModel"], "mask_token_id": b.mask, "target_layer_ids": outputs,
            "num_anchors": 512, "markov_rank": 0, **markov, **said, "_attn_implementation": "flex_attention",
        }  # fmt: skip
    section: dict[str, Any] = {"mask_token_id": b.mask, "target_layer_ids": outputs, **scales, **sizes}
    if form == "DFlash2":
        section["block_size"] = flat.pop("block_size")
        flat["is_causal"] = False
    if form == "JetSpec":
        section["causal_head"] = True
    if form == "DSpark":
        section |= {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0, **markov, **said}
    if form == "Domino":
        section |= {"projector_type": "domino", "shift_label": b.anchor, **gru}
        flat["emb_dim"] = b.rank
    name = f"{form}DraftModel" if form in ("DSpark", "Domino", "DFlash2") else "DFlashDraftModel"
    return {**flat, "architectures": [name], "auto_map": {"AutoModel": f"dflash.{name}"}, "dflash_config": section}


def tensors_of(form: str, b: Block, weights: Weights) -> Weights:
    """The head's tensors by the names of a trainer."""
    names = {
        "fc": "fc.weight", "context": "hidden_norm.weight", "last": "norm.weight", "embed": "embed_tokens.weight",
        "scores": "lm_head.weight", "w1": "markov_head.markov_w1.weight", "w2": "markov_head.markov_w2.weight",
        "gate": "markov_head.gate_proj.weight", "gate.bias": "markov_head.gate_proj.bias",
        "joint": "markov_head.joint_proj.weight", "joint.bias": "markov_head.joint_proj.bias",
        "gru.token": "prefix_gru.weight_ih_l0", "gru.state": "prefix_gru.weight_hh_l0",
        "inner": "embed_proj.0.weight", "outer": "embed_proj.2.weight",
        "confidence": "confidence_head.proj.weight", "confidence.bias": "confidence_head.proj.bias",
        "selector": "candidate_selector.hidden_projection.weight",
        "before": "candidate_selector.predecessor_codebook", "behind": "candidate_selector.successor_codebook",
    }  # fmt: skip
    for i in range(b.layers):
        layer = f"layers.{i}."
        names |= {
            f"{i}.first": f"{layer}input_layernorm.weight",
            f"{i}.second": f"{layer}post_attention_layernorm.weight",
        }
        names |= {f"{i}.{norm}": f"{layer}self_attn.{norm}.weight" for norm in ("q_norm", "k_norm")}
        for part in ("attention", "mlp"):
            names[f"{i}.{part}.base"] = f"{layer}{part}_conv.base_kernel"
            names[f"{i}.{part}.kernel"] = f"{layer}{part}_conv.kernel_projection.weight"
        for place, parts in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
            for x in parts:
                names |= {
                    f"{i}.{x}": f"{layer}{place}.{x}_proj.weight",
                    f"{i}.{x}.bias": f"{layer}{place}.{x}_proj.bias",
                }
    late = ("w1", "w2", "gate", "joint", "confidence")
    start = {name: "logit_head." if form == "DSpark" and name.split(".")[0] in late else "" for name in names}
    tensors = {f"{start[name]}{names[name]}": value for name, value in weights.items()}
    if b.draft_vocab is not None:
        known = target_ids(b)
        tensors["d2t"] = known - torch.arange(b.draft_vocab)
        tensors["t2d"] = torch.zeros(b.vocab, dtype=torch.bool).index_fill_(0, known, True)
    return tensors


def target_ids(b: Block) -> torch.Tensor:
    """The target's token that each of the draft vocabulary stands for."""
    return torch.linspace(0, b.vocab - 1, b.draft_vocab or b.vocab).long()


def write_block(directory: Path, form: str, b: Block, target_layers: int, seed: int = 1) -> Weights:
    """Writes a random head's directory. Returns its weights by the names of `reference_blocks`."""
    weights = random_block(b, seed)
    save_block(directory, form, b, target_layers, weights)
    return weights


def save_block(directory: Path, form: str, b: Block, target_layers: int, weights: Weights) -> None:
    """Writes a head's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config_of(form, b, target_layers))
    save_file({n: t.contiguous() for n, t in tensors_of(form, b, weights).items()}, directory / "model.safetensors")


def agree(target: Path, b: Block, weights: Weights) -> Weights:
    """Makes a random head draft what its target would choose, more often than not: the target prefers some tokens
    whatever the text, and the head knows them. The target's files change. The head has the target's hidden size, no
    vocabulary of its own, and the target's last product."""
    big = read_weights(target)
    table, scores = big["model.embed_tokens.weight"].float(), big["lm_head.weight"].float()
    tokens, h = table.shape
    generator = torch.Generator().manual_seed(9)
    direction = torch.randn(h, generator=generator).sign()
    bonus = 1.6 * (1.0 + torch.randperm(tokens, generator=generator))
    dtype = big["lm_head.weight"].dtype
    big["model.embed_tokens.weight"] = (table + 2 * direction).to(dtype)
    big["lm_head.weight"] = (scores + bonus[:, None] * direction / h).to(dtype)
    write_weights(target, big)
    changed = {name: 0.3 * weights[name] for i in range(b.layers) for name in (f"{i}.o", f"{i}.down")}
    for name in ("last", *(f"{i}.{norm}" for i in range(b.layers) for norm in ("first", "second"))):
        changed[name] = 1.0 + (weights[name] - 1.0) / 3  # so that directions stay
    for name in ("w2", "behind"):
        if name in weights:
            changed[name] = 0.1 * weights[name]
    for name, weight in weights.items():
        if name.endswith(".base"):  # the row itself, mostly
            changed[name] = 0.3 * weight + torch.eye(b.taps)[:1].T
    return {**weights, **changed}
