"""An engine for each module that has generated, for as long as the module lives."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specrs.engine import LLM
from specrs.hf.errors import UnsupportedGenerationError
from specrs.hf.module import device_of, live_model
from specrs.models import LiveModel, ModelConfig

_LEAST = 2048  # tokens of an engine's context, where the model has as many: so that few calls need a larger one


@dataclass(eq=False)
class _Held:
    llm: LLM
    weights: tuple[Any, ...]
    options: dict[str, Any]
    end: weakref.finalize[[], Any]


_ENGINES: weakref.WeakKeyDictionary[torch.nn.Module, _Held] = weakref.WeakKeyDictionary()


def engine_of(model: Any, options: Mapping[str, Any], tokens: int) -> LLM:
    """The module's engine: that of the last call, where it has room for requests of so many tokens, its options are the
    same, and nothing has been written to the weights since.

    Raises as `from_model` does, and UnsupportedGenerationError for more tokens than the model serves exactly.
    """
    source = live_model(model)
    weights = _state(source)
    held = _ENGINES.get(model)
    if held is not None:
        context = held.llm.config.max_context_len
        assert context is not None
        if held.weights == weights and held.options == options and context >= tokens:
            return held.llm
        held.end.detach()
        del _ENGINES[model]
        held.llm.close()
    llm = LLM(source, **_options(source, options, tokens))
    _ENGINES[model] = _Held(llm, weights, dict(options), weakref.finalize(model, llm.close))
    _ENGINES[model].end.atexit = False
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


def _state(source: LiveModel) -> tuple[Any, ...]:
    """Changes when anybody writes to a tensor by torch's operations, or puts another one in its place."""
    return tuple(
        (name, t.data_ptr(), t.dtype, 0 if t.is_inference() else t._version) for name, t in source.tensors.items()
    )
