"""The EAGLE-3 draft head (https://arxiv.org/abs/2503.01840): one decoder layer that predicts the target's next tokens
from features of three of its layers. Heads of EAGLE-1 and EAGLE-2, whose feature is the target's last hidden state, run
through the same passes.

Row p pairs the feature of position p with the token at p + 1 and sits at position p. `extend` runs rows whose features
come from the target (prefill, and the accepted tokens of each round); `step` runs draft rows, whose feature is the
head's own hidden state of the row before. The hidden state is the residual stream *before* the last norm, as in sglang
and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from specrs._specrs import ConfigError, Plan
from specrs.models.acceptance import UNKNOWN, Acceptance, read_acceptance
from specrs.models.cache import new_cache
from specrs.models.config import Eagle1Config, Eagle3Config, HeadConfig, ModelConfig
from specrs.models.errors import DraftMismatchError, ModelFileError, UnsupportedModelError
from specrs.models.head_inputs import LAYER, Eagle1Inputs, Eagle3Inputs, HeadInputs, layer_kind, plain_name
from specrs.models.layer import LayerTail, Workspace, layer_shapes
from specrs.models.live import model_json
from specrs.models.llama import ROPE_SLACK, LlamaModel, check_rows
from specrs.models.loader import Checkpoint
from specrs.models.ops import KvMemory, Linear, Ops
from specrs.models.placement import HOST, Placement
from specrs.models.rope import rope_tables


class Eagle3Head:
    """Weights and scratch memory of a head, bound to its target, whose features it selects (`set_aux_layers`).

    Of an EAGLE-1 or EAGLE-2 head too, where its directory holds one: those differ in what their layer reads
    (`head_inputs`), and in that no norm stands before the target's own `lm_head`.
    """

    def __init__(
        self, config: HeadConfig, weights: Checkpoint, ops: Ops, target: LlamaModel,
        acceptance: tuple[Acceptance, ...] = UNKNOWN,
    ) -> None:  # fmt: skip
        _check_files(config, weights, target.config)
        aux_layers = config.aux_layers_for(target.config)
        self.config, self.acceptance = config, acceptance
        self.aux_layers = aux_layers
        self.d2t, self.target_ids = _vocabulary_map(config, weights, target.config)
        self.placement = at = ops.placement
        self.dense = dense = ops.dense
        self._eps = config.rms_norm_eps
        h = config.hidden_size
        own = "embed_tokens.weight" in weights
        self.embedding = dense.embedding(weights.load("embed_tokens.weight")) if own else target.embedding
        self._inputs: HeadInputs
        self._norm: torch.Tensor | None = None
        self._lends: LlamaModel | None = target  # the model whose last product the head uses
        self.lm_head: Linear = target.lm_head
        if isinstance(config, Eagle1Config):
            self._inputs = Eagle1Inputs(config, weights, ops, self.embedding)
        else:
            self._inputs = Eagle3Inputs(config, weights, ops, self.embedding)
            self._norm = at.vector(weights.load("norm.weight"))
            if "lm_head.weight" in weights:
                self.lm_head, self._lends = dense.linear(weights.load("lm_head.weight"), scores=True), None
        self._tail = LayerTail(ops, config, layer_kind(weights), weights, LAYER)
        self._rope = ops.attention.rope(*rope_tables(config.rope, config.head_dim, target.max_context_len + ROPE_SLACK))
        wide, row = LayerTail.widths(config), self._inputs.widths
        self._extend_work = Workspace(at, x=h, e=h, n=h, **row, **wide)
        self._write_work = Workspace(at, x=h, e=h, n=h, **self._inputs.kv_widths)
        self._extend_tail = Workspace(at, x=h, hidden=h, **wide)
        self._step_work = Workspace(at, e=h, n=h, hidden=h, **row, **wide)
        self._extend_logits, self._step_logits = (
            Workspace(at.for_logits(), logits=config.draft_vocab_size) for _ in range(2)
        )
        target.set_aux_layers(aux_layers)

    @classmethod
    def load(cls, directory: str | Path, ops: Ops, target: LlamaModel) -> Eagle3Head:
        """Loads a head's directory (config.json, weights, perhaps acceptance.json) and checks it against its target.

        Raises DraftMismatchError, UnsupportedModelError or ModelFileError, all `ConfigError`s; the target is then as
        it was.
        """
        return cls(*_open(directory, ops.placement), ops, target, read_acceptance(directory))

    @staticmethod
    def check(directory: str | Path, target: ModelConfig) -> tuple[HeadConfig, dict[str, tuple[int, ...]]]:
        """Return the head's configuration and the shapes of its tensors, checked against a target of which nothing is
        loaded.

        Raises as `load` does, but for the vocabulary map, which is in the weights.
        """
        config, weights = _open(directory, HOST)
        read_acceptance(directory)
        return config, _check_files(config, weights, target)

    @staticmethod
    def check_vocabulary(directory: str | Path, target: ModelConfig) -> int:
        """Return how many of the target's tokens the head can draft, by its vocabulary map; the head has passed
        `check`.

        Raises DraftMismatchError.
        """
        config, weights = _open(directory, HOST)
        return len(_vocabulary_map(config, weights, target)[1])

    @property
    def vocab_size(self) -> int:
        """Columns of the head's logits."""
        return self.config.draft_vocab_size

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> KvMemory:
        """Return memory for the head's own KV, of one layer; its slots are those of the target's cache."""
        return new_cache(self.config, 1, num_pages, page_size, self.placement, dtype)

    def reserve(self, rows: int, logit_rows: int, step_rows: int) -> None:
        """Reserve memory for `extend` and `write` over so many rows, of which so many give logits, and for steps."""
        self._extend_work.reserve(rows)
        self._write_work.reserve(rows)
        self._extend_tail.reserve(logit_rows)
        self._extend_logits.reserve(logit_rows)
        self._step_work.reserve(step_rows)
        self._step_logits.reserve(step_rows)

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield every product of the head, with the name of its weight; the product of q, k and v is split by its
        inputs."""
        yield from self._inputs.products()
        yield from self._tail.products(LAYER)
        yield "lm_head", self.lm_head

    def extend(
        self,
        tokens: torch.Tensor,
        aux: Sequence[torch.Tensor],
        plan: Plan,
        kv: KvMemory,
        logit_rows: torch.Tensor | None = None,
        shift: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows whose features are the target's.

        tokens: int64 [Q], the token *after* each row's position. aux: [Q, target hidden] of each aux layer,
        from `LlamaModel.forward(aux=True)` at the row's position. logit_rows: integers [R] or None (all), to each of
        which ``shift`` is added. Returns (logits [R, draft vocabulary], hidden [R, h]), views that the next `extend`
        overwrites.
        """
        features = self._features(tokens, aux, plan)
        rows = len(features)
        w = self._extend_work.rows(rows)
        wanted = rows if logit_rows is None else logit_rows.numel()
        tail, logits = self._extend_tail.rows(wanted), self._extend_logits.rows(wanted)["logits"]
        if not rows:
            return logits, tail["hidden"]
        residual = self._attend(tokens, self._inputs.fuse(features, w["x"]), plan, kv, w)
        attended = w["attended"]
        if logit_rows is not None:
            self.dense.gather(residual, logit_rows, tail["x"], shift)
            self.dense.gather(attended, logit_rows, tail["attended"], shift)
            residual, attended = tail["x"], tail["attended"]
        return self._predict(residual, attended, tail, logits)

    def write(self, tokens: torch.Tensor, aux: Sequence[torch.Tensor], plan: Plan, kv: KvMemory) -> torch.Tensor:
        """Run rows of `extend` whose logits are not wanted: keys and values alone, at less than half of the cost, and
        to the same bits on the host. Returns them, [Q, 2 Hkv D] before the rotation, a view that the next `write`
        overwrites."""
        features = self._features(tokens, aux, plan)
        w = self._write_work.rows(len(features))
        if len(features):
            self._inputs.project(tokens, self._inputs.fuse(features, w["x"]), w, queries=False)
            self._tail.write(kv, 0, plan, w["kv"], self._rope)
        return w["kv"]

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, plan: Plan, kv: KvMemory
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft rows, whose features are the hidden states of the rows that they continue.

        tokens: int64 [Q]. hidden: [Q, h], from `extend` or the last `step`. Returns (logits [Q, draft
        vocabulary], hidden [Q, h]), views that the next `step` overwrites (passing that very view back is fine).
        """
        rows = check_rows(tokens, plan)
        w, logits = self._step_work.rows(rows), self._step_logits.rows(rows)["logits"]
        if hidden.shape != (rows, self.config.hidden_size):
            got, want = list(hidden.shape), [rows, self.config.hidden_size]
            raise ConfigError(f"hidden = {got}: must be {want}, a row for each query of the plan")
        if not rows:
            return logits, w["hidden"]
        return self._predict(self._attend(tokens, hidden.contiguous(), plan, kv, w), w["attended"], w, logits)

    def _attend(
        self, tokens: torch.Tensor, feature: torch.Tensor, plan: Plan, kv: KvMemory, w: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Fills `attended` of w; returns the residual stream that it adds to."""
        residual = self._inputs.project(tokens, feature, w, queries=True)
        self._tail.attend(kv, 0, plan, w["qkv"], self._rope, w["attended"])
        return residual

    def _features(self, tokens: torch.Tensor, aux: Sequence[torch.Tensor], plan: Plan) -> torch.Tensor:
        """Features of all layers side by side, [Q, n_aux * target hidden]."""
        rows, layers = check_rows(tokens, plan), len(self.aux_layers)
        want = [(rows, self.config.aux_size // layers)] * layers
        got = [tuple(a.shape) for a in aux]
        if got != want:
            raise ConfigError(f"aux = {got}: must be {want}, features of each query of the plan for each aux layer")
        return self.dense.concat(aux)

    def _predict(
        self, residual: torch.Tensor, attended: torch.Tensor, w: dict[str, torch.Tensor], logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual.shape[0]:
            self._tail.mix(residual, attended, w, w["hidden"])
            self.lm_head.forward(w["hidden"], logits, None, self._norm, self._eps)
            if self._lends is not None:
                self._lends.finish(logits)
        return logits, w["hidden"]


# Tensors of published forms that are not implemented, by how their names begin.
_OTHER_FORMS = {
    "input_norm.": "a norm of all features before fc (norm_before_fc)",
    "fc_norm.": "a norm of each feature before fc (fc_norm)",
    "mask_hidden": "what a head that drafts in parallel (P-EAGLE) reads for features that are not known yet",
    "layers.": "of a second layer",
}


def _open(directory: str | Path, placement: Placement) -> tuple[HeadConfig, Checkpoint]:
    """A head's configuration, and its file."""
    raw, path = model_json(directory, "config.json")
    if not (maybe_first := Eagle1Config.describes(raw, has_fc=True)):
        Eagle3Config.check_architecture(raw, path)
    weights = Checkpoint(directory, plain_name, placement)
    # The paper's authors call heads of every version a model; the file says more: this norm is EAGLE-3's alone.
    third = f"{LAYER}hidden_norm.weight" in weights
    if maybe_first and not third and Eagle1Config.describes(raw, "fc.weight" in weights):
        return Eagle1Config.from_dict(raw, path), weights
    if third and not any(name.startswith("layers.") for name in weights):
        raw = {**raw, "num_hidden_layers": 1}  # some say how many their target has (yuhuili/EAGLE3-Vicuna1.3-13B)
    return Eagle3Config.from_dict(raw, path, named_as_model=maybe_first and third), weights


def _check_files(config: HeadConfig, weights: Checkpoint, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's name, shape and dtype, from headers; what the target must lend if the file lacks it. Returns the
    shapes."""
    config.check_target(target)
    if isinstance(config, Eagle1Config):
        return _check_eagle1(config, weights)
    for name in weights:
        for start, form in _OTHER_FORMS.items():
            if name.startswith(start):
                why = f"{form}: not implemented; a head of one layer without it works"
                raise UnsupportedModelError(f"tensor {name}", list(weights.shape(name)), why, weights.path(name))
    h, features = config.hidden_size, len(config.aux_layers_for(target))
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, features * config.target_hidden_size),
        f"{LAYER}input_layernorm.weight": (h,),
        f"{LAYER}hidden_norm.weight": (h,),
        "norm.weight": (h,),
        **layer_shapes(config, layer_kind(weights), LAYER, 2 * h),
    }
    if "fc.bias" in weights:
        expected["fc.bias"] = (h,)
    if "fc.weight" in weights:
        columns = (weights.shape("fc.weight") or (0,))[-1]
        if columns != features * config.target_hidden_size:
            raise DraftMismatchError(
                "columns of fc.weight",
                columns,
                f"{features} aux layers x hidden_size {config.target_hidden_size}",
            )
    lends = target.hidden_size == h
    if "embed_tokens.weight" in weights:
        expected["embed_tokens.weight"] = (config.vocab_size, h)
    elif not lends:
        raise DraftMismatchError(
            "hidden_size",
            h,
            f"embeddings of width {target.hidden_size}",
            "the head has no embed_tokens.weight of its own",
        )
    if "lm_head.weight" in weights:
        rows = (weights.shape("lm_head.weight") or (0,))[0]
        if rows != config.draft_vocab_size:
            raise DraftMismatchError("draft_vocab_size", config.draft_vocab_size, f"lm_head.weight with {rows} rows")
        expected["lm_head.weight"] = (config.draft_vocab_size, h)
    elif not lends or config.draft_vocab_size != target.vocab_size:
        raise ModelFileError(weights.path("lm_head.weight"), "missing, and the target's does not fit", "lm_head.weight")
    integers = [name for name in ("d2t", "t2d") if name in weights]
    expected.update({name: (config.draft_vocab_size if name == "d2t" else config.vocab_size,) for name in integers})
    weights.check(expected, integers=integers)
    return expected


def _check_eagle1(config: Eagle1Config, weights: Checkpoint) -> dict[str, tuple[int, ...]]:
    h = config.hidden_size
    expected = {"fc.weight": (h, 2 * h), **layer_shapes(config, layer_kind(weights), LAYER, h)}
    if "fc.bias" in weights:
        expected["fc.bias"] = (h,)
    if "embed_tokens.weight" in weights:
        expected["embed_tokens.weight"] = (config.vocab_size, h)
    weights.check(expected, ignored=("lm_head.weight",))  # some have a copy of the target's
    return expected


def _vocabulary_map(
    config: HeadConfig, weights: Checkpoint, target: ModelConfig
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (d2t int64 [draft vocabulary]: the number to add to a draft id, None where nothing is added; and the sums:
    target ids), on the host."""
    draft = torch.arange(config.draft_vocab_size)
    if "d2t" not in weights:
        if config.draft_vocab_size != config.vocab_size:
            why = f"a d2t map, since vocab_size is {config.vocab_size}; the file has none"
            raise DraftMismatchError("draft_vocab_size", config.draft_vocab_size, why)
        return None, draft
    d2t = weights.load("d2t").to(HOST.device).long()
    ids = draft + d2t
    limit = target.vocab_size
    outside = ((ids < 0) | (ids >= limit)).nonzero().flatten()
    if outside.numel():
        at = int(outside[0])
        raise DraftMismatchError(
            "d2t", f"{int(d2t[at])} at draft id {at}, so target id {int(ids[at])},", f"ids in 0..{limit}"
        )
    first = torch.full((limit,), -1)
    first[ids.flip(0)] = draft.flip(0)
    twice = (first[ids] != draft).nonzero().flatten()
    if twice.numel():
        at = int(twice[0])
        got = f"target id {int(ids[at])} for draft ids {int(first[ids[at]])} and {at}"
        raise DraftMismatchError("d2t", got, "one draft id for each target id")
    if "t2d" in weights:
        known = weights.load("t2d").to(HOST.device).bool()
        odd = (known != (first >= 0)).nonzero().flatten()
        if odd.numel():
            at = int(odd[0])
            raise DraftMismatchError("t2d", f"{bool(known[at])} at target id {at}", f"d2t says {bool(first[at] >= 0)}")
    return d2t, ids
