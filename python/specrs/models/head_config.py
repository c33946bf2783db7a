"""`config.json` of a draft head as a frozen value, read as its form says (`head_forms`).

A key that would change what the head computes, and that nothing here computes, is refused by name before any weight is
read. Whether a head fits a target is checked here, too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from specrs.models.block_config import BlockConfig
from specrs.models.config import LayerConfig, ModelConfig, layer_config
from specrs.models.errors import DraftMismatchError
from specrs.models.head_forms import EAGLE_CONFIG, LAYER, MASK_KEYS, NORM_KEYS, Form, form_of
from specrs.models.head_keys import (
    FusedConfig,
    aux_layers,
    check_windows,
    checked,
    flat,
    section_of,
    switched,
    target_layers,
    unread_keys,
)
from specrs.models.live import model_json
from specrs.models.reading import Reader


@dataclass(frozen=True)
class Eagle3Config(FusedConfig):
    """An EAGLE-3 head (https://arxiv.org/abs/2503.01840): decoder layers over the target's features, of which the first
    reads embedding and feature, and the others are plain.

    Attributes:
        norm_before_residual: true if the residual stream of the first layer starts from the normalised feature.
        norm_before_fc: true if one RMSNorm spans all features of a row before `fc`.
        fc_norm: true if each feature has an RMSNorm before `fc`.
        norm_output: true if a draft step passes on what the last norm gives, instead of what it reads.
        mask_token: of a P-EAGLE head the token of masked rows, which draft all levels behind the first in one pass;
            ``None`` of a head that drafts step by step.
        levels: levels of a P-EAGLE head's drafts; 0 of others.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token: int | None = None
    levels: int = 0

    @classmethod
    def from_directory(cls, directory: str | Path) -> Eagle3Config:
        """Read `config.json` of a head in any form of EAGLE-3. Raises ModelFileError and UnsupportedModelError."""
        return cls.from_dict(*model_json(directory, "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: Path | None = None, form: Form | None = None) -> Eagle3Config:
        """Read the same from parsed JSON.

        Args:
            path: the file to name in errors.
            form: the form; ``None``: that of its name.
        """
        form = form or form_of(raw, path)
        get = flat(raw, path)
        family = checked(get, form)
        section = section_of(get, "eagle_config", EAGLE_CONFIG)
        layers = get.integer("num_hidden_layers", 1, maximum=4096)
        check_windows(get, family, layers)
        layer = layer_config(get, family)
        vocab_size = get.integer("vocab_size")
        before_fc, each, output = (
            switched(get, Reader(section, path), NORM_KEYS[name])
            for name in ("norm_before_fc", "fc_norm", "norm_output")
        )
        if before_fc and each:
            get.refuse("fc_norm", True, "norm_before_fc is true, too: one of the two norms stands before fc")
        aux = aux_layers(get)
        count = 3 if aux is None else len(aux)
        if (said := get.integer("num_aux_hidden_states", count)) != count:
            where = "no key names layers, so the three of EAGLE-3's default count" if aux is None else f"{count} layers"
            get.refuse("num_aux_hidden_states", said, f"{where}; name as many layers")
        parallel = form.kind == "parallel"
        return cls(
            **vars(layer),
            num_layers=layers,
            vocab_size=vocab_size,
            draft_vocab_size=get.integer("draft_vocab_size", vocab_size),
            target_hidden_size=get.integer("target_hidden_size", layer.hidden_size),
            aux_layers=aux,
            target_layers=target_layers(get),
            norm_before_residual=get.boolean("norm_before_residual", False),
            norm_before_fc=before_fc,
            fc_norm=each,
            norm_output=output,
            mask_token=_mask(get) if parallel else None,
            levels=_levels(get) if parallel else 0,
            form=form,
            notes=_notes(get, form, layer.rope.theta),
        )

    @property
    def form_name(self) -> str:
        """Name of the form; EAGLE-3.1 is EAGLE-3 with a norm of each feature and a normalised output."""
        return "EAGLE-3.1" if self.fc_norm and self.norm_output else self.form.name

    def default_aux(self, layers: int) -> tuple[int, ...]:
        return 2, layers // 2, layers - 3


@dataclass(frozen=True)
class Eagle1Config(LayerConfig):
    """An EAGLE-1 (https://arxiv.org/abs/2401.15077) or EAGLE-2 (https://arxiv.org/abs/2406.16858) head: one decoder
    layer over the embedding and the target's last hidden state. The two differ only in the trees that are drafted with
    them.

    Attributes:
        vocab_size: vocabulary of the target, and of the head's logits.
        form: the form of the file.
        notes: what is worth knowing of the file.
    """

    vocab_size: int
    form: Form = field(compare=False)
    notes: tuple[str, ...] = field(compare=False)
    num_layers: ClassVar[int] = 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: Path | None = None, form: Form | None = None) -> Eagle1Config:
        """Read a head from its parsed `config.json`, which is that of a model of one layer.

        Args:
            path: the file to name in errors.
            form: the form; ``None``: that of its name, beside a file with `fc.weight`.

        Raises:
            UnsupportedModelError: another form, or a value that cannot be honoured.
        """
        form = form or form_of(raw, path, ("fc.weight",))
        get = flat(raw, path)
        family = checked(get, form)
        if (layers := get.integer("num_hidden_layers", 1, maximum=4096)) != 1:
            get.refuse("num_hidden_layers", layers, "EAGLE-1 and EAGLE-2 heads have one layer")
        check_windows(get, family, layers)
        layer = layer_config(get, family)
        notes = _notes(get, form, layer.rope.theta)
        return cls(**vars(layer), vocab_size=get.integer("vocab_size"), form=form, notes=notes)

    @property
    def form_name(self) -> str:
        """Name of the form."""
        return self.form.name

    @property
    def draft_vocab_size(self) -> int:
        """Columns of the head's logits."""
        return self.vocab_size

    @property
    def aux_size(self) -> int:
        """Columns of a row of features."""
        return self.hidden_size

    def aux_layers_for(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the features' layer: none of the target's, but the output of its last norm.

        In the code that the paper publishes (SafeAILab/EAGLE: `ea_model.py`, `ge_data/`) a feature is the model's
        `last_hidden_state`, behind the norm, and the target's `lm_head` is applied to what the head predicts as it is.
        """
        return (target.num_layers,)

    def check_target(self, target: ModelConfig) -> None:
        """Raise DraftMismatchError where the head cannot have been made for this target."""
        for what in ("hidden_size", "vocab_size"):
            if (got := getattr(self, what)) != (want := getattr(target, what)):
                raise DraftMismatchError(what, got, f"{what} {want}")


HeadConfig = Eagle1Config | Eagle3Config | BlockConfig
"""Configuration of a draft head of any kind."""


def _mask(get: Reader) -> int:
    """The token of masked rows, by all keys that name it."""
    said = [key for key in MASK_KEYS if get.raw.get(key) is not None]
    if not said:
        why = (
            "required: the token that masked rows read. Software that trains such heads may keep it elsewhere, "
            "SpecForge as model.mask_token_id of the run's options; add it to config.json"
        )
        get.refuse(MASK_KEYS[0], None, why)
    found = [get.integer(key, minimum=0, maximum=get.integer("vocab_size") - 1) for key in said]
    for key, token in zip(said, found, strict=True):
        if token != found[0]:
            get.refuse(key, token, f"{said[0]} is {found[0]}, and both name the mask; give both one value")
    return found[0]


def _levels(get: Reader) -> int:
    """Levels of a P-EAGLE head's drafts: those that its file proposes or was trained on, else as many as its trainers
    take by default."""
    proposed = get.raw.get("speculators_config") or {}
    methods = proposed.get("proposal_methods") if isinstance(proposed, dict) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    trained = get.integer("para_depths", 8, maximum=64)
    return Reader(first, get.path).integer("speculative_tokens", trained, maximum=64)


def _notes(get: Reader, form: Form, theta: float) -> tuple[str, ...]:
    notes = unread_keys(get)
    if form.speculators == "eagle3" and get.raw.get("norm_before_residual") is None:
        notes.append("norm_before_residual is absent and taken as false, as speculators does; vLLM takes it as true")
    usual = form.kind == "eagle3" and get.raw.get("architectures") == ["LlamaForCausalLMEagle3"]
    if usual and get.raw.get("norm_output") is not None:
        notes.append(
            "norm_output: in SpecForge's trainer it says whether the last norm stands before lm_head; here, as in "
            "sglang and vLLM, that norm always does, and the key says whether a draft step passes on its output"
        )
    if get.raw.get("architectures") == ["Eagle3LlamaForCausalLM"] and theta != 10000:
        notes.append(
            f"rope_theta = {theta:.0f}: AngelSlim's trainer does not read the key and takes 10000; here it counts, as "
            "in sglang and vLLM"
        )
    return tuple(notes)


def parts(config: HeadConfig, tensors: Container[str]) -> str | None:
    """Return what a head has beyond the first published one of its kind, in words; ``None`` where that is nothing.

    Args:
        tensors: names of its tensors.
    """
    has = [
        (config.num_layers > 1, f"{config.num_layers} layers"),
        (f"{LAYER}self_attn.q_norm.weight" in tensors, "q_norm and k_norm, as Qwen3's layers"),
    ]
    if isinstance(config, Eagle3Config):
        has += [
            (config.norm_before_residual, "norm_before_residual"),
            (config.norm_before_fc, "norm_before_fc"),
            (config.fc_norm, "fc_norm"),
            (config.norm_output, "norm_output"),
            (config.levels > 0, f"{config.levels} levels in one pass"),
            ("d2t" in tensors, "a vocabulary of its own"),
            ("embed_tokens.weight" in tensors, "embeddings of its own"),
        ]
    if isinstance(config, BlockConfig):
        has += [
            (True, f"blocks of {config.block_size} tokens"),
            (config.causal, "causal within a block"),
            (config.anchor, "the first row predicts"),
            (config.markov is not None, f"{config.markov} Markov head"),
            (config.gru is not None, "a recurrent correction"),
            (config.conv is not None, "convolutions within a block"),
            (config.selector is not None, "a selector by pairs of tokens"),
            ("d2t" in tensors, "a vocabulary of its own"),
            ("embed_tokens.weight" in tensors, "embeddings of its own"),
        ]
    return "; ".join(name for there, name in has if there) or None
