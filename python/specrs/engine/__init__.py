"""The engine: batches of requests through prefill, draft, verify and commit. Imports torch.

``llm`` is what users call; it hands requests to ``scheduler``, which decides who runs; ``runner`` and ``drafter`` have
the logic of a round, over ``pages`` and an ``executor``, which is a device (``host``: the CPU); ``request`` holds a
request's state and the one function that commits tokens to it, ``draws`` what its tokens are drawn by, ``logprobs`` how
probable they were; ``text`` turns tokens into text; ``policy`` picks trees
by measured cost.
"""

from specrs.engine.errors import EngineBusyError, EngineClosedError
from specrs.engine.llm import LLM
from specrs.engine.logprobs import Logprob
from specrs.engine.request import FinishReason, RequestOutput, StreamEvent, Usage

__all__ = [
    "LLM",
    "EngineBusyError",
    "EngineClosedError",
    "FinishReason",
    "Logprob",
    "RequestOutput",
    "StreamEvent",
    "Usage",
]
