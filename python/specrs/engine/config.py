"""Options of the engine, checked together before anything is allocated."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from specrs import backends, drafters
from specrs._specrs import ConfigError, Geometry, TreeShape
from specrs.backends.base import DraftAttention, KvDtype
from specrs.drafters import CorpusDrafter, Drafter
from specrs.engine.drafting.sources import GRAMMAR, HEAD, Source
from specrs.engine_options import DTYPES, OptionFields, attributes
from specrs.models.placement import Placement

AUTO_GPU_TREE = TreeShape(4, 6, 32)  # on a GPU, where up to some 64 rows cost little more than one
AUTO_TREE = TreeShape(1, 8, 9)  # the cost model picks from chains of up to 8 tokens
_LEAST_DEPTH = 16  # steps of trees that the host's sources make, where the cost model picks: room for branches too
_MOST_DEPTH = 32
_WIDTH = 8  # children of a node of a block's tree, where the cost model picks: more are hardly ever taken
_MOST_SOURCES = 16
_NAMED = {"suffix": "SuffixDrafter", "recycling": "RecyclingDrafter"}  # classes of `specrs.drafters` by name
NAMES = (*_NAMED, HEAD)
_MOST_GPU_DEPTH = 31  # 32 tokens: a request takes as many rows of a round, whatever its tree
_INTEGERS = ("max_batch", "max_context_len", "page_size", "num_pages", "prefill_chunk")
_MOST_PAGES = 2**31 - 2  # beside the sink; a page's id is an int32
_MOST_REQUESTS = 1024  # limit of a pass on a GPU
_FORMER = ("topk", "steps", "draft_tokens")  # former names of `tree`'s parts


@dataclass(frozen=True, kw_only=True)
class EngineConfig(OptionFields):
    """Configuration of an engine: `specrs.LLM` makes one of its options, and has it as ``config`` with everything
    settled.

    Raises:
        ConfigError: a value that is not of its option's type.
    """

    def __post_init__(self) -> None:
        """Refuse values of a wrong type, before a model is read."""
        for name in _INTEGERS:
            object.__setattr__(self, name, self._integer(name))
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError(f"prefix_cache = {self.prefix_cache!r}: must be a bool")
        if self.graphs not in (None, *backends.GRAPH_LEVELS):
            levels = ", ".join(map(repr, backends.GRAPH_LEVELS))
            raise ConfigError(f"graphs = {self.graphs!r}: must be one of {levels}, or None for the device's default")
        if self.kv_dtype is not None and (not isinstance(self.kv_dtype, str) or not self.kv_dtype):
            why = "must be the name of a type, or None for the default"  # the backend says which types there are
            raise ConfigError(f"kv_dtype = {self.kv_dtype!r}: {why}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype = {self.dtype!r}: must be one of {', '.join(map(repr, DTYPES))}")
        if self.max_context_len is not None and self.max_context_len < 2:
            raise ConfigError(f"max_context_len = {self.max_context_len}: must be at least 2, a prompt and a token")
        object.__setattr__(self, "tree", tree_shape(self.tree))
        object.__setattr__(self, "drafters", _drafters(self.drafters))

    def _integer(self, name: str) -> int | None:
        value = getattr(self, name)
        optional = type(self).__dataclass_fields__[name].default is None
        if optional and value is None:
            return None
        try:
            if isinstance(value, bool):
                raise TypeError
            return operator.index(value)  # numpy's and torch's integers too
        except TypeError:
            raise ConfigError(f"{name} = {value!r}: must be an integer{' or None' if optional else ''}") from None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineConfig:
        """The configuration of named options.

        Raises:
            ConfigError: an unknown name, or a value of a wrong type.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name in _FORMER:
                raise ConfigError(
                    f"{name} = {options[name]!r}: the tree is one option, tree=(K, S, V), as tree=(4, 4, 16)"
                )
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f", did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown option {name!r}{meant}; options are {', '.join(known)}")
        return cls(**options)

    @property
    def adaptive(self) -> bool:
        """True if the cost model picks the tree."""
        return self.tree is None

    @property
    def head_shape(self) -> TreeShape:
        """Shape of the head's drafts: the tree, or the largest that the cost model picks."""
        if isinstance(self.tree, TreeShape):
            return self.tree
        return AUTO_TREE if self._on_host else AUTO_GPU_TREE

    @property
    def shape(self) -> TreeShape:
        """Shape of the verified tree, from which every size follows: the head's tree, or where the cost model picks and
        other sources reach deeper, one with room for those."""
        tree, sources = self.head_shape, self.sources
        if not self.adaptive or not sources:
            return tree
        depth = min(max(_LEAST_DEPTH, *(s.depth for s in sources)), _MOST_DEPTH if self._on_host else _MOST_GPU_DEPTH)
        if tree.draft_tokens > depth and self.drafts_by_head:
            return tree
        # A chain's draft slots are no more than its tokens. What the host drafts is a tree all the same.
        return TreeShape(1, depth, depth + 1)

    @property
    def nodes(self) -> int:
        """Nodes of a verified tree at most, root included."""
        return self.shape.draft_tokens

    @property
    def deepest(self) -> int:
        """Levels of a verified tree below its root at most: the head's, or with other sources as many as V holds."""
        shape = self.shape
        return shape.draft_tokens - 1 if self.sources else min(shape.steps, shape.draft_tokens - 1)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Sources of drafts beside the head, in a configuration that `drafting` gave."""
        return tuple(Source.of(d) for d in self.drafters or () if not isinstance(d, str))

    @property
    def drafts_by_head(self) -> bool:
        """True if the head is a source, in a configuration that `drafting` gave."""
        return HEAD in (self.drafters or ())

    @property
    def _on_host(self) -> bool:
        return self.device in (None, "cpu")

    def drafting(self, head: bool) -> EngineConfig:
        """The configuration with sources of drafts that are there, in place of names.

        Args:
            head: true if there is a draft head.

        Raises:
            ConfigError: the head is named, and there is none.
        """
        asked = self.drafters
        if asked is None:
            asked = (HEAD,) if head else tuple(_NAMED)
        if HEAD in asked and not head:
            raise ConfigError(f"drafters = {list(asked)!r}: there is no draft head; name its directory, draft=...")
        made = tuple(d if d == HEAD or not isinstance(d, str) else getattr(drafters, _NAMED[d])() for d in asked)
        return replace(self, drafters=made)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse a corpus whose tokens the model does not have, in a configuration that `drafting` gave.

        Raises:
            ConfigError: the drafter, its corpus's vocabulary and the model's.
        """
        for source in self.sources:
            if isinstance(source.drafter, CorpusDrafter):
                has = source.drafter.corpus.vocab
                if has > vocab_size:
                    raise ConfigError(
                        f"drafter {source.name!r}: its corpus has a vocabulary of {has} tokens, the model one of "
                        f"{vocab_size}"
                    )

    @property
    def backend(self) -> backends.AttentionBackend:
        """The attention backend itself."""
        return backends.find(self.attention_backend)

    @property
    def branches_attend(self) -> DraftAttention:
        """The tokens that a draft branch attends to, in a configuration that `route` gave."""
        return self.draft_attention or "ancestors"

    def on(self, place: Placement) -> EngineConfig:
        """The configuration with what follows from where the model computes.

        Raises:
            ConfigError: an attention backend that a GPU does not have.
        """
        device = str(place.device)
        if place.is_host:
            return replace(self, device=device, kv_dtype=self.kv_dtype or "float32")
        if self.max_batch > _MOST_REQUESTS:
            raise ConfigError(f"max_batch = {self.max_batch}: at most {_MOST_REQUESTS} on {device!r}")
        backend = backends.on_device(self.backend, "cuda")
        if backend is None:
            name = backends.Capabilities.of(self.backend).name
            there = " and ".join(repr(row.backend.name) for row in backends.MATRIX if row.device == "cuda")
            raise ConfigError(
                f"attention_backend = {name!r}: runs on the CPU; device = {device!r} has {there}, device='cpu' has "
                f"{name!r}"
            )
        half = place.dtype_name
        if self.kv_dtype not in (None, half):
            raise ConfigError(f"kv_dtype = {self.kv_dtype!r}: this model has {half!r} on {device!r}")
        return replace(self, device=device, kv_dtype=cast(KvDtype, half), attention_backend=backend)

    def route(self, recurrent_state: bool) -> tuple[EngineConfig, bool]:
        """Fill what depends on the attention backend, before a model is read.

        Args:
            recurrent_state: true if the model declares recurrent layers.

        Returns:
            The configuration with its backend, layout, draft attention and graph level; whether the model may be
            drafted for.

        Raises:
            UnsupportedCombinationError: the backend cannot do what is asked; the message says what would work instead.
            ConfigError: an unknown backend, layout or draft attention.
        """
        backend = self.backend
        there = str(self.device).partition(":")[0]
        on_gpu = there == "cuda"
        asked = backends.Combination(
            topk=None if self.adaptive else self.shape.topk,
            page_size=self.page_size,
            layout=self.draft_layout,
            draft_attention=self.draft_attention,
            recurrent_state=recurrent_state,
            kv_dtype=self.kv_dtype or ("bfloat16" if on_gpu else "float32"),
            device="cuda" if on_gpu else "cpu",
            graphs=self.graphs if there in ("cuda", "cpu") else None,  # else nobody has settled yet where it runs
        )
        found = backends.resolve(backend, asked)
        config = replace(
            self, attention_backend=backend, draft_layout=found.layout, draft_attention=found.draft_attention,
            graphs=found.graphs,
        )  # fmt: skip
        return config, found.speculate

    def resolve(self, model_context: int) -> tuple[EngineConfig, Geometry]:
        """Fill the defaults that depend on the model, in a configuration that `route` gave, and check everything.

        Raises:
            ConfigError: an option out of range, with its name, value and limit.
        """
        context = model_context if self.max_context_len is None else self.max_context_len
        if context > model_context:
            raise ConfigError(f"max_context_len = {context}: the model's limit is {model_context}")
        if self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk = {self.prefill_chunk}: must be at least 1")
        geometry = Geometry(self.max_batch, context, self.page_size, self.shape, self.draft_layout or "dense")
        pages = geometry.pages_for_full_load if self.num_pages is None else self.num_pages
        if not 1 <= pages <= _MOST_PAGES:
            raise ConfigError(f"num_pages = {pages}: must be {'at least 1' if pages < 1 else f'at most {_MOST_PAGES}'}")
        return replace(self, max_context_len=context, num_pages=pages), geometry


@dataclass(frozen=True, kw_only=True)
class BlockEngineConfig(EngineConfig):
    """The configuration of an engine whose head drafts all levels in one pass.

    Attributes:
        rows: rows of that pass, for which a round needs room.
        levels: levels of its drafts.
    """

    rows: int
    levels: int

    @classmethod
    def over(cls, config: EngineConfig, rows: int, levels: int) -> BlockEngineConfig:
        """The same options, for such a head."""
        options = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
        return cls(**options, rows=rows, levels=levels)

    @property
    def width(self) -> int:
        """Most children of a node."""
        return self.tree.topk if isinstance(self.tree, TreeShape) else _WIDTH

    @property
    def nodes(self) -> int:
        return self.tree.draft_tokens if isinstance(self.tree, TreeShape) else self.shape.draft_tokens

    @property
    def head_shape(self) -> TreeShape:
        return self.tree if isinstance(self.tree, TreeShape) else self.shape

    @property
    def shape(self) -> TreeShape:
        """The shape with room for a block and for what is verified. A block has no draft slots, so that one branch
        does."""
        if isinstance(self.tree, TreeShape):
            most = max(self.tree.draft_tokens, self.tree.steps + 1)
        else:
            depth = min(max((_LEAST_DEPTH, *(s.depth for s in self.sources))), _MOST_DEPTH)
            if not self._on_host:
                depth = AUTO_GPU_TREE.draft_tokens - 1
            most = 1 + max(depth, self.levels)
        most = max(most, self.rows, 2)
        return TreeShape(1, most - 1, most)

    @property
    def deepest(self) -> int:
        levels = min(self.head_shape.steps, self.levels)
        return self.nodes - 1 if self.sources else min(levels, self.nodes - 1)


if EngineConfig.__doc__:  # absent under `python -OO`
    EngineConfig.__doc__ += f"\n    {attributes()}\n    "


def _drafters(asked: object) -> tuple[str | Drafter, ...] | None:
    """Sources of drafts as users give them; drafters as `Source`, with the name and depth that they have now, since
    every size follows from these.

    Raises:
        ConfigError: the value is no list; a name is unknown, or given twice; an object is no drafter.
    """
    if asked is None:
        return None
    if isinstance(asked, (str, bytes, Mapping)) or not isinstance(asked, Iterable):
        raise ConfigError(f"drafters = {asked!r}: must be a list of names and drafters")
    found, names = tuple(asked), set[str]()
    kept: list[str | Drafter] = []
    if len(found) > _MOST_SOURCES:
        raise ConfigError(f"drafters: {len(found)} of them; at most {_MOST_SOURCES}")
    for i, one in enumerate(found):
        where = f"drafters[{i}] = {one!r}"
        if isinstance(one, str):
            if one not in NAMES:
                raise ConfigError(f"{where}: must be one of {', '.join(map(repr, NAMES))}, or a drafter")
            name = one
        else:
            one = _source(one, where)
            name = one.name
        if name in names:
            raise ConfigError(f"{where}: a drafter of the name {name!r} stands before it")
        names.add(name)
        kept.append(one)
    return tuple(kept)


def _source(drafter: object, where: str) -> Source:
    """Check a drafter that a user gave as an object. Errors begin with ``where``.

    Raises:
        ConfigError: the object is no drafter, or has a name with another meaning.
    """
    name, depth = getattr(drafter, "name", None), getattr(drafter, "depth", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: a drafter has a name, a text; this one's is {name!r}")
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise ConfigError(f"{where}: a drafter's depth is an integer of at least 1; this one's is {depth!r}")
    if isinstance(drafter, type) or not callable(getattr(drafter, "begin", None)):
        raise ConfigError(f"{where}: a drafter has a method begin(request)")
    if name == HEAD:
        raise ConfigError(f"{where}: {HEAD!r} names the draft head")
    if name == GRAMMAR:
        raise ConfigError(f"{where}: {GRAMMAR!r} names what a request's grammar forces")
    return drafter if isinstance(drafter, Source) else Source(name, depth, cast(Drafter, drafter))


def tree_shape(tree: object) -> TreeShape | None:
    """A tree as users give it: a `TreeShape`, or K, S and V.

    Raises:
        ConfigError: the tree is not three integers, or has a shape that no tree can have.
    """
    if tree is None or isinstance(tree, TreeShape):
        return tree
    try:
        if isinstance(tree, (str, bytes, Mapping)) or not isinstance(tree, Iterable):
            raise TypeError
        k, s, v = (operator.index(n) for n in tree)
    except (TypeError, ValueError):
        raise ConfigError(f"tree = {tree!r}: must be a TreeShape or three integers (K, S, V), as (4, 4, 16)") from None
    try:
        return TreeShape(k, s, v)
    except ConfigError as e:  # the core names its own operand
        e.args = (f"tree = ({k}, {s}, {v}): {e}",)
        raise
