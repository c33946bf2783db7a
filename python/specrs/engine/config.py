"""Options of the engine, checked together before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specrs import backends
from specrs._specrs import ConfigError, Geometry, TreeShape
from specrs.backends.base import DraftAttention, KvDtype, Layout

AUTO_TOPK, AUTO_STEPS, AUTO_DRAFT_TOKENS = 1, 8, 9


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs.

    Attributes:
        max_batch: most requests that run at once; more wait.
        max_context_len: most tokens of a request, prompt and output together; ``None`` is the model's limit.
        page_size: tokens per KV page, a power of two.
        num_pages: KV pages besides the sink; ``None`` holds ``max_batch`` requests of full context.
        topk, steps, draft_tokens: the tree (K, S, V). All ``None``: picked every round by a measured cost model,
            plain decoding included, among chains of up to 8 tokens: on a CPU, where every row costs, a chain cut where
            its probability falls beat the wider trees tried. Given, they are used as they are.
        draft_attention: ``"ancestors"`` (exact) or ``"lane"`` (a branch sees its own lane, as sglang's draft does);
            ``None`` is ancestors wherever the backend can.
        draft_layout: ``"dense"``, or ``"holey"``, which backends that read whole pages want; they coincide with
            ``topk = 1`` or ``page_size = 1``. ``None`` is the backend's first that does the rest.
        attention_backend: a name of `specrs.backends.BACKENDS`, or a backend; ``None`` is ``"native"``.
        prefix_cache: share the KV pages of equal prompt prefixes between requests.
        prefill_chunk: most prompt tokens of one step.
        kv_dtype: element type of the KV caches.
    """

    max_batch: int = 8
    max_context_len: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    topk: int | None = None
    steps: int | None = None
    draft_tokens: int | None = None
    draft_attention: DraftAttention | None = None
    draft_layout: Layout | None = None
    attention_backend: str | backends.AttentionBackend | None = "native"
    prefix_cache: bool = True
    prefill_chunk: int = 512
    kv_dtype: KvDtype = "float32"

    @property
    def adaptive(self) -> bool:
        """Whether the tree is picked by the cost model."""
        return self.topk is None

    @property
    def backend(self) -> backends.AttentionBackend:
        """The attention backend itself."""
        return backends.find(self.attention_backend)

    @property
    def branches_attend(self) -> DraftAttention:
        """What a draft branch attends to, of a configuration that `route` gave."""
        return self.draft_attention or "ancestors"

    def check_types(self) -> None:
        """Refuse what is not of its field's type, before a model is read.

        Raises:
            ConfigError: with the option's name and value.
        """
        for name in ("max_batch", "max_context_len", "page_size", "num_pages", "topk", "steps", "draft_tokens",
                     "prefill_chunk"):  # fmt: skip
            value = getattr(self, name)
            optional = type(self).__dataclass_fields__[name].default is None
            if (isinstance(value, bool) or not isinstance(value, int)) and not (optional and value is None):
                raise ConfigError(f"{name} = {value!r}: must be an integer{' or None' if optional else ''}")
        if not isinstance(self.prefix_cache, bool):
            raise ConfigError(f"prefix_cache = {self.prefix_cache!r}: must be a bool")
        if self.max_context_len is not None and self.max_context_len < 2:
            raise ConfigError(f"max_context_len = {self.max_context_len}: must be at least 2, a prompt and a token")

    def route(self, recurrent_state: bool) -> tuple[EngineConfig, bool]:
        """Fill what depends on the attention backend, before a model is read.

        Args:
            recurrent_state: whether the model declares recurrent layers.

        Returns:
            The configuration with its backend, layout and draft attention; whether the model may be drafted for.

        Raises:
            UnsupportedCombinationError: what the backend cannot do, and what would work instead.
            ConfigError: a backend, layout or draft attention that there is not.
        """
        backend = self.backend
        asked = backends.Combination(
            topk=self.topk,
            page_size=self.page_size,
            layout=self.draft_layout,
            draft_attention=self.draft_attention,
            recurrent_state=recurrent_state,
            kv_dtype=self.kv_dtype,
        )
        found = backends.resolve(backend, asked)
        config = replace(
            self, attention_backend=backend, draft_layout=found.layout, draft_attention=found.draft_attention
        )
        return config, found.speculate

    def resolve(self, model_context: int) -> tuple[EngineConfig, Geometry]:
        """Fill the defaults that depend on the model, of a configuration that `route` gave, and check everything.

        Raises:
            ConfigError: an option out of range, with its name, value and limit.
        """
        given = [name for name in ("topk", "steps", "draft_tokens") if getattr(self, name) is not None]
        if given and len(given) < 3:
            raise ConfigError(f"topk, steps and draft_tokens go together; only {', '.join(given)} given")
        context = model_context if self.max_context_len is None else self.max_context_len
        if context > model_context:
            raise ConfigError(f"max_context_len = {context}: the model's limit is {model_context}")
        if self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk = {self.prefill_chunk}: must be at least 1")
        shape = TreeShape(
            self.topk if self.topk is not None else AUTO_TOPK,
            self.steps if self.steps is not None else AUTO_STEPS,
            self.draft_tokens if self.draft_tokens is not None else AUTO_DRAFT_TOKENS,
        )
        geometry = Geometry(self.max_batch, context, self.page_size, shape, self.draft_layout or "dense")
        pages = geometry.pages_for_full_load if self.num_pages is None else self.num_pages
        if pages < 1:
            raise ConfigError(f"num_pages = {pages}: must be at least 1")
        return replace(self, max_context_len=context, num_pages=pages), geometry
