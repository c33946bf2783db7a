"""Errors of structured output; the core raises them too."""

from __future__ import annotations

from specrs._specrs import GrammarError, GrammarFailedError

__all__ = ["GrammarError", "GrammarFailedError", "refusal"]


def refusal(what: str, got: str, why: str) -> GrammarError:
    """The error of a form that cannot be honoured."""
    error = GrammarError(f"{what} = {got}: {why}")
    error.what, error.got, error.why = what, got, why
    return error
