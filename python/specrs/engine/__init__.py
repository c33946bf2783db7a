"""The engine: batches of requests through prefill, draft, verify and commit. Imports torch.

``llm`` is what users call, and ``aio`` in event loops, by a thread of its own (``worker``) or by another process
(``process`` here, ``child`` there, ``wire`` between them); ``prompts`` makes tokens of what they give. ``llm`` hands
requests to ``scheduler``, which decides who runs; ``runner`` and ``drafter`` have the logic of a round, over ``pages``
and an ``executor``, which is a device (``host``: the CPU); ``request`` holds a request's state and the one function
that commits tokens to it, ``draws`` what its tokens are drawn by, ``logprobs`` how probable they were, ``rounds`` what
drafts came to; ``text`` turns tokens into text; ``drafting`` decides whether and how far to draft, by measured costs
and a budget.
"""

from specrs.engine.aio import AsyncLLM, RequestStream
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
from specrs.engine.logprobs import Logprob
from specrs.engine.request import FinishReason, RequestOutput, StreamEvent, TokenizedPrompt, Usage
from specrs.engine.rounds import Round
from specrs.engine.stats import EngineStats, RequestTimes, ServingStats

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
