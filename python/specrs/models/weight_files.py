"""Files with weights: which of them a model directory has, and their tensors by name.

safetensors, whole or in shards; or, where a directory has none, what `torch.save` wrote (`pytorch_model.bin`), as many
EAGLE heads are published.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from specrs.models.errors import ModelFileError, one_line
from specrs.models.pickled import PickledFile

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
"""Types that models have, by safetensors' names."""
_OTHERS = {"F64": torch.float64, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
SPELLINGS = {dtype: name for name, dtype in {**FLOATS, **INTEGERS, **_OTHERS}.items()}
READING = (SafetensorError, OSError, ValueError, KeyError)
"""Errors that a tensor of an open file raises where it cannot be read."""

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"


class Slice(Protocol):
    """A tensor of a file before it is read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, rows: slice) -> torch.Tensor: ...


class WeightFile(Protocol):
    """An open file; safetensors' own, or a `PickledFile`."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Slice: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


def weight_files(directory: Path) -> tuple[Mapping[Path, list[str] | None], Path]:
    """Files to read, with the tensors to take from each (None: all); and the one file, or the index, that says so.

    Raises:
        ModelFileError: none, or an index that cannot be read.
    """
    for name in (SAFETENSORS, PICKLED):
        single, index = directory / name, _index(directory / name)
        if single.is_file():
            return {single: None}, single
        if index.is_file():
            return _shards(index, single.suffix), index
    single = directory / SAFETENSORS
    raise ModelFileError(single, f"no such file, and no {_index(single).name} or {PICKLED} either")


def has_weights(directory: Path) -> bool:
    """Return whether a directory has a file of weights, or an index of them."""
    names = (SAFETENSORS, PICKLED)
    return any((directory / name).is_file() or _index(directory / name).is_file() for name in names)


def weight_bytes(*models: object) -> int:
    """Return the bytes of the files that hold the weights; 0 for a path that is no directory, or has no weights."""
    total = 0
    for directory in models:
        if isinstance(directory, Path) and has_weights(directory):
            total += sum(path.stat().st_size for path in weight_files(directory)[0] if path.is_file())
    return total


def open_weights(path: Path, device: torch.device) -> WeightFile:
    """Raises ModelFileError."""
    if not path.is_file():
        raise ModelFileError(path, "no such file")
    if path.suffix == ".bin":
        return PickledFile(path)
    try:
        file: WeightFile = safe_open(str(path), framework="pt", device=str(device))
    except READING as error:
        raise ModelFileError(path, f"not a whole safetensors file ({_guess(path)}): {error}") from error
    return file


def _shards(index: Path, suffix: str) -> dict[Path, list[str] | None]:
    """suffix: of the index's format, which its files must have."""
    shards: dict[Path, list[str]] = {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in weight_map.items():
            shown = one_line(repr(file))
            if Path(file).name != file or not file.isprintable() or len(file.encode()) > 255:
                raise ModelFileError(index, f"shard {shown} is outside the model directory, or no file's name", name)
            if Path(file).suffix != suffix:
                raise ModelFileError(index, f"shard {shown}: must be a *{suffix}", name)
            shards.setdefault(index.parent / file, []).append(name)
    except ModelFileError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelFileError(index, f"not readable as an index with a weight_map: {one_line(repr(error))}") from error
    return {**shards}


def _index(single: Path) -> Path:
    return single.with_name(f"{single.name}.index.json")


def _guess(path: Path) -> str:
    return f"{path.stat().st_size} bytes: truncated, or a Git LFS pointer?"
