"""Weights from safetensors, one file or shards, checked against what the model calls for before any of them is read.

weights = Checkpoint(directory)
weights.check(expected_shapes)     # every missing, extra or misshapen tensor, from the headers alone
tensor = weights.load("model.norm.weight")
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from specrs import progress
from specrs.models.errors import ModelFileError
from specrs.models.live import LiveModel, ModelSource
from specrs.models.placement import HOST, Placement

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
_SPELLINGS = {dtype: name for name, dtype in {**_FLOATS, **_INTEGERS}.items()}
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Written by old versions of transformers; derived from the config, so never read.
_DERIVED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|.*\.self_attn\.bias$|.*\.masked_bias$")


# Bytes read from a file before it is opened anew: what was read through one mapping counts as this process's memory.
_RENEW = 256 << 20
_ROWS = 4096  # of two tensors that are compared, at a time


@dataclass(frozen=True)
class _Stored:
    """A tensor as its file's header has it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def dtype_of(name: str) -> torch.dtype:
    """A type that models have, by safetensors' name."""
    return {**_FLOATS, **_INTEGERS}[name]


class Checkpoint:
    """The tensors of a model directory by name. Opening reads headers only.

    `rename` maps a tensor's name in the file to the name used here (heads are published under several). Tensors come
    one by one, straight to the placement's device: host memory stays near one tensor and `_RENEW` bytes, whatever the
    model; those of a model in memory are its own where they lie on that device in that dtype. On a GPU they come in the
    dtype of its weights, and one with NaN or an infinity is refused; on the host, such a weight costs the requests that
    meet it. Raises ModelFileError, which names the file, and the tensor where one is at fault.
    """

    def __init__(self, directory: ModelSource, rename: Callable[[str], str] = str, placement: Placement = HOST) -> None:
        self._live = directory if isinstance(directory, LiveModel) else None
        self.directory = Path(str(directory))
        self._at = placement
        self._where: dict[str, _Stored] = {}
        self._open: tuple[Path, Any] | None = None  # at most one file, and the bytes that were read of it
        self._read = 0
        if self._live is not None:
            for name, tensor in self._live.tensors.items():
                self._where[rename(name)] = _in_memory(self.directory, name, tensor)
            return
        if not self.directory.is_dir():
            raise ModelFileError(self.directory, "no such directory; a Hugging Face model directory is needed")
        for path, names in self._find().items():
            headers = _headers(path)
            for name in names if names is not None else sorted(headers):
                if name not in headers:
                    raise ModelFileError(path, f"not in the file, although {_INDEX} says so", name)
                ours = rename(name)
                if ours in self._where:
                    other = self._where[ours]
                    raise ModelFileError(path, f"also in {other.path.name} as {other.name}", name)
                self._where[ours] = headers[name]

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

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._where)

    @property
    def nbytes(self) -> int:
        """Of all tensors, as they are stored, once `check` has passed them."""
        return sum(math.prod(stored.shape) * dtype_of(stored.dtype).itemsize for stored in self._where.values())

    def path(self, name: str) -> Path:
        """The file that holds a tensor; the directory's usual file for one that is missing (for error messages)."""
        if name in self._where:
            return self._where[name].path
        return self.directory if self._live is not None else self.directory / _SINGLE

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header."""
        return self._locate(name).shape

    def dtype(self, name: str) -> str:
        """From the header, in safetensors' spelling, such as `BF16`."""
        return self._locate(name).dtype

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
        """One tensor on the checkpoint's device, contiguous; on the host in its stored dtype."""
        stored, at = self._locate(name), self._at
        tensor = self._from_file(stored) if self._live is None else self._live.tensors[stored.name].detach()
        if not at.is_host:
            tensor = tensor.to(at.device)
            if tensor.is_floating_point():
                tensor = tensor if at.weights is None else tensor.to(at.weights)
                _check_finite(tensor, stored)
        return tensor.to(at.device).contiguous()

    def same(self, name: str, other: str) -> bool:
        """Whether two matrices have the same shape, dtype and values; without memory for them."""
        a, b = self._locate(name), self._locate(other)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        one: Any
        two: Any
        try:
            if self._live is not None:
                one, two = (self._live.tensors[stored.name].detach() for stored in (a, b))
                if one.data_ptr() == two.data_ptr() and one.stride() == two.stride():
                    return True
            else:
                one, two = (_open(stored.path, HOST.device).get_slice(stored.name) for stored in (a, b))
            return all(torch.equal(one[i : i + _ROWS], two[i : i + _ROWS]) for i in range(0, a.shape[0], _ROWS))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFileError(a.path, f"not readable: {error}", a.name) from error

    def _from_file(self, stored: _Stored) -> torch.Tensor:
        """On the checkpoint's device."""
        at = self._at
        if self._open is None or self._open[0] != stored.path or self._read > _RENEW:
            self._open, self._read = None, 0  # the file that was open is closed first
            self._open = stored.path, _open(stored.path, at.device)
        try:
            tensor: torch.Tensor = self._open[1].get_tensor(stored.name)
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelFileError(stored.path, f"not readable: {error}", stored.name) from error
        self._read += tensor.nbytes
        progress.read(tensor.nbytes)
        return tensor

    def _locate(self, name: str) -> _Stored:
        if name not in self._where:
            raise ModelFileError(self.path(name), "missing", name)
        return self._where[name]


def _in_memory(name: Path, tensor_name: str, tensor: torch.Tensor) -> _Stored:
    """A tensor as a file's header would have it. ModelFileError: one without values."""
    if tensor.is_meta:
        why = "on the meta device, so without values: offloaded, or never loaded"
        raise ModelFileError(name, why, tensor_name)
    return _Stored(name, tensor_name, tuple(tensor.shape), _SPELLINGS.get(tensor.dtype, str(tensor.dtype)))


def _check_finite(tensor: torch.Tensor, stored: _Stored) -> None:
    """Refuses a tensor with NaN or an infinity; it may be one by its dtype alone."""
    if not tensor.numel() or all(bool(torch.isfinite(bound)) for bound in torch.aminmax(tensor)):
        return
    bad = (~torch.isfinite(tensor)).nonzero()
    at = bad[0].tolist()
    dtype = str(tensor.dtype).removeprefix("torch.")
    first = tensor[tuple(at)].item()
    why = f"{len(bad)} of {tensor.numel()} values are NaN or infinite as {dtype}, first {first} at {at}"
    raise ModelFileError(stored.path, why, stored.name)


def _headers(path: Path) -> dict[str, _Stored]:
    """Every tensor of a file, which is closed again."""
    file = _open(path, HOST.device)
    names: list[str] = file.keys()
    slices = {name: file.get_slice(name) for name in names}
    return {name: _Stored(path, name, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}


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
