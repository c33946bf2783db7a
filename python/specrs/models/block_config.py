"""`config.json` of a head that drafts all tokens of a block in one pass: DFlash (https://arxiv.org/abs/2602.06036),
DFlash2, JetSpec, DSpark and Domino.

Their keys stand beside the others or in `dflash_config`; where both have one, they must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from specrs.models.config import layer_config
from specrs.models.head_forms import BLOCK_CONFIG, BLOCK_KEYS, DFLASH2_KEYS, SCALES, STEP_KEYS, Form, form_of
from specrs.models.head_keys import (
    FusedConfig,
    aux_layers,
    check_value,
    check_windows,
    checked,
    flat,
    section_of,
    target_layers,
    unread_keys,
)
from specrs.models.reading import Reader

Markov = Literal["vanilla", "gated", "rnn"]
MARKOV: tuple[Markov, ...] = ("vanilla", "gated", "rnn")
"""Kinds of Markov heads."""

_MOST_ROWS = 64  # bits of a mask word
_CAUSAL = ("causal", "is_causal", "causal_head")
_PROJECTORS = {"DSpark": "dspark", "Domino": "domino"}  # what `projector_type` says; of other forms "dflash"


@dataclass(frozen=True)
class Gru:
    """Domino's correction (https://arxiv.org/abs/2605.29707): a recurrent network over the tokens before a level.

    Attributes:
        free: levels, from the first on, that it does not correct.
        state: width of the network's state.
        inner: width of what scores are made of.
    """

    free: int
    state: int
    inner: int


@dataclass(frozen=True)
class Conv:
    """Convolutions of DFlash2's layers.

    Attributes:
        taps: rows that each mixes, its own included.
        group: columns that share what follows from a row of its kernel.
    """

    taps: int
    group: int


@dataclass(frozen=True)
class Selector:
    """DFlash2's choice among the likeliest tokens of a level, by the token before.

    Attributes:
        rank: width of its embeddings.
        candidates: likeliest tokens of a level; the others have no probability.
    """

    rank: int
    candidates: int


@dataclass(frozen=True)
class BlockConfig(FusedConfig):
    """A head that drafts a block: rows at the positions behind a request, the first of which has its last token, and
    the others a mask.

    Attributes:
        block_size: rows of a block.
        mask_token: the token of masked rows.
        causal: true if a row attends to those before it alone; else to all of its block.
        anchor: true if the first row predicts the token behind it, as every row does; else each but the first predicts
            the token at its own place.
        markov: kind of the Markov head; ``None`` without one.
        markov_rank: width of the Markov head's embeddings.
        gru: sizes of Domino's correction; ``None`` without one.
        conv: sizes of DFlash2's convolutions; ``None`` without them.
        selector: sizes of DFlash2's selector; ``None`` without one.
        confidence: inputs of the confidence head, which is read and not used; ``None`` without one.
        embedding_scale: factor on embeddings; ``None`` where the file says none, so that it is 1.
        logit_scale: factor on logits.
        logit_cap: c in c * tanh(x / c) of a scaled logit x; ``None`` without a cap.
    """

    block_size: int
    mask_token: int
    causal: bool
    anchor: bool
    markov: Markov | None
    markov_rank: int
    gru: Gru | None
    conv: Conv | None
    selector: Selector | None
    confidence: int | None
    embedding_scale: float | None
    logit_scale: float
    logit_cap: float | None
    layers_key: ClassVar[str] = "target_layer_ids"

    @property
    def pair_rank(self) -> int:
        """Width of the rows of a token before and a token to score (`path_heads.Pairs`); 0 without."""
        return self.markov_rank if self.selector is None else self.selector.rank

    @property
    def conv_factors(self) -> int:
        """Numbers that follow from a row for the convolutions of a sublayer, before and behind; 0 without."""
        return 0 if self.conv is None else 2 * self.conv.taps * self.hidden_size // self.conv.group

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], path: Path | None = None, form: Form | None = None) -> BlockConfig:
        """Read a head from its parsed `config.json`.

        Args:
            path: the file to name in errors.
            form: the form; ``None``: that of its name.

        Raises:
            UnsupportedModelError: another form, or a value that cannot be honoured.
        """
        form = form or form_of(raw, path)
        get = flat(raw, path)
        keys = _both(get, section_of(get, "dflash_config", BLOCK_CONFIG))
        attends = Reader({key: value for key, value in get.raw.items() if key != "is_causal"}, path)
        family = checked(attends, form, SCALES)
        layers = get.integer("num_hidden_layers", maximum=4096)
        check_windows(get, family, layers)
        kinds = get.raw.get("layer_types")
        if kinds is not None and len(kinds) != layers:
            get.refuse("layer_types", kinds, f"one for each of the {layers} layers of num_hidden_layers")
        layer = layer_config(get, family)
        vocab_size = get.integer("vocab_size")
        _check_form(get, keys, form)
        anchor = _agreeing(keys, ("sample_from_anchor", "shift_label"), form.anchor)
        if anchor and form.name == "DFlash2":
            keys.refuse("sample_from_anchor", True, "the first row of a DFlash2 head predicts nothing")
        notes = unread_keys(get, BLOCK_KEYS)
        # A file of speculators leaves out what its classes have as defaults.
        given, dspark = form.speculators is not None, form.speculators == "dspark"
        rank = keys.integer("markov_rank", 256 if dspark else 0, minimum=0)
        if rank and (kind := keys.raw.get("markov_head_type") or "vanilla") not in MARKOV:
            keys.refuse("markov_head_type", kind, f"implemented: {', '.join(MARKOV)}")
        confidence = None
        if keys.boolean("enable_confidence_head", dspark or bool(keys.raw.get("confidence_head_alpha"))):
            confidence = layer.hidden_size + (rank if keys.boolean("confidence_head_with_markov", dspark) else 0)
            notes.append("it has a confidence head, which is not used: drafts are worth what verified ones were")
        if dspark and keys.raw.get("sample_from_anchor") is None:
            notes.append(
                "sample_from_anchor is absent and taken as true, as the form is trained; vLLM takes it as false"
            )
        draft_vocab = get.integer("draft_vocab_size", vocab_size)
        if form.name in ("Domino", "DFlash2") and draft_vocab != vocab_size:
            get.refuse("draft_vocab_size", draft_vocab, f"{form.name} corrects the scores of all {vocab_size} tokens")
        if form.name in ("Domino", "DFlash2") and rank:
            get.refuse("markov_rank", rank, f"{form.name} has a correction of its own, and no Markov head")
        aux, count = aux_layers(get), get.raw.get("num_aux_hidden_states")
        if aux is not None and count not in (None, len(aux)):
            get.refuse("num_aux_hidden_states", count, f"target_layer_ids names {len(aux)} layers")
        return cls(
            **vars(layer),
            num_layers=layers,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab,
            target_hidden_size=get.integer("target_hidden_size", layer.hidden_size),
            aux_layers=aux,
            target_layers=target_layers(get),
            block_size=keys.integer("block_size", 8 if given else None, minimum=1 if anchor else 2, maximum=_MOST_ROWS),
            mask_token=keys.integer("mask_token_id", minimum=0, maximum=vocab_size - 1),
            causal=_agreeing(keys, _CAUSAL, False),
            anchor=anchor,
            markov=cast(Markov, kind) if rank else None,
            markov_rank=rank,
            gru=_gru(keys) if form.name == "Domino" else None,
            conv=_conv(keys, layer.hidden_size, given) if form.name == "DFlash2" else None,
            selector=_selector(keys, vocab_size, given) if form.name == "DFlash2" else None,
            confidence=confidence,
            embedding_scale=None
            if keys.raw.get("input_embedding_scale") is None
            else keys.number("input_embedding_scale"),
            logit_scale=keys.number("output_multiplier", 1.0),
            logit_cap=keys.number("final_logit_softcapping") if keys.raw.get("final_logit_softcapping") else None,
            form=form,
            notes=tuple(notes),
        )

    @property
    def depth(self) -> int:
        """Levels of a block's drafts."""
        return self.levels(self.block_size)

    def levels(self, rows: int) -> int:
        """Return the levels of drafts of so many rows of a block."""
        return rows if self.anchor else max(rows - 1, 0)

    def default_aux(self, layers: int) -> tuple[int, ...]:
        """Outputs of as many layers as the head has, at equal distances, as DFlash's authors pick them."""
        if self.num_layers == 1:
            return (layers // 2 + 1,)
        return tuple(round(1 + i * (layers - 4) / (self.num_layers - 1)) + 1 for i in range(self.num_layers))


def _check_form(get: Reader, keys: Reader, form: Form) -> None:
    """Refuse keys of heads that draft step by step, which say that this is none of blocks, and another projector."""
    for key in STEP_KEYS:
        if get.raw.get(key) not in (None, False, {}):
            get.refuse(key, get.raw[key], "a key of heads that draft step by step, of which a block's computes nothing")
    for key in DFLASH2_KEYS if form.name != "DFlash2" else ():
        if keys.raw.get(key) is not None:
            why = f"a key of DFlash2 heads, and by its name this is one of {form.name}; DFlash2DraftModel works"
            keys.refuse(key, keys.raw[key], why)
    wanted = _PROJECTORS.get(form.name, "dflash")
    if keys.raw.get("projector_type") not in (None, wanted):
        get.refuse("projector_type", keys.raw["projector_type"], f"of {form.name} heads it is {wanted}")


def _gru(keys: Reader) -> Gru:
    """Read Domino's sizes."""
    free = keys.integer("pure_draft_prefix_len", 0, minimum=0)
    return Gru(free, keys.integer("gru_hidden_dim", 1024), keys.integer("emb_dim", 256))


def _conv(keys: Reader, width: int, given: bool) -> Conv:
    """Read the sizes of DFlash2's convolutions, which a file of speculators may leave out."""
    group = keys.integer("conv_group_size", 16 if given else None)
    if width % group:
        keys.refuse("conv_group_size", group, f"must divide hidden_size {width}")
    return Conv(keys.integer("conv_kernel_size", 2 if given else None, maximum=_MOST_ROWS), group)


def _selector(keys: Reader, vocab_size: int, given: bool) -> Selector:
    """Read the sizes of DFlash2's selector."""
    candidates = keys.integer("selector_top_k", 16 if given else None, maximum=vocab_size)
    return Selector(keys.integer("selector_rank", 256 if given else None), candidates)


def _both(get: Reader, section: Mapping[str, Any]) -> Reader:
    """The keys of blocks, wherever they stand, once those that stand twice agree."""
    found: dict[str, Any] = {key: get.raw[key] for key in BLOCK_CONFIG if get.raw.get(key) is not None}
    for key, value in found.items():
        check_value(get, key, value, BLOCK_CONFIG[key])
    for key, value in section.items():
        if value is None:
            continue
        if key != "target_layer_ids" and key in found and found[key] != value:
            get.refuse(
                f"dflash_config.{key}", value, f"{key} is {found[key]} beside dflash_config; give both one value"
            )
        found[key] = value
    return Reader(found, get.path)


def _agreeing(keys: Reader, names: tuple[str, ...], default: bool) -> bool:
    """Return the value of a switch that has several names, all of which must agree."""
    said = [(name, keys.boolean(name, default)) for name in names if keys.raw.get(name) is not None]
    for name, value in said[1:]:
        if value != said[0][1]:
            keys.refuse(
                name, value, f"{said[0][0]} is {str(said[0][1]).lower()}, and both say the same; give one value"
            )
    return said[0][1] if said else default
