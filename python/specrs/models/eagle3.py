"""The EAGLE-3 draft head (https://arxiv.org/abs/2503.01840): a decoder layer, or some, that predict the target's next
tokens from features of three of its layers, or of others. Heads of EAGLE-1 and EAGLE-2, whose feature is the target's
last hidden state, run through the same passes.

Row p pairs the feature of position p with the token at p + 1 and sits at position p. `extend` runs rows whose features
come from the target (prefill, and the accepted tokens of each round); `step` runs draft rows, whose feature is the
head's own hidden state of the row before. The hidden state is the residual stream *before* the last norm, as in sglang
and vLLM, or behind it where the configuration says so (`norm_output`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from specrs import _specrs as core
from specrs._specrs import ConfigError, Plan
from specrs.models.acceptance import UNKNOWN, Acceptance, read_acceptance
from specrs.models.block_config import BlockConfig
from specrs.models.cache import new_cache
from specrs.models.dense import PackedTable
from specrs.models.head_config import Eagle1Config, Eagle3Config
from specrs.models.head_files import check_files, layer_kind, layer_prefix, open_head, vocabulary_map
from specrs.models.head_inputs import Eagle1Inputs, Eagle3Inputs, HeadInputs, LaterInputs
from specrs.models.layer import LayerTail, Workspace
from specrs.models.llama import ROPE_SLACK, LlamaModel, check_rows
from specrs.models.loader import Checkpoint
from specrs.models.ops import KvMemory, Linear, Ops
from specrs.models.rope import rope_tables

_logger = logging.getLogger(__name__)


class Eagle3Head:
    """Weights and scratch memory of a head, bound to its target, whose features it selects (`set_aux_layers`).

    Of an EAGLE-1 or EAGLE-2 head too, where its directory holds one: those differ in what their layer reads
    (`head_inputs`), and in that no norm stands before the target's own `lm_head`. `head_forms` has the published forms.
    """

    passes: Literal["steps"] = "steps"

    def __init__(
        self, config: Eagle1Config | Eagle3Config, weights: Checkpoint, ops: Ops, target: LlamaModel,
        acceptance: tuple[Acceptance, ...] = UNKNOWN,
    ) -> None:  # fmt: skip
        check_files(config, weights, target.config)
        aux_layers = config.aux_layers_for(target.config)
        self.config, self.acceptance = config, acceptance
        self.aux_layers = aux_layers
        self.d2t, self.target_ids = vocabulary_map(config, weights, target.config)
        self.placement = at = ops.placement
        self.dense = dense = ops.dense
        self._eps = config.rms_norm_eps
        h = config.hidden_size
        own = "embed_tokens.weight" in weights
        self.embedding = dense.embedding(weights.load("embed_tokens.weight")) if own else target.embedding
        self._inputs: HeadInputs
        self._norm: torch.Tensor | None = None
        self._passes_normed = False
        self._lends: LlamaModel | None = target  # the model whose last product the head uses
        self.lm_head: Linear = target.lm_head
        if isinstance(config, Eagle1Config):
            self._inputs = Eagle1Inputs(config, weights, ops, self.embedding)
        else:
            self._inputs = Eagle3Inputs(config, weights, ops, self.embedding)
            self._norm, self._passes_normed = at.vector(weights.load("norm.weight")), config.norm_output
            if "lm_head.weight" in weights:
                self.lm_head, self._lends = dense.linear(weights.load("lm_head.weight"), scores=True), None
        prefixes = [layer_prefix(i) for i in range(config.num_layers)]
        rope = ops.attention.rope(*rope_tables(config.rope, config.head_dim, target.max_context_len + ROPE_SLACK))
        self._tails = [LayerTail(ops, config, layer_kind(weights, p), weights, p, rope) for p in prefixes]
        self._later = [LaterInputs(config, weights, ops, p, p == prefixes[-1]) for p in prefixes[1:]]
        self._prefixes = prefixes
        wide, row = LayerTail.widths(config), self._inputs.widths
        self._passed = "passed" if self._passes_normed else "hidden"  # name of the hidden state that steps read
        self._fused: core.Eagle3Layer | None = None  # all of a head of one layer in one call
        if isinstance(self.embedding, PackedTable) and not self._later and not self._passes_normed:
            self._table = self.embedding.table
            self._fused = self._inputs.fused(self._tails[0], self._norm, self.lm_head)
        fused, kv_row = self._inputs.feature_widths, self._inputs.kv_widths
        last = {"hidden": h, "passed": h} if self._passes_normed else {"hidden": h}
        whole = {**row, **wide} if self._later else {}  # of the layers before the last
        self._extend_work = Workspace(at, x=h, e=h, n=h, **fused, **row, **wide)
        self._write_work = Workspace(at, x=h, e=h, n=h, **fused, **{**kv_row, **whole})
        self._extend_tail = Workspace(at, x=h, **last, **wide)
        self._step_work = Workspace(at, e=h, n=h, **last, **row, **wide)
        self._extend_logits, self._step_logits = (
            Workspace(at.for_logits(), logits=config.draft_vocab_size) for _ in range(2)
        )
        self._masks: tuple[torch.Tensor, torch.Tensor] | None = None  # of a P-EAGLE head, tokens and features of rows
        if isinstance(config, Eagle3Config) and config.mask_token is not None:
            parts = weights.load("mask_hidden").view(len(aux_layers), 1, -1).to(at.device, at.activations)
            feature = self._inputs.fuse(parts.unbind(0), self._extend_work.rows(1)).clone()
            self._masks = torch.tensor([config.mask_token], dtype=torch.int32, device=at.device), feature
        target.set_aux_layers(aux_layers)

    @classmethod
    def load(cls, directory: str | Path, ops: Ops, target: LlamaModel) -> Eagle3Head:
        """Loads a head's directory (config.json, weights, perhaps acceptance.json) and checks it against its target.

        Raises DraftMismatchError, UnsupportedModelError or ModelFileError, all `ConfigError`s; the target is then as
        it was. Logs the configuration's notes.
        """
        config, weights = open_head(directory, ops.placement)
        assert not isinstance(config, BlockConfig)
        head = cls(config, weights, ops, target, read_acceptance(directory))
        for note in config.notes:
            _logger.warning("%s: %s", directory, note)
        return head

    @property
    def mask_token(self) -> int:
        """The token of a P-EAGLE head's masked rows."""
        assert isinstance(self.config, Eagle3Config) and self.config.mask_token is not None
        return self.config.mask_token

    @property
    def vocab_size(self) -> int:
        """Columns of the head's logits."""
        return self.config.draft_vocab_size

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> KvMemory:
        """Return memory for the KV of the head's own layers; its slots are those of the target's cache."""
        return new_cache(self.config, self.config.num_layers, num_pages, page_size, self.placement, dtype)

    def reserve(self, rows: int, logit_rows: int, step_rows: int) -> None:
        """Reserve memory for `extend` and `write` over so many rows, of which so many give logits, and for steps."""
        self._extend_work.reserve(rows)
        self._write_work.reserve(rows)
        self._extend_tail.reserve(logit_rows)
        self._extend_logits.reserve(logit_rows)
        self._step_work.reserve(step_rows)
        self._step_logits.reserve(step_rows)
        if self._masks is not None:
            self._masked_rows(step_rows)

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield every product of the head, with the name of its weight; the product of q, k and v is split by its
        inputs."""
        yield from self._inputs.products()
        for later in self._later:
            yield from later.products()
        for prefix, tail in zip(self._prefixes, self._tails, strict=True):
            yield from tail.products(prefix)
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
        rows = self._check_features(tokens, aux, plan)
        w = self._extend_work.rows(rows)
        wanted = rows if logit_rows is None else logit_rows.numel()
        tail, logits = self._extend_tail.rows(wanted), self._extend_logits.rows(wanted)["logits"]
        if rows:
            self._run(tokens, self._inputs.fuse(aux, w), plan, kv, w, w["x"], tail, logits, logit_rows, shift)
        return logits, tail[self._passed]

    def write(self, tokens: torch.Tensor, aux: Sequence[torch.Tensor], plan: Plan, kv: KvMemory) -> torch.Tensor:
        """Run rows of `extend` whose logits are not wanted: of the last layer keys and values alone, at less than half
        of the cost for a head of one layer, and to the same bits on the host. Returns those, [Q, 2 Hkv D] before the
        rotation, a view that the next `write` overwrites."""
        rows, last = self._check_features(tokens, aux, plan), len(self._tails) - 1
        w = self._write_work.rows(rows)
        if rows:
            residual = self._inputs.project(tokens, self._inputs.fuse(aux, w), w, queries=last > 0)
            if last:
                residual = self._whole_layers(residual, plan, kv, w, w["x"])
                self._later[-1].project(residual, w, queries=False)
            self._tails[last].write(kv, last, plan, w["kv"])
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
        if rows:
            self._run(tokens, hidden.contiguous(), plan, kv, w, w["hidden"], w, logits)
        return logits, w[self._passed]

    def masked(self, plan: Plan, kv: KvMemory) -> torch.Tensor:
        """Rows of a P-EAGLE head that draft the levels behind the first, for each query of a causal plan behind a
        request. Returns logits [Q, draft vocabulary], a view that the next `step` overwrites."""
        return self.step(*self._masked_rows(plan.queries), plan, kv)[0]

    def _masked_rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and features of so many masked rows, views of memory that is kept for the most rows so far."""
        assert self._masks is not None
        tokens, features = self._masks
        if count > len(tokens):
            tokens, features = tokens[:1].repeat(count), features[:1].repeat(count, 1)
            self._masks = tokens, features
        return tokens[:count], features[:count]

    def _run(
        self,
        tokens: torch.Tensor,
        feature: torch.Tensor,
        plan: Plan,
        kv: Any,
        w: dict[str, torch.Tensor],
        stream: torch.Tensor,
        of_rows: dict[str, torch.Tensor],
        logits: torch.Tensor,
        rows: torch.Tensor | None = None,
        shift: int = 0,
    ) -> None:
        """Run rows over all layers and the last product. The residual stream of several layers lies in `stream`; the
        hidden state of the wanted rows goes to ``of_rows``."""
        hidden = of_rows["hidden"]
        if self._fused is not None:
            rows = rows if rows is None or not shift else rows + shift
            self._fused.forward(kv, plan, self._table, tokens, feature, hidden, logits, rows)
        else:
            residual = self._inputs.project(tokens, feature, w, queries=True)
            if self._later:
                residual = self._whole_layers(residual, plan, kv, w, stream)
                self._later[-1].project(residual, w, queries=True)
            last = len(self._tails) - 1
            self._tails[last].forward(kv, last, plan, w["qkv"], residual, w, hidden, rows, shift, of_rows)
            if not logits.shape[0]:
                return
            norm = self._norm
            if self._passes_normed:
                assert norm is not None
                self.dense.rms_norm(hidden, norm, self._eps, of_rows["passed"])
                hidden, norm = of_rows["passed"], None
            self.lm_head.forward(hidden, logits, None, norm, self._eps)
        if self._lends is not None:
            self._lends.finish(logits)

    def _whole_layers(
        self, residual: torch.Tensor, plan: Plan, kv: KvMemory, w: dict[str, torch.Tensor], stream: torch.Tensor
    ) -> torch.Tensor:
        """Run all layers but the last, of which `qkv` of w has the first's row; `stream` gets the residual stream."""
        for i, tail in enumerate(self._tails[:-1]):
            if i:
                self._later[i - 1].project(stream, w, queries=True)
            tail.forward(kv, i, plan, w["qkv"], residual, w, stream)
            residual = stream
        return residual

    def _check_features(self, tokens: torch.Tensor, aux: Sequence[torch.Tensor], plan: Plan) -> int:
        """Return the number of rows. ConfigError where the features are not those of a row for each query."""
        rows, layers = check_rows(tokens, plan), len(self.aux_layers)
        want = [(rows, self.config.aux_size // layers)] * layers
        got = [tuple(a.shape) for a in aux]
        if got != want:
            raise ConfigError(f"aux = {got}: must be {want}, features of each query of the plan for each aux layer")
        return rows
