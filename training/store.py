"""Writes the target's folder in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from .config import BOS_ID
from .target import Target

SHARD_BYTES = 15_000_000


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_target(model: Target, folder: Path) -> None:
    """config.json, generation_config.json, tokenizer_config.json and sharded safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = model.cfg
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "torch_dtype": "bfloat16",
        "vocab_size": cfg.vocab_size, "hidden_size": cfg.hidden_size, "num_attention_heads": cfg.num_attention_heads,
        "num_key_value_heads": cfg.num_key_value_heads, "head_dim": cfg.head_dim, "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "rope_theta": cfg.rope_theta, "rope_scaling": None,
        "rms_norm_eps": cfg.rms_norm_eps, "max_position_embeddings": cfg.max_position_embeddings,
        "bos_token_id": BOS_ID, "eos_token_id": BOS_ID, "pad_token_id": BOS_ID,
        "num_hidden_layers": cfg.num_hidden_layers, "intermediate_size": cfg.intermediate_size,
        "tie_word_embeddings": True, "use_cache": True, "initializer_range": 0.02,
    }  # fmt: skip
    write_json(folder / "config.json", config)
    ids = {"bos_token_id": BOS_ID, "eos_token_id": BOS_ID, "pad_token_id": BOS_ID}
    write_json(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 0.6, "top_p": 0.9})
    special = "<|endoftext|>"
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special, "eos_token": special, "pad_token": special,
        "model_max_length": cfg.max_position_embeddings, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    write_json(folder / "tokenizer_config.json", tokenizer)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        tensor = tensor.bfloat16().cpu().contiguous()
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(t.nbytes for shard in shards for t in shard.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
