"""The published forms of draft heads, as data: nothing here computes.

`FORMS` has a row for each form that runs: how its directory is recognised, and where its `config.json` says what. What
a head then computes is in its configuration (`head_config`). `OTHERS` has the forms that are known and do not run, so
that they are refused by name. Sources are the code that writes and reads these files: speculators, SpecForge,
AngelSlim, NVIDIA's ModelOpt, DeepSpec, and the readers of vLLM and sglang.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from specrs.models.errors import UnsupportedModelError, one_line
from specrs.models.families import FAMILIES

LAYER = "midlayer."
"""Prefix of the first layer's tensors, once `plain_name` has named them."""


@dataclass(frozen=True)
class Form:
    """A form of draft heads that runs.

    Attributes:
        name: what the head is.
        trainer: software that writes the form.
        kind: passes that run it: draft steps over the last hidden state or over auxiliary features, the latter and one
            pass over masks (``parallel``), or one pass over a block.
        architectures: names in `architectures` of config.json.
        tensors: tensors that the file of weights has, where names do not tell the form.
        keys: keys of config.json, as in `OtherForm`, that the form has beside its name.
        speculators: its `speculators_model_type`; such a file nests the keys of its layers.
        family: architecture of the model whose layer the head has.
        says_target_layers: true if `num_hidden_layers` of a head of one layer may be that of its target.
        anchor: of blocks whose files do not say it: true if the first row, which has the last token, predicts the one
            behind; else each row predicts the token at its own place, and the first row nothing.
        heads: repositories on the hub in this form, as examples.
    """

    name: str
    trainer: str
    kind: Literal["eagle1", "eagle3", "parallel", "block"]
    architectures: tuple[str, ...]
    tensors: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)
    speculators: str | None = None
    family: str = "LlamaForCausalLM"
    says_target_layers: bool = False
    anchor: bool = False
    heads: tuple[str, ...] = ()


# A head under a model's name is told from the model by its tensors.
_MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM")
_QWEN3 = "Qwen3ForCausalLM"
_EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_EAGLE1 = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "Qwen2ForCausalLMEagle")

FORMS = (
    Form("P-EAGLE", "for vLLM", "parallel", _EAGLE3, keys={"parallel_drafting": None}),
    Form("P-EAGLE", "SpecForge", "parallel", ("PEagleDraftModel",)),
    Form(
        "P-EAGLE", "speculators", "parallel", ("PEagleSpeculator",), speculators="peagle",
        heads=("RedHatAI/Qwen3-8B-speculator.peagle",),
    ),
    Form(
        "EAGLE-3", "SpecForge, AngelSlim, NVIDIA", "eagle3", _EAGLE3,
        heads=("AngelSlim/Qwen3-8B_eagle3", "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B"),
    ),
    Form(
        "EAGLE-3", "speculators", "eagle3", ("Eagle3Speculator", "Eagle3DraftModel"), speculators="eagle3",
        heads=("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3"),
    ),
    Form(
        "EAGLE-3", "DeepSpec", "eagle3", ("Qwen3Eagle3Model", "Eagle3Qwen3ForCausalLM"), family=_QWEN3,
        heads=("deepseek-ai/eagle3_qwen3_4b_ttt7", "deepseek-ai/eagle3_qwen3_8b_ttt7"),
    ),
    Form(
        "EAGLE-3", "the paper's authors", "eagle3", (*_MODELS, *_EAGLE1), (f"{LAYER}hidden_norm.weight",),
        says_target_layers=True,
        heads=("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "yuhuili/EAGLE3-Vicuna1.3-13B"),
    ),
    Form(
        "EAGLE-1 or EAGLE-2", "the paper's authors", "eagle1", _MODELS, ("fc.weight",),
        heads=("yuhuili/EAGLE-LLaMA3-Instruct-8B", "yuhuili/EAGLE-Qwen2-7B-Instruct"),
    ),
    Form("EAGLE-1 or EAGLE-2", "converters for vLLM and sglang", "eagle1", _EAGLE1),
    Form("Domino", "SpecForge", "block", ("DominoDraftModel",), family=_QWEN3),
    Form(
        "Domino", "SpecForge", "block", ("DFlashDraftModel",), keys={"dflash_config.projector_type": "domino"},
        family=_QWEN3, heads=("Huang2020/Qwen3-4B-Domino-b16", "Huang2020/Qwen3-8B-Domino-b16"),
    ),
    Form("DFlash2", "z-lab", "block", ("DFlash2DraftModel",), family=_QWEN3),
    Form(
        "DFlash2", "converters for older servers", "block", ("DFlashDraftModel",),
        keys={"dflash_config.selector_rank": None}, family=_QWEN3,
    ),
    Form(
        "DFlash2", "speculators", "block", ("DFlash2DraftModel",), speculators="dflash2", family=_QWEN3,
        heads=("mgoin/Qwen3-4B-speculator.dflash2", "RedHatAI/Qwen3-8B-speculator.dflash2"),
    ),
    Form(
        "JetSpec", "JetSpec", "block", ("DFlashDraftModel",), keys={"dflash_config.causal_head": None}, family=_QWEN3,
        heads=("JetSpec/jetspec-qwen3-8b",),
    ),
    Form("DSpark", "SpecForge", "block", ("DSparkDraftModel",), family=_QWEN3, anchor=True),
    Form(
        "DSpark", "SpecForge", "block", ("DFlashDraftModel",), keys={"dflash_config.projector_type": "dspark"},
        family=_QWEN3, anchor=True,
    ),
    Form(
        "DSpark", "DeepSpec", "block", ("Qwen3DSparkModel",), family=_QWEN3, anchor=True,
        heads=("deepseek-ai/dspark_qwen3_4b_block7", "deepseek-ai/dspark_qwen3_8b_block7"),
    ),
    Form(
        "DSpark", "speculators", "block", ("DSparkSpeculator",), speculators="dspark", family=_QWEN3, anchor=True,
        heads=("mpashkovskii/dspark-qwen3-8b",),
    ),
    Form(
        "DFlash", "z-lab, SpecForge", "block", ("DFlashDraftModel",), family=_QWEN3,
        heads=("z-lab/Qwen3-4B-DFlash-b16", "z-lab/Qwen3-8B-DFlash-b16",
               "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    ),
    Form(
        "DFlash", "speculators", "block", ("DFlashSpeculator",), speculators="dflash", family=_QWEN3,
        heads=("RedHatAI/Qwen3-8B-speculator.dflash",),
    ),
)  # fmt: skip
"""Forms that run. A directory has the first form whose name and tensors it has."""


@dataclass(frozen=True)
class OtherForm:
    """A form of draft heads that is known and does not run.

    Attributes:
        name: what the head is.
        drafts: how it drafts.
        architectures: names in `architectures` of config.json.
        speculators: its `speculators_model_type`.
        keys: keys of config.json that say so whatever the architecture: by name, with a dot within an object, the value
            (``None``: any but null and false).
        tensors: beginnings of names of tensors that only this form has.
    """

    name: str
    drafts: str
    architectures: tuple[str, ...] = ()
    speculators: str | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()


OTHERS = (
    OtherForm("DSpark for Gemma 4", "has layers of Gemma 4", ("Gemma4DSparkModel",)),
    OtherForm("DSpark for DeepSeek V4", "has layers of DeepSeek V4", ("DeepseekV4DSparkModel",), None,
              {"dspark_target_layer_ids": None}),
    OtherForm("DFly", "has a form of AngelSlim's own", ("DFlyDraftModel",)),
    OtherForm("DFlare", "mixes layers for each of its own", ("QwenDFlareDraftModel",)),
    OtherForm("DFlash of AngelSlim", "has a form of AngelSlim's own", ("QwenDFlashDraftModel",)),
    OtherForm("MTP", "is layers of the target itself", (), "mtp", {}, ("mtp.", "mtp_layers.")),
    OtherForm("MLP speculator", "has no attention", ("MLPSpeculatorPreTrainedModel",), "mlp", {}, ("speculator.",)),
    OtherForm("Medusa", "has no attention", ("MedusaModel", "MedusaForCausalLM"), "medusa", {}, ("medusa_head.",)),
)  # fmt: skip
"""Forms that are refused by name. Those that share keys stand behind the more special."""

RENAMED = {"model.": "", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm.", "logit_head.": "",
           "layers.0.": LAYER, "aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.",
           "aux_norm_high.": "fc_norm.2."}  # fmt: skip
"""Beginnings of tensors' names that stand for others, in the order in which they are replaced."""

IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Tensors that some files have and no pass reads: copies of the target's, and what follows from config.json."""

LAYER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_attention_heads": 32,
        "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
}  # fmt: skip
"""Values of keys that a nested configuration leaves out: speculators writes those that differ from its class's own in
transformers."""

AUX_KEYS = (
    ("eagle_aux_hidden_state_layer_ids", None, 0),
    ("aux_hidden_state_layer_ids", None, 0),
    ("aux_hidden_states_layer_ids", None, 1),
    ("eagle_aux_hidden_state_layer_ids", "eagle_config", 1),
    ("target_layer_ids", None, 1),
    ("target_layer_ids", "dflash_config", 1),
)
"""Keys that name the features' layers: the key, the object that has it, and what makes its numbers those of residual
streams, of which 0 is the embedding and i enters layer i. Keys with numbers must name the same streams.

Beside the other keys (speculators, vLLM) the numbers are streams, but for AngelSlim's `aux_hidden_states_layer_ids`,
whose trainer takes `hidden_states[i + 1]`. Inside `eagle_config` (SpecForge, sglang) they are layers whose output is
meant; sglang adds 1 to them in `set_eagle3_layers_to_capture`, while its default (2, n/2, n-3) is streams already.
`target_layer_ids` of DeepSpec and of DFlash's family are outputs too, -1 that of the embedding.
"""

NORM_KEYS = {
    "norm_before_fc": ("norm_before_fc",), "fc_norm": ("fc_norm", "use_aux_norm"), "norm_output": ("norm_output",),
}  # fmt: skip
"""Keys, here or in `eagle_config`, that switch on a norm: of all features before `fc`, of each of them, and of what a
draft step passes to the next."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_neox_style": (True,), "rope_is_neox_style": (True,), "input_embedding_scale": (1,),
    "embedding_multiplier": (1,), "output_multiplier": (1,), "logits_scaling": (1,), "logit_scale": (1,),
    "residual_multiplier": (1,), "attention_multiplier": (), "final_logit_softcapping": (),
    "attn_logit_softcapping": (), "attn_output_gate": (False,),
}  # fmt: skip
"""Keys that change numbers in a way that no head here computes, and the values that change none; null is always one."""

EAGLE_CONFIG: Mapping[str, tuple[Any, ...] | None] = {
    "use_aux_hidden_state": (True,), "use_input_layernorm_in_first_layer": (True,), "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,), "next_layer_regular": (True,), "parallel_draft_step": (0, 1),
    "parallel_draft_heads_num_layers": None, "has_lm_head": None, "eagle_aux_hidden_state_layer_ids": None,
    **dict.fromkeys(key for keys in NORM_KEYS.values() for key in keys),
}  # fmt: skip
"""Keys of `eagle_config`: the values that are implemented, ``None`` where the key changes nothing or is read elsewhere.
Null is none of these keys. A key that is not here is refused, since this object is there to change numbers."""

DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys that DFlash2 heads alone have."""

BLOCK_CONFIG: Mapping[str, tuple[Any, ...] | None] = {
    **dict.fromkeys((
        "block_size", "mask_token_id", "target_layer_ids", "causal", "is_causal", "causal_head", "sample_from_anchor",
        "shift_label", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
        "confidence_head_alpha", "num_anchors", "output_multiplier", "input_embedding_scale",
        "final_logit_softcapping", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", *DFLASH2_KEYS,
    )),
    "projector_type": ("dflash", "dspark", "domino"), "attention_mode": ("gqa",), "use_swa": (False,),
    "swa_window_size": (), "attention_sink_bias": (False,), "attention_value_scale": (1,),
    "hidden_dim_adapter": (False,), "draft_ffn_type": ("dense",),
}  # fmt: skip
"""Keys of `dflash_config`, as `EAGLE_CONFIG`. Most of them may stand beside the other keys as well (`block_config`)."""

SCALES = ("output_multiplier", "input_embedding_scale", "final_logit_softcapping")
"""Keys of blocks that change embeddings and logits, and are honoured."""

BLOCK_KEYS = frozenset(
    (
        *(key for key in BLOCK_CONFIG if key != "target_layer_ids"), "dflash_config", "sliding_window_non_causal",
        # Training.
        "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma", "lambda_base_start", "lambda_base_decay_ratio", "auf",
        "max_anchors", "selector_loss_alpha",
    )
)  # fmt: skip
"""Keys of config.json beside `READ` and `HARMLESS` that blocks have: they are read, or change nothing."""

STEP_KEYS = (
    "eagle_config", "norm_before_residual", "parallel_drafting", "ptd_token_id", "pard_token",
    *(key for keys in NORM_KEYS.values() for key in keys),
)  # fmt: skip
"""Keys of heads that draft step by step, which a head of blocks computes nothing of."""

MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
"""Keys that name the token of P-EAGLE's masked rows."""

READ = frozenset(
    (
        *MASK_KEYS, "parallel_drafting", "para_depths",
        "architectures", "model_type", "speculators_model_type", "transformer_layer_config", "eagle_config",
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "vocab_size", "draft_vocab_size", "target_hidden_size", "max_position_embeddings",
        "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
        "partial_rotary_factor", "hidden_act", "hidden_activation", "is_causal", "use_bidirectional_attention",
        "add_cross_attention", "is_encoder_decoder", "layer_types", "sliding_window", "use_sliding_window",
        "max_window_layers", "norm_before_residual", "num_aux_hidden_states", "num_target_layers",
        "quantization_config", "compression_config",
        *(key for key, section, _ in AUX_KEYS if section is None),
        *(key for keys in NORM_KEYS.values() for key in keys),
        *NEUTRAL,
    )
)  # fmt: skip
"""Keys of config.json that are read, or refused where their value cannot be honoured."""

HARMLESS = frozenset(
    (
        # The file decides: biases, embeddings and products of its own (`head_files` refuses ties that contradict it).
        "attention_bias", "mlp_bias", "bias", "qkv_bias", "tie_word_embeddings", "attention_dropout",
        # Training, and software that runs the head.
        "ttt_length", "step_loss_decay", "draft_num_hidden_layers", "embed_requires_grad", "enable_sp_ulysses",
        "initializer_range", "pretraining_tp", "use_cache", "torch_dtype", "dtype", "transformers_version",
        "auto_map", "speculators_config", "speculators_version", "_name_or_path", "has_no_defaults_at_init",
        "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict", "gradient_checkpointing",
        "attn_implementation", "_attn_implementation", "modal_type", "target_model_type", "specrs",
        # Tokens: the target's count.
        "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id", "video_token_id", "vision_start_token_id",
        "vision_end_token_id",
    )
)  # fmt: skip
"""Keys of config.json that change nothing here."""


def plain_name(name: str) -> str:
    """Return the name here of a head's tensor, which is published under several (`RENAMED`)."""
    for start, ours in RENAMED.items():
        if name.startswith(start):
            name = ours + name[len(start) :]
    return name


def form_of(raw: Mapping[str, Any], path: Path | None = None, tensors: Container[str] | None = None) -> Form:
    """Return the form of a head: the first row of `FORMS` that `config.json` and the names of the tensors allow.

    Args:
        raw: its `config.json`.
        path: the file to name in errors.
        tensors: names of the tensors, by `plain_name`; ``None``: they are not known yet, and any will do.

    Raises:
        UnsupportedModelError: another form, which is named, or none that is known.
    """
    refuse_others(raw, path)
    names, kind = raw.get("architectures"), raw.get("speculators_model_type")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    for form in FORMS:
        named = form.speculators == kind if kind is not None else name in form.architectures
        named = named and all(_says(raw, key, value) for key, value in form.keys.items())
        if named and (tensors is None or all(tensor in tensors for tensor in form.tensors)):
            return form
    if kind is not None:
        known = ", ".join(form.speculators for form in FORMS if form.speculators)
        raise UnsupportedModelError("speculators_model_type", kind, f"implemented: {known}", path)
    hint = "a model, no draft head: draft needs a draft head; " if name in FAMILIES else ""
    known = ", ".join(dict.fromkeys(name for form in FORMS for name in form.architectures))
    raise UnsupportedModelError("architectures", names, f"{hint}implemented: one of {known}", path)


def refuse_others(raw: Mapping[str, Any], path: Path | None = None) -> None:
    """Raise UnsupportedModelError where `config.json` says that the head has a form of `OTHERS`."""
    names, kind = raw.get("architectures"), raw.get("speculators_model_type")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    for other in OTHERS:
        if kind is not None and kind == other.speculators:
            _refuse(other, "speculators_model_type", kind, path)
        for key, value in other.keys.items():
            if _says(raw, key, value):
                _refuse(other, key, _value(raw, key), path)
        if name in other.architectures:
            _refuse(other, "architectures", names, path)


def other_by_tensor(name: str) -> OtherForm | None:
    """Return the form of `OTHERS` that alone has a tensor of this name."""
    return next((other for other in OTHERS if any(name.startswith(start) for start in other.tensors)), None)


def why_not(other: OtherForm) -> str:
    """Return the reason for which a head of this form is refused, and what runs."""
    return f"a {other.name} head, which {other.drafts}: not implemented; docs/models.md has the forms that run"


def _refuse(other: OtherForm, key: str, got: object, path: Path | None) -> NoReturn:
    raise UnsupportedModelError(key, one_line(got) if isinstance(got, str) else got, why_not(other), path)


def _says(raw: Mapping[str, Any], key: str, value: Any) -> bool:
    """Return whether a key, which a dot may divide, has a value; of ``None``, any but null and false."""
    got = _value(raw, key)
    return bool(got == value) if value is not None else got not in (None, False)


def _value(raw: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, which a dot may divide."""
    section, _, inner = key.rpartition(".")
    place = raw.get(section) if section else raw
    return place.get(inner) if isinstance(place, Mapping) else None
