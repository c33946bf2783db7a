"""Errors of model files. Each is a `specrs` `ConfigError` (so also a `ValueError`) and carries its operands as
attributes, like the errors of the core: what, got, and why or limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrs._specrs import ConfigError


def one_line(text: str) -> str:
    """A stranger's text as an error quotes it: printable, and no longer than 200 characters."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= 200 else f"{shown[:197]}..."


class UnsupportedModelError(ConfigError):
    """A `config.json` value that specrs refuses, because it is malformed or because it cannot be honoured exactly.

    Attributes: `what` (the key), `got` (its value), `why` (the limit, and what would work), `path` (the file, or None
    when the check is against a setting given at run time).
    """

    def __init__(self, what: str, got: Any, why: str, path: Path | None = None) -> None:
        where = "" if path is None else f"{path}: "
        super().__init__(f"{where}{what} = {got!r}: {why}")
        self.what = what
        self.got = got
        self.why = why
        self.path = path


class ModelFileError(ConfigError):
    """A weight file that is missing, truncated, or does not hold the tensors its `config.json` calls for.

    Attributes: `path` (the file), `tensor` (its name, or None when the whole file is at fault), `why`.
    """

    def __init__(self, path: Path, why: str, tensor: str | None = None) -> None:
        where = f"{path}" if tensor is None else f"{path}: tensor {one_line(tensor)}"
        super().__init__(f"{where}: {why}")
        self.path = path
        self.tensor = tensor
        self.why = why


class HubError(ModelFileError):
    """A model of the hub that the local hub cache lacks, and that was not downloaded; ``why`` says why."""


class DraftMismatchError(ConfigError):
    """A draft head that does not fit its target model.

    Attributes: `what`, `got` (the draft's value), `limit` (what the target allows).
    """

    def __init__(self, what: str, got: Any, limit: Any, why: str = "") -> None:
        super().__init__(f"{what} = {got} of the draft head does not fit the target: {limit}{'; ' if why else ''}{why}")
        self.what = what
        self.got = got
        self.limit = limit
        self.why = why
