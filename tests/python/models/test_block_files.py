"""Directories of heads that draft blocks: what does not fit or is not implemented is named before weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import blockzoo
import modelzoo
from reference_blocks import Block
from specrs import ConfigError
from specrs.models import (
    HOST,
    BlockConfig,
    BlockHead,
    DraftMismatchError,
    LlamaModel,
    ModelConfig,
    ModelFileError,
    UnsupportedModelError,
    check_draft,
    drafted_tokens,
    load_draft,
    ops_for,
)
from specrs.models.block_config import Conv, Selector
from specrs.models.head_config import parts
from specrs.models.head_forms import form_of
from specrs.models.host_memory import head_bytes

DFLASH = Block()
DFLASH2 = replace(DFLASH, taps=2, candidates=16)
DSPARK = replace(DFLASH, anchor=True, markov="gated", confidence=True)


def head(directory: Path, form: str = "DFlash", b: Block = DFLASH) -> tuple[ModelConfig, Path, dict[str, torch.Tensor]]:
    """A target's configuration, the directory of a head for it, and the head's tensors."""
    target = ModelConfig.from_directory(modelzoo.write_target(directory / "target", num_hidden_layers=6))
    blockzoo.write_block(directory / "head", form, b, 6)
    return target, directory / "head", modelzoo.read_weights(directory / "head")


def section(**keys: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 2], **keys}}


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        ({"dflash_config": {"target_layer_ids": [1, 2]}}, UnsupportedModelError, "mask_token_id = None: required"),
        (section(mask_token_id=300), UnsupportedModelError, r"mask_token_id = 300: must be an integer in 0\.\.=299"),
        (section(target_layer_ids=[1, 5]), DraftMismatchError, "aux layer = 6 .*target_layer_ids"),
        (section(target_layer_ids=[1]), DraftMismatchError, "columns of fc.weight = 128"),
        (section(use_swa=True), UnsupportedModelError, "dflash_config.use_swa = True: only false"),
        (section(swa_window_size=512), UnsupportedModelError, "dflash_config.swa_window_size = 512: only null"),
        (section(attention_sink_bias=True), UnsupportedModelError, "dflash_config.attention_sink_bias = True: only f"),
        (section(attention_value_scale=0.5), UnsupportedModelError, "attention_value_scale = 0.5: only 1"),
        (section(attention_mode="mla"), UnsupportedModelError, "dflash_config.attention_mode = 'mla': only gqa"),
        (section(unheard_of=1), UnsupportedModelError, "dflash_config.unheard_of = 1: unknown; known: block_size"),
        (section(causal=True, is_causal=False), UnsupportedModelError, "is_causal = False: causal is true"),
        (section(block_size=8), UnsupportedModelError, "dflash_config.block_size = 8: block_size is 5 beside dflash"),
        (section(output_multiplier=0), UnsupportedModelError, "output_multiplier = 0"),
        (section(sample_from_anchor=True, shift_label=False), UnsupportedModelError, "shift_label = False: sample"),
        (section(projector_type="domino"), ModelFileError, "prefix_gru.weight_ih_l0: missing"),
        (section(projector_type="domino", pure_draft_prefix_len=-1), UnsupportedModelError, "prefix_len = -1"),
        (
            {**section(projector_type="domino"), "draft_vocab_size": 77}, UnsupportedModelError,
            "draft_vocab_size = 77: Domino corrects the scores of all 300 tokens",
        ),
        (section(selector_rank=256), UnsupportedModelError, "conv_group_size = None: required"),
        ({"selector_rank": 256}, UnsupportedModelError, "selector_rank = 256: a key of DFlash2 heads, and by its name"),
        (section(projector_type="domino", markov_rank=4), UnsupportedModelError, "markov_rank = 4: Domino has"),
        (section(output_multiplier=float("nan"), block_size=5), UnsupportedModelError, "output_multiplier = nan"),
        ({"use_swa": True}, UnsupportedModelError, "use_swa = True: only false is implemented"),
        ({"swa_window_size": 128}, UnsupportedModelError, "swa_window_size = 128: only null"),
        ({"attention_mode": "mla"}, UnsupportedModelError, "attention_mode = 'mla': only gqa"),
        ({"projector_type": "domino"}, UnsupportedModelError, "projector_type = 'domino': of DFlash heads it is"),
        ({"num_aux_hidden_states": 7}, UnsupportedModelError, "num_aux_hidden_states = 7: target_layer_ids names 2"),
        ({"eagle_config": {"nonsense": 1}}, UnsupportedModelError, "eagle_config = .*a key of heads that draft"),
        ({"fc_norm": True}, UnsupportedModelError, "fc_norm = True: a key of heads that draft step by step"),
        ({"ptd_token_id": 5}, UnsupportedModelError, "ptd_token_id = 5: a key of heads that draft step by step"),
        ({"block_size": 1}, UnsupportedModelError, r"block_size = 1: must be an integer in 2\.\.=64"),
        ({"block_size": 65}, UnsupportedModelError, "block_size = 65"),
        ({"num_hidden_layers": 3}, UnsupportedModelError, "layer_types = .*one for each of the 3 layers"),
        ({"num_hidden_layers": 3, "layer_types": None}, UnsupportedModelError, "num_hidden_layers = 3: the file has 2"),
        ({"num_target_layers": 7}, DraftMismatchError, "num_target_layers = 7 .*6 layers"),
        ({"hidden_size": 60, "head_dim": 10}, DraftMismatchError, "hidden size of features = 60"),
        ({"vocab_size": 299}, DraftMismatchError, "vocab_size = 299"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "quantised weights"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64, "use_sliding_window": True},
            UnsupportedModelError, "layer_types = .*windows are not implemented in heads",
        ),
        ({"aux_hidden_state_layer_ids": [1, 2]}, UnsupportedModelError, r"target_layer_ids = \[1, 2\]: the"),
        ({"architectures": ["QwenDFlashDraftModel"]}, UnsupportedModelError, "a DFlash of AngelSlim head"),
    ],
    ids=str,
)  # fmt: skip
def test_a_key_that_cannot_be_honoured_is_named(
    tmp_path: Path, change: dict[str, Any], kind: type[ConfigError], match: str
) -> None:
    target, directory, _ = head(tmp_path)
    modelzoo.edit_config(directory, **change)
    with pytest.raises(kind, match=match):
        check_draft(directory, target)


@pytest.mark.parametrize(
    ("form", "b", "name", "shape", "match"),
    [
        ("DSpark", DSPARK, "markov_head.markov_w2.weight", None, "markov_head.markov_w2.weight: missing"),
        ("DSpark", DSPARK, "markov_head.gate_proj.bias", None, "markov_head.gate_proj.bias: missing"),
        ("DSpark", DSPARK, "markov_head.markov_w1.weight", (300, 8), r"markov_w1.weight: .*\[300, 8\]"),
        ("DSpark", DSPARK, "confidence_head.proj.weight", (1, 64), r"confidence_head.proj.weight: .*\[1, 64\]"),
        ("DFlash", DFLASH, "hidden_norm.weight", None, "hidden_norm.weight: missing"),
        ("DFlash", DFLASH, "layers.1.self_attn.k_norm.weight", None, "layers.1.self_attn.k_norm.weight: missing"),
        ("DFlash", DFLASH, "markov_head.markov_w1.weight", (300, 8), "config.json has no use for it"),
        ("DFlash", DFLASH, "candidate_selector.hidden_projection.weight", (8, 64), "config.json has no use for it"),
        ("DFlash2", DFLASH2, "candidate_selector.successor_codebook", None, "successor_codebook: missing"),
        ("DFlash2", DFLASH2, "candidate_selector.predecessor_codebook", (77, 12), r"predecessor_c.*\[77, 12\]"),
        ("DFlash2", DFLASH2, "layers.1.mlp_conv.base_kernel", None, "layers.1.mlp_conv.base_kernel: missing"),
        ("DFlash2", DFLASH2, "layers.1.mlp_conv.base_kernel", (2, 3, 64), r"base_kernel: .*\[2, 3, 64\]"),
        ("Domino", replace(DFLASH, free=1), "embed_proj.2.weight", (300, 8), r"embed_proj.2.weight: .*\[300, 8\]"),
        ("DFlash", DFLASH, "prefix_gru.weight_ih_l0", (300, 8), "config.json has no use for it"),
        ("DFlash", DFLASH, "something.weight", (2,), "config.json has no use for it"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_missing_or_that_nothing_reads_is_named(
    tmp_path: Path, form: str, b: Block, name: str, shape: tuple[int, ...] | None, match: str
) -> None:
    target, directory, tensors = head(tmp_path, form, b)
    at = next((there for there in tensors if there.endswith(name)), name)
    if shape is None:
        del tensors[at]
    else:
        tensors[at] = torch.ones(shape)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=match):
        check_draft(directory, target)


def test_an_embedding_of_the_mask_beside_the_weights_is_refused(tmp_path: Path) -> None:
    target, directory, _ = head(tmp_path)
    torch.save({"mask_token_id": 7, "embedding": torch.ones(64)}, directory / "mask_embedding.pt")
    with pytest.raises(UnsupportedModelError, match=r"mask_embedding.pt"):
        check_draft(directory, target)


def test_a_vocabulary_map_is_checked(tmp_path: Path) -> None:
    target, directory, tensors = head(tmp_path, "speculators", replace(DFLASH, draft_vocab=77, own_embedding=True))
    assert drafted_tokens(directory, target) == 77
    tensors["d2t"][1] = tensors["d2t"][0] - 1  # the same token twice
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(DraftMismatchError, match="d2t"):
        load_draft(directory, LlamaModel.load(tmp_path / "target", ops_for()))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"selector_top_k": None}, "selector_top_k = None: required"),
        ({"selector_top_k": 301}, r"selector_top_k = 301: must be an integer in 1\.\.=300"),
        ({"selector_rank": 0}, "selector_rank = 0"),
        ({"conv_kernel_size": None}, "conv_kernel_size = None: required"),
        ({"conv_group_size": 48}, "conv_group_size = 48: must divide hidden_size 64"),
        ({"sample_from_anchor": True}, "sample_from_anchor = True: the first row of a DFlash2 head predicts nothing"),
        ({"markov_rank": 4}, "markov_rank = 4: DFlash2 has a correction of its own"),
        ({"draft_ffn_type": "moe"}, "draft_ffn_type = 'moe': only dense"),
        ({"projector_type": "dspark"}, "projector_type = 'dspark': of DFlash2 heads it is dflash"),
        ({"num_experts": 8}, "dflash_config.num_experts = 8: unknown"),
    ],
    ids=str,
)
def test_a_key_of_dflash2_that_cannot_be_honoured_is_named(tmp_path: Path, keys: dict[str, Any], match: str) -> None:
    raw = blockzoo.config_of("DFlash2", DFLASH2, 6)
    raw["dflash_config"] |= keys
    with pytest.raises(UnsupportedModelError, match=match):
        BlockConfig.from_dict(raw)
    with pytest.raises(UnsupportedModelError, match="draft_vocab_size = 77: DFlash2 corrects the scores of all 300"):
        BlockConfig.from_dict({**blockzoo.config_of("DFlash2", DFLASH2, 6), "draft_vocab_size": 77})


def test_notes_and_parts_say_what_a_head_has(tmp_path: Path) -> None:
    target, directory, _ = head(tmp_path, "DSpark", DSPARK)
    modelzoo.edit_config(directory, a_new_key=3)
    config, shapes = check_draft(directory, target)
    first, second = config.notes
    assert "a_new_key" in first and "confidence head, which is not used" in second
    assert parts(config, shapes) == (
        "2 layers; q_norm and k_norm, as Qwen3's layers; blocks of 5 tokens; the first row predicts; gated Markov head"
    )
    raw = blockzoo.config_of("speculators", DSPARK, 6)
    del raw["sample_from_anchor"]
    anchored = BlockConfig.from_dict(raw)
    assert anchored.anchor and "sample_from_anchor is absent" in anchored.notes[-1]


def test_what_a_file_of_speculators_leaves_out_is_its_classes_default() -> None:
    raw = blockzoo.config_of("speculators", DSPARK, 6)
    for key in ("block_size", "markov_rank", "markov_head_type", "enable_confidence_head", "sample_from_anchor"):
        del raw[key]
    raw.pop("confidence_head_with_markov")
    config = BlockConfig.from_dict(raw)
    assert (config.block_size, config.markov, config.markov_rank) == (8, "vanilla", 256)
    assert (config.anchor, config.confidence) == (True, DSPARK.hidden + 256)
    raw = blockzoo.config_of("speculators", DFLASH, 6)
    del raw["block_size"]
    config = BlockConfig.from_dict(raw)
    assert (config.block_size, config.markov, config.confidence, config.anchor) == (8, None, None, False)
    raw = blockzoo.config_of("speculators", DFLASH2, 6)
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "sample_from_anchor"):
        del raw[key]
    config = BlockConfig.from_dict(raw)
    assert config.conv == Conv(2, 16) and config.selector == Selector(256, 16) and not config.anchor
    raw = blockzoo.config_of("DFlash", DFLASH, 6)
    del raw["block_size"]
    with pytest.raises(UnsupportedModelError, match="block_size"):
        BlockConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("Gemma3ForCausalLM", {"rope_local_base_freq": 5000.0}), ("GraniteForCausalLM", {"embedding_multiplier": 8.0})],
)
def test_whether_embeddings_of_a_target_that_scales_them_are_scaled_must_be_said(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    """Gemma's reference modules scale by themselves, other software lends the table as it is."""
    at = modelzoo.write_target(tmp_path / "target", architecture, num_hidden_layers=6, **changes)
    target = ModelConfig.from_directory(at)
    blockzoo.write_block(tmp_path / "head", "DFlash", DFLASH, 6)
    with pytest.raises(UnsupportedModelError, match=r"config.json: input_embedding_scale = None: .*multiplies .* by 8"):
        check_draft(tmp_path / "head", target)
    for scale in (1.0, 8.0):
        modelzoo.edit_config(tmp_path / "head", input_embedding_scale=scale)
        config, _ = check_draft(tmp_path / "head", target)
        assert isinstance(config, BlockConfig) and config.embedding_scale == scale
    blockzoo.write_block(tmp_path / "own", "DFlash", replace(DFLASH, own_embedding=True), 6)
    check_draft(tmp_path / "own", target)


# config.json of SpecForge's repository (a6b6b023), of which only what differs is kept.
_SPECFORGE: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3-8b-dflash": ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 9, 17, 25, 33]}}, "DFlash"),
    "lfm2.5-1.2b-instruct-dflash": (
        {"dflash_config": {"mask_token_id": 16, "target_layer_ids": [1, 4, 7, 10, 13]}, "num_target_layers": 16},
        "DFlash",
    ),
    "qwen3.6-27b-dflash": (
        {
            "dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 16, 31, 46, 61]}, "sliding_window": 2048,
            "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        },
        "layer_types",
    ),
    "qwen3-4b-dspark": (
        {
            "architectures": ["DSparkDraftModel"], "block_size": 7,
            "dflash_config": {
                "attention_mode": "gqa", "mask_token_id": 7, "target_layer_ids": [1, 9, 17, 25, 33],
                "projector_type": "dspark", "markov_rank": 256, "markov_head_type": "vanilla",
                "confidence_head_alpha": 1.0, "enable_confidence_head": True, "confidence_head_with_markov": True,
            },
        },
        "DSpark",
    ),
    "qwen3-8b-domino": (
        {
            "emb_dim": 256,
            "dflash_config": {
                "mask_token_id": 7, "target_layer_ids": [1, 9, 17, 25, 33], "projector_type": "domino",
                "pure_draft_prefix_len": 1, "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": True,
            },
        },
        "Domino",
    ),
}  # fmt: skip
_USUAL: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 16,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": 2,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5, "max_position_embeddings": 40960, "max_window_layers": 5,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8,
    "num_target_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


@pytest.mark.parametrize("name", _SPECFORGE)
def test_a_published_configuration_is_read_or_refused_by_a_key(name: str) -> None:
    keys, outcome = _SPECFORGE[name]
    raw = {**_USUAL, **keys}
    if outcome.startswith("D"):
        config = BlockConfig.from_dict(raw)
        assert config.form_name == outcome and not [note for note in config.notes if "nothing here reads" in note]
        return
    with pytest.raises(UnsupportedModelError) as caught:
        BlockConfig.from_dict(raw)
    assert caught.value.what == outcome


def test_forms_of_one_name_are_told_apart_by_keys() -> None:
    for keys, name in (({}, "DFlash"), ({"causal_head": True}, "JetSpec"), ({"causal_head": False}, "DFlash"),
                       ({"projector_type": "dspark"}, "DSpark"), ({"projector_type": "dflash"}, "DFlash"),
                       ({"projector_type": "domino"}, "Domino"), ({"selector_rank": 8}, "DFlash2")):  # fmt: skip
        assert form_of({"architectures": ["DFlashDraftModel"], **section(**keys)}).name == name
    assert form_of({"architectures": ["DominoDraftModel"]}).name == "Domino"
    assert form_of({"architectures": ["DSparkDraftModel"]}).name == "DSpark"
    assert form_of({"architectures": ["DFlash2DraftModel"]}).trainer == "z-lab"
    nested = {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2"}
    assert form_of(nested).trainer == "speculators"


def test_layers_that_no_key_names_are_the_authors_own() -> None:
    raw = {**_USUAL, "dflash_config": {"mask_token_id": 7}}
    assert BlockConfig.from_dict(raw).default_aux(36) == (2, 10, 18, 26, 34)
    one = BlockConfig.from_dict({**raw, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    assert one.default_aux(36) == (19,) and one.aux_size == 4096


@pytest.mark.parametrize(
    ("form", "b"),
    [("DFlash", DFLASH), ("speculators", replace(DSPARK, draft_vocab=77, own_embedding=True)),
     ("DeepSpec", replace(DFLASH, anchor=True, markov="rnn", biases=True, own_scores=True)),
     ("Domino", replace(DFLASH, free=1)), ("DFlash2", DFLASH2)],
)  # fmt: skip
def test_memory_of_a_head_is_counted(tmp_path: Path, form: str, b: Block) -> None:
    _, directory, tensors = head(tmp_path, form, b)
    target = LlamaModel.load(tmp_path / "target", ops_for())
    made = load_draft(directory, target)
    assert isinstance(made, BlockHead)
    own = "lm_head.weight" in tensors
    products = [product for name, product in made.products() if own or name != "lm_head"]
    packed = 4 * sum(product.out_features * product.in_features for product in products)
    vectors = sum(t.nbytes for n, t in tensors.items() if t.dim() != 2 and t.is_floating_point() and "confid" not in n)
    names = ("embed_tokens", "embed_proj.2", "markov_w", "codebook")
    tables = sum(t.nbytes for n, t in tensors.items() if any(name in n for name in names))
    ids = 8 * (b.draft_vocab or 0)
    assert head_bytes(made.config, directory, HOST) == packed + vectors + tables + ids
