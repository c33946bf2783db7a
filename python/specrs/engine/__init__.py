"""The engine: batches of requests through prefill, draft, verify and commit. Imports torch.

``llm`` is what users call; ``prompts`` makes tokens of what they give. Below it, each over those named after it:
``loops`` runs an engine under event loops, in a thread or in a process of its own; ``devices`` are the CPU and a GPU;
``rounds`` has the logic of a round, over a device; ``drafting`` decides whether and how far to draft, by measured costs
and a budget; ``request`` is one request, and what comes out of it.
"""

from specrs.engine.config import EngineConfig
from specrs.engine.errors import (
    EngineBusyError,
    EngineClosedError,
    EngineFailedError,
    EngineOverloadedError,
    EngineProcessError,
    StepFailedError,
)
from specrs.engine.llm import LLM
from specrs.engine.loops.aio import AsyncLLM, RequestStream
from specrs.engine.request.logprobs import Logprob
from specrs.engine.request.request import FinishReason, RequestOutput, StreamEvent, TokenizedPrompt, Usage
from specrs.engine.request.traces import Round
from specrs.engine.rounds.stats import EngineStats, RequestTimes, ServingStats

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineBusyError",
    "EngineClosedError",
    "EngineConfig",
    "EngineFailedError",
    "EngineOverloadedError",
    "EngineProcessError",
    "EngineStats",
    "FinishReason",
    "Logprob",
    "RequestOutput",
    "RequestStream",
    "RequestTimes",
    "Round",
    "ServingStats",
    "StepFailedError",
    "StreamEvent",
    "TokenizedPrompt",
    "Usage",
]
