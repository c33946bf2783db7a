"""A model whose tensors are in memory already: the contents of a Hugging Face directory, without the files.

Wherever a directory is named, a `LiveModel` may stand: the same code reads its configuration and its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specrs.models.errors import ModelFileError
from specrs.models.reading import read_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, eq=False)
class LiveModel:
    """A model in memory.

    Attributes:
        name: name of the model in errors and `repr`.
        files: content of its JSON files, by file name: `config.json`, and perhaps `generation_config.json`.
        tensors: tensors by their names in the model's checkpoint. Nobody may write to them while an engine uses them:
            it reads some where they lie, and has copied others.
        tokenizer: tokenizer of its prompts; ``None``: prompts are token ids.
    """

    name: str
    files: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Tokenizer | None = None

    def __str__(self) -> str:
        return self.name


ModelSource = str | Path | LiveModel
"""A model: its directory, or a model in memory."""


def model_json(model: ModelSource, file: str, *, optional: bool = False) -> tuple[dict[str, Any], Path]:
    """The JSON object of a model's file, and the path to name in errors. ``{}`` where an optional one is not there.

    ModelFileError: no such file, or no JSON object.
    """
    if isinstance(model, LiveModel):
        path = Path(model.name, file)
        if file not in model.files and not optional:
            raise ModelFileError(path, "the model in memory was given without it")
        return dict(model.files.get(file, {})), path
    path = Path(model, file)
    return {} if optional and not path.is_file() else read_json(path), path
