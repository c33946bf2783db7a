"""specrs: memory-safe, exact tree speculative decoding.

``import specrs`` is light: torch is imported when the engine (``specrs.LLM``) is first touched.

    >>> import specrs
    >>> llm = specrs.LLM()                                   # the small model in the package, with its draft head
    >>> [out] = llm.generate(["def fibonacci(n):"])
    >>> out.text, out.mean_accepted
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from specrs._specrs import (
    ConfigError,
    CudaError,
    DeviceLens,
    DeviceMemoryError,
    FormatBuffers,
    Geometry,
    GraphCaptureError,
    KvCache,
    LedgerError,
    NonFiniteError,
    OutOfBoundsError,
    Plan,
    Planner,
    Pool,
    PoolExhaustedError,
    Sampler,
    SpecrsError,
    StaleHandleError,
    StaleOutputError,
    Tree,
    TreeBatch,
    TreeShape,
    __version__,
    _reverts_warning,
    cuda_available,
    faults,
    kv_move,
    num_threads,
    set_num_threads,
    verify,
)
from specrs.grammar import GrammarError, GrammarFailedError, StructuredOutputs
from specrs.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specrs.backends import UnsupportedCombinationError
    from specrs.chat import ChatLimitError, ChatTemplateError
    from specrs.engine import (
        LLM,
        AsyncLLM,
        EngineBusyError,
        EngineClosedError,
        EngineConfig,
        EngineFailedError,
        EngineOverloadedError,
        EngineProcessError,
        FinishReason,
        Logprob,
        RequestOutput,
        StepFailedError,
        StreamEvent,
        TokenizedPrompt,
    )
    from specrs.engine_options import EngineOptions
    from specrs.graph import GraphRuntime
    from specrs.models import DraftMismatchError, HubError, ModelFileError, UnsupportedModelError

_LAZY = {
    **dict.fromkeys(
        (
            "LLM",
            "AsyncLLM",
            "EngineBusyError",
            "EngineClosedError",
            "EngineConfig",
            "EngineFailedError",
            "EngineOverloadedError",
            "EngineProcessError",
            "FinishReason",
            "Logprob",
            "RequestOutput",
            "StepFailedError",
            "StreamEvent",
            "TokenizedPrompt",
        ),
        "specrs.engine",
    ),
    **dict.fromkeys(("DraftMismatchError", "HubError", "ModelFileError", "UnsupportedModelError"), "specrs.models"),
    **dict.fromkeys(("ChatLimitError", "ChatTemplateError"), "specrs.chat"),
    "UnsupportedCombinationError": "specrs.backends",
    "EngineOptions": "specrs.engine_options",
    "GraphRuntime": "specrs.graph",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatLimitError",
    "ChatTemplateError",
    "ConfigError",
    "CudaError",
    "DeviceLens",
    "DeviceMemoryError",
    "DraftMismatchError",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "EngineFailedError",
    "EngineOptions",
    "EngineOverloadedError",
    "EngineProcessError",
    "FinishReason",
    "FormatBuffers",
    "Geometry",
    "GrammarError",
    "GrammarFailedError",
    "GraphCaptureError",
    "GraphRuntime",
    "HubError",
    "KvCache",
    "LedgerError",
    "Logprob",
    "ModelFileError",
    "NonFiniteError",
    "OutOfBoundsError",
    "Plan",
    "Planner",
    "Pool",
    "PoolExhaustedError",
    "RequestOutput",
    "Sampler",
    "SamplingParams",
    "SpecrsError",
    "StaleHandleError",
    "StaleOutputError",
    "StepFailedError",
    "StreamEvent",
    "StructuredOutputs",
    "TokenizedPrompt",
    "Tree",
    "TreeBatch",
    "TreeShape",
    "UnsupportedCombinationError",
    "UnsupportedModelError",
    "__version__",
    "cuda_available",
    "faults",
    "kv_move",
    "num_threads",
    "set_num_threads",
    "verify",
]


def _warn_of_reverts() -> None:
    try:
        warning = _reverts_warning()
    except ConfigError as e:  # an unknown id: whatever needs a Geometry is refused
        warning = str(e)
    if warning is not None:
        warnings.warn(warning, RuntimeWarning, stacklevel=3)


_warn_of_reverts()


def __getattr__(name: str) -> Any:
    import importlib

    if name == "hf":  # a module itself, which needs torch
        return importlib.import_module("specrs.hf")
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'specrs' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
