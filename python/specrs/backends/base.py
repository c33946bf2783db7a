"""Attention backends: each states what it can do in class attributes, and has the two calls that do it.

A backend names a metadata format of the planner; the planner then writes that format's arrays, and the backend computes
attention from the arrays and the KV pool alone. Its capabilities decide, before a model is read, which trees, pages and
draft layouts it may be asked for (`specrs.backends.routing`).

    class Mine(AttentionBackend):
        name, format = "mine", "flashinfer"
        topk_above_1 = page_size_above_1 = True

        def prepare(self, step): ...             # once a pass: indices from step.arrays
        def attend(self, prepared, keys, values, q, scale): ...   # once a layer

    LLM(attention_backend=Mine())

An attribute that a class does not declare has the value given here, which promises least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

from specrs._specrs import ConfigError

if TYPE_CHECKING:  # capabilities are read without torch
    import torch

Format = Literal["native", "flashinfer", "flash_attention", "triton"]
Layout = Literal["dense", "holey"]
DraftAttention = Literal["ancestors", "lane"]
KvDtype = Literal["float32", "bfloat16", "float16"]
Phase = Literal["extend", "decode", "draft", "verify"]
MaskForm = Literal["both", "bool", "packed"]

FORMATS: tuple[Format, ...] = get_args(Format)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
DRAFT_ATTENTIONS: tuple[DraftAttention, ...] = get_args(DraftAttention)
KV_DTYPES: tuple[KvDtype, ...] = get_args(KvDtype)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One pass of a batch, as a backend is told of it.

    Attributes:
        phase: purpose of the pass; attention is causal in ``"extend"``, by mask or by expanded rows in ``"verify"``.
        page_size: P, tokens per page of the pool; slot s is position ``s % P`` of page ``s // P``.
        expand_page_size: tokens per page, P or 1 (the pool viewed by slot), of the table for the second pass that
            expands the queries' own keys in format ``"flash_attention"``; ``None`` where there is no second pass.
        queries: Q, rows of q, dead ones of a padded plan included; a row that no array names gives 0.
        arrays: the format's arrays by name, as `Plan.arrays` gives them: CPU tensors in the plan's memory, to be read.
    """

    phase: Phase
    page_size: int
    expand_page_size: int | None = None
    queries: int
    arrays: Mapping[str, torch.Tensor]


class Operands(NamedTuple):
    """A layer's attention by kernels on a GPU: out = attention of q, over keys and values that have been written.

    Attributes:
        q, out: [Q, heads, head_dim], contiguous. Consecutive groups of heads share a key head. Rows of ``out`` that no
            array names become 0.
        keys, values: a layer of the pool, [num_slots, key heads, head_dim], of q's type. Heads are contiguous.
        arrays: those of the format for the phase, as the planner writes them.
        scale: factor on the scores.
    """

    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor
    arrays: Mapping[str, torch.Tensor]
    scale: float


class MissingPackageError(ConfigError):
    """An attention backend needs a package that is not installed, or a newer version of it.

    Attributes: `backend`, `package`, `oldest` (a version that works), `found` (``None``: none is installed).
    """

    def __init__(self, backend: str, package: str, oldest: str, found: str | None) -> None:
        self.backend, self.package, self.oldest, self.found = backend, package, oldest, found
        have = "it is not installed" if found is None else f"{found} is installed"
        super().__init__(
            f"attention_backend = {backend!r}: needs the package {package} {oldest} or newer on a GPU; {have}. "
            "attention_backend='native' needs none"
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.backend, self.package, self.oldest, self.found)


def check_operands(
    backend: AttentionBackend,
    head_dims: tuple[int, ...],
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    page_size: int = 1,
) -> None:
    """Raise ConfigError where kernels on a GPU cannot read the operands of `AttentionBackend.attend`.

    Args:
        head_dims: sizes of heads that the kernels take.
        page_size: tokens of a page, of which the pool has to be a multiple.
    """

    def refuse(name: str, value: object, limit: str) -> None:
        raise ConfigError(f"attention_backend = {backend.name!r}: {name} = {value}: must be {limit}")

    kind, dim = str(q.dtype).removeprefix("torch."), q.shape[-1]
    if kind not in backend.kv_dtypes:
        refuse("q", kind, " or ".join(backend.kv_dtypes))
    if not q.dtype == keys.dtype == values.dtype:
        refuse("keys, values", f"{keys.dtype}, {values.dtype}", f"{q.dtype}, as q is")
    if not q.ndim == keys.ndim == values.ndim == 3 or keys.shape != values.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (q, keys, values))
        refuse("shapes of q, keys, values", shapes, "[Q, heads, head_dim], and of keys and values equal")
    if dim not in head_dims or keys.shape[2] != dim:
        refuse("head_dim of q, keys", f"{dim}, {keys.shape[2]}", f"equal, and one of {', '.join(map(str, head_dims))}")
    if q.shape[1] % keys.shape[1]:
        refuse("heads of q, keys", f"{q.shape[1]}, {keys.shape[1]}", "a multiple of the other")
    if keys.stride() != values.stride() or keys.stride()[1:] != (dim, 1):
        limit = f"equal, and the heads of a slot contiguous, (any, {dim}, 1)"
        refuse("strides of keys, values", f"{keys.stride()}, {values.stride()}", limit)
    if keys.shape[0] % page_size:
        refuse("slots of keys, values", keys.shape[0], f"a multiple of {page_size}, the tokens of a page")


class AttentionBackend:
    """A kernel family that an engine keeps as its attention. Subclasses declare what they can do, and do it."""

    name: ClassVar[str]
    """Name by which users choose the backend."""

    format: ClassVar[Format]
    """The planner's format whose arrays it reads."""

    reads: ClassVar[str] = "its format's arrays"
    """The arrays that the backend reads, in words for people."""

    topk_above_1: ClassVar[bool] = False
    """True if a draft step may have more than one branch (K > 1)."""

    page_size_above_1: ClassVar[bool] = False
    """True if pages may hold more than one token (P > 1)."""

    draft_attention: ClassVar[Mapping[Layout, Sequence[DraftAttention]]] = MappingProxyType({"dense": ("lane",)})
    """Draft layouts that the backend can read where K > 1 and P > 1, each with the kinds of attention that a branch can
    have in it. The first layout is the default, and so is the first kind of each. With K = 1 or P = 1 the layouts
    coincide."""

    kv_dtypes: ClassVar[Sequence[KvDtype]] = ("float32",)
    """Element types of the KV pool that it reads."""

    needs_cpu_seq_lens: ClassVar[bool] = True
    """True if a pass needs the requests' lengths on the host. False: lengths may live on the device only."""

    recurrent_state: ClassVar[bool] = False
    """True if the backend can take a rejected branch back out of a recurrent (Mamba-like) state. No backend here
    can."""

    mask: ClassVar[MaskForm] = "both"
    """Form of the verify mask that it reads, in a format that has both forms."""

    def prepare(self, step: Step) -> Any:
        """Prepare a pass: return whatever `attend` needs of the metadata. Called once a pass; nothing else of the pass
        is told later."""
        raise NotImplementedError(f"{type(self).__name__}.prepare")

    def attend(
        self, prepared: Any, keys: torch.Tensor, values: torch.Tensor, q: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Compute softmax attention of rotated queries over a layer of the pool. Called once a layer.

        Args:
            prepared: the value that `prepare` returned for this pass.
            keys, values: the pool's [num_slots, kv_heads, head_dim], f32 or bf16; the pass's own KV is in it already.
            q: f32 [Q, heads, head_dim]; consecutive groups of heads share a KV head.
            scale: factor on the scores.

        Returns:
            f32 [Q, heads, head_dim]; 0 for a query without keys.
        """
        raise NotImplementedError(f"{type(self).__name__}.attend")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Declarations of a backend, read once and checked; the fields are those of `AttentionBackend`."""

    name: str
    format: Format
    reads: str
    topk_above_1: bool
    page_size_above_1: bool
    draft_attention: Mapping[Layout, tuple[DraftAttention, ...]] = field(hash=False)
    kv_dtypes: tuple[KvDtype, ...]
    needs_cpu_seq_lens: bool
    recurrent_state: bool
    mask: MaskForm

    @classmethod
    def of(cls, backend: object) -> Capabilities:
        """Read a backend, which need not be an `AttentionBackend`: a flag that it lacks has the base class's value.

        Raises:
            ConfigError: the format is unknown, or a flag has a wrong type; the message has its value and the values
                that are allowed.
        """
        name = getattr(backend, "name", None) or type(backend).__name__

        def declared(flag: str, allowed: Sequence[Any]) -> Any:
            value = getattr(backend, flag, getattr(AttentionBackend, flag, None))
            if not any(value is a if isinstance(a, bool) else value == a for a in allowed):
                options = ", ".join(repr(a) for a in allowed)
                raise ConfigError(f"attention backend {name!r}: {flag} = {value!r}: must be one of {options}")
            return value

        def several(flag: str, value: object, allowed: Sequence[str]) -> tuple[Any, ...]:
            options = ", ".join(repr(a) for a in allowed)
            items = () if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)
            if not items or any(item not in allowed for item in items):
                raise ConfigError(f"attention backend {name!r}: {flag} = {value!r}: must be some of {options}")
            return items

        if not isinstance(name, str):
            raise ConfigError(f"attention backend: name = {name!r}: must be a string")
        native = getattr(backend, "format", None) == "native"  # the kernels of "native" take plans themselves
        for method in ("prepare", "attend"):
            call = getattr(backend, method, None)
            missing = not native and getattr(call, "__func__", None) is getattr(AttentionBackend, method)
            if missing or not callable(call):
                raise ConfigError(f"attention backend {name!r} has no method {method!r}; see AttentionBackend")
        layouts = getattr(backend, "draft_attention", AttentionBackend.draft_attention)
        if not isinstance(layouts, Mapping):
            raise ConfigError(f"attention backend {name!r}: draft_attention = {layouts!r}: must map layouts to modes")
        several("draft_attention", list(layouts), LAYOUTS)
        return cls(
            name=name,
            format=declared("format", FORMATS),
            reads=str(getattr(backend, "reads", AttentionBackend.reads)),
            topk_above_1=declared("topk_above_1", (False, True)),
            page_size_above_1=declared("page_size_above_1", (False, True)),
            draft_attention={
                layout: several(f"draft_attention[{layout!r}]", modes, DRAFT_ATTENTIONS)
                for layout, modes in layouts.items()
            },
            kv_dtypes=several("kv_dtypes", getattr(backend, "kv_dtypes", AttentionBackend.kv_dtypes), KV_DTYPES),
            needs_cpu_seq_lens=declared("needs_cpu_seq_lens", (True, False)),
            recurrent_state=declared("recurrent_state", (False, True)),
            mask=declared("mask", get_args(MaskForm)),
        )
