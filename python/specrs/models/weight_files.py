"""Files with weights: which of them a model directory has, and their tensors by name.

safetensors, whole or in shards; or, where a directory has none, what `torch.save` wrote (`pytorch_model.bin`), as many
EAGLE heads are published. That is a pickle, which torch's restricted unpickler reads (`weights_only=True`): it makes
tensors, and calls nothing else that the file names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from specrs.models.errors import ModelFileError

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
"""Types that models have, by safetensors' names."""
SPELLINGS = {dtype: name for name, dtype in {**FLOATS, **INTEGERS}.items()}
READING = (SafetensorError, OSError, ValueError)
"""What a tensor of an open file raises where it cannot be read."""

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
_SAFE = (2, 10)  # torch before it lets a file corrupt memory in spite of `weights_only` (CVE-2026-24747)
_ZIP = b"PK\x03\x04"  # a file that can be mapped begins so; torch before 1.6 wrote no archive


class Slice(Protocol):
    """A tensor of a file before it is read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, rows: slice) -> torch.Tensor: ...


class WeightFile(Protocol):
    """An open file; safetensors' own, or `_Pickled`."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Slice: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


def weight_files(directory: Path) -> Mapping[Path, list[str] | None]:
    """Files to read, with the tensors to take from each; None: all.

    Raises:
        ModelFileError: none, or an index that cannot be read.
    """
    for name in (SAFETENSORS, PICKLED):
        single, index = directory / name, _index(directory / name)
        if single.is_file():
            return {single: None}
        if index.is_file():
            return _shards(index)
    single = directory / SAFETENSORS
    raise ModelFileError(single, f"no such file, and no {_index(single).name} or {PICKLED} either")


def has_weights(directory: Path) -> bool:
    """Whether a directory has a file of weights, or an index of them."""
    names = (SAFETENSORS, PICKLED)
    return any((directory / name).is_file() or _index(directory / name).is_file() for name in names)


def weight_bytes(*models: object) -> int:
    """Of the files in which their weights are; 0 for what is no directory, or has none."""
    total = 0
    for directory in models:
        if isinstance(directory, Path) and has_weights(directory):
            total += sum(path.stat().st_size for path in weight_files(directory) if path.is_file())
    return total


def open_weights(path: Path, device: torch.device) -> WeightFile:
    """Raises ModelFileError."""
    if not path.is_file():
        raise ModelFileError(path, "no such file")
    if path.suffix == ".bin":
        return _Pickled(path)
    try:
        file: WeightFile = safe_open(str(path), framework="pt", device=str(device))
    except READING as error:
        raise ModelFileError(path, f"not a whole safetensors file ({_guess(path)}): {error}") from error
    return file


def is_mapped(file: WeightFile) -> bool:
    """Whether its values stay in the file until they are read, rather than in this process's memory."""
    return not isinstance(file, _Pickled) or file.mapped


class _Pickled:
    """What `torch.save` made of a mapping from names to tensors."""

    def __init__(self, path: Path) -> None:
        if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _SAFE:
            why = f"pickled weights need torch {_SAFE[0]}.{_SAFE[1]}, whose unpickler is safe; safetensors work"
            raise ModelFileError(path, f"torch = {torch.__version__}: {why}")
        try:
            with path.open("rb") as file:
                archive = file.read(len(_ZIP)) == _ZIP
            found: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=archive)
            self.mapped = archive
        except Exception as error:  # whatever unpickling a stranger's bytes raises
            why = f"not a whole file of torch.save with tensors alone ({_guess(path)}): {_reason(error)}"
            raise ModelFileError(path, why) from None  # torch's text says how to run the file's code
        if not isinstance(found, Mapping):
            raise ModelFileError(path, f"holds a {type(found).__name__}: must map names to tensors")
        self._tensors: dict[str, torch.Tensor] = {}
        for name, value in found.items():
            if not isinstance(name, str) or type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise ModelFileError(path, f"a {type(value).__name__}: must be a tensor with a name", str(name))
            self._tensors[name] = _plain(value.detach(), path, name)

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> _PickledSlice:
        return _PickledSlice(self._tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


class _PickledSlice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return SPELLINGS.get(self._tensor.dtype, str(self._tensor.dtype).removeprefix("torch."))

    def __getitem__(self, rows: slice) -> torch.Tensor:
        return self._tensor[rows]


def _plain(tensor: torch.Tensor, path: Path, name: str) -> torch.Tensor:
    """A tensor as it came, if the file holds each of its values.

    A pickle may give one any strides, and so a shape that a copy of it would need more memory for than there is.
    """
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise ModelFileError(path, f"a {tensor.layout} tensor on {tensor.device} of {tensor.dtype}: not read", name)
    held = tensor.untyped_storage().nbytes()
    if tensor.nbytes > held:
        raise ModelFileError(path, f"shape {list(tensor.shape)} of {tensor.nbytes} bytes, stored are {held}", name)
    return tensor


def _shards(index: Path) -> dict[Path, list[str] | None]:
    shards: dict[Path, list[str]] = {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ModelFileError(index, f"shard {file!r} is outside the model directory", name)
            shards.setdefault(index.parent / file, []).append(name)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise ModelFileError(index, f"not readable as an index with a weight_map: {error!r}") from error
    return {**shards}


def _index(single: Path) -> Path:
    return single.with_name(f"{single.name}.index.json")


def _reason(error: Exception) -> str:
    """Why torch did not load a file: its errors of unpickling say so between an introduction and a link."""
    parts = [" ".join(part.split()) for part in str(error).split("\n\n") if part.strip()] or [""]
    said = parts[-2] if isinstance(error, UnpicklingError) and len(parts) > 1 else parts[0]
    return f"{type(error).__name__}: {said}"


def _guess(path: Path) -> str:
    return f"{path.stat().st_size} bytes: truncated, or a Git LFS pointer?"
