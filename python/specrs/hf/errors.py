"""The refusals of `specrs.hf`."""

from __future__ import annotations

from specrs._specrs import ConfigError


class UnsupportedGenerationError(ConfigError):
    """An argument of `generate`, or a value of its GenerationConfig, that would change the output and is not honoured.

    Attributes: `what` (the argument), `got` (its value), `why` (and what would work).
    """

    def __init__(self, what: str, got: object, why: str) -> None:
        super().__init__(f"{what} = {got!r}: {why}")
        self.what = what
        self.got = got
        self.why = why
