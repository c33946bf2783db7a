"""An engine for each module that has generated, for as long as the module lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from specrs.engine import LLM, EngineBusyError
from specrs.hf.errors import UnsupportedGenerationError
from specrs.hf.module import device_of, live_model
from specrs.models import LiveModel, ModelConfig

_LEAST = 2048  # tokens of an engine's context, where the model has as many: so that few calls need a larger one


# Columns of the sums that tell whether weights were written to. A prime, so that rows which change places end up in
# other columns.
_COLUMNS = 4093


@dataclass(eq=False)
class _Held:
    llm: LLM
    weights: _Weights
    options: dict[str, Any]
    end: weakref.finalize[[], Any]


_ENGINES: weakref.WeakKeyDictionary[torch.nn.Module, _Held] = weakref.WeakKeyDictionary()
_TURNS: weakref.WeakKeyDictionary[torch.nn.Module, threading.Lock] = weakref.WeakKeyDictionary()
_GUARD = threading.Lock()  # lock of both tables


@contextmanager
def turn(model: Any) -> Iterator[None]:
    """Work with a module's engine, alone: another call may make it anew, which frees the one in use.

    Raises:
        EngineBusyError: another thread has the turn, or the caller further up.
    """
    with _GUARD:
        lock = _TURNS.setdefault(model, threading.Lock())
    if not lock.acquire(blocking=False):
        raise EngineBusyError
    try:
        yield
    finally:
        lock.release()


def engine_of(model: Any, options: Mapping[str, Any], tokens: int) -> LLM:
    """Return the module's engine: that of the last call, if it has room for requests of so many tokens, its options are
    the same, and nothing has been written to the weights since. Call it within the module's `turn`.

    Raises as `from_model` does, and UnsupportedGenerationError for more tokens than the model serves exactly.
    """
    source = live_model(model)
    device_of(source)  # raises unless there is exactly one device
    weights = _Weights.of(source)
    with _GUARD:
        held = _ENGINES.get(model)
    if held is not None:
        context = held.llm.config.max_context_len
        assert context is not None
        if held.weights.same(weights) and held.options == options and context >= tokens:
            return held.llm
        with _GUARD:
            del _ENGINES[model]
        held.end()  # closes the engine
    llm = LLM(source, **_options(source, options, tokens))
    end = weakref.finalize(model, llm.close)
    end.atexit = False
    with _GUARD:
        _ENGINES[model] = _Held(llm, weights, dict(options), end)
    return llm


def _options(source: LiveModel, options: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Options of a new engine: a context that is a power of two, or the model's."""
    given = {"device": str(device_of(source)), **options}
    limit = ModelConfig.from_directory(source).max_context_len
    most = given.get("max_context_len")
    if isinstance(most, int):
        limit = min(limit, most)
    if tokens > limit:
        why = f"prompt and new tokens; the engine serves this model exactly up to {limit} tokens; fewer new tokens work"
        raise UnsupportedGenerationError("max_length", tokens, why)
    given.setdefault("max_context_len", min(limit, max(_LEAST, 1 << (tokens - 1).bit_length())))
    return given


@dataclass(eq=False)
class _Weights:
    """Fingerprint that tells whether weights are those that an engine was made of: where they lie, and sums of their
    bytes.

    torch counts writes to a tensor, but neither those through `.data` and numpy nor those to inference tensors. So all
    bytes are read, which costs about as much as a token does.
    """

    places: list[tuple[str, int, torch.dtype, torch.Size]]
    sums: list[torch.Tensor]  # one for each device

    @classmethod
    def of(cls, source: LiveModel) -> _Weights:
        places = [(name, t.data_ptr(), t.dtype, t.shape) for name, t in source.tensors.items()]
        once = {place[1:]: t for place, t in zip(places, source.tensors.values(), strict=True)}  # without tied ones
        sums: dict[torch.device, torch.Tensor] = {}
        for tensor in once.values():
            at = tensor.device
            total = sums.setdefault(at, torch.zeros(_COLUMNS, dtype=torch.int64, device=at))
            _add(tensor, total.mul_(31))  # wraps around
        return cls(places, list(sums.values()))

    def same(self, other: _Weights) -> bool:
        """Return whether nothing has changed."""
        return self.places == other.places and all(map(torch.equal, self.sums, other.sums))


def _add(tensor: torch.Tensor, total: torch.Tensor) -> None:
    """Add a tensor's bytes to `total`, int64 [_COLUMNS], column by column."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    words = flat.numel() // 8
    whole, rest = flat[: words * 8].view(torch.int64), flat[words * 8 :]
    rows = words // _COLUMNS
    total += whole[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0)
    total[: words - rows * _COLUMNS] += whole[rows * _COLUMNS :]
    total[-rest.numel() or _COLUMNS :] += rest
