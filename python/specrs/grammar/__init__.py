"""Structured output: the form that a request's text must have, and the errors of it.

    SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object", ...}))

The core compiles a grammar and says, at every token, which tokens may come next (``specrs._specrs.Grammar``).
"""

from __future__ import annotations

from specrs.grammar.errors import GrammarError, GrammarFailedError
from specrs.grammar.structured import StructuredOutputs, refuse

__all__ = ["GrammarError", "GrammarFailedError", "StructuredOutputs", "refuse"]
