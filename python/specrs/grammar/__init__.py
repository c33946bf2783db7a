"""Structured output: what a request's text must look like, and the errors of it.

    SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object", ...}))

The core compiles a grammar and says, at every token, which tokens may come next (``specrs._specrs.Grammar``).
"""

from __future__ import annotations

from specrs.grammar.errors import GrammarError
from specrs.grammar.structured import StructuredOutputs

__all__ = ["GrammarError", "StructuredOutputs"]
