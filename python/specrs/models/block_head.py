"""A head that drafts all tokens of a block in one pass: DFlash (https://arxiv.org/abs/2602.06036), DFlash2, JetSpec,
DSpark and Domino.

Keys and values of a committed position follow from the target's features of that position alone: `write` makes them, in
all layers at once. A block's rows stand at the positions behind; the first reads the request's last token, the others a
mask. `draft` runs them over the layers, where they attend to what was written and to the block itself, and gives the
scores of the rows that predict. Nothing of a block is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from specrs._specrs import ConfigError, Plan
from specrs.models.acceptance import UNKNOWN, Acceptance, read_acceptance
from specrs.models.block_config import BlockConfig
from specrs.models.block_conv import BlockConv
from specrs.models.cache import new_cache
from specrs.models.head_files import check_files, layer_kind, layer_prefix, open_head, vocabulary_map
from specrs.models.layer import DecoderLayers, LayerTail, Workspace, qkv_names, stacked
from specrs.models.llama import ROPE_SLACK, LlamaModel, check_rows
from specrs.models.loader import Checkpoint
from specrs.models.ops import KvMemory, Linear, Ops
from specrs.models.path_heads import DominoHead, MarkovHead, PathHead, SelectorHead
from specrs.models.rope import rope_tables

_logger = logging.getLogger(__name__)


class BlockHead:
    """Weights and scratch memory of a head, bound to its target, whose features it selects (`set_aux_layers`).

    Attributes:
        config: its configuration.
        acceptance: expected acceptance of its drafts, by heat.
        aux_layers: the features' layers.
        target_ids: the token of the target's vocabulary that each of the head's stands for.
        path_head: what scores depend on beside the block; ``None`` if levels do not depend on each other.
    """

    passes: Literal["block"] = "block"

    def __init__(
        self, config: BlockConfig, weights: Checkpoint, ops: Ops, target: LlamaModel,
        acceptance: tuple[Acceptance, ...] = UNKNOWN,
    ) -> None:  # fmt: skip
        check_files(config, weights, target.config)
        self.config, self.acceptance = config, acceptance
        self.aux_layers = config.aux_layers_for(target.config)
        self.d2t, self.target_ids = vocabulary_map(config, weights, target.config)
        self.placement = at = ops.placement
        self.dense = dense = ops.dense
        self._eps, h = config.rms_norm_eps, config.hidden_size
        own = "embed_tokens.weight" in weights
        self.embedding = dense.embedding(weights.load("embed_tokens.weight")) if own else target.embedding
        self._fc = stacked(dense, weights, ["fc"], "fc.bias" in weights)
        self._context_norm, self._norm = (at.vector(weights.load(f"{name}.weight")) for name in ("hidden_norm", "norm"))
        self._lends: LlamaModel | None = target  # the model whose last product the head uses
        self.lm_head: Linear = target.lm_head
        if "lm_head.weight" in weights:
            self.lm_head, self._lends = dense.linear(weights.load("lm_head.weight"), scores=True), None
        if config.logit_scale != 1.0 or config.logit_cap is not None:
            self._lends = None  # the file says what follows the product
        self._prefixes = prefixes = [layer_prefix(i) for i in range(config.num_layers)]
        kinds = [layer_kind(weights, prefix) for prefix in prefixes]
        names = [list(qkv_names(prefix)) for prefix in prefixes]
        rope = ops.attention.rope(*rope_tables(config.rope, config.head_dim, target.max_context_len + ROPE_SLACK))
        self._tails = [LayerTail(ops, config, kind, weights, p, rope) for kind, p in zip(kinds, prefixes, strict=True)]
        self._norms = [at.vector(weights.load(f"{p}input_layernorm.weight")) for p in prefixes]
        each = list(zip(names, kinds, strict=True))
        self._qkv = [stacked(dense, weights, of, kind.qkv_bias) for of, kind in each]
        self._kv = [stacked(dense, weights, of[1:], kind.qkv_bias) for of, kind in each]
        self._layers = DecoderLayers(self._qkv, self._norms, self._tails, self._eps)
        convs = prefixes if config.conv is not None else []
        self._convs = [[BlockConv(config, weights, ops, f"{p}{of}_conv") for of in ("attention", "mlp")] for p in convs]
        wide = LayerTail.widths(config)
        self._write_work = Workspace(at, x=h, n=h, **{f"kv {i}": 2 * config.kv_size for i in range(config.num_layers)})
        convolved = {} if config.conv is None else {"n": h, "convolved": h, "factors": config.conv_factors}
        self._work = Workspace(at, x=h, qkv=config.qkv_size, **wide, **convolved)
        weights_of_rows = {} if config.selector is None else {"weights": config.selector.rank}
        self._tail_work = Workspace(at, x=h, hidden=h, **wide, **weights_of_rows)
        self._logits = Workspace(at.for_logits(), logits=config.draft_vocab_size)
        self.path_head: PathHead | None = None
        if config.markov is not None:
            self.path_head = MarkovHead(config, weights, ops)
        if config.gru is not None:
            self.path_head = DominoHead(config, weights, ops, self.embedding)
        if config.selector is not None:
            self.path_head = SelectorHead(config, weights, ops)
        target.set_aux_layers(self.aux_layers)

    @classmethod
    def load(cls, directory: str | Path, ops: Ops, target: LlamaModel) -> BlockHead:
        """Loads a head's directory (config.json, weights, perhaps acceptance.json) and checks it against its target.

        Raises DraftMismatchError, UnsupportedModelError or ModelFileError, all `ConfigError`s; the target is then as
        it was. Logs the configuration's notes.
        """
        config, weights = open_head(directory, ops.placement)
        assert isinstance(config, BlockConfig)
        head = cls(config, weights, ops, target, read_acceptance(directory))
        for note in config.notes:
            _logger.warning("%s: %s", directory, note)
        return head

    @property
    def vocab_size(self) -> int:
        """Columns of the head's logits."""
        return self.config.draft_vocab_size

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> KvMemory:
        """Return memory for the KV of the head's own layers; its slots are those of the target's cache."""
        return new_cache(self.config, self.config.num_layers, num_pages, page_size, self.placement, dtype)

    def reserve(self, rows: int, block_rows: int) -> None:
        """Reserve memory for `write` over so many rows, and for blocks of so many rows in all."""
        self._write_work.reserve(rows)
        for work in (self._work, self._tail_work, self._logits):
            work.reserve(block_rows)

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield every product of the head, with the name of its weight."""
        yield "fc", self._fc
        for prefix, qkv, kv, tail in zip(self._prefixes, self._qkv, self._kv, self._tails, strict=True):
            yield f"{prefix}self_attn.qkv_proj", qkv
            yield f"{prefix}self_attn.kv_proj", kv
            yield from tail.products(prefix)
        for conv in (conv for pair in self._convs for conv in pair):
            yield from conv.products()
        if self.path_head is not None:
            yield from self.path_head.products()
        yield "lm_head", self.lm_head

    def block(self, token: int, rows: int) -> list[int]:
        """The tokens of a block of so many rows behind a request whose last token is ``token``."""
        return [token] + [self.config.mask_token] * (rows - 1)

    def write(self, aux: Sequence[torch.Tensor], plan: Plan, kv: KvMemory) -> list[torch.Tensor]:
        """Write the keys and values of positions, in all layers, from the target's features of these.

        aux: [Q, target hidden] of each aux layer, from `LlamaModel.forward(aux=True)`. Returns [Q, 2 Hkv D] of each
        layer before the rotation, views that the next `write` overwrites.
        """
        rows, want = plan.queries, [(plan.queries, self.config.target_hidden_size)] * len(self.aux_layers)
        if (got := [tuple(a.shape) for a in aux]) != want:
            raise ConfigError(f"aux = {got}: must be {want}, features of each query of the plan for each aux layer")
        w = self._write_work.rows(rows)
        written = [w[f"kv {i}"] for i in range(len(self._kv))]
        if rows:
            self._fc.forward(self.dense.concat(aux), w["x"])
            self.dense.rms_norm(w["x"], self._context_norm, self._eps, w["n"])
            for i, (product, tail, out) in enumerate(zip(self._kv, self._tails, written, strict=True)):
                product.forward(w["n"], out)
                tail.write(kv, i, plan, out)
        return written

    def draft(
        self, tokens: torch.Tensor, plan: Plan, kv: KvMemory, logit_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run blocks.

        tokens: int64 [Q], `block` of each request. plan: their positions, and what they attend to. logit_rows: int64
        [R], the rows that predict. Returns (logits [R, draft vocabulary], normalised rows [R, h]), views that the next
        `draft` overwrites. A selector chooses among the likeliest tokens alone, which is left to who lists them.
        """
        w, wanted = self._work.rows(check_rows(tokens, plan)), logit_rows.numel()
        t, logits = self._tail_work.rows(wanted), self._logits.rows(wanted)["logits"]
        if not wanted:
            return logits, t["hidden"]
        x = w["x"]
        self.embedding.lookup(tokens, x)
        if self.config.embedding_scale not in (None, 1.0):
            x.mul_(self.config.embedding_scale)
        if self._convs:
            self._convolved_layers(x, plan, kv, w)
            self.dense.gather(x, logit_rows, t["x"])
        else:
            if (last := len(self._tails) - 1) > 0:
                self._layers.forward(kv, 0, last, plan, x, w, x)
            self._layers.last(kv, plan, x, w, logit_rows, t)
        self.dense.rms_norm(t["x"], self._norm, self._eps, t["hidden"])
        self.lm_head.forward(t["hidden"], logits)
        if self.config.logit_scale != 1.0:
            logits.mul_(self.config.logit_scale)
        if self.config.logit_cap is not None:
            self.dense.soft_cap(logits, self.config.logit_cap)
        if self._lends is not None:
            self._lends.finish(logits)
        return logits, t["hidden"]

    def pair_weights(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the weights of `Pairs` that follow from normalised rows [R, h]: [R, rank], a view that the next call
        overwrites; ``None`` of heads without."""
        pairs = None if self.path_head is None else self.path_head.pairs
        if pairs is None or pairs.row is None:
            return None
        out = self._tail_work.rows(hidden.shape[0])["weights"]
        pairs.row.forward(hidden, out)
        return out

    def _convolved_layers(self, x: torch.Tensor, plan: Plan, kv: KvMemory, w: dict[str, torch.Tensor]) -> None:
        """Run all layers over the residual stream x [Q, h], with convolutions around attention and MLP."""
        n, convolved, factors, y = w["n"], w["convolved"], w["factors"], w["y"]
        for i, (qkv, norm, tail) in enumerate(zip(self._qkv, self._norms, self._tails, strict=True)):
            of_attention, of_mlp = self._convs[i]
            self.dense.rms_norm(x, norm, self._eps, n)
            of_attention.before(n, factors, plan, convolved)
            qkv.forward(convolved, w["qkv"])
            tail.attend(kv, i, plan, w["qkv"], w["attended"])
            tail.o.forward(w["attended"], y)
            of_attention.behind(y, factors, plan, x)
            assert tail.post_norm is not None
            self.dense.rms_norm(x, tail.post_norm, self._eps, n)
            of_mlp.before(n, factors, plan, convolved)
            tail.gate_up.forward_swiglu(convolved, w["act"], None, 0.0)
            tail.down.forward(w["act"], y)
            of_mlp.behind(y, factors, plan, x)
