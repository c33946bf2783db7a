"""The one error of capsule files."""

from __future__ import annotations

from specrs._specrs import ConfigError


class CapsuleError(ConfigError):
    """A capsule file that is damaged, foreign, of another version, too large, or that contradicts itself.

    Attributes: `where` (the part or field at fault, such as ``"header"`` or ``"rows[1].pages[3]"``), `why`, and
    `path` (the file, or None for bytes and values that were never in one).
    """

    def __init__(self, where: str, why: str, path: str | None = None) -> None:
        super().__init__(f"{'capsule' if path is None else path}: {where}: {why}")
        self.where = where
        self.why = why
        self.path = path
