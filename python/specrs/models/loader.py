"""Weights from safetensors, one file or shards, checked against what the model calls for before any of them is read.

weights = Checkpoint(directory)
weights.check(expected_shapes)     # every missing, extra or misshapen tensor, from the headers alone
tensor = weights.load("model.norm.weight")
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specrs.models.errors import ModelFileError
from specrs.models.placement import HOST

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Written by old versions of transformers; derived from the config, so never read.
_DERIVED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|.*\.self_attn\.bias$|.*\.masked_bias$")


class Checkpoint:
    """The tensors of a model directory by name. Opening reads headers only.

    `rename` maps a tensor's name in the file to the name used here (heads are published under several). Tensors come
    straight to `device`. Raises ModelFileError, which names the file, and the tensor where one is at fault.
    """

    def __init__(
        self, directory: str | Path, rename: Callable[[str], str] = str, device: torch.device = HOST.device
    ) -> None:
        self.directory = Path(directory)
        self._files: dict[Path, Any] = {}
        self._where: dict[str, tuple[Path, str]] = {}
        if not self.directory.is_dir():
            raise ModelFileError(self.directory, "no such directory; a Hugging Face model directory is needed")
        for path, names in self._find().items():
            file = _open(path, device)
            self._files[path] = file
            present = set(file.keys())
            for name in names if names is not None else sorted(present):
                if name not in present:
                    raise ModelFileError(path, f"not in the file, although {_INDEX} says so", name)
                ours = rename(name)
                if ours in self._where:
                    raise ModelFileError(path, f"also in {self._where[ours][0].name} as {self._where[ours][1]}", name)
                self._where[ours] = (path, name)

    def _find(self) -> Mapping[Path, list[str] | None]:
        """Files with the tensors to take from each; None: all."""
        index = self.directory / _INDEX
        single = self.directory / _SINGLE
        if single.is_file() or not index.is_file():
            if not single.is_file():
                for old in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
                    if (self.directory / old).exists():
                        raise ModelFileError(
                            self.directory / old,
                            "pickled weights run code when loaded and are refused; convert them with "
                            "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')",
                        )
                raise ModelFileError(single, f"no such file, and no {_INDEX} either")
            return {single: None}
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards: dict[Path, list[str]] = {}
            for name, file in weight_map.items():
                if Path(file).name != file:
                    raise ModelFileError(index, f"shard {file!r} is outside the model directory", name)
                shards.setdefault(self.directory / file, []).append(name)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            raise ModelFileError(index, f"not readable as a safetensors index with a weight_map: {error!r}") from error
        return shards

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def path(self, name: str) -> Path:
        """The file that holds a tensor; the directory's usual file for one that is missing (for error messages)."""
        return self._where[name][0] if name in self._where else self.directory / _SINGLE

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        path, stored = self._locate(name)
        return tuple(self._files[path].get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """From the header, in safetensors' spelling, such as `BF16`."""
        path, stored = self._locate(name)
        return str(self._files[path].get_slice(stored).get_dtype())

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        integers: Iterable[str] = (),
        ignored: Iterable[str] = (),
    ) -> None:
        """Compares names, shapes and dtypes with what the model needs, from headers alone.

        `expected`: every tensor that must be there, with its shape; those in `integers` are I64, I32 or BOOL, all
        others F32, F16 or BF16. Any other tensor is an error, except those in `ignored`.
        """
        missing = [name for name in expected if name not in self._where]
        if missing:
            raise ModelFileError(self.path(missing[0]), f"missing{_and_more(missing)}", missing[0])
        skip = {*expected, *ignored}
        extra = [name for name in self._where if name not in skip and not _DERIVED.match(name)]
        if extra:
            raise ModelFileError(self.path(extra[0]), f"config.json has no use for it{_and_more(extra)}", extra[0])
        whole = {*integers}
        for name, shape in expected.items():
            if self.shape(name) != shape:
                got, want = list(self.shape(name)), list(shape)
                raise ModelFileError(self.path(name), f"shape {got}, but config.json calls for {want}", name)
            allowed = _INTEGERS if name in whole else _FLOATS
            if self.dtype(name) not in allowed:
                raise ModelFileError(
                    self.path(name), f"dtype {self.dtype(name)}, need one of {', '.join(allowed)}", name
                )

    def load(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype, on the checkpoint's device, contiguous."""
        path, stored = self._locate(name)
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(stored)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFileError(path, f"not readable: {error}", stored) from error
        return tensor.contiguous()

    def _locate(self, name: str) -> tuple[Path, str]:
        if name not in self._where:
            raise ModelFileError(self.path(name), "missing", name)
        return self._where[name]


def _open(path: Path, device: torch.device) -> Any:
    if not path.is_file():
        raise ModelFileError(path, "no such file")
    try:
        return safe_open(str(path), framework="pt", device=str(device))
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        why = f"not a whole safetensors file ({size} bytes: truncated, or a Git LFS pointer?): {error}"
        raise ModelFileError(path, why) from error


def _and_more(names: list[str]) -> str:
    if len(names) == 1:
        return ""
    listed = ", ".join(names[1:4])
    return f", as for {len(names) - 1} more: {listed}{', ...' if len(names) > 4 else ''}"
