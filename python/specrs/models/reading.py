"""Typed access to `config.json`: a value of the wrong type or range is an error that names the file, the key and the
limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from specrs.models.errors import ModelFileError, UnsupportedModelError

# A size larger than that of any model; it keeps sizes far from values that overflow an int64 product.
MAX_DIM = 1 << 24
# Numbers become f32.
_MAX_NUMBER = 1e30


class Reader:
    """Parsed JSON, read by key; `path` is only named in errors."""

    def __init__(self, raw: Mapping[str, Any], path: Path | None) -> None:
        self.raw = raw
        self.path = path

    def refuse(self, what: str, got: object, why: str) -> NoReturn:
        raise UnsupportedModelError(what, got, why, self.path)

    def integer(
        self,
        key: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = MAX_DIM,
        whole_floats: bool = False,
    ) -> int:
        """Read an integer. whole_floats: 8192.0 counts as 8192, for a key whose type transformers does not check."""
        value = self.raw.get(key)
        if whole_floats and isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            if default is None:
                self.refuse(key, None, f"required: an integer in {minimum}..={maximum}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(key, value, f"must be an integer in {minimum}..={maximum}")
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = 0.0, maximum: float = _MAX_NUMBER
    ) -> float:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                self.refuse(key, None, f"required: a number > {above}")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= maximum:
            self.refuse(key, value, f"must be a finite number > {above}, at most {maximum:g}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of so many positive numbers."""
        value = self.raw.get(key)
        if not isinstance(value, list) or len(value) != count:
            got = f"{len(value)} values" if isinstance(value, list) else value
            self.refuse(key, got, f"must be a list of {count} numbers, one for each pair that is rotated")
        return tuple(Reader({key: item}, self.path).number(key) for item in value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, value, "must be true or false")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. ModelFileError: no such file, or no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(path, "no such file; a Hugging Face model directory is needed") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number too long
        raise ModelFileError(path, f"not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"a JSON object is needed, not {type(value).__name__}")
    return value
