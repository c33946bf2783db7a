"""The small model in the package: a Llama trained on the Python standard library's source, and its EAGLE-3 head."""

from __future__ import annotations

import json
from pathlib import Path

from specrs._specrs import ConfigError

_HERE = Path(__file__).parent
_MODEL = "pystdlib-16m"


def _directory(name: str) -> Path:
    path = _HERE / name
    if not (path / "config.json").exists():
        raise ConfigError(f"the package was built without its model {name!r}; give a model directory")
    return path


def model_dir() -> Path:
    """Directory of the model."""
    return _directory(_MODEL)


def draft_dir() -> Path:
    """Directory of its EAGLE-3 head."""
    return _directory(f"{_MODEL}-eagle3")


def heldout_prompts() -> list[str]:
    """Prompts cut from standard library files that training never saw."""
    entries = json.loads((_HERE / "heldout_prompts.json").read_text(encoding="utf-8"))
    return [str(entry["prompt"]) for entry in entries]
