"""Directories of EAGLE-3 heads as trainers write them: names, keys and defaults of each, over random weights of
`reference_heads`.

Sources: speculators' `models/eagle3`, SpecForge's `configs` and `modeling/draft`, AngelSlim's `train/configs`,
ModelOpt's export of speculative heads, DeepSpec's `modeling/eagle3`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from modelzoo import read_weights, write_json, write_weights
from reference_heads import Sizes, Weights, random_head

# Defaults of transformers' classes, which speculators leaves out.
_LEFT_OUT = {"rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}


def config_of(form: str, sizes: Sizes, target_layers: int) -> dict[str, Any]:
    """The head's config.json, as a trainer writes it."""
    layer = {
        "hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "intermediate_size": sizes.inner,
        "vocab_size": sizes.vocab, "rms_norm_eps": sizes.eps, "hidden_act": "silu", "max_position_embeddings": 512,
        "attention_bias": sizes.biases, "mlp_bias": sizes.biases,
    }  # fmt: skip
    rope = {"rope_parameters": {"rope_theta": sizes.theta, "rope_type": "default"}}
    flags = {
        name: getattr(sizes, name) for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(sizes, name)
    }
    outputs = [stream - 1 for stream in sizes.streams]
    kinds = ["full_attention"] * sizes.layers
    if form == "P-EAGLE of speculators":
        raw = config_of("speculators", sizes, target_layers)
        methods = [{"proposal_type": "greedy", "speculative_tokens": sizes.levels}]
        return {**raw, "architectures": ["PEagleSpeculator"], "speculators_model_type": "peagle",
                "mask_token_id": sizes.mask, "speculators_config": {"proposal_methods": methods}}  # fmt: skip
    if form in ("speculators", "speculators llama"):
        kind = "qwen3" if form == "speculators" else "llama"
        nested = {key: value for key, value in {**layer, **rope}.items() if _LEFT_OUT.get(key) != value}
        if sizes.heads == 32:
            del nested["num_attention_heads"]
        return {
            "architectures": ["Eagle3DraftModel" if form == "speculators" else "Eagle3Speculator"],
            "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "dtype": "float32", "draft_vocab_size": sizes.rows,
            "eagle_aux_hidden_state_layer_ids": list(sizes.streams), "embed_requires_grad": False,
            "norm_before_residual": sizes.norm_before_residual, "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/model"}},
            "speculators_version": "0.9.0", "target_hidden_size": sizes.target_hidden,
            "tie_word_embeddings": False, "transformers_version": "5.24.0", **flags,
            "transformer_layer_config": {**nested, "model_type": kind, "layer_types": kinds},
        }  # fmt: skip
    if form == "DeepSpec":
        return {
            "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", **layer, **rope, **flags,
            "target_layer_ids": outputs, "num_target_layers": target_layers, "ttt_length": 7, "step_loss_decay": 0.8,
            "target_hidden_size": sizes.target_hidden, "draft_vocab_size": sizes.rows, "draft_num_hidden_layers": 1,
            "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": None, "max_window_layers": 28,
        }  # fmt: skip
    flat: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **layer, "rope_theta": sizes.theta,
        "rope_scaling": None, "draft_vocab_size": sizes.rows, "target_hidden_size": sizes.target_hidden,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
        "use_cache": True,
    }  # fmt: skip
    if form == "P-EAGLE":  # SpecForge leaves out the mask, which its run's own options have
        return {**flat, "architectures": ["PEagleDraftModel"], "mask_token_id": sizes.mask, "para_depths": sizes.levels,
                "eagle_aux_hidden_state_layer_ids": list(sizes.streams)}  # fmt: skip
    if form == "P-EAGLE for vLLM":
        section = {"eagle_aux_hidden_state_layer_ids": outputs}
        return {**flat, **flags, "parallel_drafting": True, "ptd_token_id": sizes.mask, "eagle_config": section,
                "para_depths": sizes.levels}  # fmt: skip
    if form == "SpecForge":
        section = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": outputs}
        return {**flat, **flags, "eagle_config": section}
    if form == "AngelSlim":  # names no layers where they are (2, n/2, n-3)
        assert not flags
        usual = sizes.streams == (2, target_layers // 2, target_layers - 3)
        names = {} if usual else {"aux_hidden_states_layer_ids": outputs}
        return {**flat, **names, "architectures": ["Eagle3LlamaForCausalLM"]}
    if form == "NVIDIA":
        section = {
            "eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": True, "next_layer_regular": True,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
            "parallel_draft_step": 1, "parallel_draft_heads_num_layers": None, **flags,
        }  # fmt: skip
        return {**flat, "eagle_config": section}
    assert form == "sglang" and flags == {"fc_norm": True}  # before the name fc_norm
    section = {"eagle_aux_hidden_state_layer_ids": outputs}
    return {**flat, "use_aux_norm": True, "num_aux_hidden_states": len(outputs), "eagle_config": section}


def tensors_of(form: str, sizes: Sizes, weights: Weights) -> Weights:
    """The head's tensors by the names of a trainer."""
    names = {"norm": "norm.weight", "lm_head": "lm_head.weight", "embed": "embed_tokens.weight",
             "input_norm": "input_norm.weight", "fc.weight": "fc.weight", "fc.bias": "fc.bias",
             "mask_hidden": "mask_hidden"}  # fmt: skip
    for i in range(3):
        old = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")[i]
        names[f"fc_norm.{i}"] = f"{old if form == 'sglang' else f'fc_norm.{i}'}.weight"
    names |= {f"fc_norm.{i}": f"fc_norm.{i}.weight" for i in range(3, 9)}
    for i in range(sizes.layers):
        nested = "speculators" in form or form == "DeepSpec"
        layer = f"layers.{i}." if i or nested else "midlayer."
        names[f"{i}.first"] = f"{layer}{sizes.later_norm if i else 'input_layernorm'}.weight"
        names[f"{i}.second"] = f"{layer}post_attention_layernorm.weight"
        names[f"{i}.feature"] = f"{layer}hidden_norm.weight"
        for norm in ("q_norm", "k_norm"):
            names[f"{i}.{norm}"] = f"{layer}self_attn.{norm}.weight"
        for part in ("weight", "bias"):
            names |= {f"{i}.{x}.{part}": f"{layer}self_attn.{x}_proj.{part}" for x in "qkvo"}
            names |= {f"{i}.{x}.{part}": f"{layer}mlp.{x}_proj.{part}" for x in ("gate", "up", "down")}
    tensors = {names[name]: value for name, value in weights.items()}
    if sizes.draft_vocab is not None:
        known = torch.linspace(0, sizes.vocab - 1, sizes.draft_vocab).long()
        tensors["d2t"] = known - torch.arange(sizes.draft_vocab)
        tensors["t2d"] = torch.zeros(sizes.vocab, dtype=torch.bool).index_fill_(0, known, True)
    return tensors


def write_head(
    directory: Path, form: str, sizes: Sizes, target_layers: int, seed: int = 1, dtype: torch.dtype = torch.float32
) -> Weights:
    """Writes a random head's directory. Returns its weights, as stored, by the names of `reference_heads`."""
    weights = {name: value.to(dtype) for name, value in random_head(sizes, seed).items()}
    save_head(directory, form, sizes, target_layers, weights)
    return weights


def save_head(directory: Path, form: str, sizes: Sizes, target_layers: int, weights: Weights) -> None:
    """Writes a head's directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", config_of(form, sizes, target_layers))
    save_file({n: t.contiguous() for n, t in tensors_of(form, sizes, weights).items()}, directory / "model.safetensors")


def agree(target: Path, sizes: Sizes, weights: Weights) -> Weights:
    """Makes a random head draft what its target would choose: `modelzoo.agree` for any form. The target's files change.
    The head has the target's hidden size and its whole vocabulary."""
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
    count = len(sizes.streams)
    changed = {"fc.weight": 0.1 * weights["fc.weight"] + torch.eye(h).repeat(1, count) / count,
               "lm_head": big["lm_head.weight"].clone()}  # fmt: skip
    for name, weight in weights.items():
        if weight.dim() == 1 and not name.endswith(("bias", "q_norm", "k_norm")):
            changed[name] = 1.0 + (weight - 1.0) / 3  # so that directions stay
        elif name.endswith("bias"):
            changed[name] = weight / 3
    for i in range(sizes.layers):
        changed |= {name: 0.3 * weights[name] for name in (f"{i}.o.weight", f"{i}.down.weight")}
    return {**weights, **changed}
