"""`tokenizer_config.json` of a model directory, with what older models keep in files beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specrs.chat.errors import ChatTemplateError

TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"  # the latter before transformers 5


def tokenizer_config(directory: Path) -> dict[str, Any]:
    """Return the tokenizer's configuration from the files of a directory, put together as transformers does; ``{}``
    without files.

    ``special_tokens_map.json`` counts where ``tokenizer_config.json`` has no ``added_tokens_decoder``, and then before
    its other keys. Special tokens without a name are under ``extra_special_tokens``, whatever the file calls them.

    Raises:
        ChatTemplateError: a file that cannot be read, or holds no JSON object.
    """
    config = _under_extra(read_json(directory / TOKENIZER_CONFIG), fill=True)
    if "added_tokens_decoder" in config:
        return config
    extra = config.get(_EXTRA)
    former = read_json(directory / SPECIAL_TOKENS_MAP)
    for key, value in former.items():
        if key == _EXTRA and isinstance(value, list) and isinstance(extra, list):
            value = [*extra, *(token for token in value if token not in extra)]
        config[key] = {**value, "special": True} if isinstance(value, Mapping) and key != _EXTRA else value
    return _under_extra(config, fill=False)


def _under_extra(config: dict[str, Any], fill: bool) -> dict[str, Any]:
    """Return the configuration with ``additional_special_tokens`` under its newer name, unless that is there too; with
    ``fill``, an empty list under the newer name gives way."""
    free = not config.get(_EXTRA) if fill else _EXTRA not in config
    if free and _ADDITIONAL in config:
        config[_EXTRA] = config.pop(_ADDITIONAL)
    return config


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ChatTemplateError(f"{path}: not readable as text: {e}") from e


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; ``{}`` where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as e:
        raise ChatTemplateError(f"{path}: not readable as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ChatTemplateError(f"{path}: a JSON object is needed, not {type(value).__name__}")
    return value
