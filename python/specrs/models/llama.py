"""The target model: Llama and its close relatives (`families`), over any device's operations and attention (`Ops`).

    model = LlamaModel.load(directory, ops, max_context_len=2048)
    kv = model.new_cache(num_pages, page_size)
    logits, aux = model.forward(tokens, plan, kv, aux=True)

One forward serves every phase, since the plan says where each row's KV goes and what the row may attend to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from specrs._specrs import ConfigError, Plan
from specrs.models.cache import new_cache
from specrs.models.config import ModelConfig
from specrs.models.errors import UnsupportedModelError
from specrs.models.features import FeatureMemory, FeatureRows
from specrs.models.layer import (
    DecoderLayers,
    LayerKind,
    LayerTail,
    Workspace,
    layer_shapes,
    norm_weight,
    qkv_of,
    qkv_products,
    qkv_work,
)
from specrs.models.live import ModelSource
from specrs.models.loader import Checkpoint
from specrs.models.ops import KvMemory, Linear, Ops
from specrs.models.rope import rope_tables

# Draft rows of a request at the context wall are computed before the tree is clamped to it, and may lie past it.
ROPE_SLACK = 256
_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class LlamaModel:
    """Weights and scratch memory of a target. One forward at a time; not for concurrent threads."""

    def __init__(self, config: ModelConfig, weights: Checkpoint, ops: Ops, max_context_len: int) -> None:
        config.check_context(max_context_len)
        kind = LayerKind.of(config)
        self.check_files(config, weights)
        self.config = config
        self.max_context_len = max_context_len
        self.aux_layers: tuple[int, ...] = ()
        self.features: FeatureMemory | None = None
        self.ops = ops
        self._dense = dense = ops.dense
        at, h = ops.placement, config.hidden_size
        table = weights.load(_TABLE)
        self.embedding = dense.embedding(table)
        head = table if config.tie_word_embeddings else weights.load(_HEAD)
        self.lm_head: Linear = dense.linear(head, scores=True)
        norm = norm_weight(at, weights, "model.norm", config.block)
        assert norm is not None
        self._norm = norm
        prefixes = [f"model.layers.{i}." for i in range(config.num_layers)]
        names = [kind.norms(prefix).before_attention for prefix in prefixes]
        input_norms = [norm_weight(at, weights, name, config.block) for name in names]
        self._qkv_work = qkv_work(at, config, config.block)
        self._qkv = [qkv_of(ops, config, kind, weights, prefix, self._qkv_work) for prefix in prefixes]
        ropes = self._rope_tables()
        each = zip(prefixes, ropes, strict=True)
        self._tails = [LayerTail(ops, config, kind, weights, prefix, rope) for prefix, rope in each]
        self._layers = DecoderLayers(self._qkv, input_norms, self._tails, config.rms_norm_eps)
        wide = LayerTail.widths(config, config.block)
        self._work = Workspace(at, x=h, qkv=config.qkv_size, **wide)
        self._tail_work = Workspace(at, x=h, **wide)
        self._logits = Workspace(at.for_logits(), logits=config.vocab_size)
        scale = config.block.embedding_scale
        self._embedding_scale = float(torch.tensor(scale).to(at.activations)) if config.block.rounds_scale else scale

    @classmethod
    def load(cls, directory: ModelSource, ops: Ops, max_context_len: int | None = None) -> LlamaModel:
        """Loads a Hugging Face directory, or takes a model in memory. `max_context_len` defaults to the longest that
        the model serves exactly.

        Raises UnsupportedModelError or ModelFileError, both `ConfigError`s, before any weight is read.
        """
        config = ModelConfig.from_directory(directory)
        weights = Checkpoint(directory, placement=ops.placement)
        return cls(config, weights, ops, max_context_len or config.max_context_len)

    @classmethod
    def check_files(cls, config: ModelConfig, weights: Checkpoint) -> None:
        """Every tensor's name, shape and dtype, from headers. Raises ModelFileError.

        UnsupportedModelError: `tie_word_embeddings`, and an `lm_head.weight` of its own, which transformers would use.
        """
        tied = config.tie_word_embeddings
        weights.check(cls.shapes(config), ignored=(_HEAD,) if tied else ())
        if tied and _HEAD in weights and not weights.same(_HEAD, _TABLE):
            why = f"{weights.path(_HEAD)} has another {_HEAD} than {_TABLE}; false uses it, without it they are tied"
            raise UnsupportedModelError("tie_word_embeddings", True, why)

    @staticmethod
    def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint with its shape."""
        h = config.hidden_size
        kind = LayerKind.of(config)
        shapes: dict[str, tuple[int, ...]] = {
            _TABLE: (config.vocab_size, h),
            "model.norm.weight": (h,),
        }
        if not config.tie_word_embeddings:
            shapes[_HEAD] = (config.vocab_size, h)
        for i in range(config.num_layers):
            prefix = f"model.layers.{i}."
            if (norm := kind.norms(prefix).before_attention) is not None:
                shapes[f"{norm}.weight"] = (h,)
            shapes.update(layer_shapes(config, kind, prefix, h))
        return shapes

    def _rope_tables(self) -> list[Any]:
        """Return each layer's table; each embedding has one."""
        config, positions = self.config, self.max_context_len + ROPE_SLACK
        each = [config.rope_of(i) for i in range(config.num_layers)]
        rope = self.ops.attention.rope
        made = {of: rope(*rope_tables(of, config.head_dim, positions)) for of in set(each)}
        return [made[of] for of in each]

    def reserve(self, rows: int, logit_rows: int) -> None:
        """Reserve memory for passes of so many rows, and of so many that logits are wanted of."""
        self._work.reserve(rows)
        self._qkv_work.reserve(rows)
        self._tail_work.reserve(logit_rows)
        self._logits.reserve(logit_rows)

    def new_cache(self, num_pages: int, page_size: int, dtype: torch.dtype | None = None) -> KvMemory:
        """Memory for the KV of `num_pages` pages (page 0, the sink, included) of `page_size` tokens."""
        return new_cache(self.config, self.config.num_layers, num_pages, page_size, self.ops.placement, dtype)

    def products(self) -> Iterator[tuple[str, Linear]]:
        """Yield every product of the model, with the name of its weight; q, k and v are one product, and so are gate
        and up."""
        for i, (qkv, tail) in enumerate(zip(self._qkv, self._tails, strict=True)):
            yield from qkv_products(qkv, f"model.layers.{i}.")
            yield from tail.products(f"model.layers.{i}.")
        yield "lm_head", self.lm_head

    def set_aux_layers(self, layers: Sequence[int]) -> None:
        """Chooses the features of `forward(aux=...)`: the residual stream *entering* each of these decoder layers (so
        layer i's feature is the output of layer i - 1, and 0 is the embedding), in this order. The number of layers,
        alone, is the last hidden state: what the last norm gives."""
        n = self.config.num_layers
        for layer in layers:
            if not 0 <= layer < n and tuple(layers) != (n,):
                why = f"must be in 0..{n}, the layers whose input can be captured; {n} alone is the last hidden state"
                raise UnsupportedModelError("aux layer", layer, why)
        self.aux_layers = tuple(layers)
        h, at = self.config.hidden_size, self.ops.placement
        self.features = FeatureMemory(self.aux_layers, h, at) if layers else None

    def forward(
        self,
        tokens: torch.Tensor,
        plan: Plan,
        kv: KvMemory,
        aux: FeatureRows | bool | None = None,
        logit_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, FeatureRows | None]:
        """Runs the rows of a plan, writing their KV.

        tokens: int64 (or int32) [Q], one per query of the plan. aux: whether features are wanted, or memory for them
        (`features.rows(Q)`). logit_rows: int64 [R] rows to compute logits for, in the order wanted; None: all; empty:
        none. Returns (logits [R, vocab], features or None); the logits are a view that the next `forward`
        overwrites. Raises ConfigError for a token outside the vocabulary, and for other memory.
        """
        rows = check_rows(tokens, plan)
        w = self._work.rows(rows)
        features = self._check_features(aux, rows)
        if not rows:
            return self._logits.rows(0)["logits"], features
        eps, last = self.config.rms_norm_eps, len(self._tails) - 1
        final = features is not None and features.last > last
        stretches = [(0, last + 1, w["x"])] if features is None or final else features.stretches(last + 1, w["x"])
        x = stretches[0][2]
        self.embedding.lookup(tokens, x)
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        of_rows = None if logit_rows is None or final else self._tail_work.rows(logit_rows.numel())
        for first, end, out in stretches:
            end -= of_rows is not None and end > last
            if first < end:
                self._layers.forward(kv, first, end, plan, x, w, out)
                x = out
        if of_rows is not None:
            assert logit_rows is not None
            x = self._layers.last(kv, plan, x, w, logit_rows, of_rows)
        if features is not None and final:
            self._dense.rms_norm(x, self._norm, eps, features.layers[0])
            if logit_rows is not None:
                x = self._tail_work.rows(logit_rows.numel())["x"]
                self._dense.gather(w["x"], logit_rows, x)
        elif features is not None:
            features.repeat()
        logits = self._logits.rows(x.shape[0])["logits"]
        if x.shape[0]:
            self.lm_head.forward(x, logits, None, self._norm, eps)
            self.finish(logits)
        return logits, features

    def finish(self, logits: torch.Tensor) -> None:
        """Turn the last product's outputs into logits, in place."""
        block = self.config.block
        if block.logits_divisor != 1.0:
            logits.div_(block.logits_divisor)
        if block.logits_cap is not None:
            self._dense.soft_cap(logits, block.logits_cap)

    def _check_features(self, aux: FeatureRows | bool | None, rows: int) -> FeatureRows | None:
        if aux is None or aux is False:
            return None
        if self.features is None:
            raise ConfigError("aux: no features are chosen; call set_aux_layers first")
        if aux is True:
            return self.features.rows(rows)
        if aux.rows != rows or aux.aux_layers is not self.aux_layers:
            raise ConfigError(f"aux: memory of {aux.rows} rows; must be of {rows}, from this model's `features.rows`")
        return aux


def check_rows(tokens: torch.Tensor, plan: Plan) -> int:
    """The number of rows of a call; ConfigError where the tokens are not one per query of the plan."""
    rows = tokens.numel()
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"tokens of {tokens.dtype}: must be torch.int64 or torch.int32")
    if tokens.dim() != 1 or rows != plan.queries:
        raise ConfigError(f"tokens = {list(tokens.shape)}: the plan has {plan.queries} queries, one token each")
    return rows
