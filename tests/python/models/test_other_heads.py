"""Heads that do not run are refused by name, by the key or tensor that says so, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import headzoo
import modelzoo
from reference_heads import Sizes
from specrs import LLM, ConfigError
from specrs.models import (
    DraftMismatchError,
    Eagle3Config,
    Eagle3Head,
    LlamaModel,
    ModelConfig,
    ModelFileError,
    UnsupportedModelError,
    check_draft,
    torch_ops,
)
from specrs.models.cuda import why_not
from specrs.models.head_forms import FORMS, NEUTRAL, OTHERS, form_of, plain_name
from specrs.models.head_table import BEGIN, END, main, table

_LAYER = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4,
          "intermediate_size": 96, "vocab_size": 300}  # fmt: skip
_BLOCK = {**_LAYER, "architectures": ["DFlashDraftModel"], "block_size": 16, "num_target_layers": 36}
PUBLISHED = {  # config.json as trainers write them, shortened
    "DSpark for Gemma 4": {**_LAYER, "architectures": ["Gemma4DSparkModel"], "markov_rank": 256, "block_size": 7},
    "DSpark for DeepSeek V4": {**_LAYER, "architectures": ["DeepseekV4DSparkModel"], "block_size": 7},
    "DFlare": {**_BLOCK, "architectures": ["QwenDFlareDraftModel"], "dflash_config": {"mask_token_id": 7}},
    "DFlash of AngelSlim": {**_BLOCK, "architectures": ["QwenDFlashDraftModel"]},
    "DFly": {**_BLOCK, "architectures": ["DFlyDraftModel"]},
    "MTP": {"architectures": ["MTPSpeculator"], "speculators_model_type": "mtp", "transformer_layer_config": _LAYER},
    "Medusa": {"architectures": ["MedusaModel"], "medusa_num_heads": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_another_form_is_named_without_a_file_of_weights(tmp_path: Path, name: str) -> None:
    target = ModelConfig.from_directory(modelzoo.write_target(tmp_path / "target"))
    (tmp_path / "head").mkdir()
    modelzoo.write_json(tmp_path / "head" / "config.json", PUBLISHED[name])
    with pytest.raises(UnsupportedModelError, match=rf"a {name.split(',')[0]} head, which .*: not implemented"):
        check_draft(tmp_path / "head", target)


def test_an_engine_says_the_same(tmp_path: Path) -> None:
    target = modelzoo.write_target(tmp_path / "target")
    (tmp_path / "head").mkdir()
    modelzoo.write_json(tmp_path / "head" / "config.json", PUBLISHED["DFlare"])
    with pytest.raises(UnsupportedModelError, match="a DFlare head") as caught:
        LLM(target, tmp_path / "head")
    assert caught.value.what == "architectures"


@pytest.mark.parametrize(("other", "tensor"), [(o.name, t) for o in OTHERS for t in o.tensors], ids=str)
def test_another_form_is_named_by_its_tensors(tmp_path: Path, other: str, tensor: str) -> None:
    target, directory, tensors = head(tmp_path)
    save_file({**tensors, f"{tensor}weight": torch.ones(2, 2)}, directory / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=f"tensor {tensor}weight = .*a {other} head"):
        check_draft(directory, target)


def test_forms_share_no_name() -> None:
    """So the order of the rows decides only where a head has a model's name."""
    alone = [form for form in FORMS if not (form.tensors or form.keys or form.speculators)]
    named = [name for form in alone for name in form.architectures]
    named += [name for other in OTHERS for name in other.architectures]
    assert len(named) == len(set(named))
    for form in FORMS:
        for name in form.architectures:
            keys = {key: value or True for key, value in form.keys.items()}
            section = {key.removeprefix("dflash_config."): value for key, value in keys.items()}
            raw = {**keys, "architectures": [name], "dflash_config": section}
            assert form_of(raw, tensors=form.tensors).name == form.name
    with pytest.raises(UnsupportedModelError, match="speculators_model_type = 'independent': implemented: peagle"):
        form_of({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "independent"})
    with pytest.raises(UnsupportedModelError, match="a model, no draft head"):
        form_of({"architectures": ["LlamaForCausalLM"]}, tensors=())
    assert plain_name("model.layers.0.hidden_norm.weight") == "midlayer.hidden_norm.weight"
    assert plain_name("aux_norm_mid.weight") == "fc_norm.1.weight"


def head(directory: Path, **options: Any) -> tuple[ModelConfig, Path, dict[str, torch.Tensor]]:
    """A target's configuration, the directory of a head for it, and the head's tensors."""
    target = ModelConfig.from_directory(modelzoo.write_target(directory / "target", num_hidden_layers=6))
    headzoo.write_head(directory / "head", "SpecForge", Sizes(**options), 6)
    return target, directory / "head", modelzoo.read_weights(directory / "head")


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"norm_before_fc": True, "fc_norm": True}, UnsupportedModelError, "fc_norm = True: norm_before_fc is true"),
        ({"norm_before_fc": True}, ModelFileError, "input_norm.weight: missing"),
        ({"fc_norm": True}, ModelFileError, "fc_norm.0.weight: missing"),
        ({"num_hidden_layers": 2}, UnsupportedModelError, "num_hidden_layers = 2: the file has 1"),
        ({"num_target_layers": 7}, DraftMismatchError, "num_target_layers = 7 .*6 layers"),
        ({"num_aux_hidden_states": 4}, UnsupportedModelError, "num_aux_hidden_states = 4: 3 layers"),
        ({"target_layer_ids": [1, 2, 5], "eagle_config": None}, DraftMismatchError, "aux layer = 6"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "quantised weights"),
        ({"hidden_act": "relu2"}, UnsupportedModelError, "hidden_act = 'relu2'"),
        ({"layer_types": ["sliding_attention"]}, UnsupportedModelError, "layer_types"),
        ({"parallel_drafting": True}, UnsupportedModelError, "mask_token_id = None: required: .*model.mask_token_id"),
        ({"rope_scaling": {"type": "mrope"}}, UnsupportedModelError, "rope_scaling.rope_type = 'mrope': positions"),
        ({"eagle_config": {"parallel_draft_step": 4}}, UnsupportedModelError, "eagle_config.parallel_draft_step = 4"),
        ({"eagle_config": {"unheard_of": True}}, UnsupportedModelError, "eagle_config.unheard_of = True: unknown"),
        ({"logit_scale": 2.0}, UnsupportedModelError, "logit_scale = 2.0: .*not implemented; 1 or null works"),
        ({"final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping = 30.0: .*; null works"),
        ({"is_neox_style": False}, UnsupportedModelError, "is_neox_style = False: .*; true or null works"),
        ({"attn_output_gate": True}, UnsupportedModelError, "attn_output_gate = True: .*; false or null works"),
        ({"draft_layer_ids": [1]}, UnsupportedModelError, r"draft_layer_ids = \[1\]: unknown, .*states_layer_ids"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}, UnsupportedModelError,
            r"eagle_config.eagle_aux_hidden_state_layer_ids = \[1, 2, 2\]: the inputs of layers \[2, 3, 3\], where "
            r"eagle_aux_hidden_state_layer_ids names those of \[1, 2, 2\]",
        ),
        (
            {"fc_norm": True, "eagle_config": {"fc_norm": False}}, UnsupportedModelError,
            "eagle_config.fc_norm = False: fc_norm is true",
        ),
        (
            {"norm_output": False, "eagle_config": {"norm_output": True}}, UnsupportedModelError,
            "eagle_config.norm_output = True: norm_output is false",
        ),
        ({"norm_before_residual": True, "eagle_config": {"norm_before_residual": False}}, UnsupportedModelError,
         "eagle_config.norm_before_residual = False: unknown"),
    ],
    ids=str,
)  # fmt: skip
def test_a_key_that_nothing_here_computes_is_named(
    tmp_path: Path, change: dict[str, Any], kind: type[ConfigError], match: str
) -> None:
    target, directory, _ = head(tmp_path)
    modelzoo.edit_config(directory, **change)
    with pytest.raises(kind, match=match):
        check_draft(directory, target)


def test_keys_that_agree_or_change_nothing_are_taken() -> None:
    raw = headzoo.config_of("SpecForge", Sizes(fc_norm=True), 6)
    plain = Eagle3Config.from_dict(raw)
    section = {**raw["eagle_config"], "fc_norm": True}
    same = {"eagle_aux_hidden_state_layer_ids": [2, 3, 3], "aux_hidden_states_layer_ids": [1, 2, 2]}
    neutral = {key: (*values, None)[0] for key, values in NEUTRAL.items()}
    assert Eagle3Config.from_dict({**raw, **same, **neutral, "eagle_config": section, "some_layer_ids": []}) == plain


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_layer_whose_defaults_are_not_known_is_named(kind: str) -> None:
    raw = headzoo.config_of("speculators", Sizes(), 6)
    raw["transformer_layer_config"]["model_type"] = kind
    with pytest.raises(UnsupportedModelError, match=f"transformer_layer_config.model_type = '{kind}': .*llama, qwen3"):
        Eagle3Config.from_dict(raw)


def test_tied_embeddings_of_the_head_are_refused(tmp_path: Path) -> None:
    target, directory, tensors = head(tmp_path, hidden=64, draft_vocab=None)
    modelzoo.edit_config(directory, tie_word_embeddings=True)
    check_draft(directory, target)  # the file's own lm_head counts
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"tie_word_embeddings = True: .*; add lm_head.*, or set false"):
        check_draft(directory, target)
    modelzoo.edit_config(directory, tie_word_embeddings=False)
    check_draft(directory, target)


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("input_norm.weight", (192,), "norm_before_fc = true in config.json calls for"),
        ("fc_norm.0.weight", (64,), "fc_norm = true in config.json calls for"),
        ("layers.1.mlp.up_proj.weight", (70, 44), "num_hidden_layers = 1: the file has 2"),
        ("something.weight", (2,), "config.json has no use for it"),
    ],
)
def test_a_tensor_that_nothing_here_reads_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], match: str
) -> None:
    target, directory, tensors = head(tmp_path)
    save_file({**tensors, name: torch.ones(shape)}, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=match):
        check_draft(directory, target)


def test_copies_of_the_targets_weights_are_passed_over(tmp_path: Path) -> None:
    target, directory, tensors = head(tmp_path)
    more = {"verifier_lm_head.weight": torch.ones(300, 64), "verifier_norm.weight": torch.ones(64)}
    save_file({**tensors, **more, "rotary_emb.inv_freq": torch.ones(5)}, directory / "model.safetensors")
    _, shapes = check_draft(directory, target)
    assert not set(more) & set(shapes)


def test_the_page_has_the_tables_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text(encoding="utf-8")
    assert BEGIN + table() + END in page, "make heads-table"
    copy = tmp_path / "page.md"
    copy.write_text(page.replace(table(), "stale\n"), encoding="utf-8")
    assert main([str(copy)]) == 0 and copy.read_text(encoding="utf-8") == page
    copy.write_text("nothing")
    assert main([str(copy)]) == 2 and "has no" in capsys.readouterr().err
    assert main([]) == 0 and capsys.readouterr().out == table()


def test_notes_of_a_configuration() -> None:
    raw = headzoo.config_of("speculators", Sizes(), 6)
    assert Eagle3Config.from_dict(raw).notes == ()
    del raw["norm_before_residual"]
    raw["a_new_key"] = 3
    first, second = Eagle3Config.from_dict(json.loads(json.dumps(raw))).notes
    assert "a_new_key" in first and "norm_before_residual is absent and taken as false" in second


def test_a_trainer_that_differs_from_servers_is_noted() -> None:
    raw = headzoo.config_of("AngelSlim", Sizes(theta=1e6), 6)
    [note] = Eagle3Config.from_dict(raw).notes
    assert note.startswith("rope_theta = 1000000: AngelSlim's trainer does not read the key")
    raw = headzoo.config_of("SpecForge", Sizes(), 6)
    [note] = Eagle3Config.from_dict({**raw, "norm_output": False}).notes
    assert note.startswith("norm_output: in SpecForge's trainer")


def test_notes_are_logged_once_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, directory, _ = head(tmp_path)
    modelzoo.edit_config(directory, a_new_key=3)
    target = LlamaModel.load(tmp_path / "target", torch_ops())
    Eagle3Head.load(directory, torch_ops(), target)
    assert caplog.messages == [f"{directory}: config.json has keys that nothing here reads: a_new_key"]


def test_a_gpu_refuses_a_norm_wider_than_its_kernel_takes() -> None:
    wide = {"hidden": 64, "target_hidden": 8192, "head_dim": 64, "heads": 2, "kv_heads": 1, "inner": 64}
    for streams, fits in (((1, 2, 3, 4), True), ((1, 2, 3, 4, 5), False)):
        sizes = Sizes(**wide, vocab=304, draft_vocab=80, streams=streams, norm_before_fc=True)  # type: ignore[arg-type]
        why = why_not(Eagle3Config.from_dict(headzoo.config_of("NVIDIA" if fits else "SpecForge", sizes, 9)))
        assert (why is None) == fits, why
