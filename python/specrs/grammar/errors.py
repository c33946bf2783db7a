"""Errors of structured output."""

from __future__ import annotations

from specrs._specrs import ConfigError


class GrammarError(ConfigError):
    """A grammar that cannot be honoured: malformed, too large, or of a model without a tokenizer.

    Raised before the request is queued. ``what``, ``got`` and ``why`` are attributes.
    """

    def __init__(self, what: str, got: str, why: str) -> None:
        super().__init__(f"{what} = {got}: {why}")
        self.what, self.got, self.why = what, got, why
