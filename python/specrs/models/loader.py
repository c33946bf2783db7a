"""Weights from a directory's files, checked against what the model calls for before any of them is read.

weights = Checkpoint(directory)
weights.check(expected_shapes)     # every missing, extra or misshapen tensor, from the headers alone
tensor = weights.load("model.norm.weight")
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specrs import progress
from specrs.models.errors import ModelFileError, one_line
from specrs.models.live import LiveModel, ModelSource
from specrs.models.placement import HOST, Placement
from specrs.models.weight_files import (
    FLOATS,
    INTEGERS,
    READING,
    SAFETENSORS,
    SPELLINGS,
    WeightFile,
    open_weights,
    weight_files,
)

# Written by old versions of transformers; derived from the config, so never read.
_DERIVED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|.*\.self_attn\.bias$|.*\.masked_bias$")


# Bytes read from a file before it is opened anew: bytes read through one mapping count as this process's memory.
_RENEW = 256 << 20
_ROWS = 4096  # rows of two tensors that are compared at a time


@dataclass(frozen=True)
class _Stored:
    """A tensor as its file's header has it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def dtype_of(name: str) -> torch.dtype:
    """A type that models have, by safetensors' name."""
    return {**FLOATS, **INTEGERS}[name]


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
        self._open: tuple[Path, WeightFile] | None = None  # at most one file, and the bytes that were read of it
        self._read = 0
        self._usual = self.directory if self._live is not None else self.directory / SAFETENSORS
        if self._live is not None:
            for name, tensor in self._live.tensors.items():
                self._where[rename(name)] = _in_memory(self.directory, name, tensor)
            return
        if not self.directory.is_dir():
            raise ModelFileError(self.directory, "no such directory; a Hugging Face model directory is needed")
        files, self._usual = weight_files(self.directory)
        for path, names in files.items():
            headers = _headers(path)
            for name in names if names is not None else sorted(headers):
                if name not in headers:
                    raise ModelFileError(path, "not in the file, although the index says so", name)
                ours = rename(name)
                if ours in self._where:
                    other = self._where[ours]
                    raise ModelFileError(path, f"also in {other.path.name} as {one_line(other.name)}", name)
                self._where[ours] = headers[name]

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._where)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they are stored, once `check` has passed them."""
        return sum(math.prod(stored.shape) * _bits(stored.dtype) // 8 for stored in self._where.values())

    def path(self, name: str) -> Path:
        """Return the file that holds a tensor; for a missing tensor the directory's usual file (for error messages)."""
        if name in self._where:
            return self._where[name].path
        return self._usual

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape, from the header."""
        return self._locate(name).shape

    def dtype(self, name: str) -> str:
        """Return the dtype, from the header, in safetensors' spelling, such as `BF16`."""
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
            allowed = INTEGERS if name in whole else FLOATS
            if self.dtype(name) not in allowed:
                raise ModelFileError(
                    self.path(name), f"dtype {self.dtype(name)}, need one of {', '.join(allowed)}", name
                )

    def load(self, name: str) -> torch.Tensor:
        """Load one tensor onto the checkpoint's device, contiguous; on the host in its stored dtype."""
        stored, at = self._locate(name), self._at
        tensor = self._from_file(stored) if self._live is None else self._live.tensors[stored.name].detach()
        if not at.is_host:
            tensor = tensor.to(at.device)
            if tensor.is_floating_point():
                tensor = tensor if at.weights is None else tensor.to(at.weights)
                _check_finite(tensor, stored)
        return tensor.to(at.device).contiguous()

    def same(self, name: str, other: str) -> bool:
        """Return whether two matrices have the same shape, dtype and values; without memory for them."""
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
                one, two = (open_weights(stored.path, HOST.device).get_slice(stored.name) for stored in (a, b))
            return all(torch.equal(one[i : i + _ROWS], two[i : i + _ROWS]) for i in range(0, a.shape[0], _ROWS))
        except READING as error:
            raise ModelFileError(a.path, f"not readable: {error}", a.name) from error

    def _from_file(self, stored: _Stored) -> torch.Tensor:
        """Load a tensor onto the checkpoint's device."""
        at = self._at
        if self._open is None or self._open[0] != stored.path or self._read > _RENEW:
            self._open, self._read = None, 0  # the file that was open is closed first
            self._open = stored.path, open_weights(stored.path, at.device)
        try:
            tensor = self._open[1].get_tensor(stored.name)
        except READING as error:
            raise ModelFileError(stored.path, f"not readable: {error}", stored.name) from error
        if (tuple(tensor.shape), SPELLINGS.get(tensor.dtype)) != (stored.shape, stored.dtype):
            raise ModelFileError(stored.path, "changed while it was read", stored.name)
        self._read += tensor.nbytes
        progress.read(tensor.nbytes)
        return tensor

    def _locate(self, name: str) -> _Stored:
        if name not in self._where:
            raise ModelFileError(self.path(name), "missing", name)
        return self._where[name]


def _bits(dtype: str) -> int:
    """Return the bits of a value, by its type's name: F8_E4M3 has 8; BOOL, whose name has no number, a byte."""
    digits = re.search(r"[0-9]+", dtype)
    return int(digits[0]) if digits else 8


def _in_memory(name: Path, tensor_name: str, tensor: torch.Tensor) -> _Stored:
    """Describe a tensor as a file's header would. ModelFileError: a tensor without values."""
    if tensor.is_meta:
        why = "on the meta device, so without values: offloaded, or never loaded"
        raise ModelFileError(name, why, tensor_name)
    return _Stored(name, tensor_name, tuple(tensor.shape), SPELLINGS.get(tensor.dtype, str(tensor.dtype)))


def _check_finite(tensor: torch.Tensor, stored: _Stored) -> None:
    """Refuse a tensor with NaN or an infinity; the conversion to its dtype alone may have made one."""
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
    file = open_weights(path, HOST.device)
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # safetensors' has no other way
    return {name: _Stored(path, name, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}


def _and_more(names: list[str]) -> str:
    if len(names) == 1:
        return ""
    listed = ", ".join(map(one_line, names[1:4]))
    return f", as for {len(names) - 1} more: {listed}{', ...' if len(names) > 4 else ''}"
