"""config.json: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import modelzoo
from specrs import ConfigError
from specrs.models import (
    DraftMismatchError,
    Eagle3Config,
    ModelConfig,
    ModelFileError,
    UnsupportedModelError,
)


def target(architecture: str = "LlamaForCausalLM", **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(modelzoo.target_config(architecture, **overrides))


def head(**overrides: Any) -> Eagle3Config:
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 300,
        "draft_vocab_size": 120,
    }
    return Eagle3Config.from_dict({**raw, **overrides})


def test_architectures_differ_in_biases_and_norms() -> None:
    assert (target().qkv_bias, target().o_bias, target().mlp_bias, target().qk_norm) == (False, False, False, False)
    biased = target(attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)
    qwen2, qwen3 = target("Qwen2ForCausalLM"), target("Qwen3ForCausalLM")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (False, False, True)


def test_absent_keys_take_the_values_transformers_gives_them() -> None:
    config = target(num_key_value_heads=None, head_dim=None, rms_norm_eps=None, rope_theta=None, hidden_act=None)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.rope.kind, config.rope.theta) == ("default", 10000.0)
    assert target("Qwen3ForCausalLM", head_dim=None).head_dim == 128


def test_both_spellings_of_rope_give_the_same_config() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = target(rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    new = target(rope_theta=None, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    nested = target(
        rope_theta=None, rope_parameters={"full_attention": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    )
    assert old.rope == new.rope == nested.rope
    assert (old.rope.theta, old.rope.factor, old.rope.original_max_position) == (5e5, 8.0, 64)


def test_two_spellings_of_rope_that_differ_are_refused() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    same = target(
        rope_theta=5e5, rope_parameters={**linear, "rope_theta": 5e5}, rope_scaling={**linear, "type": "linear"}
    )
    assert same.rope == target(rope_theta=5e5, rope_scaling=linear).rope
    for scaling, theta in (({"type": "yarn", "factor": 2.0}, 5e5), (linear, 1e6)):
        with pytest.raises(UnsupportedModelError, match="says something else than rope_parameters") as caught:
            target(rope_theta=theta, rope_parameters={**linear, "rope_theta": 5e5}, rope_scaling=scaling)
        assert caught.value.what == "rope_scaling"


def test_eos_ids_come_from_both_files(tmp_path: Path) -> None:
    directory = modelzoo.write_target(tmp_path, eos_token_id=[7, 5])
    modelzoo.write_json(tmp_path / "generation_config.json", {"eos_token_id": 9})
    config = ModelConfig.from_directory(directory)
    assert config.eos_token_ids == (5, 7, 9)
    assert config.bos_token_id == 1
    assert target(eos_token_id=None).eos_token_ids == ()


def test_an_id_of_minus_one_is_none(tmp_path: Path) -> None:
    """Files write -1 for no id, and transformers goes on with it."""
    directory = modelzoo.write_target(tmp_path, eos_token_id=[7, -1], bos_token_id=-1, pad_token_id=-1)
    modelzoo.write_json(tmp_path / "generation_config.json", {"eos_token_id": -1, "pad_token_id": -1})
    config = ModelConfig.from_directory(directory)
    assert config.eos_token_ids == (7,) and config.bos_token_id is None
    assert target(eos_token_id=-1).eos_token_ids == ()
    assert target(eos_token_id=[-1]).eos_token_ids == ()


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_whole_float_is_a_context_before_scaling(kind: str) -> None:
    """transformers takes it as a number, wherever it stands."""
    scaling = {"rope_type": kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    key = "original_max_position_embeddings"
    want = target(rope_scaling={**scaling, key: 64}).rope
    assert want.original_max_position == 64
    for config in (target(rope_scaling={**scaling, key: 64.0}), target(rope_scaling=scaling, **{key: 64.0})):
        assert config.rope == want and isinstance(config.rope.original_max_position, int)
    for wrong in (64.5, float("inf"), float("nan"), 0.0, -64.0, 1e300):
        with pytest.raises(UnsupportedModelError, match="must be an integer") as caught:
            target(rope_scaling={**scaling, key: wrong})
        assert caught.value.what == key
    with pytest.raises(UnsupportedModelError, match="must be an integer"):
        target(hidden_size=64.0)


REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "LlamaForCausalLM, MistralForCausalLM"),
    ({"architectures": ["MambaForCausalLM"]}, "architectures", "recurrent state"),
    ({"architectures": ["Qwen3NextForCausalLM"]}, "architectures", "recurrent state"),
    ({"mamba_d_state": 16}, "mamba_d_state", "attention-only models work"),
    ({"num_local_experts": 8}, "num_local_experts", "dense models work"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config", "bf16, f16 or f32"),
    ({"hidden_act": "gelu"}, "hidden_act", "only silu"),
    ({"hidden_size": 0}, "hidden_size", "1..="),
    ({"hidden_size": "64"}, "hidden_size", "must be an integer"),
    ({"hidden_size": True}, "hidden_size", "must be an integer"),
    ({"num_hidden_layers": -1}, "num_hidden_layers", "1..="),
    ({"vocab_size": None}, "vocab_size", "required"),
    ({"num_key_value_heads": 3}, "num_key_value_heads", "must divide num_attention_heads = 4"),
    ({"head_dim": 33}, "head_dim", "even"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps", "> 0"),
    ({"rope_theta": float("nan")}, "rope_theta", "finite"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "only 1.0"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type", "llama3, yarn"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor", "required"),
    (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "rope_scaling.mrope_section",
        "multimodal",
    ),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}, "rope_scaling.rope_type", "three axes"),
    ({"head_dim": 33.0}, "head_dim", "must be an integer"),
    ({"head_dim": 0}, "head_dim", "1..=4096"),
    (
        {"head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 3},
        "num_attention_heads",
        "divide hidden_size",
    ),
    ({"hidden_size": 2**40}, "hidden_size", "..=16777216"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings", "..=2147483647"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps", "at most 1"),
    ({"rms_norm_eps": 1e39}, "rms_norm_eps", "at most 1"),
    ({"rope_theta": 10**400}, "rope_theta", "at most 1e+30"),
    ({"layer_types": [["full_attention"]]}, "layer_types", "full_attention and sliding_attention"),
    ({"layer_types": ["chunked_attention"]}, "layer_types", "full_attention and sliding_attention"),
    ({"is_causal": False}, "is_causal", "only true"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention", "only false"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings", "true or false"),
    ({"model_type": "mistral"}, "model_type", "LlamaForCausalLM is a model of type 'llama'"),
    ({"model_type": "mine", "auto_map": {"AutoModel": "mine.LlamaForCausalLM"}}, "model_type", "one of the two"),
    ({"eos_token_id": 300}, "eos_token_id", "0..300"),
    ({"eos_token_id": [2, -2]}, "eos_token_id", "0..300, or -1 for none"),
    ({"eos_token_id": 2.0}, "eos_token_id", "0..300"),
]


@pytest.mark.parametrize(("change", "what", "why"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(change: dict[str, Any], what: str, why: str) -> None:
    raw = modelzoo.target_config()
    raw.update(change)
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_dict(raw, path=Path("some/config.json"))
    assert caught.value.what == what
    assert why in str(caught.value)
    assert str(Path("some/config.json")) in str(caught.value)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("architecture", "keys", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": 64}, 64),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": False}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, 64),
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, None),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"]},
            None,
        ),
        (
            "Qwen3ForCausalLM",
            {"sliding_window": 9, "use_sliding_window": True, "layer_types": ["sliding_attention"]},
            9,
        ),
    ],
)
def test_sliding_window_limits_the_context(architecture: str, keys: dict[str, Any], window: int | None) -> None:
    config = target(architecture, **keys)
    assert config.sliding_window == window
    assert config.max_context_len == (window or 512)
    config.check_context(config.max_context_len)
    with pytest.raises(UnsupportedModelError, match="works") as caught:
        config.check_context(config.max_context_len + 1)
    assert caught.value.what == ("max_context_len" if window is None else "sliding_window")


def test_yarn_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert target(rope_scaling=yarn).max_context_len == 2048
    assert target(rope_scaling={"rope_type": "dynamic", "factor": 4.0}).max_context_len == 512


def test_generation_config_is_named_where_it_is_at_fault(tmp_path: Path) -> None:
    modelzoo.write_target(tmp_path)
    modelzoo.write_json(tmp_path / "generation_config.json", {"eos_token_id": 300})
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_directory(tmp_path)
    assert caught.value.path == tmp_path / "generation_config.json"


def test_a_context_beyond_the_core_is_cut(tmp_path: Path) -> None:
    long = target(max_position_embeddings=2**31 - 1)
    assert long.max_context_len == 1 << 24
    with pytest.raises(UnsupportedModelError, match="max_context_len <= 16777216 works"):
        long.check_context((1 << 24) + 1)


def test_unreadable_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelFileError, match="not readable as JSON") as caught:
        ModelConfig.from_directory(tmp_path)
    assert caught.value.path == tmp_path / "config.json"
    (tmp_path / "config.json").write_text('{"hidden_size": 1' + "0" * 5000 + "}", encoding="utf-8")
    with pytest.raises(ModelFileError, match="not readable as JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelFileError, match="object"):
        ModelConfig.from_directory(tmp_path)


def test_aux_layers_are_inputs_of_layers_in_every_spelling() -> None:
    name = "eagle_aux_hidden_state_layer_ids"
    ten = target(num_hidden_layers=10)
    assert head().aux_layers_for(ten) == (2, 5, 7)
    assert head(**{name: [1, 4, 8]}).aux_layers_for(ten) == (1, 4, 8)
    # Inside eagle_config the numbers are layers whose output is meant.
    assert head(eagle_config={name: [1, 4, 8]}).aux_layers_for(ten) == (2, 5, 9)
    assert head(**{name: [1, 4]}).aux_size == 2 * 64
    # An empty list is the default, as NVIDIA's exports have it.
    assert head(eagle_config={name: [], "use_aux_hidden_state": True}).aux_layers_for(ten) == (2, 5, 7)
    assert head(**{name: []}).aux_layers_for(ten) == (2, 5, 7)


def test_speculators_form_of_a_head() -> None:
    raw = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": 120,
        "norm_before_residual": True,
        "transformer_layer_config": {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "vocab_size": 300,
            "rope_theta": 5e5,
        },
    }
    config = Eagle3Config.from_dict(json.loads(json.dumps(raw)))
    assert (config.hidden_size, config.vocab_size, config.draft_vocab_size) == (64, 300, 120)
    assert config.norm_before_residual and config.rope.theta == 5e5


def test_a_head_of_qwen3s_layer_is_read_with_qwen3s_defaults() -> None:
    """In the form of the speculators library, whose default it is, and in DeepSpec's, which is Qwen3's own."""
    layer = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 300,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "layer_types": ["full_attention"],
        "use_sliding_window": False,
        "sliding_window": None,
    }
    nested = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 120,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "transformer_layer_config": layer,
    }  # fmt: skip
    flat = {
        **layer, "architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2], "num_target_layers": 4,
        "ttt_length": 7, "step_loss_decay": 0.8, "draft_num_hidden_layers": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    for raw, draft_vocab in ((nested, 120), (flat, 300)):
        config = Eagle3Config.from_dict(json.loads(json.dumps(raw)))
        assert (config.head_dim, config.rope.theta, config.rms_norm_eps) == (128, 5e5, 1e-5)
        assert config.draft_vocab_size == draft_vocab
        assert config.aux_layers == (1, 2, 3), "DeepSpec counts outputs of layers, speculators their inputs"
    plain = Eagle3Config.from_dict({**nested, "transformer_layer_config": {**layer, "model_type": "llama"}})
    assert plain.head_dim == 16
    for change, what in (
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"model_type": "gemma3_text"}, "transformer_layer_config.model_type"),
    ):
        with pytest.raises(UnsupportedModelError) as caught:
            Eagle3Config.from_dict({**nested, "transformer_layer_config": {**layer, **change}})
        assert caught.value.what == what


@pytest.mark.parametrize(
    ("change", "what", "got"),
    [
        ({"target_hidden_size": 32}, "hidden size of features", 32),
        ({"vocab_size": 301, "draft_vocab_size": 301}, "vocab_size", 301),
        ({"draft_vocab_size": 301}, "draft_vocab_size", 301),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "aux layer", 4),
    ],
)
def test_a_head_for_another_target_is_refused(change: dict[str, Any], what: str, got: int) -> None:
    with pytest.raises(DraftMismatchError) as caught:
        head(**change).check_target(target())
    assert (caught.value.what, caught.value.got) == (what, got)
    assert str(got) in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["GPT2LMHeadModel"]},
        {"eagle_config": {"use_aux_hidden_state": False}},
        {"logit_scale": 0.5},
        {"fc_norm": True, "eagle_config": {"norm_before_fc": True}},
        {"norm_output": "yes"},
        {"eagle_config": {"use_last_layernorm": False}},
        {"eagle_config": {"another_key": 1}},
        {"eagle_config": ["a list"]},
        {"num_aux_hidden_states": 5},
        {
            "use_sliding_window": True,
            "sliding_window": 64,
            "architectures": ["Qwen3Eagle3Model"],
            "max_window_layers": 0,
        },
        {"layer_types": ["chunked_attention"]},
        {"eagle_aux_hidden_state_layer_ids": [1, "2"]},
    ],
)
def test_heads_of_other_kinds_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError):
        head(**change)
