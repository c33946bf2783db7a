"""Requests of a backend: pure functions from plain values to a configuration, or to a typed refusal.

    resolve(FlashAttention(), Combination(topk=4, page_size=16))   # layout dense, ancestors
    resolve(FlashAttention(), Combination(topk=4, page_size=16, layout="holey", draft_attention="ancestors"))
    # UnsupportedCombinationError: ... draft_attention='lane' works; ...

    resolve(Native(), Combination(device="cuda", kv_dtype="bfloat16"))   # graphs "round", gpu-only rounds
    resolve(FlashInfer(), Combination(graphs="loop"))
    # UnsupportedCombinationError: ... flashinfer on 'cpu' have graphs 'off'. What would work: graphs='off'; ...

Where a backend runs, and how its rounds may be launched there, is `specrs.backends.matrix`. Nothing here depends on the
order in which an engine is built, so the whole (small) domain is tested exhaustively.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from specrs._specrs import ConfigError
from specrs.backends.base import DRAFT_ATTENTIONS, KV_DTYPES, LAYOUTS, Capabilities, DraftAttention, KvDtype, Layout
from specrs.backends.matrix import DEVICES, GRAPH_LEVELS, Device, GraphLevel, on_device, row_of, why_not_gpu_only

_MAX_NAMED = 3  # alternatives on the same backend in a message; the error carries all of them


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A combination of features that is asked of a backend.

    Attributes:
        topk: K of the tree; ``None`` where no tree is asked for, which leaves the engine free to draft chains.
        page_size: P, tokens per page.
        layout: layout of the draft region; ``None`` for the backend's first that can do the rest.
        draft_attention: the tokens that a branch attends to; ``None`` for the layout's first kind.
        recurrent_state: true if the model has recurrent (Mamba-like) state.
        kv_dtype: element type of the KV pool.
        device: the device where the model computes.
        graphs: the part of a round that is one launch; ``None`` for the device's default.
        gpu_only: true if rounds must run on lengths that the device alone knows, false if they must not; ``None`` for
            what there is.
    """

    topk: int | None = None
    page_size: int = 1
    layout: Layout | None = None
    draft_attention: DraftAttention | None = None
    recurrent_state: bool = False
    kv_dtype: KvDtype = "float32"
    device: Device = "cpu"
    graphs: GraphLevel | None = None
    gpu_only: bool | None = None

    @property
    def holes(self) -> bool:
        """True if the layouts differ: K > 1 and P > 1."""
        return (self.topk or 1) > 1 and self.page_size > 1

    def __str__(self) -> str:
        defaults = Combination()
        return ", ".join(_option(name, value) for name, value in vars(self).items() if value != getattr(defaults, name))


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A combination that a backend can run, every choice made.

    Attributes:
        capabilities: declarations of the backend.
        speculate: true if the model may be drafted for; ``False`` where recurrent state routes it to plain decoding.
        layout: layout in force: ``"holey"`` only where it differs from ``"dense"``.
        draft_attention: draft attention in force.
        needs_cpu_seq_lens: true if passes need the lengths on the host.
        graphs: level in force.
        gpu_only: true if rounds may run on lengths that the device alone knows, ahead of the host.
    """

    capabilities: Capabilities
    speculate: bool
    layout: Layout
    draft_attention: DraftAttention
    needs_cpu_seq_lens: bool
    graphs: GraphLevel
    gpu_only: bool


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A replacement for a refused combination: a backend's name, a combination that works, and what changed."""

    backend: str
    combination: Combination
    change: str


class UnsupportedCombinationError(ConfigError):
    """A backend was asked for something that it cannot do.

    Attributes: `backend` (its name), `combination`, `why`, `alternatives` (each accepted by `resolve`; nearest first).
    """

    def __init__(self, backend: str, combination: Combination, why: str, alternatives: Iterable[Alternative]) -> None:
        self.backend = backend
        self.combination = combination
        self.why = why
        self.alternatives = tuple(alternatives)
        works = [a.change for a in self.alternatives if a.backend == backend][:_MAX_NAMED]
        others = [repr(a.backend) for a in self.alternatives if a.backend != backend]
        if others:
            works.append(f"attention_backend={_either(others)}")
        told = f". What would work: {'; or '.join(works)}" if works else ""
        super().__init__(f"attention backend {backend!r} with {combination}: {why}{told}")


def check(capabilities: Capabilities, asked: Combination) -> str | None:
    """Return the reason why a backend cannot run a combination, or ``None`` where it can."""
    name, tree = capabilities.name, (asked.topk or 1) > 1
    row = row_of(capabilities, asked.device)
    if row is None:
        return f"{name} runs on the CPU"
    if asked.recurrent_state and asked.topk is not None and not capabilities.recurrent_state:
        return "a rejected branch cannot be taken back out of a recurrent state, so such models are decoded plainly"
    if tree and not capabilities.topk_above_1:
        return f"{name} has one branch per draft step (K = 1)"
    if asked.page_size > 1 and not capabilities.page_size_above_1:
        return f"{name} reads pages of one token"
    if asked.kv_dtype not in capabilities.kv_dtypes:
        return f"{name} reads KV of {_either(capabilities.kv_dtypes)}"
    layouts = _layouts(capabilities, asked)
    if not layouts:
        return f"{name} reads the {_either(capabilities.draft_attention)} draft layout where K > 1 and P > 1"
    if tree and asked.draft_attention is not None and not any(asked.draft_attention in m for m in layouts.values()):
        modes = dict.fromkeys(mode for modes in layouts.values() for mode in modes)
        where = f"in the {_either(layouts)} layout" if asked.holes else "here"
        return f"{where} a branch of {name} attends to its {_either(modes)}"
    if asked.graphs is not None and asked.graphs not in row.graphs:
        return f"rounds of {name} on {asked.device!r} have graphs {_either(map(repr, row.graphs))}"
    if asked.graphs == "loop" and asked.gpu_only is False:
        return "the host sees no length while a loop runs"
    if asked.gpu_only or asked.graphs == "loop":
        return why_not_gpu_only(capabilities, asked.device, asked.recurrent_state)
    return None


def resolve(
    backend: object, asked: Combination, *, others: Iterable[object] = (), slots: Iterable[object | None] = ()
) -> Resolved:
    """Every choice that a combination leaves open, made.

    Args:
        backend: an `AttentionBackend`, or an object with its methods; specrs's own stands for itself on either device.
        asked: the combination that is wanted.
        others: backends that a refusal may recommend instead.
        slots: the engine's further backends, such as the draft's own; ``None`` is an empty slot.

    Raises:
        UnsupportedCombinationError: the message has the combination, the reason, and a combination that would work.
        ConfigError: the backend declares a flag that has no meaning, or a wanted value does not exist.
    """
    _check_values(asked)
    needed = needs_cpu_seq_lens(slots)

    def there(of: object) -> Capabilities | None:
        found = on_device(of, asked.device)
        if found is None:
            return None
        told = Capabilities.of(found)
        return replace(told, needs_cpu_seq_lens=told.needs_cpu_seq_lens or needed)

    capabilities = there(backend) or Capabilities.of(backend)
    why = check(capabilities, asked)
    if why is not None:
        rest = [c for c in map(there, others) if c is not None and c.name != capabilities.name]
        raise UnsupportedCombinationError(capabilities.name, asked, why, _alternatives(capabilities, asked, rest))
    row = row_of(capabilities, asked.device)
    assert row is not None, "checked above"
    layout, mode = next(
        (layout, mode)
        for layout, modes in _layouts(capabilities, asked).items()
        for mode in modes
        if asked.draft_attention in (None, mode) or (asked.topk or 1) == 1
    )
    return Resolved(
        capabilities=capabilities,
        speculate=not asked.recurrent_state or capabilities.recurrent_state,
        layout=layout,
        draft_attention=mode if (asked.topk or 1) > 1 else asked.draft_attention or "ancestors",
        needs_cpu_seq_lens=capabilities.needs_cpu_seq_lens,
        graphs=asked.graphs or row.graphs[0],
        gpu_only=asked.gpu_only is not False
        and why_not_gpu_only(capabilities, asked.device, asked.recurrent_state) is None,
    )


def needs_cpu_seq_lens(backends: Iterable[object | None]) -> bool:
    """Return whether any backend of an engine's slots needs the lengths on the host.

    A slot may be empty, as that of a draft backend before there is a draft; it needs nothing. A backend that does not
    say gets the lengths: what it would do without them is unknown (sglang PR 26738, where both were dereferenced).
    """
    return any(getattr(b, "needs_cpu_seq_lens", True) is not False for b in backends if b is not None)


def _layouts(capabilities: Capabilities, asked: Combination) -> dict[Layout, tuple[DraftAttention, ...]]:
    """Return the layouts that can be considered, each with its modes. Where layouts coincide, slots and pages do too,
    so a backend can do in one what it can do in the other."""
    layouts = dict(capabilities.draft_attention)
    if not asked.holes:
        modes = dict.fromkeys(mode for modes in layouts.values() for mode in modes)
        return {"dense": tuple(modes)}
    return {layout: modes for layout, modes in layouts.items() if asked.layout in (None, layout)}


def _check_values(asked: Combination) -> None:
    for name, value, allowed in (
        ("draft_layout", asked.layout, LAYOUTS),
        ("draft_attention", asked.draft_attention, DRAFT_ATTENTIONS),
        ("graphs", asked.graphs, GRAPH_LEVELS),
    ):
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{name} = {value!r}: must be {_either(map(repr, allowed))}, or None for the best there is"
            )
    if asked.device not in DEVICES:
        raise ConfigError(f"device = {asked.device!r}: must be {_either(map(repr, DEVICES))}")
    if asked.gpu_only not in (None, False, True):
        raise ConfigError(f"gpu_only = {asked.gpu_only!r}: must be a bool, or None for what there is")
    if asked.kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype = {asked.kv_dtype!r}: must be {_either(map(repr, KV_DTYPES))}")


def _alternatives(
    capabilities: Capabilities, asked: Combination, others: Iterable[Capabilities]
) -> Iterator[Alternative]:
    """Yield accepted combinations near a refused one: first those with the fewest changes, then other backends for the
    same combination."""
    at = GRAPH_LEVELS.index(asked.graphs or "off")
    nowhere = row_of(capabilities, asked.device) is None
    changes: dict[str, list[Any]] = {
        # Less in one launch first, the nearest level of it.
        "graphs": [*GRAPH_LEVELS[:at][::-1], *GRAPH_LEVELS[at + 1 :]] if asked.graphs else [],
        "gpu_only": [None] if asked.gpu_only is not None else [],
        "draft_attention": [mode for mode in DRAFT_ATTENTIONS if asked.draft_attention not in (None, mode)],
        "layout": [layout for layout in LAYOUTS if asked.layout not in (None, layout)],
        "kv_dtype": [dtype for dtype in KV_DTYPES if dtype != asked.kv_dtype],
        "page_size": [1] if asked.page_size > 1 else [],
        "device": [device for device in DEVICES if nowhere and device != asked.device],
        "topk": [None] if asked.recurrent_state else [1] if (asked.topk or 1) > 1 else [],
    }
    fields = [name for name, values in changes.items() if values]
    found: list[set[str]] = []
    for count in range(len(fields) + 1):
        for names in itertools.combinations(fields, count):
            if any(known <= {*names} for known in found):
                continue  # fewer of these changes suffice
            for values in itertools.product(*(changes[name] for name in names)):
                changed = replace(asked, **dict(zip(names, values, strict=True)))
                if check(capabilities, changed) is None:
                    found.append({*names})
                    yield Alternative(backend=capabilities.name, combination=changed, change=_told(asked, changed))
    for other in others:
        if check(other, asked) is None:
            yield Alternative(backend=other.name, combination=asked, change=f"attention_backend={other.name!r}")


def _told(asked: Combination, changed: Combination) -> str:
    """The changes as the options that a user would give."""
    return " with ".join(_option(name, value) for name, value in vars(changed).items() if value != getattr(asked, name))


def _option(name: str, value: object) -> str:
    """A field of a combination as the option that a user gives."""
    if name == "topk":
        return "no tree (tree=None)" if value is None else f"tree=({value}, S, V)"
    return f"{'draft_layout' if name == 'layout' else name}={value!r}"


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
