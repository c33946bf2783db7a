"""Sizes that models come in: heads of any even size run, and what cannot run is refused when the engine is made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import modelzoo
from modelrun import Driver, random_tokens
from modelzoo import Pair
from specrs import LLM, ConfigError, SamplingParams
from specrs.backends.base import KvDtype
from specrs.models import HostDense, ModelFileError, UnsupportedModelError, load_target, ops_for, torch_ops


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(2, 4), (6, 2), (10, 1), (80, 2), (96, 2), (100, 1), (100, 4)])
def test_logits_of_odd_head_sizes_are_those_of_plain_torch(tmp_path: Path, head_dim: int, kv_heads: int) -> None:
    qwen = modelzoo.write_target(
        tmp_path, "Qwen3ForCausalLM", head_dim=head_dim, num_key_value_heads=kv_heads, num_hidden_layers=2
    )
    tokens = random_tokens(40, head_dim)
    logits = []
    for ops in (ops_for(), torch_ops()):
        driver = Driver(load_target(qwen, ops))
        logits.append(driver.extend([driver.new()], [0], [tokens])[0])
        if isinstance(ops.dense, HostDense):
            assert torch.equal(driver.decode_all(tokens)[0], logits[0]), "a chunk has the bits of single tokens"
    torch.testing.assert_close(logits[0], logits[1], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"), [(100, "float32"), (100, "bfloat16"), (6, "bfloat16"), (2, "float32")]
)
def test_speculation_is_exact_at_odd_head_sizes(tmp_path: Path, head_dim: int, kv_dtype: KvDtype) -> None:
    target = modelzoo.write_target(
        tmp_path / "target", vocab_size=10, head_dim=head_dim, eos_token_id=None, bos_token_id=None
    )
    draft = modelzoo.write_eagle3(tmp_path / "draft", target, draft_vocab_size=8, head_dim=head_dim)
    prompts = [[1, 2, 3], [4] * 20, [5, 6]]
    params = SamplingParams(max_tokens=40, temperature=0.7, seed=3)
    plain = LLM(target, kv_dtype=kv_dtype, page_size=4).generate(prompts, params)
    tree = LLM(target, draft, kv_dtype=kv_dtype, tree=(3, 3, 8)).generate(prompts, params)
    assert [o.token_ids for o in plain] == [o.token_ids for o in tree]


def test_more_branches_than_draft_tokens_are_refused_at_construction(tiny: Pair) -> None:
    with pytest.raises(ConfigError, match="9 branches for a draft vocabulary of 8 tokens; at most 8 branches work"):
        LLM(tiny.target, tiny.draft, tree=(9, 2, 12))
    LLM(tiny.target, tiny.draft, tree=(8, 2, 12)).generate([[1, 2]], SamplingParams(max_tokens=4))
    LLM(tiny.target, tiny.draft, speculative=False, tree=(9, 2, 12))


def test_a_huge_context_by_default_is_refused_with_the_remedy_before_memory_is_touched(tmp_path: Path) -> None:
    target = modelzoo.write_target(tmp_path, max_position_embeddings=2**31 - 1, num_key_value_heads=4, head_dim=256)
    with pytest.raises(ConfigError, match=r"no memory for \d+ bytes.* max_context_len"):
        LLM(target, max_batch=64)
    assert LLM(target, max_context_len=64, max_batch=1).generate([[1, 2]], SamplingParams(max_tokens=2))


def test_options_are_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    target = modelzoo.write_target(tmp_path)
    (target / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="page_size"):
        LLM(target, page_size=3)
    with pytest.raises(UnsupportedModelError, match="max_context_len"):
        LLM(target, max_context_len=513)
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        LLM(target)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"head_dim": 31}, "head_dim = 31"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type = 'longrope'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"head_dim": 30}, "config.json calls for"),
        ({"attention_bias": True}, "missing"),
        ({"vocab_size": 299}, "config.json calls for"),
        ({"tie_word_embeddings": False, "num_hidden_layers": 5}, "missing"),
    ],
)
def test_what_the_weights_or_the_models_lack_is_refused_at_construction(
    tmp_path: Path, change: dict[str, object], what: str
) -> None:
    target = modelzoo.write_target(tmp_path)
    modelzoo.edit_config(target, **change)
    with pytest.raises(ConfigError, match=str(tmp_path)) as caught:
        LLM(target)
    assert what in str(caught.value)
